/* Trainer
 *
 * The step, from the top down: dtrain_trainer_step, the micro-batches, the update, the record. The
 * same micro-batches run in a queued step (queued_step.c), which only reads their results later.
 *
 *     micro-batches: next_batch, loss, backward, finish | norm | optimizer | all-gather of 4 words
 *     |<----------------------- step time ------------------------------->|
 *
 * The all-gather carries every rank's loss and times. It comes last so that the times are whole,
 * and because all ranks then judge the same numbers: a loss that is not finite is the same error on
 * all of them. The parameters are safe without waiting for it: the norm of the averaged gradient is
 * the same everywhere, a NaN of any rank is in it, and then no rank updates or publishes. With loss
 * scaling that is a skipped step, unless a loss was not finite either.
 *
 * Time is accounted to ranks as follows. A rank computes, or it is inside the communicator. A fast
 * rank waits there for a slow one, so a straggler shows in the others' exposed time, and in its own
 * compute time (step - exposed): that is what ranks are compared by. What ranks wait for each other
 * in the record's own all-gather is in no figure. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "optim/optim_internal.h"
#include "optim/optimizer.h"
#include "optim/scaler.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"

#define DTRAIN__WORDS_BYTES (DTRAIN__WORD_COUNT * sizeof(float))

#define DTRAIN__STREAM_DROPOUT (UINT64_C(0x64726f70) << 32) /* + rank: Philox stream of seeds */

static uint64_t dtrain__micro_seed(uint32_t micro);
static dtrain_result dtrain__trainer_run(dtrain_trainer *trainer, dtrain_step_record *record);
static dtrain_result dtrain__trainer_update(dtrain_trainer *trainer, dtrain_step_record *record);
static dtrain_result dtrain__trainer_record(dtrain_trainer *trainer, const float *own,
                                            dtrain_step_record *record);
static dtrain_result dtrain__trainer_exchange(dtrain_trainer *trainer, const float *own);
static float dtrain__trainer_word(const dtrain_trainer *trainer, int rank, int word);
static double dtrain__trainer_mean(const dtrain_trainer *trainer, int word);
static dtrain_result dtrain__trainer_judge(const dtrain_trainer *trainer, float norm);
static dtrain_result dtrain__trainer_rescale(dtrain_trainer *trainer, dtrain_step_record *record);
static void dtrain__straggler_count(dtrain_trainer *trainer, dtrain_step_record *record);
static void dtrain__straggler_warn(dtrain_trainer *trainer, const dtrain_step_record *record);
static dtrain_result dtrain__check_trainer(const dtrain_trainer_desc *desc);
static dtrain_result dtrain__trainer_alloc(dtrain_trainer *trainer);
static dtrain_result dtrain__trainer_scaling(dtrain_trainer *trainer);

/* One step: micro-batches and update, either with the host in the middle or queued as a whole, and
 * then the record. */
DTRAIN_API dtrain_result dtrain_trainer_step(dtrain_trainer *trainer, dtrain_step_record *record)
{
    if (!trainer || !trainer->desc.optimizer)
        return dtrain_fail(DTRAIN_ERROR_USAGE, "dtrain_trainer_step: there is no %s",
                           trainer ? "optimizer: this trainer can only evaluate" : "trainer");
    dtrain_step_record full;
    dtrain_comm_info before, after;
    float own[DTRAIN__WORD_COUNT];
    memset(&full, 0, sizeof full);
    full.step = trainer->step;
    full.lr = (double)dtrain_schedule_lr(&trainer->desc.schedule, trainer->step);
    dtrain__strategy_comm_info(trainer->desc.strategy, &before);
    const double start = dtrain_seconds();
    if (trainer->queue) DTRAIN__TRY(dtrain__queue_step(trainer, &full));
    else DTRAIN__TRY(dtrain__trainer_run(trainer, &full));
    own[DTRAIN__WORD_STEP] = (float)(dtrain_seconds() - start);
    dtrain__strategy_comm_info(trainer->desc.strategy, &after);

    /* Time inside can exceed time in flight by the cost of the calls: exposed stays a part. */
    const double exposed = after.inside_seconds - before.inside_seconds;
    const double flight = after.flight_seconds - before.flight_seconds;
    own[DTRAIN__WORD_LOSS] = (float)full.loss;
    own[DTRAIN__WORD_EXPOSED] = (float)exposed;
    own[DTRAIN__WORD_COMM] = (float)(flight > exposed ? flight : exposed);
    full.comm_bytes = after.wire_bytes - before.wire_bytes;
    DTRAIN__TRY(dtrain__trainer_record(trainer, own, &full));
    trainer->step++;
    if (record) *record = full;
    return DTRAIN_OK;
}

