#!/bin/sh
# bits.sh PROGRAM [THREADS]: one line for each strategy, precision and number of ranks: the last loss, the norm and the
# hash of the parameters of a short run. Run it with train_gpt built from two trees on one machine and
# compare: equal lines are equal bits. (Between instruction sets bits may differ.)
program=$1
data=${TMPDIR:-/tmp}/bits_text.$$
awk 'BEGIN { s = 12345; for (i = 0; i < 4000; i++) { l = ""; for (j = 0; j < 12; j++) { s = (s * 16807) % 2147483647
    l = l substr("the of and to in he was that his it with is for as had you not be on at by which or from ", s % 80, 3 + s % 5) " " } print l } }' >"$data"
trap 'rm -f "$data"' EXIT
model="--layers 2 --channels 32 --heads 2 --seq 16 --vocab 256 --batch 2 --steps 4 --eval-batches 0 --sample 0 --threads 1 --bucket-kib 16"
row() {
    name=$1 ranks=$2; shift 2
    log=$data.log
    if "$program" --deterministic $model --data "$data" --ranks "$ranks" --log "$log" "$@" >"$data.out" 2>"$data.err"; then
        hash=$(sed -n 's/^ *parameters  *\([0-9a-f]\{16\}\).*/\1/p' "$data.out")
        loss=$(grep '"loss"' "$log" | grep -v final | tail -n 1 | sed 's/.*"loss": *\([^,]*\),.*/\1/')
        norm=$(grep '"loss"' "$log" | grep -v final | tail -n 1 | sed -n 's/.*"grad_norm": *\([^,]*\),.*/\1/p')
        echo "$name $ranks: $hash $loss $norm"
    else echo "$name $ranks: refused: $(grep -v '^ *$' "$data.err" | tail -n 1 | cut -c1-90)"; fi
    rm -f "$log" "$data.out" "$data.err"
}
for ranks in 1 2 3 4; do
    for precision in fp32 bf16 fp16; do
        for strategy in ddp zero1 shard_grad_op full_shard zero3 hybrid_shard; do
            extra=
            [ $strategy = hybrid_shard ] && { extra="--node-size 2"; [ $((ranks % 2)) = 0 ] || extra="--node-size $ranks"; }
            row "$strategy/$precision" $ranks --strategy $strategy --precision $precision $extra
        done
    done
    row accumulate $ranks --accum 3
    row accumulate_every $ranks --strategy full_shard --accum 3 --accum-mode every
    row full_shard/every $ranks --strategy full_shard --accum 2 --accum-mode every
    row hybrid_shard/shard_every $ranks --strategy hybrid_shard --node-size 1 --accum 2 --accum-mode shard_every
    row dropout $ranks --dropout 0.1 --activation-checkpointing 1
    row full_shard/keep $ranks --strategy full_shard --reshard-after-forward 0 --activation-checkpointing 1
    row reduce/bf16 $ranks --reduce-dtype bf16
    row full_shard/params/bf16 $ranks --strategy full_shard --param-dtype bf16 --reduce-dtype fp16
    row topk $ranks --compression topk --topk-ratio 0.05 --dense-steps 1 --dense-below 64 --variance-steps 1
    row topk/momentum $ranks --compression topk --topk-momentum 0.9 --topk-ratio 0.05 --dense-steps 1 --dense-below 64
    row threads $ranks --thread-ranks --strategy full_shard
    row no_overlap $ranks --no-overlap --clip 0
done
row hierarchical 4 --hierarchical --node-size 2
row hierarchical/topk 4 --hierarchical --node-size 2 --compression topk --topk-ratio 0.05 --dense-steps 1 --dense-below 64
row hierarchical/zero1 4 --hierarchical --node-size 2 --strategy zero1 --reduce-dtype bf16
row emulated 4 --emulate 2x2:10:5 --hierarchical
# Steps of several levels, and those before the data axis.
for strategy in ddp zero1 shard_grad_op full_shard; do
    row $strategy/nodes 4 --strategy $strategy --hierarchical --node-size 2
    row $strategy/nodes/fp16 4 --strategy $strategy --hierarchical --node-size 2 --reduce-dtype fp16 --accum 2
    row $strategy/nodes/bf16 8 --strategy $strategy --hierarchical --node-size 4 --reduce-dtype bf16
    row $strategy/rows 4 --strategy $strategy --tensor 2 --sequence-parallel --accum 2
done
for strategy in ddp zero1; do
    row $strategy/stages 4 --strategy $strategy --pipeline 2 --accum 4
    row $strategy/rows/stages 8 --strategy $strategy --tensor 2 --sequence-parallel --pipeline 2 --accum 4
done
row full_shard/recompute 4 --strategy full_shard --activation-checkpointing 1 --accum 2 --accum-mode every
for flags in "" "--accum 3" "--accum 3 --accum-mode shard_every" "--reduce-dtype bf16 --accum 2 --accum-mode shard_every" "--reduce-dtype fp16"; do
    row "hybrid_shard $flags" 4 --strategy hybrid_shard --node-size 2 $flags
done
row hybrid_shard/rows 8 --strategy hybrid_shard --node-size 2 --tensor 2 --sequence-parallel
for flags in "" "--hierarchical --node-size 2" "--reduce-dtype bf16" "--accum 2"; do
    row "topk $flags" 4 --compression topk --dense-steps 2 $flags
done
