#!/usr/bin/env python3
"""vlm.c and llama.cpp, one after the other in turns: the same weights, threads and precision, and the ratios.

    python test/bench_peer.py PEER [--models mid:bf16,q8,q4 3b:q8,q4] [--rows vision=224 prefill=512 ...]

PEER is a folder with llama.cpp built for this machine, and checkpoints made for both (docs/speed.md says how):

    build/bin/llama-bench, build/bin/llama-batched-bench
    peer                             a driver of its mtmd library: encodes a picture, one line of JSON with encode_min_s
    models/NAME/                     a checkpoint in Hugging Face's layout
    gguf/NAME-{bf16,q8_0,q4_0}.gguf, gguf/NAME-mmproj-bf16.gguf
    vlm/NAME-{bf16,q8,q4}.vlm        the same as our model files: made here where they are missing

Each row is run --rounds times by both, who begins alternates, and each run is a process of its own. A ratio is of two
neighbouring runs; the table has the median of the ratios and their range. `others` is the share of the machine that other
processes took during the runs, in the middle: ratios of two busy programs say little when it is not near 0.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER_TYPE = {"bf16": "bf16", "q8": "q8_0", "q4": "q4_0"}
TEXT_ROWS = ["prefill=512", "decode=1", "decode=8"]
VISION_ROWS = ["vision=224", "vision=448", "vision=1024"]
# One thread a core for both: unbound, two threads may share a core beside other jobs. The rest is what vlm sets itself.
ENV = {**os.environ, "OMP_PROC_BIND": "true", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "3000"}
PEER_ENV = {**os.environ, "OMP_PROC_BIND": "true"}


def busy():
    """CPU seconds that the machine has spent since it started."""
    field = open("/proc/stat").readline().split()
    return sum(int(field[i]) for i in (1, 2, 3, 6, 7, 8)) / os.sysconf("SC_CLK_TCK")


def timed(command, env):
    """What the command prints, and the share of the cores that others had meanwhile."""
    before, start = busy(), time.time()
    p = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    out, err = p.communicate()
    if p.returncode:
        sys.exit(f"{command[0]} failed: {err.strip().splitlines()[-1] if err.strip() else p.returncode}")
    own = os.times()
    used = own.children_user + own.children_system - timed.before
    timed.before += used
    return out, min(1.0, max(0.0, (busy() - before - used) / (time.time() - start) / os.cpu_count()))


timed.before = 0.0


def ours(a, name, kind, row):
    out, others = timed([a.vlm, "bench", "--device", "cpu", "-m", a.peer / f"vlm/{name}-{kind}.vlm", "--threads", a.threads,
                         "--stages", row, "--repeat", 1, "--json"], ENV)
    (stage,) = json.loads(out)["stages"]
    if "error" in stage:
        sys.exit(f"vlm bench {row}: {stage['error']}")
    return stage["tokens_per_second"], others, stage


def theirs(a, name, kind, row):
    stage, n = row.split("=")
    gguf, tools = a.peer / f"gguf/{name}-{PEER_TYPE[kind]}.gguf", a.peer / "build/bin"
    if stage == "vision":
        out, others = timed([a.peer / "peer", "-m", gguf, "-v", a.peer / f"gguf/{name}-mmproj-bf16.gguf", "-t", a.threads, "-i", n], PEER_ENV)
        o = json.loads(out)
        return o["image_tokens"] / o["encode_min_s"], others
    if stage == "decode" and n != "1":
        out, others = timed([tools / "llama-batched-bench", "-m", gguf, "-t", a.threads, "-c", 128 * int(n), "-npp", 64, "-ntg", 32,
                             "-npl", n, "--output-format", "jsonl"], PEER_ENV)
        return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])["speed_tg"], others
    size = ["-p", n, "-n", 0] if stage == "prefill" else ["-p", 0, "-n", 32]
    out, others = timed([tools / "llama-bench", "-m", gguf, "-t", a.threads, *size, "-r", 1, "-o", "json"], PEER_ENV)
    return json.loads(out)[0]["avg_ts"], others


def measure(a, name, kind, row):
    own, peer, shares, stages = [], [], [], []
    for i in range(a.rounds):
        for mine in (i % 2 == 0, i % 2 != 0):
            if mine:
                rate, share, stage = ours(a, name, kind, row)
                own.append(rate), stages.append(stage)
            else:
                rate, share = theirs(a, name, kind, row)
                peer.append(rate)
            shares.append(share)
    ratios = sorted(x / y for x, y in zip(own, peer))
    middle = statistics.median
    if row.startswith("decode"):  # what could be read differs from minute to minute
        share = f"{middle(s['of_read'] for s in stages) * 100:.0f}% of {middle(s['read_limit'] for s in stages) / 1e9:.0f} GB/s"
    else:
        share = f"{middle(s['of_peak'] for s in stages) * 100:.0f}% of peak"
    print(f"| {name} {kind} | {row.replace('=', ' ')} | {middle(own):.1f} | {middle(peer):.1f} | **{middle(ratios):.2f}** | "
          f"{ratios[0]:.2f} to {ratios[-1]:.2f} | {share} | {middle(shares):.2f} |", flush=True)


def rig_check(a, models):
    """The peer is no part of the project: one line when it is not there. Model files of ours are made."""
    need = ["build/bin/llama-bench", "build/bin/llama-batched-bench", "peer"]
    for name, kinds in models:
        need += [f"models/{name}/config.json", f"gguf/{name}-mmproj-bf16.gguf"] + [f"gguf/{name}-{PEER_TYPE[k]}.gguf" for k in kinds]
    missing = [n for n in need if not (a.peer / n).exists()]
    if missing:
        sys.exit(f"bench_peer.py: {a.peer} has no {missing[0]}: name the folder of a built llama.cpp (make bench-peer PEER=FOLDER); docs/speed.md says what it must hold")
    (a.peer / "vlm").mkdir(exist_ok=True)
    for name, kinds in models:
        for kind in kinds:
            out = a.peer / f"vlm/{name}-{kind}.vlm"
            if not out.exists():
                subprocess.run([sys.executable, ROOT / "weights_export.py", a.peer / "models" / name, out, "--type", kind], check=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("peer", type=pathlib.Path, nargs="?", default=os.environ.get("PEER") or "peer", help="folder of llama.cpp (default: $PEER)")
    p.add_argument("--models", nargs="+", default=["mid:bf16,q8,q4", "3b:q8,q4"], metavar="NAME:TYPE,...")
    p.add_argument("--rows", nargs="+", default=VISION_ROWS + TEXT_ROWS, metavar="STAGE=SIZE")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--vlm", type=pathlib.Path, default=ROOT / "vlm", help="our program")
    p.add_argument("--no-heading", action="store_true", help="of the table")
    a = p.parse_args()
    models = [(m.split(":")[0], m.split(":")[1].split(",")) for m in a.models]
    unknown = [k for _, kinds in models for k in kinds if k not in PEER_TYPE]
    if unknown:
        sys.exit(f"bench_peer.py: no type {unknown[0]}: known are {', '.join(PEER_TYPE)}")
    rig_check(a, models)
    if not a.no_heading:
        print(f"{a.threads} threads, {a.rounds} rounds; tokens a second.\n\n| model | stage | vlm.c | llama.cpp | ratio | range | vlm.c's share of the limit | others |\n"
              "|---|---|---|---|---|---|---|---|", flush=True)
    for name, kinds in models:
        for kind in kinds:
            for row in a.rows:
                if kind == kinds[0] or not row.startswith("vision"):  # the tower is bf16 whatever the text is
                    measure(a, name, kind, row)


if __name__ == "__main__":
    main()
