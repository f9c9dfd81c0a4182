#!/bin/sh
# make lib: what the library exports and what make install puts where; programs of an older dtrain.h with a newer library
# and the other way round. The newer dtrain.h is today's with a field more at the end of descs and infos.
. tests/support/shell.sh
cc=${CC:-cc}
unset MAKEFLAGS MFLAGS MAKELEVEL # this make is nobody's part
case $(uname -s) in Linux) ;; *) skip "make lib" "not Linux"; finish ;; esac

# ---- What make lib makes ----
try "make lib" make -s lib BUILD="$build" CC="$cc"
so=$build/libdtrain.so.$(sed -n 's/^#define DTRAIN_VERSION_MAJOR //p' dtrain.h)
if have nm && have readelf; then
    nm -D --defined-only "$so" | awk '{ print $3 }' | sort >"$tmp/has"
    sed '/^#define DTRAIN__IMPLEMENTED/,$d' dtrain.h | awk '/^DTRAIN_API/ { open = 1 }
        open { line = line " " $0 } open && /;/ { match(line, /dtrain_[a-z0-9_]+\(/); print substr(line, RSTART, RLENGTH - 1); line = ""; open = 0 }' |
        sort >"$tmp/declared"
    diff "$tmp/declared" "$tmp/has" >"$tmp/log"; result "the library exports the public functions and nothing else" $? "$tmp/log"
    nm -g --defined-only "$build/libdtrain.a" | awk 'NF == 3 && $3 !~ /^dtrain_[a-z]/' >"$tmp/log" && [ ! -s "$tmp/log" ]
    result "libdtrain.a has only names with dtrain_" $? "$tmp/log"
    readelf -d "$so" | grep -q "SONAME.*\[${so##*/}\]"; result "its soname is ${so##*/}" $?
else skip "names that the library exports" "nm and readelf are not installed" 3; fi

# ---- Two versions ----
new=$tmp/new
mkdir "$new"
cp dtrain.h "$new/"
for name in launch_desc launch_info join_desc mesh_desc mesh_info world_info strategy_desc strategy_info optimizer_info state_desc checkpoint_desc \
    checkpoint_info load_info; do
    # a bool that fits in the padding, and fields that make the struct larger
    case $name in mesh_info) type=bool ;; *) type=uint64_t ;; esac
    sed "s/^} dtrain_$name;/    $type newest;\n&/; s/GROWS($name, [a-z_]*,/GROWS($name, newest,/" "$new/dtrain.h" >"$tmp/sed" && mv "$tmp/sed" "$new/dtrain.h"
done
# Its library refuses rubbish in the new fields, and uses that of a strategy.
sed 's/^    info->sync_count = strategy->notes.sync_count;/&\n    info->newest = 7 + strategy->desc.newest;/
    s/^    return dtrain__check_fields(desc, how);/    if (desc->newest > 5) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "newest is rubbish");\n&/
    s/^    strategy->kind = dtrain__row_of(strategy->desc.kind);/&\n    strategy->desc.other_bytes += strategy->desc.newest;/' "$new/dtrain.h" >"$tmp/sed" && mv "$tmp/sed" "$new/dtrain.h"
[ "$(grep -c '^    [a-z0-9_]* newest;$' "$new/dtrain.h") $(grep -o 'GROWS([a-z_]*, newest,' "$new/dtrain.h" | wc -l) $(grep -c 'desc[.>-]*newest' "$new/dtrain.h")" = "13 13 3" ]
result "a newer dtrain.h" $?
# library FOLDER FLAG...: makes FOLDER/libdtrain.so of the dtrain.h that is there, quickly
library() {
    folder=$1; shift
    printf '#define DTRAIN_IMPLEMENTATION\n#include "%s/dtrain.h"\n' "$folder" | $cc -std=c99 -O0 -DDTRAIN_NO_SIMD -DDTRAIN_OMIT_MODELS -DDTRAIN_OMIT_MONITOR -w \
        -DDTRAIN_SHARED -fPIC -fvisibility=hidden -shared -Wl,-soname,"${so##*/}" -x c - -o "$folder/${so##*/}" -lm -lpthread "$@"
}
try "its library" library "$new"
try "a program of the library" $cc -std=c99 -pedantic -Wall -Wextra -Werror -I. tests/cli/abi_user.c "$so" -o "$tmp/user" -lm -lpthread
try "a program of the newer library" $cc -std=c99 -Wall -Wextra -Werror -DNEWER "-I$new" tests/cli/abi_user.c "$new/${so##*/}" -o "$tmp/newer" -lm -lpthread
try "a program that compiles dtrain.h" sh -c "printf '#define DTRAIN_IMPLEMENTATION\n#include \"dtrain.h\"\n' | cat - tests/cli/abi_user.c >'$tmp/whole.c' &&
    $cc -std=c99 -O0 -w -DDTRAIN_NO_SIMD -DDTRAIN_OMIT_MODELS -DDTRAIN_OMIT_MONITOR -I. '$tmp/whole.c' -o '$tmp/whole' -lm -lpthread"

