/* Pooling: maximum and average of windows
 *
 * Backward works on pixels of x: each sums the gradients of the windows that contain it, with one
 * store and one rounding an element, and no two threads write one element. */

/* Find the taps [*begin, *end) of an axis that are inside; the window begins at `first`. */
DTRAIN__HELPER void DTRAIN__K(taps_inside)(int64_t first, int64_t kernel, int64_t size,
                                           int64_t *begin, int64_t *end)
{
    *begin = 0, *end = kernel;
    while (*begin < *end && first + *begin < 0) ++*begin;
    while (*end > *begin && first + *end > size) --*end;
}

/* Find the maximum of a window and its tap. */
DTRAIN__HELPER dtrain__v DTRAIN__K(window_maximum)(const dtrain_pool2d_args *a, dtrain_dtype dtype,
                                                   const int64_t first[2], int64_t image, int64_t c,
                                                   dtrain__vi *index)
{
    const dtrain_windows2d *w = &a->windows;
    dtrain__v top = dtrain__vset(-INFINITY);
    int64_t a0, a1, b0, b1;
    DTRAIN__K(taps_inside)(first[0], w->kernel[0], w->height, &a0, &a1);
    DTRAIN__K(taps_inside)(first[1], w->kernel[1], w->width, &b0, &b1);
    dtrain__vi where = dtrain__viset((int32_t)(a0 * w->kernel[1] + b0));
    for (int64_t i = a0; i < a1; i++)
        for (int64_t j = b0; j < b1; j++) {
            const int64_t at = ((image + first[0] + i) * w->width + first[1] + j) * w->channels + c;
            const dtrain__v x = dtrain__vload_as(a->x, dtype, at, w->channels - c);
            const dtrain__vi wins = (dtrain__vi)(x > top) | (dtrain__vi)(x != x);
            top = DTRAIN__K(vselect)(wins, x, top);
            where = (where & ~wins) | (dtrain__viset((int32_t)(i * w->kernel[1] + j)) & wins);
        }
    *index = where;
    return top;
}

/* Sum the taps of a window that are inside. */
DTRAIN__HELPER dtrain__v DTRAIN__K(window_sum)(const dtrain_pool2d_args *a, dtrain_dtype dtype,
                                               const int64_t first[2], int64_t image, int64_t c)
{
    const dtrain_windows2d *w = &a->windows;
    dtrain__v sum = dtrain__vset(0);
    int64_t a0, a1, b0, b1;
    DTRAIN__K(taps_inside)(first[0], w->kernel[0], w->height, &a0, &a1);
    DTRAIN__K(taps_inside)(first[1], w->kernel[1], w->width, &b0, &b1);
    for (int64_t i = a0; i < a1; i++)
        for (int64_t j = b0; j < b1; j++) {
            const int64_t at = ((image + first[0] + i) * w->width + first[1] + j) * w->channels + c;
            sum += dtrain__vload_as(a->x, dtype, at, w->channels - c);
        }
    return sum;
}

/* Range: rows of y, batch * out_height. */
DTRAIN__KERNEL(pool2d)
{
    const dtrain_pool2d_args *a = (const dtrain_pool2d_args *)job->args;
    const dtrain_windows2d *w = &a->windows;
    const dtrain_dtype dtype = a->dtype;
    const dtrain__v taps = dtrain__vset((float)(w->kernel[0] * w->kernel[1]));
    for (int64_t row = begin; row < end; row++)
        for (int64_t j = 0; j < w->out_width; j++)
            for (int64_t c = 0; c < w->channels; c += DTRAIN__W) {
                const int64_t image = row / w->out_height * w->height, n = w->channels - c;
                const int64_t at = (row * w->out_width + j) * w->channels + c;
                const int64_t first[2] = {row % w->out_height * w->stride[0] - w->padding[0],
                                          j * w->stride[1] - w->padding[1]};
                if (!a->maximum) {
                    const dtrain__v sum = DTRAIN__K(window_sum)(a, dtype, first, image, c);
                    dtrain__vstore_as(a->y, dtype, at, sum / taps, n);
                    continue;
                }
                dtrain__vi index;
                const dtrain__v top = DTRAIN__K(window_maximum)(a, dtype, first, image, c, &index);
                dtrain__vstore_as(a->y, dtype, at, top, n);
                if (a->index)
                    memcpy(a->index + at, &index,
                           (size_t)(n < DTRAIN__W ? n : DTRAIN__W) * sizeof *a->index);
            }
}

/* Return the gradient that window `at` gives to one of its taps. */
DTRAIN__HELPER dtrain__v DTRAIN__K(pool_share)(const dtrain_pool2d_backward_args *a,
                                               dtrain_dtype dtype, int64_t at, int64_t n,
                                               int64_t tap)
{
    const dtrain__v d = dtrain__vload_as(a->d_y, dtype, at, n);
    if (!a->maximum) return d;
    dtrain__vi index = dtrain__viset(-1);
    memcpy(&index, a->index + at, (size_t)(n < DTRAIN__W ? n : DTRAIN__W) * sizeof *a->index);
    return dtrain__vkeep(d, (dtrain__vi)(index == dtrain__viset((int32_t)tap)));
}

/* Range: rows of x, batch * height. */
DTRAIN__KERNEL(pool2d_backward)
{
    const dtrain_pool2d_backward_args *a = (const dtrain_pool2d_backward_args *)job->args;
    const dtrain_windows2d *w = &a->windows;
    const dtrain_dtype dtype = a->dtype;
    const dtrain__v taps = dtrain__vset(a->maximum ? 1 : (float)(w->kernel[0] * w->kernel[1]));
    for (int64_t at = begin * w->width; at < end * w->width; at++) {
        const int64_t row = at / w->width, image = row / w->height * w->out_height;
        const int64_t y = row % w->height + w->padding[0], x = at % w->width + w->padding[1];
        const int64_t i1 = y / w->stride[0] < w->out_height ? y / w->stride[0] : w->out_height - 1;
        const int64_t j1 = x / w->stride[1] < w->out_width ? x / w->stride[1] : w->out_width - 1;
        for (int64_t c = 0; c < w->channels; c += DTRAIN__W) {
            const int64_t n = w->channels - c;
            dtrain__v sum = dtrain__vset(0);
            for (int64_t i = i1; i >= 0 && y - i * w->stride[0] < w->kernel[0]; i--)
                for (int64_t j = j1; j >= 0 && x - j * w->stride[1] < w->kernel[1]; j--) {
                    const int64_t from = ((image + i) * w->out_width + j) * w->channels + c;
                    const int64_t tap =
                        (y - i * w->stride[0]) * w->kernel[1] + x - j * w->stride[1];
                    sum += DTRAIN__K(pool_share)(a, dtype, from, n, tap);
                }
            sum /= taps;
            if (a->accumulate) sum += dtrain__vload_as(a->d_x, dtype, at * w->channels + c, n);
            dtrain__vstore_as(a->d_x, dtype, at * w->channels + c, sum, n);
        }
    }
}
