/* Joining with the ranks of an MPI communicator, compiled by the host's mpicc. */

#pragma once

#include "core/result.h"
#include "launch/join.h"
#include "sizes.h"

#ifdef DTRAIN_USE_MPI
#include <string.h>

static inline int dtrain_mpi_gather(void *user, const void *mine, void *all, size_t bytes)
{
    return MPI_Allgather((void *)(uintptr_t)mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE,
                         *(MPI_Comm *)user);
}

/* Join with the ranks of an MPI communicator, which can be any part of MPI_COMM_WORLD. desc has
 * further settings, or is NULL. MPI must be initialised, at any thread level; below
 * MPI_THREAD_SERIALIZED only the main thread can use the world. On several hosts data travels over
 * a duplicate of `comm`, which dtrain_world_leave frees. A host must ignore SIGPIPE to survive the
 * end of another rank, because MPI writes to sockets. The host's mpicc compiles this function: a
 * libdtrain.so has no MPI and serves one host only. Fortran passes MPI_Comm_f2c(handle). */
static inline dtrain_result dtrain_world_join_mpi(MPI_Comm comm, const dtrain_join_desc *desc,
                                                  dtrain_world **out)
{
    dtrain_join_desc own;
    int level = MPI_THREAD_SINGLE, is_main = 1;
    if (desc) own = *desc;
    else memset(&own, 0, sizeof own);
    MPI_Query_thread(&level);
    MPI_Is_thread_main(&is_main);
    if (level < MPI_THREAD_SERIALIZED && !is_main)
        return dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "dtrain_world_join_mpi: MPI was initialised for calls of the main thread "
            "only, and this is another one; ask for MPI_THREAD_SERIALIZED");
    MPI_Comm_rank(comm, &own.rank);
    MPI_Comm_size(comm, &own.size);
    own.all_gather = dtrain_mpi_gather;
    if (!own.abi) own.abi = &dtrain_header_abi;
    own.user = &comm;
    if (!own.comm_ops) own.comm_given = &comm;
    return dtrain_world_join(&own, out);
}

#endif /* DTRAIN_USE_MPI */
