/* A backward. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "strategy/layout_internal.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"
#include "device/device.h"

/* Between a storage's own gradient and its place in the bucket; nothing to do when it lives
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

/* Empties the buffers of bucket b's gradients. What travels between nodes may be under way still
 * where it is the shard that travels. */
static dtrain_result dtrain__vacate_work(dtrain_strategy *strategy, size_t b)
{
    const bool every = strategy->desc.accumulation != DTRAIN_ACCUMULATION_SHARD_EVERY;
    const bool on_host = strategy->layout.host_grads;
    if (!dtrain__has_replicas(strategy) || on_host || dtrain__reduces_low(strategy) ||
        (every && strategy->accumulated)) {
        DTRAIN__TRY(dtrain__reduce_until(strategy, b + 1));
        return on_host ? dtrain__stream_follow(strategy, NULL, strategy->offload.down) : DTRAIN_OK;
    }
    for (size_t i = strategy->oldest; i <= b; i++) {
        if (strategy->layout.buckets[i].stage == 1) DTRAIN__TRY(dtrain__reduce_await(strategy, i));
    }
    return DTRAIN_OK;
}

/* Makes the alternating buffer of a unit's gradients free for them: what the unit before the last
 * left there has been reduced. A unit without gradients leaves it to whose it is. */
DTRAIN__PRIVATE dtrain_result dtrain__claim_work(dtrain_strategy *strategy, uint32_t unit)
{
    if (!strategy->layout.work || unit == DTRAIN__NONE) return DTRAIN_OK;
    if (strategy->layout.units[unit].trainable == DTRAIN__NONE) return DTRAIN_OK;
    uint32_t *working = &strategy->working[unit & 1];
    const uint32_t before = *working;
    *working = unit;
    if (before == unit || before == DTRAIN__NONE) return DTRAIN_OK;
    const uint32_t bucket = strategy->layout.units[before].trainable;
    if (bucket >= strategy->launched) return DTRAIN_OK; /* from forward: there is nothing in it */
    return dtrain__vacate_work(strategy, bucket);
}

/* In bucket order, up to the first that still waits for a gradient. Frozen buckets have no
 * gradients. */
static dtrain_result dtrain__launch_buckets(dtrain_strategy *strategy)
{
    for (; strategy->launched < strategy->layout.bucket_count; strategy->launched++) {
        dtrain__bucket *bucket = &strategy->layout.buckets[strategy->launched];
        if (bucket->pending) break;
        if (bucket->trainable && dtrain__steps_are_placed(strategy))
            DTRAIN__TRY(dtrain__reduce_step_all(strategy, strategy->launched));
        if (bucket->trainable) DTRAIN__TRY(dtrain__reduce_start(strategy, strategy->launched));
        else bucket->stage = DTRAIN__REDUCED;
    }
    return DTRAIN_OK;
}

/* Constant time: three counters tell what became final, no list is searched. */
static dtrain_result dtrain__mark(dtrain_strategy *strategy, size_t index)
{
    dtrain__layout *layout = &strategy->layout;
    dtrain_param *storage = strategy->params[index].state.storage;
    dtrain__entry *entry = &layout->entries[index], *place = &layout->entries[storage->state.index];
    dtrain__bucket *bucket = &layout->buckets[entry->bucket];
    if (bucket->work && bucket->unit != DTRAIN__NONE &&
        strategy->working[bucket->unit & 1] != bucket->unit)
        DTRAIN__TRY(dtrain__claim_work(strategy, bucket->unit));
    entry->marked = true;
    strategy->marked_count++;
    bucket->pending--;
    if (--place->pending == 0) DTRAIN__TRY(dtrain__move_grad(strategy, storage, false));
    if (!strategy->desc.no_overlap) DTRAIN__TRY(dtrain__launch_buckets(strategy));
    return dtrain__progress(strategy);
}

/* True while gradients only add up on this rank. */
static bool dtrain__only_adds(const dtrain_strategy *strategy)
{
    return strategy->more && strategy->desc.accumulation == DTRAIN_ACCUMULATION_LAST;
}

