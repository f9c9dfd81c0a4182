/* The road of a gradient: ready, launch, reduce, finish, publish
 *
 * DDP is the worked example: what it does in a step is in this file, and the numbers of the drawing
 * stand at the stations below. The other kinds take the same road with other steps at 3, one file a
 * step in ways/, chosen in ways.c; sharded values come and go in gather.c.
 *
 *       the tape or the host        on this rank                         among the ranks
 *
 *     1 dtrain_strategy_ready(p)    dtrain__mark: count p in its bucket
 *     2                             dtrain__launch_buckets: every bucket that is complete, if
 *                                   those before it have been launched
 *     3                             dtrain__reduce_start: begin of the   all-reduce of the bucket,
 *                                   way's first step                     under way from here on
 *       backward of the next layer
 *       dtrain_strategy_ready(q)    ... dtrain__progress: what is done   all-reduce done
 *                                   goes on with the way's next step
 *     4 dtrain_strategy_finish      dtrain__close_buckets: fill what
 *                                   was not marked; 2 and 3 for the rest
 *                                   dtrain__reduce_until: wait           gradients are the mean
 *                                   weights.c: of samples, not of ranks  all-reduce of weights
 *       clipping, optimizer         on what dtrain_strategy_shards lists
 *     5 dtrain_strategy_publish     DDP: nothing to do                   all-gather of shards
 *
 * Why it cannot deadlock: the collectives of a backward are buckets 0, 1, 2, ... on every rank, in
 * whatever order it calls ready, and starting one never waits. A bucket that is complete too early
 * waits for those before it. A bucket's later steps start when its earlier ones happen to be done,
 * but each kind of step has a communicator of its own, and there buckets go in their order.
 *
 * Why the bits depend neither on the kind nor on overlap, bucket size or copying: each element is
 * the sum over the ranks, in rank order, times 1/N, wherever it lies. (Between nodes the order is
 * another: HYBRID_SHARD has its own bits.) */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* ---- Before a backward ------------------------------------------------------------------------*/

/* Set the state between two backwards, and between two steps. Work buffers have been emptied: the
 * next backward overwrites them. Whole gradients go on until the step ends. */
DTRAIN__PRIVATE void dtrain__rewind(dtrain_strategy *strategy, bool step_done)
{
    dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count; i++) {
        dtrain__entry *entry = &layout->entries[i];
        const dtrain__bucket *bucket =
            entry->bucket == DTRAIN__NONE ? NULL : &layout->buckets[entry->bucket];
        entry->marked = false;
        if (step_done) entry->seen = false;
        entry->pending = entry->uses;
        if (step_done || (bucket && bucket->shards_grads))
            strategy->params[i].state.grad_written = false;
    }
    for (size_t b = 0; b < layout->bucket_count; b++) {
        layout->buckets[b].pending = layout->buckets[b].uses;
        layout->buckets[b].stage = DTRAIN__REDUCE_IDLE;
    }
    strategy->launched = strategy->oldest = strategy->marked_count = 0;
    strategy->in_buffer[0] = strategy->in_buffer[1] = strategy->backward = DTRAIN__NONE;
    strategy->accumulated = !step_done;
    strategy->entered = false;
    strategy->weight = 1;
    if (step_done) strategy->weights = 0;
    if (step_done) strategy->passes = 0;
}

/* ---- 1. Ready ---------------------------------------------------------------------------------*/

/* Does this bucket travel in this backward? Gradients of which a rank keeps a shard do in every
 * one; whole ones add up, on each rank by itself, until the step's last. So grad_written, and where
 * a host's own gradient lies, concern this rank alone. */
static bool dtrain__travels(const dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    return bucket->trainable && (bucket->shards_grads || !strategy->more);
}

/* Copy a storage's own gradient to its place in the bucket, or back; nothing to do when it lives
 * there. */
static dtrain_result dtrain__move_grad(dtrain_strategy *strategy, const dtrain_param *storage,
                                       bool back)
{
    const dtrain__entry *entry = &strategy->layout.entries[storage->state.index];
    float *place = strategy->layout.buckets[entry->bucket].grads + entry->offset;
    const size_t bytes = (size_t)storage->count * sizeof(float);
    if (storage->grad == place || bytes == 0) return DTRAIN_OK;
    return dtrain_device_copy(strategy->device, back ? storage->grad : place,
                              back ? place : storage->grad, bytes);
}

