#!/bin/sh
# The simulator where its answer can be computed by hand, where it must agree with the library, and where it
# can only be sane; its files; bad input; and the published figures as they were recorded.
. tests/support/shell.sh
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1}
bad_lines=1

# simulate FLAGS: rows to $tmp/rows; field KEY ROW: a number of a row; near NAME A B: equal to 1e-6
simulate() { "$build/simulate" --json "$tmp/rows" --straggler 0 "$@" >"$tmp/out" 2>"$tmp/err" || cat "$tmp/err"; }
field() { sed -n "$2s/.*\"$1\": \([^,}]*\)[,}].*/\1/p" "$tmp/rows"; }
near() {
    awk -v a="$2" -v b="$3" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(a != "" && d <= 1e-6 * (b < 0 ? -b : b) + 1e-12) }'
    result "$1 ($2, by hand $3)" $?
}
holds() { # holds NAME CONDITION-OF-AWK
    awk "BEGIN { exit !($2) }" </dev/null
    result "$1: $2" $?
}
refused() { name=$1 pattern=$2; shift 2; bad "$name" "$pattern" "$build/simulate" "$@"; }

# GPT-2 without biases: 12 blocks of 9 x 768^2 + 3 x 768^2 and two norms, padded tables, a norm. Elements, and flops of a
# sample: matrices twice each token, the head; causal attention half of 4 T^2 C, at 0.6 of the rate, backward 2.5 times.
elements=$((12 * (12 * 768 * 768 + 2 * 768) + 50304 * 768 + 1024 * 768 + 768))
flops=$((12 * 2 * 1024 * 12 * 768 * 768 + 2 * 1024 * 50304 * 768))
attention=$((12 * 2 * 1024 * 1024 * 768))
ring="--cluster custom --gpus-per-node 1 --network-gbps 100 --latency-us 10 --hbm-gbs 1e15 --strategies ddp"
simulate $ring --gpus 1,8 --batch-sizes 4 --no-overlap --bucket-mib 100000
one=$(awk "BEGIN { printf \"%.9g\", 1e3 * 4 * (3 * $flops + 3.5 / 0.6 * $attention) / 100e12 }")
sent=$((2 * 7 * elements * 4 / 8))
comm=$(awk "BEGIN { printf \"%.9g\", 1e3 * (2 * 14 * 10e-6 + $sent / 12.5e9) }") # and the weights of the step
near "1 GPU: forward and twice that backward" "$(field step_ms 1)" "$one"
near "1 GPU sends nothing" "$(field comm_bytes 1)" 0
near "8 GPUs send 2 (N-1)/N of the gradients" "$(field comm_bytes 2)" "$sent"
near "one bucket of alpha and beta" "$(field comm_ms 2)" "$comm"
near "without overlap all of it is exposed" "$(field exposed_comm_ms 2)" "$comm"
near "a step is compute and communication" "$(field step_ms 2)" "$(awk "BEGIN { printf \"%.9g\", $one + $comm }")"
near "efficiency is their share" "$(field efficiency 2)" "$(awk "BEGIN { printf \"%.6g\", 100 * $one / ($one + $comm) }")"

# Kernels around products, at 0.65 of the bandwidth, of 4 samples more, bf16: of C channels 10 a block for its norms, 12 for residuals, 20 for the
# activation of 4 C, and 5 for the last norm, 8 for the table's rows; 3 of the logits.
around=$(awk "BEGIN { printf \"%.9g\", 1e3 * 2 * 4096 * (768 * (12 * 42 + 5 + 8) + 3 * 50304) / 650e9 }")
simulate $ring --gpus 1 --batch-sizes 4 --hbm-gbs 1000; few=$(field step_ms 1)
simulate $ring --gpus 1 --batch-sizes 8 --hbm-gbs 1000
near "kernels around products" "$(awk "BEGIN { printf \"%.9g\", $(field step_ms 1) - $few }")" "$(awk "BEGIN { printf \"%.9g\", $one + $around }")"
simulate $ring --gpus 1 --batch-sizes 4 --checkpointing 1; again=$(field step_ms 1)
simulate $ring --gpus 1 --batch-sizes 4 --checkpointing 1 --recompute-all
near "a block's last product again, of 4 C^2 a token" "$(awk "BEGIN { printf \"%.9g\", $(field step_ms 1) - $again }")" \
    "$(awk "BEGIN { printf \"%.9g\", 1e3 * 12 * 2 * 4096 * 4 * 768 * 768 / 100e12 }")"

