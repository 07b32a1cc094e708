"""The test programs in C: operations against double precision, and the engine's schedules."""
import os

from conftest import run

MODEL = os.environ.get("VLM_TEST_MODEL", "tiny/tiny.vlm")


def closing_line(done):
    print(done.stdout.decode()[-3000:], done.stderr.decode()[-3000:])
    assert done.returncode == 0
    passed, failed = done.stdout.decode().splitlines()[-1].split(", ")
    assert failed == "0 failed" and int(passed.split()[0]) > 100


def test_ops():
    closing_line(run("test_ops"))


def test_engine():
    """VLM_SCHEDULES and VLM_SEED ask for more, or for others."""
    closing_line(run("test_engine", MODEL, os.environ.get("VLM_SCHEDULES", "60"), os.environ.get("VLM_SEED", "1"), timeout=3000))
