/* Planning, and AUTO
 *
 * A plan is the memory of a rank, counted from the layout that it would have. AUTO takes the first
 * candidate that fits into the memory of every rank. The candidates go from little communication
 * and much memory to much communication and little memory. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

DTRAIN__PRIVATE double dtrain__mib(uint64_t bytes) { return (double)bytes / 1048576.0; }

/* Count the memory of a layout's rank, and keep it in *memory if it is larger. */
static void dtrain__plan_count(const dtrain__layout *layout, dtrain_memory *memory)
{
    const dtrain_strategy_desc *desc = layout->desc;
    int64_t staging = 0;
    uint64_t state = 0;
    for (size_t i = 0; i < layout->count; i++) {
        const uint32_t group = layout->params[i].state.storage->group;
        const bool own = group && group <= desc->group_count;
        const uint32_t states = own ? desc->group_states[group - 1] : desc->optimizer_states;
        const bool none = states == DTRAIN_OPTIMIZER_STATES_NONE;
        state += dtrain__update_bytes(layout, i, none ? 0 : states, false, &staging);
    }
    state += 2 * (uint64_t)staging * sizeof(float);
    dtrain_memory one;
    memset(&one, 0, sizeof one);
    one.params = layout->value_bytes;
    one.grads = layout->grad_bytes;
    one.buffers = layout->bytes[DTRAIN__BUFFERS];
    one.host = layout->bytes[DTRAIN__HOST];
    if (desc->offload) one.host += state;
    else one.optimizer = state;
    one.total = one.params + one.grads + one.buffers + one.optimizer;
    const uint64_t host = one.host > memory->host ? one.host : memory->host;
    if (one.total >= memory->total) *memory = one;
    memory->host = host;
}

/* Find the memory of the rank that needs most. Allocates only tables. params, *desc and its kind
 * are resolved. */
DTRAIN__PRIVATE dtrain_result dtrain__plan_kind(const dtrain__model *model,
                                                const dtrain_strategy_desc *given,
                                                dtrain_memory *memory)
{
    dtrain_strategy_desc desc = *given;
    dtrain__layout layout;
    dtrain__resolve_levels(&desc, model->ranks);
    memset(memory, 0, sizeof *memory);
    dtrain_result result = dtrain__steps_layout(&layout, model, &desc, 0);
    /* Ranks with equal shards need the same memory. With owned tensors, with groups that have other
     * numbers of states, and with compression's states of a slice they do not. */
    const int differ = desc.compression                          ? model->ranks
                       : layout.kind->owners || desc.group_count ? layout.ranks
                                                                 : 1;
    for (int rank = 1; result == DTRAIN_OK; rank++) {
        dtrain__plan_count(&layout, memory);
        if (rank == differ) break;
        if (desc.compression) {
            dtrain__steps_layout_free(&layout, model->allocator);
            result = dtrain__steps_layout(&layout, model, &desc, rank);
        } else {
            dtrain__layout_turn(&layout, rank);
            dtrain__steps_memory(&layout);
        }
    }
    dtrain__steps_layout_free(&layout, model->allocator);
    return result;
}

