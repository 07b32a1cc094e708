"""vlm.cu on the CPU (test/cuda_on_cpu.h), as `make test-cuda` builds it: its operations, the faults that the emulation
must find, the layout of the tensor core's fragments, and the small model's text."""
import ast
import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PLAIN, ASAN, RACES = ROOT / "build/cuda", ROOT / "build/cuda-asan", ROOT / "build/cuda-races"


def run(program, *args, seed=0, **kw):
    env = os.environ | {"CUDA_ON_CPU_SEED": str(seed)}
    return subprocess.run([str(program), *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800, **kw)


def test_gpu_check(tmp_path):
    """test/gpu_check.sh as far as the emulation goes, and its table of what `vlm bench` reports."""
    done = subprocess.run(["sh", "test/gpu_check.sh", "emulated"], cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "4 passed, 0 failed", done.stdout + done.stderr
    stages = [{"stage": "decode", "size": 1, "seconds": 0.002, "tokens_per_second": 500, "bytes_per_second": 3e12, "flops_per_second": 6e12},
              {"stage": "vision", "size": 9999, "error": "too large"}]
    (tmp_path / "bench.json").write_text(json.dumps({"weights": 7.5e9, "stages": stages}))
    table = subprocess.run([sys.executable, ROOT / "test/gpu_table.py", "4e12", "6e14", "3b", tmp_path / "bench.json"], capture_output=True, text=True)
    assert "| decode 1 | 2.00 | 500 | 3000 (75%) | 6.0 (1%) | 85% of the copy |" in table.stdout, table
    assert "| vision 9999 | too large |" in table.stdout


@pytest.mark.parametrize("build,seed", [(PLAIN, 0), (PLAIN, 1), (PLAIN, 2), (PLAIN, 3), (ASAN, 0), (ASAN, 1), (RACES, 0)])
def test_ops(build, seed):
    done = run(build / "test_ops", "cuda", seed=seed)
    print(done.stdout[-2000:], done.stderr[-4000:])
    passed, failed = done.stdout.splitlines()[-1].split(", ")
    assert done.returncode == 0 and failed == "0 failed" and int(passed.split()[0]) > 500


# Which build finds a fault, under which seed, and what it says.
FAULTS = [
    (PLAIN, 0, "barrier-divergence", "__syncthreads divergence: thread 0 is at test/cuda_faults.cu:"),
    (PLAIN, 0, "barrier-exit", "thread 5 has left the kernel"),
    (PLAIN, 0, "warp-divergence", "warp divergence: lane 31 is at test/cuda_faults.cu:"),
    (PLAIN, 0, "warp-exit", "lane 8 has left the kernel"),
    (PLAIN, 0, "shuffle-mask", "shuffle from lane 9 outside the mask 000000ff"),
    (PLAIN, 0, "shared-room", "the kernel uses 512 bytes of shared memory, its launch gave 256"),
    (PLAIN, 0, "copy-misaligned", "a misaligned cp.async of 16 bytes"),
    (PLAIN, 0, "past-allocation", "no such address"),
    (PLAIN, 0, "missing-barrier", "the values are wrong"),
    (PLAIN, 1, "missing-wait", "the values are wrong"),  # odd seeds: the copy lands at the wait, so never
    (PLAIN, 0, "uninitialised-shared", "the values are wrong: their sum is"),
    (PLAIN, 0, "uninitialised-device", "the values are wrong: their sum is"),
    (PLAIN, 0, "host-touches", "the host touches device memory"),
    (PLAIN, 0, "host-argument", "is no device memory"),
    (PLAIN, 0, "too-many-threads", "a block of 2048 threads"),
    (PLAIN, 0, "too-many-blocks", "a grid of 1 x 70000 blocks"),
    (PLAIN, 0, "too-much-shared", "65536 bytes of shared memory, over the 49152"),
    (PLAIN, 0, "copy-too-long", "leaves device memory"),
    (PLAIN, 0, "no-synchronise", "the values are wrong"),
    (ASAN, 0, "shared-overrun", "AddressSanitizer: "),
    (ASAN, 0, "misaligned-vector", "misaligned address"),
    (RACES, 0, "late-barrier", "race on shared memory"),
    (RACES, 0, "block-race", "race on device memory"),
]


@pytest.mark.parametrize("build,seed,name,says", FAULTS, ids=[f[2] for f in FAULTS])
def test_fault_is_found(build, seed, name, says):
    done = run(build / "cuda_faults", name, seed=seed)
    assert done.returncode != 0 and says in done.stderr, done.stderr


@pytest.mark.parametrize("seed", range(4))
def test_faultless(seed):
    """The detectors stay silent where nothing is wrong."""
    for build in (PLAIN, ASAN, RACES):
        done = run(build / "cuda_faults", "none", seed=seed)
        assert done.returncode == 0 and not done.stderr, done.stderr


def cute(shape, stride, index):
    """Where a CuTe layout puts `index`: coordinates count the leftmost mode fastest, at every level."""
    at = 0
    for s, d in zip(shape, stride):
        at, index = at + index % s * d, index // s
    return at


def cute_layouts():
    """{operand: ((threads, values), their strides)} of mma.sync m16n8k16 on bf16, read from CuTe's own header: (thread, value)
    -> element, counted by columns in A (16 x 16), B (8 x 16) and C (16 x 8)."""
    header = pathlib.Path(sysconfig.get_paths()["purelib"], "cutlass_library/source/include/cute/atom/mma_traits_sm80.hpp")
    text = header.read_text()

    def body(name):
        base, own = re.search(rf"struct MMA_Traits<{name}>(?:\s*:\s*MMA_Traits<(\w+)>)?\s*{{(.*?)}};", text, re.S).groups()
        return own + (body(base) if base else "")

    out = {}
    for operand in "ABC":
        layout = re.search(rf"using {operand}Layout\s*=\s*(.*?);", body("SM80_16x8x16_F32BF16BF16F32_TN"), re.S)[1]
        if layout.isidentifier():
            layout = re.search(rf"using {layout}\s*=\s*(.*?);", text, re.S)[1]
        out[operand] = ast.literal_eval(re.sub(r"Layout|Shape|Stride|_|\s", "", layout).replace("<", "(").replace(">", ")"))
    return out


def places(layout, rows):
    (threads, values), (thread_strides, value_strides) = layout
    n = int(np.prod(values))
    at = np.array([[cute(threads, thread_strides, t) + cute(values, value_strides, v) for v in range(n)] for t in range(32)])
    return at % rows, at // rows


def test_fragment_layout():
    """The emulated mma multiplies matrices that CuTe's layouts take apart: random small whole numbers, exact in bf16."""
    rng, layouts = np.random.default_rng(7), cute_layouts()
    for _ in range(5):
        a, b = rng.integers(-8, 9, (16, 16)).astype(np.float32), rng.integers(-8, 9, (8, 16)).astype(np.float32)
        text = []
        for name, m in (("A", a), ("B", b)):
            upper = m[places(layouts[name], len(m))].view(np.uint32) >> 16
            text += [f"{row[i] | row[i + 1] << 16:x}" for row in upper for i in range(0, len(row), 2)]
        done = run(PLAIN / "cuda_faults", "layout", input="\n".join(text))
        c = np.array([line.split() for line in done.stdout.splitlines()], dtype=np.float32)
        assert np.array_equal(c, (a @ b.T)[places(layouts["C"], 16)])


def schedules(model, n):
    done = run(PLAIN / "test_engine", str(model), str(n), "1", "cuda")
    passed, failed = done.stdout.splitlines()[-1].split(", ")
    assert done.returncode == 0 and failed == "0 failed" and int(passed.split()[0]) > 100, done.stdout[-2000:] + done.stderr


def test_schedules(tmp_path):
    """Batches, chunks, prefixes, preemption: random schedules give each request the bits that it gets alone."""
    schedules("tiny/tiny.vlm", 1)
    subprocess.run([sys.executable, ROOT / "test/make_model.py", tmp_path / "hf", "--shape", "mini"], check=True)
    subprocess.run([sys.executable, ROOT / "weights_export.py", tmp_path / "hf", tmp_path / "mini.vlm"], check=True, capture_output=True)
    schedules(tmp_path / "mini.vlm", 25)


def test_map():
    """Every byte that the driver reports has an owner: the parts' sum is the total, with nothing left over."""
    m = json.loads(run(PLAIN / "vlm", "map", "--device", "cuda", "--json").stdout)
    d, owners = m["driver"], {o["name"]: o["bytes"] for o in m["owners"]}
    assert sum(owners.values()) == m["total"]
    assert d["context"] + sum(owners.values()) - owners["io"] + d["slack"] + d["free"] == d["total"]
    before = d["total"] - d["context"]
    assert before * 0.85 < m["total"] <= before * 0.9  # the default of --memory
    table = run(PLAIN / "vlm", "map", "--device", "cuda").stdout
    assert all(f" {d[part]} " in table.replace("\n", " \n") for part in d)


@pytest.mark.parametrize("seed", [0, 1])
def test_small_model(seed):
    """The emulated device writes what the CPU writes, token for token: a picture, a chunked prefill, a decode."""
    asks = ["-i", "tiny/samples/five.png", "-p", "What is in the picture?", "-n", "6", "--temperature", "0", "--json"]
    sizes = ["--ctx", "256", "--max-batch-tokens", "40", "--max-seqs", "2"]
    both = [run(PLAIN / "vlm", "--device", d, *asks, *sizes, seed=seed) for d in ("cpu", "cuda")]
    assert all(done.returncode == 0 for done in both), both
    assert json.loads(both[0].stdout)["token_ids"] == json.loads(both[1].stdout)["token_ids"]
