/* Micro-batches: a forward and a backward, two calls
 *
 * A step is the sum of its micro-batches. Each is a forward, which ends with a loss, and a
 * backward, which ends with its part of the gradients reduced. They are two calls so that a
 * schedule can put other passes between them:
 *
 *     one at a time, as the trainer's steps do    F0 B0  F1 B1  F2 B2
 *     one forward ahead                           F0 F1  B0 F2  B1 B2
 *
 * Three rules bind a schedule. Every pass in flight has a tape, and input buffers, of its own.
 * Forwards come in the order of their numbers, because each fetches the next batch; so do
 * backwards, because the strategy averages behind the last one. All ranks have the same
 * schedule. A pipeline has schedules of its own, of passes of stages: pipeline_step.c. */

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

/* Fetch a micro-batch, in a span: while next_batch reads, the step makes no progress. */
DTRAIN__PRIVATE dtrain_result dtrain__trainer_fetch(dtrain_trainer *trainer)
{
    const uint32_t span =
        dtrain__span_begin(trainer->world, DTRAIN_SPAN_DATA, "next batch", DTRAIN__UNNUMBERED);
    const dtrain_result result = trainer->desc.next_batch(trainer->desc.user);
    dtrain__span_end(trainer->world, span);
    if (result != DTRAIN_ERROR_END || !trainer->queue) return result;
    return dtrain__strategy_keep(
        trainer->desc.strategy,
        dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                    "dtrain_trainer_step: the data of this rank has ended, and a graph replays "
                    "steps that have data; use graph = false, or give all ranks as many batches"));
}

/* Fetch a batch, unless the tape's feed holds it already, and run forward to its loss. A rank whose
 * data has ended gathers what the others gather, and has no loss.
 *
 * An error of next_batch leaves the step where it is, to be repeated from here. After any other
 * error this rank cannot take part in what the others do: the strategy fails on all of them. An
 * error inside of the loss, a NULL tensor too, is on the tape and comes out of backward. */
DTRAIN__PRIVATE dtrain_result dtrain__micro_forward(dtrain_trainer *trainer, dtrain__micro *micro)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain_tape *tape = micro->tape;
    const bool fetched = tape->feed && tape->feed->filled;
    micro->loss = NULL;
    micro->joined = false;
    DTRAIN__TRY(dtrain__strategy_usable(desc->strategy, "dtrain_trainer_step"));
    if (micro->number == 0) trainer->joined = 0;
    if (desc->next_batch && !fetched && !trainer->ended) {
        const dtrain_result next = dtrain__trainer_fetch(trainer);
        trainer->ended = next == DTRAIN_ERROR_END;
        if (!trainer->ended) DTRAIN__TRY(next);
    }
    micro->joined = trainer->ended;
    if (micro->joined) return dtrain__join_forward(desc->strategy);
    DTRAIN__TRY(dtrain__strategy_keep(
        desc->strategy, dtrain_tape_begin(tape, desc->tape_flags,
                                          micro->seed + dtrain__micro_seed(micro->number))));
    const uint32_t span =
        dtrain__span_begin(trainer->world, DTRAIN_SPAN_FORWARD, "forward", micro->number);
    micro->loss = desc->loss(tape, desc->user);
    dtrain__span_end(trainer->world, span);
    return DTRAIN_OK;
}

/* Run backward from the loss and let the strategy reduce the gradients; behind the step's last
 * micro-batch they are its mean. The loss is not read: a device with a queue works through all of
 * this before the host waits. A gradient that is missing ends the step. */
DTRAIN__PRIVATE dtrain_result dtrain__micro_backward(dtrain_trainer *trainer, dtrain__micro *micro)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain_strategy *strategy = desc->strategy;
    const float scale = trainer->scaling ? trainer->scaler.scale : 1; /* a power of two: exact */
    const float share = scale / (float)desc->micro_batches;
    DTRAIN__TRY(dtrain_strategy_accumulate(strategy, micro->number + 1 < desc->micro_batches));
    dtrain_result result = DTRAIN_OK;
    bool over;
    if (micro->joined) {
        trainer->joined++;
        micro->weight = 0;
        result = dtrain__join_backward(strategy, &over);
    } else {
        DTRAIN__TRY(
            dtrain__strategy_keep(strategy, dtrain_tape_backward(micro->tape, micro->loss, share)));
        micro->weight = dtrain__micro_weight(strategy);
        result = dtrain_strategy_finish(strategy);
    }
    trainer->micro = result == DTRAIN_OK ? micro->number + 1 : 0;
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
