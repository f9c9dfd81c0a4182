#!/bin/sh
# Configuration files: what --config reads is what the flags say, flags win, what is wrong is named with its file and
# line, and what train_gpt writes beside its checkpoints leads to the same run again.
. tests/support/shell.sh
bad_lines=1
head -c 20000 dtrain.h >"$tmp/two words.txt"
flags="--layers 1 --heads 2 --channels 16 --seq 16 --batch 2 --steps 4 --warmup 2 --eval-batches 0 --sample 0 --ranks 2 --threads 1"
cat >"$tmp/run.conf" <<END
# the same as the flags above
layers = 1      # blocks
heads=2
  channels   =   16
seq = 16
batch = 2
steps = 4
warmup = 2
eval-batches = 0
sample = 0
ranks = 2
threads = 1
deterministic = 1
data = "$tmp/two words.txt"
END
hash_of() { sed -n 's/.*parameters  *\([0-9a-f]\{16\}\) .*/\1/p' "$tmp/out"; }
# same NAME HASH: the last run came to these parameters
same() { [ -n "$2" ] && [ "$(hash_of)" = "$2" ]; result "$1" $? "$tmp/out"; }
good "flags" "bit-identical" "$build/train_gpt" $flags --deterministic --data "$tmp/two words.txt"
plain=$(hash_of)
! grep -q "^note" "$tmp/out"; result "fp32 needs no note" $? "$tmp/out"
good "fp16 on a cpu: what it costs" "^note .*fp16 gains nothing on this cpu" "$build/train_gpt" $flags --precision fp16 --data "$tmp/two words.txt"
good "a file" "bit-identical" "$build/train_gpt" --config "$tmp/run.conf" --checkpoint "$tmp/run"
same "a file says the same" "$plain"
good "flags beside a file" "over 3 steps" "$build/train_gpt" --steps 3 --config "$tmp/run.conf" --deterministic=0
[ -z "$(hash_of)" ]; result "a switch of the file is turned off" $? "$tmp/out"
good "flags win, whatever their place" "over 3 steps" "$build/train_gpt" --config="$tmp/run.conf" --steps=3

# The resolved configuration: presets are written out, and reading it again changes nothing.
for line in "model = tiny" "layers = 1" "lr = 0.002" "min-lr = 0.0002" "vocab = 256" "graph = 0" "strategy = ddp" "topk-ratio = 0.01" \
    "data = \"$tmp/two words.txt\"" "checkpoint = $tmp/run"; do
    grep -q -x -F -e "$line" "$tmp/run/config"; result "resolved: $line" $? "$tmp/run/config"
done
! grep -q '^config\|^accum =\|^memory-limit' "$tmp/run/config"; result "resolved: nothing that was not chosen" $? "$tmp/run/config"
good "resolved, given back" "bit-identical" "$build/train_gpt" --config "$tmp/run/config" --checkpoint "$tmp/again"
same "to the same end" "$plain"
sed "s,^checkpoint = .*,checkpoint = $tmp/again," "$tmp/run/config" >"$tmp/expected"
cmp -s "$tmp/expected" "$tmp/again/config"; result "and written as it was" $? "$tmp/again/config"

