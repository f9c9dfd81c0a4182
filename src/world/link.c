/* The link between ranks of a launcher
 *
 * Ranks that a launcher has started are connected as a star. A rank sends what it has to say to
 * rank 0, and rank 0 sends it on to all, the first one included: gather to 0 and broadcast.
 *
 *     rank 1 ----+
 *     rank 2 ----+---- rank 0
 *     rank 3 ----+
 *
 * Three things are said: a record of dtrain_world_all_gather, an exit, an abort. The receiver
 * writes each into its own control page, at the place where a forked rank would have written it in
 * the shared one; hence waits, polls and all-gathers read the page and need not know the link. A
 * socket that closes without an exit means that its rank is lost; keepalive closes the socket of a
 * host that has gone.
 *
 * There is no thread: sockets are polled from inside waits and dtrain_world_poll, and nothing here
 * blocks. Frames come from ranks that know the key of the run (rendezvous.c). They are checked all
 * the same, and a rank that sends nonsense is cut off, because a damaged process should end its run
 * with a sentence instead of damaging the others.
 *
 * The buffer of frames to send is never full. An all-gather returns when the buffer is empty, and a
 * record is taken only if its number is at most one ahead of this rank's own; so at any time the
 * buffer holds at most two records and one exit of each rank, and one abort: less than three
 * frames of full size per rank. A rank that does not read is thus a timeout of the all-gather. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/link_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

#define DTRAIN__FRAME_MAGIC 0x4c4b5444u /* "DTKL" */

DTRAIN__PRIVATE void dtrain__connection_close(dtrain__connection *end)
{
    if (end->socket >= 0) close(end->socket);
    end->socket = -1;
}

DTRAIN__PRIVATE void dtrain__link_destroy(dtrain_world *world)
{
    dtrain__link *link = world->link;
    if (!link) return;
    const size_t count = (size_t)link->count;
    for (size_t i = 0; link->ends && i < count; i++) dtrain__connection_close(&link->ends[i]);
    dtrain__free(&world->allocator, link->out, link->out_room, 1);
    dtrain__free(&world->allocator, link->polls, count, sizeof *link->polls);
    dtrain__free(&world->allocator, link->ends, count, sizeof *link->ends);
    dtrain__free(&world->allocator, link, 1, sizeof *link);
    world->link = NULL;
}

