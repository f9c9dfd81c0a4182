/* State: the list of what must survive
 *
 * Made once, from the tables of those who own the memory: nothing is copied here, and no address in
 * the list changes during a run. Which of several ranks that hold the same piece writes it is for
 * checkpoints to choose. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "strategy/compression.h"
#include "strategy/view_internal.h"
#include "optim/optim_internal.h"
#include "train/data_internal.h"
#include "train/trainer_internal.h"
#include "state/box_internal.h"
#include "state/state.h"
#include "state/state_internal.h"

DTRAIN__PRIVATE size_t dtrain__state_bytes(uint32_t dtype)
{
    return dtype == DTRAIN_STATE_BYTES ? 1 : dtrain_dtype_bytes((dtrain_dtype)dtype);
}

/* Return the name of a kind, as it is in manifests and files. */
DTRAIN__PRIVATE const char *dtrain__state_kind_name(uint32_t kind)
{
    static const char *const names[DTRAIN_STATE_KINDS] = {
        "value", "exp_avg", "exp_avg_sq", "momentum", "residual", "velocity",
        "q",     "host",    "lion",       "muon",     "missed"};
    return kind < DTRAIN_STATE_KINDS ? names[kind] : "?";
}

DTRAIN__PRIVATE dtrain_result dtrain__state_check(const dtrain_state *state, const char *call)
{
    if (!state) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: state is NULL", call);
    return DTRAIN_OK;
}

/* ---- Tensors ----------------------------------------------------------------------------------*/

/* Append a tensor of fp32 that nothing is known of yet but its name; NULL: no memory. */
static dtrain_state_tensor *dtrain__state_append(dtrain_state *state, const char *name,
                                                 dtrain_state_kind kind)
{
    if (!dtrain__grow(&state->allocator, (void **)&state->tensors, state->tensor_count,
                      &state->tensor_room, sizeof *state->tensors, "a list of state"))
        return NULL;
    dtrain_state_tensor *tensor = &state->tensors[state->tensor_count++];
    memset(tensor, 0, sizeof *tensor);
    tensor->name = name;
    tensor->kind = (uint32_t)kind;
    tensor->dtype = DTRAIN_DTYPE_F32;
    return tensor;
}

/* Append a tensor that has the shape of a parameter, and of which this rank has what it has of the
 * parameter. */
static dtrain_result dtrain__state_like(dtrain_state *state, const dtrain_shard *shard,
                                        dtrain_state_kind kind, float *memory, float *mirror)
{
    dtrain_state_tensor *tensor = dtrain__state_append(state, shard->param->name, kind);
    if (!tensor) return DTRAIN_ERROR_MEMORY;
    memcpy(tensor->shape, shard->param->shape, sizeof tensor->shape);
    tensor->total = shard->param->count;
    tensor->piece = dtrain__piece_whole(tensor->shape);
    tensor->piece.offset = shard->offset;
    tensor->piece.count = shard->count;
    tensor->memory = memory;
    tensor->mirror = mirror == memory ? NULL : mirror;
    return DTRAIN_OK;
}

/* Return the kind of a parameter's class 1 or 2 of optimizer state; KINDS: there is none. */
static dtrain_state_kind dtrain__state_class(const dtrain_optimizer_desc *desc, int class_)
{
    if ((size_t)class_ > dtrain__states_of(desc)) return DTRAIN_STATE_KINDS;
    if (class_ == 2) return DTRAIN_STATE_EXP_AVG_SQ;
    if (desc->kind == DTRAIN_OPTIMIZER_ADAMW) return DTRAIN_STATE_EXP_AVG;
    if (desc->kind == DTRAIN_OPTIMIZER_LION) return DTRAIN_STATE_LION;
    return desc->kind == DTRAIN_OPTIMIZER_MUON ? DTRAIN_STATE_MUON : DTRAIN_STATE_MOMENTUM;
}

/* Append the values of all parameters. An offloaded update has a master copy of values that are on
 * the device: both are the same between steps. */
static dtrain_result dtrain__state_values(dtrain_state *state)
{
    const dtrain_strategy *strategy = state->desc.strategy;
    const dtrain_optimizer *optimizer = state->desc.optimizer;
    size_t count;
    const dtrain_param *params = dtrain__params_of(strategy, &count);
    for (size_t i = 0; i < count; i++) {
        dtrain_shard shard;
        if (params[i].state.storage != &params[i]) continue;
        dtrain__shard_of(strategy, i, &shard);
        const dtrain_optimizer_tensor *view =
            optimizer ? dtrain__moments_of(optimizer, shard.param) : NULL;
        DTRAIN__TRY(dtrain__state_like(state, &shard, DTRAIN_STATE_VALUE, shard.value,
                                       view ? view->value : NULL));
    }
    return DTRAIN_OK;
}

