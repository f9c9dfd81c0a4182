# dtrain needs a C compiler and make; everything else here is optional and says so when it is absent.
#   make run      trains a GPT on sums in words, two ranks of this machine's CPU, about a minute
#   make test     builds and runs the tests, with the GPU kernels on the CPU, about four minutes
#   make cuda     the examples for NVIDIA GPUs
#   make mpi      the examples for CPUs of several hosts
# Variables: CC, CXX, CFLAGS, BUILD (folder), CBLAS=1 (OpenBLAS instead of the built-in GEMM), MPICC, NVCC,
# CUDA_ARCH ("90", "80 90", ...; default: the GPU of this machine, without one 80 and 90), NVCCFLAGS, PREFIX, DESTDIR,
# V=1 (the commands in place of one short line for each; make -s prints neither),
# LESS (tests that make test leaves out: "tests/test_comm emu/test_cuda_nccl"), FROM=src (programs are linked with the
# objects of src/, which fewer and parallel compilations make, in place of dtrain.h as it is shipped).

CC      ?= cc
CFLAGS  ?= -O2 -g1
BUILD   ?= build
PREFIX  ?= /usr/local
ARGS    ?=
STRICT  := -std=c99 -pedantic -Wall -Wextra -Wconversion -Werror
LIBS    := -lm -lpthread $(if $(CBLAS),-lopenblas)
DEFINES := $(if $(CBLAS),-DDTRAIN_USE_CBLAS)

# A line of a recipe begins with $(call quiet,WORD,FILE): what is printed for it in place of its command.
quiet = $(if $(filter-out 0,$(V)),,@$(if $(findstring s,$(firstword -$(MAKEFLAGS))),,$(info $()  $(1)  $(2))))

# One job for each core; -j on the command line goes before.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 1)
endif

