"""The command line: every flag good and bad, bad files, one answer by every way in, JSON, map, tokenize."""
import base64, json, math, os, pathlib, shutil, signal, subprocess
import pytest
from PIL import Image, ImageDraw
from conftest import BUILD, ROOT, run

MODEL = os.environ.get("VLM_TEST_MODEL") or str(ROOT / "tiny" / "tiny.vlm")
PROMPT = "what is this?"
OWNERS = ["weights", "kv", "images", "arena", "io"]
ENDLESS = ["--frequency-penalty", "-100"]  # below 0: the first token again and again, never the end


def vlm(*args, model=MODEL, **kw):
    """Run vlm with the test's model; args may begin with a command."""
    command = [args[0]] if args and args[0] in ("chat", "map", "tokenize", "help") else []
    if "input" not in kw:
        kw["stdin"] = subprocess.DEVNULL
    return run("vlm", *command, "-m", model, *args[len(command):], **kw)


def answer(*args, **kw):
    """The object that --json prints."""
    r = vlm(*args, "--json", **kw)
    assert r.returncode == 0, r.stderr.decode()
    assert r.stdout.count(b"\n") == 1
    return json.loads(r.stdout)


def refused(r, *words, status=1):
    """One line on standard error that holds the words, nothing on standard output."""
    message = r.stderr.decode()
    assert r.returncode == status, message
    assert r.stdout == b""
    assert message.startswith("vlm: ") and message.count("\n") == 1
    for w in words:
        assert w in message, message
    if status == 2:
        assert "vlm help" in message


