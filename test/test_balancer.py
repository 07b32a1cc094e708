"""Two servers behind HAProxy with docs/haproxy.cfg as it is, but for the ports: who is asked what, a rolling restart under load, a
server that dies. Needs the distribution's haproxy (`make test` installs it)."""
import base64
import http.client
import io
import json
import random
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest
from conftest import BUILD, ROOT
from PIL import Image

DRAIN = 5  # as docs/haproxy.cfg assumes
NAMES = ("vlm1", "vlm2")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Site:
    """HAProxy and the servers behind it, on ports of this run."""

    def __init__(self, folder):
        self.ports = dict(zip((8080, 8001, 8002), (free_port() for _ in range(3))))
        self.servers, self.log = {}, open(folder / "log", "wb")
        for name in NAMES:
            self.start(name)
        text = (ROOT / "docs/haproxy.cfg").read_text()
        for shipped, used in self.ports.items():
            assert text.count(f"127.0.0.1:{shipped}") == 1
            text = text.replace(f"127.0.0.1:{shipped}", f"127.0.0.1:{used}")
        (folder / "haproxy.cfg").write_text(text)
        haproxy = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
        assert haproxy, "haproxy is missing: apt-get install haproxy"
        self.haproxy = subprocess.Popen([haproxy, "-db", "-f", folder / "haproxy.cfg"], stdout=self.log, stderr=self.log)
        self.until(lambda: self.ask({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).status == 200)

    def port_of(self, name):
        return self.ports[8001 + NAMES.index(name)]

    def start(self, name):
        """Start a server and wait for its line that it listens."""
        command = [BUILD / "vlm", "serve", "--port", self.port_of(name), "--drain", DRAIN, "--threads", 1, "--quiet"]
        self.servers[name] = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=self.log)
        assert b"http://" in self.servers[name].stdout.readline()

    def ask(self, body, port=None, **headers):
        return Reply(port or self.ports[8080], body, headers)

    def until(self, condition, seconds=20):
        end = time.monotonic() + seconds
        while not attempt(condition):
            assert time.monotonic() < end, "it did not come about"
            time.sleep(0.1)

    def servers_that_answer(self):
        """Names of the servers that 40 requests of different keys reach."""
        return {self.ask(question(f"{random.random()}"), **{"X-Affinity": str(i)}).server for i in range(40)}

    def stop(self):
        self.haproxy.kill()
        for server in self.servers.values():
            server.kill()
            server.wait()
        self.haproxy.wait()
        self.log.close()


def attempt(condition):
    try:
        return condition()
    except OSError:
        return False


class Reply:
    """An answer read to its end: status, who gave it, the object or the stream's events and when each came."""

    def __init__(self, port, body, headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            data = json.dumps(body).encode()
            begun = time.monotonic()
            connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json", **headers})
            got = connection.getresponse()
            self.status, self.server, self.events, self.times = got.status, got.getheader("X-Served-By"), [], []
            if "event-stream" not in got.getheader("Content-Type", ""):
                self.object = json.loads(got.read())
                return
            while line := got.readline():
                if line.startswith(b"data: "):
                    self.events.append(line[6:].strip())
                    self.times.append(time.monotonic() - begun)
            assert self.events and self.events[-1] == b"[DONE]", "the stream was cut"
        finally:
            connection.close()

    @property
    def text(self):
        if not self.events:
            return self.object["choices"][0]["message"]["content"]
        deltas = [json.loads(e)["choices"] for e in self.events[:-1]]
        return "".join(c[0]["delta"].get("content") or "" for c in deltas if c)


def picture(seed, side=64, noise=False):
    """A data: URL of a PNG of its own: plain colours (some 200 bytes), or noise (bytes without end)."""
    r = random.Random(seed)
    if noise:
        image = Image.frombytes("RGB", (side, side), r.randbytes(side * side * 3))
    else:
        image = Image.new("RGB", (side, side), (r.randrange(256), r.randrange(256), r.randrange(256)))
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def question(text, url=None, system=None, first="picture", **fields):
    parts = [{"type": "text", "text": text}]
    if url:
        parts.insert(0 if first == "picture" else 1, {"type": "image_url", "image_url": {"url": url}})
    messages = [{"role": "system", "content": system}] if system else []
    return {"messages": messages + [{"role": "user", "content": parts if url else text}], "temperature": 0, "max_tokens": 8, **fields}


def endless(tokens):
    """Fields that make an answer so long: one word is likelier than the end."""
    done = subprocess.run([BUILD / "vlm", "tokenize"], input=b" a", capture_output=True, cwd=ROOT, check=True)
    return {"max_tokens": tokens, "logit_bias": {str(json.loads(done.stdout)[0]): 100}}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("balancer"))
    yield site
    site.stop()


def test_stream_is_passed_on_as_it_comes(site):
    body = question("what do you see?", **endless(2000))
    whole = site.ask(body)
    stream = site.ask({**body, "stream": True, "stream_options": {"include_usage": True}})
    assert stream.status == 200 and stream.text == whole.text
    assert json.loads(stream.events[-2])["usage"]["completion_tokens"] == 2000
    assert stream.times[5] < 0.2 * stream.times[-1], "the first words waited for the last"


