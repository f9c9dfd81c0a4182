/* Rows of activations: softmax, rotary embedding, permuted axes
 *
 * Bandwidth is the limit: a row stays in L1 between the passes of a softmax, and all heads of all
 * sequences share sine and cosine of a position. */

DTRAIN__KERNEL(softmax)
{
    const dtrain_softmax_args *a = (const dtrain_softmax_args *)job->args;
    float *buffer = job->scratch + index * job->slot;
    for (int64_t row = begin; row < end; row++) {
        const float *x = DTRAIN__K(widened)(a->x, a->dtype, row * a->n, a->n, buffer);
        const float top = DTRAIN__K(row_top)(x, a->n, -FLT_MAX);
        const dtrain__v t = dtrain__vset(top);
        const dtrain__v inverse = dtrain__vset(1 / DTRAIN__K(row_exp_sum)(x, a->n, top));
        float *y = DTRAIN__K(written)(a->y, a->dtype, row * a->n, buffer);
        for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
            const int64_t n = a->n - i;
            dtrain__vstore_n(y + i, dtrain__vexp(dtrain__vload_n(x + i, n) - t) * inverse, n);
        }
        DTRAIN__K(rounded)(a->y, a->dtype, row * a->n, a->n, y);
    }
}

DTRAIN__KERNEL(softmax_backward)
{
    const dtrain_softmax_backward_args *a = (const dtrain_softmax_backward_args *)job->args;
    for (int64_t row = begin; row < end; row++) {
        const int64_t first = row * a->n;
        dtrain__v sum = dtrain__vset(0);
        for (int64_t i = 0; i < a->n; i += DTRAIN__W)
            sum = dtrain__vfma(dtrain__vload_as(a->y, a->dtype, first + i, a->n - i),
                               dtrain__vload_as(a->d_y, a->dtype, first + i, a->n - i), sum);
        const dtrain__v dot = dtrain__vset(dtrain__vsum(sum));
        for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
            const int64_t at = first + i, n = a->n - i;
            dtrain__v d = dtrain__vload_as(a->y, a->dtype, at, n) *
                          (dtrain__vload_as(a->d_y, a->dtype, at, n) - dot);
            if (a->accumulate) d += dtrain__vload_as(a->d_x, a->dtype, at, n);
            dtrain__vstore_as(a->d_x, a->dtype, at, d, n);
        }
    }
}

/* ---- Rotary embedding -------------------------------------------------------------------------*/

/* Turn the pairs of one head: the elements at `at` and at + half, and so on. */
DTRAIN__HELPER void DTRAIN__K(turn_head)(const dtrain_rotary_args *a, int64_t at, int64_t half,
                                         const float *cosines, const float *sines)
{
    for (int64_t i = 0; i < half; i += DTRAIN__W) {
        const int64_t low = at + i, high = low + half, n = half - i;
        const dtrain__v c = dtrain__vload_n(cosines + i, n), s = dtrain__vload_n(sines + i, n);
        const dtrain__v x1 = dtrain__vload_as(a->x, a->dtype, low, n);
        const dtrain__v x2 = dtrain__vload_as(a->x, a->dtype, high, n);
        dtrain__v y1 = x1 * c - x2 * s, y2 = x2 * c + x1 * s;
        if (a->accumulate) {
            y1 += dtrain__vload_as(a->y, a->dtype, low, n);
            y2 += dtrain__vload_as(a->y, a->dtype, high, n);
        }
        dtrain__vstore_as(a->y, a->dtype, low, y1, n);
        dtrain__vstore_as(a->y, a->dtype, high, y2, n);
    }
}

/* Range: positions. Angles are double: at position 10000 an angle in fp32 is off by 1e-3. */
DTRAIN__KERNEL(rotary)
{
    const dtrain_rotary_args *a = (const dtrain_rotary_args *)job->args;
    const int64_t half = a->d / 2, width = a->heads * a->d, turned = a->rotated * a->d;
    float *cosines = job->scratch + index * job->slot, *sines = cosines + half;
    const double ratio = pow((double)a->theta, -2.0 / (double)a->d);
    for (int64_t position = begin; position < end; position++) {
        double angle = (double)position;
        for (int64_t i = 0; i < half; i++, angle *= ratio) {
            cosines[i] = (float)cos(angle);
            sines[i] = (float)(a->inverse ? -sin(angle) : sin(angle));
        }
        for (int64_t row = position; row < a->rows; row += a->sequence) {
            const int64_t first = row * width;
            for (int64_t at = 0; at < turned; at += a->d)
                DTRAIN__K(turn_head)(a, first + at, half, cosines, sines);
            for (int64_t at = turned; at < width; at += DTRAIN__W) {
                const int64_t n = width - at;
                dtrain__v x = dtrain__vload_as(a->x, a->dtype, first + at, n);
                if (a->accumulate) x += dtrain__vload_as(a->y, a->dtype, first + at, n);
                dtrain__vstore_as(a->y, a->dtype, first + at, x, n);
            }
        }
    }
}

/* ---- Permuted axes ----------------------------------------------------------------------------*/

/* Load the next elements of x, `step` apart. */
DTRAIN__HELPER dtrain__v DTRAIN__K(vgather)(const dtrain_permute_args *a, int64_t at, int64_t step,
                                            int64_t n)
{
    float lanes[DTRAIN__W] = {0};
    if (step == 1) return dtrain__vload_as(a->x, a->dtype, at, n);
    for (int64_t lane = 0; lane < n && lane < DTRAIN__W; lane++)
        lanes[lane] = dtrain__element(a->x, a->dtype, at + lane * step);
    return dtrain__vload(lanes);
}

/* Range: rows of y's last axis. */
DTRAIN__KERNEL(permute)
{
    const dtrain_permute_args *a = (const dtrain_permute_args *)job->args;
    const int64_t *shape = a->shape, *step = a->step;
    for (int64_t row = begin; row < end; row++) {
        const int64_t i = row / shape[2] / shape[1], j = row / shape[2] % shape[1];
        const int64_t from = i * step[0] + j * step[1] + row % shape[2] * step[2];
        for (int64_t l = 0; l < shape[3]; l += DTRAIN__W) {
            const int64_t to = row * shape[3] + l, n = shape[3] - l;
            dtrain__v x = DTRAIN__K(vgather)(a, from + l * step[3], step[3], n);
            if (a->accumulate) x += dtrain__vload_as(a->y, a->dtype, to, n);
            dtrain__vstore_as(a->y, a->dtype, to, x, n);
        }
    }
}
