/* The sum over the tensor axis, under sequence parallelism
 *
 * Between the layers that it shares, each rank of the tensor axis works on its own rows. So of a
 * whole parameter a rank has a part of the gradient; of its part of a cut parameter it has the
 * whole gradient. TENSOR runs before the steps of the data axis:
 *
 *     bucket    | cut a . . . . . | b . . | cut c . . . . | d |
 *     packed    | b . . | d |  ->  sum over the ranks of the tensor axis  ->  b and d in the bucket
 *
 * All ranks of the axis have the same parameters in the same order in each bucket (layout.c). Whole
 * parameters are few, and the axis lies inside a node: their gradients always travel as fp32. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/steps_internal.h"

/* True if parameter i is summed in this bucket. */
static bool dtrain__is_summed(const dtrain__layout *layout, const dtrain__bucket *bucket, size_t i)
{
    const dtrain_param *p = &layout->params[i];
    return p->state.storage == p && layout->entries[i].bucket == bucket && !p->cut.axis;
}

/* Count what each bucket sums, and carve the packed memory out of the buffers. */
DTRAIN__PRIVATE void dtrain__lay_tensor_sums(dtrain__layout *layout)
{
    for (size_t b = 0; b < layout->bucket_count && layout->partial; b++) {
        dtrain__bucket *bucket = &layout->buckets[b];
        bucket->tensor_count = 0;
        if (!bucket->trainable) continue;
        for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++)
            if (dtrain__is_summed(layout, bucket, i))
                bucket->tensor_count += dtrain__padded(layout->params[i].count);
        bucket->tensor_sum = dtrain__carve(layout, DTRAIN__BUFFERS, bucket->tensor_count);
    }
}

/* Copy gradients of whole parameters to the packed memory, or back. */
static dtrain_result dtrain__tensor_pack(dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                         bool back)
{
    const dtrain__layout *layout = &strategy->layout;
    float *packed = bucket->tensor_sum;
    for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++) {
        if (!dtrain__is_summed(layout, bucket, i)) continue;
        float *grad = bucket->grads + layout->entries[i].offset;
        const int64_t count = layout->params[i].count;
        DTRAIN__TRY(strategy->device->ops->copy(strategy->device, back ? grad : packed,
                                                back ? packed : grad, (size_t)count * sizeof(float),
                                                DTRAIN_COPY_DEVICE_TO_DEVICE));
        packed += dtrain__padded(count);
    }
    return DTRAIN_OK;
}

/* TENSOR: replace a bucket's gradients of whole parameters by their sum over the tensor axis. */
DTRAIN__PRIVATE dtrain_result dtrain__tensor_begin(dtrain_strategy *strategy,
                                                   dtrain__bucket *bucket)
{
    if (!bucket->tensor_count) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__tensor_pack(strategy, bucket, false));
    dtrain__label(strategy, bucket, "whole parameters of bucket");
    DTRAIN__TRY(dtrain_all_reduce(strategy->tensor_comm, bucket->tensor_sum, bucket->tensor_sum,
                                  (size_t)bucket->tensor_count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                  bucket->reduces));
    if (bucket->comm) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__wait_works(strategy, bucket->reduces));
    return dtrain__tensor_end(strategy, bucket);
}

DTRAIN__PRIVATE dtrain_result dtrain__tensor_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    return dtrain__tensor_pack(strategy, bucket, true);
}
