"""What is compared with transformers: models, and conversations to run them on. Used live and for the goldens."""
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
from PIL import Image

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VLM = ROOT / os.environ.get("VLM_BUILD", "build") / "vlm"

# name: (model, layout of its checkpoint, tensor names, pictures as (width, height), turns, tokens to write)
# A turn's letters: a number is that picture, t is text.
CASES = {
    "tiny": ("tiny", None, None, [(140, 112), (112, 196)], ["0t", "t1"], 12),
    "odd-a": ("odd-a", "flat", "hub", [(140, 196), (84, 308), (56, 56)], ["t0t1t", "t", "2t"], 12),
    "odd-b": ("odd-b", "nested", "new", [(252, 98)], ["0t"], 12),
    "odd-c": ("odd-c", "flat", "new", [(196, 112), (196, 112)], ["01t"], 12),
    "no-picture": ("odd-a", "nested", "hub", [], ["t", "t"], 20),
}
TEXTS = ["What is in the picture?", "It's 3 o'clock,  isn't it?\n\nDas läuft über 12 Straßen.", "猫坐在窗台上 and 👍🏽 sum += x[i];", "Describe it."]
REPLIES = ["A cat, I think.", "Yes."]


def picture(width, height, seed):
    """Shades and noise: something in every patch."""
    g = np.random.Generator(np.random.PCG64(seed))
    y, x = np.mgrid[0:height, 0:width]
    base = np.stack([x * 255 / width, y * 255 / height, (x + y) * 127 / (width + height)], -1)
    return Image.fromarray(np.clip(base + g.integers(-60, 60, (height, width, 3)), 0, 255).astype(np.uint8))


def conversation(name, folder):
    """The case's messages, with its pictures saved in `folder`."""
    _, _, _, sizes, turns, _ = CASES[name]
    for i, (w, h) in enumerate(sizes):
        picture(w, h, i).save(folder / f"{i}.png")
    messages, texts = [], iter(TEXTS * 2)
    for k, turn in enumerate(turns):
        parts = [{"type": "text", "text": next(texts)} if c == "t" else {"type": "image", "image": str(folder / f"{c}.png")} for c in turn]
        messages += [{"role": "user", "content": parts}]
        if k + 1 < len(turns):
            messages += [{"role": "assistant", "content": REPLIES[k]}]
    return messages


def checkpoint(name, folder):
    """The Hugging Face folder of the case's model."""
    model, layout, names = CASES[name][:3]
    out = folder / "hf"
    if model == "tiny":
        subprocess.run([sys.executable, ROOT / "test/vlm_to_hf.py", ROOT / "tiny/tiny.vlm", out], check=True)
    else:
        subprocess.run([sys.executable, ROOT / "test/make_model.py", out, "--shape", model, "--layout", layout, "--names", names, "--seed", "7"], check=True)
    return out


def export(hf, out, kind, *flags):
    subprocess.run([sys.executable, ROOT / "weights_export.py", hf, out, "--type", kind, *flags], check=True, capture_output=True)
    return out


def run_vlm(model, messages, folder, n, *flags, dump=None):
    """The answer as an object, and every stage by name."""
    chat = folder / "chat.json"
    chat.write_text(json.dumps(messages))
    command = [VLM, "-m", model, "--chat", chat, "--json", "-n", str(n), "--logprobs", "1", *flags]
    if dump:
        command += ["--dump", dump]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stages = {p.stem: np.load(p) for p in sorted(dump.glob("*.npy"))} if dump else {}
    return json.loads(done.stdout), stages
