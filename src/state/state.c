/* State: the list of what must survive
 *
 * The list is made once, from the objects that own the memory. It copies nothing, and its addresses
 * stay the same during a run. If several ranks hold the same piece, all of them list it, and
 * state/pieces.c chooses the one that writes. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world_internal.h"
#include "comm/comm.h"
#include "comm/groups_internal.h"
#include "parallel/cut_internal.h"
#include "strategy/compression.h"
#include "strategy/view_internal.h"
#include "optim/optim_internal.h"
#include "state/box_internal.h"
#include "state/state.h"
#include "state/state_internal.h"

DTRAIN__PRIVATE size_t dtrain__state_bytes(uint32_t dtype)
{
    return dtype == DTRAIN_STATE_BYTES ? 1 : dtrain_dtype_bytes((dtrain_dtype)dtype);
}

/* Return the name of a kind, as in files and sentences. */
DTRAIN__PRIVATE const char *dtrain__state_kind_name(uint32_t kind)
{
    static const char *const names[DTRAIN_STATE_KINDS] = {
        "value", "exp_avg", "exp_avg_sq", "momentum", "residual", "velocity",
        "host",  "lion",    "muon",       "steps",    "scalar"};
    return kind < DTRAIN_STATE_KINDS ? names[kind] : "?";
}

static const int64_t dtrain__one[4] = {1, 0, 0, 0}; /* shape of a scalar */

/* ---- Tensors ----------------------------------------------------------------------------------*/

/* Append a tensor that this rank holds whole; NULL: out of memory. */
static dtrain_state_tensor *dtrain__state_append(dtrain_state *state, dtrain_state_kind kind,
                                                 const char *name, uint32_t dtype,
                                                 const int64_t shape[4], void *memory)
{
    if (!dtrain__grow(&state->allocator, (void **)&state->tensors, state->tensor_count,
                      &state->tensor_room, sizeof *state->tensors, "a list of state"))
        return NULL;
    dtrain_state_tensor *tensor = &state->tensors[state->tensor_count++];
    memset(tensor, 0, sizeof *tensor);
    tensor->name = name;
    tensor->kind = (uint32_t)kind;
    tensor->dtype = dtype;
    memcpy(tensor->shape, shape, sizeof tensor->shape);
    tensor->piece = dtrain__piece_whole(shape);
    tensor->total = tensor->piece.count;
    tensor->memory = memory;
    return tensor;
}

/* Append the pieces of a tensor of fp32 that a shard holds; the tensor has the shape of the shard's
 * parameter. The tensor axis gives this rank a part of the parameter: one run of each component
 * along the cut axis. The shard is a run of that part, whose components follow one another:
 *
 *     q|k|v     | q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3 |
 *     part      | q2 q3 | k2 k3 | v2 v3 |    boxes of the whole, and memory without a gap
 *     shard            | 3 | k2 k3 | v2 |    three pieces: a run of each box
 *
 * A rank without an element lists one empty piece. */
static dtrain_result dtrain__state_like(dtrain_state *state, const dtrain_shard *shard,
                                        dtrain_state_kind kind, float *memory, float *mirror)
{
    const dtrain_param *p = shard->param;
    const dtrain__groups groups = dtrain__groups_of(state->desc.strategy);
    const dtrain__share part = dtrain__share_here(p, &groups);
    const uint32_t runs = part.axis < 0 ? 1 : part.runs;
    const bool wide = p->dtype == DTRAIN_DTYPE_F64;
    const uint32_t dtype = wide ? DTRAIN_DTYPE_F64 : DTRAIN_DTYPE_F32;
    const int64_t words = wide ? 2 : 1; /* floats that an element takes */
    int64_t begin = 0,
            left = shard->count; /* first element of the box in the part; not listed yet */
    for (uint32_t k = 0; k < runs; k++) {
        dtrain_piece box = dtrain__piece_whole(p->shape);
        if (part.axis >= 0) {
            box.first[part.axis] = part.first[k];
            box.length[part.axis] = part.length[k];
        }
        const int64_t end = begin + dtrain__box_count(&box);
        const int64_t low = dtrain__max(shard->offset, begin);
        const int64_t count = dtrain__min(shard->offset + shard->count, end) - low;
        if (count > 0 || (k + 1 == runs && left == shard->count)) {
            dtrain_state_tensor *tensor =
                dtrain__state_append(state, kind, p->name, dtype, p->shape, NULL);
            if (!tensor) return DTRAIN_ERROR_MEMORY;
            const int64_t at = count > 0 ? (low - shard->offset) * words : 0;
            box.offset = count > 0 ? low - begin : 0;
            box.count = dtrain__max(count, 0);
            tensor->piece = box;
            tensor->memory = dtrain__after(memory, at);
            tensor->mirror = mirror == memory ? NULL : dtrain__after(mirror, at);
            tensor->own = kind == DTRAIN_STATE_RESIDUAL || kind == DTRAIN_STATE_VELOCITY;
            left -= box.count;
        }
        begin = end;
    }
    return DTRAIN_OK;
}

