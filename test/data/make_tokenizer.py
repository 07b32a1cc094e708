#!/usr/bin/env python3
"""Write tokenizer.json beside this file: texts and the ids that Hugging Face `tokenizers` gives them.

    python test/data/make_tokenizer.py TINY_TOKENIZER_JSON

"small" is the vocabulary of make_model.py, "tiny" that of the model in tiny/: the tokenizer.json it was trained with,
or the one that vlm_to_hf.py makes of tiny/tiny.vlm.
"""

import json
import pathlib
import sys
import tempfile

import tokenizers

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import make_model

TEXTS = [
    "", "a", " ", "\n", "Hello, world!", "  two  spaces  ", "a\n\n\nb\r\n c\t\td  ", "\n \n x", "x   ", "trailing \n ",
    "It's we've they'll I'm you're he'd DON'T we'Ve ſ 'ſx x'ſ 'K ''s ' s", "1234567890 3.14 1,000 ٣٤ ४५ ½ Ⅷ ⑨ x1y22",
    "for (int i = 0; i < n; i++) { a[i] += 1; }  // sum\n\treturn a;\n", "<|im_end|> <|image_pad|><|vision_start|> <tool_call>",
    "naïve café", "nai\u0308ve cafe\u0301", "a\u0316\u0301 a\u0301\u0316 a\u0345\u0301\u0316", "\u0301\u0301", "\u1e9b\u0323 \u212b \u2126 \u0958",
    "Ångström Å", "Straße ﬁn Ⅳ", "Москва, Россия", "Ελλάδα ΰ", "中文和漢字。", "ひらがな カタカナ が か\u3099", "한국어 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "مرحبا بالعالم", "שָׁלוֹם עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "བོད་སྐད་", "👍🏽👨‍👩‍👧‍👦🏳️‍🌈🇩🇪🇯🇵1️⃣",
    "a\u00a0b\u2003\u2003c\u3000\u3000d\u2028e\u0085f\u200bg\u180eh", "\x00\x01\x1c\x1f\x7f", "\ufeffbom \ufffd \U0010ffff \ue000",
    "\U0001e030x \U00031350 \u0897a\u08d0\u0316 \U00011935\U00011930", "𝕏𝟙 𐍈 \U000102e1", "!!!???...---===\n\n\n;;;", "\r\r\n\n\r", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "What colour is the large circle?", "How many red squares are there? Three.", "the the the there then", "http://a.b/c?d=e&f=%20#g",
]  # fmt: skip


def ids_of(path):
    spec = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    spec["added_tokens"] = []  # which would be found in texts
    return [
        x.ids for x in tokenizers.Tokenizer.from_str(json.dumps(spec)).encode_batch(TEXTS, add_special_tokens=False)
    ]


def main(tiny):
    with tempfile.TemporaryDirectory() as folder:
        small = pathlib.Path(folder)
        make_model.write_tokenizer(small, *make_model.small_vocabulary())
        answer = dict(
            version=tokenizers.__version__, texts=TEXTS, small=ids_of(small / "tokenizer.json"), tiny=ids_of(tiny)
        )
    lines = ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in answer.items())
    (HERE / "tokenizer.json").write_text("{" + lines + "}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_tokenizer.py TINY_TOKENIZER_JSON")
    main(sys.argv[1])
