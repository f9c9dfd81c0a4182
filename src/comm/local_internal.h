/* What other files may use of comm/ beside the public API. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"

#define DTRAIN__WINDOW 32u /* W: collectives of one rank under way at once */
#define DTRAIN__SLOTS (2 * DTRAIN__WINDOW)
#define DTRAIN__SMALL_BYTES 4096u                     /* data that travels inside a slot ... */
#define DTRAIN__SMALL_TOTAL (8 * DTRAIN__SMALL_BYTES) /* ... and what one rank reads of all slots */

#define DTRAIN__CELL_BYTES ((size_t)32 << 10)
#define DTRAIN__CELLS 4u
#define DTRAIN__STAGE_BITS 24 /* progress = sequence << 24 | stage */

/* Written by its rank only; 65 cache lines, so that slots spread over the sets of a cache. */
typedef struct dtrain__slot {
    uint64_t progress; /* atomic; only grows */
    uint64_t count;
    const char *send;
    char *recv;
    uint32_t kind, dtype, op;
    int32_t root;
    uint32_t direct; /* the other ranks can reach these buffers */
    uint32_t unused;
    uint64_t started_ns; /* when this rank started it; emulation only */
    char payload[DTRAIN__SMALL_BYTES];
} dtrain__slot;

/* Messages of one ordered pair of ranks, cut in cells. head - tail cells are filled. */
typedef struct dtrain__cell {
    uint64_t count;      /* of the whole message */
    uint64_t started_ns; /* when it was sent; emulation only */
    uint32_t dtype;
    uint32_t unused[11];
    char data[DTRAIN__CELL_BYTES];
} dtrain__cell;

typedef struct dtrain__channel {
    uint64_t head; /* atomic, the sender's */
    uint64_t head_line[7];
    uint64_t tail; /* atomic, the receiver's */
    uint64_t tail_line[7];
    dtrain__cell cells[DTRAIN__CELLS];
} dtrain__channel;

/* What one rank shows the others; all zero is the valid beginning. */
struct dtrain__part {
    uint32_t failure;     /* atomic, of the first part only: 0 none, 1 being written, 2 stands */
    int32_t failure_code; /* dtrain_result, as the rank that found it returns it */
    int32_t failure_rank;
    uint32_t departed;  /* atomic: ranks that have destroyed the communicator ... */
    uint32_t size;      /* ... out of so many */
    char *stage;        /* 2 chunks, made when first needed */
    dtrain__part *next; /* among this rank's retired parts */
    char failure_text[480];
    dtrain__channel *channels[DTRAIN_MAX_RANKS]; /* atomic; to each rank, made by the first send */
    dtrain__slot slots[DTRAIN__SLOTS];
};

typedef struct dtrain__local_work {
    dtrain_work base;
    struct dtrain__local_work *next; /* in the queue, or among the idle */
    dtrain_collective what;
    uint64_t sequence;     /* collectives: from 1, the same on all ranks; messages: 0 */
    uint32_t stage, final; /* reached; 0 = not shown to the others yet. final 0 = path not chosen */
    int seen;              /* ranks below it have reached `stage` */
    bool done;
    bool sent;                   /* a long message to another node: all of it is in the channel */
    size_t moved;                /* messages: bytes */
    uint64_t started_ns, due_ns; /* emulation only; due 0: nothing crosses nodes, or not booked */
} dtrain__local_work;

typedef struct dtrain__work_block {
    struct dtrain__work_block *next;
    dtrain__local_work works[DTRAIN__WINDOW];
} dtrain__work_block;

typedef struct dtrain__local_comm {
    dtrain_comm base;
    struct dtrain__local_comm *next; /* in the world's list */
    dtrain__part **parts;            /* (size) */
    bool failed;
    uint64_t sequence;                      /* of the collective started last */
    uint64_t agreed;                        /* of the one whose path was chosen last */
    dtrain__local_work *queue, **queue_end; /* not done, in the order of their start */
    dtrain__local_work *idle;
    dtrain__work_block *blocks; /* one is enough unless very many handles are kept open */
} dtrain__local_comm;

enum { DTRAIN__LANE_OUT = 0, DTRAIN__LANE_IN = 1 };

/* comm/local_collectives.c */
DTRAIN__PRIVATE dtrain__slot *dtrain__slot_of(const dtrain__local_comm *comm, int rank,
                                              uint64_t sequence);
DTRAIN__PRIVATE dtrain_result dtrain__local_standing(dtrain__local_comm *comm);
DTRAIN__PRIVATE dtrain_result dtrain__local_fail(dtrain_comm *base, dtrain_result code,
                                                 const char *text);
DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE dtrain_result dtrain__local_failf(dtrain__local_comm *comm, dtrain_result code,
                                                  const char *format, ...);
DTRAIN__PRIVATE dtrain_result dtrain__compare(dtrain__local_comm *comm,
                                              const dtrain__local_work *work, int rank);
DTRAIN__PRIVATE bool dtrain__reached(const dtrain__local_comm *comm, const dtrain__local_work *work,
                                     int rank);
DTRAIN__PRIVATE bool dtrain__all_reached(const dtrain__local_comm *comm, dtrain__local_work *work);
DTRAIN__PRIVATE void dtrain__reach(const dtrain__local_comm *comm, dtrain__local_work *work,
                                   uint32_t stage);
DTRAIN__PRIVATE bool dtrain__is_small(const dtrain_collective *what, int size);
DTRAIN__PRIVATE void dtrain__show(dtrain__local_comm *comm, dtrain__local_work *work);
DTRAIN__PRIVATE void dtrain__small_path(const dtrain__local_comm *comm,
                                        const dtrain__local_work *work);
DTRAIN__PRIVATE void dtrain__slice(size_t count, size_t unit, int size, int rank, size_t *first,
                                   size_t *length);
DTRAIN__PRIVATE void dtrain__direct_path(const dtrain__local_comm *comm,
                                         const dtrain__local_work *work);
DTRAIN__PRIVATE size_t dtrain__chunk_count(const dtrain__local_comm *comm,
                                           const dtrain_collective *what);
DTRAIN__PRIVATE dtrain_result dtrain__stage_in(dtrain__local_comm *comm,
                                               const dtrain_collective *what, size_t c);
DTRAIN__PRIVATE void dtrain__stage_out(dtrain__local_comm *comm, const dtrain_collective *what,
                                       size_t c);

/* comm/links.c */
DTRAIN__PRIVATE int dtrain__emulated_node(const dtrain__local_comm *comm, int rank);
DTRAIN__PRIVATE uint64_t dtrain__book_lane(const dtrain_world *world, int node, int lane,
                                           uint64_t start, double bytes);
DTRAIN__PRIVATE uint64_t dtrain__emulated_latency(const dtrain_world *world, uint32_t rounds);
DTRAIN__PRIVATE void dtrain__book_collective(const dtrain__local_comm *comm,
                                             dtrain__local_work *work);
DTRAIN__PRIVATE bool dtrain__collective_due(const dtrain__local_comm *comm,
                                            dtrain__local_work *work);
DTRAIN__PRIVATE dtrain_result dtrain__emulated_turn(dtrain_world *world, dtrain__wait *wait);

/* comm/local.c */
DTRAIN__PRIVATE void dtrain__name_work(const dtrain_collective *what, uint64_t sequence, char *text,
                                       size_t room);
DTRAIN__PRIVATE void dtrain__local_end(dtrain_world *world);
DTRAIN__PRIVATE dtrain_result dtrain__local_world_comm(dtrain_world *world, dtrain_comm **out);
DTRAIN__PRIVATE int dtrain__split_members(int64_t (*all)[2], int size, int mine, int *members);
DTRAIN__PRIVATE const dtrain_comm_ops *dtrain__local_comm_ops(void);
