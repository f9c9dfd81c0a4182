#!/bin/sh
# Timelines as a user makes them: train_gpt --trace, and build/trace. Python reads the files by the rules of the Trace Event Format and
# works out exposed communication, which is what the metrics say within 5 %; buckets travel while backward goes on; ranks whose
# clocks differ (time namespaces) come together; a killed rank leaves a file that can be read.
. tests/support/shell.sh
take_ports
python=${PYTHON:-python3}
have "$python" || { skip "timelines" "no $python"; finish; }
check() { "$python" tests/long/check_trace.py "$@" >"$tmp/said" 2>&1; }
gpt="$build/train_gpt --layers 2 --heads 2 --channels 64 --seq 64 --batch 8 --bucket-kib 64 --eval-batches 0 --sample 0 --threads 1 --timeout 20"
traced() { rm -f "$tmp"/t.*; $gpt --trace "$tmp/t.json" --log "$tmp/t.log" "$@" >"$tmp/out" 2>&1; }

for ranks in 2 4; do
    for how in "ddp" "ddp --no-overlap" "full_shard"; do
        traced --emulate ${ranks}x1:0.1:50 --steps 6 --strategy $how
        status=$?
        result "$how, $ranks ranks: runs" $status "$tmp/out"
        check rules "$tmp"/t.rank*.json; result "$how, $ranks ranks: the rules of the format" $? "$tmp/said"
        check exposed "$tmp/t.log" "$tmp"/t.rank*.json
        result "$how, $ranks ranks: exposed communication as in the log" $? "$tmp/said"
        hides=yes; [ "$how" = "ddp --no-overlap" ] && hides=no
        check overlap $hides "$tmp/t.rank0.json"
        result "$how, $ranks ranks: buckets in flight inside of backward: $hides" $? "$tmp/said"
    done
done
check steps 1 6 "$tmp/t.rank1.json" && [ "$(sed -n 's/^{"step": \([0-9]*\),.*/\1/p' "$tmp/t.log" | tr '\n' ' ')" = "1 2 3 4 5 6 " ]
result "steps 1 to 6, in trace and log" $? "$tmp/said"
"$build/trace" show "$tmp"/t.rank*.json >"$tmp/table" 2>&1 && check shown "$tmp/table" "$tmp/t.log"
result "trace show: exposed communication as in the log" $? "$tmp/table"
good "trace merge" "files in" "$build/trace" merge "$tmp/all.json" "$tmp"/t.rank*.json
check rules "$tmp/all.json"; result "trace merge: the rules of the format" $? "$tmp/said"
check together 0.0001 "$tmp/all.json"; result "trace merge: ranks of one host share a clock" $? "$tmp/said"
"$build/trace" show "$tmp/all.json" >"$tmp/again"; cmp -s "$tmp/table" "$tmp/again"
result "trace show: the same of the merged file" $? "$tmp/again"
good "trace svg" "step 3" "$build/trace" svg "$tmp/step.svg" "$tmp/all.json" 3
"$python" -c 'import sys, xml.dom.minidom; d = xml.dom.minidom.parse(sys.argv[1]); sys.exit(len(d.getElementsByTagName("rect")) < 40)' "$tmp/step.svg"
result "trace svg: the drawing is XML" $? "$tmp/step.svg"

# What docs/full-shard.svg draws: six units, of which the first has two buckets, 5 and 6. Collectives have numbers; those of the
# second step lie between its two all-reduces of the weights of ranks.
traced --ranks 2 --layers 4 --steps 3 --bucket-kib 25600 --strategy full_shard
order() { sed -n 's/.*"name":"\([a-z-]*\)","args":{"number":[0-9]*,"of":"\(values of \)*\(bucket [0-9]*\|weights\).*"sequence":\([0-9]*\).*/\4 \1 \3/p' "$1" | sort -n; }
order "$tmp/t.rank0.json" | awk '$3 == "weights" { steps++; next } steps != 1 || $4 == 6 { next } { print $2, $4 == 5 ? 0 : 5 - $4 }' >"$tmp/seen"
sh tools/full_shard_svg.sh order 6 | cmp -s - "$tmp/seen"; result "units are gathered and reduced in the order that is drawn" $? "$tmp/seen"

