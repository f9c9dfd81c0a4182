/* Vectors
 *
 * This text is compiled once for each instruction set, with DTRAIN__ISA = 3 (AVX-512), 2 (AVX2, FMA
 * and F16C), 1 (four lanes: SSE2, NEON, ...) or 0 (one lane, DTRAIN_NO_SIMD and tests): explicit
 * vectors, and intrinsics if compilers need them. Names of an instance end with its suffix:
 *
 *     DTRAIN__KERNEL(add) { ... }      defines dtrain__add_avx2, a range function
 *     DTRAIN__VECTOR dtrain__v dtrain__vset(float x)   an operation on vectors, always inlined
 *     DTRAIN__HELPER float DTRAIN__K(row_sum)(...)     inlined, except in scalar kernels
 *     DTRAIN__ROUTINE void DTRAIN__K(product)(...)     not inlined
 *
 * Operations on vectors, which every kernel uses, are spelled without DTRAIN__K: each name is a
 * macro that ends in the suffix of the instance.
 *
 * A kernel works on the range [begin, end) of its job (elements, rows, columns or items, see the
 * launchers): threads take disjoint ranges. No sum crosses a range boundary, so the bits do not
 * depend on the number of threads. Vectors are explicit because gcc 12 at -O2 leaves loops of
 * unknown length scalar.
 *
 * Tails: vload_n and vstore_n touch only the first min(n, lanes) elements, other lanes read as 0:
 * one well predicted branch per vector. Every element goes through the same instructions for any
 * cut into ranges. */

#if DTRAIN__ISA == 3
#define DTRAIN__SUFFIX avx512
#define DTRAIN__W 16
#define DTRAIN__ON __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#elif DTRAIN__ISA == 2
#define DTRAIN__SUFFIX avx2
#define DTRAIN__W 8
#define DTRAIN__ON __attribute__((target("avx2,fma,f16c")))
#elif DTRAIN__ISA == 1 && \
    defined(DTRAIN__TEST_WIDE) /* for tests: the widest tiles on any machine */
#define DTRAIN__SUFFIX wide
#define DTRAIN__W 16
#define DTRAIN__ON
#elif DTRAIN__ISA == 1
#define DTRAIN__SUFFIX generic
#define DTRAIN__W 4
#define DTRAIN__ON
#else
#define DTRAIN__SUFFIX scalar
#define DTRAIN__W 1
#define DTRAIN__ON
#endif
#define DTRAIN__FAST (DTRAIN__ISA > 0) /* whether instances for single types pay */

#define DTRAIN__GLUE2(name, suffix) dtrain__##name##_##suffix
#define DTRAIN__GLUE(name, suffix) DTRAIN__GLUE2(name, suffix)
#define DTRAIN__K(name) DTRAIN__GLUE(name, DTRAIN__SUFFIX)
#define DTRAIN__VECTOR static inline __attribute__((always_inline, unused)) DTRAIN__ON
#define DTRAIN__ROUTINE static __attribute__((unused)) DTRAIN__ON
#define DTRAIN__APART static __attribute__((noinline, cold, unused)) DTRAIN__ON
#if DTRAIN__FAST
#define DTRAIN__HELPER DTRAIN__VECTOR
#else /* a call costs less than the compiler's work on another copy */
#define DTRAIN__HELPER DTRAIN__ROUTINE
#endif
#define DTRAIN__KERNEL(name)                                                            \
    DTRAIN__ROUTINE void DTRAIN__K(name)(dtrain__job * job, int64_t begin, int64_t end, \
                                         DTRAIN__UNUSED int index)
/* Open a kernel that is compiled twice: with f32 true, for jobs with only fp32 activations, it does
 * not test their type. For kernels that gain at least a tenth on arrays in L2. */
