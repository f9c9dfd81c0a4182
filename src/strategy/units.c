/* Units: gather, release, and the walk back
 *
 * A unit is the group of parameters that are gathered and released together, a layer for instance.
 * If a kind shards values, the values of a unit are in one of four states:
 *
 *              gather of this unit or        collectives            gather
 *              one before it in the pass     are done
 *     ABSENT --------------------> GATHERING ---------> GATHERED -----------> SHOWN
 *       ^                              |                 |    ^   release       |
 *       |                              |                 |    '-----------------'
 *       '------------------------------'-----------------'----------------------'
 *                       another unit takes the slot, or publish: values are out of date
 *
 * dtrain_param.value points to a unit's values only while it is SHOWN. A unit without own_memory
 * uses one of two slots, while the other is filled (G: GATHERING, S: SHOWN, dots: the values stay):
 *
 *     forward    gather 0    gather 1    gather 2    gather 3   | backward  gather 2   gather 1 ...
 *     slot 0     [ 0 S     ] [ 2 G     ] [ 2 S     ] . . . . . .|. . . . .  [ 2 S    ] [ 0 G    ]
 *     slot 1     [ 1 G     ] [ 1 S     ] [ 3 G     ] [ 3 S . . .|. . . . ]  [ 1 G    ] [ 1 S    ]
 *
 * Unit u uses slot u % 2 (dtrain__lay_values). So its addresses are the same at every gather, and
 * addresses that the tape has recorded stay valid. Memory is constant: two units, however deep the
 * model. A unit that is still in its slot is not gathered again (units 3 and 2 at the turn above).
 * Filling a slot overwrites no values in use: a unit is gathered after the release of the one
 * before it in the pass, and only that one's slot is filled ahead. On a device with streams, a
 * collective starts after the kernels queued before it.
 *
 * The backward of a unit writes its gradients into one of two alternating buffers. They are reduced
 * when backward comes to the next unit:
 *
 *     backward       unit 3        unit 2          unit 1        unit 0          finish
 *     buffer 1       [ 3 written ] [ 3 reduced   ] [ 1 written ] [ 1 reduced   ]
 *     buffer 0                     [ 2 written   ] [ 2 reduced ] [ 0 written   ] [ 0 reduced ]
 *     shards ready                                 3             2               1, 0
 *
 * All ranks must start the same collectives in the same order. If a rank started the collective of
 * another unit of the same size, it would receive the wrong numbers without any error. In forward
 * all ranks gather the same units. In backward a rank may lack gradients of a unit;
 * dtrain__walk_back makes the order the same on all ranks. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

static dtrain_result dtrain__unit_fetch(dtrain_strategy *strategy, dtrain__unit *unit);
static void dtrain__show_values(dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                bool shown);

/* ---- Gather and release -----------------------------------------------------------------------*/

/* True if backward walks down unit by unit, because gradients or values are sharded (not DDP, not
 * ZERO1). Then a unit's bucket is launched when backward comes to the next unit, buckets without a
 * unit in finish. If each were launched as soon as it is complete, the order of collectives would
 * differ on a rank that lacks a gradient. */
DTRAIN__PRIVATE bool dtrain__walks_units(const dtrain_strategy *strategy)
{
    return strategy->layout.shards.params || strategy->layout.shards.grads;
}

/* Find the index of a unit; search from the one before the last gathered (DDP, ZERO1: from 0). */
static dtrain_result dtrain__find_unit(const dtrain_strategy *strategy, const char *call,
                                       uint32_t id, uint32_t *at)
{
    const dtrain__layout *layout = &strategy->layout;
    const uint32_t count = (uint32_t)layout->unit_count;
    const uint32_t from =
        strategy->position == DTRAIN__NONE || strategy->position == 0 ? 0 : strategy->position - 1;
    for (uint32_t i = 0; i < count; i++) {
        *at = (from + i) % count;
        if (layout->units[*at].id == id) return DTRAIN_OK;
    }
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: no parameter belongs to unit %u", call, id);
}

/* Gather unit number `at`, and the parameters that several units use, which stay until publish.
 * Start to gather unit `next`, if there is one. */
