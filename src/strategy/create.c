/* Making and destroying a strategy
 *
 * 1. local: check the array and the desc
 * 2. bring errors of step 1 to all ranks, and compare what they have registered
 * 3. AUTO: choose a kind; HYBRID_SHARD: split the ranks; check the settings of the kind
 * 4. local: lay out, allocate, initialise; then all ranks agree on the outcome
 * 5. broadcast rank 0's values of parameters that the host owns; publish
 *
 * Ranks agree and compare over the whole mesh; a kind works over the data axis. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* 1. Check what the host gave, and complete the parameters' shapes. *out is set as soon as the
 * strategy exists; the caller destroys it after an error. */
static dtrain_result dtrain__strategy_begin(dtrain_world *world, dtrain_param *params, size_t count,
                                            const dtrain_strategy_desc *desc,
                                            const dtrain__groups *groups, dtrain_strategy **out)
{
    const char *const call = "dtrain_strategy_create";
    const dtrain_allocator *allocator = &world->allocator;
    DTRAIN__GIVEN(call, out);
    if (count) DTRAIN__GIVEN(call, params);
    if (count > UINT32_MAX - 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %zu parameters are too many", call, count);
    dtrain_strategy *strategy =
        (dtrain_strategy *)dtrain__alloc(allocator, 1, sizeof *strategy, "a strategy");
    *out = strategy;
    if (!strategy) return DTRAIN_ERROR_MEMORY;
    strategy->backward = DTRAIN__NONE;
    strategy->world = world;
    strategy->device = dtrain_world_device(world);
    strategy->groups = *groups;
    strategy->allocator = *allocator;
    strategy->params = params;
    strategy->param_count = count;
    DTRAIN__TRY(dtrain__resolve_desc(desc, &strategy->desc, &strategy->compression));
    if (desc && desc->mesh) DTRAIN__TRY(dtrain__mesh_fits(world, desc));
    strategy->desc.comm = groups->data;
    if (strategy->desc.offload && strategy->device->ops->host_memory)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: offload is 0x%x, but the memory of the %s device is the host's: "
                           "what a GPU would be relieved of is on the CPU already; use 0",
                           call, (unsigned)strategy->desc.offload, strategy->device->ops->name);
    strategy->gathered =
        (double *)dtrain__alloc(allocator, (size_t)dtrain_comm_size(groups->all),
                                DTRAIN__SQUARES * sizeof *strategy->gathered, "gathered hashes");
    strategy->hashes =
        (uint64_t *)dtrain__alloc(allocator, count, sizeof *strategy->hashes, "hashes of values");
    strategy->ties = (dtrain_comm **)dtrain__alloc(allocator, count, sizeof *strategy->ties,
                                                   "ties between stages");
    if (!strategy->gathered || !strategy->hashes || !strategy->ties) return DTRAIN_ERROR_MEMORY;
    DTRAIN__TRY(dtrain__resolve_params(params, count, groups));
    DTRAIN__TRY(dtrain__check_wide(params, count, &strategy->desc));
    DTRAIN__TRY(dtrain__stage_map_make(&strategy->stages, allocator, params, count,
                                       strategy->desc.pipeline, groups));
    if (strategy->desc.pipeline) strategy->pipeline = *strategy->desc.pipeline;
    if (strategy->desc.pipeline) strategy->desc.pipeline = &strategy->pipeline;
    dtrain__stage_params(&strategy->stages, params, count);
    return DTRAIN_OK;
}

/* Point params at memory of the library where the host gave none: an alias at the memory of its
 * storage, a gathered value at NULL until its gather. Initialise this rank's piece of every
 * storage, and list the shards that this rank updates. */
