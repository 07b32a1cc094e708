"""Two servers behind HAProxy with docs/haproxy.cfg as it is, but for the ports: who is asked what, a rolling restart under load, a
server that dies. Needs the distribution's haproxy (`make test` installs it)."""
import http.client
import json
import random
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest
from conftest import ROOT, run
from PIL import Image
from server_client import CHAT, SLOW, Server, encode, joined, picture, request_bytes, user

DRAIN = 5  # as docs/haproxy.cfg assumes
NAMES = ("vlm1", "vlm2")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Site(Server):
    """HAProxy, asked as if it were a server, and the servers behind it; all on ports of this run."""

    def __init__(self, folder):
        ports = {shipped: free_port() for shipped in (8080, 8001, 8002)}
        self.ports = dict(zip(NAMES, (ports[8001], ports[8002])))
        self.servers = {name: self.start(name) for name in NAMES}
        text = (ROOT / "docs/haproxy.cfg").read_text()
        for shipped, used in ports.items():
            assert text.count(f" 127.0.0.1:{shipped}\n") == 1
            text = text.replace(f" 127.0.0.1:{shipped}\n", f" 127.0.0.1:{used}\n")
        (folder / "haproxy.cfg").write_text(text)
        haproxy = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
        assert haproxy, "haproxy is missing: apt-get install haproxy"
        self.host, self.port, self.key, self.log, self.command = "127.0.0.1", ports[8080], None, [], haproxy
        self.process = subprocess.Popen([haproxy, "-db", "-f", folder / "haproxy.cfg"], stderr=subprocess.PIPE)
        self.reader = threading.Thread(target=self._read_log, daemon=True)
        self.reader.start()
        self.until(lambda: self.get("/health").status == 200)

    def start(self, name):
        return Server("--drain", DRAIN, "--threads", 1, "--quiet", port=self.ports[name])

    def until(self, condition, seconds=20):
        end = time.monotonic() + seconds * SLOW
        while True:
            try:
                if condition():
                    return
            except AssertionError:  # nobody listens yet
                pass
            assert time.monotonic() < end, "".join(self.log[-20:])
            time.sleep(0.1)

    def end(self):
        self.process.kill()
        for server in self.servers.values():
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("balancer"))
    yield site
    site.end()


def drawn(seed, side=64, noise=False):
    """A picture of its own as a part of a message: plain (some 200 bytes), or noise (3 bytes a pixel)."""
    r = random.Random(seed)
    if noise:
        return picture(encode(Image.frombytes("RGB", (side, side), r.randbytes(side * side * 3))))
    return picture(encode(Image.new("RGB", (side, side), (r.randrange(256), r.randrange(256), r.randrange(256)))))


def question(*parts, system=None, **fields):
    messages = [{"role": "system", "content": system}] if system else []
    return {"messages": messages + user(*parts), "temperature": 0, "max_tokens": 8, **fields}


def endless(tokens):
    """Fields that make an answer so long: one word is likelier than the end."""
    word = json.loads(run("vlm", "tokenize", input=b" a").stdout)[0]
    return {"max_tokens": tokens, "logit_bias": {str(word): 100}}


def server_of(reply):
    assert reply.status == 200, reply
    return reply.headers["x-served-by"]


def cached(reply):
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_stream_is_passed_on_as_it_comes(site):
    body = question("what do you see?", **endless(2000))
    begun, times = time.monotonic(), []
    stream = site.stream(**body, stream_options={"include_usage": True})
    for _ in stream:
        times.append(time.monotonic() - begun)
    choices, usage = joined(stream.chunks)
    assert choices[0]["text"] == site.say(**body) and usage["completion_tokens"] == 2000
    assert times[5] < 0.2 * times[-1], "the first words waited for the last"


@pytest.mark.parametrize("side, noise", [(64, False), (112, True), (600, True)], ids=["small", "16 KB and more", "larger than the buffer"])
def test_a_picture_has_its_server(site, side, noise):
    """Whatever is asked about it, wherever the text stands; and the server knows it by then."""
    served = set()
    for seed in range(12):
        p = drawn(seed, side, noise)
        bodies = [question(p, "what do you see?"), question("how many?", p, system="Be brief."), question(p, "what do you see?")]
        replies = [site.post(CHAT, body) for body in bodies]
        assert len({server_of(r) for r in replies}) == 1
        assert cached(replies[2]) > 0
        served.add(server_of(replies[0]))
    assert served == set(NAMES)


