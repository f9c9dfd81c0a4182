/* Traces: what a rank did when, for Perfetto
 *
 *     spans (timeline.c) ----------+
 *     collectives (flight.c) ------+--> events, in memory --> text, 64 KiB --> FILE.rank3.json
 *     what other threads have done +    of a fixed size
 *
 * The file is an array of events as in the Trace Event Format (Google, "Trace Event Format", 2016):
 * complete events ("X") with times in microseconds; the process is the rank, the thread a track;
 * flow arrows ("s", "f") from where a bucket's collective is started to the collective; metadata
 * ("M") with names, and with what has to be added to times to make them rank 0's. Each event is a
 * line, and the array's end may be missing: a rank that is killed leaves a file that viewers open.
 *
 * Events are held back until a span that is in no other one ends and half of the memory is used or
 * a second has passed: then they are written at once, 64 KiB a call. When memory is full before,
 * they are written where the rank is, and what that took is an event itself. A span
 * and its event cost 0.8 us, the writing included (Xeon; without a trace 0.16 us).
 *
 * Collectives overlap and events of a track may not, so each gets the first lane that is free.
 *
 * There is no lock. The threads that write checkpoints and read data ahead note their times where
 * they leave their results, and the rank's thread makes the events when it takes those. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/timeline.h"
#include "world/timeline_internal.h"
#include "world/trace_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

static const char *const dtrain__span_names[] = {"other", "data",      "forward",   "backward",
                                                 "comm",  "optimizer", "checkpoint"};

/* ---- Text -------------------------------------------------------------------------------------*/

/* Write what there is. The first failure ends the trace, with a warning; the run goes on. */
static void dtrain__trace_write(dtrain_world *world)
{
    dtrain__trace *trace = world->timeline.trace;
    size_t at = 0;
    int error = 0;
    while (trace->file >= 0 && at < trace->text_bytes && !error) {
        const ssize_t wrote = write(trace->file, trace->text + at, trace->text_bytes - at);
        if (wrote > 0) at += (size_t)wrote;
        else if (wrote < 0 && errno != EINTR) error = errno;
    }
    trace->bytes += at;
    trace->text_bytes = 0;
    if (!error) return;
    close(trace->file);
    trace->file = -1;
    world->timeline.traced = false;
    dtrain_log(world, DTRAIN_LOG_WARNING, "the trace %s ends here, it cannot be written: %s",
               trace->path, strerror(error));
}

/* Append a piece of an event, which as a whole has no more than DTRAIN__TRACE_LINE bytes. */
DTRAIN__PRINTF(2, 3)
static void dtrain__trace_print(dtrain__trace *trace, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    trace->text_bytes += (size_t)vsnprintf(trace->text + trace->text_bytes,
                                           sizeof trace->text - trace->text_bytes, format, args);
    va_end(args);
}

/* Append a JSON string. What is not ASCII becomes a question mark, as in flight records. */
static void dtrain__trace_string(dtrain__trace *trace, const char *text)
{
    char *at = trace->text + trace->text_bytes;
    *at++ = '"';
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') *at++ = '\\';
        *at++ = c < 32 || c > 126 ? '?' : (char)c;
    }
    *at++ = '"';
    trace->text_bytes = (size_t)(at - trace->text);
}

/* Begin an event: there is room for all of it. */
static void dtrain__trace_line(dtrain_world *world, const char *phase, uint32_t track)
{
    dtrain__trace *trace = world->timeline.trace;
    if (trace->text_bytes > sizeof trace->text - DTRAIN__TRACE_LINE) dtrain__trace_write(world);
    dtrain__trace_print(trace, ",\n{\"ph\":\"%s\",\"pid\":%d,\"tid\":%u", phase, world->rank,
                        track);
}

static void dtrain__trace_time(dtrain__trace *trace, const char *key, uint64_t ns)
{
    dtrain__trace_print(trace, ",\"%s\":%llu.%03u", key, (unsigned long long)(ns / 1000u),
                        (unsigned)(ns % 1000u));
}

