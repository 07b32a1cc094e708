"""Goldens: a sample of every stage by transformers, checked in, so that `make test` needs no torch.

    python test/parity/goldens.py        rebuilds test/data/parity-*.npz
"""
import hashlib
import pathlib
import sys
import tempfile

import numpy as np

from cases import CASES, ROOT, checkpoint, conversation, export, run_vlm

SAMPLES = 300
GREEDY = 24  # tokens


def golden_path(name):
    return ROOT / "test/data" / f"parity-{name}.npz"


def sample_of(x):
    """Values all over a stage: a fixed choice."""
    flat = x.reshape(-1)
    return flat[np.linspace(0, flat.size - 1, min(SAMPLES, flat.size)).astype(np.int64)]


def fingerprint(hf):
    return hashlib.sha256((hf / "model.safetensors").read_bytes()).hexdigest()


def main():
    from reference import Reference

    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as tmp:
            folder = pathlib.Path(tmp)
            hf, messages = checkpoint(name, folder), conversation(name, folder)
            ref = Reference(hf)
            patches, grids = ref.pixels(messages)
            ids = ref.ids(messages, grids)
            greedy = ref.greedy(ids, patches, grids, GREEDY)
            stages = ref.stages(ids + greedy[:-1], len(ids), patches, grids)
            positions = stages.pop("positions")
            values = {k: sample_of(v) for k, v in stages.items()}
            scales = {k + ".scale": np.abs(v).max() for k, v in stages.items()}
            np.savez_compressed(golden_path(name), greedy=np.array(greedy), positions=positions, fingerprint=fingerprint(hf), **values, **scales)
            print(f"{name}: {len(ids)} prompt tokens, {len(greedy)} written, {len(stages)} stages")


if __name__ == "__main__":
    main()
