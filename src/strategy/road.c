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
 * Why it cannot deadlock: every rank starts the collectives of a backward in the order of buckets
 * 0, 1, 2, ..., whatever the order in which it calls ready, and starting one never waits. A bucket
 * that is complete early waits for those before it. In DDP a bucket has one collective. Where it
 * has several in a row, the next one starts when the one before is done, at a moment that differs
 * between ranks: so each step of a way has a communicator of its own, on which all buckets go in
 * their order.
 *
 * Why the bits depend neither on the kind nor on overlap, bucket size or copying: each element is
 * the sum over the ranks, in rank order, times 1/N, wherever it lies. (Where nodes are summed first
 * the order is another: HYBRID_SHARD and hierarchical have bits of their own.) */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/ways_internal.h"

/* The road, station by station. */
static dtrain_result dtrain__launch_buckets(dtrain_strategy *strategy, size_t end);
static dtrain_result dtrain__reduce_start(dtrain_strategy *strategy, dtrain__bucket *bucket);
static dtrain_result dtrain__progress(dtrain_strategy *strategy);
static bool dtrain__walks(const dtrain_strategy *strategy);
static dtrain_result dtrain__walk_back(dtrain_strategy *strategy, uint32_t to);

/* ---- Before a backward ------------------------------------------------------------------------*/

/* Prepare a new backward, or (step_done) a new step. `pending`, of each gradient and each bucket,
 * is the number of calls of ready to come; dtrain__mark counts it down. grad_written tells the next
 * backward to add to a gradient: it is cleared in every backward where the reduced shard is kept
 * elsewhere, and for whole gradients when the step ends. */
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
        layout->buckets[b].stage = DTRAIN__REDUCE_IDLE;
    }
    strategy->launched = strategy->oldest = strategy->marked_count = 0;
    strategy->in_buffer[0] = strategy->in_buffer[1] = strategy->backward = DTRAIN__NONE;
    strategy->accumulated = !step_done;
    strategy->entered = false;
    strategy->weight = 1;
    if (!step_done) return;
    strategy->weights = 0;
    strategy->passes = 0;
    strategy->sums_known = 0;
}

/* ---- 1. Ready ---------------------------------------------------------------------------------*/

/* Tell whether a bucket is reduced in this backward. Whole gradients add up on each rank until the
 * last micro-batch of a step; gradients of which a rank keeps only a shard are reduced in every
 * backward. */
static bool dtrain__travels(const dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    return bucket->trainable && (bucket->shards_grads || !strategy->more);
}

/* Copy a gradient from an array of the host's own into its bucket, or back. One that lives in the
 * bucket stays there. */
static dtrain_result dtrain__move_grad(dtrain_strategy *strategy, const dtrain_param *storage,
                                       bool back)
{
    const dtrain__entry *entry = &strategy->layout.entries[storage->state.index];
    float *inside = entry->bucket->grads + entry->offset;
    const size_t bytes = (size_t)storage->count * sizeof(float);
    if (storage->grad == inside || bytes == 0) return DTRAIN_OK;
    return dtrain_device_copy(strategy->device, back ? storage->grad : inside,
                              back ? inside : storage->grad, bytes);
}

/* Count the buckets that may be launched in a backward. Those of weights that stages of other ranks
 * have too come last and wait for finish: a stage that began their sum in the middle of a schedule
 * would, where collectives run in the order of their start, wait for a stage that waits for a
 * message from it. */
static size_t dtrain__untied(const dtrain__layout *layout)
{
    size_t count = layout->bucket_count;
    while (count > 0 && layout->buckets[count - 1].tied) count--;
    return count;
}

/* Count a final gradient, in constant time. It moves into its bucket when the last of the aliases
 * that share it is marked; then every bucket that is complete may be launched. */
static dtrain_result dtrain__mark(dtrain_strategy *strategy, size_t index)
{
    dtrain__layout *layout = &strategy->layout;
    dtrain_param *storage = strategy->params[index].state.storage;
    dtrain__entry *shared = &layout->entries[storage->state.index];
    dtrain__bucket *bucket = shared->bucket;
    layout->entries[index].marked = true;
    strategy->marked_count++;
    bucket->pending--;
    if (--shared->pending == 0 && dtrain__travels(strategy, bucket))
        DTRAIN__TRY(dtrain__move_grad(strategy, storage, false));
    if (!strategy->desc.no_overlap && !dtrain__walks(strategy))
        DTRAIN__TRY(dtrain__launch_buckets(strategy, dtrain__untied(layout)));
    return dtrain__progress(strategy);
}

