/* What travels: gradients rounded to reduce_dtype, and shards of whole tensors
 *
 *     gradients -> ROUND -> wire -> ALL_REDUCE or REDUCE_SCATTER -> wire -> WIDEN -> fp32
 *
 * The wire is the rounded copy of a bucket's gradients (dtrain__bucket.low_grads), and in fp32 the
 * gradients themselves, without these two steps. Sums are taken in fp32 either way.
 *
 * Shards of ZERO3 are lists of whole tensors, of different lengths: REDUCE_OWNERS makes one reduce
 * an owner in place of a reduce-scatter, and values are broadcast, an owner each. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/steps_internal.h"

/* Return where element `first` of a bucket travels. */
DTRAIN__PRIVATE void *dtrain__wire(const dtrain__bucket *bucket, int64_t first)
{
    if (bucket->low_grads) return bucket->low_grads + first;
    return bucket->grads + first;
}

/* Return where this rank's shard arrives. */
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

/* Round x (count elements of the bucket, from `first` on) to the wire; or, `back`, the way back. */
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

/* ROUND: this rank's slice of the gradients to the wire. */
DTRAIN__PRIVATE dtrain_result dtrain__round_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    return dtrain__wire_convert(strategy, bucket, bucket->grads + bucket->slice_first,
                                bucket->slice_first, bucket->slice_count, false);
}

/* WIDEN: what has arrived back to fp32: this rank's shard, or a whole slice. */
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
            dtrain_reduce(dtrain__step_comm(bucket), dtrain__wire(bucket, first),
                          r == strategy->layout.rank ? dtrain__wire_end(strategy, bucket) : NULL,
                          (size_t)dtrain__elements(&strategy->layout, count),
                          dtrain__wire_dtype(strategy), bucket->steps->op, r, &bucket->reduces[r]));
    }
    return DTRAIN_OK;
}

/* Start the broadcasts of a bucket's values, each from its owner; `whole` has elements of dtype. */
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
