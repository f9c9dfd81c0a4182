/* What a recorded step (train/queued_step.c) asks of an optimizer */

#include "core/platform_internal.h"
#include "optim/optim_internal.h"
#include "optim/optimizer.h"

/* Compute the numbers of the next step, for kernels that read them from device memory: one set for
 * all groups, which multiply the rate by their lr_scale. */
DTRAIN__PRIVATE dtrain_step_scalars dtrain__recorded_scalars(const dtrain_optimizer *optimizer,
                                                             float lr)
{
    const dtrain_optimizer_desc *desc = &dtrain__corrected_group(optimizer)->desc;
    dtrain_step_scalars scalars = dtrain__group_scalars(desc, optimizer->step_count, lr, 1);
    scalars.lr = lr;
    return scalars;
}

/* Return what an optimizer lacks for its step to be recorded; NULL: nothing. */
DTRAIN__PRIVATE const char *dtrain__not_recordable(const dtrain_optimizer *optimizer)
{
    const dtrain_optimizer_desc *one = &dtrain__corrected_group(optimizer)->desc;
    for (size_t g = 0; g < optimizer->group_count; g++) {
        const dtrain_optimizer_desc *desc = &optimizer->groups[g].desc;
        if (desc->variance_steps)
            return "an optimizer without variance_steps: what is recorded would never stop";
        if (desc->kind == DTRAIN_OPTIMIZER_ADAMW &&
            (desc->beta1 != one->beta1 || desc->beta2 != one->beta2))
            return "groups of AdamW with the same beta1 and beta2: one set of corrections changes "
                   "from step to step";
    }
    return NULL;
}