/* Append each class of the optimizer's state: first moments and momentum, then second moments. */
static dtrain_result dtrain__state_moments(dtrain_state *state)
{
    const dtrain_strategy *strategy = state->desc.strategy;
    const dtrain_optimizer *optimizer = state->desc.optimizer;
    size_t count;
    const dtrain_param *params = dtrain__params_of(strategy, &count);
    for (int class_ = 1; class_ <= 2 && optimizer; class_++) {
        for (size_t i = 0; i < count; i++) {
            const dtrain_param *p = &params[i];
            const dtrain_state_kind kind =
                dtrain__state_class(dtrain__desc_of(optimizer, p), class_);
            dtrain_shard shard;
            if (!dtrain__is_updated(p) || kind == DTRAIN_STATE_KINDS) continue;
            dtrain__shard_of(strategy, i, &shard);
            const dtrain_optimizer_tensor *view = dtrain__moments_of(optimizer, p);
            float *memory = !view ? NULL : class_ == 1 ? view->m : view->v;
            DTRAIN__TRY(dtrain__state_like(state, &shard, kind, memory, NULL));
        }
    }
    return DTRAIN_OK;
}

/* Make a tensor one that every rank that lists it holds all of. */
static void dtrain__state_whole(dtrain_state_tensor *tensor, void *memory)
{
    tensor->piece = dtrain__piece_whole(tensor->shape);
    tensor->total = tensor->piece.count;
    tensor->memory = memory;
}

/* Append in how many steps each parameter was left out of updates. */
static dtrain_result dtrain__state_missed(dtrain_state *state)
{
    const dtrain_optimizer *optimizer = state->desc.optimizer;
    size_t count;
    const dtrain_param *params = dtrain__params_of(state->desc.strategy, &count);
    for (size_t i = 0; i < count && optimizer; i++) {
        if (!dtrain__is_updated(&params[i])) continue;
        dtrain_state_tensor *tensor =
            dtrain__state_append(state, params[i].name, DTRAIN_STATE_MISSED);
        if (!tensor) return DTRAIN_ERROR_MEMORY;
        tensor->dtype = DTRAIN_DTYPE_I64;
        tensor->shape[0] = 1;
        dtrain__state_whole(tensor, &optimizer->missed[i]);
    }
    return DTRAIN_OK;
}

/* Append what compression keeps of a parameter. */
static dtrain_result dtrain__state_compressed(dtrain_state *state, const dtrain_param *param,
                                              const dtrain_compression_state *kept)
{
    const dtrain_compression_desc *how = dtrain__settings_of(state->desc.strategy)->compression;
    dtrain_shard piece = {param, 0, 0, NULL, NULL};
    if (kept) piece.offset = kept->offset;
    if (kept) piece.count = kept->count;
    for (uint32_t kind = DTRAIN_STATE_RESIDUAL; kind <= DTRAIN_STATE_VELOCITY; kind++) {
        const bool residual = kind == DTRAIN_STATE_RESIDUAL;
        if (residual ? how->no_error_feedback : !(how->topk_momentum > 0)) continue;
        float *memory = !kept ? NULL : residual ? kept->residual : kept->velocity;
        DTRAIN__TRY(dtrain__state_like(state, &piece, (dtrain_state_kind)kind, memory, NULL));
        state->tensors[state->tensor_count - 1].own = true;
    }
    if (!kept || !kept->q) return DTRAIN_OK;
    dtrain_state_tensor *q = dtrain__state_append(state, param->name, DTRAIN_STATE_Q);
    if (!q) return DTRAIN_ERROR_MEMORY;
    q->shape[0] = kept->q_rows;
    q->shape[1] = (int64_t)how->powersgd_rank;
    dtrain__state_whole(q, kept->q);
    return DTRAIN_OK;
}

