/* For authors of communicators: the communicator table, and the transport table. */

#pragma once

#include "core/api.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"

/* One operation, checked and filled by the public calls. */
typedef struct dtrain_collective {
    uint32_t kind; /* dtrain_collective_kind */
    dtrain_dtype dtype;
    uint32_t op;  /* dtrain_reduce_op; 0 if there is none */
    int root;     /* root or peer; -1 if there is none */
    size_t count; /* the call's recv_count, send_count or count */
    const void *send;
    void *recv;
} dtrain_collective;

#define DTRAIN_COMM_ABI 8u

/* The common part of a communicator, with which a backend's struct begins. A backend fills ops to
 * world_ranks, and keeps in_flight and outstanding correct. */
struct dtrain_comm {
    const struct dtrain_comm_ops *ops;
    dtrain_world *world;
    int rank, size;
    int *world_ranks;                            /* (size) */
    uint64_t in_flight;                          /* operations started and not finished */
    uint64_t outstanding;                        /* handles not passed to dtrain_work_wait */
    uint64_t inside_ns, flight_ns, flight_since; /* this and all below: of the public calls */
    int64_t number;   /* equal on all members, different for each group of a rank; 0: the world's */
    uint64_t started; /* collectives that this rank has called */
    uint64_t splits;
    uint64_t *moves; /* a transport adds one when it has moved something, which shortens naps */
    const char
        *axis; /* axis of a mesh along which the ranks differ: "tensor", a literal; or NULL */
    dtrain_comm_info info;
};

/* The common part of a work, with which a backend's struct begins. */
struct dtrain_work {
    dtrain_comm *comm;
    uint64_t event; /* number in the timeline; of the public calls */
};

/* A backend. create makes the world's communicator, collectively. start queues the operation and
 * never waits. test advances without blocking. wait blocks at most until the world's deadline and
 * frees the handle. If buffers are device memory, "done" means: in the order of the device's
 * compute stream. split is collective and exchanges the colors. fail marks the communicator failed
 * on all ranks, and returns its first error. The end of the world calls destroy, too, even with
 * operations in flight. */
struct dtrain_comm_ops {
    uint32_t abi;
    bool launch_ordered; /* operations run in the order of their starts, also across communicators
                            (NCCL): all ranks must start them in the same order */
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
    const struct dtrain_transport_ops *transport; /* NULL if the engine does not drive it */
};

/* A transport: how the bytes of a communicator travel
 *
 * The engine (comm/engine_internal.h) does everything else: the queue, the comparison of calls,
 * deadlines, failure, split, and buffers in device memory. To use another transport, copy a table
 * and replace its transport:
 *
 *     const dtrain_comm_ops *local;
 *     dtrain_comm_ops_by_name("local", &local);
 *     dtrain_comm_ops mine = *local;
 *     mine.name = "mine";
 *     mine.transport = &my_transport;
 *     desc.comm_ops = &mine;
 *
 * The rank's thread calls all functions, during its calls of the library; there is no other thread.
 * No function may wait for another rank: the engine calls it again. The engine owns communicators
 * and works. A transport's structs begin with dtrain_comm and dtrain_transport_work; the transport
 * casts to its structs. Its fields in a communicator are zero at first, its fields in a work at the
 * start of each operation. A transport reports an error by comm->ops->fail, which fails the
 * communicator on all ranks; after that the engine calls only unmap and release.
 * tests/support/toy_transport.h is a complete transport. */

#define DTRAIN_WINDOW 32u        /* W: most collectives of one rank under way */
#define DTRAIN_SMALL_BYTES 4096u /* most bytes of data that travel with a call */
#define DTRAIN_REPORT_BYTES 512u /* size of the report of a communicator's failure */

/* A call that ranks show to each other. For a collective, all fields must be equal on all ranks;
 * for a message, count and dtype. */
typedef struct dtrain_call {
    uint64_t count;
    uint32_t kind, dtype, op;
    int32_t root;
} dtrain_call;

/* An operation of a transport, whose struct begins with it. */
typedef struct dtrain_transport_work {
    dtrain_work base;
    dtrain_collective what; /* its buffers are host memory */
    dtrain_call call;
    size_t send_bytes, recv_bytes; /* read from what.send and written to what.recv by this rank */
    uint64_t sequence; /* number of a collective, from 1, equal on all ranks; 0 for a message */
    bool small;  /* true if the send buffer travels with the call, see show; of a message: true if
                    it is as small */
    bool oldest; /* true if no earlier collective of this rank is under way: the operation may
                    use what exists once in a communicator, such as a buffer */
    bool agreed; /* true if the sender's call was heard and matches (receive) */
    bool posted; /* set by a transport if the receiver needs nothing more from this rank: the
                    next message to it may move while this message waits */
} dtrain_transport_work;

typedef struct dtrain_transport_ops {
    size_t comm_bytes, work_bytes; /* of the transport's structs */
    uint64_t grace_ns; /* most time between the news that a rank has left and the arrival of the
                          data that it had sent */

    /* Set up this rank's half of a communicator. The engine sends *address, which must not be 0, to
     * the other ranks; join gets the addresses of all ranks, in rank order. join returns zeroed
     * memory of DTRAIN_REPORT_BYTES, aligned to 8, that all ranks of the communicator can access at
     * any time; or NULL: then a failure of the communicator fails the world. release frees the
     * half: at once if join was not called, else when no other rank uses it. It is also called
     * after a make that failed. The world's communicator has number 0, is made first and released
     * last. */
    dtrain_result (*make)(dtrain_comm *comm, int64_t *address);
    void *(*join)(dtrain_comm *comm, const int64_t *addresses);
    void (*release)(dtrain_comm *comm, bool joined);

    /* Allocate zeroed whole pages that the transport can use without a copy, and free them. */
    dtrain_result (*map)(dtrain_comm *comm, size_t bytes, void **out);
    void (*unmap)(dtrain_comm *comm, void *memory, size_t bytes);

    /* Show this rank's call to all ranks: work->call and, if work->small, the send buffer after it
     * (send_bytes, at most DTRAIN_SMALL_BYTES). Called once for each collective, in their order; at
     * most W collectives that were shown are not done. A message is not shown: its sender passes
     * work->call to the receiver with the data. */
    void (*show)(dtrain_comm *comm, dtrain_transport_work *work);
    /* Return another rank's call of the collective `sequence`, or NULL if it has not been heard.
     * The engine asks only for the last 2 W numbers: 2 W places are enough. With sequence 0: return
     * the call of the next message from that rank to this rank. */
    const dtrain_call *(*heard)(const dtrain_comm *comm, uint64_t sequence, int rank);
    /* Advance an operation; return true when it is done and the host may use its buffers. The
     * engine moves a collective after all ranks have agreed on it, and begins collectives in the
     * order of their numbers. A small collective already has its result; dtrain_collective_result
     * computes the result of a larger one. Messages between two ranks in one direction are moved
     * one after the other; the receive buffer may be written once work->agreed is true. */
    bool (*move)(dtrain_comm *comm, dtrain_transport_work *work);
    /* Return true if an operation that is being moved waits for `rank`, for error sentences. */
    bool (*lags)(const dtrain_comm *comm, const dtrain_transport_work *work, int rank);
    /* Optional: receive what has arrived. Called before operations are moved in a wait. */
    void (*poll)(dtrain_comm *comm);
} dtrain_transport_ops;

/* Compute this rank's result of a collective, in what->recv, from the send buffers of all ranks, in
 * (size), in rank order. A buffer that the collective does not read can be NULL. */
DTRAIN_API void dtrain_collective_result(const dtrain_comm *comm, const dtrain_collective *what,
                                         const void *const *in);
