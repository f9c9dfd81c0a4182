# Prints how many structs and fields there are in the public half of dtrain.h, and in the headers that follow it.
FNR == 1 { over = 0 }
/^.. Readers of the API can stop here/ { over = 1 }
over { next }
{
    line = $0
    gsub(/\/\*([^*]|\*[^\/])*\*\//, "", line)
    if (comment && !sub(/^.*\*\//, "", line)) next
    comment = sub(/\/\*.*/, "", line)
}
line ~ /^(typedef )?struct (dtrain_[a-z0-9_]* )?\{/ { structs++; inside = 1; text = ""; next }
line ~ /^\}/ && inside {
    inside = 0
    while (sub(/\([^()]*\)/, "", text)); # parameters of functions
    fields += gsub(/[;,]/, "", text)
}
inside { text = text line }
END { print structs, fields }
