/* Trainer
 *
 * A step is its micro-batches (micro_batch.c, or with a pipeline pipeline_step.c), the update and
 * the record (record.c). With desc.graph, queued_step.c runs micro-batches and update.
 *
 *     micro-batches: next_batch, loss, backward, finish | norm | optimizer | all-gather of words
 *     |<----------------------- step time ------------------------------->|
 *
 * The words are a rank's numbers: its loss, its times and more. Their all-gather comes last, when
 * all times are known. Parameters are safe before that: the norm of the averaged gradient is the
 * same on all ranks; if it is not finite, no rank updates or publishes, and the step is an error.
 * With loss scaling, if all losses are finite, and with DTRAIN_NONFINITE_SKIP it is skipped. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/timeline.h"
#include "world/timeline_internal.h"
#include "world/world.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "strategy/query.h"
#include "strategy/strategy.h"
#include "strategy/view_internal.h"
#include "tape/tape.h"
#include "tape/view_internal.h"
#include "optim/optimizer.h"
#include "optim/scaler.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"

/* ---- The step ---------------------------------------------------------------------------------*/

/* Run micro-batches and update, then make the record. With trainer->queue the CPU first waits after
 * the update. A norm that is not finite leaves the parameters unchanged. */
static dtrain_result dtrain__trainer_run(dtrain_trainer *trainer, dtrain_step_record *record)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    double before[DTRAIN__WORD_COUNT];
    record->step = trainer->step + 1;
    record->lr = (double)dtrain_schedule_lr(&desc->schedule, trainer->step);
    dtrain__record_counters(trainer, before);
    before[DTRAIN__WORD_CHECKPOINT] = trainer->saving; /* count saves since the last record */
    if (trainer->queue) DTRAIN__TRY(dtrain__queue_step(trainer, record));
    else {
        float norm = 0, scale = 1;
        DTRAIN__TRY(trainer->pipeline ? dtrain__pipeline_step(trainer)
                                      : dtrain__micro_batches(trainer));
        DTRAIN__TRY(dtrain_grad_norm(desc->strategy, trainer->scaling ? &trainer->scaler : NULL,
                                     desc->clip, &norm, &scale));
        record->grad_norm = (double)norm;
        if (dtrain__is_finite(norm))
            DTRAIN__TRY(dtrain_optimizer_step(desc->optimizer, (float)record->lr, scale));
    }
    DTRAIN__TRY(dtrain__record_make(trainer, before, record));
    if (record->ended) {
        trainer->ended = false; /* the next step begins another epoch */
        record->step = trainer->step;
        return DTRAIN_OK;
    }
    trainer->step++;
    trainer->tokens = record->tokens;
    const bool verify = desc->verify_every && trainer->step % desc->verify_every == 0;
    return verify ? dtrain_strategy_verify(desc->strategy, NULL) : DTRAIN_OK;
}

/* Take one step, timed as one span of the timeline. Its first call compares trainers. */
DTRAIN_API dtrain_result dtrain_trainer_step(dtrain_trainer *trainer, dtrain_step_record *record)
{
    dtrain_step_record full;
    if (!trainer || !trainer->desc.optimizer)
        return dtrain_fail(DTRAIN_ERROR_USAGE, "dtrain_trainer_step: there is no %s",
                           trainer ? "optimizer: this trainer can only evaluate" : "trainer");
    DTRAIN__TRY(dtrain__trainer_compare(trainer));
    memset(&full, 0, sizeof full);
    const dtrain__event_reader *reader = trainer->world->timeline.reader;
    if (reader) reader->step(trainer->world, trainer->step + 1);
    const uint32_t span =
        dtrain__span_begin(trainer->world, DTRAIN_SPAN_OTHER, "step", trainer->step + 1);
    const dtrain_result result = dtrain__trainer_run(trainer, &full);
    dtrain__span_end(trainer->world, span);
    if (result == DTRAIN_OK && record) *record = full;
    return dtrain__pipeline_failed(trainer, result);
}

/* ---- Evaluation, and other forward passes -----------------------------------------------------*/

/* Run a pass without a backward, on this rank or with all ranks of its pipeline. micro: weight and
 * samples of the pass; can be NULL. */
static dtrain_result dtrain__forward_pass(dtrain_trainer *trainer, const dtrain__model_pass *pass,
                                          dtrain__micro *micro)
{
    dtrain_tape *tape = trainer->tape;
    if (trainer->pipeline) {
        DTRAIN__TRY(dtrain__pipeline_forward(trainer, pass));
        if (micro) *micro = *trainer->micros;
        return DTRAIN_OK;
    }
    dtrain_tensor *made;
    DTRAIN__TRY(dtrain__pass_run(trainer, pass, 0, DTRAIN__UNNUMBERED, &made));
    DTRAIN__TRY(dtrain__tape_check(tape, pass->call));
    DTRAIN__TRY(dtrain__check_made(pass, made));
    DTRAIN__TRY(dtrain_tensor_read(tape, made, pass->values, NULL));
    if (!micro) return DTRAIN_OK;
    micro->samples = dtrain__samples_of(made);
    micro->weight = dtrain__notes_of(trainer->desc.strategy)->weight;
    return DTRAIN_OK;
}

/* Evaluate a batch on every rank, and add the round's numbers of all ranks to `sums` in rank order.
 * A rank whose data has ended joins the gathers of other ranks. Each sample counts once. A loss of
 * which the tape counts no samples has the weight that the program gives it, or 1. */
static dtrain_result dtrain__evaluate_round(dtrain_trainer *trainer, dtrain_batch_fn next_batch,
                                            void *user, double *sums)
{
    dtrain_strategy *strategy = trainer->desc.strategy;
    double *own = trainer->compute + trainer->rank * DTRAIN__ROUND_COUNT;
    const dtrain_result next = next_batch ? next_batch(user) : DTRAIN_OK;
    dtrain_world_info world;
    memset(own, 0, DTRAIN__ROUND_BYTES);
    dtrain__world_info(trainer->world, &world);
    own[DTRAIN__ROUND_STOP] = world.stop_requested;
    own[DTRAIN__ROUND_ENDED] = next == DTRAIN_ERROR_END;
    if (next == DTRAIN_ERROR_END) /* all ranks of a pipeline end together */
        DTRAIN__TRY(trainer->pipeline ? dtrain__end_sums(strategy, 0, true)
                                      : dtrain__join_forward(strategy));
    else {
        dtrain__micro micro;
        float loss = 0;
        dtrain__model_pass pass = dtrain__step_pass(&trainer->desc);
        pass.call = "dtrain_trainer_evaluate";
        pass.user = user;
        pass.flags |= DTRAIN_TAPE_NO_GRAD;
        pass.values = &loss;
        DTRAIN__TRY(next);
        DTRAIN__TRY(dtrain__forward_pass(trainer, &pass, &micro));
        DTRAIN__TRY(dtrain__pass_end(trainer->tape));
        const double weight =
            micro.samples.terms ? dtrain__samples_count(&micro.samples) : (double)micro.weight;
        DTRAIN__TRY(dtrain_strategy_weight(strategy, 1)); /* undo the weight that the loss set */
        if (trainer->loss_counts) {
            own[DTRAIN__ROUND_LOSS] =
                dtrain__is_finite(loss) ? (double)loss * weight : (double)loss;
            own[DTRAIN__ROUND_WEIGHT] = weight;
        }
    }
    dtrain__call_label(trainer->world, "evaluation", 0, "");
    DTRAIN__TRY(dtrain_all_gather(trainer->groups.all, own, trainer->compute, DTRAIN__ROUND_COUNT,
                                  DTRAIN_DTYPE_I64, NULL));
    for (int i = 0; i < trainer->ranks * DTRAIN__ROUND_COUNT; i++)
        sums[i % DTRAIN__ROUND_COUNT] += trainer->compute[i];
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_trainer_evaluate(dtrain_trainer *trainer,
                                                 dtrain_batch_fn next_batch, void *user,
                                                 int64_t batches, double *loss)
{
    const char *const call = "dtrain_trainer_evaluate";
    DTRAIN__GIVEN(call, trainer);
    DTRAIN__GIVEN(call, loss);
    if (batches <= 0 && (batches != DTRAIN_UNTIL_END || !next_batch))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: batches is %lld; expected 1 or more, or DTRAIN_UNTIL_END with a "
                           "next_batch",
                           call, (long long)batches);
    double sums[DTRAIN__ROUND_COUNT] = {0};
    double ended = 0;     /* rounds in which this rank had no data */
    double all_ended = 0; /* ranks without data in the last round */
    int64_t rounds = 0;
    DTRAIN__TRY(dtrain__check_fetches(&trainer->groups, call, next_batch));
    dtrain__expect_evaluation(trainer->desc.strategy, true);
    while (rounds != batches && all_ended < trainer->ranks && sums[DTRAIN__ROUND_STOP] == 0) {
        const double before = sums[DTRAIN__ROUND_ENDED];
        DTRAIN__TRY(dtrain__strategy_keep(trainer->desc.strategy,
                                          dtrain__evaluate_round(trainer, next_batch, user, sums)));
        ended += trainer->compute[trainer->rank * DTRAIN__ROUND_COUNT + DTRAIN__ROUND_ENDED];
        all_ended = sums[DTRAIN__ROUND_ENDED] - before;
        rounds++;
    }
    dtrain__expect_evaluation(trainer->desc.strategy, false);
    trainer->words[trainer->rank][DTRAIN__WORD_ENDED] = (float)(ended / (double)rounds);
    DTRAIN__TRY(dtrain__words_gather(trainer)); /* for check_data; other words are old */
    const double total = sums[DTRAIN__ROUND_WEIGHT];
    *loss = total > 0 ? sums[DTRAIN__ROUND_LOSS] / total : sums[DTRAIN__ROUND_LOSS];
    if (sums[DTRAIN__ROUND_STOP] > 0) *loss = DTRAIN__NAN; /* samples are missing */
    return dtrain__strategy_keep(trainer->desc.strategy,
                                 dtrain__check_data(trainer, "dtrain_trainer_evaluate:", rounds));
}

DTRAIN_API dtrain_result dtrain_trainer_forward(dtrain_trainer *trainer, dtrain_loss_fn forward,
                                                void *user, float *values, int64_t count)
{
    DTRAIN__GIVEN("dtrain_trainer_forward", trainer);
    DTRAIN__GIVEN("dtrain_trainer_forward", forward);
    DTRAIN__GIVEN("dtrain_trainer_forward", values);
    if (count < 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_trainer_forward: count is %lld; expected 1 or more",
                           (long long)count);
    const dtrain__model_pass pass = {"dtrain_trainer_forward",
                                     true,
                                     forward,
                                     user,
                                     trainer->desc.tape_flags | DTRAIN_TAPE_NO_GRAD,
                                     values,
                                     count};
    if (trainer->pipeline)
        DTRAIN__TRY(dtrain__strategy_usable(trainer->desc.strategy, "dtrain_trainer_forward"));
    return dtrain__forward_pass(trainer, &pass, NULL);
}
