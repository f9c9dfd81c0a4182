#!/bin/sh
# examples/hosts/python: the distributed form differs from the program in few lines, has the losses of one process on
# any number of ranks, says which rank died, and continues on other ranks.
. tests/support/shell.sh
for python in "${PYTHON:-python3}" /usr/bin/python3 none; do
    "$python" -c 'import numpy' 2>/dev/null && break
done
[ "$python" != none ] || { skip "the Python host" "numpy is not installed" 8; finish; }
unset MAKEFLAGS MFLAGS MAKELEVEL
folder=examples/hosts/python
lines=$(diff $folder/net.py $folder/net_dtrain.py | grep -c '^[<>]')
[ "$lines" -le 60 ]
result "the distributed form: $lines lines of difference, 60 at most" $?

case $build in /*) ;; *) build=$(pwd)/$build ;; esac
[ -n "$DTRAIN_LIBRARY" ] || try "make lib" make -s BUILD="$build" CC="${CC:-cc}" lib
try "make bindings" make -s BUILD="$build" bindings
export DTRAIN_LIBRARY="${DTRAIN_LIBRARY:-$build/libdtrain.so}" PYTHONPATH="$build" OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
# same FILE FILE: the same steps, with losses that differ by less than 1e-11 of their value
same() {
    paste -d ' ' "$1" "$2" | awk '/^step/ { d = $4 / $8 - 1; if ($2 != $6 || d > 1e-11 || d < -1e-11) { print; bad = 1 } n++ } END { exit bad || n == 0 }'
}
run() { timeout 120 "$python" $folder/"$@"; }

run net.py 400 "$tmp/one.npz" >"$tmp/one.txt" 2>"$tmp/err" && [ "$(wc -l <"$tmp/one.txt")" -eq 4 ]
result "one process without dtrain" $? "$tmp/err"
for ranks in 1 2 5; do
    run net_dtrain.py 400 "$tmp/saved$ranks" $ranks >"$tmp/$ranks.txt" 2>"$tmp/err" && same "$tmp/one.txt" "$tmp/$ranks.txt" >>"$tmp/err"
    result "$ranks ranks: losses of one process" $? "$tmp/err"
done

# Rank 2 of 3 is killed: the others end with an exception that names it, and two ranks continue.
run net_dtrain.py 100000000 "$tmp/killed" 3 >"$tmp/killed.txt" 2>"$tmp/err" &
wait_line 60 '^step 200 ' "$tmp/killed.txt"
leftovers >"$tmp/ids"
kill -9 "$(sed -n 's/^\([0-9]*\) [^ ]*python[^ ]* .*net_dtrain.py .*/\1/p' "$tmp/ids" | sort -n | tail -n 1)"
start=$(date +%s)
wait $! ; status=$?
[ $status -eq 1 ] && [ $(($(date +%s) - start)) -le 3 ] && [ "$(grep -c '^dtrain.DtrainError: rank [01]: rank 2 ' "$tmp/err")" -eq 2 ]
result "a rank is killed: the others name it, in 3 s" $? "$tmp/err"
first=$(tr -cd 0-9 <"$tmp/killed/latest" | sed 's/^0*//')
run net_dtrain.py $((first + 200)) "$tmp/killed" 2 >"$tmp/resumed.txt" 2>"$tmp/err" && run net.py $((first + 200)) "$tmp/long.npz" 2>>"$tmp/err" | tail -n 2 >"$tmp/long.txt" &&
    [ "$first" -ge 200 ] && [ "$(wc -l <"$tmp/resumed.txt")" -eq 2 ] && same "$tmp/long.txt" "$tmp/resumed.txt" >>"$tmp/err"
result "two ranks continue with the losses of a run that was not killed" $? "$tmp/err"
finish
