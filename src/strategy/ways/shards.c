/* Steps of sharded buckets: each rank gets its shard of the mean
 *
 *     gradients --(reduce_dtype)--> wire -> reduce-scatter -> result -> shard
 *
 * The result of a first or only micro-batch is received in the shard. That of a later one, or for a
 * shard in host memory, is received in this rank's part of the buffer in which the gradients were
 * made; from there it is added to the shard, or copied. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/ways_internal.h"

/* ---- To the shard -----------------------------------------------------------------------------*/

/* Return the address where the fp32 result of this backward is received. */
static float *dtrain__reduce_target(const dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    if (bucket->shards_grads && (strategy->accumulated || bucket->grad_on_host))
        return bucket->grads + bucket->shard_first;
    return bucket->grad_shard;
}

/* REDUCE_SCATTER: each rank receives the mean of its shard; with ZERO3, where shards have different
 * lengths, by one reduce an owner. */
DTRAIN__PRIVATE dtrain_result dtrain__reduce_scatter_begin(dtrain_strategy *strategy,
                                                           dtrain__bucket *bucket)
{
    const dtrain_dtype dtype = (dtrain_dtype)strategy->desc.reduce_dtype;
    const dtrain_reduce_op op = dtrain__level_op(strategy, bucket);
    const size_t unit = dtrain_dtype_bytes(dtype);
    dtrain_work **works = bucket->reduces;
    void *wire, *own = dtrain__reduce_target(strategy, bucket);
    DTRAIN__TRY(dtrain__to_wire(strategy, bucket, bucket->grads + bucket->slice_first,
                                bucket->slice_first, bucket->slice_count, &wire));
    if (dtrain__reduces_low(strategy)) own = bucket->low_grads + bucket->shard_first;
    if (!bucket->cuts) dtrain__label(strategy, bucket, "bucket");
    if (!bucket->cuts)
        return dtrain_reduce_scatter(bucket->comm, wire, own, (size_t)bucket->shard_count, dtype,
                                     op, works);
    for (int r = 0; r < strategy->layout.ranks; r++) {
        const int64_t first = bucket->cuts[r], count = bucket->cuts[r + 1] - first;
        if (count == 0) continue;
        dtrain__label(strategy, bucket, "bucket");
        DTRAIN__TRY(dtrain_reduce(bucket->comm, (char *)wire + (size_t)first * unit,
                                  r == strategy->layout.rank ? own : NULL, (size_t)count, dtype, op,
                                  r, &works[r]));
    }
    return DTRAIN_OK;
}

/* End the way of a sharded bucket: add the result of a later micro-batch to the shard; copy any
 * result to a shard in host memory. */
DTRAIN__PRIVATE dtrain_result dtrain__shard_add(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const float *result = dtrain__reduce_target(strategy, bucket);
    dtrain_add_args add = {bucket->shard_count, bucket->grad_shard, result,
                           bucket->grad_shard,  DTRAIN_DTYPE_F32,   DTRAIN_DTYPE_F32};
    if (result == bucket->grad_shard || bucket->shard_count == 0) return DTRAIN_OK;
    if (bucket->grad_on_host)
        return dtrain__host_put(strategy, bucket, result, strategy->accumulated);
    return strategy->device->ops->add(strategy->device, &add);
}

/* With replicas the result is the sum over a node, and the next step makes the mean. */
DTRAIN__PRIVATE dtrain_result dtrain__reduce_scatter_end(dtrain_strategy *strategy,
                                                         dtrain__bucket *bucket)
{
    const bool replicas = strategy->kind->replicas;
    DTRAIN__TRY(dtrain__from_wire(strategy, bucket, dtrain__reduce_target(strategy, bucket),
                                  bucket->shard_first, bucket->shard_count, !replicas));
    const bool at_last = strategy->desc.accumulation == DTRAIN_ACCUMULATION_SHARD_EVERY;
    if (replicas && !(at_last && strategy->more)) return DTRAIN_OK;
    return dtrain__shard_add(strategy, bucket);
}

/* ---- Replicas
 *
 * With HYBRID_SHARD an all-reduce between nodes follows: of the result, in every micro-batch, or of
 * the shard that has summed the results up, in the last one (DTRAIN_ACCUMULATION_SHARD_EVERY). */

/* Return the device memory where this node's sum becomes that of all nodes. *at_last: it is the sum
 * over all micro-batches. */
static float *dtrain__replica_sum(const dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                  bool *at_last)
{
    *at_last = strategy->desc.accumulation == DTRAIN_ACCUMULATION_SHARD_EVERY;
    if (*at_last && !bucket->grad_on_host) return bucket->grad_shard;
    return dtrain__reduce_target(strategy, bucket);
}

DTRAIN__PRIVATE dtrain_result dtrain__replicas_begin(dtrain_strategy *strategy,
                                                     dtrain__bucket *bucket)
{
    bool at_last;
    float *sum = dtrain__replica_sum(strategy, bucket, &at_last);
    if (at_last && strategy->accumulated) {
        DTRAIN__TRY(dtrain__shard_add(strategy, bucket));
        if (bucket->grad_on_host) DTRAIN__TRY(dtrain__host_get(strategy, bucket, sum));
    }
    return dtrain__reduce_all(strategy, bucket, strategy->extra[DTRAIN__ACROSS], sum,
                              bucket->shard_first, bucket->shard_count);
}

DTRAIN__PRIVATE dtrain_result dtrain__replicas_end(dtrain_strategy *strategy,
                                                   dtrain__bucket *bucket)
{
    bool at_last;
    float *sum = dtrain__replica_sum(strategy, bucket, &at_last);
    DTRAIN__TRY(
        dtrain__from_wire(strategy, bucket, sum, bucket->shard_first, bucket->shard_count, true));
    if (!at_last) return dtrain__shard_add(strategy, bucket);
    return bucket->grad_on_host ? dtrain__host_put(strategy, bucket, sum, false) : DTRAIN_OK;
}
