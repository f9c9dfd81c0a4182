#!/bin/sh
# The tests that valgrind can run in reasonable time, with leaks counted as errors.
build=${BUILD:-build}
passed=0 failed=0
if ! command -v valgrind >/dev/null 2>&1; then
    echo "  skip valgrind: not installed"; echo "0 passed, 0 failed, 1 skipped"; exit 0
fi
for test in "test_tape" "test_ddp test_same" "test_data" "test_images" "test_metrics" "test_optim"; do
    set -- $test
    DTRAIN_TEST_TIMEOUT=600 valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite \
        --child-silent-after-fork=no "$build/tests/$1" $2 >"$build/valgrind.log" 2>&1
    status=$?
    # A part of a name that no test has runs nothing, and finds nothing.
    if [ $status -eq 0 ] && tail -n 1 "$build/valgrind.log" | grep -q '^[1-9][0-9]* passed'; then
        passed=$((passed + 1)); echo "  ok   valgrind $test: $(tail -n 1 "$build/valgrind.log")"
    else failed=$((failed + 1)); echo "  FAIL valgrind $test"; tail -n 30 "$build/valgrind.log"; fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
