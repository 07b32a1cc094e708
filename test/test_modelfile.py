"""The model file is hostile input: whatever is in it, the answer is a line that names the file, and exit status 1."""
import json
import os
import random
import struct
import subprocess
import sys

import pytest

from conftest import ROOT, run

MODEL = ROOT / os.environ.get("VLM_TEST_MODEL", "tiny/tiny.vlm")


@pytest.fixture(scope="module")
def good():
    raw = MODEL.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


def pack(header, data, pad=64):
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % pad)
    return struct.pack("<Q", len(text)) + text + data


def refused(tmp_path, raw, *words):
    path = tmp_path / "bad.vlm"
    path.write_bytes(raw)
    done = run("vlm", "-m", path, "-p", "hello")
    message = done.stderr.decode()
    assert done.returncode == 1, message
    assert message.count("\n") == 1 and all(w in message for w in words), message


def test_no_model_file(tmp_path):
    refused(tmp_path, b"", "bad.vlm", "weights_export.py")
    refused(tmp_path, b"<!DOCTYPE html><html>Not found</html>" * 3, "bad.vlm", "weights_export.py")
    refused(tmp_path, struct.pack("<Q", 1 << 63) + b"{}" * 50, "bad.vlm")
    refused(tmp_path, struct.pack("<Q", 20) + b"{" * 20, "bad.vlm", "JSON")
    refused(tmp_path, struct.pack("<Q", 100000) + b"[" * 100000, "bad.vlm")
    refused(tmp_path, struct.pack("<Q", 100000) + b'{"a":' + b"[" * 99995, "bad.vlm", "JSON")
    done = run("vlm", "-m", tmp_path / "absent.vlm", "-p", "hello")
    assert done.returncode == 1 and b"absent.vlm" in done.stderr
    done = run("vlm", "-m", tmp_path, "-p", "hello")
    assert done.returncode == 1 and b"not a file" in done.stderr


