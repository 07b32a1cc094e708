#!/usr/bin/env python3
"""The two failures that users of the large engines report, replayed over HTTP against `vlm serve`.

    python test/soak.py [--seconds S | --requests N] [--at-once 1,4,8] [--sides 512,2048] [--log FILE]

The loop: chat completions with a system text, one picture and max_tokens 512 at temperature 0, one after another and then eight
at once, every other picture a new one. After each 500 the caches are flushed: every owner's bytes must then be what they were
at the first flush, a reference answer the same bit for bit, and resident memory flat.
Large pictures: 512, 2048 and 4096 pixels a side, 1 to 128 at once. Every one must be answered, and no owner pass its plan. The
small model sees them at 224 pixels a side; the largest are also shown to a random one that takes a megapixel.
What was seen goes to the log, a JSON object a line, for docs/draw_soak.py. Needs Linux (/proc) and Pillow.
"""
import argparse
import functools
import http.client
import json
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import make_model
from PIL import Image, ImageDraw
from server_client import CHAT, ROOT, Server, check_memory, data_url, encode

MIB = 1 << 20
BATCH = 500  # requests between two flushes
WARM_UP = 2  # batches of each phase, until the allocator holds what it will hold
SLACK = 1 * MIB  # of resident memory, from the warm-up's end to the phase's: 70 bytes a request in the whole loop
BODIES, PICTURES = 256 * MIB, 256 * MIB  # host budgets the server is started with
PROGRAM = 64 * MIB  # resident memory of code, libraries, stacks and heap beside the planned bytes and the budgets
TOGETHER = 8  # sequences that the engine runs together (--max-seqs)
SYSTEM = "You are a helpful assistant that looks at pictures. Answer in a few words. If there is nothing to see, say so."

passed = failed = 0


def check(holds, claim):
    global passed, failed
    passed, failed = passed + bool(holds), failed + (not holds)
    if not holds:
        print(f"FAILED: {claim}", flush=True)


class Soaked(Server):
    """A server with budgets of its own, a connection for each thread that asks, and what the kernel says of its memory."""

    def __init__(self, log, *more, **model):
        flags = {"--max-seqs": TOGETHER, "--body-memory": f"{BODIES // MIB}M", "--picture-memory": f"{PICTURES // MIB}M"}
        super().__init__("--quiet", *(x for pair in flags.items() for x in pair), *more, **model)
        self.rows, self.begun, self.connections = log, time.monotonic(), threading.local()

    def call(self, method, path, body=None):
        """(status, object)"""
        mine, now = self.connections, time.monotonic()
        if now - getattr(mine, "used", -1e9) > 10:  # none yet, or the server might close it as idle in this moment
            mine.c = http.client.HTTPConnection(self.host, self.port, timeout=600)
        mine.c.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        reply = mine.c.getresponse()
        answer = reply.status, json.loads(reply.read())
        mine.used = time.monotonic()
        return answer

    def memory(self):
        m = self.call("GET", "/memory")[1]
        try:
            check_memory(m)  # the sum is the total, no owner passes its plan
            check(True, "")
        except AssertionError as e:
            check(False, f"/memory: {e}")
        return m

    def status(self, key):
        """A figure of /proc/PID/status in bytes: VmRSS, VmHWM."""
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split(key + ":")[1].split()[0]) * 1024

    def forget_peak(self):
        pathlib.Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def note(self, kind, memory, **more):
        owners = {o["name"]: {"plan": o["bytes"], "used": o["used"], "peak": o["peak"]} for o in memory["owners"]}
        seconds = round(time.monotonic() - self.begun, 2)
        row = {"kind": kind, "seconds": seconds, "rss": self.status("VmRSS"), "owners": owners, "host": memory["host"], **more}
        self.rows.write(json.dumps(row) + "\n")
        self.rows.flush()
        return row


class Watch:
    """While it lasts, the most that is seen of: each owner's used bytes, and bodies and pictures on the host."""

    def __init__(self, server):
        self.server, self.seen, self.over = server, {}, threading.Event()
        self.thread = threading.Thread(target=self.look)

    def look(self):
        while not self.over.wait(0.02):
            m = self.server.memory()
            now = {o["name"]: o["used"] for o in m["owners"]} | {k: m["host"][k] for k in ("bodies", "pictures")}
            self.seen.update({k: max(v, self.seen.get(k, 0)) for k, v in now.items()})

    def __enter__(self):
        self.thread.start()
        return self.seen

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


def body(url, system=SYSTEM, **fields):
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what do you see?"}]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": parts}]
    return json.dumps({"messages": messages, "max_tokens": 512, "temperature": 0, **fields}).encode()