#define DTRAIN__KERNEL_AS(name)                                                             \
    DTRAIN__HELPER void DTRAIN__K(name##_as)(dtrain__job * job, int64_t begin, int64_t end, \
                                             int index, bool f32);                          \
    DTRAIN__KERNEL(name)                                                                    \
    {                                                                                       \
        if (DTRAIN__FAST && job->dtype <= DTRAIN_DTYPE_F32)                                 \
            DTRAIN__K(name##_as)(job, begin, end, index, true);                             \
        else DTRAIN__K(name##_as)(job, begin, end, index, false);                           \
    }                                                                                       \
    DTRAIN__HELPER void DTRAIN__K(name##_as)(dtrain__job * job, int64_t begin, int64_t end, \
                                             DTRAIN__UNUSED int index, bool f32)

#define dtrain__v DTRAIN__K(v)
#define dtrain__vi DTRAIN__K(vi)
#define dtrain__vset DTRAIN__K(vset)
#define dtrain__viset DTRAIN__K(viset)
#define dtrain__vload DTRAIN__K(vload)
#define dtrain__vstore DTRAIN__K(vstore)
#define dtrain__vload_n DTRAIN__K(vload_n)
#define dtrain__vstore_n DTRAIN__K(vstore_n)
#define dtrain__vload_as DTRAIN__K(vload_as)
#define dtrain__vstore_as DTRAIN__K(vstore_as)
#define dtrain__vfma DTRAIN__K(vfma)
#define dtrain__vmax DTRAIN__K(vmax)
#define dtrain__vmin DTRAIN__K(vmin)
#define dtrain__vbits DTRAIN__K(vbits)
#define dtrain__vfrombits DTRAIN__K(vfrombits)
#define dtrain__viless DTRAIN__K(viless)
#define dtrain__viota DTRAIN__K(viota)
#define dtrain__vkeep DTRAIN__K(vkeep)
#define dtrain__vsum DTRAIN__K(vsum)
#define dtrain__vexp DTRAIN__K(vexp)
#define dtrain__product DTRAIN__K(product)
#define dtrain__pack_rows DTRAIN__K(pack_rows)
#define dtrain__unpack_rows DTRAIN__K(unpack_rows)

/* ---- Vectors ----------------------------------------------------------------------------------*/

typedef float dtrain__v __attribute__((vector_size(4 * DTRAIN__W)));
typedef int32_t dtrain__vi __attribute__((vector_size(4 * DTRAIN__W)));
typedef float DTRAIN__K(vu) __attribute__((vector_size(4 * DTRAIN__W), aligned(1), may_alias));

DTRAIN__VECTOR dtrain__v dtrain__vload(const float *p)
{
    return (dtrain__v) * (const DTRAIN__K(vu) *)p;
}
DTRAIN__VECTOR void dtrain__vstore(float *p, dtrain__v v)
{
    *(DTRAIN__K(vu) *)p = (DTRAIN__K(vu))v;
}
DTRAIN__VECTOR dtrain__vi dtrain__vbits(dtrain__v v) { return (dtrain__vi)v; }
DTRAIN__VECTOR dtrain__v dtrain__vfrombits(dtrain__vi v) { return (dtrain__v)v; }
DTRAIN__VECTOR dtrain__vi DTRAIN__K(vless)(dtrain__v a, dtrain__v b) { return (dtrain__vi)(a < b); }
DTRAIN__VECTOR dtrain__vi dtrain__viless(dtrain__vi a, dtrain__vi b) { return (dtrain__vi)(a < b); }
DTRAIN__VECTOR dtrain__v DTRAIN__K(vtofloat)(dtrain__vi v)
{
    return __builtin_convertvector(v, dtrain__v);
}

/* Copy a scalar to every lane; x - 0 is x, also for -0. */
DTRAIN__VECTOR dtrain__v dtrain__vset(float x)
{
    const dtrain__v zero = {0};
    return x - zero;
}
DTRAIN__VECTOR dtrain__vi dtrain__viset(int32_t x)
{
    const dtrain__vi zero = {0};
    return x + zero;
}

/* Masks are all ones or all zeros per lane. */
DTRAIN__VECTOR dtrain__v dtrain__vkeep(dtrain__v v, dtrain__vi mask)
{
    return dtrain__vfrombits(dtrain__vbits(v) & mask);
}

DTRAIN__VECTOR dtrain__v DTRAIN__K(vselect)(dtrain__vi mask, dtrain__v yes, dtrain__v no)
{
    return dtrain__vfrombits((dtrain__vbits(yes) & mask) | (dtrain__vbits(no) & ~mask));
}

DTRAIN__VECTOR dtrain__vi dtrain__viota(void)
{
    static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    dtrain__vi v;
    memcpy(&v, lanes, sizeof v);
    return v;
}

/* Operations that compilers do not make from operators: fused multiply-add, max and min with a
 * known NaN rule (the second operand wins), rounding to an integer, loads and stores of n < lanes
 * elements. Full zero-masks of AVX-512 avoid g++'s warnings about undefined start values. */
#if DTRAIN__ISA == 3
DTRAIN__VECTOR dtrain__v dtrain__vfma(dtrain__v a, dtrain__v b, dtrain__v c)
{
    return _mm512_fmadd_ps(a, b, c);
}
DTRAIN__VECTOR dtrain__v dtrain__vmax(dtrain__v a, dtrain__v b)
{
    return _mm512_maskz_max_ps(0xffff, a, b);
}
DTRAIN__VECTOR dtrain__v dtrain__vmin(dtrain__v a, dtrain__v b)
{
    return _mm512_maskz_min_ps(0xffff, a, b);
}
DTRAIN__VECTOR dtrain__vi DTRAIN__K(vround)(dtrain__v a)
{
    return (dtrain__vi)_mm512_maskz_cvtps_epi32(0xffff, a);
}
DTRAIN__VECTOR dtrain__v DTRAIN__K(vpart_load)(const float *p, int64_t n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
}
DTRAIN__VECTOR void DTRAIN__K(vpart_store)(float *p, dtrain__v v, int64_t n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), v);
}
#elif DTRAIN__ISA == 2
DTRAIN__VECTOR dtrain__v dtrain__vfma(dtrain__v a, dtrain__v b, dtrain__v c)
{
    return _mm256_fmadd_ps(a, b, c);
}
DTRAIN__VECTOR dtrain__v dtrain__vmax(dtrain__v a, dtrain__v b) { return _mm256_max_ps(a, b); }
DTRAIN__VECTOR dtrain__v dtrain__vmin(dtrain__v a, dtrain__v b) { return _mm256_min_ps(a, b); }
DTRAIN__VECTOR dtrain__v DTRAIN__K(vsqrt)(dtrain__v a) { return _mm256_sqrt_ps(a); }
DTRAIN__VECTOR dtrain__vi DTRAIN__K(vround)(dtrain__v a)
{
    return (dtrain__vi)_mm256_cvtps_epi32(a);
}
DTRAIN__VECTOR dtrain__v DTRAIN__K(vpart_load)(const float *p, int64_t n)
{
    const dtrain__vi mask = dtrain__viless(dtrain__viota(), dtrain__viset((int32_t)n));
    return _mm256_maskload_ps(p, (__m256i)mask);
}
DTRAIN__VECTOR void DTRAIN__K(vpart_store)(float *p, dtrain__v v, int64_t n)
{
    const dtrain__vi mask = dtrain__viless(dtrain__viota(), dtrain__viset((int32_t)n));
    _mm256_maskstore_ps(p, (__m256i)mask, v);
}
#else
DTRAIN__VECTOR dtrain__v dtrain__vfma(dtrain__v a, dtrain__v b, dtrain__v c)
{
#if defined(__aarch64__) && DTRAIN__W == 4
    return (dtrain__v)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
DTRAIN__VECTOR dtrain__v dtrain__vmax(dtrain__v a, dtrain__v b)
{
    return DTRAIN__K(vselect)(DTRAIN__K(vless)(b, a), a, b);
}
DTRAIN__VECTOR dtrain__v dtrain__vmin(dtrain__v a, dtrain__v b)
{
    return DTRAIN__K(vselect)(DTRAIN__K(vless)(a, b), a, b);
}
DTRAIN__VECTOR dtrain__v DTRAIN__K(vsqrt)(dtrain__v a)
{
    for (int i = 0; i < DTRAIN__W; i++) a[i] = sqrtf(a[i]);
    return a;
}
/* Halves round away from zero: either neighbour is good enough for exp. NaN becomes 0, because C
 * does not define its conversion. */
DTRAIN__VECTOR dtrain__vi DTRAIN__K(vround)(dtrain__v a)
{
    const dtrain__vi sign = dtrain__vbits(a) & dtrain__viset(INT32_MIN);
    const dtrain__v half = dtrain__vfrombits(dtrain__vbits(dtrain__vset(0.5f)) | sign);
    const dtrain__vi magnitude = dtrain__vbits(a) & dtrain__viset(INT32_MAX);
    const dtrain__vi number = dtrain__viless(magnitude, dtrain__viset(0x7f800001));
    return __builtin_convertvector(dtrain__vkeep(a + half, number), dtrain__vi);
}
DTRAIN__VECTOR dtrain__v DTRAIN__K(vpart_load)(const float *p, int64_t n)
{
    float lanes[DTRAIN__W] = {0};
    for (int64_t i = 0; i < n && i < DTRAIN__W; i++) lanes[i] = p[i];
    return dtrain__vload(lanes);
}
DTRAIN__VECTOR void DTRAIN__K(vpart_store)(float *p, dtrain__v v, int64_t n)
{
    for (int64_t i = 0; i < n && i < DTRAIN__W; i++) p[i] = v[i];
}
#endif

/* Scalars have no tails: n is 1 or more. */
DTRAIN__VECTOR dtrain__v dtrain__vload_n(const float *p, int64_t n)
{
    return n >= DTRAIN__W || DTRAIN__W == 1 ? dtrain__vload(p) : DTRAIN__K(vpart_load)(p, n);
}

DTRAIN__VECTOR void dtrain__vstore_n(float *p, dtrain__v v, int64_t n)
{
    if (n >= DTRAIN__W || DTRAIN__W == 1) dtrain__vstore(p, v);
    else DTRAIN__K(vpart_store)(p, v, n);
}

/* Return the first n lanes of v, 0 in the others. */
DTRAIN__VECTOR dtrain__v DTRAIN__K(vfirst)(dtrain__v v, int64_t n)
{
    if (n >= DTRAIN__W) return v;
    return dtrain__vkeep(v, dtrain__viless(dtrain__viota(), dtrain__viset((int32_t)n)));
}

/* Sum the lanes, always as the same tree. */
DTRAIN__HELPER float dtrain__vsum(dtrain__v v)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, v);
    for (int half = DTRAIN__W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

DTRAIN__HELPER float DTRAIN__K(vtop)(dtrain__v v)
{
    float lanes[DTRAIN__W];
    dtrain__vstore(lanes, v);
    float top = lanes[0];
    for (int i = 1; i < DTRAIN__W; i++) top = lanes[i] > top ? lanes[i] : top;
    return top;
}

/* Return 2^n for -127 <= n <= 127, from its exponent bits. */
DTRAIN__HELPER dtrain__v DTRAIN__K(power_of_two)(dtrain__vi n)
{
    return dtrain__vfrombits((n + dtrain__viset(127)) << 23);
}

/* ---- exp, GELU ----------------------------------------------------------------------------------
 *
 * e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln2 / 2, and e^r = 1 + r + r^2 q(r), q of degree 4
 * fitted to 3e-9: within 1 ulp for |x| < 10, 4.5 near 87. The terms are paired (Estrin) instead of
 * chained (Horner): the core's look-ahead limits a loop of exps, so the short chain is faster.
 * Below -87.7 the clamp gives n = -127, whose scale is exactly 0 (a masked score has no weight);
 * above 88 the result stays e^88: callers subtract a maximum first. NaN passes. */
DTRAIN__HELPER dtrain__v dtrain__vexp(dtrain__v x)
{
    x = dtrain__vmin(dtrain__vset(88.0f), dtrain__vmax(dtrain__vset(-88.0f), x));
    const dtrain__vi n = DTRAIN__K(vround)(x * dtrain__vset(1.44269504f));
    const dtrain__v whole = DTRAIN__K(vtofloat)(n);
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
    return p * DTRAIN__K(power_of_two)(n);
}

/* Return e^-2u with u = sqrt(2/pi) (x + 0.044715 x^3), clamped to a finite range without 0. -2u =
 * n ln2 + r as above, and e^r - 1 = r + r^2/2! + ... + r^7/7!, whose first missing term is below
 * 5.2e-9. The polynomial differs from vexp's: the bits of every trained GPT depend on it. */
DTRAIN__HELPER dtrain__v DTRAIN__K(gelu_exp)(dtrain__v x)
{
    const dtrain__v cubic = dtrain__vfma(dtrain__vset(0.044715f), x * x * x, x);
    const dtrain__v limit = dtrain__vset(80.0f), big = dtrain__vset(12582912.0f); /* 1.5 * 2^23 */
    dtrain__v u = dtrain__vset(-2.0f) * (dtrain__vset(0.797884561f) * cubic);
    u = dtrain__vmin(limit, dtrain__vmax(-limit, u));
    /* adding 1.5 * 2^23 leaves the rounded integer in the low bits */
    const dtrain__vi n =
        dtrain__vbits(dtrain__vfma(u, dtrain__vset(1.44269504f), big)) - dtrain__viset(0x4b400000);
    const dtrain__v whole = DTRAIN__K(vtofloat)(n);
    dtrain__v r = dtrain__vfma(whole, dtrain__vset(-0.693359375f), u),
              p = dtrain__vset(1.0f / 5040);
    r = dtrain__vfma(whole, dtrain__vset(2.12194440e-4f), r);
    p = dtrain__vfma(p, r, dtrain__vset(1.0f / 720));
    p = dtrain__vfma(p, r, dtrain__vset(1.0f / 120));
    p = dtrain__vfma(p, r, dtrain__vset(1.0f / 24));
    p = dtrain__vfma(p, r, dtrain__vset(1.0f / 6));
    p = dtrain__vfma(p, r, dtrain__vset(0.5f));
    p = dtrain__vfma(p, r * r, r);
    const dtrain__v scale = DTRAIN__K(power_of_two)(n);
    return dtrain__vfma(p, scale, scale);
}

/* Return x/2 (1 + tanh u) as x / (1 + e^-2u): one exp, no cancellation for negative x. */
DTRAIN__HELPER dtrain__v DTRAIN__K(vgelu)(dtrain__v x)
{
    return x / (dtrain__vset(1.0f) + DTRAIN__K(gelu_exp)(x));
}

/* Return the slope for a C in half precision, by gelu_exp. (vgelu_slope, by vexp, is for fp32.) */
DTRAIN__HELPER dtrain__v DTRAIN__K(vgelu_slope_low)(dtrain__v x)
{
    const dtrain__v limit = dtrain__vset(10.0f), one = dtrain__vset(1.0f);
    x = dtrain__vmin(limit, dtrain__vmax(-limit, x));
    const dtrain__v e = DTRAIN__K(gelu_exp)(x), s = one / (one + e);
    const dtrain__v slope =
        dtrain__vset(1.595769122f) * dtrain__vfma(dtrain__vset(0.134145f), x * x, one);
    return dtrain__vfma(x * (s * (e * s)), slope, s);
}

#define DTRAIN__GELU_A 0.797884561f /* sqrt(2/pi) */
#define DTRAIN__GELU_B 0.044715f

/* Return dy/dx = w + x w (1 - w) 2u' = w (1 + x q w 2u') with q = e^-2u, w = 1 / (1 + q) and
 * u' = A (1 + 3 B x^2). The tails keep their relative accuracy; outside +-10 it is 0 or 1. */
DTRAIN__HELPER dtrain__v DTRAIN__K(vgelu_slope)(dtrain__v x)
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
 * bf16 uses integer arithmetic on vectors, fp16 the F16C instructions or the scalar functions of
 * core/dtype.c: the bits are the same. */

typedef uint16_t DTRAIN__K(vhalves)
    __attribute__((vector_size(2 * DTRAIN__W), aligned(1), may_alias));
typedef uint32_t DTRAIN__K(vwords) __attribute__((vector_size(4 * DTRAIN__W)));

DTRAIN__HELPER void DTRAIN__K(to_bf16)(uint16_t *to, dtrain__v v)
{
    const DTRAIN__K(vwords) x = (DTRAIN__K(vwords))v;
    const DTRAIN__K(vwords) rounded = x + 0x7fffu + (x << 15 >> 31);
    const dtrain__vi magnitude = dtrain__vbits(v) & dtrain__viset(INT32_MAX);
    const dtrain__vi nan = dtrain__viless(dtrain__viset(0x7f800000), magnitude);
    const dtrain__v quiet = (dtrain__v)(x | 0x400000u);
    const DTRAIN__K(vwords) bits =
        (DTRAIN__K(vwords))DTRAIN__K(vselect)(nan, quiet, (dtrain__v)rounded) >> 16;
#if DTRAIN__ISA == 3 /* gcc 12 makes many instructions of a conversion to halves */
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)bits));
#elif DTRAIN__ISA == 2
    const __m128i low = _mm256_castsi256_si128((__m256i)bits);
    const __m128i high = _mm256_extracti128_si256((__m256i)bits, 1);
    _mm_storeu_si128((__m128i *)(void *)to, _mm_packus_epi32(low, high));
