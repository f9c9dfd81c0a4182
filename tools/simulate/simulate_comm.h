/* simulate_comm.h: a virtual communicator: one rank of N, whose collectives only take time. Include it
 * behind dtrain.h.
 *
 * This process is one rank of N; the others are assumed to do the same at the same time. So values stay
 * what they are (means of equal values), and agreement is always reached. */
#ifndef SIMULATE_COMM_H
#define SIMULATE_COMM_H

#include "tools/simulate/simulate_device.h"

typedef struct sim_comm {
    dtrain_comm base;
    group who;
    bool links[LINKS];
    double started; /* its last collective */
    int tensor;    /* a mesh with so many ranks on its tensor axis will split this; 0: a strategy */
    bool aside;    /* of a tensor axis, which is counted apart */
    uint64_t seen; /* of base.info.wire_bytes */
} sim_comm;

typedef struct sim_work {
    dtrain_work base;
    double end, own;
} sim_work;

static const dtrain_comm_ops *sim_comm_ops(void);

static dtrain_result sim_comm_new(dtrain_world *world, int size, int nodes, int rank,
                                  dtrain_comm **out)
{
    sim_comm *comm = (sim_comm *)calloc(1, sizeof *comm);
    int *ranks = (int *)calloc((size_t)size, sizeof *ranks);
    *out = NULL;
    if (!comm || !ranks) {
        free(comm);
        free(ranks);
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a communicator of %d ranks", size);
    }
    comm->base.ops = sim_comm_ops();
    comm->base.world = world;
    comm->base.rank = rank;
    comm->base.size = size;
    comm->base.world_ranks = ranks;
    for (int i = 0; i < size; i++) ranks[i] = i;
    comm->who.size = size;
    comm->who.nodes = nodes;
    comm->links[INSIDE] = size > nodes;
    comm->links[BETWEEN] = nodes > 1;
    *out = &comm->base;
    return DTRAIN_OK;
}

static dtrain_result sim_create(dtrain_world *world, dtrain_comm **out)
{
    return sim_comm_new(world, 1, 1, 0, out);
}

/* What other ranks would send is what this one has; only host memory holds anything. */
static void sim_deliver(const dtrain_comm *comm, const dtrain_collective *what)
{
    dtrain_device *device = dtrain_world_device(comm->world);
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    const int copies = what->kind == DTRAIN_COLLECTIVE_ALL_GATHER ? comm->size : 1;
    if (!what->send || !what->recv || what->send == what->recv ||
        what->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL)
        return;
    if (is_virtual(device, what->send) || is_virtual(device, what->recv)) return;
    for (int i = 0; i < copies; i++)
        memmove((char *)what->recv + (size_t)i * bytes, what->send, bytes);
}

/* In launch order, as NCCL runs those of a communicator: when its links are free, and not before the one started last
 * has begun. A group inside nodes and one between nodes have no link in common and overlap; a group of both leaves the
 * links inside to others for what it does not need of them. */
static dtrain_result sim_start(dtrain_comm *comm, const dtrain_collective *what, dtrain_work **out)
{
    sim_comm *self = (sim_comm *)(void *)comm;
    sim_work *started = (sim_work *)calloc(1, sizeof *started);
    const bool sliced = what->kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER ||
                        what->kind == DTRAIN_COLLECTIVE_ALL_GATHER ||
                        what->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL;
    const double elements = (double)what->count * (sliced ? comm->size : 1);
    if (!started) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a collective");
    const double bytes = elements * (double)dtrain_dtype_bytes(what->dtype);
    const cost takes = collective_cost(&sim.machine, what->kind, bytes, self->who);
    double begin = most(sim.now, self->started);
    for (int i = 0; i < LINKS; i++)
        if (self->links[i]) begin = most(begin, sim.free_at[i]);
    self->started = begin;
    for (int i = 0; i < LINKS; i++)
        if (self->links[i])
            sim.free_at[i] =
                begin + (i == INSIDE && self->links[BETWEEN] ? takes.inside : takes.links);
    sim.communicated += takes.links + takes.latency + takes.own;
    const uint64_t sent = comm->info.wire_bytes - self->seen;
    const int away =
        comm->size - comm->size / self->who.nodes; /* each other rank is sent the same */
    if (self->aside) sim.tensor_sent += sent;
    else sim.sent += sent;
    if (away) sim.between += (uint64_t)((double)sent * away / (comm->size - 1));
    self->seen = comm->info.wire_bytes;
    sim_deliver(comm, what);
    started->base.comm = comm;
    started->end = begin + takes.links + takes.latency;
    started->own = takes.own;
    comm->in_flight++;
    comm->outstanding++;
    *out = &started->base;
    return DTRAIN_OK;
}

