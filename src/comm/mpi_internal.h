/* What the files of the MPI transport share: mpi.c moves data, mpi_meet.c begins and ends. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/backend.h"
#include "comm/engine_internal.h"

#ifdef DTRAIN_USE_MPI

#ifndef DTRAIN__MPI_CHUNK_BYTES
#define DTRAIN__MPI_CHUNK_BYTES ((size_t)256 << 10) /* of what is added or passed on */
#endif
#ifndef DTRAIN__MPI_MESSAGE_BYTES
#define DTRAIN__MPI_MESSAGE_BYTES ((size_t)1 << 30) /* of what is not: MPI counts in ints */
#endif

enum { DTRAIN__MPI_TAGS = 3 }; /* of a communicator: records, parts and results, messages */

/* A thread that calls MPI_Init_thread and, in the end, MPI_Finalize: they wait for all ranks and
 * have no deadline, and MPI wants the same thread for both. */
typedef struct dtrain__mpi_thread {
    pthread_t id;
    pthread_mutex_t gate; /* the rank holds it until the end */
    uint32_t returned;    /* atomic: calls that have returned */
    bool finalize;
    int code, provided;
} dtrain__mpi_thread;

/* One a rank. */
typedef struct dtrain__mpi_hub {
    MPI_Comm mpi;
    int ranks[DTRAIN_MAX_RANKS]; /* of mpi, by rank in the world: orders may differ */
    int64_t number_limit;        /* of communicators: MPI has no tags for more */
    dtrain__mpi_thread *thread;  /* NULL: the program has called MPI_Init */
    MPI_Request request;         /* of MPI_Comm_idup, MPI_Ibarrier */
    int code;                    /* of the last call */
    bool quiet_pipes;            /* SIGPIPE is ignored, and was not */
    bool failed;                 /* MPI is not called any more */
} dtrain__mpi_hub;

/* comm/mpi_meet.c */
DTRAIN__PRIVATE dtrain_result dtrain__mpi_meet(dtrain_world *world, dtrain__mpi_hub *hub);
DTRAIN__PRIVATE void dtrain__mpi_part(dtrain_world *world, dtrain__mpi_hub *hub);

#endif /* DTRAIN_USE_MPI */
