/* Optimizers: AdamW, SGD
 *
 * One fused kernel per shard reads gradient and state once and writes value and state once. State
 * is for this rank's shards only, one block, made at creation:
 *
 *     AdamW   | m of shard 0 .. pad | v of shard 0 .. pad | m of shard 1 ...
 *     SGD     | buffer of shard 0 .. pad | buffer of shard 1 ...       (nothing without momentum)
 *
 * Offloaded, the block is page-locked host memory, each shard's master copy comes before its state,
 * two stages for gradients before everything, and the update goes in chunks:
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

/* A part of one shard; begins as zeros. */
typedef struct dtrain__update_piece {
    size_t shard, tensor; /* next to be looked at */
    int64_t next;         /* first element of it after this chunk */
    const float *grad;    /* of this chunk, where the strategy keeps it */
    float *value;
    dtrain_optimizer_tensor part; /* this chunk, in host memory but for the gradient */
} dtrain__update_piece;

static bool dtrain__variance_stays(const dtrain_optimizer *optimizer);
static dtrain_result dtrain__optimizer_update(const dtrain_optimizer *optimizer,
                                              dtrain_device *device,
                                              const dtrain_optimizer_tensor *tensors, size_t count,
                                              const dtrain_step_scalars *now,
                                              const dtrain_step_scalars *device_scalars);
static dtrain_result dtrain__check_optimizer(const dtrain_optimizer_desc *desc);
static dtrain_result dtrain__optimizer_state(dtrain_optimizer *optimizer);
static size_t dtrain__state_tensors(const dtrain_optimizer_desc *desc);
static dtrain_result dtrain__optimizer_tensors(dtrain_optimizer *optimizer);
static float dtrain__decay_of(const dtrain_optimizer *optimizer, const dtrain_param *p);
static dtrain_result dtrain__offload_state(dtrain_optimizer *optimizer, size_t state_bytes);
static dtrain_result dtrain__take_master(dtrain_optimizer *optimizer,
                                         dtrain_optimizer_tensor *tensor, float **place);
static dtrain_result dtrain__update_on_host(dtrain_optimizer *optimizer,
                                            const dtrain_step_scalars *now);
static bool dtrain__piece_next(const dtrain_optimizer *optimizer, dtrain__update_piece *chunk);
static dtrain_result dtrain__piece_down(const dtrain_optimizer *optimizer,
                                        dtrain__update_piece *chunk, size_t i);
static dtrain_result dtrain__piece_up(const dtrain_optimizer *optimizer,
                                      const dtrain__update_piece *chunk);

/* A rate or scale that is not finite would destroy every parameter in one pass: it is refused
 * before the first is touched. Empty shards have no state and take no step. */
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
    if (optimizer->strategy->offload.cpu)
        DTRAIN__TRY(
            dtrain__strategy_keep(optimizer->strategy, dtrain__update_on_host(optimizer, &now)));
    else DTRAIN__TRY(dtrain__optimizer_run(optimizer, &now, NULL));
    optimizer->step_count++;
    return dtrain_strategy_publish(optimizer->strategy);
}

/* What changes from step to step, for the step that comes next. */
DTRAIN__PRIVATE dtrain_step_scalars dtrain__optimizer_scalars(const dtrain_optimizer *optimizer,
                                                              float lr, float grad_scale)
{
    const dtrain_optimizer_desc *desc = &optimizer->desc;
    const double step = (double)(optimizer->step_count + 1);
    const double estimated =
        dtrain__variance_stays(optimizer) ? (double)desc->variance_steps : step;
    dtrain_step_scalars scalars;
    memset(&scalars, 0, sizeof scalars);
    scalars.lr = lr;
    scalars.grad_scale = grad_scale;
    /* in double: in fp32, 1 - 0.999 has lost three digits already at step 1 */
    scalars.correction1 = (float)(1 - pow((double)desc->beta1, step));
    scalars.correction2 = (float)(1 - pow((double)desc->beta2, estimated));
    return scalars;
}

/* In the step that comes next. */
static bool dtrain__variance_stays(const dtrain_optimizer *optimizer)
{
    const uint64_t steps = optimizer->desc.variance_steps;
    return steps > 0 && (uint64_t)optimizer->step_count >= steps;
}

DTRAIN__PRIVATE dtrain_result dtrain__optimizer_run(dtrain_optimizer *optimizer,
                                                    const dtrain_step_scalars *now,
                                                    const dtrain_step_scalars *device_scalars)
{
    return dtrain__optimizer_update(optimizer, optimizer->device, optimizer->tensors,
                                    optimizer->tensor_count, now, device_scalars);
}

