/* Sums over ranks
 *
 * in_count inputs are combined, element by element and in order, into out_count equal outputs; an
 * output may be one of the inputs. Every input is read once and every output written once: sums of
 * fp32 and bf16 stay in registers on the way, everything else in a block of 1024 elements in the L1
 * cache.
 *
 * Written once on vectors of 32 bytes and compiled twice: for AVX2, and for what the command
 * line says (pairs of SSE2 or NEON registers). gcc -O2 vectorises no loop of unknown length by
 * itself. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "device/backend.h"
#include "device/device_internal.h"
#include "device/cpu/kernels_internal.h"

#define DTRAIN__MIX_BLOCK 1024u
#define DTRAIN__MIX static inline __attribute__((always_inline))

typedef float dtrain__mix_f __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint32_t dtrain__mix_u __attribute__((vector_size(32), aligned(1), may_alias));
typedef uint64_t dtrain__mix_l __attribute__((vector_size(32), aligned(1), may_alias));

typedef union dtrain__mix_block {
    float f[DTRAIN__MIX_BLOCK];
    uint32_t u[DTRAIN__MIX_BLOCK];
    uint64_t l[DTRAIN__MIX_BLOCK];
} dtrain__mix_block;

/* acc = acc OP x; x need not be aligned. */
#define DTRAIN__MIX_LOOP(T, V, OP)                                       \
    do {                                                                 \
        const size_t lanes = sizeof(V) / sizeof(T);                      \
        for (; i + lanes <= count; i += lanes) {                         \
            V *to = (V *)(void *)(acc + i);                              \
            *to = *to OP(*(const V *)(const void *)(x + i * sizeof(T))); \
        }                                                                \
        for (; i < count; i++) {                                         \
            T one;                                                       \
            memcpy(&one, x + i * sizeof one, sizeof one);                \
            acc[i] = acc[i] OP one;                                      \
        }                                                                \
    } while (0)

DTRAIN__MIX bool dtrain__mix_is_nan(float value)
{
    return (dtrain__f32_bits(value) & 0x7fffffffu) > 0x7f800000u; /* survives -ffast-math */
}

/* NaN wins, the first one; of equal numbers (+0 and -0) the lower rank's. */
DTRAIN__MIX void dtrain__mix_f32(float *acc, const char *x, size_t count, uint32_t op)
{
    size_t i = 0;
    if (op == DTRAIN_REDUCE_SUM || op == DTRAIN_REDUCE_MEAN)
        DTRAIN__MIX_LOOP(float, dtrain__mix_f, +);
    if (op == DTRAIN_REDUCE_PROD) DTRAIN__MIX_LOOP(float, dtrain__mix_f, *);
    for (; i < count; i++) {
        float one;
        memcpy(&one, x + i * sizeof one, sizeof one);
        const bool better = op == DTRAIN_REDUCE_MIN ? one < acc[i] : one > acc[i];
        if (!dtrain__mix_is_nan(acc[i]) && (dtrain__mix_is_nan(one) || better)) acc[i] = one;
    }
}

/* Unsigned arithmetic: integers wrap, and overflow is defined. */
#define DTRAIN__MIX_INTEGERS(name, U, S, V)                                                      \
    DTRAIN__MIX void name(U *acc, const char *x, size_t count, uint32_t op)                      \
    {                                                                                            \
        size_t i = 0;                                                                            \
        if (op == DTRAIN_REDUCE_SUM) DTRAIN__MIX_LOOP(U, V, +);                                  \
        if (op == DTRAIN_REDUCE_PROD) DTRAIN__MIX_LOOP(U, V, *);                                 \
        for (; i < count; i++) {                                                                 \
            U one;                                                                               \
            memcpy(&one, x + i * sizeof one, sizeof one);                                        \
            if (op == DTRAIN_REDUCE_MIN ? (S)one < (S)acc[i] : (S)one > (S)acc[i]) acc[i] = one; \
        }                                                                                        \
    }
DTRAIN__MIX_INTEGERS(dtrain__mix_i32, uint32_t, int32_t, dtrain__mix_u)
DTRAIN__MIX_INTEGERS(dtrain__mix_i64, uint64_t, int64_t, dtrain__mix_l)

