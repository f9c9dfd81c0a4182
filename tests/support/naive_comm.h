/* naive_comm.h: one call of a communicator against loops that one can check by eye. Include it after dtrain.h,
 * test.h and ranks.h; main fills half_values before any rank starts.
 *
 * Every element of every rank's input is a function of (seed, rank, index), so each rank computes the
 * expected output by itself, with conversions of its own, and compares bits: sums in fp32 in rank
 * order, rounded once; the mean is one multiplication more. Buffers lie between guard bytes, in
 * communicator or private memory, at any byte offset. */
#ifndef DTRAIN_TEST_NAIVE_COMM_H
#define DTRAIN_TEST_NAIVE_COMM_H

enum { GUARD = 64, PRIVATE = 0, COMM = 1, MODES = 2 };

static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16,
                                      DTRAIN_DTYPE_I32, DTRAIN_DTYPE_I64,  DTRAIN_DTYPE_F64};
static const dtrain_reduce_op ops[] = {DTRAIN_REDUCE_SUM, DTRAIN_REDUCE_MEAN, DTRAIN_REDUCE_MIN,
                                       DTRAIN_REDUCE_MAX, DTRAIN_REDUCE_PROD};
static const uint32_t kinds[] = {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN_COLLECTIVE_REDUCE_SCATTER,
                                 DTRAIN_COLLECTIVE_ALL_GATHER, DTRAIN_COLLECTIVE_BROADCAST,
                                 DTRAIN_COLLECTIVE_REDUCE,     DTRAIN_COLLECTIVE_ALL_TO_ALL};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* ---- elements ---- */

static float half_values[65536]; /* filled by main before any rank starts */

static inline float slow_half_value(uint32_t bits)
{
    int exponent = (int)(bits >> 10 & 31), mantissa = (int)(bits & 1023);
    double value = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    if (exponent == 31) value = mantissa ? (double)NAN : (double)INFINITY;
    return (float)(bits & 0x8000 ? -value : value);
}

static inline uint16_t half_bits(float value)
{
    double size = fabs((double)value), quantum;
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    int exponent;
    if (isnan(value)) return (uint16_t)(sign | 0x7e00);
    if (size >= 65520)
        return (uint16_t)(sign | 0x7c00);     /* half way to 65536 rounds up to infinity */
    frexp(size, &exponent);                   /* size in [2^(exponent-1), 2^exponent) */
    if (size < ldexp(1, -14)) exponent = -13; /* denormals share the smallest quantum */
    quantum = ldexp(1, exponent - 11);
    size = rint(size / quantum); /* exact division; ties to even */
    return (uint16_t)(sign + (uint16_t)((exponent + 13) << 10) + (uint16_t)size);
}

static inline float bits_to_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline uint32_t float_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline uint16_t bfloat_bits(float value)
{
    uint32_t bits = float_to_bits(value), rest = bits & 0xffff, upper = bits >> 16;
    if (isnan(value)) return (uint16_t)(upper | 0x40);
    if (rest > 0x8000 || (rest == 0x8000 && (upper & 1))) upper++;
    return (uint16_t)upper;
}

static inline float load_float(dtrain_dtype dtype, const void *at)
{
    uint16_t half;
    float value;
    if (dtype == DTRAIN_DTYPE_F32) {
        memcpy(&value, at, sizeof value);
        return value;
    }
    memcpy(&half, at, sizeof half);
    return dtype == DTRAIN_DTYPE_BF16 ? bits_to_float((uint32_t)half << 16) : half_values[half];
}
static inline void store_float(dtrain_dtype dtype, void *at, float value)
{
    uint16_t half = dtype == DTRAIN_DTYPE_BF16 ? bfloat_bits(value) : half_bits(value);
    if (dtype == DTRAIN_DTYPE_F32) memcpy(at, &value, sizeof value);
    else memcpy(at, &half, sizeof half);
}

static inline bool is_integer(dtrain_dtype dtype)
{
    return dtype == DTRAIN_DTYPE_I32 || dtype == DTRAIN_DTYPE_I64;
}

static inline uint64_t load_integer(dtrain_dtype dtype, const void *at)
{
    uint32_t narrow;
    uint64_t wide;
    if (dtype == DTRAIN_DTYPE_I64) memcpy(&wide, at, sizeof wide);
    else {
        memcpy(&narrow, at, sizeof narrow);
        wide = (uint64_t)(int64_t)(int32_t)narrow;
    }
    return wide;
}
static inline void store_integer(dtrain_dtype dtype, void *at, uint64_t value)
{
    uint32_t narrow = (uint32_t)value;
    if (dtype == DTRAIN_DTYPE_I64) memcpy(at, &value, sizeof value);
    else memcpy(at, &narrow, sizeof narrow);
}

