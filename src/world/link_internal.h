/* The link: TCP connections between ranks that another launcher has started
 *
 * Read in this order: the rendezvous (rendezvous.c) makes one TCP connection from each rank to
 * rank 0. The link (link.c) carries frames over these connections until the world ends. page.c
 * moves the ranks of one host to a shared control page; then the link sends nothing more, and only
 * notices that a rank has died.
 *
 * A frame is a header, in the byte order of the machine, and data:
 *
 *     frame      data
 *     GATHER     the rank's next record of dtrain_world_all_gather, at most 4096 bytes
 *     EXIT       the rank's dtrain__exit_record
 *     ABORT      the rank's dtrain__abort_record
 *     WAIT       the rank that this rank has been waiting for: int32 */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"

/* The rank that this process is, or the ranks that it starts, according to the environment. */
typedef struct dtrain__placement {
    const char *family;         /* NULL: no launcher, or a launcher of a single rank */
    int rank, size;             /* if forks > 0, rank is the node's first */
    int local_rank, local_size; /* -1, 0: unknown */
    int forks;                  /* ranks that this process starts; 0: it is a rank itself */
    char address[256];          /* rank 0's host; "" if this process forks all ranks */
    uint32_t port;              /* where rank 0 listens */
    uint32_t restart_count;     /* restarts so far by the launcher around this process */
    uint64_t key[2];            /* the key of this run, see world/rendezvous.c */
    bool named;                 /* true if DTRAIN_JOB_KEY or the launcher names this run */
    uint64_t job;               /* desc.job if not named: distinguishes jobs at one port */
    bool complete;              /* true if a launcher gave a rank and a size, even a size of one */
} dtrain__placement;

typedef enum dtrain__frame_kind {
    DTRAIN__FRAME_GATHER = 1,
    DTRAIN__FRAME_EXIT = 2,
    DTRAIN__FRAME_ABORT = 3,
    DTRAIN__FRAME_WAIT = 4
} dtrain__frame_kind;

typedef struct dtrain__frame {
    uint32_t kind, bytes; /* bytes: size of the data that follow */
    int32_t rank;         /* subject of the frame */
} dtrain__frame;

#define DTRAIN__FRAME_ROOM (sizeof(dtrain__frame) + DTRAIN_WORLD_ALL_GATHER_BYTES)

typedef struct dtrain__connection {
    int socket;         /* -1: closed */
    char name[96];      /* of the other end, for messages */
    size_t sent;        /* bytes of link->out that this end has been sent */
    uint64_t unread_ns; /* time since which reads have failed for lack of memory; 0: they work */
    size_t in_bytes;
    char in[DTRAIN__FRAME_ROOM]; /* an incomplete frame */
} dtrain__connection;

/* Rank 0 sends the same bytes to every rank in the same order. So one buffer is enough, and each
 * connection only needs the number of bytes sent:
 *
 *     out:   | frame | frame | frame | frame |
 *              ^ ends[2].sent  ^ ends[1].sent ^ out_bytes */
typedef struct dtrain__link {
    bool shared;        /* true if the control page is shared memory: the link sends nothing */
    uint64_t polled_ns; /* time of the last poll in a wait */
    uint64_t wait_ns;   /* time of the next WAIT frame; 0: this rank does not wait */
    int count;          /* connections: on rank 0 the world's size, else 1 */
    dtrain__connection *ends; /* (count) connection to rank i; closed if i is this rank */
    char *out;                /* (count, 3 frames) frames to send */
    size_t out_bytes;
    size_t bytes; /* size of this allocation */
} dtrain__link;

/* Return false while the buffer is so full that frames of waits are dropped. */
static inline bool dtrain__link_takes_waits(const dtrain__link *link)
{
    return link->out_bytes < (size_t)link->count << 10;
}

/* world/link.c */
DTRAIN__PRIVATE dtrain_result dtrain__link_create(dtrain_world *world);
DTRAIN__PRIVATE void dtrain__link_destroy(dtrain_world *world);
DTRAIN__PRIVATE void dtrain__socket_close(int *socket);
DTRAIN__PRIVATE bool dtrain__try_again(int error);
DTRAIN__PRIVATE void dtrain__link_send(dtrain_world *world, dtrain__frame_kind kind, int rank,
                                       const void *data, size_t bytes);
DTRAIN__PRIVATE void dtrain__link_pump(dtrain_world *world, int nap_ms);
DTRAIN__PRIVATE void dtrain__link_poll(dtrain_world *world);
DTRAIN__PRIVATE int dtrain__link_unsent(const dtrain_world *world);
DTRAIN__PRIVATE bool dtrain__is_remote(const dtrain_world *world);
DTRAIN__PRIVATE dtrain_result dtrain__clocks_compare(dtrain_world *world);

/* world/rendezvous.c */
DTRAIN__PRIVATE uint64_t dtrain__shared_sizes(void);
DTRAIN__PRIVATE dtrain_result dtrain__meet(dtrain_world *world, const dtrain__placement *place);

/* world/page.c */
DTRAIN__PRIVATE dtrain_result dtrain__find_page(dtrain_world *world, const dtrain__placement *place,
                                                size_t reserve_bytes);
DTRAIN__PRIVATE void dtrain__page_release(dtrain_world *world);