#else
    *(DTRAIN__K(vhalves) *)to = __builtin_convertvector(bits, DTRAIN__K(vhalves));
#endif
}

DTRAIN__HELPER dtrain__v DTRAIN__K(from_bf16)(const uint16_t *from)
{
#if DTRAIN__ISA == 3
    const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return (dtrain__v)((DTRAIN__K(vwords))_mm512_maskz_cvtepu16_epi32(0xffff, half) << 16);
#else
    const DTRAIN__K(vhalves) half = *(const DTRAIN__K(vhalves) *)from;
    return (dtrain__v)(__builtin_convertvector(half, DTRAIN__K(vwords)) << 16);
#endif
}

DTRAIN__HELPER void DTRAIN__K(to_f16)(uint16_t *to, dtrain__v v)
{
#if DTRAIN__ISA == 3
    enum { nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_maskz_cvtps_ph(0xffff, v, nearest));
#elif DTRAIN__ISA == 2
    enum { nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtps_ph(v, nearest));
#else
    uint16_t half[DTRAIN__W]; /* `to` can be at an odd address */
    for (int i = 0; i < DTRAIN__W; i++) half[i] = dtrain_half_from_f32(DTRAIN_DTYPE_F16, v[i]);
    memcpy(to, half, sizeof half);
#endif
}