/* Element `index` of world rank `rank`: random signs and mantissas, eight binades, so that every other
 * order of summation and every second rounding shows. Never zero: the sign of zero is not specified. */
static inline void make_element(dtrain_dtype dtype, uint64_t seed, int rank, size_t index, void *at)
{
    uint64_t x = ranks_mix(seed + (uint64_t)rank * 0x1000003u + ((uint64_t)index << 24));
    uint32_t sign = (uint32_t)(x >> 63), exponent = (uint32_t)(x >> 60 & 7), low = (uint32_t)x;
    uint16_t half = (uint16_t)(sign << 15 | (11 + exponent) << 10 | (low & 1023));
    uint32_t word = sign << 31 | (123 + exponent) << 23 | (low & 0x7fffff);
    const double wide = ldexp(
        (sign ? -1 : 1) * (1 + (double)(x >> 8 & ((1ull << 52) - 1)) / 0x1p52), (int)exponent - 4);
    if (is_integer(dtype)) store_integer(dtype, at, x);
    else if (dtype == DTRAIN_DTYPE_F64) memcpy(at, &wide, sizeof wide);
    else if (dtype == DTRAIN_DTYPE_F32) memcpy(at, &word, sizeof word);
    else {
        if (dtype == DTRAIN_DTYPE_BF16) half = (uint16_t)(word >> 16);
        memcpy(at, &half, sizeof half);
    }
}

/* ---- the oracle ---- */

static inline float join_floats(dtrain_reduce_op op, float a, float b)
{
    if (op == DTRAIN_REDUCE_PROD) return a * b;
    if (op == DTRAIN_REDUCE_SUM || op == DTRAIN_REDUCE_MEAN) return a + b;
    if (isnan(a) || isnan(b)) return NAN;
    return (op == DTRAIN_REDUCE_MIN) == (a < b) ? a : b;
}
static inline uint64_t join_integers(dtrain_reduce_op op, uint64_t a, uint64_t b)
{
    if (op == DTRAIN_REDUCE_PROD) return a * b;
    if (op == DTRAIN_REDUCE_SUM) return a + b;
    return (op == DTRAIN_REDUCE_MIN) == ((int64_t)a < (int64_t)b) ? a : b;
}

static inline double load_double(const void *at)
{
    double value;
    memcpy(&value, at, sizeof value);
    return value;
}
static inline double join_doubles(dtrain_reduce_op op, double a, double b)
{
    if (op == DTRAIN_REDUCE_PROD) return a * b;
    if (op == DTRAIN_REDUCE_SUM || op == DTRAIN_REDUCE_MEAN) return a + b;
    return (op == DTRAIN_REDUCE_MIN) == (a < b) ? a : b;
}

/* The reduction over the members' elements, by the documented rule. */
static inline void expect_reduced(dtrain_dtype dtype, dtrain_reduce_op op, uint64_t seed,
                                  const int *members, int size, size_t index, void *at)
{
    unsigned char element[8];
    float sum = 0;
    double wide = 0;
    uint64_t whole = 0;
    int r;
    for (r = 0; r < size; r++) {
        make_element(dtype, seed, members[r], index, element);
        if (dtype == DTRAIN_DTYPE_F64) {
            double value = load_double(element);
            wide = r == 0 ? value : join_doubles(op, wide, value);
        } else if (is_integer(dtype)) {
            uint64_t value = load_integer(dtype, element);
            whole = r == 0 ? value : join_integers(op, whole, value);
        } else {
            float value = load_float(dtype, element);
            sum = r == 0 ? value : join_floats(op, sum, value);
        }
    }
    if (op == DTRAIN_REDUCE_MEAN) sum *= 1.0f / (float)size;
    if (op == DTRAIN_REDUCE_MEAN) wide *= 1.0 / size;
    if (is_integer(dtype)) store_integer(dtype, at, whole);
    else if (dtype == DTRAIN_DTYPE_F64) memcpy(at, &wide, sizeof wide);
    else store_float(dtype, at, sum);
}

