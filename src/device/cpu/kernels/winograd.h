/* Convolution of 3 x 3 taps by patches
 *
 * Four neighbours of y depend on six of x. In one dimension, four results of three taps need six
 * multiplications in place of twelve (Winograd, "Arithmetic Complexity of Computations", 1980;
 * Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016): a product of
 * polynomials by its values at 0, p, -p, q, -q and infinity,
 *
 *     y = A^T ((G w) (B^T x))
 *
 *     A^T = 1  1   1   1   1   0     B^T = p2 q2   0    -p2-q2   0     1  0
 *           0  p  -p   q  -q   0             0   -p q2   -q2     p     1  0
 *           0  p2  p2  q2  q2  0             0    p q2   -q2    -p     1  0
 *           0  p3 -p3  q3 -q3  1             0   -q p2   -p2     q     1  0
 *                                            0    q p2   -p2    -q     1  0
 *     G = rows (1, t, t2) / n(t),            0    p2 q2    0   -p2-q2  0  1
 *         the last (0, 0, 1)
 *
 * with p2 for the square of p and n(t) the product of t's distances from the other four values. In
 * two dimensions, rows and then columns are transformed, and 36 multiplications do the work of 144:
 * each of the 36 places of a patch of 6 x 6 is a separate product, (patches, in) times (in, out),
 * of transformed patches. By transposition:
 *
 *     gradient of x    a convolution of d_y with the taps in reverse order
 *     gradient of w    G^T (sum over patches of (A d_y) (B^T x))
 *
 * All sums are fp32, also of halves. The transforms lose accuracy that depends on p and q: with 5/8
 * and 3/2, whose powers are exact, errors are a third of the errors with the usual 1 and 2, and
 * about three times the errors of patches of 4 x 4 (7e-7 of y, root mean square, with 48 channels).
 *
 * Transformed data is (36 places, vectors of channels, patches or channels of the other side,
 * lanes), with zeros for missing channels: tiles step through it by constants. */

#if DTRAIN__FAST
#define DTRAIN__POINT_P 0.625f
#define DTRAIN__POINT_Q 1.5f
#define DTRAIN__P2 (DTRAIN__POINT_P * DTRAIN__POINT_P)
#define DTRAIN__Q2 (DTRAIN__POINT_Q * DTRAIN__POINT_Q)
#define DTRAIN__N0 (DTRAIN__P2 * DTRAIN__Q2)
#define DTRAIN__NP (2 * DTRAIN__P2 * (DTRAIN__P2 - DTRAIN__Q2))
#define DTRAIN__NQ (2 * DTRAIN__Q2 * (DTRAIN__Q2 - DTRAIN__P2))

/* Each transform of a line stores its results `step` floats apart. */

/* B^T x */
DTRAIN__HELPER void DTRAIN__K(line_input)(float *to, int64_t step, dtrain__v a, dtrain__v b,
                                          dtrain__v c, dtrain__v d, dtrain__v e, dtrain__v f)
{
    const dtrain__v p = dtrain__vset(DTRAIN__POINT_P), q = dtrain__vset(DTRAIN__POINT_Q);
    const dtrain__v p2 = dtrain__vset(-DTRAIN__P2), q2 = dtrain__vset(-DTRAIN__Q2);
    const dtrain__v both = dtrain__vset(DTRAIN__P2 * DTRAIN__Q2), sum = p2 + q2;
    const dtrain__v p_even = dtrain__vfma(q2, c, e), p_odd = p * dtrain__vfma(q2, b, d);
    const dtrain__v q_even = dtrain__vfma(p2, c, e), q_odd = q * dtrain__vfma(p2, b, d);
    dtrain__vstore(to, dtrain__vfma(both, a, dtrain__vfma(sum, c, e)));
    dtrain__vstore(to + step, p_even + p_odd);
    dtrain__vstore(to + 2 * step, p_even - p_odd);
    dtrain__vstore(to + 3 * step, q_even + q_odd);
    dtrain__vstore(to + 4 * step, q_even - q_odd);
    dtrain__vstore(to + 5 * step, dtrain__vfma(both, b, dtrain__vfma(sum, d, f)));
}

