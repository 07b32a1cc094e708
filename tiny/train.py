"""Trains the small model that ships with vlm.c, from nothing, on two CPU cores.

    vision   pictures -> codes            the vision tower alone, onto a fixed code for what each cell holds
    text     perfect codes -> answers     the language model alone (at the same time, on the other core)
    joint    pictures -> answers          both together, two processes that share the weights
    export   a Hugging Face checkpoint    check compares it with transformers, logit by logit

The model is a plain Qwen2.5-VL of 3.9 million parameters. Its forward is written here a second
time, in plain torch, for one reason: speed. Pictures of all sizes lie in one flat list of patches,
and questions about one picture share its prefix through the attention mask.

Parameters carry their Hugging Face names. "rows" are the vision tower's output, one for each cell.
"""

import argparse
import json
import math
import os
import time

# oneDNN compiles a kernel for every new shape of a product; keep them all (read when torch starts)
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
import numpy as np
import torch
import torch.nn.functional as F

import world

# ---------------------------------------------------------------------------------------------
# 1. The model

VISION = dict(
    depth=6,
    hidden_size=128,
    intermediate_size=384,
    num_heads=4,
    window_size=112,
    fullatt_block_indexes=[1, 3, 5],
)
TEXT = dict(
    hidden_size=192, intermediate_size=512, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=2
)
VOCAB = 768
HEAD = 32  # head size, of both towers
SECTIONS = [4, 6, 6]  # of a head's 16 rotary frequencies: time, height, width
THETA = 1000.0  # 1e6 would turn the width axis by less than 2e-4 a cell
EPS = 1e-6


def shapes():
    """name -> shape, in the checkpoint's order."""
    c, f, d = VISION["hidden_size"], VISION["intermediate_size"], TEXT["hidden_size"]
    s = {"visual.patch_embed.proj.weight": (c, 3, 2, 14, 14)}
    for i in range(VISION["depth"]):
        b = f"visual.blocks.{i}."
        s |= {
            b + "norm1.weight": (c,),
            b + "norm2.weight": (c,),
            b + "attn.qkv.weight": (3 * c, c),
            b + "attn.qkv.bias": (3 * c,),
            b + "attn.proj.weight": (c, c),
            b + "attn.proj.bias": (c,),
        }
        for n, o, k in (("gate", f, c), ("up", f, c), ("down", c, f)):
            s |= {b + f"mlp.{n}_proj.weight": (o, k), b + f"mlp.{n}_proj.bias": (o,)}
    s |= {
        "visual.merger.ln_q.weight": (c,),
        "visual.merger.mlp.0.weight": (4 * c, 4 * c),
        "visual.merger.mlp.0.bias": (4 * c,),
        "visual.merger.mlp.2.weight": (d, 4 * c),
        "visual.merger.mlp.2.bias": (d,),
    }
    f, kv = TEXT["intermediate_size"], TEXT["num_key_value_heads"] * HEAD
    s["model.embed_tokens.weight"] = (VOCAB, d)
    for i in range(TEXT["num_hidden_layers"]):
        b = f"model.layers.{i}."
        s |= {b + "input_layernorm.weight": (d,), b + "post_attention_layernorm.weight": (d,)}
        for n, o in (("q", d), ("k", kv), ("v", kv)):
            s |= {b + f"self_attn.{n}_proj.weight": (o, d), b + f"self_attn.{n}_proj.bias": (o,)}
        s |= {
            b + "self_attn.o_proj.weight": (d, d),
            b + "mlp.gate_proj.weight": (f, d),
            b + "mlp.up_proj.weight": (f, d),
            b + "mlp.down_proj.weight": (d, f),
        }
    s["model.norm.weight"] = (d,)
    return s


def initial(seed=0):
    """Gains 1, biases 0, matrices Gaussian; the last matrix of each branch smaller, so that depth starts gently."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            out[name] = torch.ones(shape) if "norm" in name or "ln_q" in name else torch.zeros(shape)
            continue
        std = 0.05 if "embed_tokens" in name else math.prod(shape[1:]) ** -0.5
        if any(k in name for k in ("attn.proj", "down_proj", "o_proj")):
            std *= 0.3
        out[name] = torch.randn(shape, generator=g) * std
    return out


class Permute(torch.autograd.Function):
    """x[index]. back undoes it for every row that counts, so the gradient is a gather too, not a slow scatter."""

    @staticmethod
    def forward(ctx, x, index, back):
        ctx.save_for_backward(back)
        return x[index]

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.saved_tensors[0]], None, None


permute = Permute.apply


def rmsnorm(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def rope(x, cos, sin):
    """x (N, heads, 32), tables (N, 1, 32); the halves of a head rotate together."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def attention(q, k, v, mask=None):
    """(..., queries, 32) on (..., keys, 32). Written out: torch's fused CPU backward is several times slower."""
    s = (q * HEAD**-0.5) @ k.mT
    if mask is not None:
        s = s + mask
    return s.softmax(-1) @ v