/* Equal bits; any NaN equals any NaN. */
static inline bool same_element(dtrain_dtype dtype, const void *a, const void *b)
{
    if (memcmp(a, b, dtrain_dtype_bytes(dtype)) == 0) return true;
    if (is_integer(dtype)) return false;
    if (dtype == DTRAIN_DTYPE_F64) return isnan(load_double(a)) && isnan(load_double(b));
    return isnan(load_float(dtype, a)) && isnan(load_float(dtype, b));
}

/* ---- one call ---- */

typedef struct call {
    uint32_t kind;
    dtrain_dtype dtype;
    dtrain_reduce_op op;
    size_t count;
    int root;
    int send_memory, recv_memory;    /* PRIVATE or COMM; may differ between ranks */
    size_t send_offset, recv_offset; /* bytes past a 64-byte boundary */
    bool in_place, async;
    uint64_t seed;
} call;

/* A rank's place in a communicator and its buffers. */
typedef struct desk {
    dtrain_comm *comm;
    int rank, size, members[RANKS_MOST]; /* world ranks */
    unsigned char *send[2], *recv[2];    /* by memory */
    size_t capacity;
} desk;

/* A call under way. */
typedef struct flight {
    call what;
    unsigned char *send, *recv; /* payloads */
    dtrain_work *work;
} flight;

static inline size_t send_count(const call *c, int size)
{
    const bool cuts =
        c->kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER || c->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL;
    return cuts ? c->count * (size_t)size : c->count;
}
static inline size_t recv_count(const call *c, int size)
{
    const bool joins =
        c->kind == DTRAIN_COLLECTIVE_ALL_GATHER || c->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL;
    return joins ? c->count * (size_t)size : c->count;
}

static inline void guard(unsigned char *payload, size_t bytes)
{
    memset(payload - GUARD, 0xa5, GUARD);
    memset(payload + bytes, 0x5a, GUARD);
}
static inline bool guarded(const unsigned char *payload, size_t bytes)
{
    int i;
    for (i = 0; i < GUARD; i++)
        if (payload[i - GUARD] != 0xa5 || payload[bytes + (size_t)i] != 0x5a) return false;
    return true;
}

static inline const char *describe(const call *c, const desk *d)
{
    static __thread char text[256];
    snprintf(text, sizeof text,
             "kind %u %s op %d count %zu root %d send %d+%zu recv %d+%zu%s%s, rank %d of %d",
             c->kind, dtrain_dtype_name(c->dtype), (int)c->op, c->count, c->root, c->send_memory,
             c->send_offset, c->recv_memory, c->recv_offset, c->in_place ? " in place" : "",
             c->async ? " async" : "", d->rank, d->size);
    return text;
}

/* Payload addresses for a call: the small buffer of an in-place call lies inside the large one. */
static inline void place(const desk *d, flight *f)
{
    const call *c = &f->what;
    size_t slice = (size_t)d->rank * c->count * dtrain_dtype_bytes(c->dtype);
    f->send = d->send[c->send_memory] + GUARD + c->send_offset;
    f->recv = d->recv[c->recv_memory] + GUARD + c->recv_offset;
    if (c->kind == DTRAIN_COLLECTIVE_BROADCAST) f->send = f->recv;
    else if (c->in_place && c->kind == DTRAIN_COLLECTIVE_ALL_GATHER) f->send = f->recv + slice;
    else if (c->in_place && c->kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER) f->recv = f->send + slice;
    else if (c->in_place) f->recv = f->send;
}

/* Fills the input, poisons the output, sets the guards around the outermost buffers. */
static inline void prepare(const desk *d, flight *f)
{
    const call *c = &f->what;
    size_t item = dtrain_dtype_bytes(c->dtype), sends = send_count(c, d->size), i;
    size_t recvs = recv_count(c, d->size);
    place(d, f);
    if (!c->in_place || c->kind == DTRAIN_COLLECTIVE_ALL_GATHER ||
        c->kind == DTRAIN_COLLECTIVE_BROADCAST) {
        guard(f->recv, recvs * item);
        memset(f->recv, 0xc3, recvs * item);
    }
    if (c->kind == DTRAIN_COLLECTIVE_BROADCAST && d->rank != c->root) return;
    if (!(c->in_place && c->kind == DTRAIN_COLLECTIVE_ALL_GATHER) &&
        c->kind != DTRAIN_COLLECTIVE_BROADCAST)
        guard(f->send, sends * item);
    for (i = 0; i < sends; i++)
        make_element(c->dtype, c->seed, d->members[d->rank], i, f->send + i * item);
}