# Passes of a pipeline stand in a trace, and in a drawing, as in its schedule.
traced --ranks 2 --layers 4 --steps 2 --batch 2 --accum 3 --pipeline 2
result "a pipeline, 1F1B: runs" $? "$tmp/out"
check passes "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0" "$tmp/t.rank0.json" && check passes "F0.1 B0.1 F1.1 B1.1 F2.1 B2.1" "$tmp/t.rank1.json"
result "passes are traced in the order of 1F1B" $? "$tmp/said"
traced --ranks 2 --layers 4 --steps 2 --batch 2 --accum 2 --pipeline 2 --pipeline-schedule zb_h1
check rules "$tmp"/t.rank*.json && check passes "F0.1 B0.1 F1.1 B1.1 W0.1 W1.1" "$tmp/t.rank1.json"
result "passes are traced in the order of ZB-H1" $? "$tmp/said"
traced --ranks 2 --layers 4 --steps 2 --batch 1 --accum 4 --pipeline 2 --pipeline-schedule interleaved
check rules "$tmp"/t.rank*.json && check passes "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3 B2.1 B3.1" "$tmp/t.rank1.json"
result "passes are traced in the order of interleaved stages" $? "$tmp/said"
good "trace passes" "step 2" "$build/trace" passes "$tmp/passes.svg" "$tmp"/t.rank*.json 2
[ "$(grep -c '<rect' "$tmp/passes.svg")" -ge 20 ] && grep -q '>rank 1<' "$tmp/passes.svg"
result "trace passes: the drawing has passes of both ranks" $? "$tmp/passes.svg"

# Threads of checkpoints and loaders; the same run without a trace has the same bits.
traced --ranks 2 --steps 6 --checkpoint "$tmp/saves" --save-every 2 --workers 2
grep -q '"name":"checkpoint writer"' "$tmp/t.rank0.json" && grep -q '"name":"publish"' "$tmp/t.rank0.json" && grep -q '"name":"read batch"' "$tmp/t.rank1.json" &&
    check rules "$tmp"/t.rank*.json
result "checkpoints and batches that threads write and read" $? "$tmp/out"
losses() { sed -n 's/.*"loss": \([^,]*\),.*/\1/p' "$1"; }
losses "$tmp/t.log" >"$tmp/a"; $gpt --ranks 2 --steps 6 --log "$tmp/plain.log" >/dev/null 2>&1; losses "$tmp/plain.log" >"$tmp/b"
head -n 6 "$tmp/a" >"$tmp/c"; head -n 6 "$tmp/b" | cmp -s - "$tmp/c"; result "a trace changes no bits" $? "$tmp/a"

# A rank that is killed.
$gpt --ranks 2 --steps 100000 --trace "$tmp/k.json" >"$tmp/out" 2>&1 &
run=$!
wait_for 60 test -s "$tmp/k.rank1.json" && wait_for 60 grep -q '"name":"step"' "$tmp/k.rank1.json"
kill -9 $(cut -d ' ' -f 2 "/proc/$run/task/$run/children")
wait $run 2>/dev/null
check rules "$tmp/k.rank0.json" && check rules "$tmp/k.rank1.json"; result "a killed rank leaves a file that can be read" $? "$tmp/said"
"$build/trace" show "$tmp"/k.rank*.json >"$tmp/table" 2>&1 && grep -q '^1 ' "$tmp/table"; result "trace show reads what a killed rank has left" $? "$tmp/table"

# Clocks that differ: rank 1 in a time namespace, 5000 seconds ahead. The offset is half a round trip exact, the shortest of a
# few, and load can make all of them long: then once more, at most five times.
if [ "$(id -u)" = 0 ] && unshare --time --monotonic 5000 true 2>/dev/null; then
    rank() { RANK=$1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 DTRAIN_PORT=$port timeout 300 $2 $gpt --ranks 2 --steps 4 --trace "$tmp/c.json"; }
    for each in 1 2 3 4 5; do
        rank 0 "" >"$tmp/0.out" 2>&1 & first=$!
        rank 1 "unshare --time --monotonic 5000" >"$tmp/out" 2>&1; status=$?
        wait $first && [ $status -eq 0 ]; trained=$?
        "$build/trace" merge "$tmp/c.merged.json" "$tmp"/c.rank?.json >"$tmp/table" 2>&1 && grep -q 'moved by -5000000[.]0\|moved by -4999999[.]9' "$tmp/table"
        measured=$?
        check together 0.001 "$tmp/c.merged.json"; merged=$?
        [ $trained = 0 ] && [ $measured$merged != 00 ] || break
    done
    result "ranks whose clocks differ train" $trained "$tmp/out"
    result "the offset is measured" $measured "$tmp/table"
    result "merged on one clock" $merged "$tmp/said"
    sed 's/"clock_offset_ns":[-0-9]*/"clock_offset_ns":0/' "$tmp/c.rank1.json" >"$tmp/d.rank1.json"
    "$build/trace" merge "$tmp/d.json" "$tmp/c.rank0.json" "$tmp/d.rank1.json" >/dev/null && ! check together 0.001 "$tmp/d.json"
    result "without the offset they are apart" $? "$tmp/said"
    # Over MPI, where ranks share no memory; with what test_mpi.sh has compiled.
    if [ -x "$build/openmpi/mpi/train_gpt" ] && have mpirun.openmpi; then
        mpi=$(echo "$gpt" | sed "s|^$build/train_gpt|$build/openmpi/mpi/train_gpt|")
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        for each in 1 2 3 4 5; do
            DTRAIN_PORT=$((port + 1)) timeout 300 mpirun.openmpi --oversubscribe -n 2 sh -c \
                '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || exec unshare --time --monotonic 5000 "$@"; exec "$@"' sh $mpi --comm mpi --steps 4 --trace "$tmp/m.json" >"$tmp/out" 2>&1
            trained=$?
            "$build/trace" merge "$tmp/m.merged.json" "$tmp"/m.rank?.json >"$tmp/table" 2>&1 && check rules "$tmp/m.merged.json" && check together 0.001 "$tmp/m.merged.json"
            merged=$?
            [ $trained = 0 ] && [ $merged != 0 ] || break
        done
        result "ranks over MPI whose clocks differ train" $trained "$tmp/out"
        result "over MPI: merged on one clock" $merged "$tmp/said"
    else skip "clocks of ranks over MPI" "no $build/openmpi/mpi/train_gpt (make openmpi) or no mpirun.openmpi" 2; fi
