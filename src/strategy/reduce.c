/* Strategies
 *
 * The books are the same for every kind: which gradients are marked, which buckets are complete.
 * The kinds differ in the layout (strategy/layout.c: where values, gradients and shards are) and in
 * three places: how a bucket is reduced, what publish does, and what gather does (gather.c).
 *
 *     ready(p)     mark p; copy its gradient into the bucket if the host owns it
 *                  launch complete buckets, in bucket order; give the communicator a turn
 *     finish()     fill what was not marked; launch the rest, in the same order; wait; copy back
 *
 *     reducing     whole          all-reduce in place
 *     a bucket     sharded        reduce-scatter to the shard (ZERO3: one reduce an owner)
 *                  several nodes  inside the node, then across nodes, then inside again
 *
 * Why it cannot deadlock: the collectives of a backward are buckets 0, 1, 2, ... on every rank, in
 * whatever order it calls ready, and starting one never waits. A bucket that is complete too early
 * waits for those before it. A bucket's later steps start when its earlier ones happen to be done,
 * but each kind of step has a communicator of its own, and there buckets go in their order.
 *
 * Why the bits depend neither on the kind nor on overlap, bucket size or copying: each element is
 * the sum over the ranks, in rank order, times 1/N, wherever it lies. (Between nodes the order is
 * another: HYBRID_SHARD has its own bits.)
 *
 * What grad_written means: the storage's grad holds a part of this step's gradient. The tape sets
 * it at the first write, ready sets it for hosts with their own backward, finish clears it when the
 * gradient has been moved on. A gradient that was not written in the whole step counts as zero. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "strategy/compression_internal.h"
#include "strategy/layout_internal.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"
#include "device/backend.h"
#include "device/device.h"

/* ---- Reducing a bucket
 *
 *     gradients --(reduce_dtype)--> wire -> collective -> result -> shard
 *
 * The result of a first or only micro-batch goes straight to the shard; that of a later one, or for
 * a shard in host memory, replaces this rank's slice of the buffer the gradients were made in, and
 * is added or copied from there. */

/* Where the fp32 result of this backward is to be. */
DTRAIN__PRIVATE float *dtrain__reduce_target(const dtrain_strategy *strategy,
                                             const dtrain__bucket *bucket)
{
    if (bucket->work && (strategy->accumulated || strategy->layout.host_grads))
        return bucket->grads + bucket->shard_first;
    return bucket->grad_shard;
}

DTRAIN__PRIVATE dtrain_result dtrain__convert(dtrain_strategy *strategy, int64_t count,
                                              const void *x, uint32_t x_dtype, void *y,
                                              uint32_t y_dtype)
{
    dtrain_convert_args args = {count, x, y, (dtrain_dtype)x_dtype, (dtrain_dtype)y_dtype};
    if (count == 0) return DTRAIN_OK;
    return strategy->device->ops->convert(strategy->device, &args);
}

DTRAIN__PRIVATE bool dtrain__reduces_low(const dtrain_strategy *strategy)
{
    return strategy->desc.reduce_dtype != DTRAIN_DTYPE_F32;
}

/* x (count elements of the bucket, from `first` on) as it travels: itself, or rounded. */
DTRAIN__PRIVATE dtrain_result dtrain__to_wire(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                              const float *x, int64_t first, int64_t count,
                                              void **wire)
{
    *wire = (void *)(uintptr_t)x;
    if (!dtrain__reduces_low(strategy)) return DTRAIN_OK;
    *wire = bucket->low_grads + first;
    return dtrain__convert(strategy, count, x, DTRAIN_DTYPE_F32, *wire,
                           strategy->desc.reduce_dtype);
}

DTRAIN__PRIVATE dtrain_result dtrain__from_wire(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                int64_t first, int64_t count, float *x)
{
    if (!dtrain__reduces_low(strategy)) return DTRAIN_OK;
    return dtrain__convert(strategy, count, bucket->low_grads + first, strategy->desc.reduce_dtype,
                           x, DTRAIN_DTYPE_F32);
}

DTRAIN__PRIVATE dtrain_work **dtrain__reduce_works(const dtrain_strategy *strategy,
                                                   const dtrain__bucket *bucket)
{
    return dtrain__works(strategy, (size_t)(bucket - strategy->layout.buckets), false);
}

/* Where two collectives make the mean: sums first, and one factor at the end. In fp16 a sum may be
 * too large where the mean is not: there each of them makes a mean. */
