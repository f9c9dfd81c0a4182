/* Optimizers: AdamW, SGD, Lion
 *
 * With g = grad * grad_scale and t the step from 1. The decay is decoupled (Loshchilov and Hutter,
 * "Decoupled Weight Decay Regularization", ICLR 2019), except in SGD, where it is a part of the
 * gradient as in torch:
 *
 *     AdamW   m = beta1 m + (1 - beta1) g        correction1 = 1 - beta1^t
 *             v = beta2 v + (1 - beta2) g^2      correction2 = 1 - beta2^t
 *             w = w (1 - lr decay) - lr (m / correction1) / (sqrt(v / correction2) + epsilon)
 *     SGD     g = g + decay w
 *             b = momentum b + g                 (b = g in step 1)
 *             w = w - lr (nesterov ? g + momentum b : b)
 *     Lion    w = w (1 - lr decay) - lr sign(beta1 m + (1 - beta1) g)
 *             m = beta2 m + (1 - beta2) g
 *     Muon    optim/muon.c, of ring 3: models
 *
 * One fused kernel per group reads gradient and state once and writes value and state once. There
 * is state for this rank's shards only: one block, made at creation, group by group
 * (optim/groups.c):
 *
 *     AdamW   | m of tensor 0 .. pad | v of tensor 0 .. pad | m of tensor 1 ...
 *     others  | m of tensor 0 .. pad | m of tensor 1 ...   (SGD: nothing without momentum)
 *     at the end  | scratch of Muon
 *
 * With offload the block is page-locked host memory. Each tensor's master copy comes before its
 * state, and two staging buffers for gradients come first. The update goes in pieces; Muon's pieces
 * are whole matrices:
 *
 *     down    | grad 0 | grad 1 | grad 2      | ...        into buffer 0, 1, 0, ...
 *     CPU              | update 0 | update 1  | update 2
 *     up                          | value 0   | value 1 ...
 *
 * Values and gradients that lie in host memory are used in place. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "strategy/params.h"
#include "strategy/strategy.h"
#include "strategy/core_view_internal.h"
#include "optim/optim_internal.h"
#include "optim/optimizer.h"
#include "device/backend.h"
#include "device/device.h"
#include "device/device_internal.h"

/* ---- The numbers of a step --------------------------------------------------------------------*/

/* Count a step, and an update of each parameter of which some rank had a gradient. */
DTRAIN__PRIVATE void dtrain__optimizer_count(dtrain_optimizer *optimizer)
{
    optimizer->step_count++;
    for (size_t i = 0; i < optimizer->param_count; i++)
        optimizer->updates[i] += dtrain__has_gradient(optimizer->strategy, i);
}

/* True if tensor `at` is left out of this step. */
static bool dtrain__is_left_out(const dtrain_optimizer *optimizer, size_t at)
{
    return !dtrain__has_gradient(optimizer->strategy, optimizer->sources[at]->param->state.index);
}

/* Count the updates that tensor `at` has had. */
static uint64_t dtrain__updates_of(const dtrain_optimizer *optimizer, size_t at)
{
    return optimizer->updates[optimizer->sources[at]->param->state.index];
}

/* Compute the numbers of a step for tensors of a group that have had `updates`. */
DTRAIN__PRIVATE dtrain_step_scalars dtrain__group_scalars(const dtrain_optimizer_desc *desc,
                                                          uint64_t updates, float lr,
                                                          float grad_scale)
{
    const uint64_t step = updates + 1;
    /* steps that the second moments average over */
    const uint64_t seen =
        desc->variance_steps && desc->variance_steps < step ? desc->variance_steps : step;
    dtrain_step_scalars scalars;
    memset(&scalars, 0, sizeof scalars);
    scalars.lr = lr * desc->lr_scale;
    scalars.grad_scale = grad_scale;
    /* in double: in fp32, 1 - 0.999 has lost three digits already at step 1 */
    scalars.correction1 = (float)(1 - pow((double)desc->beta1, (double)step));
    scalars.correction2 = (float)(1 - pow((double)desc->beta2, (double)seen));
    return scalars;
}

