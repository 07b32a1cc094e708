"""image.c's patches against transformers' Qwen2VLImageProcessorPil (the slow, Pillow one), live.

Run as a program it writes down what it gives for test_image.py: python test/parity/test_image_live.py
"""
import io, pathlib, sys
import numpy as np
import PIL
import pytest
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from test_image import JPEGS, REFERENCE, Driver, encode, photo, reference_pictures  # noqa: E402


def transformers_patches(im, min, max, patch=14, merge=2, temporal=2):
    processor = Qwen2VLImageProcessorPil(patch_size=patch, merge_size=merge, temporal_patch_size=temporal,
                                         size={"shortest_edge": min, "longest_edge": max})
    out = processor(images=im, return_tensors="np")
    return np.asarray(out["pixel_values"], np.float32), tuple(out["image_grid_thw"][0][1:])


@pytest.fixture(scope="module")
def d():
    d = Driver()
    yield d
    d.p.stdin.close()
    assert d.p.wait() == 0


def our_patches(d, data, **limits):
    d.config(**limits)
    got, patch = d.load(data), limits.get("patch", 14)
    rows = np.frombuffer(d.patches(), np.float32).reshape(-1, 3 * limits.get("temporal", 2) * patch ** 2)
    return rows, (got.height // patch, got.width // patch)


PICTURES = [(im, limits) for _, im, limits in reference_pictures()] + [
    (photo(1920, 1080), dict(min=3136, max=784 * 1280)), (photo(1000, 750), dict(min=3136, max=12845056)),
    (photo(320, 200), dict(min=784 * 900, max=784 * 1000)), (photo(300, 200), dict(min=3136, max=1 << 20, patch=16)),
    (photo(300, 200), dict(min=3136, max=1 << 20, patch=8, merge=4, temporal=1))]


@pytest.mark.parametrize("i", range(len(PICTURES)))
def test_patches(d, i):
    im, limits = PICTURES[i]
    want, grid = transformers_patches(im, **limits)
    have, our_grid = our_patches(d, encode(im, "PNG"), **limits)
    assert our_grid == grid and np.array_equal(have, want)


@pytest.mark.parametrize("kind", JPEGS)
def test_jpeg(d, kind):
    """Decoders differ by a level or so (test_image.py says how much): 1 level is 0.015 of a normalised value."""
    data = encode(photo(1280, 720), "JPEG", **JPEGS[kind])
    limits = dict(min=3136, max=784 * 1280)
    want, grid = transformers_patches(Image.open(io.BytesIO(data)), **limits)
    have, our_grid = our_patches(d, data, **limits)
    assert our_grid == grid and np.abs(have - want).mean() < 0.004


def write_reference():
    stored = {"of": f"Qwen2VLImageProcessorPil (slow) of transformers {transformers.__version__}, Pillow {PIL.__version__}"}
    for i, im, limits in reference_pictures():
        rows, grid = transformers_patches(im, **limits)
        stored[f"grid{i}"], stored[f"rows{i}"] = np.array(grid), rows[:: len(rows) // 4, ::7]
    np.savez_compressed(REFERENCE, **stored)


if __name__ == "__main__":
    write_reference()
