/* Ways. */

#include "core/platform_internal.h"
#include "strategy/compression.h"
#include "strategy/compression_internal.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"

static const dtrain__step dtrain__by_node_scatter = {dtrain__node_scatter_begin,
                                                     dtrain__step_nothing, false, false};
static const dtrain__step dtrain__by_across = {dtrain__across_begin, dtrain__across_end, false,
                                               false};
static const dtrain__step dtrain__by_across_scatter = {dtrain__across_scatter_begin,
                                                       dtrain__across_scatter_end, false, false};
static const dtrain__step dtrain__by_node_gather = {dtrain__node_gather_begin, dtrain__step_nothing,
                                                    false, false};
static const dtrain__step dtrain__by_sparse_gather = {dtrain__sparse_gather_begin,
                                                      dtrain__sparse_gather_end, false, false};
static const dtrain__step dtrain__by_sparse_trade = {dtrain__sparse_trade_begin,
                                                     dtrain__sparse_trade_end, false, false};
static const dtrain__step dtrain__by_sparse_publish = {dtrain__sparse_publish_begin,
                                                       dtrain__sparse_publish_end, false, false};
static const dtrain__step dtrain__by_p = {dtrain__p_begin, dtrain__p_end, false, false};
static const dtrain__step dtrain__by_q = {dtrain__q_begin, dtrain__q_end, false, false};

DTRAIN__PRIVATE bool dtrain__choose_indirect(const dtrain_strategy *strategy, bool sharded,
                                             const dtrain__step **way)
{
    const dtrain_compression_desc *how = strategy->layout.compression;
    const bool nodes = strategy->layout.node_ranks > 1;
    const bool compresses =
        strategy->layout.compression && !sharded &&
        strategy->sync_count >= dtrain__dense_steps(strategy->layout.compression);
    if (!nodes && !compresses) return false;
    if (nodes) *way++ = &dtrain__by_node_scatter;
    if (sharded) *way++ = &dtrain__by_across_scatter;
    else if (!compresses) *way++ = &dtrain__by_across;
    else if (how->kind == DTRAIN_COMPRESSION_POWERSGD) {
        *way++ = &dtrain__by_p;
        *way++ = &dtrain__by_q;
    } else if (dtrain__is_balanced(how)) {
        *way++ = &dtrain__by_sparse_trade;
        *way++ = &dtrain__by_sparse_publish;
    } else *way++ = &dtrain__by_sparse_gather;
    if (nodes && !sharded) *way++ = &dtrain__by_node_gather;
    return true;
}
