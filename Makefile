# vlm.c: `make chat` talks about a picture, `make test` runs the tests; each sets up what it needs.
# Variables: CC, JOBS (compilers at a time), BUILD (folder of what is built), SANITIZE (e.g. address,undefined), ARGS (for chat, bench), PEER (for bench-peer), SECONDS (for fuzz and
# soak), REQUESTS (for soak).

CC       ?= cc
BUILD    ?= build
CFLAGS   ?= -O3 -march=native
SECONDS  ?= 60
JOBS     ?= $(shell nproc)
PY       := .venv/bin/python
LIBS     := jansson libutf8proc libcrypto libedit libmicrohttpd libcurl
STB      := $(firstword $(wildcard /usr/include/stb /usr/local/include/stb /opt/homebrew/include/stb))

# -ffp-contract=off: where a product and a sum are fused is written in the source and not left to the compiler, because the
# rounding of a sum must not depend on the tile it is computed in. -Wno-psabi: vectors are passed to inlined functions only.
override CFLAGS += -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -Wno-psabi -g -fopenmp -ffp-contract=off -I.
override CFLAGS += $(if $(STB),-isystem $(STB)) $(shell pkg-config --cflags $(LIBS) 2>/dev/null | sed 's/-I/-isystem /g')
override CFLAGS += $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer)
LDLIBS    = $(shell pkg-config --libs $(LIBS)) -lm

# CUDA: 1 builds vlm.cu with nvcc (12.8 or newer: it must know sm_100) for three generations of GPUs and, as PTX, for later
# ones; 0 leaves it out; cpu compiles it for the CPU (test/cuda_on_cpu.h), RACES=1 with its race detector.
# -fmad=false as -ffp-contract=off above.
NVCC := $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
CUDA ?= $(if $(filter compute_100,$(if $(NVCC),$(shell $(NVCC) --list-gpu-arch))),1,0)
GPUS := $(foreach a,80 90 100,-gencode arch=compute_$a,code=sm_$a) -gencode arch=compute_100,code=compute_100
NVCCFLAGS := -std=c++20 -O3 -fmad=false -Werror all-warnings -Xptxas -v -Xcompiler -Wall,-Wextra -I.
EMULATE = g++ -std=c++20 $(if $(RACES),-DCUDA_ON_CPU_RACES -fsanitize=thread -fno-threadsafe-statics) -Wno-unknown-pragmas \
	-Wno-unused-function -fno-strict-aliasing $(filter-out -std=c11 -fopenmp -Wno-psabi,$(CFLAGS)) -c -x c++
ifneq ($(CUDA),0)
override CFLAGS += -DHAVE_CUDA $(if $(filter cpu,$(CUDA)),-DCUDA_ON_CPU)
CUDA_OBJECTS := $(BUILD)/cuda.o $(if $(RACES),$(BUILD)/races.o)
CUDA_LIBS := $(if $(filter 1,$(CUDA)),$(sort $(shell $(NVCC) --dryrun -x cu /dev/null 2>&1 | grep -o '"-L[^"]*"')) \
	-lcudart_static -ldl -lrt -lpthread) -lstdc++
LDLIBS += $(CUDA_LIBS)
endif

