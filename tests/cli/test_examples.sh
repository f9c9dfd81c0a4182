#!/bin/sh
# Every example as a user runs it, and train_gpt's answers to bad input: one clear sentence, a
# non-zero exit, nothing left behind. DTRAIN_TEST_FULL=1 adds what takes long.
. tests/support/shell.sh
full=${DTRAIN_TEST_FULL:-0}
bad_lines=1 # each fact once, by whoever says it
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1}

# A text that no commit changes: what a model has learned of it after some steps can be compared with a number.
sums() { awk 'BEGIN { for (i = 0; i < 6000; i++) { a = i * 7919 % 97; b = i * 104729 % 89
    printf "%d plus %d is %d, and %d times %d is %d.\n", a, b, a + b, a, b, a * b } }'; }
sums >"$tmp/sums.txt"
gpt="$build/train_gpt --data $tmp/sums.txt --layers 1 --heads 2 --channels 16 --seq 16 --batch 2 --steps 12 --warmup 2 --eval-batches 2 --sample 0"

good "ddp, 2 ranks" "learned +\+1.00 -2.00 \+0.50" "$build/ddp"
good "ddp, 5 ranks" "learned +\+1.00 -2.00 \+0.50" "$build/ddp" 5
bad "ddp, ranks that are no number" "usage: ddp" "$build/ddp" two
good "bf16_arrays, 2 ranks" "^weight 0\.(29|30)[0-9]+ in bf16, 0\.[0-9]+ in its master copy" "$build/bf16_arrays"
good "bf16_arrays, 5 ranks" "^weight 0\.(29|30)[0-9]+ in bf16, 0\.[0-9]+ in its master copy" "$build/bf16_arrays" 5
good "sign_sgd, 2 ranks" "^bytes sent a step +8332 +400" "$build/sign_sgd"
bad "sign_sgd, ranks that are no number" "usage: sign_sgd" "$build/sign_sgd" two
for ranks in 1 3 5; do
    good "uneven, $ranks ranks: the steps of one process" "^ranks        w = [23]\.[0-9]*, b = 1\.0[0-9]*$" "$build/uneven" $ranks "$tmp/uneven.json"
done
grep -q '"one batch"' "$tmp/uneven.rank4.json"
result "uneven: a span of its own is in the trace" $?
bad "uneven, ranks that are no number" "usage: uneven" "$build/uneven" two
good "monitoring" "^300 steps, loss 0\.0[56][0-9]+, perplexity 1\.0[56][0-9]+$" "$build/monitoring" "$tmp/example.prom" "$tmp/board"
grep -q '^dtrain_perplexity{run="monitoring"} 1\.0[56]' "$tmp/example.prom" && grep -q '^dtrain_finished{run="monitoring"} 1$' "$tmp/example.prom"
result "monitoring: a figure that the program adds is in the file for Prometheus" $? "$tmp/example.prom"
grep -q -a perplexity "$tmp"/board/events.out.tfevents.*
result "monitoring: and in the events for TensorBoard" $? "$tmp/out"
bad "monitoring, a file that node_exporter does not read" "does not end in .prom" "$build/monitoring" "$tmp/example.txt" "$tmp/board"
good "own_figure" "^step 300: loss 0\.05[0-9]+, perplexity 1\.0[56][0-9]$" "$build/own_figure" "$tmp/own_figure.jsonl" "$tmp/own_figure"
[ "$(grep -c '^{"step": .*, "perplexity": [12][0-9.]*}$' "$tmp/own_figure.jsonl")" -eq 300 ] && grep -q -a 'added/perplexity' "$tmp/own_figure"/events*
result "own_figure: the figure is in JSON and in TensorBoard" $? "$tmp/own_figure.jsonl"
# Settings of one model and one loop (examples/layers.h): each program fails by itself where what it shows is not so.
good "hybrid_shard, two nodes" "^hybrid_shard +256\.0 +960\.1 +256\.0  0\.86" "$build/hybrid_shard"
good "hybrid_shard, four nodes" "^hybrid_shard +256\.0 +1088\.1 +384\.1  0\.83" "$build/hybrid_shard" 8
bad "hybrid_shard, ranks that are no number" "usage: hybrid_shard" "$build/hybrid_shard" two
good "auto_strategy" "^ +512  full_shard +64 +64 +256 +128  0\.83" "$build/auto_strategy"
for ranks in 1 2 3 4; do
    good "zero3_owners, $ranks ranks" "are equal, bit for bit" "$build/zero3_owners" $ranks
    [ "$(grep -o ' w[1-8]' "$tmp/out" | sort | uniq -c | tr -d ' \n')" = 1w11w21w31w41w51w61w71w8 ]
    result "zero3_owners, $ranks ranks: every matrix has one owner" $? "$tmp/out"
done
bad "zero3_owners, ranks that are no number" "usage: zero3_owners" "$build/zero3_owners" two
good "offload, a plan" "^and parameters +0\.0 +0\.0 +0\.0 +256\.0 +544\.0  -$" "$build/offload" 4
if [ -x "$build/emu/offload" ]; then
    good "offload, on a GPU that is emulated" "^and parameters +0\.0 +0\.0 +0\.0 +256\.0 +1088\.0  0\.9" "$build/emu/offload" --device cuda
else skip "offload, on a GPU that is emulated" "it needs a C++ compiler: make $build/emu/offload"; fi
bad "offload, ranks that are no number" "usage: offload" "$build/offload" two
for ranks in 1 2 4; do
    good "topk, $ranks ranks" "^ 330 " "$build/topk" $ranks
