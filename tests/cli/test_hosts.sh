#!/bin/sh
# Worked hosts (examples/hosts): programs that are parallel without dtrain, and join it. Each has a form without dtrain,
# X.c, and one with it, X_dtrain.c, which differ by at most 60 lines. The solver over MPI: test_host_solver.sh.
. tests/support/shell.sh

# changed A B: lines that are added, changed or taken away between two programs, without their opening comments
changed() {
    sed '1,/\*\//d' "$1" >"$tmp/before.c"; sed '1,/\*\//d' "$2" >"$tmp/after.c"
    diff "$tmp/before.c" "$tmp/after.c" >"$tmp/log"
    awk '/^[0-9]/ { n += a > b ? a : b; a = b = 0 } /^</ { a++ } /^>/ { b++ } END { print n + (a > b ? a : b) }' "$tmp/log"
}
pairs=0
for after in examples/hosts/*/*_dtrain.c; do
    before=${after%_dtrain.c}.c
    lines=$(changed "$before" "$after")
    [ -f "$before" ] && [ "$lines" -gt 0 ] && [ "$lines" -le 60 ]
    result "$before: dtrain is $lines lines" $? "$tmp/log"
    ! grep -i -q dtrain "$tmp/before.c"; result "$before knows nothing of dtrain" $?
    pairs=$((pairs + 1))
done
[ $pairs -ge 3 ]; result "$pairs programs have a form without dtrain and one with it" $?

# flat_array: one process; then ranks, whose losses are its own to the rounding of gradients in bf16, the bits the same
# under every strategy.
good "flat_array" "^step  600  loss 0\.[0-9]+$" "$build/flat_array" 600
cp "$tmp/out" "$tmp/serial"
near() { # near PERCENT: the losses of $tmp/out are those of $tmp/serial
    paste "$tmp/serial" "$tmp/out" | awk -v most="$1" '{ d = $4 / $8 - 1; if (d < 0) d = -d; if ($2 != $6 || d > most / 100) bad = 1 }
        END { exit bad || NR == 0 }'
}
for ranks in 1 2 4; do
    good "flat_array_dtrain, DDP, $ranks ranks" "^step  600  loss" "$build/flat_array_dtrain" 600 $ranks 1
    near 2; result "flat_array_dtrain, $ranks ranks: the losses of one process, to 2 %" $? "$tmp/out"
    cp "$tmp/out" "$tmp/ddp$ranks"
    for kind in 2 4; do
        good "flat_array_dtrain, strategy $kind, $ranks ranks" "^step  600  loss" "$build/flat_array_dtrain" 600 $ranks $kind
        cmp -s "$tmp/out" "$tmp/ddp$ranks"; result "flat_array_dtrain, strategy $kind, $ranks ranks: the losses of DDP" $? "$tmp/out"
    done
done
bad "flat_array_dtrain, ranks that do not divide the batch" "usage: flat_array_dtrain" "$build/flat_array_dtrain" 100 5 1
bad "flat_array_dtrain, an unknown strategy" "kind" "$build/flat_array_dtrain" 100 1 99
bad "flat_array_dtrain, no GPU in this build" "DTRAIN_USE_CUDA" "$build/flat_array_dtrain" 100 1 1 cuda
if [ -x "$build/emu/flat_array_dtrain" ]; then
    for kind in 1 2 4; do
        good "flat_array_dtrain, strategy $kind on an emulated GPU" "^step  200  loss" "$build/emu/flat_array_dtrain" 200 2 $kind cuda
        head -n 2 "$tmp/ddp2" >"$tmp/serial"
        near 0.1; result "flat_array_dtrain, strategy $kind on an emulated GPU: the losses of the CPU" $? "$tmp/out"
    done
else skip "flat_array_dtrain on an emulated GPU" "needs a C++ compiler" 6; fi

# A rank is killed: the others hear of it at once, say which, and end.
"$build/flat_array_dtrain" 100000000 3 1 >"$tmp/out" 2>"$tmp/err" &
id=$!
wait_line 60 "^step  200" "$tmp/out"
victim=$(cat "/proc/$id/task/$id/children" 2>/dev/null | cut -d ' ' -f 1)
begin=$(date +%s%N)
kill -9 "${victim:-none}" 2>"$tmp/log"
wait $id; status=$?
ms=$((($(date +%s%N) - begin) / 1000000))
cat "$tmp/err" >>"$tmp/log"
[ $status -ne 0 ] && [ $ms -lt 2000 ] && [ "$(grep -c 'rank 2 is gone\|rank 2 .*killed by signal 9' "$tmp/err")" -eq 2 ]
result "flat_array_dtrain, a killed rank: both others say so within 2 s ($ms ms)" $? "$tmp/log"

# plugin: two worlds in a process at once, and nothing of them after dlclose.
good "host and a plugin without dtrain" "^task 1, 3 workers: 1\.99" "$build/host" "$build/fit.so"
good "host and a plugin with dtrain" "^task 1, 3 workers: 2\.0000" "$build/host" "$build/fit_dtrain.so"
grep -q "^nothing of the plugin is left" "$tmp/out" && grep -q "^task 0, 2 workers: 1\.0000" "$tmp/out"
result "two worlds of two sizes, and nothing left of the plugin" $? "$tmp/out"
bad_lines=9
bad "host, a plugin that is not there" "cannot open shared object file" "$build/host" "$tmp/none.so"
good "the footprint of a plugin without dtrain" "^the footprint is as before" "$build/plugin_footprint" "$build/fit.so"
good "the footprint of a plugin with dtrain" "^the footprint is as before" "$build/plugin_footprint" "$build/fit_dtrain.so"
if have nm; then
    nm -D --defined-only "$build/fit_dtrain.so" >"$tmp/log"
    [ "$(awk '{ print $3 }' "$tmp/log" | sed 's/@.*//' | grep -v -x -E '_init|_fini|_edata|_end|__bss_start')" = fit ]
    result "the plugin shows one symbol" $? "$tmp/log"
else skip "the plugin's symbols" "nm is not installed"; fi
finish
