#!/bin/sh
# A cluster of one node under srun: munged, slurmctld and slurmd of a private configuration, in a folder and
# on ports of their own. Ranks that srun starts compute the same bits as forked ranks, over shared memory
# and, with the MPIs that srun can start, over MPI. All of it is gone afterwards.
. tests/support/shell.sh
PATH=$PATH:/usr/sbin:/sbin
for program in munged slurmctld slurmd srun; do
    have $program || { skip "srun" "$program is not installed (munge, slurmctld, slurmd, slurm-client)"; finish; }
done
[ "$(id -u)" = 0 ] || { skip "srun" "slurmd needs root"; finish; }

take_ports
host=$(hostname -s 2>/dev/null || hostname)
mkdir -p "$tmp/state" "$tmp/spool"
export SLURM_CONF="$tmp/slurm.conf"
cat >"$SLURM_CONF" <<END
ClusterName=dtrain
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$tmp/munge.sock
CredType=cred/munge
SlurmctldPort=$port
SlurmdPort=$((port + 1))
StateSaveLocation=$tmp/state
SlurmdSpoolDir=$tmp/spool
SlurmctldPidFile=$tmp/slurmctld.pid
SlurmdPidFile=$tmp/slurmd.pid
SlurmctldLogFile=$tmp/slurmctld.log
SlurmdLogFile=$tmp/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
echo "CgroupAutomount=no" >"$tmp/cgroup.conf"

# Daemons stay in the foreground: their ids are ours to stop.
dd if=/dev/urandom of="$tmp/munge.key" bs=1024 count=1 2>/dev/null
chmod 400 "$tmp/munge.key"
munged --foreground --force --socket="$tmp/munge.sock" --key-file="$tmp/munge.key" --pid-file="$tmp/munged.pid" \
    --log-file="$tmp/munged.log" --seed-file="$tmp/munged.seed" --num-threads=2 >"$tmp/munged.out" 2>&1 & munged=$!
wait_for 30 [ -S "$tmp/munge.sock" ]
slurmctld -D >"$tmp/slurmctld.out" 2>&1 & slurmctld=$!
slurmd -D -N "$host" >"$tmp/slurmd.out" 2>&1 & slurmd=$!
stop() {
    kill $slurmd $slurmctld 2>/dev/null
    wait $slurmd $slurmctld 2>/dev/null
    kill $munged 2>/dev/null
    wait $munged 2>/dev/null
}
at_end=stop
wait_for 60 sh -c 'sinfo -h -o %T | grep -q idle'
timeout 60 srun -n 2 true >"$tmp/log" 2>&1
status=$?
[ $status -eq 0 ] || cat "$tmp/slurmctld.log" "$tmp/slurmd.log" "$tmp"/*.out >>"$tmp/log"
result "slurmctld, slurmd and munged of our own start a job" $status "$tmp/log"
[ $status -eq 0 ] || finish

flags="--layers 2 --heads 2 --channels 32 --seq 32 --batch 2 --steps 8 --warmup 2 --sample 0 --threads 1
       --eval-batches 2 --timeout 60 --deterministic --ranks 4"
bits() { grep 'bit-identical' "$1"; }
$build/train_gpt $flags >"$tmp/forked" 2>&1
bits "$tmp/forked" >"$tmp/a"
same() { # same NAME COMMAND...: it ends with the bits of forked ranks
    name=$1; shift
    timeout 120 "$@" >"$tmp/log" 2>&1
    status=$?
    bits "$tmp/log" >"$tmp/b"
    [ $status -eq 0 ] && [ -s "$tmp/a" ] && cmp -s "$tmp/a" "$tmp/b"
    result "$name" $? "$tmp/log"
}
same "srun, shared memory" srun -n 4 $build/train_gpt $flags
srun --mpi=list >"$tmp/types" 2>&1
for pair in openmpi:pmix mpich:pmi2; do
    mpi=${pair%:*} type=${pair#*:}
    have mpicc.$mpi || { skip "srun, $mpi" "mpicc.$mpi is not installed"; continue; }
    grep -q "$type" "$tmp/types" || { skip "srun, $mpi" "srun --mpi=list has no $type"; continue; }
    make -s BUILD="$build" $mpi >"$tmp/log" 2>&1 || { result "srun, $mpi: compiles" 1 "$tmp/log"; continue; }
    same "srun --mpi=$type, $mpi" srun -n 4 --mpi=$type "$build/$mpi/mpi/train_gpt" $flags --comm mpi
done
# Without --mpi every process is an MPI of its own.
if [ -x "$build/mpich/mpi/train_gpt" ]; then
    timeout 120 srun -n 2 --mpi=none "$build/mpich/mpi/train_gpt" ${flags% *} 2 --comm mpi >"$tmp/log" 2>&1
    [ $? -ne 0 ] && grep -q 'alone in an MPI of its own.*srun with --mpi' "$tmp/log"
    result "srun without --mpi: told to give it" $? "$tmp/log"
fi
# A killed rank ends the others.
timeout 120 srun -n 3 --kill-on-bad-exit=0 sh -c 'if [ $SLURM_PROCID = 1 ]; then timeout -s KILL 5 "$@"; exit 0; fi; exec "$@"' \
    sh $build/train_gpt --layers 2 --heads 2 --channels 32 --seq 32 --batch 2 --steps 1000000 --sample 0 --threads 1 --timeout 60 \
    >"$tmp/log" 2>&1
[ $? -ne 0 ] && grep -q 'rank 1 is gone' "$tmp/log"
result "srun: a killed rank is named and ends the others" $? "$tmp/log"

finish
