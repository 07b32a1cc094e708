#!/usr/bin/env python3
"""Turn a Hugging Face checkpoint of Qwen2.5-VL into one .vlm file, the model file of vlm.c.

    python weights_export.py CHECKPOINT_DIR OUT.vlm [--type f32|bf16|q8|q4] [--embed-type T] [--head-type T]
                             [--vision-type T] [--name TEXT] [--hint TEXT] [--sample PICTURE]

A .vlm file is a valid safetensors file (docs/format.md): the tensors in the order and layout that the
engine reads, the tokenizer's tables as tensors, everything else as strings in the metadata. Everything is checked
before a byte is written, tensors stream through in pieces of some megabytes, and the file appears under its name only
when it is complete. Needs numpy and jinja2.

    checkpoint's files -> configuration    (what is not known is an error that names it)
                       -> tokenizer tables (vocabulary and merges as bytes and ids)
                       -> template pieces  (found by probing the Jinja template, then proven on conversations)
                       -> tensors          (fused, converted or quantised, aligned to 64 bytes)
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import resource
import shutil
import signal
import struct
import sys

try:
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    import numpy as np
except ImportError as e:
    raise SystemExit(f"weights_export.py: {e}; `make venv`, then: .venv/bin/python weights_export.py ...")

ALIGN = 64  # bytes: a cache line, and the widest vector load of the CPUs
PIECE = 1 << 22  # values converted at a time
MAX_HEADER = 100_000_000  # bytes: safetensors' own limit
LARGEST = 3.3895e38  # a finite bf16; floats beyond round to infinity
MAX_EOS = 8  # ids that end an answer: the engine's Config has room for these
MAX_LAYERS = 128  # of a tower: the engine keeps full_layers as a bit set


class ExportError(Exception):
    """What is wrong with a file or the machine, with its name and the remedy, in one line."""


# ----------------------------------------------------------------------------------------------------------------------
# Reading the checkpoint


def load_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise ExportError(f"{path}: {e.strerror}; the folder must hold a complete Hugging Face checkpoint") from None
    except UnicodeDecodeError:
        raise ExportError(f"{path}: not a text file; download the file again") from None


def load_json(path):
    try:
        value = json.loads(load_text(path))
    except (ValueError, RecursionError) as e:
        raise ExportError(f"{path}: not JSON ({e}); download the file again") from None
    if not isinstance(value, dict):
        raise ExportError(f"{path}: not a JSON object; download the file again")
    return value


def bf16_to_f32(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x):
    """Round to nearest, ties to even. The values are finite."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


READERS = {  # dtype of the checkpoint -> (numpy type on disk, conversion to f32)
    "F32": (np.dtype("<f4"), lambda x: x),
    "F16": (np.dtype("<f2"), lambda x: x.astype(np.float32)),
    "BF16": (np.dtype("<u2"), bf16_to_f32),
}


