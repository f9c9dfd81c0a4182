#!/bin/sh
# house.sh: prints a drawing (SVG) of src/ made from its files and includes: a floor for each folder, in the order of
# src/dtrain.h, with its files and their lines, and beside it a row of a table: how many includes lead from this floor to
# each other one. `make lint` compares docs/house.svg with what this prints.
cd "$(dirname "$0")/.." || exit 1

# What a folder is for. One without a sentence ends the script.
purpose='core|Results and error sentences, logs, data types, random numbers, hashes.
world|Who the ranks are: the memory they share, messages between them, where they meet.
comm|Collectives such as all-reduce, over shared memory or MPI.
comm/nccl|The same collectives over NCCL, for NVIDIA GPUs: dtrain_nccl.h.
launch|Starts ranks, restarts them after a failure, understands torchrun, mpirun, srun.
parallel|The mesh of ranks along axes; which part of a parameter the tensor axis gives to whom.
strategy|Who keeps which parameters, gradients and optimizer state, and when they travel.
tape|Layers and their backward passes; knows when a gradient is final.
optim|AdamW, SGD, Lion and Muon; learning rates; loss scaling.
train|Datasets, loaders, the training step, the prediction of memory.
state|Checkpoints that survive a crash; import and export of weights.
monitor|What a run tells: terminal, JSON, TensorBoard.
device|The table of kernels that every device fills in.
device/cpu|The kernels for CPUs, once for each instruction set, and a pool of threads.
device/cuda|The kernels for NVIDIA GPUs: dtrain_cuda.cu.'

# The folders as src/dtrain.h includes their files, and those of the two companions.
rooms() {
    sed -n 's/^#include "\(.*\)\/[^/]*\.c"$/\1/p' src/dtrain.h | awk '
        $0 ~ /\/kernels$/ || seen[$0]++ { next }
        { print }
        $0 == "comm" { print "comm/nccl" }
        $0 == "device/cpu" { print "device/cuda" }'
}
for room in $(rooms); do
    printf 'purpose %s %s\n' "$room" "$(echo "$purpose" | sed -n "s,^$room|,,p")"
    for file in src/$room/*.c src/$room/*.h src/$room/*.cuh src/$room/kernels/*.h; do
        [ -f "$file" ] && echo "file $room $file"
    done
done | awk '
function text(x, y, class, s) {
    gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s)
    printf "<text x=\"%d\" y=\"%d\" class=\"%s\">%s</text>\n", x, y, class, s
}
function room_of(path) { sub(/\/[^\/]*$/, "", path); sub(/\/kernels$/, "", path); return path }
function thousands(n) { return n < 1000 ? n : sprintf("%d,%03d", n / 1000, n % 1000) }
$1 == "purpose" {
    room = $2; name[++rooms] = room
    sub(/^purpose [^ ]+ ?/, ""); about[room] = $0
    if ($0 == "") { print "house.sh: no sentence says what src/" room " is for" >"/dev/stderr"; failed = 1; exit 1 }
    next
}
{
    room = $2; file = $3
    files[room, ++count[room]] = file
    while ((getline line < file) > 0) {
        lines[file]++
        if (line !~ /^#include "[a-z]+\//) continue
        sub(/^#include "/, "", line); sub(/".*/, "", line)
        other = room_of(line)
        if (other != room) uses[room, other]++
    }
    close(file)
    total[room] += lines[file]; all += lines[file]
}
END {
    if (failed) exit 1
    left = 16; width = 812; columns = 4; column = 196; line_height = 15; cell = 23
    table = left + width + 26; top = 112
    y = top
    for (r = 1; r <= rooms; r++) {
        begin[r] = y; height[r] = 36 + int((count[name[r]] + columns - 1) / columns) * line_height
        y += height[r] + 8
    }
    printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\">\n", table + rooms * cell + 44, y + 10
    print "<style>.back{fill:#fff}.name{font-size:15px;font-weight:bold;fill:#222}.about{font-size:12.5px;fill:#333}.size{font-size:11px;fill:#777;text-anchor:end}"
    print ".file{font-size:11px;font-family:monospace;fill:#222}.lines{font-size:11px;font-family:monospace;fill:#999;text-anchor:end}"
    print ".title{font-size:20px;font-weight:bold;fill:#222}.note{font-size:12.5px;fill:#555}.head{font-size:11.5px;fill:#444}"
    print ".grid{stroke:#e4e4e4}.uses{fill:#4878a8}.self{fill:#d8d8d8}.n{font-size:10px;fill:#fff;text-anchor:middle}</style>"
    printf "<rect width=\"100%%\" height=\"100%%\" class=\"back\"/>\n"
    text(left, 34, "title", "The house of src/: " rooms " floors, " thousands(all) " lines")
    text(left, 60, "note", "In the order of src/dtrain.h, which is the order of reading. A floor uses floors above it; the table of a device, below, is for all.")
    text(left, 80, "note", "Behind a file: its lines. On the right: how many includes lead from the files of a floor to those of the floor over the column.")
    for (r = 1; r <= rooms; r++) {
        x = table + (r - 1) * cell + cell / 2
        printf "<path d=\"M%.1f,%d V%d\" class=\"grid\"/>\n", x, top - 6, y - 8
        printf "<text transform=\"translate(%.1f,%d) rotate(-60)\" class=\"head\">%s</text>\n", x + 3, top - 10, name[r]
    }
    for (r = 1; r <= rooms; r++) {
        room = name[r]
        printf "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" rx=\"6\" fill=\"hsl(%d,45%%,95%%)\" stroke=\"hsl(%d,30%%,75%%)\"/>\n", \
            left, begin[r], width, height[r], (r - 1) * 25 + 200, (r - 1) * 25 + 200
        text(left + 12, begin[r] + 20, "name", room)
        text(left + 122, begin[r] + 20, "about", about[room])
        text(left + width - 12, begin[r] + 20, "size", count[room] " files, " thousands(total[room]) " lines")
        rows = int((count[room] + columns - 1) / columns)
        for (f = 1; f <= count[room]; f++) {
            file = files[room, f]; short = file; sub("^src/" room "/", "", short)
            x = left + 12 + int((f - 1) / rows) * column; at = begin[r] + 40 + ((f - 1) % rows) * line_height
            text(x, at, "file", short); text(x + column - 22, at, "lines", lines[file])
        }
        middle = begin[r] + 16
        printf "<path d=\"M%d,%d H%d\" class=\"grid\"/>\n", left + width + 4, middle, table + rooms * cell
        for (other = 1; other <= rooms; other++) {
            x = table + (other - 1) * cell + cell / 2
            if (other == r) printf "<rect x=\"%.1f\" y=\"%d\" width=\"10\" height=\"10\" class=\"self\"/>\n", x - 5, middle - 5
            n = uses[room, name[other]]
            if (!n) continue
            printf "<circle cx=\"%.1f\" cy=\"%d\" r=\"9\" class=\"uses\"/>\n", x, middle
            text(x, middle + 4, "n", n)
        }
    }
    print "</svg>"
}'
