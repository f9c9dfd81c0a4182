#!/bin/sh
# check_figures.sh [README]: every number in a table of bench/README.md's section "Figures" stands in the results file
# that was named last above the table ("From `results/...`"). The first column, which names the row, is not looked at.
readme=${1:-$(dirname "$0")/README.md}
awk -v folder="$(dirname "$readme")" '
    /^## Figures/ { on = 1 }
    on && match($0, /From `results\/[^`]*`/) {
        file = folder "/" substr($0, RSTART + 6, RLENGTH - 7)
        split("", known)
        for (lines = 0; (getline line < file) > 0; lines++) {
            gsub(/[^0-9.]+/, " ", line)
            count = split(line, numbers, " ")
            for (i = 1; i <= count; i++) known[numbers[i]] = 1
        }
        close(file)
        if (!lines) { print "no file " file; bad = 1 }
    }
    !/^\|/ { rows = 0 }
    on && /^\|/ && ++rows > 2 {
        text = $0
        sub(/^\|[^|]*\|/, "", text)
        gsub(/[^0-9.]+/, " ", text)
        count = split(text, numbers, " ")
        for (i = 1; i <= count; i++) {
            checked++
            if (!(numbers[i] in known)) { print "line " NR ": " numbers[i] " is not in " file; bad = 1 }
        }
    }
    END { print checked + 0 " figures checked"; exit bad || !checked }' "$readme"
