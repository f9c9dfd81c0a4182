/* The layout
 *
 * It says which parameters travel together, and who keeps what of them: a pure function of what all
 * ranks have in common. They need not exchange it, and a plan can make one without ranks.
 *
 * The row of the kind decides the rest:                                  state  grads  params
 *     DDP: buckets by size, last parameter first, everything whole       -      -      -
 *     ZERO1: the same buckets, each cut in one slice a rank              1/N    -      -
 *     SHARD_GRAD_OP and below: a bucket is a unit; its gradients are     1/N    1/N    -
 *     made in one of two buffers that take turns ("work"), and what
 *     is reduced of them is kept apart, in shards
 *     FULL_SHARD, HYBRID_SHARD: values are gathered into two more        1/N    1/N    1/N
 *     buffers that take turns ("slots"); unit u uses number u % 2, so
 *     that its addresses are the same whenever it is there
 *     ZERO3: slices end where tensors end                                owner  owner  owner
 *
 *     unit u's bucket | tensor a ..... pad | tensor b .... pad | c | pad |
 *     FULL_SHARD      |<-- rank 0 -->|<-- rank 1 -->|<-- rank 2 -------->|     equal slices
 *     ZERO3           |<----- rank 0 ----->|<----- rank 2 ---->|<rank 1->|     tensors by owner
 *
 * Buckets are launched in their order: units from the last to the first, then what several units
 * share, then what is whole. Frozen parameters of sharded units have buckets of their own, which
 * are gathered and never reduced. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "strategy/compression_internal.h"
#include "strategy/layout_internal.h"

DTRAIN__PRIVATE int64_t dtrain__padded(int64_t count)
{
    return (int64_t)(dtrain__round_up((size_t)count * sizeof(float), DTRAIN__CACHE_LINE) /
                     sizeof(float));
}

/* Place of a unit in the order; a new one gets the next place. */
static uint32_t dtrain__unit_index(dtrain__layout *layout, uint32_t id)
{
    for (size_t i = layout->unit_count; i-- > 0;)
        if (layout->units[i].id == id) return (uint32_t)i;
    dtrain__unit *unit = &layout->units[layout->unit_count];
    unit->id = id;
    unit->trainable = unit->frozen = DTRAIN__NONE;
    unit->kept = layout->desc->keep_after_forward;
    for (uint32_t i = 0; i < layout->desc->kept_unit_count; i++)
        if (layout->desc->kept_units[i] == id) unit->kept = true;
    return (uint32_t)layout->unit_count++;
}

/* Fills in the unit of each storage, NONE for one that several use, and who is trainable. */
static void dtrain__lay_units(dtrain__layout *layout)
{
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        dtrain__entry *entry = &layout->entries[i],
                      *storage = &layout->entries[p->state.storage->state.index];
        const uint32_t unit = dtrain__unit_index(layout, p->unit);
        entry->trainable = dtrain__is_trainable(p);
        entry->bucket = DTRAIN__NONE;
        if (p->state.storage == p) entry->unit = unit;
        else if (storage->unit != unit) storage->unit = DTRAIN__NONE;
        entry->whole = !layout->shards.state || p->count < layout->desc->whole_below;
    }
}

/* The largest tensors first, each to the rank that has least: greedy, at most 4/3 of the best
 * balance (Graham, "Bounds on multiprocessing timing anomalies", 1969). order (count) and
 * load (ranks) are scratch. */
static void dtrain__lay_owners(dtrain__layout *layout, uint32_t *order, int64_t *load)
{
    size_t count = 0;
    memset(load, 0, (size_t)layout->ranks * sizeof *load);
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        size_t at = count;
        if (p->state.storage != p || layout->entries[i].whole) continue;
        for (; at > 0 && layout->params[order[at - 1]].count < p->count; at--)
            order[at] = order[at - 1];
        order[at] = (uint32_t)i;
        count++;
    }
    for (size_t k = 0; k < count; k++) {
        int least = 0;
        for (int r = 1; r < layout->ranks; r++)
            if (load[r] < load[least]) least = r;
        layout->owners[order[k]] = (uint32_t)least;
        load[least] += dtrain__padded(layout->params[order[k]].count);
    }
}

