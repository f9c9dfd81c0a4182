/* Queries: a strategy's description, its shards, its traffic */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* Fill in the info of dtrain_strategy_query, except what each step changes. */
DTRAIN__PRIVATE void dtrain__fill_info(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain_strategy_info *info = &strategy->info;
    info->desc = strategy->desc;
    info->name = strategy->kind->name;
    info->comm = strategy->groups.data;
    info->param_count = strategy->param_count;
    info->bucket_count = layout->bucket_count;
    info->unit_count = layout->unit_count;
    info->shard_ranks = layout->ranks;
    info->replicas = layout->all / layout->ranks;
    info->value_bytes = layout->value_bytes;
    info->grad_bytes = layout->grad_bytes;
    info->host_bytes = layout->bytes[DTRAIN__HOST];
    info->buffer_bytes = layout->bytes[DTRAIN__BUFFERS];
    info->state_bytes = layout->state_bytes;
    for (size_t b = 0; b < layout->bucket_count; b++)
        if (layout->buckets[b].trainable)
            info->bucket_bytes += (uint64_t)layout->buckets[b].count * sizeof(float);
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        if (p->state.storage != p) continue;
        const uint64_t count = (uint64_t)dtrain__whole_count(p);
        info->total_elements += count;
        if (!(p->flags & DTRAIN_PARAM_FROZEN)) info->trainable_elements += count;
    }
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

/* Add the counters of a communicator; NULL is ignored. */
DTRAIN__PRIVATE void dtrain__add_comm(dtrain_comm_info *info, const dtrain_comm *comm)
{
    dtrain_comm_info one;
    if (!comm) return;
    dtrain_comm_query(comm, &one);
    info->operation_count += one.operation_count;
    info->payload_bytes += one.payload_bytes;
    info->wire_bytes += one.wire_bytes;
    info->node_bytes += one.node_bytes;
    info->staged_bytes += one.staged_bytes;
    info->inside_seconds += one.inside_seconds;
    info->flight_seconds += one.flight_seconds;
    for (int kind = 0; kind < DTRAIN_COLLECTIVE_KINDS; kind++)
        info->kind_bytes[kind] += one.kind_bytes[kind];
}

DTRAIN__PRIVATE void dtrain__strategy_info(const dtrain_strategy *strategy,
                                           dtrain_strategy_info *info)
{
    memset(info, 0, sizeof *info);
    if (!strategy) return;
    *info = strategy->info;
    info->sync_count = strategy->notes.sync_count;
    dtrain_comm_query(strategy->groups.data, &info->traffic);
    for (size_t i = 0; i < strategy->owned_count; i++)
        if (strategy->owned[i] != strategy->tensor_comm)
            dtrain__add_comm(&info->traffic, strategy->owned[i]);
}

/* The info begins with a desc. If a program's desc has another size, later fields move. */
DTRAIN_API void dtrain_strategy_query(const dtrain_strategy *strategy, dtrain_strategy_info *info)
{
    const dtrain_abi *abi = dtrain__abi_of(strategy ? strategy->world : NULL);
    const size_t at = (dtrain__abi_bytes(abi, DTRAIN__ABI_strategy_desc) + 7) / 8 * 8;
    const size_t theirs = dtrain__abi_bytes(abi, DTRAIN__ABI_strategy_info) - at;
    const size_t ours = sizeof *info - offsetof(dtrain_strategy_info, name);
    dtrain_strategy_info own;
    if (!info) return;
    dtrain__strategy_info(strategy, &own);
    dtrain__give(abi, DTRAIN__ABI_strategy_info, NULL, info);
    dtrain__give(abi, DTRAIN__ABI_strategy_desc, &own.desc, info);
    memcpy((char *)info + at, &own.name, theirs < ours ? theirs : ours);
}

/* ---- Questions of other rooms -----------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain__notes *dtrain__notes_of(dtrain_strategy *strategy)
{
    return &strategy->notes;
}

DTRAIN__PRIVATE dtrain_world *dtrain__world_of(const dtrain_strategy *strategy)
{
    return strategy->world;
}

DTRAIN__PRIVATE dtrain__groups dtrain__groups_of(const dtrain_strategy *strategy)
{
    return strategy->groups;
}

DTRAIN__PRIVATE const dtrain_strategy_desc *dtrain__settings_of(const dtrain_strategy *strategy)
{
    return &strategy->desc;
}

DTRAIN__PRIVATE dtrain_param *dtrain__params_of(const dtrain_strategy *strategy, size_t *count)
{
    *count = strategy->param_count;
    return strategy->params;
}

DTRAIN__PRIVATE bool dtrain__is_updated(const dtrain_param *param)
{
    return param->state.storage == param && !(param->flags & DTRAIN_PARAM_FROZEN);
}

DTRAIN__PRIVATE bool dtrain__shard_of(const dtrain_strategy *strategy, size_t i,
                                      dtrain_shard *shard)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain__bucket *bucket = dtrain__shard_bucket(layout, i);
    const dtrain_param *p = &strategy->params[i];
    memset(shard, 0, sizeof *shard);
    shard->param = p;
    int64_t offset, count;
    if (!dtrain__piece(layout, i, &offset, &count)) return false;
    shard->offset = offset;
    shard->count = count;
    const bool wide = layout->dtype == DTRAIN_DTYPE_F64;
    void *value = wide ? p->typed_value : p->value, *grad = wide ? p->typed_grad : p->grad;
    if (bucket) {
        const int64_t first = layout->entries[i].offset - bucket->shard_first;
        const int64_t at = first + dtrain__words(layout, offset);
        value = bucket->value_shard + at;
        grad = dtrain__after(bucket->grad_shard, at);
    }
    if (wide) shard->typed_value = value, shard->typed_grad = grad;
    else shard->value = (float *)value, shard->grad = (const float *)grad;
    return true;
}

DTRAIN__PRIVATE bool dtrain__is_sliced(const dtrain_strategy *strategy, size_t i)
{
    return !strategy->layout.owners && !strategy->layout.entries[i].whole;
}

DTRAIN__PRIVATE const struct dtrain__layout *dtrain__layout_of(const dtrain_strategy *strategy)
{
    return &strategy->layout;
}