DTRAIN__HELPER dtrain__v DTRAIN__K(from_f16)(const uint16_t *from)
{
#if DTRAIN__ISA == 3
    const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return _mm512_maskz_cvtph_ps(0xffff, half);
#elif DTRAIN__ISA == 2
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
#else
    uint16_t half[DTRAIN__W];
    dtrain__v v = {0};
    memcpy(half, from, sizeof half);
    for (int i = 0; i < DTRAIN__W; i++) v[i] = dtrain_half_to_f32(DTRAIN_DTYPE_F16, half[i]);
    return v;
#endif
}

/* Load the first min(n, lanes) elements in half precision. Full vectors of bf16 are inlined in
 * every kernel; fp16 and tails, with many more instructions, are calls. */
DTRAIN__APART dtrain__v DTRAIN__K(vload_half)(const uint16_t *half, dtrain_dtype dtype, int64_t n)
{
    uint16_t tail[DTRAIN__W] = {0};
    if (n < DTRAIN__W) {
#if DTRAIN__ISA == 3
        const __mmask16 there = (__mmask16)(n > 0 ? (1u << n) - 1u : 0u);
        _mm256_storeu_si256((__m256i *)(void *)tail, _mm256_maskz_loadu_epi16(there, half));
#else
        for (int64_t i = 0; i < n; i++) memcpy(tail + i, half + i, sizeof *half);
#endif
        half = tail;
    }
    return dtype == DTRAIN_DTYPE_BF16 ? DTRAIN__K(from_bf16)(half) : DTRAIN__K(from_f16)(half);
}

