"""weights_export.py against transformers, live: what transformers saves exports to the same bytes, and what is made
back of a .vlm file loads there with every weight in its place."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "test"))
import make_model
import vlm_to_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL_FILES = ["tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"]


def load(folder):
    """The model, with nothing missing and nothing left over."""
    model, info = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(info[x] for x in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


def export(folder, out, kind):
    subprocess.run([sys.executable, ROOT / "weights_export.py", folder, out, "--type", kind], check=True)
    return out


@pytest.fixture(scope="module", params=["odd-a", "odd-b"])
def checkpoint(request, tmp_path_factory):
    return make_model.make(tmp_path_factory.mktemp("hf") / request.param, request.param)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_saved_by_transformers(checkpoint, tmp_path, kind):
    """The nested configuration and the shards of save_pretrained() give the same file as the hub's layout."""
    load(checkpoint).save_pretrained(tmp_path / "saved", max_shard_size="300KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    for name in SMALL_FILES:
        shutil.copy(checkpoint / name, tmp_path / "saved")
    ours, again = export(checkpoint, tmp_path / "a.vlm", kind), export(tmp_path / "saved", tmp_path / "b.vlm", kind)
    assert ours.read_bytes() == again.read_bytes()


def test_layouts_load_alike(checkpoint, tmp_path):
    """make_model.py writes what transformers reads, in both layouts."""
    nested = make_model.make(tmp_path / "nested", checkpoint.name, layout="nested", names="new")
    one, two = load(checkpoint), load(nested)
    assert (
        one.config.text_config.rope_parameters["mrope_section"]
        == two.config.text_config.rope_parameters["mrope_section"]
    )
    for (name, a), (_, b) in zip(one.state_dict().items(), two.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_made_back(checkpoint, tmp_path, kind):
    vlm_to_hf.convert(export(checkpoint, tmp_path / "m.vlm", kind), tmp_path / "back")
    one, two = load(checkpoint), load(tmp_path / "back")
    for (name, a), (_, b) in zip(one.state_dict().items(), two.state_dict().items(), strict=True):
        assert torch.equal(a.float(), b.float()), name


def test_limits_of_pictures(checkpoint, tmp_path):
    """Both spellings mean to transformers what they mean here."""
    wanted = vlm_to_hf.Model(export(checkpoint, tmp_path / "m.vlm", "bf16")).json("preprocess")
    nested = make_model.make(tmp_path / "nested", checkpoint.name, layout="nested")
    for folder in (checkpoint, nested):
        size = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder).size
        assert (size["shortest_edge"], size["longest_edge"]) == (wanted["min_pixels"], wanted["max_pixels"])
