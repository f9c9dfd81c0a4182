/* Sharded gradients
 *
 * A sharded bucket takes the road of strategy/road.c and ends in shards: what every rank
 * updates is a slice of the mean. Where gradients are sharded too, units make them in two buffers
 * that take turns, unit u in number u % 2, and what is reduced of them is kept apart:
 *
 *     backward       unit 3        unit 2        unit 1        unit 0
 *     buffer 1       [ 3 made ]    [ 3 travels ] [ 1 made ]    [ 1 travels ]
 *     buffer 0                     [ 2 made ]    [ 2 travels ] [ 0 made ]
 *     shards                                     3             2 ...
 *
 * A unit claims its buffer when its backward begins and waits there for the unit before the last.
 *
 *     gradients --(reduce_dtype)--> wire -> reduce-scatter -> result -> shard
 *
 * The result of a first or only micro-batch goes straight to the shard; that of a later one, or for
 * a shard in host memory, replaces this rank's slice of the buffer the gradients were made in, and
 * is added or put from there. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* ---- To the shard -----------------------------------------------------------------------------*/

/* Return the place where the fp32 result of this backward is to be. */
static float *dtrain__reduce_target(const dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    if (bucket->shards_grads && (strategy->accumulated || bucket->grad_on_host))
        return bucket->grads + bucket->shard_first;
    return bucket->grad_shard;
}

/* REDUCE_SCATTER: every rank's slice of a bucket to that rank, among those that exchange the hop.
 * With ZERO3 slices have different lengths, and each owner gets a reduce. */
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
        DTRAIN__TRY(dtrain_reduce(strategy->shard_comm, (char *)wire + (size_t)first * unit,
                                  r == strategy->layout.rank ? own : NULL, (size_t)count, dtype, op,
                                  r, &works[r]));
    }
    return DTRAIN_OK;
}

/* End a bucket's way: shard += result of a later micro-batch. A shard that is elsewhere is also put
 * there when the result is of the first. */
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

/* With replicas this is a node's sum, and the mean is made later. */
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
 * With HYBRID_SHARD the shards of a node are summed with those of the other nodes: either every
 * micro-batch's result (REPLICAS), or at last what the shard has summed up (REPLICAS_AT_LAST). */

/* Tell whether it is the shard, and return the place in device memory where this node's sum becomes
 * that of all nodes. */
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
    return dtrain__reduce_all(strategy, bucket, strategy->groups[DTRAIN__ACROSS], sum,
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
