#!/bin/sh
# test_documents.sh [FILE...]: every command and every program that a document or the opening comment of a source prints
# does what it says, and prints what the text quotes of it. tests/support/commands.awk finds both by rule, so that a new
# one is covered, or fails here as unknown. They run as printed, in a copy of the tree that is thrown away:
#
#   what is quoted          until it ends, or the quoted lines were printed (tests/support/quoted.awk compares them)
#   programs, simulators    until they end
#   training runs           until their first line of progress, then they are told to end
#   make TARGET             make -n: that it exists and what it needs; make run and the joined files for real
#   benchmarks of minutes   their flags are parsed; so are the options of record.sh
#   test programs, scripts  that they exist, and that a filter matches a test (make test runs them)
#   a model in a DIR        there is none: the program says so
#   nvcc                    compiled and linked; what comes out says that there is no GPU
#   docker, kubectl, sbatch  the files that they name exist (test_deploy.sh and test_slurm.sh run what is in them)
#
# What stands for something is replaced (the list "stands_for"); what needs an absent tool is skipped by name. Compilers
# get the implementation that make has compiled (its LINKED), or compile it without optimisation, unless
# DTRAIN_TEST_FULL=1: the printed line, less time.
. tests/support/shell.sh
only=$*
cc=${CC:-cc}
full=${DTRAIN_TEST_FULL:-0}
tree=$tmp/tree
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl=self,vader,tcp
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
take_ports
unset MAKEFLAGS MFLAGS MAKELEVEL # make would take descriptor 3, the list below, for the pipe of its jobs, and read from it

