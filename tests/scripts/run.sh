#!/bin/sh
# run.sh PROGRAM... [--beside PROGRAM...]: runs test programs and scripts, adds up their "N passed, N failed[,
# N skipped]". Those behind --beside, which compute alone or compile, come last, one for each core
# at a time. "skip WHAT: WHY" in place of a program is one skipped test.
passed=0 failed=0 skipped=0
output=${BUILD:-build}/output
cores=$(nproc 2>/dev/null || echo 1)

run() { # run PROGRAM OUTPUT: and its exit status in OUTPUT.status
    case $1 in
        "skip "*) return ;;
        *.sh) sh "$1" >"$2" 2>&1 ;;
        *) "$1" >"$2" 2>&1 ;;
    esac
    echo $? >"$2.status"
}
count() { # count PROGRAM OUTPUT
    echo "$1"
    case $1 in "skip "*) skipped=$((skipped + 1)); return ;; esac
    status=$(cat "$2.status")
    cat "$2"
    line=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$2" | tail -n 1)
    if [ -z "$line" ]; then
        echo "  FAIL $1 ended with status $status and without a count"
        failed=$((failed + 1))
        return
    fi
    p=$(echo "$line" | sed 's/^\([0-9]*\) passed.*/\1/')
    f=$(echo "$line" | sed 's/.* \([0-9]*\) failed.*/\1/')
    s=$(echo "$line" | sed -n 's/.* \([0-9]*\) skipped.*/\1/p')
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + ${s:-0}))
    if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then failed=$((failed + 1)); fi
}

while [ $# -gt 0 ] && [ "$1" != --beside ]; do
    run "$1" "$output"
    count "$1" "$output"
    shift
done

if [ $# -gt 1 ]; then
    shift
    echo "$# programs beside one another, which takes minutes"
    trap 'trap - INT; kill 0' INT # a shell's background jobs ignore it
    rm -rf "$output".*
    core=0
    while [ $core -lt "$cores" ]; do
        number=0
        for program in "$@"; do # a core takes the next that is free
            number=$((number + 1))
            mkdir "$output.$number.taken" 2>/dev/null && run "$program" "$output.$number"
        done &
        core=$((core + 1))
    done
    wait
    number=0
    for program in "$@"; do
        number=$((number + 1))
        count "$program" "$output.$number"
    done
fi
rm -rf "$output" "$output".*

echo
if [ "$skipped" -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"
else echo "$passed passed, $failed failed"; fi
[ "$failed" -eq 0 ]
