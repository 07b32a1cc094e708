"""`vlm serve` and the network: what hostile and careless peers send, pictures fetched from hostile servers, files, limits,
keys, clients that go, the end of the server. What well-formed requests get is in test_server.py."""
import concurrent.futures, functools, gzip, json, os, random, re, signal, socket, struct, subprocess, threading, time
import pytest
import server_load
from conftest import BUILD, ROOT, run
from server_client import (CHAT, COMPLETIONS, COUNT, MODEL, SANITIZED, SLOW, Raw, Server, data_url, encode, joined, picture, request_bytes,
                           user)  # fmt: skip
from test_server import ENDLESS, SEEN, THREE, at_once, noise, tokens_of

SEE = user(THREE, "what do you see?")
PNG = (ROOT / "tiny/samples/three.png").read_bytes()
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def server():
    with Server("--header-seconds", "2", "--idle-seconds", "3", "--max-seqs", "4", "--max-body", "4M") as s:
        yield s


@pytest.fixture(autouse=True)
def nothing_left(request):
    """After each test nothing runs, no block is held, and the server is there."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").settled()


class Timed:
    """A block that must not take longer than this."""

    def __init__(self, seconds):
        self.limit = seconds * SLOW

    def __enter__(self):
        self.start = time.monotonic()

    def __exit__(self, kind, *_):
        took = time.monotonic() - self.start
        assert kind or took < self.limit, f"took {took:.2f} s, over {self.limit} s"


def until(condition, seconds=5, what=""):
    end = time.monotonic() + seconds * SLOW
    while not condition():
        assert time.monotonic() < end, f"not within {seconds * SLOW} s: {what or condition}"
        time.sleep(0.01)


def running(server):
    return server.memory()["sequences"]["running"]


# ---- paths and methods

@pytest.mark.parametrize("method, path, allow", [
    ("POST", "/health", "GET"), ("POST", "/v1/models", "GET"), ("GET", CHAT, "POST"), ("PUT", CHAT, "POST"), ("DELETE", CHAT, "POST"), ("GET", COUNT, "POST"),
    ("GET", COMPLETIONS, "POST"), ("GET", "/tokenize", "POST"), ("POST", "/memory", "GET"), ("POST", "/metrics", "GET"), ("GET", "/flush_cache", "POST"),
    ("DELETE", "/v1/models/tiny", "GET"), ("POST", "/", "GET"), ("PATCH", "/steps", "GET"), ("HEAD", CHAT, "POST"), ("FROB", "/health", "GET"),
])  # fmt: skip
def test_wrong_method(server, method, path, allow):
    reply = server.request(method, path, b"{}" if method in ("POST", "PUT", "PATCH") else None)
    assert reply.status == 405 and allow in reply.headers["allow"], reply


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/", "/v1/chat", "/v1/chat/completions/x", "/v1/models/nope", "/%00", "/v1/embeddings", "/favicon.ico",
                                  "/..%2f..%2fetc/passwd", "/../../etc/passwd", "//health", "/health/", "/Health"])  # fmt: skip
def test_unknown_path(server, path):
    for method in ("GET", "POST"):
        reply = server.request(method, path, b"{}" if method == "POST" else None)
        assert reply.status in (404, 400), reply  # 400: no legal path
        reply.error(reply.status)


def test_head_and_queries(server):
    for path in ("/", "/health", "/v1/models", "/memory", "/metrics", "/steps", "/v1/models/tiny"):
        got, head = server.get(path), server.request("HEAD", path)
        assert head.status == got.status == 200 and head.body == b"", head
        assert head.headers["content-type"] == got.headers["content-type"]
        assert server.get(path + "?x=1").status == 200
    assert "text/html" in server.get("/").headers["content-type"]
    assert server.get("/health").expect(200) == {"status": "ok"}


def test_content_types_do_not_matter(server):
    ask = {"messages": user("hi"), "max_tokens": 1}
    for kind in ("application/json", "application/json; charset=utf-8", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        reply = server.request("POST", CHAT, ask, {"Content-Type": kind})
        assert reply.status in (200, 415), reply
    assert reply.status == 415 or reply.expect(200)


# ---- what is no HTTP

def post(*headers, body=b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'):
    return request_bytes(body, headers=headers)


HI = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}'
N = f"Content-Length: {len(HI)}"
ATTACKS = {  # bytes: the statuses that are right; None: closed without a word
    "1 MB header": (HEALTH + b"A: " + b"x" * (1 << 20) + b"\r\n\r\n", {431}),
    "10,000 headers": (HEALTH + b"".join(b"A%d: x\r\n" % i for i in range(10_000)) + b"\r\n", {431}),
    "10,000 equal headers": (HEALTH + b"A: x\r\n" * 10_000 + b"\r\n", {431}),
    "72 KiB header": (HEALTH + b"A: " + b"x" * 73728 + b"\r\n\r\n", {431}),
    "header without end": (HEALTH + b"A: " + b"x" * (1 << 20), {431}),
    "20 KiB header": (HEALTH + b"A: " + b"x" * 20480 + b"\r\n\r\n", {200}),
    "1 MB path": (b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n", {414, 431}),
    "1 MB query": (b"GET /health?" + b"x=1&" * (1 << 18) + b" HTTP/1.1\r\nHost: x\r\n\r\n", {414, 431}),
    "1 MB method": (b"G" * (1 << 20) + b" / HTTP/1.1\r\nHost: x\r\n\r\n", {400, 414, 431, 501, None}),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", {400}),
    "two hosts": (HEALTH + b"Host: y\r\n\r\n", {200, 400}),
    "HTTP/3.7": (b"GET /health HTTP/3.7\r\nHost: x\r\n\r\n", {400, 505}),
    "no version": (b"GET /health\r\n\r\n", {400, 505, None}),
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", {200}),
    "TLS": (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + random.Random(1).randbytes(500), {400, None}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404, 405, 505, None}),
    "noise": (random.Random(2).randbytes(5000) + b"\r\n\r\n", {400, 414, 431, None}),
    "zeros": (bytes(5000), {400, 408, 414, 431, None}),
    "blank lines": (b"\r\n" * 50_000, {400, 408, 414, 431, None}),
    "nul in a header": (HEALTH + b"A: x\0y\r\n\r\n", {200, 400}),
    "blank before colon": (post(f"Content-Length : {len(HI)}"), {400}),
    "header without colon": (HEALTH + b"nonsense\r\n\r\n", {200, 400}),
    "header of nothing": (HEALTH + b": x\r\n\r\n", {200, 400}),
    "folded header": (HEALTH + b"A: x\r\n y\r\n\r\n", {200, 400}),
    "two lengths": (post(N, f"Content-Length: {len(HI) + 1}"), {400}),
    "two lengths, smaller": (post(N, "Content-Length: 5"), {400}),
    "list of lengths": (post(f"Content-Length: {len(HI)}, 5"), {400}),
    "same length twice": (post(N, N), {200, 400}),
    "chunked and length": (request_bytes(b"%x\r\n%s\r\n0\r\n\r\n" % (len(HI), HI), headers=("Transfer-Encoding: chunked", N)), {400}),
    "length and chunked": (request_bytes(b"%x\r\n%s\r\n0\r\n\r\n" % (len(HI), HI), headers=(N, "Transfer-Encoding: chunked")), {400}),
    "negative length": (post("Content-Length: -1"), {400}),
    "length of letters": (post("Content-Length: abc"), {400}),
    "signed length": (post(f"Content-Length: +{len(HI)}"), {400}),
    "hexadecimal length": (post("Content-Length: 0x40"), {400}),
    "length 2^64": (post("Content-Length: 18446744073709551616"), {400, 413}),
    "length 2^64 - 1": (post("Content-Length: 18446744073709551615"), {400, 413}),
    "length 2^63": (post("Content-Length: 9223372036854775808"), {400, 413}),
    "no length": (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n", {400, 411}),
    "bad chunk": (request_bytes(b"zz\r\nxx\r\n0\r\n\r\n", headers=("Transfer-Encoding: chunked",)), {400, None}),
    "huge chunk": (request_bytes(b"ffffffffffffffffff\r\nxx", headers=("Transfer-Encoding: chunked",)), {400, 408, 413, None}),
    "chunk over the cap": (request_bytes(b"7fffffff\r\nxx", headers=("Transfer-Encoding: chunked",)), {400, 408, 413, None}),
    "chunk extensions": (request_bytes(b"%x;%s\r\n%s\r\n0\r\n\r\n" % (len(HI), b"a=b" * 10, HI), headers=("Transfer-Encoding: chunked",)), {200, 400}),
    "transfer of gzip": (request_bytes(HI, headers=("Transfer-Encoding: gzip",)), {400, 411, 501, 415}),
    "transfer of xchunked": (request_bytes(HI, headers=("Transfer-Encoding: xchunked", N)), {400, 501}),
    "method of control characters": (b"G\x01T / HTTP/1.1\r\nHost: x\r\n\r\n", {400, 405, 501, None}),
    "connect": (b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n", {400, 404, 405, 501, None}),
    "another's address": (b"GET http://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n", {200, 400, 404}),
    "upgrade": (HEALTH + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n", {200, 400, 426}),
    "expectation": (HEALTH + b"Expect: the-unexpected\r\n\r\n", {200, 417}),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(server, name):
    data, right = ATTACKS[name]
    with Timed(8), server.raw(data) as raw:
        if None in right:
            raw.sock.settimeout(6 * SLOW)  # header-seconds are over by then
        reply = raw.reply(data.split(b" ")[0].decode("latin-1"))
        status = reply and reply.status
        assert status in right, f"{name}: {right} wanted, got {reply}"
    with Timed(2):
        server.get("/health").expect(200)


def test_smuggling(server):
    """After a request whose length is in doubt the connection ends: nothing behind it is taken for a request."""
    inner = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    length = f"Content-Length: {len(inner)}"
    for headers in ((length, "Transfer-Encoding: chunked"), ("Transfer-Encoding: chunked", length), ("Content-Length: 3", length), (length, "Content-Length: 0"),
                    ("Content-Length: -1",), ("Transfer-Encoding: xchunked",), (length + " 1",), (length + ", 0",), (length.replace(":", " :"),), (length.replace(":", "\t:"),),
                    ("Transfer-Encoding : chunked", length), (" " + length,), ("X: y\r\n " + length,),
                    ("Transfer-Encoding: chunked, identity", length), ("Transfer-Encoding: \x0bchunked", length)):  # fmt: skip
        with server.raw(request_bytes(inner, headers=headers), inner) as raw:
            answer = raw.rest()
        assert b" 200 " not in answer and b'"object"' not in answer, (headers, answer)


def test_pipelined_and_kept(server):
    one = request_bytes(HI)
    with server.raw(one + HEALTH + b"\r\n" + one + HEALTH + b"Connection: close\r\n\r\n") as raw:
        answer = raw.rest()
    assert answer.count(b"HTTP/1.1 200") == 4, answer
    with server.raw() as raw:
        for _ in range(100):
            raw.send(HEALTH + b"\r\n")
            assert raw.reply("GET").status == 200
        raw.send(b"GET /nope HTTP/1.1\r\nHost: x\r\n\r\n")
        assert raw.reply("GET").status == 404
        raw.send(request_bytes(b"{"))
        assert raw.reply().status == 400
        raw.send(request_bytes(HI))
        assert raw.reply().status == 200


def test_bytes_one_by_one(server):
    with server.raw() as raw:
        raw.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for b in request_bytes(HI):
            raw.send(bytes([b]))
        assert raw.reply().status == 200
    body = b"".join(b"1\r\n%c\r\n" % b for b in HI) + b"0\r\n\r\n"
    with server.raw(request_bytes(body, headers=("Transfer-Encoding: chunked",))) as raw:
        assert raw.reply().status == 200


def test_expect_continue(server):
    with server.raw(request_bytes(b"", headers=(N, "Expect: 100-continue"))) as raw:
        assert raw.sock.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"[:25]
        raw.send(HI)
        assert raw.reply().status == 200


def test_slow_heads(server):
    """200 sockets of a byte a time are closed in header-seconds; meanwhile a normal client is served."""
    slow, stop = [server.raw(b"G") for _ in range(200)], threading.Event()

    def drip():
        rest = b"ET /health HTTP/1.1\r\nX: " + b"x" * 1000
        for b in rest:
            if stop.wait(0.1):
                return
            for s in slow:
                s.send(bytes([b]))
    thread = threading.Thread(target=drip)
    thread.start()
    try:
        for _ in range(3):
            with Timed(2):
                assert server.say(SEE, temperature=0) == SEEN
        start = time.monotonic()
        for s in slow:
            s.sock.settimeout(10 * SLOW)
            data = s.rest()
            assert data == b"" or data.startswith(b"HTTP/1.1 408"), data
        assert time.monotonic() - start < 8 * SLOW  # header-seconds 2
    finally:
        stop.set()
        thread.join()
        for s in slow:
            s.close()


def test_slow_body(server):
    """A body that stops is given up in idle-seconds, and holds nothing afterwards."""
    with Timed(9), server.raw(request_bytes(b"{", headers=("Content-Length: 1000000",))) as raw:
        data = raw.rest()
        assert data == b"" or data.startswith(b"HTTP/1.1 408"), data
    until(lambda: server.memory()["host"]["bodies"] == 0)


def test_idle_connections_are_closed(server):
    with Timed(9), server.raw(HEALTH + b"\r\n") as raw:
        assert raw.rest().startswith(b"HTTP/1.1 200")
    with Timed(9), server.raw() as raw:
        data = raw.rest()
        assert data == b"" or data.startswith(b"HTTP/1.1 408"), data


def test_body_over_the_cap(server):
    """413 by the length alone, before the body comes, and by what comes when there is no length."""
    with Timed(2), server.raw(request_bytes(b"", headers=("Content-Length: 4194305",))) as raw:
        assert raw.reply().status == 413
    with Timed(2), server.raw(request_bytes(b"", headers=("Content-Length: 4194305", "Expect: 100-continue"))) as raw:
        assert raw.reply().status == 413
    server.post(CHAT, b" " * (4 << 20) + b"x").error(413)
    piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with server.raw(request_bytes(b"", headers=("Transfer-Encoding: chunked",)), *[piece] * 80) as raw:
        reply = raw.reply()
        assert reply is None or reply.status == 413, reply
    reply = server.post(CHAT, HI.rjust(4 << 20))
    assert reply.status == 200, "exactly the cap is taken"
    until(lambda: server.memory()["host"]["bodies"] == 0)


def test_body_memory():
    """Bodies beyond the memory for them wait unread, and all are served."""
    with Server("--body-memory", "3M", "--max-body", "2M") as s:
        body = HI[:-1] + b', "user": "' + b"x" * 1_500_000 + b'"}'
        for reply in at_once([lambda: s.post(CHAT, body) for _ in range(12)]):
            reply.expect(200)
        stuck = [s.raw(request_bytes(b"{", headers=("Content-Length: 1500000",))) for _ in range(2)]
        s.get("/health").expect(200)
        for raw in stuck:
            raw.close()
        with Timed(5):
            s.post(CHAT, body).expect(200)
        assert s.settled()["host"]["bodies"] == 0


def test_slow_uploads_delay_nobody():
    """Two bodies that may grow to all of the memory for bodies, and come at 20 KB a second, do not keep it for long."""
    with Server("--max-body", "4M", "--body-memory", "16M", "--header-seconds", "2") as s:
        slow, stop = [s.raw(request_bytes(b"", headers=("Transfer-Encoding: chunked",))) for _ in range(2)], threading.Event()

        def drip():
            while not stop.wait(0.2):
                for raw in slow:
                    raw.send(b"1000\r\n" + b" " * 4096 + b"\r\n")
        thread = threading.Thread(target=drip)
        thread.start()
        with Timed(12):
            s.post(CHAT, HI[:-1] + b', "user": "' + b"x" * 600_000 + b'"}').expect(200)
        stop.set()
        thread.join()
        for raw in slow:
            raw.close()
        s.settled()


def high_water(server):
    """The most megabytes that the server has had resident."""
    status = open(f"/proc/{server.process.pid}/status").read()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) // 1024


def test_long_texts_cost_little():
    """Refused by their length, not after megabytes have become tokens."""
    with Server() as s:
        before, words = high_water(s), "a" * (12 << 20)
        for path, body in ((CHAT, {"messages": user(words)}), (COUNT, {"messages": user("hi") + user("x", words)}), (COMPLETIONS, {"prompt": words}), ("/tokenize", {"prompt": words}),
                           ("/tokenize", {"messages": user(words)}), (COMPLETIONS, {"prompt": [words]})):  # fmt: skip
            with Timed(4):
                s.post(path, body).error(400, param="messages" if "messages" in body else "prompt")
        if not SANITIZED:
            assert high_water(s) < before + 5 * 12  # the body, and the strings of its JSON while they grow
        s.post(CHAT, HI).expect(200)


def test_replies_cost_what_is_planned():
    """Log-probabilities of a reply as a whole are bounded; a stream of as many is not held."""
    with Server("--body-memory", "8M", "--max-body", "1M") as s:
        ask = {"messages": user("hi"), **ENDLESS, "logprobs": True, "top_logprobs": 20, "n": 4}
        s.post(CHAT, ask).error(400, "logprobs", param="logprobs")
        before = high_water(s)
        for reply in at_once([lambda: s.post(CHAT, ask | {"max_tokens": 100}) for _ in range(4)]):
            assert len(tokens_of(reply.expect(200)["choices"][3])) == 100
        if not SANITIZED:
            assert high_water(s) < before + 8 + 30
        stream = s.stream(user("hi"), **ENDLESS, logprobs=True, top_logprobs=20, n=4, max_tokens=150)
        assert sum(len(c["choices"][0]["logprobs"]["content"]) for c in stream if c["choices"] and c["choices"][0]["logprobs"]) == 4 * 150
        s.settled()


def test_picture_memory():
    """Pictures beyond the memory for them wait, and all are served; one that can never fit is refused."""
    with Server("--picture-memory", "400K") as s:
        bodies = [{"messages": user(picture(encode(noise(224, 224, i))), "what?"), "max_tokens": 2, "temperature": 0} for i in range(10)]
        for reply in at_once([lambda b=b: s.post(CHAT, b) for b in bodies]):
            reply.expect(200)
        reply = s.post(CHAT, {"messages": user(*[picture(encode(noise(224, 224, i))) for i in range(4)]), "max_tokens": 1})
        assert reply.status in (400, 413), reply
        assert s.settled()["host"]["pictures"] == 0


def test_connections_are_bounded():
    """More than may be open: the others wait or are closed, and clients are served when the idle ones have been given up."""
    with Server("--max-connections", "16", "--header-seconds", "1", "--idle-seconds", "1") as s:
        idle = [socket.create_connection((s.host, s.port)) for _ in range(40)]
        time.sleep(0.2)
        assert len(os.listdir(f"/proc/{s.process.pid}/fd")) < 16 + 30
        end = time.monotonic() + 15 * SLOW
        while True:
            try:
                if s.get("/health", timeout=5).status == 200:
                    break
            except AssertionError:
                assert time.monotonic() < end, "no client is served any more"
        for sock in idle:
            sock.close()


# ---- the key

KEY = "a secret key"


@pytest.fixture(scope="module")
def locked():
    with Server("--api-key", KEY) as s:
        yield s


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer x{KEY}", f"Basic {KEY}", KEY, f"Token {KEY}",
                                    f"Bearer {KEY.upper()}", "Bearer " + "x" * 10000, f"BearerX {KEY}", f"Bearer{KEY}", "Bearer *"])  # fmt: skip
def test_wrong_key(locked, header):
    lines = [] if header is None else [f"Authorization: {header}"]
    for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/memory"), ("GET", "/metrics"), ("POST", "/tokenize"), ("POST", "/flush_cache")):
        with locked.raw(request_bytes(HI if method == "POST" else b"", path, method, lines)) as raw:
            reply = raw.reply(method)
            reply.error(401)


def test_right_key(locked):
    for scheme in ("Bearer", "bearer", "BEARER"):
        locked.get("/v1/models", headers={"Authorization": f"{scheme} {KEY}"}).expect(200)
    assert locked.get("/health").status == locked.get("/").status == 200
    assert locked.post(CHAT, HI, headers={"Authorization": f"Bearer {KEY}"}).status == 200


@pytest.mark.parametrize("target, host", [("/v1/models", h) for h in ("localhost", "", "127.0.0.1/health?", "x/health", "x#/health", "x?/health", "[::1", "a b", "health")]
                         + [(t, "x") for t in ("//v1/models", "/health/../v1/models", "/v1/models?/health", "/v1/models#/health", "/health%2f..%2fv1/models",
                                               "/v1/models;/health", "http://x/health/../v1/models", "http://x/v1/models", "/./v1/models", "/%76%31/models", "/v1\\models",
                                               "/health?/v1/models/../../v1/models")])  # fmt: skip
def test_no_way_around_the_key(locked, target, host):
    """Whatever the host and the path's spelling, nothing but /health and / answers without the key."""
    with locked.raw(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()) as raw:
        reply = raw.reply("GET")
        assert reply is None or reply.status in (400, 401, 404) or reply.body == b'{"status":"ok"}' or b'"status"' in reply.body, reply
        assert reply is None or b"tiny" not in reply.body, reply
    for extra in ("X-Forwarded-For: 127.0.0.1", "X-Original-URL: /health", "X-Rewrite-URL: /health", "X-Forwarded-Host: localhost"):
        with locked.raw(request_bytes(b"", "/v1/models", "GET", [extra])) as raw:
            assert raw.reply("GET").status == 401


