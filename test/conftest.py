"""Shared by all tests: where the build is, how to run a program of it, and the closing line."""
import os, pathlib, subprocess
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / os.environ.get("VLM_BUILD", "build")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the program sets it for itself
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def run(program, *args, **kw):
    """Run a program of the build (`vlm`, `test_ops`, ...) in the project's folder; bytes in and out."""
    kw.setdefault("timeout", 600)
    return subprocess.run([str(BUILD / program), *map(str, args)], cwd=ROOT, capture_output=True, **kw)


@pytest.fixture(scope="session")
def root():
    return ROOT


def pytest_terminal_summary(terminalreporter):
    stats = terminalreporter.stats
    failed = len(stats.get("failed", [])) + len(stats.get("error", []))
    terminalreporter.write_line(f"{len(stats.get('passed', []))} passed, {failed} failed")
