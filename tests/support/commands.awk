# commands.awk: prints the commands that a document or the opening comment of a source shows, a line each:
# "FILE:LINE<tab>COMMAND". Set kind=text for Markdown, kind=help for the Makefile's help, otherwise it is a source, of
# which only the opening comment is read. What looks like a command and is not understood is printed as "? LINE".
#
#   Markdown   the lines of an indented or fenced block that begins with a program, and `programs with arguments` in prose
#   comments   lines that begin with a program, behind a label ("build:", "run:") or not
#
# Behind two blanks stands a remark, or another command. "A, or B" is two commands; [--flag 1] is taken along, [other
# words] are not; a line that begins with a flag continues the one before it, and so does one behind a backslash.
function is_program(text,    word) {
    sub(/^ +/, "", text)
    while (text ~ /^[A-Z_]+=[^ ]+ /) sub(/^[^ ]+ +/, "", text) # variables of the environment
    word = text
    sub(/ .*/, "", word)
    return word ~ /^(make|cc|c\+\+|gcc|g\+\+|clang|clang\+\+|mpicc|nvcc|sh|bash|torchrun|mpirun|srun|docker|kubectl|sbatch|squeue|scancel|scontrol|python3|cmake|git|pip|xdg-open)$/ ||
        word ~ /^(\.\/|build\/)/ || text ~ /^(bench_[a-z]+|simulate|train_gpt) --/
}
function first_word(text) { sub(/^ +/, "", text); sub(/ .*/, "", text); return text }
# One command, with its brackets resolved.
function emit(text,    inner) {
    while (match(text, /\[[^]]*\]/)) {
        inner = substr(text, RSTART + 1, RLENGTH - 2)
        text = substr(text, 1, RSTART - 1) (inner ~ /^-/ ? inner : "") substr(text, RSTART + RLENGTH)
    }
    gsub(/^ +| +$/, "", text)
    if (text != "") print FILENAME ":" line "\t" text
}
# A line that begins with a program.
function command(text,    parts, count, i, rest, part) {
    sub(/^ +/, "", text)
    if (match(text, /^(cc|c\+\+) +/)) text = substr(text, 1, RLENGTH) "\001" substr(text, RLENGTH + 1)
    sub(/ +\001/, " ", text)
    if (text ~ / # /) sub(/ +# .*/, "", text)
    count = split(text, parts, /   *|, or |, and so on/)
    for (i = 1; i <= count; i++) {
        if (is_program(parts[i])) { emit(parts[i]); continue }
        rest = parts[i] # a remark: "two ranks; ./ddp 5 starts five"
        while (match(rest, /\.\/[a-z_]+( [0-9]+)?/)) {
            part = substr(rest, RSTART, RLENGTH)
            rest = substr(rest, RSTART + RLENGTH)
            emit(part)
        }
    }
}
# Lines are held back until the next one is known not to continue them.
function flush() { if (held != "") { line = held_line; command(held) } held = "" }
function hold(text) { flush(); held = text; held_line = FNR }
function continues(text,    bare) {
    bare = text
    sub(/^ +/, "", bare)
    if (held ~ /\\$/) sub(/ *\\$/, "", held)
    else if (bare !~ /^--?[A-Za-z]/) return 0
    sub(/^ +/, " ", text)
    held = held " " bare
    return 1
}
# `spans` of a line of prose.
function spans(text,    span, word) {
    while (match(text, /`[^`]+`/)) {
        span = substr(text, RSTART + 1, RLENGTH - 2)
        text = substr(text, RSTART + RLENGTH)
        word = first_word(span)
        if (!is_program(span) || span == word) continue # the name of a program is not a command
        if (word ~ /^(cc|c\+\+|gcc|mpicc|nvcc)$/ && span !~ /\.c/) continue # nor are flags without a file
        line = FNR
        emit(span)
    }
}
FNR == 1 { flush(); block = fence = ended = 0; blank = 1 }
kind == "help" {
    if (match($0, /@echo "make[^"]*/)) {
        text = substr($0, RSTART + 7, RLENGTH - 7)
        line = FNR
        sub(/   *.*/, "", text)
        emit(text)
    }
    next
}
kind == "text" && /^ *```/ {
    flush()
    fence = fence ? 0 : 1
    if (fence && $0 !~ /^ *```(c|diff|sh)?$/) { print FILENAME ":" FNR "\t? " $0 }
    shell = $0 ~ /```sh$/
    next
}
kind == "text" && fence {
    if (shell && held != "" && continues($0)) next
    if (shell && NF) hold($0)
    next
}
kind == "text" && /^    [^ ]/ && (blank || block) {
    if (!block) block = is_program($0) ? 2 : 1
    if (block == 1 && blank) print FILENAME ":" FNR "\t?first " $1
    blank = 0
    if (block != 2) next
    if (held != "" && continues($0)) next
    if (is_program($0)) hold($0)
    else { flush(); print FILENAME ":" FNR "\t? " substr($0, 5) }
    next
}
kind == "text" {
    flush()
    if (NF) { if ($0 !~ /^    /) { block = 0; spans($0) } blank = 0 }
    else { blank = 1; block = 0 }
    next
}
ended { next }
# The opening comment of a source: /* to */, lines of #, or """ to """.
FNR == 1 && /^"""/ { quoted = 1 }
{
    text = $0
    if (FILENAME ~ /\.sh$/) {
        if (text !~ /^#/) { ended = 1; flush(); next }
        sub(/^#!?/, "", text)
    } else if (!quoted) {
        sub(/^ *\/\*/, "", text)
        sub(/^ \*( |$)/, "", text)
    }
    last = quoted ? (FNR > 1 && text ~ /"""/) : (text ~ /\*\/ *$/)
    sub(/ *\*\/ *$/, "", text)
    bare = text
    sub(/^ +/, "", bare)
    sub(/^(build|run|GPUs?|or): +/, "", bare)
    if (held != "" && continues(bare)) { }
    else if (is_program(bare) && bare ~ / |^\.\/|^build\//) hold(bare)
    else flush()
    if (last) { ended = 1; quoted = 0; flush() }
}
END { flush() }