/* ---- micro-batches and update -----------------------------------------------------------------*/

/* One micro-batch up to its averaged gradient. *loss is read by the caller, after finish: a device
 * with a queue works through all of it before the host waits. A tape error (a NULL tensor) comes
 * out of backward. A batch that a feed holds already is not fetched again. */
DTRAIN__PRIVATE dtrain_result dtrain__trainer_micro(dtrain_trainer *trainer, uint32_t micro,
                                                    uint64_t seed, dtrain_tensor **loss)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    dtrain_tape *tape = trainer->tape;
    const bool fetched = tape->feed && tape->feed->filled;
    const float scale = trainer->scaling ? trainer->scaler.scale : 1; /* a power of two: no bits */
    DTRAIN__TRY(dtrain_strategy_accumulate(desc->strategy, micro + 1 < desc->micro_batches));
    if (desc->next_batch && !fetched) DTRAIN__TRY(desc->next_batch(desc->user));
    DTRAIN__TRY(dtrain_tape_begin(tape, desc->tape_flags, seed + dtrain__micro_seed(micro)));
    *loss = desc->loss(tape, desc->user);
    DTRAIN__TRY(dtrain_tape_backward(tape, *loss, scale / (float)desc->micro_batches));
    return dtrain_strategy_finish(desc->strategy);
}

/* Micro-batches and update with the host in the middle. Fills loss and grad_norm. */
static dtrain_result dtrain__trainer_run(dtrain_trainer *trainer, dtrain_step_record *record)
{
    const uint32_t count = trainer->desc.micro_batches;
    for (uint32_t micro = 0; micro < count; micro++) {
        dtrain_tensor *tensor;
        float loss = 0;
        DTRAIN__TRY(dtrain__trainer_micro(trainer, micro, dtrain__step_seed(trainer), &tensor));
        DTRAIN__TRY(dtrain_tensor_read(trainer->tape, tensor, &loss));
        record->loss += (double)loss;
    }
    record->loss /= count;
    return dtrain__trainer_update(trainer, record);
}

/* Norm and optimizer; a norm that is not finite leaves the parameters as they are. */
static dtrain_result dtrain__trainer_update(dtrain_trainer *trainer, dtrain_step_record *record)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    float norm = 0, scale = 1;
    bool found_inf;
    if (trainer->scaling)
        DTRAIN__TRY(dtrain_loss_scaler_unscale(&trainer->scaler, desc->strategy, desc->clip, &norm,
                                               &scale, &found_inf));
    else DTRAIN__TRY(dtrain_clip_grad_norm(desc->strategy, desc->clip, &norm, &scale));
    record->grad_norm = (double)norm;
    if (!dtrain_is_finite(norm)) return DTRAIN_OK;
    return dtrain_optimizer_step(desc->optimizer, (float)record->lr, scale);
}

/* Random numbers of dropout must differ between steps, micro-batches and ranks, and a run that is
 * repeated must repeat them. A pass uses the sum of both: the first changes from step to step, the
 * second is the same in all. */
DTRAIN__PRIVATE uint64_t dtrain__step_seed(const dtrain_trainer *trainer)
{
    uint32_t random[4];
    uint64_t stream = DTRAIN__STREAM_DROPOUT + (uint64_t)trainer->rank;
    dtrain_philox(trainer->desc.seed, stream, (uint64_t)trainer->step, random);
    return (uint64_t)random[1] << 32 | random[0];
}
static uint64_t dtrain__micro_seed(uint32_t micro)
{
    return UINT64_C(0x9e3779b97f4a7c15) * micro; /* an odd factor: no two are equal */
}

/* ---- the record -------------------------------------------------------------------------------*/

