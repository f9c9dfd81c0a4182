/* The public calls of the NCCL communicator */

#pragma once

#include "dtrain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a host that has NCCL hands in as dtrain_join_desc.comm_given. With NULL there dtrain makes
 * an id, as in a launch. dtrain_world_join reads it, and dtrain never destroys, aborts or
 * finalizes what is the host's.
 *
 *     comm   The world's communicator is split from it, which needs NCCL 2.18. The join is then a
 *            collective of all its ranks. The two share nothing: the end or the failure of one does
 *            not touch the other.
 *     id     The world's communicator is made with rank 0's id, which the host must not use for
 *            another one. The ids of other ranks are not read. */
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
