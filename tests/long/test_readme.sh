#!/bin/sh
# README's first hour, typed in a new copy of the tree, in which nothing is built: the commands of "Two minutes" up to a
# page in a browser, a text of the user's own, the serial program that becomes data-parallel, with the lines that
# compile the library once. Commands and programs are taken from README; what it promises is compared. In the end git
# sees what the user has written and nothing else, and would see none of the programs that examples make. Of the run
# that learns sums this script makes the first steps; test_first_run.sh makes all.
# CC stands for the printed cc.
. tests/support/shell.sh
root=$PWD
tree=$tmp/tree
mkdir -p "$tree" "$tmp/bin"
unset MAKEFLAGS MFLAGS MAKELEVEL BUILD # this make is nobody's part
ln -s "$(command -v "${CC:-cc}")" "$tmp/bin/cc"
PATH=$tmp/bin:$PATH
have git && git rev-parse --git-dir >/dev/null 2>&1 || { skip "README's first hour" "needs git, and a tree that it knows"; finish; }
git ls-files -z -c -o --exclude-standard | xargs -0 sh -c 'for file; do [ ! -e "$file" ] || printf "%s\n" "$file"; done' sh | tar -cf - -T - | tar -xf - -C "$tree"
cd "$tree" || exit 1
git init -q . && git add . && git -c user.name=test -c user.email=test@test commit -q -m test || exit 1

# The commands of the first block behind a line that begins with TEXT, without their remarks.
block() { # block TEXT
    awk -v text="$1" 'index($0, text) == 1 { on = 1; next } on && /^    / { print; shown = 1; next } shown { exit }' README.md | sed 's/^    //; s/ *#.*//'
}
# What stands for a browser: the one that is here, without a window.
browser=
for each in chromium chromium-browser google-chrome; do [ -n "$browser" ] || browser=$(command -v $each); done
cat >"$tmp/bin/xdg-open" <<SHIM
#!/bin/sh
[ -f "\$1" ] || exit 1
if [ -n "$browser" ]; then "$browser" --headless --no-sandbox --disable-gpu --dump-dom "file://\$PWD/\$1" 2>/dev/null; else cat "\$1"; fi >"$tmp/page"
SHIM
chmod +x "$tmp/bin/xdg-open"
type_in() { # type_in SECONDS COMMAND
    timeout "$1" sh -c "$2" >"$tmp/out" 2>&1 </dev/null
    result "$2" $? "$tmp/out"
}
first_steps() { # first_steps COMMAND: until it has looked at how much is right, then it is asked to stop
    sh -c "$1" >"$tmp/out" 2>&1 </dev/null &
    id=$!
    wait_for 500 eval "grep -q 'of the held-out sums are right' '$tmp/out' || ! kill -0 $id"
    kill $(leftovers | sed -n 's/^\([0-9]*\) build.train_gpt .*/\1/p') 2>/dev/null
    wait $id 2>/dev/null
    grep -q '^stopped by a signal, as asked, after step ' "$tmp/out"
    result "$1, its first steps" $? "$tmp/out"
}
typed() { # typed SECONDS TEXT: every command of that block, in order
    block "$2" >"$tmp/commands"
    [ -s "$tmp/commands" ]; result "README has commands behind \"$2\"" $?
    while IFS= read -r command <&4; do
        case $command in "make run") first_steps "$command" ;; *) type_in "$1" "$command" ;; esac
    done 4<"$tmp/commands"
}

begin=$(date +%s)
typed 600 "## Two minutes"
grep -q '<svg' "$tmp/page" && grep -q -i 'loss' "$tmp/page"
result "the page has curves of the loss (after $(($(date +%s) - begin)) seconds)" $? "$tmp/page"

line=$(grep -o 'build/train_gpt --data my.txt --steps [0-9]*' README.md | head -n 1)
for number in 1 2 3 4 5 6 7 8 9; do
    for animal in cat dog fox owl; do echo "$number: the $animal sees the moon, and the moon sees the $animal."; done
done >my.txt
type_in 300 "$line"
grep -q 'my\.txt' "$tmp/out" && awk '$1 ~ /^[0-9]+$/ && $2 ~ /^[0-9]+\.[0-9]+$/ { if (!first) first = $2; last = $2 } END { exit !(last < first / 2) }' "$tmp/out"
result "a text of 36 lines is learned" $? "$tmp/out"

readme_program before >serial.c
readme_program after >first.c
cc -O2 serial.c -o serial && ./serial >"$tmp/serial"
type_in 300 "make build/dtrain-run"
typed 300 "Compile the library once"
cmp -s "$tmp/serial" "$tmp/out"
result "first.c computes on four ranks what the serial program does" $? "$tmp/out"
./first >"$tmp/out" 2>&1; cmp -s "$tmp/serial" "$tmp/out"
result "first.c computes on two ranks what the serial program does" $? "$tmp/out"

git status --short >"$tmp/out"
printf '?? %s\n' first.c my.txt serial.c | cmp -s - "$tmp/out"
result "git sees what the user has written and nothing else" $? "$tmp/out"
# The -o of every line that compiles, in README and in the opening comments.
grep -h -o -E '^( \* .*|    |.*`)(cc|mpicc|nvcc) .*' README.md examples/*.c tools/*/*.c | grep -o -e ' -o [A-Za-z0-9_./-]*' | sed 's/ -o //' | sort -u >"$tmp/products"
! grep / "$tmp/products" >"$tmp/out"; result "the printed lines make files of the root: a new clone has no build/" $? "$tmp/out"
git check-ignore --no-index --stdin <"$tmp/products" | diff - "$tmp/products" >"$tmp/out" && [ "$(wc -l <"$tmp/products")" -gt 12 ]
result "git ignores what the $(wc -l <"$tmp/products") printed lines make" $? "$tmp/out"
git ls-files -c -i --exclude-standard >"$tmp/out"; [ ! -s "$tmp/out" ]
result "git ignores nothing that it has" $? "$tmp/out"
cd "$root" || exit 1
finish
