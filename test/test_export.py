"""weights_export.py: what it writes, tensor by tensor, and what it refuses. Checkpoints are random ones of odd shapes."""

import json
import resource
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
import safetensors
from conftest import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "test")]
import make_model
import vlm_to_hf
import weights_export

TINY = ROOT / "tiny" / "tiny.vlm"


def run(folder, out, *args, **kw):
    """The program, as people run it."""
    command = [sys.executable, ROOT / "weights_export.py", folder, out, *args]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, **kw)


def exported(folder, out, *args):
    """The same within this process, which is faster."""
    weights_export.main(list(map(str, (folder, out, *args))))
    return out


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint, not to be changed."""
    return make_model.make(tmp_path_factory.mktemp("base") / "hf", "odd-b")


@pytest.fixture
def folder(base, tmp_path):
    """A copy to damage."""
    return shutil.copytree(base, tmp_path / "hf")


# ----------------------------------------------------------------------------------------------------------------------
# What is written


def rounded(values, dtype):
    """As a checkpoint of `dtype` keeps them, as f32."""
    if dtype == "bf16":
        return (make_model.to_bf16(values).astype(np.uint32) << 16).view(np.float32)
    return values.astype({"f16": np.float16, "f32": np.float32}[dtype]).astype(np.float32)


@pytest.mark.parametrize("shape", ["odd-a", "odd-b"])
@pytest.mark.parametrize("layout, names", [("flat", "hub"), ("nested", "new")])
@pytest.mark.parametrize(
    "dtype, kind", [("bf16", "bf16"), ("bf16", "f32"), ("f32", "bf16"), ("f32", "f32"), ("f16", "f32")]
)
def test_every_value(tmp_path, shape, layout, names, dtype, kind):
    """Each tensor of the checkpoint is found again in the file, in its place and rounded once."""
    hf = make_model.make(tmp_path / "hf", shape, seed=3, layout=layout, names=names, dtype=dtype)
    model = vlm_to_hf.Model(exported(hf, tmp_path / "m.vlm", "--type", kind))
    config, vocab = model.json("config"), model["text.embed"].shape[0]
    found = dict(vlm_to_hf.vision_tensors(model, config["vision"])) | dict(
        vlm_to_hf.text_tensors(model, config["text"])
    )
    wanted = dict(make_model.tensors(make_model.SHAPES[shape], vocab))
    assert found.keys() == wanted.keys()
    for name, size in wanted.items():
        values = rounded(np.concatenate(list(make_model.draw(name, size, 3))), dtype).reshape(size)
        if found[name].dtype == np.uint16:
            assert kind == "bf16" and np.array_equal(found[name], make_model.to_bf16(values)), name
        else:
            assert (kind == "f32" or len(size) == 1) and np.array_equal(found[name], values), name


def steps(values, kind):
    """Half a step of each value's group of 64: how far rounding may take it, with the scale's own rounding to f16."""
    rows, columns = values.shape
    groups = np.zeros((rows, -(-columns // 64) * 64), np.float32)
    groups[:, :columns] = values
    most = np.abs(groups.reshape(rows, -1, 64)).max(-1).repeat(64, 1)[:, :columns]
    return most / (127 if kind == "q8" else 8) * (0.5 + 127 * 2**-11) + 2**-24


@pytest.mark.parametrize("shape", ["odd-a", "odd-b"])
@pytest.mark.parametrize("kind", ["q8", "q4"])
def test_quantised_values(tmp_path, shape, kind):
    """Every matrix, whatever its sizes, within half a step of the scale that keeps its largest numbers (with q4 cut numbers
    may be further off, but no group's squared error grows by the cutting); vectors exactly."""
    hf = make_model.make(tmp_path / "hf", shape, seed=3, dtype="f32")
    all_types = [f"--{part}-type={kind}" for part in ("embed", "vision")]
    model = vlm_to_hf.Model(exported(hf, tmp_path / "m.vlm", "--type", kind, *all_types))
    config, vocab = model.json("config"), model["text.embed"].shape[0]
    found = dict(vlm_to_hf.vision_tensors(model, config["vision"])) | dict(vlm_to_hf.text_tensors(model, config["text"]))
    for name, size in make_model.tensors(make_model.SHAPES[shape], vocab):
        values = np.concatenate(list(make_model.draw(name, size, 3))).reshape(size).astype(np.float32)
        if len(size) == 1:
            assert np.array_equal(found[name], values), name
            continue
        values, got = values.reshape(size[0], -1), found[name].reshape(size[0], -1)
        error, bound = np.abs(got - values), steps(values, kind)
        if kind == "q8":
            assert (error <= bound).all(), name
        else:  # rounding without cutting errs by a third of a half step's square on average
            assert np.square(error).mean() < np.square(bound).mean() / 3 * 1.1, name
            assert (error <= 5 * bound).all(), name


def test_quantised_types(base, tmp_path):
    """Which matrices are of which type, by default and as asked; the reader's bytes; what does not go together."""

    def types(*args):
        model = vlm_to_hf.Model(exported(base, tmp_path / "m.vlm", *args))
        kinds = {n: e["dtype"] for n, e in model.header.items()}
        strings = {k: v for k, v in model.strings.items() if k.endswith("type")}
        return [kinds[x] for x in ("text.00.qkv", "text.embed", "text.head", "vision.00.qkv")], strings, model

    kinds, strings, model = types("--type", "q8")
    assert kinds == ["U8", "U8", "U8", "BF16"] and strings == {"type": "q8", "vision_type": "bf16"}
    assert model.header["text.00.qkv"]["shape"] == [-(-7 * 24 // 16), 1, 2 * 1024 + 64]  # 120 columns are two groups
    kinds, strings, model = types("--type", "q4")
    assert strings == {"type": "q4", "embed_type": "q8", "head_type": "q8", "vision_type": "bf16"}
    assert model.header["text.00.qkv"]["shape"] == [-(-7 * 24 // 16), 1, 2 * 512 + 64]
    assert model.header["text.head"]["shape"][1:] == [1, 2 * 1024 + 64]
    kinds, strings, _ = types("--type", "q4", "--embed-type", "bf16", "--head-type", "q4", "--vision-type", "q8")
    assert kinds == ["U8", "BF16", "U8", "U8"]
    assert strings == {"type": "q4", "embed_type": "bf16", "vision_type": "q8"}
    kinds, strings, _ = types("--type", "bf16", "--head-type", "q8")
    assert kinds == ["BF16", "BF16", "U8", "BF16"] and strings == {"type": "bf16", "head_type": "q8"}
    for args in (["--type", "f32", "--head-type", "q8"], ["--type", "q8", "--vision-type", "f32"]):
        with pytest.raises(SystemExit, match="f32 does not go together"):
            exported(base, tmp_path / "x.vlm", *args)
    tied = make_model.make(tmp_path / "tied", "odd-a")
    with pytest.raises(SystemExit, match="--embed-type and --head-type"):
        exported(tied, tmp_path / "x.vlm", "--type", "q4", "--head-type", "q4")
    assert not (tmp_path / "x.vlm").exists()


def test_what_quantised_types_cannot_hold(tmp_path):
    """A number beyond f16's range is refused by name; groups of zeros and of tiny numbers come out as they should."""
    values = np.zeros((16, 100), np.float32)
    values[1] = np.linspace(-1e-6, 1e-6, 100)
    values[2, 5] = 3
    for kind in ("q8", "q4"):
        ((tiles, _),) = weights_export.in_tiles("x", kind, [values])
        back = vlm_to_hf.dequantise(tiles, 16, 100)
        assert not back[0].any() and (np.abs(back[1] - values[1]) <= 1e-6).all()
        assert abs(back[2, 5] - 3) <= 3 * 2**-11 and not np.delete(back[2], 5).any()
        values[3, 3] = 7e4
        with pytest.raises(weights_export.ExportError, match="text.x.*65504"):
            list(weights_export.in_tiles("text.x", kind, [values]))
        values[3, 3] = 0


@pytest.mark.parametrize("kind", ["q8", "q4"])
def test_pieces_do_not_show(kind):
    """However a matrix comes in pieces, the tiles are the same, and the values for the identity too."""
    values = np.random.default_rng(5).standard_normal((53, 70)).astype(np.float32)
    whole = np.concatenate([tiles for tiles, _ in weights_export.in_tiles("x", kind, [values])])
    for cuts in ([1], [16, 32], [5, 6, 40, 52], list(range(1, 53))):
        tiles, exact = zip(*weights_export.in_tiles("x", kind, np.split(values, cuts)))
        assert np.array_equal(np.concatenate(tiles), whole) and np.array_equal(np.concatenate(exact), values)


def test_file_format(base, tmp_path):
    """A safetensors file for any tool; data in order, aligned, named as docs/format.md says."""
    path = exported(base, tmp_path / "m.vlm", "--type", "f32", "--name", "Odd", "--hint", "nothing")
    raw = path.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + n])
    meta = header.pop("__metadata__")
    assert (8 + n) % 64 == 0
    assert list(meta) == ["format", "architecture", "type", "name", "hint", "source", "config", "preprocess", "template",
                          "special_tokens", "added_tokens"]  # fmt: skip
    assert [meta[x] for x in ("format", "architecture", "type", "name")] == ["vlm 1", "qwen2.5-vl", "f32", "Odd"]
    end = 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] == end and (name.startswith("pad.") or end % 64 == 0)
        end = entry["data_offsets"][1]
    assert end == len(raw) - 8 - n
    names = [x for x in header if not x.startswith("pad.")]
    assert names[:2] == ["vision.patch_embed", "vision.00.norm1"]
    assert names[-6:] == [
        "text.01.down",
        "text.norm",
        "text.head",
        "tokenizer.bytes",
        "tokenizer.offsets",
        "tokenizer.merges",
    ]
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata()["type"] == "f32"
        assert file.get_tensor("text.00.qkv").shape == (7 * 24, 120)
        assert file.get_tensor("tokenizer.merges").dtype == np.int32


def test_metadata(base, tmp_path):
    model = vlm_to_hf.Model(exported(base, tmp_path / "m.vlm"))
    specials, added = model.json("special_tokens"), model.json("added_tokens")
    assert model.strings["type"] == "bf16"
    assert model.json("config") == {
        "text": {"layers": 2, "hidden": 120, "ff": 77, "heads": 5, "kv_heads": 1, "head_dim": 24, "vocab": model["text.embed"].shape[0],
                 "max_position": 32768, "eps": 1e-6, "rope_theta": 1e6, "mrope_section": [4, 4, 4], "tied": False},
        "vision": {"layers": 3, "hidden": 60, "ff": 51, "heads": 3, "out": 120, "patch": 14, "merge": 2, "temporal": 2, "window": 112,
                   "full_layers": [0]},
        "image_token": specials["<|image_pad|>"], "eos": [specials["<|im_end|>"], specials["<|endoftext|>"]],
    }  # fmt: skip
    assert model.json("preprocess") == {
        "min_pixels": 3136, "max_pixels": 12845056,
        "mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    assert model.json("template") == {
        "default_system": "You are a helpful assistant.", "open": "<|im_start|>", "after_role": "\n", "close": "<|im_end|>",
        "after_close": "\n", "image_before": "<|vision_start|>", "image": "<|image_pad|>", "image_after": "<|vision_end|>",
        "roles": ["system", "user", "assistant"],
    }  # fmt: skip
    assert "<tool_call>" in added and "<tool_call>" not in specials and len(specials) + len(added) == 22


def test_tokenizer_tables(base, tmp_path):
    model = vlm_to_hf.Model(exported(base, tmp_path / "m.vlm"))
    vocab, merges = make_model.small_vocabulary()
    data, offsets = model["tokenizer.bytes"].tobytes(), model["tokenizer.offsets"]
    tokens = [data[i:j] for i, j in zip(offsets, offsets[1:])]
    assert [make_model.spell(t) for t in tokens[: len(vocab)]] == sorted(vocab, key=vocab.get)
    assert tokens[len(vocab) :] == [x.encode() for x in make_model.SPECIAL + make_model.ADDED]
    assert [tuple(x) for x in model["tokenizer.merges"]] == [(vocab[a], vocab[b], vocab[a + b]) for a, b in merges]


def test_layouts_give_the_same_bytes(base, tmp_path):
    """Flat or nested, old names or new, one file or many: the same model, and the same file."""
    one = exported(base, tmp_path / "one.vlm").read_bytes()
    hf = make_model.make(tmp_path / "hf", "odd-b", layout="nested", names="new", shard=100_000)
    assert len(list(hf.glob("*.safetensors"))) > 3
    assert exported(hf, tmp_path / "two.vlm").read_bytes() == one


def test_source_is_the_checkpoints(base, tmp_path):
    """The identity does not depend on the type exported to; it does on each weight, and on the small files."""

    def source(folder, *args):
        return vlm_to_hf.Model(exported(folder, tmp_path / "m.vlm", *args)).strings["source"]

    sources = [source(base), source(make_model.make(tmp_path / "seed", "odd-b", seed=1))]
    assert source(base, "--type", "f32", "--name", "x") == sources[0]
    changed = shutil.copytree(base, tmp_path / "changed")
    edit("preprocessor_config.json", max_pixels=12845055)(changed)
    sources.append(source(changed))
    assert len(set(sources)) == 3 and all(len(bytes.fromhex(x)) == 32 for x in sources)


def test_back_and_again(base, tmp_path):
    for kind in ("f32", "bf16"):
        one = exported(base, tmp_path / f"{kind}.vlm", "--type", kind)
        vlm_to_hf.convert(one, tmp_path / kind)
        assert exported(tmp_path / kind, tmp_path / "again.vlm", "--type", kind).read_bytes() == one.read_bytes()


@pytest.mark.skipif(not TINY.exists(), reason="tiny/tiny.vlm is not there")
def test_the_shipped_model_back_and_again(tmp_path):
    vlm_to_hf.convert(TINY, tmp_path / "hf")
    strings = vlm_to_hf.Model(TINY).strings
    words = [x for key in ("name", "hint", "sample") if key in strings for x in (f"--{key}", strings[key])]
    assert (
        exported(tmp_path / "hf", tmp_path / "again.vlm", "--type", strings["type"], *words).read_bytes()
        == TINY.read_bytes()
    )


def test_rounding():
    """To nearest, ties to even: at ties, beside them, at subnormals and at the largest number."""
    bits = np.array(
        [0x3F808000, 0x3F808001, 0x3F807FFF, 0x3F818000, 0xBF818000, 0x00008000, 0x00018000, 0x7F7F7FFF, 0x80000000]
    )
    wanted = [0x3F80, 0x3F81, 0x3F80, 0x3F82, 0xBF82, 0x0000, 0x0002, 0x7F7F, 0x8000]
    assert weights_export.f32_to_bf16(bits.astype(np.uint32).view(np.float32)).tolist() == wanted


def test_memory_is_bounded(tmp_path):
    """Tensors stream: one of 160 MB (as f32) takes a fraction of that."""
    shape = dict(make_model.SHAPES["odd-a"], vocab=400_000)
    hf = make_model.make(tmp_path / "hf", shape)
    code = (
        "import resource, sys; sys.path.insert(0, sys.argv[1]); import weights_export as w; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; w.export(sys.argv[2], sys.argv[3], 'f32'); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT, hf, tmp_path / "m.vlm"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 100_000  # kilobytes


# ----------------------------------------------------------------------------------------------------------------------
# Spellings that mean the same


def edit(name, **changes):
    """Change entries of a JSON file; None removes one, a dotted name reaches inside."""

    def change(folder):
        path = folder / name
        value = json.loads(path.read_text())
        for key, new in changes.items():
            inner = value
            *outer, last = key.split("__")
            for step in outer:
                inner = inner[step]
            if new is None:
                del inner[last]
            else:
                inner[last] = new
        path.write_text(json.dumps(value))

    return change


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(name):
    return lambda folder: (folder / name).unlink()


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


def template_file(name, text=make_model.TEMPLATE):
    content = text if name.endswith("jinja") else json.dumps({"chat_template": text})
    return both(edit("tokenizer_config.json", chat_template=None), write(name, content))


def move_preprocessor(folder):
    values = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": values, "processor_class": "x"}))
    (folder / "preprocessor_config.json").unlink()


SAME = {
    "chat_template.jinja": template_file("chat_template.jinja"),
    "chat_template.json": template_file("chat_template.json"),
    "named templates": edit("tokenizer_config.json", chat_template=[{"name": "default", "template": make_model.TEMPLATE}]),
    "merges as pairs": lambda f: edit("tokenizer.json", model__merges=[list(m) for m in make_model.small_vocabulary()[1]])(f),
    "specials in the vocabulary too": lambda f: edit("tokenizer.json", **{"model__vocab__<|im_end|>": token_id(f, "<|im_end|>")})(f),
    "sizes by edge": edit("preprocessor_config.json", min_pixels=None, max_pixels=None,
                          size={"shortest_edge": 3136, "longest_edge": 12845056}),
    "sizes by both names": edit("preprocessor_config.json", size={"shortest_edge": 1, "longest_edge": 2}),
    "processor_config.json": move_preprocessor,
    "all preprocessing options": edit("preprocessor_config.json", do_resize=True, do_rescale=True, rescale_factor=1 / 255, resample=3,
                                      do_normalize=True, do_convert_rgb=True, processor_class="Qwen2_5_VLProcessor"),
    "eos from config.json": both(remove("generation_config.json"),
                                 lambda f: edit("config.json", eos_token_id=[token_id(f, "<|im_end|>"), token_id(f, "<|endoftext|>")])(f)),
    "defaults of older versions": edit("config.json", output_attentions=False, top_k=50, id2label={"0": "LABEL_0"}, pruned_heads={},
                                       vision_config__model_type="qwen2_5_vl", head_dim=24, quantization_config={}),
    "rope by two names": edit("config.json", rope_scaling={"type": "default", "rope_type": "default", "mrope_section": [4, 4, 4]}),
}  # fmt: skip


def token_id(folder, name):
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return next(x["id"] for x in added if x["content"] == name)


@pytest.mark.parametrize("name", SAME)
def test_spellings(base, folder, tmp_path, name):
    SAME[name](folder)
    assert exported(folder, tmp_path / "b.vlm").read_bytes() == exported(base, tmp_path / "a.vlm").read_bytes()


def test_no_default_system(folder, tmp_path):
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}" \
           "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}" \
           "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # fmt: skip
    template_file("chat_template.jinja", text)(folder)
    assert vlm_to_hf.Model(exported(folder, tmp_path / "m.vlm")).json("template")["default_system"] is None


# ----------------------------------------------------------------------------------------------------------------------
# What is refused


def header(change):
    """Change the header of model.safetensors."""

    def apply(folder):
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        (n,) = struct.unpack("<Q", raw[:8])
        entries = json.loads(raw[8 : 8 + n])
        change(entries)
        text = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + n :])

    return apply


