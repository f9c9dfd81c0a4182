/* Attention
 *
 * One item is one head of one sequence (forward: one block of 64 queries). It loops over blocks of
 * 64 keys; the data of a block of queries stays in L1 and L2. Scores are transposed, keys x
 * queries:
 *
 *             queries ->             - the softmax of a query runs down a column: 8 or 16 queries
 *        keys +---------+              advance in the lanes of one vector, nothing is summed
 *         |   |  S^T    |              across lanes;
 *         v   |  \      |            - only the queries' side is transposed, once per block of
 *             |    \    |              queries, and K is read where it lies.
 *             +---------+   causal: the part below the diagonal (key > query) is never computed,
 *                           tile by tile, and blocks that are all below it are skipped.
 *
 * All products are C (m,n) (+)= A (m,k) B (k,n) with B rows contiguous and n padded to two vectors;
 * A is read by broadcasts, so a transposed A costs nothing. Heads are padded with zeros.
 *
 *     forward                        backward, from S and the log-sum-exp (Dao et al., 2022)
 *     S^T = K (s Q)^T                S^T = K (s Q)^T        P^T = exp(S^T - lse)
 *     P^T = exp(S^T - top)           dP^T = V dO^T          dS^T = P^T (dP^T - rowsum(dO O))
 *     O += P V                       dV += P^T dO    dK += dS^T (s Q)    dQ += s dS K
 *
 * with s = 1/sqrt(d). Flops: 4 d per (query, key) forward, 10 d backward. A mask is added to S; the
 * rounding error of the sum is kept unless the mask hides: -1e4 in a whole row does not change the
 * weights of its scores. Keys beyond the length of the batch element are never read. */

/* C (m,n) (+)= A (m,k) B (k,n); element (i,p) of A is a[i a_row + p a_step]. */
DTRAIN__ROUTINE void dtrain__product(int shape, int64_t m, int64_t n, int64_t k, const float *a,
                                     int64_t a_row, int64_t a_step, const float *b, int64_t b_row,
                                     float *c, int64_t c_row, bool accumulate)
{
    for (int64_t i = 0; i < m; i += DTRAIN__SHORT_MR) {
        const int rows = (int)dtrain__min(m - i, DTRAIN__SHORT_MR);
        const int64_t j0 = shape == DTRAIN__C_UPPER ? i / DTRAIN__N * DTRAIN__N : 0;
        const int64_t p0 = shape == DTRAIN__A_UPPER ? i : 0;
        const int64_t p1 = shape == DTRAIN__A_LOWER && i + rows < k ? i + rows : k;
        for (int64_t j = j0; j < n; j += DTRAIN__N) DTRAIN__K(tile)
        (rows, p1 - p0, a + i * a_row + p0 * a_step, a_row, a_step, b + p0 * b_row + j, b_row,
         accumulate ? 1.0f : 0.0f, c + i * c_row + j, c_row);
    }
}

/* Set to (padded, width) to scale * from (rows, d), from element `at` on, and zeros. width is d
 * rounded up to vectors. */
DTRAIN__HELPER void DTRAIN__K(pack_rows_as)(float *to, int64_t width, int64_t padded,
                                            const void *from, dtrain_dtype dtype, int64_t at,
                                            int64_t stride, int64_t rows, int64_t d, float scale)
{
    const dtrain__v s = dtrain__vset(scale);
    for (int64_t r = 0; r < padded; r++, to += width, at += stride)
        for (int64_t j = 0; j < width; j += DTRAIN__W) {
            const bool inside = r < rows && j < d;
            dtrain__v x = dtrain__vset(0);
            if (inside) x = dtrain__vload_as(from, dtype, at + j, d - j);
            dtrain__vstore(to + j, s * x);
        }
}

DTRAIN__ROUTINE void dtrain__pack_rows(float *to, int64_t width, int64_t padded, const void *from,
                                       dtrain_dtype dtype, int64_t at, int64_t stride, int64_t rows,
                                       int64_t d, float scale)
{
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32, bf16 = DTRAIN_DTYPE_BF16;
    if (dtype <= f32)
        DTRAIN__K(pack_rows_as)(to, width, padded, from, f32, at, stride, rows, d, scale);
    else if (dtype == bf16)
        DTRAIN__K(pack_rows_as)(to, width, padded, from, bf16, at, stride, rows, d, scale);
    else DTRAIN__K(pack_rows_as)(to, width, padded, from, dtype, at, stride, rows, d, scale);
}

