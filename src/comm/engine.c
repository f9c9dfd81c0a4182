/* The engine: queue, agreement, waiting, failure, split */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/timeline_internal.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/engine_internal.h"
#include "device/backend.h"
#include "device/device_internal.h"

/* ---- Comparing calls --------------------------------------------------------------------------*/

static dtrain__engine *dtrain__engine_of(const dtrain_comm *comm)
{
    return (dtrain__engine *)((uintptr_t)comm - offsetof(dtrain__engine, base));
}

static dtrain__work *dtrain__work_of(const dtrain_work *work)
{
    return (dtrain__work *)((uintptr_t)work - offsetof(dtrain__work, op));
}

/* Describe a call for a sentence: "all-reduce sum f32 count 100" or, with a sequence number,
 * "collective #17 (all-reduce sum f32 count 100)". */
DTRAIN__PRIVATE void dtrain__describe(const dtrain_call *shown, uint64_t sequence, char *text,
                                      size_t room)
{
    static const char *const ops[] = {"", " sum", " mean", " min", " max", " prod"};
    const dtrain__kind *kind = dtrain__kind_of(shown->kind);
    char root[32] = "", call[80];
    if (kind->rooted)
        snprintf(root, sizeof root, " %s %d",
                 shown->kind < DTRAIN_COLLECTIVE_SEND ? "root" : "peer", (int)shown->root);
    if (shown->kind == DTRAIN_COLLECTIVE_BARRIER || shown->kind == DTRAIN_COLLECTIVE_SPLIT)
        snprintf(call, sizeof call, "%s", kind->name);
    else
        snprintf(call, sizeof call, "%s%s %s count %llu%s", kind->name, ops[shown->op],
                 dtrain_dtype_name((dtrain_dtype)shown->dtype), (unsigned long long)shown->count,
                 root);
    if (!sequence) snprintf(text, room, "%s", call);
    else snprintf(text, room, "collective #%llu (%s)", (unsigned long long)sequence, call);
}

static bool dtrain__same_call(const dtrain_call *a, const dtrain_call *b)
{
    return a->kind == b->kind && a->dtype == b->dtype && a->op == b->op && a->root == b->root &&
           a->count == b->count;
}

static const dtrain_call *dtrain__shown_by(const dtrain__engine *comm, const dtrain__work *work,
                                           int rank)
{
    if (rank == comm->base.rank) return &work->op.call;
    return comm->transport->heard(&comm->base, work->op.sequence, rank);
}

/* Compare the calls of two ranks, and fail if they differ. */
static void dtrain__compare(dtrain__engine *comm, const dtrain__work *work, int first, int second)
{
    const dtrain_call *x = dtrain__shown_by(comm, work, first);
    const dtrain_call *y = dtrain__shown_by(comm, work, second);
    char a[80], b[80];
    if (dtrain__same_call(x, y)) return;
    dtrain__describe(x, 0, a, sizeof a);
    dtrain__describe(y, 0, b, sizeof b);
    (void)dtrain__engine_failf(&comm->base, DTRAIN_ERROR_MISMATCH,
                               "collective #%llu differs: rank %d called %s, rank %d called %s",
                               (unsigned long long)work->op.sequence, comm->base.world_ranks[first],
                               a, comm->base.world_ranks[second], b);
}

/* ---- Progress ---------------------------------------------------------------------------------*/

/* Move one collective as far as possible without waiting; true if it is done. Ranks agree on
 * collectives in the order of their numbers, and the transport moves them first in that order. */
