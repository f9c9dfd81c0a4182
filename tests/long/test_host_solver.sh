#!/bin/sh
# The solver with MPI of examples/hosts/solver, with each MPI that is installed: a part of its ranks joins dtrain and
# trains a network. Losses of other numbers of training ranks and of continued runs are those of one run; a member that
# dies ends the training, and not the solver.
. tests/support/shell.sh
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# run RANKS COMMAND...: under the MPI's mpirun, whose ranks outlive each other. Of a process that was killed Hydra tells
# the others by a signal, which ends them; it sees only the shell.
run() {
    ranks=$1; shift
    timeout -k 5 "${limit:-120}" $launcher -n "$ranks" $shell "$@" >"$tmp/out" 2>"$tmp/err"
    status=$?
    cat "$tmp/err" >>"$tmp/out"
    return $status
}
shell=
echo 'trap "" USR1; "$@"; exit 0' >"$tmp/outlive"
# fresh: an output folder with nothing in it
fresh() { rm -rf "$tmp/fields"; mkdir "$tmp/fields"; }
# losses FILE: steps and losses of rank 0
losses() { sed -n 's/^rank 0: step *\([0-9]*\) .*loss \(.*\)$/\1 \2/p' "$tmp/out" >"$1"; }
# near: the losses of $tmp/losses are those of $tmp/one, to rounding: as many as it has
near() { awk 'NR == FNR { one[$1] = $2; next } { d = $2 / one[$1] - 1; if (d < 0) d = -d; if (d > 1e-5) bad = 1 }
    END { exit bad || FNR == 0 }' "$tmp/one" "$tmp/losses"; }

for mpi in ${MPI:-openmpi mpich}; do
    launcher=mpirun.$mpi
    if ! have mpicc.$mpi || ! have $launcher; then skip "$mpi" "mpicc.$mpi and mpirun.$mpi are not installed" 13; continue; fi
    [ $mpi = openmpi ] && launcher="$launcher --oversubscribe --enable-recovery --mca orte_abort_on_non_zero_status 0"
    [ $mpi = mpich ] && launcher="$launcher -disable-auto-cleanup"
    plain=$build/$mpi/mpi/solver joined=$build/$mpi/mpi/solver_dtrain
    make -s BUILD="$build/$mpi" MPICC=mpicc.$mpi "$plain" "$joined" >"$tmp/log" 2>&1
    status=$?
    result "$mpi: compiles" $status "$tmp/log"
    [ $status -eq 0 ] || continue

    fresh
    run 3 "$plain" "$tmp/fields" 2 200 && [ "$(grep -c 'step  200 .*loss' "$tmp/out")" -eq 2 ] &&
        [ "$(sed -n 's/.*step  200 .*loss //p' "$tmp/out" | sort -u | wc -l)" -eq 2 ]
    result "$mpi: without dtrain each of two ranks trains its own copy" $? "$tmp/out"

    fresh
    run 1 "$joined" "$tmp/fields" 1 800; result "$mpi: one training rank" $? "$tmp/out"
    losses "$tmp/one"
    [ "$(wc -l <"$tmp/one")" -eq 8 ]; result "$mpi: it prints eight losses" $? "$tmp/out"
    fresh
    run 3 "$joined" "$tmp/fields" 2 400 && losses "$tmp/losses" && near
    result "$mpi: ranks 0 and 1 of 3 train: the losses of one" $? "$tmp/out"
    [ "$(grep -c '^rank 2: .*energy' "$tmp/out")" -eq 4 ] && ! grep '^rank 2:' "$tmp/out" | grep -q loss
    result "$mpi: rank 2 computes, and does not train" $? "$tmp/out"
    cp -r "$tmp/fields" "$tmp/saved"
    run 4 "$joined" "$tmp/fields" 3 800 400 && losses "$tmp/losses" && near && [ "$(wc -l <"$tmp/losses")" -eq 4 ]
    result "$mpi: continued with three training ranks: the losses of one" $? "$tmp/out"
    for turn in first second; do
        rm -rf "$tmp/fields"; cp -r "$tmp/saved" "$tmp/fields"
        run 2 "$joined" "$tmp/fields" 2 800 400; losses "$tmp/$turn"
    done
    cmp -s "$tmp/first" "$tmp/second" && [ -s "$tmp/first" ]; result "$mpi: continued twice: the same losses" $? "$tmp/out"
    rm -rf "$tmp/saved"
    run 2 "$joined" "$tmp/fields" 2 1000 900
    [ $? -ne 124 ] && ! grep -q "^rank" "$tmp/out" && grep -q 'no training any more.*there is no checkpoint' "$tmp/out"
    result "$mpi: a step that was not saved" $? "$tmp/out"
    run 3 "$joined" "$tmp/fields" 4 800; grep -q "^usage: solver" "$tmp/out"
    result "$mpi: a number of training ranks that does not divide the fields" $? "$tmp/out"

    # Rank 1 is killed: rank 0 says so within two seconds, and both others solve on. (The first of them to come to
    # MPI_Finalize may end the job: it meets rank 1 there.)
    fresh
    [ $mpi = mpich ] && shell="sh $tmp/outlive"
    limit=60 run 3 "$joined" "$tmp/fields" 2 10000000 &
    job=$!
    wait_line 60 "^rank 0: step  300" "$tmp/out"
    victim=none
    for id in $(leftovers | sed -n 's/^\([0-9]*\) [^ ]*solver_dtrain .*/\1/p'); do
        tr '\0' '\n' <"/proc/$id/environ" 2>/dev/null | grep -q -x -E '(OMPI_COMM_WORLD|PMI)_RANK=1' && victim=$id
    done
    begin=$(date +%s%N)
    kill -9 "$victim" 2>"$tmp/log"
    wait_line 20 "no training any more: .*rank 1 " "$tmp/err"; status=$?
    ms=$((($(date +%s%N) - begin) / 1000000))
    [ $status -eq 0 ] && [ $ms -lt 2000 ]; result "$mpi: a killed rank: the sentence comes within 2 s ($ms ms)" $? "$tmp/err"
    at=$(grep -c "^rank 2:" "$tmp/out")
    solved() { [ "$(grep '^rank 0:' "$tmp/out" | grep -c -v loss)" -ge 10 ] && [ "$(grep -c '^rank 2:' "$tmp/out")" -ge $((at + 10)) ]; }
    wait_for 30 solved
    result "$mpi: the others solve on, without training" $? "$tmp/out"
    kill $(leftovers | sed -n 's/^\([0-9]*\) .*solver_dtrain .*/\1/p') 2>/dev/null
    wait $job
    shell=
done
finish
