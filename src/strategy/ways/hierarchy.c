/* Steps between two levels of ranks
 *
 * Consecutive ranks are a node. With hierarchical a bucket is reduced inside every node first, so
 * that each rank exchanges only its slice with the ranks of other nodes that have the same slice:
 *
 *     2 nodes of 2      rank 0        rank 1      |  rank 2        rank 3
 *     NODE_SCATTER      sum of slice 0, slice 1   |  sum of slice 0, slice 1     inside a node
 *     ALL_REDUCE        rank 0 <--- slice 0 ---> rank 2,  rank 1 <--- slice 1 ---> rank 3
 *     NODE_GATHER       both slices               |  both slices                 inside a node
 *
 * Sharded buckets end in a reduce-scatter of the slice, and their values are gathered in the same
 * two levels. HYBRID_SHARD has levels of its own: ways/shards.c. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/ways_internal.h"

/* NODE_SCATTER: this rank's slice of a bucket's gradients = its sum over this node. */
DTRAIN__PRIVATE dtrain_result dtrain__node_scatter_begin(dtrain_strategy *strategy,
                                                         dtrain__bucket *bucket)
{
    dtrain__label(strategy, bucket, "bucket");
    return dtrain_reduce_scatter(strategy->extra[DTRAIN__NODE], bucket->grads,
                                 bucket->grads + bucket->slice_first, (size_t)bucket->slice_count,
                                 DTRAIN_DTYPE_F32, dtrain__level_op(strategy, bucket),
                                 bucket->reduces);
}

/* NODE_GATHER: all slices of this node to all its ranks. */
DTRAIN__PRIVATE dtrain_result dtrain__node_gather_begin(dtrain_strategy *strategy,
                                                        dtrain__bucket *bucket)
{
    dtrain__label(strategy, bucket, "bucket");
    return dtrain_all_gather(strategy->extra[DTRAIN__BACK], bucket->grads + bucket->slice_first,
                             bucket->grads, (size_t)bucket->slice_count, DTRAIN_DTYPE_F32,
                             bucket->reduces);
}
