"""image.c against Pillow: decoding, upright turning, background, sizes, resize, keys, patches, and what is refused.

PNG, GIF, BMP and the resize are compared for equality. JPEG is not: stb_image and libjpeg-turbo both follow the
standard but round the inverse DCT, the interpolation of subsampled colour and the colour conversion differently.
Measured on the photo-like pictures below: 2 levels and a mean of 0.02 at 4:4:4, 3 levels and 0.15 at 4:2:0,
4 levels and 0.22 at 4:2:2, whose last column but one stb_image also takes from the wrong neighbour (13 levels).
"""
import io, pathlib, struct, subprocess, zlib
import numpy as np
import PIL
import pytest
from PIL import Image, ImageOps
from conftest import BUILD

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
LIMIT = 16 << 20
TAKEN = "taken are JPEG, PNG, GIF, BMP"


class Refused(Exception):
    def __init__(self, line):
        _, status, self.message = line.split(" ", 2)
        self.status = int(status)
        # fixed texts: no path, no pointer, nothing of the decoder's
        assert self.status in (400, 413) and 10 < len(self.message) < 200
        assert "/" not in self.message and "0x" not in self.message and self.message.isprintable()
        super().__init__(line)


class Loaded:
    pass


class Driver:
    """test/image.c, kept running."""

    def __init__(self):
        self.p = subprocess.Popen([str(BUILD / "test_image")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.config()

    def say(self, text, data=b""):
        self.p.stdin.write(text.encode() + b"\n" + data)
        self.p.stdin.flush()

    def line(self):
        line = self.p.stdout.readline().decode().rstrip("\n")
        assert line, f"the driver ended with {self.p.wait()}"
        if line.startswith("error "):
            raise Refused(line)
        return line.split()

    def config(self, min=3136, max=12845056, background=(255, 255, 255), limit=LIMIT, patch=14, merge=2, temporal=2,
               mean=MEAN, std=STD):
        numbers = [patch, merge, temporal, min, max, *background, limit, *map(np.float32, mean), *map(np.float32, std)]
        self.say("config " + " ".join(map(str, numbers)))

    def fit(self, height, width):
        self.say(f"fit {height} {width}")
        return tuple(map(int, self.line()))

    def load(self, data):
        self.say(f"load {len(data)}", data)
        f = self.line()
        im = Loaded()
        im.width, im.height, im.source_width, im.source_height = map(int, f[:4])
        im.key, im.peak, im.workspace, im.seconds = f[4], int(f[5]), int(f[6]), int(f[7]) / 1e6
        im.pixels = np.frombuffer(self.p.stdout.read(im.width * im.height * 3), np.uint8).reshape(im.height, im.width, 3)
        assert 0 < im.peak <= im.workspace
        return im

    def patches(self, bf16=False, order=()):
        self.say(" ".join(map(str, ["patches", int(bf16), len(order), *order])))
        return self.p.stdout.read(int(self.line()[0]))

    def flip(self, seed, count, data):
        self.say(f"flip {seed} {count} {len(data)}", data)
        return int(self.line()[0])


@pytest.fixture(scope="module")
def running():
    d = Driver()
    yield d
    d.p.stdin.close()
    assert d.p.wait() == 0


@pytest.fixture
def d(running):
    running.config()
    return running


def encode(im, format, **kw):
    f = io.BytesIO()
    im.save(f, format, **kw)
    return f.getvalue()


def photo(width, height, seed=1):
    """Smooth areas, edges and texture."""
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    rgb = [np.sin(x * 7 + y * 3 + c) * 60 + np.cos(y * 11 - x * 5 * (c + 1)) * 50 + 128 for c in range(3)]
    rgb = np.stack(rgb, -1) + ((x - 0.5) ** 2 + (y - 0.3) ** 2 < 0.04)[..., None] * np.array([80, -60, 30])
    rgb += np.random.default_rng(seed).normal(0, 6, rgb.shape)
    return Image.fromarray(rgb.clip(0, 255).astype(np.uint8))


def bicubic(im, width, height):
    """Pillow 13's resize, with any Pillow: earlier ones take the columns first even where it starts with the rows."""
    rows_first = im.height > height and im.height - height > 2 * (im.width - width)
    between = (im.width, height) if rows_first else (width, im.height)
    want = np.asarray(im.resize(between, Image.BICUBIC).resize((width, height), Image.BICUBIC))
    if int(PIL.__version__.split(".")[0]) == 13:
        assert np.array_equal(want, im.resize((width, height), Image.BICUBIC))
    return want


def noise(shape, seed=2, dtype=np.uint8):
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max + 1, shape, dtype)


def refuse(d, data, status, message):
    with pytest.raises(Refused) as e:
        d.load(data)
    assert (e.value.status, e.value.message) == (status, message)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth, color, rows, *chunks, interlace=0):
    """A PNG by hand: Pillow does not write every kind. `rows`: with their filter bytes."""
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(chunks) + chunk(b"IDAT", zlib.compress(rows, 6)) +
            chunk(b"IEND", b""))


