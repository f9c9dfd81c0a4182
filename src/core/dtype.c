/* Data types. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"

static const struct {
    const char *name;
    size_t bytes;
} dtrain__dtypes[] = {{"f32", 4}, {"bf16", 2}, {"f16", 2}, {"i32", 4},
                      {"i64", 8}, {"f64", 8},  {"?", 0}};

/* Return the row of a type in the table; the last for an unknown one. */
static uint32_t dtrain__dtype_row(dtrain_dtype dtype)
{
    return (uint32_t)dtype <= DTRAIN_DTYPE_F64 ? (uint32_t)dtype : DTRAIN_DTYPE_F64 + 1u;
}

DTRAIN_API size_t dtrain_dtype_bytes(dtrain_dtype dtype)
{
    return dtrain__dtypes[dtrain__dtype_row(dtype)].bytes;
}

DTRAIN_API const char *dtrain_dtype_name(dtrain_dtype dtype)
{
    return dtrain__dtypes[dtrain__dtype_row(dtype)].name;
}

DTRAIN__PRIVATE uint32_t dtrain__f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

DTRAIN__PRIVATE float dtrain__f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Return false for NaN and infinity. The test reads the exponent bits, so that -ffast-math cannot
 * remove it. */
DTRAIN__PRIVATE bool dtrain__is_finite(float value)
{
    return (dtrain__f32_bits(value) & 0x7f800000u) != 0x7f800000u;
}

/* Conversions are integer arithmetic on the bits: exact, independent of the rounding mode, of
 * flush-to-zero and of -ffast-math. Rounding to nearest even = add half of the last place kept,
 * less one when that place is even, and cut; a carry out of the mantissa raises the exponent as it
 * should. NaNs become quiet and keep the upper bits of their payload, as x86 and ARM hardware does:
 * the bulk conversions of device/ give the same bits by other means. */

DTRAIN_API uint16_t dtrain_half_from_f32(dtrain_dtype dtype, float value)
{
    const uint32_t bits = dtrain__f32_bits(value);
    if (dtype == DTRAIN_DTYPE_BF16) {
        if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
        return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and more */
    if (magnitude < 0x38800000u) {
        /* a denormal result counts units of 2^-24: the mantissa, with its hidden bit, is shifted
         * down by 126 - exponent; below 2^-25 everything rounds to zero */
        const uint32_t shift = 126u - (magnitude >> 23);
        if (shift > 24) return (uint16_t)sign;
        const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        const uint32_t half = 1u << (shift - 1);
        return (uint16_t)(sign | (mantissa + half - 1u + (mantissa >> shift & 1u)) >> shift);
    }
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (rounded - 0x38000000u) >> 13); /* exponent bias 127 -> 15 */
}

DTRAIN_API float dtrain_half_to_f32(dtrain_dtype dtype, uint16_t bits)
{
    if (dtype == DTRAIN_DTYPE_BF16) return dtrain__f32_from_bits((uint32_t)bits << 16);
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = bits >> 10 & 0x1fu, mantissa = bits & 0x3ffu;
    if (exponent == 0x1fu) {
        const uint32_t quiet = mantissa ? 0x400000u : 0u;
        return dtrain__f32_from_bits(sign | 0x7f800000u | quiet | mantissa << 13);
    }
    if (exponent == 0) {
        if (mantissa == 0) return dtrain__f32_from_bits(sign);
        for (exponent = 1; !(mantissa & 0x400u); exponent--) mantissa <<= 1; /* may wrap: modular */
        mantissa &= 0x3ffu;
    }
    return dtrain__f32_from_bits(sign | (exponent + 112u) << 23 | mantissa << 13);
}
