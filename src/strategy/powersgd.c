/* PowerSGD: a hook that sends two factors of every matrix
 *
 *     M = gradient + residual      P = M Q, mean over ranks, orthonormal columns
 *     Q = M^T P, mean over ranks   gradient = P Q^T,  residual = M - gradient
 *
 * Q is as large as the gradient; its columns become orthonormal before the next P, as in torch:
 * M Q would be as large as the gradient's square, which fp32 may not hold.
 *
 * All ranks orthogonalise the same P to the same bits. A column of P that depends on the others
 * becomes zero, and so do its Q and, in the next step, its P: after one gradient of zeros nothing
 * would be sent any more. So 1e-20 times the initial Q is added to every Q: it gives a column of
 * zeros a direction, and is too small to change any other one.
 *
 * P travels with the dense tensors; the scratch memory holds the initial Q. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/steps_internal.h"
#include "device/device_internal.h"

#define DTRAIN__TRACE 1e-20f

/* A matrix of a bucket with its factors. */
typedef struct dtrain__factors {
    int64_t rows, columns, rank;
    float *m; /* (rows, columns) the residual, to which the gradient is added, or without error
                 feedback the gradient itself */
    float *p; /* (rows, rank) */
    float *q; /* (columns, rank) */
} dtrain__factors;

/* Return the rows of this rank's part of a matrix: a tensor axis may have cut them. */
static int64_t dtrain__matrix_rows(const dtrain_hook_tensor *tensor)
{
    const dtrain_param *p = tensor->param;
    int64_t columns = 1;
    if (p->cut.axis != DTRAIN_CUT_ROWS) return p->shape[0];
    for (int d = 1; d < 4 && p->shape[d]; d++) columns *= p->shape[d];
    return tensor->count / columns;
}

/* Return the factors of a tensor, whose P begins at element *p_at of those of the bucket; move
 * *p_at on to the next one's. */
static dtrain__factors dtrain__factors_of(const dtrain_hook_bucket *bucket,
                                          const dtrain_hook_tensor *tensor, int64_t *p_at)
{
    dtrain__factors f;
    f.rows = dtrain__matrix_rows(tensor);
    f.columns = tensor->q_rows;
    f.rank = tensor->q_columns;
    f.m = tensor->residual ? tensor->residual : tensor->grad;
    f.p = bucket->averaged + *p_at;
    f.q = tensor->q;
    *p_at += f.rows * f.rank;
    return f;
}

static void dtrain__powersgd_plan(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket)
{
    const int64_t rank = (int64_t)how->powersgd_rank;
    for (size_t i = 0; i < bucket->tensor_count; i++) {
        dtrain_hook_tensor *tensor = &bucket->tensors[i];
        const int64_t rows = dtrain__matrix_rows(tensor), columns = tensor->count / rows;
        if (2 * (rows + columns) * rank >= tensor->count) tensor->dense = true;
        if (tensor->dense) continue;
        tensor->keeps_residual = !how->no_error_feedback;
        tensor->q_rows = columns;
        tensor->q_columns = rank;
        bucket->averaged_count += rows * rank;
        bucket->scratch_count += columns * rank;
    }
}

/* Set every Q to random orthonormal columns, the same on every rank. */
static dtrain_result dtrain__powersgd_init(const dtrain_compression_desc *how,
                                           dtrain_hook_bucket *bucket)
{
    dtrain_device *device = bucket->device;
    float *seed = bucket->scratch;
    (void)how;
    for (size_t i = 0; i < bucket->tensor_count; i++) {
        const dtrain_hook_tensor *tensor = &bucket->tensors[i];
        const int64_t count = tensor->q_rows * tensor->q_columns;
        dtrain_orthogonalize_args args = {tensor->q_rows, tensor->q_columns, seed};
        dtrain_param q = *tensor->param;
        q.init = DTRAIN_INIT_NORMAL;
        q.init_scale = 1;
        q.init_count = 0;
        DTRAIN__TRY(dtrain__init_param(device, &q, NULL, bucket->seed, 0, count, seed));
        DTRAIN__TRY(device->ops->orthogonalize(device, &args));
        seed += count;
    }
    return dtrain_device_copy(device, bucket->q, bucket->scratch,
                              (size_t)bucket->q_count * sizeof(float));
}