/* Resolve a desc into *planned, and params for a rank with its pipeline stages. */
DTRAIN__PRIVATE dtrain_result dtrain__plan_resolve(const dtrain__model *model,
                                                   const dtrain_strategy_desc *desc,
                                                   const dtrain__groups *groups,
                                                   dtrain__planned *planned)
{
    dtrain_param *params = model->params;
    DTRAIN__TRY(dtrain__resolve_desc(desc, &planned->desc, &planned->compression));
    const dtrain__kind_row *kind = dtrain__row_of(planned->desc.kind);
    if (kind) DTRAIN__TRY(dtrain__resolve_kind(&planned->desc, kind));
    if (kind && desc->node_size && model->ranks % (int)desc->node_size)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_plan: node_size %u does not divide %d ranks",
                           desc->node_size, model->ranks);
    DTRAIN__TRY(dtrain__resolve_params(params, model->count, groups));
    DTRAIN__TRY(dtrain__check_wide(params, model->count, desc));
    DTRAIN__TRY(dtrain__stage_map_make(&planned->stages, model->allocator, params, model->count,
                                       desc->pipeline, groups));
    dtrain__stage_params(&planned->stages, params, model->count);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_strategy_plan(dtrain_param *params, size_t param_count,
                                              const dtrain_strategy_desc *desc, int rank_count,
                                              dtrain_memory *memory)
{
    const dtrain_allocator a = dtrain__resolve_allocator(NULL);
    dtrain__groups groups;
    dtrain_strategy_desc own;
    dtrain_compression_desc how;
    DTRAIN__GIVEN("dtrain_strategy_plan", params);
    DTRAIN__GIVEN("dtrain_strategy_plan", desc);
    DTRAIN__GIVEN("dtrain_strategy_plan", memory);
    if (rank_count < 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_plan: rank_count is %d; expected 1 or more",
                           rank_count);
    DTRAIN__TRY(dtrain__take_strategy(NULL, desc, &own, &how));
    desc = &own;
    const dtrain_mesh_info mesh = dtrain__mesh_info(desc->mesh);
    if (desc->mesh && mesh.ranks != rank_count)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "dtrain_strategy_plan: rank_count is %d, and the mesh of the desc has %d "
            "ranks; give its number",
            rank_count, mesh.ranks);
    if (desc->kind == DTRAIN_STRATEGY_AUTO)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_plan: kind %u is not one that can be planned",
                           (unsigned)desc->kind);
    const dtrain__model model = {&a, params, param_count, desc->mesh ? mesh.data : rank_count};
    groups = dtrain__mesh_groups(NULL, desc->mesh, NULL);
    const int parts = groups.tensor_ranks * groups.pipeline_ranks;
    const int mine = mesh.tensor_rank + groups.tensor_ranks * mesh.pipeline_rank;
    memset(memory, 0, sizeof *memory);
    for (int i = 1; i <= parts; i++) { /* this rank's part last: params keep it */
        dtrain_memory one;
        dtrain__planned planned;
        memset(&planned, 0, sizeof planned);
        groups.tensor_rank = (mine + i) % parts % groups.tensor_ranks;
        groups.pipeline_rank = (mine + i) % parts / groups.tensor_ranks;
        dtrain_result result = dtrain__plan_resolve(&model, desc, &groups, &planned);
        if (result == DTRAIN_OK) result = dtrain__plan_kind(&model, &planned.desc, &one);
        dtrain__stage_map_free(&planned.stages, &a);
        DTRAIN__TRY(result);
        const uint64_t host = one.host > memory->host ? one.host : memory->host;
        if (one.total > memory->total || i == 1) *memory = one;
        memory->host = host;
    }
    return DTRAIN_OK;
}

/* ---- AUTO -------------------------------------------------------------------------------------*/

/* Reserve for bytes that a plan does not count: rounding to pages, buffers of further
 * communicators, a trainer's scalars. */
#define DTRAIN__UNPLANNED_BYTES ((uint64_t)1 << 20)

/* Set *left to the bytes that a strategy may use: the bytes that this rank can still allocate, less
 * other_bytes; it can be negative. Take the minimum over the ranks, so that all make the same
 * choice. Without a limit a sixteenth stays free, for scratch of kernels and other programs. */
DTRAIN__PRIVATE dtrain_result dtrain__auto_limit(dtrain_world *world,
                                                 const dtrain_strategy_desc *desc,
                                                 dtrain_comm *comm, int64_t *left)
{
    dtrain_device *device = world->device;
    const uint64_t used = (uint64_t)device->allocated_bytes + device->comm_bytes;
    const uint64_t taken = used + DTRAIN__UNPLANNED_BYTES;
    uint64_t have = desc->memory_limit;
    dtrain_result result = DTRAIN_OK;
    dtrain_device_info info;
    if (have == 0 && device->limit_bytes)
        have = device->limit_bytes > taken ? device->limit_bytes - taken : 0;
    else if (have == 0 && device->ops->host_memory)
        have = dtrain__free_memory() / 16 * 15 / (uint64_t)world->local_size;
    else if (have == 0) {
        memset(&info, 0, sizeof info);
        result = dtrain_device_query(device, &info);
        have = info.free_bytes / 16 * 15;
    }
    DTRAIN__TRY(dtrain__agree(comm, result));
    *left = (int64_t)(have < INT64_MAX ? have : INT64_MAX) -
            (int64_t)(desc->other_bytes < INT64_MAX ? desc->other_bytes : INT64_MAX);
    return dtrain_all_reduce(comm, left, left, 1, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MIN, NULL);
}

static const uint32_t dtrain__auto_order[DTRAIN__CANDIDATES] = {
    DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO1, DTRAIN_STRATEGY_SHARD_GRAD_OP,
    DTRAIN_STRATEGY_HYBRID_SHARD, DTRAIN_STRATEGY_FULL_SHARD};

/* Plan all candidates that the ranks and other fields do not exclude. node_ranks: ranks of each
 * node, 0 if nodes differ. Local. */
