/* Clipping, loss scaling
 *
 * Nothing is scaled in this file. The optimizer multiplies gradients by a factor when it reads
 * them, so unscaling and clipping together cost one more read of the gradients, by the norm
 * (strategy/norm.c):
 *
 *     norm = sqrt(sum of all grad^2) / scale        grad_scale = clip / scale
 *
 * That read finds overflows too: the norm is not finite exactly if some gradient is not. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/timeline_internal.h"
#include "strategy/strategy.h"
#include "strategy/core_view_internal.h"
#include "optim/optim_internal.h"
#include "optim/scaler.h"
#include "device/backend.h"
#include "device/device.h"

/* ---- loss scaling
 *
 * The scale is found while training. With a growth_interval of 4:
 *
 *     step        0   1   2   3   4   5   6   7   8   9
 *     overflow                    x                        step 4 is skipped
 *     scale      64  64  64  64 128  64  64  64  64 128    grows after 4 good steps in a row
 *
 * Powers of two change only exponents: if nothing overflows or vanishes, a scaled run has the same
 * bits. */

/* Set the default of a zero and check the scale. Finite comes first: with -ffast-math a NaN can
 * pass. */
DTRAIN__PRIVATE dtrain_result dtrain__scaler_fill(dtrain_loss_scaler *scaler, const char *call)
{
    DTRAIN__GIVEN(call, scaler);
    if (scaler->growth_interval == 0) scaler->growth_interval = 2000;
    if (dtrain__is_finite(scaler->scale) && scaler->scale >= 1) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_ARGUMENT,
        "%s: expected a loss scaler with a finite scale of 1 or more, found %g; begin "
        "with zeros and a scale of 65536",
        call, (double)scaler->scale);
}

/* Refuse a loss scale for compressed gradients; `what` names the scale in the sentence. */
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

DTRAIN_API dtrain_result dtrain_grad_norm(dtrain_strategy *strategy, dtrain_loss_scaler *scaler,
                                          float max_norm, float *norm, float *grad_scale)
{
    const char *const call = "dtrain_grad_norm";
    double total;
    float clip = 1;
    if (scaler) DTRAIN__TRY(dtrain__scaler_fill(scaler, call));
    if (scaler) DTRAIN__TRY(dtrain__check_scalable(strategy, call, "a loss scale"));
    DTRAIN__TRY(dtrain__between_steps(strategy, call));
    DTRAIN__GIVEN(call, norm);
    DTRAIN__GIVEN(call, grad_scale);
    const float loss_scale = scaler ? scaler->scale : 1;
    dtrain_world *world = dtrain__world_of(strategy);
    const uint32_t span =
        dtrain__span_begin(world, DTRAIN_SPAN_OPTIMIZER, "gradient norm", DTRAIN__UNNUMBERED);
    const dtrain_result result = dtrain__sum_squares(strategy, &total);
    dtrain__span_end(world, span);
    DTRAIN__TRY(result);
    *norm = (float)(sqrt(total) / (double)loss_scale);
    if (dtrain__is_finite(*norm) && max_norm > 0) clip = max_norm / (*norm + 1e-6f);
    *grad_scale = (clip < 1 ? clip : 1) / loss_scale; /* torch clamps the factor too */
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_loss_scaler_update(dtrain_loss_scaler *scaler, bool found_inf)
{
    DTRAIN__TRY(dtrain__scaler_fill(scaler, "dtrain_loss_scaler_update"));
    if (!found_inf) {
        scaler->bad_steps = 0;
        if (++scaler->good_steps < scaler->growth_interval) return DTRAIN_OK;
        const float grown = scaler->scale * 2;
        if (dtrain__is_finite(grown)) scaler->scale = grown;
        scaler->good_steps = 0;
        return DTRAIN_OK;
    }
    scaler->good_steps = 0;
    scaler->bad_steps++;
    scaler->skipped_steps++;
    if (scaler->scale < 2)
        return dtrain_fail(
            DTRAIN_ERROR_NUMERIC,
            "dtrain_loss_scaler_update: expected finite gradients at a loss scale of %g, found "
            "overflows in %u steps running, and half of that scale is below 1; lower the learning "
            "rate, clip gradients, look at the data, or train in bf16, which needs no scale",
            (double)scaler->scale, (unsigned)scaler->bad_steps);
    scaler->scale /= 2;
    return DTRAIN_OK;
}