done
bad "topk, ranks that are no number" "usage: topk" "$build/topk" two
case $build in /*) program=$build/timeline ;; *) program=$PWD/$build/timeline ;; esac
good "timeline" "^run.rank1.json  draw samples 20  my backward 20  my update 20  all-reduce of bucket 0 20$" sh -c "cd $tmp && $program"
good "over_mpi without MPI: the bits of one process" "^every weight has the bits of one process$" "$build/over_mpi"
if [ -e "$build/tests/nvml_stub.so" ]; then
    case $build in /*) stub=$build ;; *) stub=$PWD/$build ;; esac
    good "train_gpt, figures of GPUs" "over 12 steps" env DTRAIN_NVML="$stub/tests/nvml_stub.so" $gpt --ranks 2 --log "$tmp/gpus.log" --prometheus "$tmp/gpus.prom"
    [ "$(grep -c '^{"step": .*"gpu_temperature_celsius": 61,.*"gpu_ecc_errors": 7}' "$tmp/gpus.log")" -eq 12 ]
    result "train_gpt: each step has them" $? "$tmp/gpus.log"
    grep -q '^dtrain_rank_gpu_power_watts{run="train_gpt",rank="1"} 351.5$' "$tmp/gpus.prom"
    result "train_gpt: each rank's share is in the file for Prometheus" $? "$tmp/gpus.prom"
else skip "train_gpt, figures of GPUs" "nvml_stub.so is not built: make $build/tests/test_nvml" 3; fi
good "power_sgd, 2 ranks" "^bytes sent a step +8200 +776" "$build/power_sgd"
good "power_sgd, 3 ranks, factors that say everything" "^bytes sent a step +10932 +16392" "$build/power_sgd" 3 32
[ "$(awk '/^step/ && $4 == $5 { n++ } END { print n + 0 }' "$tmp/out")" -eq 4 ]
result "power_sgd: then the losses are those of whole gradients" $? "$tmp/out"
bad "power_sgd, ranks that are no number" "usage: power_sgd" "$build/power_sgd" two
[ "$full" = 0 ] || good "sign_sgd, 5 ranks" "^step 200 loss +0\.0000[0-9]+ +0\.0[0-9]+" "$build/sign_sgd" 5
# tensor_parallel: however many ranks share the block, its losses are those of one.
for ranks in 1 2 3 4; do
    good "tensor_parallel, $ranks ranks" "^step 200 loss 0\.1[0-9]+$" "$build/tensor_parallel" $ranks
    grep "^step" "$tmp/out" >"$tmp/losses$ranks"
    cmp -s "$tmp/losses1" "$tmp/losses$ranks"
    result "tensor_parallel, $ranks ranks: the losses of one" $? "$tmp/losses$ranks"
done
# pipeline: the drawing that its comment has, and one loss for all ranks and kinds.
good "pipeline, 2 ranks, ZB-H1" "^rank 1   \.  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3$" "$build/pipeline"
grep "^step" "$tmp/out" >"$tmp/losses"
for layout in "1 0" "2 1" "3 2" "4 3" "8 2"; do
    good "pipeline, ranks and kind $layout" "^step 200 loss 0\.0[0-9]+$" "$build/pipeline" $layout
    grep "^step" "$tmp/out" | cmp -s - "$tmp/losses"
    result "pipeline, ranks and kind $layout: the same losses" $? "$tmp/out"
done
bad "pipeline, an unknown kind" "kind 9 of a pipeline" "$build/pipeline" 2 9
bad "pipeline, ranks that are no number" "usage: pipeline" "$build/pipeline" two
bad "tensor_parallel, a rank without a head" "usage: tensor_parallel" "$build/tensor_parallel" 5
for ranks in 1 2 3; do
    good "full_shard, $ranks ranks" "500 losses and the parameters are equal, bit for bit" "$build/full_shard" $ranks
done
good "nccl without CUDA, 3 ranks" "all ranks ended with the same parameters" "$build/nccl" 3
grep -q "built without DTRAIN_USE_CUDA" "$tmp/out"
result "nccl without CUDA says so" $? "$tmp/out"

# What docs/zero-by-hand.md computes: 24 KiB of weights, four ranks, two slots for the largest layer.
good "zero_by_hand" "^full_shard +6.0 +6.0 +12.0 +64.0 +39.0 " "$build/zero_by_hand"
sed -n 's/^[a-z_0-9]*  *\([0-9. ]*\)  0\.[0-9]*$/\1/p' "$tmp/out" | tr -s ' ' >"$tmp/kept"
printf '%s\n' "24.0 24.0 48.0 0.0 36.0" "24.0 24.0 12.0 0.0 36.0" "24.0 6.0 12.0 32.0 36.0" "6.0 6.0 12.0 64.0 39.0" "16.0 16.0 32.0 64.0 39.0" |
    cmp -s - "$tmp/kept" && [ "$(awk 'NR > 2 { print $7 }' "$tmp/out" | sort -u | wc -l)" -eq 1 ]
result "zero_by_hand, as computed by hand, and one loss" $? "$tmp/out"
# gpt: the same sample whatever the strategy; other ranks and precisions run; bad values are sentences.
tiny="$build/gpt --data dtrain.h --batch 2 --steps 8"
drawn() { "$@" 2>&1 | sed '1,/a sample:/d'; }
drawn $tiny --ranks 3 >"$tmp/base"
for strategy in full_shard $([ "$full" = 0 ] || echo zero1 shard_grad_op zero3); do
    drawn $tiny --ranks 3 --strategy $strategy >"$tmp/other"
    [ -s "$tmp/base" ] && cmp -s "$tmp/base" "$tmp/other"
    result "gpt, same sample: --strategy $strategy" $? "$tmp/other"
done
good "gpt, one rank, bf16" "held-out loss [0-9.]+, [0-9]+ tokens/s" $tiny --ranks 1 --precision bf16
good "gpt, fp16" "held-out loss [0-9.]+, [0-9]+ tokens/s" $tiny --precision fp16 --lr 1e-3
bad "gpt, unknown flag" "the flag \"--layers\" is not one of: --data" $tiny --layers 3
bad "gpt, unknown strategy" "--strategy \"zero9\" is not one of: ddp" $tiny --strategy zero9
bad "gpt, flag without value" "--lr needs a value" $tiny --lr
bad "gpt, steps that are no number" "positive numbers" $tiny --steps many
bad "gpt, missing data" "$tmp/none" $tiny --data "$tmp/none"

# parallel_3d: the losses of one rank, but for the rounding of the last digit, whatever part of the model a rank has.
cubic="$build/parallel_3d --data $tmp/sums.txt --steps 6 --batch 8"
laid_out() { # laid_out RANKS TENSOR PIPELINE PARAMETERS FLAGS...
    name="parallel_3d, $*"
    wanted="^rank 0 has $4 of the 834304 parameters"
    layout="--ranks $1 --tensor $2 --pipeline $3"
    shift 4
    good "$name" "$wanted" $cubic $layout "$@"
    grep "^step" "$tmp/out" >"$tmp/other"
    [ -s "$tmp/3d" ] || cp "$tmp/other" "$tmp/3d"
    paste "$tmp/3d" "$tmp/other" | awk '{ d = $4 - $8; bad += NF != 8 || d * d > 1.1e-6 } END { exit bad || NR != 6 }' # the last digit
    result "$name: the losses of one rank" $? "$tmp/other"
}
laid_out 1 1 1 834304
laid_out 4 2 2 223616
laid_out 4 1 2 437504 --schedule zb_h1
laid_out 4 2 1 422912 --strategy zero1
laid_out 8 2 2 223616
good "parallel_3d, who has what" "^pipeline 1: ranks 4\+5 6\+7" $cubic --steps 1
grep -q "^rank 1   \.  F0 B0 B0 F1 B1 B1" "$tmp/out"
result "parallel_3d draws its schedule" $? "$tmp/out"
bad "parallel_3d, unknown flag" 'the flag "--layers" is not one of: --data' $cubic --layers 3
bad "parallel_3d, no such schedule" '--schedule "sine" is not one of: 1f1b' $cubic --schedule sine
bad "parallel_3d, flag without value" '--chunks needs a value' $cubic --chunks
bad "parallel_3d, steps that are no number" '--steps takes a positive number' $cubic --steps many
bad "parallel_3d, an option without effect" "do nothing with --pipeline 1" $cubic --pipeline 1 --chunks 2
bad "parallel_3d, samples that cannot be divided" "--batch 9 should be" $cubic --batch 9

# mlp on CIFAR-10's format. Class k is bright in the k-th tenth of the image. Each training file has two
# of the classes, so accuracy needs all five; and with every label of the test file one too high, no
# answer can be right that was not learned from it.
good "mlp on spirals" "epoch +60 .* (9[5-9]|100)" "$build/mlp" 2
good "mlp, one rank" "epoch +60 .* (9[5-9]|100)" "$build/mlp" 1
good "mlp in fp16" "epoch +60 .* (9[5-9]|100)" "$build/mlp" 2 --fp16
# cnn: accuracy rises from chance, and one rank learns what two learn together.
if [ "$full" != 0 ]; then
    good "cnn, 2 ranks" "step 600 .* accuracy 9[5-9]" "$build/cnn"
    cp "$tmp/out" "$tmp/cnn2"
    awk '{ if ($7 < last) bad = 1; last = $7 } END { exit bad || NR != 6 }' "$tmp/cnn2"
    result "cnn, a rising accuracy" $? "$tmp/cnn2"
    good "cnn, 1 rank" "step 600 .* accuracy 9[5-9]" "$build/cnn" 1
    paste "$tmp/out" "$tmp/cnn2" | awk '{ d = $4 - $12; if (d < 0) d = -d; if (NR == 1) bad = d > 0.02; if ($7 < last) bad = 1; last = $7 }
        END { exit bad || NR != 6 }'
    result "cnn, the losses of one rank and a rising accuracy" $? "$tmp/out"
fi
bad "cnn, ranks that are no number" "usage: cnn" "$build/cnn" two
good "resume, a rank dies" "2 ranks begin at step 50, started again" "$build/resume" "$tmp/resume"
[ "$(sed -n "s/^2 ranks end.*parameters //p" "$tmp/out" | uniq -c | sed "s/ *\([0-9]*\).*/\1/")" = 2 ]
result "resume, the bits of a run that nobody disturbed" $? "$tmp/out"
good "resume, again" "3 ranks begin at step 150" "$build/resume" "$tmp/resume"
llama="$build/llama --data $tmp/text --steps 20 --seq 16 --batch 2"
head -c 20000 dtrain.h >"$tmp/text"
good "llama, 2 ranks, to a file" "step +20  loss [0-4]\." $llama --export "$tmp/llama"
grep "^step" "$tmp/out" >"$tmp/losses"
good "llama, full_shard, 2 ranks" "step +20  loss" $llama --strategy full_shard
grep "^step" "$tmp/out" | cmp -s - "$tmp/losses"; result "llama, the losses of ddp" $? "$tmp/out"
good "llama, bf16" "step +20  loss [0-4]\." $llama --precision bf16 --ranks 3 --strategy zero3
bad "llama, unknown flag" 'the flag "--layers" is not one of: --data' $llama --layers 3
bad "llama, missing weights" 'none: No such file or directory' $llama --import "$tmp/none"
good "own_operation, 2 ranks" "step 199  loss 0.0[0-9]" "$build/own_operation"
good "operations" "^gradients agree with finite differences to 0\.000[0-9]$" "$build/operations"
bytes() { head -c "$1" /dev/zero | tr '\0' "\\$2"; } # bytes COUNT OCTAL
image() { bytes 1 "$1"; bytes $((307 * $2)) 170; bytes 307 377; bytes $((3072 - 307 * ($2 + 1))) 170; } # image LABEL CLASS
cifar=$tmp/cifar
mkdir "$cifar" "$tmp/shifted"
for class in 0 1 2 3 4 5 6 7; do image $class $class >"$tmp/class$class"; done
image 10 8 >"$tmp/class8"; image 11 9 >"$tmp/class9" # labels are octal
for file in 1 2 3 4 5; do
    for copy in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do
        cat "$tmp/class$((2 * file - 2))" "$tmp/class$((2 * file - 1))"
    done >"$cifar/data_batch_$file.bin"
