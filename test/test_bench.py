"""vlm bench: its stages run, what it counts is what the model's sizes say, and what cannot run says so. No test looks at a time."""
import json, os, struct, subprocess, sys

import pytest

from conftest import BUILD, ROOT, run

MODEL = os.environ.get("VLM_TEST_MODEL") or str(ROOT / "tiny" / "tiny.vlm")
FIGURES = {"tokens", "runs", "seconds", "spread", "tokens_per_second", "bytes", "flops", "bytes_per_second",
           "flops_per_second", "read_limit", "of_read", "of_peak"}
STEPS = 32  # of decoding, in a repetition


def bench(*args, **kw):
    r = run("vlm", "bench", "-m", MODEL, "--device", "cpu", "--json", *args, **kw)
    assert r.returncode == 0, r.stderr.decode()
    assert r.stdout.count(b"\n") == 1
    return json.loads(r.stdout)


def stages(text, *args):
    return bench("--stages", text, *args)["stages"]


def refused(r, *words, status):
    message = r.stderr.decode()
    assert r.returncode == status and r.stdout == b"" and message.count("\n") == 1, message
    for w in words:
        assert w in message, message


@pytest.fixture(scope="module")
def config():
    with open(MODEL, "rb") as f:
        meta = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))["__metadata__"]
    return json.loads(meta["config"])


def text_flops(c, T):
    """Products and causal attention of a prompt of T tokens, and the head's of its last."""
    t = c["text"]
    D, rows = t["head_dim"], t["heads"] + 2 * t["kv_heads"]
    layer = t["hidden"] * (rows * D + t["heads"] * D + 3 * t["ff"])
    attention = 2 * t["heads"] * D * T * (T + 1) / 2
    return 2 * (t["layers"] * (T * layer + attention) + t["vocab"] * t["hidden"])


def vision_flops(c, side):
    """A square picture of `side` patches: the windows' sizes squared are the pairs that meet."""
    v = c["vision"]
    P, C, window, wide = side * side, v["hidden"], v["window"] // v["patch"], v["merge"] ** 2 * v["hidden"]
    edges = [min(window, side - i) for i in range(0, side, window)]
    pairs = sum(n * n for n in edges) ** 2
    full = len(v["full_layers"])
    products = v["layers"] * P * C * (4 * C + 3 * v["ff"]) + P * C * 3 * v["temporal"] * v["patch"] ** 2
    merger = P // v["merge"] ** 2 * wide * (wide + v["out"])
    return 2 * (products + merger + 2 * C * ((v["layers"] - full) * pairs + full * P * P))


def test_keys_and_counts(config):
    o = bench("--repeat", "2", "--threads", "1", "--stages", "vision=168,prefill=100,decode=1,decode=3")
    assert set(o) == {"device", "threads", "type", "weights", "limits", "stages"}
    assert o["device"] == "cpu" and o["threads"] == 1 and o["weights"] == os.path.getsize(MODEL)
    assert all(o["limits"][k] > 0 for k in ("read", "f32", "bf16", "int8")) and o["limits"]["round_trip_ns"] is None
    vision, prefill, alone, three = o["stages"]
    for s in o["stages"]:
        assert set(s) == {"stage", "size"} | FIGURES
        assert len(s["runs"]) == 2 and min(s["runs"]) <= s["seconds"] <= max(s["runs"]) and s["spread"] >= 0
        assert all(s[k] > 0 for k in FIGURES - {"runs", "spread"})
        assert s["tokens_per_second"] == pytest.approx(s["tokens"] / s["seconds"], rel=1e-4)
        assert s["of_read"] == pytest.approx(s["bytes_per_second"] / s["read_limit"], rel=1e-4)
    assert vision["read_limit"] == prefill["read_limit"] == o["limits"]["read"]
    assert [s["tokens"] for s in o["stages"]] == [36, 100, STEPS, 3 * STEPS]
    assert vision["flops"] == pytest.approx(vision_flops(config, 12), rel=1e-5)
    assert prefill["flops"] == pytest.approx(text_flops(config, 100), rel=1e-5)
    # Weights are read once a step, for one sequence or three; what is added is keys, values and activations.
    t = config["text"]
    weights = 2 * (t["layers"] * t["hidden"] * ((2 * t["heads"] + 2 * t["kv_heads"]) * t["head_dim"] + 3 * t["ff"]) + t["vocab"] * t["hidden"])
    assert weights < alone["bytes"] / STEPS < three["bytes"] / STEPS < 1.5 * weights
    assert three["flops"] == pytest.approx(3 * alone["flops"], rel=1e-3)