def test_key_of_the_environment():
    with Server(env={"VLM_API_KEY": "k2"}) as s:
        s.get("/v1/models").error(401)
        s.get("/v1/models", headers={"Authorization": "Bearer k2"}).expect(200)


def test_the_key_is_not_shown(locked):
    locked.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    assert KEY not in "".join(locked.log)
    assert KEY.encode() not in locked.get("/health").body


# ---- pictures from http

def http(body, status="200 OK", *headers, length=None):
    lines = [f"HTTP/1.1 {status}", *headers]
    if length != "none":
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return ["\r\n".join(lines).encode() + b"\r\n\r\n", body]


def forever(piece, pause=0.0):
    while True:
        yield piece
        time.sleep(pause)


def first(head, rest):
    yield from head
    yield from rest


def to(location):
    return http(b"", "302 Found", f"Location: {location}")


@functools.cache
def bomb():
    return gzip.compress(bytes(50 << 20))


class Hostile:
    """An HTTP server that answers as the path says, and remembers who came."""

    def __init__(self, host="127.0.0.1", port=0):
        self.sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port, self.heads, self.accepted = self.sock.getsockname()[1], [], 0
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                conn, _ = self.sock.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self.serve, args=(conn,), daemon=True).start()

    def serve(self, conn):
        with conn:
            try:
                head = b""
                while b"\r\n\r\n" not in head and (piece := conn.recv(4096)):
                    head += piece
                self.heads.append(head.decode("latin-1"))
                path = self.heads[-1].split(" ")[1]
                if path == "/reset":
                    conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                for piece in self.pages(path):
                    conn.sendall(piece)
            except (OSError, IndexError):
                pass

    def pages(self, path):
        if path.startswith("/chain/"):
            n = int(path[7:])
            return to(f"/chain/{n - 1}") if n else http(PNG)
        p = {
            "/ok.png": http(PNG), "/typed": http(PNG, "200 OK", "Content-Type: image/png"), "/octets": http(PNG, "200 OK", "Content-Type: application/octet-stream"),
            "/unsized": http(PNG, length="none"), "/chunked": [*http(b"", "200 OK", "Transfer-Encoding: chunked", length="none"), b"%x\r\n" % len(PNG), PNG, b"\r\n0\r\n\r\n"],
            "/redirect": to("/ok.png"), "/relative": to("ok.png"), "/301": http(b"", "301 Moved", "Location: /ok.png"), "/307": http(b"", "307 T", "Location: /ok.png"),
            "/query?a=b&c=%20d": http(PNG),
            "/html": http(b"<html>no</html>", "200 OK", "Content-Type: text/html"), "/204": http(b"", "204 No Content"), "/404": http(PNG, "404 Not Found"),
            "/500": http(PNG, "500 Oh"), "/401": http(PNG, "401 No", "WWW-Authenticate: Basic realm=x"), "/304": http(b"", "304 Not Modified"), "/empty": http(b""),
            "/300": http(PNG, "300 Choices"), "/no location": http(PNG, "302 Found"), "/cut": http(PNG[:-50], length=len(PNG)), "/long": http(PNG, length=100),
            "/broken": http(PNG[:-50]), "/webp": http(b"RIFF\x24\0\0\0WEBPVP8 " + bytes(40)),
            "/http09": [PNG], "/garbage": [b"\0\1\2garbage\r\n\r\n"], "/many 100": forever(b"HTTP/1.1 100 Continue\r\n\r\n"), "/101": http(PNG, "101 Switching", "Upgrade: x"),
            "/huge length": first(http(b"", length=10**11), forever(bytes(65536))), "/negative length": http(PNG, length=-1),
            "/endless": first(http(PNG, length="none"), forever(bytes(65536))), "/endless headers": first([b"HTTP/1.1 200 OK\r\n"], forever(b"X: y\r\n" * 1000)),
            "/endless header": first([b"HTTP/1.1 200 OK\r\nX: "], forever(b"x" * 65536)),
            "/endless chunks": first(http(b"", "200 OK", "Transfer-Encoding: chunked", length="none"), forever(b"10000\r\n" + bytes(65536) + b"\r\n")),
            "/gzip bomb": http(bomb(), "200 OK", "Content-Encoding: gzip"), "/gzip": http(gzip.compress(PNG), "200 OK", "Content-Encoding: gzip"),
            "/loop": to("/loop"), "/to file": to("file:///etc/passwd"), "/to ftp": to(f"ftp://127.0.0.1:{self.port}/x"), "/to gopher": to(f"gopher://127.0.0.1:{self.port}/1"),
            "/to data": to(data_url(PNG)), "/to dict": to(f"dict://127.0.0.1:{self.port}/x"), "/to nothing": to(""), "/to link-local": to("http://169.254.169.254/latest/"),
            "/to private": to("http://10.0.0.1/"), "/to other": to(f"http://127.0.0.2:{self.port}/ok.png"), "/to ipv6": to(f"http://[::1]:{self.port}/ok.png"),
            "/to mapped": to(f"http://[::ffff:127.0.0.2]:{self.port}/ok.png"), "/to zero": to(f"http://0.0.0.0:{self.port}/ok.png"),
            "/silent": forever(b"", 0.1), "/slow": first(http(PNG[:1], length=len(PNG)), forever(b"x", 0.2)), "/slow head": first([b"HTTP/1.1 200 OK\r\n"], forever(b"x", 0.2)),
            "/slow chunks": first(http(b"", "200 OK", "Transfer-Encoding: chunked", length="none"), forever(b"1\r\nx\r\n", 0.2)),
        }  # fmt: skip
        return p.get(path.replace("%20", " ") if "?" not in path else path, http(b"", "404 Not Found"))

    def close(self):
        self.sock.close()


