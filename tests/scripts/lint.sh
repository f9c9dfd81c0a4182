#!/bin/sh
# Checks what a compiler does not: walls between the folders of src/, joined files, widths, words, formatting, sizes
# of files and functions.
failures=0 skipped=0
complain() { failures=$((failures + 1)); echo "lint: $*"; }

# ---- src/ and what is joined from it ----
lines=42288 # of dtrain.h: who vendors it compiles it
# What a folder of src/ may include besides itself; what everybody may include: the table of a device.
arrows='core:
world:    core
comm:     core world
launch:   core world comm
parallel: core world comm
strategy: core world comm parallel
optim:    core world comm parallel strategy
state:    core world comm parallel strategy optim
tape:     core world comm parallel strategy
train:    core world comm parallel strategy optim state tape
monitor:  core world comm parallel strategy train
device:   core'
everybody='sizes.h dtrain.h dtrain_cuda.cu dtrain_nccl.h device/device.h device/backend.h device/device_internal.h'

for file in $(find src -type f); do
    awk 'length > 100 { n++; if (n < 4) print FILENAME ":" FNR } END { exit n > 0 }' "$file" || complain "$file has lines over 100 columns"
    [ "$(wc -l <"$file")" -le 900 ] || complain "$file has more than 900 lines"
    folder=${file#src/}
    case $folder in */*) folder=${folder%%/*} ;; *) continue ;; esac # dtrain.h and the like list all folders
    allowed=$(echo "$arrows" | sed -n "s/^$folder: *//p")
    echo "$arrows" | grep -q "^$folder:" || complain "$file: no arrows are stated for the folder $folder"
    for include in $(sed -n 's/^ *# *include "\(.*\)".*/\1/p' "$file"); do
        case " $everybody " in *" $include "*) continue ;; esac
        case " $folder $allowed " in *" ${include%%/*} "*) ;; *) complain "$file includes $include: $folder may include $folder $allowed" ;; esac
        [ -f "src/$include" ] || complain "$file includes $include, which is not a path in src/"
        # Of a strategy the rooms above it see its public headers and its view.
        case $folder:$include in monitor:train/view_internal.h|monitor:train/trainer.h) ;; monitor:train/*) complain "$file includes $include: a monitor sees the record and train/view_internal.h" ;; esac
        case $folder:$include in train:state/source_internal.h) ;; train:state/*) complain "$file includes $include: train hands a state its source, and calls nothing of it" ;; esac
        case $folder:$include in strategy:*|*:strategy/view_internal.h|optim:strategy/core_view_internal.h|t*:strategy/samples_internal.h) ;; *:strategy/*_internal.h) complain "$file includes $include: outside of strategy/ there are its views" ;; esac
    done
done
# A room declares its own functions: a list in its headers begins with the file of that room that has them.
for file in $(find src -name '*_internal.h'); do
    room=${file#src/}
    grep -n -E '^/\* [a-z/]+/[a-z_]+\.c\b' "$file" | grep -v -E "^[0-9]+:/\* ${room%/*}/" && complain "$file declares functions of another room"
done
# The committed files are what is joined from src/ now.
for joined in dtrain.h dtrain_cuda.cu dtrain_nccl.h; do
    sh tools/join.sh src/$joined | cmp -s - $joined || complain "$joined is stale: make $joined"
done
# Each source is in one of them: src/ compiled file by file would not miss it.
for file in $(find src -name '*.c' -o -name '*.cuh'); do
    grep -q -F "$file" dtrain.h dtrain_cuda.cu dtrain_nccl.h || complain "$file is in no joined file: include it in src/dtrain.h or the like"
done
[ "$(wc -l <dtrain.h)" -le "$lines" ] || complain "dtrain.h has more than $lines lines: what is added replaces something"
core=$(awk '/Ring 1: core ---/ { first = FNR } /Ring 2: state ---/ { print FNR - first }' dtrain.h)
[ "$core" -le 14889 ] || complain "ring 1 of dtrain.h has $core lines: limits only go down"
# Lines of the five files of DDP and sharding, and the number of functions that are called once: a straight road reads better.
path=$(cd src/strategy && cat strategy.h layout.c reduce.c units.c create.c | wc -l)
[ "$path" -le 1662 ] || complain "the five files of DDP and sharding have $path lines: limits only go down"
once=$(awk -f tests/scripts/called_once.awk dtrain.h)
[ "${once% *}" -le 419 ] || complain "$once: functions of dtrain.h that are called once, of all: limits only go down"
# Its text in bytes, of gcc 12 with -O2 on x86: everything, and only the core. Times are bench/compile.sh's.
if [ "$(gcc -dumpversion 2>/dev/null) $(uname -m)" = "12 x86_64" ]; then
    for limit in "600600 -UDTRAIN_CORE" "211700 -DDTRAIN_CORE"; do
        printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' | gcc -std=c99 -O2 ${limit#* } -I. -x c -c - -o /tmp/dtrain_lint.$$
        text=$(size /tmp/dtrain_lint.$$ | awk 'NR == 2 { print $1 }')
        [ "${text:-999999}" -le ${limit%% *} ] || complain "dtrain.h compiles to $text bytes of text, at most $limit: limits only go down"
        rm -f /tmp/dtrain_lint.$$
    done
else skipped=$((skipped + 1)); echo "  skip the size of text: its limits are gcc 12's on x86"; fi
# Private names that meet in the joined file.
printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' | ${CC:-cc} -std=c99 -I. -Wall -Wextra -Werror -x c -fsyntax-only - || complain "dtrain.h does not compile"
sh tools/house.sh | cmp -s - docs/house.svg || complain "docs/house.svg is stale: make docs"
sh tools/api_index.sh | cmp -s - docs/api.md || complain "docs/api.md is stale: make docs"
sh tools/zero_svg.sh | cmp -s - docs/zero.svg || complain "docs/zero.svg is stale: make docs"
sh tools/full_shard_svg.sh | cmp -s - docs/full-shard.svg || complain "docs/full-shard.svg is stale: make docs"
sh tools/tensor_svg.sh | cmp -s - docs/tensor.svg || complain "docs/tensor.svg is stale: make docs"
# One version: the string is made of the numbers, and the newest heading of CHANGELOG is it.
version=$(sed -n 's/^#define DTRAIN_VERSION_[MP][A-Z]* //p' src/core/api.h | paste -s -d .)
grep -q "^#define DTRAIN_VERSION_STRING \"$version\"$" src/core/api.h || complain "DTRAIN_VERSION_STRING is not $version, its numbers"
sed -n 's/^## \([0-9.]*\).*/\1/p' CHANGELOG.md | head -n 1 | grep -q -x -F "$version" || complain "CHANGELOG.md does not begin with version $version"

