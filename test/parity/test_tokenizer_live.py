"""tokenizer.c against Hugging Face `tokenizers` and the chat template of transformers, live: ids must be identical."""

import json
import random
import time
import unicodedata

import pytest
from test_tokenizer import Tokenizer, build_model

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

LINES = 100_000
SEED = 20240607

SCRIPTS = [  # (first, last) code points to draw letters from
    (0x20, 0x7E), (0x41, 0x7A), (0xA0, 0x17F), (0x180, 0x24F), (0x250, 0x2FF), (0x370, 0x3FF), (0x400, 0x52F), (0x530, 0x58F),
    (0x590, 0x5FF), (0x600, 0x6FF), (0x700, 0x74F), (0x8A0, 0x8FF), (0x900, 0x97F), (0x980, 0x9FF), (0xB80, 0xBFF), (0xC00, 0xC7F),
    (0xD00, 0xD7F), (0xE00, 0xE7F), (0xE80, 0xEFF), (0xF00, 0xFFF), (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1100, 0x11FF),
    (0x1780, 0x17FF), (0x1E00, 0x1EFF), (0x1F00, 0x1FFF), (0x2000, 0x206F), (0x2070, 0x20CF), (0x2100, 0x218F), (0x2190, 0x23FF),
    (0x2460, 0x24FF), (0x3000, 0x30FF), (0x3100, 0x31FF), (0x4E00, 0x9FFF), (0xA960, 0xA97F), (0xAC00, 0xD7FF - 0x800), (0xF900, 0xFAFF),
    (0xFB00, 0xFDFF), (0xFE00, 0xFFEF), (0x10000, 0x100FF), (0x11000, 0x1107F), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF),
    (0x20000, 0x2A6DF),
]  # fmt: skip
SPACES = [chr(c) for c in (9, 10, 11, 12, 13, 0x1C, 0x1F, 0x20, 0x20, 0x20, 0x85, 0xA0, 0x1680, 0x180E, 0x2000, 0x2003, 0x200A, 0x200B,
                           0x2028, 0x2029, 0x202F, 0x205F, 0x2060, 0x3000, 0xFEFF)] + ["\r\n", "  ", "\n\n", " \n", "\t\t"]  # fmt: skip
WORDS = "the quick brown fox naïve café Straße Москва собака Ελλάδα σήμερα 中文 漢字 日本語 ひらがな カタカナ 한국어 مرحبا שלום नमस्ते สวัสดี".split()
CONTRACTIONS = "'s 'S 'ſ 't 'T 're 'RE 'Re 'rE 've 'VE 'm 'M 'll 'LL 'lL 'd 'D 'K 'x ’s ''s 'sſ".split()
EMOJI = "😀 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 🇯🇵🇫🇷 1️⃣ ❤️ 🧑🏿‍🚀 🏴󠁧󠁢󠁥󠁮󠁧󠁿 👩‍❤️‍💋‍👨 ☝🏻 🫱🏼‍🫲🏾".split()
CODE = ["for (int i = 0; i < n; i++) {", "\treturn x->y[3] != 0x1F;", "def f(a, *b, **c):", "<div class='a'>&amp;</div>", "#include <a.h>",
        "$x=~s/\\d+//g;", "{\"k\": [1, 2.5e-3, null]}", "SELECT * FROM t WHERE a='b';", "a\\n\\tb", "/*--==::..,,*/"]  # fmt: skip


def is_scalar(c):
    return not 0xD800 <= c <= 0xDFFF


ALL = [c for c in range(0x110000) if is_scalar(c)]
MARKS = [c for c in ALL if unicodedata.combining(chr(c))]
DIGITS = [c for c in ALL if unicodedata.category(chr(c)) in ("Nd", "No", "Nl")]
DECOMPOSED = [unicodedata.normalize("NFD", chr(c)) for c in ALL if unicodedata.normalize("NFD", chr(c)) != chr(c)]


def piece(r):
    """Some characters of one kind."""
    kind = r.randrange(13)
    if kind < 3:
        first, last = r.choice(SCRIPTS)
        return "".join(chr(r.randint(first, last)) for _ in range(r.randint(1, 8)))
    if kind == 3:
        return "".join(r.choice(SPACES) for _ in range(r.randint(1, 4)))
    if kind == 4:
        return r.choice(WORDS)
    if kind == 5:
        return r.choice(WORDS) + r.choice(CONTRACTIONS) + r.choice(["", " ", "x"])
    if kind == 6:
        return "".join(r.choice(EMOJI) for _ in range(r.randint(1, 3)))
    if kind == 7:  # marks on a base, in any order
        return chr(r.choice(ALL[0x41:0x2000])) + "".join(chr(r.choice(MARKS)) for _ in range(r.randint(1, 5)))
    if kind == 8:
        return "".join(chr(r.choice(DIGITS)) for _ in range(r.randint(1, 4)))
    if kind == 9:
        return "".join(r.choice(DECOMPOSED) for _ in range(r.randint(1, 3)))
    if kind == 10:
        return r.choice(CODE)
    if kind == 11:
        return chr(r.choice(ALL)) + chr(r.randrange(0, 0x20)) + chr(r.choice(ALL))
    return "".join(r.choice("aaab  ..,,\n") for _ in range(r.randint(1, 30)))


