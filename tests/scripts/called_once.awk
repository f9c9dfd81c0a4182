# Counts the private functions of dtrain.h, and those that are named at one place besides their prototypes and their definition.
/^ *\*/ { next } # the middle of a comment
{
    line = $0
    sub(/\/\*.*$/, "", line)
    for (rest = line; match(rest, /dtrain__[a-z0-9_]+/); rest = substr(rest, RSTART + RLENGTH)) named[substr(rest, RSTART, RLENGTH)]++
}
/^(static|DTRAIN__PRIVATE) .*[ *]dtrain__[a-z0-9_]+\(/ {
    match($0, /dtrain__[a-z0-9_]+\(/)
    name = substr($0, RSTART, RLENGTH - 1)
}
name && /;$/ { said[name]++; name = "" }
name && /^\{/ { said[name]++; body[name] = 1; name = "" }
END { for (f in body) { all++; once += named[f] - said[f] == 1 } print once, all }
