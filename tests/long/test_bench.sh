#!/bin/sh
# The benchmarks run, check their own results and print what they say they print; no timing is judged.
# Every program makes its table and its JSON lines in one run, so that one line can be compared with the other.
# Those of GPUs run on the emulated device, where it was built.
. tests/support/shell.sh
log=$tmp/log.jsonl
verdict() { # verdict STATUS NAME TEXT: a failure says TEXT, too
    [ "$1" -eq 0 ] || echo "       $3"
    result "$2" "$1" "$tmp/out"
}
# check NAME PATTERN LINE COMMAND...: it ends well; a line of its table matches PATTERN and a JSON line matches LINE; every JSON
# line is an object that is not wrong, at least one was checked, and there is one for each row of the table.
check() {
    name=$1 pattern=$2 line=$3; shift 3
    rm -f "$log"
    timeout 300 "$@" --log "$log" >"$tmp/out" 2>&1
    verdict $? "$name" "$*"
    grep -q -E -- "$pattern" "$tmp/out"; verdict $? "$name, table" "no line matches $pattern"
    grep -q -E -- "$line" "$log"; verdict $? "$name, JSON" "no line matches $line"
    awk '!/^\{"bench": "[a-z_]+", .*, "correct": (true|null)\}$/ { bad = 1 } /"correct": true/ { right = 1 }
         END { exit bad || !right }' "$log"
    verdict $? "$name, lines" "$(grep -v '"correct": \(true\|null\)}$' "$log" | head -n 1)"
    rows=$(grep -c -E ' (yes|NO|-) *$' "$tmp/out") lines=$(wc -l <"$log")
    [ "$rows" -eq "$lines" ]; verdict $? "$name, rows" "$rows rows, $lines JSON lines"
}
refuse() { # refuse NAME PATTERN COMMAND...: exit code 2 and a sentence that matches
    name=$1 pattern=$2; shift 2
    "$@" >"$tmp/out" 2>&1
    [ $? -eq 2 ] && grep -q -E -- "$pattern" "$tmp/out"; verdict $? "$name" "$*"
}
bench=$build/bench
trainer="--program $build/train_gpt"
small="--layers 1 --channels 32 --seq 16 --batch 2"
check "bench_gemm" "^NT 64 x 64 x 64 .* yes" '"shape": "NT 768 x 384 x 128".*"GFLOP/s_max"' "$bench/bench_gemm" --quick
check "bench_conv" "^16 to 16 +weight .* yes" '"layer": "depthwise 64".*"of_gemm": [0-9]' "$bench/bench_conv" --quick
check "bench_data" "^128 images, bytes +2 workers .* yes" '"batch": "8 x 64 tokens", "reader": "read".*"exposed_us": [0-9]' "$bench/bench_data" --quick
check "bench_metrics" "^all .* yes" '"writer": "TensorBoard".*"of_step_%": -?[0-9]' "$bench/bench_metrics" --quick $trainer --directory "$tmp"
check "bench_resnet" "^dtrain, bf16 .* yes" '"configuration": "dtrain, fp32".*"floor": [0-9]' "$bench/bench_resnet" --quick \
    --program "$build/resnet_cifar"
check "bench_collectives" "^all-reduce +1048576 +private .* yes" '"operation": "barrier"' "$bench/bench_collectives" --quick
check "bench_collectives, one element a rank" "^all-reduce +8 +comm .* yes" '"operation": "broadcast"' "$bench/bench_collectives" --quick --sizes 8
check "bench_checkpoint" "^ +2 +23.7 .* yes" '"ranks": 1, .*"of_dd' "$bench/bench_checkpoint" --quick --directory "$tmp"
check "bench_links" "4 nodes, 2 Gb/s" '"nodes": 3, .*"emulated_ms": [0-9]' "$bench/bench_links" --quick --nodes 3,4
check "bench_sparse" "^topk .* velocity .* yes" '"kernel": "scatter_add".*"of_floor": [0-9]' "$bench/bench_sparse" --quick
check "bench_kernels" "^attention_backward .* yes" '"kernel": "topk"' "$bench/bench_kernels" --quick
check "bench_train" "^1 rank x 1 thread .* yes" '"of": "1 rank x [0-9]+ threads? over echo' "$bench/bench_train" $trainer --quick \
    --peer 'echo=echo tokens_per_second ${CHANNELS}000'
