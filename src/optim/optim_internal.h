/* The optimizer's structure
 *
 * The optimizer's structure, and what the trainer uses beside the public API: the norm without the
 * host, and an update whose numbers are read from device memory. */

#pragma once

#include "core/platform_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"
#include "optim/optimizer.h"
#include "device/backend.h"
#include "device/device.h"

struct dtrain_optimizer {
    dtrain_optimizer_desc desc;
    dtrain_allocator allocator;
    dtrain_device *device;
    dtrain_strategy *strategy;
    const dtrain_shard *shards; /* (shard_count), the strategy's */
    size_t shard_count;
    dtrain_optimizer_tensor *tensors; /* (tensor_count), of (shard_count): shards not empty */
    size_t tensor_count;
    float *block; /* state; offloaded it is page-locked host memory, and holds more: optimizer.c */
    size_t block_bytes, state_bytes; /* state_bytes: of moments and buffers alone */
    int64_t stage;                   /* offloaded: elements of a stage */
    bool offloaded;
    uint64_t step_count;
};

/* optim/scaler.c */
DTRAIN__PRIVATE dtrain_result dtrain__sum_squares(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__check_scalable(const dtrain_strategy *strategy,
                                                     const char *call, const char *what);

/* optim/optimizer.c */
DTRAIN__PRIVATE dtrain_step_scalars dtrain__optimizer_scalars(const dtrain_optimizer *optimizer,
                                                              float lr, float grad_scale);
DTRAIN__PRIVATE dtrain_result dtrain__optimizer_update(const dtrain_optimizer *optimizer,
                                                       const dtrain_optimizer_tensor *piece,
                                                       const dtrain_step_scalars *now,
                                                       const dtrain_step_scalars *device_scalars);