def same(a, b):
    return all(a[k] == b[k] for k in ("text", "token_ids", "finish_reason", "prompt_tokens", "image_tokens"))


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Two pictures, a circle and a square, in a folder with a blank in its name."""
    folder = tmp_path_factory.mktemp("pictures") / "my dir"
    folder.mkdir()
    for name, colour, draw in (("a b.png", "red", "ellipse"), ("c.jpg", "blue", "rectangle")):
        im = Image.new("RGB", (140, 112), "white")
        getattr(ImageDraw.Draw(im), draw)((20, 20, 90, 90), fill=colour)
        im.save(folder / name)
    return folder


@pytest.fixture(scope="session")
def circle(pictures):
    return pictures / "a b.png"


@pytest.fixture(scope="session")
def square(pictures):
    return pictures / "c.jpg"


# ---- usage

NUMBERS = {  # flag: legal values, values out of its range
    "--threads": (["1", "2"], ["0", "1025"]),
    "--memory": (["256M", "262144k", "1G", "268435456"], ["0", "2000T"]),
    "--ctx": (["64", "256"], ["0"]),
    "--max-batch-tokens": (["32", "1024"], ["0"]),
    "--max-seqs": (["1", "3"], ["0", "5000"]),
    "--max-pixels": (["3136", "20000"], ["0", "3000000000"]),
    "--image-cache": (["8M"], ["0"]),
    "--kv-blocks": (["8", "300"], ["0"]),
    "-n": (["1", "4"], ["0"]),
    "--temperature": (["0", "0.7", "1", "100", "1e-3"], ["101", "1e9"]),
    "--top-k": (["0", "1", "20", "100000"], ["1.5", "1000000000"]),
    "--top-p": (["0", "0.3", "1"], ["1.5"]),
    "--min-p": (["0", "0.1", "1"], ["1.5"]),
    "--seed": (["0", "7", "9007199254740991"], ["9007199254740992"]),
    "--repetition-penalty": (["1", "1.3"], ["0", "1e9"]),
    "--presence-penalty": (["0", "-1", "1.5"], ["-101", "1e9"]),
    "--frequency-penalty": (["0", "-1", "1.5"], ["-101", "1e9"]),
}
JUNK = ["", " ", "x", "1x", "1 ", " 1", "0x10", "--", "1,5", "nan", "inf", "-inf", "1e999", "99999999999999999999999"]
SIGNED = ("--presence-penalty", "--frequency-penalty")


@pytest.mark.parametrize("flag", NUMBERS)
def test_numbers_are_taken(flag):
    for value in NUMBERS[flag][0]:
        r = vlm("-p", "hi", "-n", "2", flag, value)
        assert r.returncode == 0, (value, r.stderr)


@pytest.mark.parametrize("flag", NUMBERS)
def test_bad_numbers_are_refused(flag):
    name = "--max-tokens" if flag == "-n" else flag
    for value in NUMBERS[flag][1] + JUNK + ([] if flag in SIGNED else ["-1"]):
        refused(vlm("-p", "hi", flag, value), name, f"'{value}'", "give", status=2)


@pytest.mark.parametrize("args, words", [
    (["--nope"], ["--nope"]), (["-x"], ["-x"]), (["-m"], ["--model", "FILE"]), (["--json=1"], ["--json", "no value"]),
    (["frob"], ["'frob'", "chat, map, bench, tokenize"]), (["-p", "x", "a.png"], ["'a.png'", "-i"]),
    (["--device", "tpu"], ["tpu", "cpu"]), (["--device", ""], ["cpu"]),
    (["--logprobs", "21", "--json"], ["--logprobs", "20"]), (["--logprobs", "-1", "--json"], ["--logprobs"]),
    (["-p", "x", "--logprobs", "1"], ["--logprobs", "--json"]), (["--chat", "a", "-p", "x"], ["--chat", "-p"]),
    (["--chat", "a", "--chats", "b"], ["--chats"]), (["--chats", "a", "-i", "x"], ["-i"]),
    (["map", "--top-p", "1"], ["--top-p", "vlm map"]),
    (["--shape", "qwen2.5-vl-3b"], ["--shape", "vlm chat"]), (["map", "--shape", "qwen2.5-vl-3b", "--type", "q3"],
                                                              ["--type", "q8", "bf16"]),
    (["map", "--type", "f32"], ["--type", "--shape"]), (["map", "--shape", "qwen2.5-vl-3b", "-m", "x"],
                                                        ["--shape", "-m"]),
    (["--decode"], ["--decode", "vlm chat"]), (["tokenize", "--ctx", "64"], ["--ctx", "vlm tokenize"]),
    (["chat", "map"], ["'map'"]), (["-p", "x", "--device", "null"], ["null", "bench"]),
    (["bench"], ["--load"]), (["bench", "--shape", "qwen2.5-vl-3b", "--load", "requests=1"], ["--device null"]),
    (["bench", "--load", "requests=1", "--roofline", "abacus"], ["abacus", "h100"]),
])
def test_wrong_usage(args, words):
    refused(run("vlm", *args, stdin=subprocess.DEVNULL), *words, status=2)


@pytest.mark.parametrize("args", [["help"], ["--help"], ["-h"], ["map", "--help"]])
def test_help_lists_every_flag(args):
    r = run("vlm", *args)
    text = r.stdout.decode()
    assert r.returncode == 0 and r.stderr == b""
    for flag in [*NUMBERS, "-m", "-i", "-p", "--device", "--explain", "--system", "--logprobs", "--json", "--dump",
                 "--chat",
                 "--chats", "--shape", "--type", "--decode", "vlm map", "vlm tokenize", "common:", "sampling:",
                 "output:"]:
        assert flag in text
    assert max(map(len, text.splitlines())) <= 110


def test_version():
    r = run("vlm", "--version")
    assert r.returncode == 0 and r.stdout.startswith(b"vlm.c ")


def test_engine_limits_are_named():
    refused(vlm("-p", "hi", "--ctx", "1048576"), "ctx", "1048576")
    refused(vlm("-p", "hi", "--memory", "1M"), "--memory")
    refused(vlm("-p", "hi", "--max-pixels", "1"), "max-pixels")
    refused(vlm("-p", "word " * 200, "--ctx", "64"), "64")


def test_default_threads_follow_the_affinity_mask():
    cpu = min(os.sched_getaffinity(0))
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    r = vlm("map", preexec_fn=lambda: os.sched_setaffinity(0, {cpu}), env=env)
    assert b"device cpu, 1 thread\n" in r.stdout
    assert b"device cpu, 3 threads\n" in vlm("map", "--threads", "3").stdout


def test_full_disk_is_an_error():
    with open("/dev/full", "wb") as full:
        r = subprocess.run([BUILD / "vlm", "help"], stdout=full, stderr=subprocess.PIPE)
    assert r.returncode == 1 and b"standard output" in r.stderr


# ---- model files

def test_bad_model_files(tmp_path):
    good = pathlib.Path(MODEL).read_bytes()
    bad = {"empty": b"", "html": b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "short": b"x" * 91,
           "huge-header": b"\xff" * 7 + b"\x7f" + good[8:4096], "half": good[:len(good) // 2], "header-cut": good[:200],
           "not-ours": (2).to_bytes(8, "little") + b"{}"}
    for name, data in bad.items():
        path = tmp_path / f"{name}.vlm"
        path.write_bytes(data)
        refused(vlm("-p", "hi", model=path), name)
        refused(vlm("tokenize", model=path, input=b"x"), name)
    refused(vlm("-p", "hi", model=tmp_path / "missing.vlm"), "missing.vlm")
    refused(vlm("-p", "hi", model=tmp_path), str(tmp_path))


def test_default_model_is_beside_the_program(tmp_path):
    program = shutil.copy(BUILD / "vlm", tmp_path / "vlm")
    (tmp_path / "empty").mkdir()
    ask = dict(cwd=tmp_path / "empty", capture_output=True, stdin=subprocess.DEVNULL)
    refused(subprocess.run([program, "-p", "hi"], **ask), "-m", "tiny/tiny.vlm")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny.vlm").symlink_to(pathlib.Path(MODEL).resolve())
    assert subprocess.run([program, "-p", "hi", "-n", "2"], **ask).returncode == 0
    ask["cwd"] = tmp_path  # now as the current folder's, for a program elsewhere
    assert subprocess.run([shutil.move(program, tmp_path / "empty" / "vlm"), "-p", "hi", "-n", "2"],
                          **ask).returncode == 0


# ---- pictures

def test_bad_pictures(tmp_path, circle):
    bad = {"empty.png": b"", "page.png": b"<html></html>", "text.png": b"hello", "cut.png": circle.read_bytes()[:60],
           "three.jpg": b"\xff\xd8\xff", "web.webp": b"RIFF\x24\0\0\0WEBPVP8 "}
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
        refused(vlm("-i", tmp_path / name, "-p", PROMPT), name)
    refused(vlm("-i", tmp_path / "missing.png", "-p", PROMPT), "missing.png", "No such file")
    refused(vlm("-i", tmp_path, "-p", PROMPT), "folder")
    refused(vlm("-i", "/dev/zero", "-p", PROMPT), "device")


def test_one_bad_picture_of_two_is_refused(circle, tmp_path):
    refused(vlm("-i", circle, "-i", tmp_path / "missing.png", "-p", PROMPT), "missing.png")


def test_picture_from_a_pipe(circle):
    shell = f"'{BUILD}/vlm' -m '{MODEL}' -n 4 --json -p '{PROMPT}' -i <(cat '{circle}')"
    r = subprocess.run(["bash", "-c", shell], capture_output=True, cwd=ROOT)
    assert same(json.loads(r.stdout), answer("-i", circle, "-p", PROMPT, "-n", "4"))


def test_picture_size_and_limit(circle):
    large, small = (answer("-i", circle, "-p", PROMPT, "-n", "1", *more) for more in ([], ["--max-pixels", "3136"]))
    assert large["image_tokens"] == 5 * 4  # 140x112 is 5x4 cells of 28
    assert small["image_tokens"] < large["image_tokens"]
    assert large["prompt_tokens"] - large["image_tokens"] == small["prompt_tokens"] - small["image_tokens"]


def test_picture_that_fills_the_context(square):
    im = Image.open(square).resize((2000, 1500))
    path = square.parent / "large.png"
    im.save(path)
    assert vlm("-i", path, "-p", PROMPT, "-n", "2", "--ctx", "64").returncode == 0  # made small enough
    refused(vlm(*["-i", path] * 9, "-p", PROMPT, "--ctx", "64"), "64")  # nine are not cut, but refused


# ---- one answer

def test_json_fields(circle):
    a = answer("-i", circle, "-p", PROMPT, "-n", "8", "--logprobs", "2")
    assert set(a) == {"text", "token_ids", "finish_reason", "prompt_tokens", "image_tokens", "completion_tokens",
                      "cached_tokens",
                      "logprobs", "seed", "timings", "receipt", "bytes"}
    assert isinstance(a["text"], str) and a["finish_reason"] in ("stop", "length")
    assert len(a["token_ids"]) == a["completion_tokens"] == len(a["logprobs"]) <= 8
    assert all(isinstance(i, int) for i in a["token_ids"])
    assert 0 < a["image_tokens"] < a["prompt_tokens"] and a["cached_tokens"] == 0
    assert 0 <= a["seed"] < 2**53
    assert set(a["timings"]) == {"load", "queue", "first_token", "decode", "total", "tokens_per_second"}
    assert set(a["receipt"]) == {"queue", "picture_decode", "picture_resize", "vision", "prefill", "decode"}
    assert all(math.isfinite(v) and v >= 0 for stage in a["receipt"].values() for v in stage.values())
    assert all(math.isfinite(t) and t >= 0 for t in a["timings"].values())
    assert a["receipt"]["picture_decode"]["ms"] > 0 and a["timings"]["total"] >= a["timings"]["first_token"] > 0
    assert list(a["bytes"]) == OWNERS
    assert all(0 <= b["used"] <= b["peak"] for b in a["bytes"].values())
    assert "logprobs" not in answer("-p", PROMPT, "-n", "2")


def test_text_is_the_json_text(circle):
    a = answer("-i", circle, "-p", PROMPT, "-n", "8")
    assert vlm("-i", circle, "-p", PROMPT, "-n", "8").stdout.decode() == a["text"] + "\n"


def test_max_tokens():
    for n in (1, 3):
        a = answer("-p", PROMPT, "-n", n, *ENDLESS)
        assert (a["completion_tokens"], a["finish_reason"]) == (n, "length")


def test_full_context_ends_the_answer():
    a = answer("-p", PROMPT, "--ctx", "64", *ENDLESS)
    assert a["finish_reason"] == "length" and a["prompt_tokens"] + a["completion_tokens"] == 64


def chat_file(path, *messages):
    path.write_text(json.dumps(list(messages)))
    return path


def test_every_way_in_gives_the_same(circle, square, tmp_path):
    wanted = answer("-i", circle, "-i", square, "-p", PROMPT, "-n", "8")
    piped = answer("-i", circle, "-i", square, "-n", "8", input=PROMPT.encode() + b"\n")
    text = {"type": "text", "text": PROMPT}
    jpeg = "data:image/png;base64," + base64.b64encode(square.read_bytes()).decode()  # the bytes count, not the name
    forms = [[{"type": "image", "image": str(circle)}, {"type": "image", "image": str(square)}, text],
             [{"type": "image_url", "image_url": {"url": str(circle)}},
              {"type": "image_url", "image_url": {"url": jpeg}}, text],
             [{"type": "image_url", "image_url": circle.as_uri()}, {"type": "image", "image": square.as_uri()}, text]]
    assert same(wanted, piped)
    for parts in forms:
        assert same(wanted, answer("--chat", chat_file(tmp_path / "c.json", {"role": "user", "content": parts}), "-n",
                                   "8"))
    lines = tmp_path / "c.jsonl"
    lines.write_text("\n".join(json.dumps([{"role": "user", "content": p}]) for p in forms) + "\n\n")
    r = vlm("--chats", lines, "-n", "8")
    results = [json.loads(line) for line in r.stdout.splitlines()]
    assert r.returncode == 0 and len(results) == 3 and all(same(wanted, a) for a in results)


def test_order_of_pictures_and_text_is_kept(circle, square, tmp_path):
    a, b = ({"type": "image", "image": str(p)} for p in (circle, square))
    t = [{"type": "text", "text": x} for x in ("first", "second")]
    orders = [[a, b, *t], [b, a, *t], [t[0], a, t[1], b]]
    ids = [answer("--chat", chat_file(tmp_path / "c.json", {"role": "user", "content": o}), "-n", "3", "--logprobs",
                  "0") for o in orders]
    assert ids[0]["prompt_tokens"] == ids[1]["prompt_tokens"] == ids[2]["prompt_tokens"]
    assert len({json.dumps(i["logprobs"]) for i in ids}) == 3


def test_system_message(tmp_path):
    wanted = answer("-p", PROMPT, "--system", "Be brief.", "-n", "4")
    chat = chat_file(tmp_path / "c.json", {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                     {"role": "user", "content": PROMPT})
    assert same(wanted, answer("--chat", chat, "-n", "4"))
    assert wanted["prompt_tokens"] != answer("-p", PROMPT, "-n", "4")["prompt_tokens"]


def test_empty_and_null_content(circle, tmp_path):
    for content in ("", None, []):
        chat = chat_file(tmp_path / "c.json", {"role": "user", "content": PROMPT},
                         {"role": "assistant", "content": content},
                         {"role": "user", "content": content})
        assert answer("--chat", chat, "-n", "2")["completion_tokens"] > 0
    assert answer("-i", circle, "-p", "", "-n", "2")["image_tokens"] > 0
    assert vlm("-i", circle, "-n", "2", input=b"").returncode == 0


@pytest.mark.parametrize("content, words", [
    (b"", ["JSON"]), (b"{", ["JSON"]), (b"[" * 100000, ["JSON"]), (b"[]", ["empty"]), (b"{}", ["array"]),
    (b"[1]", ["message 1", "role"]),
    (b'[{"role":"user","role":"user","content":"x"}]', ["JSON"]), (b'[{"role":"user","content":"\xff"}]', ["JSON"]),
    (b'[{"role":"robot","content":"x"}]', ["robot"]), (b'[{"role":"user","content":5}]', ["content"]),
    (b'[{"role":"user","content":"x"},{"role":"assistant","content":"y"}]', ["last", "user"]),
    (b'[{"role":"user","content":"x","tool_calls":[{}]}]', ["tool"]), (b'[{"role":"user","content":[{}]}]', ["type"]),
    (b'[{"role":"user","content":[{"type":"video"}]}]', ["video", "image_url"]),
    (b'[{"role":"user","content":[{"type":"text"}]}]', ["text"]),
    (b'[{"role":"user","content":[{"type":"image"}]}]', ["which picture"]),
    (b'[{"role":"user","content":[{"type":"image","image":"/nope.png"}]}]', ["/nope.png"]),
    (b'[{"role":"user","content":[{"type":"image","image":"https://example.com/a.png"}]}]',
     ["https://example.com/a.png", "not fetched"]),
    (b'[{"role":"user","content":[{"type":"image","image":"file://"}]}]', ["file://"]),
    (b'[{"role":"user","content":[{"type":"image","image":"data:image/png,AAAA"}]}]', ["base64"]),
    (b'[{"role":"user","content":[{"type":"image","image":"data:image/png;base64,A*B"}]}]', ["base64"]),
    (b'[{"role":"user","content":[{"type":"image","image":"data:image/png;base64,aGVsbG8="}]}]', ["message 1"]),
])
def test_bad_chats(content, words, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    refused(vlm("--chat", path), "bad.json", *words)
    if content.strip():
        r = vlm("--chats", path)
        assert r.returncode == 1 and json.loads(r.stdout)["error"]["status"] == 400 and b"1 of 1" in r.stderr


def test_chats_run_together_and_stay_in_order(circle, tmp_path):
    asks = ["hi", "what is this?", "how many?", "a longer question about nothing at all", "x", "why?"]
    chats = [[{"role": "user", "content": [{"type": "image", "image": str(circle)}] * (i % 2) + [{"type": "text",
                                                                                                  "text": t}]}]
             for i, t in enumerate(asks)]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join([*map(json.dumps, chats[:3]), "not json", *map(json.dumps, chats[3:])]))
    r = vlm("--chats", path, "-n", "6", "--max-seqs", "3", "--logprobs", "1", "--explain")
    lines = [json.loads(x) for x in r.stdout.splitlines()]
    assert r.returncode == 1 and b"1 of 7" in r.stderr and "JSON" in lines.pop(3)["error"]["message"]
    for chat, line in zip(chats, lines, strict=True):
        alone = answer("--chat", chat_file(tmp_path / "one.json", *chat), "-n", "6", "--logprobs", "1")
        assert same(alone, line) and alone["logprobs"] == line["logprobs"]


def test_stdin():
    refused(vlm(input=b""), "empty")
    refused(vlm(input=b"\n"), "empty")
    refused(vlm(input=b"abc\xff"), "UTF-8")
    refused(vlm("-p", b"abc\xff".decode(errors="surrogateescape")), "UTF-8")
    assert answer(input=b"a\nb\0c", )["completion_tokens"] > 0


def test_logprobs(circle):
    for top, more in ((0, []), (5, []), (20, ["--temperature", "0.01", "--top-p", "0.3"]),
                      (20, ["--temperature", "2", "--seed", "1"])):
        a = answer("-i", circle, "-p", PROMPT, "-n", "6", "--logprobs", top, *more)
        for token, wanted in zip(a["logprobs"], a["token_ids"], strict=True):
            values = [p for _, p in token["top"]]
            assert token["id"] == wanted and len(values) == top
            assert all(math.isfinite(p) and p <= 0 for p in [token["logprob"], *values])
            assert values == sorted(values, reverse=True) and sum(map(math.exp, values)) <= 1 + 1e-5
            if top and not more:
                assert token["top"][0] == [token["id"], token["logprob"]]  # greedy takes the best


def test_seeds():
    ask = ["-p", PROMPT, "-n", "12", "--temperature", "5"]
    seven = answer(*ask, "--seed", "7")
    assert seven["seed"] == 7 and same(seven, answer(*ask, "--seed", "7"))
    assert seven["token_ids"] != answer(*ask, "--seed", "8")["token_ids"]
    free = answer(*ask)
    assert free["seed"] != answer(*ask)["seed"]
    assert same(free, answer(*ask, "--seed", free["seed"]))


def test_greedy_forms_agree():
    wanted = answer("-p", PROMPT, "-n", "6")["token_ids"]
    for more in (["--top-k", "1"], ["--top-p", "0"], ["--min-p", "1"]):
        assert answer("-p", PROMPT, "-n", "6", "--temperature", "1", *more)["token_ids"] == wanted


def test_threads_change_nothing(circle):
    results = [answer("-i", circle, "-p", PROMPT, "-n", "6", "--logprobs", "3", "--threads", n) for n in (1, 2, 3)]
    assert all(same(results[0], r) and r["logprobs"] == results[0]["logprobs"] for r in results)


def test_explain_and_dump(tmp_path):
    r = vlm("-p", PROMPT, "-n", "3", "--explain", "--dump", tmp_path / "d")
    assert r.returncode == 0 and len(r.stderr.splitlines()) >= 3
    assert any((tmp_path / "d").glob("*.npy"))
    refused(vlm("-p", PROMPT, "--dump", MODEL), MODEL)


def test_interrupt_stops_the_answer():
    p = subprocess.Popen([BUILD / "vlm", "-m", MODEL, "-p", PROMPT, *ENDLESS], stdin=subprocess.DEVNULL,
                         stdout=subprocess.PIPE)
    assert p.stdout.read(1)
    p.send_signal(signal.SIGINT)
    assert p.stdout.read().endswith(b"\n") and p.wait(60) == 130


# ---- map

def check_map(m):
    assert list(m) == ["device", "total", "owners", "blocks", "images", "sequences", "host"]
    assert [o["name"] for o in m["owners"]] == OWNERS
    assert sum(o["bytes"] for o in m["owners"]) == m["total"]
    assert all(0 <= o["used"] <= o["bytes"] and 0 <= o["peak"] <= o["bytes"] for o in m["owners"])
    b = m["blocks"]
    assert set(b) == {"total", "free", "cached", "held"} and b["free"] + b["cached"] + b["held"] == b["total"] > 0
    assert set(m["images"]) == {"slots", "used", "pinned", "hits", "misses", "evictions"}
    assert m["sequences"] == {"running": 0, "waiting": 0}
    assert m["host"]["decode_workspace"] > 0 and m["host"]["bodies"] == 0


def test_map():
    check_map(json.loads(vlm("map", "--json").stdout))
    m = json.loads(vlm("map", "--json", "--kv-blocks", "40").stdout)
    assert m["blocks"]["total"] == 40
    table = vlm("map").stdout.decode()
    for word in [*OWNERS, "total", "blocks", "slots", "a token"]:
        assert word in table
    assert str(json.loads(vlm("map", "--json").stdout)["total"]) in table


@pytest.mark.parametrize("shape", ["qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen2.5-vl-32b", "qwen2.5-vl-72b"])
def test_map_of_a_shape(shape):
    m, f = (json.loads(run("vlm", "map", "--shape", shape, "--json", *t).stdout) for t in ([], ["--type", "f32"]))
    check_map(m)
    check_map(f)
    assert f["owners"][0]["bytes"] > 1.9 * m["owners"][0]["bytes"]


def test_map_of_an_unknown_shape():
    refused(run("vlm", "map", "--shape", "gpt-5"), "gpt-5", "qwen2.5-vl-3b")


# ---- tokenize

@pytest.mark.parametrize("text", ["", "hello world\n", " a  b\t\n\n", "héllo 日本語 🏳️‍🌈 👩‍👩‍👧", "<|im_end|><|image_pad|>",
                                  "a\0b", "1234567 + it's"])
def test_tokenize_round_trip(text):
    r = vlm("tokenize", input=text.encode())
    ids = json.loads(r.stdout)
    assert r.returncode == 0 and all(isinstance(i, int) for i in ids) and bool(ids) == bool(text)
    assert vlm("tokenize", "--decode", input=r.stdout).stdout.decode() == text


def test_special_tokens():
    assert len(json.loads(vlm("tokenize", input=b"<|im_end|>").stdout)) > 1  # text cannot make one
    with open(MODEL, "rb") as f:
        names = json.loads(json.loads(f.read(int.from_bytes(f.read(8), "little")))["__metadata__"]["special_tokens"])
    decoded = vlm("tokenize", "--decode", input=json.dumps(list(names.values())).encode())
    assert decoded.stdout.decode() == "".join(names)
    half = json.loads(vlm("tokenize", input="é".encode()).stdout)[:1]  # a cut character is shown as such
    text = vlm("tokenize", "--decode", input=json.dumps(half + [names["<|im_end|>"]]).encode()).stdout.decode()
    assert text in ("é<|im_end|>", "\ufffd<|im_end|>")


@pytest.mark.parametrize("data", [b"", b"{}", b"[1,", b'["1"]', b"[-1]", b"[999999999]", b"[99999999999999999999]",
                                  b"[1.5]"])
def test_bad_ids(data):
    refused(vlm("tokenize", "--decode", input=data))


def test_tokenize_refuses_broken_text():
    refused(vlm("tokenize", input=b"ab\xffcd"), "UTF-8")


# --- bench, --explain and --trace

BENCH = ["bench", "--device", "null", "--shape", "qwen2.5-vl-3b", "--json"]


def test_bench_plans_full_scale_in_a_moment():
    load = "images=4096x4096,concurrency=8,requests=16,prompt=64,output=32"
    o = json.loads(run("vlm", *BENCH, "--memory", "80G", "--ctx", "20000", "--load", load).stdout)
    assert o["requests"] == 16 and o["tokens_per_second"] > 0 and o["kv_blocks_left"] == o["kv_blocks"]
    for name, owner in o["memory"].items():
        assert owner["peak"] <= owner["plan"], name
    assert sum(owner["plan"] for owner in o["memory"].values()) <= 80 << 30


def test_bench_with_the_model():
    o = json.loads(run("vlm", "bench", "--json", "--load", "images=84x84,concurrency=3,requests=5,prompt=9,output=4").stdout)
    assert o["requests"] == 5 and o["device"] == "cpu" and o["seconds"] > 0


@pytest.mark.parametrize("load", ["x", "images=3", "images=0x0x0", "requests=0", "requests=-1", "concurrency=99999", "output=0", "prompt=", "prompt=1x", "=", "requests=99999999999"])
def test_bench_refuses_bad_loads(load):
    refused(run("vlm", *BENCH, "--load", load), "--load", status=1)


def test_bench_says_what_does_not_fit():
    refused(run("vlm", *BENCH, "--ctx", "4096", "--load", "prompt=5000,requests=1"), "5000", "4096", status=1)
    refused(run("vlm", *BENCH, "--load", "images=10x3000,requests=1"), "200", status=1)


def test_explain_has_the_plan_and_a_line_a_step():
    r = vlm("-p", "hi", "-n", "3", "--explain")
    plan, *lines = r.stderr.decode().splitlines()
    assert plan.startswith("plan: weights")
    assert len(lines) == len({line.split(":")[0] for line in lines}) >= 1
    assert "prefill #1" in lines[0] and all("kv" in line and "arena" in line for line in lines)


def test_trace_is_a_chrome_trace(tmp_path):
    path = tmp_path / "trace.json"
    r = vlm("-p", "hi", "-n", "3", "--trace", path)
    assert r.returncode == 0
    events = json.loads(path.read_text())
    kinds = {e["ph"] for e in events}
    assert kinds == {"M", "X", "C"}
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    refused(vlm("-p", "hi", "--trace", tmp_path / "no" / "trace.json"), "--trace", status=1)


def test_cuda_is_there_or_says_why_not():
    r = vlm("-p", "hi", "-n", "2", "--device", "cuda")
    lines = r.stderr.decode().splitlines()
    assert r.returncode == 0 or len(lines) == 1 and "--device" in lines[0] and "cpu" in lines[0], lines
