/* Histograms of weights and gradients
 *
 * Each element of a tensor is counted by one rank: ranks that hold the same shard, or all of the
 * tensor, divide it among themselves. The sum over ranks is the histogram of the whole tensor,
 * under every strategy, although no rank may hold the whole.
 *
 * Buckets are those of the floating-point format: four to a power of two, the same for all tensors
 * and ranks, so that counts can be added and a value's bucket is a shift of its bits:
 *
 *     ... [-1.25, -1) ... (-2^-64, 2^-64) ... [1, 1.25) [1.25, 1.5) [1.5, 1.75) [1.75, 2) ...
 *
 * A value that is a limit belongs to the bucket farther from 0. Values from 2^64 on share the last
 * bucket of their sign.
 *
 * The cost of a step with histograms is one pass over values and gradients (1 ns an element and
 * rank, divided by the ranks that share the work), a copy to the host on a GPU, and a reduce and an
 * all-gather of 132 KB for every 8 parameters. */

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

#define DTRAIN__SIDE 512 /* buckets of a sign: 4 for each of 128 powers of 2 */
#define DTRAIN__BUCKETS (2 * DTRAIN__SIDE + 1) /* the one around 0 is in the middle */
#define DTRAIN__LOWEST ((127 - 64) * 4)        /* bits >> 21 of 2^-64 */
#define DTRAIN__TOGETHER 16                    /* histograms in one reduce */
#define DTRAIN__CHUNK 16384                    /* values of one copy to the host */

/* The figures of a histogram beside its buckets; ranks gather them as words of 8 bytes. */
typedef struct dtrain__moments {
    double min, max, sum, sum_squares, count, nonfinite;
} dtrain__moments;

#define DTRAIN__MOMENT_WORDS (sizeof(dtrain__moments) / sizeof(int64_t))

typedef struct dtrain__histograms {
    dtrain_world *world;
    const dtrain__trainer_view *trainer; /* rank 0 of its ranks writes */
    int64_t counts[DTRAIN__TOGETHER][DTRAIN__BUCKETS];
    dtrain__moments *mine;                                    /* (TOGETHER), this rank's of `all` */
    double limits[DTRAIN__BUCKETS], buckets[DTRAIN__BUCKETS]; /* of the one that is written */
    float chunk[DTRAIN__CHUNK];
    dtrain__moments all[1]; /* (ranks, TOGETHER) */
} dtrain__histograms;

/* Count values, times a scale, of the device's memory or the host's. */
static dtrain_result dtrain__histogram_fill(dtrain__histograms *h, int slot, const float *values,
                                            int64_t count, float scale)
{
    dtrain_device *device = dtrain_world_device(h->world);
    dtrain__moments *m = &h->mine[slot];
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
                m->nonfinite++;
                continue;
            }
            const int side = magnitude < 0 ? -1 : (int)dtrain__min(magnitude, DTRAIN__SIDE - 1);
            h->counts[slot][bits >> 31 ? DTRAIN__SIDE - 1 - side : DTRAIN__SIDE + 1 + side]++;
            const double x = (double)value;
            if (m->count == 0 || x < m->min) m->min = x;
            if (m->count == 0 || x > m->max) m->max = x;
            m->sum += x;
            m->sum_squares += x * x;
            m->count++;
        }
    }
    return DTRAIN_OK;
}

/* Add up the histograms of all ranks in slots [0, used), and hand them to the sinks. Slots 2 i and
 * 2 i + 1 are the weights and gradients of parameters[i]. */
