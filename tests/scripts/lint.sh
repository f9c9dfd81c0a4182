#!/bin/sh
# Checks what a compiler does not: contents against tags, widths, words, formatting, function sizes.
failures=0
complain() { failures=$((failures + 1)); echo "lint: $*"; }

# The committed files are what is joined from src/ now.
for joined in dtrain.h dtrain_cuda.cu dtrain_nccl.h; do
    sh tools/join.sh src/$joined | cmp -s - $joined || complain "$joined is stale: make $joined"
done

SOURCES="$(find src -name '*.[ch]' ! -name manual.h) $(find src -name '*.cuh') examples/*.[ch] tools/*.h tools/*/*.[ch] tests/*/*.[ch] tests/*/*.cpp tests/*/*/*.[ch]* bench/*.[ch]"
for file in $SOURCES; do
    wide=$(awk 'length > 120 { print FILENAME ":" FNR; exit }' "$file")
    [ -z "$wide" ] || complain "$wide is wider than 120 columns"
    grep -n -E '\b(TODO|FIXME|XXX)\b' "$file" && complain "$file sounds unfinished"
    grep -n -P '\t| +$' "$file" | head -n 3 | grep . && complain "$file has tabs or trailing blanks"
done
awk 'length > 100 { n++; if (n < 4) print FILENAME ":" FNR } END { exit n > 0 }' src/*.h src/*/*.[ch] src/*/*/*.[ch] || complain "src/ has lines over 100 columns"

# A function above 80 lines is a question to its author.
awk '/^[a-zA-Z].*\)$/ || /^[a-zA-Z].*[a-zA-Z0-9_*]\($/ { name = $0 } /^\{/ { start = FNR }
     /^\}/ && start { if (FNR - start > 80) { print FILENAME ":" start ": " FNR - start " lines: " name; bad = 1 } start = 0 }
     END { exit bad }' src/*/*.c src/*/*/*.c src/*/*/*/*.h src/device/cuda/*.cuh || complain "there are functions above 80 lines"

if command -v clang-format >/dev/null 2>&1; then
    clang-format --dry-run --Werror $SOURCES >/tmp/dtrain_lint.$$ 2>&1 || {
        head -n 10 /tmp/dtrain_lint.$$; complain "clang-format (version 14) would change files"; }
    rm -f /tmp/dtrain_lint.$$
else echo "lint: clang-format is not installed, formatting not checked"; fi
if command -v cppcheck >/dev/null 2>&1; then
    # uninitialised variables are gcc's, clang's and valgrind's: cppcheck 2.10 takes out-parameters for uses
    cppcheck -q --error-exitcode=1 --enable=warning,portability --inline-suppr --suppress=missingIncludeSystem --suppress=uninitvar --suppress=ctuuninitvar \
        --std=c99 -DDTRAIN_IMPLEMENTATION -D__GNUC__=12 -D__linux__ -DCLOCK_MONOTONIC=1 -DMAP_ANONYMOUS=32 dtrain.h || complain "cppcheck"
else echo "lint: cppcheck is not installed"; fi

if [ "$failures" -eq 0 ]; then echo "1 passed, 0 failed"; else echo "0 passed, $failures failed"; exit 1; fi
