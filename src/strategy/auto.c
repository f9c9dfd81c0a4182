/* AUTO: the kind that sends least of those that fit the memory
 *
 * The candidates are planned one by one, from little communication and much memory to the opposite;
 * the rank that has least memory decides for all. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "world/world.h"
#include "comm/comm.h"
#include "strategy/layout_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/memory.h"

/* Bytes that a plan does not count: whole pages, stages of further communicators, a trainer's
 * scalars. */
#define DTRAIN__UNPLANNED_BYTES ((uint64_t)1 << 20)

/* Finds what this rank may still allocate. A sixteenth of memory that nobody has limited stays
 * free: for scratch of kernels and for others on the machine. */
static dtrain_result dtrain__memory_left(dtrain_world *world, uint64_t limit, uint64_t *left)
{
    dtrain_device *device = world->device;
    const uint64_t used = (uint64_t)device->allocated_bytes + device->comm_bytes;
    dtrain_device_info info;
    *left = limit;
    if (limit) return DTRAIN_OK;
    if (device->limit_bytes) {
        *left = device->limit_bytes > used + DTRAIN__UNPLANNED_BYTES
                    ? device->limit_bytes - used - DTRAIN__UNPLANNED_BYTES
                    : 0;
    } else if (device->ops->host_memory) {
        *left = dtrain__free_memory() / 16 * 15 / (uint64_t)world->local_size;
    } else {
        DTRAIN__TRY(dtrain_device_query(device, &info));
        *left = info.free_bytes / 16 * 15;
    }
    return DTRAIN_OK;
}

/* *left = the memory that a strategy may use: what this rank may allocate, less other_bytes, which
 * may be more than that. All ranks take the least of theirs, so that they make the same choice. */
DTRAIN__PRIVATE dtrain_result dtrain__auto_limit(dtrain_world *world,
                                                 const dtrain_strategy_desc *desc,
                                                 dtrain_comm *comm, int64_t *left)
{
    uint64_t have;
    DTRAIN__TRY(dtrain__agree(comm, dtrain__memory_left(world, desc->memory_limit, &have)));
    *left = (int64_t)(have < INT64_MAX ? have : INT64_MAX) -
            (int64_t)(desc->other_bytes < INT64_MAX ? desc->other_bytes : INT64_MAX);
    return dtrain_all_reduce(comm, left, left, 1, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MIN, NULL);
}

static dtrain_result dtrain__auto_fails(const dtrain_strategy *strategy, uint64_t least,
                                        int64_t left)
{
    return dtrain_fail(
        DTRAIN_ERROR_MEMORY,
        "dtrain_strategy_create: no strategy fits: the smallest needs %.1f MiB a rank for "
        "parameters, gradients, optimizer and buffers, and %.1f MiB are left for them beside %.1f "
        "MiB of activations and the rest: %.1f MiB are missing. More ranks, activation "
        "checkpointing, a smaller batch or, on a GPU, offload would help",
        dtrain__mib(least), dtrain__mib(left > 0 ? (uint64_t)left : 0),
        dtrain__mib(strategy->desc.other_bytes), dtrain__mib((uint64_t)((int64_t)least - left)));
}

static const uint32_t dtrain__auto_order[] = {
    DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO1, DTRAIN_STRATEGY_SHARD_GRAD_OP,
    DTRAIN_STRATEGY_HYBRID_SHARD, DTRAIN_STRATEGY_FULL_SHARD};
enum { DTRAIN__AUTO_KINDS = sizeof dtrain__auto_order / sizeof *dtrain__auto_order };

/* Makes desc that of the i-th candidate; false when these ranks or other fields exclude it. */
static bool dtrain__auto_candidate(const dtrain_world *world, int ranks, size_t i,
                                   dtrain_strategy_desc *desc)
{
    const dtrain__kind_row *kind = dtrain__row_of(dtrain__auto_order[i]);
    dtrain_world_info nodes;
    dtrain_world_query(world, &nodes);
    const uint32_t alone = desc->offload & DTRAIN_OFFLOAD_PARAMS  ? DTRAIN_STRATEGY_FULL_SHARD
                           : desc->offload & DTRAIN_OFFLOAD_GRADS ? DTRAIN_STRATEGY_SHARD_GRAD_OP
                                                                  : DTRAIN_STRATEGY_DDP;
    if (ranks == 1 ? kind->kind != alone : kind->kind == DTRAIN_STRATEGY_DDP) return false;
    if (kind->replicas && (nodes.node_count == 1 || nodes.node_count * nodes.local_size != ranks))
        return false;
    if (kind->replicas) desc->node_size = (uint32_t)nodes.local_size;
    desc->kind = kind->kind;
    return dtrain__check_combination(desc, kind) == DTRAIN_OK;
}