done
cat "$tmp"/class[0-9] >"$cifar/test_batch.bin"
cp "$cifar"/data_batch_* "$tmp/shifted/"
for class in 0 1 2 3 4 5 6; do image $((class + 1)) $class; done >"$tmp/once"
image 10 7 >>"$tmp/once"; image 11 8 >>"$tmp/once"; image 0 9 >>"$tmp/once"
for copy in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do cat "$tmp/once" "$tmp/once"; done >"$tmp/shifted/test_batch.bin"
for ranks in 1 2 3; do
    good "mlp on CIFAR-10's format, $ranks ranks" "epoch +10 .* test accuracy 100.0 %" "$build/mlp" $ranks "$cifar"
done
good "mlp, the test file is held out" "epoch +10 .* test accuracy   0.0 %" "$build/mlp" "$tmp/shifted"
bad "mlp, a missing folder" "$tmp/none/data_batch_1.bin cannot be opened: No such file" "$build/mlp" "$tmp/none"
bad "mlp, unknown flag" "usage: mlp" "$build/mlp" --epochs 3
bytes 1 7 >>"$tmp/shifted/test_batch.bin"
bad "mlp, a file with a byte too many" "test_batch.bin has 1536501 bytes; as the binary version of CIFAR-10" "$build/mlp" "$tmp/shifted"
cp "$cifar/test_batch.bin" "$tmp/shifted/"
image 12 0 >"$tmp/shifted/data_batch_4.bin"
bad "mlp, a label above 9" "data_batch_4.bin: sample 0 has label 10" "$build/mlp" "$tmp/shifted"
rm "$tmp/shifted/data_batch_3.bin"
bad "mlp, a missing file" "data_batch_3.bin cannot be opened" "$build/mlp" "$tmp/shifted"
# resnet_cifar: losses that do not depend on the strategy; two ranks that normalise together are one with their batch.
resnet="$build/resnet_cifar --threads 1 --data $cifar"
first_loss() { sed -n '2s/.*"loss": \([^,]*\),.*/\1/p' "$tmp/resnet.jsonl"; }
good "resnet_cifar, one rank" "1       2 .* %" $resnet --ranks 1 --batch 8 --steps 2 --log "$tmp/resnet.jsonl"
one=$(first_loss)
good "resnet_cifar, two ranks, together" "1       2 .* %" $resnet --ranks 2 --batch 4 --steps 2 --sync-batchnorm --log "$tmp/resnet.jsonl"
awk -v a="$one" -v b="$(first_loss)" 'BEGIN { d = a - b; exit !(a > 1 && d < 1e-4 && d > -1e-4) }'
result "resnet_cifar, their loss is that of one rank" $? "$tmp/resnet.jsonl"
good "resnet_cifar, bf16" "1       2 .* %" $resnet --ranks 2 --batch 4 --steps 2 --precision bf16 --strategy zero1
$resnet --batch 4 --steps 3 2>&1 | awk '/%/ { print $4, $5 }' >"$tmp/base"
$resnet --batch 4 --steps 3 --strategy full_shard 2>&1 | awk '/%/ { print $4, $5 }' >"$tmp/other"
[ -s "$tmp/base" ] && cmp -s "$tmp/base" "$tmp/other"
result "resnet_cifar, full_shard has the losses of ddp" $? "$tmp/other"
bad "resnet_cifar, a file that is cut off" "data_batch_2.bin has 100 bytes; as the binary version of CIFAR-10" \
    sh -c "mkdir $tmp/cut; cp $cifar/* $tmp/cut; head -c 100 $cifar/data_batch_2.bin >$tmp/cut/data_batch_2.bin; $build/resnet_cifar --data $tmp/cut"
