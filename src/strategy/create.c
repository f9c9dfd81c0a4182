/* Creation
*
 * 1. local: check the array and the desc                        -> agree
 * 2. compare the registration of all ranks
 * 3. AUTO: choose; HYBRID_SHARD: split the ranks; check what the kind can do
 * 4. local: lay out, allocate, initialise                       -> agree
 * 5. broadcast rank 0's values of parameters the host owns; publish */

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
#include "strategy/compression.h"
#include "strategy/compression_internal.h"
#include "strategy/layout_internal.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"
#include "device/device.h"

static dtrain_result dtrain__strategy_register(dtrain_strategy *strategy,
                                               const dtrain_strategy_desc *desc)
{
    const size_t count = strategy->param_count;
    if (!strategy->params && count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_create: params is NULL, param_count is %zu", count);
    if (count > UINT32_MAX - 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_create: %zu parameters are too many", count);
    DTRAIN__TRY(dtrain__strategy_resolve(strategy, desc));
    strategy->gathered =
        (int64_t *)dtrain__alloc(&strategy->allocator, (size_t)dtrain_comm_size(strategy->comm),
                                 sizeof *strategy->gathered, "gathered hashes");
    if (!strategy->gathered) return DTRAIN_ERROR_MEMORY;
    uint64_t *hashes =
        (uint64_t *)dtrain__alloc(&strategy->allocator, count, sizeof *hashes, "name hashes");
    if (!hashes) return DTRAIN_ERROR_MEMORY;
    const dtrain_result result = dtrain__resolve_params(strategy->params, count, hashes);
    dtrain__free(&strategy->allocator, hashes, count, sizeof *hashes);
    return result;
}

/* Consecutive ranks are one node. With hierarchical one node alone, or nodes of one rank, are no
 * mistake: a program that is started on fewer machines goes on, on one level. */
static dtrain_result dtrain__check_node_size(dtrain_strategy *strategy)
{
    dtrain_strategy_desc *desc = &strategy->desc;
    const char *const call = "dtrain_strategy_create";
    const int ranks = dtrain_comm_size(strategy->comm);
    if (desc->node_size == 0) {
        if (!desc->hierarchical && dtrain_world_node_count(strategy->world) == 1 && ranks > 1)
            return dtrain_fail(
                DTRAIN_ERROR_ARGUMENT,
                "%s: DTRAIN_STRATEGY_HYBRID_SHARD shards inside a node and replicates across "
                "nodes, but all ranks are on one; set node_size, or use "
                "DTRAIN_STRATEGY_FULL_SHARD",
                call);
        desc->node_size = (uint32_t)dtrain_world_local_size(strategy->world);
    }
    if (desc->node_size > (uint32_t)ranks || (uint32_t)ranks % desc->node_size)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: node_size %u does not divide %d ranks; every node must have as "
                           "many",
                           call, desc->node_size, ranks);
    return DTRAIN_OK;
}

/* With hierarchical, what is lossy is for the way between nodes: one node has none. */
DTRAIN__PRIVATE void dtrain__resolve_levels(dtrain_strategy_desc *desc, int ranks)
{
    if (!desc->hierarchical || (desc->node_size && (int)desc->node_size != ranks)) return;
    desc->reduce_dtype = DTRAIN_DTYPE_F32;
    desc->compression = NULL;
}

/* The same ranks as in groups[from], for steps of another kind. */
static dtrain_result dtrain__split_again(dtrain_strategy *strategy, dtrain_comm *from, int to)
{
    return dtrain_comm_split(from, 0, dtrain_comm_rank(from), &strategy->groups[to]);
}

/* HYBRID_SHARD: every node has a copy. */
DTRAIN__PRIVATE bool dtrain__has_replicas(const dtrain_strategy *strategy)
{
    return strategy->traits->kind == DTRAIN_STRATEGY_HYBRID_SHARD;
}

/* Two levels, and rounds that follow one another. */
static dtrain_result dtrain__split_groups(dtrain_strategy *strategy)
{
    const dtrain_strategy_desc *desc = &strategy->desc;
    const dtrain__traits *traits = strategy->traits;
    const int ranks = dtrain_comm_size(strategy->comm), rank = dtrain_comm_rank(strategy->comm);
    const bool replicas = dtrain__has_replicas(strategy);
    const int size = desc->hierarchical || replicas ? (int)desc->node_size : 1;
    const bool rounds =
        desc->compression && (desc->compression->kind == DTRAIN_COMPRESSION_POWERSGD ||
                              dtrain__is_balanced(desc->compression));
    dtrain_comm **groups = strategy->groups;
    if (replicas || (size > 1 && size < ranks)) {
        DTRAIN__TRY(dtrain_comm_split(strategy->comm, rank / size, rank, &groups[DTRAIN__NODE]));
        DTRAIN__TRY(dtrain_comm_split(strategy->comm, rank % size, rank, &groups[DTRAIN__ACROSS]));
    }
    if (!replicas && groups[DTRAIN__NODE]) {
        if (!traits->state || desc->whole_below)
            DTRAIN__TRY(dtrain__split_again(strategy, groups[DTRAIN__NODE], DTRAIN__BACK));
        if (traits->state) {
            DTRAIN__TRY(
                dtrain__split_again(strategy, groups[DTRAIN__ACROSS], DTRAIN__FETCH_ACROSS));
            DTRAIN__TRY(dtrain__split_again(strategy, groups[DTRAIN__NODE], DTRAIN__FETCH));
        }
    }
    if (rounds && ranks > 1)
        DTRAIN__TRY(dtrain__split_again(
            strategy, groups[DTRAIN__ACROSS] ? groups[DTRAIN__ACROSS] : strategy->comm,
            DTRAIN__SECOND));
    return DTRAIN_OK;
}

static dtrain_result dtrain__strategy_split(dtrain_strategy *strategy)
{
    const int ranks = dtrain_comm_size(strategy->comm);
    const bool replicas = dtrain__has_replicas(strategy);
    const uint32_t shards = DTRAIN_OFFLOAD_GRADS | DTRAIN_OFFLOAD_PARAMS;
    if (strategy->desc.hierarchical || replicas)
        DTRAIN__TRY(dtrain__check_node_size(strategy)); /* the same on every rank */
    dtrain__resolve_levels(&strategy->desc, ranks);
    DTRAIN__TRY(dtrain__split_groups(strategy));
    if (replicas) strategy->shard_comm = strategy->groups[DTRAIN__NODE];
    else if (strategy->traits->state && (ranks > 1 || (strategy->desc.offload & shards)))
        strategy->shard_comm = strategy->comm;
    return DTRAIN_OK;
}

/* Who is on which level. */
static void dtrain__layout_grid(dtrain__layout *layout)
{
    const dtrain_strategy_desc *desc = layout->desc;
    const int size = desc->hierarchical ? (int)desc->node_size : 0;
    const bool nodes = size > 1 && size < layout->all;
    layout->node_ranks = nodes ? size : 1;
    layout->hop_ranks = nodes ? layout->all / size : layout->all;
    layout->hop_rank = nodes ? layout->all_rank / size : layout->all_rank;
    layout->compression = layout->all > 1 ? desc->compression : NULL;
}

/* The tables of a layout, zeroed; what there is of them is freed by _free also after an error. */
DTRAIN__PRIVATE dtrain_result dtrain__layout_make(dtrain__layout *layout, const dtrain_allocator *a,
                                                  const dtrain_param *params, size_t count,
                                                  const dtrain_strategy_desc *desc, int ranks,
                                                  int rank, int all, int all_rank)
{
    const size_t cuts = (size_t)ranks + 1;
    memset(layout, 0, sizeof *layout);
    layout->params = params;
    layout->count = count;
    layout->desc = desc;
    layout->traits = dtrain__traits_of(desc->kind);
    layout->ranks = ranks;
    layout->rank = rank;
    layout->all = all;
    layout->all_rank = all_rank;
    dtrain__layout_grid(layout);
    layout->host_values = layout->traits->params && (desc->offload & DTRAIN_OFFLOAD_PARAMS);
    layout->host_grads = layout->traits->grads && (desc->offload & DTRAIN_OFFLOAD_GRADS);
    layout->slots = layout->traits->params && (ranks > 1 || layout->host_values);
    layout->work = layout->traits->grads && (ranks > 1 || layout->host_grads) &&
                   desc->accumulation != DTRAIN_ACCUMULATION_LAST;
    layout->shards = layout->traits->state && (ranks > 1 || layout->slots || layout->work);
    layout->entries =
        (dtrain__entry *)dtrain__alloc(a, count, sizeof *layout->entries, "parameter entries");
    layout->buckets = (dtrain__bucket *)dtrain__alloc(a, count, sizeof *layout->buckets, "buckets");
    layout->units = (dtrain__unit *)dtrain__alloc(a, count, sizeof *layout->units, "units");
    if (!layout->entries || !layout->buckets || !layout->units) return DTRAIN_ERROR_MEMORY;
    if (layout->shards && layout->traits->owners) {
        layout->owners =
            (uint32_t *)dtrain__alloc(a, count, sizeof *layout->owners, "owners of parameters");
        layout->cuts = (int64_t *)dtrain__alloc(a, count, cuts * sizeof *layout->cuts, "cuts");
        if (!layout->owners || !layout->cuts) return DTRAIN_ERROR_MEMORY;
    }
    dtrain__lay_out(layout);
    return layout->compression ? dtrain__layout_portions(layout, a) : DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__layout_free(dtrain__layout *layout, const dtrain_allocator *a)
{
    const size_t cuts = (size_t)layout->ranks + 1;
    dtrain__layout_portions_free(layout, a);
    dtrain__free(a, layout->cuts, layout->count, cuts * sizeof *layout->cuts);
    dtrain__free(a, layout->owners, layout->count, sizeof *layout->owners);
    dtrain__free(a, layout->units, layout->count, sizeof *layout->units);
    dtrain__free(a, layout->buckets, layout->count, sizeof *layout->buckets);
    dtrain__free(a, layout->entries, layout->count, sizeof *layout->entries);
}

static dtrain_result dtrain__strategy_tables(dtrain_strategy *strategy)
{
    const dtrain_allocator *a = &strategy->allocator;
    const size_t count = strategy->param_count;
    dtrain_comm *shared = strategy->shard_comm;
    DTRAIN__TRY(dtrain__layout_make(
        &strategy->layout, a, strategy->params, count, &strategy->desc,
        shared ? dtrain_comm_size(shared) : 1, shared ? dtrain_comm_rank(shared) : 0,
        dtrain_comm_size(strategy->comm), dtrain_comm_rank(strategy->comm)));
    strategy->works_per_bucket = strategy->layout.owners        ? (size_t)strategy->layout.ranks
                                 : strategy->layout.compression ? 2
                                                                : 1;
    strategy->works = (dtrain_work **)dtrain__alloc(
        a, count, 2 * strategy->works_per_bucket * sizeof *strategy->works, "handles");
    strategy->shards = (dtrain_shard *)dtrain__alloc(a, count, sizeof *strategy->shards, "shards");
    strategy->counted = (bool *)dtrain__alloc(a, count, sizeof *strategy->counted, "shards");
    return strategy->works && strategy->shards && strategy->counted ? DTRAIN_OK
                                                                    : DTRAIN_ERROR_MEMORY;
}

/* The state between two backwards, and between two steps. Work buffers have been emptied: the next
 * backward overwrites them. Whole gradients go on until the step ends. */
DTRAIN__PRIVATE void dtrain__strategy_rewind(dtrain_strategy *strategy, bool step_done)
{
    dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count; i++) {
        dtrain__entry *entry = &layout->entries[i];
        const dtrain__bucket *bucket =
            entry->bucket == DTRAIN__NONE ? NULL : &layout->buckets[entry->bucket];
        entry->marked = false;
        if (step_done) entry->seen = false;
        entry->pending = entry->uses;
        if (step_done || (bucket && bucket->work)) strategy->params[i].state.grad_written = false;
    }
    for (size_t b = 0; b < layout->bucket_count; b++) {
        layout->buckets[b].pending = layout->buckets[b].uses;
        layout->buckets[b].stage = DTRAIN__REDUCE_IDLE;
    }
    strategy->launched = strategy->oldest = strategy->marked_count = 0;
    strategy->working[0] = strategy->working[1] = DTRAIN__NONE;
    strategy->accumulated = !step_done;
    if (step_done) dtrain__choose_ways(strategy);
}

/* Points params at memory of the library; aliases follow their storage. Values of gathered units
 * have no address until gather. */
static void dtrain__lend(dtrain_strategy *strategy)
{
    dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count; i++) {
        dtrain_param *p = &strategy->params[i], *storage = p->state.storage;
        dtrain__entry *entry = &layout->entries[i];
        const dtrain__bucket *bucket =
            entry->bucket == DTRAIN__NONE ? NULL : &layout->buckets[entry->bucket];
        if (!p->value) {
            entry->lends_value = true;
            if (storage != p) p->value = storage->value;
            else if (dtrain__value_is_whole(layout, entry)) p->value = entry->place;
            else if (!layout->slots) p->value = bucket->values + entry->offset;
        }
        if (!p->grad && entry->trainable) {
            entry->lends_grad = true;
            p->grad = storage != p ? storage->grad : bucket->grads + entry->offset;
        }
    }
}

static void dtrain__list_shards(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    strategy->shard_count = 0;
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        const dtrain__entry *entry = &layout->entries[i];
        int64_t offset, count;
        if (!dtrain__piece(layout, i, &offset, &count)) continue;
        const dtrain__bucket *bucket = &layout->buckets[entry->bucket];
        const int64_t at = entry->offset + offset - bucket->shard_first;
        dtrain_shard *shard = &strategy->shards[strategy->shard_count];
        strategy->counted[strategy->shard_count++] = bucket->sharded || layout->rank == 0;
        shard->param = p;
        shard->offset = offset;
        shard->count = count;
        shard->value = bucket->sharded ? bucket->value_shard + at : p->value;
        shard->grad = bucket->sharded ? bucket->grad_shard + at : p->grad;
    }
}

/* A line more than is needed: also an empty tensor, or the only tensor of a model, gets an address
 * of its own. What other ranks read is memory of the communicator; padding is zero. */
static dtrain_result dtrain__strategy_memory(dtrain_strategy *strategy)
{
    dtrain__layout *layout = &strategy->layout;
    const dtrain_device_ops *ops = strategy->device->ops;
    void *memory;
    dtrain__lay_memory(layout);
    for (int block = 0; block < DTRAIN__CLASSES; block++) {
        const size_t bytes = layout->bytes[block] + DTRAIN__CACHE_LINE;
        if (block >= DTRAIN__BUFFERS && !layout->bytes[block]) continue;
        if (block == DTRAIN__HOST) DTRAIN__TRY(ops->host_alloc(strategy->device, bytes, &memory));
        else if (block == DTRAIN__VALUES && !layout->shards)
            DTRAIN__TRY(ops->alloc(strategy->device, bytes, &memory));
        else DTRAIN__TRY(dtrain_comm_alloc(strategy->comm, bytes, &memory));
        if (block == DTRAIN__HOST) memset(memory, 0, bytes);
        layout->memory[block] = (char *)memory;
        strategy->block_bytes[block] = bytes;
    }
    DTRAIN__TRY(ops->alloc(strategy->device, sizeof(double), &memory));
    strategy->sum_squares = (double *)memory;
    dtrain__lay_memory(layout);
    dtrain__lend(strategy);
    dtrain__list_shards(strategy);
    DTRAIN__TRY(dtrain__compression_open(strategy));
    dtrain__strategy_rewind(strategy, true);
    strategy->slots[0] = strategy->slots[1] = strategy->position = DTRAIN__NONE;
    return DTRAIN_OK;
}

