/* Who shares what with this rank: groups, made of a mesh or of a world. */

#pragma once

#include "core/platform_internal.h"
#include "comm/groups_internal.h"
#include "parallel/mesh.h"

struct dtrain_mesh {
    dtrain_world *world; /* NULL: a plan */
    dtrain_allocator allocator;
    dtrain_mesh_info info;
    dtrain_comm *all;                        /* desc.comm, or the world's */
    dtrain_comm *comms[DTRAIN_AXIS_ALL + 1]; /* by the sum of the axes that have several ranks */
};

/* Fill the groups of a mesh; where it is NULL those of ranks that hold a whole model each: comm, or
 * where that is NULL too the world's. */
DTRAIN__PRIVATE dtrain__groups dtrain__mesh_groups(dtrain_world *world, const dtrain_mesh *mesh,
                                                   dtrain_comm *comm);
/* Return the info of a mesh; zeros for NULL. */
DTRAIN__PRIVATE dtrain_mesh_info dtrain__mesh_info(const dtrain_mesh *mesh);