static bool dtrain__collective_advance(dtrain__engine *comm, dtrain__work *work, uint64_t oldest)
{
    const dtrain_transport_ops *transport = comm->transport;
    const int rank = comm->base.rank;
    const void *in[DTRAIN_MAX_RANKS];
    if (work->state == DTRAIN__QUEUED) {
        if (work->op.sequence - oldest >= DTRAIN_WINDOW) return false;
        work->state = DTRAIN__SHOWN;
        dtrain__call_started(comm->base.world, work->op.base.event);
        transport->show(&comm->base, &work->op);
        if (comm->failed) return false;
    }
    if (work->state == DTRAIN__SHOWN) {
        if (work->op.sequence != comm->agreed + 1) return false;
        for (; work->heard < comm->base.size; work->heard++) {
            const dtrain_call *shown = dtrain__shown_by(comm, work, work->heard);
            if (!shown) return false;
            if (dtrain__same_call(shown, &work->op.call)) continue;
            /* The sentence names rank 0 and the first rank with another call. */
            dtrain__compare(comm, work, 0, work->heard ? work->heard : rank);
            return false;
        }
        /* After a failure other ranks can have freed their buffers; small inputs are copies. */
        if (!work->op.small && dtrain__load(&comm->report->state))
            (void)dtrain__engine_fail(&comm->base, DTRAIN_OK, "");
        if (comm->failed) return false;
        comm->agreed = work->op.sequence;
        ++*comm->base.moves;
        for (int i = 0; work->op.small && i < comm->base.size; i++)
            in[i] = i == rank ? work->op.what.send : dtrain__shown_by(comm, work, i) + 1;
        if (work->op.small) dtrain_collective_result(&comm->base, &work->op.what, in);
        work->state = DTRAIN__MOVING;
    }
    work->op.oldest = work->op.sequence == oldest;
    return transport->move(&comm->base, &work->op);
}

/* Move one message. Messages between two ranks in one direction move one after the other. A
 * receiver first hears the sender's call, which must have the receiver's count and dtype. */
static bool dtrain__message_advance(dtrain__engine *comm, dtrain__work *work)
{
    const dtrain_collective *what = &work->op.what;
    const int *world = comm->base.world_ranks;
    if (work->state == DTRAIN__QUEUED) {
        const dtrain__work *first = comm->queue;
        while (first->op.what.kind != what->kind || first->op.what.root != what->root ||
               first->op.posted)
            first = first->next;
        if (first != work) return false;
        work->state = DTRAIN__MOVING;
        dtrain__call_started(comm->base.world, work->op.base.event);
    }
    if (what->kind == DTRAIN_COLLECTIVE_RECV && !work->op.agreed) {
        const dtrain_call *sent = comm->transport->heard(&comm->base, 0, what->root);
        work->op.agreed = sent && sent->count == what->count && sent->dtype == work->op.call.dtype;
        if (sent && !work->op.agreed)
            (void)dtrain__engine_failf(
                &comm->base, DTRAIN_ERROR_MISMATCH,
                "message differs: rank %d sent %s count %llu, rank %d receives %s count %zu",
                world[what->root], dtrain_dtype_name((dtrain_dtype)sent->dtype),
                (unsigned long long)sent->count, world[comm->base.rank],
                dtrain_dtype_name(what->dtype), what->count);
    }
    return !comm->failed && comm->transport->move(&comm->base, &work->op);
}

/* Move everything in flight, oldest first. */
DTRAIN__PRIVATE void dtrain__engine_advance(dtrain__engine *comm)
{
    uint64_t oldest = 0; /* number of the first collective that is not done */
    dtrain__work **link = &comm->queue;
    if (comm->failed) return;
    if (comm->transport->poll) comm->transport->poll(&comm->base);
    while (!comm->failed && *link) {
        dtrain__work *work = *link;
        if (!oldest) oldest = work->op.sequence;
        if (dtrain__copying_in(comm, work))
            return; /* the copies of later operations come after this copy on the copy stream */
        const bool done = work->op.sequence ? dtrain__collective_advance(comm, work, oldest)
                                            : dtrain__message_advance(comm, work);
        if (done && comm->staged)
            (void)dtrain__engine_ok(&comm->base, dtrain__copy_out(comm, work));
        if (comm->failed) return;
        if (!done) {
            link = &work->next;
            continue;
        }
        work->done = true;
        ++*comm->base.moves;
        dtrain__call_done(comm->base.world, work->op.base.event);
        *link = work->next;
        if (!*link) comm->queue_end = link;
        comm->base.in_flight--;
        if (oldest == work->op.sequence) oldest = 0;
    }
}