static dtrain_result dtrain__auto_excluded(int ranks)
{
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "dtrain_strategy_create: DTRAIN_STRATEGY_AUTO: none of the kinds that it "
                       "chooses from with %d ranks takes the rest of the desc; name a kind to hear "
                       "why not",
                       ranks);
}

/* *bytes = what a rank of a strategy would hold that is not there yet; with AUTO the least that one
 * of the candidates needs. */
DTRAIN__PRIVATE dtrain_result dtrain__strategy_needs(dtrain_world *world, dtrain_param *params,
                                                     size_t count,
                                                     const dtrain_strategy_desc *given, int ranks,
                                                     uint64_t *bytes)
{
    const bool choose = given->kind == DTRAIN_STRATEGY_AUTO;
    *bytes = UINT64_MAX;
    for (size_t i = 0; i < (choose ? (size_t)DTRAIN__AUTO_KINDS : 1); i++) {
        dtrain_strategy_desc desc = *given;
        dtrain_memory memory;
        if (choose && !dtrain__auto_candidate(world, ranks, i, &desc)) continue;
        const dtrain__kind_row *kind = dtrain__row_of(desc.kind);
        if (kind && kind->replicas && !desc.node_size) {
            dtrain_world_info nodes;
            dtrain_world_query(world, &nodes);
            desc.node_size = (uint32_t)nodes.local_size;
        }
        DTRAIN__TRY(dtrain_strategy_plan(params, count, &desc, ranks, &memory));
        if (memory.total < *bytes) *bytes = memory.total;
    }
    return *bytes == UINT64_MAX ? dtrain__auto_excluded(ranks) : DTRAIN_OK;
}

/* Resolves AUTO: takes the first candidate that fits. The reason names what the candidate before it
 * would have needed. */
DTRAIN__PRIVATE dtrain_result dtrain__strategy_choose(dtrain_strategy *strategy)
{
    const int ranks = dtrain_comm_size(strategy->comm);
    int64_t left;
    uint64_t least = INT64_MAX;
    char before[160] = "";
    if (strategy->desc.kind != DTRAIN_STRATEGY_AUTO) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__auto_limit(strategy->world, &strategy->desc, strategy->comm, &left));
    const uint64_t limit = left > 0 ? (uint64_t)left : 0;
    for (size_t i = 0; i < DTRAIN__AUTO_KINDS; i++) {
        dtrain_strategy_desc desc = strategy->desc;
        dtrain_memory memory;
        uint64_t step_bytes;
        if (!dtrain__auto_candidate(strategy->world, ranks, i, &desc)) continue;
        DTRAIN__TRY(
            dtrain__agree(strategy->comm, dtrain__plan_kind(&strategy->allocator, strategy->params,
                                                            strategy->param_count, &desc, ranks,
                                                            &memory, &step_bytes)));
        const char *name = dtrain__row_of(desc.kind)->name;
        if (memory.total < least) least = memory.total;
        if (memory.total > limit) {
            snprintf(before, sizeof before, "; %s would need %.1f MiB", name,
                     dtrain__mib(memory.total));
            continue;
        }
        snprintf(strategy->reason, sizeof strategy->reason,
                 "%s: %.1f MiB a rank (parameters %.1f, gradients %.1f, optimizer %.1f, buffers "
                 "%.1f) of %.1f MiB, and %.1f MiB sent a step%s",
                 name, dtrain__mib(memory.total), dtrain__mib(memory.params),
                 dtrain__mib(memory.grads), dtrain__mib(memory.optimizer),
                 dtrain__mib(memory.buffers), dtrain__mib(limit), dtrain__mib(step_bytes), before);
        strategy->desc.kind = desc.kind;
        strategy->desc.node_size = desc.node_size;
        return DTRAIN_OK;
    }
    if (least == INT64_MAX) return dtrain__auto_excluded(ranks);
    return dtrain__auto_fails(strategy, least, left);
}
