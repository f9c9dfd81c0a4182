/* ---- Top-k: the pass that meets every element -------------------------------------------------
 *
 * Without feedback 4 bytes an element, with residual 12, with velocity 20; candidates are few. */

#define dtrain__vsettle DTRAIN__INSTANCE(dtrain__vsettle)
#define dtrain__topk_fold DTRAIN__INSTANCE(dtrain__topk_fold)
#define dtrain__topk_ahead DTRAIN__INSTANCE(dtrain__topk_ahead)
#define dtrain__topk_collect DTRAIN__INSTANCE(dtrain__topk_collect)
#define dtrain__range_topk DTRAIN__INSTANCE(dtrain__range_topk)

/* v, as it is: a product that passes here is rounded before it is added to anything, also where the
 * compiler may fuse the two. So every instruction set gives the same bits. */
DTRAIN__VECTOR dtrain__v dtrain__vsettle(dtrain__v v)
{
#if defined(__x86_64__)
    __asm__("" : "+x"(v));
#else
    __asm__("" : "+m"(v));
#endif
    return v;
}

/* Adds elements i .. i+n-1 of x to velocity and residual; returns what is selected from. */
DTRAIN__VECTOR dtrain__v dtrain__topk_fold(const dtrain_topk_args *a, int64_t i, int64_t n)
{
    dtrain__v x = dtrain__vload_n(a->x + i, n);
    if (a->velocity) {
        const dtrain__v old = dtrain__vload_n(a->velocity + i, n);
        x = dtrain__vsettle(dtrain__vset(a->momentum) * old) + x;
        dtrain__vstore_n(a->velocity + i, x, n);
    }
    if (a->residual) {
        x = dtrain__vload_n(a->residual + i, n) + x;
        dtrain__vstore_n(a->residual + i, x, n);
    }
    return x;
}

/* The processor's own prefetching stops at the end of a page, which streams of 4 KiB a turn meet
 * all the time: one page ahead is worth a third of the time. Past the end it does nothing. */
DTRAIN__VECTOR void dtrain__topk_ahead(const dtrain_topk_args *a, int64_t i)
{
    const uintptr_t at = (uintptr_t)i * sizeof(float) + 4096;
    __builtin_prefetch((const void *)((uintptr_t)a->x + at));
    if (a->residual) __builtin_prefetch((const void *)((uintptr_t)a->residual + at), 1);
    if (a->velocity) __builtin_prefetch((const void *)((uintptr_t)a->velocity + at), 1);
}

/* Folds elements [begin, end) and appends the candidates among them, in order; returns how many.
 * Stores go up to a vector beyond those: a lane that is no candidate is overwritten by the next. */
#if DTRAIN__ISA == 3
DTRAIN__VECTOR int64_t dtrain__topk_collect(const dtrain_topk_args *a, int64_t begin, int64_t end,
                                            int32_t below, const uint32_t *orders, float *values,
                                            int32_t *indices)
{
    const dtrain__vi mask = dtrain__viset(INT32_MAX), border = dtrain__viset(below);
    int64_t found = 0;
    (void)orders;
    for (int64_t i = begin; i < end; i += 16) {
        const int64_t n = end - i;
        dtrain__topk_ahead(a, i);
        const dtrain__v x = dtrain__topk_fold(a, i, n);
        const dtrain__vi at = dtrain__viset((int32_t)i) + dtrain__viota();
        __mmask16 some =
            _mm512_cmpgt_epi32_mask((__m512i)(dtrain__vbits(x) & mask), (__m512i)border);
        if (n < 16) some &= (__mmask16)((1u << n) - 1u);
        _mm512_storeu_ps(values + found, _mm512_maskz_compress_ps(some, (__m512)x));
        _mm512_storeu_si512(indices + found, _mm512_maskz_compress_epi32(some, (__m512i)at));
        found += __builtin_popcount(some);
    }
    return found;
}
#else
#define dtrain__vlanes DTRAIN__INSTANCE(dtrain__vlanes)

