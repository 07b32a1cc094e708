"""tokenizer.c: encoding, decoding, the chat template, and files that lie. Ids of Hugging Face are in
data/tokenizer.json (made by data/make_tokenizer.py); test/parity compares far more, live."""

import json
import pathlib
import random
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
from conftest import BUILD, ROOT, run

sys.path.insert(0, str(ROOT / "test"))
import make_model

GOLDENS = pathlib.Path(__file__).parent / "data" / "tokenizer.json"


def build_model(kind, folder, root):
    """A model file and its checkpoint folder with the vocabulary `kind`: small, qwen, or that of the model in tiny/."""
    checkpoint, model = folder / "checkpoint", folder / "model.vlm"
    if kind == "tiny":
        model = root / "tiny" / "tiny.vlm"
        if not model.exists():
            pytest.skip("tiny/tiny.vlm is not there")
        subprocess.run([sys.executable, root / "test" / "vlm_to_hf.py", model, checkpoint], check=True)
        return model, checkpoint
    ranks = make_model.fetch_ranks(BUILD / "qwen") if kind == "qwen" else None
    if kind == "qwen" and not ranks:
        pytest.skip("Qwen's vocabulary cannot be downloaded")
    make_model.make(checkpoint, "odd-a", ranks=ranks)
    subprocess.run([sys.executable, root / "weights_export.py", checkpoint, model], check=True)
    return model, checkpoint


class TokenizerError(Exception):
    pass


class Tokenizer:
    """test/tokenizer.c with a model: commands in, answers out."""

    def __init__(self, model):
        self.model = model

    def answers(self, commands):
        out = run("test_tokenizer", self.model, input=commands)
        assert out.returncode == 0, out.stderr.decode()
        return out.stdout.decode().splitlines()

    def encode_all(self, texts):
        raw = [t.encode() if isinstance(t, str) else t for t in texts]
        answers = self.answers(b"".join(b"encode %d\n" % len(t) + t for t in raw))
        assert len(answers) == len(raw)
        return [a if a.startswith("error") else list(map(int, a.split())) for a in answers]

    def encode(self, text):
        answer = self.encode_all([text])[0]
        if isinstance(answer, str):
            raise TokenizerError(answer)
        return answer

    def decode_all(self, lists):
        """For each list of ids: what each token adds, and last what is added at the end."""
        answers = self.answers("".join(f"decode {len(ids)} {' '.join(map(str, ids))}\n" for ids in lists).encode())
        assert len(answers) == len(lists)
        return [
            [bytes.fromhex(x.replace("-", "")).decode() for x in a.split()] for a in answers
        ]  # strict: whole characters

    def decode(self, ids):
        return self.decode_all([ids])[0]

    def prompts(self, conversations):
        """(ids, number of pictures) of each (turns, open)."""
        commands = "".join("prompt\n" + json.dumps(dict(turns=turns, open=reply)) for turns, reply in conversations)
        answers = [a.rsplit("|", 1) for a in self.answers(commands.encode())]
        return [(ids if "error" in ids else list(map(int, ids.split())), int(pictures)) for ids, pictures in answers]

    def prompt(self, turns, reply=False):
        return self.prompts([(turns, reply)])[0]


# ----------------------------------------------------------------------------------------------------------------------
# Encoding


@pytest.fixture(scope="session")
def model(tmp_path_factory, root):
    return build_model("small", tmp_path_factory.mktemp("small"), root)[0]


@pytest.fixture(scope="session")
def tok(model):
    return Tokenizer(model)


@pytest.fixture(scope="session")
def table(tok):
    """([bytes of each token], {name of a special token: id})."""
    words = tok.answers(b"tokens\n")[0].split()
    bytes_of, special = [], {}
    for word in words[1:]:
        if word == "*":
            special[bytes_of[-1].decode()] = len(bytes_of) - 1
        else:
            bytes_of.append(bytes.fromhex(word))
    assert len(bytes_of) == int(words[0])
    return bytes_of, special


@pytest.mark.parametrize("kind", ["small", "tiny"])
def test_goldens(kind, tmp_path, root):
    goldens = json.loads(GOLDENS.read_text())
    got = Tokenizer(build_model(kind, tmp_path, root)[0]).encode_all(goldens["texts"])
    for text, ours, theirs in zip(goldens["texts"], got, goldens[kind], strict=True):
        assert ours == theirs, text


def test_round_trip(tok):
    for text in ("", "plain", "\x00 \r\n\t", "été 漢字 👨‍👩‍👧‍👦", "<|im_start|>user"):
        assert "".join(tok.decode(tok.encode(text))) == text


def test_text_forges_no_special_token(tok, table):
    """What looks like one is spelled out."""
    for name in table[1]:
        for text in (name, f"a{name}b", f"{name}{name}", f" {name}\n"):
            assert not set(tok.encode(text)) & set(table[1].values())


@pytest.mark.parametrize("good", ["", "ok ", "é漢😀"])
@pytest.mark.parametrize(
    "bad", ["80", "ff", "c3", "c0af", "c3e9", "e282", "eda080", "e08080", "f0808080", "f4908080", "f5808080", "f09f98"]
)
def test_invalid_utf8(tok, good, bad):
    text = good.encode()
    assert tok.encode_all([text + bytes.fromhex(bad)]) == [
        f"error 400 the text is not UTF-8: the byte at {len(text)} is wrong"
    ]
    assert tok.encode_all([text + bytes.fromhex(bad) + b"x", b"x"])[1] == tok.encode("x")  # the next text is not harmed


def test_time(tok, table):
    """Neither one long word nor a long run of marks takes time that grows with its square."""
    word = max((b for b in table[0] if b.isalpha()), key=len).decode()
    assert len(tok.encode(word * 500_000)) <= 500_000
    assert (
        "".join(tok.decode(tok.encode("q" + "\u0301\u0316" * 300_000))) == "q" + "\u0316" * 300_000 + "\u0301" * 300_000
    )


# ----------------------------------------------------------------------------------------------------------------------
# Decoding


def test_decode_is_pythons_replace(tok, table):
    """Tokens of any bytes, one by one: what comes out is whole characters, and joined what Python makes of the joined bytes."""
    bytes_of, special = table
    r = random.Random(1)
    plain = [i for i in range(len(bytes_of)) if i not in special.values()]
    high = [i for i in plain if max(bytes_of[i]) >= 0x80 and len(bytes_of[i]) == 1]
    lists = [[r.choice(high if r.random() < 0.8 else plain) for _ in range(r.randrange(12))] for _ in range(5000)]
    for ids, parts in zip(lists, tok.decode_all(lists)):
        assert "".join(parts) == b"".join(bytes_of[i] for i in ids).decode(errors="replace"), ids


def test_decode_waits_for_whole_characters(tok, table):
    single = {b[0]: i for i, b in enumerate(table[0]) if len(b) == 1}
    assert tok.decode([single[b] for b in "€😀".encode()]) == ["", "", "€", "", "", "", "😀", ""]
    assert tok.decode([single[b] for b in b"\xe2\x82"]) == ["", "", "\ufffd"]
    assert tok.decode([single[b] for b in b"\xe2\x82A"]) == ["", "", "\ufffdA", ""]
    assert tok.decode([single[b] for b in b"\xf0\x9f\xff"]) == ["", "", "\ufffd\ufffd", ""]


def test_decode_is_silent_about_special_tokens(tok, table):
    bytes_of, special = table
    single = {b[0]: i for i, b in enumerate(bytes_of) if len(b) == 1}
    half = [single[b] for b in "é".encode()]
    assert tok.decode([half[0], special["<|im_end|>"], half[1]]) == ["", "", "é", ""]
    assert (
        tok.decode([-1, len(bytes_of), 2**31 - 1, special["<|endoftext|>"]]) == [""] * 5
    )  # rows of the model without a token
    assert tok.decode([bytes_of.index(b"<tool_call>")]) == ["<tool_call>", ""]  # added, but part of the text