static dtrain_result dtrain__check_kept_units(const dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    for (uint32_t i = 0; i < strategy->desc.kept_unit_count; i++) {
        const uint32_t id = strategy->desc.kept_units[i];
        size_t u = 0;
        while (u < layout->unit_count && layout->units[u].id != id) u++;
        if (u == layout->unit_count)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "dtrain_strategy_create: kept_units has unit %u, to which no "
                               "parameter belongs",
                               id);
    }
    return DTRAIN_OK;
}

/* Kinds that shard parameters have nowhere to put a host's whole array. */
static dtrain_result dtrain__check_ownership(const dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count && layout->slots; i++) {
        const dtrain_param *p = &strategy->params[i];
        if (p->value && !dtrain__value_is_whole(layout, &layout->entries[i]))
            return dtrain__param_fail(p, i,
                                      "its value is the host's, but %s shards parameters and has "
                                      "to own them: leave value NULL and give it an init",
                                      strategy->traits->name);
    }
    return DTRAIN_OK;
}

/* Of storage i: everything, or this rank's part of a sharded bucket. */
static dtrain_result dtrain__init_values(dtrain_strategy *strategy, size_t i)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain_param *p = &strategy->params[i];
    const dtrain__entry *entry = &layout->entries[i];
    const uint64_t seed = strategy->desc.init_seed;
    if (p->state.storage != p || !entry->lends_value) return DTRAIN_OK;
    if (dtrain__value_is_whole(layout, entry))
        return dtrain__init_param(strategy->device, p, seed, 0, p->count, p->value);
    const dtrain__bucket *bucket = &layout->buckets[entry->bucket];
    const int64_t low = dtrain__max(entry->offset, bucket->shard_first);
    const int64_t high =
        dtrain__min(entry->offset + p->count, bucket->shard_first + bucket->shard_count);
    if (high <= low) return DTRAIN_OK;
    return dtrain__init_param(strategy->device, p, seed, low - entry->offset, high - low,
                              bucket->value_shard + (low - bucket->shard_first));
}

