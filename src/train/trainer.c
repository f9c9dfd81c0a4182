/* Trainer
 *
 * A step is its micro-batches (micro_batch.c), the update and the record. Where the whole step is
 * queued, queued_step.c has the first two; over a pipeline pipeline_step.c has the micro-batches.
 *
 *     micro-batches: next_batch, loss, backward, finish | norm | optimizer | all-gather of words
 *     |<----------------------- step time ------------------------------->|
 *
 * The all-gather carries every rank's loss and figures. It comes last so that the times are whole,
 * and because all ranks then judge the same numbers: a loss that is not finite is the same error on
 * all of them. The parameters are safe without waiting for it: the norm of the averaged gradient is
 * the same everywhere, a NaN of any rank is in it, and then no rank updates or publishes. With loss
 * scaling that is a skipped step, unless a loss was not finite either.
 *
 * Time is accounted to ranks as follows. A rank computes, or it is inside the communicator. A fast
 * rank waits there for a slow one, so a straggler shows in the others' exposed time, and in its own
 * compute time (step - exposed): that is what ranks are compared by. The wait of ranks for each
 * other in the record's own all-gather is in no figure. Waiting for data counts as compute time, so
 * that a rank with a slow disk is found, and is a figure of its own as well. */

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

/* ---- The words of this rank -------------------------------------------------------------------*/

/* Read the clock, the counters of communicators, spans and tape, each into the word it measures. */
static void dtrain__trainer_counters(const dtrain_trainer *trainer, double *words)
{
    static const struct {
        dtrain_figure figure;
        dtrain_span_kind kind;
    } parts[] = {{DTRAIN_FIGURE_DATA, DTRAIN_SPAN_DATA},
                 {DTRAIN_FIGURE_FORWARD, DTRAIN_SPAN_FORWARD},
                 {DTRAIN_FIGURE_BACKWARD, DTRAIN_SPAN_BACKWARD},
                 {DTRAIN_FIGURE_EXPOSED_COMM, DTRAIN_SPAN_COMM},
                 {DTRAIN_FIGURE_OPTIMIZER, DTRAIN_SPAN_OPTIMIZER},
                 {DTRAIN_FIGURE_CHECKPOINT, DTRAIN_SPAN_CHECKPOINT}};
    dtrain_strategy_info strategy;
    dtrain_comm_info tensor, line;
    dtrain__strategy_info(trainer->desc.strategy, &strategy);
    const dtrain_comm_info *const comm = &strategy.traffic;
    dtrain__strategy_tensor_info(trainer->desc.strategy, &tensor);
    dtrain__strategy_pipeline_info(trainer->desc.strategy, &line);
    memset(words, 0, DTRAIN__WORD_COUNT * sizeof *words);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        words[parts[i].figure] = dtrain__span_seconds(trainer->world, parts[i].kind);
    for (int kind = 1; kind < DTRAIN_COLLECTIVE_KINDS; kind++)
        words[DTRAIN_FIGURE_COMM_BYTES + kind] =
            (double)(comm->kind_bytes[kind] + tensor.kind_bytes[kind] + line.kind_bytes[kind]);
    words[DTRAIN_FIGURE_COMM_BYTES] =
        (double)(comm->wire_bytes + tensor.wire_bytes + line.wire_bytes);
    words[DTRAIN_FIGURE_TENSOR_BYTES] = (double)tensor.wire_bytes;
    words[DTRAIN_FIGURE_TENSOR_EXPOSED] = tensor.inside_seconds;
    words[DTRAIN_FIGURE_PIPELINE_BYTES] = (double)line.wire_bytes;
    words[DTRAIN_FIGURE_BUBBLE] = line.inside_seconds;
    words[DTRAIN__WORD_COMM] = comm->flight_seconds + tensor.flight_seconds + line.flight_seconds;
    words[DTRAIN_FIGURE_FLOPS] = dtrain__count_flops(trainer->tape, 0);
    words[DTRAIN_FIGURE_STEP] = dtrain_seconds();
}

/* Turn the counters after a step into this rank's words. Seconds inside of calls can exceed seconds
 * in flight, by the cost of the calls themselves: then flight is raised to them, so that exposed is
 * never more than all. Bandwidth is unknown when nothing was sent, or in no time. */
