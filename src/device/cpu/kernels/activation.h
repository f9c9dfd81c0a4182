/* Activations, and what follows a product: bias, activation, and their gradients */

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

/* Range: columns, so that each column's sum is one chain over all rows. Row by row, with the sums
 * in L1: several rows at once would save a few loads but walk addresses that share a cache set. */
DTRAIN__KERNEL(activation_backward)
{
    const dtrain_activation_backward_args *a = (const dtrain_activation_backward_args *)job->args;
    const dtrain_dtype dtype = a->dtype;
    const bool store = a->activation != DTRAIN_ACTIVATION_NONE || a->d_in != a->d_out;
    if (a->d_bias && !a->accumulate)
        memset(a->d_bias + begin, 0, (size_t)(end - begin) * sizeof *a->d_bias);
    for (int64_t row = 0; row < a->rows; row++)
        for (int64_t j = begin; j < end; j += DTRAIN__W) {
            const int64_t at = row * a->n + j, n = end - j;
            dtrain__v d = dtrain__vload_as(a->d_out, dtype, at, n);
            if (a->activation != DTRAIN_ACTIVATION_NONE)
                d = DTRAIN__K(vdeactivate)(a->activation, dtrain__vload_as(a->x, dtype, at, n), d);
            if (store) dtrain__vstore_as(a->d_in, dtype, at, d, n);
            if (a->d_bias)
                dtrain__vstore_n(a->d_bias + j, dtrain__vload_n(a->d_bias + j, n) + d, n);
        }
}

/* Range: rows of C. What a GEMM leaves to do, a foreign one or one whose C is summed over ranks:
 * bias, aux, activation. */
DTRAIN__KERNEL(activate)
{
    const dtrain_gemm_args *a = (const dtrain_gemm_args *)job->args;
    for (int64_t row = begin; row < end; row++)
        for (int64_t j = 0; j < a->n; j += DTRAIN__W) {
            const int64_t at = row * a->ldc + j, n = a->n - j;
            dtrain__v x = dtrain__vload_as(a->c, a->c_dtype, at, n);
            if (a->bias) x += dtrain__vload_n(a->bias + j, n);
            if (a->aux) dtrain__vstore_as(a->aux, a->c_dtype, at, x, n);
            dtrain__vstore_as(a->c, a->c_dtype, at, DTRAIN__K(vactivate)(a->activation, x), n);
        }
}
