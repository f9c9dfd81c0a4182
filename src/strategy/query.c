/* Queries: what a strategy is, and the value of a parameter */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

DTRAIN_API void dtrain_strategy_query(const dtrain_strategy *strategy, dtrain_strategy_info *info)
{
    if (!info) return;
    memset(info, 0, sizeof *info);
    if (!strategy) return;
    *info = strategy->info;
    info->sync_count = strategy->sync_count;
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

/* Add the counters of a communicator; NULL has none. */
static void dtrain__add_comm(dtrain_comm_info *info, const dtrain_comm *comm)
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

DTRAIN__PRIVATE void dtrain__strategy_comm_info(const dtrain_strategy *strategy,
                                                dtrain_comm_info *info)
{
    dtrain_comm_query(strategy->groups.data, info);
    for (size_t i = 0; i < strategy->owned_count; i++)
        if (strategy->owned[i] != strategy->tensor_comm) dtrain__add_comm(info, strategy->owned[i]);
}

DTRAIN__PRIVATE void dtrain__strategy_tensor_info(const dtrain_strategy *strategy,
                                                  dtrain_comm_info *info)
{
    dtrain_comm_query(strategy->groups.tensor, info);
    dtrain__add_comm(info, strategy->tensor_comm);
}

DTRAIN__PRIVATE void dtrain__strategy_pipeline_info(const dtrain_strategy *strategy,
                                                    dtrain_comm_info *info)
{
    const dtrain_comm *before = NULL; /* weights with the same ranks share one */
    dtrain_comm_query(strategy->groups.pipeline, info);
    for (size_t i = 0; i < strategy->param_count && strategy->ties; i++) {
        const dtrain_comm *tie = strategy->ties[i];
        if (tie && tie != before) dtrain__add_comm(info, tie);
        if (tie) before = tie;
    }
}

/* ---- Values -----------------------------------------------------------------------------------*/

/* Put the parts that ranks of the tensor axis have of a parameter together in `host`. Each sends
 * its own to the others, through `staging`, which holds the largest: parts differ in length. */
static dtrain_result dtrain__join_parts(dtrain_strategy *strategy, const dtrain_param *part,
                                        float *staging, float *host)
{
    const dtrain__groups *groups = &strategy->groups;
    dtrain__share share;
    for (int r = 0; r < groups->tensor_ranks; r++) {
        dtrain__share_of(&part->cut, part->shape, groups->tensor_ranks, r, &share);
        if (r == groups->tensor_rank)
            DTRAIN__TRY(dtrain_device_copy(strategy->device, staging, part->value,
                                           (size_t)share.count * sizeof *staging));
        DTRAIN__TRY(dtrain_broadcast(groups->tensor, staging, (size_t)share.count, DTRAIN_DTYPE_F32,
                                     r, NULL));
        for (int64_t i = 0, run; i < share.count; i += run) {
            const int64_t at = dtrain__share_place(&share, i, &run);
            memcpy(host + at, staging + i, (size_t)run * sizeof *host);
        }
    }
    return DTRAIN_OK;
}

/* Read a parameter of which ranks of the tensor axis have parts, where it is here. Collective over
 * the mesh. */
static dtrain_result dtrain__read_parts(dtrain_strategy *strategy, const dtrain_param *part,
                                        float *host)
{
    const dtrain__groups *groups = &strategy->groups;
    dtrain__share share;
    size_t most = 0;
    for (int r = 0; r < groups->tensor_ranks; r++) {
        dtrain__share_of(&part->cut, part->shape, groups->tensor_ranks, r, &share);
        if ((size_t)share.count > most) most = (size_t)share.count;
    }
    float *staging = (float *)dtrain__alloc(&strategy->allocator, most, sizeof *staging,
                                            "a part of a parameter");
    dtrain_result result = dtrain__agree(groups->all, staging ? DTRAIN_OK : DTRAIN_ERROR_MEMORY);
    if (result == DTRAIN_OK && part->count)
        result = dtrain__strategy_keep(strategy, dtrain__join_parts(strategy, part, staging, host));
    dtrain__free(&strategy->allocator, staging, most, sizeof *staging);
    return result;
}

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
    dtrain_result result = DTRAIN_OK;
    if (strategy->groups.tensor && whole.cut.axis)
        result = dtrain__read_parts(strategy, &whole, host);
    else if (whole.count)
        result = dtrain_device_copy(strategy->device, host, whole.value,
                                    (size_t)whole.count * sizeof(float));
    if (strategy->groups.pipeline && result == DTRAIN_OK) /* from the first stage that has it */
        result = dtrain__strategy_keep(
            strategy,
            dtrain_broadcast(strategy->groups.pipeline, host, (size_t)dtrain__whole_count(&whole),
                             DTRAIN_DTYPE_F32, dtrain__stage_first(strategy, storage), NULL));
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__restore_units(strategy)));
    return result;
}
