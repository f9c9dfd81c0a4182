/* Functions of two elements (gated products, losses), dropout, Muon
 *
 * Forward moves three elements, backward at most five: bandwidth is the limit, except for the
 * logarithm of the logistic loss, which is scalar.
 *
 *     f                        df/dx                    df/d other
 *     x other                  other                    x
 *     silu(x) other            silu'(x) other           silu(x)
 *     (x - other)^2            2 (x - other)            -2 (x - other)
 *     logistic loss            sigmoid(x) - other       -x */

/* Compute max(x, 0) - x other + log(1 + e^-|x|): no exponential of a positive number, so none
 * overflows. */
DTRAIN__HELPER dtrain__v DTRAIN__K(vlogistic_loss)(dtrain__v x, dtrain__v other)
{
    const dtrain__v size = dtrain__vfrombits(dtrain__vbits(x) & dtrain__viset(INT32_MAX));
    dtrain__v small = dtrain__vexp(-size);
    for (int lane = 0; lane < DTRAIN__W; lane++) small[lane] = log1pf(small[lane]);
    return (dtrain__vmax(dtrain__vset(0), x) - x * other) + small;
}

DTRAIN__HELPER dtrain__v DTRAIN__K(vpointwise)(uint32_t kind, dtrain__v x, dtrain__v other)
{
    const bool gated = kind == DTRAIN_POINTWISE_SWIGLU;
    if (kind == DTRAIN_POINTWISE_MULTIPLY) return x * other;
    if (kind == DTRAIN_POINTWISE_SQUARED_ERROR) return (x - other) * (x - other);
    if (kind == DTRAIN_POINTWISE_LOGISTIC_LOSS) return DTRAIN__K(vlogistic_loss)(x, other);
    const dtrain__v y = DTRAIN__K(vactivate)(gated ? (uint32_t)DTRAIN_ACTIVATION_SILU : kind, x);
    return gated ? y * other : y;
}

DTRAIN__HELPER dtrain__v DTRAIN__K(vslope_x)(uint32_t kind, dtrain__v x, dtrain__v other,
                                             dtrain__v d_y)
{
    const bool gated = kind == DTRAIN_POINTWISE_SWIGLU;
    if (gated || kind == DTRAIN_POINTWISE_MULTIPLY) d_y *= other;
    if (kind == DTRAIN_POINTWISE_MULTIPLY) return d_y;
    if (kind == DTRAIN_POINTWISE_SQUARED_ERROR) return d_y * (dtrain__vset(2) * (x - other));
    if (kind == DTRAIN_POINTWISE_LOGISTIC_LOSS)
        return d_y * (DTRAIN__K(vgated)(dtrain__vset(1), x) - other);
    return DTRAIN__K(vdeactivate)(gated ? (uint32_t)DTRAIN_ACTIVATION_SILU : kind, x, d_y);
}

DTRAIN__HELPER dtrain__v DTRAIN__K(vslope_other)(uint32_t kind, dtrain__v x, dtrain__v other,
                                                 dtrain__v d_y)
{
    if (kind == DTRAIN_POINTWISE_MULTIPLY) return d_y * x;
    if (kind == DTRAIN_POINTWISE_SWIGLU) return d_y * DTRAIN__K(vgated)(x, x);
    if (kind == DTRAIN_POINTWISE_SQUARED_ERROR) return d_y * (dtrain__vset(2) * (other - x));
    return -d_y * x;
}

DTRAIN__KERNEL(pointwise)
{
    const dtrain_pointwise_args *a = (const dtrain_pointwise_args *)job->args;
    float buffers[3][DTRAIN__KERNEL_BLOCK];
    for (int64_t at = begin; at < end; at += DTRAIN__KERNEL_BLOCK) {
        const int64_t count = dtrain__min(end - at, DTRAIN__KERNEL_BLOCK);
        const float *x = DTRAIN__K(widened)(a->x, a->x_dtype, at, count, buffers[0]), *other = x;
        float *y = DTRAIN__K(written)(a->y, a->y_dtype, at, buffers[2]);
        if (a->other) other = DTRAIN__K(widened)(a->other, a->other_dtype, at, count, buffers[1]);
        for (int64_t i = 0; i < count; i += DTRAIN__W) {
            const int64_t n = count - i;
            dtrain__vstore_n(y + i,
                             DTRAIN__K(vpointwise)(a->kind, dtrain__vload_n(x + i, n),
                                                   dtrain__vload_n(other + i, n)),
                             n);
        }
        DTRAIN__K(rounded)(a->y, a->y_dtype, at, count, y);
    }
}