def rows_of(samples, depth, interlace=0):
    """(height, width, samples) of unsigned integers as unfiltered PNG rows; interlaced: Adam7's seven passes."""
    out = b""
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    for x, y, dx, dy in passes if interlace else [(0, 0, 1, 1)]:
        part = samples[y::dy, x::dx]
        for row in part if part.shape[1] else []:
            bits = "".join(format(v, f"0{depth}b") for v in row.reshape(-1).tolist())
            bits += "0" * (-len(bits) % 8)
            out += b"\0" + int(bits, 2).to_bytes(len(bits) // 8, "big")
    return out


def white(rgba):
    """Lay (..., 4) on white as image.c does: exact, rounded."""
    rgb, a = rgba[..., :3].astype(int), rgba[..., 3:].astype(int)
    return ((2 * (rgb * a + 255 * (255 - a)) + 255) // 510).astype(np.uint8)


# Sizes ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("source, out", [
    ((1, 1), (56, 56)), ((26, 28), (56, 84)), ((27, 332), (28, 336)), ((42, 42), (56, 56)), ((70, 98), (56, 112)),
    ((98, 70), (112, 56)), ((14, 2800), (28, 812)), ((700, 420), (700, 420)), ((720, 1280), (728, 1288)),
    ((1080, 1920), (1092, 1932)), ((1000, 1000), (1008, 1008)), ((3000, 4000), (2996, 4004)),
    ((4284, 5712), (3080, 4116)), ((12000, 12000), (3584, 3584))])
def test_fit(d, source, out):
    assert d.fit(*source) == out


def test_fit_limits(d):
    d.config(max=1280 * 784)
    assert d.fit(1080, 1920) == (728, 1316)
    for h, w in (14, 2801), (2801, 14):
        with pytest.raises(Refused) as e:
            d.fit(h, w)
        assert e.value.status == 400 and "over 200 times" in e.value.message
    for h, w in (0, 5), (5, 0):
        with pytest.raises(Refused):
            d.fit(h, w)


def smart_resize(height, width, factor, min_pixels, max_pixels):
    """transformers' image_processing_qwen2_vl.py, retold."""
    import math
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        return (max(factor, math.floor(height / beta / factor) * factor),
                max(factor, math.floor(width / beta / factor) * factor))
    if h * w < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return h, w


