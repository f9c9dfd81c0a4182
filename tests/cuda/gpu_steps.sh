# gpu_steps.sh: what make gpu-first, gpu-check and gpu-bench share. They source it from the root of the tree, with $suite set.
#
# A step is a command with a limit of seconds and a log of its own; the limits of a suite add up to 240 s (gpu-first) or 560 s at most.
# When a step ends, a line about it is printed and appended to $logs/steps, and all of $logs is packed into
# $OUT/$suite.tgz: what is cut off, even by kill -9, leaves what it had found out.
#   BUILD   folder of the programs, build    OUT   folder of the archive, BUILD/gpu    NVCC   nvcc
# shellcheck shell=bash
build=${BUILD:-build}
bin=$build/cuda
out=${OUT:-$build/gpu}
logs=$build/gpu/$suite
SECONDS=0
passed=0 failed=0 skipped=0 planned=0 running=
nvcc=${NVCC:-nvcc}

missing() { echo "$suite: $1" >&2; exit 2; }
gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | grep MiB | head -n 1)
[ -n "$gpu" ] || missing "no NVIDIA GPU was found: nvidia-smi lists none (make test runs the kernels without one)"
IFS=, read -r gpu driver memory <<<"$gpu"
command -v "$nvcc" >/dev/null || [ ! -x /usr/local/cuda/bin/nvcc ] || PATH=$PATH:/usr/local/cuda/bin
command -v "$nvcc" >/dev/null || missing "$gpu is there, but $nvcc is not installed: install the CUDA Toolkit or set NVCC"
[ $suite = gpu-first ] || make --version 2>/dev/null | grep -q GNU || missing "GNU make is not installed, which builds the programs: apt-get install make"
for tool in gcc timeout tar awk; do
    command -v $tool >/dev/null || missing "$tool is not installed: apt-get install gcc coreutils tar gawk"
done

# NCCL and cublasLt may be there as Python's packages alone, which have no name for the linker.
package() { python3 -c "import $1 as package; print(list(package.__path__)[0])" 2>/dev/null; }
nvccflags=
! "$nvcc" --help | grep -q -e --split-compile || nvccflags=--split-compile=0
folder=$(package nvidia.nccl) && nvccflags="$nvccflags -I$folder/include" && libraries=$folder/lib
if ! echo 'int main() { return 0; }' | "$nvcc" -x cu - -lcublasLt -o /dev/null >/dev/null 2>&1; then
    for folder in "$(package nvidia.cu13)/lib" "$(package nvidia.cublas)/lib"; do
        library=$(ls "$folder"/libcublasLt.so.* 2>/dev/null | head -n 1)
        [ -n "$library" ] || continue
        mkdir -p "$build/gpu/lib"
        ln -sf "$library" "$build/gpu/lib/libcublasLt.so"
        nvccflags="$nvccflags -Xcompiler -idirafter,${folder%/lib}/include -L$build/gpu/lib" libraries=${libraries:+$libraries:}$folder
        break
    done
fi
[ -z "$libraries" ] || export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
build() { make -j"$(nproc)" BUILD="$build" CUDA_ARCH=native NVCCFLAGS="$nvccflags" "$@"; }
export -f build
export bin build logs nvccflags
has_nccl() { echo '#include <nccl.h>' | "$nvcc" $nvccflags -E -x cu - >/dev/null 2>&1; }

rm -rf "$logs"
mkdir -p "$logs" "$out" || exit 1
version() { "$@" 2>/dev/null | head -n 1 | tr -d '"\\'; }
nccl_version=$(printf '#include <nccl.h>\ndtrain NCCL_MAJOR.NCCL_MINOR.NCCL_PATCH\n' |
    "$nvcc" $nvccflags -E -x cu - 2>/dev/null | sed -n 's/^dtrain //p' | tr -d ' ')
printf '{"bench": "machine", "gpu": "%s", "driver": "%s", "memory": "%s", "cores": %d, "nvcc": "%s", "nccl": "%s", "torch": "%s", "date": "%s", "commit": "%s"}\n' \
    "$gpu" "${driver# }" "${memory# }" "$(nproc)" "$("$nvcc" --version | sed -n 's/.*release .*V//p')" "$nccl_version" \
    "$(version python3 -c 'import torch; print(torch.__version__)')" "$(date -u +%Y-%m-%dT%H:%MZ)" \
    "${COMMIT:-$(version git describe --always --dirty)}" | tee "$logs/machine.jsonl"

train() { # train FLAGS...: a short run whose loss has to fall
    "$bin/train_gpt" --device cuda --steps 60 --warmup 10 --eval-batches 4 --sample 0 "$@" >"$logs/train.out" 2>&1
    local status=$?
    cat "$logs/train.out"
    [ $status -eq 0 ] || return $status
    awk '/kernels for sm_/ { sub(/.*\(/, ""); sub(/\).*/, ""); code = $0 } /slow products/ { slow = $3 }
         /^  loss / { last = $2; first = $4 + 0; good = last < first - 1 }
         END { print "loss " first " to " last ", " code ", slow products " slow; exit !good }' "$logs/train.out"
}
export -f train
pack() { tar -czf "$out/.$suite.tgz" -C "$build/gpu" "$suite" && mv "$out/.$suite.tgz" "$out/$suite.tgz"; }
# note RESULT SECONDS NAME TEXT: a line about a step
note() {
    case $1 in ok) passed=$((passed + 1)) ;; FAIL) failed=$((failed + 1)) ;; skip) skipped=$((skipped + 1)) ;; esac
    printf '  %-4s %4d s  %-28s %s\n' "$@" | tee -a "$logs/steps"
    pack
}

# step LIMIT NAME COMMAND...: the command may be an exported function; exit status 77 is a skip. The log's last line is the text of the step's line.
step() {
    local limit=$1 name=$2 start=$SECONDS log status text
    shift 2
    planned=$((planned + limit))
    log=$logs/$(echo "$name" | tr ' /' '--' | tr -d ,).log
    timeout -k 5 "$limit" bash -c '"$@"' "$name" "$@" >"$log" 2>&1 &
    running=$! # in the background: a signal is handled at once
    wait $running
    status=$?
    running=
    text=$(grep -v '^ *$' "$log" | tail -n 1 | cut -c 1-120)
    case $status in
        0) note ok $((SECONDS - start)) "$name" "$text" ;;
        77) note skip $((SECONDS - start)) "$name" "$text" ;;
        124 | 137) note FAIL $((SECONDS - start)) "$name" "not done after $limit s: $text" ;;
        *) note FAIL $((SECONDS - start)) "$name" "exit status $status: $text" ;;
    esac
    case $status in 0 | 77) ;; *) tail -n 8 "$log" | cut -c 1-200 | sed 's/^/         /' ;; esac
    [ $status -eq 0 ]
}

cut_off() { note FAIL $SECONDS "cut off" "by a signal"; exit 1; }
closing() {
    [ -z "$running" ] || kill "$running" 2>/dev/null
    printf '%s: %d of at most %d s; %s\n%d passed, %d failed, %d skipped\n' "$gpu" $SECONDS $planned "$out/$suite.tgz" \
        $passed $failed $skipped | tee -a "$logs/steps"
    pack
}
trap closing EXIT
trap cut_off HUP INT TERM