/* The update with the scalars given, or with those that `device_scalars` holds when it runs. The
 * first step of SGD fills the buffer with the gradient itself, as torch does. */
static dtrain_result dtrain__optimizer_update(const dtrain_optimizer *optimizer,
                                              dtrain_device *device,
                                              const dtrain_optimizer_tensor *tensors, size_t count,
                                              const dtrain_step_scalars *now,
                                              const dtrain_step_scalars *device_scalars)
{
    const dtrain_optimizer_desc *desc = &optimizer->desc;
    if (desc->kind == DTRAIN_OPTIMIZER_ADAMW) {
        dtrain_adamw_args args;
        memset(&args, 0, sizeof args);
        args.tensor_count = count;
        args.tensors = tensors;
        args.lr = now->lr;
        args.beta1 = desc->beta1;
        args.beta2 = dtrain__variance_stays(optimizer) ? 1 : desc->beta2;
        args.epsilon = desc->epsilon;
        args.correction1 = now->correction1;
        args.correction2 = now->correction2;
        args.grad_scale = now->grad_scale;
        args.scalars = device_scalars;
        return device->ops->adamw(device, &args);
    }
    dtrain_sgd_args args;
    memset(&args, 0, sizeof args);
    args.tensor_count = count;
    args.tensors = tensors;
    args.lr = now->lr;
    args.momentum = desc->momentum;
    args.grad_scale = now->grad_scale;
    args.nesterov = desc->nesterov;
    args.first = optimizer->step_count == 0;
    args.scalars = device_scalars;
    return device->ops->sgd(device, &args);
}

/* ---- creation ---------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_optimizer_create(dtrain_world *world, dtrain_strategy *strategy,
                                                 const dtrain_optimizer_desc *desc,
                                                 dtrain_optimizer **out)
{
    const dtrain_shard *shards;
    size_t shard_count;
    if (!out) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_optimizer_create: out is NULL");
    *out = NULL;
    if (!world || !strategy || !desc)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_optimizer_create: %s is NULL",
                           !world      ? "world"
                           : !strategy ? "strategy"
                                       : "desc");
    DTRAIN__TRY(dtrain__check_optimizer(desc));
    DTRAIN__TRY(dtrain_strategy_shards(strategy, &shards, &shard_count));
    const dtrain_allocator *allocator = dtrain_world_allocator(world);
    dtrain_optimizer *optimizer =
        (dtrain_optimizer *)dtrain__alloc(allocator, 1, sizeof *optimizer, "an optimizer");
    if (!optimizer) return DTRAIN_ERROR_MEMORY;
    optimizer->desc = *desc;
    optimizer->allocator = *allocator;
    optimizer->device = dtrain_world_device(world);
    optimizer->strategy = strategy;
    optimizer->shards = shards;
    optimizer->shard_count = shard_count;
    dtrain_result result = dtrain__optimizer_state(optimizer);
    if (result == DTRAIN_OK) result = dtrain__optimizer_tensors(optimizer);
    if (result == DTRAIN_OK) *out = optimizer;
    else dtrain_optimizer_destroy(optimizer);
    return result;
}

/* Comparisons are written so that NaN fails them. */
static dtrain_result dtrain__check_optimizer(const dtrain_optimizer_desc *desc)
{
    const char *wrong = NULL;
    if (desc->kind != DTRAIN_OPTIMIZER_ADAMW && desc->kind != DTRAIN_OPTIMIZER_SGD)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "dtrain_optimizer_create: kind %u is not a dtrain_optimizer_kind; start from "
            "dtrain_adamw_defaults() or dtrain_sgd_defaults()",
            (unsigned)desc->kind);
    if (!(desc->weight_decay >= 0 && dtrain_is_finite(desc->weight_decay)))
        wrong = "weight_decay >= 0";
    if (desc->kind == DTRAIN_OPTIMIZER_ADAMW) {
        if (!(desc->beta1 >= 0 && desc->beta1 < 1)) wrong = "0 <= beta1 < 1";
        if (!(desc->beta2 >= 0 && desc->beta2 < 1)) wrong = "0 <= beta2 < 1";
        if (!(desc->epsilon >= 0 && dtrain_is_finite(desc->epsilon))) wrong = "epsilon >= 0";
    } else {
        if (!(desc->momentum >= 0 && dtrain_is_finite(desc->momentum))) wrong = "momentum >= 0";
        if (desc->nesterov && desc->momentum == 0) wrong = "momentum > 0 with nesterov";
        if (desc->variance_steps) wrong = "variance_steps 0: SGD has no second moments";
    }
    if (!wrong) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "dtrain_optimizer_create: expected %s; found beta1 %g, beta2 "
                       "%g, epsilon %g, weight_decay %g, momentum %g",
                       wrong, (double)desc->beta1, (double)desc->beta2, (double)desc->epsilon,
                       (double)desc->weight_decay, (double)desc->momentum);
}

/* The products cannot overflow: a quarter of the address space holds the values, the layout saw to
 * it. */
static dtrain_result dtrain__optimizer_state(dtrain_optimizer *optimizer)
{
    dtrain_device *device = optimizer->device;
    void *memory;
    size_t bytes = 0;
    for (size_t i = 0; i < optimizer->shard_count; i++)
        bytes += (size_t)dtrain__padded(optimizer->shards[i].count) * sizeof(float);
    bytes *= dtrain__state_tensors(&optimizer->desc);
    if (optimizer->strategy->offload.cpu) return dtrain__offload_state(optimizer, bytes);
    if (bytes == 0) return DTRAIN_OK;
    DTRAIN__TRY(device->ops->alloc(device, bytes, &memory));
    optimizer->state = (float *)memory;
    optimizer->state_bytes = bytes;
    return device->ops->zero(device, memory, bytes);
}

/* State tensors per shard. */
static size_t dtrain__state_tensors(const dtrain_optimizer_desc *desc)
{
    if (desc->kind == DTRAIN_OPTIMIZER_ADAMW) return 2;
    return desc->momentum > 0 ? 1 : 0;
}

/* The optimizer's view of the shards; addresses do not change any more. */
static dtrain_result dtrain__optimizer_tensors(dtrain_optimizer *optimizer)
{
    const size_t states = dtrain__state_tensors(&optimizer->desc);
    float *state = optimizer->state;
    optimizer->tensors = (dtrain_optimizer_tensor *)dtrain__alloc(
        &optimizer->allocator, optimizer->shard_count, sizeof *optimizer->tensors, "an optimizer");
    if (!optimizer->tensors) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < optimizer->shard_count; i++) {
        const dtrain_shard *shard = &optimizer->shards[i];
        if (shard->count == 0) continue;
        dtrain_optimizer_tensor *tensor = &optimizer->tensors[optimizer->tensor_count++];
        tensor->count = shard->count;
        tensor->weight_decay = dtrain__decay_of(optimizer, shard->param);
        tensor->value = shard->value;
        tensor->grad = shard->grad;
        DTRAIN__TRY(dtrain__take_master(optimizer, tensor, &state));
        if (states > 0) tensor->m = state;
        if (states > 1) tensor->v = state + dtrain__padded(shard->count);
        if (state) state += states * (size_t)dtrain__padded(shard->count);
    }
    return DTRAIN_OK;
}

/* Biases and the scales of norms are 1-D: pulling them to zero does not regularise anything. */
static float dtrain__decay_of(const dtrain_optimizer *optimizer, const dtrain_param *p)
{
    const bool skipped = (p->flags & DTRAIN_PARAM_NO_DECAY) || dtrain__param_dims(p) < 2;
    return skipped ? 0.0f : optimizer->desc.weight_decay;
}

DTRAIN_API void dtrain_optimizer_destroy(dtrain_optimizer *optimizer)
{
    if (!optimizer) return;
    const dtrain_allocator allocator = optimizer->allocator;
    dtrain_device *device = optimizer->device;
    if (optimizer->host) {
        device->ops->synchronize(device); /* new values may still be on their way */
        device->ops->host_free(device, optimizer->host, optimizer->host_bytes);
    } else if (optimizer->state)
        device->ops->free(device, optimizer->state, optimizer->state_bytes);
    dtrain__free(&allocator, optimizer->tensors, optimizer->shard_count,
                 sizeof *optimizer->tensors);
    dtrain__free(&allocator, optimizer, 1, sizeof *optimizer);
}

DTRAIN_API uint64_t dtrain_optimizer_state_bytes(const dtrain_optimizer *optimizer)
{
    return optimizer ? optimizer->state_bytes : 0;
}

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

/* ---- the update in host memory ----------------------------------------------------------------*/

static dtrain_result dtrain__offload_state(dtrain_optimizer *optimizer, size_t state_bytes)
{
    dtrain_device *device = optimizer->device;
    const size_t states = dtrain__state_tensors(&optimizer->desc);
    void *memory;
    const size_t bytes =
        (size_t)dtrain__optimizer_bytes(&optimizer->strategy->layout, states, &optimizer->stage);
    if (bytes == 0) return DTRAIN_OK;
    DTRAIN__TRY(device->ops->host_alloc(device, bytes, &memory));
    memset(memory, 0, bytes);
    optimizer->host = (float *)memory;
    optimizer->host_bytes = bytes;
    optimizer->state = optimizer->host + 2 * optimizer->stage;
    optimizer->state_bytes = state_bytes;
    return DTRAIN_OK;
}

