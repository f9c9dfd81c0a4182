/* The optimizer's structure, also for the trainer, which records steps */

#pragma once

#include "core/platform_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "comm/same_internal.h"
#include "strategy/strategy.h"
#include "strategy/core_view_internal.h"
#include "optim/optimizer.h"
#include "optim/scaler.h"
#include "device/backend.h"
#include "device/device.h"

/* Parameters with the same hyper-parameters. Their tensors are neighbours in the list. */
typedef struct dtrain__group {
    dtrain_optimizer_desc desc; /* without groups */
    size_t first, count;        /* range of the optimizer's tensors */
} dtrain__group;

/* Muon's scratch: two matrices, two squares of the smaller side, and a sum, for the largest matrix
 * of this rank. NULL: this rank has no matrix. */
typedef struct dtrain__muon {
    float *x, *y, *gram, *square;
    double *sum;
} dtrain__muon;

struct dtrain_optimizer {
    dtrain_allocator allocator;
    dtrain_device *device;
    dtrain_strategy *strategy;
    dtrain__group *groups; /* (group_count) first group 0, the desc itself */
    size_t group_count;
    const dtrain_shard *shards; /* (shard_count) of the strategy */
    size_t shard_count;
    dtrain_optimizer_tensor *tensors; /* (shard_count), tensor_count in use: one for each shard
                                         that is not empty, group by group */
    const dtrain_shard **sources;     /* (tensor_count) shards of the tensors */
    size_t tensor_count;
    float *block; /* state; with offload page-locked host memory that holds more: optimizer.c */
    size_t block_bytes;
    size_t state_bytes, scratch_bytes; /* bytes of moments and buffers; of Muon's scratch */
    dtrain__muon muon;
    int64_t staging; /* with offload: elements of each of the two staging buffers */
    bool offloaded;
    uint64_t step_count;
    bool compared;      /* hyper-parameters were found the same on all ranks */
    size_t param_count; /* of the strategy */
    uint64_t *updates; /* (param_count) steps in which some rank had a gradient of the parameter: as
                          in torch, each parameter has its count */
};

/* optim/scaler.c */
DTRAIN__PRIVATE dtrain_result dtrain__scaler_fill(dtrain_loss_scaler *scaler, const char *call);
DTRAIN__PRIVATE dtrain_result dtrain__check_scalable(const dtrain_strategy *strategy,
                                                     const char *call, const char *what);

/* optim/optimizer.c */
DTRAIN__PRIVATE dtrain_step_scalars dtrain__group_scalars(const dtrain_optimizer_desc *desc,
                                                          uint64_t updates, float lr,
                                                          float grad_scale);
DTRAIN__PRIVATE const dtrain__group *dtrain__corrected_group(const dtrain_optimizer *optimizer);
DTRAIN__PRIVATE dtrain_result dtrain__optimizer_update(const dtrain_optimizer *optimizer, float lr,
                                                       float grad_scale,
                                                       const dtrain_step_scalars *device_scalars);
DTRAIN__PRIVATE void dtrain__optimizer_count(dtrain_optimizer *optimizer);

/* optim/groups.c */
DTRAIN__PRIVATE size_t dtrain__states_of(const dtrain_optimizer_desc *desc);
DTRAIN__PRIVATE const dtrain_optimizer_desc *dtrain__desc_of(const dtrain_optimizer *optimizer,
                                                             const dtrain_param *param);
DTRAIN__PRIVATE const dtrain_optimizer_tensor *dtrain__moments_of(const dtrain_optimizer *optimizer,
                                                                  const dtrain_param *param);
/* List the hyper-parameters of all groups, to be compared; none without an optimizer. */
DTRAIN__PRIVATE dtrain__same_list dtrain__same_groups(const dtrain_optimizer *optimizer);
DTRAIN__PRIVATE dtrain_result dtrain__check_optimizer(const dtrain_optimizer_desc *desc,
                                                      const dtrain_strategy *strategy);
DTRAIN__PRIVATE dtrain_result dtrain__groups_make(dtrain_optimizer *optimizer,
                                                  const dtrain_optimizer_desc *desc);

/* optim/muon.c and recorded.c, of ring 3: models. Without it groups.c refuses Muon. */
#if DTRAIN__MODELS
DTRAIN__PRIVATE size_t dtrain__muon_layout(const dtrain_optimizer *optimizer, float *memory,
                                           dtrain__muon *muon);
DTRAIN__PRIVATE dtrain_result dtrain__step_muon(dtrain_device *device, const dtrain__muon *muon,
                                                const dtrain_shard *const *sources,
                                                const dtrain_optimizer_args *step);
DTRAIN__PRIVATE dtrain_step_scalars dtrain__recorded_scalars(const dtrain_optimizer *optimizer,
                                                             float lr);
DTRAIN__PRIVATE const char *dtrain__not_recordable(const dtrain_optimizer *optimizer);
#else
#define dtrain__muon_layout(optimizer, memory, muon) ((void)(muon), (size_t)0)
#define dtrain__step_muon(device, muon, sources, step) ((void)(muon), DTRAIN_ERROR_UNSUPPORTED)
#endif
