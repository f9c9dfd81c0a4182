/* The link between the ranks of a launcher
 *
 * The connections of launched ranks form a star. A rank sends its frames to rank 0, and rank 0
 * forwards them to all ranks, the sender included: a gather to rank 0 and a broadcast.
 *
 *     rank 1 ----+
 *     rank 2 ----+---- rank 0
 *     rank 3 ----+
 *
 * A frame carries a record of dtrain_world_all_gather, an exit, an abort or a wait. The receiver
 * writes it into its private control page, as a forked rank writes it into the shared page. So
 * waits, polls and all-gathers read only the page and do not depend on the link. If a socket closes
 * before an exit has arrived, its rank is lost; keepalive closes the socket of a lost host.
 *
 * There is no thread: waits and dtrain_world_poll poll the sockets, and nothing blocks. Frames come
 * from ranks that know the key of the run (rendezvous.c). The receiver checks lengths, rank numbers
 * and the order of records, so that no frame can damage memory, and disconnects a rank that breaks
 * these rules. It believes the rest.
 *
 * The buffer of frames to send cannot overflow. An all-gather returns when the buffer is empty, and
 * no rank finishes an all-gather without this rank. So another rank is at most one record ahead of
 * this rank, and the buffer holds at most two records and one exit of each rank, and one abort:
 * less than three frames of full size per rank. A rank that does not read makes the all-gather time
 * out. While the buffer holds more than 1 KiB per rank, frames of waits are dropped. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/link_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

#define DTRAIN__CLOCK_ROUNDS 8

DTRAIN__PRIVATE void dtrain__socket_close(int *socket)
{
    if (*socket >= 0) close(*socket);
    *socket = -1;
}

/* Return true if a call on a socket failed for the moment, and the connection still works. */
DTRAIN__PRIVATE bool dtrain__try_again(int error)
{
    return error == EAGAIN || error == EINTR || error == ENOBUFS || error == ENOMEM;
}

DTRAIN__PRIVATE void dtrain__link_destroy(dtrain_world *world)
{
    dtrain__link *link = world->link;
    if (!link) return;
    for (int i = 0; i < link->count; i++) dtrain__socket_close(&link->ends[i].socket);
    dtrain__free(&world->allocator, link, 1, link->bytes);
    world->link = NULL;
}

/* Make a link without connections. One allocation holds its arrays. */
DTRAIN__PRIVATE dtrain_result dtrain__link_create(dtrain_world *world)
{
    const size_t count = world->rank ? 1 : (size_t)world->size;
    const size_t each = sizeof(dtrain__connection) + 3 * DTRAIN__FRAME_ROOM;
    const size_t bytes = sizeof(dtrain__link) + count * each;
    dtrain__link *link = (dtrain__link *)dtrain__alloc(&world->allocator, 1, bytes, "the link");
    if (!link) return DTRAIN_ERROR_MEMORY;
    link->bytes = bytes;
    link->count = (int)count;
    link->ends = (dtrain__connection *)(void *)(link + 1);
    link->out = (char *)(link->ends + count);
    for (size_t i = 0; i < count; i++) link->ends[i].socket = -1;
    world->link = link;
    return DTRAIN_OK;
}

/* ---- Sending ----------------------------------------------------------------------------------*/

/* Send what the sockets accept, and remove what all ends have been sent from the buffer. A broken
 * connection counts as sent: the next receive reports it. */
static void dtrain__link_flush(dtrain__link *link)
{
    size_t done = link->out_bytes;
    for (int i = 0; i < link->count; i++) {
        dtrain__connection *end = &link->ends[i];
        if (end->socket < 0) end->sent = link->out_bytes;
        while (end->sent < link->out_bytes) {
            const ssize_t sent =
                send(end->socket, link->out + end->sent, link->out_bytes - end->sent, MSG_NOSIGNAL);
            if (sent > 0) end->sent += (size_t)sent;
            else if (dtrain__try_again(errno)) break;
            else end->sent = link->out_bytes;
        }
        if (end->sent < done) done = end->sent;
    }
    link->out_bytes -= done;
    if (done) memmove(link->out, link->out + done, link->out_bytes);
    for (int i = 0; i < link->count; i++) link->ends[i].sent -= done;
}

/* Return true if the control page is this rank's copy, which only the link updates. */
DTRAIN__PRIVATE bool dtrain__is_remote(const dtrain_world *world)
{
    return world->link && !world->link->shared;
}

/* Append a frame to the buffer, which has room for it (see the top of this file). Do nothing if
 * there is no link or the control page is shared. */
static void dtrain__link_append(dtrain_world *world, dtrain__frame_kind kind, int rank,
                                const void *data, size_t bytes)
{
    dtrain__link *link = world->link;
    dtrain__frame frame;
    if (!dtrain__is_remote(world)) return;
    frame.kind = (uint32_t)kind;
    frame.bytes = (uint32_t)bytes;
    frame.rank = rank;
    memcpy(link->out + link->out_bytes, &frame, sizeof frame);
    if (bytes) memcpy(link->out + link->out_bytes + sizeof frame, data, bytes);
    link->out_bytes += sizeof frame + bytes;
}

/* Append a frame for rank 0 or, on rank 0, for all ranks; then send what the sockets accept. */
DTRAIN__PRIVATE void dtrain__link_send(dtrain_world *world, dtrain__frame_kind kind, int rank,
                                       const void *data, size_t bytes)
{
    dtrain__link_append(world, kind, rank, data, bytes);
    if (world->link) dtrain__link_flush(world->link);
}

/* Return the first rank that has not been sent the whole buffer; -1 if there is none. */
DTRAIN__PRIVATE int dtrain__link_unsent(const dtrain_world *world)
{
    const dtrain__link *link = world->link;
    for (int i = 0; link && i < link->count; i++)
        if (link->ends[i].sent < link->out_bytes) return i;
    return -1;
}

/* ---- Receiving --------------------------------------------------------------------------------*/

/* Write a frame from rank `from` into the control page and, on rank 0, forward it; false if the
 * frame is malformed. */
static bool dtrain__frame_apply(dtrain_world *world, int from, const dtrain__frame *frame,
                                const char *data)
{
    dtrain__control *control = world->control;
    const int rank = frame->rank;
    bool news = true;
    if (world->rank == 0 ? rank != from : rank < 0 || rank >= world->size) return false;
    if (rank == world->rank) return true; /* rank 0 forwards a frame to its sender, too */
    if (frame->kind == DTRAIN__FRAME_GATHER) {
        dtrain__gather_slot *slot = &control->slots[rank];
        const uint64_t number = slot->sequence + 1;
        if (world->link->shared || number > control->slots[world->rank].sequence + 1) return false;
        slot->bytes[number % 2] = frame->bytes;
        memcpy(slot->data[number % 2], data, frame->bytes);
        dtrain__store(&slot->sequence, number);
    } else if (frame->kind == DTRAIN__FRAME_EXIT && frame->bytes == sizeof(dtrain__exit_record)) {
        dtrain__exit_record end;
        memcpy(&end, data, sizeof end);
        end.error[sizeof end.error - 1] = 0;
        if (end.how == DTRAIN__RUNNING || end.how > DTRAIN__LOST || end.after < 0 ||
            end.after > world->size)
            return false;
        news = dtrain__load(&control->exits[rank].how) == DTRAIN__RUNNING;
        if (news) control->exits[rank].after = end.after;
        if (news) dtrain__record_end(control, rank, (dtrain__end)end.how, end.value, end.error);
    } else if (frame->kind == DTRAIN__FRAME_ABORT && frame->bytes == sizeof(dtrain__abort_record)) {
        dtrain__abort_record abort;
        memcpy(&abort, data, sizeof abort);
        abort.text[sizeof abort.text - 1] = 0;
        news = dtrain__record_abort(control, &control->aborted, rank, (dtrain_result)abort.code,
                                    abort.text);
    } else if (frame->kind == DTRAIN__FRAME_WAIT && frame->bytes == sizeof(int32_t)) {
        int32_t target;
        memcpy(&target, data, sizeof target);
        if (target < 0 || target >= world->size) return false;
        dtrain__store(&control->waits[rank],
                      dtrain__now_ns() / 1000000u << 16 | (uint64_t)(target + 1));
        news = dtrain__link_takes_waits(world->link);
    } else return false;
    if (world->rank == 0 && news)
        dtrain__link_append(world, (dtrain__frame_kind)frame->kind, rank, data, frame->bytes);
    return true;
}

