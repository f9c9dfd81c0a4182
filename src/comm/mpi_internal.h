/* What other files may use of comm/ beside the public API. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/local_internal.h"

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
    uint32_t magic, kind, dtype, op;
    int32_t root;
    uint32_t unused[3];
    uint64_t count, sequence;
    uint64_t reserved[2];
} dtrain__mpi_record; /* 64 bytes; data follows */

/* Chunks in one direction between two ranks. */
typedef struct dtrain__mpi_lane {
    size_t chunks, posted, done;
    uint32_t landed; /* bit c % depth: chunk c >= done is there */
} dtrain__mpi_lane;

typedef enum dtrain__mpi_stage {
    DTRAIN__MPI_QUEUED = 0,
    DTRAIN__MPI_MEETING = 1, /* records or the head are under way */
    DTRAIN__MPI_MOVING = 2
} dtrain__mpi_stage;

typedef struct dtrain__mpi_work {
    dtrain_work base;
    struct dtrain__mpi_work *next; /* in the queue, or among the idle */
    dtrain_collective what;
    uint64_t sequence; /* collectives: from 1, the same on all ranks; messages: 0 */
    uint32_t stage;
    bool done, complete;   /* complete: only records of this rank are still on their way out */
    int heard, unsent;     /* records */
    dtrain__mpi_lane lane; /* messages */
    char *record;          /* messages: head and small data */
} dtrain__mpi_work;

typedef struct dtrain__mpi_block {
    struct dtrain__mpi_block *next;
    dtrain__mpi_work works[DTRAIN__WINDOW];
} dtrain__mpi_block;

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
    dtrain_comm base;
    struct dtrain__mpi_hub *hub;
    struct dtrain__mpi_comm *next; /* newest first */
    int tag;                       /* its first */
    uint64_t sequence;             /* of the collective started last */
    dtrain__mpi_work *queue, **queue_end, *idle;
    dtrain__mpi_block *blocks;
    bool stirred;          /* something was started since the last look */
    int active, room;      /* requests */
    MPI_Request *requests; /* these four (room), the first two (active) */
    dtrain__mpi_token *tokens;
    MPI_Status *statuses;
    int *indices;
    size_t record_bytes, chunk_bytes;
    char *records;           /* (2, window, size, record_bytes): out, in */
    uint8_t *heard;          /* (window, size) */
    uint64_t *last;          /* (size) sequence of the last record that came */
    char *temporary;         /* (depth, size + 1, chunk_bytes), made when first needed */
    dtrain__mpi_lane *lanes; /* (lanes, size), of the oldest collective */
    size_t combined;         /* its chunks of this rank's slice that are added up */
} dtrain__mpi_comm;

/* One a rank. */
typedef struct dtrain__mpi_hub {
    dtrain_world *world;
    MPI_Comm mpi;
    int ranks[DTRAIN_MAX_RANKS];     /* of mpi, by rank in the world: orders may differ */
    int64_t next_range, range_limit; /* of tags */
    bool ours;                       /* MPI_Init was called here */
    bool quiet_pipes;                /* SIGPIPE is ignored, and was not */
    bool failed;
    dtrain_result code;
    char text[560];
    dtrain__mpi_comm *comms;
    dtrain__mpi_memory *memory;
} dtrain__mpi_hub;

/* comm/mpi_requests.c */
DTRAIN__PRIVATE dtrain_result dtrain__mpi_standing(const dtrain__mpi_hub *hub);
DTRAIN__PRIVATE dtrain_result dtrain__mpi_fail(dtrain_comm *base, dtrain_result code,
                                               const char *text);
DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE dtrain_result dtrain__mpi_failf(dtrain__mpi_comm *comm, dtrain_result code,
                                                const char *format, ...);
DTRAIN__PRIVATE dtrain_result dtrain__mpi_map(dtrain__mpi_hub *hub, size_t asked, void **out);
DTRAIN__PRIVATE void dtrain__mpi_unmap(dtrain__mpi_hub *hub, const void *at);
DTRAIN__PRIVATE dtrain_result dtrain__mpi_alloc(dtrain_comm *comm, size_t bytes, void **out);
DTRAIN__PRIVATE void dtrain__mpi_free(dtrain_comm *comm, void *memory, size_t bytes);
DTRAIN__PRIVATE void dtrain__mpi_post(dtrain__mpi_comm *comm, dtrain__mpi_work *work, uint32_t use,
                                      int rank, size_t chunk, bool sends, void *at, size_t bytes);
DTRAIN__PRIVATE bool dtrain__mpi_poll(dtrain__mpi_comm *comm);
DTRAIN__PRIVATE void dtrain__mpi_write(char *at, const dtrain_collective *what, uint64_t sequence,
                                       const void *data, size_t bytes);
DTRAIN__PRIVATE void dtrain__mpi_show(dtrain__mpi_comm *comm, dtrain__mpi_work *work);
DTRAIN__PRIVATE dtrain_result dtrain__mpi_compare(dtrain__mpi_comm *comm,
                                                  const dtrain__mpi_work *work, int first,
                                                  int second);
DTRAIN__PRIVATE bool dtrain__mpi_agree(dtrain__mpi_comm *comm, const dtrain__mpi_work *work);
DTRAIN__PRIVATE void dtrain__mpi_small_path(const dtrain__mpi_comm *comm,
                                            const dtrain__mpi_work *work);

/* comm/mpi_move.c */
DTRAIN__PRIVATE dtrain__mpi_lane *dtrain__mpi_lane_of(const dtrain__mpi_comm *comm, uint32_t use,
                                                      int peer);
DTRAIN__PRIVATE bool dtrain__mpi_collective_move(dtrain__mpi_comm *comm, dtrain__mpi_work *work,
                                                 uint64_t oldest);
DTRAIN__PRIVATE bool dtrain__mpi_message_move(dtrain__mpi_comm *comm, dtrain__mpi_work *work);

/* comm/mpi.c */
DTRAIN__PRIVATE void dtrain__mpi_linger(const dtrain_comm *base);

#endif /* DTRAIN_USE_MPI */