! "$bench/bench_train" $trainer --quick --peer 'none=echo no memory; false' >"$tmp/out" 2>&1 && grep -q '^round 1 of 1: 1 rank x 1 thread: [0-9]' "$tmp/out" &&
    grep -q '^no memory' "$tmp/out" && grep -q '^1 rank x 1 thread .* yes' "$tmp/out"
verdict $? "bench_train tells each run, and a rival that fails leaves the others" "$(tail -n 1 "$tmp/out")"
check "bench_strategies" "ranks: bf16 gives" '"strategy": "HYBRID_SHARD, 2"' "$bench/bench_strategies" $trainer --quick \
    --flags "--layers 2 --batch 1" --svg "$tmp/strategies"
for picture in memory scaling; do
    grep -q "^</svg>" "$tmp/strategies-$picture.svg"; verdict $? "bench_strategies draws $picture" "$tmp/strategies-$picture.svg"
done
[ "$(grep -c '<title>optimizer state: ' "$tmp/strategies-memory.svg")" -eq 5 ] && [ "$(grep -c '<polyline' "$tmp/strategies-scaling.svg")" -eq 7 ]
verdict $? "bench_strategies draws a bar and a curve for each strategy" "$(tail -n 1 "$tmp/strategies-scaling.svg")"
# A rival stands beside what is counted of both; what only dtrain's runs know is drawn without it.
cat >"$tmp/rival" <<'END'
#!/bin/sh
case "$*" in *--probe*) echo "torch 2.0 ddp fsdp2" ;; *) printf 'parameters 1e6\nsamples_per_second 10\nstep_ms 9\nsent_mib 1\nparams_mib 3\ngrads_mib 3\noptimizer_mib 6\nheld_mib 99\npeak_mib 99\nloss 5\n' ;; esac
END
chmod +x "$tmp/rival"
"$bench/bench_strategies" $trainer --quick --ranks 2 --steps 4 --flags "--layers 1 --batch 1" --python "$tmp/rival" --svg "$tmp/beside" >"$tmp/out" 2>&1 &&
    [ "$(grep -c '<title>optimizer state: ' "$tmp/beside-memory.svg") $(grep -c '<title>activations: ' "$tmp/beside-memory.svg")" = "12 5" ] &&
    [ "$(grep -c -E 'samples a rank: (between steps|in a step)' "$tmp/beside-memory.svg")" -eq 2 ]
verdict $? "bench_strategies draws PyTorch beside what is counted of both" "$(grep -c '<title>' "$tmp/beside-memory.svg") pieces"
check "bench_strategies, ResNet-20" "^resnet20 .* FULL_SHARD .* yes" '"model": "resnet20", "ranks": 2, .*"strategy": "ZERO3"' \
    "$bench/bench_strategies" --images "$build/resnet_cifar" --quick --models resnet20 --ranks 2 --batch 8
if "${PYTHON:-python3}" bench/torch_strategies.py --probe >/dev/null 2>&1; then
    check "bench_strategies, PyTorch" "PyTorch DDP .* -$" '"strategy": "PyTorch DDP".*"sent": [0-9].*"correct": null' \
        "$bench/bench_strategies" $trainer --quick --python "${PYTHON:-python3}" --ranks 2 --flags "--layers 1 --batch 1"
else skip "bench_strategies, PyTorch" "torch is not installed"; fi
"$bench/bench_strategies" $trainer --quick --python "$tmp/none" --ranks 2 --steps 4 --flags "--layers 1 --batch 1" >"$tmp/out" 2>&1
grep -q "^no rows of PyTorch: .*not found" "$tmp/out"; verdict $? "bench_strategies says that there is no PyTorch" "no line says so"
check "bench_scaling" "^ +12 +full_shard .* same +yes +yes" '"strategy": "full_shard", "ranks": 2' "$bench/bench_scaling" $trainer --quick \
    --flags "$small"
