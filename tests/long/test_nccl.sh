#!/bin/sh
# dtrain_nccl.h for every version of NCCL that it treats differently: the tests of test_nccl.c against the
# mock, compiled with that version's header. Then, where the CUDA Toolkit and NCCL are installed, against
# the real header, and the real library on a machine without a GPU: a sentence, no crash and no hang.
. tests/support/shell.sh
cc=${CC:-cc}
out=$build/nccl_versions
versions=${NCCL_VERSIONS:-21501 21801 21901 22203 22703} # test_nccl itself is 22809
library=$build/dtrain.a
mkdir -p "$out"
make -s BUILD="$build" CC="$cc" "$library" || exit 1
ok() { result "$1" 0; }
fail() { result "$1" 1 "$tmp/log"; }

strict="-std=c99 -pedantic -Wall -Wextra -Wconversion -Werror"
mock="-I. -Itests -Itests/support -Itests/nccl/mock"
for version in $versions; do
    flags="${CFLAGS:--O1 -g} -DNCCL_MOCK_VERSION=$version"
    try "NCCL $version compiles" $cc $strict $flags $mock tests/nccl/test_nccl.c "$library" -o "$out/test_nccl_$version" -lm -lpthread
done
for version in $versions; do # together: they mostly wait for deadlines
    "$out/test_nccl_$version" >"$out/log_$version" 2>&1 &
done
wait
for version in $versions; do
    tail -n 40 "$out/log_$version" >"$tmp/log"
    if tail -n 1 "$tmp/log" | grep -q '^[0-9]* passed, 0 failed'; then ok "NCCL $version: $(tail -n 1 "$tmp/log")"
    else fail "NCCL $version"; fi
done

printf '#define DTRAIN_NCCL_IMPLEMENTATION\n#include "dtrain_nccl.h"\n' >"$out/nccl.c"
if $cc -std=c99 -DNCCL_MOCK_VERSION=21402 $mock -c "$out/nccl.c" -o "$out/old.o" >"$tmp/log" 2>&1; then
    fail "the header of 2.14 is refused"
elif grep -q 'needs the header of NCCL 2.15.1' "$tmp/log"; then ok "the header of 2.14 is refused"
else fail "the header of 2.14 is refused with a sentence"; fi

for pair in "gcc -std=c99" "clang -std=c99" "gcc -std=c11" "g++ -std=c++17 -x c++" "clang++ -std=c++17 -x c++"; do
    compiler=${pair%% *}
    have "$compiler" || { skip "dtrain_nccl.h, $pair" "not installed"; continue; }
    try "dtrain_nccl.h, $pair" $pair -pedantic -Wall -Wextra -Werror $mock -fsyntax-only "$out/nccl.c"
done

# A program that opens the library and says which it found.
cat >"$out/ask.c" <<'END'
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
#include <stdio.h>
int main(void)
{
    dtrain_nccl__library nccl;
    uint32_t version;
    if (dtrain_nccl_comm_ops()->abi != DTRAIN_COMM_ABI) return 3;
    if (dtrain_nccl__load(&nccl, &version) != DTRAIN_OK) {
        printf("%s\n", dtrain_last_error());
        return 1;
    }
    printf("header %u, library %u\n", (unsigned)NCCL_VERSION_CODE, (unsigned)version);
    return version >= NCCL_VERSION_CODE ? 0 : 2;
}
END
missing='-DDTRAIN_NCCL_LIBRARY="libnccl-that-is-not-there.so.2"'
cat >"$out/stubs.c" <<'END'
#include <cuda_runtime_api.h>
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
const char *cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an error"; }
END
try "a program, no library" $cc -std=c99 $mock "$missing" "$out/ask.c" "$out/stubs.c" "$library" -o "$out/ask" -lm -lpthread -ldl
if [ -x "$out/ask" ]; then
    "$out/ask" >"$tmp/log" 2>&1
    if [ $? -eq 1 ] && grep -q 'NCCL could not be opened (libnccl-that-is-not-there' "$tmp/log"; then ok "a missing library is a sentence"
    else fail "a missing library is a sentence"; fi
fi

