"""A `vlm serve` of the build as a test has it: started on a free port, asked, watched, stopped. The standard library only.

    with Server("--ctx", "512") as server:
        reply = server.post("/v1/chat/completions", {"messages": user("hi")})     # a Reply of any status
        answer = server.chat(user("what do you see?", sample("three.png")), temperature=0)  # its JSON; anything but 200 fails
        chunks = server.stream(user("hi"), max_tokens=5)                          # a Stream: iterate, .close(), .reset()
        raw = server.raw(b"GET / HTTP/1.1\\r\\n")                                   # a Raw socket
        server.memory(), server.metrics(), server.settled()
"""
import base64, contextlib, http.client, io, json, os, pathlib, re, signal, socket, struct, subprocess, threading, time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / os.environ.get("VLM_BUILD", "build")
MODEL = os.environ.get("VLM_TEST_MODEL") or str(ROOT / "tiny" / "tiny.vlm")
CHAT, COUNT = "/v1/chat/completions", "/v1/chat/completions/count"
COMPLETIONS = "/v1/completions"
SANITIZED = "san" in BUILD.name
SLOW = float(os.environ.get("VLM_SLOW") or (10 if SANITIZED else 4))  # limits of time are for a quiet machine, times this

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the program sets it for itself
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


# ---- what is asked

def short(value, room=1500):
    """A request or reply for a message: long strings of base64 cut, and all of it to `room` characters."""
    text = value if isinstance(value, str) else value.decode("utf-8", "replace") if isinstance(value, bytes) else json.dumps(value)
    text = re.sub(r"[A-Za-z0-9+/_=-]{200,}", lambda m: f"{m[0][:24]}...({len(m[0])} characters)", text)
    return text if len(text) <= room else f"{text[:room // 2]} ... ({len(text)} characters) ... {text[-room // 2:]}"


def data_url(data, mime="image/png"):
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def encode(image, format="PNG", **options):
    """A Pillow image as a file's bytes."""
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def sample(name):
    """A picture of tiny/samples as a part of a message."""
    return picture((ROOT / "tiny" / "samples" / name).read_bytes())


