# commands.awk: prints the commands that a document or the opening comment of a source shows, a line each:
# "FILE:LINE<tab>COMMAND". Set kind=text for Markdown, kind=help for what make help prints, otherwise it is a source, of
# which only the opening comment is read. What looks like a command and is not understood is printed as "? LINE".
#
#   Markdown   the lines of an indented or fenced block that begins with a program, and `programs with arguments` in prose
#   comments   lines that begin with a program, behind a label ("build:", "run:") or not
#
# Behind two blanks stands a remark, or another command. "A, or B" is two commands; [--flag 1] is taken along, [other
# words] are not; a line that begins with a flag continues the one before it, and so does one behind a backslash.
#
# With quotes=FILE it writes there what the text quotes of a command's output (quoted.awk compares them), a line each, with tabs:
# command, FILE:LINE, the share within which numbers agree ("within 2 %", else nothing), 1 where rates are a machine's ("on two
# cores of ...") and 2 where all decimals are ("of one machine"), "line" or "row", the text. Quoted are
#
#   the first block behind a block of commands, in the same section: by each of these commands, or by "the first", "the last";
#   if the sentence before the block says "begins", or the block ends with "...", the output goes on
#   the lines behind "$ COMMAND" in a block
#   the first table behind a block of commands that has a row for each of them; "35.5x" is how much less than in the first row
#   in a source the lines behind "expect": of the first command that is labelled "run", or "expect of COMMAND"
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
    if (text == "") return
    print FILENAME ":" line "\t" text
    emitted[text]
    if (in_run && run_command == "") run_command = text
    if (!in_prose) shown[++commands] = text
}
# What the text quotes of the output of shown[first..last].
function quote(type, text, first, last,    i) {
    gsub(/^ +| +$/, "", text)
    if (!quotes || text == "") return
    for (i = first; i <= last; i++) print shown[i] "\t" FILENAME ":" (type == "line" ? FNR : row_line) "\t" share "\t" machine "\t" type "\t" text >quotes
}
# What the sentence before a quote says of it.
function read_intro() {
    share = machine = ""
    if (match(intro, /within [0-9.]+ %/)) { share = substr(intro, RSTART + 7, RLENGTH - 9) }
    if (intro ~ / cores? of /) machine = 1
    if (intro ~ / of one machine/) machine = 2
    from = 1; to = commands
    if (intro ~ /the first/) to = 1
    if (intro ~ /the last/) from = commands
}
# A line of an indented block.
function indented(text) {
    if (text ~ /^    \$ /) { flush(); commands = 0; in_block = "quote"; read_intro(); from = 1; sub(/^    \$ /, "", text); line = FNR; emit(text); to = commands; return }
    if (in_block == "command" && !blank) return
    if (in_block == "quote" && !is_program(text)) { quote("line", text, from, to); return }
    if (is_program(text)) { flush(); commands = 0; in_block = "command"; fresh = 1; return }
    if (in_block == "other" && !blank) return
    in_block = fresh ? "quote" : "other"
    fresh = 0
    if (in_block == "other") return
    flush()
    read_intro()
    if (intro ~ /begins/) begins = 1
    quote("line", text, from, to)
}
function end_block() { if (begins) quote("line", "...", from, to); begins = 0; in_block = "" }
# A line of a source's opening comment, with and without its blanks in front.
function expected(text, bare,    found) {
    if (bare ~ /^(expect|and of)[ :,]/) {
        flush(); expecting = 1; intro = ""
        commands = 0
        if (match(bare, /of (\.\/|build\/)[^:;,(]*/)) {
            found = substr(bare, RSTART + 3, RLENGTH - 3)
            sub(/ +$/, "", found)
            if (found in emitted) shown[++commands] = found
            else { line = FNR; emit(found) }
        } else shown[++commands] = run_command
    } else if (expecting == 2) {
        if (bare == "" || text !~ /^    /) expecting = 0
        else quote("line", text, 1, 1)
        return
    }
    if (!expecting) return
    intro = intro " " bare
    read_intro()
    if (match(bare, /:( |$)/)) { expecting = 2; quote("line", substr(bare, RSTART + 1), 1, 1) }
}
# A line of a table: rows are kept until it ends.
function table(text) { rows[++row_count] = text; row_end = FNR }
function end_table(    i, c, count, cells, heads, first, ratio, numbers) {
    if (fresh && row_count - 2 == commands && commands > 1) {
        flush(); fresh = 0
        read_intro()
        split(rows[1], heads, "|")
        for (i = 3; i <= row_count; i++) {
            count = split(rows[i], cells, "|")
            numbers = ""
            row_line = row_end - row_count + i
            for (c = 3; c <= count; c++) {
                gsub(/^ +| +$/, "", cells[c])
                if (heads[c] ~ /, ms|seconds/) continue
                if (i == 3) first[c] = cells[c]
                ratio = cells[c - 1] + 0 ? first[c - 1] / cells[c - 1] : 0
                if (cells[c] ~ /^[0-9.]+x$/ && (sprintf("%.1f", ratio) != sprintf("%.1f", cells[c] + 0))) quote("wrong", cells[c] " should be " ratio, i - 2, i - 2)
                if (cells[c] ~ /^[0-9.]+$/) numbers = numbers " " cells[c]
            }
            quote("row", numbers, i - 2, i - 2)
        }
    }
    row_count = 0
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
        while (match(rest, /\.\/[a-z_0-9]+( [0-9]+)?/)) {
            part = substr(rest, RSTART, RLENGTH)
            rest = substr(rest, RSTART + RLENGTH)
            emit(part)
        }
    }
}
# Lines are held back until the next one is known not to continue them.
function flush() {
    if (held != "") { line = held_line; in_run = is_run; command(held); in_run = is_run = 0 }
    held = ""
}
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
    in_prose = 1
    while (match(text, /`[^`]+`/)) {
        span = substr(text, RSTART + 1, RLENGTH - 2)
        text = substr(text, RSTART + RLENGTH)
        word = first_word(span)
        if (!is_program(span) || span == word) continue # the name of a program is not a command
        if (word ~ /^(cc|c\+\+|gcc|mpicc|nvcc)$/ && span !~ /\.c/) continue # nor are flags without a file
        line = FNR
        emit(span)
    }
    in_prose = 0
}
FNR == 1 { flush(); block = fence = ended = fresh = 0; blank = 1; in_block = run_command = intro = ""; commands = 0; split("", emitted) }
kind == "text" && quotes {
    if (!fence && /^    / && NF && (blank || in_block != "")) indented($0)
    else if (!fence && NF) end_block()
    if (!fence && /^\|/) table($0)
    else if (row_count) end_table()
    if (!fence && /^#/) fresh = 0
    if (!fence && /^[^ |#`]|^`[^`]/) intro = (blank ? "" : intro " ") $0
}
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
    if (fence && shell) { commands = 0; fresh = 1 }
    fence_quotes = fence && $0 ~ /```$/ && fresh
    if (fence_quotes) { fresh = 0; read_intro(); begins = intro ~ /begins/ }
    if (!fence) end_block()
    next
}
kind == "text" && fence {
    if (fence_quotes) quote("line", $0, from, to)
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
    if (quotes) expected(text, bare)
    if (bare ~ /^run: /) { flush(); is_run = 1 }
    sub(/^(build|run|GPUs?|or): +/, "", bare)
    if (held != "" && continues(bare)) { }
    else if (is_program(bare) && bare ~ / |^\.\/|^build\//) hold(bare)
    else flush()
    if (last) { ended = 1; quoted = 0; flush() }
}
END { flush(); if (row_count) end_table() }
