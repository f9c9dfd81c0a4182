/* simulate_comm.h: a virtual communicator: tools/null_comm.h's, with collectives that take time. Include it after
 * dtrain.h. */
#ifndef SIMULATE_COMM_H
#define SIMULATE_COMM_H

#include "tools/null_comm.h"
#include "tools/simulate/simulate_device.h"

typedef struct sim_comm {
    null_comm null;
    double started; /* its last collective */
    uint64_t seen;  /* of base.info.wire_bytes */
} sim_comm;

typedef struct sim_work {
    dtrain_work base;
    double end, own;
} sim_work;

static const dtrain_comm_ops *sim_comm_ops(void);

static dtrain_result sim_comm_new(dtrain_world *world, int size, int nodes, int rank,
                                  dtrain_comm **out)
{
    return null_group(world, sim_comm_ops(), sizeof(sim_comm), 0, 1, size, nodes, rank, out);
}

/* Return which of `size` ranks to simulate: one whose colors differ from each other, see null_split. */
static int sim_rank(int size) { return size > 1; }

static dtrain_result sim_create(dtrain_world *world, dtrain_comm **out)
{
    return sim_comm_new(world, 1, 1, 0, out);
}

/* In launch order, as NCCL runs those of a communicator: when its links are free, and not before the one started last
 * has begun. A group inside nodes and one between nodes have no link in common and overlap; a group of both leaves the
 * links inside to others for what it does not need of them. */
static dtrain_result sim_start(dtrain_comm *comm, const dtrain_collective *what, dtrain_work **out)
{
    sim_comm *self = (sim_comm *)(void *)comm;
    const group who = {comm->size, self->null.nodes};
    const bool links[LINKS] = {who.size > who.nodes, who.nodes > 1};
    sim_work *started = (sim_work *)calloc(1, sizeof *started);
    const bool sliced = what->kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER ||
                        what->kind == DTRAIN_COLLECTIVE_ALL_GATHER ||
                        what->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL;
    const double elements = (double)what->count * (sliced ? comm->size : 1);
    if (!started) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a collective");
    const double bytes = elements * (double)dtrain_dtype_bytes(what->dtype);
    const cost takes = collective_cost(&sim.machine, what->kind, bytes, who);
    double begin = most(sim.now, self->started);
    for (int i = 0; i < LINKS; i++)
        if (links[i]) begin = most(begin, sim.free_at[i]);
    self->started = begin;
    for (int i = 0; i < LINKS; i++)
        if (links[i])
            sim.free_at[i] = begin + (i == INSIDE && links[BETWEEN] ? takes.inside : takes.links);
    sim.communicated += takes.links + takes.latency + takes.own;
    const uint64_t sent = comm->info.wire_bytes - self->seen;
    const int away = comm->size - comm->size / who.nodes; /* each other rank is sent the same */
    if (self->null.aside) sim.tensor_sent += sent;
    else sim.sent += sent;
    if (away) sim.between += (uint64_t)((double)sent * away / (comm->size - 1));
    self->seen = comm->info.wire_bytes;
    null_deliver(comm, what);
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
    if (((sim_comm *)(void *)one->comm)->null.aside) sim.exposed_tensor += waited;
    sim.now = most(sim.now, self->end) + self->own;
    one->comm->in_flight--;
    one->comm->outstanding--;
    free(self);
    return DTRAIN_OK;
}

static const dtrain_comm_ops *sim_comm_ops(void)
{
    static dtrain_comm_ops ops;
    ops = *null_comm_ops();
    ops.launch_ordered = true;
    ops.name = "simulated";
    ops.create = sim_create;
    ops.start = sim_start;
    ops.test = sim_test;
    ops.wait = sim_wait;
    return &ops;
}

#endif
