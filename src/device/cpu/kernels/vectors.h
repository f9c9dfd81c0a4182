/* Vectors, and what all kernels have in common.
 *
 * The header includes itself with DTRAIN__ISA = 3 (AVX-512), 2 (AVX2 + FMA + F16C), 1 (four-lane
 * vector extensions: SSE2, NEON, ...) and 0 (plain C). Every name below that is a macro gets the
 * suffix of the instance, so the text reads like ordinary C and debuggers see ordinary functions.
 *
 * A kernel body works on the range [begin, end) of its job (elements, rows, columns or items, see
 * the launchers): the pool's threads take disjoint ranges. No sum crosses a range boundary, so the
 * bits do not depend on the number of threads. Explicit vectors instead of the auto-vectoriser:
 * gcc 12 at -O2 leaves loops of unknown length scalar.
 *
 * Tails: vload_n / vstore_n touch the first min(n, lanes) elements only, lanes beyond read as 0.
 * One well predicted branch per vector; every element goes through the same instructions, wherever
 * the ranges are cut. */

#define DTRAIN__GLUE2(name, suffix) name##_##suffix
#define DTRAIN__GLUE(name, suffix) DTRAIN__GLUE2(name, suffix)
#define DTRAIN__INSTANCE(name) DTRAIN__GLUE(name, DTRAIN__SUFFIX)

#if DTRAIN__ISA == 3
#define DTRAIN__SUFFIX avx512
#define DTRAIN__W 16
#define DTRAIN__ON __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#elif DTRAIN__ISA == 2
#define DTRAIN__SUFFIX avx2
#define DTRAIN__W 8
#define DTRAIN__ON __attribute__((target("avx2,fma,f16c")))
#elif DTRAIN__ISA == 1
#define DTRAIN__SUFFIX generic
#define DTRAIN__W 4
#define DTRAIN__ON
#else
#define DTRAIN__SUFFIX scalar
#define DTRAIN__W 1
#define DTRAIN__ON
#endif

#define dtrain__v DTRAIN__INSTANCE(dtrain__v)
#define dtrain__vi DTRAIN__INSTANCE(dtrain__vi)
#define dtrain__vu DTRAIN__INSTANCE(dtrain__vu)
#define dtrain__vd DTRAIN__INSTANCE(dtrain__vd)
#define dtrain__vset DTRAIN__INSTANCE(dtrain__vset)
#define dtrain__vfma DTRAIN__INSTANCE(dtrain__vfma)
#define dtrain__vmax DTRAIN__INSTANCE(dtrain__vmax)
#define dtrain__vmin DTRAIN__INSTANCE(dtrain__vmin)
#define dtrain__vsqrt DTRAIN__INSTANCE(dtrain__vsqrt)
#define dtrain__vround DTRAIN__INSTANCE(dtrain__vround)
#define dtrain__vtofloat DTRAIN__INSTANCE(dtrain__vtofloat)
#define dtrain__vbits DTRAIN__INSTANCE(dtrain__vbits)
#define dtrain__vfrombits DTRAIN__INSTANCE(dtrain__vfrombits)
#define dtrain__viota DTRAIN__INSTANCE(dtrain__viota)
#define dtrain__vless DTRAIN__INSTANCE(dtrain__vless)
#define dtrain__viless DTRAIN__INSTANCE(dtrain__viless)
#define dtrain__viset DTRAIN__INSTANCE(dtrain__viset)
#define dtrain__vkeep DTRAIN__INSTANCE(dtrain__vkeep)
#define dtrain__vselect DTRAIN__INSTANCE(dtrain__vselect)
#define dtrain__vload DTRAIN__INSTANCE(dtrain__vload)
#define dtrain__vstore DTRAIN__INSTANCE(dtrain__vstore)
#define dtrain__vload_n DTRAIN__INSTANCE(dtrain__vload_n)
#define dtrain__vstore_n DTRAIN__INSTANCE(dtrain__vstore_n)
#define dtrain__vpart_load DTRAIN__INSTANCE(dtrain__vpart_load)
#define dtrain__vpart_store DTRAIN__INSTANCE(dtrain__vpart_store)
#define dtrain__vfirst DTRAIN__INSTANCE(dtrain__vfirst)
#define dtrain__vsum DTRAIN__INSTANCE(dtrain__vsum)
#define dtrain__vtop DTRAIN__INSTANCE(dtrain__vtop)
#define dtrain__vexp DTRAIN__INSTANCE(dtrain__vexp)
#define dtrain__vgelu DTRAIN__INSTANCE(dtrain__vgelu)
#define dtrain__vgelu_slope DTRAIN__INSTANCE(dtrain__vgelu_slope)

