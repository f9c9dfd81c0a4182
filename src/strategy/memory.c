/* Memory of a layout
 *
 * There are three blocks of device memory, for values, gradients and buffers, and one of host
 * memory for offloaded shards. The same code runs twice: first it counts the bytes of the blocks;
 * when they are allocated, it cuts them into pieces. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

DTRAIN__PRIVATE int64_t dtrain__padded(int64_t count)
{
    return (int64_t)(dtrain__round_up((size_t)count * sizeof(float), DTRAIN__CACHE_LINE) /
                     sizeof(float));
}

DTRAIN__PRIVATE int64_t dtrain__words(const dtrain__layout *layout, int64_t elements)
{
    return layout->dtype == DTRAIN_DTYPE_F64 ? 2 * elements : elements;
}

DTRAIN__PRIVATE int64_t dtrain__elements(const dtrain__layout *layout, int64_t words)
{
    return layout->dtype == DTRAIN_DTYPE_F64 ? words / 2 : words;
}

/* Count the words of parameter i in [first, first + count) of a bucket, and set *low to the first
 * one. 0 or less: there are none, or i is an alias or in another bucket. */
DTRAIN__PRIVATE int64_t dtrain__overlap(const dtrain__layout *layout, const dtrain__bucket *bucket,
                                        size_t i, int64_t first, int64_t count, int64_t *low)
{
    const dtrain_param *p = &layout->params[i];
    const dtrain__entry *entry = &layout->entries[i];
    *low = dtrain__max(entry->offset, first);
    if (p->state.storage != p || entry->bucket != bucket) return 0;
    return dtrain__min(entry->offset + dtrain__words(layout, p->count), first + count) - *low;
}

/* Find the part of storage i, in elements, that this rank keeps and, if it is trainable, updates.
 * False: this rank keeps none. */
DTRAIN__PRIVATE bool dtrain__piece(const dtrain__layout *layout, size_t i, int64_t *offset,
                                   int64_t *count)
{
    const dtrain__bucket *bucket = dtrain__shard_bucket(layout, i);
    *offset = 0;
    *count = layout->params[i].count;
    if (layout->params[i].state.storage != &layout->params[i]) return false;
    if (!bucket) return dtrain__has_memory(&layout->params[i]);
    *count = dtrain__overlap(layout, bucket, i, bucket->shard_first, bucket->shard_count, offset);
    *count = dtrain__elements(layout, *count);
    *offset = dtrain__elements(layout, *offset - layout->entries[i].offset);
    return *count > 0;
}

/* Cut a piece of count fp32 elements from a block. */
DTRAIN__PRIVATE float *dtrain__carve(dtrain__layout *layout, int block, int64_t count)
{
    char *memory = layout->memory[block];
    float *piece = memory ? (float *)(void *)(memory + layout->bytes[block]) : NULL;
    layout->bytes[block] += (size_t)dtrain__padded(count) * sizeof(float);
    return piece;
}

/* Cut a piece of count 16-bit elements. */
static uint16_t *dtrain__carve_low(dtrain__layout *layout, int block, int64_t count)
{
    return (uint16_t *)(void *)dtrain__carve(layout, block, (count + 1) / 2);
}

/* Cut a piece of fp32 elements, and a piece of a 16-bit dtype if they travel as that. */
static float *dtrain__carve_both(dtrain__layout *layout, int block, int64_t count, uint32_t dtype,
                                 uint16_t **low)
{
    if (dtype != DTRAIN_DTYPE_F32) *low = dtrain__carve_low(layout, DTRAIN__BUFFERS, count);
    return dtrain__carve(layout, block, count);
}

DTRAIN__PRIVATE float *dtrain__after(float *at, int64_t count) { return at ? at + count : NULL; }

static uint16_t *dtrain__after_low(uint16_t *at, int64_t count) { return at ? at + count : NULL; }

static int64_t dtrain__bucket_length(const dtrain__bucket *bucket)
{
    return bucket ? bucket->count : 0;
}

