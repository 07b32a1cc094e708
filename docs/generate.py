#!/usr/bin/env python3
"""Rewrite the blocks of the documents that come from commands.

    python docs/generate.py           rewrite README.md and docs/*.md
    python docs/generate.py --check   exit 1 and say which block is out of date

A block is a comment with the command, then a fence; the command runs in the project's folder:

    <!-- $ wc -l vlm.c -->
    ```
    ...
    ```
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- \$ (.*?) -->\n```\w*\n).*?(```)", re.S)


def output(command):
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command}: {done.stderr}")
    return done.stdout


def main():
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "tiny/README.md"]:
        if not path.exists():
            continue
        text = path.read_text()
        fresh = BLOCK.sub(lambda m: m[1] + output(m[2]) + m[3], text)
        if fresh != text:
            stale.append(path.relative_to(ROOT))
            if "--check" not in sys.argv:
                path.write_text(fresh)
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(map(str, stale))}; run docs/generate.py")


if __name__ == "__main__":
    main()
