/* The norm of gradients
 *
 * The norm is one number from all shards, added in double in registration order: the same bits on
 * every rank that has the same gradients.
 *
 *     norm^2 = sum over the ranks that hold one model between them, in their order,
 *              of the sum over the ranks that share a copy of their part of it, in their order,
 *              of the sum of squares of what this rank counts
 *
 * Every element of the model counts once: of what the tensor axis cuts each rank counts its part,
 * of what is whole on all its ranks the first. The sum of as many squares of fp32 numbers as fit
 * into a memory is far inside double's range: it is not finite exactly when some gradient, on any
 * rank, is not. Replicas of a shard have the same bits, and ranks with different shards exchange
 * their sums: so all ranks get the same norm without further communication. */

#include "core/platform_internal.h"
#include "comm/comm_internal.h"
#include "strategy/strategy_internal.h"

/* Tell whether this rank counts a parameter. Gradients that are not sharded are on all ranks that
 * share a copy: the first of these counts them. `replicated`: it counts those that are whole on all
 * ranks of the tensor axis, on each of them, to see that they are the same. */
static bool dtrain__counts(const dtrain_strategy *strategy, const dtrain_shard *shard,
                           bool replicated)
{
    const dtrain__layout *layout = &strategy->layout;
    const size_t i = shard->param->state.index;
    const bool whole = layout->tensor_ranks > 1 && !shard->param->cut.axis;
    if (layout->entries[i].tied && !replicated &&
        dtrain__stage_first(strategy, i) != strategy->groups.pipeline_rank)
        return false; /* the first stage counts it */
    if (!layout->entries[i].bucket->sharded && layout->rank) return false;
    return replicated ? whole : !whole || strategy->groups.tensor_rank == 0;
}

/* Add the squares of the shards in host memory, or of those on the device, to *total, which is in
 * the same memory. */
static dtrain_result dtrain__add_squares(dtrain_strategy *strategy, bool on_host, bool replicated,
                                         double *total)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain_device *device = on_host ? strategy->offload.cpu : strategy->device;
    dtrain_sum_args args;
    memset(&args, 0, sizeof args);
    args.squares = true;
    args.accumulate = true;
    args.scale = 1;
    args.total = total;
    for (size_t i = 0; i < strategy->shard_count; i++) {
        const dtrain_shard *shard = &strategy->shards[i];
        const dtrain__bucket *bucket = layout->entries[shard->param->state.index].bucket;
        if (bucket->grad_on_host != on_host || shard->count == 0) continue;
        if (!dtrain__counts(strategy, shard, replicated)) continue;
        args.x = shard->grad ? (const void *)shard->grad : shard->typed_grad;
        args.dtype = (dtrain_dtype)layout->dtype;
        args.count = shard->count;
        DTRAIN__TRY(device->ops->sum(device, &args));
    }
    return DTRAIN_OK;
}

/* Set *total, device memory, to the sum of the squares of what is on the device. */
static dtrain_result dtrain__device_squares(dtrain_strategy *strategy, bool replicated,
                                            double *total)
{
    DTRAIN__TRY(strategy->device->ops->zero(strategy->device, total, sizeof *total));
    return dtrain__add_squares(strategy, false, replicated, total);
}

DTRAIN__PRIVATE dtrain_result dtrain__queue_squares(dtrain_strategy *strategy,
                                                    const double **squares, int *count)
{
    dtrain_comm *model = strategy->groups.model;
    double *sum = strategy->sum_squares, *gathered = sum + DTRAIN__SQUARES;
    dtrain_work *work = NULL;
    DTRAIN__TRY(dtrain__device_squares(strategy, false, sum));
    *squares = model ? gathered : sum;
    *count = model ? dtrain_comm_size(model) : 1;
    if (!model) return DTRAIN_OK;
    DTRAIN__TRY(dtrain_all_gather(model, sum, gathered, 1, DTRAIN_DTYPE_I64, &work));
    return dtrain_work_wait(work);
}

/* Collect `count` sums of each rank of a communicator, as words: a sum of doubles made by the
 * communicator would not be exact. */
