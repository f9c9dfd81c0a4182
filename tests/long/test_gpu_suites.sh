#!/bin/sh
# gpu_first.sh, gpu_check.sh and gpu_bench.sh without a GPU: the programs are the emulated ones, at a size that takes seconds, and nvidia-smi,
# nvcc, make, compute-sanitizer and python3 are stand-ins. What they print and pack, what becomes of a step that fails, of a
# suite that is cut off, and of a machine that lacks a tool.
. tests/support/shell.sh
case $build in /*) ;; *) build=$PWD/$build ;; esac
emu=$build/emu
if [ ! -x "$emu/gpu_nccl" ] || [ ! -x "$build/resnet_cifar" ]; then
    skip "gpu_first.sh, gpu_check.sh, gpu_bench.sh" "the emulated programs are not built (make test-long builds them)"
    finish
fi

# stub NAME: a program in $tmp/bin, from stdin
mkdir -p "$tmp/bin" "$tmp/programs/cuda" "$tmp/programs/bench" "$tmp/pip/nccl/lib" "$tmp/pip/cu13/lib"
stub() { { echo '#!/bin/sh'; cat; } >"$tmp/${2:-bin}/$1" && chmod +x "$tmp/${2:-bin}/$1"; }
stub nvidia-smi <<'END'
case $1 in -L) echo "GPU 0: Emulated" ;; *) echo "Emulated GPU, 580.1, 8192 MiB" ;; esac
END
stub nvcc <<END
case "\$*" in
    *--help*) echo "  --split-compile" ;;
    *--version*) echo "release 13.0, V13.0.88" ;;
    *gpu_first*|*"-c "*|*" -o $tmp/programs"*) echo "nvcc \$*" >>"$tmp/compiled" ;;
    *-lcublasLt*) [ -e "$tmp/cublas" ] ;;
    *-I$tmp/pip/nccl/include*) echo "dtrain 2 . 28 . 9" ;;
    *) false ;;
esac
END
touch "$tmp/pip/cu13/lib/libcublasLt.so.13"
stub python3 <<END
case "\$*" in
    *'import nvidia.nccl '*) echo $tmp/pip/nccl ;;
    *'import nvidia.cu13 '*) echo $tmp/pip/cu13 ;;
    *'import nvidia'*) exit 1 ;;
    *torch.__version__*) echo 2.11 ;;
    *torch_peer.py*) printf 'torch 2.11, torch.compile %s, attention FLASH_ATTENTION\nstep_ms 2\ntokens_per_second 1234\n' "\$2" ;;
esac
END
stub make <<END
case \$1 in --version) echo "GNU Make 4.3" ;; *) echo "\$*" >>"$tmp/made"; echo "\$LD_LIBRARY_PATH" >>"$tmp/library_path" ;; esac
END
stub gcc <<END
echo "gcc \$*" >>"$tmp/compiled"
END
stub compute-sanitizer <<'END'
case $1 in --help) exit ;; esac
while [ "$1" != --quick ]; do [ ! -x "$1" ] || program=$1; shift; done
"$program" --quick
END

# Limits are for a GPU; an emulation on a machine that does other things gets ten times as much.
cat >"$tmp/bin/timeout" <<END
#!$(command -v bash)
case \$1 in -k) limit=\$3; shift 3; exec $(command -v timeout) -k 5 \$((limit * 10)) "\$@" ;; *) exec $(command -v timeout) "\$@" ;; esac
END
chmod +x "$tmp/bin/timeout" # by bash, which keeps exported functions

# program NAME FLAGS...: the emulated one, with these flags behind the given ones
program() { name=$1; shift; printf 'exec "%s" "$@" %s\n' "$emu/$name" "$*" | stub "$name" programs/cuda; }
small="--layers 1 --channels 16 --heads 2 --seq 8 --vocab 256 --batch 4 --eval-batches 1 --lr 1e-2"
printf 'case "$*" in *--quick*) exec "%s" --quick ;; esac\nexec "%s" "$@" --layers 1 --channels 32 --heads 2 --seq 16 --vocab 256 --batch 4 --gemm 64 --steps 60\n' \
    "$emu/bench_train" "$emu/bench_train" | stub bench_train programs/cuda
program train_gpt $small
# Emulated, these two take minutes.
printf 'exec "%s" "$@" --device cpu --steps 2 --batch 4\n' "$build/resnet_cifar" | stub resnet_cifar programs/cuda
printf 'exec "%s" 1 --device cpu\n' "$build/mlp" | stub mlp programs/cuda
program ddp
program gpu_nccl
printf 'echo "test_three"; echo "5 passed, 0 failed"\n' | stub test_cuda_kernels programs/cuda
program bench_kernels --quick --only add --sizes 5000
printf 'echo "test_one"; echo "3 passed, 0 failed"\n' | stub test_cuda_device programs/cuda
printf 'echo "test_two"; echo "4 passed, 0 failed, 1 skipped"\n' | stub test_cuda_gemm programs/cuda
printf 'echo "{\\"correct\\": true}"\n' | stub bench_strategies programs/bench

# suite NAME OUT: runs it, with its output in $tmp/out and $status
suite() {
    mkdir -p "$tmp/$2"
    PATH=$tmp/bin:$PATH BUILD=$tmp/programs OUT=$tmp/$2 "$(command -v timeout)" 600 bash "tests/cuda/$1.sh" >"$tmp/out" 2>&1
    status=$?
}
expect() { # expect NAME CONDITION...: the output of the suite is shown when it is false
    name=$1; shift
    "$@"; result "$name" $? "$tmp/out"
}
has() { grep -q -E -e "$1" "$tmp/out"; }
packed() { tar -xzOf "$tmp/$1" "$2" 2>/dev/null | grep -q -E -e "$3"; }

# The first suite, without make: plain commands compile the kernels, the library and the programs.
mv "$tmp/bin/make" "$tmp/make"
suite gpu_first first
mv "$tmp/make" "$tmp/bin/make"
expect "gpu-first passes, without make" [ "$status" -eq 0 ]
expect "it skips no step" has '^7 passed, 0 failed, 0 skipped$'
planned=$(sed -n 's/.* of at most \([0-9]*\) s; .*/\1/p' "$tmp/out")
expect "its limits add up to $planned s" [ "${planned:-999}" -le 240 ]
for part in 'dtrain_cuda.cu' 'x c -c - ' 'test_cuda_kernels.o .*-lcublasLt' 'USE_NCCL.* -c tests/nccl/gpu_nccl.c' 'train_gpt.o .*-ldl$'; do
    expect "it compiles or links $part" grep -q -e "$part" "$tmp/compiled"