class Safetensors:
    """One safetensors file, checked as untrusted input; tensors are read in pieces, so the file may exceed memory."""

    def __init__(self, path):
        self.path = path
        try:
            self.file = open(path, "rb")
            size = os.fstat(self.file.fileno()).st_size
            start = self.file.read(8)
        except OSError as e:
            raise ExportError(f"{path}: {e.strerror}; the folder must hold a complete checkpoint") from None
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, MAX_HEADER):
            what = "empty" if not size else f"not a safetensors file (it starts with {start!r})"
            raise ExportError(f"{path}: {what}; download the file again")
        self.base = 8 + length
        try:
            header = json.loads(self.file.read(length))
            header.pop("__metadata__", None)
            self.tensors = {name: self.checked(name, entry, size - self.base) for name, entry in header.items()}
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
            raise ExportError(f"{path}: its header is damaged; download the file again") from None

    def checked(self, name, entry, room):
        """(dtype, shape, offset) of a header entry, after checking that the data lies inside the file."""
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if dtype not in READERS:
            known = ", ".join(READERS)
            raise ExportError(
                f"{self.path}: tensor {name} has dtype {dtype}, known are {known}; use the unquantised checkpoint"
            )
        if not all(type(x) is int and x >= 0 for x in (*shape, begin, end)):
            raise ValueError
        if end - begin != math.prod(shape) * READERS[dtype][0].itemsize:
            raise ExportError(f"{self.path}: tensor {name} has not the size of its shape; download the file again")
        if end > room:
            raise ExportError(f"{self.path}: cut short inside tensor {name}; download the file again")
        return dtype, shape, self.base + begin

    def rows(self, name):
        """Yield the tensor as f32, some whole rows at a time: (rows, values of a row)."""
        dtype, shape, offset = self.tensors[name]
        on_disk, to_f32 = READERS[dtype]
        width = math.prod(shape[1:])
        step = max(1, PIECE // max(1, width))
        self.file.seek(offset)
        for row in range(0, shape[0], step):
            n = min(step, shape[0] - row)
            values = np.fromfile(self.file, on_disk, n * width)
            if values.size != n * width:
                raise ExportError(f"{self.path}: cannot read tensor {name}; is another program writing the file?")
            values = to_f32(values)
            if not (np.abs(values) <= LARGEST).all():  # NaN, too, is not
                raise ExportError(f"{self.path}: tensor {name} holds a value that is no bf16 number; it is damaged")
            yield values.reshape(n, width)


def base_name(name):
    """The hub's name of a tensor; newer checkpoints put both towers under `model.`."""
    for new, old in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(new):
            return old + name[len(new) :]
    return name


class Checkpoint:
    """All tensors of a folder under their hub names, whatever the number of files."""

    def __init__(self, folder):
        self.where = {}  # hub name -> (file, name in it)
        for path in self.files(folder):
            file = Safetensors(path)
            for name in file.tensors:
                if base_name(name) in self.where:
                    raise ExportError(f"{path}: tensor {name} is there twice; remove stale files from the folder")
                self.where[base_name(name)] = file, name

    @staticmethod
    def files(folder):
        index = folder / "model.safetensors.index.json"
        if not index.exists():
            return [folder / "model.safetensors"]
        names = load_json(index).get("weight_map")
        names = list(names.values()) if isinstance(names, dict) else [None]
        if not all(isinstance(x, str) and x == os.path.basename(x) and "\0" not in x for x in names):  # never out of the folder
            raise ExportError(f"{index}: has no weight_map of file names; download the file again")
        return [folder / name for name in sorted(set(names))]

    def shape(self, name):
        file, key = self.where[name]
        return file.tensors[key][1]

    def rows(self, name):
        file, key = self.where[name]
        return file.rows(key)


# ----------------------------------------------------------------------------------------------------------------------
# Configuration

# Entries that say nothing about the computation: bookkeeping, training, and the defaults for generation
# that older versions of transformers wrote out.
IGNORED = set(
    """
    architectures model_type transformers_version dtype torch_dtype use_cache initializer_range attention_dropout
    max_window_layers sliding_window tokens_per_second bos_token_id eos_token_id pad_token_id video_token_id
    vision_start_token_id vision_end_token_id vision_token_id _name_or_path _attn_implementation_autoset return_dict
    chunk_size_feed_forward max_length min_length num_beams num_beam_groups temperature top_k top_p typical_p
    repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    num_return_sequences id2label label2id tokenizer_class image_processor_type processor_class default_to_square
    data_format
    """.split()
)


class Options:
    """A JSON object whose entries must all be accounted for: taken, known to be harmless, or off."""

    def __init__(self, path, values, prefix=""):
        self.path, self.values, self.prefix, self.seen = path, values, prefix, set()

    def take(self, name, kind, default=None):
        """The value of an entry, which must be a positive number, a list or a dict as `kind` says."""
        self.seen.add(name)
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise ExportError(f"{self.path}: {self.prefix}{name} is missing; use a complete checkpoint of Qwen2.5-VL")
        if type(value) not in ((int, float) if kind is float else (kind,)):
            raise self.unknown(name)
        if kind in (int, float) and not 0 < value < 1 << 31:
            raise self.unknown(name)
        return float(value) if kind is float else value

    def ints(self, name, count=None):
        values = self.take(name, list)
        if not all(type(x) is int and 0 <= x < 1 << 31 for x in values) or count not in (None, len(values)):
            raise self.unknown(name)
        return values

    def must_be(self, name, *known):
        """An option that the engine knows only one way of; absent means that way."""
        self.seen.add(name)
        if name in self.values and self.values[name] not in known:
            raise self.unknown(name)

    def unknown(self, name):
        value = json.dumps(self.values.get(name))[:60]
        return ExportError(f"{self.path}: {self.prefix}{name} = {value} is not supported; see docs/format.md")

    def finish(self):
        """What nobody asked for must be harmless or switched off."""
        for name, value in self.values.items():
            if name not in self.seen and name not in IGNORED and value not in (None, False, [], {}, ""):
                raise self.unknown(name)


def rope_options(text):
    """(theta, mrope_section) of the spellings: rope_scaling beside rope_theta, or rope_parameters."""
    rope = {"rope_theta": text.values.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        rope |= text.take(name, dict, {})
    text.seen.add("rope_theta")
    options = Options(text.path, rope, text.prefix + "rope_parameters.")
    options.must_be("type", "mrope", "default")
    options.must_be("rope_type", "mrope", "default")
    theta, section = options.take("rope_theta", float), options.ints("mrope_section", 3)
    options.finish()
    return theta, section


def text_config(text, tied):
    heads, hidden = text.take("num_attention_heads", int), text.take("hidden_size", int)
    kv_heads = text.take("num_key_value_heads", int, heads)
    if hidden % heads or heads % kv_heads:
        raise ExportError(f"{text.path}: hidden_size {hidden}, heads {heads} and {kv_heads} do not divide evenly")
    text.must_be("head_dim", hidden // heads)
    text.must_be("hidden_act", "silu")
    text.must_be("use_sliding_window", False, None)
    if any(x != "full_attention" for x in text.take("layer_types", list, [])):
        raise text.unknown("layer_types")
    theta, section = rope_options(text)
    if 2 * sum(section) != hidden // heads:
        raise ExportError(f"{text.path}: mrope_section {section} is not half of the head size {hidden // heads}")
    if text.take("num_hidden_layers", int) > MAX_LAYERS:
        raise text.unknown("num_hidden_layers")
    return {
        "layers": text.take("num_hidden_layers", int), "hidden": hidden, "ff": text.take("intermediate_size", int),
        "heads": heads, "kv_heads": kv_heads, "head_dim": hidden // heads, "vocab": text.take("vocab_size", int),
        "max_position": text.take("max_position_embeddings", int), "eps": text.take("rms_norm_eps", float),
        "rope_theta": theta, "mrope_section": section, "tied": tied,
    }  # fmt: skip


def vision_config(vision):
    vision.must_be("hidden_act", "silu")
    for name in ("in_chans", "in_channels"):
        vision.must_be(name, 3)
    rope = Options(vision.path, vision.take("rope_parameters", dict, {}), vision.prefix + "rope_parameters.")
    rope.must_be("rope_type", "axial", "default")
    rope.must_be("rope_theta", 10000.0)
    rope.finish()
    names = {"layers": "depth", "hidden": "hidden_size", "ff": "intermediate_size", "heads": "num_heads",
             "out": "out_hidden_size", "patch": "patch_size", "merge": "spatial_merge_size",
             "temporal": "temporal_patch_size", "window": "window_size"}  # fmt: skip
    config = {ours: vision.take(theirs, int) for ours, theirs in names.items()}
    config["full_layers"] = sorted(set(vision.ints("fullatt_block_indexes")))
    vision.must_be("spatial_patch_size", config["patch"])
    if config["layers"] > MAX_LAYERS or any(x >= config["layers"] for x in config["full_layers"]):
        raise vision.unknown("depth")
    if config["hidden"] % (4 * config["heads"]) or config["window"] % (config["patch"] * config["merge"]):
        raise ExportError(f"{vision.path}: the vision tower's heads or window do not divide evenly")
    return config


def read_config(folder):
    """config.json, flat as on the hub or nested as transformers 5 has it -> our "config", but for the ids that end."""
    path = folder / "config.json"
    values = load_json(path)
    if values.get("model_type") != "qwen2_5_vl":
        raise ExportError(f"{path}: model_type {values.get('model_type')!r} is not supported; supported is qwen2_5_vl")
    top = Options(path, values)
    inner = top.take("text_config", dict, {})
    text = Options(path, inner, "text_config.") if inner else top
    ties = {bool(t) for t in (x.get("tie_word_embeddings") for x in (values, inner)) if t is not None}
    if len(ties) > 1 or not ties <= {True, False}:
        raise ExportError(f"{path}: tie_word_embeddings says both true and false; correct the wrong one")
    top.seen.update(x for x in values if x in inner and values[x] == inner[x])  # some versions write all twice
    for options in (top, text):
        options.seen.add("tie_word_embeddings")
    vision = Options(path, top.take("vision_config", dict), "vision_config.")
    config = {"text": text_config(text, True in ties), "vision": vision_config(vision)}
    config["image_token"] = top.take("image_token_id", int)
    if config["vision"]["out"] != config["text"]["hidden"]:
        raise ExportError(f"{path}: vision_config.out_hidden_size is not the text model's hidden_size")
    for options in (top, text, vision):
        options.finish()
    return config


def end_ids(folder):
    """eos_token_id of generation_config.json, else of config.json: a number or a list."""
    sources = [load_json(p) for p in (folder / "generation_config.json", folder / "config.json") if p.exists()]
    sources.append(sources[-1].get("text_config") or {})
    ids = next((x["eos_token_id"] for x in sources if x.get("eos_token_id") is not None), [])
    ids = ids if isinstance(ids, list) else [ids]
    if not all(type(x) is int for x in ids):
        raise ExportError(f"{folder}/generation_config.json: eos_token_id is no list of ids")
    return ids


def read_preprocess(folder, vision):
    """preprocessor_config.json, or the image part of the newer processor_config.json."""
    path = folder / "preprocessor_config.json"
    values = load_json(path) if path.exists() else None
    if values is None:
        newer = folder / "processor_config.json"
        if not newer.exists():
            raise ExportError(f"{path}: is missing; it says how pictures are prepared: download it")
        path, values = newer, load_json(newer).get("image_processor") or {}
    options = Options(path, values)
    for name, known in {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
                        "resample": 3, "patch_size": vision["patch"], "merge_size": vision["merge"],
                        "temporal_patch_size": vision["temporal"]}.items():  # fmt: skip
        options.must_be(name, known, None)
    scale = options.take("rescale_factor", float, 1 / 255)
    if abs(scale * 255 - 1) > 1e-6:
        raise options.unknown("rescale_factor")
    size = Options(path, options.take("size", dict, {}), "size.")
    limits = {name: values.get(name) or size.values.get(edge) or size.values.get(name)
              for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))}  # fmt: skip
    options.seen.update(limits)
    result = {name: Options(path, limits).take(name, int) for name in limits}
    if result["min_pixels"] > result["max_pixels"]:
        raise ExportError(f"{path}: min_pixels is larger than max_pixels; correct them")
    for name in ("mean", "std"):
        rgb = options.take("image_" + name, list)
        if len(rgb) != 3 or not all(type(x) in (int, float) and 0 < x < 1000 for x in rgb):
            raise options.unknown("image_" + name)
        result[name] = [float(x) for x in rgb]
    options.finish()
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizer

# What the engine's tokenizer implements (tokenizer.c). Any other pipeline gives other ids, so it is refused.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_letters():
    """The letter that byte-level BPE writes for each byte: itself when printable, else one from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (b for b in range(256) if b not in plain)
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


LETTERS = byte_letters()


def check_pipeline(path, spec):
    """Refuse every normaliser, splitter and BPE option but Qwen2.5's."""
    model, normalizer = spec.get("model") or {}, spec.get("normalizer") or {}
    steps = (spec.get("pre_tokenizer") or {}).get("pretokenizers") or [{}, {}]
    found = {
        "model.type": (model.get("type"), "BPE"),
        "model.options": ([k for k in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                                       "fuse_unk", "byte_fallback", "ignore_merges") if model.get(k)], []),
        "normalizer": (normalizer.get("type"), "NFC"),
        "pre_tokenizer": ([x.get("type") for x in steps], ["Split", "ByteLevel"]),
        "pre_tokenizer.pattern": ((steps[0].get("pattern") or {}).get("Regex"), SPLIT),
        "pre_tokenizer.behavior": ((steps[0].get("behavior"), bool(steps[0].get("invert"))), ("Isolated", False)),
        "pre_tokenizer.bytes": ((bool(steps[-1].get("add_prefix_space")), steps[-1].get("use_regex")), (False, False)),
    }  # fmt: skip
    for name, (value, known) in found.items():
        if value != known:
            raise ExportError(f"{path}: {name} is {value!r}, supported is {known!r}")


