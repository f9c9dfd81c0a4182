#!/bin/sh
# Two ranks of a launcher whose command lines differ in one flag, or whose data differs: both refuse it before the first
# step, by name, with both values and the rank. What each machine may have its own, paths and threads, trains.
. tests/support/shell.sh
take_ports
seq 4000 >"$tmp/text"
seq 4001 >"$tmp/longer"
sed '1s/1/7/' "$tmp/text" >"$tmp/begins"
cp "$tmp/text" "$tmp/copy"
DTRAIN_JOB_KEY=one
export DTRAIN_JOB_KEY
gpt="$build/train_gpt --layers 1 --heads 2 --channels 16 --seq 16 --batch 2 --warmup 2 --eval-batches 2 --sample 0 --threads 1 --timeout 20 --ranks 2 --steps 2 --data $tmp/text"

# pair PROGRAM_AND_FLAGS ODD_FLAGS: two ranks with the flags, and rank 1 with the odd ones besides
pair() {
    for r in 0 1; do
        RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 300 $1 $odd >"$tmp/$r.out" 2>"$tmp/$r.err" &
        eval "pid_$r=$!"
        odd=$2
    done
    odd= status=0 both=0
    for r in 0 1; do eval "wait \$pid_$r" && both=$((both + 1)) || status=$?; done
    cat "$tmp/0.err" "$tmp/1.err" >"$tmp/err"
}
odd=
# refused NAME SENTENCE FLAGS ODD_FLAGS: both ranks refuse, each in one line that has the sentence
refused() {
    pair "$3" "$4"
    [ $both -eq 0 ] && [ "$(grep -c -F -e "$2" "$tmp/err")" -eq 2 ] && ! grep -q 'validation loss' "$tmp/0.out"
    result "refused: $1" $? "$tmp/err"
}
# trains NAME FLAGS ODD_FLAGS
trains() {
    pair "$2" "$3"
    [ $both -eq 2 ]
    result "trains: $1" $? "$tmp/err"
}

while read -r flag value usual; do
    refused "$flag" "rank 1 has $flag $value, rank 0 $usual;" "$gpt" "$flag $value"
done <<END
--lr 0.5 0.002
--optimizer lion adamw
--seed 7 1337
--init-seed 7 1
--accum 2 not set
--precision bf16 fp32
--dropout 0.25 0
--batch 3 2
--beta2 0.9 0.99
--weight-decay 0.5 0.1
--warmup 1 2
--schedule linear cosine
--lr-scaling linear none
--clip 0.5 1
--min-lr 0.0001 0.0002
--strategy zero1 ddp
--reduce-dtype bf16 fp32
--bucket-kib 64 25600
--steps 3 2
--eval-batches 1 2
--eval-every 1 250
--val-split 0.25 0.1
--tensor 2 1
--pipeline 2 1
--activation-checkpointing 1 0
--nonfinite skip stop
--verify-every 1 0
--layers 2 1
--heads 4 2
--vocab 300 256
END
refused "--save-every" "rank 1 has --save-every 1, rank 0 0;" "$gpt --checkpoint $tmp/run" "--save-every 1"
refused "--checkpoint on one rank" "rank 1 has --checkpoint set, rank 0 not set;" "$gpt" "--checkpoint $tmp/run"
refused "--tensor, pipeline and another --clip" "rank 1 has --clip 0.5, rank 0 1;" "$gpt --pipeline 2" "--clip 0.5"
printf 'lr = 0.25\n' >"$tmp/stale"
refused "a stale --config" "rank 1 has --lr 0.25, rank 0 0.002;" "$gpt" "--config $tmp/stale"

# Data: another length, other bytes of the same length, from the first or in the middle; over any layout.
bytes=$(wc -c <"$tmp/text") more=$(wc -c <"$tmp/longer")
for layout in "" "--strategy zero1" "--tensor 2" "--pipeline 2"; do
    refused "longer data $layout" "rank 1 has --data with $more items in $more bytes of files" "$gpt $layout" "--data $tmp/longer"
    grep -q "rank 0 with $bytes items in $bytes bytes" "$tmp/err"
    result "the other length is said" $? "$tmp/err"
done
refused "data that begins otherwise" "rank 1 has --data with $bytes items in $bytes bytes of files, whose hash is" "$gpt" "--data $tmp/begins"
trains "a copy of the data elsewhere" "$gpt" "--data $tmp/copy"
trains "flags of each machine" "$gpt" "--threads 2 --workers 2 --timeout 30 --memory-limit 4000"
trains "the same, given otherwise" "$gpt --lr 0.003" "--lr=3e-3 --strategy ddp"

resnet="$build/resnet_cifar --batch 2 --steps 2 --threads 1 --timeout 20"
refused "resnet_cifar --lr" "rank 1 has --lr 0.5, rank 0 0.1;" "$resnet" "--lr 0.5"
refused "resnet_cifar --sync-batchnorm" "rank 1 has --sync-batchnorm 1, rank 0 0;" "$resnet" "--sync-batchnorm"

# Two jobs at one port, without a key: rank 1 of job B calls rank 0 of job A before and after A's own rank 1, and is
# turned away; A trains as if it had been alone.
unset DTRAIN_JOB_KEY
take_ports
one() {
    r=$1; shift
    RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 300 $gpt "$@" >"$tmp/$r.out" 2>"$tmp/$r.err"
}
losses() { sed -n 's/.*"loss": \([^,]*\),.*/\1/p' "$1"; }
DTRAIN_JOB_KEY=alone one 1 --log "$tmp/alone" & own=$!
DTRAIN_JOB_KEY=alone one 0 --log "$tmp/alone"
wait $own
one 0 --log "$tmp/a" & first=$!
wait_line 60 'neither DTRAIN_JOB_KEY nor' "$tmp/0.err"
result "a run without a name says so" $? "$tmp/0.err"
RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 300 ${gpt%--timeout*} --timeout 8 ${gpt#*--timeout 20} --data "$tmp/longer" >"$tmp/b.out" 2>"$tmp/b.err" & other=$!
wait_line 60 'a rank 1 with other settings or data than rank 0 has called' "$tmp/0.err"
result "rank 0 hears of the other job" $? "$tmp/0.err"
one 1 --log "$tmp/a" & own=$!
wait $own && wait $first && [ "$(losses "$tmp/a" | wc -l)" -ge 2 ] && losses "$tmp/a" >"$tmp/x" && losses "$tmp/alone" | cmp -s - "$tmp/x"
result "the job trains as if alone" $? "$tmp/0.err"
wait $other
[ $? -ne 0 ] && grep -q 'is rank 0 of a job with other settings or data' "$tmp/b.err"
result "the other job's rank is turned away" $? "$tmp/b.err"
refused "other flags without a key" "rank 1 has --lr 0.5, rank 0 0.002;" "$gpt" "--lr 0.5"
finish
