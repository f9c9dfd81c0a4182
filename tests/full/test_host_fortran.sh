#!/bin/sh
# examples/hosts/fortran: the distributed form differs from the MPI program in few lines, has the losses of one rank on
# any number of ranks, leaves the solver's fields as they are, and continues on other ranks after one was killed.
. tests/support/shell.sh
for program in mpif90 mpirun; do
    have $program || { skip "the Fortran host" "$program is not installed" 11; finish; }
done
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
unset MAKEFLAGS MFLAGS MAKELEVEL
folder=examples/hosts/fortran
lines=$(diff $folder/burgers.f90 $folder/burgers_dtrain.f90 | grep -c '^[<>]')
[ "$lines" -le 60 ]
result "the distributed form: $lines lines of difference, 60 at most" $?

case $build in /*) ;; *) build=$(pwd)/$build ;; esac
library=${DTRAIN_LIBRARY:-$build/libdtrain.so}
[ -n "$DTRAIN_LIBRARY" ] || try "make lib" make -s BUILD="$build" CC="${CC:-cc}" lib
try "make bindings" make -s BUILD="$build" bindings
compile() { # compile NAME FILE...: the program $tmp/NAME, of files with paths from here
    name=$1; shift
    try "$name compiles without a warning" mpif90 -O2 -Wall -Wextra -Werror -J "$tmp" "$@" -o "$tmp/$name" -Wl,-rpath,"$(dirname "$library")"
}
compile alone $folder/burgers.f90
compile together "$build/dtrain.f90" $folder/burgers_dtrain.f90 "$library"

run() { ranks=$1 program=$2 where=$3; shift 3; mkdir -p "$tmp/$where"; timeout 60 mpirun -n "$ranks" "$tmp/$program" "$tmp/$where" "$@"; }
# same FILE FILE: the same blocks, with losses that differ by less than 1e-11 of their value
same() {
    paste -d ' ' "$1" "$2" | awk '/^block/ { d = $4 / $8 - 1; if ($2 != $6 || d > 1e-11 || d < -1e-11) { print; bad = 1 } n++ } END { exit bad || n == 0 }'
}
run 1 alone one 600 >"$tmp/one.txt" 2>"$tmp/err" && [ "$(wc -l <"$tmp/one.txt")" -eq 6 ]
result "one rank without dtrain" $? "$tmp/err"
for ranks in 1 3; do
    run $ranks together ranks$ranks 600 >"$tmp/$ranks.txt" 2>"$tmp/err" && same "$tmp/one.txt" "$tmp/$ranks.txt" >>"$tmp/err" &&
        cmp "$tmp/one/field" "$tmp/ranks$ranks/field" >>"$tmp/err" 2>&1
    result "$ranks ranks: losses of one rank, the same field" $? "$tmp/err"
done
run 2 alone two 600 >"$tmp/two.txt" 2>"$tmp/err"
! same "$tmp/one.txt" "$tmp/two.txt" >/dev/null
result "two ranks without dtrain: other losses, so that the comparison can fail" $? "$tmp/two.txt"

# A rank is killed in the middle, and MPI's launcher ends the others; three ranks continue from the last field.
(run 2 together killed 100000000 >"$tmp/killed.txt" 2>"$tmp/err") &
wait_line 60 '^block 700 ' "$tmp/killed.txt"
leftovers >"$tmp/ids"
kill -9 "$(sed -n 's/^\([0-9]*\) [^ ]*\/together .*/\1/p' "$tmp/ids" | tail -n 1)"
wait
first=$(od -A n -t d8 -N 8 "$tmp/killed/field" | tr -d ' ')
run 3 together killed $((first + 300)) >"$tmp/resumed.txt" 2>"$tmp/err" && run 1 alone long $((first + 300)) 2>>"$tmp/err" | tail -n 3 >"$tmp/long.txt" &&
    [ "$first" -ge 600 ] && [ "$(wc -l <"$tmp/resumed.txt")" -eq 3 ] && same "$tmp/long.txt" "$tmp/resumed.txt" >>"$tmp/err" && cmp "$tmp/long/field" "$tmp/killed/field" >>"$tmp/err"
result "a rank of two is killed; three ranks continue with the losses of a run that was not" $? "$tmp/err"

mkdir "$tmp/damaged" && cp "$tmp/killed/field" "$tmp/damaged/field"
for attempt in 1 2 3 4 5; do # MPICH's launcher can lose what a rank writes before it aborts
    run 2 together damaged $((first + 400)) >"$tmp/out" 2>&1 && break
    grep -q "^rank 0: .*$tmp/damaged/net/step-" "$tmp/out" && attempt=found && break
done
[ "$attempt" = found ]
result "a field without its checkpoint: the sentence names it" $? "$tmp/out"
finish
