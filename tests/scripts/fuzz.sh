#!/bin/sh
# Each fuzzer of tests/fuzz for FUZZ_SECONDS (default 30), under the address and undefined behaviour sanitizers.
build=${BUILD:-build}/fuzz
passed=0 failed=0
if ! command -v clang >/dev/null 2>&1; then
    echo "  skip fuzzers: clang is not installed"; echo "0 passed, 0 failed, 1 skipped"; exit 0
fi
mkdir -p "$build"
# fuzz FUZZER: compiles and runs it; its log ends with "fuzz: N inputs", or not
fuzz() {
    program=$build/$(basename "$1" .c)
    clang -O1 -g -I. -DDTRAIN_NO_SIMD -fsanitize=fuzzer,address,undefined "$1" -o "$program" -lm -lpthread >"$program.log" 2>&1 &&
        "$program" -max_total_time="${FUZZ_SECONDS:-30}" -print_final_stats=1 -verbosity=0 -artifact_prefix="$build/" >>"$program.log" 2>&1 &&
        echo "fuzz: $(sed -n 's/^stat::number_of_executed_units: *//p' "$program.log") inputs" >>"$program.log"
}
# Two at a time: most of it is clang, which compiles all of dtrain.h.
lane() { for number in $1; do fuzz "$(ls tests/fuzz/fuzz_*.c | sed -n "${number}p")"; done; }
count=$(ls tests/fuzz/fuzz_*.c | wc -l)
lane "$(seq 1 2 "$count")" &
lane "$(seq 2 2 "$count")" &
wait
for fuzzer in tests/fuzz/fuzz_*.c; do
    log=$build/$(basename "$fuzzer" .c).log
    inputs=$(sed -n 's/^fuzz: //p' "$log")
    if [ -n "$inputs" ]; then passed=$((passed + 1)); echo "  ok   $fuzzer, $inputs"
    else failed=$((failed + 1)); echo "  FAIL $fuzzer"; tail -n 30 "$log"; fi
done
if [ $((passed + failed)) -eq 0 ]; then echo "  FAIL there is no fuzzer"; failed=1; fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
