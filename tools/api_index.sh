#!/bin/sh
# api_index.sh: prints docs/api.md, header by header in the order of src/dtrain.h: every public struct, enum and callback
# as it is declared, with the notes on its fields, and every public function with its prototype; of the comment above it
# the first sentence. Functions have headings of three #, types of four. `make lint` compares docs/api.md with what this prints.
cd "$(dirname "$0")/.." || exit 1
headers=
for header in $(sed -n 's/^#include "\([a-z/]*\.h\)"$/\1/p' src/dtrain.h) comm/nccl/nccl.h; do
    ! grep -q '^DTRAIN_API\|^extern [^"]\|^typedef ' "src/$header" || headers="$headers $header"
done
cat <<'END'
# The public functions and types

Made from the headers of `src/` by `tools/api_index.sh`. A line says what a call does; arguments, ownership and errors stand above it in its
header, and in `dtrain.h`. Structs, enums and callbacks stand before the functions of their header, as they are declared there. The manual on
top of `dtrain.h` has the whole: words, configuration, limits.

| header | about | functions | types |
| --- | --- | --- | --- |
END
for header in $headers; do
    awk -v header="$header" '
        /^\/\* / && title == "" { title = $0; sub(/^\/\* /, "", title); sub(/[ .]*(\*\/)?$/, "", title) }
        function link(name) { return "[" substr(name, 8) "](#" name ")" }
        /^(typedef )?(struct|enum) dtrain_[a-z0-9][a-z0-9_]* \{/ || /^typedef .*\(\*dtrain_[a-z0-9][a-z0-9_]*\)/ {
            match($0, /dtrain_[a-z0-9_]+( \{|\))/)
            name = substr($0, RSTART, RLENGTH); sub(/ \{|\)/, "", name)
            types = types (types == "" ? "" : ", ") link(name)
        }
        /^(DTRAIN_API|extern [^"])/ { open = 1 }
        open && match($0, /dtrain_[a-z0-9_]+\(/) {
            names = names (names == "" ? "" : ", ") link(substr($0, RSTART, RLENGTH - 1))
            open = 0
        }
        END { printf "| [%s](../src/%s) | %s | %s | %s |\n", header, header, title, names, types }' "src/$header"
done
# What awk prints of a header: with types=1 its structs, enums and callbacks, without it its functions.
program='
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
    function sentence_of(comment,    sentence) {
        sentence = comment
        gsub(/^\/\* ?|\*\/$/, "", sentence); gsub(/ +/, " ", sentence)
        sentence = first_sentence(sentence)
        gsub(/\*/, "\\*", sentence); gsub(/</, "\\&lt;", sentence)
        return sentence
    }
    function entry() {
        gsub(/^ *(DTRAIN_API|extern) | +$/, "", statement); gsub(/ +/, " ", statement)
        printf "\n### %s\n\n```c\n%s\n```\n\n%s\n", name, wrapped(statement), sentence_of(comment)
    }
    function type_entry() {
        printf "\n#### %s\n", type
        if (comment != "") printf "\n%s\n", sentence_of(comment)
        printf "\n```c\n%s%s\n```\n", macro != "" && index(body, macro "(") ? list "\n" : "", body
    }
    # An enum may be a list of macros.
    /^#define DTRAIN_[A-Z_]*LIST\(X\)/ { macro = $2; sub(/\(.*/, "", macro); list = ""; in_list = 1 }
    in_list { list = list (list == "" ? "" : "\n") $0; in_list = /\\$/ }
    !inside && (/^(typedef )?(struct|enum) dtrain_[a-z0-9][a-z0-9_]* \{/ || /^typedef .*\(\*dtrain_[a-z0-9][a-z0-9_]*\)/) {
        match($0, /dtrain_[a-z0-9_]+( \{|\))/)
        type = substr($0, RSTART, RLENGTH); sub(/ \{|\)/, "", type)
        body = ""; within = /\{/ ? "}" : "callback"
    }
    within {
        body = body (body == "" ? "" : "\n") $0
        if (within == "}" ? /^\}/ || /\} [a-z0-9_]*;$/ : /;$/) { within = ""; if (types) type_entry(); comment = "" }
        next
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
            if (match(statement, /dtrain_[a-z0-9_]+\(/)) { name = substr(statement, RSTART, RLENGTH - 1); if (!types) entry() }
        }
        next
    }
    /^(typedef|struct|enum|#define|    |\})/ { comment = "" }
'
for header in $headers; do
    printf '\n## %s\n\nDeclared in [src/%s](../src/%s).\n' "$header" "$header" "$header"
    awk -v types=1 "$program" "src/$header"
    awk -v types=0 "$program" "src/$header"
done