# ---- The copy, and what the commands find in it ----
root=$PWD
case $build in /*) cache=$build/documents ;; *) cache=$root/$build/documents ;; esac # what nvcc made: it takes minutes
mkdir -p "$tree/build/bench" "$tree/cifar" "$tmp/bin" "$cache"
tar -cf - --exclude=./.git --exclude=./build --exclude="./$build" . | tar -xf - -C "$tree"
[ -f "$build/dtrain.a" ] || make -s BUILD="$build" CC="$cc" "$build/dtrain.a" || exit 1
for file in "$build"/* "$build"/bench/*; do [ ! -f "$file" ] || cp -p "$file" "$tree/build/${file#"$build"/}"; done
cd "$tree" || exit 1
bytes() { head -c "$1" /dev/zero | tr '\0' "\\$2"; } # bytes COUNT OCTAL
head -c 300000 dtrain.h >shakespeare.txt
cp shakespeare.txt tinyshakespeare.txt && cp shakespeare.txt my.txt
{ printf '\210\330\064\001\001\000\000\000\000\100\000\000'; bytes 1012 0; head -c 32768 dtrain.h | sed 's/./&\x01/g' | head -c 32768; } >tokens.bin
mkdir shards && cp shakespeare.txt shards/train_0.bin && cp shakespeare.txt shards/train_1.bin
for file in 1 2 3 4 5; do head -c $((3073 * 100)) dtrain.h | tr -c '\000\001\002\003' '\004' >cifar/data_batch_$file.bin; done
cp cifar/data_batch_1.bin cifar/test_batch.bin

# The programs that the README and the manual show.
readme_program after >first.c
sed -n '/A complete program: a model/,/With the tape/p' src/manual.h | sed '1d;$d; s/^       //' >train.c
cp train.c train.cpp

# What a word of a command stands for.
stands_for() {
    case $1 in
        FILE | LOG | LOG...) echo log.jsonl ;;
        FOLDER) echo cifar ;;
        DIRECTORY) echo flights ;;
        DIR) echo no_model ;;
        OPERATION) echo all-reduce ;;
        WARM) echo 0 ;;
        REPETITIONS) echo 2 ;;
        SECONDS) echo 0.01 ;;
        BYTES...) echo 4096 ;;
        JOB) echo 1 ;;
        MASTER_ADDR=node0) echo MASTER_ADDR=127.0.0.1 MASTER_PORT=$port ;;
        LLMC | ../llm.c | LLMC=* | BATCH | SEQ | LAYERS | HEADS | CHANNELS | VOCAB | STEPS) absent="a checkout of llm.c" ;;
        ./libtorch_ddp) absent="libtorch" ;;
        WIDTH) absent="a model that bench/libtorch.sh writes" ;;
        LICENSE) echo LICENSE ;; # a text that does not change
        *[!A-Z.]*) printf '%s\n' "$1" ;;
        ??*) unknown="what $1 stands for" ;;
        *) echo "$1" ;;
    esac
}

# ---- Compilers: the printed line, without compiling the implementation once more ----
shim() { # shim NAME: $tmp/bin/NAME
    have "$1" || return
    real=$(command -v "$1")
    [ "$1" != cc ] || real=$(command -v "$cc")
    cat >"$tmp/bin/$1" <<END
#!/bin/sh
plain=${LINKED:+yes} count=\$#
case " \$* " in *" -x c "* | *" -fPIC "* | *" -DDTRAIN_USE_"* | *" -DOMP "* | *.cpp\ *) plain= ;; esac
case $1 in cc | nvcc) ;; *) plain= ;; esac
[ $1 != nvcc ] || plain=${LINKED:+yes}
for argument; do case \$argument in *.c) ! grep -q 'dtrain__\|DTRAIN__' "\$argument" || plain= ;; esac; done
while [ \$count -gt 0 ]; do
    argument=\$1 count=\$((count - 1)); shift
    case \$argument in
        -O[23] | -Ofast) [ -n "\$plain" ] || argument=-O0; set -- "\$@" "\$argument" ;;
        dtrain_cuda.cu) set -- "\$@" "$cache/dtrain_cuda.o" ;;
        *.c)
            if [ -n "\$plain" ] && grep -q '^#define DTRAIN_IMPLEMENTATION' "\$argument"
            then set -- "\$@" $LINKED "\$argument" "$cache/$1.o"
            else set -- "\$@" "\$argument"; fi ;;
        *) set -- "\$@" "\$argument" ;;
    esac
done
exec $real "\$@"
END
    chmod +x "$tmp/bin/$1"
}
if [ "$full" = 0 ]; then
    cp build/dtrain.o "$cache/cc.o"
    for compiler in cc c++ mpicc nvcc; do shim $compiler; done
fi
# What nvcc's lines are linked with: the kernels as README prints it, for the oldest GPU that this nvcc knows, or as
# cuda_build.sh has compiled them.
newer() { [ -f "$1" ] && [ -z "$(find "$2" -newer "$1")" ]; }
cuda_objects() {
    printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' >implementation.c
    newer "$cache/nvcc.o" "$root/dtrain.h" || $cc -O1 -DDTRAIN_USE_CUDA -I. -c implementation.c -o "$cache/nvcc.o" || return
    object=$cache/../cuda_build/cuda/dtrain_cuda.o
    ! newer "$object" "$root/dtrain_cuda.cu" || cp -p "$object" "$cache/dtrain_cuda.o"
    newer "$cache/dtrain_cuda.o" "$root/dtrain_cuda.cu" || $(command -v nvcc) -O3 -I. -c dtrain_cuda.cu -o "$cache/dtrain_cuda.o" || return
    cp "$cache/dtrain_cuda.o" .
}
printed_path=$tmp/bin:$PATH

# ---- How a command is judged ----
# Each judge returns 0 (right), 1 (wrong) or sets absent (a tool that is not here); how: what was done.
in_time() { PATH=$printed_path timeout -k 2 "$1" sh -c "$2" >"$tmp/out" 2>&1 </dev/null; } # in_time SECONDS COMMAND

whole() { how=ran; in_time 300 "$1"; }

# A command of which the text quotes lines: until it ends, or until they are printed, if the text says that it goes on.
quoted_of() { awk -F'\t' -v command="$1" '$1 == command' "$tmp/quotes" >"$tmp/quoted"; [ -s "$tmp/quoted" ]; }
as_quoted() { awk -v values="$tmp/values" -f "$root/tests/support/quoted.awk" "$tmp/quoted" "$tmp/out" >"$tmp/missing"; }
prints() {
    how="prints what is quoted"
    cut -f 1 "$tmp/quoted" >>"$tmp/compared"
    : >"$tmp/out"
    goes_on=; [ "$(tail -n 1 "$tmp/quoted" | cut -f 6)" != ... ] || goes_on=exec
    PATH=$printed_path timeout -k 5 300 sh -c "$goes_on $1" >"$tmp/out" 2>&1 </dev/null &
    id=$!
    while kill -0 $id 2>/dev/null; do
        [ -z "$goes_on" ] || ! as_quoted || break
        sleep 0.2
    done
    [ -z "$goes_on" ] || kill $id 2>/dev/null
    wait $id; ended=$?
    as_quoted && { [ -n "$goes_on" ] || [ $ended -eq 0 ]; } && return
    { cat "$tmp/missing"; echo "status $ended"; tail -n 15 "$tmp/out"; } >"$tmp/report"
    mv "$tmp/report" "$tmp/out"
    return 1
}

# A run that prints its progress: until its first line of a step (mpirun is a terminal: "step 1/1000"), which is a later one where it goes on from another run.
row='^ +[0-9]+ +([0-9]+ +)?[0-9]+\.[0-9]+ |step [0-9]+/[0-9]+ '
begins() {
    how="ran until its first step"
    : >"$tmp/out" # what the run before has printed is not of this one
    PATH=$printed_path timeout -k 5 300 sh -c "exec $1" >"$tmp/out" 2>&1 </dev/null &
    id=$!
    wait_for 280 eval "grep -q -E '$row' '$tmp/out' || ! kill -0 $id"
    grep -q -E "$row" "$tmp/out"; begun=$?
    kill $id 2>/dev/null; wait $id 2>/dev/null
    echo "it ended with status $?" >>"$tmp/out"
    [ $begun -eq 0 ]
}

# A model of GPT-2 or Llama is at nobody's hand here (test_models.sh makes some): flags are known, the file is looked for.
no_model() {
    how="looks for the model"
    ! in_time 60 "$1" && grep -q -E '(no_model|--import: ).*No such file' "$tmp/out"
}

# One sentence instead of a run, where there is no GPU.
no_gpu() {
    how="says that there is no GPU"
    CUDA_VISIBLE_DEVICES='' in_time 60 "$1"
    ended=$?
    [ $ended -gt 0 ] && [ $ended -lt 124 ] && [ "$(wc -l <"$tmp/out")" -le 4 ] && grep -q -i -E 'GPU|driver|CUDA' "$tmp/out"
}

# A benchmark of minutes: its flags are parsed before its log is opened, and this one cannot be.
flags_of() {
    how="has these flags"
    ! in_time 60 "$1 --log none/log" && grep -q 'none/log cannot be written' "$tmp/out"
}

# What needs an engine or a cluster: the files of this tree that it names exist, and flags of train_gpt are known.
of_a_cluster() {
    how="names what there is"
    case " $* " in *" train_gpt "*) build/train_gpt --help >"$tmp/help" ;; *) : >"$tmp/help" ;; esac
    behind=
    for word; do
        case $word in
            train_gpt) behind=yes ;;
            examples/*) [ -f "$word" ] || { echo "there is no $word" >"$tmp/out"; return 1; } ;;
            --*) [ -z "$behind" ] || grep -q -e "^  $word " "$tmp/help" || { echo "train_gpt has no $word" >"$tmp/out"; return 1; } ;;
        esac
    done
}

target() {
    case " $1 " in
        *" run "*) begins "$1" ;;
        *" dtrain.h "*) how=ran; in_time 60 "$1" ;;
        *) how="make -n"; in_time 60 "make -n ${1#*make}" ;;
    esac
}

test_program() { # test_program PATH [FILTER]
    how="exists"
    source=$(ls tests/*/"${1##*/}".c 2>/dev/null | head -n 1)
    [ -n "$source" ] && grep -q "RUN.*test_.*${2:-}" "$source"
}

