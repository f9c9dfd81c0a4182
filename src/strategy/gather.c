/* Sharded parameters: gather, release
 *
 * A unit's life in a step, in kinds that shard parameters; two slots, one being used while the
 * other is filled:
 *
 *     forward    gather 0    gather 1    gather 2    gather 3   | backward  gather 2   gather 1 ...
 *     slot 0     [ 0 used ]  [ 2 coming ][ 2 used ] . . . . . . |. . . . .  [ 2 used ] [ 0 coming ]
 *     slot 1     [ 1 coming ][ 1 used ]  [ 3 coming ][ 3 used . | used ]    [ 1 coming][ 1 used ]
 *
 * Unit u lives in slot u % 2, so its addresses are the same whenever it is there, and what the tape
 * has recorded stays right. Memory is constant: two units, however deep the model. What is still in
 * a slot is not fetched again (units 3 and 2 at the turn above).
 *
 * Why a slot may be overwritten: gather(u) comes after release(u - 1), and fetches ahead only into
 * that unit's slot. On a device with streams a collective starts behind the work queued before it.
 *
 * Every rank has to start the same collectives in the same order: one that went another way would
 * get another unit's numbers when the sizes happen to agree. In forward all ranks gather the same
 * units. In backward they may differ, because gradients may be missing on one of them: whatever is
 * called, the walk is the same, dtrain__walk_back.
 *
 * A forward inside a backward does not say where it will end, and a rank that has stepped over
 * units cannot know how far the others have come. So it walks back to the unit behind the first
 * that it gathers, on every rank: both are in their slots then. A forward of more units needs to
 * know the last of them, which is gathered for backward before. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

enum { DTRAIN__ABSENT, DTRAIN__COMING, DTRAIN__HERE };

/* ---- One bucket -------------------------------------------------------------------------------*/

/* Start bringing a bucket's values together, as dtype. With ZERO3 slices have different lengths,
 * and each owner broadcasts its own. With nodes it takes two turns: this one gathers the parts of
 * this rank's hop from the other nodes.
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
    if (bucket->value_home->bring) {
        DTRAIN__TRY(bucket->value_home->bring(strategy, bucket));
        shard = bucket->values + bucket->shard_first;
    }
    if ((low || bucket->cuts) && shard != own) {
        DTRAIN__TRY(
            dtrain__convert(strategy, bucket->shard_count, shard, DTRAIN_DTYPE_F32, own, dtype));
        shard = own;
    }
    if (!bucket->cuts) dtrain__label(strategy, bucket, "values of bucket");
    if (!bucket->cuts)
        return dtrain_all_gather(nodes ? strategy->groups[DTRAIN__FETCH_ACROSS]
                                       : strategy->shard_comm,
                                 shard, nodes ? whole + (size_t)bucket->hop_first * unit : whole,
                                 (size_t)bucket->shard_count, dtype, bucket->gathers);
    for (int r = 0; r < strategy->layout.ranks; r++) {
        const int64_t first = bucket->cuts[r], count = bucket->cuts[r + 1] - first;
        if (count == 0) continue;
        dtrain__label(strategy, bucket, "values of bucket");
        DTRAIN__TRY(dtrain_broadcast(strategy->shard_comm, whole + (size_t)first * unit,
                                     (size_t)count, dtype, r, &bucket->gathers[r]));
    }
    return DTRAIN_OK;
}

/* With nodes, wait for the first turn and start the second: the hops of a node to all its ranks. */
static dtrain_result dtrain__gather_inside(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                           dtrain_dtype dtype)
{
    const bool low = dtype != DTRAIN_DTYPE_F32;
    char *whole = low ? (char *)bucket->low_values : (char *)bucket->values;
    if (strategy->layout.node_ranks == 1) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__wait_works(strategy, bucket->gathers));
    dtrain__label(strategy, bucket, "values of bucket");
    return dtrain_all_gather(strategy->groups[DTRAIN__FETCH],
                             whole + (size_t)bucket->hop_first * dtrain_dtype_bytes(dtype), whole,
                             (size_t)bucket->hop_count, dtype, bucket->gathers);
}

/* Wait until a bucket's values have come together, as dtype. */
static dtrain_result dtrain__gather_wait(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                         dtrain_dtype dtype)
{
    DTRAIN__TRY(dtrain__gather_inside(strategy, bucket, dtype));
    return dtrain__wait_works(strategy, bucket->gathers);
}

/* Wait for a bucket's values, if they are coming. */
static dtrain_result dtrain__gather_end(dtrain_strategy *strategy, uint32_t b)
{
    const dtrain_dtype dtype = (dtrain_dtype)strategy->desc.param_dtype;
    if (b == DTRAIN__NONE) return DTRAIN_OK;
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    if (bucket->presence != DTRAIN__COMING) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__gather_wait(strategy, bucket, dtype));
    bucket->presence = DTRAIN__HERE;
    if (dtype == DTRAIN_DTYPE_F32) return DTRAIN_OK;
    return dtrain__convert(strategy, bucket->count, bucket->low_values, dtype, bucket->values,
                           DTRAIN_DTYPE_F32);
}

