#!/bin/sh
# build/dtrain-run: ranks on one node and on several, what they print, how they fail, signals, restarts from a
# checkpoint with the bits of an undisturbed run, and that nothing is left behind. Oracles: shells as ranks, whose
# environment and end are known; train_gpt's own ranks.
. tests/support/shell.sh
take_ports
run=$build/dtrain-run
gpt="$build/train_gpt --layers 1 --heads 2 --channels 16 --seq 16 --batch 2 --warmup 2 --eval-batches 2 --sample 0 --threads 1 --timeout 20"
nodes="--nnodes 2 --master 127.0.0.1:$port --timeout 15"

# is NAME STATUS PATTERN COMMAND...: ends with this status, and prints a line with PATTERN
is() {
    name=$1 want=$2 pattern=$3; shift 3
    timeout 300 "$@" >"$tmp/out" 2>&1
    got=$?
    [ $got -eq "$want" ] && grep -q -E -e "$pattern" "$tmp/out"
    ok=$?
    [ $ok -eq 0 ] || echo "status $got" >>"$tmp/out"
    result "$name" $ok "$tmp/out"
}
# two NAME STATUS PATTERN FLAGS... -- COMMAND...: the same on two nodes of two ranks; both end with this status
two() {
    name=$1 want=$2 pattern=$3; shift 3
    timeout 300 $run $nodes --node-rank 1 --nproc 2 "$@" >"$tmp/1.out" 2>&1 & other=$!
    timeout 300 $run $nodes --node-rank 0 --nproc 2 "$@" >"$tmp/0.out" 2>&1
    zero=$?
    wait $other
    one=$?
    [ $zero -eq "$want" ] && [ $one -eq "$want" ] && cat "$tmp/0.out" "$tmp/1.out" | grep -q -E -e "$pattern"
    ok=$?
    { cat "$tmp/0.out"; echo "status $zero, on node 1:"; cat "$tmp/1.out"; echo "status $one"; } >"$tmp/out"
    result "$name" $ok "$tmp/out"
}

# ---- What ranks are told, and what they print ----
for n in 1 3 8 64; do
    $run --nproc $n sh -c 'echo "$DTRAIN_RANK of $DTRAIN_WORLD_SIZE, $DTRAIN_LOCAL_RANK of $DTRAIN_LOCAL_SIZE at $DTRAIN_MASTER_ADDR, $DTRAIN_RESTART_COUNT"' >"$tmp/out" 2>&1
    status=$?
    for r in $(seq 0 $((n - 1))); do
        [ $r -eq 0 ] || printf '[rank %d] ' $r
        echo "$r of $n, $r of $n at 127.0.0.1, 0"
    done | sort >"$tmp/expected"
    sort "$tmp/out" | cmp -s - "$tmp/expected" && [ $status -eq 0 ]
    result "$n ranks know who they are" $? "$tmp/out"
done
is "a line comes whole, and one without its end" 0 '^\[rank 1\] half$' $run --nproc 2 sh -c '[ $DTRAIN_RANK = 0 ] || { printf ha; sleep 0.1; printf lf; }'
is "8000 letters without an end are cut" 0 '^\[rank 1\] x{4096}$' $run --nproc 2 sh -c '[ $DTRAIN_RANK = 0 ] || head -c 8000 /dev/zero | tr "\0" x'
is "standard input is rank 0's" 0 '^a word$' sh -c "echo a word | $run --nproc 2 sh -c 'cat'"
is "--nproc_per_node, --nproc=, --" 0 '2 3' $run --nproc_per_node 2 --nproc=3 -- sh -c 'echo $DTRAIN_RANK $DTRAIN_WORLD_SIZE'
is "variables of a TrainJob" 0 '^node 0 of 2$' env PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=2 $run sh -c '[ $DTRAIN_RANK = 1 ] || echo node $DTRAIN_RANK of $DTRAIN_WORLD_SIZE'
is "a dry run" 0 'DTRAIN_RANK=5 DTRAIN_WORLD_SIZE=6 DTRAIN_LOCAL_RANK=1 DTRAIN_LOCAL_SIZE=2 DTRAIN_MASTER_ADDR=::1 DTRAIN_MASTER_PORT=200 .* what it is' \
    env JOB_COMPLETION_INDEX=2 $run --dry-run --nproc 2 --nnodes 3 --master '[::1]:100' echo what it is
is "--restarts counts on from the launcher around it" 0 '^4$' env TORCHELASTIC_RESTART_COUNT=4 $run sh -c 'echo $DTRAIN_RESTART_COUNT'
is "--log-dir: rank 0 is shown too" 0 '^out 0$' $run --nproc 3 --log-dir "$tmp/logs" sh -c 'echo out $DTRAIN_RANK; echo err $DTRAIN_RANK >&2'
grep -q 'out 2' "$tmp/logs/rank-2.log" && grep -q 'err 2' "$tmp/logs/rank-2.log" && grep -q 'err 0' "$tmp/logs/rank-0.log" && ! grep -q 1 "$tmp/out"
result "--log-dir: a file a rank" $? "$tmp/out"

# ---- What it refuses ----
bad "no program" "no program to start" $run --nproc 2
bad "unknown flag" "did you mean --nproc" $run --nprc 2 true
bad "--nproc 0" '"0"; it takes' $run --nproc 0 true
bad "a range of nodes" 'PET_NNODES is "1:4"' env PET_NNODES=1:4 $run true
bad "nodes without a number" "give --node-rank" $run --nnodes 2 --master a true
bad "nodes without a place" "give --master HOST" $run --nnodes 2 --node-rank 0 true
bad "a node too many" "node rank 2 with 2 nodes" $run --nnodes 2 --node-rank 2 --master a true
bad "too many ranks" "more than 256" $run --nnodes 16 --nproc 17 --node-rank 0 --master a true
bad "a port that is none" 'port "x"' $run --nnodes 2 --node-rank 0 --master a:x true
is "no such program: a shell's status" 127 "rank 0 cannot be started: .*No such file" $run --nproc 2 --restarts 9 "$tmp/nowhere"
is "a program that is none: a shell's status" 126 "rank 0 cannot be started: .*Permission denied" $run --nproc 2 --restarts 9 "$tmp"
bad "logs nowhere" "cannot be written" $run --log-dir /proc/nowhere true

# ---- Failures and signals ----
fails='[ $DTRAIN_RANK != 1 ] || { echo the reason >&2; exit 7; }; sleep 30'
is "the status of the rank that fails" 7 'rank 1 of 3 .* ended with exit status 7' $run --grace 0.6 --nproc 3 sh -c "$fails"
grep -q '    | the reason' "$tmp/out"; result "its last lines are shown" $? "$tmp/out"
is "its last lines come from its file" 7 '    \| the reason' $run --grace 0.6 --nproc 3 --log-dir "$tmp/logs" sh -c "$fails"
is "a rank that is killed: 128 + signal" 139 'rank 2 of 3 .* killed by signal 11 \(SIGSEGV' $run --grace 0.6 --nproc 3 sh -c '[ $DTRAIN_RANK != 2 ] || kill -SEGV $$; sleep 30'
is "a rank that ignores SIGTERM is killed after the grace period" 3 'exit status 3' $run --nproc 2 --grace 0.3 sh -c '[ $DTRAIN_RANK != 1 ] || exit 3; trap "" TERM; while :; do sleep 1; done'
is "the sentence in its error file" 5 'its error: the "cause", \?$' $run --nproc 2 --grace 0.6 sh -c '
    [ $DTRAIN_RANK != 1 ] || { echo "{\"message\": {\"message\": \"the \\\"cause\\\", \\u00e9\", \"extraInfo\": {}}}" >$TORCHELASTIC_ERROR_FILE; exit 5; }; sleep 30'
is "the cause, although others end before it" 6 'rank 2 of 3 .* exit status 6' $run --nproc 3 sh -c '
    [ $DTRAIN_RANK = 2 ] || { echo "{\"message\": \"rank 2 is gone\"}" >$TORCHELASTIC_ERROR_FILE; exit 1; }; sleep 0.1; exit 6'

# signalled NAME STATUS SIGNAL PATTERN COMMAND...: dtrain-run gets the signal when both ranks have said "ready"
signalled() {
    name=$1 want=$2 number=$3 pattern=$4; shift 4
    : >"$tmp/out" # what the test before has said is no answer
    "$@" >"$tmp/out" 2>&1 &
    launcher=$!
    wait_for 60 sh -c "[ \$(grep -c ready '$tmp/out') -eq 2 ]"
    kill "-$number" $launcher
    wait $launcher
    status=$?
    [ $status -eq "$want" ] && grep -q -E -e "$pattern" "$tmp/out"
    ok=$?
    [ $ok -eq 0 ] || echo "status $status" >>"$tmp/out"
    result "$name" $ok "$tmp/out"
}
sleeper='trap "echo heard; exit 0" TERM USR1 HUP; trap "echo heard" USR2; echo ready; while :; do sleep 0.05; done'
for number in TERM USR1 HUP; do signalled "SIG$number reaches ranks, which end well" 0 $number '\[rank 1\] heard' $run --nproc 2 sh -c "$sleeper"; done
signalled "SIGINT ends ranks that do not handle it" 130 INT 'signal 2 \(SIGINT\)' $run --nproc 2 --restarts 3 perl -e '$| = 1; print "ready\n"; sleep 60'
signalled "after a request to stop and the grace period ranks are killed" 137 TERM 'SIGKILL' $run --nproc 2 --grace 0.3 sh -c 'trap "" TERM; echo ready; while :; do sleep 1; done'
is "a rank that stays stopped when the others have ended is killed and named" 137 'rank 1 of 2 .*was stopped by signal 19 for .* while others ended' $run --nproc 2 --timeout 0.5 sh -c '[ $DTRAIN_RANK = 0 ] || kill -STOP $$'
is "a rank that is stopped and goes on is waited for" 0 'went on' $run --nproc 2 --timeout 20 sh -c '[ $DTRAIN_RANK = 0 ] || { (while sleep 0.5; do kill -CONT $$ || exit; done) & kill -STOP $$; echo went on; }'
: >"$tmp/out"
$run --nproc 2 sh -c 'sleep 600 & echo ready; sleep 600' >"$tmp/out" 2>&1 &
launcher=$!
wait_line 60 'rank 1. ready' "$tmp/out"
kill -9 $launcher
wait $launcher 2>/dev/null
nothing_left; result "kill -9 of dtrain-run leaves nothing" $? "$tmp/out"
is "what ranks leave behind ends with the run" 0 done $run --nproc 2 sh -c 'sleep 600 & echo done'
nothing_left; result "and is gone" $?
if [ "$(id -u)" = 0 ] && unshare --pid --fork --mount-proc true 2>/dev/null; then
    # The first process of a container: orphans are its children, and a signal has no default action.
    is "PID 1: reaps orphans, passes TERM on" 0 '^zombies 0$' unshare --pid --fork --mount-proc sh -c "
        exec $run --nproc 1 sh -c '(sleep 0.05 &); (sleep 0.05 &); sleep 0.4
            zombies() { grep -l \"^State:.Z\" /proc/[0-9]*/status 2>/dev/null | wc -l; }
            looks=200; while [ \$(zombies) != 0 ] && [ \$looks -gt 0 ]; do looks=\$((looks - 1)); sleep 0.1; done
            echo zombies \$(zombies)
            trap \"exit 0\" TERM; echo ready; kill -TERM 1; while :; do sleep 0.05; done'"
else skip "PID 1" "needs root and unshare"; fi

# ---- Restarts ----
is "a restart, with its number" 0 '^attempt 1$' $run --nproc 2 --restarts 1 sh -c '[ $DTRAIN_RANK = 1 ] || echo attempt $DTRAIN_RESTART_COUNT; [ $DTRAIN_RESTART_COUNT = 1 ] || exit 4'
is "a wrong command line is not restarted" 2 'not restarted: exit status 2 before the first step' $run --nproc 2 --restarts 9 sh -c 'exit 2'
$gpt --ranks 2 --steps 2 --data README.md --checkpoint "$tmp/used" >/dev/null 2>&1
is "nor is a run whose directory of checkpoints is another run's" 2 'not restarted: exit status 2 before the first step' $run --nproc 2 --restarts 9 $gpt --steps 2 --data README.md --checkpoint "$tmp/used"
is "a crash loop ends with the rank's status" 4 'crash loop: 1 restart in a row made no progress' $run --nproc 2 --restarts 1 --log-dir "$tmp/logs" sh -c 'exit 4'
$run --nproc 1 --restarts 9 sh -c 'exit 4' >"$tmp/out" 2>&1 &
launcher=$!
wait_for 60 grep -q 'restart 2 of 9 in 2.0 s' "$tmp/out"
kill $launcher
wait $launcher
[ $? -eq 143 ] && ! grep -q 'restart 3' "$tmp/out"
result "TERM in the wait before a restart ends the run" $? "$tmp/out"
is "--min-ranks: two ranks are given up, and not one more" 4 'crash loop: 5 restarts' $run --nproc 4 --restarts 5 --min-ranks 2 --grace 0.2 sh -c 'echo "$DTRAIN_RANK of $DTRAIN_WORLD_SIZE"; exit 4'
[ "$(grep -c '^0 of 4$' "$tmp/out")" -eq 2 ] && [ "$(grep -c '^0 of 3$' "$tmp/out")" -eq 1 ] && [ "$(grep -c '^0 of 2$' "$tmp/out")" -eq 3 ]; result "after one restart of all" $? "$tmp/out"
[ -e "$tmp/logs/attempt-1/rank-1.log" ]; result "a restart has logs of its own" $?

long="$gpt --ranks 2 --global-batch 8 --steps 600 --save-every 100 --resume auto --deterministic"
parameters() { sed -n 's/.*parameters  *\([0-9a-f]\{16\}\) .*/\1/p' "$1"; }
$long --checkpoint "$tmp/alone" >"$tmp/log" 2>&1
expected=$(parameters "$tmp/log")
$run --nproc 2 --restarts 2 $long --checkpoint "$tmp/again" >"$tmp/out" 2>&1 &
launcher=$!
wait_for 60 test -e "$tmp/again/latest"
pkill -9 -n -f "^[^ ]*train_gpt .*$tmp/again"
wait $launcher
[ $? -eq 0 ] && grep -q 'resume  step [0-9]*00 from' "$tmp/out" && grep -q "SIGKILL" "$tmp/out" && [ "$(parameters "$tmp/out")" = "${expected:-none}" ]
result "a killed rank: from the checkpoint, to the bits of an undisturbed run" $? "$tmp/out"
$run --nproc 2 $long --checkpoint "$tmp/stopped" --steps 9000000 >"$tmp/out" 2>&1 &
launcher=$!
wait_for 60 test -e "$tmp/stopped/latest"
kill $launcher
wait $launcher
[ $? -eq 0 ]; status=$?
grep -q 'stopped by a signal' "$tmp/out" || status=1
result "SIGTERM: ranks save and end with status 0" $status "$tmp/out"

# Three failures, and each attempt goes further: one restart in a row is enough. A checkpoint is published every 20 steps.
: >"$tmp/out"
$run --nproc 2 --restarts 1 $long --save-every 20 --steps 9000000 --checkpoint "$tmp/further" >"$tmp/out" 2>&1 &
launcher=$!
before=none status=0
for attempt in 1 2 3; do
    wait_for 60 sh -c "[ \"\$(cat '$tmp/further/latest' 2>/dev/null || echo none)\" != '$before' ]" || status=1
    pkill -9 -n -f "^[^ ]*train_gpt .*$tmp/further"
    wait_for 60 sh -c "[ \$(grep -c 'restart 1 of 1' '$tmp/out') -eq $attempt ]" || status=1
    wait_for 60 sh -c "[ \$(grep -c 'resume  step' '$tmp/out') -eq $attempt ]" || status=1
    before=$(cat "$tmp/further/latest")
done
kill $launcher
wait $launcher || status=1
result "checkpoints are progress: failures are not counted with those before" $status "$tmp/out"

# ---- What train_gpt says of its links: 0.00025 GB/s, and load can only make it less, but for a factor below 2 ----
good "--probe-links" 'warning.*2 nodes: predicted x0[.].* of one, link [0-9.e-]* GB/s and .*; try top-k' $gpt --emulate 2x1:0.002:300 --probe-links --steps 5
speed=$(sed -n 's/^links   between nodes: \([0-9.e-]*\) GB\/s.*/\1/p' "$tmp/out")
awk "BEGIN { exit !(${speed:-0} > 0 && ${speed:-0} < 0.0005) }"; result "the emulated link is found" $? "$tmp/out"

# ---- Questions in place of a run: each process asks alone, and one of them answers ----
is "--dry-run asks for one process" 2 'rank 1 of 3, and a forecast is made by one: run it without the launcher, with --ranks 3' $run --nproc 3 $gpt --dry-run
is "--dry-run of a launcher's only rank" 0 '^ *# .* <- this run' $run --nproc 1 $gpt --dry-run
is "--tune of a launcher's three ranks" 0 ' chosen$' $run --nproc 3 $gpt --strategy ddp --bucket-kib 100 --tune
grep -q '^# --tune: 3 ranks' "$tmp/out" && [ "$(grep -c 'tuned: ' "$tmp/out")" -eq 1 ] && ! grep -q '^.rank' "$tmp/out"
result "rank 0 tells of it, and nobody else" $? "$tmp/out"

# ---- Two nodes ----
two "two nodes of two ranks" 0 '^\[rank 3\] 3 of 4, 1 of 2$' sh -c 'echo "$DTRAIN_RANK of $DTRAIN_WORLD_SIZE, $DTRAIN_LOCAL_RANK of $DTRAIN_LOCAL_SIZE"'
two "a rank of node 1 fails: its status on both" 9 '^dtrain-run: rank 2 of 4 .* exit status 9' --grace 0.6 sh -c 'sleep 0.2; [ $DTRAIN_RANK != 2 ] || exit 9; sleep 60'
two "all ranks of all nodes start again" 0 '^\[rank 1\] attempt 1' --grace 0.6 --restarts 1 sh -c 'echo attempt $DTRAIN_RESTART_COUNT; [ $DTRAIN_RANK != 3 ] || [ $DTRAIN_RESTART_COUNT = 1 ] || exit 9; [ $DTRAIN_RESTART_COUNT = 1 ] || sleep 60'
[ "$(grep -c 'attempt 1' "$tmp/out")" -eq 4 ]; result "each of them once" $? "$tmp/out"
two "--min-ranks: the node gives a rank up whose rank fails" 0 '^\[rank 2\] 2 of 3, 0 of 1, attempt 2$' --grace 0.6 --restarts 2 --min-ranks 3 sh -c '
    [ $DTRAIN_WORLD_SIZE != 4 ] || { [ $DTRAIN_RANK != 3 ] || exit 9; sleep 60; }; echo "$DTRAIN_RANK of $DTRAIN_WORLD_SIZE, $DTRAIN_LOCAL_RANK of $DTRAIN_LOCAL_SIZE, attempt $DTRAIN_RESTART_COUNT"'
grep -q '^1 of 3\|^.rank 1. 1 of 3, 1 of 2, attempt 2$' "$tmp/out" && [ "$(grep -c 'it goes on with 3 (--min-ranks 3)' "$tmp/out")" -eq 1 ]; result "the other one has its two" $? "$tmp/out"
two "a crash loop on two nodes" 9 'crash loop' --grace 0.6 --restarts 1 sh -c '[ $DTRAIN_RANK != 3 ] || exit 9; sleep 60'

# ---- A small stack: a run that fails needs the most of it, and where a stack begins differs each time ----
big=$run run="sh $tmp/small"
echo "ulimit -s 64; exec $big \"\$@\"" >"$tmp/small"
is "64 KiB of stack: a rank fails, 8 times" 9 'rank 1 of 2 .* exit status 9' sh -c "
    for i in 1 2 3 4 5 6 7 8; do $run --nproc 2 sh -c 'exit \$((9 * DTRAIN_RANK))'; s=\$?; [ \$s = 9 ] || exit \$s; done; exit 9"
is "64 KiB of stack: restarts" 9 'crash loop' $run --nproc 2 --restarts 1 --log-dir "$tmp/logs" sh -c 'exit $((9 * DTRAIN_RANK))'
two "64 KiB of stack: two nodes" 9 'exit status 9' --grace 0.6 sh -c '[ $DTRAIN_RANK != 3 ] || exit 9; sleep 60'
run=$big
is "a node that never comes" 1 'node 0 has waited .* 1 of 2 nodes have not come: 1' $run $nodes --timeout 1 --node-rank 0 true
# Network namespaces are hosts: the CPU's communicator says what is missing, once, and the status is that of the rank.
if [ "$(id -u)" = 0 ] && have ip && ip netns add dtrain_$$_a 2>/dev/null; then
    a=dtrain_$$_a b=dtrain_$$_b net=10.213.8
    at_end="ip netns del $a; ip netns del $b"
    if { ip netns add $b && ip link add dr$$a netns $a type veth peer name dr$$b netns $b &&
        ip -n $a addr add $net.1/24 dev dr$$a && ip -n $b addr add $net.2/24 dev dr$$b &&
        ip -n $a link set dr$$a up && ip -n $b link set dr$$b up && ip -n $a link set lo up && ip -n $b link set lo up; } 2>"$tmp/err"; then
        hosts="--nnodes 2 --master $net.1 --timeout 10 --nproc 2"
        ip netns exec $b timeout 300 $run $hosts --node-rank 1 sh -c 'echo $DTRAIN_RANK; sleep 0.3' >"$tmp/1.out" 2>&1 & other=$!
        is "two hosts" 0 '^\[rank 1\] 1$' ip netns exec $a timeout 300 $run $hosts --node-rank 0 sh -c 'echo $DTRAIN_RANK; sleep 0.3'
        wait $other && grep -q '^.rank 3. 3$' "$tmp/1.out"; result "the ranks of the second" $? "$tmp/1.out"
        ip netns exec $b timeout 300 $run $hosts --node-rank 1 $gpt --ranks 4 >"$tmp/1.out" 2>&1 & other=$!
        is "CPU ranks of two hosts are told what is missing" 1 'its error: .*4 ranks on 2 hosts share no memory.*NCCL.*MPI' ip netns exec $a timeout 300 $run $hosts --node-rank 0 $gpt --ranks 4
        wait $other
        ip netns exec $b timeout 300 $run $hosts --node-rank 1 --restarts 1 sleep 60 >"$tmp/1.out" 2>&1 & other=$!
        ip netns exec $a timeout 300 $run $hosts --node-rank 0 --restarts 1 --timeout 2 sleep 60 >"$tmp/0.out" 2>&1 & launcher=$!
        wait_for 60 sh -c "[ \$(pgrep -f -x -c 'sleep 60') -ge 4 ]"
        pkill -9 -P $other; wait $other 2>/dev/null # of timeout
        wait $launcher
        [ $? -eq 1 ] && grep -q 'node 1 is gone' "$tmp/0.out" && grep -q '1 of 2 nodes have not come: 1' "$tmp/0.out" &&
            grep -q 'to go on from the last checkpoint, start this command on all nodes again, or with --nnodes 1' "$tmp/0.out"
        result "a host that is gone for good: the other ends at its deadline" $? "$tmp/0.out"
    else skip "hosts in network namespaces" "$(head -n 1 "$tmp/err")" 4; fi
else skip "hosts in network namespaces" "needs root and ip netns" 4; fi
# Training over both "nodes": node 1 is killed whole, and started again as Kubernetes would.
long="$(echo "$long" | sed 's/--ranks 2/--ranks 4/')"
$long --checkpoint "$tmp/alone4" >"$tmp/log" 2>&1
expected=$(parameters "$tmp/log")
node() { exec $run $nodes --node-rank "$1" --nproc 2 --restarts 1 $long --checkpoint "$tmp/nodes"; }
node 0 >"$tmp/0.out" 2>&1 & zero=$!
node 1 >"$tmp/1.out" 2>&1 & one=$!
wait_for 60 test -e "$tmp/nodes/latest"
kill -9 $one
wait $one 2>/dev/null
node 1 >"$tmp/1.out" 2>&1 & one=$!
wait $zero && wait $one && [ "$(parameters "$tmp/0.out")" = "${expected:-none}" ] && grep -q 'dtrain-run of node 1 is gone' "$tmp/0.out" &&
    grep -q 'the others wait 15 s (--timeout) for node 1: start the same command there, or on another host' "$tmp/0.out"
result "a node is lost and comes again: the bits of an undisturbed run" $? "$tmp/0.out"
finish
