#!/bin/sh
# Runs that are killed, stopped and started again, as a user has them: train_gpt comes to the parameters of a run that
# nobody disturbed, whatever hit it: kill -9, SIGSTOP, SIGTERM, a kill at any system call of a save, a damaged
# checkpoint. SOAK_SECONDS (5) of random ones; DTRAIN_TEST_FULL=1: every system call.
. tests/support/shell.sh
full=${DTRAIN_TEST_FULL:-0}
cp dtrain.h "$tmp/data"
gpt="$build/train_gpt --data $tmp/data --layers 1 --heads 2 --channels 16 --seq 16 --batch 2 --warmup 2 --eval-batches 0 --sample 0 --ranks 2 --threads 1 --timeout 10 --deterministic"
hash_of() { sed -n 's/.*parameters  *\([0-9a-f]\{16\}\) .*/\1/p' "$1" | tail -n 1; }
# same NAME: the run in $tmp/out came to the parameters $expected
same() {
    [ -n "$expected" ] && [ "$(hash_of "$tmp/out")" = "$expected" ]
    result "$1" $? "$tmp/out"
}
ranks_of() { for id in $(pgrep -P "$1"); do echo "$id"; done; } # of the launcher

# ---- the same bits, however often it was stopped ----
$gpt --steps 30 >"$tmp/out" 2>&1
expected=$(hash_of "$tmp/out")
for strategy in ddp zero1 full_shard; do
    dir=$tmp/resume_$strategy
    $gpt --strategy $strategy --steps 30 --checkpoint "$dir" --save-every 10 >/dev/null 2>&1
    rm -r "$dir"/step-*20 "$dir"/step-*30
    $gpt --strategy $strategy --steps 30 --checkpoint "$dir" --resume auto --save-every 10 >"$tmp/out" 2>&1
    same "$strategy: 10 steps, saved, 20 more"
done
dir=$tmp/again
$gpt --steps 30 --checkpoint "$dir" --save-every 10 --keep 9 >/dev/null 2>&1
rm -r "$dir"/step-000000000030
$gpt --steps 30 --checkpoint "$dir" --resume auto --strategy zero3 >"$tmp/out" 2>&1
same "saved by ddp, gone on with zero3"
grep -q 'saved by 2 ranks of ddp, resharded to 2 of zero3' "$tmp/out"
result "and it says so" $? "$tmp/out"
$gpt --steps 30 --resume "$dir/step-000000000010" --strategy full_shard >"$tmp/out" 2>&1
same "one checkpoint by its path"
good "three ranks go on from two" 'saved by 2 ranks of ddp, resharded to 3 of full_shard' \
    $gpt --ranks 3 --steps 34 --resume "$dir/step-000000000010" --strategy full_shard
if [ "$full" != 0 ]; then
    many="$gpt --global-batch 64 --batch 1 --steps 6 --timeout 60"
    good "64 ranks save" "step" $many --ranks 64 --strategy zero1 --checkpoint "$tmp/many" --steps 3
    good "8 ranks go on" 'saved by 64 ranks of zero1, resharded to 8 of full_shard' \
        $many --ranks 8 --strategy full_shard --resume auto --checkpoint "$tmp/many"
    good "64 ranks go on" 'saved by 8 ranks of full_shard, resharded to 64 of ddp' \
        $many --ranks 64 --steps 8 --resume "$tmp/many/step-000000000006"
fi

# ---- what has changed is said, what cannot be meant is refused ----
base=$gpt
changed=$tmp/changed
$base --steps 4 --checkpoint "$changed" >/dev/null 2>&1
cp "$tmp/data" "$tmp/data2"
$base --steps 8 --resume "$changed" >"$tmp/out" 2>&1
grep -q -x '        of other settings: --steps was 4 and is 8' "$tmp/out"; result "more steps" $? "$tmp/out"
$base --steps 4 --resume "$changed" >"$tmp/out" 2>&1
! grep -q ' was .* and is ' "$tmp/out"; result "nothing has changed, and nothing is said" $? "$tmp/out"
for changes in "--seed 2|--seed was 1337 and is 2" "--data $tmp/data2|--data was $tmp/data and is $tmp/data2" \
    "--batch 4|--global-batch was 4 and is 8" "--ranks 1|--global-batch was 4 and is 2" "--lr 0.5|--lr was 0.002 and is 0.5, --min-lr was 0.0002 and is 0.05" \
    "--precision bf16 --clip 2|--clip was 1 and is 2, --precision was fp32 and is bf16" "--dropout 0.5|--dropout was 0 and is 0.5"; do
    good "${changes%%|*}" "${changes#*|}" $base --steps 6 --resume "$changed" ${changes%%|*}
done
good "an old seed stays" 'the order of data and dropout stay with the old --seed' $base --steps 6 --resume "$changed" --seed 2
bad "AdamW's moments are not Lion's" 'does not fit this run: missing in it: lion.*of other settings: .*--optimizer was adamw and is lion' $base --steps 6 --resume "$changed" --optimizer lion
! grep -q '`' "$tmp/err"; result "and no advice that the program cannot take" $? "$tmp/err"
bad "other heads" 'of another model: --heads was 2 and is 4' $base --steps 6 --resume "$changed" --heads 4
bad "another vocabulary under the same padding" 'of another model: --vocab was 257 and is 300' \
    sh -c "$gpt --vocab 257 --steps 2 --checkpoint '$tmp/padded' >/dev/null 2>&1; exec $gpt --vocab 300 --steps 4 --resume '$tmp/padded'"
write="$build/train_gpt --threads 1 --layers 1 --channels 16 --seq 16 --resume $changed --generate 4"
good "text from a checkpoint" 'generated' $write --heads 2
bad "with other heads" 'of another model: --heads was 2 and is 1' $write --heads 1
bad "with another activation and epsilon" '--activation was gelu_new and is relu, --norm-epsilon was 1e-05 and is 0.01' $write --heads 2 --activation relu --norm-epsilon 0.01

# ---- the same of ResNet, whose running averages are no parameters of the optimizer ----
images="$build/resnet_cifar --threads 1 --ranks 2 --batch 4 --timeout 20 --deterministic"
mkdir "$tmp/cifar"
for file in data_batch_1 data_batch_2 data_batch_3 data_batch_4 data_batch_5 test_batch; do
    for image in 0 1 2 3 4 5 6 7; do printf "\\$image"; head -c 3072 dtrain.h; done >"$tmp/cifar/$file.bin"
done
images="$images --data $tmp/cifar"
for flags in "--steps 12" "--steps 12 --strategy full_shard --sync-batchnorm" "--steps 6 --accum 2 --precision bf16 --strategy zero1"; do
    dir=$tmp/images
    rm -rf "$dir"
    $images $flags >"$tmp/out" 2>&1
    expected=$(hash_of "$tmp/out") accuracy=$(grep '%$\|% ' "$tmp/out" | awk '/^ *[0-9]+ +[0-9]+ +0/ { last = $5 } END { print last }')
    $images $flags --checkpoint "$dir" --save-every 2 --keep 9 >/dev/null 2>&1
    for step in "$dir"/step-*; do case $step in *2) ;; *) rm -r "$step" ;; esac; done
    rm -rf "$dir"/step-*12
    $images $flags --checkpoint "$dir" --resume auto >"$tmp/out" 2>&1
    same "resnet_cifar $flags: 2 steps, saved, the rest"
    [ -n "$accuracy" ] && awk '/^ *[0-9]+ +[0-9]+ +0/ { last = $5 } END { print last }' "$tmp/out" | grep -q -x "$accuracy"
    result "and its test accuracy" $? "$tmp/out"
done
good "resnet_cifar, saved by one strategy" "over 2 steps" $images --steps 2 --schedule constant --checkpoint "$tmp/other"
good "gone on with by another" 'saved by 2 ranks of ddp, resharded to 3 of zero3' \
    $images --ranks 3 --steps 3 --schedule constant --strategy zero3 --resume "$tmp/other"
$images --steps 60 --workers 2 >"$tmp/out" 2>&1
expected=$(hash_of "$tmp/out")
rm -rf "$tmp/hit"
$images --steps 60 --workers 2 --checkpoint "$tmp/hit" --save-every 3 --restarts 3 >"$tmp/out" 2>&1 &
launcher=$!
wait_for 60 test -e "$tmp/hit/latest"
kill -KILL "$(ranks_of $launcher | tail -n 1)"
wait $launcher
grep -q 'restart 1 of 3' "$tmp/out"
result "resnet_cifar, kill -9: started again" $? "$tmp/out"
same "and it comes to the same end"

# ---- signals ----
long="$gpt --steps 1500 --save-every 100"
$gpt --steps 1500 >"$tmp/out" 2>&1
expected=$(hash_of "$tmp/out")
# hit NAME SIGNAL WHOM [FLAGS]: the signal comes to the launcher, or to one rank, when the first checkpoint is there
hit() {
    name=$1 signal=$2 whom=$3; shift 3
    rm -rf "$tmp/hit"
    $long --checkpoint "$tmp/hit" "$@" >"$tmp/out" 2>&1 &
    launcher=$!
    wait_for 60 test -e "$tmp/hit/latest"
    id=$launcher
    [ "$whom" = launcher ] || id=$(ranks_of $launcher | tail -n 1)
    kill -"$signal" "$id"
    wait $launcher
    status=$?
}
for number in TERM INT HUP; do
    for whom in launcher rank; do
        hit "$number" $number $whom
        [ $status -eq 0 ] && grep -q 'stopped by a signal, as asked, after step [0-9]* of 1500; saved in .*: the same command with --resume auto goes on' "$tmp/out" &&
            { [ $whom = rank ] || grep -q "info: asked to stop by signal .*SIG$number.: ranks end after their step" "$tmp/out"; }
        result "$number to the $whom: saved, and status 0" $? "$tmp/out"
        $long --checkpoint "$tmp/hit" --resume auto >"$tmp/out" 2>&1
        same "and gone on with"
    done
done
rm -rf "$tmp/hit"
nohup $long --checkpoint "$tmp/hit" >"$tmp/out" 2>&1 &
launcher=$!
wait_for 60 test -e "$tmp/hit/latest"
kill -HUP $launcher $(ranks_of $launcher)
wait $launcher && ! grep -q 'stop' "$tmp/out"
result "HUP under nohup: nothing happens" $? "$tmp/out"
same "and it comes to its end"
hit "TERM" TERM rank --stop-status 143 --restarts 3
[ $status -eq 143 ] && grep -q 'stopped by a signal' "$tmp/out"
result "TERM to the rank: saved, and the status that was asked for" $? "$tmp/out"
hit "kill -9" KILL rank --restarts 3
[ $status -eq 0 ] && grep -q 'restart 1 of 3 in 1.0 s: rank 1 was killed by signal 9' "$tmp/out"
result "kill -9 of a rank: started again" $? "$tmp/out"
same "and it comes to the same end"
hit "SIGSTOP" STOP rank --restarts 3
[ $status -eq 0 ] && grep -q 'restart 1 of 3' "$tmp/out"
result "a stopped rank: started again" $? "$tmp/out"
same "and it comes to the same end"
hit "kill -9 of all" KILL launcher
nothing_left >"$tmp/log" 2>&1
result "kill -9 of the launcher: nothing is left" $? "$tmp/log"
$long --checkpoint "$tmp/hit" --resume auto >"$tmp/out" 2>&1
same "and another run goes on"

# ---- a disk that is full: a run whose last save fails is no success, and says what is lost ----
# on_full FLAGS: a run on a disk that takes no file above 8 blocks; $status
on_full() { (trap '' XFSZ; ulimit -f 8; exec $gpt "$@") >"$tmp/out" 2>&1 & launcher=$!; }
# lost NAME PATTERN: the run ended with an error that says so, and nothing of what a success says
lost() {
    wait $launcher
    status=$?
    [ $status -ne 0 ] && [ $status -lt 128 ] && grep -q -E -e "the checkpoint of step [0-9]+ was not saved: .*File too large; $2.*lost" "$tmp/out" &&
        ! grep -q -E 'resume auto goes on|the last of step -1' "$tmp/out"
    result "$1" $? "$tmp/out"
}
for blocking in "" --save-blocking; do
    rm -rf "$tmp/full"
    on_full --steps 6 --checkpoint "$tmp/full" $blocking
    lost "the one save of a run fails $blocking" "this run has saved nothing"
    on_full --steps 6 --checkpoint "$tmp/full" $blocking --save-every 2
    lost "three saves of a run fail $blocking" "this run has saved nothing"
    on_full --steps 100000 --checkpoint "$tmp/full" $blocking --log "$tmp/full/log" --stop-status 7
    wait_for 60 grep -q -a '^{"step"' "$tmp/full/log"
    kill -TERM $launcher
    lost "the save before a stop fails $blocking" "this run has saved nothing"
    [ $status -ne 7 ]; result "and its status is not that of a stop $blocking" $?
done

# ---- one history ----
dir=$tmp/history
$gpt --steps 40 --checkpoint "$dir" --save-every 10 --keep 9 >/dev/null 2>&1
bad "another run in a used directory" "newest of step 40.*resume auto, another --checkpoint, --set-aside" \
    $gpt --steps 40 --checkpoint "$dir"
bad_lines=9 bad "nor is it gone on with after a restart" "newest of step 40.*resume auto" \
    $gpt --steps 40 --checkpoint "$dir" --restarts 1
cp -r "$dir" "$tmp/whole"
cp -r "$dir" "$tmp/back"
rm -r "$tmp"/back/step-*[34]0
$long --checkpoint "$tmp/back" --resume auto >"$tmp/out" 2>&1
expected=$(hash_of "$tmp/out")
# until_killed FILE COMMAND...: a rank is killed when FILE is there; the run ends by itself
until_killed() {
    file=$1; shift
    "$@" >"$tmp/out" 2>&1 &
    launcher=$!
    wait_for 60 test -e "$file"
    kill -KILL "$(ranks_of $launcher | tail -n 1)"
    wait $launcher
    grep -q 'restart 1 of 3' "$tmp/out"
}
until_killed "$dir/aside-1" $long --checkpoint "$dir" --resume "$dir/step-000000000020" --restarts 3
result "back to step 20, and a rank is killed: started again" $? "$tmp/out"
same "and not from what was left behind"
[ "$(echo "$dir"/aside-1/*)" = "$(echo "$dir"/aside-1/step-0000000000[34]0)" ]
result "which was set aside" $?
$gpt --steps 1500 >"$tmp/out" 2>&1
expected=$(hash_of "$tmp/out")
for start in "" "$build/dtrain-run --nproc 2 --restarts 3"; do
    dir=$tmp/anew
    rm -rf "$dir" && cp -r "$tmp/whole" "$dir"
    if [ -n "$start" ]; then until_killed "$dir/new/latest" $start $long --checkpoint "$dir/new"
    else until_killed "$dir/aside-1" $long --checkpoint "$dir" --set-aside --restarts 3; fi
    result "a run of its own, and a rank is killed: started again${start:+ by dtrain-run}" $? "$tmp/out"
    same "and it goes on with its own"
done

