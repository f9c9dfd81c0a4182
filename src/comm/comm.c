/* Communicators
 *
 * The public calls check their arguments, count and time, and pass a dtrain_collective to the table
 * of the communicator. comm/backend.c chooses the communicator. comm/engine.c drives "local",
 * "staged" and "mpi", see comm/engine_internal.h. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/timeline_internal.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "device/device_internal.h"

/* ---- Checks -----------------------------------------------------------------------------------*/

/* Check the arguments of a call. In place is allowed; any other overlap would overwrite data before
 * it is read. */
static dtrain_result dtrain__check_collective(const dtrain_comm *comm,
                                              const dtrain_collective *what)
{
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const bool reads = dtrain__gives(what, comm->rank), writes = dtrain__gets(what, comm->rank);
    size_t bytes;
    if (what->kind == DTRAIN_COLLECTIVE_BARRIER) return DTRAIN_OK;
    if (!unit)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %d is not a dtrain_dtype", kind->call,
                           (int)what->dtype);
    if (kind->reduces && (what->op < DTRAIN_REDUCE_SUM || what->op > DTRAIN_REDUCE_PROD))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %u is not a dtrain_reduce_op", kind->call,
                           what->op);
    if (what->op == DTRAIN_REDUCE_MEAN &&
        (what->dtype == DTRAIN_DTYPE_I32 || what->dtype == DTRAIN_DTYPE_I64))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: DTRAIN_REDUCE_MEAN of %s would have to round; sum and divide",
                           kind->call, dtrain_dtype_name(what->dtype));
    if (kind->rooted && (what->root < 0 || what->root >= comm->size))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: rank %d does not exist, expected 0 to %d",
                           kind->call, what->root, comm->size - 1);
    if (kind->rooted && what->kind >= DTRAIN_COLLECTIVE_SEND && what->root == comm->rank)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: peer %d is this rank itself", kind->call,
                           what->root);
    if (!dtrain__size_mul(what->count, unit * (size_t)comm->size, &bytes) || bytes > SIZE_MAX / 2)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: count %zu times %d ranks is more than memory can hold", kind->call,
                           what->count, comm->size);
    if (what->count && ((reads && !what->send) || (writes && !what->recv)))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: the buffer to %s is NULL and count is %zu",
                           kind->call, reads && !what->send ? "send" : "receive", what->count);
    if (!what->count || !reads || !writes) return DTRAIN_OK;
    const uintptr_t send = (uintptr_t)what->send, recv = (uintptr_t)what->recv;
    const size_t slice = (size_t)comm->rank * what->count * unit;
    const bool in_place = kind->cuts && kind->joins ? false
                          : kind->joins             ? send == recv + slice
                          : kind->cuts              ? recv == send + slice
                                                    : send == recv;
    if (in_place || send >= recv + dtrain__recv_bytes(what, comm->size) ||
        recv >= send + dtrain__send_bytes(what, comm->size))
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: send and recv overlap; use %stwo separate ones",
                       kind->call, kind->cuts && kind->joins ? "" : "one buffer in place or ");
}

/* ---- Counts and times -------------------------------------------------------------------------*/

/* End the time in flight at `now`, if no operation is in flight any more. */
DTRAIN__PRIVATE void dtrain__comm_idle(dtrain_comm *comm, uint64_t now)
{
    if (comm->in_flight || !comm->flight_since) return;
    comm->flight_ns += now - comm->flight_since;
    comm->flight_since = 0;
}

/* Leave a public call that dtrain__enter has begun. */
static dtrain_result dtrain__comm_leave(dtrain_comm *comm, uint64_t entered, dtrain_result result)
{
    const uint64_t now = dtrain__leave(comm->world, result);
    comm->inside_ns += now - entered;
    dtrain__comm_idle(comm, now);
    return result;
}

/* Count an operation, record its begin, and return the number of its event. Wire bytes are this
 * rank's share of the traffic of a ring algorithm, the usual figure for comparing systems. Node
 * bytes are the part for other nodes (of node_ranks ranks): all or nothing of a message; of a
 * collective, every other rank counts the same. */
