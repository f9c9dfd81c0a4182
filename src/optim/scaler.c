/* Loss scaling
 *
 * Loss scaling: which scale the next backward gets, and unscaling before the update. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "strategy/strategy_internal.h"
#include "optim/optim_internal.h"
#include "optim/scaler.h"

/* The reciprocal of a denormal may be infinite: the minimum is at least the least normal number.
 */
DTRAIN_API dtrain_result dtrain_loss_scaler_init(dtrain_loss_scaler *scaler,
                                                 const dtrain_loss_scaler_desc *desc)
{
    dtrain_loss_scaler_desc d;
    if (!scaler)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_loss_scaler_init: scaler is NULL");
    memset(scaler, 0, sizeof *scaler);
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (d.initial_scale == 0) d.initial_scale = 65536;
    if (d.growth_factor == 0) d.growth_factor = 2;
    if (d.backoff_factor == 0) d.backoff_factor = 0.5f;
    if (d.growth_interval == 0) d.growth_interval = 2000;
    if (d.hysteresis == 0) d.hysteresis = 1;
    if (d.minimum_scale == 0) d.minimum_scale = 1;
    if (!dtrain_is_finite(d.initial_scale) || !dtrain_is_finite(d.growth_factor) ||
        !dtrain_is_finite(d.backoff_factor) || !dtrain_is_finite(d.minimum_scale) ||
        d.minimum_scale < FLT_MIN || d.initial_scale < d.minimum_scale || d.growth_factor <= 1 ||
        d.backoff_factor <= 0 || d.backoff_factor >= 1)
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
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: scaler is %s", call,
                       scaler ? "not initialised; call dtrain_loss_scaler_init first" : "NULL");
}

DTRAIN__PRIVATE dtrain_result dtrain__check_scalable(const dtrain_strategy *strategy,
                                                     const char *call, const char *what)
{
    if (!strategy->desc.compression) return DTRAIN_OK;
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
    double scaled;
    DTRAIN__TRY(dtrain__scaler_usable(scaler, call));
    DTRAIN__TRY(dtrain__strategy_usable(strategy, call));
    if (!norm || !grad_scale || !found_inf)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s is NULL", call,
                           !norm         ? "norm"
                           : !grad_scale ? "grad_scale"
                                         : "found_inf");
    DTRAIN__TRY(dtrain__check_scalable(strategy, call, "a loss scale"));
    DTRAIN__TRY(dtrain__grad_norm(strategy, &scaled));
    *norm = (float)(scaled / (double)scaler->scale);
    *found_inf = !dtrain_is_finite(*norm);
    *grad_scale = dtrain__clip_factor(*norm, max_norm) / scaler->scale;
    return DTRAIN_OK;
}

static void dtrain__scaler_good(dtrain_loss_scaler *scaler)
{
    const dtrain_loss_scaler_desc *desc = &scaler->desc;
    scaler->bad_steps = 0;
    scaler->good_steps++;
    if (scaler->good_steps < desc->growth_interval) return;
    const float grown = scaler->scale * desc->growth_factor;
    if (dtrain_is_finite(grown)) scaler->scale = grown;
    scaler->good_steps = 0;
    scaler->bad_left = desc->hysteresis;
}

DTRAIN_API dtrain_result dtrain_loss_scaler_update(dtrain_loss_scaler *scaler, bool found_inf)
{
    DTRAIN__TRY(dtrain__scaler_usable(scaler, "dtrain_loss_scaler_update"));
    if (!found_inf) {
        dtrain__scaler_good(scaler);
        return DTRAIN_OK;
    }
    scaler->good_steps = 0;
    scaler->bad_steps++;
    scaler->skipped_steps++;
    if (scaler->bad_left > 1) {
        scaler->bad_left--;
        return DTRAIN_OK;
    }
    const float lower = scaler->scale * scaler->desc.backoff_factor;
    if (lower >= scaler->desc.minimum_scale) {
        scaler->scale = lower;
        return DTRAIN_OK;
    }
    return dtrain_fail(
        DTRAIN_ERROR_NUMERIC,
        "dtrain_loss_scaler_update: expected finite gradients at a loss scale of %g, "
        "found overflows in %u steps running, and a smaller scale would be below "
        "minimum_scale %g; lower the learning rate, clip gradients, look at the "
        "data, or train in bf16, which needs no scale",
        (double)scaler->scale, (unsigned)scaler->bad_steps, (double)scaler->desc.minimum_scale);
}
