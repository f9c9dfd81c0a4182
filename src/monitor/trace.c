/* Traces: the events of a rank over time, for Perfetto
 *
 * A trace reads the timeline's events (world/timeline.c). Rank r writes FILE.rank<r>.json: an array
 * in the Trace Event Format (Google, "Trace Event Format", 2016). Complete events ("X") have times
 * in microseconds; the process is the rank, the thread a track. Flow arrows ("s", "f") lead from
 * the start of a bucket's collective to the collective. Metadata ("M") has names, and the offset
 * from this rank's clock to rank 0's. Each event is a line, and the array's end can be missing:
 * viewers open the file of a killed rank, too.
 *
 * Events stay in the ring until an outermost span ends and half of the room is used or a second has
 * passed. Then they are written at once, 64 KiB per system call. If the room is full earlier, they
 * are written at once, and the writing is an event itself. A call in flight is written when it is
 * done.
 *
 * Calls overlap and events of one track must not, so each call gets the first free lane. A span
 * with its event costs 0.8 us, the writing included (Xeon; without a trace 0.16 us). */

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

typedef struct dtrain__trace {
    dtrain__writer out;        /* its file is -1 after the end of the trace */
    uint32_t room;             /* largest number of unwritten events */
    uint64_t next;             /* number of the first unwritten event */
    uint64_t lost, written_ns; /* calls without an event in the file; time of the last writing */
    uint64_t first_step, end_step, file_bytes;
    uint64_t lanes[DTRAIN__TRACE_LANES]; /* end of the last call in each lane */
    bool named[DTRAIN__TRACE_TRACKS];
    char path[1100], text[65536];
} dtrain__trace;

/* ---- Events -----------------------------------------------------------------------------------*/

/* Begin the line of an event, of at most DTRAIN__WRITER_PIECE bytes. Each write ends between two
 * lines, and so does the file of a killed rank. */
static void dtrain__trace_line(dtrain_world *world, const char *phase, uint32_t track)
{
    dtrain__writer *out = &world->timeline.trace->out;
    if (out->used > out->room - 2 * DTRAIN__WRITER_PIECE) dtrain__writer_flush(out);
    dtrain__writer_add(out, ",\n{\"ph\":\"%s\",\"pid\":%d,\"tid\":%u", phase, world->rank, track);
}

static void dtrain__trace_time(dtrain__writer *out, const char *key, uint64_t ns)
{
    dtrain__writer_add(out, ",\"%s\":%llu.%03u", key, (unsigned long long)(ns / 1000u),
                       (unsigned)(ns % 1000u));
}

/* Name a track before its first event. Viewers sort tracks by the index. */
static void dtrain__trace_track(dtrain_world *world, uint32_t track)
{
    dtrain__trace *trace = world->timeline.trace;
    char name[40] = "rank thread";
    if (trace->named[track]) return;
    trace->named[track] = true;
    if (track == DTRAIN__TRACK_CALL) snprintf(name, sizeof name, "communication");
    else if (track == DTRAIN__TRACK_CHECKPOINT) snprintf(name, sizeof name, "checkpoint writer");
    else if (track >= DTRAIN__TRACK_READ)
        snprintf(name, sizeof name, "data %u", track - DTRAIN__TRACK_READ);
    else if (track >= DTRAIN__TRACK_TENSOR)
        snprintf(name, sizeof name, "tensor axis %u", track - DTRAIN__TRACK_TENSOR + 1);
    else if (track > DTRAIN__TRACK_CALL)
        snprintf(name, sizeof name, "communication %u", track - DTRAIN__TRACK_CALL + 1);
    dtrain__trace_line(world, "M", track);
    dtrain__writer_add(&trace->out, ",\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}", name);
    dtrain__trace_line(world, "M", track);
    dtrain__writer_add(&trace->out, ",\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%u}}",
                       track);
}

/* End the array and close the file. */
static void dtrain__trace_close(dtrain_world *world)
{
    dtrain__trace *trace = world->timeline.trace;
    dtrain__writer *out = &trace->out;
    world->timeline.traced = false;
    if (out->file < 0) return;
    if (trace->lost) {
        dtrain__trace_line(world, "M", DTRAIN__TRACK_RANK);
        dtrain__writer_add(out, ",\"name\":\"dtrain_lost\",\"args\":{\"events\":%llu}}",
                           (unsigned long long)trace->lost);
    }
    dtrain__writer_add(out, "\n]\n");
    dtrain__writer_flush(out);
    close(out->file);
    out->file = -1;
    if (out->error)
        dtrain_log(world, DTRAIN_LOG_WARNING, "the trace %s ends here, it cannot be written: %s",
                   trace->path, strerror(out->error));
}

