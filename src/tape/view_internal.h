/* A tape as a trainer sees it
 *
 * A trainer asks these questions beside the public API and those of passes of stages
 * (tape/stage_internal.h); it reads and writes no member of a tape or a tensor. */

#pragma once

#include "core/platform_internal.h"
#include "core/result.h"
#include "strategy/view_internal.h"
#include "tape/stage_internal.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "device/backend.h"

/* Return what a loss is a mean over. */
DTRAIN__PRIVATE dtrain__samples dtrain__samples_of(const dtrain_tensor *loss);
/* End a pass without a backward: take part in what losses of other ranks add up. Collective over
 * the data axis. */
DTRAIN__PRIVATE dtrain_result dtrain__pass_end(const dtrain_tape *tape);
/* Hash the inputs of passes from here on. Return the hash of those since the last call. */
DTRAIN__PRIVATE void dtrain__inputs_are_hashed(dtrain_tape *tape, bool hashed);
DTRAIN__PRIVATE uint64_t dtrain__inputs_hash(dtrain_tape *tape);
/* Count the operations of a replay, too; return all that the tape has counted. */
DTRAIN__PRIVATE double dtrain__count_flops(dtrain_tape *tape, double flops);

/* Let the next pass be recorded: its seed is in the scalars, its inputs come through the feed. NULL
 * and NULL: no longer. */
DTRAIN__PRIVATE void dtrain__pass_recorded(dtrain_tape *tape, const dtrain_step_scalars *scalars,
                                           dtrain__feed *feed);
/* Fill a feed with what the host's buffers hold now. */
DTRAIN__PRIVATE dtrain_result dtrain__feed_take(dtrain_tape *tape, dtrain__feed *feed);
DTRAIN__PRIVATE void dtrain__feed_free(const dtrain_tape *tape, dtrain__feed *feed);

/* Let a tape of the plan device count what units cost. Then run a backward, in halves if costs are
 * counted. */
DTRAIN__PRIVATE void dtrain__tape_costs(dtrain_tape *tape, const dtrain__unit_costs *costs);
DTRAIN__PRIVATE dtrain_result dtrain__plan_backward(dtrain_tape *tape, dtrain_tensor *loss);

/* Return the stage that has made a tensor; -1: an input. */
DTRAIN__PRIVATE int dtrain__stage_of(const dtrain_tensor *made);