# With overlap what is left is the tail: the last bucket holds the tied table, final at the very end.
simulate $ring --gpus 8 --batch-sizes 64 --network-gbps 1000 --latency-us 0
tail=$(awk "BEGIN { printf \"%.9g\", 1e3 * 2 * 7 / 8 * 4 * 50304 * 768 / 125e9 }")
holds "overlap leaves the tail" "$(field exposed_comm_ms 1) >= $tail * 0.999 && $(field exposed_comm_ms 1) < 1.3 * $tail"

# Emulated links (tools/emulated_links.h): all-reduce over 2 nodes of 4 on 1 Gb/s. Large: every rank sends a slice of 1/8 to 4 others, twice.
# Small, as the weights are (1, and whether there is a gradient of each of 76): its whole input to 4 others, once.
simulate --cluster cpu --network-gbps 1 --latency-us 50 --nvlink-gbs 1e15 --gpus 8 --strategies ddp --bucket-mib 100000
links=$(awk "BEGIN { large = 2 * 4 * 4 * $elements * 4 / 8; small = 4 * 4 * 77 * 4
    printf \"%.9g\", 1e3 * (3 * 50e-6 + (large + small) / 0.125e9) }")
near "emulated links" "$(field comm_ms 1)" "$links"

# What the strategy has counted, and memory falling as more is sharded.
for flags in "" "--param-dtype bf16 --reduce-dtype bf16" "--reshard-after-forward 0"; do
    for kind in ddp zero1 shard_grad_op full_shard zero3 hybrid_shard; do
        case "$kind $flags" in ddp*reshard* | zero1*reshard* | shard_grad_op*reshard*) continue ;; esac
        simulate --strategies $kind --gpus 1,2,8,32 --gpus-per-node 4 $flags
        differ=$(sed 's/.*"comm_bytes": \([0-9]*\), "strategy_bytes": \([0-9]*\).*/\1 \2/' "$tmp/rows" | awk '$1 != $2 || NF != 2')
        echo "$differ" >"$tmp/differ"
        [ -z "$differ" ] && [ "$(wc -l <"$tmp/rows")" -eq 4 ]
        result "$kind $flags: the strategy has counted the bytes of the links" $? "$tmp/differ"
    done
done
simulate --strategies ddp,zero1,shard_grad_op,full_shard --gpus 64 --cluster a100
holds "memory falls from kind to kind" "$(field memory_gib 1) > $(field memory_gib 2) && $(field memory_gib 2) > $(field memory_gib 3) && $(field memory_gib 3) > $(field memory_gib 4)"
near "ddp and full_shard differ in one more gather, but for what stays" \
    "$(awk "BEGIN { print ($(field comm_bytes 4) > 1.2 * $(field comm_bytes 1) && $(field comm_bytes 4) <= 1.5 * $(field comm_bytes 1)) }")" 1

# A tensor axis: 2 GPUs share every layer of 4 samples. All products are cut, in halves. Of rows of 768 bf16 numbers the sums
# are 2 a block forward, 2 backward and the head's; of the table's rows, fp32, one; then maxima, and two sums a row, of the
# loss, and what both agree on: 1 and 76 numbers, above.
rows=$((4 * 1024 * 768))
simulate $ring --gpus 2 --tensor 2 --batch-sizes 4 --no-overlap
sums=$((49 * 2 * rows + 4 * rows + 3 * 4 * 4 * 1024 + 4 * 77))
comm=$(awk "BEGIN { printf \"%.9g\", 1e3 * (53 * 2 * 10e-6 + $sums / 12.5e9) }")
near "tensor 2: each half of a layer sends its sums" "$(field tensor_bytes 1)" "$sums"
near "tensor 2: they take alpha and beta" "$(field comm_ms 1)" "$comm"
near "tensor 2: half of the products, and the sums" "$(field step_ms 1)" "$(awk "BEGIN { printf \"%.9g\", $one / 2 + $comm }")"
simulate $ring --gpus 2 --tensor 2 --batch-sizes 4 --network-gbps 10000 --latency-us 0
sums_exposed=$(field exposed_comm_ms 1)
near "tensor 2: sums of d_x go on under d_weight, all others are waited for" "$(field exposed_comm_ms 1)" \
    "$(awk "BEGIN { printf \"%.9g\", 1e3 * ($sums - 25 * 2 * $rows) / 1250e9 }")"