static dtrain_result dtrain__bring_unit(dtrain_strategy *strategy, uint32_t at, uint32_t next)
{
    dtrain__layout *layout = &strategy->layout;
    strategy->position = at;
    if (!layout->shards.params) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__unit_need(strategy, &layout->shared));
    DTRAIN__TRY(dtrain__unit_need(strategy, &layout->units[at]));
    if (strategy->desc.no_overlap || next >= layout->unit_count) return DTRAIN_OK;
    return dtrain__unit_fetch(strategy, &layout->units[next]);
}

/* Check that a unit is due. Forward begins with the first unit and continues with the next one; it
 * may go back to an earlier unit to recompute activations. Backward goes to earlier units and may
 * step over some. Once backward has begun, no unit after its current one is due. */
static dtrain_result dtrain__check_order(const dtrain_strategy *strategy, uint32_t at, uint32_t id,
                                         bool backward)
{
    const dtrain__unit *units = strategy->layout.units;
    const uint32_t due = strategy->position == DTRAIN__NONE ? 0 : strategy->position + 1;
    if (at > strategy->backward)
        return dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "dtrain_strategy_gather: unit %u is not due: this backward has come to unit %u, which "
            "is registered before it; %s",
            id, units[strategy->backward].id,
            backward ? "call dtrain_strategy_finish between two"
                     : "to make activations of more than two units again, gather the last "
                       "of them for backward before");
    if (backward || at <= due || !dtrain__walks_units(strategy)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "dtrain_strategy_gather: unit %u is not due; due is unit %u%s. Forward "
                       "gathers units in the order in which their first parameters are registered",
                       id, units[due].id, due ? "" : ", the first");
}

/* Gather a unit for a pass and show it. A forward recomputes activations if a backward is under
 * way, or if the unit comes before the last gathered unit and is not unit 0: then backward has
 * stepped over all units so far. It first walks back, unless the last unit of the recomputation has
 * been gathered for backward (`entered`). */
static dtrain_result dtrain__gather(dtrain_strategy *strategy, uint32_t at, bool backward)
{
    if (backward) {
        DTRAIN__TRY(dtrain__walk_back(strategy, at));
        strategy->entered = true;
    } else {
        const bool earlier = at && strategy->position != DTRAIN__NONE && at < strategy->position;
        if (!strategy->entered && (earlier || strategy->backward != DTRAIN__NONE))
            DTRAIN__TRY(dtrain__walk_back(strategy, at + 1));
        DTRAIN__TRY(dtrain__bring_unit(strategy, at, at == strategy->backward ? at - 1 : at + 1));
    }
    dtrain__unit_show(strategy, &strategy->layout.shared, true);
    dtrain__unit_show(strategy, &strategy->layout.units[at], true);
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_strategy_gather(dtrain_strategy *strategy, uint32_t unit,
                                                dtrain_pass pass)
{
    const char *const call = "dtrain_strategy_gather";
    uint32_t at;
    DTRAIN__TRY(dtrain__strategy_usable(strategy, call));
    DTRAIN__TRY(dtrain__find_unit(strategy, call, unit, &at));
    if (pass != DTRAIN_PASS_FORWARD && pass != DTRAIN_PASS_BACKWARD)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: pass %d is not a dtrain_pass", call,
                           (int)pass);
    const bool backward = pass == DTRAIN_PASS_BACKWARD;
    DTRAIN__TRY(dtrain__check_order(strategy, at, unit, backward));
    if (!dtrain__walks_units(strategy)) return DTRAIN_OK;
    return dtrain__strategy_keep(strategy, dtrain__gather(strategy, at, backward));
}

DTRAIN_API dtrain_result dtrain_strategy_release(dtrain_strategy *strategy, uint32_t unit)
{
    uint32_t at;
    DTRAIN__TRY(dtrain__strategy_usable(strategy, "dtrain_strategy_release"));
    DTRAIN__TRY(dtrain__find_unit(strategy, "dtrain_strategy_release", unit, &at));
    if (at == strategy->backward) strategy->entered = false;
    dtrain__unit_show(strategy, &strategy->layout.units[at], false);
    return DTRAIN_OK;
}