/* Completes the record from the words of all ranks. */
static dtrain_result dtrain__trainer_record(dtrain_trainer *trainer, const float *own,
                                            dtrain_step_record *record)
{
    double seconds = 0;
    DTRAIN__TRY(dtrain__trainer_exchange(trainer, own));
    DTRAIN__TRY(dtrain__trainer_judge(trainer, (float)record->grad_norm));
    DTRAIN__TRY(dtrain__trainer_rescale(trainer, record));
    for (int r = 0; r < trainer->ranks; r++) {
        const double step = (double)dtrain__trainer_word(trainer, r, DTRAIN__WORD_STEP);
        if (step > seconds) seconds = step;
    }
    const uint64_t tokens =
        (uint64_t)trainer->desc.tokens * trainer->desc.micro_batches * (uint64_t)trainer->ranks;
    record->loss = dtrain__trainer_mean(trainer, DTRAIN__WORD_LOSS);
    record->val_loss = dtrain__nan();
    record->tokens = tokens * (uint64_t)(trainer->step + 1);
    record->tokens_per_second = seconds > 0 ? (double)tokens / seconds : 0;
    record->step_ms = 1e3 * seconds;
    record->comm_ms = 1e3 * dtrain__trainer_mean(trainer, DTRAIN__WORD_COMM);
    record->exposed_comm_ms = 1e3 * dtrain__trainer_mean(trainer, DTRAIN__WORD_EXPOSED);
    dtrain__straggler_count(trainer, record);
    record->slowest_rank = dtrain_comm_world_rank(trainer->comm, trainer->slow_rank);
    dtrain__straggler_warn(trainer, record);
    return DTRAIN_OK;
}

/* After the exchange: the same verdict on every rank. */
static dtrain_result dtrain__trainer_judge(const dtrain_trainer *trainer, float norm)
{
    const char *advice = "lower the learning rate, clip gradients or look at the data";
    for (int r = 0; r < trainer->ranks; r++) {
        float loss = dtrain__trainer_word(trainer, r, DTRAIN__WORD_LOSS);
        if (!dtrain_is_finite(loss))
            return dtrain_fail(DTRAIN_ERROR_NUMERIC,
                               "dtrain_trainer_step: at step %lld the loss of rank %d is %g: %s",
                               (long long)trainer->step, dtrain_comm_world_rank(trainer->comm, r),
                               (double)loss, advice);
    }
    if (!dtrain_is_finite(norm) && !trainer->scaling)
        return dtrain_fail(DTRAIN_ERROR_NUMERIC,
                           "dtrain_trainer_step: at step %lld the gradient's norm is %g although "
                           "every loss is finite: %s",
                           (long long)trainer->step, (double)norm, advice);
    return DTRAIN_OK;
}

/* After the verdict, and from the same numbers on every rank: all scales move alike. */
static dtrain_result dtrain__trainer_rescale(dtrain_trainer *trainer, dtrain_step_record *record)
{
    dtrain_loss_scaler *scaler = &trainer->scaler;
    if (!trainer->scaling) return DTRAIN_OK;
    record->loss_scale = (double)scaler->scale;
    DTRAIN__TRY(dtrain_loss_scaler_update(scaler, !dtrain_is_finite((float)record->grad_norm)));
    record->skipped_steps = scaler->skipped_steps;
    return DTRAIN_OK;
}

/* This rank's words go into its slot; afterwards every rank has the same `words`. Gathered in
 * place, and nothing is allocated per step. */
static dtrain_result dtrain__trainer_exchange(dtrain_trainer *trainer, const float *own)
{
    float *slot = trainer->words + trainer->rank * DTRAIN__WORD_COUNT;
    memcpy(slot, own, DTRAIN__WORDS_BYTES);
    return dtrain_all_gather(trainer->comm, slot, trainer->words, DTRAIN__WORD_COUNT,
                             DTRAIN_DTYPE_F32, NULL);
}

static float dtrain__trainer_word(const dtrain_trainer *trainer, int rank, int word)
{
    return trainer->words[rank * DTRAIN__WORD_COUNT + word];
}

/* Over ranks, in rank order: the same bits everywhere. */
static double dtrain__trainer_mean(const dtrain_trainer *trainer, int word)
{
    double sum = 0;
    for (int r = 0; r < trainer->ranks; r++) sum += (double)dtrain__trainer_word(trainer, r, word);
    return sum / trainer->ranks;
}

/* ---- stragglers -------------------------------------------------------------------------------*/

static double dtrain__trainer_compute(const dtrain_trainer *trainer, int rank)
{
    return (double)dtrain__trainer_word(trainer, rank, DTRAIN__WORD_STEP) -
           (double)dtrain__trainer_word(trainer, rank, DTRAIN__WORD_EXPOSED);
}

/* Finds the slowest rank and its score, and counts for how long it has been a straggler. Of an even
 * number of ranks the lower median counts: the mean of the middle two would keep one slow rank of
 * two below a score of 2 for ever. */
static void dtrain__straggler_count(dtrain_trainer *trainer, dtrain_step_record *record)
{
    int slowest = 0;
    for (int r = 0; r < trainer->ranks; r++) {
        double seconds = dtrain__trainer_compute(trainer, r);
        if (seconds > dtrain__trainer_compute(trainer, slowest)) slowest = r;
        int at = r; /* insertion sort: few ranks, and no allocation */
        for (; at > 0 && trainer->compute[at - 1] > seconds; at--)
            trainer->compute[at] = trainer->compute[at - 1];
        trainer->compute[at] = seconds;
    }
    double median = trainer->compute[(trainer->ranks - 1) / 2];
    double most = trainer->compute[trainer->ranks - 1];
    record->straggler_score = median > 0 ? most / median : 1;
    if (record->straggler_score <= DTRAIN__SLOW_SCORE) trainer->slow_steps = 0;
    else trainer->slow_steps = slowest == trainer->slow_rank ? trainer->slow_steps + 1 : 1;
    trainer->slow_rank = slowest;
}

/* Names a lasting straggler, once. Every rank comes to the same end here, rank 0 says it. */
static void dtrain__straggler_warn(dtrain_trainer *trainer, const dtrain_step_record *record)
{
    if (trainer->slow_steps < DTRAIN__SLOW_STEPS || trainer->named[trainer->slow_rank]) return;
    trainer->named[trainer->slow_rank] = true;
    if (trainer->rank == 0)
        dtrain_log(trainer->world, DTRAIN_LOG_WARNING,
                   "rank %d is a straggler: it has computed more than twice as long as the median "
                   "rank for %d steps running (%.1f times in step %lld), and all ranks wait for it",
                   record->slowest_rank, DTRAIN__SLOW_STEPS, record->straggler_score,
                   (long long)record->step);
}

/* ---- evaluation -------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_trainer_evaluate(dtrain_trainer *trainer,
                                                 dtrain_batch_fn next_batch, void *user,
                                                 int64_t batches, double *loss)
{
    if (!trainer || !loss || batches <= 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_trainer_evaluate: trainer or loss is NULL, or batches (%lld) "
                           "is less than 1",
                           (long long)batches);
    double sum = 0;
    for (int64_t i = 0; i < batches; i++) {
        float one = 0;
        if (next_batch) DTRAIN__TRY(next_batch(user));
        DTRAIN__TRY(
            dtrain_tape_begin(trainer->tape, trainer->desc.tape_flags | DTRAIN_TAPE_NO_GRAD, 0));
        dtrain_tensor *tensor = trainer->desc.loss(trainer->tape, user);
        DTRAIN__TRY(dtrain_tape_error(trainer->tape));
        DTRAIN__TRY(dtrain_tensor_read(trainer->tape, tensor, &one));
        sum += (double)one;
    }
    float own[DTRAIN__WORD_COUNT] = {0};
    own[DTRAIN__WORD_LOSS] = (float)(sum / (double)batches);
    DTRAIN__TRY(dtrain__trainer_exchange(trainer, own));
    *loss = dtrain__trainer_mean(trainer, DTRAIN__WORD_LOSS);
    return DTRAIN_OK;
}

/* ---- creation ---------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_trainer_create(dtrain_world *world, const dtrain_trainer_desc *desc,
                                               dtrain_trainer **out)
{
    if (!world || !desc || !out)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_trainer_create: world, desc or out is NULL");
    *out = NULL;
    DTRAIN__TRY(dtrain__check_trainer(desc));
    dtrain_allocator allocator = dtrain__resolve_allocator(dtrain_world_allocator(world));
    dtrain_trainer *trainer =
        (dtrain_trainer *)dtrain__alloc(&allocator, 1, sizeof *trainer, "a trainer");
    if (!trainer) return DTRAIN_ERROR_MEMORY;
    trainer->allocator = allocator;
    trainer->world = world;
    trainer->desc = *desc;
    if (trainer->desc.micro_batches == 0) trainer->desc.micro_batches = 1;
    trainer->comm = desc->strategy->comm;
    trainer->rank = dtrain_comm_rank(trainer->comm);
    trainer->ranks = dtrain_comm_size(trainer->comm);
    trainer->slow_rank = -1;
    dtrain_result result = dtrain__trainer_alloc(trainer);
    if (result == DTRAIN_OK) result = dtrain__trainer_scaling(trainer);
    if (result == DTRAIN_OK && desc->graph) result = dtrain__queue_create(trainer);
    if (result != DTRAIN_OK) {
        dtrain_trainer_destroy(trainer);
        return result;
    }
    *out = trainer;
    return DTRAIN_OK;
}

static dtrain_result dtrain__check_trainer(const dtrain_trainer_desc *desc)
{
    const uint32_t flags = desc->tape_flags;
    if (!desc->strategy || !desc->loss)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_trainer_create: desc has no %s",
                           desc->strategy ? "loss" : "strategy");
    if (desc->optimizer && !(desc->schedule.lr > 0))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_trainer_create: schedule.lr is %g, expected a learning rate > 0",
                           (double)desc->schedule.lr);
    if (flags == 0 || flags == DTRAIN_TAPE_BF16 || flags == DTRAIN_TAPE_F16) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_trainer_create: tape_flags is %#x, expected 0, DTRAIN_TAPE_BF16 or "
                       "DTRAIN_TAPE_F16",
                       flags);
}

static dtrain_result dtrain__trainer_alloc(dtrain_trainer *trainer)
{
    size_t ranks = (size_t)trainer->ranks;
    DTRAIN__TRY(dtrain_tape_create(trainer->world, trainer->desc.strategy, NULL, &trainer->tape));
    DTRAIN__TRY(dtrain_tape_checkpoint(trainer->tape, trainer->desc.checkpoint_every,
                                       trainer->desc.checkpoint_ops));
    trainer->words = (float *)dtrain__alloc(&trainer->allocator, ranks, DTRAIN__WORDS_BYTES,
                                            "a trainer's words");
    trainer->compute = (double *)dtrain__alloc(&trainer->allocator, ranks, sizeof *trainer->compute,
                                               "a trainer's times");
    trainer->named =
        (bool *)dtrain__alloc(&trainer->allocator, ranks, sizeof *trainer->named, "a trainer");
    return trainer->words && trainer->compute && trainer->named ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

static dtrain_result dtrain__trainer_scaling(dtrain_trainer *trainer)
{
    dtrain_loss_scaler_desc *desc = &trainer->desc.loss_scaling;
    const bool given = desc->initial_scale != 0 || desc->growth_factor != 0 ||
                       desc->backoff_factor != 0 || desc->growth_interval || desc->hysteresis ||
                       desc->minimum_scale != 0;
    trainer->scaling = given || (trainer->desc.tape_flags & DTRAIN_TAPE_F16);
    if (!trainer->scaling) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__check_scalable(trainer->desc.strategy, "dtrain_trainer_create",
                                       given ? "loss_scaling" : "DTRAIN_TAPE_F16"));
    if (!given) *desc = dtrain_loss_scaler_defaults();
    return dtrain_loss_scaler_init(&trainer->scaler, desc);
}

DTRAIN_API void dtrain_trainer_destroy(dtrain_trainer *trainer)
{
    if (!trainer) return;
    dtrain_allocator allocator = trainer->allocator;
    size_t ranks = (size_t)trainer->ranks;
    dtrain__queue_destroy(trainer);
    dtrain_tape_destroy(trainer->tape);
    dtrain__free(&allocator, trainer->words, ranks, DTRAIN__WORDS_BYTES);
    dtrain__free(&allocator, trainer->compute, ranks, sizeof *trainer->compute);
    dtrain__free(&allocator, trainer->named, ranks, sizeof *trainer->named);
    dtrain__free(&allocator, trainer, 1, sizeof *trainer);
}

DTRAIN_API dtrain_tape *dtrain_trainer_tape(dtrain_trainer *trainer)
{
    return trainer ? trainer->tape : NULL;
}

/* A bit pattern instead of NAN: it survives -ffast-math. */
DTRAIN__PRIVATE double dtrain__nan(void)
{
    const uint64_t bits = UINT64_C(0x7ff8000000000000);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
