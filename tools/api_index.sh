#!/bin/sh
# api_index.sh: prints docs/api.md, every public function with the first sentence of the comment above it, in
# the order of the headers. `make lint` compares docs/api.md with what this prints.
cd "$(dirname "$0")/.." || exit 1
echo '# The public functions, a line each'
echo
echo 'Made from the headers of `src/` by `tools/api_index.sh`; the whole contract of a call stands there, and in `dtrain.h`.'
for header in $(sed -n 's/^#include "\([a-z/]*\.h\)"$/\1/p' src/dtrain.h) comm/nccl/nccl.h; do
    grep -q '^DTRAIN_API\|^extern' "src/$header" || continue
    awk -v header="$header" '
    function flush(   sentence) {
        sentence = comment
        gsub(/^\/\* ?|\*\/$/, "", sentence); gsub(/[ ]+/, " ", sentence)
        if (match(sentence, /[.:;] /)) sentence = substr(sentence, 1, RSTART - 1)
        sub(/[.:; ]+$/, "", sentence); gsub(/\|/, "\\|", sentence)
        if (name != "") { if (!any++) printf "\n## %s\n\n| call | |\n| --- | --- |\n", header; printf "| `%s` | %s |\n", name, sentence }
    }
    /^\/\*/ { comment = ""; inside = 1 }
    inside { line = $0; sub(/^ \* ?/, "", line); comment = comment (comment == "" ? "" : " ") line; if (/\*\//) inside = 0; next }
    /^$/ { comment = "" ; next }
    /^(DTRAIN_API|extern)/ { statement = ""; open = 1 }
    open {
        statement = statement " " $0
        if (/;/) {
            open = 0
            if (match(statement, /dtrain_[a-z0-9_]+\(/)) { name = substr(statement, RSTART, RLENGTH - 1); flush() }
        } else if (statement ~ /DTRAIN_API [a-z_ *]*$/) next
        next
    }
    /^(typedef|struct|enum|#define|    |\})/ { if (!/^DTRAIN_API/) comment = "" }
    ' "src/$header"
done
