/* What the files of the MPI transport share: mpi.c moves data, mpi_meet.c begins and ends. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/backend.h"
#include "comm/engine_internal.h"

#ifdef DTRAIN_USE_MPI

enum { DTRAIN__MPI_TAGS = 3 }; /* of a communicator: records, parts and results, messages */

/* One a rank. */
typedef struct dtrain__mpi_hub {
    MPI_Comm mpi;
    int ranks[DTRAIN_MAX_RANKS]; /* of mpi, by rank in the world: orders may differ */
    int64_t number_limit;        /* of communicators: MPI has no tags for more */
    bool ours;                   /* MPI_Init was called here */
    bool quiet_pipes;            /* SIGPIPE is ignored, and was not */
    bool failed;                 /* MPI is not called any more */
} dtrain__mpi_hub;

/* comm/mpi_meet.c */
DTRAIN__PRIVATE dtrain_result dtrain__mpi_meet(dtrain_world *world, dtrain__mpi_hub *hub);
DTRAIN__PRIVATE void dtrain__mpi_part(dtrain_world *world, dtrain__mpi_hub *hub);

#endif /* DTRAIN_USE_MPI */
