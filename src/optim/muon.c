/* Muon
 *
 * Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) steps along
 * the orthogonal matrix nearest to the momentum: for M = U S V^T that is U V^T, whose singular
 * values are all 1. With g = grad * grad_scale, for a matrix (rows, columns):
 *
 *     m = momentum m + g                     x = nesterov ? g + momentum m : m
 *     x = x / (|x| + epsilon)                so that no singular value is above 1
 *     five times: x = a x + b (x x^T) x + c (x x^T)^2 x
 *     w = w (1 - lr decay) - lr sqrt(max(1, rows / columns)) x
 *
 * The polynomial (a Newton-Schulz iteration) moves every singular value s to a s + b s^3 + c s^5,
 * towards 1. The published coefficients make small ones grow fastest, and end between 0.7 and 1.2.
 * This is the authors' variant, "original" in torch.optim.Muon, in fp32 where theirs is in bf16.
 * Their momentum is an average; that changes only the length of x, which is divided out. All
 * dimensions of a parameter after the first are columns.
 *
 * An iteration is three products of the device's GEMM. If x has more rows than columns, the Gram
 * matrix is x^T x and multiplies from the right: nothing is transposed in memory.
 *
 *     gram (k, k) = x x^T      square = c gram gram + b gram     y = square x + a x     k = smaller
 *
 * It costs 5 k^2 (2 rows columns / k + k) multiply-adds per matrix, whatever the batch. That is
 * much beside a backward over few tokens; the owners of ZERO3 share it.
 *
 * Products of matrices belong to ring 3, models, and so does this file. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "strategy/params.h"
#include "strategy/core_view_internal.h"
#include "optim/optim_internal.h"
#include "optim/optimizer.h"
#include "device/backend.h"
#include "device/device.h"

#define DTRAIN__MUON_ITERATIONS 5

/* Lay out Muon's scratch for the largest matrix of this rank, from address `memory` on (NULL: only
 * count). Return its number of elements. */
DTRAIN__PRIVATE size_t dtrain__muon_layout(const dtrain_optimizer *optimizer, float *memory,
                                           dtrain__muon *muon)
{
    int64_t most = 0, side = 0;
    for (size_t i = 0; i < optimizer->shard_count; i++) {
        const dtrain_shard *shard = &optimizer->shards[i];
        if (dtrain__desc_of(optimizer, shard->param)->kind != DTRAIN_OPTIMIZER_MUON) continue;
        const int64_t rows = shard->param->shape[0], columns = shard->count / rows;
        most = dtrain__max(most, dtrain__padded(shard->count));
        side = dtrain__max(side, dtrain__min(rows, columns));
    }
    const int64_t square = dtrain__padded(side * side), sum = dtrain__padded(1);
    memset(muon, 0, sizeof *muon);
    if (most == 0) return 0;
    if (memory) {
        muon->sum = (double *)(void *)memory;
        muon->gram = memory + sum;
        muon->square = muon->gram + square;
        muon->x = muon->square + square;
        muon->y = muon->x + most;
    }
    return (size_t)(sum + 2 * square + 2 * most);
}

/* Compute c (m, n) = alpha op(a) op(b) + beta c in fp32. All three are stored without gaps. op
 * transposes a or b as the flags of dtrain_gemm_args say. */
static dtrain_result dtrain__muon_product(dtrain_device *device, uint32_t flags, int64_t m,
                                          int64_t n, int64_t k, float alpha, const float *a,
                                          const float *b, float beta, float *c)
{
    dtrain_gemm_args args;
    memset(&args, 0, sizeof args);
    args.flags = flags;
    args.m = m, args.n = n, args.k = k;
    args.alpha = alpha, args.beta = beta;
    args.a = a, args.b = b, args.c = c;
    args.lda = flags & DTRAIN_GEMM_TRANS_A ? m : k;
    args.ldb = flags & DTRAIN_GEMM_TRANS_B ? k : n;
    args.ldc = n;
    args.a_dtype = args.b_dtype = args.c_dtype = DTRAIN_DTYPE_F32;
    return device->ops->gemm(device, &args);
}

/* Make muon->x (rows, columns), of norm 1, nearly orthogonal. Iterations read x, write y and
 * exchange them. */
static dtrain_result dtrain__orthogonal(dtrain_device *device, dtrain__muon *muon, int64_t rows,
                                        int64_t columns)
{
    const float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    const bool wide = rows <= columns;
    const int64_t k = wide ? rows : columns, other = wide ? columns : rows;
    const size_t bytes = (size_t)(rows * columns) * sizeof(float);
    const uint32_t flags = wide ? DTRAIN_GEMM_TRANS_B : DTRAIN_GEMM_TRANS_A;
    for (int i = 0; i < DTRAIN__MUON_ITERATIONS; i++) {
        float *x = muon->x, *y = muon->y, *gram = muon->gram, *square = muon->square;
        DTRAIN__TRY(dtrain__muon_product(device, flags, k, k, other, 1, x, x, 0, gram));
        DTRAIN__TRY(device->ops->copy(device, square, gram, (size_t)(k * k) * sizeof(float),
                                      DTRAIN_COPY_DEVICE_TO_DEVICE));
        DTRAIN__TRY(dtrain__muon_product(device, 0, k, k, k, c, gram, gram, b, square));
        DTRAIN__TRY(device->ops->copy(device, y, x, bytes, DTRAIN_COPY_DEVICE_TO_DEVICE));
        DTRAIN__TRY(dtrain__muon_product(device, 0, rows, columns, k, 1, wide ? square : x,
                                         wide ? x : square, a, y));
        muon->x = y;
        muon->y = x;
    }
    return DTRAIN_OK;
}

/* Update the matrices of one call; sources are the shards of the tensors. If a number in device
 * memory says that the step is skipped, momentum and value stay unchanged. */
DTRAIN__PRIVATE dtrain_result dtrain__step_muon(dtrain_device *device, const dtrain__muon *scratch,
                                                const dtrain_shard *const *sources,
                                                const dtrain_optimizer_args *step)
{
    for (size_t i = 0; i < step->tensor_count; i++) {
        const dtrain_param *param = sources[i]->param;
        const int64_t rows = param->shape[0], columns = param->count / rows;
        dtrain__muon muon = *scratch; /* iterations exchange x and y */
        dtrain_muon_args args = *step;
        dtrain_sum_args sum;
        args.tensors = &step->tensors[i];
        args.tensor_count = 1;
        args.stage = DTRAIN_MUON_MOMENTUM;
        args.x = muon.x;
        args.scale = (float)sqrt(rows > columns ? (double)rows / (double)columns : 1);
        args.sum_squares = muon.sum;
        DTRAIN__TRY(device->ops->muon(device, &args));
        memset(&sum, 0, sizeof sum);
        sum.count = args.tensors->count;
        sum.squares = true;
        sum.scale = 1;
        sum.x = muon.x;
        sum.total = muon.sum;
        sum.dtype = DTRAIN_DTYPE_F32;
        DTRAIN__TRY(device->ops->sum(device, &sum));
        args.stage = DTRAIN_MUON_NORMALIZE;
        DTRAIN__TRY(device->ops->muon(device, &args));
        DTRAIN__TRY(dtrain__orthogonal(device, &muon, rows, columns));
        args.stage = DTRAIN_MUON_STEP;
        args.x = muon.x;
        DTRAIN__TRY(device->ops->muon(device, &args));
    }
    return DTRAIN_OK;
}
