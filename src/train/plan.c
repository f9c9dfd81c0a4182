/* Planning: memory of a step, largest batch
 *
 * Planning: the memory of a step, and the largest batch that fits. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "strategy/layout_internal.h"
#include "strategy/memory.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "optim/optim_internal.h"
#include "optim/optimizer.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"
#include "device/device.h"

/* Runs the loss forwards and backwards where kernels do nothing: the tape counts all the same. It
 * gets no strategy, because `ready` would start communication: a plan is one rank's own affair. On
 * the plan device the tape leaves the parameters' bookkeeping alone as well. */
static dtrain_result dtrain__plan_tape(dtrain_world *world, const dtrain_trainer_desc *desc,
                                       dtrain_device *device, dtrain_tape_info *info)
{
    dtrain_tape *tape;
    DTRAIN__TRY(dtrain_tape_create(world, NULL, device, &tape));
    dtrain_result result =
        dtrain_tape_checkpoint(tape, desc->checkpoint_every, desc->checkpoint_ops);
    if (result == DTRAIN_OK) result = dtrain_tape_begin(tape, desc->tape_flags, 0);
    if (result == DTRAIN_OK) result = dtrain_tape_backward(tape, desc->loss(tape, desc->user), 1);
    dtrain_tape_query(tape, info);
    dtrain_tape_destroy(tape);
    return result;
}

DTRAIN_API dtrain_result dtrain_trainer_plan_activations(dtrain_world *world,
                                                         const dtrain_trainer_desc *desc,
                                                         dtrain_memory *memory)
{
    dtrain_device_desc plan;
    dtrain_device *device;
    dtrain_tape_info tape;
    if (!world || !desc || !desc->loss || !memory)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "dtrain_trainer_plan_activations: world, desc, its loss or memory is NULL");
    memset(&plan, 0, sizeof plan);
    memset(memory, 0, sizeof *memory);
    plan.allocator = *dtrain_world_allocator(world);
    DTRAIN__TRY(dtrain_device_create(dtrain_plan_device_ops(), &plan, &device));
    const dtrain_result result = dtrain__plan_tape(world, desc, device, &tape);
    dtrain_device_destroy(device);
    DTRAIN__TRY(result);
    memory->activations = tape.activation_bytes;
    memory->activation_grads = tape.gradient_bytes;
    memory->total = memory->activations + memory->activation_grads;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_trainer_plan(dtrain_trainer *trainer, dtrain_memory *memory)
{
    dtrain_strategy_info strategy;
    if (!trainer || !memory)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_trainer_plan: trainer or memory is NULL");
    if (!trainer->desc.next_batch)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_trainer_plan: the loss fetches its own batches and "
                           "cannot be run without spending one: give the trainer a next_batch");
    DTRAIN__TRY(dtrain_trainer_plan_activations(trainer->world, &trainer->desc, memory));
    dtrain_strategy_query(trainer->desc.strategy, &strategy);
    memory->params = strategy.value_bytes;
    memory->grads = strategy.grad_bytes;
    memory->buffers = strategy.buffer_bytes;
    memory->host = strategy.host_bytes;
    if (trainer->desc.optimizer && strategy.desc.offload)
        memory->host += trainer->desc.optimizer->host_bytes;
    else if (trainer->desc.optimizer) memory->optimizer = trainer->desc.optimizer->state_bytes;
    if (trainer->tape->device->ops->host_memory) memory->workspace = trainer->world->base_bytes;
    memory->total +=
        memory->params + memory->grads + memory->optimizer + memory->buffers + memory->workspace;
    return DTRAIN_OK;
}

/* ---- automatic batch
*
 * 1. Each rank searches the largest batch its own memory has room for: doubling, then halving the
 *    interval. A plan is bookkeeping only, some twenty of them take milliseconds.
 * 2. The least of all ranks is tried: allocated, touched and held by all of them until all have
 *    said how it went. Ranks of one host share its memory, so one after the other proves nothing.
 * 3. Where a rank has failed, all go on with less. */

typedef struct dtrain__batch_plan {
    dtrain_world *world;
    const dtrain_plan_batch_desc *desc;
    dtrain_strategy_desc strategy;
    dtrain_comm *comm;
    uint64_t fixed; /* bytes of strategy and optimizer */
    int64_t limit;  /* of those and activations */
} dtrain__batch_plan;

