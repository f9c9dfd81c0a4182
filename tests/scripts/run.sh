#!/bin/sh
# run.sh PROGRAM...: runs test programs and scripts in the order given, LANES of them at a time (default: three for two
# cores, since they wait for one another, for deadlines and for the system). Each ends with "N passed, N failed[, N
# skipped]"; here they become rows of one table, and one sum. What a program prints is shown when it fails, and its
# lines "skip ..." always.
# "skip WHAT: WHY" in place of a program is one skipped test.
lanes=${LANES:-$((($(nproc 2>/dev/null || echo 1) * 3 + 1) / 2))}
out=${BUILD:-build}/output
passed=0 failed=0 skipped=0
if [ $# -eq 0 ]; then echo "run.sh: no program is selected"; echo "0 passed, 1 failed"; exit 1; fi
rm -rf "$out"
mkdir -p "$out" && mkfifo "$out/ended" || exit 1

# lane PROGRAM...: takes the next program that nobody has taken until there is none; writes its number when it has ended.
lane() {
    number=0
    for program in "$@"; do
        number=$((number + 1))
        mkdir "$out/$number.taken" 2>/dev/null || continue
        start=$(date +%s)
        case $program in
            "skip "*) echo "  $program"; echo "0 passed, 0 failed, 1 skipped" ;;
            *.sh) sh "$program" ;;
            *) "$program" ;;
        esac >"$out/$number" 2>&1
        echo "$? $(($(date +%s) - start))" >"$out/$number.status"
        echo "$number" >"$out/ended"
    done
}

# row NAME NUMBER: the row of an ended program, what it has to say, and its part of the sum
row() {
    name=$1 file=$out/$2
    case $name in "skip "*) name=${name#skip } name=${name%%:*} ;; esac
    read -r status seconds <"$file.status"
    count=$(grep -E '^[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?$' "$file" | tail -n 1)
    set -- $(echo "$count" | tr -cd '0-9 ')
    p=${1:-0} f=${2:-0} s=${3:-0} why=
    if [ -z "$count" ]; then why="ended with status $status and without a count"
    elif [ $((p + f + s)) -eq 0 ]; then why="ran no test"
    elif [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then why="ended with status $status"; fi
    [ -z "$why" ] || f=$((f + 1))
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    printf '%-36s %6d %6d %7d %7d\n' "$name" "$p" "$f" "$s" "$seconds"
    if [ "$f" -gt 0 ]; then cat "$file"; else grep '^  skip' "$file"; fi
    [ -z "$why" ] || echo "  FAIL $name $why"
}

trap 'trap - INT TERM; kill 0' INT TERM # a shell's background jobs ignore the keyboard
printf '%-36s %6s %6s %7s %7s\n' "$# programs, $lanes at a time" passed failed skipped seconds
begin=$(date +%s)
exec 3<>"$out/ended"
while [ "$lanes" -gt 0 ]; do
    lane "$@" 3>&- & # a program that inherits the pipe may make it non-blocking: then this shell reads without rest
    lanes=$((lanes - 1))
done
for each in "$@"; do
    number= # a child that ends meanwhile interrupts read
    until [ -n "$number" ]; do read -r number <&3; done
    eval "row \"\${$number}\" $number"
done
wait # for the lanes to see that nothing is left, before the marks of what is taken go
rm -rf "$out"

echo
echo "$(($(date +%s) - begin)) seconds"
if [ "$skipped" -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"
else echo "$passed passed, $failed failed"; fi
[ "$failed" -eq 0 ]
