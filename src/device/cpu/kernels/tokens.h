/* Embedding, cross-entropy. */

/* ---- Embedding --------------------------------------------------------------------------------*/

DTRAIN__KERNEL(embedding)
{
    const dtrain_embedding_args *a = (const dtrain_embedding_args *)job->args;
    for (int64_t row = begin; row < end; row++) {
        const int64_t at = dtrain__token_row(a, row);
        const float *token = at >= 0 ? a->wte + at * a->n : NULL;
        const float *place = a->wpe ? a->wpe + dtrain__position(a, row) * a->n : NULL;
        for (int64_t j = 0; j < a->n; j += DTRAIN__W) {
            const int64_t n = a->n - j;
            dtrain__v v = token ? dtrain__vload_n(token + j, n) : dtrain__vset(0);
            if (place) v += dtrain__vload_n(place + j, n);
            dtrain__vstore_as(a->y, a->dtype, row * a->n + j, v, n);
        }
    }
}

/* Range: columns. Each thread walks all rows, so equal tokens add in row order. */
DTRAIN__KERNEL(embedding_backward)
{
    const dtrain_embedding_backward_args *a = (const dtrain_embedding_backward_args *)job->args;
    for (int64_t row = 0; row < a->rows; row++) {
        const int64_t at = dtrain__token_row(a, row);
        float *token = a->d_wte && at >= 0 ? a->d_wte + at * a->n : NULL;
        float *place = a->d_wpe ? a->d_wpe + dtrain__position(a, row) * a->n : NULL;
        for (int64_t j = begin; j < end; j += DTRAIN__W) {
            const int64_t n = end - j;
            const dtrain__v d = dtrain__vload_as(a->d_y, a->dtype, row * a->n + j, n);
            if (token) dtrain__vstore_n(token + j, dtrain__vload_n(token + j, n) + d, n);
            if (place) dtrain__vstore_n(place + j, dtrain__vload_n(place + j, n) + d, n);
        }
    }
}

/* ---- Cross-entropy ------------------------------------------------------------------------------
 *
 * A row of logits (200 KB for GPT-2) is read from memory once: a block of 2048 stays in L1 for its
 * maximum and its sum of exponentials; a new maximum rescales the earlier sum. One exp per logit.
 */

enum { DTRAIN__K(LOGITS) = 2048 };

/* Return the maximum of count floats and `top`. */
DTRAIN__ROUTINE float DTRAIN__K(row_top)(const float *x, int64_t count, float top)
{
    dtrain__v a = dtrain__vset(top), b = a;
    int64_t i = 0;
    for (; i + 2 * DTRAIN__W <= count; i += 2 * DTRAIN__W) {
        a = dtrain__vmax(dtrain__vload(x + i), a);
        b = dtrain__vmax(dtrain__vload(x + i + DTRAIN__W), b);
    }
    top = DTRAIN__K(vtop)(dtrain__vmax(a, b));
    for (; i < count; i++) top = x[i] > top ? x[i] : top;
    return top;
}

DTRAIN__ROUTINE float DTRAIN__K(row_exp_sum)(const float *x, int64_t count, float top)
{
    const dtrain__v t = dtrain__vset(top);
    dtrain__v a = dtrain__vset(0), b = a;
    int64_t i = 0;
    for (; i + 2 * DTRAIN__W <= count; i += 2 * DTRAIN__W) {
        a += dtrain__vexp(dtrain__vload(x + i) - t);
        b += dtrain__vexp(dtrain__vload(x + i + DTRAIN__W) - t);
    }
    for (; i < count; i += DTRAIN__W) {
        const int64_t n = count - i;
        a += DTRAIN__K(vfirst)(dtrain__vexp(dtrain__vload_n(x + i, n) - t), n);
    }
    return dtrain__vsum(a + b);
}

DTRAIN__KERNEL(cross_entropy)
{
    const dtrain_cross_entropy_args *a = (const dtrain_cross_entropy_args *)job->args;
    for (int64_t row = begin; row < end; row++) {
        double sum = 0, logits_sum = 0;
        float top = -FLT_MAX, buffer[DTRAIN__K(LOGITS)];
        const bool ignored = a->targets[row] == -1;
        const int64_t classes = ignored ? 0 : dtrain__classes_here(a);
        const int64_t column = dtrain__target_column(a, row), at = row * a->n + column;
        const float wanted = column >= 0 ? dtrain__element(a->logits, a->dtype, at) : 0;
        for (int64_t i = 0; i < classes; i += DTRAIN__K(LOGITS)) {
            const int64_t left = classes - i, most = DTRAIN__K(LOGITS);
            const int64_t count = left < most ? left : most;
            const float *x = DTRAIN__K(widened)(a->logits, a->dtype, row * a->n + i, count, buffer);
            const float higher = DTRAIN__K(row_top)(x, count, top);
            if (higher > top) sum *= exp((double)top - (double)higher);
            top = higher;
            sum += (double)DTRAIN__K(row_exp_sum)(x, count, top);
            if (a->smoothing > 0) logits_sum += (double)DTRAIN__K(row_sum)(x, count);
        }
        if (a->parts) {
            float *part = a->parts + row;
            part[0] = classes > 0 ? top : -INFINITY;
            part[a->rows] = (float)sum;
            part[2 * a->rows] = wanted;
            if (a->smoothing > 0) part[3 * a->rows] = (float)logits_sum;
        } else dtrain__row_loss(a, row, top, sum, wanted, logits_sum);
    }
}

DTRAIN__KERNEL(cross_entropy_backward)
{
    const dtrain_cross_entropy_backward_args *a =
        (const dtrain_cross_entropy_backward_args *)job->args;
    const dtrain_dtype dtype = a->dtype;
    const size_t bytes = dtype <= DTRAIN_DTYPE_F32 ? 4 : 2;
    float buffer[DTRAIN__KERNEL_BLOCK];
    const float factor = a->upstream ? a->scale * a->upstream[0] : a->scale;
    const int64_t classes = dtrain__classes_here(a);
    const dtrain__v scale = dtrain__vset(factor);
    const float one_hot = factor * (1 - a->smoothing);
    const dtrain__v uniform = dtrain__vset(factor * a->smoothing / (float)dtrain__classes_whole(a));
    for (int64_t row = begin; row < end; row++) {
        const dtrain__v lse = dtrain__vset(a->lse[row]);
        const dtrain__v rest = dtrain__vset(a->lse_rest ? a->lse_rest[row] : 0);
        const int64_t first = row * a->n, column = dtrain__target_column(a, row);
        const bool ignored = a->targets[row] == -1;
        const int64_t padding = ignored ? 0 : classes;
        memset((char *)a->d_logits + (size_t)(first + padding) * bytes, 0,
               (size_t)(a->n - padding) * bytes);
        for (int64_t j = 0; j < classes && !ignored; j += DTRAIN__KERNEL_BLOCK) {
            const int64_t count = dtrain__min(classes - j, DTRAIN__KERNEL_BLOCK), at = first + j;
            const int64_t target = column - j;
            float *d = DTRAIN__K(written)(a->d_logits, dtype, at, buffer);
            const float *x = DTRAIN__K(widened)(a->logits, dtype, at, count, d);
            for (int64_t i = 0; i < count; i += DTRAIN__W) {
                const dtrain__v share =
                    dtrain__vexp(dtrain__vload_n(x + i, count - i) - lse - rest);
                dtrain__vstore_n(d + i, share * scale - uniform, count - i);
            }
            if (target >= 0 && target < count) d[target] -= one_hot;
            DTRAIN__K(rounded)(a->d_logits, dtype, at, count, d);
        }
    }
}