/* Bytes of activations. */
static dtrain_result dtrain__batch_needs(const dtrain__batch_plan *plan, uint32_t batch,
                                         uint64_t *bytes)
{
    dtrain_memory memory;
    const dtrain_trainer_desc *trainer = plan->desc->trainer;
    DTRAIN__TRY(plan->desc->set_batch(trainer->user, batch));
    DTRAIN__TRY(dtrain_trainer_plan_activations(plan->world, trainer, &memory));
    *bytes = memory.total;
    return DTRAIN_OK;
}

/* What cannot even be planned, for want of addresses or of the host's buffers, does not fit. */
static dtrain_result dtrain__batch_fits(const dtrain__batch_plan *plan, uint32_t batch, bool *fits)
{
    uint64_t bytes = 0;
    const dtrain_result result = dtrain__batch_needs(plan, batch, &bytes);
    *fits = result == DTRAIN_OK && bytes <= INT64_MAX - plan->fixed &&
            (int64_t)(plan->fixed + bytes) <= plan->limit;
    return result == DTRAIN_ERROR_MEMORY ? DTRAIN_OK : result;
}

/* 0: not even one sample. */
static dtrain_result dtrain__batch_search(const dtrain__batch_plan *plan, uint32_t *batch)
{
    uint32_t fits = 0, fails = (plan->desc->max_batch ? plan->desc->max_batch : 65536) + 1;
    while (fails - fits > 1) {
        uint32_t next = fits + (fails - fits) / 2;
        bool good;
        if (fits == 0) next = 1;
        else if (next / 2 >= fits) next = 2 * fits;
        DTRAIN__TRY(dtrain__batch_fits(plan, next, &good));
        if (good) fits = next;
        else fails = next;
    }
    *batch = fits;
    return DTRAIN_OK;
}

static dtrain_result dtrain__batch_none(const dtrain__batch_plan *plan)
{
    uint64_t one;
    DTRAIN__TRY(dtrain__batch_needs(plan, 1, &one));
    return dtrain_fail(DTRAIN_ERROR_MEMORY,
                       "dtrain_trainer_plan_batch: not even one sample fits: %.1f MiB a rank for "
                       "parameters, gradients, optimizer and buffers and %.1f MiB of activations, "
                       "of %.1f MiB: %.1f MiB are missing. A strategy that shards more, more "
                       "ranks, activation checkpointing or, on a GPU, offload would help",
                       dtrain__mib(plan->fixed), dtrain__mib(one),
                       dtrain__mib(plan->limit > 0 ? (uint64_t)plan->limit : 0),
                       dtrain__mib((uint64_t)((int64_t)(plan->fixed + one) - plan->limit)));
}

/* Allocates and touches what a step needs; what is there of it stays until the caller frees it. */
static dtrain_result dtrain__batch_hold(const dtrain__batch_plan *plan, uint32_t batch,
                                        uint64_t bytes[2], void *held[2])
{
    dtrain_device *device = plan->world->device;
    held[0] = held[1] = NULL;
    bytes[0] = plan->fixed;
    DTRAIN__TRY(dtrain__batch_needs(plan, batch, &bytes[1]));
    for (int i = 0; i < 2; i++) {
        if (bytes[i] > SIZE_MAX / 2)
            return dtrain_fail(DTRAIN_ERROR_MEMORY,
                               "dtrain_trainer_plan_batch: %llu bytes are more than "
                               "can be addressed",
                               (unsigned long long)bytes[i]);
        DTRAIN__TRY(device->ops->alloc(device, (size_t)bytes[i], &held[i]));
        DTRAIN__TRY(device->ops->zero(device, held[i], (size_t)bytes[i]));
    }
    return device->ops->synchronize(device);
}

/* Collective: whether every rank could. */
static dtrain_result dtrain__batch_trial(const dtrain__batch_plan *plan, uint32_t batch, bool *good)
{
    dtrain_device *device = plan->world->device;
    uint64_t bytes[2];
    void *held[2];
    const dtrain_result mine = dtrain__batch_hold(plan, batch, bytes, held);
    int32_t well = mine == DTRAIN_OK;
    const dtrain_result told =
        dtrain_all_reduce(plan->comm, &well, &well, 1, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MIN, NULL);
    for (int i = 0; i < 2; i++)
        if (held[i]) device->ops->free(device, held[i], (size_t)bytes[i]);
    *good = well != 0;
    DTRAIN__TRY(told);
    return dtrain__agree(plan->comm, mine == DTRAIN_ERROR_MEMORY ? DTRAIN_OK : mine);
}

