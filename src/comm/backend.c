/* Choosing a communicator
 *
 *     the device uses host memory               desc.comm_ops, else local or MPI
 *     one device per rank, desc.comm_ops        desc.comm_ops
 *     otherwise, on one machine                 staged; the log says why */

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
#include "device/backend.h"
#include "device/device.h"

DTRAIN_API dtrain_result dtrain_comm_ops_by_name(const char *name, const dtrain_comm_ops **out)
{
    if (!name || !out)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_comm_ops_by_name: %s is NULL",
                           name ? "out" : "name");
    *out = strcmp(name, "local") == 0 ? dtrain__local_comm_ops(false)
           : strcmp(name, "mpi") == 0 ? dtrain__mpi_comm_ops()
                                      : NULL;
    if (*out) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_UNSUPPORTED,
        "dtrain_comm_ops_by_name: \"%.40s\" is not here; there are \"local\" and, in a "
        "program built by mpicc with -DDTRAIN_USE_MPI, \"mpi\"",
        name);
}

/* Choose and make the world's communicator: only this function chooses a backend. Two ranks share a
 * device if the number of their node and the id of their device are equal. */
DTRAIN__PRIVATE dtrain_result dtrain__world_comm_create(dtrain_world *world)
{
    typedef struct place {
        dtrain_device_info info;
        int node;
    } place;
    const dtrain_comm_ops *const mpi = dtrain__mpi_comm_ops();
    const dtrain_comm_ops *const local = dtrain__local_comm_ops(false);
    const bool apart = !world->control->arenas && mpi && (!world->guest || world->comm_given);
    const dtrain_comm_ops *ops = apart ? mpi : local;
    const bool on_host = world->device->ops->host_memory;
    if (world->comm_ops) ops = world->comm_ops;
    if (ops->abi != DTRAIN_COMM_ABI)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "communicator table has ABI %u, this dtrain.h expects %u: rebuild it",
                           (unsigned)ops->abi, (unsigned)DTRAIN_COMM_ABI);
    if (!on_host && !ops->transport) {
        bool shared = false;
        place mine;
        memset(&mine, 0, sizeof mine);
        DTRAIN__TRY(dtrain_device_query(world->device, &mine.info));
        mine.node = world->node;
        DTRAIN__TRY(dtrain__world_gather(world, &mine, sizeof mine));
        for (int n = 0; n < world->size * world->size && !shared; n++) {
            const int i = n / world->size, k = n % world->size;
            const place *a = (const place *)dtrain__gathered(world, i);
            const place *b = (const place *)dtrain__gathered(world, k);
            shared = k < i && a->node == b->node && strcmp(a->info.id, b->info.id) == 0;
            if (shared && world->rank == 0)
                dtrain_log(world, DTRAIN_LOG_INFO,
                           "ranks %d and %d share one device (%s of %u): collectives go through "
                           "host memory",
                           k, i, a->info.name, a->info.count);
        }
        if (shared) ops = local;
    } else if (!on_host && ops == local && world->rank == 0 && world->size > 1) {
        dtrain_log(world, DTRAIN_LOG_INFO,
                   "no comm_ops given: collectives between %d ranks go through host memory; "
                   "dtrain_nccl.h has a faster way when each has a device",
                   world->size);
    }
    if (!on_host && ops == local) ops = dtrain__local_comm_ops(true);
    world->comm_ops = ops;
    return ops->create(world, &world->comm);
}

/* End all communicators of the engine, even with operations in flight. The world's communicator was
 * made first and ends last. The program must destroy its communicators of other backends. */
DTRAIN__PRIVATE void dtrain__world_comm_end(dtrain_world *world)
{
    if (world->comm && !world->comm->ops->transport) (void)world->comm->ops->destroy(world->comm);
    while (world->comms) (void)dtrain__engine_destroy(&world->comms->base);
}

/* Let the transports send what is left to send. */
DTRAIN__PRIVATE void dtrain__world_comm_linger(dtrain_world *world)
{
    for (dtrain__engine *comm = world->comms; comm; comm = comm->next)
        if (comm->transport->poll && !comm->failed) comm->transport->poll(&comm->base);
}