/* Append the state of parameters, class by class: values, the optimizer's first and second states,
 * and counts of updates. The master copy of an offloaded update mirrors the value: both are equal
 * between steps. A parameter without memory on this rank is listed by the ranks of its stage. */
static dtrain_result dtrain__state_params(dtrain_state *state)
{
    static const dtrain_state_kind firsts[] = {DTRAIN_STATE_KINDS, DTRAIN_STATE_EXP_AVG,
                                               DTRAIN_STATE_MOMENTUM, DTRAIN_STATE_LION,
                                               DTRAIN_STATE_MUON}; /* by kind of optimizer */
    enum { DTRAIN__CLASS_VALUE, DTRAIN__CLASS_FIRST, DTRAIN__CLASS_SECOND, DTRAIN__CLASS_STEPS };
    const dtrain_strategy *strategy = state->desc.strategy;
    const dtrain_optimizer *optimizer = state->desc.optimizer;
    size_t count;
    const dtrain_param *params = dtrain__params_of(strategy, &count);
    for (size_t n = 0; n < 4 * count; n++) {
        const size_t i = n % count, class_ = n / count;
        const dtrain_param *p = &params[i];
        dtrain_shard shard;
        if (!dtrain__has_memory(p) ||
            (class_ == DTRAIN__CLASS_VALUE ? p->state.storage != p
                                           : !optimizer || !dtrain__has_state(strategy, i)))
            continue;
        const dtrain_optimizer_tensor *view = optimizer ? dtrain__moments_of(optimizer, p) : NULL;
        dtrain__shard_of(strategy, i, &shard);
        if (class_ == DTRAIN__CLASS_STEPS) {
            if (!dtrain__state_append(state, DTRAIN_STATE_STEPS, p->name, DTRAIN_DTYPE_I64,
                                      dtrain__one, &optimizer->updates[i]))
                return DTRAIN_ERROR_MEMORY;
        } else if (class_ == DTRAIN__CLASS_VALUE) {
            DTRAIN__TRY(dtrain__state_like(state, &shard, DTRAIN_STATE_VALUE,
                                           shard.value ? shard.value : (float *)shard.typed_value,
                                           view ? view->value : NULL));
        } else {
            const dtrain_optimizer_desc *desc = dtrain__desc_of(optimizer, p);
            float *memory = !view ? NULL : class_ == DTRAIN__CLASS_FIRST ? view->m : view->v;
            if (class_ > dtrain__states_of(desc)) continue;
            DTRAIN__TRY(dtrain__state_like(state, &shard,
                                           class_ == DTRAIN__CLASS_FIRST ? firsts[desc->kind]
                                                                         : DTRAIN_STATE_EXP_AVG_SQ,
                                           memory, NULL));
        }
    }
    return DTRAIN_OK;
}

/* Append residuals of all parameters if this rank keeps any residual, and likewise velocities. A
 * parameter without one gets an empty piece. */
