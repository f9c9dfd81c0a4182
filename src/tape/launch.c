/* Launches that are counted
 *
 * Nearly all arithmetic of a step is in matrix products, attention and convolutions. Operations of
 * the tape launch them here, where their floating-point operations are counted: a multiplication
 * and an addition are two. What activation checkpointing computes again counts again. Of attention,
 * keys that a mask or key_lengths hide count, and those behind the query of a causal one do not. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "tape/op.h"
#include "tape/tape_internal.h"
#include "device/backend.h"
#include "device/device.h"

DTRAIN__PRIVATE dtrain_result dtrain__counted_gemm(dtrain_op *op, const dtrain_gemm_args *args)
{
    op->tape->flops += 2.0 * (double)args->m * (double)args->n * (double)args->k;
    return op->device->ops->gemm(op->device, args);
}

/* Count two products of d elements for each pair of a query and a key that it sees: scores,
 * values. */
static double dtrain__attention_flops(const dtrain_attention_args *args)
{
    const double keys = (double)args->keys, queries = (double)args->queries;
    double pairs = queries * keys;
    if (args->causal && queries <= keys) pairs = queries * (queries + 1) / 2;
    else if (args->causal) pairs = keys * (keys + 1) / 2 + (queries - keys) * keys;
    return 4.0 * (double)args->batch * (double)args->heads * (double)args->d * pairs;
}

DTRAIN__PRIVATE dtrain_result dtrain__counted_attention(dtrain_op *op,
                                                        const dtrain_attention_args *args)
{
    op->tape->flops += dtrain__attention_flops(args);
    return op->device->ops->attention(op->device, args);
}

/* Count five products: scores again, d_v, d_scores, d_q, d_k. */
DTRAIN__PRIVATE dtrain_result
dtrain__counted_attention_backward(dtrain_op *op, const dtrain_attention_backward_args *args)
{
    op->tape->flops += 2.5 * dtrain__attention_flops(&args->forward);
    return op->device->ops->attention_backward(op->device, args);
}

/* Count a product of a tap and a weight for each output; the taps outside of the image count. */
static double dtrain__conv2d_flops(const dtrain_windows2d *w, int64_t out_channels, int64_t groups)
{
    const double taps = (double)(w->kernel[0] * w->kernel[1]) * (double)(w->channels / groups);
    const double windows = (double)w->batch * (double)w->out_height * (double)w->out_width;
    return 2.0 * windows * taps * (double)out_channels;
}

DTRAIN__PRIVATE dtrain_result dtrain__counted_conv2d(dtrain_op *op, const dtrain_conv2d_args *args)
{
    op->tape->flops += dtrain__conv2d_flops(&args->windows, args->out_channels, args->groups);
    return op->device->ops->conv2d(op->device, args);
}

DTRAIN__PRIVATE dtrain_result
dtrain__counted_conv2d_backward(dtrain_op *op, const dtrain_conv2d_backward_args *args)
{
    const int products = (args->d_x != NULL) + (args->d_weight != NULL);
    op->tape->flops +=
        products * dtrain__conv2d_flops(&args->windows, args->out_channels, args->groups);
    return op->device->ops->conv2d_backward(op->device, args);
}