static inline dtrain_result start(const desk *d, flight *f)
{
    const call *c = &f->what;
    bool nothing = c->count == 0 && (c->seed & 1); /* NULL is a buffer of no elements */
    const void *send = nothing ? NULL : f->send;
    void *recv = nothing ? NULL : f->recv;
    dtrain_work **work = c->async ? &f->work : NULL;
    f->work = NULL;
    switch (c->kind) {
    case DTRAIN_COLLECTIVE_ALL_REDUCE:
        return dtrain_all_reduce(d->comm, send, recv, c->count, c->dtype, c->op, work);
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER:
        return dtrain_reduce_scatter(d->comm, send, recv, c->count, c->dtype, c->op, work);
    case DTRAIN_COLLECTIVE_ALL_GATHER:
        return dtrain_all_gather(d->comm, send, recv, c->count, c->dtype, work);
    case DTRAIN_COLLECTIVE_ALL_TO_ALL:
        return dtrain_all_to_all(d->comm, send, recv, c->count, c->dtype, work);
    case DTRAIN_COLLECTIVE_BROADCAST:
        return dtrain_broadcast(d->comm, recv, c->count, c->dtype, c->root, work);
    default:
        if (d->rank != c->root && (c->seed & 2)) recv = NULL; /* ignored there */
        return dtrain_reduce(d->comm, send, recv, c->count, c->dtype, c->op, c->root, work);
    }
}

/* Expected element `index` of this rank's output. */
static inline void expect(const desk *d, const call *c, size_t index, void *at)
{
    size_t first = c->kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER ? (size_t)d->rank * c->count : 0;
    if (c->kind == DTRAIN_COLLECTIVE_BROADCAST)
        make_element(c->dtype, c->seed, d->members[c->root], index, at);
    else if (c->kind == DTRAIN_COLLECTIVE_ALL_GATHER)
        make_element(c->dtype, c->seed, d->members[index / c->count], index % c->count, at);
    else if (c->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL)
        make_element(c->dtype, c->seed, d->members[index / c->count],
                     (size_t)d->rank * c->count + index % c->count, at);
    else expect_reduced(c->dtype, c->op, c->seed, d->members, d->size, first + index, at);
}

static inline int verify_output(const desk *d, const flight *f)
{
    const call *c = &f->what;
    size_t item = dtrain_dtype_bytes(c->dtype), count = recv_count(c, d->size), i;
    unsigned char wanted[8];
    if (c->kind == DTRAIN_COLLECTIVE_REDUCE && d->rank != c->root) { /* recv must be as it was */
        if (c->in_place) return 1;
        for (i = 0; i < count * item; i++)
            if (f->recv[i] != 0xc3) return CHECK_MSG(0, "%s: recv written", describe(c, d));
        return 1;
    }
    for (i = 0; i < count; i++) {
        expect(d, c, i, wanted);
        if (same_element(c->dtype, f->recv + i * item, wanted)) continue;
        if (is_integer(c->dtype))
            return CHECK_MSG(0, "%s: [%zu] is %llx, expected %llx", describe(c, d), i,
                             (unsigned long long)load_integer(c->dtype, f->recv + i * item),
                             (unsigned long long)load_integer(c->dtype, wanted));
        return CHECK_MSG(0, "%s: [%zu] is %.9g, expected %.9g", describe(c, d), i,
                         (double)load_float(c->dtype, f->recv + i * item),
                         (double)load_float(c->dtype, wanted));
    }
    return CHECK(1);
}

