/* Answers to the rooms above: see strategy/view_internal.h */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

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

DTRAIN__PRIVATE bool dtrain__has_state(const dtrain_strategy *strategy, size_t i)
{
    const dtrain_param *p = &strategy->params[i];
    return p->state.storage == p && strategy->layout.entries[i].trainable;
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
    return !strategy->layout.owners && !strategy->layout.entries[i].whole;
}

DTRAIN__PRIVATE const struct dtrain__layout *dtrain__layout_of(const dtrain_strategy *strategy)
{
    return &strategy->layout;
}

/* Tell whether gathers bring a parameter's value as `dtype`; *low is then its address (NULL in a
 * plan). *passing: the value is there only while its unit is gathered. */
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