/* A d_y */
DTRAIN__HELPER void DTRAIN__K(line_slope)(float *to, int64_t step, dtrain__v a, dtrain__v b,
                                          dtrain__v c, dtrain__v d)
{
    const dtrain__v p = dtrain__vset(DTRAIN__POINT_P), q = dtrain__vset(DTRAIN__POINT_Q);
    const dtrain__v p2 = dtrain__vset(DTRAIN__P2), q2 = dtrain__vset(DTRAIN__Q2);
    const dtrain__v p_even = dtrain__vfma(p2, c, a), p_odd = p * dtrain__vfma(p2, d, b);
    const dtrain__v q_even = dtrain__vfma(q2, c, a), q_odd = q * dtrain__vfma(q2, d, b);
    dtrain__vstore(to, a);
    dtrain__vstore(to + step, p_even + p_odd);
    dtrain__vstore(to + 2 * step, p_even - p_odd);
    dtrain__vstore(to + 3 * step, q_even + q_odd);
    dtrain__vstore(to + 4 * step, q_even - q_odd);
    dtrain__vstore(to + 5 * step, d);
}

/* A^T */
DTRAIN__HELPER void DTRAIN__K(line_output)(float *to, int64_t step, dtrain__v a, dtrain__v b,
                                           dtrain__v c, dtrain__v d, dtrain__v e, dtrain__v f)
{
    const dtrain__v p = dtrain__vset(DTRAIN__POINT_P), q = dtrain__vset(DTRAIN__POINT_Q);
    const dtrain__v p2 = dtrain__vset(DTRAIN__P2), q2 = dtrain__vset(DTRAIN__Q2);
    const dtrain__v p_even = b + c, p_odd = p * (b - c), q_even = d + e, q_odd = q * (d - e);
    dtrain__vstore(to, a + p_even + q_even);
    dtrain__vstore(to + step, p_odd + q_odd);
    dtrain__vstore(to + 2 * step, dtrain__vfma(q2, q_even, p2 * p_even));
    dtrain__vstore(to + 3 * step, dtrain__vfma(q2, q_odd, dtrain__vfma(p2, p_odd, f)));
}

/* G w */
DTRAIN__HELPER void DTRAIN__K(line_filter)(float *to, int64_t step, dtrain__v a, dtrain__v b,
                                           dtrain__v c)
{
    const dtrain__v p = dtrain__vset(DTRAIN__POINT_P), q = dtrain__vset(DTRAIN__POINT_Q);
    const dtrain__v p2 = dtrain__vset(DTRAIN__P2), q2 = dtrain__vset(DTRAIN__Q2);
    const dtrain__v p_part = dtrain__vset(1 / DTRAIN__NP), q_part = dtrain__vset(1 / DTRAIN__NQ);
    const dtrain__v p_even = dtrain__vfma(p2, c, a), q_even = dtrain__vfma(q2, c, a);
    dtrain__vstore(to, dtrain__vset(1 / DTRAIN__N0) * a);
    dtrain__vstore(to + step, p_part * dtrain__vfma(p, b, p_even));
    dtrain__vstore(to + 2 * step, p_part * dtrain__vfma(-p, b, p_even));
    dtrain__vstore(to + 3 * step, q_part * dtrain__vfma(q, b, q_even));
    dtrain__vstore(to + 4 * step, q_part * dtrain__vfma(-q, b, q_even));
    dtrain__vstore(to + 5 * step, c);
}

/* G^T, of the sum of d_y x */
DTRAIN__HELPER void DTRAIN__K(line_filter_slope)(float *to, int64_t step, dtrain__v a, dtrain__v b,
                                                 dtrain__v c, dtrain__v d, dtrain__v e, dtrain__v f)
{
    const dtrain__v p = dtrain__vset(DTRAIN__POINT_P), q = dtrain__vset(DTRAIN__POINT_Q);
    const dtrain__v p2 = dtrain__vset(DTRAIN__P2), q2 = dtrain__vset(DTRAIN__Q2);
    const dtrain__v p_part = dtrain__vset(1 / DTRAIN__NP), q_part = dtrain__vset(1 / DTRAIN__NQ);
    const dtrain__v p_even = p_part * (b + c), q_even = q_part * (d + e);
    const dtrain__v p_odd = p_part * (b - c), q_odd = q_part * (d - e);
    dtrain__vstore(to, dtrain__vfma(dtrain__vset(1 / DTRAIN__N0), a, p_even + q_even));
    dtrain__vstore(to + step, dtrain__vfma(q, q_odd, p * p_odd));
    dtrain__vstore(to + 2 * step, dtrain__vfma(q2, q_even, dtrain__vfma(p2, p_even, f)));
}

