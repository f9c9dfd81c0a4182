/* Meshes
 *
 * A mesh arranges the ranks of a communicator along axes. The tensor axis varies fastest and the
 * pipeline axis slowest, so that ranks that exchange most are neighbours:
 *
 *     rank = tensor + tensor ranks * (data + data ranks * pipeline)
 *
 *     8 ranks, tensor 2, data 4     replica      0    1    2    3
 *                                   tensor 0     0    2    4    6     each row is the data axis
 *                                   tensor 1     1    3    5    7     of one half of the model
 *
 * Ranks of a tensor axis share each layer of one replica and read the same samples (Shoeybi et al.,
 * "Megatron-LM", 2019). Ranks of a data axis hold the same part of the model and average gradients.
 * A program makes the mesh once and gives it to dtrain_strategy_create. Optimizer, trainer,
 * checkpoints and metrics take it from the strategy; a loader takes it as desc.mesh. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"

typedef struct dtrain_mesh dtrain_mesh;

/* Bits: axes can be added. */
typedef enum dtrain_axis {
    DTRAIN_AXIS_TENSOR = 1,
    DTRAIN_AXIS_DATA = 2,
    DTRAIN_AXIS_PIPELINE = 4,
    DTRAIN_AXIS_ALL = 7
} dtrain_axis;

/* Every zero is the default written beside the field: a zeroed desc is only data parallelism. */
typedef struct dtrain_mesh_desc {
    int tensor, data, pipeline; /* ranks along each axis; their product is the number of ranks. 0 =
                                   1, and the rest for data; -1 = the rest, on at most one axis */
    bool sequence_parallel;     /* between the layers that the tensor axis shares, each rank has a
                                   part of the rows (batch * sequence) instead of all rows: less
                                   memory, the same bytes sent (Korthikanti et al., "Reducing
                                   Activation Recomputation", 2022) */
    dtrain_comm *comm;          /* the ranks; NULL = all of the world */
    int ranks, rank;            /* without a world: number of ranks, and the rank to plan for */
} dtrain_mesh_desc;

/* Make a mesh. Collective: the ranks compare their descs. All fail if descs differ or the product
 * of the axes is not the number of ranks. Rank 0 warns if a tensor axis crosses nodes. With world
 * NULL the mesh is arithmetic for plans: local, without communicators, for any number of ranks.
 * desc NULL = a zeroed desc. */
DTRAIN_API dtrain_result dtrain_mesh_create(dtrain_world *world, const dtrain_mesh_desc *desc,
                                            dtrain_mesh **out);
/* Free a mesh and its communicators, after everything that uses it; NULL is allowed. */
DTRAIN_API void dtrain_mesh_destroy(dtrain_mesh *mesh);

typedef struct dtrain_mesh_info {
    int ranks, rank;                           /* ranks of the mesh; this rank */
    int tensor, data, pipeline;                /* ranks along each axis */
    int tensor_rank, data_rank, pipeline_rank; /* this rank's place on it */
    bool sequence_parallel;
} dtrain_mesh_info;
/* Fill in the shape of a mesh and this rank's place in it; zeros for NULL. The rank at a place is
 * tensor_rank + tensor * (data_rank + data * pipeline_rank). */
DTRAIN_API void dtrain_mesh_query(const dtrain_mesh *mesh, dtrain_mesh_info *info);
/* Return the communicator of the ranks that differ from this rank only along the given axes (a sum
 * of dtrain_axis), in the order of their ranks. TENSOR + PIPELINE hold one model; ALL is every
 * rank. The communicator belongs to the mesh. NULL for a mesh of NULL or without ranks, and after
 * an error. dtrain_mesh_create makes the communicators of each axis, of TENSOR + PIPELINE and of
 * ALL. The first call that asks for DATA and another axis, both of several ranks, makes that
 * communicator and is collective: all ranks of the mesh make these calls in the same order. */
DTRAIN_API dtrain_comm *dtrain_mesh_comm(const dtrain_mesh *mesh, uint32_t axes);
