/* The link
 *
 * Ranks that a launcher has started are connected as a star: each has one TCP connection to rank 0,
 * which passes on what it hears. What travels is the control page: a rank's post, its fate and the
 * report, written into the sender's page first and then told to the others, whose page follows.
 *
 *     rank 1 ----+
 *     rank 2 ----+---- rank 0      a frame: | dtrain__frame, 32 bytes | 0 to 4096 bytes |
 *     rank 3 ----+
 *
 * Nothing is queued: each connection remembers what it has told, and the next frame is made from
 * the page when the last one is out. A post cannot be overwritten before it is told to everybody,
 * because its rank must hear everybody's answer to the next one first.
 *
 * When all ranks are on one host they move to one shared page (world/page.c). From then on the link
 * is silent and serves to notice the death of a rank only: its connection closes, rank 0 sees it
 * and writes it into the page. Keepalive does the same for a host that is lost.
 *
 * No thread: sockets are looked at from inside waits and dtrain_world_poll. Frames come from ranks
 * that have proved to know the key (rendezvous.c); they are checked all the same, and a rank that
 * sends nonsense is cut off. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/link_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

#define DTRAIN__FRAME_MAGIC 0x4c4b5444u /* "DTKL" */

DTRAIN__PRIVATE void dtrain__close(dtrain__connection *end)
{
    if (end->socket >= 0) close(end->socket);
    end->socket = -1;
}

DTRAIN__PRIVATE void dtrain__link_destroy(dtrain_world *world)
{
    dtrain__link *link = world->link;
    if (!link) return;
    const size_t count = (size_t)link->count, table = count * (size_t)world->size;
    for (size_t i = 0; link->ends && i < count; i++) dtrain__close(&link->ends[i]);
    dtrain__free(&world->allocator, link->told_fate, table, sizeof *link->told_fate);
    dtrain__free(&world->allocator, link->told, table, sizeof *link->told);
    dtrain__free(&world->allocator, link->polls, count, sizeof *link->polls);
    dtrain__free(&world->allocator, link->ends, count, sizeof *link->ends);
    dtrain__free(&world->allocator, link, 1, sizeof *link);
    world->link = NULL;
}

DTRAIN__PRIVATE dtrain_result dtrain__link_create(dtrain_world *world)
{
    const size_t size = (size_t)world->size, count = world->rank ? 1 : size;
    dtrain__link *link =
        (dtrain__link *)dtrain__alloc(&world->allocator, 1, sizeof *link, "a control plane");
    if (!link) return DTRAIN_ERROR_MEMORY;
    world->link = link;
    link->count = (int)count;
    link->ends = (dtrain__connection *)dtrain__alloc(&world->allocator, count, sizeof *link->ends,
                                                     "control connections");
    link->polls = (struct pollfd *)dtrain__alloc(&world->allocator, count, sizeof *link->polls,
                                                 "control connections");
    link->told = (uint64_t *)dtrain__alloc(&world->allocator, count * size, sizeof *link->told,
                                           "control connections");
    link->told_fate = (uint32_t *)dtrain__alloc(&world->allocator, count * size,
                                                sizeof *link->told_fate, "control connections");
    for (size_t i = 0; link->ends && i < count; i++) link->ends[i].socket = -1;
    if (!link->ends || !link->polls || !link->told || !link->told_fate) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < count; i++) {
        link->ends[i].rank = (int)i; /* on ranks other than 0: rank 0 */
        link->ends[i].told = link->told + i * size;
        link->ends[i].told_fate = link->told_fate + i * size;
    }
    return DTRAIN_OK;
}

/* ---- Frames in and out ------------------------------------------------------------------------*/

/* There is room: nothing else is on its way out. */
DTRAIN__PRIVATE void dtrain__frame_put(dtrain__connection *end, dtrain__frame_kind kind, int rank,
                                       int value, uint64_t number, const void *data, size_t bytes)
{
    dtrain__frame frame;
    memset(&frame, 0, sizeof frame);
    frame.magic = DTRAIN__FRAME_MAGIC;
    frame.kind = (uint32_t)kind;
    frame.rank = rank;
    frame.value = value;
    frame.number = number;
    frame.bytes = (uint32_t)bytes;
    memcpy(end->out, &frame, sizeof frame);
    if (bytes) memcpy(end->out + sizeof frame, data, bytes);
    end->out_begin = 0;
    end->out_end = sizeof frame + bytes;
}

/* Sends what can be sent now; true when everything is out. On a broken connection it is dropped:
 * the next look at the socket finds that it is broken. */
DTRAIN__PRIVATE bool dtrain__flush(dtrain__connection *end)
{
    while (end->out_begin < end->out_end) {
        const ssize_t sent = send(end->socket, end->out + end->out_begin,
                                  end->out_end - end->out_begin, MSG_NOSIGNAL);
        if (sent > 0) end->out_begin += (size_t)sent;
        else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
        else if (sent == 0 || errno != EINTR) end->out_begin = end->out_end;
    }
    return true;
}

/* Reads once what is there; false when the other end has closed or failed. */
DTRAIN__PRIVATE bool dtrain__receive(dtrain__connection *end)
{
    const ssize_t got =
        recv(end->socket, end->in + end->in_bytes, sizeof end->in - end->in_bytes, 0);
    if (got > 0) end->in_bytes += (size_t)got;
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

/* The frame at the start of what was received: 1 there is one, 0 not all of it yet, -1 nonsense. */
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

/* The text that a frame carries, ended by a zero. */
DTRAIN__PRIVATE void dtrain__frame_text(const dtrain__frame *frame, const char *data, char *text,
                                        size_t room)
{
    const size_t length = frame->bytes < room ? frame->bytes : room - 1;
    memcpy(text, data, length);
    text[length] = 0;
}

/* Brings this page up to what the frame says; false when it makes no sense. */
static bool dtrain__frame_apply(dtrain_world *world, const dtrain__connection *end,
                                const dtrain__frame *frame, const char *data)
{
    dtrain__control *control = world->control;
    const int rank = frame->rank;
    char text[496];
    if (rank < 0 || rank >= world->size || rank == world->rank) return false;
    if (world->rank == 0 && rank != end->rank) return false; /* only rank 0 passes on */
    dtrain__frame_text(frame, data, text, sizeof text);
    switch (frame->kind) {
    case DTRAIN__POST: {
        dtrain__post *post = &control->posts[rank];
        if (world->link->shared || frame->number != post->sequence + 1) return false;
        post->bytes[frame->number % 2] = frame->bytes;
        memcpy(post->data[frame->number % 2], data, frame->bytes);
        dtrain__store(&post->sequence, frame->number);
        return true;
    }
    case DTRAIN__FATE:
        if (frame->number < DTRAIN__LEFT || frame->number > DTRAIN__LOST) return false;
        if (dtrain__load(&control->fates[rank].how) == DTRAIN__RUNNING)
            dtrain__record_end(control, rank, (dtrain__end)frame->number, frame->value, text);
        return true;
    case DTRAIN__REPORT:
        dtrain__record_report(control, rank, (dtrain_result)frame->value, text);
        return true;
    default: return false;
    }
}

/* ---- Telling ----------------------------------------------------------------------------------*/

/* Puts the next thing that this end has not been told about `rank` into its way out. */
static bool dtrain__tell_rank(const dtrain_world *world, dtrain__connection *end, int rank)
{
    const dtrain__control *control = world->control;
    const dtrain__post *post = &control->posts[rank];
    const dtrain__fate *fate = &control->fates[rank];
    if (end->told[rank] < dtrain__load(&post->sequence)) {
        const uint64_t number = ++end->told[rank];
        dtrain__frame_put(end, DTRAIN__POST, rank, 0, number, post->data[number % 2],
                          (size_t)post->bytes[number % 2]);
        return true;
    }
    const uint32_t how = dtrain__load(&fate->how);
    if (end->told_fate[rank] || how == DTRAIN__RUNNING) return false;
    end->told_fate[rank] = 1;
    dtrain__frame_put(end, DTRAIN__FATE, rank, fate->value, how, fate->error, strlen(fate->error));
    return true;
}

/* Rank 0 tells an end about all other ranks; the others tell rank 0 about themselves. */
static bool dtrain__tell_next(const dtrain_world *world, dtrain__connection *end)
{
    const dtrain__report *report = &world->control->report;
    if (!end->told_report && dtrain__load(&report->state) == 2) {
        end->told_report = true;
        const bool due = world->rank ? report->rank == world->rank : report->rank != end->rank;
        if (due) {
            dtrain__frame_put(end, DTRAIN__REPORT, report->rank, report->code, 0, report->text,
                              strlen(report->text));
            return true;
        }
    }
    if (world->rank) return dtrain__tell_rank(world, end, world->rank);
    for (int i = 0; i < world->size; i++)
        if (i != end->rank && dtrain__tell_rank(world, end, i)) return true;
    return false;
}

/* Tells everybody what there is to tell, as far as the sockets take it. */
static void dtrain__link_tell(dtrain_world *world)
{
    dtrain__link *link = world->link;
    const uint64_t news = link->news;
    bool all = true;
    if (link->shared || link->all_told == news) return;
    for (int i = 0; i < link->count; i++) {
        dtrain__connection *end = &link->ends[i];
        while (end->socket >= 0 && dtrain__flush(end))
            if (!dtrain__tell_next(world, end)) break;
        if (end->socket >= 0 && end->out_begin < end->out_end) all = false;
    }
    if (all) link->all_told = news;
}

/* The page has changed here. */
DTRAIN__PRIVATE void dtrain__link_news(dtrain_world *world)
{
    if (!world->link) return;
    world->link->news++;
    dtrain__link_tell(world);
}

/* ---- Listening --------------------------------------------------------------------------------*/

/* The connection is gone. A rank that left or failed has said so first, here or in the page. */
static void dtrain__link_lost(dtrain_world *world, dtrain__connection *end)
{
    dtrain__close(end);
    if (dtrain__load(&world->control->fates[end->rank].how) != DTRAIN__RUNNING) return;
    dtrain__record_lost(world->control, end->rank);
    world->link->news++;
}

static void dtrain__link_hear(dtrain_world *world, dtrain__connection *end)
{
    dtrain__frame frame;
    int there = 0;
    const bool open = dtrain__receive(end);
    while (end->socket >= 0 && (there = dtrain__frame_get(end, &frame)) == 1) {
        if (!dtrain__frame_apply(world, end, &frame, end->in + sizeof frame)) break;
        dtrain__frame_drop(end, &frame);
        world->link->news++;
    }
    if (there)
        dtrain_log(world, DTRAIN_LOG_ERROR,
                   "rank %d (%s) sent a frame that makes no sense; it is "
                   "cut off",
                   end->rank, end->name);
    if (there || !open) dtrain__link_lost(world, end);
}

/* Looks at all sockets, waiting up to nap_ms for something to happen. */
DTRAIN__PRIVATE void dtrain__link_pump(dtrain_world *world, int nap_ms)
{
    dtrain__link *link = world->link;
    dtrain__link_tell(world);
    for (int i = 0; i < link->count; i++) {
        const dtrain__connection *end = &link->ends[i];
        link->polls[i].fd = end->socket; /* -1 is passed over */
        link->polls[i].events = POLLIN;
        if (end->out_begin < end->out_end) link->polls[i].events = POLLIN | POLLOUT;
        link->polls[i].revents = 0;
    }
    const int ready = poll(link->polls, (nfds_t)link->count, nap_ms);
    for (int i = 0; ready > 0 && i < link->count; i++)
        if (link->polls[i].revents & ~POLLOUT && link->ends[i].socket >= 0)
            dtrain__link_hear(world, &link->ends[i]);
    dtrain__link_tell(world);
}

/* From inside waits: a look costs some microseconds, so one a millisecond. */
DTRAIN__PRIVATE void dtrain__link_look(dtrain_world *world)
{
    const uint64_t now = dtrain__now_ns();
    if (!world->link || now - world->link->looked_ns < 1000000u) return;
    world->link->looked_ns = now;
    dtrain__link_pump(world, 0);
}

DTRAIN__PRIVATE bool dtrain__link_all_told(const dtrain_world *world)
{
    return !dtrain__is_remote(world) || world->link->all_told == world->link->news;
}

/* The page is this rank's alone: what is to be waited for comes through the sockets. */
DTRAIN__PRIVATE bool dtrain__is_remote(const dtrain_world *world)
{
    return world->link && !world->link->shared;
}
