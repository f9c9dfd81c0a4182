#!/bin/sh
# libtorch's C++ API as a host (examples/hosts/libtorch): the example without and with dtrain, what its header promises, and
# training steps beside Python's DistributedDataParallel over gloo. Compiling four files takes a minute or two.
. tests/support/shell.sh
python=${PYTHON:-python3} host=examples/hosts/libtorch
# The folder of the wheel; Debian's package has its headers in /usr/include (libtorch-dev).
wheel=$($python -c 'import os, torch; print(os.path.dirname(torch.__file__))' 2>/dev/null)
if [ -z "$wheel" ]; then skip "libtorch" "$python has no torch (Debian: apt-get install python3-torch libtorch-dev)"; finish; fi
for include in "$wheel/include" /usr/include; do [ -f "$include/torch/csrc/api/include/torch/torch.h" ] && break; done
if [ ! -f "$include/torch/csrc/api/include/torch/torch.h" ]; then
    skip "libtorch" "torch's C++ headers are not installed (Debian: apt-get install libtorch-dev)"; finish
fi
abi=$($python -c 'import torch; print(int(torch._C._GLIBCXX_USE_CXX11_ABI))')
standard=$($python -c 'import torch; print("c++17" if [int(v) for v in torch.__version__.split(".")[:2]] < [2, 10] else "c++20")')
includes="-I. -I$host -isystem $include/torch/csrc/api/include"
[ "$include" = /usr/include ] || includes="$includes -isystem $include"

${CC:-cc} -std=c99 -O2 -I. -c $host/dtrain.c -o "$tmp/dtrain.o" >"$tmp/log" 2>&1; result "dtrain.c" $? "$tmp/log"
# compile PROGRAM SOURCE
compile() {
    ${CXX:-c++} -std=$standard -O1 -Wall -Wextra -Werror -D_GLIBCXX_USE_CXX11_ABI=$abi $includes "$2" "$tmp/dtrain.o" -o "$tmp/$1" \
        -L"$wheel/lib" -Wl,-rpath,"$wheel/lib" -ltorch -ltorch_cpu -lc10 -lpthread >"$tmp/$1.log" 2>&1
}
compile serial $host/serial.cpp & first=$!
compile distributed $host/distributed.cpp & second=$!
wait $first; result "serial.cpp compiles" $? "$tmp/serial.log"
wait $second; result "distributed.cpp compiles" $? "$tmp/distributed.log"
compile checks tests/nightly/libtorch_checks.cpp & first=$!
compile bench bench/libtorch_ddp.cpp & second=$!
wait $first; result "libtorch_checks.cpp compiles" $? "$tmp/checks.log"
wait $second; result "libtorch_ddp.cpp compiles" $? "$tmp/bench.log"

changed=$(diff $host/serial.cpp $host/distributed.cpp | grep -c '^[<>]')
[ "$changed" -le 60 ]; result "the distributed form differs in $changed lines, of 60" $?

# same FILE FILE: ten losses, equal to 1e-6
same() {
    paste "$1" "$2" | awk '{ d = $4 - $8; if (d < 0) d = -d; if ($2 != $6 || !(d <= 1e-6)) bad = 1; n++ }
                           END { exit bad || n != 10 }'
}
take_ports
good "one process" "^step 200  loss 0\.0" "$tmp/serial"
cp "$tmp/out" "$tmp/serial.out"
for ranks in 2 4; do
    port=$((port + 1)) rank=$ranks ids= status=0
    while [ $rank -gt 0 ]; do
        rank=$((rank - 1))
        RANK=$rank WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 120 "$tmp/distributed" >"$tmp/out.$rank" 2>&1 &
        ids="$ids $!"
    done
    for id in $ids; do wait "$id" || status=1; done
    [ $status -eq 0 ] && [ ! -s "$tmp/out.1" ] && same "$tmp/serial.out" "$tmp/out.0"
    result "$ranks ranks have the losses of one process" $? "$tmp/out.0"
done
if timeout 60 $python -m torch.distributed.run --nproc_per_node 1 --master_port $((port + 1)) --no_python true >/dev/null 2>&1; then
    port=$((port + 1))
    good "under torchrun" "^step 200" $python -m torch.distributed.run --nproc_per_node 2 --master_port $((port + 1)) --no_python "$tmp/distributed"
    grep '^step' "$tmp/out" >"$tmp/steps" && same "$tmp/serial.out" "$tmp/steps"; result "its losses" $? "$tmp/out"
else skip "under torchrun" "the one of $python cannot start \"true\"" 2; fi
good "what dtrain_torch.h promises" "^[0-9]+ passed, 0 failed" "$tmp/checks" "$tmp/meet"

# The same losses as DDP to 1e-6, in not more time. Ranks of dtrain poll, and gloo is woken: on a machine that is busy
# otherwise only real-time processes can be compared.
if $python -c 'import torch.distributed as d; import numpy, sys; sys.exit(not (d.is_available() and d.is_gloo_available()))' 2>/dev/null; then
    PYTHON=$python PORT=$((port + 10)) sh bench/libtorch.sh "$tmp/bench" 3 >"$tmp/table" 2>&1
    result "losses of Python's DistributedDataParallel" $? "$tmp/table"
    sed 's/^/       /' "$tmp/table"
    [ "$(grep -c ' yes$' "$tmp/table")" -eq 3 ]; result "three models were compared" $? "$tmp/table"
    if [ "$(nproc)" -ge 2 ] && ! grep -q ' normal ' "$tmp/table"; then
        awk 'NR > 1 && $7 > 1 { bad = 1 } END { exit bad }' "$tmp/table"; result "a step takes at most as long as DDP's" $? "$tmp/table"
    else skip "a step takes at most as long as DDP's" "it needs two cores and real-time processes (SCHED_RR)"; fi
else skip "beside DistributedDataParallel" "this torch has no gloo, or there is no numpy" 3; fi
finish