def added_tokens(path, spec):
    """[(content, id, special)] by id. Options that change how text around a token is cut are refused."""
    added = []
    for token in spec.get("added_tokens") or []:
        for name in ("single_word", "lstrip", "rstrip", "normalized"):
            if token.get(name):
                raise ExportError(f"{path}: added token {token.get('content')!r} has {name}, which is not supported")
        added.append((token["content"], token["id"], bool(token.get("special"))))
    return sorted(added, key=lambda x: x[1])


def merge_pair(path, merge):
    """A merge is written as ["a", "b"], or "a b" in older files."""
    pair = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(pair, list) or len(pair) != 2:
        raise ExportError(f"{path}: merge {merge!r} is no pair of tokens; download the file again")
    return pair


def merge_table(path, vocab, merges):
    """(left, right, result) ids in rank order."""
    table = []
    for merge in merges:
        left, right = merge_pair(path, merge)
        if not {left, right, left + right} <= vocab.keys():
            raise ExportError(f"{path}: merge {merge!r} names tokens that are not in the vocabulary")
        table.append((vocab[left], vocab[right], vocab[left + right]))
    if len({row[:2] for row in table}) != len(table):
        raise ExportError(f"{path}: a merge is listed twice; download the file again")
    return np.array(table, "<i4").reshape(-1, 3)


