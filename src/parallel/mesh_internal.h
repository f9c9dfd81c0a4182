/* Groups: who shares what with this rank, by a mesh or by the world. */

#pragma once

#include "core/platform_internal.h"
#include "comm/groups_internal.h"
#include "parallel/mesh.h"

struct dtrain_mesh {
    dtrain_world *world; /* NULL: a mesh for plans */
    dtrain_allocator allocator;
    dtrain_mesh_info info;
    dtrain_comm *all;                        /* desc.comm, or the world's communicator */
    dtrain_comm *comms[DTRAIN_AXIS_ALL + 1]; /* index: sum of the axes that have several ranks */
};

/* Fill the groups of a mesh. mesh NULL: every rank holds a whole model, and the group is comm, or
 * the world's communicator if comm is NULL too. */
DTRAIN__PRIVATE dtrain__groups dtrain__mesh_groups(dtrain_world *world, const dtrain_mesh *mesh,
                                                   dtrain_comm *comm);
/* Return the info of a mesh; zeros for NULL. */
DTRAIN__PRIVATE dtrain_mesh_info dtrain__mesh_info(const dtrain_mesh *mesh);