def picture(source, **fields):
    """A part of a message: of a file's bytes, or of a URL."""
    return {"type": "image_url", "image_url": {"url": data_url(source) if isinstance(source, bytes) else source, **fields}}


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    """One message of the user: texts and parts, in this order. A single text stays a string."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return [{"role": "user", "content": parts[0]}]
    return [{"role": "user", "content": [text(p) if isinstance(p, str) else p for p in parts]}]


def assistant(content):
    return [{"role": "assistant", "content": content}]


# ---- what comes back

class Reply:
    """One reply: status, headers (names in lower case), body; `asked` is what it is to, for messages."""

    def __init__(self, status, headers, body, asked=""):
        self.status, self.body, self.asked = status, body, asked
        self.headers = {k.lower(): v for k, v in headers}

    def __repr__(self):
        return f"{self.asked}\n  -> {self.status} {self.headers}\n  {short(self.body)}"

    def json(self):
        try:
            return json.loads(self.body, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
        except ValueError as e:
            raise AssertionError(f"no JSON ({e}): {self}") from None

    def expect(self, status):
        """The JSON of a reply that must have this status."""
        assert self.status == status, f"{status} wanted: {self}"
        return self.json()

    def error(self, status, *words, param=...):
        """The error object, whose status, words and parameter must be these."""
        error = self.expect(status).get("error")
        assert isinstance(error, dict) and set(error) >= {"message", "type", "param", "code"}, self
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        assert error["type"] == kind, f"type {kind} wanted: {self}"
        message = error["message"]
        assert isinstance(message, str) and 3 < len(message) < 1000 and not re.search("0x[0-9a-f]{5}", message), self
        for word in words:
            assert word.lower() in message.lower(), f"{word!r} wanted in the message: {self}"
        if param is not ...:
            assert error["param"] == param, f"param {param!r} wanted: {self}"
        return error


class Stream:
    """The events of a streamed reply, as they come. Fails on any other status than 200."""

    def __init__(self, connection, response, asked):
        self.connection, self.response, self.asked, self.done, self.chunks = connection, response, asked, False, []
        self.sock = connection.sock
        kind = response.getheader("content-type", "")
        if response.status != 200 or not kind.startswith("text/event-stream"):
            raise AssertionError(str(Reply(response.status, response.getheaders(), response.read(), asked)))

    def __iter__(self):
        """The chunks up to [DONE], which must come, and nothing after it."""
        for line in self.response:
            line = line.decode()  # strict: a chunk holds whole characters
            assert line.endswith("\n"), f"a line is cut: {line!r}: {self.asked}"
            line = line.rstrip("\r\n")
            if not line or line.startswith(":"):
                continue
            assert line.startswith("data: ") and not self.done, f"{line!r}: {self.asked}"
            if line == "data: [DONE]":
                self.done = True
                continue
            self.chunks.append(json.loads(line[6:]))
            yield self.chunks[-1]
        self.connection.close()
        if not self.done and not (self.chunks and "error" in self.chunks[-1]):
            raise AssertionError(f"the stream ended without [DONE] after {self.chunks[-2:]}: {self.asked}")

    def close(self):
        """Hang up as a client that was closed."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.response.close()
        self.connection.close()

    def reset(self):
        """Hang up with RST: nothing more is read, nothing waited for."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.response.close()
        self.connection.close()

    def half_close(self):
        """Say that nothing more will be sent, and go on listening."""
        self.sock.shutdown(socket.SHUT_WR)


def joined(chunks):
    """The choices of a stream as the reply without streaming has them: {index: {"text", "tool_calls", "finish_reason",
    "logprobs": list}}, and usage. Checks the order: role, content, finish once, usage alone at the end."""
    choices, usage, ids = {}, None, set()
    for chunk in chunks:
        assert usage is None, f"something after usage: {chunk}"
        ids.add((chunk["id"], chunk["model"], chunk["created"], chunk["object"]))
        if not chunk["choices"]:
            usage = chunk["usage"]
        for choice in chunk["choices"]:
            first = choice["index"] not in choices
            c = choices.setdefault(choice["index"], dict(text="", tool_calls=[], finish_reason=None, logprobs=[]))
            assert c["finish_reason"] is None, f"something after the finish: {chunk}"
            if "delta" in choice:
                delta = choice["delta"]
                assert (delta.get("role") == "assistant") == first, f"the role comes first, once: {chunk}"
                c["text"] += delta.get("content") or ""
                c["tool_calls"] += delta.get("tool_calls") or []
                c["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            else:
                c["text"] += choice["text"]
            c["finish_reason"] = choice["finish_reason"]
    assert len(ids) == 1, f"one id, model, time and object: {ids}"
    assert choices and all(c["finish_reason"] for c in choices.values()), f"no finish_reason: {choices}"
    return choices, usage


def metrics_of(page):
    """Prometheus text, strictly: {(name, ((label, value), ...)): number}, labels sorted. HELP and TYPE come before the samples, each
    once; histograms have rising buckets, +Inf, _sum and _count that agree."""
    kinds, samples, lines = {}, {}, page.split("\n")
    assert lines.pop() == "", "the last line must end"
    for line in lines:
        if m := re.fullmatch(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)", line):
            if m[1] == "TYPE":
                assert m[2] not in kinds and m[3] in ("counter", "gauge", "histogram", "summary", "untyped"), line
                kinds[m[2]] = m[3]
            continue
        label = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
        m = re.fullmatch(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{({label}(?:,{label})*)?,?\}})? (\S+)", line)
        assert m, f"no sample: {line!r}"
        key = m[1], tuple(sorted(re.findall(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"', m[2] or "")))
        assert key not in samples, f"twice: {line!r}"
        base = re.sub(r"_(bucket|sum|count)$", "", m[1])
        assert m[1] in kinds or kinds.get(base) == "histogram", f"no TYPE before {line!r}"
        samples[key] = float(m[3])
    for name in (n for n, kind in kinds.items() if kind == "histogram"):
        buckets = [(float(dict(labels)["le"]), v) for (n, labels), v in samples.items() if n == name + "_bucket"]
        assert buckets == sorted(buckets) and buckets[-1][0] == float("inf"), f"{name}: {buckets}"
        assert all(a[1] <= b[1] for a, b in zip(buckets, buckets[1:])), f"{name}: {buckets}"
        assert buckets[-1][1] == samples[name + "_count", ()] and (name + "_sum", ()) in samples, name
    return samples


# ---- sockets

class Raw:
    """A socket to the server, to send what no client would."""

    def __init__(self, server, *pieces, timeout=20):
        self.sock = socket.create_connection((server.host, server.port), timeout=timeout * SLOW)
        self.sent = b""
        self.send(*pieces)

    def send(self, *pieces):
        """Send as far as the server takes it: it may answer and close in the middle."""
        with contextlib.suppress(ConnectionError):
            for p in pieces:
                self.sent += p[:200]
                self.sock.sendall(p)
        return self

    def reply(self, method="POST"):
        """The next reply; None if the connection ends without one."""
        try:
            response = http.client.HTTPResponse(self.sock, method=method)
            response.begin()
            return Reply(response.status, response.getheaders(), response.read(), short(repr(self.sent)))
        except (http.client.BadStatusLine, ConnectionError):
            return None
        except TimeoutError:
            raise AssertionError(f"no answer to {short(repr(self.sent))}") from None

    def rest(self):
        """All bytes until the server closes."""
        out = b""
        try:
            while piece := self.sock.recv(1 << 16):
                out += piece
        except ConnectionError:
            pass
        except TimeoutError:
            raise AssertionError(f"still open after {short(repr(out))}, sent: {short(repr(self.sent))}") from None
        return out

    def reset(self):
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self):
        self.sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()


def request_bytes(body, path=CHAT, method="POST", headers=()):
    """An HTTP request as bytes, with the right length unless `headers` says otherwise."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    if not any(re.match("content-length|transfer-encoding", h, re.I) for h in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


