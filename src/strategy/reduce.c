/* How gradients become their mean: ready, bucket, steps, finish, publish
 *
 * The example is DDP. The numbers 1 to 4 name the sections below.
 *
 *       the tape or the host        on this rank                           among the ranks
 *
 *     1 dtrain_strategy_ready(p)    dtrain__mark: count p in its bucket
 *     2                             dtrain__launch_buckets: if all         all-reduce of the bucket
 *                                   gradients of the bucket are marked,    starts
 *                                   begin its first step
 *       backward of the next layer
 *       dtrain_strategy_ready(q)    dtrain__progress: if a step is done,   all-reduce is done
 *                                   end it and begin the next
 *     3 dtrain_strategy_finish      dtrain__close_buckets: fill gradients
 *                                   that were not marked, launch the rest
 *                                   dtrain__reduce_until: wait             gradients are the mean
 *                                   counts.c: mean over samples            all-reduce of weights
 *       clipping, optimizer         on shards of dtrain_strategy_shards
 *     4 dtrain_strategy_publish     DDP: nothing to do                     all-gather of shards
 *
 * A bucket goes through its list of steps, made at create (steps.c); a step of the training is
 * called training step. DDP has one step, ALL_REDUCE. Most kinds that shard have REDUCE_SCATTER and
 * KEEP. These three stand at the end of this file, steps of other features in separate files.
 * units.c gathers and releases sharded values.
 *
 * Why it cannot deadlock: every rank starts the collectives of a backward in the order of buckets
 * 0, 1, 2, ..., whatever the order in which it calls ready, and starting a collective never waits.
 * A bucket is complete when all its gradients are marked; it waits for the buckets before it. A
 * second step starts when the first is done, at different moments on different ranks. So each step
 * that has collectives has a separate communicator, and all buckets use it in bucket order.
 *
 * Why bits do not depend on kind, overlap, bucket size or copying of gradients into buckets: each
 * element is the sum over the ranks, in rank order, times 1/N. (Other orders and bits: HYBRID_SHARD
 * and hierarchical, node by node; sharded gradients, ranks before micro-batches.) */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/steps_internal.h"

static dtrain_result dtrain__launch_buckets(dtrain_strategy *strategy, size_t end);
static dtrain_result dtrain__progress(dtrain_strategy *strategy);

/* ---- Before a backward ------------------------------------------------------------------------*/

/* Prepare the next backward or, with step_done, the next training step. `pending` of an entry or
 * bucket counts the calls of ready that are still to come; dtrain__mark decrements it. grad_written
 * tells the next backward to add to a gradient instead of overwriting it. It is cleared after every
 * backward if the bucket has shards_grads, otherwise after the training step. */
DTRAIN__PRIVATE void dtrain__rewind(dtrain_strategy *strategy, bool step_done)
{
    dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count; i++) {
        dtrain__entry *entry = &layout->entries[i];
        entry->marked = false;
        entry->seen = entry->seen && !step_done;
        entry->pending = entry->uses;
        if (step_done || (entry->bucket && entry->bucket->shards_grads))
            strategy->params[i].state.grad_written = false;
    }
    for (size_t b = 0; b < layout->bucket_count; b++) {
        layout->buckets[b].pending = layout->buckets[b].uses;
        layout->buckets[b].step = 0;
    }
    strategy->launched = strategy->oldest = strategy->marked_count = 0;
    strategy->in_buffer[0] = strategy->in_buffer[1] = strategy->backward = DTRAIN__NONE;
    strategy->accumulated = !step_done;
    strategy->entered = false;
    strategy->notes.weight = 1;
    if (!step_done) return;
    strategy->weights = 0;
    strategy->passes = 0;
    strategy->sums_known = 0;
}

/* ---- 1. Ready ---------------------------------------------------------------------------------*/

/* True if a bucket is reduced in this backward: one with shards_grads in every backward, whole
 * gradients in the last of a training step; until then they add up on each rank. */
static bool dtrain__reduces_now(const dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    return bucket->trainable && (bucket->shards_grads || !strategy->more);
}

/* Copy a gradient from the program's array, of any type, into its bucket or, with `back`, out of
 * it. Nothing is copied if the array is the gradient's place in the bucket. */
static dtrain_result dtrain__move_grad(dtrain_strategy *strategy, const dtrain_param *storage,
                                       bool back)
{
    const dtrain__entry *entry = &strategy->layout.entries[storage->state.index];
    float *inside = entry->bucket->grads + entry->offset;
    const uint32_t dtype = strategy->layout.dtype;
    void *array = dtrain__host_grad(storage);
    if (array == inside) return DTRAIN_OK;
    if (back)
        return dtrain__convert(strategy, storage->count, inside, dtype, array, storage->dtype);
    return dtrain__convert(strategy, storage->count, array, storage->dtype, inside, dtype);
}

