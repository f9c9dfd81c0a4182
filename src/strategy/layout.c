/* The layout: which parameters travel together, and which rank keeps which part of them
 *
 * A layout is a pure function of what all ranks have in common. Ranks need not exchange it, and a
 * plan can make one without ranks. Ranks of a tensor axis can have parts of different lengths, and
 * still put the same parameters into the same buckets in the same order: lengths that decide about
 * buckets are computed from an even part (dtrain__even_count).
 *
 *     kind                                                              state  grads  params
 *     DDP: buckets by size, last parameter first; everything is whole   -      -      -
 *     ZERO1: the same buckets, each cut into one shard per rank         1/N    -      -
 *     SHARD_GRAD_OP and below: a bucket is a unit. Backward writes its  1/N    1/N    -
 *     gradients into one of two alternating buffers; their reduced
 *     shard has separate memory
 *     FULL_SHARD, HYBRID_SHARD: values are gathered into one of two     1/N    1/N    1/N
 *     slots, unit u into slot u % 2
 *     ZERO3: shards end where tensors end                               owner  owner  owner
 *
 *     unit u's bucket | tensor a ..... pad | tensor b .... pad | c | pad |
 *     FULL_SHARD      |<-- rank 0 -->|<-- rank 1 -->|<-- rank 2 -------->|     equal shards
 *     ZERO3           |<----- rank 0 ----->|<----- rank 2 ---->|<rank 1->|     tensors by owner
 *
 * Buckets are launched in their order: units from the last to the first, then parameters that
 * several units use, then whole parameters, then weights that pipeline stages on several ranks use.
 * Frozen parameters of sharded units have separate buckets that are only gathered. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"

/* In the order of dtrain_strategy_kind, from DTRAIN_STRATEGY_DDP on. */
static const dtrain__kind_row dtrain__kind_rows[] = {
    /* name, {optimizer state, gradients, parameters are sharded}, owners, replicas */
    {"ddp", {false, false, false}, false, false},
    {"zero1", {true, false, false}, false, false},
    {"shard_grad_op", {true, true, false}, false, false},
    {"full_shard", {true, true, true}, false, false},
    {"zero3", {true, true, true}, true, false},
    {"hybrid_shard", {true, true, true}, false, true},
};

/* Find the row of a kind; NULL for AUTO, which is not resolved yet, and for unknown numbers. */
DTRAIN__PRIVATE const dtrain__kind_row *dtrain__row_of(uint32_t kind)
{
    if (kind < DTRAIN_STRATEGY_DDP || kind > DTRAIN_STRATEGY_HYBRID_SHARD) return NULL;
    return &dtrain__kind_rows[kind - DTRAIN_STRATEGY_DDP];
}

/* Return the length of a parameter that is the same on all ranks of the tensor axis. */
static int64_t dtrain__even_count(const dtrain__layout *layout, size_t i)
{
    const dtrain_param *p = &layout->params[i];
    const int64_t ranks = p->cut.axis ? layout->tensor_ranks : 1;
    return (dtrain__whole_count(p) + ranks - 1) / ranks;
}

/* Fill in the unit of each storage (NONE: several units use it) and whether it is trainable. A
 * frozen storage freezes its aliases; a frozen alias only contributes no gradient. */
static void dtrain__lay_units(dtrain__layout *layout)
{
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        dtrain__entry *entry = &layout->entries[i],
                      *storage = &layout->entries[p->state.storage->state.index];
        uint32_t unit = (uint32_t)layout->unit_count; /* a new one, unless found below */
        for (uint32_t u = 0; u < layout->unit_count; u++)
            if (layout->units[u].id == p->unit) unit = u;
        if (unit == layout->unit_count) layout->unit_count++;
        layout->units[unit].id = p->unit;
        layout->units[unit].own_memory = layout->desc->keep_after_forward;
        entry->trainable =
            dtrain__has_memory(p) && !((p->flags | p->state.storage->flags) & DTRAIN_PARAM_FROZEN);
        entry->local = !p->state.remote;
        if (!entry->local && dtrain__has_memory(p)) storage->tied = true;
        if (p->state.storage == p) entry->unit = unit;
        else if (storage->unit != unit) storage->unit = DTRAIN__NONE;
        entry->whole = !layout->shards.state || (p->flags & DTRAIN_PARAM_BUFFER);
    }
}

