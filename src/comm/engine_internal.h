/* The progress engine
 *
 * One engine drives the communicators "local", "staged" and "mpi". It owns everything that does not
 * depend on how bytes travel: the queue, the sequence numbers, the comparison of calls, waits and
 * deadlines, failure, split, and buffers in device memory. A transport moves the bytes: it is one
 * dtrain_transport_ops table (comm/backend.h). The life of one collective on one rank:
 *
 *     dtrain_all_reduce -> engine_start
 *         |   copy_in: device memory only; page-locked images replace the buffers
 *      QUEUED         waits for its copy, and until fewer than DTRAIN_WINDOW are under way
 *         |   transport->show: this rank's call, with the data if the operation is small
 *      SHOWN          waits until transport->heard returns every rank's call; all must be equal
 *         |   small: every rank computes its own result from the data with the calls
 *      MOVING         transport->move, until it returns true
 *         |   copy_out: device memory only
 *       done          engine_wait gives the handle back
 *
 * A message (send, receive) goes from QUEUED to MOVING when it is the first message between its two
 * ranks in its direction that is not posted. A receive first hears and compares the sender's call.
 *
 * There is no progress thread: engine_advance takes every step above, during a call of the host. It
 * visits the queue from the oldest operation to the newest and never waits.
 *
 * Why a window: a rank starts operation t only after it has finished t - W, hence after every rank
 * has shown t - W. So a rank can be at most W operations ahead of another rank. A transport that
 * keeps 2 W places for calls never overwrites a place that is still read: a rank that starts t has
 * seen all ranks at t - W, and those ranks had finished t - 2W before. */

#pragma once

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "device/backend.h"

#define DTRAIN__SMALL_TOTAL (8 * DTRAIN_SMALL_BYTES) /* most bytes of small data for one rank */

typedef struct dtrain__engine dtrain__engine;
typedef struct dtrain__work dtrain__work;

typedef enum dtrain__state {
    DTRAIN__QUEUED = 0,
    DTRAIN__SHOWN = 1,
    DTRAIN__MOVING = 2
} dtrain__state;

/* The bounce buffer of a work for device memory, see comm/staged.c; zero until first needed. */
typedef struct dtrain__bounce {
    dtrain_collective called; /* with the program's buffers; op.what has addresses in the image */
    dtrain_event *computed, *copied;
    char *image; /* page-locked, and mapped by the transport; it grows */
    size_t bytes;
} dtrain__bounce;

/* A work: the engine's part precedes the transport's part. */
struct dtrain__work {
    dtrain__work *next;       /* in the queue or in the list of idle works */
    dtrain__work *next_block; /* in the first work of a block; blocks stay until the end */
    dtrain__bounce bounce;
    int heard; /* number of ranks, from rank 0, whose call was heard and is equal */
    dtrain__state state;
    bool done;
    dtrain_transport_work op;
};

/* A communicator: the engine's part precedes the transport's part. */
struct dtrain__engine {
    const dtrain_transport_ops *transport;
    dtrain__engine *next;             /* in world->comms */
    bool failed;                      /* true after a failure; `report` has the sentence */
    dtrain__abort_record *report;     /* first failure; communicators that share it fail together */
    uint64_t sequence;                /* number of the last collective started */
    uint64_t agreed;                  /* number of the last collective that all ranks agreed on */
    dtrain__work *queue, **queue_end; /* operations in flight, in the order of their start */
    dtrain__work *idle, *blocks;
    bool staged;           /* true if the host cannot read device memory, which is copied */
    dtrain_stream *stream; /* for these copies */
    dtrain_comm base;
};

/* A communicator table of the engine. */
#define DTRAIN__ENGINE_OPS(name, transport)                                                      \
    {                                                                                            \
        DTRAIN_COMM_ABI, false, name, dtrain__engine_create, dtrain__engine_start,               \
            dtrain__engine_test, dtrain__engine_wait, dtrain__engine_alloc, dtrain__engine_free, \
            dtrain__engine_split, dtrain__engine_fail, dtrain__engine_destroy, transport         \
    }

/* comm/engine.c */
DTRAIN__PRIVATE void dtrain__describe(const dtrain_call *shown, uint64_t sequence, char *text,
                                      size_t room);
DTRAIN__PRIVATE void dtrain__engine_advance(dtrain__engine *comm);
DTRAIN__PRIVATE dtrain_result dtrain__engine_fail(dtrain_comm *base, dtrain_result code,
                                                  const char *text);
DTRAIN__PRIVATE bool dtrain__engine_ok(dtrain_comm *comm, dtrain_result result);
DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE dtrain_result dtrain__engine_failf(dtrain_comm *comm, dtrain_result code,
                                                   const char *format, ...);
DTRAIN__PRIVATE dtrain_result dtrain__engine_start(dtrain_comm *base, const dtrain_collective *what,
                                                   dtrain_work **out);
DTRAIN__PRIVATE dtrain_result dtrain__engine_test(dtrain_work *base, bool *done);
DTRAIN__PRIVATE dtrain_result dtrain__engine_wait(dtrain_work *base);
DTRAIN__PRIVATE dtrain_result dtrain__engine_alloc(dtrain_comm *base, size_t bytes, void **out);
DTRAIN__PRIVATE void dtrain__engine_free(dtrain_comm *base, void *memory, size_t bytes);
DTRAIN__PRIVATE dtrain_result dtrain__engine_split(dtrain_comm *parent, int color, int key,
                                                   dtrain_comm **out);
DTRAIN__PRIVATE dtrain_result dtrain__engine_create(dtrain_world *world, dtrain_comm **out);
DTRAIN__PRIVATE dtrain_result dtrain__engine_destroy(dtrain_comm *base);

/* comm/circle.c */
DTRAIN__PRIVATE bool dtrain__waits_for(const dtrain__engine *comm, const dtrain__work *work,
                                       int rank);
DTRAIN__PRIVATE dtrain_result dtrain__look_for_circle(dtrain_world *world, dtrain__engine *comm,
                                                      const dtrain__work *work, dtrain__wait *wait);

/* comm/staged.c */
DTRAIN__PRIVATE dtrain_result dtrain__copy_in(dtrain__engine *comm, dtrain__work *work);
DTRAIN__PRIVATE bool dtrain__copying_in(dtrain__engine *comm, const dtrain__work *work);
DTRAIN__PRIVATE dtrain_result dtrain__copy_out(dtrain__engine *comm, dtrain__work *work);
DTRAIN__PRIVATE void dtrain__bounce_free(dtrain__engine *comm, dtrain__work *work);

/* comm/local.c; comm/mpi.c: NULL without DTRAIN_USE_MPI */
DTRAIN__PRIVATE const dtrain_comm_ops *dtrain__local_comm_ops(bool staged);
DTRAIN__PRIVATE const dtrain_comm_ops *dtrain__mpi_comm_ops(void);
