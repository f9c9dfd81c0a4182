/* Convolution: tiles, packing of windows, weights
 *
 * A convolution is a product with windows (gemm_internal.h) as one matrix. gemm.c drives it with
 * these additional tiles and packing functions.
 *
 * In forward and for the gradient of the input, windows are rows of A. Packing them is most of a
 * narrow layer's cost besides its products, so a panel of A has consecutive rows of DTRAIN__PITCH
 * floats: a run of channels is copied unchanged. The tile reads the rows at constant distances. For
 * the gradient of the weight, windows are columns of A, with the panels of gemm.h.
 *
 * A tile of gemm.h is two vectors wide. The narrow tile is one vector wide and has twice as many
 * rows, for layers with few output channels. */

#define DTRAIN__TWELVE(DO) DTRAIN__SHORT(DO) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#if DTRAIN__W == 16
#define DTRAIN__NARROW_MR 24
#define DTRAIN__NARROW_ROWS(DO) \
    DTRAIN__TWELVE(DO)          \
    DO(12) DO(13) DO(14) DO(15) DO(16) DO(17) DO(18) DO(19) DO(20) DO(21) DO(22) DO(23)
#elif DTRAIN__W == 1
#define DTRAIN__NARROW_MR DTRAIN__MR
#define DTRAIN__NARROW_ROWS DTRAIN__ROWS
#else
#define DTRAIN__NARROW_MR 12
#define DTRAIN__NARROW_ROWS DTRAIN__TWELVE
#endif

#define DTRAIN__NARROW_BEGIN(r)         \
    dtrain__v sum##r = dtrain__vset(0); \
    __builtin_prefetch(c + (r)*c_row);
#define DTRAIN__NARROW_STEP(r) \
    sum##r = dtrain__vfma(dtrain__vset(a[(r)*a_row + at]), b_only, sum##r);
