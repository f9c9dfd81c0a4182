/* Functions of two elements: gated products, losses
 *
 * Forward moves three elements, backward at most five: bandwidth is the limit, except for the
 * logarithm of the logistic loss, which is scalar.
 *
 *     f                        df/dx                    df/d other
 *     x other                  other                    x
 *     silu(x) other            silu'(x) other           silu(x)
 *     (x - other)^2            2 (x - other)            -2 (x - other)
 *     logistic loss            sigmoid(x) - other       -x */

/* Compute max(x, 0) - x other + log(1 + e^-|x|): no exponential of a positive number, so none
 * overflows. */
DTRAIN__HELPER dtrain__v DTRAIN__K(vlogistic_loss)(dtrain__v x, dtrain__v other)
{
    const dtrain__v size = dtrain__vfrombits(dtrain__vbits(x) & dtrain__viset(INT32_MAX));
    dtrain__v small = dtrain__vexp(-size);
    for (int lane = 0; lane < DTRAIN__W; lane++) small[lane] = log1pf(small[lane]);
    return (dtrain__vmax(dtrain__vset(0), x) - x * other) + small;
}

DTRAIN__HELPER dtrain__v DTRAIN__K(vpointwise)(uint32_t kind, dtrain__v x, dtrain__v other)
{
    const bool gated = kind == DTRAIN_POINTWISE_SWIGLU;
    if (kind == DTRAIN_POINTWISE_MULTIPLY) return x * other;
    if (kind == DTRAIN_POINTWISE_SQUARED_ERROR) return (x - other) * (x - other);
    if (kind == DTRAIN_POINTWISE_LOGISTIC_LOSS) return DTRAIN__K(vlogistic_loss)(x, other);
    const dtrain__v y = DTRAIN__K(vactivate)(gated ? (uint32_t)DTRAIN_ACTIVATION_SILU : kind, x);
    return gated ? y * other : y;
}

DTRAIN__HELPER dtrain__v DTRAIN__K(vslope_x)(uint32_t kind, dtrain__v x, dtrain__v other,
                                             dtrain__v d_y)
{
    const bool gated = kind == DTRAIN_POINTWISE_SWIGLU;
    if (gated || kind == DTRAIN_POINTWISE_MULTIPLY) d_y *= other;
    if (kind == DTRAIN_POINTWISE_MULTIPLY) return d_y;
    if (kind == DTRAIN_POINTWISE_SQUARED_ERROR) return d_y * (dtrain__vset(2) * (x - other));
    if (kind == DTRAIN_POINTWISE_LOGISTIC_LOSS)
        return d_y * (DTRAIN__K(vgated)(dtrain__vset(1), x) - other);
    return DTRAIN__K(vdeactivate)(gated ? (uint32_t)DTRAIN_ACTIVATION_SILU : kind, x, d_y);
}

DTRAIN__HELPER dtrain__v DTRAIN__K(vslope_other)(uint32_t kind, dtrain__v x, dtrain__v other,
                                                 dtrain__v d_y)
{
    if (kind == DTRAIN_POINTWISE_MULTIPLY) return d_y * x;
    if (kind == DTRAIN_POINTWISE_SWIGLU) return d_y * DTRAIN__K(vgated)(x, x);
    if (kind == DTRAIN_POINTWISE_SQUARED_ERROR) return d_y * (dtrain__vset(2) * (other - x));
    return -d_y * x;
}

DTRAIN__KERNEL(pointwise)
{
    const dtrain_pointwise_args *a = (const dtrain_pointwise_args *)job->args;
    float buffers[3][DTRAIN__KERNEL_BLOCK];
    for (int64_t at = begin; at < end; at += DTRAIN__KERNEL_BLOCK) {
        const int64_t count = dtrain__min(end - at, DTRAIN__KERNEL_BLOCK);
        const float *x = DTRAIN__K(widened)(a->x, a->x_dtype, at, count, buffers[0]), *other = x;
        float *y = DTRAIN__K(written)(a->y, a->y_dtype, at, buffers[2]);
        if (a->other) other = DTRAIN__K(widened)(a->other, a->other_dtype, at, count, buffers[1]);
        for (int64_t i = 0; i < count; i += DTRAIN__W) {
            const int64_t n = count - i;
            dtrain__vstore_n(y + i,
                             DTRAIN__K(vpointwise)(a->kind, dtrain__vload_n(x + i, n),
                                                   dtrain__vload_n(other + i, n)),
                             n);
        }
        DTRAIN__K(rounded)(a->y, a->y_dtype, at, count, y);
    }
}

/* Compute the gradient of one argument of a block. */
DTRAIN__ROUTINE void DTRAIN__K(pointwise_slope)(const dtrain_pointwise_backward_args *a, bool of_x,
                                                const float *x, const float *other,
                                                const float *d_y, int64_t at, int64_t count)
{
    const dtrain_dtype dtype = of_x ? a->x_dtype : a->other_dtype;
    void *to = of_x ? a->d_x : a->d_other;
    float buffer[DTRAIN__KERNEL_BLOCK];
    const float *old = NULL;
    if (!to) return;
    float *d = DTRAIN__K(written)(to, dtype, at, buffer);
    if (of_x ? a->accumulate_x : a->accumulate_other)
        old = DTRAIN__K(widened)(to, dtype, at, count, d);
    for (int64_t i = 0; i < count; i += DTRAIN__W) {
        const int64_t n = count - i;
        const dtrain__v u = dtrain__vload_n(x + i, n), v = dtrain__vload_n(other + i, n);
        const dtrain__v slope = dtrain__vload_n(d_y + i, n);
        dtrain__v sum = of_x ? DTRAIN__K(vslope_x)(a->kind, u, v, slope)
                             : DTRAIN__K(vslope_other)(a->kind, u, v, slope);
        if (old) sum += dtrain__vload_n(old + i, n);
        dtrain__vstore_n(d + i, sum, n);
    }
    DTRAIN__K(rounded)(to, dtype, at, count, d);
}

DTRAIN__KERNEL(pointwise_backward)
{
    const dtrain_pointwise_backward_args *a = (const dtrain_pointwise_backward_args *)job->args;
    float buffers[3][DTRAIN__KERNEL_BLOCK];
    for (int64_t at = begin; at < end; at += DTRAIN__KERNEL_BLOCK) {
        const int64_t count = dtrain__min(end - at, DTRAIN__KERNEL_BLOCK);
        const float *x = DTRAIN__K(widened)(a->x, a->x_dtype, at, count, buffers[0]), *other = x;
        const float *d_y = DTRAIN__K(widened)(a->d_y, a->y_dtype, at, count, buffers[1]);
        if (a->other) other = DTRAIN__K(widened)(a->other, a->other_dtype, at, count, buffers[2]);
        DTRAIN__K(pointwise_slope)(a, true, x, other, d_y, at, count);
        DTRAIN__K(pointwise_slope)(a, false, x, other, d_y, at, count);
    }
}
