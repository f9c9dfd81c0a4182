/* What a step sends. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "strategy/compression_internal.h"
#include "strategy/layout_internal.h"
#include "strategy/memory.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"
#include "device/device.h"

DTRAIN__PRIVATE uint64_t dtrain__wire(uint32_t kind, int64_t count, uint32_t dtype, int ranks)
{
    dtrain_collective what;
    memset(&what, 0, sizeof what);
    what.kind = kind;
    what.dtype = (dtrain_dtype)dtype;
    what.count = (size_t)count;
    return dtrain__wire_bytes(&what, ranks);
}

/* Once every owner's run, or once everything, by nodes in two turns. */
static uint64_t dtrain__sliced_wire(const dtrain__layout *layout, const dtrain__bucket *bucket,
                                    bool reduce, uint32_t dtype)
{
    const uint32_t kind = reduce ? DTRAIN_COLLECTIVE_REDUCE_SCATTER : DTRAIN_COLLECTIVE_ALL_GATHER;
    uint64_t bytes = 0;
    if (layout->node_ranks > 1)
        return dtrain__wire(kind, bucket->shard_count, dtype, layout->hop_ranks) +
               dtrain__wire(kind, bucket->hop_count, reduce ? (uint32_t)DTRAIN_DTYPE_F32 : dtype,
                            layout->node_ranks);
    if (!bucket->cuts) return dtrain__wire(kind, bucket->shard_count, dtype, layout->ranks);
    for (int r = 0; r < layout->ranks; r++)
        bytes += dtrain__wire(reduce ? DTRAIN_COLLECTIVE_REDUCE : DTRAIN_COLLECTIVE_BROADCAST,
                              bucket->cuts[r + 1] - bucket->cuts[r], dtype, layout->ranks);
    return bytes;
}

static uint64_t dtrain__whole_wire(const dtrain__layout *layout, const dtrain__bucket *bucket)
{
    uint64_t bytes = 2 * dtrain__wire(DTRAIN_COLLECTIVE_ALL_GATHER, bucket->hop_count,
                                      DTRAIN_DTYPE_F32, layout->node_ranks);
    if (layout->compression) return bytes + dtrain__compressed_wire(layout, bucket);
    return bytes + dtrain__wire(DTRAIN_COLLECTIVE_ALL_REDUCE, bucket->hop_count,
                                layout->desc->reduce_dtype, layout->hop_ranks);
}

/* Is a unit still in its slot when backward comes to it? */
static bool dtrain__stays(const dtrain__layout *layout, uint32_t unit)
{
    if (unit == DTRAIN__NONE || layout->units[unit].kept) return true;
    for (uint32_t later = unit + 2; later < layout->unit_count; later += 2) {
        const dtrain__unit *u = &layout->units[later];
        if (!u->kept && (u->trainable != DTRAIN__NONE || u->frozen != DTRAIN__NONE)) return false;
    }
    return true;
}

/* By the ring formula, in a step of one micro-batch. ranks: of the whole world. */
static uint64_t dtrain__step_bytes(const dtrain__layout *layout, int ranks)
{
    const uint32_t values = layout->desc->param_dtype, grads = layout->desc->reduce_dtype;
    const int replicas = ranks / layout->ranks;
    uint64_t bytes = 0;
    if (ranks == 1) return 0;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        const dtrain__bucket *bucket = &layout->buckets[b];
        if (!bucket->sharded) {
            bytes += dtrain__whole_wire(layout, bucket);
            continue;
        }
        if (bucket->trainable) bytes += dtrain__sliced_wire(layout, bucket, true, grads);
        if (bucket->trainable && layout->traits->kind == DTRAIN_STRATEGY_HYBRID_SHARD)
            bytes +=
                dtrain__wire(DTRAIN_COLLECTIVE_ALL_REDUCE, bucket->shard_count, grads, replicas);
        const uint64_t gather = dtrain__sliced_wire(layout, bucket, false, values);
        bytes += gather;
        if (layout->slots && !dtrain__stays(layout, bucket->unit)) bytes += gather;
    }
    return bytes;
}