@pytest.fixture(scope="module")
def hostile():
    h = Hostile()
    yield h
    h.close()


@pytest.fixture(scope="module")
def fetching():
    """A server that fetches from 127.0.0.1 alone, for two seconds (where nothing slows it) and a megabyte at most."""
    with Server("--allow-images-from", "127.0.0.1", "--fetch-seconds", str(round(2 * SLOW)), "--fetch-bytes", "1M") as s:
        yield s


def look(server, url, **kw):
    return server.post(CHAT, {"messages": user(picture(url), "what do you see?"), "temperature": 0}, **kw)


@pytest.mark.parametrize("path", ["ok.png", "typed", "octets", "unsized", "chunked", "redirect", "relative", "301", "307", "chain/3", "query?a=b&c=%20d"])
def test_fetched(fetching, hostile, path):
    got = look(fetching, f"http://127.0.0.1:{hostile.port}/{path}").expect(200)
    assert got["choices"][0]["message"]["content"] == SEEN
    head = hostile.heads[-1].lower()
    assert head.startswith("get /") and "authorization" not in head and "cookie" not in head


@pytest.mark.parametrize("path", ["html", "204", "404", "500", "401", "304", "empty", "300", "no location", "cut", "long", "broken", "webp", "http09", "garbage", "many 100", "101",
                                  "huge length", "negative length", "endless", "endless headers", "endless header", "endless chunks", "gzip bomb", "loop",
                                  "chain/50", "to file", "to ftp", "to gopher", "to data", "to dict", "to nothing", "reset", "nope"])  # fmt: skip
