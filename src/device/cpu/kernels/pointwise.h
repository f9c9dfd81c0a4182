/* Functions of single elements: activations, gated products, losses
 *
 * Two reads and a write of an element forward, at most five of them backward: bandwidth is the
 * limit, but for the logarithm of the logistic loss, which is taken element by element. */

/* ---- Activations ------------------------------------------------------------------------------*/

/* Compute value / (1 + e^-x): sigmoid with a value of 1, SiLU with x. vexp stops at e^88, so the
 * divisor is finite. */
DTRAIN__HELPER dtrain__v DTRAIN__K(vgated)(dtrain__v value, dtrain__v x)
{
    return value / (dtrain__vset(1.0f) + dtrain__vexp(-x));
}

/* Compute the derivative of SiLU. With q = e^-x and s = 1 / (1 + q) that of x s is
 * s + x s (1 - s) = s (1 + x q s). Below -80, where x is clamped, it is less than 1e-32. */
DTRAIN__HELPER dtrain__v DTRAIN__K(vsilu_slope)(dtrain__v x)
{
    x = dtrain__vmax(dtrain__vset(-80.0f), x);
    const dtrain__v one = dtrain__vset(1.0f), q = dtrain__vexp(-x), s = one / (one + q);
    return s * dtrain__vfma(x, q * s, one);
}

DTRAIN__HELPER dtrain__v DTRAIN__K(vactivate)(uint32_t activation, dtrain__v x)
{
    if (activation == DTRAIN_ACTIVATION_GELU) return DTRAIN__K(vgelu)(x);
    if (activation == DTRAIN_ACTIVATION_RELU) return dtrain__vmax(dtrain__vset(0), x);
    if (activation == DTRAIN_ACTIVATION_SILU) return DTRAIN__K(vgated)(x, x);
    return x;
}

/* Compute d_out * act'(x); the slope of relu at 0 is 0. */
DTRAIN__HELPER dtrain__v DTRAIN__K(vdeactivate)(uint32_t activation, dtrain__v x, dtrain__v d_out)
{
    if (activation == DTRAIN_ACTIVATION_GELU) return d_out * DTRAIN__K(vgelu_slope)(x);
    if (activation == DTRAIN_ACTIVATION_RELU)
        return dtrain__vkeep(d_out, DTRAIN__K(vless)(dtrain__vset(0), x));
    if (activation == DTRAIN_ACTIVATION_SILU) return d_out * DTRAIN__K(vsilu_slope)(x);
    return d_out;
}

/* ---- Functions of two elements ------------------------------------------------------------------
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
    if (kind == DTRAIN_POINTWISE_MULTIPLY) return x * other;
    if (kind == DTRAIN_POINTWISE_SWIGLU) return DTRAIN__K(vgated)(x, x) * other;
    if (kind == DTRAIN_POINTWISE_SQUARED_ERROR) return (x - other) * (x - other);
    if (kind == DTRAIN_POINTWISE_LOGISTIC_LOSS) return DTRAIN__K(vlogistic_loss)(x, other);
    return DTRAIN__K(vactivate)(kind, x);
}

DTRAIN__HELPER dtrain__v DTRAIN__K(vslope_x)(uint32_t kind, dtrain__v x, dtrain__v other,
                                             dtrain__v d_y)
{
    if (kind == DTRAIN_POINTWISE_MULTIPLY) return d_y * other;
    if (kind == DTRAIN_POINTWISE_SWIGLU) return d_y * other * DTRAIN__K(vsilu_slope)(x);
    if (kind == DTRAIN_POINTWISE_SQUARED_ERROR) return d_y * (dtrain__vset(2) * (x - other));
    if (kind == DTRAIN_POINTWISE_LOGISTIC_LOSS)
        return d_y * (DTRAIN__K(vgated)(dtrain__vset(1), x) - other);
    return DTRAIN__K(vdeactivate)(kind, x, d_y);
}

DTRAIN__HELPER dtrain__v DTRAIN__K(vslope_other)(uint32_t kind, dtrain__v x, dtrain__v other,
                                                 dtrain__v d_y)
{
    if (kind == DTRAIN_POINTWISE_MULTIPLY) return d_y * x;
    if (kind == DTRAIN_POINTWISE_SWIGLU) return d_y * DTRAIN__K(vgated)(x, x);
    if (kind == DTRAIN_POINTWISE_SQUARED_ERROR) return d_y * (dtrain__vset(2) * (other - x));
    return -d_y * x;
}

DTRAIN__KERNEL_AS(pointwise)
{
    const dtrain_pointwise_args *a = (const dtrain_pointwise_args *)job->args;
    const dtrain_dtype x_dtype = f32 ? DTRAIN_DTYPE_F32 : a->x_dtype;
    const dtrain_dtype other_dtype = f32 ? DTRAIN_DTYPE_F32 : a->other_dtype;
    const dtrain_dtype y_dtype = f32 ? DTRAIN_DTYPE_F32 : a->y_dtype;
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