# Private words that have a plain one: exit status, message, private copy, remote, sample counts. And lines with phrases that
# send a reader back: their number only goes down.
banned="torn|weave|inside of|somebody|fate|landing|landed|taped|unsure|ghost|twin|blame|woven|place_of_stage|page_of_text|that which|what is here|thereby|whereas|moreover|namely|going on"
grep -r -n -i -E "$banned" src && complain "src/ uses words that have plain ones: $banned"
unclear="those of|behind|alone|of (its|their) own|go(es)? on|may be|the others?'s"
unclear_lines=$(grep -r -h -w -i -E "$unclear" src | wc -l)
[ "$unclear_lines" -le 40 ] || complain "$unclear_lines lines of src/ have one of these, at most 40: $unclear"

# ---- The public functions ----
# There may be so many. What no example, tool or bench calls has its reason here: pattern, reason.
functions=158 structs=111 fields=1060
unshown='dtrain_collective_result for authors of a transport
dtrain_device_account for authors of a device
dtrain_tape_(query|recompute) for loops without the trainer
dtrain_work_test for programs that poll'
names=$(sed -n 's/^### //p' docs/api.md)
# docs/api.md has every function that the headers declare, each with a prototype and a whole sentence.
sed '/^.. Readers of the API can stop here/q' dtrain.h | cat - src/comm/nccl/nccl.h | tr '\n' ' ' | sed 's/DTRAIN_API\|extern const/\n&/g' |
    sed -n 's/^\(DTRAIN_API\|extern const\)[^;(]*[ *]\(dtrain_[a-z0-9_]*\)(.*/\2/p' | sort -u >/tmp/dtrain_lint.$$