/* Opens an empty bucket. first_run: the first rank that owns something of it. */
static dtrain__bucket *dtrain__bucket_new(dtrain__layout *layout, uint32_t unit, bool trainable,
                                          bool sharded, int first_run)
{
    dtrain__bucket *bucket = &layout->buckets[layout->bucket_count];
    memset(bucket, 0, sizeof *bucket);
    bucket->unit = unit;
    bucket->trainable = trainable;
    bucket->sharded = sharded;
    bucket->first_param = DTRAIN__NONE;
    if (sharded && layout->cuts)
        bucket->cuts = layout->cuts + layout->bucket_count * ((size_t)layout->ranks + 1);
    for (int r = 0; bucket->cuts && r <= first_run; r++) bucket->cuts[r] = 0;
    layout->bucket_count++;
    return bucket;
}

static void dtrain__bucket_add(dtrain__layout *layout, dtrain__bucket *bucket, size_t index)
{
    dtrain__entry *entry = &layout->entries[index];
    entry->bucket = (uint32_t)(bucket - layout->buckets);
    entry->offset = bucket->count;
    bucket->count += dtrain__padded(layout->params[index].count);
}

/* Rank l of node m exchanges slice l of a bucket with the ranks l of other nodes, and of what all
 * nodes have summed up it keeps, where buckets are sharded, part m:
 *
 *     2 nodes of 2 ranks    | slice 0 . . . . . . . . | slice 1 . . . . . . . . |
 *     shards of ranks       | rank 0     | rank 2     | rank 1     | rank 3     | */
static void dtrain__bucket_hop(const dtrain__layout *layout, dtrain__bucket *bucket)
{
    const int64_t nodes = layout->hop_ranks, local = layout->all_rank % layout->node_ranks;
    bucket->hop_first = 0;
    bucket->hop_count = bucket->count;
    if (layout->node_ranks == 1) return;
    bucket->hop_count =
        bucket->sharded
            ? bucket->shard_count * nodes
            : dtrain__padded((bucket->count + layout->node_ranks - 1) / layout->node_ranks);
    bucket->hop_first = bucket->hop_count * local;
    if (bucket->sharded)
        bucket->shard_first = bucket->hop_first + bucket->shard_count * layout->hop_rank;
    else bucket->count = bucket->shard_count = bucket->hop_count * layout->node_ranks;
}

/* Closes a bucket and decides who keeps what: slices of equal length, or cuts where owners
 * change. */
static void dtrain__bucket_cut(const dtrain__layout *layout, dtrain__bucket *bucket)
{
    const int64_t ranks = layout->ranks;
    bucket->shard_first = 0;
    bucket->shard_count = bucket->count;
    if (bucket->sharded && bucket->cuts) {
        bucket->shard_first = bucket->cuts[layout->rank];
        bucket->shard_count = bucket->cuts[layout->rank + 1] - bucket->shard_first;
    } else if (bucket->sharded) {
        bucket->shard_count = dtrain__padded((bucket->count + ranks - 1) / ranks);
        bucket->count = bucket->shard_count * ranks;
        bucket->shard_first = bucket->shard_count * layout->rank;
    }
    dtrain__bucket_hop(layout, bucket);
}

/* Makes the bucket of a unit's trainable or frozen tensors (unit NONE: of those that several units
 * use); NONE if there are none. */
static uint32_t dtrain__lay_bucket(dtrain__layout *layout, uint32_t unit, bool trainable)
{
    const int runs = layout->owners ? layout->ranks : 1;
    dtrain__bucket *bucket = NULL;
    for (int r = 0; r < runs; r++) {
        if (bucket && bucket->cuts) bucket->cuts[r] = bucket->count;
        for (size_t i = 0; i < layout->count; i++) {
            const dtrain__entry *entry = &layout->entries[i];
            if (layout->params[i].state.storage != &layout->params[i] || entry->whole) continue;
            if (entry->unit != unit || entry->trainable != trainable) continue;
            if (layout->owners && layout->owners[i] != (uint32_t)r) continue;
            if (!bucket) bucket = dtrain__bucket_new(layout, unit, trainable, true, r);
            dtrain__bucket_add(layout, bucket, i);
        }
    }
    if (!bucket) return DTRAIN__NONE;
    if (bucket->cuts) bucket->cuts[runs] = bucket->count;
    dtrain__bucket_cut(layout, bucket);
    return (uint32_t)(bucket - layout->buckets);
}

