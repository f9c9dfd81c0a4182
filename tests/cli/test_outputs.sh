#!/bin/sh
# What a program writes, and reads by name: what cannot be written is refused before the first step, a model that cannot
# be exported after the last one is kept in another place, a pipe that nobody writes to is no reason to wait, and a
# planted link is not followed.
. tests/support/shell.sh
[ -e "$build/train_gpt" ] || make -s BUILD="$build" "$build/train_gpt" || exit 1
root=$PWD
case $build in /*) ;; *) build=$PWD/$build ;; esac
cp README.md "$tmp/text"
cd "$tmp" || exit 1
tiny="$build/train_gpt --layers 1 --channels 32 --heads 2 --seq 16 --batch 2 --sample 0 --eval-batches 0 --data text"

# ---- before the first step ----
mkdir sub; : >sub/file; mkdir -p busy/config.json
good "folders of an export, a log and a trace are made" 'exported +new/folder/model.safetensors' \
    $tiny --steps 2 --export new/folder/model.safetensors --log logs/a/log.jsonl \
    --trace traces/t.json --config-out configs/c --prometheus prom/p.prom
for file in new/folder/model.safetensors new/folder/config.json logs/a/log.jsonl traces/t.rank0.json \
    traces/t.rank1.json configs/c prom/p.prom; do
    [ -s $file ] || echo $file
done >missing
[ ! -s missing ]; result "and hold what was asked for" $? missing
for flag in export log trace config-out prometheus; do
    for place in sub/file/x.bin /proc/none/x.bin sub; do
        bad "--$flag $place" "^train_gpt: --$flag.* $place.* cannot be written: .*(director|Permission)" \
            $tiny --steps 1000000 --$flag $place
    done
done
bad "a folder in the place of config.json" 'busy/config.json cannot be written: Is a directory' \
    $tiny --steps 1000000 --export busy/model.safetensors
[ ! -e busy/model.safetensors ] && [ -z "$(find . -name '*.tmp')" ]; result "probes leave nothing behind" $?
$tiny --dry-run --export later/m.bin --log later/log >/dev/null 2>&1
[ ! -e later ]; result "--dry-run makes no folder" $?
printf old >sub/m.bin
bad "a run that is refused" '--keep does nothing' $tiny --keep 2 --export sub/m.bin
[ "$(cat sub/m.bin)" = old ]; result "leaves the old file" $?

# ---- after the last step ----
# lost FLAGS...: trains, and the folder of --export becomes a file meanwhile; longer until that is in time
lost() {
    for steps in 300 3000 30000 300000; do
        rm -rf gone moved log kept-*; mkdir gone
        $tiny --steps $steps --log log --export gone/model.safetensors "$@" >out 2>err &
        run=$!
        begun() { [ -s log ]; }
        wait_for 60 begun
        mv gone moved; : >gone
        wait $run; status=$?
        [ -e moved/model.safetensors ] || return 0
    done
    return 1
}
kept() { sed -n 's/.*--export gone\/model.safetensors: .*; the weights are in \([^ ]*\) instead.*/\1/p' err; }
for kind in "1 ddp" "3 full_shard"; do
    set -- $kind
    lost --ranks "$1" --strategy "$2" --checkpoint "kept-$2"
    [ $status -eq 1 ] && [ -n "$(kept)" ] && [ "$(dirname "$(dirname "$(kept)")")" = "kept-$2" ]
    result "an export that fails, $2: the weights are with the checkpoints, and it says so" $? err
    good "they are whole, $2" 'exported' $build/train_gpt --steps 0 --import "$(kept)" --export again.safetensors
    $build/train_gpt --steps 0 --resume "kept-$2" --layers 1 --channels 32 --heads 2 --seq 16 \
        --export of_checkpoint.safetensors >/dev/null 2>err2
    cmp again.safetensors of_checkpoint.safetensors >diff 2>&1; result "the bits of the last checkpoint" $? diff
done
lost; [ $status -eq 1 ] && [ "$(dirname "$(dirname "$(kept)")")" = . ] && [ -s "$(kept)" ]
result "without checkpoints: in the working folder" $? err
[ -s "$(dirname "$(kept)")/config.json" ]; result "with its config.json" $?

# ---- what is read ----
mkfifo fifo
mkdir fifos && mkfifo fifos/tokenizer.json fifos/model.safetensors fifos/vocab.json
bad "--config of a pipe" "^train_gpt: --config: fifo: it is a pipe, and nobody writes to it" $tiny --config fifo
bad "--tokenizer of a pipe" "pipe, and nobody writes to it|no regular file" $tiny --tokenizer fifos
bad "--tokenizer that is a pipe" "pipe, and nobody writes to it|no regular file" $tiny --tokenizer fifo
bad "--data of a pipe" "no regular file" $tiny --data fifo
for from in fifo fifos; do
    bad "--import of $from" "pipe, and nobody writes to it|no regular file|cannot be read" $tiny --import $from
