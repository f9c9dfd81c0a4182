/* What other files may use of world/ beside the public API. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/environment_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

typedef enum dtrain__frame_kind {
    DTRAIN__HELLO = 1, /* the first four belong to the rendezvous */
    DTRAIN__CHALLENGE = 2,
    DTRAIN__JOIN = 3,
    DTRAIN__BEGIN = 4,
    DTRAIN__REFUSED = 5, /* value: dtrain_result; a sentence */
    DTRAIN__POST = 6,    /* number: sequence; data */
    DTRAIN__FATE = 7,    /* number: dtrain__end; value: as in the fate; error */
    DTRAIN__REPORT = 8   /* value: dtrain_result; text */
} dtrain__frame_kind;

typedef struct dtrain__frame {
    uint32_t magic, kind;
    int32_t rank; /* whom it is about */
    int32_t value;
    uint64_t number;
    uint32_t bytes; /* that follow */
    uint32_t unused;
} dtrain__frame;

#define DTRAIN__FRAME_ROOM (sizeof(dtrain__frame) + DTRAIN_WORLD_ALL_GATHER_BYTES)

typedef struct dtrain__connection {
    int socket;          /* -1: closed */
    int rank;            /* of the other end; -1: not known yet */
    uint32_t stage;      /* of the rendezvous */
    uint64_t opened_ns;  /* when it was accepted */
    uint64_t nonce[2];   /* the other end's and ours */
    char name[96];       /* "10.0.0.7 port 4711", for messages */
    uint64_t *told;      /* (size) posts told */
    uint32_t *told_fate; /* (size) */
    bool told_report;
    size_t in_bytes, out_begin, out_end;
    char in[DTRAIN__FRAME_ROOM], out[DTRAIN__FRAME_ROOM];
} dtrain__connection;

typedef struct dtrain__link {
    int count;   /* connections: the world's size on rank 0 (the first one unused), 1 elsewhere */
    bool shared; /* the page is shared: nothing is told */
    uint64_t looked_ns;       /* at the sockets */
    uint64_t news;            /* changes of the page ... */
    uint64_t all_told;        /* ... up to which everything is told and sent */
    bool met;                 /* the rendezvous is over: the others know this rank */
    dtrain__connection *ends; /* (count) */
    struct pollfd *polls;     /* (count) */
    uint64_t *told;           /* (count, size) */
    uint32_t *told_fate;      /* (count, size) */
} dtrain__link;

/* world/link.c */
DTRAIN__PRIVATE void dtrain__close(dtrain__connection *end);
DTRAIN__PRIVATE void dtrain__link_destroy(dtrain_world *world);
DTRAIN__PRIVATE dtrain_result dtrain__link_create(dtrain_world *world);
DTRAIN__PRIVATE void dtrain__frame_put(dtrain__connection *end, dtrain__frame_kind kind, int rank,
                                       int value, uint64_t number, const void *data, size_t bytes);
DTRAIN__PRIVATE bool dtrain__flush(dtrain__connection *end);
DTRAIN__PRIVATE bool dtrain__receive(dtrain__connection *end);
DTRAIN__PRIVATE int dtrain__frame_get(const dtrain__connection *end, dtrain__frame *frame);
DTRAIN__PRIVATE void dtrain__frame_drop(dtrain__connection *end, const dtrain__frame *frame);
DTRAIN__PRIVATE void dtrain__frame_text(const dtrain__frame *frame, const char *data, char *text,
                                        size_t room);
DTRAIN__PRIVATE void dtrain__link_news(dtrain_world *world);
DTRAIN__PRIVATE void dtrain__link_pump(dtrain_world *world, int nap_ms);
DTRAIN__PRIVATE void dtrain__link_look(dtrain_world *world);
DTRAIN__PRIVATE bool dtrain__link_all_told(const dtrain_world *world);
DTRAIN__PRIVATE bool dtrain__is_remote(const dtrain_world *world);

/* world/rendezvous.c */
DTRAIN__PRIVATE dtrain_result dtrain__meet(dtrain_world *world, const dtrain__placement *place);

/* world/page.c */
DTRAIN__PRIVATE dtrain_result dtrain__world_join(dtrain_world *world,
                                                 const dtrain__placement *place,
                                                 size_t reserve_bytes);
DTRAIN__PRIVATE void dtrain__world_leave(dtrain_world *world, uint32_t grace_ms);
