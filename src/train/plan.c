/* Planning: memory of a step, largest batch
 *
 * A plan runs the loss forwards and backwards on the plan device, whose kernels do nothing, while
 * the tape counts its bytes. Twenty such runs take milliseconds, so trying finds the largest batch:
 *
 * 1. Each rank searches the largest batch that fits its memory by doubling, then halving.
 * 2. All ranks allocate and touch the memory of the smallest of these batches, and hold it until
 *    all have agreed on the outcome. Ranks of one host share its memory: trying one after another
 *    would prove nothing.
 * 3. If a rank has failed, all try an eighth less. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "strategy/memory.h"
#include "strategy/query.h"
#include "strategy/strategy.h"
#include "strategy/view_internal.h"
#include "tape/tape.h"
#include "tape/view_internal.h"
#include "optim/optim_internal.h"
#include "parallel/mesh_internal.h"
#include "parallel/pipeline.h"
#include "train/trainer.h"
#include "train/trainer_internal.h"
#include "device/device.h"
#include "device/device_internal.h"

/* Count the memory of activations, with a strategy's layout or without. With `costs` count also the
 * costs of the whole model's units, whose backward is in halves. A trainer with a tape of the plan
 * device writes no value and no gradient, so a plan can be made at any time, even between two
 * steps. */
static dtrain_result dtrain__plan_activations(dtrain_world *world, const dtrain_trainer_desc *desc,
                                              const dtrain__strategy_plan *strategy,
                                              const dtrain__unit_costs *costs,
                                              dtrain_memory *memory)
{
    const dtrain__model_pass pass = dtrain__step_pass(desc);
    dtrain_trainer rehearsal;
    dtrain_device_desc plan;
    dtrain_device *device;
    dtrain_tape *tape;
    dtrain_tape_info info;
    dtrain_tensor *loss;
    DTRAIN__GIVEN("dtrain_trainer_plan", desc->loss);
    if (!desc->next_batch)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_trainer_plan: the loss fetches its own batches and cannot be "
                           "run without spending one: give desc a next_batch");
    memset(memory, 0, sizeof *memory);
    memset(&plan, 0, sizeof plan);
    plan.allocator = world->allocator;
    DTRAIN__TRY(dtrain_device_create(dtrain__plan_device_ops(), &plan, &device));
    dtrain_result result = dtrain_tape_create(world, NULL, device, &tape);
    if (result == DTRAIN_OK) {
        dtrain__tape_plan(tape, strategy->layout, &strategy->groups);
        dtrain__tape_costs(tape, costs);
        result = dtrain_tape_recompute(tape, desc->recompute_every, desc->recompute_ops);
    }
    memset(&rehearsal, 0, sizeof rehearsal);
    rehearsal.desc = *desc;
    rehearsal.desc.next_batch = NULL; /* values in the buffers do not matter */
    rehearsal.desc.strategy = NULL;
    if (desc->micro_batches == 0) rehearsal.desc.micro_batches = 1;
    rehearsal.allocator = world->allocator;
    rehearsal.groups = strategy->groups;
    rehearsal.tape = tape;
    if (result == DTRAIN_OK && strategy->groups.pipeline_ranks > 1) {
        result = dtrain__pipeline_rehearse(&rehearsal, strategy->stages, strategy->pipeline);
    } else if (result == DTRAIN_OK) {
        result = dtrain__pass_run(&rehearsal, &pass, 0, 0, &loss);
        if (result == DTRAIN_OK) result = dtrain__plan_backward(tape, loss);
    }
    dtrain__tape_info(tape, &info);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    DTRAIN__TRY(result);
    memory->activations = info.activation_bytes;
    memory->activation_grads = info.gradient_bytes;
    return DTRAIN_OK;
}

/* ---- Automatic batch --------------------------------------------------------------------------*/

/* Count the bytes of a batch's activations. */
static dtrain_result dtrain__batch_needs(dtrain_world *world, const dtrain_trainer_desc *desc,
                                         const dtrain_batch_search *search,
                                         const dtrain__strategy_plan *plan, int64_t batch,
                                         uint64_t *bytes)
{
    dtrain_memory memory;
    DTRAIN__TRY(search->set_batch(desc->user, (uint32_t)batch));
    DTRAIN__TRY(dtrain__plan_activations(world, desc, plan, NULL, &memory));
    *bytes = memory.activations + memory.activation_grads;
    return DTRAIN_OK;
}

/* Find the largest batch that this rank has room for. A batch whose plan fails for lack of
 * addresses or of the program's buffers does not fit either. */
static dtrain_result dtrain__batch_search(dtrain_world *world, const dtrain_trainer_desc *desc,
                                          const dtrain_batch_search *search,
                                          const dtrain__strategy_plan *plan, int32_t *batch)
{
    const double limit = (double)plan->limit / 1048576;
    int64_t fits = 0, fails = (int64_t)(search->max_batch ? search->max_batch : 65536) + 1;
    while (fails - fits > 1) {
        const int64_t half = fits + (fails - fits) / 2;
        const int64_t next = fits ? dtrain__min(2 * fits, half) : 1;
        uint64_t bytes = 0;
        const dtrain_result result = dtrain__batch_needs(world, desc, search, plan, next, &bytes);
        if (result != DTRAIN_OK && (result != DTRAIN_ERROR_MEMORY || next == 1)) return result;
        const uint64_t total = plan->needs + bytes;
        if (result == DTRAIN_OK && plan->limit > 0 && total <= (uint64_t)plan->limit) fits = next;
        else fails = next;
        if (fails == 1)
            return dtrain_fail(
                DTRAIN_ERROR_MEMORY,
                "dtrain_trainer_plan: not even one sample fits: %.1f MiB a rank for "
                "parameters, gradients, optimizer and buffers and %.1f MiB of activations, of %.1f "
                "MiB: %.1f MiB are missing. A strategy that shards more, more ranks, activation "
                "checkpointing or, on a GPU, offload would help",
                dtrain__mib(plan->needs), dtrain__mib(bytes), limit, dtrain__mib(total) - limit);
    }
    *batch = (int32_t)fits;
    return DTRAIN_OK;
}

/* Find the batch by the three steps above. Ranks agree on every local error before the next
 * collective: none waits for a rank that has left. */
static dtrain_result dtrain__batch_find(dtrain_world *world, const dtrain_trainer_desc *desc,
                                        dtrain_batch_search *search, dtrain__strategy_plan *plan)
{
    dtrain_device *device = world->device;
    int32_t least = 0, good = 0;
    DTRAIN__TRY(
        dtrain__plan_strategy(world, search->params, search->param_count, search->strategy, plan));
    dtrain_comm *comm = plan->groups.all;
    DTRAIN__TRY(dtrain__agree(comm, dtrain__batch_search(world, desc, search, plan, &least)));
    DTRAIN__TRY(
        dtrain_all_reduce(comm, &least, &least, 1, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MIN, NULL));
    for (; least > 0; least -= (least + 7) / 8) {
        uint64_t bytes[2] = {plan->needs, 0};
        void *held[2] = {NULL, NULL};
        dtrain_result mine = dtrain__batch_needs(world, desc, search, plan, least, &bytes[1]);
        for (int i = 0; i < 2; i++) {
            if (mine == DTRAIN_OK) mine = device->ops->alloc(device, (size_t)bytes[i], &held[i]);
            if (mine == DTRAIN_OK) mine = device->ops->zero(device, held[i], (size_t)bytes[i]);
        }
        if (mine == DTRAIN_OK) mine = device->ops->synchronize(device);
        good = mine == DTRAIN_OK;
        const dtrain_result agreed =
            dtrain_all_reduce(comm, &good, &good, 1, DTRAIN_DTYPE_I32, DTRAIN_REDUCE_MIN, NULL);
        for (int i = 0; i < 2; i++)
            if (held[i]) device->ops->free(device, held[i], (size_t)bytes[i]);
        DTRAIN__TRY(agreed);
        DTRAIN__TRY(dtrain__agree(comm, mine == DTRAIN_ERROR_MEMORY ? DTRAIN_OK : mine));
        if (good) break;
    }
    search->batch = (uint32_t)least;
    if (good) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_MEMORY,
                       "dtrain_trainer_plan: %.1f MiB a rank should be there, but not "
                       "every rank could allocate what one sample needs: set memory_limit to "
                       "less, or end what else uses the device",
                       dtrain__mib((uint64_t)plan->limit));
}

/* ---- The plan ---------------------------------------------------------------------------------*/

/* Count the memory of a desc's strategy and optimizer. */
static void dtrain__memory_held(const dtrain_trainer_desc *desc, dtrain_memory *memory)
{
    dtrain_strategy_info strategy;
    dtrain__strategy_info(desc->strategy, &strategy); /* zeros without a strategy */
    memory->params = strategy.value_bytes;
    memory->grads = strategy.grad_bytes;
    memory->buffers = strategy.buffer_bytes;
    memory->host = strategy.host_bytes;
    if (desc->optimizer && desc->optimizer->offloaded) memory->host += desc->optimizer->block_bytes;
    else if (desc->optimizer) memory->optimizer = desc->optimizer->block_bytes;
}

