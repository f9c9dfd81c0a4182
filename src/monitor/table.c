/* The table of metrics, and the values of a step
 *
 * The rows are in monitor_internal.h. Here a record becomes values: each is unknown unless it was
 * measured, so that no writer ever shows a number that nobody has measured. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "strategy/memory.h"
#include "strategy/strategy.h"
#include "optim/optim_internal.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"

DTRAIN__PRIVATE const dtrain_metric *dtrain__metric_table(void)
{
    static const dtrain_metric table[] = {
#define DTRAIN__METRIC_ROW(ID, name, group, flags, base, scale, help) \
    {flags, name, group, help, base, scale},
        DTRAIN__METRIC_LIST(DTRAIN__METRIC_ROW)
#undef DTRAIN__METRIC_ROW
    };
    return table;
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

/* The figures of which all of min, mean, max and rank are metrics, which follow each other. */
static const struct {
    int figure, first, mean; /* mean: the metric for all ranks, or -1 */
    double unit;             /* one of the figure in that of the metrics */
} dtrain__spreads[] = {
    {DTRAIN_FIGURE_STEP, DTRAIN__METRIC_STEP_MIN, -1, 1e3},
    {DTRAIN_FIGURE_DATA, DTRAIN__METRIC_DATA_MIN, -1, 1e3},
    {DTRAIN_FIGURE_FORWARD, DTRAIN__METRIC_FORWARD_MIN, DTRAIN__METRIC_FORWARD, 1e3},
    {DTRAIN_FIGURE_BACKWARD, DTRAIN__METRIC_BACKWARD_MIN, DTRAIN__METRIC_BACKWARD, 1e3},
    {DTRAIN_FIGURE_EXPOSED_COMM, DTRAIN__METRIC_EXPOSED_MIN, -1, 1e3},
    {DTRAIN_FIGURE_HIDDEN_COMM, DTRAIN__METRIC_HIDDEN_MIN, DTRAIN__METRIC_HIDDEN, 1e3},
    {DTRAIN_FIGURE_OPTIMIZER, DTRAIN__METRIC_OPTIMIZER_MIN, DTRAIN__METRIC_OPTIMIZER, 1e3},
    {DTRAIN_FIGURE_CHECKPOINT, DTRAIN__METRIC_CHECKPOINT_MIN, DTRAIN__METRIC_CHECKPOINT, 1e3},
    {DTRAIN_FIGURE_COMM_BYTES, DTRAIN__METRIC_COMM_BYTES_MIN, -1, 1},
};

/* Of what a rank sends, kind by kind: the metric. */
static const struct {
    int kind, id;
} dtrain__sent_kinds[] = {
    {DTRAIN_COLLECTIVE_ALL_REDUCE, DTRAIN__METRIC_ALL_REDUCE},
    {DTRAIN_COLLECTIVE_REDUCE_SCATTER, DTRAIN__METRIC_REDUCE_SCATTER},
    {DTRAIN_COLLECTIVE_ALL_GATHER, DTRAIN__METRIC_ALL_GATHER},
    {DTRAIN_COLLECTIVE_BROADCAST, DTRAIN__METRIC_BROADCAST},
    {DTRAIN_COLLECTIVE_REDUCE, DTRAIN__METRIC_REDUCE},
    {DTRAIN_COLLECTIVE_SEND, DTRAIN__METRIC_SEND},
    {DTRAIN_COLLECTIVE_ALL_TO_ALL, DTRAIN__METRIC_ALL_TO_ALL},
};

