/* Choosing a communicator
 *
 *     memory of the device is the host's        local, or the one that was asked for
 *     one device a rank, backend asked for      that one
 *     otherwise, on one machine                 staged, with a line in the log that says why */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/engine_internal.h"
#include "comm/mpi_internal.h"
#include "device/backend.h"
#include "device/device.h"

/* Two ranks that sit on one device, as this node's index and the device's id tell; -1: none. */
static dtrain_result dtrain__shared_device(dtrain_world *world, int pair[2])
{
    typedef struct place {
        dtrain_device_info info;
        int node;
    } place;
    place mine;
    memset(&mine, 0, sizeof mine);
    pair[0] = pair[1] = -1;
    DTRAIN__TRY(dtrain_device_query(world->device, &mine.info));
    mine.node = world->node;
    place *all = (place *)dtrain__alloc(&world->allocator, (size_t)world->size, sizeof *all,
                                        "a table of devices");
    if (!all) return DTRAIN_ERROR_MEMORY;
    const dtrain_result result = dtrain_world_all_gather(world, &mine, sizeof mine, all);
    for (int i = 0; result == DTRAIN_OK && i < world->size && pair[0] < 0; i++)
        for (int k = 0; k < i && pair[0] < 0; k++)
            if (all[i].node == all[k].node && strcmp(all[i].info.id, all[k].info.id) == 0)
                pair[0] = k, pair[1] = i;
    dtrain__free(&world->allocator, all, (size_t)world->size, sizeof *all);
    return result;
}

static dtrain_result dtrain__no_shared_memory(const dtrain_world *world, const char *advice)
{
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "dtrain_launch: %d ranks on %d hosts share no memory%s%s%s; %s", world->size,
                       world->node_count, world->no_region[0] ? " (" : "", world->no_region,
                       world->no_region[0] ? ")" : "", advice);
}

static dtrain_result dtrain__device_comm_create(dtrain_world *world)
{
    dtrain_device_info info;
    int pair[2] = {-1, -1};
    DTRAIN__TRY(dtrain__shared_device(world, pair));
    const bool given = world->comm_ops && world->comm_ops != dtrain__local_comm_ops();
    if (given && pair[0] < 0) return world->comm_ops->create(world, &world->comm);
    if (!world->control->arenas)
        return dtrain__no_shared_memory(
            world, pair[0] < 0 ? "give a communicator that crosses hosts: comm_ops, dtrain_nccl.h"
                               : "two ranks sit on one device: start fewer ranks on each host");
    if (world->rank == 0 && pair[0] >= 0) {
        DTRAIN__TRY(dtrain_device_query(world->device, &info));
        dtrain_log(world, DTRAIN_LOG_INFO,
                   "ranks %d and %d share one device (%s of %u): collectives go through host "
                   "memory",
                   pair[0], pair[1], info.name, info.count);
    } else if (world->rank == 0 && world->size > 1) {
        dtrain_log(world, DTRAIN_LOG_INFO,
                   "no comm_ops given: collectives between %d devices go through host memory; "
                   "dtrain_nccl.h has a faster way",
                   world->size);
    }
    return dtrain__local_comm_ops()->create(world, &world->comm);
}

DTRAIN_API dtrain_result dtrain_comm_ops_by_name(const char *name, const dtrain_comm_ops **out)
{
    if (!name || !out)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_comm_ops_by_name: %s is NULL",
                           name ? "out" : "name");
    *out = NULL;
    if (strcmp(name, "local") == 0) *out = dtrain__local_comm_ops();
#ifdef DTRAIN_USE_MPI
    if (strcmp(name, "mpi") == 0) *out = dtrain_mpi_comm_ops();
#endif
    if (*out) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_UNSUPPORTED,
        "dtrain_comm_ops_by_name: \"%.40s\" is not here; there are \"local\" and, in a "
        "program built by mpicc with -DDTRAIN_USE_MPI, \"mpi\"",
        name);
}

/* Emulated links are gates in the queue of the local communicator: no other one has them. */
DTRAIN__PRIVATE dtrain_result dtrain__world_comm_check(const dtrain_launch_desc *desc)
{
    const bool local = !desc->comm_ops || desc->comm_ops == dtrain__local_comm_ops();
    if (local || !desc->emulation.node_ranks) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "dtrain_launch: emulation is of the local communicator, and comm_ops is "
                       "another one; clear one of them");
}

/* The one place where it is decided which backend makes the world's communicator. */
DTRAIN__PRIVATE dtrain_result dtrain__world_comm_create(dtrain_world *world)
{
    if (world->comm_ops && world->comm_ops->abi != DTRAIN_COMM_ABI)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "communicator table has ABI %u, this dtrain.h expects %u: rebuild it",
                           (unsigned)world->comm_ops->abi, (unsigned)DTRAIN_COMM_ABI);
#ifdef DTRAIN_USE_MPI
    if (!world->comm_ops && !world->control->arenas) world->comm_ops = dtrain_mpi_comm_ops();
    if (world->comm_ops == dtrain_mpi_comm_ops())
        return world->comm_ops->create(world, &world->comm);
#endif
    if (!world->device->ops->host_memory) return dtrain__device_comm_create(world);
    if (world->comm_ops) return world->comm_ops->create(world, &world->comm);
    if (!world->control->arenas)
        return dtrain__no_shared_memory(world, "the local communicator works on one host, a "
                                               "transport between hosts is needed: NCCL on GPUs, "
                                               "MPI (mpicc -DDTRAIN_USE_MPI) on CPUs");
    return dtrain__local_comm_ops()->create(world, &world->comm);
}

/* At the end of the world, whatever is in flight. Communicators of other backends that the host has
 * not destroyed are the host's loss. */
DTRAIN__PRIVATE void dtrain__world_comm_end(dtrain_world *world)
{
    dtrain_comm *comm = world->comm;
    const bool given = comm && world->comm_ops && comm->ops == world->comm_ops;
    if (given) comm->ops->destroy(comm);
    while (world->comms) dtrain__engine_release(world->comms);
}

DTRAIN__PRIVATE void dtrain__world_comm_linger(dtrain_world *world)
{
#ifdef DTRAIN_USE_MPI
    if (world->comm && world->comm->ops == dtrain_mpi_comm_ops()) dtrain__mpi_linger(world->comm);
#endif
    (void)world;
}
