/* Norm and clipping
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

/* Adds the squares of the shards that are in host memory, or of the others: on the device that is
 * nearer to them, where total (1) is. Each of those that share a copy of the model has all of what
 * is whole: one of them counts it. */
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

/* Left in strategy->sum_squares, device memory, without those in host memory; nobody waits. What
 * every rank of a sharded strategy holds a copy of is added by one of them. */
DTRAIN__PRIVATE dtrain_result dtrain__sum_squares(dtrain_strategy *strategy)
{
    dtrain_device *device = strategy->device;
    DTRAIN__TRY(device->ops->zero(device, strategy->sum_squares, sizeof(double)));
    return dtrain__add_squares(strategy, false, strategy->sum_squares);
}

/* Ranks with different shards exchange their sums and add them in rank order: a sum of doubles
 * made by the communicator would not be exact. */
static dtrain_result dtrain__global_sum(dtrain_strategy *strategy, double *total)
{
    dtrain_comm *comm = strategy->shard_comm;
    int64_t bits;
    if (!comm) return DTRAIN_OK;
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

DTRAIN__PRIVATE dtrain_result dtrain__grad_norm(dtrain_strategy *strategy, double *norm)
{
    dtrain_device *device = strategy->device;
    double total;
    DTRAIN__TRY(dtrain__sum_squares(strategy));
    DTRAIN__TRY(device->ops->copy(device, &total, strategy->sum_squares, sizeof total,
                                  DTRAIN_COPY_DEVICE_TO_HOST));
    if (strategy->layout.grad_home->host) DTRAIN__TRY(dtrain__add_squares(strategy, true, &total));
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__global_sum(strategy, &total)));
    *norm = sqrt(total);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE float dtrain__clip_factor(float norm, float max_norm)
{
    if (!dtrain_is_finite(norm) || !(max_norm > 0)) return 1;
    const float factor = max_norm / (norm + 1e-6f);
    return factor < 1 ? factor : 1; /* torch clamps it too */
}

DTRAIN_API dtrain_result dtrain_clip_grad_norm(dtrain_strategy *strategy, float max_norm,
                                               float *norm, float *scale)
{
    double found;
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_clip_grad_norm"));
    if (!norm || !scale)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_clip_grad_norm: %s is NULL",
                           norm ? "scale" : "norm");
    DTRAIN__TRY(dtrain__grad_norm(strategy, &found));
    *norm = (float)found;
    *scale = dtrain__clip_factor(*norm, max_norm);
    return DTRAIN_OK;
}
