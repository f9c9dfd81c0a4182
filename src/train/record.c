/* The record of a step
 *
 *     counters before | the step | counters after -> words -> all-gather -> figures, decisions
 *
 * A rank measures its words, gathers all ranks' words, and makes the record from them. All ranks
 * judge the same numbers: a loss that is not finite is the same error on each of them.
 *
 * A rank either computes or is inside a communicator. A fast rank waits there for a slow one: a
 * straggler shows in the exposed time of other ranks, and in its own compute time (step - exposed),
 * by which ranks are compared. Waiting for data counts as compute time, so that a rank with a slow
 * disk is found. No figure has the time that ranks wait in the record's own all-gather. */

#include "core/platform_internal.h"
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
#include "strategy/view_internal.h"
#include "tape/tape.h"
#include "tape/view_internal.h"
#include "optim/scaler.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"

/* ---- The words of this rank -------------------------------------------------------------------*/

/* Read the clock and the counters of communicators, spans and tape into the words they measure. */
DTRAIN__PRIVATE void dtrain__record_counters(const dtrain_trainer *trainer, double *words)
{
    static const struct {
        int word;
        dtrain_span_kind kind;
    } parts[] = {{DTRAIN__WORD_DATA, DTRAIN_SPAN_DATA},
                 {DTRAIN__WORD_FORWARD, DTRAIN_SPAN_FORWARD},
                 {DTRAIN__WORD_BACKWARD, DTRAIN_SPAN_BACKWARD},
                 {DTRAIN__WORD_EXPOSED_COMM, DTRAIN_SPAN_COMM},
                 {DTRAIN__WORD_OPTIMIZER, DTRAIN_SPAN_OPTIMIZER},
                 {DTRAIN__WORD_CHECKPOINT, DTRAIN_SPAN_CHECKPOINT}};
    dtrain_strategy_info strategy;
    dtrain_comm_info tensor, pipeline;
    dtrain__strategy_info(trainer->desc.strategy, &strategy);
    const dtrain_comm_info *const comm = &strategy.traffic;
    dtrain__strategy_tensor_info(trainer->desc.strategy, &tensor);
    dtrain__strategy_pipeline_info(trainer->desc.strategy, &pipeline);
    memset(words, 0, DTRAIN__WORD_COUNT * sizeof *words);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        words[parts[i].word] = dtrain__span_seconds(trainer->world, parts[i].kind);
    for (int kind = 1; kind < DTRAIN_COLLECTIVE_KINDS; kind++)
        words[DTRAIN__WORD_COMM_BYTES + kind] =
            (double)(comm->kind_bytes[kind] + tensor.kind_bytes[kind] + pipeline.kind_bytes[kind]);
    words[DTRAIN__WORD_COMM_BYTES] =
        (double)(comm->wire_bytes + tensor.wire_bytes + pipeline.wire_bytes);
    words[DTRAIN__WORD_TENSOR_BYTES] = (double)tensor.wire_bytes;
    words[DTRAIN__WORD_TENSOR_EXPOSED] = tensor.inside_seconds;
    words[DTRAIN__WORD_PIPELINE_BYTES] = (double)pipeline.wire_bytes;
    words[DTRAIN__WORD_BUBBLE] = pipeline.inside_seconds;
    words[DTRAIN__WORD_COMM] =
        comm->flight_seconds + tensor.flight_seconds + pipeline.flight_seconds;
    words[DTRAIN__WORD_FLOPS] = dtrain__count_flops(trainer->tape, 0);
    words[DTRAIN__WORD_STEP] = dtrain_seconds();
}

/* Write the step's mean loss on this rank and its weight into the words, nothing if another rank's
 * loss counts for this model, and the share of micro-batches without data. A loss that is not
 * finite is kept whatever its weight is. */
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

/* ---- The words of all ranks -------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__words_gather(dtrain_trainer *trainer)
{
    const bool shared = trainer->ranks != trainer->data_ranks;
    const uint64_t hash = shared ? dtrain__inputs_hash(trainer->tape) : 0;
    float *own = trainer->words[trainer->rank];
    for (int i = 0; i < 3; i++) own[DTRAIN__WORD_INPUTS + i] = (float)(hash >> 22 * i & 0x3fffff);
    return dtrain_all_gather(trainer->groups.all, own, trainer->words, DTRAIN__WORD_COUNT,
                             DTRAIN_DTYPE_F32, NULL);
}

/* Nothing else would notice other samples: messages and sums mix them into meaningless numbers. */
DTRAIN__PRIVATE dtrain_result dtrain__check_data(const dtrain_trainer *trainer, const char *where,
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

/* Decide by the losses of all ranks and the norm: continue, skip the step, or fail with the same
 * error on each rank. If the norm is not finite, no rank has updated its parameters. */
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

/* ---- The figures ------------------------------------------------------------------------------*/

/* The way in which the values of ranks become one figure ... */
enum {
    DTRAIN__OWN, /* of this rank */
    DTRAIN__LEAST,
    DTRAIN__MEAN,
    DTRAIN__MOST,
    DTRAIN__MOST_RANK, /* the rank that has most */
    DTRAIN__TAKES
};

/* ... and the rule by which a word that some rank has measured is a figure. */
enum {
    DTRAIN__MEASURED,
    DTRAIN__USED,   /* only if it is above 0 on some rank */
    DTRAIN__SEVERAL /* only in a record of two ranks or more */
};

/* clang-format off */
#define DTRAIN__SPREAD(part, unit, word) \
    {"ranks/" part "_" unit "_min", unit, word, DTRAIN__LEAST, DTRAIN__SEVERAL}, \
    {"ranks/" part "_" unit "_mean", unit, word, DTRAIN__MEAN, DTRAIN__SEVERAL}, \
    {"ranks/" part "_" unit "_max", unit, word, DTRAIN__MOST, DTRAIN__SEVERAL}, \
    {"ranks/" part "_" unit "_rank", "rank", word, DTRAIN__MOST_RANK, DTRAIN__SEVERAL}
#define DTRAIN__TIME(part, of, take) \
    {"time/" part "_ms", "ms", DTRAIN__WORD_##of, DTRAIN__##take, DTRAIN__MEASURED}
#define DTRAIN__TIMES(part, of, take) \
    DTRAIN__TIME(part, of, take), DTRAIN__SPREAD(part, "ms", DTRAIN__WORD_##of)
#define DTRAIN__SENT(kind, of) \
    {"sent/" kind "_bytes", "bytes", (int)DTRAIN__WORD_COMM_BYTES + (int)DTRAIN_COLLECTIVE_##of, \
     DTRAIN__OWN, DTRAIN__USED}

/* Every figure that is made of a word of all ranks; rows of one word stand together. */
static const struct {
    const char *name, *unit;
    int word, take, rule;
} dtrain__figure_rows[] = {
    DTRAIN__TIMES("step", STEP, MOST),
    DTRAIN__TIME("comm", COMM, MEAN),
    DTRAIN__TIMES("exposed_comm", EXPOSED_COMM, MEAN),
    DTRAIN__TIMES("data", DATA, MOST),
    DTRAIN__TIMES("forward", FORWARD, MEAN),
    DTRAIN__TIMES("backward", BACKWARD, MEAN),
    DTRAIN__TIMES("hidden_comm", HIDDEN_COMM, MEAN),
    DTRAIN__TIMES("optimizer", OPTIMIZER, MEAN),
    DTRAIN__TIMES("checkpoint", CHECKPOINT, MEAN),
    DTRAIN__TIME("tensor_exposed", TENSOR_EXPOSED, MEAN),
    DTRAIN__TIME("bubble", BUBBLE, MEAN),
    {"sent/comm_bytes", "bytes", DTRAIN__WORD_COMM_BYTES, DTRAIN__OWN, DTRAIN__MEASURED},
    DTRAIN__SPREAD("comm", "bytes", DTRAIN__WORD_COMM_BYTES),
    {"sent/tensor_bytes", "bytes", DTRAIN__WORD_TENSOR_BYTES, DTRAIN__OWN, DTRAIN__MEASURED},
    {"sent/pipeline_bytes", "bytes", DTRAIN__WORD_PIPELINE_BYTES, DTRAIN__OWN, DTRAIN__MEASURED},
    {"sent/bus_bytes_per_second", "", DTRAIN__WORD_BUS, DTRAIN__MEAN, DTRAIN__MEASURED},
    DTRAIN__SENT("all_reduce", ALL_REDUCE),
    DTRAIN__SENT("reduce_scatter", REDUCE_SCATTER),
    DTRAIN__SENT("all_gather", ALL_GATHER),
    DTRAIN__SENT("broadcast", BROADCAST),
    DTRAIN__SENT("reduce", REDUCE),
    DTRAIN__SENT("send", SEND),
    DTRAIN__SENT("all_to_all", ALL_TO_ALL),
    {"memory/memory_bytes", "bytes", DTRAIN__WORD_MEMORY, DTRAIN__MOST, DTRAIN__MEASURED},
    {"memory/memory_peak_bytes", "bytes", DTRAIN__WORD_MEMORY_PEAK, DTRAIN__MOST,
     DTRAIN__MEASURED},
    {"memory/memory_activation_bytes", "bytes", DTRAIN__WORD_ACTIVATIONS, DTRAIN__MOST,
     DTRAIN__MEASURED},
};
/* clang-format on */

/* Reduce a word over the ranks that know it, in rank order: the same bits on every rank. all: the
 * values by take, but for OWN. Return how many ranks know it. */
static int dtrain__word_reduce(const dtrain_trainer *trainer, int word, double *all)
{
    int known = 0, most = 0;
    double sum = 0;
    all[DTRAIN__LEAST] = all[DTRAIN__MOST] = DTRAIN__NAN;
    for (int r = 0; r < trainer->ranks; r++) {
        const double value = (double)trainer->words[r][word];
        if (!dtrain__is_finite(trainer->words[r][word])) continue;
        if (known == 0 || value < all[DTRAIN__LEAST]) all[DTRAIN__LEAST] = value;
        if (known == 0 || value > all[DTRAIN__MOST]) all[DTRAIN__MOST] = value, most = r;
        sum += value;
        known++;
    }
    all[DTRAIN__MEAN] = known ? sum / known : DTRAIN__NAN;
    all[DTRAIN__MOST_RANK] = dtrain__world_rank(trainer->groups.all, most);
    return known;
}

/* List the figures of all ranks' words, with each rank's value where ranks are not compared. */
static void dtrain__record_figures(const dtrain_trainer *trainer, const double *own,
                                   dtrain_step_record *record)
{
    double all[DTRAIN__TAKES];
    int known = 0, word = -1;
    for (size_t i = 0; i < sizeof dtrain__figure_rows / sizeof *dtrain__figure_rows; i++) {
        const int take = dtrain__figure_rows[i].take, rule = dtrain__figure_rows[i].rule;
        const double scale = strcmp(dtrain__figure_rows[i].unit, "ms") == 0 ? 1e3 : 1;
        if (dtrain__figure_rows[i].word != word) {
            word = dtrain__figure_rows[i].word;
            known = dtrain__word_reduce(trainer, word, all);
            all[DTRAIN__OWN] = own[word];
        }
        if (!known || (rule == DTRAIN__SEVERAL && trainer->ranks < 2) ||
            (rule == DTRAIN__USED && !(all[DTRAIN__MOST] > 0)))
            continue;
        dtrain_figure *figure = &record->figures[record->figure_count++];
        figure->name = dtrain__figure_rows[i].name;
        figure->unit = dtrain__figure_rows[i].unit;
        figure->value = scale * all[take];
        if (rule == DTRAIN__SEVERAL) continue;
        float *values = trainer->shares + (size_t)word * (size_t)trainer->ranks;
        for (int r = 0; r < trainer->ranks; r++)
            values[r] = (float)(scale * (double)trainer->words[r][word]);
        figure->ranks = values;
    }
}

#define DTRAIN__SLOW_SCORE 2.0 /* a straggler's compute time over the median rank's ... */
#define DTRAIN__SLOW_STEPS 10  /* ... in this many steps in a row */

/* Find the slowest rank and its score, and count for how many steps it has been a straggler. Every
 * rank finds the same one, and rank 0 warns once. With an even number of ranks the lower median
 * counts: the mean of the middle two would keep one slow rank of two below a score of 2 forever. */
static void dtrain__straggler(dtrain_trainer *trainer, dtrain_step_record *record)
{
    double *sorted = trainer->compute, most = -1;
    int slowest = 0;
    for (int r = 0; r < trainer->ranks; r++) {
        const float *words = trainer->words[r];
        const double seconds =
            (double)words[DTRAIN__WORD_STEP] - (double)words[DTRAIN__WORD_EXPOSED_COMM];
        if (r == 0 || seconds > most) {
            most = seconds;
            slowest = r;
        }
        int at = r; /* insertion sort: few ranks, and no allocation */
        for (; at > 0 && sorted[at - 1] > seconds; at--) sorted[at] = sorted[at - 1];
        sorted[at] = seconds;
    }
    const double median = sorted[(trainer->ranks - 1) / 2], score = median > 0 ? most / median : 1;
    const int rank = dtrain__world_rank(trainer->groups.all, slowest);
    (void)dtrain_record_add(record, "ranks/straggler_score", "", score);
    (void)dtrain_record_add(record, "ranks/slowest_rank", "rank", rank);
    if (score <= DTRAIN__SLOW_SCORE) trainer->slow_steps = 0;
    else trainer->slow_steps = slowest == trainer->slow_rank ? trainer->slow_steps + 1 : 1;
    trainer->slow_rank = slowest;
    if (trainer->slow_steps < DTRAIN__SLOW_STEPS || trainer->named[slowest]) return;
    trainer->named[slowest] = true;
    if (trainer->rank == 0)
        dtrain_log(trainer->world, DTRAIN_LOG_WARNING,
                   "rank %d is a straggler: it has computed more than twice as long as the median "
                   "rank for %d steps running (%.1f times in step %lld), and all ranks wait for it",
                   rank, DTRAIN__SLOW_STEPS, score, (long long)record->step);
}

/* ---- The record -------------------------------------------------------------------------------*/

/* Complete the record from the words of all ranks. All of them read the same words, so they decide
 * alike: whether losses and norm are finite, and how the loss scale moves. Without any weight the
 * mean loss is 0, or not finite as a rank's is. */
static dtrain_result dtrain__record_complete(dtrain_trainer *trainer, const double *own,
                                             dtrain_step_record *record)
{
    const bool overflow = !dtrain__is_finite((float)record->grad_norm);
    dtrain_strategy *strategy = trainer->desc.strategy;
    dtrain_loss_scaler *scaler = &trainer->scaler;
    const uint32_t micro_batches = trainer->desc.micro_batches;
    double loss = 0, weights = 0, all[DTRAIN__TAKES];
    char where[64];
    snprintf(where, sizeof where, "dtrain_trainer_step: at step %lld", (long long)record->step);
    for (int word = 0; word < DTRAIN__WORD_COUNT; word++)
        trainer->words[trainer->rank][word] = (float)own[word];
    DTRAIN__TRY(dtrain__words_gather(trainer));
    for (int r = 0; r < trainer->ranks; r++) {
        const float *words = trainer->words[r];
        if (words[DTRAIN__WORD_SAME] != trainer->words[0][DTRAIN__WORD_SAME])
            return dtrain__strategy_keep(strategy,
                                         dtrain__compare_now(strategy, "dtrain_trainer_step"));
        loss += (double)words[DTRAIN__WORD_LOSS] * (double)words[DTRAIN__WORD_WEIGHT];
        weights += (double)words[DTRAIN__WORD_WEIGHT];
    }
    (void)dtrain__word_reduce(trainer, DTRAIN__WORD_ENDED, all);
    const double ended = all[DTRAIN__MEAN];
    record->ended = !(ended < 1);
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__check_data(trainer, where, micro_batches)));
    DTRAIN__TRY(dtrain__check_finite(trainer, record, overflow));
    record->skipped_steps = trainer->skipped;
    if (trainer->scaling) record->loss_scale = (double)scaler->scale;
    if (trainer->scaling && !record->ended) {
        DTRAIN__TRY(dtrain_loss_scaler_update(scaler, overflow));
        record->skipped_steps = scaler->skipped_steps;
    }
    const double micros =
        (1 - ended) * trainer->data_ranks * micro_batches; /* that had data, of all ranks */
    const uint64_t tokens = (uint64_t)trainer->desc.tokens * (uint64_t)(micros + 0.5);
    record->ranks = trainer->ranks;
    record->loss = weights > 0 ? loss / weights : loss;
    record->val_loss = record->val_accuracy = DTRAIN__NAN;
    record->tokens = trainer->tokens + tokens;
    (void)dtrain__word_reduce(trainer, DTRAIN__WORD_STOP, all);
    record->stop_requested = all[DTRAIN__MOST] > 0;
    dtrain__record_figures(trainer, own, record);
    const double seconds = 1e-3 * dtrain_record_value(record, "step_ms");
    (void)dtrain__word_reduce(trainer, DTRAIN__WORD_FLOPS, all);
    const double flops = all[DTRAIN__MEAN] * trainer->ranks;
    (void)dtrain_record_add(record, "throughput/tokens_per_second", "",
                            seconds > 0 ? (double)tokens / seconds : 0);
    if (flops > 0 && seconds > 0)
        (void)dtrain_record_add(record, "throughput/flops_per_second", "", flops / seconds);
    if (trainer->ranks > 1) dtrain__straggler(trainer, record);
    return DTRAIN_OK;
}

/* Seconds inside calls can exceed seconds in flight by the cost of the calls: flight is raised to
 * them, so that exposed is never more than all. Bandwidth is unknown when nothing was sent, or in
 * no time. */
DTRAIN__PRIVATE dtrain_result dtrain__record_make(dtrain_trainer *trainer, const double *before,
                                                  dtrain_step_record *record)
{
    const dtrain_device *device = dtrain_world_device(trainer->world);
    double own[DTRAIN__WORD_COUNT];
    dtrain_world_info world;
    dtrain_tape_info tape;
    dtrain__world_info(trainer->world, &world);
    dtrain__tape_info(trainer->tape, &tape);
    dtrain__record_counters(trainer, own);
    trainer->saving = own[DTRAIN__WORD_CHECKPOINT];
    for (int word = 0; word < DTRAIN__WORD_COUNT; word++) own[word] -= before[word];
    const double exposed = own[DTRAIN__WORD_EXPOSED_COMM], bytes = own[DTRAIN__WORD_COMM_BYTES];
    const double flight = fmax(own[DTRAIN__WORD_COMM], exposed);
    own[DTRAIN__WORD_COMM] = flight;
    own[DTRAIN__WORD_HIDDEN_COMM] = flight - exposed;
    own[DTRAIN__WORD_BUS] = bytes > 0 && flight > 0 ? bytes / flight : DTRAIN__NAN;
    own[DTRAIN__WORD_MEMORY] = (double)(device->allocated_bytes + device->comm_bytes);
    own[DTRAIN__WORD_MEMORY_PEAK] = (double)device->peak_bytes;
    own[DTRAIN__WORD_ACTIVATIONS] = (double)(tape.activation_bytes + tape.gradient_bytes);
    if (trainer->groups.tensor_ranks == 1)
        own[DTRAIN__WORD_TENSOR_BYTES] = own[DTRAIN__WORD_TENSOR_EXPOSED] = DTRAIN__NAN;
    if (!trainer->groups.pipeline)
        own[DTRAIN__WORD_PIPELINE_BYTES] = own[DTRAIN__WORD_BUBBLE] = DTRAIN__NAN;
    own[DTRAIN__WORD_STOP] = world.stop_requested;
    own[DTRAIN__WORD_SAME] = (double)(dtrain__same_now(trainer->desc.strategy) & 0xffffff);
    dtrain__put_loss(trainer, own);
    const uint32_t span =
        dtrain__span_begin(trainer->world, DTRAIN_SPAN_OTHER, "record", DTRAIN__UNNUMBERED);
    const dtrain_result result = dtrain__record_complete(trainer, own, record);
    dtrain__span_end(trainer->world, span);
    return result;
}
