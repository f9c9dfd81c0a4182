/* Histograms of weights and gradients
 *
 * One rank counts each element of a tensor: ranks that hold the same shard, or the whole tensor,
 * divide its elements. The sum over ranks is the histogram of the whole tensor with every strategy,
 * even if no rank holds the whole tensor.
 *
 * Buckets follow the floating-point format, four per power of two, the same for all tensors and
 * ranks: counts can be added, and a value's bucket is a shift of its bits:
 *
 *     ... [-1.25, -1) ... (-2^-64, 2^-64) ... [1, 1.25) [1.25, 1.5) [1.5, 1.75) [1.75, 2) ...
 *
 * A value that equals a limit belongs to the bucket farther from 0. Values from 2^64 on share the
 * last bucket of their sign.
 *
 * A step with histograms costs one pass over values and gradients (1 ns per element, divided by the
 * ranks that share the work), on a GPU a copy to the host, and a reduce of 132 KB for every 8
 * parameters. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "strategy/strategy.h"
#include "strategy/view_internal.h"
#include "train/view_internal.h"
#include "monitor/metrics.h"
#include "monitor/monitor_internal.h"
#include "device/backend.h"
#include "device/device.h"

#define DTRAIN__SIDE 512                       /* buckets per sign: 4 for each of 128 powers of 2 */
#define DTRAIN__BUCKETS (2 * DTRAIN__SIDE + 1) /* the middle bucket is around 0 */
#define DTRAIN__LOWEST ((127 - 64) * 4)        /* bits >> 21 of 2^-64 */
#define DTRAIN__TOGETHER 16                    /* histograms in one reduce */
#define DTRAIN__CHUNK 16384                    /* values per copy to the host */

/* The part of a histogram that ranks add up. Doubles count exactly up to 2^53. */
typedef struct dtrain__tally {
    double buckets[DTRAIN__BUCKETS], sum, sum_squares, nonfinite;
} dtrain__tally;

typedef struct dtrain__histograms {
    dtrain__tally tallies[DTRAIN__TOGETHER];
    double most[DTRAIN__TOGETHER][2]; /* largest -value and largest value */
    double limits[DTRAIN__BUCKETS];   /* limits of the histogram being written */
    float chunk[DTRAIN__CHUNK];
} dtrain__histograms;

/* Count values times a scale, in device or host memory. */
static dtrain_result dtrain__histogram_fill(dtrain_metrics *metrics, int slot, const float *values,
                                            int64_t count, float scale)
{
    dtrain_device *device = dtrain_world_device(metrics->world);
    dtrain__histograms *h = metrics->histograms;
    dtrain__tally *t = &h->tallies[slot];
    double *most = h->most[slot];
    memset(t, 0, sizeof *t);
    most[0] = most[1] = -DBL_MAX;
    for (int64_t first = 0; values && first < count; first += DTRAIN__CHUNK) {
        const int64_t n = dtrain__min(count - first, DTRAIN__CHUNK);
        const float *chunk = values + first;
        if (!device->ops->host_memory) {
            DTRAIN__TRY(dtrain_device_copy(device, h->chunk, chunk, (size_t)n * sizeof(float)));
            chunk = h->chunk;
        }
        for (int64_t i = 0; i < n; i++) {
            const float value = chunk[i] * scale;
            const uint32_t bits = dtrain__f32_bits(value);
            const int magnitude = (int)(bits >> 21 & 0x3ff) - DTRAIN__LOWEST;
            if (!dtrain__is_finite(value)) {
                t->nonfinite++;
                continue;
            }
            const int side = magnitude < 0 ? -1 : (int)dtrain__min(magnitude, DTRAIN__SIDE - 1);
            t->buckets[bits >> 31 ? DTRAIN__SIDE - 1 - side : DTRAIN__SIDE + 1 + side]++;
            const double x = (double)value;
            if (-x > most[0]) most[0] = -x;
            if (x > most[1]) most[1] = x;
            t->sum += x;
            t->sum_squares += x * x;
        }
    }
    return DTRAIN_OK;
}

/* Add up the histograms of all ranks in slots [0, used), and hand them to the sinks. Slots 2 i and
 * 2 i + 1 have the weights and gradients of parameters[i]. */
static dtrain_result dtrain__histograms_reduce(dtrain_metrics *metrics, const size_t *parameters,
                                               int used)
{
    dtrain__histograms *h = metrics->histograms;
    const dtrain__trainer_view *trainer = dtrain__trainer_seen(metrics->desc.trainer);
    const size_t words = (size_t)used * sizeof(dtrain__tally) / sizeof(double);
    size_t count;
    const dtrain_param *params = dtrain__params_of(trainer->state.strategy, &count);
    DTRAIN__TRY(dtrain_reduce(metrics->comm, h->tallies, h->tallies, words, DTRAIN_DTYPE_F64,
                              DTRAIN_REDUCE_SUM, 0, NULL));
    DTRAIN__TRY(dtrain_reduce(metrics->comm, h->most, h->most, 2 * (size_t)used, DTRAIN_DTYPE_F64,
                              DTRAIN_REDUCE_MAX, 0, NULL));
    for (int slot = 0; trainer->rank == 0 && slot < used; slot++) {
        dtrain__tally *t = &h->tallies[slot];
        char tag[600];
        dtrain_histogram whole;
        memset(&whole, 0, sizeof whole);
        int first = 0, last = DTRAIN__BUCKETS - 1;
        while (first < last && t->buckets[first] == 0) first++;
        while (first < last && t->buckets[last] == 0) last--;
        for (int i = first; i <= last; i++) { /* empty buckets in a row become one */
            const double in = t->buckets[i];
            if (i < last && in == 0 && t->buckets[i + 1] == 0) continue;
            const int side = i < DTRAIN__SIDE ? DTRAIN__SIDE - 1 - i : i - DTRAIN__SIDE;
            const double limit = ldexp(1 + 0.25 * (side % 4), side / 4 - 64); /* the upper limit */
            h->limits[whole.bucket_count] = i == DTRAIN__BUCKETS - 1 ? DBL_MAX
                                            : i < DTRAIN__SIDE       ? -limit
                                                                     : limit;
            t->buckets[whole.bucket_count++] = in;
            whole.count += (uint64_t)in;
        }
        const int head = snprintf(tag, sizeof tag, slot % 2 ? "weights.grad/" : "weights/");
        dtrain__name_cut(tag + head, 512, params[parameters[slot / 2]].name);
        whole.step = metrics->last.step;
        whole.wall_time = metrics->sample.wall_time;
        whole.tag = tag;
        if (whole.count) whole.min = -h->most[slot][0], whole.max = h->most[slot][1];
        whole.sum = t->sum;
        whole.sum_squares = t->sum_squares;
        whole.nonfinite = (uint64_t)t->nonfinite;
        whole.limits = h->limits;
        whole.buckets = t->buckets;
        metrics->sample.histogram = &whole;
        dtrain__sinks_take(metrics, DTRAIN_METRICS_HISTOGRAM);
        metrics->sample.histogram = NULL;
    }
    return DTRAIN_OK;
}

/* Make the histograms of this step. Gradients are the last step's, before clipping and without the
 * loss scale. Ranks that hold the same part of a parameter divide it evenly. The first rank of a
 * tensor axis counts parameters that are whole on all its ranks, and the first of several stages
 * the parameters that they share. */
DTRAIN__PRIVATE dtrain_result dtrain__histograms_step(dtrain_metrics *metrics)
{
    const dtrain__trainer_view *trainer = dtrain__trainer_seen(metrics->desc.trainer);
    const dtrain_strategy *strategy = trainer->state.strategy;
    const double scale = metrics->last.loss_scale;
    const float unscale = scale > 0 ? (float)(1 / scale) : 1;
    size_t parameters[DTRAIN__TOGETHER / 2], count;
    const dtrain_param *params = dtrain__params_of(strategy, &count);
    int used = 0;
    DTRAIN__TRY(dtrain__between_backwards(strategy, "dtrain_metrics_step"));
    for (size_t i = 0; i < count; i++) {
        const bool whole = trainer->groups->tensor_rank && params[i].cut.axis == DTRAIN_CUT_NONE;
        dtrain_shard part;
        int holders;
        if (!dtrain__is_updated(&params[i])) continue;
        memset(&part, 0, sizeof part);
        if (!whole && dtrain__stage_first(strategy, i) == trainer->groups->pipeline_rank &&
            dtrain__shard_of(strategy, i, &part)) {
            const int number = dtrain__holders(strategy, i, &holders);
            const int64_t all = part.count, rest = all % holders;
            const int64_t first = all / holders * number + dtrain__min(number, rest);
            if (part.value) part.value += first;
            if (part.grad) part.grad += first;
            part.count = all / holders + (number < rest);
        }
        parameters[used / 2] = i;
        DTRAIN__TRY(dtrain__histogram_fill(metrics, used++, part.value, part.count, 1));
        DTRAIN__TRY(dtrain__histogram_fill(metrics, used++, part.grad, part.count, unscale));
        if (used < DTRAIN__TOGETHER) continue;
        DTRAIN__TRY(dtrain__histograms_reduce(metrics, parameters, used));
        used = 0;
    }
    return used ? dtrain__histograms_reduce(metrics, parameters, used) : DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__histograms_create(dtrain_metrics *metrics)
{
    if (!metrics->desc.trainer)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_metrics_create: histogram_every needs a trainer in desc");
    metrics->histograms = (dtrain__histograms *)dtrain__alloc(
        &metrics->allocator, 1, sizeof *metrics->histograms, "histograms");
    return metrics->histograms ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

DTRAIN__PRIVATE void dtrain__histograms_destroy(dtrain_metrics *metrics)
{
    dtrain__free(&metrics->allocator, metrics->histograms, 1, sizeof *metrics->histograms);
}