/* Refuse a second mark in one backward, and one while the gradient has no memory: the gradients of
 * a unit that is walked have theirs from its gather to the gather of another unit. */
static dtrain_result dtrain__check_mark(const dtrain_strategy *strategy, size_t index)
{
    const dtrain__entry *entry = &strategy->layout.entries[index];
    const dtrain__bucket *bucket = entry->bucket;
    const char *why = NULL;
    if (!entry->here)
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

/* Set grad_written for a host with its own backward; the tape has set it at its first write. */
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

/* Launch buckets below `end` in their order, up to the first that is not complete. */
static dtrain_result dtrain__launch_buckets(dtrain_strategy *strategy, size_t end)
{
    for (; strategy->launched < end; strategy->launched++) {
        dtrain__bucket *bucket = &strategy->layout.buckets[strategy->launched];
        if (bucket->pending) break;
        bucket->stage = DTRAIN__REDUCED;
        if (dtrain__travels(strategy, bucket)) DTRAIN__TRY(dtrain__reduce_start(strategy, bucket));
    }
    return DTRAIN_OK;
}

/* ---- 3. Reduce --------------------------------------------------------------------------------*/

/* Return the way of whole or of sharded buckets: its steps, as ways.c has chosen them, and a NULL.
 * In DDP the only step is the all-reduce below. Tied buckets have one step more before it. */
static const dtrain__step *const *dtrain__way_of(const dtrain_strategy *strategy, bool sharded,
                                                 bool tied)
{
    const bool compressed = strategy->sync_count >= strategy->compressed_from;
    return strategy->ways[sharded      ? DTRAIN__SHARDED
                          : compressed ? DTRAIN__COMPRESSED
                                       : DTRAIN__WHOLE] +
           !tied;
}

/* Return step number `stage` of a bucket's way, counted from 1; NULL: there are fewer. */
static const dtrain__step *dtrain__step_of(const dtrain_strategy *strategy,
                                           const dtrain__bucket *bucket, uint32_t stage)
{
    const dtrain__step *step = dtrain__way_of(strategy, bucket->sharded, bucket->tied)[stage - 1];
    return step && step->flags & DTRAIN__LAST_ONLY && strategy->more ? NULL : step;
}

/* Wait for the collectives of a bucket's step, end the step and begin the next one, if any. In DDP:
 * wait for the all-reduce. */
static dtrain_result dtrain__reduce_await(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    if (bucket->stage == DTRAIN__REDUCED) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__wait_works(strategy, bucket->reduces));
    const dtrain__step *done = dtrain__step_of(strategy, bucket, bucket->stage);
    const dtrain__step *next = dtrain__step_of(strategy, bucket, bucket->stage + 1);
    if (done->end) DTRAIN__TRY(done->end(strategy, bucket));
    bucket->stage = next ? bucket->stage + 1 : (uint32_t)DTRAIN__REDUCED;
    return next && next->begin ? next->begin(strategy, bucket) : DTRAIN_OK;
}

/* Tell whether second and later steps start in lockstep: only at launches and in finish, which come
 * in the same order on every rank. NCCL runs collectives in the order in which they were started:
 * if ranks started a step whenever the one before is done, their orders would differ, and they
 * would wait for each other in a circle. */
static bool dtrain__in_lockstep(const dtrain_strategy *strategy)
{
    return strategy->groups.data->ops->launch_ordered &&
           (dtrain__way_of(strategy, false, strategy->tied)[1] ||
            dtrain__way_of(strategy, true, strategy->tied)[1]);
}

/* Take the buckets under way below `end` one step further, waiting for the step that each is at. */
static dtrain_result dtrain__advance(dtrain_strategy *strategy, size_t end)
{
    for (size_t b = strategy->oldest; b < end; b++)
        DTRAIN__TRY(dtrain__reduce_await(strategy, &strategy->layout.buckets[b]));
    return DTRAIN_OK;
}

