/* Kernels: division of work
 *
 *     launcher              checks arguments, cuts the work, wakes the pool
 *       -> dtrain__job        data of all threads of one kernel
 *         -> range function     the arithmetic on [begin, end), one per instruction set
 *
 * The bits of a result depend on the instruction set, never on the number of threads: one thread
 * takes a whole sum (rows, columns, heads), or chunks whose size depends only on the arguments have
 * partial sums, which are added in order. */

#define DTRAIN__INTRINSICS
#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/gemm_internal.h"
#include "device/cpu/kernels_internal.h"
#include "device/device.h"
#include "device/device_internal.h"

/* The text of the kernels is compiled once per instruction set: each inclusion sets DTRAIN__ISA.
 * (dtrain.h includes itself; such an inclusion sees only its last part.) */
#ifndef DTRAIN__KERNEL_TEXT
#define DTRAIN__KERNEL_TEXT "device/cpu/kernels/text.h"
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
/* The loops are vectors already: without these passes of gcc they are as fast, and compile in four
 * fifths of the time. */
#if defined(__OPTIMIZE__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("no-tree-vrp,no-tree-pre,no-gcse,no-code-hoisting,no-tree-slp-vectorize", \
                     "no-ipa-cp,no-ipa-vrp,no-thread-jumps")
#endif
#if DTRAIN__HAS_AVX2 || DTRAIN__HAS_AVX512
#define DTRAIN__ISA 2
#include DTRAIN__KERNEL_TEXT
#undef DTRAIN__ISA
#endif
#if DTRAIN__HAS_AVX512
#define DTRAIN__ISA 3
#include DTRAIN__KERNEL_TEXT
#undef DTRAIN__ISA
#endif
#if DTRAIN__HAS_GENERIC
#define DTRAIN__ISA 1
#include DTRAIN__KERNEL_TEXT
#undef DTRAIN__ISA
#endif
#if defined(__OPTIMIZE__) && !defined(__clang__)
#pragma GCC pop_options
#endif
/* clang-format off */
#if DTRAIN__HAS_SCALAR
DTRAIN__COLD /* only correctness counts: half the time and four fifths of the text of -O1 */
#define DTRAIN__ISA 0
#include DTRAIN__KERNEL_TEXT
#undef DTRAIN__ISA
DTRAIN__HOT
#endif
/* clang-format on */

/* Return an instance that this machine can run, the best for number 0; NULL: no more instances.
 * With DTRAIN_NATIVE the only instance follows the compiler's flags, which the whole program needs.
 */
#if defined(DTRAIN_NATIVE)
#define DTRAIN__RUNS(feature) true
#else
#define DTRAIN__RUNS(feature) __builtin_cpu_supports(feature)
#endif
        DTRAIN__PRIVATE const dtrain__kernels *
        dtrain__kernels_number(int number)
{
    int found = 0;
#if DTRAIN__HAS_AVX512
    if (DTRAIN__RUNS("avx512f") && DTRAIN__RUNS("avx512bw") && DTRAIN__RUNS("avx512vl") &&
        DTRAIN__RUNS("avx512dq") && found++ == number)
        return &dtrain__kernels_avx512;
#endif
#if DTRAIN__HAS_AVX2
    if (DTRAIN__RUNS("avx2") && DTRAIN__RUNS("fma") && found++ == number)
        return &dtrain__kernels_avx2; /* F16C came two generations earlier */
#endif
#if DTRAIN__HAS_GENERIC
    if (found++ == number) return &dtrain__kernels_generic;
#endif
#if DTRAIN__HAS_SCALAR
    if (found++ == number) return &dtrain__kernels_scalar;
#endif
    return NULL;
}

DTRAIN__PRIVATE const dtrain__kernels *dtrain__kernels_select(void)
{
    return dtrain__kernels_number(0);
}

/* Return NULL if products of bf16 are computed in fp32. */
DTRAIN__PRIVATE const dtrain__isa *dtrain__pairs_select(void)
{
#if DTRAIN__PAIRS
    if (dtrain__kernels_select() == &dtrain__kernels_avx512 && dtrain__has_amx())
        return &dtrain__isa_amx_avx512;
#endif
    return NULL;
}

/* Read the bits, so that -ffast-math cannot remove the test. */
static bool dtrain__is_nan(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & INT64_MAX) > 0x7ff0000000000000u;
}

/* As kernels/mix.h, one element at a time; buffers need no alignment. Integers add as unsigned U,
 * which wrap, and compare as signed S. */
#define DTRAIN__MIX(name, U, S)                                                              \
    static void name(const dtrain__mix_job *job)                                             \
    {                                                                                        \
        for (size_t at = 0; at < job->count; at++) {                                         \
            U sum, x;                                                                        \
            memcpy(&sum, job->in[0] + at * sizeof sum, sizeof sum);                          \
            for (int i = 1; i < job->in_count; i++) {                                        \
                memcpy(&x, job->in[i] + at * sizeof x, sizeof x);                            \
                if (job->op == DTRAIN_REDUCE_SUM || job->op == DTRAIN_REDUCE_MEAN) sum += x; \
                else if (job->op == DTRAIN_REDUCE_PROD) sum *= x;                            \
                else if (!dtrain__is_nan((double)sum) &&                                     \
                         (dtrain__is_nan((double)x) ||                                       \
                          (job->op == DTRAIN_REDUCE_MIN ? (S)x < (S)sum : (S)sum < (S)x)))   \
                    sum = x;                                                                 \
            }                                                                                \
            if (job->op == DTRAIN_REDUCE_MEAN) sum *= (U)(1.0 / job->in_count);              \
            for (int i = 0; i < job->out_count; i++)                                         \
                memcpy(job->out[i] + at * sizeof sum, &sum, sizeof sum);                     \
        }                                                                                    \
    }
DTRAIN__MIX(dtrain__mix_i32, uint32_t, int32_t)
DTRAIN__MIX(dtrain__mix_i64, uint64_t, int64_t)
DTRAIN__MIX(dtrain__mix_f64, double, double)

DTRAIN__PRIVATE void dtrain__mix(const dtrain__mix_job *job)
{
    if (job->dtype == DTRAIN_DTYPE_I32) dtrain__mix_i32(job);
    else if (job->dtype == DTRAIN_DTYPE_I64) dtrain__mix_i64(job);
    else if (job->dtype == DTRAIN_DTYPE_F64) dtrain__mix_f64(job);
    else dtrain__kernels_select()->mix(job, 0);
}
