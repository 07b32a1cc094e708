"""The shipped model still sees: the fixed sample in tiny/heldout/, through the program, with a threshold per skill."""
import os
import subprocess
import sys

from conftest import BUILD, ROOT


def test_no_skill_has_dropped():
    done = subprocess.run([sys.executable, ROOT / "tiny/measure.py", "--quick", "--vlm", BUILD / "vlm"], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0


def test_the_model_is_small():
    assert os.path.getsize(ROOT / "tiny/tiny.vlm") < 16 << 20