# The mock as a library that is opened at run time; its device and its arithmetic are not needed here.
cat >"$out/library.c" <<'END'
#include "nccl/mock/nccl_mock.c"
float dtrain_half_to_f32(dtrain_dtype dtype, uint16_t bits) { return dtype ? bits : 0; }
uint16_t dtrain_half_from_f32(dtrain_dtype dtype, float value) { return dtype ? (uint16_t)value : 0; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
bool nccl_mock_enqueue(cudaStream_t stream, bool (*step)(void *), const void *state, size_t bytes) { return stream && step && state && bytes; }
bool nccl_mock_retain(cudaStream_t stream, void (*release)(void *), void *user) { return stream && release && !user; }
void nccl_mock_advance(void) {}
bool nccl_mock_is_idle(void) { return true; }
bool nccl_mock_is_device_memory(const void *memory, size_t bytes) { return memory && bytes; }
void *nccl_mock_device_alloc(size_t bytes) { return malloc(bytes); }
void nccl_mock_device_free(void *memory) { free(memory); }
END
opened() { # opened NAME VERSION STATUS WORDS
    $cc -std=c99 -fPIC -shared -DNCCL_MOCK_VERSION=$2 $mock "$out/library.c" -o "$out/libmock.so" >"$tmp/log" 2>&1 || { fail "$1"; return; }
    "$out/ask_mock" >"$tmp/log" 2>&1
    if [ $? -eq "$3" ] && grep -q "$4" "$tmp/log"; then ok "$1"; else fail "$1"; fi
}
try "a program that opens its library" $cc -std=c99 $mock "-DDTRAIN_NCCL_LIBRARY=\"$out/libmock.so\"" "$out/ask.c" "$out/stubs.c" "$library" -o "$out/ask_mock" -lm -lpthread -ldl
opened "the library that was compiled for" 22809 0 "header 22809, library 22809"
opened "an older library lacks functions: its version is named" 21501 1 "is version 2.15.1, but"

# ---- The real header and library ----
nvcc=$(command -v "${NVCC:-nvcc}" 2>/dev/null)
cuda=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "${nvcc:-/usr/local/cuda/bin/nvcc}")")")}
if [ ! -f "$cuda/include/cuda_runtime_api.h" ] || ! echo '#include <nccl.h>' | $cc -isystem "$cuda/include" -E - >/dev/null 2>&1; then
    skip "the real NCCL" "cuda_runtime_api.h or nccl.h is not installed"
    finish
fi
real="-isystem $cuda/include -I."
for pair in "gcc -std=c99" "clang -std=c99" "g++ -std=c++17 -x c++"; do
    compiler=${pair%% *}
    have "$compiler" || { skip "the real header, $pair" "not installed"; continue; }
    try "the real header, $pair" $pair -pedantic -Wall -Wextra -Werror $real -fsyntax-only "$out/nccl.c"
done

# The library says "no device" in its own words, through the same calls that a world makes.
cat >"$out/alone.c" <<'END'
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
int main(void)
{
    static const dtrain_device_ops ops; /* that has nothing to do */
    dtrain_device device;
    dtrain_nccl__hub hub;
    dtrain_nccl__comm comm;
    ncclUniqueId id;
    memset(&device, 0, sizeof device);
    memset(&hub, 0, sizeof hub);
    device.ops = &ops;
    hub.device = &device;
    memset(&comm, 0, sizeof comm);
    if (dtrain_nccl__load(&hub.nccl, &hub.version) != DTRAIN_OK) {
        printf("%s\n", dtrain_last_error());
        return 2;
    }
    hub.deadline = 20;
    hub.closing = true; /* this test has no world that could be told */
    hub.comms = &comm;
    comm.hub = &hub;
    comm.base.size = 1;
    if (hub.nccl.GetUniqueId(&id) != ncclSuccess) return 3;
    if (dtrain_nccl__comm_init(&comm, &id) == DTRAIN_OK) return 77;
    printf("%s\n", dtrain_last_error());
    return 1;
}
END
lib=$cuda/lib64; [ -e "$lib/libnccl.so" ] || lib=$cuda/lib
for mode in "opened|-ldl" "linked|-DDTRAIN_NCCL_LINKED -L$lib -lnccl -Wl,-rpath,$lib"; do
    try "a program with the real NCCL, ${mode%%|*}" $cc -std=c99 $real "-DDTRAIN_NCCL_LIBRARY=\"$lib/libnccl.so.2\"" "$out/alone.c" "$library" -o "$out/alone" ${mode#*|} -L"$lib" -lcudart -Wl,-rpath,"$lib" -lm -lpthread
    [ -x "$out/alone" ] || continue
    CUDA_VISIBLE_DEVICES= timeout 300 "$out/alone" >"$tmp/log" 2>&1
    if [ $? -eq 1 ] && grep -q 'NCCL reports "unhandled cuda error' "$tmp/log"; then ok "no device, ${mode%%|*}: $(cut -c 1-90 "$tmp/log" | head -n 1)"
    else fail "no device, ${mode%%|*}"; fi
    rm -f "$out/alone"
done
finish
