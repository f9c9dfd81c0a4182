/* The ways of a bucket
 *
 * The only file that knows all steps (strategy/road.c, ways/): it chooses those that a bucket takes
 * from gradients to their mean. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/ways_internal.h"

/* Begin and end of each step, and its flags. */
static const dtrain__step dtrain__by_nothing = {NULL, NULL, 0}; /* one rank has its mean */
static const dtrain__step dtrain__by_shard_alone = {NULL, dtrain__shard_add, 0};
static const dtrain__step dtrain__by_all_reduce = {dtrain__all_reduce_begin, dtrain__all_reduce_end,
                                                   0};
static const dtrain__step dtrain__by_reduce_scatter = {dtrain__reduce_scatter_begin,
                                                       dtrain__reduce_scatter_end, 0};
static const dtrain__step dtrain__by_replicas[] = {
    {dtrain__replicas_begin, dtrain__replicas_end, 0},
    {dtrain__replicas_begin, dtrain__replicas_end, DTRAIN__LAST_ONLY}, /* at last */
};
static const dtrain__step dtrain__by_tie = {dtrain__tie_begin, NULL, 0};
static const dtrain__step dtrain__by_tensor = {dtrain__tensor_begin, dtrain__tensor_end,
                                               DTRAIN__BRIEF};
static const dtrain__step dtrain__by_node_scatter = {dtrain__node_scatter_begin, NULL, 0};
static const dtrain__step dtrain__by_node_gather = {dtrain__node_gather_begin, NULL, 0};
static const dtrain__step dtrain__by_hook[] = {
    {dtrain__round_1_begin, dtrain__round_1_end, 0},
    {dtrain__round_2_begin, dtrain__round_2_end, 0},
};

/* Choose the ways, and the ranks that exchange each bucket:
 *
 *                    whole buckets                           sharded buckets
 *     one level      ALL_REDUCE, or what compression has     REDUCE_SCATTER
 *     replicas       ALL_REDUCE                              REDUCE_SCATTER, REPLICAS
 *     nodes          NODE_SCATTER, the same, NODE_GATHER     NODE_SCATTER, REDUCE_SCATTER
 *
 * Under sequence parallelism the sum over the tensor axis comes first, and the step that would have
 * been the first, on a communicator that gathers of values use too, gets one of its own. All ways
 * have TIE in front, which tied buckets alone do not leave out (road.c). */
static void dtrain__choose_ways(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain__step **whole = strategy->ways[DTRAIN__WHOLE];
    const dtrain__step **compressed = strategy->ways[DTRAIN__COMPRESSED];
    const dtrain__step **sharded = strategy->ways[DTRAIN__SHARDED];
    const dtrain_compression_desc *how = layout->compression;
    const bool nodes = layout->node_ranks > 1, partial = strategy->groups.sequence_parallel;
    const bool at_last = strategy->desc.accumulation == DTRAIN_ACCUMULATION_SHARD_EVERY;
    strategy->compressed_from = !how                                          ? UINT64_MAX
                                : how->dense_steps == DTRAIN_DENSE_STEPS_NONE ? 0
                                                                              : how->dense_steps;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__bucket *bucket = &layout->buckets[b];
        strategy->tied |= bucket->tied;
        const bool inside = bucket->sharded && strategy->kind->replicas;
        bucket->comm = nodes     ? strategy->extra[DTRAIN__ACROSS]
                       : partial ? strategy->extra[inside ? DTRAIN__AFTER_NODE : DTRAIN__AFTER]
                       : bucket->sharded ? strategy->groups.copy
                                         : strategy->groups.data;
    }
    *whole++ = *compressed++ = *sharded++ = &dtrain__by_tie;
    if (partial) *whole++ = *compressed++ = *sharded++ = &dtrain__by_tensor;
    if (layout->all == 1) {
        if (!partial) *whole = &dtrain__by_nothing;
        *sharded = &dtrain__by_shard_alone;
        return;
    }
    if (nodes) *whole++ = *compressed++ = *sharded++ = &dtrain__by_node_scatter;
    *whole++ = &dtrain__by_all_reduce;
    for (uint32_t round = 0; how && round < dtrain__hook_of(how)->rounds; round++)
        *compressed++ = &dtrain__by_hook[round];
    if (nodes) *whole++ = *compressed++ = &dtrain__by_node_gather;
    *sharded++ = &dtrain__by_reduce_scatter;
    if (strategy->kind->replicas) *sharded++ = &dtrain__by_replicas[at_last];
}

/* Choose the ways and initialise what they keep. */
DTRAIN__PRIVATE dtrain_result dtrain__ways_open(dtrain_strategy *strategy)
{
    dtrain__choose_ways(strategy);
    return strategy->layout.compression ? dtrain__compression_open(strategy) : DTRAIN_OK;
}

/* ---- What ways add to a layout ----------------------------------------------------------------*/

/* Lay out all memory, that of its ways too. */
DTRAIN__PRIVATE void dtrain__ways_memory(dtrain__layout *layout)
{
    dtrain__lay_memory(layout);
    dtrain__lay_tensor_sums(layout);
    if (layout->compression) dtrain__lay_hooks(layout);
}

/* Make a layout with the tables of its ways, and count its memory; dtrain__ways_free frees it, also
 * after an error. params and *desc are resolved. */
DTRAIN__PRIVATE dtrain_result dtrain__ways_layout(dtrain__layout *layout, const dtrain_allocator *a,
                                                  const dtrain_param *params, size_t count,
                                                  const dtrain_strategy_desc *desc, int ranks,
                                                  int rank)
{
    DTRAIN__TRY(dtrain__layout_make(layout, a, params, count, desc, ranks, rank));
    if (layout->compression) DTRAIN__TRY(dtrain__layout_hooks(layout, a));
    dtrain__ways_memory(layout);
    return DTRAIN_OK;
}

/* Free a layout with the tables of its ways. */
DTRAIN__PRIVATE void dtrain__ways_free(dtrain__layout *layout, const dtrain_allocator *a)
{
    dtrain__hooks_free(layout, a);
    dtrain__layout_free(layout, a);
}