static void dtrain__put_figures(const dtrain_trainer *trainer, const double *before, double *own)
{
    const dtrain_device *device = dtrain_world_device(trainer->world);
    dtrain_world_info world;
    dtrain_tape_info tape;
    dtrain__world_info(trainer->world, &world);
    dtrain__tape_info(trainer->tape, &tape);
    for (int word = 0; word < DTRAIN__WORD_COUNT; word++) own[word] -= before[word];
    const double exposed = own[DTRAIN_FIGURE_EXPOSED_COMM], bytes = own[DTRAIN_FIGURE_COMM_BYTES];
    const double flight = fmax(own[DTRAIN__WORD_COMM], exposed);
    own[DTRAIN__WORD_COMM] = flight;
    own[DTRAIN_FIGURE_HIDDEN_COMM] = flight - exposed;
    own[DTRAIN_FIGURE_BUS] = bytes > 0 && flight > 0 ? bytes / flight : DTRAIN__NAN;
    own[DTRAIN_FIGURE_MEMORY] = (double)(device->allocated_bytes + device->comm_bytes);
    own[DTRAIN_FIGURE_MEMORY_PEAK] = (double)device->peak_bytes;
    own[DTRAIN_FIGURE_ACTIVATIONS] = (double)(tape.activation_bytes + tape.gradient_bytes);
    if (trainer->groups.tensor_ranks == 1)
        own[DTRAIN_FIGURE_TENSOR_BYTES] = own[DTRAIN_FIGURE_TENSOR_EXPOSED] = DTRAIN__NAN;
    if (!trainer->groups.pipeline)
        own[DTRAIN_FIGURE_PIPELINE_BYTES] = own[DTRAIN_FIGURE_BUBBLE] = DTRAIN__NAN;
    own[DTRAIN__WORD_STOP] = world.stop_requested;
    own[DTRAIN__WORD_SAME] = (double)(dtrain__same_now(trainer->desc.strategy) & 0xffffff);
}

/* Write into this rank's words the step's mean loss and its weight, nothing where another rank's
 * loss counts for this model, and the share of micro-batches without data. A loss that is not
 * finite must be seen whatever its weight is. */
static void dtrain__put_loss(const dtrain_trainer *trainer, double *own)
{
    const uint32_t count = trainer->desc.micro_batches;
    double sum = 0, weights = 0, joined = 0;
    for (const dtrain__micro *m = trainer->micros; m < trainer->micros + count; m++) {
        joined += m->joined;
        if (!trainer->loss_counts) continue;
        const double loss = (double)m->loss, weight = (double)m->weight;
        sum += dtrain__is_finite(m->loss) ? loss * weight : loss;
        weights += weight;
    }
    own[DTRAIN__WORD_LOSS] = weights > 0 ? sum / weights : sum;
    own[DTRAIN__WORD_WEIGHT] = weights / (double)count;
    own[DTRAIN__WORD_ENDED] = joined / (double)count;
}

/* ---- The record -------------------------------------------------------------------------------*/

/* Gather the words of all ranks in place, with the hash of the inputs since the last time. */
static dtrain_result dtrain__trainer_exchange(dtrain_trainer *trainer)
{
    const bool shared = trainer->ranks != trainer->data_ranks;
    const uint64_t hash = shared ? dtrain__inputs_hash(trainer->tape) : 0;
    float *own = trainer->words[trainer->rank];
    for (int i = 0; i < 3; i++) own[DTRAIN__WORD_INPUTS + i] = (float)(hash >> 22 * i & 0x3fffff);
    return dtrain_all_gather(trainer->groups.all, own, trainer->words, DTRAIN__WORD_COUNT,
                             DTRAIN_DTYPE_F32, NULL);
}

/* Compare the data of ranks that have parts of one model: where it ended, and the hash of what it
 * was. Nothing else sees other samples: messages and sums mix them, into numbers that mean nothing.
 * `where` says of which call, with `count` passes of a rank. */