/* Bit j: lane j of a mask is set. */
DTRAIN__VECTOR uint32_t dtrain__vlanes(dtrain__vi mask)
{
#if DTRAIN__ISA == 2
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif DTRAIN__ISA == 1 && defined(__SSE2__)
    return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
    int32_t lanes[DTRAIN__W];
    uint32_t bits = 0;
    memcpy(lanes, &mask, sizeof lanes);
    for (int j = 0; j < DTRAIN__W; j++) bits |= (uint32_t)(lanes[j] & 1) << j;
    return bits;
#endif
}

#if DTRAIN__ISA == 2
#define dtrain__topk_orders DTRAIN__INSTANCE(dtrain__topk_orders)

/* What _mm512_maskz_compress does: for each mask the lanes that are set, the first in the lowest
 * four bits. */
DTRAIN__VECTOR void dtrain__topk_orders(uint32_t orders[256])
{
    orders[0] = 0;
    for (uint32_t some = 1; some < 256; some++)
        orders[some] = orders[some & (some - 1)] << 4 | (uint32_t)__builtin_ctz(some);
}

DTRAIN__VECTOR int64_t dtrain__topk_collect(const dtrain_topk_args *a, int64_t begin, int64_t end,
                                            int32_t below, const uint32_t *orders, float *values,
                                            int32_t *indices)
{
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const dtrain__vi mask = dtrain__viset(INT32_MAX), border = dtrain__viset(below);
    int64_t found = 0;
    for (int64_t i = begin; i < end; i += 8) {
        const int64_t n = end - i;
        if (i % 16 == 0) dtrain__topk_ahead(a, i);
        const dtrain__v x = dtrain__topk_fold(a, i, n);
        const dtrain__vi at = dtrain__viset((int32_t)i) + dtrain__viota();
        uint32_t some = dtrain__vlanes(dtrain__viless(border, dtrain__vbits(x) & mask));
        if (n < 8) some &= (1u << n) - 1u;
        const __m256i order = _mm256_srlv_epi32(_mm256_set1_epi32((int32_t)orders[some]), shifts);
        _mm256_storeu_ps(values + found, _mm256_permutevar8x32_ps((__m256)x, order));
        _mm256_storeu_si256((__m256i *)(void *)(indices + found),
                            _mm256_permutevar8x32_epi32((__m256i)at, order));
        found += __builtin_popcount(some);
    }
    return found;
}
#else
/* 16 elements at a time. Most have no candidate, and guessing which costs more than the rest: those
 * that have are listed first, without a branch. */
DTRAIN__VECTOR int64_t dtrain__topk_collect(const dtrain_topk_args *a, int64_t begin, int64_t end,
                                            int32_t below, const uint32_t *orders, float *values,
                                            int32_t *indices)
{
    const dtrain__vi mask = dtrain__viset(INT32_MAX), border = dtrain__viset(below);
    const float *from = a->residual ? a->residual : a->x;
    struct {
        int32_t at;
        uint32_t some;
    } groups[DTRAIN__TOPK_BLOCK / 16 + 1];
    int64_t found = 0, group_count = 0;
    (void)orders;
    for (int64_t i = begin; i < end; i += 16) {
        const int64_t n = end - i < 16 ? end - i : 16;
        uint32_t some = 0;
        dtrain__topk_ahead(a, i);
        for (int64_t j = 0; j < n; j += DTRAIN__W) {
            const dtrain__v x = dtrain__topk_fold(a, i + j, n - j);
            some |= dtrain__vlanes(dtrain__viless(border, dtrain__vbits(x) & mask)) << j;
        }
        groups[group_count].at = (int32_t)i;
        groups[group_count].some = some & ((1u << n) - 1u);
        group_count += groups[group_count].some != 0;
    }
    for (int64_t g = 0; g < group_count; g++)
        for (uint32_t some = groups[g].some; some; some &= some - 1u) {
            const int32_t at = groups[g].at + __builtin_ctz(some);
            values[found] = from[at];
            indices[found++] = at;
        }
    return found;
}
#endif
#endif