def token_bytes(path, spec, added, vocab_rows):
    """The bytes of each token, by id."""
    names = {i: content.encode() for content, i, _ in added}
    tokens = names | {i: bytes(LETTERS[c] for c in t) for t, i in spec["model"]["vocab"].items() if i not in names}
    gap = next((i for i in range(len(tokens)) if i not in tokens), None)
    if gap is not None:
        raise ExportError(f"{path}: no token has the id {gap}; ids must count up from 0")
    if len(tokens) > vocab_rows:
        raise ExportError(f"{path}: has {len(tokens)} tokens, but vocab_size in config.json is {vocab_rows}")
    if len(set(tokens.values())) != len(tokens):
        raise ExportError(f"{path}: two ids have the same token; download the file again")
    if not set(tokens.values()) >= {bytes([b]) for b in range(256)}:
        raise ExportError(f"{path}: the vocabulary does not hold all 256 bytes; it is not byte-level")
    return [tokens[i] for i in range(len(tokens))]


def read_tokenizer(folder, vocab_rows):
    """tokenizer.json -> (tables as tensors, [(content, id, special)])."""
    path = folder / "tokenizer.json"
    spec = load_json(path)
    try:
        check_pipeline(path, spec)
        added = added_tokens(path, spec)
        tokens = token_bytes(path, spec, added, vocab_rows)
        merges = merge_table(path, spec["model"]["vocab"], spec["model"]["merges"])
        made = next((content for content, i, _ in added if i in merges), None)
        if made is not None:  # or a text could spell it
            raise ExportError(f"{path}: a merge takes or makes the added token {made!r}, which is not supported")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as e:
        raise ExportError(f"{path}: not a byte-level BPE tokenizer ({type(e).__name__} {e})") from None
    return {
        "tokenizer.bytes": np.frombuffer(b"".join(tokens), np.uint8),
        "tokenizer.offsets": np.cumsum([0] + [len(t) for t in tokens]).astype("<i4"),
        "tokenizer.merges": merges,
    }, added


# ----------------------------------------------------------------------------------------------------------------------
# Chat template

ROLES = ["system", "user", "assistant"]
PICTURE = {"type": "image"}


def read_template(folder):
    """(path, text) of the checkpoint's Jinja template, which has three places; transformers looks in this order."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path, load_text(path)
    for path in (folder / "chat_template.json", folder / "tokenizer_config.json"):
        text = load_json(path).get("chat_template") if path.exists() else None
        if isinstance(text, list):
            text = {x.get("name"): x.get("template") for x in text}.get("default")
        if isinstance(text, str):
            return path, text
    raise ExportError(f"{folder}: no chat_template.jinja, chat_template.json or chat_template in tokenizer_config.json")


@contextlib.contextmanager
def memory_limit(extra):
    """Let the process take at most `extra` bytes more than it has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def compile_template(path, text):
    """render(messages, add_generation_prompt), in the environment that transformers gives its templates."""

    def refuse(message):
        raise jinja2.TemplateError(message)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    env.globals["raise_exception"] = refuse
    env.filters["tojson"] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)
    try:
        template = env.from_string(text)
    except jinja2.TemplateError as e:
        raise ExportError(f"{path}: not a Jinja template ({e})") from None

    def render(messages, reply):
        try:  # a template is a program: anything may happen in it, and it could fill the machine's memory
            with memory_limit(1 << 30):
                return template.render(messages=messages, add_generation_prompt=reply)
        except Exception as e:
            raise ExportError(f"{path}: fails on a conversation ({type(e).__name__}: {e})") from None

    return render


