/* Convolution of bf16, 3 x 3 taps, by strips
 *
 * What winograd.h does in both directions is done here in one: two neighbours of y in a row, from
 * four of x, with four multiplications in place of six for each of the three rows of taps:
 *
 *     y = A^T ((G w) (B^T x))     A^T = 1  1   1   0     G = 1    0    0     B^T = 1   0  -1   0
 *                                       0  1  -1  -1         1/2  1/2  1/2         0   1   1   0
 *                                                            1/2 -1/2  1/2         0  -1   1   0
 *                                                            0    0    1           0   1   0  -1
 *
 * Transformed x and w are rounded to bf16, so that they can be multiplied by dots.h; sums are fp32.
 * What that costs in accuracy, as error over y (root mean square, 32 channels, x behind a ReLU):
 * 0.0022 here, 0.0034 in both directions, 0.0042 with four neighbours, 0.0095 with four in both,
 * where rounding y to bf16 costs 0.0017, and that of x and w, of which y is made, 0.0024.
 *
 * Rows of transformed pixels serve three rows of y each: a row of taps is a step from strip to
 * strip, by as many as a row has. They lie as (vectors of channels, rows, strips, 4 places, lanes):
 * a tile has all places of four strips, and makes pixels of them where they are, in registers. For
 * the weight gradient, whose sums run along strips, they lie as cells of two strips, (4 places,
 * vectors, items, rows, cells, lanes). */

#if DTRAIN__DOTS

/* Return channels of a pixel of a row; zeros outside. */
#define DTRAIN__STRIP_PIXEL(column)                                                           \
    ((uint64_t)(column) < (uint64_t)width                                                     \
         ? dtrain__vload_as(row, DTRAIN_DTYPE_BF16, (column)*images->windows.channels, count) \
         : dtrain__vset(0))

/* Transform a row of x into strips. */
DTRAIN__DOT_HELPER void DTRAIN__K(strip_row)(float *to, const dtrain__patches *images,
                                             const uint16_t *row, int64_t count, int64_t strips)
{
    const int64_t width = images->windows.width;
    int64_t at = images->windows.x[0];
    uint16_t *half = (uint16_t *)(void *)to;
    dtrain__v a = DTRAIN__STRIP_PIXEL(at), b = DTRAIN__STRIP_PIXEL(at + 1);
    for (at += 2; strips > 0; strips--, at += 2, half += 4 * DTRAIN__W) {
        const dtrain__v c = DTRAIN__STRIP_PIXEL(at), d = DTRAIN__STRIP_PIXEL(at + 1);
        DTRAIN__K(to_halves)(half, a - c);
        DTRAIN__K(to_halves)(half + DTRAIN__W, b + c);
        DTRAIN__K(to_halves)(half + 2 * DTRAIN__W, c - b);
        DTRAIN__K(to_halves)(half + 3 * DTRAIN__W, b - d);
        a = c;
        b = d;
    }
}

/* The same as cells of two strips, places `place` floats apart. */
DTRAIN__DOT_HELPER void DTRAIN__K(strip_row_cells)(float *to, int64_t place,
                                                   const dtrain__patches *images,
                                                   const uint16_t *row, int64_t count,
                                                   int64_t strips)
{
    const int64_t width = images->windows.width;
    int64_t at = images->windows.x[0];
    dtrain__v a = DTRAIN__STRIP_PIXEL(at), b = DTRAIN__STRIP_PIXEL(at + 1);
    for (at += 2; strips > 0; strips -= 2, at += 4, to += DTRAIN__W) {
        const dtrain__v c = DTRAIN__STRIP_PIXEL(at), d = DTRAIN__STRIP_PIXEL(at + 1);
        const dtrain__v e = DTRAIN__STRIP_PIXEL(at + 2), f = DTRAIN__STRIP_PIXEL(at + 3);
        DTRAIN__K(to_cells)(to, a - c, c - e);
        DTRAIN__K(to_cells)(to + place, b + c, d + e);
        DTRAIN__K(to_cells)(to + 2 * place, c - b, e - d);
        DTRAIN__K(to_cells)(to + 3 * place, b - d, d - f);
        a = e;
        b = f;
    }
}

