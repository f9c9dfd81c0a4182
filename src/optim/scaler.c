/* Clipping, loss scaling
 *
 * Nothing is scaled here; the optimizer multiplies by a factor on its way through the gradients
 * anyway, so unscaling and clipping together cost one read of them, by the norm (strategy/norm.c):
 *
 *     norm = sqrt(sum of all grad^2) / scale        grad_scale = clip / scale
 *
 * That read finds overflows as well: the norm is not finite exactly when some gradient, on whatever
 * rank, is not. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/timeline_internal.h"
#include "strategy/strategy.h"
#include "strategy/view_internal.h"
#include "optim/optim_internal.h"
#include "optim/scaler.h"
#include "device/backend.h"
#include "device/device.h"

/* Measure the norm of gradients that are loss_scale times too large, and the factor that unscales
 * and clips them. */
static dtrain_result dtrain__norm_of(dtrain_strategy *strategy, float loss_scale, float max_norm,
                                     float *norm, float *factor)
{
    double total;
    float clip = 1;
    DTRAIN__TRY(dtrain__sum_squares(strategy, &total));
    *norm = (float)(sqrt(total) / (double)loss_scale);
    if (dtrain_is_finite(*norm) && max_norm > 0) clip = max_norm / (*norm + 1e-6f);
    *factor = (clip < 1 ? clip : 1) / loss_scale; /* torch clamps the factor too */
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
    dtrain_world *world = dtrain__world_of(strategy);
    const uint32_t span =
        dtrain__span_begin(world, DTRAIN_SPAN_OPTIMIZER, "gradient norm", DTRAIN__UNNUMBERED);
    const dtrain_result result = dtrain__norm_of(strategy, loss_scale, max_norm, norm, factor);
    dtrain__span_end(world, span);
    return result;
}

DTRAIN_API dtrain_result dtrain_grad_norm(dtrain_strategy *strategy, float max_norm, float *norm,
                                          float *scale)
{
    return dtrain__norm_and_factor(strategy, "dtrain_grad_norm", 1, max_norm, norm, scale);
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
    /* tested before comparing with 0: with -ffast-math a NaN may be equal to 0 */
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

/* Refuse a loss scale for compressed gradients; `what` is the caller's word for the scale. */
DTRAIN__PRIVATE dtrain_result dtrain__check_scalable(const dtrain_strategy *strategy,
                                                     const char *call, const char *what)
{
    if (!strategy || !dtrain__settings_of(strategy)->compression) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "%s: %s with a strategy that compresses gradients: what it keeps from step "
                       "to step has an earlier step's scale, and one overflow would stay in it; "
                       "use DTRAIN_TAPE_BF16, which needs no scale",
                       call, what);
}

DTRAIN_API dtrain_result dtrain_loss_scaler_grad_norm(const dtrain_loss_scaler *scaler,
                                                      dtrain_strategy *strategy, float max_norm,
                                                      float *norm, float *grad_scale,
                                                      bool *found_inf)
{
    const char *const call = "dtrain_loss_scaler_grad_norm";
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
