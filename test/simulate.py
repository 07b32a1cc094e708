#!/usr/bin/env python3
"""The two loads that users of the large engines report as killers, on the null device: the true engine with the true
shapes, planned on one GPU of 80 GB by its roofline. Prints Markdown.

    python3 test/simulate.py [QUICK]      with any argument a hundredth of the requests
"""
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
VLM = ROOT / os.environ.get("VLM_BUILD", "build") / "vlm"
SHAPE = ["--shape", "qwen2.5-vl-7b", "--device", "null", "--roofline", "h100", "--memory", "80G", "--ctx", "20000"]
LESS = 100 if len(sys.argv) > 1 else 1


def load(**parts):
    spec = ",".join(f"{k}={v}" for k, v in parts.items())
    done = subprocess.run([VLM, "bench", *SHAPE, "--json", "--load", spec], capture_output=True, text=True, check=True)
    o = json.loads(done.stdout)
    assert o["requests"] == parts["requests"] and o["kv_blocks"] == o["kv_blocks_left"], "a request or a block was lost"
    assert all(owner["peak"] <= owner["plan"] for owner in o["memory"].values()), "more than the plan"
    return o


def row(name, o):
    m = o["memory"]
    peak = sum(m[k]["peak"] for k in m)
    print(f"| {name} | {o['requests_per_second']:.2f} | {o['tokens_per_second']:.0f} | {o['first_token_p50']:.2f} | {o['first_token_p99']:.2f} "
          f"| {m['kv']['peak'] / 1e9:.2f} | {m['images']['peak'] / 1e9:.3f} | {m['arena']['peak'] / 1e9:.3f} | {peak / 1e9:.1f} | {o['preemptions']} |")  # fmt: skip


HEAD = "| requests/s | tokens/s | first token p50, s | p99, s | kv, GB | images, GB | arena, GB | all, GB | preempted |\n|" + "---|" * 10


def main():
    print("One after another, each with a new picture of 1024 x 768, 64 prompt tokens, 512 written:\n")
    print("| requests " + HEAD)
    for n in (1000, 10000, 30000):
        row(n // LESS, load(images="1024x768", concurrency=1, requests=max(1, n // LESS), prompt=64, output=512))
    print("\nMany at once, each with a new picture, 64 prompt tokens, 256 written:\n")
    print("| picture, at once " + HEAD)
    for side in (512, 2048, 4096):
        for n in (1, 4, 8, 16, 64, 128):
            row(f"{side}, {n}", load(images=f"{side}x{side}", concurrency=n, requests=max(n, 256 // LESS), prompt=64, output=256))


if __name__ == "__main__":
    main()
