# tests.mk: tests, benchmarks, sanitizers, fuzzers; the Makefile includes it. tests/README.md says what each folder tests.
# Variables: LESS (programs that make test leaves out: "tests/test_comm emu/test_cuda_nccl"), FROM=src (programs are linked
# with the objects of src/, which more and smaller compilations make, instead of dtrain.h as it is shipped), N (random programs).

help::
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
	@echo "make asan tsan  the tests under the address and undefined behaviour sanitizers, or the thread sanitizer"
	@echo "make valgrind   the tests that valgrind can run"
	@echo "make fuzz       30 seconds of fuzzing for each parser (clang)"
	@echo "make fuzz-programs fuzz-tensor_programs fuzz-calls fuzz-launches   N=1000 random programs in which ranks differ, programs over a tensor axis, calls of communicators, launches"
	@echo "make coverage   which lines of src/ the tests execute, folder by folder (gcov)"
	@echo "make mutate     breaks the GPU kernels in N=40 places and counts what the tests notice"
	@echo "make golden     makes the PyTorch reference values again and compares (python3, torch)"
	@echo "make lint       formatting, walls between folders, joined files, warnings of other tools"
	@echo "make checks     valgrind, fuzz, golden and lint, beside one another"
	@echo "make docs       draws the pictures of docs/ and lists the API"

# ---- Kinds of tests: folders -----------------------------------------------------------------------------------------
programs_of = $(patsubst tests/$1/%.c,$(BUILD)/tests/%,$(wildcard tests/$1/test_*.c))
INSIDE  := $(call programs_of,inside)
KERNELS := $(call programs_of,kernels)
WRAPPED := $(call programs_of,wrapped)
TESTS   := $(call programs_of,unit) $(INSIDE) $(KERNELS) $(WRAPPED) $(call programs_of,fuzz) $(call programs_of,nccl)
GPU     := $(patsubst tests/cuda/%.c,%,$(wildcard tests/cuda/test_cuda_*.c))
HOSTS   := $(addprefix $(BUILD)/,flat_array flat_array_dtrain host fit.so fit_dtrain.so plugin_footprint)
BENCHES := $(patsubst bench/%.c,$(BUILD)/bench/%,$(wildcard bench/bench_*.c))
vpath %.c   $(addprefix tests/,unit inside kernels wrapped fuzz nccl cuda cli long) bench
vpath %.cpp tests/cuda tests/cuda/emulation

# The GPU kernels on the CPU need a C++ compiler and no GPU.
ifeq ($(origin CXX),default)
CXX := $(if $(findstring clang,$(CC)),clang++,g++)
endif
ifneq ($(shell command -v $(CXX)),)
EMU_TESTS := $(addprefix $(BUILD)/emu/,$(GPU) test_emulation test_programs test_tensor_programs test_pipeline)
HOSTS     += $(BUILD)/emu/flat_array_dtrain
EMU_BENCH := $(addprefix $(BUILD)/emu/,bench_kernels bench_train train_gpt ddp offload gpu_nccl)
else
EMU_TESTS := "skip the GPU kernels: their tests need a C++ compiler, and $(CXX) is not installed"
endif

