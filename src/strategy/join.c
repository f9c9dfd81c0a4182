/* Passes without samples
 *
 * A rank without a batch makes the collectives of a pass with zero gradients, so that ranks with
 * batches do not wait for it. */

#include "core/platform_internal.h"
#include "comm/comm_internal.h"
#include "strategy/strategy_internal.h"

/* Gather all units as a forward does. */
DTRAIN__PRIVATE dtrain_result dtrain__join_forward(dtrain_strategy *strategy)
{
    for (size_t u = 0; u < strategy->layout.unit_count; u++) {
        const uint32_t id = strategy->layout.units[u].id;
        DTRAIN__TRY(dtrain_strategy_gather(strategy, id, DTRAIN_PASS_FORWARD));
        DTRAIN__TRY(dtrain_strategy_release(strategy, id));
    }
    if (!strategy->join_loss) return DTRAIN_OK;
    return dtrain__strategy_keep(strategy, strategy->join_loss(strategy, DTRAIN_PASS_FORWARD));
}

DTRAIN_API dtrain_result dtrain_strategy_join(dtrain_strategy *strategy, bool *over)
{
    const char *const call = "dtrain_strategy_join";
    DTRAIN__GIVEN(call, over);
    *over = false;
    DTRAIN__TRY(dtrain__between_backwards(strategy, call));
    /* Ranks that share a batch normalisation call its collective in their forward. This rank's call
     * differs from theirs: an error at once. If no rank has a batch, all make this call. */
    dtrain_comm *batches = dtrain__comm_numbered(strategy->world, strategy->notes.batch_comm);
    dtrain_result result = batches ? dtrain_barrier(batches) : DTRAIN_OK;
    if (result != DTRAIN_OK)
        result = dtrain_fail(
            result,
            "%s: rank %d has no batch left, and a batch normalisation "
            "(dtrain_batch_norm_desc.comm) needs one of each rank; end all ranks with the shortest "
            "data, or leave comm NULL (%s)",
            call, strategy->world->rank, dtrain__bare(dtrain_last_error()));
    DTRAIN__TRY(dtrain__strategy_keep(strategy, result));
    DTRAIN__TRY(dtrain__join_forward(strategy));
    if (strategy->join_loss)
        DTRAIN__TRY(
            dtrain__strategy_keep(strategy, strategy->join_loss(strategy, DTRAIN_PASS_BACKWARD)));
    const bool last = !strategy->more;
    strategy->notes.weight = 0;
    DTRAIN__TRY(dtrain_strategy_finish(strategy));
    if (!last) return DTRAIN_OK; /* only a whole step shows whether no rank had samples */
    return dtrain__strategy_keep(strategy, dtrain__counts_settle(strategy, over));
}