@pytest.mark.parametrize("side, noise", [(64, False), (112, True), (600, True)], ids=["in the buffer", "16 KB and more", "larger than the buffer"])
def test_a_picture_has_its_server(site, side, noise):
    """Whatever is asked about it, wherever the text stands; and the server knows it by then."""
    served = set()
    for seed in range(12):
        url = picture(seed, side, noise)
        asked = [question("what do you see?", url), question("how many?", url, system="Be brief.", first="text"), question("what do you see?", url)]
        replies = [site.ask(body) for body in asked]
        assert all(r.status == 200 for r in replies)
        assert len({r.server for r in replies}) == 1
        assert replies[2].object["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        served.add(replies[0].server)
    assert served == set(NAMES)


def test_a_conversation_has_its_server(site):
    """Later turns go where the first one went, and find their prefix there. The system's text is everybody's and decides nothing."""
    served = set()
    for i in range(12):
        body = question(f"my number is {i}", system="You talk about pictures.")
        first = site.ask(body)
        body["messages"] += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "which was it?"}]
        second = site.ask(body)
        assert first.status == second.status == 200 and first.server == second.server
        assert second.object["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        served.add(first.server)
    assert served == set(NAMES)


def test_the_client_may_say_what_belongs_together(site):
    replies = [site.ask(question(f"{i}", picture(i)), **{"X-Affinity": "album"}) for i in range(8)]
    assert len({r.server for r in replies}) == 1


def test_curl_waits_for_leave_to_send(site, tmp_path):
    """A large body with Expect: 100-continue."""
    (tmp_path / "body").write_text(json.dumps(question("what do you see?", picture(1, 1000, True))))
    url = f"http://127.0.0.1:{site.ports[8080]}/v1/chat/completions"
    done = subprocess.run(["curl", "-sS", "--max-time", "20", "-H", "Expect: 100-continue", "-H", "Content-Type: application/json", "-d", f"@{tmp_path}/body", "-w", "%{http_code} %{time_total}", "-o", "/dev/null", url], capture_output=True, text=True)  # fmt: skip
    status, seconds = done.stdout.split()
    assert status == "200" and float(seconds) < 10


def test_a_client_that_leaves_frees_its_work(site):
    body = json.dumps(question("what do you see?", stream=True, **endless(3000))).encode()
    for _ in range(8):
        with socket.create_connection(("127.0.0.1", site.ports[8080])) as s:
            s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            s.recv(100)
    site.until(lambda: sum(running(site, name) for name in NAMES) == 0, 3)


def running(site, name):
    connection = http.client.HTTPConnection("127.0.0.1", site.port_of(name), timeout=5)
    connection.request("GET", "/memory")
    return json.loads(connection.getresponse().read())["sequences"]["running"]


class Load:
    """Clients that ask without a pause, some in streams, some with a picture larger than the balancer's buffer."""

    def __init__(self, site, clients=8):
        self.site, self.on, self.done, self.failed = site, True, 0, []
        self.last = {}  # server -> when it answered last
        self.threads = [threading.Thread(target=self.run, args=(i,), daemon=True) for i in range(clients)]
        for t in self.threads:
            t.start()

    def run(self, client):
        r, large = random.Random(client), [picture(f"{client}.{i}", 200, True) for i in range(4)]
        while self.on:
            url = r.choice([None, picture(r.randrange(1000)), r.choice(large)])
            body = question(f"{r.random()}: what do you see?", url, stream=r.random() < 0.5, max_tokens=r.choice([4, 8, 64]))
            try:
                reply = self.site.ask(body)
                if reply.status != 200:
                    self.failed.append((reply.status, reply.server, url and len(url), reply.object))
                self.done += 1
                self.last[reply.server] = time.monotonic()
            except (OSError, AssertionError, http.client.HTTPException) as e:
                self.failed.append((repr(e), url and len(url)))

    def stop(self):
        self.on = False
        for t in self.threads:
            t.join(60)
            assert not t.is_alive(), "a request was never answered"


def test_rolling_restart_loses_no_request(site):
    load = Load(site)
    for name in NAMES:
        old = site.servers[name]
        old.send_signal(signal.SIGTERM)
        assert old.wait(DRAIN + 20) == 0
        site.start(name)
        begun = time.monotonic()
        site.until(lambda: load.last.get(name, 0) > begun)
    load.stop()
    assert load.failed == []
    assert load.done > 100


def test_a_killed_server_takes_only_its_own_requests(site):
    load = Load(site)
    site.until(lambda: set(load.last) == set(NAMES))
    site.servers["vlm1"].kill()
    killed = time.monotonic()
    time.sleep(4)
    assert load.last["vlm1"] < killed + 1 and load.last["vlm2"] > killed + 3
    # It ran at most one request of each client when it died.
    assert len(load.failed) <= len(load.threads)
    lost = len(load.failed)
    site.servers["vlm1"].wait()
    site.start("vlm1")
    site.until(lambda: load.last["vlm1"] > killed + 4)
    load.stop()
    assert len(load.failed) == lost, "requests failed after it was taken out"
    assert site.servers_that_answer() == set(NAMES)