/* Makes the buckets of kinds that shard gradients: every unit is one, and another for what is
 * frozen in it. */
static void dtrain__lay_unit_buckets(dtrain__layout *layout)
{
    for (size_t u = layout->unit_count; u-- > 0;) {
        dtrain__unit *unit = &layout->units[u];
        unit->trainable = dtrain__lay_bucket(layout, (uint32_t)u, true);
        if (layout->shards.params) unit->frozen = dtrain__lay_bucket(layout, (uint32_t)u, false);
    }
    layout->shared.trainable = dtrain__lay_bucket(layout, DTRAIN__NONE, true);
    if (layout->shards.params)
        layout->shared.frozen = dtrain__lay_bucket(layout, DTRAIN__NONE, false);
}

/* Fills buckets from the last parameter on, up to a cap; one exceeds it only when a single gradient
 * does. A tied
 * gradient is final when its last use, the first entry of the group, is done: it travels at that
 * entry's place. */
static void dtrain__lay_size_buckets(dtrain__layout *layout, bool sharded)
{
    const size_t first = layout->bucket_count;
    dtrain__bucket *last = NULL;
    for (size_t i = layout->count; i-- > 0;) {
        const dtrain__entry *entry = &layout->entries[i];
        if (layout->params[i].state.storage != &layout->params[i] || !entry->trainable) continue;
        if (entry->whole == sharded) continue;
        const size_t cap = layout->bucket_count == first + 1 ? layout->desc->first_bucket_bytes
                                                             : layout->desc->bucket_bytes;
        const size_t limit = cap / sizeof(float);
        const int64_t length = dtrain__padded(layout->params[i].count);
        if (!last || (last->count && (size_t)(last->count + length) > limit)) {
            if (last) dtrain__bucket_cut(layout, last);
            last = dtrain__bucket_new(layout, DTRAIN__NONE, true, sharded, 0);
        }
        dtrain__bucket_add(layout, last, i);
    }
    if (last) dtrain__bucket_cut(layout, last);
}

/* Fills entries, buckets and units, all zeroed by the caller. */
static void dtrain__lay_out(dtrain__layout *layout)
{
    layout->shared.trainable = layout->shared.frozen = DTRAIN__NONE;
    dtrain__lay_units(layout);
    if (layout->owners) /* cuts are scratch until they are filled */
        dtrain__lay_owners(layout, (uint32_t *)(void *)(layout->cuts + layout->ranks),
                           layout->cuts);
    if (layout->kind->shards.grads) dtrain__lay_unit_buckets(layout);
    else dtrain__lay_size_buckets(layout, true);
    dtrain__lay_size_buckets(layout, false);
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        dtrain__entry *entry = &layout->entries[i],
                      *storage = &layout->entries[p->state.storage->state.index];
        entry->bucket = storage->bucket;
        if (entry->bucket == DTRAIN__NONE) continue;
        dtrain__bucket *bucket = &layout->buckets[entry->bucket];
        if (i < bucket->first_param) bucket->first_param = (uint32_t)i;
        bucket->last_param = (uint32_t)i;
        if (!entry->trainable) continue;
        storage->uses++;
        bucket->uses++;
    }
}

/* Fills in who is on which level. */
static void dtrain__layout_grid(dtrain__layout *layout)
{
    const dtrain_strategy_desc *desc = layout->desc;
    const int size = desc->hierarchical ? (int)desc->node_size : 0;
    const bool nodes = size > 1 && size < layout->all;
    layout->node_ranks = nodes ? size : 1;
    layout->hop_ranks = nodes ? layout->all / size : layout->all;
    layout->hop_rank = nodes ? layout->all_rank / size : layout->all_rank;
    layout->compression = layout->all > 1 ? desc->compression : NULL;
}

/* Decides what is sharded, of what the kind shards: nothing on one rank, unless its shard is in
 * host memory, and no gradients while they only add up. */