bad "resnet_cifar, unknown strategy" "strategy is \"zero9\"; it takes one of: ddp" $resnet --strategy zero9
bad "resnet_cifar, too large a batch" "with drop_last nothing is left" $resnet --ranks 2 --batch 400
# Images that are drawn: their mirror images are of the same class, so that accuracy is not held below 60 %.
[ "$full" = 0 ] || good "resnet_cifar, drawn images" "^ +1 +187 .* (9[0-9]|100)\.[0-9] %" "$build/resnet_cifar" --ranks 2 --epochs 1 --batch 16
good "train_gpt --help" "--weight-decay" "$build/train_gpt" --help
good "train_gpt, sample" "a sample" $gpt --sample 20

# trains NAME LOSS WITHIN COMMAND...: ends with this validation loss: a number measured once, or that of another run. A
# guess has ln 256 = 5.545.
validation() { sed -n 's/^ *validation loss *\([0-9.]*\).*/\1/p' "$1"; }
trains() {
    name=$1 loss=$2 within=$3; shift 3
    timeout 300 "$@" >"$tmp/out" 2>"$tmp/err"
    status=$?
    cat "$tmp/err" >>"$tmp/out"
    [ "$status" -eq 0 ] && awk -v a="$(validation "$tmp/out")" -v b="$loss" -v within="$within" \
        'BEGIN { d = a - b; if (d < 0) d = -d; exit !(a + 0 > 0 && b + 0 > 0 && d <= within) }'
    result "$name (validation loss $(validation "$tmp/out"), expected $loss within $within)" $? "$tmp/out"
}
$gpt >"$tmp/plain" 2>&1
usual=$(validation "$tmp/plain")
trains "train_gpt" 5.167 0.03 $gpt
trains "train_gpt, 3 ranks, accumulation, dropout" "$usual" 0.2 $gpt --ranks 3 --accum 2 --dropout 0.1
trains "train_gpt, rank threads" "$usual" 0.0002 $gpt --thread-ranks --threads 2
$gpt --steps 4 >"$tmp/four" 2>&1
trains "train_gpt, 12 ranks" "$(validation "$tmp/four")" 0.2 $gpt --ranks 12 --steps 4
trains "train_gpt --optimizer sgd" 4.326 0.1 $gpt --optimizer sgd --lr 0.05
for optimizer in lion muon; do
    trains "train_gpt --optimizer $optimizer" "$usual" 0.4 $gpt --optimizer $optimizer
