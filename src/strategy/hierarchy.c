/* Two levels of ranks
 *
 * Consecutive ranks are a node. With hierarchical a bucket is reduced inside every node first, so
 * that each rank exchanges only its slice, the hop, with its like in the other nodes:
 *
 *     2 nodes of 2      rank 0        rank 1      |  rank 2        rank 3
 *     NODE_SCATTER      sum of slice 0, slice 1   |  sum of slice 0, slice 1     inside a node
 *     ALL_REDUCE        rank 0 <--- slice 0 ---> rank 2,  rank 1 <--- slice 1 ---> rank 3
 *     NODE_GATHER       both slices               |  both slices                 inside a node
 *
 * Sharded buckets end in a reduce-scatter of the hop, and their values come back the same way. With
 * HYBRID_SHARD the levels are those of shards and of replicas: strategy/shards.c. */

#include "core/platform_internal.h"
#include "comm/comm.h"
#include "strategy/compression_internal.h"
#include "strategy/layout_internal.h"
#include "strategy/strategy_internal.h"

/* The ranks that exchange a bucket: between nodes those with the same slice. */
DTRAIN__PRIVATE dtrain_comm *dtrain__hop_comm(const dtrain_strategy *strategy,
                                              const dtrain__bucket *bucket)
{
    if (strategy->layout.node_ranks > 1) return strategy->groups[DTRAIN__ACROSS];
    return bucket->sharded ? strategy->shard_comm : strategy->comm;
}

/* NODE_SCATTER: the hop of a bucket's gradients = its sum over this node. */
DTRAIN__PRIVATE dtrain_result dtrain__node_scatter_begin(dtrain_strategy *strategy,
                                                         dtrain__bucket *bucket)
{
    return dtrain_reduce_scatter(strategy->groups[DTRAIN__NODE], bucket->grads,
                                 bucket->grads + bucket->hop_first, (size_t)bucket->hop_count,
                                 DTRAIN_DTYPE_F32, dtrain__level_op(strategy, bucket),
                                 bucket->reduces);
}

/* NODE_GATHER: all slices of this node to all its ranks. */
DTRAIN__PRIVATE dtrain_result dtrain__node_gather_begin(dtrain_strategy *strategy,
                                                        dtrain__bucket *bucket)
{
    return dtrain_all_gather(strategy->groups[DTRAIN__BACK], bucket->grads + bucket->hop_first,
                             bucket->grads, (size_t)bucket->hop_count, DTRAIN_DTYPE_F32,
                             bucket->reduces);
}

/* Starts to bring every rank's slice of a bucket to all. With nodes it takes two turns: this one
 * gathers the parts of this rank's hop from the other nodes. shard may be its place in values. */
DTRAIN__PRIVATE dtrain_result dtrain__gather_slices(dtrain_strategy *strategy,
                                                    dtrain__bucket *bucket, const void *shard,
                                                    void *values, dtrain_dtype dtype)
{
    const bool nodes = strategy->layout.node_ranks > 1;
    char *to = (char *)values;
    if (nodes) to += (size_t)bucket->hop_first * dtrain_dtype_bytes(dtype);
    return dtrain_all_gather(nodes ? strategy->groups[DTRAIN__FETCH_ACROSS] : strategy->shard_comm,
                             shard, to, (size_t)bucket->shard_count, dtype, bucket->gathers);
}

/* Waits for the first turn and starts the second: the hops of a node to all its ranks. */
DTRAIN__PRIVATE dtrain_result dtrain__gather_inside(dtrain_strategy *strategy,
                                                    dtrain__bucket *bucket, void *values,
                                                    dtrain_dtype dtype)
{
    const size_t first = (size_t)bucket->hop_first * dtrain_dtype_bytes(dtype);
    DTRAIN__TRY(dtrain__wait_works(strategy, bucket->gathers));
    if (strategy->layout.node_ranks == 1) return DTRAIN_OK;
    return dtrain_all_gather(strategy->groups[DTRAIN__FETCH], (char *)values + first, values,
                             (size_t)bucket->hop_count, dtype, bucket->gathers);
}

/* ---- Who is on which level --------------------------------------------------------------------*/

/* Resolves node_size: consecutive ranks are one node. With hierarchical one node alone, or nodes of
 * one rank, are no mistake: a program that is started on fewer machines goes on, on one level. */
