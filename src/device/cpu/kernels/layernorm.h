/* Layer norm and root mean square norm, which has a mean of 0
 *
 * A row stays in L1 between its passes: memory is read once and written once. */

/* Sum with four accumulators: one would wait for its last addition. */
DTRAIN__HELPER float DTRAIN__K(row_sum)(const float *x, int64_t n)
{
    dtrain__v a = dtrain__vset(0), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 4 * DTRAIN__W <= n; i += 4 * DTRAIN__W) {
        a += dtrain__vload(x + i);
        b += dtrain__vload(x + i + DTRAIN__W);
        c += dtrain__vload(x + i + 2 * DTRAIN__W);
        d += dtrain__vload(x + i + 3 * DTRAIN__W);
    }
    for (; i < n; i += DTRAIN__W) a += dtrain__vload_n(x + i, n - i);
    return dtrain__vsum((a + b) + (c + d));
}

/* Sum of (x - mean)^2. */
DTRAIN__HELPER float DTRAIN__K(row_spread)(const float *x, int64_t n, float mean)
{
    const dtrain__v m = dtrain__vset(mean);
    dtrain__v a = dtrain__vset(0), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 4 * DTRAIN__W <= n; i += 4 * DTRAIN__W) {
        const dtrain__v e = dtrain__vload(x + i) - m, f = dtrain__vload(x + i + DTRAIN__W) - m;
        const dtrain__v g = dtrain__vload(x + i + 2 * DTRAIN__W) - m;
        const dtrain__v h = dtrain__vload(x + i + 3 * DTRAIN__W) - m;
        a = dtrain__vfma(e, e, a);
        b = dtrain__vfma(f, f, b);
        c = dtrain__vfma(g, g, c);
        d = dtrain__vfma(h, h, d);
    }
    for (; i < n; i += DTRAIN__W) {
        const dtrain__v e = DTRAIN__K(vfirst)(dtrain__vload_n(x + i, n - i) - m, n - i);
        a = dtrain__vfma(e, e, a);
    }
    return dtrain__vsum((a + b) + (c + d));
}

/* Return one row of x, or of x + residual, which is also stored in sum, as fp32. `buffer` holds the
 * row if storage rounds it: the mean is taken of the unrounded row. */
DTRAIN__ROUTINE const float *DTRAIN__K(row_open)(const dtrain_layernorm_args *a, int64_t row,
                                                 float *buffer)
{
    const int64_t first = row * a->n;
    float other[DTRAIN__KERNEL_BLOCK];
    const float *x = DTRAIN__K(widened)(a->x, a->x_dtype, first, a->n, buffer);
    for (int64_t j = 0; a->residual && j < a->n; j += DTRAIN__KERNEL_BLOCK) {
        const int64_t count = dtrain__min(a->n - j, DTRAIN__KERNEL_BLOCK), at = first + j;
        const float *residual = DTRAIN__K(widened)(a->residual, a->y_dtype, at, count, other);
        float *sum = DTRAIN__K(written)(a->sum, a->x_dtype, at, buffer + j);
        for (int64_t i = 0; i < count; i += DTRAIN__W) {
            const int64_t n = count - i;
            dtrain__vstore_n(sum + i,
                             dtrain__vload_n(x + j + i, n) + dtrain__vload_n(residual + i, n), n);
        }
        DTRAIN__K(rounded)(a->sum, a->x_dtype, at, count, sum);
    }
    return a->residual ? DTRAIN__K(written)(a->sum, a->x_dtype, first, buffer) : x;
}

DTRAIN__KERNEL(layernorm)
{
    const dtrain_layernorm_args *a = (const dtrain_layernorm_args *)job->args;
    float buffer[DTRAIN__KERNEL_BLOCK];
    for (int64_t row = begin; row < end; row++) {
        const float *x = DTRAIN__K(row_open)(a, row, job->scratch + index * job->slot);
        const float mean = a->mean ? DTRAIN__K(row_sum)(x, a->n) / (float)a->n : 0;
        const float variance = DTRAIN__K(row_spread)(x, a->n, mean) / (float)a->n;
        const float rstd = 1 / sqrtf(variance + a->epsilon);
        const dtrain__v m = dtrain__vset(mean), r = dtrain__vset(rstd);
        for (int64_t j = 0; j < a->n; j += DTRAIN__KERNEL_BLOCK) {
            const int64_t count = dtrain__min(a->n - j, DTRAIN__KERNEL_BLOCK);
            const float *weight = a->weight + j, *bias = a->bias ? a->bias + j : NULL;
            float *y = DTRAIN__K(written)(a->y, a->y_dtype, row * a->n + j, buffer);
            for (int64_t i = 0; i < count; i += DTRAIN__W) {
                const int64_t n = count - i;
                const dtrain__v normal = (dtrain__vload_n(x + j + i, n) - m) * r;
                const dtrain__v shift = bias ? dtrain__vload_n(bias + i, n) : dtrain__vset(0);
                __builtin_prefetch(x + a->n + j +
                                   i); /* the next row: this one keeps the core busy */
                dtrain__vstore_n(y + i, dtrain__vfma(normal, dtrain__vload_n(weight + i, n), shift),
                                 n);
            }
            DTRAIN__K(rounded)(a->y, a->y_dtype, row * a->n + j, count, y);
        }
        if (a->mean) a->mean[row] = mean;
        a->rstd[row] = rstd;
    }
}

/* With h = (x - mean) rstd and g = d_y weight (Ba et al., 2016):
 *     d_weight += d_y h      d_bias += d_y      d_x = rstd (g - mean(g) - h mean(g h))
 * The root mean square norm drops mean(g). First pass over a row: the two means and the parameter
 * sums of this chunk of rows (n floats each, in L1 or L2). Second pass: d_x. */
