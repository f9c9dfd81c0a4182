/* Communicators
 *
 * The public calls check their arguments, keep the books and hand a dtrain_collective to the table
 * of the communicator. Below them: comm/engine.c drives the communicators "local", "staged" and
 * "mpi" (comm/engine_internal.h says how), comm/backend.c chooses between communicators. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"

static const dtrain__kind dtrain__kinds[] = {
    {"?", "?", false, false},
    {"dtrain_all_reduce", "all-reduce", true, false},
    {"dtrain_reduce_scatter", "reduce-scatter", true, false},
    {"dtrain_all_gather", "all-gather", false, false},
    {"dtrain_broadcast", "broadcast", false, true},
    {"dtrain_reduce", "reduce", true, true},
    {"dtrain_barrier", "barrier", false, false},
    {"dtrain_send", "send", false, true},
    {"dtrain_recv", "recv", false, true},
    {"dtrain_comm_split", "split", false, false},
    {"dtrain_all_to_all", "all-to-all", false, false},
};
/* The row of a dtrain_collective_kind; of an unknown one the row "?". */
DTRAIN__PRIVATE const dtrain__kind *dtrain__kind_of(uint32_t kind)
{
    return &dtrain__kinds[kind <= DTRAIN_COLLECTIVE_ALL_TO_ALL ? kind : 0];
}

/* "all-reduce sum f32 count 100", for messages. */
DTRAIN__PRIVATE void dtrain__describe(const dtrain__shown *shown, char *text, size_t room)
{
    static const char *const ops[] = {"", " sum", " mean", " min", " max", " prod"};
    char root[32] = "";
    const dtrain__kind *kind = dtrain__kind_of(shown->kind);
    if (kind->rooted)
        snprintf(root, sizeof root, " %s %d",
                 shown->kind < DTRAIN_COLLECTIVE_SEND ? "root" : "peer", (int)shown->root);
    if (shown->kind == DTRAIN_COLLECTIVE_BARRIER || shown->kind == DTRAIN_COLLECTIVE_SPLIT)
        snprintf(text, room, "%s", kind->name);
    else
        snprintf(text, room, "%s%s %s count %llu%s", kind->name,
                 ops[shown->op <= DTRAIN_REDUCE_PROD ? shown->op : 0],
                 dtrain_dtype_name((dtrain_dtype)shown->dtype), (unsigned long long)shown->count,
                 root);
}

/* Elements of the send and the receive buffer: `size` times larger where a call cuts or joins
 * slices. */
DTRAIN__PRIVATE bool dtrain__cuts(const dtrain_collective *what)
{
    return what->kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER ||
           what->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL;
}
DTRAIN__PRIVATE size_t dtrain__send_count(const dtrain_collective *what, int size)
{
    return dtrain__cuts(what) ? what->count * (size_t)size : what->count;
}
DTRAIN__PRIVATE size_t dtrain__recv_count(const dtrain_collective *what, int size)
{
    const bool joins = what->kind == DTRAIN_COLLECTIVE_ALL_GATHER ||
                       what->kind == DTRAIN_COLLECTIVE_SPLIT ||
                       what->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL;
    return joins ? what->count * (size_t)size : what->count;
}

/* ---- Checks -----------------------------------------------------------------------------------*/

/* In place is allowed; a shifted overlap would overwrite what is still to be read. */
static dtrain_result dtrain__check_overlap(const dtrain_comm *comm, const dtrain_collective *what,
                                           size_t unit)
{
    const uintptr_t send = (uintptr_t)what->send, recv = (uintptr_t)what->recv;
    const size_t send_bytes = dtrain__send_count(what, comm->size) * unit;
    const size_t recv_bytes = dtrain__recv_count(what, comm->size) * unit;
    const size_t slice = (size_t)comm->rank * what->count * unit;
    bool in_place = send == recv && what->kind != DTRAIN_COLLECTIVE_ALL_TO_ALL;
    if (what->kind == DTRAIN_COLLECTIVE_ALL_GATHER) in_place = send == recv + slice;
    if (what->kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER) in_place = recv == send + slice;
    if (in_place || send >= recv + recv_bytes || recv >= send + send_bytes) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: send and recv overlap; use %stwo separate ones",
                       dtrain__kind_of(what->kind)->call,
                       what->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL ? "" : "one buffer in place or ");
}

