"""The test programs in C: operations against double precision, schedules, and a long run of different pictures."""
import concurrent.futures
import os
import subprocess
import sys

import pytest

from conftest import ROOT, run

MODEL = os.environ.get("VLM_TEST_MODEL", "tiny/tiny.vlm")
SCHEDULES = int(os.environ.get("VLM_SCHEDULES", "1000"))  # of the smallest model; others take a part
SEED = os.environ.get("VLM_SEED", "1")


def closing_line(done):
    print(done.stdout.decode()[-3000:], done.stderr.decode()[-3000:])
    assert done.returncode == 0
    passed, failed = done.stdout.decode().splitlines()[-1].split(", ")
    assert failed == "0 failed" and int(passed.split()[0]) > 100


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    """A random model as small as it goes, of a type."""
    folder = tmp_path_factory.mktemp("mini")
    subprocess.run([sys.executable, ROOT / "test/make_model.py", folder / "hf", "--shape", "mini"], check=True)

    def export(kind, *flags):
        out = folder / f"{kind}.vlm"
        subprocess.run([sys.executable, ROOT / "weights_export.py", folder / "hf", out, "--type", kind, *flags], check=True, capture_output=True)
        return out

    return export


def schedules(model, n):
    """n random schedules, in as many programs at a time as there are cores."""
    jobs = max(1, min(os.cpu_count(), n // 50))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in pool.map(lambda i: run("test_engine", model, -(-n // jobs), int(SEED) + i, timeout=5000), range(jobs)):
            closing_line(done)


@pytest.mark.parametrize("build", ["avx512", "avx2", "plain"])
def test_ops(build):
    """Every build of the CPU device that this processor can run."""
    done = run("test_ops", env=os.environ | {"VLM_CPU": build})
    if b"VLM_CPU" in done.stderr:
        assert build != "plain"
        pytest.skip("this processor has not got it")
    closing_line(done)


def test_schedules_of_the_shipped_model():
    schedules(MODEL, max(5, SCHEDULES // 50))


def test_schedules_of_the_smallest_model(mini):
    schedules(mini("f32"), SCHEDULES)


@pytest.mark.parametrize("kind, vision", [("q8", "q8"), ("q4", "bf16")])
def test_schedules_quantised(mini, kind, vision):
    schedules(mini(kind, "--vision-type", vision), max(5, SCHEDULES // 10))


def test_different_pictures_leave_nothing():
    closing_line(run("test_engine", MODEL, "soak", os.environ.get("VLM_PICTURES", "500"), timeout=3000))


@pytest.mark.parametrize("name", ["json", "http"])
def test_corpus(name):
    """What a fuzzer begins with, each input once: nothing that its function checks is wrong."""
    files = sorted((ROOT / "test/fuzz/corpus" / name).iterdir())
    done = run(f"replay_{name}", *files)
    assert done.returncode == 0 and done.stdout.decode() == f"{len(files)} inputs\n", done.stderr.decode()[-3000:]
