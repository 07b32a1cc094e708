"""The conversation in a terminal, through a pseudo-terminal as a person has it."""
import json, os, re, stat, time
import pexpect
import pytest
from conftest import BUILD, ROOT
from test_chat import ENDLESS, MODEL, PROMPT, answer, circle, pictures, square  # noqa: F401 (fixtures)

READY = re.escape("\x1b[?2004h") + r"[^\n]*?> "  # sent once each time a line is read
STREAMING = re.escape("\x1b[?2004l") + r"\s*[^\s\x1b]"  # the line is read, and the answer's first word is there
RECEIPT = "prompt tokens cached"
UP, LEFT, CTRL_C, CTRL_D = "\x1b[A", "\x1b[D", "\x03", "\x04"


def clean(text):
    """Without the escapes that move the cursor, and with plain line ends."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r\n", "\n")


class Talk:
    def __init__(self, home, *args, n=6, **env):
        everything = {k: v for k, v in os.environ.items() if k not in ("XDG_STATE_HOME", "NO_COLOR")}
        everything |= {"HOME": str(home), "TERM": "xterm", "LC_ALL": "C.UTF-8"} | ({"NO_COLOR": "1"} | env)
        self.tty = pexpect.spawn(str(BUILD / "vlm"), ["-m", MODEL, *([] if n is None else ["-n", str(n)]),
                                                      *map(str, args)], cwd=str(ROOT),
                                 env=everything, encoding="utf-8", timeout=60, dimensions=(50, 200))
        self.greeting = self.ready()

    def ready(self):
        """Everything up to the next prompt."""
        self.tty.expect(READY)
        time.sleep(0.05)  # until the editor has the terminal in its own mode
        return clean(self.tty.before)

    def say(self, line):
        self.tty.send(line + "\r")
        return self.ready()

    def key(self, key):
        self.tty.send(key)

    def gone(self):
        """The exit status of a program that leaves."""
        self.tty.expect(pexpect.EOF)
        self.tty.close()
        return self.tty.exitstatus

    def cached(self, output):
        return tuple(map(int, re.search(rf"(\d+) of (\d+) {RECEIPT}", output).groups()))

    def saved(self, path):
        assert "saved" in self.say(f"/save {path}")
        return json.loads(path.read_text())


@pytest.fixture
def talk(tmp_path):
    """Start a conversation; what is still open at the end is closed."""
    open_ones = []

    def start(*args, **kw):
        open_ones.append(Talk(kw.pop("home", tmp_path / "home"), *args, **kw))
        return open_ones[-1]
    (tmp_path / "home").mkdir()
    yield start
    for t in open_ones:
        t.tty.close(force=True)


# ---- a conversation

def test_greeting_and_help(talk):
    t = talk()
    assert "context" in t.greeting and "/help" in t.greeting and "thread" in t.greeting
    text = t.say("/help")
    for command in ("/image", "/show", "/reset", "/system", "/map", "/stats", "/save", "/help", "/quit"):
        assert command in text
    t.tty.send("/quit\r")
    assert t.gone() == 0


def test_same_answer_as_the_command_line(talk, circle):
    wanted = answer("-i", circle, "-p", PROMPT, "-n", "6")
    t = talk()
    assert "140x112" in t.say(f"/image {circle}")
    text = t.say(PROMPT)
    assert wanted["text"] in text
    assert t.cached(text) == (0, wanted["prompt_tokens"])


def test_later_turns_use_the_cache(talk, circle, square):
    t = talk("-i", circle)
    first = t.cached(t.say(PROMPT))
    second = t.cached(t.say("and now?"))
    third = t.cached(t.say(f"'{square}' and this?"))
    assert first[0] == 0 and first[1] < second[1] < third[1]
    assert second[0] >= first[1] - 16 and third[0] >= second[1] - 16  # all full blocks of what was said before
    stats = t.say("/stats")
    assert "2 pictures" in stats and f"{third[1]} tokens: {third[0]} cached" in stats


def test_reset_and_system(talk):
    t = talk()
    t.say("hi")
    plain = t.cached(t.say("hi"))[1]
    assert "new conversation" in t.say("/reset")
    again = t.cached(t.say("hi"))[1]
    assert again < plain
    assert "new conversation" in t.say("/system You are a very terse assistant indeed.")
    assert t.cached(t.say("hi"))[1] != again
    assert "terse" in t.say("/system")


def test_save(talk, circle, tmp_path):
    t = talk("--system", "Be brief.")
    t.say(f"'{circle}' what is this?")
    messages = t.saved(tmp_path / "chat.json")
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == [{"type": "image", "image": str(circle)},
                                      {"type": "text", "text": "what is this?"}]
    ask = tmp_path / "ask.json"
    ask.write_text(json.dumps(messages[:2]))
    assert answer("--chat", ask, "-n", "6")["text"] == messages[2]["content"]
    assert "saved" in t.say(f"/save '{tmp_path}/chat.md'")
    text = (tmp_path / "chat.md").read_text()
    assert "**user**" in text and "what is this?" in text and f"<{circle}>" in text
    for bad in ("/save", f"/save {circle}", "/save /nope/x.md", f"/save {tmp_path}/.md/x.json"):
        assert "error" in t.say(bad)


def test_map_and_unknown_command(talk):
    t = talk()
    for owner in ("weights", "kv", "images", "arena", "io", "total"):
        assert owner in t.say("/map")
    assert "/help" in t.say("/frob")
    assert RECEIPT not in t.say("/frob it")


def test_show(talk, circle):
    t = talk(NO_COLOR="", COLORTERM="truecolor")
    assert "no picture" in t.say("/show")
    t.say(f"/image {circle}")
    t.tty.send("/show\r")
    t.tty.expect(READY)
    assert "▀" in t.tty.before and re.search(r"\x1b\[38;2;\d+;\d+;\d+m\x1b\[48;2;", t.tty.before)
    assert "\x1b[38;2;255;0;0m" in t.tty.before  # the circle is red
    assert "▀" not in talk("-i", circle).say("/show")  # NO_COLOR


def test_no_colours_without_leave(talk, circle):
    t = talk("-i", circle)
    t.tty.send(PROMPT + "\r")
    t.tty.expect(RECEIPT)
    assert not re.search(r"\x1b\[[0-9;]*m", t.tty.before)
    t = talk("-i", circle, NO_COLOR="")
    t.tty.send(PROMPT + "\r")
    t.tty.expect(RECEIPT)
    assert "\x1b[2m" in t.tty.before


def test_control_characters_of_a_name_are_not_sent(talk, circle):
    evil = circle.parent / "x\x1b[2J\u009b2Jy.png"
    evil.write_bytes(circle.read_bytes())
    t = talk("-i", evil)
    assert "\x1b[2J" not in t.greeting and "\u009b" not in t.greeting and "x\ufffd[2J\ufffd2Jy.png" in t.greeting


# ---- pictures in a line

DROPS = [("'{}' describe", "describe"), ('"{}" describe', "describe"), ("{escaped} describe", "describe"),
         ("{url} describe", "describe"), ("{home} describe", "describe"), ("describe {local}", "describe"),
         ("describe {escaped}", "describe"), ("describe '{}' please", "describe please"),
         ("what is in {escaped}?", "what is in?"), ("'{}'? describe", "? describe"),
         ("'{}' ", ""), ("{escaped} ", ""), ("{}", "")]


@pytest.mark.parametrize("drop, text", DROPS)
def test_dropped_paths_are_attached(talk, circle, tmp_path, drop, text):
    (tmp_path / "home" / "pics").symlink_to(circle.parent)
    forms = dict(escaped=str(circle).replace(" ", "\\ "), url=circle.as_uri(), home="~/pics/a\\ b.png",
                 local=os.path.relpath(circle, ROOT).replace(" ", "\\ "))
    t = talk()
    output = t.say(drop.format(circle, **forms))
    assert "a b.png: 140x112, the model sees 140x112, 20 tokens" in output
    assert (RECEIPT in output) == bool(text)  # a picture alone waits for its question
    if not text:
        assert RECEIPT in t.say("and now?")
    user = t.saved(tmp_path / "s.json")[0]["content"]
    assert user == [{"type": "image", "image": str(circle)}, {"type": "text", "text": text or "and now?"}]


def test_two_drops_and_a_quote_in_the_name(talk, circle, square, tmp_path):
    odd = circle.parent / "it's.png"
    odd.write_bytes(circle.read_bytes())
    t = talk()
    quoted = str(odd).replace("'", "'\\''")
    text = t.say(f"'{square}' '{quoted}' which is round?")
    assert text.count("the model sees") == 2
    assert [p["type"] for p in t.saved(tmp_path / "s.json")[0]["content"]] == ["image", "image", "text"]


@pytest.mark.parametrize("line, word", [
    ("'{dir}/nope.png' describe", "No such file"), ("describe {dir}/nope.jpg", "No such file"),
    ("nope.png", "No such file"),
    ("'{dir}' describe", "folder"), ("{dir}", "folder"), ("describe '{dir}/text.png'", "text.png"),
    ("{dir}/text.png what?", "text.png"),
    ("file://{dir}/none%20here.png", "No such file"), ("'{dir}/nothing at all'", "No such file"),
    ("look at {dir}/w.webp", "w.webp"),
    ("/image {dir}/nope.png", "No such file"), ("/image {dir}", "folder"),
    ("https://example.com/a.png what?", "not fetched"),
    ("'{dir}/locked.png' what?", "locked.png"),
])
def test_bad_pictures_are_loud_and_nothing_is_sent(talk, tmp_path, line, word):
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "w.webp").write_bytes(b"RIFF\x24\0\0\0WEBPVP8 ")
    (tmp_path / "locked.png").write_text("locked")
    (tmp_path / "locked.png").chmod(0)
    t = talk()
    text = t.say(line.format(dir=tmp_path))
    assert "error" in text and word in text and RECEIPT not in text
    assert "conversation  0 of" in t.say("/stats")
    assert RECEIPT in t.say("hi")


def test_one_bad_drop_takes_back_the_good_one(talk, circle, tmp_path):
    t = talk()
    assert "error" in t.say(f"'{circle}' and '{tmp_path}/nope.png' differ how?")
    t.say("hi")
    assert t.saved(tmp_path / "s.json")[0]["content"] == [{"type": "text", "text": "hi"}]


@pytest.mark.parametrize("line", ["what's this, isn't it 'odd'?", "and/or", "read /etc/hostname aloud to me",
                                  "is it a .png?", "it's \"fine\"",
                                  "1/2 of it", "a \\ b", "'tis the season, isn't it"])
def test_plain_text_stays_as_it_is(talk, tmp_path, line):
    t = talk()
    assert RECEIPT in t.say(line)
    assert t.saved(tmp_path / "s.json")[0]["content"] == [{"type": "text", "text": line}]


def test_pictures_at_the_start(talk, circle, tmp_path):
    assert "the model sees" in talk("-i", circle).greeting
    with pytest.raises(pexpect.EOF):
        talk("-i", tmp_path / "nope.png")


# ---- keys

def test_a_paste_is_one_message(talk, tmp_path):
    t = talk()
    t.key("\x1b[200~one\rtwo\tx\r\nthree\r\x1b[201~")
    time.sleep(0.3)
    text = t.say("")
    assert text.count(RECEIPT) == 1
    assert t.saved(tmp_path / "s.json")[0]["content"] == [{"type": "text", "text": "one\ntwo\tx\nthree"}]


def test_lines_in_one_burst_are_one_message(talk, tmp_path):
    t = talk()
    t.tty.send("one\rtwo\r\r\nthree\r\n")
    assert t.ready().count(RECEIPT) == 1
    assert t.saved(tmp_path / "s.json")[0]["content"] == [{"type": "text", "text": "one\ntwo\n\nthree"}]
    t.tty.send("four\r/stats\r/reset\r")  # but commands are commands
    assert RECEIPT in t.ready() and "last prompt" in t.ready() and "new conversation" in t.ready()


def test_interrupt_stops_the_answer_only(talk, tmp_path):
    t = talk(*ENDLESS, n=3000)
    t.tty.send(PROMPT + "\r")
    t.tty.expect(STREAMING)
    t.key(CTRL_C)
    text = t.ready()
    assert "stopped" in text
    written = int(re.search(r"(\d+) tokens,", text).group(1))
    assert 0 < written < 3000
    messages = t.saved(tmp_path / "s.json")
    assert messages[1]["content"] and messages[1]["role"] == "assistant"  # the part that was written stays
    t.tty.send("go on\r")
    t.tty.expect(STREAMING)
    t.key(CTRL_C)
    assert t.cached(t.ready())[0] > 0  # and its KV is used again


def test_typing_meanwhile_waits(talk):
    t = talk(*ENDLESS, n=300)
    t.tty.send(PROMPT + "\r")
    t.tty.expect(STREAMING)
    t.tty.send("/stats\r")
    assert "/stats" not in t.ready() and "last prompt" in t.ready()


def test_interrupt_at_the_prompt(talk, tmp_path):
    t = talk()
    t.key("half a line" + LEFT + LEFT + CTRL_C)
    assert re.search(r"half a line[\b\r]*\^C", t.ready())
    t.key(CTRL_C)
    assert "again leaves" in t.ready()
    assert RECEIPT in t.say("hi")  # something in between: counted from the start again
    t.key(CTRL_C)
    assert "again leaves" in t.ready()
    t.key(CTRL_C)
    assert t.gone() == 0


def test_end_of_file_leaves(talk):
    t = talk()
    t.key(CTRL_D)
    assert t.gone() == 0


def test_history(talk, tmp_path):
    t = talk()
    t.say("first words")
    t.key(UP + "\r")
    assert RECEIPT in t.ready()
    assert [m["content"][0]["text"] for m in t.saved(tmp_path / "s.json")[::2]] == ["first words"] * 2
    t.key(CTRL_D)
    assert t.gone() == 0
    path = tmp_path / "home/.local/state/vlm/history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    t = talk()
    t.key(UP + UP + "\r")  # the next program knows it too
    t.ready()
    assert t.saved(tmp_path / "s.json")[0]["content"][0]["text"] == "first words"


def test_history_follows_xdg(talk, tmp_path):
    talk(XDG_STATE_HOME=str(tmp_path / "state")).say("hi")
    assert (tmp_path / "state/vlm/history").exists() and not (tmp_path / "home/.local").exists()


def test_history_that_cannot_be_kept_is_said_once(talk):
    t = talk(XDG_STATE_HOME="/proc/nowhere")
    assert t.greeting.count("not kept") == 1
    assert "kept" not in t.say("hi") + t.say("hi")


def test_completion(talk, circle):
    t = talk()
    t.key("/res\t")
    assert "new conversation" in t.say("")
    t.key("/s\t")
    t.tty.expect("/show.*/system.*/stats.*/save")
    t.key("\x15")  # clear the line
    t.key(f"/image {str(circle.parent.parent)}/m\t")
    time.sleep(0.3)
    t.key("a\t")
    time.sleep(0.3)
    assert "a b.png: 140x112" in t.say("")


# ---- limits

def test_full_context(talk):
    t = talk("--ctx", "64", *ENDLESS, n=None)
    text = t.say(PROMPT)
    assert "context is full" in text and "/reset" in text
    before = t.say("/stats")
    for again in range(2):
        refused = t.say("go on")
        assert "error" in refused and "64" in refused and RECEIPT not in refused
    assert t.say("/stats") == before
    t.say("/reset")
    assert RECEIPT in t.say(PROMPT)


def test_prompt_that_does_not_fit_changes_nothing(talk):
    t = talk("--ctx", "96")
    t.say("hi")
    before = t.say("/stats")
    text = t.say("word " * 150)
    assert "error" in text and "96" in text
    assert t.say("/stats") == before
    assert RECEIPT in t.say("hi")