# wrong NAME PATTERN LINE...: a file of these lines is refused
wrong() {
    name=$1 pattern=$2; shift 2
    printf '%s\n' "$@" >"$tmp/wrong.conf"
    bad "$name" "$pattern" "$build/train_gpt" --config "$tmp/wrong.conf"
}
wrong "a misspelt key" 'wrong.conf:2: unknown key "layer"; did you mean layers\?$' "# one" "layer = 2"
wrong "two letters in each other's place" 'unknown key "bacth"; did you mean batch\?$' "bacth = 2"
wrong "a key like no other" 'unknown key "frobnicate"; keys are the flags that --help lists' "frobnicate = 2"
wrong "no key" 'wrong.conf:1: "layers 2" is not of the form key = value$' "layers 2"
wrong "no value" 'wrong.conf:1: layers needs a value$' "layers = # 2"
wrong "a value out of range" 'wrong.conf:1: --layers is "0"; it takes a number from 1' "layers = 0"
wrong "a word that is none" 'wrong.conf:1: --strategy is "fsdp"; it takes one of: ddp' "strategy = fsdp"
long=$(printf '%2000s' | tr ' ' x)
wrong "a word without end" "wrong.conf:1: --strategy is \"x{60}\"; it takes one of: ddp" "strategy = $long"
wrong "a number without end" "wrong.conf:1: --layers is \"x{60}\"; it takes a number" "layers = $long"
wrong "a switch without end" "wrong.conf:1: --graph is \"x{60}\"; it takes 0 or 1" "graph = $long"
wrong "a switch" 'wrong.conf:1: --graph is "yes"; it takes 0 or 1$' "graph = yes"
wrong "a key twice" 'wrong.conf:3: seed was already set in line 1$' "seed = 1" "" "seed = 1"
wrong "a quote that does not end" 'wrong.conf:1: data needs a value$' 'data = "x'
wrong "a file in a file" 'wrong.conf:1: a file cannot name another one$' "config = $tmp/run.conf"
wrong "what would do nothing" 'topk-ratio does nothing without --compression topk' "topk-ratio = 0.1"
bad "no file" "none: No such file" "$build/train_gpt" --config "$tmp/none"
bad "a folder" "--config: .*" "$build/train_gpt" --config "$tmp"
printf 'seed = 1\0\n' >"$tmp/zero.conf"
bad "a byte 0" "zero.conf is not a text" "$build/train_gpt" --config "$tmp/zero.conf"
printf '\357\273\277lr = 0.125\n' >"$tmp/marked"
"$build/train_gpt" --dry-run --config "$tmp/marked" >"$tmp/out" 2>&1 && grep -q '^lr = 0.125$' "$tmp/out"
result "a file that begins with a byte order mark" $? "$tmp/out"
bad "a rate of 0" '^train_gpt: --lr is 0; it takes a learning rate above 0$' "$build/train_gpt" --lr 0
bad "a field that is a flag" '^train_gpt: --strategy hybrid_shard: --node-size 3 does not divide 4 ranks' "$build/train_gpt" \
    --strategy hybrid_shard --ranks 4 --node-size 3
bad "another" 'train_gpt: --strategy ddp: --warmup-ratio is 0.001' "$build/train_gpt" --warmup-ratio 0.001 \
    --compression topk --compression-warmup 5 --topk-ratio 0.1
small_text="--data README.md --channels 64 --heads 2 --seq 64 --batch 4 --steps 1 --eval-batches 0 --sample 0 --ranks 1"
for blocks in 1 8; do
    "$build/train_gpt" $small_text --layers $blocks --activation-checkpointing 1 >"$tmp/out" 2>"$tmp/err"
    if [ $blocks -eq 1 ]; then grep -q 'activation-checkpointing 1 saves no memory .* MiB a rank with it' "$tmp/err"
    else [ ! -s "$tmp/err" ]; fi
    result "recomputing $blocks of $blocks blocks: said where it saves nothing" $? "$tmp/err"
done
for program in train_gpt resnet_cifar report trace flight simulate dtrain-run; do
    [ -x "$build/$program" ] || continue # make test does not build the simulator
    for flag in --help -h --version; do
        case $flag in --version) said="^$program of dtrain [0-9]+\\.[0-9]+" ;; *) said='^examples$' ;; esac
        good "$program $flag" "$said" "$build/$program" $flag
        [ ! -s "$tmp/err" ]; result "on standard output" $? "$tmp/err"
    done