static dtrain_result dtrain__batch_check(dtrain_world *world, const dtrain_plan_batch_desc *desc,
                                         const uint32_t *batch)
{
    const char *missing = !world                        ? "world is NULL"
                          : !desc                       ? "desc is NULL"
                          : !batch                      ? "batch is NULL"
                          : !desc->set_batch            ? "desc has no set_batch"
                          : !desc->trainer              ? "desc has no trainer"
                          : !desc->trainer->loss        ? "desc's trainer has no loss"
                          : !desc->params               ? "desc has no params"
                          : desc->max_batch > INT32_MAX ? "max_batch is above 2^31 - 1"
                                                        : NULL;
    if (!missing) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_trainer_plan_batch: %s", missing);
}

DTRAIN_API dtrain_result dtrain_trainer_plan_batch(dtrain_world *world,
                                                   const dtrain_plan_batch_desc *desc,
                                                   uint32_t *batch)
{
    dtrain__batch_plan plan;
    uint32_t found = 0;
    bool good = false;
    DTRAIN__TRY(dtrain__batch_check(world, desc, batch));
    memset(&plan, 0, sizeof plan);
    plan.world = world;
    plan.desc = desc;
    if (desc->strategy) plan.strategy = *desc->strategy;
    plan.comm = plan.strategy.comm ? plan.strategy.comm : dtrain_world_comm(world);
    dtrain_result mine =
        dtrain__strategy_needs(world, desc->params, desc->param_count, &plan.strategy,
                               dtrain_comm_size(plan.comm), &plan.fixed);
    DTRAIN__TRY(dtrain__agree(plan.comm, mine));
    DTRAIN__TRY(dtrain__auto_limit(world, &plan.strategy, plan.comm, &plan.limit));
    mine = dtrain__batch_search(&plan, &found);
    if (mine == DTRAIN_OK && found == 0) mine = dtrain__batch_none(&plan);
    DTRAIN__TRY(dtrain__agree(plan.comm, mine));
    int32_t least = (int32_t)found;
    DTRAIN__TRY(
        dtrain_all_reduce(plan.comm, &least, &least, 1, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MIN, NULL));
    for (; least > 0; least -= (least + 7) / 8) {
        DTRAIN__TRY(dtrain__batch_trial(&plan, (uint32_t)least, &good));
        if (good) break;
    }
    if (!good)
        return dtrain_fail(
            DTRAIN_ERROR_MEMORY,
            "dtrain_trainer_plan_batch: %.1f MiB a rank should be there, but not every rank "
            "could allocate what one sample needs: set memory_limit to less, or end "
            "what else uses the device",
            dtrain__mib((uint64_t)plan.limit));
    *batch = (uint32_t)least;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_trainer_split_batch(uint64_t global_batch, uint32_t batch,
                                                    int ranks, uint32_t *batch_each,
                                                    uint32_t *micro_batches)
{
    const char *const call = "dtrain_trainer_split_batch";
    if (!global_batch || !batch || ranks < 1 || !batch_each || !micro_batches)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: global_batch (%llu), batch (%u) or ranks (%d) is below 1, or a "
                           "result's address is NULL",
                           call, (unsigned long long)global_batch, batch, ranks);
    const uint64_t own = global_batch / (uint64_t)ranks, below = own * (uint64_t)ranks;
    if (below != global_batch)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: a global batch of %llu cannot be shared by %d ranks; the nearest "
                           "that can is %llu",
                           call, (unsigned long long)global_batch, ranks,
                           (unsigned long long)(!below || global_batch - below > (uint64_t)ranks / 2
                                                    ? below + (uint64_t)ranks
                                                    : below));
    uint64_t micro = own < batch ? own : batch;
    while (own % micro) micro--;
    if (own / micro > UINT32_MAX)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: %llu micro-batches of %llu samples are more than a step can "
                           "have",
                           call, (unsigned long long)(own / micro), (unsigned long long)micro);
    *batch_each = (uint32_t)micro;
    *micro_batches = (uint32_t)(own / micro);
    return DTRAIN_OK;
}
