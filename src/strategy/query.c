/* Queries: what a strategy is, what a step of it sends, and the values of its parameters */

#include "core/platform_internal.h"
#include "comm/comm_internal.h"
#include "strategy/strategy_internal.h"

/* ---- What a step sends ------------------------------------------------------------------------*/

/* Count the bytes that this rank sends in one collective of count elements. */
DTRAIN__PRIVATE uint64_t dtrain__wire(uint32_t kind, int64_t count, uint32_t dtype, int ranks)
{
    dtrain_collective what;
    memset(&what, 0, sizeof what);
    what.kind = kind;
    what.dtype = (dtrain_dtype)dtype;
    what.count = (size_t)count;
    return dtrain__wire_bytes(&what, ranks);
}

/* Count the bytes that this rank sends when a bucket is reduced to shards, or gathered from them:
 * one collective an owner, or one of everything, and with nodes another inside this one. */
static uint64_t dtrain__sliced_wire(const dtrain__layout *layout, const dtrain__bucket *bucket,
                                    bool reduce, uint32_t dtype)
{
    const uint32_t kind = reduce ? DTRAIN_COLLECTIVE_REDUCE_SCATTER : DTRAIN_COLLECTIVE_ALL_GATHER;
    const int ranks = layout->node_ranks > 1 ? layout->hop_ranks : layout->ranks;
    uint64_t bytes = 0;
    if (!bucket->cuts)
        return dtrain__wire(kind, bucket->shard_count, dtype, ranks) +
               dtrain__wire(kind, bucket->hop_count, reduce ? (uint32_t)DTRAIN_DTYPE_F32 : dtype,
                            layout->node_ranks);
    for (int r = 0; r < ranks; r++)
        bytes += dtrain__wire(reduce ? DTRAIN_COLLECTIVE_REDUCE : DTRAIN_COLLECTIVE_BROADCAST,
                              bucket->cuts[r + 1] - bucket->cuts[r], dtype, ranks);
    return bytes;
}

/* Tell whether a unit is still in its slot when backward comes to it. */
static bool dtrain__stays(const dtrain__layout *layout, uint32_t unit)
{
    if (unit == DTRAIN__NONE || layout->units[unit].kept) return true;
    for (uint32_t later = unit + 2; later < layout->unit_count; later += 2) {
        const dtrain__unit *u = &layout->units[later];
        if (!u->kept && (u->trainable != DTRAIN__NONE || u->frozen != DTRAIN__NONE)) return false;
    }
    return true;
}

/* Count the bytes that this rank sends in a step of one micro-batch, by the ring formula. */
DTRAIN__PRIVATE uint64_t dtrain__step_bytes(const dtrain__layout *layout)
{
    const uint32_t values = layout->desc->param_dtype, grads = layout->desc->reduce_dtype;
    if (layout->all == 1) return 0;
    const size_t tally = dtrain__tally_count(layout->desc, layout->count);
    uint64_t bytes =
        dtrain__wire(DTRAIN_COLLECTIVE_ALL_REDUCE, (int64_t)tally, DTRAIN_DTYPE_F32, layout->all);
    for (size_t b = 0; b < layout->bucket_count; b++) {
        const dtrain__bucket *bucket = &layout->buckets[b];
        if (!bucket->sharded) {
            bytes += 2 * dtrain__wire(DTRAIN_COLLECTIVE_ALL_GATHER, bucket->hop_count,
                                      DTRAIN_DTYPE_F32, layout->node_ranks);
            bytes += layout->compression
                         ? dtrain__compressed_wire(layout, bucket)
                         : dtrain__wire(DTRAIN_COLLECTIVE_ALL_REDUCE, bucket->hop_count, grads,
                                        layout->hop_ranks);
            continue;
        }
        if (bucket->trainable) bytes += dtrain__sliced_wire(layout, bucket, true, grads);
        if (bucket->trainable && layout->kind->replicas)
            bytes += dtrain__wire(DTRAIN_COLLECTIVE_ALL_REDUCE, bucket->shard_count, grads,
                                  layout->all / layout->ranks);
        const uint64_t gather = dtrain__sliced_wire(layout, bucket, false, values);
        const bool twice = layout->shards.params && !dtrain__stays(layout, bucket->unit);
        bytes += twice ? 2 * gather : gather;
    }
    return bytes;
}

