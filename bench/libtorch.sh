#!/bin/sh
# libtorch.sh PROGRAM [ROUNDS]: a training step of libtorch's C++ API with dtrain (PROGRAM, of bench/libtorch_ddp.cpp) beside
# Python's DistributedDataParallel over gloo: the same model, values and batches, two ranks of one thread.
#
#   build:   as examples/hosts/libtorch/distributed.cpp, with -Iexamples/hosts/libtorch
#   run:     PYTHON=/usr/bin/python3 PORT=29700 sh bench/libtorch.sh ./libtorch_ddp 5
#
# Each round runs dtrain, DDP, and DDP with gradient_as_bucket_view once, one after the other. A run is the median of its
# steps, a figure the median over rounds, and `ratio` is dtrain's over the better of the two. `correct`: the losses of all
# steps differ from DDP's by at most 1e-6. Both are real-time processes where the system allows it (column scheduler):
# otherwise what else a machine does decides, because ranks of dtrain poll, and gloo is woken.
program=$1 rounds=${2:-5} python=${PYTHON:-python3} steps=45
[ -x "$program" ] && [ "$rounds" -gt 0 ] 2>/dev/null || { echo "usage: libtorch.sh PROGRAM [ROUNDS]" >&2; exit 2; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
here=$(dirname "$0")
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 OMP_NUM_THREADS=1
MASTER_PORT=${PORT:-29700}

# run NAME COMMAND...: both ranks; NAME.ms gets a line, NAME.loss the losses
run() {
    name=$1; shift
    MASTER_PORT=$((MASTER_PORT + 1)) # one that was just closed is not free at once
    export MASTER_PORT
    RANK=1 "$@" >/dev/null 2>"$tmp/err1" &
    RANK=0 "$@" >"$tmp/out" 2>"$tmp/err0" && wait $! || { wait; cat "$tmp/err0" "$tmp/err1" >&2; exit 1; }
    sed -n 's/^loss //p' "$tmp/out" >"$tmp/$name.loss"
    sed -n 's/^step_ms //p' "$tmp/out" >>"$tmp/$name.ms"
    sed -n 's/^scheduler //p' "$tmp/out" >>"$tmp/schedulers"
}
median() { sort -n "$tmp/$1.ms" | awk '{ v[NR] = $1 } END { printf "%.3f", (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2 }'; }

wrong=0
printf '%-10s %7s %6s %10s %10s %10s %6s  %-9s %s\n' parameters width batch dtrain_ms ddp_ms view_ms ratio scheduler correct
for size in "128 3 64" "512 4 64" "1024 4 64"; do
    set -- $size
    rm -f "$tmp"/*
    "$python" "$here/torch_ddp.py" --write "$tmp/values" "$@" || exit 1
    round=0
    while [ $round -lt "$rounds" ]; do
        round=$((round + 1))
        run dtrain "$program" "$tmp/values" "$@" $steps
        run ddp "$python" "$here/torch_ddp.py" "$tmp/values" "$@" $steps
        run view "$python" "$here/torch_ddp.py" "$tmp/values" "$@" $steps view
    done
    correct=$(paste "$tmp/dtrain.loss" "$tmp/ddp.loss" | awk -v steps=$steps \
        '{ d = $1 - $2; if (d < 0) d = -d; if (!(d <= 1e-6)) bad = 1 } END { print bad || NR != steps ? "NO" : "yes" }')
    [ $correct = yes ] || wrong=1
    echo "$(median dtrain) $(median ddp) $(median view)" | awk -v w=$1 -v l=$2 -v b=$3 -v c=$correct -v s="$(sort -u "$tmp/schedulers" | head -n 1)" \
        '{ best = $2 < $3 ? $2 : $3; printf "%-10d %7d %6d %10.3f %10.3f %10.3f %6.3f  %-9s %s\n", l * w * (w + 1), w, b, $1, $2, $3, $1 / best, s, c }'
done
[ $wrong -eq 0 ]