static void dtrain__layout_classes(dtrain__layout *layout)
{
    const dtrain__classes *kind = &layout->kind->shards;
    const dtrain_strategy_desc *desc = layout->desc;
    const bool many = layout->ranks > 1;
    dtrain__classes *shards = &layout->shards;
    layout->value_home = dtrain__home_of(kind->params && (desc->offload & DTRAIN_OFFLOAD_PARAMS));
    layout->grad_home = dtrain__home_of(kind->grads && (desc->offload & DTRAIN_OFFLOAD_GRADS));
    shards->params = kind->params && (many || layout->value_home->host);
    shards->grads = kind->grads && (many || layout->grad_home->host) &&
                    desc->accumulation != DTRAIN_ACCUMULATION_LAST;
    shards->state = kind->state && (many || shards->params || shards->grads);
}

/* Makes the tables of a layout; dtrain__layout_free frees what there is of them, also after an
 * error. Memory follows in dtrain__lay_memory. */
DTRAIN__PRIVATE dtrain_result dtrain__layout_make(dtrain__layout *layout, const dtrain_allocator *a,
                                                  const dtrain_param *params, size_t count,
                                                  const dtrain_strategy_desc *desc, int ranks,
                                                  int rank, int all, int all_rank)
{
    const size_t cuts = (size_t)ranks + 1;
    memset(layout, 0, sizeof *layout);
    layout->params = params;
    layout->count = count;
    layout->desc = desc;
    layout->kind = dtrain__row_of(desc->kind);
    layout->ranks = ranks;
    layout->rank = rank;
    layout->all = all;
    layout->all_rank = all_rank;
    dtrain__layout_grid(layout);
    dtrain__layout_classes(layout);
    layout->entries =
        (dtrain__entry *)dtrain__alloc(a, count, sizeof *layout->entries, "parameter entries");
    layout->buckets = (dtrain__bucket *)dtrain__alloc(a, count, sizeof *layout->buckets, "buckets");
    layout->units = (dtrain__unit *)dtrain__alloc(a, count, sizeof *layout->units, "units");
    if (!layout->entries || !layout->buckets || !layout->units) return DTRAIN_ERROR_MEMORY;
    if (layout->shards.state && layout->kind->owners) {
        layout->owners =
            (uint32_t *)dtrain__alloc(a, count, sizeof *layout->owners, "owners of parameters");
        layout->cuts = (int64_t *)dtrain__alloc(a, count, cuts * sizeof *layout->cuts, "cuts");
        if (!layout->owners || !layout->cuts) return DTRAIN_ERROR_MEMORY;
    }
    dtrain__lay_out(layout);
    return layout->compression ? dtrain__layout_portions(layout, a) : DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__layout_free(dtrain__layout *layout, const dtrain_allocator *a)
{
    const size_t cuts = (size_t)layout->ranks + 1;
    dtrain__layout_portions_free(layout, a);
    dtrain__free(a, layout->cuts, layout->count, cuts * sizeof *layout->cuts);
    dtrain__free(a, layout->owners, layout->count, sizeof *layout->owners);
    dtrain__free(a, layout->units, layout->count, sizeof *layout->units);
    dtrain__free(a, layout->buckets, layout->count, sizeof *layout->buckets);
    dtrain__free(a, layout->entries, layout->count, sizeof *layout->entries);
}

/* Does every rank have all of a tensor's value? */
DTRAIN__PRIVATE bool dtrain__value_is_whole(const dtrain__layout *layout,
                                            const dtrain__entry *entry)
{
    return entry->bucket == DTRAIN__NONE || !layout->buckets[entry->bucket].sharded;
}

/* ---- Memory of a layout
 *
 * Three blocks: values, gradients, buffers; and a fourth in host memory for what is offloaded. Laid
 * out twice by the same code: counted, then, when the blocks are there, cut into pieces. */

DTRAIN__PRIVATE void *dtrain__carve(dtrain__layout *layout, int block, int64_t count,
                                    size_t unit_bytes)
{
    char *memory = layout->memory[block];
    void *piece = memory ? memory + layout->bytes[block] : NULL;
    layout->bytes[block] += dtrain__round_up((size_t)count * unit_bytes, DTRAIN__CACHE_LINE);
    return piece;
}

DTRAIN__PRIVATE float *dtrain__after(float *at, int64_t count) { return at ? at + count : NULL; }
static uint16_t *dtrain__low_after(uint16_t *at, int64_t count) { return at ? at + count : NULL; }

static int64_t dtrain__bucket_length(const dtrain__layout *layout, uint32_t bucket)
{
    return bucket == DTRAIN__NONE ? 0 : layout->buckets[bucket].count;
}

/* The buffers that take turns, one pair of each sort. */
typedef struct dtrain__turns {
    float *values[2], *grads[2];
    uint16_t *low_values[2], *low_grads[2];
} dtrain__turns;

/* Two buffers of each sort, for the largest unit. */
static dtrain__turns dtrain__lay_turns(dtrain__layout *layout)
{
    const bool low_values = layout->desc->param_dtype != DTRAIN_DTYPE_F32;
    const bool low_grads = layout->desc->reduce_dtype != DTRAIN_DTYPE_F32;
    int64_t values = 0, grads = 0;
    dtrain__turns turns;
    memset(&turns, 0, sizeof turns);
    for (size_t u = 0; u < layout->unit_count; u++) {
        const dtrain__unit *unit = &layout->units[u];
        const int64_t trainable = dtrain__bucket_length(layout, unit->trainable);
        const int64_t both = trainable + dtrain__bucket_length(layout, unit->frozen);
        if (layout->shards.params && !unit->kept && both > values) values = both;
        if (layout->shards.grads && trainable > grads) grads = trainable;
    }
    for (int i = 0; i < 2; i++) {
        turns.values[i] = (float *)dtrain__carve(layout, DTRAIN__BUFFERS, values, 4);
        turns.grads[i] = (float *)dtrain__carve(layout, DTRAIN__BUFFERS, grads, 4);
        if (low_values)
            turns.low_values[i] = (uint16_t *)dtrain__carve(layout, DTRAIN__BUFFERS, values, 2);
        if (low_grads)
            turns.low_grads[i] = (uint16_t *)dtrain__carve(layout, DTRAIN__BUFFERS, grads, 2);
    }
    return turns;
}

/* A bucket's values: whole and in place, or a shard and somewhere to gather it. */
static void dtrain__lay_values(dtrain__layout *layout, dtrain__bucket *bucket,
                               const dtrain__turns *turns)
{
    const bool low = layout->desc->param_dtype != DTRAIN_DTYPE_F32;
    bucket->value_home = dtrain__home_of(false);
    if (!bucket->sharded) return;
    if (!layout->shards.params) {
        bucket->values = (float *)dtrain__carve(layout, DTRAIN__VALUES, bucket->count, 4);
        bucket->value_shard = dtrain__after(bucket->values, bucket->shard_first);
        return;
    }
    bucket->value_home = layout->value_home;
    bucket->value_shard = (float *)dtrain__carve(
        layout, bucket->value_home->host ? DTRAIN__HOST : DTRAIN__VALUES, bucket->shard_count, 4);
    if (bucket->unit == DTRAIN__NONE || layout->units[bucket->unit].kept) {
        bucket->values = (float *)dtrain__carve(layout, DTRAIN__BUFFERS, bucket->count, 4);
        if (low)
            bucket->low_values =
                (uint16_t *)dtrain__carve(layout, DTRAIN__BUFFERS, bucket->count, 2);
        return;
    }
    const dtrain__unit *unit = &layout->units[bucket->unit];
    const int64_t first = bucket->trainable ? 0 : dtrain__bucket_length(layout, unit->trainable);
    bucket->slotted = true;
    bucket->values = dtrain__after(turns->values[bucket->unit & 1], first);
    bucket->low_values = dtrain__low_after(turns->low_values[bucket->unit & 1], first);
}

/* A bucket's gradients: where they are made, and where what is reduced of them is kept. */
static void dtrain__lay_grads(dtrain__layout *layout, dtrain__bucket *bucket,
                              const dtrain__turns *turns)
{
    const bool low = layout->desc->reduce_dtype != DTRAIN_DTYPE_F32;
    const bool work = layout->shards.grads && bucket->sharded;
    bucket->grad_home = work ? layout->grad_home : dtrain__home_of(false);
    if (!bucket->trainable) return;
    if (work && bucket->unit != DTRAIN__NONE) {
        bucket->grads = turns->grads[bucket->unit & 1];
        bucket->low_grads = turns->low_grads[bucket->unit & 1];
    } else {
        const int block = work ? DTRAIN__BUFFERS : DTRAIN__GRADS;
        bucket->grads = (float *)dtrain__carve(layout, block, bucket->count, 4);
        if (low)
            bucket->low_grads =
                (uint16_t *)dtrain__carve(layout, DTRAIN__BUFFERS, bucket->count, 2);
    }
    bucket->work = work;
    bucket->grad_shard =
        work
            ? (float *)dtrain__carve(layout, bucket->grad_home->host ? DTRAIN__HOST : DTRAIN__GRADS,
                                     bucket->shard_count, 4)
            : dtrain__after(bucket->grads, bucket->shard_first);
}

/* Two places in host memory, for the longest shard that is put there. */
static void dtrain__lay_landings(dtrain__layout *layout)
{
    int64_t longest = 0;
    for (size_t b = 0; b < layout->bucket_count; b++)
        if (layout->buckets[b].grad_home->host)
            longest = dtrain__max(longest, layout->buckets[b].shard_count);
    for (int i = 0; i < 2; i++)
        layout->landing[i] = (float *)dtrain__carve(layout, DTRAIN__HOST, longest, 4);
}

/* Lays out all memory. Whole values that the library owns lie in registration order behind those of
 * buckets. */
DTRAIN__PRIVATE void dtrain__lay_memory(dtrain__layout *layout)
{
    for (int block = 0; block < DTRAIN__CLASSES; block++) layout->bytes[block] = 0;
    const dtrain__turns turns = dtrain__lay_turns(layout);
    memcpy(layout->work_grads, turns.grads, sizeof turns.grads);
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__lay_values(layout, &layout->buckets[b], &turns);
        dtrain__lay_grads(layout, &layout->buckets[b], &turns);
    }
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        dtrain__entry *entry = &layout->entries[i];
        if (p->state.storage != p || !dtrain__value_is_whole(layout, entry)) continue;
        if (!p->value || entry->lends_value)
            entry->place = (float *)dtrain__carve(layout, DTRAIN__VALUES, p->count, 4);
    }
    dtrain__lay_landings(layout);
    if (layout->compression) dtrain__lay_compression(layout);
}

