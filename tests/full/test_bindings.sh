#!/bin/sh
# The modules for Fortran and Python that `make bindings` makes: every struct, constant and function of the header is in
# them or has a reason, every struct has C's layout, every constant C's value, and calls of every form of argument do
# what they do in C.
. tests/support/shell.sh
export LC_ALL=C # one order of lines for sort
cc=${CC:-cc}
python=${PYTHON:-python3}
fortran="gfortran -std=f2018 -Wall -Wextra -Werror"

# make_it TARGET: nothing to do where `make test` has made it before
unset MAKEFLAGS MFLAGS MAKELEVEL
top=$(pwd)
case $build in /*) ;; *) build=$top/$build ;; esac
make_it() { make -s BUILD="$build" CC="$cc" "$1" >"$tmp/log" 2>&1; result "make $1" $? "$tmp/log"; }
make_it bindings
f90=$build/dtrain.f90 py=$build/dtrain.py

# ---- Nothing is missing ----
cat >"$tmp/expected" <<'END'
dtrain_fail: its arguments vary
dtrain_log: its arguments vary
dtrain_part: it has a struct without a name
dtrain_dropout_args: it has dtrain_part
END
sed -n '/^! Left out:/,/^module/s/^!     //p' "$f90" | diff "$tmp/expected" - >"$tmp/out"
result "what is left out, and why" $? "$tmp/out"
sed -n '/^ Left out:/,/^"""/s/^     //p' "$py" | diff "$tmp/expected" - >"$tmp/out"
result "Python: the same" $? "$tmp/out"
sed '/^.. Readers of the API can stop here/q' dtrain.h >"$tmp/public.h"
left=$(sed 's/:.*//' "$tmp/expected" | paste -s -d '|')
{ sed -n -E 's/^(typedef )?struct (dtrain_[a-z0-9_]+) \{.*/\2/p' "$tmp/public.h"
  tr '\n' ' ' <"$tmp/public.h" | sed 's/DTRAIN_API\|extern const/\n&/g' | sed -n 's/^\(DTRAIN_API\|extern const\)[^;(]*[ *]\(dtrain_[a-z0-9_]*\)(.*/\2/p'
} | grep -v -x -E "$left" | sort >"$tmp/names"
sed -n -E 's/^  type, bind\(c\) :: //p; /^  interface/,/^  end interface/s/^ +(function|subroutine) ([a-z0-9_]*)\(.*/\2/p' "$f90" | sort | diff "$tmp/names" - >"$tmp/out"
result "Fortran: every struct and function of the header" $? "$tmp/out"
sed -n -E 's/^class (dtrain_[a-z0-9_]*)\(_Struct.*/\1/p; s/^_bind\("([a-z0-9_]*)".*/\1/p' "$py" | sort | diff "$tmp/names" - >"$tmp/out"
result "Python: every struct and function of the header" $? "$tmp/out"

