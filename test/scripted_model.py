#!/usr/bin/env python3
"""A model that says what it is told: tests of texts that no small model would write (tool calls, emoji cut in the
middle, stop strings over tokens) choose the words, and their cut into tokens, themselves.

    first = make("scripted.vlm", {"hello": [b"hel", b"lo \\xf0\\x9f", b"\\x98\\x80"]})
    POST {"messages": ..., "temperature": 0, "logit_bias": {str(first["hello"]): 100}}     # "hello \U0001F600", then the end of turn

It is the model in tiny/ with tokens added, one for each piece of a script, even where the bytes are equal. Its layers add
nothing to the residual stream, so the logits depend on the latest token alone: after a piece, the next one of its script
(the end of turn after the last) leads by far more than logit_bias can make up for; after any other token all logits are 0,
and logit_bias decides. Needs numpy only.
"""
import json
import pathlib
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
import vlm_to_hf
import weights_export


def bf16(x):
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype("<u2")  # exact for what is stored here


def chain(scripts, n_old, hidden, end):
    """Rows of the embedding and of the head such that each piece is followed by the next. Rows of +-1 keep their size
    under RMSNorm; two random ones have a product of 0 +- sqrt(hidden), against `hidden` of equal ones. The last pieces
    share a row, because what follows them is the same."""
    n = n_old + sum(map(len, scripts))
    random = np.random.default_rng(1)
    embed, head, at = np.zeros((n, hidden)), np.zeros((n, hidden)), n_old
    last = random.choice([-1.0, 1.0], hidden)
    head[end] = 8 * last
    for pieces in scripts:
        rows = random.choice([-1.0, 1.0], (len(pieces), hidden))
        rows[-1] = last
        embed[at : at + len(pieces)] = rows
        head[at + 1 : at + len(pieces)] = 8 * rows[:-1]
        at += len(pieces)
    logits = embed[n_old:] @ head.T
    second, first = np.partition(logits, -2, axis=1)[:, -2:].T
    assert (first - second > 400).all(), "another script leads: change the seed"
    return embed, head


def make(path, scripts):
    """Write the model; return the id of each script's first piece. `scripts`: {name: [bytes, ...]}."""
    model = vlm_to_hf.Model(ROOT / "tiny" / "tiny.vlm")
    config = model.json("config")
    offsets, old = model["tokenizer.offsets"], model["tokenizer.bytes"]
    pieces = [p for s in scripts.values() for p in s]
    assert all(pieces) and config["text"]["vocab"] == len(offsets) - 1
    embed, head = chain(list(scripts.values()), len(offsets) - 1, config["text"]["hidden"], config["eos"][0])
    config["text"] |= {"vocab": len(embed), "tied": False}
    changed = {
        "text.embed": bf16(embed), "text.norm": np.ones_like(model["text.norm"]),
        "tokenizer.bytes": np.concatenate([old, np.frombuffer(b"".join(pieces), np.uint8)]),
        "tokenizer.offsets": np.concatenate([offsets, offsets[-1] + np.cumsum([len(p) for p in pieces])]).astype("<i4"),
    }  # fmt: skip
    tensors = []
    for name, entry in model.header.items():
        if name.startswith("pad."):
            continue
        still = name.startswith("text.") and name.endswith((".out", ".down"))
        values = changed.get(name, np.zeros_like(model[name]) if still else model[name])
        tensors.append(tensor(name, entry["dtype"], values))
        if name == "text.norm":
            tensors.append(tensor("text.head", "BF16", bf16(head)))
    texts = ("preprocess", "template", "special_tokens", "added_tokens")
    strings = {"config": json.dumps(config), **{key: model.strings[key] for key in texts}}
    metadata = {key: model.strings[key] for key in ("format", "architecture", "type")}
    weights_export.write_file(pathlib.Path(path), metadata, strings, weights_export.aligned(tensors))
    starts = len(offsets) - 1 + np.cumsum([0, *map(len, scripts.values())])
    return {name: int(start) for name, start in zip(scripts, starts)}


def tensor(name, dtype, values):
    data = np.ascontiguousarray(values)
    return weights_export.Tensor(name, dtype, list(data.shape), data.nbytes, data.shape, lambda: iter([(data, data)]))
