"""Every stage of the engine against transformers, live; and the goldens that `make test` uses still true."""
import subprocess
import sys

import numpy as np
import pytest
import torch

from cases import CASES, ROOT, checkpoint, conversation, export, run_vlm
from goldens import GREEDY, golden_path, sample_of
from reference import Reference

# f32: a stage adds up rounding errors of sums of a few thousand products, layer after layer. bf16: no worse than
# transformers' own bf16 is, which rounds more often than we do.
F32_BOUND = 1e-5


def relative(got, want):
    assert got.shape == want.shape, (got.shape, want.shape)
    return np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if CASES[request.param][0] == "tiny" and not (ROOT / "tiny/tiny.vlm").exists():
        pytest.fail("tiny/tiny.vlm is missing")
    hf = checkpoint(request.param, folder)
    return request.param, folder, hf, Reference(hf), conversation(request.param, folder)


def our_patches(ref, stages, grids):
    order = ref.window_order(grids)
    patches = torch.empty(len(order), stages["patches"].shape[1])
    patches[order] = torch.from_numpy(stages["patches"])
    return patches


def compare(case, kind, *flags):
    """Run the case teacher-forced on tokens that we draw; each stage's error, the answer and the stages wanted."""
    name, folder, hf, ref, messages = case
    model = folder / f"{kind}.vlm"
    if not model.exists():
        export(hf, model, kind)
    dump = folder / f"dump-{kind}-{len(flags)}"
    answer, stages = run_vlm(model, messages, folder, CASES[name][-1], "--temperature", "1", "--seed", "3", *flags, dump=dump)
    pixels, grids = ref.pixels(messages)
    ids = ref.ids(messages, grids)
    assert answer["prompt_tokens"] == len(ids)
    patches = None
    if grids is not None:
        patches = our_patches(ref, stages, grids)
        assert relative(patches.numpy(), pixels.numpy()) < (1e-6 if kind == "f32" else 2**-8)
    inputs = (ids + answer["token_ids"][:-1], len(ids), patches, grids)
    want = ref.stages(*inputs)
    assert np.array_equal(stages["positions"], want.pop("positions"))
    errors = {stage: relative(stages[stage], w) for stage, w in want.items()}
    print(f"{name} {kind}: " + "  ".join(f"{k} {v:.1e}" for k, v in errors.items()))
    return errors, answer, want, inputs


def test_every_stage_f32(case):
    errors, answer, want, _ = compare(case, "f32")
    assert all(v < F32_BOUND for v in errors.values()), errors
    log = torch.log_softmax(torch.from_numpy(want["logits"]), -1)
    for row, entry in zip(log, answer["logprobs"]):
        assert abs(row[entry["id"]].item() - entry["logprob"]) < F32_BOUND * want["logits"].max()


def test_every_stage_in_chunks(case):
    errors, *_ = compare(case, "f32", "--max-seqs", "1", "--max-batch-tokens", "23")
    assert all(v < F32_BOUND for v in errors.values()), errors


def test_every_stage_bf16(case):
    errors, _, want, inputs = compare(case, "bf16")
    theirs = Reference(case[2], torch.bfloat16).stages(*inputs)
    for stage, error in errors.items():
        assert error < 1.5 * relative(theirs[stage], want[stage]), (stage, error)


def test_every_stage_quantised(case):
    """Against transformers in f64 on what the quantised weights stand for. We round what a product multiplies to 127 steps of
    the largest of 64 numbers, an error of 1/(127 sqrt 12) = 0.23% of that one; bf16 rounds each number by 2^-9 / sqrt 3 = 0.11% of
    itself. The largest of 64 is some 2.5 times the usual one: 5 times bf16's error, which is bounded as above."""
    name, folder, _, ref, messages = case
    for kind, flags in (("q8", ["--vision-type", "q8"]), ("q4", [])):
        export(case[2], folder / f"{kind}.vlm", kind, *flags)
        hf = folder / f"hf-{kind}"
        subprocess.run([sys.executable, ROOT / "test/vlm_to_hf.py", folder / f"{kind}.vlm", hf], check=True)
        errors, _, want, inputs = compare((name, folder, hf, Reference(hf), messages), kind)
        theirs = Reference(hf, torch.bfloat16).stages(*inputs)
        for stage, error in errors.items():
            assert error < 5 * 1.5 * relative(theirs[stage], want[stage]), (stage, error)


def test_greedy_tokens_and_goldens(case):
    name, folder, hf, ref, messages = case
    model = folder / "f32.vlm"
    if not model.exists():
        export(hf, model, "f32")
    answer, _ = run_vlm(model, messages, folder, GREEDY, "--temperature", "0")
    patches, grids = ref.pixels(messages)
    ids = ref.ids(messages, grids)
    want = ref.greedy(ids, patches, grids, GREEDY)
    assert answer["token_ids"] == want
    golden = np.load(golden_path(name))
    assert golden["greedy"].tolist() == want
    for stage, w in ref.stages(ids + want[:-1], len(ids), patches, grids).items():
        assert stage == "positions" or relative(sample_of(w), golden[stage]) < 1e-5, stage