/* Tell whether units are walked in backward (dtrain__walk_back). Then a unit's gradients are
 * launched in the turn of the next unit, and what belongs to none in finish: a rank that launched a
 * bucket as soon as it is complete would be ahead of one that has to close it. */
DTRAIN__PRIVATE bool dtrain__walks(const dtrain_strategy *strategy)
{
    return strategy->layout.shards.params || strategy->layout.shards.grads;
}

static dtrain_result dtrain__launch_buckets(dtrain_strategy *strategy, size_t end);

/* Count a final gradient, in constant time: three counters tell what became final, no list is
 * searched. */
static dtrain_result dtrain__mark(dtrain_strategy *strategy, size_t index)
{
    dtrain__layout *layout = &strategy->layout;
    dtrain_param *storage = strategy->params[index].state.storage;
    dtrain__entry *entry = &layout->entries[index];
    dtrain__entry *place = &layout->entries[storage->state.index];
    dtrain__bucket *bucket = &layout->buckets[entry->bucket];
    entry->marked = true;
    strategy->marked_count++;
    bucket->pending--;
    if (--place->pending == 0 && dtrain__travels(strategy, bucket))
        DTRAIN__TRY(dtrain__move_grad(strategy, storage, false));
    if (!strategy->desc.no_overlap && !dtrain__walks(strategy))
        DTRAIN__TRY(dtrain__launch_buckets(strategy, layout->bucket_count));
    return dtrain__progress(strategy);
}

/* Refuse a mark that comes twice, or while the gradient has no place: memory for one of a unit's is
 * its own from dtrain_strategy_gather to the gather of another unit. */
static dtrain_result dtrain__check_mark(const dtrain_strategy *strategy, size_t index)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain__entry *entry = &layout->entries[index];
    const dtrain__bucket *bucket = entry->trainable ? &layout->buckets[entry->bucket] : NULL;
    const char *why = NULL;
    if (!bucket) why = "is frozen";
    else if (entry->marked)
        why = "is marked twice in one backward; call dtrain_strategy_finish between two";
    else if (entry->bucket < strategy->launched)
        why = "is marked after another unit was gathered, which ended its own unit's backward";
    else if (bucket->shards_grads && bucket->unit != DTRAIN__NONE &&
             bucket->unit != strategy->backward)
        why = "is marked outside its unit's backward; call dtrain_strategy_gather with "
              "DTRAIN_PASS_BACKWARD before";
    if (!why) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE, "dtrain_strategy_ready: parameter %zu (\"%.100s\") %s",
                       index, strategy->params[index].name, why);
}

/* From now on grad holds a part of this step's gradient: the tape says so at its first write, ready
 * for a host with its own backward; dtrain__rewind takes it back when the gradient has been moved
 * on. A gradient of which this rank holds no part in the whole step counts as zero. */
DTRAIN_API dtrain_result dtrain_strategy_ready(dtrain_strategy *strategy, size_t index)
{
    const char *const call = "dtrain_strategy_ready";
    DTRAIN__TRY(dtrain__strategy_usable(strategy, call));
    if (index >= strategy->param_count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: index %zu, there are %zu parameters", call,
                           index, strategy->param_count);
    DTRAIN__TRY(dtrain__check_mark(strategy, index));
    strategy->layout.entries[index].seen = true;
    dtrain__set_grad_written(strategy->params[index].state.storage, true);
    return dtrain__strategy_keep(strategy, dtrain__mark(strategy, index));
}

DTRAIN_API dtrain_result dtrain_strategy_accumulate(dtrain_strategy *strategy, bool more)
{
    const char *const call = "dtrain_strategy_accumulate";
    DTRAIN__TRY(dtrain__strategy_usable(strategy, call));
    if (more != strategy->more) DTRAIN__TRY(dtrain__between_backwards(strategy, call));
    strategy->more = more;
    return DTRAIN_OK;
}

/* ---- 2. Launch --------------------------------------------------------------------------------*/