DTRAIN__PRIVATE dtrain_result dtrain__plan_candidates(const dtrain__model *model,
                                                      const dtrain_strategy_desc *given,
                                                      uint32_t node_ranks, dtrain__candidates *all)
{
    const int ranks = model->ranks;
    const uint32_t alone = given->offload & DTRAIN_OFFLOAD_PARAMS  ? DTRAIN_STRATEGY_FULL_SHARD
                           : given->offload & DTRAIN_OFFLOAD_GRADS ? DTRAIN_STRATEGY_SHARD_GRAD_OP
                                                                   : DTRAIN_STRATEGY_DDP;
    bool any = false;
    memset(all, 0, sizeof *all);
    for (size_t i = 0; i < DTRAIN__CANDIDATES; i++) {
        dtrain_strategy_desc *desc = &all->descs[i];
        const dtrain__kind_row *kind = dtrain__row_of(dtrain__auto_order[i]);
        *desc = *given;
        desc->kind = dtrain__auto_order[i];
        all->totals[i] = INT64_MAX;
        if (ranks == 1 ? desc->kind != alone : desc->kind == DTRAIN_STRATEGY_DDP) continue;
        if (kind->replicas && (node_ranks == 0 || node_ranks == (uint32_t)ranks)) continue;
        if (kind->replicas || (desc->hierarchical && !desc->node_size))
            desc->node_size = node_ranks;
        if (dtrain__resolve_kind(desc, kind) != DTRAIN_OK) continue;
        DTRAIN__TRY(dtrain__plan_kind(model, desc, &all->memory[i]));
        all->totals[i] = (int64_t)all->memory[i].total;
        any = true;
    }
    if (any) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "dtrain_strategy_create: DTRAIN_STRATEGY_AUTO: none of the kinds that it "
                       "chooses from with %d ranks takes the rest of the desc; name a kind to hear "
                       "why not",
                       ranks);
}

/* Resolve AUTO: take the first candidate that fits on every rank. The reason says how much the
 * candidate before it would have needed. */
DTRAIN__PRIVATE dtrain_result dtrain__strategy_choose(dtrain_strategy *strategy)
{
    const int ranks = dtrain_comm_size(strategy->groups.data);
    const dtrain__model model = {&strategy->allocator, strategy->params, strategy->param_count,
                                 ranks};
    dtrain__candidates all;
    uint32_t node_ranks;
    int64_t left, least = INT64_MAX;
    char before[160] = "";
    size_t i;
    if (strategy->desc.kind != DTRAIN_STRATEGY_AUTO) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__auto_limit(strategy->world, &strategy->desc, strategy->groups.all, &left));
    DTRAIN__TRY(dtrain__even_nodes(strategy->world, &strategy->groups, &node_ranks));
    DTRAIN__TRY(dtrain__agree(strategy->groups.all,
                              dtrain__plan_candidates(&model, &strategy->desc, node_ranks, &all)));
    DTRAIN__TRY(dtrain_all_reduce(strategy->groups.all, all.totals, all.totals, DTRAIN__CANDIDATES,
                                  DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    const uint64_t limit = left > 0 ? (uint64_t)left : 0;
    for (i = 0; i < DTRAIN__CANDIDATES; i++) {
        if (all.totals[i] == INT64_MAX) continue;
        if ((uint64_t)all.totals[i] <= limit) break;
        if (all.totals[i] < least) least = all.totals[i];
        snprintf(before, sizeof before, "; %s would need %.1f MiB",
                 dtrain__row_of(all.descs[i].kind)->name, dtrain__mib((uint64_t)all.totals[i]));
    }
    if (i == DTRAIN__CANDIDATES)
        return dtrain_fail(
            DTRAIN_ERROR_MEMORY,
            "dtrain_strategy_create: no strategy fits: the smallest needs %.1f MiB a rank for "
            "parameters, gradients, optimizer and buffers, and %.1f MiB are left for them beside "
            "%.1f MiB of activations and the rest: %.1f MiB are missing. More ranks, activation "
            "checkpointing, a smaller batch or, on a GPU, offload would help",
            dtrain__mib((uint64_t)least), dtrain__mib(limit),
            dtrain__mib(strategy->desc.other_bytes), dtrain__mib((uint64_t)(least - left)));
    const dtrain_memory *memory = &all.memory[i];
    snprintf(strategy->info.reason, sizeof strategy->info.reason,
             "%s: %.1f MiB a rank (parameters %.1f, gradients %.1f, optimizer %.1f, buffers "
             "%.1f) of %.1f MiB%s",
             dtrain__row_of(all.descs[i].kind)->name, dtrain__mib((uint64_t)all.totals[i]),
             dtrain__mib(memory->params), dtrain__mib(memory->grads),
             dtrain__mib(memory->optimizer), dtrain__mib(memory->buffers), dtrain__mib(limit),
             before);
    strategy->desc.kind = all.descs[i].kind;
    strategy->desc.node_size = all.descs[i].node_size;
    return DTRAIN_OK;
}
