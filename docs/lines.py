#!/usr/bin/env python3
"""The project's files in reading order, with their lines, for the README."""
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILES = {
    "vlm.h": "the contract: sizes, errors, model, the Device table, the engine",
    "vlm.c": "the engine: model file, memory plan, vision tower, language model, KV blocks, scheduler, step",
    "vlm_null.c": "the operations as a roofline: the memory plan and simulations",
    "vlm_cpu.c": "the operations in C: the reference device",
    "vlm_cpu_pick.c": "which of its builds, by instruction set, this processor takes",
    "vlm.cu": "the operations in CUDA",
    "image.c": "bytes of a picture -> upright RGB -> resized -> patches",
    "tokenizer.c": "text <-> ids, chat template",
    "request.c": "OpenAI's JSON -> prompt and sampling; tokens -> text, calls of functions, JSON",
    "chat.c": "the command line and the chat",
    "server.c": "the HTTP server: threads, budgets, endpoints",
    "fetch.c": "pictures from http(s), for strangers",
    "page.html": "the server's page: chat, memory map, timeline",
    "bench.c": "the speed of each stage, and loads, against limits",
    "weights_export.py": "Hugging Face checkpoint -> one .vlm file",
    "tiny/train.py": "how the small model was trained",
    "test/ops.c": "every operation against double precision: what a port must pass",
    "test/cuda_on_cpu.h": "CUDA's execution model on a CPU, with detectors of faults",
    "test/engine.c": "random schedules: same bytes, nothing lost",
}
for name, what in FILES.items():
    print(f"{name:18} {len((ROOT / name).read_text().splitlines()):5}  {what}")