done
trains "train_gpt --optimizer muon, by owners" "$(validation "$tmp/out")" 0 $gpt --optimizer muon --strategy zero3

# The log: a first line that says what ran, keys as documented, valid JSON where a checker exists, and a last line that says so.
trains "train_gpt --log" "$usual" 0.0002 $gpt --log "$tmp/log.jsonl" --eval-every 6
{ [ "$(wc -l <"$tmp/log.jsonl")" -eq 14 ] && tail -n 1 "$tmp/log.jsonl" | grep -q '"final": true' &&
    for key in step wall_time loss grad_norm lr tokens tokens_per_second step_ms comm_ms exposed_comm_ms data_ms comm_bytes; do
        sed -n 2p "$tmp/log.jsonl" | grep -q "\"$key\": " || exit 1; done &&
    head -n 1 "$tmp/log.jsonl" | grep -q '"start": true.*"ranks": 2,.*"run": "train_gpt".*"strategy": "ddp", "config": ".*\\nlayers = 1\\n' &&
    [ "$(grep -c '"val_loss": [0-9]' "$tmp/log.jsonl")" -ge 2 ]; }
result "the log has every key" $? "$tmp/log.jsonl"
if have python3; then
    python3 -c 'import json, sys; [json.loads(l) for l in open(sys.argv[1])]' "$tmp/log.jsonl" 2>"$tmp/err"
    result "the log is JSON" $? "$tmp/err"
else skip "the log is JSON" "no python3"; fi

# Losses do not depend on how often it is run, on overlap, buckets, threads or the kind of rank;
# and hardly on how many ranks share a global batch.
losses() { "$@" --log "$tmp/l.jsonl" >/dev/null 2>&1; grep -v final "$tmp/l.jsonl" | sed -n 's/.*"loss": \([^,]*\),.*/\1/p'; }
if $gpt --steps 4 | grep -q "cblas kernels"; then # bits are the BLAS's own affair
    bad "--deterministic with an external BLAS" "external BLAS" $gpt --deterministic
else
    losses $gpt --deterministic >"$tmp/base"
    for variant in "" "--no-overlap" "--bucket-kib 1" "--threads 3" "--thread-ranks"; do
        losses $gpt --deterministic $variant >"$tmp/other"
        cmp -s "$tmp/base" "$tmp/other" && [ -s "$tmp/base" ]
        result "same bits: ${variant:-a second run}" $? "$tmp/other"
    done
fi