/* Receive once from rank `from`, and apply complete frames. If the other end has closed the
 * connection or has sent a malformed frame, close it: the rank is lost, unless its exit has been
 * recorded. */
static void dtrain__link_receive(dtrain_world *world, int from)
{
    dtrain__connection *end = &world->link->ends[from];
    dtrain__frame frame;
    bool sane = true;
    const ssize_t got =
        recv(end->socket, end->in + end->in_bytes, sizeof end->in - end->in_bytes, 0);
    bool open = got > 0 || (got < 0 && dtrain__try_again(errno));
    /* A socket that has been unreadable for a whole deadline counts as closed. */
    if (got >= 0 || errno == EAGAIN || errno == EINTR) end->unread_ns = 0;
    else if (!end->unread_ns) end->unread_ns = dtrain__now_ns();
    else if (dtrain__now_ns() - end->unread_ns >= world->timeout_ns) open = false;
    if (got > 0) end->in_bytes += (size_t)got;
    while (sane && end->in_bytes >= sizeof frame) {
        memcpy(&frame, end->in, sizeof frame);
        const size_t whole = sizeof frame + frame.bytes;
        sane = frame.bytes <= DTRAIN_WORLD_ALL_GATHER_BYTES;
        if (!sane || end->in_bytes < whole) break;
        sane = dtrain__frame_apply(world, from, &frame, end->in + sizeof frame);
        end->in_bytes -= whole;
        memmove(end->in, end->in + whole, end->in_bytes);
    }
    if (sane && open) return;
    if (!sane)
        dtrain_log(world, DTRAIN_LOG_ERROR,
                   "rank %d (%s) sent a frame that makes no sense; it is cut off", from, end->name);
    dtrain__socket_close(&end->socket);
    if (dtrain__record_lost(world->control, from) && world->rank == 0)
        dtrain__link_append(world, DTRAIN__FRAME_EXIT, from, &world->control->exits[from],
                            sizeof world->control->exits[from]);
}

/* Wait up to nap_ms for a ready socket, then send and receive without blocking. */
DTRAIN__PRIVATE void dtrain__link_pump(dtrain_world *world, int nap_ms)
{
    dtrain__link *link = world->link;
    struct pollfd polls[DTRAIN_MAX_RANKS];
    dtrain__link_flush(link);
    for (int i = 0; i < link->count; i++) {
        polls[i].fd = link->ends[i].socket; /* poll() skips -1 */
        polls[i].events = link->ends[i].sent < link->out_bytes ? POLLIN | POLLOUT : POLLIN;
        polls[i].revents = 0;
    }
    const bool blind = poll(polls, (nfds_t)link->count, nap_ms) < 0; /* then read all sockets */
    for (int i = 0; i < link->count; i++)
        if (polls[i].revents & ~POLLOUT || (blind && polls[i].fd >= 0))
            dtrain__link_receive(world, i);
    dtrain__link_flush(link);
}

/* Measure the offset between rank 0's clock and this rank's, once, after the rendezvous, so that
 * tools can align traces. In each round rank 0 reads its clock after it has received this rank's
 * reading of the previous round. So half of the time from that reading to the end of the round
 * bounds the error (Cristian, "Probabilistic Clock Synchronization", 1989). Keep the best round. */
DTRAIN__PRIVATE dtrain_result dtrain__clocks_compare(dtrain_world *world)
{
    uint64_t mine = 0, all[DTRAIN_MAX_RANKS];
    for (int round = 0; round <= DTRAIN__CLOCK_ROUNDS; round++) {
        const uint64_t before = mine;
        mine = dtrain__now_ns();
        DTRAIN__TRY(dtrain_world_all_gather(world, &mine, sizeof mine, all));
        const uint64_t half = (dtrain__now_ns() - before) / 2;
        if (!world->rank || !round || (round > 1 && half >= world->clock_error_ns)) continue;
        world->clock_error_ns = half;
        world->clock_offset_ns = (int64_t)(all[0] - (before + half));
    }
    return DTRAIN_OK;
}

/* Send and receive during a wait: at most once a millisecond, because it takes microseconds. */
DTRAIN__PRIVATE void dtrain__link_poll(dtrain_world *world)
{
    const uint64_t now = dtrain__now_ns();
    if (!world->link || now - world->link->polled_ns < 1000000u) return;
    world->link->polled_ns = now;
    dtrain__link_pump(world, 0);
}