/* Point the parameters of a bucket at its values, or at nothing. */
static void dtrain__show_values(dtrain_strategy *strategy, uint32_t b, bool here)
{
    const dtrain__layout *layout = &strategy->layout;
    if (b == DTRAIN__NONE) return;
    const dtrain__bucket *bucket = &layout->buckets[b];
    for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++) {
        dtrain_param *p = &strategy->params[i];
        const dtrain__entry *storage = &layout->entries[p->state.storage->state.index];
        if (storage->bucket == b) p->value = here ? bucket->values + storage->offset : NULL;
    }
}

/* Take a bucket's values away, after waiting for them if they are still coming. */
static dtrain_result dtrain__evict(dtrain_strategy *strategy, uint32_t b)
{
    DTRAIN__TRY(dtrain__gather_end(strategy, b));
    dtrain__show_values(strategy, b, false);
    if (b != DTRAIN__NONE) strategy->layout.buckets[b].presence = DTRAIN__ABSENT;
    return DTRAIN_OK;
}

/* Make the slot of a bucket's unit, if it has one, free: the unit that is there is evicted. */
static dtrain_result dtrain__claim_slot(dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    if (!bucket->slotted) return DTRAIN_OK;
    const uint32_t before = strategy->slots[bucket->unit & 1];
    strategy->slots[bucket->unit & 1] = bucket->unit;
    if (before == bucket->unit || before == DTRAIN__NONE) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__evict(strategy, strategy->layout.units[before].trainable));
    return dtrain__evict(strategy, strategy->layout.units[before].frozen);
}

/* Start to gather a bucket that is not there. */
static dtrain_result dtrain__fetch_bucket(dtrain_strategy *strategy, uint32_t b)
{
    if (b == DTRAIN__NONE) return DTRAIN_OK;
    dtrain__bucket *bucket = &strategy->layout.buckets[b];
    if (bucket->presence != DTRAIN__ABSENT) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__claim_slot(strategy, bucket));
    bucket->presence = DTRAIN__COMING;
    return dtrain__gather_start(strategy, bucket, (dtrain_dtype)strategy->desc.param_dtype);
}

/* Return unit number u; behind the last comes what several units use. */
static dtrain__unit *dtrain__unit_at(dtrain_strategy *strategy, size_t u)
{
    dtrain__layout *layout = &strategy->layout;
    return u < layout->unit_count ? &layout->units[u] : &layout->shared;
}

/* Forget what was gathered, because the shards have been updated since. */
DTRAIN__PRIVATE dtrain_result dtrain__forget_units(dtrain_strategy *strategy)
{
    for (uint32_t b = 0; b < strategy->layout.bucket_count; b++)
        if (strategy->layout.buckets[b].sharded) DTRAIN__TRY(dtrain__evict(strategy, b));
    for (size_t u = 0; u <= strategy->layout.unit_count; u++)
        dtrain__unit_at(strategy, u)->shown = false;
    strategy->slots[0] = strategy->slots[1] = strategy->position = DTRAIN__NONE;
    return DTRAIN_OK;
}

/* Wait for all units that are on their way. */
DTRAIN__PRIVATE dtrain_result dtrain__settle_gathers(dtrain_strategy *strategy)
{
    for (uint32_t b = 0; b < strategy->layout.bucket_count; b++)
        DTRAIN__TRY(dtrain__gather_end(strategy, b));
    return DTRAIN_OK;
}

/* ---- One unit ---------------------------------------------------------------------------------*/

/* Start to gather what is not there of a unit. */
static dtrain_result dtrain__fetch_unit(dtrain_strategy *strategy, const dtrain__unit *unit)
{
    DTRAIN__TRY(dtrain__fetch_bucket(strategy, unit->trainable));
    return dtrain__fetch_bucket(strategy, unit->frozen);
}

/* Wait for a unit: both its buckets are under way before either is waited for. */
static dtrain_result dtrain__need_unit(dtrain_strategy *strategy, const dtrain__unit *unit)
{
    DTRAIN__TRY(dtrain__fetch_unit(strategy, unit));
    DTRAIN__TRY(dtrain__gather_end(strategy, unit->trainable));
    return dtrain__gather_end(strategy, unit->frozen);
}

DTRAIN__PRIVATE void dtrain__show_unit(dtrain_strategy *strategy, dtrain__unit *unit, bool here)
{
    unit->shown = here;
    dtrain__show_values(strategy, unit->trainable, here);
    dtrain__show_values(strategy, unit->frozen, here);
}

