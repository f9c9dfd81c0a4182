#!/bin/sh
# full_shard_svg.sh: prints a drawing (SVG) of one step under FULL_SHARD with four units on one rank: what it computes,
# which unit is whole in which slot, and which collectives are in flight. The order is the library's: in forward, unit
# k + 1 is gathered while unit k computes; when backward comes to unit k, unit k + 1 is reduced and unit k - 1 gathered;
# there are two slots for parameters and two buffers for gradients. Lengths are made up: a forward of 1, a backward of 2.
# With "order N" it prints the collectives of a step with N units instead, one a line (tests/long/test_trace.sh compares them
# with a trace). `make lint` compares docs/full-shard.svg with what this prints.
awk -v order="$([ "$1" = order ] && echo "$2")" '
function text(x, y, class, s) { printf "<text x=\"%.1f\" y=\"%d\" class=\"%s\">%s</text>\n", x, y, class, s }
function at(t) { return left + scale * t }
function box(row, from, to, class, s,    y) {
    y = top + row * height
    printf "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" class=\"%s\"/>\n", at(from), y, scale * (to - from), height - 4, class
    if (s != "") text(at(from) + 4, y + 16, "in", s)
}
# A collective that begins now: it ends, and is drawn, by its kind and unit.
function gather(u, t) {
    if (order) { print "all-gather " u; return }
    came[u] = t + 0.8
    if (held[u % 2] != "") box(2 + u % 2, since[u % 2], t, "held", "unit " held[u % 2])
    box(2 + u % 2, t, came[u], "collective", ""); held[u % 2] = u; since[u % 2] = came[u]
    box(6, t, came[u], "collective", "unit " u)
}
function reduce(u, t) {
    if (order) { print "reduce-scatter " u; return }
    left_at[u] = t + 0.9
    box(4 + u % 2, made[u], t, "backward", "gradient " u); box(4 + u % 2, t, left_at[u], "collective", "")
    box(7, t, left_at[u], "collective", "unit " u)
}
function wait(t, until) { if (!order && until > t) { box(1, t, until, "comm", ""); return until } return t }
BEGIN {
    left = 130; scale = 59; top = 62; height = 24; n = order ? order : 4
    if (!order) {
        printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1000 330\">\n<style>"
        printf "text{font-family:sans-serif;font-size:12px;fill:#333}.in{fill:#111;font-size:11px}.title{font-size:14px}.note{font-size:11px}"
        printf "rect{stroke:#fff;stroke-width:.5}.forward{fill:#8cb8e8}.backward{fill:#f0b070}.optimizer{fill:#a8d08d}"
        printf ".comm{fill:#e05050}.collective{fill:#d8a0c8}.held{fill:#d8d8d8}.shard{fill:#d0c8f0}"
        print "@media(prefers-color-scheme:dark){text{fill:#ccc}.in{fill:#111}rect{stroke:#222}}</style>"
        text(4, 18, "title", "One step of FULL_SHARD on one rank: four units, two slots, two buffers")
        text(4, 36, "note", "blue: forward, orange: backward and its gradients, pink: in flight, grey: whole, red: the rank waits")
        text(at(0), 54, "note", "time &#8594;")
        split("computes|waits|slot 0, values|slot 1, values|buffer 0, gradients|buffer 1, gradients|all-gathers|reduce-scatters|all the time", rows, "|")
        for (r = 1; r <= 9; r++) text(4, top + (r - 1) * height + 15, "row", rows[r])
    }
    gather(0, 0); t = wait(0, came[0])
    for (u = 0; u < n; u++) { # forward
        if (u + 1 < n) gather(u + 1, t)
        if (!order) box(0, t, t + 1, "forward", "unit " u)
        t++
        if (u + 1 < n) t = wait(t, came[u + 1])
    }
    for (u = n - 1; u >= 0; u--) { # backward
        if (u + 1 < n) { reduce(u + 1, t); if (u > 0) gather(u - 1, t) }
        made[u] = t
        if (!order) box(0, t, t + 2, "backward", "unit " u)
        t += 2
        if (u > 0) t = wait(t, came[u - 1])
    }
    reduce(0, t)
    if (order) exit
    for (s = 0; s < 2; s++) box(2 + s, since[s], t, "held", "unit " held[s])
    t = wait(t, left_at[0])
    box(0, t, t + 0.5, "optimizer", ""); text(at(t), top - 6, "note", "update")
    box(8, 0, t + 0.5, "shard", "this rank&#8217;s shards of all units: parameters, gradients, optimizer state")
    text(4, top + 9 * height + 20, "note", "Units 2 and 3 are still whole when backward begins: they are not gathered again. No more than two units are whole at any time.")
    text(4, top + 9 * height + 36, "note", "The update changes shards alone; what the slots hold is then out of date, and the next step gathers every unit anew.")
    print "</svg>"
}'
