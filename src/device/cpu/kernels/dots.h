/* Products of bf16 by VDPBF16PS
 *
 * A cell of 32 bits holds two bf16 that are neighbours in k. The instruction multiplies the cells
 * of two vectors and adds both products to a sum in fp32; denormals count as zero. On AMD's cores
 * it is as fast as a multiply-add of fp32, which does half as much.
 *
 *     rows       channels of images lie in memory as cells do: windows are copied as they are
 *     columns    two windows, or two pixels of d_y, are made into cells
 *
 * Tests compile the text for plain vectors as wide. */

#if DTRAIN__PAIRS && (DTRAIN__ISA == 3 || defined(DTRAIN__TEST_WIDE))
#define DTRAIN__DOTS 1
#else
#define DTRAIN__DOTS 0
#endif

#if DTRAIN__DOTS
#if DTRAIN__ISA == 3
#define DTRAIN__ON_DOTS \
    __attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#else
#define DTRAIN__ON_DOTS
#endif
#define DTRAIN__DOT_HELPER static inline __attribute__((always_inline, unused)) DTRAIN__ON_DOTS
#define DTRAIN__DOT_ROUTINE static DTRAIN__ON_DOTS
typedef int32_t DTRAIN__K(cell) __attribute__((may_alias));

/* sum + a b, of both halves of each cell. */
DTRAIN__DOT_HELPER dtrain__v DTRAIN__K(vdot)(dtrain__v sum, dtrain__vi a, dtrain__vi b)
{
#if DTRAIN__ISA == 3
    return (dtrain__v)_mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    const dtrain__vi high = dtrain__viset((int32_t)0xffff0000);
    sum = dtrain__vfma(dtrain__vfrombits(a & high), dtrain__vfrombits(b & high), sum);
    return dtrain__vfma(dtrain__vfrombits(a << 16), dtrain__vfrombits(b << 16), sum);
#endif
}

/* Round to bf16. */
DTRAIN__DOT_HELPER void DTRAIN__K(to_halves)(uint16_t *to, dtrain__v v)
{
#if DTRAIN__ISA == 3
    _mm256_storeu_si256((__m256i *)(void *)to, (__m256i)_mm512_cvtneps_pbh(v));
#else
    DTRAIN__K(to_bf16)(to, v);
#endif
}

/* Round two steps of k to bf16 and make cells of them. */
DTRAIN__DOT_HELPER void DTRAIN__K(to_cells)(float *to, dtrain__v low, dtrain__v high)
{
#if DTRAIN__ISA == 3
    static const uint16_t order[32] __attribute__((aligned(64))) = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    const __m512i index = _mm512_load_si512((const void *)order);
    _mm512_storeu_si512((void *)to, _mm512_maskz_permutexvar_epi16(0xffffffffu, index, both));
#else
    uint16_t halves[2][DTRAIN__W];
    DTRAIN__K(to_bf16)(halves[0], low);
    DTRAIN__K(to_bf16)(halves[1], high);
    for (int i = 0; i < DTRAIN__W; i++) {
        const uint16_t cell[2] = {halves[0][i], halves[1][i]};
        memcpy(to + i, cell, sizeof cell);
    }
#endif
}

/* ---- Tiles of convolutions, as in convolution.h */

