/* Groups: who shares what with this rank
 *
 * Whoever above the communicators must know "rank of how many" takes it from here:
 *
 *     data    average gradients; each of them has other samples. Loaders deal to them, strategies
 *             reduce over them, dropout draws a stream for each
 *     copy    share one copy of the values, each with a shard of it: norms are summed up over them.
 *             NULL: this rank has everything
 *     tensor  share every layer of one replica, each with its part of what is cut. NULL: this rank
 *             has whole layers
 *     pipeline  have the stages of one replica. NULL: this rank has all layers
 *     model   hold one model between them. NULL: this rank alone holds one
 *     all     train together: records, requests to stop, checkpoints and metrics are of them
 *
 * Without a mesh every rank holds a model: data and all are desc.comm or the world's, and a
 * strategy makes copy of data, as its kind wants it. A mesh (parallel/mesh.h) cuts the ranks along
 * axes: data is then the ranks that differ from this one along the data axis alone, tensor and
 * model those that differ along the other axes, and all the whole mesh. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"

typedef struct dtrain__groups {
    dtrain_comm *data, *copy, *tensor, *pipeline, *model, *all;
    int tensor_ranks, tensor_rank; /* also of a plan, which has no communicators */
    int pipeline_ranks, pipeline_rank;
    bool sequence_parallel; /* rows between shared layers are divided over `tensor` */
} dtrain__groups;

/* Bring what a rank did alone to all of them: success on all, or an error on each. Collective. */
DTRAIN__PRIVATE dtrain_result dtrain__agree(dtrain_comm *comm, dtrain_result mine);
