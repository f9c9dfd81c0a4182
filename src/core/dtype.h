/* Data types and random numbers. */

#pragma once

#include "core/api.h"

typedef enum dtrain_dtype {
    DTRAIN_DTYPE_F32 = 0,  /* the type in a zeroed struct */
    DTRAIN_DTYPE_BF16 = 1, /* the upper half of an fp32 */
    DTRAIN_DTYPE_F16 = 2,  /* IEEE 754 binary16 */
    DTRAIN_DTYPE_I32 = 3,
    DTRAIN_DTYPE_I64 = 4,
    DTRAIN_DTYPE_F64 = 5 /* for collectives, and parameters of your own backward */
} dtrain_dtype;

/* How the values of several ranks are combined. */
typedef enum dtrain_reduce_op {
    DTRAIN_REDUCE_SUM = 1,
    /* sum * (1 / ranks), one factor, in fp32 (of F64 in fp64), before the only rounding; no
     * integers */
    DTRAIN_REDUCE_MEAN = 2,
    DTRAIN_REDUCE_MIN = 3,
    DTRAIN_REDUCE_MAX = 4,
    DTRAIN_REDUCE_PROD = 5
} dtrain_reduce_op;

/* Return the bytes of one element, 0 for an unknown type. */
DTRAIN_API size_t dtrain_dtype_bytes(dtrain_dtype dtype);
/* Return the name of a type, "f32" for example, or "?" for an unknown one. */
DTRAIN_API const char *dtrain_dtype_name(dtrain_dtype dtype);

/* Convert fp32 to BF16 or F16, rounding to nearest, ties to even. NaN stays NaN and keeps its sign,
 * a finite number that overflows becomes infinite, denormals are exact. */
DTRAIN_API uint16_t dtrain_half_from_f32(dtrain_dtype dtype, float value);
/* Convert BF16 or F16 to fp32, which is exact. */
DTRAIN_API float dtrain_half_to_f32(dtrain_dtype dtype, uint16_t bits);

/* Draw element `index` of a stream of uniform numbers in [0, 1). Random numbers are counter-based
 * (Philox4x32-10): a pure function of the three arguments. So any rank can draw any element of a
 * tensor, and all ranks get the same bits. */
DTRAIN_API float dtrain_random_uniform(uint64_t seed, uint64_t stream, uint64_t index);
/* Draw element `index` of a stream of N(0, 1), |z| <= 6.77. Only arithmetic and sqrt are used, so
 * the bits do not depend on a libm. */
DTRAIN_API float dtrain_random_normal(uint64_t seed, uint64_t stream, uint64_t index);