DTRAIN__APART void DTRAIN__K(vstore_half)(uint16_t *half, dtrain_dtype dtype, dtrain__v v,
                                          int64_t n)
{
    uint16_t tail[DTRAIN__W], *to = n < DTRAIN__W ? tail : half;
    if (dtype == DTRAIN_DTYPE_BF16) DTRAIN__K(to_bf16)(to, v);
    else DTRAIN__K(to_f16)(to, v);
    for (int64_t i = 0; i < n && n < DTRAIN__W; i++) memcpy(half + i, tail + i, sizeof *half);
}

/* vload_n and vstore_n of elements from `at` on, of fp32 (also dtype 0), bf16 or fp16: every kernel
 * reads and writes activations with them. Arithmetic is fp32, and a result is rounded once. */
DTRAIN__HELPER dtrain__v dtrain__vload_as(const void *p, dtrain_dtype dtype, int64_t at, int64_t n)
{
    if (dtype <= DTRAIN_DTYPE_F32) return dtrain__vload_n((const float *)p + at, n);
    const uint16_t *half = (const uint16_t *)p + at;
    if (dtype != DTRAIN_DTYPE_BF16) return DTRAIN__K(vload_half)(half, DTRAIN_DTYPE_F16, n);
    return n >= DTRAIN__W ? DTRAIN__K(from_bf16)(half)
                          : DTRAIN__K(vload_half)(half, DTRAIN_DTYPE_BF16, n);
}