/* A d_y, as cells. */
DTRAIN__DOT_HELPER void DTRAIN__K(strip_slope_cells)(float *to, int64_t place,
                                                     const dtrain__patches *images,
                                                     const uint16_t *row, int64_t count,
                                                     int64_t strips)
{
    const int64_t width = images->windows.width;
    for (int64_t at = 0; strips > 0; strips -= 2, at += 4, to += DTRAIN__W) {
        const dtrain__v a = DTRAIN__STRIP_PIXEL(at), b = DTRAIN__STRIP_PIXEL(at + 1);
        const dtrain__v c = DTRAIN__STRIP_PIXEL(at + 2), d = DTRAIN__STRIP_PIXEL(at + 3);
        DTRAIN__K(to_cells)(to, a, c);
        DTRAIN__K(to_cells)(to + place, a + b, c + d);
        DTRAIN__K(to_cells)(to + 2 * place, a - b, c - d);
        DTRAIN__K(to_cells)(to + 3 * place, -b, -d);
    }
}

/* Transform `rows` rows of an image from `first` on; those outside are zeros. A vector of channels
 * has `vector` floats. */
DTRAIN__DOT_HELPER void DTRAIN__K(strips_read)(float *to, int64_t vectors, int64_t vector,
                                               const dtrain__patches *images, int64_t image,
                                               int64_t first, int64_t rows, int64_t strips)
{
    const dtrain__windows *w = &images->windows;
    const int64_t line = strips * 4 * (DTRAIN__W / 2);
    for (int64_t r = first; r < first + rows; r++, to += line)
        for (int64_t v = 0; v < vectors; v++) {
            const int64_t at = (image * w->height + r) * w->width * w->channels + v * DTRAIN__W;
            if (r < 0 || r >= w->height) memset(to + v * vector, 0, (size_t)line * sizeof *to);
            else DTRAIN__K(strip_row)
            (to + v * vector, images, (const uint16_t *)images->data + at, w->depth - v * DTRAIN__W,
             strips);
        }
}

/* The same of x or d_y as cells; a vector has `vector` floats in each place. */
DTRAIN__DOT_HELPER void DTRAIN__K(strips_read_cells)(float *to, int64_t vectors, int64_t vector,
                                                     const dtrain__patches *images, bool slope,
                                                     int64_t image, int64_t first, int64_t rows,
                                                     int64_t strips)
{
    const dtrain__windows *w = &images->windows;
    const int64_t place = vectors * vector, line = strips * (DTRAIN__W / 2);
    for (int64_t r = first; r < first + rows; r++, to += line)
        for (int64_t v = 0; v < vectors; v++) {
            const int64_t at = (image * w->height + r) * w->width * w->channels + v * DTRAIN__W;
            const bool inside = r >= 0 && r < w->height;
            const uint16_t *row = (const uint16_t *)images->data + (inside ? at : 0);
            const int64_t count = w->depth - v * DTRAIN__W;
            float *out = to + v * vector;
            for (int p = 0; p < 4 && !inside; p++)
                memset(out + p * place, 0, (size_t)line * sizeof *out);
            if (!inside) continue;
            if (slope) DTRAIN__K(strip_slope_cells)(out, place, images, row, count, strips);
            else DTRAIN__K(strip_row_cells)(out, place, images, row, count, strips);
        }
}

/* Where the tile of four strips goes. */
typedef struct DTRAIN__K(strip_place) {
    int64_t image, row, column, channel; /* of the first pixel */
    int64_t count;                       /* strips that there are */
} DTRAIN__K(strip_place);

DTRAIN__DOT_HELPER void DTRAIN__K(strip_store)(const dtrain__strips *a, dtrain_dtype dtype,
                                               int64_t pixel, int64_t rest, dtrain__v y)
{
    if (a->accumulate) y += dtrain__vload_as(a->to.data, dtype, pixel, rest);
    if (dtype == DTRAIN_DTYPE_BF16 && rest >= DTRAIN__W)
        DTRAIN__K(to_halves)((uint16_t *)a->to.data + pixel, y);
    else dtrain__vstore_as(a->to.data, dtype, pixel, y, rest);
}

/* Store strip i, if it is there, and go on to the next. */
DTRAIN__DOT_HELPER void DTRAIN__K(strip_write)(const dtrain__strips *a, dtrain_dtype dtype,
                                               DTRAIN__K(strip_place) * at, int i, dtrain__v left,
                                               dtrain__v right)
{
    const dtrain__windows *w = &a->to.windows;
    const int64_t pixel = (at->image * w->height + at->row) * w->width + at->column;
    const int64_t rest = w->depth - at->channel, first = pixel * w->channels + at->channel;
    if (i >= at->count) return;
    if (a->bias) {
        const dtrain__v bias = dtrain__vload_n(a->bias + at->channel, rest);
        left += bias;
        right += bias;
    }
    DTRAIN__K(strip_store)(a, dtype, first, rest, left);
    if (at->column + 1 < w->width)
        DTRAIN__K(strip_store)(a, dtype, first + w->channels, rest, right);
    at->column += 2;
    if (at->column < 2 * a->strips) return;
    at->column = 0;
    at->row++;
}

