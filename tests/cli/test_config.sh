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
wrong "a switch" 'wrong.conf:1: --graph is "yes"; it takes 0 or 1$' "graph = yes"
wrong "a key twice" 'wrong.conf:3: seed was already set in line 1$' "seed = 1" "" "seed = 1"
wrong "a quote that does not end" 'wrong.conf:1: data needs a value$' 'data = "x'
wrong "a file in a file" 'wrong.conf:1: a file cannot name another one$' "config = $tmp/run.conf"
wrong "what would do nothing" 'topk-ratio does nothing without --compression topk' "topk-ratio = 0.1"
bad "no file" "none: No such file" "$build/train_gpt" --config "$tmp/none"
bad "a folder" "--config: .*" "$build/train_gpt" --config "$tmp"
printf 'seed = 1\0\n' >"$tmp/zero.conf"
bad "a byte 0" "zero.conf is not a text" "$build/train_gpt" --config "$tmp/zero.conf"
bad "a misspelt flag" 'unknown flag "--layer"; did you mean --layers\? --help lists them' "$build/train_gpt" --layer 2
bad "a flag like no other" 'unknown flag "--frobnicate"; --help lists them' "$build/train_gpt" --frobnicate=2

# The example has a reader of its own.
resnet="$build/resnet_cifar"
printf '# few\nranks = 1\nthreads=1\nbatch = 8 # images\nsteps = 9\nsync-batchnorm = 1\n' >"$tmp/images.conf"
good "resnet_cifar, a file, and a flag that wins" "1 ranks x 8 images" $resnet --config "$tmp/images.conf" --steps 1
grep -q '^    1       1 ' "$tmp/out"; result "resnet_cifar, one step" $? "$tmp/out"
echo "stratgy = ddp" >"$tmp/wrong.conf"
bad "resnet_cifar, a misspelt key" 'wrong.conf:1: the flag "--stratgy" .* did you mean --strategy\?' $resnet --config "$tmp/wrong.conf"
printf '\nbatch 8\n' >"$tmp/wrong.conf"
bad "resnet_cifar, no key" 'wrong.conf:2: expected key = value' $resnet --config "$tmp/wrong.conf"
echo "batch = x" >"$tmp/wrong.conf"
bad "resnet_cifar, no number" 'wrong.conf:1: --batch is "x"' $resnet --config "$tmp/wrong.conf"
bad "resnet_cifar, a misspelt flag" 'did you mean --batch\?' $resnet --bacth 8
bad "resnet_cifar, no file" 'cannot read ".*none"' $resnet --config "$tmp/none"
finish