simulate $ring --gpus 2 --tensor 2 --batch-sizes 4 --network-gbps 10000 --latency-us 0 --tensor-overlap none
near "tensor 2: or are waited for, too" "$(field exposed_comm_ms 1)" "$(field comm_ms 1)"
simulate $ring --gpus 2 --tensor 2 --batch-sizes 4 --network-gbps 10000 --latency-us 0 --tensor-overlap pieces
holds "tensor 2: in pieces all sums but the table's and the loss's go on under products" "$(field exposed_comm_ms 1) < 0.25 * $sums_exposed"

# Of t ranks. With sequence parallelism a sum is scattered, and rows are gathered: twice a block before, and, in backward,
# those of x again and those of d_y, 4 times; the head's 2 times, the table's, fp32, once. Norms and positions, fp32, are
# summed as well. Replicas, of which each rank has a part of the rest, send what the library counts.
for t in 2 4; do
    simulate --gpus $t --tensor $t --batch-sizes 4 --strategies ddp
    near "tensor $t: bytes" "$(field tensor_bytes 1)" $((2 * (t - 1) * sums / t))
    simulate --gpus $t --tensor $t --batch-sizes 4 --strategies ddp --sequence-parallel
    scattered=$((12 * 10 * 2 * rows + 3 * 2 * rows + 2 * 4 * rows))
    near "tensor $t, sequence parallelism: bytes" "$(field tensor_bytes 1)" \
        $(((t - 1) * (scattered + 2 * (3 * 4 * 4 * 1024 + 4 * 77 + 4 * (25 + 1024) * 768)) / t))
    for kind in ddp zero1 full_shard hybrid_shard; do
        simulate --strategies $kind --gpus 8,32 --tensor $t --gpus-per-node 4
        [ "$(field comm_bytes 2)" = "$(field strategy_bytes 2)" ] && [ "$(field data 2)" -eq $((32 / t)) ] && [ "$(field comm_bytes 2)" -gt 0 ]
        result "$kind, tensor $t: bytes along the data axis are dtrain_strategy_query's" $? "$tmp/rows"
    done
done
grep -q 'GPUs = tensor 4 x data' "$tmp/out" && grep -q ' x  *8  hybrid_shard' "$tmp/out"
result "the table names the axes" $? "$tmp/out"
both="--model llama70b --batch-sizes 1 --checkpointing 1 --strategies ddp"
simulate $both --gpus 8; whole=$(field memory_gib 1)
simulate $both --gpus 8 --tensor 8
holds "memory: an eighth of what is cut" "$(field memory_gib 1) < 0.14 * $whole && $(field memory_gib 1) > 0.12 * $whole"
long="--model gpt2_medium --gpus 16 --tensor 16 --strategies ddp --batch-sizes 2"
simulate $long --gpus-per-node 16; within=$(field step_ms 1)
simulate $long --gpus-per-node 8
holds "a tensor axis across nodes is slower than inside one" "$(field step_ms 1) > $within"