static dtrain_result dtrain__check_node_size(dtrain_strategy *strategy)
{
    dtrain_strategy_desc *desc = &strategy->desc;
    const char *const call = "dtrain_strategy_create";
    const int ranks = dtrain_comm_size(strategy->comm);
    if (desc->node_size == 0) {
        dtrain_world_info nodes;
        dtrain_world_query(strategy->world, &nodes);
        if (!desc->hierarchical && nodes.node_count == 1 && ranks > 1)
            return dtrain_fail(
                DTRAIN_ERROR_ARGUMENT,
                "%s: DTRAIN_STRATEGY_HYBRID_SHARD shards inside a node and replicates across "
                "nodes, but all ranks are on one; set node_size, or use "
                "DTRAIN_STRATEGY_FULL_SHARD",
                call);
        desc->node_size = (uint32_t)nodes.local_size;
    }
    if (desc->node_size > (uint32_t)ranks || (uint32_t)ranks % desc->node_size)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: node_size %u does not divide %d ranks; every node must have as "
                           "many",
                           call, desc->node_size, ranks);
    return DTRAIN_OK;
}

/* Drops what is lossy when there is one node alone: with hierarchical it is for the way between
 * nodes. */
DTRAIN__PRIVATE void dtrain__resolve_levels(dtrain_strategy_desc *desc, int ranks)
{
    if (!desc->hierarchical || (desc->node_size && (int)desc->node_size != ranks)) return;
    desc->reduce_dtype = DTRAIN_DTYPE_F32;
    desc->compression = NULL;
}

/* Makes a communicator of the same ranks again, for steps of another kind. */
static dtrain_result dtrain__split_again(dtrain_strategy *strategy, dtrain_comm *from, int to)
{
    return dtrain_comm_split(from, 0, dtrain_comm_rank(from), &strategy->groups[to]);
}

/* Splits the ranks in two levels. Each kind of step that starts when another happens to be done has
 * a communicator of its own: in one, ranks could start them in different orders. */
static dtrain_result dtrain__split_groups(dtrain_strategy *strategy)
{
    const dtrain_strategy_desc *desc = &strategy->desc;
    const bool sharded = strategy->kind->shards.state;
    const int ranks = dtrain_comm_size(strategy->comm), rank = dtrain_comm_rank(strategy->comm);
    const bool replicas = strategy->kind->replicas;
    const int size = desc->hierarchical || replicas ? (int)desc->node_size : 1;
    const bool rounds =
        desc->compression && (desc->compression->kind == DTRAIN_COMPRESSION_POWERSGD ||
                              dtrain__is_balanced(desc->compression));
    dtrain_comm **groups = strategy->groups;
    if (replicas || (size > 1 && size < ranks)) {
        DTRAIN__TRY(dtrain_comm_split(strategy->comm, rank / size, rank, &groups[DTRAIN__NODE]));
        DTRAIN__TRY(dtrain_comm_split(strategy->comm, rank % size, rank, &groups[DTRAIN__ACROSS]));
    }
    if (!replicas && groups[DTRAIN__NODE]) {
        if (!sharded || desc->whole_below)
            DTRAIN__TRY(dtrain__split_again(strategy, groups[DTRAIN__NODE], DTRAIN__BACK));
        if (sharded) {
            DTRAIN__TRY(
                dtrain__split_again(strategy, groups[DTRAIN__ACROSS], DTRAIN__FETCH_ACROSS));
            DTRAIN__TRY(dtrain__split_again(strategy, groups[DTRAIN__NODE], DTRAIN__FETCH));
        }
    }
    if (rounds && ranks > 1)
        DTRAIN__TRY(dtrain__split_again(
            strategy, groups[DTRAIN__ACROSS] ? groups[DTRAIN__ACROSS] : strategy->comm,
            DTRAIN__SECOND));
    return DTRAIN_OK;
}

/* Decides who shares one copy of the model, and makes the communicators. */
DTRAIN__PRIVATE dtrain_result dtrain__split_levels(dtrain_strategy *strategy)
{
    const int ranks = dtrain_comm_size(strategy->comm);
    const bool replicas = strategy->kind->replicas;
    const uint32_t shards = DTRAIN_OFFLOAD_GRADS | DTRAIN_OFFLOAD_PARAMS;
    if (strategy->desc.hierarchical || replicas)
        DTRAIN__TRY(dtrain__check_node_size(strategy)); /* the same on every rank */
    dtrain__resolve_levels(&strategy->desc, ranks);
    DTRAIN__TRY(dtrain__split_groups(strategy));
    if (replicas) strategy->shard_comm = strategy->groups[DTRAIN__NODE];
    else if (strategy->kind->shards.state && (ranks > 1 || (strategy->desc.offload & shards)))
        strategy->shard_comm = strategy->comm;
    return DTRAIN_OK;
}