# The CPU device is built for several instruction sets; vlm_cpu_pick.c takes the best that the processor has. -g1: lines, but not
# where each inlined variable lives, which would take longer to work out than the code.
CPUS := $(if $(filter x86_64,$(shell uname -m)),avx512 avx2 plain,plain)
CPU_avx512 := -march=x86-64-v4 -mavx512vnni -mavx512bf16 -mprefer-vector-width=512
CPU_avx2   := -march=x86-64-v3
CPU_plain  := $(if $(filter avx2,$(CPUS)),-march=x86-64)
# A fuzzer learns nothing from their branches: for it they are built without its marks, and to be fast.
KERNELS = $(if $(findstring fuzzer,$(SANITIZE)),gcc $(filter-out -O1 -fsanitize% -fno-sanitize%,$(CFLAGS)) -O3,$(CC) $(CFLAGS))
ENGINE := $(patsubst %,$(BUILD)/%.o,vlm $(CPUS:%=vlm_cpu_%) vlm_cpu_pick vlm_null image tokenizer) $(CUDA_OBJECTS)
TESTS  := $(patsubst test/%.c,$(BUILD)/test_%,$(filter-out test/replay.c,$(wildcard test/*.c)))
FUZZED := $(ENGINE) $(BUILD)/request.o $(BUILD)/fetch.o
FUZZ   := $(patsubst test/fuzz/%.c,build/fuzz/fuzz_%,$(wildcard test/fuzz/*.c))
REPLAY := $(patsubst test/fuzz/corpus/%,$(BUILD)/replay_%,$(wildcard test/fuzz/corpus/*))
PYTEST  = VLM_BUILD=$(BUILD) $(PY) -m pytest -q
APART  := --ignore=test/parity --ignore=test/cuda --ignore=test/test_page.py # tests with a target of their own

.PHONY: all cuda test-cuda test-page chat test tests asan tsan parity fuzz bench bench-peer simulate soak docs setup venv \
	help clean
.DELETE_ON_ERROR:

all: setup ## build ./vlm (the default)
	@$(MAKE) --no-print-directory -j$(JOBS) vlm

vlm: $(BUILD)/vlm
	cp -f $< $@

$(BUILD)/vlm: $(patsubst %,$(BUILD)/%.o,chat server request fetch bench) $(ENGINE)
	$(CC) $(CFLAGS) $^ -o $@ $(LDLIBS)

$(BUILD)/%.o: %.c | $(BUILD)
	$(CC) $(CFLAGS) -MMD -c $< -o $@

$(BUILD)/server.o: page.html

$(CPUS:%=$(BUILD)/vlm_cpu_%.o): $(BUILD)/vlm_cpu_%.o: vlm_cpu.c | $(BUILD)
	$(KERNELS) -g1 $(CPU_$*) -DDEVICE_CPU=device_cpu_$* -MMD -c $< -o $@

$(BUILD)/cuda.o: vlm.cu vlm.h test/cuda_on_cpu.h | $(BUILD)
ifeq ($(CUDA),1)
	$(NVCC) $(NVCCFLAGS) $(GPUS) -c $< -o $@ >$@.log 2>&1 || { cat $@.log; exit 1; }
else
	$(EMULATE) $< -o $@
endif

$(BUILD)/races.o: test/cuda/races.c | $(BUILD)
	$(CC) $(CFLAGS) -c $< -o $@

$(BUILD)/cuda_bench: test/cuda/bench.c $(ENGINE)
	$(CC) $(CFLAGS) $< $(ENGINE) -o $@ $(LDLIBS)

$(BUILD)/cuda_peak: test/cuda/peak.cu | $(BUILD)
	$(NVCC) -std=c++20 -O3 $(GPUS) $< -o $@

$(BUILD)/cuda_faults: test/cuda_faults.cu test/cuda_on_cpu.h $(CUDA_OBJECTS)
	$(EMULATE) $< -o $@.o
	$(CC) $(CFLAGS) $@.o $(filter %races.o,$^) -o $@ -lstdc++

$(BUILD)/test_%: test/%.c $(ENGINE)
	$(CC) $(CFLAGS) -MMD -MF $@.d $< $(ENGINE) -o $@ $(LDLIBS)

$(BUILD)/fuzz_%: test/fuzz/%.c $(FUZZED)
	$(CC) $(CFLAGS) -fsanitize=fuzzer -MMD -MF $@.d $< $(FUZZED) -o $@ $(LDLIBS)

# The same with a main() that runs the files of its corpus, for any compiler.
$(BUILD)/replay_%: test/fuzz/%.c test/replay.c $(FUZZED)
	$(CC) $(CFLAGS) -c test/replay.c -o $@.o
	$(CC) $(CFLAGS) -MMD -MF $@.d $< $@.o $(FUZZED) -o $@ $(LDLIBS)

$(BUILD):
	mkdir -p $@
-include $(wildcard $(BUILD)/*.d)

chat: all ## talk about a picture with the small model (ARGS="-i photo.jpg")
	./vlm $(ARGS)

tests: $(BUILD)/vlm $(TESTS) $(REPLAY) $(if $(filter cpu,$(CUDA)),$(BUILD)/cuda_faults)

cuda: ## vlm.cu with nvcc, for all GPUs, and nothing else
	@$(MAKE) --no-print-directory -j$(JOBS) CUDA=1 $(BUILD)/cuda.o $(BUILD)/cuda_peak

test: all venv ## build and run every test
	@sh test/setup.sh haproxy curl
	@$(MAKE) --no-print-directory -j$(JOBS) tests
	$(PYTEST) $(APART) test

asan: setup venv ## the tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@sh test/setup.sh haproxy curl
	@$(MAKE) --no-print-directory -j$(JOBS) BUILD=build/asan CUDA=0 SANITIZE=address,undefined CFLAGS="-O2 -march=native" tests
	VLM_SCHEDULES=10000 VLM_BUILD=build/asan $(PY) -m pytest -q $(APART) test

test-cuda: venv ## vlm.cu emulated on the CPU (operations, planted faults, the model's text), and what nvcc makes of it
	@sh test/setup.sh g++
	$(PY) -m pip install -q --disable-pip-version-check --no-deps -r test/cuda-requirements.txt
	@$(if $(NVCC),$(MAKE) --no-print-directory cuda)
	@$(MAKE) --no-print-directory -j$(JOBS) BUILD=build/cuda CUDA=cpu CFLAGS="-O2 -march=native" tests
	@$(MAKE) --no-print-directory -j$(JOBS) BUILD=build/cuda-asan CUDA=cpu SANITIZE=address,undefined CFLAGS="-O1 -march=native" tests
	@$(MAKE) --no-print-directory -j$(JOBS) BUILD=build/cuda-races CUDA=cpu RACES=1 CFLAGS="-O1 -march=native" tests
	VLM_CUDA=1 $(PY) -m pytest -q test/cuda

test-page: all venv ## the page of the server in a real browser (Chromium)
	@$(PY) test/browser.py >/dev/null 2>&1 || sh test/setup.sh chromium || $(PY) test/browser.py
	$(PYTEST) test/test_page.py

tsan: venv ## the threads under ThreadSanitizer (clang, whose OpenMP tells the sanitizer of its barriers)
	@sh test/setup.sh clang libclang-rt-dev libomp-dev
	@$(MAKE) --no-print-directory -j$(JOBS) BUILD=build/tsan CUDA=0 CC=clang SANITIZE=thread CFLAGS="-O1 -march=native" tests
	TSAN_OPTIONS=ignore_noninstrumented_modules=1 VLM_SCHEDULES=250 VLM_BUILD=build/tsan $(PY) -m pytest -q test/test_programs.py test/test_server_wire.py::test_load

parity: all venv ## compare every stage with Hugging Face transformers, live
	$(PY) -m pip install -q --disable-pip-version-check -r test/parity-requirements.txt
	@$(MAKE) --no-print-directory -j$(JOBS) tests
	$(PYTEST) test/parity

fuzz: setup ## damaged pictures, JSON and HTTP, for SECONDS each (libFuzzer)
	@sh test/setup.sh clang libclang-rt-dev libomp-dev
	@$(MAKE) --no-print-directory -j$(JOBS) BUILD=build/fuzz CUDA=0 CC=clang SANITIZE=fuzzer-no-link,address,undefined CFLAGS="-O1 -march=native" $(FUZZ)
	for f in $(FUZZ); do c=test/fuzz/corpus/$${f##*_} && mkdir -p $$f.corpus && \
	./$$f -max_total_time=$(SECONDS) -print_final_stats=1 $$f.corpus $$(test -d $$c && echo -dict=test/fuzz/words.dict $$c) || exit 1; done

bench: all ## the speed of every stage, with limits (ARGS="-m model.vlm", "--profile")
	./vlm bench $(ARGS)

bench-peer: all ## the same beside llama.cpp, in turns (PEER=the folder of one built as docs/speed.md says)
	$(PY) test/bench_peer.py $(if $(PEER),"$(PEER)") $(ARGS)

simulate: all ## the loads that kill large engines, at full scale, on the null device
	python3 test/simulate.py

soak: all venv ## a crowd of clients for three minutes; image requests without end (SECONDS or REQUESTS of them), then large ones at once
	VLM_BUILD=$(BUILD) $(PY) test/server_load.py 180
	VLM_BUILD=$(BUILD) $(PY) test/soak.py --log $(BUILD)/soak.jsonl $(if $(filter command,$(firstword $(origin SECONDS))),--seconds $(SECONDS)) \
	$(if $(REQUESTS),--requests $(REQUESTS)) $(ARGS)

docs: all ## rewrite what the documents quote from commands (all of it with ARGS=--all)
	python3 docs/generate.py $(ARGS)

setup:
	@sh test/setup.sh

venv: setup
	@test -x $(PY) || python3 -m venv .venv
	@$(PY) -m pip install -q --disable-pip-version-check -r test/requirements.txt

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile | awk -F': ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

clean: ## remove what was built
	rm -rf build vlm
