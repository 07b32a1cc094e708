#!/bin/sh
# Everything that only a GPU can show, in one command of about five minutes: build, operations, the same bits and the
# same text as promised, NVIDIA's own checkers, and the speed table for docs/kernels.md. Results go to build/gpu.md.
# Ends with one line: N passed, N failed.
cd "$(dirname "$0")/.." || exit 1
passed=0 failed=0 out=build/gpu.md
command -v nvidia-smi >/dev/null || { echo "test/gpu_check.sh: no nvidia-smi: this needs a GPU" >&2; exit 1; }

step() { # NAME COMMAND...: run it, show the end of what it says, count it
    name=$1 && shift
    start=$(date +%s)
    if "$@" >build/gpu.log 2>&1; then passed=$((passed + 1)) word=passed; else failed=$((failed + 1)) word=FAILED; fi
    echo "$word: $name ($(($(date +%s) - start)) s): $(tail -n 1 build/gpu.log)"
    [ "$word" = passed ] || tail -n 30 build/gpu.log
}

ids() { # the tokens that the small model writes, and their log-probabilities to 3 places
    ./build/vlm "$@" -i tiny/samples/five.png -p "What is in the picture?" -n 24 --temperature 0 --json |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["token_ids"])'
}
same_text() { [ "$(ids --device cpu)" = "$(ids --device cuda)" ] && ids --device cuda; }
same_bits() { # whatever the chunks of the prefill are
    for n in 9 17 40 64 512; do
        ./build/vlm --device cuda --max-batch-tokens $n --max-seqs 2 -i tiny/samples/five.png -p "What is it?" -n 24 \
            --temperature 0 --logprobs 5 --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["logprobs"])'
    done | sort -u | wc -l | grep -qx 1
}

mkdir -p build
step "build" make CUDA=1 build/vlm build/test_ops build/cuda_bench
step "operations" timeout 120 build/test_ops cuda
step "the small model's text is the CPU's" same_text
step "the same bits for any chunk" same_bits
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck; do
        step "compute-sanitizer $tool" timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 build/test_ops cuda
    done
else
    echo "no compute-sanitizer here: not checked with it"
fi
{
    echo "Measured $(date -u +%Y-%m-%d) on $(nvidia-smi --query-gpu=name,clocks.max.sm,memory.total --format=csv,noheader | head -n 1)."
    echo
    timeout 180 build/cuda_bench cuda
} >$out
step "speed" grep -q "attention_segments" $out
cat $out
if command -v nsys >/dev/null; then
    nsys profile -o build/gpu --force-overwrite true --stats=true ./build/vlm --device cuda -p "What is it?" \
        -i tiny/samples/five.png -n 24 2>/dev/null | grep -A 20 "cuda_gpu_kern_sum" || true
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
