#!/usr/bin/env bash
# make gpu-first, or without make: bash tests/cuda/gpu_first.sh. The first thing to run on a real NVIDIA GPU, in less than four
# minutes on one GPU and 16 cores: it needs nvcc and gcc alone, compiles for this GPU by plain commands, and asks what no test
# without a GPU can answer. Random arguments for every kernel; NCCL with one rank, and its collectives in a recorded step; a pipeline
# of two ranks on one GPU, over NCCL and through host memory; training in bf16 with recorded steps. Ends as gpu_check.sh does.
cd "$(dirname "$0")/../.." || exit 1
suite=gpu-first
. tests/cuda/gpu_steps.sh
has_nccl && nccl="-DDTRAIN_USE_NCCL -ldl" || nccl=

# Programs are linked with the library, although their text asks for one of their own, as the Makefile does it. All are compiled
# at once; the kernels take longest.
compile() {
    local linked="-DDTRAIN__IMPLEMENTED -D_GNU_SOURCE" header program source id ids=() status=0
    local folders="-I. -Itests -Itests/support -Itests/unit -Itests/cuda -Ibench"
    for header in errno float limits math stdlib string time unistd; do linked="$linked -include $header.h"; done
    mkdir -p "$bin"
    set -x
    "$nvcc" -O3 -std=c++17 -arch=native $nvccflags -I. -c dtrain_cuda.cu -o "$bin/dtrain_cuda.o" & ids+=($!)
    printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' |
        gcc -std=c99 -O2 -DDTRAIN_USE_CUDA -I. -x c -c - -o "$bin/dtrain.o" & ids+=($!)
    for source in tests/cuda/test_cuda_kernels.c tools/train_gpt/train_gpt.c ${nccl:+tests/nccl/gpu_nccl.c}; do
        program=$bin/$(basename "$source" .c)
        "$nvcc" -O2 $nvccflags -DDTRAIN_USE_CUDA $linked $folders $nccl -c "$source" -o "$program.o" & ids+=($!)
    done
    for id in "${ids[@]}"; do wait "$id" || status=1; done
    [ $status -eq 0 ] || return 1
    for program in test_cuda_kernels train_gpt ${nccl:+gpu_nccl}; do
        "$nvcc" -arch=native $nvccflags "$bin/$program.o" "$bin/dtrain.o" "$bin/dtrain_cuda.o" -o "$bin/$program" \
            -lcublasLt -lm -lpthread $nccl || return 1
    done
    set +x
    echo "the kernels, the library, ${nccl:+gpu_nccl, }train_gpt and test_cuda_kernels"
}
export -f compile
export nvcc nccl
step 130 "build" compile || exit 1

kernels() { # a test that is skipped for want of a device is none
    DTRAIN_TEST_TIMEOUT=15 "$bin/test_cuda_kernels" | tee "$logs/kernels.out"
    grep -q '^[1-9][0-9]* passed, 0 failed' "$logs/kernels.out"
}
export -f kernels
step 15 "kernels" kernels
if [ -n "$nccl" ]; then
    step 10 "NCCL, one rank" "$bin/gpu_nccl" one
    step 10 "NCCL, in a recorded step" "$bin/gpu_nccl" one --graph
    step 20 "NCCL, a pipeline of two" "$bin/gpu_nccl" line
else note skip 0 "NCCL" "nvcc finds no nccl.h, and python3 no nvidia.nccl"; fi
step 15 "a pipeline through the host" train --ranks 2 --pipeline 2 --accum 4
step 15 "train_gpt, bf16, graph" train --ranks 1 --precision bf16 --graph
[ $failed -eq 0 ]