/* While gradients only add up, nothing tells where one backward ends and the next begins: marks
 * are not kept. */
DTRAIN_API dtrain_result dtrain_strategy_ready(dtrain_strategy *strategy, size_t index)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_ready"));
    if (index >= strategy->param_count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_ready: index %zu, there are %zu parameters", index,
                           strategy->param_count);
    dtrain__entry *entry = &strategy->layout.entries[index];
    if (!entry->trainable)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_strategy_ready: parameter %zu (\"%.100s\") is frozen", index,
                           strategy->params[index].name);
    if (entry->marked)
        return dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "dtrain_strategy_ready: parameter %zu (\"%.100s\") is marked twice in one "
            "backward; call dtrain_strategy_finish between two",
            index, strategy->params[index].name);
    entry->seen = true;
    strategy->params[index].state.storage->state.grad_written = true;
    if (dtrain__only_adds(strategy)) return DTRAIN_OK;
    return dtrain__strategy_keep(strategy, dtrain__mark(strategy, index));
}

DTRAIN_API dtrain_result dtrain_strategy_accumulate(dtrain_strategy *strategy, bool more)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_accumulate"));
    if (more != strategy->more && strategy->marked_count)
        return dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "dtrain_strategy_accumulate: %zu parameters of this backward are already marked; "
            "call it before a backward, and dtrain_strategy_finish after each",
            strategy->marked_count);
    strategy->more = more;
    return DTRAIN_OK;
}

/* ---- The end of a backward --------------------------------------------------------------------*/

/* Does one of the alternating buffers hold gradients that have not been launched? */
static bool dtrain__work_is_live(const dtrain_strategy *strategy, uint32_t turn)
{
    const dtrain__layout *layout = &strategy->layout;
    const uint32_t unit = strategy->working[turn];
    const uint32_t b = unit == DTRAIN__NONE ? DTRAIN__NONE : layout->units[unit].trainable;
    if (b == DTRAIN__NONE || b < strategy->launched) return false;
    for (uint32_t i = layout->buckets[b].first_param; i <= layout->buckets[b].last_param; i++)
        if (layout->entries[i].bucket == b && strategy->params[i].state.grad_written) return true;
    return false;
}

/* A unit behind the one in which this backward has begun is not visited, and reduced all the same,
 * as zeros. Its own buffer holds gradients of the visited unit: it borrows the other, and gives it
 * back at once. */
static dtrain_result dtrain__reduce_unvisited(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const uint32_t index = (uint32_t)(bucket - strategy->layout.buckets);
    const uint32_t other = (bucket->unit & 1) ^ 1;
    float *own = bucket->grads;
    if (dtrain__work_is_live(strategy, other))
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_strategy_gather: two units have gradients and unit %u, behind "
                           "them, has none; gather units in the order of backward",
                           strategy->layout.units[bucket->unit].id);
    DTRAIN__TRY(dtrain__reduce_until(strategy, index)); /* whoever has used it */
    strategy->working[other] = DTRAIN__NONE;
    for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++)
        if (strategy->layout.entries[i].bucket == index) strategy->layout.entries[i].pending = 0;
    bucket->pending = 0;
    bucket->grads = strategy->layout.work_grads[other];
    dtrain_result result = strategy->device->ops->zero(strategy->device, bucket->grads,
                                                       (size_t)bucket->count * sizeof(float));
    if (result == DTRAIN_OK) result = dtrain__reduce_start(strategy, index);
    strategy->launched = (size_t)index + 1;
    if (result == DTRAIN_OK) result = dtrain__reduce_until(strategy, strategy->launched);
    bucket->grads = own;
    return result;
}

/* Gradients of a bucket that wait for a mark: what an earlier micro-batch or another use has left
 * counts, the rest is zero. */
static dtrain_result dtrain__settle_bucket(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    dtrain__layout *layout = &strategy->layout;
    const uint32_t index = (uint32_t)(bucket - layout->buckets);
    if (bucket->pending == 0) return DTRAIN_OK;
    if (bucket->work && bucket->unit != DTRAIN__NONE &&
        strategy->working[bucket->unit & 1] != bucket->unit &&
        dtrain__work_is_live(strategy, bucket->unit & 1))
        return dtrain__reduce_unvisited(strategy, bucket);
    if (bucket->work) DTRAIN__TRY(dtrain__claim_work(strategy, bucket->unit));
    for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++) {
        dtrain__entry *entry = &layout->entries[i];
        const dtrain_param *p = &strategy->params[i];
        if (!entry->pending || entry->bucket != index) continue;
        if (p->state.grad_written) DTRAIN__TRY(dtrain__move_grad(strategy, p, false));
        else
            DTRAIN__TRY(strategy->device->ops->zero(strategy->device, bucket->grads + entry->offset,
                                                    (size_t)p->count * sizeof(float)));
        entry->pending = 0;
    }
    bucket->pending = 0;
    return DTRAIN_OK;
}

/* Settles and launches buckets up to `end`, one by one: a buffer is zeroed for the next only when
 * the one before it has been launched. */
DTRAIN__PRIVATE dtrain_result dtrain__close_buckets(dtrain_strategy *strategy, size_t end)
{
    while (strategy->launched < end) {
        DTRAIN__TRY(dtrain__settle_bucket(strategy, &strategy->layout.buckets[strategy->launched]));
        DTRAIN__TRY(dtrain__launch_buckets(strategy));
    }
    return DTRAIN_OK;
}

/* All buckets have been launched: whatever this rank lacks, the others are not left waiting. */
static dtrain_result dtrain__report_missing(dtrain_strategy *strategy)
{
    char names[640];
    dtrain_result result = DTRAIN_OK;
    const bool strict = strategy->desc.missing_gradient == DTRAIN_MISSING_GRADIENT_ERROR;
    const size_t count =
        dtrain__list_missing(strategy->params, strategy->param_count, strategy->layout.entries,
                             !strict, names, sizeof names);
    if (!strict) {
        if (count)
            dtrain_log(strategy->world, DTRAIN_LOG_WARNING,
                       "dtrain_strategy_finish: no gradient from this backward, zero is used: %s",
                       names);
        return DTRAIN_OK;
    }
    if (count)
        result = dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "dtrain_strategy_finish: no gradient from this backward: %s; mark them with "
            "dtrain_strategy_ready, or set DTRAIN_PARAM_FROZEN",
            names);
    return dtrain__agree(strategy->comm, result);
}

/* Whole gradients go back to the arrays of a host that has its own. */
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

/* The order matters: everything is launched before ranks exchange what is missing, and waited for
 * before anything is reported. So a step that fails for a missing gradient has made the same
 * collectives as one that succeeds, and the next step finds all ranks at the same place. */
DTRAIN_API dtrain_result dtrain_strategy_finish(dtrain_strategy *strategy)
{
    dtrain_result missing = DTRAIN_OK;
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_finish"));
    if (dtrain__only_adds(strategy)) return DTRAIN_OK;
    const size_t count = strategy->layout.bucket_count;
    const bool last = !strategy->more;
    dtrain_result result = dtrain__close_buckets(strategy, count);
    if (result == DTRAIN_OK && last) missing = dtrain__report_missing(strategy);
    if (result == DTRAIN_OK) result = dtrain__reduce_until(strategy, count);
    if (result == DTRAIN_OK) result = dtrain__shards_settle(strategy);
    if (result == DTRAIN_OK && last) result = dtrain__return_grads(strategy);
    /* units fetched ahead and not used: they read the shards that will be updated */
    if (result == DTRAIN_OK && last) result = dtrain__settle_gathers(strategy);
    if (result != DTRAIN_OK) return dtrain__strategy_keep(strategy, result);
    if (missing == DTRAIN_OK && last) strategy->sync_count++;
    dtrain__strategy_rewind(strategy, last);
    return missing;
}

/* ---- Publishing -------------------------------------------------------------------------------*/

/* Every rank's slice of a bucket to all: by nodes in two turns, first of the same slice of every
 * node, then of the slices inside a node. shard may be its place in values. */
