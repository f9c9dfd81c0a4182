/* The values of a step
 *
 * The table of metrics is DTRAIN__METRIC_LIST in monitor_internal.h. Here the values of a step are
 * set from its record and from the figures of all ranks in it. A value that was not measured is
 * unknown, and no writer shows it. */

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

DTRAIN__PRIVATE const dtrain_metric *dtrain__metric_table(void)
{
    static const dtrain_metric table[] = {
#define DTRAIN__METRIC_ROW(ID, name, group, flags, from, base, scale, help) \
    {flags, name, group, help, base, scale},
        DTRAIN__METRIC_LIST(DTRAIN__METRIC_ROW)
#undef DTRAIN__METRIC_ROW
    };
    return table;
}

/* The `from` of each metric, and its two parts. */
#define DTRAIN__TAKE_OF(id) (dtrain__metric_from[id] % 8)
#define DTRAIN__FIGURE_OF(id) (dtrain__metric_from[id] / 8)
static const int dtrain__metric_from[] = {
#define DTRAIN__METRIC_SOURCE(ID, name, group, flags, from, base, scale, help) from,
    DTRAIN__METRIC_LIST(DTRAIN__METRIC_SOURCE)
#undef DTRAIN__METRIC_SOURCE
};

/* Return the factor from a figure's unit to the metric's: figures of time are in seconds, and the
 * metrics whose base unit is the second in milliseconds. */
static double dtrain__metric_unit(int id)
{
    return dtrain__metric_table()[id].base_scale < 1 ? 1e3 : 1;
}

static void dtrain__set(dtrain_metrics *metrics, int id, double value)
{
    metrics->values[id] = value;
    metrics->known[id] = true;
}

/* Set a value unless it is NaN, which figures use for what was not measured. */
static void dtrain__set_measured(dtrain_metrics *metrics, int id, double value)
{
    if (dtrain__finite(value)) dtrain__set(metrics, id, value);
}

/* Return a metric of one rank of the run, in the metric's unit; NaN: not measured, or ranks have
 * none. */
DTRAIN__PRIVATE double dtrain__rank_value(const dtrain_metrics *metrics, int id, int rank)
{
    const dtrain_metrics_sample *sample = &metrics->sample;
    const int take = DTRAIN__TAKE_OF(id),
              at = rank * (int)sample->figure_stride + DTRAIN__FIGURE_OF(id);
    if (!take || take >= DTRAIN__TAKE_SPREAD_MIN || !sample->figures) return DTRAIN__NAN;
    return dtrain__metric_unit(id) * (double)sample->figures[at];
}

/* Set the two GPU metrics that are neither a mean nor a maximum: throttle reasons are the union of
 * all ranks' bits, ECC errors the sum. Figures are fp32, which is exact below 2^24; NVML's reasons
 * are bits up to 2^9. */
static void dtrain__fill_gpu_sums(dtrain_metrics *metrics, const dtrain_step_record *record)
{
    const bool each = metrics->sample.figures != NULL;
    const dtrain_spread *throttle = &record->figures[DTRAIN_FIGURE_GPU_THROTTLE];
    const dtrain_spread *ecc = &record->figures[DTRAIN_FIGURE_GPU_ECC];
    uint64_t bits = 0;
    double errors = 0;
    for (int r = 0; each && r < record->ranks; r++) {
        const double one = dtrain__rank_value(metrics, DTRAIN__METRIC_GPU_THROTTLE, r);
        const double lost = dtrain__rank_value(metrics, DTRAIN__METRIC_GPU_ECC, r);
        if (dtrain__finite(one) && one >= 0) bits |= (uint64_t)one;
        if (dtrain__finite(lost)) errors += lost;
    }
    if (throttle->max_rank >= 0)
        dtrain__set(metrics, DTRAIN__METRIC_GPU_THROTTLE, each ? (double)bits : throttle->max);
    if (ecc->max_rank >= 0) dtrain__set(metrics, DTRAIN__METRIC_GPU_ECC, each ? errors : ecc->max);
}

