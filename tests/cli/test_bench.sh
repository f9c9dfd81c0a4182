#!/bin/sh
# The benchmarks run, check their own results and print what they say they print; no timing is judged.
# Those of GPUs run on the emulated device, where it was built.
. tests/support/shell.sh
good "bench_gemm" "geometric mean" "$build/bench/bench_gemm" --quick
good "bench_gemm --json" '^\{.*"gflops"' "$build/bench/bench_gemm" --quick --json
small="--ranks 2 --sizes 4K,1M --rounds 1 --reps 2 --seconds 0.002"
good "bench_collectives" "all-reduce" "$build/bench/bench_collectives" $small
good "bench_collectives --json" '^\{.*"busbw' "$build/bench/bench_collectives" $small --json
tiny="--program $build/train_gpt --model tiny --layers 1 --channels 32 --batch 4 --steps 60 --rounds 1"
good "bench_train" "tokens/s" "$build/bench/bench_train" $tiny
good "bench_train --json" '^\{.*"tokens_per_second"' "$build/bench/bench_train" $tiny --json
few="--program $build/train_gpt --models tiny --ranks 2,4 --steps 5"
good "bench_strategies" "ranks: bf16 gives" "$build/bench/bench_strategies" $few --flags "--layers 2 --batch 1"
good "bench_strategies --json" '^\{.*"HYBRID_SHARD, 2".*"correct": true' "$build/bench/bench_strategies" $few --json
small="--program $build/train_gpt --model tiny --nodes 2 --gbps 10,100 --latency 5 --reps 1 --steps 12 --rounds 1 --train-models tiny"
trainer="--layers 1 --channels 32 --seq 16 --batch 2"
good "bench_comm" "target: no collective copies .* met" "$build/bench/bench_comm" $small --parts copies,links,overlap --svg "$build/bench/comm.svg"
good "bench_comm draws" "</svg>" cat "$build/bench/comm.svg"
good "bench_comm --json" '^\{.*"hierarchical, top-k 1 %".*"staged_bytes": 0, "correct": true' "$build/bench/bench_comm" $small --parts links --node-ranks 2 --shrink 2 --json
good "bench_comm, training" '^PowerSGD, rank 4 .* %' "$build/bench/bench_comm" $small --parts train,loss --flags "$trainer"
few="--program $build/train_gpt --model tiny --ranks 1,2 --batch-sizes 2 --steps 5 --rounds 1 --many 12"
good "bench_scaling" "12 +full_shard .* same +yes" "$build/bench/bench_scaling" $few --flags "$trainer"
good "bench_scaling --json" '^\{.*"full_shard".*"ranks": 2.*"correct": true' "$build/bench/bench_scaling" $few --flags "$trainer" --json
good "bench_links" "4 nodes, 2 Gb/s" "$build/bench/bench_links" --quick --nodes 2,4 --gbit 2 --sizes 1 --reps 2
good "bench_links --json" '^\{.*"emulated_s": 0' "$build/bench/bench_links" --quick --json --nodes 3 --gbit 2 --sizes 1 --reps 2
good "bench_kernels" "attention_backward .* yes" "$build/bench/bench_kernels" --quick
good "bench_sparse" "topk .* velocity .* yes" "$build/bench/bench_sparse" --quick
good "bench_sparse --json" '^\{.*"kernel": "orthogonalize".*"correct": true' "$build/bench/bench_sparse" --quick --json
if [ -x "$build/emu/bench_kernels" ]; then
    good "bench_kernels, emulated GPU" "attention_backward .* yes" "$build/emu/bench_kernels" --quick
    good "bench_kernels, emulated GPU, --json" '^\{.*"kernel": "topk".*"correct": true' "$build/emu/bench_kernels" --quick --json
    tiny="--device cuda --program $build/emu/train_gpt --model tiny --layers 1 --heads 2 --channels 32 --seq 16 --batch 2 --steps 20 --rounds 1 --gemm 64"
    for precision in fp32 bf16; do
        good "bench_train, emulated GPU, $precision" "1 GPU, $precision .* yes" "$build/emu/bench_train" $tiny --precision $precision --flags "--lr 1e-2"
    done
else skip "GPU benchmarks" "no emulated GPU"; fi
finish