/* ---- The walk back
 *
 * A walk back goes down through units, and starts the same collectives on all ranks. A forward in
 * a backward (activation checkpointing) does not say where it will end, and no rank knows how far
 * others have come. So each walks back to the unit after the first of this forward: both units fit
 * into their slots. If it has more, its last must be gathered for backward before. */

/* Give a unit its alternating buffer. First wait until the last bucket in the buffer has done the
 * steps that use it (dtrain__buffer_steps). A unit without gradients needs no buffer. */
static dtrain_result dtrain__claim_buffer(dtrain_strategy *strategy, uint32_t unit)
{
    const dtrain__unit *units = strategy->layout.units;
    dtrain__bucket *buckets = strategy->layout.buckets;
    const uint32_t before = strategy->in_buffer[unit & 1];
    if (!strategy->layout.shards.grads || !units[unit].trainable) return DTRAIN_OK;
    strategy->in_buffer[unit & 1] = unit;
    if (before == unit || before == DTRAIN__NONE) return DTRAIN_OK;
    const size_t b = (size_t)(units[before].trainable - buckets);
    const uint32_t last = dtrain__buffer_steps(strategy, &buckets[b]);
    if (last == DTRAIN__REDUCED) {
        DTRAIN__TRY(dtrain__reduce_until(strategy, b + 1));
        return dtrain__settle_steps(strategy, false);
    }
    for (size_t i = strategy->oldest; i <= b; i++)
        while (buckets[i].step <= last) DTRAIN__TRY(dtrain__await_step(strategy, &buckets[i]));
    return DTRAIN_OK;
}

/* Walk backward down to unit `to`. For each unit on the way every rank starts the same collectives,
 * whatever gradients it has: it launches the bucket of the unit above, gathers the values of this
 * unit and starts to gather the unit below. So a rank may step over units or end early: its next
 * gather, or finish, makes up for them. Recomputation may have evicted the unit that backward has
 * reached; all ranks evict alike, so all gather it again. */
DTRAIN__PRIVATE dtrain_result dtrain__walk_back(dtrain_strategy *strategy, uint32_t to)
{
    const dtrain__layout *layout = &strategy->layout;
    uint32_t at = strategy->backward;
    if (!dtrain__walks_units(strategy)) return DTRAIN_OK;
    if (at == DTRAIN__NONE) at = (uint32_t)layout->unit_count;
    else if (at != strategy->position) DTRAIN__TRY(dtrain__bring_unit(strategy, at, at - 1));
    strategy->entered = false;
    while (at > to) {
        size_t over = strategy->launched; /* end of buckets of units >= `at`, which come first */
        while (over < layout->bucket_count && layout->buckets[over].unit != DTRAIN__NONE &&
               layout->buckets[over].unit >= at)
            over++;
        at--;
        DTRAIN__TRY(dtrain__close_buckets(strategy, over));
        DTRAIN__TRY(dtrain__claim_buffer(strategy, at));
        strategy->backward = at;
        DTRAIN__TRY(dtrain__bring_unit(strategy, at, at - 1)); /* 0 - 1 is no unit */
    }
    return DTRAIN_OK;
}

/* ---- The states of a unit ---------------------------------------------------------------------*/

/* Return unit number u. After the last unit comes the unit of parameters that several units use. */
DTRAIN__PRIVATE dtrain__unit *dtrain__unit_at(dtrain_strategy *strategy, size_t u)
{
    dtrain__layout *layout = &strategy->layout;
    return u < layout->unit_count ? &layout->units[u] : &layout->shared;
}

/* GATHERING -> GATHERED: wait for the collectives, and convert. Values that travelled rounded
 * become fp32, and then values in the program's type, unless they travelled in it. */