static dtrain_result dtrain__list_shards(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    const bool wide = layout->dtype == DTRAIN_DTYPE_F64;
    for (size_t i = 0; i < strategy->param_count; i++) {
        dtrain_param *p = &strategy->params[i], *storage = p->state.storage;
        dtrain__entry *entry = &layout->entries[i];
        const bool alias = storage != p, sharded = dtrain__shard_bucket(layout, i) != NULL;
        const bool gathered = sharded && layout->shards.params;
        float *inside = gathered  ? NULL
                        : sharded ? entry->bucket->values + entry->offset
                                  : entry->own_value;
        if (!dtrain__has_memory(p)) continue;
        float *grad = entry->trainable && !alias ? entry->bucket->grads + entry->offset : NULL;
        entry->lends_value = !dtrain__host_value(p);
        entry->lends_grad = !dtrain__host_grad(p);
        if (!p->value && !wide) p->value = alias ? storage->value : inside;
        if (!p->grad && !wide && entry->trainable) p->grad = alias ? storage->grad : grad;
        if (!p->typed_value)
            p->typed_value = alias      ? storage->typed_value
                             : wide     ? inside
                             : gathered ? NULL
                                        : entry->typed_value;
        if (!p->typed_grad && entry->trainable)
            p->typed_grad = alias ? storage->typed_grad : wide ? grad : entry->typed_grad;
        dtrain_shard shard;
        if (!dtrain__shard_of(strategy, i, &shard)) continue;
        const dtrain__share part = dtrain__share_here(p, &strategy->groups);
        if (entry->lends_value)
            DTRAIN__TRY(dtrain__init_param(strategy->device, p, &part, strategy->desc.init_seed,
                                           shard.offset, shard.count,
                                           shard.value ? shard.value : shard.typed_value));
        if (entry->trainable) strategy->shards[strategy->shard_count++] = shard;
    }
    return DTRAIN_OK;
}

/* True if other ranks read a block: then it is memory of the communicator. */
static bool dtrain__block_is_read(const dtrain__layout *layout, int block)
{
    return block != DTRAIN__VALUES || layout->shards.state;
}

/* 4. Do all local work that can fail, so that ranks agree on the outcome once: make the layout and
 * its tables, allocate zeroed blocks, point everything at them, initialise. A bucket has one handle
 * per collective under way at once: one per owner with ZERO3; two with compression, one for dense
 * tensors. */
static dtrain_result dtrain__strategy_prepare(dtrain_strategy *strategy)
{
    const dtrain_allocator *a = &strategy->allocator;
    const dtrain_device_ops *ops = strategy->device->ops;
    const size_t count = strategy->param_count;
    dtrain__layout *layout = &strategy->layout;
    void *memory;
    const dtrain__model model = {a, strategy->params, count,
                                 dtrain_comm_size(strategy->groups.data)};
    DTRAIN__TRY(dtrain__steps_layout(layout, &model, &strategy->desc,
                                     dtrain_comm_rank(strategy->groups.data)));
    const size_t each = layout->owners ? (size_t)layout->ranks : layout->compression ? 2 : 1;
    strategy->works_per_bucket = each;
    strategy->shards = (dtrain_shard *)dtrain__alloc(a, count, sizeof *strategy->shards, "shards");
    strategy->sums =
        (float *)dtrain__alloc(a, 1 + count, sizeof *strategy->sums, "sums of weights");
    if (!strategy->shards || !strategy->sums) return DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i <= count; i++) strategy->sums[i] = 1; /* for an update before any finish */
    strategy->works =
        (dtrain_work **)dtrain__alloc(a, count, 2 * each * sizeof *strategy->works, "handles");
    if (!strategy->works) return DTRAIN_ERROR_MEMORY;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        layout->buckets[b].reduces = strategy->works + 2 * b * each;
        layout->buckets[b].gathers = layout->buckets[b].reduces + each;
    }
    DTRAIN__TRY(dtrain__check_layout(strategy));
    DTRAIN__TRY(dtrain__offload_open(strategy));
    for (int block = 0; block < DTRAIN__CLASSES; block++) {
        /* a cache line more: an empty tensor at the end has an address inside the block */
        const size_t bytes = layout->bytes[block] + DTRAIN__CACHE_LINE;
        if (block >= DTRAIN__BUFFERS && !layout->bytes[block]) continue;
        if (block == DTRAIN__HOST) DTRAIN__TRY(ops->host_alloc(strategy->device, bytes, &memory));
        else if (dtrain__block_is_read(layout, block))
            DTRAIN__TRY(dtrain_comm_alloc(strategy->groups.data, bytes, &memory));
        else DTRAIN__TRY(ops->alloc(strategy->device, bytes, &memory));
        if (block == DTRAIN__HOST) memset(memory, 0, bytes);
        layout->memory[block] = (char *)memory;
    }
    /* what ranks add up: squares of this rank and of the ranks of its model, then counts */
    const size_t squares = 1 + (size_t)dtrain_comm_size(strategy->groups.model);
    strategy->sums_bytes =
        squares * DTRAIN__SQUARES * sizeof(double) + (1 + count) * sizeof *strategy->notes.counts;
    DTRAIN__TRY(dtrain_comm_alloc(strategy->groups.data, strategy->sums_bytes, &memory));
    strategy->sum_squares = (double *)memory;
    strategy->notes.counts = (float *)(void *)(strategy->sum_squares + squares * DTRAIN__SQUARES);
    dtrain__steps_memory(layout);
    DTRAIN__TRY(dtrain__list_shards(strategy));
    DTRAIN__TRY(dtrain__steps_open(strategy));
    dtrain__rewind(strategy, true);
    strategy->slots[0] = strategy->slots[1] = strategy->position = DTRAIN__NONE;
    return DTRAIN_OK;
}