/* Half precision goes through the CPU device's conversion kernel, which wants even addresses. */
static void dtrain__mix_convert(const void *x, dtrain_dtype x_dtype, void *y, dtrain_dtype y_dtype,
                                size_t count)
{
    dtrain_convert_args args;
    dtrain__job job;
    memset(&args, 0, sizeof args);
    memset(&job, 0, sizeof job);
    args.count = (int64_t)count;
    args.x = x;
    args.y = y;
    args.x_dtype = x_dtype;
    args.y_dtype = y_dtype;
    job.args = &args;
    dtrain__kernels_select()->convert(&job, 0, args.count, 0);
}

static void dtrain__mix_widen(float *to, const char *from, size_t count, dtrain_dtype dtype)
{
    uint16_t bits[DTRAIN__MIX_BLOCK];
    memcpy(bits, from, count * sizeof *bits);
    dtrain__mix_convert(bits, dtype, to, DTRAIN_DTYPE_F32, count);
}

DTRAIN__MIX void dtrain__mix_one(dtrain__mix_block *acc, const char *x, size_t count,
                                 dtrain_dtype dtype, uint32_t op)
{
    float wide[DTRAIN__MIX_BLOCK];
    switch (dtype) {
    case DTRAIN_DTYPE_F32: dtrain__mix_f32(acc->f, x, count, op); break;
    case DTRAIN_DTYPE_I32: dtrain__mix_i32(acc->u, x, count, op); break;
    case DTRAIN_DTYPE_I64: dtrain__mix_i64(acc->l, x, count, op); break;
    default:
        dtrain__mix_widen(wide, x, count, dtype);
        dtrain__mix_f32(acc->f, (const char *)wide, count, op);
        break;
    }
}

/* Any dtype and operation, elements [first, count). */
DTRAIN__MIX void dtrain__mix_blocks(const dtrain__mix_job *job, size_t first)
{
    const size_t unit = dtrain_dtype_bytes(job->dtype);
    const bool half = job->dtype == DTRAIN_DTYPE_BF16 || job->dtype == DTRAIN_DTYPE_F16;
    const float scale = 1.0f / (float)job->in_count;
    dtrain__mix_block acc;
    uint16_t bits[DTRAIN__MIX_BLOCK];
    const void *result = half ? (const void *)bits : &acc;
    for (size_t at = first; at < job->count; at += DTRAIN__MIX_BLOCK) {
        const size_t rest = job->count - at,
                     m = rest < DTRAIN__MIX_BLOCK ? rest : DTRAIN__MIX_BLOCK;
        if (half) dtrain__mix_widen(acc.f, job->in[0] + at * unit, m, job->dtype);
        else memcpy(&acc, job->in[0] + at * unit, m * unit);
        for (int i = 1; i < job->in_count; i++)
            dtrain__mix_one(&acc, job->in[i] + at * unit, m, job->dtype, job->op);
        if (job->op == DTRAIN_REDUCE_MEAN)
            for (size_t i = 0; i < m; i++) acc.f[i] *= scale;
        if (half) dtrain__mix_convert(acc.f, DTRAIN_DTYPE_F32, bits, job->dtype, m);
        for (int i = 0; i < job->out_count; i++) memcpy(job->out[i] + at * unit, result, m * unit);
    }
}

/* fp32 sums and means, 128 bytes at a time in registers; returns how many elements are done. The
 * compiler has to reload the pointers after every store, which could have changed them: that is
 * noticed only while everything is in L1, so two inputs and two outputs, the case of two ranks,
 * have theirs in locals. */
