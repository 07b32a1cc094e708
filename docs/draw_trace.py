#!/usr/bin/env python3
"""Draw a --trace file as SVG: a lane for the vision tower, one for each request, and the KV blocks held below.

    ./vlm --chats FILE --trace trace.json && python3 docs/draw_trace.py trace.json docs/trace.svg
"""
import json
import sys

WIDTH, LANE, LEFT, RIGHT, TOP = 960, 26, 110, 30, 30
COLOURS = {"patches": "#8e6bbf", "prefill": "#3a7ebf", "decode": "#4aa564", "waiting": "#d9d9d9"}


def text(x, y, s, anchor="start", colour="#333"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{s}</text>'


def main(source, target):
    events = json.load(open(source))
    bars = [e for e in events if e["ph"] == "X"]
    blocks = [(e["ts"], e["args"]["held"]) for e in events if e["ph"] == "C" and e["name"] == "kv blocks"]
    first, last = min(e["ts"] for e in bars), max(e["ts"] + e["dur"] for e in bars)
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    lanes = sorted({e["tid"] for e in bars})
    bottom = TOP + LANE * len(lanes)
    out = []
    for i, lane in enumerate(lanes):
        out.append(text(LEFT - 8, TOP + LANE * i + 17, f"request {lane}" if lane else "vision tower", "end"))
    for e in bars:
        kind = e["name"].split()[0].rstrip(",")
        x, y, w = LEFT + (e["ts"] - first) * scale, TOP + LANE * lanes.index(e["tid"]) + 4, max(1, e["dur"] * scale - 0.5)
        out.append(f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{LANE - 8}" fill="{COLOURS[kind]}"><title>{e["name"]}, {e["dur"] / 1000:.2f} ms</title></rect>')
        if w > 28 and kind != "waiting":
            out.append(text(x + w / 2, y + 13, e["name"].split()[-1], "middle", "#fff"))
    most = max(n for _, n in blocks) or 1
    points = [(LEFT + (t - first) * scale, bottom + 50 - 40 * n / most) for t, n in blocks]
    steps = [f"{x:.1f},{y:.1f} {nx:.1f},{y:.1f}" for (x, y), (nx, _) in zip(points, points[1:] + [(WIDTH - RIGHT, 0)])]
    out.append(f'<polyline points="{" ".join(steps)}" fill="none" stroke="#c0553a" stroke-width="1.5"/>')
    out.append(text(LEFT - 8, bottom + 36, f"KV blocks, to {most}", "end"))
    for i in range(6):
        x = LEFT + (WIDTH - LEFT - RIGHT) * i / 5
        out.append(text(x, bottom + 68, f"{(last - first) * i / 5000:.0f} ms", "middle", "#888"))
    x = LEFT
    for kind, colour in COLOURS.items():
        out.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/>' + text(x + 17, 18, kind))
        x += 100
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 76}" font-family="sans-serif" font-size="11">'
    open(target, "w").write(head + '<rect width="100%" height="100%" fill="#fff"/>' + "\n".join(out) + "</svg>\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
