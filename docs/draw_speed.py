#!/usr/bin/env python3
"""Draw where the time goes: a bar for each stage, cut by operation, and one from a picture file to the first token.

    ./vlm bench -m MODEL --profile --json > profile.json
    ./vlm -m MODEL -i PHOTO.jpg -p "What is it?" -n 1 --json > answer.json
    python3 docs/draw_speed.py profile.json answer.json docs/speed.svg
"""
import json
import sys

WIDTH, BAR, LEFT, RIGHT, TOP = 960, 26, 110, 130, 56
GROUPS = {  # of operations, by the first word of their names
    "linear": ("#3a7ebf", ["linear"]), "attention": ("#8e6bbf", ["attention_segments", "attention_paged", "kv_store"]),
    "norms": ("#4aa564", ["rmsnorm"]), "glu, gelu": ("#d9a441", ["glu", "gelu"]), "rope": ("#c0553a", ["rope", "rope_table"]),
    "sampling": ("#5bb5b0", ["sample"]), "embed, copies": ("#9aa5b1", ["embed", "gather_rows", "upload", "download"]),
    "patches": ("#b5527f", ["patches"]), "engine": ("#444444", ["engine"]),
}
FIRST = {"start": "#444444", "decode file": "#c0553a", "resize": "#d9a441", "vision": "#8e6bbf", "prefill": "#3a7ebf"}


def text(x, y, s, anchor="start", colour="#333"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{s}</text>'


def duration(seconds):
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def bar(y, name, parts, total, note):
    """parts: (name, colour, seconds). What is too small to see still counts in the total."""
    out, x, scale = [text(LEFT - 8, y + 17, name, "end"), text(WIDTH - RIGHT + 8, y + 17, note)], LEFT, (WIDTH - LEFT - RIGHT) / total
    for part, colour, seconds in parts:
        w = max(0, seconds) * scale
        out.append(f'<rect x="{x:.1f}" y="{y + 3}" width="{w:.1f}" height="{BAR - 6}" fill="{colour}"><title>{part}, {duration(seconds)}</title></rect>')
        if w > 30:
            out.append(text(x + w / 2, y + 17, f"{100 * seconds / total:.0f}%", "middle", "#fff"))
        x += w
    return out


def legend(y, colours):
    out, x = [], LEFT
    for name, colour in colours.items():
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>' + text(x + 16, y + 10, name))
        x += 30 + 6.5 * len(name)
    return out


def main(profile, answer, target):
    o, a = json.load(open(profile)), json.load(open(answer))
    out, y = legend(8, {k: c for k, (c, _) in GROUPS.items()}), TOP - 24
    for s in o["stages"]:
        if "error" in s:
            continue
        total = sum(op["seconds"] for op in s["operations"])
        parts = [(k, c, sum(op["seconds"] for op in s["operations"] if op["name"].split()[0] in names)) for k, (c, names) in GROUPS.items()]
        steps = 32 if s["stage"] == "decode" else 1  # a repetition of decoding is so many steps
        out += bar(y, f"{s['stage']} {s['size']}", parts, total, duration(total / steps) + (" a step" if steps > 1 else ""))
        y += BAR
    r, ms = a["receipt"], 1e-3
    vision = r["vision"]["ms"]
    first = [a["timings"]["load"], r["picture_decode"]["ms"], r["picture_resize"]["ms"], vision, r["prefill"]["ms"] - vision]
    y += 14
    out += legend(y, FIRST)
    out += bar(y + 18, "first token", [(k, c, t * ms) for (k, c), t in zip(FIRST.items(), first)], sum(first) * ms, duration(sum(first) * ms))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 18 + BAR + 8}" font-family="sans-serif" font-size="11">'
    open(target, "w").write(head + '<rect width="100%" height="100%" fill="#fff"/>' + "\n".join(out) + "</svg>\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
