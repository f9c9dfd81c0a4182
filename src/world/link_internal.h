/* The link: how ranks that another launcher has started hear of each other
 *
 * Read in this order: the rendezvous (rendezvous.c) makes one TCP connection from each rank to
 * rank 0; the link (link.c) then carries frames over these connections for as long as the world
 * lives; page.c moves ranks of one host to a shared control page, after which the link is silent
 * and only notices that a rank has died.
 *
 * Everything on a connection is a frame: a header of 32 bytes in the byte order of the machine
 * (the hello refuses another one by its magic number) and at most 4096 bytes of data.
 *
 *     frame      from                  number          value          data
 *     HELLO      a rank                protocol        -              dtrain__hello
 *     WELCOME    rank 0, at once       keyed hash      -              -
 *     BEGIN      rank 0, all are here  -               -              -
 *     REFUSED    rank 0                -               dtrain_result  a sentence
 *     GATHER     any rank              sequence        -              its record of an all-gather
 *     EXIT       any rank              dtrain__end     exit status    its last error
 *     ABORT      any rank              -               dtrain_result  a sentence */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/environment_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

typedef enum dtrain__frame_kind {
    DTRAIN__FRAME_HELLO = 1,
    DTRAIN__FRAME_WELCOME = 2,
    DTRAIN__FRAME_BEGIN = 3,
    DTRAIN__FRAME_REFUSED = 4,
    DTRAIN__FRAME_GATHER = 5,
    DTRAIN__FRAME_EXIT = 6,
    DTRAIN__FRAME_ABORT = 7
} dtrain__frame_kind;

typedef struct dtrain__frame {
    uint32_t magic, kind;
    int32_t rank; /* the rank that the frame is about */
    int32_t value;
    uint64_t number;
    uint32_t bytes; /* of data that follow */
    uint32_t unused;
} dtrain__frame;

#define DTRAIN__FRAME_ROOM (sizeof(dtrain__frame) + DTRAIN_WORLD_ALL_GATHER_BYTES)

typedef struct dtrain__connection {
    int socket;         /* -1: closed */
    int rank;           /* of the other end; -1: pending, not known yet */
    int32_t pid;        /* on rank 0: what the rank's hello said */
    uint64_t opened_ns; /* while pending: when it was accepted */
    size_t sent;        /* bytes of link->out that this end has been sent */
    char name[96];      /* "10.0.0.7 port 4711", for messages */
    size_t in_bytes;
    char in[DTRAIN__FRAME_ROOM]; /* received and not yet a whole frame */
} dtrain__connection;

/* Rank 0 sends the same bytes to every rank, in the same order; so one buffer is enough, and each
 * connection only remembers how far it has been sent:
 *
 *     out:   | frame | frame | frame | frame |
 *              ^ ends[2].sent  ^ ends[1].sent ^ out_bytes */
typedef struct dtrain__link {
    int count;          /* connections: on rank 0 the world's size (the first is unused), else 1 */
    bool met;           /* the rendezvous is over: the other ranks know this one */
    bool shared;        /* the control page is shared memory: nothing is sent any more */
    uint64_t polled_ns; /* last poll from inside a wait */
    dtrain__connection *ends; /* (count) */
    struct pollfd *polls;     /* (count) */
    char *out;                /* (out_room) frames that not all ends have been sent */
    size_t out_bytes, out_room;
} dtrain__link;

/* world/link.c */
DTRAIN__PRIVATE dtrain_result dtrain__link_create(dtrain_world *world);
DTRAIN__PRIVATE void dtrain__link_destroy(dtrain_world *world);
DTRAIN__PRIVATE void dtrain__connection_close(dtrain__connection *end);
DTRAIN__PRIVATE void dtrain__frame_send(dtrain__connection *end, dtrain__frame_kind kind, int rank,
                                        int value, uint64_t number, const void *data, size_t bytes);
DTRAIN__PRIVATE bool dtrain__frame_receive(dtrain__connection *end);
DTRAIN__PRIVATE int dtrain__frame_get(const dtrain__connection *end, dtrain__frame *frame);
DTRAIN__PRIVATE void dtrain__frame_drop(dtrain__connection *end, const dtrain__frame *frame);
DTRAIN__PRIVATE void dtrain__frame_text(const dtrain__frame *frame, const char *data, char *text,
                                        size_t room);
DTRAIN__PRIVATE void dtrain__link_send(dtrain_world *world, dtrain__frame_kind kind, int rank,
                                       int value, uint64_t number, const void *data, size_t bytes);
DTRAIN__PRIVATE void dtrain__link_pump(dtrain_world *world, int nap_ms);
DTRAIN__PRIVATE void dtrain__link_poll(dtrain_world *world);
DTRAIN__PRIVATE bool dtrain__link_all_sent(const dtrain_world *world);
DTRAIN__PRIVATE bool dtrain__is_remote(const dtrain_world *world);
DTRAIN__PRIVATE void dtrain__world_leave(dtrain_world *world, uint32_t grace_ms);

/* world/rendezvous.c */
DTRAIN__PRIVATE dtrain_result dtrain__meet(dtrain_world *world, const dtrain__placement *place);

/* world/page.c */
DTRAIN__PRIVATE dtrain_result dtrain__world_join(dtrain_world *world,
                                                 const dtrain__placement *place,
                                                 size_t reserve_bytes);
