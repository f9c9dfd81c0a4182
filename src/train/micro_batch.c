/* Micro-batches: a forward and a backward each, one after the other
 *
 * A step is the sum of its micro-batches. Each is a forward, which ends with a loss, and a
 * backward, which ends with its part of the gradients reduced. They come in the order of their
 * numbers: each forward fetches the next batch, and the strategy averages behind the last backward.
 * A pipeline has schedules of passes of stages: pipeline_step.c. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/timeline.h"
#include "world/timeline_internal.h"
#include "strategy/strategy.h"
#include "strategy/view_internal.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"

#define DTRAIN__STREAM_DROPOUT (UINT64_C(0x64726f70) << 32) /* + rank: Philox stream of seeds */
#define DTRAIN__MICRO_SEED UINT64_C(0x9e3779b97f4a7c15) /* times the micro-batch; odd: all differ */

/* Return the seed of this rank's step. Random numbers of dropout must differ between steps,
 * micro-batches and ranks with other samples, and a run that is repeated must repeat them. A pass
 * uses the sum of this and of its micro-batch's seed, which is the same in all steps: so it can be
 * recorded. */
DTRAIN__PRIVATE uint64_t dtrain__step_seed(const dtrain_trainer *trainer)
{
    uint32_t random[4];
    uint64_t stream = DTRAIN__STREAM_DROPOUT + (uint64_t)trainer->data_rank;
    dtrain__philox(trainer->desc.seed, stream, (uint64_t)trainer->step, random);
    return (uint64_t)random[1] << 32 | random[0];
}

DTRAIN__PRIVATE uint64_t dtrain__micro_seed(uint32_t micro) { return DTRAIN__MICRO_SEED * micro; }

/* Return what a micro-batch's loss is multiplied with before its backward. */
DTRAIN__PRIVATE float dtrain__micro_scale(const dtrain_trainer *trainer)
{
    const float scale = trainer->scaling ? trainer->scaler.scale : 1; /* a power of two: exact */
    return scale / (float)trainer->desc.micro_batches;
}

/* Fetch a micro-batch, unless this rank's data has ended, in a span: while next_batch reads, the
 * step makes no progress. */
DTRAIN__PRIVATE dtrain_result dtrain__trainer_fetch(dtrain_trainer *trainer)
{
    if (!trainer->desc.next_batch || trainer->ended) return DTRAIN_OK;
    const uint32_t span =
        dtrain__span_begin(trainer->world, DTRAIN_SPAN_DATA, "next batch", DTRAIN__UNNUMBERED);
    const dtrain_result result = trainer->desc.next_batch(trainer->desc.user);
    dtrain__span_end(trainer->world, span);
    if (result != DTRAIN_ERROR_END) return result;
    trainer->ended = !trainer->queue;
    if (trainer->ended) return DTRAIN_OK;
    return dtrain__strategy_keep(
        trainer->desc.strategy,
        dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                    "dtrain_trainer_step: the data of this rank has ended, and a graph replays "
                    "steps that have data; use graph = false, or give all ranks as many batches"));
}

/* Run forward to the loss and backward from it. An error inside of the loss, a NULL tensor too, is
 * on the tape and comes out of backward. */
static dtrain_result dtrain__micro_passes(dtrain_trainer *trainer, uint64_t seed,
                                          dtrain_tensor **loss)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain_tape *tape = trainer->tape;
    DTRAIN__TRY(
        dtrain_tape_begin(tape, desc->tape_flags, seed + dtrain__micro_seed(trainer->micro)));
    const uint32_t span =
        dtrain__span_begin(trainer->world, DTRAIN_SPAN_FORWARD, "forward", trainer->micro);
    *loss = desc->loss(tape, desc->user);
    dtrain__span_end(trainer->world, span);
    return dtrain_tape_backward(tape, *loss, dtrain__micro_scale(trainer));
}

/* Fetch the next micro-batch of the step, unless the tape's feed holds it already, run it and let
 * the strategy reduce the gradients: behind the last one they are the step's mean. Set the loss,
 * which is not read, so that a device with a queue works through all of this before the host waits,
 * and its weight. A rank whose data has ended takes part in what the others do, and has no loss.
 *
 * An error of next_batch leaves the step where it is, to be repeated from here. A gradient that is
 * missing ends the step. After any other error this rank cannot take part in what the others do:
 * the strategy fails on all of them. */
DTRAIN__PRIVATE dtrain_result dtrain__micro_batch(dtrain_trainer *trainer, uint64_t seed,
                                                  dtrain_tensor **loss, float *weight)
{
    dtrain_strategy *strategy = trainer->desc.strategy;
    const dtrain__feed *feed = trainer->tape->feed;
    const uint32_t micro = trainer->micro;
    dtrain_result result;
    bool over;
    *loss = NULL;
    *weight = 0;
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_trainer_step"));
    if (micro == 0) trainer->joined = 0;
    if (!feed || !feed->filled) DTRAIN__TRY(dtrain__trainer_fetch(trainer));
    DTRAIN__TRY(dtrain_strategy_accumulate(strategy, micro + 1 < trainer->desc.micro_batches));
    if (trainer->ended) {
        trainer->joined++;
        result = dtrain_strategy_join(strategy, &over);
    } else {
        DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__micro_passes(trainer, seed, loss)));
        *weight = dtrain__micro_weight(strategy);
        result = dtrain_strategy_finish(strategy);
    }
    trainer->micro = result == DTRAIN_OK ? micro + 1 : 0;
    return result;
}

/* Add the loss of a micro-batch to the step's; the first one begins the sum. A loss that is not
 * finite must be seen whatever its weight is. */
DTRAIN__PRIVATE void dtrain__trainer_add(dtrain_trainer *trainer, uint32_t micro, float loss,
                                         float weight)
{
    if (micro == 0) trainer->loss = trainer->weight = 0;
    trainer->loss += dtrain__is_finite(loss) ? (double)loss * (double)weight : (double)loss;
    trainer->weight += (double)weight;
}
