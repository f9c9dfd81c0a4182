#!/bin/sh
# The tests that valgrind can run in reasonable time, with leaks counted as errors.
build=${BUILD:-build}
passed=0 failed=0
if ! command -v valgrind >/dev/null 2>&1; then
    echo "  skip valgrind is not installed"; echo "0 passed, 0 failed, 1 skipped"; exit 0
fi
for test in "test_tape" "test_ddp test_same" "test_data" "test_metrics" "test_optim"; do
    set -- $test
    if DTRAIN_TEST_TIMEOUT=600 valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite \
        --child-silent-after-fork=no "$build/tests/$1" $2 >"$build/valgrind.log" 2>&1; then
        passed=$((passed + 1)); echo "  ok   valgrind $test"
    else failed=$((failed + 1)); echo "  FAIL valgrind $test"; tail -n 30 "$build/valgrind.log"; fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
