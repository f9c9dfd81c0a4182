#!/bin/sh
# The files that users copy are enough: dtrain.h compiles alone in every dialect, links from two translation units,
# leaves only dtrain_ symbols, trains with the same bits whoever compiled it, with DTRAIN_NATIVE too, and reaches other
# builds by make install and CMake. One full compilation by each of gcc, clang and g++ (that of make counts for its
# compiler; g++ with -O2, where it would fuse a * b + c); other dialects are checked, not compiled.
# DTRAIN_TEST_DIALECTS=1 compiles them all. Compilers that are not installed are skipped by name.
. tests/support/shell.sh
cc=${CC:-cc}
full=${DTRAIN_TEST_DIALECTS:-0}
library=$build/dtrain.a
[ -f "$library" ] || make -s BUILD="$build" CC="$cc" "$library" || exit 1
build=$build/compile
rm -rf "$build"
mkdir -p "$build"
here() { have "$1" || { skip "$1" "not installed"; return 1; }; }

cat >"$build/impl.c" <<'END'
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
END
cat >"$build/user.c" <<'END'
#include "dtrain.h"
static int rank_main(dtrain_world *world, void *user) { (void)user; return dtrain_world_size(world) == 2 ? 0 : 1; }
int main(void)
{
    dtrain_launch_desc desc;
    for (size_t i = 0; i < sizeof desc; i++) ((char *)&desc)[i] = 0;
    desc.rank_count = 2;
    return dtrain_launch(&desc, rank_main, NULL, NULL) == DTRAIN_OK ? 0 : 1;
}
END
cat >"$build/late.c" <<'END'
#include "dtrain.h"
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
END
{ echo '#define DTRAIN_STATIC'; cat "$build/impl.c"; echo 'int main(void) { return dtrain_last_error()[0] != 0; }'; } >"$build/static.c"

# The rings that a program can have, and the macros that leave out the others.
combinations="core core+state core+models core+monitor core+state+models core+state+monitor core+models+monitor"
omit() {
    [ $1 = core ] && echo -DDTRAIN_CORE && return
    for ring in STATE MODELS MONITOR; do
        echo "$1" | grep -q -i "$ring" || echo -DDTRAIN_OMIT_$ring
    done
}

