#!/bin/sh
# The communicator over MPI with each MPI that is installed: what test_comm.c asks of the local
# communicator, for 1 to 8 ranks; every way to fail, where each rank must say what happened; and train_gpt,
# which must end with the bits of forked ranks. DTRAIN_TEST_FULL=1 adds 2^31 bytes in one call.
. tests/support/shell.sh
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
take_ports # the next of them for each run

# A launcher kills all ranks when one fails; here each is to find it out by itself. Hydra tells the
# survivors with a signal.
start() { # start RANKS COMMAND...
    n=$1; shift
    port=$((port + 1))
    DTRAIN_PORT=$port timeout -k 5 "${limit:-150}" $run -n "$n" "$@" >"$tmp/log" 2>&1
}
survive() { start "$1" sh -c 'trap "" USR1; "$@"; exit 0' sh "$2" "$3" "$4"; }
# failure NAME RANKS FILES SCENE [argument]: every rank that lives writes "ok" and its sentence, and all
# write the same one, unless one of them has its own ("own")
failure() {
    name=$1 ranks=$2 files=$3 same=$4; shift 4
    rm -f "$tmp"/out.*
    export DTRAIN_MPI_OUT="$tmp/out"
    survive "$ranks" "$out/test_mpi" "$@"
    unset DTRAIN_MPI_OUT
    cat "$tmp"/out.* >"$tmp/all" 2>/dev/null
    [ "$(grep -c '^ok' "$tmp/all")" -eq "$files" ] && ! grep -q '^BAD' "$tmp/all" &&
        { [ "$same" = own ] || [ "$(sort -u "$tmp/all" | wc -l)" -eq 1 ]; }
    status=$?
    [ $status -eq 0 ] || cat "$tmp/log" >>"$tmp/all"
    result "$mpi: $name" $status "$tmp/all"
}
# then_rank_1 SIGNAL: it gets it when the others have written their verdicts
then_rank_1() {
    wait_for 60 test -e "$tmp/out.2" && wait_for 60 test -e "$tmp/out.0"
    for id in $(leftovers | sed -n 's/^\([0-9]*\) .*test_mpi.*/\1/p'); do kill -$1 "$id" 2>/dev/null; done
}
refused() { # refused NAME WORDS: the last command has failed and said so
    status=$?
    [ $status -ne 0 ] && [ $status -lt 124 ] && grep -q "$2" "$tmp/log"
    result "$mpi: $1" $? "$tmp/log"
}

# Two hosts: network namespaces with names of their own, two ranks on each. The launcher reaches the second
# one through $tmp/agent in place of ssh.
a=dtrain_$$_a b=dtrain_$$_b net=10.214.7 hosts=1
at_end="{ ip netns del $a; ip netns del $b; } 2>/dev/null"
if [ "$(id -u)" = 0 ] && have ip && ip netns add $a 2>"$tmp/err"; then
    { ip netns add $b && ip link add dm$$a netns $a type veth peer name dm$$b netns $b &&
        ip -n $a addr add $net.1/24 dev dm$$a && ip -n $b addr add $net.2/24 dev dm$$b &&
        ip -n $a link set dm$$a up && ip -n $b link set dm$$b up && ip -n $a link set lo up &&
        ip -n $b link set lo up; } 2>"$tmp/err" && hosts=2
    cat >"$tmp/agent" <<END
#!/bin/sh
while [ "\${1#-}" != "\$1" ]; do shift; done
shift
exec ip netns exec $b unshare --uts sh -c "hostname tests-b; \$*"
END
    chmod +x "$tmp/agent"
fi
[ $hosts -eq 2 ] || echo "needs root and ip netns" >>"$tmp/err"
on_two_hosts() { # on_two_hosts COMMAND...: four ranks
    port=$((port + 1))
    ip netns exec $a unshare --uts sh -c 'hostname tests-a; exec "$@"' sh env MASTER_ADDR=$net.1 DTRAIN_PORT=$port \
        timeout -k 5 150 $far -n 4 "$@" >"$tmp/log" 2>&1
}

