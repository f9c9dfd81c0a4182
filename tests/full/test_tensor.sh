#!/bin/sh
# Tensor parallelism as a user has it: train_gpt --tensor, examples/gpt.c and examples/llama.c give the losses of ranks
# without it to rounding, and the same text; checkpoints, exports and imports go from layout to layout; what cannot be is
# one sentence; records, traces and a dry run know the axis.
. tests/support/shell.sh
head -c 60000 dtrain.h >"$tmp/data"
model="--data $tmp/data --layers 2 --heads 4 --channels 32 --seq 16 --vocab 256 --timeout 20 --threads 1"
gpt="$build/train_gpt $model --lr 0.003 --warmup 1 --schedule constant --eval-batches 2 --steps 8"
losses() { sed -n 's/.*"loss": \([^,]*\),.*/\1/p' "$1"; }
# near A B [LIMIT]: as many losses, the same to LIMIT, 0.00005, and they have changed by more than 0.05
near() {
    paste "$1" "$2" | awk -v limit="${3:-0.00005}" 'NF != 2 { bad = 1 } { d = $1 - $2; if (d < 0) d = -d; if (!(d <= limit)) bad = 1; if (NR == 1) first = $1; last = $1 }
        END { exit bad || NR < 8 || !(first - last > 0.05) }'
}
# train NAME FLAGS...: its losses are in $tmp/NAME
train() {
    name=$1; shift
    timeout 120 $gpt --log "$tmp/log" --sample 0 "$@" >"$tmp/out" 2>&1 && losses "$tmp/log" >"$tmp/$name"
}
# as NAME FLAGS...: a run has the losses of $tmp/NAME
as() {
    of=$1; shift
    train same "$@" && near "$tmp/$of" "$tmp/same"
    result "as $of: $*" $? "$tmp/out"
    [ "${SHOW:-0}" = 0 ] || paste "$tmp/$of" "$tmp/same"
}

# ---- losses: the same samples of all replicas ----
train plain --ranks 1 --batch 8; result "one rank" $? "$tmp/out"
as plain --ranks 2 --tensor 2 --batch 8
as plain --ranks 2 --tensor 2 --batch 8 --sequence-parallel --no-overlap
as plain --ranks 4 --tensor 4 --batch 8 --sequence-parallel --activation-checkpointing 1
as plain --ranks 4 --tensor 2 --batch 4 --strategy full_shard
as plain --ranks 4 --tensor 2 --batch 4 --sequence-parallel --strategy zero1
as plain --ranks 4 --tensor 2 --batch 2 --accum 2 --sequence-parallel --strategy zero3
train dropped --ranks 1 --batch 8 --dropout 0.2; result "one rank with dropout" $? "$tmp/out"
as dropped --ranks 2 --tensor 2 --batch 8 --dropout 0.2
as dropped --ranks 2 --tensor 2 --batch 8 --dropout 0.2 --sequence-parallel
! near "$tmp/plain" "$tmp/dropped"; result "losses that differ are seen" $?
train padded --ranks 1 --batch 8 --vocab 300; result "a vocabulary with padding" $? "$tmp/out"
as padded --ranks 2 --tensor 2 --batch 8 --vocab 300 --sequence-parallel

# ---- records, traces ----
$gpt --ranks 4 --tensor 2 --batch 4 --sample 0 --log "$tmp/log" --prometheus "$tmp/run.prom" --trace "$tmp/t.json" >"$tmp/out" 2>&1
grep -q '^mesh    tensor 2 x data 2' "$tmp/out" && grep -q '^  tensor axis  *[0-9.]* MiB' "$tmp/out" && grep -q '"ranks": 4' "$tmp/log" &&
    grep -q '"tensor_exposed_ms": [0-9].*"tensor_bytes": [1-9]' "$tmp/log" && grep -q '^dtrain_tensor_bytes{' "$tmp/run.prom"
