/* Learning rates */

#include "core/platform_internal.h"
#include "core/api.h"
#include "optim/optim_internal.h"
#include "optim/optimizer.h"

/* Return the learning rate of one step:
 *
 *     0 .. warmup - 1      lr (step + 1) / warmup
 *     warmup .. total      from lr to min_lr, along a straight line or half a cosine
 *     total ..             min_lr
 *     STEPS                lr gamma^k after the k-th milestone
 *
 * It is computed in double and rounded once: every machine and world size gets the same bits. */
DTRAIN_API float dtrain_schedule_lr(const dtrain_schedule *schedule, int64_t step)
{
    if (!schedule) return 0;
    const double lr = (double)schedule->lr, low = (double)schedule->min_lr;
    const int64_t warmup = schedule->warmup_steps, total = schedule->total_steps;
    if (step < 0) step = 0;
    if (step < warmup) return (float)(lr * ((double)step + 1) / (double)warmup);
    if (schedule->kind == DTRAIN_SCHEDULE_STEPS) {
        double rate = lr;
        for (int i = 0; i < DTRAIN_SCHEDULE_MILESTONES && schedule->milestones[i] > 0; i++)
            if (step >= schedule->milestones[i])
                rate *= schedule->gamma > 0 ? (double)schedule->gamma : 0.1;
        return (float)rate;
    }
    if (schedule->kind != DTRAIN_SCHEDULE_LINEAR && schedule->kind != DTRAIN_SCHEDULE_COSINE)
        return schedule->lr;
    if (step >= total) return schedule->min_lr;
    const double done = (double)(step - warmup) / (double)(total - warmup);
    if (schedule->kind == DTRAIN_SCHEDULE_LINEAR) return (float)(lr + (low - lr) * done);
    return (float)(low + (lr - low) * 0.5 * (1 + cos(3.14159265358979323846 * done)));
}
