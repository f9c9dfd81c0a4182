/* Sharded values: gather, release
 *
 * The values of a unit come and go, in kinds that shard parameters (the states are drawn at
 * dtrain__unit, strategy/layout_internal.h). Two slots: one is used while the other one is filled:
 *
 *     forward    gather 0    gather 1    gather 2    gather 3   | backward  gather 2   gather 1 ...
 *     slot 0     [ 0 SHOWN ] [ 2 COMING ][ 2 SHOWN ]. . . . . . |. . . . .  [ 2 SHOWN ][ 0 COMING ]
 *     slot 1     [ 1 COMING ][ 1 SHOWN ] [ 3 COMING ][ 3 SHOWN .| . . . ]   [ 1 COMING][ 1 SHOWN ]
 *
 * Unit u uses slot u % 2 (dtrain__lay_values), so its addresses are the same at every gather, and
 * what the tape has recorded stays right. Memory is constant: two units, however deep the model.
 * Units that are still in their slots are not gathered again (3 and 2 at the turn above).
 *
 * Why a slot may be overwritten: gather(u) comes after release(u - 1), and fetches ahead only into
 * that unit's slot. On a device with streams a collective starts behind the kernels queued before.
 *
 * Every rank has to start the same collectives in the same order: a rank that started others would
 * get another unit's numbers when the sizes happen to agree. In forward all ranks gather the same
 * units; in backward, where gradients may be missing on one of them, dtrain__walk_back (road.c)
 * makes their order the same. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* ---- One bucket -------------------------------------------------------------------------------*/

/* Start gathering a bucket's values, as dtype. With ZERO3 shards have different lengths, and each
 * owner broadcasts its own. With several nodes it takes two collectives: this one gathers this
 * rank's slice from the other nodes, dtrain__gather_inside the slices of this node.
 *
 * A shard is rounded anew for each gather. A rounded copy that the optimizer writes beside the
 * master would save that, 6 bytes an element twice a step beside the 28 of AdamW, and cost 2 bytes
 * of memory an element: measured on the CPU it is 4 ms of a step of 3 s (FULL_SHARD, 2 ranks, 12.6
 * million parameters, 512 tokens a rank), which is why there is none. */
static dtrain_result dtrain__gather_start(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                          dtrain_dtype dtype)
{
    const size_t unit = dtrain_dtype_bytes(dtype);
    const bool low = dtype != DTRAIN_DTYPE_F32, nodes = strategy->layout.node_ranks > 1;
    char *whole = low ? (char *)bucket->low_values : (char *)bucket->values;
    char *own = whole + (size_t)bucket->shard_first * unit;
    const void *shard = bucket->value_shard;
    if (bucket->value_on_host) {
        DTRAIN__TRY(dtrain__host_bring(strategy, bucket));
        shard = bucket->values + bucket->shard_first;
    }
    if ((low || bucket->cuts) && shard != own) {
        DTRAIN__TRY(
            dtrain__convert(strategy, bucket->shard_count, shard, DTRAIN_DTYPE_F32, own, dtype));
        shard = own;
    }
    if (!bucket->cuts) dtrain__label(strategy, bucket, "values of bucket");
    if (!bucket->cuts)
        return dtrain_all_gather(nodes ? strategy->extra[DTRAIN__FETCH_ACROSS]
                                       : strategy->groups.copy,
                                 shard, nodes ? whole + (size_t)bucket->slice_first * unit : whole,
                                 (size_t)bucket->shard_count, dtype, bucket->gathers);
    for (int r = 0; r < strategy->layout.ranks; r++) {
        const int64_t first = bucket->cuts[r], count = bucket->cuts[r + 1] - first;
        if (count == 0) continue;
        dtrain__label(strategy, bucket, "values of bucket");
        DTRAIN__TRY(dtrain_broadcast(strategy->groups.copy, whole + (size_t)first * unit,
                                     (size_t)count, dtype, r, &bucket->gathers[r]));
    }
    return DTRAIN_OK;
}

/* With several nodes, wait for the first collective and start the second one. */
static dtrain_result dtrain__gather_inside(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                           dtrain_dtype dtype)
{
    const bool low = dtype != DTRAIN_DTYPE_F32;
    char *whole = low ? (char *)bucket->low_values : (char *)bucket->values;
    if (strategy->layout.node_ranks == 1) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__wait_works(strategy, bucket->gathers));
    dtrain__label(strategy, bucket, "values of bucket");
    return dtrain_all_gather(strategy->extra[DTRAIN__FETCH],
                             whole + (size_t)bucket->slice_first * dtrain_dtype_bytes(dtype), whole,
                             (size_t)bucket->slice_count, dtype, bucket->gathers);
}

/* Wait until a bucket's values, as dtype, have been gathered. */
static dtrain_result dtrain__gather_wait(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                         dtrain_dtype dtype)
{
    DTRAIN__TRY(dtrain__gather_inside(strategy, bucket, dtype));
    return dtrain__wait_works(strategy, bucket->gathers);
}

