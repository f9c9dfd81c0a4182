#!/bin/sh
# What a newcomer runs first: train_gpt without a flag. It learns sums, says how many it gets right, keeps log and model,
# and prints lines to type next, which are typed here. Ctrl-C, on a terminal.
. tests/support/shell.sh
cd "$tmp" || exit 1
case $build in /*) ln -s "$build" build ;; *) ln -s "$OLDPWD/$build" build ;; esac
tree=$OLDPWD press=$OLDPWD/tests/long/press.py

# ---- the run: a folder that is there is left as it is ----
mkdir -p runs/sums && echo mine >runs/sums/log.jsonl
timeout 900 build/train_gpt >run 2>err
result "a run without a flag" $? err
right() { sed -n 's/^ *after  *[0-9]* steps  *\([0-9.]*\) % of the held-out sums are right$/\1/p' run; }
right >rates
[ "$(wc -l <rates)" -eq 10 ] && awk 'NR == 1 { first = $1 } { last = $1 } END { exit !(first < 20 && last > 90) }' rates
result "the share of right answers rises to $(tail -n 1 rates) %" $? rates
grep -E '^  (right|WRONG)  [0-9]+ plus [0-9]+ is [a-z -]+\.' run >sums
awk -v rate="$(tail -n 1 rates)" '$1 == "right" { n++ } END { exit !(NR == 10 && n >= 8) }' sums
result "it ends with ten sums" $? run
said=$(sed -n 's/^In the end \([0-9]*\) % of the held-out sums are right.*/\1/p' "$tree/README.md")
awk -v said="$said" 'END { exit !(said > 0 && $1 >= said - 8) }' rates # another instruction set rounds otherwise, and ends elsewhere
result "the share of sums that are right is what README says, but for some" $? rates
shown=$(sed -n 's/^In the end .*("\([0-9]* plus [0-9]* is\) .*/\1/p' "$tree/README.md")
[ -n "$shown" ] && grep -q "^  [a-zA-Z]*  $shown" sums; result "the sum that README shows is among the ten" $? sums
grep -q "^  $(tail -n 1 rates) % of all 810 held-out sums are right$" run
result "and the share of all" $? run
[ "$(cat runs/sums/log.jsonl)" = mine ] && [ "$(ls runs/sums)" = log.jsonl ] && grep -q '"final": true' runs/sums-2/log.jsonl
result "what was there stays, log and model are in a folder of their own" $? run

awk '/^ +[0-9]+ +[0-9]+\.[0-9]+ / { rows++; if ($4 !~ /^[0-9]+\.[0-9][0-9][0-9]$/) wrong++ } END { exit !(rows > 10 && !wrong) }' run
result "the norms of gradients have fixed decimals" $? run
! grep -E '(^|[^0-9.])1 (tokens|ranks|threads|micro-batches|shards|replicas|buckets|steps|nodes)([^a-z]|$)' run >plurals
result "one is singular" $? plurals

# The sums are right ones: the words are worked out here once more.
cat >check.py <<'END'
import re, sys
small = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
tens = "twenty thirty forty fifty sixty seventy eighty ninety".split()
def words(n):
    if n >= 100: return "one hundred" + (" " + words(n - 100) if n > 100 else "")
    return small[n] if n < 20 else tens[n // 10 - 2] + ("-" + small[n % 10] if n % 10 else "")
for line in open("sums"):
    mark, a, b, answer, told = re.match(r"  (\w+)  (\d+) plus (\d+) is (.*?)\.(?:  \(it is (.*)\.\))?$", line).groups()
    assert (mark == "right") == (answer == words(int(a) + int(b))), line
    assert mark == "right" or told == words(int(a) + int(b)), line
END
if have python3; then try "right and wrong are what they say" python3 check.py; else skip "right and wrong are what they say" "python3 is not here"; fi

# ---- the lines that it prints, typed ----
sed -n '/^What to try next/,$p' run | grep '^    [a-z]' | sed 's/^ *//' >lines
[ "$(wc -l <lines)" -eq 3 ]; result "it prints three lines to type" $? run
steps() { [ "$(wc -l <"$1")" -gt "$2" ]; } # steps LOG COUNT
losses() { sed -n 's/.*"step": *\([0-9]*\),.*"loss": *\([^,}]*\).*/\1 \2/p' "$1" | head -n 420; }
while read -r line <&3; do
    case $line in
        *full_shard*) # the first tenth of it, a validation included
            timeout 600 sh -c "exec $line" >out 2>&1 &
            id=$!
            wait_for 300 steps runs/sums-2/full_shard.jsonl 430
            kill $id; wait $id
            [ $? -eq 143 ] ;;
        *) timeout 300 sh -c "$line" >out 2>&1 ;;
    esac
    status=$?
    case $line in
        *report*) grep -q '<title>train_gpt, sums' runs/sums-2/page.html || status=1 ;;
        *--prompt*) grep -qx '12 plus 30 is forty-two.' out || status=1 ;;
        *full_shard*)
            losses runs/sums-2/log.jsonl >one; losses runs/sums-2/full_shard.jsonl >two
            [ "$(wc -l <one)" -eq 420 ] && cmp -s one two || status=1 ;;
        *) status=1 ;;
    esac
    result "$line" $status out
done 3<lines

