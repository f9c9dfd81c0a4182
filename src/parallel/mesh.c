/* Meshes: the arithmetic of ranks and places, and communicators along the axes
 *
 * A communicator is named by the axes along which its ranks differ. Axes of one rank do not count:
 * with tensor 2, data 4 and no pipeline TENSOR + PIPELINE is TENSOR, and ALL is TENSOR + DATA. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/same_internal.h"
#include "parallel/cut_internal.h"
#include "parallel/mesh_internal.h"

/* A plan can be for more ranks than can be started. The product of three axes fits 64 bits. */
#define DTRAIN__AXIS_MOST (1 << 20)

/* Complete the axes: the axis that is -1, or a data axis of 0, gets the remaining ranks. */
static dtrain_result dtrain__mesh_resolve(const dtrain_mesh_desc *desc, dtrain_mesh_info *info)
{
    int *const sizes[3] = {&info->tensor, &info->data, &info->pipeline};
    const int given[3] = {desc->tensor, desc->data, desc->pipeline};
    int64_t product = 1;
    int *rest = NULL;
    for (int i = 0; i < 3; i++) {
        *sizes[i] = given[i] ? given[i] : 1;
        if (given[i] < -1 || given[i] > DTRAIN__AXIS_MOST)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "dtrain_mesh_create: an axis of %d ranks, expected 1 to %d, 0 for "
                               "the default or -1 for the rest",
                               given[i], DTRAIN__AXIS_MOST);
        if (given[i] == -1 && rest)
            return dtrain_fail(
                DTRAIN_ERROR_ARGUMENT,
                "dtrain_mesh_create: two axes are -1, and one alone can be the rest");
        if (given[i] == -1) rest = sizes[i];
        else product *= *sizes[i];
    }
    if (!rest && !desc->data) rest = sizes[1];
    if (rest && product > 0 && info->ranks % product == 0) {
        *rest = (int)(info->ranks / product);
        product = info->ranks;
    }
    if (product == info->ranks) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_mesh_create: tensor %d x data %d x pipeline %d (0: the default, -1: "
                       "the rest) %s %d ranks; the product of the axes is their number",
                       desc->tensor, desc->data, desc->pipeline,
                       rest ? "does not divide the" : "are not the", info->ranks);
}

/* Return the sum of the axes that have several ranks. */
static uint32_t dtrain__mesh_axes(const dtrain_mesh_info *info, uint32_t axes)
{
    if (info->tensor == 1) axes &= ~(uint32_t)DTRAIN_AXIS_TENSOR;
    if (info->data == 1) axes &= ~(uint32_t)DTRAIN_AXIS_DATA;
    if (info->pipeline == 1) axes &= ~(uint32_t)DTRAIN_AXIS_PIPELINE;
    return axes;
}

/* Split the ranks along a sum of axes that have several ranks, if that is not done yet. */
static dtrain_result dtrain__mesh_split(dtrain_mesh *mesh, uint32_t axes)
{
    static const char *const names[DTRAIN_AXIS_ALL + 1] = {NULL, "tensor", "data", NULL,
                                                           "pipeline"}; /* for traces */
    const dtrain_mesh_info *at = &mesh->info;
    if (mesh->comms[axes]) return DTRAIN_OK;
    if (axes == dtrain__mesh_axes(at, DTRAIN_AXIS_ALL)) mesh->comms[axes] = mesh->all;
    else {
        const int tensor = axes & DTRAIN_AXIS_TENSOR ? 0 : at->tensor_rank;
        const int data = axes & DTRAIN_AXIS_DATA ? 0 : at->data_rank;
        const int pipeline = axes & DTRAIN_AXIS_PIPELINE ? 0 : at->pipeline_rank;
        const int fixed = tensor + at->tensor * (data + at->data * pipeline);
        DTRAIN__TRY(dtrain_comm_split(mesh->all, fixed, at->rank, &mesh->comms[axes]));
    }
    mesh->comms[axes]->axis = names[axes];
    return DTRAIN_OK;
}

/* Split the ranks along the axes that strategies and models use: each axis, also an axis of one
 * rank, and the ranks of one model. A communicator costs NCCL time and memory: the two others, DATA
 * with a second axis, are made at the first call that asks for them. */
