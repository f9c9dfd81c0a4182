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

/* Add up the counters of all communicators of a strategy. */
DTRAIN__PRIVATE void dtrain__strategy_comm_info(const dtrain_strategy *strategy,
                                                dtrain_comm_info *info)
{
    dtrain_comm_query(strategy->groups.data, info);
    for (int i = 0; i < DTRAIN__EXTRAS; i++) {
        dtrain_comm_info one;
        if (!strategy->extra[i]) continue;
        dtrain_comm_query(strategy->extra[i], &one);
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
