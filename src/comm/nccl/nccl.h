/* The public calls of the NCCL communicator */

#pragma once

#include "dtrain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Give the table for dtrain_launch_desc.comm_ops. It is static. A program that has a tensor axis
 * sets NCCL_LAUNCH_ORDER_IMPLICIT=1 in its environment before the launch: see Streams above. */
DTRAIN_API const dtrain_comm_ops *dtrain_nccl_comm_ops(void);

#ifdef __cplusplus
}
#endif
