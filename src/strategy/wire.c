/* The wire: gradients rounded to reduce_dtype, and shards of whole tensors
 *
 *     gradients -> ROUND -> wire -> ALL_REDUCE or REDUCE_SCATTER -> wire -> WIDEN -> fp32
 *
 * The wire is the rounded copy of a bucket's gradients (dtrain__bucket.low_grads). In fp32 it is
 * the gradients themselves, and ROUND and WIDEN do nothing. Sums are taken in fp32 either way.
 *
 * Shards of ZERO3 are lists of whole tensors and have different lengths. So REDUCE_OWNERS makes one
 * reduce per owner instead of a reduce-scatter, and each owner broadcasts its values. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/steps_internal.h"

/* Return the address of element `first` of a bucket on the wire. */
DTRAIN__PRIVATE void *dtrain__wire(const dtrain__bucket *bucket, int64_t first)
{
    if (bucket->low_grads) return bucket->low_grads + first;
    return bucket->grads + first;
}

/* Return the address where this rank's shard is received. */
DTRAIN__PRIVATE void *dtrain__wire_end(const dtrain_strategy *strategy,
                                       const dtrain__bucket *bucket)
{
    if (bucket->low_grads) return bucket->low_grads + bucket->shard_first;
    return dtrain__reduce_result(strategy, bucket);
}

DTRAIN__PRIVATE dtrain_dtype dtrain__wire_dtype(const dtrain_strategy *strategy)
{
    const uint32_t dtype = strategy->desc.reduce_dtype;
    return (dtrain_dtype)(dtype != DTRAIN_DTYPE_F32 ? dtype : strategy->layout.dtype);
}

/* Round x (count elements of the bucket from `first` on) to the wire; or convert it `back`. */
DTRAIN__PRIVATE dtrain_result dtrain__wire_convert(dtrain_strategy *strategy,
                                                   const dtrain__bucket *bucket, float *x,
                                                   int64_t first, int64_t count, bool back)
{
    const uint32_t dtype = strategy->desc.reduce_dtype;
    if (!bucket->low_grads) return DTRAIN_OK;
    uint16_t *wire = bucket->low_grads + first;
    if (back) return dtrain__convert(strategy, count, wire, dtype, x, DTRAIN_DTYPE_F32);
    return dtrain__convert(strategy, count, x, DTRAIN_DTYPE_F32, wire, dtype);
}

/* ROUND: round this rank's slice of the gradients to the wire. */
DTRAIN__PRIVATE dtrain_result dtrain__round_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    return dtrain__wire_convert(strategy, bucket, bucket->grads + bucket->slice_first,
                                bucket->slice_first, bucket->slice_count, false);
}

/* WIDEN: convert what was received, this rank's shard or a whole slice, back to fp32. */
DTRAIN__PRIVATE dtrain_result dtrain__widen_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    if (bucket->sharded)
        return dtrain__wire_convert(strategy, bucket, dtrain__reduce_result(strategy, bucket),
                                    bucket->shard_first, bucket->shard_count, true);
    return dtrain__wire_convert(strategy, bucket, bucket->grads + bucket->slice_first,
                                bucket->slice_first, bucket->slice_count, true);
}

/* REDUCE_OWNERS: each owner receives the mean of its tensors. */
DTRAIN__PRIVATE dtrain_result dtrain__reduce_owners_begin(dtrain_strategy *strategy,
                                                          dtrain__bucket *bucket)
{
    for (int r = 0; r < strategy->layout.ranks; r++) {
        const int64_t first = bucket->cuts[r], count = bucket->cuts[r + 1] - first;
        if (count == 0) continue;
        dtrain__label(strategy, bucket, "bucket");
        DTRAIN__TRY(
            dtrain_reduce(bucket->comm, dtrain__wire(bucket, first),
                          r == strategy->layout.rank ? dtrain__wire_end(strategy, bucket) : NULL,
                          (size_t)dtrain__elements(&strategy->layout, count),
                          dtrain__wire_dtype(strategy), bucket->steps->op, r, &bucket->reduces[r]));
    }
    return DTRAIN_OK;
}

/* Start the broadcasts of a bucket's values, one per owner; `whole` has elements of dtype. */
DTRAIN__PRIVATE dtrain_result dtrain__gather_owners(dtrain_strategy *strategy,
                                                    dtrain__bucket *bucket, char *whole,
                                                    dtrain_dtype dtype)
{
    const size_t word = dtype == DTRAIN_DTYPE_F64 ? sizeof(float) : dtrain_dtype_bytes(dtype);
    for (int r = 0; r < strategy->layout.ranks; r++) {
        const int64_t first = bucket->cuts[r], count = bucket->cuts[r + 1] - first;
        if (count == 0) continue;
        dtrain__label(strategy, bucket, "values of bucket");
        DTRAIN__TRY(dtrain_broadcast(strategy->fetch[0], whole + (size_t)first * word,
                                     (size_t)dtrain__elements(&strategy->layout, count), dtype, r,
                                     &bucket->gathers[r]));
    }
    return DTRAIN_OK;
}