echo "$names" | sort -u | diff - /tmp/dtrain_lint.$$ || complain "docs/api.md and the public headers have different functions"
rm -f /tmp/dtrain_lint.$$
awk '/^### / { name = $2; prototype = 0 } /^```c$/ { prototype = 1; next } prototype == 1 && index($0, name "(") { prototype = 2 }
     name && /^[A-Z]/ && !/^Declared/ { if (prototype != 2 || !/\.$/) { print name ": " $0; bad = 1 } name = "" }
     /^## / && name { print name ": no sentence"; bad = 1; name = "" } END { exit bad || name != "" }' docs/api.md || complain "an entry of docs/api.md lacks its prototype, or its sentence is cut"
# And every struct, enum and callback that they define, whole: as many closing brackets and semicolons as headings.
sed '/^.. Readers of the API can stop here/q' dtrain.h | cat - src/comm/nccl/nccl.h |
    sed -n -E 's/^(typedef )?(struct|enum) (dtrain_[a-z0-9][a-z0-9_]*) \{.*/\3/p; s/^typedef .*\(\*(dtrain_[a-z0-9][a-z0-9_]*)\).*/\1/p' | sort -u >/tmp/dtrain_lint.$$
sed -n 's/^#### //p' docs/api.md | sort | diff - /tmp/dtrain_lint.$$ || complain "docs/api.md and the public headers have different types"
rm -f /tmp/dtrain_lint.$$
awk '/^####? / { name = $2; type = /^####/; code = "" } /^```/ { open = !open; if (!open && type && code !~ /;$/) { print name ": cut"; bad = 1 } next }
     open { code = $0 } END { exit bad }' docs/api.md || complain "a type of docs/api.md is not whole"
[ "$(echo "$names" | wc -l)" -le $functions ] || complain "docs/api.md has more than $functions public functions"
awk -f tests/scripts/api_count.awk dtrain.h src/comm/nccl/nccl.h | {
    read -r has_structs has_fields
    [ "$has_structs" -le $structs ] && [ "$has_fields" -le $fields ]
} || complain "the public headers have more than $structs structs or $fields fields: limits only go down"
echo "$names" | grep -v -x -E "$(echo "$unshown" | sed 's/ .*//' | paste -s -d '|')" | while read -r name; do
    grep -r -q -w "$name" examples tools bench || echo "$name"
done | grep . && complain "no example, tool or bench calls these public functions: show them, remove them or give a reason above"
echo "$unshown" | sed 's/ .*//' | while read -r pattern; do
    echo "$names" | grep -q -x -E "$pattern" || echo "$pattern"
done | grep . && complain "these reasons are of functions that are gone"
for name in $(echo "$names" | sed -n 's/_create$//p'); do
    echo "$names" | grep -q -x "${name}_destroy" || complain "${name}_create has no ${name}_destroy"
done
# Queries cannot fail, but for those that ask a driver or load a library.
grep -n -E '^DTRAIN_API dtrain_result dtrain_[a-z_]*_query\(' $(find src -name '*.h') | grep -v -E 'dtrain_(device|nccl)_query' && complain "a query returns void"

# What documents name is there: links with their headings, paths or ends of paths, and tests. A reader writes first.c.
find README.md CONTRIBUTING.md docs src examples tests tools bench -type f | sed 's#^#/#' >/tmp/dtrain_lint.$$
for page in README.md CONTRIBUTING.md docs/*.md tests/README.md bench/README.md; do
    for link in $(grep -o -E '\]\([^):]+\)' $page | sed 's/^](//; s/)$//'); do
        target=$(dirname $page)/${link%%#*}
        case $link in \#*) target=$page ;; esac
        [ -e "$target" ] || { complain "$page links $link, which is not there"; continue; }
        case $link in *\#*) sed -n 's/^##* //p' $target | tr 'A-Z ' 'a-z-' | sed 's/[^a-z0-9_-]//g' | grep -q -x -e "${link#*#}" ||
            complain "$page links $link: $target has no such heading" ;; esac
    done
    for name in $(grep -o -E '`[A-Za-z0-9_./-]+\.(c|h|cuh|cpp|sh|mk|py|awk|md)`|`test_[a-z0-9_]+`' $page | tr -d '`' | sort -u); do
        grep -q -E "/$name(\.c|\.cpp)?\$" /tmp/dtrain_lint.$$ || [ $name = first.c ] || { [ "${name%.*}" = "$name" ] && grep -r -q -w "$name" tests --include='*.[ch]'; } ||
            complain "$page names $name, which is not there"
    done
done
rm -f /tmp/dtrain_lint.$$

# What makes a descriptor goes through one function (core/platform.c), which keeps it off 0, 1 and 2; a program opens
# /dev/null there before anything else.
grep -n -E '(^|[^_A-Za-z>."])(open(at|dir)?|creat|socket(pair)?|pipe2?|dup[23]?|accept4?|shm_open|memfd_create|epoll_create1?|eventfd|signalfd|timerfd_create|inotify_init1?|f(re)?open|tmpfile|mkstemp|popen)\(|F_DUPFD|SYS_memfd' \
    $(find src -name '*.[ch]' -o -name '*.cuh') | grep -v -E 'dtrain__above_stdio\(|src/core/platform.c.*F_DUPFD' && complain "src/ opens descriptors without dtrain__above_stdio"
for program in $(grep -l '^int main(' tools/*/*.c) examples/resnet_cifar.c; do
    grep -A 2 '^int main(' $program | grep -q '^    take_descriptors();' || complain "$program does not begin with take_descriptors()"
