/* The metrics of a step
 *
 * The rows below are all metrics there are: names, group, flags, and how the value is made from the
 * record. A value that was not measured is NaN, and its row is left out, so that no sink has to ask
 * what is known. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "strategy/memory.h"
#include "train/trainer.h"
#include "train/view_internal.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

/* A row of dtrain_metric. UNIT: the name in JSON, the name in base units and the factor to them. */
#define DTRAIN__BASE(name) name, name, 1
#define DTRAIN__MS(part) part "_ms", part "_seconds", 1e-3
#define DTRAIN__EACH(figure) (int)DTRAIN_FIGURE_##figure
#define DTRAIN__NO_RANKS (-1)

/* Append rows; `measured`: of them those that are finite. */
static void dtrain__metrics_add(dtrain_metrics *metrics, const dtrain_metric *rows, size_t count,
                                bool measured)
{
    for (size_t i = 0; i < count && metrics->sample.count < DTRAIN__METRICS_MOST; i++)
        if (!measured || dtrain__finite(rows[i].value))
            metrics->metrics[metrics->sample.count++] = rows[i];
}

#define DTRAIN__ADD(rows, measured) \
    dtrain__metrics_add(metrics, rows, sizeof rows / sizeof *rows, measured)

static void dtrain__add_training(dtrain_metrics *metrics)
{
    const dtrain_step_record *r = &metrics->last;
    const uint32_t integer = DTRAIN_METRIC_INTEGER, counter = integer | DTRAIN_METRIC_COUNTER;
    const int none = DTRAIN__NO_RANKS;
    const dtrain_metric always[] = {
        {DTRAIN__BASE("loss"), "loss", 0, none, r->loss, "Mean loss over micro-batches and ranks."},
        {DTRAIN__BASE("grad_norm"), "optimizer", 0, none, r->grad_norm,
         "Gradient norm before clipping."},
        {"lr", "learning_rate", 1, "optimizer", 0, none, r->lr, "Learning rate."},
        {"tokens", "tokens_total", 1, "throughput", counter, none, (double)r->tokens,
         "Tokens or samples of all ranks."},
        {DTRAIN__BASE("tokens_per_second"), "throughput", 0, none, r->tokens_per_second,
         "Tokens or samples of all ranks a second."},
        {DTRAIN__MS("step"), "time", 0, DTRAIN__EACH(STEP), r->step_ms,
         "Time of a step, slowest rank."},
        {DTRAIN__MS("comm"), "time", 0, none, r->comm_ms,
         "Time with an operation in flight, mean of ranks."},
        {DTRAIN__MS("exposed_comm"), "time", 0, DTRAIN__EACH(EXPOSED_COMM), r->exposed_comm_ms,
         "Time that ranks waited in communication, mean."},
        {DTRAIN__MS("data"), "time", 0, DTRAIN__EACH(DATA), r->data_ms,
         "Time in wait for batches, slowest rank."},
        {DTRAIN__BASE("comm_bytes"), "sent", integer, DTRAIN__EACH(COMM_BYTES),
         (double)r->comm_bytes, "Bytes that rank 0 sent in the step."},
    };
    const dtrain_metric evaluated[] = {
        {DTRAIN__BASE("val_loss"), "loss", 0, none, r->val_loss,
         "Mean loss of the last evaluation."},
        {DTRAIN__BASE("val_accuracy"), "loss", 0, none, r->val_accuracy,
         "Share of right answers in the last evaluation, 0 to 1."},
    };
    const dtrain_metric scaled[] = {
        {DTRAIN__BASE("loss_scale"), "optimizer", 0, none, r->loss_scale,
         "Loss scale of the step."},
        {"skipped_steps", "skipped_steps_total", 1, "optimizer", counter, none,
         (double)r->skipped_steps, "Steps without an update."},
    };
    const dtrain_metric ranks[] = {
        {"straggler_score", "straggler_ratio", 1, "ranks", 0, none, r->straggler_score,
         "Slowest rank's compute time by the median's."},
        {DTRAIN__BASE("slowest_rank"), "ranks", integer, none, (double)r->slowest_rank,
         "Rank that computed longest."},
    };
    DTRAIN__ADD(always, false);
    DTRAIN__ADD(evaluated, true);
    if (r->loss_scale > 0) DTRAIN__ADD(scaled, false);
    else if (r->skipped_steps) dtrain__metrics_add(metrics, &scaled[1], 1, false);
    if (r->ranks > 1) DTRAIN__ADD(ranks, false);
}

/* clang-format off */
#define DTRAIN__MEAN_MS(part, of, help) \
    {DTRAIN__MS(part), "time", 0, DTRAIN__EACH(of), 1e3 * f[DTRAIN_FIGURE_##of].mean, help}
/* Least, mean and most of a figure over ranks, and the rank that has most. */
#define DTRAIN__SPREAD(part, unit, base_unit, scale, factor, flags, of, what) \
    {part unit "_min", part "_min" base_unit, scale, "ranks", flags, DTRAIN__NO_RANKS, \
     factor * f[of].min, what ", least of ranks."}, \
    {part unit "_mean", part "_mean" base_unit, scale, "ranks", flags, DTRAIN__NO_RANKS, \
     factor * f[of].mean, what ", mean of ranks."}, \
    {part unit "_max", part "_max" base_unit, scale, "ranks", flags, DTRAIN__NO_RANKS, \
     factor * f[of].max, what ", most of ranks."}, \
    {part unit "_rank", part "_max_rank", 1, "ranks", DTRAIN_METRIC_INTEGER, DTRAIN__NO_RANKS, \
     f[of].max_rank < 0 ? DTRAIN__NAN : (double)f[of].max_rank, what ", rank that has most."}
#define DTRAIN__SPREAD_MS(part, of, what) \
    DTRAIN__SPREAD(part, "_ms", "_seconds", 1e-3, 1e3, 0, DTRAIN_FIGURE_##of, "Time in " what)
/* clang-format on */

static void dtrain__add_times(dtrain_metrics *metrics)
{
    const dtrain_spread *f = metrics->last.figures;
    const dtrain_metric means[] = {
        DTRAIN__MEAN_MS("forward", FORWARD, "Time in the forward pass, mean of ranks."),
        DTRAIN__MEAN_MS("backward", BACKWARD, "Time in the backward pass, mean of ranks."),
        DTRAIN__MEAN_MS("hidden_comm", HIDDEN_COMM,
                        "Communication that compute hides, mean of ranks."),
        DTRAIN__MEAN_MS("optimizer", OPTIMIZER, "Time in norm and update, mean of ranks."),
        DTRAIN__MEAN_MS("checkpoint", CHECKPOINT, "Time in saving before the step, mean of ranks."),
        DTRAIN__MEAN_MS("tensor_exposed", TENSOR_EXPOSED,
                        "Exposed communication of the tensor axis, mean of ranks."),
        DTRAIN__MEAN_MS("bubble", BUBBLE, "Wait for other stages of the pipeline, mean of ranks.")};
    const dtrain_metric spreads[] = {
        DTRAIN__SPREAD_MS("step", STEP, "a step"),
        DTRAIN__SPREAD_MS("data", DATA, "wait for batches"),
        DTRAIN__SPREAD_MS("forward", FORWARD, "the forward pass"),
        DTRAIN__SPREAD_MS("backward", BACKWARD, "the backward pass"),
        DTRAIN__SPREAD_MS("exposed_comm", EXPOSED_COMM, "exposed communication"),
        DTRAIN__SPREAD_MS("hidden_comm", HIDDEN_COMM, "hidden communication"),
        DTRAIN__SPREAD_MS("optimizer", OPTIMIZER, "norm and update"),
        DTRAIN__SPREAD_MS("checkpoint", CHECKPOINT, "saving"),
        DTRAIN__SPREAD("comm", "_bytes", "_bytes", 1, 1, DTRAIN_METRIC_INTEGER,
                       DTRAIN_FIGURE_COMM_BYTES, "Bytes sent in the step")};
    DTRAIN__ADD(means, true);
    if (metrics->last.ranks > 1) DTRAIN__ADD(spreads, true);
}

/* Bytes that this rank sent by one kind of collective, where any rank has sent some. */
#define DTRAIN__KIND(kind, of)                                                                     \
    {                                                                                              \
        DTRAIN__BASE(kind "_bytes"), "sent", DTRAIN_METRIC_INTEGER,                                \
            DTRAIN__EACH(COMM_BYTES) + (int)DTRAIN_COLLECTIVE_##of,                                \
            sent[DTRAIN_COLLECTIVE_##of].max > 0 ? sent[DTRAIN_COLLECTIVE_##of].own : DTRAIN__NAN, \
            "Bytes that rank 0 sent in the step by " kind "."                                      \
    }

static void dtrain__add_sent(dtrain_metrics *metrics)
{
    const uint32_t integer = DTRAIN_METRIC_INTEGER;
    const dtrain_step_record *r = &metrics->last;
    const dtrain_spread *f = r->figures, *sent = &f[DTRAIN_FIGURE_COMM_BYTES];
    const dtrain_spread *tensor = &f[DTRAIN_FIGURE_TENSOR_BYTES];
    const dtrain_spread *pipeline = &f[DTRAIN_FIGURE_PIPELINE_BYTES];
    const double seconds = f[DTRAIN_FIGURE_STEP].max, flops = f[DTRAIN_FIGURE_FLOPS].mean;
    const double rate = flops > 0 && seconds > 0 ? flops * r->ranks / seconds : DTRAIN__NAN;
    const double peak = metrics->desc.peak_flops * r->ranks;
    const dtrain_metric rows[] = {
        {DTRAIN__BASE("tensor_bytes"), "sent", integer, DTRAIN__EACH(TENSOR_BYTES),
         tensor->max_rank < 0 ? DTRAIN__NAN : tensor->own,
         "Bytes that rank 0 sent in the step over the tensor axis."},
        {DTRAIN__BASE("pipeline_bytes"), "sent", integer, DTRAIN__EACH(PIPELINE_BYTES),
         pipeline->max_rank < 0 ? DTRAIN__NAN : pipeline->own,
         "Bytes that rank 0 sent in the step over the pipeline axis."},
        {DTRAIN__BASE("bus_bytes_per_second"), "sent", 0, DTRAIN__EACH(BUS),
         f[DTRAIN_FIGURE_BUS].mean, "Bus bandwidth as nccl-tests have it, mean of ranks."},
        DTRAIN__KIND("all_reduce", ALL_REDUCE),
        DTRAIN__KIND("reduce_scatter", REDUCE_SCATTER),
        DTRAIN__KIND("all_gather", ALL_GATHER),
        DTRAIN__KIND("broadcast", BROADCAST),
        DTRAIN__KIND("reduce", REDUCE),
        DTRAIN__KIND("send", SEND),
        DTRAIN__KIND("all_to_all", ALL_TO_ALL),
        {DTRAIN__BASE("flops_per_second"), "throughput", 0, DTRAIN__NO_RANKS, rate,
         "Floating-point operations of all ranks a second."},
        {"peak_share", "flops_ratio", 1, "throughput", 0, DTRAIN__NO_RANKS,
         peak > 0 ? rate / peak : DTRAIN__NAN, "Share of the devices' peak."},
    };
    DTRAIN__ADD(rows, true);
}

/* Return the union of a figure's bits over all ranks, or without `bits` its sum. A record that
 * comes without each rank's figures has only the most. Figures are fp32, which is exact below 2^24;
 * NVML's throttle reasons are bits up to 2^9. */
static double dtrain__over_ranks(const dtrain_metrics *metrics, dtrain_figure figure, bool bits)
{
    const dtrain_metrics_sample *sample = &metrics->sample;
    const double most = metrics->last.figures[figure].max;
    uint64_t all = 0;
    double sum = 0;
    if (!sample->figures || !dtrain__finite(most)) return most;
    for (int r = 0; r < metrics->last.ranks; r++) {
        const float one = sample->figures[(size_t)r * sample->figure_stride + (size_t)figure];
        if (!dtrain__is_finite(one) || one < 0) continue;
        all |= (uint64_t)one;
        sum += (double)one;
    }
    return bits ? (double)all : sum;
}

static void dtrain__add_devices(dtrain_metrics *metrics)
{
    const uint32_t integer = DTRAIN_METRIC_INTEGER;
    const dtrain_spread *f = metrics->last.figures;
    const dtrain_metric rows[] = {
        {DTRAIN__BASE("memory_bytes"), "memory", integer, DTRAIN__EACH(MEMORY),
         f[DTRAIN_FIGURE_MEMORY].max, "Device memory allocated, largest rank."},
        {DTRAIN__BASE("memory_peak_bytes"), "memory", integer, DTRAIN__EACH(MEMORY_PEAK),
         f[DTRAIN_FIGURE_MEMORY_PEAK].max, "Most device memory so far, largest rank."},
        {DTRAIN__BASE("memory_activation_bytes"), "memory", integer, DTRAIN__EACH(ACTIVATIONS),
         f[DTRAIN_FIGURE_ACTIVATIONS].max, "Activations of the largest pass, largest rank."},
        {"gpu_utilization", "gpu_utilization_ratio", 1, "nvml", 0, DTRAIN__EACH(GPU_UTILIZATION),
         f[DTRAIN_FIGURE_GPU_UTILIZATION].mean, "GPU utilization, mean of ranks."},
        {DTRAIN__BASE("gpu_memory_bytes"), "nvml", integer, DTRAIN__EACH(GPU_MEMORY),
         f[DTRAIN_FIGURE_GPU_MEMORY].max, "GPU memory in use, largest rank."},
        {"gpu_clock_hz", "gpu_clock_hertz", 1, "nvml", 0, DTRAIN__EACH(GPU_CLOCK),
         f[DTRAIN_FIGURE_GPU_CLOCK].mean, "Clock of the multiprocessors, mean of ranks."},
        {DTRAIN__BASE("gpu_power_watts"), "nvml", 0, DTRAIN__EACH(GPU_POWER),
         f[DTRAIN_FIGURE_GPU_POWER].mean, "Power, mean of ranks."},
        {DTRAIN__BASE("gpu_temperature_celsius"), "nvml", 0, DTRAIN__EACH(GPU_TEMPERATURE),
         f[DTRAIN_FIGURE_GPU_TEMPERATURE].max, "Temperature, hottest GPU."},
        {"gpu_throttle", "gpu_throttle_reasons", 1, "nvml", integer, DTRAIN__EACH(GPU_THROTTLE),
         dtrain__over_ranks(metrics, DTRAIN_FIGURE_GPU_THROTTLE, true),
         "NVML's bits of why clocks are low, of any rank."},
        {DTRAIN__BASE("gpu_ecc_errors"), "nvml", integer, DTRAIN__EACH(GPU_ECC),
         dtrain__over_ranks(metrics, DTRAIN_FIGURE_GPU_ECC, false),
         "Uncorrected ECC errors of all ranks' GPUs."},
    };
    DTRAIN__ADD(rows, true);
}

/* Bytes of this rank that are the same in all steps. */
#define DTRAIN__FIXED(name, bytes, what)                                                    \
    {                                                                                       \
        DTRAIN__BASE(name "_bytes"), "memory", DTRAIN_METRIC_INTEGER | DTRAIN_METRIC_FIXED, \
            DTRAIN__NO_RANKS, (double)(bytes), "Bytes of rank 0 " what "."                  \
    }
#define DTRAIN__FIXED_PARTS(prefix, memory, verb)                                            \
    DTRAIN__FIXED(prefix "param", (memory)->params, verb " for parameters"),                 \
        DTRAIN__FIXED(prefix "grad", (memory)->grads, verb " for gradients"),                \
        DTRAIN__FIXED(prefix "optimizer", (memory)->optimizer, verb " for optimizer state"), \
        DTRAIN__FIXED(prefix "buffer", (memory)->buffers, verb " to gather and reduce"),     \
        DTRAIN__FIXED(prefix "host", (memory)->host, verb " in host memory")

static void dtrain__add_memory(dtrain_metrics *metrics)
{
    const dtrain_memory *held = &metrics->held, *planned = &metrics->planned;
    const dtrain_metric now[] = {DTRAIN__FIXED_PARTS("memory_", held, "held")};
    const dtrain_metric plan[] = {
        DTRAIN__FIXED_PARTS("predicted_", planned, "predicted"),
        DTRAIN__FIXED("predicted_activation", planned->activations + planned->activation_grads,
                      "predicted for activations and their gradients"),
        DTRAIN__FIXED("predicted", planned->total, "that were predicted")};
    if (metrics->desc.trainer) DTRAIN__ADD(now, false);
    if (!metrics->no_plan[0]) DTRAIN__ADD(plan, false);
}

/* List the metrics of the last step; before the first one only those that are fixed. Figures that
 * no rank has measured become NaN, as all are in a record without figures. Without a trainer, which
 * would exchange them, the figures of this rank's GPU are all there are. */
DTRAIN__PRIVATE void dtrain__metrics_list(dtrain_metrics *metrics)
{
    const dtrain__trainer_view *trainer = dtrain__trainer_seen(metrics->desc.trainer);
    const dtrain_spread unknown = {DTRAIN__NAN, DTRAIN__NAN, DTRAIN__NAN, -1, -1, 0};
    dtrain_metrics_sample *sample = &metrics->sample;
    dtrain_step_record *r = &metrics->last;
    sample->step = r->step;
    sample->wall_time = dtrain__wall_time();
    sample->figures = trainer && r->ranks == trainer->ranks ? trainer->words : NULL;
    sample->figure_stride = trainer ? trainer->word_count : 0;
    sample->count = 0;
    for (int i = 0; i < DTRAIN_FIGURE_COUNT; i++) {
        const int gpu = i - DTRAIN_FIGURE_GPU_UTILIZATION;
        if (r->ranks == 0 || r->figures[i].max_rank < 0) r->figures[i] = unknown;
        if (!trainer && gpu >= 0 && dtrain__is_finite(metrics->nvml.figures[gpu]))
            r->figures[i].mean = r->figures[i].max = (double)metrics->nvml.figures[gpu];
    }
    if (metrics->summary.steps > 0) {
        dtrain__add_training(metrics);
        dtrain__add_times(metrics);
        dtrain__add_sent(metrics);
        dtrain__add_devices(metrics);
    }
    dtrain__add_memory(metrics);
    for (int i = 0; i < DTRAIN_ADDED_FIGURES; i++) {
        const char *name = r->added[i].name;
        const dtrain_metric row = {DTRAIN__BASE(name), "added",           0,
                                   DTRAIN__NO_RANKS,   r->added[i].value, "Added by the program."};
        if (name) dtrain__metrics_add(metrics, &row, 1, false);
    }
}