/* Lay out a bucket's values: whole values, or a shard and memory to gather the values. */
static void dtrain__lay_values(dtrain__layout *layout, dtrain__bucket *bucket)
{
    const dtrain__turns *turns = &layout->turns;
    if (!bucket->sharded) return;
    if (!layout->shards.params) {
        bucket->values = dtrain__carve(layout, DTRAIN__VALUES, bucket->count);
        bucket->value_shard = dtrain__after(bucket->values, bucket->shard_first);
        return;
    }
    bucket->value_on_host = layout->values_on_host;
    bucket->value_shard = dtrain__carve(
        layout, bucket->value_on_host ? DTRAIN__HOST : DTRAIN__VALUES, bucket->shard_count);
    if (bucket->unit == DTRAIN__NONE || layout->units[bucket->unit].own_memory) {
        bucket->values = dtrain__carve_both(layout, DTRAIN__BUFFERS, bucket->count,
                                            layout->desc->param_dtype, &bucket->low_values);
        return;
    }
    const dtrain__unit *unit = &layout->units[bucket->unit];
    const int64_t first = bucket->trainable ? 0 : dtrain__bucket_length(unit->trainable);
    bucket->values = dtrain__after(turns->values[bucket->unit & 1], first);
    bucket->low_values = dtrain__after_low(turns->low_values[bucket->unit & 1], first);
    bucket->typed_values = dtrain__after_low(turns->typed_values[bucket->unit & 1], first);
}

/* Lay out a bucket's gradients: the memory that backward fills, and that of the reduced shard. */
static void dtrain__lay_grads(dtrain__layout *layout, dtrain__bucket *bucket)
{
    const bool apart = layout->shards.grads && bucket->sharded;
    bucket->grad_on_host = apart && layout->grads_on_host;
    if (!bucket->trainable) return;
    bucket->shards_grads = apart;
    if (apart && bucket->unit != DTRAIN__NONE) {
        bucket->grads = layout->turns.grads[bucket->unit & 1];
        bucket->low_grads = layout->turns.low_grads[bucket->unit & 1];
        bucket->typed_grads = layout->turns.typed_grads;
    } else
        bucket->grads =
            dtrain__carve_both(layout, apart ? DTRAIN__BUFFERS : DTRAIN__GRADS, bucket->count,
                               layout->desc->reduce_dtype, &bucket->low_grads);
    if (apart)
        bucket->grad_shard = dtrain__carve(
            layout, bucket->grad_on_host ? DTRAIN__HOST : DTRAIN__GRADS, bucket->shard_count);
    else bucket->grad_shard = dtrain__after(bucket->grads, bucket->shard_first);
}

/* Lay out the arrays of storage i in the host's type that the library owns. An array of gathered
 * values is valid while its unit is gathered: in the unit's slot, or where values arrive in
 * param_dtype. */
static void dtrain__lay_typed(dtrain__layout *layout, size_t i)
{
    const dtrain_param *p = &layout->params[i];
    dtrain__entry *entry = &layout->entries[i];
    const dtrain__bucket *bucket = entry->bucket;
    const bool gathered = layout->shards.params && dtrain__shard_bucket(layout, i);
    const bool apart = bucket && bucket->shards_grads,
               in_unit = bucket && bucket->unit != DTRAIN__NONE;
    const uint64_t bytes = (uint64_t)p->count * dtrain_dtype_bytes((dtrain_dtype)p->dtype);
    if (p->dtype == layout->dtype) return;
    if (gathered && p->dtype == layout->desc->param_dtype)
        entry->typed_value = dtrain__after_low(bucket->low_values, entry->offset);
    else if (gathered && in_unit && !layout->units[bucket->unit].own_memory)
        entry->typed_value = dtrain__after_low(bucket->typed_values, entry->offset);
    else if (!p->typed_value)
        entry->typed_value =
            dtrain__carve_low(layout, gathered ? DTRAIN__BUFFERS : DTRAIN__VALUES, p->count);
    if (!gathered) layout->value_bytes += bytes;
    if (!entry->trainable) return;
    if (p->typed_grad || !apart) layout->grad_bytes += bytes;
    if (p->typed_grad) return;
    if (apart && in_unit) entry->typed_grad = dtrain__after_low(bucket->typed_grads, entry->offset);
    else
        entry->typed_grad =
            dtrain__carve_low(layout, apart ? DTRAIN__BUFFERS : DTRAIN__GRADS, p->count);
}