/* Choose the owners of tensors: the largest tensor first, each to the rank with the least elements.
 * This is greedy, and at most 4/3 of the best balance (Graham, "Bounds on multiprocessing timing
 * anomalies", 1969). load (ranks) is scratch. */
static void dtrain__lay_owners(dtrain__layout *layout, int64_t *load)
{
    memset(load, 0, (size_t)layout->ranks * sizeof *load);
    for (size_t i = 0; i < layout->count; i++) layout->owners[i] = DTRAIN__NONE;
    for (;;) {
        const dtrain_param *next = NULL;
        int64_t most = 0;
        int least = 0;
        for (size_t i = 0; i < layout->count; i++) {
            const dtrain_param *p = &layout->params[i];
            if (p->state.storage != p || layout->entries[i].whole) continue;
            if (layout->owners[i] != DTRAIN__NONE) continue;
            const int64_t count = dtrain__even_count(layout, i);
            if (next && count <= most) continue;
            next = p;
            most = count;
        }
        if (!next) return;
        for (int r = 1; r < layout->ranks; r++)
            if (load[r] < load[least]) least = r;
        layout->owners[next->state.index] = (uint32_t)least;
        load[least] += dtrain__padded(most);
    }
}

/* Begin the next bucket of the table. dtrain__bucket_close counts it if it has members. */
static dtrain__bucket *dtrain__bucket_new(dtrain__layout *layout, uint32_t unit, bool trainable,
                                          bool sharded)
{
    dtrain__bucket *bucket = &layout->buckets[layout->bucket_count];
    memset(bucket, 0, sizeof *bucket);
    bucket->unit = unit;
    bucket->trainable = trainable;
    bucket->sharded = sharded;
    bucket->first_param = DTRAIN__NONE;
    if (sharded && layout->cuts)
        bucket->cuts = layout->cuts + layout->bucket_count * ((size_t)layout->ranks + 1);
    return bucket;
}

static void dtrain__bucket_add(dtrain__layout *layout, dtrain__bucket *bucket, size_t index)
{
    dtrain__entry *entry = &layout->entries[index];
    entry->bucket = bucket;
    entry->offset = bucket->count;
    bucket->count += dtrain__padded(dtrain__words(layout, layout->params[index].count));
}

/* Close a bucket: pad it, so that its shards, or slices of nodes, have equal lengths. */
static void dtrain__bucket_close(dtrain__layout *layout, dtrain__bucket *bucket)
{
    const int64_t parts = bucket->cuts ? 1 : bucket->sharded ? layout->ranks : layout->node_ranks;
    bucket->count = parts * dtrain__padded((bucket->count + parts - 1) / parts);
    layout->bucket_count++;
}

/* Set the shard and slice of this rank in all buckets. Shards have equal lengths; with ZERO3 a
 * shard is the tensors of one owner. With several nodes, rank l of each node exchanges slice l of a
 * bucket with the ranks l of the other nodes. In a sharded bucket, rank l of node m keeps part m of
 * slice l:
 *
 *     2 nodes of 2 ranks    | slice 0 . . . . . . . . | slice 1 . . . . . . . . |
 *     shards of ranks       | rank 0     | rank 2     | rank 1     | rank 3     | */
DTRAIN__PRIVATE void dtrain__layout_turn(dtrain__layout *layout, int all_rank)
{
    const int64_t node = layout->node_ranks;
    layout->all_rank = all_rank;
    layout->rank = all_rank % layout->ranks;
    layout->slice_rank = all_rank / layout->node_ranks;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__bucket *bucket = &layout->buckets[b];
        bucket->slice_count = bucket->count / node;
        bucket->slice_first = bucket->slice_count * (all_rank % node);
        bucket->shard_count = bucket->count;
        if (!bucket->sharded) continue;
        bucket->shard_count = bucket->count / layout->ranks;
        bucket->shard_first =
            bucket->slice_first + bucket->shard_count * (layout->slice_rank % layout->ranks);
        if (!bucket->cuts) continue;
        bucket->shard_first = bucket->cuts[layout->rank];
        bucket->shard_count = bucket->cuts[layout->rank + 1] - bucket->shard_first;
    }
}

/* Make the bucket of a unit's trainable or frozen tensors, owner by owner (unit NONE: tensors that
 * several units use). Return NULL if there are none. */