else skip "ranks whose clocks differ" "needs root and time namespaces" 6; fi

# Names as those of Hugging Face's models, of 38 to 407 bytes and with accents.
[ -e "$build/dtrain.a" ] || make -s BUILD="$build" "$build/dtrain.a" || exit 1
for tool in flight trace; do [ -e "$build/$tool" ] || make -s BUILD="$build" "$build/$tool" || exit 1; done
mkdir "$tmp/long"
try "a program with long names" ${CC:-cc} -std=c99 -pedantic -Wall -Wextra -Werror -I. tests/long/long_names.c "$build/dtrain.a" \
    -o "$tmp/long_names" -lm -lpthread
timeout 300 "$tmp/long_names" "$tmp/long" >"$tmp/out" 2>&1
[ -s "$tmp/long/model.safetensors" ] && [ -s "$tmp/long/checkpoints/latest" ]
result "long names: a checkpoint and an export, read again" $? "$tmp/out"
check rules "$tmp"/long/t.rank*.json; result "long names: the rules of the format" $? "$tmp/said"
good "long names: trace merge" "files in" "$build/trace" merge "$tmp/long/all.json" "$tmp"/long/t.rank*.json
check rules "$tmp/long/all.json"; result "long names: the rules of the format, merged" $? "$tmp/said"
good "long names: trace show" "step" "$build/trace" show "$tmp"/long/t.rank*.json
good "long names: trace svg" "step 3" "$build/trace" svg "$tmp/long/step.svg" "$tmp/long/all.json" 3
# Twelve layers are twelve names: of buckets, of units, and in the drawing.
names() { sed -n "s|.*$1|\\1|p" "$2" | sort -u >"$tmp/names"; [ "$(wc -l <"$tmp/names")" = 12 ]; }
names '"of":"bucket [0-9]*, \([^"]*\)".*' "$tmp/long/all.json" && grep -q '^base_model.model.model.layers.11.*lora_A.default.weight$' "$tmp/names"
result "long names: stand behind their buckets" $? "$tmp/names"
grep -q '^model.layers.2.modèle.*accents.éééééééééééé.weight$' "$tmp/names"; result "long names: accents are as they were" $? "$tmp/names"
names '"cat":"forward","name":"\([^"]*[.][^"]*\)","args":{"number":[0-9]*}}.*' "$tmp/long/t.rank0.json"
result "long names: of units" $? "$tmp/names"
names '<title>bucket [0-9]*, \(.*\), [a-z-]*</title>.*' "$tmp/long/step.svg" && "$python" -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' "$tmp/long/step.svg"
result "long names: in the drawing, which is XML" $? "$tmp/names"
"$build/flight" "$tmp/long" >"$tmp/out" 2>&1
grep -q 'rank 1' "$tmp/out" && ! grep -q 'cannot be read' "$tmp/out"; result "long names: flight" $? "$tmp/out"

bad_lines=6
bad "a trace in a directory that cannot be" "--trace /proc/nowhere/t.json cannot be written" $gpt --ranks 2 --steps 2 --trace /proc/nowhere/t.json
bad "show without files" "trace merge OUT" "$build/trace" show
bad "no file" "cannot be read" "$build/trace" show "$tmp/none.json"
echo '[{"ph":"X",},' >"$tmp/wrong.json"; echo '{}]' >>"$tmp/wrong.json"
bad "no JSON" "wrong.json" "$build/trace" show "$tmp/wrong.json"
bad "the same rank twice" "both of rank 0" "$build/trace" merge "$tmp/x.json" "$tmp/t.rank0.json" "$tmp/t.rank0.json"
"$build/trace" passes "$tmp/x.svg" "$tmp/k.rank0.json" 2>"$tmp/said"; grep -q "no passes of a pipeline" "$tmp/said"
result "passes without a pipeline" $? "$tmp/said"
bad "no such step" "no such step" "$build/trace" svg "$tmp/x.svg" "$tmp/t.rank0.json" 99
finish
