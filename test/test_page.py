"""The page of `vlm serve` in a real browser: typed, clicked and dropped on as a person does. VLM_SCREENSHOT=FILE makes the
picture of the documents."""
import base64, json, os, pathlib, re, threading
import pytest
from browser import CTRL, SHIFT, Browser
from conftest import ROOT
from server_client import SLOW, Server, encode, sample, user

SAMPLES = ROOT / "tiny" / "samples"
THREE = SAMPLES / "three.png"
SEEN = "a blue square, a green star and a purple triangle"
EVIL = """<img src=x onerror="window.hacked = 1"><script>window.hacked = 2</script>&lt;b&gt;"""
TOTAL_MS = r"queue [\d.]+ m?s · vision [\d.]+ m?s · prefill [\d.]+ m?s · decode [\d.]+ m?s"


@pytest.fixture(scope="module")
def browser():
    with Browser() as b:
        yield b


@pytest.fixture(scope="module")
def server():
    with Server() as s:
        yield s


@pytest.fixture
def talk(browser):
    """Open the page of a server; at the end no page may have said anything in its console or asked anybody else."""
    pages = []

    def start(server, **kw):
        pages.append((Talk(browser.open(server.url + "/", **kw)), server))
        return pages[-1][0]

    yield start
    for t, server in pages:
        assert t.problems == []
        elsewhere = [r["url"] for r in t.requests if not r["url"].startswith((server.url + "/", "blob:", "data:"))]
        assert elsewhere == []
        assert t.js("window.hacked") is None
        t.close()


class Talk:
    """What a person does with the page, on top of what a browser can."""

    def __init__(self, page):
        self.page = page

    def __getattr__(self, name):
        return getattr(self.page, name)

    def set(self, **settings):
        """Type into settings."""
        if not self.shown("#temperature"):
            self.click("#buttons summary")
        for name, value in settings.items():
            self.click("#" + name)
            self.press("a", CTRL, commands=["selectAll"])
            self.type(str(value))

    def say(self, words):
        """Send a message with Enter."""
        self.click("#text")
        self.type(words)
        self.press("Enter")

    def answered(self):
        """Wait until the answer is there: its text, and what is written under it."""
        self.wait("document.querySelector('.turn:last-child .receipt')", 30 * SLOW)
        return self.text(".assistant p")[-1], self.text(".receipt")[-1]

    def ask(self, words):
        self.say(words)
        return self.answered()

    def refused(self, status=None):
        """Wait for the error above the form: its text. The browser tells the console of the status; that is not a problem."""
        self.wait("!document.querySelector('#error').hidden", 30 * SLOW)
        if status:
            self.said(rf"network: .* status of {status} ")
        return self.text("#error")[0]

    def said(self, pattern):
        """Something that the console must have said, once: it is expected and so taken from the problems."""
        for _ in range(100):
            if found := [p for p in self.problems if re.search(pattern, p)]:
                break
            self.js("new Promise(done => setTimeout(done, 20))")
        assert len(found) == 1, f"{pattern}: {self.problems}"
        self.problems.remove(found[0])

    def form(self):
        """What is in the form: the text, and the names of the pictures."""
        return self.js("document.querySelector('#text').value"), self.text("#tray figcaption")


def canned(*pieces, end="data: [DONE]\n\n"):
    """A stream of events that a server might send."""
    return "".join(f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': p}, 'finish_reason': None}]})}\n\n"
                   for p in pieces).encode() + end.encode()  # fmt: skip


# ---- the talk

def test_a_picture_is_chosen_and_asked_about(talk, server):
    t = talk(server)
    t.set(temperature=0)
    t.choose("#files", THREE)
    assert t.form() == ("", ["three.png"])
    answer, receipt = t.ask("what do you see?")
    assert answer == SEEN == server.say(user(sample("three.png"), "what do you see?"), temperature=0)
    assert receipt.startswith("80 prompt tokens (54 of pictures, ") and ", 12 written\n" in receipt
    assert re.search(TOTAL_MS, receipt), receipt
    assert t.form() == ("", []) and t.text(".user figcaption") == ["three.png"]
    assert t.wait("document.querySelector('.user img').naturalWidth > 0")
    assert t.text("#model") == ["tiny"]


