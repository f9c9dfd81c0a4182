/* Internals of the MPI transport: mpi.c moves data, mpi_meet.c begins and ends MPI. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/backend.h"
#include "comm/engine_internal.h"

#ifdef DTRAIN_USE_MPI

#ifndef DTRAIN__MPI_CHUNK_BYTES
#define DTRAIN__MPI_CHUNK_BYTES ((size_t)256 << 10) /* most bytes of a chunk that is added */
#endif
#ifndef DTRAIN__MPI_MESSAGE_BYTES
#define DTRAIN__MPI_MESSAGE_BYTES \
    ((size_t)1 << 30) /* most bytes of other data: MPI counts in ints */
#endif

typedef enum dtrain__mpi_tag {
    DTRAIN__TAG_RECORD = 0,
    DTRAIN__TAG_ROUND = 1,
    DTRAIN__TAG_MESSAGE = 2,
    DTRAIN__TAG_ABORT = 3, /* in a world without a link */
    DTRAIN__MPI_TAGS = 4   /* per communicator */
} dtrain__mpi_tag;

/* The connection of a rank to MPI, one for all communicators. */
typedef struct dtrain__mpi_hub {
    MPI_Comm mpi;
    int ranks[DTRAIN_MAX_RANKS];  /* rank in mpi of each rank of the world: orders can differ */
    int64_t number_limit;         /* number of communicators that fit into MPI's range of tags */
    MPI_Request request;          /* of MPI_Comm_idup or MPI_Ibarrier, in flight */
    int code;                     /* result of the last MPI call */
    bool failed;                  /* true after a failure: no more MPI calls */
    dtrain__abort_record *aborts; /* (2) abort to send; received abort */
    MPI_Request hearing;          /* receive of an abort; MPI_REQUEST_NULL if there is a link */
} dtrain__mpi_hub;

/* comm/mpi_meet.c */
DTRAIN__PRIVATE dtrain_result dtrain__mpi_meet(dtrain_world *world, dtrain__mpi_hub *hub);
DTRAIN__PRIVATE void dtrain__mpi_part(dtrain_world *world, dtrain__mpi_hub *hub);

#endif /* DTRAIN_USE_MPI */
