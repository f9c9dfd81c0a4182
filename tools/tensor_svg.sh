#!/bin/sh
# tensor_svg.sh: prints a drawing (SVG) of what two ranks of a tensor axis have and send: the two cuts of a pair of linear
# layers, a packed matrix that is cut component by component, and one transformer block with and without sequence
# parallelism. The boxes of the first are to scale, rows x features. `make lint` compares docs/tensor.svg with what this prints.
awk '
function text(x, y, class, s) { printf "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\">%s</text>\n", x, y, class, s }
function rect(x, y, width, height, class) {
    printf "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" class=\"%s\"/>\n", x, y, width, height, class
}
# A tensor of which this rank has part `r` of two along an axis; axis "": all of it.
function tensor(x, y, width, height, axis, class, r) {
    if (axis != "") rect(x, y, width, height, "away")
    if (axis == "rows") rect(x, y + r * height / 2, width, height / 2, class)
    else if (axis == "columns") rect(x + r * width / 2, y, width / 2, height, class)
    else rect(x, y, width, height, class)
}
# A collective of both ranks: a bar from one to the other.
function collective(x, y, height, class, name, below) {
    rect(x, y, 12, height, class)
    text(x + 2, y - 6, "note", name); text(x - 14, y + height + 26, "note", below)
}
function pair(    r, x, y, middle) {
    text(4, 18, "title", "A pair of linear layers on two ranks: h = GELU(x W1&#7488;), y = h W2&#7488;")
    text(4, 36, "note", "blue: weights of this rank, green: activations, orange: a sum that is not complete, grey: on the other rank, pink: sent")
    split("x: whole|W1: cut by rows|h: its columns|W2: cut by columns|half of every sum|y: whole", name, "|")
    split("72 170 280 428 566 720", at, " ")
    for (c = 1; c <= 6; c++) text(at[c], 62, "note", name[c])
    for (r = 0; r < 2; r++) {
        y = 76 + r * 112; middle = y + 48
        text(4, middle, "row", "rank " r)
        tensor(at[1], y + 14, 26, 60, "", "activation", r)
        tensor(at[2], y - 4, 26, 96, "rows", "weight", r)
        tensor(at[3], y + 14, 96, 60, "columns", "activation", r)
        tensor(at[4], y + 31, 96, 26, "columns", "weight", r)
        rect(at[5], y + 14, 26, 60, "partial")
        tensor(at[6], y + 14, 26, 60, "", "activation", r)
        text(at[2] - 26, middle, "row", "&#215;"); text(at[3] - 46, middle, "row", "=")
        text(at[4] - 24, middle, "row", "&#215;"); text(at[5] - 20, middle, "row", "=")
    }
    collective(116, 84, 188, "waits", "f", "all-reduce of dx, in backward alone, while dW1 is computed"); collective(650, 84, 188, "collective", "g", "all-reduce, in forward alone")
    text(776, 130, "note", "W1 makes some features of h, all of them"); text(776, 146, "note", "complete: nothing is sent between the layers.")
    text(776, 168, "note", "W2 reads those features: each rank has a"); text(776, 184, "note", "sum over them, and the sums are added once.")
    text(776, 206, "note", "The bias of W1 is cut as its rows are; that of"); text(776, 222, "note", "W2 is whole, and added once, behind the sum.")
}
function packed(top,    i, x, r, heads, component) {
    text(4, top, "title", "Rows of q|k|v with four heads: each component is cut, and a rank&#8217;s parts stand together (blue: rank 0, orange: rank 1)")
    split("q k v", component, " ")
    for (i = 0; i < 12; i++) {
        x = 72 + i * 40
        rect(x, top + 24, 39, 24, i % 4 < 2 ? "weight" : "gradient"); text(x + 12, top + 41, "in", component[int(i / 4) + 1] i % 4)
    }
    text(4, top + 41, "row", "whole")
    for (r = 0; r < 2; r++) {
        text(600, top + 24 + r * 32, "row", "rank " r)
        for (i = 0; i < 6; i++) {
            x = 650 + i * 40
            rect(x, top + 8 + r * 32, 39, 24, r ? "gradient" : "weight"); text(x + 12, top + 25 + r * 32, "in", component[int(i / 2) + 1] r * 2 + i % 2)
        }
    }
}
# One block, a row of boxes: what is computed, and in between what is sent. Heights: rows of the batch that a rank has.
function block(top, sequence,    i, n, x, w, kind, height, words) {
    n = split(sequence ? "norm:68:part all-gather:0:sent q|k|v:68:some attention:92:some proj:62:some reduce-scatter:0:sent add,_norm:82:part all-gather:0:sent fc,_GELU:82:some out:62:some reduce-scatter:0:sent add:52:part" : \
        "norm:68:all f:0:mark q|k|v:68:some attention:92:some proj:62:some all-reduce:0:sent add,_norm:82:all f:0:mark fc,_GELU:82:some out:62:some all-reduce:0:sent add:52:all", words, " ")
    text(4, top + 30, "row", sequence ? "with" : "without")
    x = 72
    for (i = 1; i <= n; i++) {
        split(words[i], w, ":"); gsub(/_/, " ", w[1])
        if (w[3] == "sent" || w[3] == "mark") {
            rect(x + 4, top - 4, 10, 60, w[3] == "sent" ? "collective" : "waits"); text(x - (w[3] == "sent" ? 18 : -6), top + 70, "note", w[1])
            x += 18
            continue
        }
        if (w[3] == "part") { rect(x, top, w[2], 52, "away"); rect(x, top, w[2], 26, "activation") }
        else rect(x, top, w[2], 52, w[3] == "some" ? "weight" : "activation")
        text(x + 6, top + (w[3] == "part" ? 17 : 30), "in", w[1])
        x += w[2] + 2
    }
}
BEGIN {
    printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1040 644\">\n<style>"
    printf "text{font-family:sans-serif;font-size:12px;fill:#333}.in{fill:#111;font-size:11px}.title{font-size:14px}.note{font-size:11px}"
    printf "rect{stroke:#fff;stroke-width:.5}.weight{fill:#8cb8e8}.gradient,.partial{fill:#f0b070}.activation{fill:#a8d08d}"
    printf ".collective{fill:#d8a0c8}.waits{fill:#d8a0c8;opacity:.45}.away{fill:#d8d8d8}"
    print "@media(prefers-color-scheme:dark){text{fill:#ccc}.in{fill:#111}rect{stroke:#222}}</style>"
    pair()
    packed(338)
    text(4, 436, "title", "One block in forward on rank 0, without and with sequence parallelism")
    text(4, 454, "note", "green: all rows, or a half of them; blue: all rows of this rank&#8217;s heads and features; pink: sent; faint: sends in backward alone")
    block(474, 0); block(564, 1)
    print "</svg>"
}'