/* Signatures: a helper is inlined into its caller, a kernel is called through the table. */
#define DTRAIN__VECTOR static inline __attribute__((always_inline, unused)) DTRAIN__ON
#define DTRAIN__KERNEL static DTRAIN__ON

/* ---- Vectors ----------------------------------------------------------------------------------*/

#if DTRAIN__W > 1
typedef float dtrain__v __attribute__((vector_size(4 * DTRAIN__W)));
typedef int32_t dtrain__vi __attribute__((vector_size(4 * DTRAIN__W)));
typedef float dtrain__vu __attribute__((vector_size(4 * DTRAIN__W), aligned(4), may_alias));
#else
typedef float dtrain__v, dtrain__vu;
typedef int32_t dtrain__vi;
#endif

DTRAIN__VECTOR dtrain__v dtrain__vload(const float *p) { return *(const dtrain__vu *)p; }

DTRAIN__VECTOR void dtrain__vstore(float *p, dtrain__v v) { *(dtrain__vu *)p = v; }

#if DTRAIN__W > 1
DTRAIN__VECTOR dtrain__vi dtrain__vbits(dtrain__v v) { return (dtrain__vi)v; }
DTRAIN__VECTOR dtrain__v dtrain__vfrombits(dtrain__vi v) { return (dtrain__v)v; }
DTRAIN__VECTOR dtrain__vi dtrain__vless(dtrain__v a, dtrain__v b) { return (dtrain__vi)(a < b); }
DTRAIN__VECTOR dtrain__vi dtrain__viless(dtrain__vi a, dtrain__vi b) { return (dtrain__vi)(a < b); }
DTRAIN__VECTOR dtrain__v dtrain__vtofloat(dtrain__vi v)
{
    return __builtin_convertvector(v, dtrain__v);
}
#else
DTRAIN__VECTOR dtrain__vi dtrain__vbits(dtrain__v v) { return (int32_t)dtrain__f32_bits(v); }
DTRAIN__VECTOR dtrain__v dtrain__vfrombits(dtrain__vi v)
{
    return dtrain__f32_from_bits((uint32_t)v);
}
DTRAIN__VECTOR dtrain__vi dtrain__vless(dtrain__v a, dtrain__v b) { return -(a < b); }
DTRAIN__VECTOR dtrain__vi dtrain__viless(dtrain__vi a, dtrain__vi b) { return -(a < b); }
DTRAIN__VECTOR dtrain__v dtrain__vtofloat(dtrain__vi v) { return (float)v; }
#endif

/* Masks are all ones or all zeros per lane. */
DTRAIN__VECTOR dtrain__v dtrain__vkeep(dtrain__v v, dtrain__vi mask)
{
    return dtrain__vfrombits(dtrain__vbits(v) & mask);
}

DTRAIN__VECTOR dtrain__v dtrain__vselect(dtrain__vi mask, dtrain__v yes, dtrain__v no)
{
    return dtrain__vfrombits((dtrain__vbits(yes) & mask) | (dtrain__vbits(no) & ~mask));
}

/* What the compilers do not make out of operators: fused multiply-add (-std=c99 forbids
 * contracting), broadcast, max and min with a known NaN rule (the second operand wins), rounding to
 * an integer. */
#if DTRAIN__ISA == 3
/* Full zero-masks where the plain intrinsic starts from an undefined value: g++ warns about
 * those. */
