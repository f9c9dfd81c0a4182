#!/bin/sh
# zero_svg.sh: prints a drawing (SVG) of what one of eight ranks holds of GPT-2 124M under each strategy: the rows of a table
# of docs/ddp-or-fsdp.md, as stacked bars. `make lint` compares docs/zero.svg with what this prints; tests/full/test_config.sh
# compares the table with what train_gpt --dry-run says.
cd "$(dirname "$0")/.." || exit 1
awk -F ' *\\| *' '
function text(x, y, class, s) { printf "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\">%s</text>\n", x, y, class, s }
/^\| GPT-2 124M on 8 ranks/ { for (c = 3; c <= 6; c++) name[c] = $c; on = 1; next }
on && !/^\|/ { exit }
on && !/---/ { strategy[++n] = $2; for (c = 3; c <= 6; c++) sum[n] += mib[n, c] = $c }
END {
    split("x x parameters gradients optimizer buffers", class, " ")
    left = 180; scale = 0.38; bar = 30; height = 44 + n * 40 + 66
    printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1000 %d\">\n<style>", height
    printf "text{font-family:sans-serif;font-size:12px;fill:#333}.title{font-size:14px}.in{fill:#111;font-size:11px}.grid{stroke:#888;stroke-opacity:.25}"
    print ".parameters{fill:#8cb8e8}.gradients{fill:#f0b070}.optimizer{fill:#a8d08d}.buffers{fill:#d8a0c8}@media(prefers-color-scheme:dark){text{fill:#ccc}.in{fill:#111}}</style>"
    text(4, 18, "title", "MiB that each of eight ranks holds of GPT-2 124M and AdamW, without activations")
    for (s = 1; s <= n; s++) {
        y = 34 + (s - 1) * 40; x = left
        text(4, y + 20, "row", strategy[s])
        for (c = 3; c <= 6; c++) {
            width = scale * mib[s, c]
            if (!width) continue
            printf "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" class=\"%s\"/>\n", x, y, width, bar, class[c]
            if (width > 36) text(x + 4, y + 19, "in", sprintf("%.1f", mib[s, c]))
            x += width
        }
        text(x + 6, y + 20, "row", sprintf("%.1f", sum[s]))
    }
    y = 34 + n * 40
    for (m = 0; m <= 2000; m += 500) {
        printf "<line x1=\"%.1f\" y1=\"30\" x2=\"%.1f\" y2=\"%d\" class=\"grid\"/>\n", left + scale * m, left + scale * m, y
        text(left + scale * m + 3, y + 8, "row", m " MiB")
    }
    x = left; split("x x parameters gradients AdamW&#8217;s&#160;two&#160;moments buffers:&#160;units&#160;that&#160;are&#160;whole&#160;for&#160;a&#160;time", legend, " ")
    for (c = 3; c <= 6; c++) {
        printf "<rect x=\"%d\" y=\"%d\" width=\"12\" height=\"12\" class=\"%s\"/>\n", x, y + 22, class[c]
        text(x + 18, y + 32, "row", legend[c]); x += c == 5 ? 190 : 130
    }
    text(4, y + 58, "row", "With N ranks, P parameters: DDP 4P + 4P + 8P bytes; ZeRO-1 divides the last term by N, ZeRO-2 the last two, ZeRO-3 all three.")
    print "</svg>"
}' docs/ddp-or-fsdp.md
