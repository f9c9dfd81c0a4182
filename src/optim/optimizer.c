/* Optimizers: AdamW, SGD
 *
 * With g = grad * grad_scale, t the step from 1, and the decay decoupled (Loshchilov and Hutter,
 * "Decoupled Weight Decay Regularization", ICLR 2019):
 *
 *     AdamW   m = beta1 m + (1 - beta1) g        correction1 = 1 - beta1^t
 *             v = beta2 v + (1 - beta2) g^2      correction2 = 1 - beta2^t
 *             w = w (1 - lr decay) - lr (m / correction1) / (sqrt(v / correction2) + epsilon)
 *     SGD     b = momentum b + g                 (b = g in step 1)
 *             w = w (1 - lr decay) - lr (nesterov ? g + momentum b : b)
 *
 * One fused kernel per shard reads gradient and state once and writes value and state once. State
 * is for this rank's shards only, one block, made at creation:
 *
 *     AdamW   | m of shard 0 .. pad | v of shard 0 .. pad | m of shard 1 ...
 *     SGD     | buffer of shard 0 .. pad | buffer of shard 1 ...       (nothing without momentum)
 *
 * Offloaded, the block is page-locked host memory, each shard's master copy comes before its state,
 * two stages for gradients before everything, and the update goes in pieces:
 *
 *     down    | grad 0 | grad 1 | grad 2      | ...        into stage 0, 1, 0, ...
 *     CPU              | update 0 | update 1  | update 2
 *     up                          | value 0   | value 1 ...
 *
 * Values and gradients that are in host memory themselves are used where they are. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "strategy/layout_internal.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "strategy/strategy_internal.h"
#include "optim/optim_internal.h"
#include "optim/optimizer.h"
#include "device/backend.h"
#include "device/device.h"
#include "device/device_internal.h"

static dtrain_result dtrain__update_on_host(dtrain_optimizer *optimizer,
                                            const dtrain_step_scalars *now);
static dtrain_result dtrain__check_optimizer(const dtrain_optimizer_desc *desc);
static dtrain_result dtrain__optimizer_memory(dtrain_optimizer *optimizer);

/* Update the parameters and publish them. A rate or scale that is not finite would destroy every
 * parameter in one pass: it is refused before the first is touched. */
DTRAIN_API dtrain_result dtrain_optimizer_step(dtrain_optimizer *optimizer, float lr,
                                               float grad_scale)
{
    if (!optimizer)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_optimizer_step: optimizer is NULL");
    if (!dtrain_is_finite(lr) || lr < 0 || !dtrain_is_finite(grad_scale))
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "dtrain_optimizer_step: expected a finite lr >= 0 and a finite grad_scale, found "
            "%g and %g; the parameters are as they were",
            (double)lr, (double)grad_scale);
    const dtrain_step_scalars now = dtrain__optimizer_scalars(optimizer, lr, grad_scale);
    const dtrain_result result = optimizer->offloaded
                                     ? dtrain__update_on_host(optimizer, &now)
                                     : dtrain__optimizer_update(optimizer, NULL, &now, NULL);
    DTRAIN__TRY(dtrain__strategy_keep(optimizer->strategy, result)); /* others await its values */
    optimizer->step_count++;
    return dtrain_strategy_publish(optimizer->strategy);
}

/* Compute what changes from step to step, for the step that comes next. */
DTRAIN__PRIVATE dtrain_step_scalars dtrain__optimizer_scalars(const dtrain_optimizer *optimizer,
                                                              float lr, float grad_scale)
{
    const dtrain_optimizer_desc *desc = &optimizer->desc;
    const uint64_t step = optimizer->step_count + 1;
    /* of how many steps the second moments are */
    const uint64_t seen =
        desc->variance_steps && desc->variance_steps < step ? desc->variance_steps : step;
    dtrain_step_scalars scalars;
    memset(&scalars, 0, sizeof scalars);
    scalars.lr = lr;
    scalars.grad_scale = grad_scale;
    /* in double: in fp32, 1 - 0.999 has lost three digits already at step 1 */
    scalars.correction1 = (float)(1 - pow((double)desc->beta1, (double)step));
    scalars.correction2 = (float)(1 - pow((double)desc->beta2, (double)seen));
    return scalars;
}

/* Update all tensors, or on the CPU the one piece of an offloaded one, with the scalars given, or
 * with those that `device_scalars` holds when the kernel runs. A beta2 of 1 leaves second moments
 * as they are. The first step of SGD fills the buffer with the gradient itself, as torch does. */