# ---- make test, test-long, test-all ----------------------------------------------------------------------------------
# Without DTRAIN_TEST_FULL, make test takes four minutes on two cores: suites that run again on emulated GPUs wait, and tests/full.
FULL    := $(DTRAIN_TEST_FULL)$(filter test-all nightly,$(MAKECMDGOALS))
LATER   := $(if $(FULL),,$(addprefix $(BUILD)/emu/test_, cuda_nccl cuda_strategies cuda_compression pipeline programs tensor_programs))
SCRIPTS := $(wildcard tests/cli/test_*.sh $(if $(FULL),tests/full/test_*.sh))
LONG    := $(wildcard tests/long/*.sh $(if $(filter 2,$(DTRAIN_TEST_FULL)),tests/nightly/*.sh))
ALL     := $(filter-out $(addprefix $(BUILD)/,$(LESS)) $(LATER),$(TESTS) $(filter $(BUILD)/%,$(EMU_TESTS)) $(SCRIPTS))
# run.sh starts these first, so that none of them is the last that runs.
FIRST   := $(patsubst %,tests/long/%.sh,cuda_build test_mpi test_compile test_documents mutants_pipeline) $(BUILD)/tests/test_rendezvous \
           tests/cli/test_examples.sh $(BUILD)/emu/test_cuda_nccl tests/full/test_resume.sh $(BUILD)/tests/test_storage_faults tests/cli/test_run.sh \
           $(BUILD)/emu/test_cuda_strategies $(addprefix $(BUILD)/tests/test_,strategies nccl programs comm restart) tests/full/test_launchers.sh
ordered = $(filter $1,$(FIRST)) $(filter-out $(FIRST),$1)
RUN     = BUILD=$(BUILD) CC="$(CC)" LINKED="$(LINKED)" sh tests/scripts/run.sh
# Scripts run in parallel: what several of them need is built before.
SHARED  = $(if $(filter tests/full/%,$(ALL)),lib bindings) $(if $(filter tests/cli/test_hosts.sh,$(ALL)),$(HOSTS)) $(if $(filter tests/cli/test_examples.sh,$(ALL)),$(filter %/offload,$(EMU_BENCH)))
FOR_LONG = $(BENCHES) $(addprefix $(BUILD)/,export_gpt2 tokenize llama_logits monitor_run) $(EMU_BENCH) \
           $(foreach m,openmpi mpich,$(if $(shell command -v mpicc.$m),$m))

programs: $(filter-out $(BUILD)/simulate,$(EXAMPLES)) $(filter $(BUILD)/%,$(ALL)) $(SHARED)
test: programs
	@$(RUN) $(call ordered,$(ALL)) $(filter-out $(BUILD)/%,$(EMU_TESTS))
programs-long: $(EXAMPLES) $(FOR_LONG)
test-long: programs-long
	@$(RUN) $(call ordered,$(LONG))
test-all: programs programs-long
	@DTRAIN_TEST_FULL=$${DTRAIN_TEST_FULL:-1} $(RUN) $(call ordered,$(LONG) $(ALL)) $(filter-out $(BUILD)/%,$(EMU_TESTS))

# ---- Sanitizers: the same tests in separate folders; GOAL=programs only builds them ---------------------------------------
# -g1 names the lines and compiles in three quarters of the time. Kernel threads are fibers: no fake stacks.
asan tsan: GOAL = test
asan: export ASAN_OPTIONS = detect_leaks=1:detect_stack_use_after_return=0
asan:
	@$(MAKE) --no-print-directory $(GOAL) LATER= FROM=src BUILD=$(BUILD)/asan SCRIPTS=tests/cli/test_examples.sh \
	  CFLAGS="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
# Ranks that are threads, and the threads of a rank; emulated kernels run on one thread.
tsan:
	@$(MAKE) --no-print-directory $(GOAL) LATER= FROM=src BUILD=$(BUILD)/tsan SCRIPTS= EXAMPLES= CFLAGS="-O1 -g1 -fsanitize=thread" \
	  EMU_TESTS="$(addprefix $(BUILD)/tsan/emu/,test_cuda_ddp test_cuda_nccl)" \
	  TESTS="$(addprefix $(BUILD)/tsan/tests/test_,comm faults flight calls launch restart restarts links nccl ddp strategies compression hook \
	    programs tensor_programs 3d_programs ranks_differ pipeline pipeline_faults pipeline_options stage_passes pipeline_runner timeline \
	    trainer loader gemm device sparse)"
valgrind: $(TESTS)
	@BUILD=$(BUILD) sh tests/scripts/valgrind.sh
# Fuzzers see which branches of the library an input takes: all of them are linked with objects that tell them.
FUZZERS := $(if $(shell command -v clang),$(patsubst tests/fuzz/%.c,$(BUILD)/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c)))
FUZZED  := -O1 -g1 -DDTRAIN_NO_SIMD -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
fuzzers:
	@$(if $(FUZZERS),$(MAKE) --no-print-directory FROM=src BUILD=$(BUILD)/fuzz CC=clang CFLAGS="$(FUZZED)" $(FUZZERS))
fuzz: fuzzers
	@BUILD=$(BUILD) sh tests/scripts/fuzz.sh
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
mutate: N = 40
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

# ---- Benchmarks ------------------------------------------------------------------------------------------------------
LONG_BENCHES := %/bench_strategies %/bench_comm %/bench_scaling
bench: $(BENCHES) $(BUILD)/resnet_cifar
	@for b in $(filter-out $(LONG_BENCHES),$(BENCHES)); do echo "== $$b $(ARGS)"; $$b $(ARGS) || exit 1; echo; done
check-simulator: $(BUILD)/simulate
	$(BUILD)/simulate --check tools/simulate/published.txt
bench-strategies bench-comm bench-scaling: bench-%: $(BUILD)/bench/bench_% $(BUILD)/train_gpt $(BUILD)/resnet_cifar
	$< --program $(BUILD)/train_gpt $(if $(filter strategies,$*),--images $(BUILD)/resnet_cifar) $(ARGS)

# ---- Machines with a GPU ---------------------------------------------------------------------------------------------
gpu-programs: cuda $(addprefix $(BUILD)/cuda/,$(filter-out test_cuda_nccl test_cuda_join,$(GPU)) bench_kernels bench_train)
gpu-first gpu-check gpu-bench:
	@BUILD=$(BUILD) bash tests/cuda/$(subst -,_,$@).sh

# ---- Rules -----------------------------------------------------------------------------------------------------------
# sources.a is the library as objects of src/, for tests that call its private functions.
GPU_INCLUDES := -Itests -Itests/support -Itests/unit -Itests/cuda -Ibench
TEST_INCLUDES = $(GPU_INCLUDES) -Itests/nccl/mock
INTERNAL      = $(LINKED) -iquote src $(addprefix -include ,$(patsubst src/%,%,$(wildcard src/*/*_internal.h)))
$(BUILD)/sources.a: $(PARTS)
# Tests and emulated kernels run nearly as fast with -O1, and compile in two thirds of the time.
$(BUILD)/tests/test_% $(BUILD)/emu/test_%.o $(BUILD)/emu/dtrain_cuda.o: private override CFLAGS := $(CFLAGS:-O2=-O1)

