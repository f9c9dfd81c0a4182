# shell.sh: what the test scripts share. A script sources it from the root of the tree, tests, and finishes:
#
#     . tests/support/shell.sh
#     good "ddp, 2 ranks" "learned +1.0" "$build/ddp"
#     bad "unknown flag" "--nonsense" "$build/train_gpt" --nonsense
#     finish
#
# It gives them $build, and $tmp, a folder that is removed in the end. Every process that a script starts
# carries its mark: what is left of them can be found (leftovers), and counts as a failure in the end.
# make's runner reads the last line, "N passed, N failed[, N skipped]".
build=${BUILD:-build}
passed=0 failed=0 skipped=0
tmp=$(mktemp -d) || exit 1
TEST_MARK=$tmp
export TEST_MARK
at_end= # commands of the script's own, run when it ends in whatever way
trap 'eval "$at_end"; rm -rf "$tmp"' EXIT
trap 'exit 1' HUP INT TERM

# result NAME STATUS [FILE]: counts; a failure shows the end of FILE
result() {
    if [ "$2" -eq 0 ]; then passed=$((passed + 1)); printf '  ok   %s\n' "$1"
    else
        failed=$((failed + 1)); printf '  FAIL %s\n' "$1"
        [ ! -s "$3" ] || tail -n 20 "$3"
    fi
}
# skip NAME WHY [N]: counts N tests (1) that cannot run here
skip() { skipped=$((skipped + ${3:-1})); printf '  skip %s: %s\n' "$1" "$2"; }
# have PROGRAM: is installed
have() { command -v "$1" >/dev/null 2>&1; }

# try NAME COMMAND...: ends well; its output is shown when it does not
try() {
    name=$1; shift
    "$@" >"$tmp/log" 2>&1
    result "$name" $? "$tmp/log"
}
# good NAME PATTERN COMMAND...: ends well within 300 s and prints a line with PATTERN; $tmp/out has what it printed
good() {
    name=$1 pattern=$2; shift 2
    timeout 300 "$@" >"$tmp/out" 2>"$tmp/err"
    status=$?
    cat "$tmp/err" >>"$tmp/out"
    [ "$status" -eq 0 ] && grep -q -E -e "$pattern" "$tmp/out"
    result "$name" $? "$tmp/out"
}
# bad NAME PATTERN COMMAND...: fails by itself within 20 s, with PATTERN on stderr in at most three lines, prints
# no result, and leaves no process
bad() {
    name=$1 pattern=$2; shift 2
    timeout 20 "$@" >"$tmp/out" 2>"$tmp/err"
    status=$?
    [ "$status" -ne 0 ] && [ "$status" -lt 124 ] && grep -q -E -e "$pattern" "$tmp/err" &&
        [ "$(wc -l <"$tmp/err")" -le "${bad_lines:-3}" ] && ! grep -q 'validation loss' "$tmp/out" &&
        nothing_left 2>>"$tmp/err"
    result "bad input: $name" $? "$tmp/err"
}

# wait_for SECONDS COMMAND...: until it succeeds
wait_for() {
    looks=$((${1} * 20)); shift
    while ! "$@" >/dev/null 2>&1; do
        looks=$((looks - 1))
        [ $looks -gt 0 ] || return 1
        sleep 0.05
    done
}
# wait_line SECONDS PATTERN FILE: until FILE has a line with PATTERN
wait_line() { wait_for "$1" grep -q -E -e "$2" "$3"; }

# leftovers: ids and names of the processes that the script has started and that still run
leftovers() {
    for id in $(env -u TEST_MARK grep -l -z -F -x "TEST_MARK=$tmp" /proc/[0-9]*/environ 2>/dev/null | tr -cd '0-9\n'); do
        case $(cut -d ' ' -f 3 "/proc/$id/stat" 2>/dev/null) in
            '' | Z) ;;
            *) echo "$id $(tr '\0' ' ' <"/proc/$id/cmdline" 2>/dev/null | cut -c 1-80)" ;;
        esac
    done
}
# nothing_left: after a while none of them runs; else they are named on stderr and killed
nothing_left() {
    wait_for 20 no_leftovers && return
    leftovers >&2
    leftovers | while read -r id name; do kill -9 "$id"; done 2>/dev/null
    return 1
}
no_leftovers() { [ -z "$(leftovers)" ]; }

# readme_program before|after: the program that README shows as a diff, without the lines with + or those with -
readme_program() {
    case $1 in before) drop=+ ;; *) drop=- ;; esac
    sed -n '/^```diff$/,/^```$/p' README.md | sed "/^\`\`\`/d; /^$drop/d; s/^.//"
}

# take_ports: $port is the first of 200 ports that no other test has; ports.h does the same
take_ports() {
    have flock || { port=$((20000 + $$ % 60 * 200)); return; }
    while :; do
        block=0
        while [ $block -lt 60 ]; do
            lock=${TMPDIR:-/tmp}/dtrain_test_ports.$block
            if (: >>"$lock") 2>/dev/null && exec 9>>"$lock" && flock -n 9; then
                port=$((20000 + block * 200))
                return
            fi
            block=$((block + 1))
        done
        sleep 0.2
    done
}

# finish: the last line of a script; cleans up, looks for leftovers, prints the counts
finish() {
    eval "$at_end"
    at_end=
    nothing_left; result "nothing is left" $?
    if [ "$skipped" -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"
    else echo "$passed passed, $failed failed"; fi
    [ "$failed" -eq 0 ]; exit
}