/* Launch complete buckets below `end` in their order, up to the first that waits for a gradient. */
static dtrain_result dtrain__launch_buckets(dtrain_strategy *strategy, size_t end)
{
    for (; strategy->launched < end; strategy->launched++) {
        dtrain__bucket *bucket = &strategy->layout.buckets[strategy->launched];
        if (bucket->pending) break;
        bucket->stage = DTRAIN__REDUCED;
        if (!dtrain__travels(strategy, bucket)) continue;
        if (dtrain__in_lockstep(strategy)) /* and this is a place: one step further */
            for (size_t b = strategy->oldest; b < strategy->launched; b++)
                DTRAIN__TRY(dtrain__reduce_await(strategy, b));
        DTRAIN__TRY(dtrain__reduce_start(strategy, strategy->launched));
    }
    return DTRAIN_OK;
}

/* ---- 3. Reduce --------------------------------------------------------------------------------*/

/* Return the steps of a bucket's way. */
static const dtrain__step *const *dtrain__way_of(const dtrain_strategy *strategy, bool sharded)
{
    const bool compressed = strategy->sync_count >= strategy->compressed_from;
    return strategy->ways[sharded      ? DTRAIN__SHARDED
                          : compressed ? DTRAIN__COMPRESSED
                                       : DTRAIN__WHOLE];
}

/* Return step number `stage` of a bucket's way, from 1; NULL: it has no such step. */
static const dtrain__step *dtrain__step_of(const dtrain_strategy *strategy,
                                           const dtrain__bucket *bucket, uint32_t stage)
{
    const dtrain__step *step = dtrain__way_of(strategy, bucket->sharded)[stage - 1];
    return step && step->last_only && strategy->more ? NULL : step;
}

/* Begin the first step of a bucket's way. */
DTRAIN__PRIVATE dtrain_result dtrain__reduce_start(dtrain_strategy *strategy, size_t b)
{
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    bucket->stage = 1;
    const dtrain__step *first = dtrain__step_of(strategy, bucket, 1);
    return first->begin ? first->begin(strategy, bucket) : DTRAIN_OK;
}

/* Wait for the collectives of a bucket's step, end it and begin the next one. */
DTRAIN__PRIVATE dtrain_result dtrain__reduce_await(dtrain_strategy *strategy, size_t b)
{
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    if (bucket->stage == DTRAIN__REDUCED) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__wait_works(strategy, bucket->reduces));
    const dtrain__step *done = dtrain__step_of(strategy, bucket, bucket->stage);
    const dtrain__step *next = dtrain__step_of(strategy, bucket, bucket->stage + 1);
    if (done->end) DTRAIN__TRY(done->end(strategy, bucket));
    bucket->stage = next ? bucket->stage + 1 : (uint32_t)DTRAIN__REDUCED;
    return next ? next->begin(strategy, bucket) : DTRAIN_OK;
}

/* Must a bucket's further steps start at a place in the program that is the same on every rank?
 * NCCL runs what was started in its order: if that depended on what happens to be done, ranks would
 * wait for each other in a circle. */
DTRAIN__PRIVATE bool dtrain__in_lockstep(const dtrain_strategy *strategy)
{
    return strategy->comm->ops->launch_ordered &&
           (dtrain__way_of(strategy, false)[1] || dtrain__way_of(strategy, true)[1]);
}

/* Give the communicator a turn at every ready: without a progress thread, buckets move only then.
 * It costs two looks at the clock and one cache line per rank when there is nothing to do; ready
 * calls are a layer's backward apart. Nothing waits. No bucket overtakes one before it: it starts a
 * step when all of those have. */
DTRAIN__PRIVATE dtrain_result dtrain__progress(dtrain_strategy *strategy)
{
    uint32_t most = DTRAIN__REDUCED; /* stage of the slowest bucket so far */
    bool done = true;
    if (dtrain__in_lockstep(strategy)) return DTRAIN_OK;
    for (size_t b = strategy->oldest; b < strategy->launched; b++) {
        const dtrain__bucket *bucket = &strategy->layout.buckets[b];
        const bool chain = dtrain__way_of(strategy, bucket->sharded)[1] != NULL;
        while (bucket->stage != DTRAIN__REDUCED) {
            if (bucket->stage >= most && dtrain__step_of(strategy, bucket, bucket->stage + 1))
                break;
            done = true;
            for (size_t i = 0; i < strategy->works_per_bucket && done; i++)
                DTRAIN__TRY(dtrain_work_test(bucket->reduces[i], &done));
            if (!done) break;
            DTRAIN__TRY(dtrain__reduce_await(strategy, b));
        }
        if (bucket->stage < most) most = bucket->stage;
        if (b == strategy->oldest && bucket->stage == DTRAIN__REDUCED) strategy->oldest++;
        if (!done && !chain) break;
    }
    return DTRAIN_OK;
}