# trains NAME LIBRARY PROGRAM: from the start and from the checkpoint, with the numbers of the program that compiles dtrain.h
trains() {
    rm -rf "$tmp/run"
    for time in first again; do
        LD_LIBRARY_PATH=$2 "$3" "$tmp/run" none >"$tmp/$time" 2>"$tmp/err" || { cat "$tmp/$time" >>"$tmp/err"; result "$1" 1 "$tmp/err"; return; }
    done
    cat "$tmp/first" "$tmp/again" | grep -v newest >"$tmp/out"
    [ -f "$tmp/expected" ] || cp "$tmp/out" "$tmp/expected"
    [ "$(grep -c 0x "$tmp/out")" -eq 2 ] && cmp -s "$tmp/out" "$tmp/expected"; result "$1" $? "$tmp/out"
}
trains "compiled together" "" "$tmp/whole"
trains "with the library" "$build" "$tmp/user"
trains "an older program, a newer library" "$new" "$tmp/user"
trains "a newer program, an older library" "$build" "$tmp/newer"
grep -q '^newest 0$' "$tmp/first"; result "what an older library does not know is 0" $? "$tmp/first"
trains "a newer program, a newer library" "$new" "$tmp/newer"
grep -q '^newest 7$' "$tmp/first"; result "the newer library fills what is new" $? "$tmp/first"
rm -rf "$tmp/run"
good "a new field is used by a newer library" '^newest 12$' env LD_LIBRARY_PATH="$new" "$tmp/newer" "$tmp/run" how
for field in launch:dtrain_launch_desc how:dtrain_strategy_desc meshed:dtrain_mesh_desc all:dtrain_state_desc saves:dtrain_checkpoint_desc; do
    bad "a new field that an older library does not know, ${field#*:}" "${field#*:}: a field at byte [0-9]* is not 0, and this library" \
        env LD_LIBRARY_PATH="$build" "$tmp/newer" "$tmp/run" "${field%:*}"
done
good "an older program joins with a newer library" '^joined' env LD_LIBRARY_PATH="$new" "$tmp/user" join
good "a newer program joins with an older library" '^joined' env LD_LIBRARY_PATH="$build" "$tmp/newer" join
bad "a new field of a join" "dtrain_join_desc: a field at byte" env LD_LIBRARY_PATH="$build" "$tmp/newer" join guest
bad "a guest that does not say how it was compiled" 'dtrain_world_join: .*abi of the desc is NULL' env LD_LIBRARY_PATH="$build" "$tmp/user" join null
bad "a program that does not say how it was compiled" 'dtrain_launch: abi of the desc is NULL' env LD_LIBRARY_PATH="$build" "$tmp/user" abi null
bad "a struct that never grows has grown" 'dtrain_param has [0-9]* bytes in the program and' env LD_LIBRARY_PATH="$build" "$tmp/user" abi broken

# ---- Installed ----
prefix=$tmp/prefix
try "make install" make -s install BUILD="$build" CC="$cc" PREFIX="$prefix"
if have pkg-config; then
    export PKG_CONFIG_PATH="$prefix/share/pkgconfig"
    for form in "" --static; do # without a shared object the linker takes libdtrain.a
        [ -z "$form" ] || rm "$prefix"/lib/libdtrain.so*
        try "pkg-config $form libdtrain" sh -c "$cc -std=c99 tests/cli/abi_user.c -o '$tmp/installed' \$(pkg-config --cflags --libs $form libdtrain)"
        trains "the installed library $form" "$prefix/lib" "$tmp/installed"
    done
else skip "pkg-config" "not installed" 4; fi
try "make uninstall" make -s uninstall BUILD="$build" PREFIX="$prefix"
[ -z "$(find "$prefix" -type f -o -type l)" ]; result "make uninstall leaves nothing" $?
finish