/* Lay out all memory: two buffers of each kind for the largest unit; the buckets; whole values of
 * the library in registration order; two bounce buffers in host memory for the longest gradient
 * shard there. Count the bytes that this rank holds on the device, whoever allocated them. */
DTRAIN__PRIVATE void dtrain__lay_memory(dtrain__layout *layout)
{
    int64_t values = 0, grads = 0, longest = 0;
    dtrain__turns *turns = &layout->turns;
    bool typed_values = false, typed_grads = false; /* the library owns such arrays in units */
    memset(layout->bytes, 0, sizeof layout->bytes);
    layout->value_bytes = layout->grad_bytes = 0;
    for (size_t u = 0; u < layout->unit_count; u++) {
        const dtrain__unit *unit = &layout->units[u];
        const int64_t trainable = dtrain__bucket_length(unit->trainable);
        const int64_t both = trainable + dtrain__bucket_length(unit->frozen);
        if (layout->shards.params && !unit->own_memory) values = dtrain__max(values, both);
        if (layout->shards.grads) grads = dtrain__max(grads, trainable);
    }
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        if (p->dtype == layout->dtype) continue;
        if (p->dtype != layout->desc->param_dtype) typed_values = true;
        if (!p->typed_grad) typed_grads = true;
    }
    for (int i = 0; i < 2; i++) {
        turns->values[i] = dtrain__carve_both(layout, DTRAIN__BUFFERS, values,
                                              layout->desc->param_dtype, &turns->low_values[i]);
        turns->grads[i] = dtrain__carve_both(layout, DTRAIN__BUFFERS, grads,
                                             layout->desc->reduce_dtype, &turns->low_grads[i]);
        turns->typed_values[i] =
            dtrain__carve_low(layout, DTRAIN__BUFFERS, typed_values ? values : 0);
    }
    turns->typed_grads = dtrain__carve_low(layout, DTRAIN__BUFFERS, typed_grads ? grads : 0);
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__bucket *bucket = &layout->buckets[b];
        dtrain__lay_values(layout, bucket);
        dtrain__lay_grads(layout, bucket);
        if (bucket->grad_on_host) longest = dtrain__max(longest, bucket->shard_count);
        else if (bucket->trainable)
            layout->grad_bytes +=
                4 * (uint64_t)(bucket->shards_grads ? bucket->shard_count : bucket->count);
        if (bucket->sharded && !bucket->value_on_host)
            layout->value_bytes +=
                4 * (uint64_t)(layout->shards.params ? bucket->shard_count : bucket->count);
    }
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        dtrain__entry *entry = &layout->entries[i];
        if (p->state.storage != p) continue;
        const bool whole = !dtrain__shard_bucket(layout, i);
        const bool inside = p->dtype == layout->dtype; /* the host's arrays have this type */
        const bool value = inside && dtrain__host_value(p), grad = inside && dtrain__host_grad(p);
        const int64_t words = dtrain__words(layout, p->count);
        if (whole && !value) entry->own_value = dtrain__carve(layout, DTRAIN__VALUES, words);
        if (whole || value) layout->value_bytes += 4 * (uint64_t)words;
        if (entry->trainable && grad) layout->grad_bytes += 4 * (uint64_t)words;
        dtrain__lay_typed(layout, i);
    }
    for (int i = 0; i < 2; i++) layout->bounce[i] = dtrain__carve(layout, DTRAIN__HOST, longest);
}
