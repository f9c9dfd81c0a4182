#!/bin/sh
# What a program writes, and reads by name: what cannot be written is refused before the first step, a model that cannot
# be exported after the last one is kept in another place, a pipe that nobody writes to is no reason to wait, and a
# planted link is not followed.
. tests/support/shell.sh
[ -e "$build/train_gpt" ] || make -s BUILD="$build" "$build/train_gpt" || exit 1
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
finish
