/* Matrix products: the packing and register tiles of gemm.c */

#define DTRAIN__N (2 * DTRAIN__W) /* columns of a tile */
#if DTRAIN__W == 1                /* scalars: half the text, at half the speed */
#define DTRAIN__SHORT_MR 2
#define DTRAIN__SHORT(DO) DO(0) DO(1)
#else
#define DTRAIN__SHORT_MR 6 /* rows of a tile of attention */
#define DTRAIN__SHORT(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#endif
#if DTRAIN__W == 16
#define DTRAIN__MR 12 /* rows of a tile of GEMM */
#define DTRAIN__ROWS(DO) DTRAIN__SHORT(DO) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#else
#define DTRAIN__MR DTRAIN__SHORT_MR
#define DTRAIN__ROWS DTRAIN__SHORT
#endif

/* The register tile, C (rows, two vectors) = alpha A B + beta C: all fp32 matrix products use it.
 * Each accumulator has a separate name, because compilers do not keep arrays of vectors in
 * registers. A step has two loads of B and, for each row, one broadcast of A and two multiply-adds.
 * Rows beyond `rows` repeat the last row and are not stored; beta == 0 does not read C. Unrolling
 * hides the loop overhead among 12 multiply-adds (5 % on Zen 3); with the 24 of AVX-512 it gains
 * nothing and gcc 12 spills a vector. */
#if DTRAIN__ISA == 2 && defined(__clang__)
#define DTRAIN__UNROLL _Pragma("clang loop unroll_count(2)")
#elif DTRAIN__ISA == 2
#define DTRAIN__UNROLL _Pragma("GCC unroll 2")
#else
#define DTRAIN__UNROLL
#endif
#define DTRAIN__ROW_BEGIN(r)                                                \
    dtrain__v left##r = dtrain__vset(0), right##r = left##r;                \
    const float *a##r = a + ((r) < rows ? (r) : rows - 1) * (int64_t)a_row; \
    __builtin_prefetch(c + (r)*c_row);