static dtrain_result dtrain__state_compression(dtrain_state *state)
{
    dtrain_strategy *strategy = state->desc.strategy;
    const dtrain_compression_state *states;
    size_t count, state_count;
    const dtrain_param *params = dtrain__params_of(strategy, &count);
    if (!dtrain__settings_of(strategy)->compression || dtrain_comm_size(state->comm) == 1)
        return DTRAIN_OK; /* with nobody to send to, nothing is kept */
    DTRAIN__TRY(dtrain_strategy_compression(strategy, &states, &state_count));
    for (size_t i = 0; i < count; i++) {
        const dtrain_compression_state *kept = NULL;
        if (!dtrain__is_updated(&params[i])) continue;
        for (size_t k = 0; k < state_count && !kept; k++)
            if (states[k].param == &params[i]) kept = &states[k];
        DTRAIN__TRY(dtrain__state_compressed(state, &params[i], kept));
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE const dtrain_state_tensor *dtrain__state_find(const dtrain_state *state,
                                                              uint32_t kind, const char *name)
{
    for (size_t i = 0; i < state->tensor_count; i++)
        if (state->tensors[i].kind == kind && strcmp(state->tensors[i].name, name) == 0)
            return &state->tensors[i];
    return NULL;
}

DTRAIN_API dtrain_result dtrain_state_add(dtrain_state *state, const dtrain_state_item *item)
{
    const char *const call = "dtrain_state_add";
    DTRAIN__TRY(dtrain__state_check(state, call));
    if (!item || !item->name || !item->name[0] || item->count < 0 ||
        (item->count && !item->memory) || !dtrain__state_bytes(item->dtype))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: expected an item with a name, a dtype (found %u), count >= 0 "
                           "(found %lld) and memory",
                           call, item ? item->dtype : 0, item ? (long long)item->count : 0);
    const dtrain_state_tensor *other = dtrain__state_find(state, DTRAIN_STATE_HOST, item->name);
    const bool all = item->piece.count == 0; /* of the array */
    int64_t shape[4];
    memcpy(shape, item->shape, sizeof shape);
    if (!shape[0]) shape[0] = item->count;
    if (other && (all || other->dtype != item->dtype || other->own != item->own ||
                  memcmp(other->shape, shape, sizeof shape) != 0))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: there is an item by the name of \"%.100s\" already, of which this "
                           "is no other piece",
                           call, item->name);
    dtrain_piece piece = all ? dtrain__piece_whole(shape) : item->piece;
    if (piece.count != item->count || !dtrain__piece_fits(&piece, shape))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: the piece of \"%.100s\" has %lld elements, expected %lld (count) "
                           "that lie in its shape",
                           call, item->name, (long long)piece.count, (long long)item->count);
    dtrain_state_tensor *tensor = dtrain__state_append(state, item->name, DTRAIN_STATE_HOST);
    if (!tensor) return DTRAIN_ERROR_MEMORY;
    tensor->dtype = item->dtype;
    memcpy(tensor->shape, shape, sizeof shape);
    dtrain__state_whole(tensor, item->memory);
    tensor->piece = piece;
    tensor->own = item->own;
    return DTRAIN_OK;
}

/* ---- Scalars ----------------------------------------------------------------------------------*/

static void dtrain__scalar_add(dtrain_state *state, const char *name, void *memory, size_t bytes)
{
    dtrain__scalar *scalar = &state->scalars[state->scalar_count++];
    scalar->name = name;
    scalar->memory = memory;
    scalar->bytes = bytes;
}

/* List the numbers. Compression depends on the strategy's step; a schedule and the seeds of dropout
 * depend on the trainer's. */
static void dtrain__state_scalars(dtrain_state *state)
{
    const dtrain_state_desc *desc = &state->desc;
    dtrain_trainer *trainer = desc->trainer;
    dtrain_loss_scaler *scaler = trainer && trainer->scaling ? &trainer->scaler : desc->scaler;
    dtrain__scalar_add(state, "strategy.step", dtrain__step_count_of(desc->strategy), 8);
    if (desc->optimizer)
        dtrain__scalar_add(state, "optimizer.step", &desc->optimizer->step_count, 8);
    if (trainer) {
        dtrain__scalar_add(state, "trainer.step", &trainer->step, 8);
        dtrain__scalar_add(state, "trainer.tokens", &trainer->tokens, 8);
        dtrain__scalar_add(state, "trainer.seed", &trainer->desc.seed, 8);
        dtrain__scalar_add(state, "trainer.skipped", &trainer->skipped, 8);
    }
    if (scaler) {
        dtrain__scalar_add(state, "scaler.scale", &scaler->scale, 4);
        dtrain__scalar_add(state, "scaler.good_steps", &scaler->good_steps, 4);
        dtrain__scalar_add(state, "scaler.bad_left", &scaler->bad_left, 4);
        dtrain__scalar_add(state, "scaler.bad_steps", &scaler->bad_steps, 4);
        dtrain__scalar_add(state, "scaler.skipped_steps", &scaler->skipped_steps, 8);
    }
    if (desc->loader) {
        dtrain__scalar_add(state, "loader.position", &desc->loader->position, 8);
        dtrain__scalar_add(state, "loader.seed", &desc->loader->desc.seed, 8);
    }
}