/* A list that is full stays so: what is left is folded only. */
DTRAIN__KERNEL void dtrain__range_topk(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain__topk_pass *pass = (const dtrain__topk_pass *)job->args;
    const dtrain_topk_args a = *pass->args;
    float *values = pass->values + index * pass->room;
    int32_t *indices = pass->indices + index * pass->room;
    int64_t found = 0, at = begin;
#if DTRAIN__ISA == 2
    uint32_t orders[256];
    dtrain__topk_orders(orders);
#else
    const uint32_t *const orders = NULL;
#endif
    for (; at < end && pass->room - found >= DTRAIN__TOPK_SLACK; at += DTRAIN__TOPK_BLOCK) {
        const int64_t stop = end - at < DTRAIN__TOPK_BLOCK ? end : at + DTRAIN__TOPK_BLOCK;
        found += dtrain__topk_collect(&a, at, stop, pass->below, orders, values + found,
                                      indices + found);
    }
    pass->found[index] = at < end ? -1 : found;
    for (; a.residual && at < end; at += DTRAIN__W) dtrain__topk_fold(&a, at, end - at);
}

/* ---- Orthonormal columns: X^T X and X F, in double --------------------------------------------
 *
 * Both are made of one tile, 4 by two vectors: the sum over t of a column of 4 and a row of b. */

#define dtrain__vdset DTRAIN__INSTANCE(dtrain__vdset)
#define dtrain__vdfma DTRAIN__INSTANCE(dtrain__vdfma)
#define dtrain__vdload DTRAIN__INSTANCE(dtrain__vdload)
#define dtrain__basis_tile DTRAIN__INSTANCE(dtrain__basis_tile)
#define dtrain__basis_widen DTRAIN__INSTANCE(dtrain__basis_widen)
#define dtrain__gram_few DTRAIN__INSTANCE(dtrain__gram_few)
#define dtrain__recombine_few DTRAIN__INSTANCE(dtrain__recombine_few)
#define dtrain__gram_rows DTRAIN__INSTANCE(dtrain__gram_rows)
#define dtrain__range_gram DTRAIN__INSTANCE(dtrain__range_gram)
#define dtrain__range_recombine DTRAIN__INSTANCE(dtrain__range_recombine)