DTRAIN__VECTOR dtrain__v dtrain__vset(float x) { return (dtrain__v)_mm512_set1_ps(x); }
DTRAIN__VECTOR dtrain__vi dtrain__viset(int32_t x) { return (dtrain__vi)_mm512_set1_epi32(x); }
DTRAIN__VECTOR dtrain__v dtrain__vfma(dtrain__v a, dtrain__v b, dtrain__v c)
{
    return (dtrain__v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
DTRAIN__VECTOR dtrain__v dtrain__vmax(dtrain__v a, dtrain__v b)
{
    return (dtrain__v)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
}
DTRAIN__VECTOR dtrain__v dtrain__vmin(dtrain__v a, dtrain__v b)
{
    return (dtrain__v)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
}
DTRAIN__VECTOR dtrain__v dtrain__vsqrt(dtrain__v a)
{
    return (dtrain__v)_mm512_maskz_sqrt_ps(0xffff, (__m512)a);
}
DTRAIN__VECTOR dtrain__vi dtrain__vround(dtrain__v a)
{
    return (dtrain__vi)_mm512_maskz_cvtps_epi32(0xffff, (__m512)a);
}
DTRAIN__VECTOR dtrain__v dtrain__vpart_load(const float *p, int64_t n)
{
    return (dtrain__v)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
}
DTRAIN__VECTOR void dtrain__vpart_store(float *p, dtrain__v v, int64_t n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), (__m512)v);
}
#elif DTRAIN__ISA == 2
DTRAIN__VECTOR dtrain__v dtrain__vset(float x) { return (dtrain__v)_mm256_set1_ps(x); }
DTRAIN__VECTOR dtrain__vi dtrain__viset(int32_t x) { return (dtrain__vi)_mm256_set1_epi32(x); }
DTRAIN__VECTOR dtrain__v dtrain__vfma(dtrain__v a, dtrain__v b, dtrain__v c)
{
    return (dtrain__v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
DTRAIN__VECTOR dtrain__v dtrain__vmax(dtrain__v a, dtrain__v b)
{
    return (dtrain__v)_mm256_max_ps((__m256)a, (__m256)b);
}
DTRAIN__VECTOR dtrain__v dtrain__vmin(dtrain__v a, dtrain__v b)
{
    return (dtrain__v)_mm256_min_ps((__m256)a, (__m256)b);
}
DTRAIN__VECTOR dtrain__v dtrain__vsqrt(dtrain__v a) { return (dtrain__v)_mm256_sqrt_ps((__m256)a); }
DTRAIN__VECTOR dtrain__vi dtrain__vround(dtrain__v a)
{
    return (dtrain__vi)_mm256_cvtps_epi32((__m256)a);
}
#else
DTRAIN__VECTOR dtrain__v dtrain__vset(float x)
{
    float lanes[DTRAIN__W];
    for (int i = 0; i < DTRAIN__W; i++) lanes[i] = x;
    return dtrain__vload(lanes);
}
DTRAIN__VECTOR dtrain__vi dtrain__viset(int32_t x)
{
    return dtrain__vbits(dtrain__vset(dtrain__f32_from_bits((uint32_t)x)));
}
DTRAIN__VECTOR dtrain__v dtrain__vfma(dtrain__v a, dtrain__v b, dtrain__v c) { return a * b + c; }
DTRAIN__VECTOR dtrain__v dtrain__vmax(dtrain__v a, dtrain__v b)
{
    return dtrain__vselect(dtrain__vless(b, a), a, b);
}
DTRAIN__VECTOR dtrain__v dtrain__vmin(dtrain__v a, dtrain__v b)
{
    return dtrain__vselect(dtrain__vless(a, b), a, b);
}
DTRAIN__VECTOR dtrain__v dtrain__vsqrt(dtrain__v a)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, a);
    for (int i = 0; i < DTRAIN__W; i++) lanes[i] = sqrtf(lanes[i]);
    return dtrain__vload(lanes);
}
/* Halves go away from zero here: any of the two neighbours is good enough for exp. */
DTRAIN__VECTOR dtrain__vi dtrain__vround(dtrain__v a)
{
    const dtrain__vi sign = dtrain__vbits(a) & dtrain__viset(INT32_MIN);
    const dtrain__v half = dtrain__vfrombits(dtrain__vbits(dtrain__vset(0.5f)) | sign);
#if DTRAIN__W > 1
    return __builtin_convertvector(a + half, dtrain__vi);
#else
    return a < 1e9f ? (int32_t)(a + half) : 0; /* NaN: any integer, but no undefined conversion */
#endif
}
#endif