#define DTRAIN__ROW_STEP(r)                            \
    do {                                               \
        const dtrain__v x = dtrain__vset(a##r[at]);    \
        left##r = dtrain__vfma(x, b_left, left##r);    \
        right##r = dtrain__vfma(x, b_right, right##r); \
    } while (0);
#define DTRAIN__ROW_END(r)                                                                        \
    if ((r) < rows) {                                                                             \
        float *to = c + (r)*c_row;                                                                \
        left##r *= dtrain__vset(alpha);                                                           \
        right##r *= dtrain__vset(alpha);                                                          \
        if (beta != 0) {                                                                          \
            left##r = dtrain__vfma(dtrain__vset(beta), dtrain__vload(to), left##r);               \
            right##r = dtrain__vfma(dtrain__vset(beta), dtrain__vload(to + DTRAIN__W), right##r); \
        }                                                                                         \
        dtrain__vstore(to, left##r);                                                              \
        dtrain__vstore(to + DTRAIN__W, right##r);                                                 \
    }
#define DTRAIN__TILE(ROWS, STEP)                                                           \
    ROWS(DTRAIN__ROW_BEGIN)                                                                \
    DTRAIN__UNROLL for (int64_t p = 0, at = 0; p < k; p++, at += a_step, b += b_row)       \
    {                                                                                      \
        const dtrain__v b_left = dtrain__vload(b), b_right = dtrain__vload(b + DTRAIN__W); \
        ROWS(STEP)                                                                         \
    }                                                                                      \
    ROWS(DTRAIN__ROW_END)

/* Multiply for attention; element (i,p) of A is a[i a_row + p a_step]. */
DTRAIN__ROUTINE void DTRAIN__K(tile)(int rows, int64_t k, const float *a, int64_t a_row,
                                     int64_t a_step, const float *b, int64_t b_row, float beta,
                                     float *c, int64_t c_row)
{
    const float alpha = 1;
    DTRAIN__TILE(DTRAIN__SHORT, DTRAIN__ROW_STEP)
}

/* Multiply a packed A: element (i,p) is a[p * MR + i]. */
DTRAIN__ROUTINE void DTRAIN__K(gemm_tile)(int64_t k, const float *a, const float *b, int64_t b_row,
                                          float alpha, float beta, float *c, int64_t c_row)
{
    enum { rows = DTRAIN__MR, a_row = 1, a_step = DTRAIN__MR };
    DTRAIN__TILE(DTRAIN__ROWS, DTRAIN__ROW_STEP)
}

/* ---- Packing */

/* Turn four runs along k into k groups of four: out[p * width + r] = in[r][p]. */
DTRAIN__HELPER void DTRAIN__K(interleave4)(float *out, int64_t width, const float *const in[4],
                                           int k)
{
    int p = 0;
#if defined(__clang__)
#define DTRAIN__SHUFFLE __builtin_shufflevector
#else
#define DTRAIN__SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, __extension__(order){i, j, k, l})
    typedef int32_t order __attribute__((vector_size(16)));
#endif
    typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
    for (; p + 4 <= k; p += 4) {
        const four a = *(const four *)(in[0] + p), b = *(const four *)(in[1] + p);
        const four c = *(const four *)(in[2] + p), d = *(const four *)(in[3] + p);
        const four ab_low = DTRAIN__SHUFFLE(a, b, 0, 4, 1, 5);
        const four ab_high = DTRAIN__SHUFFLE(a, b, 2, 6, 3, 7);
        const four cd_low = DTRAIN__SHUFFLE(c, d, 0, 4, 1, 5);
        const four cd_high = DTRAIN__SHUFFLE(c, d, 2, 6, 3, 7);
        float *to = out + p * width;
        *(four *)to = DTRAIN__SHUFFLE(ab_low, cd_low, 0, 1, 4, 5);
        *(four *)(to + width) = DTRAIN__SHUFFLE(ab_low, cd_low, 2, 3, 6, 7);
        *(four *)(to + 2 * width) = DTRAIN__SHUFFLE(ab_high, cd_high, 0, 1, 4, 5);
        *(four *)(to + 3 * width) = DTRAIN__SHUFFLE(ab_high, cd_high, 2, 3, 6, 7);
    }
#undef DTRAIN__SHUFFLE
    for (; p < k; p++)
        for (int r = 0; r < 4; r++) out[p * width + r] = in[r][p];
}

/* Do the same for the last two rows of a panel of six. */
DTRAIN__HELPER void DTRAIN__K(interleave2)(float *out, int64_t width, const float *const in[4],
                                           int k)
{
    for (int p = 0; p < k; p++) {
        out[p * width] = in[0][p];
        out[p * width + 1] = in[1][p];
    }
}

/* Pack memory that runs along k. Rows beyond `count` repeat the last row and are never stored. */
DTRAIN__HELPER void DTRAIN__K(pack_runs)(float *panel, int width, const dtrain__operand *x,
                                         int64_t index, int count, int64_t p, int k)
{
    float converted[4][DTRAIN__KC];
    for (int r = 0; r < width; r += 4) {
        const float *in[4];
        for (int i = 0; i < 4; i++) {
            const int64_t at = (index + (r + i < count ? r + i : count - 1)) * x->ld + p;
            in[i] = (const float *)x->data + at;
            if (x->dtype == DTRAIN_DTYPE_F32) continue;
            for (int q = 0; q < k; q += DTRAIN__W)
                dtrain__vstore(converted[i] + q,
                               dtrain__vload_as(x->data, x->dtype, at + q, k - q));
            in[i] = converted[i];
        }
        if (r + 4 <= width) DTRAIN__K(interleave4)(panel + r, width, in, k);
        else DTRAIN__K(interleave2)(panel + r, width, in, k);
    }
}

/* Pack `count` elements from `at` on and zeros up to `width`; both are constants for whole panels.
 */
DTRAIN__HELPER void DTRAIN__K(pack_step)(float *to, int width, const void *data, dtrain_dtype dtype,
                                         int64_t at, int count)
{
    for (int j = 0; j < width; j += DTRAIN__W) {
        dtrain__v v = dtrain__vset(0);
        if (j < count) v = dtrain__vload_as(data, dtype, at + j, count - j);
        if (j + DTRAIN__W <= width) dtrain__vstore(to + j, v);
        else memcpy(to + j, &v, (size_t)(width - j) * sizeof *to);
    }
}

/* Pack memory that runs along the panel's width: one copy for each k. */
DTRAIN__HELPER void DTRAIN__K(pack_steps)(float *panel, int width, const dtrain__operand *x,
                                          int64_t index, int count, int64_t p, int k)
{
    int64_t at = p * x->ld + index;
    if (count < width)
        for (int i = 0; i < k; i++, at += x->ld, panel += width)
            DTRAIN__K(pack_step)(panel, width, x->data, x->dtype, at, count);
    else if (x->dtype == DTRAIN_DTYPE_F32)
        for (int i = 0; i < k; i++, at += x->ld, panel += width)
            memcpy(panel, (const float *)x->data + at, (size_t)width * sizeof *panel);
    else if (x->dtype == DTRAIN_DTYPE_BF16)
        for (int i = 0; i < k; i++, at += x->ld, panel += width)
            DTRAIN__K(pack_step)(panel, width, x->data, DTRAIN_DTYPE_BF16, at, width);
    else
        for (int i = 0; i < k; i++, at += x->ld, panel += width)
            DTRAIN__K(pack_step)(panel, width, x->data, DTRAIN_DTYPE_F16, at, width);
}

DTRAIN__ROUTINE void DTRAIN__K(pack_a)(float *panel, const dtrain__operand *x, int64_t index,
                                       int count, int64_t p, int k)
{
    if (x->along_k) DTRAIN__K(pack_runs)(panel, DTRAIN__MR, x, index, count, p, k);
    else DTRAIN__K(pack_steps)(panel, DTRAIN__MR, x, index, count, p, k);
}

DTRAIN__ROUTINE void DTRAIN__K(pack_b)(float *panel, const dtrain__operand *x, int64_t index,
                                       int count, int64_t p, int k)
{
    if (x->along_k) DTRAIN__K(pack_runs)(panel, DTRAIN__N, x, index, count, p, k);
    else DTRAIN__K(pack_steps)(panel, DTRAIN__N, x, index, count, p, k);
}

/* ---- Epilogues, while the tile is in L1 */

DTRAIN__ROUTINE void DTRAIN__K(load_tile)(float *tile, int n, const dtrain__rectangle *from)
{
    for (int r = 0; r < from->rows; r++, tile += n)
        for (int j = 0; j < from->cols; j += DTRAIN__W)
            dtrain__vstore(tile + j, dtrain__vload_as(from->data, from->dtype, r * from->ld + j,
                                                      from->cols - j));
}

DTRAIN__ROUTINE void DTRAIN__K(store_tile)(const dtrain__rectangle *to, const float *tile, int n)
{
    for (int r = 0; r < to->rows; r++, tile += n)
        for (int j = 0; j < to->cols; j += DTRAIN__W)
            dtrain__vstore_as(to->data, to->dtype, r * to->ld + j, dtrain__vload(tile + j),
                              to->cols - j);
}

DTRAIN__ROUTINE void DTRAIN__K(finish_tile)(float *c, int64_t ldc, int n, int rows,
                                            const float *bias, float *aux, uint32_t activation)
{
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < n; j += DTRAIN__W) {
            const int64_t at = r * ldc + j;
            dtrain__v x = dtrain__vload(c + at);
            if (bias) x += dtrain__vload(bias + j);
            if (aux) dtrain__vstore(aux + at, x);
            dtrain__vstore(c + at, DTRAIN__K(vactivate)(activation, x));
        }
}

DTRAIN__ROUTINE void DTRAIN__K(slope_tile)(float *c, const float *z, int count, uint32_t activation)
{
    for (int i = 0; i < count; i += DTRAIN__W) {
        const dtrain__v x = dtrain__vload(z + i), d = dtrain__vload(c + i);
        if (activation == DTRAIN_ACTIVATION_GELU)
            dtrain__vstore(c + i, d * DTRAIN__K(vgelu_slope_low)(x));
        else dtrain__vstore(c + i, DTRAIN__K(vdeactivate)(activation, x, d));
    }
}

static const dtrain__tile_ops DTRAIN__K(tile_ops) = {DTRAIN__K(finish_tile), DTRAIN__K(slope_tile),
                                                     DTRAIN__K(load_tile), DTRAIN__K(store_tile)};
#define DTRAIN__ISA_OF(name, mr, nr, pair, unit, packing, pitch, kernel, pack_a, pack_b, begin, \
                       end)                                                                     \
    {                                                                                           \
        name, mr, nr, pair, unit, packing, pitch, DTRAIN__K(kernel), DTRAIN__K(pack_a),         \
            DTRAIN__K(pack_b), &DTRAIN__K(tile_ops), begin, end                                 \
    }
#define DTRAIN__FP32_ISA(mr, nr, packing, pitch, kernel, pack_a, pack_b)                         \
    DTRAIN__ISA_OF(DTRAIN__STRING(DTRAIN__SUFFIX), mr, nr, 1, 1, packing, pitch, kernel, pack_a, \
                   pack_b, NULL, NULL)
static const dtrain__isa DTRAIN__K(isa) = DTRAIN__FP32_ISA(DTRAIN__MR, DTRAIN__N, 4, 0, gemm_tile,
                                                           pack_a, pack_b);