/* Set to (width, 64) to the transpose of from (padded, width). */
DTRAIN__ROUTINE void DTRAIN__K(transpose)(float *to, const float *from, int64_t width,
                                          int64_t padded)
{
    for (int64_t r = 0; r < padded; r += 4, from += 4 * width) {
        const float *rows[4] = {from, from + width, from + 2 * width, from + 3 * width};
        DTRAIN__K(interleave4)(to + r, DTRAIN__ATTENTION_BLOCK, rows, (int)width);
    }
}

DTRAIN__ROUTINE float *DTRAIN__K(head_open)(dtrain__head *h, const dtrain_attention_args *a,
                                            int64_t item, float *scratch)
{
    const int64_t d = a->d, batch = item / a->heads, head = item % a->heads;
    const int64_t block = DTRAIN__ATTENTION_BLOCK, kv = head / (a->heads / a->kv_heads) * d;
    h->args = a;
    h->d = d;
    h->width = (d + DTRAIN__N - 1) / DTRAIN__N * DTRAIN__N;
    h->y_stride = a->heads * d;
    h->keys = a->key_lengths ? a->key_lengths[batch] : a->keys;
    h->scale = 1 / sqrtf((float)d);
    h->q = batch * a->queries * a->q_stride + head * d;
    h->k = batch * a->keys * a->k_stride + kv;
    h->v = batch * a->keys * a->v_stride + kv;
    h->at = batch * a->queries * h->y_stride + head * d;
    h->mask = a->mask ? a->mask + batch * a->mask_batch_step + head * a->mask_head_step : NULL;
    h->queries = scratch;
    h->queries_t = h->queries + block * h->width;
    h->rows = h->queries_t + block * h->width;
    h->out = h->rows + block * h->width;
    h->scores = h->out + block * h->width;
    h->top = h->scores + block * block;
    h->sum = h->top + block;
    h->factor = h->sum + block;
    h->mask_rows = h->factor + block;
    h->mask_t = h->mask_rows + (h->mask ? block * block : 0);
    return h->mask_t + (h->mask ? block * block : 0);
}

/* Count the keys that any of the queries [q0, q0 + m) sees. */
DTRAIN__HELPER int64_t DTRAIN__K(seen_keys)(const dtrain__head *h, int64_t q0, int64_t m)
{
    return h->args->causal && q0 + m < h->keys ? q0 + m : h->keys;
}

/* Return rows of k or v from element `at` on as fp32: in place, or widened into `buffer`. */
DTRAIN__HELPER const float *DTRAIN__K(head_rows)(const dtrain__head *h, const void *from,
                                                 int64_t at, int64_t *stride, int64_t rows,
                                                 float *buffer)
{
    const dtrain_dtype dtype = h->args->dtype;
    if (dtype <= DTRAIN_DTYPE_F32) return (const float *)from + at;
    dtrain__pack_rows(buffer, h->width, rows, from, dtype, at, *stride, rows, h->d, 1);
    *stride = h->width;
    return buffer;
}

DTRAIN__HELPER int64_t DTRAIN__K(padded)(int64_t rows)
{
    return (rows + DTRAIN__N - 1) / DTRAIN__N * DTRAIN__N;
}

/* Return the number of keys that the queries [c, c + W) of a block see; on the diagonal, key j and
 * query j have the same position. Set their hidden scores to -infinity, whose exp is 0. */
DTRAIN__HELPER int64_t DTRAIN__K(mask_column)(float *scores, int64_t c, int64_t keys, bool diagonal)
{
    const dtrain__vi query = dtrain__viota() + dtrain__viset((int32_t)c);
    if (!diagonal) return keys;
    const int64_t end = c + DTRAIN__W < keys ? c + DTRAIN__W : keys;
    for (int64_t key = c + 1; key < end; key++) {
        float *at = scores + key * DTRAIN__ATTENTION_BLOCK + c;
        const dtrain__vi hidden = dtrain__viless(query, dtrain__viset((int32_t)key));
        dtrain__vstore(at, DTRAIN__K(vselect)(hidden, dtrain__vset(-INFINITY), dtrain__vload(at)));
    }
    return end;
}

