/* Groups: the ranks that share something with this rank
 *
 * Code above the communicators gets every "rank of how many" from these groups:
 *
 *     data      ranks that average gradients, each with other samples. Loaders divide samples among
 *               them, strategies reduce over them, dropout draws one stream for each
 *     copy      ranks that share one copy of the values, each with a shard: norms are summed over
 *               them. NULL: this rank has all values
 *     tensor    ranks that share every layer of one replica, each with a part of what is cut.
 *               NULL: this rank has whole layers
 *     pipeline  ranks that have the stages of one replica. NULL: this rank has all layers
 *     model     ranks that together hold one model. NULL: this rank holds a whole model
 *     all       all ranks of the training: for records, requests to stop, checkpoints and metrics
 *
 * Without a mesh every rank holds a model: data and all are desc.comm or the world's communicator,
 * and a strategy makes copy from data, according to its kind. A mesh (parallel/mesh.h) arranges the
 * ranks along axes: data has the ranks that differ from this rank only along the data axis, tensor
 * and model the ranks that differ along the other axes, and all is the whole mesh. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"

typedef struct dtrain__groups {
    dtrain_comm *data, *copy, *tensor, *pipeline, *model, *all;
    int tensor_ranks, tensor_rank; /* also valid in a plan, which has no communicators */
    int pipeline_ranks, pipeline_rank;
    bool sequence_parallel; /* true if rows between shared layers are divided over `tensor` */
} dtrain__groups;

/* Share the outcome of local work: success on all ranks, or an error on all. Collective. */
DTRAIN__PRIVATE dtrain_result dtrain__agree(dtrain_comm *comm, dtrain_result mine);