/* Update `count` tensors of a group from number `at` on, all with the same number of updates. With
 * `piece`, a part of tensor `at`, update that part on the CPU. */
static dtrain_result dtrain__group_update(const dtrain_optimizer *optimizer,
                                          const dtrain__group *group, float lr, float grad_scale,
                                          const dtrain_step_scalars *device_scalars,
                                          const dtrain_optimizer_tensor *piece, size_t at,
                                          size_t count)
{
    const dtrain_optimizer_desc *desc = &group->desc;
    const uint64_t updates = dtrain__updates_of(optimizer, at);
    const dtrain_step_scalars now = dtrain__group_scalars(desc, updates, lr, grad_scale);
    dtrain_device *device =
        piece ? dtrain__offload_of(optimizer->strategy)->cpu : optimizer->device;
    dtrain_optimizer_args args;
    memset(&args, 0, sizeof args);
    args.tensor_count = count;
    args.tensors = piece ? piece : optimizer->tensors + at;
    args.lr = now.lr;
    args.beta1 = desc->beta1;
    /* a beta2 of 1 leaves second moments as they are */
    args.beta2 = desc->variance_steps && updates >= desc->variance_steps ? 1 : desc->beta2;
    args.epsilon = desc->epsilon;
    args.correction1 = now.correction1;
    args.correction2 = now.correction2;
    args.momentum = desc->momentum;
    args.grad_scale = grad_scale;
    args.nesterov = desc->nesterov;
    args.first = updates == 0; /* SGD's buffer starts as the gradient, as in torch */
    args.scalars = device_scalars;
    args.lr_scale = desc->lr_scale;
    args.wide = optimizer->sources[at]->typed_value != NULL;
    switch (desc->kind) {
    case DTRAIN_OPTIMIZER_ADAMW: return device->ops->adamw(device, &args);
    case DTRAIN_OPTIMIZER_SGD: return device->ops->sgd(device, &args);
    case DTRAIN_OPTIMIZER_LION: return device->ops->lion(device, &args);
    default: return dtrain__step_muon(device, &optimizer->muon, optimizer->sources + at, &args);
    }
}

/* Update all groups. The numbers of the step are arguments; with `device_scalars` the kernels read
 * them from device memory. A group is one call if its tensors have had the same number of updates
 * and none is left out of this step. Otherwise each run of equal neighbours is one call. */
DTRAIN__PRIVATE dtrain_result dtrain__optimizer_update(const dtrain_optimizer *optimizer, float lr,
                                                       float grad_scale,
                                                       const dtrain_step_scalars *device_scalars)
{
    for (size_t g = 0; g < optimizer->group_count; g++) {
        const dtrain__group *group = &optimizer->groups[g];
        const size_t end = group->first + group->count;
        for (size_t at = group->first, next; at < end; at = next) {
            const uint64_t updates = dtrain__updates_of(optimizer, at);
            next = at + 1;
            if (dtrain__is_left_out(optimizer, at)) continue;
            while (next < end && !dtrain__is_left_out(optimizer, next) &&
                   dtrain__updates_of(optimizer, next) == updates)
                next++;
            if (device_scalars && updates != optimizer->step_count)
                return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                                   "dtrain_trainer_step: graph needs parameters that have had as "
                                   "many updates, for one set of numbers changes from step to "
                                   "step; \"%s\" was left out of %llu",
                                   dtrain__short(optimizer->sources[at]->param->name),
                                   (unsigned long long)(optimizer->step_count - updates));
            DTRAIN__TRY(dtrain__group_update(optimizer, group, lr, grad_scale, device_scalars, NULL,
                                             at, next - at));
        }
    }
    return DTRAIN_OK;
}