DTRAIN_API void dtrain_strategy_query(const dtrain_strategy *strategy, dtrain_strategy_info *info)
{
    if (!info) return;
    memset(info, 0, sizeof *info);
    if (!strategy) return;
    const dtrain__layout *layout = &strategy->layout;
    const int ranks = dtrain_comm_size(strategy->comm);
    info->desc = strategy->desc;
    info->name = strategy->traits->name;
    info->param_count = strategy->param_count;
    info->bucket_count = layout->bucket_count;
    info->unit_count = layout->unit_count;
    info->shard_ranks = layout->ranks;
    info->replicas = ranks / layout->ranks;
    info->sync_count = strategy->sync_count;
    info->buffer_bytes = layout->bytes[DTRAIN__BUFFERS];
    info->host_bytes = layout->bytes[DTRAIN__HOST];
    info->step_bytes = dtrain__step_bytes(layout, ranks);
    info->state_bytes = layout->state_bytes;
    dtrain__layout_bytes(layout, &info->value_bytes, &info->grad_bytes);
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

/* ---- Planning ---------------------------------------------------------------------------------*/

/* Page-locked memory of an optimizer that works there: states, master copies of values that are on
 * the device, and two stages for gradients that are; *stage: elements of one. */
DTRAIN__PRIVATE uint64_t dtrain__offloaded_state(const dtrain__layout *layout, size_t states,
                                                 int64_t *stage)
{
    uint64_t bytes = 0;
    *stage = 0;
    for (size_t i = 0; i < layout->count; i++) {
        int64_t offset, count;
        if (!dtrain__piece(layout, i, &offset, &count)) continue;
        const dtrain__bucket *bucket = &layout->buckets[layout->entries[i].bucket];
        const bool master = !(layout->host_values && bucket->sharded);
        const int64_t some = dtrain__min(dtrain__padded(count), DTRAIN__PIECE);
        bytes += (uint64_t)dtrain__padded(count) * sizeof(float) * (states + (master ? 1 : 0));
        if (!(layout->host_grads && bucket->work)) *stage = dtrain__max(*stage, some);
    }
    return bytes + 2 * (uint64_t)*stage * sizeof(float);
}

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

/* Of one kind, for the rank that holds most; params are resolved. */
static dtrain_result dtrain__plan_kind(const dtrain_allocator *a, const dtrain_param *params,
                                       size_t count, dtrain_strategy_desc desc, uint32_t kind,
                                       int ranks, dtrain_memory *memory, uint64_t *step_bytes)
{
    desc.kind = kind;
    const dtrain__traits *traits = dtrain__traits_of(kind);
    const int shard_ranks = !traits->state ? 1
                            : kind == DTRAIN_STRATEGY_HYBRID_SHARD && desc.node_size
                                ? (int)desc.node_size
                                : ranks;
    dtrain__resolve_accumulation(&desc, traits);
    dtrain__resolve_levels(&desc, ranks);
    memset(memory, 0, sizeof *memory);
    if (step_bytes) *step_bytes = 0;
    for (int rank = 0; rank < (traits->owners ? shard_ranks : 1); rank++) {
        dtrain__layout layout;
        dtrain_memory one;
        dtrain_result result =
            dtrain__layout_make(&layout, a, params, count, &desc, shard_ranks, rank, ranks, rank);
        memset(&one, 0, sizeof one);
        if (result == DTRAIN_OK) {
            int64_t stage;
            dtrain__lay_memory(&layout);
            dtrain__layout_bytes(&layout, &one.params, &one.grads);
            one.buffers = layout.bytes[DTRAIN__BUFFERS];
            one.host = layout.bytes[DTRAIN__HOST];
            if (desc.offload)
                one.host += dtrain__offloaded_state(&layout, dtrain__planned_states(&desc), &stage);
            else one.optimizer = dtrain__layout_state(&layout);
            one.total = one.params + one.grads + one.buffers + one.optimizer;
            if (step_bytes) *step_bytes = dtrain__step_bytes(&layout, ranks);
        }
        dtrain__layout_free(&layout, a);
        DTRAIN__TRY(result);
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
    DTRAIN__TRY(dtrain__resolve_desc(desc, &resolved, &compression));
    const dtrain__traits *traits = dtrain__traits_of(resolved.kind);
    if (!traits)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: kind %u is not one that can be planned",
                           call, (unsigned)desc->kind);
    DTRAIN__TRY(dtrain__check_combination(&resolved, traits));
    if (desc->node_size && rank_count % (int)desc->node_size)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: node_size %u does not divide %d ranks", call,
                           desc->node_size, rank_count);
    uint64_t *hashes = (uint64_t *)dtrain__alloc(&a, param_count, sizeof *hashes, "name hashes");
    if (!hashes) return DTRAIN_ERROR_MEMORY;
    dtrain_result result = dtrain__resolve_params(params, param_count, hashes);
    dtrain__free(&a, hashes, param_count, sizeof *hashes);
    if (result == DTRAIN_OK)
        result = dtrain__plan_kind(&a, params, param_count, resolved, resolved.kind, rank_count,
                                   memory, NULL);
    return result;
}