static dtrain_result dtrain__strategy_prepare(dtrain_strategy *strategy)
{
    DTRAIN__TRY(dtrain__strategy_tables(strategy));
    DTRAIN__TRY(dtrain__check_kept_units(strategy));
    DTRAIN__TRY(dtrain__check_ownership(strategy));
    DTRAIN__TRY(dtrain__offload_open(strategy));
    DTRAIN__TRY(dtrain__strategy_memory(strategy));
    for (size_t i = 0; i < strategy->param_count; i++)
        DTRAIN__TRY(dtrain__init_values(strategy, i));
    return DTRAIN_OK;
}

/* ZERO1 and SHARD_GRAD_OP with arrays of the host: between them and the flat buckets. */
DTRAIN__PRIVATE dtrain_result dtrain__copy_host_values(dtrain_strategy *strategy, bool to_host)
{
    const dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        const dtrain__entry *entry = &layout->entries[i];
        if (p->state.storage != p || entry->lends_value || dtrain__value_is_whole(layout, entry))
            continue;
        float *place = layout->buckets[entry->bucket].values + entry->offset;
        DTRAIN__TRY(dtrain_device_copy(strategy->device, to_host ? p->value : place,
                                       to_host ? place : p->value,
                                       (size_t)p->count * sizeof(float)));
    }
    return DTRAIN_OK;
}

