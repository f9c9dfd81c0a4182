/* What the files of the MPI transport share
 *
 * mpi.c carries records and requests, mpi_move.c
 * large operations and messages, mpi_meet.c begins and ends. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/engine_internal.h"

#ifdef DTRAIN_USE_MPI

#ifndef DTRAIN__MPI_CHUNK_BYTES
#define DTRAIN__MPI_CHUNK_BYTES ((size_t)256 << 10) /* of what is added or passed on */
#endif
#ifndef DTRAIN__MPI_MESSAGE_BYTES
#define DTRAIN__MPI_MESSAGE_BYTES ((size_t)1 << 30) /* of what is not: MPI counts in ints */
#endif
#define DTRAIN__MPI_TEMPORARY ((size_t)4 << 20) /* bytes, about; more with very many ranks */
#define DTRAIN__MPI_DEPTH 2u
#define DTRAIN__MPI_MAGIC 0x4d505244u

typedef enum dtrain__mpi_use {
    DTRAIN__PART_OUT = 0, /* the first four are lanes */
    DTRAIN__PART_IN = 1,
    DTRAIN__RESULT_OUT = 2,
    DTRAIN__RESULT_IN = 3,
    DTRAIN__RECORD_OUT = 4,
    DTRAIN__RECORD_IN = 5,
    DTRAIN__HEAD = 6, /* of a message */
    DTRAIN__BODY = 7
} dtrain__mpi_use;

enum { DTRAIN__MPI_LANES = 4, DTRAIN__MPI_TAGS = 5 };

typedef struct dtrain__mpi_record {
    uint32_t magic, unused;
    uint64_t sequence;
    dtrain__shown shown;
    uint64_t reserved[2];
} dtrain__mpi_record; /* 64 bytes; data follows */

/* Chunks in one direction between two ranks. */
typedef struct dtrain__mpi_lane {
    size_t chunks, posted, done;
    uint32_t landed; /* bit c % depth: chunk c >= done is there */
} dtrain__mpi_lane;

typedef struct dtrain__mpi_work {
    dtrain__work base;
    int unsent;            /* records of this rank that are still on their way out */
    bool open, complete;   /* large collectives: the lanes are its own; have reached their ends */
    bool begun, headed;    /* messages: the head is under way; has come ... */
    bool compared;         /* ... and agrees with what the receiver asked for */
    dtrain__mpi_lane lane; /* messages */
} dtrain__mpi_work;

/* What a request is for. */
typedef struct dtrain__mpi_token {
    dtrain__mpi_work *work;
    uint32_t use;
    int rank;
    size_t chunk;
} dtrain__mpi_token;

typedef struct dtrain__mpi_memory {
    struct dtrain__mpi_memory *next;
    void *at;
    size_t bytes; /* whole pages */
} dtrain__mpi_memory;

typedef struct dtrain__mpi_comm {
    dtrain__engine base;
    struct dtrain__mpi_hub *hub;
    int active, room;      /* requests */
    MPI_Request *requests; /* these four (room), the first two (active) */
    dtrain__mpi_token *tokens;
    MPI_Status *statuses;
    int *indices;
    size_t record_bytes, chunk_bytes;
    char *records;           /* (2, window + 1, size, record_bytes): out, in; last: of messages */
    uint64_t *heard;         /* (window, size) sequence of the record that came last */
    char *temporary;         /* (depth, size + 1, chunk_bytes), made when first needed */
    dtrain__mpi_lane *lanes; /* (lanes, size), of the oldest collective */
    size_t combined;         /* its chunks of this rank's slice that are added up */
} dtrain__mpi_comm;

/* One a rank. */
typedef struct dtrain__mpi_hub {
    dtrain_world *world;
    MPI_Comm mpi;
    int ranks[DTRAIN_MAX_RANKS]; /* of mpi, by rank in the world: orders may differ */
    int64_t range_limit;         /* of tags */
    bool ours;                   /* MPI_Init was called here */
    bool quiet_pipes;            /* SIGPIPE is ignored, and was not */
    bool failed;                 /* MPI is not called any more */
    dtrain__mpi_memory *memory;
} dtrain__mpi_hub;

/* comm/mpi.c */
DTRAIN__PRIVATE dtrain_result dtrain__mpi_map(dtrain__mpi_hub *hub, size_t asked, void **out);
DTRAIN__PRIVATE void dtrain__mpi_unmap(dtrain__mpi_hub *hub, const void *at);
DTRAIN__PRIVATE void dtrain__mpi_post(dtrain__mpi_comm *comm, dtrain__mpi_work *work, uint32_t use,
                                      int rank, size_t chunk, bool sends, void *at, size_t bytes);
DTRAIN__PRIVATE char *dtrain__mpi_slot(const dtrain__mpi_comm *comm, bool in, uint64_t slot,
                                       int rank);
DTRAIN__PRIVATE void dtrain__mpi_write(char *at, const dtrain__work *work, const void *data,
                                       size_t bytes);
DTRAIN__PRIVATE const dtrain__transport *dtrain__mpi_transport(void);

/* comm/mpi_move.c */
DTRAIN__PRIVATE bool dtrain__mpi_move(dtrain__engine *comm, dtrain__work *work, bool oldest);
DTRAIN__PRIVATE bool dtrain__mpi_message(dtrain__engine *comm, dtrain__work *work);
DTRAIN__PRIVATE bool dtrain__mpi_lags(const dtrain__engine *comm, const dtrain__work *work,
                                      int rank);

/* comm/mpi_meet.c */
DTRAIN__PRIVATE void dtrain__mpi_linger(const dtrain_comm *base);

#endif /* DTRAIN_USE_MPI */