/* The other figures, and how ranks are reduced. */
enum { DTRAIN__TAKE_MEAN, DTRAIN__TAKE_MAX };
static const struct {
    int figure, id, take;
} dtrain__gauges[] = {
    {DTRAIN_FIGURE_BUS, DTRAIN__METRIC_BUS, DTRAIN__TAKE_MEAN},
    {DTRAIN_FIGURE_MEMORY, DTRAIN__METRIC_MEMORY, DTRAIN__TAKE_MAX},
    {DTRAIN_FIGURE_MEMORY_PEAK, DTRAIN__METRIC_MEMORY_PEAK, DTRAIN__TAKE_MAX},
    {DTRAIN_FIGURE_ACTIVATIONS, DTRAIN__METRIC_MEMORY_ACTIVATION, DTRAIN__TAKE_MAX},
    {DTRAIN_FIGURE_GPU_UTILIZATION, DTRAIN__METRIC_GPU_UTILIZATION, DTRAIN__TAKE_MEAN},
    {DTRAIN_FIGURE_GPU_MEMORY, DTRAIN__METRIC_GPU_MEMORY, DTRAIN__TAKE_MAX},
    {DTRAIN_FIGURE_GPU_CLOCK, DTRAIN__METRIC_GPU_CLOCK, DTRAIN__TAKE_MEAN},
    {DTRAIN_FIGURE_GPU_POWER, DTRAIN__METRIC_GPU_POWER, DTRAIN__TAKE_MEAN},
    {DTRAIN_FIGURE_GPU_TEMPERATURE, DTRAIN__METRIC_GPU_TEMPERATURE, DTRAIN__TAKE_MAX},
};

#define DTRAIN__COUNT_OF(array) ((int)(sizeof(array) / sizeof *(array)))

/* Find the figure behind a metric, and what one of it is in the metric's unit; -1: none. */
static int dtrain__figure_of(int id, double *unit)
{
    *unit = 1e3;
    for (int i = 0; i < DTRAIN__COUNT_OF(dtrain__spreads); i++)
        if (id == dtrain__spreads[i].mean) return dtrain__spreads[i].figure;
    if (id == DTRAIN__METRIC_STEP) return DTRAIN_FIGURE_STEP;
    if (id == DTRAIN__METRIC_DATA) return DTRAIN_FIGURE_DATA;
    if (id == DTRAIN__METRIC_EXPOSED) return DTRAIN_FIGURE_EXPOSED_COMM;
    *unit = 1;
    if (id == DTRAIN__METRIC_COMM_BYTES) return DTRAIN_FIGURE_COMM_BYTES;
    for (int i = 0; i < DTRAIN__COUNT_OF(dtrain__sent_kinds); i++)
        if (id == dtrain__sent_kinds[i].id)
            return DTRAIN_FIGURE_COMM_BYTES + dtrain__sent_kinds[i].kind;
    for (int i = 0; i < DTRAIN__COUNT_OF(dtrain__gauges); i++)
        if (id == dtrain__gauges[i].id) return dtrain__gauges[i].figure;
    if (id == DTRAIN__METRIC_GPU_THROTTLE) return DTRAIN_FIGURE_GPU_THROTTLE;
    return id == DTRAIN__METRIC_GPU_ECC ? (int)DTRAIN_FIGURE_GPU_ECC : -1;
}

/* Return a metric of one rank, in the metric's unit; NaN: not measured, or it has none. */
DTRAIN__PRIVATE double dtrain__rank_value(const dtrain_metrics *metrics, int id, int rank)
{
    double unit;
    const int figure = dtrain__figure_of(id, &unit);
    if (figure < 0 || !metrics->desc.trainer || metrics->last.ranks == 0) return DTRAIN__NAN;
    return unit * dtrain__trainer_figure(metrics->desc.trainer, rank, (dtrain_figure)figure);
}

/* Reduce what has no mean and no maximum that says anything: bits of all ranks, sums of errors.
 * Words travel as fp32, which is exact for both below 2^24; NVML has bits up to 2^9. */
static void dtrain__fill_bits(dtrain_metrics *metrics, const dtrain_step_record *record)
{
    const dtrain_trainer *trainer = metrics->desc.trainer;
    const dtrain_spread *throttle = &record->figures[DTRAIN_FIGURE_GPU_THROTTLE];
    const dtrain_spread *ecc = &record->figures[DTRAIN_FIGURE_GPU_ECC];
    uint64_t bits = 0;
    double errors = 0;
    for (int r = 0; trainer && r < trainer->ranks; r++) {
        const int rank = trainer->groups.all ? dtrain__world_rank(trainer->groups.all, r) : r;
        const double one = dtrain__trainer_figure(trainer, rank, DTRAIN_FIGURE_GPU_THROTTLE);
        const double lost = dtrain__trainer_figure(trainer, rank, DTRAIN_FIGURE_GPU_ECC);
        if (dtrain__finite(one) && one >= 0) bits |= (uint64_t)one;
        if (dtrain__finite(lost)) errors += lost;
    }
    if (throttle->max_rank >= 0)
        dtrain__set(metrics, DTRAIN__METRIC_GPU_THROTTLE, trainer ? (double)bits : throttle->max);
    if (ecc->max_rank >= 0)
        dtrain__set(metrics, DTRAIN__METRIC_GPU_ECC, trainer ? errors : ecc->max);
}

