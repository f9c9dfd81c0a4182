#!/bin/sh
# Pipelines as a user has them: train_gpt --pipeline with every schedule, beside a tensor and a data axis, gives the losses of
# one rank (its embedding is tied to its head, over two stages: to rounding); checkpoints go from layout to layout; what
# cannot be is one sentence.
. tests/support/shell.sh
head -c 60000 dtrain.h >"$tmp/data"
gpt="$build/train_gpt --data $tmp/data --layers 6 --heads 4 --channels 32 --seq 16 --vocab 256 --timeout 20 --threads 1 --lr 0.003 --warmup 1 --schedule constant
    --eval-batches 2 --steps 8 --sample 0"
losses() { sed -n 's/.*"loss": \([^,]*\),.*/\1/p' "$1"; }
near() {
    paste "$1" "$2" | awk 'NF != 2 { bad = 1 } { d = $1 - $2; if (d < 0) d = -d; if (!(d <= 0.00005)) bad = 1; if (NR == 1) first = $1; last = $1 }
        END { exit bad || NR < 8 || !(first - last > 0.05) }'
}
# as FLAGS...: a run has the losses of $tmp/plain
as() {
    timeout 120 $gpt --log "$tmp/log" "$@" >"$tmp/out" 2>&1 && losses "$tmp/log" >"$tmp/same" && near "$tmp/plain" "$tmp/same"
    result "$*" $? "$tmp/out"
}
timeout 120 $gpt --ranks 1 --batch 2 --accum 4 --log "$tmp/log" >"$tmp/out" 2>&1 && losses "$tmp/log" >"$tmp/plain"
result "one rank" $? "$tmp/out"
as --ranks 2 --pipeline 2 --batch 2 --accum 4
as --ranks 4 --pipeline 4 --batch 2 --accum 4 --pipeline-schedule gpipe --strategy zero1
as --ranks 4 --pipeline 2 --batch 1 --accum 4 --pipeline-schedule interleaved --chunks 3 --strategy zero1
as --ranks 4 --pipeline 4 --batch 2 --accum 4 --pipeline-schedule zb_h1 --activation-checkpointing 2
as --ranks 4 --tensor 2 --pipeline 2 --batch 2 --accum 4 --pipeline-schedule zb_h1 --sequence-parallel
as --ranks 2 --pipeline 2 --batch 2 --accum 4 --stage-units 2,6
grep -q '^stages  have 2, 6 units$' "$tmp/out"; result "the start says which units stages have" $? "$tmp/out"
as --ranks 8 --tensor 2 --pipeline 2 --batch 2 --accum 2
grep -q '^stages  have [0-9]*, [0-9]* units, by their cost$' "$tmp/out"; result "and that they are divided by cost" $? "$tmp/out"
grep -q '^mesh    tensor 2 x pipeline 2 x data 2' "$tmp/out"; result "the start says who has what" $? "$tmp/out"

# ---- what it writes ----
# sample FLAGS...: the text behind a run is that of $tmp/text
sample() {
    timeout 120 $gpt --sample 40 --prompt "static " "$@" >"$tmp/out" 2>&1 && sed -n '/^a sample/,$p' "$tmp/out" >"$tmp/wrote" && cmp "$tmp/text" "$tmp/wrote"
    result "a sample of $*" $? "$tmp/out"
}
timeout 120 $gpt --sample 40 --prompt "static " --ranks 1 --batch 2 --accum 4 >"$tmp/out" 2>&1 && sed -n '/^a sample/,$p' "$tmp/out" >"$tmp/text" && [ "$(wc -c <"$tmp/text")" -gt 60 ]
result "a sample of one rank" $? "$tmp/out"
sample --ranks 2 --pipeline 2 --batch 2 --accum 4
sample --ranks 4 --pipeline 2 --batch 1 --accum 4 --pipeline-schedule interleaved --chunks 3 --no-cache
sample --ranks 4 --tensor 2 --pipeline 2 --batch 2 --accum 4 --pipeline-schedule zb_h1