DTRAIN__PRIVATE dtrain_result dtrain__optimizer_update(const dtrain_optimizer *optimizer,
                                                       const dtrain_optimizer_tensor *piece,
                                                       const dtrain_step_scalars *now,
                                                       const dtrain_step_scalars *device_scalars)
{
    const dtrain_optimizer_desc *desc = &optimizer->desc;
    dtrain_device *device = piece ? optimizer->strategy->offload.cpu : optimizer->device;
    if (desc->kind == DTRAIN_OPTIMIZER_ADAMW) {
        const uint64_t steps = desc->variance_steps;
        dtrain_adamw_args args;
        memset(&args, 0, sizeof args);
        args.tensor_count = piece ? 1 : optimizer->tensor_count;
        args.tensors = piece ? piece : optimizer->tensors;
        args.lr = now->lr;
        args.beta1 = desc->beta1;
        args.beta2 = steps > 0 && optimizer->step_count >= steps ? 1 : desc->beta2;
        args.epsilon = desc->epsilon;
        args.correction1 = now->correction1;
        args.correction2 = now->correction2;
        args.grad_scale = now->grad_scale;
        args.scalars = device_scalars;
        return device->ops->adamw(device, &args);
    }
    dtrain_sgd_args args;
    memset(&args, 0, sizeof args);
    args.tensor_count = piece ? 1 : optimizer->tensor_count;
    args.tensors = piece ? piece : optimizer->tensors;
    args.lr = now->lr;
    args.momentum = desc->momentum;
    args.grad_scale = now->grad_scale;
    args.nesterov = desc->nesterov;
    args.first = optimizer->step_count == 0;
    args.scalars = device_scalars;
    return device->ops->sgd(device, &args);
}

DTRAIN_API void dtrain_optimizer_query(const dtrain_optimizer *optimizer,
                                       dtrain_optimizer_info *info)
{
    if (!info) return;
    memset(info, 0, sizeof *info);
    if (!optimizer) return;
    info->kind = optimizer->desc.kind;
    info->step_count = optimizer->step_count;
    info->state_bytes = optimizer->state_bytes;
}

/* ---- creation ---------------------------------------------------------------------------------*/

DTRAIN_API dtrain_optimizer_desc dtrain_adamw_defaults(void)
{
    dtrain_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = DTRAIN_OPTIMIZER_ADAMW;
    desc.beta1 = 0.9f;
    desc.beta2 = 0.999f;
    desc.epsilon = 1e-8f;
    desc.weight_decay = 0.01f;
    return desc;
}

DTRAIN_API dtrain_optimizer_desc dtrain_sgd_defaults(void)
{
    dtrain_optimizer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = DTRAIN_OPTIMIZER_SGD;
    return desc;
}

DTRAIN_API dtrain_result dtrain_optimizer_create(dtrain_world *world, dtrain_strategy *strategy,
                                                 const dtrain_optimizer_desc *desc,
                                                 dtrain_optimizer **out)
{
    if (out) *out = NULL;
    if (!world || !strategy || !desc || !out)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_optimizer_create: world, strategy, desc or out is NULL");
    DTRAIN__TRY(dtrain__check_optimizer(desc));
    const dtrain_allocator *allocator = &world->allocator;
    dtrain_optimizer *optimizer =
        (dtrain_optimizer *)dtrain__alloc(allocator, 1, sizeof *optimizer, "an optimizer");
    if (!optimizer) return DTRAIN_ERROR_MEMORY;
    optimizer->desc = *desc;
    optimizer->allocator = *allocator;
    optimizer->device = dtrain_world_device(world);
    optimizer->strategy = strategy;
    optimizer->offloaded = strategy->offload.cpu != NULL;
    dtrain_result result =
        dtrain_strategy_shards(strategy, &optimizer->shards, &optimizer->shard_count);
    if (result == DTRAIN_OK) result = dtrain__optimizer_memory(optimizer);
    if (result == DTRAIN_OK) *out = optimizer;
    else dtrain_optimizer_destroy(optimizer);
    return result;
}

/* Refuse a desc that does not come from one of the defaults or makes no sense. Comparisons are
 * written so that NaN fails them. */