static dtrain_result dtrain__unit_wait(dtrain_strategy *strategy, dtrain__unit *unit)
{
    const dtrain_dtype dtype = (dtrain_dtype)strategy->desc.param_dtype;
    dtrain__bucket *const buckets[] = {unit->trainable, unit->frozen};
    if (unit->state != DTRAIN__UNIT_GATHERING) return DTRAIN_OK;
    for (int b = 0; b < 2; b++) {
        dtrain__bucket *bucket = buckets[b];
        if (!bucket) continue;
        DTRAIN__TRY(dtrain__gather_wait(strategy, bucket, dtype));
        if (dtype != DTRAIN_DTYPE_F32)
            DTRAIN__TRY(dtrain__convert(strategy, bucket->count, bucket->low_values, dtype,
                                        bucket->values, DTRAIN_DTYPE_F32));
        for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++) {
            const dtrain_param *p = &strategy->params[i];
            const dtrain__entry *entry = &strategy->layout.entries[i];
            if (p->state.storage != p || entry->bucket != bucket) continue;
            if (p->dtype == strategy->layout.dtype || p->dtype == dtype) continue;
            DTRAIN__TRY(dtrain__convert(strategy, p->count, bucket->values + entry->offset,
                                        DTRAIN_DTYPE_F32, entry->typed_value, p->dtype));
        }
    }
    unit->state = DTRAIN__UNIT_GATHERED;
    return DTRAIN_OK;
}

/* GATHERED -> SHOWN, or back: set the parameters' pointers. After a release they are NULL, so that
 * a use is noticed; the values stay in the slot until another unit takes it. */
DTRAIN__PRIVATE void dtrain__unit_show(dtrain_strategy *strategy, dtrain__unit *unit, bool shown)
{
    if (!strategy->layout.shards.params) return;
    dtrain__show_values(strategy, unit->trainable, shown);
    dtrain__show_values(strategy, unit->frozen, shown);
    if (unit->state >= DTRAIN__UNIT_GATHERED)
        unit->state = shown ? DTRAIN__UNIT_SHOWN : DTRAIN__UNIT_GATHERED;
}

/* Any state -> ABSENT: wait for collectives under way first. */
DTRAIN__PRIVATE dtrain_result dtrain__unit_evict(dtrain_strategy *strategy, dtrain__unit *unit)
{
    DTRAIN__TRY(dtrain__unit_wait(strategy, unit));
    dtrain__unit_show(strategy, unit, false);
    unit->state = DTRAIN__UNIT_ABSENT;
    return DTRAIN_OK;
}

/* Give a unit its slot, if it uses one: evict the unit that is in it. */
DTRAIN__PRIVATE dtrain_result dtrain__claim_slot(dtrain_strategy *strategy,
                                                 const dtrain__unit *unit)
{
    if (unit->own_memory) return DTRAIN_OK;
    const uint32_t at = (uint32_t)(unit - strategy->layout.units);
    const uint32_t before = strategy->slots[at & 1];
    strategy->slots[at & 1] = at;
    if (before == at || before == DTRAIN__NONE) return DTRAIN_OK;
    return dtrain__unit_evict(strategy, &strategy->layout.units[before]);
}

/* ABSENT -> GATHERING: start the collectives. A unit without sharded values takes no slot. */
static dtrain_result dtrain__unit_fetch(dtrain_strategy *strategy, dtrain__unit *unit)
{
    const dtrain_dtype dtype = (dtrain_dtype)strategy->desc.param_dtype;
    if (unit->state != DTRAIN__UNIT_ABSENT) return DTRAIN_OK;
    if (!unit->trainable && !unit->frozen) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__claim_slot(strategy, unit));
    unit->state = DTRAIN__UNIT_GATHERING;
    if (unit->trainable) DTRAIN__TRY(dtrain__gather_start(strategy, unit->trainable, dtype));
    return unit->frozen ? dtrain__gather_start(strategy, unit->frozen, dtype) : DTRAIN_OK;
}

/* ABSENT -> GATHERING -> GATHERED. Both buckets are under way before either is waited for. */
DTRAIN__PRIVATE dtrain_result dtrain__unit_need(dtrain_strategy *strategy, dtrain__unit *unit)
{
    DTRAIN__TRY(dtrain__unit_fetch(strategy, unit));
    return dtrain__unit_wait(strategy, unit);
}

/* Wait for all units that are GATHERING. */
DTRAIN__PRIVATE dtrain_result dtrain__settle_gathers(dtrain_strategy *strategy)
{
    for (size_t u = 0; u <= strategy->layout.unit_count; u++)
        DTRAIN__TRY(dtrain__unit_wait(strategy, dtrain__unit_at(strategy, u)));
    return DTRAIN_OK;
}