# ---- a Llama ----
llama="$build/llama --data $tmp/data --steps 20 --seq 16 --batch 4 --accum 2"
for run in "first --ranks 1" "second --ranks 2 --pipeline 2" "third --ranks 4 --tensor 2 --pipeline 2 --pipeline-schedule zb_h1 --strategy zero1"; do
    set -- $run
    mkdir "$tmp/$1" && timeout 120 $llama --export "$tmp/$1/model.safetensors" $(echo "$run" | cut -d ' ' -f 2-) >"$tmp/$1/out" 2>"$tmp/$1/err" && cmp "$tmp/first/out" "$tmp/$1/out"
    result "llama, $run" $? "$tmp/$1/err"
done
try "llama writes the weights of one rank" cmp "$tmp/first/model.safetensors" "$tmp/second/model.safetensors"
good "llama, one rank, from a pipeline's weights" 'step +20' $llama --ranks 1 --import "$tmp/second"
cp "$tmp/out" "$tmp/other"
good "llama, a pipeline from one rank's" 'step +20' $llama --ranks 2 --pipeline 2 --chunks 3 --pipeline-schedule interleaved --import "$tmp/first"
cmp "$tmp/out" "$tmp/other"; result "llama, the same losses behind both" $?
bad "llama, chunks" 'do nothing without --pipeline' $llama --ranks 2 --chunks 2

# ---- from layout to layout ----
$gpt --ranks 4 --pipeline 2 --tensor 2 --batch 2 --accum 4 --checkpoint "$tmp/saved" --save-every 4 --keep 9 >"$tmp/out" 2>&1
result "a pipeline saves" $? "$tmp/out"
rm -rf "$tmp/saved/step-000000000008"
for how in "--ranks 1 --batch 2 --accum 4" "--ranks 3 --pipeline 3 --batch 2 --accum 4 --pipeline-schedule zb_h1" "--ranks 4 --pipeline 2 --batch 1 --accum 4 --strategy zero1" "--ranks 4 --tensor 2 --pipeline 2 --batch 2 --accum 4 --stage-units 1,7"; do
    cp -r "$tmp/saved" "$tmp/again"
    rm -f "$tmp/log"
    $gpt $how --checkpoint "$tmp/again" --resume auto --log "$tmp/log" >"$tmp/out" 2>&1 && losses "$tmp/log" >"$tmp/rest" &&
        { head -n 4 "$tmp/plain"; cat "$tmp/rest"; } >"$tmp/both" && near "$tmp/plain" "$tmp/both"
    result "its checkpoint goes on with $how" $? "$tmp/out"
    rm -rf "$tmp/again"
done

# ---- the largest batch that fits: of each schedule, and with as many micro-batches as it leaves of a global batch ----
# fits NAME FLAGS...: a run with the batch that was found keeps to the limit, and is the run that was given it
wide="$gpt --layers 4 --channels 64 --seq 64 --steps 2 --eval-batches 0"
fits() {
    name=$1; shift
    timeout 300 $wide "$@" --auto-batch --memory-limit 12 >"$tmp/out" 2>&1 &&
        found=$(sed -n 's/^step  *\([0-9]*\) x .*/\1/p' "$tmp/out") && count=$(sed -n 's/^step .* x \([0-9]*\) micro.*/\1/p' "$tmp/out") && [ "$found" -gt 1 ] &&
        grep -q '^  library memory .* of --memory-limit ' "$tmp/out" && ! timeout 300 $wide "$@" --batch $((2 * found)) --accum "$count" --memory-limit 12 >"$tmp/again" 2>&1 && grep -q 'memory limit' "$tmp/again"
    result "$name" $? "$tmp/out"
}
fits "the largest batch of 1F1B" --ranks 2 --pipeline 2 --accum 4
fits "of GPipe, which keeps all micro-batches" --ranks 4 --tensor 2 --pipeline 2 --accum 4 --pipeline-schedule gpipe
fits "of interleaved stages under ZERO1" --ranks 4 --pipeline 2 --accum 4 --pipeline-schedule interleaved --strategy zero1
good "a global batch of many" '^step +4 x 64 tokens x 8 micro-batches x 2 replicas' $wide --ranks 4 --pipeline 2 --global-batch 64 --auto-batch --memory-limit 12
bad "a global batch of which not even one fits" 'not even one sample fits' $wide --ranks 4 --pipeline 2 --global-batch 64 --auto-batch --memory-limit 12 --pipeline-schedule gpipe