static dtrain_result dtrain__state_compression(dtrain_state *state)
{
    size_t count, kept_count;
    bool keeps[2] = {false, false}; /* residuals, velocities */
    const dtrain_param *params = dtrain__params_of(state->desc.strategy, &count);
    const dtrain__kept *all = dtrain__kept_of(state->desc.strategy, &kept_count);
    for (size_t k = 0; k < kept_count; k++) {
        keeps[0] |= all[k].residual != NULL;
        keeps[1] |= all[k].velocity != NULL;
    }
    for (size_t i = 0; i < count && kept_count; i++) {
        dtrain_shard piece = {&params[i], 0, 0, NULL, NULL, NULL, NULL};
        float *memory[2] = {NULL, NULL};
        if (!dtrain__has_state(state->desc.strategy, i)) continue;
        for (size_t k = 0; k < kept_count && !piece.count; k++) {
            if (all[k].param != &params[i]) continue;
            piece.offset = all[k].offset;
            piece.count = all[k].count;
            memory[0] = all[k].residual;
            memory[1] = all[k].velocity;
        }
        for (int which = 0; which < 2; which++) {
            dtrain_shard listed = piece;
            if (!keeps[which]) continue;
            if (!memory[which]) listed.count = 0;
            DTRAIN__TRY(dtrain__state_like(state, &listed,
                                           (dtrain_state_kind)(DTRAIN_STATE_RESIDUAL + which),
                                           memory[which], NULL));
        }
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE bool dtrain__state_alike(const dtrain_state_tensor *a, const dtrain_state_tensor *b)
{
    return a->dtype == b->dtype && a->own == b->own &&
           memcmp(a->shape, b->shape, sizeof a->shape) == 0;
}

/* Append an array of the program. */
static dtrain_result dtrain__state_item(dtrain_state *state, const dtrain_state_item *item)
{
    const char *const call = "dtrain_state_create";
    if (!item->name || !item->name[0] || item->count < 0 || (item->count && !item->memory) ||
        !dtrain__state_bytes(item->dtype))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: expected an item with a name, a dtype (found %u), count >= 0 "
                           "(found %lld) and memory",
                           call, item->dtype, (long long)item->count);
    const bool all = item->piece.count == 0; /* the whole array */
    int64_t shape[4];
    memcpy(shape, item->shape, sizeof shape);
    if (!shape[0]) shape[0] = item->count;
    dtrain_state_tensor *tensor = dtrain__state_append(state, DTRAIN_STATE_HOST, item->name,
                                                       item->dtype, shape, item->memory);
    if (!tensor) return DTRAIN_ERROR_MEMORY;
    tensor->own = item->own;
    if (!all) tensor->piece = item->piece;
    for (const dtrain_state_tensor *other = state->tensors; other < tensor; other++)
        if (other->kind == DTRAIN_STATE_HOST && strcmp(other->name, item->name) == 0 &&
            (all || !dtrain__state_alike(other, tensor)))
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "%s: there is an item by the name of \"%s\" already, of which "
                               "this is no other piece",
                               call, dtrain__short(item->name));
    if (tensor->piece.count == item->count && dtrain__piece_fits(&tensor->piece, shape))
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: the piece of \"%s\" has %lld elements, expected %lld (count) "
                       "that lie in its shape",
                       call, dtrain__short(item->name), (long long)tensor->piece.count,
                       (long long)item->count);
}

/* ---- Scalars ----------------------------------------------------------------------------------*/

/* Append the scalars of all objects of the desc, as tensors of one element. Compression depends on
 * the strategy's step; schedule and dropout depend on the trainer's step. */
static dtrain_result dtrain__state_scalars(dtrain_state *state)
{
    const dtrain_state_desc *desc = &state->desc;
    const dtrain__state_source *trainer = dtrain__source_of(desc->trainer);
    const dtrain__state_source *loader = dtrain__source_of(desc->loader);
    dtrain_loss_scaler *scaler = trainer && trainer->scaler ? trainer->scaler : desc->scaler;
    const dtrain__scalar steps[] = {
        {"strategy.step", &dtrain__notes_of(desc->strategy)->sync_count, 8},
        {"optimizer.step", desc->optimizer ? &desc->optimizer->step_count : NULL, 8},
        {"scaler.scale", scaler ? &scaler->scale : NULL, 4},
        {"scaler.good_steps", scaler ? &scaler->good_steps : NULL, 4},
        {"scaler.bad_steps", scaler ? &scaler->bad_steps : NULL, 4},
        {"scaler.skipped_steps", scaler ? &scaler->skipped_steps : NULL, 8},
        {NULL, NULL, 0}};
    const dtrain__scalar *const lists[] = {steps, trainer ? trainer->scalars : NULL,
                                           loader ? loader->scalars : NULL};
    for (int l = 0; l < 3; l++)
        for (const dtrain__scalar *at = lists[l]; at && at->name; at++) {
            const bool real = strcmp(at->name, "scaler.scale") == 0;
            const uint32_t narrow = real ? DTRAIN_DTYPE_F32 : DTRAIN_DTYPE_I32;
            if (at->memory &&
                !dtrain__state_append(state, DTRAIN_STATE_SCALAR, at->name,
                                      at->bytes == 8 ? (uint32_t)DTRAIN_DTYPE_I64 : narrow,
                                      dtrain__one, at->memory))
                return DTRAIN_ERROR_MEMORY;
        }
    return DTRAIN_OK;
}

/* Refuse settings that are not pairs, or too long for a load to read back. */
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
    DTRAIN__GIVEN(call, world);
    DTRAIN__GIVEN(call, desc);
    DTRAIN__GIVEN(call, out);
    DTRAIN__TAKE(dtrain__abi_of(world), state_desc, desc);
    if (!desc->strategy || (desc->item_count && !desc->items))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: desc has no %s", call,
                           desc->strategy ? "items, and a count of them" : "strategy");
    const dtrain__state_source *trainer = dtrain__source_of(desc->trainer);
    if (trainer && ((desc->optimizer && trainer->optimizer != desc->optimizer) ||
                    trainer->strategy != desc->strategy))
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
    if (trainer) state->desc.optimizer = trainer->optimizer;
    state->comm = desc->comm ? desc->comm : dtrain__groups_of(desc->strategy).all;
    state->device = dtrain_world_device(world);
    state->step = -1;
    dtrain_result result = dtrain__state_params(state);
    if (result == DTRAIN_OK) result = dtrain__state_compression(state);
    for (size_t i = 0; i < desc->item_count && result == DTRAIN_OK; i++)
        result = dtrain__state_item(state, &desc->items[i]);
    if (result == DTRAIN_OK) result = dtrain__state_scalars(state);
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
    DTRAIN__GIVEN("dtrain_state_tensors", state);
    DTRAIN__GIVEN("dtrain_state_tensors", tensors);
    DTRAIN__GIVEN("dtrain_state_tensors", count);
    *tensors = state->tensors;
    *count = state->tensor_count;
    return DTRAIN_OK;
}

/* Copy values to their mirrors, and publish them. The loader drops the batches that its workers
 * have read ahead. The strategy chooses again how to reduce each bucket, which depends on its step
 * if compression is on, and forgets the micro-batches of a step under way. */
DTRAIN_API dtrain_result dtrain_state_changed(dtrain_state *state)
{
    DTRAIN__GIVEN("dtrain_state_changed", state);
    dtrain_strategy *strategy = state->desc.strategy;
    dtrain__notes *notes = dtrain__notes_of(strategy);
    const char *const failed_load = notes->failed_load;
    notes->failed_load = NULL; /* values are whole again */
    dtrain_result result = dtrain__between_backwards(strategy, "dtrain_state_changed");
    if (result != DTRAIN_OK) {
        notes->failed_load = failed_load;
        return result;
    }
    for (size_t i = 0; i < state->tensor_count && result == DTRAIN_OK; i++) {
        const dtrain_state_tensor *tensor = &state->tensors[i];
        if (tensor->mirror)
            result = dtrain_device_copy(state->device, tensor->mirror, tensor->memory,
                                        (size_t)tensor->piece.count * sizeof(float));
    }
    char note[256];
    for (int i = 0; i < 2; i++) {
        dtrain__state_source *source =
            dtrain__source_of(i ? (void *)state->desc.trainer : (void *)state->desc.loader);
        if (source) source->resume(source, note, sizeof note);
    }
    dtrain__rewind(strategy, true);
    DTRAIN__TRY(dtrain__strategy_keep(strategy, result));
    return dtrain_strategy_publish(strategy);
}