/* 5. Give every rank the values of parameters that the host owns. First rank 0 of each tensor axis
 * sends whole parameters. Then the first stage sends tied weights. Then rank 0 of the data axis
 * sends everything. */
static dtrain_result dtrain__share_host_values(dtrain_strategy *strategy)
{
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        const dtrain_dtype dtype = (dtrain_dtype)p->dtype;
        void *value = dtrain__host_value(p);
        if (p->state.storage != p || strategy->layout.entries[i].lends_value) continue;
        if (!dtrain__has_memory(p)) continue;
        if (strategy->groups.tensor && !p->cut.axis)
            DTRAIN__TRY(
                dtrain_broadcast(strategy->groups.tensor, value, (size_t)p->count, dtype, 0, NULL));
        if (strategy->ties[i])
            DTRAIN__TRY(
                dtrain_broadcast(strategy->ties[i], value, (size_t)p->count, dtype, 0, NULL));
        if (strategy->layout.all > 1)
            DTRAIN__TRY(
                dtrain_broadcast(strategy->groups.data, value, (size_t)p->count, dtype, 0, NULL));
    }
    return dtrain__copy_host_values(strategy, false);
}

/* Do steps 2 to 5, after all ranks have agreed that their arguments are valid and the same. */
static dtrain_result dtrain__strategy_complete(dtrain_strategy *strategy)
{
    DTRAIN__TRY(dtrain__strategy_choose(strategy));
    strategy->kind = dtrain__row_of(strategy->desc.kind);
    DTRAIN__TRY(dtrain__resolve_kind(&strategy->desc, strategy->kind));
    dtrain_result result = dtrain__steps_make(strategy);
    if (result == DTRAIN_OK) result = dtrain__split_ties(strategy);
    if (result == DTRAIN_OK) result = dtrain__strategy_prepare(strategy);
    DTRAIN__TRY(dtrain__agree(strategy->groups.all, result));
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__share_host_values(strategy)));
    strategy->desc.group_states = NULL; /* the caller's memory, which it may free from now on */
    strategy->desc.group_count = 0;
    strategy->pipeline.units = NULL;
    dtrain__fill_info(strategy);
    return dtrain_strategy_publish(strategy);
}

DTRAIN_API dtrain_result dtrain_strategy_create(dtrain_world *world, dtrain_param *params,
                                                size_t param_count,
                                                const dtrain_strategy_desc *desc,
                                                dtrain_strategy **out)
{
    if (out) *out = NULL;
    DTRAIN__GIVEN("dtrain_strategy_create", world);
    dtrain_strategy_desc own;
    dtrain_compression_desc how;
    dtrain_result result = dtrain__take_strategy(world, desc, &own, &how);
    const dtrain_mesh *mesh = dtrain_mesh_comm(own.mesh, DTRAIN_AXIS_ALL) ? own.mesh : NULL;
    const dtrain__groups groups = dtrain__mesh_groups(world, mesh, own.comm);
    if (result == DTRAIN_OK)
        result = dtrain__strategy_begin(world, params, param_count, &own, &groups, out);
    result = dtrain__compare_settings(out ? *out : NULL, &groups, result);
    if (result == DTRAIN_OK) result = dtrain__strategy_complete(*out);
    if (result != DTRAIN_OK && out) dtrain_strategy_destroy(*out);
    if (result != DTRAIN_OK && out) *out = NULL;
    return result;
}