static dtrain_result dtrain__check_buffers(const dtrain_comm *comm, const dtrain_collective *what)
{
    const char *call = dtrain__kind_of(what->kind)->call;
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const bool reads = what->kind != DTRAIN_COLLECTIVE_RECV;
    const bool writes = what->kind != DTRAIN_COLLECTIVE_SEND &&
                        (what->kind != DTRAIN_COLLECTIVE_REDUCE || what->root == comm->rank);
    size_t bytes;
    if (!dtrain__size_mul(what->count, unit * (size_t)comm->size, &bytes) || bytes > SIZE_MAX / 2)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: count %zu times %d ranks is more than memory can hold", call,
                           what->count, comm->size);
    if (what->count && reads && !what->send)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: the buffer to send is NULL and count is %zu",
                           call, what->count);
    if (what->count && writes && !what->recv)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: the buffer to receive is NULL and count is %zu", call, what->count);
    return reads && writes && what->count ? dtrain__check_overlap(comm, what, unit) : DTRAIN_OK;
}

static dtrain_result dtrain__check_collective(const dtrain_comm *comm,
                                              const dtrain_collective *what)
{
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    if (what->kind == DTRAIN_COLLECTIVE_BARRIER) return DTRAIN_OK;
    if (!dtrain_dtype_bytes(what->dtype))
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
    return dtrain__check_buffers(comm, what);
}

/* ---- Books ------------------------------------------------------------------------------------*/

/* This rank's share of the traffic as rings would make it, the usual figure for comparing
 * systems. */
DTRAIN__PRIVATE uint64_t dtrain__wire_bytes(const dtrain_collective *what, int size)
{
    const uint64_t bytes = (uint64_t)what->count * dtrain_dtype_bytes(what->dtype);
    const uint64_t n = (uint64_t)size;
    switch (what->kind) {
    case DTRAIN_COLLECTIVE_ALL_REDUCE: return 2 * (bytes / n * (n - 1) + bytes % n * (n - 1) / n);
    case DTRAIN_COLLECTIVE_BROADCAST:
    case DTRAIN_COLLECTIVE_REDUCE: return bytes / n * (n - 1) + bytes % n * (n - 1) / n;
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER:
    case DTRAIN_COLLECTIVE_ALL_TO_ALL:
    case DTRAIN_COLLECTIVE_ALL_GATHER: return bytes * (n - 1);
    case DTRAIN_COLLECTIVE_SEND: return bytes;
    default: return 0;
    }
}

static void dtrain__count_operation(dtrain_comm *comm, const dtrain_collective *what, uint64_t now)
{
    const size_t elements =
        what->kind == DTRAIN_COLLECTIVE_RECV ? what->count : dtrain__send_count(what, comm->size);
    comm->info.operation_count++;
    comm->info.payload_bytes += (uint64_t)elements * dtrain_dtype_bytes(what->dtype);
    comm->info.wire_bytes += dtrain__wire_bytes(what, comm->size);
    if (!comm->flight_since) comm->flight_since = now;
}

/* `now` is the end of the time in flight, if nothing is in flight any more. */
DTRAIN__PRIVATE void dtrain__comm_landed(dtrain_comm *comm, uint64_t now)
{
    if (comm->in_flight || !comm->flight_since) return;
    comm->flight_ns += now - comm->flight_since;
    comm->flight_since = 0;
}

/* Every public call that may work or wait ends here: two looks at the clock per call. */
static void dtrain__comm_leave(dtrain_comm *comm, uint64_t entered)
{
    const uint64_t now = dtrain__now_ns();
    comm->inside_ns += now - entered;
    dtrain__comm_landed(comm, now);
}