/* Offloaded values on the device get a master copy at *place, which moves on. */
static dtrain_result dtrain__take_master(dtrain_optimizer *optimizer,
                                         dtrain_optimizer_tensor *tensor, float **place)
{
    dtrain_device *device = optimizer->device;
    if (!optimizer->host || dtrain__on_host(device, tensor->value)) return DTRAIN_OK;
    float *value = tensor->value;
    tensor->value = *place;
    *place += dtrain__padded(tensor->count);
    return device->ops->copy(device, tensor->value, value, (size_t)tensor->count * sizeof(float),
                             DTRAIN_COPY_DEVICE_TO_HOST);
}

/* Every event is behind what compute had queued: when the first has happened, nobody reads old
 * values any more, neither from the device nor from the master copies. A stage is filled again when
 * the chunk that it held is done. */
static dtrain_result dtrain__update_on_host(dtrain_optimizer *optimizer,
                                            const dtrain_step_scalars *now)
{
    dtrain_strategy *strategy = optimizer->strategy;
    const dtrain__offload *offload = &strategy->offload;
    dtrain__update_piece chunks[2]; /* one being updated, one on its way */
    memset(chunks, 0, sizeof chunks);
    DTRAIN__TRY(dtrain__stream_follow(strategy, offload->down, NULL));
    bool any = dtrain__piece_next(optimizer, &chunks[0]);
    if (any) DTRAIN__TRY(dtrain__piece_down(optimizer, &chunks[0], 0));
    for (size_t i = 0; any; i++) {
        dtrain__update_piece *chunk = &chunks[i & 1], *ahead = &chunks[1 - (i & 1)];
        *ahead = *chunk;
        any = dtrain__piece_next(optimizer, ahead);
        if (any) DTRAIN__TRY(dtrain__piece_down(optimizer, ahead, i + 1));
        DTRAIN__TRY(dtrain__event_await(strategy, offload->arrived[i & 1]));
        DTRAIN__TRY(dtrain__optimizer_update(optimizer, offload->cpu, &chunk->part, 1, now, NULL));
        DTRAIN__TRY(dtrain__piece_up(optimizer, chunk));
    }
    return dtrain__stream_follow(strategy, NULL, offload->up);
}

/* False behind the last. Empty shards have no tensor. */
static bool dtrain__piece_next(const dtrain_optimizer *optimizer, dtrain__update_piece *chunk)
{
    while (chunk->shard < optimizer->shard_count) {
        const dtrain_shard *shard = &optimizer->shards[chunk->shard];
        const int64_t first = chunk->next, left = shard->count - first;
        if (left == 0) {
            chunk->tensor += shard->count > 0;
            chunk->shard++;
            chunk->next = 0;
            continue;
        }
        chunk->part = optimizer->tensors[chunk->tensor];
        chunk->part.count = dtrain__min(left, DTRAIN__PIECE);
        chunk->part.value += first;
        chunk->part.m = dtrain__after(chunk->part.m, first);
        chunk->part.v = dtrain__after(chunk->part.v, first);
        chunk->grad = shard->grad + first;
        chunk->value = shard->value + first;
        chunk->next += chunk->part.count;
        return true;
    }
    return false;
}

/* Its gradient to stage i, or nothing where it is in host memory; then the event. */
static dtrain_result dtrain__piece_down(const dtrain_optimizer *optimizer,
                                        dtrain__update_piece *chunk, size_t i)
{
    dtrain_device *device = optimizer->device;
    const dtrain__offload *offload = &optimizer->strategy->offload;
    chunk->part.grad = chunk->grad;
    if (!dtrain__on_host(device, chunk->grad)) {
        float *stage = optimizer->host + (i & 1) * (size_t)optimizer->stage;
        chunk->part.grad = stage;
        DTRAIN__TRY(device->ops->copy_async(device, stage, chunk->grad,
                                            (size_t)chunk->part.count * sizeof(float),
                                            DTRAIN_COPY_DEVICE_TO_HOST, offload->down));
    }
    return device->ops->event_record(device, offload->arrived[i & 1], offload->down);
}

static dtrain_result dtrain__piece_up(const dtrain_optimizer *optimizer,
                                      const dtrain__update_piece *chunk)
{
    dtrain_device *device = optimizer->device;
    if (chunk->value == chunk->part.value) return DTRAIN_OK; /* gather brings it */
    return device->ops->copy_async(device, chunk->value, chunk->part.value,
                                   (size_t)chunk->part.count * sizeof(float),
                                   DTRAIN_COPY_HOST_TO_DEVICE, optimizer->strategy->offload.up);
}