/* Zero five more rows: products of the result skip zeros in tiles of six. */
DTRAIN__HELPER void DTRAIN__K(clear_below)(float *scores, int64_t c, int64_t seen, int64_t keys)
{
    for (int64_t key = seen; key < keys && key < seen + 5; key++)
        dtrain__vstore(scores + key * DTRAIN__ATTENTION_BLOCK + c, dtrain__vset(0));
}

/* Add the mask to the scores of queries [q0, q0 + m) and keys [k0, k0 + keys), and leave the
 * rounding errors of the sums in mask_t (Dekker, 1971), 0 if the mask hides. Scores that were not
 * computed stay undefined. */
DTRAIN__ROUTINE void DTRAIN__K(add_mask)(const dtrain__head *h, int64_t q0, int64_t m, int64_t k0,
                                         int64_t keys)
{
    const int64_t block = DTRAIN__ATTENTION_BLOCK, stride = h->args->keys;
    const int64_t padded = DTRAIN__K(padded)(m);
    const dtrain__vi most = dtrain__vbits(dtrain__vset(DTRAIN_MASK_HIDES));
    if (!h->mask) return;
    dtrain__pack_rows(h->mask_rows, block, padded, h->mask, DTRAIN_DTYPE_F32, q0 * stride + k0,
                      stride, m, keys, 1);
    DTRAIN__K(transpose)(h->mask_t, h->mask_rows, block, padded);
    for (int64_t key = 0; key < keys; key++)
        for (int64_t c = key * block; c < key * block + padded; c += DTRAIN__W) {
            const dtrain__v score = dtrain__vload(h->scores + c),
                            mask = dtrain__vload(h->mask_t + c);
            const dtrain__v sum = score + mask, lost = score - (sum - mask);
            const dtrain__vi hides =
                dtrain__viless(most, dtrain__vbits(mask) & dtrain__viset(INT32_MAX));
            dtrain__vstore(h->scores + c, sum);
            dtrain__vstore(h->mask_t + c, DTRAIN__K(vselect)(hides, dtrain__vset(0), lost));
        }
}

/* Return the rounding errors of the scores at an offset. */
DTRAIN__HELPER dtrain__v DTRAIN__K(lost)(const dtrain__head *h, int64_t at)
{
    return h->mask ? dtrain__vload(h->mask_t + at) : dtrain__vset(0);
}

/* Online softmax (Milakov and Gimelshein, 2018): scores become exp(S - top) with the maximum of all
 * keys so far; sum and O are rescaled by factor = exp(old top - top). */
DTRAIN__ROUTINE void DTRAIN__K(softmax_block)(const dtrain__head *h, int64_t queries, int64_t keys,
                                              bool diagonal)
{
    for (int64_t c = 0; c < queries; c += DTRAIN__W) {
        const int64_t seen = DTRAIN__K(mask_column)(h->scores, c, keys, diagonal);
        const dtrain__v old = dtrain__vload(h->top + c);
        dtrain__v top = old, sum = dtrain__vset(0);
        float *s = h->scores + c;
        for (int64_t key = 0; key < seen; key++)
            top = dtrain__vmax(top, dtrain__vload(s + key * DTRAIN__ATTENTION_BLOCK));
        for (int64_t key = 0; key < seen; key++) {
            const int64_t at = key * DTRAIN__ATTENTION_BLOCK;
            const dtrain__v p =
                dtrain__vexp(dtrain__vload(s + at) - top + DTRAIN__K(lost)(h, c + at));
            dtrain__vstore(s + at, p);
            sum += p;
        }
        DTRAIN__K(clear_below)(h->scores, c, seen, keys);
        const dtrain__v factor = dtrain__vexp(old - top);
        dtrain__vstore(h->factor + c, factor);
        dtrain__vstore(h->top + c, top);
        dtrain__vstore(h->sum + c, dtrain__vfma(dtrain__vload(h->sum + c), factor, sum));
    }
}

