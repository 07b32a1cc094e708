# vlm.c: `make chat` talks about a picture, `make test` runs the tests; each sets up what it needs.
# Variables: CC, BUILD (folder of what is built), SANITIZE (e.g. address,undefined), ARGS (for chat), SECONDS (for fuzz).

CC       ?= cc
BUILD    ?= build
CFLAGS   ?= -O3 -march=native
SECONDS  ?= 60
PY       := .venv/bin/python
LIBS     := jansson libutf8proc libcrypto libedit
STB      := $(firstword $(wildcard /usr/include/stb /usr/local/include/stb /opt/homebrew/include/stb))

# -ffp-contract=off: where a product and a sum are fused is written in the source and not left to the compiler, because the
# rounding of a sum must not depend on the tile it is computed in. -Wno-psabi: vectors are passed to inlined functions only.
override CFLAGS += -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -Wno-psabi -g -fopenmp -ffp-contract=off -I.
override CFLAGS += $(if $(STB),-isystem $(STB)) $(shell pkg-config --cflags $(LIBS) 2>/dev/null | sed 's/-I/-isystem /g')
override CFLAGS += $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer)
LDLIBS    = $(shell pkg-config --libs $(LIBS)) -lm

ENGINE := $(patsubst %,$(BUILD)/%.o,vlm vlm_cpu vlm_null image tokenizer)
TESTS  := $(patsubst test/%.c,$(BUILD)/test_%,$(wildcard test/*.c))
FUZZ   := $(patsubst test/fuzz/%.c,build/fuzz/fuzz_%,$(wildcard test/fuzz/*.c))
PYTEST  = VLM_BUILD=$(BUILD) $(PY) -m pytest -q

.PHONY: all chat test tests asan tsan parity fuzz simulate docs setup venv help clean
.DELETE_ON_ERROR:

all: setup ## build ./vlm (the default)
	@$(MAKE) --no-print-directory vlm

vlm: $(BUILD)/vlm
	cp -f $< $@

$(BUILD)/vlm: $(BUILD)/chat.o $(BUILD)/bench.o $(ENGINE)
	$(CC) $(CFLAGS) $^ -o $@ $(LDLIBS)

$(BUILD)/%.o: %.c | $(BUILD)
	$(CC) $(CFLAGS) -MMD -c $< -o $@

$(BUILD)/test_%: test/%.c $(ENGINE)
	$(CC) $(CFLAGS) -MMD -MF $@.d $< $(ENGINE) -o $@ $(LDLIBS)

build/fuzz/fuzz_%: test/fuzz/%.c $(wildcard *.c *.h) | build/fuzz
	clang $(filter-out -O3,$(CFLAGS)) -O1 -fsanitize=fuzzer,address,undefined $< vlm.c vlm_cpu.c vlm_null.c image.c tokenizer.c -o $@ $(LDLIBS)

$(BUILD) build/fuzz:
	mkdir -p $@
-include $(wildcard $(BUILD)/*.d)

chat: all ## talk about a picture with the small model (ARGS="-i photo.jpg")
	./vlm $(ARGS)

tests: $(BUILD)/vlm $(TESTS)

test: all venv ## build and run every test
	@$(MAKE) --no-print-directory tests
	$(PYTEST) --ignore=test/parity test

asan: setup venv ## the tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(MAKE) --no-print-directory BUILD=build/asan SANITIZE=address,undefined CFLAGS="-O2 -march=native" tests
	VLM_SCHEDULES=10000 VLM_BUILD=build/asan $(PY) -m pytest -q --ignore=test/parity test

tsan: venv ## the threads under ThreadSanitizer (clang, whose OpenMP tells the sanitizer of its barriers)
	@sh test/setup.sh clang libclang-rt-dev libomp-dev
	@$(MAKE) --no-print-directory BUILD=build/tsan CC=clang SANITIZE=thread CFLAGS="-O1 -march=native" tests
	TSAN_OPTIONS=ignore_noninstrumented_modules=1 VLM_SCHEDULES=250 VLM_BUILD=build/tsan $(PY) -m pytest -q test/test_programs.py

parity: all venv ## compare every stage with Hugging Face transformers, live
	$(PY) -m pip install -q --disable-pip-version-check -r test/parity-requirements.txt
	@$(MAKE) --no-print-directory tests
	$(PYTEST) test/parity

fuzz: ## damaged pictures, for SECONDS each (clang's libFuzzer)
	@sh test/setup.sh clang libclang-rt-dev
	@$(MAKE) --no-print-directory $(FUZZ)
	for f in $(FUZZ); do mkdir -p $$f.corpus && ./$$f -max_total_time=$(SECONDS) -print_final_stats=1 $$f.corpus || exit 1; done

simulate: all ## the loads that kill large engines, at full scale, on the null device
	python3 test/simulate.py

docs: all ## rewrite what the documents quote from commands (all of it with ARGS=--all)
	python3 docs/generate.py $(ARGS)

setup:
	@sh test/setup.sh

venv: setup
	@test -x $(PY) || python3 -m venv .venv
	@$(PY) -m pip install -q --disable-pip-version-check -r test/requirements.txt

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1: /p' Makefile | awk -F': ' '{ printf "  make %-8s %s\n", $$1, $$2 }'

clean: ## remove what was built
	rm -rf build vlm