done
mkdir other && mkfifo other/config.json && cp new/folder/model.safetensors other
bad "a pipe beside the weights" "config.json cannot be read: it is a pipe, and nobody writes to it" $tiny --import other
bad "--resume of a pipe" "fifo" $tiny --resume fifo
for tool in report trace flight; do [ -e "$build/$tool" ] || make -s -C "$root" BUILD="$build" "$build/$tool"; done
mkdir flights && mkfifo flights/flight-0.json
bad "report of a pipe" "^fifo cannot be read: it is a pipe, and nobody writes to it" "$build/report" page.html fifo
bad "trace of a pipe" "^fifo cannot be read: it is a pipe, and nobody writes to it" "$build/trace" show fifo
bad "flight of a pipe" "flight-0.json cannot be read" "$build/flight" flights
echo 'lr = 1e-4' >lines
$tiny --dry-run --config /dev/fd/3 3<lines >out 2>err && grep -q '^lr = 0.0001$' out
result "a configuration through a descriptor" $? err
{ sleep 1; cat lines; } | $tiny --dry-run --config /dev/stdin >out 2>err && grep -q '^lr = 0.0001$' out
result "and of a pipe that is written late" $? err

# ---- links that somebody has planted ----
printf keep >victim
for name in flags checkpoints/config victim.bin p.prom; do mkdir -p checkpoints; done
ln -s ../victim checkpoints/config.tmp
ln -s victim flags.tmp
ln -s victim m.bin.tmp
ln -s victim p.prom.next
ln -s victim model.safetensors.tmp
good "links in the place of temporary files" 'exported' $tiny --steps 2 --checkpoint checkpoints --config-out flags --export m.bin --prometheus p.prom
good "also of a model of Hugging Face" 'exported' $tiny --steps 2 --export model.safetensors
[ "$(cat victim)" = keep ] && [ -s checkpoints/config ] && [ -s flags ] && [ -s m.bin ] && [ -s p.prom ] && [ -s model.safetensors ]
result "are not followed" $?

# ---- a file system without locks ----
printf '#include <errno.h>\nint flock(int f, int how) { (void)f, (void)how; errno = ENOSYS; return -1; }\n' >no_flock.c
if ${CC:-cc} -shared -fPIC no_flock.c -o no_flock.so 2>/dev/null; then
    rm -rf checkpoints
    bad "checkpoints without locks" "checkpoints is on a file system without locks \(flock: Function not implemented\).* DTRAIN_NO_LOCK=1 if only one" \
        env LD_PRELOAD="$tmp/no_flock.so" $tiny --steps 2 --checkpoint checkpoints
    good "are kept where that is asked for" 'validation|loss' env LD_PRELOAD="$tmp/no_flock.so" DTRAIN_NO_LOCK=1 $tiny --steps 4 --checkpoint checkpoints --save-every 1
    [ -s checkpoints/latest ]; result "and are there" $?
else skip "a file system without locks" "there is no compiler" 3; fi

# ---- names that a terminal would obey ----
esc=$(printf '\033]0;owned\a')
# clean NAME COMMAND...: fails, and prints no control character but line ends
clean() {
    name=$1; shift
    timeout 300 "$@" >out 2>&1; status=$?
    [ $status -ne 0 ] && [ $status -lt 124 ] && [ -s out ] && ! LC_ALL=C grep -q "$(printf '[\001-\010\013-\037\177\302\233]')" out
    result "no escape sequence: $name" $? out
}
clean "a flag" $tiny "--$esc" 1
clean "a value" $tiny --strategy "$esc"
clean "a file of data" $tiny --data "/none/$esc"
clean "a file of flags" $tiny --config "/none/$esc"
clean "an export" $tiny --export "/proc/none/$esc/x.bin"
clean "a checkpoint" $tiny --resume "$esc"
clean "an address" env MASTER_ADDR="$esc" MASTER_PORT=1 RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 $tiny --timeout 1
clean "a log" "$build/report" page.html "/none/$esc"
clean "a trace" "$build/trace" show "/none/$esc"
clean "a folder of dumps" "$build/flight" "/none/$esc"
printf 'lr%s = 1\n' "$esc" >bad_config; clean "a key of a configuration" $tiny --config bad_config
printf 'data = "%s"\n' "$esc" >bad_config; clean "a value of a configuration" $tiny --config bad_config
printf 'lr = 1e-3\n# \302\233 \n' >bad_config; clean "a comment of a configuration" $tiny --config bad_config
mkdir tok
printf '{"model":{"type":"%s"}}' "$(printf '\\u001b]0;owned\\u0007\\nnext')" >tok/tokenizer.json
clean "a tokenizer" $tiny --tokenizer tok
mkdir hf; cp new/folder/model.safetensors hf
printf '{"model_type":"%s"}' "$(printf '\\u001b]0;owned\\u0007')" >hf/config.json
clean "config.json of a model" $tiny --import hf
printf '{"activation_function":"%s"}' "$esc" >hf/config.json; clean "a byte in config.json" $tiny --import hf
printf '[\n{"ph":"X","pid":0,"tid":1,"name":"\\u001b]0;owned\\u0007\\nline","cat":"comm","ts":1,"dur":5,"args":{"of":"\\u001b[2J"}},\n' >bad_trace
"$build/trace" show bad_trace >out 2>&1; ! LC_ALL=C grep -q "$(printf '[\001-\010\013-\037\177]')" out
result "no escape sequence: names in a trace" $? out
$tiny --data straße_日本.txt >out 2>&1; grep -q "straße_日本.txt cannot be opened" out
result "UTF-8 stays as it is" $? out
finish