def test_profile_adds_up():
    for s in stages("vision=112,prefill=64,decode=2", "--profile", "--repeat", "2"):
        ops = {op["name"].split()[0]: op for op in s["operations"]}
        assert {"linear", "rmsnorm", "rope", "glu", "engine"} <= set(ops)
        assert ("attention_segments" in ops) == ("patches" in ops) == (s["stage"] == "vision")
        assert ("attention_paged" in ops) == ("sample" in ops) == ("kv_store" in ops) == (s["stage"] != "vision")
        mean = sum(s["runs"]) / len(s["runs"])
        assert sum(op["seconds"] for op in s["operations"]) == pytest.approx(mean, rel=1e-3)
        assert sum(op["flops"] for op in s["operations"]) == pytest.approx(s["flops"], rel=1e-4)


def test_what_cannot_run_says_so():
    picture, prompt, many, crowd, fine = stages(
        "vision=1120,prefill=5000,decode=9,decode=8,prefill=16", "--max-seqs", "8", "--kv-blocks", "24", "--ctx", "384",
        "--repeat", "1")
    assert "--max-pixels" in picture["error"] and "5000" in prompt["error"] and "--max-seqs" in many["error"]
    assert "--kv-blocks" in crowd["error"] and "error" not in fine
    table = run("vlm", "bench", "-m", MODEL, "--stages", "decode=9,prefill=16", "--max-seqs", "8").stdout.decode()
    lines = [line.split() for line in table.splitlines() if line.startswith("  ")]
    assert [line[0] for line in lines] == ["stage", "decode", "prefill"] and "--max-seqs" in lines[1]


def test_repetitions_fill_the_context():
    (s,) = stages("decode=1", "--ctx", "128", "--repeat", "3")
    assert "--repeat" in s["error"] and "128" in s["error"]


@pytest.mark.parametrize("text", ["", ",", "x", "vision", "vision=", "vision=x", "vision=56", "vision=224x", "prefill=0", "decode=0",
                                  "decode=-1", "decode=5000", "speech=3", "vision =224", "decode=99999999999", "decode=1," * 33])
def test_bad_stages(text):
    refused(run("vlm", "bench", "-m", MODEL, "--stages", text), "--stages", status=1)


@pytest.mark.parametrize("args, words", [
    (["--load", "requests=1", "--stages", "decode=1"], ["--stages", "--load"]),
    (["--load", "requests=1", "--profile"], ["--profile", "--load"]),
    (["--repeat", "0"], ["--repeat"]), (["--repeat", "101"], ["--repeat"]), (["--trace", "x"], ["--trace", "--load"]),
    (["--type", "f32"], ["--type", "--shape"]), (["--roofline", "abacus"], ["abacus"]),
])
def test_wrong_usage(args, words):
    refused(run("vlm", "bench", *args), *words, status=2)


def test_round_trip():
    """Two threads on two cores know how far apart they are, two on one core do not, and neither waits long."""
    trip = bench("--stages", "decode=1", "--threads", "2")["limits"]["round_trip_ns"]
    assert trip is None or 1 < trip < 1e5
    core = str(min(os.sched_getaffinity(0)))
    r = subprocess.run(["taskset", "-c", core, BUILD / "vlm", "bench", "-m", MODEL, "--stages", "decode=1", "--threads", "2"],
                       capture_output=True, text=True, timeout=60)
    assert r.returncode == 0 and "from one thread to another" not in r.stdout