/* Write an event that a flush has passed, because it was a call in flight. The file can end after
 * it. The arrow of a bucket's collective begins in the track of the rank. A call gets the first
 * lane that is free since the call began. Calls of the tensor axis, for which layers wait, have
 * separate lanes. */
static void dtrain__trace_put(dtrain_world *world, uint64_t number)
{
    static const char *const kinds[] = {"other", "data",      "forward",   "backward",
                                        "comm",  "optimizer", "checkpoint"};
    dtrain__trace *trace = world->timeline.trace;
    dtrain__writer *out = &trace->out;
    const dtrain__event *event = dtrain__event_at(world, number);
    const bool call = event->call.kind != NULL;
    const char *of = event->name + strlen(event->name) + 1;
    uint32_t track = event->track;
    if (number >= trace->next) return;
    if (call) {
        const uint32_t tensor = DTRAIN__TRACK_TENSOR - DTRAIN__TRACK_CALL;
        const bool separate = event->call.axis && strcmp(event->call.axis, "tensor") == 0;
        const uint32_t end = separate ? (uint32_t)DTRAIN__TRACE_LANES : tensor;
        uint32_t lane = separate ? tensor : 0;
        while (lane < end && trace->lanes[lane] > event->begin_ns) lane++;
        if (lane == end) {
            trace->lost++;
            return;
        }
        trace->lanes[lane] = event->end_ns;
        track = DTRAIN__TRACK_CALL + lane;
    }
    dtrain__trace_track(world, track);
    dtrain__trace_line(world, "X", track);
    dtrain__trace_time(out, "ts", event->begin_ns);
    dtrain__trace_time(out, "dur", event->end_ns - event->begin_ns);
    dtrain__writer_add(out, ",\"cat\":\"%s\",", call ? "collective" : kinds[event->kind]);
    dtrain__writer_string(out, "name", call ? event->call.kind : event->name);
    dtrain__writer_add(out, ",\"args\":{");
    if (event->number != DTRAIN__UNNUMBERED)
        dtrain__writer_add(out, "\"number\":%lld%s", (long long)event->number,
                           call || of[0] ? "," : "");
    if (call) dtrain__writer_call(out, event);
    else if (of[0]) dtrain__writer_string(out, "of", of);
    dtrain__writer_add(out, "}}");
    for (int i = 0; i < 2 && call && event->name[0]; i++) {
        dtrain__trace_line(world, i ? "f" : "s", i ? track : (uint32_t)DTRAIN__TRACK_RANK);
        dtrain__trace_time(out, "ts", event->begin_ns);
        dtrain__writer_add(out, ",\"id\":%llu,\"cat\":\"flow\",\"name\":\"started\"%s}",
                           (unsigned long long)((uint64_t)(world->restart_count & 15u) << 48 |
                                                (uint64_t)world->rank << 40 | number),
                           i ? ",\"bp\":\"e\"" : "");
    }
    if (out->bytes + out->used < trace->file_bytes) return;
    dtrain_log(world, DTRAIN_LOG_WARNING,
               "the trace %s ends here: it has %llu bytes; see dtrain_trace_desc.file_bytes",
               trace->path, (unsigned long long)(out->bytes + out->used));
    dtrain__trace_close(world);
}

/* Write all events but calls in flight, and an event for the writing. */
static void dtrain__trace_flush(dtrain_world *world)
{
    dtrain__trace *trace = world->timeline.trace;
    const uint64_t begin = dtrain__now_ns();
    while (world->timeline.traced && trace->next <= world->timeline.ring->count) {
        const uint64_t number = trace->next++;
        if (dtrain__event_at(world, number)->end_ns) dtrain__trace_put(world, number);
    }
    if (trace->out.file >= 0) dtrain__writer_flush(&trace->out);
    if (trace->out.error) dtrain__trace_close(world);
    trace->written_ns = dtrain__now_ns();
    dtrain__span_add(world, DTRAIN__TRACK_RANK, DTRAIN_SPAN_OTHER, "trace is written", NULL,
                     DTRAIN__UNNUMBERED, begin, trace->written_ns);
}

/* ---- Functions that the timeline calls --------------------------------------------------------*/

/* Make room for one more event. */
static void dtrain__trace_room(dtrain_world *world)
{
    const dtrain__ring *ring = world->timeline.ring;
    dtrain__trace *trace = world->timeline.trace;
    if (ring->count + 1 - trace->next >= trace->room) dtrain__trace_flush(world);
    const dtrain__event *oldest = &ring->events[(ring->count + 1) & (ring->room - 1)];
    if (oldest->call.kind && !oldest->end_ns) trace->lost++;
}

/* Write if it is time: the rank is between two spans. */
static void dtrain__trace_pause(dtrain_world *world, uint64_t now)
{
    const dtrain__trace *trace = world->timeline.trace;
    if (world->timeline.ring->count + 1 - trace->next > trace->room / 2 ||
        now - trace->written_ns > 1000000000u)
        dtrain__trace_flush(world);
}

/* Begin a step: the trace begins with the first step that desc asks for, and ends after the
 * last. */
static void dtrain__trace_step(dtrain_world *world, int64_t step)
{
    dtrain__trace *trace = world->timeline.trace;
    if (trace->out.file < 0) return;
    if (!world->timeline.traced) trace->next = world->timeline.ring->count + 1;
    world->timeline.traced = (uint64_t)step >= trace->first_step;
    if ((uint64_t)step < trace->end_step) return;
    dtrain__trace_flush(world);
    dtrain__trace_close(world);
}

/* Write the rest when the world ends. */
static void dtrain__trace_end(dtrain_world *world)
{
    dtrain__trace *trace = world->timeline.trace;
    dtrain__trace_flush(world);
    dtrain__trace_close(world);
    dtrain__free(&world->allocator, trace, 1, sizeof *trace);
}

/* Open the file of this rank, and write names and clock. The file's name has the rank, and after a
 * restart its number: "a/run.json" becomes "a/run.rank3.json", then "a/run.rank3.restart1.json". */
DTRAIN__PRIVATE dtrain_result dtrain__trace_create(dtrain_world *world,
                                                   const dtrain_trace_desc *desc)
{
    static const dtrain__event_reader reader = {dtrain__trace_room, dtrain__trace_put,
                                                dtrain__trace_pause, dtrain__trace_step,
                                                dtrain__trace_end};
    const char *const path = desc->path, *slash = strrchr(path, '/'), *dot = strrchr(path, '.');
    const size_t stem = dot && (!slash || dot > slash + 1) ? (size_t)(dot - path) : strlen(path);
    char again[32] = "", host[72] = "";
    if (desc->event_count && desc->event_count < 64)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: trace.event_count is %u, expected 0 or at least 64",
                           desc->event_count);
    dtrain__trace *trace =
        (dtrain__trace *)dtrain__alloc(&world->allocator, 1, sizeof *trace, "a trace");
    if (!trace) return DTRAIN_ERROR_MEMORY;
    dtrain__writer *out = &trace->out;
    world->timeline.trace = trace;
    world->timeline.reader = &reader;
    out->file = -1;
    out->text = trace->text;
    out->room = sizeof trace->text;
    trace->room = desc->event_count ? desc->event_count : (uint32_t)world->timeline.ring->room;
    trace->next = world->timeline.ring->count + 1;
    if (world->restart_count) snprintf(again, sizeof again, ".restart%u", world->restart_count);
    if ((size_t)snprintf(trace->path, sizeof trace->path, "%.*s.rank%d%s%s", (int)stem, path,
                         world->rank, again, path + stem) >= sizeof trace->path)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_launch: trace.path is too long");
    out->file = dtrain__open(trace->path, O_WRONLY | O_CREAT | O_TRUNC);
    if (out->file < 0)
        return dtrain_fail(DTRAIN_ERROR_FILE, "the trace %s cannot be written: %s", trace->path,
                           strerror(errno));
    trace->first_step = desc->first_step;
    trace->end_step = desc->step_count
                          ? desc->first_step + desc->step_count + (desc->first_step == 0)
                          : UINT64_MAX;
    trace->file_bytes = desc->file_bytes ? desc->file_bytes : UINT64_C(256) << 20;
    trace->written_ns = dtrain__now_ns();
    world->timeline.traced = desc->first_step == 0;
    if (gethostname(host, sizeof host - 1) != 0) host[0] = 0;
    dtrain__writer_add(out,
                       "[{\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"name\":\"process_name\","
                       "\"args\":{\"name\":\"rank %d\"}}",
                       world->rank, world->rank);
    dtrain__trace_line(world, "M", 0);
    dtrain__writer_add(out, ",\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}}",
                       world->rank);
    dtrain__trace_line(world, "M", 0);
    dtrain__writer_add(out,
                       ",\"name\":\"dtrain\",\"args\":{\"version\":\"%s\",\"rank\":%d,"
                       "\"size\":%d,\"node\":%d,\"restart\":%u,\"clock_offset_ns\":%lld,"
                       "\"clock_error_ns\":%llu,",
                       DTRAIN_VERSION_STRING, world->rank, world->size, world->node,
                       world->restart_count, (long long)world->clock_offset_ns,
                       (unsigned long long)world->clock_error_ns);
    dtrain__writer_string(out, "host", host);
    dtrain__writer_add(out, "}}");
    return DTRAIN_OK;
}
