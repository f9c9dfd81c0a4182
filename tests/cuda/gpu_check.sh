#!/usr/bin/env bash
# make gpu-check: is it right on a real NVIDIA GPU? At most nine minutes on one GPU and 16 cores. Builds; runs the kernel
# tests on the device; NCCL with one rank, in a graph, with two processes on one GPU, and with one of them killed; trains
# under every strategy; then compute-sanitizer over every kernel. Ends with 0 when no step failed, 1 when one did, 2
# when something is missing. gpu_steps.sh says where its results go.
cd "$(dirname "$0")/../.." || exit 1
suite=gpu-check
. tests/cuda/gpu_steps.sh

nccl=
! has_nccl || nccl=$bin/gpu_nccl
step 170 "build" build gpu-programs $nccl || exit 1

# The device's own test counts free memory, so it runs alone; the others share the GPU.
all_tests() {
    local test tests failures=0 pids=()
    tests=$(ls "$bin"/test_cuda_* | grep -v '\.[od]$')
    for test in $tests; do
        "$test" >"$logs/$(basename "$test").log" 2>&1 &
        pids+=($!)
        [ "$test" != "$bin/test_cuda_device" ] || wait $!
    done
    wait "${pids[@]}"
    for test in $tests; do
        test=$(basename "$test")
        echo "$test: $(tail -n 1 "$logs/$test.log")"
        grep '  FAIL' "$logs/$test.log"
        grep -q ' passed, 0 failed' "$logs/$test.log" || failures=1
    done
    cat "$logs"/test_cuda_*.log | awk '
        /^[0-9]+ passed, / { p += $1; f += $3; s += $5 }
        END { print p + 0 " passed, " f + 0 " failed, " s + 0 " skipped"; exit p == 0 }' || failures=1
    return $failures
}
export -f all_tests
DTRAIN_TEST_TIMEOUT=60 step 70 "kernel tests" all_tests

# ---- NCCL -----------------------------------------------------------------------------------------
if [ -n "$nccl" ]; then
    step 10 "NCCL, one rank" "$nccl" one
    step 10 "NCCL, in a graph" "$nccl" one --graph
    step 15 "NCCL, two on one GPU" "$nccl" two
    step 15 "NCCL, a pipeline of two" "$nccl" line
    step 35 "NCCL, one of two killed" "$nccl" kill
else note skip 0 "NCCL" "nvcc finds no nccl.h, and python3 no nvidia.nccl"; fi

# ---- Training -------------------------------------------------------------------------------------
# Two ranks train under every strategy, through host memory where they share the GPU. All end with ddp's
# parameters, to the bit: hybrid_shard too, with one node or with nodes of one rank.
strategies() {
    local strategy hash ddp= count=0
    for strategy in ddp zero1 shard_grad_op full_shard "full_shard --reshard-after-forward 0" zero3 \
        "hybrid_shard --node-size 1" "hybrid_shard --node-size 2" auto; do
        hash=$("$bin/train_gpt" --device cuda --ranks 2 --steps 8 --warmup 2 --eval-batches 0 --sample 0 \
            --deterministic --strategy $strategy 2>&1 | tee -a "$logs/strategies.out" |
            sed -n 's/.*parameters  *\([0-9a-f]\{16\}\) .*/\1/p')
        ddp=${ddp:-$hash}
        echo "$strategy: ${hash:-failed}, ddp: $ddp"
        [ -n "$hash" ] && [ "$hash" = "$ddp" ] || return 1
        count=$((count + 1))
    done
    echo "$count runs end with ddp's parameters"
}
export -f strategies
step 6 "ddp" "$bin/ddp" --device cuda
step 6 "mlp" "$bin/mlp" 1 --device cuda
step 12 "train_gpt, fp32" train --ranks 1
step 12 "train_gpt, bf16" train --ranks 1 --precision bf16
step 12 "train_gpt, bf16, graph" train --ranks 1 --precision bf16 --graph
step 12 "train_gpt, 2 ranks on one GPU" train --ranks 2
step 15 "resnet_cifar, bf16" "$bin/resnet_cifar" --device cuda --ranks 1 --precision bf16 --steps 20
step 35 "train_gpt, every strategy" strategies

# ---- compute-sanitizer ----------------------------------------------------------------------------
# bench_kernels --quick calls every kernel a few times, at small odd shapes, and compares the results.
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/compute-sanitizer/compute-sanitizer 2>/dev/null)
sanitize() { # sanitize TOOL
    local filter=
    [ -n "$sanitizer" ] || { echo "compute-sanitizer is not installed"; return 77; }
    # cuBLAS is not ours to judge, where this version can tell the kernels apart
    "$sanitizer" --help 2>&1 | grep -q -- --kernel-regex && filter="--kernel-regex kns=dtrain_cuda"
    "$sanitizer" --tool "$1" --error-exitcode 9 $filter "$bin/bench_kernels" --quick
    local status=$?
    [ $status -ne 0 ] && grep -q -i 'device not supported' "$logs/$1.log" || return $status
    echo "compute-sanitizer does not support this device or its driver"
    return 77
}
export -f sanitize
export sanitizer
step 35 memcheck sanitize memcheck
step 35 initcheck sanitize initcheck
step 30 racecheck sanitize racecheck
step 25 synccheck sanitize synccheck
[ $failed -eq 0 ]