/* Advance all communicators, `comm` first. Two ranks can wait for two operations in opposite order.
 * If each rank advanced only the communicator of its wait, neither operation would be done. */
static void dtrain__engine_advance_all(dtrain__engine *comm)
{
    dtrain__engine_advance(comm);
    for (dtrain__engine *other = comm->base.world->comms; other; other = other->next) {
        if (other == comm || !other->queue) continue;
        dtrain__engine_advance(other);
        if (!other->queue) dtrain__comm_idle(&other->base, dtrain__now_ns());
    }
}

/* ---- Failure
 *
 * The first rank that finds an error writes it into a report that all ranks can read. Every rank
 * returns that error. */

/* Drop all operations of the communicators that share the report, and return the published failure.
 * If the rank that writes the report died before it was complete, the exit record, which comes some
 * 100 us later, names that rank. */
static dtrain_result dtrain__engine_standing(dtrain__engine *comm)
{
    dtrain__abort_record *report = comm->report;
    dtrain_world *world = comm->base.world;
    for (dtrain__engine *other = world->comms; other; other = other->next) {
        if (other->report != report) continue;
        other->failed = true;
        other->queue = NULL;
        other->queue_end = &other->queue;
        other->base.in_flight = 0;
    }
    if (!dtrain__await_abort(world->control, report)) {
        DTRAIN__TRY(dtrain__trouble(world));
        return dtrain_fail(DTRAIN_ERROR_PEER, "a rank died while it was saying why it gave up");
    }
    if (!world->caused_by) world->caused_by = 1 + report->rank;
    const dtrain_result code = (dtrain_result)report->code;
    if (report->rank == world->rank || code == DTRAIN_ERROR_MISMATCH ||
        code == DTRAIN_ERROR_TIMEOUT || code == DTRAIN_ERROR_PEER)
        return dtrain_fail(code, "%s", report->text);
    return dtrain_fail(DTRAIN_ERROR_PEER, "rank %d had to give up: %s", report->rank, report->text);
}

/* Publish a failure, and return the first failure, which can be an earlier one. */
DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE dtrain_result dtrain__engine_failf(dtrain_comm *base, dtrain_result code,
                                                   const char *format, ...)
{
    dtrain__engine *comm = dtrain__engine_of(base);
    char text[480]; /* an argument can be the last error, or in the report */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (comm->failed) return dtrain__engine_standing(comm);
    if (comm->report == &base->world->control->aborted) dtrain_world_abort(base->world, code, text);
    else
        (void)dtrain__record_abort(base->world->control, comm->report, base->world->rank, code,
                                   text);
    return dtrain__engine_standing(comm);
}

DTRAIN__PRIVATE dtrain_result dtrain__engine_fail(dtrain_comm *comm, dtrain_result code,
                                                  const char *text)
{
    return dtrain__engine_failf(comm, code, "%s", dtrain__bare(text));
}

/* Fail the communicator with the last error unless `result` is DTRAIN_OK; return true if it is. */
DTRAIN__PRIVATE bool dtrain__engine_ok(dtrain_comm *comm, dtrain_result result)
{
    if (result != DTRAIN_OK) (void)dtrain__engine_fail(comm, result, dtrain_last_error());
    return result == DTRAIN_OK;
}

/* ---- Late ranks -------------------------------------------------------------------------------*/

/* Find the number of a rank's last collective, for error sentences. All ranks have shown the
 * collectives that this rank has finished, and no rank is more than a window ahead of another. */
static uint64_t dtrain__last_sequence(const dtrain__engine *comm, int rank)
{
    const dtrain__work *work = comm->queue;
    while (work && !work->op.sequence) work = work->next;
    const uint64_t oldest = work ? work->op.sequence : comm->sequence + 1;
    uint64_t last = oldest + 2 * DTRAIN_WINDOW;
    if (rank == comm->base.rank) return comm->sequence;
    while (last && last + DTRAIN_WINDOW > oldest &&
           !comm->transport->heard(&comm->base, last, rank))
        last--;
    return last;
}

