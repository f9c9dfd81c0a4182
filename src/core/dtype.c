/* Data types. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"

DTRAIN_API size_t dtrain_dtype_bytes(dtrain_dtype dtype)
{
    static const size_t bytes[] = {4, 2, 2, 4, 8, 8};
    return (uint32_t)dtype <= DTRAIN_DTYPE_F64 ? bytes[dtype] : 0;
}

DTRAIN_API const char *dtrain_dtype_name(dtrain_dtype dtype)
{
    static const char *const names[] = {"f32", "bf16", "f16", "i32", "i64", "f64"};
    return (uint32_t)dtype <= DTRAIN_DTYPE_F64 ? names[dtype] : "?";
}

/* Conversions are integer arithmetic on the bits: exact, independent of the rounding mode, of
 * flush-to-zero and of -ffast-math. Rounding to nearest even: add half of the last place kept,
 * minus one if that place is even, and truncate; a carry out of the mantissa correctly raises the
 * exponent. NaNs become quiet and keep the upper bits of their payload, as in x86 and ARM hardware:
 * the bulk conversions of device/ give the same bits. */

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
        /* A denormal result is a multiple of 2^-24: shift the mantissa with its hidden bit down by
         * 126 - exponent. All values below 2^-25 round to zero. */
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
