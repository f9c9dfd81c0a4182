/* null_step.h: counts what this rank sends in a step, without the other ranks: a second strategy steps over the
 * communicator of tools/null_comm.h. Include it after dtrain.h. */
#ifndef NULL_STEP_H
#define NULL_STEP_H

#include "tools/null_comm.h"

/* Take a step of `micro` micro-batches without samples: this rank takes part in all collectives of the others. */
static inline dtrain_result null_step_take(dtrain_strategy *s, uint32_t micro)
{
    dtrain_result result = DTRAIN_OK;
    for (uint32_t i = 1; i <= micro && result == DTRAIN_OK; i++) {
        bool over;
        result = dtrain_strategy_accumulate(s, i < micro);
        if (result == DTRAIN_OK) result = dtrain_strategy_join(s, &over);
    }
    return result == DTRAIN_OK ? dtrain_strategy_publish(s) : result;
}

/* Count the second step of a strategy of params, which belong to no other one. The communicator of the desc (NULL: the
 * world's) has the place of this rank. nodes: of a desc that goes node by node, or 0; tensor: ranks of a mesh's tensor
 * axis, or 1. */
static inline dtrain_result null_step(dtrain_world *world, dtrain_param *params, size_t count,
                                      dtrain_strategy_desc desc, int nodes, int tensor,
                                      uint32_t micro, dtrain_comm_info *sent)
{
    const dtrain_comm *like = desc.comm ? desc.comm : dtrain_world_comm(world);
    const int size = dtrain_comm_size(like), rank = dtrain_comm_rank(like);
    dtrain_comm *comm = NULL;
    dtrain_mesh *mesh = NULL;
    dtrain_strategy *s = NULL;
    dtrain_strategy_info before, after;
    dtrain_mesh_desc axes;
    dtrain_comm_info at;
    dtrain_comm_query(like, &at);
    const int first = at.world_ranks[0], stride = size > 1 ? at.world_ranks[1] - first : 1;
    dtrain_result result = null_group(world, null_comm_ops(), sizeof(null_comm), first, stride,
                                      size, nodes ? nodes : 1, rank, &comm);
    if (result == DTRAIN_OK) ((null_comm *)(void *)comm)->levels = nodes > 0;
    memset(&axes, 0, sizeof axes);
    axes.tensor = tensor;
    desc.comm = axes.comm = comm;
    if (result == DTRAIN_OK && tensor > 1) {
        ((null_comm *)(void *)comm)->tensor = tensor;
        desc.comm = NULL;
        result = dtrain_mesh_create(world, &axes, &mesh);
        desc.mesh = mesh;
    }
    if (result == DTRAIN_OK) result = dtrain_strategy_create(world, params, count, &desc, &s);
    if (result == DTRAIN_OK) result = null_step_take(s, micro);
    dtrain_strategy_query(s, &before);
    if (result == DTRAIN_OK) result = null_step_take(s, micro);
    dtrain_strategy_query(s, &after);
    memset(sent, 0, sizeof *sent);
    sent->wire_bytes = after.traffic.wire_bytes - before.traffic.wire_bytes;
    sent->operation_count = after.traffic.operation_count - before.traffic.operation_count;
    sent->node_bytes = after.traffic.node_bytes - before.traffic.node_bytes;
    dtrain_strategy_destroy(s);
    dtrain_mesh_destroy(mesh);
    dtrain_comm_destroy(comm);
    return result;
}

#endif
