#!/bin/sh
# mutate_cuda.sh [COUNT [SEED]]: do the tests notice a broken kernel? Makes COUNT one-line changes to
# dtrain_cuda.cu, one at a time (a barrier dropped, < for <=, + for -, an index off by one, a transpose
# swapped, ...), runs the tests of that section on the emulated device, and lists who survived.
if ! command -v python3 >/dev/null 2>&1; then
    echo "  skip mutation of the kernels: python3 is not installed"; echo "0 passed, 0 failed, 1 skipped"; exit 0
fi
exec python3 tests/cuda/mutate_cuda.py --count "${1:-40}" --seed "${2:-1}" --build "${BUILD:-build}/mutate"
