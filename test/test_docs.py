"""What the documents quote from commands is what the commands print now."""
import subprocess
import sys

from conftest import BUILD, ROOT


def test_documents_are_up_to_date():
    if BUILD.name != "build":
        return  # they quote the plain build
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