static dtrain__bucket *dtrain__lay_bucket(dtrain__layout *layout, uint32_t unit, bool trainable)
{
    const int runs = layout->owners ? layout->ranks : 1;
    dtrain__bucket *bucket = dtrain__bucket_new(layout, unit, trainable, true);
    size_t members = 0;
    for (int r = 0; r < runs; r++) {
        if (bucket->cuts) bucket->cuts[r] = bucket->count;
        for (size_t i = 0; i < layout->count; i++) {
            const dtrain__entry *entry = &layout->entries[i];
            if (layout->params[i].state.storage != &layout->params[i] || entry->whole) continue;
            if (entry->unit != unit || entry->trainable != trainable) continue;
            if (layout->owners && layout->owners[i] != (uint32_t)r) continue;
            dtrain__bucket_add(layout, bucket, i);
            members++;
        }
    }
    if (!members) return NULL;
    if (bucket->cuts) bucket->cuts[runs] = bucket->count;
    dtrain__bucket_close(layout, bucket);
    return bucket;
}

/* Fill buckets from the last parameter on, up to a cap, which only a single large gradient may
 * exceed. By default the first bucket is small, so that communication starts early. A tied gradient
 * is final when backward has come to its first entry, the storage; its place in the order is
 * there. */
static void dtrain__lay_size_buckets(dtrain__layout *layout, bool sharded)
{
    const size_t usual = layout->desc->bucket_bytes;
    size_t cap = usual == DTRAIN__BUCKET_BYTES ? 1u << 20 : usual;
    int64_t filled = 0; /* words, of even parts */
    dtrain__bucket *last = NULL;
    for (size_t i = layout->count; i-- > 0;) {
        const dtrain__entry *entry = &layout->entries[i];
        if (layout->params[i].state.storage != &layout->params[i] || !entry->trainable) continue;
        if (entry->whole == sharded || entry->tied) continue;
        const int64_t length = dtrain__padded(dtrain__words(layout, dtrain__even_count(layout, i)));
        if (last && filled && (size_t)(filled + length) > cap / sizeof(float)) {
            dtrain__bucket_close(layout, last);
            last = NULL;
            filled = 0;
            cap = usual;
        }
        if (!last) last = dtrain__bucket_new(layout, DTRAIN__NONE, true, sharded);
        dtrain__bucket_add(layout, last, i);
        filled += length;
    }
    if (last) dtrain__bucket_close(layout, last);
}

/* Make a bucket of each tied weight that other ranks' pipeline stages have copies of. These buckets
 * come last, in the same order on all of these ranks, so that ranks do not wait in a circle. */
static void dtrain__lay_ties(dtrain__layout *layout)
{
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain__entry *entry = &layout->entries[i];
        if (!entry->tied || !entry->trainable) continue;
        dtrain__bucket *bucket = dtrain__bucket_new(layout, DTRAIN__NONE, true, !entry->whole);
        bucket->tied = true;
        dtrain__bucket_add(layout, bucket, i);
        dtrain__bucket_close(layout, bucket);
    }
}

/* Fill entries, buckets and units, which are zero. */
static void dtrain__lay_out(dtrain__layout *layout)
{
    layout->shared.own_memory = true;
    dtrain__lay_units(layout);
    if (layout->owners) dtrain__lay_owners(layout, layout->cuts); /* not yet filled */
    if (layout->kind->shards.grads) {
        for (size_t u = layout->unit_count; u-- > 0;) {
            dtrain__unit *unit = &layout->units[u];
            unit->trainable = dtrain__lay_bucket(layout, (uint32_t)u, true);
            if (layout->shards.params)
                unit->frozen = dtrain__lay_bucket(layout, (uint32_t)u, false);
        }
        layout->shared.trainable = dtrain__lay_bucket(layout, DTRAIN__NONE, true);
        if (layout->shards.params)
            layout->shared.frozen = dtrain__lay_bucket(layout, DTRAIN__NONE, false);
    } else dtrain__lay_size_buckets(layout, true);
    dtrain__lay_size_buckets(layout, false);
    layout->untied = layout->bucket_count;
    dtrain__lay_ties(layout);
    for (size_t i = 0; i < layout->count; i++) {
        const dtrain_param *p = &layout->params[i];
        dtrain__entry *entry = &layout->entries[i],
                      *storage = &layout->entries[p->state.storage->state.index];
        entry->bucket = storage->bucket;
        dtrain__bucket *bucket = entry->bucket;
        if (!bucket) continue;
        if (i < bucket->first_param) bucket->first_param = (uint32_t)i;
        bucket->last_param = (uint32_t)i;
        if (!entry->trainable || !entry->local) continue;
        storage->uses++;
        bucket->uses++;
    }
}

