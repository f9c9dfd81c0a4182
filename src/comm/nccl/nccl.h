/* The public calls of the NCCL communicator */

#pragma once

#include "dtrain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a host that has NCCL hands in as dtrain_join_desc.comm_given. It is read by
 * dtrain_world_join, and never destroyed, aborted or finalized; NULL there: as in a launch, dtrain
 * makes the id.
 *
 *     comm   The world's communicator is split from it (NCCL 2.18): the join is a collective of it,
 *            of all its ranks, and blocks if it does. Nothing is shared: the end or failure of one
 *            does not touch the other.
 *     id     The world's communicator is made with the id of rank 0; other ranks' are not read. The
 *            host makes no communicator with it. */
typedef struct dtrain_nccl_given {
    struct ncclComm *comm; /* ncclComm_t of the members, with their ranks and GPUs; or NULL */
    const void *id;        /* ncclUniqueId; or NULL */
    bool launch_ordered;   /* the host has set NCCL_LAUNCH_ORDER_IMPLICIT=1: see Streams above */
} dtrain_nccl_given;

/* Give the table for dtrain_launch_desc.comm_ops and dtrain_join_desc.comm_ops. It is static. A
 * launched program that has a tensor axis sets NCCL_LAUNCH_ORDER_IMPLICIT=1 in its environment
 * before the launch: see Streams above. */
DTRAIN_API const dtrain_comm_ops *dtrain_nccl_comm_ops(void);

#ifdef __cplusplus
}
#endif