static dtrain_result sim_test(dtrain_work *one, bool *done)
{
    *done = ((sim_work *)(void *)one)->end <= sim.now;
    return DTRAIN_OK;
}

static dtrain_result sim_wait(dtrain_work *one)
{
    sim_work *self = (sim_work *)(void *)one;
    const double waited = most(0, self->end - sim.now) + self->own;
    sim.exposed += waited;
    if (((sim_comm *)(void *)one->comm)->aside) sim.exposed_tensor += waited;
    sim.now = most(sim.now, self->end) + self->own;
    one->comm->in_flight--;
    one->comm->outstanding--;
    free(self);
    return DTRAIN_OK;
}

static dtrain_result sim_alloc(dtrain_comm *comm, size_t bytes, void **out)
{
    dtrain_device *device = dtrain_world_device(comm->world);
    return device->ops->alloc(device, bytes, out);
}

static void sim_free(dtrain_comm *comm, void *memory, size_t bytes)
{
    dtrain_device *device = dtrain_world_device(comm->world);
    device->ops->free(device, memory, bytes);
}

/* A mesh names a group by its first rank: t r of the tensor axis, r % t of the data axis, and this rank's own number
 * where it is alone. Ranks of a tensor axis are neighbours; those of a data axis are t apart, so that a node has as
 * many of them as it has replicas. */
static dtrain_result sim_split_mesh(const sim_comm *self, int color, dtrain_comm **out)
{
    const dtrain_comm *comm = &self->base;
    const int t = self->tensor, data = comm->size / t, local = comm->size / self->who.nodes;
    const int tensor_rank = comm->rank % t, data_rank = comm->rank / t;
    if (color == comm->rank) return sim_comm_new(comm->world, 1, 1, 0, out);
    if (color == tensor_rank)
        return sim_comm_new(comm->world, data, t > local ? data : self->who.nodes, data_rank, out);
    if (color == t * data_rank) {
        const dtrain_result result =
            sim_comm_new(comm->world, t, t > local ? t / local : 1, tensor_rank, out);
        if (result == DTRAIN_OK) ((sim_comm *)(void *)*out)->aside = true;
        return result;
    }
    return dtrain_fail(
        DTRAIN_ERROR_UNSUPPORTED,
        "rank %d of %d simulated ones, %d on the tensor axis, has no group for color %d",
        comm->rank, comm->size, t, color);
}

/* Others cannot be asked, but a strategy splits in three ways only: all again (color 0), by place in the
 * node (rank % G) and by node (G + rank / G). Rank 1 is not at place 0, unless every node has one rank and
 * both groups are everybody. */
static dtrain_result sim_split(dtrain_comm *comm, int color, int key, dtrain_comm **out)
{
    sim_comm *self = (sim_comm *)(void *)comm;
    const int nodes = self->who.nodes, local = self->who.size / nodes;
    const int node = comm->rank / local, place = comm->rank % local;
    (void)key;
    if (self->tensor) return sim_split_mesh(self, color, out);
    if (color == 0) {
        const dtrain_result result = sim_comm_new(comm->world, comm->size, nodes, comm->rank, out);
        if (result == DTRAIN_OK) ((sim_comm *)(void *)*out)->aside = self->aside;
        return result;
    }
    if (color == local + node) return sim_comm_new(comm->world, local, 1, place, out);
    if (color == place) return sim_comm_new(comm->world, nodes, nodes, node, out);
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "rank %d of %d simulated nodes of %d has no group for color %d", comm->rank,
                       nodes, local, color);
}

static int sim_rank(int size) { return size > 1; }

static dtrain_result sim_fail(dtrain_comm *comm, dtrain_result code, const char *text)
{
    (void)comm;
    return dtrain_fail(code, "%s", text);
}

static dtrain_result sim_destroy(dtrain_comm *comm)
{
    free(comm->world_ranks);
    free(comm);
    return DTRAIN_OK;
}

static const dtrain_comm_ops *sim_comm_ops(void)
{
    static const dtrain_comm_ops ops = {DTRAIN_COMM_ABI, true,      "simulated", sim_create,
                                        sim_start,       sim_test,  sim_wait,    sim_alloc,
                                        sim_free,        sim_split, sim_fail,    sim_destroy,
                                        NULL};
    return &ops;
}

#endif