/* Evict all units: their shards have been updated. */
DTRAIN__PRIVATE dtrain_result dtrain__evict_units(dtrain_strategy *strategy)
{
    for (size_t u = 0; u <= strategy->layout.unit_count; u++)
        DTRAIN__TRY(dtrain__unit_evict(strategy, dtrain__unit_at(strategy, u)));
    strategy->slots[0] = strategy->slots[1] = strategy->position = DTRAIN__NONE;
    return DTRAIN_OK;
}

/* ---- One bucket -------------------------------------------------------------------------------*/

/* Return the memory of a bucket's whole values: rounded to dtype, or (F32) not rounded. */
static char *dtrain__whole_values(const dtrain__bucket *bucket, dtrain_dtype dtype)
{
    return dtype != DTRAIN_DTYPE_F32 ? (char *)bucket->low_values : (char *)bucket->values;
}

/* Start to gather a bucket's values as dtype. On hierarchical nodes that takes two collectives:
 * this function gathers this rank's slice from the other nodes, dtrain__gather_inside the slices
 * inside the node. A shard is rounded at every gather: a rounded copy beside the fp32 shard would
 * save 4 ms of a step of 3 s (FULL_SHARD, 2 ranks, 12.6 million parameters), and cost 2 bytes per
 * element. */
DTRAIN__PRIVATE dtrain_result dtrain__gather_start(dtrain_strategy *strategy,
                                                   dtrain__bucket *bucket, dtrain_dtype dtype)
{
    const dtrain__layout *layout = &strategy->layout;
    const size_t word = dtrain_dtype_bytes(dtype);
    const bool low = dtype != DTRAIN_DTYPE_F32, nodes = strategy->fetch[1] != NULL;
    const dtrain_dtype wire = low ? dtype : (dtrain_dtype)layout->dtype;
    char *whole = dtrain__whole_values(bucket, dtype);
    char *own = whole + (size_t)bucket->shard_first * word;
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
    if (bucket->cuts) return dtrain__gather_owners(strategy, bucket, whole, wire);
    dtrain__label(strategy, bucket, "values of bucket");
    return dtrain_all_gather(
        strategy->fetch[0], shard, whole + (nodes ? (size_t)bucket->slice_first * word : 0),
        (size_t)dtrain__elements(layout, bucket->shard_count), wire, bucket->gathers);
}

/* On hierarchical nodes, wait for the first collective and start the second one. */
DTRAIN__PRIVATE dtrain_result dtrain__gather_inside(dtrain_strategy *strategy,
                                                    dtrain__bucket *bucket, dtrain_dtype dtype)
{
    const dtrain__layout *layout = &strategy->layout;
    char *whole = dtrain__whole_values(bucket, dtype);
    if (!strategy->fetch[1]) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__wait_works(strategy, bucket->gathers));
    dtrain__label(strategy, bucket, "values of bucket");
    return dtrain_all_gather(
        strategy->fetch[1], whole + (size_t)bucket->slice_first * dtrain_dtype_bytes(dtype), whole,
        (size_t)dtrain__elements(layout, bucket->slice_count),
        dtype != DTRAIN_DTYPE_F32 ? dtype : (dtrain_dtype)layout->dtype, bucket->gathers);
}

/* Wait until a bucket's values have been gathered as dtype. */
DTRAIN__PRIVATE dtrain_result dtrain__gather_wait(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                  dtrain_dtype dtype)
{
    DTRAIN__TRY(dtrain__gather_inside(strategy, bucket, dtype));
    return dtrain__wait_works(strategy, bucket->gathers);
}

/* Point the parameters of a bucket at its values; or set their pointers to NULL. */
static void dtrain__show_values(dtrain_strategy *strategy, const dtrain__bucket *bucket, bool shown)
{
    const dtrain__layout *layout = &strategy->layout;
    if (!bucket) return;
    for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++) {
        dtrain_param *p = &strategy->params[i];
        const dtrain__entry *storage = &layout->entries[p->state.storage->state.index];
        if (storage->bucket != bucket) continue;
        float *value = shown ? bucket->values + storage->offset : NULL;
        const bool wide = layout->dtype == DTRAIN_DTYPE_F64;
        p->value = wide ? NULL : value;
        p->typed_value = wide ? (void *)value : shown ? storage->typed_value : NULL;
    }
}
