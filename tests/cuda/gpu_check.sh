#!/usr/bin/env bash
# make gpu-check: everything that needs a real NVIDIA GPU, in about nine minutes on one GPU and 16 cores.
# Builds; runs the kernel tests on the device; trains under every strategy; compute-sanitizer over every kernel;
# NCCL with one rank, with two processes on one GPU, and with one of them killed; then the benchmarks. Every
# step has a deadline and a log of its own. Results go to bench/results/GPU.jsonl: a line about the machine, then one
# line a result. Ends with 0 when no step failed, 1 when one did, 2 when there is no GPU.
#   GPU_CHECK_SECONDS   for all of it; 540. A step that has no time left is skipped and says so.
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
bin=$build/cuda
logs=$build/gpu-check
budget=${GPU_CHECK_SECONDS:-540}
reserve=$((budget / 3)) # kept for the benchmarks, the last steps
SECONDS=0
passed=0 failed=0 skipped=0
summary=()

query=name,driver_version,memory.total
gpu=$(nvidia-smi --query-gpu=$query --format=csv,noheader 2>/dev/null | grep MiB | head -n 1)
if [ -z "$gpu" ]; then
    echo "gpu-check: no NVIDIA GPU was found: nvidia-smi lists none (the kernels are tested without one by make test)" >&2
    exit 2
fi
if ! command -v "${NVCC:-nvcc}" >/dev/null 2>&1; then
    echo "gpu-check: ${gpu%%,*} is there, but ${NVCC:-nvcc} is not installed: install the CUDA Toolkit or set NVCC" >&2
    exit 2
