#!/bin/sh
# What the CUDA compiler says of dtrain_cuda.cu, without a GPU: no warning for sm_80 and sm_90, no
# kernel that spills registers, programs that link with cuBLAS and NCCL, and one sentence instead of
# a crash or a hang where there is no driver. Prints registers, shared memory and stack of each kernel.
build=${BUILD:-build}/cuda_build
nvcc=${NVCC:-nvcc}
archs=${CUDA_ARCH:-80 90}
passed=0 failed=0 skipped=0
rm -rf "$build"
mkdir -p "$build"

ok() { passed=$((passed + 1)); printf '  ok   %s\n' "$1"; }
fail() { failed=$((failed + 1)); printf '  FAIL %s\n' "$1"; [ ! -s "$2" ] || tail -n 20 "$2"; }
skip() { skipped=$((skipped + 1)); printf '  skip %s: %s\n' "$1" "$2"; }
try() { # try NAME COMMAND...: one test, its output shown when it fails
    name=$1; shift
    if "$@" >"$build/log" 2>&1; then ok "$name"; else fail "$name: $*" "$build/log"; fi
}
finish() {
    if [ "$skipped" -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"
    else echo "$passed passed, $failed failed"; fi
    [ "$failed" -eq 0 ]; exit
}

if ! command -v "$nvcc" >/dev/null 2>&1; then
    skip "the CUDA build" "$nvcc is not installed"
    finish
fi

# ptxas -v: "Compiling entry function 'NAME'", then stack and spills, then "Used N registers, ...".
# As a table of the worst of each template, most registers first; every kernel that spills is named.
# Fails when one does, and when there is no kernel at all.
table() {
    c++filt <"$1" | awk '
        function number(text) { return match($0, "[0-9]+ " text) ? substr($0, RSTART, RLENGTH) + 0 : 0 }
        /Compiling entry function/ {
            name = $0; sub(/.*function .(void )?/, "", name); sub(/.\.? for .*/, "", name); sub(/\(.*/, "", name)
            stack = spills = 0 }
        /spill stores/ {
            stack = number("bytes stack")
            spills = number("bytes spill stores") + number("bytes spill loads") }
        /Used [0-9]+ registers/ && name != "" {
            all++
            if (spills) { bad++; printf "spills %d bytes: %s\n", spills, name }
            sub(/<.*/, "", name); kinds[name]++
            if (number("registers") > regs[name]) regs[name] = number("registers")
            if (number("bytes smem") > shared[name]) shared[name] = number("bytes smem")
            if (stack > stacks[name]) stacks[name] = stack
            name = "" }
        END {
            for (n in kinds) printf "%5d %7d %6d %5d  %s\n", regs[n], shared[n], stacks[n], kinds[n], n | "sort -rn"
            exit bad > 0 || all == 0 }' >"$build/table"
    verdict=$?
    printf '  %5s %7s %6s %5s  %s\n' regs shared stack kinds "kernel (dynamic shared memory comes on top)"
    sed 's/^/  /' "$build/table"
    return $verdict
}

strict="-Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror"
for arch in $archs; do
    if timeout 900 $nvcc -O3 -std=c++17 -gencode=arch=compute_$arch,code=sm_$arch $strict -I. -Xptxas -v \
        -c dtrain_cuda.cu -o "$build/dtrain_cuda_$arch.o" >"$build/ptxas_$arch" 2>&1; then
        ok "dtrain_cuda.cu, sm_$arch"
        if table "$build/ptxas_$arch"; then ok "no kernel spills, sm_$arch"; else fail "kernels spill, sm_$arch"; fi
        last=$arch
    else fail "dtrain_cuda.cu, sm_$arch" "$build/ptxas_$arch"; fi
done
[ -n "$last" ] || finish

# The getter and nothing else is exported: kernels are file-local.
kernels=$build/dtrain_cuda_$last.o
exported=$(nm -g --defined-only "$kernels" | awk '$2 == "T" { print $3 }')
try "dtrain_cuda.o exports its getter only" [ "$exported" = dtrain_cuda_device_ops ]

# A program of one's own: one nvcc line, and what it says on a machine without a GPU or a driver.
cat >"$build/first.c" <<'END'
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
int main(void)
{
    dtrain_device_desc desc;
    dtrain_device *device = NULL;
    memset(&desc, 0, sizeof desc);
    if (dtrain_device_create(dtrain_cuda_device_ops(), &desc, &device) == DTRAIN_OK) {
        dtrain_device_destroy(device);
        printf("a GPU\n");
        return 0;
    }
    fprintf(stderr, "%s\n", dtrain_last_error());
    return device ? 2 : 1;
}
END
line="$nvcc -O1 -gencode=arch=compute_$last,code=sm_$last -DDTRAIN_USE_CUDA -I."
try "one nvcc line makes a program" $line "$build/first.c" dtrain_cuda.cu -lcublasLt -o "$build/first"
programs=
[ ! -x "$build/first" ] || programs=$build/first
for example in examples/*.c tools/*/*.c; do
    program=$build/$(basename "$example" .c)
    try "$example" $line "$example" "$kernels" -lcublasLt -o "$program"
done
for example in "train_gpt --steps 2" ddp mlp "gpt --steps 2"; do
    [ ! -x "$build/${example%% *}" ] || programs="$programs|$build/$example --device cuda"
done

if ! echo '#include <nccl.h>' | $nvcc -E -x cu - >/dev/null 2>&1; then
    skip "programs with NCCL" "nccl.h is not installed"
else
    try "train_gpt with NCCL" $line -DDTRAIN_USE_NCCL tools/train_gpt/train_gpt.c "$kernels" -lcublasLt -ldl -o "$build/train_nccl"
    try "tests/nccl/gpu_nccl.c, NCCL linked" $line -DDTRAIN_NCCL_LINKED tests/nccl/gpu_nccl.c "$kernels" -lcublasLt -lnccl -o "$build/gpu_nccl"
    [ ! -x "$build/train_nccl" ] || programs="$programs|$build/train_nccl --device cuda --ranks 2 --steps 2"
    [ ! -x "$build/gpu_nccl" ] || programs="$programs|$build/gpu_nccl two"
fi

# Without a GPU: at most three lines on stderr, one of them a sentence about it, an exit code from 1 to
# 123, within 30 s. CUDA_VISIBLE_DEVICES hides the GPU of a machine that has one.
IFS='|'
for command in $programs; do
    unset IFS
    [ -n "$command" ] || continue
    CUDA_VISIBLE_DEVICES= timeout 30 $command >"$build/out" 2>"$build/err"
    status=$?
    if [ "$status" -gt 0 ] && [ "$status" -lt 124 ] && [ "$(wc -l <"$build/err")" -le 3 ] &&
        grep -q -i -E 'GPU|driver|CUDA' "$build/err"; then
        ok "without a GPU, $(basename "${command%% *}"): $(head -n 1 "$build/err" | cut -c 1-90)"
    else fail "without a GPU, exit code $status: $command" "$build/err"; fi
    IFS='|'
done
unset IFS
finish
