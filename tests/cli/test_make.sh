#!/bin/sh
# What make prints and what it compiles: one short line for each command, all of it with V=1, nothing with -s, compilers'
# messages whole; the library is compiled once for all programs; no command is there twice, however many targets are asked for.
. tests/support/shell.sh
cc=${CC:-cc}
unset MAKEFLAGS MFLAGS MAKELEVEL V # this make is nobody's part
new=$tmp/new
object=$new/src/core/hash.o
mk() { timeout 100 make BUILD="$new" CC="$cc" "$@" >"$tmp/out" 2>&1; }
is() { printf "$1" | cmp -s - "$tmp/out"; } # is TEXT: what was printed is this and nothing else

mk "$object" && is '  CC  src/core/hash.c\n'
result "a command is one line" $? "$tmp/out"
rm -f "$object"; mk V=1 "$object" && [ "$(wc -l <"$tmp/out")" -ge 1 ] && grep -q -e "$cc.* -c src/core/hash.c" "$tmp/out" && ! grep -q '^  CC' "$tmp/out"
result "V=1 prints the command" $? "$tmp/out"
rm -f "$object"; mk -s "$object" && is ''
result "make -s prints nothing" $? "$tmp/out"
rm -f "$object"; mk V=0 "$object" && is '  CC  src/core/hash.c\n'
result "V=0 is as without" $? "$tmp/out"
mk "$object" && is ''
result "what is there is not compiled again" $? "$tmp/out"
! mk CFLAGS="-O0 -Dstruct=nonsense" "$object" && grep -q 'error: .*nonsense' "$tmp/out" && grep -q 'Error 1' "$tmp/out"
result "an error is shown whole" $? "$tmp/out"

# What a command makes, and where the compiler lists what it has read, is not what it compiles.
compilations() { make -n BUILD="$new" CC="$cc" "$@" 2>/dev/null | grep -e ' -c ' | sed 's/ -\(o\|MF\|MT\) [^ ]*//g'; }
compilations >"$tmp/compiled"
[ "$(grep -c 'DTRAIN_IMPLEMENTATION' "$tmp/compiled")" -eq 1 ] && ! grep -v 'DTRAIN_IMPLEMENTATION\| src/core/' "$tmp/compiled" >"$tmp/out"
result "make: the library is compiled once for all programs" $? "$tmp/out"
compilations examples test test-long mpi | sort | uniq -d >"$tmp/out"
[ ! -s "$tmp/out" ]
result "make, make test, make test-long, make mpi: no object is compiled twice" $? "$tmp/out"
make -n BUILD="$new" 2>/dev/null | tail -n 1 | grep -q '^echo "[0-9]* programs are in .*Try: make run, '
result "make ends with what it has built" $?
finish
