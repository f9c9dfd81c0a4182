#!/bin/sh
# What examples/deploy is for, without a container engine and without a cluster (Slurm: tests/long/test_slurm.sh).
#
#   images       the Dockerfile's stages become root file systems by its own RUN lines, and runs begin, are stopped and go
#                on in them as its user, on read-only roots, without a network, with a /dev/shm of 64 MiB. A base image is
#                this host's /usr; with DTRAIN_TEST_FULL=1 it is a Debian of its own. The mpi and cuda images are only read
#   manifests    held against a description of every field, and decoded by kubectl; then every pod that they lead to runs in
#                the image, with the variables that its platform sets, on one machine that has all of their names
#   scripts      shellcheck
. tests/support/shell.sh
PATH=$PATH:/usr/sbin:/sbin
full=${DTRAIN_TEST_FULL:-0}
python=${PYTHON:-python3}
deploy=examples/deploy
image() { "$python" tests/long/test_deploy_image.py "$@"; }
manifests() { "$python" tests/long/test_deploy_manifests.py "$@"; }
case $build in /*) ;; *) build=$PWD/$build ;; esac
export BUILD="$build"
# broken NAME PATTERN CHECK FILE EXPRESSION: what CHECK says of FILE after sed -E EXPRESSION
broken() {
    sed -E "$5" "$4" >"$tmp/${4##*/}"
    ! cmp -s "$4" "$tmp/${4##*/}" && ! $3 "$tmp/${4##*/}" >"$tmp/log" 2>&1 && grep -q -E -e "$2" "$tmp/log"
    result "broken: $1" $? "$tmp/log"
}

# ---- scripts ----
for script in $deploy/slurm/*.sbatch; do try "$script is bash" bash -n "$script"; done
if have shellcheck; then try "shellcheck" shellcheck -s bash $deploy/slurm/*.sbatch
else skip "shellcheck" "not installed"; fi

# ---- manifests ----
if "$python" -c 'import yaml' 2>/dev/null; then
    all=$(echo $deploy/kubernetes/*.yaml)
    # shellcheck disable=SC2086
    {
        try "the manifests have the fields that their kinds have" manifests check $all
        if have kubectl; then try "kubectl decodes them and drops nothing" manifests kubectl $all
        else skip "kubectl" "not installed (kubernetes-client)"; fi
    }
    with_storage() { manifests check "$1" $deploy/kubernetes/storage.yaml; }
    broken "a field that there is not" 'completionModus: there is no' with_storage $deploy/kubernetes/indexed-job.yaml 's/completionMode/completionModus/'
    broken "a number that is a string" "backoffLimit is '3'" with_storage $deploy/kubernetes/job.yaml 's/backoffLimit: 3/backoffLimit: "3"/'
    broken "a world of another size" 'completions 4, parallelism 4 and 5' with_storage $deploy/kubernetes/indexed-job.yaml 's/value: "4"/value: "5"/'
    broken "a checkpoint that no volume keeps" 'is on no volume' with_storage $deploy/kubernetes/jobset.yaml 's,/checkpoints/gpt,/tmp/gpt,'
    broken "a claim that nobody makes" 'in no manifest' with_storage $deploy/kubernetes/pytorchjob.yaml 's/claimName: dtrain-data/claimName: data/'
    broken "a runtime's volume that is not mounted" 'shm is not mounted' with_storage $deploy/kubernetes/trainjob.yaml '/- name: shm$/{N;/mountPath/d}'
    broken "mpirun with too few ranks" 'slots differ' with_storage $deploy/kubernetes/mpijob.yaml 's/-n, "8"/-n, "4"/'
    ! have kubectl || broken "kubectl drops a field" 'drops .spec.template.spec.tolerateAll' "manifests kubectl" $deploy/kubernetes/job.yaml 's/^      restartPolicy: Never/&\n      tolerateAll: true/'
else skip "manifests" "$python has no yaml (python3-yaml)" 10; fi

# ---- images ----
for file in $deploy/Dockerfile.cpu $deploy/Dockerfile.cuda; do try "$file" image check $file; done
broken "a base image without a version" 'has no version' "image check" $deploy/Dockerfile.cpu 's/:bookworm-[0-9]*-slim/:latest/'
broken "an image that runs as root" 'runAsNonRoot' "image check" $deploy/Dockerfile.cuda 's/^USER 10001/USER root/'
broken "a shell in front of the program" 'not the exec form' "image check" $deploy/Dockerfile.cpu 's/^ENTRYPOINT.*/ENTRYPOINT tini --/'
why=
[ "$(id -u)" = 0 ] || why="needs root"
for program in unshare chroot ip tini; do have $program || why="$program is not installed"; done
unshare --mount --net --pid --fork true 2>/dev/null || why="no namespaces can be made here"
if [ "$full" != 0 ] && ! have mmdebstrap; then why="mmdebstrap is not installed"; fi
[ -z "$why" ] || { skip "images and pods" "$why" 20; finish; }

