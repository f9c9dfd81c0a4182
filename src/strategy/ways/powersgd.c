/* PowerSGD
 *
 *     M = gradient + residual      P = M Q, mean over ranks, orthonormal columns
 *     Q = M^T P, mean over ranks   gradient = P Q^T,  residual = M - gradient
 *
 * All ranks orthogonalise the same P to the same bits. A column of P that depends on the others
 * becomes zero, and so do its Q and, in the next step, its P: after one gradient of zeros nothing
 * would be sent any more. So 1e-20 times the initial Q is added to every Q: it gives a column of
 * zeros a direction, and is too small to change any other one. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/ways_internal.h"

#define DTRAIN__TRACE 1e-20f

/* Compute the rows of c (m, n) = a b, all three packed. */
static dtrain_result dtrain__product(dtrain_strategy *strategy, uint32_t flags, int64_t m,
                                     int64_t n, int64_t k, const float *a, const float *b, float *c)
{
    dtrain_gemm_args args;
    memset(&args, 0, sizeof args);
    args.flags = flags;
    args.m = m;
    args.n = n;
    args.k = k;
    args.alpha = 1;
    args.a = a;
    args.b = b;
    args.c = c;
    args.lda = flags & DTRAIN_GEMM_TRANS_A ? m : k;
    args.ldb = flags & DTRAIN_GEMM_TRANS_B ? k : n;
    args.ldc = n;
    args.a_dtype = args.b_dtype = args.c_dtype = DTRAIN_DTYPE_F32;
    return strategy->device->ops->gemm(strategy->device, &args);
}

/* Add factor * x to y (count elements each). */
static dtrain_result dtrain__add_scaled(dtrain_strategy *strategy, int64_t count, float factor,
                                        const float *x, float *y)
{
    dtrain_axpby_args args;
    memset(&args, 0, sizeof args);
    args.count = count;
    args.accumulate = true;
    args.a = factor;
    args.b = 1;
    args.x = x;
    args.y = y;
    args.dtype = DTRAIN_DTYPE_F32;
    return strategy->device->ops->axpby(strategy->device, &args);
}

/* Return M (rows, columns): the residual, to which the gradient is added, or without error feedback
 * the gradient itself. */
static float *dtrain__matrix(const dtrain__bucket *bucket, const dtrain__portion *portion)
{
    if (!bucket->sparse->residual) return bucket->grads + portion->first;
    return bucket->sparse->residual + portion->first - bucket->slice_first;
}

/* Make P = M Q of every matrix; they travel with the dense portions, in one all-reduce. */
DTRAIN__PRIVATE dtrain_result dtrain__p_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const dtrain_device_ops *ops = strategy->device->ops;
    const int64_t rank = (int64_t)strategy->layout.compression->powersgd_rank;
    if (sparse->q_count)
        DTRAIN__TRY(dtrain__add_scaled(strategy, sparse->q_count, DTRAIN__TRACE, sparse->q_seed,
                                       sparse->q));
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
    dtrain__label(strategy, bucket, "PowerSGD of bucket");
    return dtrain_all_reduce(strategy->groups[DTRAIN__SECOND], sparse->q, sparse->q,
                             (size_t)sparse->q_count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN,
                             bucket->reduces);
}

/* Set the gradient to P Q^T of the mean Q, and the residual to the rest of M. */
DTRAIN__PRIVATE dtrain_result dtrain__q_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const int64_t rank = (int64_t)strategy->layout.compression->powersgd_rank;
    for (const dtrain__portion *at = sparse->portions; at < sparse->dense; at++) {
        float *grad = bucket->grads + at->first, *m = dtrain__matrix(bucket, at);
        DTRAIN__TRY(dtrain__product(strategy, DTRAIN_GEMM_TRANS_B, at->rows, at->columns, rank,
                                    at->p, at->q, grad));
        if (sparse->residual) DTRAIN__TRY(dtrain__add_scaled(strategy, at->count, -1, grad, m));
    }
    return DTRAIN_OK;
}