/* On failure, what has been made is freed with the world. */
DTRAIN__PRIVATE dtrain_result dtrain__link_create(dtrain_world *world)
{
    const dtrain_allocator *allocator = &world->allocator;
    const size_t count = world->rank ? 1 : (size_t)world->size;
    dtrain__link *link = (dtrain__link *)dtrain__alloc(allocator, 1, sizeof *link, "a link");
    if (!link) return DTRAIN_ERROR_MEMORY;
    world->link = link;
    link->count = (int)count;
    link->out_room = 3 * count * DTRAIN__FRAME_ROOM;
    link->ends = (dtrain__connection *)dtrain__alloc(allocator, count, sizeof *link->ends,
                                                     "connections of the link");
    link->polls = (struct pollfd *)dtrain__alloc(allocator, count, sizeof *link->polls,
                                                 "connections of the link");
    link->out = (char *)dtrain__alloc(allocator, link->out_room, 1, "frames of the link");
    for (size_t i = 0; link->ends && i < count; i++) {
        link->ends[i].socket = -1;
        link->ends[i].rank = (int)i; /* on ranks other than 0: rank 0 */
    }
    return link->ends && link->polls && link->out ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

/* ---- Frames -----------------------------------------------------------------------------------*/

static size_t dtrain__frame_write(char *out, dtrain__frame_kind kind, int rank, int value,
                                  uint64_t number, const void *data, size_t bytes)
{
    dtrain__frame frame;
    memset(&frame, 0, sizeof frame);
    frame.magic = DTRAIN__FRAME_MAGIC;
    frame.kind = (uint32_t)kind;
    frame.rank = rank;
    frame.value = value;
    frame.number = number;
    frame.bytes = (uint32_t)bytes;
    memcpy(out, &frame, sizeof frame);
    if (bytes) memcpy(out + sizeof frame, data, bytes);
    return sizeof frame + bytes;
}

/* Send one frame past the link's buffer, during the rendezvous: its few frames are the first bytes
 * of a connection and fit in the kernel's buffer. If the connection is broken, the next receive
 * says so. */
DTRAIN__PRIVATE void dtrain__frame_send(dtrain__connection *end, dtrain__frame_kind kind, int rank,
                                        int value, uint64_t number, const void *data, size_t bytes)
{
    char out[DTRAIN__FRAME_ROOM];
    const size_t length = dtrain__frame_write(out, kind, rank, value, number, data, bytes);
    (void)!send(end->socket, out, length, MSG_NOSIGNAL);
}

/* Receive once what is there; false when the other end has closed or failed. */
DTRAIN__PRIVATE bool dtrain__frame_receive(dtrain__connection *end)
{
    const ssize_t got =
        recv(end->socket, end->in + end->in_bytes, sizeof end->in - end->in_bytes, 0);
    if (got > 0) end->in_bytes += (size_t)got;
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

/* Look for a frame at the start of what was received: 1 it is there, 0 not all of it yet, -1 these
 * bytes are no frame. */
DTRAIN__PRIVATE int dtrain__frame_get(const dtrain__connection *end, dtrain__frame *frame)
{
    const uint32_t magic = DTRAIN__FRAME_MAGIC;
    const size_t seen = end->in_bytes < sizeof magic ? end->in_bytes : sizeof magic;
    if (memcmp(end->in, &magic, seen) != 0) return -1;
    if (end->in_bytes < sizeof *frame) return 0;
    memcpy(frame, end->in, sizeof *frame);
    if (frame->bytes > DTRAIN_WORLD_ALL_GATHER_BYTES) return -1;
    return end->in_bytes >= sizeof *frame + frame->bytes;
}

DTRAIN__PRIVATE void dtrain__frame_drop(dtrain__connection *end, const dtrain__frame *frame)
{
    const size_t bytes = sizeof *frame + frame->bytes;
    end->in_bytes -= bytes;
    memmove(end->in, end->in + bytes, end->in_bytes);
}

/* Copy the text that a frame carries and end it by a zero. */
DTRAIN__PRIVATE void dtrain__frame_text(const dtrain__frame *frame, const char *data, char *text,
                                        size_t room)
{
    const size_t length = frame->bytes < room ? frame->bytes : room - 1;
    memcpy(text, data, length);
    text[length] = 0;
}

/* ---- Sending ----------------------------------------------------------------------------------*/

/* Send what the sockets take, and drop from the buffer what all ends have been sent. An end whose
 * connection is broken counts as sent to: the next poll finds it. */
static void dtrain__link_flush(dtrain__link *link)
{
    size_t done = link->out_bytes;
    for (int i = 0; i < link->count; i++) {
        dtrain__connection *end = &link->ends[i];
        while (end->socket >= 0 && end->sent < link->out_bytes) {
            const ssize_t sent =
                send(end->socket, link->out + end->sent, link->out_bytes - end->sent, MSG_NOSIGNAL);
            if (sent > 0) end->sent += (size_t)sent;
            else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
            else if (sent == 0 || errno != EINTR) end->sent = link->out_bytes;
        }
        if (end->socket >= 0 && end->sent < done) done = end->sent;
    }
    link->out_bytes -= done;
    if (done) memmove(link->out, link->out + done, link->out_bytes);
    for (int i = 0; i < link->count; i++)
        link->ends[i].sent -= link->ends[i].socket >= 0 ? done : link->ends[i].sent;
}

/* Put one frame behind those that are being sent. Do nothing in a world without a link and where
 * the control page is shared. There is room: see the top of this file. */
static void dtrain__link_append(dtrain_world *world, dtrain__frame_kind kind, int rank, int value,
                                uint64_t number, const void *data, size_t bytes)
{
    dtrain__link *link = world->link;
    if (!dtrain__is_remote(world)) return;
    link->out_bytes +=
        dtrain__frame_write(link->out + link->out_bytes, kind, rank, value, number, data, bytes);
}

/* Send one frame to rank 0 or, from there, to all: as much of it as the sockets take now. */
DTRAIN__PRIVATE void dtrain__link_send(dtrain_world *world, dtrain__frame_kind kind, int rank,
                                       int value, uint64_t number, const void *data, size_t bytes)
{
    dtrain__link_append(world, kind, rank, value, number, data, bytes);
    if (world->link) dtrain__link_flush(world->link);
}

DTRAIN__PRIVATE bool dtrain__link_all_sent(const dtrain_world *world)
{
    return !dtrain__is_remote(world) || world->link->out_bytes == 0;
}

/* Say whether the control page is this rank's alone, so that news must come through the link. */
DTRAIN__PRIVATE bool dtrain__is_remote(const dtrain_world *world)
{
    return world->link && !world->link->shared;
}

/* ---- Receiving --------------------------------------------------------------------------------*/

/* Write a record into the page. Its number must be next, and not more than one ahead of this rank's
 * own: nobody can have finished an all-gather in which this rank has not taken part. */
static bool dtrain__take_record(dtrain_world *world, const dtrain__frame *frame, const char *data)
{
    dtrain__gather_slot *slot = &world->control->slots[frame->rank];
    const uint64_t number = frame->number, own = world->control->slots[world->rank].sequence;
    if (world->link->shared || number != slot->sequence + 1 || number > own + 1) return false;
    slot->bytes[number % 2] = frame->bytes;
    memcpy(slot->data[number % 2], data, frame->bytes);
    dtrain__store(&slot->sequence, number);
    return true;
}

/* Bring the control page up to what the frame says and, on rank 0, send it on; false when it makes
 * no sense. */
static bool dtrain__frame_apply(dtrain_world *world, const dtrain__connection *end,
                                const dtrain__frame *frame, const char *data)
{
    const int rank = frame->rank;
    bool fresh = true;
    char text[DTRAIN__EXIT_TEXT];
    if (world->rank == 0 ? rank != end->rank : rank < 0 || rank >= world->size) return false;
    if (rank == world->rank) return true; /* rank 0 sends it to all */
    dtrain__frame_text(frame, data, text, sizeof text);
    switch (frame->kind) {
    case DTRAIN__FRAME_GATHER:
        if (!dtrain__take_record(world, frame, data)) return false;
        break;
    case DTRAIN__FRAME_EXIT:
        if (frame->number < DTRAIN__LEFT || frame->number > DTRAIN__LOST) return false;
        fresh = dtrain__load(&world->control->exits[rank].how) == DTRAIN__RUNNING;
        if (fresh)
            dtrain__record_end(world->control, rank, (dtrain__end)frame->number, frame->value,
                               text);
        break;
    case DTRAIN__FRAME_ABORT:
        fresh = dtrain__record_abort(world->control, rank, (dtrain_result)frame->value, text);
        break;
    default: return false;
    }
    if (world->rank == 0 && fresh)
        dtrain__link_append(world, (dtrain__frame_kind)frame->kind, rank, frame->value,
                            frame->number, data, frame->bytes);
    return true;
}

/* Close a connection. A rank that has ended properly has sent its exit before, or written it in the
 * shared page; any other one is lost. */
static void dtrain__link_lost(dtrain_world *world, dtrain__connection *end)
{
    dtrain__connection_close(end);
    if (!dtrain__record_lost(world->control, end->rank) || world->rank) return;
    dtrain__link_append(world, DTRAIN__FRAME_EXIT, end->rank, 0, DTRAIN__LOST, NULL, 0);
}

static void dtrain__link_receive(dtrain_world *world, dtrain__connection *end)
{
    dtrain__frame frame;
    int there;
    const bool open = dtrain__frame_receive(end);
    while ((there = dtrain__frame_get(end, &frame)) == 1) {
        if (!dtrain__frame_apply(world, end, &frame, end->in + sizeof frame)) break;
        dtrain__frame_drop(end, &frame);
    }
    if (there)
        dtrain_log(world, DTRAIN_LOG_ERROR,
                   "rank %d (%s) sent a frame that makes no sense; it is cut off", end->rank,
                   end->name);
    if (there || !open) dtrain__link_lost(world, end);
}

/* Send and receive what can be, waiting up to nap_ms for something to happen. */
DTRAIN__PRIVATE void dtrain__link_pump(dtrain_world *world, int nap_ms)
{
    dtrain__link *link = world->link;
    dtrain__link_flush(link);
    for (int i = 0; i < link->count; i++) {
        link->polls[i].fd = link->ends[i].socket; /* poll() skips -1 */
        link->polls[i].events = link->ends[i].sent < link->out_bytes ? POLLIN | POLLOUT : POLLIN;
        link->polls[i].revents = 0;
    }
    const int ready = poll(link->polls, (nfds_t)link->count, nap_ms);
    for (int i = 0; ready > 0 && i < link->count; i++)
        if (link->polls[i].revents & ~POLLOUT && link->ends[i].socket >= 0)
            dtrain__link_receive(world, &link->ends[i]);
    dtrain__link_flush(link);
}

/* Pump from inside a wait. It costs some microseconds, so at most once a millisecond. */
DTRAIN__PRIVATE void dtrain__link_poll(dtrain_world *world)
{
    const uint64_t now = dtrain__now_ns();
    if (!world->link || now - world->link->polled_ns < 1000000u) return;
    world->link->polled_ns = now;
    dtrain__link_pump(world, 0);
}

/* Say how this rank has ended, as its control page records it, and stay until everybody has been
 * sent it. Rank 0 stays until all ranks have ended, as the parent of forked ranks does, because
 * they hear of each other through it. After a failure the grace period limits both. */
DTRAIN__PRIVATE void dtrain__world_leave(dtrain_world *world, uint32_t grace_ms)
{
    const dtrain__exit_record *own = &world->control->exits[world->rank];
    uint64_t end_ns = 0, now;
    bool all = false;
    dtrain__link_send(world, DTRAIN__FRAME_EXIT, world->rank, own->value, dtrain__load(&own->how),
                      own->error, strlen(own->error));
    while (!all) {
        dtrain__link_pump(world, 20);
        dtrain__world_comm_linger(world);
        now = dtrain__now_ns();
        if (!end_ns && (world->rank || dtrain__trouble(world) != DTRAIN_OK))
            end_ns = now + (uint64_t)grace_ms * 1000000u;
        all = dtrain__link_all_sent(world);
        for (int i = 0; i < world->size && world->rank == 0; i++)
            all = all && dtrain__load(&world->control->exits[i].how) != DTRAIN__RUNNING;
        if (end_ns && now >= end_ns) break;
    }
}