static dtrain_result dtrain__check_optimizer(const dtrain_optimizer_desc *desc)
{
    const bool adamw = desc->kind == DTRAIN_OPTIMIZER_ADAMW;
    if (!adamw && desc->kind != DTRAIN_OPTIMIZER_SGD)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "dtrain_optimizer_create: kind %u is not a dtrain_optimizer_kind; start from "
            "dtrain_adamw_defaults() or dtrain_sgd_defaults()",
            (unsigned)desc->kind);
    bool right = desc->weight_decay >= 0 && dtrain_is_finite(desc->weight_decay);
    if (adamw)
        right = right && desc->beta1 >= 0 && desc->beta1 < 1 && desc->beta2 >= 0 &&
                desc->beta2 < 1 && desc->epsilon >= 0 && dtrain_is_finite(desc->epsilon);
    else
        right = right && desc->momentum >= 0 && dtrain_is_finite(desc->momentum) &&
                !(desc->nesterov && desc->momentum == 0) && desc->variance_steps == 0;
    if (right) return DTRAIN_OK;
    return dtrain_fail(
        DTRAIN_ERROR_ARGUMENT,
        "dtrain_optimizer_create: expected weight_decay >= 0; of AdamW beta1 and beta2 in [0, 1) "
        "and epsilon >= 0; of SGD momentum >= 0, and > 0 with nesterov, and no variance_steps; all "
        "finite. Found weight_decay %g, beta1 %g, beta2 %g, epsilon %g, momentum %g",
        (double)desc->weight_decay, (double)desc->beta1, (double)desc->beta2, (double)desc->epsilon,
        (double)desc->momentum);
}

/* Allocate the block, zeros, and make the optimizer's view of the shards: addresses do not change
 * any more. Biases and the scales of norms are 1-D: pulling them to zero does not regularise
 * anything. The products cannot overflow: a quarter of the address space holds the values, the
 * layout saw to it. */
static dtrain_result dtrain__optimizer_memory(dtrain_optimizer *optimizer)
{
    const dtrain_optimizer_desc *desc = &optimizer->desc;
    dtrain_device *device = optimizer->device;
    const bool adamw = desc->kind == DTRAIN_OPTIMIZER_ADAMW, offloaded = optimizer->offloaded;
    const size_t states = adamw ? 2 : desc->momentum > 0; /* of a shard */
    for (size_t i = 0; i < optimizer->shard_count; i++)
        optimizer->state_bytes +=
            states * (size_t)dtrain__padded(optimizer->shards[i].count) * sizeof(float);
    optimizer->block_bytes =
        (size_t)dtrain__optimizer_bytes(&optimizer->strategy->layout, states, &optimizer->stage);
    optimizer->tensors = (dtrain_optimizer_tensor *)dtrain__alloc(
        &optimizer->allocator, optimizer->shard_count, sizeof *optimizer->tensors, "an optimizer");
    if (!optimizer->tensors) return DTRAIN_ERROR_MEMORY;
    if (optimizer->block_bytes) {
        const size_t bytes = optimizer->block_bytes;
        void *block;
        DTRAIN__TRY(offloaded ? device->ops->host_alloc(device, bytes, &block)
                              : device->ops->alloc(device, bytes, &block));
        optimizer->block = (float *)block;
        if (offloaded) memset(block, 0, bytes);
        else DTRAIN__TRY(device->ops->zero(device, block, bytes));
    }

    float *next = dtrain__after(optimizer->block, 2 * optimizer->stage);
    for (size_t i = 0; i < optimizer->shard_count; i++) {
        const dtrain_shard *shard = &optimizer->shards[i];
        const int64_t padded = dtrain__padded(shard->count);
        if (shard->count == 0) continue;
        dtrain_optimizer_tensor *tensor = &optimizer->tensors[optimizer->tensor_count++];
        tensor->count = shard->count;
        if (!(shard->param->flags & DTRAIN_PARAM_NO_DECAY) && dtrain__param_dims(shard->param) > 1)
            tensor->weight_decay = desc->weight_decay;
        tensor->value = shard->value;
        tensor->grad = shard->grad;
        if (offloaded && !dtrain__on_host(device, shard->value)) {
            tensor->value = next;
            next += padded;
            DTRAIN__TRY(device->ops->copy(device, tensor->value, shard->value,
                                          (size_t)shard->count * sizeof(float),
                                          DTRAIN_COPY_DEVICE_TO_HOST));
        }
        if (states > 0) tensor->m = next;
        if (states > 1) tensor->v = next + padded;
        next = dtrain__after(next, (int64_t)states * padded);
    }
    return DTRAIN_OK;
}

DTRAIN_API void dtrain_optimizer_destroy(dtrain_optimizer *optimizer)
{
    if (!optimizer) return;
    const dtrain_allocator allocator = optimizer->allocator;
    dtrain_device *device = optimizer->device;
    if (optimizer->block && optimizer->offloaded) {
        device->ops->synchronize(device); /* new values may still be on their way */
        device->ops->host_free(device, optimizer->block, optimizer->block_bytes);
    } else if (optimizer->block)
        device->ops->free(device, optimizer->block, optimizer->block_bytes);
    dtrain__free(&allocator, optimizer->tensors, optimizer->shard_count,
                 sizeof *optimizer->tensors);
    dtrain__free(&allocator, optimizer, 1, sizeof *optimizer);
}

/* ---- the update in host memory ----------------------------------------------------------------*/

typedef struct dtrain__update_piece {
    dtrain_optimizer_tensor part; /* a part of a tensor, in host memory */
    float *value;                 /* its values where the strategy keeps them */
} dtrain__update_piece;

/* Queue the way down of a piece: its gradient to a stage, unless that is in host memory; then the
 * event that tells of it. */
static dtrain_result dtrain__piece_down(const dtrain_optimizer *optimizer,
                                        dtrain__update_piece *piece, size_t slot)
{
    dtrain_device *device = optimizer->device;
    const dtrain__offload *offload = &optimizer->strategy->offload;
    if (!dtrain__on_host(device, piece->part.grad)) {
        float *stage = optimizer->block + slot * (size_t)optimizer->stage;
        DTRAIN__TRY(device->ops->copy_async(device, stage, piece->part.grad,
                                            (size_t)piece->part.count * sizeof(float),
                                            DTRAIN_COPY_DEVICE_TO_HOST, offload->down));
        piece->part.grad = stage;
    }
    return DTRAIN__ORDER(device, event_record, offload->arrived[slot], offload->down);
}

/* Update a piece when its gradient has come, and queue its new values' way up. Values that the
 * strategy keeps in host memory come with the next gather. */
static dtrain_result dtrain__piece_done(const dtrain_optimizer *optimizer,
                                        const dtrain__update_piece *piece, size_t slot,
                                        const dtrain_step_scalars *now)
{
    dtrain_device *device = optimizer->device;
    const dtrain__offload *offload = &optimizer->strategy->offload;
    DTRAIN__TRY(dtrain__event_await(optimizer->strategy, offload->arrived[slot]));
    DTRAIN__TRY(dtrain__optimizer_update(optimizer, &piece->part, now, NULL));
    if (piece->value == piece->part.value) return DTRAIN_OK;
    return device->ops->copy_async(device, piece->value, piece->part.value,
                                   (size_t)piece->part.count * sizeof(float),
                                   DTRAIN_COPY_HOST_TO_DEVICE, offload->up);
}

/* Update everything on the CPU. Every event is behind what compute had queued: when the first has
 * happened, nobody reads old values any more, neither from the device nor from the master copies.
 * One piece is updated while the next is on its way down, and a stage is filled again when the
 * piece that it held is done. */
static dtrain_result dtrain__update_on_host(dtrain_optimizer *optimizer,
                                            const dtrain_step_scalars *now)
{
    dtrain_strategy *strategy = optimizer->strategy;
    const dtrain_optimizer_tensor *tensor = optimizer->tensors;
    dtrain__update_piece pieces[2];
    size_t count = 0; /* sent for */
    DTRAIN__TRY(dtrain__stream_follow(strategy, strategy->offload.down, NULL));
    for (size_t i = 0; i < optimizer->shard_count; i++) {
        const dtrain_shard *shard = &optimizer->shards[i];
        for (int64_t first = 0; first < shard->count; first += DTRAIN__PIECE) {
            const size_t slot = count & 1;
            dtrain__update_piece *piece = &pieces[slot];
            piece->part = *tensor;
            piece->part.count = dtrain__min(shard->count - first, DTRAIN__PIECE);
            piece->part.grad += first;
            piece->part.value += first;
            piece->part.m = dtrain__after(piece->part.m, first);
            piece->part.v = dtrain__after(piece->part.v, first);
            piece->value = shard->value + first;
            DTRAIN__TRY(dtrain__piece_down(optimizer, piece, slot));
            if (count++)
                DTRAIN__TRY(dtrain__piece_done(optimizer, &pieces[1 - slot], 1 - slot, now));
        }
        if (shard->count > 0) tensor++;
    }
    const size_t last = (count - 1) & 1;
    if (count) DTRAIN__TRY(dtrain__piece_done(optimizer, &pieces[last], last, now));
    return dtrain__stream_follow(strategy, NULL, strategy->offload.up);
}