done

# Examples are what a user may write.
grep -n -i 'dtrain__' examples/*.c examples/hosts/*/*.[ch] && complain "examples/ use private names"

SOURCES="$(find src -name '*.[ch]' ! -name manual.h) $(find src -name '*.cuh') examples/*.[ch] examples/hosts/*.h examples/hosts/*/*.[ch] tools/*.h tools/*/*.[ch] $(ls tests/*/*.[ch] | grep -v tests/reference/) tests/*/*.cpp tests/*/*/*.[ch] tests/*/*/*.cpp bench/*.[ch]"
for file in $SOURCES; do
    wide=$(awk 'length > 120 { print FILENAME ":" FNR; exit }' "$file")
    [ -z "$wide" ] || complain "$wide is wider than 120 columns"
    grep -n -E '\b(TODO|FIXME|XXX)\b' "$file" && complain "$file sounds unfinished"
    grep -n -P '\t| +$' "$file" | head -n 3 | grep . && complain "$file has tabs or trailing blanks"
done
awk 'length > 100 { n++; if (n < 4) print FILENAME ":" FNR } END { exit n > 0 }' src/*.h src/*/*.[ch] src/*/*/*.[ch] || complain "src/ has lines over 100 columns"

# Who reads a training program meets no forecast.
grep -n -E '#include "tools/(plan|simulate)/' tools/run/*.h && complain "tools/run needs nothing of tools/plan and tools/simulate"

# A function above 80 lines is a question to its author.
awk '/^[a-zA-Z].*\)$/ || /^[a-zA-Z].*[a-zA-Z0-9_*]\($/ { name = $0 } /^\{/ { start = FNR }
     /^\}/ && start { if (FNR - start > 80) { print FILENAME ":" start ": " FNR - start " lines: " name; bad = 1 } start = 0 }
     END { exit bad }' src/*/*.c src/*/*/*.c src/*/*/*/*.h src/device/cuda/*.cuh || complain "there are functions above 80 lines"

if command -v clang-format >/dev/null 2>&1; then
    clang-format --dry-run --Werror $SOURCES >/tmp/dtrain_lint.$$ 2>&1 || {
        head -n 10 /tmp/dtrain_lint.$$; complain "clang-format (version 14) would change files"; }
    rm -f /tmp/dtrain_lint.$$
else skipped=$((skipped + 1)); echo "  skip formatting: clang-format is not installed"; fi
if command -v cppcheck >/dev/null 2>&1; then
    # uninitialised variables are gcc's, clang's and valgrind's: cppcheck 2.10 takes out-parameters for uses
    cppcheck -q --error-exitcode=1 --enable=warning,portability --inline-suppr --suppress=missingIncludeSystem --suppress=uninitvar --suppress=ctuuninitvar \
        --std=c99 -DDTRAIN_IMPLEMENTATION -D__GNUC__=12 -D__linux__ -DCLOCK_MONOTONIC=1 -DMAP_ANONYMOUS=32 dtrain.h || complain "cppcheck"
else skipped=$((skipped + 1)); echo "  skip cppcheck: not installed"; fi

if [ "$skipped" -gt 0 ]; then echo "$((failures == 0)) passed, $failures failed, $skipped skipped"
else echo "$((failures == 0)) passed, $failures failed"; fi
[ "$failures" -eq 0 ]