/* *out is set before anything can fail, so that the caller destroys what there is of it. */
static dtrain_result dtrain__strategy_begin(dtrain_world *world, dtrain_param *params,
                                            size_t param_count, const dtrain_strategy_desc *desc,
                                            dtrain_comm *comm, dtrain_strategy **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_strategy_create: out is NULL");
    const dtrain_allocator *allocator = dtrain_world_allocator(world);
    dtrain_strategy *strategy =
        (dtrain_strategy *)dtrain__alloc(allocator, 1, sizeof *strategy, "a strategy");
    *out = strategy;
    if (!strategy) return DTRAIN_ERROR_MEMORY;
    strategy->world = world;
    strategy->device = dtrain_world_device(world);
    strategy->comm = comm;
    strategy->allocator = *allocator;
    strategy->params = params;
    strategy->param_count = param_count;
    return dtrain__strategy_register(strategy, desc);
}

static dtrain_result dtrain__strategy_complete(dtrain_strategy *strategy)
{
    DTRAIN__TRY(dtrain__strategy_compare(strategy));
    DTRAIN__TRY(dtrain__strategy_choose(strategy));
    strategy->traits = dtrain__traits_of(strategy->desc.kind);
    dtrain__resolve_accumulation(&strategy->desc, strategy->traits);
    DTRAIN__TRY(dtrain__check_combination(&strategy->desc, strategy->traits));
    DTRAIN__TRY(dtrain__strategy_split(strategy));
    DTRAIN__TRY(dtrain__agree(strategy->comm, dtrain__strategy_prepare(strategy)));
    DTRAIN__TRY(dtrain__broadcast_values(strategy->comm, strategy->params, strategy->param_count,
                                         strategy->layout.entries));
    DTRAIN__TRY(dtrain__copy_host_values(strategy, false));
    strategy->desc.kept_units = NULL; /* the caller's, and read */
    strategy->desc.kept_unit_count = 0;
    return dtrain_strategy_publish(strategy);
}

