#!/usr/bin/env python3
"""Turn a .vlm file back into a Hugging Face checkpoint folder, the inverse of weights_export.py.

    python test/vlm_to_hf.py MODEL.vlm OUT_DIR

Exporting the folder again gives the same bytes. Matrices keep the file's type, quantised ones become f32, which holds
their values exactly; norms and biases become bf16 where that loses nothing. Needs numpy only.
"""

import json
import pathlib
import struct
import sys

import numpy as np

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def matrix_shape(config, name):
    """Of a quantised matrix, whose tensor is in tiles."""
    t, v, last = config["text"], config["vision"], name.split(".")[-1]
    if name.startswith("vision."):
        c, f, wide = v["hidden"], v["ff"], v["merge"] ** 2 * v["hidden"]
        shapes = {"patch_embed": (c, 3 * v["temporal"] * v["patch"] ** 2), "qkv": (3 * c, c), "proj": (c, c),
                  "gate_up": (2 * f, c), "down": (c, f), "merger_up": (wide, wide), "merger_down": (v["out"], wide)}  # fmt: skip
    else:
        c, f, q = t["hidden"], t["ff"], t["heads"] * t["head_dim"]
        shapes = {"embed": (t["vocab"], c), "head": (t["vocab"], c), "gate_up": (2 * f, c), "down": (c, f),
                  "qkv": (q + 2 * t["kv_heads"] * t["head_dim"], c), "out": (c, q)}  # fmt: skip
    return shapes[last]


def dequantise(tiles, rows, columns):
    """Tiles of 16 rows, groups of 64 columns, as docs/format.md has them -> (rows, columns) in f32, exactly."""
    bits, groups = 8 if tiles.shape[2] > 2048 else 4, 2 * tiles.shape[1]
    q = tiles[:, :, 64:].reshape(len(tiles), groups, -1, 16, 4)  # tile, group, vector, row, number
    if bits == 4:
        q = np.stack([q & 15, q >> 4], 3).reshape(len(tiles), groups, 16, 16, 4)  # both halves are vectors
    scales = tiles[:, :, :64].copy().view("<f2").reshape(len(tiles), groups, 1, 16, 1)
    values = (q.astype(np.float32) - (128 if bits == 8 else 8)) * scales.astype(np.float32)
    return values.transpose(0, 3, 1, 2, 4).reshape(len(tiles) * 16, -1)[:rows, :columns]


class Model:
    """A .vlm file: `strings` of its metadata, and its tensors as arrays (bf16 as uint16, quantised matrices as f32)."""

    TYPES = {"F32": "<f4", "BF16": "<u2", "I32": "<i4", "U8": "u1"}

    def __init__(self, path):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self.header = json.loads(file.read(length))
        self.strings = self.header.pop("__metadata__")
        self.map = np.memmap(path, np.uint8, "r", 8 + length)

    def __getitem__(self, name):
        entry = self.header[name]
        begin, end = entry["data_offsets"]
        array = self.map[begin:end].view(self.TYPES[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "U8" and name.startswith(("text.", "vision.")):
            return dequantise(array, *matrix_shape(self.json("config"), name))
        return array

    def json(self, name):
        return json.loads(self.strings[name])


# ----------------------------------------------------------------------------------------------------------------------
# The small files


def configuration(config, specials, template, dtype):
    t, v = config["text"], config["vision"]
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": dtype,
        "tie_word_embeddings": t["tied"],
        "image_token_id": config["image_token"],
        "video_token_id": specials.get("<|video_pad|>", 0),
        "vision_start_token_id": specials[template["image_before"]],
        "vision_end_token_id": specials[template["image_after"]],
        "bos_token_id": config["eos"][-1],
        "eos_token_id": config["eos"][0],
        "hidden_act": "silu",
        "hidden_size": t["hidden"],
        "intermediate_size": t["ff"],
        "num_hidden_layers": t["layers"],
        "num_attention_heads": t["heads"],
        "num_key_value_heads": t["kv_heads"],
        "vocab_size": t["vocab"],
        "max_position_embeddings": t["max_position"],
        "rms_norm_eps": t["eps"],
        "rope_theta": t["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": t["mrope_section"]},
        "use_sliding_window": False,
        "vision_config": {
            "depth": v["layers"],
            "hidden_act": "silu",
            "hidden_size": v["hidden"],
            "intermediate_size": v["ff"],
            "num_heads": v["heads"],
            "in_chans": 3,
            "out_hidden_size": v["out"],
            "patch_size": v["patch"],
            "spatial_merge_size": v["merge"],
            "temporal_patch_size": v["temporal"],
            "tokens_per_second": 2,
            "window_size": v["window"],
            "fullatt_block_indexes": v["full_layers"],
        },
    }


def preprocessor(config, preprocess):
    v = config["vision"]
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": v["patch"],
        "merge_size": v["merge"],
        "temporal_patch_size": v["temporal"],
        "min_pixels": preprocess["min_pixels"],
        "max_pixels": preprocess["max_pixels"],
        "image_mean": preprocess["mean"],
        "image_std": preprocess["std"],
    }


def letters():
    """How byte-level BPE writes each byte."""
    table = {b: chr(b) for b in range(256) if chr(b).isprintable() and chr(b) != " "}
    return table | {b: chr(256 + i) for i, b in enumerate(x for x in range(256) if x not in table)}