def small_picture(seed):
    """Two shapes on a plain ground, of the sizes that the small model knows; PNG or JPEG."""
    r = random.Random(seed)
    w, h = r.randrange(112, 197), r.randrange(112, 197)
    image = Image.new("RGB", (w, h), tuple(r.randrange(160, 256) for _ in range(3)))
    for left in (0, w // 2):
        x, y, size = left + r.randrange(w // 8), r.randrange(h // 2), r.randrange(24, 48)
        shape = r.choice([ImageDraw.Draw(image).rectangle, ImageDraw.Draw(image).ellipse])
        shape([x, y, x + size, y + size], fill=tuple(r.randrange(160) for _ in range(3)))
    return data_url(encode(image, r.choice(["PNG", "JPEG"])))


@functools.lru_cache(None)
def large_picture(side, seed):
    """Smooth colours, as PNG; with grain as a camera's, as JPEG. 16 megapixels take 4 to 8 MB, as photographs do."""
    r = random.Random(seed)
    image = Image.frombytes("RGB", (16, 16), r.randbytes(768)).resize((side, side), Image.Resampling.BILINEAR)
    if seed % 2:
        return data_url(encode(image, compress_level=1))
    tile, grain = Image.frombytes("RGB", (256, 256), r.randbytes(3 << 16)), Image.new("RGB", (side, side))
    for x in range(0, side, 256):
        for y in range(0, side, 256):
            grain.paste(tile, (x, y))
    return data_url(encode(Image.blend(image, grain, 0.1), "JPEG", quality=90))


# ----------------------------------------------------------------------------------------------------------------------
# The loop


class Loop:
    """Image requests without end: every other one repeats one of eight pictures, the rest is new."""

    def __init__(self, server):
        self.server, self.lock, self.asked = server, threading.Lock(), 0
        self.known = [small_picture(-1 - i) for i in range(8)]
        self.answers, self.reference, self.flushed = {}, None, None

    def use_all(self):
        """Touch what is planned once, so that its pages are resident before any are counted: texts until no block is free."""
        with ThreadPoolExecutor(TOGETHER) as pool:
            for n in range(100):
                texts = [f"{n} {i} " * 200 for i in range(TOGETHER)]
                list(pool.map(lambda t: self.server.call("POST", CHAT, body(small_picture(-9), system=t)), texts))
                if self.server.memory()["blocks"]["free"] == 0:
                    break
        check(self.flush()["owners"][1]["peak"] > 0, "blocks were used")

    def one(self, _):
        with self.lock:
            n = self.asked
            self.asked += 1
        url = self.known[n // 2 % 8] if n % 2 else small_picture(n)
        status, reply = self.server.call("POST", CHAT, body(url))
        text = reply["choices"][0]["message"]["content"] if status == 200 else None
        with self.lock:
            check(text is not None, f"request {n} is answered, not {status} {reply}")
            if n % 2:
                check(self.answers.setdefault(url, text) == text, f"request {n}: the same picture, another answer")

    def flush(self):
        """Nothing may be left of what was served, and the reference answer must be what it always was."""
        self.server.settled()  # a reply comes a moment before its pictures are given back
        check(self.server.call("POST", "/flush_cache")[0] == 200, "flush_cache")
        m = self.server.memory()
        owners = [(o["name"], o["bytes"], o["used"]) for o in m["owners"]]
        left = owners, m["blocks"], m["images"]["used"], m["images"]["pinned"], m["sequences"], m["host"]
        self.flushed = self.flushed or left
        check(left == self.flushed, f"after {self.asked} requests other bytes than at the first flush: {left} != {self.flushed}")
        check(m["blocks"]["free"] == m["blocks"]["total"] and m["images"]["used"] == 0, f"the flush left something: {left}")
        return m

    def ask_reference(self):
        status, reply = self.server.call("POST", CHAT, body(self.known[0], logprobs=True, top_logprobs=3))
        answer = status == 200 and reply["choices"]
        self.reference = self.reference or answer
        check(answer and answer == self.reference, f"after {self.asked} requests the reference answer is another")

    def phase(self, at_once, requests, seconds):
        """Batches until the requests are asked or the time is over. Checks resident memory after the warm-up."""
        rows, begun, end = [], time.monotonic(), time.monotonic() + seconds
        first, shortest = self.asked, BATCH * (WARM_UP + 2)
        with ThreadPoolExecutor(at_once) as pool:
            while self.asked - first < (requests if requests else shortest) or (not requests and time.monotonic() < end):
                with Watch(self.server) as seen:
                    list(pool.map(self.one, range(min(BATCH, requests - (self.asked - first)) if requests else BATCH)))
                self.ask_reference()
                rows.append(self.server.note("flushed", self.flush(), at_once=at_once, requests=self.asked, seen=seen))
        flat = rows[WARM_UP - 1 :] or rows[-1:]
        growth = flat[-1]["rss"] - flat[0]["rss"]
        after, at_end, most = (x / MIB for x in (flat[0]["rss"], flat[-1]["rss"], max(r["rss"] for r in flat)))
        print(
            f"loop, {at_once} at once: {self.asked - first} requests, {(self.asked - first) / (time.monotonic() - begun):.0f} a second; "
            f"resident {after:.2f} MiB after {flat[0]['requests'] - first}, {at_end:.2f} at the end, {most:.2f} at most; KiB per 1,000 "
            f"requests {slope(flat) / 1024:+.1f}, in the second half {slope(rows[len(rows) // 2 :]) / 1024:+.1f}",
            flush=True,
        )
        check(growth <= SLACK, f"resident memory grew by {growth} bytes after the warm-up")


def slope(rows):
    """Bytes of resident memory per 1,000 requests: least squares."""
    if len(rows) < 2:
        return 0
    x, y = [r["requests"] / 1000 for r in rows], [r["rss"] for r in rows]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


# ----------------------------------------------------------------------------------------------------------------------
# Large pictures


def burst(server, model, side, at_once):
    """That many at the same moment, eight different pictures among them, after a system text that fills a step's batch."""
    bodies = [body(large_picture(side, i), system=SYSTEM * 16) for i in range(min(8, at_once))]
    server.call("POST", "/flush_cache")
    server.forget_peak()
    begun = time.monotonic()
    with Watch(server) as seen, ThreadPoolExecutor(at_once) as pool:
        replies = list(pool.map(lambda i: server.call("POST", CHAT, bodies[i % len(bodies)]), range(at_once)))
    m, peak = server.memory(), server.status("VmHWM")
    took = round(time.monotonic() - begun, 2)
    row = server.note("burst", m, model=model, side=side, at_once=at_once, took=took, peak_rss=peak, seen=seen)
    what = f"{model} model, {at_once} of {side} x {side}"
    host = f"bodies {seen['bodies'] / MIB:.0f} MiB, pictures {seen['pictures'] / MIB:.1f}"
    print(f"{what}: {row['took']} s, resident {peak / MIB:.0f} MiB at most, {host}", flush=True)
    for status, reply in replies:
        check(status == 200, f"{what}: {status} {reply}")
    texts = {i: {json.dumps(r["choices"]) for s, r in replies[i :: len(bodies)] if s == 200} for i in range(len(bodies))}
    check(all(len(t) == 1 for t in texts.values()), f"{what}: one picture, one answer: {texts}")
    check(seen["bodies"] <= BODIES and seen["pictures"] <= PICTURES, f"host budgets: {seen}")
    bound = m["total"] + m["host"]["decode_workspace"] + BODIES + PICTURES + PROGRAM
    check(peak <= bound, f"resident memory {peak} passes the sum of all that was planned, {bound}")
    # One request takes of a step's arena what 128 take, and that is the plan (but for their rows of logits).
    arena = next(o for o in m["owners"] if o["name"] == "arena")
    check(0.99 * arena["bytes"] <= arena["peak"], f"{what}: of {arena['bytes']} planned bytes of arena only {arena['peak']}")


def run(args, log):
    if args.requests or args.seconds:
        with Soaked(log) as server:
            loop = Loop(server)
            loop.use_all()
            for at_once in (1, TOGETHER):
                loop.phase(at_once, (args.requests or 0) // 2, args.seconds / 2)
    if not args.at_once or not args.sides:
        return
    with Soaked(log) as server:
        for side in args.sides:
            for at_once in args.at_once:
                burst(server, "small", side, at_once)
            large_picture.cache_clear()
    with tempfile.TemporaryDirectory() as folder, Soaked(log, "--max-pixels", 1280 * 28 * 28, model=random_model(folder)) as server:
        for at_once in sorted({min(args.at_once), max(args.at_once)}):
            burst(server, "random", max(args.sides), at_once)


def random_model(folder):
    """A model file of two layers with random weights."""
    make_model.make(pathlib.Path(folder) / "hf", "mini")
    command = [sys.executable, ROOT / "weights_export.py", f"{folder}/hf", f"{folder}/random.vlm"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return f"{folder}/random.vlm"


def interrupted(*_):
    raise InterruptedError("ended by a signal")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda s: [int(n) for n in s.split(",") if n]  # noqa: E731
    ap.add_argument("--seconds", type=float, default=300, help="for the loop, when no number of requests is given")
    ap.add_argument("--requests", type=int, help="of the loop, both phases together")
    ap.add_argument("--at-once", type=numbers, default=[1, 4, 8, 16, 64, 128], help="large pictures; empty: none")
    ap.add_argument("--sides", type=numbers, default=[512, 2048, 4096], help="of large pictures, in pixels")
    ap.add_argument("--log", default=ROOT / "build/soak.jsonl")
    args = ap.parse_args()
    signal.signal(signal.SIGTERM, interrupted)  # so that the server is ended too
    pathlib.Path(args.log).parent.mkdir(exist_ok=True)
    with open(args.log, "w") as log:
        try:
            run(args, log)
        except (AssertionError, OSError, http.client.HTTPException) as e:
            check(False, f"not to the end: {e!r}")
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