$(BUILD)/tests/%: %.c $(BUILD)/dtrain.a
	@mkdir -p $(@D)
	$(PROGRAM) $(TEST_INCLUDES) $< $(BUILD)/dtrain.a -o $@ $(LIBS)
$(INSIDE) $(KERNELS): $(BUILD)/tests/%: %.c $(BUILD)/sources.a
	@mkdir -p $(@D)
	$(PROGRAM) -iquote src $(TEST_INCLUDES) $< $(filter %.o,$^) $(BUILD)/sources.a -o $@ $(LIBS)
# The kernels of the instruction sets that the library has not, once for all tests.
$(KERNELS): $(BUILD)/tests/instances.o
$(BUILD)/tests/instances.o: tests/support/instances.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(OBJECT) -Wno-psabi -iquote src $(TEST_INCLUDES)
# The functions that a test defines as __wrap_NAME stand between the library and the C library.
$(WRAPPED): $(BUILD)/tests/%: %.c $(BUILD)/dtrain.a
	@mkdir -p $(@D)
	$(PROGRAM) $(TEST_INCLUDES) -c $< -o $@.o
	$(call quiet,LD,$@)$(CC) $(CFLAGS) $@.o $$(nm $@.o | sed -n 's/.* T __wrap_/-Wl,--wrap=/p') $(BUILD)/dtrain.a -o $@ $(LIBS)
# A library that stands for NVIDIA's, today's and an older one, which test_nvml loads.
$(BUILD)/tests/nvml_old.so: OLD := -DNVML_OLD
$(BUILD)/tests/nvml_stub.so $(BUILD)/tests/nvml_old.so: tests/support/nvml_stub.c
	@mkdir -p $(@D)
	$(call quiet,LD,$@)$(CC) -std=c99 -O1 -Wall -Wextra -Wconversion -Werror -shared -fPIC $(OLD) $< -o $@
$(BUILD)/tests/test_nvml: $(BUILD)/tests/nvml_stub.so $(BUILD)/tests/nvml_old.so
$(BUILD)/fuzz_%: fuzz_%.c $(BUILD)/sources.a
	$(PROGRAM) $(INTERNAL) -fsanitize=fuzzer $< $(BUILD)/sources.a -o $@ $(LIBS)
# A plugin and the program that opens it (examples/hosts/plugin), which is not linked with the library.
$(BUILD)/host $(BUILD)/plugin_footprint: $(BUILD)/%: %.c $(BUILD)/flags
	$(PROGRAM) $(TEST_INCLUDES) $< -o $@ -lm -lpthread -ldl