static uint64_t dtrain__comm_record(dtrain_comm *comm, const dtrain_collective *what, uint64_t now)
{
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const bool sends = what->kind == DTRAIN_COLLECTIVE_SEND;
    const bool message = sends || what->kind == DTRAIN_COLLECTIVE_RECV;
    const uint64_t bytes = (uint64_t)what->count * dtrain_dtype_bytes(what->dtype);
    const uint64_t n = (uint64_t)comm->size;
    const int node = comm->world->node_ranks, *ranks = comm->world_ranks;
    const dtrain__comm_call call = {kind->name,        message ? 0 : ++comm->started,
                                    what->count,       comm->number,
                                    ranks[0],          comm->size,
                                    what->root,        (uint8_t)what->dtype,
                                    (uint8_t)what->op, comm->axis};
    uint64_t wire = (what->kind == DTRAIN_COLLECTIVE_ALL_REDUCE ? 2u : 1u) *
                    (bytes / n * (n - 1) + bytes % n * (n - 1) / n);
    int away = 0;
    if (kind->cuts || kind->joins) wire = bytes * (n - 1);
    if (message) wire = sends ? bytes : 0;
    if (what->kind == DTRAIN_COLLECTIVE_SPLIT) wire = 0;
    for (int i = 0; node && i < comm->size; i++)
        if (!message || i == what->root) away += ranks[i] / node != ranks[comm->rank] / node;
    comm->info.operation_count++;
    comm->info.payload_bytes += dtrain__send_bytes(what, comm->size);
    comm->info.wire_bytes += wire;
    if (away)
        comm->info.node_bytes += (uint64_t)((double)wire * away / (message ? 1 : comm->size - 1));
    comm->info.kind_bytes[what->kind] += wire;
    if (!comm->flight_since) comm->flight_since = now;
    return dtrain__call_queued(comm->world, &call);
}

DTRAIN_API void dtrain_comm_query(const dtrain_comm *comm, dtrain_comm_info *info)
{
    if (!info) return;
    memset(info, 0, sizeof *info);
    if (!comm) return;
    const uint64_t since = comm->flight_since ? dtrain__now_ns() - comm->flight_since : 0;
    *info = comm->info;
    info->backend = comm->ops->name;
    info->world_ranks = comm->world_ranks;
    info->inside_seconds = 1e-9 * (double)comm->inside_ns;
    info->flight_seconds = 1e-9 * (double)(comm->flight_ns + since);
}

/* ---- Public calls -----------------------------------------------------------------------------*/

static dtrain_result dtrain__comm_usable(const dtrain_comm *comm, const char *call)
{
    if (!comm) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: the communicator is NULL", call);
    return dtrain__world_check(comm->world, call);
}

/* Refuse an operation that a captured graph cannot hold: at each launch the host would have to wait
 * or move data. The communicator does not fail: all ranks capture the same operations. */
static dtrain_result dtrain__check_captured(const dtrain_comm *comm, const dtrain_collective *what)
{
    dtrain_device *device = comm->world->device;
    if (!dtrain__capturing(device)) return DTRAIN_OK;
    const bool host = !what->count || (what->send && dtrain__on_host(device, what->send)) ||
                      (what->recv && dtrain__on_host(device, what->recv));
    if (!host && (!comm->ops->transport || comm->size == 1)) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_UNSUPPORTED,
        "%s: %s cannot be part of a captured graph; call it outside of the capture%s",
        dtrain__kind_of(what->kind)->call,
        host ? "a barrier, a split, a count of 0 or a buffer in host memory"
             : "a communicator that moves data through host memory",
        host ? "" : ", or give each rank a GPU and use dtrain_nccl.h");
}

/* Check, count and start an operation, and wait for it unless `work` is given.
 *
 * A wrong argument fails the communicator. The other ranks wait for this operation, and could take
 * this rank's next call for it. */
