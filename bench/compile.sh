#!/bin/sh
# compile.sh [COMMIT]: the cost of compiling dtrain.h: user seconds of gcc -O2 (the least of N=3 turns, one after the
# other), the ratio to the first line, and bytes of text as `size` counts them. With a commit its dtrain.h comes first.
cd "$(dirname "$0")/.." || exit 1
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' >"$tmp/one.c"
rows="everything: core:-DDTRAIN_CORE core+state:-DDTRAIN_OMIT_MODELS,-DDTRAIN_OMIT_MONITOR native:-DDTRAIN_NATIVE,-march=native"
if [ $# -gt 0 ]; then
    mkdir "$tmp/old" && git show "$1:dtrain.h" >"$tmp/old/dtrain.h" || exit 1
    rows="$1:-I$tmp/old $rows"
fi
for turn in $(seq "${N:-3}"); do
    for row in $rows; do
        name=${row%%:*}
        { TIMEFORMAT=%U; export TIMEFORMAT
          bash -c 'time "$@"' - ${CC:-gcc} -std=c99 -O2 $(echo "${row#*:}" | tr , ' ') -I. -c "$tmp/one.c" -o "$tmp/$name.o"; } 2>"$tmp/time" || exit 1
        echo "$name $(tail -n 1 "$tmp/time") $(size "$tmp/$name.o" | awk 'NR == 2 { print $1 }')"
    done
done | awk '{ if (!($1 in best)) order[++count] = $1; if (!($1 in best) || $2 < best[$1]) best[$1] = $2; text[$1] = $3 }
    END { for (i = 1; i <= count; i++) { n = order[i]; printf "%-12s %6.2f s  %5.3f  %7d bytes\n", n, best[n], best[n] / best[order[1]], text[n] } }'