DTRAIN__ROUTINE void DTRAIN__K(layernorm_sums)(const dtrain_layernorm_backward_args *a, int64_t row,
                                               float *weight_sum, float means[2])
{
    const dtrain__v m = dtrain__vset(a->mean ? a->mean[row] : 0);
    const dtrain__v r = dtrain__vset(a->rstd[row]);
    float buffers[2][DTRAIN__KERNEL_BLOCK];
    dtrain__v g_sum = dtrain__vset(0), gh_sum = g_sum;
    for (int64_t j = 0; j < a->n; j += DTRAIN__KERNEL_BLOCK) {
        const int64_t count = dtrain__min(a->n - j, DTRAIN__KERNEL_BLOCK), at = row * a->n + j;
        const float *x = DTRAIN__K(widened)(a->x, a->x_dtype, at, count, buffers[0]);
        const float *d_y = DTRAIN__K(widened)(a->d_y, a->y_dtype, at, count, buffers[1]);
        float *weights = weight_sum + j, *biases = weights + a->n;
        for (int64_t i = 0; i < count; i += DTRAIN__W) {
            const int64_t n = count - i;
            const dtrain__v d = dtrain__vload_n(d_y + i, n);
            const dtrain__v h = (dtrain__vload_n(x + i, n) - m) * r;
            const dtrain__v g = d * dtrain__vload_n(a->weight + j + i, n);
            g_sum += g;
            gh_sum = dtrain__vfma(g, h, gh_sum);
            dtrain__vstore_n(weights + i, dtrain__vfma(d, h, dtrain__vload_n(weights + i, n)), n);
            dtrain__vstore_n(biases + i, dtrain__vload_n(biases + i, n) + d, n);
        }
    }
    means[0] = a->mean ? dtrain__vsum(g_sum) / (float)a->n : 0;
    means[1] = dtrain__vsum(gh_sum) / (float)a->n;
}

DTRAIN__ROUTINE void DTRAIN__K(layernorm_slope)(const dtrain_layernorm_backward_args *a,
                                                int64_t row, const float means[2])
{
    const dtrain__v m = dtrain__vset(a->mean ? a->mean[row] : 0);
    const dtrain__v r = dtrain__vset(a->rstd[row]);
    const dtrain__v g_mean = dtrain__vset(means[0]), gh_mean = dtrain__vset(means[1]);
    float buffers[3][DTRAIN__KERNEL_BLOCK];
    for (int64_t j = 0; j < a->n; j += DTRAIN__KERNEL_BLOCK) {
        const int64_t count = dtrain__min(a->n - j, DTRAIN__KERNEL_BLOCK), at = row * a->n + j;
        const float *x = DTRAIN__K(widened)(a->x, a->x_dtype, at, count, buffers[0]), *old = NULL;
        const float *d_y = DTRAIN__K(widened)(a->d_y, a->y_dtype, at, count, buffers[1]);
        float *d_x = DTRAIN__K(written)(a->d_x, a->x_dtype, at, buffers[2]);
        if (a->accumulate_x) old = DTRAIN__K(widened)(a->d_x, a->x_dtype, at, count, d_x);
        for (int64_t i = 0; i < count; i += DTRAIN__W) {
            const int64_t n = count - i;
            const dtrain__v h = (dtrain__vload_n(x + i, n) - m) * r;
            const dtrain__v g = dtrain__vload_n(d_y + i, n) * dtrain__vload_n(a->weight + j + i, n);
            dtrain__v slope = r * (g - g_mean - h * gh_mean);
            if (old) slope += dtrain__vload_n(old + i, n);
            dtrain__vstore_n(d_x + i, slope, n);
        }
        DTRAIN__K(rounded)(a->d_x, a->x_dtype, at, count, d_x);
        if (!a->d_residual) continue;
        float *copy = DTRAIN__K(written)(a->d_residual, a->y_dtype, at, d_x);
        if (copy != d_x) memcpy(copy, d_x, (size_t)count * sizeof *copy);
        DTRAIN__K(rounded)(a->d_residual, a->y_dtype, at, count, d_x);
    }
}

/* Range: chunks of job->chunk rows; chunk c leaves its sums in scratch[2 n c ...]. */
DTRAIN__KERNEL(layernorm_backward)
{
    const dtrain_layernorm_backward_args *a = (const dtrain_layernorm_backward_args *)job->args;
    float means[2];
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const int64_t first = chunk * job->chunk;
        const int64_t last = dtrain__min(first + job->chunk, a->rows);
        float *sums = job->scratch + chunk * 2 * a->n;
        memset(sums, 0, (size_t)(2 * a->n) * sizeof *sums);
        for (int64_t row = first; row < last; row++) {
            DTRAIN__K(layernorm_sums)(a, row, sums, means);
            if (a->d_x) DTRAIN__K(layernorm_slope)(a, row, means);
        }
    }
}

/* Range: columns. Adds the chunks' sums up in order; job->total chunks. */
DTRAIN__KERNEL(layernorm_params)
{
    const dtrain_layernorm_backward_args *a = (const dtrain_layernorm_backward_args *)job->args;
    float *const out[2] = {a->d_weight, a->d_bias};
    for (int which = 0; which < 2; which++) {
        if (!out[which]) continue;
        for (int64_t i = begin; i < end; i += DTRAIN__W) {
            const int64_t n = end - i;
            const float *sums = job->scratch + which * a->n + i;
            dtrain__v sum = dtrain__vset(0);
            for (int64_t chunk = 0; chunk < job->chunk_count; chunk++, sums += 2 * a->n)
                sum += dtrain__vload_n(sums, n);
            if (a->accumulate_params) sum += dtrain__vload_n(out[which] + i, n);
            dtrain__vstore_n(out[which] + i, sum, n);
        }
    }
}