/* Set what this rank's GPU said, where no trainer carries it to the others. */
static void dtrain__fill_own_gpu(dtrain_metrics *metrics)
{
    static const int ids[] = {DTRAIN__METRIC_GPU_UTILIZATION, DTRAIN__METRIC_GPU_MEMORY,
                              DTRAIN__METRIC_GPU_CLOCK,       DTRAIN__METRIC_GPU_POWER,
                              DTRAIN__METRIC_GPU_TEMPERATURE, DTRAIN__METRIC_GPU_THROTTLE,
                              DTRAIN__METRIC_GPU_ECC};
    for (int i = 0; i < DTRAIN__COUNT_OF(ids); i++)
        dtrain__set_measured(metrics, ids[i], (double)metrics->nvml.figures[i]);
}

/* Set what comes from the figures of all ranks. */
static void dtrain__fill_figures(dtrain_metrics *metrics, const dtrain_step_record *record)
{
    for (int i = 0; i < DTRAIN__COUNT_OF(dtrain__spreads); i++) {
        const dtrain_spread *all = &record->figures[dtrain__spreads[i].figure];
        const int first = dtrain__spreads[i].first, mean = dtrain__spreads[i].mean;
        const double unit = dtrain__spreads[i].unit;
        if (all->max_rank < 0) continue;
        if (mean >= 0) dtrain__set(metrics, mean, unit * all->mean);
        if (record->ranks < 2) continue;
        dtrain__set(metrics, first, unit * all->min);
        dtrain__set(metrics, first + 1, unit * all->mean);
        dtrain__set(metrics, first + 2, unit * all->max);
        dtrain__set(metrics, first + 3, all->max_rank);
    }
    for (int i = 0; i < DTRAIN__COUNT_OF(dtrain__gauges); i++) {
        const dtrain_spread *all = &record->figures[dtrain__gauges[i].figure];
        if (all->max_rank < 0) continue;
        dtrain__set_measured(metrics, dtrain__gauges[i].id,
                             dtrain__gauges[i].take == DTRAIN__TAKE_MEAN ? all->mean : all->max);
    }
    dtrain__fill_bits(metrics, record);
}

/* Set what was sent by each kind of which any rank has sent something. */
static void dtrain__fill_kinds(dtrain_metrics *metrics, const dtrain_step_record *record)
{
    for (int i = 0; i < DTRAIN__COUNT_OF(dtrain__sent_kinds); i++) {
        const int kind = dtrain__sent_kinds[i].kind;
        const dtrain_spread *all = &record->figures[DTRAIN_FIGURE_COMM_BYTES + kind];
        const bool others = record->ranks > 0 && all->max_rank >= 0 && all->max > 0;
        if (record->kind_bytes[kind] || others)
            dtrain__set(metrics, dtrain__sent_kinds[i].id, (double)record->kind_bytes[kind]);
    }
}

/* Set the values of a step. Those with DTRAIN_METRIC_FIXED stay from the start. */
DTRAIN__PRIVATE void dtrain__metrics_fill(dtrain_metrics *metrics, const dtrain_step_record *record)
{
    for (int id = 0; id < DTRAIN__METRIC_COUNT; id++)
        if (!(dtrain__metric_table()[id].flags & DTRAIN_METRIC_FIXED)) metrics->known[id] = false;
    dtrain__set(metrics, DTRAIN__METRIC_LOSS, record->loss);
    dtrain__set_measured(metrics, DTRAIN__METRIC_VAL_LOSS, record->val_loss);
    dtrain__set(metrics, DTRAIN__METRIC_GRAD_NORM, record->grad_norm);
    dtrain__set(metrics, DTRAIN__METRIC_LR, record->lr);
    dtrain__set(metrics, DTRAIN__METRIC_TOKENS, (double)record->tokens);
    dtrain__set(metrics, DTRAIN__METRIC_RATE, record->tokens_per_second);
    dtrain__set(metrics, DTRAIN__METRIC_STEP, record->step_ms);
    dtrain__set(metrics, DTRAIN__METRIC_COMM, record->comm_ms);
    dtrain__set(metrics, DTRAIN__METRIC_EXPOSED, record->exposed_comm_ms);
    dtrain__set(metrics, DTRAIN__METRIC_DATA, record->data_ms);
    dtrain__set(metrics, DTRAIN__METRIC_COMM_BYTES, (double)record->comm_bytes);
    if (record->loss_scale > 0) dtrain__set(metrics, DTRAIN__METRIC_LOSS_SCALE, record->loss_scale);
    if (record->loss_scale > 0 || record->skipped_steps)
        dtrain__set(metrics, DTRAIN__METRIC_SKIPPED, (double)record->skipped_steps);
    dtrain__fill_kinds(metrics, record);
    if (!metrics->desc.trainer) dtrain__fill_own_gpu(metrics);
    if (record->ranks == 0) return;
    if (record->ranks > 1) {
        dtrain__set(metrics, DTRAIN__METRIC_STRAGGLER, record->straggler_score);
        dtrain__set(metrics, DTRAIN__METRIC_SLOWEST, record->slowest_rank);
    }
    dtrain__fill_figures(metrics, record);
    const double seconds = record->figures[DTRAIN_FIGURE_STEP].max;
    const double flops = record->figures[DTRAIN_FIGURE_FLOPS].mean;
    if (!(flops > 0 && seconds > 0)) return;
    const double rate = flops * record->ranks / seconds;
    dtrain__set(metrics, DTRAIN__METRIC_FLOPS, rate);
    if (metrics->desc.peak_flops > 0)
        dtrain__set(metrics, DTRAIN__METRIC_PEAK_SHARE,
                    rate / (record->ranks * metrics->desc.peak_flops));
}

/* Note what the rank holds, and predict its memory. A loss that cannot be planned costs the
 * prediction and nothing else. */
DTRAIN__PRIVATE void dtrain__metrics_plan(dtrain_metrics *metrics)
{
    const dtrain_trainer *trainer = metrics->desc.trainer;
    dtrain_strategy_info held;
    dtrain_memory plan;
    snprintf(metrics->no_plan, sizeof metrics->no_plan, "desc has no trainer");
    if (!trainer) return;
    const dtrain_trainer_desc *desc = &trainer->desc;
    const dtrain_optimizer *optimizer = desc->optimizer;
    const double state = optimizer ? (double)optimizer->block_bytes : 0;
    const bool offloaded = optimizer && optimizer->offloaded;
    dtrain_strategy_query(desc->strategy, &held);
    dtrain__set(metrics, DTRAIN__METRIC_MEMORY_PARAM, (double)held.value_bytes);
    dtrain__set(metrics, DTRAIN__METRIC_MEMORY_GRAD, (double)held.grad_bytes);
    dtrain__set(metrics, DTRAIN__METRIC_MEMORY_BUFFER, (double)held.buffer_bytes);
    dtrain__set(metrics, DTRAIN__METRIC_MEMORY_OPTIMIZER, offloaded ? 0 : state);
    dtrain__set(metrics, DTRAIN__METRIC_MEMORY_HOST,
                (double)held.host_bytes + (offloaded ? state : 0));
    const dtrain_result planned = dtrain_trainer_plan(metrics->world, desc, &plan);
    snprintf(metrics->no_plan, sizeof metrics->no_plan, "%s",
             planned == DTRAIN_OK ? "" : dtrain_last_error());
    if (planned != DTRAIN_OK) return;
    dtrain__set(metrics, DTRAIN__METRIC_PREDICTED_PARAM, (double)plan.params);
    dtrain__set(metrics, DTRAIN__METRIC_PREDICTED_GRAD, (double)plan.grads);
    dtrain__set(metrics, DTRAIN__METRIC_PREDICTED_OPTIMIZER, (double)plan.optimizer);
    dtrain__set(metrics, DTRAIN__METRIC_PREDICTED_BUFFER, (double)plan.buffers);
    dtrain__set(metrics, DTRAIN__METRIC_PREDICTED_HOST, (double)plan.host);
    dtrain__set(metrics, DTRAIN__METRIC_PREDICTED_ACTIVATION,
                (double)(plan.activations + plan.activation_grads));
    dtrain__set(metrics, DTRAIN__METRIC_PREDICTED, (double)plan.total);
}