def test_not_fetched(fetching, hostile, path):
    with Timed(5):
        error = look(fetching, f"http://127.0.0.1:{hostile.port}/{path.replace(' ', '%20')}").error(400)
    assert (error["param"] or "").startswith("messages"), error
    assert "root:" not in error["message"] and "0x" not in error["message"]


def test_gzip_is_no_way_in(fetching, hostile):
    """It is not asked for; what comes packed is unpacked within the cap, or refused."""
    reply = look(fetching, f"http://127.0.0.1:{hostile.port}/gzip")
    assert reply.status in (200, 400), reply
    assert "accept-encoding" not in hostile.heads[-1].lower() or reply.status == 200


def test_slow_fetches_delay_nobody(fetching, hostile):
    """Fetches that hang are given up in fetch-seconds; meanwhile others are answered as ever."""
    paths = ["silent", "slow", "slow%20head", "slow%20chunks"] * 4
    with concurrent.futures.ThreadPoolExecutor(len(paths)) as pool:
        start = time.monotonic()
        slow = [pool.submit(look, fetching, f"http://127.0.0.1:{hostile.port}/{p}") for p in paths]
        time.sleep(0.3)
        while not all(f.done() for f in slow):
            with Timed(2):
                assert fetching.say(SEE, temperature=0) == SEEN
        for f in slow:
            f.result().error(400)
        assert time.monotonic() - start < 8 * SLOW


