# python.awk: prints the tables of header.awk as a Python module.

function prepare() {
    split("int c_int unsigned c_uint int8_t c_int8 uint8_t c_uint8 int16_t c_int16 uint16_t c_uint16 int32_t c_int32 " \
          "uint32_t c_uint32 int64_t c_int64 uint64_t c_uint64 size_t c_size_t float c_float double c_double " \
          "bool c_bool char c_char", words, " ")
    for (i = 1; i in words; i += 2) Scalar[words[i]] = "_c." words[i + 1]
}
function value_type(d) {
    if (Base[d] in Scalar) return Scalar[Base[d]]
    if (Base[d] in Is_enum) return "_c.c_int"
    return Base[d]
}
# The type of a field or of a callback's argument.
function plain_type(d,    what) {
    what = meaning(d)
    if (what == "value") return value_type(d)
    if (what == "callback") return d in Function ? function_type(Function[d]) : "_" Base[d]
    if (what == "struct") return "_c.POINTER(" Base[d] ")"
    if (what == "text") return "_c.c_char_p"
    if (what == "texts") return "_c.POINTER(_c.c_char_p)"
    return "_c.c_void_p"
}
function result_type(d) {
    if (Stars[d]) return meaning(d) == "text" ? "_c.c_char_p" : "_c.c_void_p"
    return Base[d] == "void" ? "None" : value_type(d)
}
function function_type(g,    list, k) {
    list = result_type(Result[g])
    for (k = 1; k <= Parameters[g]; k++) list = list ", " plain_type(Parameter[g, k])
    return "_c.CFUNCTYPE(" list ")"
}
function struct_fields(name,    i, d, type, parts, n, k) {
    print name "._fields_ = ["
    for (i = 1; i <= Fields[name]; i++) {
        d = Field[name, i]
        type = plain_type(d)
        n = split(Dims[d], parts, " ")
        for (k = n; k >= 1; k--) type = type " * " parts[k]
        print "    (\"" Name[d] "\", " type "),"
    }
    print "]"
}
function function_line(name,    g, k, d, what, type, list) {
    g = Signature[name]
    for (k = 1; k <= Parameters[g]; k++) {
        d = Parameter[g, k]; what = meaning(d)
        type = what == "text" ? "_Text" : what == "data" ? "_Address" : what == "out" ? "_c.POINTER(_c.c_void_p)" : plain_type(d)
        list = list ", (\"" Name[d] "\", " type ")"
    }
    d = Result[g]
    print "_bind(\"" name "\", " (Base[d] == "dtrain_result" && !Stars[d] ? "_RESULT" : result_type(d)) list ")"
}