/* Name a track before its first event. Viewers sort by the index: in the order of the numbers. */
static void dtrain__trace_track(dtrain_world *world, uint32_t track)
{
    dtrain__trace *trace = world->timeline.trace;
    char name[40] = "rank thread";
    if (trace->named[track]) return;
    trace->named[track] = true;
    if (track == DTRAIN__TRACK_COLLECTIVE) snprintf(name, sizeof name, "communication");
    else if (track == DTRAIN__TRACK_CHECKPOINT) snprintf(name, sizeof name, "checkpoint writer");
    else if (track >= DTRAIN__TRACK_READ)
        snprintf(name, sizeof name, "data %u", track - DTRAIN__TRACK_READ);
    else if (track > DTRAIN__TRACK_COLLECTIVE)
        snprintf(name, sizeof name, "communication %u", track - DTRAIN__TRACK_COLLECTIVE + 1);
    dtrain__trace_line(world, "M", track);
    dtrain__trace_print(trace, ",\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}", name);
    dtrain__trace_line(world, "M", track);
    dtrain__trace_print(trace, ",\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%u}}",
                        track);
}

/* Write an arrow from where a collective was started to where it is shown. */
static void dtrain__trace_flow(dtrain_world *world, const dtrain__trace_event *event,
                               const char *phase, uint32_t track)
{
    dtrain__trace *trace = world->timeline.trace;
    dtrain__trace_line(world, phase, track);
    dtrain__trace_time(trace, "ts", event->begin_ns);
    dtrain__trace_print(trace, ",\"id\":%llu,\"cat\":\"flow\",\"name\":\"started\"%s}",
                        (unsigned long long)event->flow, *phase == 'f' ? ",\"bp\":\"e\"" : "");
}

static void dtrain__trace_event_write(dtrain_world *world, const dtrain__trace_event *event)
{
    dtrain__trace *trace = world->timeline.trace;
    const bool collective = event->dtype != NULL;
    const char *separator = "";
    dtrain__trace_track(world, event->track);
    dtrain__trace_line(world, "X", event->track);
    dtrain__trace_time(trace, "ts", event->begin_ns);
    dtrain__trace_time(trace, "dur", event->end_ns - event->begin_ns);
    dtrain__trace_print(trace, ",\"cat\":\"%s\",\"name\":",
                        collective ? "collective" : dtrain__span_names[event->kind]);
    dtrain__trace_string(trace, event->name);
    dtrain__trace_print(trace, ",\"args\":{");
    if (event->number != DTRAIN__UNNUMBERED) {
        dtrain__trace_print(trace, "\"number\":%lld", (long long)event->number);
        separator = ",";
    }
    if (event->text[0]) {
        dtrain__trace_print(trace, "%s\"of\":", separator);
        dtrain__trace_string(trace, event->text);
        separator = ",";
    }
    if (collective)
        dtrain__trace_print(trace,
                            "%s\"bytes\":%llu,\"count\":%llu,\"dtype\":\"%s\",\"op\":\"%s\","
                            "\"communicator\":%lld,\"sequence\":%llu",
                            separator, (unsigned long long)event->bytes,
                            (unsigned long long)event->count, event->dtype, event->op,
                            (long long)event->comm, (unsigned long long)event->sequence);
    dtrain__trace_print(trace, "}}");
    if (!event->flow) return;
    dtrain__trace_flow(world, event, "s", DTRAIN__TRACK_RANK);
    dtrain__trace_flow(world, event, "f", event->track);
}

/* ---- Events -----------------------------------------------------------------------------------*/

/* End the array and close the file: a trace that is whole. */
static void dtrain__trace_close(dtrain_world *world)
{
    dtrain__trace *trace = world->timeline.trace;
    world->timeline.traced = false;
    if (trace->file < 0) return;
    if (trace->lost) {
        dtrain__trace_line(world, "M", DTRAIN__TRACK_RANK);
        dtrain__trace_print(trace, ",\"name\":\"dtrain_lost\",\"args\":{\"events\":%llu}}",
                            (unsigned long long)trace->lost);
    }
    dtrain__trace_print(trace, "\n]\n");
    dtrain__trace_write(world);
    if (trace->file >= 0) close(trace->file);
    trace->file = -1;
}

/* Write all events that are held back. */
static void dtrain__trace_flush(dtrain_world *world)
{
    dtrain__trace *trace = world->timeline.trace;
    const uint64_t begin = dtrain__now_ns();
    for (uint32_t i = 0; i < trace->used && trace->file >= 0; i++) {
        dtrain__trace_event_write(world, &trace->events[i]);
        if (trace->bytes + trace->text_bytes < trace->file_bytes) continue;
        dtrain_log(world, DTRAIN_LOG_WARNING,
                   "the trace %s ends here: it has %llu bytes; see dtrain_trace_desc.file_bytes",
                   trace->path, (unsigned long long)(trace->bytes + trace->text_bytes));
        dtrain__trace_close(world);
    }
    trace->used = 0;
    if (trace->text_bytes && trace->file >= 0) dtrain__trace_write(world);
    trace->written_ns = dtrain__now_ns();
    if (!world->timeline.traced) return;
    dtrain__trace_event *own = &trace->events[trace->used++];
    memset(own, 0, sizeof *own);
    own->begin_ns = begin;
    own->end_ns = trace->written_ns;
    snprintf(own->name, sizeof own->name, "trace is written");
    own->number = DTRAIN__UNNUMBERED;
    own->track = DTRAIN__TRACK_RANK;
}

/* Give a collective the first lane that is free since it began; none: it is lost. */
static bool dtrain__trace_lane(dtrain__trace *trace, dtrain__trace_event *event)
{
    for (uint32_t lane = 0; lane < DTRAIN__TRACE_LANES; lane++) {
        if (trace->lanes[lane] > event->begin_ns) continue;
        trace->lanes[lane] = event->end_ns;
        event->track = DTRAIN__TRACK_COLLECTIVE + lane;
        return true;
    }
    return false;
}

/* Take an event. */
DTRAIN__PRIVATE void dtrain__trace_put(dtrain_world *world, const dtrain__trace_event *event)
{
    dtrain__trace *trace = world->timeline.trace;
    if (!world->timeline.traced) return;
    if (trace->used == trace->room) dtrain__trace_flush(world);
    if (!world->timeline.traced) return; /* the file has ended */
    dtrain__trace_event *place = &trace->events[trace->used];
    *place = *event;
    if (event->track != DTRAIN__TRACK_COLLECTIVE || dtrain__trace_lane(trace, place)) trace->used++;
    else trace->lost++;
}

/* Take a span that is over. */
DTRAIN__PRIVATE void dtrain__trace_span(dtrain_world *world, uint32_t track, uint32_t kind,
                                        const char *name, const char *text, int64_t number,
                                        uint64_t begin_ns, uint64_t end_ns)
{
    dtrain__trace_event event;
    memset(&event, 0, sizeof event);
    event.begin_ns = begin_ns;
    event.end_ns = end_ns;
    event.number = number;
    event.track = track;
    event.kind = kind;
    snprintf(event.name, sizeof event.name, "%s", name);
    snprintf(event.text, sizeof event.text, "%s", text ? text : "");
    dtrain__trace_put(world, &event);
}

/* Write, if it is time to: the rank is between two spans. */
DTRAIN__PRIVATE void dtrain__trace_pause(dtrain_world *world, uint64_t now)
{
    dtrain__trace *trace = world->timeline.trace;
    if (!world->timeline.traced) return;
    if (trace->used > trace->room / 2 || now - trace->written_ns > 1000000000u)
        dtrain__trace_flush(world);
}

/* Begin a step: those outside of what was asked for are left out, and behind the last one the file
 * is complete. */
DTRAIN__PRIVATE void dtrain__trace_step(dtrain_world *world, int64_t step)
{
    dtrain__trace *trace = world->timeline.trace;
    if (!trace) return;
    if (trace->file >= 0) world->timeline.traced = (uint64_t)step >= trace->first_step;
    if (trace->file < 0 || (uint64_t)step < trace->end_step) return;
    dtrain__trace_flush(world);
    dtrain__trace_close(world);
}

/* ---- Life -------------------------------------------------------------------------------------*/

/* Put the rank into a file's name, and the number of the restart: "a/run.json" becomes
 * "a/run.rank3.json", and after a restart "a/run.rank3.restart1.json". */
static bool dtrain__trace_name(const dtrain_world *world, const char *path, char *name, size_t room)
{
    const char *slash = strrchr(path, '/'), *dot = strrchr(path, '.');
    const size_t stem = dot && (!slash || dot > slash + 1) ? (size_t)(dot - path) : strlen(path);
    char again[32] = "";
    if (world->restart_count) snprintf(again, sizeof again, ".restart%u", world->restart_count);
    const int used =
        snprintf(name, room, "%.*s.rank%d%s%s", (int)stem, path, world->rank, again, path + stem);
    return used > 0 && (size_t)used < room;
}

/* Write what the file is about: names, and the clock. */
static void dtrain__trace_head(dtrain_world *world)
{
    dtrain__trace *trace = world->timeline.trace;
    char host[72] = "";
    if (gethostname(host, sizeof host - 1) != 0) host[0] = 0;
    dtrain__trace_print(trace,
                        "[{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_name\","
                        "\"args\":{\"name\":\"rank %d\"}}",
                        world->rank, world->rank);
    dtrain__trace_line(world, "M", 0);
    dtrain__trace_print(trace, ",\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}}",
                        world->rank);
    dtrain__trace_line(world, "M", 0);
    dtrain__trace_print(trace,
                        ",\"name\":\"dtrain\",\"args\":{\"version\":\"%s\",\"rank\":%d,"
                        "\"size\":%d,\"node\":%d,\"restart\":%u,\"clock_offset_ns\":%lld,"
                        "\"clock_error_ns\":%llu,\"host\":",
                        DTRAIN_VERSION_STRING, world->rank, world->size, world->node,
                        world->restart_count, (long long)world->clock_offset_ns,
                        (unsigned long long)world->clock_error_ns);
    dtrain__trace_string(trace, host);
    dtrain__trace_print(trace, "}}");
}

/* Open the file of this rank and take all the memory that the trace needs; nothing is done when
 * none is asked for. */
DTRAIN__PRIVATE dtrain_result dtrain__trace_create(dtrain_world *world,
                                                   const dtrain_trace_desc *desc)
{
    const uint32_t room = desc->event_count ? desc->event_count : DTRAIN__TRACE_EVENTS;
    dtrain__trace *trace;
    if (!desc->path || !desc->path[0]) return DTRAIN_OK;
    if (room < 64)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: trace.event_count is %u, expected 0 or at least 64",
                           room);
    trace = (dtrain__trace *)dtrain__alloc(&world->allocator, 1,
                                           sizeof *trace + room * sizeof *trace->events, "a trace");
    if (!trace) return DTRAIN_ERROR_MEMORY;
    trace->file = -1;
    trace->room = room;
    world->timeline.trace = trace;
    if (!dtrain__trace_name(world, desc->path, trace->path, sizeof trace->path))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_launch: trace.path is too long");
    trace->file = dtrain__open(trace->path, O_WRONLY | O_CREAT | O_TRUNC);
    if (trace->file < 0)
        return dtrain_fail(DTRAIN_ERROR_FILE, "the trace %s cannot be written: %s", trace->path,
                           strerror(errno));
    trace->first_step = desc->first_step;
    trace->end_step = desc->step_count
                          ? desc->first_step + desc->step_count + (desc->first_step == 0)
                          : UINT64_MAX;
    trace->file_bytes = desc->file_bytes ? desc->file_bytes : UINT64_C(256) << 20;
    trace->written_ns = dtrain__now_ns();
    world->timeline.traced = desc->first_step == 0;
    dtrain__trace_head(world);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__trace_destroy(dtrain_world *world)
{
    dtrain__trace *trace = world->timeline.trace;
    if (!trace) return;
    dtrain__trace_flush(world);
    dtrain__trace_close(world);
    world->timeline.trace = NULL;
    dtrain__free(&world->allocator, trace, 1, sizeof *trace + trace->room * sizeof *trace->events);
}