DTRAIN__ROUTINE void DTRAIN__K(scale_rows)(float *x, int64_t rows, int64_t width,
                                           const float *factor)
{
    for (int64_t r = 0; r < rows; r++, x += width) {
        const dtrain__v f = dtrain__vset(factor[r]);
        if (factor[r] == 1) continue;
        for (int64_t j = 0; j < width; j += DTRAIN__W)
            dtrain__vstore(x + j, dtrain__vload(x + j) * f);
    }
}

/* Store y, lse and its rest for m queries. A query that has seen no key has a sum of 0 and
 * undefined O. */
DTRAIN__ROUTINE void DTRAIN__K(close_queries)(const dtrain__head *h, int64_t q0, int64_t m,
                                              float *lse, float *rest)
{
    const dtrain_attention_args *a = h->args;
    for (int64_t r = 0; r < m; r++) {
        const bool seen = h->sum[r] != 0;
        const int64_t at = h->at + (q0 + r) * h->y_stride;
        const dtrain__v inverse = dtrain__vset(1 / h->sum[r]);
        for (int64_t j = 0; j < h->d; j += DTRAIN__W) {
            const dtrain__v y = dtrain__vload(h->out + r * h->width + j) * inverse;
            dtrain__vstore_as(a->y, a->dtype, at + j, seen ? y : dtrain__vset(0), h->d - j);
        }
        lse[q0 + r] = seen ? h->top[r] + logf(h->sum[r]) : INFINITY;
        if (rest) rest[q0 + r] = dtrain__lse_rest(h->top[r], log((double)h->sum[r]), lse[q0 + r]);
    }
}

/* Item: one block of queries of one head; the long ones come first. */
DTRAIN__KERNEL(attention)
{
    const dtrain_attention_args *a = (const dtrain_attention_args *)job->args;
    const int64_t head_count = a->batch * a->heads, block = DTRAIN__ATTENTION_BLOCK;
    const int64_t blocks = (a->queries + block - 1) / block;
    for (int64_t item = begin; item < end; item++) {
        dtrain__head h;
        const int64_t head = item % head_count, q0 = (blocks - 1 - item / head_count) * block;
        const int64_t m = a->queries - q0 < block ? a->queries - q0 : block;
        DTRAIN__K(head_open)(&h, a, head, job->scratch + index * job->slot);
        const int64_t limit = DTRAIN__K(seen_keys)(&h, q0, m);
        dtrain__pack_rows(h.queries, h.width, DTRAIN__K(padded)(m), a->q, a->dtype,
                          h.q + q0 * a->q_stride, a->q_stride, m, h.d, h.scale);
        DTRAIN__K(transpose)(h.queries_t, h.queries, h.width, DTRAIN__K(padded)(m));
        for (int i = 0; i < block; i++) {
            h.top[i] = -FLT_MAX;
            h.sum[i] = 0;
        }
        for (int64_t k0 = 0; k0 < limit; k0 += block) {
            const int64_t keys = limit - k0 < block ? limit - k0 : block;
            const bool diagonal = a->causal && k0 == q0;
            int64_t stride = a->k_stride;
            const float *k =
                DTRAIN__K(head_rows)(&h, a->k, h.k + k0 * stride, &stride, keys, h.rows);
            dtrain__product(diagonal ? DTRAIN__C_UPPER : DTRAIN__FULL, keys, DTRAIN__K(padded)(m),
                            h.d, k, stride, 1, h.queries_t, block, h.scores, block, false);
            DTRAIN__K(add_mask)(&h, q0, m, k0, keys);
            DTRAIN__K(softmax_block)(&h, m, keys, diagonal);
            if (k0 > 0) DTRAIN__K(scale_rows)(h.out, m, h.width, h.factor);
            dtrain__pack_rows(h.rows, h.width, keys, a->v, a->dtype, h.v + k0 * a->v_stride,
                              a->v_stride, keys, h.d, 1);
            dtrain__product(diagonal ? DTRAIN__A_LOWER : DTRAIN__FULL, m, h.width, keys, h.scores,
                            1, block, h.rows, h.width, h.out, h.width, k0 > 0);
        }
        DTRAIN__K(close_queries)
        (&h, q0, m, a->lse + head * a->queries,
         a->lse_rest ? a->lse_rest + head * a->queries : NULL);
    }
}

/* ---- Backward ---- */

