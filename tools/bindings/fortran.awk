# fortran.awk: prints the tables of header.awk as a Fortran module.

function prepare() {
    split("int integer(c_int) unsigned integer(c_int) int8_t integer(c_int8_t) uint8_t integer(c_int8_t) " \
          "int16_t integer(c_int16_t) uint16_t integer(c_int16_t) int32_t integer(c_int32_t) uint32_t integer(c_int32_t) int64_t integer(c_int64_t) " \
          "uint64_t integer(c_int64_t) size_t integer(c_size_t) float real(c_float) double real(c_double) bool logical(c_bool) " \
          "char character(kind=c_char)", words, " ")
    for (i = 1; i in words; i += 2) Scalar[words[i]] = words[i + 1]
}
# The Fortran type of a value; "" where there is none.
function value_type(d) {
    if (Base[d] in Scalar) return Scalar[Base[d]]
    if (Base[d] in Is_enum) return "integer(c_int)"
    if (Base[d] in Is_struct && !(Base[d] in Refused)) return "type(" Base[d] ")"
    return ""
}
function zero(type) {
    if (type ~ /^integer/) return " = 0"
    if (type ~ /^real/) return " = 0"
    if (type ~ /^logical/) return " = .false."
    if (type ~ /^character/) return " = c_null_char"
    if (type ~ /c_ptr/) return " = c_null_ptr"
    if (type ~ /c_funptr/) return " = c_null_funptr"
    return ""
}
# A line, continued where it gets longer than 100 columns, after a comma.
function put(text,    at, i, indent) {
    match(text, /^ */); indent = substr(text, 1, RLENGTH) "    "
    while (length(text) > 100) {
        at = 0
        for (i = 1; i < 98; i++) if (substr(text, i, 1) == "," && substr(text, i + 1, 1) == " ") at = i
        if (!at) break
        print substr(text, 1, at) " &"
        text = indent substr(text, at + 2)
    }
    print text
}
# Fortran has one name for what differs in case only in C.
function once(name) {
    if (tolower(name) in Seen) {
        print "bindings: " name " and " Seen[tolower(name)] " are one name in Fortran" >"/dev/stderr"
        exit 1
    }
    Seen[tolower(name)] = name
}

function constants_block(    i, name, value) {
    for (i = 1; i <= constants; i++) {
        name = Constant[i]; value = Value[name]
        if (tolower(name) in Seen) name = name "_VALUE"
        once(name)
        if (value ~ /^"/) { gsub(/"/, "'", value); put("  character(len=*), parameter :: " name " = " value) }
        else if (value ~ /\./) put("  real(c_float), parameter :: " name " = " value "_c_float")
        else if (value == "4294967295") put("  integer(c_int), parameter :: " name " = -1 ! all bits of a uint32_t")
        else if (value == "18446744073709551615") put("  integer(c_int64_t), parameter :: " name " = -1 ! all bits of a uint64_t")
        else put("  integer(c_int), parameter :: " name " = " value)
    }
}
function struct_block(name,    i, d, type, dims, parts, n, k) {
    print ""
    print "  type, bind(c) :: " name
    for (i = 1; i <= Fields[name]; i++) {
        d = Field[name, i]
        type = meaning(d) == "callback" ? "type(c_funptr)" : Stars[d] ? "type(c_ptr)" : value_type(d)
        dims = ""
        n = split(Dims[d], parts, " ")
        for (k = n; k >= 1; k--) dims = dims (dims == "" ? "" : ", ") parts[k]
        put("    " type " :: " Name[d] (dims == "" ? "" : "(" dims ")") zero(type))
    }
    print "  end type"
}
# The declaration of a dummy argument.
function argument(g, k,    d, what, type) {
    d = Parameter[g, k]
    what = meaning(d)
    if (what == "value") type = value_type(d) ", value"
    else if (what == "callback") type = d in Function ? "type(c_funptr), value" : "procedure(" Base[d] ")"
    else if (what == "struct") type = "type(" Base[d] "), target, intent(" (Const[d] ? "in" : "inout") "), optional"
    else if (what == "text") type = "character(kind=c_char), intent(in), optional"
    else if (what == "out") type = Name[d] == "out" ? "type(c_ptr), intent(out)" : "type(c_ptr), intent(inout), optional"
    else type = "type(c_ptr), value"
    return type " :: " Name[d] (what == "text" || (what == "struct" && is_array(g, k)) ? "(*)" : "")
}
function interface_of(name, bound, in_callback,    g, k, list, d, result, word, text) {
    g = Signature[name]; d = Result[g]
    result = Stars[d] ? "type(c_ptr)" : Base[d] == "void" ? "" : value_type(d)
    for (k = 1; k <= Parameters[g]; k++) list = list (k > 1 ? ", " : "") Name[Parameter[g, k]]
    word = result == "" ? "subroutine" : "function"
    put("    " word " " name "(" list ") bind(c" bound ")")
    print "      import"
    for (k = 1; k <= Parameters[g]; k++) {
        text = argument(g, k)
        # The library calls a callback with addresses: a procedure makes of them what it needs.
        if (in_callback && text ~ /optional/) text = "type(c_ptr), value :: " Name[Parameter[g, k]]
        put("      " text)
    }
    if (result != "") print "      " result " :: " name
    print "    end " word
}