static dtrain_result dtrain__trainer_plan(dtrain_world *world, const dtrain_trainer_desc *desc,
                                          dtrain_batch_search *search, dtrain_memory *memory)
{
    dtrain__strategy_plan found, plan;
    dtrain_result result = DTRAIN_OK;
    if (search && (!search->set_batch || !search->params || search->max_batch > INT32_MAX))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_trainer_plan: expected a search with set_batch, params and "
                           "a max_batch below 2^31");
    memset(&found, 0, sizeof found);
    memset(&plan, 0, sizeof plan);
    if (search) result = dtrain__batch_find(world, desc, search, &found);
    if (desc->strategy) {
        plan.groups = dtrain__groups_of(desc->strategy);
        plan.layout = dtrain__layout_of(desc->strategy);
        plan.stages = dtrain__stages_of(desc->strategy);
        plan.pipeline = dtrain__settings_of(desc->strategy)->pipeline;
    } else { /* only a search knows the stages */
        plan.groups = dtrain__mesh_groups(world, desc->mesh, NULL);
        plan.stages = found.stages;
        plan.pipeline = found.pipeline;
    }
    if (result == DTRAIN_OK) result = dtrain__plan_activations(world, desc, &plan, NULL, memory);
    dtrain__strategy_plan_free(world, &found);
    DTRAIN__TRY(result);
    dtrain__memory_held(desc, memory);
    if (desc->strategy && world->device->ops->host_memory) memory->workspace = world->base_bytes;
    memory->total = memory->activations + memory->activation_grads + memory->params +
                    memory->grads + memory->optimizer + memory->buffers + memory->workspace;
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_trainer_plan(dtrain_world *world, const dtrain_trainer_desc *desc,
                                             dtrain_batch_search *search, dtrain_memory *memory)
{
    DTRAIN__GIVEN("dtrain_trainer_plan", world);
    DTRAIN__GIVEN("dtrain_trainer_plan", desc);
    DTRAIN__GIVEN("dtrain_trainer_plan", memory);
    DTRAIN__TAKE(dtrain__abi_of(world), trainer_desc, desc);
    return dtrain__trainer_plan(world, desc, search, memory);
}

DTRAIN__PRIVATE dtrain_result dtrain__trainer_memory(const dtrain_trainer *trainer,
                                                     dtrain_memory *held, dtrain_memory *planned)
{
    dtrain__memory_held(&trainer->desc, held);
    return dtrain__trainer_plan(trainer->world, &trainer->desc, NULL, planned);
}

/* ---- Costs of units ---------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_trainer_unit_costs(dtrain_world *world,
                                                   const dtrain_trainer_desc *desc,
                                                   const dtrain_param *params, size_t param_count,
                                                   dtrain_pipeline_costs *costs,
                                                   uint64_t *activations, size_t *unit_count)
{
    dtrain__stage_map map;
    dtrain__unit_costs units;
    dtrain_memory memory;
    if (!world || !desc || !params || !param_count || !costs || !unit_count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_trainer_unit_costs: world, desc, params, costs or unit_count is "
                           "NULL, or there is no parameter");
    DTRAIN__TAKE(dtrain__abi_of(world), trainer_desc, desc);
    dtrain__strategy_plan whole;
    memset(&whole, 0, sizeof whole);
    whole.groups = dtrain__mesh_groups(world, NULL, NULL);
    dtrain_result result =
        dtrain__stage_map_make(&map, &world->allocator, params, param_count, NULL, &whole.groups);
    if (result == DTRAIN_OK) {
        memset(costs, 0, map.unit_count * sizeof *costs);
        if (activations) memset(activations, 0, map.unit_count * sizeof *activations);
        units.units = map.units;
        units.count = *unit_count = map.unit_count;
        /* Operations while a byte moves. A core with AVX-512, measured by train_gpt --dry-run:
         * 79 GFLOP/s of GPT-2's classifier and 43 GB/s. An H100 in bf16, as build/simulate has it:
         * 445 TFLOP/s and 2900 GB/s. */
        units.flops_per_byte = world->device->ops->host_memory ? 2 : 150;
        units.costs = costs;
        units.kept = activations;
        result = dtrain__plan_activations(world, desc, &whole, &units, &memory);
    }
    dtrain__stage_map_free(&map, &world->allocator);
    return result;
}