DTRAIN__VECTOR dtrain__vi dtrain__viota(void)
{
    static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    dtrain__vi v;
    memcpy(&v, lanes, sizeof v);
    return v;
}

/* The first n lanes of v, 0 in the others. */
DTRAIN__VECTOR dtrain__v dtrain__vfirst(dtrain__v v, int64_t n)
{
    if (n >= DTRAIN__W) return v;
    return dtrain__vkeep(v, dtrain__viless(dtrain__viota(), dtrain__viset((int32_t)n)));
}

#if DTRAIN__ISA == 2
DTRAIN__VECTOR dtrain__v dtrain__vpart_load(const float *p, int64_t n)
{
    const dtrain__vi mask = dtrain__viless(dtrain__viota(), dtrain__viset((int32_t)n));
    return (dtrain__v)_mm256_maskload_ps(p, (__m256i)mask);
}
DTRAIN__VECTOR void dtrain__vpart_store(float *p, dtrain__v v, int64_t n)
{
    const dtrain__vi mask = dtrain__viless(dtrain__viota(), dtrain__viset((int32_t)n));
    _mm256_maskstore_ps(p, (__m256i)mask, (__m256)v);
}
#elif DTRAIN__ISA < 2
DTRAIN__VECTOR dtrain__v dtrain__vpart_load(const float *p, int64_t n)
{
    float lanes[DTRAIN__W] = {0};
    for (int64_t i = 0; i < n && i < DTRAIN__W; i++) lanes[i] = p[i];
    return dtrain__vload(lanes);
}
DTRAIN__VECTOR void dtrain__vpart_store(float *p, dtrain__v v, int64_t n)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, v);
    for (int64_t i = 0; i < n && i < DTRAIN__W; i++) p[i] = lanes[i];
}
#endif

DTRAIN__VECTOR dtrain__v dtrain__vload_n(const float *p, int64_t n)
{
    return n >= DTRAIN__W ? dtrain__vload(p) : dtrain__vpart_load(p, n);
}

DTRAIN__VECTOR void dtrain__vstore_n(float *p, dtrain__v v, int64_t n)
{
    if (n >= DTRAIN__W) dtrain__vstore(p, v);
    else dtrain__vpart_store(p, v, n);
}

/* Sum and maximum over the lanes, always as the same tree. */
DTRAIN__VECTOR float dtrain__vsum(dtrain__v v)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, v);
    for (int half = DTRAIN__W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

DTRAIN__VECTOR float dtrain__vtop(dtrain__v v)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, v);
    float top = lanes[0];
    for (int i = 1; i < DTRAIN__W; i++) top = lanes[i] > top ? lanes[i] : top;
    return top;
}

/* ---- exp, GELU ----------------------------------------------------------------------------------
 *
 * e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln2 / 2, and e^r = 1 + r + r^2 q(r), q of degree 4
 * fitted to 3e-9: within 1 ulp for |x| < 10, 4.5 near 87. The terms are paired (Estrin) instead of
 * chained (Horner): a loop of exps is bound by how far the core looks ahead, so the short chain
 * wins. Below -87.7 the clamp gives n = -127, whose scale is exactly 0 (a masked score must weigh
 * nothing); above 88 the result stays e^88, callers subtract a maximum first. NaN passes. */