# stay N: a launcher may end a job with its first process, so each waits until N have written, for at most three seconds.
stay() {
    echo 'trap "" USR1; "$@"; i=0; while [ $i -lt 30 ] && [ "$(ls "$DTRAIN_MPI_OUT".* 2>/dev/null | wc -l)" -lt '"$1"' ]; do
        i=$((i + 1)); sleep 0.1; done; sleep 0.3; exit 0'
}

# Every number of ranks with one of the two.
full=${DTRAIN_TEST_FULL:-0}
openmpi_ranks="1 3 5 8" mpich_ranks="2 4 6 7"
[ "$full" = 0 ] || { openmpi_ranks="1 2 3 4 5 6 7 8" mpich_ranks=$openmpi_ranks; }

for mpi in openmpi mpich; do
    cc=mpicc.$mpi run=mpirun.$mpi
    [ $mpi = openmpi ] && run="$run --oversubscribe --enable-recovery --mca orte_abort_on_non_zero_status 0"
    [ $mpi = mpich ] && run="$run -disable-auto-cleanup"
    far="$run -launcher ssh -launcher-exec $tmp/agent -localhost $net.1 -hosts $net.1:2,$net.2:2"
    # Over TCP Open MPI 4 may never come back from MPI_Testsome once a peer has died; mpirun, left as it comes,
    # ends that rank with the job, as soon as the first process has ended.
    [ $mpi = openmpi ] && far="mpirun.openmpi --oversubscribe --mca plm_rsh_agent $tmp/agent \
        -H tests-a:2,tests-b:2 -x MASTER_ADDR -x DTRAIN_PORT -x DTRAIN_MPI_OUT -x DTRAIN_MPI_GUEST"
    if ! have $cc || ! have mpirun.$mpi; then
        skip "$mpi" "$cc and mpirun.$mpi are not installed"; continue
    fi
    make -s BUILD="$build" $mpi >"$tmp/log" 2>&1
    status=$?
    result "$mpi: compiles" $status "$tmp/log"
    [ $status -eq 0 ] || continue
    out=$build/$mpi/mpi
    printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' >"$tmp/impl.c"
    for pair in "clang -std=c99 -Wno-unused-command-line-argument" "g++ -std=c++17 -x c++"; do
        have "${pair%% *}" || { skip "$mpi: dtrain.h, $pair" "not installed"; continue; }
        OMPI_CC=${pair%% *} MPICH_CC=${pair%% *} $cc ${pair#* } -pedantic -Wall -Wextra -Wconversion -Werror \
            -DDTRAIN_USE_MPI -I. -fsyntax-only "$tmp/impl.c" >"$tmp/log" 2>&1
        result "$mpi: dtrain.h, $pair" $? "$tmp/log"
    done

    eval "ranks=\$${mpi}_ranks"
    for n in $ranks; do
        start $n "$out/test_mpi" comm
        result "$mpi: all calls, $n ranks" $? "$tmp/log"
    done
    start 3 "$out/small_mpi" comm
    result "$mpi: all calls in small chunks, 3 ranks" $? "$tmp/log"
    for n in 2 3; do
        DTRAIN_MPI_DEVICE=1 start $n "$out/test_mpi" comm
        result "$mpi: all calls with a device's memory, $n ranks" $? "$tmp/log"
    done
    start 3 "$out/test_mpi" hurry
    result "$mpi: what a leaving rank has sent arrives" $? "$tmp/log"

    for which in 0 1 2 3 4 5 6 7 8; do failure "ranks that differ, $which" 3 3 same mismatch $which; done
    failure "a killed rank" 3 2 same death
    failure "a rank that does not come" 3 3 same stuck
    failure "a rank that does not come, large" 3 3 same stuck 100000
    failure "a rank that stops in the middle" 3 3 same asleep
    failure "a rank that is late in a ring" 5 5 same ring
    failure "ranks that wait in a circle" 3 3 own circle
    failure "a rank that leaves" 3 3 own leave
    failure "a wrong argument" 3 3 own argument

    # Rank 1 is stopped where MPI waits for all ranks; when the others have given up, it goes on and ends too. At
    # the end there is nothing to lose.
    failure "a rank that comes to its end late" 3 3 own late_end
    for scene in idup:CONT:3:for_rank_1 barrier:CONT:3:; do
        oldifs=$IFS; IFS=:; set -- $scene; IFS=$oldifs
        rm -f "$tmp"/out.*
        then_rank_1 "$2" & helper=$!
        DTRAIN_MPI_STOP=$1 failure "a rank stopped before $1" 3 "$3" own stopped "$(echo "$4" | tr _ ' ')"
        wait $helper
    done

    # The same as guests of a program that MPI's launcher has started: over MPI, and in shared memory.
    export DTRAIN_MPI_GUEST=1
    start 3 "$out/test_mpi" comm
    result "$mpi: all calls, guests" $? "$tmp/log"
    DTRAIN_MPI_AUTO=1 start 4 "$out/test_mpi" comm
    result "$mpi: all calls, guests in shared memory" $? "$tmp/log"
    failure "guests that differ" 3 3 same mismatch 1
    failure "a killed guest" 3 2 same death
    failure "a guest that does not come" 3 3 same stuck
    failure "a guest's wrong argument" 3 3 own argument
    failure "guests that wait in a circle" 3 3 own circle
    unset DTRAIN_MPI_GUEST

    # How ranks meet.
    start 3 sh -c 'DTRAIN_RANK=$((2 - ${OMPI_COMM_WORLD_RANK:-$PMI_RANK})) DTRAIN_WORLD_SIZE=3 \
        DTRAIN_MASTER_ADDR=127.0.0.1 exec "$1" comm s' sh "$out/test_mpi"
    result "$mpi: another order than MPI's" $? "$tmp/log"
    start 3 sh -c 'RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 \
        MASTER_PORT=29500 exec "$1" comm a' sh "$out/test_mpi"
    result "$mpi: torchrun's variables inside mpirun" $? "$tmp/log"
    for r in 0 1; do
        { RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 300 "$out/test_mpi" nothing >"$tmp/$r" 2>&1
          [ $? -eq 1 ] || echo "rank $r did not fail" >>"$tmp/$r"; } &
    done
    wait
    cat "$tmp/0" "$tmp/1" >"$tmp/log"
    [ "$(grep -c 'sees 1 in MPI.*mpirun -n 2' "$tmp/log")" -eq 2 ] && ! grep -q 'did not fail' "$tmp/log"
    result "$mpi: torchrun's variables alone: told to use mpirun" $? "$tmp/log"
    DTRAIN_MPI_RANKS=3 timeout 300 "$out/test_mpi" nothing >"$tmp/log" 2>&1
    refused "forked ranks are told to use mpirun" 'started by dtrain_launch itself; run: mpirun -n 3'
    DTRAIN_MPI_RANKS=3 DTRAIN_MPI_MODE=1 timeout 300 "$out/test_mpi" nothing >"$tmp/log" 2>&1
    refused "so are threads" 'started by dtrain_launch itself; run: mpirun -n 3'
    start 4 sh -c 'r=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; DTRAIN_RANK=$((r % 2)) DTRAIN_WORLD_SIZE=2 \
        DTRAIN_PORT=$((DTRAIN_PORT + 100 + r / 2)) DTRAIN_MASTER_ADDR=127.0.0.1 exec "$1" nothing; ' sh "$out/test_mpi"
    [ "$(grep -c "rank 0 of the world's 2 sees 4 in MPI" "$tmp/log")" -eq 4 ]
    result "$mpi: two worlds in one mpirun" $? "$tmp/log"
    timeout 300 "$out/test_mpi" comm >"$tmp/log" 2>&1
    result "$mpi: one rank without a launcher" $? "$tmp/log"

    for n in 2 3 4; do
        start $n "$out/test_programs" --count $((full ? 300 : 25))
        result "$mpi: random programs, $n ranks" $? "$tmp/log"
    done
    if [ "$full" != 0 ]; then
        limit=300
        start 2 "$out/test_mpi" huge
        result "$mpi: more than 2^31 bytes" $? "$tmp/log"
        limit=
    fi

    if [ $hosts -eq 2 ]; then
        on_two_hosts "$out/test_mpi" comm
        result "$mpi: all calls, two hosts" $? "$tmp/log"
        rm -f "$tmp"/out.*
        DTRAIN_MPI_OUT="$tmp/out" on_two_hosts sh -c "$(stay 3)" sh "$out/test_mpi" death
        status=$?
        cat "$tmp"/out.* >"$tmp/all" 2>/dev/null
        least=3
        [ $mpi = openmpi ] && least=1
        [ $status -ne 124 ] && [ "$(grep -c '^ok' "$tmp/all")" -ge $least ] && ! grep -q '^BAD' "$tmp/all"
        status=$?
        [ $status -eq 0 ] || cat "$tmp/all" >>"$tmp/log"
        result "$mpi: a killed rank, two hosts" $status "$tmp/log"
        rm -f "$tmp"/out.*
        for scene in "ring a rank that is late in a ring" "circle ranks that wait in a circle"; do
            rm -f "$tmp"/out.*
            DTRAIN_MPI_OUT="$tmp/out" on_two_hosts sh -c "$(stay 4)" sh "$out/test_mpi" "${scene%% *}"
            cat "$tmp"/out.* >"$tmp/all" 2>/dev/null
            [ "$(grep -c '^ok' "$tmp/all")" -eq 4 ]
            status=$?
            [ $status -eq 0 ] || cat "$tmp/all" >>"$tmp/log"
            result "$mpi: ${scene#* }, two hosts" $status "$tmp/log"
        done
        # Guests share no memory, and have no connections but MPI's: they gather and hear of an abort over it.
        DTRAIN_MPI_GUEST=1 on_two_hosts "$out/test_mpi" comm
        result "$mpi: all calls, guests on two hosts" $? "$tmp/log"
        for scene in "mismatch:4:guests that differ" "argument:4:a guest's wrong argument" "death:$least:a killed guest"; do
            rm -f "$tmp"/out.*
            written=4
            [ "${scene%%:*}" != death ] || written=3
            DTRAIN_MPI_GUEST=1 DTRAIN_MPI_OUT="$tmp/out" on_two_hosts sh -c "$(stay $written)" sh "$out/test_mpi" "${scene%%:*}" 1
            cat "$tmp"/out.* >"$tmp/all" 2>/dev/null
            rest=${scene#*:}
            [ "$(grep -c '^ok' "$tmp/all")" -ge "${rest%%:*}" ] && ! grep -q '^BAD' "$tmp/all"
            status=$?
            [ $status -eq 0 ] || cat "$tmp/all" >>"$tmp/log"
            result "$mpi: ${rest#*:}, two hosts" $status "$tmp/log"
        done
    else skip "$mpi: two hosts" "$(head -n 1 "$tmp/err")"; fi

    start 4 "$out/over_mpi" && grep -q '^4 ranks over mpi$' "$tmp/log" && grep -q '^every weight has the bits of one process$' "$tmp/log"
    result "$mpi: over_mpi: the bits of one process" $? "$tmp/log"

    # train_gpt: the bits of forked ranks.
    gpt="$out/train_gpt --layers 2 --heads 2 --channels 32 --seq 32 --batch 2 --steps 8 --warmup 2 --sample 0 --threads 1
         --eval-batches 2 --timeout 60 --deterministic"
    if ! "$out/train_gpt" --help 2>&1 | grep -q -e '--comm'; then
        skip "$mpi: train_gpt" "it has no flag --comm"
        continue
    fi
    for strategy in ddp full_shard; do
        status=0
        $gpt --ranks 4 --strategy $strategy >"$tmp/forked" 2>&1 || status=1
        start 4 $gpt --ranks 4 --strategy $strategy --comm mpi || status=1
        grep 'bit-identical' "$tmp/forked" >"$tmp/a"; grep 'bit-identical' "$tmp/log" >"$tmp/b"
        [ -s "$tmp/a" ] && cmp -s "$tmp/a" "$tmp/b" || status=1
        cat "$tmp/a" "$tmp/b" >>"$tmp/log"
        result "$mpi: train_gpt, $strategy: the bits of forked ranks" $status "$tmp/log"
    done
    # So do pipelines: messages between stages, beside a tensor and a data axis, with the embedding tied over two stages.
    for layout in "4 --tensor 2 --pipeline 2 --accum 4" "4 --pipeline 2 --accum 3 --pipeline-schedule zb_h1 --strategy zero1" \
        "2 --pipeline 2 --accum 4 --pipeline-schedule interleaved --chunks 2 --layers 4"; do
        status=0
        $gpt --ranks $layout >"$tmp/forked" 2>&1 || status=1
        start "${layout%% *}" $gpt --ranks $layout --comm mpi || status=1
        grep 'bit-identical' "$tmp/forked" >"$tmp/c"; grep 'bit-identical' "$tmp/log" >"$tmp/d"
        [ -s "$tmp/c" ] && cmp -s "$tmp/c" "$tmp/d" || status=1
        cat "$tmp/forked" "$tmp/c" "$tmp/d" >>"$tmp/log"
        result "$mpi: train_gpt, ${layout#* }: the bits of forked ranks" $status "$tmp/log"
    done
    # A stage that is killed: the others say so by themselves.
    rm -rf "$tmp/hit"
    limit=100 start 4 sh -c 'trap "" USR1; "$@"; exit 0' sh $gpt --ranks 4 --tensor 2 --pipeline 2 --accum 4 --steps 1000000 --save-every 20 --checkpoint "$tmp/hit" --comm mpi --timeout 5 &
    launcher=$! port=$((port + 1))
    wait_for 60 test -e "$tmp/hit/latest"
    kill -KILL "$(leftovers | sed -n 's/^\([0-9]*\) [^ ]*mpi.train_gpt .*/\1/p' | tail -n 1)"
    wait $launcher
    [ $? -ne 124 ] && [ "$(grep -c 'train_gpt: .*rank [0-3] ' "$tmp/log")" -eq 3 ]
    result "$mpi: a killed stage of a pipeline: the others say so" $? "$tmp/log"
    start 3 $gpt --tune --comm mpi --batch 2
    [ $? -eq 0 ] && [ "$(grep -c 'tuned: ' "$tmp/log")" -eq 1 ] && grep -qE '^# zero3 .* (rate|chosen)' "$tmp/log" && ! grep -q 'failed: ' "$tmp/log"
    result "$mpi: train_gpt --tune: every candidate is measured, and one rank tells" $? "$tmp/log"
    # What ranks of MPI save, they and forked ones go on from; $tmp/a is the end of full_shard.
    status=0 saved=$tmp/saved_$mpi
    start 4 $gpt --ranks 4 --strategy full_shard --comm mpi --checkpoint "$saved" --save-every 4 || status=1
    rm -r "$saved/step-000000000008" && cp -r "$saved" "$saved.too" || status=1
    $gpt --ranks 4 --strategy zero1 --checkpoint "$saved.too" --resume auto >"$tmp/forked" 2>&1 || status=1
    start 4 $gpt --ranks 4 --strategy full_shard --comm mpi --checkpoint "$saved" --resume auto || status=1
    for went_on in "$tmp/forked" "$tmp/log"; do
        grep -q 'resume  step 4' "$went_on" || status=1
        grep 'bit-identical' "$went_on" | cmp -s "$tmp/a" - || status=1
    done
    cat "$tmp/forked" >>"$tmp/log"
    result "$mpi: train_gpt saved and gone on with" $status "$tmp/log"
    if [ $hosts -eq 2 ]; then # where memory is not shared, MPI is taken without --comm
        on_two_hosts $gpt --ranks 4 --strategy full_shard
        status=$?
        grep 'bit-identical' "$tmp/log" >"$tmp/b"
        [ $status -eq 0 ] && cmp -s "$tmp/a" "$tmp/b"
        result "$mpi: train_gpt on two hosts: the same bits" $? "$tmp/log"
    fi
done

finish