/* Return the operation that `work` waits for: the oldest collective; a message waits for itself. */
static const dtrain__work *dtrain__blocking(const dtrain__engine *comm, const dtrain__work *work)
{
    const dtrain__work *first = work->op.sequence ? comm->queue : work;
    while (first != work && !first->op.sequence) first = first->next;
    return first;
}

/* Fail with a sentence that lists the ranks that `waited` waits for and, if such a rank also waits,
 * the rank that it waits for: "rank 3, which waits for rank 2 (its last was #16)". A circle at a
 * deadline proves nothing: messages of these ranks can be under way on a slow network. */
static void dtrain__engine_timeout(dtrain__engine *comm, const dtrain__work *waited)
{
    const dtrain__work *work = dtrain__blocking(comm, waited);
    const dtrain_world *world = comm->base.world;
    const int size = comm->base.size, *ranks = comm->base.world_ranks;
    const double seconds = 1e-9 * (double)world->timeout_ns;
    bool listed[DTRAIN_MAX_RANKS] = {false};
    char name[128], list[200] = "";
    size_t used = 0;
    if (dtrain__copying_in(comm, waited)) {
        (void)dtrain__engine_failf(
            &comm->base, DTRAIN_ERROR_TIMEOUT,
            "the device did not finish the work before a collective in %.1f s", seconds);
        return;
    }
    for (int k = 0; k < 2 * size && used + 96 < sizeof list; k++) { /* late ranks first */
        const int i = k % size;
        if (!dtrain__waits_for(comm, work, i)) continue;
        const int end = dtrain__behind(world, ranks[i]), behind = end < 0 ? ranks[i] : end;
        if (listed[behind] || (behind == ranks[i]) != (k < size)) continue;
        listed[behind] = true;
        used += (size_t)snprintf(list + used, sizeof list - used, "%srank %d", used ? ", " : "",
                                 ranks[i]);
        if (end != ranks[i])
            used += (size_t)snprintf(list + used, sizeof list - used, ", which waits for rank %d%s",
                                     end < 0 ? dtrain__waits(world, ranks[i]) : end,
                                     end < 0 ? " in a circle" : "");
        for (int at = 0; at < size && end >= 0; at++) {
            if (ranks[at] != behind) continue;
            const uint64_t last = dtrain__last_sequence(comm, at);
            used += (size_t)snprintf(
                list + used, sizeof list - used, " (%s #%llu)",
                work->op.sequence && last >= work->op.sequence ? "stuck in" : "its last was",
                (unsigned long long)last);
        }
    }
    dtrain__describe(&work->op.call, work->op.sequence, name, sizeof name);
    (void)dtrain__engine_failf(
        &comm->base, DTRAIN_ERROR_TIMEOUT,
        "%s: rank %d waited %.1f s for %s; %sif they are only slow, raise timeout_ms", name,
        world->rank, seconds, list[0] ? list : "its own transfers to end",
        strstr(list, "circle") ? "make the same calls on all of them, or " : "");
}

DTRAIN__PRIVATE dtrain_comm *dtrain__comm_numbered(const dtrain_world *world, int64_t number)
{
    dtrain__engine *comm = number ? world->comms : NULL;
    while (comm && comm->base.number != number) comm = comm->next;
    return comm ? &comm->base : NULL;
}

/* ---- Start, test, wait ------------------------------------------------------------------------*/

static void dtrain__recycle(dtrain__engine *comm, dtrain__work *work)
{
    work->next = comm->idle;
    comm->idle = work;
    comm->base.outstanding--;
}

static size_t dtrain__work_bytes(const dtrain__engine *comm)
{
    return offsetof(dtrain__work, op) + comm->transport->work_bytes;
}