/* Refuse settings that are no pairs, or that no manifest could give back. */
static dtrain_result dtrain__settings_check(const char *call, const char *const *pairs)
{
    size_t count = 0;
    for (; pairs && pairs[count]; count++)
        if (strlen(pairs[count]) >= DTRAIN__SETTING)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "%s: a setting is \"%.60s...\", expected at most %d bytes", call,
                               pairs[count], DTRAIN__SETTING - 1);
    if (count % 2 == 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: settings have %zu strings before their NULL, expected pairs", call,
                       count);
}

/* ---- Life -------------------------------------------------------------------------------------*/

DTRAIN_API dtrain_result dtrain_state_create(dtrain_world *world, const dtrain_state_desc *desc,
                                             dtrain_state **out)
{
    const char *const call = "dtrain_state_create";
    if (out) *out = NULL;
    if (!world || !desc || !out)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: world, desc or out is NULL", call);
    if (!desc->strategy)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: desc has no strategy", call);
    if (desc->trainer && ((desc->optimizer && desc->trainer->desc.optimizer != desc->optimizer) ||
                          desc->trainer->desc.strategy != desc->strategy))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: the trainer has another strategy or optimizer than desc", call);
    DTRAIN__TRY(dtrain__settings_check(call, desc->model));
    DTRAIN__TRY(dtrain__settings_check(call, desc->settings));
    dtrain_state *state =
        (dtrain_state *)dtrain__alloc(&world->allocator, 1, sizeof *state, "a list of state");
    if (!state) return DTRAIN_ERROR_MEMORY;
    state->world = world;
    state->allocator = world->allocator;
    state->desc = *desc;
    if (desc->trainer) state->desc.optimizer = desc->trainer->desc.optimizer;
    state->comm = desc->comm ? desc->comm : dtrain__groups_of(desc->strategy).all;
    state->device = dtrain_world_device(world);
    state->step = -1;
    dtrain__state_scalars(state);
    dtrain_result result = dtrain__state_values(state);
    if (result == DTRAIN_OK) result = dtrain__state_moments(state);
    if (result == DTRAIN_OK) result = dtrain__state_missed(state);
    if (result == DTRAIN_OK) result = dtrain__state_compression(state);
    if (result == DTRAIN_OK) *out = state;
    else dtrain_state_destroy(state);
    return result;
}

DTRAIN_API void dtrain_state_destroy(dtrain_state *state)
{
    if (!state) return;
    const dtrain_allocator allocator = state->allocator;
    dtrain__free(&allocator, state->tensors, state->tensor_room, sizeof *state->tensors);
    dtrain__free(&allocator, state, 1, sizeof *state);
}

DTRAIN_API dtrain_result dtrain_state_tensors(const dtrain_state *state,
                                              const dtrain_state_tensor **tensors, size_t *count)
{
    DTRAIN__TRY(dtrain__state_check(state, "dtrain_state_tensors"));
    if (!tensors || !count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_state_tensors: tensors or count is NULL");
    *tensors = state->tensors;
    *count = state->tensor_count;
    return DTRAIN_OK;
}

/* Bring values to their mirrors and to the next forward. A loader's workers have read ahead of
 * the old position: that is dropped. A strategy decides anew how its buckets travel, which with
 * compression depends on its step, and forgets micro-batches of a step under way. */
DTRAIN_API dtrain_result dtrain_state_changed(dtrain_state *state)
{
    DTRAIN__TRY(dtrain__state_check(state, "dtrain_state_changed"));
    dtrain_strategy *strategy = state->desc.strategy;
    const char *const torn = dtrain__torn(strategy);
    dtrain__set_torn(strategy, NULL); /* values are whole again */
    dtrain_result result = dtrain__between_backwards(strategy, "dtrain_state_changed");
    if (result != DTRAIN_OK) dtrain__set_torn(strategy, torn);
    DTRAIN__TRY(result);
    for (size_t i = 0; i < state->tensor_count && result == DTRAIN_OK; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        if (tensor->mirror)
            result = dtrain_device_copy(state->device, tensor->mirror, tensor->memory,
                                        (size_t)tensor->piece.count * sizeof(float));
    }
    if (state->desc.loader) dtrain__prefetch_rest(state->desc.loader);
    if (state->desc.trainer) state->desc.trainer->micro = 0;
    dtrain__rewind(strategy, true);
    DTRAIN__TRY(dtrain__strategy_keep(strategy, result));
    return dtrain_strategy_publish(strategy);
}