DTRAIN__PRIVATE bool dtrain__sums_first(const dtrain_strategy *strategy)
{
    const bool levels = dtrain__has_replicas(strategy) || strategy->layout.node_ranks > 1;
    return levels && strategy->desc.reduce_dtype != DTRAIN_DTYPE_F16;
}

DTRAIN__PRIVATE dtrain_reduce_op dtrain__level_op(const dtrain_strategy *strategy)
{
    return dtrain__sums_first(strategy) ? DTRAIN_REDUCE_SUM : DTRAIN_REDUCE_MEAN;
}

DTRAIN__PRIVATE dtrain_result dtrain__scale(dtrain_strategy *strategy, float *x, int64_t count)
{
    const float factor = 1.0f / (float)strategy->layout.all;
    dtrain_axpby_args mean = {count, false, factor, 0, x, x, false, DTRAIN_DTYPE_F32};
    if (count == 0 || !dtrain__sums_first(strategy)) return DTRAIN_OK;
    return strategy->device->ops->axpby(strategy->device, &mean);
}

/* One rank: its mean is what it has. */
DTRAIN__PRIVATE dtrain_result dtrain__step_nothing(dtrain_strategy *strategy,
                                                   dtrain__bucket *bucket)
{
    (void)strategy;
    (void)bucket;
    return DTRAIN_OK;
}

static dtrain_result dtrain__all_reduce_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    void *wire;
    DTRAIN__TRY(dtrain__to_wire(strategy, bucket, bucket->grads, 0, bucket->count, &wire));
    return dtrain_all_reduce(strategy->comm, wire, wire, (size_t)bucket->count,
                             (dtrain_dtype)strategy->desc.reduce_dtype, DTRAIN_REDUCE_MEAN,
                             dtrain__reduce_works(strategy, bucket));
}

static dtrain_result dtrain__all_reduce_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    return dtrain__from_wire(strategy, bucket, 0, bucket->count, bucket->grads);
}

/* To this rank's shard; with ZERO3 to every owner's. Between nodes the mean is not made here. */
static dtrain_result dtrain__reduce_scatter_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain_dtype dtype = (dtrain_dtype)strategy->desc.reduce_dtype;
    const dtrain_reduce_op op = dtrain__level_op(strategy);
    const size_t unit = dtrain_dtype_bytes(dtype);
    dtrain_work **works = dtrain__reduce_works(strategy, bucket);
    void *wire;
    DTRAIN__TRY(dtrain__to_wire(strategy, bucket, bucket->grads, 0, bucket->count, &wire));
    char *own = dtrain__reduces_low(strategy) ? (char *)wire + (size_t)bucket->shard_first * unit
                                              : (char *)dtrain__reduce_target(strategy, bucket);
    if (!bucket->cuts)
        return dtrain_reduce_scatter(strategy->shard_comm, wire, own, (size_t)bucket->shard_count,
                                     dtype, op, works);
    for (int r = 0; r < strategy->layout.ranks; r++) {
        const int64_t first = bucket->cuts[r], count = bucket->cuts[r + 1] - first;
        if (count == 0) continue;
        DTRAIN__TRY(dtrain_reduce(strategy->shard_comm, (char *)wire + (size_t)first * unit,
                                  r == strategy->layout.rank ? own : NULL, (size_t)count, dtype, op,
                                  r, &works[r]));
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__reduce_scatter_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    return dtrain__from_wire(strategy, bucket, bucket->shard_first, bucket->shard_count,
                             dtrain__reduce_target(strategy, bucket));
}

/* shard += result of a later micro-batch; in host memory also shard = result of the first. */
static dtrain_result dtrain__accumulate_shard(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const float *result = dtrain__reduce_target(strategy, bucket);
    dtrain_add_args add = {bucket->shard_count, bucket->grad_shard, result,
                           bucket->grad_shard,  DTRAIN_DTYPE_F32,   DTRAIN_DTYPE_F32};
    if (result == bucket->grad_shard || bucket->shard_count == 0) return DTRAIN_OK;
    if (strategy->layout.host_grads)
        return dtrain__shard_to_host(strategy, bucket, result, strategy->accumulated);
    return strategy->device->ops->add(strategy->device, &add);
}

/* HYBRID_SHARD: what the micro-batches have summed up, on the device, for the other nodes. A shard
 * in host memory comes back for it. */
