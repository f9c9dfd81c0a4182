/* The counting communicator
 *
 * It is one rank of N, and the other ranks do not exist. dtrain_comm_info counts its operations and
 * bytes, as for every communicator; nothing is moved and no rank is waited for. As the plan device
 * counts the memory of a step, this counts what it sends, by running the strategy that sends it.
 *
 * The other ranks are assumed to do what this one does, so they would send the same. In host
 * memory, where ranks compare settings and agree on results, a copy of it arrives; on the plan
 * device there is nothing to copy. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm_internal.h"
#include "device/backend.h"
#include "device/device.h"
#include "device/device_internal.h"

typedef struct dtrain__counting {
    dtrain_comm base;
    int node_ranks;
} dtrain__counting;

static const dtrain_comm_ops *dtrain__counting_ops(void);

/* Make one rank of a group: every `stride`-th rank of the world from `first` on. */
static dtrain_result dtrain__counting_group(dtrain_world *world, int first, int stride, int size,
                                            int rank, int node_ranks, dtrain_comm **out)
{
    const dtrain_allocator *a = &world->allocator;
    dtrain__counting *self =
        (dtrain__counting *)dtrain__alloc(a, 1, sizeof *self, "a counting communicator");
    *out = NULL;
    if (!self) return DTRAIN_ERROR_MEMORY;
    self->base.ops = dtrain__counting_ops();
    self->base.world = world;
    self->base.rank = rank;
    self->base.size = size;
    self->node_ranks = node_ranks;
    self->base.world_ranks =
        (int *)dtrain__alloc(a, (size_t)size, sizeof *self->base.world_ranks, "a group's ranks");
    if (!self->base.world_ranks) {
        dtrain__free(a, self, 1, sizeof *self);
        return DTRAIN_ERROR_MEMORY;
    }
    for (int i = 0; i < size; i++) self->base.world_ranks[i] = first + stride * i;
    *out = &self->base;
    return DTRAIN_OK;
}

/* Make a communicator of all ranks of a world, of which node_ranks in a row are a node. */
DTRAIN__PRIVATE dtrain_result dtrain__counting_create(dtrain_world *world, int node_ranks,
                                                      dtrain_comm **out)
{
    return dtrain__counting_group(world, 0, 1, world->size, world->rank, node_ranks, out);
}

/* Be done at once: no handle is needed. */
static dtrain_result dtrain__counting_start(dtrain_comm *comm, const dtrain_collective *what,
                                            dtrain_work **out)
{
    dtrain_device *device = comm->world->device;
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    const int copies = what->kind == DTRAIN_COLLECTIVE_ALL_GATHER ? comm->size : 1;
    *out = NULL;
    if (!bytes || !what->send || !what->recv || !dtrain__on_host(device, what->send) ||
        !dtrain__on_host(device, what->recv))
        return DTRAIN_OK;
    for (int i = 0; i < copies; i++) {
        char *to = (char *)what->recv + (size_t)i * bytes;
        if (to != what->send) memmove(to, what->send, bytes);
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__counting_alloc(dtrain_comm *comm, size_t bytes, void **out)
{
    return comm->world->device->ops->alloc(comm->world->device, bytes, out);
}

static void dtrain__counting_free(dtrain_comm *comm, void *memory, size_t bytes)
{
    comm->world->device->ops->free(comm->world->device, memory, bytes);
}

/* Find the group from this rank's color alone. Colors are those of dtrain__split_levels: below
 * node_ranks a place in each node, from there on a node. */
static dtrain_result dtrain__counting_split(dtrain_comm *comm, int color, int key,
                                            dtrain_comm **out)
{
    const int node = ((dtrain__counting *)(void *)comm)->node_ranks, rank = comm->rank;
    (void)key;
    if (color < node)
        return dtrain__counting_group(comm->world, color, node, comm->size / node, rank / node, 1,
                                      out);
    return dtrain__counting_group(comm->world, (color - node) * node, 1, node, rank % node, node,
                                  out);
}

static dtrain_result dtrain__counting_fail(dtrain_comm *comm, dtrain_result code, const char *text)
{
    (void)comm;
    return dtrain_fail(code, "%s", text);
}

static dtrain_result dtrain__counting_destroy(dtrain_comm *comm)
{
    const dtrain_allocator a = comm->world->allocator;
    dtrain__free(&a, comm->world_ranks, (size_t)comm->size, sizeof *comm->world_ranks);
    dtrain__free(&a, comm, 1, sizeof(dtrain__counting));
    return DTRAIN_OK;
}

static const dtrain_comm_ops *dtrain__counting_ops(void)
{
    static const dtrain_comm_ops ops = {DTRAIN_COMM_ABI,
                                        false,
                                        "counting",
                                        NULL,
                                        dtrain__counting_start,
                                        NULL,
                                        NULL,
                                        dtrain__counting_alloc,
                                        dtrain__counting_free,
                                        dtrain__counting_split,
                                        dtrain__counting_fail,
                                        dtrain__counting_destroy,
                                        NULL};
    return &ops;
}