def probe_template(path, render, added, image_token):
    """Find the pieces of a template that is one turn after another: open role after_role ... close after_close."""
    names = {i: content for content, i, special in added if special}
    probe, image = "(probe)", names.get(image_token)
    if image is None:
        raise ExportError(f"{path}: image_token_id {image_token} of config.json is no special token of tokenizer.json")

    def cut(text, mark):
        before, found, after = text.partition(mark)
        if not found:
            raise ExportError(f"{path}: {mark!r} does not come out of the template; a template of another kind")
        return before, after

    head, tail = cut(render([{"role": "system", "content": probe}], False), probe)
    start, after_role = cut(head, "system")
    close = next((x for x in sorted(names.values(), key=len, reverse=True) if tail.startswith(x)), None)
    first = render([{"role": "user", "content": probe}], False)
    default, _ = cut(first, start + "user" + after_role + probe)
    around = cut(render([{"role": "system", "content": [PICTURE]}], False).removeprefix(head).removesuffix(tail), image)
    if not {start, close, *around} <= set(names.values()):
        raise ExportError(f"{path}: turns and pictures do not begin and end with one special token each")
    return {
        "default_system": default.removeprefix(head).removesuffix(tail) if default else None,
        "open": start, "after_role": after_role, "close": close, "after_close": tail.removeprefix(close or ""),
        "image_before": around[0], "image": image, "image_after": around[1], "roles": ROLES,
    }  # fmt: skip


def render_pieces(t, messages, reply):
    """What the engine makes of a conversation (prompt_add in tokenizer.c), as text."""
    picture = t["image_before"] + t["image"] + t["image_after"]
    if t["default_system"] is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": t["default_system"]}, *messages]
    out = ""
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        body = "".join(picture if part["type"] == "image" else part["text"] for part in parts)
        out += t["open"] + message["role"] + t["after_role"] + body + t["close"] + t["after_close"]
    return out + (t["open"] + "assistant" + t["after_role"] if reply else "")


def conversations():
    """Conversations that a template must get right; each piece of text that could be trimmed or escaped is in one."""

    def text(x):
        return {"type": "text", "text": x}

    def turns(*contents):
        roles = ["user", "assistant"]
        return [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]

    own = {"role": "system", "content": "Answer in one word."}
    odd = ["", " ", "\n\n  two lines\n", "a\r\n\tb ", "<b>&amp; \"q\" 'q' {{ x }} {% y %}", "汉字 🏳️‍🌈 e\u0301"]
    for start in ([], [own], [{"role": "system", "content": ""}], [{"role": "system", "content": [text("In parts.")]}]):
        yield start + turns("Hello")
        yield start + turns("Hello", "Hi", "And you?")
        yield start + turns([PICTURE, text("What is this?")], "A cat.", [text("And this: "), PICTURE, text(" ?\n")])
    for x in odd:
        yield [{"role": "system", "content": x}] + turns(x, x, x)
        yield turns([text(x)], [text(x)], [text(x), PICTURE, text(x)])
    yield turns([PICTURE])
    yield turns([PICTURE, PICTURE, text("Which?"), PICTURE], "The first.", [PICTURE])
    yield turns([text("one"), text("two")], [text("three"), text(""), text("four")])
    yield turns([])
    yield turns("a", "b") + [own] + turns("c", "d")
    yield [{"role": "assistant", "content": "I begin."}] + turns("Do")


def template_pieces(folder, added, image_token):
    """The pieces, proven: both renderings of every conversation are the same."""
    path, text = read_template(folder)
    render = compile_template(path, text)
    pieces = probe_template(path, render, added, image_token)
    for messages in conversations():
        for reply in (False, True):
            theirs, ours = render(messages, reply), render_pieces(pieces, messages, reply)
            if theirs != ours:
                i = len(os.path.commonprefix([theirs, ours]))
                raise ExportError(
                    f"{path}: cannot be made of fixed pieces: for {json.dumps(messages)[:80]} it gives "
                    f"{theirs[max(0, i - 20) : i + 20]!r} where the pieces give {ours[max(0, i - 20) : i + 20]!r}"
                )
    return pieces


# ----------------------------------------------------------------------------------------------------------------------
# Tensors: which of the checkpoint's become which of ours


def vision_tensors(v):
    """Yield (name, [(source, its rows)], columns); sources are stacked, and a vector has no columns."""
    c, f, wide = v["hidden"], v["ff"], v["merge"] ** 2 * v["hidden"]
    yield "vision.patch_embed", [("visual.patch_embed.proj.weight", c)], 3 * v["temporal"] * v["patch"] ** 2
    for i in range(v["layers"]):
        ours, theirs = f"vision.{i:02}.", f"visual.blocks.{i}."
        yield ours + "norm1", [(theirs + "norm1.weight", c)], None
        yield ours + "qkv", [(theirs + "attn.qkv.weight", 3 * c)], c
        yield ours + "qkv_bias", [(theirs + "attn.qkv.bias", 3 * c)], None
        yield ours + "proj", [(theirs + "attn.proj.weight", c)], c
        yield ours + "proj_bias", [(theirs + "attn.proj.bias", c)], None
        yield ours + "norm2", [(theirs + "norm2.weight", c)], None
        yield ours + "gate_up", [(theirs + "mlp.gate_proj.weight", f), (theirs + "mlp.up_proj.weight", f)], c
        yield ours + "gate_up_bias", [(theirs + "mlp.gate_proj.bias", f), (theirs + "mlp.up_proj.bias", f)], None
        yield ours + "down", [(theirs + "mlp.down_proj.weight", c)], f
        yield ours + "down_bias", [(theirs + "mlp.down_proj.bias", c)], None
    yield "vision.merger_norm", [("visual.merger.ln_q.weight", c)], None
    yield "vision.merger_up", [("visual.merger.mlp.0.weight", wide)], wide
    yield "vision.merger_up_bias", [("visual.merger.mlp.0.bias", wide)], None
    yield "vision.merger_down", [("visual.merger.mlp.2.weight", v["out"])], wide
    yield "vision.merger_down_bias", [("visual.merger.mlp.2.bias", v["out"])], None


