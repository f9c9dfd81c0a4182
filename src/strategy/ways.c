/* The ways of a bucket
 *
 * The only file that knows all steps (strategy/road.c, ways/): it chooses those that a bucket takes
 * from gradients to their mean. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* Begin and end of each step, and whether it belongs to the last micro-batch alone. */
static const dtrain__step dtrain__by_nothing = {NULL, NULL, false}; /* one rank has its mean */
static const dtrain__step dtrain__by_all_reduce = {dtrain__all_reduce_begin, dtrain__all_reduce_end,
                                                   false};
static const dtrain__step dtrain__by_reduce_scatter = {dtrain__reduce_scatter_begin,
                                                       dtrain__reduce_scatter_end, false};
static const dtrain__step dtrain__by_replicas[] = {
    {dtrain__replicas_begin, dtrain__replicas_end, false},
    {dtrain__replicas_begin, dtrain__replicas_end, true}, /* at last */
};
static const dtrain__step dtrain__by_node_scatter = {dtrain__node_scatter_begin, NULL, false};
static const dtrain__step dtrain__by_node_gather = {dtrain__node_gather_begin, NULL, false};
static const dtrain__step dtrain__by_topk = {dtrain__topk_begin, dtrain__topk_end, false};
static const dtrain__step dtrain__by_topk_publish = {dtrain__topk_publish_begin,
                                                     dtrain__topk_publish_end, false};
static const dtrain__step dtrain__by_p = {dtrain__p_begin, dtrain__p_end, false};
static const dtrain__step dtrain__by_q = {dtrain__q_begin, dtrain__q_end, false};

/* Choose the ways of the step that begins:
 *
 *                    whole buckets                           sharded buckets
 *     one level      ALL_REDUCE, or what compression has     REDUCE_SCATTER
 *     replicas       ALL_REDUCE                              REDUCE_SCATTER, REPLICAS
 *     nodes          NODE_SCATTER, the same, NODE_GATHER     NODE_SCATTER, REDUCE_SCATTER
 */
DTRAIN__PRIVATE void dtrain__choose_ways(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain__step **whole = strategy->ways[0], **sharded = strategy->ways[1];
    const dtrain_compression_desc *how = layout->compression;
    const bool nodes = layout->node_ranks > 1;
    const bool at_last = strategy->desc.accumulation == DTRAIN_ACCUMULATION_SHARD_EVERY;
    if (how && strategy->sync_count < dtrain__dense_steps(how)) how = NULL;
    memset(strategy->ways, 0, sizeof strategy->ways);
    if (layout->all == 1) {
        *whole = *sharded = &dtrain__by_nothing;
        return;
    }
    if (nodes) *whole++ = *sharded++ = &dtrain__by_node_scatter;
    if (!how) *whole++ = &dtrain__by_all_reduce;
    else if (how->kind == DTRAIN_COMPRESSION_POWERSGD) {
        *whole++ = &dtrain__by_p;
        *whole++ = &dtrain__by_q;
    } else {
        *whole++ = &dtrain__by_topk;
        if (dtrain__is_balanced(how)) *whole++ = &dtrain__by_topk_publish;
    }
    if (nodes) *whole++ = &dtrain__by_node_gather;
    *sharded++ = &dtrain__by_reduce_scatter;
    if (strategy->kind->replicas) *sharded++ = &dtrain__by_replicas[at_last];
}