/* Prepare a block of queries: scaled Q, dO, their transposes, lse and rowsum(dO O). */
DTRAIN__ROUTINE void DTRAIN__K(open_queries)(const dtrain__head *h, const void *d_y, int64_t q0,
                                             int64_t m, int64_t item)
{
    const dtrain_attention_args *a = h->args;
    const int64_t padded = DTRAIN__K(padded)(m), at = h->at + q0 * h->y_stride;
    const int64_t row = item * a->queries + q0;
    dtrain__pack_rows(h->queries, h->width, padded, a->q, a->dtype, h->q + q0 * a->q_stride,
                      a->q_stride, m, h->d, h->scale);
    dtrain__pack_rows(h->d_out, h->width, padded, d_y, a->dtype, at, h->y_stride, m, h->d, 1);
    DTRAIN__K(transpose)(h->queries_t, h->queries, h->width, padded);
    DTRAIN__K(transpose)(h->d_out_t, h->d_out, h->width, padded);
    for (int64_t r = 0; r < DTRAIN__ATTENTION_BLOCK; r++) {
        dtrain__v delta = dtrain__vset(0);
        for (int64_t j = 0; r < m && j < h->d; j += DTRAIN__W)
            delta = dtrain__vfma(
                dtrain__vload(h->d_out + r * h->width + j),
                dtrain__vload_as(a->y, a->dtype, at + r * h->y_stride + j, h->d - j), delta);
        h->delta[r] = dtrain__vsum(delta);
        h->lse[r] = r < m ? a->lse[row + r] : FLT_MAX; /* padding: exp(0 - FLT_MAX) = 0 */
        h->rest[r] = r < m && a->lse_rest ? a->lse_rest[row + r] : 0;
    }
}

/* Set scores to P^T = exp(S^T - lse) and slopes to dS^T = P^T (dP^T - delta). */
DTRAIN__ROUTINE void DTRAIN__K(softmax_slopes)(const dtrain__head *h, int64_t queries, int64_t keys,
                                               bool diagonal)
{
    for (int64_t c = 0; c < queries; c += DTRAIN__W) {
        const int64_t seen = DTRAIN__K(mask_column)(h->scores, c, keys, diagonal);
        const dtrain__v lse = dtrain__vload(h->lse + c), delta = dtrain__vload(h->delta + c);
        const dtrain__v rest = dtrain__vload(h->rest + c);
        for (int64_t key = 0, at = c; key < seen; key++, at += DTRAIN__ATTENTION_BLOCK) {
            const dtrain__v score = dtrain__vload(h->scores + at),
                            g = dtrain__vload(h->slopes + at);
            const dtrain__v p = dtrain__vexp(score - lse - rest + DTRAIN__K(lost)(h, at));
            dtrain__vstore(h->scores + at, p);
            dtrain__vstore(h->slopes + at, p * (g - delta));
        }
        DTRAIN__K(clear_below)(h->scores, c, seen, keys);
        DTRAIN__K(clear_below)(h->slopes, c, seen, keys);
    }
}

/* Compute the five products of a block of keys and the block of queries from q0 on. */
DTRAIN__ROUTINE void DTRAIN__K(attend_backward)(const dtrain__head *h, int64_t q0, int64_t m,
                                                int64_t k0, int64_t keys)
{
    const dtrain_attention_args *a = h->args;
    const int64_t b = DTRAIN__ATTENTION_BLOCK, n = DTRAIN__K(padded)(m);
    const bool diagonal = a->causal && k0 == q0;
    const int inner = diagonal ? DTRAIN__C_UPPER : DTRAIN__FULL;
    const int over_queries = diagonal ? DTRAIN__A_UPPER : DTRAIN__FULL;
    const int over_keys = diagonal ? DTRAIN__A_LOWER : DTRAIN__FULL;
    int64_t stride = a->v_stride;
    const float *v = DTRAIN__K(head_rows)(h, a->v, h->v + k0 * stride, &stride, keys, h->values);
    dtrain__pack_rows(h->rows, h->width, keys, a->k, a->dtype, h->k + k0 * a->k_stride, a->k_stride,
                      keys, h->d, 1);
    dtrain__product(inner, keys, n, h->d, h->rows, h->width, 1, h->queries_t, b, h->scores, b,
                    false);
    dtrain__product(inner, keys, n, h->d, v, stride, 1, h->d_out_t, b, h->slopes, b, false);
    DTRAIN__K(add_mask)(h, q0, m, k0, keys);
    DTRAIN__K(softmax_slopes)(h, m, keys, diagonal);
    dtrain__product(over_queries, keys, h->width, m, h->scores, b, 1, h->d_out, h->width,
                    h->d_values + k0 * h->width, h->width, true);
    dtrain__product(over_queries, keys, h->width, m, h->slopes, b, 1, h->queries, h->width,
                    h->d_keys + k0 * h->width, h->width, true);
    dtrain__product(over_keys, m, h->width, keys, h->slopes, 1, b, h->rows, h->width, h->out,
                    h->width, k0 > 0);
}

