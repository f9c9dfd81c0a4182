/* Functions of two elements: gated products, losses
 *
 * Two reads and a write of an element forward, at most five of them backward: bandwidth is the
 * limit, but for the logarithm of the logistic loss, which is taken element by element.
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
    const dtrain_dtype x_dtype = a->x_dtype;
    const dtrain_dtype other_dtype = a->other_dtype;
    const dtrain_dtype y_dtype = a->y_dtype;
    for (int64_t i = begin; i < end; i += DTRAIN__W) {
        const int64_t n = end - i;
        const dtrain__v x = dtrain__vload_as(a->x, x_dtype, i, n);
        dtrain__v other = x;
        if (a->other) other = dtrain__vload_as(a->other, other_dtype, i, n);
        dtrain__vstore_as(a->y, y_dtype, i, DTRAIN__K(vpointwise)(a->kind, x, other), n);
    }
}

DTRAIN__KERNEL_AS(pointwise_backward)
{
    const dtrain_pointwise_backward_args *a = (const dtrain_pointwise_backward_args *)job->args;
    const dtrain_dtype x_dtype = f32 ? DTRAIN_DTYPE_F32 : a->x_dtype;
    const dtrain_dtype other_dtype = f32 ? DTRAIN_DTYPE_F32 : a->other_dtype;
    const dtrain_dtype y_dtype = f32 ? DTRAIN_DTYPE_F32 : a->y_dtype;
    for (int64_t i = begin; i < end; i += DTRAIN__W) {
        const int64_t n = end - i;
        const dtrain__v x = dtrain__vload_as(a->x, x_dtype, i, n);
        const dtrain__v d_y = dtrain__vload_as(a->d_y, y_dtype, i, n);
        dtrain__v other = x;
        if (a->other) other = dtrain__vload_as(a->other, other_dtype, i, n);
        if (a->d_x) {
            dtrain__v d = DTRAIN__K(vslope_x)(a->kind, x, other, d_y);
            if (a->accumulate_x) d += dtrain__vload_as(a->d_x, x_dtype, i, n);
            dtrain__vstore_as(a->d_x, x_dtype, i, d, n);
        }
        if (a->d_other) {
            dtrain__v d = DTRAIN__K(vslope_other)(a->kind, x, other, d_y);
            if (a->accumulate_other) d += dtrain__vload_as(a->d_other, other_dtype, i, n);
            dtrain__vstore_as(a->d_other, other_dtype, i, d, n);
        }
    }
}
