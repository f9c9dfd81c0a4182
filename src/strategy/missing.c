/* The end of a step: report missing gradients, average buffers */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* Report parameters for which ready was not called in this step, at most eight by name. A warning
 * names a parameter once. On a rank without samples nothing is missing. All buckets are launched,
 * so no other rank waits for this one. */
DTRAIN__PRIVATE dtrain_result dtrain__report_missing(dtrain_strategy *strategy)
{
    const char *const call = "dtrain_strategy_finish";
    const bool strict = strategy->desc.missing_gradient == DTRAIN_MISSING_GRADIENT_ERROR;
    char names[860] = "";
    size_t count = 0, used = 0;
    dtrain_result result = DTRAIN_OK;
    for (size_t i = 0; i < strategy->param_count && strategy->weights > 0; i++) {
        dtrain__entry *entry = &strategy->layout.entries[i];
        const dtrain_param *p = &strategy->params[i];
        if (!entry->trainable || !entry->local || entry->seen || (entry->warned && !strict))
            continue;
        /* frozen in this step, which is allowed: its gradient is not missing */
        if ((p->flags | p->state.storage->flags) & DTRAIN_PARAM_FROZEN) continue;
        entry->warned = true;
        if (count++ < 8) /* 103 bytes each fit */
            used += (size_t)snprintf(names + used, sizeof names - used, "%s\"%s\"",
                                     used ? ", " : "", dtrain__short(p->name));
    }
    if (count > 8) snprintf(names + used, sizeof names - used, " and %zu more", count - 8);
    if (count && !strict)
        dtrain_log(strategy->world, DTRAIN_LOG_WARNING,
                   "%s: no gradient from this backward, zero is used%s: %s", call,
                   strategy->desc.missing_gradient == DTRAIN_MISSING_GRADIENT_ZERO
                       ? ""
                       : ", or where no rank has one the parameter is left alone",
                   names);
    if (!strict) return DTRAIN_OK;
    if (count)
        result = dtrain_fail(DTRAIN_ERROR_USAGE,
                             "%s: no gradient from this backward: %s; mark them with "
                             "dtrain_strategy_ready, or set DTRAIN_PARAM_FROZEN",
                             call, names);
    return dtrain__agree(strategy->groups.all, result);
}

/* Average the model's buffers (DTRAIN_PARAM_BUFFER) over the ranks. Running averages are linear:
 * the mean of the ranks' averages is the average over all their batches. */
DTRAIN__PRIVATE dtrain_result dtrain__average_buffers(dtrain_strategy *strategy)
{
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        dtrain_work *work = NULL;
        if (!(p->flags & DTRAIN_PARAM_BUFFER) || p->state.storage != p || !dtrain__has_memory(p))
            continue;
        DTRAIN__TRY(dtrain_all_reduce(strategy->groups.data, p->value, p->value, (size_t)p->count,
                                      DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN, &work));
        DTRAIN__TRY(dtrain_work_wait(work));
    }
    return DTRAIN_OK;
}
