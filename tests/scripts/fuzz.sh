#!/bin/sh
# Each fuzzer of tests/fuzz, which make fuzzers has built, for FUZZ_SECONDS (default 30), two at a time; from
# DTRAIN_TEST_SEED on, as random tests (tests/support/test.h).
build=${BUILD:-build}/fuzz
seed=${DTRAIN_TEST_SEED:-618033988}
[ "$seed" = new ] && seed=0 # libFuzzer takes the time
passed=0 failed=0
if ! command -v clang >/dev/null 2>&1; then
    echo "  skip fuzzers: clang is not installed"; echo "0 passed, 0 failed, 1 skipped"; exit 0
fi
# fuzz FUZZER: runs it; its log ends with "fuzz: N inputs", or not
fuzz() {
    program=$build/$1
    "$program" -seed="$seed" -max_total_time="${FUZZ_SECONDS:-30}" -print_final_stats=1 -verbosity=0 -artifact_prefix="$build/" >"$program.log" 2>&1 &&
        echo "fuzz: $(sed -n 's/^stat::number_of_executed_units: *//p' "$program.log") inputs" >>"$program.log"
}
fuzzers=$(basename -s .c tests/fuzz/fuzz_*.c)
lane() { for fuzzer in $(echo "$fuzzers" | sed -n "$1"); do fuzz "$fuzzer"; done; }
lane 'p;n' &
lane 'n;p' &
wait
for fuzzer in $fuzzers; do
    log=$build/$fuzzer.log
    inputs=$(sed -n 's/^fuzz: //p' "$log")
    if [ -n "$inputs" ]; then passed=$((passed + 1)); echo "  ok   $fuzzer, $inputs"
    else failed=$((failed + 1)); echo "  FAIL $fuzzer"; tail -n 30 "$log"; fi
done
if [ $((passed + failed)) -eq 0 ]; then echo "  FAIL there is no fuzzer"; failed=1; fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
