"""What quantised weights cost the small model: the 202 questions of heldout/ asked of the same weights in several types.

    .venv/bin/python tiny/quantised.py [--vlm ./vlm]

Prints the table in README.md. Answers are greedy. As long as two models have written the same tokens they stand before the
same question, so those places are compared: whether the next token is the same, and how far its log-probability is off.
Needs numpy and jinja2, for the exporter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
VARIANTS = [  # name, the exporter's flags
    ("bf16", ["--type", "bf16"]),
    ("q8", ["--type", "q8"]),
    ("q8, tower too", ["--type", "q8", "--vision-type", "q8"]),
    ("q4", ["--type", "q4"]),
    ("q4, embedding too", ["--type", "q4", "--embed-type", "q4"]),
    ("q4, tower in q8", ["--type", "q4", "--vision-type", "q8"]),
    ("q4, tower too", ["--type", "q4", "--vision-type", "q4"]),
]


def ask(vlm, model, chats):
    """An answer for each question: text, token ids, log-probabilities."""
    command = [vlm, "-m", model, "--json", "--temperature", "0", "--logprobs", "0", "--chats", chats]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines() if line.strip()]


def compare(base, other):
    """(places compared, same next token, sum of differences of its log-probability in bf16, the largest)."""
    places = same = total = worst = 0
    for a, b in zip(base, other):
        for x, y in zip(a["logprobs"], b["logprobs"]):
            places += 1
            if x["id"] != y["id"]:
                break
            same += 1
            off = abs(x["logprob"] - y["logprob"])
            total, worst = total + off, max(worst, off)
    return places, same, total / same, worst


def main():
    parser = argparse.ArgumentParser(description="What quantised weights cost the small model.")
    parser.add_argument("--vlm", default=os.path.join(ROOT, "vlm"))
    args = parser.parse_args()
    folder = os.path.join(HERE, "heldout")
    cases = [json.loads(x) for x in open(os.path.join(folder, "questions.jsonl"))]
    with tempfile.TemporaryDirectory() as temp:
        chats, hf = os.path.join(temp, "chats.jsonl"), os.path.join(temp, "hf")
        with open(chats, "w") as out:
            for case in cases:
                for message in case["messages"]:
                    for part in message["content"] if isinstance(message["content"], list) else []:
                        if part["type"] == "image":
                            part["image"] = os.path.join(folder, part["image"])
                out.write(json.dumps(case["messages"]) + "\n")
        tool = [sys.executable, os.path.join(ROOT, "test/vlm_to_hf.py"), os.path.join(HERE, "tiny.vlm"), hf]
        subprocess.run(tool, check=True)
        base = None
        print("| weights | bytes | right | same answer | same next token | log-probability off: mean, most |")
        print("|---|---|---|---|---|---|")
        for name, flags in VARIANTS:
            model = os.path.join(temp, "model.vlm")
            subprocess.run([sys.executable, os.path.join(ROOT, "weights_export.py"), hf, model, *flags], check=True)
            answers = ask(args.vlm, model, chats)
            base = base or answers
            right = sum(a["text"].strip() == c["answer"] for a, c in zip(answers, cases))
            equal = sum(a["text"] == b["text"] for a, b in zip(answers, base))
            places, same, mean, worst = compare(base, answers)
            print(
                f"| {name} | {os.path.getsize(model)} | {right} of {len(cases)} | {equal} of {len(cases)} "
                f"| {100 * same / places:.1f}% of {places} | {mean:.4f}, {worst:.2f} |"
            )


if __name__ == "__main__":
    main()
