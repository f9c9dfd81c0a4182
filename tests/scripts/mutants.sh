# mutants.sh: what scripts that break the library on purpose share; read it by `.` from the root. A mutant is one line
# of src/ changed; its file is compiled and linked before the library, and a test program must fail.
build=${BUILD:-build}
out=$build/mutants
passed=0 failed=0
mkdir -p "$out"

# stop WORDS: nothing can be said about mutants
stop() { tail -n 3 "$out/log"; echo "  FAIL $1"; echo "0 passed, 1 failed"; exit 1; }

# prepare PROGRAM: compile a test program, and the library unless it is there
prepare() {
    "${MAKE:-make}" -s --no-print-directory BUILD="$build" "$build/sources.a" >"$out/log" 2>&1 ||
        stop "sources.a cannot be built"
    ${CC:-cc} -std=c99 -O1 -Isrc -I. -Itests -Itests/support -c tests/*/"$1.c" -o "$out/$1.o" >"$out/log" 2>&1 ||
        stop "$1.c does not compile"
    program=$1
    link >"$out/log" 2>&1 && survives || stop "$1 fails without a mutant"
}
# object FILE.c; link [FILE.o]: the test program with this object in place of the library's
object() { ${CC:-cc} -std=c99 -O1 -Isrc -Itests/nccl/mock -c "$1" -o "$1.o"; }
link() { ${CC:-cc} "$out/$program.o" "$@" "$build/sources.a" -o "$out/programs" -lm -lpthread; }
# survives: how the test program is run
survives() { DTRAIN_TEST_FIRST=1 DTRAIN_TEST_FULL=0 timeout 300 "$out/programs" $arguments >"$out/log" 2>&1; }

# mutant WORDS FILE SED: what is broken, in which file of src/, and how
mutant() {
    case $1 in *"$only"*) ;; *) return ;; esac
    copy=$out/$(basename "$2")
    sed "$3" "src/$2" >"$copy"
    if cmp -s "$copy" "src/$2"; then
        why="src/$2 has no such line any more"
    elif ! { object "$copy" && link "$copy.o"; } >"$out/log" 2>&1; then
        cat "$out/log"; why="does not compile"
    elif survives; then
        why="survives"
    else
        passed=$((passed + 1))
        echo "  killed: $1 ($(grep -a -h -m 1 -oE 'FAIL (seed [0-9]*: .*|test_[a-z_]*)' "$out/log" | cut -c 1-90))"
        return
    fi
    failed=$((failed + 1))
    echo "  FAIL $1: $why"
}
