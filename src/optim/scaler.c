/* Gradient norm, clipping, loss scaling
 *
 * The norm is one number from all shards, added in double in registration order: the same bits on
 * every rank that has the same gradients. Nothing is scaled here; the optimizer multiplies by a
 * factor on its way through the gradients anyway, so unscaling and clipping together cost one read
 * of them:
 *
 *     norm = sqrt(sum over all ranks' shards of grad^2) / scale        grad_scale = clip / scale
 *
 * That read finds overflows as well. The square of an fp32 number is far inside double's range, and
 * so is the sum of as many as fit in a memory: the norm is not finite exactly when some gradient,
 * on whatever rank, is not. Replicas of a shard hold the same averaged bits; ranks with different
 * shards have exchanged their sums: the verdict is the same everywhere without asking anybody. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "strategy/layout_internal.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"
#include "optim/optim_internal.h"
#include "optim/scaler.h"
#include "device/backend.h"
#include "device/device.h"

/* Add the squares of the shards that are in host memory, or of the others, on the device that is
 * nearer to them and where total (1) is. Every rank of a copy of the model has all of what is not
 * sharded: the first of them counts it. */
static dtrain_result dtrain__add_squares(dtrain_strategy *strategy, bool on_host, double *total)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain_device *device = on_host ? strategy->offload.cpu : strategy->device;
    for (size_t i = 0; i < strategy->shard_count; i++) {
        const dtrain_shard *shard = &strategy->shards[i];
        const dtrain__bucket *bucket =
            &layout->buckets[layout->entries[shard->param->state.index].bucket];
        dtrain_sum_args args;
        if (bucket->grad_home->host != on_host || shard->count == 0) continue;
        if (!bucket->sharded && layout->rank) continue;
        memset(&args, 0, sizeof args);
        args.count = shard->count;
        args.squares = true;
        args.accumulate = true;
        args.scale = 1;
        args.x = shard->grad;
        args.total = total;
        DTRAIN__TRY(device->ops->sum(device, &args));
    }
    return DTRAIN_OK;
}

/* Queue the sum of this rank's squares into strategy->sum_squares, device memory, without those in
 * host memory. */
DTRAIN__PRIVATE dtrain_result dtrain__sum_squares(dtrain_strategy *strategy)
{
    dtrain_device *device = strategy->device;
    DTRAIN__TRY(device->ops->zero(device, strategy->sum_squares, sizeof(double)));
    return dtrain__add_squares(strategy, false, strategy->sum_squares);
}

/* Add the sums of ranks with different shards, in rank order: a sum of doubles made by the
 * communicator would not be exact. */
static dtrain_result dtrain__global_sum(dtrain_strategy *strategy, double *total)
{
    dtrain_comm *comm = strategy->shard_comm;
    int64_t bits;
    memcpy(&bits, total, sizeof bits);
    DTRAIN__TRY(dtrain_all_gather(comm, &bits, strategy->gathered, 1, DTRAIN_DTYPE_I64, NULL));
    *total = 0;
    for (int i = 0; i < dtrain_comm_size(comm); i++) {
        double one;
        memcpy(&one, &strategy->gathered[i], sizeof one);
        *total += one;
    }
    return DTRAIN_OK;
}

/* Measure the norm of gradients that are loss_scale times too large, and the factor that unscales
 * and clips them. */
static dtrain_result dtrain__norm_of(dtrain_strategy *strategy, float loss_scale, float max_norm,
                                     float *norm, float *factor)
{
    double total;
    float clip = 1;
    dtrain_device *device = strategy->device;
    DTRAIN__TRY(dtrain__sum_squares(strategy));
    DTRAIN__TRY(device->ops->copy(device, &total, strategy->sum_squares, sizeof total,
                                  DTRAIN_COPY_DEVICE_TO_HOST));
    if (strategy->layout.grad_home->host) DTRAIN__TRY(dtrain__add_squares(strategy, true, &total));
    if (strategy->shard_comm)
        DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__global_sum(strategy, &total)));
    *norm = (float)(sqrt(total) / (double)loss_scale);
    if (dtrain_is_finite(*norm) && max_norm > 0) clip = max_norm / (*norm + 1e-6f);
    *factor = (clip < 1 ? clip : 1) / loss_scale; /* torch clamps it too */
    return DTRAIN_OK;
}

/* Measure norm and factor for a public call, in a span. */
static dtrain_result dtrain__norm_and_factor(dtrain_strategy *strategy, const char *call,
                                             float loss_scale, float max_norm, float *norm,
                                             float *factor)
{
    DTRAIN__TRY(dtrain__between_steps(strategy, call));
    if (!norm || !factor)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: norm or grad_scale is NULL", call);
    dtrain_world *world = strategy->world;
    const uint32_t span =
        dtrain__span_begin(world, DTRAIN_SPAN_OPTIMIZER, "gradient norm", DTRAIN__UNNUMBERED);
    const dtrain_result result = dtrain__norm_of(strategy, loss_scale, max_norm, norm, factor);
    dtrain__span_end(world, span);
    return result;
}

DTRAIN_API dtrain_result dtrain_clip_grad_norm(dtrain_strategy *strategy, float max_norm,
                                               float *norm, float *scale)
{
    return dtrain__norm_and_factor(strategy, "dtrain_clip_grad_norm", 1, max_norm, norm, scale);
}

/* ---- loss scaling
 *
 * The scale is found while training. With a growth_interval of 4 and a hysteresis of 1:
 *
 *     step        0   1   2   3   4   5   6   7   8   9
 *     overflow                    x                        step 4 is skipped
 *     scale      64  64  64  64 128  64  64  64  64 128    grows after 4 good steps in a row
 *
 * Powers of two as factors change exponents alone: where nothing overflows or vanishes, a scaled
 * run has the bits of one that is not. */

/* Fill in the defaults and check the rest. The reciprocal of a denormal may be infinite: the
 * minimum is at least the least normal number. */
DTRAIN_API dtrain_result dtrain_loss_scaler_init(dtrain_loss_scaler *scaler,
                                                 const dtrain_loss_scaler_desc *desc)
{
    dtrain_loss_scaler_desc d;
    if (!scaler)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_loss_scaler_init: scaler is NULL");
    memset(scaler, 0, sizeof *scaler);
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    /* before they are compared with 0: with -ffast-math a NaN may be equal to it */
    const bool finite = dtrain_is_finite(d.initial_scale) && dtrain_is_finite(d.growth_factor) &&
                        dtrain_is_finite(d.backoff_factor) && dtrain_is_finite(d.minimum_scale);
    if (d.initial_scale == 0) d.initial_scale = 65536;
    if (d.growth_factor == 0) d.growth_factor = 2;
    if (d.backoff_factor == 0) d.backoff_factor = 0.5f;
    if (d.growth_interval == 0) d.growth_interval = 2000;
    if (d.hysteresis == 0) d.hysteresis = 1;
    if (d.minimum_scale == 0) d.minimum_scale = 1;
    if (!finite || d.minimum_scale < FLT_MIN || d.initial_scale < d.minimum_scale ||
        d.growth_factor <= 1 || d.backoff_factor <= 0 || d.backoff_factor >= 1)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "dtrain_loss_scaler_init: expected finite initial_scale >= minimum_scale >= 1.18e-38, "
            "growth_factor > 1 and 0 < backoff_factor < 1; found %g, %g, %g, minimum_scale %g",
            (double)d.initial_scale, (double)d.growth_factor, (double)d.backoff_factor,
            (double)d.minimum_scale);
    scaler->desc = d;
    scaler->scale = d.initial_scale;
    scaler->bad_left = d.hysteresis;
    return DTRAIN_OK;
}

static dtrain_result dtrain__scaler_usable(const dtrain_loss_scaler *scaler, const char *call)
{
    if (scaler && scaler->scale > 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: scaler is NULL or not initialised; call dtrain_loss_scaler_init first",
                       call);
}

/* Refuse a loss scale for compressed gradients; what: the caller's word for the scale. */
DTRAIN__PRIVATE dtrain_result dtrain__check_scalable(const dtrain_strategy *strategy,
                                                     const char *call, const char *what)
{
    if (!strategy || !strategy->desc.compression) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "%s: %s with a strategy that compresses gradients: what it keeps from step "
                       "to step has an earlier step's scale, and one overflow would stay in it; "
                       "use DTRAIN_TAPE_BF16, which needs no scale",
                       call, what);
}

DTRAIN_API dtrain_result dtrain_loss_scaler_unscale(const dtrain_loss_scaler *scaler,
                                                    dtrain_strategy *strategy, float max_norm,
                                                    float *norm, float *grad_scale, bool *found_inf)
{
    const char *const call = "dtrain_loss_scaler_unscale";
    DTRAIN__TRY(dtrain__scaler_usable(scaler, call));
    if (!found_inf) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: found_inf is NULL", call);
    DTRAIN__TRY(dtrain__check_scalable(strategy, call, "a loss scale"));
    DTRAIN__TRY(dtrain__norm_and_factor(strategy, call, scaler->scale, max_norm, norm, grad_scale));
    *found_inf = !dtrain_is_finite(*norm);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_loss_scaler_update(dtrain_loss_scaler *scaler, bool found_inf)
{
    DTRAIN__TRY(dtrain__scaler_usable(scaler, "dtrain_loss_scaler_update"));
    const dtrain_loss_scaler_desc *desc = &scaler->desc;
    if (!found_inf) {
        scaler->bad_steps = 0;
        if (++scaler->good_steps < desc->growth_interval) return DTRAIN_OK;
        const float grown = scaler->scale * desc->growth_factor;
        if (dtrain_is_finite(grown)) scaler->scale = grown;
        scaler->good_steps = 0;
        scaler->bad_left = desc->hysteresis;
        return DTRAIN_OK;
    }
    scaler->good_steps = 0;
    scaler->bad_steps++;
    scaler->skipped_steps++;
    if (scaler->bad_left > 1) {
        scaler->bad_left--;
        return DTRAIN_OK;
    }
    const float lower = scaler->scale * desc->backoff_factor;
    if (lower < desc->minimum_scale)
        return dtrain_fail(
            DTRAIN_ERROR_NUMERIC,
            "dtrain_loss_scaler_update: expected finite gradients at a loss scale of %g, found "
            "overflows in %u steps running, and a smaller scale would be below minimum_scale %g; "
            "lower the learning rate, clip gradients, look at the data, or train in bf16, which "
            "needs no scale",
            (double)scaler->scale, (unsigned)scaler->bad_steps, (double)desc->minimum_scale);
    scaler->scale = lower;
    return DTRAIN_OK;
}