def text_tensors(t):
    c, f, q, kv = t["hidden"], t["ff"], t["heads"] * t["head_dim"], t["kv_heads"] * t["head_dim"]
    yield "text.embed", [("model.embed_tokens.weight", t["vocab"])], c
    for i in range(t["layers"]):
        ours, theirs = f"text.{i:02}.", f"model.layers.{i}."
        qkv = [(f"{theirs}self_attn.{x}_proj.", rows) for x, rows in (("q", q), ("k", kv), ("v", kv))]
        yield ours + "norm1", [(theirs + "input_layernorm.weight", c)], None
        yield ours + "qkv", [(x + "weight", rows) for x, rows in qkv], c
        yield ours + "qkv_bias", [(x + "bias", rows) for x, rows in qkv], None
        yield ours + "out", [(theirs + "self_attn.o_proj.weight", c)], q
        yield ours + "norm2", [(theirs + "post_attention_layernorm.weight", c)], None
        yield ours + "gate_up", [(theirs + "mlp.gate_proj.weight", f), (theirs + "mlp.up_proj.weight", f)], c
        yield ours + "down", [(theirs + "mlp.down_proj.weight", c)], f
    yield "text.norm", [("model.norm.weight", c)], None
    if not t["tied"]:
        yield "text.head", [("lm_head.weight", t["vocab"])], c


def check_tensors(folder, checkpoint, listed):
    """Every tensor is there with the shape that the configuration asks for, and none is left over."""
    wanted = {source: (rows, columns) for _, sources, columns in listed for source, rows in sources}
    for source, (rows, columns) in wanted.items():
        if source not in checkpoint.where:
            raise ExportError(f"{folder}: tensor {source} is missing; download the checkpoint again")
        found = checkpoint.shape(source)
        if found[:1] != (rows,) or (len(found) > 1) != bool(columns) or (columns and math.prod(found[1:]) != columns):
            shape = [rows, columns] if columns else [rows]
            raise ExportError(f"{folder}: tensor {source} has shape {list(found)}, config.json asks for {shape}")
    left = sorted(checkpoint.where.keys() - wanted.keys())
    if left:
        why = "tie_word_embeddings is true" if left[0] == "lm_head.weight" else "this architecture has none"
        raise ExportError(f"{folder}: {len(left)} tensors would be left out, first {left[0]}: {why}; check config.json")


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def store_f32(rows):
    return rows.astype("<f4", copy=False)


def store_bf16(rows):
    return f32_to_bf16(rows).astype("<u2", copy=False)


# ----------------------------------------------------------------------------------------------------------------------
# Quantised matrices: whole numbers of 8 or 4 bits with an f16 scale for each group of a row. The layout is the
# products' own (vlm_cpu.c, "linear"): a tile is 16 rows, so that a vector of 64 bytes has four numbers of
# each of 16 outputs and the scales of 16 outputs are neighbours, and everything lies in the order in which it is
# needed, for memory is fastest in one stream. It is made here, once, and never again in memory.

Q_ROWS, Q_GROUP = 16, 64
MAX_F16 = 65504.0