def lines():
    r = random.Random(SEED)
    return ["".join(r.choice(["", " "]) + piece(r) for _ in range(r.randint(1, 8))) for _ in range(LINES)]


@pytest.fixture(scope="module", params=["small", "qwen", "tiny"])
def pair(request, tmp_path_factory, root):
    """(tokenizer.c with a model, the folder of its checkpoint)."""
    model, folder = build_model(request.param, tmp_path_factory.mktemp(request.param), root)
    return Tokenizer(model), folder


@pytest.fixture(scope="module")
def theirs(pair):
    """The reference without its added tokens, which it would find in texts."""
    spec = json.loads((pair[1] / "tokenizer.json").read_text(encoding="utf-8"))
    spec["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def compare(pair, theirs, texts):
    for i in range(0, len(texts), 1 << 13):  # piece by piece, for the reference's answers take a lot of memory
        part = texts[i : i + (1 << 13)]
        wanted = [x.ids for x in theirs.encode_batch_fast(part, add_special_tokens=False)]
        difference = next((x for x in zip(part, pair[0].encode_all(part), wanted) if x[1] != x[2]), None)
        assert difference is None


def test_random_lines(pair, theirs):
    compare(pair, theirs, lines())


def test_each_code_point(pair, theirs):
    """Before a letter, doubled, between digits, before a newline, in a contraction: each class of the pattern shows."""
    shown = [f"{c}a{c}1{c}{c}b .{c}\n'{c}e" for c in map(chr, ALL)]
    compare(pair, theirs, ["".join(shown[i : i + 64]) for i in range(0, len(shown), 64)])


def test_order_of_marks(pair, theirs):
    """Each mark before and after marks of other classes."""
    others = "\u0334\u0316\u0301\u0345\u05b0\u3099\u094d\u302a"
    late = [c for c in ALL if unicodedata.category(chr(c)) in ("Mn", "Mc", "Me", "Cn") and c < 0x20000]
    compare(pair, theirs, ["".join(f"a{m}{chr(c)}q{chr(c)}{m}" for m in others) for c in late])


def test_compositions(pair, theirs):
    hangul = [
        chr(a) + chr(b) + c
        for a in range(0x1100, 0x1113)
        for b in range(0x1161, 0x1176)
        for c in ("", "\u11a8", "\u11c2\u11a8")
    ]
    compare(pair, theirs, [x + y for x in DECOMPOSED for y in ("", "\u0301", "\u0323\u0301")] + hangul)


def test_decode(pair, theirs):
    """Any ids, so that bytes which are no UTF-8 come up."""
    r, n = random.Random(SEED), theirs.get_vocab_size()
    lists = [[r.randrange(n) for _ in range(r.randint(1, 12))] for _ in range(20_000)]
    for ids, parts in zip(lists, pair[0].decode_all(lists)):
        assert "".join(parts) == theirs.decode(ids), ids


def test_long_words(pair, theirs):
    """Ids of long runs are the same, and time does not grow with their square."""
    for unit in ("a", "ab", "é", " ", "\n", "=", "文"):
        compare(pair, theirs, [unit * 20_000])
    begin = time.monotonic()
    assert sum(map(len, [pair[0].encode("a" * 10_000_000)])) > 0
    pair[0].encode("a" + "\u0301\u0316" * 1_000_000)
    assert time.monotonic() - begin < 60


def conversations():
    r = random.Random(SEED)
    for n in range(400):
        turns = [dict(role="system", content=r.choice(["Be brief.", "", " \nx"]))] if r.random() < 0.4 else []
        for i in range(r.randint(1, 5)):
            parts = [r.choice([[r.randrange(1, 5) * 28, r.randrange(1, 5) * 28], "".join(piece(r) for _ in range(3)), "", "\n"])
                     for _ in range(r.randint(0, 4))]  # fmt: skip
            turns.append(dict(role=["user", "assistant"][i % 2], content=parts))
        yield turns, n % 2 == 0


def rendered(reference, template, turns, reply):
    """The text that transformers makes, each placeholder as often as its picture has tokens; the number of pictures."""
    messages, runs = [], []
    for turn in turns:
        content = turn["content"]
        if isinstance(content, list):
            runs += [p[0] * p[1] // 784 for p in content if isinstance(p, list)]
            content = [dict(type="text", text=p) if isinstance(p, str) else dict(type="image") for p in content]
        messages.append(dict(role=turn["role"], content=content))
    text = reference.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=reply)
    first, *rest = text.split("<|image_pad|>")
    return first + "".join("<|image_pad|>" * n + part for n, part in zip(runs, rest, strict=True)), len(runs)


def test_template(pair):
    """Whole conversations, with and without a default system message, pictures between and beside texts."""
    ours, folder = pair
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    template = reference.chat_template or (folder / "chat_template.jinja").read_text(encoding="utf-8")
    listed = list(conversations())
    as_parts = lambda content: content if isinstance(content, list) else [content]
    answers = ours.prompts(
        [([dict(role=t["role"], parts=as_parts(t["content"])) for t in turns], reply) for turns, reply in listed]
    )
    for (turns, reply), answer in zip(listed, answers, strict=True):
        text, pictures = rendered(reference, template, turns, reply)
        assert answer == (reference(text, add_special_tokens=False)["input_ids"], pictures), turns
