/* Spans: what a rank does when
 *
 * One stack of open spans per rank, and one sum per kind. A look at the clock at the begin and at
 * the end of a span moves what has passed since the look before to the kind that was on top:
 *
 *     looks         0       3     5        9    10
 *     stack         forward comm  (end)    backward
 *     to whom       other 0 fwd 3 comm 2   fwd 4
 *
 * So every nanosecond counts once, and nothing is searched, allocated or written. A function marks
 * the depth when it opens a span, and closes down to that mark: what a callback of the host, or an
 * early return, has left open is closed with it. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "world/timeline.h"
#include "world/timeline_internal.h"
#include "world/trace_internal.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "device/backend.h"
#include "device/device.h"

/* Count the time since the last look to what was going on. */
static void dtrain__span_look(dtrain__timeline *timeline, uint64_t now)
{
    if (now > timeline->since_ns) timeline->spent_ns[timeline->kind] += now - timeline->since_ns;
    timeline->since_ns = now;
}

/* Open a span at a look at the clock that was taken anyway, and return the mark with which it is
 * closed. What ranks wait for each other inside of a checkpoint is part of it. */
DTRAIN__PRIVATE uint32_t dtrain__span_begin_at(dtrain_world *world, uint32_t kind, const char *name,
                                               int64_t number, uint64_t now)
{
    dtrain__timeline *timeline = &world->timeline;
    const uint32_t mark = timeline->depth++;
    dtrain__span_look(timeline, now);
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

/* Close all spans from a mark on. */
DTRAIN__PRIVATE void dtrain__span_end_at(dtrain_world *world, uint32_t mark, uint64_t now)
{
    dtrain__timeline *timeline = &world->timeline;
    dtrain__span_look(timeline, now);
    while (timeline->depth > mark) {
        if (--timeline->depth >= DTRAIN__SPAN_DEPTH) continue;
        const dtrain__open_span *span = &timeline->open[timeline->depth];
        timeline->kind = span->outer;
        if (span->ranged) world->device->ops->range_end(world->device);
        if (timeline->traced)
            dtrain__trace_span(world, DTRAIN__TRACK_RANK, span->kind, span->name, span->text,
                               span->number, span->begin_ns, now);
    }
    if (timeline->depth == 0) dtrain__trace_pause(world, now);
}

/* Open a span now; in a tape without a world, nothing happens. */
DTRAIN__PRIVATE uint32_t dtrain__span_begin(dtrain_world *world, uint32_t kind, const char *name,
                                            int64_t number)
{
    return world ? dtrain__span_begin_at(world, kind, name, number, dtrain__now_ns()) : 0;
}

DTRAIN__PRIVATE void dtrain__span_end(dtrain_world *world, uint32_t mark)
{
    if (world) dtrain__span_end_at(world, mark, dtrain__now_ns());
}

/* Open a span that is only of interest in a trace, and of the kind of the one around it; without
 * one, nothing happens, not even a look at the clock. */
DTRAIN__PRIVATE uint32_t dtrain__detail_begin(dtrain_world *world, const char *name,
                                              const char *text)
{
    if (!world || !world->timeline.traced) return DTRAIN__NO_SPAN;
    const uint32_t mark = dtrain__span_begin(world, world->timeline.kind, name, DTRAIN__UNNUMBERED);
    if (mark < DTRAIN__SPAN_DEPTH) world->timeline.open[mark].text = text;
    return mark;
}

DTRAIN__PRIVATE void dtrain__detail_end(dtrain_world *world, uint32_t mark)
{
    if (mark != DTRAIN__NO_SPAN) dtrain__span_end(world, mark);
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

DTRAIN_API double dtrain_span_seconds(const dtrain_world *world, dtrain_span_kind kind)
{
    if (!world || (uint32_t)kind >= DTRAIN_SPAN_KINDS) return 0;
    const dtrain__timeline *timeline = &world->timeline;
    uint64_t ns = timeline->spent_ns[kind];
    if (timeline->kind == (uint32_t)kind) ns += dtrain__now_ns() - timeline->since_ns;
    return 1e-9 * (double)ns;
}
