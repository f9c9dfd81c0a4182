#!/bin/sh
# The lessons in docs/: numbers that exercises and lab sheets promise, and that are the same on every machine, are what the
# programs print; every name and flag of docs/from-pytorch.md and docs/tensor-parallelism.md exists.
. tests/support/shell.sh
gpt="$build/train_gpt --data LICENSE --steps 2 --eval-batches 0 --sample 0"

# promised NOTE NUMBER COMMAND...: the note has this number, and so has what the command prints
promised() {
    note=docs/$1 number=$2; shift 2
    timeout 120 "$@" >"$tmp/out" 2>&1 && grep -q -w -F -e "$number" "$note" && grep -q -w -F -e "$number" "$tmp/out"
    result "$note: $number" $? "$tmp/out"
}
promised data-parallelism.md 5006148 $gpt --ranks 4
promised data-parallelism.md 3337432 $gpt
promised where-time-goes.md "35 buckets" $gpt --bucket-kib 16
promised compression.md 94056 $gpt --compression topk --dense-steps 0
promised compression.md 689784 $gpt --compression topk --dense-steps 0 --topk-ratio 0.1
promised tensor-parallelism.md 3543784 sh -c "$gpt --ranks 2 --tensor 2 --log $tmp/tensor >$tmp/run && cat $tmp/tensor"
promised one-parameter.md 4543456 $gpt --strategy full_shard
promised one-parameter.md 3337440 $gpt --strategy full_shard --reshard-after-forward 0
nodes="$gpt --emulate 2x2:10:50 --batch 4 --dry-run"
inside="sed 's/.*sends \([0-9]*\) bytes a step, \([0-9]*\) of them to other nodes$/\1 \2/;t;d' | awk '{ print \$1 - \$2 }'"
promised labs.md 3337432 $nodes
promised labs.md 1668716 sh -c "$nodes | $inside"
promised labs.md 1668824 $nodes --reduce-dtype bf16
promised labs.md 5006148 $nodes --hierarchical
promised labs.md 3337324 sh -c "$nodes --hierarchical | $inside"
promised labs.md 834520 $nodes --hierarchical --reduce-dtype bf16
promised labs.md 160248 $nodes --compression topk --dense-steps 0
promised labs.md 6815196 $gpt --ranks 4 --batch 2 --strategy full_shard
for kib in "25600 2" "512 9" "64 34"; do
    promised labs.md "${kib% *} | ${kib#* }" sh -c "$gpt --bucket-kib ${kib% *} | sed -n 's/.*gradients in \(.*\) buckets.*/${kib% *} | \1/p'"
done
plan="$build/train_gpt --model gpt2 --batch 1 --dry-run"
for ranks in 2 64; do
    for strategy in shard_grad_op full_shard; do
        state=$($plan --ranks $ranks --strategy $strategy 2>/dev/null |
            sed -n 's/^# memory .*parameters \(.*\), gradients \(.*\), optimizer \(.*\), buffers \(.*\), activations.*/\1 \2 \3 \4/p' |
            awk '{ printf "%.1f", $1 + $2 + $3 + $4 }')
        promised ddp-or-fsdp.md "${state:-nothing}" echo "${state:-nothing}"
    done
done
promised ddp-or-fsdp.md 403.7 $plan --ranks 8 --strategy full_shard --activation-checkpointing 1
promised zero-by-hand.md 0.853981 "$build/zero_by_hand" 1
promised zero-by-hand.md "45.5  0.430442" "$build/zero_by_hand" 8

# The table of four strategies of lab sheet 3, and one hash.
for strategy in ddp zero1 shard_grad_op full_shard; do
    $gpt --deterministic --ranks 4 --batch 2 --strategy $strategy >"$tmp/run" 2>&1
    sed -n "s/^memory .*parameters \(.*\), gradients \(.*\), optimizer \(.*\), buffers \(.*\), activations \(.*\), workspace.*/| $strategy | \1 | \2 | \3 | \4 | \5 | /p" "$tmp/run" | tr -d '\n'
    sed -n 's/^ *last step  *\([0-9]*\) bytes.*/\1 |/p' "$tmp/run"
    sed -n 's/^ *parameters  *\([0-9a-f]\{16\}\) .*/\1/p' "$tmp/run" >>"$tmp/hashes"
done >"$tmp/rows"
[ "$(wc -l <"$tmp/rows")" -eq 4 ] && ! while read -r row; do grep -q -F -e "$row" docs/labs.md || echo "$row"; done <"$tmp/rows" | grep .
result "docs/labs.md: the rows of four strategies" $? "$tmp/rows"
[ "$(wc -l <"$tmp/hashes")" -eq 4 ] && [ "$(sort -u "$tmp/hashes" | wc -l)" -eq 1 ]; result "docs/labs.md: one hash" $? "$tmp/hashes"

# exists NOTE: each dtrain_ and DTRAIN_ name of a note is in a product file, each field in its struct, each flag a program's
{ "$build/train_gpt" --help; "$build/resnet_cifar" --help; } >"$tmp/help"
exists() {
    grep -o -E '\b(dtrain|DTRAIN)_[A-Za-z0-9_]+' "$1" | sort -u | while read -r name; do grep -q -w -e "$name" dtrain.h dtrain_cuda.cu dtrain_nccl.h || echo "$name"; done
    grep -o -E '\bdtrain_[a-z0-9_]+\.[a-z_]+' "$1" | sort -u | while IFS=. read -r type field; do
        [ "$type.$field" = dtrain.h ] || sed -n "/^typedef struct $type {/,/^} $type;/p" dtrain.h | grep -q -E "\b$field(\[.*\])?[;,]" || echo "$type.$field"
    done
    grep -o -E '`--[a-z0-9-]+' "$1" | tr -d '`' | sort -u | while read -r name; do grep -q -e "^ *$name\b" "$tmp/help" || echo "$name"; done
}
exists docs/from-pytorch.md >"$tmp/missing"
[ ! -s "$tmp/missing" ] && [ "$(grep -c '^| `' docs/from-pytorch.md)" -gt 25 ]
result "docs/from-pytorch.md: its names and flags exist" $? "$tmp/missing"
exists docs/tensor-parallelism.md >"$tmp/missing"; [ ! -s "$tmp/missing" ]
result "docs/tensor-parallelism.md: its names and flags exist" $? "$tmp/missing"
echo '`dtrain_no_such_call`, `dtrain_launch_desc.no_such_field`, `--no-such-flag`' >"$tmp/wrong.md"
[ "$(exists "$tmp/wrong.md" | wc -l)" -eq 3 ]; result "a name, a field and a flag that do not exist are found" $?
finish
