# dtrain needs a C compiler and make. Everything else is optional, and a target says so when it is absent: make help.
# Variables: CC, CXX, CFLAGS, BUILD (folder), CBLAS=1 (OpenBLAS instead of the built-in GEMM), MPICC, NVCC,
# CUDA_ARCH ("90", "80 90", ...; default: the GPU of this machine, without one 80 and 90), NVCCFLAGS, PREFIX, DESTDIR,
# V=1 (whole commands instead of one short line for each; make -s prints neither).
# Tests, benchmarks, sanitizers and fuzzers: tests/tests.mk.
CC      ?= cc
CFLAGS  ?= -O2 -g1
BUILD   ?= build
PREFIX  ?= /usr/local
MPICC   ?= mpicc
NVCC    ?= nvcc
STRICT  := -std=c99 -pedantic -Wall -Wextra -Wconversion -Werror
LIBS    := -lm -lpthread $(if $(CBLAS),-lopenblas)
DEFINES := $(if $(CBLAS),-DDTRAIN_USE_CBLAS)
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 1) # -j on the command line wins
endif
# A line of a recipe begins with $(call quiet,WORD,FILE): what make prints instead of the command.
quiet = $(if $(filter-out 0,$(V)),,@$(if $(findstring s,$(firstword -$(MAKEFLAGS))),,$(info $()  $(1)  $(2))))