def test_a_conversation_has_its_server(site):
    """Later turns go where the first one went, and find their prefix there. The system's text is everybody's and decides nothing."""
    served = set()
    for i in range(12):
        body = question(f"my number is {i}", system="You talk about pictures.")
        first = site.post(CHAT, body)
        body["messages"] += [first.json()["choices"][0]["message"], *user("which was it?")]
        second = site.post(CHAT, body)
        assert server_of(first) == server_of(second) and cached(second) > 0
        served.add(server_of(first))
    assert served == set(NAMES)


def test_the_client_may_say_what_belongs_together(site):
    replies = [site.post(CHAT, question(drawn(i), "how many?"), headers={"X-Affinity": "album"}) for i in range(8)]
    assert len({server_of(r) for r in replies}) == 1


def test_curl_waits_for_leave_to_send(site, tmp_path):
    """A large body with Expect: 100-continue."""
    (tmp_path / "body").write_text(json.dumps(question(drawn(1, 1000, True), "what do you see?")))
    command = ["curl", "-sS", "--max-time", 20 * SLOW, "-H", "Expect: 100-continue", "-H", "Content-Type: application/json"]
    command += ["-d", f"@{tmp_path}/body", "-o", tmp_path / "reply", "-w", "%{http_code} %{time_total}", site_url(site)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    status, seconds = done.stdout.split()
    assert status == "200" and float(seconds) < 10 * SLOW, done.stderr
    assert json.loads((tmp_path / "reply").read_text())["usage"]["prompt_tokens_details"]["image_tokens"] > 0


def site_url(site):
    return f"http://{site.host}:{site.port}{CHAT}"


def test_a_client_that_leaves_frees_its_work(site):
    for how in ("close", "reset"):
        for _ in range(4):
            with site.raw(request_bytes(question("what do you see?", stream=True, **endless(3000)))) as raw:
                raw.sock.recv(100)
                getattr(raw, how)()
    for server in site.servers.values():
        server.settled(seconds=1)


def test_what_speaks_of_one_server_is_not_for_everybody(site):
    for method, path in (("GET", "/metrics"), ("POST", "/flush_cache")):
        assert site.request(method, path).status == 404
    assert site.get("/").status == site.get("/memory").status == 200


class Load:
    """Clients that ask without a pause, some in streams, some with a picture larger than the balancer's buffer."""

    def __init__(self, site, clients=8):
        self.site, self.on, self.done, self.failed = site, True, 0, []
        self.last = dict.fromkeys(NAMES, 0.0)  # when a server was heard of last
        self.threads = [threading.Thread(target=self.run, args=(i,), daemon=True) for i in range(clients)]
        for t in self.threads:
            t.start()

    def run(self, client):
        r, large = random.Random(client), [drawn(f"{client}.{i}", 200, True) for i in range(4)]
        while self.on:
            parts = r.choice([[], [drawn(r.randrange(1000))], [r.choice(large)]])
            body = question(*parts, f"{r.random()}: what do you see?", max_tokens=r.choice([4, 8, 64]))
            try:
                if r.random() < 0.5:
                    stream = self.site.stream(**body)
                    joined(list(stream))
                    server = stream.response.getheader("x-served-by")
                else:
                    server = server_of(self.site.post(CHAT, body))
                self.done += 1
                self.last[server] = time.monotonic()
            except (AssertionError, OSError, http.client.HTTPException) as e:
                self.failed.append(f"{e!r}"[:1000])

    def stop(self):
        self.on = False
        for t in self.threads:
            t.join(60 * SLOW)
            assert not t.is_alive(), "a request was never answered"


def test_rolling_restart_loses_no_request(site):
    load = Load(site)
    for name in NAMES:
        site.servers[name].signal(signal.SIGTERM)
        assert site.servers[name].process.wait(DRAIN + 20 * SLOW) == 0
        site.servers[name] = site.start(name)
        begun = time.monotonic()
        site.until(lambda: load.last[name] > begun)
    load.stop()
    assert load.failed == []
    assert load.done > 100


def test_a_killed_server_takes_only_its_own_requests(site):
    load = Load(site)
    site.until(lambda: all(load.last.values()))
    site.servers["vlm1"].process.kill()
    site.servers["vlm1"].process.wait()
    killed = time.monotonic()
    site.until(lambda: load.last["vlm2"] > killed + 4)
    assert load.last["vlm1"] < killed + 1
    lost = len(load.failed)
    assert lost <= len(load.threads), "more than the one request of each client that it may have run"
    site.servers["vlm1"] = site.start("vlm1")
    site.until(lambda: load.last["vlm1"] > killed + 4)
    load.stop()
    assert len(load.failed) == lost, load.failed[lost:]
