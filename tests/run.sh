#!/bin/sh
# run.sh PROGRAM...: runs test programs and scripts, adds up their "N passed, N failed[, N skipped]".
# "skip WHAT: WHY" in place of a program is one skipped test.
passed=0 failed=0 skipped=0
for program in "$@"; do
    echo "$program"
    case $program in
        "skip "*) skipped=$((skipped + 1)); continue ;;
        *.sh) output=$(sh "$program" 2>&1) ;;
        *) output=$("$program" 2>&1) ;;
    esac
    status=$?
    echo "$output"
    line=$(echo "$output" | grep -E '^[0-9]+ passed, [0-9]+ failed' | tail -n 1)
    if [ -z "$line" ]; then
        echo "  FAIL $program ended with status $status and without a count"
        failed=$((failed + 1))
        continue
    fi
    p=$(echo "$line" | sed 's/^\([0-9]*\) passed.*/\1/')
    f=$(echo "$line" | sed 's/.* \([0-9]*\) failed.*/\1/')
    s=$(echo "$line" | sed -n 's/.* \([0-9]*\) skipped.*/\1/p')
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + ${s:-0}))
    if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then failed=$((failed + 1)); fi
done
echo
if [ "$skipped" -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"
else echo "$passed passed, $failed failed"; fi
[ "$failed" -eq 0 ]
