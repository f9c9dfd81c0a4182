#!/bin/sh
# record.sh [--quick] [--machine NAME] [--out FOLDER] [WHAT...]: runs the benchmarks on this machine and writes, to
# bench/results/MACHINE/ or FOLDER, for each WHAT
#   WHAT.txt     machine, commit, compiler, load; then each command behind "$ " and what it printed
#   WHAT.jsonl   a line about the machine and the commit; then each command, and one line a result
# WHAT is any of: gemm conv resnet data metrics collectives links sparse kernels train strategies compare accuracy scaling comm loss
# checkpoint simulator forecast pipeline tensor; without it, all.
# MACHINE is made from the processor's model and its widest instruction set. Run it on a machine that does nothing else;
# all of it takes some two hours on two cores. --quick tests the script in seconds and needs --out: no figures.
#   BUILD=build   where the programs are; they are made first, by make
#   LLMC=FOLDER   a checkout of llm.c: another rival of train (see llmc.sh); PyTorch is one where python3 has torch
#   DATA=FILE     the text that loss is measured on: Karpathy's tinyshakespeare
#   PYTHON=FILE   a python3 with PyTorch, for compare and accuracy
#   CIFAR=FOLDER  CIFAR-10's binary files, or a part of them: what accuracy is measured on
cd "$(dirname "$0")/.." || exit 1
build=${BUILD:-build} machine= folder= quick=
known="gemm conv resnet data metrics collectives links sparse kernels train strategies compare accuracy scaling comm loss checkpoint simulator forecast pipeline tensor"
fail() { echo "record.sh: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=--quick ;;
        --machine) [ $# -gt 1 ] || fail "--machine needs a name"; machine=$2; shift ;;
        --out) [ $# -gt 1 ] || fail "--out needs a folder"; folder=$2; shift ;;
        --help) sed -n '2,/^cd /s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) fail "unknown flag \"$1\"; --help lists them" ;;
        *) break ;;
    esac
    shift
done
for what in "$@"; do case " $known " in *" $what "*) ;; *) fail "\"$what\" is none of: $known" ;; esac; done
[ -z "$quick" ] || [ -n "$folder" ] || fail "--quick makes no figures: say with --out where to write"

# ---- the machine ----
cpuinfo() { sed -n "s/^$1[[:space:]]*: //p" /proc/cpuinfo | head -n 1; }
first() { "$@" 2>/dev/null | head -n 1; }
cpu=$(cpuinfo 'model name') isa=
for name in amx_tile avx512f avx2; do
    [ -n "$isa" ] || { cpuinfo flags | grep -q -w $name && isa=$(echo $name | sed 's/_tile//; s/512f/512/'); }
done
[ -n "$machine" ] || machine=$(echo "$cpu ${isa:-$(uname -m)}" | sed 's/([RT]M*)//g; s/CPU//; s/@ [^ ]*//; s/[Pp]rocessor//' |
    tr 'A-Z' 'a-z' | tr -cs 'a-z0-9\n' '-')
cores=$(getconf _NPROCESSORS_ONLN)
memory=$(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo)
commit=$(git describe --always --dirty 2>/dev/null || echo unknown)
compiler=$(first ${CC:-cc} --version)
flags=${CFLAGS:-$(sed -n 's/^CFLAGS *?= *//p' Makefile)}
folder=${folder:-bench/results/$machine}
mkdir -p "$folder" || exit 1
describe() { # for people
    echo "$cpu${isa:+ ($isa)}, $cores cores, $memory, Linux $(uname -r)"
    echo "dtrain $commit, $compiler, $flags; $(date -u +%Y-%m-%dT%H:%MZ), load average before: $(cut -d' ' -f1-3 /proc/loadavg)"
}
describe_json() {
    printf '{"bench": "machine", "machine": "%s", "cpu": "%s", "isa": "%s", "cores": %d, "memory": "%s", "kernel": "%s", ' \
        "$machine" "$cpu" "$isa" "$cores" "$memory" "$(uname -r)"
    printf '"commit": "%s", "compiler": "%s", "cflags": "%s", "date": "%s", "load": %s}\n' \
        "$commit" "$compiler" "$flags" "$(date -u +%Y-%m-%dT%H:%MZ)" "$(cut -d' ' -f1 /proc/loadavg)"
}