/* Count a mark. The last mark of a shared gradient moves it into its bucket, if that is reduced in
 * this backward. Launch complete buckets, unless finish or the walk back does so (units.c). */
static dtrain_result dtrain__mark(dtrain_strategy *strategy, size_t index)
{
    dtrain__layout *layout = &strategy->layout;
    dtrain_param *storage = strategy->params[index].state.storage;
    dtrain__entry *shared = &layout->entries[storage->state.index];
    dtrain__bucket *bucket = shared->bucket;
    layout->entries[index].marked = true;
    strategy->marked_count++;
    bucket->pending--;
    if (--shared->pending == 0 && dtrain__reduces_now(strategy, bucket))
        DTRAIN__TRY(dtrain__move_grad(strategy, storage, false));
    if (!strategy->desc.no_overlap && !dtrain__walks_units(strategy))
        DTRAIN__TRY(dtrain__launch_buckets(strategy, layout->untied));
    return dtrain__progress(strategy);
}

/* Refuse to mark what is frozen, is on another rank's stage, is marked already, or has no memory: a
 * sharded gradient has it from its unit's gather for backward to the next unit's. */
static dtrain_result dtrain__check_mark(const dtrain_strategy *strategy, size_t index)
{
    const dtrain__entry *entry = &strategy->layout.entries[index];
    const dtrain__bucket *bucket = entry->bucket;
    const char *why = NULL;
    if (!entry->local)
        why = "belongs to a stage of another rank of the pipeline axis, which alone marks it";
    else if (!entry->trainable) why = "is frozen";
    else if (entry->marked)
        why = "is marked twice in one backward; call dtrain_strategy_finish between two";
    else if (bucket->shards_grads && bucket->unit != DTRAIN__NONE &&
             bucket->unit != strategy->backward)
        why = "is marked outside its unit's backward, which begins with dtrain_strategy_gather for "
              "DTRAIN_PASS_BACKWARD and ends with that of another unit";
    if (!why) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE, "dtrain_strategy_ready: parameter %zu (\"%s\") %s",
                       index, dtrain__short(strategy->params[index].name), why);
}

/* Mark a gradient. The tape sets grad_written at its first write; for a program with its own
 * backward this function does. */
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

/* ---- 2. Launch, and the steps of a bucket -----------------------------------------------------*/

/* Count the steps of a bucket in this backward. */
static uint32_t dtrain__step_count(const dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    return strategy->more ? bucket->steps->early_count : bucket->steps->count;
}

/* True if a later step of this bucket has a collective. */
static bool dtrain__has_next(const dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    for (uint32_t i = bucket->step; i < dtrain__step_count(strategy, bucket); i++)
        if (bucket->steps->list[i].comm) return true;
    return false;
}

/* Begin steps until one has started collectives; after the last step the bucket is reduced. */
static dtrain_result dtrain__begin_next(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    while (bucket->step < dtrain__step_count(strategy, bucket)) {
        const dtrain__step *step = &bucket->steps->list[bucket->step++];
        bucket->comm = step->comm;
        DTRAIN__TRY(step->begin(strategy, bucket));
        if (step->comm) return DTRAIN_OK;
    }
    bucket->step = DTRAIN__REDUCED;
    return DTRAIN_OK;
}

/* Wait for the step under way, end it, and begin the next. In DDP: wait for the all-reduce. */
DTRAIN__PRIVATE dtrain_result dtrain__await_step(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    if (bucket->step == DTRAIN__REDUCED) return DTRAIN_OK;
    const dtrain__step *step = &bucket->steps->list[bucket->step - 1];
    DTRAIN__TRY(dtrain__wait_works(strategy, bucket->reduces));
    if (step->end) DTRAIN__TRY(step->end(strategy, bucket));
    return dtrain__begin_next(strategy, bucket);
}

/* Launch buckets below `end` in their order, up to the first that is not complete. In lockstep
 * (NCCL) first wait for each bucket under way, and begin its next collective. A bucket at its last
 * collective is left out: backward would wait for it and could start nothing. */
static dtrain_result dtrain__launch_buckets(dtrain_strategy *strategy, size_t end)
{
    dtrain__bucket *buckets = strategy->layout.buckets;
    for (; strategy->launched < end; strategy->launched++) {
        dtrain__bucket *bucket = &buckets[strategy->launched];
        if (bucket->pending) break;
        bucket->step = DTRAIN__REDUCED;
        if (!dtrain__reduces_now(strategy, bucket)) continue;
        for (size_t b = strategy->oldest; strategy->lockstep && b < strategy->launched; b++)
            if (buckets[b].step != DTRAIN__REDUCED && dtrain__has_next(strategy, &buckets[b]))
                DTRAIN__TRY(dtrain__await_step(strategy, &buckets[b]));
        bucket->step = 0;
        DTRAIN__TRY(dtrain__begin_next(strategy, bucket));
    }
    return DTRAIN_OK;
}