# ---- what cannot be ----
bad "ranks" '--tensor 2 x --pipeline 2 are 4 ranks, which do not divide --ranks 6' $gpt --ranks 6 --tensor 2 --pipeline 2
bad "kinds" 'full_shard gathers or reduces them one after the other' $gpt --ranks 2 --pipeline 2 --strategy full_shard
bad "stages without a unit" 'unit' $gpt --ranks 9 --pipeline 9 --layers 2
bad "chunks" '--chunks does nothing without --pipeline' $gpt --ranks 2 --chunks 2
bad "a program with passes of its own" '--pipeline 2: this program runs passes' "$build/resnet_cifar" --ranks 2 --pipeline 2 --steps 1
bad "no model to write with" '--pipeline with --generate' $gpt --ranks 2 --pipeline 2 --generate 3 --resume "$tmp/saved"
bad "a graph" 'graph' $gpt --ranks 2 --pipeline 2 --graph
bad "a list without a pipeline" '--stage-units does nothing without --pipeline' $gpt --ranks 2 --stage-units 4,4
bad "a short list" 'it takes 2 numbers of 1 or more' $gpt --ranks 2 --pipeline 2 --stage-units 8
bad "a long list" 'it takes 2 numbers of 1 or more' $gpt --ranks 2 --pipeline 2 --stage-units 4,3,1
bad "a list with an empty stage" 'it takes 2 numbers of 1 or more' $gpt --ranks 2 --pipeline 2 --stage-units 8,0
bad "a list of other things" 'it takes 4 numbers of 1 or more' $gpt --ranks 2 --pipeline 2 --pipeline-schedule interleaved --stage-units 2,2,2,x
bad "a list with another sum" '--stage-units 5,4 adds up to 9 units, and the model has 8' $gpt --ranks 2 --pipeline 2 --stage-units 5,4

# ---- a forecast ----
# forecast RANK,RANK.. FLAGS...: --dry-run has a row for each stage; units, parameters and shares add up; what follows is a config
forecast() {
    $gpt --batch 2 --accum 4 --dry-run "$@" >"$tmp/out" 2>&1 && grep -v '^#' "$tmp/out" >"$tmp/config" &&
        awk -v parameters="$want" '/^# *rank stage/ { rows = 1; next } /^# mesh/ { rows = 0 }
            rows { n++; split($4, u, "-"); units += u[2] - u[1] + 1; p += $5; share += $6; for (i = u[1]; i <= u[2]; i++) seen[i]++ }
            END { for (i = 0; i < 8; i++) if (seen[i] != 1) exit 1; exit !(units == 8 && p == parameters && share > 99.7 && share < 100.3) }' "$tmp/out" &&
        grep -q '^# step .* bubble .* % of the schedule' "$tmp/out"
    result "--dry-run $*" $? "$tmp/out"
}
want=$((6 * 12704 + 256 * 32 + 16 * 32 + 64 + 256 * 32)) # blocks, the table and its copy beside the head, positions, the last norm
forecast --ranks 2 --pipeline 2
timeout 300 $gpt --config "$tmp/config" --steps 1 --ranks 2 >"$tmp/out" 2>&1
result "its output is a config" $? "$tmp/out"
forecast --ranks 4 --pipeline 2 --stage-units 1,7 --strategy auto
awk '/^# *rank stage/ { getline; exit !($4 == "0-0") }' "$tmp/out"; result "it has the list" $? "$tmp/out"
forecast --ranks 3 --pipeline 3 --pipeline-schedule zb_h1 --cluster h100
forecast --ranks 8 --tensor 2 --pipeline 2 --pipeline-schedule interleaved --strategy zero1
forecast --ranks 2 --pipeline 2 --pipeline-schedule interleaved --chunks 3
finish