def test_pictures_are_dropped_and_the_talk_goes_on(talk, server):
    t = talk(server)
    t.set(temperature=0)
    t.drag("#log", THREE, drop=False)
    assert t.js("document.body.className") == "dragging"
    t.drag("#log", THREE)
    assert t.js("document.body.className") == "" and t.form() == ("", ["three.png"])
    assert t.ask("what do you see?")[0] == SEEN
    assert t.ask("how many things are there?")[0] == "three"
    answer, receipt = t.ask("where is the star?")
    assert answer == "in the middle"
    assert int(re.search(r"(\d+) cached", receipt)[1]) >= 80, receipt  # what was said before is not computed again
    t.click("#new")
    assert t.text(".turn") == [] and t.shown("#hint")
    assert "0 of pictures" in t.ask("hello")[1]


def test_a_picture_is_pasted(talk, server):
    t = talk(server)
    t.set(temperature=0)
    t.browser.do("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"], browserContextId=t.context)
    data = base64.b64encode(THREE.read_bytes()).decode()
    t.js(f"""(async () => {{
        const blob = new Blob([Uint8Array.from(atob("{data}"), c => c.charCodeAt(0))], {{type: "image/png"}});
        window.copied = [{{"image/png": blob}}, {{"image/png": blob, "text/plain": new Blob(["how many things are there?"], {{type: "text/plain"}})}}];
        await navigator.clipboard.write([new ClipboardItem(copied[0])]);
    }})()""")
    t.click("#text")
    t.press("v", CTRL, commands=["paste"])
    t.wait("document.querySelector('#tray figure')")
    assert t.ask("what do you see?")[0] == SEEN
    t.js("navigator.clipboard.write([new ClipboardItem(copied[1])])")  # as a spreadsheet copies cells: as text and as a picture
    t.click("#text")
    t.press("v", CTRL, commands=["paste"])
    assert t.form() == ("how many things are there?", [])


def test_pictures_can_be_taken_off_again(talk, server):
    t = talk(server)
    t.choose("#files", THREE, SAMPLES / "four.jpg")
    assert t.js("document.querySelector('#files').files.length") == 0  # or the same one could not be chosen again
    t.choose("#files", THREE)
    assert t.form() == ("", ["three.png", "four.jpg", "three.png"])
    t.click("#tray figure:nth-child(2) button")
    t.click("#tray figure:first-child button")
    assert t.form() == ("", ["three.png"])
    t.set(temperature=0)
    assert t.ask("what do you see?")[0] == SEEN


@pytest.mark.parametrize("kind", ["JPEG", "GIF", "BMP"])
def test_formats(talk, server, tmp_path, kind):
    from PIL import Image

    path = tmp_path / f"picture.{kind.lower()}"
    path.write_bytes(encode(Image.open(THREE).convert("RGB"), kind))
    t = talk(server)
    t.set(temperature=0)
    t.choose("#files", path)
    answer, receipt = t.ask("what do you see?")
    assert "blue square" in answer and "54 of pictures" in receipt


def test_lines_are_broken_with_shift_enter(talk, server):
    t = talk(server)
    t.click("#text")
    for key in "one":
        t.press(key, text=key)
    t.press("Enter", SHIFT)
    t.type("two")
    t.press("Enter")
    t.answered()
    assert t.js("document.querySelector('.user p').textContent") == "one\ntwo"
    t.press("Enter")  # of nothing: nothing is sent
    t.type("  ")
    t.press("Enter")
    assert len(t.text(".turn")) == 2


def test_enter_that_ends_a_word_of_an_input_method_sends_nothing(talk, server):
    t = talk(server)
    t.click("#text")
    t.do("Input.imeSetComposition", text="ni", selectionStart=2, selectionEnd=2)
    t.press("Enter")
    assert t.text(".turn") == []
    t.type("\u4f60")
    t.press("Enter")
    t.answered()
    assert t.text(".user p")[0].strip() == "\u4f60"  # DevTools has no input method that would keep its Enter from the text