#if DTRAIN__ISA == 3
DTRAIN__VECTOR dtrain__vd dtrain__vdset(double x) { return (dtrain__vd)_mm512_set1_pd(x); }
DTRAIN__VECTOR dtrain__vd dtrain__vdfma(dtrain__vd a, dtrain__vd b, dtrain__vd c)
{
    return (dtrain__vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#elif DTRAIN__ISA == 2
DTRAIN__VECTOR dtrain__vd dtrain__vdset(double x) { return (dtrain__vd)_mm256_set1_pd(x); }
DTRAIN__VECTOR dtrain__vd dtrain__vdfma(dtrain__vd a, dtrain__vd b, dtrain__vd c)
{
    return (dtrain__vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#else
DTRAIN__VECTOR dtrain__vd dtrain__vdset(double x)
{
    double lanes[DTRAIN__H];
    dtrain__vd v;
    for (int i = 0; i < DTRAIN__H; i++) lanes[i] = x;
    memcpy(&v, lanes, sizeof v);
    return v;
}
DTRAIN__VECTOR dtrain__vd dtrain__vdfma(dtrain__vd a, dtrain__vd b, dtrain__vd c)
{
    return a * b + c;
}
#endif

DTRAIN__VECTOR dtrain__vd dtrain__vdload(const double *p)
{
    dtrain__vd v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* out (4, 2H) += sum over t < count of a[t * a_step + row * a_next] * b[t * ld + column]. */
#define DTRAIN__TILE_ROW(r)                                                  \
    {                                                                        \
        const dtrain__vd weight = dtrain__vdset(a[t * a_step + r * a_next]); \
        low##r = dtrain__vdfma(weight, low, low##r);                         \
        high##r = dtrain__vdfma(weight, high, high##r);                      \
    }
#define DTRAIN__TILE_OPEN(r)                              \
    dtrain__vd low##r = dtrain__vdload(out + r * out_ld), \
               high##r = dtrain__vdload(out + r * out_ld + DTRAIN__H)
#define DTRAIN__TILE_CLOSE(r)                         \
    memcpy(out + r * out_ld, &low##r, sizeof low##r); \
    memcpy(out + r * out_ld + DTRAIN__H, &high##r, sizeof high##r)
DTRAIN__VECTOR void dtrain__basis_tile(double *out, int64_t out_ld, const double *a, int64_t a_step,
                                       int64_t a_next, const double *b, int64_t ld, int64_t count)
{
    DTRAIN__TILE_OPEN(0);
    DTRAIN__TILE_OPEN(1);
    DTRAIN__TILE_OPEN(2);
    DTRAIN__TILE_OPEN(3);
    for (int64_t t = 0; t < count; t++) {
        const dtrain__vd low = dtrain__vdload(b + t * ld),
                         high = dtrain__vdload(b + t * ld + DTRAIN__H);
        DTRAIN__TILE_ROW(0)
        DTRAIN__TILE_ROW(1)
        DTRAIN__TILE_ROW(2)
        DTRAIN__TILE_ROW(3)
    }
    DTRAIN__TILE_CLOSE(0);
    DTRAIN__TILE_CLOSE(1);
    DTRAIN__TILE_CLOSE(2);
    DTRAIN__TILE_CLOSE(3);
}
#undef DTRAIN__TILE_ROW
#undef DTRAIN__TILE_OPEN
#undef DTRAIN__TILE_CLOSE

/* Rows [row, row + count) in double; zeros behind the last column, and rows of zeros up to a
 * multiple of 4. */
DTRAIN__VECTOR void dtrain__basis_widen(const dtrain__basis *basis, int64_t row, int64_t count,
                                        double *wide)
{
    const float *x = basis->x + row * basis->columns;
    const int64_t filled = (count + 3) / 4 * 4;
    memset(wide, 0, (size_t)(filled * basis->padded) * sizeof *wide);
    for (int64_t i = 0; i < count; i++, x += basis->columns, wide += basis->padded) {
        int64_t j = 0;
        for (; j + DTRAIN__H <= basis->columns; j += DTRAIN__H) {
            const dtrain__vd some = dtrain__vwiden(x + j);
            memcpy(wide + j, &some, sizeof some);
        }
        for (; j < basis->columns; j++) wide[j] = (double)x[j];
    }
}

/* Up to 4 columns, too few for a tile; columns is a constant where these are called. */
DTRAIN__VECTOR void dtrain__gram_few(const float *x, int64_t rows, int columns, double *sums,
                                     int64_t ld)
{
    double s01 = 0, s02 = 0, s03 = 0, s12 = 0, s13 = 0, s23 = 0;
    double s00 = 0, s11 = 0, s22 = 0, s33 = 0;
    for (int64_t row = 0; row < rows; row++, x += columns) {
        const double a = (double)x[0], b = (double)x[1];
        const double c = columns > 2 ? (double)x[2] : 0, d = columns > 3 ? (double)x[3] : 0;
        s00 += a * a, s01 += a * b, s02 += a * c, s03 += a * d;
        s11 += b * b, s12 += b * c, s13 += b * d;
        s22 += c * c, s23 += c * d;
        s33 += d * d;
    }
    sums[0] = s00, sums[1] = s01, sums[2] = s02, sums[3] = s03;
    sums[ld + 1] = s11, sums[ld + 2] = s12, sums[ld + 3] = s13;
    sums[2 * ld + 2] = s22, sums[2 * ld + 3] = s23;
    sums[3 * ld + 3] = s33;
}

DTRAIN__VECTOR void dtrain__recombine_few(float *x, int64_t rows, int columns, const double *f,
                                          int64_t ld)
{
    const double f00 = f[0], f01 = f[1], f02 = f[2], f03 = f[3], f11 = f[ld + 1], f12 = f[ld + 2];
    const double f13 = f[ld + 3], f22 = f[2 * ld + 2], f23 = f[2 * ld + 3], f33 = f[3 * ld + 3];
    for (int64_t row = 0; row < rows; row++, x += columns) {
        const double a = (double)x[0], b = columns > 1 ? (double)x[1] : 0;
        const double c = columns > 2 ? (double)x[2] : 0, d = columns > 3 ? (double)x[3] : 0;
        x[0] = (float)(a * f00);
        if (columns > 1) x[1] = (float)(a * f01 + b * f11);
        if (columns > 2) x[2] = (float)(a * f02 + b * f12 + c * f22);
        if (columns > 3) x[3] = (float)(a * f03 + b * f13 + c * f23 + d * f33);
    }
}

DTRAIN__VECTOR void dtrain__gram_rows(const dtrain__basis *basis, int64_t first, int64_t last,
                                      double *sums)
{
    const float *x = basis->x + first * basis->columns;
    const int64_t ld = basis->padded, columns = basis->columns, rows = last - first;
    double wide[DTRAIN__BASIS_ROWS * DTRAIN_ORTHOGONALIZE_COLUMNS];
    switch (columns) {
    case 1: sums[0] = dtrain__sum_chunk(x, rows, true); return;
    case 2: dtrain__gram_few(x, rows, 2, sums, ld); return;
    case 3: dtrain__gram_few(x, rows, 3, sums, ld); return;
    case 4: dtrain__gram_few(x, rows, 4, sums, ld); return;
    default: break;
    }
    for (int64_t row = first; row < last; row += DTRAIN__BASIS_ROWS) {
        const int64_t count = last - row < DTRAIN__BASIS_ROWS ? last - row : DTRAIN__BASIS_ROWS;
        dtrain__basis_widen(basis, row, count, wide);
        for (int64_t i = 0; i < columns; i += 4)
            for (int64_t j = i / (2 * DTRAIN__H) * (2 * DTRAIN__H); j < columns; j += 2 * DTRAIN__H)
                dtrain__basis_tile(sums + i * ld + j, ld, wide + i, ld, 1, wide + j, ld, count);
    }
}

/* Items are chunks of rows: each has its own sum, the upper triangle of X^T X over its rows. */
DTRAIN__KERNEL void dtrain__range_gram(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain__basis *basis = (const dtrain__basis *)job->args;
    const int64_t square = basis->padded * basis->padded;
    (void)index;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const int64_t first = chunk * basis->chunk, left = basis->rows - first;
        double *sums = basis->sums + chunk * square;
        memset(sums, 0, (size_t)square * sizeof *sums);
        dtrain__gram_rows(basis, first, first + (left < basis->chunk ? left : basis->chunk), sums);
    }
}

/* Items are rows: x = x * factor, whose lower triangle is zero. */
DTRAIN__KERNEL void dtrain__range_recombine(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain__basis *basis = (const dtrain__basis *)job->args;
    const int64_t ld = basis->padded, columns = basis->columns;
    double wide[DTRAIN__BASIS_ROWS * DTRAIN_ORTHOGONALIZE_COLUMNS], out[4 * 2 * DTRAIN__H];
    float *x = basis->x + begin * columns;
    (void)index;
    switch (columns) {
    case 1: dtrain__recombine_few(x, end - begin, 1, basis->factor, ld); return;
    case 2: dtrain__recombine_few(x, end - begin, 2, basis->factor, ld); return;
    case 3: dtrain__recombine_few(x, end - begin, 3, basis->factor, ld); return;
    case 4: dtrain__recombine_few(x, end - begin, 4, basis->factor, ld); return;
    default: break;
    }
    for (int64_t row = begin; row < end; row += DTRAIN__BASIS_ROWS) {
        const int64_t count = end - row < DTRAIN__BASIS_ROWS ? end - row : DTRAIN__BASIS_ROWS;
        dtrain__basis_widen(basis, row, count, wide);
        for (int64_t i = 0; i < count; i += 4)
            for (int64_t j = 0; j < columns; j += 2 * DTRAIN__H) {
                const int64_t stop = j + 2 * DTRAIN__H < columns ? j + 2 * DTRAIN__H : columns;
                memset(out, 0, sizeof out);
                dtrain__basis_tile(out, 2 * DTRAIN__H, wide + i * ld, 1, ld, basis->factor + j, ld,
                                   stop);
                for (int64_t r = i; r < count && r < i + 4; r++)
                    for (int64_t c = j; c < stop; c++)
                        basis->x[(row + r) * columns + c] =
                            (float)out[(r - i) * 2 * DTRAIN__H + c - j];
            }
    }
}
