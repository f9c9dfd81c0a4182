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
    const dtrain_shard *shards; /* (shard_count), the strategy's */
    size_t shard_count;
    dtrain_strategy *strategy;
    dtrain_optimizer_tensor *tensors; /* (tensor_count), of (shard_count): shards not empty */
    size_t tensor_count;
    float *state;
    size_t state_bytes; /* of moments and buffers alone, wherever they are */
    float *host;        /* offloaded: the block that state is in ... */
    size_t host_bytes;
    int64_t stage; /* ... and elements of a stage, two of which it begins with */
    uint64_t step_count;
};

/* optim/clip.c */
DTRAIN__PRIVATE dtrain_result dtrain__sum_squares(dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__grad_norm(dtrain_strategy *strategy, double *norm);
DTRAIN__PRIVATE float dtrain__clip_factor(float norm, float max_norm);

/* optim/scaler.c */
DTRAIN__PRIVATE dtrain_result dtrain__check_scalable(const dtrain_strategy *strategy,
                                                     const char *call, const char *what);

/* optim/optimizer.c */
DTRAIN__PRIVATE dtrain_step_scalars dtrain__optimizer_scalars(const dtrain_optimizer *optimizer,
                                                              float lr, float grad_scale);
DTRAIN__PRIVATE dtrain_result dtrain__optimizer_run(dtrain_optimizer *optimizer,
                                                    const dtrain_step_scalars *now,
                                                    const dtrain_step_scalars *device_scalars);