DTRAIN__MIX size_t dtrain__mix_sums(const dtrain__mix_job *job)
{
    const int in_count = job->in_count, out_count = job->out_count;
    const float scale = job->op == DTRAIN_REDUCE_MEAN ? 1.0f / (float)in_count : 1.0f;
    const bool two = in_count == 2 && out_count == 2;
    const char *const *in = job->in, *in0 = in[0], *in1 = in[1];
    char *const *out = job->out, *out0 = out[0], *out1 = two ? out[1] : NULL;
    const size_t end = job->count / 32 * 32;
    for (size_t at = 0; at < end; at += 32) {
        const dtrain__mix_f *x = (const dtrain__mix_f *)(const void *)(in0 + 4 * at);
        const dtrain__mix_f *z = (const dtrain__mix_f *)(const void *)(in1 + 4 * at);
        dtrain__mix_f *y = (dtrain__mix_f *)(void *)(out0 + 4 * at);
        dtrain__mix_f a = x[0] + z[0], b = x[1] + z[1], c = x[2] + z[2], d = x[3] + z[3];
        for (int i = 2; i < in_count; i++) {
            x = (const dtrain__mix_f *)(const void *)(in[i] + 4 * at);
            a += x[0], b += x[1], c += x[2], d += x[3];
        }
        a *= scale, b *= scale, c *= scale, d *= scale; /* times 1 changes no bit */
        y[0] = a, y[1] = b, y[2] = c, y[3] = d;
        if (two) {
            y = (dtrain__mix_f *)(void *)(out1 + 4 * at);
            y[0] = a, y[1] = b, y[2] = c, y[3] = d;
            continue;
        }
        for (int i = 1; i < out_count; i++) {
            y = (dtrain__mix_f *)(void *)(out[i] + 4 * at);
            y[0] = a, y[1] = b, y[2] = c, y[3] = d;
        }
    }
    return end;
}

/* The same for bf16, 32 bytes at a time. A word holds two numbers: one is its upper half, and the
 * lower half shifted up is the other, so that neither leaves its lane on the way. Rounding is that
 * of core/dtype.c, but for NaNs: theirs is the payload of a bf16, and nothing carries into it. */
DTRAIN__MIX size_t dtrain__mix_bf16_sums(const dtrain__mix_job *job)
{
    const float scale = job->op == DTRAIN_REDUCE_MEAN ? 1.0f / (float)job->in_count : 1.0f;
    const size_t end = job->count / 16 * 16;
    for (size_t at = 0; at < end; at += 16) {
        dtrain__mix_u x = *(const dtrain__mix_u *)(const void *)(job->in[0] + 2 * at);
        dtrain__mix_f low = (dtrain__mix_f)(x << 16), high = (dtrain__mix_f)(x & 0xffff0000u);
        for (int i = 1; i < job->in_count; i++) {
            x = *(const dtrain__mix_u *)(const void *)(job->in[i] + 2 * at);
            low += (dtrain__mix_f)(x << 16), high += (dtrain__mix_f)(x & 0xffff0000u);
        }
        low *= scale, high *= scale; /* times 1 changes no bit */
        dtrain__mix_u y = (dtrain__mix_u)low, upper = (dtrain__mix_u)high;
        y += 0x7fffu + (y >> 16 & 1u), upper += 0x7fffu + (upper >> 16 & 1u);
        y = y >> 16 | (upper & 0xffff0000u);
        for (int i = 0; i < job->out_count; i++)
            *(dtrain__mix_u *)(void *)(job->out[i] + 2 * at) = y;
    }
    return end;
}

DTRAIN__MIX void dtrain__mix_run(const dtrain__mix_job *job)
{
    const bool sums = job->op == DTRAIN_REDUCE_SUM || job->op == DTRAIN_REDUCE_MEAN;
    size_t done = 0;
    if (sums && job->dtype == DTRAIN_DTYPE_F32) done = dtrain__mix_sums(job);
    if (sums && job->dtype == DTRAIN_DTYPE_BF16) done = dtrain__mix_bf16_sums(job);
    dtrain__mix_blocks(job, done);
}

static void dtrain__mix_plain(const dtrain__mix_job *job) { dtrain__mix_run(job); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) static void dtrain__mix_avx2(const dtrain__mix_job *job)
{
    dtrain__mix_run(job);
}
#endif

DTRAIN__PRIVATE void dtrain__mix(const dtrain__mix_job *job)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        dtrain__mix_avx2(job);
        return;
    }
#endif
    dtrain__mix_plain(job);
}