def test_the_log_follows_the_answer_unless_it_was_scrolled_up(talk, server):
    t = talk(server, width=700, height=400)
    endless(t)
    t.say("count")

    def grown(by):
        """Wait until the text has grown by pixels: where it begins and ends, from the log's own end."""
        tall = t.js("document.querySelector('#turns').scrollHeight")
        t.wait(f"document.querySelector('#turns').scrollHeight >= {tall + by}", 60)
        return t.js("""(() => { const [log, text] = ["#log", "#turns"].map(s => document.querySelector(s).getBoundingClientRect());
                                return [text.top - log.bottom, text.bottom - log.bottom]; })()""")

    top, bottom = grown(300)
    assert top < -400 and bottom < 1, "the end is in sight"
    t.js("document.querySelector('#log').scrollTop -= 150")
    top, bottom = grown(1)
    later = grown(100)
    assert abs(later[0] - top) < 1 and later[1] > bottom + 98, "what is being read stays where it is, but for a pixel's rounding"
    t.press("Escape")
    t.answered()


def test_settings_are_sent_and_empty_ones_are_not(talk, server):
    t = talk(server)
    sent = []

    def look(event):
        sent.append(json.loads(event["request"]["postData"]))
        t.fulfill(event, canned("yes"))

    t.intercept("*/chat/completions", look)
    t.choose("#files", THREE)
    t.ask("one")
    t.set(temperature=0.5, max_tokens=7, seed=42, system="Be brief.")
    t.ask("two")
    first = user(sample("three.png"), "one")
    same = {"stream": True, "stream_options": {"include_usage": True}}
    assert sent[0] == same | {"messages": first}
    assert sent[1] == same | {"temperature": 0.5, "max_tokens": 7, "seed": 42, "messages": [
        {"role": "system", "content": "Be brief."}, *first, {"role": "assistant", "content": "yes"}, *user("two")]}  # fmt: skip


def test_an_answer_cut_at_max_tokens_says_so_and_can_be_asked_for_again(talk, server):
    t = talk(server)
    t.set(temperature=0, max_tokens=3)
    t.choose("#files", THREE)
    cut, receipt = t.ask("what do you see?")
    assert SEEN.startswith(cut) and receipt.startswith("cut at max_tokens")
    t.set(max_tokens=100)
    t.click(".again")
    assert t.answered()[0] == SEEN and len(t.text(".turn")) == 2


# ---- stop

