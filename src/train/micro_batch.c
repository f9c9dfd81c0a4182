/* Micro-batches: a forward and a backward each, one after another
 *
 * A step is the sum of its micro-batches. Each has a forward, which ends with a loss, and a
 * backward, which ends with its part of the gradients reduced. They come in the order of their
 * numbers: each forward fetches the next batch, and the strategy averages after the last backward.
 * A pipeline has schedules of passes of stages: pipeline_step.c. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/timeline.h"
#include "world/timeline_internal.h"
#include "strategy/strategy.h"
#include "strategy/view_internal.h"
#include "tape/tape.h"
#include "tape/view_internal.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"

#define DTRAIN__STREAM_DROPOUT (UINT64_C(0x64726f70) << 32) /* + rank: Philox stream of seeds */
/* Multiplied by the micro-batch number: odd, so that no two products are equal mod 2^64. */
#define DTRAIN__MICRO_SEED UINT64_C(0x9e3779b97f4a7c15)

/* Return the seed of this rank's step. Dropout's random numbers must differ between steps,
 * micro-batches and ranks with other samples, and a repeated run must repeat them. A pass uses the
 * sum of this seed and of its micro-batch's seed, which is the same in all steps and can be
 * recorded. */
DTRAIN__PRIVATE uint64_t dtrain__step_seed(const dtrain_trainer *trainer)
{
    uint32_t random[4];
    uint64_t stream = DTRAIN__STREAM_DROPOUT + (uint64_t)trainer->data_rank;
    dtrain__philox(trainer->desc.seed, stream, (uint64_t)trainer->step, random);
    return (uint64_t)random[1] << 32 | random[0];
}

/* Return the seed of a micro-batch's pass. In a queued step the device adds the step's seed. */
DTRAIN__PRIVATE uint64_t dtrain__pass_seed(const dtrain_trainer *trainer, uint32_t micro)
{
    return (trainer->queue ? 0 : dtrain__step_seed(trainer)) + DTRAIN__MICRO_SEED * micro;
}

/* Return the factor of a micro-batch's loss before its backward. */
DTRAIN__PRIVATE float dtrain__micro_scale(const dtrain_trainer *trainer)
{
    const float scale = trainer->scaling ? trainer->scaler.scale : 1; /* a power of two: exact */
    return scale / (float)trainer->desc.micro_batches;
}

/* Fetch a micro-batch in a span, unless this rank's data has ended. */
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

DTRAIN__PRIVATE dtrain__model_pass dtrain__step_pass(const dtrain_trainer_desc *desc)
{
    const dtrain__model_pass pass = {"dtrain_trainer", false, desc->loss, desc->user,
                                     desc->tape_flags, NULL,  1};
    return pass;
}

/* Begin a pass of the whole model on this rank, and run the model's function. */
DTRAIN__PRIVATE dtrain_result dtrain__pass_run(dtrain_trainer *trainer,
                                               const dtrain__model_pass *pass, uint64_t seed,
                                               int64_t number, dtrain_tensor **made)
{
    const char *const name = pass->flags & DTRAIN_TAPE_NO_GRAD ? "evaluate" : "forward";
    DTRAIN__TRY(dtrain_tape_begin(trainer->tape, pass->flags, seed));
    const uint32_t span = dtrain__span_begin(trainer->world, DTRAIN_SPAN_FORWARD, name, number);
    *made = pass->function(trainer->tape, pass->user);
    dtrain__span_end(trainer->world, span);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__loss_read(dtrain_trainer *trainer, uint32_t number,
                                                const dtrain_tensor *loss)
{
    dtrain_device *device = dtrain_world_device(trainer->world);
    if (!trainer->results)
        return dtrain_tensor_read(trainer->tape, loss, &trainer->micros[number].loss, NULL);
    return device->ops->copy_async(device, trainer->results + number, loss->data, sizeof(float),
                                   DTRAIN_COPY_DEVICE_TO_HOST, NULL);
}

DTRAIN__PRIVATE dtrain_result dtrain__losses_await(dtrain_trainer *trainer)
{
    dtrain_device *device = dtrain_world_device(trainer->world);
    if (!trainer->results) return DTRAIN_OK;
    DTRAIN__TRY(device->ops->synchronize(device));
    for (uint32_t m = 0; m < trainer->desc.micro_batches; m++)
        if (!trainer->micros[m].joined) trainer->micros[m].loss = trainer->results[m];
    return DTRAIN_OK;
}

/* Run the micro-batches of a step, from the first that is not done: fetch, unless the queue holds
 * the inputs already, run forward and backward, and let the strategy reduce the gradients. After
 * the last micro-batch they are the step's mean. The loss is read last, or its copy queued, so that
 * a device with a queue does all of this before the host waits. A rank whose data has ended joins
 * the collectives of other ranks, and has no loss.
 *
 * After an error of next_batch the step can be repeated from its micro-batch. A missing gradient
 * ends the step. After any other error (backward returns an error inside loss) this rank cannot
 * join the collectives of other ranks: the strategy fails on all of them. */
DTRAIN__PRIVATE dtrain_result dtrain__micro_batches(dtrain_trainer *trainer)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain_strategy *strategy = desc->strategy;
    dtrain_tape *tape = trainer->tape;
    dtrain__queue *queue = trainer->queue;
    const dtrain__model_pass pass = dtrain__step_pass(desc);
    for (; trainer->micro < desc->micro_batches; trainer->micro++) {
        const uint32_t number = trainer->micro;
        dtrain__micro *micro = &trainer->micros[number];
        dtrain_tensor *loss = NULL;
        dtrain_result result;
        bool over;
        DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_trainer_step"));
        if (queue) dtrain__pass_recorded(tape, queue->scalars, &queue->feeds[number]);
        if (!queue || !queue->feeds[number].filled) DTRAIN__TRY(dtrain__trainer_fetch(trainer));
        DTRAIN__TRY(dtrain_strategy_accumulate(strategy, number + 1 < desc->micro_batches));
        memset(micro, 0, sizeof *micro);
        micro->joined = trainer->ended;
        if (micro->joined) result = dtrain_strategy_join(strategy, &over);
        else {
            const uint64_t seed = dtrain__pass_seed(trainer, number);
            result = dtrain__pass_run(trainer, &pass, seed, number, &loss);
            if (result == DTRAIN_OK)
                result = dtrain_tape_backward(tape, loss, dtrain__micro_scale(trainer));
            DTRAIN__TRY(dtrain__strategy_keep(strategy, result));
            micro->weight = dtrain__notes_of(strategy)->weight;
            result = dtrain_strategy_finish(strategy);
        }
        if (result != DTRAIN_OK) trainer->micro = 0;
        DTRAIN__TRY(result);
        if (!loss) continue;
        micro->samples = dtrain__samples_of(loss);
        DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__loss_read(trainer, number, loss)));
    }
    trainer->micro = 0;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__check_made(const dtrain__model_pass *pass,
                                                 const dtrain_tensor *made)
{
    if (!made)
        return dtrain_fail(DTRAIN_ERROR_USAGE, "%s: %s returned NULL", pass->call,
                           pass->own ? "forward" : "loss");
    if (made->count == pass->count) return DTRAIN_OK;
    if (!pass->own) return dtrain__check_loss(pass->call, made);
    return dtrain_fail(
        DTRAIN_ERROR_ARGUMENT,
        "%s: forward returned a tensor of %lld elements, and values has room for %lld; "
        "give count that number",
        pass->call, (long long)made->count, (long long)pass->count);
}
