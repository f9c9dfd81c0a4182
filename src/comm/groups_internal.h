/* Groups: who shares what with this rank
 *
 * Everything above the communicators that must know "rank of how many" takes it from here:
 *
 *     data    average gradients: each rank has other samples. The loader deals over them, the
 *             strategy reduces over them, dropout draws a stream for each
 *     copy    share one copy of the values, of which each keeps a shard. Norms add up over them,
 *             and a checkpoint has as many writers. NULL: this rank has all of it
 *     model   hold the parts of one model between them. NULL: this rank alone
 *     all     take part in one training: records and requests to stop go over all of them
 *
 * Without a mesh a rank holds a whole model: data and all are desc.comm, or the world, model is
 * NULL, and the strategy makes copy, by its kind, of data. A mesh with axes (pipeline, data,
 * tensor) will split the world: data is the ranks with the same place on the other axes, model
 * those with the same place on the data axis, all the whole mesh; copy is of data as before. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"

typedef struct dtrain__groups {
    dtrain_comm *data, *copy, *model, *all;
} dtrain__groups;

/* Fill the groups of ranks that hold a whole model each: comm, or where it is NULL the world's. */
DTRAIN__PRIVATE dtrain__groups dtrain__world_groups(dtrain_world *world, dtrain_comm *comm);

/* Bring what a rank did alone to all of them: success on all, or an error on each. Collective. */
DTRAIN__PRIVATE dtrain_result dtrain__agree(dtrain_comm *comm, dtrain_result mine);