static dtrain_result dtrain__sum_for_replicas(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                              float **sum)
{
    dtrain_device *device = strategy->device;
    *sum = bucket->grad_shard;
    if (!strategy->layout.host_grads) return dtrain__accumulate_shard(strategy, bucket);
    *sum = dtrain__reduce_target(strategy, bucket);
    if (!strategy->accumulated) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__accumulate_shard(strategy, bucket));
    for (uint32_t i = 0; i < 2; i++)
        if (strategy->offload.landed[i] == bucket) DTRAIN__TRY(dtrain__landing_clear(strategy, i));
    return device->ops->copy_async(device, *sum, bucket->grad_shard,
                                   (size_t)bucket->shard_count * sizeof(float),
                                   DTRAIN_COPY_HOST_TO_DEVICE, NULL);
}

/* HYBRID_SHARD: x (shard_count) is one node's sum; all nodes' replaces it. */
static dtrain_result dtrain__replicas_start(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                            float *x)
{
    void *wire;
    DTRAIN__TRY(
        dtrain__to_wire(strategy, bucket, x, bucket->shard_first, bucket->shard_count, &wire));
    return dtrain_all_reduce(strategy->groups[DTRAIN__ACROSS], wire, wire,
                             (size_t)bucket->shard_count, (dtrain_dtype)strategy->desc.reduce_dtype,
                             dtrain__level_op(strategy), dtrain__reduce_works(strategy, bucket));
}

static dtrain_result dtrain__replicas_finish(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                             float *x)
{
    DTRAIN__TRY(dtrain__from_wire(strategy, bucket, bucket->shard_first, bucket->shard_count, x));
    return dtrain__scale(strategy, x, bucket->shard_count);
}

/* Either every micro-batch's sum travels between nodes ... */
static dtrain_result dtrain__replicas_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    return dtrain__replicas_start(strategy, bucket, dtrain__reduce_target(strategy, bucket));
}

static dtrain_result dtrain__replicas_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    return dtrain__replicas_finish(strategy, bucket, dtrain__reduce_target(strategy, bucket));
}

/* ... or what the shard has gathered up to the last. */
static dtrain_result dtrain__shard_replicas_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    float *sum;
    DTRAIN__TRY(dtrain__sum_for_replicas(strategy, bucket, &sum));
    return dtrain__replicas_start(strategy, bucket, sum);
}

static dtrain_result dtrain__shard_replicas_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const bool on_host = strategy->layout.host_grads && bucket->work;
    float *sum = on_host ? dtrain__reduce_target(strategy, bucket) : bucket->grad_shard;
    DTRAIN__TRY(dtrain__replicas_finish(strategy, bucket, sum));
    return on_host ? dtrain__shard_to_host(strategy, bucket, sum, false) : DTRAIN_OK;
}

static const dtrain__step dtrain__nothing = {dtrain__step_nothing, dtrain__step_nothing, false,
                                             false};
static const dtrain__step dtrain__by_all_reduce = {dtrain__all_reduce_begin, dtrain__all_reduce_end,
                                                   false, false};
static const dtrain__step dtrain__by_reduce_scatter = {dtrain__reduce_scatter_begin,
                                                       dtrain__reduce_scatter_end, false, false};
static const dtrain__step dtrain__by_replicas = {dtrain__replicas_begin, dtrain__replicas_end,
                                                 false, false};
static const dtrain__step dtrain__by_shard_replicas = {dtrain__shard_replicas_begin,
                                                       dtrain__shard_replicas_end, true, true};

/* How buckets travel in the step that begins. */
DTRAIN__PRIVATE void dtrain__choose_ways(dtrain_strategy *strategy)
{
    const bool every = strategy->desc.accumulation != DTRAIN_ACCUMULATION_SHARD_EVERY;
    memset(strategy->ways, 0, sizeof strategy->ways);
    for (int sharded = 0; sharded < 2; sharded++) {
        const dtrain__step **way = strategy->ways[sharded];
        if (strategy->layout.all == 1) way[0] = &dtrain__nothing;
        else if (dtrain__choose_indirect(strategy, sharded, way)) continue;
        else if (!sharded) way[0] = &dtrain__by_all_reduce;
        else {
            way[0] = &dtrain__by_reduce_scatter;
            if (dtrain__has_replicas(strategy))
                way[1] = every ? &dtrain__by_replicas : &dtrain__by_shard_replicas;
        }
    }
}

/* Step number `stage` of a bucket's way, from 1; NULL: it has no such step. */
static const dtrain__step *dtrain__step_of(const dtrain_strategy *strategy,
                                           const dtrain__bucket *bucket, uint32_t stage)
{
    const dtrain__step *step = strategy->ways[bucket->sharded][stage - 1];
    return step && step->last_only && strategy->more ? NULL : step;
}