/* Finish buckets in their order; while one is waited for, those behind it go on. Where steps are
 * placed, this is such a place: all buckets under way go one step further. */
DTRAIN__PRIVATE dtrain_result dtrain__reduce_until(dtrain_strategy *strategy, size_t end)
{
    while (strategy->oldest < end) {
        DTRAIN__TRY(dtrain__progress(strategy));
        const size_t stop = dtrain__in_lockstep(strategy) ? end : strategy->oldest + 1;
        for (size_t b = strategy->oldest; b < stop && b < end; b++)
            DTRAIN__TRY(dtrain__reduce_await(strategy, b));
        while (strategy->oldest < end &&
               strategy->layout.buckets[strategy->oldest].stage == DTRAIN__REDUCED)
            strategy->oldest++;
    }
    return DTRAIN_OK;
}

/* ---- 3. Reduce: how a gradient travels -------------------------------------------------------*/

/* Do gradients travel rounded, in low_grads? */
DTRAIN__PRIVATE bool dtrain__reduces_low(const dtrain_strategy *strategy)
{
    return strategy->desc.reduce_dtype != DTRAIN_DTYPE_F32;
}

/* Do two collectives make this bucket's mean? Then they sum, and one factor follows at the end. In
 * fp16 a sum may be too large where the mean is not: there each of them makes a mean. */
DTRAIN__PRIVATE bool dtrain__sums_first(const dtrain_strategy *strategy,
                                        const dtrain__bucket *bucket)
{
    const bool levels =
        strategy->layout.node_ranks > 1 || (bucket->sharded && strategy->kind->replicas);
    return levels && strategy->desc.reduce_dtype != DTRAIN_DTYPE_F16;
}

DTRAIN__PRIVATE dtrain_reduce_op dtrain__level_op(const dtrain_strategy *strategy,
                                                  const dtrain__bucket *bucket)
{
    return dtrain__sums_first(strategy, bucket) ? DTRAIN_REDUCE_SUM : DTRAIN_REDUCE_MEAN;
}

/* Apply the factor of sums: x (count elements of the bucket) becomes the mean. */
DTRAIN__PRIVATE dtrain_result dtrain__scale(dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                            float *x, int64_t count)
{
    const float factor = 1.0f / (float)strategy->layout.all;
    dtrain_axpby_args mean;
    if (count == 0 || !dtrain__sums_first(strategy, bucket)) return DTRAIN_OK;
    memset(&mean, 0, sizeof mean);
    mean.count = count;
    mean.a = factor;
    mean.x = mean.y = x;
    mean.dtype = DTRAIN_DTYPE_F32;
    return strategy->device->ops->axpby(strategy->device, &mean);
}

/* Make *wire x (count elements of the bucket, from `first` on) as it travels. */
DTRAIN__PRIVATE dtrain_result dtrain__to_wire(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                              float *x, int64_t first, int64_t count, void **wire)
{
    *wire = x;
    if (!dtrain__reduces_low(strategy)) return DTRAIN_OK;
    *wire = bucket->low_grads + first;
    return dtrain__convert(strategy, count, x, DTRAIN_DTYPE_F32, *wire,
                           strategy->desc.reduce_dtype);
}

/* Make x (count elements of the bucket, from `first` on) what has come, or if that was the last
 * collective the mean. */
DTRAIN__PRIVATE dtrain_result dtrain__from_wire(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                float *x, int64_t first, int64_t count, bool last)
{
    if (dtrain__reduces_low(strategy))
        DTRAIN__TRY(dtrain__convert(strategy, count, bucket->low_grads + first,
                                    strategy->desc.reduce_dtype, x, DTRAIN_DTYPE_F32));
    return last ? dtrain__scale(strategy, bucket, x, count) : DTRAIN_OK;
}

