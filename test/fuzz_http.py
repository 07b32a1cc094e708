#!/usr/bin/env python3
"""Mutated requests against a running `vlm serve`, best one with sanitizers: it must answer or close, stay alive, give everything
back, and end with status 0.

    VLM_BUILD=build/asan python3 test/fuzz_http.py SECONDS [--seed 1]

What was being sent when something went wrong is printed, and the last requests are kept in fuzz-http-crash.bin of the build.
"""
import argparse
import collections
import contextlib
import json
import os
import random
import socket
import threading
import time

from server_client import BUILD, COMPLETIONS, COUNT, SLOW, Server, data_url, encode, picture, request_bytes, short, user


def seeds():
    """Requests that are right, or wrong in one way."""
    from PIL import Image
    dot = encode(Image.new("RGB", (30, 30), "red"))
    hi = {"messages": user("hi"), "max_tokens": 3, "temperature": 0}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (b'{"messages": [{"role": "user", ', b'"content": "hi"}],', b'"max_tokens": 2}')) + b"0\r\n\r\n"
    yield from [
        request_bytes(hi), request_bytes(hi | {"stream": True, "stream_options": {"include_usage": True}}), request_bytes(hi | {"n": 3, "logprobs": True, "top_logprobs": 5}),
        request_bytes(hi | {"messages": user(picture(dot), "what is this?")}), request_bytes(hi | {"messages": user(picture(data_url(dot).rstrip("=")), "a", picture("http://127.0.0.1:1/"))}),
        request_bytes(hi | {"tools": tools, "tool_choice": "required", "stop": ["a", "}"]}), request_bytes(hi | {"logit_bias": {"1": 5, "7": -100}, "seed": -1, "cache_salt": "x"}),
        request_bytes({"prompt": ["a", [1, 2, 3]], "max_tokens": 2, "logprobs": 3}, COMPLETIONS), request_bytes(hi, COUNT), request_bytes({"prompt": "hé"}, "/tokenize"),
        request_bytes({"messages": user("a"), "tools": tools}, "/tokenize"), request_bytes({"tokens": [1, 2, 3]}, "/detokenize"),
        request_bytes(chunks, headers=("Transfer-Encoding: chunked",)), request_bytes(hi, headers=("Expect: 100-continue", "Connection: close")),
        request_bytes(b"", "/flush_cache"), *[request_bytes(b"", p, "GET") for p in ("/", "/health", "/v1/models", "/v1/models/tiny", "/memory", "/metrics", "/steps?after=3", "/%41?b=%zz&c")],
        request_bytes(b"", "/health", "HEAD", ("Authorization: Bearer x", "Cookie: a=b; c=d", "Range: bytes=0-1", "Upgrade: h2c")),
    ]  # fmt: skip


TOKENS = [b"\r\n", b"\n", b"\r", b"\0", b": ", b":", b" ", b"\t", b",", b";", b"HTTP/1.1", b"HTTP/1.0", b"GET", b"POST", b"HEAD", b"PUT", b"/", b"//", b"..", b"%00", b"%", b"?", b"#", b"&", b"=",
          b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: 18446744073709551616\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Host: x\r\n", b"Expect: 100-continue\r\n",
          b"0\r\n\r\n", b"ffffffff\r\n", b"5;a=b\r\n", b"{", b"}", b"[", b"]", b'"', b"\\", b"\\u0000", b"\\ud800", b"null", b"true", b"-1", b"0", b"1e999", b"99999999999", b"NaN", b"\xff", b"\xc3", b"\xf0\x9f\x98\x80",
          b'"messages":', b'"role":"user"', b'"content":', b'"stream":true', b'"n":16', b'"stop":""', b"<tool_call>", b"data:image/png;base64,", b"x" * 70000, b"[" * 300]  # fmt: skip


