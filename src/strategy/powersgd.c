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
#include "comm/comm.h"
#include "strategy/compression_internal.h"
#include "strategy/layout_internal.h"
#include "strategy/strategy_internal.h"
#include "device/backend.h"

#define DTRAIN__TRACE 1e-20f

/* c (m, n) = a b, with leading dimensions. */
static dtrain_result dtrain__product(dtrain_strategy *strategy, uint32_t flags, int64_t m,
                                     int64_t n, int64_t k, const float *a, int64_t lda,
                                     const float *b, int64_t ldb, float *c, int64_t ldc)
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
    args.lda = lda;
    args.ldb = ldb;
    args.ldc = ldc;
    args.a_dtype = args.b_dtype = args.c_dtype = DTRAIN_DTYPE_F32;
    return strategy->device->ops->gemm(strategy->device, &args);
}

/* M (rows, columns) is the residual, to which the gradient is added, or without error feedback the
 * gradient itself. */
static float *dtrain__matrix(const dtrain__bucket *bucket, const dtrain__portion *portion)
{
    if (!bucket->sparse->residual) return bucket->grads + portion->first;
    return bucket->sparse->residual + portion->first - bucket->hop_first;
}

/* P = M Q of every matrix; they travel with the dense portions, in one all-reduce. */
DTRAIN__PRIVATE dtrain_result dtrain__p_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain__sparse *sparse = bucket->sparse;
    const int64_t rank = (int64_t)strategy->layout.compression->powersgd_rank;
    dtrain_axpby_args trace = {sparse->q_count, true,      DTRAIN__TRACE, 1,
                               sparse->q_seed,  sparse->q, false,         DTRAIN_DTYPE_F32};
    if (sparse->q_count) DTRAIN__TRY(strategy->device->ops->axpby(strategy->device, &trace));
    for (size_t i = sparse->first; i < sparse->end; i++) {
        const dtrain__portion *portion = &layout->portions[i];
        float *m = dtrain__matrix(bucket, portion);
        dtrain_add_args add = {
            portion->count,  bucket->grads + portion->first, m, m, DTRAIN_DTYPE_F32,
            DTRAIN_DTYPE_F32};
        if (portion->dense) continue;
        if (sparse->residual) DTRAIN__TRY(strategy->device->ops->add(strategy->device, &add));
        DTRAIN__TRY(dtrain__product(strategy, 0, portion->rows, rank, portion->columns, m,
                                    portion->columns, portion->q, rank, portion->p, rank));
    }
    return dtrain__dense_start(strategy, bucket, sparse->p_count, bucket->reduces);
}

/* Orthonormalises the columns of the mean P. */
DTRAIN__PRIVATE dtrain_result dtrain__p_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__sparse *sparse = bucket->sparse;
    DTRAIN__TRY(dtrain__dense_copy(strategy, bucket, true));
    for (size_t i = sparse->first; i < sparse->end; i++) {
        const dtrain__portion *portion = &strategy->layout.portions[i];
        dtrain_orthogonalize_args args = {
            portion->rows, (int64_t)strategy->layout.compression->powersgd_rank, portion->p};
        if (portion->dense) continue;
        DTRAIN__TRY(strategy->device->ops->orthogonalize(strategy->device, &args));
    }
    return DTRAIN_OK;
}

/* Q = M^T P. */
DTRAIN__PRIVATE dtrain_result dtrain__q_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const int64_t rank = (int64_t)strategy->layout.compression->powersgd_rank;
    for (size_t i = sparse->first; i < sparse->end; i++) {
        const dtrain__portion *portion = &strategy->layout.portions[i];
        if (portion->dense) continue;
        DTRAIN__TRY(dtrain__product(strategy, DTRAIN_GEMM_TRANS_A, portion->columns, rank,
                                    portion->rows, dtrain__matrix(bucket, portion),
                                    portion->columns, portion->p, rank, portion->q, rank));
    }
    if (sparse->q_count == 0) return DTRAIN_OK;
    return dtrain_all_reduce(strategy->groups[DTRAIN__SECOND], sparse->q, sparse->q,
                             (size_t)sparse->q_count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN,
                             bucket->reduces);
}

/* The gradient is what P and the mean Q say; what they leave of M is the residual. */
DTRAIN__PRIVATE dtrain_result dtrain__q_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const int64_t rank = (int64_t)strategy->layout.compression->powersgd_rank;
    for (size_t i = sparse->first; i < sparse->end; i++) {
        const dtrain__portion *portion = &strategy->layout.portions[i];
        float *grad = bucket->grads + portion->first, *m = dtrain__matrix(bucket, portion);
        dtrain_axpby_args rest = {portion->count, true, -1, 1, grad, m, false, DTRAIN_DTYPE_F32};
        if (portion->dense) continue;
        DTRAIN__TRY(dtrain__product(strategy, DTRAIN_GEMM_TRANS_B, portion->rows, portion->columns,
                                    rank, portion->p, rank, portion->q, rank, grad,
                                    portion->columns));
        if (sparse->residual) DTRAIN__TRY(strategy->device->ops->axpby(strategy->device, &rest));
    }
    return DTRAIN_OK;
}