static dtrain__work *dtrain__work_at(const dtrain__engine *comm, dtrain__work *block, uint32_t i)
{
    return (dtrain__work *)(void *)((char *)block + i * dtrain__work_bytes(comm));
}

/* Make a block of works for one window. A communicator begins with one block; a program with more
 * operations in flight, messages for instance, gets another block. */
static dtrain_result dtrain__make_works(dtrain__engine *comm)
{
    dtrain__work *block =
        (dtrain__work *)dtrain__alloc(&comm->base.world->allocator, DTRAIN_WINDOW,
                                      dtrain__work_bytes(comm), "operations under way");
    if (!block) return DTRAIN_ERROR_MEMORY;
    block->next_block = comm->blocks;
    comm->blocks = block;
    for (uint32_t i = 0; i < DTRAIN_WINDOW; i++) {
        dtrain__work *work = dtrain__work_at(comm, block, i);
        work->next = comm->idle;
        comm->idle = work;
    }
    return DTRAIN_OK;
}

/* Start an operation. With one rank the result is a copy of the send buffer, and there is nothing
 * to wait for: a copy to or from the device is in the order of its compute stream. */
DTRAIN__PRIVATE dtrain_result dtrain__engine_start(dtrain_comm *base, const dtrain_collective *what,
                                                   dtrain_work **out)
{
    dtrain__engine *comm = dtrain__engine_of(base);
    const size_t bytes = dtrain__send_bytes(what, base->size);
    const size_t kept = offsetof(dtrain__work, heard);
    const dtrain_call call = {what->count, what->kind, (uint32_t)what->dtype, what->op, what->root};
    *out = NULL;
    if (comm->failed) return dtrain__engine_standing(comm);
    if (base->size == 1)
        return what->send == what->recv || bytes == 0
                   ? DTRAIN_OK
                   : dtrain_device_copy(base->world->device, what->recv, what->send, bytes);
    if (!comm->idle && dtrain__make_works(comm) != DTRAIN_OK)
        return dtrain__engine_fail(base, DTRAIN_ERROR_MEMORY, dtrain_last_error());
    dtrain__work *work = comm->idle;
    comm->idle = work->next;
    base->outstanding++;
    memset((char *)work + kept, 0, dtrain__work_bytes(comm) - kept);
    work->next = NULL;
    work->op.base.comm = base;
    work->op.base.event = base->world->timeline.ring->count; /* just recorded */
    work->op.what = *what;
    work->op.send_bytes = dtrain__gives(what, base->rank) ? bytes : 0;
    if (dtrain__gets(what, base->rank)) work->op.recv_bytes = dtrain__recv_bytes(what, base->size);
    work->op.small =
        bytes <= DTRAIN_SMALL_BYTES && bytes * (size_t)base->size <= (size_t)DTRAIN__SMALL_TOTAL;
    work->op.call = call;
    if (!comm->staged || dtrain__engine_ok(base, dtrain__copy_in(comm, work))) {
        if (what->kind != DTRAIN_COLLECTIVE_SEND && what->kind != DTRAIN_COLLECTIVE_RECV)
            work->op.sequence = ++comm->sequence;
        *comm->queue_end = work;
        comm->queue_end = &work->next;
        base->in_flight++;
        dtrain__engine_advance(comm);
    }
    if (comm->failed && !work->done) {
        dtrain__recycle(comm, work);
        return dtrain__engine_standing(comm);
    }
    *out = &work->op.base;
    return DTRAIN_OK;
}

/* Make the rare checks of a wait (NULL: of a test) after dtrain__wait_poll returned `turn`: fail
 * the communicator if there is a circle, or another rank has failed it, has made another call or
 * has left. Before that, advance once more: other ranks can have done their part before they failed
 * or left. */
static void dtrain__engine_check(dtrain__engine *comm, const dtrain__work *waited,
                                 dtrain__wait *wait, dtrain_result turn)
{
    dtrain_world *world = comm->base.world;
    const int *ranks = comm->base.world_ranks, rank = comm->base.rank;
    int waits = -1; /* a rank of the world that this rank waits for: a late rank if there is one */
    char text[DTRAIN__ERROR_BYTES] = "", name[128];
    if (turn == DTRAIN_ERROR_PEER) snprintf(text, sizeof text, "%s", dtrain_last_error());
    if (turn != DTRAIN_OK || dtrain__load(&comm->report->state)) dtrain__engine_advance(comm);
    if (waited->done || comm->failed) return;

    if (wait && turn == DTRAIN_ERROR_PEER) wait->looked_ns = 0; /* it may have found a circle */
    if (wait)
        (void)dtrain__engine_ok(&comm->base, dtrain__look_for_circle(world, comm, waited, wait));
    if (waited->done || comm->failed) return;
    if (turn == DTRAIN_ERROR_PEER) (void)dtrain__engine_fail(&comm->base, turn, text);
    else if (dtrain__load(&comm->report->state)) (void)dtrain__engine_standing(comm);

    /* Check whether a rank has left before its progress: its work before it left counts. */
    const dtrain__work *work = comm->failed ? NULL : dtrain__blocking(comm, waited);
    for (int i = 0; i < comm->base.size && !comm->failed; i++) {
        const bool left = dtrain__left_for(world, ranks[i], comm->transport->grace_ns);
        if (!dtrain__waits_for(comm, work, i)) {
            if (work->op.sequence && work->state == DTRAIN__SHOWN)
                dtrain__compare(comm, work, i < rank ? i : rank, i < rank ? rank : i);
            continue;
        }
        if (waits < 0 || (dtrain__waits(world, waits) >= 0 && dtrain__waits(world, ranks[i]) < 0))
            waits = ranks[i];
        if (!left) continue;
        dtrain__describe(&work->op.call, work->op.sequence, name, sizeof name);
        (void)dtrain__engine_failf(
            &comm->base, DTRAIN_ERROR_PEER,
            "rank %d left after its collective #%llu while rank %d waits in %s", ranks[i],
            (unsigned long long)dtrain__last_sequence(comm, i), ranks[rank], name);
    }
    if (comm->failed) return;
    dtrain__set_waits(world, waits);
    if (turn == DTRAIN_ERROR_TIMEOUT) dtrain__engine_timeout(comm, waited);
}

DTRAIN__PRIVATE dtrain_result dtrain__engine_wait(dtrain_work *base)
{
    dtrain__work *work = dtrain__work_of(base);
    dtrain__engine *comm = dtrain__engine_of(base->comm);
    dtrain_world *world = comm->base.world;
    dtrain__wait wait = dtrain__wait_begin();
    while (!work->done && !comm->failed) {
        dtrain__engine_advance_all(comm);
        if (work->done || comm->failed) break;
        const dtrain_result turn = dtrain__wait_turn(world, &wait);
        if (wait.polled) dtrain__engine_check(comm, work, &wait, turn); /* can set failed */
    }
    bool ok = work->done;
    if (ok && comm->staged) /* later work on the compute stream waits for the copy */
        ok = dtrain__engine_ok(&comm->base,
                               DTRAIN__ORDER(world->device, event_wait, work->bounce.copied, NULL));
    const dtrain_result result = ok ? DTRAIN_OK : dtrain__engine_standing(comm);
    dtrain__recycle(comm, work);
    if (result == DTRAIN_OK && wait.last_ns) dtrain__set_waits(world, -1);
    if (wait.number) dtrain__store(&world->control->long_waits[world->rank].number, (uint64_t)0);
    return result;
}

DTRAIN__PRIVATE dtrain_result dtrain__engine_test(dtrain_work *base, bool *done)
{
    dtrain__work *work = dtrain__work_of(base);
    dtrain__engine *comm = dtrain__engine_of(base->comm);
    dtrain__wait wait = dtrain__wait_begin();
    if (!work->done) dtrain__engine_advance_all(comm);
    if (!work->done && !comm->failed)
        dtrain__engine_check(comm, work, NULL, dtrain__wait_poll(comm->base.world, &wait));
    *done = work->done || comm->failed;
    return work->done || !comm->failed ? DTRAIN_OK : dtrain__engine_standing(comm);
}

/* ---- Memory, making and ending a communicator -------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__engine_alloc(dtrain_comm *base, size_t bytes, void **out)
{
    dtrain__engine *comm = dtrain__engine_of(base);
    dtrain_device *device = base->world->device;
    if (!comm->staged) return comm->transport->map(base, bytes, out);
    DTRAIN__TRY(device->ops->alloc(device, bytes, out));
    const dtrain_result result = device->ops->zero(device, *out, bytes);
    if (result == DTRAIN_OK) return DTRAIN_OK;
    device->ops->free(device, *out, bytes);
    *out = NULL;
    return result;
}

DTRAIN__PRIVATE void dtrain__engine_free(dtrain_comm *base, void *memory, size_t bytes)
{
    dtrain__engine *comm = dtrain__engine_of(base);
    if (comm->staged) base->world->device->ops->free(base->world->device, memory, bytes);
    else comm->transport->unmap(base, memory, bytes);
}

/* Return the bytes of a communicator: the engine's part, the transport's part and world_ranks. */
static size_t dtrain__comm_bytes(const dtrain_transport_ops *transport, int size)
{
    return offsetof(dtrain__engine, base) + transport->comm_bytes + (size_t)size * sizeof(int);
}

/* Free this rank's half of a communicator, and drop operations in flight. */
DTRAIN__PRIVATE dtrain_result dtrain__engine_destroy(dtrain_comm *base)
{
    dtrain__engine *comm = dtrain__engine_of(base);
    const dtrain_allocator *allocator = &base->world->allocator;
    dtrain_device *device = base->world->device;
    dtrain__engine **link = &base->world->comms;
    while (*link != comm) link = &(*link)->next;
    *link = comm->next;
    if (comm->staged) device->ops->synchronize(device); /* end copies into memory freed below */
    while (comm->blocks) {
        dtrain__work *block = comm->blocks;
        comm->blocks = block->next_block;
        for (uint32_t i = 0; i < DTRAIN_WINDOW; i++)
            dtrain__bounce_free(comm, dtrain__work_at(comm, block, i));
        dtrain__free(allocator, block, DTRAIN_WINDOW, dtrain__work_bytes(comm));
    }
    if (comm->stream) device->ops->stream_destroy(device, comm->stream);
    comm->transport->release(base, comm->report != NULL);
    dtrain__free(allocator, comm, 1, dtrain__comm_bytes(comm->transport, base->size));
    return DTRAIN_OK;
}

/* Make this rank's half of a communicator, without the other ranks. */
static dtrain_result dtrain__engine_make(dtrain_world *world, int size, int rank,
                                         dtrain__engine **out, int64_t *address)
{
    const dtrain_transport_ops *transport = world->comm_ops->transport;
    dtrain__engine *comm = (dtrain__engine *)dtrain__alloc(
        &world->allocator, 1, dtrain__comm_bytes(transport, size), "a communicator");
    if (!comm) return DTRAIN_ERROR_MEMORY;
    comm->base.ops = world->comm_ops;
    comm->base.world = world;
    comm->base.moves = &world->moves;
    comm->base.size = size;
    comm->base.rank = rank;
    comm->base.number = world->comm_count++;
    comm->base.world_ranks = (int *)(void *)((char *)&comm->base + transport->comm_bytes);
    comm->transport = transport;
    comm->queue_end = &comm->queue;
    comm->next = world->comms;
    world->comms = comm;
    comm->staged = !world->device->ops->host_memory;
    dtrain_result result = dtrain__make_works(comm);
    if (result == DTRAIN_OK && comm->staged)
        result = DTRAIN__ORDER(world->device, stream_create, true, &comm->stream);
    if (result == DTRAIN_OK) result = transport->make(&comm->base, address);
    if (result == DTRAIN_OK) *out = comm;
    else (void)dtrain__engine_destroy(&comm->base);
    return result;
}