/* Bring a unit, and fetch the one that the pass will come to next. */
DTRAIN__PRIVATE dtrain_result dtrain__bring_unit(dtrain_strategy *strategy, uint32_t at,
                                                 uint32_t next)
{
    const dtrain__layout *layout = &strategy->layout;
    strategy->position = at;
    if (!layout->shards.params) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__need_unit(strategy, &layout->shared)); /* stays until publish */
    DTRAIN__TRY(dtrain__need_unit(strategy, &layout->units[at]));
    if (strategy->desc.no_overlap || next >= layout->unit_count) return DTRAIN_OK;
    return dtrain__fetch_unit(strategy, &layout->units[next]);
}

/* Tell where the tape finds a parameter's value of the type `dtype`: true, and *low is its address
 * (NULL in a plan), where a gather brings it so. *passing: the value is there only while its unit
 * is gathered. */
DTRAIN__PRIVATE bool dtrain__gathered_as(const dtrain__layout *layout, const dtrain_param *storage,
                                         uint32_t dtype, const void **low, bool *passing)
{
    const size_t i = storage->state.index;
    *passing = false;
    if (!layout || !layout->shards.params || i >= layout->count || storage != &layout->params[i] ||
        dtrain__value_is_whole(layout, &layout->entries[i]))
        return false;
    const dtrain__entry *entry = &layout->entries[i];
    const dtrain__bucket *bucket = &layout->buckets[entry->bucket];
    *passing = bucket->slotted;
    if (layout->desc->param_dtype != dtype) return false;
    *low = bucket->low_values ? bucket->low_values + entry->offset : NULL;
    return true;
}

/* ---- Whole values, updated by slices ----------------------------------------------------------*/

/* Copy values between the flat buckets of ZERO1 and SHARD_GRAD_OP and arrays of the host's
 * own. */
DTRAIN__PRIVATE dtrain_result dtrain__copy_host_values(dtrain_strategy *strategy, bool to_host)
{
    const dtrain__layout *layout = &strategy->layout;
    for (size_t i = 0; i < strategy->param_count; i++) {
        const dtrain_param *p = &strategy->params[i];
        const dtrain__entry *entry = &layout->entries[i];
        if (p->state.storage != p || entry->lends_value || dtrain__value_is_whole(layout, entry))
            continue;
        float *place = layout->buckets[entry->bucket].values + entry->offset;
        DTRAIN__TRY(dtrain_device_copy(strategy->device, to_host ? p->value : place,
                                       to_host ? place : p->value,
                                       (size_t)p->count * sizeof(float)));
    }
    return DTRAIN_OK;
}

/* Bring updated slices together, for kinds that keep whole values (ZERO1, SHARD_GRAD_OP): all
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

/* Make *whole storage i with its value whole, gathered as the shards have it if it has to be. Where
 * units travel rounded, a slot does not hold that: the bucket is brought in fp32, and forgotten. */
DTRAIN__PRIVATE dtrain_result dtrain__whole_param(dtrain_strategy *strategy, size_t i,
                                                  dtrain_param *whole)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain__entry *entry = &layout->entries[i];
    const uint32_t b = entry->bucket;
    *whole = strategy->params[i];
    if (!layout->shards.params || dtrain__value_is_whole(layout, entry)) return DTRAIN_OK;
    whole->value = layout->buckets[b].values + entry->offset;
    if (strategy->desc.param_dtype == DTRAIN_DTYPE_F32) {
        DTRAIN__TRY(dtrain__fetch_bucket(strategy, b));
        return dtrain__gather_end(strategy, b);
    }
    DTRAIN__TRY(dtrain__evict(strategy, b));
    DTRAIN__TRY(dtrain__claim_slot(strategy, &layout->buckets[b]));
    DTRAIN__TRY(dtrain__gather_start(strategy, &layout->buckets[b], DTRAIN_DTYPE_F32));
    return dtrain__gather_wait(strategy, &layout->buckets[b], DTRAIN_DTYPE_F32);
}

static bool dtrain__is_absent(const dtrain_strategy *strategy, uint32_t b)
{
    return b == DTRAIN__NONE || strategy->layout.buckets[b].presence == DTRAIN__ABSENT;
}

/* Note which units are here, or on their way, before whole parameters are read: those come through
 * the same slots. */
DTRAIN__PRIVATE void dtrain__note_units(dtrain_strategy *strategy)
{
    for (size_t u = 0; u <= strategy->layout.unit_count; u++) {
        dtrain__unit *unit = dtrain__unit_at(strategy, u);
        unit->noted = !dtrain__is_absent(strategy, unit->trainable) ||
                      !dtrain__is_absent(strategy, unit->frozen);
    }
}

/* Bring back the units that reading has displaced: a tape, or a host, in whose hands one is counts
 * on its values. */
DTRAIN__PRIVATE dtrain_result dtrain__restore_units(dtrain_strategy *strategy)
{
    for (size_t u = 0; u <= strategy->layout.unit_count && strategy->layout.shards.params; u++) {
        dtrain__unit *unit = dtrain__unit_at(strategy, u);
        if (!unit->noted) continue;
        DTRAIN__TRY(dtrain__need_unit(strategy, unit));
        if (unit->shown) dtrain__show_unit(strategy, unit, true);
    }
    return DTRAIN_OK;
}