# ---- one command ----
# run PROGRAM ARGUMENT...: into the files of $what. Everything but simulate appends its results to a log.
run() {
    program=$1; shift
    path=$build/$program log=$folder/$what.jsonl
    case $program in simulate) log= ;; *) path=$build/bench/$program ;; esac
    make -s BUILD="$build" "$path" || exit 1
    [ -z "$quick" ] || [ -z "$log" ] || set -- --quick # whatever else was to be measured
    case $program in bench_train | bench_strategies | bench_scaling | bench_comm | bench_pipeline)
        make -s BUILD="$build" "$build/train_gpt" "$build/resnet_cifar" || exit 1
        set -- --program "$build/train_gpt" "$@" ;;
        bench_forecast) make -s BUILD="$build" "$build/train_gpt" "$build/resnet_cifar" || exit 1
            set -- --program "$build/train_gpt" --images "$build/resnet_cifar" "$@" ;;
        bench_resnet) make -s BUILD="$build" "$build/resnet_cifar" || exit 1; set -- --program "$build/resnet_cifar" "$@" ;;
    esac
    shown=$path
    for argument in "$@"; do
        case $argument in *[!A-Za-z0-9_./,:=-]*) shown="$shown \"$argument\"" ;; *) shown="$shown $argument" ;; esac
    done
    echo "$shown"
    printf '\n$ %s\n' "$shown" >>"$folder/$what.txt"
    [ -z "$log" ] || printf '{"bench": "command", "command": "%s"}\n' "$(echo "$shown" | sed 's/[\\"]/\\&/g')" >>"$log"
    "$path" "$@" ${log:+--log "$log"} >>"$folder/$what.txt" 2>&1 && return
    echo "record.sh: failed: $shown; the end of $folder/$what.txt says why" >&2
    bad=1
}

# show COMMAND...: what it prints, without a log
show() {
    printf '\n$ %s\n' "$*" >>"$folder/$what.txt"
    "$@" >>"$folder/$what.txt" 2>&1 || bad=1
}

# ---- what is recorded ----
record() {
    case $what in
        gemm) run bench_gemm; run bench_gemm --threads "$cores"; run bench_gemm --bf16 ;;
        conv) run bench_conv; run bench_conv --threads "$cores"; run bench_conv --bf16 ;;
        resnet) run bench_resnet --threads 1; run bench_resnet --threads "$cores" ;;
        data) run bench_data ;;
        metrics) run bench_metrics --program "$build/train_gpt" ;;
        collectives) run bench_collectives --ranks 2; [ "$cores" -le 2 ] || run bench_collectives --ranks "$cores" ;;
        links) run bench_links --nodes 2,4 --gbit 0.3,1 --sizes 1M,4M,25M,100M ;;
        sparse) run bench_sparse ;;
        kernels) run bench_kernels ;;
        train) for model in baby gpt2; do
            if [ -n "$LLMC" ]; then run bench_train --model $model --rounds 5 --peer "llm.c=sh bench/llmc.sh $LLMC"
            else run bench_train --model $model --rounds 5; fi
        done ;;
        strategies) run bench_strategies --models baby --ranks 2,4 --rounds 5; run bench_strategies --models gpt2 --ranks 2 --rounds 5 ;;
        compare) run bench_strategies --models tiny,resnet20 --ranks 1,2,4,8 --steps 6 --rounds 2 --batch 8 --flags "--batch 2" \
                --svg "$folder/compare" ${CIFAR:+--cifar "$CIFAR"} ;;
        accuracy) make -s BUILD="$build" "$build/resnet_cifar" || exit 1
            for seed in 1 2 3; do
                show "$build/resnet_cifar" --data "$CIFAR" --ranks 1 --threads "$cores" --batch 128 --epochs 20 --seed $seed
                show "${PYTHON:-python3}" bench/torch_cifar.py --data "$CIFAR" --threads "$cores" --batch 128 --epochs 20 --seed $seed
            done ;;
        scaling) run bench_scaling --rounds 5; run bench_scaling --rounds 3 --gbps 10 --ranks 1,2 --many none ;;
        comm) run bench_comm --parts copies,overlap
            run bench_comm --parts links --node-ranks 1 --svg "$folder/comm.svg"
            run bench_comm --parts links --node-ranks 4 --nodes 2,4 --gbps 1,10
            run bench_comm --parts train --train-models baby,gpt2 ;;
        loss) run bench_comm --parts loss --data "$DATA" ;;
        checkpoint) run bench_checkpoint --params 124 --reps 5 ;;
        forecast) run bench_forecast --rounds 5 ;;
        tensor) run bench_strategies --models baby --ranks 2,4 --rounds 3
            run bench_strategies --models gpt2 --ranks 2 --rounds 2 --steps 6 --batch 4 --flags "--seq 64" ;;
        pipeline) run bench_pipeline --models baby --rounds 3; run bench_pipeline --models gpt2 --rounds 2 --steps 4 ;;
        simulator) run simulate --check tools/simulate/published.txt ;;
    esac
}
bad=0
for what in ${*:-$known}; do
    [ "$what" != loss ] || [ -n "$DATA" ] || { echo "skip loss: DATA names no text"; continue; }
    [ "$what" != accuracy ] || [ -n "$CIFAR" ] || { echo "skip accuracy: CIFAR names no folder"; continue; }
    describe >"$folder/$what.txt"
    describe_json >"$folder/$what.jsonl"
    record
    printf '\nload average after: %s\n' "$(cut -d' ' -f1-3 /proc/loadavg)" >>"$folder/$what.txt"
    case $what in simulator | accuracy) rm "$folder/$what.jsonl" ;; esac
done
[ "$bad" -eq 0 ] && echo "results: $folder/"
exit $bad