/* Point the parameters of a bucket at its values, or at nothing. */
static void dtrain__show_values(dtrain_strategy *strategy, const dtrain__bucket *bucket, bool shown)
{
    const dtrain__layout *layout = &strategy->layout;
    if (!bucket) return;
    for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++) {
        dtrain_param *p = &strategy->params[i];
        const dtrain__entry *storage = &layout->entries[p->state.storage->state.index];
        if (storage->bucket == bucket) p->value = shown ? bucket->values + storage->offset : NULL;
    }
}

/* ---- One unit: the arrows of its drawing ------------------------------------------------------*/

/* Return unit number u; behind the last one comes that of parameters that several units use. */
static dtrain__unit *dtrain__unit_at(dtrain_strategy *strategy, size_t u)
{
    dtrain__layout *layout = &strategy->layout;
    return u < layout->unit_count ? &layout->units[u] : &layout->shared;
}

/* COMING -> HERE: wait for the collectives, and convert what travelled rounded. */
static dtrain_result dtrain__unit_wait(dtrain_strategy *strategy, dtrain__unit *unit)
{
    const dtrain_dtype dtype = (dtrain_dtype)strategy->desc.param_dtype;
    dtrain__bucket *const buckets[] = {unit->trainable, unit->frozen};
    if (unit->state != DTRAIN__UNIT_COMING) return DTRAIN_OK;
    for (int i = 0; i < 2; i++) {
        dtrain__bucket *bucket = buckets[i];
        if (!bucket) continue;
        DTRAIN__TRY(dtrain__gather_wait(strategy, bucket, dtype));
        if (dtype != DTRAIN_DTYPE_F32)
            DTRAIN__TRY(dtrain__convert(strategy, bucket->count, bucket->low_values, dtype,
                                        bucket->values, DTRAIN_DTYPE_F32));
    }
    unit->state = DTRAIN__UNIT_HERE;
    return DTRAIN_OK;
}

/* HERE -> SHOWN, or back: set the parameters' pointers. */
static void dtrain__unit_show(dtrain_strategy *strategy, dtrain__unit *unit, bool shown)
{
    dtrain__show_values(strategy, unit->trainable, shown);
    dtrain__show_values(strategy, unit->frozen, shown);
    if (unit->state >= DTRAIN__UNIT_HERE)
        unit->state = shown ? DTRAIN__UNIT_SHOWN : DTRAIN__UNIT_HERE;
}

/* Any state -> ABSENT, after the collectives under way. */
static dtrain_result dtrain__unit_evict(dtrain_strategy *strategy, dtrain__unit *unit)
{
    DTRAIN__TRY(dtrain__unit_wait(strategy, unit));
    dtrain__unit_show(strategy, unit, false);
    unit->state = DTRAIN__UNIT_ABSENT;
    return DTRAIN_OK;
}

/* Make the slot of a unit, if it has one, free: evict the unit that is there. */
static dtrain_result dtrain__claim_slot(dtrain_strategy *strategy, const dtrain__unit *unit)
{
    if (unit->own_memory) return DTRAIN_OK;
    const uint32_t at = (uint32_t)(unit - strategy->layout.units);
    const uint32_t before = strategy->slots[at & 1];
    strategy->slots[at & 1] = at;
    if (before == at || before == DTRAIN__NONE) return DTRAIN_OK;
    return dtrain__unit_evict(strategy, &strategy->layout.units[before]);
}

/* ABSENT -> COMING: start the collectives. A unit without sharded values takes no slot. */
static dtrain_result dtrain__unit_fetch(dtrain_strategy *strategy, dtrain__unit *unit)
{
    const dtrain_dtype dtype = (dtrain_dtype)strategy->desc.param_dtype;
    if (unit->state != DTRAIN__UNIT_ABSENT) return DTRAIN_OK;
    if (!unit->trainable && !unit->frozen) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__claim_slot(strategy, unit));
    unit->state = DTRAIN__UNIT_COMING;
    if (unit->trainable) DTRAIN__TRY(dtrain__gather_start(strategy, unit->trainable, dtype));
    return unit->frozen ? dtrain__gather_start(strategy, unit->frozen, dtype) : DTRAIN_OK;
}

/* ABSENT -> COMING -> HERE: both buckets are under way before either is waited for. */
static dtrain_result dtrain__unit_need(dtrain_strategy *strategy, dtrain__unit *unit)
{
    DTRAIN__TRY(dtrain__unit_fetch(strategy, unit));
    return dtrain__unit_wait(strategy, unit);
}

/* ---- What the road asks for -------------------------------------------------------------------*/

/* Bring unit number `at`, and fetch `next`, to which the pass will come next. The unit of shared
 * parameters stays until publish. */
DTRAIN__PRIVATE dtrain_result dtrain__bring_unit(dtrain_strategy *strategy, uint32_t at,
                                                 uint32_t next)
{
    dtrain__layout *layout = &strategy->layout;
    strategy->position = at;
    if (!layout->shards.params) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__unit_need(strategy, &layout->shared));
    DTRAIN__TRY(dtrain__unit_need(strategy, &layout->units[at]));
    if (strategy->desc.no_overlap || next >= layout->unit_count) return DTRAIN_OK;
    return dtrain__unit_fetch(strategy, &layout->units[next]);
}

