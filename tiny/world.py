"""The small model's world: pictures, what is true of them, and how people ask about it.

    scene  ->  picture (Pillow)  ->  resized as the engine does it  ->  patches
       \\->  questions with answers, each in many wordings

A scene is a list of things with known places; the picture and every answer come from it. The
file needs numpy and Pillow only. Everything is drawn from a numpy Generator, never from the order
of a set or a hash, so that the same seed gives the same pictures and questions everywhere.

Legend: a *cell* is 28x28 pixels of the resized picture = one merged vision token = 2x2 patches.
"""

import io
import math
import os
import re
import sys
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SHAPES = ["circle", "square", "triangle", "star", "cross"]
COLOURS = ["red", "green", "blue", "yellow", "purple", "black"]
NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five"]
MAX_THINGS = 5

# ---------------------------------------------------------------------------------------------
# 1. Preprocessing: what image.c does, and what transformers' Qwen2VLImageProcessor does.

PATCH, MERGE, TEMPORAL = 14, 2, 2
CELL = PATCH * MERGE
MIN_PIXELS = 3136
# 224 x 224: larger pictures are shrunk to about 64 cells. The model is trained up to exactly this
# bound, so a photograph-sized picture lands inside what it knows.
MAX_PIXELS = 50176
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


def smart_resize(h, w):
    """(h, w) -> the multiples of 28 it is resized to; round() rounds halves to even, as Python does."""
    h2, w2 = max(CELL, round(h / CELL) * CELL), max(CELL, round(w / CELL) * CELL)
    if h2 * w2 > MAX_PIXELS:
        b = math.sqrt(h * w / MAX_PIXELS)
        h2 = max(CELL, math.floor(h / b / CELL) * CELL)
        w2 = max(CELL, math.floor(w / b / CELL) * CELL)
    elif h2 * w2 < MIN_PIXELS:
        b = math.sqrt(MIN_PIXELS / (h * w))
        h2, w2 = math.ceil(h * b / CELL) * CELL, math.ceil(w * b / CELL) * CELL
    return h2, w2


def resize(image):
    """PIL picture -> uint8 (h, w, 3), resized as the engine does it."""
    image = image.convert("RGB")
    h, w = smart_resize(image.height, image.width)
    if (w, h) != image.size:
        image = image.resize((w, h), Image.BICUBIC)
    return np.asarray(image)


