/* Answers to the rooms above: see strategy/view_internal.h */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

DTRAIN__PRIVATE dtrain_world *dtrain__world_of(const dtrain_strategy *strategy)
{
    return strategy->world;
}

/* Return the groups that create was given; the kind decides which ranks share a copy. */
DTRAIN__PRIVATE dtrain__groups dtrain__groups_of(const dtrain_strategy *strategy)
{
    dtrain__groups groups = dtrain__world_groups(strategy->world, strategy->comm);
    groups.copy = strategy->shard_comm;
    return groups;
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

DTRAIN__PRIVATE uint64_t *dtrain__step_count_of(dtrain_strategy *strategy)
{
    return &strategy->sync_count;
}

DTRAIN__PRIVATE bool dtrain__goes_by_nodes(const dtrain_strategy *strategy)
{
    return strategy->layout.node_ranks > 1;
}

DTRAIN__PRIVATE void dtrain__set_torn(dtrain_strategy *strategy, const char *call)
{
    strategy->torn = call;
}

DTRAIN__PRIVATE const char *dtrain__torn(const dtrain_strategy *strategy) { return strategy->torn; }

DTRAIN__PRIVATE bool dtrain__is_updated(const dtrain_param *param)
{
    return param->state.storage == param && !(param->flags & DTRAIN_PARAM_FROZEN);
}

/* Each copy of the model has the same shard once, and every rank a whole value. */
DTRAIN__PRIVATE int dtrain__holders(const dtrain_strategy *strategy, size_t i, int *count)
{
    const dtrain__layout *layout = &strategy->layout;
    const int sharers = dtrain__shard_bucket(layout, i) ? layout->ranks : 1;
    *count = layout->all / sharers;
    return layout->all_rank / sharers;
}

DTRAIN__PRIVATE bool dtrain__is_sliced(const dtrain_strategy *strategy, size_t i)
{
    return !strategy->layout.owners && dtrain__shard_bucket(&strategy->layout, i);
}

DTRAIN__PRIVATE bool dtrain__had_no_gradient(const dtrain_strategy *strategy, size_t i)
{
    return strategy->layout.entries[i].absent;
}

DTRAIN__PRIVATE const struct dtrain__layout *dtrain__layout_of(const dtrain_strategy *strategy)
{
    return &strategy->layout;
}

/* ---- A strategy that is not made --------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__plan_strategy(dtrain_world *world, dtrain_param *params,
                                                    size_t count, const dtrain_strategy_desc *desc,
                                                    dtrain__strategy_plan *plan)
{
    dtrain_comm *comm = dtrain__world_groups(world, desc->comm).data;
    uint32_t node_ranks;
    memset(plan, 0, sizeof *plan);
    plan->comm = comm;
    DTRAIN__TRY(dtrain__even_nodes(world, comm, &node_ranks));
    dtrain__planned *planned = plan->planned =
        (dtrain__planned *)dtrain__alloc(&world->allocator, 1, sizeof *planned, "a plan");
    dtrain_result mine = DTRAIN_ERROR_MEMORY;
    if (planned) {
        plan->layout = &planned->layout;
        mine = dtrain__strategy_needs(&world->allocator, params, count, desc,
                                      dtrain_comm_size(comm), node_ranks, &plan->needs, planned);
    }
    DTRAIN__TRY(dtrain__agree(comm, mine));
    return dtrain__auto_limit(world, desc, comm, &plan->limit);
}

DTRAIN__PRIVATE void dtrain__strategy_plan_free(dtrain_world *world, dtrain__strategy_plan *plan)
{
    if (!plan->planned) return;
    dtrain__ways_free(&plan->planned->layout, &world->allocator);
    dtrain__free(&world->allocator, plan->planned, 1, sizeof *plan->planned);
}
