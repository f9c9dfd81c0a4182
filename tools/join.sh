#!/bin/sh
# join.sh ENTRY: prints ENTRY, a file of src/, with every file that it includes from src/ in the place of the
# first #include that names it. A file is announced by its path; "@contents@" becomes the list of all
# files with their first lines; #pragma once goes. Includes of anything else stay as they are.
exec awk -v src="$(dirname "$1")" -v entry="$1" '
function put(line) { if (line != "") last = 1; text[++count] = line }
function path_of(line) { sub(/^#include "/, "", line); sub(/".*/, "", line); return src "/" line }
function exists(path,    line) { if ((getline line < path) < 0) return 0; close(path); return 1 }
function announce(path,    line) {
    line = "/* ==== " path " "
    while (length(line) < 97) line = line "="
    put(""); put(line " */"); put("")
    listed[++files] = path
}
function expand(path,    line, inner, first) {
    while ((getline line < path) > 0) {
        if (line ~ /^\/\* / && !first++) { title[path] = line; sub(/^\/\* /, "", title[path]); sub(/[. ]*(\*\/)?$/, "", title[path]) }
        if (line ~ /^#pragma once/) continue
        if (line ~ /^#include "/ && line !~ /"dtrain.h"/ && exists(inner = path_of(line))) {
            if (!seen[inner]++) { if (inner !~ /manual/) announce(inner); expand(inner) }
            continue
        }
        put(line)
    }
    close(path)
}
BEGIN {
    expand(entry)
    for (i = 1; i <= count; i++) {
        if (text[i] == "") { blank = 1; continue }
        if (text[i] ~ /^ *@contents@$/) {
            for (f = 1; f <= files; f++) printf "       %-36s %s\n", listed[f], title[listed[f]]
            blank = 0
            continue
        }
        if (blank && printed) print ""
        blank = 0; printed = 1
        print text[i]
    }
}'