def test_fit_random(d):
    rng = np.random.default_rng(3)
    for limits in dict(min=3136, max=12845056), dict(min=100352, max=401408):
        d.config(**limits)
        for _ in range(500):
            w = int(np.exp(rng.uniform(0, 9)))
            h = min(max(1 + w // 200, int(w * np.exp(rng.uniform(-5, 5)))), 200 * w)
            assert d.fit(h, w) == smart_resize(h, w, 28, limits["min"], limits["max"]), (h, w)


@pytest.mark.parametrize("height, width", [(1, 1), (26, 28), (28, 26), (27, 332), (332, 27), (305, 30), (14, 2800)])
def test_extreme_shapes(d, height, width):
    im = Image.fromarray(noise((height, width, 3)))
    got = d.load(encode(im, "PNG"))
    assert (got.source_height, got.source_width) == (height, width)
    assert (got.height, got.width) == smart_resize(height, width, 28, 3136, 12845056)
    assert np.array_equal(got.pixels, bicubic(im, got.width, got.height))


def test_extreme_ratio(d):
    data = encode(Image.new("RGB", (2801, 14)), "PNG")
    refuse(d, data, 400, "the picture is 2801 x 14: its longer side is over 200 times the shorter")


# Resize --------------------------------------------------------------------------------------------------------------

def checkerboard(n):
    return Image.fromarray(np.kron(np.indices((n, n)).sum(0) % 2, np.ones((1, 1, 1))).astype(np.uint8)[0] * 255)


def lines(n):
    a = np.zeros((n, n, 3), np.uint8)
    a[::7], a[:, ::11], a[np.arange(n), np.arange(n)] = (255, 255, 255), (255, 0, 0), (0, 255, 0)
    return Image.fromarray(a)


PICTURES = {"checkerboard": checkerboard(1000).convert("RGB"), "lines": lines(777), "photo": photo(901, 523),
            "gradient": Image.linear_gradient("L").convert("RGB").resize((640, 480)),
            "noise": Image.fromarray(noise((301, 463, 3)))}


@pytest.mark.parametrize("limits", [dict(), dict(max=200 * 784), dict(max=12 * 784), dict(min=3000 * 784)],
                         ids=["as is", "down", "far down", "up"])
@pytest.mark.parametrize("name", PICTURES)
def test_resize(d, name, limits):
    d.config(**limits)
    im = PICTURES[name]
    got = d.load(encode(im, "PNG"))
    want = bicubic(im, got.width, got.height)
    error = np.abs(got.pixels.astype(int) - want)
    assert error.max() <= 1 and (error == 0).mean() >= 0.999
    assert (error == 0).all()  # in truth the arithmetic is Pillow's, bit for bit


def test_resize_order(d):
    """Noise, in shapes on both sides of the rule for which pass is first."""
    rng = np.random.default_rng(10)
    for _ in range(60):
        w, h = rng.integers(20, 400, 2).tolist()
        d.config(min=int(rng.integers(1, 100)) * 784, max=120 * 784)
        im = Image.fromarray(noise((h, w, 3), w))
        got = d.load(encode(im, "PNG", compress_level=1))
        assert np.array_equal(got.pixels, bicubic(im, got.width, got.height)), (w, h)


def test_resize_one_axis(d):
    for size in (700, 400), (699, 420):  # only rows, only columns change
        im = Image.fromarray(noise((size[1], size[0], 3)))
        got = d.load(encode(im, "PNG"))
        assert np.array_equal(got.pixels, bicubic(im, got.width, got.height))
    im = Image.fromarray(noise((700, 420, 3)))
    assert np.array_equal(d.load(encode(im, "PNG")).pixels, im)


# Formats -------------------------------------------------------------------------------------------------------------
# 84 x 56 is a size that fit leaves alone, so pixels show as decoded.

W, H = 84, 56


def test_png_kinds(d):
    rgb, rgba, gray = noise((H, W, 3)), noise((H, W, 4)), noise((H, W))
    assert np.array_equal(d.load(encode(Image.fromarray(rgb), "PNG")).pixels, rgb)
    assert np.array_equal(d.load(encode(Image.fromarray(rgba), "PNG")).pixels, white(rgba))
    assert np.array_equal(d.load(encode(Image.fromarray(gray), "PNG")).pixels, np.stack([gray] * 3, -1))
    smooth = photo(W, H)  # Pillow picks different filters for its rows
    for level in 0, 1, 9:
        assert np.array_equal(d.load(encode(smooth, "PNG", compress_level=level)).pixels, smooth)
    palette = smooth.quantize(200)
    assert np.array_equal(d.load(encode(palette, "PNG")).pixels, palette.convert("RGB"))


@pytest.mark.parametrize("interlace", [0, 1])
@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("color, samples", [(0, 1), (2, 3), (3, 1), (4, 2), (6, 4)])
def test_png_depths(d, color, samples, depth, interlace):
    """Every kind of the standard's table, at awkward sizes. Samples scale to 8 bits; 16 bits lose their lower half."""
    legal = depth == 8 or (depth == 16 and color != 3) or (depth < 8 and color in (0, 3))
    for height, width in (H, W), (3, 1), (5, 9), (1, 2), (8, 17):
        v = np.random.default_rng(depth).integers(0, 1 << depth, (height, width, samples))
        colors = noise((256, 3), 5)
        data = png(width, height, depth, color, rows_of(v, depth, interlace), chunk(b"PLTE", colors.tobytes()),
                   interlace=interlace)
        if not legal:
            refuse(d, data, 400, "the picture is damaged")
            continue
        if depth == 16:
            v = v >> 8
        elif color != 3:
            v = v * 255 // ((1 << depth) - 1)
        want = {0: lambda: v[..., [0, 0, 0]], 2: lambda: v, 3: lambda: colors[v[..., 0]],
                4: lambda: white(v[..., [0, 0, 0, 1]]), 6: lambda: white(v)}[color]().astype(np.uint8)
        got = d.load(data)
        assert np.array_equal(got.pixels, bicubic(Image.fromarray(want), got.width, got.height))


@pytest.mark.parametrize("filter", [0, 1, 2, 3, 4])
def test_png_filters(d, filter):
    """What Pillow reads, for each filter, from rows of noise."""
    rows = noise((H, 1 + W * 3))
    rows[:, 0] = filter
    data = png(W, H, 8, 2, rows.tobytes())
    assert np.array_equal(d.load(data).pixels, Image.open(io.BytesIO(data)).convert("RGB"))
    rows[7, 0] = 5
    refuse(d, png(W, H, 8, 2, rows.tobytes()), 400, "the picture is damaged")


def test_png_transparency(d):
    rng = np.random.default_rng(6)
    colors, alpha, index = noise((7, 3)), bytes([0, 128, 255]), rng.integers(0, 7, (H, W, 1))
    data = png(W, H, 4, 3, rows_of(index, 4), chunk(b"PLTE", colors.tobytes()), chunk(b"tRNS", alpha))
    rgba = np.concatenate([colors, np.array([[0], [128], [255], [255], [255], [255], [255]])], 1)[index[..., 0]]
    assert np.array_equal(d.load(data).pixels, white(rgba))
    for depth, color, samples in (2, 0, 1), (16, 0, 1), (8, 2, 3), (16, 2, 3):  # one colour is transparent
        v = rng.integers(0, 1 << depth, (H, W, samples))
        key = v[3, 4]
        data = png(W, H, depth, color, rows_of(v, depth), chunk(b"tRNS", struct.pack(f">{samples}H", *key.tolist())))
        shown = v >> 8 if depth == 16 else v * 255 // ((1 << depth) - 1)
        rgba = np.concatenate([shown if samples == 3 else shown[..., [0, 0, 0]],
                               np.where((v == key).all(-1, keepdims=True), 0, 255)], -1)
        assert np.array_equal(d.load(data).pixels, white(rgba))


def test_png_palette_too_short(d):
    """Colours that the palette leaves out are black, as in libpng; they are not what memory happens to hold."""
    index = np.arange(W * H).reshape(H, W, 1) % 256
    colors = noise((10, 3))
    want = np.concatenate([colors, np.zeros((246, 3), np.uint8)])[index[..., 0]]
    assert np.array_equal(d.load(png(W, H, 8, 3, rows_of(index, 8), chunk(b"PLTE", colors.tobytes()))).pixels, want)
    refuse(d, png(W, H, 8, 3, rows_of(index, 8)), 400, "the picture is damaged")


def test_16_bit_gray_is_not_clipped(d):
    """Pillow's convert("RGB") of 16-bit gray clips at 255 (a white picture); here the upper byte is shown."""
    ramp = np.linspace(0, 65535, W * H).astype(np.uint16).reshape(H, W)
    data = encode(Image.fromarray(ramp), "PNG")
    assert np.array_equal(d.load(data).pixels, np.stack([ramp >> 8] * 3, -1))
    assert np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).mean() > 250


def test_alpha(d):
    """Hidden colours at alpha 0 do not show; the background does, and is part of the key."""
    rgba = noise((64, 64, 4))
    rgba[..., 3] = 0
    rgba[20:40, 20:40] = (0, 0, 0, 255)
    rgba[50:] = (200, 100, 0, 128)
    rgba = np.asarray(Image.fromarray(rgba).resize((W, H), Image.NEAREST))
    data = encode(Image.fromarray(rgba), "PNG")
    on_white = d.load(data)
    assert np.array_equal(on_white.pixels, white(rgba))
    canvas = Image.new("RGBA", (W, H), "white")
    canvas.alpha_composite(Image.fromarray(rgba))
    assert np.abs(on_white.pixels.astype(int) - np.asarray(canvas.convert("RGB"))).max() <= 1
    d.config(background=(0, 128, 255))
    on_blue = d.load(data)
    assert tuple(on_blue.pixels[0, 0]) == (0, 128, 255) and on_blue.key != on_white.key
    gray_alpha = encode(Image.fromarray(rgba[..., 2:]), "PNG")
    assert np.array_equal(d.load(gray_alpha).pixels.shape, (H, W, 3))


def test_apng_and_trailing_bytes(d):
    """An animated PNG shows its default picture; what follows a picture changes nothing, not even its key."""
    first, second = photo(W, H, 1), photo(W, H, 2)
    got = d.load(encode(first, "PNG", save_all=True, append_images=[second]))
    assert np.array_equal(got.pixels, first)
    for data in encode(first, "PNG"), encode(first, "BMP"), encode(first, "JPEG"), encode(first, "GIF"):
        assert d.load(data).key == d.load(data + b"GIF89a and more" * 99).key


def test_gif(d):
    frames = [photo(W, H, s).quantize(64) for s in (1, 2, 3)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:], loop=0)
    assert np.array_equal(d.load(data).pixels, Image.open(io.BytesIO(data)).convert("RGB"))
    for interlace in 0, 1:
        data = encode(frames[0], "GIF", interlace=interlace, comment=b"hello" * 99)
        assert np.array_equal(d.load(data).pixels, frames[0].convert("RGB"))
    gray = Image.fromarray(noise((H, W)))
    assert np.array_equal(d.load(encode(gray, "GIF")).pixels, gray.convert("RGB"))


