/* Planning: the memory of a rank, from the layout that it would have */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "strategy/layout_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/memory.h"

DTRAIN__PRIVATE double dtrain__mib(uint64_t bytes) { return (double)bytes / 1048576.0; }

static uint32_t dtrain__planned_states(const dtrain_strategy_desc *desc)
{
    return desc->optimizer_states == DTRAIN_OPTIMIZER_STATES_NONE ? 0 : desc->optimizer_states;
}

/* fp32 optimizer state of this rank's pieces, as the optimizer will pad them. */
static uint64_t dtrain__layout_state(const dtrain__layout *layout)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < layout->count; i++) {
        int64_t offset, count;
        if (dtrain__piece(layout, i, &offset, &count))
            bytes += (uint64_t)dtrain__padded(count) * sizeof(float);
    }
    return bytes * dtrain__planned_states(layout->desc);
}

/* The layout of one rank, its bytes counted and nothing allocated. */
static dtrain_result dtrain__plan_rank(const dtrain_allocator *a, const dtrain_param *params,
                                       size_t count, const dtrain_strategy_desc *desc, int ranks,
                                       int rank, int all, dtrain_memory *memory,
                                       uint64_t *step_bytes)
{
    dtrain__layout layout;
    int64_t stage;
    dtrain_result result =
        dtrain__layout_make(&layout, a, params, count, desc, ranks, rank, all, rank);
    memset(memory, 0, sizeof *memory);
    if (result == DTRAIN_OK) {
        dtrain__lay_memory(&layout);
        dtrain__layout_bytes(&layout, &memory->params, &memory->grads);
        memory->buffers = layout.bytes[DTRAIN__BUFFERS];
        memory->host = layout.bytes[DTRAIN__HOST];
        if (desc->offload)
            memory->host += dtrain__offloaded_state(&layout, dtrain__planned_states(desc), &stage);
        else memory->optimizer = dtrain__layout_state(&layout);
        memory->total = memory->params + memory->grads + memory->buffers + memory->optimizer;
        *step_bytes = dtrain__step_bytes(&layout);
    }
    dtrain__layout_free(&layout, a);
    return result;
}

/* The memory of the rank that holds most, and what it sends in a step. params and *given, whose
 * kind is known, are resolved. */
DTRAIN__PRIVATE dtrain_result dtrain__plan_kind(const dtrain_allocator *a,
                                                const dtrain_param *params, size_t count,
                                                const dtrain_strategy_desc *given, int ranks,
                                                dtrain_memory *memory, uint64_t *step_bytes)
{
    dtrain_strategy_desc desc = *given;
    const dtrain__kind_row *kind = dtrain__row_of(desc.kind);
    const int nodes = kind->replicas && desc.node_size ? ranks / (int)desc.node_size : 1;
    const int shard_ranks = kind->shards.state ? ranks / nodes : 1;
    dtrain__resolve_accumulation(&desc, kind);
    dtrain__resolve_levels(&desc, ranks);
    memset(memory, 0, sizeof *memory);
    for (int rank = 0; rank < (kind->owners ? shard_ranks : 1); rank++) {
        dtrain_memory one;
        DTRAIN__TRY(
            dtrain__plan_rank(a, params, count, &desc, shard_ranks, rank, ranks, &one, step_bytes));
        const uint64_t host = one.host > memory->host ? one.host : memory->host;
        if (one.total >= memory->total) *memory = one;
        memory->host = host;
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_strategy_plan(dtrain_param *params, size_t param_count,
                                              const dtrain_strategy_desc *desc, int rank_count,
                                              dtrain_memory *memory)
{
    const char *const call = "dtrain_strategy_plan";
    const dtrain_allocator a = dtrain__resolve_allocator(NULL);
    if (!params || !desc || !memory || rank_count < 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: params, desc or memory is NULL, or rank_count (%d) is below 1",
                           call, rank_count);
    dtrain_strategy_desc resolved;
    dtrain_compression_desc compression;
    uint64_t step_bytes;
    DTRAIN__TRY(dtrain__resolve_desc(desc, &resolved, &compression));
    const dtrain__kind_row *kind = dtrain__row_of(resolved.kind);
    if (!kind)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: kind %u is not one that can be planned",
                           call, (unsigned)desc->kind);
    DTRAIN__TRY(dtrain__check_combination(&resolved, kind));
    if (desc->node_size && rank_count % (int)desc->node_size)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: node_size %u does not divide %d ranks", call,
                           desc->node_size, rank_count);
    DTRAIN__TRY(dtrain__resolve_params(params, param_count, &a));
    return dtrain__plan_kind(&a, params, param_count, &resolved, rank_count, memory, &step_bytes);
}