PROGRAMS := $(wildcard examples/*.c) $(foreach t,train_gpt simulate flight trace report dtrain-run,tools/$t/$t.c)
EXAMPLES := $(patsubst %.c,$(BUILD)/%,$(notdir $(PROGRAMS)))
SOURCES  := $(shell find src -name '*.c' 2>/dev/null)
PARTS    := $(patsubst %.c,$(BUILD)/%.o,$(filter-out src/comm/nccl/%,$(SOURCES)))
vpath %.c examples $(wildcard examples/hosts/*) $(sort $(dir $(filter tools/%,$(PROGRAMS))))

examples: $(EXAMPLES)
	@echo "$(words $(EXAMPLES)) programs are in $(BUILD)/. Try: make run, $(BUILD)/mlp, $(BUILD)/train_gpt --help, make help"
run: $(BUILD)/train_gpt $(BUILD)/report
	$(BUILD)/train_gpt $(ARGS)
help::
	@echo "make            the examples, in $(BUILD)/"
	@echo "make run        the main job: $(BUILD)/train_gpt (ARGS=\"--help\" shows its flags)"
	@echo "make cuda       the examples for NVIDIA GPUs, in $(BUILD)/cuda/ (nvcc)"
	@echo "make mpi        the examples over MPI, in $(BUILD)/mpi/ (MPICC=mpicc): mpirun -n 4 $(BUILD)/mpi/train_gpt --comm mpi"
	@echo "make lib        $(BUILD)/libdtrain.so and .a, for programs that do not compile dtrain.h; make lib-cuda: libdtrain_cuda.so too"
	@echo "make bindings   modules for Fortran and Python, in $(BUILD)/: dtrain.f90, dtrain.py"
	@echo "make install    header and library to PREFIX=$(PREFIX), with files for pkg-config; also install-headers, uninstall"
	@echo "make src        compiles each file of src/ alone; make dtrain.h dtrain_cuda.cu dtrain_nccl.h joins them"
	@echo "make clean      removes $(BUILD)/; V=1 prints whole commands: make V=1"

# ---- Programs on CPUs, with MPI, on GPUs: build/, build/mpi/, build/cuda/ -------------------------------------------
# A target depends on the files that its compiler has read (it lists them in a .d file) and on the compiler's flags.
OPTIONS = $(CFLAGS) $(DEFINES) -I. -MMD -MP -MF $@.d -MT $@
PROGRAM = $(call quiet,LD,$@)$(CC) $(STRICT) $(OPTIONS)
OBJECT  = $(call quiet,CC,$<)$(CC) $(STRICT) $(OPTIONS) -c $< -o $@
-include $(shell find $(BUILD) -mindepth 1 \( -name asan -o -name tsan -o -name fuzz -o -name openmpi -o -name mpich \) -prune -o -name '*.d' -print 2>/dev/null)
FLAGS   = $(CC) $(CXX) $(CFLAGS) $(DEFINES)
%/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' >$@
FORCE:

# The library is compiled once for all programs: an example asks for the implementation, and LINKED leaves it out.
LINKED := -DDTRAIN__IMPLEMENTED
$(addsuffix /dtrain.o,$(BUILD) $(BUILD)/mpi $(BUILD)/cuda $(BUILD)/lib): %/dtrain.o: dtrain.h %/flags
	$(call quiet,CC,$< (the whole library once: 10 to 20 seconds))printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' | $(CC) $(STRICT) $(OPTIONS) -x c -c - -o $@
%.a:
	$(call quiet,AR,$@)rm -f $@ && $(AR) rc $@ $^
$(BUILD)/dtrain.a: $(if $(filter src,$(FROM)),$(PARTS),$(BUILD)/dtrain.o)
$(BUILD)/%: %.c $(BUILD)/dtrain.a
	@mkdir -p $(@D)
	$(PROGRAM) $(LINKED) $< $(BUILD)/dtrain.a -o $@ $(LIBS)
# Tools that read a run's files call only src/core; dtrain-run has its own core.
READING = flight trace report
$(READING:%=$(BUILD)/%): $(BUILD)/%: %.c $(patsubst %.c,$(BUILD)/%.o,$(wildcard src/core/*.c))
	$(PROGRAM) $(LINKED) -iquote src -include core/json_internal.h -include world/world_internal.h $< $(filter %.o,$^) -o $@ $(LIBS)
$(BUILD)/dtrain-run: dtrain-run.c $(BUILD)/flags
	$(PROGRAM) -DDTRAIN_CORE $< -o $@ $(LIBS)
COMPUTING = $(filter-out $(READING) dtrain-run,$(notdir $(EXAMPLES)))

mpi: $(COMPUTING:%=$(BUILD)/mpi/%)
	@echo "$(words $^) programs are in $(BUILD)/mpi/. Try: mpirun -n 4 $(BUILD)/mpi/train_gpt --comm mpi"
$(BUILD)/mpi/%: private override CC = $(MPICC) -DDTRAIN_USE_MPI
$(BUILD)/mpi/dtrain.a: $(BUILD)/mpi/dtrain.o
$(BUILD)/mpi/%: %.c $(BUILD)/mpi/dtrain.a
	$(PROGRAM) $(LINKED) $< $(BUILD)/mpi/dtrain.a -o $@ $(LIBS)

CUDA_ARCH ?= $(if $(shell nvidia-smi -L 2>/dev/null | grep ^GPU),native,80 90)
ARCH = $(foreach a,$(CUDA_ARCH),$(if $(filter native,$a),-arch=native,-gencode=arch=compute_$a,code=sm_$a))
NCCL = $(if $(shell echo '\#include <nccl.h>' | $(NVCC) $(NVCCFLAGS) -E -x cu - >/dev/null 2>&1 && echo yes),-DDTRAIN_USE_NCCL -ldl)
cuda: $(COMPUTING:%=$(BUILD)/cuda/%)
	@echo "$(words $^) programs are in $(BUILD)/cuda/. Try: $(BUILD)/cuda/train_gpt --device cuda, make gpu-check"
$(BUILD)/cuda/%: private DEFINES += -DDTRAIN_USE_CUDA
$(BUILD)/cuda/flags: FLAGS = $(NVCC) $(ARCH) $(NVCCFLAGS) $(NCCL) $(CC) $(CFLAGS) $(DEFINES)
$(BUILD)/cuda/dtrain_cuda.o: dtrain_cuda.cu $(BUILD)/cuda/flags
	$(call quiet,NVCC,$<)$(NVCC) -O3 -std=c++17 $(ARCH) $(NVCCFLAGS) -I. -MMD -MF $@.d -MT $@ -c $< -o $@
$(BUILD)/cuda/dtrain.a: $(addprefix $(BUILD)/cuda/,dtrain.o dtrain_cuda.o)
$(BUILD)/cuda/%.o: %.c $(BUILD)/cuda/flags
	$(call quiet,NVCC,$<)$(NVCC) -O3 $(ARCH) $(NVCCFLAGS) $(DEFINES) $(LINKED) -I. $(GPU_INCLUDES) $(NCCL) -MMD -MF $@.d -MT $@ -c $< -o $@
$(BUILD)/cuda/%: $(BUILD)/cuda/%.o $(BUILD)/cuda/dtrain.a
	$(call quiet,LD,$@)$(NVCC) $(ARCH) $(NVCCFLAGS) $^ -o $@ -lcublasLt $(LIBS) $(NCCL)

# ---- src/, and what is made from it ---------------------------------------------------------------------------------
src: $(SOURCES:%.c=$(BUILD)/%.o)
$(BUILD)/src/%.o: src/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(OBJECT) -Isrc -Itests/nccl/mock
dtrain.h dtrain_cuda.cu dtrain_nccl.h: %: src/% tools/join.sh $(shell find src -type f)
	$(call quiet,JOIN,$@)sh tools/join.sh $< >$@.new && mv $@.new $@
bindings: $(BUILD)/dtrain.f90 $(BUILD)/dtrain.py
$(BUILD)/dtrain.f90 $(BUILD)/dtrain.py: dtrain.h $(wildcard tools/bindings/*)
	@mkdir -p $(@D)
	$(call quiet,BIND,$@)sh tools/bindings/bindings.sh $(subst .,,$(suffix $@)) <$< >$@.new && mv $@.new $@

# ---- A library: DTRAIN_SHARED makes a program say with which dtrain.h it was compiled (src/core/abi.h) --------------
VERSION = $(shell sed -n 's/.*DTRAIN_VERSION_STRING "\(.*\)"/\1/p' dtrain.h)
SO      = so.$(firstword $(subst ., ,$(VERSION)))
lib: $(BUILD)/libdtrain.so $(BUILD)/libdtrain.a
$(BUILD)/lib/%: private DEFINES += -DDTRAIN_SHARED -fPIC -fvisibility=hidden
$(BUILD)/libdtrain.a: $(BUILD)/lib/dtrain.o
$(BUILD)/libdtrain.$(SO): $(BUILD)/lib/dtrain.o
	$(call quiet,LD,$@)$(CC) $(CFLAGS) -shared -Wl,-soname,$(@F),-z,defs $^ -o $@ $(LIBS)
$(BUILD)/libdtrain.so $(BUILD)/libdtrain_cuda.so: %.so: %.$(SO)
	$(call quiet,LN,$@)ln -sf $(<F) $@
# The device and, with NCCL's headers, its communicator. The library shares the CUDA runtime with the program.
lib-cuda: lib $(BUILD)/libdtrain_cuda.so
$(BUILD)/lib/dtrain_nccl.o: dtrain_nccl.h dtrain.h $(BUILD)/lib/flags
	$(call quiet,NVCC,$<)printf '#define DTRAIN_NCCL_IMPLEMENTATION\n#include "dtrain_nccl.h"\n' >$(@:.o=.cu) && \
	  $(NVCC) -O3 -std=c++17 $(NVCCFLAGS) -DDTRAIN_SHARED -Xcompiler -fPIC -I. -c $(@:.o=.cu) -o $@
$(BUILD)/lib/dtrain_cuda.o: dtrain_cuda.cu dtrain.h $(BUILD)/cuda/flags
	$(call quiet,NVCC,$<)$(NVCC) -O3 -std=c++17 $(ARCH) $(NVCCFLAGS) -Xcompiler -fPIC -I. -c $< -o $@
$(BUILD)/libdtrain_cuda.$(SO): $(BUILD)/lib/dtrain_cuda.o $(if $(NCCL),$(BUILD)/lib/dtrain_nccl.o) $(BUILD)/libdtrain.so
	$(call quiet,NVCC,$@)printf '{ global: dtrain_*; local: *; };\n' >$@.map && $(NVCC) -shared -cudart shared $(ARCH) $(NVCCFLAGS) \
	  -Xlinker -soname,$(@F),--version-script,$@.map $^ -o $@ -lcublasLt -ldl

# dtrain.pc is for programs that compile dtrain.h, libdtrain.pc for programs that link the library.
LIBDIR  = $(PREFIX)/lib
INCLUDE = $(DESTDIR)$(PREFIX)/include
PC      = $(DESTDIR)$(PREFIX)/share/pkgconfig
TO      = $(DESTDIR)$(LIBDIR)
PYTHONS = $(DESTDIR)$(PREFIX)/share/dtrain
pc = printf '%s\n' 'Name: $(1)' 'Description: distributed deep-learning training for C' 'Version: $(VERSION)' 'Cflags: -I$(PREFIX)/include' $(2) >$(PC)/$(1).pc
install-headers: dtrain.h dtrain_cuda.cu dtrain_nccl.h
	mkdir -p $(INCLUDE) $(PC)
	install -m 644 $^ $(INCLUDE)
	$(call pc,dtrain,'Libs: -lm -lpthread')
install: install-headers lib bindings
	mkdir -p $(TO)
	for file in $(BUILD)/libdtrain*.$(SO); do name=$$(basename $$file .$(SO)); install -m 755 $$file $(TO)/$$name.so.$(VERSION) && \
	  ln -sf $$name.so.$(VERSION) $(TO)/$$name.$(SO) && ln -sf $$name.$(SO) $(TO)/$$name.so || exit 1; done
	install -m 644 $(BUILD)/libdtrain.a $(TO)
	$(call pc,libdtrain,'Libs: -L$(LIBDIR) -ldtrain' 'Libs.private: $(LIBS)')
	install -m 644 $(BUILD)/dtrain.f90 $(INCLUDE)
	install -D -m 644 $(BUILD)/dtrain.py $(PYTHONS)/dtrain.py
uninstall:
	rm -f $(addprefix $(INCLUDE)/,dtrain.h dtrain_cuda.cu dtrain_nccl.h dtrain.f90) $(PC)/dtrain.pc $(PC)/libdtrain.pc \
	  $(TO)/libdtrain.a $(TO)/libdtrain.so* $(TO)/libdtrain_cuda.so* $(PYTHONS)/dtrain.py
clean:
	rm -rf $(BUILD)

-include tests/tests.mk
.PHONY: examples run help mpi cuda src bindings lib lib-cuda install install-headers uninstall clean FORCE
.SECONDARY:
.DELETE_ON_ERROR:
