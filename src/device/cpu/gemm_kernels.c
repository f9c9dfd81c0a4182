/* Instruction sets
 *
 * A header cannot count on -march=native, so every hot function exists once for each instruction
 * set and is chosen at run time. DTRAIN__TARGET(t) marks such a function: compile it for t whatever
 * the command line says. The optimisation attributes are gcc's: fused multiply-add is off there in
 * -std=c99, and so is the vectoriser under -O2 before version 12. clang does both by itself. The
 * target has to come before optimize, or gcc 12 forgets the latter.
 *
 * What the functions share is DTRAIN__INLINE code without a target, which becomes part of each. */

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "device/cpu/gemm_internal.h"
#include "device/device.h"

#if defined(__clang__)
#define DTRAIN__TARGET(t) __attribute__((target(t)))
#define DTRAIN__BASELINE
#elif defined(__GNUC__)
#define DTRAIN__FAST "O3", "fp-contract=fast", "no-trapping-math", "no-math-errno"
#define DTRAIN__TARGET(t) __attribute__((target(t), optimize(DTRAIN__FAST)))
#ifdef DTRAIN_NO_SIMD /* gcc 12 joins the two loads of B's row with two of the next: past its end */
#define DTRAIN__BASELINE __attribute__((optimize(DTRAIN__FAST, "no-tree-vectorize")))
#else
#define DTRAIN__BASELINE __attribute__((optimize(DTRAIN__FAST)))
#endif
#endif
#define DTRAIN__INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define DTRAIN__UNROLL_TWICE _Pragma("clang loop unroll_count(2)")
#else
#define DTRAIN__UNROLL_TWICE _Pragma("GCC unroll 2")
#endif
#define DTRAIN__UNROLL_NOT

/* Vectors that may lie at any address. Without them a "vector" is a float: same code, plain C. */
#if defined(DTRAIN_NO_SIMD) || !(defined(__clang__) || __GNUC__ >= 8)
#define DTRAIN__VECTORS 0
#define DTRAIN__VECTOR_OF(n)
#else
#define DTRAIN__VECTORS 1
#define DTRAIN__VECTOR_OF(n) __attribute__((vector_size(4 * (n)), aligned(4), may_alias))
#endif

/* ---- exp and tanh
 *
 * x = n ln2 + r with |r| <= ln2 / 2, and e^r - 1 = r + r^2/2! + ... + r^7/7!, whose first missing
 * term is below 5.2e-9: rounding dominates. ln2 is split in two so that n * ln2_high is exact.
 * Scalar and free of branches: a loop over dtrain__exp vectorises at the width of its function. */

/* NaN passes. One select instead of two: gcc threads the second one into a branch. */
DTRAIN__INLINE float dtrain__limit(float x, float limit)
{
    return __builtin_fabsf(x) > limit ? __builtin_copysignf(limit, x) : x;
}

/* e^r - 1 of the remainder; n comes out as well. */
DTRAIN__INLINE float dtrain__expm1_reduced(float x, int32_t *n)
{
    float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds, n in the low bits */
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    *n = (int32_t)(bits - 0x4b400000u); /* of NaN too, where a cast to int would be undefined */
    float whole = (float)*n;
    float r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    return p * (r * r) + r;
}

DTRAIN__INLINE float dtrain__power_of_two(int32_t n)
{
    uint32_t bits = (uint32_t)(n + 127) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* e^x within 1.5 ulp; overflows to infinity, underflows gradually to 0, NaN stays NaN. The scale is
 * applied in two halves because neither 2^128 nor 2^-149 fits the exponent field. */
DTRAIN__INLINE float dtrain__exp(float x)
{
    int32_t n;
    float p = dtrain__expm1_reduced(dtrain__limit(x, 104), &n);
    float scale = dtrain__power_of_two(n >> 1);
    return (p * scale + scale) * dtrain__power_of_two(n - (n >> 1));
}

/* tanh x = e / (e + 2) with e = e^(2x) - 1 = 2^n p + (2^n - 1), which is accurate around 0 as well.
 * From |x| = 10 on the result rounds to one. */
DTRAIN__INLINE float dtrain__tanh(float x)
{
    int32_t n;
    float p = dtrain__expm1_reduced(dtrain__limit(2 * x, 20), &n);
    float scale = dtrain__power_of_two(n);
    float e = p * scale + (scale - 1);
    return e / (e + 2);
}

/* x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), written as x / (1 + e^-2u): one exp, and
 * no cancellation for negative x. The limit keeps e^-2u finite: gcc divides through an approximate
 * reciprocal under -ffast-math, and that turns 1 / infinity into NaN. */
DTRAIN__INLINE float dtrain__gelu(float x)
{
    int32_t n;
    float u = 0.797884561f * (x + 0.044715f * (x * x * x));
    float p = dtrain__expm1_reduced(dtrain__limit(-2 * u, 80), &n);
    float scale = dtrain__power_of_two(n);
    return x / (1 + (p * scale + scale));
}

/* d/dx of x s with s = 1 / (1 + e^-2u): s + x s (1 - s) 2u'. Outside +-10 it is 0 or 1. */
DTRAIN__INLINE float dtrain__gelu_slope(float x)
{
    int32_t n;
    x = dtrain__limit(x, 10);
    float u = 0.797884561f * (x + 0.044715f * (x * x * x));
    float p = dtrain__expm1_reduced(dtrain__limit(-2 * u, 80), &n);
    float scale = dtrain__power_of_two(n);
    float e = p * scale + scale, s = 1 / (1 + e);
    return s + x * (s * (e * s)) * (1.595769122f * (1 + 0.134145f * (x * x)));
}

/* ---- Matrix multiplication
 *
 * C is cut into rectangles, handed to the threads one by one. A rectangle is the work of one thread
 * with buffers of its own, over all of k in blocks of DTRAIN__KC (Goto and van de Geijn, "Anatomy
 * of high-performance matrix multiplication", 2008):
 *
 *          B block (kc, n)                for each block of k:
 *         +----+----+----+                  1. pack A (m, kc) into panels of `mr` rows       -> L2
 *      kc |    | j  |    |                  2. for each panel of `nr` columns of B:
 *         +----+----+----+                  3.   pack it                                     -> L1
 *  +----+ +----+----+----+                  4.   for each panel of A: a tile (mr, nr) of C
 *  |    | |    |    |    |                         stays in registers for kc steps,
 *  +----+ +----+----+----+                         C = alpha * tile + beta * C
 *  | i  | |    |tile|    |                  5.   after the last block, while the tile is in L1:
 *  +----+ +----+----+----+                         bias, activation, rounding
 *
 * A packed panel holds its `width` rows (or columns) side by side, k after k: element (r, p) is at
 * [p * width + r], so the kernel reads both panels from front to back.
 *
 * Every element of C is the same chain of operations wherever the rectangles are cut: k is never
 * split between threads and its blocks depend on k alone. So the bits do not depend on the threads.
 *
 * Packing costs a quarter of a cycle per element, more where it waits for memory, and is repeated
 * by each rectangle: 4 / m + 4 / n of the time and up. It pays even where the order in memory is
 * right: rows of B a power of two apart share a few cache sets and throw each other out of L1.
 *
 * Thin products (low-rank gradients: 16 columns or less, or a k of 16 or less) do so little with an
 * element of the large matrix that packing it would take most of the time; memory binds them.
 * Few columns: B is packed first, for thousands of k, and A is read once, in the order of memory,
 * the next eight rows on their way. Short k: B is packed first, too, and C is written by rows. The
 * chain of operations of an element is the same: so are its bits, whether it is computed by a
 * thin product or as part of another. */

static size_t dtrain__gemm_dtype_bytes(dtrain_dtype dtype)
{
    return dtype == DTRAIN_DTYPE_F32 ? 4 : 2;
}

DTRAIN__PRIVATE const void *dtrain__gemm_at(const void *data, dtrain_dtype dtype, int64_t index)
{
    return (const char *)data + index * (int64_t)dtrain__gemm_dtype_bytes(dtype);
}

/* ---- Half precision
 *
 * bf16 is shifts and adds, which vectorise in any target; fp16 has instructions since F16C, which
 * every processor with AVX2 has. The bits are those of core/dtype.c. */

typedef void (*dtrain__f16_load_fn)(float *dst, const uint16_t *src, int64_t n);
typedef void (*dtrain__f16_store_fn)(uint16_t *dst, const float *src, int64_t n);

static DTRAIN__UNUSED void dtrain__f16_load_scalar(float *dst, const uint16_t *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) dst[i] = dtrain_f16_to_f32(src[i]);
}

static DTRAIN__UNUSED void dtrain__f16_store_scalar(uint16_t *dst, const float *src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) dst[i] = dtrain_f32_to_f16(src[i]);
}

#if DTRAIN__VECTORS && defined(__x86_64__)
DTRAIN__TARGET("avx2,f16c")
static void dtrain__f16_load_f16c(float *dst, const uint16_t *src, int64_t n)
{
    for (; n >= 8; n -= 8, src += 8, dst += 8)
        _mm256_storeu_ps(dst, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)src)));
    if (n <= 0) return;
    uint16_t tail[8] = {0};
    float wide[8];
    memcpy(tail, src, (size_t)n * sizeof *src);
    _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)tail)));
    memcpy(dst, wide, (size_t)n * sizeof *dst);
}

DTRAIN__TARGET("avx2,f16c")
static void dtrain__f16_store_f16c(uint16_t *dst, const float *src, int64_t n)
{
    for (; n >= 8; n -= 8, src += 8, dst += 8)
        _mm_storeu_si128((__m128i *)(void *)dst,
                         _mm256_cvtps_ph(_mm256_loadu_ps(src), _MM_FROUND_TO_NEAREST_INT));
    if (n <= 0) return;
    uint16_t half[8];
    float tail[8] = {0};
    memcpy(tail, src, (size_t)n * sizeof *src);
    _mm_storeu_si128((__m128i *)(void *)half,
                     _mm256_cvtps_ph(_mm256_loadu_ps(tail), _MM_FROUND_TO_NEAREST_INT));
    memcpy(dst, half, (size_t)n * sizeof *dst);
}
#define DTRAIN__F16_OF_AVX f16c
#else
#define DTRAIN__F16_OF_AVX scalar
#endif

DTRAIN__INLINE void dtrain__gemm_load(float *dst, const void *src, dtrain_dtype dtype, int64_t n,
                                      dtrain__f16_load_fn f16_load)
{
    const uint16_t *half = (const uint16_t *)src;
    if (dtype == DTRAIN_DTYPE_F32) memcpy(dst, src, (size_t)n * sizeof(float));
    else if (dtype == DTRAIN_DTYPE_F16) f16_load(dst, half, n);
    else
        for (int64_t i = 0; i < n; i++) {
            const uint32_t bits = (uint32_t)half[i] << 16;
            memcpy(dst + i, &bits, sizeof bits);
        }
}

DTRAIN__INLINE void dtrain__gemm_store(void *dst, dtrain_dtype dtype, const float *src, int64_t n,
                                       dtrain__f16_store_fn f16_store)
{
    uint16_t *half = (uint16_t *)dst;
    if (dtype == DTRAIN_DTYPE_F32) memcpy(dst, src, (size_t)n * sizeof(float));
    else if (dtype == DTRAIN_DTYPE_F16) f16_store(half, src, n);
    else
        for (int64_t i = 0; i < n; i++) {
            uint32_t x;
            memcpy(&x, src + i, sizeof x);
            const uint32_t nan = (x & 0x7fffffffu) > 0x7f800000u ? ~0u : 0;
            const uint32_t rounded = x + 0x7fffu + (x >> 16 & 1u);
            half[i] = (uint16_t)(((rounded & ~nan) | ((x | 0x400000u) & nan)) >> 16);
        }
}

/* Whole rows of a tile have a width that the compiler knows. */
DTRAIN__INLINE void dtrain__load_tile(float *tile, int nr, const dtrain__rectangle *from,
                                      dtrain__f16_load_fn f16_load)
{
    for (int r = 0; r < from->rows; r++, tile += nr) {
        const void *row = dtrain__gemm_at(from->data, from->dtype, r * from->ld);
        if (from->cols == nr) dtrain__gemm_load(tile, row, from->dtype, nr, f16_load);
        else dtrain__gemm_load(tile, row, from->dtype, from->cols, f16_load);
    }
}

DTRAIN__INLINE void dtrain__store_tile(const dtrain__rectangle *to, const float *tile, int nr,
                                       dtrain__f16_store_fn f16_store)
{
    for (int r = 0; r < to->rows; r++, tile += nr) {
        void *row = (void *)(uintptr_t)dtrain__gemm_at(to->data, to->dtype, r * to->ld);
        if (to->cols == nr) dtrain__gemm_store(row, to->dtype, tile, nr, f16_store);
        else dtrain__gemm_store(row, to->dtype, tile, to->cols, f16_store);
    }
}

/* ---- Packing ----------------------------------------------------------------------------------*/

#if defined(__clang__)
#define DTRAIN__SHUFFLE __builtin_shufflevector
#else
typedef int32_t dtrain__order __attribute__((vector_size(16)));
#define DTRAIN__SHUFFLE(a, b, i, j, k, l) \
    __builtin_shuffle(a, b, __extension__(dtrain__order){i, j, k, l})
#endif

/* Four runs along k become k groups of four: out[p * width + r] = in[r][p]. */
DTRAIN__INLINE void dtrain__interleave4(float *out, int width, const float *const in[4], int k)
{
    int p = 0;
#if DTRAIN__VECTORS
    typedef float vec DTRAIN__VECTOR_OF(4);
    for (; p + 4 <= k; p += 4) {
        vec a = *(const vec *)(in[0] + p), b = *(const vec *)(in[1] + p);
        vec c = *(const vec *)(in[2] + p), d = *(const vec *)(in[3] + p);
        vec ab_low = DTRAIN__SHUFFLE(a, b, 0, 4, 1, 5);
        vec ab_high = DTRAIN__SHUFFLE(a, b, 2, 6, 3, 7);
        vec cd_low = DTRAIN__SHUFFLE(c, d, 0, 4, 1, 5);
        vec cd_high = DTRAIN__SHUFFLE(c, d, 2, 6, 3, 7);
        float *to = out + p * width;
        *(vec *)to = DTRAIN__SHUFFLE(ab_low, cd_low, 0, 1, 4, 5);
        *(vec *)(to + width) = DTRAIN__SHUFFLE(ab_low, cd_low, 2, 3, 6, 7);
        *(vec *)(to + 2 * width) = DTRAIN__SHUFFLE(ab_high, cd_high, 0, 1, 4, 5);
        *(vec *)(to + 3 * width) = DTRAIN__SHUFFLE(ab_high, cd_high, 2, 3, 6, 7);
    }
#endif
    for (; p < k; p++)
        for (int r = 0; r < 4; r++) out[p * width + r] = in[r][p];
}

/* The same for the last two rows of a panel whose width is not a multiple of four. */
DTRAIN__INLINE void dtrain__interleave2(float *out, int width, const float *const in[4], int k)
{
    for (int p = 0; p < k; p++) {
        out[p * width] = in[0][p];
        out[p * width + 1] = in[1][p];
    }
}

/* Rows beyond `count` repeat the last one: their products are never stored. */
DTRAIN__INLINE void dtrain__pack_runs(float *panel, int width, const dtrain__operand *x,
                                      int64_t index, int count, int64_t p, int k,
                                      dtrain__f16_load_fn f16_load)
{
    float converted[4][DTRAIN__KC];
    for (int r = 0; r < width; r += 4) {
        const float *in[4];
        for (int i = 0; i < 4; i++) {
            int64_t row = index + (r + i < count ? r + i : count - 1);
            const void *run = dtrain__gemm_at(x->data, x->dtype, row * x->ld + p);
            in[i] = (const float *)run;
            if (x->dtype == DTRAIN_DTYPE_F32) continue;
            dtrain__gemm_load(converted[i], run, x->dtype, k, f16_load);
            in[i] = converted[i];
        }
        if (r + 4 <= width) dtrain__interleave4(panel + r, width, in, k);
        else dtrain__interleave2(panel + r, width, in, k);
    }
}

/* Memory runs along the panel's width: one copy for each k. */
DTRAIN__INLINE void dtrain__pack_steps(float *panel, int width, const dtrain__operand *x,
                                       int64_t index, int count, int64_t p, int k,
                                       dtrain__f16_load_fn f16_load)
{
    const void *from = dtrain__gemm_at(x->data, x->dtype, p * x->ld + index);
    if (x->dtype == DTRAIN_DTYPE_F32 && count == width) {
        const float *step = (const float *)from;
        for (int i = 0; i < k; i++, step += x->ld, panel += width)
            memcpy(panel, step, (size_t)width * sizeof(float));
        return;
    }
    for (int i = 0; i < k; i++, panel += width) {
        if (count == width) dtrain__gemm_load(panel, from, x->dtype, width, f16_load);
        else dtrain__gemm_load(panel, from, x->dtype, count, f16_load);
        for (int r = count; r < width; r++) panel[r] = 0;
        from = dtrain__gemm_at(from, x->dtype, x->ld);
    }
}

DTRAIN__INLINE void dtrain__pack(float *panel, int width, const dtrain__operand *x, int64_t index,
                                 int count, int64_t p, int k, dtrain__f16_load_fn f16_load)
{
    if (x->along_k) dtrain__pack_runs(panel, width, x, index, count, p, k, f16_load);
    else dtrain__pack_steps(panel, width, x, index, count, p, k, f16_load);
}

DTRAIN__INLINE void dtrain__finish(float *c, int64_t ldc, int rows, int nr, const float *bias,
                                   float *aux, uint32_t activation)
{
    for (int r = 0; r < rows; r++, c += ldc) {
        if (bias)
            for (int j = 0; j < nr; j++) c[j] += bias[j];
        if (aux) memcpy(aux + r * ldc, c, (size_t)nr * sizeof(float));
        if (activation == DTRAIN_ACTIVATION_RELU)
            for (int j = 0; j < nr; j++) c[j] = c[j] < 0 ? 0 : c[j];
        else if (activation == DTRAIN_ACTIVATION_GELU)
            for (int j = 0; j < nr; j++) c[j] = dtrain__gelu(c[j]);
    }
}

DTRAIN__INLINE void dtrain__slope(float *c, const float *z, int count, uint32_t activation)
{
    if (activation == DTRAIN_ACTIVATION_RELU)
        for (int i = 0; i < count; i++) c[i] = z[i] > 0 ? c[i] : 0;
    else if (activation == DTRAIN_ACTIVATION_GELU)
        for (int i = 0; i < count; i++) c[i] *= dtrain__gelu_slope(z[i]);
}

/* ---- The kernel
 *
 * `rows` times two vectors of accumulators, each with a name of its own: as an array they would be
 * unrolled too late for the compiler to keep them in registers. Per step two loads of B and, for
 * each row, one broadcast of A and two multiply-adds. Unrolling hides the loop behind 12 of
 * them (5 % on Zen 3); with the 24 of AVX-512 it gains nothing and gcc 12 spills a vector. */

#define DTRAIN__ROWS4(DO) DO(0) DO(1) DO(2) DO(3)
#define DTRAIN__ROWS6(DO) DTRAIN__ROWS4(DO) DO(4) DO(5)
#define DTRAIN__ROWS8(DO) DTRAIN__ROWS6(DO) DO(6) DO(7)
#define DTRAIN__ROWS12(DO) DTRAIN__ROWS8(DO) DO(8) DO(9) DO(10) DO(11)

#define DTRAIN__ROW_ZERO(r)            \
    vec left##r = {0}, right##r = {0}; \
    __builtin_prefetch(c + r * ldc);
#define DTRAIN__ROW_STEP(r)   \
    left##r += a[r] * b_left; \
    right##r += a[r] * b_right;
#define DTRAIN__ROW_SET(r)                   \
    *(vec *)(c + r * ldc) = alpha * left##r; \
    *(vec *)(c + r * ldc + lanes) = alpha * right##r;
#define DTRAIN__ROW_ADD(r)                                                  \
    *(vec *)(c + r * ldc) = alpha * left##r + beta * *(vec *)(c + r * ldc); \
    *(vec *)(c + r * ldc + lanes) = alpha * right##r + beta * *(vec *)(c + r * ldc + lanes);

/* ---- Few columns
 *
 * A as it lies: eight rows of it times one vector of columns, k after k. 16 steps of each row are
 * copied side by side first: the loop needs one address then, and rows a power of two apart, which
 * throw each other out of L1, are read once. Rows beyond the last repeat it. */

enum { DTRAIN__THIN_ROWS = 8, DTRAIN__THIN_STEPS = 16 };

#define DTRAIN__THIN_ZERO(r) vec sum##r = {0};
#define DTRAIN__THIN_STEP(r) sum##r += at[r * DTRAIN__THIN_STEPS] * b_row;
#define DTRAIN__THIN_TAKE(r) *(vec *)(tile + r * lanes) = sum##r;

/* A transposed: two vectors along its rows times four columns of b, eight k at a time; in between
 * sums wait transposed, each column's side by side. */

#define DTRAIN__THIN_LOAD(j)                           \
    vec left##j = *(const vec *)(sums + j * sums_row), \
        right##j = *(const vec *)(sums + j * sums_row + lanes);
#define DTRAIN__THIN_ADD(j)   \
    left##j += b[j] * a_left; \
    right##j += b[j] * a_right;
#define DTRAIN__THIN_SAVE(j)                 \
    *(vec *)(sums + j * sums_row) = left##j; \
    *(vec *)(sums + j * sums_row + lanes) = right##j;

/* Eight rows ahead, past the end of A too, where it does nothing. Into L2: L1 has too few lines on
 * their way to hide the latency of memory. */
DTRAIN__INLINE void dtrain__thin_ahead(const float *a, int64_t lda, int count)
{
    const uintptr_t at = (uintptr_t)a + (uintptr_t)(DTRAIN__THIN_ROWS * lda) * sizeof *a;
    for (int i = 0; i < count; i += 16)
        __builtin_prefetch((const void *)(at + (uintptr_t)i * sizeof *a), 0, 2);
}

DTRAIN__INLINE void dtrain__thin_copy(float *cells, const float *a, int64_t lda, int64_t rows,
                                      int64_t steps)
{
    for (int r = 0; r < DTRAIN__THIN_ROWS; r++, cells += DTRAIN__THIN_STEPS) {
        if (steps == DTRAIN__THIN_STEPS) memcpy(cells, a, DTRAIN__THIN_STEPS * sizeof *a);
        else memcpy(cells, a, (size_t)steps * sizeof *a);
        dtrain__thin_ahead(a, lda, 1);
        if (r + 1 < rows) a += lda;
    }
}

/* c (rows, cols) = or += tile, whose element (i, j) is at i * row + j * column. */
DTRAIN__INLINE void dtrain__thin_store(const dtrain__thin *x, bool first, float *c,
                                       const float *tile, int64_t row, int64_t column, int64_t rows,
                                       int cols)
{
    for (int64_t i = 0; i < rows; i++, c += x->ldc)
        for (int j = 0; j < cols; j++) {
            const float sum = tile[i * row + j * column];
            c[j] = first ? sum : sum + c[j];
        }
}

/* `width` elements of `steps` rows of A from p and i on, in place or, at the edge, copied. */
DTRAIN__INLINE const float *dtrain__thin_strip(const dtrain__thin *x, int64_t p, int64_t i,
                                               int width, int steps, float *edge, int64_t *row)
{
    const float *a = x->a + p * x->lda + i;
    const int64_t left = x->rows - i;
    *row = x->lda;
    for (int s = 0; s < steps; s++) dtrain__thin_ahead(a + s * x->lda, x->lda, width);
    if (left >= width) return a;
    for (int s = 0; s < steps; s++)
        for (int r = 0; r < width; r++) edge[s * width + r] = r < left ? a[s * x->lda + r] : 0;
    *row = width;
    return edge;
}

#define DTRAIN__DEFINE_THIN(id, target, vector_lanes)                                             \
    target static void dtrain__thin_rows_##id(const dtrain__thin *x)                              \
    {                                                                                             \
        enum { lanes = vector_lanes };                                                            \
        typedef float vec DTRAIN__VECTOR_OF(lanes);                                               \
        for (int64_t i = 0; i < x->rows; i += DTRAIN__THIN_ROWS)                                  \
            for (int64_t p = 0, stop = 0; p < x->k; p = stop) {                                   \
                const int64_t rows = x->rows - i;                                                 \
                stop = x->k - p < x->k_step ? x->k : p + x->k_step;                               \
                for (int j = 0; j < x->cols; j += lanes) {                                        \
                    float cells[DTRAIN__THIN_ROWS * DTRAIN__THIN_STEPS],                          \
                        tile[(int)DTRAIN__THIN_ROWS * lanes];                                     \
                    const float *b = x->b + p * DTRAIN__THIN + j;                                 \
                    DTRAIN__ROWS8(DTRAIN__THIN_ZERO)                                              \
                    for (int64_t q = p; q < stop; q += DTRAIN__THIN_STEPS) {                      \
                        const int64_t steps =                                                     \
                            stop - q < DTRAIN__THIN_STEPS ? stop - q : (int)DTRAIN__THIN_STEPS;   \
                        dtrain__thin_copy(cells, x->a + i * x->lda + q, x->lda, rows, steps);     \
                        const float *at = cells, *const end = cells + steps;                      \
                        for (; at < end; at++, b += DTRAIN__THIN) {                               \
                            const vec b_row = *(const vec *)b;                                    \
                            DTRAIN__ROWS8(DTRAIN__THIN_STEP)                                      \
                        }                                                                         \
                    }                                                                             \
                    DTRAIN__ROWS8(DTRAIN__THIN_TAKE)                                              \
                    dtrain__thin_store(x, x->first &&p == 0, x->c + i * x->ldc + j, tile, lanes,  \
                                       1,                                                         \
                                       rows < DTRAIN__THIN_ROWS ? rows : (int)DTRAIN__THIN_ROWS,  \
                                       x->cols - j < lanes ? x->cols - j : lanes);                \
                }                                                                                 \
            }                                                                                     \
    }                                                                                             \
    target static void dtrain__thin_columns_##id(const dtrain__thin *x)                           \
    {                                                                                             \
        enum { lanes = vector_lanes, width = 2 * lanes };                                         \
        typedef float vec DTRAIN__VECTOR_OF(lanes);                                               \
        const int64_t sums_row = (x->rows + width - 1) / width * width;                           \
        float edge[(int)DTRAIN__THIN_ROWS * width];                                               \
        for (int64_t p = 0, stop = 0; p < x->k; p = stop) {                                       \
            stop = x->k - p < x->k_step ? x->k : p + x->k_step;                                   \
            memset(x->sums, 0, (size_t)((x->cols + 3) / 4 * 4 * sums_row) * sizeof *x->sums);     \
            for (int64_t q = p; q < stop; q += DTRAIN__THIN_ROWS)                                 \
                for (int64_t i = 0; i < x->rows; i += width) {                                    \
                    const int steps =                                                             \
                        stop - q < DTRAIN__THIN_ROWS ? (int)(stop - q) : DTRAIN__THIN_ROWS;       \
                    int64_t a_row;                                                                \
                    const float *strip = dtrain__thin_strip(x, q, i, width, steps, edge, &a_row); \
                    for (int j = 0; j < x->cols; j += 4) {                                        \
                        const float *a = strip, *b = x->b + q * DTRAIN__THIN + j;                 \
                        float *sums = x->sums + j * sums_row + i;                                 \
                        DTRAIN__ROWS4(DTRAIN__THIN_LOAD)                                          \
                        for (int s = 0; s < steps; s++, a += a_row, b += DTRAIN__THIN) {          \
                            const vec a_left = *(const vec *)a,                                   \
                                      a_right = *(const vec *)(a + lanes);                        \
                            DTRAIN__ROWS4(DTRAIN__THIN_ADD)                                       \
                        }                                                                         \
                        DTRAIN__ROWS4(DTRAIN__THIN_SAVE)                                          \
                    }                                                                             \
                }                                                                                 \
            dtrain__thin_store(x, x->first &&p == 0, x->c, x->sums, 1, sums_row, x->rows,         \
                               x->cols);                                                          \
        }                                                                                         \
    }

/* The functions of an instruction set but the kernel and the packing. */
#define DTRAIN__DEFINE_TILES(id, target, rows, nr, f16)                                        \
    target static void dtrain__finish_##id(float *c, int64_t ldc, int row_count,               \
                                           const float *bias, float *aux, uint32_t activation) \
    {                                                                                          \
        dtrain__finish(c, ldc, row_count, nr, bias, aux, activation);                          \
    }                                                                                          \
    target static void dtrain__slope_##id(float *c, const float *z, uint32_t activation)       \
    {                                                                                          \
        dtrain__slope(c, z, (rows) * (nr), activation);                                        \
    }                                                                                          \
    target static void dtrain__load_##id(float *tile, const dtrain__rectangle *from)           \
    {                                                                                          \
        dtrain__load_tile(tile, nr, from, dtrain__f16_load_##f16);                             \
    }                                                                                          \
    target static void dtrain__store_##id(const dtrain__rectangle *to, const float *tile)      \
    {                                                                                          \
        dtrain__store_tile(to, tile, nr, dtrain__f16_store_##f16);                             \
    }

#define DTRAIN__DEFINE_ISA(...) \
    DTRAIN__DEFINE_ISA2(__VA_ARGS__) /* expands f16 before it is glued */
#define DTRAIN__DEFINE_ISA2(id, target, vector_lanes, rows, unroll, f16)                           \
    target static void dtrain__kernel_##id(int64_t k, const float *a, const float *b, int64_t ldb, \
                                           float alpha, float beta, float *c, int64_t ldc)         \
    {                                                                                              \
        enum { lanes = vector_lanes };                                                             \
        typedef float vec DTRAIN__VECTOR_OF(lanes);                                                \
        DTRAIN__ROWS##rows(DTRAIN__ROW_ZERO) unroll for (; k > 0; k--, a += rows, b += ldb)        \
        {                                                                                          \
            vec b_left = *(const vec *)b, b_right = *(const vec *)(b + lanes);                     \
            DTRAIN__ROWS##rows(DTRAIN__ROW_STEP)                                                   \
        }                                                                                          \
        if (beta == 0) {                                                                           \
            DTRAIN__ROWS##rows(DTRAIN__ROW_SET)                                                    \
        } else {                                                                                   \
            DTRAIN__ROWS##rows(DTRAIN__ROW_ADD)                                                    \
        }                                                                                          \
    }                                                                                              \
    target static void dtrain__pack_a_##id(float *panel, const dtrain__operand *x, int64_t index,  \
                                           int count, int64_t p, int k)                            \
    {                                                                                              \
        dtrain__pack(panel, rows, x, index, count, p, k, dtrain__f16_load_##f16);                  \
    }                                                                                              \
    target static void dtrain__pack_b_##id(float *panel, const dtrain__operand *x, int64_t index,  \
                                           int count, int64_t p, int k)                            \
    {                                                                                              \
        dtrain__pack(panel, 2 * vector_lanes, x, index, count, p, k, dtrain__f16_load_##f16);      \
    }                                                                                              \
    DTRAIN__DEFINE_TILES(id, target, rows, 2 * vector_lanes, f16)                                  \
    DTRAIN__DEFINE_THIN(id, target, vector_lanes)                                                  \
    static const dtrain__isa dtrain__isa_##id = {#id,                                              \
                                                 rows,                                             \
                                                 2 * vector_lanes,                                 \
                                                 1,                                                \
                                                 1,                                                \
                                                 4,                                                \
                                                 dtrain__kernel_##id,                              \
                                                 dtrain__pack_a_##id,                              \
                                                 dtrain__pack_b_##id,                              \
                                                 dtrain__finish_##id,                              \
                                                 dtrain__slope_##id,                               \
                                                 dtrain__load_##id,                                \
                                                 dtrain__store_##id,                               \
                                                 NULL,                                             \
                                                 NULL,                                             \
                                                 dtrain__thin_rows_##id,                           \
                                                 dtrain__thin_columns_##id};

#if DTRAIN__VECTORS && (defined(__x86_64__) || defined(__i386__))
DTRAIN__DEFINE_ISA(avx512, DTRAIN__TARGET("avx512f,fma"), 16, 12, DTRAIN__UNROLL_NOT,
                   DTRAIN__F16_OF_AVX)
DTRAIN__DEFINE_ISA(avx2, DTRAIN__TARGET("avx2,fma"), 8, 6, DTRAIN__UNROLL_TWICE, DTRAIN__F16_OF_AVX)
#endif
#if DTRAIN__VECTORS && defined(__aarch64__)
DTRAIN__DEFINE_ISA(generic, DTRAIN__BASELINE, 4, 8, DTRAIN__UNROLL_NOT, scalar)
#elif DTRAIN__VECTORS
DTRAIN__DEFINE_ISA(generic, DTRAIN__BASELINE, 4, 4, DTRAIN__UNROLL_NOT, scalar)
#else
DTRAIN__DEFINE_ISA(generic, DTRAIN__BASELINE, 1, 4, DTRAIN__UNROLL_NOT, scalar)
#endif

/* ---- Pairs of bf16
 *
 * Where both operands are bf16 a panel's cell holds two neighbours in k, and one instruction
 * multiplies and adds both: VDPBF16PS of AVX512_BF16, a lane of a vector; TDPBF16PS of AMX, a tile
 * of 16 x 16 sums at once. Products are exact and sums are fp32, rounded to nearest even; denormals
 * count as zero, in and out, whatever MXCSR says. The order of additions is the instruction's own,
 * so the bits differ between the two and from those of widened operands; on one machine they depend
 * on the row of A, the column of B and k alone, like those of the other kernels.
 *
 *     B, and A for VDPBF16PS               A for AMX: tiles of 16 rows x 16 cells,
 *     [cell][width], as above              [cell / 16][row / 16][16 rows][16 cells]
 *
 * An odd end of k, and for AMX what is missing to 16 cells, is filled with zeros on both sides.
 *
 * AMX has state that the system gives to processes that ask (arch_prctl; signal frames grow by
 * 8 KiB), and per thread a configuration: loaded when a thread starts work on a product and
 * released after it, so that nobody else's context switches carry tiles. */

#if DTRAIN__VECTORS && defined(__x86_64__) && defined(__linux__) && \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11) && !defined(__CUDACC__)
#define DTRAIN__PAIRS 1
#else
#define DTRAIN__PAIRS 0
#endif

#if DTRAIN__PAIRS
#include <cpuid.h>
#include <sys/syscall.h>

#define DTRAIN__ON_PAIRS \
    DTRAIN__TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")
#define DTRAIN__ON_AMX \
    DTRAIN__TARGET("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define DTRAIN__PAIRS_INLINE \
    static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl")))

/* Full zero-masks: g++ warns of the undefined value that the plain intrinsic starts from. */
#define DTRAIN__LOW32(a, b) _mm512_maskz_unpacklo_epi32(0xffff, a, b)
#define DTRAIN__HIGH32(a, b) _mm512_maskz_unpackhi_epi32(0xffff, a, b)
#define DTRAIN__LOW64(a, b) _mm512_maskz_unpacklo_epi64(0xff, a, b)
#define DTRAIN__HIGH64(a, b) _mm512_maskz_unpackhi_epi64(0xff, a, b)
#define DTRAIN__LANES(a, b, which) _mm512_maskz_shuffle_i32x4(0xffff, a, b, which)

/* 16 x 16 cells: v[r] holds a row before and a column after. Within the four lanes of 128 bits
 * first, then the lanes. */
DTRAIN__PAIRS_INLINE void dtrain__transpose16(__m512i v[16])
{
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = DTRAIN__LOW32(v[i], v[i + 1]);
        t[i + 1] = DTRAIN__HIGH32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) { /* v[i + j], lane q: column 4 q + j of rows i ... i + 3 */
        v[i] = DTRAIN__LOW64(t[i], t[i + 2]);
        v[i + 1] = DTRAIN__HIGH64(t[i], t[i + 2]);
        v[i + 2] = DTRAIN__LOW64(t[i + 1], t[i + 3]);
        v[i + 3] = DTRAIN__HIGH64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        const __m512i even = DTRAIN__LANES(v[j], v[4 + j], 0x88);
        const __m512i odd = DTRAIN__LANES(v[j], v[4 + j], 0xdd);
        const __m512i even2 = DTRAIN__LANES(v[8 + j], v[12 + j], 0x88);
        const __m512i odd2 = DTRAIN__LANES(v[8 + j], v[12 + j], 0xdd);
        t[j] = DTRAIN__LANES(even, even2, 0x88);
        t[4 + j] = DTRAIN__LANES(odd, odd2, 0x88);
        t[8 + j] = DTRAIN__LANES(even, even2, 0xdd);
        t[12 + j] = DTRAIN__LANES(odd, odd2, 0xdd);
    }
    for (int i = 0; i < 16; i++) v[i] = t[i];
}

DTRAIN__PAIRS_INLINE const uint16_t *dtrain__bf16_at(const dtrain__operand *x, int64_t row,
                                                     int64_t column)
{
    return (const uint16_t *)x->data + row * x->ld + column;
}

/* 16 cells of one run along k, of which the first `k` elements exist. */
DTRAIN__PAIRS_INLINE __m512i dtrain__cells_of_run(const uint16_t *run, int k)
{
    return k >= 32 ? _mm512_loadu_si512(run)
                   : _mm512_maskz_loadu_epi16(k > 0 ? (1u << k) - 1u : 0u, run);
}

/* One cell of each of 16 neighbours, of which the first `count` exist; k: steps left. */
DTRAIN__PAIRS_INLINE __m512i dtrain__cells_of_steps(const uint16_t *step, int64_t ld, int count,
                                                    int k)
{
    const __mmask16 some = (__mmask16)(count >= 16 ? 0xffffu : count > 0 ? (1u << count) - 1u : 0u);
    const __m512i first = _mm512_maskz_cvtepu16_epi32(
        0xffff, _mm256_maskz_loadu_epi16(k > 0 ? some : (__mmask16)0, step));
    if (k < 2) return first;
    const __m512i second =
        _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_maskz_loadu_epi16(some, step + ld));
    return _mm512_maskz_or_epi32(0xffff, first, _mm512_maskz_slli_epi32(0xffff, second, 16));
}

/* The 16 x 16 cells from index and p on: v[c] is cell c of 16 indices where `by_cell`, else v[r] is
 * 16 cells of index r. What the operand does not have, count indices and k steps, is 0. */
DTRAIN__PAIRS_INLINE void dtrain__cells(__m512i v[16], const dtrain__operand *x, int64_t index,
                                        int count, int64_t p, int k, int by_cell)
{
    if (x->along_k)
        for (int r = 0; r < 16; r++)
            v[r] = r < count ? dtrain__cells_of_run(dtrain__bf16_at(x, index + r, p), k)
                             : _mm512_setzero_si512();
    else
        for (int c = 0; c < 16; c++) {
            const int left = k - 2 * c;
            v[c] = left > 0 ? dtrain__cells_of_steps(dtrain__bf16_at(x, p + 2 * c, index), x->ld,
                                                     count, left)
                            : _mm512_setzero_si512();
        }
    if (x->along_k == by_cell) dtrain__transpose16(v);
}

/* Cells side by side, `cells` of them. */
DTRAIN__PAIRS_INLINE void dtrain__pack_by_cell(float *panel, int width, const dtrain__operand *x,
                                               int64_t index, int count, int64_t p, int k,
                                               int cells)
{
    for (int c = 0; c < cells; c += 16)
        for (int r = 0; r < width; r += 16) {
            const int lanes = width - r < 16 ? width - r : 16,
                      some = cells - c < 16 ? cells - c : 16;
            float *to = panel + c * width + r;
            __m512i v[16];
            dtrain__cells(v, x, index + r, count - r, p + 2 * c, k - 2 * c, 1);
            if (lanes == 16 && some == 16)
                for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * width, v[i]);
            else
                for (int i = 0; i < 16; i++)
                    if (i < some)
                        _mm512_mask_storeu_epi32(to + i * width, (__mmask16)((1u << lanes) - 1u),
                                                 v[i]);
        }
}

DTRAIN__ON_PAIRS static void dtrain__pack_a_vdpbf16(float *panel, const dtrain__operand *x,
                                                    int64_t index, int count, int64_t p, int k)
{
    dtrain__pack_by_cell(panel, 12, x, index, count, p, k, (k + 1) / 2);
}

DTRAIN__ON_PAIRS static void dtrain__pack_b_vdpbf16(float *panel, const dtrain__operand *x,
                                                    int64_t index, int count, int64_t p, int k)
{
    dtrain__pack_by_cell(panel, 32, x, index, count, p, k, (k + 1) / 2);
}

DTRAIN__ON_PAIRS static void dtrain__pack_a_amx(float *panel, const dtrain__operand *x,
                                                int64_t index, int count, int64_t p, int k)
{
    for (; k > 0; k -= 32, p += 32)
        for (int r = 0; r < 32; r += 16, panel += 256) {
            __m512i v[16];
            dtrain__cells(v, x, index + r, count - r, p, k, 0);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(panel + i * 16, v[i]);
        }
}

DTRAIN__ON_PAIRS static void dtrain__pack_b_amx(float *panel, const dtrain__operand *x,
                                                int64_t index, int count, int64_t p, int k)
{
    dtrain__pack_by_cell(panel, 32, x, index, count, p, k, (k + 31) / 32 * 16);
}

/* The kernel of AVX-512 with pairs for numbers. */
#define DTRAIN__PAIR_STEP(r)                                                         \
    {                                                                                \
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(cells_a[r]);               \
        left##r = (vec)_mm512_dpbf16_ps((__m512)left##r, pair, (__m512bh)b_left);    \
        right##r = (vec)_mm512_dpbf16_ps((__m512)right##r, pair, (__m512bh)b_right); \
    }
DTRAIN__ON_PAIRS static void dtrain__kernel_vdpbf16(int64_t cells, const float *a, const float *b,
                                                    int64_t ldb, float alpha, float beta, float *c,
                                                    int64_t ldc)
{
    enum { lanes = 16 };
    typedef float vec DTRAIN__VECTOR_OF(16);
    typedef int32_t cell __attribute__((may_alias));
    DTRAIN__ROWS12(DTRAIN__ROW_ZERO)
    for (; cells > 0; cells--, a += 12, b += ldb) {
        const __m512i b_left = _mm512_loadu_si512(b), b_right = _mm512_loadu_si512(b + 16);
        const cell *cells_a = (const cell *)(const void *)a;
        DTRAIN__ROWS12(DTRAIN__PAIR_STEP)
    }
    if (beta == 0) {
        DTRAIN__ROWS12(DTRAIN__ROW_SET)
    } else {
        DTRAIN__ROWS12(DTRAIN__ROW_ADD)
    }
}

/* Eight tiles of 16 rows of 64 bytes: palette, start row, reserved, bytes of each, rows of each. */
static const uint8_t dtrain__amx_config[64] __attribute__((aligned(64))) = {
    1,  0, 0,  0, 0,  0,  0,  0,  0,  0,  0,  0,  0, 0, 0, 0, 64, 0, 64, 0, 64, 0,
    64, 0, 64, 0, 64, 0,  64, 0,  64, 0,  0,  0,  0, 0, 0, 0, 0,  0, 0,  0, 0,  0,
    0,  0, 0,  0, 16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0,  0, 0,  0};

DTRAIN__ON_AMX static void dtrain__amx_begin(void) { _tile_loadconfig(dtrain__amx_config); }
DTRAIN__ON_AMX static void dtrain__amx_end(void) { _tile_release(); }

/* 32 x 32 of C in tiles 0 to 3. Without scaling the tiles start from C and end there. */
DTRAIN__ON_AMX static void dtrain__kernel_amx(int64_t cells, const float *a, const float *b,
                                              int64_t ldb, float alpha, float beta, float *c,
                                              int64_t ldc)
{
    const int64_t b_row = ldb * 4, c_row = ldc * 4;
    const bool plain = alpha == 1 && (beta == 0 || beta == 1);
    for (int r = 0; r < 32; r++) {
        __builtin_prefetch(c + r * ldc, 1);
        __builtin_prefetch(c + r * ldc + 16, 1);
    }
    if (plain && beta == 1) {
        _tile_loadd(0, c, c_row);
        _tile_loadd(1, c + 16, c_row);
        _tile_loadd(2, c + 16 * ldc, c_row);
        _tile_loadd(3, c + 16 * ldc + 16, c_row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (; cells > 0; cells -= 16, a += 512, b += 16 * ldb) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, b_row);
        _tile_loadd(7, b + 16, b_row);
        _tile_loadd(5, a + 256, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float sums[32 * 32] __attribute__((aligned(64)));
    float *to = plain ? c : sums;
    const int64_t ld = plain ? ldc : 32;
    _tile_stored(0, to, ld * 4);
    _tile_stored(1, to + 16, ld * 4);
    _tile_stored(2, to + 16 * ld, ld * 4);
    _tile_stored(3, to + 16 * ld + 16, ld * 4);
    if (plain) return;
    for (int r = 0; r < 32; r++, c += ldc)
        for (int j = 0; j < 32; j++)
            c[j] = alpha * sums[r * 32 + j] + (beta == 0 ? 0 : beta * c[j]);
}

DTRAIN__DEFINE_TILES(vdpbf16, DTRAIN__ON_PAIRS, 12, 32, f16c)
DTRAIN__DEFINE_TILES(amx, DTRAIN__ON_PAIRS, 32, 32, f16c)

static const dtrain__isa dtrain__isa_vdpbf16 = {"avx512_bf16",
                                                12,
                                                32,
                                                2,
                                                1,
                                                8,
                                                dtrain__kernel_vdpbf16,
                                                dtrain__pack_a_vdpbf16,
                                                dtrain__pack_b_vdpbf16,
                                                dtrain__finish_vdpbf16,
                                                dtrain__slope_vdpbf16,
                                                dtrain__load_vdpbf16,
                                                dtrain__store_vdpbf16,
                                                NULL,
                                                NULL,
                                                NULL,
                                                NULL};
static const dtrain__isa dtrain__isa_amx = {"amx_bf16",
                                            32,
                                            32,
                                            2,
                                            16,
                                            32,
                                            dtrain__kernel_amx,
                                            dtrain__pack_a_amx,
                                            dtrain__pack_b_amx,
                                            dtrain__finish_amx,
                                            dtrain__slope_amx,
                                            dtrain__load_amx,
                                            dtrain__store_amx,
                                            dtrain__amx_begin,
                                            dtrain__amx_end,
                                            NULL,
                                            NULL};

static bool dtrain__has_vdpbf16(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16");
}

/* The processor has tiles, the system saves them, and this process may use them: it asks for that
 * here, and again is harmless. The answer is no, for example, where alternative signal stacks are
 * too small for the larger frames. */
static bool dtrain__has_amx(void)
{
    enum { OSXSAVE = 1 << 27, TILE_AND_BF16 = 1 << 24 | 1 << 22, TILE_STATE = 3 << 17 };
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    uint32_t a, b, c, d, low, high;
    if (!dtrain__has_vdpbf16() || !__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    __asm__ __volatile__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & TILE_STATE) != TILE_STATE || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d & TILE_AND_BF16) == TILE_AND_BF16 &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif /* DTRAIN__PAIRS */

/* NULL: products of bf16 are computed in fp32. AMD starts a VDPBF16PS as often as a multiply-add;
 * Intel every other cycle or less, a quarter as often (62 against 130 GFLOP/s of the widened
 * product on Emerald Rapids), and has AMX. */
DTRAIN__PRIVATE const dtrain__isa *dtrain__pairs_select(void)
{
#if DTRAIN__PAIRS
    if (dtrain__has_amx()) return &dtrain__isa_amx;
    if (dtrain__has_vdpbf16() && __builtin_cpu_is("amd")) return &dtrain__isa_vdpbf16;
#endif
    return NULL;
}

/* The best one this machine runs. */
DTRAIN__PRIVATE const dtrain__isa *dtrain__isa_select(void)
{
#if DTRAIN__VECTORS && (defined(__x86_64__) || defined(__i386__))
    if (__builtin_cpu_supports("avx512f")) return &dtrain__isa_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &dtrain__isa_avx2;
#endif
    return &dtrain__isa_generic;
}
