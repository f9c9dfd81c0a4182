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

enum { DTRAIN__MPI_TAGS = 3 }; /* a communicator: records, rounds, messages */

/* A thread that calls MPI_Init_thread and, at the end, MPI_Finalize. Both wait for all ranks
 * without a deadline, which the rank's own thread must not; MPI wants the same thread for both. */
typedef struct dtrain__mpi_thread {
    pthread_t id;
    pthread_mutex_t gate; /* held by the rank until MPI is to be finalized */
    uint32_t returned;    /* atomic: calls that have returned */
    bool finalize;
    int code, provided;
} dtrain__mpi_thread;

/* The connection of a rank to MPI, one for all communicators. */
typedef struct dtrain__mpi_hub {
    MPI_Comm mpi;
    int ranks[DTRAIN_MAX_RANKS]; /* rank in mpi of each rank of the world: orders may differ */
    int64_t number_limit;        /* communicators that fit into MPI's range of tags */
    dtrain__mpi_thread *thread;  /* NULL: the program has called MPI_Init */
    MPI_Request request;         /* of MPI_Comm_idup or MPI_Ibarrier, in flight */
    int code;                    /* returned by the last MPI call */
    bool quiet_pipes;            /* this file has set SIGPIPE to be ignored */
    bool failed;                 /* no MPI call is made any more */
} dtrain__mpi_hub;

/* comm/mpi_meet.c */
DTRAIN__PRIVATE dtrain_result dtrain__mpi_meet(dtrain_world *world, dtrain__mpi_hub *hub);
DTRAIN__PRIVATE void dtrain__mpi_part(dtrain_world *world, dtrain__mpi_hub *hub);

#endif /* DTRAIN_USE_MPI */
