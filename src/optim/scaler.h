/* Loss scaling and clipping
 *
 * fp16 has no numbers below 6e-8, where many gradients are. So the loss is multiplied by a scale
 * before backward, and the optimizer divides gradients by it when it reads them (Micikevicius et
 * al., "Mixed Precision Training", ICLR 2018). The scale is found while training: a step whose
 * gradients overflow is skipped and lowers it, and a long run of good steps raises it.
 *
 *     backward(loss, scaler.scale) -> finish -> dtrain_grad_norm(&scaler)
 *           -> if the norm is finite: dtrain_optimizer_step(lr, grad_scale)
 *           -> dtrain_loss_scaler_update
 *
 * The norm shows overflows. It is a sum over every gradient of every rank, the same number on all
 * ranks, and not finite exactly if a gradient is not finite. So all ranks step or skip together,
 * without a further collective. */

#pragma once

#include "core/api.h"
#include "core/result.h"
#include "strategy/strategy.h"

/* Plain data, to copy and to save. Start with zeros and a scale, 65536 in torch. */
typedef struct dtrain_loss_scaler {
    float scale; /* of the next backward, 1 or more; no default, except in dtrain_trainer_desc */
    uint32_t growth_interval; /* good steps in a row before the scale doubles; 0 = 2000 */

    /* Counted by dtrain_loss_scaler_update. */
    uint32_t good_steps;    /* in a row, since the scale last doubled or a step overflowed */
    uint32_t bad_steps;     /* overflows in a row */
    uint64_t skipped_steps; /* overflows so far */
} dtrain_loss_scaler;

/* Adapt the scale, once per step, after the step was taken or skipped: an overflow halves it. The
 * scales equal torch.amp.GradScaler's to the bit. A scale that would grow to infinity stays, as in
 * torch. A scale that would fall below 1 stays too, and is DTRAIN_ERROR_NUMERIC: no scale helps.
 * Local. */
DTRAIN_API dtrain_result dtrain_loss_scaler_update(dtrain_loss_scaler *scaler, bool found_inf);

/* Compute the L2 norm over all gradients of the model (tied weights once), and the factor that
 * brings it to at most max_norm: max_norm / (norm + 1e-6) if the norm is larger, else 1, as
 * torch.nn.utils.clip_grad_norm_. Nothing is scaled: pass the factor to dtrain_optimizer_step.
 * max_norm <= 0: no clipping. With a scaler the gradients have its scale; *norm is the norm without
 * it, and the factor removes it too. scaler NULL: the gradients have no scale. A norm that is not
 * finite is returned unchanged, without clipping: a gradient of some rank is inf or NaN, or the
 * norm is beyond fp32. Then take no step. Collective, the same on every rank. */
DTRAIN_API dtrain_result dtrain_grad_norm(dtrain_strategy *strategy, dtrain_loss_scaler *scaler,
                                          float max_norm, float *norm, float *grad_scale);