/* ---- Life -------------------------------------------------------------------------------------*/

/* Wait for the collectives under way. In the middle of a backward other ranks wait for the rest of
 * it: then fail the communicators with this rank's last error, which is the likely reason why it
 * gave up and stays its last error. A unit that is being fetched is no reason to fail. */
static void dtrain__strategy_abandon(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    char before[DTRAIN__ERROR_BYTES], text[DTRAIN__ERROR_BYTES];
    const dtrain_result code = *dtrain__last_code();
    memcpy(before, dtrain_last_error(), sizeof before);
    snprintf(text, sizeof text,
             "dtrain_strategy_destroy: called between ready and finish, in the middle of a "
             "backward%s%s",
             before[0] ? "; the last error here was: " : "", dtrain__bare(before));
    if (dtrain_comm_size(strategy->groups.all) > 1 && dtrain__in_backward(strategy))
        dtrain__strategy_fail(strategy, DTRAIN_ERROR_USAGE, text);
    (void)dtrain_work_wait(strategy->counts_work);
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__wait_works(strategy, layout->buckets[b].reduces);
        dtrain__wait_works(strategy, layout->buckets[b].gathers);
    }
    if (before[0]) (void)dtrain__set_last_error(code, before);
}

DTRAIN_API void dtrain_strategy_destroy(dtrain_strategy *strategy)
{
    if (!strategy) return;
    const dtrain_allocator a = strategy->allocator;
    const size_t count = strategy->param_count;
    dtrain__layout *layout = &strategy->layout;
    dtrain_device *device = strategy->device;
    if (strategy->works) dtrain__strategy_abandon(strategy);
    for (size_t i = 0; layout->entries && i < count; i++) { /* clear the params' pointers to it */
        const dtrain__entry *entry = &layout->entries[i];
        dtrain_param *p = &strategy->params[i];
        const bool typed = p->dtype != DTRAIN_DTYPE_F32; /* value and grad are the library's */
        if (entry->lends_value || typed) p->value = NULL;
        if (entry->lends_grad || typed) p->grad = NULL;
        if (entry->lends_value || !typed) p->typed_value = NULL;
        if (entry->lends_grad || !typed) p->typed_grad = NULL;
    }
    dtrain__offload_close(strategy);
    for (int block = 0; block < DTRAIN__CLASSES; block++) {
        const size_t bytes = layout->bytes[block] + DTRAIN__CACHE_LINE;
        if (!layout->memory[block]) continue;
        if (block == DTRAIN__HOST) device->ops->host_free(device, layout->memory[block], bytes);
        else if (dtrain__block_is_read(layout, block))
            dtrain_comm_free(strategy->groups.data, layout->memory[block], bytes);
        else device->ops->free(device, layout->memory[block], bytes);
    }
    if (strategy->sum_squares)
        dtrain_comm_free(strategy->groups.data, strategy->sum_squares, strategy->sums_bytes);
    dtrain__free(&a, strategy->sums, 1 + count, sizeof *strategy->sums);
    dtrain__free(&a, strategy->gathered, (size_t)dtrain_comm_size(strategy->groups.all),
                 DTRAIN__SQUARES * sizeof *strategy->gathered);
    dtrain__free(&a, strategy->hashes, count, sizeof *strategy->hashes);
    dtrain__free(&a, strategy->kept, count, sizeof *strategy->kept);
    dtrain__free(&a, strategy->shards, count, sizeof *strategy->shards);
    dtrain__free(&a, strategy->works, count,
                 2 * strategy->works_per_bucket * sizeof *strategy->works);
    dtrain__steps_layout_free(layout, &a);
    dtrain__close_ties(strategy);
    dtrain__free(&a, strategy->ties, count, sizeof *strategy->ties);
    dtrain__stage_map_free(&strategy->stages, &a);
    for (size_t i = 0; i < strategy->owned_count; i++) dtrain_comm_destroy(strategy->owned[i]);
    dtrain__free(&a, strategy, 1, sizeof *strategy);
}