images=$tmp/images volumes=$tmp/volumes
mkdir "$images" "$volumes"
how=
[ "$full" = 0 ] || how=debootstrap
# shellcheck disable=SC2086
try "the RUN lines of Dockerfile.cpu make an image${how:+, from debootstrap and packages}" \
    image build $deploy/Dockerfile.cpu cpu "$images" ${how:-"$build"}
[ -x "$images/cpu/usr/local/bin/train_gpt" ] || [ -x "$images/cpu/local/bin/train_gpt" ] || finish
printf '%s\n' '#!/bin/sh' "exec $python tests/long/test_deploy_image.py run $images/cpu $volumes \"\$@\"" >"$tmp/in_image"
chmod +x "$tmp/in_image"
in_image=$tmp/in_image # a program: timeout starts it, and what it execs is the parent of process 1
hash_of() { sed -n 's/.*parameters  *\([0-9a-f]\{16\}\) .*/\1/p' "$1" | tail -n 1; }
tiny="--layers 1 --heads 2 --channels 16 --seq 16 --batch 2 --warmup 2 --eval-batches 0 --sample 0 --threads 1 --timeout 20 --deterministic"
good "without arguments it shows train_gpt's flags" '--stop-status' "$in_image"
good "the first argument is a program" 'learned \+1.00 -2.00' "$in_image" ddp
! "$in_image" frobnicate >"$tmp/out" 2>&1 && grep -q 'exec frobnicate failed' "$tmp/out"
result "a program that there is not is named" $? "$tmp/out"
good "it is not root, and can write to its volumes alone" '^10001 read-only 10001$' "$in_image" --entrypoint sh -c \
    'touch /x /opt/dtrain/x /usr/local/bin/x 2>/dev/null || touch /checkpoints/x /data/x /tmp/x && echo "$(id -u) read-only $(stat -c %u /checkpoints/x)"'
# 12.75 M parameters: what the ranks share is twice the gradients, 97 MiB.
good "/dev/shm of 64 MiB: ranks share 97 MiB" ' 2  *[0-9.]* .*' "$in_image" train_gpt $tiny --layers 4 --heads 4 --channels 512 --ranks 2 --steps 2 --bucket-kib 65536
good "and none of it is there" '^shm .* 0% ' "$in_image" --entrypoint sh -c "train_gpt $tiny --ranks 2 --steps 1000000 >/dev/null & sleep 1; kill -0 \$! && df /dev/shm; kill \$!"
bad "memory is short: a sentence says how much is missing" 'no memory for [0-9]* bytes' "$in_image" --entrypoint sh -c \
    "ulimit -v 200000; exec train_gpt $tiny --layers 4 --heads 4 --channels 512 --ranks 2 --steps 2"

long="train_gpt $tiny --ranks 2 --steps 8000"
"$in_image" $long >"$tmp/log" 2>&1
expected=$(hash_of "$tmp/log")
# stopped NAME COMMAND...: TERM comes to process 1 when a first checkpoint is there; the same command then ends as $expected
stopped() {
    name=$1; shift
    rm -rf "$volumes/checkpoints"
    "$in_image" "$@" --checkpoint /checkpoints/run --save-every 100 --resume auto --stop-status 143 >"$tmp/out" 2>&1 &
    engine=$!
    wait_for 60 test -e "$volumes/checkpoints/run/latest"
    kill -TERM "$(pgrep -P $engine)"
    wait $engine
    status=$?
    [ $status -eq 143 ] && grep -q 'stopped by a signal' "$tmp/out"
    result "$name: TERM to process 1 saves and ends, with the status that was asked for ($status)" $? "$tmp/out"
    "$in_image" "$@" --checkpoint /checkpoints/run --resume auto >"$tmp/out" 2>&1
    [ -n "$expected" ] && [ "$(hash_of "$tmp/out")" = "$expected" ] && grep -q 'resume  step' "$tmp/out"
    result "$name: goes on, to the same bits" $? "$tmp/out"
}
# shellcheck disable=SC2086
{
    stopped "tini" $long
    stopped "train_gpt as process 1" --entrypoint $long
    [ ! -x "$build/dtrain-run" ] || stopped "dtrain-run" dtrain-run --nproc 2 $long
}
# A rank of another launcher that is process 1: the kernel drops the default action of TERM there.
"$in_image" --entrypoint env RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 train_gpt $tiny --ranks 2 --checkpoint /checkpoints/alone >"$tmp/out" 2>&1 &
engine=$!
wait_for 60 eval "pgrep -P $engine && grep -q '^SigCgt:.*[4-7c-f]...\$' /proc/\$(pgrep -P $engine)/status"
kill -TERM "$(pgrep -P $engine)"; sleep 1.2; kill -TERM "$(pgrep -P $engine)"
wait_for 60 eval "! kill -0 $engine"
result "a rank that waits as process 1: the second TERM ends it" $? "$tmp/out"
kill -9 "$(pgrep -P $engine)" 2>/dev/null
wait $engine