/* Begin the next step of the buckets under way that have one. Those at their last step go on: a
 * wait here would be one of what backward computes next. */
static dtrain_result dtrain__advance_ways(dtrain_strategy *strategy)
{
    for (size_t b = strategy->oldest; b < strategy->launched; b++) {
        dtrain__bucket *bucket = &strategy->layout.buckets[b];
        if (bucket->stage != DTRAIN__REDUCED &&
            dtrain__step_of(strategy, bucket, bucket->stage + 1))
            DTRAIN__TRY(dtrain__reduce_await(strategy, bucket));
    }
    return DTRAIN_OK;
}

/* Begin the first step of a bucket's way; in lockstep, first take the buckets under way a step
 * further. */
static dtrain_result dtrain__reduce_start(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    if (dtrain__in_lockstep(strategy)) DTRAIN__TRY(dtrain__advance_ways(strategy));
    bucket->stage = 1;
    const dtrain__step *first = dtrain__step_of(strategy, bucket, 1);
    if (first->begin) DTRAIN__TRY(first->begin(strategy, bucket));
    const bool at_once = first->flags & DTRAIN__BRIEF && dtrain__in_lockstep(strategy);
    return at_once ? dtrain__reduce_await(strategy, bucket) : DTRAIN_OK;
}

/* Test the buckets under way, and take those whose collectives are done one step further, without
 * waiting. There is no progress thread: collectives move only in such calls, one at every ready,
 * which are a layer's backward apart; each reads the clock twice and one cache line per rank. A
 * bucket begins a step only after all buckets before it have. */
static dtrain_result dtrain__progress(dtrain_strategy *strategy)
{
    uint32_t slowest = DTRAIN__REDUCED; /* stage of the slowest bucket so far */
    bool done = true;
    if (dtrain__in_lockstep(strategy)) return DTRAIN_OK;
    for (size_t b = strategy->oldest; b < strategy->launched; b++) {
        dtrain__bucket *bucket = &strategy->layout.buckets[b];
        const bool chain = dtrain__way_of(strategy, bucket->sharded, bucket->tied)[1] != NULL;
        while (bucket->stage != DTRAIN__REDUCED) {
            if (bucket->stage >= slowest && dtrain__step_of(strategy, bucket, bucket->stage + 1))
                break;
            done = true;
            for (size_t i = 0; i < strategy->works_per_bucket && done; i++)
                DTRAIN__TRY(dtrain_work_test(bucket->reduces[i], &done));
            if (!done) break;
            DTRAIN__TRY(dtrain__reduce_await(strategy, bucket));
        }
        if (bucket->stage < slowest) slowest = bucket->stage;
        if (b == strategy->oldest && bucket->stage == DTRAIN__REDUCED) strategy->oldest++;
        if (!done && !chain) break;
    }
    return DTRAIN_OK;
}

/* Wait until all buckets below `end` are reduced, one after another, while those behind go on; in
 * lockstep all of them step by step. */
static dtrain_result dtrain__reduce_until(dtrain_strategy *strategy, size_t end)
{
    const dtrain__bucket *buckets = strategy->layout.buckets;
    while (strategy->oldest < end) {
        DTRAIN__TRY(dtrain__progress(strategy));
        const size_t next = strategy->oldest < end ? strategy->oldest + 1 : end;
        DTRAIN__TRY(dtrain__advance(strategy, dtrain__in_lockstep(strategy) ? end : next));
        while (strategy->oldest < end && buckets[strategy->oldest].stage == DTRAIN__REDUCED)
            strategy->oldest++;
    }
    return DTRAIN_OK;
}

/* ---- 3. Reduce: the all-reduce, and what other steps take from it -----------------------------*/

/* Tell whether gradients travel rounded, in low_grads. */
DTRAIN__PRIVATE bool dtrain__reduces_low(const dtrain_strategy *strategy)
{
    return strategy->desc.reduce_dtype != DTRAIN_DTYPE_F32;
}

/* Tell whether two collectives in a row make the mean of a bucket (over nodes, or replicas) as sums
 * that dtrain__scale multiplies by 1/N once. In fp16 a sum may overflow where the mean does not:
 * there each collective makes a mean. */
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