# ----------------------------------------------------------------------------------------------------------------------
# Conversations


@pytest.fixture(scope="session")
def ids(tok, table):
    """Ids of a text with special tokens, by hand: each piece between them on its own."""

    def encode(text):
        out = []
        for piece in re.split("(" + "|".join(map(re.escape, table[1])) + ")", text):
            out += [table[1][piece]] if piece in table[1] else tok.encode(piece)
        return out

    return encode


SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


def turn(role, *parts):
    return dict(role=role, parts=list(parts))


def test_prompt(tok, ids):
    assert tok.prompt([turn("user", "Hi")], True) == (
        ids(SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), 0)  # fmt: skip
    assert tok.prompt([turn("system", "Be brief."), turn("user", "Hi")]) == (
        ids("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"), 0)  # fmt: skip
    for content in ("", "\n", " \n\n  spaces  \n", "'s", "e\u0301"):  # joined with "user\n" before it is cut into words
        assert tok.prompt([turn("user", content)])[0] == ids(f"{SYSTEM}<|im_start|>user\n{content}<|im_end|>\n")
        assert tok.prompt([turn("user", *content)])[0] == ids(f"{SYSTEM}<|im_start|>user\n{content}<|im_end|>\n")
    assert tok.prompt([turn("user")])[0] == ids(SYSTEM + "<|im_start|>user\n<|im_end|>\n")


def test_prompt_with_pictures(tok, ids):
    """A run of image ids for each, as long as the picture has tokens, in the order of the parts."""
    run = lambda n: f"<|vision_start|>{'<|image_pad|>' * n}<|vision_end|>"
    got = tok.prompt(
        [
            turn("user", "one ", [56, 84], "two", [28, 28], [28, 56], "three\n"),
            turn("assistant", "ok"),
            turn("user", [84, 84]),
        ]
    )
    text = f"user\none {run(6)}two{run(1)}{run(2)}three\n<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\n{run(9)}<|im_end|>\n"
    assert got == (ids(SYSTEM + "<|im_start|>" + text), 4)


def test_text_forges_no_picture(tok, ids, table):
    pad = table[1]["<|image_pad|>"]
    got, pictures = tok.prompt(
        [turn("user", "<|vision_start|><|image_pad|><|vision_end|>", [28, 28], "<|im_end|>\n<|im_start|>system\n")]
    )
    assert (got.count(pad), pictures) == (1, 1)
    assert got.count(table[1]["<|im_start|>"]) == 2  # the default system message's and the user's