/* ---- The update in host memory ----------------------------------------------------------------*/

typedef struct dtrain__update_piece {
    const dtrain__group *group;
    size_t at;                    /* number of the tensor */
    dtrain_optimizer_tensor part; /* piece of the tensor, in host memory */
    float *value;                 /* address of the piece's values in the strategy's memory */
} dtrain__update_piece;

/* Wait for a piece's gradient, update the piece, and queue the copy of its new values to the
 * device. Values that stay in host memory need no copy: the next gather reads them. */
static dtrain_result dtrain__piece_done(const dtrain_optimizer *optimizer,
                                        const dtrain__update_piece *piece, size_t turn, float lr,
                                        float grad_scale)
{
    DTRAIN__TRY(dtrain__update_await(optimizer->strategy, turn));
    DTRAIN__TRY(dtrain__group_update(optimizer, piece->group, lr, grad_scale, NULL, &piece->part,
                                     piece->at, 1));
    if (piece->value == piece->part.value) return DTRAIN_OK;
    return optimizer->device->ops->copy_async(optimizer->device, piece->value, piece->part.value,
                                              (size_t)piece->part.count * sizeof(float),
                                              DTRAIN_COPY_HOST_TO_DEVICE,
                                              dtrain__offload_of(optimizer->strategy)->up);
}

/* Update everything on the CPU, in pieces of DTRAIN__PIECE elements; Muon's pieces are whole
 * matrices. Copies down are queued after the queued compute: when the first has arrived, nothing
 * reads old values any more, neither on the device nor in the master copies. The next piece is
 * copied down while one is updated. A buffer is filled again after its piece was updated. */
static dtrain_result dtrain__update_on_host(dtrain_optimizer *optimizer, float lr, float grad_scale)
{
    dtrain_strategy *strategy = optimizer->strategy;
    const dtrain__group *group = optimizer->groups;
    const dtrain__offload *offload = dtrain__offload_of(strategy);
    dtrain_device *device = optimizer->device;
    dtrain__update_piece pieces[2];
    size_t count = 0; /* pieces whose copy down is queued */
    DTRAIN__TRY(dtrain__stream_follow(strategy, offload->down, NULL));
    for (size_t at = 0; at < optimizer->tensor_count; at++) {
        const dtrain_optimizer_tensor *tensor = &optimizer->tensors[at];
        while (at >= group->first + group->count) group++;
        for (int64_t first = 0; first < tensor->count && !dtrain__is_left_out(optimizer, at);) {
            const size_t turn = count & 1;
            dtrain__update_piece *piece = &pieces[turn];
            dtrain_optimizer_tensor *part = &piece->part;
            piece->group = group;
            piece->at = at;
            piece->value = optimizer->sources[at]->value + first;
            *part = *tensor;
            if (group->desc.kind != DTRAIN_OPTIMIZER_MUON)
                part->count = dtrain__min(tensor->count - first, DTRAIN__PIECE);
            part->value += first;
            part->m = dtrain__after(tensor->m, first);
            part->v = dtrain__after(tensor->v, first);
            const float *grad = tensor->grad + first;
            const bool in_place = dtrain__on_host(device, grad);
            float *staging = in_place ? NULL : optimizer->block + turn * (size_t)optimizer->staging;
            part->grad = in_place ? grad : staging;
            if (staging)
                DTRAIN__TRY(device->ops->copy_async(device, staging, grad,
                                                    (size_t)part->count * sizeof(float),
                                                    DTRAIN_COPY_DEVICE_TO_HOST, offload->down));
            DTRAIN__TRY(DTRAIN__ORDER(device, event_record, offload->arrived[turn], offload->down));
            first += part->count;
            if (count++)
                DTRAIN__TRY(
                    dtrain__piece_done(optimizer, &pieces[1 - turn], 1 - turn, lr, grad_scale));
        }
    }
    const size_t last = (count - 1) & 1;
    if (count) DTRAIN__TRY(dtrain__piece_done(optimizer, &pieces[last], last, lr, grad_scale));
    return dtrain__stream_follow(strategy, NULL, offload->up);
}

/* ---- A step -----------------------------------------------------------------------------------*/

/* Return the group whose bias corrections a recorded step uses: the first of AdamW. */
DTRAIN__PRIVATE const dtrain__group *dtrain__corrected_group(const dtrain_optimizer *optimizer)
{
    for (size_t g = 0; g < optimizer->group_count; g++)
        if (optimizer->groups[g].desc.kind == DTRAIN_OPTIMIZER_ADAMW) return &optimizer->groups[g];
    return &optimizer->groups[0];
}

DTRAIN_API dtrain_result dtrain_optimizer_step(dtrain_optimizer *optimizer, float lr,
                                               float grad_scale)
{
    static const dtrain__same_field fields[] = {
        {"lr", 0, sizeof lr, DTRAIN__SAME_FLOAT},
        {"grad_scale", sizeof lr, sizeof lr, DTRAIN__SAME_FLOAT}};
    DTRAIN__GIVEN("dtrain_optimizer_step", optimizer);
    if (!dtrain__is_finite(lr) || lr < 0 || !dtrain__is_finite(grad_scale))
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "dtrain_optimizer_step: expected a finite lr >= 0 and a finite grad_scale, found "
            "%g and %g; the parameters are as they were",
            (double)lr, (double)grad_scale);
    dtrain_strategy *strategy = optimizer->strategy;
    dtrain_world *world = dtrain__world_of(strategy);
    DTRAIN__TRY(dtrain__between_steps(strategy, "dtrain_optimizer_step"));
    if (dtrain__capturing(optimizer->device) &&
        (!optimizer->compared ||
         dtrain__corrected_group(optimizer)->desc.kind == DTRAIN_OPTIMIZER_ADAMW))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_optimizer_step: a captured graph can hold neither the first "
                           "update nor those of AdamW, whose corrections of bias change from step "
                           "to step: call it after each launch of the graph");
    if (!optimizer->compared) { /* once: the trainer, verify and checkpoints compare later rates */
        const float numbers[] = {lr, grad_scale};
        const dtrain__same_list lists[] = {DTRAIN__SAME_STRUCT(fields, numbers),
                                           dtrain__same_groups(optimizer)};
        DTRAIN__TRY(dtrain__same(dtrain__groups_of(strategy).all, DTRAIN_OK,
                                 "dtrain_optimizer_step", lists, 2));
        optimizer->compared = true;
    }
    dtrain__note_update(strategy, lr, grad_scale);
    const uint32_t span =
        dtrain__span_begin(world, DTRAIN_SPAN_OPTIMIZER, "update", DTRAIN__UNNUMBERED);
    bool empty = false;
    dtrain_result result = dtrain__counts_settle(strategy, &empty);
    if (result == DTRAIN_OK && !empty)
        result = optimizer->offloaded ? dtrain__update_on_host(optimizer, lr, grad_scale)
                                      : dtrain__optimizer_update(optimizer, lr, grad_scale, NULL);
    result = dtrain__strategy_keep(strategy, result); /* other ranks wait for the new values */
    if (result == DTRAIN_OK && !empty) {
        dtrain__optimizer_count(optimizer);
        result = dtrain_strategy_publish(strategy);
    }
    dtrain__span_end(world, span);
    return result;
}

/* ---- Creation ---------------------------------------------------------------------------------*/

/* Append the tensor of a shard, with its state at *next; later calls do not move it. Biases and
 * scales of norms are 1-D and get no decay: pulling them to zero does not regularise. */
static dtrain_result dtrain__list_tensor(dtrain_optimizer *optimizer, const dtrain_shard *shard,
                                         float **next)
{
    const dtrain_optimizer_desc *desc = dtrain__desc_of(optimizer, shard->param);
    const size_t states = dtrain__states_of(desc);
    const int64_t padded =
        dtrain__padded(shard->typed_value ? 2 * shard->count : shard->count); /* words of 4 bytes */
    dtrain_device *device = optimizer->device;
    dtrain_optimizer_tensor *tensor = &optimizer->tensors[optimizer->tensor_count];
    optimizer->sources[optimizer->tensor_count++] = shard;
    tensor->count = shard->count;
    if (!(shard->param->flags & DTRAIN_PARAM_NO_DECAY) && dtrain__param_dims(shard->param) > 1)
        tensor->weight_decay = desc->weight_decay;
    tensor->value = shard->value ? shard->value : (float *)shard->typed_value;
    tensor->grad = shard->grad ? shard->grad : (const float *)shard->typed_grad;
    if (optimizer->offloaded && !dtrain__on_host(device, shard->value)) {
        tensor->value = *next;
        *next += padded;
        DTRAIN__TRY(device->ops->copy(device, tensor->value, shard->value,
                                      (size_t)shard->count * sizeof(float),
                                      DTRAIN_COPY_DEVICE_TO_HOST));
    }
    if (states > 0) tensor->m = *next;
    if (states > 1) tensor->v = *next + padded;
    *next = dtrain__after(*next, (int64_t)states * padded);
    optimizer->state_bytes += states * (size_t)padded * sizeof(float);
    return DTRAIN_OK;
}

/* Count the bytes of the block, allocate it filled with zeros, and list the tensors of each group.
 * The sums cannot overflow: the layout allows values at most a quarter of the address space. */
static dtrain_result dtrain__optimizer_memory(dtrain_optimizer *optimizer)
{
    const dtrain_allocator *a = &optimizer->allocator;
    const size_t count = optimizer->shard_count;
    dtrain_device *device = optimizer->device;
    const dtrain_param *params = dtrain__params_of(optimizer->strategy, &optimizer->param_count);
    for (size_t i = 0; i < optimizer->param_count; i++) {
        const dtrain_optimizer_desc *desc = dtrain__desc_of(optimizer, &params[i]);
        optimizer->block_bytes += (size_t)dtrain__update_bytes(
            dtrain__layout_of(optimizer->strategy), i, dtrain__states_of(desc),
            desc->kind == DTRAIN_OPTIMIZER_MUON, &optimizer->staging);
    }
    optimizer->scratch_bytes =
        dtrain__muon_layout(optimizer, NULL, &optimizer->muon) * sizeof(float);
    optimizer->block_bytes +=
        2 * (size_t)optimizer->staging * sizeof(float) + optimizer->scratch_bytes;
    optimizer->tensors = (dtrain_optimizer_tensor *)dtrain__alloc(
        a, count, sizeof *optimizer->tensors, "an optimizer");
    optimizer->sources = (const dtrain_shard **)dtrain__alloc(a, count, sizeof *optimizer->sources,
                                                              "shards of an optimizer");
    optimizer->updates = (uint64_t *)dtrain__alloc(
        a, optimizer->param_count, sizeof *optimizer->updates, "updates of an optimizer");
    if (!optimizer->tensors || !optimizer->sources || !optimizer->updates)
        return DTRAIN_ERROR_MEMORY;
    if (optimizer->block_bytes) {
        const size_t bytes = optimizer->block_bytes;
        void *block;
        DTRAIN__TRY(optimizer->offloaded ? device->ops->host_alloc(device, bytes, &block)
                                         : device->ops->alloc(device, bytes, &block));
        optimizer->block = (float *)block;
        if (optimizer->offloaded) memset(block, 0, bytes);
        else DTRAIN__TRY(device->ops->zero(device, block, bytes));
    }
    float *next = dtrain__after(optimizer->block, 2 * optimizer->staging);
    for (size_t g = 0; g < optimizer->group_count; g++) {
        dtrain__group *group = &optimizer->groups[g];
        group->first = optimizer->tensor_count;
        for (size_t i = 0; i < count; i++) {
            const dtrain_shard *shard = &optimizer->shards[i];
            if (shard->count == 0 || dtrain__desc_of(optimizer, shard->param) != &group->desc)
                continue;
            DTRAIN__TRY(dtrain__list_tensor(optimizer, shard, &next));
        }
        group->count = optimizer->tensor_count - group->first;
    }
    (void)dtrain__muon_layout(optimizer, next, &optimizer->muon);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_optimizer_create(dtrain_world *world, dtrain_strategy *strategy,
                                                 const dtrain_optimizer_desc *desc,
                                                 dtrain_optimizer **out)
{
    if (out) *out = NULL;
    DTRAIN__GIVEN("dtrain_optimizer_create", world);
    DTRAIN__GIVEN("dtrain_optimizer_create", strategy);
    DTRAIN__GIVEN("dtrain_optimizer_create", desc);
    DTRAIN__GIVEN("dtrain_optimizer_create", out);
    DTRAIN__TRY(dtrain__check_optimizer(desc, strategy));
    const dtrain_allocator *allocator = &world->allocator;
    dtrain_optimizer *optimizer =
        (dtrain_optimizer *)dtrain__alloc(allocator, 1, sizeof *optimizer, "an optimizer");
    if (!optimizer) return DTRAIN_ERROR_MEMORY;
    optimizer->allocator = *allocator;
    optimizer->device = dtrain_world_device(world);
    optimizer->strategy = strategy;
    optimizer->offloaded = dtrain__offload_of(strategy)->cpu != NULL;
    dtrain_result result =
        dtrain_strategy_shards(strategy, &optimizer->shards, &optimizer->shard_count);
    if (result == DTRAIN_OK) result = dtrain__groups_make(optimizer, desc);
    if (result == DTRAIN_OK) result = dtrain__optimizer_memory(optimizer);
    if (result == DTRAIN_OK) *out = optimizer;
    else dtrain_optimizer_destroy(optimizer);
    return result;
}

DTRAIN_API void dtrain_optimizer_destroy(dtrain_optimizer *optimizer)
{
    if (!optimizer) return;
    const dtrain_allocator allocator = optimizer->allocator;
    dtrain_device *device = optimizer->device;
    if (optimizer->block && optimizer->offloaded) {
        device->ops->synchronize(device); /* copies of new values can be under way */
        device->ops->host_free(device, optimizer->block, optimizer->block_bytes);
    } else if (optimizer->block)
        device->ops->free(device, optimizer->block, optimizer->block_bytes);
    dtrain__free(&allocator, optimizer->updates, optimizer->param_count,
                 sizeof *optimizer->updates);
    dtrain__free(&allocator, optimizer->sources, optimizer->shard_count,
                 sizeof *optimizer->sources);
    dtrain__free(&allocator, optimizer->tensors, optimizer->shard_count,
                 sizeof *optimizer->tensors);
    dtrain__free(&allocator, optimizer->groups, optimizer->group_count, sizeof *optimizer->groups);
    dtrain__free(&allocator, optimizer, 1, sizeof *optimizer);
}

DTRAIN_API void dtrain_optimizer_query(const dtrain_optimizer *optimizer,
                                       dtrain_optimizer_info *info)
{
    dtrain_optimizer_info own;
    memset(&own, 0, sizeof own);
    if (optimizer) {
        own.kind = optimizer->groups[0].desc.kind;
        own.step_count = optimizer->step_count;
        own.state_bytes = optimizer->state_bytes;
        own.scratch_bytes = optimizer->scratch_bytes;
    }
    dtrain__give(dtrain__abi_of(optimizer ? dtrain__world_of(optimizer->strategy) : NULL),
                 DTRAIN__ABI_optimizer_info, &own, info);
}