/* Take every bucket under way as far as it can go without waiting; in lockstep do nothing. There is
 * no progress thread, so every ready calls this. A bucket begins a step only after all earlier
 * buckets have begun it. */
static dtrain_result dtrain__progress(dtrain_strategy *strategy)
{
    uint32_t slowest = DTRAIN__REDUCED; /* smallest step of the buckets so far */
    for (size_t b = strategy->oldest; b < strategy->launched && !strategy->lockstep; b++) {
        dtrain__bucket *bucket = &strategy->layout.buckets[b];
        bool done = true;
        while (bucket->step != DTRAIN__REDUCED && done) {
            if (bucket->step >= slowest && dtrain__has_next(strategy, bucket)) break;
            for (size_t i = 0; i < strategy->works_per_bucket && done; i++)
                DTRAIN__TRY(dtrain_work_test(bucket->reduces[i], &done));
            if (done) DTRAIN__TRY(dtrain__await_step(strategy, bucket));
        }
        if (bucket->step < slowest) slowest = bucket->step;
        if (b == strategy->oldest && bucket->step == DTRAIN__REDUCED) strategy->oldest++;
        if (!done && bucket->steps->collectives == 1) break; /* later ones are not done either */
    }
    return DTRAIN_OK;
}

/* Wait until all buckets below `end`, which must be launched, are reduced: wait for the oldest
 * while dtrain__progress moves the others; in lockstep wait for one step of each, in turns. */
DTRAIN__PRIVATE dtrain_result dtrain__reduce_until(dtrain_strategy *strategy, size_t end)
{
    dtrain__bucket *buckets = strategy->layout.buckets;
    while (strategy->oldest < end) {
        DTRAIN__TRY(dtrain__progress(strategy));
        for (size_t b = strategy->oldest; b < end; b++) {
            DTRAIN__TRY(dtrain__await_step(strategy, &buckets[b]));
            if (!strategy->lockstep) break;
        }
        while (strategy->oldest < end && buckets[strategy->oldest].step == DTRAIN__REDUCED)
            strategy->oldest++;
    }
    return DTRAIN_OK;
}

/* ---- 3. Finish --------------------------------------------------------------------------------*/

/* Complete and launch the buckets below `end`. A gradient that was not marked keeps the value of an
 * earlier micro-batch or of a marked alias, or becomes zero. */
DTRAIN__PRIVATE dtrain_result dtrain__close_buckets(dtrain_strategy *strategy, size_t end)
{
    dtrain__layout *layout = &strategy->layout;
    while (strategy->launched < end) {
        dtrain__bucket *bucket = &layout->buckets[strategy->launched];
        const bool incomplete = bucket->pending && dtrain__reduces_now(strategy, bucket);
        bucket->pending = 0;
        for (uint32_t i = bucket->first_param; incomplete && i <= bucket->last_param; i++) {
            const dtrain__entry *entry = &layout->entries[i];
            const dtrain_param *p = &strategy->params[i];
            const size_t bytes = (size_t)dtrain__words(layout, p->count) * sizeof(float);
            if (!entry->pending || entry->bucket != bucket) continue;
            DTRAIN__TRY(p->state.grad_written
                            ? dtrain__move_grad(strategy, p, false)
                            : strategy->device->ops->zero(strategy->device,
                                                          bucket->grads + entry->offset, bytes));
        }
        DTRAIN__TRY(dtrain__launch_buckets(strategy, end));
    }
    return DTRAIN_OK;
}

/* End a backward. A missing gradient changes no collective, so all ranks continue at the same
 * collective; its error is *missing. At last wait for units that were fetched ahead: their
 * collectives read shards that the update overwrites. */
static dtrain_result dtrain__end_backward(dtrain_strategy *strategy, dtrain_result *missing)
{
    const size_t all = strategy->layout.bucket_count;
    const bool last = !strategy->more;
    strategy->weights += strategy->notes.weight;
    strategy->passes++;
    DTRAIN__TRY(dtrain__walk_back(strategy, 0));
    DTRAIN__TRY(dtrain__close_buckets(strategy, all));
    if (last) DTRAIN__TRY(dtrain__counts_start(strategy));
    if (last) *missing = dtrain__report_missing(strategy);
    DTRAIN__TRY(dtrain__reduce_until(strategy, all));
    DTRAIN__TRY(dtrain__settle_steps(strategy, true));
    if (!last) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__counts_end(strategy));
    for (size_t i = 0; i < strategy->shard_count; i++) { /* whole: copy to the program's arrays */
        const dtrain_param *p = strategy->shards[i].param;
        if (!dtrain__shard_bucket(&strategy->layout, p->state.index))
            DTRAIN__TRY(dtrain__move_grad(strategy, p, true));
    }
    DTRAIN__TRY(dtrain__settle_gathers(strategy));
    return dtrain__average_buffers(strategy);
}