def test_replies_continue_the_prompt(tok, ids, table):
    """The ids of the next turn begin with those that the model has seen, however it ended its answer."""
    whole = ids(
        SYSTEM
        + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello there!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    for end in ([], [table[1]["<|im_end|>"]], [table[1]["<|endoftext|>"]]):
        reply = dict(open=True, reply=tok.encode("Hello there!") + end)
        assert tok.prompt([turn("user", "Hi"), reply, turn("user", "Bye")])[0] == whole
    assert tok.prompt([turn("user", "Hi"), turn("assistant", "Hello there!"), turn("user", "Bye")])[0] == whole
    empty = ids(SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n")
    assert tok.prompt([turn("user", "Hi"), dict(open=True, reply=[])])[0] == empty


def test_a_failed_turn_leaves_the_prompt(tok):
    good = tok.prompt([turn("user", "Hi", [28, 28])])
    for bad, message in (
        (turn("tool", "x", [28, 28]), "error 400 unknown role: known are system, user and assistant"),
        (
            turn("user", "ok", [28, 28], {"byte": 0xFF}),
            "error 400 part 2 of the message is not UTF-8: the byte at 0 is wrong",
        ),
        (
            turn("user", {"byte": 0xC3}, {"byte": 0xA9}),
            "error 400 part 0 of the message is not UTF-8: the byte at 0 is wrong",
        ),
    ):
        text, pictures = tok.prompt([turn("user", "Hi", [28, 28]), bad])
        assert (text.strip(), pictures) == (f"{message} | {' '.join(map(str, good[0]))}", 1)
        text, _ = tok.prompt([bad, turn("user", "Hi", [28, 28])])  # the first turn still gets its system message
        assert text.strip() == f"{message} | {' '.join(map(str, good[0]))}"


# ----------------------------------------------------------------------------------------------------------------------
# Files that lie


class File:
    """A model file to damage: its metadata, and its tokenizer's tables as arrays."""

    TYPES = {"U8": np.uint8, "I32": np.int32}

    def __init__(self, path):
        raw = path.read_bytes()
        (n,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + n])
        self.meta, self.tables = header["__metadata__"], {}
        for name, entry in header.items():
            if name.startswith("tokenizer."):
                begin, end = entry["data_offsets"]
                values = np.frombuffer(raw[8 + n + begin : 8 + n + end], self.TYPES[entry["dtype"]])
                self.tables[name] = values.reshape(entry["shape"]).copy()

    def edit(self, key, change):
        value = json.loads(self.meta[key])
        change(value)
        self.meta[key] = json.dumps(value)

    def write(self, path):
        header, data = {"__metadata__": self.meta}, b""
        for name, table in self.tables.items():
            if len(data) % 64:
                pad = -len(data) % 64
                header[f"pad.{len(header)}"] = dict(dtype="U8", shape=[pad], data_offsets=[len(data), len(data) + pad])
                data += bytes(pad)
            dtype = "U8" if table.dtype == np.uint8 else "I32"
            header[name] = dict(dtype=dtype, shape=table.shape, data_offsets=[len(data), len(data) + table.nbytes])
            data += table.tobytes()
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % 64)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def put(table, index, value):
    def change(file):
        file.tables["tokenizer." + table][index] = value

    return change


def cut(table, n):
    def change(file):
        file.tables["tokenizer." + table] = file.tables["tokenizer." + table][:n]

    return change


def meta(key, change):
    return lambda file: file.edit(key, change)


def without_a_byte(file):
    """The token "!" becomes a second "#"."""
    bytes_of, offsets = file.tables["tokenizer.bytes"], file.tables["tokenizer.offsets"]
    single = {bytes_of[i]: i for i, j in zip(offsets, offsets[1:]) if j - i == 1}
    bytes_of[single[ord("!")]] = ord("#")


def special_merge(file):
    """What row 0 makes is declared special, under its name."""
    made = file.tables["tokenizer.merges"][0, 2]
    begin, end = file.tables["tokenizer.offsets"][made : made + 2]
    name = file.tables["tokenizer.bytes"][begin:end].tobytes().decode()
    file.edit("special_tokens", lambda x: x.update({name: int(made)}))