warn="-I. -Wall -Wextra -Wconversion -Werror"
libs="-lm -lpthread"
check=-fsyntax-only
[ "$full" = 0 ] || check="-O2 -c -o $build/dialect.o"
case $($cc --version 2>/dev/null) in *clang*) ours=clang ;; *) ours=gcc ;; esac
for c in gcc clang; do
    here $c || continue
    for std in c99 c11 c17 gnu99; do
        try "$c -std=$std -pedantic" $c -std=$std -pedantic $warn $check "$build/impl.c"
    done
    # 32-bit: one sentence, and nothing after it
    $c -std=c99 -I. -Wall -Wextra -U__SIZEOF_POINTER__ -D__SIZEOF_POINTER__=4 -fsyntax-only "$build/impl.c" >"$tmp/log" 2>&1
    [ $? -ne 0 ] && [ "$(grep -c -E '(error|warning):' "$tmp/log")" -eq 1 ] && grep -q 'error: .*needs a 64-bit system' "$tmp/log"
    result "$c, a 32-bit target: one error says so" $? "$tmp/log"
    try "$c without SIMD" $c -std=c99 -DDTRAIN_NO_SIMD $warn $check "$build/impl.c"
    if [ "$(uname -m)" = x86_64 ]; then # the kernels of one instruction set, which -march names
        for march in x86-64-v3 x86-64-v4; do
            try "$c native, $march" $c -std=c99 -DDTRAIN_NATIVE -march=$march $warn $check "$build/impl.c"
        done
        $c -std=c99 -I. -DDTRAIN_NATIVE -fsyntax-only "$build/impl.c" >"$tmp/log" 2>&1
        [ $? -ne 0 ] && grep -q 'error: .*add -march=native, or leave it out' "$tmp/log"
        result "$c native, without -march: the error says what to add" $? "$tmp/log"
    fi
    try "$c late implementation" $c -std=gnu99 $warn $check "$build/late.c"
    try "$c static copy" $c -std=c99 -I. -Wall -Wextra -Werror -Wno-unused-function "$build/static.c" -o "$build/static" $libs
    object=$library
    [ $c = $ours ] || { object=$build/impl_$c.o; try "$c -O0" $c -std=c99 -pedantic $warn -O0 -c "$build/impl.c" -o "$object"; }
    try "$c two files" $c -std=c99 $warn "$build/user.c" "$object" -o "$build/two_$c" $libs
    try "$c two files run" "$build/two_$c"
    try "$c exports dtrain_ only" sh -c "! nm -g --defined-only $object | awk 'NF == 3 { print \$3 }' | grep -v '^dtrain_'"
    if [ $c = clang ] || [ "$full" != 0 ] || ! have clang; then # it is the quicker one
        for program in examples/*.c tools/*/*.c; do
            try "$c $program by itself" $c -std=c99 -pedantic $warn -fsyntax-only "$program"
        done
    fi
    for program in examples/*.c; do # an example that is copied beside dtrain.o, without the line that asks for the implementation
        grep -v '^#define DTRAIN_IMPLEMENTATION$' "$program" >"$build/copied.c"
        try "$c $program beside a library compiled once" $c -I. -Wall -Wextra -Werror -O1 "$build/copied.c" "$object" -o "$build/copied" $libs
    done
    for rings in $combinations; do
        [ $c = $ours ] || try "$c, $rings" $c -std=c99 -pedantic $warn $(omit $rings) $check "$build/impl.c" # ours: below
        try "$c, $rings as C++" $([ $c = gcc ] && echo g++ || echo clang++) -x c++ -std=c++17 $warn $(omit $rings) $check "$build/impl.c"
    done
    [ $c = $ours ] || [ "$full" != 0 ] || continue
    try "$c -O1 -ffast-math -march=native finds overflows" sh -c "$c -std=c99 -O1 -ffast-math -march=native $warn \
        -iquote src -Itests -Itests/support tests/inside/test_scaler.c '$build/impl.c' -o '$build/scaler_$c' $libs && '$build/scaler_$c'"
done
# Each combination of rings links, runs, and names what it has not. The linker says which function of a ring that is left
# out is called, the CPU device which kernel.
cat >"$build/omitted.c" <<'END'
#include "dtrain.h"
int main(void) { FUNCTION(NULL); return 0; }
END
cat >"$build/kernel.c" <<'END'
#include "dtrain.h"
#include <stdio.h>
int main(void)
{
    dtrain_device *device;
    if (dtrain_device_create(NULL, NULL, &device) != DTRAIN_OK) return 1;
    if (device->ops->layernorm(device, NULL) != DTRAIN_ERROR_UNSUPPORTED) return 2;
    puts(dtrain_last_error());
    dtrain_device_destroy(device);
    return 0;
}
END
cat >"$build/trace.c" <<'END'
#include "dtrain.h"
#include <stdio.h>
#include <string.h>
static int rank_main(dtrain_world *world, void *user) { return world == NULL || user != NULL; }
int main(void)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = 1;
    desc.options.trace.path = "trace.json";
    if (dtrain_launch(&desc, rank_main, NULL, NULL) == DTRAIN_OK) return 1;
    puts(dtrain_last_error());
    return 0;
}
END
cat >"$build/muon.c" <<'END'
#include "dtrain.h"
#include <stdio.h>
#include <string.h>
static int rank_main(dtrain_world *world, void *user)
{
    dtrain_param param;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    const dtrain_optimizer_desc muon = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON);
    (void)user;
    memset(&param, 0, sizeof param);
    param.name = "matrix";
    param.shape[0] = param.shape[1] = 2;
    if (dtrain_strategy_create(world, &param, 1, NULL, &strategy) != DTRAIN_OK) return 1;
    const dtrain_result result = dtrain_optimizer_create(world, strategy, &muon, &optimizer);
    if (result != DTRAIN_OK) puts(dtrain_last_error());
    else if (dtrain_optimizer_step(optimizer, 0.1f, 1) == DTRAIN_OK) puts("a step of Muon");
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return result == DTRAIN_OK || result == DTRAIN_ERROR_UNSUPPORTED ? 0 : 1;
}
int main(void)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = 1;
    return dtrain_launch(&desc, rank_main, NULL, NULL) == DTRAIN_OK ? 0 : 1;
}
END
cat >"$build/record.c" <<'END'
/* A loop without a trainer reports the record that it fills. */
#include "dtrain.h"
#include <string.h>
static int rank_main(dtrain_world *world, void *user)
{
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    dtrain_step_record record;
    memset(&desc, 0, sizeof desc);
    memset(&record, 0, sizeof record);
    desc.jsonl_path = (const char *)user;
    record.step = 1;
    record.loss = 0.25;
    if (dtrain_metrics_create(world, &desc, &metrics) != DTRAIN_OK) return 1;
    const dtrain_result result = dtrain_metrics_step(metrics, &record);
    dtrain_metrics_destroy(metrics);
    return result == DTRAIN_OK ? 0 : 1;
}
int main(int count, char **arguments)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = 2;
    return count == 2 && dtrain_launch(&desc, rank_main, arguments[1], NULL) == DTRAIN_OK ? 0 : 1;
}
END
for rings in $combinations; do
    object=$build/$rings.o
    try "$rings" $cc -std=c99 -pedantic $warn -O0 $(omit $rings) -c "$build/impl.c" -o "$object"
    try "$rings, a program" sh -c "$cc -std=c99 $warn '$build/user.c' '$object' -o '$build/ring' $libs && '$build/ring'"
    for what in state:dtrain_state_destroy models:dtrain_tape_destroy models:dtrain_pipeline_destroy monitor:dtrain_metrics_destroy; do
        function=${what#*:}
        $cc -std=c99 -I. -DFUNCTION=$function "$build/omitted.c" "$object" -o "$build/omitted" $libs >"$tmp/log" 2>&1
        linked=$?
        case +$rings+ in
        *+${what%:*}+*) [ $linked -eq 0 ]; result "$rings has $function" $? "$tmp/log" ;;
        *) [ $linked -ne 0 ] && grep -q "undefined reference to .*$function" "$tmp/log"; result "$rings, the linker names $function" $? "$tmp/log" ;;
        esac
    done
    case $rings in
    *monitor*) ;;
    *)
        try "$rings, a trace" $cc -std=c99 -I. "$build/trace.c" "$object" -o "$build/trace" $libs
        "$build/trace" >"$tmp/log" 2>&1 && grep -q "a trace belongs to monitor.*leave out trace, or DTRAIN_OMIT_MONITOR" "$tmp/log"
        result "$rings, a launch says that there are no traces" $? "$tmp/log"
        ;;
    esac
    muon='dtrain_optimizer_create: group 0: Muon multiplies matrices, which belongs to models.*without DTRAIN_OMIT_MODELS'
    case $rings in *models*) muon='^a step of Muon$' ;; esac
    try "$rings, Muon" $cc -std=c99 -I. "$build/muon.c" "$object" -o "$build/muon" $libs
    "$build/muon" >"$tmp/log" 2>&1 && grep -q "$muon" "$tmp/log"
    result "$rings, Muon steps or is refused by name" $? "$tmp/log"
    case $rings in *models*) continue ;; esac
    try "$rings, a kernel of layers" $cc -std=c99 -I. "$build/kernel.c" "$object" -o "$build/kernel" $libs
    "$build/kernel" >"$tmp/log" 2>&1 && grep -q "cpu device: the kernel layernorm belongs to models.*without DTRAIN_OMIT_MODELS" "$tmp/log"
    result "$rings, a kernel of layers says that it is not there" $? "$tmp/log"
