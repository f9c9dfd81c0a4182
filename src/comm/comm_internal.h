/* What other files may use of comm/ beside the public API. */

#pragma once

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "comm/backend.h"

typedef struct dtrain__kind {
    const char *call, *name;
    bool reduces, rooted;
} dtrain__kind;

/* comm/comm.c */
DTRAIN__PRIVATE void dtrain__describe(const dtrain_collective *what, char *text, size_t room);
DTRAIN__PRIVATE bool dtrain__cuts(const dtrain_collective *what);
DTRAIN__PRIVATE size_t dtrain__send_count(const dtrain_collective *what, int size);
DTRAIN__PRIVATE size_t dtrain__recv_count(const dtrain_collective *what, int size);
DTRAIN__PRIVATE uint64_t dtrain__wire_bytes(const dtrain_collective *what, int size);
DTRAIN__PRIVATE void dtrain__comm_landed(dtrain_comm *comm, uint64_t now);
DTRAIN__PRIVATE dtrain_result dtrain__run(dtrain_comm *comm, uint32_t kind, const void *send,
                                          void *recv, size_t count, dtrain_dtype dtype, uint32_t op,
                                          int root, dtrain_work **work);

/* comm/reduce.c */
DTRAIN__PRIVATE void dtrain__combine(const dtrain_collective *what, const char *const *in,
                                     int in_count, char *const *out, int out_count, size_t count);
DTRAIN__PRIVATE const dtrain__kind *dtrain__kind_of(uint32_t kind);
