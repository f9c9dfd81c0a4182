#!/bin/sh
# Two files are enough: dtrain.h compiles alone in every dialect, links from two translation units,
# and leaves only dtrain_ symbols. Compilers that are not installed are skipped by name.
. tests/support/shell.sh
build=$build/compile
mkdir -p "$build"

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
{ echo '#define DTRAIN_STATIC'; cat "$build/impl.c"; echo 'int main(void) { return dtrain_version()[0] == 0; }'; } >"$build/static.c"

warn="-I. -Wall -Wextra -Wconversion -Werror"
for cc in gcc clang; do
    if ! have $cc; then skip "$cc" "not installed"; continue; fi
    for std in c99 c11 c17 gnu99; do
        try "$cc -std=$std -pedantic" $cc -std=$std -pedantic $warn -c "$build/impl.c" -o "$build/impl_$cc.o"
    done
    try "$cc -O3 -ffast-math -march=native finds overflows" sh -c "$cc -std=c99 -O3 -ffast-math -march=native $warn \
        -Itests -Itests/support tests/unit/test_scaler.c -o '$build/scaler_$cc' -lm -lpthread && '$build/scaler_$cc'"
    try "$cc without SIMD" $cc -std=c99 -DDTRAIN_NO_SIMD $warn -c "$build/impl.c" -o "$build/nosimd.o"
    try "$cc late implementation" $cc -std=gnu99 $warn -c "$build/late.c" -o "$build/late.o"
    try "$cc static copy" $cc -std=c99 -I. -Wall -Wextra -Werror -Wno-unused-function "$build/static.c" -o "$build/static" -lm -lpthread
    try "$cc two files" $cc -std=c99 $warn "$build/user.c" "$build/impl_$cc.o" -o "$build/two_$cc" -lm -lpthread
    try "$cc two files run" "$build/two_$cc"
    try "$cc exports dtrain_ only" sh -c "! nm -g --defined-only $build/impl_$cc.o | awk '{print \$3}' | grep -v '^dtrain_'"
done
for cxx in g++ clang++; do
    if ! have $cxx; then skip "$cxx" "not installed"; continue; fi
    for std in c++17 c++20; do
        try "$cxx -std=$std" $cxx -x c++ -std=$std -pedantic $warn -c "$build/impl.c" -o "$build/impl_$cxx.o"
    done
    try "$cxx C++ user, C implementation" $cxx -x c++ -std=c++17 $warn -c "$build/user.c" -o "$build/user_$cxx.o"
    if [ -f "$build/impl_gcc.o" ]; then
        try "$cxx links them" $cxx "$build/user_$cxx.o" "$build/impl_gcc.o" -o "$build/mixed_$cxx" -lm -lpthread
    fi
done
if have nvcc; then
    cp "$build/impl.c" "$build/impl.cu"
    try "nvcc, in a .cu" nvcc -std=c++17 -I. -c "$build/impl.cu" -o "$build/impl_nvcc.o"
else skip "nvcc" "not installed"; fi
if echo '#include <cblas.h>' | ${CC:-cc} -E - >/dev/null 2>&1; then
    try "DTRAIN_USE_CBLAS" ${CC:-cc} -std=c99 -DDTRAIN_USE_CBLAS $warn -c "$build/impl.c" -o "$build/cblas.o"
else skip "DTRAIN_USE_CBLAS" "no cblas.h"; fi

# The programs that the README and the manual show are what they say: complete, and right.
sed -n '/^```c$/,/^```$/p' README.md | grep -v '^```' >"$build/readme.c"
sed -n '/A complete program: a model/,/With the tape/p' dtrain.h | sed '1d;$d' >"$build/manual.c"
for program in readme manual; do
    try "the program of the $program compiles" ${CC:-cc} -std=c99 $warn -O1 "$build/$program.c" -o "$build/$program" -lm -lpthread
    try "the program of the $program learns" sh -c "'$build/$program' | grep -q 'w = 3.000'"
done

finish