/* Show unit number `at`, which has been brought, or set its pointers to NULL, so that a use after
 * release is noticed; its values stay in the slot until another unit takes it. */
DTRAIN__PRIVATE void dtrain__show_unit(dtrain_strategy *strategy, uint32_t at, bool shown)
{
    if (!strategy->layout.shards.params) return;
    if (shown) dtrain__unit_show(strategy, &strategy->layout.shared, true);
    dtrain__unit_show(strategy, &strategy->layout.units[at], shown);
}

/* Wait for all units that are COMING. */
DTRAIN__PRIVATE dtrain_result dtrain__settle_gathers(dtrain_strategy *strategy)
{
    for (size_t u = 0; u <= strategy->layout.unit_count; u++)
        DTRAIN__TRY(dtrain__unit_wait(strategy, dtrain__unit_at(strategy, u)));
    return DTRAIN_OK;
}

/* Evict all units, because their shards have been updated. */
DTRAIN__PRIVATE dtrain_result dtrain__forget_units(dtrain_strategy *strategy)
{
    for (size_t u = 0; u <= strategy->layout.unit_count; u++)
        DTRAIN__TRY(dtrain__unit_evict(strategy, dtrain__unit_at(strategy, u)));
    strategy->slots[0] = strategy->slots[1] = strategy->position = DTRAIN__NONE;
    return DTRAIN_OK;
}

/* Tell whether gathers bring a parameter's value as `dtype`; *low is then its address (NULL in a
 * plan). *passing: the value is there only while its unit is gathered. */
DTRAIN__PRIVATE bool dtrain__gathered_as(const dtrain__layout *layout, const dtrain_param *storage,
                                         uint32_t dtype, const void **low, bool *passing)
{
    const size_t i = storage->state.index;
    *passing = false;
    if (!layout || !layout->shards.params || i >= layout->count || storage != &layout->params[i])
        return false;
    const dtrain__bucket *bucket = dtrain__shard_bucket(layout, i);
    if (!bucket) return false;
    *passing = bucket->unit != DTRAIN__NONE && !layout->units[bucket->unit].own_memory;
    if (layout->desc->param_dtype != dtype) return false;
    *low = bucket->low_values ? bucket->low_values + layout->entries[i].offset : NULL;
    return true;
}

/* ---- Whole values, updated by shards ----------------------------------------------------------*/

/* Copy values between the flat buckets of ZERO1 and SHARD_GRAD_OP and arrays of the host's
 * own. */
DTRAIN__PRIVATE dtrain_result dtrain__copy_host_values(dtrain_strategy *strategy, bool to_host)
{
    const dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        const dtrain__entry *entry = &layout->entries[i];
        const dtrain__bucket *bucket = dtrain__shard_bucket(layout, i);
        if (p->state.storage != p || entry->lends_value || !bucket) continue;
        float *place = bucket->values + entry->offset;
        DTRAIN__TRY(dtrain_device_copy(strategy->device, to_host ? p->value : place,
                                       to_host ? place : p->value,
                                       (size_t)p->count * sizeof(float)));
    }
    return DTRAIN_OK;
}

/* Gather updated shards, for kinds that keep whole values (ZERO1, SHARD_GRAD_OP): all
 * buckets are under way before one is waited for. */
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
    return dtrain__copy_host_values(strategy, true);
}

/* ---- Whole parameters -------------------------------------------------------------------------*/

/* Make *whole storage i with its value whole, with the bits that the shards have; it is valid until
 * the next call. Where units are gathered rounded, a slot does not have those: then the parameter's
 * bucket is gathered in fp32 into the slot, and its unit counts as ABSENT. */
DTRAIN__PRIVATE dtrain_result dtrain__whole_param(dtrain_strategy *strategy, size_t i,
                                                  dtrain_param *whole)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain__bucket *bucket = dtrain__shard_bucket(layout, i);
    *whole = strategy->params[i];
    if (!layout->shards.params || !bucket) return DTRAIN_OK;
    dtrain__unit *unit = dtrain__unit_at(strategy, bucket->unit);
    whole->value = bucket->values + layout->entries[i].offset;
    if (strategy->desc.param_dtype == DTRAIN_DTYPE_F32) return dtrain__unit_need(strategy, unit);
    DTRAIN__TRY(dtrain__unit_evict(strategy, unit));
    DTRAIN__TRY(dtrain__claim_slot(strategy, unit));
    DTRAIN__TRY(dtrain__gather_start(strategy, bucket, DTRAIN_DTYPE_F32));
    return dtrain__gather_wait(strategy, bucket, DTRAIN_DTYPE_F32);
}

/* Note the states of all units before whole parameters are read. */
DTRAIN__PRIVATE void dtrain__note_units(dtrain_strategy *strategy)
{
    for (size_t u = 0; u <= strategy->layout.unit_count; u++) {
        dtrain__unit *unit = dtrain__unit_at(strategy, u);
        unit->before = unit->state;
    }
}

/* Bring back the units that reading has displaced: a tape or a host that has gathered a unit counts
 * on its values. */
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
