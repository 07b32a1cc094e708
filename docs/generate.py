#!/usr/bin/env python3
"""Rewrite the blocks of the documents that come from commands.

    python docs/generate.py           rewrite README.md and docs/*.md
    python docs/generate.py --all     those of slow commands too, which are marked with $$
    python docs/generate.py --check   exit 1 and say which document is out of date

A block is a comment with the command, then a fence; the command runs in the project's folder:

    <!-- $ wc -l vlm.c -->
    ```
    ...
    ```

A table in Markdown stands between the comment and <!-- end --> instead.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- (\$\$?) (.*?) -->\n(?:```\n)?)(.*?)(```\n|<!-- end -->)", re.S)


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
        slow = "--all" in sys.argv
        fresh = BLOCK.sub(lambda m: m[1] + (m[4] if m[2] == "$$" and not slow else output(m[3])) + m[5], text)
        if fresh != text:
            stale.append(path.relative_to(ROOT))
            if "--check" not in sys.argv:
                path.write_text(fresh)
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(map(str, stale))}; run docs/generate.py")


if __name__ == "__main__":
    main()