DTRAIN__PRIVATE dtrain_result dtrain__reduce_start(dtrain_strategy *strategy, size_t b)
{
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    bucket->stage = 1;
    return dtrain__step_of(strategy, bucket, 1)->begin(strategy, bucket);
}

/* The collectives of a step are done: what follows them. */
static dtrain_result dtrain__reduce_next(dtrain_strategy *strategy, size_t b)
{
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    const dtrain__step *done = dtrain__step_of(strategy, bucket, bucket->stage);
    const dtrain__step *next = dtrain__step_of(strategy, bucket, bucket->stage + 1);
    DTRAIN__TRY(done->end(strategy, bucket));
    bucket->stage = next ? bucket->stage + 1 : (uint32_t)DTRAIN__REDUCED;
    if (next) return next->begin(strategy, bucket);
    return done->sums_shard ? DTRAIN_OK : dtrain__accumulate_shard(strategy, bucket);
}

/* One step further, at whatever time its collectives take. */
DTRAIN__PRIVATE dtrain_result dtrain__reduce_await(dtrain_strategy *strategy, size_t b)
{
    if (strategy->layout.buckets[b].stage == DTRAIN__REDUCED) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__wait_works(strategy, dtrain__works(strategy, b, false)));
    return dtrain__reduce_next(strategy, b);
}

/* Does starting a bucket's further steps have to wait for a place in the program that is the same
 * on every rank? NCCL runs what was started in its order: if that depended on what happens to be
 * done, ranks would wait for each other in a circle. */
DTRAIN__PRIVATE bool dtrain__steps_are_placed(const dtrain_strategy *strategy)
{
    return strategy->comm->ops->launch_ordered && (strategy->ways[0][1] || strategy->ways[1][1]);
}

/* Such a place: all buckets under way go one step further, in their order. */
DTRAIN__PRIVATE dtrain_result dtrain__reduce_step_all(dtrain_strategy *strategy, size_t end)
{
    for (size_t b = strategy->oldest; b < end; b++) DTRAIN__TRY(dtrain__reduce_await(strategy, b));
    return DTRAIN_OK;
}

/* One turn for the communicator per ready call: without a progress thread, buckets move only then.
 * It costs two looks at the clock and one cache line per rank when there is nothing to do; ready
 * calls are a layer's backward apart. Nothing waits. No bucket overtakes one before it: it starts a
 * step when all of those have. */
DTRAIN__PRIVATE dtrain_result dtrain__progress(dtrain_strategy *strategy)
{
    dtrain__bucket *buckets = strategy->layout.buckets;
    uint32_t most = DTRAIN__REDUCED; /* stage of the slowest bucket so far */
    bool done = true;
    if (dtrain__steps_are_placed(strategy)) return DTRAIN_OK;
    for (size_t b = strategy->oldest; b < strategy->launched; b++) {
        dtrain__bucket *bucket = &buckets[b];
        const bool chain = strategy->ways[bucket->sharded][1] != NULL;
        while (bucket->stage != DTRAIN__REDUCED) {
            if (bucket->stage >= most && dtrain__step_of(strategy, bucket, bucket->stage + 1))
                break;
            DTRAIN__TRY(dtrain__test_works(strategy, dtrain__works(strategy, b, false), &done));
            if (!done) break;
            DTRAIN__TRY(dtrain__reduce_await(strategy, b));
        }
        if (bucket->stage < most) most = bucket->stage;
        if (b == strategy->oldest && bucket->stage == DTRAIN__REDUCED) strategy->oldest++;
        if (!done && !chain) break;
    }
    return DTRAIN_OK;
}

/* Finishes buckets in their order; while one is waited for, those behind it go on. */
DTRAIN__PRIVATE dtrain_result dtrain__reduce_until(dtrain_strategy *strategy, size_t end)
{
    while (strategy->oldest < end) {
        if (dtrain__steps_are_placed(strategy)) {
            DTRAIN__TRY(dtrain__reduce_step_all(strategy, end));
        } else {
            DTRAIN__TRY(dtrain__progress(strategy));
            if (strategy->oldest < end)
                DTRAIN__TRY(dtrain__reduce_await(strategy, strategy->oldest));
        }
        while (strategy->oldest < end &&
               strategy->layout.buckets[strategy->oldest].stage == DTRAIN__REDUCED)
            strategy->oldest++;
    }
    return DTRAIN_OK;
}
