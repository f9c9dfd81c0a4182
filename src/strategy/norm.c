/* The norm of gradients
 *
 * The norm is one number over all shards. It is added in double in registration order, so that
 * ranks with the same gradients get the same bits:
 *
 *     norm^2 = sum over m of the sum over c of the sum of squares that rank (m, c) counts
 *     m        ranks that hold one model together, in their order
 *     c        ranks that share one copy of a part of the model, in their order
 *
 * Every element of the model counts once. Each rank of a tensor axis counts its part of a cut
 * parameter; its first rank counts whole parameters. The sum of squares of as many fp32 numbers as
 * memory holds is far inside the range of double: it is not finite exactly if some gradient, on any
 * rank, is not finite. Replicas of a shard have the same bits, and ranks with different shards
 * exchange their sums. So all ranks get the same norm without further communication. */

#include "core/platform_internal.h"
#include "comm/comm_internal.h"
#include "strategy/strategy_internal.h"

/* Add the squares of the shards in host memory, or of those on the device, to *total, which is in
 * the same memory. Ranks that share a copy all have gradients that are not sharded: the first rank
 * counts them. The first pipeline stage counts a tied weight. `replicated`: count on each rank of
 * the tensor axis what is whole on all of them, to check that it is the same. */
static dtrain_result dtrain__add_squares(dtrain_strategy *strategy, bool on_host, bool replicated,
                                         double *total)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain__groups *groups = &strategy->groups;
    dtrain_device *device = on_host ? strategy->offload.cpu : strategy->device;
    dtrain_sum_args args;
    memset(&args, 0, sizeof args);
    args.squares = true;
    args.accumulate = true;
    args.scale = 1;
    args.total = total;
    args.dtype = (dtrain_dtype)layout->dtype;
    for (size_t n = 0; n < strategy->shard_count; n++) {
        const dtrain_shard *shard = &strategy->shards[n];
        const size_t i = shard->param->state.index;
        const dtrain__bucket *bucket = layout->entries[i].bucket;
        const bool whole = layout->tensor_ranks > 1 && !shard->param->cut.axis;
        if (bucket->grad_on_host != on_host || shard->count == 0) continue;
        if (!bucket->sharded && layout->rank) continue;
        if (replicated ? !whole : whole && groups->tensor_rank) continue;
        if (layout->entries[i].tied && !replicated &&
            dtrain__stage_first(strategy, i) != groups->pipeline_rank)
            continue;
        args.x = shard->grad ? (const void *)shard->grad : shard->typed_grad;
        args.count = shard->count;
        DTRAIN__TRY(device->ops->sum(device, &args));
    }
    return DTRAIN_OK;
}

/* Set *total, in device memory, to the sum of the squares on the device. */
DTRAIN__PRIVATE dtrain_result dtrain__device_squares(dtrain_strategy *strategy, bool replicated,
                                                     double *total)
{
    DTRAIN__TRY(strategy->device->ops->zero(strategy->device, total, sizeof *total));
    return dtrain__add_squares(strategy, false, replicated, total);
}

/* Collect `count` sums of each rank of a communicator, as integers, because a communicator's sum of
 * doubles would not be exact. Add up the first sums in rank order, with `both` also the second. */
static dtrain_result dtrain__sum_ranks(dtrain_strategy *strategy, dtrain_comm *comm, double *sums,
                                       size_t count, bool both)
{
    const int ranks = dtrain_comm_size(comm);
    const double *all = strategy->gathered;
    DTRAIN__TRY(dtrain_all_gather(comm, sums, strategy->gathered, count, DTRAIN_DTYPE_I64, NULL));
    for (size_t k = 0; k < (both ? count : 1); k++) {
        sums[k] = 0;
        for (int i = 0; i < ranks; i++) sums[k] += all[(size_t)i * count + k];
    }
    return DTRAIN_OK;
}

/* Check that the ranks of each tensor axis have the same gradients of whole parameters: compare the
 * second sums, which have been gathered. Ranks that read other samples or run another program would
 * spoil the model without any other sign. Kernels that add in another order make sums differ by
 * rounding; other samples make them differ by far more. */
static dtrain_result dtrain__check_replicated(dtrain_strategy *strategy)
{
    dtrain_comm *comm = strategy->groups.model;
    const double *all = strategy->gathered;
    for (int i = 0; i < dtrain_comm_size(comm); i++) {
        const int first = i - i % strategy->groups.tensor_ranks;
        const double usual = all[first * 2 + 1], one = all[i * 2 + 1];
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
    dtrain_comm *const copy = strategy->groups.copy, *const model = strategy->groups.model;
    dtrain_result result = DTRAIN_OK;
    if (copy) result = dtrain__sum_ranks(strategy, copy, sums, count, true);
    if (result == DTRAIN_OK && model) result = dtrain__sum_ranks(strategy, model, sums, 2, false);
    if (result == DTRAIN_OK && model && dtrain__is_finite((float)sums[0]))
        result = dtrain__check_replicated(strategy);
    *total = sums[0];
    return dtrain__strategy_keep(strategy, result);
}
