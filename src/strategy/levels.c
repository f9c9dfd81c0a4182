/* Two levels of ranks
 *
 * Consecutive ranks are a node. With hierarchical a bucket is first reduced inside every node. Then
 * each rank exchanges only its slice, with the ranks of other nodes that have the same slice:
 *
 *     2 nodes of 2      rank 0        rank 1      |  rank 2        rank 3
 *     NODE_SCATTER      sum of slice 0, slice 1   |  sum of slice 0, slice 1     inside a node
 *     ALL_REDUCE        rank 0 <--- slice 0 ---> rank 2,  rank 1 <--- slice 1 ---> rank 3
 *     NODE_GATHER       both slices               |  both slices                 inside a node
 *
 * The steps of a sharded bucket end with a reduce-scatter of the slice, and its values are gathered
 * in the same two levels. HYBRID_SHARD shards on the first level only: REDUCE_SCATTER makes the sum
 * over a node, and REPLICAS adds up the shards of the nodes. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/steps_internal.h"

/* ---- Which ranks are a node -------------------------------------------------------------------*/

/* With hierarchical and one node, drop the lossy settings: they apply between nodes. */
DTRAIN__PRIVATE void dtrain__resolve_levels(dtrain_strategy_desc *desc, int ranks)
{
    if (!desc->hierarchical || (desc->node_size && (int)desc->node_size != ranks)) return;
    desc->reduce_dtype = DTRAIN_DTYPE_F32;
    desc->compression = NULL;
}

/* Set *node_ranks to the number of consecutive ranks of the data axis that are a node. Set it to 0
 * if nodes differ in size, if their ranks are mixed, or if other ranks of the tensor axis have
 * another number. Collective: a rank knows its own node only. */
DTRAIN__PRIVATE dtrain_result dtrain__even_nodes(const dtrain_world *world,
                                                 const dtrain__groups *groups, uint32_t *node_ranks)
{
    int64_t nodes[DTRAIN_MAX_RANKS]; /* the node of each rank */
    const int ranks = dtrain_comm_size(groups->data);
    dtrain_world_info own; /* node_ranks counts */
    int size = 1;
    dtrain__world_info(world, &own);
    const int64_t mine = own.node;
    DTRAIN__TRY(dtrain_all_gather(groups->data, &mine, nodes, 1, DTRAIN_DTYPE_I64, NULL));
    while (size < ranks && nodes[size] == nodes[0]) size++;
    *node_ranks = ranks % size ? 0 : (uint32_t)size;
    for (int r = 1; r < ranks; r++) /* a node begins exactly at every multiple of size */
        if ((nodes[r] == nodes[r - 1]) != (r % size != 0)) *node_ranks = 0;
    if (!groups->model) return DTRAIN_OK;
    int64_t most[2] = {*node_ranks, -(int64_t)*node_ranks};
    DTRAIN__TRY(
        dtrain_all_reduce(groups->all, most, most, 2, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    if (most[0] != -most[1]) *node_ranks = 0;
    return DTRAIN_OK;
}

/* Resolve node_size, the number of consecutive ranks that are a node. Hierarchical allows one node,
 * and nodes of one rank: a program that is started on fewer machines uses one level. */
DTRAIN__PRIVATE dtrain_result dtrain__resolve_node_size(dtrain_strategy *strategy, int ranks)
{
    dtrain_strategy_desc *desc = &strategy->desc;
    const char *const call = "dtrain_strategy_create";
    if (!desc->hierarchical && !strategy->kind->replicas) return DTRAIN_OK;
    if (!desc->node_size) {
        uint32_t size;
        DTRAIN__TRY(dtrain__even_nodes(strategy->world, &strategy->groups, &size));
        if (size == 0)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "%s: node_size is 0, and the nodes of these %d ranks do not have as "
                               "many ranks each, one node after another; set node_size to a number "
                               "that divides %d, or start as many ranks on every node",
                               call, ranks, ranks);
        if (!desc->hierarchical && size == (uint32_t)ranks && ranks > 1)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "%s: DTRAIN_STRATEGY_HYBRID_SHARD shards inside a node and "
                               "replicates across nodes, but all ranks are on one; set node_size, "
                               "or use DTRAIN_STRATEGY_FULL_SHARD",
                               call);
        desc->node_size = size;
    }
    if (desc->node_size <= (uint32_t)ranks && (uint32_t)ranks % desc->node_size == 0)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: node_size %u does not divide %d ranks; every node must have as many",
                       call, desc->node_size, ranks);
}

/* ---- Steps between levels ---------------------------------------------------------------------*/

