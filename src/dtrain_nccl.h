#include "comm/nccl/manual.h"

#ifndef DTRAIN_NCCL_H
#define DTRAIN_NCCL_H

#if defined(DTRAIN_NCCL_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE 1
#endif

#include "comm/nccl/nccl.h"

#endif /* DTRAIN_NCCL_H */

#if defined(DTRAIN_NCCL_IMPLEMENTATION) && !defined(DTRAIN_NCCL_IMPLEMENTED)
#define DTRAIN_NCCL_IMPLEMENTED

#define DTRAIN_NCCL__PRIVATE static

#include "comm/nccl/library.c"
#include "comm/nccl/rank.c"
#include "comm/nccl/failure.c"
#include "comm/nccl/wait.c"
#include "comm/nccl/operations.c"
#include "comm/nccl/memory.c"
#include "comm/nccl/create.c"

#endif /* DTRAIN_NCCL_IMPLEMENTATION */