DTRAIN__PRIVATE dtrain_result dtrain__run(dtrain_comm *comm, uint32_t kind, const void *send,
                                          void *recv, size_t count, dtrain_dtype dtype, uint32_t op,
                                          int root, dtrain_work **work)
{
    const dtrain_collective what = {kind, dtype, op, root, count, send, recv};
    dtrain_work *started = NULL;
    if (work) *work = NULL;
    DTRAIN__TRY(dtrain__comm_usable(comm, dtrain__kind_of(kind)->call));
    DTRAIN__TRY(dtrain__check_captured(comm, &what));
    const uint64_t entered = dtrain__enter(comm->world, dtrain__kind_of(kind)->name);
    dtrain_result result = dtrain__check_collective(comm, &what);
    if (result != DTRAIN_OK) {
        result = comm->ops->fail(comm, result, dtrain_last_error());
    } else {
        const uint64_t event = dtrain__comm_record(comm, &what, entered);
        result = comm->ops->start(comm, &what, &started);
        if (started) started->event = event;
        if (result == DTRAIN_OK && work) *work = started;
        else if (result == DTRAIN_OK && started) result = comm->ops->wait(started);
        if (result == DTRAIN_OK && !(work && started)) dtrain__call_done(comm->world, event);
    }
    return dtrain__comm_leave(comm, entered, result);
}

DTRAIN_API dtrain_result dtrain_all_reduce(dtrain_comm *comm, const void *send, void *recv,
                                           size_t count, dtrain_dtype dtype, dtrain_reduce_op op,
                                           dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_COLLECTIVE_ALL_REDUCE, send, recv, count, dtype, (uint32_t)op,
                       -1, work);
}

DTRAIN_API dtrain_result dtrain_reduce_scatter(dtrain_comm *comm, const void *send, void *recv,
                                               size_t recv_count, dtrain_dtype dtype,
                                               dtrain_reduce_op op, dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_COLLECTIVE_REDUCE_SCATTER, send, recv, recv_count, dtype,
                       (uint32_t)op, -1, work);
}

DTRAIN_API dtrain_result dtrain_all_gather(dtrain_comm *comm, const void *send, void *recv,
                                           size_t send_count, dtrain_dtype dtype,
                                           dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_COLLECTIVE_ALL_GATHER, send, recv, send_count, dtype, 0, -1,
                       work);
}

DTRAIN_API dtrain_result dtrain_all_to_all(dtrain_comm *comm, const void *send, void *recv,
                                           size_t count, dtrain_dtype dtype, dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_COLLECTIVE_ALL_TO_ALL, send, recv, count, dtype, 0, -1, work);
}

DTRAIN_API dtrain_result dtrain_broadcast(dtrain_comm *comm, void *buffer, size_t count,
                                          dtrain_dtype dtype, int root, dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_COLLECTIVE_BROADCAST, buffer, buffer, count, dtype, 0, root,
                       work);
}

DTRAIN_API dtrain_result dtrain_reduce(dtrain_comm *comm, const void *send, void *recv,
                                       size_t count, dtrain_dtype dtype, dtrain_reduce_op op,
                                       int root, dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_COLLECTIVE_REDUCE, send, recv, count, dtype, (uint32_t)op, root,
                       work);
}

DTRAIN_API dtrain_result dtrain_send(dtrain_comm *comm, const void *buffer, size_t count,
                                     dtrain_dtype dtype, int peer, dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_COLLECTIVE_SEND, buffer, NULL, count, dtype, 0, peer, work);
}

DTRAIN_API dtrain_result dtrain_recv(dtrain_comm *comm, void *buffer, size_t count,
                                     dtrain_dtype dtype, int peer, dtrain_work **work)
{
    return dtrain__run(comm, DTRAIN_COLLECTIVE_RECV, NULL, buffer, count, dtype, 0, peer, work);
}

DTRAIN_API dtrain_result dtrain_barrier(dtrain_comm *comm)
{
    return dtrain__run(comm, DTRAIN_COLLECTIVE_BARRIER, NULL, NULL, 0, DTRAIN_DTYPE_F32, 0, -1,
                       NULL);
}