#define DTRAIN__NARROW_END(r)                                                                \
    do {                                                                                     \
        float *to = c + (r)*c_row;                                                           \
        sum##r *= dtrain__vset(alpha);                                                       \
        if (beta != 0) sum##r = dtrain__vfma(dtrain__vset(beta), dtrain__vload(to), sum##r); \
        dtrain__vstore(to, sum##r);                                                          \
    } while (0);
#define DTRAIN__NARROW_TILE(STEP)                                                    \
    DTRAIN__NARROW_ROWS(DTRAIN__NARROW_BEGIN)                                        \
    DTRAIN__UNROLL for (int64_t p = 0, at = 0; p < k; p++, at += a_step, b += b_row) \
    {                                                                                \
        const dtrain__v b_only = dtrain__vload(b);                                   \
        DTRAIN__NARROW_ROWS(STEP)                                                    \
    }                                                                                \
    DTRAIN__NARROW_ROWS(DTRAIN__NARROW_END)

DTRAIN__ROUTINE void DTRAIN__K(rows_tile)(int64_t k, const float *a, const float *b, int64_t b_row,
                                          float alpha, float beta, float *c, int64_t c_row)
{
    enum { rows = DTRAIN__MR, a_row = DTRAIN__PITCH, a_step = 1 };
    DTRAIN__TILE(DTRAIN__ROWS, DTRAIN__ROW_STEP)
}

DTRAIN__ROUTINE void DTRAIN__K(narrow_rows_tile)(int64_t k, const float *a, const float *b,
                                                 int64_t b_row, float alpha, float beta, float *c,
                                                 int64_t c_row)
{
    enum { a_row = DTRAIN__PITCH, a_step = 1 };
    DTRAIN__NARROW_TILE(DTRAIN__NARROW_STEP)
}

DTRAIN__ROUTINE void DTRAIN__K(narrow_tile)(int64_t k, const float *a, const float *b,
                                            int64_t b_row, float alpha, float beta, float *c,
                                            int64_t c_row)
{
    enum { a_row = 1, a_step = DTRAIN__NARROW_MR };
    DTRAIN__NARROW_TILE(DTRAIN__NARROW_STEP)
}

/* ---- Packing */

/* Copy a run, or zeros if at is -1. Stores whole vectors: the elements after the run are written
 * later or are the slack of a row. */
DTRAIN__HELPER void DTRAIN__K(pack_run)(float *to, const void *data, dtrain_dtype dtype, int64_t at,
                                        int64_t run)
{
    if (at < 0)
        for (int64_t q = 0; q < run; q += DTRAIN__W) dtrain__vstore(to + q, dtrain__vset(0));
    else
        for (int64_t q = 0; q < run; q += DTRAIN__W)
            dtrain__vstore(to + q, dtrain__vload_as(data, dtype, at + q, run - q));
}

/* Copy k elements of a window, from element `in_line` of its line `a` on. */
DTRAIN__HELPER void DTRAIN__K(pack_window)(float *to, const dtrain__operand *x, dtrain_dtype dtype,
                                           const dtrain__corner *corner, int64_t a, int64_t in_line,
                                           int64_t k)
{
    const dtrain__windows *w = x->windows;
    const int64_t line = w->tap_columns * w->depth, y = corner->row * w->stride[0];
    const int64_t left = corner->column * w->stride[1] + w->x[0];
    const bool joined = w->joined && left >= 0 && left + w->tap_columns <= w->width;
    while (k > 0) {
        const int64_t row = y + w->y[a], b = joined ? 0 : in_line / w->depth;
        const int64_t c = in_line - b * w->depth, rest = (joined ? line : w->depth) - c;
        const int64_t run = rest < k ? rest : k, column = left - w->x[0] + w->x[b];
        const bool inside = row >= 0 && row < w->height && column >= 0 && column < w->width;
        const int64_t at = corner->image + (row * w->width + column) * w->channels + c;
        DTRAIN__K(pack_run)(to, x->data, dtype, inside ? at : -1, run);
        to += run;
        k -= run;
        in_line += run;
        if (in_line == line) in_line = 0, a++;
    }
}

/* Pack `count` consecutive rows. Other rows stay unchanged: their sums are not used. */
DTRAIN__HELPER void DTRAIN__K(pack_windows_as)(float *panel, const dtrain__operand *x,
                                               dtrain_dtype dtype, int64_t index, int count,
                                               int64_t p, int k)
{
    dtrain__corner corner = {0, 0, 0};
    int64_t line = 1;
    if (x->windows) {
        corner = dtrain__window_corner(x->windows, index);
        line = x->windows->tap_columns * x->windows->depth;
    }
    for (int r = 0; r < count; r++, panel += DTRAIN__PITCH) {
        if (!x->windows) {
            DTRAIN__K(pack_run)(panel, x->data, dtype, (index + r) * x->ld + p, k);
            continue;
        }
        DTRAIN__K(pack_window)(panel, x, dtype, &corner, p / line, p % line, k);
        dtrain__window_next(x->windows, &corner);
    }
}

DTRAIN__ROUTINE void DTRAIN__K(pack_window_rows)(float *panel, const dtrain__operand *x,
                                                 int64_t index, int count, int64_t p, int k)
{
    if (x->dtype == DTRAIN_DTYPE_F32)
        DTRAIN__K(pack_windows_as)(panel, x, DTRAIN_DTYPE_F32, index, count, p, k);
    else DTRAIN__K(pack_windows_as)(panel, x, x->dtype, index, count, p, k);
}

/* Neighbouring columns of a panel that are also neighbours in memory: `run` channels of tap (a, b)
 * and, if taps are joined, of the next taps; `at`: distance of the first from the window's first
 * pixel. */
typedef struct DTRAIN__K(share) {
    int64_t a, b, channel, run, at;
} DTRAIN__K(share);

/* Divide the columns [index, index + count) into shares of single taps or of lines of joined taps;
 * return the number of shares. */
DTRAIN__HELPER int DTRAIN__K(shares_of)(DTRAIN__K(share) * shares, const dtrain__windows *w,
                                        bool joined, int64_t index, int64_t count)
{
    const int64_t line = joined ? w->tap_columns * w->depth : w->depth;
    int found = 0;
    for (int64_t done = 0; done < count; found++) {
        DTRAIN__K(share) *s = &shares[found];
        const int64_t tap = (index + done) / w->depth, rest = line - (index + done) % line;
        s->a = tap / w->tap_columns;
        s->b = tap % w->tap_columns;
        s->channel = (index + done) % w->depth;
        s->run = rest < count - done ? rest : count - done;
        s->at = (w->y[s->a] * w->width + w->x[s->b]) * w->channels + s->channel;
        done += s->run;
    }
    return found;
}

/* Return the number of windows from `corner` on, in its row, whose taps from share `first` to share
 * `last` are inside. */
DTRAIN__HELPER int64_t DTRAIN__K(windows_inside)(const dtrain__windows *w,
                                                 const dtrain__corner *corner,
                                                 const DTRAIN__K(share) * first,
                                                 const DTRAIN__K(share) * last)
{
    const bool line = first->a == last->a;
    const int64_t left = w->x[line ? first->b : 0],
                  right = w->x[line ? last->b : w->tap_columns - 1];
    const int64_t row = corner->row * w->stride[0], column = corner->column * w->stride[1];
    const int64_t room = w->width - column - right;
    if (row + w->y[first->a] < 0 || row + w->y[last->a] >= w->height) return 0;
    if (column + left < 0 || room < 1) return 0;
    const int64_t count = (room - 1) / w->stride[1] + 1, rest = w->columns - corner->column;
    return count < rest ? count : rest;
}

/* Pack `count` columns of windows, k windows from p on, side by side. Most windows have all taps of
 * the panel inside, and no tap is tested. */
DTRAIN__HELPER void DTRAIN__K(pack_columns_as)(float *panel, int width, const dtrain__operand *x,
                                               dtrain_dtype dtype, int64_t index, int count,
                                               int64_t p, int k)
{
    const dtrain__windows *w = x->windows;
    DTRAIN__K(share) shares[DTRAIN__NARROW_MR], joined[DTRAIN__NARROW_MR];
    const int single = DTRAIN__K(shares_of)(shares, w, false, index, count);
    const int together = DTRAIN__K(shares_of)(joined, w, w->joined, index, count);
    dtrain__corner corner = dtrain__window_corner(w, p);
    for (int64_t i = 0; i < k; dtrain__window_next(w, &corner)) {
        const int64_t row = corner.row * w->stride[0], column = corner.column * w->stride[1];
        int64_t at = corner.image + (row * w->width + column) * w->channels;
        int64_t inside = DTRAIN__K(windows_inside)(w, &corner, shares, shares + single - 1);
        if (inside > k - i) inside = k - i;
        i += inside ? inside : 1;
        corner.column += inside ? inside - 1 : 0;
        for (int64_t n = 0; n < inside; n++, at += w->stride[1] * w->channels, panel += width) {
            float *to = panel;
            for (int s = 0; s < together; to += joined[s++].run)
                DTRAIN__K(pack_run)(to, x->data, dtype, at + joined[s].at, joined[s].run);
        }
        if (inside) continue;
        float *to = panel;
        for (int s = 0; s < single; to += shares[s++].run) {
            const bool there = dtrain__window_tap(w, &corner, shares[s].a, shares[s].b) >= 0;
            DTRAIN__K(pack_run)(to, x->data, dtype, there ? at + shares[s].at : -1, shares[s].run);
        }
        panel += width;
    }
}

/* Both widths share this function, which is too long to be compiled twice. */
DTRAIN__ROUTINE void DTRAIN__K(pack_window_columns)(float *panel, int width,
                                                    const dtrain__operand *x, int64_t index,
                                                    int count, int64_t p, int k)
{
    if (x->dtype == DTRAIN_DTYPE_F32)
        DTRAIN__K(pack_columns_as)(panel, width, x, DTRAIN_DTYPE_F32, index, count, p, k);
    else DTRAIN__K(pack_columns_as)(panel, width, x, x->dtype, index, count, p, k);
}

DTRAIN__ROUTINE void DTRAIN__K(pack_columns)(float *panel, const dtrain__operand *x, int64_t index,
                                             int count, int64_t p, int k)
{
    if (!x->windows) DTRAIN__K(pack_a)(panel, x, index, count, p, k);
    else DTRAIN__K(pack_window_columns)(panel, DTRAIN__MR, x, index, count, p, k);
}

DTRAIN__ROUTINE void DTRAIN__K(pack_narrow_columns)(float *panel, const dtrain__operand *x,
                                                    int64_t index, int count, int64_t p, int k)
{
    if (!x->windows) DTRAIN__K(pack_steps)(panel, DTRAIN__NARROW_MR, x, index, count, p, k);
    else DTRAIN__K(pack_window_columns)(panel, DTRAIN__NARROW_MR, x, index, count, p, k);
}

DTRAIN__ROUTINE void DTRAIN__K(pack_narrow_b)(float *panel, const dtrain__operand *x, int64_t index,
                                              int count, int64_t p, int k)
{
    DTRAIN__K(pack_steps)(panel, DTRAIN__W, x, index, count, p, k);
}

/* Copying runs as rows takes half the time of spreading them over columns. */
static const dtrain__conv_tiles DTRAIN__K(convolutions) = {
    DTRAIN__FP32_ISA(DTRAIN__MR, DTRAIN__N, 2, DTRAIN__PITCH, rows_tile, pack_window_rows, pack_b),
    DTRAIN__FP32_ISA(DTRAIN__NARROW_MR, DTRAIN__W, 2, DTRAIN__PITCH, narrow_rows_tile,
                     pack_window_rows, pack_narrow_b),
    DTRAIN__FP32_ISA(DTRAIN__MR, DTRAIN__N, 4, 0, gemm_tile, pack_columns, pack_b),
    DTRAIN__FP32_ISA(DTRAIN__NARROW_MR, DTRAIN__W, 4, 0, narrow_tile, pack_narrow_columns,
                     pack_narrow_b)};

/* ---- Weights */

/* Range: `outer`. */
DTRAIN__KERNEL(conv_weight)
{
    const dtrain__conv_weight *a = (const dtrain__conv_weight *)job->args;
    for (int64_t o = begin; o < end; o++)
        for (int64_t i = 0; i < a->inner; i++) {
            const int64_t from = o * a->outer_stride + i * a->inner_stride;
            for (int64_t t = 0; t < a->taps; t++)
                a->packed[(t * a->outer + o) * a->inner + i] =
                    dtrain__element(a->weight, a->dtype, from + a->order[t]);
        }
}

/* Range: `outer`. Sums the parts of a gradient in order, into the order of the weight. */
DTRAIN__KERNEL(conv_weight_sum)
{
    const dtrain__conv_weight *a = (const dtrain__conv_weight *)job->args;
    const int64_t count = a->taps * a->outer * a->inner;
    for (int64_t o = begin; o < end; o++)
        for (int64_t i = 0; i < a->inner; i += DTRAIN__W) {
            const int64_t n = a->inner - i < DTRAIN__W ? a->inner - i : DTRAIN__W;
            for (int64_t t = 0; t < a->taps; t++) {
                const float *from = a->packed + (t * a->outer + o) * a->inner + i;
                dtrain__v sum = dtrain__vload_n(from, n);
                for (int64_t part = 1; part < a->parts; part++)
                    sum += dtrain__vload_n(from + part * count, n);
                float *to = a->d_weight + o * a->outer_stride + i * a->inner_stride + a->order[t];
                for (int64_t lane = 0; lane < n; lane++, to += a->inner_stride)
                    *to = (a->accumulate ? *to : 0) + sum[lane];
            }
        }
}