DTRAIN_API void dtrain_strategy_query(const dtrain_strategy *strategy, dtrain_strategy_info *info)
{
    if (!info) return;
    memset(info, 0, sizeof *info);
    if (!strategy) return;
    const dtrain__layout *layout = &strategy->layout;
    info->desc = strategy->desc;
    info->comm = strategy->comm;
    info->name = strategy->kind->name;
    info->param_count = strategy->param_count;
    info->bucket_count = layout->bucket_count;
    info->unit_count = layout->unit_count;
    info->shard_ranks = layout->ranks;
    info->replicas = layout->all / layout->ranks;
    info->sync_count = strategy->sync_count;
    info->buffer_bytes = layout->bytes[DTRAIN__BUFFERS];
    info->host_bytes = layout->bytes[DTRAIN__HOST];
    info->step_bytes = dtrain__step_bytes(layout);
    info->state_bytes = layout->state_bytes;
    info->value_bytes = layout->value_bytes;
    info->grad_bytes = layout->grad_bytes;
    for (size_t b = 0; b < layout->bucket_count; b++)
        if (layout->buckets[b].trainable)
            info->bucket_bytes += (uint64_t)layout->buckets[b].count * sizeof(float);
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        if (p->state.storage != p) continue;
        info->total_elements += (uint64_t)p->count;
        if (layout->entries[i].trainable) info->trainable_elements += (uint64_t)p->count;
    }
    memcpy(info->reason, strategy->reason, sizeof info->reason);
}

/* Add up the counters of all communicators of a strategy. */
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
        for (int kind = 0; kind < DTRAIN_COLLECTIVE_KINDS; kind++)
            info->kind_bytes[kind] += one.kind_bytes[kind];
    }
}

/* ---- Values -----------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_strategy_read(dtrain_strategy *strategy, size_t index, float *host)
{
    dtrain_param whole;
    DTRAIN__TRY(dtrain__between_backwards(strategy, "dtrain_strategy_read"));
    if (index >= strategy->param_count || !host)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_read: host is NULL, or index %zu is not below %zu",
                           index, strategy->param_count);
    const size_t storage = strategy->params[index].state.storage->state.index;
    dtrain__note_units(strategy);
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__whole_param(strategy, storage, &whole)));
    const dtrain_result result = dtrain_device_copy(strategy->device, host, whole.value,
                                                    (size_t)whole.count * sizeof(float));
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__restore_units(strategy)));
    return result;
}

/* Hash the whole value of a parameter, on every rank; an alias has none of its own. */
static dtrain_result dtrain__value_hash(void *user, size_t i, uint64_t *hash)
{
    dtrain_strategy *strategy = (dtrain_strategy *)user;
    dtrain_param whole;
    *hash = 0;
    if (strategy->params[i].state.storage != &strategy->params[i]) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__whole_param(strategy, i, &whole)));
    return dtrain__hash_param(strategy->device, &whole, hash);
}

DTRAIN_API dtrain_result dtrain_strategy_verify(dtrain_strategy *strategy, uint64_t *hash)
{
    dtrain__difference found;
    uint64_t all;
    if (hash) *hash = 0;
    DTRAIN__TRY(dtrain__between_backwards(strategy, "dtrain_strategy_verify"));
    dtrain__note_units(strategy);
    DTRAIN__TRY(dtrain__compare_items(strategy->comm, dtrain__value_hash, strategy,
                                      strategy->param_count, strategy->gathered, &all, &found));
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__restore_units(strategy)));
    if (found.odd >= 0)
        return dtrain_fail(
            DTRAIN_ERROR_MISMATCH,
            "dtrain_strategy_verify: the values of parameter %zu (\"%.100s\") on rank %d "
            "are not those of rank %d; every rank must make the same updates",
            found.item, strategy->params[found.item].name,
            dtrain__world_rank(strategy->comm, found.odd),
            dtrain__world_rank(strategy->comm, found.usual));
    if (hash) *hash = all;
    return DTRAIN_OK;
}
