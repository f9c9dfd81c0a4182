/* What a trainer asks of a tape
 *
 * Samples and hashes of what a pass was made of, passes that are recorded, counted or planned, and
 * the messages between stages. */

#include "core/platform_internal.h"
#include "tape/view_internal.h"

DTRAIN__PRIVATE dtrain__samples dtrain__samples_of(const dtrain_tensor *loss)
{
    return ((const dtrain__tape_tensor *)loss)->samples;
}

DTRAIN__PRIVATE dtrain_result dtrain__pass_end(const dtrain_tape *tape)
{
    return dtrain__end_sums(tape->strategy, tape->pass.sums, false);
}

DTRAIN__PRIVATE void dtrain__inputs_are_hashed(dtrain_tape *tape, bool hashed)
{
    tape->hashes = hashed;
}

DTRAIN__PRIVATE uint64_t dtrain__inputs_hash(dtrain_tape *tape)
{
    const uint64_t hash = tape->inputs_hash;
    tape->inputs_hash = 0;
    return hash;
}

DTRAIN__PRIVATE double dtrain__count_flops(dtrain_tape *tape, double flops)
{
    return tape->flops += flops;
}

/* ---- Passes that are recorded -----------------------------------------------------------------*/

DTRAIN__PRIVATE void dtrain__pass_recorded(dtrain_tape *tape, const dtrain_step_scalars *scalars,
                                           dtrain__feed *feed)
{
    tape->scalars = scalars;
    tape->feed = feed;
    if (feed) feed->next = 0;
}

DTRAIN__PRIVATE dtrain_result dtrain__feed_take(dtrain_tape *tape, dtrain__feed *feed)
{
    for (size_t i = 0; i < feed->count; i++)
        DTRAIN__TRY(dtrain__feed_fill(tape, feed, &feed->items[i]));
    feed->filled = true;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__feed_free(const dtrain_tape *tape, dtrain__feed *feed)
{
    dtrain_device *device = tape->device;
    for (size_t i = 0; i < feed->count; i++)
        device->ops->host_free(device, feed->items[i].pinned,
                               feed->items[i].room + DTRAIN__VALID_BYTES);
}

/* ---- Plans ------------------------------------------------------------------------------------*/

DTRAIN__PRIVATE void dtrain__tape_costs(dtrain_tape *tape, const dtrain__unit_costs *costs)
{
    tape->costs = costs;
}

DTRAIN__PRIVATE dtrain_result dtrain__plan_backward(dtrain_tape *tape, dtrain_tensor *loss)
{
    tape->pass.halves = tape->costs != NULL;
    DTRAIN__TRY(dtrain_tape_backward(tape, loss, 1));
    return tape->costs ? dtrain__backward_params(tape) : DTRAIN_OK;
}

/* ---- Stages -----------------------------------------------------------------------------------*/

DTRAIN__PRIVATE int dtrain__stage_of(const dtrain_tensor *made)
{
    return ((const dtrain__tape_tensor *)made)->stage;
}