def test_cut_short(tmp_path, good):
    raw = pack(*good)
    for size in (7, 8, 100, len(raw) // 2, len(raw) - 1):
        refused(tmp_path, raw[:size], "bad.vlm")
    refused(tmp_path, raw + b"x", "bad.vlm")


def change(header, **fields):
    return header | {"__metadata__": header["__metadata__"] | fields}


def test_versions_and_types(tmp_path, good):
    header, data = good
    refused(tmp_path, pack(change(header, format="vlm 9"), data), "vlm 9")
    refused(tmp_path, pack(change(header, architecture="llama"), data), "llama")
    refused(tmp_path, pack(change(header, type="q3"), data), "q3")
    refused(tmp_path, pack({k: v for k, v in header.items() if k != "__metadata__"}, data), "vlm 1")


def test_tensors(tmp_path, good):
    header, data = good
    name = "text.00.qkv"
    entry = header[name]
    begin, end = entry["data_offsets"]

    def with_entry(**fields):
        return pack(header | {name: entry | fields}, data)

    refused(tmp_path, pack({k: v for k, v in header.items() if k != name}, data), "bad.vlm")
    refused(tmp_path, with_entry(data_offsets=[begin + 64, end + 64]), "bad.vlm")
    refused(tmp_path, with_entry(data_offsets=[begin, 1 << 62]), name)
    refused(tmp_path, with_entry(data_offsets=[-64, end - begin - 64]), name)
    refused(tmp_path, with_entry(data_offsets=["a", "b"]), name)
    refused(tmp_path, with_entry(dtype="F16"), name, "F16")
    refused(tmp_path, with_entry(dtype="F32"), name)
    refused(tmp_path, with_entry(shape=entry["shape"][::-1]), name)
    refused(tmp_path, with_entry(shape=[1 << 40, 1 << 40]), name)
    refused(tmp_path, with_entry(shape=[-1, 5]), name)
    refused(tmp_path, with_entry(shape=[1] * 9 + entry["shape"]), name)
    refused(tmp_path, pack(header, data, pad=1)[:8] + pack(header, data, pad=1)[8:], "bad.vlm") if (8 + len(json.dumps(header))) % 64 else None


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """A q4 model, its embedding and head in q8."""
    folder = tmp_path_factory.mktemp("q4")
    subprocess.run([sys.executable, ROOT / "test/make_model.py", folder / "hf", "--shape", "odd-b"], check=True)
    subprocess.run([sys.executable, ROOT / "weights_export.py", folder / "hf", folder / "q4.vlm", "--type", "q4"], check=True)
    raw = (folder / "q4.vlm").read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


def test_quantised_tensors(tmp_path, quantised):
    """The tiles must be those of the config's sizes and of the types that the metadata give."""
    header, data = quantised
    (tmp_path / "good.vlm").write_bytes(pack(header, data))
    assert run("vlm", "-m", tmp_path / "good.vlm", "-p", "hello", "-n", "3").returncode == 0
    for name in ("text.01.down", "text.embed"):
        entry = header[name]
        tiles, pairs, size = entry["shape"]
        for shape in ([tiles, size, pairs], [tiles * 2, pairs, size // 2], [tiles, pairs * size], [tiles, pairs, size, 1]):
            refused(tmp_path, pack(header | {name: entry | {"shape": shape}}, data), name, str(shape)[1:-1], "export")
        refused(tmp_path, pack(header | {name: entry | {"dtype": "BF16", "shape": [tiles, pairs, size // 2]}}, data), name)
    for types in ({"type": "q8"}, {"embed_type": "q4"}, {"head_type": "bf16"}, {"vision_type": "q8"}):
        refused(tmp_path, pack(change(header, **types), data), "bad.vlm", "U8" if "vision_type" in types or "type" not in types else "")
    refused(tmp_path, pack(change(header, vision_type="f32"), data), "f32")
    refused(tmp_path, pack(change(header, head_type="q5"), data), "q5")
    config = json.loads(header["__metadata__"]["config"])
    for part, key, value in (("text", "hidden", 184), ("text", "ff", 1000), ("text", "vocab", 16 + config["text"]["vocab"])):
        other = json.loads(json.dumps(config))
        other[part][key] = value
        refused(tmp_path, pack(change(header, config=json.dumps(other)), data))


@pytest.mark.parametrize("part,key,value", [
    ("text", "layers", 0), ("text", "layers", 100000), ("text", "hidden", -1), ("text", "heads", 7), ("text", "head_dim", 31), ("text", "head_dim", 1 << 20),
    ("text", "mrope_section", [1, 2]), ("text", "mrope_section", "x"), ("text", "vocab", 1 << 30), ("text", "eps", "x"), ("text", "rope_theta", None),
    ("vision", "layers", 129), ("vision", "heads", 3), ("vision", "patch", 0), ("vision", "merge", 0), ("vision", "window", 1), ("vision", "full_layers", [999]),
    ("vision", "out", 64), ("vision", "temporal", 1.5),
])  # fmt: skip
def test_config(tmp_path, good, part, key, value):
    header, data = good
    config = json.loads(header["__metadata__"]["config"])
    config[part][key] = value
    refused(tmp_path, pack(change(header, config=json.dumps(config)), data))
    del config[part][key]
    refused(tmp_path, pack(change(header, config=json.dumps(config)), data))


def test_metadata_that_is_no_json(tmp_path, good):
    header, data = good
    for key in ("config", "preprocess", "template", "special_tokens"):
        for value in ("", "[", "[]", "{}", "null", '{"text": 3}'):
            refused(tmp_path, pack(change(header, **{key: value}), data))


def test_random_damage(tmp_path, good):
    """Flipped bytes of the header either change nothing that matters or are refused; nothing crashes."""
    raw = bytearray(pack(*good))
    (n,) = struct.unpack("<Q", raw[:8])
    dice = random.Random(7)
    for _ in range(150):
        bad = bytearray(raw)
        for _ in range(dice.randint(1, 4)):
            bad[dice.randrange(8 + n)] = dice.choice(b"\x00\xff0129{}[]\",:-eE") if dice.random() < 0.7 else dice.randrange(256)
        path = tmp_path / "bad.vlm"
        path.write_bytes(bad)
        done = run("vlm", "-m", path, "-p", "hello", "-n", "2", timeout=60)
        assert done.returncode in (0, 1), (done.returncode, done.stderr)