DTRAIN_API dtrain_result dtrain_work_wait(dtrain_work *work)
{
    if (!work) return DTRAIN_OK;
    dtrain_comm *comm = work->comm;
    DTRAIN__TRY(dtrain__comm_usable(comm, "dtrain_work_wait"));
    const uint64_t entered = dtrain__enter(comm->world, "wait"), event = work->event;
    const dtrain_result result = comm->ops->wait(work);
    if (result == DTRAIN_OK) dtrain__call_done(comm->world, event);
    return dtrain__comm_leave(comm, entered, result);
}

DTRAIN_API dtrain_result dtrain_work_test(dtrain_work *work, bool *done)
{
    if (!done) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_work_test: done is NULL");
    *done = true;
    if (!work) return DTRAIN_OK;
    dtrain_comm *comm = work->comm;
    DTRAIN__TRY(dtrain__comm_usable(comm, "dtrain_work_test"));
    const uint64_t entered = dtrain__enter(comm->world, "test");
    const dtrain_result result = comm->ops->test(work, done);
    if (result == DTRAIN_OK && *done) dtrain__call_done(comm->world, work->event);
    return dtrain__comm_leave(comm, entered, result);
}

DTRAIN_API dtrain_result dtrain_comm_split(dtrain_comm *comm, int color, int key, dtrain_comm **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_comm_split: out is NULL");
    *out = NULL;
    const dtrain_collective what = {
        DTRAIN_COLLECTIVE_SPLIT, DTRAIN_DTYPE_I32, 0, -1, 0, NULL, NULL};
    DTRAIN__TRY(dtrain__comm_usable(comm, "dtrain_comm_split"));
    DTRAIN__TRY(dtrain__check_captured(comm, &what));
    const int64_t number = (comm->number + 1) * 1000 + (int64_t)comm->splits++;
    const dtrain_result result = comm->ops->split(comm, color, key, out);
    if (*out && !(*out)->number) (*out)->number = number; /* the backend does not number */
    if (*out) (*out)->axis = comm->axis;
    return result;
}

/* A communicator with outstanding handles lives until the world ends: the handles point to it. */
DTRAIN_API void dtrain_comm_destroy(dtrain_comm *comm)
{
    char text[160];
    if (!comm || dtrain__world_check(comm->world, "dtrain_comm_destroy") != DTRAIN_OK) return;
    if (comm == comm->world->comm) {
        snprintf(text, sizeof text, "dtrain_comm_destroy: the world's communicator ends with it");
        (void)dtrain_fail(DTRAIN_ERROR_USAGE, "%s", text);
    } else if (comm->outstanding) {
        snprintf(text, sizeof text,
                 "dtrain_comm_destroy: %llu operations have not been given to dtrain_work_wait",
                 (unsigned long long)comm->outstanding);
        (void)comm->ops->fail(comm, DTRAIN_ERROR_USAGE, text);
    } else {
        (void)comm->ops->destroy(comm);
        return;
    }
    dtrain_log(comm->world, DTRAIN_LOG_ERROR, "%s", text);
}

DTRAIN_API int dtrain_comm_rank(const dtrain_comm *comm) { return comm ? comm->rank : -1; }
DTRAIN_API int dtrain_comm_size(const dtrain_comm *comm) { return comm ? comm->size : 0; }
/* Return the world rank of a communicator's rank; -1 if there is no such rank. */
DTRAIN__PRIVATE int dtrain__world_rank(const dtrain_comm *comm, int rank)
{
    return rank >= 0 && rank < comm->size ? comm->world_ranks[rank] : -1;
}

DTRAIN_API dtrain_result dtrain_comm_alloc(dtrain_comm *comm, size_t bytes, void **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_comm_alloc: out is NULL");
    *out = NULL;
    DTRAIN__TRY(dtrain__comm_usable(comm, "dtrain_comm_alloc"));
    return comm->ops->alloc(comm, bytes, out);
}

DTRAIN_API void dtrain_comm_free(dtrain_comm *comm, void *memory, size_t bytes)
{
    if (!comm || !memory || dtrain__world_check(comm->world, "dtrain_comm_free") != DTRAIN_OK)
        return;
    comm->ops->free(comm, memory, bytes);
}
