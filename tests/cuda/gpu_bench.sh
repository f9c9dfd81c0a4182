#!/usr/bin/env bash
# make gpu-bench: how fast is it on a real NVIDIA GPU? At most nine minutes on one GPU and 16 cores. Training first, beside
# PyTorch in two modes where python3 has it, then the kernels; every figure is printed when it is there. The results are
# $OUT/gpu-bench.tgz's GPU.jsonl: a line about the machine, then one line a result; bench/results/ keeps those that are
# published. Ends as gpu_check.sh does.
cd "$(dirname "$0")/../.." || exit 1
suite=gpu-bench
. tests/cuda/gpu_steps.sh
results=$logs/$(echo "$gpu" | tr 'A-Z ' 'a-z-' | tr -cd 'a-z0-9-').jsonl
cp "$logs/machine.jsonl" "$results"
model="--model gpt2 --precision bf16 --steps 22"

# What torch.compile makes for the same shapes is made while nvcc works, and is there for the runs that count.
export TORCHINDUCTOR_CACHE_DIR=$PWD/$build/gpu/inductor
case $build in /*) TORCHINDUCTOR_CACHE_DIR=$build/gpu/inductor ;; esac
build_and_warm() {
    THREADS=1 BATCH=32 SEQ=1024 LAYERS=12 HEADS=12 CHANNELS=768 VOCAB=50257 STEPS=3 DEVICE=cuda PRECISION=bf16 \
        timeout 150 sh -c 'python3 bench/torch_peer.py; python3 bench/torch_peer.py max-autotune-no-cudagraphs' >"$logs/warm.log" 2>&1 &
    build "$bin/train_gpt" "$bin/resnet_cifar" "$bin/bench_train" "$bin/bench_kernels" "$build/bench/bench_strategies"
    local status=$?
    wait
    return $status
}
export -f build_and_warm
step 170 "build" build_and_warm || exit 1

# show LIMIT NAME COMMAND...: a step whose log is printed while it grows
show() {
    local log follower
    log=$logs/$(echo "$2" | tr ' /' '--' | tr -d ,).log
    : >"$log"
    tail -n +1 -f "$log" &
    follower=$!
    step "$@"
    sleep 0.2
    kill $follower
    wait $follower 2>/dev/null
}
show 200 "bench_train gpt2" "$bin/bench_train" --device cuda $model --rounds 1 --program "$bin/train_gpt" --log "$results"
images() {
    set -o pipefail
    "$bin/resnet_cifar" --device cuda --ranks 1 --precision bf16 --steps 60 | tee "$logs/images" && grep '^  images/s ' "$logs/images"
}
export -f images
step 20 "resnet_cifar, bf16" images
show 80 "bench_kernels" "$bin/bench_kernels" --sizes 64M --reps 5 --log "$results"

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
export ranks
step 60 "bench_strategies" bench_strategies
[ "$gpus" -gt 1 ] || echo '{"bench": "note", "text": "strategies: two ranks share this GPU; memory and bytes hold,' \
    'tokens per second says nothing about GPUs of their own"}' >>"$results"
cat "$logs/strategies.jsonl" >>"$results"
[ $failed -eq 0 ]