$(BUILD)/fit.so $(BUILD)/fit_dtrain.so: $(BUILD)/%.so: %.c $(BUILD)/flags
	$(PROGRAM) -fPIC -fvisibility=hidden -shared $< -o $@ $(LIBS)
$(BUILD)/bench/%: bench/%.c $(BUILD)/dtrain.a
	@mkdir -p $(@D)
	$(PROGRAM) $(LINKED) -Ibench $< $(BUILD)/dtrain.a -o $@ $(LIBS) -ldl
$(BUILD)/bench/bench_comm $(BUILD)/bench/bench_sparse: $(BUILD)/%: %.c $(BUILD)/sources.a # these look inside
	@mkdir -p $(@D)
	$(PROGRAM) $(INTERNAL) -Ibench $< $(BUILD)/sources.a -o $@ $(LIBS) -ldl

# What the tests start under each MPI that is installed.
openmpi mpich:
	@$(MAKE) --no-print-directory BUILD=$(BUILD)/$@ MPICC=mpicc.$@ $(addprefix $(BUILD)/$@/mpi/,test_mpi small_mpi test_programs train_gpt over_mpi solver solver_dtrain)
$(BUILD)/mpi/test_mpi $(BUILD)/mpi/test_programs: $(BUILD)/mpi/%: %.c $(BUILD)/mpi/dtrain.a
	$(PROGRAM) $(INTERNAL) $(TEST_INCLUDES) $< $(BUILD)/mpi/dtrain.a -o $@ $(LIBS)
# Chunks so small that operations have many, messages so small that ints would overflow early.
$(BUILD)/mpi/small_mpi: test_mpi.c $(BUILD)/mpi/flags
	$(PROGRAM) -O1 -DDTRAIN_NO_SIMD -DDTRAIN__MPI_CHUNK_BYTES=2048 -DDTRAIN__MPI_MESSAGE_BYTES=8192 $(TEST_INCLUDES) $< -o $@ $(LIBS)

# dtrain_cuda.cu as C++ over stand-ins for CUDA (tests/cuda/emulation), and the same programs linked with it.
CXX_OBJECT = $(call quiet,CXX,$<)$(CXX) -std=c++17 -Wall -Wextra -Werror $(OPTIONS)
$(BUILD)/emu/%: private DEFINES += -DDTRAIN_CUDA_EMULATION -DDTRAIN_USE_CUDA -Itests/cuda/emulation
$(BUILD)/emu/device.o: src/device/device.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(OBJECT) -Isrc
$(BUILD)/emu/dtrain_cuda.o: dtrain_cuda.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(CXX_OBJECT) -x c++ -c $< -o $@
$(BUILD)/emu/%.o: %.cpp $(BUILD)/flags
	@mkdir -p $(@D)
	$(CXX_OBJECT) $(TEST_INCLUDES) -c $< -o $@
$(BUILD)/emu/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(OBJECT) $(LINKED) $(TEST_INCLUDES)
$(BUILD)/emu/emulated.a: $(filter-out %/device/device.o,$(PARTS)) $(addprefix $(BUILD)/emu/,device.o dtrain_cuda.o cuda_emulation.o)
$(BUILD)/emu/%: $(BUILD)/emu/%.o $(BUILD)/emu/emulated.a
	$(call quiet,LD,$@)$(CXX) $(CFLAGS) $^ -o $@ $(LIBS)

docs:
	$(call quiet,DRAW,docs/house.svg)sh tools/house.sh >docs/house.svg
	$(call quiet,DRAW,docs/zero.svg)sh tools/zero_svg.sh >docs/zero.svg
	$(call quiet,DRAW,docs/full-shard.svg)sh tools/full_shard_svg.sh >docs/full-shard.svg
	$(call quiet,DRAW,docs/tensor.svg)sh tools/tensor_svg.sh >docs/tensor.svg
	$(call quiet,LIST,docs/api.md)sh tools/api_index.sh >docs/api.md
.PHONY: programs programs-long test test-long test-all asan tsan valgrind fuzzers fuzz coverage golden lint checks mutate nightly bench check-simulator \
        bench-strategies bench-comm bench-scaling gpu-programs gpu-first gpu-check gpu-bench openmpi mpich docs
