/* Whole values: gather updated shards, read a whole parameter */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* ---- Whole values, updated by shards ----------------------------------------------------------*/

/* Return the host's array of a storage's whole value, or of its gradient, in the host's type. */
DTRAIN__PRIVATE void *dtrain__host_value(const dtrain_param *storage)
{
    return storage->dtype ? storage->typed_value : storage->value;
}

DTRAIN__PRIVATE void *dtrain__host_grad(const dtrain_param *storage)
{
    return storage->dtype ? storage->typed_grad : storage->grad;
}

/* Copy whole values between memory of the strategy (flat buckets of ZERO1 and SHARD_GRAD_OP,
 * masters) and the host's arrays, or arrays in the host's type. */
DTRAIN__PRIVATE dtrain_result dtrain__copy_host_values(dtrain_strategy *strategy, bool to_host)
{
    const dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        const dtrain__entry *entry = &layout->entries[i];
        const dtrain__bucket *bucket = dtrain__shard_bucket(layout, i);
        float *inside = bucket ? dtrain__after(bucket->values, entry->offset) : entry->own_value;
        void *array = dtrain__host_value(p);
        if (p->state.storage != p || (bucket && layout->shards.params)) continue;
        if (!inside || array == inside) continue;
        if (to_host)
            DTRAIN__TRY(
                dtrain__convert(strategy, p->count, inside, layout->dtype, array, p->dtype));
        else if (!entry->lends_value)
            DTRAIN__TRY(
                dtrain__convert(strategy, p->count, array, p->dtype, inside, layout->dtype));
    }
    return DTRAIN_OK;
}

/* Gather updated shards for kinds that keep whole values (ZERO1, SHARD_GRAD_OP). All buckets are
 * under way before one is waited for. */
DTRAIN__PRIVATE dtrain_result dtrain__gather_shards(dtrain_strategy *strategy)
{
    dtrain__bucket *const first = strategy->layout.buckets;
    dtrain__bucket *const end = first + strategy->layout.bucket_count;
    for (dtrain__bucket *b = first; b < end; b++)
        if (b->sharded) DTRAIN__TRY(dtrain__gather_start(strategy, b, DTRAIN_DTYPE_F32));
    for (dtrain__bucket *b = first; b < end; b++)
        if (b->sharded) DTRAIN__TRY(dtrain__gather_inside(strategy, b, DTRAIN_DTYPE_F32));
    for (dtrain__bucket *b = first; b < end; b++)
        DTRAIN__TRY(dtrain__wait_works(strategy, b->gathers));
    return DTRAIN_OK;
}

/* ---- Whole parameters -------------------------------------------------------------------------*/

/* Make *whole the storage i with its whole value, in the bits of the shards, valid until the next
 * call. In fp64 `value` is only the address. If units are gathered rounded, a slot does not have
 * these bits: then gather the parameter's bucket in fp32 into the slot; the unit becomes ABSENT. */
DTRAIN__PRIVATE dtrain_result dtrain__whole_param(dtrain_strategy *strategy, size_t i,
                                                  dtrain_param *whole)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain__bucket *bucket = dtrain__shard_bucket(layout, i);
    *whole = strategy->params[i];
    if (layout->dtype == DTRAIN_DTYPE_F64) whole->value = (float *)whole->typed_value;
    if (!layout->shards.params || !bucket) return DTRAIN_OK;
    dtrain__unit *unit = dtrain__unit_at(strategy, bucket->unit);
    whole->value = bucket->values + layout->entries[i].offset;
    if (strategy->desc.param_dtype == DTRAIN_DTYPE_F32) return dtrain__unit_need(strategy, unit);
    DTRAIN__TRY(dtrain__unit_evict(strategy, unit));
    DTRAIN__TRY(dtrain__claim_slot(strategy, unit));
    DTRAIN__TRY(dtrain__gather_start(strategy, bucket, DTRAIN_DTYPE_F32));
    return dtrain__gather_wait(strategy, bucket, DTRAIN_DTYPE_F32);
}

/* Keep the states of all units before whole parameters are read. */
DTRAIN__PRIVATE void dtrain__note_units(dtrain_strategy *strategy)
{
    for (size_t u = 0; u <= strategy->layout.unit_count; u++) {
        dtrain__unit *unit = dtrain__unit_at(strategy, u);
        unit->before = unit->state;
    }
}

/* Gather the units that reading has evicted: a tape or a host uses their values. */
DTRAIN__PRIVATE dtrain_result dtrain__restore_units(dtrain_strategy *strategy)
{
    for (size_t u = 0; u <= strategy->layout.unit_count; u++) {
        dtrain__unit *unit = dtrain__unit_at(strategy, u);
        if (unit->before == DTRAIN__UNIT_ABSENT) continue;
        DTRAIN__TRY(dtrain__unit_need(strategy, unit));
        if (unit->before == DTRAIN__UNIT_SHOWN) dtrain__unit_show(strategy, unit, true);
    }
    return DTRAIN_OK;
}

/* ---- Reading ----------------------------------------------------------------------------------*/

/* Read a parameter that the tensor axis cuts, if this rank has it. Each rank broadcasts its part
 * through `staging`, which fits the largest part. Collective over the mesh. */
static dtrain_result dtrain__read_parts(dtrain_strategy *strategy, const dtrain_param *part,
                                        float *host)
{
    const dtrain__groups *groups = &strategy->groups;
    dtrain__share share;
    size_t most = 0;
    for (int r = 0; r < groups->tensor_ranks; r++) {
        dtrain__share_of(&part->cut, part->shape, groups->tensor_ranks, r, &share);
        if ((size_t)share.count > most) most = (size_t)share.count;
    }
    float *staging = (float *)dtrain__alloc(&strategy->allocator, most, sizeof *staging,
                                            "a part of a parameter");
    dtrain_result result = dtrain__agree(groups->all, staging ? DTRAIN_OK : DTRAIN_ERROR_MEMORY);
    for (int r = 0; r < groups->tensor_ranks && part->count && result == DTRAIN_OK; r++) {
        dtrain__share_of(&part->cut, part->shape, groups->tensor_ranks, r, &share);
        if (r == groups->tensor_rank)
            result = dtrain_device_copy(strategy->device, staging, part->value,
                                        (size_t)share.count * sizeof *staging);
        if (result == DTRAIN_OK)
            result = dtrain_broadcast(groups->tensor, staging, (size_t)share.count,
                                      DTRAIN_DTYPE_F32, r, NULL);
        result = dtrain__strategy_keep(strategy, result);
        for (int64_t i = 0, run; i < share.count && result == DTRAIN_OK; i += run) {
            const int64_t at = dtrain__share_place(&share, i, &run);
            memcpy(host + at, staging + i, (size_t)run * sizeof *host);
        }
    }
    dtrain__free(&strategy->allocator, staging, most, sizeof *staging);
    return result;
}

DTRAIN_API dtrain_result dtrain_strategy_read(dtrain_strategy *strategy, size_t index, void *host)
{
    dtrain_param whole;
    DTRAIN__TRY(dtrain__between_backwards(strategy, "dtrain_strategy_read"));
    if (index >= strategy->param_count || !host)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_read: host is NULL, or index %zu is not below %zu",
                           index, strategy->param_count);
    const size_t storage = strategy->params[index].state.storage->state.index;
    dtrain__note_units(strategy);
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__whole_param(strategy, storage, &whole)));
    dtrain_result result = DTRAIN_OK;
    if (strategy->groups.tensor && whole.cut.axis)
        result = dtrain__read_parts(strategy, &whole, (float *)host);
    else if (whole.count)
        result = dtrain_device_copy(strategy->device, host, whole.value,
                                    (size_t)dtrain__words(&strategy->layout, whole.count) *
                                        sizeof(float));
    if (strategy->groups.pipeline && result == DTRAIN_OK) /* from the first stage that has it */
        result = dtrain__strategy_keep(
            strategy,
            dtrain_broadcast(strategy->groups.pipeline, host, (size_t)dtrain__whole_count(&whole),
                             DTRAIN_DTYPE_F32, dtrain__stage_first(strategy, storage), NULL));
    DTRAIN__TRY(dtrain__strategy_keep(strategy, dtrain__restore_units(strategy)));
    return result;
}