DTRAIN_API dtrain_result dtrain_strategy_finish(dtrain_strategy *strategy)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_finish"));
    dtrain_world *world = strategy->world;
    const bool last = !strategy->more;
    dtrain_result missing = DTRAIN_OK;
    const uint32_t span =
        dtrain__span_begin(world, DTRAIN_SPAN_BACKWARD, "finish", DTRAIN__UNNUMBERED);
    const dtrain_result result =
        dtrain__strategy_keep(strategy, dtrain__end_backward(strategy, &missing));
    dtrain__span_end(world, span);
    DTRAIN__TRY(result);
    if (missing == DTRAIN_OK && last) strategy->notes.sync_count++;
    dtrain__rewind(strategy, last);
    return missing;
}

/* ---- 4. Publish -------------------------------------------------------------------------------*/

/* Publish updated values. Kinds that keep whole values but update shards (ZERO1, SHARD_GRAD_OP)
 * gather the shards. Kinds that keep sharded values evict the old values from their slots, and the
 * next gather brings the new ones. Then copy whole values to the program's arrays, of any type. */
DTRAIN_API dtrain_result dtrain_strategy_publish(dtrain_strategy *strategy)
{
    const dtrain__classes *shards = &strategy->layout.shards;
    dtrain_result result = DTRAIN_OK;
    DTRAIN__TRY(dtrain__between_steps(strategy, "dtrain_strategy_publish"));
    if (shards->params) result = dtrain__evict_units(strategy);
    else if (shards->state) result = dtrain__gather_shards(strategy);
    if (result == DTRAIN_OK) result = dtrain__copy_host_values(strategy, true);
    return dtrain__strategy_keep(strategy, result);
}

/* ---- The step of DDP --------------------------------------------------------------------------*/

/* ALL_REDUCE: replace the gradients of a bucket by their mean; if hierarchical, this rank's slice
 * by its sum over nodes (steps->op). The gradients are sent, or their rounded copy (wire.c). */
DTRAIN__PRIVATE dtrain_result dtrain__all_reduce_begin(dtrain_strategy *strategy,
                                                       dtrain__bucket *bucket)
{
    void *wire = dtrain__wire(bucket, bucket->slice_first);
    dtrain__label(strategy, bucket, "bucket");
    return dtrain_all_reduce(bucket->comm, wire, wire,
                             (size_t)dtrain__elements(&strategy->layout, bucket->slice_count),
                             dtrain__wire_dtype(strategy), bucket->steps->op, bucket->reduces);
}

/* ---- The steps of shards
 *
 *     gradients -> REDUCE_SCATTER -> result -> KEEP -> shard
 *
 * The result of the first micro-batch is received in the shard. The result of a later micro-batch,
 * or of a shard in host memory, is received in this rank's part of the buffer that holds the
 * gradients. From there it is added to the shard, or copied (offload.c). */

/* Return the address where this backward's result is received or widened to (wire.c). */
DTRAIN__PRIVATE float *dtrain__reduce_result(const dtrain_strategy *strategy,
                                             const dtrain__bucket *bucket)
{
    if (bucket->shards_grads && (strategy->accumulated || bucket->grad_on_host))
        return bucket->grads + bucket->shard_first;
    return bucket->grad_shard;
}

/* REDUCE_SCATTER: each rank receives its shard of the mean, or of the sum (steps->op). */
DTRAIN__PRIVATE dtrain_result dtrain__reduce_scatter_begin(dtrain_strategy *strategy,
                                                           dtrain__bucket *bucket)
{
    dtrain__label(strategy, bucket, "bucket");
    return dtrain_reduce_scatter(bucket->comm, dtrain__wire(bucket, bucket->slice_first),
                                 dtrain__wire_end(strategy, bucket),
                                 (size_t)dtrain__elements(&strategy->layout, bucket->shard_count),
                                 dtrain__wire_dtype(strategy), bucket->steps->op, bucket->reduces);
}

/* KEEP: add the result of a later micro-batch to the shard. */
DTRAIN__PRIVATE dtrain_result dtrain__keep_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const float *result = dtrain__reduce_result(strategy, bucket);
    const dtrain_dtype dtype = (dtrain_dtype)strategy->layout.dtype;
    const int64_t count = dtrain__elements(&strategy->layout, bucket->shard_count);
    const dtrain_add_args add = {count, bucket->grad_shard, result, bucket->grad_shard, dtype,
                                 dtype};
    if (result == bucket->grad_shard || count == 0) return DTRAIN_OK;
    return strategy->device->ops->add(strategy->device, &add);
}