DTRAIN__HELPER void dtrain__vstore_as(void *p, dtrain_dtype dtype, int64_t at, dtrain__v v,
                                      int64_t n)
{
    uint16_t *half = (uint16_t *)p + at;
    if (dtype <= DTRAIN_DTYPE_F32) dtrain__vstore_n((float *)p + at, v, n);
    else if (dtype != DTRAIN_DTYPE_BF16) DTRAIN__K(vstore_half)(half, DTRAIN_DTYPE_F16, v, n);
    else if (n >= DTRAIN__W) DTRAIN__K(to_bf16)(half, v);
    else DTRAIN__K(vstore_half)(half, DTRAIN_DTYPE_BF16, v, n);
}

/* ---- Blocks -------------------------------------------------------------------------------------
 *
 * Kernels on single elements work on blocks that stay in L1: they widen halves into a buffer,
 * compute in a loop over fp32, and round the results from another buffer. They read and write
 * arrays of fp32 in place. */

#define DTRAIN__KERNEL_BLOCK 512 /* elements */

/* Return `count` elements from `at` on as fp32: in place, or widened into `buffer`. */
DTRAIN__ROUTINE const float *DTRAIN__K(widened)(const void *p, dtrain_dtype dtype, int64_t at,
                                                int64_t count, float *buffer)
{
    const uint16_t *half = (const uint16_t *)p + at;
    int64_t i = 0;
    if (dtype <= DTRAIN_DTYPE_F32) return (const float *)p + at;
    for (; dtype == DTRAIN_DTYPE_BF16 && i + DTRAIN__W <= count; i += DTRAIN__W)
        dtrain__vstore(buffer + i, DTRAIN__K(from_bf16)(half + i));
    for (; i < count; i += DTRAIN__W)
        dtrain__vstore_n(buffer + i, DTRAIN__K(vload_half)(half + i, dtype, count - i), count - i);
    return buffer;
}

/* Return the address for results of elements from `at` on: in place, or `buffer` for rounded. */
DTRAIN__HELPER float *DTRAIN__K(written)(void *p, dtrain_dtype dtype, int64_t at, float *buffer)
{
    return dtype <= DTRAIN_DTYPE_F32 ? (float *)p + at : buffer;
}

/* Round `count` results from `buffer` to elements from `at` on; fp32 is in place already. */
DTRAIN__ROUTINE void DTRAIN__K(rounded)(void *p, dtrain_dtype dtype, int64_t at, int64_t count,
                                        const float *buffer)
{
    uint16_t *half = (uint16_t *)p + at;
    int64_t i = 0;
    if (dtype <= DTRAIN_DTYPE_F32) return;
    for (; dtype == DTRAIN_DTYPE_BF16 && i + DTRAIN__W <= count; i += DTRAIN__W)
        DTRAIN__K(to_bf16)(half + i, dtrain__vload(buffer + i));
    for (; i < count; i += DTRAIN__W)
        DTRAIN__K(vstore_half)(half + i, dtype, dtrain__vload_n(buffer + i, count - i), count - i);
}