/* Add factor * x to y (count elements each). */
static dtrain_result dtrain__add_scaled(dtrain_device *device, int64_t count, float factor,
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
    return device->ops->axpby(device, &args);
}

/* First round: make P = M Q of every matrix, for the mean. Second round: make Q = M^T P. */
static dtrain_result dtrain__powersgd_compress(const dtrain_compression_desc *how,
                                               dtrain_hook_bucket *bucket, uint32_t round)
{
    dtrain_device *device = bucket->device;
    int64_t p_at = 0;
    (void)how;
    for (size_t i = 0; i < bucket->tensor_count && round == 0; i++) {
        const dtrain_hook_tensor *tensor = &bucket->tensors[i];
        dtrain_orthogonalize_args args = {tensor->q_rows, tensor->q_columns, tensor->q};
        DTRAIN__TRY(device->ops->orthogonalize(device, &args));
    }
    if (round == 0 && bucket->q_count)
        DTRAIN__TRY(
            dtrain__add_scaled(device, bucket->q_count, DTRAIN__TRACE, bucket->scratch, bucket->q));
    for (size_t i = 0; i < bucket->tensor_count; i++) {
        const dtrain_hook_tensor *tensor = &bucket->tensors[i];
        const dtrain__factors f = dtrain__factors_of(bucket, tensor, &p_at);
        dtrain_add_args add = {tensor->count, tensor->grad,     f.m,
                               f.m,           DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32};
        if (round == 1) {
            DTRAIN__TRY(dtrain__product(device, DTRAIN_GEMM_TRANS_A, f.columns, f.rank, f.rows, 1,
                                        f.m, f.p, 0, f.q));
            continue;
        }
        if (tensor->residual) DTRAIN__TRY(device->ops->add(device, &add));
        DTRAIN__TRY(dtrain__product(device, 0, f.rows, f.rank, f.columns, 1, f.m, f.q, 0, f.p));
    }
    return DTRAIN_OK;
}

/* Second round: average Q. */
static dtrain_result dtrain__powersgd_exchange(const dtrain_compression_desc *how,
                                               const dtrain_hook_bucket *bucket, uint32_t round,
                                               dtrain_work **work)
{
    (void)how;
    if (round == 0 || bucket->q_count == 0) return DTRAIN_OK;
    return dtrain_all_reduce(bucket->comm, bucket->q, bucket->q, (size_t)bucket->q_count,
                             DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN, work);
}

/* First round: orthonormalise the columns of the mean P. Second round: set the gradient to P Q^T of
 * the mean Q, and the residual to the rest of M. */
static dtrain_result dtrain__powersgd_decompress(const dtrain_compression_desc *how,
                                                 dtrain_hook_bucket *bucket, uint32_t round)
{
    dtrain_device *device = bucket->device;
    int64_t p_at = 0;
    (void)how;
    for (size_t i = 0; i < bucket->tensor_count; i++) {
        const dtrain_hook_tensor *tensor = &bucket->tensors[i];
        const dtrain__factors f = dtrain__factors_of(bucket, tensor, &p_at);
        dtrain_orthogonalize_args args = {f.rows, f.rank, f.p};
        if (round == 0) {
            DTRAIN__TRY(device->ops->orthogonalize(device, &args));
            continue;
        }
        DTRAIN__TRY(dtrain__product(device, DTRAIN_GEMM_TRANS_B, f.rows, f.columns, f.rank, 1, f.p,
                                    f.q, 0, tensor->grad));
        if (tensor->residual)
            DTRAIN__TRY(dtrain__add_scaled(device, tensor->count, -1, tensor->grad, f.m));
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE const dtrain_comm_hook_desc *dtrain__powersgd_hook(void)
{
    static const dtrain_comm_hook_desc hook = {"PowerSGD",
                                               2,
                                               false,
                                               false,
                                               dtrain__powersgd_plan,
                                               dtrain__powersgd_init,
                                               dtrain__powersgd_compress,
                                               dtrain__powersgd_exchange,
                                               dtrain__powersgd_decompress,
                                               NULL};
    return &hook;
}
