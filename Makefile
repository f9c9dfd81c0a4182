# dtrain needs a C compiler and make; everything else here is optional and says so when it is absent.
#   make run      trains a GPT on real text, two ranks of this machine's CPU, about a minute
#   make test     builds and runs all tests, those of the GPU kernels on the CPU
#   make cuda     the examples for NVIDIA GPUs
# Variables: CC, CXX, CFLAGS, BUILD (folder), CBLAS=1 (OpenBLAS instead of the built-in GEMM), NVCC,
# CUDA_ARCH ("90", "80 90", ...; default: the GPU of this machine, without one 80 and 90).

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

GPU_TESTS := $(wildcard tests/test_cuda_*.c)
EXAMPLES  := $(patsubst examples/%.c,$(BUILD)/%,$(wildcard examples/*.c))
TESTS     := $(patsubst tests/%.c,$(BUILD)/tests/%,$(filter-out $(GPU_TESTS),$(wildcard tests/test_*.c)))
BENCHES   := $(patsubst bench/%.c,$(BUILD)/bench/%,$(wildcard bench/bench_*.c))

examples: $(EXAMPLES)

help:
	@echo "make            the examples, in $(BUILD)/"
	@echo "make run        the main job: $(BUILD)/train_gpt (ARGS=\"--help\" shows its flags)"
	@echo "make cuda       the examples for NVIDIA GPUs, in $(BUILD)/cuda/ (nvcc)"
	@echo "make test       all tests; prints what was skipped for want of an optional tool"
	@echo "make bench      GEMM, collectives and training, beside their rivals where installed"
	@echo "make bench-strategies  speed, memory and bytes of every strategy (ARGS=\"--help\")"
	@echo "make gpu-check  with an NVIDIA GPU: tests, sanitizers, NCCL, benchmarks; 9 minutes"
	@echo "make asan ubsan tsan    the tests under a sanitizer"
	@echo "make valgrind   the tests that valgrind can run"
	@echo "make fuzz       30 seconds of fuzzing for each parser (clang)"
	@echo "make mutate     breaks the GPU kernels in N=40 places and counts what the tests notice"
	@echo "make golden     makes the PyTorch reference values again and compares (python3, torch)"
	@echo "make lint       formatting, contents of dtrain.h, warnings of other compilers"
	@echo "make clean"

run: $(BUILD)/train_gpt
	$(BUILD)/train_gpt $(ARGS)

# ---- The GPU kernels on the CPU -------------------------------------------------------------------
# dtrain_cuda.cu, compiled as C++ over stand-ins for CUDA (tests/cuda_emulation), and the same C
# programs linked with it: they need a C++ compiler and no GPU.
ifeq ($(origin CXX),default)
CXX := $(if $(findstring clang,$(CC)),clang++,g++)
endif
EMULATION := -DDTRAIN_CUDA_EMULATION -DDTRAIN_USE_CUDA -Itests/cuda_emulation
ifneq ($(shell command -v $(CXX)),)
EMU_TESTS := $(patsubst tests/%.c,$(BUILD)/emu/%,$(GPU_TESTS)) $(BUILD)/emu/test_emulation
EMU_BENCH := $(BUILD)/emu/bench_kernels $(BUILD)/emu/bench_train $(BUILD)/emu/train_gpt
else
EMU_TESTS := "skip the GPU kernels: their tests need a C++ compiler, and $(CXX) is not installed"
endif

# ---- Tests ----------------------------------------------------------------------------------------
SCRIPTS ?= tests/test_examples.sh tests/test_bench.sh tests/test_compile.sh tests/test_launchers.sh \
           tests/test_nccl.sh tests/cuda_build.sh
test: $(EXAMPLES) $(TESTS) $(BENCHES) $(filter $(BUILD)/%,$(EMU_TESTS)) $(EMU_BENCH)
	@BUILD=$(BUILD) CC="$(CC)" sh tests/run.sh $(TESTS) $(EMU_TESTS) $(SCRIPTS)

bench: $(BENCHES)
	@for b in $(filter-out %/bench_strategies,$(BENCHES)); do echo "== $$b $(ARGS)"; $$b $(ARGS) || exit 1; echo; done
bench-strategies: $(BUILD)/train_gpt $(BUILD)/bench/bench_strategies
	$(BUILD)/bench/bench_strategies $(ARGS)

# A sanitizer build is the same tests in a folder of its own; benchmarks would measure the sanitizer.
# Kernel threads are fibers: what a sanitizer knows of a stack must not move to its own heap.
asan ubsan tsan: export SCRIPTS = tests/test_examples.sh
NO_BENCH := BENCHES= EMU_BENCH=
asan: export ASAN_OPTIONS = detect_leaks=1:detect_stack_use_after_return=0
asan:
	$(MAKE) test BUILD=build/asan CFLAGS="-O1 -g -fsanitize=address -fno-omit-frame-pointer" $(NO_BENCH)
# What the other GPU programs add is shared by these: every kernel once, and a training.
ubsan:
	$(MAKE) test BUILD=build/ubsan CFLAGS="-O1 -g -fsanitize=undefined -fno-sanitize-recover=all" $(NO_BENCH) \
	  EMU_TESTS="$(addprefix build/ubsan/emu/test_,emulation cuda_elementwise cuda_optim cuda_tokens cuda_sparse \
	    cuda_layernorm cuda_gemm cuda_flash cuda_ddp cuda_offload)"
# Kernels run on one thread; ranks that are threads are what there is to look at.
tsan:
	$(MAKE) test BUILD=build/tsan CFLAGS="-O1 -g -fsanitize=thread" $(NO_BENCH) \
	  EMU_TESTS="$(addprefix build/tsan/emu/,test_cuda_ddp test_cuda_nccl)"
valgrind: $(TESTS)
	@BUILD=$(BUILD) sh tests/valgrind.sh

fuzz:
	@mkdir -p $(BUILD)/fuzz
	@for f in $(wildcard tests/fuzz_*.c); do \
	  out=$(BUILD)/fuzz/$$(basename $$f .c); echo "== $$f"; \
	  clang -O1 -g -I. -fsanitize=fuzzer,address,undefined $$f -o $$out $(LIBS) && \
	  $$out -max_total_time=$${FUZZ_SECONDS:-30} -print_final_stats=0 -verbosity=0 || exit 1; done

N ?= 40
mutate:
	@BUILD=$(BUILD) CC="$(CC)" CXX="$(CXX)" sh tests/mutate_cuda.sh $(N)

golden:
	sh tests/reference/check.sh

lint:
	@CC="$(CC)" sh tests/lint.sh

clean:
	rm -rf build

# ---- GPUs -----------------------------------------------------------------------------------------
NVCC      ?= nvcc
CUDA_ARCH ?= $(if $(shell nvidia-smi -L 2>/dev/null | grep ^GPU),native,80 90)
ARCH = $(foreach a,$(CUDA_ARCH),$(if $(filter native,$a),-arch=native,-gencode=arch=compute_$a,code=sm_$a))
NCCL = $(if $(shell echo '\#include <nccl.h>' | $(NVCC) -E -x cu - >/dev/null 2>&1 && echo yes),-DDTRAIN_USE_NCCL -ldl)

cuda: $(patsubst $(BUILD)/%,$(BUILD)/cuda/%,$(EXAMPLES))
gpu-programs: cuda $(patsubst tests/%.c,$(BUILD)/cuda/%,$(filter-out tests/test_cuda_nccl.c,$(GPU_TESTS))) \
              $(BUILD)/cuda/bench_kernels $(BUILD)/cuda/bench_train
gpu-check:
	@BUILD=$(BUILD) bash tests/gpu_check.sh

# ---- Rules ----------------------------------------------------------------------------------------
vpath %.c   examples tests bench
vpath %.cpp tests tests/cuda_emulation
HEADERS := $(wildcard dtrain*.h tests/*.h tests/*/*.h bench/*.h) tests/nccl_mock/nccl_mock.c

$(BUILD)/%: examples/%.c dtrain.h
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(CFLAGS) -I. $< -o $@ $(LIBS)
$(BUILD)/tests/%: tests/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(CFLAGS) -I. -Itests $< -o $@ $(LIBS)
$(BUILD)/tests/test_nccl: CFLAGS += -Itests/nccl_mock
$(BUILD)/bench/%: bench/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(CFLAGS) -I. -Ibench $< -o $@ $(LIBS) -ldl

$(BUILD)/emu/dtrain_cuda.o: dtrain_cuda.cu $(HEADERS)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -Wall -Wextra -Werror $(CFLAGS) $(EMULATION) -I. -x c++ -c $< -o $@
$(BUILD)/emu/%.o: %.cpp $(HEADERS)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -Wall -Wextra -Werror $(CFLAGS) $(EMULATION) -I. -Itests -c $< -o $@
$(BUILD)/emu/%.o: %.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(CFLAGS) $(EMULATION) -I. -Itests -c $< -o $@
$(BUILD)/emu/test_cuda_nccl.o: EMULATION += -Itests/nccl_mock
$(BUILD)/emu/emulated.a: $(addprefix $(BUILD)/emu/,dtrain_cuda.o cuda_emulation.o)
	rm -f $@ && $(AR) rc $@ $^
$(BUILD)/emu/%: $(BUILD)/emu/%.o $(BUILD)/emu/emulated.a
	$(CXX) $(CFLAGS) $^ -o $@ $(LIBS)

$(BUILD)/cuda/dtrain_cuda.o: dtrain_cuda.cu dtrain.h
	@mkdir -p $(@D)
	$(NVCC) -O3 -std=c++17 $(ARCH) -I. -c $< -o $@
$(BUILD)/cuda/%: %.c $(BUILD)/cuda/dtrain_cuda.o $(HEADERS)
	$(NVCC) -O3 $(ARCH) -DDTRAIN_USE_CUDA -I. -Itests $< $(BUILD)/cuda/dtrain_cuda.o -o $@ -lcublasLt $(LIBS) $(NCCL)

.PHONY: examples help run cuda gpu-programs gpu-check test bench bench-strategies asan ubsan tsan valgrind fuzz mutate golden lint clean
.SECONDARY:
.DELETE_ON_ERROR:
