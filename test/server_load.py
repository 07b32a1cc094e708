#!/usr/bin/env python3
"""A load on a `vlm serve` of the build over loopback: clients that stream, read slowly, hang up in every way, send nonsense and
look at /memory, for some seconds; then everything must be as before. Prints what it did.

    VLM_BUILD=build python3 test/server_load.py SECONDS [--clients 64] [--seed 1] [--server "--max-seqs 8"]

Checked while it runs: every whole answer to one of the known questions is the known one, every refusal has the status it must
have, /memory adds up. Checked at its end: nothing runs, held blocks 0, free + cached == total, no body or picture is
kept, the server has as many threads and open files as before, and a reference request gives the same bytes and log-probabilities,
from its caches and without them.
"""
import argparse
import asyncio
import collections
import json
import os
import random
import socket
import struct
import sys
import time

from server_client import (CHAT, COMPLETIONS, COUNT, SLOW, Server, check_memory, metrics_of, picture, request_bytes, sample, short, user)  # fmt: skip

KNOWN = [user(sample("three.png"), "what do you see?"), user(sample("one.png"), "what is this?"), user("hello"),
         user(sample("five.png"), sample("one.png"), "what is in the second picture?"), user("who are you?")]  # fmt: skip
ENDLESS = {"temperature": 0, "logit_bias": {"1": 100}, "max_tokens": 3000}
BAD = [  # bytes, status
    (request_bytes(b"{"), 400), (request_bytes(b"[" * 100_000), 400), (request_bytes({"messages": user("hi"), "temperature": 9}), 400),
    (request_bytes({"messages": user(picture(b"\x89PNG\r\n\x1a\nno"))}), 400), (request_bytes({"messages": user("x " * 9000)}), 400),
    (request_bytes({"messages": user(picture("http://127.0.0.1:1/x.png"))}), 400), (request_bytes({}, "/nope"), 404), (request_bytes(b"", CHAT, "GET"), 405),
    (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", 431), (request_bytes(b"", headers=("Content-Length: 99999999999",)), 413),
    (request_bytes({"messages": user(picture("file:///etc/passwd"))}), 400), (request_bytes({"prompt": [-1]}, COMPLETIONS), 400),
]  # fmt: skip


class Client:
    """One of the clients: an endless series of random acts, each on a connection of its own or a kept one."""

    def __init__(self, server, seed, known, count):
        self.server, self.random, self.known, self.count = server, random.Random(seed), known, count

    async def run(self, end):
        acts = [self.whole] * 4 + [self.streamed] * 4 + [self.cancelled] * 6 + [self.slow] * 2 + [self.refused] * 3 + [self.cut, self.watch, self.several, self.new_picture]
        while time.monotonic() < end:
            act = self.random.choice(acts)
            await asyncio.wait_for(act(), 120 * SLOW)

    async def connect(self, small=False):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (self.server.host, self.server.port))
        return await asyncio.open_connection(sock=sock)

    async def ask(self, data, method="POST", path=CHAT):
        """Status and body of a whole exchange."""
        data = data if isinstance(data, bytes) else request_bytes(data, path, method, ("Connection: close",))
        reader, writer = await self.connect()
        try:
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split()[1])
            length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
            body = await (reader.readexactly(length) if length is not None else reader.read())
            return status, body
        finally:
            writer.close()

    def pick(self):
        i = self.random.randrange(len(KNOWN))
        return {"messages": KNOWN[i], "temperature": 0, "cache_salt": self.random.choice(["", "a", "b"]), "max_tokens": 40}, self.known[i]

    async def whole(self):
        body, wanted = self.pick()
        status, data = await self.ask(body)
        if status == 429:
            self.count["full"] += 1
            return
        assert status == 200, short(data)
        assert json.loads(data)["choices"][0]["message"]["content"] == wanted, short(data)
        self.count["whole"] += 1

    async def streamed(self, pause=0.0, small=False):
        body, wanted = self.pick()
        reader, writer = await self.connect(small)
        try:
            writer.write(request_bytes(body | {"stream": True}, headers=("Connection: close",)))
            data = b""
            while piece := await reader.read(300 if pause else 1 << 16):
                data += piece
                if pause:
                    await asyncio.sleep(pause * self.random.random())
        finally:
            writer.close()
        if b" 429 " in data[:20]:
            self.count["full"] += 1
            return
        lines = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
        assert lines and lines[-1].strip() == "[DONE]", f"not whole: {data[-300:]}"
        got = "".join(c["delta"].get("content") or "" for line in lines[:-1] for c in json.loads(line)["choices"])
        assert got == wanted, f"{got!r} is not {wanted!r}"
        self.count["streamed"] += 1

    async def slow(self):
        await self.streamed(0.05, True)
        self.count["slow"] += 1

    async def cancelled(self):
        """Hang up after some bytes of an endless answer: closed, reset, or closed by halves."""
        reader, writer = await self.connect()
        body = {"messages": self.random.choice(KNOWN), "stream": self.random.random() < 0.7, **ENDLESS}
        writer.write(request_bytes(body))
        try:
            await asyncio.wait_for(reader.read(self.random.randint(1, 3000)), self.random.random())
        except asyncio.TimeoutError:
            pass
        how = self.random.choice(["close", "reset", "half"])
        if how == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif how == "half":
            writer.write_eof()
            await reader.read()  # the server ends it
        writer.close()
        self.count["cancelled"] += 1

    async def cut(self):
        """Part of a request, then nothing more."""
        data = request_bytes({"messages": self.random.choice(KNOWN), "max_tokens": 5})
        _, writer = await self.connect()
        writer.write(data[: self.random.randrange(len(data))])
        await asyncio.sleep(0.1 * self.random.random())
        writer.transport.abort() if self.random.random() < 0.5 else writer.close()
        self.count["cut"] += 1

    async def refused(self):
        data, wanted = self.random.choice(BAD)
        try:
            status, body = await self.ask(data)
        except (ConnectionError, asyncio.IncompleteReadError):
            assert wanted in (413, 431), f"no answer to {short(data, 300)}"  # closed while it was sent
            return
        assert status in (wanted, 429), f"{wanted} wanted, got {status} {short(body)} for {short(data, 300)}"
        self.count["refused"] += 1

    async def several(self):
        status, data = await self.ask({"messages": self.random.choice(KNOWN), "n": 3, "temperature": 1.5, "max_tokens": 10, "logprobs": True})
        assert status in (200, 429), short(data)
        self.count["several"] += 1

    async def new_picture(self):
        from PIL import Image
        from server_client import encode
        size = self.random.randint(28, 300), self.random.randint(28, 300)
        data = encode(Image.frombytes("RGB", size, self.random.randbytes(3 * size[0] * size[1])), self.random.choice(["PNG", "JPEG", "BMP"]))
        body = {"messages": user(picture(data), "what is this?"), "max_tokens": 3}
        status, reply = await self.ask(body, path=self.random.choice([CHAT, COUNT]))
        assert status in (200, 429), short(reply)
        self.count["new pictures"] += 1

    async def watch(self):
        method, path = self.random.choice([("GET", p) for p in ("/memory", "/metrics", "/steps", "/health", "/v1/models")] + [("POST", "/flush_cache")])
        status, data = await self.ask({}, method, path)
        assert status == 200, short(data)
        if path == "/memory":
            check_memory(json.loads(data))
        if path == "/metrics":
            metrics_of(data.decode())
        self.count["watched"] += 1