def gif(width, height, frame, background=0, cut=None):
    """A GIF of 4 colours; `frame`: x, y, width, height. All its pixels are colour 3."""
    x, y, w, h = frame
    bits = "".join(format(c, "03b")[::-1] for _ in range(w * h) for c in (4, 3)) + "101"  # clear, 3, ..., end
    bits += "0" * (-len(bits) % 8)
    codes = bytes(int(bits[i:i + 8][::-1], 2) for i in range(0, len(bits), 8))
    blocks = b"".join(bytes([len(codes[i:i + 255])]) + codes[i:i + 255] for i in range(0, len(codes), 255)) + b"\0"
    colors = bytes([10, 20, 30, 40, 50, 60, 70, 80, 90, 250, 5, 100])
    return (b"GIF89a" + struct.pack("<HHBBB", width, height, 0x81, background, 0) + colors + b"," +
            struct.pack("<HHHHB", x, y, w, h, 0) + b"\2" + blocks + b";")


def test_gif_frame_smaller_than_canvas(d):
    """Where the first frame draws nothing the picture is transparent, whatever the background colour."""
    want = np.full((H, W, 3), 255, np.uint8)
    want[10:15, 20:40] = (250, 5, 100)
    for background in 0, 1:
        assert np.array_equal(d.load(gif(W, H, (20, 10, 20, 5), background)).pixels, want)
    refuse(d, gif(W, H, (80, 10, 20, 5)), 400, "the picture is damaged")  # sticks out
    refuse(d, gif(W, H, (20, 10, 20, 5))[:60] + b"\0", 400, "the picture is damaged or cut short")  # no end, though a 0


def bmp(width, height, bits, rows, header=40, compression=0, masks=(), palette=b"", gap=b"", top_down=False):
    if header == 12:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        info = struct.pack("<IiiHHIIiiII", 40, width, -height if top_down else height, 1, bits, compression, 0, 0, 0, 0, 0)
        info += struct.pack(f"<{len(masks)}I", *masks)
        info = struct.pack("<I", header) + (info[4:] if header == 40 else info[4:].ljust(header - 4, b"\0"))
    offset = 14 + len(info) + len(palette) + len(gap)
    return b"BM" + struct.pack("<IHHI", offset + len(rows), 0, 0, offset) + info + palette + gap + rows