/* Start the all-reduce of x (count elements of the bucket, from `first` on). */
DTRAIN__PRIVATE dtrain_result dtrain__reduce_all(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                 dtrain_comm *comm, float *x, int64_t first,
                                                 int64_t count)
{
    void *wire;
    DTRAIN__TRY(dtrain__to_wire(strategy, bucket, x, first, count, &wire));
    dtrain__label(strategy, bucket, "bucket");
    return dtrain_all_reduce(comm, wire, wire, (size_t)count,
                             (dtrain_dtype)strategy->desc.reduce_dtype,
                             dtrain__level_op(strategy, bucket), bucket->reduces);
}

/* ALL_REDUCE of a whole bucket: everything among all ranks, or between nodes this rank's slice, its
 * hop. */
DTRAIN__PRIVATE dtrain_result dtrain__all_reduce_begin(dtrain_strategy *strategy,
                                                       dtrain__bucket *bucket)
{
    return dtrain__reduce_all(strategy, bucket, bucket->comm, bucket->grads + bucket->slice_first,
                              bucket->slice_first, bucket->slice_count);
}

DTRAIN__PRIVATE dtrain_result dtrain__all_reduce_end(dtrain_strategy *strategy,
                                                     dtrain__bucket *bucket)
{
    return dtrain__from_wire(strategy, bucket, bucket->grads + bucket->slice_first,
                             bucket->slice_first, bucket->slice_count, true);
}

/* ---- 4. Finish --------------------------------------------------------------------------------*/

/* Make a bucket complete that still waits for marks: of its gradients, what an earlier micro-batch
 * or another use has left counts, the rest is zero. A bucket that stays here waits no longer. */
static dtrain_result dtrain__close_bucket(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    dtrain__layout *layout = &strategy->layout;
    const uint32_t index = (uint32_t)(bucket - layout->buckets);
    const bool waits = bucket->pending && dtrain__travels(strategy, bucket);
    bucket->pending = 0;
    for (uint32_t i = bucket->first_param; waits && i <= bucket->last_param; i++) {
        const dtrain__entry *entry = &layout->entries[i];
        const dtrain_param *p = &strategy->params[i];
        if (!entry->pending || entry->bucket != index) continue;
        if (p->state.grad_written) DTRAIN__TRY(dtrain__move_grad(strategy, p, false));
        else
            DTRAIN__TRY(strategy->device->ops->zero(strategy->device, bucket->grads + entry->offset,
                                                    (size_t)p->count * sizeof(float)));
    }
    return DTRAIN_OK;
}

/* Close and launch buckets up to `end`, one by one: a buffer is zeroed for the next only when
 * the one before it has been launched. */
DTRAIN__PRIVATE dtrain_result dtrain__close_buckets(dtrain_strategy *strategy, size_t end)
{
    while (strategy->launched < end) {
        DTRAIN__TRY(dtrain__close_bucket(strategy, &strategy->layout.buckets[strategy->launched]));
        DTRAIN__TRY(dtrain__launch_buckets(strategy, end));
    }
    return DTRAIN_OK;
}

/* Report parameters that ready has not seen in this step, at most eight by name; a warning names
 * one once, and a rank without samples misses nothing. All buckets have been launched: whatever
 * this rank lacks, the others are not left waiting. */
static dtrain_result dtrain__report_missing(dtrain_strategy *strategy)
{
    const char *const call = "dtrain_strategy_finish";
    const bool strict = strategy->desc.missing_gradient == DTRAIN_MISSING_GRADIENT_ERROR;
    char names[640] = "";
    size_t count = 0, used = 0;
    dtrain_result result = DTRAIN_OK;
    for (size_t i = 0; i < strategy->param_count && strategy->weights > 0; i++) {
        dtrain__entry *entry = &strategy->layout.entries[i];
        const dtrain_param *p = &strategy->params[i];
        if (!entry->trainable || entry->seen || (entry->warned && !strict)) continue;
        entry->warned = true;
        if (count++ < 8) /* 64 bytes each: there is room for them */
            used += (size_t)snprintf(names + used, sizeof names - used, "%s\"%.60s\"",
                                     used ? ", " : "", p->name);
    }
    if (count > 8) snprintf(names + used, sizeof names - used, " and %zu more", count - 8);
    if (count && !strict)
        dtrain_log(strategy->world, DTRAIN_LOG_WARNING,
                   "%s: no gradient from this backward, zero is used%s: %s", call,
                   strategy->desc.missing_gradient == DTRAIN_MISSING_GRADIENT_ZERO
                       ? ""
                       : ", or where no rank has one the parameter is left alone",
                   names);
    if (!strict) return DTRAIN_OK;
    if (count)
        result = dtrain_fail(DTRAIN_ERROR_USAGE,
                             "%s: no gradient from this backward: %s; mark them with "
                             "dtrain_strategy_ready, or set DTRAIN_PARAM_FROZEN",
                             call, names);
    return dtrain__agree(strategy->comm, result);
}