/* Compute the gradient of one argument of a block. */
DTRAIN__ROUTINE void DTRAIN__K(pointwise_slope)(const dtrain_pointwise_backward_args *a, bool of_x,
                                                const float *x, const float *other,
                                                const float *d_y, int64_t at, int64_t count)
{
    const dtrain_dtype dtype = of_x ? a->x_dtype : a->other_dtype;
    void *to = of_x ? a->d_x : a->d_other;
    float buffer[DTRAIN__KERNEL_BLOCK];
    const float *old = NULL;
    if (!to) return;
    float *d = DTRAIN__K(written)(to, dtype, at, buffer);
    if (of_x ? a->accumulate_x : a->accumulate_other)
        old = DTRAIN__K(widened)(to, dtype, at, count, d);
    for (int64_t i = 0; i < count; i += DTRAIN__W) {
        const int64_t n = count - i;
        const dtrain__v u = dtrain__vload_n(x + i, n), v = dtrain__vload_n(other + i, n);
        const dtrain__v slope = dtrain__vload_n(d_y + i, n);
        dtrain__v sum = of_x ? DTRAIN__K(vslope_x)(a->kind, u, v, slope)
                             : DTRAIN__K(vslope_other)(a->kind, u, v, slope);
        if (old) sum += dtrain__vload_n(old + i, n);
        dtrain__vstore_n(d + i, sum, n);
    }
    DTRAIN__K(rounded)(to, dtype, at, count, d);
}

DTRAIN__KERNEL(pointwise_backward)
{
    const dtrain_pointwise_backward_args *a = (const dtrain_pointwise_backward_args *)job->args;
    float buffers[3][DTRAIN__KERNEL_BLOCK];
    for (int64_t at = begin; at < end; at += DTRAIN__KERNEL_BLOCK) {
        const int64_t count = dtrain__min(end - at, DTRAIN__KERNEL_BLOCK);
        const float *x = DTRAIN__K(widened)(a->x, a->x_dtype, at, count, buffers[0]), *other = x;
        const float *d_y = DTRAIN__K(widened)(a->d_y, a->y_dtype, at, count, buffers[1]);
        if (a->other) other = DTRAIN__K(widened)(a->other, a->other_dtype, at, count, buffers[2]);
        DTRAIN__K(pointwise_slope)(a, true, x, other, d_y, at, count);
        DTRAIN__K(pointwise_slope)(a, false, x, other, d_y, at, count);
    }
}

/* ---- Dropout: ranges are multiples of 16, so that no block of Philox is split
 *
 * H counters at a time, each 32-bit word in a 64-bit lane, because x86 multiplies 32 x 32 -> 64
 * there. High halves are undefined between rounds: the multiplier ignores them. */

typedef uint64_t DTRAIN__K(vq) __attribute__((vector_size(8 * DTRAIN__H)));

DTRAIN__HELPER DTRAIN__K(vq) DTRAIN__K(vwide)(DTRAIN__K(vq) a, uint32_t b)
{
#if DTRAIN__ISA == 2
    return (DTRAIN__K(vq))_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x((int64_t)b));
#else
    return (a & (uint64_t)0xffffffffu) * (uint64_t)b;
#endif
}

/* words = a0 b0 a1 b1 ... in 64-bit lanes. */
DTRAIN__HELPER void DTRAIN__K(vmerge)(DTRAIN__K(vq) a, DTRAIN__K(vq) b, uint32_t *words)
{
#if DTRAIN__ISA == 2
    const __m256i even = _mm256_unpacklo_epi64((__m256i)a, (__m256i)b); /* a0 b0 a2 b2 */
    const __m256i odd = _mm256_unpackhi_epi64((__m256i)a, (__m256i)b);  /* a1 b1 a3 b3 */
    __m256i *to = (__m256i *)(void *)words;
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
#else
    for (int j = 0; j < DTRAIN__H; j++) {
        const uint64_t pair[2] = {a[j], b[j]};
        memcpy(words + 4 * j, pair, sizeof pair);
    }
#endif
}

/* Set words[4 j + w] to word w of block counter + j, for j < H. A 64-bit lane holds two
 * neighbouring words, the low half first. */
