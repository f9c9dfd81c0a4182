/* Counts: the number of samples of a step, and the ranks that had each gradient
 *
 * A backward computes the sum over its samples divided by a full batch. Its weight is the number of
 * its samples divided by the same full batch (samples.c, dtrain_strategy_weight):
 *
 *     full batch 4    rank 0: 4 samples       rank 1: 1 sample, 3 targets are ignored
 *     weight          1                       1/4
 *     reduced         sum of 5 / 4 / 2        as always: times 1/N
 *     corrected       sum of 5 / 5            times 2 micro-batches / (1 + 1/4)
 *
 * After the last buckets of a step one all-reduce sums the counts over all ranks:
 *
 *     | sum of weights | for each parameter: the number of ranks that had a gradient |
 *
 * The ranks of a tensor axis have the same samples, so each weight counts once per rank of the
 * axis, and so does each pass. Of a pipeline axis only the first rank adds its weight, and only its
 * passes count: the sum is rounded alike for any number of ranks.
 *
 * The counts stay in device memory, where the correction reads them. A rank with samples and all
 * gradients knows that no sum is zero. Other ranks wait for the counts and read them. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

DTRAIN_API dtrain_result dtrain_strategy_weight(dtrain_strategy *strategy, float weight)
{
    const char *const call = "dtrain_strategy_weight";
    DTRAIN__TRY(dtrain__strategy_usable(strategy, call));
    if (!dtrain__is_finite(weight) || weight < 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: weight is %g, expected 0 or more", call,
                           (double)weight);
    strategy->notes.weight = weight;
    return DTRAIN_OK;
}

/* Set count elements of the counts by a kernel, which has the value in its arguments. A queued copy
 * would read host memory later. */
static dtrain_result dtrain__counts_set(dtrain_strategy *strategy, size_t first, size_t count,
                                        float value)
{
    dtrain_axpby_args fill; /* x NULL: the constant 1 */
    memset(&fill, 0, sizeof fill);
    fill.count = (int64_t)count;
    fill.a = value;
    fill.y = strategy->notes.counts + first;
    fill.dtype = DTRAIN_DTYPE_F32;
    return strategy->device->ops->axpby(strategy->device, &fill);
}

/* Write this rank's counts and start their sum over the ranks. This rank adds its weights and, for
 * each parameter, 1 if it has a gradient. An alias counts with its storage. For parameters of
 * pipeline stages on other ranks, those ranks count. If this rank adds a zero that another rank can
 * fill, the sums must be read (counts_due). */
DTRAIN__PRIVATE dtrain_result dtrain__counts_start(dtrain_strategy *strategy)
{
    const dtrain_device_ops *ops = strategy->device->ops;
    const size_t count = 1 + strategy->param_count;
    const bool skips = strategy->desc.missing_gradient == DTRAIN_MISSING_GRADIENT_SKIP;
    float *has = strategy->sums + 1;
    if (strategy->notes.device_weight) { /* a replayed step: the same gradients are always absent */
        DTRAIN__TRY(ops->copy(strategy->device, strategy->notes.counts,
                              strategy->notes.device_weight, sizeof(float),
                              DTRAIN_COPY_DEVICE_TO_DEVICE));
    } else {
        strategy->sums[0] = strategy->weights;
        strategy->counts_due = strategy->weights == 0;
        for (size_t i = 0; i < strategy->param_count; i++) {
            const dtrain_param *p = &strategy->params[i];
            const bool may_lack = skips || (p->flags & DTRAIN_PARAM_FROZEN); /* in this step */
            const bool updated = strategy->layout.entries[i].trainable && p->state.storage == p;
            has[i] = dtrain__has_memory(p) && !(may_lack && updated);
        }
        for (size_t i = 0; i < strategy->param_count; i++)
            if (strategy->layout.entries[i].seen)
                has[strategy->params[i].state.storage->state.index] = 1;
        for (size_t i = 0; i < strategy->param_count; i++)
            if (has[i] == 0 && dtrain__has_memory(&strategy->params[i]))
                strategy->counts_due = true;
        DTRAIN__TRY(dtrain__counts_set(strategy, 0, 1, strategy->weights));
    }
    if (strategy->groups.pipeline_rank)
        DTRAIN__TRY(ops->zero(strategy->device, strategy->notes.counts, sizeof(float)));
    if (dtrain_comm_size(strategy->groups.all) == 1) {
        strategy->counts_due = false;
        return DTRAIN_OK;
    }
    for (size_t i = 1, end; i < count; i = end) { /* one call for a run of equal counts */
        const bool has = strategy->sums[i] > 0;
        for (end = i + 1; end < count && (strategy->sums[end] > 0) == has;) end++;
        DTRAIN__TRY(dtrain__counts_set(strategy, i, end - i, has));
    }
    dtrain__call_label(strategy->world, "weights of step", (int64_t)strategy->notes.sync_count, "");
    return dtrain_all_reduce(strategy->groups.all, strategy->notes.counts, strategy->notes.counts,
                             count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &strategy->counts_work);
}

/* Copy the counts to strategy->sums; the host waits. */
static dtrain_result dtrain__counts_read(dtrain_strategy *strategy)
{
    strategy->counts_due = false;
    return strategy->device->ops->copy(strategy->device, strategy->sums, strategy->notes.counts,
                                       (1 + strategy->param_count) * sizeof(float),
                                       DTRAIN_COPY_DEVICE_TO_HOST);
}

/* Wait for the counts, and make reduced gradients the mean over all samples. The gradients were
 * divided by the number of micro-batches of all ranks: multiply them by it, and divide them by the
 * sum of weights. Leave them unchanged if the two are equal or no rank has samples. */
DTRAIN__PRIVATE dtrain_result dtrain__counts_end(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain__groups *groups = &strategy->groups;
    const int ranks = dtrain_comm_size(groups->all), weighing = ranks / groups->pipeline_ranks;
    const float passes = (float)weighing * (float)strategy->passes;
    dtrain_work *work = strategy->counts_work;
    dtrain_axpby_args correct;
    memset(&correct, 0, sizeof correct);
    correct.a = passes;
    correct.dtype = (dtrain_dtype)layout->dtype;
    strategy->counts_work = NULL;
    DTRAIN__TRY(dtrain_work_wait(work));
    if (ranks > 1 && layout->grads_on_host) DTRAIN__TRY(dtrain__counts_read(strategy));
    else if (ranks > 1 || strategy->notes.device_weight) correct.divisor = strategy->notes.counts;
    if (!correct.divisor) {
        if (strategy->sums[0] == passes || strategy->sums[0] == 0) return DTRAIN_OK;
        correct.a = (double)passes / (double)strategy->sums[0];
    }
    for (size_t b = 0; b < layout->bucket_count; b++) {
        const dtrain__bucket *bucket = &layout->buckets[b];
        dtrain_device *device = bucket->grad_on_host ? strategy->offload.cpu : strategy->device;
        if (!bucket->trainable || bucket->shard_count == 0) continue;
        correct.count = dtrain__elements(layout, bucket->shard_count);
        correct.x = correct.y = bucket->grad_shard;
        DTRAIN__TRY(device->ops->axpby(device, &correct));
    }
    return DTRAIN_OK;
}

/* Complete the sums of the last step; *empty: it had no samples. A step that is being recorded uses
 * the sums of the step before it. */
DTRAIN__PRIVATE dtrain_result dtrain__counts_settle(dtrain_strategy *strategy, bool *empty)
{
    if (strategy->counts_due && !strategy->notes.device_weight)
        DTRAIN__TRY(dtrain__counts_read(strategy));
    *empty = strategy->sums[0] == 0;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE bool dtrain__has_gradient(const dtrain_strategy *strategy, size_t i)
{
    return strategy->sums[1 + i] > 0;
}