def test_slow_picture_servers_delay_no_other_pictures(fetching, hostile):
    """Nor is there more time for more pictures of one request."""
    silent = picture(f"http://127.0.0.1:{hostile.port}/silent")
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        start = time.monotonic()
        slow = [pool.submit(fetching.post, CHAT, {"messages": user(*[silent] * (8 if i < 4 else 1))}) for i in range(24)]
        time.sleep(0.3)
        with Timed(2):
            look(fetching, f"http://127.0.0.1:{hostile.port}/ok.png").expect(200)
        for f in slow:
            f.result().error(400)
        assert time.monotonic() - start < 5 * SLOW


def test_redirects_to_forbidden_places(fetching, hostile):
    others = []
    for host in ("127.0.0.2", "::1"):
        try:
            others.append(Hostile(host, hostile.port))
        except OSError:  # no such address here
            continue
    for path in ("to link-local", "to private", "to other", "to ipv6", "to mapped", "to zero"):
        with Timed(5):
            look(fetching, f"http://127.0.0.1:{hostile.port}/{path.replace(' ', '%20')}").error(400)
    assert sum(o.accepted for o in others) == 0, "a connection was made"
    for o in others:
        o.close()


FORBIDDEN = ["127.0.0.1", "localhost", "LOCALHOST", "localhost.", "127.1", "2130706433", "0177.0.0.1", "0x7f.0.0.1", "0x7f000001", "017700000001", "127.0.0.1.", "127.0.0.2", "0.0.0.0", "0",
             "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[0:0:0:0:0:0:0:1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "①②⑦.0.0.1", "127。0。0。1",
             "user@127.0.0.1", "example.com@127.0.0.1", "example.com:80@127.0.0.1"]  # fmt: skip
