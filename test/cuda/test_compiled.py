"""What nvcc makes of vlm.cu, read without a GPU: no register is spilled, the matrix kernels use the tensor cores, and
what decoding streams comes by 128-bit loads, many at a time."""
import os, pathlib, re, shutil, subprocess, sysconfig
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
OBJECT, LOG = ROOT / "build/cuda.o", ROOT / "build/cuda.o.log"
GPUS = ["sm_80", "sm_90", "sm_100"]
pytestmark = pytest.mark.skipif(not LOG.exists(), reason="no nvcc on this machine: `make cuda` has not run")


def demangled(names):
    return subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()


def tool(name):
    """Of the toolkit, or of the package nvidia-cuda-`name`."""
    packaged = sorted(pathlib.Path(sysconfig.get_paths()["purelib"], "nvidia").glob(f"*/bin/{name}"))
    found = shutil.which(name) or (str(packaged[-1]) if packaged else None)
    assert found, f"{name} is missing: pip install -r test/cuda-requirements.txt"
    os.chmod(found, 0o755) if not os.access(found, os.X_OK) else None
    return found


@pytest.fixture(scope="module")
def sass():
    """{gpu: {kernel: [opcode, ...]}}"""
    env = os.environ | {"PATH": f"{pathlib.Path(tool('nvdisasm')).parent}:{os.environ['PATH']}"}
    out = {}
    for gpu in GPUS:
        text = subprocess.run([tool("cuobjdump"), "-sass", "-arch", gpu, str(OBJECT)], env=env, capture_output=True, text=True, check=True).stdout
        parts = re.split(r"\n\s*Function : (\w+)\n", text)
        names = demangled(parts[1::2])
        code = [re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", body) for body in parts[2::2]]
        out[gpu] = {name.removeprefix("void ").split("(")[0]: ops for name, ops in zip(names, code)}
    return out


def test_no_spills():
    spills = re.findall(r"Function properties for (\w+)\n\s*\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", LOG.read_text())
    assert len(spills) >= len(GPUS) * 30
    assert not [s for s in spills if s[1:] != ("0", "0")]


def test_no_warnings():
    assert "warning" not in LOG.read_text()


@pytest.mark.parametrize("gpu", GPUS)
def test_tensor_cores(sass, gpu):
    kernels = {k: ops for k, ops in sass[gpu].items() if k.startswith(("linear_rows", "linear_tile", "attend_tiles"))}
    assert len(kernels) == 14
    for name, ops in kernels.items():
        assert any(op.startswith("HMMA.16816.F32.BF16") for op in ops), name
    for name, ops in kernels.items():
        if name.startswith("linear_tile") and name.endswith("true>"):
            assert any(op.startswith("LDGSTS") and "128" in op for op in ops) and any(op == "LDS.128" for op in ops), name


@pytest.mark.parametrize("gpu", GPUS)
def test_wide_loads(sass, gpu):
    """Weights, and keys and values, come 16 bytes a lane; a warp of the decode kernel has at least 12 loads under way."""
    for rows in (1, 2, 4):
        ops = sass[gpu][f"linear_rows<{rows}, true>"]
        streamed = [i for i, op in enumerate(ops) if op.startswith("LDG") and "128" in op]
        first = next(i for i, op in enumerate(ops) if op.startswith("HMMA"))
        assert sum(i < first for i in streamed) >= 8 + 4 * rows, f"linear_rows<{rows}>: loads wait for products"
    for D in (32, 64, 80, 128):
        assert sum("LDG" in op and "128" in op for op in sass[gpu][f"attend_tiles<{D}>"]) >= 8, D
