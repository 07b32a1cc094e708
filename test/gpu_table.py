"""What `vlm bench --json` measured, as a table for docs/kernels.md: python3 gpu_table.py COPY PEAK SHAPE FILE, with COPY in
bytes and PEAK in operations a second, as measured on the same GPU."""
import json
import sys

AIMS = {"decode": "85% of the copy", "prefill": "60% of the peak"}


def row(stage, copy, peak):
    name = f"{stage['stage']} {stage['size']}"
    if "error" in stage:
        return f"| {name} | {stage['error']} |||||"
    bytes_, flops = stage["bytes_per_second"], stage["flops_per_second"]
    return (f"| {name} | {stage['seconds'] * 1e3:.2f} | {stage['tokens_per_second']:.0f} | {bytes_ / 1e9:.0f} ({bytes_ / copy:.0%}) "
            f"| {flops / 1e12:.1f} ({flops / peak:.0%}) | {AIMS.get(stage['stage'], '')} |")


def main(copy, peak, shape, path):
    copy, peak, bench = float(copy), float(peak), json.load(open(path))
    print(f"{shape}, random weights of {bench['weights'] / 1e9:.1f} GB:\n")
    print("| stage | ms | tokens/s | GB/s (of the copy) | TFLOP/s (of the peak) | aim |\n|---|---|---|---|---|---|")
    for stage in bench["stages"]:
        print(row(stage, copy, peak))
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
