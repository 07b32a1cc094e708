#!/usr/bin/env python3
"""Draw what test/soak.py saw: memory over the requests of the loop, and over the number of large pictures at once.

    python3 docs/draw_soak.py build/soak.jsonl docs/soak.svg      also prints the tables of docs/serving.md
"""

import json
import pathlib
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 960, 210, 70, 150, 34, 74
COLOURS = {"weights": "#9aa5b1", "kv": "#3a7ebf", "images": "#8e6bbf", "arena": "#4aa564", "io": "#d9a03f"}
SIDES = ["#7fb2e5", "#3a7ebf", "#1c4a75"]
RED = "#c0553a"
MIB = 1 << 20


def text(x, y, s, anchor="start", colour="#333"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{s}</text>'


def shape(kind, points, style):
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<{kind} points="{joined}" {style}/>'


def line(points, colour, width=1.5, dash=""):
    return shape("polyline", points, f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dash}"')


class Chart:
    """A frame at a height of the page: x from 0 to right in the data's units, y from 0 to top in MiB."""

    def __init__(self, y, right, top, title, ticks):
        self.y, self.right, self.top = y, right, top
        self.out = [text(LEFT, y - 12, title)]
        for i in range(5):
            left, end = self.at(0, top * MIB * i / 4), self.at(right, top * MIB * i / 4)
            self.out.append(line([left, end], "#e4e4e4", 1))
            self.out.append(text(LEFT - 8, left[1] + 4, f"{top * i / 4:.0f} MiB", "end", "#888"))
        for x, label in ticks:
            self.out.append(text(self.at(x, 0)[0], y + HEIGHT + 16, label, "middle", "#888"))

    def at(self, x, size):
        return LEFT + x * (WIDTH - LEFT - RIGHT) / self.right, self.y + HEIGHT * (1 - size / MIB / self.top)

    def series(self, points, colour, label):
        """A line with its name at its right end."""
        points = [self.at(x, y) for x, y in points]
        self.out += [line(points, colour), text(points[-1][0] + 6, points[-1][1] + 4, label, colour=colour)]

    def upright(self, x, reach, colour, dash, label):
        """A line from the bottom at x to the top at reach, with its name there."""
        foot, head = self.at(x, 0), self.at(reach, self.top * MIB)
        self.out += [line([foot, head], colour, 1.5, dash), text(head[0] + 8, head[1] + 12, label, colour=colour)]


def nice(value):
    """The next of 1, 2, 4, 8 times a power of ten that is not less."""
    power = 1
    while power * 10 < value:
        power *= 10
    return next(power * n for n in (1, 2, 4, 8, 10) if power * n >= value)


def draw_loop(rows):
    """The most that each owner used before each flush, one above the other, and resident memory after it."""
    last, top = rows[-1]["requests"], nice(max(r["rss"] for r in rows) / MIB)
    chart = Chart(TOP, last, top, "The loop: memory over image requests", [(last * i / 5, f"{last * i // 5:,}") for i in range(6)])
    floor = [0] * len(rows)
    for i, (name, colour) in enumerate(COLOURS.items()):
        roof = [b + r["seen"][name] for b, r in zip(floor, rows)]
        edges = [[chart.at(r["requests"], y) for r, y in zip(rows, ys)] for ys in (roof, floor)]
        chart.out.append(shape("polygon", edges[0] + edges[1][::-1], f'fill="{colour}" fill-opacity="0.75"'))
        x, y, floor = LEFT + 84 * i, TOP + HEIGHT + 26, roof
        chart.out.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{colour}"/>' + text(x + 16, y + 10, name))
    chart.series([(r["requests"], r["rss"]) for r in rows], RED, "resident")
    for a, b in zip(rows, rows[1:]):
        if b["at_once"] != a["at_once"]:
            chart.upright(a["requests"], a["requests"], "#888", "2 3", f"{b['at_once']} at once")
    chart.upright(0, top * MIB / 20e6 * 5, RED, "6 3", "20 MB in five requests, as reported of others")
    return chart.out


def draw_bursts(rows, y):
    """Most resident memory of each burst, and the peak of all that the engine owns."""
    numbers = sorted({r["at_once"] for r in rows})
    top = nice(max(r["peak_rss"] for r in rows) / MIB)
    chart = Chart(y, len(numbers) - 1 or 1, top, "Large pictures at once: the most resident memory", list(enumerate(numbers)))
    for colour, side in zip(SIDES, sorted({r["side"] for r in rows})):
        chart.series([(numbers.index(r["at_once"]), r["peak_rss"]) for r in rows if r["side"] == side], colour, f"{side} x {side}")
    owned = {n: max(sum(o["peak"] for o in r["owners"].values()) for r in rows if r["at_once"] == n) for n in numbers}
    chart.series(list(enumerate(owned.values())), RED, "the engine's owners")
    return chart.out


def tables(loop, bursts):
    print("| requests | at once | weights | kv | images | arena | io | resident |\n|" + "---|" * 8)
    step = max(1, len(loop) // 6)
    for r in loop[step - 1 :: step]:
        owners = " | ".join(f"{r['owners'][n]['used']:,}" for n in COLOURS)
        print(f"| {r['requests']:,} | {r['at_once']} | {owners} | {r['rss'] / MIB:.2f} MiB |")
    print("\n| model, picture, at once | seconds | kv | images | arena | bodies | pictures | resident, MiB |\n|" + "---|" * 8)
    for r in bursts:
        owners = " | ".join(f"{r['owners'][n]['peak'] / MIB:.2f}" for n in ("kv", "images", "arena"))
        host = " | ".join(f"{r['seen'][k] / MIB:.1f}" for k in ("bodies", "pictures"))
        print(f"| {r['model']}, {r['side']}, {r['at_once']} | {r['took']:.1f} | {owners} | {host} | {r['peak_rss'] / MIB:.0f} |")


def main(source, target):
    rows = [json.loads(s) for s in pathlib.Path(source).read_text().splitlines()]
    loop, bursts = ([r for r in rows if r["kind"] == kind] for kind in ("flushed", "burst"))
    parts = draw_loop(loop) + draw_bursts([r for r in bursts if r["model"] == "small"], TOP + HEIGHT + GAP)
    size = f'viewBox="0 0 {WIDTH} {TOP + 2 * HEIGHT + GAP + 26}" font-family="sans-serif" font-size="11"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    pathlib.Path(target).write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{ground}' + "\n".join(parts) + "</svg>\n")
    tables(loop, bursts)


if __name__ == "__main__":
    main(*sys.argv[1:])
