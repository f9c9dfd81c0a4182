/* Layer normalisation, and that by the root mean square, whose mean is 0
 *
 * A row stays in L1 between its passes: memory is read once and written once. */

/* Four accumulators, because one would wait for itself. */
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

/* One row of x, or of x + residual, which becomes sum too, as fp32. `buffer` holds it where the sum
 * is rounded for storage: the mean is that of the unrounded row. */
DTRAIN__ROUTINE const float *DTRAIN__K(row_open)(const dtrain_layernorm_args *a, int64_t row,
                                                 float *buffer)
{
    const int64_t first = row * a->n;
    if (!a->residual) return DTRAIN__K(widened)(a->x, a->x_dtype, first, a->n, buffer);
    for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
        const int64_t at = first + i, n = a->n - i;
        const dtrain__v sum = dtrain__vload_as(a->x, a->x_dtype, at, n) +
                              dtrain__vload_as(a->residual, a->y_dtype, at, n);
        dtrain__vstore(buffer + i, sum);
        dtrain__vstore_as(a->sum, a->x_dtype, at, sum, n);
    }
    return buffer;
}

DTRAIN__KERNEL(layernorm)
{
    const dtrain_layernorm_args *a = (const dtrain_layernorm_args *)job->args;
    const dtrain_dtype y_dtype = a->y_dtype;
    for (int64_t row = begin; row < end; row++) {
        const float *x = DTRAIN__K(row_open)(a, row, job->scratch + index * job->slot);
        const float mean = a->mean ? DTRAIN__K(row_sum)(x, a->n) / (float)a->n : 0;
        const float variance = DTRAIN__K(row_spread)(x, a->n, mean) / (float)a->n;
        const float rstd = 1 / sqrtf(variance + a->epsilon);
        const dtrain__v m = dtrain__vset(mean), r = dtrain__vset(rstd);
        for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
            const int64_t n = a->n - i;
            const dtrain__v normal = (dtrain__vload_n(x + i, n) - m) * r;
            __builtin_prefetch(x + a->n + i); /* the next row, while this one keeps the core busy */
            const dtrain__v bias = a->bias ? dtrain__vload_n(a->bias + i, n) : dtrain__vset(0);
            dtrain__vstore_as(a->y, y_dtype, row * a->n + i,
                              dtrain__vfma(normal, dtrain__vload_n(a->weight + i, n), bias), n);
        }
        if (a->mean) a->mean[row] = mean;
        a->rstd[row] = rstd;
    }
}

/* With h = (x - mean) rstd and g = d_y weight (Ba et al., 2016):
 *     d_weight += d_y h      d_bias += d_y      d_x = rstd (g - mean(g) - h mean(g h))
 * Where the mean is no function of x, mean(g) drops out.
 * First pass over a row: the two means and the parameter sums of this chunk of rows (n floats each,
 * in L1 or L2). Second pass: d_x. */
DTRAIN__HELPER void DTRAIN__K(layernorm_sums)(const dtrain_layernorm_backward_args *a, int64_t row,
                                              dtrain_dtype x_dtype, dtrain_dtype y_dtype,
                                              float *weight_sum, float means[2])
{
    const int64_t first = row * a->n;
    const void *x = a->x, *d_y = a->d_y;
    const dtrain__v m = dtrain__vset(a->mean ? a->mean[row] : 0);
    const dtrain__v r = dtrain__vset(a->rstd[row]);
    float *bias_sum = weight_sum + a->n;
    dtrain__v g_sum = dtrain__vset(0), gh_sum = g_sum;
    for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
        const int64_t n = a->n - i;
        const dtrain__v d = dtrain__vload_as(d_y, y_dtype, first + i, n);
        const dtrain__v h = (dtrain__vload_as(x, x_dtype, first + i, n) - m) * r;
        const dtrain__v g = d * dtrain__vload_n(a->weight + i, n);
        g_sum += g;
        gh_sum = dtrain__vfma(g, h, gh_sum);
        dtrain__vstore_n(weight_sum + i, dtrain__vfma(d, h, dtrain__vload_n(weight_sum + i, n)), n);
        dtrain__vstore_n(bias_sum + i, dtrain__vload_n(bias_sum + i, n) + d, n);
    }
    means[0] = a->mean ? dtrain__vsum(g_sum) / (float)a->n : 0;
    means[1] = dtrain__vsum(gh_sum) / (float)a->n;
}

DTRAIN__HELPER void DTRAIN__K(layernorm_slope)(const dtrain_layernorm_backward_args *a, int64_t row,
                                               dtrain_dtype x_dtype, dtrain_dtype y_dtype,
                                               const float means[2])
{
    const int64_t first = row * a->n;
    const void *x = a->x, *d_y = a->d_y;
    void *d_x = a->d_x, *d_residual = a->d_residual;
    const dtrain__v m = dtrain__vset(a->mean ? a->mean[row] : 0);
    const dtrain__v r = dtrain__vset(a->rstd[row]);
    const dtrain__v g_mean = dtrain__vset(means[0]), gh_mean = dtrain__vset(means[1]);
    for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
        const int64_t n = a->n - i;
        const dtrain__v h = (dtrain__vload_as(x, x_dtype, first + i, n) - m) * r;
        const dtrain__v g =
            dtrain__vload_as(d_y, y_dtype, first + i, n) * dtrain__vload_n(a->weight + i, n);
        dtrain__v slope = r * (g - g_mean - h * gh_mean);
        if (a->accumulate_x) slope += dtrain__vload_as(d_x, x_dtype, first + i, n);
        dtrain__vstore_as(d_x, x_dtype, first + i, slope, n);
        if (d_residual) dtrain__vstore_as(d_residual, y_dtype, first + i, slope, n);
    }
}

/* Range: chunks of job->chunk rows; chunk c leaves its sums in scratch[2 n c ...]. */
DTRAIN__KERNEL_AS(layernorm_backward)
{
    const dtrain_layernorm_backward_args *a = (const dtrain_layernorm_backward_args *)job->args;
    const dtrain_dtype x_dtype = f32 ? DTRAIN_DTYPE_F32 : a->x_dtype;
    const dtrain_dtype y_dtype = f32 ? DTRAIN_DTYPE_F32 : a->y_dtype;
    float means[2];
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const int64_t first = chunk * job->chunk;
        const int64_t last = first + job->chunk < a->rows ? first + job->chunk : a->rows;
        float *sums = job->scratch + chunk * 2 * a->n;
        memset(sums, 0, (size_t)(2 * a->n) * sizeof *sums);
        for (int64_t row = first; row < last; row++) {
            DTRAIN__K(layernorm_sums)(a, row, x_dtype, y_dtype, sums, means);
            if (a->d_x) DTRAIN__K(layernorm_slope)(a, row, x_dtype, y_dtype, means);
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