def patches(pixels):
    """uint8 (h, w, 3) -> uint8 (P, 3*14*14) in merge order, and the grid of patches (rows, columns).

    The model sees every patch twice (two frames in time) as (pixel/255 - MEAN) / STD."""
    gh, gw = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    x = pixels.reshape(gh // 2, 2, PATCH, gw // 2, 2, PATCH, 3)
    x = x.transpose(0, 3, 1, 4, 6, 2, 5)  # cell row, cell column, row in cell, column in cell, rgb, y, x
    return np.ascontiguousarray(x.reshape(gh * gw, -1)), (gh, gw)


# ---------------------------------------------------------------------------------------------
# 2. Scenes


@dataclass
class Thing:
    """One shape, or one digit. Centre and diameter are in pixels of the resized picture."""

    kind: str  # a shape's name, or a digit
    colour: str
    x: float
    y: float
    size: float
    rgb: tuple
    turn: float = 0.0
    stretch: float = 1.0


@dataclass
class Scene:
    width: int  # as drawn, before smart_resize
    height: int
    things: list = field(default_factory=list)  # left to right
    number: str = ""  # the digits, when the things are digits
    font: str = ""
    ground: tuple = ((255, 255, 255), (255, 255, 255), 0.0)  # two ends and the angle of the shade
    noise: float = 0.0
    blur: float = 0.0
    jpeg: int = 0
    smooth: bool = True  # drawn with smoothed edges
    seed: int = 0

    @property
    def resized(self):
        h, w = smart_resize(self.height, self.width)
        return w, h

    def place(self, t):
        """(x, y) of a thing as fractions of the picture."""
        w, h = self.resized
        return t.x / w, t.y / h

    def cell(self, t):
        w, _ = self.resized
        return int(t.y // CELL) * (w // CELL) + int(t.x // CELL)


def hsv(h, s, v):
    """Degrees, 0..1, 0..1 -> (r, g, b) of 0..255."""
    k = lambda n: (n + h / 60) % 6
    f = lambda n: v - v * s * max(0, min(k(n), 4 - k(n), 1))
    return tuple(int(round(255 * f(n))) for n in (5, 3, 1))


# hue, saturation and value ranges; between the colours lie gaps that no picture uses
COLOUR_RANGES = {
    "red": ((-8, 8), (0.80, 1), (0.70, 1)),
    "green": ((95, 150), (0.60, 1), (0.42, 1)),
    "blue": ((208, 244), (0.70, 1), (0.60, 1)),
    "yellow": ((48, 61), (0.72, 1), (0.88, 1)),
    "purple": ((270, 303), (0.55, 1), (0.45, 0.95)),
    "black": ((0, 360), (0, 0.4), (0, 0.13)),
}
# the plain names that drawing programs and web pages use
PURE = {
    "red": (255, 0, 0),
    "green": (0, 128, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "purple": (128, 0, 128),
    "black": (0, 0, 0),
}


def draw_colour(rng, name):
    if rng.random() < 0.2:
        return PURE[name]
    return hsv(*(rng.uniform(*r) for r in COLOUR_RANGES[name]))


def far(a, b):
    """Distance of two colours, green counted more, as the eye does."""
    return math.sqrt(2 * (a[0] - b[0]) ** 2 + 4 * (a[1] - b[1]) ** 2 + 3 * (a[2] - b[2]) ** 2) / 3


def draw_ground(rng, rgbs):
    """A plain or shaded ground on which every colour of rgbs stands out."""
    for _ in range(60):
        r = rng.random()
        if r < 0.35:
            a = (255, 255, 255) if rng.random() < 0.7 else (int(rng.integers(235, 256)),) * 3
        elif r < 0.75:
            a = hsv(rng.uniform(0, 360), rng.uniform(0, 0.35), rng.uniform(0.55, 1))
        else:
            a = hsv(rng.uniform(0, 360), rng.uniform(0, 0.5), rng.uniform(0.05, 0.6))
        b = a
        if rng.random() < 0.4:
            b = tuple(int(np.clip(v + rng.uniform(-45, 45), 0, 255)) for v in a)
        if all(min(far(c, a), far(c, b)) > 75 for c in rgbs):
            return a, b, float(rng.uniform(0, 2 * math.pi))
    return (255, 255, 255), (255, 255, 255), 0.0 if all(far(c, (255,) * 3) > 60 for c in rgbs) else 1.0


def draw_size(rng):
    """(width, height) of a picture. A third are larger than the engine keeps, and get shrunk."""
    while True:
        gw, gh = int(rng.integers(3, 11)), int(rng.integers(3, 11))
        if gw * gh <= 64 and max(gw, gh) <= 2.1 * min(gw, gh) and rng.random() < min(1, 0.25 + gw * gh / 45):
            break
    w, h = gw * CELL + rng.integers(-12, 13), gh * CELL + rng.integers(-12, 13)
    if rng.random() < 0.3:
        k = math.sqrt(MAX_PIXELS / (w * h)) * math.exp(rng.uniform(0.1, 1.5))
        w, h = min(int(w * k), 1280), min(int(h * k), 1280)
    return int(w), int(h)


def finish(rng, scene):
    """Ground and flaws; things sorted from left to right."""
    scene.things.sort(key=lambda t: t.x)
    scene.ground = draw_ground(rng, [t.rgb for t in scene.things])
    scene.noise = float(rng.uniform(1, 8)) if rng.random() < 0.15 else 0.0
    scene.blur = float(rng.uniform(0.3, 0.9)) if rng.random() < 0.12 else 0.0
    scene.jpeg = int(rng.integers(55, 96)) if rng.random() < 0.2 else 0
    scene.smooth = bool(rng.random() < 0.85)
    scene.seed = int(rng.integers(1 << 31))
    return scene


def shapes_scene(rng, size=None, count=None):
    """0 to 5 shapes that do not touch; no two centres in one cell (two there could not be told apart)."""
    w0, h0 = size or draw_size(rng)
    scene = Scene(w0, h0)
    w, h = scene.resized
    cells = (w // CELL) * (h // CELL)
    most = 2 if cells < 12 else 3 if cells < 16 else 4 if cells < 20 else 5
    if count is None:
        count = int(rng.choice(6, p=[0.05, 0.27, 0.2, 0.19, 0.17, 0.12]))
    count = min(count, most)
    top = min(w, h) * (0.62 if count == 1 else 0.5 if count == 2 else 0.42 if count == 3 else 0.36)
    things = []
    # a few shapes and colours a picture, so that "two circles" or "three red things" are common
    kinds = rng.choice(5, size=int(rng.integers(1, 4))) if rng.random() < 0.5 else np.arange(5)
    hues = rng.choice(6, size=int(rng.integers(1, 4))) if rng.random() < 0.5 else np.arange(6)
    tries = 0
    while len(things) < count and tries < 200:
        tries += 1
        d = 21 + (max(top, 24) * 0.97**tries - 21) * rng.random() ** 1.2 if top * 0.97**tries > 22 else 21
        m = d / 2 + 1.5
        x, y = rng.uniform(m, w - m), rng.uniform(m, h - m)
        if rng.random() < 0.35:  # the nine named places are asked about most
            x = min(max(w * rng.choice([0.17, 0.5, 0.83]) + rng.uniform(-0.05, 0.05) * w, m), w - m)
            y = min(max(h * rng.choice([0.17, 0.5, 0.83]) + rng.uniform(-0.05, 0.05) * h, m), h - m)
        t = Thing(
            SHAPES[rng.choice(kinds)],
            COLOURS[rng.choice(hues)],
            float(x),
            float(y),
            float(d),
            (),
            float(rng.uniform(-20, 20)) if rng.random() < 0.6 else 0.0,
            float(rng.uniform(0.9, 1.1)),
        )
        if any(math.hypot(t.x - o.x, t.y - o.y) < (t.size + o.size) * 0.5 + 3 for o in things):
            continue
        if any(scene.cell(t) == scene.cell(o) for o in things):
            continue
        t.rgb = draw_colour(rng, t.colour)
        things.append(t)
    scene.things = things
    return finish(rng, scene)


FONTS = [
    "dejavu/DejaVuSans.ttf",
    "dejavu/DejaVuSans-Bold.ttf",
    "dejavu/DejaVuSerif.ttf",
    "liberation/LiberationSans-Regular.ttf",
    "liberation/LiberationSans-Bold.ttf",
    "liberation/LiberationSerif-Bold.ttf",
    "freefont/FreeSans.ttf",
    "freefont/FreeSansBold.ttf",
]
FONT_ROOT = os.environ.get("TINY_FONTS", "/usr/share/fonts/truetype")
_fonts = {}


def font(name, size):
    key = (name, size)
    if key not in _fonts:
        if len(_fonts) > 4000:
            _fonts.clear()
        _fonts[key] = ImageFont.truetype(os.path.join(FONT_ROOT, name), size)
    return _fonts[key]


def number_scene(rng, size=None, digits=None):
    """A number of one to three digits in large type; digits at least a cell apart."""
    while True:
        w0, h0 = size or draw_size(rng)
        scene = Scene(w0, h0)
        w, h = scene.resized
        n = len(digits) if digits else int(rng.choice([1, 2, 3], p=[0.22, 0.38, 0.4]))
        if w >= 32 * n + 12:
            break
        if size and digits:
            raise ValueError("picture too narrow for the number")
    if not digits:
        digits = str(rng.integers(0 if n == 1 else 10 ** (n - 1), 10**n))
        if rng.random() < 0.3:  # the pairs that are confused most
            digits = "".join(
                rng.choice(list("06839")) if i or n == 1 else rng.choice(list("6839")) for i in range(n)
            )
    tall = max(28, min(h * 0.8, 130, (w - 8) / n * 1.25))
    high = 27 + (tall - 27) * rng.random() ** 1.5  # height of a digit
    step = max(29.5, high * rng.uniform(0.74, 0.86))
    step = min(step, (w - 10) / n)
    step = max(step, 29.2)
    high = min(high, step * 1.35)
    name = rng.choice(COLOURS)
    rgb = draw_colour(rng, name)
    wide = step * n
    x0 = rng.uniform(3, max(3.1, w - wide - 3)) if rng.random() < 0.7 else (w - wide) / 2
    y = rng.uniform(high / 2 + 3, max(high / 2 + 3.1, h - high / 2 - 3)) if rng.random() < 0.7 else h / 2
    scene.things = [
        Thing(c, name, float(x0 + step * (i + 0.5)), float(y), float(high), rgb) for i, c in enumerate(digits)
    ]
    scene.number = digits
    scene.font = str(rng.choice(FONTS))
    return finish(rng, scene)


# ---------------------------------------------------------------------------------------------
# 3. Drawing


def outline(kind, turn, stretch):
    """The corners of a shape of diameter 2 around the origin."""
    if kind == "circle":
        p = [(math.cos(a), math.sin(a)) for a in np.linspace(0, 2 * math.pi, 48, endpoint=False)]
    elif kind == "square":
        p = [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
    elif kind == "triangle":
        p = [(0, -0.95), (0.92, 0.75), (-0.92, 0.75)]
    elif kind == "star":
        p = [
            (
                (1 if i % 2 == 0 else 0.42) * math.sin(i * math.pi / 5),
                -(1 if i % 2 == 0 else 0.42) * math.cos(i * math.pi / 5),
            )
            for i in range(10)
        ]
    else:
        a, b = 0.95, 0.31
        p = [
            (-b, -a),
            (b, -a),
            (b, -b),
            (a, -b),
            (a, b),
            (b, b),
            (b, a),
            (-b, a),
            (-b, b),
            (-a, b),
            (-a, -b),
            (-b, -b),
        ]
    p = np.array(p) * [min(1, stretch), min(1, 1 / stretch)]
    c, s = math.cos(math.radians(turn)), math.sin(math.radians(turn))
    return p @ np.array([[c, s], [-s, c]])


def draw_digit(draw, scene, t, fx, fy, k):
    """One digit, its box centred on the thing's place and as high as the thing's size."""
    probe = font(scene.font, 100).getbbox("8")
    size = max(8, int(round(t.size / fy * k * 100 / (probe[3] - probe[1]))))
    f = font(scene.font, size)
    x0, y0, x1, y1 = f.getbbox(t.kind)
    draw.text((t.x / fx * k - (x0 + x1) / 2, t.y / fy * k - (y0 + y1) / 2), t.kind, fill=t.rgb, font=f)


def render(scene):
    """Scene -> PIL picture of the scene's own size."""
    w, h = scene.width, scene.height
    rw, rh = scene.resized
    fx, fy = rw / w, rh / h
    k = 1 if not scene.smooth or fx < 0.5 else 2  # drawn larger, then halved: smooth edges
    a, b, angle = scene.ground
    if a == b:
        image = Image.new("RGB", (w * k, h * k), a)
    else:
        xs, ys = np.linspace(-0.5, 0.5, w * k, dtype=np.float32), np.linspace(
            -0.5, 0.5, h * k, dtype=np.float32
        )
        t = np.clip(ys[:, None] * math.sin(angle) + xs[None] * math.cos(angle) + 0.5, 0, 1)[..., None]
        image = Image.fromarray(
            (np.array(a, np.float32) * (1 - t) + np.array(b, np.float32) * t).astype(np.uint8)
        )
    draw = ImageDraw.Draw(image)
    for t in scene.things:
        if scene.number:
            draw_digit(draw, scene, t, fx, fy, k)
        else:
            r = t.size / 2 / math.sqrt(fx * fy) * k
            p = outline(t.kind, t.turn, t.stretch) * r + [t.x / fx * k, t.y / fy * k]
            draw.polygon([tuple(q) for q in p], fill=t.rgb)
    if k > 1:
        image = image.reduce(k)
    return flaws(scene, image, 1 / math.sqrt(fx * fy))


def flaws(scene, image, scale):
    """Blur, noise and JPEG, at the scale of the resized picture."""
    if scene.blur:
        image = image.filter(ImageFilter.GaussianBlur(scene.blur * scale))
    if scene.noise:
        g = np.random.default_rng(scene.seed)
        x = np.asarray(image, np.float32)
        x = x + g.standard_normal(x.shape, np.float32) * np.float32(scene.noise)
        image = Image.fromarray(np.clip(x, 0, 255).astype(np.uint8))
    if scene.jpeg:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=scene.jpeg)
        image = Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")
    return image


# ---------------------------------------------------------------------------------------------
# 4. Wordings. (a|b|) is a choice, {slot} is filled in. A wording that starts with ! is never
#    trained on; the held-out questions use it to measure how well a newcomer's own words work.
#    One with ~ needs the thing's name: "what is it" would ask for more than the shape.
#    {pic} is the picture, {in} is "in the picture" or nothing, {things} are things.

MACROS = {
    "pic": "(the picture|the image|this picture|this image|the photo|the drawing|my picture|the pic)",
    "in": "(| in {pic}| in {pic}| here| on {pic}| there)",
    "things": "(things|objects|shapes|items)",
    "thing": "(thing|one|object|shape)",
    "colour": "colour",
    "tell": "(tell me|(can|could|would) you (please |)tell me|please tell me|i want to know|say|do you know|"
    "i would like to know)",
}

# fmt: off
WORDINGS = {
    # what is it: one thing, several, a number, or nothing
    "name": ["what is this", "what's this", "whats this", "what is it", "what do you see{in}",
        "what can you see{in}", "what (is|'s) in {pic}",
        "what (is|'s) (shown|drawn|depicted|visible) (here|in {pic})", "what does {pic} show",
        "name (this|it|what you see|the thing|the object|what is in {pic})",
        "(can|could) you (please |)name (this|it)", "what (is|'s) here", "what am i looking at",
        "{tell} what this is", "{tell} what you see{in}", "{tell} what is in {pic}",
        "what is (this|that) (thing|object)", "what (object|thing) is (this|it|that)", "what is there{in}",
        "identify (this|it|the object|the thing)", "what do we have here",
        "what have i (drawn|painted|shown you)", "what is (the|this) (thing|object){in}",
        "what (object|thing) do you see", "what (object|thing) is in {pic}",
        "what kind of (thing|object) is (this|it)", "what (is|'s) on {pic}", "what (did|have) i draw(n|)",
        "what is that", "(do|can) you recognise (this|it|what is in {pic})", "which object is this",
        "(and |)what do you think this is", "what might this be", "what could this be", "guess what this is",
        "what is {pic} of", "what is {pic} about", "!what would you call this", "!what have we got here",
        "!what is displayed{in}", "!what object can you see", "!what can be seen in {pic}",
        "!say what is in {pic}", "!what are we looking at"],
    "describe": ["describe {pic}", "please describe {pic}", "(can|could|would) you (please |)describe {pic}",
        "describe what you see", "describe (this|it)", "give (me |)a description{in}",
        "describe {pic} (in one sentence|in a sentence|briefly|for me|in a few words|in words)",
        "(give|write) (me |)a (short |brief |)(description|caption) (of|for) {pic}", "caption {pic}",
        "{tell} about {pic}", "{tell} everything you see{in}", "list (all |)the {things}{in}",
        "list (what you see|everything{in})", "name all (the |){things}{in}",
        "what {things} (are there|do you see|can you see){in}",
        "which {things} (are there|do you see|can you see){in}", "name everything (you see|{in})",
        "write (one|a) sentence about {pic}", "(summarise|summarize) {pic}", "what {things} are (in|on) {pic}",
        "what are the {things}{in}", "tell me what all the {things} are", "explain {pic}",
        "what is going on in {pic}", "from left to right, what do you see",
        "what do you see from left to right", "read out the {things} from left to right",
        "!how would you describe {pic}", "!put {pic} into words", "!give me an overview of {pic}",
        "!enumerate the {things}{in}", "!say something about {pic}", "!what does {pic} contain"],
    # {it}: the circle, it, the number
    "colour": ["what {colour} is {it}", "what's the {colour} of {it}", "what is the {colour} of {it}",
        "which {colour} is {it}", "what {colour} (has {it}|does {it} have)", "{it} is what {colour}",
        "{it} is which {colour}", "{tell} the {colour} of {it}", "{tell} what {colour} {it} is",
        "{tell} which {colour} {it} is", "name the {colour} of {it}", "{colour} of {it}",
        "the {colour} of {it}", "in what {colour} is {it} (drawn|painted)", "what {colour} is {it}{in}",
        "in {pic}, what {colour} is {it}", "what is the {colour} of {it}{in}", "which {colour} does {it} have",
        "what {colour} do you see for {it}", "what {colour} would you say {it} is",
        "what {colour} was used for {it}", "how is {it} coloured", "(give|say) (me |)the {colour} of {it}",
        "{it}: what {colour}", "look at {it}. what {colour} is it", "do you see the {colour} of {it}",
        "(can|could) you see what {colour} {it} is", "!what {colour} might {it} be",
        "!i wonder what {colour} {it} is", "!{it} has which {colour}", "!identify the {colour} of {it}",
        "!is {it} painted in which {colour}", "!what {colour} did i use for {it}"],
    # {it}: the red one, it
    "shape": ["what shape is {it}", "what is the shape of {it}", "what's the shape of {it}",
        "which shape is {it}", "what shape (has {it}|does {it} have)", "~what is {it}", "~what's {it}",
        "{it} is what shape", "{it} is which shape", "{tell} the shape of {it}", "{tell} what shape {it} is",
        "{tell} which shape {it} is", "~{tell} what {it} is", "name the shape of {it}", "shape of {it}",
        "the shape of {it}", "what (kind|type|sort) of shape is {it}", "what (form|figure) is {it}",
        "which form does {it} have", "what is the form of {it}", "what shape is {it}{in}",
        "in {pic}, what shape is {it}", "~what is {it}{in}", "which shape does {it} have",
        "(give|say) (me |)the shape of {it}", "what geometric (shape|figure|form) is {it}",
        "what shape would you say {it} is", "look at {it}. what shape is it", "{it}: what shape",
        "(can|could) you see what shape {it} is", "how is {it} shaped", "~what sort of (thing|figure) is {it}",
        "~what (thing|object) is {it}", "!what shape might {it} be", "!i wonder what shape {it} is",
        "!{it} has which shape", "!identify the shape of {it}", "!what form has {it}",
        "!is {it} a circle or what"],
    "where": ["where is {it}", "where's {it}", "wheres {it}", "where is {it}{in}", "where in {pic} is {it}",
        "where can i (find|see) {it}", "in (which|what) (part|area|corner|region) of {pic} is {it}",
        "what is the (position|location|place) of {it}", "{tell} where {it} is", "{tell} where i can find {it}",
        "{tell} the (position|location|place) of {it}", "where do you see {it}{in}", "where can you see {it}",
        "locate {it}", "please locate {it}", "(can|could) you locate {it}", "find {it}", "please find {it}",
        "on (which|what) side is {it}", "where is {it} (located|placed|positioned|found|drawn)",
        "(position|location|place) of {it}", "the (position|location|place) of {it}", "{it} is where",
        "where about is {it}", "whereabouts is {it}", "where does {it} (sit|lie|stand|appear)",
        "at (which|what) (place|position|spot|location) is {it}",
        "which (part|side|corner|area) of {pic} (has|contains|shows) {it}", "where did i (put|draw|place) {it}",
        "in {pic}, where is {it}", "show me where {it} is",
        "what (position|location|place) (has {it}|does {it} have|is {it} at|is {it} in)",
        "where would you say {it} is", "where on {pic} is {it}", "where exactly is {it}",
        "in (which|what) (spot|place|position) is {it}", "which (position|place|location) is {it} (in|at)",
        "{it}: where is it", "look for {it}. where is it", "do you see where {it} is", "point to {it}",
        "help me find {it}", "(give|say) (me |)the (position|location|place) of {it}", "where might {it} be",
        "where have i put {it}", "!where would i find {it}", "!i can't find {it}, where is it",
        "!where should i look for {it}", "!{it} is located where", "!in which place do you see {it}",
        "!say where {it} is", "!describe the position of {it}"],
    # {p}: at the top left
    "at": ["what is {p}", "what's {p}", "whats {p}", "what is {p} of {pic}", "what's {p} of {pic}",
        "what do you see {p}", "what can you see {p}", "what is there {p}", "which {thing} is {p}",
        "what {thing} is {p}", "{tell} what is {p}", "{tell} what you see {p}", "name the {thing} {p}",
        "what is the {thing} {p}", "what is the {thing} {p} of {pic}", "identify the {thing} {p}",
        "{p} of {pic}, what is there", "{p}, what do you see", "what is (drawn|shown|located|placed|found) {p}",
        "what did i draw {p}", "what stands {p}", "what is sitting {p}",
        "what (thing|object|shape) (do|can) you see {p}", "describe the {thing} {p}", "describe what is {p}",
        "is there anything {p}, and what", "look {p}. what is there", "what appears {p}",
        "what can be found {p}", "who or what is {p}", "{p}: what is there", "what lies {p}",
        "!what have i put {p}", "!which {thing} can be seen {p}", "!what {thing} did i draw {p}",
        "!what would i find {p}", "!{p} there is what", "!say what is {p}"],
    # {what}: circles, red things, things
    "count": ["how many {what} are there{in}", "how many {what} are there", "how many {what} are in {pic}",
        "how many {what} do you see{in}", "how many {what} can you see{in}", "how many {what}",
        "how many {what}{in}", "count the {what}{in}", "please count the {what}", "count {what}",
        "(can|could) you count the {what}{in}", "what is the number of {what}{in}",
        "{tell} how many {what} there are{in}", "{tell} the number of {what}{in}", "number of {what}{in}",
        "the number of {what}", "how many {what} does {pic} (have|show|contain)", "how many {what} has {pic}",
        "how many {what} are (shown|drawn|visible){in}", "how many {what} did i draw",
        "in {pic}, how many {what} are there", "{what}: how many", "how many {what} (exist|appear){in}",
        "what is the count of {what}", "give me the (number|count) of {what}",
        "how many {what} can be seen{in}", "how many {what} is there", "how many {what} can you count{in}",
        "how many {what} do you count", "say how many {what} there are", "how many {what} are on {pic}",
        "how many {what} have i drawn", "there are how many {what}", "how many {what} can you find",
        "find out how many {what} there are", "what is the total number of {what}", "how many {what} in total",
        "!how many {what} would you say there are", "!i see some {what}, how many are there",
        "!what number of {what} do you see", "!could you work out how many {what} there are",
        "!how many {what} are present{in}", "!the count of {what} is what"],
    # {a}: a red circle; {one}: red circle; {as}: red circles
    "exists": ["is there {a}{in}", "is there {a}", "is there {a} in {pic}", "do you see {a}{in}",
        "can you see {a}{in}", "does {pic} (have|show|contain) {a}", "is {a} in {pic}",
        "(are there|do you see) any {as}{in}", "are there {as}{in}", "any {as}{in}", "{a}{in}, yes or no",
        "is {a} (visible|shown|drawn|present){in}", "is there {a}, yes or no", "{tell} if there is {a}{in}",
        "{tell} whether there is {a}{in}", "do you (find|notice) {a}{in}", "can you find {a}{in}",
        "did i draw {a}", "have i drawn {a}", "does {a} appear{in}",
        "is there (at least one {one}|some {one}){in}", "is {a} here", "does this have {a}",
        "yes or no: is there {a}", "is there any {one}{in}", "there is {a}, right",
        "is it true that there is {a}", "in {pic}, is there {a}", "check if there is {a}",
        "do we have {a} here", "can {a} be seen{in}", "does {pic} include {a}", "is {a} part of {pic}",
        "has {pic} got {a}", "i think there is {a}, is that right", "there is {a}{in}, true or false",
        "is there {a} anywhere", "do you see any {one}{in}", "can you see any {one}",
        "!would you say there is {a}{in}", "!is {a} to be seen{in}", "!i am looking for {a}, is it there",
        "!could you check whether {pic} has {a}", "!is it correct that {pic} shows {a}", "!does it contain {a}",
        "!can you spot {a}{in}"],
    # {it} {that}: the circle / red; it / a circle; the circle / at the top left
    "is": ["is {it} {that}", "is {it} {that}", "is {it} {that}{in}", "is {it} {that}, yes or no",
        "yes or no: is {it} {that}", "{tell} if {it} is {that}", "{tell} whether {it} is {that}",
        "is it true that {it} is {that}", "{it} is {that}, right", "would you say {it} is {that}",
        "do you (think|agree) {it} is {that}", "is it right that {it} is {that}", "isn't {it} {that}",
        "check if {it} is {that}", "in {pic}, is {it} {that}", "{it} is {that}, true or false",
        "{it} is {that}, is that (right|correct|true)", "i think {it} is {that}, is that right",
        "do you see that {it} is {that}", "can you confirm that {it} is {that}",
        "am i right that {it} is {that}", "does it look like {it} is {that}", "please check: is {it} {that}",
        "so is {it} {that}", "!is it the case that {it} is {that}", "!i believe {it} is {that}, correct",
        "!could it be that {it} is {that}", "!can you check whether {it} is {that}",
        "!is it correct that {it} is {that}", "!i would say {it} is {that}. do you agree"],
    # {n} {what}
    "count_is": ["are there {n} {what}{in}", "do you see {n} {what}{in}",
        "are there (exactly|just) {n} {what}{in}", "can you see {n} {what}",
        "does {pic} (have|show|contain) {n} {what}", "is the number of {what} {n}",
        "is it true that there are {n} {what}", "there are {n} {what}, right", "{tell} if there are {n} {what}",
        "{n} {what}, yes or no", "yes or no: are there {n} {what}", "did i draw {n} {what}",
        "i count {n} {what}, is that right", "check if there are {n} {what}", "do you count {n} {what}",
        "there are {n} {what}{in}, true or false", "are {n} {what} (visible|shown){in}",
        "!would you say there are {n} {what}", "!is it correct that there are {n} {what}",
        "!have i drawn {n} {what}", "!could there be {n} {what}{in}", "!i see {n} {what}, do you agree"],
    "number": ["what number is (this|it|that|shown|written{in}|in {pic}|here)", "what is the number{in}",
        "what's the number{in}",
        "which number (is this|is it|do you see{in}|is shown|is in {pic}|is written{in})",
        "read the number{in}", "please read the number", "(can|could) you read the number{in}",
        "what number do you see{in}", "what number can you see{in}", "{tell} the number{in}",
        "{tell} what number this is", "{tell} which number you see", "what does it say", "what does {pic} say",
        "what (is|'s) written (here|in {pic})", "what number does {pic} show", "read (it|this|{pic})",
        "read what is written", "read out the number", "what digits (do you see|are there|are shown){in}",
        "which digits (do you see|are shown){in}", "what are the digits{in}", "read the digits",
        "what number is written", "what number did i (write|draw)", "the number{in}", "what number",
        "which number", "say the number", "give me the number", "what is the number shown",
        "what number appears{in}", "what value is (shown|written){in}", "in {pic}, what number is there",
        "name the number{in}", "what do the digits say", "do you see a number? which",
        "what is the number you see", "transcribe {pic}", "what number is there", "what number is on {pic}",
        "what (figure|number) is printed{in}", "what number have i written", "type the number{in}",
        "what text is in {pic}", "read aloud what you see", "read the text{in}", "!what number can be read{in}",
        "!tell me the digits", "!which number have i written", "!what number is displayed{in}",
        "!could you read this for me", "!write down the number you see", "!please say which number is shown"],
    # two pictures; {p2}: picture
    "more": ["which {p2} has more {what}", "which has more {what}", "which one has more {what}",
        "which {p2} (shows|contains) more {what}", "in which {p2} are there more {what}",
        "which of the (two |){p2}s has more {what}", "where are there more {what}",
        "are there more {what} in the first or (in |)the second {p2}", "{tell} which {p2} has more {what}",
        "compare the {p2}s: which has more {what}", "which {p2} has the most {what}",
        "which {p2} has the (larger|bigger|greater|higher) number of {what}",
        "does the first or the second {p2} have more {what}", "more {what}: first or second",
        "do you see more {what} in the first or (in |)the second {p2}",
        "which {p2} has a larger number of {what}", "compare both {p2}s. which has more {what}",
        "what {p2} has more {what}", "in which of the two are there more {what}",
        "which of these has more {what}", "which of the two has more {what}",
        "who has more {what}, the first or the second",
        "is it the first or the second {p2} that has more {what}",
        "which {p2} has more {what}, the first or the second", "where do you see more {what}",
        "count the {what} in both {p2}s. which has more", "of the two {p2}s, which has more {what}",
        "in which {p2} do you see more {what}", "which {p2} did i draw more {what} in",
        "where can you see more {what}", "find the {p2} with more {what}",
        "which {p2} is the one with more {what}", "!which of both {p2}s shows more {what}",
        "!look at both {p2}s and say which has more {what}", "!what {p2} contains the most {what}",
        "!is the number of {what} larger in the first or in the second {p2}",
        "!which one of them has more {what}", "!where do you count more {what}"],
    # follow-ups: {new} replaces what the last question was about
    "also": ["and {new}", "what about {new}", "how about {new}", "and what about {new}", "{new}",
        "ok, and {new}", "now {new}", "then {new}", "and how about {new}", "same question for {new}",
        "the same for {new}", "and for {new}", "and now {new}", "!okay, what about {new} then",
        "!and the same for {new}", "!next, {new}"],
    # the same question once more, with a new picture
    "this": ["and this", "and this one", "what about this one", "how about this one", "how about this",
        "what about this", "and here", "and in this (picture|image)", "and in this one", "now this one",
        "same question for this one", "the same for this (picture|image)", "and now", "and for this one",
        "here is another one", "next one", "again, for this (picture|image)",
        "and what about this (picture|image)", "another one", "and the next one", "!okay, and this picture",
        "!what about here", "!and for the new one"],
    "hello": ["hello", "hi", "hey", "hello there", "hi there", "hey there",
        "good (morning|evening|afternoon|day)", "greetings", "hallo",
        "hello (model|bot|friend|computer|assistant)", "hi (bot|model|friend|assistant)", "hey you", "howdy",
        "hello again", "hi again", "yo", "welcome", "good to see you", "nice to meet you", "anyone there",
        "are you there", "hello, are you there", "hello, can you hear me", "!hello little model",
        "!hey, good morning", "!hi, nice to meet you", "!hello, anyone there"],
    "how": ["how are you", "how are you (doing|today|doing today)", "how do you do", "how is it going",
        "how's it going", "are you (ok|okay|well|fine)", "how do you feel", "what's up", "whats up",
        "hello, how are you", "hi, how are you", "hey, how are you (today|)",
        "is everything (ok|fine|all right)", "!hi there, how are you doing", "!are you doing well",
        "!how are you feeling today"],
    "who": ["who are you", "what are you", "what is your name", "what's your name", "who am i talking to",
        "who is this", "introduce yourself", "please introduce yourself", "tell me about yourself",
        "tell me something about yourself", "are you a (robot|human|person|bot|machine|model|computer)",
        "what (model|program|kind of model) are you", "which model are you", "do you have a name",
        "who made you", "are you real", "are you (chatgpt|qwen|an ai|a language model)",
        "what should i call you", "say who you are", "and who are you", "hello, who are you",
        "hi, what are you", "what kind of (thing|bot|program) are you", "how big are you",
        "how (large|small) are you", "!may i ask who you are", "!what sort of model are you",
        "!tell me who you are", "!hello, what is your name"],
    "can": ["what can you do", "what do you do", "what are you able to do", "what can i ask (you|)",
        "what do you know", "what are you good at", "how can you help me", "how can you help",
        "can you help me", "help", "help me", "i need help", "what (questions|things) can i ask",
        "what kind of questions can i ask", "what are your (skills|abilities|capabilities)",
        "what can you (see|recognise|understand)", "tell me what you can do", "what should i ask you",
        "what is this program for", "what are you for", "how do i use you", "how does this work",
        "what pictures do you (know|understand)", "do you understand pictures", "can you see pictures",
        "can you read numbers", "can you count", "which shapes do you know", "what shapes do you know",
        "which colours do you know", "what colours do you know", "do you know (shapes|colours|numbers)",
        "!what are you capable of", "!what could i ask you", "!tell me your skills",
        "!what can you help me with"],
    "thanks": ["thanks", "thank you", "thank you (very much|so much|a lot)", "thanks a lot", "many thanks",
        "thx", "thank you, (great|good|nice)", "great, thanks", "ok thanks", "ok, thank you", "cool, thanks",
        "(good|great|nice) (job|work|answer)", "well done", "perfect", "great", "nice", "very good",
        "that is (right|correct|great)", "that's right", "correct", "cheers", "awesome", "cool",
        "thanks for your help", "thank you for the help", "!thanks so much", "!perfect, thank you",
        "!that was great, thanks", "!thank you, well done"],
    "bye": ["bye", "goodbye", "bye bye", "good bye", "see you", "see you (later|soon|tomorrow)", "good night",
        "farewell", "bye for now", "ok bye", "that's all, bye", "i have to go", "i am leaving",
        "until next time", "take care", "so long", "thanks, bye", "quit", "exit", "!bye, see you",
        "!goodbye and thanks", "!i must go now, bye"],
    "off": [
        "write (me |)(a|one) (poem|story|song|letter|joke|essay|email|program|recipe|novel|function|script|tweet|limerick) (about|on|for) {topic}",
        "write (me |)a (poem|story|song|letter|joke|essay|program|recipe)",
        "tell me a (joke|story|secret|riddle)", "tell me about {topic}", "what is the capital of {land}",
        "what's the capital of {land}", "capital of {land}", "where is {land}",
        "how many people live in {land}", "who is the (president|king|queen|leader) of {land}",
        "what is the weather (like |)(today|tomorrow|in {land}|now)", "will it rain (today|tomorrow)",
        "what (time|day|year|date) is it", "who (won|invented|wrote|discovered|painted) {topic}",
        "what is {topic}", "who is {person}", "who was {person}", "explain {topic}",
        "how (do|can) i (cook|bake|build|make|buy|learn|fix) {topic}",
        "translate (this|hello|{topic}) (to|into) (french|german|spanish|chinese)",
        "what is (love|time|life|happiness|music|history|money|physics|the meaning of life)",
        "sing (me |)a song", "do you (like|love|know|have) {topic}",
        "can you (sing|dance|cook|write code|program|play chess|drive|speak french|speak german)", "write code",
        "write a python (program|function|script)", "what do you think (of|about) {topic}",
        "when was {person} born", "when did {topic} begin", "why is the sky blue", "how far is {land}",
        "how old is {person}", "how tall is {person}", "give me (a recipe|advice|money|a name)",
        "let us talk about {topic}", "i (like|love|want|need|hate) {topic}",
        "is {topic} (good|bad|healthy|expensive)", "are {topic} dangerous",
        "recommend (me |)a (book|film|movie|restaurant|song)", "play (a game|music|chess)",
        "what should i (eat|wear|read|watch|buy)( today|)", "solve this equation",
        "what is the square root of {digits}", "what is {digits} (plus|times|minus) {digits}",
        "who is in {pic}", "is there (a|an) {noun}{in}", "where is the {noun}",
        "how many {nouns} are there{in}", "what colour is the {noun}", "do you see (a|an|the) {noun}{in}",
        "is this (a|an) {noun}", "what (breed|kind) of {noun} is this", "is the {noun} (happy|big|old)",
        "what is the {noun} doing", "where was {pic} taken", "who (drew|made|painted|took) {pic}",
        "how old is {pic}", "make {pic} (bigger|smaller|brighter)", "draw (me |)(a|an) {noun}",
        "what is the best {noun}", "which {noun} should i buy", "buy me a {noun}",
        "!who wrote romeo and juliet", "!compose a short poem about the sea", "!how do airplanes fly",
        "!how many {nouns} can you see", "!give me three tips for a good night's sleep",
        "!what is the tallest mountain in the world", "!who is the mayor of london",
        "!what is the boiling point of water", "!can you do my homework", "!what colour are the {nouns}",
        "!can you see the {noun} in {pic}", "!tell me the news of today", "!do you believe in ghosts"],
}
FILL = {
    "topic": ["the sea", "love", "dogs", "cats", "france", "the moon", "cars", "football", "bread", "history",
        "music", "computers", "the war", "spring", "summer", "winter", "my mother", "a house", "chess",
        "python", "a robot", "trees", "birds", "coffee", "pizza", "the internet", "god", "school", "science",
        "gravity", "evolution", "quantum physics", "soup", "a cake", "a bicycle", "climate change", "the sun",
        "rain", "snow", "dinosaurs", "the telephone", "world war two", "art", "politics", "economics", "tea",
        "wine", "flowers", "the olympics", "space travel"],
    "land": ["france", "germany", "spain", "italy", "japan", "china", "india", "england", "russia", "brazil",
        "canada", "egypt", "mexico", "sweden", "kenya", "australia", "poland", "peru", "the usa", "greece",
        "london", "paris", "berlin", "rome", "tokyo", "new york", "the netherlands", "turkey", "norway"],
    "person": ["einstein", "napoleon", "shakespeare", "mozart", "the president", "my father", "obama", "newton",
        "picasso", "cleopatra", "darwin", "the pope", "beethoven", "your boss", "madonna", "julius caesar"],
    "noun": ["dog", "cat", "car", "house", "tree", "man", "woman", "child", "person", "bird", "boat", "bike",
        "flower", "horse", "table", "chair", "cup", "apple", "banana", "ball", "phone", "computer", "plane",
        "train", "face", "hat", "book", "fish", "cow", "bus", "heart", "key", "door", "window", "mountain",
        "river"],
    "nouns": ["dogs", "cats", "cars", "houses", "trees", "men", "women", "people", "children", "birds", "boats",
        "bikes", "flowers", "horses", "tables", "chairs", "cups", "apples", "bananas", "phones", "planes",
        "trains", "faces", "hats", "books", "fish", "cows", "hearts", "keys", "windows", "mountains"],
}
# fmt: on

ANSWERS = {
    "hello": "hello! how can i help?",
    "how": "i am fine, thank you.",
    "who": "i am a small model. i know shapes, colours and numbers.",
    "can": "i can name shapes and colours, count them, say where they are and read numbers.",
    "thanks": "you are welcome.",
    "bye": "goodbye!",
    "off": "i only know shapes, colours and numbers.",
    "blind": "i see no picture. please show me one.",
}
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "Answer briefly.",
    "You are a friendly model that looks at pictures.",
    "Answer the question.",
    "You are an assistant. Be short and clear.",
    "You are a vision model.",
    "Be helpful and honest.",
    "Please answer questions about the image.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "Keep your answers short.",
    "you describe pictures",
    "You are a helpful, harmless and honest assistant.",
]


def expand(rng, text):
    """One random reading of a wording: innermost choices first, then macros, until nothing is left."""
    while True:
        m = re.search(r"\(([^()]*)\)", text)
        if m:
            options = m.group(1).split("|")
            text = text[: m.start()] + options[rng.integers(len(options))] + text[m.end() :]
            continue
        m = re.search(r"\{(\w+)\}", text)
        if not m:
            return re.sub(r" +", " ", text).strip()
        k = m.group(1)
        if k == "digits":
            new = str(rng.integers(2, 100))
        else:
            new = MACROS[k] if k in MACROS else FILL[k][rng.integers(len(FILL[k]))]
        text = text[: m.start()] + new + text[m.end() :]


SPLIT = {k: ([t for t in v if t[0] != "!"], [t[1:] for t in v if t[0] == "!"]) for k, v in WORDINGS.items()}
BEFORE = [
    "please, ",
    "hey, ",
    "hi, ",
    "ok, ",
    "so, ",
    "now, ",
    "tell me, ",
    "well, ",
    "hello, ",
    "one question: ",
    "look at the picture. ",
    "look closely: ",
    "question: ",
    "excuse me, ",
    "and ",
    "next: ",
]
AFTER = [", please", " please", ", thanks", " exactly", " now", ", do you know", ", can you tell"]
IMPERATIVE = re.compile(
    r"^(please |)(name|describe|identify|list|caption|give|write|say|locate|find|count|read|show|point|help|tell|look|"
    r"check|sing|draw|play|explain|type|guess|transcribe|summari|compare|buy|make|i |let|wr|put|enumerate)"
)


def say(rng, key, unseen=False, plain=False, **slots):
    """A wording of kind key with its slots filled in, then dressed as people type: case, marks, courtesies."""
    bank = SPLIT[key][1 if unseen else 0]
    text = bank[rng.integers(len(bank))]
    while text[0] == "~" and slots["it"] in ("it", "this"):
        text = bank[rng.integers(len(bank))]
    text = text.lstrip("~")
    for k, v in slots.items():
        text = text.replace("{" + k + "}", v)
    text = expand(rng, text)
    chat = key in ("hello", "thanks", "bye")
    return text if plain else dress(rng, text, not chat, not chat)


def dress(rng, text, courtesy=True, asks=True):
    asks = asks and not IMPERATIVE.match(text)
    if courtesy and rng.random() < 0.1:
        text = BEFORE[rng.integers(len(BEFORE))] + text
    elif courtesy and rng.random() < 0.06:
        text = text + AFTER[rng.integers(len(AFTER))]
    if rng.random() < 0.4:
        text = text.replace("colour", "color")
    r = rng.random()
    if r < 0.5:
        text = text[0].upper() + text[1:]
        text = re.sub(r"\bi\b", "I", text)
        text = re.sub(r"([.:?] )(\w)", lambda m: m.group(1) + m.group(2).upper(), text)
    elif r < 0.53:
        text = text.upper()
    r = rng.random()
    if asks:
        return text + (
            "?" if r < 0.7 else "" if r < 0.95 else " ?" if r < 0.97 else "??" if r < 0.98 else "."
        )
    return text + ("." if r < 0.4 else "" if r < 0.92 else "!" if r < 0.96 else "?")


# ---------------------------------------------------------------------------------------------
# 5. Questions and answers


@dataclass
class Question:
    """One turn. look: what each piece of the answer rests on, for the attention lessons of train.py:
    for each of the two taught heads (picture, [things])."""

    skill: str
    key: str
    slots: dict
    pieces: list  # [(text, ((picture, things), (picture, things)))]; the answer is the texts joined
    text: str = ""
    pictures: int = 0  # new pictures that come with this turn

    @property
    def answer(self):
        return "".join(t for t, _ in self.pieces)

    def moved(self, picture):
        """The same question when the scene is not the chat's first picture."""
        self.pieces = [(t, tuple((picture, things) for _, things in look)) for t, look in self.pieces]
        return self


PLACES = {  # column, row (0 1 2, None: any) -> what people call it
    "at the top left": (0, 0),
    "at the top": (None, 0),
    "at the top right": (2, 0),
    "on the left": (0, None),
    "in the middle": (1, 1),
    "on the right": (2, None),
    "at the bottom left": (0, 2),
    "at the bottom": (None, 2),
    "at the bottom right": (2, 2),
}
GRID = [
    ["at the top left", "at the top", "at the top right"],
    ["on the left", "in the middle", "on the right"],
    ["at the bottom left", "at the bottom", "at the bottom right"],
]
PLACE_WORDS = {
    "on the left": "(on the left|on the left|on the left side|at the left|to the left|on the left hand side)",
    "on the right": "(on the right|on the right|on the right side|at the right|to the right|on the right hand side)",
    "at the top": "(at the top|at the top|on top|in the upper part|on the top|at the upper edge)",
    "at the bottom": "(at the bottom|at the bottom|on the bottom|in the lower part|at the lower edge)",
    "in the middle": "(in the middle|in the middle|in the (center|centre)|at the (center|centre))",
}
for _row, _other in (("top", "upper"), ("bottom", "lower")):
    for _side in ("left", "right"):
        _p = f"({_row}|{_other}) {_side}"
        PLACE_WORDS[f"at the {_row} {_side}"] = (
            "({at} the %s|{at} the %s|in the %s corner|{at} the %s side)" % ((_p,) * 4)
        )
MACROS["at"] = "(at|in|on)"


def zone(v):
    """0, 1, 2 along an axis, or None in the doubtful strips between."""
    return 0 if v < 0.31 else 1 if 0.44 <= v <= 0.56 else 2 if v > 0.69 else None


def plural(s):
    return s + ("es" if s.endswith("ss") else "s")


def both(things, picture=0):
    return ((picture, things),) * 2


def name(t):
    return f"a {t.colour} {t.kind}"


def listing(scene, first="", last=""):
    """Pieces naming all things from left to right, each resting on its own thing."""
    if scene.number:
        pieces = [(first + "the number ", both([0]))]
        return (
            pieces
            + [(c, both([i])) for i, c in enumerate(scene.number)]
            + ([(last, both([len(scene.number) - 1]))] if last else [])
        )
    n = len(scene.things)
    pieces = []
    for i, t in enumerate(scene.things):
        lead = first if i == 0 else " and " if i == n - 1 else ", "
        pieces.append((lead + name(t) + (last if i == n - 1 else ""), both([i])))
    return pieces


class Asker:
    """Draws questions about scenes. It keeps count of what it asked, so that every yes/no question
    and every comparison has each answer equally often, and its text alone tells nothing."""

    def __init__(self, rng):
        self.rng, self.seen = rng, {}

    def pick(self, options):
        return options[self.rng.integers(len(options))]

    def balanced(self, kind, options):
        """options: [(value, truth, more)]: one whose truth is overdue for its value."""
        truths = ("first", "second", "same") if kind == "more" else (True, False)
        total = self.seen.setdefault(kind, dict.fromkeys(truths, 0))

        def debt(value, truth, *_):
            counts = self.seen.setdefault((kind, value), dict.fromkeys(truths, 0))
            return 2 * (counts[truth] - min(counts.values())) + min(3, total[truth] - min(total.values()))

        debts = [debt(*o) for o in options]
        choice = self.pick([o for o, d in zip(options, debts) if d == min(debts)])
        total[choice[1]] += 1
        self.seen[kind, choice[0]][choice[1]] += 1
        return choice

    # ---- what can be asked of one scene; each returns a Question or None

    def references(self, scene, attribute=None):
        """[(thing's index, what to call it)], leaving the attribute asked about unsaid."""
        out = []
        ts = scene.things
        for i, t in enumerate(ts):
            if attribute != "shape" and sum(o.kind == t.kind for o in ts) == 1:
                out.append((i, f"the {t.kind}"))
            if attribute != "colour" and sum(o.colour == t.colour for o in ts) == 1:
                out.append((i, f"the {t.colour} {self.pick(['one', 'thing', 'object', 'shape'])}"))
            if attribute is None and sum(name(o) == name(t) for o in ts) == 1:
                out += [(i, f"the {t.colour} {t.kind}")] * 2
        if len(ts) == 1:
            out += [(0, self.pick(["it", "it", "this", "the thing", "the shape", "the object"]))] * (
                2 if attribute else 1
            )
        return out

    def missing(self, scene, attribute):
        """A thing that is not there, and the answer that says so."""
        if attribute == "shape":
            absent = [c for c in COLOURS if all(t.colour != c for t in scene.things)]
            c = self.pick(absent) if absent else ""
            return absent and (
                f"the {c} {self.pick(['one', 'thing', 'object', 'shape'])}",
                f"there is no {c} thing.",
            )
        absent = [k for k in SHAPES if all(t.kind != k for t in scene.things)]
        if not absent:
            return None
        k = self.pick(absent)
        if attribute == "where" and self.rng.random() < 0.5:
            k = self.pick(COLOURS) + " " + k
        return f"the {k}", f"there is no {k}."

    def ask_name(self, s):
        if s.number:
            return Question("number", "name", {}, listing(s))
        if not s.things:
            return Question("describe", "name", {}, [("nothing", both([]))])
        return (
            Question("name" if len(s.things) == 1 else "describe", "name", {}, listing(s))
            if self.ordered(s)
            else None
        )

    def ordered(self, s):
        """Left to right is clear."""
        return all(b.x - a.x > 9 for a, b in zip(s.things, s.things[1:]))

    def ask_describe(self, s):
        if not s.things:
            return Question("describe", "describe", {}, [("the picture is empty.", both([]))])
        return Question("describe", "describe", {}, listing(s, "there is ", ".")) if self.ordered(s) else None

    def ask_colour(self, s):
        if s.number:
            return Question(
                "colour",
                "colour",
                {"it": self.pick(["the number", "the number", "it", "the text"])},
                [(s.things[0].colour, both([0]))],
            )
        gone = self.missing(s, "colour") if self.rng.random() < 0.06 or not s.things else None
        if gone:
            it, no = gone
            return Question("absent", "colour", {"it": it}, [(no, both([]))])
        refs = self.references(s, "colour")
        if refs:
            i, it = self.pick(refs)
            return Question("colour", "colour", {"it": it}, [(s.things[i].colour, both([i]))])

    def ask_shape(self, s):
        if s.number:
            return None
        gone = self.missing(s, "shape") if self.rng.random() < 0.06 or not s.things else None
        if gone:
            it, no = gone
            return Question("absent", "shape", {"it": it}, [(no, both([]))])
        refs = self.references(s, "shape")
        if refs:
            i, it = self.pick(refs)
            return Question("shape", "shape", {"it": it}, [("a " + s.things[i].kind, both([i]))])

    def ask_where(self, s):
        if s.number:
            return None
        gone = self.missing(s, "where") if self.rng.random() < 0.06 or not s.things else None
        if gone:
            it, no = gone
            return Question("absent", "where", {"it": it}, [(no, both([]))])
        refs = [r for r in self.references(s) if None not in map(zone, s.place(s.things[r[0]]))]
        if refs:
            i, it = self.pick(refs)
            x, y = map(zone, s.place(s.things[i]))
            return Question("where", "where", {"it": it}, [(GRID[y][x], both([i]))])

    def ask_at(self, s):
        if s.number:
            return None
        options = []
        for p, (px, py) in PLACES.items():
            # inside: surely there; near: perhaps there, and then the question is not asked
            inside = near = 0
            for i, t in enumerate(s.things):
                zs = [(zone(v), v, w) for v, w in zip(s.place(t), (px, py)) if w is not None]
                if all(z == w for z, _, w in zs):
                    inside, found = inside + 1, i
                elif all(z == w or z is None and abs(v - (0.15, 0.5, 0.85)[w]) < 0.32 for z, v, w in zs):
                    near += 1
            if near == 0 and inside <= 1:
                options.append((p, found if inside else None))
        full = [o for o in options if o[1] is not None]
        options = full if full and self.rng.random() < 0.75 else options
        if options:
            p, i = self.pick(options)
            answer = ("nothing", both([])) if i is None else (name(s.things[i]), both([i]))
            return Question("at", "at", {"p": PLACE_WORDS[p]}, [answer])

    def count_target(self, s):
        """(words, the things meant)"""
        r = self.rng.random() if not s.number else 0.5 + 0.5 * (self.rng.random() < 0.5)
        ts = s.things if not s.number else []
        shape, colour = self.pick(SHAPES), self.pick(COLOURS)
        if ts and self.rng.random() < 0.65:
            t = self.pick(ts)
            shape, colour = t.kind, t.colour
        if r < 0.3:
            return "{things}", list(range(len(ts)))
        if r < 0.62:
            return plural(shape), [i for i, t in enumerate(ts) if t.kind == shape]
        if r < 0.85:
            return colour + " {things}", [i for i, t in enumerate(ts) if t.colour == colour]
        return f"{colour} {plural(shape)}", [
            i for i, t in enumerate(ts) if (t.kind, t.colour) == (shape, colour)
        ]

    def ask_count(self, s):
        if s.number and self.rng.random() < 0.7:
            return None
        what, found = self.count_target(s)
        return Question("count", "count", {"what": what}, [(NUMBER_WORDS[len(found)], both(found))])

    def ask_yesno(self, s):
        r = self.rng.random()
        q = (
            self.exists(s)
            if r < 0.42 or s.number
            else self.attribute(s) if r < 0.66 else self.is_at(s) if r < 0.84 else self.count_is(s)
        )
        return q

    def yes(self, key, slots, truth, found):
        return Question("yes/no", key, slots, [("yes" if truth else "no", both(found))])

    def exists(self, s):
        ts = [] if s.number else s.things
        options = []
        for k in SHAPES:
            found = [i for i, t in enumerate(ts) if t.kind == k]
            options.append((k, bool(found), found))
        for c in COLOURS:
            found = [i for i, t in enumerate(ts) if t.colour == c]
            if not s.number:
                options.append((c + " {thing}", bool(found), found))
            for k in SHAPES:
                both_ = [i for i in found if ts[i].kind == k]
                # a red circle that is not there is worth asking when something red or a circle is
                if both_ or found or any(t.kind == k for t in ts):
                    options.append((f"{c} {k}", bool(both_), both_))
        options.append(("number", bool(s.number), list(range(len(s.number)))))
        kind = self.rng.random()  # the three kinds equally often, though the last has many more members
        options = [o for o in options if (" " in o[0] and "{" not in o[0]) == (kind < 0.45)] or options
        if kind > 0.95:
            options = options[-1:]
        word, truth, found = self.balanced("exists", options)
        slots = {
            "a": "a " + word,
            "one": word,
            "as": word.replace("{thing}", "{things}") if "{" in word else plural(word),
        }
        return self.yes("exists", slots, truth, found)

    def attribute(self, s):
        options = []
        for i, it in self.references(s, "colour"):
            options += [((it, c), s.things[i].colour == c, i) for c in COLOURS]
        for i, it in self.references(s, "shape"):
            options += [((it, "a " + k), s.things[i].kind == k, i) for k in SHAPES]
        if not options:
            return None
        (it, that), truth, i = self.balanced("is", options)
        return self.yes("is", {"it": it, "that": that}, truth, [i])

    def is_at(self, s):
        options = []
        for i, it in self.references(s):
            zx, zy = map(zone, s.place(s.things[i]))
            for p, (px, py) in PLACES.items():
                doubt = px is not None and zx is None or py is not None and zy is None
                if not doubt:
                    options.append((p, px in (None, zx) and py in (None, zy), i, it))
        if not options:
            return None
        p, truth, i, it = self.balanced("at", options)
        return self.yes("is", {"it": it, "that": PLACE_WORDS[p]}, truth, [i])

    def count_is(self, s):
        options = []
        for _ in range(4):
            what, found = self.count_target(s)
            options += [((n, what), n == len(found), found) for n in range(2, 6) if n <= len(s.things) + 1]
        if not options:
            return None
        (n, what), truth, found = self.balanced("count", options)
        return self.yes(
            "count_is",
            {"n": NUMBER_WORDS[n] if self.rng.random() < 0.75 else str(n), "what": what},
            truth,
            found,
        )

    def ask_number(self, s):
        if not s.number:
            return Question("absent", "number", {}, [("there is no number.", both([]))])
        return Question("number", "number", {}, [(c, both([i])) for i, c in enumerate(s.number)])

    MIX = {
        "name": 1.2,
        "describe": 0.9,
        "colour": 1,
        "shape": 1,
        "where": 1.6,
        "at": 1.3,
        "count": 1.9,
        "yesno": 2.3,
        "number": 0.12,
    }
    NUMBER_MIX = {"name": 1, "describe": 0.5, "colour": 0.7, "count": 0.2, "yesno": 0.6, "number": 4}

    def question(self, scene, kind=None, unseen=False):
        """A question about one scene, in words."""
        mix = self.NUMBER_MIX if scene.number else self.MIX
        w = np.cumsum(list(mix.values()))
        for _ in range(30):
            k = kind or list(mix)[int(np.searchsorted(w, self.rng.random() * w[-1], side="right"))]
            q = getattr(self, "ask_" + k)(scene)
            if q:
                q.text = say(self.rng, q.key, unseen, **q.slots)
                return q
            if kind:
                return None
        q = self.ask_count(scene) or self.ask_number(scene)
        q.text = say(self.rng, q.key, unseen, **q.slots)
        return q

    # ---- two pictures

    ORDER = {"picture": "(picture|image|picture|image|one|photo|drawing)"}

    def about(self, scenes, which, kind=None, unseen=False):
        """A question about one of two pictures, which it names: "in the second picture"."""
        q = self.question(scenes[which], kind)
        label = (
            ("the first", "the second")[which] + " {pword}"
            if self.rng.random() < 0.7
            else "{pword} " + (("1", "one"), ("2", "two"))[which][self.rng.integers(2)]
        )
        label = label.replace("{pword}", self.pick(["picture", "picture", "image", "photo"]))
        bank = [t.lstrip("~") for t in SPLIT[q.key][1 if unseen else 0] if t[0] != "~"]
        inside = [t for t in bank if "{pic}" in t or "{in}" in t]
        if inside and self.rng.random() < 0.6:
            text = self.pick(inside).replace("{pic}", label).replace("{in}", " in " + label)
        else:
            plain = [t for t in bank if "{pic}" not in t] or ["what is there"]
            text = self.pick(plain).replace("{in}", "")
            text = self.pick(
                [
                    f"in {label}, {text}",
                    f"{text} in {label}",
                    f"{text} in {label}",
                    f"{label}: {text}",
                    f"look at {label}. {text}",
                    f"{text}, in {label}",
                ]
            )
        for k, v in q.slots.items():
            text = text.replace("{" + k + "}", v)
        q.text = dress(self.rng, expand(self.rng, text), False)
        q.skill = "one of two"
        return q.moved(which)

    def more(self, scenes, unseen=False):
        """Which of two pictures has more?"""
        options = [self.more_option(scenes, "{things}", lambda t: True)] * 2
        options += [self.more_option(scenes, plural(k), lambda t, k=k: t.kind == k) for k in SHAPES]
        options += [self.more_option(scenes, c + " {things}", lambda t, c=c: t.colour == c) for c in COLOURS]
        options = [o for o in options if o[2] or o[3]]
        if not options:
            return None
        if self.rng.random() < 0.45 and options[0][0] == "{things}":
            options = options[:1]
        what, truth, a, b = self.balanced("more", options)
        answer = {"first": "the first", "second": "the second", "same": "both have the same number"}[truth]
        word = self.pick(["picture", "picture", "image", "photo", "one"])
        q = Question("more", "more", {"what": what, "p2": word}, [(answer, ((0, a), (1, b)))])
        if word == "one":  # "compare the ones" is nobody's wording
            q.slots["p2"] = "picture"
        q.text = say(self.rng, "more", unseen, **q.slots)
        return q

    def more_option(self, scenes, what, test):
        a, b = ([i for i, t in enumerate(s.things) if test(t) and not s.number] for s in scenes)
        return what, "first" if len(a) > len(b) else "second" if len(b) > len(a) else "same", a, b

    # ---- turns

    def follow_up(self, scene, unseen=False):
        """Two turns of one kind, the second one elliptic: "and the star?" """
        for _ in range(20):
            kind = self.pick(["colour", "shape", "where", "count", "exists", "at"])
            if kind == "exists":
                a, b = self.exists(scene), self.exists(scene)
                slot = "a"
            else:
                a, b = getattr(self, "ask_" + kind)(scene), getattr(self, "ask_" + kind)(scene)
                slot = {"count": "what", "at": "p"}.get(kind, "it")
            if not a or not b or a.slots[slot] == b.slots[slot] or b.slots[slot] in ("it", "this"):
                continue
            if "it" in (a.slots[slot], b.slots[slot]) or "absent" in (a.skill,):
                continue
            a.text = say(self.rng, a.key, **a.slots)
            new = b.slots[slot]
            b.text = say(self.rng, "also", unseen, new=new)
            b.skill = "follow-up"
            return [a, b]
        return None

    def next_picture(self, scenes, unseen=False):
        """Two turns, each with a picture of its own: the same question again, or a new one about the new picture."""
        kind = self.pick(["name", "describe", "count", "colour", "where", "at", "number", "shape"])
        if scenes[0].number and scenes[1].number:
            kind = self.pick(["name", "number"])
        a = (
            self.question(scenes[0], kind)
            or self.question(scenes[0], "name")
            or self.question(scenes[0], "count")
        )
        b = None
        if self.rng.random() < 0.5 and a.skill != "absent" and a.key == kind:
            for _ in range(60):  # the same question must make sense of the new picture
                b = getattr(self, "ask_" + kind)(scenes[1])
                if (
                    b
                    and b.key == a.key
                    and b.skill != "absent"
                    and all(b.slots[k] == v for k, v in a.slots.items())
                ):
                    b.text = say(self.rng, "this", unseen)
                    break
                b = None
        b = b or self.question(scenes[1], unseen=unseen)
        b.skill = "new picture"
        a.pictures = b.pictures = 1
        return [a, b.moved(1)]

    def chat(self, key, unseen=False):
        return Question(
            "chat" if key != "off" else "off-topic",
            key,
            {},
            [(ANSWERS[key], None)],
            say(self.rng, key, unseen),
        )

    def blind(self, unseen=False):
        """A question about a picture when there is none."""
        scene = number_scene(self.rng) if self.rng.random() < 0.2 else shapes_scene(self.rng)
        q = self.question(scene, unseen=unseen)
        return Question("no picture", q.key, {}, [(ANSWERS["blind"], None)], q.text)


# ---------------------------------------------------------------------------------------------
# 6. Sample pictures for people to try: python3 world.py FOLDER

WHITE, CREAM, SKY, NIGHT, GREY = (
    (255, 255, 255),
    (250, 243, 224),
    (205, 228, 250),
    (38, 42, 66),
    (200, 200, 204),
)
SAMPLES = {  # name: width, height, ground, things (what, colour, x, y, size: fractions; turn) or a number
    "one.png": (400, 300, (WHITE, WHITE, 0.0), [("circle", "red", 0.5, 0.5, 0.45, 0)]),
    "three.png": (
        640,
        480,
        (CREAM, CREAM, 0.0),
        [
            ("square", "blue", 0.2, 0.5, 0.3, 8),
            ("star", "green", 0.5, 0.5, 0.34, 0),
            ("triangle", "purple", 0.8, 0.5, 0.32, 0),
        ],
    ),
    "four.jpg": (
        800,
        600,
        (NIGHT, (70, 60, 90), 1.2),
        [
            ("star", "yellow", 0.2, 0.25, 0.22, 0),
            ("star", "yellow", 0.5, 0.7, 0.24, 12),
            ("circle", "red", 0.8, 0.3, 0.22, 0),
            ("star", "yellow", 0.82, 0.78, 0.2, -8),
        ],
    ),
    "corners.jpg": (
        1200,
        900,
        (SKY, WHITE, 1.57),
        [
            ("triangle", "red", 0.16, 0.2, 0.24, 0),
            ("cross", "blue", 0.84, 0.2, 0.24, 0),
            ("circle", "green", 0.16, 0.82, 0.22, 0),
            ("square", "black", 0.84, 0.82, 0.22, 0),
        ],
    ),
    "five.png": (
        520,
        520,
        (WHITE, WHITE, 0.0),
        [
            ("circle", "blue", 0.15, 0.2, 0.2, 0),
            ("circle", "blue", 0.5, 0.18, 0.2, 0),
            ("cross", "red", 0.84, 0.3, 0.2, 10),
            ("circle", "green", 0.3, 0.75, 0.2, 0),
            ("square", "blue", 0.75, 0.78, 0.2, 0),
        ],
    ),
    "small.png": (100, 100, (GREY, GREY, 0.0), [("square", "green", 0.5, 0.5, 0.45, 0)]),
    "tall.png": (
        300,
        540,
        (WHITE, CREAM, 1.57),
        [("triangle", "black", 0.5, 0.2, 0.4, 0), ("circle", "yellow", 0.5, 0.8, 0.4, 0)],
    ),
    "wide.jpg": (
        900,
        450,
        (CREAM, CREAM, 0.0),
        [
            ("circle", "red", 0.18, 0.5, 0.4, 0),
            ("circle", "purple", 0.5, 0.5, 0.4, 0),
            ("square", "red", 0.82, 0.5, 0.38, 0),
        ],
    ),
    "left.png": (
        300,
        300,
        (WHITE, WHITE, 0.0),
        [("star", "blue", 0.3, 0.3, 0.3, 0), ("star", "red", 0.7, 0.7, 0.3, 0)],
    ),
    "right.png": (
        320,
        280,
        (SKY, SKY, 0.0),
        [
            ("star", "blue", 0.2, 0.3, 0.3, 0),
            ("star", "red", 0.5, 0.72, 0.3, 0),
            ("star", "purple", 0.8, 0.3, 0.3, 0),
        ],
    ),
    "empty.png": (200, 200, (CREAM, CREAM, 0.0), []),
    "42.png": (320, 220, (WHITE, WHITE, 0.0), "42"),
    "738.jpg": (1000, 500, (SKY, WHITE, 0.5), "738"),
    "6.png": (140, 140, (NIGHT, NIGHT, 0.0), "6"),
}


def sample(width, height, ground, content):
    s = Scene(width, height, ground=ground)
    w, h = s.resized
    if isinstance(content, str):
        s.number, s.font = content, FONTS[0]
        high = min(0.5 * h, 0.8 * w / len(content))
        ink = "yellow" if ground[0] == NIGHT else "blue"
        s.things = [
            Thing(c, ink, w / 2 + (i - (len(content) - 1) / 2) * high * 0.8, h / 2, high, PURE[ink])
            for i, c in enumerate(content)
        ]
        return s
    bright = dict(PURE, green=(30, 160, 60), purple=(140, 40, 170))
    s.things = sorted(
        (Thing(k, c, x * w, y * h, z * min(w, h), bright[c], turn) for k, c, x, y, z, turn in content),
        key=lambda t: t.x,
    )
    return s


def house():
    """A drawn house with a tree: not of this world."""
    image = Image.new("RGB", (600, 450), (190, 220, 250))
    d = ImageDraw.Draw(image)
    d.rectangle((0, 330, 600, 450), fill=(120, 180, 90))
    d.rectangle((120, 190, 320, 350), fill=(225, 200, 160), outline=(90, 70, 50), width=4)
    d.polygon([(95, 195), (220, 95), (345, 195)], fill=(150, 60, 45))
    d.rectangle((200, 265, 250, 350), fill=(100, 65, 40))
    for x in (145, 265):
        d.rectangle((x, 215, x + 35, 250), fill=(235, 245, 255), outline=(90, 70, 50), width=3)
    d.rectangle((450, 240, 475, 350), fill=(100, 70, 45))
    d.ellipse((395, 120, 530, 260), fill=(60, 130, 60))
    return image


def plot():
    """A line plot with a scribbled curve: not of this world either."""
    image = Image.new("RGB", (480, 360), WHITE)
    d = ImageDraw.Draw(image)
    d.line([(50, 20), (50, 310), (460, 310)], fill=(0, 0, 0), width=3)
    x = np.arange(50, 455, 3)
    for ink, a, b in (((30, 90, 200), 28.0, 0.0), ((210, 80, 40), 45.0, 1.3)):
        y = 170 - 90 * np.sin(x / a + b) * np.exp(-(x - 50) / 380) + 8 * np.sin(x / 4.7)
        d.line(list(zip(x.tolist(), y.tolist())), fill=ink, width=3)
    for k in range(6):
        d.line([(110 + 60 * k, 305), (110 + 60 * k, 316)], fill=(0, 0, 0), width=2)
    return image


def write_samples(folder):
    os.makedirs(folder, exist_ok=True)
    images = {k: render(sample(*v)) for k, v in SAMPLES.items()} | {"house.png": house(), "plot.png": plot()}
    for k, image in images.items():
        image.save(os.path.join(folder, k), **({"quality": 88} if k.endswith("jpg") else {"optimize": True}))


if __name__ == "__main__":
    write_samples(sys.argv[1])
