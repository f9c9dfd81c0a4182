#!/bin/sh
# A cluster of one node under srun: munged, slurmctld and slurmd of a private configuration, in a folder and
# on ports of their own. Ranks that srun starts compute the same bits as forked ranks, over shared memory
# and, with the MPIs that srun can start, over MPI. The scripts of examples/deploy/slurm are submitted, stopped in every
# way that Slurm has, and come to the bits of an undisturbed run. All of it is gone afterwards.
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
AuthInfo=socket=$tmp/munge.sock,cred_expire=5
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
SchedulerParameters=sched_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL State=UP PriorityTier=9
END
echo "CgroupAutomount=no" >"$tmp/cgroup.conf"

# Daemons stay in the foreground: their ids are ours to stop.
dd if=/dev/urandom of="$tmp/munge.key" bs=1024 count=1 2>/dev/null
chmod 400 "$tmp/munge.key"
munged --foreground --force --socket="$tmp/munge.sock" --key-file="$tmp/munge.key" --pid-file="$tmp/munged.pid" \
    --log-file="$tmp/munged.log" --seed-file="$tmp/munged.seed" --num-threads=2 >"$tmp/munged.out" 2>&1 & munged=$!
wait_for 60 [ -S "$tmp/munge.sock" ]
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
timeout 300 srun -n 2 true >"$tmp/log" 2>&1
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
    [ $? -ne 0 ] && grep -q 'sees 1 in MPI.*srun with --mpi' "$tmp/log"
    result "srun without --mpi: told to give it" $? "$tmp/log"
fi
# A killed rank ends the others.
timeout 120 srun -n 3 --kill-on-bad-exit=0 sh -c 'if [ $SLURM_PROCID = 1 ]; then timeout -s KILL 5 "$@"; exit 0; fi; exec "$@"' \
    sh $build/train_gpt --layers 2 --heads 2 --channels 32 --seq 32 --batch 2 --steps 1000000 --sample 0 --threads 1 --timeout 60 \
    >"$tmp/log" 2>&1
[ $? -ne 0 ] && grep -q 'rank 1 is gone' "$tmp/log"
result "srun: a killed rank is named and ends the others" $? "$tmp/log"

# ---- The batch scripts: stopped, given back to the queue, gone on with ----
deploy=examples/deploy/slurm
# Scripts lie among the files of the daemon when they run: what they name must be whole.
case $build in /*) ;; *) build=$PWD/$build ;; esac
long="--layers 2 --heads 2 --channels 32 --seq 32 --batch 2 --steps 4000 --save-every 100 --warmup 2 --sample 0 --eval-batches 0
      --timeout 60 --deterministic --keep 2"
hash_of() { sed -n 's/.*parameters  *\([0-9a-f]\{16\}\) .*/\1/p' "$1" | tail -n 1; }
state() { scontrol -o show job "$job" | sed 's/.*JobState=\([A-Z]*\).*/\1/'; }
ended() { case $(state) in COMPLETED | FAILED | CANCELLED) ;; *) false ;; esac; }
# submit SCRIPT OPTIONS: as job $job, with two ranks; its output is $tmp/out
submit() {
    rm -rf "$tmp/out" "$tmp/run"
    # shellcheck disable=SC2086
    job=$(RUN=$tmp/run TRAIN=${TRAIN:-$build/train_gpt} sbatch --parsable --chdir="$PWD" --ntasks=2 --output="$tmp/out" $2 "$deploy/$1" $long)
}
# interrupted NAME COMMAND...: it comes when the job $job has saved something; the job goes on, to the same bits
interrupted() {
    name=$1; shift
    wait_for 60 test -e "$tmp/run/latest"
    "$@" >"$tmp/log" 2>&1
    wait_line 60 'resume  step' "$tmp/out" && wait_for 120 ended
    scontrol show job "$job" >>"$tmp/log"
    [ "$(state)" = COMPLETED ] && grep -q 'Restarts=1 ' "$tmp/log" && grep -q 'stopped by a signal' "$tmp/out" &&
        [ -n "$expected" ] && [ "$(hash_of "$tmp/out")" = "$expected" ]
    status=$?
    [ ! -f "$tmp/out" ] || tail -n 8 "$tmp/out" >>"$tmp/log"
    result "$name" $status "$tmp/log"
}
# shellcheck disable=SC2086
$build/train_gpt $long --ranks 2 --threads 1 --checkpoint "$tmp/alone" >"$tmp/log" 2>&1
expected=$(hash_of "$tmp/log")
urgent() { srun --partition=urgent --exclusive -n 1 true; }
submit one-node.sbatch
interrupted "one-node.sbatch: TERM to the ranks, as before the limit; it requeues itself" scancel --signal=TERM "$job"
submit one-node.sbatch
interrupted "one-node.sbatch: preempted by a job of higher priority" urgent
submit one-node.sbatch
interrupted "one-node.sbatch: scontrol requeue" scontrol requeue "$job"
if [ -x "$build/openmpi/mpi/train_gpt" ] && grep -q pmix "$tmp/types"; then
    TRAIN=$build/openmpi/mpi/train_gpt
    submit mpi.sbatch "--nodes=1 --ntasks-per-node=2"
    interrupted "mpi.sbatch: TERM to the ranks" scancel --signal=TERM "$job"
    unset TRAIN
else skip "mpi.sbatch" "no Open MPI that srun can start"; fi
# There is no GPU: the same ranks on the CPU, in a job that asks for none.
sed '/^#SBATCH --gpus/d' $deploy/gpu.sbatch >"$tmp/gpu.sbatch"
deploy=$tmp long="$long --precision fp32 --steps 300"
export DEVICE=cpu
submit gpu.sbatch "--nodes=1 --ntasks-per-node=2"
wait_for 60 ended; [ "$(state)" = COMPLETED ] && grep -q full_shard "$tmp/out"
result "gpu.sbatch, on CPUs" $? "$tmp/out"
finish