DTRAIN_API dtrain_result dtrain_mesh_create(dtrain_world *world, const dtrain_mesh_desc *desc,
                                            dtrain_mesh **out)
{
    static const dtrain__same_field fields[] = {
        DTRAIN__SAME(dtrain_mesh_desc, tensor, INT), DTRAIN__SAME(dtrain_mesh_desc, data, INT),
        DTRAIN__SAME(dtrain_mesh_desc, pipeline, INT),
        DTRAIN__SAME(dtrain_mesh_desc, sequence_parallel, BOOL)};
    static const uint32_t used[] = {DTRAIN_AXIS_ALL, DTRAIN_AXIS_TENSOR, DTRAIN_AXIS_DATA,
                                    DTRAIN_AXIS_PIPELINE,
                                    DTRAIN_AXIS_TENSOR + DTRAIN_AXIS_PIPELINE};
    dtrain_mesh_desc own;
    DTRAIN__TRY(dtrain__take(dtrain__abi_of(world), DTRAIN__ABI_mesh_desc, desc, &own));
    desc = &own;
    DTRAIN__GIVEN("dtrain_mesh_create", out);
    *out = NULL;
    if (!world && (desc->ranks < 1 || desc->rank < 0 || desc->rank >= desc->ranks))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_mesh_create: world is NULL, and rank %d of %d is none to plan "
                           "for",
                           desc->rank, desc->ranks);
    const dtrain_allocator allocator = dtrain__resolve_allocator(world ? &world->allocator : NULL);
    dtrain_mesh *mesh = (dtrain_mesh *)dtrain__alloc(&allocator, 1, sizeof *mesh, "a mesh");
    if (mesh) mesh->allocator = allocator;
    dtrain_comm *all = !world ? NULL : desc->comm ? desc->comm : dtrain_world_comm(world);
    dtrain_result result = mesh ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    if (all) {
        const dtrain__same_list list = DTRAIN__SAME_STRUCT(fields, desc);
        result = dtrain__same(all, result, "dtrain_mesh_create", &list, 1);
    }
    if (mesh && result == DTRAIN_OK) { /* all ranks resolve alike, and refuse alike */
        dtrain_mesh_info *info = &mesh->info;
        mesh->world = world;
        mesh->all = all;
        info->ranks = all ? dtrain_comm_size(all) : desc->ranks;
        info->rank = all ? dtrain_comm_rank(all) : desc->rank;
        result = dtrain__mesh_resolve(desc, info);
        if (result == DTRAIN_OK) {
            info->tensor_rank = info->rank % info->tensor;
            info->data_rank = info->rank / info->tensor % info->data;
            info->pipeline_rank = info->rank / info->tensor / info->data;
            info->sequence_parallel = desc->sequence_parallel && info->tensor > 1;
        }
    }
    for (size_t i = 0; i < sizeof used / sizeof *used && all && result == DTRAIN_OK; i++)
        result = dtrain__mesh_split(mesh, dtrain__mesh_axes(&mesh->info, used[i]));
    if (all && result == DTRAIN_OK && mesh->info.tensor > 1) {
        dtrain_world_info own; /* node_ranks counts */
        dtrain__world_info(world, &own);
        int32_t most[2] = {(int32_t)own.node, -(int32_t)own.node};
        result = dtrain_all_reduce(dtrain_mesh_comm(mesh, DTRAIN_AXIS_TENSOR), most, most, 2,
                                   DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MAX, NULL);
        int32_t crosses = most[0] != -most[1];
        if (result == DTRAIN_OK)
            result = dtrain_all_reduce(all, &crosses, &crosses, 1, DTRAIN_DTYPE_I32,
                                       DTRAIN_REDUCE_MAX, NULL);
        if (result == DTRAIN_OK && crosses && mesh->info.rank == 0)
            dtrain_log(world, DTRAIN_LOG_WARNING,
                       "dtrain_mesh_create: the tensor axis of %d ranks crosses nodes: it sends "
                       "more than any other axis, and in the middle of every layer; keep it inside "
                       "a node",
                       mesh->info.tensor);
    }
    if (result == DTRAIN_OK) *out = mesh;
    else dtrain_mesh_destroy(mesh);
    return result;
}

DTRAIN_API void dtrain_mesh_destroy(dtrain_mesh *mesh)
{
    if (!mesh) return;
    const dtrain_allocator allocator = mesh->allocator;
    if (mesh->all) mesh->all->axis = NULL; /* the communicator is older than the mesh */
    for (int axes = DTRAIN_AXIS_ALL; axes >= 0; axes--)
        if (mesh->comms[axes] != mesh->all) dtrain_comm_destroy(mesh->comms[axes]);
    dtrain__free(&allocator, mesh, 1, sizeof *mesh);
}

DTRAIN__PRIVATE dtrain_mesh_info dtrain__mesh_info(const dtrain_mesh *mesh)
{
    dtrain_mesh_info none;
    memset(&none, 0, sizeof none);
    return mesh ? mesh->info : none;
}

DTRAIN_API void dtrain_mesh_query(const dtrain_mesh *mesh, dtrain_mesh_info *info)
{
    dtrain__give(dtrain__abi_of(mesh ? mesh->world : NULL), DTRAIN__ABI_mesh_info,
                 mesh ? &mesh->info : NULL, info);
}

DTRAIN_API dtrain_comm *dtrain_mesh_comm(const dtrain_mesh *mesh, uint32_t axes)
{
    if (!mesh || !mesh->all) return NULL;
    axes = dtrain__mesh_axes(&mesh->info, axes & DTRAIN_AXIS_ALL);
    (void)dtrain__mesh_split((dtrain_mesh *)mesh, axes); /* NULL after an error */
    return mesh->comms[axes];
}

DTRAIN__PRIVATE dtrain__groups dtrain__mesh_groups(dtrain_world *world, const dtrain_mesh *mesh,
                                                   dtrain_comm *comm)
{
    dtrain__groups groups;
    memset(&groups, 0, sizeof groups);
    groups.data = groups.all = comm || !world ? comm : dtrain_world_comm(world);
    groups.tensor_ranks = groups.pipeline_ranks = 1;
    if (!mesh) return groups;
    const dtrain_mesh_info *at = &mesh->info;
    groups.data = dtrain_mesh_comm(mesh, DTRAIN_AXIS_DATA);
    groups.all = dtrain_mesh_comm(mesh, DTRAIN_AXIS_ALL);
    if (at->tensor > 1) groups.tensor = dtrain_mesh_comm(mesh, DTRAIN_AXIS_TENSOR);
    if (at->pipeline > 1) groups.pipeline = dtrain_mesh_comm(mesh, DTRAIN_AXIS_PIPELINE);
    if (at->tensor > 1 || at->pipeline > 1)
        groups.model = dtrain_mesh_comm(mesh, DTRAIN_AXIS_TENSOR + DTRAIN_AXIS_PIPELINE);
    groups.tensor_ranks = at->tensor;
    groups.tensor_rank = at->tensor_rank;
    groups.pipeline_ranks = at->pipeline;
    groups.pipeline_rank = at->pipeline_rank;
    groups.sequence_parallel = at->sequence_parallel;
    return groups;
}