result "summary, log and metrics have the axis" $? "$tmp/out"
[ "$(sed -n 's/.*"tokens": \([0-9]*\),.*/\1/p' "$tmp/log" | head -n 1)" = $((8 * 16)) ]
result "tokens are those of two replicas" $? "$tmp/log"
grep -q '"name":"tensor axis 1"' "$tmp/t.rank1.json" && grep -q '"axis":"tensor"' "$tmp/t.rank1.json" && grep -q '"axis":"data"' "$tmp/t.rank1.json" &&
    "$build/trace" show "$tmp"/t.rank*.json >"$tmp/out" 2>&1 && grep -q 'the tensor axis alone' "$tmp/out"
result "a trace has a row for the axis" $? "$tmp/out"
"$build/trace" svg "$tmp/step.svg" "$tmp"/t.rank*.json >"$tmp/out" 2>&1 && grep -q '>tensor axis<' "$tmp/step.svg"
result "and so has its drawing" $? "$tmp/out"

# ---- text, with a cache of the heads that are here and without ----
$gpt --ranks 1 --batch 8 --sample 0 --checkpoint "$tmp/saved" --save-every 4 --keep 9 >/dev/null 2>&1
write="$build/train_gpt --layers 2 --heads 4 --channels 32 --seq 16 --vocab 256 --timeout 20 --threads 1 --resume $tmp/saved --generate 40 --temperature 0.7"
$write --ranks 1 >"$tmp/text" 2>"$tmp/err"; [ -s "$tmp/text" ]; result "one rank writes" $? "$tmp/err"
for how in "--ranks 2 --tensor 2" "--ranks 4 --tensor 4" "--ranks 4 --tensor 2 --sequence-parallel --strategy full_shard" "--ranks 2 --tensor 2 --no-cache"; do
    $write $how >"$tmp/out" 2>"$tmp/err" && cmp -s "$tmp/text" "$tmp/out"; result "the same text: $how" $? "$tmp/err"
done

# ---- from layout to layout ----
rm -rf "$tmp/saved/step-000000000008"
train whole --ranks 1 --batch 8 # the losses of all steps
for how in "--ranks 2 --tensor 2 --batch 8" "--ranks 4 --tensor 2 --batch 4 --strategy full_shard --sequence-parallel"; do
    cp -r "$tmp/saved" "$tmp/again"
    rm -f "$tmp/log"
    $gpt $how --sample 0 --checkpoint "$tmp/again" --resume auto --log "$tmp/log" >"$tmp/out" 2>&1 && losses "$tmp/log" >"$tmp/rest" &&
        { head -n 4 "$tmp/whole"; cat "$tmp/rest"; } >"$tmp/both" && near "$tmp/whole" "$tmp/both"
    result "one rank's checkpoint goes on with $how" $? "$tmp/out"
    rm -rf "$tmp/again"
done
$gpt --ranks 4 --tensor 2 --batch 4 --strategy full_shard --sample 0 --checkpoint "$tmp/cut" --save-every 4 --keep 9 >"$tmp/out" 2>&1
result "a run with a tensor axis saves" $? "$tmp/out"
convert="$build/train_gpt --layers 2 --heads 4 --channels 32 --seq 16 --vocab 256 --timeout 20 --threads 1 --steps 0"
for to in hf/model.safetensors gpt.bin; do
    mkdir -p "$tmp/1/hf" "$tmp/2/hf" "$tmp/3/hf"
    $convert --resume "$tmp/cut" --ranks 1 --export "$tmp/1/$to" >"$tmp/out" 2>&1 &&
        $convert --resume "$tmp/cut" --ranks 2 --tensor 2 --export "$tmp/2/$to" >"$tmp/out" 2>&1 &&
        $convert --import "$tmp/1/$to" --ranks 4 --tensor 2 --strategy full_shard --export "$tmp/3/$to" >"$tmp/out" 2>&1 &&
        cmp "$tmp/1/$to" "$tmp/2/$to" >"$tmp/out" 2>&1 && cmp "$tmp/1/$to" "$tmp/3/$to" >"$tmp/out" 2>&1
    result "$to: exported and imported by any layout, to the last bit" $? "$tmp/out"
done
rm -rf "$tmp/cut/step-000000000008"
rm -f "$tmp/log"
$gpt --ranks 2 --batch 4 --sample 0 --resume "$tmp/cut" --log "$tmp/log" >"$tmp/out" 2>&1 && losses "$tmp/log" >"$tmp/rest" &&
    { head -n 4 "$tmp/whole"; cat "$tmp/rest"; } >"$tmp/both" && near "$tmp/whole" "$tmp/both"
