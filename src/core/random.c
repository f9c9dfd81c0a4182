/* Random numbers: Philox4x32-10
 *
 * Ten rounds of two 32 x 32 -> 64 bit products; Weyl constants step the keys. The 128-bit counter
 * is (stream, counter), the 64-bit key is the seed. One call gives four independent words:
 *
 *     element index i of a stream  =  word i % 4 of block i / 4
 *
 * Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"

/* Draw four words: a pure function of the three arguments. */
DTRAIN__PRIVATE void dtrain__philox(uint64_t seed, uint64_t stream, uint64_t counter,
                                    uint32_t out[4])
{
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)DTRAIN__PHILOX_M0 * c0;
        const uint64_t p1 = (uint64_t)DTRAIN__PHILOX_M1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += DTRAIN__PHILOX_W0;
        k1 += DTRAIN__PHILOX_W1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Use 24 bits: every value is exact in fp32 and less than 1. */
static float dtrain__uniform_from_bits(uint32_t bits)
{
    return (float)(bits >> 8) * (1.0f / 16777216.0f);
}

DTRAIN_API float dtrain_random_uniform(uint64_t seed, uint64_t stream, uint64_t index)
{
    uint32_t block[4];
    dtrain__philox(seed, stream, index / 4, block);
    return dtrain__uniform_from_bits(block[index % 4]);
}

/* ---- Normal numbers
 *
 * Box and Muller (1958): from uniforms u in (0,1) and w in [0,1),
 *     sqrt(-2 ln u) cos(2 pi w)   and   sqrt(-2 ln u) sin(2 pi w)   are two independent N(0,1).
 * u = (word + 1/2) / 2^32 is never 0 or 1, so the result is finite and |z| <= 6.77.
 *
 * ln, sin and cos are short series in double, because libm's last bits differ between machines.
 * With only +, -, *, / and sqrt of IEEE 754 the bits are the same everywhere. (-ffast-math lets the
 * compiler reorder: in rare cases the bits then differ by 1 ulp of fp32.) */

/* ln x for normal x > 0: x = 2^e m with m in [sqrt(1/2), sqrt 2), ln m = 2 artanh((m-1)/(m+1)). */
static double dtrain__log(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffu) | (uint64_t)1023 << 52;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent++;
    }
    const double s = (m - 1) / (m + 1), q = s * s; /* q <= 0.0295: 8 terms reach 1e-14 */
    double p = 1.0 / 17;
    p = p * q + 1.0 / 15;
    p = p * q + 1.0 / 13;
    p = p * q + 1.0 / 11;
    p = p * q + 1.0 / 9;
    p = p * q + 1.0 / 7;
    p = p * q + 1.0 / 5;
    p = p * q + 1.0 / 3;
    return exponent * 0.69314718055994531 + 2 * s * (1 + q * p);
}

/* sin and cos of 2 pi turn: subtract the nearest quarter turn, exactly; |x| <= pi/4 remains. */
static void dtrain__sincos_turn(uint32_t turn, double *sine, double *cosine)
{
    const uint32_t quarter = (turn + 0x20000000u) >> 30;
    const int32_t rest = (int32_t)(turn - (quarter << 30)); /* modulo 2^32: in [-2^29, 2^29) */
    const double x = rest * (6.283185307179586 / 4294967296.0), q = x * x;
    double s = -1.0 / 39916800, c = 1.0 / 479001600; /* x^11 / 11!, x^12 / 12! */
    s = s * q + 1.0 / 362880;
    s = s * q - 1.0 / 5040;
    s = s * q + 1.0 / 120;
    s = s * q - 1.0 / 6;
    s = x + x * q * s;
    c = c * q - 1.0 / 3628800;
    c = c * q + 1.0 / 40320;
    c = c * q - 1.0 / 720;
    c = c * q + 1.0 / 24;
    c = c * q - 0.5;
    c = 1 + q * c;
    *sine = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
    *cosine = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
}

static void dtrain__normal_pair(uint32_t u, uint32_t turn, float out[2])
{
    double sine, cosine;
    const double radius = sqrt(-2 * dtrain__log(((double)u + 0.5) * (1.0 / 4294967296.0)));
    dtrain__sincos_turn(turn, &sine, &cosine);
    out[0] = (float)(radius * cosine);
    out[1] = (float)(radius * sine);
}

DTRAIN_API float dtrain_random_normal(uint64_t seed, uint64_t stream, uint64_t index)
{
    uint32_t block[4];
    float pair[2];
    dtrain__philox(seed, stream, index / 4, block);
    dtrain__normal_pair(block[index & 2], block[(index & 2) + 1], pair);
    return pair[index & 1];
}

/* Fill out (count) with the elements of a stream that begin at `first`: of N(0, scale^2), or
 * uniform in [-scale, scale). The bits are the same as of single draws, but each block of four is
 * made once (about 15 ns per element). */
DTRAIN__PRIVATE void dtrain__random_fill(uint64_t seed, uint64_t stream, uint64_t first,
                                         int64_t count, bool normal, float scale, float *out)
{
    uint32_t block[4];
    float four[4];
    for (int64_t i = 0; i < count;) {
        const uint64_t index = first + (uint64_t)i;
        dtrain__philox(seed, stream, index / 4, block);
        if (normal) dtrain__normal_pair(block[0], block[1], four);
        if (normal) dtrain__normal_pair(block[2], block[3], four + 2);
        for (uint64_t word = index % 4; word < 4 && i < count; word++)
            out[i++] = normal ? scale * four[word]
                              : -scale + 2 * scale * dtrain__uniform_from_bits(block[word]);
    }
}
