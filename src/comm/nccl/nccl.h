/* The public calls of the NCCL communicator */

#pragma once

#include "dtrain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Give the table for dtrain_launch_desc.comm_ops. It is static. A program that has a tensor axis
 * sets NCCL_LAUNCH_ORDER_IMPLICIT=1 in its environment before the launch: see Streams above. */
DTRAIN_API const dtrain_comm_ops *dtrain_nccl_comm_ops(void);

/* Versions as NCCL counts them: 2.28.9 is 22809. */
typedef struct dtrain_nccl_info {
    uint32_t header_version, library_version;
    bool native_split;      /* ncclCommSplit; else ids travel over the parent */
    bool registered_memory; /* dtrain_comm_alloc gives ncclMemAlloc memory, registered */
} dtrain_nccl_info;

/* Open the library and ask for its version. Fails with a sentence when it is missing, too old, or
 * older than the header this file was compiled with. Needs no GPU. */
DTRAIN_API dtrain_result dtrain_nccl_query(dtrain_nccl_info *info);

/* All-gather a small record (bytes <= 512) among the members of a group, in the group's order:
 * `all` has rank_count * bytes. The function must have a deadline of its own. */
typedef dtrain_result (*dtrain_nccl_exchange_fn)(void *user, const void *mine, size_t bytes,
                                                 void *all);

/* The ranks that go on after a failure. It must be the same on every member. Agreeing on it is the
 * program's part, since only the program knows whether a silent rank is dead or slow. So is the
 * exchange, because the world's control plane has ended with the first failure. (With MPI: an
 * MPI_Allgather over a communicator of the ranks that are left.) A group of one rank needs none. */
typedef struct dtrain_nccl_group {
    const int *ranks; /* (rank_count) of the world */
    int rank_count;
    dtrain_nccl_exchange_fn exchange;
    void *exchange_user;
} dtrain_nccl_group;

/* Make a new communicator of the group's ranks after a failure. Collective over the group. `failed`
 * is any communicator of this rank's world that has failed; it and its siblings stay failed, and
 * memory from their dtrain_comm_alloc serves the new one. The new communicator belongs to the
 * caller (dtrain_comm_destroy) and is what strategies of the survivors take as their comm. From now
 * on a dead rank is found by deadlines and by NCCL's own errors alone. */
DTRAIN_API dtrain_result dtrain_nccl_recreate(dtrain_comm *failed, const dtrain_nccl_group *group,
                                              dtrain_comm **out);

#ifdef __cplusplus
}
#endif