/* Lines of six or of four vectors, `step` floats apart, as arguments. */
#define DTRAIN__LINE4(from, step)                                                            \
    dtrain__vload(from), dtrain__vload((from) + (step)), dtrain__vload((from) + 2 * (step)), \
        dtrain__vload((from) + 3 * (step))
#define DTRAIN__LINE6(from, step)                                  \
    DTRAIN__LINE4(from, step), dtrain__vload((from) + 4 * (step)), \
        dtrain__vload((from) + 5 * (step))

/* Find the first element of each pixel of a patch; -1: outside. */
DTRAIN__HELPER void DTRAIN__K(patch_pixels)(int64_t at[36], const dtrain__windows *w, int side,
                                            const dtrain__corner *corner)
{
    const int64_t first = dtrain__window_tap(w, corner, 0, 0);
    const bool inside = first >= 0 && dtrain__window_tap(w, corner, side - 1, side - 1) >= 0;
    for (int a = 0; a < side; a++)
        for (int b = 0; b < side; b++)
            at[a * side + b] = inside ? first + (a * w->width + b) * w->channels
                                      : dtrain__window_tap(w, corner, a, b);
}

/* Prefetch the pixels of the patch `ahead` patches later, except the pixels that it shares with
 * earlier patches. */
DTRAIN__HELPER void DTRAIN__K(patch_prefetch)(const dtrain__patches *images, const int64_t at[36],
                                              int side, int ahead)
{
    const dtrain__windows *w = &images->windows;
    const int64_t bytes = images->dtype <= DTRAIN_DTYPE_F32 ? 4 : 2;
    for (int i = side - 4; i < side; i++) {
        const int64_t first = at[i * side + side - 4];
        const char *from = (const char *)images->data;
        if (first < 0) continue;
        from += bytes * (first + 4 * ahead * w->channels);
        for (int64_t offset = 0; offset < 4 * bytes * w->depth; offset += 64)
            __builtin_prefetch(from + offset);
    }
}

/* Transform `count` channels, at most a vector, of a patch of 6 x 6 pixels of x or 4 x 4 of d_y;
 * pixel i is at from + at[i], or 0 if at[i] is negative. */
DTRAIN__HELPER void DTRAIN__K(patch_read)(float *to, int64_t place, int side, const float *from,
                                          const int64_t at[36], int64_t count)
{
    float middle[36 * DTRAIN__W] __attribute__((aligned(64)));
    const int64_t row = side * DTRAIN__W;
    for (int j = 0; j < side; j++) {
        float *column = middle + j * DTRAIN__W;
#define DTRAIN__PIXEL(i) \
    (at[(i)*side + j] < 0 ? dtrain__vset(0) : dtrain__vload_n(from + at[(i)*side + j], count))
        if (side == 4) DTRAIN__K(line_slope)
        (column, row, DTRAIN__PIXEL(0), DTRAIN__PIXEL(1), DTRAIN__PIXEL(2), DTRAIN__PIXEL(3));
        else DTRAIN__K(line_input)(column, row, DTRAIN__PIXEL(0), DTRAIN__PIXEL(1),
                                   DTRAIN__PIXEL(2), DTRAIN__PIXEL(3), DTRAIN__PIXEL(4),
                                   DTRAIN__PIXEL(5));
#undef DTRAIN__PIXEL
    }
    for (int i = 0; i < 6; i++, to += 6 * place) {
        const float *line = middle + i * row;
        if (side == 4) DTRAIN__K(line_slope)(to, place, DTRAIN__LINE4(line, DTRAIN__W));
        else DTRAIN__K(line_input)(to, place, DTRAIN__LINE6(line, DTRAIN__W));
    }
}

/* Widen the pixels of a patch of halves, one vector each. */
DTRAIN__ROUTINE void DTRAIN__K(patch_widen)(float *to, const dtrain__patches *images,
                                            const int64_t at[36], int pixels, int64_t channel,
                                            int64_t count)
{
    for (int i = 0; i < pixels; i++, to += DTRAIN__W)
        dtrain__vstore(
            to, at[i] < 0 ? dtrain__vset(0)
                          : dtrain__vload_as(images->data, images->dtype, at[i] + channel, count));
}