# ---- a save is killed at a system call ----
if have strace; then
    dir=$tmp/kill
    eight="$gpt --steps 8 --schedule constant"
    $gpt --steps 4 --schedule constant --checkpoint "$dir" >/dev/null 2>&1
    cp -r "$dir" "$tmp/kill_before"
    $eight >"$tmp/out" 2>&1
    expected=$(hash_of "$tmp/out")
    bad_ends=0 times=0
    for call in pwrite64 fsync rename mkdir unlink; do
        n=1
        while :; do
            rm -rf "$dir"; cp -r "$tmp/kill_before" "$dir"
            strace -f -qq -o "$tmp/trace" -e trace=$call -e inject=$call:signal=KILL:when=$n \
                $eight --checkpoint "$dir" --resume auto --save-blocking >"$tmp/strace" 2>&1
            times=$((times + 1))
            $eight --checkpoint "$dir" --resume auto >"$tmp/out" 2>&1
            if [ "$(hash_of "$tmp/out")" != "$expected" ]; then
                bad_ends=$((bad_ends + 1))
                echo "killed at $call $n:"; cat "$tmp/out"
            fi
            grep -q 'killed by SIGKILL' "$tmp/trace" || break
            if [ "$full" != 0 ]; then n=$((n + 1)); else n=$((n * 2 + 1)); fi
        done
    done
    [ $bad_ends -eq 0 ] && [ $times -gt 8 ]
    result "killed at $times places of a save, by system calls: a run goes on from each" $?
else skip "a save killed at system calls" "strace is not installed"; fi

# ---- random hits ----
soak="$gpt --steps 12000"
$soak >"$tmp/out" 2>&1
expected=$(hash_of "$tmp/out")
dir=$tmp/soak
end=$(($(date +%s) + ${SOAK_SECONDS:-5})) hits=0 runs=0 wrong=0
while [ "$(date +%s)" -lt $((end + 60)) ]; do # the last run ends undisturbed
    $soak --save-every 500 --checkpoint "$dir" --resume auto --restarts 20 >"$tmp/out" 2>&1 &
    launcher=$!
    while [ "$(date +%s)" -lt $end ] && kill -0 $launcher 2>/dev/null; do
        draw=$(od -An -N2 -tu2 /dev/urandom); draw=$((draw))
        sleep "0.$((draw % 7 + 3))"
        id=$(ranks_of $launcher | sed -n "$((draw % 2 + 1))p")
        case $((draw / 8 % 4)) in
            0) kill -KILL ${id:-$launcher} ;;
            1) [ -z "$id" ] || { kill -STOP "$id"; sleep 0.2; kill -CONT "$id"; } ;;
            2) kill -TERM ${id:-$launcher} ;;
            3) kill -KILL $launcher ;;
        esac 2>/dev/null
        hits=$((hits + 1))
    done
    wait $launcher
    [ -n "$(hash_of "$tmp/out")" ] && ! grep -q 'stopped by a signal' "$tmp/out" || continue
    runs=$((runs + 1)) # a whole one
    [ "$(hash_of "$tmp/out")" = "$expected" ] || { wrong=$((wrong + 1)); cp "$tmp/out" "$tmp/wrong"; }
    rm -rf "$dir"
    [ "$(date +%s)" -lt $end ] || break
done 2>/dev/null
[ $hits -gt 0 ] && [ $runs -gt 0 ] && [ $wrong -eq 0 ] && [ -n "$expected" ]
result "$hits random kills, stops and requests to stop in $runs runs: all come to the same end" $? "$tmp/wrong"