/* Copy whole gradients back to the arrays of a host that has its own. */
static dtrain_result dtrain__return_grads(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->shard_count; i++) {
        const dtrain_param *p = strategy->shards[i].param;
        if (layout->buckets[layout->entries[p->state.index].bucket].sharded) continue;
        DTRAIN__TRY(dtrain__move_grad(strategy, p, true));
    }
    return DTRAIN_OK;
}

/* Bring buffers to their mean over the ranks. Running averages are linear in what is averaged: the
 * mean of those that ranks have kept by themselves is the one of all their batches. */
static dtrain_result dtrain__average_buffers(dtrain_strategy *strategy)
{
    for (size_t i = 0; strategy->has_buffers && i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        dtrain_work *work = NULL;
        if (!(p->flags & DTRAIN_PARAM_BUFFER) || p->state.storage != p) continue;
        DTRAIN__TRY(dtrain_all_reduce(strategy->comm, p->value, p->value, (size_t)p->count,
                                      DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN, &work));
        DTRAIN__TRY(dtrain_work_wait(work));
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__walk_back(dtrain_strategy *strategy, uint32_t to);

/* The order matters: units that this rank's backward has not come to are walked, everything is
 * launched before ranks exchange what is missing, and waited for before anything is reported. So a
 * step that fails for a missing gradient has made the same collectives as one that succeeds, and
 * the next step finds all ranks at the same place. Units fetched ahead and not used are waited for,
 * because they read the shards that will be updated. */
static dtrain_result dtrain__finish(dtrain_strategy *strategy)
{
    dtrain_result missing = DTRAIN_OK;
    const dtrain__layout *layout = &strategy->layout;
    const bool last = !strategy->more;
    strategy->weights += strategy->weight;
    strategy->passes++;
    dtrain_result result = dtrain__walk_back(strategy, 0);
    if (result == DTRAIN_OK) result = dtrain__close_buckets(strategy, layout->bucket_count);
    if (result == DTRAIN_OK && last) result = dtrain__tally_start(strategy);
    if (result == DTRAIN_OK && last) missing = dtrain__report_missing(strategy);
    if (result == DTRAIN_OK) result = dtrain__reduce_until(strategy, layout->bucket_count);
    if (result == DTRAIN_OK && layout->grads_on_host) result = dtrain__host_settle(strategy);
    if (result == DTRAIN_OK && last) result = dtrain__tally_end(strategy);
    if (result == DTRAIN_OK && last) result = dtrain__return_grads(strategy);
    if (result == DTRAIN_OK && last) result = dtrain__settle_gathers(strategy);
    if (result == DTRAIN_OK && last) result = dtrain__average_buffers(strategy);
    if (result != DTRAIN_OK) return dtrain__strategy_keep(strategy, result);
    if (missing == DTRAIN_OK && last) strategy->sync_count++;
    dtrain__rewind(strategy, last);
    return missing;
}

DTRAIN_API dtrain_result dtrain_strategy_finish(dtrain_strategy *strategy)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_finish"));
    dtrain_world *world = strategy->world;
    const uint32_t span =
        dtrain__span_begin(world, DTRAIN_SPAN_BACKWARD, "finish", DTRAIN__UNNUMBERED);
    const dtrain_result result = dtrain__finish(strategy);
    dtrain__span_end(world, span);
    return result;
}

DTRAIN_API dtrain_result dtrain_strategy_shards(dtrain_strategy *strategy,
                                                const dtrain_shard **shards, size_t *count)
{
    if (shards) *shards = NULL;
    if (count) *count = 0;
    if (!strategy || !shards || !count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_shards: strategy, shards or count is NULL");
    DTRAIN__TRY(dtrain__between_steps(strategy, "dtrain_strategy_shards"));
    *shards = strategy->shards;
    *count = strategy->shard_count;
    return DTRAIN_OK;
}

/* ---- 5. Publish -------------------------------------------------------------------------------*/

/* Whole values that ranks have updated by slices are gathered here; values that are kept in shards
 * are only forgotten, and the next gather brings them. */
DTRAIN_API dtrain_result dtrain_strategy_publish(dtrain_strategy *strategy)
{
    DTRAIN__TRY(dtrain__between_steps(strategy, "dtrain_strategy_publish"));
    if (!strategy->layout.shards.state) return DTRAIN_OK;
    if (!strategy->layout.shards.params)
        return dtrain__strategy_keep(strategy, dtrain__gather_shards(strategy));
    return dtrain__strategy_keep(strategy, dtrain__forget_units(strategy));
}

/* ---- Units that are walked
 *
 * Kinds that shard gradients or values: a unit is gathered before its forward and its backward, and
 * its gradients are reduced in the turn of the next one. */

/* Empty the buffers of bucket b's gradients. With replicas the buffer is free as soon as the node
 * has reduced it, if what travels between nodes is the shard. */
static dtrain_result dtrain__vacate_buffer(dtrain_strategy *strategy, size_t b)
{
    const bool on_host = strategy->layout.grads_on_host;
    const bool every = strategy->desc.accumulation != DTRAIN_ACCUMULATION_SHARD_EVERY;
    if (!strategy->kind->replicas || on_host || dtrain__reduces_low(strategy) ||
        (every && strategy->accumulated)) {
        DTRAIN__TRY(dtrain__reduce_until(strategy, b + 1));
        return on_host ? dtrain__host_vacate(strategy) : DTRAIN_OK;
    }
    for (size_t i = strategy->oldest; i <= b; i++)
        if (strategy->layout.buckets[i].stage == 1) DTRAIN__TRY(dtrain__reduce_await(strategy, i));
    return DTRAIN_OK;
}

/* Make the alternating buffer of a unit's gradients free for them: what the unit before the last
 * left there has been reduced. A unit without gradients needs no buffer. */
DTRAIN__PRIVATE dtrain_result dtrain__claim_buffer(dtrain_strategy *strategy, uint32_t unit)
{
    if (!strategy->layout.shards.grads || unit == DTRAIN__NONE) return DTRAIN_OK;
    if (strategy->layout.units[unit].trainable == DTRAIN__NONE) return DTRAIN_OK;
    uint32_t *working = &strategy->in_buffer[unit & 1];
    const uint32_t before = *working;
    *working = unit;
    if (before == unit || before == DTRAIN__NONE) return DTRAIN_OK;
    return dtrain__vacate_buffer(strategy, strategy->layout.units[before].trainable);
}

/* Close the gradients of units from `first` on: their backward is over. */
static dtrain_result dtrain__close_units(dtrain_strategy *strategy, uint32_t first)
{
    const dtrain__layout *layout = &strategy->layout;
    size_t end = strategy->launched;
    while (end < layout->bucket_count && layout->buckets[end].unit != DTRAIN__NONE &&
           layout->buckets[end].unit >= first)
        end++;
    return dtrain__close_buckets(strategy, end);
}

/* Walk backward down to the unit `to`. What a unit's turn starts is the same on every rank,
 * whatever gradients this one has or lacks: the gradients of the units behind it are reduced, its
 * values gathered, those of the next one fetched. So a rank may step over units, or end early:
 * the unit that it comes to next, or finish, makes up for them. A forward inside a backward may
 * have taken the slot of the unit that this had come to: then it did so on all ranks. */
static dtrain_result dtrain__walk_back(dtrain_strategy *strategy, uint32_t to)
{
    uint32_t at = strategy->backward;
    if (!dtrain__walks(strategy)) return DTRAIN_OK;
    if (at == DTRAIN__NONE) at = (uint32_t)strategy->layout.unit_count;
    else if (at != strategy->position) DTRAIN__TRY(dtrain__bring_unit(strategy, at, at - 1));
    strategy->entered = false;
    while (at > to) {
        at--;
        DTRAIN__TRY(dtrain__close_units(strategy, at + 1));
        DTRAIN__TRY(dtrain__claim_buffer(strategy, at));
        strategy->backward = at;
        DTRAIN__TRY(dtrain__bring_unit(strategy, at, at - 1)); /* behind 0 there is none */
    }
    return DTRAIN_OK;
}

/* Find the place of a unit. Hosts walk from one neighbour to the next: looking there first makes
 * it constant time. */
static uint32_t dtrain__find_unit(const dtrain_strategy *strategy, uint32_t id)
{
    const dtrain__layout *layout = &strategy->layout;
    const uint32_t count = (uint32_t)layout->unit_count;
    const uint32_t from =
        strategy->position == DTRAIN__NONE || strategy->position == 0 ? 0 : strategy->position - 1;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t at = (from + i) % count;
        if (layout->units[at].id == id) return at;
    }
    return DTRAIN__NONE;
}

/* Check that a unit is due: a forward pass begins with the first and goes on to the next or, to
 * make activations again, to an earlier one; backward goes back, and may step over units. Once it
 * has begun, no unit behind the one that it has come to is due. */
static dtrain_result dtrain__check_order(const dtrain_strategy *strategy, uint32_t at, uint32_t id,
                                         dtrain_pass pass)
{
    const dtrain__unit *units = strategy->layout.units;
    const uint32_t last = strategy->position, due = last == DTRAIN__NONE ? 0 : last + 1;
    const char *const call = "dtrain_strategy_gather";
    if (at == DTRAIN__NONE)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: no parameter belongs to unit %u", call, id);
    if (pass != DTRAIN_PASS_FORWARD && pass != DTRAIN_PASS_BACKWARD)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: pass %d is not a dtrain_pass", call,
                           (int)pass);
    if (at > strategy->backward)
        return dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "%s: unit %u is not due: this backward has come to unit %u, which is "
            "registered before it; %s",
            call, id, units[strategy->backward].id,
            pass == DTRAIN_PASS_BACKWARD
                ? "call dtrain_strategy_finish between two"
                : "to make activations of more than two units again, gather the last "
                  "of them for backward before");
    if (pass == DTRAIN_PASS_BACKWARD || at <= due || !dtrain__walks(strategy)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s: unit %u is not due; due is unit %u%s. Forward gathers units in the "
                       "order in which their first parameters are registered",
                       call, id, units[due].id, due ? "" : ", the first");
}

