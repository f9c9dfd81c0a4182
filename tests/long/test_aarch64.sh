#!/bin/sh
# dtrain.h on ARM: compiled for aarch64 with all warnings, its library, and the core's tests under qemu-user. What was
# trained there has the bits of this machine.
. tests/support/shell.sh
cc=${CC:-cc} arm=aarch64-linux-gnu-gcc out=$build/aarch64
unset MAKEFLAGS MFLAGS MAKELEVEL # this make is nobody's part
have $arm || { skip "aarch64" "$arm is not installed"; finish; }
for flags in "-O2" "-O0 -DDTRAIN_CORE" "-O0 -DDTRAIN_NO_SIMD"; do
    try "dtrain.h, $flags" sh -c "printf '#define DTRAIN_IMPLEMENTATION\n#include \"dtrain.h\"\n' |
        $arm -std=c99 -pedantic -Wall -Wextra -Wconversion -Werror $flags -I. -x c -c - -o '$tmp/dtrain.o'"
done
try "make lib" make -s lib BUILD="$out" CC=$arm CFLAGS=-O1
have qemu-aarch64 || { skip "the core's tests" "qemu-aarch64 is not installed"; finish; }
export QEMU_LD_PREFIX="${QEMU_LD_PREFIX:-/usr/aarch64-linux-gnu}"

# Two ranks that train, save and load, of the library; the same program here.
try "a program" $arm -std=c99 -Wall -Wextra -Werror -I. tests/cli/abi_user.c "$out/libdtrain.so" -o "$tmp/user" -lm -lpthread
try "the same program on this machine" sh -c "printf '#define DTRAIN_IMPLEMENTATION\n#include \"dtrain.h\"\n' | cat - tests/cli/abi_user.c >'$tmp/whole.c' &&
    $cc -std=c99 -O0 -w -DDTRAIN_NO_SIMD -DDTRAIN_OMIT_MODELS -DDTRAIN_OMIT_MONITOR -I. '$tmp/whole.c' -o '$tmp/whole' -lm -lpthread"
for time in first again; do
    "$tmp/whole" "$tmp/here" >"$tmp/expected" 2>&1
    timeout 120 qemu-aarch64 -E LD_LIBRARY_PATH="$out" "$tmp/user" "$tmp/there" >"$tmp/out" 2>&1 && grep -q 0x "$tmp/out" && cmp -s "$tmp/out" "$tmp/expected"
    result "two ranks have the bits of this machine, $time" $? "$tmp/out"
done
good "a world of a guest" '^joined' qemu-aarch64 -E LD_LIBRARY_PATH="$out" "$tmp/user" join

# Tests that do not look inside are linked with the joined dtrain.h. Of joins: their worlds' reserves of all memory are mapped
# and unmapped page by page by qemu, which takes it minutes.
try "tests" make -s BUILD="$out" CC=$arm CFLAGS=-O1 "$out/tests/test_ddp" "$out/tests/test_checkpoint" "$out/tests/test_join"
good "test_ddp" ' 0 failed' qemu-aarch64 "$out/tests/test_ddp"
good "test_checkpoint" ' 0 failed' qemu-aarch64 "$out/tests/test_checkpoint"
good "test_join, a member whose process ends" ' 0 failed' qemu-aarch64 "$out/tests/test_join" test_polls
good "test_join, arguments" ' 0 failed' qemu-aarch64 "$out/tests/test_join" test_arguments
finish
