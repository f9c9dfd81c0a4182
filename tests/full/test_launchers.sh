#!/bin/sh
# train_gpt under launchers: processes with torchrun's variables, torchrun and mpirun where they are
# installed (srun: tests/long/test_slurm.sh), network namespaces as hosts. Ranks that a launcher starts compute the same bits as
# ranks that dtrain_launch forks; a killed rank ends all; nothing is left behind.
. tests/support/shell.sh
take_ports
gpt="$build/train_gpt --layers 1 --heads 2 --channels 16 --seq 16 --batch 2 --warmup 2 --eval-batches 2 --sample 0 --threads 1 --timeout 20"
losses() { grep -v final "$1" | sed -n 's/.*"loss": \([^,]*\),.*/\1/p'; }

# rank R N ARGS...: rank R of N as torchrun would start it, in the background
rank() {
    r=$1 n=$2; shift 2
    RANK=$r WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 300 $gpt --ranks "$n" "$@" >"$tmp/$r.out" 2>"$tmp/$r.err" &
    eval "pid_$r=$!"
}
# ended R: waits for rank R; its status
ended() { eval "wait \$pid_$1"; }

for n in 2 3 8; do
    $gpt --ranks $n --steps 6 --log "$tmp/forked" >/dev/null 2>"$tmp/err"
    status=0
    for r in $(seq 0 $((n - 1))); do rank "$r" $n --steps 6 --log "$tmp/joined"; done
    for r in $(seq 0 $((n - 1))); do ended "$r" || { status=1; cat "$tmp/$r.err"; }; done
    result "$n ranks of a launcher train" $status "$tmp/0.out"
    losses "$tmp/forked" >"$tmp/a"; losses "$tmp/joined" >"$tmp/b"
    [ "$(wc -l <"$tmp/b")" -eq 6 ] && cmp -s "$tmp/a" "$tmp/b"
    result "$n ranks: the same bits as forked ranks" $? "$tmp/b"
done
nothing_left; result "nothing is left" $?

# Killed while they train: $! is timeout, its child is the rank.
for victim in 0 1 2; do
    rm -f "$tmp/killed"
    for r in 0 1 2; do rank $r 3 --steps 1000000 --log "$tmp/killed"; done
    wait_line 60 loss "$tmp/killed"
    eval "parent=\$pid_$victim"
    pkill -9 -P "$parent"
    status=0
    for r in 0 1 2; do
        ended $r && status=1
        [ $r -eq $victim ] || grep -q "rank $victim is gone" "$tmp/$r.err" || { status=1; echo "rank $r: $(cat "$tmp/$r.err")"; }
    done
    nothing_left || status=1
    result "rank $victim of 3 is killed: the others say so and end" $status
done

# Two network namespaces are two hosts: they meet, and the CPU's communicator says what is missing.
if [ "$(id -u)" = 0 ] && have ip && ip netns add dtrain_$$_a 2>/dev/null; then
    a=dtrain_$$_a b=dtrain_$$_b net=10.213.7
    { ip netns add $b && ip link add dt$$a netns $a type veth peer name dt$$b netns $b &&
        ip -n $a addr add $net.1/24 dev dt$$a && ip -n $b addr add $net.2/24 dev dt$$b &&
        ip -n $a link set dt$$a up && ip -n $b link set dt$$b up; } 2>"$tmp/err"
    if [ $? -eq 0 ]; then
        export WORLD_SIZE=2 MASTER_ADDR=$net.1 MASTER_PORT=29500
        RANK=0 ip netns exec $a timeout 300 $gpt --ranks 2 >"$tmp/0.out" 2>"$tmp/0.err" & p=$!
        RANK=1 ip netns exec $b timeout 300 $gpt --ranks 2 >"$tmp/1.out" 2>"$tmp/1.err"
        wait $p
        grep -q "2 ranks on 2 hosts" "$tmp/0.err" && grep -q "2 ranks on 2 hosts.*NCCL" "$tmp/1.err"
        result "two hosts meet and are told what is missing" $? "$tmp/1.err"
        # The cable is pulled during the rendezvous of three.
        WORLD_SIZE=3 RANK=0 ip netns exec $a timeout 300 $gpt --ranks 3 --timeout 10 >"$tmp/0.out" 2>"$tmp/0.err" & p=$!
        WORLD_SIZE=3 RANK=1 ip netns exec $b timeout 300 $gpt --ranks 3 --timeout 10 >"$tmp/1.out" 2>"$tmp/1.err" & q=$!
        # state 01 is a connection; the greeting over it takes microseconds, and cannot be seen from here
        wait_for 60 ip netns exec $a grep -q ':73A0 [0-9A-F:]* 01 ' /proc/net/tcp /proc/net/tcp6
        sleep 1; ip -n $b link set dt$$b down
        wait $p; wait $q
        grep -q "have not come: 2" "$tmp/0.err" && grep -q "rank 1 waited .* s for rank 0" "$tmp/1.err"
        result "a host that is cut off ends at its deadline" $? "$tmp/1.err"
        unset WORLD_SIZE MASTER_ADDR MASTER_PORT
    else skip "hosts in network namespaces" "$(head -n 1 "$tmp/err")"; fi
    ip netns del $a; ip netns del $b