/* Tell whether a forward makes activations again: inside a backward, or, on a rank that has stepped
 * over all units so far, where it goes back and not to the first. */
static bool dtrain__is_again(const dtrain_strategy *strategy, uint32_t at)
{
    if (strategy->backward != DTRAIN__NONE) return true;
    return at && strategy->position != DTRAIN__NONE && at < strategy->position;
}

/* Gather a unit for a pass and show it. One that is gathered for backward again is only shown. */
static dtrain_result dtrain__gather(dtrain_strategy *strategy, uint32_t at, dtrain_pass pass)
{
    if (pass == DTRAIN_PASS_BACKWARD) {
        DTRAIN__TRY(dtrain__walk_back(strategy, at));
        strategy->entered = true;
    } else {
        if (!strategy->entered && dtrain__is_again(strategy, at))
            DTRAIN__TRY(dtrain__walk_back(strategy, at + 1));
        DTRAIN__TRY(dtrain__bring_unit(strategy, at, at == strategy->backward ? at - 1 : at + 1));
    }
    dtrain__show_unit(strategy, at, true);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_strategy_gather(dtrain_strategy *strategy, uint32_t unit,
                                                dtrain_pass pass)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_gather"));
    const uint32_t at = dtrain__find_unit(strategy, unit);
    DTRAIN__TRY(dtrain__check_order(strategy, at, unit, pass));
    if (!dtrain__walks(strategy)) return DTRAIN_OK;
    return dtrain__strategy_keep(strategy, dtrain__gather(strategy, at, pass));
}

/* Take the pointers away: the values stay where they are until the slot is wanted, and use after
 * release is noticed. */
DTRAIN_API dtrain_result dtrain_strategy_release(dtrain_strategy *strategy, uint32_t unit)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_release"));
    const uint32_t at = dtrain__find_unit(strategy, unit);
    if (at == DTRAIN__NONE)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_release: no parameter belongs to unit %u", unit);
    if (at == strategy->backward) strategy->entered = false;
    dtrain__show_unit(strategy, at, false);
    return DTRAIN_OK;
}