static dtrain_result dtrain__gather_sums(dtrain_strategy *strategy, dtrain_comm *comm,
                                         const double *sums, size_t count)
{
    int64_t bits[DTRAIN__SQUARES];
    memcpy(bits, sums, count * sizeof *sums);
    return dtrain_all_gather(comm, bits, strategy->gathered, count, DTRAIN_DTYPE_I64, NULL);
}

/* Return a sum that was gathered. */
static double dtrain__gathered_sum(const dtrain_strategy *strategy, size_t at)
{
    double sum;
    memcpy(&sum, &strategy->gathered[at], sizeof sum);
    return sum;
}

/* Add up `count` sums of the ranks that share a copy, each for itself, in rank order. */
static dtrain_result dtrain__sum_copy(dtrain_strategy *strategy, double *sums, size_t count)
{
    dtrain_comm *comm = strategy->groups.copy;
    if (!comm) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__gather_sums(strategy, comm, sums, count));
    for (size_t k = 0; k < count; k++) {
        sums[k] = 0;
        for (int i = 0; i < dtrain_comm_size(comm); i++)
            sums[k] += dtrain__gathered_sum(strategy, (size_t)i * count + k);
    }
    return DTRAIN_OK;
}

/* Add up the sums of the ranks that hold one model, in rank order. The second sum of each, of
 * gradients that are whole on all ranks of a tensor axis, must be the same on them: ranks that read
 * other samples, or run another program, would spoil the model without any other sign. Shards that
 * are cut elsewhere, and kernels that add in another order, make it differ by rounding; other
 * samples by far more. */
static dtrain_result dtrain__sum_model(dtrain_strategy *strategy, double *sums)
{
    dtrain_comm *comm = strategy->groups.model;
    const int tensor_ranks = strategy->groups.tensor_ranks;
    if (!comm) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__gather_sums(strategy, comm, sums, 2));
    sums[0] = 0;
    for (int i = 0; i < dtrain_comm_size(comm); i++)
        sums[0] += dtrain__gathered_sum(strategy, (size_t)i * 2);
    for (int i = 0; i < dtrain_comm_size(comm) && dtrain__is_finite((float)sums[0]); i++) {
        const int first = i - i % tensor_ranks;
        const double usual = dtrain__gathered_sum(strategy, (size_t)first * 2 + 1);
        const double one = dtrain__gathered_sum(strategy, (size_t)i * 2 + 1);
        if (fabs(one - usual) <= 1e-3 * (one + usual)) continue;
        return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                           "dtrain_grad_norm: the gradients of what is whole on the tensor axis "
                           "have a norm of %g on rank %d and %g on rank %d; ranks of one tensor "
                           "axis must run the same program on the same samples "
                           "(dtrain_loader_desc.mesh does that)",
                           sqrt(one), dtrain__world_rank(comm, i), sqrt(usual),
                           dtrain__world_rank(comm, first));
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__sum_squares(dtrain_strategy *strategy, double *total)
{
    dtrain_device *device = strategy->device;
    const bool on_host = strategy->layout.grads_on_host, checks = strategy->groups.model != NULL;
    const size_t count = checks ? 2 : 1;
    double sums[DTRAIN__SQUARES], *const here = strategy->sum_squares;
    DTRAIN__TRY(dtrain__device_squares(strategy, false, here));
    if (checks) DTRAIN__TRY(dtrain__device_squares(strategy, true, here + 1));
    DTRAIN__TRY(
        device->ops->copy(device, sums, here, count * sizeof *sums, DTRAIN_COPY_DEVICE_TO_HOST));
    if (on_host) DTRAIN__TRY(dtrain__add_squares(strategy, true, false, sums));
    if (on_host && checks) DTRAIN__TRY(dtrain__add_squares(strategy, true, true, sums + 1));
    dtrain_result result = dtrain__sum_copy(strategy, sums, count);
    if (result == DTRAIN_OK) result = dtrain__sum_model(strategy, sums);
    *total = sums[0];
    return dtrain__strategy_keep(strategy, result);
}