# ---- started without descriptors 0 to 2: what is printed goes into no file ----
"$build/resume" "$tmp/undisturbed" >"$tmp/out" 2>&1
last=$(tail -n 1 "$tmp/out")
head -c 20000 dtrain.h >"$tmp/text"
small="$build/train_gpt --data $tmp/text --layers 1 --heads 2 --channels 16 --seq 16 --batch 2 --eval-batches 1 --sample 20 --threads 1 --deterministic"
$small --ranks 2 --steps 4 >"$tmp/out" 2>&1
expected=$(hash_of "$tmp/out")
for closed in '<&-' '>&-' '2>&-' '<&- >&-' '<&- 2>&-' '>&- 2>&-' '<&- >&- 2>&-'; do
    dir=$tmp/closed
    rm -rf "$dir" && mkdir "$dir"
    (eval "exec $closed"; exec "$build/resume" "$dir/program") >"$tmp/out" 2>&1 </dev/null
    good "$closed: a program's checkpoints are whole" "begin at step 150" "$build/resume" "$dir/program"
    [ "$(tail -n 1 "$tmp/out")" = "$last" ] && ! grep -r -q -a "ranks begin" "$dir"; result "$closed: with the same parameters" $? "$tmp/out"
    (eval "exec $closed"
     exec $small --ranks 2 --steps 4 --checkpoint "$dir/gpt" --log "$dir/log" --prometheus "$dir/run.prom" \
         --tensorboard "$dir/board" --trace "$dir/trace.json" --config-out "$dir/config") >"$tmp/out" 2>&1 </dev/null
    result "$closed: train_gpt ends well" $? "$tmp/out"
    $small --ranks 2 --steps 4 --checkpoint "$dir/gpt" --resume auto >"$tmp/out" 2>&1
    same "$closed: its checkpoint is whole"
    [ "$(grep -c '^{"step": .*}$' "$dir/log") $(wc -l <"$dir/log")" = "4 6" ] &&
        ! grep -q -v -E '^(# (HELP|TYPE) )?dtrain_' "$dir/run.prom" && ! grep -q -v -E '^(#|$)|^[a-z0-9-]+ = ' "$dir/config" &&
        ! grep -r -q -a 'validation loss' "$dir" && "$build/trace" show "$dir"/trace.rank*.json >/dev/null
    result "$closed: so are log, metrics, trace and flags" $? "$dir/log"
    (eval "exec $closed"; exec "$build/report" "$dir/page.html" "$dir/log") >/dev/null 2>&1 </dev/null
    head -c 9 "$dir/page.html" | grep -q '<!DOCTYPE' && tail -n 1 "$dir/page.html" | grep -q '</html>'
    result "$closed: so is a page about it" $?
done

# ---- a request to stop in a validation that takes long: it ends with the batch under way, and the step is saved ----
"$build/train_gpt" --data dtrain.h --layers 4 --heads 4 --channels 128 --seq 64 --batch 1 --steps 3 --ranks 2 --threads 1 --sample 0 --val-split 0.9 \
    --eval-every 1 --eval-batches 1000000000 --checkpoint "$tmp/validated" --log "$tmp/validated.log" >"$tmp/out" 2>&1 &
launcher=$!
wait_for 60 grep -q 'a rank will need' "$tmp/out"
sleep 1
kill -TERM $launcher
wait $launcher
status=$?
[ $status -eq 0 ] && grep -q 'stopped by a signal, as asked, after step 1 of 3; saved in' "$tmp/out" && ! grep -q '"val_loss": [0-9]' "$tmp/validated.log"
result "asked to stop in a validation" $? "$tmp/out"

# ---- what cannot be ----
good "the example" "3 ranks end at step 150" "$build/resume" "$tmp/example"
good "the example again" "3 ranks begin at step 150" "$build/resume" "$tmp/example"
bad "--save-every without a directory" "does nothing without --checkpoint" $gpt --save-every 5
bad "--resume auto without a directory" "looks into --checkpoint DIR" $gpt --resume auto
bad "--resume of nothing" "$tmp/none" $gpt --resume "$tmp/none" --steps 2
for file in "$tmp"/example/step-*/state-00000.safetensors; do truncate -s -1 "$file"; done
bad_lines=20 bad "the example, with all checkpoints damaged" "no checkpoint in .* can be read" "$build/resume" "$tmp/example"
bad "a directory that cannot be" "cannot be made: Not a directory" $gpt --steps 2 --checkpoint "$tmp/out/none"
bad "another model" "does not fit this run.*of another shape" $gpt --channels 32 --resume "$tmp/again/step-000000000010" --steps 12
finish
