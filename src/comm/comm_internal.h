/* Types and functions that the files of comm/ share. */

#pragma once

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "comm/backend.h"

/* One row per dtrain_collective_kind. cuts: the send buffer has a slice for every rank; joins: the
 * receive buffer has a slice from every rank. */
typedef struct dtrain__kind {
    const char *call, *name;
    bool reduces, rooted, cuts, joins;
} dtrain__kind;

/* Bytes that one rank sends to another. source: offset in the sender's send buffer or, for computed
 * results, receive buffer; target: offset in the receiver's receive buffer. */
typedef struct dtrain__transfer {
    size_t source, target, bytes;
} dtrain__transfer;

/* comm/backend.c */
DTRAIN__PRIVATE dtrain_result dtrain__world_comm_create(dtrain_world *world);
DTRAIN__PRIVATE void dtrain__world_comm_end(dtrain_world *world);
DTRAIN__PRIVATE void dtrain__world_comm_linger(dtrain_world *world);

/* comm/comm.c */
DTRAIN__PRIVATE int dtrain__world_rank(const dtrain_comm *comm, int rank);
DTRAIN__PRIVATE void dtrain__comm_idle(dtrain_comm *comm, uint64_t now);
DTRAIN__PRIVATE dtrain_result dtrain__run(dtrain_comm *comm, uint32_t kind, const void *send,
                                          void *recv, size_t count, dtrain_dtype dtype, uint32_t op,
                                          int root, dtrain_work **work);

/* comm/engine.c. Find a communicator of the engine by its number; NULL for 0 or if none has it. */
DTRAIN__PRIVATE dtrain_comm *dtrain__comm_numbered(const dtrain_world *world, int64_t number);

/* comm/reduce.c */
DTRAIN__PRIVATE const dtrain__kind *dtrain__kind_of(uint32_t kind);
DTRAIN__PRIVATE size_t dtrain__send_bytes(const dtrain_collective *what, int size);
DTRAIN__PRIVATE size_t dtrain__recv_bytes(const dtrain_collective *what, int size);
DTRAIN__PRIVATE bool dtrain__gives(const dtrain_collective *what, int rank);
DTRAIN__PRIVATE bool dtrain__gets(const dtrain_collective *what, int rank);
DTRAIN__PRIVATE void dtrain__combine(const dtrain_collective *what, const char *const *in,
                                     int in_count, char *const *out, int out_count, size_t count);
DTRAIN__PRIVATE void dtrain__slice(const dtrain_collective *what, int size, int rank, size_t *first,
                                   size_t *length);
DTRAIN__PRIVATE bool dtrain__transfer_of(const dtrain_collective *what, int size, bool results,
                                         int from, int to, dtrain__transfer *transfer);

/* comm/flight.c */
DTRAIN__PRIVATE dtrain_result dtrain__dump(const dtrain_world *world, const char *directory);