DTRAIN__VECTOR dtrain__v dtrain__vexp(dtrain__v x)
{
    x = dtrain__vmin(dtrain__vset(88.0f), dtrain__vmax(dtrain__vset(-88.0f), x));
    const dtrain__vi n = dtrain__vround(x * dtrain__vset(1.44269504f));
    const dtrain__v whole = dtrain__vtofloat(n);
#if DTRAIN__ISA >= 2
    const dtrain__v r = dtrain__vfma(whole, dtrain__vset(-0.693147181f), x);
#else /* without a fused operation ln 2 is split, so that n * high is exact */
    const dtrain__v r =
        x - whole * dtrain__vset(0.693359375f) + whole * dtrain__vset(2.12194440e-4f);
#endif
    const dtrain__v square = r * r;
    dtrain__v high = dtrain__vfma(r, dtrain__vset(0.00836874792f), dtrain__vset(0.0416683909f));
    high = dtrain__vfma(square, dtrain__vset(0.00138145499f), high);
    const dtrain__v low = dtrain__vfma(r, dtrain__vset(0.166665204f), dtrain__vset(0.499999934f));
    const dtrain__v q = dtrain__vfma(high, square, low);
    const dtrain__v p = dtrain__vfma(q, square, r + dtrain__vset(1.0f));
    return p * dtrain__vfrombits((n + dtrain__viset(127)) << 23);
}

#define DTRAIN__GELU_A 0.797884561f /* sqrt(2/pi) */
#define DTRAIN__GELU_B 0.044715f

/* y = x/2 (1 + tanh u), u = A (x + B x^3), as x / (1 + e^-2u): no cancellation for negative x. */
DTRAIN__VECTOR dtrain__v dtrain__vgelu(dtrain__v x)
{
    const dtrain__v limit =
        dtrain__vset(11.0f); /* x^3 must not overflow; beyond it e^-2u is settled */
    const dtrain__v c = dtrain__vmin(limit, dtrain__vmax(-limit, x));
    const dtrain__v cubic = dtrain__vfma(c * c * c, dtrain__vset(DTRAIN__GELU_B), c);
    return x / (dtrain__vset(1.0f) + dtrain__vexp(cubic * dtrain__vset(-2 * DTRAIN__GELU_A)));
}

/* With q = e^-2u and w = 1 / (1 + q): dy/dx = w + x w (1 - w) 2u' = w (1 + x q w 2u'), where
 * u' = A (1 + 3 B x^2). The tails keep their relative accuracy; outside +-10 it is 0 or 1. */
DTRAIN__VECTOR dtrain__v dtrain__vgelu_slope(dtrain__v x)
{
    const dtrain__v limit = dtrain__vset(10.0f), one = dtrain__vset(1.0f);
    x = dtrain__vmin(limit, dtrain__vmax(-limit, x));
    const dtrain__v square = x * x;
    const dtrain__v cubic = dtrain__vfma(square * x, dtrain__vset(DTRAIN__GELU_B), x);
    const dtrain__v q = dtrain__vexp(cubic * dtrain__vset(-2 * DTRAIN__GELU_A));
    const dtrain__v w = one / (one + q);
    const dtrain__v slope = dtrain__vfma(square, dtrain__vset(6 * DTRAIN__GELU_A * DTRAIN__GELU_B),
                                         dtrain__vset(2 * DTRAIN__GELU_A));
    return w * dtrain__vfma(x * slope, q * w, one);
}

/* ---- Vectors in half precision ----------------------------------------------------------------
 *
 * bf16 is integer arithmetic on vectors, fp16 the F16C instructions or, without them, the scalar
 * functions of core/dtype.c: the bits are the same. A tail goes through a buffer of full width. */

#define dtrain__vhalves DTRAIN__INSTANCE(dtrain__vhalves)
#define dtrain__vwords DTRAIN__INSTANCE(dtrain__vwords)
#define dtrain__to_bf16 DTRAIN__INSTANCE(dtrain__to_bf16)
#define dtrain__from_bf16 DTRAIN__INSTANCE(dtrain__from_bf16)
#define dtrain__to_f16 DTRAIN__INSTANCE(dtrain__to_f16)
#define dtrain__from_f16 DTRAIN__INSTANCE(dtrain__from_f16)
#if DTRAIN__ISA >= 2
typedef uint16_t dtrain__vhalves __attribute__((vector_size(2 * DTRAIN__W), aligned(2), may_alias));
typedef uint32_t dtrain__vwords __attribute__((vector_size(4 * DTRAIN__W)));