fi
name=${gpu%%,*}
results=bench/results/$(echo "$name" | tr 'A-Z ' 'a-z-' | tr -cd 'a-z0-9-').jsonl
mkdir -p "$logs" "$(dirname "$results")"
rm -f "$logs"/*

# note RESULT SECONDS NAME TEXT: a line of the summary
note() {
    case $1 in ok) passed=$((passed + 1)) ;; FAIL) failed=$((failed + 1)) ;; skip) skipped=$((skipped + 1)) ;; esac
    summary+=("$(printf '  %-4s %4d s  %-28s %s' "$1" "$2" "$3" "$4")")
    printf '%s\n' "${summary[-1]}"
}

# step LIMIT NAME COMMAND...: runs it with a deadline; 77 is a skip. The log's last line is the summary's text.
step() {
    local limit=$1 name=$2 start=$SECONDS log status text
    shift 2
    log=$logs/$(echo "$name" | tr ' /,' '---').log
    [ "$limit" -le $((budget - reserve - SECONDS)) ] || limit=$((budget - reserve - SECONDS))
    if [ "$limit" -lt 5 ]; then note skip 0 "$name" "no time left of $budget s (GPU_CHECK_SECONDS)"; return 1; fi
    timeout -k 5 "$limit" "$@" >"$log" 2>&1
    status=$?
    text=$(grep -v '^ *$' "$log" | tail -n 1 | cut -c 1-120)
    case $status in
        0) note ok $((SECONDS - start)) "$name" "$text" ;;
        77) note skip $((SECONDS - start)) "$name" "$text" ;;
        124 | 137) note FAIL $((SECONDS - start)) "$name" "not done after $limit s; $log" ;;
        *) note FAIL $((SECONDS - start)) "$name" "exit code $status; $log: $text" ;;
    esac
    [ "$status" -eq 0 ]
}

# ---- Build and test -------------------------------------------------------------------------------
if ! step 240 "build" make -j"$(nproc)" BUILD="$build" gpu-programs; then
    tail -n 20 "$logs/build.log"
    exit 1
fi
if echo '#include <nccl.h>' | "${NVCC:-nvcc}" -E -x cu - >/dev/null 2>&1; then
    step 60 "build, NCCL" make BUILD="$build" "$bin/gpu_nccl"
else rm -f "$bin/gpu_nccl"; fi

# The device's own test counts free memory, so it runs alone; the others share the GPU.
all_tests() {
    local test tests failures=0 pids=()
    tests=$(ls "$bin"/test_cuda_* | grep -v '\.[od]$')
    timeout 60 "$bin/test_cuda_device" >"$logs/test_cuda_device.log" 2>&1 || failures=1
    for test in $tests; do
        [ "$test" = "$bin/test_cuda_device" ] && continue
        "$test" >"$logs/$(basename "$test").log" 2>&1 &
        pids+=($!)
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
export bin logs
DTRAIN_TEST_TIMEOUT=100 step 150 "kernel tests" bash -c all_tests

train() { # train FLAGS...: a short run whose loss has to fall
    "$bin/train_gpt" --device cuda --steps 60 --warmup 10 --eval-batches 4 --sample 0 "$@" >"$logs/train.out" 2>&1
    local status=$?
    cat "$logs/train.out"
    [ $status -eq 0 ] || return $status
    awk '/^  loss / { last = $2; first = $4 + 0; print "loss " first " to " last; good = last < first - 1 }
         END { exit !good }' "$logs/train.out"
}
export -f train

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
step 30 "ddp" "$bin/ddp" --device cuda
step 60 "mlp" "$bin/mlp" 1 --device cuda
step 60 "train_gpt, fp32" bash -c "train --ranks 1"
step 60 "train_gpt, bf16" bash -c "train --ranks 1 --precision bf16"
step 60 "train_gpt, bf16, graph" bash -c "train --ranks 1 --precision bf16 --graph"
step 60 "train_gpt, 2 ranks on one GPU" bash -c "train --ranks 2"
step 90 "train_gpt, every strategy" bash -c strategies

# ---- compute-sanitizer ----------------------------------------------------------------------------
# bench_kernels --quick calls every kernel a few times, at small odd shapes, and compares the results.
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/compute-sanitizer/compute-sanitizer 2>/dev/null)
sanitize() { # sanitize TOOL
    local filter=
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
for tool in memcheck racecheck synccheck; do
    if [ -n "$sanitizer" ]; then step 60 $tool bash -c "sanitize $tool"
    else note skip 0 $tool "compute-sanitizer is not installed"; fi
done

# ---- NCCL -----------------------------------------------------------------------------------------
if [ -x "$bin/gpu_nccl" ]; then
    step 40 "NCCL, one rank" "$bin/gpu_nccl" one
    step 60 "NCCL, two on one GPU" "$bin/gpu_nccl" two
    step 90 "NCCL, one of two killed" "$bin/gpu_nccl" kill
else note skip 0 "NCCL" "nccl.h is not installed"; fi

# ---- Benchmarks -----------------------------------------------------------------------------------
reserve=0
version() { "$@" 2>/dev/null | head -n 1 | tr -d '"\\'; }
rm -f "$logs/results.jsonl"
nvcc_version=$("${NVCC:-nvcc}" --version | sed -n 's/.*release .*V//p')
nccl_version=$(echo '#include <nccl.h>
dtrain NCCL_MAJOR.NCCL_MINOR.NCCL_PATCH' | "${NVCC:-nvcc}" -E -x cu - 2>/dev/null | sed -n 's/^dtrain //p' | tr -d ' ')
{
    printf '{"bench": "machine", "gpu": "%s", "driver": "%s", ' "$name" "$(echo "$gpu" | cut -d, -f2 | tr -d ' ')"
    printf '"memory": "%s", "cores": %d, ' "$(echo "$gpu" | cut -d, -f3 | sed 's/^ //')" "$(nproc)"
    printf '"nvcc": "%s", "nccl": "%s", ' "$nvcc_version" "$nccl_version"
    printf '"torch": "%s", ' "$(version python3 -c 'import torch; print(torch.__version__)')"
    printf '"date": "%s", "commit": "%s"}\n' "$(date -u +%Y-%m-%dT%H:%MZ)" \
        "${COMMIT:-$(version git describe --always --dirty)}"
} >"$logs/machine.json"
step 150 "bench_kernels" "$bin/bench_kernels" --log "$logs/results.jsonl"
step 200 "bench_train gpt2" "$bin/bench_train" --device cuda --model gpt2 --precision bf16 --steps 22 --rounds 2 \
    --program "$bin/train_gpt" --log "$logs/results.jsonl"

# One rank shards nothing, so a single GPU is shared by two: memory and bytes are a strategy's own figures,
# while tokens/s is what time slices and copies through host memory leave of it.
gpus=$(nvidia-smi -L | grep -c ^GPU)
ranks=$((gpus > 1 ? gpus : 2))
bench_strategies() {
    "$build/bench/bench_strategies" --program "$bin/train_gpt" --flags "--device cuda" --ranks "$ranks" \
        --steps 8 --json >"$logs/strategies.jsonl"
    local status=$?
    echo "$(grep -c '"correct": true' "$logs/strategies.jsonl") of $(wc -l <"$logs/strategies.jsonl") runs are right"
    return $status
}
export -f bench_strategies
export build ranks
if make BUILD="$build" "$build/bench/bench_strategies" >"$logs/build-bench_strategies.log" 2>&1; then
    step 80 "bench_strategies" bash -c bench_strategies
    if [ -s "$logs/strategies.jsonl" ]; then
        [ "$gpus" -gt 1 ] || echo '{"bench": "note", "text": "strategies: two ranks share this GPU;' \
            'memory and bytes hold, tokens per second says nothing about GPUs of their own"}' >>"$logs/results.jsonl"
        cat "$logs/strategies.jsonl" >>"$logs/results.jsonl"
    fi
else note FAIL 0 "bench_strategies" "not built; $logs/build-bench_strategies.log"; fi

if [ -s "$logs/results.jsonl" ]; then
    # what NCCL and the recovery took belongs to the results too
    recovery=$(awk '/^killed: / { print "{\"bench\": \"recovery\", \"known_s\": " $4 ", \"recovered_s\": " $12 "}" }' \
        "$logs"/NCCL--one-of*.log 2>/dev/null)
    { cat "$logs/machine.json"; [ -z "$recovery" ] || echo "$recovery"; cat "$logs/results.jsonl"; } >"$results"
    for log in bench_kernels bench_train-gpt2; do echo; cat "$logs/$log.log"; done
    echo; echo "results: $results"
fi

echo
echo "$name, driver $(echo "$gpu" | cut -d, -f2 | tr -d ' '), $SECONDS s; logs in $logs/"
printf '%s\n' "${summary[@]}"
echo
if [ "$skipped" -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"
else echo "$passed passed, $failed failed"; fi
[ "$failed" -eq 0 ]
