#!/bin/sh
# What the CUDA compiler says of dtrain_cuda.cu, without a GPU: no warning and no kernel that spills registers for sm_80 and
# sm_90, which make cuda compiles for (make nightly: 75 80 86 89 90 100 120), and none from clang;
# programs that link with cuBLAS and NCCL, and one sentence instead of a crash or a hang where there is no driver. Prints
# registers, shared memory and stack of each kernel.
. tests/support/shell.sh
out=$build/cuda_build
nvcc=${NVCC:-nvcc}
archs=${CUDA_ARCH:-80 90}
rm -rf "$out"
mkdir -p "$out"
ok() { result "$1" 0; }
fail() { result "$1" 1 "$2"; }

if ! have "$nvcc"; then
    skip "the CUDA build" "$nvcc is not installed"
    finish
fi

# A second compiler reads the kernels' text, in seconds. It asks for headers that CUDA 13 no longer has, and lacks __ldcg of
# an unsigned.
clang=${CLANG_CUDA:-clang-19}
cuda=$(dirname "$(dirname "$(readlink -f "$(command -v "$nvcc")")")")
mkdir -p "$out/clang"
touch "$out/clang/texture_fetch_functions.h" "$out/clang/surface_functions.h"
echo 'static __device__ unsigned __ldcg(const unsigned *from) { return *(const volatile unsigned *)from; }' >"$out/clang/ldcg.h"
if have "$clang"; then
    try "dtrain_cuda.cu, $clang" "$clang" -x cuda -std=c++17 -fsyntax-only --cuda-device-only --cuda-path="$cuda" --cuda-gpu-arch=sm_90 \
        -I"$out/clang" -I. -include ldcg.h -Wno-unknown-cuda-version -Wall -Wextra -Werror dtrain_cuda.cu
else skip "dtrain_cuda.cu, $clang" "it is not installed"; fi

# ptxas -v: "Compiling entry function 'NAME'", then stack and spills, then "Used N registers, ...".
# As a table of the worst of each template, most registers first; every kernel that spills is named.
# Fails when one does, and when there is no kernel at all.
table() { # table ARCH
    c++filt <"$out/ptxas" | awk -v wanted="for .sm_$1.$" '
        function number(text) { return match($0, "[0-9]+ " text) ? substr($0, RSTART, RLENGTH) + 0 : 0 }
        /Compiling entry function/ { ours = $0 ~ wanted }
        !ours { next }
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
            exit bad > 0 || all == 0 }' >"$out/table"
    verdict=$?
    printf '  %5s %7s %6s %5s  %s\n' regs shared stack kinds "kernel (dynamic shared memory comes on top)"
    sed 's/^/  /' "$out/table"
    return $verdict
}

# The Makefile's own targets, as a machine with a GPU runs them; the kernels are compiled once for all that follows.
unset MAKEFLAGS MFLAGS MAKELEVEL # this make is nobody's part
strict="-Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror -Xptxas -v"
targets() { timeout 1800 make -s BUILD="$out" CC="${CC:-cc}" CFLAGS=-O1 CUDA_ARCH="$archs" "$@"; }
kernels=$out/cuda/dtrain_cuda.o
targets NVCCFLAGS="$strict" "$kernels" >"$out/ptxas" 2>&1
result "dtrain_cuda.cu, sm_$archs" $? "$out/ptxas"
[ -f "$kernels" ] || finish
for arch in $archs; do
    if table "$arch"; then ok "no kernel spills, sm_$arch"; else fail "kernels spill, sm_$arch"; fi
done

# The getter and nothing else is exported: kernels are file-local.
exported=$(nm -g --defined-only "$kernels" | awk '$2 == "T" { print $3 }')
try "dtrain_cuda.o exports its getter only" [ "$exported" = dtrain_cuda_device_ops ]
printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' >"$out/dtrain.cu"
try "dtrain.h in a .cu" $nvcc -std=c++17 -I. -c "$out/dtrain.cu" -o "$out/in_a_cu.o"

# Every program links where nvcc finds nccl.h; where it does not (NCCL=), those that would use it. They are linked with the
# library above although flags differ (-o), and compile in less time than for a user.
try "the library" targets NVCCFLAGS="$strict" "$out/cuda/dtrain.a"
linked() { targets NVCCFLAGS="-Xcompiler -O1" -o "$out/cuda/dtrain.a" -o "$out/cuda/dtrain.o" -o "$kernels" "$@"; }
try "programs of make cuda, without nccl.h" linked NCCL= "$out/cuda/resnet_cifar" "$out/cuda/train_gpt" "$out/cuda/nccl"
programs=
if ! echo '#include <nccl.h>' | $nvcc -E -x cu - >/dev/null 2>&1; then
    skip "programs with NCCL" "nccl.h is not installed" 3
else
    try "make gpu-programs, with nccl.h" linked gpu-programs
    try "tests/nccl/gpu_nccl.c" linked "$out/cuda/gpu_nccl"
    try "tests/nccl/gpu_nccl.c, NCCL linked" $nvcc -O1 -DDTRAIN_USE_CUDA -DDTRAIN_NCCL_LINKED -I. \
        tests/nccl/gpu_nccl.c "$kernels" -lcublasLt -lnccl -o "$out/gpu_nccl"
    programs="$out/cuda/train_gpt --device cuda --ranks 2 --steps 2|$out/gpu_nccl two"
fi
for example in examples/*.c tools/*/*.c; do
    ! grep -q '"--device\|tools/run/run.h' "$example" "$(dirname "$example")"/*.h 2>/dev/null ||
        programs="$programs|$out/cuda/$(basename "$example" .c) --device cuda"
done

# Without a GPU: at most three lines on stderr, one of them a sentence about it, an exit code from 1 to
# 123, within 30 s. CUDA_VISIBLE_DEVICES hides the GPU of a machine that has one.
IFS='|'
for command in $programs; do
    unset IFS
    [ -n "$command" ] || continue
    CUDA_VISIBLE_DEVICES= timeout 30 $command >"$out/out" 2>"$out/err"
    status=$?
    if [ "$status" -gt 0 ] && [ "$status" -lt 124 ] && [ "$(wc -l <"$out/err")" -le 3 ] &&
        grep -q -i -E 'GPU|driver|CUDA' "$out/err"; then
        ok "without a GPU, $(basename "${command%% *}"): $(head -n 1 "$out/err" | cut -c 1-90)"
    else fail "without a GPU, exit code $status: $command" "$out/err"; fi
    IFS='|'
done
unset IFS
finish