DTRAIN__VECTOR void dtrain__to_bf16(uint16_t *to, dtrain__v v)
{
    const dtrain__vwords x = (dtrain__vwords)v;
    const dtrain__vwords rounded = x + 0x7fffu + ((x >> 16) & 1u);
    const dtrain__vwords nan = (dtrain__vwords)((x & 0x7fffffffu) > 0x7f800000u);
    const dtrain__vwords bits = ((rounded & ~nan) | ((x | 0x400000u) & nan)) >> 16;
    *(dtrain__vhalves *)to = __builtin_convertvector(bits, dtrain__vhalves);
}

DTRAIN__VECTOR dtrain__v dtrain__from_bf16(const uint16_t *from)
{
    return (dtrain__v)(__builtin_convertvector(*(const dtrain__vhalves *)from, dtrain__vwords)
                       << 16);
}
#if DTRAIN__ISA == 3
DTRAIN__VECTOR void dtrain__to_f16(uint16_t *to, dtrain__v v)
{
    _mm256_storeu_si256(
        (__m256i *)(void *)to,
        _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
DTRAIN__VECTOR dtrain__v dtrain__from_f16(const uint16_t *from)
{
    return (dtrain__v)_mm512_maskz_cvtph_ps(
        0xffff, _mm256_loadu_si256((const __m256i *)(const void *)from));
}
#else
DTRAIN__VECTOR void dtrain__to_f16(uint16_t *to, dtrain__v v)
{
    _mm_storeu_si128((__m128i *)(void *)to,
                     _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
DTRAIN__VECTOR dtrain__v dtrain__from_f16(const uint16_t *from)
{
    return (dtrain__v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
}
#endif
#else
DTRAIN__VECTOR void dtrain__to_bf16(uint16_t *to, dtrain__v v)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, v);
    for (int i = 0; i < DTRAIN__W; i++) to[i] = dtrain_f32_to_bf16(lanes[i]);
}
DTRAIN__VECTOR dtrain__v dtrain__from_bf16(const uint16_t *from)
{
    float lanes[DTRAIN__W];
    for (int i = 0; i < DTRAIN__W; i++) lanes[i] = dtrain_bf16_to_f32(from[i]);
    return dtrain__vload(lanes);
}
DTRAIN__VECTOR void dtrain__to_f16(uint16_t *to, dtrain__v v)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, v);
    for (int i = 0; i < DTRAIN__W; i++) to[i] = dtrain_f32_to_f16(lanes[i]);
}
DTRAIN__VECTOR dtrain__v dtrain__from_f16(const uint16_t *from)
{
    float lanes[DTRAIN__W];
    for (int i = 0; i < DTRAIN__W; i++) lanes[i] = dtrain_f16_to_f32(from[i]);
    return dtrain__vload(lanes);
}
#endif

#define dtrain__vload_as DTRAIN__INSTANCE(dtrain__vload_as)
#define dtrain__vstore_as DTRAIN__INSTANCE(dtrain__vstore_as)

/* vload_n and vstore_n of elements from `at` on, of fp32, bf16 or fp16. */
DTRAIN__VECTOR dtrain__v dtrain__vload_as(const void *p, dtrain_dtype dtype, int64_t at, int64_t n)
{
    if (dtype == DTRAIN_DTYPE_F32) return dtrain__vload_n((const float *)p + at, n);
    const uint16_t *half = (const uint16_t *)p + at;
    uint16_t tail[DTRAIN__W] = {0};
    if (n < DTRAIN__W) {
        if (n > 0) memcpy(tail, half, (size_t)n * sizeof *half);
        half = tail;
    }
    return dtype == DTRAIN_DTYPE_BF16 ? dtrain__from_bf16(half) : dtrain__from_f16(half);
}

DTRAIN__VECTOR void dtrain__vstore_as(void *p, dtrain_dtype dtype, int64_t at, dtrain__v v,
                                      int64_t n)
{
    if (dtype == DTRAIN_DTYPE_F32) {
        dtrain__vstore_n((float *)p + at, v, n);
        return;
    }
    uint16_t tail[DTRAIN__W], *half = (uint16_t *)p + at, *to = n < DTRAIN__W ? tail : half;
    if (dtype == DTRAIN_DTYPE_BF16) dtrain__to_bf16(to, v);
    else dtrain__to_f16(to, v);
    if (n < DTRAIN__W) memcpy(half, tail, (size_t)n * sizeof *half);
}