PROGRAMS  := $(wildcard examples/*.c) $(addprefix tools/,train_gpt/train_gpt.c simulate/simulate.c flight/flight.c trace/trace.c \
             report/report.c dtrain-run/dtrain-run.c)
EXAMPLES  := $(patsubst %.c,$(BUILD)/%,$(notdir $(PROGRAMS)))
UNIT      := $(wildcard $(patsubst %,tests/%/test_*.c,unit inside kernels wrapped fuzz nccl))
GPU       := $(wildcard tests/cuda/test_cuda_*.c)
SOURCES   := $(shell find src -name '*.c' 2>/dev/null)
TESTS     := $(patsubst %.c,$(BUILD)/tests/%,$(notdir $(UNIT)))
HOSTS     := $(addprefix $(BUILD)/,flat_array flat_array_dtrain host fit.so fit_dtrain.so plugin_footprint)
BENCHES   := $(patsubst bench/%.c,$(BUILD)/bench/%,$(wildcard bench/bench_*.c))

examples: $(EXAMPLES)
	@echo "$(words $(EXAMPLES)) programs are in $(BUILD)/. Try: make run, $(BUILD)/mlp, $(BUILD)/train_gpt --help, make help"

help:
	@echo "make            the examples, in $(BUILD)/"
	@echo "make run        the main job: $(BUILD)/train_gpt (ARGS=\"--help\" shows its flags)"
	@echo "make cuda       the examples for NVIDIA GPUs, in $(BUILD)/cuda/ (nvcc)"
	@echo "make mpi        the examples over MPI, in $(BUILD)/mpi/ (MPICC=mpicc): mpirun -n 4 $(BUILD)/mpi/train_gpt --comm mpi"
	@echo "make bindings   modules for Fortran and Python, in $(BUILD)/: dtrain.f90, dtrain.py"
	@echo "make lib        $(BUILD)/libdtrain.so and .a, for programs that do not compile dtrain.h; make lib-cuda: libdtrain_cuda.so too"
	@echo "make install    header and library to PREFIX=$(PREFIX), with files for pkg-config; also install-headers, uninstall"
	@echo "make bindings   modules for Fortran and Python, in $(BUILD)/: dtrain.f90, dtrain.py"
	@echo "make test       the tests; prints what was skipped for want of an optional tool"
	@echo "make test-all   with the long ones: every case of every matrix, dialects, MPI, Slurm, nvcc, NCCL's versions, benchmarks"
	@echo "make test-long  the long scripts alone"
	@echo "make nightly    what takes hours: test-all under both compilers, all of it under sanitizers, mutations, long fuzzing"
	@echo "make bench      GEMM, collectives and training, beside their rivals where installed"
	@echo "make bench-strategies  speed, memory and bytes of every strategy, PyTorch beside them (ARGS=\"--help\")"
	@echo "make bench-comm        exchanges of gradients over slow links, and what helps (ARGS=\"--help\")"
	@echo "make bench-scaling     1 to 8 ranks of this machine, then 64 and 256 (ARGS=\"--help\")"
	@echo "make check-simulator   $(BUILD)/simulate's predictions beside published scaling"
	@echo "make gpu-first  with an NVIDIA GPU: what only a GPU can answer, in 4 minutes; without make: bash tests/cuda/gpu_first.sh"
	@echo "make gpu-check  with an NVIDIA GPU: tests, NCCL, training, sanitizers; 9 minutes"
	@echo "make gpu-bench  with an NVIDIA GPU: training beside PyTorch, kernels, strategies; 9 minutes"
	@echo "make asan tsan  the tests under the address and undefined behaviour sanitizers, or that of threads"
	@echo "make valgrind   the tests that valgrind can run"
	@echo "make fuzz       30 seconds of fuzzing for each parser (clang)"
	@echo "make coverage   which lines of src/ the tests execute, folder by folder (gcov)"
	@echo "make fuzz-programs fuzz-tensor_programs fuzz-calls fuzz-launches   N=1000 random programs in which ranks differ, programs over a tensor axis, calls of communicators, launches"
	@echo "make mutate     breaks the GPU kernels in N=40 places and counts what the tests notice"
	@echo "make golden     makes the PyTorch reference values again and compares (python3, torch)"
	@echo "make checks     valgrind, fuzz, golden and lint, beside one another"
	@echo "make src        compiles each file of src/ alone"
	@echo "make dtrain.h dtrain_cuda.cu dtrain_nccl.h   joins them from src/"
	@echo "make lint       formatting, walls between folders, joined files, warnings of other tools"
	@echo "make clean      removes $(BUILD)/"
	@echo "V=1             prints whole commands: make V=1"

run: $(BUILD)/train_gpt $(BUILD)/report
	$(BUILD)/train_gpt $(ARGS)

# ---- The GPU kernels on the CPU -------------------------------------------------------------------
# dtrain_cuda.cu, compiled as C++ over stand-ins for CUDA (tests/cuda/emulation), and the same C
# programs linked with it: they need a C++ compiler and no GPU.
ifeq ($(origin CXX),default)
CXX := $(if $(findstring clang,$(CC)),clang++,g++)
endif
ifneq ($(shell command -v $(CXX)),)
EMU_TESTS := $(patsubst tests/cuda/%.c,$(BUILD)/emu/%,$(GPU)) $(BUILD)/emu/test_emulation $(BUILD)/emu/test_programs \
             $(BUILD)/emu/test_tensor_programs $(BUILD)/emu/test_pipeline
HOSTS     += $(BUILD)/emu/flat_array_dtrain
EMU_BENCH := $(addprefix $(BUILD)/emu/,bench_kernels bench_train train_gpt ddp offload gpu_nccl)
else
EMU_TESTS := "skip the GPU kernels: their tests need a C++ compiler, and $(CXX) is not installed"
endif

# ---- Tests ----------------------------------------------------------------------------------------
# run.sh takes them in this order, some at a time: the longest come first, those that wait beside those that compute.
LONGEST := $(patsubst %.sh,tests/%.sh,$(patsubst unit-%,$(BUILD)/tests/test_%,$(patsubst emu-%,$(BUILD)/emu/test_%, \
             unit-rendezvous cli/test_examples.sh emu-cuda_nccl full/test_resume.sh unit-storage_faults cli/test_run.sh emu-cuda_strategies \
             cli/test_troubles.sh unit-strategies unit-nccl unit-programs full/test_launchers.sh unit-comm full/test_config.sh unit-restart \
             full/test_tensor.sh cli/test_pipeline.sh unit-flight unit-compression unit-launches emu-programs unit-calls emu-cuda_compression \
             full/test_switches.sh)))
LONG    := $(addprefix tests/long/,cuda_build.sh test_mpi.sh test_compile.sh test_documents.sh mutants_pipeline.sh)
LONG    += $(filter-out $(LONG),$(wildcard tests/long/*.sh)) $(if $(filter 2,$(DTRAIN_TEST_FULL)),$(wildcard tests/nightly/*.sh))
# Without DTRAIN_TEST_FULL these wait, so that make test ends in four minutes on two cores: whole suites over again on
# emulated GPUs, and tests/full, programs whose ranks are killed, stopped or set differently, and other languages.
FULL    := $(DTRAIN_TEST_FULL)$(filter test-all nightly,$(MAKECMDGOALS))
LATER   := $(if $(FULL),,$(addprefix $(BUILD)/emu/test_, cuda_nccl cuda_strategies cuda_compression pipeline programs tensor_programs))
SCRIPTS := $(wildcard tests/cli/test_*.sh $(if $(FULL),tests/full/test_*.sh))
ALL     := $(filter-out $(addprefix $(BUILD)/,$(LESS)) $(LATER),$(TESTS) $(filter $(BUILD)/%,$(EMU_TESTS)) $(SCRIPTS))
MPIS    := $(foreach m,openmpi mpich,$(if $(shell command -v mpicc.$m),$m))
RUN      = BUILD=$(BUILD) CC="$(CC)" LINKED="$(LINKED)" sh tests/scripts/run.sh

FAST     = $(filter $(ALL),$(LONGEST)) $(filter-out $(LONGEST),$(ALL)) $(filter-out $(BUILD)/%,$(EMU_TESTS))
# What several scripts need is built before them: they run in parallel, and each would build it.
SHARED   = $(if $(filter $(addprefix tests/full/test_,lib.sh bindings.sh host_fortran.sh host_python.sh),$(ALL)),lib bindings) $(if $(filter tests/cli/test_hosts.sh,$(ALL)),$(HOSTS)) $(if $(filter tests/cli/test_examples.sh,$(ALL)),$(filter %/offload,$(EMU_BENCH)))
programs: $(filter-out $(BUILD)/simulate,$(EXAMPLES)) $(filter $(BUILD)/%,$(ALL)) $(SHARED)
test: programs
	@$(RUN) $(FAST)
test-long: $(EXAMPLES) $(BENCHES) $(addprefix $(BUILD)/,export_gpt2 tokenize llama_logits monitor_run) $(EMU_BENCH) $(MPIS)
	@$(RUN) $(LONG)
test-all: $(EXAMPLES) $(BENCHES) $(addprefix $(BUILD)/,export_gpt2 tokenize llama_logits monitor_run) $(EMU_BENCH) $(MPIS) $(filter $(BUILD)/%,$(ALL)) $(SHARED)
	@DTRAIN_TEST_FULL=$${DTRAIN_TEST_FULL:-1} $(RUN) $(LONG) $(FAST)

LONG_BENCHES := %/bench_strategies %/bench_comm %/bench_scaling
bench: $(BENCHES) $(BUILD)/resnet_cifar
	@for b in $(filter-out $(LONG_BENCHES),$(BENCHES)); do echo "== $$b $(ARGS)"; $$b $(ARGS) || exit 1; echo; done
check-simulator: $(BUILD)/simulate
	$(BUILD)/simulate --check tools/simulate/published.txt
bench-strategies: $(BUILD)/train_gpt $(BUILD)/resnet_cifar $(BUILD)/bench/bench_strategies
	$(BUILD)/bench/bench_strategies --program $(BUILD)/train_gpt --images $(BUILD)/resnet_cifar $(ARGS)
bench-comm: $(BUILD)/train_gpt $(BUILD)/bench/bench_comm
	$(BUILD)/bench/bench_comm --program $(BUILD)/train_gpt $(ARGS)
bench-scaling: $(BUILD)/train_gpt $(BUILD)/bench/bench_scaling
	$(BUILD)/bench/bench_scaling --program $(BUILD)/train_gpt $(ARGS)

# A sanitizer build is the same tests in a folder of its own.
# Lines are enough to name a place, and compile in three quarters of the time. Kernel threads are fibers: what a
# sanitizer knows of a stack must not move to its own heap.
asan: export ASAN_OPTIONS = detect_leaks=1:detect_stack_use_after_return=0
asan:
	@$(MAKE) --no-print-directory test LATER= FROM=src BUILD=$(BUILD)/asan SCRIPTS=tests/cli/test_examples.sh \
	  CFLAGS="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
# Ranks that are threads, and the threads of a rank, are what there is to look at; emulated kernels run on one thread.
tsan:
	@$(MAKE) --no-print-directory test LATER= FROM=src BUILD=$(BUILD)/tsan SCRIPTS= EXAMPLES= CFLAGS="-O1 -g1 -fsanitize=thread" \
	  EMU_TESTS="$(addprefix $(BUILD)/tsan/emu/,test_cuda_ddp test_cuda_nccl)" \
	  TESTS="$(addprefix $(BUILD)/tsan/tests/test_,comm faults flight calls launch restart restarts links nccl ddp strategies compression hook programs tensor_programs 3d_programs ranks_differ pipeline pipeline_faults pipeline_options stage_passes pipeline_runner timeline \
	    trainer loader gemm device sparse)"

# What else reads or runs the code, each a target of its own, and all beside one another.
valgrind: $(TESTS)
	@BUILD=$(BUILD) sh tests/scripts/valgrind.sh
# Fuzzers see which branches of the library their input takes: it is compiled once more, for all of them.
FUZZERS := $(if $(shell command -v clang),$(patsubst %.c,$(BUILD)/fuzz/%,$(notdir $(wildcard tests/fuzz/fuzz_*.c))))
FUZZED  := -O1 -g1 -DDTRAIN_NO_SIMD -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
fuzzers:
	@$(if $(FUZZERS),$(MAKE) --no-print-directory FROM=src BUILD=$(BUILD)/fuzz CC=clang CFLAGS="$(FUZZED)" $(FUZZERS))
fuzz: fuzzers
	@BUILD=$(BUILD) sh tests/scripts/fuzz.sh
# N random programs of a kind: make fuzz-programs N=10000
fuzz-%: N = 1000
fuzz-%: $(BUILD)/tests/test_%
	$< --count $(N)
coverage:
	@BUILD=$(BUILD) CC="$(CC)" sh tests/scripts/coverage.sh
golden:
	@sh tests/reference/check.sh
lint:
	@BUILD=$(BUILD) CC="$(CC)" sh tests/scripts/lint.sh
checks: $(TESTS) fuzzers
	@$(RUN) tests/scripts/valgrind.sh tests/scripts/lint.sh tests/scripts/fuzz.sh tests/reference/check.sh

N ?= 40
mutate:
	@BUILD=$(BUILD) CC="$(CC)" CXX="$(CXX)" sh tests/cuda/mutate_cuda.sh $(N)

nightly: export DTRAIN_TEST_FULL = 2
nightly: export DTRAIN_TEST_SEED = new
nightly: export DTRAIN_TEST_DIALECTS = 1
nightly: export FUZZ_SECONDS = 600
nightly: export CUDA_ARCH = 75 80 86 89 90 100 120
nightly:
	$(MAKE) test-all
	$(MAKE) test-all CC=clang BUILD=$(BUILD)/clang
	$(MAKE) test CBLAS=1 BUILD=$(BUILD)/cblas SCRIPTS=tests/cli/test_examples.sh
	$(MAKE) asan CC=clang
	$(MAKE) tsan
	$(MAKE) checks
	$(MAKE) mutate N=200

# ---- GPUs -----------------------------------------------------------------------------------------
NVCC      ?= nvcc
CUDA_ARCH ?= $(if $(shell nvidia-smi -L 2>/dev/null | grep ^GPU),native,80 90)
ARCH = $(foreach a,$(CUDA_ARCH),$(if $(filter native,$a),-arch=native,-gencode=arch=compute_$a,code=sm_$a))
NCCL = $(if $(shell echo '\#include <nccl.h>' | $(NVCC) $(NVCCFLAGS) -E -x cu - >/dev/null 2>&1 && echo yes),-DDTRAIN_USE_NCCL -ldl)

cuda: $(EXAMPLES:$(BUILD)/%=$(BUILD)/cuda/%)
	@echo "$(words $(EXAMPLES)) programs are in $(BUILD)/cuda/. Try: $(BUILD)/cuda/train_gpt --device cuda, make gpu-check"
gpu-programs: cuda $(patsubst tests/cuda/%.c,$(BUILD)/cuda/%,$(filter-out $(addprefix tests/cuda/test_cuda_,nccl.c join.c),$(GPU))) \
              $(BUILD)/cuda/bench_kernels $(BUILD)/cuda/bench_train
gpu-first gpu-check gpu-bench:
	@BUILD=$(BUILD) bash tests/cuda/$(subst -,_,$@).sh

# ---- MPI ------------------------------------------------------------------------------------------
MPICC ?= mpicc
mpi: $(EXAMPLES:$(BUILD)/%=$(BUILD)/mpi/%)
	@echo "$(words $(EXAMPLES)) programs are in $(BUILD)/mpi/. Try: mpirun -n 4 $(BUILD)/mpi/train_gpt --comm mpi"
# What the tests start under each MPI that is installed, in a folder of its own.
openmpi mpich:
	@$(MAKE) --no-print-directory BUILD=$(BUILD)/$@ MPICC=mpicc.$@ $(addprefix $(BUILD)/$@/mpi/,test_mpi small_mpi test_programs train_gpt over_mpi solver solver_dtrain)

# ---- Rules ----------------------------------------------------------------------------------------
# Every result depends on the files that its compiler has read (it lists them in a .d file) and on a file with the
# flags of its compiler (flags): when one of them changes it is built again.
vpath %.c   examples $(wildcard examples/hosts/*) $(sort $(dir $(filter tools/%,$(PROGRAMS)) $(UNIT))) tests/cuda tests/cli tests/long tests/fuzz bench
vpath %.cpp tests/cuda tests/cuda/emulation
STRICT_CXX := -std=c++17 -Wall -Wextra -Werror
OPTIONS = $(CFLAGS) $(DEFINES) -I. -MMD -MP -MF $@.d -MT $@
TEST_INCLUDES := -Itests -Itests/support -Itests/unit -Itests/cuda -Itests/nccl/mock -Ibench
-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

$(BUILD)/flags:      FLAGS = $(CC) $(CXX) $(CFLAGS) $(DEFINES)
$(BUILD)/mpi/flags:  FLAGS = $(MPICC) $(CFLAGS) $(DEFINES)
$(BUILD)/cuda/flags: FLAGS = $(NVCC) $(ARCH) $(NVCCFLAGS) $(NCCL) $(CC) $(CFLAGS) $(DEFINES)
%/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' >$@
FORCE:

# Tests run nearly as fast with -O1, and compile in two thirds of the time; so do the emulated kernels, which change
# threads most of the time. The library that tests are linked with keeps its flags.
$(BUILD)/tests/test_% $(BUILD)/emu/test_%.o $(BUILD)/emu/dtrain_cuda.o: private override CFLAGS := $(CFLAGS:-O2=-O1)

# The implementation is compiled once, for everything that calls the public API alone. Examples and tools are linked
# with it too, although their text asks for an implementation of their own: it is written for whoever compiles them by
# one line. They include what they use, so this is also how they compile where a user takes that line out. Tests that look inside include what they want of src/, internal headers or a
# whole file, and are linked with all of src/, where private functions can be called; benchmarks that use these too. The
# tools that read files of a run need a few objects of it, and dtrain-run has a separate implementation, only the core:
# whoever builds only the programs compiles the library once.
LINKED  := -DDTRAIN__IMPLEMENTED
PRIVATE := $(shell grep -l 'dtrain__\|DTRAIN__' $(PROGRAMS) $(wildcard bench/*.c) 2>/dev/null)
ASKING   = $(if $(filter $(notdir $(PRIVATE)),$(<F)),,$(LINKED))
INTERNAL = $(LINKED) -iquote src $(addprefix -include ,$(patsubst src/%,%,$(wildcard src/*/*_internal.h)))
INSIDE  := $(patsubst %.c,$(BUILD)/tests/%,$(notdir $(filter tests/inside/% tests/kernels/%,$(UNIT))))
# Tests that look at the kernels of every instruction set share one object with those that the library has not.
KERNELS := $(patsubst tests/kernels/%.c,$(BUILD)/tests/%,$(filter tests/kernels/%,$(UNIT)))
# The library as objects of src/, which tests that look inside, the emulated GPU and sanitized programs are linked with: it
# is compiled once for all of them, by as many jobs as there are.
PARTS          = $(patsubst %.c,$(BUILD)/%.o,$(filter-out src/comm/nccl/%,$(SOURCES)))
IMPLEMENTATION = $(call quiet,CC,$< (the whole library once: 10 to 20 seconds))printf '\#define DTRAIN_IMPLEMENTATION\n\#include "dtrain.h"\n' | $(CC) $(STRICT) $(OPTIONS) -x c -c - -o $@
ARCHIVE        = $(call quiet,AR,$@)rm -f $@ && $(AR) rc $@ $^
OBJECT         = $(call quiet,CC,$<)$(CC) $(STRICT) $(OPTIONS) -c $< -o $@
PROGRAM        = $(call quiet,LD,$@)$(CC) $(STRICT) $(OPTIONS)

