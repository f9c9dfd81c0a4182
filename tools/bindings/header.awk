# header.awk: reads the public half of dtrain.h into tables, for fortran.awk and python.awk, which print them.
#
# A declaration d is a place in five tables: Name[d], Base[d] (its type without const and *), Const[d] (of what it
# points at), Stars[d], Dims[d] ("4" or "8 4"; "" for no array); a pointer to a function has its signature in Function[d].
# A signature g has its result in Result[g] and its parameters in Parameter[g, 1..Parameters[g]]: declarations too.
# Struct[i], Constant[i], Callback[i] and Function_name[i] list what there is, in the order of the header. What a module
# cannot express is left out with a reason (refuse).

BEGIN { prepare() }

# ---- Lines: comments go, directives are followed, tokens stay ----

# What a program defines is unknown to a module: nothing is defined, and the parts that need a macro are not there.
function directive(line,    word, rest, i) {
    if (line ~ /^# *if/) { ++depth; alive[depth] = line ~ /^# *ifndef/ || line ~ /^# *if +!/; return }
    if (line ~ /^# *el/) { alive[depth] = line ~ /^# *else/ && !alive[depth]; return }
    if (line ~ /^# *endif/) { --depth; return }
    if (line !~ /^# *define/ || !active()) return
    sub(/^# *define +/, "", line)
    if (match(line, /^[A-Z0-9_]+\(/)) { macro[substr(line, 1, RLENGTH - 1)] = substr(line, RLENGTH + 1); return }
    word = line; sub(/ .*/, "", word)
    rest = substr(line, length(word) + 1); gsub(/^ +| +$/, "", rest)
    if (word ~ /^DTRAIN_/ && word !~ /^DTRAIN__/ && rest ~ /^[-("0-9A-Z]/) constant(word, rest)
}
function active(    i) { for (i = 1; i <= depth; i++) if (!alive[i]) return 0; return 1 }

/Readers of the API can stop here/ { exit }
{
    line = $0
    while (1) {
        if (inside) {
            if (!(i = index(line, "*/"))) next
            line = kept " " substr(line, i + 2); inside = 0
        }
        if (!(i = index(line, "/*"))) break
        kept = substr(line, 1, i - 1); line = substr(line, i + 2); inside = 1
    }
    if (sub(/\\$/, "", line)) { joined = joined line; next }
    line = joined line; joined = ""
    if (line ~ /^ *#/) { sub(/^ */, "", line); directive(line); next }
    if (active()) tokens_of(line)
}
function tokens_of(line) {
    while (match(line, /[A-Za-z_][A-Za-z0-9_]*|"[^"]*"|[0-9][0-9A-Za-z.]*|[^ \t]/)) {
        Token[++token_count] = substr(line, RSTART, RLENGTH)
        line = substr(line, RSTART + RLENGTH)
    }
}

# ---- Constants ----

function constant(name, text) {
    gsub(/[() ]/, "", text)
    if (text !~ /^"/) text = number(text)
    if (text == "") { refuse(name, "its value is no number"); return }
    Constant[++constants] = name
    Value[name] = text
}
# A number in C, or the name of one, as digits; "" for anything else.
function number(text,    parts, n, i, sum) {
    if (text in Value) return Value[text]
    if ((n = split(text, parts, "+")) > 1) {
        for (i = 1; i <= n; i++) { if ((text = number(parts[i])) == "") return ""; sum += text }
        return sum
    }
    if (text == "UINT32_MAX") return "4294967295"
    if (text == "UINT64_MAX") return "18446744073709551615"
    if (text ~ /^0x[0-9a-f]+[uUlL]*$/) return hexadecimal(text)
    if (text ~ /^-?[0-9]+[uUlL]*$/) { sub(/[uUlL]+$/, "", text); return text }
    if (text ~ /^-?[0-9]+\.[0-9]*f?$/) { sub(/f$/, "", text); return text }
    return ""
}
function hexadecimal(text,    i, sum) {
    sum = 0
    for (i = 3; i <= length(text) && text !~ /^[uUlL]/; i++) sum = sum * 16 + index("0123456789abcdef", substr(text, i, 1)) - 1
    return sprintf("%.0f", sum)
}
function refuse(name, why) { if (!(name in Refused)) { Refused[name] = why; Refusal[++refusals] = name } }

# ---- Declarations ----

function expect(what) {
    if (Token[p] == what) { p++; return }
    printf "bindings: %s expected, found %s %s %s\n", what, Token[p], Token[p + 1], Token[p + 2] >"/dev/stderr"
    exit 1
}
function skip_group(    level) { # the brackets that begin at the current token
    do { level += Token[p] ~ /^[({[]$/; level -= Token[p] ~ /^[])}]$/; p++ } while (level > 0 && p <= token_count)
}
# The type in front of declarators, in base and constness.
function specifiers(    word) {
    base = ""; constness = 0
    while (1) {
        word = Token[p]
        if (word == "const") constness = 1
        else if (word ~ /^(struct|enum|extern|DTRAIN_API)$/) ;
        else if (word ~ /^(unsigned|long)$/) base = base (base == "" ? "" : " ") word
        else if (base == "" || (base ~ /^(unsigned|long)/ && word ~ /^(int|char)$/)) base = base (base == "" ? "" : " ") word
        else return
        p++
    }
}
# One declarator of the type base; a parameter may have no name.
function declarator(    d, dims, size, outer, outer_constness) {
    d = ++declarations
    Base[d] = base in Alias ? Alias[base] : base; Const[d] = constness; Stars[d] = 0; Name[d] = ""
    while (Token[p] == "*" || Token[p] == "const" || Token[p] ~ /restrict|RESTRICT/) {
        Stars[d] += Token[p] == "*"
        if (Token[p] == "const" && Stars[d] == 1 && Token[p + 1] == "*") Inner[d] = 1 # T *const *: an array of pointers
        p++
    }
    if (Token[p] == "(" && Token[p + 1] == "*") {
        p += 2
        if (Token[p] ~ /^[a-z]/) Name[d] = Token[p++]
        expect(")")
        outer = base; outer_constness = constness # further declarators have the same type
        Function[d] = signature(d)
        base = outer; constness = outer_constness
        return d
    }
    if (Token[p] ~ /^[A-Za-z_]/) Name[d] = Token[p++]
    dims = ""
    while (Token[p] == "[") {
        size = number(Token[p + 1])
        if (Token[p + 2] in macro) size = items_of(Token[p + 2], ignored)
        skip_group()
        if (size == "") size = "?"
        dims = dims (dims == "" ? "" : " ") size
    }
    Dims[d] = dims
    return d
}
# The parameters in brackets of a function whose result and name are declaration d.
function signature(d,    g, e, i) {
    g = ++signatures
    Result[g] = d; Parameters[g] = 0
    expect("(")
    if (Token[p] == "void" && Token[p + 1] == ")") p++
    while (Token[p] != ")") {
        if (Token[p] == ".") { Variadic[g] = 1; p++; continue }
        specifiers()
        e = declarator()
        if (Dims[e] != "") { Stars[e]++; Dims[e] = "" }
        Parameter[g, ++Parameters[g]] = e
        if (Name[e] == "") Name[e] = "a" Parameters[g]
        if (Token[p] == ",") p++
    }
    p++
    return g
}
function fields(name,    d) {
    expect("{")
    Fields[name] = 0
    Struct[++structs] = name; Is_struct[name] = 1
    while (Token[p] != "}") {
        if (Token[p] == "struct" && Token[p + 1] == "{") {
            refuse(name, "it has a struct without a name")
            p++; skip_group()
            while (Token[p++] != ";") ;
            continue
        }
        specifiers()
        do {
            d = declarator()
            Field[name, ++Fields[name]] = d
            if (Stars[d] == 0 && !(d in Function) && (Base[d] in Refused)) refuse(name, "it has " Base[d])
            if (Dims[d] ~ /\?/) refuse(name, "the length of " Name[d] " is no number")
        } while (Token[p++] == ",")
    }
    p++
}
function enumerators(name,    value, key, text, parts, n, i, item) {
    Is_enum[name] = 1
    expect("{")
    value = -1
    while (Token[p] != "}") {
        key = Token[p++]
        if (key in macro) {
            skip_group()
            n = items_of(key, parts)
            for (i = 1; i <= n; i++) { split(parts[i], item, / *, */); constant(item[2], value = item[3]) }
            continue
        }
        text = ""
        if (Token[p] == "=") for (p++; Token[p] != "," && Token[p] != "}"; p++) text = text Token[p]
        if (text != "") value = number(text)
        else if (value != "") value++
        constant(key, value)
        if (Token[p] == ",") p++
    }
    p++
}
function statement(    name, d, kind) {
    kind = Token[p]
    if (kind == "static") { # a table or a function with its text
        while (Token[p] != ";" && Token[p] != "{") p++
        if (Token[p] == "{") skip_group()
        if (Token[p] == ";") p++
        return
    }
    if (kind == "typedef") p++
    if (Token[p] ~ /^(struct|enum)$/ &&
        (Token[p + 1] == "{" || Token[p + 2] == "{" || (kind != "typedef" && Token[p + 2] == ";"))) {
        name = Token[p + 1] == "{" ? "" : Token[p + 1]
        d = Token[p] == "enum"
        p += name == "" ? 1 : 2
        if (Token[p] == "{") { if (d) enumerators(name); else fields(name) }
        for (; Token[p] != ";"; p++) {
            if (Token[p] == name || Token[p] == ",") continue
            Alias[Token[p]] = name
            if (d) Is_enum[Token[p]] = 1
        }
        p++
        return
    }
    if (kind == "typedef") {
        specifiers()
        do {
            d = declarator()
            if (d in Function) { Callback[++callbacks] = Name[d]; Signature[Name[d]] = Function[d] }
            else if (Name[d] != Base[d]) Alias[Name[d]] = Base[d]
        } while (Token[p++] == ",")
        return
    }
    if (kind ~ /^(extern|DTRAIN_API)$/) {
        specifiers()
        d = declarator()
        name = Name[d]
        if (Token[p] == "(") {
            Signature[name] = signature(d)
            if (Variadic[Signature[name]]) refuse(name, "its arguments vary")
            else Function_name[++functions] = name
        } else refuse(name, "it is a variable")
        expect(";")
        return
    }
    expect("a declaration")
}
# The entries of a list macro, M(X, Y) X(a, b) Y(c): "X,a, b" and so on; returns their number.
function items_of(key, items,    text, item, n) {
    text = macro[key]; sub(/^[^)]*\)/, "", text)
    while (match(text, /[A-Z]+\([^()]*\)/)) {
        item = substr(text, RSTART, RLENGTH - 1); text = substr(text, RSTART + RLENGTH)
        sub(/\(/, ",", item)
        items[++n] = item
    }
    return n + 0
}

# ---- What a declaration means ----

# The table of sizes (src/core/abi.h): Abi[i] is a struct, Abi_last[i] its last field, up to which one that grows is measured.
function find_sizes(    items, item, n, i) {
    if (!("DTRAIN_ABI_LIST" in macro)) return
    n = items_of("DTRAIN_ABI_LIST", items)
    for (i = 1; i <= n; i++) {
        split(items[i], item, / *, */)
        Abi[++abi_count] = "dtrain_" item[2]
        if (item[1] == "GROWS") Abi_last[i] = item[3]
    }
}

# A handle is made by the library and read by it only: an incomplete struct, or one of which functions hand out addresses.
function find_handles(    i, g, k, d) {
    for (i = 1; i <= functions; i++) {
        g = Signature[Function_name[i]]
        if (Stars[Result[g]]) Handle[Base[Result[g]]] = 1
        for (k = 1; k <= Parameters[g]; k++) {
            d = Parameter[g, k]
            if (Stars[d] == 2 && !Inner[d]) Handle[Base[d]] = 1
        }
    }
}
# "value", "callback", "handle", "text", "struct", "out" (T **), "texts" (an array of texts) or "data" (any other address).
function meaning(d) {
    if (d in Function || (Base[d] in Signature && !Stars[d])) return "callback"
    if (!Stars[d]) return "value"
    if (Base[d] == "char" && Const[d]) return Stars[d] == 1 ? "text" : "texts"
    if (Stars[d] == 2) return Inner[d] ? "data" : "out"
    if (Base[d] in Is_struct && !(Base[d] in Handle) && !(Base[d] in Refused)) return "struct"
    if (Base[d] in Is_struct || Base[d] !~ /^(void|char|float|double|bool|size_t|int|u?int[0-9]+_t)$/) return "handle"
    return "data"
}
# Parameter k of g has as many elements as the parameter after it says.
function is_array(g, k,    next_one) {
    if (k == Parameters[g]) return 0
    next_one = Parameter[g, k + 1]
    return !Stars[next_one] && Name[next_one] ~ /count$/ && Base[next_one] ~ /^(size_t|uint32_t)$/
}
function version() { return substr(Value["DTRAIN_VERSION_STRING"], 2, length(Value["DTRAIN_VERSION_STRING"]) - 2) }
# What is left out, a line each, behind a comment sign.
function left_out(sign,    i) {
    print sign " Left out:"
    for (i = 1; i <= refusals; i++) print sign "     " Refusal[i] ": " Refused[Refusal[i]]
}

END {
    p = 1
    while (p <= token_count) statement()
    if (!structs || !functions) { print "bindings: this is not dtrain.h" >"/dev/stderr"; exit 1 }
    find_handles()
    find_sizes()
    emit()
}
