/* The public calls of the NCCL communicator */

#pragma once

#include "dtrain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* NCCL objects of the host, for dtrain_join_desc.comm_given. If comm_given is NULL, dtrain makes a
 * unique id, as in a launch. dtrain_world_join reads the struct. dtrain never destroys, aborts or
 * finalizes the host's objects.
 *
 *     comm   The world's communicator is split from the host's; this needs NCCL 2.18. All ranks of
 *            the host's communicator must join. The two share no resources: one can end or fail
 *            without the other.
 *     id     The world's communicator is made with the id of rank 0; ids of other ranks are not
 *            read. The host must not use the id again. */
typedef struct dtrain_nccl_given {
    struct ncclComm *comm; /* ncclComm_t of the members, with their ranks and GPUs; or NULL */
    const void *id;        /* ncclUniqueId; or NULL */
    bool launch_ordered;   /* true if the host has set NCCL_LAUNCH_ORDER_IMPLICIT=1, see Streams */
} dtrain_nccl_given;

/* Return the table for dtrain_launch_desc.comm_ops and dtrain_join_desc.comm_ops. The table is
 * static. A launched program with a tensor axis should set NCCL_LAUNCH_ORDER_IMPLICIT=1 in its
 * environment before the launch: see Streams above. */
DTRAIN_API const dtrain_comm_ops *dtrain_nccl_comm_ops(void);

#ifdef __cplusplus
}
#endif