/* Multiply x (count elements of the bucket) by 1/N where collectives have summed. */
DTRAIN__PRIVATE dtrain_result dtrain__scale(dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                            float *x, int64_t count)
{
    dtrain_axpby_args mean;
    if (count == 0 || !dtrain__sums_first(strategy, bucket)) return DTRAIN_OK;
    memset(&mean, 0, sizeof mean);
    mean.count = count;
    mean.a = 1.0f / (float)strategy->layout.all;
    mean.x = mean.y = x;
    mean.dtype = DTRAIN_DTYPE_F32;
    return strategy->device->ops->axpby(strategy->device, &mean);
}

/* Set *wire to x (count elements of the bucket, from `first` on) as reduce_dtype. */
DTRAIN__PRIVATE dtrain_result dtrain__to_wire(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                              float *x, int64_t first, int64_t count, void **wire)
{
    *wire = x;
    if (!dtrain__reduces_low(strategy)) return DTRAIN_OK;
    *wire = bucket->low_grads + first;
    return dtrain__convert(strategy, count, x, DTRAIN_DTYPE_F32, *wire,
                           strategy->desc.reduce_dtype);
}

/* Convert what has arrived back to x (count elements of the bucket, from `first` on); after the
 * last collective of a way, make it the mean. */
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

/* ALL_REDUCE, the one step of DDP: the gradients of a bucket (with several nodes this rank's slice
 * of them) = their mean. */
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

/* Complete a bucket in which not all gradients were marked: one that an earlier micro-batch or
 * another use has written counts as it is, any other one is zero. */
static dtrain_result dtrain__close_bucket(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    dtrain__layout *layout = &strategy->layout;
    const bool waits = bucket->pending && dtrain__travels(strategy, bucket);
    bucket->pending = 0;
    for (uint32_t i = bucket->first_param; waits && i <= bucket->last_param; i++) {
        const dtrain__entry *entry = &layout->entries[i];
        const dtrain_param *p = &strategy->params[i];
        if (!entry->pending || entry->bucket != bucket) continue;
        if (p->state.grad_written) DTRAIN__TRY(dtrain__move_grad(strategy, p, false));
        else
            DTRAIN__TRY(strategy->device->ops->zero(strategy->device, bucket->grads + entry->offset,
                                                    (size_t)p->count * sizeof(float)));
    }
    return DTRAIN_OK;
}

/* Complete and launch the buckets below `end`, one by one: two buckets may share a buffer, which
 * may be zeroed for the second only after the first has been launched. */
static dtrain_result dtrain__close_buckets(dtrain_strategy *strategy, size_t end)
{
    while (strategy->launched < end) {
        DTRAIN__TRY(dtrain__close_bucket(strategy, &strategy->layout.buckets[strategy->launched]));
        DTRAIN__TRY(dtrain__launch_buckets(strategy, end));
    }
    return DTRAIN_OK;
}

/* Report parameters for which ready was not called in this step, at most eight by name. A warning
 * names a parameter once; on a rank without samples nothing is missing. All buckets have been
 * launched, so no other rank waits for this one. */
static dtrain_result dtrain__report_missing(dtrain_strategy *strategy)
{
    const char *const call = "dtrain_strategy_finish";
    const bool strict = strategy->desc.missing_gradient == DTRAIN_MISSING_GRADIENT_ERROR;
    char names[860] = "";
    size_t count = 0, used = 0;
    dtrain_result result = DTRAIN_OK;
    for (size_t i = 0; i < strategy->param_count && strategy->weights > 0; i++) {
        dtrain__entry *entry = &strategy->layout.entries[i];
        const dtrain_param *p = &strategy->params[i];
        if (!entry->trainable || !entry->here || entry->seen || (entry->warned && !strict))
            continue;
        /* frozen in this step, as the program may: its gradient is not missing */
        if ((p->flags | p->state.storage->flags) & DTRAIN_PARAM_FROZEN) continue;
        entry->warned = true;
        if (count++ < 8) /* 103 bytes each: there is room for them */
            used += (size_t)snprintf(names + used, sizeof names - used, "%s\"%s\"",
                                     used ? ", " : "", dtrain__short(p->name));
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
    return dtrain__agree(strategy->groups.all, result);
}

/* Copy whole gradients back to the arrays of a host that has its own. */
static dtrain_result dtrain__return_grads(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->shard_count; i++) {
        const dtrain_param *p = strategy->shards[i].param;
        if (dtrain__shard_bucket(layout, p->state.index)) continue;
        DTRAIN__TRY(dtrain__move_grad(strategy, p, true));
    }
    return DTRAIN_OK;
}