result "its checkpoint goes on without one" $? "$tmp/out"

# ---- what is planned ----
good "a dry run" '^# mesh      tensor 2 x data 2' $gpt --ranks 4 --tensor 2 --batch 4 --dry-run
grep -q '^tensor = 2$' "$tmp/out" && grep -q '^# .* 4 .*<- this run' "$tmp/out"; result "which is a file of flags" $? "$tmp/out"
half() { $gpt "$@" --dry-run 2>&1 | sed -n 's/.*parameters \([0-9.]*\), gradients.*/\1/p'; }
awk -v a="$(half --ranks 1 --batch 8 --channels 512)" -v b="$(half --ranks 2 --tensor 2 --batch 8 --channels 512)" 'BEGIN { exit !(a > 20 && b / a > 0.49 && b / a < 0.52) }'
result "a rank of two has half of the parameters" $?
good "the largest batch" '^mesh' $gpt --ranks 2 --tensor 2 --batch 32 --auto-batch --memory-limit 64 --sample 0
printf 'tensor = 2\nsequence-parallel = 1\nranks = 2\n' >"$tmp/flags"
good "a file of flags" 'tensor 2 x data 1.*sequence-parallel' $gpt --config "$tmp/flags" --batch 8 --sample 0

# ---- what cannot be ----
bad "heads" '^train_gpt: --heads is 4, and --tensor 3 ' $gpt --ranks 3 --tensor 3
bad "ranks" '^train_gpt: --tensor is 2, which does not divide --ranks 3' $gpt --ranks 3 --tensor 2
bad "muon" '--optimizer muon .* --tensor 2' $gpt --ranks 2 --tensor 2 --optimizer muon
bad "rows" '--sequence-parallel cuts the 15 rows' $gpt --ranks 2 --tensor 2 --sequence-parallel --seq 15 --batch 1
bad "nothing to cut" '--sequence-parallel does nothing without --tensor' $gpt --ranks 2 --sequence-parallel
bad "emulated nodes" '--tensor is 2, which does not divide the ranks of a node of --emulate 2x1:10:50, 1:' $gpt --tensor 2 --emulate 2x1:10:50
bad "nodes" '--tensor is 2, which does not divide --node-size 3' $gpt --ranks 6 --tensor 2 --strategy hybrid_shard --node-size 3
bad "a model without marks" '--tensor 2: no parameter of this model has a mark' "$build/resnet_cifar" --ranks 2 --tensor 2 --steps 1

# ---- the examples ----
table() { awk '$1 ~ /^[0-9]+$/ && NF > 8 { print $2 }' "$1"; }
for ranks in "--ranks 1 --batch 8" "--ranks 2 --tensor 2 --batch 8" "--ranks 4 --tensor 2 --batch 4"; do
    timeout 120 "$build/gpt" $ranks --steps 10 >"$tmp/out" 2>&1; result "gpt.c $ranks" $? "$tmp/out"
    table "$tmp/out" >"$tmp/same"
    case $ranks in *"--ranks 1"*) cp "$tmp/same" "$tmp/gpt" ;; *) near "$tmp/gpt" "$tmp/same" 0.00015; result "and its losses are those of one rank" $? "$tmp/same" ;; esac
done
for ranks in "--ranks 1 --batch 8" "--ranks 2 --tensor 2 --batch 8" "--ranks 4 --tensor 2 --batch 4 --strategy zero1"; do
    timeout 120 "$build/llama" $ranks --steps 60 >"$tmp/out" 2>&1; result "llama.c $ranks" $? "$tmp/out"
    sed -n 's/^step.*loss //p' "$tmp/out" >"$tmp/same"
    case $ranks in
        *"--ranks 1"*) cp "$tmp/same" "$tmp/llama" ;;
        *) paste "$tmp/llama" "$tmp/same" | awk '{ d = $1 - $2 } NF != 2 || d > 0.02 || d < -0.02 { bad = 1 } END { exit bad || NR < 2 }'
            result "and its losses are those of one rank" $? "$tmp/same" ;;
    esac
done
finish