done
try "core+monitor, a record" sh -c "$cc -std=c99 $warn '$build/record.c' '$build/core+monitor.o' -o '$build/record' $libs &&
    '$build/record' '$tmp/record.jsonl' && grep -q '\"loss\": 0.25' '$tmp/record.jsonl'"
# An example a ring does what it does with everything: expected(EXAMPLE) are lines of its output.
ring() { # ring RINGS PROGRAM PATTERN ARGUMENT...
    rings=$1 program=$2 pattern=$3
    shift 3
    try "$rings, $program" $cc -std=c99 $warn -O1 $(omit $rings) "examples/$program.c" -o "$build/$program" $libs
    "$build/$program" "$@" >"$tmp/log" 2>&1 && grep -q -E "$pattern" "$tmp/log"
    result "$rings, $program runs" $? "$tmp/log"
}
ring core ddp 'learned \+1.00 -2.00 \+0.50'
ring core full_shard 'losses and the parameters are equal'
ring core+state resume '^3 ranks end at step 150: average loss 3.7858' "$tmp/resume"
ring core+models own_operation 'step 199  loss 0.0593'
ring core+models+monitor gpt 'held-out loss 1\.[01]' --steps 60

# In a shared object, as the manual says: a program without dtrain loads two of them, each with its own copy, runs ranks
# that are processes and threads, unloads both, and does it again. The other two are linked with a dtrain.o.
cat >"$build/plugin.c" <<'END'
#include "dtrain.h"
static int rank_main(dtrain_world *world, void *user)
{
    float sum[2] = {1, 2};
    if (dtrain_all_reduce(dtrain_world_comm(world), sum, sum, 2, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL) != DTRAIN_OK) return 1;
    return sum[1] == *(const float *)user ? 0 : 2;
}
int run(uint32_t ranks, uint32_t mode);
int run(uint32_t ranks, uint32_t mode)
{
    float sum = 2 * (float)ranks;
    dtrain_launch_desc desc;
    for (size_t i = 0; i < sizeof desc; i++) ((char *)&desc)[i] = 0;
    desc.rank_count = ranks;
    desc.mode = mode;
    return dtrain_launch(&desc, rank_main, &sum, NULL) == DTRAIN_OK ? 0 : 1;
}
END
{ echo '#define DTRAIN_IMPLEMENTATION'; cat "$build/plugin.c"; } >"$build/whole.c"
cat >"$build/host.c" <<'END'
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **names)
{
    for (int round = 0; round < 2; round++) {
        void *library[8];
        for (int i = 1; i < count && i < 8; i++) {
            int (*run)(unsigned, unsigned) = NULL;
            library[i] = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
            if (library[i]) *(void **)&run = dlsym(library[i], "run");
            if (!run) return fprintf(stderr, "%s\n", dlerror()), 1;
            if (run(2, 0) != 0 || run(3, 1) != 0) return fprintf(stderr, "%s: a launch failed\n", names[i]), 1;
        }
        for (int i = 1; i < count && i < 8; i++)
            if (dlclose(library[i]) != 0) return fprintf(stderr, "%s\n", dlerror()), 1;
    }
    return 0;
}
END
shared="-std=c99 $warn -O0 -DDTRAIN_NO_SIMD -fPIC"
try "a shared object with the implementation" $cc $shared -shared "$build/whole.c" -o "$build/whole.so" $libs
try "dtrain.o for a shared object" $cc $shared -c "$build/impl.c" -o "$build/pic.o"
for name in one two; do
    try "shared object $name with dtrain.o" $cc $shared -shared "$build/plugin.c" "$build/pic.o" -o "$build/$name.so" $libs