def endless(t):
    """Requests are sent on with a bias, so that the answer is one token to the context's end, and it comes slowly."""
    t.intercept("*/chat/completions", lambda event: t.forward(
        event, json.dumps(json.loads(event["request"]["postData"]) | {"logit_bias": {"64": 100}}).encode()))  # fmt: skip
    t.do("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=100_000, uploadThroughput=-1)


@pytest.mark.parametrize("how", ["button", "escape"])
def test_an_answer_comes_as_it_is_written_and_can_be_stopped(talk, server, how):
    t = talk(server)
    endless(t)
    t.say("count")
    t.wait("document.querySelector('.assistant p').textContent.length > 20")
    assert t.text("#send") == ["stop"]
    t.click("#text")
    t.type("meanwhile")
    t.press("Enter")  # an answer is being written: nothing is sent, nothing is lost
    assert t.form()[0] == "meanwhile" and len(t.text(".turn")) == 2
    t.set(seed=1)
    t.press("Enter")  # in a setting neither: nor does it stop the answer
    t.js("new Promise(done => setTimeout(done, 100))")
    assert t.text("#send") == ["stop"]
    t.click("#send") if how == "button" else t.press("Escape")
    answer, receipt = t.answered()
    assert receipt.startswith("stopped") and len(answer) > 20 and t.text("#send") == ["send"]
    server.settled()
    t.do("Fetch.disable")
    t.do("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    t.set(max_tokens=5)
    t.click("#send")
    t.wait("document.querySelectorAll('.receipt').length === 2")
    assert t.text(".turn p")[1:3] == [answer, "meanwhile"] and not t.shown("#error")


def test_stop_before_the_first_word_brings_the_message_back(talk, server):
    t = talk(server)
    t.intercept("*/chat/completions", lambda event: None)  # it never answers
    t.choose("#files", THREE)
    t.say("what is it?")
    t.wait("document.querySelector('#send').textContent === 'stop'")
    t.type("and this?")
    t.choose("#files", SAMPLES / "four.jpg")
    t.click("#send")
    t.wait("document.querySelector('#send').textContent === 'send'")
    assert t.form() == ("what is it?\nand this?", ["three.png", "four.jpg"]) and t.text(".turn") == [] and not t.shown("#error")


def test_a_new_talk_ends_the_answer(talk, server):
    t = talk(server)
    endless(t)
    t.say("count")
    t.wait("document.querySelector('.assistant p').textContent.length > 20")
    t.click("#new")
    t.wait("document.querySelector('#send').textContent === 'send'")
    assert t.text(".turn") == [] and t.form() == ("", []) and not t.shown("#error")
    server.settled()


# ---- what goes wrong

def test_a_broken_picture_is_refused_and_the_message_is_kept(talk, server, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(THREE.read_bytes()[:1000])
    t = talk(server)
    t.set(temperature=0)
    t.choose("#files", broken, THREE)
    t.say("what do you see?")
    message = t.refused(400)
    assert re.search("picture|PNG|image", message) and message != "400 Bad Request", message
    assert t.form() == ("what do you see?", ["broken.png", "three.png"]) and t.text(".turn") == []
    t.click("#tray figure:first-child button")
    t.press("Enter")
    assert t.answered()[0] == SEEN and not t.shown("#error")


@pytest.mark.parametrize("name, data", [("notes.txt", b"no picture"), ("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
                                        ("a.webp", b"RIFF\0\0\0\0WEBPVP8 "), ("empty.png", b"")])  # fmt: skip
def test_what_is_no_picture_is_refused_by_the_server(talk, server, tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    t = talk(server)
    t.drag("#log", tmp_path / name)
    t.say("what is it?")
    assert len(t.refused(400)) > 10
    assert t.form() == ("what is it?", [name])


def test_a_file_that_has_gone_is_said_so(talk, server, tmp_path):
    path = tmp_path / "gone.png"
    path.write_bytes(THREE.read_bytes())
    t = talk(server)
    t.choose("#files", path)
    t.wait("document.querySelector('#tray img').complete")
    path.unlink()
    t.say("what is it?")
    assert t.refused().startswith("gone.png cannot be read: ")
    assert t.form() == ("what is it?", ["gone.png"])


def test_a_setting_out_of_range_is_the_servers_to_refuse(talk, server):
    t = talk(server)
    t.set(temperature=3)
    t.say("hello")
    assert "temperature" in t.refused(400) and t.form()[0] == "hello"
    t.set(temperature=2)
    t.click("#send")
    t.answered()


def test_streams_that_break(talk, server):
    t = talk(server)
    answers = [canned(end=f"data: {json.dumps({'error': {'message': 'the machine is at fault'}})}\n\n"), canned("half a ", end=""),
               canned("half a ", end=f"data: {json.dumps({'error': {'message': 'the machine is at fault'}})}\n\n"),
               canned("wo", "rd \U0001f600").replace(b"\n", b"\r\n")]  # fmt: skip
    t.intercept("*/chat/completions", lambda event: t.fulfill(event, answers.pop(0)))
    t.say("one")
    assert t.refused() == "the machine is at fault" and t.form()[0] == "one"  # before a word: the message comes back
    t.press("Enter")
    assert t.answered() == ("half a ", "The answer was cut off. again")
    t.click(".again")
    t.wait("document.querySelector('.receipt')?.textContent.startsWith('the machine is at fault')")
    t.click(".again")
    assert t.answered() == ("word \U0001f600", "again")


def test_the_key_is_asked_for_and_kept_for_the_tab(talk):
    with Server("--api-key", "open sesame", key="open sesame") as server:
        t = talk(server)
        assert "key" in t.wait("document.querySelector('#engine-error').textContent").lower()  # it has asked for the model's name
        assert t.shown("#key") and t.text("#model") == [""]
        t.say("hello")
        assert "key" in t.refused().lower() and t.form()[0] == "hello"
        t.wait("document.activeElement.id === 'key'")
        t.type("open barley")
        t.press("Enter")
        t.wait("document.querySelector('#key').value === '' && document.querySelector('#key').checkVisibility()")
        assert "key" in t.refused().lower() and t.form()[0] == "hello"
        t.type("open sesame")
        t.press("Enter")
        t.answered()
        t.wait("document.querySelector('#model').textContent === 'tiny'")
        t.wait("document.querySelector('#total').textContent")
        assert not t.shown("#key") and not t.shown("#error") and t.text("#engine-error") == [""]
        t.go(server.url + "/")
        t.wait("document.querySelector('#total').textContent")
        t.ask("hello")
        assert not t.shown("#key") and t.js("localStorage.length") == 0
        assert all("sesame" not in r["url"] for r in t.requests)
    t.problems[:] = [p for p in t.problems if "status of 401" not in p]


# ---- injection

def test_text_stays_text(talk, server, tmp_path):
    name = "<img src=x onerror=hacked=3>.png"
    (tmp_path / name).write_bytes(THREE.read_bytes())
    t = talk(server)
    answers = [lambda e: t.fulfill(e, canned(EVIL[:20], EVIL[20:], end="data: " + json.dumps(
                   {"choices": [], "warnings": [EVIL], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}) + "\n\ndata: [DONE]\n\n")),
               lambda e: t.fulfill(e, json.dumps({"error": {"message": EVIL}}).encode(), 400, "application/json")]  # fmt: skip
    t.intercept("*/chat/completions", lambda event: answers.pop(0)(event))
    t.drag("#log", tmp_path / name)
    t.say(EVIL)
    t.answered()
    assert t.js("[...document.querySelectorAll('.turn p')].map(p => p.textContent)") == [EVIL, EVIL]
    assert t.js("document.querySelector('.receipt').textContent").startswith(EVIL)
    assert t.text("figcaption") == [name]
    t.say(EVIL)
    assert t.refused(400) == EVIL and t.form()[0] == EVIL
    assert t.js("document.querySelectorAll('img').length") == 1  # the thumbnail
    assert t.js("[...document.querySelectorAll('main *')].every(e => !e.matches('script, b, [onerror]'))")


def test_the_policy_is_strict_and_enforced(talk, server):
    policy = dict(d.split(maxsplit=1) for d in server.get("/").headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    assert policy.pop("require-trusted-types-for") == "'script'"
    own = {"'none'", "'self'", "'unsafe-inline'", "data:", "blob:"}
    assert all(source in own or source.startswith("'sha256-") for sources in policy.values() for source in sources.split()), policy
    t = talk(server)
    assert t.js("(() => { try { document.body.innerHTML = '<b>'; return 'markup'; } catch { return 'refused'; } })()") == "refused"
    t.said("TrustedHTML")
    t.js("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))")
    t.said("security: .*Content Security Policy")
    assert t.js("fetch('http://127.0.0.1:9/').then(() => 'fetched', () => 'refused')") == "refused"
    t.said("security: .*Content Security Policy")
    t.said("javascript: Fetch API cannot load")
    t.requests[:] = [r for r in t.requests if ":9/" not in r["url"]]  # the browser tells of what it did not send, too


# ---- beside the talk

def drawn_map(t):
    return t.js("""({
        total: Number(document.querySelector("#total").dataset.bytes),
        owners: [...document.querySelectorAll("#owners tbody tr")].map(row => {
            const bar = row.querySelector(".bar"), [width, used, peak] = [bar, ...bar.children].map(e => e.getBoundingClientRect().width);
            const at = bar.querySelector(".peak").getBoundingClientRect().left - bar.getBoundingClientRect().left;
            return {name: row.querySelector("th").textContent, bytes: Number(row.dataset.bytes), width, used, peak: at,
                    figures: row.innerText};
        }),
        regions: [...document.querySelectorAll("#regions i")].map(e => e.getBoundingClientRect().width),
        pools: document.querySelector("#pools").innerText })""")


def test_the_memory_map_is_the_servers(talk, server):
    t = talk(server)
    t.set(temperature=0)
    t.choose("#files", THREE)
    t.ask("what do you see?")
    memory = server.settled()
    blocks, images = memory["blocks"], memory["images"]
    assert blocks["cached"] > 0 and images["used"] > 0
    t.wait(f"document.querySelector('#pools').innerText.includes('0 held, {blocks['cached']} cached, {blocks['free']} free')")
    drawn = drawn_map(t)
    assert f"{blocks['total']} KV blocks" in drawn["pools"] and f"0 pinned, {images['used']} cached" in drawn["pools"]
    assert drawn["total"] == memory["total"] == sum(o["bytes"] for o in drawn["owners"])
    assert len(drawn["owners"]) == len(memory["owners"]) == 5
    for o, m in zip(drawn["owners"], memory["owners"]):
        assert (o["name"], o["bytes"]) == (m["name"], m["bytes"])
        assert abs(o["used"] / o["width"] - m["used"] / m["bytes"]) < 0.02, (o, m)
        assert abs(o["peak"] / o["width"] - min(m["peak"] / m["bytes"], 1 - 2 / o["width"])) < 0.02, (o, m)
    for width, m in zip(drawn["regions"], memory["owners"]):
        assert abs(width / sum(drawn["regions"]) - m["bytes"] / memory["total"]) < 0.02


def drawn_steps(t):
    """n of each column, and for each of its lanes the height of what it shows, as a share of the highest."""
    return t.js("""[...document.querySelectorAll(".column")].map(c => ({ n: Number(c.dataset.n), width: c.getBoundingClientRect().width,
        heights: Object.fromEntries([...c.querySelectorAll("i")].map(i => [i.className, i.getBoundingClientRect().height])) }))""")


def test_the_steps_are_drawn(talk, server):
    server.post("/flush_cache", {}).expect(200)  # or the picture is known already
    t = talk(server)
    t.set(temperature=0)
    t.choose("#files", THREE)
    t.ask("how many things are there?")
    t.js("new Promise(done => setTimeout(done, 200))")
    t.ask("where is the star?")
    last = server.get("/steps?after=0").json()["steps"][-1]["n"]
    t.wait(f"document.querySelector('#steps .column:nth-last-child(2)')?.dataset.n == {last}")
    drawn = drawn_steps(t)
    steps = {s["n"]: s for s in server.get("/steps?after=0").json()["steps"]}
    assert [d["n"] for d in drawn] == sorted(steps)[-96:]
    for field in ("patches", "prefill", "decode"):
        values = [steps[d["n"]][field] for d in drawn]
        heights = [d["heights"][field] for d in drawn]
        assert max(values) > 0 and max(heights) > 20
        for value, height in zip(values, heights):
            assert abs(value / max(values) - height / max(heights)) < 0.05, (field, value, height)
    shown = [steps[d["n"]] for d in drawn]
    gaps = sum(b["start"] - a["start"] - a["ms"] > 100 for a, b in zip(shown, shown[1:]))
    assert t.js("document.querySelectorAll('#steps .idle').length") == gaps > 0
    longest = max(drawn, key=lambda d: steps[d["n"]]["ms"])
    assert longest["width"] == max(d["width"] for d in drawn) and min(d["width"] for d in drawn) >= 2

    step = steps[longest["n"]]
    t.move(f"[data-n='{step['n']}'] .lane")
    assert f"step {step['n']}: " in t.text("#step")[0] and f"{step['patches']} patches, {step['prefill']} tokens" in t.text("#step")[0]
    t.js("document.querySelector('#steps').focus()")
    at = drawn.index(longest)
    for key, by in [("ArrowLeft", -1), ("ArrowRight", 1), ("ArrowRight", 1)]:
        t.press(key)
        at = max(0, min(len(drawn) - 1, at + by))
        assert f"step {drawn[at]['n']}: " in t.text("#step")[0]


def test_nobody_looks_nobody_asks(talk, server):
    t = talk(server)
    t.wait("document.querySelector('#total').textContent")

    def asked(seconds, first="0"):
        before = len(t.requests)
        t.js(f"{first}; new Promise(done => setTimeout(done, {seconds * 1000}))")
        return len(t.requests) - before

    asked(1)
    assert 2 <= asked(4.2) <= 6, "idle: two requests in two seconds"
    t.intercept("*/chat/completions", lambda event: None)  # it never answers
    t.say("hello")
    assert 4 <= asked(1.7) <= 8, "an answer is waited for: two requests twice a second"
    t.click("#send")
    t.js("Object.defineProperty(document, 'hidden', {get: () => true, configurable: true})")
    asked(2.2)
    assert asked(2.2) == 0, "the tab is hidden"
    assert asked(1, "delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))") >= 2, "it is shown again"
    t.click("#engine summary")
    asked(2.2)
    assert asked(2.2) == 0, "the panel is closed"


def test_a_server_that_goes_and_comes_back(talk):
    with Server() as server:
        t = talk(server)
        t.set(temperature=0, max_tokens=3)
        t.ask("hello")
        t.wait("document.querySelector('.column')")
        server.stop()
        t.say("are you there?")
        assert t.refused() == "The server does not answer." and t.form()[0] == "are you there?"
        t.wait("document.querySelector('#engine-error').textContent === 'The server does not answer.'")
    with Server(port=server.port) as server:
        server.say(user("who is first?"), max_tokens=20, temperature=0, logit_bias={"64": 100})
        t.wait("document.querySelector('#engine-error').textContent === ''")
        t.click("#send")
        t.wait("document.querySelectorAll('.receipt').length === 2")
        steps = server.get("/steps?after=0").json()["steps"]
        t.wait(f"document.querySelector('#span').textContent.includes(' to {len(steps)}: ')")
        m = re.match(r"(\d+) to \d+: .* in ([\d.]+) (m?s)$", t.text("#span")[0])
        whole = steps[-1]["start"] + steps[-1]["ms"] - steps[int(m[1]) - 1]["start"]
        assert abs(float(m[2]) * (1 if m[3] == "ms" else 1000) - whole) <= (0.5 if m[3] == "ms" else 50), "the old server's steps are still there"
    t.problems[:] = [p for p in t.problems if "ERR_CONNECTION_REFUSED" not in p]


# ---- other ways to see it

def test_a_phone_in_the_dark(talk, server):
    t = talk(server, width=390, height=760, dark=True)
    assert not t.shown("#owners") and t.shown("#text") and t.shown("#hint")
    t.wait("document.querySelector('#model').textContent")
    t.choose("#files", THREE)
    t.click("#text")
    t.type("what do you see?")
    t.click("#send")
    t.answered()
    t.click("#engine summary")
    t.wait("document.querySelector('#owners').checkVisibility()")
    t.click("#buttons summary")
    for selector in ("#steps", "#seed", "#send", "#text"):
        t.click(selector)  # can be reached
    assert t.js("document.documentElement.scrollWidth") <= 390 and t.js("document.documentElement.scrollHeight") <= 760
    assert sum(t.js("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")) < 150


def test_with_the_keyboard_alone(talk, server):
    t = talk(server)
    t.wait("document.activeElement.id === 'text'")
    for name in ["files", "settings", "send", "engine", "steps"]:
        t.press("Tab")
        assert t.js("document.activeElement.id || document.activeElement.textContent.trim()") == name
        ring = "(e => getComputedStyle(e.id === 'files' ? e.parentNode : e).outlineStyle)(document.activeElement)"
        assert t.js(ring) != "none", f"nobody sees that {name} has the focus"


def test_screenshot(talk, tmp_path):
    path = pathlib.Path(os.environ.get("VLM_SCREENSHOT") or tmp_path / "page.png")
    with Server("--max-batch-tokens", "64", "--step-patches", "128") as server:
        t = talk(server, width=1200, height=800)
        t.set(temperature=0)
        t.click("#buttons summary")
        t.drag("#log", THREE)
        t.ask("what do you see?")
        others = [threading.Thread(target=server.say, args=(user(sample(name), "what do you see?"),), kwargs={"temperature": 0})
                  for name in ("four.jpg", "house.png", "wide.jpg", "five.png")]  # fmt: skip
        for o in others:
            o.start()
        t.ask("where is the star?")
        for o in others:
            o.join()
        last = server.get("/steps?after=0").json()["steps"][-1]["n"]
        t.wait(f"document.querySelector('#steps .column:nth-last-child(2)')?.dataset.n == {last}")
        t.screenshot(path)
    assert path.stat().st_size < 200_000
