/* Two levels. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "strategy/compression_internal.h"
#include "strategy/layout_internal.h"
#include "strategy/strategy_internal.h"
#include "device/device.h"

/* grads of the hop = their sum over this node. */
DTRAIN__PRIVATE dtrain_result dtrain__node_scatter_begin(dtrain_strategy *strategy,
                                                         dtrain__bucket *bucket)
{
    return dtrain_reduce_scatter(strategy->groups[DTRAIN__NODE], bucket->grads,
                                 bucket->grads + bucket->hop_first, (size_t)bucket->hop_count,
                                 DTRAIN_DTYPE_F32, dtrain__level_op(strategy),
                                 dtrain__reduce_works(strategy, bucket));
}

/* Whole buckets: the hop = its mean over everybody. */
DTRAIN__PRIVATE dtrain_result dtrain__across_begin(dtrain_strategy *strategy,
                                                   dtrain__bucket *bucket)
{
    void *wire;
    DTRAIN__TRY(dtrain__to_wire(strategy, bucket, bucket->grads + bucket->hop_first,
                                bucket->hop_first, bucket->hop_count, &wire));
    return dtrain_all_reduce(strategy->groups[DTRAIN__ACROSS], wire, wire,
                             (size_t)bucket->hop_count, (dtrain_dtype)strategy->desc.reduce_dtype,
                             dtrain__level_op(strategy), dtrain__reduce_works(strategy, bucket));
}

DTRAIN__PRIVATE dtrain_result dtrain__across_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    float *hop = bucket->grads + bucket->hop_first;
    DTRAIN__TRY(dtrain__from_wire(strategy, bucket, bucket->hop_first, bucket->hop_count, hop));
    return dtrain__scale(strategy, hop, bucket->hop_count);
}

/* Sharded buckets: this rank's part of it. */
DTRAIN__PRIVATE dtrain_result dtrain__across_scatter_begin(dtrain_strategy *strategy,
                                                           dtrain__bucket *bucket)
{
    const dtrain_dtype dtype = (dtrain_dtype)strategy->desc.reduce_dtype;
    void *wire, *own = dtrain__reduce_target(strategy, bucket);
    DTRAIN__TRY(dtrain__to_wire(strategy, bucket, bucket->grads + bucket->hop_first,
                                bucket->hop_first, bucket->hop_count, &wire));
    if (dtrain__reduces_low(strategy)) own = bucket->low_grads + bucket->shard_first;
    return dtrain_reduce_scatter(strategy->groups[DTRAIN__ACROSS], wire, own,
                                 (size_t)bucket->shard_count, dtype, dtrain__level_op(strategy),
                                 dtrain__reduce_works(strategy, bucket));
}

DTRAIN__PRIVATE dtrain_result dtrain__across_scatter_end(dtrain_strategy *strategy,
                                                         dtrain__bucket *bucket)
{
    float *target = dtrain__reduce_target(strategy, bucket);
    DTRAIN__TRY(
        dtrain__from_wire(strategy, bucket, bucket->shard_first, bucket->shard_count, target));
    return dtrain__scale(strategy, target, bucket->shard_count);
}

DTRAIN__PRIVATE dtrain_result dtrain__node_gather_begin(dtrain_strategy *strategy,
                                                        dtrain__bucket *bucket)
{
    return dtrain_all_gather(strategy->groups[DTRAIN__BACK], bucket->grads + bucket->hop_first,
                             bucket->grads, (size_t)bucket->hop_count, DTRAIN_DTYPE_F32,
                             dtrain__reduce_works(strategy, bucket));
}

/* Who exchanges what is compressed. */
DTRAIN__PRIVATE dtrain_comm *dtrain__hop_comm(const dtrain_strategy *strategy)
{
    return strategy->layout.node_ranks > 1 ? strategy->groups[DTRAIN__ACROSS] : strategy->comm;
}

/* ---- Dense portions ---------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__dense_copy(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                 bool back)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain__sparse *sparse = bucket->sparse;
    const uint32_t dtype = strategy->desc.reduce_dtype;
    const size_t unit = dtrain_dtype_bytes((dtrain_dtype)dtype);
    for (size_t i = sparse->first; i < sparse->end; i++) {
        const dtrain__portion *portion = &layout->portions[i];
        float *grad = bucket->grads + portion->first;
        char *packed = (char *)sparse->dense + (size_t)portion->dense_at * unit;
        if (!portion->dense) continue;
        if (dtype == DTRAIN_DTYPE_F32)
            DTRAIN__TRY(dtrain_device_copy(strategy->device, back ? grad : (float *)(void *)packed,
                                           back ? (float *)(void *)packed : grad,
                                           (size_t)portion->count * unit));
        else if (back)
            DTRAIN__TRY(
                dtrain__convert(strategy, portion->count, packed, dtype, grad, DTRAIN_DTYPE_F32));
        else
            DTRAIN__TRY(
                dtrain__convert(strategy, portion->count, grad, DTRAIN_DTYPE_F32, packed, dtype));
        if (back) DTRAIN__TRY(dtrain__scale(strategy, grad, portion->count));
    }
    return DTRAIN_OK;
}

/* Dense elements and, behind them, `more` others that are packed already. */
DTRAIN__PRIVATE dtrain_result dtrain__dense_start(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                  int64_t more, dtrain_work **work)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const dtrain_reduce_op op = dtrain__level_op(strategy);
    if (sparse->dense_count + more == 0) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__dense_copy(strategy, bucket, false));
    return dtrain_all_reduce(dtrain__hop_comm(strategy), sparse->dense, sparse->dense,
                             (size_t)(sparse->dense_count + more),
                             (dtrain_dtype)strategy->desc.reduce_dtype, op, work);
}