done
try "a program that loads shared objects" $cc -std=gnu99 -Wall -Wextra -Werror "$build/host.c" -o "$build/host" -ldl
case $build in /*) at=$build ;; *) at=$PWD/$build ;; esac
try "three shared objects are loaded, run and unloaded, twice" timeout 120 "$build/host" "$at/whole.so" "$at/one.so" "$at/two.so"

for c in g++ clang++; do
    here $c || continue
    for std in c++17 c++20; do
        try "$c -std=$std" $c -x c++ -std=$std -pedantic $warn $check "$build/impl.c"
    done
    [ $c = g++ ] && [ $ours = gcc ] || try "$c -std=c++17 dtrain_cuda.cu" $c -x c++ -std=c++17 -I. -Wall -Wextra -Werror -DDTRAIN_CUDA_EMULATION \
        -DDTRAIN_USE_CUDA -Itests/cuda/emulation -fsyntax-only dtrain_cuda.cu
    try "$c C++ user, C implementation" $c -std=c++17 $warn -x c++ "$build/user.c" -x none "$library" -o "$build/mixed_$c" $libs
    try "$c C++ user, C implementation run" "$build/mixed_$c"
done
if command -v g++ >/dev/null 2>&1; then # what C++ makes of it computes the same
    try "g++ -O2 -std=c++17" g++ -x c++ -std=c++17 $warn -O2 -c "$build/impl.c" -o "$build/impl_g++.o"
    for test in optim metrics trainer; do
        try "C++ implementation, test_$test" sh -c "$cc -std=c99 -I. -Itests -Itests/support tests/unit/test_$test.c \
            '$build/impl_g++.o' -o '$build/test_$test' $libs && '$build/test_$test'"
    done
fi

# Whatever compiler, language and flags made the implementation, the same steps give the same bits. The program is
# compiled once, and linked with each: what its own compiler makes of its own arithmetic is its own affair.
if [ "$full" != 0 ]; then
    for flags in "gcc -std=gnu17 -O2" "gcc -std=gnu11 -O3 -march=native" "clang -std=gnu17 -O2 -march=native" "g++ -x c++ -std=c++17 -O3 -march=native"; do
        here "${flags%% *}" || continue
        try "$flags" $flags $warn -c "$build/impl.c" -o "$build/impl_$(echo $flags | tr -c 'a-z0-9\n' _).o"
    done
fi
if grep -q '^flags.* avx2 ' /proc/cpuinfo 2>/dev/null; then # the kernels that are chosen at run time, and no others
    try "native" $cc -std=gnu17 -O2 -DDTRAIN_NATIVE -march=native $warn -c "$build/impl.c" -o "$build/impl_native.o"
else skip "the bits of DTRAIN_NATIVE" "no AVX2"; fi
try "train_gpt, compiled once" $cc -std=c99 -O1 -I. -DDTRAIN__IMPLEMENTED -c tools/train_gpt/train_gpt.c -o "$build/train_gpt.o"
steps="--deterministic --ranks 2 --threads 1 --layers 2 --channels 32 --heads 2 --seq 16 --vocab 256 --batch 2 --steps 4 --eval-batches 0 --sample 0"
bits() { # bits OBJECT: the hash of all parameters after some steps, of several kinds of training
    $cc "$build/train_gpt.o" "$1" -o "$build/train_gpt" $libs || return 1
    for kind in "--dropout 0.1" "--precision bf16 --optimizer muon" "--precision fp16 --strategy full_shard --optimizer lion" \
        "--compression topk --topk-momentum 0.9 --topk-ratio 0.05 --dense-steps 1 --dense-below 64"; do
        "$build/train_gpt" $steps $kind | sed -n 's/^ *parameters  *\([0-9a-f]\{16\}\).*/\1/p'
    done
}
bits "$library" >"$build/bits"
try "four trainings have hashes" [ "$(wc -l <"$build/bits")" -eq 4 ]
for object in "$build"/impl_*.o; do
    bits "$object" >"$build/bits_here"
    try "the same bits from $(basename "$object" .o)" diff "$build/bits" "$build/bits_here"