# ---- what else learns sums ----
few="--layers 1 --channels 16 --steps 4 --warmup 2 --threads 1"
good "a sample that is too short for a sum" 'a sample, temperature' build/train_gpt $few --seq 16 --sample 5
good "a longer one" '% of all 810 held-out sums are right' build/train_gpt $few --seq 64 --ranks 3 --eval-batches 2
good "another share is held out" 'data .* 4050 are held out' build/train_gpt $few --val-split 0.5
good "as little as can be" '% of all 1 held-out sums are right|% of all 2 held-out sums are right' build/train_gpt $few --val-split 0.0001 --batch 1 --ranks 1
good "a prompt" '^a sample' build/train_gpt $few --sample 5 --prompt "12 plus 30 is"
for strategy in full_shard zero3; do
    good "its share, $strategy" '% of all 810 held-out sums are right' build/train_gpt $few --strategy $strategy --ranks 3
done
# A model that has learned nothing writes any byte: a terminal is shown none that it cannot show.
printable() { ! LC_ALL=C grep -q "$(printf '[\001-\010\013-\037\177]')" out && iconv -f UTF-8 -t UTF-8 <out >/dev/null; }
good "a sample of any bytes" 'x[89a-f][0-9a-f]' build/train_gpt $few --data "$tree/README.md" --sample 400 --temperature 50
printable; result "is made visible" $? out
yes 'ä€𝄞 ' | head -c 20000 >characters
good "a sample of other characters is shown as it is" 'ä€𝄞 ' build/train_gpt --layers 1 --channels 32 --steps 150 --warmup 2 --data characters --sample 60 --temperature 0.1
bad "a format of no data" '--data-format does nothing without --data' build/train_gpt $few --data-format bytes
bad "a vocabulary without the letters" '--vocab is 100, and .* bytes: 256' build/train_gpt $few --vocab 100
if [ "$(id -u)" = 0 ] && have setpriv; then
    mkdir closed && chmod 755 . closed && cp -L build/train_gpt closed/
    (cd closed && setpriv --reuid 65534 --clear-groups timeout -k 5 4 ./train_gpt >"$tmp/out" 2>&1)
    grep -q 'no log and no model will be kept: runs: Permission denied' out && grep -q '^data    sums' out
    result "a folder that cannot be written: it says so, and trains" $? out
else skip "a folder that cannot be written" "needs root and setpriv"; fi
[ "$(ls runs)" = "sums
sums-2" ]; result "a run with flags keeps nothing by itself" $?

# ---- Ctrl-C ----
if ! have python3; then skip "Ctrl-C" "python3 is not here" 6; finish; fi
long="build/train_gpt --layers 1 --channels 16 --eval-batches 0 --sample 0 --steps 1000000 --threads 1 --ranks 2"
# pressed NAME STATUS PATTERN TIMES COMMAND...: the text behind ^C begins a line, no sentence names a failure
pressed() {
    name=$1 expected=$2 pattern=$3; shift 3
    timeout 700 python3 "$press" "$@" >out 2>&1
    status=$?
    sed -n '/\^C/,$p' out >behind
    [ $status -eq "$expected" ] && grep -q -E '^(dtrain info|dtrain-run): asked to stop' behind && grep -q -E -e "$pattern" behind &&
        ! grep -q -i -E 'fail|error|killed' behind && nothing_left
    result "Ctrl-C: $name" $? out
}
pressed "it stops after a step, and says what would keep it" 130 \
    '^stopped by a signal, as asked, after step [0-9]+ of 1000000; with --checkpoint DIR it would be saved' 0.5 $long
pressed "saved" 0 '^stopped by a signal, as asked, after step [0-9]+ of 1000000; saved in kept: ' 0.5 $long --checkpoint kept
step=$(sed -n 's/^stopped .* after step \([0-9]*\) of.*/\1/p' out)
good "and it goes on from there" "resume  step $step from kept" $long --checkpoint kept --resume auto --steps $((step + 1))
if [ -x build/dtrain-run ]; then
    pressed "through dtrain-run" 130 '^dtrain-run: stopped by signal 2 \(SIGINT\), as asked$' 0.5 build/dtrain-run --nproc 2 ${long% --ranks 2}
    pressed "through dtrain-run, saved" 0 '; saved in other: ' 0.5 build/dtrain-run --nproc 2 ${long% --ranks 2} --checkpoint other
else skip "through dtrain-run" "build/dtrain-run is not built" 2; fi
# A program of its own has the library print its messages.
cat >own.c <<'END'
#include "dtrain.h"
#include <stdio.h>
#include <unistd.h>
static int wait_for_stop(dtrain_world *world, void *user)
{
    dtrain_world_info info;
    (void)user;
    if (dtrain_world_rank(world) == 0) fprintf(stderr, "\rstep 1/2");
    do {
        usleep(1000);
        dtrain_world_query(world, &info);
    } while (!info.stop_requested);
    return 0;
}
int main(void)
{
    dtrain_launch_desc desc = {.default_rank_count = 2, .catch_signals = true};
    return dtrain_launch(&desc, wait_for_stop, NULL, NULL) != DTRAIN_OK;
}
END
[ -f build/dtrain.a ] && ${CC:-cc} -std=c99 -D_GNU_SOURCE -I"$tree" own.c build/dtrain.a -o own -lm -lpthread
pressed "through the library's own log" 0 '^dtrain info: asked to stop by signal 2' 0.3 ./own
# A step of many seconds: the second Ctrl-C does not wait for its end.
timeout 700 python3 "$press" 0,1.5 build/train_gpt --batch 64 --accum 50 --eval-batches 0 --sample 0 --steps 1000 --checkpoint slow >out 2>&1
status=$?
[ $status -eq 130 ] && grep -q 'stopped at once, as asked' out && ! grep -q 'stopped by a signal, as asked' out && nothing_left
result "Ctrl-C twice: it ends at once" $? out
finish