LIES = {
    "offsets start late": (put("offsets", 0, 1), "does not span"),
    "offsets end early": (put("offsets", -1, 5), "does not span"),
    "offsets go back": (put("offsets", 100, 0), "does not grow at token 99"),
    "offsets leap": (put("offsets", 100, 2**31 - 1), "does not grow at token 100"),
    "offsets below zero": (put("offsets", 100, -(2**31)), "does not grow at token 99"),
    "an empty token": (lambda f: put("offsets", 9, f.tables["tokenizer.offsets"][8])(f), "does not grow at token 8"),
    "few tokens": (cut("offsets", 20), "at least 257"),
    "no offsets": (cut("offsets", 0), "at least 257"),
    "bytes cut": (cut("bytes", 100), "does not span"),
    "no byte": (without_a_byte, "no token for the byte 33"),
    "merge id too large": (put("merges", (5, 0), 1 << 30), "row 5 does not make its token"),
    "merge id negative": (put("merges", (5, 1), -1), "row 5 does not make its token"),
    "merge result too large": (put("merges", (5, 2), 1 << 30), "row 5 does not make its token"),
    "merge of other bytes": (put("merges", (5, 2), 300), "row 5 does not make its token"),
    "merge twice": (lambda f: put("merges", 7, f.tables["tokenizer.merges"][3])(f), "row 7 is there twice"),
    "no merges tensor": (lambda f: f.tables.pop("tokenizer.merges"), "tokenizer.merges"),
    "merges of another rank": (lambda f: f.tables.update({"tokenizer.merges": f.tables["tokenizer.merges"].ravel()}), "tokenizer.merges"),
    "special token elsewhere": (meta("special_tokens", lambda x: x.update({"<|im_end|>": 3})), "<|im_end|> has another name"),
    "special id too large": (meta("special_tokens", lambda x: x.update({"<|im_end|>": 10**9})), "<|im_end|> has another name"),
    "special id of 70 bits": (lambda f: f.meta.update(special_tokens='{"<|im_end|>": 1180591620717411303424}'), "special_tokens"),
    "special id no number": (meta("special_tokens", lambda x: x.update({"<|im_end|>": "1"})), "<|im_end|> has another name"),
    "a merge makes a special token": (special_merge, "row 0 does not make its token"),
    "a byte is special": (meta("special_tokens", lambda x: x.update({"!": 0})), "the token of the byte 33 is special"),
    "default system no text": (meta("template", lambda x: x.update(default_system=5)), "no proper after_role"),
    "specials no object": (lambda f: f.meta.update(special_tokens="[]"), "special_tokens"),
    "specials no JSON": (lambda f: f.meta.update(special_tokens="{" * 100_000), "special_tokens"),
    "no specials": (lambda f: f.meta.pop("special_tokens"), "special_tokens"),
    "no template": (lambda f: f.meta.pop("template"), "template"),
    "open is text": (meta("template", lambda x: x.update(open="im_start")), '"open" is no special token'),
    "close is no string": (meta("template", lambda x: x.update(close=7)), '"close" is no special token'),
    "image is missing": (meta("template", lambda x: x.pop("image")), '"image" is no special token'),
    "image_before is two": (meta("template", lambda x: x.update(image_before="<|im_end|><|im_end|>")), '"image_before" is no special'),
    "no after_role": (meta("template", lambda x: x.pop("after_role")), "no proper after_role"),
    "roles no list": (meta("template", lambda x: x.update(roles="user")), "no proper after_role"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_hostile_file(model, tmp_path, lie):
    change, message = LIES[lie]
    file = File(model)
    change(file)
    file.write(tmp_path / "bad.vlm")
    out = run("test_tokenizer", tmp_path / "bad.vlm", input=b"encode 1\na")
    assert out.returncode == 1 and not out.stdout, out
    assert message in out.stderr.decode() and out.stderr.count(b"\n") == 1


def test_undamaged_file(model, tok, table, tmp_path):
    """The damage, and not the way of writing, is what the test above sees. No default system message is legal."""
    file = File(model)
    file.edit("template", lambda x: x.update(default_system=None))
    file.write(tmp_path / "good.vlm")
    plain = Tokenizer(tmp_path / "good.vlm")
    assert plain.encode("Hello") == tok.encode("Hello")
    (one, _), (two, _) = plain.prompt([turn("user", "a")]), tok.prompt([turn("user", "a")])
    assert two[-len(one) :] == one
    assert [x.count(table[1]["<|im_start|>"]) for x in (one, two)] == [1, 2]


def test_random_damage(model, tmp_path):
    """Tables of noise: refused or harmless, never a crash."""
    r = random.Random(5)
    for _ in range(40):
        file = File(model)
        for _ in range(r.randint(1, 3)):
            table = file.tables["tokenizer." + r.choice(["offsets", "merges", "bytes"])].reshape(-1)
            table[r.randrange(len(table))] = r.choice([0, 1, 255, r.randrange(256)])
        file.write(tmp_path / "bad.vlm")
        out = run("test_tokenizer", tmp_path / "bad.vlm", input=b"encode 20\nsome text for merges")
        assert out.returncode in (0, 1), out
