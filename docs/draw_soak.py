#!/usr/bin/env python3
"""Draw what test/soak.py saw: memory over the requests of the loop, and over the number of large pictures at once.

    python3 docs/draw_soak.py build/soak.jsonl docs/soak.svg      and prints the tables of docs/serving.md
"""
import json
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 960, 210, 70, 150, 34, 74
COLOURS = {"weights": "#9aa5b1", "kv": "#3a7ebf", "images": "#8e6bbf", "arena": "#4aa564", "io": "#d9a03f"}
SIDES = ["#7fb2e5", "#3a7ebf", "#1c4a75"]
MIB = 1 << 20


def text(x, y, s, anchor="start", colour="#333"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{s}</text>'


def line(points, colour, width=1.5, dash=""):
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dash}"/>'


class Chart:
    """A frame at a height of the page: x from 0 to right in the data's units, y from 0 to top in MiB."""

    def __init__(self, y, right, top, title, ticks):
        self.y, self.right, self.top = y, right, top
        self.out = [text(LEFT, y - 12, title)]
        for i in range(5):
            value = top * i / 4
            self.out += [line([self.at(0, value * MIB), self.at(right, value * MIB)], "#e4e4e4", 1), text(LEFT - 8, self.at(0, value * MIB)[1] + 4, f"{value:.0f} MiB", "end", "#888")]
        self.out += [text(self.at(x, 0)[0], y + HEIGHT + 16, label, "middle", "#888") for x, label in ticks]

    def at(self, x, size):
        return LEFT + x * (WIDTH - LEFT - RIGHT) / self.right, self.y + HEIGHT * (1 - size / MIB / self.top)

    def series(self, points, colour, label, **how):
        """A line with its name at its right end."""
        points = [self.at(x, y) for x, y in points]
        self.out += [line(points, colour, **how), text(points[-1][0] + 6, points[-1][1] + 4, label, colour=colour)]


def nice(value):
    """The next of 1, 2, 4, 8 times a power of ten that is not less."""
    power = 1
    while power * 10 < value:
        power *= 10
    return next(power * n for n in (1, 2, 4, 8, 10) if power * n >= value)


def draw_loop(rows):
    """Owners in use just before each flush, one above the other, and resident memory after it."""
    full, clean = ([r for r in rows if r["kind"] == k] for k in ("loaded", "flushed"))
    last = full[-1]["requests"]
    top = nice(max(r["rss"] for r in rows) / MIB)
    chart = Chart(TOP, last, top, "The loop: memory over image requests", [(last * i / 5, f"{last * i // 5:,}") for i in range(6)])
    floor = [0] * len(full)
    for name, colour in COLOURS.items():
        above = [b + r["owners"][name]["used"] for b, r in zip(floor, full)]
        edge = [chart.at(r["requests"], b) for r, b in zip(full, above)] + [chart.at(r["requests"], b) for r, b in reversed(list(zip(full, floor)))]
        chart.out.append(f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in edge)}" fill="{colour}" fill-opacity="0.75"/>')
        floor = above
    chart.series([(r["requests"], r["rss"]) for r in clean], "#c0553a", "resident")
    step = next(r["requests"] for r in full if r["at_once"] != full[0]["at_once"]) if full[-1]["at_once"] != full[0]["at_once"] else None
    if step:
        chart.out += [line([chart.at(step, 0), chart.at(step, top * MIB)], "#999", 1, "2 3"), text(chart.at(step, 0)[0] + 5, TOP + 12, f"{full[-1]['at_once']} at once", colour="#777")]
    reach = top / 20 * 5
    chart.out += [line([chart.at(0, 0), chart.at(reach, top * MIB)], "#c0553a", 1.5, "6 3"), text(chart.at(reach, 0)[0] + 8, TOP + 12, "20 MB in five requests, as reported of others", colour="#c0553a")]
    x = LEFT
    for name, colour in COLOURS.items():
        chart.out.append(f'<rect x="{x}" y="{TOP + HEIGHT + 26}" width="11" height="11" fill="{colour}"/>' + text(x + 16, TOP + HEIGHT + 36, name))
        x += 84
    return chart.out


def draw_bursts(rows, y):
    """Most resident memory of each burst, and what all planned bytes and budgets sum up to."""
    numbers = sorted({r["at_once"] for r in rows})
    top = nice(max(r["peak_rss"] for r in rows) / MIB)
    chart = Chart(y, len(numbers) - 1 or 1, top, "Large pictures at once: the most resident memory", list(enumerate(map(str, numbers))))
    for colour, side in zip(SIDES, sorted({r["side"] for r in rows})):
        chart.series([(numbers.index(r["at_once"]), r["peak_rss"]) for r in rows if r["side"] == side], colour, f"{side} x {side}")
    owned = [(numbers.index(n), max(sum(o["peak"] for o in r["owners"].values()) for r in rows if r["at_once"] == n)) for n in numbers]
    chart.series(owned, "#c0553a", "the engine's owners")
    return chart.out


def tables(loop, bursts):
    print("| requests | at once | weights | kv | images | arena | io | resident |\n|" + "---|" * 8)
    marks = {loop[-1]["requests"] * i // 6 for i in range(1, 7)}
    for r in (r for r in loop if r["kind"] == "flushed" and any(r["requests"] - 500 < m <= r["requests"] for m in marks)):
        print(f"| {r['requests']:,} | {r['at_once']} | " + " | ".join(f"{r['owners'][n]['used']:,}" for n in COLOURS) + f" | {r['rss'] / MIB:.2f} MiB |")
    print("\n| picture, at once | seconds | kv peak | images peak | arena peak | bodies | pictures | resident |\n|" + "---|" * 8)
    for r in bursts:
        owners = " | ".join(f"{r['owners'][n]['peak'] / MIB:.2f}" for n in ("kv", "images", "arena"))
        print(f"| {r['side']}, {r['at_once']} | {r['took']:.1f} | {owners} | {r['seen']['bodies'] / MIB:.0f} | {r['seen']['pictures'] / MIB:.1f} | {r['peak_rss'] / MIB:.0f} |")


def main(source, target):
    rows = [json.loads(s) for s in open(source)]
    loop, bursts = ([r for r in rows if (r["kind"] == "burst") == b] for b in (False, True))
    out = draw_loop(loop) + draw_bursts(bursts, TOP + HEIGHT + GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + 2 * HEIGHT + GAP + 26}" font-family="sans-serif" font-size="11">'
    open(target, "w").write(head + '<rect width="100%" height="100%" fill="#fff"/>' + "\n".join(out) + "</svg>\n")
    tables(loop, bursts)


if __name__ == "__main__":
    main(*sys.argv[1:])