/* ---- AUTO -------------------------------------------------------------------------------------*/

/* What a plan does not count: whole pages, stages of further communicators, a trainer's scalars. */
#define DTRAIN__UNPLANNED_BYTES ((uint64_t)1 << 20)

/* What this rank may use from here on. Of memory that nobody has limited a sixteenth stays free:
 * for scratch of kernels and for others on the machine. */
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
        DTRAIN__TRY(device->ops->query(device, &info));
        *left = info.free_bytes / 16 * 15;
    }
    return DTRAIN_OK;
}

/* That, less what is used beside the strategy; negative when that alone is too much. The rank that
 * has least decides for all: the choice must be one. */
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

DTRAIN__PRIVATE double dtrain__mib(uint64_t bytes) { return (double)bytes / 1048576.0; }

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

/* Makes desc that of AUTO's i-th candidate; false: these ranks or the rest of desc exclude it. */
static bool dtrain__auto_candidate(const dtrain_world *world, int ranks, size_t i,
                                   dtrain_strategy_desc *desc)
{
    const uint32_t kind = dtrain__auto_order[i];
    const int nodes = dtrain_world_node_count(world), node_size = dtrain_world_local_size(world);
    const uint32_t alone = desc->offload & DTRAIN_OFFLOAD_PARAMS  ? DTRAIN_STRATEGY_FULL_SHARD
                           : desc->offload & DTRAIN_OFFLOAD_GRADS ? DTRAIN_STRATEGY_SHARD_GRAD_OP
                                                                  : DTRAIN_STRATEGY_DDP;
    if (ranks == 1 ? kind != alone : kind == DTRAIN_STRATEGY_DDP) return false;
    if (kind == DTRAIN_STRATEGY_HYBRID_SHARD && (nodes == 1 || nodes * node_size != ranks))
        return false;
    if (kind == DTRAIN_STRATEGY_HYBRID_SHARD) desc->node_size = (uint32_t)node_size;
    desc->kind = kind;
    return dtrain__check_combination(desc, dtrain__traits_of(kind)) == DTRAIN_OK;
}

static dtrain_result dtrain__auto_excluded(int ranks)
{
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "dtrain_strategy_create: DTRAIN_STRATEGY_AUTO: none of the kinds that it "
                       "chooses from with %d ranks takes the rest of the desc; name a kind to hear "
                       "why not",
                       ranks);
}

/* Of a strategy that is not there yet; of AUTO's candidates, the least that one of them needs. */
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
        if (desc.kind == DTRAIN_STRATEGY_HYBRID_SHARD && !desc.node_size)
            desc.node_size = (uint32_t)dtrain_world_local_size(world);
        DTRAIN__TRY(dtrain_strategy_plan(params, count, &desc, ranks, &memory));
        if (memory.total < *bytes) *bytes = memory.total;
    }
    return *bytes == UINT64_MAX ? dtrain__auto_excluded(ranks) : DTRAIN_OK;
}

/* The first that fits of those that send least. What the candidate before it was short of is the
 * reason. */
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
        const uint32_t kind = dtrain__auto_order[i];
        dtrain_strategy_desc desc = strategy->desc;
        dtrain_memory memory;
        uint64_t step_bytes;
        if (!dtrain__auto_candidate(strategy->world, ranks, i, &desc)) continue;
        DTRAIN__TRY(
            dtrain__agree(strategy->comm, dtrain__plan_kind(&strategy->allocator, strategy->params,
                                                            strategy->param_count, desc, kind,
                                                            ranks, &memory, &step_bytes)));
        const char *name = dtrain__traits_of(kind)->name;
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
        strategy->desc.kind = kind;
        strategy->desc.node_size = desc.node_size;
        return DTRAIN_OK;
    }
    if (least == INT64_MAX) return dtrain__auto_excluded(ranks);
    return dtrain__auto_fails(strategy, least, left);
}
