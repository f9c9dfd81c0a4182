/* The norm of gradients
 *
 * The norm is one number from all shards, added in double in registration order: the same bits on
 * every rank that has the same gradients.
 *
 *     norm^2 = sum over the ranks that share a copy of the model, in their order,
 *              of the sum of squares of what this rank counts
 *
 * The sum of as many squares of fp32 numbers as fit into a memory is far inside double's range: it
 * is not finite exactly when some gradient, on any rank, is not. Replicas of a shard have the same
 * bits, and ranks with different shards exchange their sums: so all ranks get the same norm without
 * further communication. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* Add the squares of the shards in host memory, or of those on the device, to total (1), which is
 * in the same memory. Gradients that are not sharded are on all ranks that share a copy of the
 * model: the first of these ranks counts them. */
static dtrain_result dtrain__add_squares(dtrain_strategy *strategy, bool on_host, double *total)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain_device *device = on_host ? strategy->offload.cpu : strategy->device;
    for (size_t i = 0; i < strategy->shard_count; i++) {
        const dtrain_shard *shard = &strategy->shards[i];
        const dtrain__bucket *bucket = layout->entries[shard->param->state.index].bucket;
        dtrain_sum_args args;
        if (bucket->grad_on_host != on_host || shard->count == 0) continue;
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

DTRAIN__PRIVATE dtrain_result dtrain__queue_squares(dtrain_strategy *strategy,
                                                    const double **squares)
{
    dtrain_device *device = strategy->device;
    *squares = strategy->sum_squares;
    DTRAIN__TRY(device->ops->zero(device, strategy->sum_squares, sizeof(double)));
    return dtrain__add_squares(strategy, false, strategy->sum_squares);
}

/* Add the sums of ranks with different shards, in rank order: a sum of doubles made by the
 * communicator would not be exact. */
static dtrain_result dtrain__global_sum(dtrain_strategy *strategy, double *total)
{
    dtrain_comm *comm = strategy->groups.copy;
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

DTRAIN__PRIVATE dtrain_result dtrain__sum_squares(dtrain_strategy *strategy, double *total)
{
    dtrain_device *device = strategy->device;
    const double *squares;
    DTRAIN__TRY(dtrain__queue_squares(strategy, &squares));
    DTRAIN__TRY(
        device->ops->copy(device, total, squares, sizeof *total, DTRAIN_COPY_DEVICE_TO_HOST));
    if (strategy->layout.grads_on_host) DTRAIN__TRY(dtrain__add_squares(strategy, true, total));
    if (!strategy->groups.copy) return DTRAIN_OK;
    return dtrain__strategy_keep(strategy, dtrain__global_sum(strategy, total));
}