done
good "dtrain-run: the flags of a program are its own" "^train_gpt of dtrain" "$build/dtrain-run" --nproc 1 "$build/train_gpt" --version
for steps in 39 40 110 199 200 1000; do
    "$build/train_gpt" --layers 1 --channels 32 --heads 2 --seq 16 --batch 1 \
        --ranks 1 --eval-batches 0 --sample 0 --steps $steps --log "$tmp/rows.jsonl" --data README.md >"$tmp/out" 2>&1
    rows=$(grep -c -E '^ +[0-9]+ +[0-9.]+ ' "$tmp/out")
    [ "$rows" -ge 20 ] && [ "$rows" -le 40 ] && [ "$(grep -c '^{"step"' "$tmp/rows.jsonl")" -eq $steps ]
    result "$steps steps: $rows lines, and all in the log" $? "$tmp/out"
done
bad "a misspelt flag" 'unknown flag "--layer"; did you mean --layers\? --help lists them' "$build/train_gpt" --layer 2
bad "a flag without end" 'unknown flag "--x{58}"; --help lists them' "$build/train_gpt" "--$long"
bad "a flag like no other" 'unknown flag "--frobnicate"; --help lists them' "$build/train_gpt" --frobnicate=2

# The other program reads the same switches in the same way.
resnet="$build/resnet_cifar"
printf '# few\nranks = 1\nthreads=1\nbatch = 8 # images\nsteps = 9\nsync-batchnorm = 1\n' >"$tmp/images.conf"
good "resnet_cifar, a file, and a flag that wins" "1 ranks x 8 images" $resnet --config "$tmp/images.conf" --steps 1
grep -q '^    1       1 ' "$tmp/out"; result "resnet_cifar, one step" $? "$tmp/out"
echo "stratgy = ddp" >"$tmp/wrong.conf"
bad "resnet_cifar, a misspelt key" 'wrong.conf:1: unknown key "stratgy"; did you mean strategy\?' $resnet --config "$tmp/wrong.conf"
printf '\nbatch 8\n' >"$tmp/wrong.conf"
bad "resnet_cifar, no key" 'wrong.conf:2: "batch 8" is not of the form key = value' $resnet --config "$tmp/wrong.conf"
echo "batch = x" >"$tmp/wrong.conf"
bad "resnet_cifar, no number" 'wrong.conf:1: --batch is "x"' $resnet --config "$tmp/wrong.conf"
bad "resnet_cifar, a misspelt flag" 'did you mean --batch\?' $resnet --bacth 8
bad "resnet_cifar, no file" '--config: .*none: No such file' $resnet --config "$tmp/none"
bad "resnet_cifar, one image" 'batch is 1; normalising' $resnet --batch 1
bad "resnet_cifar, two lengths of a run" 'steps and --epochs: use one of them' $resnet --steps 3 --epochs 1
echo "dry-run = 1" >"$tmp/wrong.conf"
bad "what is no switch of a file" 'wrong.conf:1: --dry-run belongs on the command line' $resnet --config "$tmp/wrong.conf"
bad "no such cluster" 'cluster is "h1000", which is none' $resnet --dry-run --cluster h1000
bad "a cluster without a forecast" 'cluster does nothing without --dry-run' $resnet --cluster h100
bad "a forecast of no training" 'dry-run does nothing with --generate' "$build/train_gpt" --generate 5 --dry-run
bad "a log of no training" 'prometheus does nothing with --steps 0' "$build/train_gpt" --steps 0 --prometheus "$tmp/none.prom" --import README.md
bad "two questions" 'dry-run and --tune: use one after the other' $resnet --dry-run --tune
bad "what --tune was once" 'tune-gemm needs a GPU' "$build/train_gpt" --tune-gemm
for line in "--save-every 3:save-every does nothing without --checkpoint" "--topk-ratio 0.1:topk-ratio does nothing without --compression" \
    "--optimizer muon --strategy zero1:muon needs whole matrices" "--min-lr 0.1:min-lr does nothing with --schedule steps" \
    "--offload all:offload needs a GPU" "--strategy hybrid_shard:strategy hybrid_shard: .*set --node-size" "--global-batch 7:global-batch: .*nearest"; do
    bad "resnet_cifar ${line%%:*}" "${line#*:}" $resnet ${line%%:*} --steps 1
done

# --dry-run: what it prints is the run, as a file; nothing is written, and hardly any memory is needed.
gpt="$build/train_gpt $flags"
good "dry run" '^# step .* ms predicted: products' $gpt --data "$tmp/two words.txt" --deterministic --checkpoint "$tmp/dry" --dry-run
cp "$tmp/out" "$tmp/dry.conf"
[ ! -e "$tmp/dry" ]; result "dry run, makes no directory" $? "$tmp/out"
good "dry run, its output is a file of flags" "bit-identical" "$build/train_gpt" --config "$tmp/dry.conf"
same "of the same run" "$plain"
sed 's/^checkpoint = .*//' "$tmp/dry/config" | grep -v '^#' >"$tmp/written"
sed 's/^checkpoint = .*//' "$tmp/dry.conf" | grep -v '^#' | grep -v '^$' >"$tmp/printed"
grep -v '^$' "$tmp/written" | cmp -s - "$tmp/printed"; result "dry run, every flag as the run has it" $? "$tmp/printed"
good "dry run, --config-out" "predicted" $gpt --dry-run --config-out "$tmp/out.conf"
good "resnet_cifar, dry run" "exposed ms" $resnet --batch 4 --dry-run
cp "$tmp/out" "$tmp/images.conf"
good "resnet_cifar, its output is a file of flags" "1 ranks x 4 images" $resnet --config "$tmp/images.conf" --ranks 1 --steps 1
# memory PROGRAM FLAGS...: the memory of a dry run, by class, is what the run itself says, but for the process
memory() {
    name="$*"
    "$@" --dry-run 2>&1 | sed -n 's/^# memory .*: \(parameters.*\), workspace [0-9.]*\(.*\)/\1\2/p' >"$tmp/planned"
    "$@" 2>&1 | sed -n 's/^memory .*: \(parameters.*\), workspace [0-9.]*\(.*\)/\1\2/p' >"$tmp/made"
    [ -s "$tmp/planned" ] && cmp -s "$tmp/planned" "$tmp/made"
    result "dry run, memory: ${name#"$build"/}" $? "$tmp/planned"
}
for strategy in ddp zero1 full_shard "hybrid_shard --node-size 2"; do
    memory "$build/train_gpt" --steps 1 --eval-batches 0 --sample 0 --ranks 4 --strategy $strategy
done
memory "$build/train_gpt" --steps 1 --eval-batches 0 --sample 0 --ranks 1 --precision bf16 --accum 2 --activation-checkpointing 1
memory "$build/resnet_cifar" --steps 1 --batch 4 --ranks 2 --strategy shard_grad_op --sync-batchnorm
# a checkpoint that is saved in the background: each rank holds what it writes
memory "$build/train_gpt" --steps 1 --eval-batches 0 --sample 0 --ranks 2 --strategy zero1 --checkpoint "$tmp/held"
written=$(cat "$tmp"/held/step-*/*.safetensors | wc -c)
awk -v written="$written" '{ kept = $NF * 1048576 * 2; exit !(kept > 0.95 * written && kept < 1.05 * written) }' "$tmp/planned"
result "dry run, memory: the snapshot is what is written" $? "$tmp/planned"
memory "$build/resnet_cifar" --steps 1 --batch 4 --ranks 2 --compression topk
# The table that docs/zero.svg draws.
for strategy in ddp zero1 shard_grad_op full_shard; do
    "$build/train_gpt" --model gpt2 --ranks 8 --batch 1 --strategy $strategy --dry-run 2>&1 |
        sed -n 's/.*: parameters \(.*\), gradients \(.*\), optimizer \(.*\), buffers \(.*\), activations.*/\1 | \2 | \3 | \4/p'
done >"$tmp/planned"
sed -n '/^| GPT-2 124M on 8 ranks/,/^$/s/^| [A-Z].*[1)DP] | \([0-9].*\) |$/\1/p' docs/ddp-or-fsdp.md | cmp -s - "$tmp/planned" && [ "$(wc -l <"$tmp/planned")" -eq 4 ]
result "dry run, memory: docs/ddp-or-fsdp.md has that of GPT-2" $? "$tmp/planned"
big="$build/train_gpt --model gpt2_xl --ranks 64 --strategy full_shard --dry-run"
(ulimit -v 4000000; timeout 300 $big) >"$tmp/out" 2>&1
grep -q '64 ranks here need .* would not fit' "$tmp/out" && grep -q '^# *64 .*<- this run' "$tmp/out" && grep -q '^# *512 ' "$tmp/out"
result "dry run, 1558 M parameters on 64 ranks in 4 GB of addresses" $? "$tmp/out"
good "dry run on a cluster" '^# assumed  *all rates, of h100' "$build/train_gpt" --model gpt2 --ranks 16 --dry-run --cluster h100
good "dry run, a limit" 'memory-limit is 10 MiB a rank: would not fit' "$build/train_gpt" --model tiny --dry-run --memory-limit 10
good "dry run, given links" '^# given .* nodes of 2 ranks, 1 Gb/s and 50 us' "$build/train_gpt" --dry-run --emulate 2x2:1:50
bad "dry run, a refusal" "muon needs whole matrices" "$build/train_gpt" --dry-run --optimizer muon --strategy zero1

# A run with a limit says what the limit covers, and keeps to it.
good "a limit, in the end" '^  library memory .*, of --memory-limit [0-9]*: what dtrain holds for the model; program, data and scratch of kernels are not in it' \
    "$build/train_gpt" --model tiny --ranks 4 --batch 2 --steps 2 --eval-batches 0 --sample 0 --strategy auto --memory-limit 14
awk '/^  library memory/ { held = $3 > 7 && $3 <= 14 && $13 == "14:" } END { exit !held }' "$tmp/out"
result "and is kept to" $? "$tmp/out"

# --tune: what does not fit is not tried, what is given stays, and the choice is a file of flags.
for ranks in 1 2 4; do
    good "tune, $ranks ranks" ' chosen$' $gpt --ranks $ranks --batch 2 --tune --data "$tmp/two words.txt" --config-out "$tmp/tuned.conf"
    [ "$(grep -c ' chosen$' "$tmp/out")" -eq 1 ] && grep -q -x 'batch = 2' "$tmp/tuned.conf"
    result "tune, $ranks ranks: one is chosen, and what was given stays" $? "$tmp/out"
done
good "tuned, a run with it" "over 4 steps" "$build/train_gpt" --config "$tmp/tuned.conf"
small="$build/train_gpt --layers 2 --channels 32 --heads 2 --seq 32 --ranks 2 --threads 1"
good "tune, a limit" 'ddp .* would not fit: 15 MiB a rank are the limit' "$build/train_gpt" --model tiny --batch 1 --ranks 2 --threads 1 --tune --memory-limit 15
awk '/ chosen$/ { fits = $7 < 15 } END { exit !fits }' "$tmp/out"
result "tune, what is chosen fits" $? "$tmp/out"
good "tune, a global batch" ' chosen$' $small --tune --global-batch 8 --strategy ddp --bucket-kib 100
[ "$(sed -n 's/^batch = //p;s/^global-batch = //p' "$tmp/out" | tail -n 1)" = 8 ] &&
    awk '/^# ddp/ { if ($3 * $4 != 4) exit 1 }' "$tmp/out"
result "tune, every candidate has the global batch" $? "$tmp/out"
good "tune, refusals are rows" 'zero1 .* refused: .*whole matrices' $small --tune --optimizer muon --batch 1
bad_lines=1
bad "tune, nothing fits" "no candidate could be measured" $small --channels 256 --tune --memory-limit 1
bad "tune, a global batch that cannot be shared" "global-batch: .* nearest that can is 6" $small --tune --global-batch 7
finish
