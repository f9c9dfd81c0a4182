/* PowerSGD
 *
 *     M = gradient + residual      P = M Q, mean over ranks, orthonormal columns
 *     Q = M^T P, mean over ranks   gradient = P Q^T,  residual = M - gradient
 *
 * All ranks orthogonalise the same P to the same bits. A column of P that the others span is zero,
 * and so its Q, which would be zero for ever after: a gradient that was zero once would never be
 * sent again. So a trace of the first Q is added to every Q. It decides the direction of what is
 * zero, and is nothing beside anything else. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

#define DTRAIN__TRACE 1e-20f

/* Compute the rows of c (m, n) = a b, all three packed. */
static dtrain_result dtrain__product(dtrain_strategy *strategy, uint32_t flags, int64_t m,
                                     int64_t n, int64_t k, const float *a, const float *b, float *c)
{
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32;
    const int64_t lda = flags & DTRAIN_GEMM_TRANS_A ? m : k;
    const int64_t ldb = flags & DTRAIN_GEMM_TRANS_B ? k : n;
    dtrain_gemm_args args = {flags, 0,   m, n,   k,   1,   0,    a,    b,    c,
                             lda,   ldb, n, f32, f32, f32, NULL, NULL, NULL, false};
    return strategy->device->ops->gemm(strategy->device, &args);
}

/* Return M (rows, columns): the residual, to which the gradient is added, or without error feedback
 * the gradient itself. */
static float *dtrain__matrix(const dtrain__bucket *bucket, const dtrain__portion *portion)
{
    if (!bucket->sparse->residual) return bucket->grads + portion->first;
    return bucket->sparse->residual + portion->first - bucket->hop_first;
}

/* Make P = M Q of every matrix; they travel with the dense portions, in one all-reduce. */
DTRAIN__PRIVATE dtrain_result dtrain__p_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const dtrain_device_ops *ops = strategy->device->ops;
    const int64_t rank = (int64_t)strategy->layout.compression->powersgd_rank;
    dtrain_axpby_args trace = {sparse->q_count, true,      DTRAIN__TRACE, 1,
                               sparse->q_seed,  sparse->q, false,         DTRAIN_DTYPE_F32};
    if (sparse->q_count) DTRAIN__TRY(ops->axpby(strategy->device, &trace));
    for (const dtrain__portion *at = sparse->portions; at < sparse->dense; at++) {
        float *m = dtrain__matrix(bucket, at);
        dtrain_add_args add = {at->count, bucket->grads + at->first, m,
                               m,         DTRAIN_DTYPE_F32,          DTRAIN_DTYPE_F32};
        if (sparse->residual) DTRAIN__TRY(ops->add(strategy->device, &add));
        DTRAIN__TRY(dtrain__product(strategy, 0, at->rows, rank, at->columns, m, at->q, at->p));
    }
    return dtrain__dense_begin(strategy, bucket, sparse->p_count, bucket->reduces);
}

/* Orthonormalise the columns of the mean P. */
DTRAIN__PRIVATE dtrain_result dtrain__p_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const int64_t rank = (int64_t)strategy->layout.compression->powersgd_rank;
    for (const dtrain__portion *at = sparse->portions; at < sparse->dense; at++) {
        dtrain_orthogonalize_args args = {at->rows, rank, at->p};
        DTRAIN__TRY(strategy->device->ops->orthogonalize(strategy->device, &args));
    }
    return dtrain__dense_end(strategy, bucket);
}

/* Make Q = M^T P. */
DTRAIN__PRIVATE dtrain_result dtrain__q_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const int64_t rank = (int64_t)strategy->layout.compression->powersgd_rank;
    for (const dtrain__portion *at = sparse->portions; at < sparse->dense; at++)
        DTRAIN__TRY(dtrain__product(strategy, DTRAIN_GEMM_TRANS_A, at->columns, rank, at->rows,
                                    dtrain__matrix(bucket, at), at->p, at->q));
    if (sparse->q_count == 0) return DTRAIN_OK;
    return dtrain_all_reduce(strategy->groups[DTRAIN__SECOND], sparse->q, sparse->q,
                             (size_t)sparse->q_count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN,
                             bucket->reduces);
}

/* Make the gradient that P and the mean Q say; what they leave of M is the residual. */
DTRAIN__PRIVATE dtrain_result dtrain__q_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const int64_t rank = (int64_t)strategy->layout.compression->powersgd_rank;
    for (const dtrain__portion *at = sparse->portions; at < sparse->dense; at++) {
        float *grad = bucket->grads + at->first, *m = dtrain__matrix(bucket, at);
        dtrain_axpby_args rest = {at->count, true, -1, 1, grad, m, false, DTRAIN_DTYPE_F32};
        DTRAIN__TRY(dtrain__product(strategy, DTRAIN_GEMM_TRANS_B, at->rows, at->columns, rank,
                                    at->p, at->q, grad));
        if (sparse->residual) DTRAIN__TRY(strategy->device->ops->axpby(strategy->device, &rest));
    }
    return DTRAIN_OK;
}