/* Set the values of a step, but for those with DTRAIN_METRIC_FIXED, which are set once. */
DTRAIN__PRIVATE void dtrain__metrics_fill(dtrain_metrics *metrics, const dtrain_step_record *record)
{
    const dtrain__trainer_view *trainer = dtrain__trainer_seen(metrics->desc.trainer);
    const dtrain_spread *figures = record->figures;
    const int ranks = record->ranks;
    metrics->sample.step = record->step;
    metrics->sample.wall_time = dtrain__wall_time();
    metrics->sample.figures = trainer && ranks == trainer->ranks ? trainer->words : NULL;
    metrics->sample.figure_stride = trainer ? trainer->word_count : 0;
    for (int id = 0; id < DTRAIN__METRIC_COUNT; id++)
        if (!(dtrain__metric_table()[id].flags & DTRAIN_METRIC_FIXED)) metrics->known[id] = false;
    dtrain__set(metrics, DTRAIN__METRIC_LOSS, record->loss);
    dtrain__set_measured(metrics, DTRAIN__METRIC_VAL_LOSS, record->val_loss);
    dtrain__set_measured(metrics, DTRAIN__METRIC_VAL_ACCURACY, record->val_accuracy);
    dtrain__set(metrics, DTRAIN__METRIC_GRAD_NORM, record->grad_norm);
    dtrain__set(metrics, DTRAIN__METRIC_LR, record->lr);
    dtrain__set(metrics, DTRAIN__METRIC_TOKENS, (double)record->tokens);
    dtrain__set(metrics, DTRAIN__METRIC_RATE, record->tokens_per_second);
    dtrain__set(metrics, DTRAIN__METRIC_STEP, record->step_ms);
    dtrain__set(metrics, DTRAIN__METRIC_COMM, record->comm_ms);
    dtrain__set(metrics, DTRAIN__METRIC_EXPOSED_COMM, record->exposed_comm_ms);
    dtrain__set(metrics, DTRAIN__METRIC_DATA, record->data_ms);
    dtrain__set(metrics, DTRAIN__METRIC_COMM_BYTES, (double)record->comm_bytes);
    if (record->loss_scale > 0) dtrain__set(metrics, DTRAIN__METRIC_LOSS_SCALE, record->loss_scale);
    if (record->loss_scale > 0 || record->skipped_steps)
        dtrain__set(metrics, DTRAIN__METRIC_SKIPPED, (double)record->skipped_steps);
    /* kinds of collectives that any rank has used */
    for (int id = DTRAIN__METRIC_ALL_REDUCE; id <= DTRAIN__METRIC_ALL_TO_ALL; id++) {
        const int figure = DTRAIN__FIGURE_OF(id);
        const uint64_t own = record->kind_bytes[figure - DTRAIN_FIGURE_COMM_BYTES];
        if (own || (ranks > 0 && figures[figure].max_rank >= 0 && figures[figure].max > 0))
            dtrain__set(metrics, id, (double)own);
    }
    if (ranks && figures[DTRAIN_FIGURE_TENSOR_BYTES].max_rank >= 0)
        dtrain__set(metrics, DTRAIN__METRIC_TENSOR_BYTES, (double)record->tensor_bytes);
    if (ranks && figures[DTRAIN_FIGURE_PIPELINE_BYTES].max_rank >= 0)
        dtrain__set(metrics, DTRAIN__METRIC_PIPELINE_BYTES, (double)record->pipeline_bytes);
    /* without a trainer, which would exchange them, the figures of this rank's GPU */
    for (int id = DTRAIN__METRIC_GPU_UTILIZATION; !trainer && id <= DTRAIN__METRIC_GPU_ECC; id++)
        dtrain__set_measured(
            metrics, id,
            (double)metrics->nvml.figures[DTRAIN__FIGURE_OF(id) - DTRAIN_FIGURE_GPU_UTILIZATION]);
    if (ranks == 0) return;
    if (ranks > 1) {
        dtrain__set(metrics, DTRAIN__METRIC_STRAGGLER, record->straggler_score);
        dtrain__set(metrics, DTRAIN__METRIC_SLOWEST, record->slowest_rank);
    }
    /* what is made of the figures of all ranks; spreads need at least two */
    for (int id = 0; id < DTRAIN__METRIC_COUNT; id++) {
        const int take = DTRAIN__TAKE_OF(id);
        const dtrain_spread *all = &figures[DTRAIN__FIGURE_OF(id)];
        if (take <= DTRAIN__TAKE_RANKS || all->max_rank < 0) continue;
        if (take >= DTRAIN__TAKE_SPREAD_MIN && ranks < 2) continue;
        const double unit = dtrain__metric_unit(id);
        const bool mean = take == DTRAIN__TAKE_MEAN || take == DTRAIN__TAKE_SPREAD_MEAN;
        dtrain__set_measured(metrics, id,
                             take == DTRAIN__TAKE_SPREAD_RANK  ? all->max_rank
                             : take == DTRAIN__TAKE_SPREAD_MIN ? unit * all->min
                             : mean                            ? unit * all->mean
                                                               : unit * all->max);
    }
    dtrain__fill_gpu_sums(metrics, record);
    const double seconds = figures[DTRAIN_FIGURE_STEP].max;
    const double flops = figures[DTRAIN_FIGURE_FLOPS].mean;
    if (!(flops > 0 && seconds > 0)) return;
    const double rate = flops * ranks / seconds;
    dtrain__set(metrics, DTRAIN__METRIC_FLOPS, rate);
    if (metrics->desc.peak_flops > 0)
        dtrain__set(metrics, DTRAIN__METRIC_PEAK_SHARE, rate / (ranks * metrics->desc.peak_flops));
}

/* Set the metrics of memory that are held or predicted, which begin with `first`. */
static void dtrain__set_memory(dtrain_metrics *metrics, int first, const dtrain_memory *memory)
{
    const uint64_t bytes[] = {memory->params, memory->grads, memory->optimizer, memory->buffers,
                              memory->host}; /* in the order of DTRAIN__HELD_LIST */
    for (int i = 0; i < (int)(sizeof bytes / sizeof *bytes); i++)
        dtrain__set(metrics, first + i, (double)bytes[i]);
}

/* Set the bytes that the rank holds, and those that a plan predicts. A loss that cannot be planned
 * has no prediction, and a reason in no_plan. */
DTRAIN__PRIVATE void dtrain__metrics_plan(dtrain_metrics *metrics)
{
    const dtrain__trainer_view *trainer = dtrain__trainer_seen(metrics->desc.trainer);
    dtrain_memory held, planned;
    memset(&held, 0, sizeof held);
    memset(&planned, 0, sizeof planned);
    snprintf(metrics->no_plan, sizeof metrics->no_plan, "desc has no trainer");
    if (!trainer) return;
    const dtrain_result result = trainer->memory(metrics->desc.trainer, &held, &planned);
    dtrain__set_memory(metrics, DTRAIN__METRIC_MEMORY_PARAM, &held);
    snprintf(metrics->no_plan, sizeof metrics->no_plan, "%s",
             result == DTRAIN_OK ? "" : dtrain_last_error());
    if (result != DTRAIN_OK) return;
    dtrain__set_memory(metrics, DTRAIN__METRIC_PREDICTED_PARAM, &planned);
    dtrain__set(metrics, DTRAIN__METRIC_PREDICTED_ACTIVATION,
                (double)(planned.activations + planned.activation_grads));
    dtrain__set(metrics, DTRAIN__METRIC_PREDICTED, (double)planned.total);
}
