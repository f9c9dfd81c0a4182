#!/bin/sh
# README's program, and the table of docs/troubleshooting.md: the program that the diff shows is complete, without a
# warning in C and C++, and computes on 1 to 4 ranks what the serial one does; each sentence that the table quotes is
# printed by the mistake that it is about ("..." stands for anything).
. tests/support/shell.sh
cc=${CC:-cc}
case $build in /*) ;; *) build=$PWD/$build ;; esac
library=$build/dtrain.a
for needed in "$library" "$build/train_gpt" "$build/dtrain-run"; do
    [ -e "$needed" ] || make -s BUILD="$build" CC="$cc" "$needed" || exit 1
done
strict="-std=c99 -pedantic -Wall -Wextra -Wconversion -Werror -I."
libs="-lm -lpthread"

# ---- The program ----
readme_program before >"$tmp/serial.c"
readme_program after >"$tmp/first.c"
try "the serial program" $cc $strict "$tmp/serial.c" -o "$tmp/serial"
try "the program first.c" $cc $strict "$tmp/first.c" "$library" -o "$tmp/first" $libs
! grep -q dtrain "$tmp/serial.c"; result "the serial program knows nothing of dtrain" $?
[ "$("$tmp/serial")" = "$(sed -n 's/^Both print `\([^`]*\)`.*/\1/p' README.md)" ]
result "the serial program prints what README says" $?
for ranks in 1 2 4; do
    "$build/dtrain-run" --nproc $ranks "$tmp/first" >"$tmp/out" 2>&1 && [ "$(cat "$tmp/out")" = "$("$tmp/serial")" ]
    result "first.c on $ranks ranks prints what the serial program does" $? "$tmp/out"
done
# What README compiles the library with says nothing, whoever compiles it.
flags=$(sed -n 's/^    cc -O2 -c \(-x c .*\) dtrain.h -o dtrain.o .*/\1/p' README.md)
[ -n "$flags" ]; result "README has the line that compiles the library" $?
for compiler in gcc clang g++ clang++; do
    have $compiler || { skip "the library by $compiler" "not installed"; continue; }
    case $compiler in *++) flags="-x c++ ${flags#-x c}" ;; esac
    $compiler $flags -fsyntax-only dtrain.h >"$tmp/out" 2>&1 && [ ! -s "$tmp/out" ]
    result "the library by $compiler, without a warning" $? "$tmp/out"
    flags="-x c ${flags#-x c++ }"
done

# ---- The troubles ----
printed=$tmp/printed
prints() { timeout 300 "$@" >>"$printed" 2>&1; } # most wait for a deadline, beside one another
small="$build/train_gpt --layers 1 --channels 32 --heads 2 --seq 16 --batch 2 --sample 0 --timeout 2"
head -c 20000 README.md >"$tmp/text.txt"
small="$small --data $tmp/text.txt"
take_ports
try "the mistakes" $cc $strict tests/cli/mistakes.c "$library" -o "$tmp/mistakes" $libs
for mistake in branch late failed larger alone; do prints "$tmp/mistakes" $mistake & done
prints "$build/dtrain-run" --nproc 2 sh -c 'test $DTRAIN_RANK = 0 || kill -9 $$' &
prints $small --ranks 2 --steps 60 --lr 1000 --clip 0 --weight-decay 1000 &
prints env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port $small &
DTRAIN_PORT=$((port + 1)) RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port $small --timeout 20 >"$tmp/first_run" 2>&1 &
other=$!
listens() { grep -q -i ":$(printf %04X $((port + 1))) 00000000:0000 0A" /proc/net/tcp; }
wait_for 60 listens
prints env DTRAIN_PORT=$((port + 1)) RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port $small
kill -KILL $other; wait $other 2>/dev/null # it waits for rank 1, and would go on to its deadline
for again in 1 2; do prints $small --steps 2 --checkpoint "$tmp/checkpoints"; done
echo '#include "dtrain.h"
int main(void) { return dtrain_last_error()[0] != 0; }' >"$tmp/unlinked.c"
LC_ALL=C prints $cc -I. "$tmp/unlinked.c" -o "$tmp/unlinked"
echo '#include <stdio.h>
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"' >"$tmp/late.c"
prints $cc -std=c99 -I. -fsyntax-only "$tmp/late.c"
wait

sed -n 's/^| ``* *\([^|]*[^`|]\) *``* |.*/\1/p' docs/troubleshooting.md >"$tmp/rows"
rows=$(wc -l <"$tmp/rows")
[ "$rows" -ge 8 ]; result "the table has $rows sentences" $?
while IFS= read -r sentence; do
    # ... in the table is any text here, and everything else stands for itself
    pattern=$(printf '%s\n' "$sentence" | sed 's/[][\.*^$]/\\&/g; s/…/.*/g')
    grep -q -e "$pattern" "$printed"
    result "printed: $sentence" $? "$printed"
done <"$tmp/rows"
finish
