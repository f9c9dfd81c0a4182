/* Timeline
 *
 * A span is a stretch of time of a rank's own thread: a pass, an update, a wait. The library opens
 * and closes spans, and a program can add its own. Each span has a kind. The time of a kind is the
 * time spent in its spans, without the spans inside them:
 *
 *     step         |---------------------------------------------------------|
 *     other, data  |-|--data--|                                              |
 *     forward                 |---------|                                    |
 *     backward                          |-----|   |--------|   |            |
 *     comm: waits                             |---|        |---|             |
 *     optimizer                                                |-------------|
 *
 * So the kinds divide the time of a rank: their sum is the time since the world was made. The
 * trainer computes a step's figures from them, and a trace shows each span. A span costs 0.16 us,
 * half of it for two readings of the clock, and allocates nothing. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "world/world.h"

typedef enum dtrain_span_kind {
    DTRAIN_SPAN_OTHER = 0,      /* no span: the program's own time */
    DTRAIN_SPAN_DATA = 1,       /* the trainer's wait for next_batch */
    DTRAIN_SPAN_FORWARD = 2,    /* the trainer's call of loss */
    DTRAIN_SPAN_BACKWARD = 3,   /* dtrain_tape_backward, dtrain_strategy_finish */
    DTRAIN_SPAN_COMM = 4,       /* calls of communicators: exposed communication */
    DTRAIN_SPAN_OPTIMIZER = 5,  /* unscaling, clipping, the update */
    DTRAIN_SPAN_CHECKPOINT = 6, /* dtrain_checkpoint_save and _wait, and ranks' waits in them */
    DTRAIN_SPAN_KINDS = 7
} dtrain_span_kind;

/* Open a span of the program inside the span that is open now: for the program's forward or
 * backward, or to name a phase in a trace. `name` must live until the span is closed. Only the
 * thread that runs rank_main may call this function. */
DTRAIN_API void dtrain_span_begin(dtrain_world *world, dtrain_span_kind kind, const char *name);
/* Close the innermost open span; do nothing if none is open. */
DTRAIN_API void dtrain_span_end(dtrain_world *world);