def mutated(rnd, corpus):
    data = bytearray(rnd.choice(corpus))
    for _ in range(rnd.choice((0, 1, 1, 2, 3, 6))):
        at = rnd.randrange(len(data) + 1)
        kind = rnd.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rnd.randrange(8)
        elif kind == 1:
            data[at:at] = rnd.choice(TOKENS)
        elif kind == 2:
            del data[at : at + rnd.choice((1, 2, 8, 60))]
        elif kind == 3:
            data[at:at] = data[at : at + rnd.choice((1, 10, 100, 1000))]
        elif kind == 4:
            other = rnd.choice(corpus)
            data[at:] = other[rnd.randrange(len(other)) :]
        else:
            data[at : at + rnd.choice((1, 4))] = rnd.choice(TOKENS)
    if rnd.random() < 0.5:  # make the length right again, so that the body gets through
        head, mark, body = bytes(data).partition(b"\r\n\r\n")
        lines = [f"Content-Length: {len(body)}".encode() if line.lower().startswith(b"content-length") else line for line in head.split(b"\r\n")]
        data = bytearray(b"\r\n".join(lines) + mark + body)
    return bytes(data) * rnd.choice((1, 1, 1, 2))


def worker(server, seed, end, count, recent, wrong):
    rnd, corpus = random.Random(seed), list(seeds())
    while time.monotonic() < end and not wrong:
        data = mutated(rnd, corpus)
        recent.append(data)
        try:
            sock = socket.create_connection((server.host, server.port), timeout=10 * SLOW)
        except OSError as e:
            wrong.append(f"no connection: {e}")
            return
        with sock, contextlib.suppress(OSError):
            for at in range(0, len(data), cut := rnd.choice((1 << 20, 1 << 20, 7, 100))):
                sock.sendall(data[at : at + cut])
                if at > 50 * cut:
                    sock.sendall(data[at + cut :])
                    break
            if rnd.random() < 0.7:
                sock.shutdown(socket.SHUT_WR)
            sock.settimeout(rnd.choice((0.01, 0.2, 3 * SLOW)))
            got = b""
            try:
                while piece := sock.recv(1 << 16):
                    got += piece
            except TimeoutError:
                count["left"] += 1
            count[got[9:12].decode("latin-1") or "none"] += 1
            if got and not got.startswith(b"HTTP/1.1 "):
                wrong.append(f"no HTTP came: {got[:200]}")


def fuzz(server, seconds, seed=1, threads=8):
    """Counts by status. Raises AssertionError when something is wrong."""
    count, recent, wrong = collections.Counter(), collections.deque(maxlen=64), []
    end = time.monotonic() + seconds
    workers = [threading.Thread(target=worker, args=(server, seed * 100 + i, end, count, recent, wrong)) for i in range(threads)]
    for w in workers:
        w.start()
    try:
        while any(w.is_alive() for w in workers):
            time.sleep(0.5)
            server.alive()
            assert server.get("/health", timeout=10).status == 200
        assert not wrong, wrong
        server.settled(20)
        assert server.chat(user("hi"), temperature=0)["choices"][0]["message"]["content"]
    except AssertionError:
        (BUILD / "fuzz-http-crash.bin").write_bytes(json.dumps([r.decode("latin-1") for r in recent]).encode())
        print("\n".join(short(repr(r), 300) for r in list(recent)[-16:]))
        raise
    finally:
        wrong.append("end")
        for w in workers:
            w.join()
    return dict(count)


def main():
    parser = argparse.ArgumentParser(description="Mutated requests against a vlm serve of the build.")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("VLM_SEED", "1")))
    args = parser.parse_args()
    with Server("--quiet", "--header-seconds", "1", "--idle-seconds", "1", "--max-body", "1M", "--fetch-seconds", "1") as server:
        report = fuzz(server, args.seconds, args.seed)
    print(f"{sum(report.values())} requests: " + ", ".join(f"{k} {v}" for k, v in sorted(report.items())))


if __name__ == "__main__":
    main()