DTRAIN_API dtrain_result dtrain_strategy_create(dtrain_world *world, dtrain_param *params,
                                                size_t param_count,
                                                const dtrain_strategy_desc *desc,
                                                dtrain_strategy **out)
{
    if (out) *out = NULL;
    if (!world) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_strategy_create: world is NULL");
    dtrain_comm *comm = desc && desc->comm ? desc->comm : dtrain_world_comm(world);
    dtrain_result result = dtrain__strategy_begin(world, params, param_count, desc, comm, out);
    result = dtrain__agree(comm, result);
    if (result == DTRAIN_OK) result = dtrain__strategy_complete(*out);
    if (result == DTRAIN_OK || !out) return result;
    dtrain_strategy_destroy(*out);
    *out = NULL;
    return result;
}

/* ---- Handles ----------------------------------------------------------------------------------*/

/* Of bucket b's reduces (gather false) or gathers, works_per_bucket of them. */
DTRAIN__PRIVATE dtrain_work **dtrain__works(const dtrain_strategy *strategy, size_t b, bool gather)
{
    const size_t per = strategy->works_per_bucket;
    return strategy->works + (2 * b + (gather ? 1 : 0)) * per;
}

/* Every handle goes back, also after an error: waiting on a failed communicator returns at once. */
DTRAIN__PRIVATE dtrain_result dtrain__wait_works(const dtrain_strategy *strategy,
                                                 dtrain_work **works)
{
    dtrain_result result = DTRAIN_OK;
    for (size_t i = 0; i < strategy->works_per_bucket; i++) {
        const dtrain_result one = dtrain_work_wait(works[i]);
        works[i] = NULL;
        if (result == DTRAIN_OK) result = one;
    }
    return result;
}

DTRAIN__PRIVATE dtrain_result dtrain__test_works(const dtrain_strategy *strategy,
                                                 dtrain_work **works, bool *done)
{
    *done = true;
    for (size_t i = 0; i < strategy->works_per_bucket && *done; i++)
        if (works[i]) DTRAIN__TRY(dtrain_work_test(works[i], done));
    return DTRAIN_OK;
}

/* ---- Life -------------------------------------------------------------------------------------*/

/* Fails all its communicators, wherever other ranks may be waiting; returns what stands. */
static dtrain_result dtrain__strategy_fail(dtrain_strategy *strategy, dtrain_result code,
                                           const char *text)
{
    char kept[DTRAIN__ERROR_BYTES];
    snprintf(kept, sizeof kept, "%s", text);
    for (int i = 0; i < DTRAIN__GROUPS; i++) {
        dtrain_comm *group = strategy->groups[i];
        if (group) group->ops->fail(group, code, kept);
    }
    return strategy->comm->ops->fail(strategy->comm, code, kept);
}

/* Gradients in flight are also read and written by other ranks, and those expect the rest of the
 * step: the communicator fails, which they hear of at once. Why this rank gave up is more
 * interesting than this consequence: its last error stays. A unit that is only being fetched ahead
 * is waited for: nothing is missing, and nobody need fail. */