def entry(name, **changes):
    return header(lambda entries: entries[name].update(changes))


def poke(name, raw_value):
    """Overwrite the first value of a tensor."""

    def apply(folder):
        path = folder / "model.safetensors"
        raw = bytearray(path.read_bytes())
        (n,) = struct.unpack("<Q", raw[:8])
        begin = 8 + n + json.loads(raw[8 : 8 + n])[name]["data_offsets"][0]
        raw[begin : begin + len(raw_value)] = raw_value
        path.write_bytes(raw)

    return apply


def cut(size):
    return lambda folder: write("model.safetensors", (folder / "model.safetensors").read_bytes()[:size])(folder)


def index(**changes):
    """Make it a sharded checkpoint whose index says something."""

    def apply(folder):
        raw = (folder / "model.safetensors").read_bytes()
        names = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        weight_map = {name: "model.safetensors" for name in names if name != "__metadata__"} | changes
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return apply


def made_by_a_merge():
    vocab, _ = make_model.small_vocabulary()
    return next(token for token, i in vocab.items() if i == 260)


def same_tensors_twice(folder):
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    index(more="other.safetensors")(folder)


def template(old, new):
    assert old in make_model.TEMPLATE
    return edit("tokenizer_config.json", chat_template=make_model.TEMPLATE.replace(old, new))


NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
HTML = "<!DOCTYPE html><html><body>404</body></html>"
REFUSED = {
    # files that are something else
    "empty weights": (write("model.safetensors", b""), "model.safetensors: empty"),
    "weights of 7 bytes": (write("model.safetensors", b"1234567"), "not a safetensors file"),
    "HTML weights": (write("model.safetensors", HTML), "not a safetensors file (it starts with b'<!DOCTYP')"),
    "LFS pointer": (write("model.safetensors", "version https://git-lfs.github.com/spec/v1"), "not a safetensors file"),
    "header of 2^63": (write("model.safetensors", struct.pack("<Q", 1 << 63) + b"{}"), "not a safetensors file"),
    "header longer than the file": (write("model.safetensors", struct.pack("<Q", 100) + b"{}"), "not a safetensors file"),
    "header no JSON": (write("model.safetensors", struct.pack("<Q", 5) + b"{abc}"), "header is damaged"),
    "header no object": (write("model.safetensors", struct.pack("<Q", 2) + b"[]"), "header is damaged"),
    "header too deep": (write("model.safetensors", struct.pack("<Q", 99999) + b"[" * 99999), "header is damaged"),
    "no weights": (remove("model.safetensors"), "model.safetensors: No such file"),
    "weights cut": (cut(-1), "cut short inside tensor"),
    "weights cut in the header": (cut(1000), "not a safetensors file"),
    "HTML config": (write("config.json", HTML), "config.json: not JSON"),
    "binary config": (write("config.json", b"\xff\xfe"), "config.json: not a text file"),
    "config no object": (write("config.json", "[]"), "config.json: not a JSON object"),
    "no config": (remove("config.json"), "config.json: No such file"),
    "no tokenizer": (remove("tokenizer.json"), "tokenizer.json: No such file"),
    "empty tokenizer": (write("tokenizer.json", "{}"), "tokenizer.json: model.type is None"),
    "no preprocessor": (remove("preprocessor_config.json"), "preprocessor_config.json: is missing"),
    # tensors
    "dtype unknown": (entry(NORM, dtype="F8_E4M3"), "model.norm.weight has dtype F8_E4M3"),
    "dtype of quantised weights": (entry(NORM, dtype="I32"), "use the unquantised checkpoint"),
    "size against shape": (entry(NORM, shape=[121]), "model.norm.weight has not the size of its shape"),
    "offset negative": (entry(NORM, data_offsets=[-240, 0]), "header is damaged"),
    "offset too large": (entry(NORM, data_offsets=[1 << 62, (1 << 62) + 240]), "cut short inside tensor model.norm.weight"),
    "offset no number": (entry(NORM, data_offsets=["0", "240"]), "header is damaged"),
    "shape no list": (entry(NORM, shape=120), "header is damaged"),
    "entry without dtype": (header(lambda x: x[NORM].pop("dtype")), "header is damaged"),
    "entry no object": (header(lambda x: x.update({NORM: 1})), "header is damaged"),
    "shape of another model": (entry(EMBED, shape=[60, 1]), "model.embed_tokens.weight has not the size"),
    "transposed": (header(lambda x: x["model.layers.0.mlp.up_proj.weight"]["shape"].reverse()), "up_proj.weight has shape [120, 77], "
                                                                                              "config.json asks for [77, 120]"),
    "tensor missing": (header(lambda x: x.pop(NORM)), "tensor model.norm.weight is missing"),
    "tensor left over": (header(lambda x: x.update({"model.extra.weight": x[NORM]})), "1 tensors would be left out, first model.extra"),
    "layers left over": (edit("config.json", num_hidden_layers=1), "would be left out, first model.layers.1."),
    "layers missing": (edit("config.json", num_hidden_layers=3), "tensor model.layers.2.input_layernorm.weight is missing"),
    "not a number": (poke(NORM, b"\xc0\x7f"), "model.norm.weight holds a value that is no bf16 number"),
    "infinite": (poke("visual.merger.mlp.0.weight", b"\x80\x7f"), "visual.merger.mlp.0.weight holds a value"),
    "index without a map": (write("model.safetensors.index.json", "{}"), "no weight_map"),
    "index out of the folder": (index(x="../model.safetensors"), "no weight_map of file names"),
    "shard missing": (index(x="model-2.safetensors"), "model-2.safetensors: No such file"),
    "tensor in two shards": (same_tensors_twice, "is there twice"),
    # configuration
    "other architecture": (edit("config.json", model_type="llama"), "model_type 'llama' is not supported"),
    "other activation": (edit("config.json", hidden_act="gelu"), 'hidden_act = "gelu" is not supported'),
    "other vision activation": (edit("config.json", vision_config__hidden_act="gelu"), "vision_config.hidden_act"),
    "sliding window": (edit("config.json", use_sliding_window=True), "use_sliding_window = true is not supported"),
    "sliding layers": (edit("config.json", layer_types=["sliding_attention"]), "layer_types"),
    "quantised": (edit("config.json", quantization_config={"quant_method": "awq"}), 'quantization_config = {"quant_method": "awq"}'),
    "unknown option": (edit("config.json", new_trick=3), "new_trick = 3 is not supported"),
    "unknown vision option": (edit("config.json", vision_config__new_trick=3), "vision_config.new_trick = 3"),
    "yarn": (edit("config.json", rope_scaling={"type": "yarn", "factor": 4, "mrope_section": [4, 4, 4]}), 'type = "yarn"'),
    "rope factor": (edit("config.json", rope_scaling__factor=2), "factor = 2"),
    "no mrope": (edit("config.json", rope_scaling=None), "mrope_section is missing"),
    "mrope of another head": (edit("config.json", rope_scaling__mrope_section=[4, 4, 5]), "is not half of the head size 24"),
    "mrope of two": (edit("config.json", rope_scaling__mrope_section=[6, 6]), "mrope_section"),
    "no hidden size": (edit("config.json", hidden_size=None), "hidden_size is missing"),
    "hidden size no number": (edit("config.json", hidden_size="120"), 'hidden_size = "120"'),
    "hidden size negative": (edit("config.json", hidden_size=-120), "hidden_size = -120"),
    "layers beyond all": (edit("config.json", num_hidden_layers=1 << 30), "num_hidden_layers"),
    "heads do not divide": (edit("config.json", num_attention_heads=7), "do not divide evenly"),
    "head size of its own": (edit("config.json", head_dim=32), "head_dim = 32"),
    "vision heads do not divide": (edit("config.json", vision_config__num_heads=7), "do not divide evenly"),
    "window between patches": (edit("config.json", vision_config__window_size=100), "do not divide evenly"),
    "full layer beyond": (edit("config.json", vision_config__fullatt_block_indexes=[3]), "vision_config.depth"),
    "towers of different sizes": (edit("config.json", vision_config__out_hidden_size=64), "out_hidden_size"),
    "tied, but with a head": (edit("config.json", tie_word_embeddings=True), "first lm_head.weight: tie_word_embeddings is true"),
    "untied without a head": (header(lambda x: x.pop("lm_head.weight")), "tensor lm_head.weight is missing"),
    "tied and not": (edit("config.json", text_config={"tie_word_embeddings": True}), "says both true and false"),
    "image token of text": (edit("config.json", image_token_id=5), "image_token_id 5 of config.json is no special token"),
    "many ends": (edit("generation_config.json", eos_token_id=list(range(9))), "eos_token_id holds too many"),
    "end out of range": (edit("generation_config.json", eos_token_id=[1 << 30]), "ids out of range"),
    "end no id": (edit("generation_config.json", eos_token_id=["x"]), "eos_token_id is no list of ids"),
    # preprocessing
    "bilinear": (edit("preprocessor_config.json", resample=2), "resample = 2"),
    "not resized": (edit("preprocessor_config.json", do_resize=False), "do_resize = false"),
    "centre crop": (edit("preprocessor_config.json", do_center_crop=True), "do_center_crop = true"),
    "other scale": (edit("preprocessor_config.json", rescale_factor=1.0), "rescale_factor = 1.0"),
    "other patch": (edit("preprocessor_config.json", patch_size=16), "patch_size = 16"),
    "no limits": (edit("preprocessor_config.json", max_pixels=None), "max_pixels is missing"),
    "limits crossed": (edit("preprocessor_config.json", max_pixels=3000), "min_pixels is larger"),
    "mean of two": (edit("preprocessor_config.json", image_mean=[0.5, 0.5]), "image_mean"),
    "std of zero": (edit("preprocessor_config.json", image_std=[0, 1, 1]), "image_std"),
    # tokenizer
    "other normalizer": (edit("tokenizer.json", normalizer={"type": "NFKC"}), "normalizer is 'NFKC', supported is 'NFC'"),
    "other pattern": (edit("tokenizer.json", pre_tokenizer__pretokenizers=[{"type": "Split", "pattern": {"Regex": "x"}},
                                                                          {"type": "ByteLevel"}]), "pre_tokenizer.pattern is 'x'"),
    "other pre-tokenizer": (edit("tokenizer.json", pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer is [None, None]"),
    "other model": (edit("tokenizer.json", model__type="Unigram"), "model.type is 'Unigram'"),
    "merges ignored": (edit("tokenizer.json", model__ignore_merges=True), "model.options is ['ignore_merges']"),
    "greedy added token": (lambda f: edit("tokenizer.json", added_tokens=[{"id": 1, "content": "x", "lstrip": True}])(f), "has lstrip"),
    "unknown merge": (edit("tokenizer.json", model__merges=["a zzz"]), "merge 'a zzz' names tokens that are not in the vocabulary"),
    "merge of three": (edit("tokenizer.json", model__merges=["a b c"]), "merge 'a b c' is no pair"),
    "merge of numbers": (edit("tokenizer.json", model__merges=[5]), "merge 5 is no pair"),
    "merge twice": (edit("tokenizer.json", model__merges=["r e", "r e"]), "a merge is listed twice"),
    "merge makes an added token": (
        lambda f: edit("tokenizer.json", added_tokens=[{"id": 260, "content": made_by_a_merge(), "special": True}])(f),
        "a merge takes or makes the added token",
    ),
    "token gone": (edit("tokenizer.json", model__vocab__a=None), "no token has the id"),
    "id twice": (edit("tokenizer.json", model__vocab__a=1), "no token has the id"),
    "letter of no byte": (edit("tokenizer.json", model__vocab__汉=0), "not a byte-level BPE tokenizer"),
    "more tokens than rows": (edit("config.json", vocab_size=300), "but vocab_size in config.json is 300"),
    # template
    "no template": (edit("tokenizer_config.json", chat_template=None), "no chat_template.jinja"),
    "no Jinja": (template("{% endfor %}", ""), "not a Jinja template"),
    "template fails": (template("{% set pictures", "{{ raise_exception('no') }}{% set pictures"), "fails on a conversation (TemplateError: no)"),
    "content trimmed": (template("{{ message['content'] }}", "{{ message['content'] | trim }}"), "cannot be made of fixed pieces: for "),
    "content escaped": (template("{{ message['content'] }}", "{{ message['content'] | e }}"), "where the pieces give"),
    "part trimmed": (template("{{ part['text'] }}", "{{ part['text'] | trim }}"), "cannot be made of fixed pieces"),
    "pictures numbered": (template("{% if add_vision_id %}", "{% if true %}"), "do not begin and end with one special token"),
    "later pictures numbered": (template("{% if add_vision_id %}", "{% if pictures.n > 1 %}"), "gives '"),
    "turns not special": (template("<|im_start|>{{", "[START]{{"), "do not begin and end with one special token"),
    "another reply": (template("assistant\n{% endif %}", "assistant:{% endif %}"), "cannot be made of fixed pieces"),
    "roles renamed": (template("{{ message['role'] }}", "{{ message['role'] | upper }}"), "does not come out of the template"),
}  # fmt: skip


@pytest.fixture
def out(tmp_path):
    """The folder of the file to write."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(folder, out, name):
    """One line that names what is wrong, and nothing left behind."""
    change, message = REFUSED[name]
    change(folder)
    with pytest.raises(SystemExit) as stop:
        exported(folder, out / "m.vlm")
    assert message in stop.value.code and "\n" not in stop.value.code
    assert list(out.iterdir()) == []


def refused(done, out, message):
    assert (done.returncode, done.stdout) == (1, ""), done
    assert done.stderr.startswith("weights_export: ") and message in done.stderr and done.stderr.count("\n") == 1
    assert list(out.iterdir()) == []


def test_program(base, folder, out):
    """It is silent where nobody watches; an error is one line on stderr, status 1; wrong usage is status 2."""
    done = run(base, out / "m.vlm")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and [x.name for x in out.iterdir()] == ["m.vlm"]
    (out / "m.vlm").unlink()
    (folder / "model.safetensors").write_bytes(b"")
    refused(run(folder, out / "m.vlm"), out, "model.safetensors: empty; download the file again")
    refused(run(base / "absent", out / "m.vlm"), out, "absent: no such folder")
    refused(run(base / "config.json", out / "m.vlm"), out, "config.json: no such folder")
    refused(run(base, out), out, "out: is a folder")
    refused(run(base, out / "absent" / "m.vlm"), out, "m.vlm: No such file or directory")
    assert run(base, out / "m.vlm", "--type", "q3").returncode == 2


def test_disk_full(base, out):
    """The limit on a file's size stands for the disk's end: writing fails in the middle."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    refused(run(base, out / "m.vlm", preexec_fn=limit), out, "m.vlm: File too large; nothing was written")
    old = out / "m.vlm"
    old.write_text("an older file")
    assert run(base, old, preexec_fn=limit).returncode == 1
    assert old.read_text() == "an older file" and list(out.iterdir()) == [old]


def test_little_room(base, tmp_path, monkeypatch):
    """Known before a byte is written."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(weights_export.ExportError, match=r"MB needed, 0 MB free; make room"):
        weights_export.export(base, tmp_path / "m.vlm")
    assert list(tmp_path.iterdir()) == []


def test_interrupted(base, tmp_path, monkeypatch):
    def stop(out, *_):
        out.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(weights_export, "write_data", stop)
    with pytest.raises(KeyboardInterrupt):
        weights_export.export(base, tmp_path / "m.vlm")
    assert list(tmp_path.iterdir()) == []
