/* Queries: what a strategy is, what a step of it sends, and the values of its parameters */

#include "core/platform_internal.h"
#include "comm/comm_internal.h"
#include "strategy/strategy_internal.h"

/* ---- What a step sends ------------------------------------------------------------------------*/

/* A strategy's twin, which has the same parameters and settings and runs on the plan device and a
 * counting communicator, in a world of its own: what it does is in no record of the real one. */
typedef struct dtrain__twin {
    dtrain_world world;
    uint32_t here; /* what world.mine points to */
    dtrain_param *params;
    dtrain_strategy *strategy;
} dtrain__twin;

/* Make a twin; dtrain__twin_destroy frees what there is of it, also after an error. Values and
 * gradients that the strategy has lent are NULL again. Compression is in full force; nothing is
 * offloaded, which changes no collective. */
static dtrain_result dtrain__twin_create(const dtrain_strategy *strategy, dtrain__twin *twin)
{
    const size_t count = strategy->param_count;
    dtrain_strategy_desc desc = strategy->desc;
    const bool nodes = desc.hierarchical || strategy->kind->replicas;
    dtrain_device_desc plan;
    memset(&plan, 0, sizeof plan);
    plan.allocator = strategy->allocator;
    twin->here = 1;
    twin->world.mine = &twin->here;
    twin->world.allocator = strategy->allocator;
    twin->world.rank = strategy->layout.all_rank;
    twin->world.size = strategy->layout.all;
    DTRAIN__TRY(dtrain_device_create(dtrain_plan_device_ops(), &plan, &twin->world.device));
    DTRAIN__TRY(
        dtrain__counting_create(&twin->world, nodes ? (int)desc.node_size : 1, &twin->world.comm));
    twin->params = (dtrain_param *)dtrain__alloc(&strategy->allocator, count, sizeof *twin->params,
                                                 "parameters to count with");
    if (!twin->params) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < count; i++) {
        const dtrain_param *p = &strategy->params[i];
        const dtrain__entry *entry = &strategy->layout.entries[i];
        twin->params[i] = *p;
        twin->params[i].init = DTRAIN_INIT_ZERO;
        if (p->alias_of) twin->params[i].alias_of = twin->params + (p->alias_of - strategy->params);
        if (entry->lends_value) twin->params[i].value = NULL;
        if (entry->lends_grad) twin->params[i].grad = NULL;
    }
    desc.comm = NULL;
    desc.offload = 0;
    DTRAIN__TRY(dtrain_strategy_create(&twin->world, twin->params, count, &desc, &twin->strategy));
    twin->strategy->sync_count = UINT64_MAX / 2;
    dtrain__rewind(twin->strategy, true);
    return DTRAIN_OK;
}

static void dtrain__twin_destroy(const dtrain_strategy *strategy, dtrain__twin *twin)
{
    dtrain_strategy_destroy(twin->strategy);
    dtrain__free(&strategy->allocator, twin->params, strategy->param_count, sizeof *twin->params);
    if (twin->world.comm) (void)twin->world.comm->ops->destroy(twin->world.comm);
    dtrain_device_destroy(twin->world.device);
    dtrain__free(&strategy->allocator, twin, 1, sizeof *twin);
}

/* Count what a twin sends in a step, without samples: a rank that has none takes part in all
 * collectives of the others. */
static dtrain_result dtrain__twin_step(dtrain_strategy *twin, int micro_batches, uint64_t *bytes,
                                       uint64_t *calls)
{
    dtrain_comm_info before, after;
    bool over;
    dtrain__strategy_comm_info(twin, &before);
    for (int micro = 1; micro <= micro_batches; micro++) {
        DTRAIN__TRY(dtrain_strategy_accumulate(twin, micro < micro_batches));
        DTRAIN__TRY(dtrain_strategy_join(twin, &over));
    }
    DTRAIN__TRY(dtrain_strategy_publish(twin));
    dtrain__strategy_comm_info(twin, &after);
    *bytes = after.wire_bytes - before.wire_bytes;
    *calls = after.operation_count - before.operation_count;
    return DTRAIN_OK;
}

/* Count what a step sends, by running one: of one micro-batch, and of two, from which follows what
 * each further one adds. */
DTRAIN__PRIVATE dtrain_result dtrain__count_step(dtrain_strategy *strategy)
{
    dtrain__step_counts *counts = &strategy->counts;
    if (strategy->layout.all == 1 || dtrain__is_counting(strategy->comm)) return DTRAIN_OK;
    dtrain__twin *twin =
        (dtrain__twin *)dtrain__alloc(&strategy->allocator, 1, sizeof *twin, "a step to count");
    if (!twin) return DTRAIN_ERROR_MEMORY;
    dtrain_result result = dtrain__twin_create(strategy, twin);
    if (result == DTRAIN_OK)
        result = dtrain__twin_step(twin->strategy, 1, &counts->bytes, &counts->calls);
    if (result == DTRAIN_OK)
        result = dtrain__twin_step(twin->strategy, 2, &counts->micro_bytes, &counts->micro_calls);
    counts->micro_bytes -= counts->bytes;
    counts->micro_calls -= counts->calls;
    dtrain__twin_destroy(strategy, twin);
    return result;
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
    info->step_bytes = strategy->counts.bytes;
    info->step_calls = strategy->counts.calls;
    info->micro_bytes = strategy->counts.micro_bytes;
    info->micro_calls = strategy->counts.micro_calls;
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
