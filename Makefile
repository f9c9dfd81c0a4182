# dtrain needs a C compiler and make; everything else here is optional and says so when it is absent.
#   make run      trains a GPT on real text, two ranks of this machine's CPU, about a minute
#   make test     builds and runs all tests
# Variables: CC, CFLAGS, BUILD (folder), CBLAS=1 (OpenBLAS instead of the built-in GEMM).

CC      ?= cc
CFLAGS  ?= -O2 -g
BUILD   ?= build
ARGS    ?=
STRICT  := -std=c99 -pedantic -Wall -Wextra -Wconversion -Werror
LIBS    := -lm -lpthread

ifdef CBLAS
CFLAGS += -DDTRAIN_USE_CBLAS
LIBS   += -lopenblas
endif

EXAMPLES := $(patsubst examples/%.c,$(BUILD)/%,$(wildcard examples/*.c))
TESTS    := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/test_*.c))
BENCHES  := $(patsubst bench/%.c,$(BUILD)/bench/%,$(wildcard bench/bench_*.c))

examples: $(EXAMPLES)

help:
	@echo "make            the examples, in $(BUILD)/"
	@echo "make run        the main job: $(BUILD)/train_gpt (ARGS=\"--help\" shows its flags)"
	@echo "make test       all tests; prints what was skipped for want of an optional tool"
	@echo "make bench      GEMM, collectives and training, beside their rivals where installed"
	@echo "make asan ubsan tsan    the tests under a sanitizer"
	@echo "make valgrind   the tests that valgrind can run"
	@echo "make fuzz       30 seconds of fuzzing for each parser (clang)"
	@echo "make golden     makes the PyTorch reference values again and compares (python3, torch)"
	@echo "make lint       formatting, contents of dtrain.h, warnings of other compilers"
	@echo "make clean"

run: $(BUILD)/train_gpt
	$(BUILD)/train_gpt $(ARGS)

SCRIPTS ?= tests/test_examples.sh tests/test_bench.sh tests/test_compile.sh
test: $(EXAMPLES) $(TESTS) $(BENCHES)
	@BUILD=$(BUILD) CC="$(CC)" sh tests/run.sh $(TESTS) $(SCRIPTS)

bench: $(BENCHES)
	@for b in $(BENCHES); do echo "== $$b $(ARGS)"; $$b $(ARGS) || exit 1; echo; done

# A sanitizer build is the same tests in a folder of its own; benchmarks would measure the sanitizer.
asan ubsan tsan: export SCRIPTS = tests/test_examples.sh
asan:
	$(MAKE) test BUILD=build/asan CFLAGS="-O1 -g -fsanitize=address -fno-omit-frame-pointer"
ubsan:
	$(MAKE) test BUILD=build/ubsan CFLAGS="-O1 -g -fsanitize=undefined -fno-sanitize-recover=all"
tsan:
	$(MAKE) test BUILD=build/tsan CFLAGS="-O1 -g -fsanitize=thread"
valgrind: $(TESTS)
	@BUILD=$(BUILD) sh tests/valgrind.sh

fuzz:
	@mkdir -p $(BUILD)/fuzz
	@for f in $(wildcard tests/fuzz_*.c); do \
	  out=$(BUILD)/fuzz/$$(basename $$f .c); echo "== $$f"; \
	  clang -O1 -g -I. -fsanitize=fuzzer,address,undefined $$f -o $$out $(LIBS) && \
	  $$out -max_total_time=$${FUZZ_SECONDS:-30} -print_final_stats=0 -verbosity=0 || exit 1; done

golden:
	sh tests/reference/check.sh

lint:
	@CC="$(CC)" sh tests/lint.sh

clean:
	rm -rf build

$(BUILD)/%: examples/%.c dtrain.h
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(CFLAGS) -I. $< -o $@ $(LIBS)
$(BUILD)/tests/%: tests/%.c tests/test.h $(wildcard tests/*.h tests/reference/*.h) dtrain.h
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(CFLAGS) -I. -Itests $< -o $@ $(LIBS)
$(BUILD)/bench/%: bench/%.c $(wildcard bench/*.h) dtrain.h
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(CFLAGS) -I. -Ibench $< -o $@ $(LIBS) -ldl

.PHONY: examples help run test bench asan ubsan tsan valgrind fuzz golden lint clean
.DELETE_ON_ERROR:
