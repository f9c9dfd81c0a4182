/* Spans as the library opens them: see world/timeline.c. */

#pragma once

#include "core/platform_internal.h"
#include "world/timeline.h"
#include "world/world.h"

#define DTRAIN__SPAN_DEPTH 32u /* deeper ones count to the span that they are in */
#define DTRAIN__UNNUMBERED INT64_MIN
#define DTRAIN__NO_SPAN UINT32_MAX

/* A span that is open. */
typedef struct dtrain__open_span {
    uint64_t begin_ns;
    const char *name, *text; /* text: of what, for a trace; or NULL */
    int64_t number;          /* of its kind of thing: step, unit, ...; or DTRAIN__UNNUMBERED */
    bool ranged;             /* the device's profiler has it, too */
    uint32_t kind, outer;    /* its kind, and that of the span around it */
} dtrain__open_span;

/* The spans of a rank. Only the thread of rank_main uses it. */
typedef struct dtrain__timeline {
    uint64_t spent_ns[DTRAIN_SPAN_KINDS];
    uint64_t since_ns;           /* up to then, spent_ns is complete */
    uint32_t kind;               /* of what has gone on since */
    uint32_t depth;              /* spans that are open */
    bool traced;                 /* events are taken for the trace */
    struct dtrain__trace *trace; /* NULL: none is asked for, see trace.c */
    dtrain__open_span open[DTRAIN__SPAN_DEPTH];
} dtrain__timeline;

/* world/timeline.c */
DTRAIN__PRIVATE uint32_t dtrain__span_begin_at(dtrain_world *world, uint32_t kind, const char *name,
                                               int64_t number, uint64_t now);
DTRAIN__PRIVATE void dtrain__span_end_at(dtrain_world *world, uint32_t mark, uint64_t now);
DTRAIN__PRIVATE uint32_t dtrain__span_begin(dtrain_world *world, uint32_t kind, const char *name,
                                            int64_t number);
DTRAIN__PRIVATE void dtrain__span_end(dtrain_world *world, uint32_t mark);
DTRAIN__PRIVATE uint32_t dtrain__detail_begin(dtrain_world *world, const char *name,
                                              const char *text);
DTRAIN__PRIVATE void dtrain__detail_end(dtrain_world *world, uint32_t mark);
