/* Activations, epilogues of a product (bias, activation) and their gradients */

/* Compute value / (1 + e^-x): sigmoid with a value of 1, SiLU with x. vexp stops at e^88, so the
 * divisor is finite. */
DTRAIN__HELPER dtrain__v DTRAIN__K(vgated)(dtrain__v value, dtrain__v x)
{
    return value / (dtrain__vset(1.0f) + dtrain__vexp(-x));
}

/* Compute the derivative of SiLU: with q = e^-x and s = 1 / (1 + q) it is s + x s (1 - s) =
 * s (1 + x q s). Below -80, where x is clamped, it is less than 1e-32. */
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
 * in L1: several rows at once would save a few loads, but their addresses share a cache set. */
DTRAIN__KERNEL(activation_backward)
{
    const dtrain_activation_backward_args *a = (const dtrain_activation_backward_args *)job->args;
    const bool apply = a->activation != DTRAIN_ACTIVATION_NONE;
    const bool store = apply || a->d_in != a->d_out;
    float buffers[3][DTRAIN__KERNEL_BLOCK];
    if (a->d_bias && !a->accumulate)
        memset(a->d_bias + begin, 0, (size_t)(end - begin) * sizeof *a->d_bias);
    for (int64_t row = 0; row < a->rows; row++)
        for (int64_t j = begin; j < end; j += DTRAIN__KERNEL_BLOCK) {
            const int64_t at = row * a->n + j, count = dtrain__min(end - j, DTRAIN__KERNEL_BLOCK);
            const float *d_out = DTRAIN__K(widened)(a->d_out, a->dtype, at, count, buffers[0]);
            const float *x =
                apply ? DTRAIN__K(widened)(a->x, a->dtype, at, count, buffers[1]) : d_out;
            float *d_in = DTRAIN__K(written)(a->d_in, a->dtype, at, buffers[2]);
            float *sums = a->d_bias ? a->d_bias + j : NULL;
            for (int64_t i = 0; i < count; i += DTRAIN__W) {
                const int64_t n = count - i;
                dtrain__v d = dtrain__vload_n(d_out + i, n);
                if (apply) d = DTRAIN__K(vdeactivate)(a->activation, dtrain__vload_n(x + i, n), d);
                if (store) dtrain__vstore_n(d_in + i, d, n);
                if (sums) dtrain__vstore_n(sums + i, dtrain__vload_n(sums + i, n) + d, n);
            }
            if (store) DTRAIN__K(rounded)(a->d_in, a->dtype, at, count, d_in);
        }
}

/* Range: rows of C. Bias, aux and activation after a foreign GEMM or a sum of C over ranks. */
DTRAIN__KERNEL(activate)
{
    const dtrain_gemm_args *a = (const dtrain_gemm_args *)job->args;
    float buffers[2][DTRAIN__KERNEL_BLOCK];
    for (int64_t row = begin; row < end; row++)
        for (int64_t j = 0; j < a->n; j += DTRAIN__KERNEL_BLOCK) {
            const int64_t at = row * a->ldc + j,
                          count = dtrain__min(a->n - j, DTRAIN__KERNEL_BLOCK);
            const float *bias = a->bias ? a->bias + j : NULL;
            float *aux = a->aux ? DTRAIN__K(written)(a->aux, a->c_dtype, at, buffers[0]) : NULL;
            float *c = DTRAIN__K(written)(a->c, a->c_dtype, at, buffers[1]);
            DTRAIN__K(widened)(a->c, a->c_dtype, at, count, c);
            for (int64_t i = 0; i < count; i += DTRAIN__W) {
                const int64_t n = count - i;
                dtrain__v x = dtrain__vload_n(c + i, n);
                if (bias) x += dtrain__vload_n(bias + i, n);
                if (aux) dtrain__vstore_n(aux + i, x, n);
                dtrain__vstore_n(c + i, DTRAIN__K(vactivate)(a->activation, x), n);
            }
            if (aux) DTRAIN__K(rounded)(a->aux, a->c_dtype, at, count, aux);
            DTRAIN__K(rounded)(a->c, a->c_dtype, at, count, c);
        }
}