/* Average the model's buffers (DTRAIN_PARAM_BUFFER) over the ranks. Running averages are linear:
 * the mean of the ranks' averages is the average over all their batches. */
static dtrain_result dtrain__average_buffers(dtrain_strategy *strategy)
{
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        dtrain_work *work = NULL;
        if (!(p->flags & DTRAIN_PARAM_BUFFER) || p->state.storage != p || !dtrain__has_memory(p))
            continue;
        DTRAIN__TRY(dtrain_all_reduce(strategy->groups.data, p->value, p->value, (size_t)p->count,
                                      DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN, &work));
        DTRAIN__TRY(dtrain_work_wait(work));
    }
    return DTRAIN_OK;
}

/* End a backward. The order of these calls matters. Ranks exchange which gradients are missing
 * after each has walked the units that its backward has stepped over and launched all buckets, and
 * an error for a missing one is returned after all buckets were waited for. So a step that fails
 * for a missing gradient has made the same collectives as one that succeeds, and the next step
 * finds all ranks at the same place. Units that were fetched ahead are waited for, because the
 * update overwrites the shards that their collectives read. */
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
    DTRAIN__GIVEN("dtrain_strategy_shards", strategy);
    DTRAIN__GIVEN("dtrain_strategy_shards", shards);
    DTRAIN__GIVEN("dtrain_strategy_shards", count);
    DTRAIN__TRY(dtrain__between_steps(strategy, "dtrain_strategy_shards"));
    *shards = strategy->shards;
    *count = strategy->shard_count;
    return DTRAIN_OK;
}

/* ---- 5. Publish -------------------------------------------------------------------------------*/

/* Gather values that are kept whole and were updated in shards (ZERO1, SHARD_GRAD_OP). Where values
 * are kept in shards, evict the old ones from their slots: the next gather brings the new ones. */
DTRAIN_API dtrain_result dtrain_strategy_publish(dtrain_strategy *strategy)
{
    DTRAIN__TRY(dtrain__between_steps(strategy, "dtrain_strategy_publish"));
    if (!strategy->layout.shards.state) return DTRAIN_OK;
    if (!strategy->layout.shards.params)
        return dtrain__strategy_keep(strategy, dtrain__gather_shards(strategy));
    return dtrain__strategy_keep(strategy, dtrain__forget_units(strategy));
}

/* ---- Gather, release, and the walk back
 *
 * Kinds that shard gradients or values walk units. A unit is gathered before its forward and before
 * its backward; its gradients, made in one of two alternating buffers, are reduced when backward
 * comes to the next unit:
 *
 *     backward       unit 3        unit 2        unit 1        unit 0        finish
 *     buffer 1       [ 3 made ]    [ 3 travels ] [ 1 made ]    [ 1 travels ]
 *     buffer 0                     [ 2 made ]    [ 2 travels ] [ 0 made ]    [ 0 travels ]
 *     shards                                     3             2             1, 0
 *
 * A forward inside a backward (activation checkpointing) does not say where it will end, and a rank
 * that has stepped over units cannot know how far the others have come. So on every rank the walk
 * goes to the unit behind the first one that this forward gathers: both are in their slots then. A
 * forward of more than two units needs the last of them to be gathered for backward before. */

/* Tell whether the kind walks units (not DDP, not ZERO1). Then a unit's gradients are launched when
 * backward comes to the next unit, and those of no unit in finish. If a rank launched a bucket as
 * soon as it is complete, it would be ahead of a rank that lacks a gradient of it. */
static bool dtrain__walks(const dtrain_strategy *strategy)
{
    return strategy->layout.shards.params || strategy->layout.shards.grads;
}

