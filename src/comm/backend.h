/* For authors of communicators: the communicator table. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"

/* One operation as a backend sees it; the calls above check and fill it. */
typedef struct dtrain_collective {
    uint32_t kind; /* dtrain_collective_kind */
    dtrain_dtype dtype;
    uint32_t op;  /* dtrain_reduce_op, 0 where there is none */
    int root;     /* root or peer, -1 where there is none */
    size_t count; /* as the call names it: recv_count, send_count, count */
    const void *send;
    void *recv;
} dtrain_collective;

#define DTRAIN_COMM_ABI 7u

/* What all backends have in common; a backend's own struct begins with it. A backend that makes one
 * fills ops to world_ranks, and keeps in_flight and outstanding right. */
struct dtrain_comm {
    const struct dtrain_comm_ops *ops;
    dtrain_world *world;
    int rank, size;
    int *world_ranks;                            /* (size) */
    uint64_t in_flight;                          /* operations started and not finished */
    uint64_t outstanding;                        /* handles not given back */
    uint64_t inside_ns, flight_ns, flight_since; /* the callers' books, to the end */
    int64_t number;   /* 0: the world's; its members have the same, no other group of a rank has */
    uint64_t started; /* collectives that this rank has called */
    uint64_t splits;
    const char *axis; /* of a mesh, along which its ranks differ: "tensor", a literal; or NULL */
    dtrain_comm_info info;
};

/* A backend's own begins with it. */
struct dtrain_work {
    dtrain_comm *comm;
    uint64_t event; /* its number in the timeline; the callers' book */
};

/* A backend. create makes the world's communicator, collectively. start queues the operation and
 * never waits; test advances without blocking; wait blocks at most until the world's deadline and
 * gives the handle back. Where buffers are device memory, "done" means: in the order of the
 * device's compute stream. split is collective and exchanges the colors itself. fail marks the
 * communicator failed for all ranks, and returns the error that stands: an earlier one wins.
 * destroy is also called by the end of the world, then with operations in flight. */
struct dtrain_comm_ops {
    uint32_t abi;
    bool launch_ordered; /* operations run in the order in which they were started, also between
                            communicators (NCCL): ranks must start them all in one order */
    const char *name;
    dtrain_result (*create)(dtrain_world *world, dtrain_comm **out);
    dtrain_result (*start)(dtrain_comm *comm, const dtrain_collective *what, dtrain_work **work);
    dtrain_result (*test)(dtrain_work *work, bool *done);
    dtrain_result (*wait)(dtrain_work *work);
    dtrain_result (*alloc)(dtrain_comm *comm, size_t bytes, void **out);
    void (*free)(dtrain_comm *comm, void *memory, size_t bytes);
    dtrain_result (*split)(dtrain_comm *comm, int color, int key, dtrain_comm **out);
    dtrain_result (*fail)(dtrain_comm *comm, dtrain_result code, const char *text);
    dtrain_result (*destroy)(dtrain_comm *comm);
};
