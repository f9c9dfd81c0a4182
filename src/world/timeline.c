/* The timeline: what a rank does when
 *
 *     spans: passes, updates, waits ----+                    +--> sums of kinds (dtrain_span_kind)
 *     calls: collectives, messages -----+--> ring of events -+--> a trace file      monitor/trace.c
 *     spans of other threads -----------+                    +--> a dump            comm/flight.c
 *
 * One call records a span or a collective; traces, dumps and sums of time read these records. The
 * ring lies in private memory and is made with the world. Recording takes no lock, allocates
 * nothing and makes no system call. Only the thread of rank_main records: threads that write
 * checkpoints or read data ahead store their times with their results.
 *
 * Open spans are a stack, and each kind has a sum. Each reading of the clock adds the time since
 * the previous reading to the kind of the innermost span:
 *
 *     readings      0       3     5        9    10
 *     stack         forward comm  (end)    backward
 *     counts to     other 0 fwd 3 comm 2   fwd 4
 *
 * So every nanosecond counts once. A function that opens a span marks the depth, and closes all
 * spans down to that mark: also spans that a callback of the host or an early return left open. A
 * span is recorded at its end, and only for a trace.
 *
 * A call is recorded at its begin, with or without a trace: a rank that hangs is in a call. The
 * times of queued and started calls are the last reading of the clock by a call or wait.
 *
 *     dtrain__run: queued     engine: started     engine, wait or test: done
 *          |                                                       |
 *          +-- enter -- wait_poll: beat, every 10 us or so -- leave -+
 *
 * The control page has the pulse of each rank: its last call, and when it was last inside the
 * library. So the dumps of waiting ranks show the position of a rank that dumps nothing because it
 * hangs, is stopped or is dead. Ranks of several hosts share no memory and see no pulse. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/timeline.h"
#include "world/timeline_internal.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "device/backend.h"
#include "device/device.h"

#define DTRAIN__TRACE_EVENTS 8192u /* default number of unwritten events: 1.75 MiB */

/* Make the ring. Its room is a power of two, so finding an event takes no division. With a trace
 * the ring also holds unwritten events. */
DTRAIN__PRIVATE dtrain_result dtrain__timeline_create(dtrain_world *world,
                                                      const char *dump_directory,
                                                      const dtrain_trace_desc *trace,
                                                      dtrain__dump_fn dump)
{
    const size_t unwritten = trace->event_count ? trace->event_count : DTRAIN__TRACE_EVENTS;
    size_t room = DTRAIN__FLIGHT_RECORDS;
    while (trace->path && trace->path[0] && room < unwritten) room *= 2;
    dtrain__ring *ring = (dtrain__ring *)dtrain__alloc(
        &world->allocator, 1, sizeof *ring + room * sizeof *ring->events, "its events");
    if (!ring) return DTRAIN_ERROR_MEMORY;
    world->timeline.ring = ring;
    ring->room = room;
    ring->dump = dump;
    ring->asked = dtrain__dumps_asked();
    snprintf(ring->directory, sizeof ring->directory, "%s", dump_directory ? dump_directory : "");
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__timeline_destroy(dtrain_world *world)
{
    dtrain__ring *ring = world->timeline.ring;
    if (world->timeline.reader) world->timeline.reader->end(world);
    world->timeline.ring = NULL;
    world->timeline.reader = NULL;
    if (ring)
        dtrain__free(&world->allocator, ring, 1, sizeof *ring + ring->room * sizeof *ring->events);
}

/* ---- Events -----------------------------------------------------------------------------------*/

/* Find an event; NULL if a newer event has replaced it. */
DTRAIN__PRIVATE dtrain__event *dtrain__event_at(const dtrain_world *world, uint64_t number)
{
    dtrain__ring *ring = world->timeline.ring;
    if (!ring || !number || ring->count - number >= ring->room) return NULL;
    return &ring->events[number & (ring->room - 1)];
}

/* Return the place of the next event. */
static dtrain__event *dtrain__event_next(dtrain_world *world)
{
    dtrain__ring *ring = world->timeline.ring;
    if (world->timeline.traced) world->timeline.reader->room(world);
    return &ring->events[++ring->count & (ring->room - 1)];
}

/* Copy two names into an event; NULL is "". */
static void dtrain__event_names(dtrain__event *event, const char *name, const char *of)
{
    const size_t room = of && of[0] ? 48 : DTRAIN__EVENT_NAME - 1;
    const size_t used = strlen(dtrain__name_cut(event->name, room, name)) + 1;
    dtrain__name_cut(event->name + used, DTRAIN__EVENT_NAME - used, of);
}

/* Add the time since the last reading of the clock to the kind of the innermost span. */
static void dtrain__tick(dtrain_world *world, uint64_t now)
{
    dtrain__timeline *timeline = &world->timeline;
    if (now > timeline->since_ns) timeline->spent_ns[timeline->kind] += now - timeline->since_ns;
    timeline->since_ns = now;
}

/* ---- Spans ------------------------------------------------------------------------------------*/

/* Open a span at the time `now`, and return the mark that closes it. Waits for other ranks during a
 * checkpoint count as checkpoint. */
static uint32_t dtrain__span_begin_at(dtrain_world *world, uint32_t kind, const char *name,
                                      int64_t number, uint64_t now)
{
    dtrain__timeline *timeline = &world->timeline;
    const uint32_t mark = timeline->depth++;
    dtrain__tick(world, now);
    if (mark >= DTRAIN__SPAN_DEPTH) return mark;
    dtrain__open_span *span = &timeline->open[mark];
    span->begin_ns = now;
    span->name = name;
    span->text = NULL;
    span->number = number;
    span->outer = timeline->kind;
    if (kind == DTRAIN_SPAN_COMM && timeline->kind == DTRAIN_SPAN_CHECKPOINT)
        kind = DTRAIN_SPAN_CHECKPOINT;
    span->kind = timeline->kind = kind;
    span->ranged = world->device && world->device->ops->range_begin;
    if (span->ranged) world->device->ops->range_begin(world->device, name);
    return mark;
}

/* Close all spans down to a mark. */
static void dtrain__span_end_at(dtrain_world *world, uint32_t mark, uint64_t now)
{
    dtrain__timeline *timeline = &world->timeline;
    dtrain__tick(world, now);
    while (timeline->depth > mark) {
        if (--timeline->depth >= DTRAIN__SPAN_DEPTH) continue;
        const dtrain__open_span *span = &timeline->open[timeline->depth];
        timeline->kind = span->outer;
        if (span->ranged) world->device->ops->range_end(world->device);
        dtrain__span_add(world, DTRAIN__TRACK_RANK, span->kind, span->name, span->text,
                         span->number, span->begin_ns, now);
    }
    if (timeline->depth == 0 && timeline->traced) timeline->reader->pause(world, now);
}

/* Open a span now; do nothing without a world (a tape can have none). */
DTRAIN__PRIVATE uint32_t dtrain__span_begin(dtrain_world *world, uint32_t kind, const char *name,
                                            int64_t number)
{
    return world ? dtrain__span_begin_at(world, kind, name, number, dtrain__now_ns()) : 0;
}

DTRAIN__PRIVATE void dtrain__span_end(dtrain_world *world, uint32_t mark)
{
    if (world && mark != DTRAIN__NO_SPAN) dtrain__span_end_at(world, mark, dtrain__now_ns());
}

/* Set what a span works on; text must live until the span is closed. */
DTRAIN__PRIVATE void dtrain__span_of(dtrain_world *world, uint32_t mark, const char *text)
{
    if (world && mark < DTRAIN__SPAN_DEPTH) world->timeline.open[mark].text = text;
}

/* Open a span that only a trace shows. Its kind is that of the span around it. Without a trace,
 * neither its begin nor its end reads the clock. */
DTRAIN__PRIVATE uint32_t dtrain__detail_begin(dtrain_world *world, const char *name,
                                              const char *text)
{
    if (!world || !world->timeline.traced) return DTRAIN__NO_SPAN;
    const uint32_t mark = dtrain__span_begin(world, world->timeline.kind, name, DTRAIN__UNNUMBERED);
    dtrain__span_of(world, mark, text);
    return mark;
}

/* Record a span that has ended, for the trace. */
DTRAIN__PRIVATE void dtrain__span_add(dtrain_world *world, uint32_t track, uint32_t kind,
                                      const char *name, const char *text, int64_t number,
                                      uint64_t begin_ns, uint64_t end_ns)
{
    if (!world->timeline.traced) return;
    dtrain__event *event = dtrain__event_next(world);
    event->begin_ns = begin_ns;
    event->end_ns = end_ns;
    event->number = number;
    event->call.kind = NULL;
    event->track = track;
    event->kind = (uint8_t)kind;
    dtrain__event_names(event, name, text);
}

/* Return the seconds that this rank has spent in spans of a kind since its world was made. */
DTRAIN__PRIVATE double dtrain__span_seconds(const dtrain_world *world, dtrain_span_kind kind)
{
    const dtrain__timeline *timeline = &world->timeline;
    uint64_t ns = timeline->spent_ns[kind];
    if (timeline->kind == (uint32_t)kind) ns += dtrain__now_ns() - timeline->since_ns;
    return 1e-9 * (double)ns;
}

/* ---- Calls ------------------------------------------------------------------------------------*/

/* Label this rank's next call, immediately before it. The call copies `part` and `name`; both can
 * be NULL. */
DTRAIN__PRIVATE void dtrain__call_label(dtrain_world *world, const char *part, int64_t number,
                                        const char *name)
{
    dtrain__ring *ring = world->timeline.ring;
    if (!ring) return;
    ring->part = part;
    ring->part_name = name;
    ring->part_number = number;
}

/* Record a call in the ring and in this rank's pulse, and return the number of its event. */
DTRAIN__PRIVATE uint64_t dtrain__call_queued(dtrain_world *world, const dtrain__comm_call *call)
{
    dtrain__ring *ring = world->timeline.ring;
    if (!ring) return 0;
    dtrain__event *event = dtrain__event_next(world);
    event->begin_ns = world->timeline.since_ns;
    event->started_ns = event->end_ns = 0;
    event->state = DTRAIN__CALL_QUEUED;
    event->call = *call;
    event->track = DTRAIN__TRACK_CALL;
    event->number = ring->part ? ring->part_number : DTRAIN__UNNUMBERED;
    dtrain__event_names(event, ring->part, ring->part ? ring->part_name : NULL);
    ring->part = NULL;
    if (!call->sequence) return ring->count;
    dtrain__pulse *pulse = &world->control->pulses[world->rank];
    dtrain__store(&pulse->comm, call->comm);
    dtrain__store(&pulse->first, (int64_t)call->first);
    dtrain__store(&pulse->sequence, call->sequence);
    if (call->comm == 0) dtrain__store(&pulse->world_started, call->sequence);
    return ring->count;
}

DTRAIN__PRIVATE void dtrain__call_started(const dtrain_world *world, uint64_t number)
{
    dtrain__event *event = dtrain__event_at(world, number);
    if (!event || event->state != DTRAIN__CALL_QUEUED) return;
    event->state = DTRAIN__CALL_STARTED;
    event->started_ns = world->timeline.since_ns;
}

/* Record that a call is done. The engine records it at once, dtrain_work_wait and dtrain_work_test
 * record it for every backend: the first record counts. */
DTRAIN__PRIVATE void dtrain__call_done(dtrain_world *world, uint64_t number)
{
    dtrain__event *event = dtrain__event_at(world, number);
    if (!event || event->state >= DTRAIN__CALL_DONE) return;
    if (!event->started_ns) event->started_ns = event->begin_ns;
    event->state = DTRAIN__CALL_DONE;
    event->end_ns = dtrain__now_ns();
    if (event->call.comm == 0 && event->call.sequence)
        dtrain__store(&world->control->pulses[world->rank].world_done, event->call.sequence);
    if (world->timeline.traced) world->timeline.reader->late(world, number);
}

/* ---- Signs of life ----------------------------------------------------------------------------*/

/* Write a dump, if the launch desc names a directory. */
static void dtrain__dump_now(dtrain_world *world)
{
    const dtrain__ring *ring = world->timeline.ring;
    if (ring->directory[0] && ring->dump(world, ring->directory) != DTRAIN_OK)
        dtrain_log(world, DTRAIN_LOG_WARNING, "%s", dtrain__bare(dtrain_last_error()));
}

/* Update the time in this rank's pulse, and dump if a signal has requested it. */
DTRAIN__PRIVATE void dtrain__beat(dtrain_world *world, uint64_t now)
{
    dtrain__ring *ring = world->timeline.ring;
    dtrain__tick(world, now);
    if (!ring) return;
    dtrain__store(&world->control->pulses[world->rank].beat_ns, now);
    const uint32_t asked = dtrain__dumps_asked();
    if (asked == ring->asked) return;
    ring->asked = asked;
    if (world->catches && ring->code == DTRAIN_OK) dtrain__dump_now(world);
}

/* Enter a public call that can wait for other ranks, and return the time. */
DTRAIN__PRIVATE uint64_t dtrain__enter(dtrain_world *world, const char *name)
{
    const uint64_t now = dtrain__now_ns();
    (void)dtrain__span_begin_at(world, DTRAIN_SPAN_COMM, name, DTRAIN__UNNUMBERED, now);
    if (world->timeline.ring)
        dtrain__store(&world->control->pulses[world->rank].inside, (uint64_t)1);
    dtrain__beat(world, now);
    return now;
}

/* Leave that call, and return the time. Its span is the innermost: the library leaves none open. */
DTRAIN__PRIVATE uint64_t dtrain__leave(dtrain_world *world, dtrain_result result)
{
    const uint64_t now = dtrain__now_ns();
    dtrain__span_end_at(world, world->timeline.depth - 1, now);
    dtrain__beat(world, now);
    if (world->timeline.ring)
        dtrain__store(&world->control->pulses[world->rank].inside, (uint64_t)0);
    if (result == DTRAIN_OK) *dtrain__last_code() = DTRAIN_OK;
    dtrain__failed(world, result);
    return now;
}

/* Note the first failure of this rank, whose sentence is the last error, and write a dump if the
 * launch desc names a directory. Later failures are consequences. The last error stays the same. */
DTRAIN__PRIVATE void dtrain__failed(dtrain_world *world, dtrain_result code)
{
    dtrain__ring *ring = world->timeline.ring;
    char found[DTRAIN__ERROR_BYTES];
    if (!ring || code == DTRAIN_OK || ring->code != DTRAIN_OK) return;
    const uint64_t now = dtrain__now_ns();
    dtrain__tick(world, now);
    ring->code = code;
    snprintf(found, sizeof found, "%s", dtrain_last_error());
    snprintf(ring->error, sizeof ring->error, "%s", dtrain__bare(found));
    for (uint64_t i = 0; i < ring->room && i < ring->count; i++) {
        dtrain__event *event = &ring->events[(ring->count - i) & (ring->room - 1)];
        if (!event->call.kind || event->state >= DTRAIN__CALL_DONE) continue;
        event->state = DTRAIN__CALL_FAILED;
        event->end_ns = now;
    }
    dtrain__dump_now(world);
    (void)dtrain__set_last_error(code, found);
}

/* ---- JSON for traces and dumps, without allocating --------------------------------------------*/

DTRAIN__PRIVATE void dtrain__writer_flush(dtrain__writer *out)
{
    size_t at = 0;
    while (at < out->used && !out->error) {
        const ssize_t wrote = write(out->file, out->text + at, out->used - at);
        if (wrote > 0) at += (size_t)wrote;
        else if (wrote < 0 && errno != EINTR) out->error = errno;
    }
    out->bytes += at;
    out->used = 0;
}

/* Append at most DTRAIN__WRITER_PIECE bytes. */
DTRAIN__PRIVATE void dtrain__writer_add(dtrain__writer *out, const char *format, ...)
{
    va_list args;
    if (out->used > out->room - DTRAIN__WRITER_PIECE) dtrain__writer_flush(out);
    va_start(args, format);
    out->used += (size_t)vsnprintf(out->text + out->used, DTRAIN__WRITER_PIECE, format, args);
    va_end(args);
}

/* Append a string member. Control characters and bytes that are not UTF-8 become '?'. */
DTRAIN__PRIVATE void dtrain__writer_string(dtrain__writer *out, const char *name, const char *text)
{
    char shown[DTRAIN__ERROR_BYTES];
    dtrain__name_cut(shown, sizeof shown, text);
    dtrain__writer_add(out, "\"%s\":\"", name);
    for (text = dtrain__visible(shown); *text; text++) {
        if (out->used > out->room - 4) dtrain__writer_flush(out);
        if (*text == '"' || *text == '\\') out->text[out->used++] = '\\';
        out->text[out->used++] = *text;
    }
    dtrain__writer_add(out, "\"");
}

/* Append the members of a call that traces and dumps have in common. */
DTRAIN__PRIVATE void dtrain__writer_call(dtrain__writer *out, const dtrain__event *event)
{
    static const char *const ops[] = {"", "sum", "mean", "min", "max", "prod"};
    const dtrain__comm_call *call = &event->call;
    const dtrain_dtype dtype = (dtrain_dtype)call->dtype;
    const bool bytes = call->comm < 0;
    const char *of = event->name + strlen(event->name) + 1;
    char by[DTRAIN__EVENT_NAME + 32] = "";
    if (event->name[0])
        snprintf(by, sizeof by, "%s %lld%s%s", event->name, (long long)event->number,
                 of[0] ? ", " : "", of);
    dtrain__writer_string(out, "of", by);
    dtrain__writer_add(out,
                       ",\"communicator\":%lld,\"sequence\":%llu,\"op\":\"%s\",\"dtype\":\"%s\",",
                       (long long)call->comm, (unsigned long long)call->sequence,
                       ops[call->op < sizeof ops / sizeof ops[0] ? call->op : 0],
                       bytes ? "byte" : dtrain_dtype_name(dtype));
    dtrain__writer_add(out, "\"count\":%llu,\"bytes\":%llu", (unsigned long long)call->count,
                       (unsigned long long)(call->count * (bytes ? 1 : dtrain_dtype_bytes(dtype))));
    if (call->axis) dtrain__writer_add(out, ",\"axis\":\"%s\"", call->axis);
}

/* ---- Public calls -----------------------------------------------------------------------------*/

DTRAIN_API void dtrain_span_begin(dtrain_world *world, dtrain_span_kind kind, const char *name)
{
    const bool known = (uint32_t)kind < DTRAIN_SPAN_KINDS;
    (void)dtrain__span_begin(world, known ? (uint32_t)kind : (uint32_t)DTRAIN_SPAN_OTHER,
                             name ? name : "span", DTRAIN__UNNUMBERED);
}

DTRAIN_API void dtrain_span_end(dtrain_world *world)
{
    if (world && world->timeline.depth) dtrain__span_end(world, world->timeline.depth - 1);
}
