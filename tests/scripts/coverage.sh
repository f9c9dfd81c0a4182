#!/bin/sh
# How many lines of src/ the tests execute, folder by folder: builds them with gcov's counters in a folder of its own, runs
# them, and adds up what the joined files counted. Ranks end with _exit, which writes no counts; so it is wrapped. What
# a rank that is killed had counted is lost, and lines that only such ranks reach count as not executed.
build=${BUILD:-build}/coverage
mkdir -p "$build"
find "$build" -name '*.gcda' -delete
cat >"$build/wrap.c" <<'END'
void __gcov_dump(void);
void __real__exit(int code) __attribute__((noreturn));
void __wrap__exit(int code);
void __wrap__exit(int code) { __gcov_dump(); __real__exit(code); }
END
${CC:-cc} -c "$build/wrap.c" -o "$build/wrap.o" || exit 1
DTRAIN_TEST_TIMEOUT=900 make test BUILD="$build" CFLAGS="-O0 -g --coverage -fprofile-update=atomic" \
    SCRIPTS=tests/cli/test_examples.sh LIBS="-lm -lpthread $build/wrap.o -Wl,--wrap=_exit" >"$build/log" 2>&1
tail -n 2 "$build/log"

# The counts of the joined files and of src/ compiled file by file, from every object that has them. A line is known by
# its file in src/, its text and its number among lines of the same text there, which both forms have in common; it is
# executed when one object has executed it.
mkdir -p "$build/gcov"
rm -f "$build"/gcov/*
number=0
for counts in "$build"/dtrain.gcda "$build"/emu/device.gcda "$build"/emu/dtrain_cuda.gcda "$build"/tests/instances.gcda "$build"/tests/*-test_nccl.gcda \
    $(find "$build/src" -name '*.gcda'); do
    [ -e "$counts" ] || continue
    number=$((number + 1))
    gcov -t -o "$(dirname "$counts")" "$counts" 2>/dev/null >"$build/gcov/$number.gcov"
done
cat "$build"/gcov/*.gcov | awk -F: '
    /^ *-: *0:Source:/ {
        file = $4; path = ""; split("", times)
        joined = file ~ /(^|\/)dtrain(_cuda|_nccl)?\.(h|cu)$/
        if (file ~ /^src\//) path = file
    }
    joined && match($0, / \* src\/[a-z_]+\/.*\.(c|h|cuh)$/) { path = substr($0, RSTART + 3) }
    path == "" { next }
    { count = $1; gsub(/ /, "", count) }
    count == "-" { next }
    {
        text = $0; sub(/^[^:]*:[^:]*:/, "", text)
        nth = ++times[path, text]
        key = path SUBSEP text SUBSEP nth
        folder[key] = path; sub(/\/[^\/]*$/, "", folder[key]); sub(/^src\//, "", folder[key])
        if (count !~ /^[#=]/) executed[key] = 1
    }
    END {
        for (key in folder) { lines[folder[key]]++; done[folder[key]] += executed[key]; all++; good += executed[key] }
        for (f in lines) printf "%-20s %6d of %6d lines  %5.1f %%\n", f, done[f], lines[f], 100 * done[f] / lines[f] | "sort"
        close("sort")
        if (all) printf "%-20s %6d of %6d lines  %5.1f %%\n", "all", good, all, 100 * good / all
        exit !all
    }'