done
expect "collectives are replayed" has 'NCCL, in a recorded step .*recorded in a graph'
expect "every schedule runs over NCCL" has 'NCCL, a pipeline of two +2 ranks: every schedule of a pipeline is right'
expect "and one through the host" has 'a pipeline through the host +loss'
expect "its results are packed" packed first/gpu-first.tgz gpu-first/steps '^7 passed'

suite gpu_check check
expect "gpu-check passes" [ "$status" -eq 0 ]
expect "no step is skipped" has '^19 passed, 0 failed, 0 skipped$'
planned=$(sed -n 's/.* of at most \([0-9]*\) s; .*/\1/p' "$tmp/out")
expect "its limits add up to $planned s" [ "${planned:-999}" -le 560 ]
awk '$2 ~ /^[0-9]+$/ && $3 == "s" { print $4 }' "$tmp/out" | uniq | tr '\n' ' ' >"$tmp/order"
expect "NCCL and ResNet come before sanitizers" grep -q '^build kernel NCCL, ddp mlp train_gpt, resnet_cifar, train_gpt, memcheck initcheck racecheck synccheck $' "$tmp/order"
expect "a collective is replayed in a graph" has 'NCCL, in a graph .*recorded in a graph'
expect "tests are counted" has 'kernel tests .* 12 passed, 0 failed, 1 skipped'
expect "what kernels are compiled for, and slow products" has 'train_gpt, bf16, graph .*kernels for sm_90, slow products [0-9]+$'
expect "pip's NCCL and cublasLt are found" grep -q -e "--split-compile=0 -I$tmp/pip/nccl/include -Xcompiler -idirafter,$tmp/pip/cu13/include -L$tmp/programs/gpu/lib" "$tmp/made"
expect "and at run time" grep -q "^$tmp/pip/nccl/lib:$tmp/pip/cu13/lib" "$tmp/library_path"
expect "the linker finds cublasLt" [ -e "$tmp/programs/gpu/lib/libcublasLt.so" ]
expect "all is packed" packed check/gpu-check.tgz gpu-check/steps '^19 passed'
expect "with the logs" packed check/gpu-check.tgz gpu-check/train_gpt-bf16.log 'validation loss'
expect "and the machine" packed check/gpu-check.tgz gpu-check/machine.jsonl '"gpu": "Emulated GPU".*"nccl": "2.28.9", "torch": "2.11"'

