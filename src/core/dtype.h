/* Data types, random numbers. */

#pragma once

#include "core/api.h"

typedef enum dtrain_dtype {
    DTRAIN_DTYPE_NONE = 0,
    DTRAIN_DTYPE_F32 = 1,
    DTRAIN_DTYPE_BF16 = 2, /* the upper half of an fp32 */
    DTRAIN_DTYPE_F16 = 3,  /* IEEE 754 binary16 */
    DTRAIN_DTYPE_I32 = 4,
    DTRAIN_DTYPE_I64 = 5
} dtrain_dtype;

/* Bytes of one element, 0 for an unknown type; and its name ("f32"), "?" for an unknown type. */
DTRAIN_API size_t dtrain_dtype_bytes(dtrain_dtype dtype);
DTRAIN_API const char *dtrain_dtype_name(dtrain_dtype dtype);

/* Correctly rounded (nearest, ties to even) conversions. NaN stays NaN and keeps its sign, the
 * overflow of a finite number gives infinity, denormals are exact. */
DTRAIN_API uint16_t dtrain_f32_to_bf16(float value);
DTRAIN_API float dtrain_bf16_to_f32(uint16_t bits);
DTRAIN_API uint16_t dtrain_f32_to_f16(float value);
DTRAIN_API float dtrain_f16_to_f32(uint16_t bits);

/* True unless value is NaN or infinite; looks at exponent bits, so -ffast-math cannot remove it. */
DTRAIN_API bool dtrain_is_finite(float value);

/* Counter-based random numbers (Philox4x32-10; Salmon et al., "Parallel Random Numbers: As Easy as
 * 1, 2, 3", SC 2011): element `index` of stream (seed, stream) is a pure function of the three, so
 * any rank can draw any element of a tensor and gets the same bits. uniform: [0, 1); normal: N(0,
 * 1), |z| <= 6.77, from arithmetic and sqrt alone, so that the bits do not depend on a libm. */
DTRAIN_API void dtrain_philox(uint64_t seed, uint64_t stream, uint64_t counter, uint32_t out[4]);
DTRAIN_API float dtrain_random_uniform(uint64_t seed, uint64_t stream, uint64_t index);
DTRAIN_API float dtrain_random_normal(uint64_t seed, uint64_t stream, uint64_t index);