# A strategy changes where things live: losses and parameters to the bit those of ddp. With nodes the
# sums are taken in another order: hybrid_shard only repeats itself, but for one node or nodes of one.
if ! $gpt --steps 4 | grep -q "cblas kernels"; then
    small="$gpt --steps 4 --ranks 4 --sample 3"
    hash_of() { "$@" --deterministic 2>&1 | sed -n 's/.*parameters  *\([0-9a-f]\{16\}\) .*/\1/p'; }
    ddp=$(hash_of $small)
    for strategy in zero1 shard_grad_op full_shard "full_shard --reshard-after-forward 0" zero3 \
                    "hybrid_shard --node-size 4" "hybrid_shard --node-size 1" auto "auto --memory-limit 64"; do
        hash=$(hash_of $small --strategy $strategy)
        echo "$hash, ddp: $ddp" >"$tmp/other"
        [ -n "$ddp" ] && [ "$hash" = "$ddp" ]
        result "same parameters: --strategy $strategy" $? "$tmp/other"
    done
    for flags in "" "--strategy full_shard" "--strategy zero3 --accum 2"; do
        plain=$(hash_of $small --layers 3 --dropout 0.1 $flags)
        hash=$(hash_of $small --layers 3 --dropout 0.1 $flags --activation-checkpointing 2)
        [ -n "$plain" ] && [ "$hash" = "$plain" ]
        result "same parameters: --activation-checkpointing 2 $flags" $?
    done
    nodes="$small --strategy hybrid_shard --node-size 2"
    hash=$(hash_of $nodes)
    [ -n "$hash" ] && [ "$hash" = "$(hash_of $nodes)" ]
    result "same parameters: hybrid_shard, a second run" $?
fi
# Compression: the bits depend on what is selected and in which order it is added, on nothing else.
topk="--compression topk --topk-ratio 0.05 --dense-below 100 --dense-steps 1"
if ! $gpt --steps 4 | grep -q "cblas kernels"; then
    for flags in "$topk" "$topk --reduce-dtype bf16" "$topk --hierarchical --node-size 2" \
                 "--hierarchical --node-size 2 --strategy full_shard"; do
        plain=$(hash_of $small $flags)
        for variant in "" "--no-overlap" "--thread-ranks" "--threads 2"; do
            hash=$(hash_of $small $flags $variant)
            echo "$hash, before: $plain, uncompressed: $ddp" >"$tmp/other"
            [ -n "$plain" ] && [ "$hash" = "$plain" ] && [ "$hash" != "$ddp" ] || break
        done
        [ "$hash" = "$plain" ] && [ -n "$plain" ] && [ "$plain" != "$ddp" ]
        result "same parameters: $flags" $? "$tmp/other"
    done
fi
good "compression is shown" "reduce +top-k 0.05, hierarchical, after 1 dense steps and 2 of warm-up; keeps" \
    $gpt $topk --compression-warmup 2 --warmup-ratio 0.2 --hierarchical --ranks 4 --node-size 2
grep -q -E "compression  +[0-9.]+x  fewer bytes than fp32 gradients.*top-k 0.05" "$tmp/out"
result "what compression saved is in the table" $? "$tmp/out"
if ! $gpt --steps 4 | grep -q "cblas kernels"; then
    without=$(hash_of $small $topk)
    with=$(hash_of $small $topk --topk-momentum 0.9)
    echo "with $with, without $without" >"$tmp/other"
    [ -n "$with" ] && [ -n "$without" ] && [ "$with" != "$without" ] && [ "$with" = "$(hash_of $small $topk --topk-momentum 0.9)" ]
    result "momentum in the compressor changes what is learned, repeatably" $? "$tmp/other"
fi
good "no error feedback" "without error feedback" $gpt $topk --no-error-feedback
good "an emulated cluster" "cluster emulated: 2 nodes x 2 ranks, 10 Gb/s and 20 us" $gpt --emulate 2x2:10:20
grep -q "cluster  *2   emulated nodes of 2 ranks, 10 Gb/s" "$tmp/out"
result "the emulated cluster is in the table" $? "$tmp/out"
# Of 2 x 2 ranks with E parameters, 4 E bytes, each sends 3/2 of them: 2/3 to the two ranks of the other node. With levels it sends
# half of them twice inside of its node, and half of them once between nodes.
elements=$($gpt | sed -n 's/^model .* (\([0-9]*\)).*/\1/p')
for run in "flat 4 6" "hierarchical 2 6"; do
    set -- $run
    $gpt --emulate 2x2:100:0 --bucket-kib 1000 $([ $1 = flat ] || echo --hierarchical) --dry-run >"$tmp/out" 2>&1
    sed -n 's/.*a rank sends \([0-9]*\) bytes a step, \([0-9]*\) of them to other nodes$/\1 \2/p' "$tmp/out" |
        awk -v E="$elements" -v away="$2" -v all="$3" '{ good = E > 0 && $2 >= away * E && $2 <= 1.05 * away * E && $1 >= all * E && $1 <= 1.05 * all * E } END { exit !good }'
    result "bytes to other nodes and in all, $1" $? "$tmp/out"
done
# The forecast counts what the run then sends.
for flags in "" "--hierarchical" "--strategy full_shard --accum 2" "--compression topk --dense-steps 0 --dense-below 1"; do
    $gpt --emulate 2x2:100:0 $flags >"$tmp/out" 2>&1
    sent=$(sed -n 's/^ *last step  *\([0-9]*\) bytes sent by rank 0$/\1/p' "$tmp/out")
    $gpt --emulate 2x2:100:0 $flags --dry-run >>"$tmp/out" 2>&1
    grep -q "a rank sends ${sent:-nothing} bytes a step" "$tmp/out"; result "--dry-run counts what is sent: ${flags:-ddp}" $? "$tmp/out"
