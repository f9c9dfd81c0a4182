#!/bin/sh
# Random combinations of the switches that training programs share: each run makes its two steps, or is refused by one
# sentence that names a flag. What was accepted is in force: the file of --config-out has every value that was given.
# RUNS (40) of each program, from SEED, which is drawn; a failure prints the command.
. tests/support/shell.sh
[ "${DTRAIN_TEST_FULL:-0}" = 0 ] || RUNS=${RUNS:-$((DTRAIN_TEST_FULL * 300))}
runs=${RUNS:-40} seed=${SEED:-$(($(od -An -N3 -tu4 /dev/urandom)))}
echo "  seed $seed"
head -c 20000 dtrain.h >"$tmp/text"
mkdir "$tmp/cifar"
for file in data_batch_1 data_batch_2 data_batch_3 data_batch_4 data_batch_5 test_batch; do
    for image in 0 1 2 3 4 5 6 7; do printf "\\$image"; head -c 3072 dtrain.h; done >"$tmp/cifar/$file.bin"
done

# in_force: every flag and value of $line is a line of the file that was written
in_force() {
    set -- $line
    while [ $# -gt 0 ]; do
        key=${1#--}
        case ${2:---} in --*) value=1 ;; *) value=$2; shift ;; esac
        shift
        case $key in batch | auto-batch | accum) continue ;; esac # a global batch, and free memory, may change them
        grep -q -x -F -e "$key = $value" "$tmp/config" || { echo "$key is not $value"; return 1; }
    done
}
# Every flag that a sentence of a program names is one of its own: what stands in quotes in its files, of which
# recorded.h lists those of several programs.
for source in tools/*/*.c examples/*.c; do
    program=$(basename "$source" .c)
    [ -x "$build/$program" ] && [ $program != report ] || continue # its page has CSS, whose variables look so
    for file in $(${CC:-cc} -I. -MM "$source" | tr ' \\' '\n\n' | grep -E '^(tools|examples)/'); do
        [ "$file" = tools/run/recorded.h ] || ${CC:-cc} -fpreprocessed -dD -E -P "$file" 2>/dev/null
    done | grep -ohE '"([^"\\]|\\.)*"' | grep -oE '(^|[^a-z-])--[a-z][a-z-]+' | grep -oE -e '--.*' | sort -u >"$tmp/named"
    [ -s "$tmp/named" ] || continue
    timeout 300 "$build/$program" --help 2>&1 | grep -oE -e '--[a-z][a-z-]+' | sort -u >"$tmp/flags"
    echo --help >>"$tmp/flags"
    strangers=$(grep -v -x -F -f "$tmp/flags" "$tmp/named" | tr '\n' ' ')
    [ -z "$strangers" ]; result "$program: flags that it names and has not: ${strangers:-none}" $?
done
for program in train_gpt resnet_cifar; do
    made=0 refused=0 wrong=0 run=0
    case $program in
        train_gpt) own="--data $tmp/text --layers 2 --heads 2 --channels 16 --seq 16 --eval-batches 1 --sample 0" ;;
        *) own="--data $tmp/cifar" ;;
    esac
    while [ $run -lt "$runs" ]; do
        line=$(awk -v seed=$((seed + run)) -v program=$program -v tmp="$tmp" -f tests/full/switches.awk)
        rm -rf "$tmp/checkpoints" "$tmp/events" "$tmp/config" "$tmp"/run.*
        timeout 100 "$build/$program" $own $line --config-out "$tmp/config" >"$tmp/out" 2>"$tmp/err"
        status=$?
        why=
        if [ $status -eq 0 ]; then
            made=$((made + 1))
            grep -q 'over 2 steps' "$tmp/out" || why="no two steps"
            case $line in *--log*) [ "$(wc -l <"$tmp/run.jsonl")" -ge 4 ] || why="no log" ;; esac
            case $line in *--prometheus*) grep -q '^dtrain_loss' "$tmp/run.prom" || why="no metrics" ;; esac
            case $line in *--trace*) grep -q backward "$tmp/run.rank0.json" || why="no trace" ;; esac
            case $line in *--tensorboard*) ls "$tmp"/events/events.* >/dev/null || why="no events" ;; esac
            in_force >"$tmp/force" || why=$(cat "$tmp/force")
        else
            refused=$((refused + 1))
            [ $status -le 2 ] || why="status $status"
            grep -q -e '^[a-z_]*: .*--[a-z]' "$tmp/err" && [ "$(wc -l <"$tmp/err")" -le 2 ] || why="no sentence that names a flag"
        fi
        if [ -n "$why" ]; then
            wrong=$((wrong + 1))
            { echo "$why: $program $own $line"; tail -n 3 "$tmp/err"; } | tee -a "$tmp/wrong"
        fi
        run=$((run + 1))
    done
    seed=$((seed + runs)) # the other program gets others
    [ $wrong -eq 0 ] && [ $made -gt $((runs / 10)) ] && [ $refused -gt 0 ]
    result "$program: $made random combinations train, $refused are refused by a flag's name" $?
done
finish