/* The products of four strips from `x` on, over three rows of taps and `vectors` vectors of
 * channels, transformed back and stored. */
#define DTRAIN__STRIP_FOUR(DO, p) DO(p, 0) DO(p, 1) DO(p, 2) DO(p, 3)
#define DTRAIN__STRIP_SIXTEEN(DO) \
    DTRAIN__STRIP_FOUR(DO, 0)     \
    DTRAIN__STRIP_FOUR(DO, 1)     \
    DTRAIN__STRIP_FOUR(DO, 2)     \
    DTRAIN__STRIP_FOUR(DO, 3)
#define DTRAIN__STRIP_BEGIN(p, i) dtrain__v sum##p##i = dtrain__vset(0);
#define DTRAIN__STRIP_STEP(p, i)           \
    sum##p##i = DTRAIN__K(vdot)(sum##p##i, \
                                dtrain__viset(a[(4 * (i) + (p)) * (DTRAIN__W / 2) + at]), b##p);
#define DTRAIN__STRIP_END(i) \
    DTRAIN__K(strip_write)   \
    (job, dtype, &place, i, sum0##i + (sum1##i + sum2##i), (sum1##i - sum2##i) - sum3##i);
DTRAIN__DOT_HELPER void DTRAIN__K(strip_tile_as)(const dtrain__strips *job, dtrain_dtype dtype,
                                                 DTRAIN__K(strip_place) place, int64_t vectors,
                                                 const float *x, int64_t vector, const float *b)
{
    const int64_t line = job->strips * 4 * (DTRAIN__W / 2);
    DTRAIN__STRIP_SIXTEEN(DTRAIN__STRIP_BEGIN)
    for (int tap = 0; tap < 3; tap++)
        for (int64_t v = 0; v < vectors; v++) {
            const DTRAIN__K(cell) *a =
                (const DTRAIN__K(cell) *)(const void *)(x + tap * line + v * vector);
            for (int at = 0; at < DTRAIN__W / 2; at++, b += 4 * DTRAIN__W) {
                const dtrain__vi b0 = dtrain__vbits(dtrain__vload(b));
                const dtrain__vi b1 = dtrain__vbits(dtrain__vload(b + DTRAIN__W));
                const dtrain__vi b2 = dtrain__vbits(dtrain__vload(b + 2 * DTRAIN__W));
                const dtrain__vi b3 = dtrain__vbits(dtrain__vload(b + 3 * DTRAIN__W));
                DTRAIN__STRIP_SIXTEEN(DTRAIN__STRIP_STEP)
            }
        }
    DTRAIN__STRIP_END(0)
    DTRAIN__STRIP_END(1)
    DTRAIN__STRIP_END(2)
    DTRAIN__STRIP_END(3)
}

DTRAIN__DOT_ROUTINE void DTRAIN__K(strip_tile)(const dtrain__strips *job,
                                               DTRAIN__K(strip_place) place, int64_t vectors,
                                               const float *x, int64_t vector, const float *b)
{
    if (job->to.dtype == DTRAIN_DTYPE_BF16)
        DTRAIN__K(strip_tile_as)(job, DTRAIN_DTYPE_BF16, place, vectors, x, vector, b);
    else if (job->to.dtype == DTRAIN_DTYPE_F16)
        DTRAIN__K(strip_tile_as)(job, DTRAIN_DTYPE_F16, place, vectors, x, vector, b);
    else DTRAIN__K(strip_tile_as)(job, DTRAIN_DTYPE_F32, place, vectors, x, vector, b);
}

/* Range: items. Scratch of a thread: an item's transformed rows. */
DTRAIN__DOT_ROUTINE void DTRAIN__K(strips)(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain__strips *a = (const dtrain__strips *)job->args;
    const int64_t in = (a->from.windows.depth + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t out = (a->to.windows.depth + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t vector = dtrain__strips_vector(a->rows, a->strips, DTRAIN__W);
    float *x = job->scratch + index * job->slot;
    for (int64_t item = begin; item < end; item++) {
        const int64_t image = item / a->bands, first = item % a->bands * a->rows;
        const int64_t rest = a->to.windows.height - first, rows = rest < a->rows ? rest : a->rows;
        DTRAIN__K(strips_read)
        (x, in, vector, &a->from, image, first + a->from.windows.y[0], rows + 2, a->strips);
        for (int64_t v = 0; v < out; v++)
            for (int64_t at = 0; at < rows * a->strips; at += 4) {
                const DTRAIN__K(strip_place)
                    place = {image, first + at / a->strips, at % a->strips * 2, v * DTRAIN__W,
                             rows * a->strips - at};
                DTRAIN__K(strip_tile)
                (a, place, in, x + at * 4 * (DTRAIN__W / 2), vector,
                 a->filters + v * in * 12 * DTRAIN__W * DTRAIN__W / 2);
            }
    }
}

/* Sums of a place for W channels of x and one vector of those of d_y, over the cells of items. */
DTRAIN__DOT_ROUTINE void DTRAIN__K(strip_weight_tile)(int64_t items, int64_t cells, const float *a,
                                                      int64_t a_item, const float *b,
                                                      int64_t b_item, float *c)
{
    enum { a_row = 1 };
#define DTRAIN__STRIP_LOAD(r) dtrain__v sum##r = dtrain__vload(c + (r)*DTRAIN__W);
#define DTRAIN__STRIP_LEAVE(r) dtrain__vstore(c + (r)*DTRAIN__W, sum##r);
    DTRAIN__LANES(DTRAIN__STRIP_LOAD)
    for (; items > 0; items--, a += a_item, b += b_item)
        for (int64_t at = 0; at < cells * DTRAIN__W; at += DTRAIN__W) {
            const dtrain__v b_only = dtrain__vload(b + at);
            DTRAIN__LANES(DTRAIN__NARROW_DOT)
        }
    DTRAIN__LANES(DTRAIN__STRIP_LEAVE)
}

/* Range: parts of job->chunk items, each with transformed filters of its own. Scratch of a thread:
 * the transformed rows of a->group items of x and of d_y. */
DTRAIN__DOT_ROUTINE void DTRAIN__K(strips_weight)(dtrain__job *job, int64_t begin, int64_t end,
                                                  int index)
{
    const dtrain__strips *a = (const dtrain__strips *)job->args;
    const int64_t in = (a->from.windows.depth + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t out = (a->to.windows.depth + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t line = a->strips * (DTRAIN__W / 2), square = DTRAIN__W * DTRAIN__W;
    const int64_t x_item = (a->rows + 2) * line, d_item = a->rows * line;
    const int64_t x_vector = a->group * x_item, d_vector = a->group * d_item;
    float *x = job->scratch + index * job->slot, *d_y = x + 4 * in * x_vector;
    for (int64_t part = begin; part < end; part++) {
        float *sums = a->filters + part * 12 * in * out * square;
        const int64_t past = (part + 1) * job->chunk, last = past < a->items ? past : a->items;
        memset(sums, 0, (size_t)(12 * in * out * square) * sizeof *sums);
        for (int64_t item = part * job->chunk; item < last; item += a->group) {
            const int64_t count = last - item < a->group ? last - item : a->group;
            for (int64_t i = 0; i < count; i++) {
                const int64_t image = (item + i) / a->bands, row = (item + i) % a->bands * a->rows;
                DTRAIN__K(strips_read_cells)
                (x + i * x_item, in, x_vector, &a->from, false, image, row + a->from.windows.y[0],
                 a->rows + 2, a->strips);
                DTRAIN__K(strips_read_cells)
                (d_y + i * d_item, out, d_vector, &a->to, true, image, row, a->rows, a->strips);
            }
            float *to = sums;
            for (int64_t v = 0; v < 4 * out; v++)                  /* (vectors, places) */
                for (int64_t u = 0; u < 3 * in; u++, to += square) /* (taps, vectors) */
                    DTRAIN__K(strip_weight_tile)
            (count, d_item / DTRAIN__W, x + (v % 4 * in + u % in) * x_vector + u / in * line,
             x_item, d_y + (v % 4 * out + v / 4) * d_vector, d_item, to);
        }
    }
}

/* ---- Weights: (vectors of inner channels, rows of taps, pairs of outer channels, 4 places, lanes)
 *
 * Sums of their gradient are (vectors of inner channels, place, rows of taps, outer channels,
 * lanes). */

/* Transform a row of three taps of a vector of inner channels. */
DTRAIN__DOT_HELPER void DTRAIN__K(strip_taps)(dtrain__v to[4], const dtrain__conv_weight *a,
                                              int64_t outer, int64_t inner, int tap)
{
    float w[3 * DTRAIN__W] = {0};
    const int64_t rest = outer < a->outer ? a->inner - inner : 0;
    const uint16_t *from = (const uint16_t *)a->weight + outer * a->outer_stride;
    for (int64_t lane = 0; lane < rest && lane < DTRAIN__W; lane++)
        for (int t = 0; t < 3; t++)
            w[t * DTRAIN__W + lane] =
                dtrain_bf16_to_f32(from[(inner + lane) * a->inner_stride + a->order[tap * 3 + t]]);
    const dtrain__v half = dtrain__vset(0.5f), middle = dtrain__vload(w + DTRAIN__W);
    const dtrain__v left = dtrain__vload(w), right = dtrain__vload(w + 2 * DTRAIN__W);
    to[0] = left;
    to[1] = half * (left + right + middle);
    to[2] = half * (left + right - middle);
    to[3] = right;
}

/* Range: pairs of outer channels, of whole vectors of them. */
DTRAIN__DOT_ROUTINE void DTRAIN__K(strips_filter)(dtrain__job *job, int64_t begin, int64_t end,
                                                  DTRAIN__UNUSED int index)
{
    const dtrain__conv_weight *a = (const dtrain__conv_weight *)job->args;
    for (int64_t o = begin; o < end; o++)
        for (int64_t i = 0; i < a->inner; i += DTRAIN__W)
            for (int tap = 0; tap < 3; tap++) {
                dtrain__v low[4], high[4];
                DTRAIN__K(strip_taps)(low, a, 2 * o, i, tap);
                DTRAIN__K(strip_taps)(high, a, 2 * o + 1, i, tap);
                const int64_t at = (i / DTRAIN__W * 3 + tap) * job->total + o;
                for (int p = 0; p < 4; p++)
                    DTRAIN__K(to_cells)(a->packed + (at * 4 + p) * DTRAIN__W, low[p], high[p]);
            }
}

/* Range: outer. Adds the parts up, in order, and transforms their sum back. */
DTRAIN__DOT_ROUTINE void DTRAIN__K(strips_filter_sum)(dtrain__job *job, int64_t begin, int64_t end,
                                                      DTRAIN__UNUSED int index)
{
    const dtrain__conv_weight *a = (const dtrain__conv_weight *)job->args;
    const int64_t vectors = (a->inner + DTRAIN__W - 1) / DTRAIN__W;
    const int64_t outer = (a->outer + DTRAIN__W - 1) / DTRAIN__W * DTRAIN__W;
    const int64_t line = outer * DTRAIN__W, all = vectors * 12 * line;
    for (int64_t o = begin; o < end; o++)
        for (int64_t i = 0; i < vectors * 3; i++) {
            const int64_t tap = i % 3, inner = i / 3 * DTRAIN__W, rest = a->inner - inner;
            const float *from = a->packed + (i / 3 * 12 + tap) * line + o * DTRAIN__W;
            const dtrain__v zero = dtrain__vset(0), half = dtrain__vset(0.5f);
            dtrain__v sums[4] = {zero, zero, zero, zero};
            float taps[3 * DTRAIN__W];
            for (int64_t part = 0; part < a->parts; part++)
                for (int p = 0; p < 4; p++)
                    sums[p] += dtrain__vload(from + part * all + p * 3 * line);
            const dtrain__v both = half * (sums[1] + sums[2]);
            dtrain__vstore(taps, sums[0] + both);
            dtrain__vstore(taps + DTRAIN__W, half * (sums[1] - sums[2]));
            dtrain__vstore(taps + 2 * DTRAIN__W, both + sums[3]);
            float *to = a->d_weight + o * a->outer_stride + inner * a->inner_stride;
            for (int64_t lane = 0; lane < rest && lane < DTRAIN__W; lane++)
                for (int t = 0; t < 3; t++) {
                    float *at = to + lane * a->inner_stride + a->order[tap * 3 + t];
                    *at = (a->accumulate ? *at : 0) + taps[t * DTRAIN__W + lane];
                }
        }
}

static const dtrain__dots DTRAIN__K(dots) = {&DTRAIN__K(dot_tiles), DTRAIN__K(strips),
                                             DTRAIN__K(strips_weight), DTRAIN__K(strips_filter),
                                             DTRAIN__K(strips_filter_sum)};
#endif
