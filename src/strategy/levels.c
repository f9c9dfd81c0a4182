/* Levels of ranks: which ranks share a copy of the model, and which communicators that takes */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* With hierarchical and one node, drop the lossy settings: they apply between nodes. */
DTRAIN__PRIVATE void dtrain__resolve_levels(dtrain_strategy_desc *desc, int ranks)
{
    if (!desc->hierarchical || (desc->node_size && (int)desc->node_size != ranks)) return;
    desc->reduce_dtype = DTRAIN_DTYPE_F32;
    desc->compression = NULL;
}

/* Set *node_ranks to the number of consecutive ranks of the data axis that are a node, or to 0
 * when nodes differ in size or their ranks are mixed, or for other ranks of the tensor axis it is
 * another number. Collective: a rank knows its own node only. */
DTRAIN__PRIVATE dtrain_result dtrain__even_nodes(const dtrain_world *world,
                                                 const dtrain__groups *groups, uint32_t *node_ranks)
{
    int64_t nodes[DTRAIN_MAX_RANKS]; /* the node of each rank */
    const int ranks = dtrain_comm_size(groups->data);
    dtrain_world_info own; /* emulated nodes count */
    int size = 1;
    dtrain_world_query(world, &own);
    const int64_t mine = own.node;
    DTRAIN__TRY(dtrain_all_gather(groups->data, &mine, nodes, 1, DTRAIN_DTYPE_I64, NULL));
    while (size < ranks && nodes[size] == nodes[0]) size++;
    *node_ranks = ranks % size ? 0 : (uint32_t)size;
    for (int r = 1; r < ranks; r++) /* a node begins at every multiple of size, and nowhere else */
        if ((nodes[r] == nodes[r - 1]) != (r % size != 0)) *node_ranks = 0;
    if (!groups->model) return DTRAIN_OK;
    int64_t most[2] = {*node_ranks, -(int64_t)*node_ranks};
    DTRAIN__TRY(
        dtrain_all_reduce(groups->all, most, most, 2, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    if (most[0] != -most[1]) *node_ranks = 0;
    return DTRAIN_OK;
}

/* Resolve node_size, the number of consecutive ranks that are a node. With hierarchical one node,
 * or nodes of one rank, are allowed: a program that is started on fewer machines uses one level. */
static dtrain_result dtrain__resolve_node_size(dtrain_strategy *strategy, int ranks)
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

/* Decide who shares one copy of the model, and make the extra communicators. The color alone says
 * which ranks are meant, for comm/counting.c: a place within the node is below the node's size, and
 * the number of a node is added to it. */
DTRAIN__PRIVATE dtrain_result dtrain__split_levels(dtrain_strategy *strategy)
{
    const int ranks = dtrain_comm_size(strategy->groups.data),
              rank = dtrain_comm_rank(strategy->groups.data);
    const bool sharded = strategy->kind->shards.state, replicas = strategy->kind->replicas;
    dtrain_strategy_desc *desc = &strategy->desc;
    if (strategy->groups.sequence_parallel) /* before anything that a data axis may refuse alone */
        DTRAIN__TRY(dtrain_comm_split(strategy->groups.tensor, 0, strategy->groups.tensor_rank,
                                      &strategy->extra[DTRAIN__TENSOR]));
    DTRAIN__TRY(dtrain__resolve_node_size(strategy, ranks)); /* the same on the data axis */
    dtrain__resolve_levels(desc, ranks);
    const int size = desc->hierarchical || replicas ? (int)desc->node_size : 1;
    const bool nodes = !replicas && size > 1 && size < ranks;
    const bool two_rounds = desc->compression && dtrain__hook_of(desc->compression)->rounds == 2;
    const bool partial = strategy->groups.sequence_parallel && ranks > 1;
    const int across = rank % size, inside = size + rank / size, everyone = 0;
    const struct {
        int which;
        bool wanted;
        int color;
    } extras[] = {
        {DTRAIN__NODE, nodes || replicas, inside},
        {DTRAIN__ACROSS, nodes || replicas, across},
        {DTRAIN__BACK, nodes && (!sharded || desc->whole_below), inside},
        {DTRAIN__FETCH_ACROSS, nodes && sharded, across},
        {DTRAIN__FETCH, nodes && sharded, inside},
        {DTRAIN__SECOND, two_rounds && ranks > 1, across},
        {DTRAIN__AFTER, partial && !nodes, everyone},
        {DTRAIN__AFTER_NODE, partial && replicas, inside},
    };
    for (size_t i = 0; i < sizeof extras / sizeof extras[0]; i++)
        if (extras[i].wanted)
            DTRAIN__TRY(dtrain_comm_split(strategy->groups.data, extras[i].color, rank,
                                          &strategy->extra[extras[i].which]));
    if (replicas) strategy->groups.copy = strategy->extra[DTRAIN__NODE];
    else if (sharded && (ranks > 1 || desc->offload > DTRAIN_OFFLOAD_OPTIMIZER))
        strategy->groups.copy = strategy->groups.data;
    return DTRAIN_OK;
}
