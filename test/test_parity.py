"""Every stage of the engine against the checked-in goldens (`make parity` makes the same comparison live)."""
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent / "parity"))
from cases import CASES, checkpoint, conversation, export, run_vlm  # noqa: E402
from goldens import GREEDY, fingerprint, golden_path, sample_of  # noqa: E402


@pytest.mark.parametrize("name", CASES)
def test_stages_and_greedy_tokens(name, tmp_path):
    golden = np.load(golden_path(name))
    hf = checkpoint(name, tmp_path)
    assert fingerprint(hf) == golden["fingerprint"], "another checkpoint than the goldens are of: rebuild them with test/parity/goldens.py"
    model = export(hf, tmp_path / "f32.vlm", "f32")
    answer, stages = run_vlm(model, conversation(name, tmp_path), tmp_path, GREEDY, "--temperature", "0", dump=tmp_path / "dump")
    assert answer["token_ids"] == golden["greedy"].tolist()
    assert np.array_equal(stages["positions"], golden["positions"])
    compared = [k for k in golden.files if k + ".scale" in golden.files]
    assert len(compared) >= 3
    for stage in compared:
        err = np.abs(sample_of(stages[stage]) - golden[stage]).max() / golden[stage + ".scale"]
        assert err < 1e-5, (stage, err)
