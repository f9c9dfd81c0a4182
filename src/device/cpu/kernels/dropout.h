/* Dropout: ranges are multiples of 16, so that no block of Philox is split
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