/* Set to (rows, d), from element `at` on, to scale * from (rows, width); to NULL: nothing. */
DTRAIN__ROUTINE void dtrain__unpack_rows(void *to, dtrain_dtype dtype, int64_t at, int64_t stride,
                                         const float *from, int64_t width, int64_t rows, int64_t d,
                                         float scale)
{
    const dtrain__v s = dtrain__vset(scale);
    for (int64_t r = 0; r < rows && to; r++, at += stride, from += width)
        for (int64_t j = 0; j < d; j += DTRAIN__W)
            dtrain__vstore_as(to, dtype, at + j, dtrain__vload(from + j) * s, d - j);
}

/* Compute one head of queries: store its dQ, and add its parts of dK and dV to scratch. Heads that
 * share a head of keys use the same scratch, which the first of them clears. */
DTRAIN__ROUTINE void DTRAIN__K(head_backward)(dtrain__head *h,
                                              const dtrain_attention_backward_args *pass,
                                              int64_t item, float *scratch, bool first)
{
    const dtrain_attention_args *a = &pass->forward;
    const int64_t block = DTRAIN__ATTENTION_BLOCK, rounded = (a->keys + block - 1) / block * block;
    scratch = DTRAIN__K(head_open)(h, a, item, scratch);
    h->d_out = scratch;
    h->d_out_t = h->d_out + block * h->width;
    h->slopes = h->d_out_t + block * h->width;
    h->delta = h->slopes + block * block;
    h->lse = h->delta + block;
    h->rest = h->lse + block;
    h->d_keys = h->rest + block;
    h->d_values = h->d_keys + rounded * h->width;
    h->values = h->d_values + rounded * h->width;
    if (first) memset(h->d_keys, 0, (size_t)(2 * rounded * h->width) * sizeof(float));
    for (int64_t q0 = 0; q0 < a->queries; q0 += block) {
        const int64_t m = a->queries - q0 < block ? a->queries - q0 : block;
        const int64_t limit = DTRAIN__K(seen_keys)(h, q0, m);
        if (limit == 0) memset(h->out, 0, (size_t)(m * h->width) * sizeof(float));
        else DTRAIN__K(open_queries)(h, pass->d_y, q0, m, item);
        for (int64_t k0 = 0; k0 < limit; k0 += block)
            DTRAIN__K(attend_backward)(h, q0, m, k0, limit - k0 < block ? limit - k0 : block);
        dtrain__unpack_rows(pass->d_q, a->dtype, h->q + q0 * a->q_stride, a->q_stride, h->out,
                            h->width, m, h->d, h->scale);
    }
}

/* Item: one head of keys of one sequence, so that no two threads write one element; its heads of
 * queries follow in order. */
DTRAIN__KERNEL(attention_backward)
{
    const dtrain_attention_backward_args *pass = (const dtrain_attention_backward_args *)job->args;
    const dtrain_attention_args *a = &pass->forward;
    const int64_t sharing = a->heads / a->kv_heads;
    for (int64_t item = begin; item < end; item++) {
        dtrain__head h;
        int64_t head = item * sharing;
        do {
            const bool first = head == item * sharing;
            DTRAIN__K(head_backward)(&h, pass, head, job->scratch + index * job->slot, first);
        } while (++head < (item + 1) * sharing);
        dtrain__unpack_rows(pass->d_k, a->dtype, h.k, a->k_stride, h.d_keys, h.width, a->keys, h.d,
                            1);
        dtrain__unpack_rows(pass->d_v, a->dtype, h.v, a->v_stride, h.d_values, h.width, a->keys,
                            h.d, 1);
    }
}