/* NODE_SCATTER: replace this rank's slice of a bucket's gradients by its sum over this node. */
DTRAIN__PRIVATE dtrain_result dtrain__node_scatter_begin(dtrain_strategy *strategy,
                                                         dtrain__bucket *bucket)
{
    dtrain__label(strategy, bucket, "bucket");
    return dtrain_reduce_scatter(bucket->comm, bucket->grads, bucket->grads + bucket->slice_first,
                                 (size_t)dtrain__elements(&strategy->layout, bucket->slice_count),
                                 (dtrain_dtype)strategy->layout.dtype, bucket->steps->op,
                                 bucket->reduces);
}

/* NODE_GATHER: give all ranks of this node all its slices. */
DTRAIN__PRIVATE dtrain_result dtrain__node_gather_begin(dtrain_strategy *strategy,
                                                        dtrain__bucket *bucket)
{
    dtrain__label(strategy, bucket, "bucket");
    return dtrain_all_gather(bucket->comm, bucket->grads + bucket->slice_first, bucket->grads,
                             (size_t)dtrain__elements(&strategy->layout, bucket->slice_count),
                             (dtrain_dtype)strategy->layout.dtype, bucket->reduces);
}

/* Multiply x, a sum over all ranks (count elements of the bucket), by 1/N. In fp16 a sum can
 * overflow where the mean does not. In fp16 and fp64 each collective makes a mean, and nothing is
 * left. */
DTRAIN__PRIVATE dtrain_result dtrain__scale(dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                            float *x, int64_t count)
{
    dtrain_axpby_args mean;
    if (count == 0 || bucket->steps->op != DTRAIN_REDUCE_SUM) return DTRAIN_OK;
    memset(&mean, 0, sizeof mean);
    mean.count = count;
    mean.a = 1.0f / (float)strategy->layout.all;
    mean.x = mean.y = x;
    mean.dtype = DTRAIN_DTYPE_F32;
    return strategy->device->ops->axpby(strategy->device, &mean);
}

/* SCALE: turn the sum over all nodes into the mean. */
DTRAIN__PRIVATE dtrain_result dtrain__scale_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    if (bucket->sharded)
        return dtrain__scale(strategy, bucket, dtrain__reduce_result(strategy, bucket),
                             bucket->shard_count);
    return dtrain__scale(strategy, bucket, bucket->grads + bucket->slice_first,
                         bucket->slice_count);
}

/* ---- Replicas
 *
 * With HYBRID_SHARD an all-reduce between nodes follows. It reduces the result of every
 * micro-batch; or, with DTRAIN_ACCUMULATION_SHARD_EVERY, the shard that holds the sum of all
 * results, in the last micro-batch. */

/* Return the device memory in which this node's sum becomes the sum of all nodes. */
static float *dtrain__replica_sum(const dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    const bool at_last = strategy->desc.accumulation == DTRAIN_ACCUMULATION_SHARD_EVERY;
    if (at_last && !bucket->grad_on_host) return bucket->grad_shard;
    return dtrain__reduce_result(strategy, bucket);
}

/* REPLICAS: turn a shard of the sum over this node into the mean over all nodes. */
DTRAIN__PRIVATE dtrain_result dtrain__replicas_begin(dtrain_strategy *strategy,
                                                     dtrain__bucket *bucket)
{
    float *sum = dtrain__replica_sum(strategy, bucket);
    void *wire = bucket->low_grads ? dtrain__wire(bucket, bucket->shard_first) : sum;
    DTRAIN__TRY(dtrain__wire_convert(strategy, bucket, sum, bucket->shard_first,
                                     bucket->shard_count, false));
    dtrain__label(strategy, bucket, "bucket");
    return dtrain_all_reduce(bucket->comm, wire, wire,
                             (size_t)dtrain__elements(&strategy->layout, bucket->shard_count),
                             dtrain__wire_dtype(strategy), bucket->steps->op, bucket->reduces);
}

DTRAIN__PRIVATE dtrain_result dtrain__replicas_end(dtrain_strategy *strategy,
                                                   dtrain__bucket *bucket)
{
    float *sum = dtrain__replica_sum(strategy, bucket);
    DTRAIN__TRY(dtrain__wire_convert(strategy, bucket, sum, bucket->shard_first,
                                     bucket->shard_count, true));
    return dtrain__scale(strategy, bucket, sum, bucket->shard_count);
}

/* Return the number of the last step that uses the buffer in which backward wrote a bucket's
 * gradients. REPLICAS and later steps do not use it if they work on the shard, unrounded. */
DTRAIN__PRIVATE uint32_t dtrain__buffer_steps(const dtrain_strategy *strategy,
                                              const dtrain__bucket *bucket)
{
    const dtrain__step_list *steps = bucket->steps;
    for (uint32_t i = 0; i < steps->count; i++)
        if (steps->list[i].begin == dtrain__replicas_begin && !bucket->low_grads &&
            dtrain__replica_sum(strategy, bucket) == bucket->grad_shard)
            return i;
    return DTRAIN__REDUCED;
}
