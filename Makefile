# dtrain needs a C compiler and make; everything else here is optional and says so when it is absent.
#   make run      trains a GPT on real text, two ranks of this machine's CPU, about a minute
#   make test     builds and runs all tests, those of the GPU kernels on the CPU
#   make cuda     the examples for NVIDIA GPUs
#   make mpi      the examples for CPUs of several hosts
# Variables: CC, CXX, CFLAGS, BUILD (folder), CBLAS=1 (OpenBLAS instead of the built-in GEMM), MPICC, NVCC,
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

GPU_TESTS := $(wildcard tests/cuda/test_cuda_*.c)
PROGRAMS  := $(wildcard examples/*.c) tools/train_gpt/train_gpt.c tools/simulate/simulate.c
EXAMPLES  := $(patsubst %.c,$(BUILD)/%,$(notdir $(PROGRAMS)))
TESTS     := $(patsubst %.c,$(BUILD)/tests/%,$(notdir $(wildcard tests/unit/test_*.c) tests/nccl/test_nccl.c))
BENCHES   := $(patsubst bench/%.c,$(BUILD)/bench/%,$(wildcard bench/bench_*.c))

examples: $(EXAMPLES)

help:
	@echo "make            the examples, in $(BUILD)/"
	@echo "make run        the main job: $(BUILD)/train_gpt (ARGS=\"--help\" shows its flags)"
	@echo "make cuda       the examples for NVIDIA GPUs, in $(BUILD)/cuda/ (nvcc)"
	@echo "make mpi        the examples over MPI, in $(BUILD)/mpi/ (MPICC=mpicc): mpirun -n 4 $(BUILD)/mpi/train_gpt --comm mpi"
	@echo "make test       all tests; prints what was skipped for want of an optional tool"
	@echo "make bench      GEMM, collectives and training, beside their rivals where installed"
	@echo "make bench-strategies  speed, memory and bytes of every strategy (ARGS=\"--help\")"
	@echo "make bench-comm        exchanges of gradients over slow links, and what helps (ARGS=\"--help\")"
	@echo "make bench-scaling     1 to 8 ranks of this machine, then 64 and 256 (ARGS=\"--help\")"
	@echo "make check-simulator   build/simulate's predictions beside published scaling"
	@echo "make gpu-check  with an NVIDIA GPU: tests, sanitizers, NCCL, benchmarks; 9 minutes"
	@echo "make asan tsan  the tests under the address and undefined behaviour sanitizers, or that of threads"
	@echo "make valgrind   the tests that valgrind can run"
	@echo "make fuzz       30 seconds of fuzzing for each parser (clang)"
	@echo "make mutate     breaks the GPU kernels in N=40 places and counts what the tests notice"
	@echo "make golden     makes the PyTorch reference values again and compares (python3, torch)"
	@echo "make lint       formatting, contents of dtrain.h, warnings of other compilers"
	@echo "make clean"

run: $(BUILD)/train_gpt
	$(BUILD)/train_gpt $(ARGS)

# ---- The GPU kernels on the CPU -------------------------------------------------------------------
# dtrain_cuda.cu, compiled as C++ over stand-ins for CUDA (tests/cuda/emulation), and the same C
# programs linked with it: they need a C++ compiler and no GPU.
ifeq ($(origin CXX),default)
CXX := $(if $(findstring clang,$(CC)),clang++,g++)
endif
EMULATION := -DDTRAIN_CUDA_EMULATION -DDTRAIN_USE_CUDA -Itests/cuda/emulation
ifneq ($(shell command -v $(CXX)),)
EMU_TESTS := $(patsubst tests/cuda/%.c,$(BUILD)/emu/%,$(GPU_TESTS)) $(BUILD)/emu/test_emulation
# These start ranks, on every core; the others are one thread each.
WITH_RANKS := %_ddp %_nccl %_strategies %_compression %_offload
EMU_BENCH := $(BUILD)/emu/bench_kernels $(BUILD)/emu/bench_train $(BUILD)/emu/train_gpt
else
EMU_TESTS := "skip the GPU kernels: their tests need a C++ compiler, and $(CXX) is not installed"
endif

# ---- Tests ----------------------------------------------------------------------------------------
SCRIPTS ?= tests/cli/test_examples.sh tests/cli/test_bench.sh tests/cli/test_launchers.sh \
           tests/nccl/test_nccl.sh tests/cli/test_mpi.sh tests/cli/test_slurm.sh tests/cli/test_simulator.sh
COMPILING ?= tests/cuda/cuda_build.sh tests/scripts/test_compile.sh
test: $(EXAMPLES) $(TESTS) $(BENCHES) $(filter $(BUILD)/%,$(EMU_TESTS)) $(EMU_BENCH)
	@BUILD=$(BUILD) CC="$(CC)" sh tests/scripts/run.sh $(TESTS) $(filter $(WITH_RANKS),$(EMU_TESTS)) $(SCRIPTS) \
	  --beside $(COMPILING) $(filter-out $(WITH_RANKS),$(EMU_TESTS))

LONG_BENCHES := %/bench_strategies %/bench_comm %/bench_scaling
bench: $(BENCHES)
	@for b in $(filter-out $(LONG_BENCHES),$(BENCHES)); do echo "== $$b $(ARGS)"; $$b $(ARGS) || exit 1; echo; done
check-simulator: $(BUILD)/simulate
	$(BUILD)/simulate --check tools/simulate/published.txt
bench-strategies: $(BUILD)/train_gpt $(BUILD)/bench/bench_strategies
	$(BUILD)/bench/bench_strategies $(ARGS)
bench-comm: $(BUILD)/train_gpt $(BUILD)/bench/bench_comm
	$(BUILD)/bench/bench_comm --program $(BUILD)/train_gpt $(ARGS)
bench-scaling: $(BUILD)/train_gpt $(BUILD)/bench/bench_scaling
	$(BUILD)/bench/bench_scaling --program $(BUILD)/train_gpt $(ARGS)

# A sanitizer build is the same tests in a folder of its own; benchmarks would measure the sanitizer.
# Kernel threads are fibers: what a sanitizer knows of a stack must not move to its own heap.
asan: export SCRIPTS = tests/cli/test_examples.sh
tsan: export SCRIPTS =
asan tsan: export COMPILING =
NO_BENCH := BENCHES= EMU_BENCH=
asan: export ASAN_OPTIONS = detect_leaks=1:detect_stack_use_after_return=0
asan:
	$(MAKE) test BUILD=build/asan $(NO_BENCH) \
	  CFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
# Ranks that are threads, and the threads of a rank, are what there is to look at; emulated kernels run on one thread.
tsan:
	$(MAKE) test BUILD=build/tsan CFLAGS="-O1 -g -fsanitize=thread" $(NO_BENCH) EXAMPLES= \
	  EMU_TESTS="$(addprefix build/tsan/emu/,test_cuda_ddp test_cuda_nccl)" \
	  TESTS="$(addprefix build/tsan/tests/test_,comm faults launch links nccl ddp strategies compression \
	    trainer gemm device sparse)"
valgrind: $(TESTS)
	@BUILD=$(BUILD) sh tests/scripts/valgrind.sh

fuzz:
	@mkdir -p $(BUILD)/fuzz
	@for f in $(wildcard tests/fuzz/fuzz_*.c); do \
	  out=$(BUILD)/fuzz/$$(basename $$f .c); echo "== $$f"; \
	  clang -O1 -g -I. -fsanitize=fuzzer,address,undefined $$f -o $$out $(LIBS) && \
	  $$out -max_total_time=$${FUZZ_SECONDS:-30} -print_final_stats=0 -verbosity=0 || exit 1; done

N ?= 40
mutate:
	@BUILD=$(BUILD) CC="$(CC)" CXX="$(CXX)" sh tests/cuda/mutate_cuda.sh $(N)

golden:
	sh tests/reference/check.sh

lint:
	@CC="$(CC)" sh tests/scripts/lint.sh

clean:
	rm -rf build

# ---- GPUs -----------------------------------------------------------------------------------------
NVCC      ?= nvcc
CUDA_ARCH ?= $(if $(shell nvidia-smi -L 2>/dev/null | grep ^GPU),native,80 90)
ARCH = $(foreach a,$(CUDA_ARCH),$(if $(filter native,$a),-arch=native,-gencode=arch=compute_$a,code=sm_$a))
NCCL = $(if $(shell echo '\#include <nccl.h>' | $(NVCC) -E -x cu - >/dev/null 2>&1 && echo yes),-DDTRAIN_USE_NCCL -ldl)

cuda: $(patsubst $(BUILD)/%,$(BUILD)/cuda/%,$(EXAMPLES))
gpu-programs: cuda $(patsubst tests/cuda/%.c,$(BUILD)/cuda/%,$(filter-out tests/cuda/test_cuda_nccl.c,$(GPU_TESTS))) \
              $(BUILD)/cuda/bench_kernels $(BUILD)/cuda/bench_train
gpu-check:
	@BUILD=$(BUILD) bash tests/cuda/gpu_check.sh

# ---- MPI ------------------------------------------------------------------------------------------
MPICC ?= mpicc
mpi: $(patsubst $(BUILD)/%,$(BUILD)/mpi/%,$(EXAMPLES))

# ---- The product, joined from src/ ----------------------------------------------------------------
SRC := $(wildcard src/*.h src/*.cu src/*/*.[ch] src/*/*/*.[ch]* src/*/*/*/*.[ch])
dtrain.h dtrain_cuda.cu dtrain_nccl.h: $(SRC) tools/join.sh
	sh tools/join.sh src/$@ >$@.new && mv $@.new $@

# ---- Rules ----------------------------------------------------------------------------------------
vpath %.c   examples tools/train_gpt tools/simulate tests/unit tests/cuda tests/nccl bench
vpath %.cpp tests/cuda tests/cuda/emulation
HEADERS := $(wildcard dtrain*.h tools/*.h tools/*/*.h tests/*/*.h tests/*/*/*.h bench/*.h) tests/nccl/mock/nccl_mock.c
TEST_INCLUDES := -I. -Itests -Itests/support -Itests/cuda

# The implementation, compiled once for the tests and benchmarks that use what the header declares. From
# an archive: a program that has it within itself, to look inside, takes none of this.
IMPLEMENTATION = printf '\#define DTRAIN_IMPLEMENTATION\n\#include "dtrain.h"\n' | $(CC) $(STRICT) $(CFLAGS) -I. -x c -c -
$(BUILD)/dtrain.a: dtrain.h
	@mkdir -p $(@D)
	$(IMPLEMENTATION) -o $(@:.a=.o)
	rm -f $@ && $(AR) rc $@ $(@:.a=.o)

$(BUILD)/%: %.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(CFLAGS) -I. $< -o $@ $(LIBS)
$(BUILD)/tests/%: %.c $(BUILD)/dtrain.a $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(CFLAGS) $(TEST_INCLUDES) $< $(BUILD)/dtrain.a -o $@ $(LIBS)
$(BUILD)/tests/test_nccl: CFLAGS += -Itests/nccl/mock
$(BUILD)/bench/%: bench/%.c $(BUILD)/dtrain.a $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(CFLAGS) -I. -Ibench $< $(BUILD)/dtrain.a -o $@ $(LIBS) -ldl

$(BUILD)/mpi/%: %.c $(HEADERS)
	@mkdir -p $(@D)
	$(MPICC) $(STRICT) $(CFLAGS) -DDTRAIN_USE_MPI -I. $< -o $@ $(LIBS)

$(BUILD)/emu/dtrain_cuda.o: dtrain_cuda.cu $(HEADERS)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -Wall -Wextra -Werror $(CFLAGS) $(EMULATION) -I. -x c++ -c $< -o $@
$(BUILD)/emu/dtrain.o: dtrain.h
	@mkdir -p $(@D)
	$(IMPLEMENTATION) $(EMULATION) -o $@
$(BUILD)/emu/%.o: %.cpp $(HEADERS)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -Wall -Wextra -Werror $(CFLAGS) $(EMULATION) $(TEST_INCLUDES) -c $< -o $@
$(BUILD)/emu/%.o: %.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(STRICT) $(CFLAGS) $(EMULATION) $(TEST_INCLUDES) -c $< -o $@
$(BUILD)/emu/test_cuda_nccl.o $(BUILD)/emu/test_cuda_compression.o: EMULATION += -Itests/nccl/mock
$(BUILD)/emu/emulated.a: $(addprefix $(BUILD)/emu/,dtrain.o dtrain_cuda.o cuda_emulation.o)
	rm -f $@ && $(AR) rc $@ $^
$(BUILD)/emu/%: $(BUILD)/emu/%.o $(BUILD)/emu/emulated.a
	$(CXX) $(CFLAGS) $^ -o $@ $(LIBS)

$(BUILD)/cuda/dtrain_cuda.o: dtrain_cuda.cu dtrain.h
	@mkdir -p $(@D)
	$(NVCC) -O3 -std=c++17 $(ARCH) -I. -c $< -o $@
$(BUILD)/cuda/dtrain.o: dtrain.h
	@mkdir -p $(@D)
	$(IMPLEMENTATION) -DDTRAIN_USE_CUDA -o $@
$(BUILD)/cuda/dtrain.a: $(addprefix $(BUILD)/cuda/,dtrain.o dtrain_cuda.o)
	rm -f $@ && $(AR) rc $@ $^
$(BUILD)/cuda/%: %.c $(BUILD)/cuda/dtrain.a $(HEADERS)
	$(NVCC) -O3 $(ARCH) -DDTRAIN_USE_CUDA $(TEST_INCLUDES) $< $(BUILD)/cuda/dtrain.a -o $@ -lcublasLt $(LIBS) $(NCCL)

.PHONY: examples help run cuda mpi gpu-programs gpu-check test bench bench-strategies bench-comm bench-scaling check-simulator asan tsan valgrind fuzz mutate golden lint clean
.SECONDARY:
.DELETE_ON_ERROR:
