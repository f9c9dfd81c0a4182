/* The flight record of a rank: see comm/flight.c. */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"

#define DTRAIN__FLIGHT_PATH 1024    /* bytes of a directory's name, its 0 included */
#define DTRAIN__FLIGHT_RECORDS 256u /* of the newest collectives */
#define DTRAIN__FLIGHT_LANDED 8u    /* done since the last look at the clock */

typedef enum dtrain__flight_state {
    DTRAIN__FLIGHT_QUEUED = 0,  /* the rank has called it */
    DTRAIN__FLIGHT_STARTED = 1, /* the other ranks can see that */
    DTRAIN__FLIGHT_DONE = 2,
    DTRAIN__FLIGHT_FAILED = 3 /* it was under way when something failed */
} dtrain__flight_state;

/* One collective or message. It holds no pointer but to literals: who asked may be gone. */
typedef struct dtrain__flight_record {
    uint64_t sequence; /* of its communicator, from 1; messages: 0 */
    uint64_t count;
    int64_t comm;        /* number of the communicator; -1: dtrain_world_all_gather */
    int32_t first, size; /* its first rank in the world: groups of one split share a number */
    uint32_t kind, dtype, op;
    int32_t root;
    uint64_t queued_ns, started_ns, ended_ns; /* 0: not yet */
    const char *part;                         /* who asked: "bucket", a literal, or NULL ... */
    int64_t number;                           /* ... its number ... */
    char name[31];                            /* ... and the name of its first parameter */
    uint8_t state;                            /* dtrain__flight_state */
} dtrain__flight_record;

typedef struct dtrain__flight {
    uint64_t count;  /* records made; number n, from 1, is at n % RECORDS */
    uint64_t now_ns; /* when this rank looked at the clock last */
    uint64_t landed[DTRAIN__FLIGHT_LANDED];
    uint32_t landed_count;
    uint32_t asked;               /* dumps that signals had asked for when it was looked at last */
    const char *part, *part_name; /* of the next collective */
    int64_t part_number;
    dtrain_result code; /* the first failure; DTRAIN_OK: none */
    char error[DTRAIN__ERROR_BYTES];
    char directory[DTRAIN__FLIGHT_PATH]; /* "": dumps are made for the host alone */
    dtrain__flight_record records[DTRAIN__FLIGHT_RECORDS];
} dtrain__flight;

/* comm/flight.c */
DTRAIN__PRIVATE dtrain_result dtrain__flight_create(dtrain_world *world, const char *directory);
DTRAIN__PRIVATE void dtrain__flight_destroy(dtrain_world *world);
DTRAIN__PRIVATE void dtrain__flight_beat(dtrain_world *world, uint64_t now);
DTRAIN__PRIVATE void dtrain__flight_gather(dtrain_world *world, size_t bytes);
DTRAIN__PRIVATE void dtrain__flight_gathered(dtrain_world *world, dtrain_result result);
DTRAIN__PRIVATE void dtrain__flight_fail(dtrain_world *world, dtrain_result code);
DTRAIN__PRIVATE void dtrain__flight_label(const dtrain_comm *comm, const char *part, int64_t number,
                                          const char *name);
DTRAIN__PRIVATE uint64_t dtrain__flight_latest(const dtrain_world *world);
DTRAIN__PRIVATE void dtrain__flight_begin(dtrain_comm *comm, const dtrain_collective *what);
DTRAIN__PRIVATE void dtrain__flight_started(const dtrain_world *world, uint64_t number);
DTRAIN__PRIVATE void dtrain__flight_done(dtrain_world *world, uint64_t number);
DTRAIN__PRIVATE void dtrain__flight_enter(dtrain_world *world, uint64_t now);
DTRAIN__PRIVATE void dtrain__flight_leave(dtrain_world *world, uint64_t now);