done
good "an emulated cluster's nodes" "strategy hybrid_shard: 2 shards x 2 replicas" $gpt --emulate 2x2:100:0 --strategy hybrid_shard
$gpt >/dev/full 2>"$tmp/err"
[ $? -eq 1 ] && grep -q "could not be written" "$tmp/err"
result "a full disk behind stdout" $? "$tmp/err"
trains "--comm local" "$usual" 0.0002 $gpt --comm local
good "nodes have a size: one of them, if nobody says how many ranks" "strategy hybrid_shard: 3 shards x 1 replica," $gpt --strategy hybrid_shard --node-size 3
good "strategy, memory and bytes are shown" "strategy hybrid_shard: 2 shards x 2 replicas" $gpt --ranks 4 --strategy hybrid_shard --node-size 2
good "auto says why" "auto +zero1: .* MiB a rank" $gpt --strategy auto
good "memory of accumulation modes" "MiB of gradients: last .* every " $gpt --strategy full_shard --accum 2
trains "low precision on the wire" "$usual" 0.05 $gpt --strategy full_shard --param-dtype bf16 --reduce-dtype bf16 --precision bf16
trains "fp16 with loss scaling" "$usual" 0.05 $gpt --precision fp16 --strategy zero1
good "--global-batch" "2 x 16 tokens x 3 micro-batches x 2 ranks" $gpt --global-batch 12
good "--global-batch shrinks --batch" "5 x 16 tokens x 1 micro-batch x 2 ranks" $gpt --global-batch 10 --batch 8
good "--auto-batch at most --batch" "7 x 16 tokens x 1 micro-batch " $gpt --auto-batch --batch 7
wide="$gpt --channels 64 --seq 32"
good "--auto-batch in a limit" "[0-9] x 32 tokens x 1 micro-batch " $wide --batch 512 --auto-batch --memory-limit 8
batch=$(sed -n 's/^step *\([0-9]*\) x.*/\1/p' "$tmp/out")
[ "${batch:-0}" -gt 2 ] && [ "$batch" -lt 512 ]
result "that batch is more than a few and less than the most" $? "$tmp/out"
$wide --layers 8 --ranks 4 >"$tmp/whole" 2>&1
trains "a model larger than the limit, sharded" "$(validation "$tmp/whole")" 0.0002 $wide --layers 8 --ranks 4 --strategy full_shard --memory-limit 6

losses $gpt --ranks 1 --batch 12 >"$tmp/base"
for ranks in 2 3 4 6 12; do
    losses $gpt --ranks $ranks --batch $((12 / ranks)) >"$tmp/other"
    paste "$tmp/base" "$tmp/other" | awk '{ d = $1 - $2; if (d < 0) d = -d; if (d > 1e-4 || NF != 2) bad = 1 } END { exit bad || NR != 12 }'
    result "same losses: $ranks ranks share a batch of 12" $? "$tmp/other"
done
losses $gpt --ranks 1 --batch 4 --accum 3 >"$tmp/other"
paste "$tmp/base" "$tmp/other" | awk '{ d = $1 - $2; if (d < 0) d = -d; if (d > 1e-4 || NF != 2) bad = 1 } END { exit bad || NR != 12 }'
result "same losses: 3 micro-batches of 4" $? "$tmp/other"

# Bad input.
: >"$tmp/empty"; printf 'too short' >"$tmp/short"; mkdir "$tmp/folder"
bad "missing data file" "$tmp/none" $gpt --data "$tmp/none"
bad "empty data file" "empty" $gpt --data "$tmp/empty"
bad "file shorter than a block" "short" $gpt --data "$tmp/short"
bad "data is a folder" "folder" $gpt --data "$tmp/folder"
if have python3; then
    python3 - "$tmp" <<'END'
import struct, sys
def write(name, magic, version, count, tokens):
    with open(sys.argv[1] + "/" + name, "wb") as f:
        f.write(struct.pack("<3i", magic, version, count) + bytes(1024 - 12) + struct.pack("<%dH" % len(tokens), *tokens))
write("good.bin", 20240520, 1, 5000, [i * 7 % 200 for i in range(5000)])
write("vocab.bin", 20240520, 1, 5000, [i * 7 % 200 for i in range(2000)] + [60000] * 3000)
write("cut.bin", 20240520, 1, 5000, list(range(100)))
END
    trains "train_gpt on a token file" 5.516 0.02 $gpt --data "$tmp/good.bin" --vocab 256
    trains "a vocabulary that is padded: the loss without padding" 5.5197 0.005 $gpt --data "$tmp/good.bin" --vocab 257 --sample 50
    grep -q '(7680)' "$tmp/out" && tail -n 1 "$tmp/out" | awk '{ for (i = 1; i <= NF; i++) bad += $i >= 257; exit bad || NF != 50 }'
    result "padding is not counted as parameters, and never drawn" $? "$tmp/out"
    bad "token outside the vocabulary" "60000" $gpt --data "$tmp/vocab.bin" --vocab 256
    bad "token file cut off" "cut.bin" $gpt --data "$tmp/cut.bin"
