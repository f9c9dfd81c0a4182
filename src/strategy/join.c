/* Passes without samples
 *
 * A rank that has no batch left makes the collectives of a pass with zeros for gradients, so that
 * ranks with batches are not left waiting. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* Gather all units as a forward does. */
DTRAIN__PRIVATE dtrain_result dtrain__join_forward(dtrain_strategy *strategy)
{
    for (size_t u = 0; u < strategy->layout.unit_count; u++) {
        const uint32_t id = strategy->layout.units[u].id;
        DTRAIN__TRY(dtrain_strategy_gather(strategy, id, DTRAIN_PASS_FORWARD));
        DTRAIN__TRY(dtrain_strategy_release(strategy, id));
    }
    return dtrain__strategy_keep(strategy, dtrain__join_sums(strategy));
}

/* Take part in the backward of a pass without samples, and in the agreement on the unit of weights
 * that a tape's first one makes. In the last one of a step, learn whether no rank has had samples.
 */
DTRAIN__PRIVATE dtrain_result dtrain__join_backward(dtrain_strategy *strategy, bool *over)
{
    const bool last = !strategy->more;
    if (strategy->taped)
        DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__agree_unit(strategy, 0)));
    strategy->weight = 0;
    DTRAIN__TRY(dtrain_strategy_finish(strategy));
    if (!last) return DTRAIN_OK;
    return dtrain__strategy_keep(strategy, dtrain__tally_settle(strategy, over));
}

DTRAIN_API dtrain_result dtrain_strategy_join(dtrain_strategy *strategy, bool *over)
{
    const char *const call = "dtrain_strategy_join";
    if (!over) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: over is NULL", call);
    *over = false;
    DTRAIN__TRY(dtrain__between_backwards(strategy, call));
    DTRAIN__TRY(dtrain__join_forward(strategy));
    return dtrain__join_backward(strategy, over);
}