function emit(    i, n) {
    print "! dtrain.f90: what dtrain.h of dtrain " version() " declares, for Fortran. Made by `make bindings`."
    print "!"
    print "! Compile this file with the program, `use dtrain`, and link with libdtrain.so. Names are those of C; dtrain.h"
    print "! says what they mean. Structs begin zeroed, as descs must: set the fields that you need. Arguments are"
    print "!"
    print "!     desc, info, params   derived types; one that C may call with NULL can be left out"
    print "!     handles              type(c_ptr): worlds, communicators, strategies; `out` receives one"
    print "!     work                 left out: the call blocks"
    print "!     texts                characters that end with c_null_char. Functions return type(c_ptr), of which"
    print "!                          dtrain_text makes a character"
    print "!     other addresses      type(c_ptr): c_loc of a target"
    print "!     unsigned numbers     integers of the same bits"
    print "!"
    print "! What the library keeps the address of (params, their names and arrays) must be a target that stays where it"
    print "! is. A callback is a bind(c) procedure with the abstract interface of its type; fields take its c_funloc. The"
    print "! library compares the sizes of structs with those of this module: desc%abi = dtrain_header_abi()."
    print "! A constant that differs from a function's name in case only ends with _VALUE."
    print "!"
    left_out("!")
    print "module dtrain"
    print "  use, intrinsic :: iso_c_binding"
    print "  implicit none"
    print "  public"
    print ""
    for (i = 1; i <= structs; i++) once(Struct[i])
    for (i = 1; i <= callbacks; i++) once(Callback[i])
    for (i = 1; i <= functions; i++) once(Function_name[i])
    constants_block()
    for (i = 1; i <= structs; i++) if (!(Struct[i] in Refused)) struct_block(Struct[i])
    print ""
    print "  abstract interface"
    for (i = 1; i <= callbacks; i++) interface_of(Callback[i], "", 1)
    print "  end interface"
    print ""
    print "  interface"
    for (i = 1; i <= functions; i++) interface_of(Function_name[i], ", name=\"" Function_name[i] "\"", 0)
    print "  end interface"
    print ""
    print "contains"
    print ""
    print "  ! Copy a text of C; it is empty for an address that is NULL."
    print "  function dtrain_text(address) result(text)"
    print "    type(c_ptr), value :: address"
    print "    character(:), allocatable :: text"
    print "    character(kind=c_char), pointer :: bytes(:)"
    print "    integer :: n, i"
    print "    n = 0"
    print "    if (c_associated(address)) then"
    print "      call c_f_pointer(address, bytes, [huge(n)])"
    print "      do while (bytes(n + 1) /= c_null_char)"
    print "        n = n + 1"
    print "      end do"
    print "    end if"
    print "    allocate (character(n) :: text)"
    print "    do i = 1, n"
    print "      text(i:i) = bytes(i)"
    print "    end do"
    print "  end function"
    if (abi_count) table_of_sizes()
    print "end module"
}
# A function that fills in and returns the table of sizes, as this compiler sees the structs.
function table_of_sizes(    i) {
    print ""
    print "  ! The address of the table of sizes, for desc%abi. It stays valid."
    print "  function dtrain_header_abi() result(address)"
    print "    type(c_ptr) :: address"
    print "    type(dtrain_abi), save, target :: table"
    for (i = 1; i <= abi_count; i++) print "    type(" Abi[i] "), save, target :: s" i
    print "    table%count = " abi_count
    for (i = 1; i <= abi_count; i++)
        if (!(i in Abi_last)) print "    table%bytes(" i ") = int(c_sizeof(s" i "))"
        else put("    table%bytes(" i ") = int(transfer(c_loc(s" i "%" Abi_last[i] "), 0_c_intptr_t) - " \
                 "transfer(c_loc(s" i "), 0_c_intptr_t), c_int) + int(c_sizeof(s" i "%" Abi_last[i] "))")
    print "    address = c_loc(table)"
    print "  end function"
}