class VisionPlan:
    """Where the patches of a list of pictures lie: windows, rotary tables, lengths. Grids: (rows, columns).

    round_up: patches are counted up to a multiple of it, windows too, so that few different shapes occur."""

    _cache = {}

    def __init__(self, grids, dtype, round_up=512):
        self.lengths = [a * b for a, b in grids]
        idx, back, cos, sin, at, slot = [], [], [], [], 0, 0
        for g in grids:
            i, b, c, s = self.one(*g)
            idx.append(torch.where(i < 0, -1, i + at))
            back.append(b + slot)
            cos.append(c)
            sin.append(s)
            at, slot = at + g[0] * g[1], slot + len(i)
        self.cells, self.pad = at // 4, -at % round_up
        windows = (slot + self.pad) // 64 + 1
        windows += -windows % 16 if round_up > 1 else 0
        idx = torch.cat(
            (*idx, at + torch.arange(self.pad), torch.full((windows * 64 - slot - self.pad,), -1))
        )
        valid = (idx >= 0).view(-1, 1, 1, 64)  # (windows, 1, 1, patches of a window)
        self.mask, self.valid = torch.where(valid, 0.0, -1e4).to(dtype), valid.view(-1, 1).to(dtype)
        self.index, self.back = idx.clamp(min=0), torch.cat((*back, slot + torch.arange(self.pad)))
        fill = torch.zeros(self.pad, 32)
        self.cos, self.sin = (torch.cat((*t, fill)).unsqueeze(1).to(dtype) for t in (cos, sin))

    @classmethod
    def one(cls, gh, gw):
        """For one grid: window slots -> patch (or -1), patch -> slot, and the tables (P, 32)."""
        if (gh, gw) not in cls._cache:
            n = torch.arange(gh * gw)
            cell, sub = n // 4, n % 4  # patches are in merge order
            y, x = cell // (gw // 2) * 2 + sub // 2, cell % (gw // 2) * 2 + sub % 2
            w = (y // 8) * ((gw + 7) // 8) + x // 8  # a window is 8x8 patches
            idx, back = torch.full(((int(w.max()) + 1) * 64,), -1), torch.empty_like(n)
            for k in range(int(w.max()) + 1):
                members = n[w == k]
                idx[k * 64 : k * 64 + len(members)] = members
                back[members] = k * 64 + torch.arange(len(members))
            freq = 10000.0 ** (-torch.arange(0, 16, 2).float() / 16)
            angle = torch.cat((y[:, None] * freq, x[:, None] * freq), 1).repeat(1, 2)
            cls._cache[gh, gw] = idx, back, angle.cos(), angle.sin()
        return cls._cache[gh, gw]


def patch_embed(weight, pixels, dtype):
    """uint8 patches (P, 588) -> (P, 128). Mean and deviation are in the weight; pixel - 128 is exact in bf16."""
    mean, std = (torch.from_numpy(a).view(1, 3, 1) for a in (world.MEAN, world.STD))
    w = weight.view(len(weight), 3, 2, 196).sum(2) / std  # both frames are the same picture
    shift = (w * (128 / 255 - mean)).sum((1, 2))
    return F.linear(pixels.to(dtype) - 128, (w / 255).flatten(1).to(dtype), shift.to(dtype)).float()


def vision(p, m, pixels, plan, taps=()):
    """Patches -> rows (cells, 192). p: parameters, m: matrices in the compute type. taps: layers to return too."""
    dtype, c, kept = m["visual.merger.mlp.0.weight"].dtype, VISION["hidden_size"], []
    x = patch_embed(p["visual.patch_embed.proj.weight"], F.pad(pixels, (0, 0, 0, plan.pad)), dtype)
    n = len(x)
    for i in range(VISION["depth"]):
        b = f"visual.blocks.{i}."
        h = rmsnorm(x, p[b + "norm1.weight"]).to(dtype)
        q, k, v = F.linear(h, m[b + "attn.qkv.weight"], m[b + "attn.qkv.bias"]).view(n, 3, -1, HEAD).unbind(1)
        q, k = rope(q, plan.cos, plan.sin), rope(k, plan.cos, plan.sin)
        if i in VISION["fullatt_block_indexes"]:
            *parts, rest = zip(*(t.split((*plan.lengths, plan.pad)) for t in (q, k, v)))
            o = torch.cat(
                [attention(*(t.transpose(0, 1) for t in part)).transpose(0, 1) for part in parts] + [rest[2]]
            ).reshape(n, c)
        else:
            q, k, v = (
                permute(t, plan.index, plan.back).view(-1, 64, 4, HEAD).transpose(1, 2) for t in (q, k, v)
            )
            o = attention(q, k, v, plan.mask).transpose(1, 2).reshape(-1, c)
            o = Unwindow.apply(o, plan.index, plan.back, plan.valid)
        x = x + F.linear(o, m[b + "attn.proj.weight"], m[b + "attn.proj.bias"])
        h = rmsnorm(x, p[b + "norm2.weight"]).to(dtype)
        g = F.silu(F.linear(h, m[b + "mlp.gate_proj.weight"], m[b + "mlp.gate_proj.bias"]))
        u = F.linear(h, m[b + "mlp.up_proj.weight"], m[b + "mlp.up_proj.bias"])
        x = x + F.linear(g * u, m[b + "mlp.down_proj.weight"], m[b + "mlp.down_proj.bias"])
        if i in taps:
            kept.append(x[: 4 * plan.cells])
    h = rmsnorm(x, p["visual.merger.ln_q.weight"]).view(-1, 4 * c).to(dtype)
    h = F.gelu(F.linear(h, m["visual.merger.mlp.0.weight"], m["visual.merger.mlp.0.bias"]))
    rows = F.linear(h, m["visual.merger.mlp.2.weight"], m["visual.merger.mlp.2.bias"]).float()[: plan.cells]
    return (rows, *kept) if taps else rows


class Unwindow(torch.autograd.Function):
    """Window slots back to patches; the gradient of an empty slot is zero."""

    @staticmethod
    def forward(ctx, x, index, back, valid):
        ctx.save_for_backward(index, valid)
        return x[back]

    @staticmethod
    def backward(ctx, grad):
        index, valid = ctx.saved_tensors
        return grad[index] * valid, None, None, None


def matrices(p, dtype):
    """The parameters in the compute type: converted once a step, inside the graph."""
    return {k: v.to(dtype) for k, v in p.items()}


# ---------------------------------------------------------------------------------------------
# 2. Optimiser: Muon on the matrices, AdamW on the rest


def orthogonalise(g):
    """Newton-Schulz towards the nearest orthogonal matrix, a stack (n, r, c) at a time."""
    x = g.bfloat16()
    flip = x.shape[1] > x.shape[2]
    if flip:
        x = x.mT
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).bfloat16()
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if flip else x).float()