/* The part of storage i that this rank updates; false if there is none. */
DTRAIN__PRIVATE bool dtrain__piece(const dtrain__layout *layout, size_t i, int64_t *offset,
                                   int64_t *count)
{
    const dtrain_param *p = &layout->params[i];
    const dtrain__entry *entry = &layout->entries[i];
    *offset = 0;
    *count = p->count;
    if (p->state.storage != p || !entry->trainable) return false;
    const dtrain__bucket *bucket = &layout->buckets[entry->bucket];
    if (!bucket->sharded) return true;
    const int64_t low = dtrain__max(entry->offset, bucket->shard_first);
    const int64_t high =
        dtrain__min(entry->offset + p->count, bucket->shard_first + bucket->shard_count);
    *offset = low - entry->offset;
    *count = high - low;
    return *count > 0;
}

/* Counts what this rank holds on the device, whoever allocated it. */
DTRAIN__PRIVATE void dtrain__layout_bytes(const dtrain__layout *layout, uint64_t *values,
                                          uint64_t *grads)
{
    *values = *grads = 0;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        const dtrain__bucket *bucket = &layout->buckets[b];
        const uint64_t whole = (uint64_t)bucket->count * 4,
                       shard = (uint64_t)bucket->shard_count * 4;
        if (bucket->sharded && !bucket->value_home->host)
            *values += layout->shards.params ? shard : whole;
        if (bucket->trainable && !bucket->grad_home->host) *grads += bucket->work ? shard : whole;
    }
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        const dtrain__entry *entry = &layout->entries[i];
        if (p->state.storage != p) continue;
        const bool hosts = p->value && !entry->lends_value;
        if (dtrain__value_is_whole(layout, entry) || hosts) *values += (uint64_t)p->count * 4;
        if (entry->trainable && p->grad && !entry->lends_grad) *grads += (uint64_t)p->count * 4;
    }
}