def test_bmp(d):
    rgb = noise((H, W, 3))
    for im in Image.fromarray(rgb), Image.fromarray(rgb[..., 0]), Image.fromarray(rgb[..., 0]).convert("1"), \
            photo(W, H).quantize(50):
        assert np.array_equal(d.load(encode(im, "BMP")).pixels, im.convert("RGB"))
    flipped = rgb[::-1, :, ::-1].tobytes()  # bottom up, blue first
    want = rgb
    assert np.array_equal(d.load(bmp(W, H, 24, flipped)).pixels, want)
    assert np.array_equal(d.load(bmp(W, H, 24, flipped, header=12)).pixels, want)
    assert np.array_equal(d.load(bmp(W, H, 24, flipped, gap=b"?" * 50)).pixels, want)
    assert np.array_equal(d.load(bmp(W, H, 24, rgb[..., ::-1].tobytes(), top_down=True)).pixels, want)
    # 32 bits: the fourth byte is alpha only where the header says so
    rgba = noise((H, W, 4))
    bgra = rgba[::-1][..., [2, 1, 0, 3]].tobytes()
    assert np.array_equal(d.load(bmp(W, H, 32, bgra)).pixels, rgba[..., :3])
    masks = (0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    for header in 56, 108, 124:
        assert np.array_equal(d.load(bmp(W, H, 32, bgra, header, 3, masks)).pixels, white(rgba))
    # 16 bits: 5-5-5 by default, 5-6-5 by masks
    v = np.random.default_rng(8).integers(0, 1 << 16, (H, W))
    rows = v[::-1].astype("<u2").tobytes()
    five = lambda x: (x * 255 + 15) // 31
    want = np.stack([five(v >> 10 & 31), five(v >> 5 & 31), five(v & 31)], -1)
    assert np.array_equal(d.load(bmp(W, H, 16, rows)).pixels, want)
    want = np.stack([five(v >> 11), ((v >> 5 & 63) * 255 + 31) // 63, five(v & 31)], -1)
    assert np.array_equal(d.load(bmp(W, H, 16, rows, 40, 3, (0xF800, 0x7E0, 0x1F))).pixels, want)
    # a palette shorter than the pixels' range, and OS/2's of 3 bytes a colour
    index, colors = noise((H, W), 9), noise((4, 3), 9)
    want = np.concatenate([colors, np.zeros((252, 3), np.uint8)])[index]
    four = np.concatenate([colors[:, ::-1], np.zeros((4, 1), np.uint8)], 1).tobytes()
    assert np.array_equal(d.load(bmp(W, H, 8, index[::-1].tobytes(), palette=four)).pixels, want)
    three = colors[:, ::-1].tobytes()
    assert np.array_equal(d.load(bmp(W, H, 8, index[::-1].tobytes(), header=12, palette=three)).pixels, want)
    refuse(d, bmp(W, H, 8, b"\0" * 9999, compression=1), 400, f"this is a compressed BMP, which is not taken; {TAKEN}")


JPEGS = {"444": dict(subsampling=0, quality=95), "422": dict(subsampling=1, quality=90),
         "420": dict(subsampling=2, quality=90), "progressive": dict(subsampling=2, progressive=True, quality=85),
         "restarts": dict(subsampling=2, quality=85, restart_marker_rows=1), "low": dict(quality=20)}


@pytest.mark.parametrize("kind", JPEGS)
def test_jpeg(d, kind):
    """The tolerance is explained at the top of this file."""
    for size in (644, 420), (W, H), (252, 308):
        data = encode(photo(*size), "JPEG", **JPEGS[kind])
        want = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
        error = np.abs(d.load(data).pixels - want)
        if kind == "422":
            error[:, -2] = 0
        most, mean = {"444": (2, 0.03), "422": (4, 0.25)}.get(kind, (3, 0.2))
        assert error.max() <= most and error.mean() <= mean


def test_jpeg_gray_and_cmyk(d):
    for im in photo(W, H).convert("L"), photo(W, H).convert("CMYK"):
        data = encode(im, "JPEG", quality=95)
        error = np.abs(d.load(data).pixels.astype(int) - np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
        assert error.max() <= 3


# EXIF ----------------------------------------------------------------------------------------------------------------

def exif(orientation, big, before=b"", kind=3, entries=None):
    e = ">" if big else "<"
    value = struct.pack(e + "HH", orientation, 0) if kind == 3 else struct.pack(e + "I", orientation)
    fields = [struct.pack(e + "HHI", 0x0100, 4, 1) + struct.pack(e + "I", 24),
              struct.pack(e + "HHI", 0x0112, kind, 1) + value]
    tiff = (b"MM\0*" if big else b"II*\0") + struct.pack(e + "I", 8)
    return b"Exif\0\0" + tiff + struct.pack(e + "H", len(fields) if entries is None else entries) + b"".join(fields) + bytes(4)


def segment(marker, data):
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data


def with_segments(jpeg, *segments):
    """Insert after the JFIF segment."""
    end = 4 + struct.unpack(">H", jpeg[4:6])[0]
    return jpeg[:end] + b"".join(segments) + jpeg[end:]


def bar(width=168, height=112):
    """A red bar at the top, a blue one at the left."""
    a = np.full((height, width, 3), 255, np.uint8)
    a[:, :32], a[:32] = (0, 0, 255), (255, 0, 0)
    return Image.fromarray(a)


@pytest.mark.parametrize("big", [False, True], ids=["II", "MM"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(d, orientation, big):
    plain = encode(bar(), "JPEG", quality=95, subsampling=0)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(with_segments(plain, segment(0xE1, exif(orientation, big))))))
    other = [segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"), segment(0xE2, b"ICC_PROFILE\0" + b"\xff\xd9" * 300)]
    for before in [], other:
        got = d.load(with_segments(plain, *before, segment(0xE1, exif(orientation, big))))
        assert (got.source_width, got.source_height) == upright.size == (got.width, got.height)
        assert np.abs(got.pixels.astype(int) - np.asarray(upright.convert("RGB"))).max() <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_small_and_png(d, orientation):
    """The report's own picture, 24 x 16, and a PNG's eXIf chunk: turned before the size is computed."""
    im = Image.fromarray(noise((16, 24, 3)))
    data = encode(im, "PNG", exif=exif(orientation, True)[6:])
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    got = d.load(data)
    assert (got.height, got.width) == smart_resize(upright.height, upright.width, 28, 3136, 12845056)
    assert np.array_equal(got.pixels, bicubic(upright, got.width, got.height))


def test_exif_broken(d):
    plain = encode(bar(), "JPEG")
    key = d.load(plain).key
    whole = exif(6, True)
    broken = [whole[:n] for n in range(6, len(whole) - 4)] + [
        exif(0, True), exif(9, False), exif(77, True), exif(6, True, kind=4), exif(6, False, entries=0),
        exif(6, False, entries=1), whole[:10] + b"\xff\xff\xff\xff" + whole[14:], whole[:10] + b"\0\0\0\x20" + whole[14:],
        b"Exif\0\0XX" + whole[8:], b"Exif\0\0"]
    for e in broken:
        assert d.load(with_segments(plain, segment(0xE1, e))).key == key
    assert d.load(with_segments(plain, segment(0xE1, exif(6, True, entries=65535)))).key != key  # found before it ends
    assert d.load(with_segments(plain, segment(0xE1, whole + b"\0" * 65000))).key != key
    refuse(d, plain[:20] + b"\xff\xe1\xff\xff" + whole, 400, "the picture is damaged or cut short")


# Refusals ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, data", [
    ("a WebP picture", encode(bar(), "WEBP")), ("an AVIF picture", b"\0\0\0\x20ftypavif" + b"\0" * 99),
    ("a HEIC picture", b"\0\0\0\x18ftypheic" + b"\0" * 99), ("a HEIF picture", b"\0\0\0\x18ftypmif1" + b"\0" * 99),
    ("a video", b"\0\0\0\x18ftypisom" + b"\0" * 99), ("a TIFF picture", encode(bar(), "TIFF")),
    ("a TIFF picture", b"MM\0*\0\0\0\x08"), ("a JPEG XL picture", b"\xff\x0a" + b"\0" * 30),
    ("a JPEG 2000 picture", b"\0\0\0\x0cjP  \r\n\x87\n"), ("an icon", encode(bar(), "ICO")),
    ("an SVG picture", b"\xef\xbb\xbf <?xml version='1.0'?>\n<!-- x --><svg xmlns='http://www.w3.org/2000/svg'/>"),
    ("an SVG picture", b"<svg/>"), ("an HTML page", b"\n<!DOCTYPE html><p>404"), ("an HTML page", b"<HTML>"),
    ("an XML document", b"<?xml version='1.0'?><Error/>"), ("a PDF document", b"%PDF-1.7\n"),
    ("a ZIP archive", b"PK\3\4aaaa"), ("not a picture", b"hello, world"), ("not a picture", b"\0"),
    ("not a picture", b"GIF88a" + b"\0" * 30), ("not a picture", encode(bar(), "PPM"))])
def test_other_formats(d, name, data):
    refuse(d, data, 400, f"this is {name}; {TAKEN}")


def test_empty(d):
    refuse(d, b"", 400, f"the picture is empty; {TAKEN}")


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP"])
def test_truncated(d, format):
    im = photo(300, 200)
    data = encode(im, format, **(dict(progressive=True) if format == "JPEG" else {}))
    for cut in {len(data) - 128, len(data) // 2, len(data) // 3, 40, 27}:
        refuse(d, data[:cut], 400, "the picture is damaged or cut short")
    with pytest.raises(Refused):
        d.load(data[:3])
    for cut in range(0, min(len(data), 700), 13):
        with pytest.raises(Refused):
            d.load(data[:cut])
    d.load(data)  # and the next one works


def test_jpeg_ends(d):
    data = encode(photo(300, 200), "JPEG")
    for cut in 1, 2, 128:
        refuse(d, data[:-cut], 400, "the picture is damaged or cut short")
    arithmetic = data.replace(b"\xff\xc0", b"\xff\xc9")
    refuse(d, arithmetic, 400, f"this is an arithmetic, lossless or 12-bit JPEG, which is not taken; {TAKEN}")


def test_jpeg_scan_bomb(d):
    """A scan of a few bytes makes the decoder walk the whole picture: their number is bounded."""
    data = encode(photo(300, 200), "JPEG", progressive=True)
    scan = data.rindex(b"\xff\xda")
    refuse(d, data[:scan] + data[scan:-2] * 101 + data[-2:], 400, "the picture is damaged or cut short")


def test_jpeg_huffman_overflow(d):
    """More than 256 codes in a table: stb_image 2.27 would write past it."""
    data = encode(photo(W, H), "JPEG")
    table = bytes([0x10]) + bytes([0] * 12 + [255] * 4) + bytes(255 * 4)
    refuse(d, with_segments(data, segment(0xC4, table)), 400, "the picture is damaged or cut short")


def test_jpeg_missing_scan(d):
    """Planes that no scan fills are not what memory happens to hold."""
    data = encode(photo(W, H, 5), "JPEG", progressive=True, subsampling=0)
    first = data.index(b"\xff\xda")
    second = data.index(b"\xff\xda", first + 2)
    only = data[:data.rindex(b"\xff\xc4", 0, second) if b"\xff\xc4" in data[first:second] else second] + b"\xff\xd9"
    keys = set()
    for other in 0, 255:
        d.load(encode(Image.new("RGB", (300, 300), (other,) * 3), "JPEG"))
        keys.add(d.load(only).key)
    assert len(keys) == 1


def test_png_damaged(d):
    data = encode(photo(W, H), "PNG")
    at = data.index(b"IDAT")
    for i in 19, 29, at + 100, len(data) - 1:  # any chunk's bytes or checksum
        refuse(d, data[:i] + bytes([data[i] ^ 1]) + data[i + 1:], 400, "the picture is damaged or cut short")
    raw = rows_of(np.asarray(photo(W, H)), 8)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", W, H, 8, 2, 0, 0, 0))
    packed, start, end = zlib.compress(raw), b"\x89PNG\r\n\x1a\n" + head, chunk(b"IEND", b"")
    assert d.load(start + chunk(b"IDAT", packed) + end).width == W
    split = b"".join(chunk(b"IDAT", packed[i:i + 100]) for i in range(0, len(packed), 100))
    assert d.load(start + split + end).key == d.load(start + chunk(b"IDAT", packed) + end).key
    for bad in packed[:-200], packed[:50] + bytes(100) + packed[150:], b"", b"xx", zlib.compress(raw[:-1]), \
            zlib.compress(raw + bytes(1 << 20)), packed + bytes(99999):
        with pytest.raises(Refused) as e:
            d.load(start + chunk(b"IDAT", bad) + end)
        assert e.value.status == 400
    for kind in b"CgBI", b"ABCD":
        refuse(d, start + chunk(kind, b"1234") + chunk(b"IDAT", packed) + end, 400, "the picture is damaged or cut short")
    assert d.load(start + chunk(b"tEXt", b"a\0b") + chunk(b"IDAT", packed) + end).width == W


def solid(n):
    """A small file of n x n white pixels, without holding them."""
    c, row = zlib.compressobj(9), b"\0" + b"\xff" * n
    packed = b"".join(c.compress(row * 50) for _ in range(n // 50)) + c.flush()
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", n, n, 8, 0, 0, 0, 0)) + chunk(b"IDAT", packed) +
            chunk(b"IEND", b""))


@pytest.mark.parametrize("n", [12000, 20000, 40000])
def test_giant_png(d, n):
    import time
    data = solid(n) if n < 40000 else png(n, n, 8, 0, bytes(5 << 20))
    start = time.monotonic()
    refuse(d, data, 413, f"the picture has {n} x {n} pixels, over the limit of {LIMIT}")
    assert time.monotonic() - start < 1  # some milliseconds; the machine may be busy


def test_giant_headers(d):
    message = "the picture has 65535 x 65535 pixels, over the limit of 16777216"
    refuse(d, b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 65535, 65535, 8, 2, 0, 0, 0)), 413, message)
    refuse(d, gif(65535, 65535, (0, 0, 1, 1)), 413, message)
    refuse(d, bmp(65535, 65535, 24, b""), 413, message)
    jpeg = encode(bar(), "JPEG")
    at = jpeg.index(b"\xff\xc0")
    refuse(d, jpeg[:at + 5] + b"\xff\xff\xff\xff" + jpeg[at + 9:], 413, message)
    huge = struct.pack(">II", 0xFFFFFFFF, 0xFFFFFFFF)
    with pytest.raises(Refused) as e:
        d.load(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", huge + bytes([8, 2, 0, 0, 0])))
    assert e.value.status == 413
    for w, h in (0, 5), (5, 0):
        refuse(d, png(w, h, 8, 2, b""), 400, "the picture is damaged or cut short")
    refuse(d, bmp(10, -(1 << 31), 24, b""), 413, "the picture has 10 x 2147483648 pixels, over the limit of 16777216")


# Workspace -----------------------------------------------------------------------------------------------------------

def worst_cases():
    """For each format, the file that takes the most memory a pixel; incompressible, so that packed data are long."""
    for h, w in (1200, 1200), (40, 8000), (7111, 37):
        v = noise((h, w, 4), 4, np.uint16)
        rows = b"".join(b"\0" + r.astype(">u2").tobytes() for r in v)
        yield png(w, h, 16, 6, rows)
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
        rows = b"".join(b"\4" + r.astype(">u2").tobytes() for x, y, dx, dy in passes for r in v[y::dy, x::dx])
        yield png(w, h, 16, 6, rows, interlace=1)
        yield encode(Image.fromarray(noise((h, w, 4))), "PNG", exif=exif(6, True)[6:])
        cmyk = encode(Image.fromarray(noise((h, w, 4)), "CMYK"), "JPEG", progressive=True, quality=95)
        yield with_segments(cmyk, segment(0xE1, exif(5, False)))
        yield encode(Image.fromarray(noise((h, w))), "GIF")
        yield encode(Image.fromarray(noise((h, w, 3))), "BMP")


def test_workspace_is_enough(d):
    """Nothing within the pixel cap runs out of workspace, and most of it is used: the bound is no guess."""
    most = 0
    for data in worst_cases():
        pixels = np.prod(Image.open(io.BytesIO(data)).size)
        for limits in dict(), dict(min=784 * 100, max=784 * 110), dict(min=1 << 21, max=1 << 22):
            d.config(limit=int(pixels), **limits)
            got = d.load(data)  # asserts peak <= workspace
            most = max(most, got.peak / got.workspace)
    assert most > 0.6


# Bytes that are flipped ----------------------------------------------------------------------------------------------

def flip_samples():
    im = photo(90, 60)
    yield "PNG", [encode(im, "PNG"), encode(im.quantize(16), "PNG"),
                  png(30, 20, 16, 6, rows_of(noise((20, 30, 4), 1, np.uint16), 16, 1), interlace=1)]
    yield "JPEG", [encode(im, "JPEG"), encode(im, "JPEG", progressive=True),
                   with_segments(encode(im.convert("CMYK"), "JPEG", restart_marker_rows=1), segment(0xE1, exif(6, True)))]
    yield "GIF", [encode(im, "GIF"), encode(im, "GIF", interlace=0), gif(50, 40, (3, 4, 20, 10), 2)]
    yield "BMP", [encode(im, "BMP"), encode(im.quantize(16), "BMP"), bmp(30, 20, 16, noise(2000).tobytes(), 40, 3,
                                                                       (0xF800, 0x7E0, 0x1F))]


@pytest.mark.parametrize("format, files", list(flip_samples()), ids=lambda v: v if isinstance(v, str) else "")
def test_flipped_bytes(d, format, files):
    """2,000 damaged files of each format: a picture or a clear refusal, the same each time, and no crash."""
    pictures = sum(d.flip(seed, 667, data) for seed, data in enumerate(files))
    assert 0 < pictures < 2001  # some get through to the decoder, some do not
    assert d.load(files[0]).width == 84  # and it still answers


# Keys and patches ----------------------------------------------------------------------------------------------------

def test_keys(d):
    im = photo(W, H)
    data = encode(im, "PNG")
    key = d.load(data).key
    assert len(key) == 64
    assert key == d.load(data).key == d.load(encode(im, "BMP")).key == d.load(encode(im, "PNG", compress_level=0)).key
    assert key != d.load(encode(photo(W, H, 9), "PNG")).key
    turned = im.transpose(Image.TRANSPOSE)
    assert key != d.load(encode(turned, "PNG")).key
    flat = {d.load(encode(Image.new("RGB", size, "red"), "PNG")).key for size in ((W, H), (H, W))}
    assert len(flat) == 2  # the same bytes in another shape
    keys = {key}
    for change in dict(background=(0, 0, 0)), dict(mean=(0.5, 0.5, 0.5)), dict(std=(0.5, 0.5, 0.5)), dict(temporal=1), \
            dict(patch=28, merge=1), dict(min=784 * 20):
        d.config(**change)
        keys.add(d.load(data).key)
    assert len(keys) == 7


def reference_patches(pixels, patch=14, merge=2, temporal=2):
    """Qwen2VLImageProcessorPil, retold: rescale in double, the rest in single precision."""
    x = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
    x = (x - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
    h, w, _ = x.shape
    x = x.reshape(h // patch // merge, merge, patch, w // patch // merge, merge, patch, 3)
    x = x.transpose(0, 3, 1, 4, 6, 2, 5)  # rows and columns of groups, members, channel, patch
    x = np.repeat(x[:, :, :, :, :, None], temporal, 5)
    return x.reshape(h * w // patch ** 2, -1)


def test_patches(d):
    for kw in dict(), dict(patch=16, merge=2, temporal=1), dict(patch=8, merge=4, temporal=3), dict(patch=7, merge=1):
        d.config(**kw)
        got = d.load(encode(photo(200, 130), "PNG"))
        want = reference_patches(got.pixels, **kw)
        have = np.frombuffer(d.patches(), np.float32).reshape(want.shape)
        assert np.array_equal(have, want)
        order = np.random.default_rng(1).permutation(len(want))[:17]
        assert np.array_equal(np.frombuffer(d.patches(order=order), np.float32).reshape(17, -1), want[order])
        bits = want.view(np.uint32).astype(np.uint64)
        half = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        assert np.array_equal(np.frombuffer(d.patches(bf16=True), np.uint16).reshape(want.shape), half)


def reference_pictures():
    """20 pictures by integer arithmetic alone, so that they are the same everywhere: smooth, lines, blocks, texture."""
    sizes = [(84, 56), (1, 1), (26, 28), (332, 27), (300, 200), (199, 301), (420, 700), (640, 480), (97, 411), (57, 57)]
    for i, (w, h) in enumerate(sizes + sizes[::-1]):
        y, x, c = np.mgrid[0:h, 0:w, 0:3]
        kinds = [(x * 255 // w + y * 127 // h * (c + 1)) % 256, ((x * (c + 3) + y * 5) % 17 == 0) * 255,
                 ((x // 8 + y // (5 + c)) % 2) * 200 + 20, (x * x * 7 + y * y * 3 + x * y * (c + 1) + (x ^ y) * 31) // 11 % 256]
        yield i, Image.fromarray(kinds[(i + i // 10) % 4].astype(np.uint8)), dict(min=3136, max=[784 * 1280, 784 * 60][i % 2])


REFERENCE = pathlib.Path(__file__).parent / "data" / "image-patches.npz"


def test_patches_of_transformers(d):
    """What Qwen2VLImageProcessorPil gave when test/parity/test_image_live.py wrote it down; that test compares live."""
    stored = np.load(REFERENCE)
    assert "Qwen2VLImageProcessorPil" in str(stored["of"])
    for i, im, limits in reference_pictures():
        d.config(**limits)
        got = d.load(encode(im, "PNG"))
        rows = np.frombuffer(d.patches(), np.float32).reshape(-1, 1176)
        grid, want = stored[f"grid{i}"], stored[f"rows{i}"]
        assert (got.height // 14, got.width // 14) == tuple(grid) and len(rows) == np.prod(grid)
        assert np.array_equal(rows[:: len(rows) // 4, ::7], want), i