# ---- pods ----
"$python" -c 'import yaml' 2>/dev/null || { skip "pods" "$python has no yaml (python3-yaml)" 6; finish; }
# cluster NAME: starts the pods of kubernetes/NAME.yaml, on volumes that are kept
cluster() {
    rm -rf "$tmp/pods"; mkdir "$tmp/pods"
    manifests pods "$deploy/kubernetes/$1.yaml" "$tmp/pods" || return
    timeout 100 "$python" tests/long/test_deploy_image.py pods "$images/cpu" "$volumes" "$tmp/pods" >"$tmp/log" 2>&1
}
statuses() { sort -u "$tmp/pods"/*/status | tr '\n' ' '; }
for kind in job indexed-job trainjob jobset pytorchjob; do
    if grep -q 'args: \[dtrain-run' $deploy/kubernetes/$kind.yaml && [ ! -x "$build/dtrain-run" ]; then
        skip "$kind.yaml" "there is no dtrain-run"
        continue
    fi
    rm -rf "$volumes"; mkdir "$volumes"
    cluster $kind
    cat "$tmp/log" "$tmp/pods"/*/out >"$tmp/out"
    [ "$(statuses)" = "0 " ] && [ -d "$volumes/checkpoints/gpt/step-000000000040" ] && [ "$(wc -l <"$volumes/checkpoints/gpt.jsonl")" -ge 40 ]
    result "$kind.yaml: its pods train ($(ls "$tmp/pods" | grep -c gpt) of them)" $? "$tmp/out"
done
# One pod of four is told to go: all save and stop with the status that says so, and new pods go on.
rm -rf "$volumes"; mkdir "$volumes"
export STEPS=100000
cluster indexed-job &
waiting=$!
wait_for 60 test -e "$volumes/checkpoints/gpt/latest" && : >"$tmp/pods/gpt-2/TERM"
wait $waiting
cat "$tmp/log" "$tmp/pods"/*/out >"$tmp/out"
[ "$(statuses)" = "143 " ]
result "indexed-job.yaml: one pod is told to go, all save and stop ($(statuses))" $? "$tmp/out"
export STEPS=$(($(sed -n 's/.*step-0*\([0-9]*\).*/\1/p' "$volumes/checkpoints/gpt/latest") + 20))
cluster indexed-job
cat "$tmp/log" "$tmp/pods"/*/out >"$tmp/out"
[ "$(statuses)" = "0 " ] && grep -q 'resume  step' "$tmp/out"
result "and new pods go on" $? "$tmp/out"
unset STEPS

# The probes of job.yaml: no file yet, a new one, an old one.
probe() { mkdir -p "$tmp/root$2"; "$python" -c 'import json, os, sys; w = json.loads(sys.argv[1]); os.execvp(w[0], w)' "$(echo "$1" | sed "s,/run/dtrain,$tmp/root/run/dtrain,g")"; }
manifests probes $deploy/kubernetes/job.yaml >"$tmp/probes"
startup=$(sed -n 's/^startupProbe //p' "$tmp/probes") liveness=$(sed -n 's/^livenessProbe //p' "$tmp/probes")
file=$tmp/root/run/dtrain/train.prom
mkdir -p "${file%/*}"
! probe "$startup" && echo x >"$file" && probe "$startup" && probe "$liveness" && touch -d '1 hour ago' "$file" && ! probe "$liveness"
result "probes: not before the first record, and not an hour after the last" $?

# ---- MPI ----
if have mpirun && [ -x "$build/openmpi/mpi/train_gpt" ]; then
    rm -rf "$tmp/pods" "$volumes"; mkdir "$tmp/pods" "$volumes" "$volumes/checkpoints"
    manifests pods $deploy/kubernetes/mpijob.yaml "$tmp/pods"
    # The launcher's command on one machine that both workers are, without their sshd.
    printf 'localhost slots=8\n' >"$tmp/hostfile"
    sed "s,/checkpoints,$volumes/checkpoints,g" "$tmp/pods/gpt-launcher/args" >"$tmp/args"
    set --
    while read -r word; do set -- "$@" "$word"; done <"$tmp/args"
    # shellcheck disable=SC2046
    timeout 100 unshare --mount --net --pid --fork --mount-proc sh -c 'mount --bind "$1/pods/hosts" /etc/hosts; ip link set lo up; shift; exec "$@"' sh "$tmp" \
        env $(grep -v HOSTNAME "$tmp/pods/gpt-launcher/env") HOME="$tmp" PATH="$build/openmpi/mpi:$PATH" OMPI_MCA_orte_default_hostfile="$tmp/hostfile" \
        OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "$@" >"$tmp/out" 2>&1
    [ $? -eq 0 ] && [ -d "$volumes/checkpoints/gpt/step-000000000040" ]
    result "mpijob.yaml: mpirun's command trains" $? "$tmp/out"
else skip "mpijob.yaml" "no Open MPI, or make openmpi has not built train_gpt"; fi
finish
