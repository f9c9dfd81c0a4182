/* null_comm.h: a communicator without peers: one rank of N, written on the library's public table, dtrain_comm_ops.
 * Include it after dtrain.h.
 *
 * Nothing moves and no rank is waited for; dtrain_comm_query counts operations and bytes as for every communicator. A
 * strategy made with it steps as it always does, and its dtrain_strategy_info.traffic before and after says what a
 * step sends. The other ranks are assumed to do what this one does: agreement is always reached. */
#ifndef NULL_COMM_H
#define NULL_COMM_H

#include <stdlib.h>
#include <string.h>

/* Another communicator's struct may begin with it, as that of the simulator does. */
typedef struct null_comm {
    dtrain_comm base;
    size_t bytes; /* of the struct that begins with this one; split makes another such struct */
    int nodes;    /* each has the same number of consecutive ranks */
    int tensor; /* ranks of the tensor axis of the mesh that will split this; 0: a strategy will */
    bool
        levels; /* a strategy that goes node by node splits this: color 0 is a place in the nodes */
    bool aside; /* of a tensor axis, or of a whole mesh: not of the data axis */
} null_comm;

/* Make one rank of a group: of every `stride`-th rank of the world from `first` on. */
static dtrain_result null_group(dtrain_world *world, const dtrain_comm_ops *ops, size_t bytes,
                                int first, int stride, int size, int nodes, int rank,
                                dtrain_comm **out)
{
    null_comm *comm = (null_comm *)calloc(1, bytes);
    int *ranks = (int *)calloc((size_t)size, sizeof *ranks);
    *out = NULL;
    if (!comm || !ranks) {
        free(comm);
        free(ranks);
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a communicator of %d ranks", size);
    }
    comm->base.ops = ops;
    comm->base.world = world;
    comm->base.rank = rank;
    comm->base.size = size;
    comm->base.world_ranks = ranks;
    for (int i = 0; i < size; i++) ranks[i] = first + stride * i;
    comm->bytes = bytes;
    comm->nodes = nodes;
    *out = &comm->base;
    return DTRAIN_OK;
}

/* What other ranks would send is what this one has. Only host memory holds anything. */
static void null_deliver(const dtrain_comm *comm, const dtrain_collective *what)
{
    dtrain_device *device = dtrain_world_device(comm->world);
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    const int copies = what->kind == DTRAIN_COLLECTIVE_ALL_GATHER ? comm->size : 1;
    if (!bytes || !what->send || !what->recv || what->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL) return;
    if (!device->ops->host_memory && (device->ops->is_device_memory(device, what->send) ||
                                      device->ops->is_device_memory(device, what->recv)))
        return;
    for (int i = 0; i < copies; i++)
        memmove((char *)what->recv + (size_t)i * bytes, what->send, bytes);
}

/* Done at once: there is no handle to wait for. */
static dtrain_result null_start(dtrain_comm *comm, const dtrain_collective *what, dtrain_work **out)
{
    *out = NULL;
    null_deliver(comm, what);
    return DTRAIN_OK;
}

static dtrain_result null_alloc(dtrain_comm *comm, size_t bytes, void **out)
{
    dtrain_device *device = dtrain_world_device(comm->world);
    return device->ops->alloc(device, bytes, out);
}

static void null_free(dtrain_comm *comm, void *memory, size_t bytes)
{
    dtrain_device *device = dtrain_world_device(comm->world);
    device->ops->free(device, memory, bytes);
}

/* A mesh names a group by its first rank: t r of the tensor axis, r % t of the data axis, and this rank's number
 * for a group of one. Ranks of a tensor axis are neighbours; ranks of a data axis are t apart, so a node has one for
 * each of its replicas. */
static dtrain_result null_split_mesh(const null_comm *self, int color, dtrain_comm **out)
{
    const dtrain_comm *c = &self->base;
    const int t = self->tensor, data = c->size / t, local = c->size / self->nodes;
    const int tensor_rank = c->rank % t, data_rank = c->rank / t;
    if (color == c->rank)
        return null_group(c->world, c->ops, self->bytes, c->rank, 1, 1, 1, 0, out);
    if (color == tensor_rank)
        return null_group(c->world, c->ops, self->bytes, tensor_rank, t, data,
                          t > local ? data : self->nodes, data_rank, out);
    if (color == t * data_rank) {
        const dtrain_result result = null_group(c->world, c->ops, self->bytes, color, 1, t,
                                                t > local ? t / local : 1, tensor_rank, out);
        if (result == DTRAIN_OK) ((null_comm *)(void *)*out)->aside = true;
        return result;
    }
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "rank %d of %d without peers, %d on the tensor axis, has no group for color "
                       "%d",
                       c->rank, c->size, t, color);
}

/* Others cannot be asked, but a strategy splits in three ways only: all again (color 0), by place in the node
 * (rank % G) and by node (G + rank / G). Without `levels` color 0 is everybody: a rank at place 0 must not be asked
 * then, unless every node has one rank and both groups are everybody. */
static dtrain_result null_split(dtrain_comm *comm, int color, int key, dtrain_comm **out)
{
    const null_comm *self = (const null_comm *)(const void *)comm;
    const int nodes = self->nodes, local = comm->size / nodes, *ranks = comm->world_ranks;
    const int node = comm->rank / local, place = comm->rank % local;
    const int stride = comm->size > 1 ? ranks[1] - ranks[0] : 1;
    (void)key;
    if (self->tensor) return null_split_mesh(self, color, out);
    if (color == 0 && !self->levels) {
        const dtrain_result result = null_group(comm->world, comm->ops, self->bytes, ranks[0],
                                                stride, comm->size, nodes, comm->rank, out);
        if (result == DTRAIN_OK) ((null_comm *)(void *)*out)->aside = self->aside;
        return result;
    }
    if (color == local + node)
        return null_group(comm->world, comm->ops, self->bytes, ranks[node * local], stride, local,
                          1, place, out);
    if (color == place)
        return null_group(comm->world, comm->ops, self->bytes, ranks[place], stride * local, nodes,
                          nodes, node, out);
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "rank %d of %d nodes of %d without peers has no group for color %d",
                       comm->rank, nodes, local, color);
}

static dtrain_result null_fail(dtrain_comm *comm, dtrain_result code, const char *text)
{
    (void)comm;
    return dtrain_fail(code, "%s", text);
}

static dtrain_result null_destroy(dtrain_comm *comm)
{
    free(comm->world_ranks);
    free(comm);
    return DTRAIN_OK;
}

static const dtrain_comm_ops *null_comm_ops(void)
{
    static const dtrain_comm_ops ops = {
        DTRAIN_COMM_ABI, false,     "null",     NULL,      null_start,   NULL, NULL,
        null_alloc,      null_free, null_split, null_fail, null_destroy, NULL};
    return &ops;
}

#endif