else skip "token files" "no python3" 5; fi
bad "unknown flag" "--nonsense" $gpt --nonsense 3
bad "flag without value" "--steps" $gpt --steps
bad "flag with a word" "abc" $gpt --steps abc
bad "flag below its range" "--layers" $gpt --layers 0
bad "flag above its range" "--ranks" $gpt --ranks 100000
bad "fraction" "--batch" $gpt --batch 1.5
bad "heads do not divide channels" "--heads" $gpt --heads 3
bad "unknown model" "gpt9" "$build/train_gpt" --model gpt9
bad "unknown optimizer" "it takes one of: adamw" $gpt --optimizer adam
bad "an optimizer of whole matrices" "use zero3" $gpt --optimizer muon --strategy full_shard
bad "a setting of another optimizer" "--beta2 does nothing with --optimizer lion" $gpt --optimizer lion --beta2 0.9
bad "a rate of another optimizer" "--muon-lr does nothing without" $gpt --muon-lr 0.1
bad "unknown strategy" "it takes one of: ddp" $gpt --strategy zero9
bad "a strategy that shards no parameters" "never shards parameters" $gpt --strategy zero1 --reshard-after-forward 0
bad "nodes for a strategy without" "node.size" $gpt --node-size 2
bad "nodes that do not divide the ranks" "divide" $gpt --ranks 4 --strategy hybrid_shard --node-size 3
bad "one node" "set --node-size" $gpt --strategy hybrid_shard
bad "accumulation mode of another strategy" "SHARD_GRAD_OP" $gpt --strategy zero1 --accum-mode every
bad "dtype of parameters that stay whole" "--param-dtype" $gpt --strategy ddp --param-dtype bf16
bad "offload on the cpu" "GPU" $gpt --strategy full_shard --offload all
bad "global batch that ranks do not divide" "nearest that can is 6" $gpt --global-batch 7
bad "two ways to accumulate" "--global-batch" $gpt --accum 2 --global-batch 8
bad "free memory chooses the bits" "--memory-limit" $gpt --deterministic --auto-batch
bad "a model larger than the limit" "needs .* MiB a rank" $wide --layers 8 --ranks 4 --memory-limit 6
bad "activations larger than the limit" "memory limit" $wide --batch 64 --memory-limit 4
bad "auto, and nothing fits" "missing" $wide --batch 64 --strategy auto --memory-limit 4
bad "not even one sample fits" "not even one sample" $gpt --seq 2048 --auto-batch --memory-limit 4
bad "compression of a strategy that shards" "--strategy ddp" $gpt $topk --strategy zero1
bad "compression that the library would have to choose" "--strategy ddp" $gpt $topk --strategy auto
bad "a share above 1" "--topk-ratio" $gpt --compression topk --topk-ratio 1.5
bad "a warm-up that grows" "a warm-up begins at --topk-ratio" $gpt $topk --compression-warmup 5 --warmup-ratio 0.01
bad "a setting without its warm-up" "--compression-warmup" $gpt $topk --warmup-ratio 0.5
bad "a setting without compression" "--dense-steps does nothing without" $gpt --dense-steps 5
bad "compression and loss scaling" "bf16" $gpt $topk --precision fp16
bad "momentum without a residual" "--topk-momentum" $gpt $topk --topk-momentum 0.9 --no-error-feedback
bad "compression of every micro-batch" "DTRAIN_ACCUMULATION_LAST" $gpt $topk --accum 2 --accum-mode every
bad "nodes for a strategy of owners" "zero3 sends whole tensors to their owners" $gpt --strategy zero3 --hierarchical
for text in 2x 2x2:10 2x2:10:5us 0x2:10:5 200x200:10:5 9999999999x9999999999:1:1; do
    bad "--emulate $text" "--emulate" $gpt --emulate $text
done
bad "an emulated link without bandwidth" "GBPS must be positive" $gpt --emulate 2x2:0:5
bad "another number of ranks than emulated" "--ranks is 3" $gpt --emulate 2x2:10:5 --ranks 3
bad "an emulated cluster over MPI" "local communicator" $gpt --emulate 2x2:10:5 --comm mpi
bad "unknown communicator" "\"tcp\" is not here" $gpt --comm tcp
bad "unknown schedule" "sine" $gpt --schedule sine
bad "impossible size" "GiB" $gpt --channels 1000000 --heads 1
bad "a log in a folder that cannot be made" "/proc/none/log cannot be written: No such" $gpt --log /proc/none/log

# A rank that is killed, and one that differs: what every process has to say is one line, with the cause.
$gpt --ranks 3 --steps 1000000 --timeout 20 >"$tmp/out" 2>"$tmp/err" & launcher=$!
wait_line 60 '^ +[1-9][0-9]* +[0-9.]+ ' "$tmp/out"
victim=$(leftovers | sed -n 's/^\([0-9]*\) .*train_gp[t] .*/\1/p' | grep -v -x $launcher | tail -n 1)
kill -9 "$victim" || kill $launcher
wait $launcher
[ $? -eq 137 ] && [ "$(grep -c train_gpt: "$tmp/err")" -eq 1 ] && grep -q 'rank [0-2] was killed by signal 9' "$tmp/err"
result "a killed rank is said once" $? "$tmp/err"
take_ports
for r in 0 1 2; do
    DTRAIN_JOB_KEY=one RANK=$r WORLD_SIZE=3 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
        $gpt --timeout 20 --layers $((1 + (r == 1))) >"$tmp/out.$r" 2>"$tmp/err.$r" &
done
wait
cat "$tmp"/err.[012] >"$tmp/err"
[ "$(wc -l <"$tmp/err")" -eq 3 ] && [ "$(grep -c 'rank 1 has --layers 2, the others 1' "$tmp/err")" -eq 3 ]
result "ranks that differ say so once each" $? "$tmp/err"

if [ "$(id -u)" = 0 ] && have setpriv && have bash; then
    cp "$build/train_gpt" dtrain.h "$tmp/"; chmod 755 "$tmp"; chmod 644 "$tmp/dtrain.h"
    bad "more ranks than the machine allows" "process" setpriv --reuid 65534 --clear-groups bash -c "cd $tmp && ulimit -u 3 && ./train_gpt --ranks 8 --steps 2 --sample 0"
else skip "more ranks than the machine allows" "needs root, setpriv and bash"; fi
finish