/* Make the tables of a layout. dtrain__layout_free frees them, also after an error.
 * dtrain__lay_memory lays out the memory. The table of buckets has one more than there can be: a
 * bucket is begun before it is known whether it has members. */
DTRAIN__PRIVATE dtrain_result dtrain__layout_make(dtrain__layout *layout, const dtrain_allocator *a,
                                                  const dtrain_param *params, size_t count,
                                                  const dtrain_strategy_desc *desc, int all,
                                                  int all_rank)
{
    const dtrain_mesh_info mesh = dtrain__mesh_info(desc->mesh);
    memset(layout, 0, sizeof *layout);
    layout->params = params;
    layout->count = count;
    layout->desc = desc;
    layout->kind = dtrain__row_of(desc->kind);
    layout->dtype = dtrain__sums_dtype(params, count);
    layout->tensor_ranks = desc->mesh ? mesh.tensor : 1;
    layout->partial = mesh.sequence_parallel;
    /* Which classes are really sharded, and among how many ranks? One rank shards nothing, unless
     * its shard is in host memory. Gradients that are reduced in the last micro-batch (LAST) are
     * whole. */
    const dtrain__classes *kind = &layout->kind->shards;
    const int size = (int)desc->node_size;
    layout->all = all;
    layout->ranks = !kind->state ? 1 : layout->kind->replicas && size ? size : all;
    layout->node_ranks = desc->hierarchical && size > 1 && size < all ? size : 1;
    layout->slice_ranks = all / layout->node_ranks;
    layout->compression = all > 1 ? desc->compression : NULL;
    layout->values_on_host = kind->params && (desc->offload & DTRAIN_OFFLOAD_PARAMS);
    layout->grads_on_host = kind->grads && (desc->offload & DTRAIN_OFFLOAD_GRADS);
    layout->shards.params = kind->params && (layout->ranks > 1 || layout->values_on_host);
    layout->shards.grads = kind->grads && (layout->ranks > 1 || layout->grads_on_host) &&
                           desc->accumulation != DTRAIN_ACCUMULATION_LAST;
    layout->shards.state = layout->ranks > 1 || layout->shards.params || layout->shards.grads;
    const size_t cuts = (size_t)layout->ranks + 1;
    layout->entries =
        (dtrain__entry *)dtrain__alloc(a, count, sizeof *layout->entries, "parameter entries");
    layout->buckets =
        (dtrain__bucket *)dtrain__alloc(a, count + 1, sizeof *layout->buckets, "buckets");
    layout->units = (dtrain__unit *)dtrain__alloc(a, count, sizeof *layout->units, "units");
    if (!layout->entries || !layout->buckets || !layout->units) return DTRAIN_ERROR_MEMORY;
    if (layout->shards.state && layout->kind->owners) {
        layout->owners =
            (uint32_t *)dtrain__alloc(a, count, sizeof *layout->owners, "owners of parameters");
        layout->cuts = (int64_t *)dtrain__alloc(a, count + 1, cuts * sizeof *layout->cuts, "cuts");
        if (!layout->owners || !layout->cuts) return DTRAIN_ERROR_MEMORY;
    }
    dtrain__lay_out(layout);
    dtrain__layout_turn(layout, all_rank);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__layout_free(dtrain__layout *layout, const dtrain_allocator *a)
{
    const size_t count = layout->count;
    dtrain__free(a, layout->cuts, count + 1, ((size_t)layout->ranks + 1) * sizeof *layout->cuts);
    dtrain__free(a, layout->owners, count, sizeof *layout->owners);
    dtrain__free(a, layout->units, count, sizeof *layout->units);
    dtrain__free(a, layout->buckets, count + 1, sizeof *layout->buckets);
    dtrain__free(a, layout->entries, count, sizeof *layout->entries);
}

/* Return the bucket of a parameter if it is sharded; NULL if every rank has the whole value. */
DTRAIN__PRIVATE dtrain__bucket *dtrain__shard_bucket(const dtrain__layout *layout, size_t i)
{
    dtrain__bucket *bucket = layout->entries[i].bucket;
    return bucket && bucket->sharded ? bucket : NULL;
}