#define DTRAIN__DOT_STEP(r)                                                                    \
    do {                                                                                       \
        const dtrain__vi x = dtrain__viset(((const DTRAIN__K(cell) *)(const void *)a##r)[at]); \
        left##r = DTRAIN__K(vdot)(left##r, x, dtrain__vbits(b_left));                          \
        right##r = DTRAIN__K(vdot)(right##r, x, dtrain__vbits(b_right));                       \
    } while (0);
#define DTRAIN__NARROW_DOT(r)                                                              \
    sum##r = DTRAIN__K(vdot)(                                                              \
        sum##r, dtrain__viset(((const DTRAIN__K(cell) *)(const void *)a)[(r)*a_row + at]), \
        dtrain__vbits(b_only));
#define DTRAIN__DOT_TILE(name)                                                                 \
    DTRAIN__DOT_ROUTINE void DTRAIN__K(name)(int64_t k, const float *a, const float *b,        \
                                             int64_t b_row, float alpha, float beta, float *c, \
                                             int64_t c_row)

DTRAIN__DOT_TILE(dot_rows_tile)
{
    enum { rows = DTRAIN__MR, a_row = DTRAIN__PITCH, a_step = 1 };
    DTRAIN__TILE(DTRAIN__ROWS, DTRAIN__DOT_STEP)
}

DTRAIN__DOT_TILE(dot_narrow_rows_tile)
{
    enum { a_row = DTRAIN__PITCH, a_step = 1 };
    DTRAIN__NARROW_TILE(DTRAIN__NARROW_DOT)
}

DTRAIN__DOT_TILE(dot_columns_tile)
{
    enum { rows = DTRAIN__MR, a_row = 1, a_step = DTRAIN__MR };
    DTRAIN__TILE(DTRAIN__ROWS, DTRAIN__DOT_STEP)
}

DTRAIN__DOT_TILE(dot_narrow_columns_tile)
{
    enum { a_row = 1, a_step = DTRAIN__NARROW_MR };
    DTRAIN__NARROW_TILE(DTRAIN__NARROW_DOT)
}

/* ---- Packing */

DTRAIN__DOT_ROUTINE void DTRAIN__K(pack_dot_rows)(float *panel, const dtrain__operand *x,
                                                  int64_t index, int count, int64_t p, int k)
{
    DTRAIN__K(pack_windows_as)(panel, x, DTRAIN_DTYPE_BF16, index, count, p, k, true);
    for (int r = 0; r < count && k % 2; r++) /* the last cell is half empty */
        memset((uint16_t *)(void *)(panel + r * DTRAIN__PITCH) + k, 0, sizeof(uint16_t));
}

/* Pack columns in fp32, some steps at a time, and make cells of them. */
DTRAIN__DOT_HELPER void DTRAIN__K(pack_dot_columns_of)(float *panel, int width,
                                                       const dtrain__operand *x, int64_t index,
                                                       int count, int64_t p, int k)
{
    enum { STEPS = 32 };
    float steps[STEPS * DTRAIN__NARROW_MR + 2 * DTRAIN__W];
    for (int first = 0; first < k; first += STEPS) {
        const int now = k - first < STEPS ? k - first : STEPS;
        DTRAIN__K(pack_columns_of)(steps, width, x, index, count, p + first, now);
        for (int i = 0; i < now; i += 2, panel += width)
            for (int j = 0; j < width; j += DTRAIN__W) {
                const float *low = steps + i * width + j;
                const dtrain__v high = i + 1 < now ? dtrain__vload(low + width) : dtrain__vset(0);
                float cells[DTRAIN__W], *to = j + DTRAIN__W <= width ? panel + j : cells;
                DTRAIN__K(to_cells)(to, dtrain__vload(low), high);
                if (to == cells) memcpy(panel + j, cells, (size_t)(width - j) * sizeof *cells);
            }
    }
}

DTRAIN__DOT_ROUTINE void DTRAIN__K(pack_dot_columns)(float *panel, const dtrain__operand *x,
                                                     int64_t index, int count, int64_t p, int k)
{
    DTRAIN__K(pack_dot_columns_of)(panel, DTRAIN__MR, x, index, count, p, k);
}

DTRAIN__DOT_ROUTINE void DTRAIN__K(pack_dot_narrow_columns)(float *panel, const dtrain__operand *x,
                                                            int64_t index, int count, int64_t p,
                                                            int k)
{
    DTRAIN__K(pack_dot_columns_of)(panel, DTRAIN__NARROW_MR, x, index, count, p, k);
}

DTRAIN__DOT_HELPER void DTRAIN__K(pack_dot_b_of)(float *panel, int width, const dtrain__operand *x,
                                                 dtrain_dtype dtype, int64_t index, int count,
                                                 int64_t p, int k)
{
    for (int i = 0; i < k; i += 2)
        for (int j = 0; j < width; j += DTRAIN__W, panel += DTRAIN__W) {
            const int64_t at = (p + i) * x->ld + index + j;
            dtrain__v low = dtrain__vset(0), high = low;
            if (j < count) low = dtrain__vload_as(x->data, dtype, at, count - j);
            if (j < count && i + 1 < k)
                high = dtrain__vload_as(x->data, dtype, at + x->ld, count - j);
            DTRAIN__K(to_cells)(panel, low, high);
        }
}

/* B is d_y, or a weight in fp32 that was bf16. */
DTRAIN__DOT_ROUTINE void DTRAIN__K(pack_dot_b)(float *panel, const dtrain__operand *x,
                                               int64_t index, int count, int64_t p, int k)
{
    if (x->dtype == DTRAIN_DTYPE_F32)
        DTRAIN__K(pack_dot_b_of)(panel, DTRAIN__N, x, DTRAIN_DTYPE_F32, index, count, p, k);
    else DTRAIN__K(pack_dot_b_of)(panel, DTRAIN__N, x, DTRAIN_DTYPE_BF16, index, count, p, k);
}

DTRAIN__DOT_ROUTINE void DTRAIN__K(pack_dot_narrow_b)(float *panel, const dtrain__operand *x,
                                                      int64_t index, int count, int64_t p, int k)
{
    if (x->dtype == DTRAIN_DTYPE_F32)
        DTRAIN__K(pack_dot_b_of)(panel, DTRAIN__W, x, DTRAIN_DTYPE_F32, index, count, p, k);
    else DTRAIN__K(pack_dot_b_of)(panel, DTRAIN__W, x, DTRAIN_DTYPE_BF16, index, count, p, k);
}

static const dtrain__conv_tiles DTRAIN__K(dot_tiles) = {
    DTRAIN__CONV_ISA(DTRAIN__MR, DTRAIN__N, 2, 2, DTRAIN__PITCH, dot_rows_tile, pack_dot_rows,
                     pack_dot_b, tile_ops),
    DTRAIN__CONV_ISA(DTRAIN__NARROW_MR, DTRAIN__W, 2, 2, DTRAIN__PITCH, dot_narrow_rows_tile,
                     pack_dot_rows, pack_dot_narrow_b, narrow_tile_ops),
    DTRAIN__CONV_ISA(DTRAIN__MR, DTRAIN__N, 2, 8, 0, dot_columns_tile, pack_dot_columns, pack_dot_b,
                     tile_ops),
    DTRAIN__CONV_ISA(DTRAIN__NARROW_MR, DTRAIN__W, 2, 8, 0, dot_narrow_columns_tile,
                     pack_dot_narrow_columns, pack_dot_narrow_b, narrow_tile_ops)};
#endif