def tokenizer(model):
    offsets, data = model["tokenizer.offsets"], model["tokenizer.bytes"].tobytes()
    table, added = letters(), {**model.json("special_tokens"), **model.json("added_tokens")}
    spelled = ["".join(table[b] for b in data[i:j]) for i, j in zip(offsets, offsets[1:])]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    names = set(added.values())
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": name, **flags, "special": name in model.json("special_tokens")}
            for name, i in sorted(added.items(), key=lambda x: x[1])
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(spelled) if i not in names},
            "merges": [[spelled[left], spelled[right]] for left, right, _ in model["tokenizer.merges"].tolist()],
        },
    }


def template(pieces):
    """A Jinja template of the pieces. They are written as string literals, so that nothing is trimmed."""

    def out(*texts):
        return "{{ " + json.dumps("".join(texts), ensure_ascii=False) + " }}"

    p = pieces
    picture = p["image_before"] + p["image"] + p["image_after"]
    default = ""
    if p["default_system"] is not None:
        turn = out(p["open"], "system", p["after_role"], p["default_system"], p["close"], p["after_close"])
        default = "{% if loop.first and message['role'] != 'system' %}" + turn + "{% endif %}"
    return (
        "{% for message in messages %}" + default + out(p["open"]) + "{{ message['role'] }}" + out(p["after_role"])
        + "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        + "{% if part['type'] == 'image' %}" + out(picture) + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        + out(p["close"], p["after_close"]) + "{% endfor %}"
        + "{% if add_generation_prompt %}" + out(p["open"], "assistant", p["after_role"]) + "{% endif %}"
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Weights


def vision_tensors(model, v):
    """Yield (hub name, array)."""
    patches = model["vision.patch_embed"]
    yield "visual.patch_embed.proj.weight", patches.reshape(-1, 3, v["temporal"], v["patch"], v["patch"])
    for i in range(v["layers"]):
        ours, theirs = f"vision.{i:02}.", f"visual.blocks.{i}."
        for a, b in (
            ("norm1", "norm1"),
            ("norm2", "norm2"),
            ("qkv", "attn.qkv"),
            ("proj", "attn.proj"),
            ("down", "mlp.down_proj"),
        ):
            yield f"{theirs}{b}.weight", model[ours + a]
            if not a.startswith("norm"):
                yield f"{theirs}{b}.bias", model[f"{ours}{a}_bias"]
        for k, part in enumerate(("gate", "up")):
            rows = slice(k * v["ff"], (k + 1) * v["ff"])
            yield f"{theirs}mlp.{part}_proj.weight", model[ours + "gate_up"][rows]
            yield f"{theirs}mlp.{part}_proj.bias", model[ours + "gate_up_bias"][rows]
    yield "visual.merger.ln_q.weight", model["vision.merger_norm"]
    for a, b in (("up", "0"), ("down", "2")):
        yield f"visual.merger.mlp.{b}.weight", model[f"vision.merger_{a}"]
        yield f"visual.merger.mlp.{b}.bias", model[f"vision.merger_{a}_bias"]


def text_tensors(model, t):
    yield "model.embed_tokens.weight", model["text.embed"]
    q, kv = t["heads"] * t["head_dim"], t["kv_heads"] * t["head_dim"]
    for i in range(t["layers"]):
        ours, theirs = f"text.{i:02}.", f"model.layers.{i}."
        yield theirs + "input_layernorm.weight", model[ours + "norm1"]
        for x, rows in (("q", slice(0, q)), ("k", slice(q, q + kv)), ("v", slice(q + kv, q + 2 * kv))):
            yield f"{theirs}self_attn.{x}_proj.weight", model[ours + "qkv"][rows]
            yield f"{theirs}self_attn.{x}_proj.bias", model[ours + "qkv_bias"][rows]
        yield theirs + "self_attn.o_proj.weight", model[ours + "out"]
        yield theirs + "post_attention_layernorm.weight", model[ours + "norm2"]
        yield theirs + "mlp.gate_proj.weight", model[ours + "gate_up"][: t["ff"]]
        yield theirs + "mlp.up_proj.weight", model[ours + "gate_up"][t["ff"] :]
        yield theirs + "mlp.down_proj.weight", model[ours + "down"]
    yield "model.norm.weight", model["text.norm"]
    if not t["tied"]:
        yield "lm_head.weight", model["text.head"]


def narrowed(array, matrix_type):
    """A vector of a bf16 model as bf16 where that is exact; everything else as it is."""
    if matrix_type == "bf16" and array.dtype == np.float32:
        bits = np.ascontiguousarray(array).view(np.uint32)
        return (bits >> 16).astype("<u2") if not (bits & 0xFFFF).any() else array
    return array


def write_safetensors(path, tensors):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, array in tensors:
        dtype = "BF16" if array.dtype == np.uint16 else "F32"
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors:
            file.write(np.ascontiguousarray(array))


def convert(path, out):
    model, out = Model(path), pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    config, pieces, kind = model.json("config"), model.json("template"), model.strings["type"]
    dtype = "bfloat16" if kind == "bf16" else "float32"
    files = {
        "config.json": configuration(config, model.json("special_tokens"), pieces, dtype),
        "generation_config.json": {"eos_token_id": config["eos"]},
        "preprocessor_config.json": preprocessor(config, model.json("preprocess")),
        "tokenizer.json": tokenizer(model),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": pieces["close"]},
    }
    for name, value in files.items():
        (out / name).write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
    (out / "chat_template.jinja").write_text(template(pieces), encoding="utf-8")
    tensors = [*vision_tensors(model, config["vision"]), *text_tensors(model, config["text"])]
    write_safetensors(out / "model.safetensors", [(name, narrowed(array, kind)) for name, array in tensors])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: vlm_to_hf.py MODEL.vlm OUT_DIR")
    convert(*sys.argv[1:])