$(BUILD)/dtrain.o: dtrain.h $(BUILD)/flags
	$(IMPLEMENTATION)
$(BUILD)/dtrain.a: $(if $(filter src,$(FROM)),$(PARTS),$(BUILD)/dtrain.o)
	$(ARCHIVE)
$(BUILD)/%: %.c $(BUILD)/dtrain.a
	@mkdir -p $(@D)
	$(PROGRAM) $(ASKING) $< $(BUILD)/dtrain.a -o $@ $(LIBS)
# A plugin and the program that opens it (examples/hosts/plugin), which is not linked with the library.
$(BUILD)/host $(BUILD)/plugin_footprint: $(BUILD)/%: %.c $(BUILD)/flags
	$(PROGRAM) $(TEST_INCLUDES) $< -o $@ -lm -lpthread -ldl
$(BUILD)/fit.so $(BUILD)/fit_dtrain.so: $(BUILD)/%.so: %.c $(BUILD)/flags
	$(PROGRAM) -fPIC -fvisibility=hidden -shared $< -o $@ $(LIBS)
READING = flight trace report
$(READING:%=$(BUILD)/%): $(BUILD)/%: %.c $(patsubst %.c,$(BUILD)/%.o,$(wildcard src/core/*.c))
	$(PROGRAM) $(INTERNAL) $< $(filter %.o,$^) -o $@ $(LIBS)
$(BUILD)/dtrain-run: dtrain-run.c $(BUILD)/flags
	$(PROGRAM) -DDTRAIN_CORE $< -o $@ $(LIBS)
# None of them computes: beside the programs for MPI and GPUs they are the same.
COPY = @mkdir -p $(@D) && cp $< $@
$(addprefix $(BUILD)/mpi/,$(READING) dtrain-run): $(BUILD)/mpi/%: $(BUILD)/%
	$(COPY)
$(addprefix $(BUILD)/cuda/,$(READING) dtrain-run): $(BUILD)/cuda/%: $(BUILD)/%
	$(COPY)
$(patsubst %.c,$(BUILD)/%,$(filter bench/%,$(PRIVATE))): $(BUILD)/%: %.c $(BUILD)/sources.a
	@mkdir -p $(@D)
	$(PROGRAM) $(INTERNAL) -Ibench $< $(BUILD)/sources.a -o $@ $(LIBS) -ldl
$(BUILD)/tests/%: %.c $(BUILD)/dtrain.a
	@mkdir -p $(@D)
	$(PROGRAM) $(TEST_INCLUDES) $< $(BUILD)/dtrain.a -o $@ $(LIBS)
# The functions that these tests define as __wrap_NAME stand between the library and the C library.
$(patsubst tests/wrapped/%.c,$(BUILD)/tests/%,$(filter tests/wrapped/%,$(UNIT))): $(BUILD)/tests/%: %.c $(BUILD)/dtrain.a
	@mkdir -p $(@D)
	$(PROGRAM) $(TEST_INCLUDES) -c $< -o $@.o
	$(call quiet,LD,$@)$(CC) $(CFLAGS) $@.o $$(nm $@.o | sed -n 's/.* T __wrap_/-Wl,--wrap=/p') $(BUILD)/dtrain.a -o $@ $(LIBS)
# A library that stands for NVIDIA's, today's and an older one, which test_nvml loads.
$(BUILD)/tests/nvml_stub.so: OLD :=
$(BUILD)/tests/nvml_old.so: OLD := -DNVML_OLD
$(BUILD)/tests/nvml_%.so: tests/support/nvml_stub.c
	@mkdir -p $(@D)
	$(call quiet,LD,$@)$(CC) -std=c99 -O1 -Wall -Wextra -Wconversion -Werror -shared -fPIC $(OLD) $< -o $@
$(BUILD)/tests/test_nvml: $(BUILD)/tests/nvml_stub.so $(BUILD)/tests/nvml_old.so
$(INSIDE): $(BUILD)/tests/%: %.c $(BUILD)/sources.a
	@mkdir -p $(@D)
	$(PROGRAM) -iquote src $(TEST_INCLUDES) $< $(filter %.o,$^) $(BUILD)/sources.a -o $@ $(LIBS)
$(BUILD)/fuzz_%: fuzz_%.c $(BUILD)/sources.a
	$(PROGRAM) $(INTERNAL) -fsanitize=fuzzer $< $(BUILD)/sources.a -o $@ $(LIBS)
$(KERNELS): $(BUILD)/tests/instances.o
$(BUILD)/tests/instances.o: tests/support/instances.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(OBJECT) -Wno-psabi -iquote src $(TEST_INCLUDES)
$(BUILD)/bench/%: bench/%.c $(BUILD)/dtrain.a
	@mkdir -p $(@D)
	$(PROGRAM) $(ASKING) -Ibench $< $(BUILD)/dtrain.a -o $@ $(LIBS) -ldl

$(BUILD)/mpi/%: private override CC = $(MPICC) -DDTRAIN_USE_MPI
$(BUILD)/mpi/dtrain.o: dtrain.h $(BUILD)/mpi/flags
	$(IMPLEMENTATION)
$(BUILD)/mpi/dtrain.a: $(BUILD)/mpi/dtrain.o
	$(ARCHIVE)
$(BUILD)/mpi/%: %.c $(BUILD)/mpi/dtrain.a
	$(PROGRAM) $(ASKING) $< $(BUILD)/mpi/dtrain.a -o $@ $(LIBS)
$(BUILD)/mpi/test_mpi $(BUILD)/mpi/test_programs: $(BUILD)/mpi/%: %.c $(BUILD)/mpi/dtrain.a
	$(PROGRAM) $(INTERNAL) $(TEST_INCLUDES) $< $(BUILD)/mpi/dtrain.a -o $@ $(LIBS)
# Chunks so small that operations have many, messages so small that ints would overflow early.
$(BUILD)/mpi/small_mpi: test_mpi.c $(BUILD)/mpi/flags
	$(PROGRAM) -O1 -DDTRAIN_NO_SIMD -DDTRAIN__MPI_CHUNK_BYTES=2048 -DDTRAIN__MPI_MESSAGE_BYTES=8192 $(TEST_INCLUDES) $< -o $@ $(LIBS)

$(BUILD)/emu/%: private DEFINES += -DDTRAIN_CUDA_EMULATION -DDTRAIN_USE_CUDA -Itests/cuda/emulation
$(BUILD)/emu/device.o: src/device/device.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(OBJECT) -Isrc
$(BUILD)/emu/dtrain_cuda.o: dtrain_cuda.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(call quiet,CXX,$<)$(CXX) $(STRICT_CXX) $(OPTIONS) -x c++ -c $< -o $@
$(BUILD)/emu/%.o: %.cpp $(BUILD)/flags
	@mkdir -p $(@D)
	$(call quiet,CXX,$<)$(CXX) $(STRICT_CXX) $(OPTIONS) $(TEST_INCLUDES) -c $< -o $@
$(BUILD)/emu/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(OBJECT) $(ASKING) $(TEST_INCLUDES)
$(BUILD)/emu/emulated.a: $(filter-out %/device/device.o,$(PARTS)) $(addprefix $(BUILD)/emu/,device.o dtrain_cuda.o cuda_emulation.o)
	$(ARCHIVE)
$(BUILD)/emu/%: $(BUILD)/emu/%.o $(BUILD)/emu/emulated.a
	$(call quiet,LD,$@)$(CXX) $(CFLAGS) $^ -o $@ $(LIBS)

$(BUILD)/cuda/%: private DEFINES += -DDTRAIN_USE_CUDA
$(BUILD)/cuda/dtrain.o: dtrain.h $(BUILD)/cuda/flags
	$(IMPLEMENTATION)
$(BUILD)/cuda/dtrain_cuda.o: dtrain_cuda.cu $(BUILD)/cuda/flags
	$(call quiet,NVCC,$<)$(NVCC) -O3 -std=c++17 $(ARCH) $(NVCCFLAGS) -I. -MMD -MF $@.d -MT $@ -c $< -o $@
$(BUILD)/cuda/dtrain.a: $(addprefix $(BUILD)/cuda/,dtrain.o dtrain_cuda.o)
	$(ARCHIVE)
$(BUILD)/cuda/%.o: %.c $(BUILD)/cuda/flags
	$(call quiet,NVCC,$<)$(NVCC) -O3 $(ARCH) $(NVCCFLAGS) $(DEFINES) $(ASKING) -I. $(filter-out -Itests/nccl/mock,$(TEST_INCLUDES)) $(NCCL) -MMD -MF $@.d -MT $@ -c $< -o $@
$(BUILD)/cuda/%: $(BUILD)/cuda/%.o $(BUILD)/cuda/dtrain.a
	$(call quiet,LD,$@)$(NVCC) $(ARCH) $(NVCCFLAGS) $^ -o $@ -lcublasLt $(LIBS) $(NCCL)

# ---- The sources one by one -----------------------------------------------------------------------
# The product files are joined from src/; src compiles each file of it alone, and links all of them.
src: $(SOURCES:%.c=$(BUILD)/%.o)
$(BUILD)/sources.a: $(PARTS)
	$(ARCHIVE)
$(BUILD)/src/%.o: src/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(OBJECT) -Isrc -Itests/nccl/mock
dtrain.h dtrain_cuda.cu dtrain_nccl.h: %: src/% tools/join.sh $(shell find src -type f)
	$(call quiet,JOIN,$@)sh tools/join.sh $< >$@.new && mv $@.new $@
docs:
	$(call quiet,DRAW,docs/house.svg)sh tools/house.sh >docs/house.svg
	$(call quiet,DRAW,docs/zero.svg)sh tools/zero_svg.sh >docs/zero.svg
	$(call quiet,DRAW,docs/full-shard.svg)sh tools/full_shard_svg.sh >docs/full-shard.svg
	$(call quiet,DRAW,docs/tensor.svg)sh tools/tensor_svg.sh >docs/tensor.svg
	$(call quiet,LIST,docs/api.md)sh tools/api_index.sh >docs/api.md

# ---- Other languages --------------------------------------------------------------------------------
# Modules for Fortran and Python, made from the public half of dtrain.h.
bindings: $(BUILD)/dtrain.f90 $(BUILD)/dtrain.py
$(BUILD)/dtrain.f90 $(BUILD)/dtrain.py: dtrain.h $(wildcard tools/bindings/*)
	@mkdir -p $(@D)
	$(call quiet,BIND,$@)sh tools/bindings/bindings.sh $(subst .,,$(suffix $@)) <$< >$@.new && mv $@.new $@

# ---- A library ------------------------------------------------------------------------------------
# Both forms are compiled once, by DTRAIN_SHARED: a program says with which dtrain.h it was compiled (src/core/abi.h).
VERSION = $(shell sed -n 's/.*DTRAIN_VERSION_STRING "\(.*\)"/\1/p' dtrain.h)
SO      = so.$(firstword $(subst ., ,$(VERSION)))
lib: $(BUILD)/libdtrain.so $(BUILD)/libdtrain.a
$(BUILD)/lib/%: private DEFINES += -DDTRAIN_SHARED -fPIC -fvisibility=hidden
$(BUILD)/lib/dtrain.o: dtrain.h $(BUILD)/flags
	@mkdir -p $(@D)
	$(IMPLEMENTATION)
$(BUILD)/libdtrain.a: $(BUILD)/lib/dtrain.o
	$(ARCHIVE)
$(BUILD)/libdtrain.$(SO): $(BUILD)/lib/dtrain.o
	$(call quiet,LD,$@)$(CC) $(CFLAGS) -shared -Wl,-soname,$(@F),-z,defs $^ -o $@ $(LIBS)
$(BUILD)/libdtrain.so: $(BUILD)/libdtrain.$(SO)
	$(call quiet,LN,$@)ln -sf $(<F) $@
# The device and, with NCCL's headers, its communicator. The CUDA runtime is shared with the program.
lib-cuda: lib $(BUILD)/libdtrain_cuda.so
$(BUILD)/lib/dtrain_nccl.o: dtrain_nccl.h dtrain.h $(BUILD)/flags
	$(call quiet,NVCC,$<)printf '#define DTRAIN_NCCL_IMPLEMENTATION\n#include "dtrain_nccl.h"\n' >$(@:.o=.cu) && \
	  $(NVCC) -O3 -std=c++17 $(NVCCFLAGS) -DDTRAIN_SHARED -Xcompiler -fPIC -I. -c $(@:.o=.cu) -o $@
$(BUILD)/lib/dtrain_cuda.o: dtrain_cuda.cu dtrain.h $(BUILD)/cuda/flags
	$(call quiet,NVCC,$<)$(NVCC) -O3 -std=c++17 $(ARCH) $(NVCCFLAGS) -Xcompiler -fPIC -I. -c $< -o $@
$(BUILD)/libdtrain_cuda.$(SO): $(BUILD)/lib/dtrain_cuda.o $(if $(NCCL),$(BUILD)/lib/dtrain_nccl.o) $(BUILD)/libdtrain.so
	$(call quiet,NVCC,$@)printf '{ global: dtrain_*; local: *; };\n' >$@.map && $(NVCC) -shared -cudart shared $(ARCH) $(NVCCFLAGS) \
	  -Xlinker -soname,$(@F),--version-script,$@.map $^ -o $@ -lcublasLt -ldl
$(BUILD)/libdtrain_cuda.so: $(BUILD)/libdtrain_cuda.$(SO)
	$(call quiet,LN,$@)ln -sf $(<F) $@

# ---- For other builds -----------------------------------------------------------------------------
# dtrain.pc is for programs that compile dtrain.h, libdtrain.pc for those that link the library.
LIBDIR  = $(PREFIX)/lib
INCLUDE = $(DESTDIR)$(PREFIX)/include
PC      = $(DESTDIR)$(PREFIX)/share/pkgconfig
TO      = $(DESTDIR)$(LIBDIR)
PYTHONS = $(PREFIX)/share/dtrain
pc = printf '%s\n' 'Name: $(1)' 'Description: distributed deep-learning training for C' 'Version: $(VERSION)' 'Cflags: -I$(PREFIX)/include' $(2) >$(PC)/$(1).pc
install: install-headers lib bindings
	mkdir -p $(TO)
	for file in $(BUILD)/libdtrain*.$(SO); do name=$$(basename $$file .$(SO)); install -m 755 $$file $(TO)/$$name.so.$(VERSION) && \
	  ln -sf $$name.so.$(VERSION) $(TO)/$$name.$(SO) && ln -sf $$name.$(SO) $(TO)/$$name.so || exit 1; done
	install -m 644 $(BUILD)/libdtrain.a $(TO)
	$(call pc,libdtrain,'Libs: -L$(LIBDIR) -ldtrain' 'Libs.private: $(LIBS)')
	install -m 644 $(BUILD)/dtrain.f90 $(INCLUDE)
	install -D -m 644 $(BUILD)/dtrain.py $(DESTDIR)$(PYTHONS)/dtrain.py
install-headers: dtrain.h dtrain_cuda.cu dtrain_nccl.h
	mkdir -p $(INCLUDE) $(PC)
	install -m 644 $^ $(INCLUDE)
	$(call pc,dtrain,'Libs: -lm -lpthread')
uninstall:
	rm -f $(addprefix $(INCLUDE)/,dtrain.h dtrain_cuda.cu dtrain_nccl.h dtrain.f90) $(PC)/dtrain.pc $(PC)/libdtrain.pc \
	  $(TO)/libdtrain.a $(TO)/libdtrain.so* $(TO)/libdtrain_cuda.so* $(DESTDIR)$(PYTHONS)/dtrain.py

clean:
	rm -rf $(BUILD)

.PHONY: docs examples help run programs test test-long test-all bench check-simulator bench-strategies bench-comm bench-scaling \
        asan tsan valgrind fuzz fuzzers coverage golden lint checks mutate nightly cuda gpu-programs gpu-first gpu-check gpu-bench mpi openmpi mpich \
        src lib lib-cuda bindings install install-headers uninstall clean FORCE
.SECONDARY:
.DELETE_ON_ERROR:
