# quoted.awk: compares what a text quotes of a command's output (commands.awk found it) with what the command printed:
#
#     awk -v values=FILE -f quoted.awk QUOTES OUTPUT
#
# Prints each quoted line that is not there, and ends with status 1. Lines come in the order of the text; others may stand
# between them. In a quoted line
#
#   words, and numbers without a point   are the same
#   numbers with decimals                agree within one in the last place that the text shows, or within the share that the
#                                        sentence before them states: "within 2 %"
#   (avx512 kernels)                     is any instruction set
#   ...                                  stands for anything, alone in its line for any lines
#   HASH, HASH2                          stand for a value, the same wherever a file has the word (kept in FILE)
#   columns under tok/s and the like     are not compared if the sentence before them says whose they are ("on two cores of ...")
#   numbers with decimals                are not compared if it says that all of them are "of one machine"
#
# A row of a table (kind "row") is right when the command printed each of its numbers.
BEGIN {
    FS = "\t"
    times = " tok/s step_ms comm_ms exposed data_ms eta images/s seconds "
    if (values) while ((getline line < values) > 0) { split(line, pair, "\t"); bound[pair[1] SUBSEP pair[2]] = pair[3] }
}
FILENAME == ARGV[1] { document = $2; sub(/:.*/, "", document); place[++quotes] = $2; share[quotes] = $3; machine[quotes] = $4; kind[quotes] = $5; sub(/\([a-z0-9]+ kernels\)/, "(kernels)", $6); quoted[quotes] = $6; next }
{ sub(/\([a-z0-9]+ kernels\)/, "(kernels)"); printed[++lines] = $0 }

# Split text into its words without decimals (shape) and its numbers with decimals (numbers[1..]); returns how many.
function decimals(text, numbers,    count, found) {
    shape = ""; count = 0
    while (match(text, /[0-9]+\.[0-9]+(e[-+][0-9]+)?/)) {
        found = substr(text, RSTART, RLENGTH)
        shape = shape substr(text, 1, RSTART - 1) "#"
        numbers[++count] = found
        text = substr(text, RSTART + RLENGTH)
    }
    shape = shape text
    return count
}
function last_place(number,    mantissa, exponent) {
    mantissa = number; exponent = 0
    if (match(number, /e/)) { mantissa = substr(number, 1, RSTART - 1); exponent = substr(number, RSTART + 1) + 0 }
    sub(/^[0-9]*\./, "", mantissa)
    return 10 ^ (exponent - length(mantissa))
}
function near(a, b, q,    d, allowed) {
    d = a - b; if (d < 0) d = -d
    allowed = 1.01 * last_place(a)
    if (share[q] != "" && share[q] / 100 * a > allowed) allowed = share[q] / 100 * a
    return d <= allowed
}
function same(word, other, q,    i, n, wanted, got, form, name) {
    if (word == other) return 1
    if (word ~ /^HASH[0-9]?[,.;]?$/) {
        if (substr(word, length(word)) ~ /[,.;]/) { # a sentence goes on behind it
            if (substr(word, length(word)) != substr(other, length(other))) return 0
            word = substr(word, 1, length(word) - 1); other = substr(other, 1, length(other) - 1)
        }
        if (other !~ /^[0-9a-f]+$/ || length(other) < 8) return 0
        name = document SUBSEP word
        if (!(name in bound)) { bound[name] = other; print document "\t" word "\t" other >>values }
        return bound[name] == other
    }
    n = decimals(word, wanted); form = shape
    if (n != decimals(other, got) || form != shape || !n) return 0
    for (i = 1; i <= n; i++) if (machine[q] != 2 && !near(wanted[i], got[i], q)) return 0
    return 1
}
# Whether words[i..m] are those of the line, others[j..n].
function matches(words, i, m, others, j, n, q) {
    while (i <= m) {
        if (words[i] == "...") {
            for (; j <= n + 1; j++) if (matches(words, i + 1, m, others, j, n, q)) return 1
            return 0
        }
        if (j > n) return 0
        if (!(m == columns && (i in of_machine) && machine[q]) && !same(words[i], others[j], q)) return 0
        i++; j++
    }
    return j == n + 1
}
function heading(words, m,    i, found) {
    for (i = 1; i <= m; i++) if (index(times, " " words[i] " ")) found = 1
    if (!found) return
    split("", of_machine); columns = m
    for (i = 1; i <= m; i++) if (index(times, " " words[i] " ")) of_machine[i] = 1
}
function row_is_there(text, q,    count, cells, i, l, n, numbers, k, there) {
    count = split(text, cells, /[^0-9.]+/)
    for (i = 1; i <= count; i++) {
        if (cells[i] !~ /[0-9]/) continue
        there = 0
        for (l = 1; l <= lines && !there; l++) {
            n = split(printed[l], numbers, /[^0-9.]+/)
            for (k = 1; k <= n && !there; k++) there = numbers[k] == cells[i] || (cells[i] ~ /\./ && numbers[k] ~ /\./ && near(cells[i], numbers[k] + 0, q))
        }
        if (!there) return 0
    }
    return 1
}
END {
    at = 1
    for (q = 1; q <= quotes; q++) {
        if (kind[q] == "wrong") { print place[q] ": " quoted[q]; bad = 1; continue }
        if (kind[q] == "row") {
            if (!row_is_there(quoted[q], q)) { print place[q] ": a number of this row was not printed: " quoted[q]; bad = 1 }
            continue
        }
        m = split(quoted[q], words, /[ ]+/)
        if (m == 1 && words[1] == "...") continue
        heading(words, m)
        for (l = at; l <= lines; l++) {
            text = printed[l]; gsub(/^[ \t]+|[ \t\r]+$/, "", text)
            n = split(text, others, /[ \t]+/)
            if (matches(words, 1, m, others, 1, n, q)) break
        }
        if (l > lines) { print place[q] ": this line was not printed: " quoted[q]; bad = 1 } else at = l + 1
    }
    exit bad
}