UNROUTED = ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.127.255.255", "198.18.0.1", "192.0.0.1", "192.0.2.1", "198.51.100.1",
            "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "[fc00::1]", "[fd00::1]", "[fe80::1]", "[fe80::1%25lo]", "[ff02::1]", "[2001:db8::1]", "[100::1]",
            "[::ffff:10.0.0.1]", "[::ffff:169.254.169.254]", "[64:ff9b::a00:1]", "[2002:a00:1::]", "[fec0::1]"]  # fmt: skip


def test_nothing_private_is_fetched(server, hostile):
    """Refused before a connection is made, by name and by every spelling of the address."""
    before, wrong = hostile.accepted, []
    try:
        six = Hostile("::1", hostile.port)
    except OSError:
        six = None
    urls = [f"http://{h}:{hostile.port}/ok.png" for h in FORBIDDEN] + [f"http://{h}/ok.png" for h in UNROUTED]
    urls += [f"https://127.0.0.1:{hostile.port}/ok.png", f"HTTP://127.0.0.1:{hostile.port}/ok.png", f"http://127.0.0.1:{hostile.port}\\@example.com/ok.png"]

    def ask(url):
        start = time.monotonic()
        return url, look(server, url, timeout=30), time.monotonic() - start
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for url, reply, took in pool.map(ask, urls):
            if reply.status != 400 or took > 5 * SLOW:
                wrong.append(f"{took:.1f} s: {reply}")
    assert not wrong, "\n".join(wrong)
    assert hostile.accepted == before and not (six and six.accepted), "a connection was made"
    if six:
        six.close()


def test_allowed_networks(hostile):
    with Server("--allow-images-from", "10.0.0.0/8,127.0.0.0/30") as s:
        look(s, f"http://127.0.0.1:{hostile.port}/ok.png").expect(200)
        look(s, f"http://127.1.0.1:{hostile.port}/ok.png").error(400)
    for bad in ("localhost", "127.0.0.1/33", "127.0.0.1/", "1.2.3", "::1/129", "127.0.0.1/-1", "127.0.0.1/8x", "300.0.0.1"):
        r = run("vlm", "serve", "-m", MODEL, "--port", "0", "--allow-images-from", bad, timeout=20)
        assert r.returncode in (1, 2) and b"--allow-images-from" in r.stderr, (bad, r)


