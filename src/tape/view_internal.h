/* The tape's functions for a trainer
 *
 * A trainer uses these functions, the public API and tape/stage_internal.h; it reads and writes no
 * member of a tape or a tensor. */

#pragma once

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "strategy/view_internal.h"
#include "tape/stage_internal.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "device/backend.h"
#include "device/device.h"

/* Return the samples over which a loss is a mean. */
static inline dtrain__samples dtrain__samples_of(const dtrain_tensor *loss)
{
    return ((const dtrain__tape_tensor *)loss)->samples;
}

/* Return the stage that has made a tensor; -1: an input. */
static inline int dtrain__stage_of(const dtrain_tensor *made)
{
    return ((const dtrain__tape_tensor *)made)->stage;
}

/* End a pass without a backward: take part in sums of losses. Collective over the data axis. */
static inline dtrain_result dtrain__pass_end(const dtrain_tape *tape)
{
    return dtrain__end_sums(tape->strategy, tape->pass.sums, false);
}

/* Return the hash of the inputs since the last call. The first call begins it. */
static inline uint64_t dtrain__inputs_hash(dtrain_tape *tape)
{
    const uint64_t hash = tape->inputs_hash;
    tape->hashes = true;
    tape->inputs_hash = 0;
    return hash;
}

/* Add the operations of a replay; return the tape's sum. */
static inline double dtrain__count_flops(dtrain_tape *tape, double flops)
{
    return tape->flops += flops;
}

/* Let the next pass be recorded, with its seed in the scalars and its inputs in the feed. Two NULLs
 * end recording. */
static inline void dtrain__pass_recorded(dtrain_tape *tape, const dtrain_step_scalars *scalars,
                                         dtrain__feed *feed)
{
    tape->scalars = scalars;
    tape->feed = feed;
    if (feed) feed->next = 0;
}

/* Copy the host's buffers into a feed. */
static inline dtrain_result dtrain__feed_take(dtrain_tape *tape, dtrain__feed *feed)
{
    for (size_t i = 0; i < feed->count; i++)
        DTRAIN__TRY(dtrain__feed_fill(tape, feed, &feed->items[i]));
    feed->filled = true;
    return DTRAIN_OK;
}

static inline void dtrain__feed_free(dtrain_device *device, dtrain__feed *feed)
{
    for (size_t i = 0; i < feed->count; i++)
        device->ops->host_free(device, feed->items[i].pinned,
                               feed->items[i].room + DTRAIN__VALID_BYTES);
}

/* Let a tape of the plan device count the costs of units; NULL = no costs. */
static inline void dtrain__tape_costs(dtrain_tape *tape, const dtrain__unit_costs *costs)
{
    tape->costs = costs;
}

/* Run the backward of a plan, in halves if costs are counted. */
static inline dtrain_result dtrain__plan_backward(dtrain_tape *tape, dtrain_tensor *loss)
{
    tape->pass.halves = tape->costs != NULL;
    DTRAIN__TRY(dtrain_tape_backward(tape, loss, 1));
    return tape->costs ? dtrain__backward_params(tape) : DTRAIN_OK;
}