# A pipeline of 2: of tokens a block computes 3 x 2 x 12 C^2 and 3.5 / 0.6 x 2 T C, the head 3 x 2 C V, which is 4.49 blocks:
# the last stage has 4 blocks, the first one 8. In 1F1B the longer one works without a gap between the other's two halves.
line="--cluster custom --network-gbps 1e15 --nvlink-gbs 1e15 --latency-us 0 --hbm-gbs 1e15 --strategies ddp --batch-sizes 1"
block=51642368 head=231800832
simulate $line --gpus 2 --pipeline 2 --accum 8
near "pipeline 2: 1F1B" "$(field step_ms 1)" "$(awk "BEGIN { printf \"%.9g\", 1024 * (8 * (4 * $block + $head) + 8 * $block) / 100e9 }")"
near "pipeline 2: what a rank does not compute is the bubble" "$(awk "BEGIN { printf \"%.9g\", $(field compute_ms 1) + $(field bubble_ms 1) }")" "$(field step_ms 1)"
simulate $line --gpus 2 --accum 8; near "no pipeline: each GPU has all" "$(field bubble_ms 1)" 0
deep="$line --model llama7b --gpus 4 --pipeline 4 --accum 8"
for kind in 1f1b gpipe "interleaved --chunks 4" zb_h1; do
    simulate $deep --pipeline-schedule $kind
    eval "bubble_${kind%% *}=$(field bubble_ms 1) memory_${kind%% *}=$(field memory_gib 1)"
done
holds "the bubble of GPipe is that of 1F1B" "$bubble_gpipe > 0.999 * $bubble_1f1b && $bubble_gpipe < 1.001 * $bubble_1f1b"
holds "interleaved and zero bubbles are smaller" "$bubble_interleaved < $bubble_1f1b && $bubble_zb_h1 < $bubble_1f1b"
holds "GPipe keeps all micro-batches" "$memory_gpipe > $memory_1f1b"
simulate --model llama7b --gpus 64 --pipeline 4 --tensor 2 --accum 8 --batch-sizes 1 --strategies ddp,zero1
holds "ZeRO-1 shards states over the data axis of a stage" "$(field data 1) == 8 && $(field memory_gib 2) < $(field memory_gib 1)"
holds "both send along it" "$(field comm_bytes 1) > 0 && $(field comm_bytes 2) > 0"
across="--model llama7b --gpus 8 --pipeline 8 --accum 8 --batch-sizes 1 --strategies ddp"
simulate $across; within=$(field step_ms 1)
simulate $across --gpus-per-node 1
holds "stages on other nodes are slower" "$(field step_ms 1) > $within"

# --plan: its best is the best of all layouts, run one by one; what does not fit is not offered; twice the same.
small="--model gpt2 --gpus 2 --global-batch 4 --memory-gib 1.8"
: >"$tmp/each"
for axes in "1 1" "1 2" "2 1"; do
    tensor=${axes% *} pipeline=${axes#* } orders=1f1b kinds=ddp,zero1,full_shard rows="0"
    [ "$pipeline" -eq 1 ] || { orders="1f1b interleaved_2 interleaved_4 zb_h1"; kinds=ddp,zero1; }
    [ "$tensor" -eq 1 ] || rows="0 1"
    for order in $orders; do for batch in 1 2 4; do for again in 0 1; do for cut in $rows; do
        chunks=${order#interleaved_} && [ "$chunks" != "$order" ] || chunks=0
        more= && [ "$cut" -eq 0 ] || more=--sequence-parallel
        [ "$tensor$pipeline$batch" = 114 ] && continue # a replica has two samples
        "$build/simulate" $small --tensor "$tensor" --pipeline "$pipeline" --pipeline-schedule "${order%_[24]}" --chunks "$chunks" \
            --strategies $kinds --batch-sizes $batch --checkpointing $again $more --json "$tmp/rows" >"$tmp/out" 2>&1 && cat "$tmp/rows" >>"$tmp/each"
    done; done; done; done
done
best=$(grep '"fits": true' "$tmp/each" | sed 's/.*"tokens_per_second": \([^,]*\),.*/\1/' | sort -g | tail -1)
"$build/simulate" --plan $small >"$tmp/plan" 2>"$tmp/err"
chosen=$(awk '$NF == "best" { print $11 }' "$tmp/plan")
holds "--plan: the best of $(wc -l <"$tmp/each") layouts" "$chosen - $best < 1 && $best - $chosen < 1"
grep -q '"fits": false' "$tmp/each" && awk '$1 ~ /^[0-9]+$/ && $13 > 1.8 { exit 1 }' "$tmp/plan" && grep -q ', [1-9][0-9]* do not fit in 1.8 GiB' "$tmp/plan"
result "--plan: what does not fit is counted and not offered" $? "$tmp/plan"
awk '$1 ~ /^[0-9]+$/ { if ($10 + 0 < last) exit 1; last = $10 + 0 }' "$tmp/plan"
result "--plan: the fastest first" $? "$tmp/plan"
"$build/simulate" --plan $small | cmp -s - "$tmp/plan"
result "--plan: the same twice" $? "$tmp/plan"

# Links that cost nothing, and sanity.
simulate --strategies ddp,zero1,full_shard,hybrid_shard --gpus 1,8,64,1024 --cluster custom --network-gbps 1e15 --nvlink-gbs 1e15 --latency-us 0 --hbm-gbs 1e15
bent=$(sed 's/.*"efficiency": \([^,]*\),.*/\1/' "$tmp/rows" | awk '$1 < 99.999 || $1 > 100.001')
[ -z "$bent" ] && [ "$(wc -l <"$tmp/rows")" -eq 16 ]
result "infinite bandwidth: 100 % on any number of GPUs" $? "$tmp/rows"
simulate --gpus 8,16,64,256,1024 --strategies ddp --batch-sizes 2
falls=$(sed 's/.*"efficiency": \([^,]*\),.*/\1/' "$tmp/rows" | awk 'NR > 1 && $1 >= last { print } { last = $1 }')
[ -z "$falls" ]
result "efficiency falls with the number of GPUs" $? "$tmp/rows"
step() { simulate --gpus 64 --cluster a100 --strategies ddp --batch-sizes 2 "$@"; field step_ms 1; }
base=$(step)
holds "a slower network" "$(step --network-gbps 100) > $base"
holds "no overlap" "$(step --no-overlap) > $base"
holds "compute that collectives slow down" "$(step --slowdown 0.3) > $base"
holds "stragglers" "$(step --straggler 3) > $base"
holds "scores that are written" "$(step --attention scores) > $base"
holds "a loss in passes" "$(step --loss passes) > $base"
holds "checkpointing computes more" "$(step --checkpointing 1) > $base"
holds "accumulation pays for one exchange" "$(step --accum 4) < 4 * $base"
holds "half the bytes" "$(step --reduce-dtype bf16 --network-gbps 100) < $(step --network-gbps 100)"
holds "shards inside nodes on a slow network" "$(step --network-gbps 50 --strategies hybrid_shard) < $(step --network-gbps 50 --strategies full_shard)"
simulate --gpus 8,64 --strategies ddp --global-batch 512 --batch-sizes 16
holds "strong scaling: the same samples" "$(field accum 1) == 4 && $(field accum 2) == 1 && $(field batch 2) == 8"
simulate --gpus 8 --strategies ddp --measured-rate 100000
holds "calibrated compute" "$(field tokens_per_second 1) > 799000 && $(field tokens_per_second 1) < 801000"
simulate --model llama70b --gpus 8,512 --strategies ddp,full_shard --batch-sizes 1 --checkpointing 1
grep -q 'ddp .* does not fit' "$tmp/out" && grep -q '"fits": false' "$tmp/rows"
result "what does not fit says so" $? "$tmp/out"

# Without --batch-sizes: the largest power of two up to 64 that fits, with checkpointing only where none fits without.
fits() { sed -n 's/.*"fits": \([a-z]*\),.*/\1/p' "$tmp/rows"; }
largest() { # largest MODEL CLUSTER GPUS STRATEGY BATCH with|without: the choice, by hand from the table of --batch-sizes 1 to 64
    of="--model $1 --cluster $2 --gpus $3 --strategies $4"
    simulate $of
    grep -c 'with checkpointing$' "$tmp/out" >"$tmp/again"
    wrong=
    [ "$(fits)" = true ] && [ "$(field batch 1)" -eq "$5" ] || wrong="batch $(field batch 1), fits: $(fits)"
    case "$6$(cat "$tmp/again")" in with1 | without0) ;; *) wrong="$wrong, rows with checkpointing: $(cat "$tmp/again")" ;; esac
    again=
    [ "$6" = without ] || { again="--checkpointing 1"; simulate $of --batch-sizes 1; [ "$(fits)" = false ] || wrong="$wrong, one fits without"; }
    simulate $of --batch-sizes "$5" $again; [ "$(fits)" = true ] || wrong="$wrong, $5 does not fit"
    [ "$5" -eq 64 ] || { simulate $of --batch-sizes $((2 * $5)) $again; [ "$(fits)" = false ] || wrong="$wrong, $((2 * $5)) fits, too"; }
    echo "$wrong" >"$tmp/wrong"
    [ -z "$wrong" ]
    result "$1, $3 $2, $4: the batch that is chosen is the largest that fits, $5, $6 checkpointing" $? "$tmp/wrong"
}
largest gpt2 h100 8 ddp 64 without
largest gpt2 p100 8 ddp 32 without
largest llama8b h100 8 full_shard 1 without
largest llama8b v100 8 full_shard 1 with
largest llama70b h100 64 full_shard 2 with

# A row that does not fit names what would: that does, in this table too; with half of its GPUs, or without the
# checkpointing that it names, it would not.
named() { # named MODEL CLUSTER GPUS N HOW: ddp does not fit GPUS of them, full_shard on N does (0: nothing) HOW checkpointing
    simulate --model "$1" --cluster "$2" --gpus "$3" --strategies ddp
    also= given=0
    if [ "$5" = with ]; then also=" and checkpointing" given=1; fi
    case $4 in
        0) words=", and nothing up to 1024 GPUs does" ;;
        "$3") words="; full_shard with a batch of 1$also would" ;;
        *) words="; full_shard on $4 GPUs with a batch of 1$also would" ;;
    esac
    grep -q "does not fit$words\$" "$tmp/out"
    result "$1, $3 $2: does not fit$words" $? "$tmp/out"
    would="--model $1 --cluster $2 --strategies full_shard --batch-sizes 1"
    simulate $would --checkpointing $given --gpus $(($4 ? $4 : 1024))
    [ "$(fits)" = "$([ "$4" -eq 0 ] && echo false || echo true)" ]
    result "what it names is so" $? "$tmp/out"
    [ "$4" -le "$3" ] || { simulate $would --checkpointing 1 --gpus $(($4 / 2)); [ "$(fits)" = false ]; result "and half of these GPUs are too few" $? "$tmp/out"; }
    [ "$given" -eq 0 ] || { simulate $would --checkpointing 0 --gpus $(($4 ? $4 : 1024)); [ "$(fits)" = false ]; result "and without checkpointing it would not" $? "$tmp/out"; }
}
named llama8b h100 8 8 without
named llama8b v100 8 8 with
named llama70b h100 8 32 with
named llama8b p100 8 64 with
named llama70b v100 64 1024 with
named llama70b p100 8 0 with

# A model means the same here and in train_gpt.
for name in gpt2 gpt2_medium gpt2_large gpt2_xl; do
    seq=$("$build/train_gpt" --help | awk -v name=$name '$1 == name && NF == 8 { print $5 }')
    "$build/simulate" --model $name --gpus 8 --strategies ddp >"$tmp/out" 2>&1
    grep -q "^model    $name,.* ${seq:-none} tokens a sample" "$tmp/out"
    result "$name: $seq tokens a sample, in both programs" $? "$tmp/out"
done

RANK=3 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 "$build/simulate" --gpus 8 >"$tmp/out" 2>&1 && grep -q full_shard "$tmp/out"
result "one process, whatever a launcher says" $? "$tmp/out"

