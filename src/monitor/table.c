/* The metrics of a step
 *
 * One table has all metrics there are: how each is shown, and which number of the stream is its
 * value. A metric that was not measured is not listed, so that no sink has to ask what is known. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "world/world.h"
#include "train/trainer.h"
#include "train/view_internal.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

/* ---- The table --------------------------------------------------------------------------------*/

/* The type of a value: a double, one in seconds that is shown in milliseconds, a uint64_t, and an
 * int that is negative where it is unknown. */
enum { DTRAIN__REAL, DTRAIN__SECONDS, DTRAIN__COUNT, DTRAIN__INT };

/* The rule by which a metric is listed: in all steps, where it is finite, or finite and ... */
enum {
    DTRAIN__ALWAYS,
    DTRAIN__MEASURED, /* the value, or its figure by any rank */
    DTRAIN__USED,     /* some rank's figure is above 0 */
    DTRAIN__POSITIVE, /* above 0 */
    DTRAIN__SCALED,   /* with loss scaling, or where a step was skipped */
    DTRAIN__RANKS,    /* in a record of two ranks or more */
    DTRAIN__HELD,     /* with a trainer */
    DTRAIN__PLANNED,  /* with a plan of its memory */
    DTRAIN__RULES
};

typedef struct dtrain__metric_row {
    dtrain_metric shown;
    int type, rule;
    size_t at; /* of the value in dtrain_metrics */
} dtrain__metric_row;

/* clang-format off */
/* The name in JSON, the name in base units, and the factor to them. */
#define DTRAIN__BASE(name) name, name, 1
#define DTRAIN__MS(part) part "_ms", part "_seconds", 1e-3
#define DTRAIN__AT(member) offsetof(dtrain_metrics, member)
#define DTRAIN__FIGURE(of, take) DTRAIN__AT(last.figures[DTRAIN_FIGURE_##of].take)
/* A number of the stream; one of which each rank has a share; a figure; times. */
#define DTRAIN__NUMBER(names, group, flags, type, rule, member, help) \
    {{names, group, flags, -1, 0, help}, DTRAIN__##type, DTRAIN__##rule, DTRAIN__AT(member)}
#define DTRAIN__EACH_AT(names, group, flags, of, type, rule, member, help) \
    {{names, group, flags, DTRAIN_FIGURE_##of, 0, help}, DTRAIN__##type, DTRAIN__##rule, \
     DTRAIN__AT(member)}
#define DTRAIN__EACH(names, group, flags, of, take, help) \
    {{names, group, flags, DTRAIN_FIGURE_##of, 0, help}, DTRAIN__REAL, DTRAIN__MEASURED, \
     DTRAIN__FIGURE(of, take)}
#define DTRAIN__TIME(part, of, member, help) \
    DTRAIN__EACH_AT(DTRAIN__MS(part), "time", 0, of, REAL, ALWAYS, member, help)
#define DTRAIN__MEAN(part, of, help) \
    {{DTRAIN__MS(part), "time", 0, DTRAIN_FIGURE_##of, 0, help ", mean of ranks."}, \
     DTRAIN__SECONDS, DTRAIN__MEASURED, DTRAIN__FIGURE(of, mean)}
/* Least, mean and most of a figure over ranks, and the rank that has most. */
#define DTRAIN__SPREAD(part, unit, base_unit, scale, flags, type, of, what) \
    {{part unit "_min", part "_min" base_unit, scale, "ranks", flags, -1, 0, \
      what ", least of ranks."}, type, DTRAIN__RANKS, DTRAIN__FIGURE(of, min)}, \
    {{part unit "_mean", part "_mean" base_unit, scale, "ranks", flags, -1, 0, \
      what ", mean of ranks."}, type, DTRAIN__RANKS, DTRAIN__FIGURE(of, mean)}, \
    {{part unit "_max", part "_max" base_unit, scale, "ranks", flags, -1, 0, \
      what ", most of ranks."}, type, DTRAIN__RANKS, DTRAIN__FIGURE(of, max)}, \
    {{part unit "_rank", part "_max_rank", 1, "ranks", DTRAIN_METRIC_INTEGER, -1, 0, \
      what ", rank that has most."}, DTRAIN__INT, DTRAIN__RANKS, DTRAIN__FIGURE(of, max_rank)}
#define DTRAIN__SPREAD_MS(part, of, what) \
    DTRAIN__SPREAD(part, "_ms", "_seconds", 1e-3, 0, DTRAIN__SECONDS, of, "Time in " what)
#define DTRAIN__KIND(kind, of) \
    {{DTRAIN__BASE(kind "_bytes"), "sent", DTRAIN__I, \
      (int)DTRAIN_FIGURE_COMM_BYTES + (int)DTRAIN_COLLECTIVE_##of, 0, \
      "Bytes that rank 0 sent in the step by " kind "."}, DTRAIN__REAL, DTRAIN__USED, \
     DTRAIN__AT(last.figures[(int)DTRAIN_FIGURE_COMM_BYTES + (int)DTRAIN_COLLECTIVE_##of].own)}
#define DTRAIN__MEMORY(name, rule, member, what) \
    {{DTRAIN__BASE(name "_bytes"), "memory", DTRAIN__I | DTRAIN_METRIC_FIXED, -1, 0, \
      "Bytes of rank 0 " what "."}, DTRAIN__COUNT, rule, DTRAIN__AT(member)}
#define DTRAIN__MEMORIES(prefix, rule, memory, verb) \
    DTRAIN__MEMORY(prefix "param", rule, memory.params, verb " for parameters"), \
    DTRAIN__MEMORY(prefix "grad", rule, memory.grads, verb " for gradients"), \
    DTRAIN__MEMORY(prefix "optimizer", rule, memory.optimizer, verb " for optimizer state"), \
    DTRAIN__MEMORY(prefix "buffer", rule, memory.buffers, verb " to gather and reduce"), \
    DTRAIN__MEMORY(prefix "host", rule, memory.host, verb " in host memory")
#define DTRAIN__I DTRAIN_METRIC_INTEGER
#define DTRAIN__SUM (DTRAIN_METRIC_INTEGER | DTRAIN_METRIC_COUNTER)
#define DTRAIN__NAMES(name, base) name, base, 1

static const dtrain__metric_row dtrain__metric_rows[] = {
    DTRAIN__NUMBER(DTRAIN__BASE("loss"), "loss", 0, REAL, ALWAYS, last.loss,
                   "Mean loss over micro-batches and ranks."),
    DTRAIN__NUMBER(DTRAIN__BASE("val_loss"), "loss", 0, REAL, MEASURED, last.val_loss,
                   "Mean loss of the last evaluation."),
    DTRAIN__NUMBER(DTRAIN__BASE("val_accuracy"), "loss", 0, REAL, MEASURED, last.val_accuracy,
                   "Share of right answers in the last evaluation, 0 to 1."),
    DTRAIN__NUMBER(DTRAIN__BASE("grad_norm"), "optimizer", 0, REAL, ALWAYS, last.grad_norm,
                   "Gradient norm before clipping."),
    DTRAIN__NUMBER(DTRAIN__NAMES("lr", "learning_rate"), "optimizer", 0, REAL, ALWAYS, last.lr,
                   "Learning rate."),
    DTRAIN__NUMBER(DTRAIN__NAMES("tokens", "tokens_total"), "throughput", DTRAIN__SUM, COUNT,
                   ALWAYS, last.tokens, "Tokens or samples of all ranks."),
    DTRAIN__NUMBER(DTRAIN__BASE("tokens_per_second"), "throughput", 0, REAL, ALWAYS,
                   last.tokens_per_second, "Tokens or samples of all ranks a second."),
    DTRAIN__TIME("step", STEP, last.step_ms, "Time of a step, slowest rank."),
    DTRAIN__NUMBER(DTRAIN__MS("comm"), "time", 0, REAL, ALWAYS, last.comm_ms,
                   "Time with an operation in flight, mean of ranks."),
    DTRAIN__TIME("exposed_comm", EXPOSED_COMM, last.exposed_comm_ms,
                 "Time that ranks waited in communication, mean."),
    DTRAIN__TIME("data", DATA, last.data_ms, "Time in wait for batches, slowest rank."),
    DTRAIN__EACH_AT(DTRAIN__BASE("comm_bytes"), "sent", DTRAIN__I, COMM_BYTES, COUNT, ALWAYS,
                   last.comm_bytes, "Bytes that rank 0 sent in the step."),
    DTRAIN__NUMBER(DTRAIN__BASE("loss_scale"), "optimizer", 0, REAL, POSITIVE, last.loss_scale,
                   "Loss scale of the step."),
    DTRAIN__NUMBER(DTRAIN__NAMES("skipped_steps", "skipped_steps_total"), "optimizer", DTRAIN__SUM,
                   COUNT, SCALED, last.skipped_steps, "Steps without an update."),
    DTRAIN__NUMBER(DTRAIN__NAMES("straggler_score", "straggler_ratio"), "ranks", 0, REAL, RANKS,
                   last.straggler_score, "Slowest rank's compute time by the median's."),
    DTRAIN__NUMBER(DTRAIN__BASE("slowest_rank"), "ranks", DTRAIN__I, INT, RANKS, last.slowest_rank,
                   "Rank that computed longest."),
    DTRAIN__MEAN("forward", FORWARD, "Time in the forward pass"),
    DTRAIN__MEAN("backward", BACKWARD, "Time in the backward pass"),
    DTRAIN__MEAN("hidden_comm", HIDDEN_COMM, "Communication that compute hides"),
    DTRAIN__MEAN("optimizer", OPTIMIZER, "Time in norm and update"),
    DTRAIN__MEAN("checkpoint", CHECKPOINT, "Time in saving before the step"),
    DTRAIN__SPREAD_MS("step", STEP, "a step"),
    DTRAIN__SPREAD_MS("data", DATA, "wait for batches"),
    DTRAIN__SPREAD_MS("forward", FORWARD, "the forward pass"),
    DTRAIN__SPREAD_MS("backward", BACKWARD, "the backward pass"),
    DTRAIN__SPREAD_MS("exposed_comm", EXPOSED_COMM, "exposed communication"),
    DTRAIN__SPREAD_MS("hidden_comm", HIDDEN_COMM, "hidden communication"),
    DTRAIN__SPREAD_MS("optimizer", OPTIMIZER, "norm and update"),
    DTRAIN__SPREAD_MS("checkpoint", CHECKPOINT, "saving"),
    DTRAIN__SPREAD("comm", "_bytes", "_bytes", 1, DTRAIN__I, DTRAIN__REAL, COMM_BYTES,
                   "Bytes sent in the step"),
    DTRAIN__EACH(DTRAIN__BASE("tensor_bytes"), "sent", DTRAIN__I, TENSOR_BYTES, own,
                 "Bytes that rank 0 sent in the step over the tensor axis."),
    DTRAIN__MEAN("tensor_exposed", TENSOR_EXPOSED, "Exposed communication of the tensor axis"),
    DTRAIN__EACH(DTRAIN__BASE("pipeline_bytes"), "sent", DTRAIN__I, PIPELINE_BYTES, own,
                 "Bytes that rank 0 sent in the step over the pipeline axis."),
    DTRAIN__MEAN("bubble", BUBBLE, "Wait for other stages of the pipeline"),
    DTRAIN__EACH(DTRAIN__BASE("bus_bytes_per_second"), "sent", 0, BUS, mean,
                 "Bus bandwidth as nccl-tests have it, mean of ranks."),
    DTRAIN__KIND("all_reduce", ALL_REDUCE),
    DTRAIN__KIND("reduce_scatter", REDUCE_SCATTER),
    DTRAIN__KIND("all_gather", ALL_GATHER),
    DTRAIN__KIND("broadcast", BROADCAST),
    DTRAIN__KIND("reduce", REDUCE),
    DTRAIN__KIND("send", SEND),
    DTRAIN__KIND("all_to_all", ALL_TO_ALL),
    DTRAIN__NUMBER(DTRAIN__BASE("flops_per_second"), "throughput", 0, REAL, MEASURED, flops,
                   "Floating-point operations of all ranks a second."),
    DTRAIN__NUMBER(DTRAIN__NAMES("peak_share", "flops_ratio"), "throughput", 0, REAL, MEASURED,
                   peak_share, "Share of the devices' peak."),
    DTRAIN__EACH(DTRAIN__BASE("memory_bytes"), "memory", DTRAIN__I, MEMORY, max,
                 "Device memory allocated, largest rank."),
    DTRAIN__EACH(DTRAIN__BASE("memory_peak_bytes"), "memory", DTRAIN__I, MEMORY_PEAK, max,
                 "Most device memory so far, largest rank."),
    DTRAIN__EACH(DTRAIN__BASE("memory_activation_bytes"), "memory", DTRAIN__I, ACTIVATIONS, max,
                 "Activations of the largest pass, largest rank."),
    DTRAIN__MEMORIES("memory_", DTRAIN__HELD, held, "held"),
    DTRAIN__MEMORIES("predicted_", DTRAIN__PLANNED, planned, "predicted"),
    DTRAIN__MEMORY("predicted_activation", DTRAIN__PLANNED, planned_passes,
                   "predicted for activations and their gradients"),
    DTRAIN__MEMORY("predicted", DTRAIN__PLANNED, planned.total, "that were predicted"),
};
/* clang-format on */

/* ---- The values -------------------------------------------------------------------------------*/

/* Complete the stream's copy of the record: figures that no rank has measured are NaN, as all are
 * in a record without figures. Then compute the numbers that are no figures. */
static void dtrain__metrics_prepare(dtrain_metrics *metrics)
{
    const dtrain_spread unknown = {DTRAIN__NAN, DTRAIN__NAN, DTRAIN__NAN, -1, -1, 0};
    dtrain_step_record *r = &metrics->last;
    dtrain_spread *figures = r->figures;
    for (int f = 0; f < DTRAIN_FIGURE_COUNT; f++)
        if (r->ranks == 0 || figures[f].max_rank < 0) figures[f] = unknown;
    const double seconds = figures[DTRAIN_FIGURE_STEP].max;
    const double flops = figures[DTRAIN_FIGURE_FLOPS].mean;
    metrics->flops = flops > 0 && seconds > 0 ? flops * r->ranks / seconds : DTRAIN__NAN;
    metrics->peak_share = metrics->desc.peak_flops > 0
                              ? metrics->flops / (r->ranks * metrics->desc.peak_flops)
                              : DTRAIN__NAN;
}

/* List the metrics of the last step; before the first one only those that are fixed. */
DTRAIN__PRIVATE void dtrain__metrics_list(dtrain_metrics *metrics)
{
    const dtrain__trainer_view *trainer = dtrain__trainer_seen(metrics->desc.trainer);
    dtrain_metrics_sample *sample = &metrics->sample;
    const dtrain_step_record *r = &metrics->last;
    const bool begun = metrics->summary.steps > 0;
    bool holds[DTRAIN__RULES] = {begun, begun, begun, begun, false, false, false, false};
    holds[DTRAIN__SCALED] = begun && (r->loss_scale > 0 || r->skipped_steps);
    holds[DTRAIN__RANKS] = begun && r->ranks > 1;
    holds[DTRAIN__HELD] = trainer != NULL;
    holds[DTRAIN__PLANNED] = !metrics->no_plan[0];
    sample->step = r->step;
    sample->wall_time = dtrain__wall_time();
    sample->figures = trainer && r->ranks == trainer->ranks ? trainer->words : NULL;
    sample->figure_stride = trainer ? trainer->word_count : 0;
    sample->count = 0;
    dtrain__metrics_prepare(metrics);
    for (size_t i = 0; i < sizeof dtrain__metric_rows / sizeof *dtrain__metric_rows; i++) {
        const dtrain__metric_row *row = &dtrain__metric_rows[i];
        const void *at = (const char *)metrics + row->at;
        const dtrain_spread *figure = row->shown.figure < 0 ? NULL : &r->figures[row->shown.figure];
        double value = DTRAIN__NAN;
        if (!holds[row->rule]) continue;
        if (row->rule == DTRAIN__MEASURED && figure && figure->max_rank < 0) continue;
        if (row->rule == DTRAIN__USED && !(figure->max > 0)) continue;
        if (row->type == DTRAIN__COUNT) value = (double)*(const uint64_t *)at;
        else if (row->type != DTRAIN__INT) value = *(const double *)at;
        else if (*(const int *)at >= 0) value = *(const int *)at;
        if (row->rule != DTRAIN__ALWAYS && !dtrain__finite(value)) continue;
        if (row->rule == DTRAIN__POSITIVE && !(value > 0)) continue;
        metrics->metrics[sample->count] = row->shown;
        metrics->metrics[sample->count++].value =
            row->type == DTRAIN__SECONDS ? 1e3 * value : value;
    }
    for (int i = 0; i < DTRAIN_ADDED_FIGURES; i++) {
        const char *name = r->added[i].name;
        const dtrain_metric added = {DTRAIN__BASE(name),     "added", 0, -1, r->added[i].value,
                                     "Added by the program."};
        if (name) metrics->metrics[sample->count++] = added;
    }
}