static void dtrain__strategy_abandon(dtrain_strategy *strategy)
{
    char text[DTRAIN__ERROR_BYTES];
    size_t flights = 0;
    for (size_t b = 0; b < strategy->layout.bucket_count; b++)
        for (size_t i = 0; i < strategy->works_per_bucket; i++)
            flights += dtrain__works(strategy, b, false)[i] != NULL;
    memcpy(text, dtrain_last_error(), sizeof text);
    if (flights)
        dtrain__strategy_fail(strategy, DTRAIN_ERROR_USAGE,
                              "dtrain_strategy_destroy: called between ready and finish, with "
                              "gradients in flight");
    for (size_t b = 0; b < strategy->layout.bucket_count; b++) {
        dtrain__wait_works(strategy, dtrain__works(strategy, b, false));
        dtrain__wait_works(strategy, dtrain__works(strategy, b, true));
    }
    if (text[0]) dtrain__set_last_error(text);
}

static void dtrain__strategy_free_blocks(dtrain_strategy *strategy)
{
    dtrain__layout *layout = &strategy->layout;
    dtrain_device *device = strategy->device;
    for (int block = 0; block < DTRAIN__CLASSES; block++) {
        const size_t bytes = strategy->block_bytes[block];
        if (!layout->memory[block]) continue;
        if (block == DTRAIN__HOST) device->ops->host_free(device, layout->memory[block], bytes);
        else if (block == DTRAIN__VALUES && !layout->shards)
            device->ops->free(device, layout->memory[block], bytes);
        else dtrain_comm_free(strategy->comm, layout->memory[block], bytes);
    }
    if (strategy->sum_squares) device->ops->free(device, strategy->sum_squares, sizeof(double));
}

DTRAIN_API void dtrain_strategy_destroy(dtrain_strategy *strategy)
{
    if (!strategy) return;
    const dtrain_allocator a = strategy->allocator;
    const size_t count = strategy->param_count;
    if (strategy->works) dtrain__strategy_abandon(strategy);
    for (size_t i = 0; strategy->layout.entries && i < count; i++) {
        if (strategy->layout.entries[i].lends_value) strategy->params[i].value = NULL;
        if (strategy->layout.entries[i].lends_grad) strategy->params[i].grad = NULL;
    }
    dtrain__offload_close(strategy);
    dtrain__strategy_free_blocks(strategy);
    dtrain__free(&a, strategy->gathered, (size_t)dtrain_comm_size(strategy->comm),
                 sizeof *strategy->gathered);
    dtrain__free(&a, strategy->states, count, sizeof *strategy->states);
    dtrain__free(&a, strategy->counted, count, sizeof *strategy->counted);
    dtrain__free(&a, strategy->shards, count, sizeof *strategy->shards);
    dtrain__free(&a, strategy->works, count,
                 2 * strategy->works_per_bucket * sizeof *strategy->works);
    dtrain__layout_free(&strategy->layout, &a);
    for (int i = 0; i < DTRAIN__GROUPS; i++)
        if (strategy->groups[i]) dtrain_comm_destroy(strategy->groups[i]);
    dtrain__free(&a, strategy, 1, sizeof *strategy);
}

DTRAIN__PRIVATE dtrain_result dtrain__strategy_usable(const dtrain_strategy *strategy,
                                                      const char *call)
{
    if (!strategy) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: strategy is NULL", call);
    if (strategy->failure == DTRAIN_OK) return DTRAIN_OK;
    return dtrain_fail(strategy->failure, "%s", strategy->failure_text);
}

/* Communicator and device do not recover, and some gradients are averaged while others are not:
 * the error stands. The communicator fails with it, for the other ranks count on this one; when the
 * error came from there, it is what fail returns. */
DTRAIN__PRIVATE dtrain_result dtrain__strategy_keep(dtrain_strategy *strategy, dtrain_result result)
{
    if (result == DTRAIN_OK || strategy->failure != DTRAIN_OK) return result;
    strategy->failure = dtrain__strategy_fail(strategy, result, dtrain_last_error());
    snprintf(strategy->failure_text, sizeof strategy->failure_text, "%s",
             dtrain__bare(dtrain_last_error()));
    return strategy->failure;
}