static dtrain_result dtrain__histograms_reduce(dtrain_metrics *metrics, const size_t *parameters,
                                               int used)
{
    dtrain__histograms *h = metrics->histograms;
    const size_t buckets = (size_t)used * DTRAIN__BUCKETS;
    size_t count;
    const dtrain_param *params = dtrain__params_of(h->trainer->state.strategy, &count);
    DTRAIN__TRY(dtrain_reduce(metrics->comm, h->counts, h->counts, buckets, DTRAIN_DTYPE_I64,
                              DTRAIN_REDUCE_SUM, 0, NULL));
    DTRAIN__TRY(dtrain_all_gather(metrics->comm, h->mine, h->all,
                                  DTRAIN__TOGETHER * DTRAIN__MOMENT_WORDS, DTRAIN_DTYPE_I64, NULL));
    for (int slot = 0; h->trainer->rank == 0 && slot < used; slot++) {
        const int64_t *counts = h->counts[slot];
        char tag[600];
        dtrain_histogram whole;
        memset(&whole, 0, sizeof whole);
        for (int r = 0; r < h->trainer->ranks; r++) {
            const dtrain__moments *m = &h->all[r * DTRAIN__TOGETHER + slot];
            if (m->count > 0 && (whole.count == 0 || m->min < whole.min)) whole.min = m->min;
            if (m->count > 0 && (whole.count == 0 || m->max > whole.max)) whole.max = m->max;
            whole.sum += m->sum;
            whole.sum_squares += m->sum_squares;
            whole.count += (uint64_t)m->count;
            whole.nonfinite += (uint64_t)m->nonfinite;
        }
        int first = 0, last = DTRAIN__BUCKETS - 1;
        while (first < last && counts[first] == 0) first++;
        while (first < last && counts[last] == 0) last--;
        for (int i = first; i <= last; i++) { /* a run of empty buckets becomes one */
            if (i < last && counts[i] == 0 && counts[i + 1] == 0) continue;
            const int side = i < DTRAIN__SIDE ? DTRAIN__SIDE - 1 - i : i - DTRAIN__SIDE;
            const double limit = ldexp(1 + 0.25 * (side % 4), side / 4 - 64); /* the upper one */
            h->limits[whole.bucket_count] = i == DTRAIN__BUCKETS - 1 ? DBL_MAX
                                            : i < DTRAIN__SIDE       ? -limit
                                                                     : limit;
            h->buckets[whole.bucket_count++] = (double)counts[i];
        }
        const int head = snprintf(tag, sizeof tag, slot % 2 ? "weights.grad/" : "weights/");
        dtrain__name_cut(tag + head, 512, params[parameters[slot / 2]].name);
        whole.step = metrics->sample.step;
        whole.wall_time = metrics->sample.wall_time;
        whole.tag = tag;
        whole.limits = h->limits;
        whole.buckets = h->buckets;
        metrics->sample.histogram = &whole;
        dtrain__sinks_take(metrics, DTRAIN_METRICS_HISTOGRAM);
        metrics->sample.histogram = NULL;
    }
    memset(h->counts, 0, sizeof h->counts);
    memset(h->mine, 0, DTRAIN__TOGETHER * sizeof *h->mine);
    return DTRAIN_OK;
}

/* Make the histograms of this step. Gradients are those of the step that has ended, before clipping
 * and without the loss scale. Ranks that hold the same part of a parameter divide it evenly among
 * themselves; the first rank of a tensor axis counts what is whole on all of them, and the first of
 * several stages what they share. */
DTRAIN__PRIVATE dtrain_result dtrain__histograms_step(dtrain_metrics *metrics)
{
    dtrain__histograms *h = metrics->histograms;
    const dtrain_strategy *strategy = h->trainer->state.strategy;
    const double scale = metrics->last.loss_scale;
    const float unscale = scale > 0 ? (float)(1 / scale) : 1;
    size_t parameters[DTRAIN__TOGETHER / 2], count;
    const dtrain_param *params = dtrain__params_of(strategy, &count);
    int used = 0;
    DTRAIN__TRY(dtrain__between_backwards(strategy, "dtrain_metrics_step"));
    for (size_t i = 0; i < count; i++) {
        const bool whole = h->trainer->groups->tensor_rank && params[i].cut.axis == DTRAIN_CUT_NONE;
        dtrain_shard part;
        int holders;
        if (!dtrain__is_updated(&params[i])) continue;
        memset(&part, 0, sizeof part);
        if (!whole && dtrain__stage_first(strategy, i) == h->trainer->groups->pipeline_rank &&
            dtrain__shard_of(strategy, i, &part)) {
            const int number = dtrain__holders(strategy, i, &holders);
            const int64_t all = part.count, rest = all % holders;
            const int64_t first = all / holders * number + dtrain__min(number, rest);
            if (part.value) part.value += first;
            if (part.grad) part.grad += first;
            part.count = all / holders + (number < rest);
        }
        parameters[used / 2] = i;
        DTRAIN__TRY(dtrain__histogram_fill(h, used++, part.value, part.count, 1));
        DTRAIN__TRY(dtrain__histogram_fill(h, used++, part.grad, part.count, unscale));
        if (used < DTRAIN__TOGETHER) continue;
        DTRAIN__TRY(dtrain__histograms_reduce(metrics, parameters, used));
        used = 0;
    }
    return used ? dtrain__histograms_reduce(metrics, parameters, used) : DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__histograms_create(dtrain_metrics *metrics)
{
    const dtrain__trainer_view *trainer = dtrain__trainer_seen(metrics->desc.trainer);
    if (!trainer)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_metrics_create: histogram_every needs a trainer in desc");
    const size_t all = sizeof(dtrain__moments) * DTRAIN__TOGETHER * (size_t)trainer->ranks;
    metrics->histograms_bytes = sizeof(dtrain__histograms) + all;
    dtrain__histograms *h = metrics->histograms = (dtrain__histograms *)dtrain__alloc(
        &metrics->allocator, 1, metrics->histograms_bytes, "histograms");
    if (!h) return DTRAIN_ERROR_MEMORY;
    h->world = metrics->world;
    h->trainer = trainer;
    h->mine = h->all + trainer->rank * DTRAIN__TOGETHER;
    return DTRAIN_OK;
}
