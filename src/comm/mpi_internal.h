/* Internals of the MPI transport: mpi.c moves data, mpi_meet.c begins and ends MPI. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/backend.h"
#include "comm/engine_internal.h"

#ifdef DTRAIN_USE_MPI

#ifndef DTRAIN__MPI_CHUNK_BYTES
#define DTRAIN__MPI_CHUNK_BYTES ((size_t)256 << 10) /* most, of data that is added */
#endif
#ifndef DTRAIN__MPI_MESSAGE_BYTES
#define DTRAIN__MPI_MESSAGE_BYTES ((size_t)1 << 30) /* other data: MPI counts in ints */
#endif

typedef enum dtrain__mpi_tag {
    DTRAIN__TAG_RECORD = 0,
    DTRAIN__TAG_ROUND = 1,
    DTRAIN__TAG_MESSAGE = 2,
    DTRAIN__TAG_ABORT = 3, /* of a world that has no link */
    DTRAIN__MPI_TAGS = 4   /* a communicator */
} dtrain__mpi_tag;

/* The connection of a rank to MPI, one for all communicators. */
typedef struct dtrain__mpi_hub {
    MPI_Comm mpi;
    int ranks[DTRAIN_MAX_RANKS];  /* rank in mpi of each rank of the world: orders may differ */
    int64_t number_limit;         /* communicators that fit into MPI's range of tags */
    MPI_Request request;          /* of MPI_Comm_idup or MPI_Ibarrier, in flight */
    int code;                     /* returned by the last MPI call */
    bool failed;                  /* no MPI call is made any more */
    dtrain__abort_record *aborts; /* (2) the one that is sent, the one that is received */
    MPI_Request hearing;          /* of the latter; MPI_REQUEST_NULL: there is a link */
} dtrain__mpi_hub;

/* comm/mpi_meet.c */
DTRAIN__PRIVATE dtrain_result dtrain__mpi_meet(dtrain_world *world, dtrain__mpi_hub *hub);
DTRAIN__PRIVATE void dtrain__mpi_part(dtrain_world *world, dtrain__mpi_hub *hub);

#endif /* DTRAIN_USE_MPI */