# ---- the server

class Server:
    """`vlm serve --port 0` with more arguments; ready when the constructor returns. As a context it is stopped at its
    end, which must succeed: exit status 0, so that what a sanitizer finds fails the test."""

    def __init__(self, *args, model=MODEL, key=None, env=None, port=0, quiet=False):
        command = [str(BUILD / "vlm"), "serve", "-m", str(model), "--port", str(port), *map(str, args)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        env=os.environ | (env or {}))  # fmt: skip
        self.key, self.log, self.command = key, [], " ".join(command)
        self.reader = threading.Thread(target=self._read_log, daemon=True)
        self.reader.start()
        line = self._ready(30 * SLOW)
        m = re.fullmatch(r"vlm serve: http://(\[[^]]+\]|[^:/]+):(\d+)\n", line)
        if not m:
            self.process.kill()
            self.reader.join(5)
            raise AssertionError(f"no ready line but {line!r} of {self.command}\n" + "".join(self.log))
        self.host, self.port = m[1].strip("[]"), int(m[2])
        self.url = f"http://{m[1]}:{m[2]}"

    def _ready(self, seconds):
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        line = self.process.stdout.readline().decode()
        timer.cancel()
        return line

    def _read_log(self):
        for line in self.process.stderr:
            self.log.append(line.decode("utf-8", "replace"))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        status = self.stop()
        if kind is None:
            assert status == 0, f"exit status {status} of {self.command}\n" + "".join(self.log[-200:])

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def stop(self, seconds=20):
        """End it as a supervisor would; its exit status. What still runs then is given up with a second signal."""
        for _ in range(2):
            if self.process.poll() is None:
                self.signal()
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(seconds * SLOW)
                self.reader.join(5)
                return status
        self.process.kill()
        raise AssertionError(f"does not stop: {self.command}\n" + "".join(self.log[-50:]))

    def alive(self):
        assert self.process.poll() is None, f"it is gone with {self.process.poll()}: {self.command}\n" + "".join(self.log[-200:])

    # requests

    def _headers(self, headers):
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json"} | key | dict(headers or {})

    def _open(self, method, path, body, headers, timeout):
        self.alive()
        data = body if body is None or isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout * SLOW)
        asked = f"{method} {path} {short(data or b'')}"
        try:
            connection.request(method, path, data, self._headers(headers))
            return connection, connection.getresponse(), asked
        except TimeoutError:
            raise AssertionError(f"no answer in {timeout * SLOW} s to {asked}") from None
        except (OSError, http.client.HTTPException) as e:
            connection.close()
            self.alive()
            raise AssertionError(f"{type(e).__name__} {e}: {asked}") from e

    def request(self, method, path, body=None, headers=None, timeout=60):
        """Any request: a Reply of any status. `body`: bytes, a text, or anything that becomes JSON."""
        connection, response, asked = self._open(method, path, body, headers, timeout)
        with contextlib.closing(connection):
            try:
                return Reply(response.status, response.getheaders(), response.read(), asked)
            except TimeoutError:
                raise AssertionError(f"no whole answer in {timeout * SLOW} s to {asked}") from None

    def get(self, path, **kw):
        return self.request("GET", path, **kw)

    def post(self, path, body, **kw):
        return self.request("POST", path, body, **kw)

    def chat(self, messages, **fields):
        """The reply's JSON to a chat request that must succeed."""
        return self.post(CHAT, {"messages": messages, **fields}).expect(200)

    def say(self, messages, **fields):
        """The first choice's text."""
        return self.chat(messages, **fields)["choices"][0]["message"]["content"]

    def complete(self, prompt, **fields):
        return self.post(COMPLETIONS, {"prompt": prompt, **fields}).expect(200)

    def stream(self, messages, path=CHAT, timeout=60, headers=None, **fields):
        """A Stream of a chat request (of a completion with `path`: then `messages` is the prompt)."""
        name = "messages" if path == CHAT else "prompt"
        return Stream(*self._open("POST", path, {name: messages, "stream": True, **fields}, headers, timeout))

    def raw(self, *pieces, **kw):
        return Raw(self, *pieces, **kw)

    def tokens(self, prompt):
        return self.post("/tokenize", {"prompt": prompt}).expect(200)["tokens"]

    # what it says of itself

    def memory(self):
        return self.get("/memory").expect(200)

    def metrics(self):
        reply = self.get("/metrics")
        assert reply.status == 200, reply
        return metrics_of(reply.body.decode())

    def metric(self, name, **labels):
        return self.metrics().get((name, tuple(sorted(labels.items()))), 0.0)

    def settled(self, seconds=5):
        """Wait until nothing runs or waits, and return /memory. Checks what must always hold."""
        end = time.monotonic() + seconds * SLOW
        while True:
            m = self.memory()
            check_memory(m)
            left = [*m["sequences"].values(), m["blocks"]["held"], m["images"]["pinned"], m["host"]["bodies"], m["host"]["pictures"]]
            if not any(left):
                return m
            assert time.monotonic() < end, f"not idle after {seconds * SLOW} s: {m}"
            time.sleep(0.02)


def check_memory(m):
    """What /memory must always say: every byte has an owner, every block a state."""
    assert sum(o["bytes"] for o in m["owners"]) == m["total"], m
    assert [o["name"] for o in m["owners"]] == ["weights", "kv", "images", "arena", "io"], m
    assert all(0 <= o["used"] <= o["peak"] <= o["bytes"] for o in m["owners"]), m
    b = m["blocks"]
    assert b["free"] + b["cached"] + b["held"] == b["total"], m
    assert 0 <= m["images"]["pinned"] <= m["images"]["used"] <= m["images"]["slots"], m
    assert all(m["host"][k] >= 0 for k in ("decode_workspace", "bodies", "pictures")), m
