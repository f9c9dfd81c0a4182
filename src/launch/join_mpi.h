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

/* Join with the ranks of an MPI communicator, which can be any part of MPI_COMM_WORLD; desc: what
 * else is wanted, or NULL. MPI has been initialised, at any thread level, which is kept to: below
 * MPI_THREAD_SERIALIZED the main thread makes all calls of the world. On several hosts data travels
 * over a duplicate of `comm`, which leaving frees. A host that is to survive the end of another
 * rank ignores SIGPIPE: MPI writes to sockets. The host's mpicc compiles this, so a libdtrain.so
 * knows no MPI; it then serves members of one host. Fortran hands in MPI_Comm_f2c(handle). */
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
