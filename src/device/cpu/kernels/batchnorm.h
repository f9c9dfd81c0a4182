/* Batch normalisation
 *
 * Sums run down columns: in a chunk of rows that stays in L1, a vector of columns at a time. Chunks
 * leave their sums in scratch, (chunk_count, 2 n), which are added in order. Kernels on single rows
 * take a few rows at a time: they load the numbers of a column once, and the cache lines that
 * columns share stay in L1. */

#define DTRAIN__BATCHNORM_ROWS 32

/* Range: chunks. Means of the chunk, sums of squared deviations from the means. */
DTRAIN__KERNEL_AS(batchnorm_moments)
{
    const dtrain_batchnorm_moments_args *a = (const dtrain_batchnorm_moments_args *)job->args;
    const dtrain_dtype dtype = f32 ? DTRAIN_DTYPE_F32 : job->dtype;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const int64_t first = chunk * job->chunk, past = first + job->chunk;
        const int64_t last = past < a->rows ? past : a->rows;
        const dtrain__v share = dtrain__vset(1 / (float)(last - first));
        float *mean = job->scratch + chunk * 2 * a->n, *spread = mean + a->n;
        for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
            const int64_t n = a->n - i;
            dtrain__v even = dtrain__vset(0), odd = even;
            for (int64_t row = first; row < last; row += 2) {
                even += dtrain__vload_as(a->x, dtype, row * a->n + i, n);
                if (row + 1 < last) odd += dtrain__vload_as(a->x, dtype, (row + 1) * a->n + i, n);
            }
            const dtrain__v center = (even + odd) * share;
            dtrain__v sum = dtrain__vset(0);
            for (int64_t row = first; row < last; row++) {
                const dtrain__v off = dtrain__vload_as(a->x, dtype, row * a->n + i, n) - center;
                sum = dtrain__vfma(off, off, sum);
            }
            dtrain__vstore_n(mean + i, center, n);
            dtrain__vstore_n(spread + i, sum, n);
        }
    }
}

/* Range: rows. */
DTRAIN__KERNEL(batchnorm)
{
    const dtrain_batchnorm_args *a = (const dtrain_batchnorm_args *)job->args;
    const dtrain_dtype dtype = job->dtype;
    for (int64_t first = begin; first < end; first += DTRAIN__BATCHNORM_ROWS)
        for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
            const int64_t n = a->n - i, past = first + DTRAIN__BATCHNORM_ROWS;
            const dtrain__v scale =
                dtrain__vload_n(a->rstd + i, n) * dtrain__vload_n(a->weight + i, n);
            const dtrain__v mean = dtrain__vload_n(a->mean + i, n);
            const dtrain__v bias = dtrain__vload_n(a->bias + i, n);
            for (int64_t row = first; row < past && row < end; row++) {
                const int64_t at = row * a->n + i;
                const dtrain__v off = dtrain__vload_as(a->x, dtype, at, n) - mean;
                dtrain__v y = dtrain__vfma(off, scale, bias);
                if (a->residual) y += dtrain__vload_as(a->residual, dtype, at, n);
                if (a->activation) y = DTRAIN__K(vactivate)(DTRAIN_ACTIVATION_RELU, y);
                dtrain__vstore_as(a->y, dtype, at, y, n);
            }
        }
}

/* Return d_y act'. ReLU's output is positive exactly if its input is. */
DTRAIN__HELPER dtrain__v DTRAIN__K(batchnorm_slope)(uint32_t activation, const void *d_y,
                                                    const void *y, dtrain_dtype dtype, int64_t at,
                                                    int64_t n)
{
    const dtrain__v d = dtrain__vload_as(d_y, dtype, at, n);
    if (activation == DTRAIN_ACTIVATION_NONE) return d;
    return DTRAIN__K(vdeactivate)(DTRAIN_ACTIVATION_RELU, dtrain__vload_as(y, dtype, at, n), d);
}

/* Range: chunks. Sums of d and of d h. */
DTRAIN__KERNEL(batchnorm_sums)
{
    const dtrain_batchnorm_sums_args *a = (const dtrain_batchnorm_sums_args *)job->args;
    const dtrain_dtype dtype = job->dtype;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const int64_t first = chunk * job->chunk, past = first + job->chunk;
        const int64_t last = past < a->rows ? past : a->rows;
        float *sums = job->scratch + chunk * 2 * a->n;
        for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
            const int64_t n = a->n - i;
            const dtrain__v mean = dtrain__vload_n(a->mean + i, n);
            const dtrain__v rstd = dtrain__vload_n(a->rstd + i, n);
            dtrain__v sum = dtrain__vset(0), product = sum;
            for (int64_t row = first; row < last; row++) {
                const int64_t at = row * a->n + i;
                const dtrain__v d =
                    DTRAIN__K(batchnorm_slope)(a->activation, a->d_y, a->y, dtype, at, n);
                const dtrain__v h = (dtrain__vload_as(a->x, dtype, at, n) - mean) * rstd;
                sum += d;
                product = dtrain__vfma(d, h, product);
                if (!a->d_residual) continue;
                dtrain__v out = d;
                if (a->accumulate) out += dtrain__vload_as(a->d_residual, dtype, at, n);
                dtrain__vstore_as(a->d_residual, dtype, at, out, n);
            }
            dtrain__vstore_n(sums + i, sum, n);
            dtrain__vstore_n(sums + a->n + i, product, n);
        }
    }
}

/* Range: rows. */
DTRAIN__KERNEL_AS(batchnorm_backward)
{
    const dtrain_batchnorm_backward_args *a = (const dtrain_batchnorm_backward_args *)job->args;
    const dtrain_dtype dtype = f32 ? DTRAIN_DTYPE_F32 : job->dtype;
    const dtrain__v share = dtrain__vset(a->inverse_count[0]);
    for (int64_t first = begin; first < end; first += DTRAIN__BATCHNORM_ROWS)
        for (int64_t i = 0; i < a->n; i += DTRAIN__W) {
            const int64_t n = a->n - i, past = first + DTRAIN__BATCHNORM_ROWS;
            const dtrain__v mean = dtrain__vload_n(a->mean + i, n);
            const dtrain__v rstd = dtrain__vload_n(a->rstd + i, n);
            const dtrain__v scale = rstd * dtrain__vload_n(a->weight + i, n);
            const dtrain__v sum = dtrain__vload_n(a->sums + i, n);
            const dtrain__v product = dtrain__vload_n(a->sums + a->n + i, n);
            for (int64_t row = first; row < past && row < end; row++) {
                const int64_t at = row * a->n + i;
                const dtrain__v h = (dtrain__vload_as(a->x, dtype, at, n) - mean) * rstd;
                const dtrain__v d =
                    DTRAIN__K(batchnorm_slope)(a->activation, a->d_y, a->y, dtype, at, n);
                dtrain__v slope = scale * (d - dtrain__vfma(h, product, sum) * share);
                if (a->accumulate) slope += dtrain__vload_as(a->d_x, dtype, at, n);
                dtrain__vstore_as(a->d_x, dtype, at, slope, n);
            }
        }
}