/* What the call had no business to write: guards, and the input outside of the output. */
static inline int verify_rest(const desk *d, const flight *f)
{
    const call *c = &f->what;
    size_t item = dtrain_dtype_bytes(c->dtype), sends = send_count(c, d->size), i;
    size_t recvs = recv_count(c, d->size), own = (size_t)d->rank * c->count;
    bool outer_send = c->in_place && c->kind != DTRAIN_COLLECTIVE_ALL_GATHER &&
                      c->kind != DTRAIN_COLLECTIVE_BROADCAST;
    const unsigned char *large = outer_send ? f->send : f->recv;
    unsigned char wanted[8];
    if (!guarded(large, (outer_send ? sends : recvs) * item))
        return CHECK_MSG(0, "%s: wrote beyond a buffer", describe(c, d));
    if (c->kind == DTRAIN_COLLECTIVE_BROADCAST) return 1;
    if (c->in_place && c->kind != DTRAIN_COLLECTIVE_REDUCE_SCATTER &&
        !(c->kind == DTRAIN_COLLECTIVE_REDUCE && d->rank != c->root))
        return 1;
    if (!c->in_place && !guarded(f->send, sends * item))
        return CHECK_MSG(0, "%s: wrote beyond its input", describe(c, d));
    for (i = 0; i < sends; i++) {
        if (c->in_place && c->kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER && i >= own &&
            i < own + c->count)
            continue;
        make_element(c->dtype, c->seed, d->members[d->rank], i, wanted);
        if (memcmp(f->send + i * item, wanted, item) != 0)
            return CHECK_MSG(0, "%s: changed its input at %zu", describe(c, d), i);
    }
    return 1;
}

/* 1: go on; 0: the communicator is lost. */
static inline int run_call(const desk *d, const call *c)
{
    flight f;
    dtrain_result result;
    f.what = *c;
    prepare(d, &f);
    result = start(d, &f);
    if (result == DTRAIN_OK) result = dtrain_work_wait(f.work);
    if (!CHECK_MSG(result == DTRAIN_OK, "%s: %s: %s", describe(c, d), dtrain_result_text(result),
                   dtrain_last_error()))
        return 0;
    return verify_output(d, &f) && verify_rest(d, &f);
}

/* ---- a rank's desk ---- */

static inline int open_desk_on(desk *d, dtrain_comm *comm, size_t payload_bytes)
{
    void *memory;
    int r, i;
    memset(d, 0, sizeof *d);
    d->comm = comm;
    d->rank = dtrain_comm_rank(comm);
    d->size = dtrain_comm_size(comm);
    for (r = 0; r < d->size; r++) d->members[r] = ranks_in_world(comm, r);
    d->capacity = payload_bytes + 2 * GUARD + 64;
    for (i = 0; i < 2; i++) {
        unsigned char **side = i ? d->recv : d->send;
        side[PRIVATE] = (unsigned char *)malloc(d->capacity);
        RANKS_TRY(dtrain_comm_alloc(comm, d->capacity, &memory));
        side[COMM] = (unsigned char *)memory;
    }
    return 0;
}
static inline int open_desk(desk *d, dtrain_world *world, size_t payload_bytes)
{
    return open_desk_on(d, dtrain_world_comm(world), payload_bytes);
}
static inline void close_desk(desk *d)
{
    free(d->send[PRIVATE]);
    free(d->recv[PRIVATE]);
    dtrain_comm_free(d->comm, d->send[COMM], d->capacity);
    dtrain_comm_free(d->comm, d->recv[COMM], d->capacity);
}

static inline call make_call(uint32_t kind, dtrain_dtype dtype, dtrain_reduce_op op, size_t count,
                             uint64_t seed)
{
    call c;
    memset(&c, 0, sizeof c);
    c.kind = kind;
    c.dtype = dtype;
    c.op = op;
    c.count = count;
    c.seed = seed;
    return c;
}
static inline bool has_op(uint32_t kind)
{
    return kind != DTRAIN_COLLECTIVE_ALL_GATHER && kind != DTRAIN_COLLECTIVE_BROADCAST &&
           kind != DTRAIN_COLLECTIVE_ALL_TO_ALL;
}

/* Memory, offsets, root, in place and async from the bits of a number: a walk through all of them. */
static inline void vary(call *c, const desk *d, uint64_t x)
{
    c->root = (int)(x % (uint64_t)d->size);
    x /= (uint64_t)d->size;
    c->in_place = (x & 1) && c->kind != DTRAIN_COLLECTIVE_ALL_TO_ALL;
    c->async = x >> 1 & 1;
    c->send_memory = (int)(x >> 2 & 1);
    c->recv_memory = (int)(x >> 3 & 1);
    if (x >> 4 & 1) { /* ranks differ in memory and alignment */
        uint64_t own = ranks_mix(x + (uint64_t)d->rank);
        c->send_memory = (int)(own & 1);
        c->recv_memory = (int)(own >> 1 & 1);
        c->send_offset = own >> 2 & 15;
        c->recv_offset = own >> 6 & 15;
    }
    if (c->in_place && c->kind != DTRAIN_COLLECTIVE_ALL_GATHER) c->recv_memory = c->send_memory;
}

#endif
