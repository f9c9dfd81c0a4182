/* The progress engine
 *
 * One engine drives the communicators "local", "staged" and "mpi". It owns everything that does not
 * depend on how bytes travel: the queue, the sequence numbers, the agreement on what is called,
 * waiting and deadlines, failure, split, and buffers in device memory. A transport below it moves
 * bytes; it is one dtrain_transport_ops table (comm/backend.h). The life of one collective on one
 * rank:
 *
 *     dtrain_all_reduce -> engine_start
 *         |   copy_in: device memory only; page-locked images take the place of the buffers
 *      QUEUED         waits for its copy, and until fewer than DTRAIN_WINDOW are under way
 *         |   transport->show: what this rank calls, with the data when the operation is small
 *      SHOWN          waits until transport->heard has an answer for every rank; all must be equal
 *         |   small: every rank computes its own result from what it has heard
 *      MOVING         transport->move, until it returns true
 *         |   copy_out: device memory only
 *       done          engine_wait gives the handle back
 *
 * A message (send, receive) goes from QUEUED to MOVING when it is the first one between its two
 * ranks in its direction that is not posted; of a receive the call is heard and compared first.
 *
 * There is no progress thread: every step above is taken inside a call of the host's, by
 * engine_advance, which visits the queue from the oldest operation to the newest and never waits.
 *
 * Why a window: a rank starts operation t only after it has finished t - W, hence after every rank
 * has shown t - W. A rank can therefore be at most W operations ahead of another one, and a
 * transport that keeps 2 W places for what ranks show never overwrites one that is still read: a
 * rank that starts t has seen all ranks at t - W, and those had finished t - 2W before. */

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

#define DTRAIN__SMALL_TOTAL (8 * DTRAIN_SMALL_BYTES) /* what one rank reads of small data */

typedef struct dtrain__engine dtrain__engine;
typedef struct dtrain__work dtrain__work;

typedef enum dtrain__state {
    DTRAIN__QUEUED = 0,
    DTRAIN__SHOWN = 1,
    DTRAIN__MOVING = 2
} dtrain__state;

/* What a work has for buffers in device memory, see comm/staged.c; zero until first needed. */
typedef struct dtrain__bounce {
    dtrain_collective called; /* with the program's buffers; op.what has addresses in the image */
    dtrain_event *computed, *copied;
    char *image; /* page-locked, and mapped by the transport; it grows */
    size_t bytes;
} dtrain__bounce;

/* The engine's part of a work precedes the part that the transport sees. */
struct dtrain__work {
    dtrain__work *next;       /* in the queue, or among the idle */
    dtrain__work *next_block; /* in the first of a block of works, which stay until the end */
    dtrain__bounce bounce;
    int heard; /* all ranks below this one have been heard, and call the same */
    dtrain__state state;
    bool done;
    dtrain_transport_work op;
};

/* Likewise of a communicator. */
struct dtrain__engine {
    const dtrain_transport_ops *transport;
    dtrain__engine *next;             /* in world->comms */
    bool failed;                      /* comm->report says why */
    dtrain__abort_record *report;     /* the first failure; who shares it fails together */
    uint64_t sequence;                /* of the collective started last */
    uint64_t agreed;                  /* of the collective agreed on last */
    dtrain__work *queue, **queue_end; /* not done, in the order of their start */
    dtrain__work *idle, *blocks;
    bool staged;           /* the host cannot read the device's memory: copies before and after */
    dtrain_stream *stream; /* of those copies */
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