static dtrain_result dtrain__check_data(const dtrain_trainer *trainer, const char *where,
                                        int64_t count)
{
    const char *const advice = "give both the same samples: dtrain_loader_desc.mesh does";
    const int tensor = trainer->groups.tensor_ranks, replicas = tensor * trainer->data_ranks;
    for (int r = 0; r < trainer->ranks; r++) {
        const int first = r % replicas / tensor * tensor; /* of the same model */
        const float *own = trainer->words[r], *other = trainer->words[first];
        const int ranks[2] = {dtrain__world_rank(trainer->groups.all, r),
                              dtrain__world_rank(trainer->groups.all, first)};
        if (own[DTRAIN__WORD_ENDED] != other[DTRAIN__WORD_ENDED])
            return dtrain_fail(DTRAIN_ERROR_USAGE,
                               "%s rank %d had data for %.0f of %lld micro-batches, and rank %d, "
                               "which has another part of the same model, for %.0f; %s",
                               where, ranks[0],
                               (1 - (double)own[DTRAIN__WORD_ENDED]) * (double)count,
                               (long long)count, ranks[1],
                               (1 - (double)other[DTRAIN__WORD_ENDED]) * (double)count, advice);
        if (memcmp(own + DTRAIN__WORD_INPUTS, other + DTRAIN__WORD_INPUTS, 3 * sizeof *own) != 0)
            return dtrain_fail(DTRAIN_ERROR_USAGE,
                               "%s rank %d had other inputs or targets than rank %d, which has "
                               "another part of the same model; %s",
                               where, ranks[0], ranks[1], advice);
    }
    return DTRAIN_OK;
}

#define DTRAIN__SKIP_LIMIT 10 /* steps in a row; one more is an error */

/* Decide by the losses of all ranks and the norm whether to go on, to skip the step or to fail with
 * the same error on each rank. Where the norm is not finite no rank has updated its parameters. */
static dtrain_result dtrain__check_finite(dtrain_trainer *trainer, const dtrain_step_record *record,
                                          bool overflow)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    const char *advice = "lower the learning rate, clip gradients or look at the data";
    const bool may_skip = desc->nonfinite == DTRAIN_NONFINITE_SKIP && overflow && !trainer->scaling;
    trainer->in_a_row = may_skip ? trainer->in_a_row + 1 : 0;
    if (may_skip && trainer->in_a_row <= DTRAIN__SKIP_LIMIT) {
        trainer->skipped++;
        if (trainer->in_a_row == 1 && trainer->rank == 0)
            dtrain_log(trainer->world, DTRAIN_LOG_WARNING,
                       "step %lld is skipped: the gradient's norm is %g", (long long)record->step,
                       record->grad_norm);
        return DTRAIN_OK;
    }
    for (int r = 0; r < trainer->ranks; r++) {
        const float loss = trainer->words[r][DTRAIN__WORD_LOSS];
        if (!dtrain__is_finite(loss))
            return dtrain_fail(DTRAIN_ERROR_NUMERIC,
                               "dtrain_trainer_step: at step %lld the loss of rank %d is %g: %s",
                               (long long)record->step, dtrain__world_rank(trainer->groups.all, r),
                               (double)loss, advice);
    }
    if (!overflow || trainer->scaling) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_NUMERIC,
                       "dtrain_trainer_step: at step %lld the gradient's norm is %g although "
                       "every loss is finite: %s",
                       (long long)record->step, record->grad_norm, advice);
}

/* Reduce a word over the ranks that know it, in rank order: the same bits everywhere. */
static dtrain_spread dtrain__trainer_spread(const dtrain_trainer *trainer, int word)
{
    dtrain_spread all = {DTRAIN__NAN, DTRAIN__NAN, DTRAIN__NAN, -1, -1, 0};
    double sum = 0;
    int known = 0, least = 0, most = 0;
    for (int r = 0; r < trainer->ranks; r++) {
        const float value = trainer->words[r][word];
        if (!dtrain__is_finite(value)) continue;
        if (known == 0 || value < trainer->words[least][word]) least = r;
        if (known == 0 || value > trainer->words[most][word]) most = r;
        sum += (double)value;
        known++;
    }
    if (known == 0) return all;
    all.min = (double)trainer->words[least][word];
    all.mean = sum / known;
    all.max = (double)trainer->words[most][word];
    all.min_rank = dtrain__world_rank(trainer->groups.all, least);
    all.max_rank = dtrain__world_rank(trainer->groups.all, most);
    return all;
}

/* Find the slowest rank and its score, and count for how many steps it has been a straggler. Every
 * rank finds the same one, and rank 0 warns of it once. With an even number of ranks the lower
 * median counts: the mean of the middle two would keep one slow rank of two below a score of 2 for
 * ever. */
static void dtrain__straggler(dtrain_trainer *trainer, dtrain_step_record *record)
{
    double *sorted = trainer->compute, most = -1;
    int slowest = 0;
    for (int r = 0; r < trainer->ranks; r++) {
        const float *words = trainer->words[r];
        const double seconds =
            (double)words[DTRAIN_FIGURE_STEP] - (double)words[DTRAIN_FIGURE_EXPOSED_COMM];
        if (r == 0 || seconds > most) {
            most = seconds;
            slowest = r;
        }
        int at = r; /* insertion sort: few ranks, and no allocation */
        for (; at > 0 && sorted[at - 1] > seconds; at--) sorted[at] = sorted[at - 1];
        sorted[at] = seconds;
    }
    const double median = sorted[(trainer->ranks - 1) / 2];
    record->straggler_score = median > 0 ? most / median : 1;
    record->slowest_rank = dtrain__world_rank(trainer->groups.all, slowest);
    if (record->straggler_score <= DTRAIN__SLOW_SCORE) trainer->slow_steps = 0;
    else trainer->slow_steps = slowest == trainer->slow_rank ? trainer->slow_steps + 1 : 1;
    trainer->slow_rank = slowest;
    if (trainer->slow_steps < DTRAIN__SLOW_STEPS || trainer->named[slowest]) return;
    trainer->named[slowest] = true;
    if (trainer->rank == 0)
        dtrain_log(trainer->world, DTRAIN_LOG_WARNING,
                   "rank %d is a straggler: it has computed more than twice as long as the median "
                   "rank for %d steps running (%.1f times in step %lld), and all ranks wait for it",
                   record->slowest_rank, DTRAIN__SLOW_STEPS, record->straggler_score,
                   (long long)record->step);
}

/* Complete the record from the words of all ranks. All of them read the same words, so they decide
 * alike: all losses and the norm are finite, or the same error on each; and how the loss scale
 * moves. Without any weight the mean loss is 0, or not finite as a rank's is. */
static dtrain_result dtrain__trainer_record(dtrain_trainer *trainer, const double *own,
                                            dtrain_step_record *record)
{
    const bool overflow = !dtrain__is_finite((float)record->grad_norm);
    dtrain_strategy *strategy = trainer->desc.strategy;
    dtrain_loss_scaler *scaler = &trainer->scaler;
    const uint32_t micro_batches = trainer->desc.micro_batches;
    double loss = 0, weights = 0;
    char where[64];
    snprintf(where, sizeof where, "dtrain_trainer_step: at step %lld", (long long)record->step);
    for (int word = 0; word < DTRAIN__WORD_COUNT; word++)
        trainer->words[trainer->rank][word] = (float)own[word];
    DTRAIN__TRY(dtrain__trainer_exchange(trainer));
    for (int r = 0; r < trainer->ranks; r++) {
        const float *words = trainer->words[r];
        if (words[DTRAIN__WORD_SAME] != trainer->words[0][DTRAIN__WORD_SAME])
            return dtrain__strategy_keep(strategy,
                                         dtrain__compare_now(strategy, "dtrain_trainer_step"));
        loss += (double)words[DTRAIN__WORD_LOSS] * (double)words[DTRAIN__WORD_WEIGHT];
        weights += (double)words[DTRAIN__WORD_WEIGHT];
    }
    const double ended = dtrain__trainer_spread(trainer, DTRAIN__WORD_ENDED).mean;
    record->ended = !(ended < 1);
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__check_data(trainer, where, micro_batches)));
    DTRAIN__TRY(dtrain__check_finite(trainer, record, overflow));
    record->comm_bytes = (uint64_t)own[DTRAIN_FIGURE_COMM_BYTES];
    record->ranks = trainer->ranks;
    for (int f = 0; f < DTRAIN_FIGURE_COUNT; f++) {
        record->figures[f] = dtrain__trainer_spread(trainer, f);
        if (dtrain__is_finite((float)own[f])) record->figures[f].own = own[f];
    }
    const double seconds = record->figures[DTRAIN_FIGURE_STEP].max;
    record->skipped_steps = trainer->skipped;
    if (trainer->scaling) record->loss_scale = (double)scaler->scale;
    if (trainer->scaling && !record->ended) {
        DTRAIN__TRY(dtrain_loss_scaler_update(scaler, overflow));
        record->skipped_steps = scaler->skipped_steps;
    }
    const double micros =
        (1 - ended) * trainer->data_ranks * micro_batches; /* that had data, of all ranks */
    const uint64_t tokens = (uint64_t)trainer->desc.tokens * (uint64_t)(micros + 0.5);
    record->loss = weights > 0 ? loss / weights : loss;
    record->val_loss = record->val_accuracy = DTRAIN__NAN;
    record->tokens = trainer->tokens + tokens;
    record->tokens_per_second = seconds > 0 ? (double)tokens / seconds : 0;
    record->step_ms = 1e3 * seconds;
    record->comm_ms = 1e3 * dtrain__trainer_spread(trainer, DTRAIN__WORD_COMM).mean;
    record->exposed_comm_ms = 1e3 * record->figures[DTRAIN_FIGURE_EXPOSED_COMM].mean;
    record->data_ms = 1e3 * record->figures[DTRAIN_FIGURE_DATA].max;
    record->stop_requested = dtrain__trainer_spread(trainer, DTRAIN__WORD_STOP).max > 0;
    dtrain__straggler(trainer, record);
    return DTRAIN_OK;
}

/* ---- The step ---------------------------------------------------------------------------------*/

/* Run micro-batches and update, either with the host in the middle or queued as a whole, and then
 * make the record. A norm that is not finite leaves the parameters as they are. */
static dtrain_result dtrain__trainer_run(dtrain_trainer *trainer, dtrain_step_record *record)
{
    const dtrain_trainer_desc *desc = &trainer->desc;
    double before[DTRAIN__WORD_COUNT], own[DTRAIN__WORD_COUNT];
    record->step = trainer->step + 1;
    record->lr = (double)dtrain_schedule_lr(&desc->schedule, trainer->step);
    dtrain__trainer_counters(trainer, before);
    before[DTRAIN_FIGURE_CHECKPOINT] = trainer->saving; /* saved between two steps */
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
    dtrain__trainer_counters(trainer, own);
    trainer->saving = own[DTRAIN_FIGURE_CHECKPOINT];
    dtrain__put_figures(trainer, before, own);
    dtrain__put_loss(trainer, own);
    const uint32_t span =
        dtrain__span_begin(trainer->world, DTRAIN_SPAN_OTHER, "record", DTRAIN__UNNUMBERED);
    const dtrain_result recorded = dtrain__trainer_record(trainer, own, record);
    dtrain__span_end(trainer->world, span);
    DTRAIN__TRY(recorded);
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

/* Take one step, in a span. */
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

/* Run a pass that keeps nothing for a backward, where this rank has all of the model or with the
 * other ranks of its pipeline. micro: its weight and samples; NULL: not wanted. */
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

/* Evaluate a batch on every rank, and add the numbers of all ranks to `sums` in rank order. A rank
 * without further data takes part in the gathers of the others. Each sample counts once, whatever a
 * step averages over. A loss that counts no samples has the weight that the program gives it, or
 * 1. */
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
    if (next == DTRAIN_ERROR_END) /* of a pipeline on all of its ranks */
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
        DTRAIN__TRY(dtrain_strategy_weight(strategy, 1)); /* the program's was for this batch */
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
    double ended = 0, all_ended = 0; /* rounds of this rank; ranks in the last round */
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
    DTRAIN__TRY(dtrain__trainer_exchange(trainer)); /* with the last step's figures */
    const double total = sums[DTRAIN__ROUND_WEIGHT];
    *loss = total > 0 ? sums[DTRAIN__ROUND_LOSS] / total : sums[DTRAIN__ROUND_LOSS];
    if (sums[DTRAIN__ROUND_STOP] > 0) *loss = DTRAIN__NAN; /* not of all samples */
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