DTRAIN__HELPER void DTRAIN__K(vphilox)(uint64_t seed, uint64_t stream, uint64_t counter,
                                       uint32_t *words)
{
    static const uint64_t lanes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const uint64_t half = 0xffffffffu;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    DTRAIN__K(vq) c0;
    memcpy(&c0, lanes, sizeof c0);
    DTRAIN__K(vq) c2 = (c0 ^ c0) + stream, c3 = c2 >> 32;
    c0 += counter;
    DTRAIN__K(vq) c1 = c0 >> 32;
    for (int round = 0; round < 10; round++) {
        const DTRAIN__K(vq) p0 = DTRAIN__K(vwide)(c0, DTRAIN__PHILOX_M0);
        const DTRAIN__K(vq) p1 = DTRAIN__K(vwide)(c2, DTRAIN__PHILOX_M1);
        c0 = (p1 >> 32) ^ c1 ^ (uint64_t)k0;
        c1 = p1;
        c2 = (p0 >> 32) ^ c3 ^ (uint64_t)k1;
        c3 = p0;
        k0 += DTRAIN__PHILOX_W0;
        k1 += DTRAIN__PHILOX_W1;
    }
    DTRAIN__K(vmerge)((c0 & half) | (c1 << 32), (c2 & half) | (c3 << 32), words);
}
DTRAIN__KERNEL(dropout)
{
    const dtrain_dropout_args *a = (const dtrain_dropout_args *)job->args;
    /* uniform >= probability, as a comparison of 24-bit integers */
    const double least = ceil((double)a->probability * 16777216.0);
    const int32_t threshold = least < 16777216.0 ? (int32_t)least : 16777216;
    const float scale = a->probability < 1 ? 1 / (1 - a->probability) : 0;
    const uint64_t seed = a->seed + (a->scalars ? a->scalars->seed : 0);
    const bool whole_blocks = !a->part.segments && a->part.first % 4 == 0;
    const dtrain__vi border = dtrain__viset(threshold), bits = dtrain__viset(0xffffff);
    uint32_t words[4 * DTRAIN__H];
    float buffers[2][DTRAIN__KERNEL_BLOCK];
    for (int64_t at = begin; at < end; at += DTRAIN__KERNEL_BLOCK) {
        const int64_t count = dtrain__min(end - at, DTRAIN__KERNEL_BLOCK);
        const float *x = DTRAIN__K(widened)(a->x, a->dtype, at, count, buffers[0]), *old = NULL;
        float *y = DTRAIN__K(written)(a->y, a->dtype, at, buffers[1]);
        if (a->accumulate) old = DTRAIN__K(widened)(a->y, a->dtype, at, count, y);
        for (int64_t i = 0; i < count; i += 4 * DTRAIN__H) {
            if (whole_blocks)
                DTRAIN__K(vphilox)(seed, a->stream, (uint64_t)(a->part.first + at + i) / 4, words);
            else dtrain__part_words(&a->part, seed, a->stream, at + i, 4 * DTRAIN__H, words);
            for (int64_t j = i; j < i + 4 * DTRAIN__H && j < count; j += DTRAIN__W) {
                const int64_t n = count - j;
                dtrain__vi u;
                memcpy(&u, words + (j - i), sizeof u);
                u = (u >> 8) & bits; /* the 24 bits of dtrain_random_uniform */
                const dtrain__v kept = dtrain__vset(scale) * dtrain__vload_n(x + j, n);
                dtrain__v sum = dtrain__vkeep(kept, ~dtrain__viless(u, border));
                if (old) sum += dtrain__vload_n(old + j, n);
                dtrain__vstore_n(y + j, sum, n);
            }
        }
        DTRAIN__K(rounded)(a->y, a->dtype, at, count, y);
    }
}

/* ---- Muon: the element-wise stages of a step, see optim/muon.c */

DTRAIN__KERNEL(muon)
{
    const dtrain__update *update = (const dtrain__update *)job->args;
    const dtrain_muon_args *a = update->args;
    const dtrain_optimizer_tensor *t = update->tensor;
    const float lr = update->now.lr, scale = lr * a->scale;
    const dtrain__v grad_scale = dtrain__vset(update->now.grad_scale);
    const dtrain__v momentum = dtrain__vset(a->momentum);
    const dtrain__v decay = dtrain__vset(1 - lr * t->weight_decay), step = dtrain__vset(-scale);
    const dtrain__v inverse = dtrain__vset(update->inverse);
    for (int64_t i = begin; i < end; i += DTRAIN__W) {
        const int64_t n = end - i;
        float *x = a->x + i;
        if (a->stage == DTRAIN_MUON_MOMENTUM) {
            const dtrain__v g = dtrain__vload_n(t->grad + i, n) * grad_scale;
            const dtrain__v m = dtrain__vfma(momentum, dtrain__vload_n(t->m + i, n), g);
            dtrain__vstore_n(t->m + i, m, n);
            dtrain__vstore_n(x, a->nesterov ? dtrain__vfma(momentum, m, g) : m, n);
        } else if (a->stage == DTRAIN_MUON_NORMALIZE) {
            dtrain__vstore_n(x, dtrain__vload_n(x, n) * inverse, n);
        } else {
            const dtrain__v old = dtrain__vload_n(t->value + i, n) * decay;
            dtrain__vstore_n(t->value + i, dtrain__vfma(step, dtrain__vload_n(x, n), old), n);
        }
    }
}