def test_limits_of_others_are_the_makers(config):
    o = bench("--stages", "decode=1", "--roofline", "h200")
    assert o["limits"] == {"read": 4.8e12, "f32": None, "bf16": 9.89e14, "int8": None, "round_trip_ns": None}
    assert 0 < o["stages"][0]["of_read"] < 1


@pytest.mark.parametrize("shape, kind, gigabytes", [("qwen2.5-vl-3b", "bf16", 7.5), ("qwen2.5-vl-3b", "f32", 15),
                                                    ("qwen2.5-vl-3b", "q8", 4.6), ("qwen2.5-vl-72b", "q4", 43)])
def test_shapes_are_planned_on_the_null_device(shape, kind, gigabytes):
    r = run("vlm", "bench", "--device", "null", "--shape", shape, "--type", kind, "--json")
    o = json.loads(r.stdout)
    assert o["type"] == kind and o["weights"] == pytest.approx(gigabytes * 1e9, rel=0.05)
    assert len(o["stages"]) == 8 and o["device"] == "null"
    assert all(0 < s["of_read"] <= 0.86 and s["spread"] < 0.01 for s in o["stages"])
    for s in o["stages"]:  # a roofline has bf16's peak only
        known = kind == "bf16" or s["stage"] == "vision" and kind != "f32"
        assert 0 < s["of_peak"] <= 0.61 if known else s["of_peak"] is None


# ---- beside a peer: one of shell scripts stands for it

def peer_run(folder, *args):
    return subprocess.run([sys.executable, ROOT / "test/bench_peer.py", folder, "--vlm", BUILD / "vlm", *args], capture_output=True, text=True)


def script(path, line):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{line}'\n")
    path.chmod(0o755)


@pytest.fixture()
def peer(tmp_path):
    script(tmp_path / "build/bin/llama-bench", '[{"avg_ts": 0.001}]')
    script(tmp_path / "build/bin/llama-batched-bench", '{"speed_tg": 1e9}')
    script(tmp_path / "peer", '{"image_tokens": 64, "encode_min_s": 1e6}')
    for name in ("models/m/config.json", "gguf/m-bf16.gguf", "gguf/m-mmproj-bf16.gguf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "vlm").mkdir()
    (tmp_path / "vlm/m-bf16.vlm").symlink_to(MODEL)
    return tmp_path


def test_peer_ratios(peer):
    r = peer_run(peer, "--models", "m:bf16", "--rounds", "2", "--threads", "1", "--rows", "vision=112", "prefill=20", "decode=1", "decode=3")
    assert r.returncode == 0, r.stderr
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in r.stdout.splitlines() if line.startswith("| m ")]
    assert [row[:2] for row in rows] == [["m bf16", s] for s in ("vision 112", "prefill 20", "decode 1", "decode 3")]
    for _, stage, own, other, ratio, between, limit, others in rows:
        low, high = (float(x) for x in between.split(" to "))
        ratio = float(ratio.strip("*"))
        assert low <= ratio <= high and 0 <= float(others) <= 1 and limit.endswith("GB/s" if "decode" in stage else "peak")
        assert ratio > 1000 if stage != "decode 3" else ratio < 1  # by what the scripts say
        assert float(own) > 0 and float(other) >= 0


@pytest.mark.parametrize("gone", ["build/bin/llama-bench", "peer", "models/m/config.json", "gguf/m-bf16.gguf", "gguf/m-mmproj-bf16.gguf"])
def test_peer_that_is_not_whole(peer, gone):
    (peer / gone).unlink()
    r = peer_run(peer, "--models", "m:bf16")
    assert r.returncode == 1 and r.stdout == "" and gone in r.stderr and "docs/speed.md" in r.stderr and r.stderr.count("\n") == 1


def test_peer_that_fails(peer):
    (peer / "peer").write_text("#!/bin/sh\necho no such thing >&2\nexit 3\n")
    r = peer_run(peer, "--models", "m:bf16", "--rows", "vision=112")
    assert r.returncode == 1 and "no such thing" in r.stderr