/* Wait until the gradients of bucket b have left the buffer in which they were made: until the
 * bucket is reduced. With replicas the steps before the last are enough where the step between
 * nodes works on the shard: unless the result has yet to be added to it, rounded or copied to the
 * host. */
static dtrain_result dtrain__vacate_buffer(dtrain_strategy *strategy, size_t b)
{
    const bool on_host = strategy->layout.grads_on_host;
    const bool every = strategy->desc.accumulation != DTRAIN_ACCUMULATION_SHARD_EVERY;
    const uint32_t across = strategy->layout.partial ? 3 : 2; /* the step between nodes */
    if (!strategy->kind->replicas || on_host || dtrain__reduces_low(strategy) ||
        (every && strategy->accumulated)) {
        DTRAIN__TRY(dtrain__reduce_until(strategy, b + 1));
        return on_host ? dtrain__host_vacate(strategy) : DTRAIN_OK;
    }
    for (size_t i = strategy->oldest; i <= b; i++) {
        dtrain__bucket *bucket = &strategy->layout.buckets[i];
        while (bucket->stage < across) DTRAIN__TRY(dtrain__reduce_await(strategy, bucket));
    }
    return DTRAIN_OK;
}

/* Give a unit its alternating buffer: wait until the gradients of the unit that had it, two units
 * later in the model, have left it. A unit without gradients needs no buffer. */
static dtrain_result dtrain__claim_buffer(dtrain_strategy *strategy, uint32_t unit)
{
    const dtrain__unit *units = strategy->layout.units;
    const uint32_t before = strategy->in_buffer[unit & 1];
    if (!strategy->layout.shards.grads || !units[unit].trainable) return DTRAIN_OK;
    strategy->in_buffer[unit & 1] = unit;
    if (before == unit || before == DTRAIN__NONE) return DTRAIN_OK;
    return dtrain__vacate_buffer(strategy,
                                 (size_t)(units[before].trainable - strategy->layout.buckets));
}

/* Complete and launch the gradients of units from `first` on, whose backward is over. */
static dtrain_result dtrain__close_units(dtrain_strategy *strategy, uint32_t first)
{
    const dtrain__layout *layout = &strategy->layout;
    size_t end = strategy->launched;
    while (end < layout->bucket_count && layout->buckets[end].unit != DTRAIN__NONE &&
           layout->buckets[end].unit >= first)
        end++;
    return dtrain__close_buckets(strategy, end);
}

/* Walk backward down to the unit `to`. Each unit on the way starts the same collectives on every
 * rank, whatever gradients a rank has or lacks: the gradients of the units behind it are reduced,
 * its values gathered, those of the next one fetched. So a rank may step over units, or end early:
 * its next gather, or finish, walks them. If a forward inside this backward has taken the slot of
 * the unit that backward has come to, it did so on all ranks, and the unit is brought again. */
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
        DTRAIN__TRY(dtrain__bring_unit(strategy, at, at - 1)); /* of 0: UINT32_MAX, no unit */
    }
    return DTRAIN_OK;
}

/* Find the index of a unit. The search begins at the unit gathered last and its neighbours, so that
 * it takes constant time in a pass. */
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

/* Check that a unit is due. A forward begins with the first unit and goes on to the next one or, to
 * recompute activations, to an earlier one. Backward goes to earlier units, and may step over some;
 * once it has begun, no unit behind the one that it has come to is due. */
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

/* Tell whether a forward recomputes activations: inside a backward, or, on a rank whose backward
 * has stepped over all units so far, where it goes back to another unit than the first. */
static bool dtrain__recomputes(const dtrain_strategy *strategy, uint32_t at)
{
    if (strategy->backward != DTRAIN__NONE) return true;
    return at && strategy->position != DTRAIN__NONE && at < strategy->position;
}

/* Gather a unit for a pass and show it. A second gather for the same backward only shows it. */
static dtrain_result dtrain__gather(dtrain_strategy *strategy, uint32_t at, dtrain_pass pass)
{
    if (pass == DTRAIN_PASS_BACKWARD) {
        DTRAIN__TRY(dtrain__walk_back(strategy, at));
        strategy->entered = true;
    } else {
        if (!strategy->entered && dtrain__recomputes(strategy, at))
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