done
if echo '#include <cblas.h>' | $cc -E - >/dev/null 2>&1; then
    try "DTRAIN_USE_CBLAS" $cc -std=c99 -DDTRAIN_USE_CBLAS $warn $check "$build/impl.c"
else skip "DTRAIN_USE_CBLAS" "no cblas.h"; fi

# In other builds: installed for pkg-config, and as a folder of a CMake project.
prefix=$PWD/$build/prefix
case $build in /*) prefix=$build/prefix ;; esac
try "make install" make -s install PREFIX=/usr DESTDIR="$prefix"
if here pkg-config; then
    export PKG_CONFIG_SYSROOT_DIR="$prefix" PKG_CONFIG_PATH="$prefix/usr/share/pkgconfig" PKG_CONFIG_ALLOW_SYSTEM_CFLAGS=1
    try "pkg-config finds it" sh -c "cp '$build/user.c' '$prefix/' && cd '$prefix' &&
        $cc -std=c99 -Wall -Werror user.c -fsyntax-only \$(pkg-config --cflags dtrain) && pkg-config --libs dtrain | grep -q -e '-lpthread'"
fi
try "make uninstall" make -s uninstall PREFIX=/usr DESTDIR="$prefix"
try "make uninstall leaves nothing" [ -z "$(find "$prefix/usr" -type f)" ]

# CMake: README's program, with dtrain as a folder, from a repository, and installed. Where it runs it is compiled
# quickly; how it is compiled for a user is what CMake writes into compile_commands.json.
case $build in /*) root=$build/cmake ;; *) root=$PWD/$build/cmake ;; esac
lines() { # lines NAME TEXT: a project that gets dtrain by TEXT
    mkdir -p "$root/$1"
    readme_program after >"$root/$1/first.c"
    printf 'cmake_minimum_required(VERSION 3.14)\nproject(first C)\n%s\nadd_executable(first first.c)
target_link_libraries(first dtrain::dtrain)\n' "$2" >"$root/$1/CMakeLists.txt"
}
quick="-DCMAKE_C_FLAGS=-O0 -DDTRAIN_NO_SIMD"
runs() { # runs NAME FLAG...
    project=$1; shift
    cmake -S "$root/$project" -B "$root/$project/build" "$@" && cmake --build "$root/$project/build" && "$root/$project/build/first" | grep 'w = 3.000'
}
runs_installed() {
    cmake --install "$root/folder/build/dtrain" --prefix "$root/prefix" && runs package -DCMAKE_PREFIX_PATH="$root/prefix"
}
compiled() { # compiled PATTERN FLAG...: dtrain.c in the project "folder", with these flags
    pattern=$1; shift
    cmake -S "$root/folder" -B "$root/commands" -DCMAKE_EXPORT_COMPILE_COMMANDS=ON "$@" && cat "$root/commands/compile_commands.json" &&
        grep '"command".*dtrain\.c"' "$root/commands/compile_commands.json" | grep -q -E -e "$pattern"
}
if here cmake; then
    lines folder "add_subdirectory($PWD dtrain)"
    try "cmake, add_subdirectory" runs folder "$quick"
    try "cmake, -O2 without a build type" compiled ' -O2 ' -DCMAKE_BUILD_TYPE= -DCMAKE_C_FLAGS=
    try "cmake, Debug stays Debug" compiled ' -g ' -DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_FLAGS=
    ! grep '"command".*dtrain\.c"' "$root/commands/compile_commands.json" | grep -q -e ' -O'
    result "cmake, Debug is not optimised" $?
    try "cmake, Release stays -O3" compiled ' -O3 ' -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS=
    try "cmake, flags of the user's" compiled ' -O1 ' -DCMAKE_BUILD_TYPE= -DCMAKE_C_FLAGS=-O1
    ! grep '"command".*dtrain\.c"' "$root/commands/compile_commands.json" | grep -q -e ' -O2'
    result "cmake, flags of the user's are the last" $?
    version=$(sed -n 's/.*DTRAIN_VERSION_STRING "\(.*\)"/\1/p' dtrain.h)
    lines package "find_package(dtrain $version REQUIRED)"
    try "cmake, install and find_package" runs_installed
    lines newer "find_package(dtrain 99.0 REQUIRED)"
    ! cmake -S "$root/newer" -B "$root/newer/build" -DCMAKE_PREFIX_PATH="$root/prefix" >"$root/log" 2>&1 && grep -q "$version" "$root/log"
    result "cmake, another version is refused" $? "$root/log"
    if here git; then
        mkdir -p "$root/repository"
        cp CMakeLists.txt dtrain.h dtrain_cuda.cu dtrain_nccl.h "$root/repository"
        git -C "$root/repository" init -q && git -C "$root/repository" add . &&
            git -C "$root/repository" -c user.name=test -c user.email=test@test commit -q -m one && git -C "$root/repository" tag one
        lines fetched "include(FetchContent)
FetchContent_Declare(dtrain GIT_REPOSITORY $root/repository GIT_TAG one)
FetchContent_MakeAvailable(dtrain)"
        try "cmake, FetchContent" runs fetched "$quick"
    fi

    # Options: a shared library, whose program says how it was compiled; MPI; GPUs are only configured.
    lines shared "add_subdirectory($PWD dtrain)"
    cp tests/cli/abi_user.c "$root/shared/first.c"
    try "cmake, BUILD_SHARED_LIBS" sh -c "cmake -S '$root/shared' -B '$root/shared/build' '$quick' -DBUILD_SHARED_LIBS=ON && cmake --build '$root/shared/build' &&
        '$root/shared/build/first' join && ls '$root/shared/build/dtrain/libdtrain.so.$version' && ! '$root/shared/build/first' join null"
    lines mpi "add_subdirectory($PWD dtrain)"
    printf '#include "dtrain.h"\nint main(void)\n{\n    const dtrain_comm_ops *ops;\n    puts(dtrain_comm_ops_by_name("mpi", &ops) ? dtrain_last_error() : "w = 3.000");\n    return 0;\n}\n' >"$root/mpi/first.c"
    if here mpicc; then try "cmake, DTRAIN_MPI" runs mpi "$quick" -DDTRAIN_MPI=ON; fi
    try "cmake, without DTRAIN_MPI" sh -c "cmake -S '$root/mpi' -B '$root/mpi/without' '$quick' && cmake --build '$root/mpi/without' && ! '$root/mpi/without/first' | grep 'w = 3.000'"
    for option in DTRAIN_CUDA DTRAIN_NCCL; do
        if here nvcc; then try "cmake, $option" cmake -S "$root/folder" -B "$root/$option" "-D$option=ON"; fi
        ! cmake -S "$root/folder" -B "$root/$option.not" "-D$option=ON" -DCMAKE_CUDA_COMPILER=CMAKE_CUDA_COMPILER-NOTFOUND >"$root/log" 2>&1 && grep -q 'need nvcc' "$root/log"
        result "cmake, $option without nvcc says what to do" $? "$root/log"
    done
fi

finish
