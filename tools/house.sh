#!/bin/sh
# house.sh: prints a drawing (SVG) of src/ made from its files and includes: a room for each folder in the order
# of reading, its files with the first line of each, and on the right an arrow from a room to each room that it
# includes files of, with their number. `make lint` compares docs/house.svg with what this prints.
cd "$(dirname "$0")/.." || exit 1
for room in core world comm comm/nccl launch strategy tape optim train state monitor device device/cpu device/cuda; do
    for file in src/$room/*.c src/$room/*.h src/$room/*.cuh src/$room/kernels/*.h src/$room/ways/*.c; do
        [ -f "$file" ] && echo "$room $file"
    done
done | awk '
function escape(s) { gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); gsub(/>/, "\\&gt;", s); return s }
function text(x, y, class, s) { printf "<text x=\"%d\" y=\"%d\" class=\"%s\">%s</text>\n", x, y, class, escape(s) }
function room_of(path) { sub(/\/[^\/]*$/, "", path); sub(/\/(kernels|ways)$/, "", path); return path }
{
    room = $1; file = $2
    if (!(room in number)) { number[room] = ++rooms; name[rooms] = room }
    files[room, ++count[room]] = file
    first = 1
    while ((getline line < file) > 0) {
        if (first && line ~ /^\/\* /) {
            sub(/^\/\* /, "", line); sub(/[ .:]*(\*\/)?$/, "", line); title[file] = line
        }
        first = 0
        if (line !~ /^#include "[a-z]+\//) continue
        sub(/^#include "/, "", line); sub(/".*/, "", line)
        other = room_of(line)
        if (other != room) uses[room, other]++
    }
    close(file)
}
END {
    width = 860; line_height = 15
    for (r = 1; r <= rooms; r++) {
        top[r] = y + 30; rows = int((count[name[r]] + 1) / 2)
        height[r] = 30 + rows * line_height; y = top[r] + height[r]
    }
    printf "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1240\" height=\"%d\" font-family=\"sans-serif\">\n", y + 30
    print "<style>.room{fill:#f6f4ee;stroke:#555}.name{font-size:14px;font-weight:bold}.file{font-size:11px;font-family:monospace}"
    print ".title{font-size:11px;fill:#555}.arrow{fill:none;stroke:#36c}.count{font-size:10px;fill:#36c}</style>"
    print "<defs><marker id=\"head\" markerWidth=\"8\" markerHeight=\"8\" refX=\"7\" refY=\"3\" orient=\"auto\">" \
          "<path d=\"M0,0 L7,3 L0,6 z\" fill=\"#36c\"/></marker></defs>"
    text(20, 20, "title", "src/, in the order of reading; an arrow: files of the one room include so many files of the other")
    for (r = 1; r <= rooms; r++) {
        room = name[r]
        printf "<rect x=\"20\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"4\" class=\"room\"/>\n", top[r], width, height[r]
        text(30, top[r] + 18, "name", room)
        rows = int((count[room] + 1) / 2)
        for (f = 1; f <= count[room]; f++) {
            file = files[room, f]; short = file; sub("^src/" room "/", "", short)
            x = f > rows ? 460 : 30; at = top[r] + 34 + ((f - 1) % rows) * line_height
            text(x, at, "file", short); text(x + 160, at, "title", substr(title[file], 1, 44))
        }
    }
    for (r = 1; r <= rooms; r++) {
        out = 0
        for (other = 1; other <= rooms; other++) {
            n = uses[name[r], name[other]]
            if (!n) continue
            from = top[r] + 12 + 7 * out++; to = top[other] + height[other] - 8 - 6 * in_count[other]++
            reach = 20 + 32 * (r > other ? r - other : other - r); right = 20 + width
            printf "<path d=\"M%d,%d C%d,%d %d,%d %d,%d\" class=\"arrow\" marker-end=\"url(#head)\"/>\n", \
                   right, from, right + reach, from, right + reach, to, right + 2, to
            text(right + int(reach * 0.74), int((from + to) / 2), "count", n)
        }
    }
    print "</svg>"
}'