# ---- Layouts and constants, as three compilers see them ----
# The programs that print them are made from the Fortran module, which has one field a line.
awk '
    /^    (function|subroutine)/ { sub(/\(.*/, "", $2); called[$2] = 1 }
    /^  (integer|real|character).*, parameter :: / { sub(/.*:: /, ""); split($0, part, / = /); constant[++n] = part[1] }
    /^  type, bind/ { struct = $NF; next }
    /^  end type/ { struct = "" }
    struct { name = $0; sub(/.*:: /, "", name); sub(/[( ].*/, "", name); field[++m] = struct " " name }
    END {
        c = out "/layout.c"; f = out "/layout.f90"
        print "#define DTRAIN_API extern\n#include \"dtrain.h\"" >c
        print "#define F(s, f) printf(\"%s.%s %zu %zu\\n\", #s, #f, offsetof(s, f), sizeof(((s *)0)->f))" >c
        print "#define N(n, v) printf(\"%s %d\\n\", n, (int)(v))\nint main(void)\n{" >c
        print "program layout\n  use dtrain\n  implicit none" >f
        for (i = 1; i <= n; i++) {
            name = constant[i]; base = name; sub(/_VALUE$/, "", base)
            if (base != name && !(tolower(base) in called)) base = name
            if (name == "DTRAIN_VERSION_STRING") continue
            print "  print \x27(a, 1x, i0)\x27, \x27" base "\x27, int(" name ")" >f
            print "    N(\"" base "\", " base ");" >c
        }
        for (i = 1; i <= m; i++) {
            split(field[i], part, " ")
            if (part[1] != last) {
                print "  call size_" part[1] "()" >f
                print "    printf(\"%s 0 %zu\\n\", \"" part[1] "\", sizeof(" part[1] "));" >c
            }
            print "    F(" part[1] ", " part[2] ");" >c
            last = part[1]
        }
        print "    return 0;\n}" >c
        print "contains" >f
        for (i = 1; i <= m; i++) {
            split(field[i], part, " ")
            if (part[1] != last || i == 1) {
                if (i > 1) print "  end subroutine" >f
                print "  subroutine size_" part[1] "()\n    type(" part[1] "), target, save :: s" >f
                print "    print \x27(a, 1x, i0, 1x, i0)\x27, \x27" part[1] "\x27, 0, c_sizeof(s)" >f
            }
            print "    print \x27(a, 1x, i0, 1x, i0)\x27, \x27" part[1] "." part[2] "\x27, &\n      transfer(c_loc(s%" part[2] "), 0_c_intptr_t) &" >f
            print "      - transfer(c_loc(s), 0_c_intptr_t), c_sizeof(s%" part[2] ")" >f
            last = part[1]
        }
        print "  end subroutine\nend program" >f
    }' out="$tmp" "$f90"
$cc -std=c99 -I. "$tmp/layout.c" -o "$tmp/layout" 2>"$tmp/err" && "$tmp/layout" >"$tmp/layout.txt" && [ "$(wc -l <"$tmp/layout.txt")" -gt 1000 ]
result "C prints layouts and constants" $? "$tmp/err"
if have gfortran; then
    (cd "$tmp" && $fortran -c "$f90") >"$tmp/err" 2>&1
    result "Fortran: the module compiles without a warning" $? "$tmp/err"
    (cd "$tmp" && gfortran -O0 layout.f90 -o layout_f && ./layout_f >layout_f.txt) >"$tmp/err" 2>&1 && diff "$tmp/layout.txt" "$tmp/layout_f.txt" >"$tmp/err"
    result "Fortran: layouts and constants are C's" $? "$tmp/err"
else skip "Fortran's layouts" "gfortran is not installed" 2; fi

export DTRAIN_LIBRARY="${DTRAIN_LIBRARY:-$build/libdtrain.so}" PYTHONPATH="$build"
[ -e "$DTRAIN_LIBRARY" ] || make_it lib
if have "$python"; then
    cat >"$tmp/layout.py" <<'END'
import ctypes, dtrain
for line in open("layout.txt"):
    name = line.split()[0]
    struct, dot, field = name.partition(".")
    if struct.isupper():
        print(name, ctypes.c_int32(int(getattr(dtrain, struct))).value)
    elif dot:
        place = getattr(getattr(dtrain, struct), field)
        print(name, place.offset, place.size)
    else:
        print(name, 0, ctypes.sizeof(getattr(dtrain, struct)))
END
    (cd "$tmp" && "$python" layout.py >layout_py.txt) >"$tmp/err" 2>&1 && diff "$tmp/layout.txt" "$tmp/layout_py.txt" >"$tmp/err"
    result "Python: layouts and constants are C's" $? "$tmp/err"
else skip "Python's layouts" "$python is not installed"; fi

# ---- Prototypes, as gcc lists them ----
# A letter for the result and each argument: p for an address, the bytes of an integer, f, d, s for a struct, v for none.
if have gcc; then
    gcc -std=c99 -I. -aux-info "$tmp/aux" -c "$tmp/layout.c" -o "$tmp/layout.o" && sed -n 's/.*extern \(.*[ *]\)\(dtrain_[a-z0-9_]*\) (\(.*\));.*/\2|\1|\3/p' "$tmp/aux" |
        grep -v -E "^($left|dtrain_cuda_device_ops)\|" | awk -F '|' '
        function letter(type) {
            if (type ~ /\*|_fn$/) return "p"
            gsub(/const|enum|struct| /, "", type)
            if (type ~ /^u?int(8|16|32|64)_t$/) { gsub(/[^0-9]/, "", type); return type / 8 }
            return type == "size_t" ? 8 : type == "_Bool" ? 1 : type ~ /^(void|float|double)$/ ? substr(type, 1, 1) : type ~ /_desc$/ ? "s" : 4
        }
        { n = split($3, argument, /, /); text = $1 " " letter($2)
          for (i = 1; i <= n; i++) if (argument[i] != "void") text = text letter(argument[i])
          print text }' | sort >"$tmp/prototypes"
    awk '
        function letter(text) {
            if (text !~ /, value/ && text ~ /, |procedure/) return "p"
            if (text ~ /c_ptr|c_funptr/) return "p"
            if (text ~ /^ *type/) return "s"
            return text ~ /c_(int64_t|size_t)/ ? 8 : text ~ /c_(int|int32_t)\)/ ? 4 : text ~ /c_int16_t/ ? 2 : text ~ /c_bool/ ? 1 : text ~ /c_float/ ? "f" : "d"
        }
        /^  interface/ { open = 1 }
        open && /^    (function|subroutine)/ { name = $2; sub(/\(.*/, "", name); arguments = ""; result = "v" }
        open && / :: / { if ($NF == name) result = letter($0); else arguments = arguments letter($0) }
        open && /^    end / { if (name != "dtrain_cuda_device_ops") print name " " result arguments }
        /^  end interface/ { open = 0 }' "$f90" | sort | diff "$tmp/prototypes" - >"$tmp/err" && [ "$(wc -l <"$tmp/prototypes")" -gt 100 ]
    result "Fortran: prototypes are C's" $? "$tmp/err"
    if have "$python"; then
        cat >"$tmp/prototypes.py" <<'END'
import ctypes, dtrain

def letter(kind):
    if kind is None:
        return "v"
    if issubclass(kind, ctypes.Structure):
        return "s"
    if issubclass(kind, (ctypes.c_void_p, ctypes.c_char_p, ctypes._Pointer, ctypes._CFuncPtr)):
        return "p"
    return {ctypes.c_float: "f", ctypes.c_double: "d"}.get(kind) or str(ctypes.sizeof(kind))

for name, function in vars(dtrain).items():
    if isinstance(function, ctypes._CFuncPtr):
        print(name, "".join(map(letter, (function.restype, *function.argtypes))))
END
        "$python" "$tmp/prototypes.py" 2>"$tmp/err" | sort | diff "$tmp/prototypes" - >>"$tmp/err"
        result "Python: prototypes are C's" $? "$tmp/err"
    else skip "Python's prototypes" "$python is not installed"; fi
else skip "prototypes" "gcc is not installed" 2; fi

# ---- Calls ----
# The same calls in three languages: numbers and texts, structs by value and by address, arrays of them, what may be
# NULL, handles that come out, callbacks in threads of the library, collectives on the language's arrays.
cat >"$tmp/calls.c" <<'END'
#include "dtrain.h"
#include <string.h>
static void bits(const char *name, float x)
{
    int i;
    memcpy(&i, &x, 4);
    printf("%s %d\n", name, i);
}
static dtrain_result rank_main(dtrain_world *world, void *user)
{
    double *sums = (double *)user, x[3] = {1, 2, 3};
    dtrain_world_info info;
    const int rank = dtrain_world_rank(world);
    dtrain_result r;
    for (int i = 0; i < 3; i++) x[i] *= rank + 1;
    dtrain_world_query(world, &info);
    r = dtrain_all_reduce(dtrain_world_comm(world), x, x, 3, DTRAIN_DTYPE_F64, DTRAIN_REDUCE_SUM, NULL);
    sums[rank] = x[2] + 100 * info.size;
    return r;
}
int main(void)
{
    const dtrain_device_ops *ops;
    dtrain_optimizer_desc muon = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON);
    dtrain_schedule schedule = {0};
    dtrain_param params[2] = {{0}};
    dtrain_memory memory;
    dtrain_strategy_desc strategy = {0};
    dtrain_launch_desc desc = {0};
    double sums[2] = {0};
    int code = dtrain_device_ops_by_name("abacus", &ops);
    printf("%s\n%s\n%d %s\n", dtrain_dtype_name(DTRAIN_DTYPE_F64), dtrain_result_text(DTRAIN_ERROR_PEER), code, dtrain_last_error());
    printf("muon %d %d %d\n", (int)muon.kind, muon.nesterov, (int)muon.group_count);
    bits("momentum", muon.momentum);
    bits("epsilon", muon.epsilon);
    bits("scale", muon.lr_scale);
    schedule.kind = DTRAIN_SCHEDULE_STEPS;
    schedule.lr = 0.5f;
    schedule.milestones[0] = 10;
    schedule.milestones[1] = 20;
    bits("rate", dtrain_schedule_lr(&schedule, 15));
    bits("normal", dtrain_random_normal(1234567890123456789u, 2, 3));
    printf("half %d\n", dtrain_half_from_f32(DTRAIN_DTYPE_BF16, 1.5f));
    params[0].name = "weight";
    params[0].count = 1000;
    params[1].name = "bias";
    params[1].count = 10;
    params[1].unit = 1;
    code = dtrain_strategy_plan(params, 2, &strategy, 4, &memory);
    printf("plan %d %d %d\n", code, (int)memory.params, (int)memory.total);
    desc.abi = &dtrain_header_abi;
    desc.rank_count = 2;
    desc.mode = DTRAIN_LAUNCH_THREADS;
    code = dtrain_launch(&desc, rank_main, sums, NULL);
    printf("launch %d %d %d\n", code, (int)sums[0], (int)sums[1]);
    for (uint32_t i = 0; i < dtrain_header_abi.count; i++) printf("size %u\n", dtrain_header_abi.bytes[i]);
    return 0;
}
END
cat >"$tmp/calls.f90" <<'END'
module ranks
  use dtrain
  implicit none
contains
  integer(c_int) function rank_main(world, user) bind(c)
    type(c_ptr), value :: world, user
    real(c_double), pointer :: sums(:)
    real(c_double), target :: x(3)
    type(dtrain_world_info) :: info
    integer :: rank
    call c_f_pointer(user, sums, [2])
    rank = dtrain_world_rank(world)
    x = [1, 2, 3] * (rank + 1)
    call dtrain_world_query(world, info)
    rank_main = dtrain_all_reduce(dtrain_world_comm(world), c_loc(x), c_loc(x), 3_c_size_t, DTRAIN_DTYPE_F64, DTRAIN_REDUCE_SUM)
    sums(rank + 1) = x(3) + 100 * info%size
  end function
end module
program calls
  use dtrain
  use ranks
  implicit none
  type(c_ptr) :: ops
  type(dtrain_optimizer_desc) :: muon
  type(dtrain_schedule) :: schedule
  type(dtrain_param) :: params(2)
  type(dtrain_memory) :: memory
  type(dtrain_strategy_desc) :: strategy
  type(dtrain_launch_desc) :: desc
  real(c_double), target :: sums(2)
  character(kind=c_char, len=8), target :: names(2) = ["weight" // c_null_char // " ", "bias" // c_null_char // "   "]
  integer(c_int) :: code, i
  type(dtrain_abi), pointer :: table
  code = dtrain_device_ops_by_name("abacus" // c_null_char, ops)
  print '(a)', dtrain_text(dtrain_dtype_name(DTRAIN_DTYPE_F64)), dtrain_text(dtrain_result_text(DTRAIN_ERROR_PEER))
  print '(i0, 1x, a)', code, dtrain_text(dtrain_last_error())
  muon = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON)
  print '(a, 3(1x, i0))', 'muon', muon%kind, merge(1, 0, muon%nesterov), muon%group_count
  call bits('momentum', muon%momentum)
  call bits('epsilon', muon%epsilon)
  call bits('scale', muon%lr_scale)
  schedule%kind = DTRAIN_SCHEDULE_STEPS
  schedule%lr = 0.5
  schedule%milestones(1:2) = [10, 20]
  call bits('rate', dtrain_schedule_lr(schedule, 15_c_int64_t))
  call bits('normal', dtrain_random_normal(1234567890123456789_c_int64_t, 2_c_int64_t, 3_c_int64_t))
  print '(a, 1x, i0)', 'half', dtrain_half_from_f32(DTRAIN_DTYPE_BF16, 1.5)
  params(1)%name = c_loc(names(1))
  params(1)%count = 1000
  params(2)%name = c_loc(names(2))
  params(2)%count = 10
  params(2)%unit = 1
  code = dtrain_strategy_plan(params, 2_c_size_t, strategy, 4, memory)
  print '(a, 3(1x, i0))', 'plan', code, memory%params, memory%total
  desc%abi = dtrain_header_abi()
  desc%rank_count = 2
  desc%mode = DTRAIN_LAUNCH_THREADS
  code = dtrain_launch(desc, rank_main, c_loc(sums))
  print '(a, 3(1x, i0))', 'launch', code, int(sums)
  call c_f_pointer(dtrain_header_abi(), table)
  print '(a, 1x, i0)', ('size', table%bytes(i), i = 1, table%count)
contains
  subroutine bits(name, x)
    character(*), intent(in) :: name
    real(c_float), intent(in) :: x
    print '(a, 1x, i0)', name, transfer(x, 0_c_int)
  end subroutine
end program
END
cat >"$tmp/calls.py" <<'END'
import struct
from dtrain import *

def bits(name, x):
    print(name, struct.unpack("i", struct.pack("f", x))[0])

@dtrain_rank_fn
def rank_main(world, user):
    rank = dtrain_world_rank(world)
    x = array(*[v * (rank + 1) for v in (1, 2, 3)])
    info = dtrain_world_info()
    dtrain_world_query(world, info)
    dtrain_all_reduce(dtrain_world_comm(world), x, x, 3, DTRAIN_DTYPE_F64, DTRAIN_REDUCE_SUM)
    sums[rank] = x[2] + 100 * info.size
    return DTRAIN_OK

def array(*values):
    import ctypes
    return (ctypes.c_double * len(values))(*values)

print(dtrain_dtype_name(DTRAIN_DTYPE_F64))
print(dtrain_result_text(DTRAIN_ERROR_PEER))
try:
    dtrain_device_ops_by_name("abacus")
except DtrainError as error:
    print(error.result, error)
muon = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON)
print("muon", muon.kind, int(muon.nesterov), muon.group_count)
bits("momentum", muon.momentum)
bits("epsilon", muon.epsilon)
bits("scale", muon.lr_scale)
schedule = dtrain_schedule(kind=DTRAIN_SCHEDULE_STEPS, lr=0.5)
schedule.milestones[0:2] = 10, 20
bits("rate", dtrain_schedule_lr(schedule, 15))
bits("normal", dtrain_random_normal(1234567890123456789, 2, 3))
print("half", dtrain_half_from_f32(DTRAIN_DTYPE_BF16, 1.5))
params = (dtrain_param * 2)(dtrain_param(name=b"weight", count=1000), dtrain_param(name=b"bias", count=10, unit=1))
memory = dtrain_memory()
print("plan", dtrain_strategy_plan(params, 2, dtrain_strategy_desc(), 4, memory), memory.params, memory.total)
sums = array(0, 0)
print("launch", dtrain_launch(dtrain_launch_desc(rank_count=2, mode=DTRAIN_LAUNCH_THREADS), rank_main, None, None), *map(int, sums))
for size in dtrain_header_abi.bytes:
    print("size", size)
END
library="$DTRAIN_LIBRARY -Wl,-rpath,$(dirname "$DTRAIN_LIBRARY")"
$cc -std=c99 -I. "$tmp/calls.c" $library -o "$tmp/calls" 2>"$tmp/err" && "$tmp/calls" >"$tmp/calls.txt" 2>"$tmp/err" && grep -q '^launch 0 209 209' "$tmp/calls.txt"
result "C calls the library" $? "$tmp/err"
if have gfortran; then
    (cd "$tmp" && $fortran "$f90" calls.f90 $library -o calls_f && ./calls_f >calls_f.txt) >"$tmp/err" 2>&1 && diff "$tmp/calls.txt" "$tmp/calls_f.txt" >"$tmp/err"
    result "Fortran: calls do what they do in C" $? "$tmp/err"
else skip "Fortran's calls" "gfortran is not installed"; fi
if have "$python"; then
    (cd "$tmp" && "$python" calls.py >calls_py.txt) >"$tmp/err" 2>&1 && diff "$tmp/calls.txt" "$tmp/calls_py.txt" >"$tmp/err"
    result "Python: calls do what they do in C" $? "$tmp/err"
    cat >"$tmp/errors.py" <<'END'
from dtrain import *

@dtrain_host_gather_fn
def gather(user, mine, all, size):
    raise ValueError("no ranks 100% of the time")

def attempt(function, *arguments):
    try:
        print(function(*arguments))
    except (DtrainError, TypeError) as error:
        print(type(error).__name__, getattr(error, "result", ""), error, repr(error.__cause__))

class strided:
    __array_interface__ = {"data": (4096, False), "strides": (16,), "shape": (2,), "typestr": "<f8", "version": 3}

attempt(dtrain_world_join, dtrain_join_desc(rank=0, size=2, all_gather=gather))
attempt(dtrain_cuda_device_ops)
attempt(dtrain_address, strided())
END
    (cd "$tmp" && "$python" errors.py) >"$tmp/out" 2>&1 && sed -n 1p "$tmp/out" | grep -q '^DtrainError -[0-9]* .*all-gather.* ValueError(.no ranks 100%' && [ "$(wc -l <"$tmp/out")" -eq 3 ] &&
        sed -n 2p "$tmp/out" | grep -q '^DtrainError -3 dtrain_cuda_device_ops: ' && sed -n 3p "$tmp/out" | grep -q '^TypeError .*contiguous'
    result "Python: exceptions, of callbacks too" $? "$tmp/out"
else skip "Python's calls" "$python is not installed" 2; fi

# ---- Installed ----
prefix=$tmp/prefix
try "make install" make -s install BUILD="$build" CC="$cc" PREFIX="$prefix"
unset DTRAIN_LIBRARY
if have "$python"; then
    PYTHONPATH="$prefix/share/dtrain" "$python" -c 'import dtrain; print(dtrain.__file__, dtrain._library._name, dtrain.dtrain_dtype_name(0))' >"$tmp/out" 2>&1 &&
        grep -q "^$prefix/share/dtrain/dtrain.py $prefix/.*/lib/libdtrain.so f32\$" "$tmp/out"
    result "Python: the installed module finds the installed library" $? "$tmp/out"
else skip "Python, installed" "$python is not installed"; fi
if have gfortran; then
    (cd "$tmp" && $fortran "$prefix/include/dtrain.f90" calls.f90 -L"$prefix/lib" -ldtrain -o installed && LD_LIBRARY_PATH="$prefix/lib" ./installed >installed.txt) >"$tmp/err" 2>&1 &&
        diff "$tmp/calls.txt" "$tmp/installed.txt" >"$tmp/err"
    result "Fortran: the installed module and library" $? "$tmp/err"
else skip "Fortran, installed" "gfortran is not installed"; fi
finish