/* Make a communicator of `members` (size) of a parent, or of the world if parent is NULL. All ranks
 * of the parent call it; a rank in no group passes a size of 0. The ranks exchange the addresses of
 * their halves. If a rank could not make its half, its address is 0, and no rank gets a
 * communicator: a group without one of its ranks would wait for ever. If the transport has no
 * shared report, failures of the communicator fail the world. */
static dtrain_result dtrain__engine_form(dtrain_world *world, dtrain_comm *parent,
                                         const int *members, int size, int rank, dtrain_comm **out)
{
    dtrain__engine *comm = NULL;
    int64_t address = 1, addresses[DTRAIN_MAX_RANKS], joined[DTRAIN_MAX_RANKS];
    int lacking = -1;
    dtrain_result result =
        size ? dtrain__engine_make(world, size, rank, &comm, &address) : DTRAIN_OK;
    if (!parent) DTRAIN__TRY(result);
    if (result != DTRAIN_OK) address = 0;
    result = parent ? dtrain__run(parent, DTRAIN_COLLECTIVE_SPLIT, &address, addresses, 1,
                                  DTRAIN_DTYPE_I64, 0, -1, NULL)
                    : dtrain_world_all_gather(world, &address, sizeof address, addresses);
    for (int i = 0; parent && i < parent->size && result == DTRAIN_OK; i++)
        if (!addresses[i]) lacking = i;
    if (lacking >= 0)
        result =
            dtrain_fail(DTRAIN_ERROR_MEMORY,
                        "dtrain_comm_split: rank %d could not make its part: it has no memory, "
                        "or too many communicators have been made; keep them",
                        parent->world_ranks[lacking]);
    if (result != DTRAIN_OK && comm) (void)dtrain__engine_destroy(&comm->base);
    if (result != DTRAIN_OK || !comm) return result;
    for (int i = 0; i < size; i++) {
        joined[i] = addresses[members[i]];
        comm->base.world_ranks[i] = parent ? parent->world_ranks[members[i]] : members[i];
    }
    void *report = comm->transport->join(&comm->base, joined);
    comm->report = report ? (dtrain__abort_record *)report : &world->control->aborted;
    *out = &comm->base;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__engine_create(dtrain_world *world, dtrain_comm **out)
{
    int members[DTRAIN_MAX_RANKS];
    for (int i = 0; i < world->size; i++) members[i] = i;
    world->look_for_circle = dtrain__look_for_circle;
    return dtrain__engine_form(world, NULL, members, world->size, world->rank, out);
}

/* Exchange colors and keys, and make a communicator of the ranks with this rank's color. Its number
 * is new to all members. The groups of one split share the number: no rank is in two of them. */
DTRAIN__PRIVATE dtrain_result dtrain__engine_split(dtrain_comm *base, int color, int key,
                                                   dtrain_comm **out)
{
    dtrain_world *world = base->world;
    int64_t mine[3] = {color < 0 ? -1 : color, key, world->comm_count}, all[DTRAIN_MAX_RANKS][3];
    int members[DTRAIN_MAX_RANKS], size = 0, rank = 0;
    DTRAIN__TRY(
        dtrain__run(base, DTRAIN_COLLECTIVE_SPLIT, mine, all, 3, DTRAIN_DTYPE_I64, 0, -1, NULL));
    for (int i = 0; i < base->size; i++) {
        if (world->comm_count < all[i][2]) world->comm_count = all[i][2];
        if (all[i][0] != mine[0]) continue;
        int at = size++; /* members in the new order: by key, then by old rank */
        for (; at > 0 && all[members[at - 1]][1] > all[i][1]; at--) members[at] = members[at - 1];
        members[at] = i;
    }
    while (members[rank] != base->rank) rank++;
    if (color < 0) world->comm_count++;
    return dtrain__engine_form(world, base, members, color < 0 ? 0 : size, rank, out);
}