DTRAIN__PRIVATE dtrain_result dtrain__gather_slices(dtrain_strategy *strategy, size_t b,
                                                    const void *shard, void *values,
                                                    dtrain_dtype dtype)
{
    const dtrain__bucket *bucket = &strategy->layout.buckets[b];
    const bool nodes = strategy->layout.node_ranks > 1;
    char *to = (char *)values;
    if (nodes) to += (size_t)bucket->hop_first * dtrain_dtype_bytes(dtype);
    return dtrain_all_gather(nodes ? strategy->groups[DTRAIN__FETCH_ACROSS] : strategy->shard_comm,
                             shard, to, (size_t)bucket->shard_count, dtype,
                             dtrain__works(strategy, b, true));
}

DTRAIN__PRIVATE dtrain_result dtrain__gather_inside(dtrain_strategy *strategy, size_t b,
                                                    void *values, dtrain_dtype dtype)
{
    const dtrain__bucket *bucket = &strategy->layout.buckets[b];
    const size_t first = (size_t)bucket->hop_first * dtrain_dtype_bytes(dtype);
    DTRAIN__TRY(dtrain__wait_works(strategy, dtrain__works(strategy, b, true)));
    if (strategy->layout.node_ranks == 1) return DTRAIN_OK;
    return dtrain_all_gather(strategy->groups[DTRAIN__FETCH], (char *)values + first, values,
                             (size_t)bucket->hop_count, dtype, dtrain__works(strategy, b, true));
}

/* ZERO1 and SHARD_GRAD_OP: all are under way before one is waited for. */
static dtrain_result dtrain__gather_shards(dtrain_strategy *strategy)
{
    dtrain__layout *layout = &strategy->layout;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__bucket *bucket = &layout->buckets[b];
        if (!bucket->sharded) continue;
        DTRAIN__TRY(dtrain__gather_slices(strategy, b, bucket->value_shard, bucket->values,
                                          DTRAIN_DTYPE_F32));
    }
    for (size_t b = 0; b < layout->bucket_count; b++)
        if (layout->buckets[b].sharded)
            DTRAIN__TRY(
                dtrain__gather_inside(strategy, b, layout->buckets[b].values, DTRAIN_DTYPE_F32));
    for (size_t b = 0; b < layout->bucket_count; b++)
        DTRAIN__TRY(dtrain__wait_works(strategy, dtrain__works(strategy, b, true)));
    return dtrain__copy_host_values(strategy, true);
}

DTRAIN_API dtrain_result dtrain_strategy_publish(dtrain_strategy *strategy)
{
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_publish"));
    if (!strategy->layout.shards) return DTRAIN_OK;
    if (!strategy->layout.slots)
        return dtrain__strategy_keep(strategy, dtrain__gather_shards(strategy));
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__settle_gathers(strategy)));
    dtrain__forget_units(strategy);
    return DTRAIN_OK;
}

/* ---- Queries ----------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_strategy_shards(dtrain_strategy *strategy,
                                                const dtrain_shard **shards, size_t *count)
{
    if (shards) *shards = NULL;
    if (count) *count = 0;
    if (!strategy || !shards || !count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_strategy_shards: %s is NULL",
                           !strategy ? "strategy"
                           : !shards ? "shards"
                                     : "count");
    *shards = strategy->shards;
    *count = strategy->shard_count;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_comm *dtrain_strategy_comm(dtrain_strategy *strategy)
{
    return strategy ? strategy->comm : NULL;
}

/* The books of all its communicators together. */
DTRAIN__PRIVATE void dtrain__strategy_comm_info(const dtrain_strategy *strategy,
                                                dtrain_comm_info *info)
{
    dtrain_comm_query(strategy->comm, info);
    for (int i = 0; i < DTRAIN__GROUPS; i++) {
        dtrain_comm_info one;
        if (!strategy->groups[i]) continue;
        dtrain_comm_query(strategy->groups[i], &one);
        info->operation_count += one.operation_count;
        info->payload_bytes += one.payload_bytes;
        info->wire_bytes += one.wire_bytes;
        info->staged_bytes += one.staged_bytes;
        info->inside_seconds += one.inside_seconds;
        info->flight_seconds += one.flight_seconds;
    }
}