compiled() {
    case $1 in *' -lopenblas'*) echo '#include <cblas.h>' | $cc -E - >/dev/null 2>&1 || { absent="cblas.h"; return; } ;; esac
    case $1 in *DTRAIN_USE_NCCL*) echo '#include <nccl.h>' | nvcc -E -x cu - >/dev/null 2>&1 || { absent="nccl.h"; return; } ;; esac
    case $1 in *' dtrain_cuda.'*) cuda_objects >"$tmp/out" 2>&1 || return ;; esac
    case $1 in *' dtrain_cuda.o '*) cp train.c train_cpu.c; { printf '#define DTRAIN_USE_CUDA\n#define DTRAIN_USE_NCCL\n'; cat examples/nccl.c; } >train.c ;; esac
    whole "$1" || return
    program=$(echo " $1 " | sed -n 's/.* -o \([^ ]*\) .*/\1/p')
    case $1 in
        *dtrain_cuda.*) ;;
        *' -shared '*) how="compiled, and can be loaded"; python3 -c 'import ctypes, sys; ctypes.CDLL("./" + sys.argv[1])' "$program" >"$tmp/out" 2>&1; return ;;
        *' first.c '* | *' train.c '* | *' train.cpp '*) how="ran, and what it made"; in_time 60 "./${program:-a.out}" && grep -q 'w = 3.000' "$tmp/out"; return ;;
        *) return 0 ;;
    esac
    source=$(echo "$1" | tr ' ' '\n' | grep '\.c$')
    how="compiled and linked"
    if grep -q '"--device\|tools/run/run.h' "$source" "$(dirname "$source")"/*.h 2>/dev/null && [ "$(dirname "$source")" != . ]; then no_gpu "./$program --device cuda"
    elif grep -q dtrain_cuda_device_ops "$source"; then no_gpu "./${program:-a.out}"
    else in_time 60 "./${program:-a.out}" && { [ "$source" != train.c ] || grep -q 'w = 3.000' "$tmp/out"; }; fi
    ended=$?
    [ ! -f train_cpu.c ] || mv train_cpu.c train.c
    return $ended
}

judge() {
    set -f
    # shellcheck disable=SC2086
    set -- "$1" $1
    set +f
    line=$1; shift
    case $line in *' && '*) behind=${line#* && }; judge "${line%% && *}" && judge "$behind"; return ;; esac
    while :; do case $1 in [A-Z]*=*) shift ;; *) break ;; esac; done
    case $line in
        RANK=0*) how="ran, all its ranks"
            in_time 60 "for r in 1 2 3; do RANK=\$r ${line#RANK=0} & done; $line && wait" && grep -q 'w = 3.000' "$tmp/out"; return ;;
        *--device\ cuda*) case $1 in build/cuda/*) ;; *) no_gpu "$line"; return ;; esac ;;
    esac
    case $1 in
        make | nvcc | mpicc | cc | c++ | sh | python3) ;;
        docker | kubectl | sbatch | squeue | scancel | scontrol) of_a_cluster "$@"; return ;;
        build/dtrain-run) [ -x build/dtrain-run ] || { absent=dtrain-run; return; } ;;
        torchrun | mpirun | srun) have "$1" || { absent=$1; return; }
            [ "$1" != torchrun ] || torchrun --no_python --nproc_per_node 2 /bin/true >/dev/null 2>&1 || { absent="a torchrun that starts /bin/true"; return; }
            [ "$1" != srun ] || timeout 10 srun -n 1 true >/dev/null 2>&1 || { absent="a Slurm that runs jobs"; return; } ;;
    esac
    case $line in *no_model*) no_model "$line"; return ;; esac
    [ -z "$quoted" ] || { prints "$line"; return; }
    case $1 in
        make) target "$line" ;;
        cc | c++ | mpicc | nvcc) have "$1" || { absent=$1; return; }; compiled "$line" ;;
        build/tests/*) test_program "$@" ;;
        build/cuda/*) flags_of "build/bench/${line#build/cuda/}" ;;
        build/bench/*) flags_of "$line" ;;
        bench_*) flags_of "build/bench/$line" ;;
        simulate) whole "build/$line" ;;
        build/report) how="says how it is used"; build/report >"$tmp/out" 2>&1; grep -q "^report OUT.html LOG" "$tmp/out" ;;
        build/trace) for word; do case $word in *.json) [ ! -s "$word" ] || { whole "$line"; return; } ;; esac; done
            how="says how it is used"; build/trace >"$tmp/out" 2>&1; grep -q "^trace $2 OUT\|^trace $2 IN" "$tmp/out" ;;
        build/flight) how="says how it is used"; build/flight >"$tmp/out" 2>&1; grep -q '^flight DIRECTORY' "$tmp/out" ;;
        xdg-open) how="test_readme.sh opens it" ;;
        build/train_gpt | build/dtrain-run | ./gpt | ./train_gpt)
            case $line in *--dry-run* | *--tune* | *--steps*--trace* | *\ ./first) whole "$line" ;; *) begins "$line" ;; esac ;;
        ./resnet_cifar) begins "$line" ;;
        build/* | ./*) whole "$line" ;;
        mpirun | torchrun | srun) case $line in *train_gpt*) begins "$line" ;; *) whole "$line" ;; esac ;;
        python3) python3 -c 'from torch.nn.functional import scaled_dot_product_attention' 2>/dev/null || { absent="torch 2 for python3"; return; }; whole "$line" ;;
        sh) script=$2
            case $script in
                tests/scripts/bits.sh) how="ran until its first rows"
                    in_time 5 "exec $line"; case $? in 0 | 124) ;; *) false ;; esac && grep -q '^ddp/fp32 1: [0-9a-f]\{16\} ' before ;;
                bench/record.sh) how="has these options"; in_time 20 "sh $script --help" ;;
                tests/*) how=exists; sh -n "$script" ;;
                *) whole "$line" ;;
            esac ;;
        *) unknown="how to run this line" ;;
    esac
}

# The manual's program is complete, and without a warning (README's: test_troubles.sh).
try "the program train.c, strictly" env PATH="$printed_path" cc -std=c99 -I. -Wall -Wextra -Wconversion -Werror train.c -o train -lm -lpthread

documents="README.md CONTRIBUTING.md CHANGELOG.md tests/README.md bench/README.md examples/deploy/README.md $(ls docs/*.md)"
sources="src/manual.h src/device/cuda/manual.h src/comm/nccl/manual.h $(ls examples/*.c tools/*.sh tools/*.h tools/*/*.[ch] bench/*.[ch] bench/*.sh bench/*.py)"
[ -z "$only" ] || { documents=$(echo "$only" | tr ' ' '\n' | grep '\.md$'); sources=$(echo "$only" | tr ' ' '\n' | grep -v '\.md$'); }
# Without -arch nvcc compiles for the oldest GPU that it knows.
grep -n 'nvcc .*dtrain_cuda\.cu' $documents $sources | grep -v -e ' -arch=' >"$tmp/no_arch"
[ ! -s "$tmp/no_arch" ]; result "every line of nvcc says for which GPU" $? "$tmp/no_arch"

# Figures that a text cites are those of bench/README.md, rounded, or in thousands: the tables of a section, but for the
# first column, which names the row. (bench/check_figures.sh compares bench/README.md with the recorded results.)
cites() { # cites FILE HEADING
    awk -v file="$1" -v heading="$2" '
        function rounded(a, b) { a -= b; return (a < 0 ? -a : a) <= 0.5001 * 10 ^ -places }
        /^[^|].*--dry-run/ { on = 0 } # what follows was planned, not recorded: test_config.sh compares it
        { gsub(/`[^`]*`/, "") }
        FILENAME == "bench/README.md" {
            gsub(/[^0-9.]+/, " ")
            n = split($0, numbers, " ")
            for (i = 1; i <= n; i++) if (numbers[i] ~ /[0-9]/) known[numbers[i]]
            next
        }
        /^#/ { on = $0 == heading }
        !/^\|/ { rows = 0 }
        on && /^\|/ && ++rows > 2 {
            line = $0; sub(/^\|[^|]*\|/, "", line); gsub(/[^0-9.]+/, " ", line)
            n = split(line, numbers, " ")
            for (i = 1; i <= n; i++) {
                cited = numbers[i]
                if (cited !~ /[0-9]/) continue
                places = index(cited, ".") ? length(cited) - index(cited, ".") : 0
                there = 0; checked++
                for (k in known) if (rounded(k, cited) || rounded(k / 1000, cited)) { there = 1; break }
                if (!there) { print file ":" FNR ": " cited " is not in bench/README.md"; bad = 1 }
            }
        }
        END { if (!checked) print file " has no figures under " heading; exit bad || !checked }' bench/README.md "$1" >"$tmp/out"
}
cites README.md "## Figures"; result "README's figures are those of bench/README.md" $? "$tmp/out"
for section in "ddp-or-fsdp.md ## What a rank holds and sends" "compression.md ## Time, and what it costs in the end"; do
    cites "docs/${section%% *}" "${section#* }"; result "docs/$section: its figures are those of bench/README.md" $? "$tmp/out"
done

mkdir -p "$tmp/found"
: >"$tmp/done" >"$tmp/compared"
one() { # one PLACE COMMAND
    place=$1 command=$2 absent='' unknown='' how='' quoted=''
    case $command in
        '?first '*) ! have "${command#?first }" || unknown="how to run the block that begins with ${command#?first }" ;;
        '? '*) unknown="how to run this line: ${command#? }" ;;
        *)
            ! quoted_of "$command" || quoted=yes
            [ -n "$quoted" ] || ! grep -qxF -e "$command" "$tmp/done" || return
            case $command in cc\ * | ./*) ;; *) echo "$command" >>"$tmp/done" ;; esac # those depend on what is there
            filled=
            set -f
            for word in $command; do filled="$filled${filled:+ }$(stands_for "$word")"; stands_for "$word" >/dev/null; done
            set +f
            [ -n "$absent$unknown" ] || judge "$filled" ;;
    esac
    status=$?
    if [ -n "$unknown" ]; then echo "I do not know $unknown" >"$tmp/out"; result "$place: $command" 1 "$tmp/out"
    elif [ -n "$absent" ]; then skip "$place: $command" "$absent is not here"
    elif [ -n "$how" ]; then result "$place: $command ($how)" $status "$tmp/out"; fi
}
all() { # all KIND FILE: what is for GPUs comes last, because it overwrites what was built for CPUs
    : >"$tmp/quotes"
    awk -v kind="$1" -v quotes="$tmp/quotes" -f tests/support/commands.awk "$2" >"$tmp/found/all"
    grep -E '	(nvcc|build/cuda/)|--device cuda|dtrain_cuda\.' "$tmp/found/all" >"$tmp/found/gpu"
    grep -v -E '	(nvcc|build/cuda/)|--device cuda|dtrain_cuda\.' "$tmp/found/all" >"$tmp/found/cpu"
    cat "$tmp/found/cpu" "$tmp/found/gpu" >"$tmp/found/list"
    while IFS='	' read -r found_place found_command <&3; do one "$found_place" "$found_command"; done 3<"$tmp/found/list"
    # What is quoted of a command that no rule runs would be believed.
    cut -f 1 "$tmp/quotes" | sort -u | grep -v -x -F -f "$tmp/compared" >"$tmp/out"
    [ ! -s "$tmp/out" ] || result "$2: what it quotes is compared" 1 "$tmp/out"
}
for document in $documents; do all text "$document"; done
[ -n "$only" ] || for file in Makefile tests/tests.mk; do all help $file; done
for source_file in $sources; do all source "$source_file"; done
[ -n "$only" ] || [ "$(wc -l <"$tmp/done")" -gt 80 ]
result "the rules find the commands ($(wc -l <"$tmp/done") different ones)" $?

# The rules find what they must, and refuse what they do not know.
cat >"$tmp/new.md" <<'END'
Text with `make lint` and `cc -DX` and `bench_gemm` in it.

    frobnicate --all

    make test    # remark
    frobnicate --all

    step  loss
       1   5.0
END
awk -v kind=text -f tests/support/commands.awk "$tmp/new.md" | sed 's/^[^	]*	//' >"$tmp/list"
printf '%s\n' 'make lint' '?first frobnicate' 'make test' '? frobnicate --all' '?first step' >"$tmp/wanted"
cmp -s "$tmp/list" "$tmp/wanted"
result "a line of a block that is no command is found" $? "$tmp/list"

# What is quoted and was not printed is found: an integer, a decimal beyond its last place, a word, an order, another hash.
cat >"$tmp/new.md" <<'END'
Losses agree within 2 %:

    build/ddp --steps 3

It prints, on two cores of a machine:

    step  loss  tok/s
       1  5.25    90
       2  5.10    ...
    parameters HASH, 3337432 bytes
    parameters HASH, as before

    build/ddp 1
    build/ddp 2

| run | bytes | fewer |
| --- | --- | --- |
| first | 800 | 1x |
| second | 200 | 4.0x |
END
awk -v kind=text -v quotes="$tmp/quotes" -f tests/support/commands.awk "$tmp/new.md" >"$tmp/out"
quoted_of "build/ddp --steps 3"
cat >"$tmp/printed" <<'END'
step  loss  tok/s
   1  5.2567  17
   2  5.09    18 19
parameters 0123456789abcdef, 3337432 bytes
parameters 0123456789abcdef, as before
END
altered() { rm -f "$tmp/values"; sed "$1" "$tmp/printed" >"$tmp/out"; ! as_quoted; } # altered SED-COMMAND
! altered ''; result "what was printed is found" $? "$tmp/missing"
for change in 's/3337432/3337433/' 's/5.2567/5.28/' 's/5.09 /5.12 /' 's/bytes/words/' 's/loss/lost/' '5s/0123/0124/' '2{h;d};3G'; do
    altered "$change"; result "what is quoted is compared: $change" $?
done
quoted_of "build/ddp 2"
echo "200 bytes" >"$tmp/printed"
! altered ''; result "a row of a table belongs to its command" $? "$tmp/missing"
altered 's/200/201/'; result "a number of a row is compared" $?
sed -i 's/4.0x/5.0x/' "$tmp/new.md" && awk -v kind=text -v quotes="$tmp/quotes" -f tests/support/commands.awk "$tmp/new.md" >"$tmp/out"
quoted_of "build/ddp 2"
altered ''; result "a share of the first row is worked out" $?
absent='' unknown='' quoted=''
judge "bench_gemm --fast"
[ $? -ne 0 ]; result "a flag that does not exist fails" $?
judge "make lintt"
[ $? -ne 0 ]; result "a target that does not exist fails" $?
judge "docker build -f examples/deploy/Dockerfile.none ."
[ $? -ne 0 ]; result "a Dockerfile that does not exist fails" $?
judge "docker run dtrain:cpu train_gpt --fast"
[ $? -ne 0 ]; result "a flag that does not exist fails in a container too" $?
unknown=''
judge "frobnicate --all"
[ -n "$unknown" ]; result "a program that is not known is said to be" $?
cd "$root" || exit 1
finish