def test_proxies_are_not_used(hostile):
    """A proxy of the environment would fetch past all checks."""
    proxy = Hostile()
    env = {name: f"http://127.0.0.1:{proxy.port}" for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY")} | {"no_proxy": "", "NO_PROXY": ""}
    with Server("--allow-images-from", "127.0.0.1", env=env) as s:
        look(s, f"http://127.0.0.1:{hostile.port}/ok.png").expect(200)
        look(s, "http://10.0.0.1/x.png").error(400)
    assert proxy.accepted == 0
    proxy.close()


def test_a_client_that_goes_while_its_picture_is_fetched(fetching, hostile):
    raw = fetching.raw(request_bytes({"messages": user(picture(f"http://127.0.0.1:{hostile.port}/silent")), "max_tokens": 1}))
    time.sleep(0.3)
    raw.reset()
    time.sleep(0.1)
    with Timed(5):
        fetching.settled()


# ---- pictures from files

@pytest.fixture(scope="module")
def media(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    inside, outside = root / "media", root / "media-not"
    for d in (inside, inside / "sub", outside):
        d.mkdir()
    for p in (inside / "a.png", inside / "a b.png", inside / "é.png", inside / "sub/a.png", outside / "a.png"):
        p.write_bytes(PNG)
    (inside / "text.png").write_text("root:x:0:0")
    (inside / "in.png").symlink_to("sub/a.png")
    (inside / "out.png").symlink_to(outside / "a.png")
    (inside / "up").symlink_to(root)
    (inside / "passwd").symlink_to("/etc/passwd")
    (inside / "zero").symlink_to("/dev/zero")
    (inside / "gone.png").symlink_to("nowhere")
    (inside / "self.png").symlink_to("self.png")
    os.mkfifo(inside / "fifo")
    with Server("--media-dir", inside, "--fetch-bytes", "1M") as s:
        with open(inside / "big.png", "wb") as f:
            f.truncate(2 << 30)
        yield s, inside, outside


@pytest.mark.parametrize("path", ["{in}/a.png", "{in}/sub/a.png", "{in}/sub/../a.png", "{in}/in.png", "{in}/a%20b.png", "{in}/%C3%A9.png", "{in}//a.png", "{in}/./a.png"])
def test_files(media, path):
    s, inside, _ = media
    for start in ("file://", "FILE://", "file://localhost"):
        got = look(s, start + path.format(**{"in": inside})).expect(200)
        assert got["choices"][0]["message"]["content"] == SEEN


@pytest.mark.parametrize("path", ["{out}/a.png", "{in}/../media-not/a.png", "{in}/%2e%2e/media-not/a.png", "{in}/..%2fmedia-not/a.png", "{in}-not/a.png", "{in}/out.png", "{in}/up/media-not/a.png",
                                  "{in}/passwd", "{in}/zero", "{in}/gone.png", "{in}/self.png", "{in}/fifo", "{in}/sub", "{in}", "{in}/", "/", "", "/etc/passwd", "/dev/stdin", "/proc/self/environ",
                                  "{in}/none.png", "{in}/a.png%00.jpg", "{in}/text.png", "{in}/big.png", "a.png", "../a.png", "other.host{in}/a.png", "{in}/a.png?x", "{in}/a.png/", "{in}/%zz"])  # fmt: skip
def test_files_that_are_not_read(media, path):
    s, inside, outside = media
    with Timed(2):
        error = look(s, "file://" + path.format(**{"in": inside, "out": outside})).error(400)
    assert "root:" not in error["message"] and str(inside.parent) not in error["message"], error


def test_no_files_without_leave(server, media):
    _, inside, _ = media
    messages = {look(server, f"file://{p}").error(400)["message"] for p in (inside / "a.png", inside / "none.png", "/etc/passwd")}
    assert len(messages) == 1  # nobody learns which files there are
    for plain in (str(inside / "a.png"), "a.png", "./a.png"):
        look(server, plain).error(400)


# ---- the queue and those who go

def test_queue_full():
    with Server("--max-seqs", "1", "--max-queue", "2") as s:
        streams = [s.stream(user("go"), **ENDLESS) for _ in range(2)]
        next(iter(streams[0]))
        for _ in range(3):
            reply = s.post(CHAT, HI)
            reply.error(429)
            assert int(reply.headers["retry-after"]) >= 0, reply
        s.get("/health").expect(200)
        for stream in streams:
            stream.close()
        s.settled()
        s.post(CHAT, HI).expect(200)


def test_openai_sees_429_413_401(locked):
    import openai
    client = openai.OpenAI(base_url=locked.url + "/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    openai.OpenAI(base_url=locked.url + "/v1", api_key=KEY, max_retries=0).models.list()
    with Server("--max-seqs", "1", "--max-queue", "1", "--max-body", "10K") as s:
        client = openai.OpenAI(base_url=s.url + "/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.APIStatusError) as e:
            client.chat.completions.create(model="tiny", messages=user("x" * 20000))
        assert e.value.status_code == 413
        stream = s.stream(user("go"), **ENDLESS)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="tiny", messages=user("hi"))
        stream.close()


GOING = ["close", "reset", "half_close"]


def go(raw, how):
    raw.sock.shutdown(socket.SHUT_WR) if how == "half_close" else getattr(raw, how)()


@pytest.mark.parametrize("how", GOING)
def test_a_client_that_goes_frees_its_work(server, how):
    """From a stream, from a request without one, and from the queue; those who stay get all of theirs."""
    wanted = server.say(SEE, **ENDLESS, max_tokens=1500)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stays = pool.submit(server.say, SEE, **ENDLESS, max_tokens=1500)
        streams = [server.stream(user(f"go {i}"), **ENDLESS) for i in range(2)]
        for s in streams:
            next(iter(s))
        whole = [server.raw(request_bytes({"messages": user(f"go on {i}"), **ENDLESS, "n": 16})) for i in range(4)]  # --max-seqs 4: most wait
        until(lambda: sum(server.memory()["sequences"].values()) >= 60, what="sixty in work")
        for s in streams:
            getattr(s, how)()
        for raw in whole:
            go(raw, how)
        with Timed(1.5):
            until(lambda: sum(server.memory()["sequences"].values()) <= 1, 1.5, "all that went are gone")
        assert stays.result() == wanted
    for raw in whole:
        raw.close()
    for s in streams:
        s.close()


def test_going_at_every_moment(server):
    """A request cut after each part of it, and after each of the first replies' bytes."""
    data = request_bytes({"messages": SEE, "stream": True, "max_tokens": 30, "temperature": 0})
    rnd = random.Random(4)
    for i in range(120):
        raw = server.raw(data[: rnd.randrange(len(data))] if i % 2 else data)
        if i % 2 == 0 and i % 4:
            raw.sock.recv(rnd.randint(1, 600))
        go(raw, GOING[i % 3])
        if i % 3 == 2:
            raw.close()
    server.settled()
    assert server.say(SEE, temperature=0) == SEEN


def test_slow_readers_delay_nobody(server):
    """Streams that nobody reads: the engine goes on, and what others get is whole and in time."""
    lazy = []
    for i in range(3):
        raw = Raw.__new__(Raw)
        raw.sock, raw.sent = socket.socket(), b""
        raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.sock.connect((server.host, server.port))
        raw.send(request_bytes({"messages": user("go"), "stream": True, **ENDLESS, "logprobs": True, "top_logprobs": 20, "max_tokens": 1500}))
        lazy.append(raw)
    for _ in range(3):
        with Timed(3):
            assert server.say(SEE, temperature=0) == SEEN
    for raw in lazy:
        raw.close()


def test_a_slow_reader_gets_all(server):
    with server.raw(request_bytes({"messages": user("go"), "stream": True, **ENDLESS, "max_tokens": 400}, headers=("Connection: close",))) as raw:
        got = b""
        while piece := raw.sock.recv(1000):
            got += piece
            time.sleep(0.002)
    assert got.count(b'"content":"z') + got.count(b'"content": "z') > 0 and b"data: [DONE]" in got


def test_stream_to_old_and_kept_connections(server):
    """HTTP/1.0 knows no chunks: bytes until the end. In HTTP/1.1 the connection is kept after a stream."""
    body = json.dumps({"messages": SEE, "stream": True, "temperature": 0}).encode()
    with server.raw(b"POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body) as raw:
        head, _, events = raw.rest().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.") and b"chunked" not in head.lower()
        assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")
        for line in events.decode().split("\n\n")[:-2]:
            json.loads(line[6:])
    with server.raw() as raw:
        for _ in range(3):
            raw.send(request_bytes(body))
            reply = raw.reply()
            assert reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n")


# ---- the log

def test_log_lines_cannot_be_forged(server):
    before = len(server.log)
    for path in (b"/x%0d%0aFORGED%20200", b"/\x1b[31mred", b"/\xff\xfe", b"/x\x07", b"/%1b%5b31m"):
        with server.raw(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nUser-Agent: a\x1b[31m\r\n\r\n") as raw:
            raw.reply("GET")
    server.get("/nope")
    until(lambda: any("/nope" in line for line in server.log[before:]))
    lines = server.log[before:]
    assert not any(line.startswith("FORGED") for line in lines)
    assert all(line.strip("\n").isprintable() for line in lines), lines


def test_quiet():
    with Server("--quiet") as s:
        s.post(CHAT, HI).expect(200)
        s.get("/nope")
        s.stop()
        assert not [line for line in s.log if "/v1/chat" in line or "/nope" in line], s.log


# ---- start and end

@pytest.mark.parametrize("args, words", [
    (["--port", "70000"], "--port"), (["--port", "x"], "--port"), (["--port", "-1"], "--port"), (["--max-queue", "0"], "--max-queue"), (["--max-body", "x"], "--max-body"),
    (["--drain", "-1"], "--drain"), (["--frob"], "--frob"), (["extra"], "extra"), (["-p", "hi"], "-p"), (["--temperature", "1"], "--temperature"), (["--host"], "--host"),
    (["--api-key", ""], "key"), (["--max-images", "x"], "--max-images"), (["--header-seconds", "0"], "--header-seconds"), (["--fetch-seconds", "nan"], "--fetch-seconds"),
    (["--quiet=1"], "--quiet"), (["--strict", "yes"], "yes"), (["--max-connections", "0"], "--max-connections"),
])  # fmt: skip
def test_wrong_flags(args, words):
    r = run("vlm", "serve", "-m", MODEL, *args, timeout=20, stdin=subprocess.DEVNULL)
    assert r.returncode == 2 and words.encode() in r.stderr and r.stdout == b"", r
    assert r.stderr.count(b"\n") == 1, r


@pytest.mark.parametrize("args, word", [(["-m", "/nope.vlm"], "/nope.vlm"), (["--host", "256.1.1.1"], "256.1.1.1"), (["--host", "192.0.2.1"], "192.0.2.1"),
                                        (["--media-dir", "/nope/nope"], "/nope/nope"), (["--memory", "1K"], "memory")])  # fmt: skip
def test_cannot_start(args, word):
    r = run("vlm", "serve", *([] if "-m" in args else ["-m", MODEL]), "--port", "0", *args, timeout=30, stdin=subprocess.DEVNULL)
    assert r.returncode in (1, 2) and word.encode() in r.stderr and r.stdout == b"" and r.stderr.count(b"\n") == 1, r


def test_port_in_use(server):
    r = run("vlm", "serve", "-m", MODEL, "--port", server.port, timeout=30)
    assert r.returncode == 1 and str(server.port).encode() in r.stderr and r.stdout == b"", r


def test_port_again_at_once():
    """The port of a server that has just ended, with connections of clients behind it, can be taken again."""
    with Server() as s:
        port = s.port
        s.say(user("hi"), max_tokens=1)
        raw = s.raw(HEALTH + b"\r\n")
        raw.reply("GET")
    with Server(port=port) as s:
        s.get("/health").expect(200)
    raw.close()


def test_hosts():
    with Server("--host", "127.0.0.3") as s:
        assert s.host == "127.0.0.3"
        s.get("/health").expect(200)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", s.port), timeout=2)
    if os.path.exists("/proc/net/if_inet6") and "00000000000000000000000000000001" in open("/proc/net/if_inet6").read():
        with Server("--host", "::1") as s:
            assert s.url.startswith("http://[::1]:")
            s.get("/health").expect(200)


def test_only_this_machine_by_default(server):
    assert server.host == "127.0.0.1"
    listening = [line.split()[1].split(":")[0] for line in open("/proc/net/tcp").read().splitlines()[1:] if int(line.split()[1].split(":")[1], 16) == server.port]
    assert "00000000" not in listening and "0100007F" in listening


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_waits_for_who_runs(number):
    with Server() as s:
        ask = dict(**ENDLESS, max_tokens=2500)
        stream = s.stream(user("go"), **ask)
        chunks = iter(stream)
        next(chunks)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            whole = pool.submit(s.say, user("go"), **ask)
            until(lambda: running(s) == 2)
            s.signal(number)
            until(lambda: refused(s), 2, "new connections are refused")
            list(chunks)
            assert joined(stream.chunks)[0][0]["text"] == "z" * 2500
            assert whole.result() == "z" * 2500
        assert s.process.wait(10 * SLOW) == 0


def refused(s):
    try:
        socket.create_connection((s.host, s.port), timeout=5).close()
        return False
    except ConnectionResetError:  # it was in line when the socket was closed
        return False
    except ConnectionRefusedError:
        return True


def test_the_end_of_idle_connections():
    """Connections that wait for a next request do not keep the server."""
    with Server() as s:
        idle = [s.raw(HEALTH + b"\r\n") for _ in range(3)] + [s.raw(), s.raw(b"GET /hea")]
        for raw in idle[:3]:
            assert raw.reply("GET").status == 200
        s.signal()
        with Timed(5):
            assert s.process.wait(10 * SLOW) == 0
        for raw in idle:
            raw.close()


def test_a_second_signal_stops():
    with Server() as s:
        stream = s.stream(user("go"), **ENDLESS, n=4)
        chunks = iter(stream)
        next(chunks)
        s.signal()
        time.sleep(0.2)
        s.signal()
        with Timed(3):
            assert s.process.wait(10 * SLOW) == 0
        try:
            list(chunks)
            assert "error" in stream.chunks[-1], stream.chunks[-1]
        except (AssertionError, OSError, json.JSONDecodeError):
            pass  # cut: the client sees that it is not whole
        assert not stream.done


def test_drain():
    """A balancer sees 503 on /health while requests are still taken; then the socket closes."""
    with Server("--drain", "5") as s:
        s.signal()
        until(lambda: s.get("/health").status == 503, 2)
        assert s.get("/health").expect(503) == {"status": "draining"}
        reply = s.post(CHAT, HI)
        assert reply.status in (200, 503), reply
        assert s.process.wait(20 * SLOW) == 0


def test_signal_while_clients_are_slow():
    """A client that reads nothing, and one that sends nothing, do not keep the server from ending after a second signal."""
    with Server() as s:
        lazy = s.raw(request_bytes({"messages": user("go"), "stream": True, **ENDLESS, "logprobs": True, "top_logprobs": 20}))
        half = s.raw(request_bytes(b"{", headers=("Content-Length: 1000",)))
        until(lambda: running(s) == 1)
        s.signal()
        time.sleep(0.3)
        s.signal()
        with Timed(5):
            assert s.process.wait(20 * SLOW) == 0
        lazy.close()
        half.close()


def test_output_that_nobody_reads(tmp_path):
    """A full or closed stderr stops no request."""
    p = subprocess.Popen([str(BUILD / "vlm"), "serve", "-m", MODEL, "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, stderr=open("/dev/full", "w"))
    try:
        port = int(re.search(rb":(\d+)$", p.stdout.readline().strip())[1])
        p.stdout.close()
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=20 * SLOW) as sock:
                sock.sendall(request_bytes(HI, headers=("Connection: close",)))
                assert sock.recv(15).startswith(b"HTTP/1.1 200")
    finally:
        p.send_signal(signal.SIGTERM)
        assert p.wait(20 * SLOW) == 0


# ---- a load

def test_load():
    """64 clients that stream, cancel, read slowly, send nonsense: afterwards everything is as it was."""
    with Server("--max-seqs", "16", "--quiet") as s:
        report = server_load.load(s, seconds=10, clients=64)
        assert report["streamed"] > 20 and report["cancelled"] > 20 and report["refused"] > 20, report