# Files.
"$build/simulate" --gpus 1,2,4,8,16,32,64,128,256,512,1024 --batch-sizes 4,16 --json "$tmp/rows" --svg "$tmp/svg" >"$tmp/out" 2>&1
grep -q 'GPUs</text>' "$tmp/svg" && grep -q 'full_shard, batch 16' "$tmp/svg" && [ "$(grep -c '<polyline' "$tmp/svg")" -eq 4 ]
result "the picture has axes, a legend and a line each" $? "$tmp/svg"
# Every text of a picture lies inside of it, as wide as a bold sans-serif may be, and so do the legend's lines.
inside() {
    awk -v RS='<' -v FS="'" -v of="$1" '
        function number(name,    at) { at = match($0, " " name "=.-?[0-9.]+"); return at ? substr($0, at + length(name) + 3) + 0 : 0 }
        /^svg/ { width = number("width"); height = number("height") }
        /^g / && match($0, /translate\([0-9 ]*/) { split(substr($0, RSTART + 10, RLENGTH - 10), place, " "); left = place[1]; top = place[2] }
        /^\/g/ { left = top = 0 }
        /^path d=.M[0-9]+ [0-9]+h28/ { if (top + substr($0, match($0, / [0-9]+h28/) + 1) + 0 > height) print "a line of the legend lies below" }
        /^text/ {
            text = $0; sub(/^[^>]*>/, "", text); gsub(/\n/, "", text)
            size = $0 ~ /font-size/ ? number("font-size") : 12
            wide = length(text) * size * 0.62; x = left + number("x"); y = top + number("y")
            texts++
            if ($0 ~ /rotate/) { split(substr($0, match($0, /translate/) + 10), place, /[ )]/); if (place[2] - wide / 2 < 0 || place[2] + wide / 2 > height) print "\"" text "\" is too long" ; next }
            if ($0 ~ /middle/) x -= wide / 2
            if ($0 ~ /anchor=.end/) x -= wide
            if (x < 0 || x + wide > width || y - size < 0 || y + 4 > height) print "\"" text "\" lies outside: " x " to " x + wide " of " width ", " y " of " height
        }
        END { if (texts < 5) print "there are no texts" }' "$1" >"$tmp/outside"
    [ ! -s "$tmp/outside" ]
    result "$2: nothing of the picture is cut off" $? "$tmp/outside"
}
inside "$tmp/svg" "two strategies"
all="ddp,zero1,shard_grad_op,full_shard,zero3,hybrid_shard"
"$build/simulate" --model llama8b --cluster v100 --gpus 8,64 --batch-sizes 1,2,4,8 --strategies $all --svg "$tmp/many" >"$tmp/out" 2>&1
inside "$tmp/many" "24 lines in the legend"
sed 's/>full_shard: does not fit</>full_shard, with so many words that the legend cannot hold them</' "$tmp/many" >"$tmp/wide"
bad_picture=$(passed=0; inside "$tmp/wide" "a name that is too long" | grep -c FAIL)
[ "$bad_picture" -eq 1 ]; result "a name that is too long is found" $?
if have python3; then
    python3 -c 'import json, sys; assert len([json.loads(l) for l in open(sys.argv[1])]) == 44' "$tmp/rows" 2>"$tmp/err"
    result "rows are JSON" $? "$tmp/err"
    python3 -c 'import sys, xml.dom.minidom as x; x.parse(sys.argv[1])' "$tmp/svg" 2>"$tmp/err"
    result "the picture is XML" $? "$tmp/err"
else skip "rows are JSON, the picture is XML" "no python3" 2; fi
cpu="--cluster cpu --strategies ddp --straggler 0"
: >"$tmp/measured"
for nodes in 1 2 4; do
    simulate $cpu --gpus $((2 * nodes)) --gpus-per-node 2 --network-gbps 10
    echo "{\"nodes\": $nodes, \"ranks\": $((2 * nodes)), \"gbps\": 10, \"step_ms\": $(field step_ms 1)}" >>"$tmp/measured"