DTRAIN_API void dtrain_comm_query(const dtrain_comm *comm, dtrain_comm_info *info)
{
    if (!info) return;
    memset(info, 0, sizeof *info);
    if (!comm) return;
    uint64_t flight = comm->flight_ns;
    if (comm->flight_since) flight += dtrain__now_ns() - comm->flight_since;
    *info = comm->info;
    info->backend = comm->ops->name;
    info->inside_seconds = 1e-9 * (double)comm->inside_ns;
    info->flight_seconds = 1e-9 * (double)flight;
}

/* ---- Public calls -----------------------------------------------------------------------------*/

static dtrain_result dtrain__comm_usable(const dtrain_comm *comm, const char *call)
{
    if (!comm) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: the communicator is NULL", call);
    return dtrain__world_check(comm->world, call);
}

/* A rank that made a mistake in its arguments has missed an operation the others count on. Were it
 * allowed to go on, its next call could be taken for this one: so the communicator fails. */
DTRAIN__PRIVATE dtrain_result dtrain__run(dtrain_comm *comm, uint32_t kind, const void *send,
                                          void *recv, size_t count, dtrain_dtype dtype, uint32_t op,
                                          int root, dtrain_work **work)
{
    dtrain_collective what;
    dtrain_work *started = NULL;
    memset(&what, 0, sizeof what);
    what.kind = kind;
    what.dtype = dtype;
    what.op = op;
    what.root = root;
    what.count = count;
    what.send = send;
    what.recv = recv;
    if (work) *work = NULL;
    DTRAIN__TRY(dtrain__comm_usable(comm, dtrain__kind_of(kind)->call));
    const uint64_t entered = dtrain__now_ns();
    dtrain_result result = dtrain__check_collective(comm, &what);
    if (result != DTRAIN_OK) {
        result = comm->ops->fail(comm, result, dtrain_last_error());
    } else {
        dtrain__count_operation(comm, &what, entered);
        result = comm->ops->start(comm, &what, &started);
        if (result == DTRAIN_OK && work) *work = started;
        else if (result == DTRAIN_OK && started) result = comm->ops->wait(started);
    }
    dtrain__comm_leave(comm, entered);
    return result;
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
    return dtrain__run(comm, DTRAIN_COLLECTIVE_BARRIER, NULL, NULL, 0, DTRAIN_DTYPE_NONE, 0, -1,
                       NULL);
}

DTRAIN_API dtrain_result dtrain_work_wait(dtrain_work *work)
{
    if (!work) return DTRAIN_OK;
    dtrain_comm *comm = work->comm;
    DTRAIN__TRY(dtrain__comm_usable(comm, "dtrain_work_wait"));
    const uint64_t entered = dtrain__now_ns();
    const dtrain_result result = comm->ops->wait(work);
    dtrain__comm_leave(comm, entered);
    return result;
}

DTRAIN_API dtrain_result dtrain_work_test(dtrain_work *work, bool *done)
{
    if (!done) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_work_test: done is NULL");
    *done = true;
    if (!work) return DTRAIN_OK;
    dtrain_comm *comm = work->comm;
    DTRAIN__TRY(dtrain__comm_usable(comm, "dtrain_work_test"));
    const uint64_t entered = dtrain__now_ns();
    const dtrain_result result = comm->ops->test(work, done);
    dtrain__comm_leave(comm, entered);
    return result;
}

DTRAIN_API dtrain_result dtrain_comm_split(dtrain_comm *comm, int color, int key, dtrain_comm **out)
{
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_comm_split: out is NULL");
    *out = NULL;
    DTRAIN__TRY(dtrain__comm_usable(comm, "dtrain_comm_split"));
    return comm->ops->split(comm, color, key, out);
}

/* A communicator with handles that were not given back stays until the end of the world: they point
 * to it. */
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
DTRAIN_API int dtrain_comm_world_rank(const dtrain_comm *comm, int rank)
{
    return comm && rank >= 0 && rank < comm->size ? comm->world_ranks[rank] : -1;
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
