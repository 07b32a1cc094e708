#!/bin/sh
# Everything that only a GPU can show, in one command of less than 8 minutes: build, operations, the same bits and the
# same text as promised, NVIDIA's own checkers, and the speed tables for docs/kernels.md, which go to build/gpu.md.
# Ends with one line: N passed, N failed. `test/gpu_check.sh emulated` runs what the emulation of test/cuda_on_cpu.h
# can, so that the script itself is tested where there is no GPU.
cd "$(dirname "$0")/.." || exit 1
emulated=$1 passed=0 failed=0 slow=1
if [ "$emulated" ]; then
    build=build/cuda make="make -s CUDA=cpu BUILD=build/cuda" programs="vlm test_ops test_engine" tokens=3 chunks="9 40" slow=20
else
    build=build make="make -s CUDA=1 GPUS=-arch=native" programs="vlm test_ops test_engine cuda_bench cuda_peak"
    tokens=24 chunks="9 17 40 64 512"
    command -v nvidia-smi >/dev/null || { echo "test/gpu_check.sh: no nvidia-smi: this needs a GPU" >&2; exit 1; }
fi
mkdir -p $build
out=$build/gpu.md log=$build/gpu.log end=$(($(date +%s) + 470 * slow))

step() { # NAME SECONDS COMMAND...: run it, but not for longer, show the end of what it says, count it
    name=$1 start=$(date +%s) most=$(($2 * slow)) && shift 2
    [ $((start + most)) -le $end ] || most=$((end - start))
    if [ $most -le 0 ]; then echo "no time is left" >$log && false; else bounded $most "$@" >$log 2>&1; fi
    status=$?
    if [ $status = 0 ]; then passed=$((passed + 1)) word=passed; else failed=$((failed + 1)) word=FAILED; fi
    echo "$word: $name ($(($(date +%s) - start)) s): $(tail -n 1 $log)"
    [ $status = 0 ] || { [ $status != 124 ] || echo "not done after $most s"; tail -n 30 $log; }
}

bounded() { # SECONDS COMMAND...: a program gets a time limit, a function of this script sees to its own
    case $(command -v "$2") in
    */*) timeout "$@" ;;
    *) most=$1 && shift && "$@" ;;
    esac
}

say() { # ARGS...: what the small model says about a picture, as JSON
    timeout $((most / 2 + 1)) $build/vlm "$@" -i tiny/samples/five.png -p "What is in the picture?" -n $tokens \
        --temperature 0 --ctx 256 --max-seqs 2 --logprobs 5 --json
}
field() { python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"; }
same_text() { [ "$(say --device cpu | field token_ids)" = "$(say --device cuda | tee $build/gpu.json | field token_ids)" ] && field text <$build/gpu.json; }
same_bits() { # whatever the chunks of the prefill are
    for n in $chunks; do say --device cuda --max-batch-tokens $n | field logprobs; done | sort -u >$build/gpu.bits
    [ "$(wc -l <$build/gpu.bits)" = 1 ] && cut -c 1-100 $build/gpu.bits
}
bench() { # SHAPE: vision, prefill and decode, with random weights
    timeout "$most" $build/vlm bench --device cuda --shape "$1" --json >$build/gpu-"$1".json &&
        python3 test/gpu_table.py "$copy" "$peak" "$1" $build/gpu-"$1".json | tee -a $out
}
kernels() { timeout "$most" $build/cuda_bench cuda 24000000000 "$copy" "$peak" | tee -a $out; }

step "build" 150 $make $(for p in $programs; do echo $build/$p; done)
step "operations" 60 $build/test_ops cuda
step "the small model's text is the CPU's" 60 same_text
step "the same bits for any chunk" 60 same_bits
if [ "$emulated" ]; then
    echo "$passed passed, $failed failed"
    exit $((failed > 0))
fi
step "the same bits in any company, 0 allocations in a step" 60 $build/test_engine tiny/tiny.vlm 10 1 cuda
if command -v compute-sanitizer >/dev/null; then
    step "compute-sanitizer memcheck" 60 compute-sanitizer --tool memcheck --error-exitcode 9 $build/test_ops cuda
    step "compute-sanitizer synccheck" 45 compute-sanitizer --tool synccheck --error-exitcode 9 $build/test_ops cuda few
    step "compute-sanitizer racecheck" 60 compute-sanitizer --tool racecheck --error-exitcode 9 $build/test_ops cuda few
else
    echo "no compute-sanitizer here: not checked with it"
fi

echo "Measured $(date -u +%Y-%m-%d) on $(nvidia-smi --query-gpu=name,clocks.max.sm,memory.total --format=csv,noheader | head -n 1)." >$out
step "the GPU's own copy and products" 20 $build/cuda_peak
copy=$(cut -d' ' -f1 $log) peak=$(cut -d' ' -f2 $log)
printf '\nIts own copy: %s bytes a second, read and written; products of bf16 by mma.sync, out of registers: %s operations a second.\n\n' \
    "$copy" "$peak" >>$out
step "speed: 3B" 60 bench qwen2.5-vl-3b
step "speed: 7B" 75 bench qwen2.5-vl-7b
step "speed: kernels" 75 kernels
if command -v nsys >/dev/null && [ "$(date +%s)" -lt $((end - 20)) ]; then
    timeout 20 nsys profile -o $build/gpu --force-overwrite true --stats=true $build/vlm --device cuda -p "What is it?" \
        -i tiny/samples/five.png -n 24 2>/dev/null | grep -A 20 "cuda_gpu_kern_sum"
fi
if command -v ncu >/dev/null && [ "$(date +%s)" -lt $((end - 20)) ]; then # needs a driver that lets users read counters
    timeout 20 ncu --set base --launch-skip 200 --launch-count 12 $build/vlm --device cuda -p "What is it?" -n 2 |
        grep -E "^  [a-z].*Context|DRAM Throughput|Duration|Achieved Occupancy"
fi
cat $out
echo "$passed passed, $failed failed"
[ $failed = 0 ]