else skip "hosts in network namespaces" "needs root and ip netns"; fi

# The launchers themselves.
same() { # same NAME COMMAND...: two ranks under it have the losses of two forked ranks
    name=$1; shift
    $gpt --ranks 2 --steps 6 --log "$tmp/forked" >/dev/null 2>&1
    DTRAIN_PORT=$port timeout 120 "$@" $gpt --ranks 2 --steps 6 --log "$tmp/joined" >"$tmp/out" 2>&1
    status=$?
    losses "$tmp/forked" >"$tmp/a"; losses "$tmp/joined" >"$tmp/b"
    [ $status -eq 0 ] && [ "$(wc -l <"$tmp/b")" -eq 6 ] && cmp -s "$tmp/a" "$tmp/b"
    result "$name" $? "$tmp/out"
    rm -f "$tmp/joined"
}
# torchrun with the flags under which it starts anything: PyTorch before 2 needs two of them where Python is 3.11.
for flags in "" "--redirects 1 --tee 1"; do
    torchrun="torchrun $flags --no_python --monitor_interval 0.2"
    $torchrun --nproc_per_node 2 /bin/true >"$tmp/log" 2>&1 && break
    torchrun=
done
if [ -n "$torchrun" ]; then
    same "torchrun" $torchrun --nproc_per_node 2
    # It starts the ranks again when one is killed, and when another node joins: they go on from the last checkpoint.
    long="$gpt --global-batch 8 --steps 1200 --save-every 100 --resume auto --deterministic"
    $long --ranks 2 --checkpoint "$tmp/alone" >"$tmp/log" 2>&1
    expected=$(sed -n 's/.*parameters  *\([0-9a-f]\{16\}\) .*/\1/p' "$tmp/log")
    timeout 120 $torchrun --nproc_per_node 2 --max_restarts 2 $long --checkpoint "$tmp/again" >"$tmp/out" 2>&1 &
    launcher=$!
    wait_for 60 test -e "$tmp/again/latest"
    pkill -9 -n -f "^[^ ]*train_gpt .*$tmp/again"
    wait $launcher
    [ $? -eq 0 ] && grep -q 'resume  step [0-9]*00 from' "$tmp/out" && grep -q "${expected:-none}" "$tmp/out"
    result "torchrun starts killed ranks again: the same bits" $? "$tmp/out"
    node() { exec timeout 120 $torchrun --nnodes 1:2 --nproc_per_node 2 --rdzv_backend c10d --rdzv_id "$$" \
        --rdzv_endpoint "localhost:$((port + 7))" --rdzv_conf last_call_timeout=1 $long --steps 9000000 --checkpoint "$tmp/nodes"; }
    for _ in 1 2; do # on a busy machine torchrun's own nodes may miss each other
        rm -rf "$tmp/nodes"
        node >"$tmp/out" 2>&1 &
        launcher=$!
        wait_for 60 test -e "$tmp/nodes/latest"
        node >"$tmp/log" 2>&1 &
        wait_line 60 'saved by 2 ranks of ddp, resharded to 4 of ddp' "$tmp/out"
        status=$?
        kill $launcher $! 2>/dev/null
        wait
        port=$((port + 1))
        [ $status -ne 0 ] || break
    done
    [ $status -eq 0 ]
    result "torchrun: another node joins, and 4 ranks go on from 2" $? "$tmp/out"
else skip "torchrun" "not installed, or cannot start /bin/true: $(tail -n 1 "$tmp/log")"; fi
if have mpirun; then
    if mpirun --version 2>&1 | grep -q "Open MPI"; then
        OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        export OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM
        same "mpirun of Open MPI" mpirun --oversubscribe -n 2
    else same "mpirun of MPICH" mpirun -n 2; fi
else skip "mpirun" "not installed"; fi
finish