class Optimiser:
    """Updates the tensors of p that it owns: of the matrices of each shape, rank r of n owns every n-th."""

    def __init__(self, p, rank=0, ranks=1):
        groups, self.rest, self.state, self.steps = {}, [], {}, 0
        for name, t in p.items():
            if t.ndim < 2 or "embed" in name or "head" in name:
                self.rest.append(name)
            else:
                parts = 3 if "qkv" in name else 1  # q, k and v turn separately
                groups.setdefault((t.shape[0] // parts, t[0].numel()), []).extend(
                    (name, j, parts) for j in range(parts)
                )
        cut = []
        for shape in sorted(groups):  # split by halves, so that both processes have the same work
            members = groups[shape]
            cut += [members[r::ranks] for r in range(ranks)][rank : rank + 1]
        self.groups = [g for g in cut if g]
        self.rest = self.rest[rank::ranks]

    @torch.no_grad()
    def step(self, p, grads, muon, adam, eyes=1.0):
        """muon, adam: the rates; eyes: the vision tower's share of them."""
        self.steps += 1
        for group in self.groups:
            pick = lambda d, name, j, parts: d[name].view(parts, -1, d[name][0].numel())[j]
            g = torch.stack([pick(grads, *m) for m in group])
            if not g.any():  # not in use at this stage: not even decayed
                continue
            buffer = self.state.setdefault("muon", {}).setdefault(str(group[0]), torch.zeros_like(g))
            buffer.lerp_(g, 0.05)
            u = orthogonalise(g.lerp(buffer, 0.95))
            for m, d in zip(group, u):
                w, rate = pick(p, *m), muon * (eyes if "visual" in m[0] else 1)
                w.mul_(1 - rate * 0.01).add_(d, alpha=-rate * max(1, u.shape[1] / u.shape[2]) ** 0.5)
        for name in self.rest:
            g, s = grads[name], self.state.setdefault(name, {})
            m, v = s.setdefault("m", torch.zeros_like(g)), s.setdefault("v", torch.zeros_like(g))
            m.lerp_(g, 0.1)
            v.lerp_(g * g, 0.02)
            a, b = 1 - 0.9**self.steps, 1 - 0.98**self.steps
            rate = adam * (eyes if "visual" in name else 1)
            p[name].sub_(rate * (m / a) / ((v / b).sqrt() + 1e-8))


def schedule(progress):
    """Rate over the share of the time used: a short rise, then one long way down to zero."""
    return min(1, progress / 0.02) * (1 - progress) ** 1.0


# ---------------------------------------------------------------------------------------------
# 3. Codes: what a perfect vision tower would say of each cell

BORDERS = [0.16, 0.31, 0.375, 0.44, 0.56, 0.625, 0.69, 0.84]  # of the nine bins along each axis
WHAT = world.SHAPES + list("0123456789")
GROUPS = {"what": len(WHAT), "colour": 6, "x": 9, "y": 9, "rank": 5}
OFFSETS, _n = {}, 2  # codes 0 and 1: nothing here, something here
for _k, _v in GROUPS.items():
    OFFSETS[_k], _n = _n, _n + _v
CODES = torch.linalg.qr(torch.randn(192, 192, generator=torch.Generator().manual_seed(7)))[0][
    :_n
].contiguous()
# Length of one code. Each layer adds about 1 to every element of the residual stream, so codes of length .6
# (.04 an element) drown in it before layer 2 can read them: at 5 minutes colour was right 15% of the time.
CODE_SIZE = 4.0


def facts(scene):
    """Per thing: its cell and its class in each group."""
    out = []
    for rank, t in enumerate(scene.things):
        x, y = scene.place(t)
        out.append(
            (
                scene.cell(t),
                WHAT.index(t.kind),
                world.COLOURS.index(t.colour),
                int(np.searchsorted(BORDERS, x)),
                int(np.searchsorted(BORDERS, y)),
                rank,
            )
        )
    return out


def targets(scenes):
    """All cells of the scenes in a row -> has (cells,), objects' rows (K,), classes (K, 5)."""
    has, index, classes, at = [], [], [], 0
    for s in scenes:
        w, h = s.resized
        n = (w // world.CELL) * (h // world.CELL)
        f = facts(s)
        v = np.zeros(n, np.float32)
        for t in f:
            v[t[0]] = 1
            index.append(at + t[0])
            classes.append(t[1:])
        has.append(v)
        at += n
    return (
        torch.from_numpy(np.concatenate(has)),
        torch.tensor(index, dtype=torch.long),
        torch.tensor(classes, dtype=torch.long).view(-1, 5),
    )


def perfect(scenes):
    """The rows a perfect vision tower would give for the scenes, (cells, 192)."""
    has, index, classes = targets(scenes)
    rows = CODES[has.long()].clone()
    for j, k in enumerate(GROUPS):
        rows[index] += CODES[OFFSETS[k] + classes[:, j]]
    return rows * CODE_SIZE


def code_loss(rows, scenes):
    """Distance to the codes, and cross-entropy of reading them; also the share read right, by group."""
    has, index, classes = targets(scenes)
    rows = rows / CODE_SIZE
    weight = 1 + 4 * has
    loss = ((rows - perfect(scenes) / CODE_SIZE).square().sum(1) * weight).sum() / weight.sum()
    logits = rows @ CODES.t() * 6
    p = F.binary_cross_entropy_with_logits(logits[:, 1] - logits[:, 0], has, reduction="none")
    loss = loss + 2 * (p * weight).sum() / weight.sum()
    seen = {"has": float((((logits[:, 1] > logits[:, 0]) == (has > 0.5)).float().mean()))}
    for j, (k, n) in enumerate(GROUPS.items()):
        if len(index):
            part = logits[index, OFFSETS[k] : OFFSETS[k] + n]
            loss = loss + 0.6 * F.cross_entropy(part, classes[:, j])
            seen[k] = float((part.argmax(1) == classes[:, j]).float().mean())
    return loss, seen


def dense_targets(scenes):
    """Per patch: on a thing?, offset to its centre in cells, class, colour. Offsets teach to find centres."""
    fg, off, what, hue = [], [], [], []
    for s in scenes:
        w, h = s.resized
        gw, gh = w // 14, h // 14
        n = np.arange(gh * gw)
        cell, sub = n // 4, n % 4
        y = (cell // (gw // 2) * 2 + sub // 2) * 14 + 7
        x = (cell % (gw // 2) * 2 + sub % 2) * 14 + 7
        owner = np.full(gh * gw, -1)
        best = np.full(gh * gw, np.inf)
        for i, t in enumerate(s.things):
            sx, sy = (0.36, 0.5) if s.number else (0.42, 0.42)
            d = (
                np.maximum(abs(x - t.x) / (t.size * sx + 3), abs(y - t.y) / (t.size * sy + 3))
                if s.number
                else np.hypot(x - t.x, y - t.y) / (t.size * sx + 3)
            )
            take = (d < 1) & (d < best)
            owner[take], best[take] = i, d[take]
        on = owner >= 0
        o = np.zeros((gh * gw, 2), np.float32)
        tx, ty = np.array([t.x for t in s.things] or [0]), np.array([t.y for t in s.things] or [0])
        o[:, 0], o[:, 1] = (tx[owner] - x) / 28, (ty[owner] - y) / 28
        fg.append(on)
        off.append(o)
        what.append(np.array([WHAT.index(t.kind) for t in s.things] or [0])[owner])
        hue.append(np.array([world.COLOURS.index(t.colour) for t in s.things] or [0])[owner])
    return tuple(torch.from_numpy(np.concatenate(a)) for a in (fg, off, what, hue))


def dense_loss(x, w, b, dense):
    fg, off, what, hue = dense
    o = F.linear(F.rms_norm(x, (x.shape[1],)), w, b)  # 1 + 2 + 15 + 6
    loss = F.binary_cross_entropy_with_logits(o[:, 0], fg.float())
    o = o[fg]
    return (
        loss
        + (o[:, 1:3] - off[fg]).abs().mean()
        + 0.5 * F.cross_entropy(o[:, 3:18], what[fg])
        + 0.5 * F.cross_entropy(o[:, 18:], hue[fg])
    )


# ---------------------------------------------------------------------------------------------
# 4. Stage one: vision alone


class Pool:
    """Fresh pictures, and some seen before: drawing costs a quarter of a step."""

    def __init__(self, size=1500):
        self.items, self.size = {}, size

    def get(self, rng, kind, fresh=0.4):
        old = self.items.setdefault(kind, [])
        if len(old) > 50 and rng.random() > fresh:
            return old[rng.integers(len(old))]
        scene = world.number_scene(rng) if kind == "number" else world.shapes_scene(rng)
        item = (scene, *world.patches(world.resize(world.render(scene))))
        if len(old) < self.size:
            old.append(item)
        else:
            old[rng.integers(self.size)] = item
        return item


def stack(items):
    """[(scene, patches, grid)] -> scenes, patches (P, 588) uint8, grids"""
    return (
        [i[0] for i in items],
        torch.from_numpy(np.concatenate([i[1] for i in items])),
        [i[2] for i in items],
    )


def whiten(p, rng, scale=1.0):
    """Patch embedding = principal components of real patches, each scaled to the same variance."""
    _, x, _ = stack([Pool().get(rng, "number" if i % 4 == 0 else "shapes", 1) for i in range(200)])
    mean, std = (torch.from_numpy(a).repeat_interleave(196) for a in (world.MEAN, world.STD))
    x = (x / 255 - mean) / std
    x = x[x.std(1) > 0.05] if (x.std(1) > 0.05).sum() > 3000 else x
    values, vectors = torch.linalg.eigh(x.t() @ x / len(x))
    values, vectors = values.flip(0)[:128], vectors.flip(1)[:, :128]
    w = (vectors * (values + values[40]).rsqrt() * scale).t()  # the floor keeps noise components small
    with torch.no_grad():
        p["visual.patch_embed.proj.weight"].copy_(w.view(128, 3, 1, 14, 14).expand(-1, -1, 2, -1, -1) / 2)


class Meter:
    """Running means, by name: of all values at first, then each new one weighs a fixed share."""

    def __init__(self, share):
        self.share, self.mean, self.count = share, {}, {}

    def add(self, name, value):
        self.count[name] = n = self.count.get(name, 0) + 1
        w = max(self.share, 1 / n)
        self.mean[name] = self.mean.get(name, 0.0) * (1 - w) + value * w

    def skills(self, skills):
        for k, v in skills.items():
            for x in v:
                self.add(k, 100.0 * x)

    def __str__(self):
        return " ".join(f"{k} {v:.3g}" for k, v in sorted(self.mean.items()))


def save(path, **what):
    torch.save(what, path + ".new")
    os.replace(path + ".new", path)


def detached(p):
    return {k: v.detach() for k, v in p.items()}


def train_vision(args):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    p = {k: v for k, v in initial(args.seed).items() if k.startswith("visual.")}
    whiten(p, np.random.default_rng(args.seed))
    for layer in (3, 5):  # the dense lesson's readers; they are dropped after this stage
        p[f"head{layer}.w"], p[f"head{layer}.b"] = torch.randn(24, 128) * 0.05, torch.zeros(24)
    step, elapsed, opt, path = 0, 0.0, Optimiser(p), os.path.join(args.run, "vision.pt")
    if os.path.exists(path):
        c = torch.load(path)
        p, step, elapsed, opt.state, opt.steps = c["p"], c["step"], c["elapsed"], c["opt"], c["step"]
    for t in p.values():
        t.requires_grad_()
    pool, start, saved, mean = Pool(), time.time() - elapsed, time.time(), Meter(0.03)
    keep = lambda: save(path, p=detached(p), step=step, elapsed=elapsed, opt=opt.state)
    while (elapsed := time.time() - start) < args.minutes * 60:
        rng = np.random.default_rng([args.seed, 1, step])
        rate = schedule(elapsed / (args.minutes * 60))
        kinds = ["number" if i % 4 == 0 else "shapes" for i in range(args.batch)]
        scenes, x, grids = stack([pool.get(rng, k) for k in kinds])
        m = matrices(p, torch.bfloat16)
        rows, a, b = vision(p, m, x, VisionPlan(grids, torch.bfloat16), taps=(3, 5))
        loss, seen = code_loss(rows, scenes)
        dense = dense_targets(scenes)
        extra = dense_loss(a, p["head3.w"], p["head3.b"], dense) + dense_loss(
            b, p["head5.w"], p["head5.b"], dense
        )
        (loss + 0.5 * extra).backward()
        opt.step(p, {k: v.grad for k, v in p.items()}, 0.018 * rate, 2e-3 * rate)
        for t in p.values():
            t.grad = None
        step += 1
        for k, v in (seen | {"~loss": float(loss.detach()), "~dense": float(extra.detach())}).items():
            mean.add(k, v)
        if step % 50 == 0 or step < 4:
            print(f"vision {step} {elapsed:.0f}s", mean, flush=True)
        if time.time() - saved > 150:
            saved = time.time()
            keep()
    keep()


# ---------------------------------------------------------------------------------------------
# 5. Text: tokenizer, documents, the language model

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
END_OF_TEXT, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(
    VOCAB - len(SPECIAL), VOCAB
)
PRE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def make_tokenizer(path, seed=3):
    """Byte-level BPE on what the generator says; Qwen's normaliser, splitting rule and special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    rng = np.random.default_rng(seed)
    asker, lines = world.Asker(rng), []
    for _ in range(6000):
        scenes = [world.number_scene(rng) if rng.random() < 0.2 else world.shapes_scene(rng) for _ in "12"]
        turns = (
            [asker.question(scenes[0]) for _ in range(5)]
            + [asker.about(scenes, 1)]
            + asker.next_picture(scenes)
        )
        turns += (
            [asker.chat(k) for k in world.ANSWERS if k != "blind"]
            + (asker.follow_up(scenes[0]) or [])
            + [asker.more(scenes)]
        )
        for q in turns:
            if q:
                lines += [q.text, q.answer]
        lines += ["system\n", "user\n", "assistant\n", world.ANSWERS["blind"], asker.pick(world.SYSTEMS)]
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=VOCAB - len(SPECIAL),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    t.add_special_tokens(SPECIAL)
    assert t.get_vocab_size() == VOCAB and t.token_to_id(SPECIAL[0]) == END_OF_TEXT
    t.save(path)


class Coder:
    """Text -> ids, remembered; answers also say which piece each token belongs to."""

    def __init__(self, path):
        from tokenizers import Tokenizer

        self.t, self.known = Tokenizer.from_file(path), {}

    def __call__(self, text):
        if text not in self.known:
            self.known[text] = self.t.encode(text).ids
        return self.known[text]

    def answer(self, pieces):
        e = self.t.encode("".join(t for t, _ in pieces))
        ends = np.cumsum([len(t) for t, _ in pieces])
        return e.ids, [int(np.searchsorted(ends, end - 1, side="right")) for _, end in e.offsets]


class Doc:
    """One row of training: pictures and text shared by all branches, then the branches, each a chat of its own.

    A branch sees the shared part and itself; its positions go on from where the shared part ends."""

    def __init__(self, coder):
        self.code, self.ids, self.pos, self.branch, self.target, self.weight = coder, [], [], [], [], []
        self.items, self.starts, self.ends = [], [], []  # pictures; where their cells and <|vision_end|> lie
        self.look, self.answers = [], []  # attention lessons; (first, last + 1, skill) of each answer
        self.next = self.now = 0
        self.fork = None

    def add(self, ids):
        self.ids += ids
        self.pos += [(i, i, i) for i in range(self.next, self.next + len(ids))]
        self.branch += [self.now] * len(ids)
        self.next += len(ids)
        self.target += [-100] * len(ids)
        self.weight += [0.0] * len(ids)

    def picture(self, item):
        rows, columns = (n // 2 for n in item[2])
        self.add([VISION_START])
        self.starts.append(len(self.ids))
        start = self.next
        self.add([IMAGE_PAD] * (rows * columns))
        for i in range(rows * columns):
            self.pos[self.starts[-1] + i] = (start, start + i // columns, start + i % columns)
        self.next = start + max(rows, columns)
        self.ends.append(len(self.ids))
        self.add([VISION_END])
        self.items.append(item)

    def system(self, text):
        if text is not None:
            self.add([IM_START, *self.code("system\n"), *self.code(text), IM_END, *self.code("\n")])

    def user(self):
        self.add([IM_START, *self.code("user\n")])

    def reply(self, q):
        """The end of the user's turn and the answer, which is what is learned."""
        self.add([IM_END, *self.code("\n"), IM_START, *self.code("assistant\n")])
        ids, piece = self.code.answer(q.pieces)
        at = len(self.ids) - 1
        self.answers.append((at, at + len(ids) + 1, q.skill))
        for k, t in enumerate([*ids, IM_END]):
            self.target[at + k], self.weight[at + k] = t, (len(ids) + 1) ** -0.5
            if k < len(ids) and q.pieces[piece[k]][1]:
                self.look.append((at + k, q.pieces[piece[k]][1]))
            self.add([t])

    def turns(self, questions, first=True):
        """Further turns of a chat; the first one's user header may have been written already."""
        for i, q in enumerate(questions):
            if i or not first:
                self.add(self.code("\n"))
                self.user()
            self.add(self.code(q.text))
            self.reply(q)

    def start_branch(self):
        self.fork = self.next if self.fork is None else self.fork
        self.next, self.now = self.fork, self.now + 1

    def close(self):
        """Padded to a multiple of 32, so that few different lengths occur; then the attention mask."""
        pad = -len(self.ids) % 32
        self.now = -1
        self.add([END_OF_TEXT] * pad)
        b = torch.tensor(self.branch)
        n = len(b)
        seen = (b[None] == 0) | (b[None] == b[:, None])
        self.mask = torch.where(seen & torch.ones(n, n, dtype=torch.bool).tril(), 0.0, -1e4)
        return self


def chat_doc(coder, messages, items, answer=()):
    """OpenAI style messages as the chat template writes them, up to where the answer goes on; .length unpadded."""
    d, items = Doc(coder), list(items)
    if messages[0]["role"] != "system":
        d.system(world.SYSTEMS[0])
    for m in messages:
        d.add([IM_START, *coder(m["role"] + "\n")])
        for part in (
            [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]
        ):
            if part["type"] == "image":
                d.picture(items.pop(0))
            else:
                d.add(coder(part["text"]))
        d.add([IM_END, *coder("\n")])
    d.add([IM_START, *coder("assistant\n"), *answer])
    d.length = len(d.ids)
    return d.close()


def text_model(p, m, docs, rows, taught=False):
    """Documents and the pictures' rows -> last hidden states (T, 192); taught: the attention lesson's loss too."""
    dtype, d = m["model.norm.weight"].dtype, TEXT["hidden_size"]
    T = sum(len(x.ids) for x in docs)
    pad = -T % 512
    ids = torch.tensor([i for x in docs for i in x.ids] + [END_OF_TEXT] * pad)
    pos = torch.tensor([q for x in docs for q in x.pos] + [(0, 0, 0)] * pad).float()  # (T, 3)
    x = F.embedding(ids, p["model.embed_tokens.weight"])
    if len(rows):
        x = x.index_copy(0, (ids == IMAGE_PAD).nonzero()[:, 0], rows)
    freq = THETA ** (-torch.arange(0, 32, 2).float() / 32)
    axis = torch.repeat_interleave(torch.arange(3), torch.tensor(SECTIONS))
    angle = (pos[:, axis] * freq).repeat(1, 2)
    cos, sin = angle.cos().unsqueeze(1).to(dtype), angle.sin().unsqueeze(1).to(dtype)
    lengths = [len(q.ids) for q in docs] + [pad]
    masks = [q.mask.to(dtype) for q in docs]
    lesson = x.new_zeros(())
    for i in range(TEXT["num_hidden_layers"]):
        b = f"model.layers.{i}."
        h = rmsnorm(x, p[b + "input_layernorm.weight"]).to(dtype)
        w = torch.cat([m[b + f"self_attn.{n}_proj.weight"] for n in "qkv"])
        bias = torch.cat([m[b + f"self_attn.{n}_proj.bias"] for n in "qkv"])
        q, k, v = F.linear(h, w, bias).view(-1, 10, HEAD).split((6, 2, 2), 1)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        out = []
        for j, (qd, kd, vd) in enumerate(zip(*(t.split(lengths) for t in (q, k, v)))):
            n = lengths[j]
            if j == len(docs):
                out.append(qd.reshape(n, d))
                break
            # the three heads that share keys, one after the other
            qd = qd.transpose(0, 1).reshape(2, 3 * n, HEAD)
            kd, vd = kd.transpose(0, 1), vd.transpose(0, 1)
            s = ((qd * HEAD**-0.5) @ kd.mT).view(2, 3, n, n) + masks[j]
            if taught and i == 2 and docs[j].look:
                lesson = lesson + attention_lesson(s[:, 0], docs[j])
            o = s.softmax(-1).view(2, 3 * n, n) @ vd
            out.append(o.view(6, n, HEAD).transpose(0, 1).reshape(n, d))
        x = x + F.linear(torch.cat(out), m[b + "self_attn.o_proj.weight"])
        h = rmsnorm(x, p[b + "post_attention_layernorm.weight"]).to(dtype)
        h = F.silu(F.linear(h, m[b + "mlp.gate_proj.weight"])) * F.linear(h, m[b + "mlp.up_proj.weight"])
        x = x + F.linear(h, m[b + "mlp.down_proj.weight"])
    h = rmsnorm(x, p["model.norm.weight"])
    return (h, lesson / max(1, sum(len(q.look) for q in docs))) if taught else h


def attention_lesson(scores, doc):
    """Two heads of layer 2 are taught to look at the things asked about: each gets 1/(n+2), the rest goes to
    <|vision_end|>, so that how much is left says how many there are. scores (2, L, L)."""
    at = torch.tensor([a for a, _ in doc.look])
    want = torch.zeros(2, len(at), scores.shape[-1])
    for r, (_, looks) in enumerate(doc.look):
        for h, (picture, things) in enumerate(looks):
            scene = doc.items[picture][0]
            for t in things:
                want[h, r, doc.starts[picture] + scene.cell(scene.things[t])] = 1 / (len(things) + 2)
            want[h, r, doc.ends[picture]] = 1 - len(things) / (len(things) + 2)
    return -(want * scores[:, at].float().log_softmax(-1)).sum() / 2


def answer_loss(p, m, h, docs):
    """Cross-entropy of the answers' tokens (one of a long answer counts less); and skill -> [right or not], an
    answer being right when every token of it would be chosen: exactly when greedy decoding gives it."""
    target = torch.tensor([t for x in docs for t in x.target])
    weight = torch.tensor([t for x in docs for t in x.weight])
    at = (target >= 0).nonzero()[:, 0]
    some = torch.cat((at, at.new_zeros(-len(at) % 128)))
    words = m["model.embed_tokens.weight"]
    logits = F.linear(h[some].to(words.dtype), words).float()[: len(at)]
    loss = F.cross_entropy(logits, target[at], reduction="none")
    right = torch.ones(len(target), dtype=torch.bool)
    right[at] = logits.argmax(1) == target[at]
    right, start, skills = right.numpy(), 0, {}
    for x in docs:
        for a, b, skill in x.answers:
            skills.setdefault(skill, []).append(bool(right[start + a : start + b].all()))
        start += len(x.ids)
    return (loss * weight[at]).sum() / weight[at].sum(), skills


# What a step trains on: kinds of documents and their shares.
DOCS = {"shapes": 0.46, "number": 0.15, "two": 0.22, "next": 0.08, "text first": 0.04, "chat": 0.05}


SMALL_TALK = [k for k in world.ANSWERS if k != "blind"]


def draw_doc(rng, asker, coder, get, kind):
    """One document. get(kind) gives an item, whose first member is a scene."""
    d = Doc(coder)
    r = rng.random()
    d.system(world.SYSTEMS[0] if r < 0.75 else asker.pick(world.SYSTEMS) if r < 0.96 else None)
    some = lambda: get("number" if rng.random() < 0.2 else "shapes")
    if kind == "chat":
        chat_branches(rng, asker, d)
    elif kind == "next":
        late_picture(asker, d, some()) if rng.random() < 0.25 else next_picture(rng, asker, d, get)
    elif kind == "text first":  # people also write first and attach the picture after
        item = some()
        q = asker.question(item[0])
        d.user()
        d.add(coder(q.text))
        d.picture(item)
        d.reply(q)
    else:
        picture_branches(rng, asker, d, [some(), some()] if kind == "two" else [get(kind)], kind)
    return d.close()


def chat_branches(rng, asker, d):
    """Talk without a picture, one to three turns."""
    for _ in range(8):
        d.start_branch()
        d.user()
        turns = []
        for _ in range(int(rng.choice([1, 2, 3], p=[0.75, 0.2, 0.05]))):
            key = "off" if rng.random() < 0.4 else asker.pick(SMALL_TALK)
            turns.append(asker.blind() if rng.random() < 0.35 else asker.chat(key))
        d.turns(turns)


def late_picture(asker, d, item):
    """Small talk, then a picture."""
    d.user()
    d.turns(
        [
            (
                asker.blind()
                if asker.rng.random() < 0.3
                else asker.chat(asker.pick(["hello", "how", "who", "can", "off"]))
            )
        ]
    )
    d.add(d.code("\n"))
    d.user()
    d.picture(item)
    for _ in range(4):
        d.start_branch()
        d.turns([asker.question(item[0])])


def next_picture(rng, asker, d, get):
    """A picture and a question, then another picture: the same question again, or others."""
    number = rng.random() < 0.25
    items = [get("number" if n else "shapes") for n in (number, number != (rng.random() < 0.2))]
    a, b = asker.next_picture([i[0] for i in items])
    d.user()
    d.picture(items[0])
    d.turns([a])
    d.add(d.code("\n"))
    d.user()
    d.picture(items[1])
    for k in range(3):
        d.start_branch()
        d.turns([asker.question(items[1][0]).moved(1) if k else b])


def picture_branches(rng, asker, d, items, kind):
    """One or two pictures and many questions about them."""
    d.user()
    for i in items:
        d.picture(i)
    scenes = [i[0] for i in items]
    for _ in range({"shapes": 10, "number": 5, "two": 8}[kind]):
        d.start_branch()
        if kind == "two":
            compare = rng.random() < 0.45 and not any(s.number for s in scenes)
            d.turns([compare and asker.more(scenes) or asker.about(scenes, int(rng.integers(2)))])
            continue
        r, q = rng.random(), asker.question(scenes[0])
        if r < 0.15:
            turns = asker.follow_up(scenes[0]) or [q]
        elif r < 0.23:
            turns = [q] + [asker.question(scenes[0]) for _ in range(int(rng.integers(1, 3)))]
        elif r < 0.34:
            talk = asker.chat(
                asker.pick(["thanks", "bye", "off", "off", "off", asker.pick(["hello", "who", "can", "how"])])
            )
            turns = [talk] if rng.random() < 0.7 else [q, talk]
        else:
            turns = [q]
        d.turns(turns)


def draw_docs(rng, asker, coder, get, tokens, patches=10**9):
    """Documents of all kinds until either budget is used up."""
    docs, kinds = [], list(DOCS)
    while True:
        d = draw_doc(rng, asker, coder, get, kinds[rng.choice(len(kinds), p=list(DOCS.values()))])
        tokens -= len(d.ids)
        patches -= 4 * sum(math.prod(i[0].resized) // 784 for i in d.items)
        if tokens < 0 or patches < 0:
            return docs
        docs.append(d)


def draw_unseen(rng, kind):
    """A scene without its picture, and the grid of patches that the picture would have."""
    scene = world.number_scene(rng) if kind == "number" else world.shapes_scene(rng)
    w, h = scene.resized
    return scene, None, (h // 14, w // 14)


def noisy(scenes):
    """Nearly perfect rows."""
    rows = perfect(scenes)
    return rows + torch.randn(rows.shape) * (0.02 * CODE_SIZE)


def train_text(args):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = os.path.join(args.run, "tokenizer.json")
    if not os.path.exists(tokenizer):
        make_tokenizer(tokenizer)
    coder = Coder(tokenizer)
    p = {k: v for k, v in initial(args.seed).items() if not k.startswith("visual.")}
    step, elapsed, opt, path = 0, 0, Optimiser(p), os.path.join(args.run, "text.pt")
    if os.path.exists(path):
        c = torch.load(path)
        p, step, elapsed, opt.state, opt.steps = c["p"], c["step"], c["elapsed"], c["opt"], c["step"]
    for t in p.values():
        t.requires_grad_()
    start, saved, mean = time.time() - elapsed, time.time(), Meter(0.01)
    asker = world.Asker(None)
    keep = lambda: save(
        path, p={k: v.detach() for k, v in p.items()}, step=step, elapsed=elapsed, opt=opt.state
    )
    while (elapsed := time.time() - start) < args.minutes * 60:
        asker.rng = rng = np.random.default_rng([args.seed, 2, step])
        rate = schedule(elapsed / (args.minutes * 60))
        docs = draw_docs(rng, asker, coder, lambda kind: draw_unseen(rng, kind), args.batch * 256)
        rows = noisy([i[0] for d in docs for i in d.items])
        m = matrices(p, torch.bfloat16)
        h, lesson = text_model(p, m, docs, rows, taught=True)
        loss, skills = answer_loss(p, m, h, docs)
        (loss + 0.5 * lesson).backward()
        opt.step(p, {k: v.grad for k, v in p.items()}, 0.018 * rate, 2e-3 * rate)
        for t in p.values():
            t.grad = None
        step += 1
        mean.add("loss", float(loss.detach()))
        mean.add("lesson", float(lesson.detach()))
        mean.skills(skills)
        if step % 25 == 0 or step < 4:
            print(f"text {step} {elapsed:.0f}s", mean, flush=True)
        if time.time() - saved > 150:
            saved = time.time()
            keep()
    keep()


# ---------------------------------------------------------------------------------------------
# 6. Stage three: both together, in two processes


class Shared:
    """The parameters and each process's gradients, in memory that all processes share. Every process adds up
    all gradients and updates the matrices it owns; two barriers a step, and nothing is ever copied."""

    def __init__(self, ranks):
        self.sizes = {k: math.prod(v) for k, v in shapes().items()}
        self.flat = torch.zeros(sum(self.sizes.values())).share_memory_()
        self.grads = torch.zeros(ranks, len(self.flat)).share_memory_()
        self.control = torch.zeros(2, dtype=torch.float64).share_memory_()  # seconds so far, 1: save now
        self.barrier = torch.multiprocessing.get_context("spawn").Barrier(ranks)

    def views(self, flat):
        return {k: t.view(shapes()[k]) for k, t in zip(self.sizes, flat.split(list(self.sizes.values())))}


def train_joint(args):
    shared = Shared(args.processes)
    p = shared.views(shared.flat)
    path = os.path.join(args.run, "joint.pt")
    read = lambda name: torch.load(os.path.join(args.run, name))["p"]
    start = read("joint.pt") if os.path.exists(path) else read("vision.pt") | read("text.pt")
    for k in p:
        p[k].copy_(start[k])
    torch.multiprocessing.spawn(joint_process, (args, shared), args.processes)


def joint_loss(p, rng, asker, coder, pool, args, elapsed, progress):
    """One batch: the loss, its parts for the log, and which answers were right."""
    m, budget = matrices(p, torch.bfloat16), args.batch * 256
    if elapsed < args.warm * 60:  # at first the text goes on alone: two processes, and no pictures to pay for
        docs = draw_docs(rng, asker, coder, lambda kind: draw_unseen(rng, kind), budget)
        rows, codes = noisy([i[0] for d in docs for i in d.items]), torch.zeros(())
    else:
        docs = draw_docs(rng, asker, coder, lambda kind: pool.get(rng, kind), budget, budget)
        scenes, x, grids = stack([i for d in docs for i in d.items])
        rows = vision(p, m, x, VisionPlan(grids, torch.bfloat16))
        codes, _ = code_loss(rows, scenes)
    h, lesson = text_model(p, m, docs, rows, taught=True)
    loss, skills = answer_loss(p, m, h, docs)
    parts = {
        "~loss": float(loss.detach()),
        "~lesson": float(lesson.detach()),
        "~codes": float(codes.detach()),
    }
    # the lessons fade; what counts in the end is the answers
    return loss + (1 - progress) * (0.8 * lesson + 0.1 * codes), parts, skills


def joint_process(rank, args, shared):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + rank)
    p, path = shared.views(shared.flat), os.path.join(args.run, "joint.pt")
    leaves = {k: v.detach().requires_grad_() for k, v in p.items()}
    coder, pool, asker = Coder(os.path.join(args.run, "tokenizer.json")), Pool(1200), world.Asker(None)
    opt, step, before = Optimiser(p, rank, args.processes), 0, 0.0
    if os.path.exists(path):
        c = torch.load(path)
        step, before = c["step"], c["elapsed"]
        if os.path.exists(f"{path}.{rank}"):
            opt.state, opt.steps = torch.load(f"{path}.{rank}")["opt"], step
    mean, began, saved, exported = Meter(0.01), time.time(), time.time(), time.time()
    elapsed, progress = before, before / (args.minutes * 60)
    while progress < 1:
        asker.rng = rng = np.random.default_rng([args.seed, 3, step, rank])
        loss, parts, skills = joint_loss(leaves, rng, asker, coder, pool, args, elapsed, progress)
        loss.backward()
        for k, g in shared.views(shared.grads[rank]).items():
            g.copy_(leaves[k].grad) if leaves[k].grad is not None else g.zero_()
            leaves[k].grad = None
        if rank == 0:
            shared.control[0] = before + time.time() - began
            shared.control[1] = time.time() - saved > 180 or shared.control[0] >= args.minutes * 60
        shared.barrier.wait()
        elapsed, progress = float(shared.control[0]), min(1, float(shared.control[0]) / (args.minutes * 60))
        rate, saving = schedule(progress), bool(shared.control[1])
        # the vision tower is trained already: at full rate from the first step it came apart
        eyes = 0.5 * min(1, max(0, elapsed / 60 - args.warm))
        opt.step(p, shared.views(shared.grads.mean(0)), args.muon * rate, 1.5e-3 * rate, eyes)
        step += 1
        mean.skills(skills)
        for k, v in parts.items():
            mean.add(k, v)
        if rank == 0 and (step % 50 == 0 or step < 4):
            print(f"joint {step} {elapsed:.0f}s", mean, flush=True)
        shared.barrier.wait()
        if saving:
            saved = time.time()
            save(f"{path}.{rank}", opt=opt.state)
            if rank == 0:
                save(path, p=detached(p), step=step, elapsed=elapsed)
                if time.time() - exported > args.snapshot * 60 or progress >= 1:
                    exported = time.time()
                    export(p, os.path.join(args.run, "tokenizer.json"), args.out)


# ---------------------------------------------------------------------------------------------
# 7. The checkpoint

TEMPLATE = """\
{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def config():
    text = dict(
        TEXT,
        model_type="qwen2_5_vl_text",
        vocab_size=VOCAB,
        hidden_act="silu",
        rms_norm_eps=EPS,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        max_window_layers=80,
        sliding_window=None,
        use_sliding_window=False,
        use_cache=True,
        attention_dropout=0.0,
        initializer_range=0.02,
        bos_token_id=END_OF_TEXT,
        eos_token_id=IM_END,
        pad_token_id=END_OF_TEXT,
        layer_types=["full_attention"] * TEXT["num_hidden_layers"],
        rope_parameters=dict(mrope_section=SECTIONS, rope_theta=THETA, rope_type="default"),
    )
    eyes = dict(
        VISION,
        model_type="qwen2_5_vl",
        hidden_act="silu",
        in_channels=3,
        initializer_range=0.02,
        out_hidden_size=TEXT["hidden_size"],
        patch_size=14,
        spatial_merge_size=2,
        temporal_patch_size=2,
        tokens_per_second=2,
    )
    return dict(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        model_type="qwen2_5_vl",
        dtype="bfloat16",
        tie_word_embeddings=True,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        text_config=text,
        vision_config=eyes,
    )


def export(p, tokenizer, out):
    """Writes the checkpoint in Hugging Face layout, weights in bf16; each file appears whole or not at all."""
    from safetensors.torch import save_file

    os.makedirs(out, exist_ok=True)
    files = {
        "config.json": json.dumps(config(), indent=2) + "\n",
        "generation_config.json": json.dumps(
            dict(bos_token_id=END_OF_TEXT, eos_token_id=IM_END, pad_token_id=END_OF_TEXT, do_sample=False),
            indent=2,
        )
        + "\n",
        "tokenizer_config.json": json.dumps(
            dict(
                tokenizer_class="Qwen2Tokenizer",
                eos_token=SPECIAL[2],
                pad_token=SPECIAL[0],
                unk_token=None,
                bos_token=None,
                model_max_length=4096,
                add_prefix_space=False,
            ),
            indent=2,
        )
        + "\n",
        "preprocessor_config.json": json.dumps(
            dict(
                image_processor_type="Qwen2VLImageProcessor",
                processor_class="Qwen2_5_VLProcessor",
                patch_size=14,
                merge_size=2,
                temporal_patch_size=2,
                min_pixels=world.MIN_PIXELS,
                max_pixels=world.MAX_PIXELS,
                image_mean=[0.48145466, 0.4578275, 0.40821073],
                image_std=[0.26862954, 0.26130258, 0.27577711],
            ),
            indent=2,
        )
        + "\n",
        "chat_template.jinja": TEMPLATE,
        "tokenizer.json": open(tokenizer, encoding="utf-8").read(),
    }
    for name, text in files.items():
        with open(os.path.join(out, name + ".new"), "w", encoding="utf-8") as f:
            f.write(text)
        os.replace(os.path.join(out, name + ".new"), os.path.join(out, name))
    weights = os.path.join(out, "model.safetensors")
    save_file(
        {k: v.detach().bfloat16().contiguous() for k, v in p.items()}, weights + ".new", {"format": "pt"}
    )
    os.chmod(weights + ".new", 0o644)
    os.replace(weights + ".new", weights)


def load(folder, dtype=torch.float32):
    """An exported checkpoint -> parameters, matrices in the compute type, coder."""
    from safetensors.torch import load_file

    p = {k: v.float() for k, v in load_file(os.path.join(folder, "model.safetensors")).items()}
    return p, matrices(p, dtype), Coder(os.path.join(folder, "tokenizer.json"))


@torch.no_grad()
def check(args):
    """Every logit against Qwen2_5_VLForConditionalGeneration, f32, eager; patches against its image processor."""
    from PIL import Image
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil

    hf = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    processor = pil.Qwen2VLImageProcessorPil.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    p, m, coder = load(args.model)
    rng = np.random.default_rng(11)
    asker, pool, worst = world.Asker(rng), Pool(), 0.0
    for kind in ("one", "two", "next", "none", "one", "two"):
        scenes = [
            world.number_scene(rng) if rng.random() < 0.3 else world.shapes_scene(rng)
            for _ in range({"one": 1, "none": 0}.get(kind, 2))
        ]
        images = [world.render(s) for s in scenes]
        items = [(s, *world.patches(world.resize(i))) for s, i in zip(scenes, images)]
        d = Doc(coder)
        d.system(world.SYSTEMS[0])
        d.user()
        if kind == "next":
            for k, (item, q) in enumerate(zip(items, asker.next_picture(scenes))):
                if k:
                    d.add(coder("\n"))
                    d.user()
                d.picture(item)
                d.turns([q])
        else:
            for item in items:
                d.picture(item)
            d.turns(
                [
                    (
                        asker.about(scenes, 1)
                        if kind == "two"
                        else asker.question(scenes[0]) if items else asker.chat("off")
                    )
                ]
            )
        n = len(d.ids)
        ids = torch.tensor([d.ids])
        text = tokenizer.decode(d.ids)
        assert tokenizer(text).input_ids == d.ids, "tokenizer.json and our pieces disagree"
        extra = {}
        if items:
            x = processor(images=images, return_tensors="pt")
            ours = torch.cat(
                [
                    (
                        torch.from_numpy(i[1]).float() / 255
                        - torch.from_numpy(world.MEAN).repeat_interleave(196)
                    )
                    / torch.from_numpy(world.STD).repeat_interleave(196)
                    for i in items
                ]
            )
            theirs = x["pixel_values"].view(-1, 3, 2, 196)
            gap = max(float((theirs[:, :, t] - ours.view(-1, 3, 196)).abs().max()) for t in (0, 1))
            assert gap < 1e-5, f"patches differ by {gap}"
            extra = dict(pixel_values=x["pixel_values"], image_grid_thw=x["image_grid_thw"])
        theirs = hf(input_ids=ids, mm_token_type_ids=(ids == IMAGE_PAD).int(), **extra).logits[0]
        d.close()
        rows = (
            vision(
                p,
                m,
                torch.from_numpy(np.concatenate([i[1] for i in items])),
                VisionPlan([i[2] for i in items], torch.float32),
            )
            if items
            else torch.zeros(0, 192)
        )
        ours = text_model(p, m, [d], rows)[:n] @ p["model.embed_tokens.weight"].t()
        gap, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
        print(f"{kind:5} {n:4} tokens: largest difference of a logit {gap:.1e}, of {scale:.1f}")
        worst = max(worst, gap / scale)
        if not gap <= 1e-4 * scale:
            raise SystemExit("the two forwards differ")
    print(f"agrees: {worst:.1e} of the largest logit")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = ap.add_subparsers(dest="command", required=True)
    v = sub.add_parser("vision", help="the vision tower alone")
    t = sub.add_parser("text", help="the language model alone, on perfect codes")
    j = sub.add_parser("joint", help="both, from vision.pt and text.pt; goes on from joint.pt")
    for s, batch in ((v, 22), (t, 13), (j, 13)):
        s.add_argument("--run", required=True, help="folder of checkpoints and logs")
        s.add_argument(
            "--minutes", type=float, required=True, help="the learning rate reaches zero after this time"
        )
        s.add_argument("--seed", type=int, default=1)
        s.add_argument(
            "--batch",
            type=int,
            default=batch,
            help="pictures a step (vision); tokens and patches a step in units of 256 (text, joint)",
        )
    j.add_argument("--out", required=True, help="folder for the Hugging Face checkpoint")
    j.add_argument("--processes", type=int, default=2)
    j.add_argument("--muon", type=float, default=0.014, help="learning rate of the matrices")
    j.add_argument("--warm", type=float, default=15, help="minutes on perfect codes before pictures are used")
    j.add_argument("--snapshot", type=float, default=5, help="minutes between exports")
    c = sub.add_parser("check", help="compare with transformers")
    c.add_argument("model", help="an exported checkpoint")
    args = ap.parse_args()
    {"vision": train_vision, "text": train_text, "joint": train_joint, "check": check}[args.command](args)


if __name__ == "__main__":
    main()