def reference(server, salt):
    """Bytes and log-probabilities of an answer, as they were sent."""
    got = server.chat(KNOWN[0], temperature=0, logprobs=True, top_logprobs=5, cache_salt=salt)["choices"][0]
    return json.dumps(got["logprobs"])


def of_process(server):
    """Threads and open files of the server, its resident megabytes."""
    proc = f"/proc/{server.process.pid}"
    status = dict(line.split(":", 1) for line in open(proc + "/status").read().splitlines())
    return int(status["Threads"]), len(os.listdir(proc + "/fd")), int(status["VmRSS"].split()[0]) // 1024


def quiet_again(server, before, seconds=15):
    """Wait until the connections' threads and files are gone; what is left."""
    end = time.monotonic() + seconds * SLOW
    while True:
        after = of_process(server)
        if after[0] <= before[0] and after[1] <= before[1] or time.monotonic() > end:
            return after
        time.sleep(0.1)


async def clients_run(server, seconds, clients, seed, known, count):
    end = time.monotonic() + seconds
    await asyncio.gather(*[Client(server, seed * 1000 + i, known, count).run(end) for i in range(clients)])


def load(server, seconds, clients=64, seed=1):
    """Run it; what was done, as counts. Raises AssertionError at the first thing that is wrong."""
    known = [server.say(m, temperature=0, max_tokens=40) for m in KNOWN]
    for m, wanted in zip(KNOWN, known):
        assert server.say(m, temperature=0, max_tokens=40) == wanted
    wanted, before, total = reference(server, "reference"), of_process(server), server.settled()["total"]
    count = collections.Counter()
    asyncio.run(clients_run(server, seconds, clients, seed, known, count))
    m = server.settled(20)
    assert m["total"] == total and m["blocks"]["held"] == 0 and m["blocks"]["free"] + m["blocks"]["cached"] == m["blocks"]["total"], m
    assert m["host"]["bodies"] == 0 and m["host"]["pictures"] == 0, m["host"]
    assert reference(server, "reference") == wanted == reference(server, "reference, cold"), "the reference answer has changed"
    after = quiet_again(server, before)
    assert after[0] <= before[0] and after[1] <= before[1], f"threads, files: {before[:2]} before, {after[:2]} after"
    return dict(count) | {"rss_before": before[2], "rss_after": after[2], "threads": after[0], "files": after[1]}


def main():
    parser = argparse.ArgumentParser(description="A load on a vlm serve of the build.")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VLM_SEED", "1")))
    parser.add_argument("--server", default="--max-seqs 16 --quiet", help="arguments of the server")
    args = parser.parse_args()
    with Server(*args.server.split()) as server:
        report = load(server, args.seconds, args.clients, args.seed)
    print(", ".join(f"{name} {n}" for name, n in report.items()))


if __name__ == "__main__":
    sys.exit(main())
