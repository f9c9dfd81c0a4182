/* Answers to rooms of later rings: strategy/view_internal.h */

#include "core/platform_internal.h"
#include "strategy/view_internal.h"
#include "strategy/strategy_internal.h"

DTRAIN__PRIVATE bool dtrain__goes_by_nodes(const dtrain_strategy *strategy)
{
    return strategy->layout.node_ranks > 1;
}

DTRAIN__PRIVATE bool dtrain__has_state(const dtrain_strategy *strategy, size_t i)
{
    const dtrain_param *p = &strategy->params[i];
    return p->state.storage == p && strategy->layout.entries[i].trainable;
}

/* Each copy of the model has a shard once; every rank has a whole value. */
DTRAIN__PRIVATE int dtrain__holders(const dtrain_strategy *strategy, size_t i, int *count)
{
    const dtrain__layout *layout = &strategy->layout;
    const int sharers = dtrain__shard_bucket(layout, i) ? layout->ranks : 1;
    *count = layout->all / sharers;
    return layout->all_rank / sharers;
}

/* True if gathers bring a parameter's value as `dtype`; *low is then its address (NULL in a plan).
 * *passing: the value is valid only while its unit is gathered. */
DTRAIN__PRIVATE bool dtrain__gathered_as(const dtrain__layout *layout, const dtrain_param *storage,
                                         uint32_t dtype, const void **low, bool *passing)
{
    const size_t i = storage->state.index;
    *passing = false;
    if (!layout || !layout->shards.params || i >= layout->count || storage != &layout->params[i])
        return false;
    const dtrain__bucket *bucket = dtrain__shard_bucket(layout, i);
    if (!bucket) return false;
    *passing = bucket->unit != DTRAIN__NONE && !layout->units[bucket->unit].own_memory;
    if (layout->desc->param_dtype != dtype) return false;
    *low = bucket->low_values ? bucket->low_values + layout->entries[i].offset : NULL;
    return true;
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
    const dtrain_comm *before = NULL; /* weights with the same ranks share a communicator */
    dtrain_comm_query(strategy->groups.pipeline, info);
    for (size_t i = 0; i < strategy->param_count && strategy->ties; i++) {
        const dtrain_comm *tie = strategy->ties[i];
        if (tie && tie != before) dtrain__add_comm(info, tie);
        if (tie) before = tie;
    }
}

DTRAIN__PRIVATE const dtrain__stage_map *dtrain__stages_of(const dtrain_strategy *strategy)
{
    return &strategy->stages;
}

DTRAIN__PRIVATE bool dtrain__loss_counts(const dtrain_strategy *strategy)
{
    const dtrain__groups *groups = &strategy->groups;
    return groups->pipeline_rank == groups->pipeline_ranks - 1 &&
           groups->tensor_rank == groups->tensor_ranks - 1;
}

DTRAIN__PRIVATE const dtrain__kept *dtrain__kept_of(const dtrain_strategy *strategy, size_t *count)
{
    *count = strategy->kept_count;
    return strategy->kept;
}

DTRAIN__PRIVATE dtrain_result dtrain__queue_squares(dtrain_strategy *strategy,
                                                    const double **squares, int *count)
{
    dtrain_comm *model = strategy->groups.model;
    double *sum = strategy->sum_squares, *gathered = sum + DTRAIN__SQUARES;
    dtrain_work *work = NULL;
    DTRAIN__TRY(dtrain__device_squares(strategy, false, sum));
    *squares = model ? gathered : sum;
    *count = model ? dtrain_comm_size(model) : 1;
    if (!model) return DTRAIN_OK;
    DTRAIN__TRY(dtrain_all_gather(model, sum, gathered, 1, DTRAIN_DTYPE_I64, &work));
    return dtrain_work_wait(work);
}

DTRAIN__PRIVATE uint64_t dtrain__same_now(const dtrain_strategy *strategy)
{
    uint64_t hash = strategy->updates;
    for (size_t i = 0; i < strategy->param_count; i++)
        hash = dtrain__fnv1a(hash, &strategy->params[i].flags, sizeof strategy->params[i].flags);
    return hash;
}

/* ---- A strategy that is not made --------------------------------------------------------------*/

/* Count the bytes that a rank would allocate for a strategy; with AUTO, the least of all
 * candidates. For a named kind make the layout of rank 0, for its gathered values. Local. */
static dtrain_result dtrain__plan_needs(const dtrain__model *model,
                                        const dtrain_strategy_desc *given, uint32_t node_ranks,
                                        dtrain__strategy_plan *plan)
{
    dtrain__planned *planned = plan->planned;
    dtrain_strategy_desc desc = *given;
    const dtrain__kind_row *kind = dtrain__row_of(desc.kind);
    dtrain__candidates all;
    dtrain_memory memory;
    if (kind && kind->replicas && !desc.node_size) desc.node_size = node_ranks;
    DTRAIN__TRY(dtrain__plan_resolve(model, &desc, &plan->groups, planned));
    if (desc.kind != DTRAIN_STRATEGY_AUTO) {
        DTRAIN__TRY(dtrain__plan_kind(model, &planned->desc, &memory));
        plan->needs = memory.total;
        dtrain__resolve_levels(&planned->desc, model->ranks);
        return dtrain__steps_layout(&planned->layout, model, &planned->desc, 0);
    }
    DTRAIN__TRY(dtrain__plan_candidates(model, &planned->desc, node_ranks, &all));
    plan->needs = UINT64_MAX;
    for (size_t i = 0; i < DTRAIN__CANDIDATES; i++)
        if ((uint64_t)all.totals[i] < plan->needs) plan->needs = (uint64_t)all.totals[i];
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__plan_strategy(dtrain_world *world, dtrain_param *params,
                                                    size_t count, const dtrain_strategy_desc *desc,
                                                    dtrain__strategy_plan *plan)
{
    dtrain_strategy_desc own;
    dtrain_compression_desc how;
    uint32_t node_ranks;
    dtrain_result mine = DTRAIN_ERROR_MEMORY;
    memset(plan, 0, sizeof *plan);
    DTRAIN__TRY(dtrain__take_strategy(world, desc, &own, &how));
    desc = &own;
    plan->groups = dtrain__mesh_groups(world, desc->mesh, desc->comm);
    DTRAIN__TRY(dtrain__even_nodes(world, &plan->groups, &node_ranks));
    plan->planned =
        (dtrain__planned *)dtrain__alloc(&world->allocator, 1, sizeof *plan->planned, "a plan");
    const dtrain__model model = {&world->allocator, params, count,
                                 dtrain_comm_size(plan->groups.data)};
    if (plan->planned) {
        plan->layout = &plan->planned->layout;
        plan->stages = &plan->planned->stages;
        plan->pipeline = desc->pipeline;
        mine = dtrain__plan_needs(&model, desc, node_ranks, plan);
    }
    DTRAIN__TRY(dtrain__agree(plan->groups.all, mine));
    return dtrain__auto_limit(world, desc, plan->groups.all, &plan->limit);
}

DTRAIN__PRIVATE void dtrain__strategy_plan_free(dtrain_world *world, dtrain__strategy_plan *plan)
{
    if (!plan->planned) return;
    dtrain__steps_layout_free(&plan->planned->layout, &world->allocator);
    dtrain__stage_map_free(&plan->planned->stages, &world->allocator);
    dtrain__free(&world->allocator, plan->planned, 1, sizeof *plan->planned);
}
