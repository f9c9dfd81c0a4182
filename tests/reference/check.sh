#!/bin/sh
# Makes the golden values again with PyTorch and compares them with the committed headers.
python=${PYTHON:-python3}
here=$(dirname "$0")
if ! $python -c 'import torch' >/dev/null 2>&1; then
    echo "  skip $python has no torch (Debian: apt-get install python3-torch)"
    echo "0 passed, 0 failed, 4 skipped"
    exit 0
fi
out=$(mktemp -d) passed=0 failed=0 skipped=0
for name in gpt2 op conv scaler llama; do
    $python "$here/make_${name}_golden.py" "$out/${name}_golden.h" >"$out/log" 2>&1
    code=$?
    if [ $code -eq 77 ]; then # this torch is too old
        skipped=$((skipped + 1)); echo "  skip ${name}_golden.h: $(cat "$out/log")"
    elif [ $code -eq 0 ] && cmp "$out/${name}_golden.h" "$here/${name}_golden.h"; then
        passed=$((passed + 1)); echo "  ok   ${name}_golden.h is what PyTorch computes"
    else failed=$((failed + 1)); cat "$out/log"; echo "  FAIL ${name}_golden.h"; fi
done
rm -rf "$out"
if [ $skipped -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"
else echo "$passed passed, $failed failed"; fi
[ "$failed" -eq 0 ]