def pairs_of(columns):
    return -(-columns // (2 * Q_GROUP))


def pair_bytes(kind):
    """Two groups of 16 rows: their scales, then their numbers."""
    return 2 * Q_ROWS * (2 + (Q_GROUP if kind == "q8" else Q_GROUP // 2))


def as_scale(scale):
    """The nearest f16, as f32, and what to multiply by instead of dividing: 0 where the scale vanishes."""
    scale = scale.astype(np.float16).astype(np.float32)
    return scale, np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def round_q8(x):
    """Groups (..., 64) -> numbers from -127 to 127, scales (..., 1)."""
    scale, inverse = as_scale(np.abs(x).max(-1, keepdims=True) / 127)
    return np.clip(np.rint(x * inverse), -127, 127).astype(np.int8), scale


def round_q4(x):
    """Groups (..., 64) -> numbers from -8 to 7, scales (..., 1). The largest number of a group may be cut: of nine scales,
    from the one that keeps it to one of 0.7 of that, each group takes the one with the least squared error."""
    peak = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    best = best_error = numbers = None
    for reach in np.linspace(8, 8 / 0.7, 9, dtype=np.float32):
        scale, inverse = as_scale(-peak / reach)
        q = np.clip(np.rint(x * inverse), -8, 7)
        error = np.square(x - q * scale).sum(-1, keepdims=True)
        if best is None:
            best, best_error, numbers = scale, error, q
            continue
        better = error < best_error
        best, best_error, numbers = (
            np.where(better, *pair) for pair in ((scale, best), (error, best_error), (q, numbers))
        )
    return numbers.astype(np.int8), best


def quantise(kind, rows):
    """(rows, values), rows a multiple of 16 -> tiles as bytes (tiles, pairs of groups, bytes of a pair)."""
    columns, groups = rows.shape[1], 2 * pairs_of(rows.shape[1])
    padded = np.zeros((rows.shape[0], groups * Q_GROUP), np.float32)
    padded[:, :columns] = rows
    q, scale = (round_q8 if kind == "q8" else round_q4)(padded.reshape(-1, groups, Q_GROUP))
    q = q.reshape(-1, Q_ROWS, groups, Q_GROUP // 4, 4).transpose(0, 2, 3, 1, 4)  # tile, group, four, row, number
    if kind == "q8":
        q = (q.astype(np.int16) + 128).astype(np.uint8)
    else:  # number k in the low half, k + 4 in the high one
        q = (q + 8).astype(np.uint8)
        q = q[:, :, 0::2] | q[:, :, 1::2] << 4
    scales = np.ascontiguousarray(scale.reshape(-1, Q_ROWS, groups).transpose(0, 2, 1).astype("<f2"))
    parts = (x.reshape(len(q), groups // 2, -1) for x in (scales.view(np.uint8), q))
    return np.concatenate(list(parts), -1)


def in_tiles(name, kind, pieces):
    """Pieces of whole rows -> (tiles as bytes, the rows in them): sources need not end where a tile does."""
    held = None
    for values in pieces:
        if not (np.abs(values) <= MAX_F16).all():
            raise ExportError(f"{name}: has a value beyond {MAX_F16}, which {kind} cannot hold; use --type bf16")
        held = values if held is None or not len(held) else np.concatenate([held, values])
        whole = len(held) // Q_ROWS * Q_ROWS
        if whole:
            yield quantise(kind, held[:whole]), held[:whole]
        held = held[whole:]
    if held is not None and len(held):
        yield quantise(kind, np.concatenate([held, np.zeros((-len(held) % Q_ROWS, held.shape[1]), np.float32)])), held


TYPES = ("f32", "bf16", "q8", "q4")  # of a model's matrices
STORED = {"f32": ("F32", 4, store_f32), "bf16": ("BF16", 2, store_bf16)}  # safetensors dtype, bytes, conversion


@dataclasses.dataclass
class Tensor:
    """One of the file's tensors."""

    name: str
    dtype: str  # as safetensors calls it
    shape: tuple
    size: int  # bytes in the file
    meaning: tuple  # the shape of what the tensor stands for
    pieces: object  # function that yields (bytes for the file, array for the identity), in order


def weight(name, sources, columns, checkpoint, kind):
    """One tensor of the file. Vectors, which have no columns, are f32 in every file."""
    rows = sum(n for _, n in sources)

    def values():
        for source, _ in sources:
            yield from checkpoint.rows(source)

    if columns and kind not in STORED:
        shape = (-(-rows // Q_ROWS), pairs_of(columns), pair_bytes(kind))
        return Tensor(name, "U8", shape, math.prod(shape), (rows, columns), lambda: in_tiles(name, kind, values()))
    dtype, width, store = STORED[kind if columns else "f32"]
    shape = (rows, columns) if columns else (rows,)
    return Tensor(name, dtype, shape, width * math.prod(shape), shape, lambda: ((store(x), x) for x in values()))


def matrix_types(config, kind, embed=None, head=None, vision=None):
    """The types of embedding, head and vision tower. By default a quantised model keeps the tower in bf16, and one of 4
    bits has embedding and head in 8: a twentieth to a third of the numbers, and most of what rounding does to them
    goes straight into the answer."""
    quantised = kind not in STORED
    types = {
        "embed": embed or ("q8" if kind == "q4" else kind),
        "head": head or embed or ("q8" if kind == "q4" else kind),
        "vision": vision or ("bf16" if quantised else kind),
    }
    if config["text"]["tied"] and types["head"] != types["embed"]:
        raise ExportError("--embed-type and --head-type: this model's head is its embedding; give the same for both")
    if len({x == "f32" for x in (kind, *types.values())}) > 1:
        raise ExportError("f32 does not go together with other types: give f32 for all of them or for none")
    return types


def type_of(name, kind, types):
    if name in ("text.embed", "text.head"):
        return types[name.removeprefix("text.")]
    return types["vision"] if name.startswith("vision.") else kind


def table(name, values):
    dtype = "U8" if values.dtype == np.uint8 else "I32"
    return Tensor(name, dtype, values.shape, values.nbytes, values.shape, lambda: iter([(values, values)]))


def padding(number, size):
    return Tensor(f"pad.{number}", "U8", (size,), size, (size,), lambda: iter([(bytes(size), b"")]))


def aligned(tensors):
    """Put paddings between, for safetensors allows no holes, so that each tensor begins at a multiple of ALIGN."""
    result, end, pads = [], 0, 0
    for tensor in tensors:
        if end % ALIGN:
            result.append(padding(pads, -end % ALIGN))
            end, pads = end + result[-1].size, pads + 1
        result.append(tensor)
        end += tensor.size
    return result


def header_bytes(metadata, tensors):
    entries, end = {"__metadata__": metadata}, 0
    for tensor in tensors:
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [end, end + tensor.size]}
        end += tensor.size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)  # so that the data begins aligned, too
    return struct.pack("<Q", len(text)) + text


class Progress:
    """A line on stderr when somebody watches."""

    def __init__(self, total):
        self.total, self.done, self.shown, self.on = total, 0, -1, sys.stderr.isatty()

    def add(self, size):
        self.done += size
        percent = 100 * self.done // max(1, self.total)
        if self.on and percent != self.shown:
            self.shown = percent
            sys.stderr.write(f"\r{percent:3}%  {self.done / 1e6:.0f} of {self.total / 1e6:.0f} MB")
            sys.stderr.write("\n" if self.done >= self.total else "")


def write_data(out, strings, tensors):
    """Write all tensors; return the identity of what was exported, whatever the checkpoint's files and names and the
    type written: SHA-256 over the strings and tensors, each after its name, the weights as f32."""
    identity = hashlib.sha256()
    for name, text in strings.items():
        identity.update(f"{name}\0{text}\0".encode())
    progress = Progress(sum(tensor.size for tensor in tensors))
    for tensor in tensors:
        if not tensor.name.startswith("pad."):
            identity.update(f"{tensor.name}\0{list(tensor.meaning)}\0".encode())
        for stored, exact in tensor.pieces():
            out.write(stored)
            identity.update(exact)
            progress.add(memoryview(stored).nbytes)
    return identity.hexdigest()


def write_file(path, metadata, strings, tensors):
    """Write under a temporary name, rename when all is on disk; nothing stays behind after a failure."""
    metadata = {**metadata, "source": "0" * 64, **strings}
    head = header_bytes(metadata, tensors)
    needed = len(head) + sum(tensor.size for tensor in tensors)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        free = shutil.disk_usage(path.parent).free
        if free < needed:
            raise ExportError(f"{path.parent}: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free; make room")
        with open(temporary, "xb") as out:
            out.write(head)
            metadata["source"] = write_data(out, strings, tensors)  # as long as the zeros: the header keeps its size
            out.seek(0)
            out.write(header_bytes(metadata, tensors))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError as e:
        raise ExportError(f"{path}: {e.strerror or e}; nothing was written") from None
    finally:
        temporary.unlink(missing_ok=True)


def export(folder, path, kind="bf16", name=None, hint=None, sample=None, **types):
    """`types`: embed, head, vision, where they are not to be what matrix_types() chooses."""
    folder, path = pathlib.Path(folder), pathlib.Path(path)
    if not folder.is_dir():
        raise ExportError(f"{folder}: no such folder; give the folder of a Hugging Face checkpoint")
    if path.is_dir():
        raise ExportError(f"{path}: is a folder; give the name of the file to write")
    config = read_config(folder)
    types = matrix_types(config, kind, **types)
    preprocess = read_preprocess(folder, config["vision"])
    tables, added = read_tokenizer(folder, config["text"]["vocab"])
    pieces = template_pieces(folder, added, config["image_token"])
    special = {content: i for content, i, is_special in added if is_special}
    config["eos"] = list(dict.fromkeys([*end_ids(folder), special[pieces["close"]]]))
    if len(config["eos"]) > MAX_EOS or not all(0 <= x < config["text"]["vocab"] for x in config["eos"]):
        raise ExportError(f"{folder}/generation_config.json: eos_token_id holds too many ids or ids out of range")
    checkpoint = Checkpoint(folder)
    listed = [*vision_tensors(config["vision"]), *text_tensors(config["text"])]
    check_tensors(folder, checkpoint, listed)
    strings = {"config": config, "preprocess": preprocess, "template": pieces, "special_tokens": special,
               "added_tokens": {content: i for content, i, is_special in added if not is_special}}  # fmt: skip
    strings = {key: json.dumps(value, separators=(",", ":"), ensure_ascii=False) for key, value in strings.items()}
    metadata = {"format": "vlm 1", "architecture": "qwen2.5-vl", "type": kind}
    metadata |= {f"{part}_type": other for part, other in types.items() if other != kind}
    metadata |= {key: value for key, value in (("name", name), ("hint", hint), ("sample", sample)) if value}
    tensors = [weight(*entry, checkpoint, type_of(entry[0], kind, types)) for entry in listed] + [table(*x) for x in tables.items()]
    write_file(path, metadata, strings, aligned(tensors))


def main(argv=None):
    parser = argparse.ArgumentParser(description="Turn a Hugging Face checkpoint of Qwen2.5-VL into one .vlm file.")
    parser.add_argument("checkpoint", help="folder with config.json, tokenizer.json, *.safetensors ...")
    parser.add_argument("out", help="the .vlm file to write")
    parser.add_argument("--type", choices=TYPES, default="bf16", help="of the matrices (default bf16)")
    parser.add_argument("--embed-type", choices=TYPES, help="of the embedding (default --type; with q4: q8)")
    parser.add_argument("--head-type", choices=TYPES, help="of the output head (default: as the embedding)")
    parser.add_argument("--vision-type", choices=TYPES, help="of the vision tower (default --type; quantised: bf16)")
    parser.add_argument("--name", help="what the model is called, for people")
    parser.add_argument("--hint", help="what it is good at, for people")
    parser.add_argument("--sample", help="a picture to begin with, by its path from the model's folder")
    args = parser.parse_args(argv)
    try:
        types = {"embed": args.embed_type, "head": args.head_type, "vision": args.vision_type}
        export(args.checkpoint, args.out, args.type, args.name, args.hint, args.sample, **types)
    except ExportError as e:
        sys.exit(f"weights_export: {e}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds, so that the temporary file goes
    main()
