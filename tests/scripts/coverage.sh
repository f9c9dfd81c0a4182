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

# The counts of the three files, from every object that has them: a line is executed when one object has executed it.
mkdir -p "$build/gcov"
cd "$build/gcov" || exit 1
rm -f ./*.gcov
for counts in ../dtrain.gcda ../emu/dtrain.gcda ../emu/dtrain_cuda.gcda ../tests/*-test_nccl.gcda; do
    [ -e "$counts" ] || continue
    name=$(basename "$counts" .gcda)_$(basename "$(dirname "$counts")")
    gcov -t -s "$(cd ../../.. && pwd)" -o "$(dirname "$counts")" "$counts" 2>/dev/null >"$name.gcov"
done
cat ./*.gcov | awk -F: '
    /^ *-: *0:Source:/ { file = $4; path = "" }
    file !~ /dtrain(_cuda|_nccl)?\.(h|cu)$/ { next }
    match($0, / \* src\/[a-z_]+\/.*\.(c|h|cuh)$/) { path = substr($0, RSTART + 7); sub(/\/[^\/]*$/, "", path) }
    path == "" { next }
    { count = $1; gsub(/ /, "", count); key = file ":" $2; gsub(/ /, "", key) }
    count == "-" { next }
    { folder[key] = path; if (count !~ /^[#=]/) executed[key] = 1 }
    END {
        for (key in folder) { lines[folder[key]]++; done[folder[key]] += executed[key]; all++; good += executed[key] }
        for (f in lines) printf "%-16s %6d of %6d lines  %5.1f %%\n", f, done[f], lines[f], 100 * done[f] / lines[f] | "sort"
        close("sort")
        if (all) printf "%-16s %6d of %6d lines  %5.1f %%\n", "all", good, all, 100 * good / all
        exit !all
    }'