function emit(    i, d) {
    print "\"\"\"What dtrain.h of dtrain " version() " declares, for Python. Made by `make bindings`."
    print ""
    print "Names are those of C; dtrain.h says what they mean. The module needs the standard library and libdtrain.so: the"
    print "file that DTRAIN_LIBRARY names, or one beside the module or installed with it, or where the system finds it."
    print ""
    print "    world = dtrain_world_join(desc)           an argument `out` is the result"
    print "    dtrain_strategy_finish(strategy)          an error raises DtrainError with the sentence"
    print "    dtrain_all_reduce(comm, x, x, x.size, DTRAIN_DTYPE_F64, DTRAIN_REDUCE_SUM)"
    print "                                              memory is a numpy array (or has __array_interface__), an"
    print "                                              object of ctypes, an integer or None"
    print "    desc = dtrain_join_desc(rank=0, size=2)   other fields are zero; `abi` is filled in"
    print "    param.typed_value = dtrain_address(x)     memory in a field is an integer"
    print "    @dtrain_host_gather_fn                    makes a callback of a function. Where it returns a number, an"
    print "                                              exception means an error, and None success. The exception is the"
    print "                                              __cause__ of the DtrainError that follows"
    print ""
    print "Texts are bytes in fields, str or bytes in calls. Keep what the library has the address of: params, arrays,"
    print "callbacks."
    print ""
    left_out("")
    print "\"\"\""
    print ""
    print "import ctypes as _c"
    print "import ctypes.util as _util"
    print "import os as _os"
    print ""
    print ""
    for (i = 1; i <= constants; i++) print Constant[i] " = " Value[Constant[i]]
    print ""
    print ""
    print "class DtrainError(Exception):"
    print "    \"\"\"A call has failed; `result` is its code, DTRAIN_ERROR_PEER for example.\"\"\""
    print ""
    print "    def __init__(self, result, sentence):"
    print "        super().__init__(sentence)"
    print "        self.result = result"
    print ""
    print ""
    print "def dtrain_address(memory):"
    print "    \"\"\"Return the address of an array's first element, for a field of a struct.\"\"\""
    print "    interface = getattr(memory, \"__array_interface__\", None)"
    print "    if interface is None:"
    print "        return _c.addressof(memory)"
    print "    if interface.get(\"strides\") is not None:"
    print "        raise TypeError(\"the array is not contiguous\")"
    print "    return interface[\"data\"][0]"
    print ""
    print ""
    print "class _Address(_c.c_void_p):"
    print "    @classmethod"
    print "    def from_param(cls, memory):"
    print "        if hasattr(memory, \"__array_interface__\"):"
    print "            return _c.c_void_p(dtrain_address(memory))"
    print "        return _c.c_void_p.from_param(memory)"
    print ""
    print ""
    print "class _Text(_c.c_char_p):"
    print "    @classmethod"
    print "    def from_param(cls, text):"
    print "        return _c.c_char_p.from_param(_os.fsencode(text) if isinstance(text, (str, _os.PathLike)) else text)"
    print ""
    print ""
    print "_raised = []  # by callbacks, the causes of the next DtrainError"
    print ""
    print ""
    print "def _callback(kind):"
    print "    def make(function):"
    print "        def call(*arguments):"
    print "            try:"
    print "                result = function(*arguments)"
    print "                return DTRAIN_OK if result is None else result"
    print "            except DtrainError as error:"
    print "                return error.result"
    print "            except Exception as error:"
    print "                _raised.append(error)"
    print "                text = f\"{type(error).__name__}: {error}\".encode()"
    print "                return _library.dtrain_fail(DTRAIN_ERROR_USAGE, b\"%s\", _c.c_char_p(text))"
    print "        return kind(call)"
    print "    return make"
    print ""
    print ""
    print "class _Struct(_c.Structure):"
    print "    def __init__(self, *values, **fields):"
    print "        super().__init__(*values, **fields)"
    if (abi_count) {
        print "        if dict(self._fields_).get(\"abi\") is _c.POINTER(dtrain_abi) and not self.abi:"
        print "            self.abi = _c.pointer(dtrain_header_abi)"
    }
    print ""
    print ""
    for (i = 1; i <= structs; i++) if (!(Struct[i] in Refused)) print "class " Struct[i] "(_Struct): pass"
    print ""
    for (i = 1; i <= callbacks; i++) print "_" Callback[i] " = " function_type(Signature[Callback[i]])
    for (i = 1; i <= callbacks; i++) {
        d = Result[Signature[Callback[i]]]
        print Callback[i] " = " (!Stars[d] && Base[d] ~ /^(int|dtrain_result)$/ ? "_callback(_" Callback[i] ")" : "_" Callback[i])
    }
    print ""
    for (i = 1; i <= structs; i++) if (!(Struct[i] in Refused)) struct_fields(Struct[i])
    if (abi_count) {
        print ""
        print "def _size(struct, last):"
        print "    field = getattr(struct, last) if last else None"
        print "    return field.offset + field.size if field else _c.sizeof(struct)"
        print ""
        print ""
        print "dtrain_header_abi = dtrain_abi(" abi_count ", (_c.c_uint32 * " abi_count ")("
        for (i = 1; i <= abi_count; i++) print "    _size(" Abi[i] ", " (i in Abi_last ? "\"" Abi_last[i] "\"" : "None") "),"
        print "))"
    }
    print ""
    print ""
    print "def _load():"
    print "    here = _os.path.dirname(_os.path.abspath(__file__))"
    print "    built, installed = (), (\"..\", \"..\", \"lib\")"
    print "    places = [_os.path.join(here, *folder, \"libdtrain.so\") for folder in (built, installed)]"
    print "    found = [place for place in places if _os.path.exists(place)]"
    print "    path = _os.environ.get(\"DTRAIN_LIBRARY\") or (found[0] if found else _util.find_library(\"dtrain\"))"
    print "    if not path:"
    print "        raise OSError(\"libdtrain.so is not installed: DTRAIN_LIBRARY can name the file\")"
    print "    return _c.CDLL(path)"
    print ""
    print ""
    print "_library = _load()"
    print "_RESULT = object()"
    print ""
    print ""
    print "def _bind(name, result, *parameters):"
    print "    \"\"\"Define a function of the library.\"\"\""
    print "    def check(code, function, arguments):"
    print "        if result is _RESULT and code != DTRAIN_OK:"
    print "            cause = _raised.pop() if _raised else None"
    print "            raise DtrainError(code, dtrain_last_error() or dtrain_result_text(code)) from cause"
    print "        return code.decode() if result is _c.c_char_p and code is not None else arguments"
    print ""
    print "    flags = [(2, n) if n == \"out\" else (1, n, None) if n == \"work\" else (1, n) for n, _ in parameters]"
    print "    try:"
    print "        kind = _c.CFUNCTYPE(_c.c_int if result is _RESULT else result, *[t for _, t in parameters])"
    print "        function = kind((name, _library), tuple(flags))"
    print "    except AttributeError:"
    print "        def missing(*_):"
    print "            raise DtrainError(DTRAIN_ERROR_UNSUPPORTED, f\"{name}: this libdtrain does not have it\")"
    print "        globals()[name] = missing"
    print "        return"
    print "    if result in (_RESULT, _c.c_char_p):"
    print "        function.errcheck = check"
    print "    globals()[name] = function"
    print ""
    print ""
    for (i = 1; i <= functions; i++) function_line(Function_name[i])
}