check "bench_forecast" "^resnet20 +full_shard +2 .* yes" '"model": "tiny", "strategy": "ddp".*"ratio": [0-9]' "$bench/bench_forecast" $trainer --quick \
    --images "$build/resnet_cifar"
check "bench_pipeline" "^tiny +2 +zb_h1 .* yes" '"how": "1f1b".*"of_ddp": [0-9]' "$bench/bench_pipeline" $trainer --quick
check "bench_comm" "top-k 0.1 % .* yes" '"method": "hierarchical, top-k 1 %".*"staged_bytes": 0, "correct": true' \
    "$bench/bench_comm" $trainer --quick --shrink 2 --svg "$tmp/comm.svg"
grep -q "^</svg>" "$tmp/comm.svg" && [ "$(grep -c '<polyline' "$tmp/comm.svg")" -eq 3 ]
verdict $? "bench_comm draws three curves" "$(tail -n 1 "$tmp/comm.svg")"
if [ -x "$build/emu/bench_kernels" ]; then
    check "bench_kernels, emulated GPU" "^attention_backward .* yes" '"kernel": "topk"' "$build/emu/bench_kernels" --quick
    for precision in fp32 bf16; do
        check "bench_train, emulated GPU, $precision" "^1 GPU, $precision .* yes" "\"precision\": \"$precision\"" \
            "$build/emu/bench_train" --quick --device cuda --program "$build/emu/train_gpt" --heads 2 --seq 16 --batch 2 \
            --steps 20 --precision $precision --flags "--lr 1e-2"
    done
else skip "GPU benchmarks" "no emulated GPU"; fi
for program in gemm conv resnet collectives links checkpoint sparse kernels train strategies scaling comm forecast pipeline; do
    refuse "bench_$program refuses an unknown flag" 'unknown flag "--fast"' "$bench/bench_$program" --quick --fast
done
refuse "llmc.sh without llm.c" 'is no checkout of llm.c' sh bench/llmc.sh "$tmp"
refuse "record.sh refuses what it does not know" '"gem" is none of' sh bench/record.sh --out "$tmp" gem
refuse "a wrong list of sizes" 'it takes at most' "$bench/bench_collectives" --sizes 4K,x
refuse "a size below one element a rank" 'from 16 to' "$bench/bench_collectives" --sizes 8 --ranks 2,4
refuse "a log that cannot be written" 'cannot be written' "$bench/bench_gemm" --quick --log "$tmp/none/log"
"$bench/bench_gemm" --quick --json 2>/dev/null | grep -v '^{"bench": "gemm' >"$tmp/out"
[ ! -s "$tmp/out" ]; verdict $? "--json prints nothing but objects" "others, too"
# A record has the machine, the commit and each command, and the results behind it.
BUILD=$build sh bench/record.sh --quick --machine here --out "$tmp/here" gemm sparse >"$tmp/out" 2>&1
verdict $? "record.sh --quick" "exit code"
head -n 1 "$tmp/here/gemm.jsonl" | grep -q '^{"bench": "machine", "machine": "here", "cpu": "..*"commit": "..*"compiler": "..*}$' &&
    [ "$(grep -c '^{"bench": "command"' "$tmp/here/gemm.jsonl")" -eq 3 ] && grep -q '^{"bench": "sparse"' "$tmp/here/sparse.jsonl" &&
    grep -q "^\$ $bench/bench_gemm --quick" "$tmp/here/gemm.txt" && grep -q "^NT 64 x 64 x 64 .* yes" "$tmp/here/gemm.txt"
verdict $? "record.sh writes tables and JSON lines" "see $tmp/here"
sh bench/check_figures.sh >"$tmp/out"; verdict $? "figures of bench/README.md are recorded" "bench/check_figures.sh"
sed 's/| 0.99 |/| 0.98765 |/' bench/README.md >"$tmp/README.md" && ln -s "$PWD/bench/results" "$tmp/results" &&
    ! sh bench/check_figures.sh "$tmp/README.md" >"$tmp/out" && grep -q '0.98765 is not in' "$tmp/out"
verdict $? "a figure that is not recorded is found" "bench/check_figures.sh"
finish
