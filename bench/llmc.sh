#!/bin/sh
# llmc.sh LLMC: times the CPU training step of llm.c, of which LLMC is a checkout (https://github.com/karpathy/llm.c;
# nothing is downloaded here), as a peer of bench_train:
#   build/bench/bench_train --model gpt2 --peer "llm.c=sh bench/llmc.sh ../llm.c"
# bench_train says by THREADS BATCH SEQ LAYERS HEADS CHANNELS VOCAB STEPS what to run; by hand they are a GPT-2.
# The flags are those of llm.c's Makefile for train_gpt2 with OpenMP; LLMC_CC is the compiler (its Makefile: clang).
set -e
[ -f "$1/train_gpt2.c" ] || { echo "llmc.sh: \"$1\" is no checkout of llm.c: it has no train_gpt2.c" >&2; exit 2; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
compile="${LLMC_CC:-cc} -Ofast -Wno-unused-result -Wno-ignored-pragmas -Wno-unknown-attributes -march=native -fopenmp -DOMP"
echo "llm.c $(git -C "$1" rev-parse --short HEAD 2>/dev/null || echo of unknown commit): $compile"
$compile -I "$1" "$(dirname "$0")/llmc_peer.c" -lm -o "$folder/llmc_peer"
OMP_NUM_THREADS=${THREADS:-1} "$folder/llmc_peer" "${BATCH:-4}" "${SEQ:-64}" "${LAYERS:-12}" "${HEADS:-12}" "${CHANNELS:-768}" \
    "${VOCAB:-50257}" "${STEPS:-6}"