done
"$build/simulate" $cpu --measured "$tmp/measured" >"$tmp/out" 2>&1
[ "$(grep -c ' [+-]0\.0' "$tmp/out")" -eq 3 ]
result "measured rows: its own predictions have no error" $? "$tmp/out"
"$build/simulate" --check tools/simulate/published.txt >"$tmp/out" 2>&1
result "published figures as recorded" $? "$tmp/out"
grep 'Megatron 512 GPUs, overlap' tools/simulate/published.txt | sed 's/| 76 | [0-9.]* |/| 76 | 70 |/' >"$tmp/changed"
"$build/simulate" --check "$tmp/changed" >"$tmp/out" 2>&1
[ $? -eq 1 ] && grep -q 'NOT AS RECORDED' "$tmp/out"
result "a figure that moved fails the check" $? "$tmp/out"
"$build/simulate" --help >"$tmp/out" 2>&1 && grep -q 'llama70b' "$tmp/out" && grep -q 'DGX-2' "$tmp/out"
result "--help has models and clusters" $? "$tmp/out"

# Bad input.
refused "unknown model" "gpt9.*no model" --model gpt9
refused "unknown cluster" "b200.*no cluster" --cluster b200
refused "unknown strategy" "zero9.*several.*of: ddp" --strategies ddp,zero9
refused "unknown flag" "--gpu\"" --gpu 8
refused "flag without value" "--gpus needs" --gpus
refused "a list with a hole" "--gpus is \"\"" --gpus 8,,16
refused "zero GPUs" "--gpus is \"0\"" --gpus 0
refused "a fraction" "whole number" --batch-sizes 1.5
refused "a node and a half" "12: expected at most 8, or whole nodes of 8" --gpus 8,12
refused "GPUs that the axis does not divide" "tensor 3 .* does not divide the 8 ranks" --gpus 8 --tensor 3
refused "nodes that it does not divide" "tensor is 3, on nodes of 8" --gpus 24 --tensor 3
refused "more ranks than heads of keys" "1.attn.qkv.*4 parts.*8 ranks" --gpus 8 --tensor 8 --model qwen7b
refused "GPUs that a pipeline does not divide" "tensor 1 x --pipeline 3 does not divide the 8" --gpus 8 --pipeline 3 --accum 8 --strategies ddp
refused "a pipeline that gathers" "ddp and zero1, not with full_shard" --gpus 8 --pipeline 2 --strategies full_shard
refused "more stages than units" "16 stages.* 14 units" --gpus 16 --pipeline 16 --strategies ddp --batch-sizes 1
refused "a plan without a batch" "needs one number of --gpus, and --global-batch" --plan --gpus 8
refused "a plan as JSON" "--plan writes a table alone: leave --json out" --plan --gpus 8 --global-batch 64 --json "$tmp/x"
refused "a plan of pictures" "no transformer" --plan --gpus 8 --global-batch 64 --model vgg16
refused "a plan that fits nowhere" "no layout of llama70b fits 8 GPUs" --plan --gpus 8 --global-batch 64 --model llama70b --cluster v100
refused "a pipeline of pictures" "vgg16.*no transformer" --gpus 8 --pipeline 2 --model vgg16
refused "rows that it does not divide" "1023 rows.*--tensor 2" --gpus 8 --tensor 2 --sequence-parallel --seq 1023 --batch-sizes 1
refused "nothing to cut" "vgg16.*no transformer" --gpus 8 --tensor 2 --model vgg16
refused "global batch" "512.*3 GPUs do not divide" --gpus 3 --global-batch 512
refused "a rate that communication forbids" "leaves .* at most" --gpus 8 --cluster p100 --measured-rate 1e9
refused "more checkpoints than blocks" "12 blocks" --checkpointing 13
refused "a combination the library refuses" "hierarchical|node_size" --hierarchical --strategies zero3 --gpus 8
refused "no such file to check" "nowhere" --check "$tmp/nowhere"
echo '{"nodes": 1}' >"$tmp/measured"
refused "measured rows without step_ms" "line 1: expected" --measured "$tmp/measured"
echo 'name | | | 1' >"$tmp/changed"
refused "published rows without fields" "9 fields" --check "$tmp/changed"
refused "a file that cannot be written" "nowhere/x" --gpus 8 --json "$tmp/nowhere/x"
finish
