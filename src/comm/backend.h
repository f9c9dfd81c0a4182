/* For authors of communicators: the communicator table, and the transport table. */

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

#define DTRAIN_COMM_ABI 8u

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
    uint64_t *moves;  /* a transport adds one when it has moved something: naps are short again */
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
    const struct dtrain_transport_ops *transport; /* of a communicator that the engine drives */
};

/* A transport: how the bytes of a communicator travel
 *
 * The engine (comm/engine_internal.h) does everything that does not depend on it: the queue, the
 * comparison of what ranks call, deadlines, failure, split, and buffers in device memory. To make a
 * communicator on a transport of one's own, copy a table that has one and replace it:
 *
 *     const dtrain_comm_ops *local;
 *     dtrain_comm_ops_by_name("local", &local);
 *     dtrain_comm_ops mine = *local;
 *     mine.name = "mine";
 *     mine.transport = &my_transport;
 *     desc.comm_ops = &mine;
 *
 * All functions are called by the thread of the rank, during its calls of the library; there is no
 * other thread. None may wait for another rank: what cannot be done now is tried again when the
 * function is called again. The engine owns communicators and works. A transport's own structs
 * begin with dtrain_comm and dtrain_transport_work, and it casts to them. Its fields in a
 * communicator are zero at first, its fields in a work at the start of each operation. An error is
 * reported by comm->ops->fail, which fails the communicator on all ranks; after that only unmap and
 * release are called. tests/support/toy_transport.h is a complete one. */

#define DTRAIN_WINDOW 32u        /* W: collectives of one rank under way */
#define DTRAIN_SMALL_BYTES 4096u /* of data that travel with a call, at most */
#define DTRAIN_REPORT_BYTES 512u /* of a communicator's first failure */

/* A call as ranks show it to each other. Of a collective all fields must be equal on all ranks, of
 * a message count and dtype. */
typedef struct dtrain_call {
    uint64_t count;
    uint32_t kind, dtype, op;
    int32_t root;
} dtrain_call;

/* An operation as a transport sees it; a transport's own begins with it. */
typedef struct dtrain_transport_work {
    dtrain_work base;
    dtrain_collective what; /* its buffers are host memory */
    dtrain_call call;
    size_t send_bytes, recv_bytes; /* read from what.send and written to what.recv by this rank */
    uint64_t sequence; /* of a collective: from 1, the same on all ranks; 0: send or receive */
    bool small;        /* the send buffer travels with the call: see show. Of a message: it could */
    bool oldest;       /* no earlier collective of this rank is under way: this one may use what
                          exists once in a communicator, such as a buffer */
    bool agreed;       /* of a receive: the call of its message was heard, and is as expected */
    bool posted;       /* set by a transport: the receiver needs nothing more of this rank, so that
                          the next message to it may be moved while this one waits */
} dtrain_transport_work;

typedef struct dtrain_transport_ops {
    size_t comm_bytes, work_bytes; /* of the transport's own structs */
    uint64_t grace_ns; /* data that a rank sent before it left may arrive so much later than the
                          news that it has left */

    /* Set up this rank's half of a communicator. *address, not 0, is sent to the other ranks, and
     * join gets the addresses of all, in rank order. join returns zeroed memory of
     * DTRAIN_REPORT_BYTES, aligned to 8, that all ranks of the communicator reach at any time; or
     * NULL: then a failure of the communicator fails the world. release frees what make has made:
     * at once if join was not called, else when no other rank uses it; it is called after a make
     * that failed, too. The world's communicator has number 0, is made first and released last. */
    dtrain_result (*make)(dtrain_comm *comm, int64_t *address);
    void *(*join)(dtrain_comm *comm, const int64_t *addresses);
    void (*release)(dtrain_comm *comm, bool joined);

    /* Allocate zeroed whole pages that the transport reaches without a copy, and free them. */
    dtrain_result (*map)(dtrain_comm *comm, size_t bytes, void **out);
    void (*unmap)(dtrain_comm *comm, void *memory, size_t bytes);

    /* Show all ranks what this rank calls: work->call and, when work->small, the send buffer after
     * it (send_bytes, at most DTRAIN_SMALL_BYTES). Called once for each collective, in their order,
     * and for at most W that are not done. A message is not shown: its sender hands work->call to
     * the receiver with the data. */
    void (*show)(dtrain_comm *comm, dtrain_transport_work *work);
    /* Return what another rank has shown as its collective number `sequence`, or NULL if it has not
     * been heard yet. Only the last 2 W numbers are asked for: 2 W places are enough. With
     * sequence 0: the call of the message that this rank receives next from that rank. */
    const dtrain_call *(*heard)(const dtrain_comm *comm, uint64_t sequence, int rank);
    /* Move an operation on; return true when it is done and its buffers are the host's again. A
     * collective is moved after all ranks have agreed about it, for the first time in the order of
     * the sequence numbers. A small collective has its result already; dtrain_collective_result
     * computes the result of a larger one. Messages between two ranks in one direction are moved
     * one after the other; the receive buffer may be written once work->agreed is true. */
    bool (*move)(dtrain_comm *comm, dtrain_transport_work *work);
    /* Say whether an operation that is being moved waits for this rank: for error messages. */
    bool (*lags)(const dtrain_comm *comm, const dtrain_transport_work *work, int rank);
    /* Optional: take in what has arrived; called before operations are moved in a wait. */
    void (*poll)(dtrain_comm *comm);
} dtrain_transport_ops;

/* Compute this rank's result of a collective, in what->recv, from the send buffers of all ranks, in
 * (size), in rank order. Ranks whose buffer the collective does not read may have NULL. */
DTRAIN_API void dtrain_collective_result(const dtrain_comm *comm, const dtrain_collective *what,
                                         const void *const *in);