# A step that fails: the others run, the sentence of the program is shown, the exit status is 1.
mv "$tmp/programs/cuda/ddp" "$tmp/ddp"
echo 'echo "ddp: the device is lost" >&2; exit 3' | stub ddp programs/cuda
suite gpu_check failing
expect "a step that fails is told" has '^  FAIL +[0-9]+ s  ddp +exit status 3: ddp: the device is lost$'
expect "the others run" has '^18 passed, 1 failed, 0 skipped$'
expect "the exit status is 1" [ "$status" -eq 1 ]
expect "the failure is packed" packed failing/gpu-check.tgz gpu-check/steps '^  FAIL .* ddp '

# Cut off in the middle, by TERM and by KILL: what was found out is there.
for signal in TERM KILL; do
    echo "touch $tmp/hangs; sleep 60" | stub ddp programs/cuda
    rm -f "$tmp/hangs"
    mkdir -p "$tmp/$signal"
    PATH=$tmp/bin:$PATH BUILD=$tmp/programs OUT=$tmp/$signal bash tests/cuda/gpu_check.sh >"$tmp/out" 2>&1 &
    id=$!
    wait_for 120 [ -e "$tmp/hangs" ]
    kill -$signal $id
    wait $id 2>/dev/null
    expect "cut off by $signal: the steps before are packed" packed $signal/gpu-check.tgz gpu-check/steps '^  ok .* NCCL, in a graph'
    [ $signal = KILL ] || expect "cut off by $signal: it says so" packed $signal/gpu-check.tgz gpu-check/steps '^  FAIL .* cut off'
done
leftovers | while read -r id name; do kill -9 "$id"; done 2>/dev/null # the step that nobody could end
mv "$tmp/ddp" "$tmp/programs/cuda/ddp"

suite gpu_bench bench
expect "gpu-bench passes" [ "$status" -eq 0 ]
expect "training is first" [ "$(awk '$2 ~ /^[0-9]+$/ && $3 == "s" { print $4 }' "$tmp/out" | sed -n 2p)" = bench_train ]
planned=$(sed -n 's/.* of at most \([0-9]*\) s; .*/\1/p' "$tmp/out")
expect "its limits add up to $planned s" [ "${planned:-999}" -le 560 ]
expect "each run of training is told, ours" has '^round 1 of 1: 1 GPU, bf16, graph: [0-9]+ tokens/s'
for mode in '' max-autotune-no-cudagraphs; do
    expect "and PyTorch's $mode" has "^round 1 of 1: PyTorch.*: 1234 tokens/s, .*torch.compile $mode, attention FLASH_ATTENTION"
done
expect "ResNet's speed" has 'resnet_cifar, bf16 +images/s +[0-9]+'
expect "the results are packed" packed bench/gpu-bench.tgz gpu-bench/emulated-gpu.jsonl '"bench": "train", .*"ranks": 1'
expect "with the machine" packed bench/gpu-bench.tgz gpu-bench/emulated-gpu.jsonl '"bench": "machine"'
expect "and the kernels" packed bench/gpu-bench.tgz gpu-bench/emulated-gpu.jsonl '"bench": "kernel'

# Without a tool: one sentence, and 2.
echo 'echo "bmake"' | stub make
suite gpu_check none
expect "without GNU make" has '^gpu-check: GNU make is not installed'
expect "the exit status is 2" [ "$status" -eq 2 ]
echo 'exit 1' | stub nvidia-smi
suite gpu_bench none
expect "without a GPU" has '^gpu-bench: no NVIDIA GPU was found'
finish
