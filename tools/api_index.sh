#!/bin/sh
# api_index.sh: prints docs/api.md, every public function with its prototype and the first sentence of the comment above
# it, header by header in the order of src/dtrain.h. `make lint` compares docs/api.md with what this prints.
cd "$(dirname "$0")/.." || exit 1
headers=
for header in $(sed -n 's/^#include "\([a-z/]*\.h\)"$/\1/p' src/dtrain.h) comm/nccl/nccl.h; do
    ! grep -q '^DTRAIN_API\|^extern [^"]' "src/$header" || headers="$headers $header"
done
cat <<'END'
# The public functions

Made from the headers of `src/` by `tools/api_index.sh`. A line says what a call does; arguments, ownership and errors stand above it in its
header, and in `dtrain.h`. The manual on top of `dtrain.h` has the whole: words, configuration, limits.

| header | about | functions |
| --- | --- | --- |
END
for header in $headers; do
    awk -v header="$header" '
        /^\/\* / && title == "" { title = $0; sub(/^\/\* /, "", title); sub(/[ .]*(\*\/)?$/, "", title) }
        /^(DTRAIN_API|extern [^"])/ { open = 1 }
        open && match($0, /dtrain_[a-z0-9_]+\(/) {
            names = names (names == "" ? "" : ", ") "[" substr($0, RSTART + 7, RLENGTH - 8) "](#" substr($0, RSTART, RLENGTH - 1) ")"
            open = 0
        }
        END { printf "| [%s](../src/%s) | %s | %s |\n", header, header, title, names }' "src/$header"
done
for header in $headers; do
    printf '\n## %s\n\nDeclared in [src/%s](../src/%s).\n' "$header" "$header" "$header"
    awk '
    # The first sentence: up to a full stop outside of quotes and brackets.
    function first_sentence(text,    i, c, depth, quoted) {
        for (i = 1; i <= length(text); i++) {
            c = substr(text, i, 1)
            if (c == "\"") quoted = !quoted
            else if (c == "(" || c == "[") depth++
            else if (c == ")" || c == "]") depth -= depth > 0
            else if (c == "." && !quoted && !depth && substr(text, i + 1) ~ /^( |$)/) break
        }
        return substr(text, 1, i)
    }
    # A prototype in lines of at most 100 columns, broken behind commas, as clang-format aligns it.
    function wrapped(text,    lines, last, count, parts, i, part, column) {
        count = split(text, parts, ", ")
        column = index(text, "(")
        for (i = 1; i <= count; i++) {
            part = parts[i] (i < count ? "," : "")
            if (i == 1) last = part
            else if (length(last " " part) <= 100) last = last " " part
            else { lines = lines last "\n"; last = sprintf("%" column "s", "") part }
        }
        return lines last
    }
    function entry(    sentence) {
        sentence = comment
        gsub(/^\/\* ?|\*\/$/, "", sentence); gsub(/ +/, " ", sentence)
        sentence = first_sentence(sentence)
        gsub(/\*/, "\\*", sentence); gsub(/</, "\\&lt;", sentence)
        gsub(/^ *(DTRAIN_API|extern) | +$/, "", statement); gsub(/ +/, " ", statement)
        printf "\n### %s\n\n```c\n%s\n```\n\n%s\n", name, wrapped(statement), sentence
    }
    /^\/\*/ { comment = ""; inside = 1 }
    inside { line = $0; sub(/^ \* ?/, "", line); comment = comment (comment == "" ? "" : " ") line; if (/\*\//) inside = 0; next }
    /^$/ { comment = ""; next }
    /^(DTRAIN_API|extern [^"])/ { statement = ""; open = 1 }
    open {
        statement = statement " " $0
        if (/;/) {
            open = 0
            sub(/;.*/, ";", statement)
            if (match(statement, /dtrain_[a-z0-9_]+\(/)) { name = substr(statement, RSTART, RLENGTH - 1); entry() }
        }
        next
    }
    /^(typedef|struct|enum|#define|    |\})/ { comment = "" }
    ' "src/$header"
done