DTRAIN__HELPER void DTRAIN__K(patches_read_as)(float *to, const dtrain__winograd *a,
                                               const dtrain__patches *images, int side,
                                               int64_t first, int64_t count)
{
    const dtrain__windows *w = &images->windows;
    const int64_t vectors = (w->depth + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t place = dtrain__winograd_place(vectors, a->block, DTRAIN__W);
    const bool f32 = images->dtype <= DTRAIN_DTYPE_F32;
    dtrain__corner corner = dtrain__window_corner(w, first);
    float wide[36 * DTRAIN__W];
    int64_t at[36], wide_at[36];
    for (int i = 0; i < 36; i++) wide_at[i] = i * DTRAIN__W;
    for (int64_t t = 0; t < count; t++, dtrain__window_next(w, &corner)) {
        DTRAIN__K(patch_pixels)(at, w, side, &corner);
        DTRAIN__K(patch_prefetch)(images, at, side, 2);
        for (int64_t v = 0; v < vectors; v++) {
            float *out = to + (v * a->block + t) * DTRAIN__W;
            const int64_t channel = v * DTRAIN__W, rest = w->depth - channel;
            const float *from = (const float *)images->data + channel;
            if (!f32) DTRAIN__K(patch_widen)(wide, images, at, side * side, channel, rest);
            DTRAIN__K(patch_read)(out, place, side, f32 ? from : wide, f32 ? at : wide_at, rest);
        }
    }
}

/* Transform `count` patches of x from `first` on. */
DTRAIN__ROUTINE void DTRAIN__K(patches_read)(float *to, const dtrain__winograd *a, int64_t first,
                                             int64_t count)
{
    DTRAIN__K(patches_read_as)(to, a, &a->from, 6, first, count);
}

/* Transform `count` patches of d_y. */
DTRAIN__ROUTINE void DTRAIN__K(patches_read_slope)(float *to, const dtrain__winograd *a,
                                                   int64_t first, int64_t count)
{
    DTRAIN__K(patches_read_as)(to, a, &a->to, 4, first, count);
}

/* Transform `count` patches of y from `first` on back, and store their pixels inside the image. */
DTRAIN__ROUTINE void DTRAIN__K(patches_write)(const dtrain__winograd *a, int64_t first,
                                              int64_t count, const float *from)
{
    const dtrain__windows *w = &a->to.windows;
    const dtrain_dtype dtype = a->to.dtype;
    const int64_t vectors = (w->depth + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t place = dtrain__winograd_place(vectors, a->block, DTRAIN__W);
    dtrain__corner corner = dtrain__window_corner(w, first);
    int64_t at[36];
    for (int64_t t = 0; t < count; t++, dtrain__window_next(w, &corner)) {
        DTRAIN__K(patch_pixels)(at, w, 4, &corner);
        DTRAIN__K(patch_prefetch)(&a->to, at, 4, 1);
        for (int64_t v = 0; v < vectors; v++) {
            const float *places = from + (v * a->block + t) * DTRAIN__W;
            const int64_t channel = v * DTRAIN__W, rest = w->depth - channel;
            const dtrain__v bias =
                a->bias ? dtrain__vload_n(a->bias + channel, rest) : dtrain__vset(0);
            float middle[24 * DTRAIN__W] __attribute__((aligned(64)));
            float y[4 * DTRAIN__W] __attribute__((aligned(64)));
            for (int j = 0; j < 6; j++) DTRAIN__K(line_output)
            (middle + j * DTRAIN__W, 6 * DTRAIN__W, DTRAIN__LINE6(places + j * place, 6 * place));
            for (int i = 0; i < 4; i++) {
                DTRAIN__K(line_output)
                (y, DTRAIN__W, DTRAIN__LINE6(middle + 6 * i * DTRAIN__W, DTRAIN__W));
                for (int j = 0; j < 4; j++) {
                    const int64_t pixel = at[i * 4 + j];
                    if (pixel < 0) continue;
                    dtrain__v sum = dtrain__vload(y + j * DTRAIN__W) + bias;
                    if (a->accumulate)
                        sum += dtrain__vload_as(a->to.data, dtype, pixel + channel, rest);
                    dtrain__vstore_as(a->to.data, dtype, pixel + channel, sum, rest);
                }
            }
        }
    }
}

/* Multiply for one place: rows of `a`, W floats apart, with `blocks` vectors of channels. */
DTRAIN__ROUTINE void DTRAIN__K(patch_tile)(int64_t blocks, const float *a, int64_t a_block,
                                           const float *b, float *c)
{
    enum { a_row = DTRAIN__W, c_row = DTRAIN__W };
    DTRAIN__NARROW_ROWS(DTRAIN__NARROW_BEGIN)
    for (; blocks > 0; blocks--, a += a_block)
        for (int at = 0; at < DTRAIN__W; at++, b += DTRAIN__W) {
            const dtrain__v b_only = dtrain__vload(b);
            DTRAIN__NARROW_ROWS(DTRAIN__NARROW_STEP)
        }
#define DTRAIN__PATCH_END(r) dtrain__vstore(c + (r)*c_row, sum##r);
    DTRAIN__NARROW_ROWS(DTRAIN__PATCH_END)
}

/* Range: blocks of a->block patches. Scratch of a thread: transformed patches of x and of y. Rows
 * of the last tiles without a patch are computed and dropped. */
DTRAIN__KERNEL(winograd)
{
    const dtrain__winograd *a = (const dtrain__winograd *)job->args;
    const int64_t in = (a->from.windows.depth + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t out = (a->to.windows.depth + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t in_place = dtrain__winograd_place(in, a->block, DTRAIN__W);
    const int64_t out_place = dtrain__winograd_place(out, a->block, DTRAIN__W);
    float *x = job->scratch + index * job->slot, *y = x + 36 * in_place;
    for (int64_t block = begin; block < end; block++) {
        const int64_t first = block * a->block, rest = a->patches - first;
        const int64_t count = rest < a->block ? rest : a->block;
        DTRAIN__K(patches_read)(x, a, first, count);
        for (int64_t place = 0; place < 36; place++)
            for (int64_t v = 0; v < out; v++) {
                const float *filter = a->filters + (place * out + v) * in * DTRAIN__W * DTRAIN__W;
                for (int64_t t = 0; t < count; t += DTRAIN__NARROW_MR) DTRAIN__K(patch_tile)
                (in, x + place * in_place + t * DTRAIN__W, a->block * DTRAIN__W, filter,
                 y + place * out_place + (v * a->block + t) * DTRAIN__W);
            }
        DTRAIN__K(patches_write)(a, first, count, y);
    }
}

/* Sum over `patches` for one place, W channels of x and one vector of channels of d_y. */
#if DTRAIN__W == 16
#define DTRAIN__LANES(DO) DTRAIN__TWELVE(DO) DO(12) DO(13) DO(14) DO(15)
#elif DTRAIN__W == 8
#define DTRAIN__LANES(DO) DTRAIN__SHORT(DO) DO(6) DO(7)
#else
#define DTRAIN__LANES(DO) DO(0) DO(1) DO(2) DO(3)
#endif
DTRAIN__ROUTINE void DTRAIN__K(patch_weight_tile)(int64_t patches, const float *a, const float *b,
                                                  float *c)
{
    enum { a_row = 1, at = 0 };
#define DTRAIN__PATCH_LOAD(r) dtrain__v sum##r = dtrain__vload(c + (r)*DTRAIN__W);
#define DTRAIN__PATCH_STORE(r) dtrain__vstore(c + (r)*DTRAIN__W, sum##r);
    DTRAIN__LANES(DTRAIN__PATCH_LOAD)
    for (; patches > 0; patches--, a += DTRAIN__W, b += DTRAIN__W) {
        const dtrain__v b_only = dtrain__vload(b);
        DTRAIN__LANES(DTRAIN__NARROW_STEP)
    }
    DTRAIN__LANES(DTRAIN__PATCH_STORE)
}

/* Range: parts of job->chunk blocks, each with its transformed filters. Scratch of a thread:
 * transformed patches of x and of d_y. */
DTRAIN__KERNEL(winograd_weight)
{
    const dtrain__winograd *a = (const dtrain__winograd *)job->args;
    const int64_t in = (a->from.windows.depth + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t out = (a->to.windows.depth + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t in_place = dtrain__winograd_place(in, a->block, DTRAIN__W);
    const int64_t out_place = dtrain__winograd_place(out, a->block, DTRAIN__W);
    const int64_t square = DTRAIN__W * DTRAIN__W;
    float *x = job->scratch + index * job->slot, *d_y = x + 36 * in_place;
    for (int64_t part = begin; part < end; part++) {
        float *sums = a->filters + part * 36 * in * out * square;
        memset(sums, 0, (size_t)(36 * in * out * square) * sizeof *sums);
        for (int64_t b = 0; b < job->chunk; b++) {
            const int64_t first = (part * job->chunk + b) * a->block, rest = a->patches - first;
            const int64_t count = rest < a->block ? rest : a->block;
            if (count <= 0) break;
            DTRAIN__K(patches_read)(x, a, first, count);
            DTRAIN__K(patches_read_slope)(d_y, a, first, count);
            for (int64_t place = 0; place < 36; place++)
                for (int64_t v = 0; v < out; v++)
                    for (int64_t u = 0; u < in; u++) DTRAIN__K(patch_weight_tile)
            (count, x + place * in_place + u * a->block * DTRAIN__W,
             d_y + place * out_place + v * a->block * DTRAIN__W,
             sums + ((place * out + v) * in + u) * square);
        }
    }
}

/* ---- Weights: (place, vectors of inner channels, outer channels, lanes) */

/* Range: outer, rounded up to whole vectors. */
DTRAIN__KERNEL(winograd_filter)
{
    const dtrain__conv_weight *a = (const dtrain__conv_weight *)job->args;
    const int64_t vectors = (a->inner + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t place = vectors * job->total * DTRAIN__W;
    for (int64_t o = begin; o < end; o++)
        for (int64_t v = 0; v < vectors; v++) {
            float w[9 * DTRAIN__W] = {0}, middle[18 * DTRAIN__W];
            const int64_t rest = o < a->outer ? a->inner - v * DTRAIN__W : 0;
            for (int64_t lane = 0; lane < rest && lane < DTRAIN__W; lane++) {
                const int64_t at = o * a->outer_stride + (v * DTRAIN__W + lane) * a->inner_stride;
                for (int t = 0; t < 9; t++)
                    w[t * DTRAIN__W + lane] =
                        dtrain__element(a->weight, a->dtype, at + a->order[t]);
            }
            for (int j = 0; j < 3; j++) {
                const float *column = w + j * DTRAIN__W;
                DTRAIN__K(line_filter)
                (middle + j * DTRAIN__W, 3 * DTRAIN__W, dtrain__vload(column),
                 dtrain__vload(column + 3 * DTRAIN__W), dtrain__vload(column + 6 * DTRAIN__W));
            }
            float *to = a->packed + (v * job->total + o) * DTRAIN__W;
            for (int i = 0; i < 6; i++, to += 6 * place) {
                const float *line = middle + 3 * i * DTRAIN__W;
                DTRAIN__K(line_filter)
                (to, place, dtrain__vload(line), dtrain__vload(line + DTRAIN__W),
                 dtrain__vload(line + 2 * DTRAIN__W));
            }
        }
}

/* Range: outer. Sums the parts in order, and transforms the sum back. */
DTRAIN__KERNEL(winograd_filter_sum)
{
    const dtrain__conv_weight *a = (const dtrain__conv_weight *)job->args;
    const int64_t vectors = (a->inner + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t outer = (a->outer + DTRAIN__W - 1) / DTRAIN__W * DTRAIN__W;
    const int64_t place = vectors * outer * DTRAIN__W;
    for (int64_t o = begin; o < end; o++)
        for (int64_t v = 0; v < vectors; v++) {
            const float *from = a->packed + (v * outer + o) * DTRAIN__W;
            const int64_t rest = a->inner - v * DTRAIN__W;
            float sums[36 * DTRAIN__W], middle[18 * DTRAIN__W], taps[9 * DTRAIN__W];
            for (int i = 0; i < 36; i++, from += place) {
                dtrain__v sum = dtrain__vload(from);
                for (int64_t part = 1; part < a->parts; part++)
                    sum += dtrain__vload(from + part * 36 * place);
                dtrain__vstore(sums + i * DTRAIN__W, sum);
            }
            for (int j = 0; j < 6; j++) DTRAIN__K(line_filter_slope)
            (middle + j * DTRAIN__W, 6 * DTRAIN__W,
             DTRAIN__LINE6(sums + j * DTRAIN__W, 6 * DTRAIN__W));
            for (int i = 0; i < 3; i++) DTRAIN__K(line_filter_slope)
            (taps + 3 * i * DTRAIN__W, DTRAIN__W,
             DTRAIN__LINE6(middle + 6 * i * DTRAIN__W, DTRAIN__W));
            for (int64_t lane = 0; lane < rest && lane < DTRAIN__W; lane++) {
                const int64_t at = o * a->outer_stride + (v * DTRAIN__W + lane) * a->inner_stride;
                for (int t = 0; t < 9; t++) {
                    float *to = a->d_weight + at + a->order[t];
                    *to = (a->accumulate ? *to : 0) + taps[t * DTRAIN__W + lane];
                }
            }
        }
}
#endif
