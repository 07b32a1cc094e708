#!/usr/bin/env python3
"""A headless Chromium as a test has it, driven through its DevTools pipe. The standard library only. As a program it says
which browser it would take.

    with Browser() as browser:
        page = browser.open(url)
        page.click("#send"); page.type("hi"); page.press("Enter"); page.drop("main", "three.png")
        page.wait("document.querySelector('.receipt')")
        page.problems          # what the console says of errors, exceptions and the Content-Security-Policy
"""
import base64, fcntl, itertools, json, os, pathlib, shutil, subprocess, sys, tempfile, threading, time

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge"]
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}
FLAGS = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-extensions",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
         "--no-sandbox"]  # containers and root have none, and the only page it sees is ours  # fmt: skip
SHIFT, CTRL = 8, 2


def find():
    """The browser's path, or None."""
    named = os.environ.get("CHROMIUM")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, [*NAMES, MAC])), None)


def missing():
    return ("no browser for the page's test: install Chromium (Debian: apt-get install chromium), or Google Chrome where the "
            f"distribution has it as a snap only, or set CHROMIUM to one. Looked for {os.environ.get('CHROMIUM') or ', '.join(NAMES)}")  # fmt: skip


class Browser:
    def __init__(self):
        assert (path := find()), missing()
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.errors = open(pathlib.Path(self.profile.name) / "stderr", "w+b")
        theirs, ours = zip(os.pipe(), reversed(os.pipe()))  # it reads commands from 3 and writes replies to 4
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in theirs]  # so that 3 and 4 are not among them
        self.process = subprocess.Popen([path, *FLAGS, f"--user-data-dir={self.profile.name}"], stdin=subprocess.DEVNULL,
                                        stdout=self.errors, stderr=self.errors, close_fds=False,  # Python's own close by themselves
                                        preexec_fn=lambda: [os.dup2(fd, n) for fd, n in zip(high, (3, 4))])  # fmt: skip
        for fd in (*theirs, *high):
            os.close(fd)
        self.pipe = open(ours[0], "wb", buffering=0)
        self.numbers, self.replies, self.changed, self.pages, self.gone = itertools.count(1), {}, threading.Condition(), {}, False
        threading.Thread(target=self._read, args=(open(ours[1], "rb"),), daemon=True).start()
        self.do("Browser.getVersion", 60)

    def _read(self, pipe):
        rest = b""
        while piece := pipe.read1(1 << 20):
            *messages, rest = (rest + piece).split(b"\0")
            for m in map(json.loads, messages):
                with self.changed:
                    if "id" in m:
                        self.replies[m["id"]] = m
                    elif page := self.pages.get(m.get("sessionId")):
                        page._event(m["method"], m["params"])
                    self.changed.notify_all()
        with self.changed:
            self.gone = True
            self.changed.notify_all()

    def send(self, method, session=None, **params):
        n = next(self.numbers)
        message = json.dumps({"id": n, "method": method, "params": params} | ({"sessionId": session} if session else {}))
        self.pipe.write(message.encode() + b"\0")
        return n

    def do(self, method, seconds=30, session=None, **params):
        """A DevTools command's result; fails on its error."""
        n = self.send(method, session, **params)
        with self.changed:
            came = self.changed.wait_for(lambda: n in self.replies or self.gone, seconds)
            reply = self.replies.pop(n, {})
        if not came or self.gone or "error" in reply:
            self.errors.seek(0)
            raise AssertionError(f"{method} {str(params)[:300]}: {reply.get('error') or 'no answer'}\n" + (
                self.errors.read().decode("utf-8", "replace")[-2000:] if self.gone else ""))  # fmt: skip
        return reply["result"]

    def open(self, url, width=1280, height=860, dark=False):
        """A new tab with its own storage."""
        context = self.do("Target.createBrowserContext")["browserContextId"]
        target = self.do("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        page = Page(self, self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        page.context = context
        for domain in ("Page", "Runtime", "Log", "DOM", "Network"):
            page.do(domain + ".enable")
        page.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        page.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        page.go(url)
        return page

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.send("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        self.profile.cleanup()


class Page:
    def __init__(self, browser, session):
        self.browser, self.session, self.problems, self.requests, self.answer = browser, session, [], [], None
        browser.pages[session] = self

    def do(self, method, **params):
        return self.browser.do(method, session=self.session, **params)

    def _event(self, method, p):
        if method == "Runtime.exceptionThrown":
            self.problems.append("exception: " + json.dumps(p["exceptionDetails"].get("exception", p["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and p["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console.{p['type']}: {p['args']}")
        elif method == "Log.entryAdded" and p["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{p['entry']['source']}: {p['entry']['text']} {p['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(p["request"])
        elif method == "Fetch.requestPaused":
            self.answer(p)
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {p['message']}")

    # looking

    def js(self, expression):
        """The value of a JavaScript expression, awaited."""
        r = self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in r, f"{expression}: {r['exceptionDetails'].get('exception', r)}"
        return r["result"].get("value")

    def wait(self, expression, seconds=20):
        """Wait until an expression is true, and return its value; an element counts as true."""
        expression = f"(v => v instanceof Node || v)({expression})"
        end = time.monotonic() + seconds
        while not (value := self.js(expression)):
            assert time.monotonic() < end, f"never true in {seconds} s: {expression}\n{self.problems}\n{self.js('document.body.innerText')}"
            time.sleep(0.01)
        return value

    def text(self, selector):
        """The visible text of each element."""
        return self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)")

    def shown(self, selector):
        return self.js(f"document.querySelector({json.dumps(selector)})?.checkVisibility() ?? false")

    def screenshot(self, path):
        pathlib.Path(path).write_bytes(base64.b64decode(self.do("Page.captureScreenshot", format="png", optimizeForSpeed=False)["data"]))

    # doing, as a person would

    def go(self, url):
        self.do("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def _middle(self, selector):
        """Where an element can be hit: its middle, which nothing else may cover."""
        where = self.js(f"""(() => {{
            const e = document.querySelector({json.dumps(selector)});
            if (!e) return "is not there";
            e.scrollIntoView({{block: "nearest"}});
            const b = e.getBoundingClientRect(), x = b.x + b.width / 2, y = b.y + b.height / 2, hit = document.elementFromPoint(x, y);
            return e.contains(hit) ? [x, y] : "is covered by " + hit?.outerHTML.slice(0, 200);
        }})()""")
        assert isinstance(where, list), f"{selector} {where}"
        return dict(zip("xy", where))

    def move(self, selector):
        self.do("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(selector))

    def click(self, selector):
        at = self._middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def type(self, text):
        self.do("Input.insertText", text=text)

    def press(self, key, modifiers=0, **more):
        code = KEYS.get(key) or ord(key.upper())
        writes = {"text": "\r" if key == "Enter" else key} if key in ("Enter", " ") else {}
        self.do("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, modifiers=modifiers, **writes, **more)
        self.do("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code, modifiers=modifiers)

    def choose(self, selector, *files):
        """Files in a file input's dialogue."""
        root = self.do("DOM.getDocument")["root"]["nodeId"]
        node = self.do("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.do("DOM.setFileInputFiles", nodeId=node, files=[str(f) for f in files])

    def drag(self, selector, *files, drop=True):
        """Drag files from outside over an element, and let go."""
        data = {"items": [], "files": [str(f) for f in files], "dragOperationsMask": 1}
        for kind in ["dragEnter", "dragOver"] + ["drop"] * drop:
            self.do("Input.dispatchDragEvent", type=kind, data=data, **self._middle(selector))

    def intercept(self, pattern, answer):
        """Let `answer(browser's event)` decide what becomes of matching requests: it calls one of the functions below."""
        self.answer = answer
        self.do("Fetch.enable", patterns=[{"urlPattern": pattern}])

    def fulfill(self, event, body, status=200, kind="text/event-stream"):
        self.browser.send("Fetch.fulfillRequest", self.session, requestId=event["requestId"], responseCode=status,
                          responseHeaders=[{"name": "Content-Type", "value": kind}], body=base64.b64encode(body).decode())  # fmt: skip

    def forward(self, event, body):
        """Send the request on with another body."""
        self.browser.send("Fetch.continueRequest", self.session, requestId=event["requestId"], postData=base64.b64encode(body).decode())

    def close(self):
        self.browser.do("Target.disposeBrowserContext", browserContextId=self.context)


if __name__ == "__main__":
    print(find() or sys.exit(missing()))
