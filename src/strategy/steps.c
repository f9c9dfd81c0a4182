/* The lists of steps
 *
 * Only this file knows all steps. At create it makes the lists that buckets go through, and the
 * communicators of the steps. A step that is in no list does not exist. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/steps_internal.h"

/* Ranks of the data axis that exchange something: all ranks; the ranks of this rank's node; the
 * ranks of all nodes with this rank's place in their node. */
typedef enum dtrain__among { DTRAIN__EVERYONE, DTRAIN__NODE, DTRAIN__ACROSS } dtrain__among;

/* Make a communicator that the strategy owns. Its color tells the group, also to tools/null_comm.h:
 * a place in the node is below the node's size, and the number of a node is added to that size. */
static dtrain_result dtrain__own_comm(dtrain_strategy *strategy, dtrain_comm *parent,
                                      dtrain__among among, dtrain_comm **out)
{
    const int rank = parent->rank;
    const int size = strategy->desc.node_size ? (int)strategy->desc.node_size : 1;
    const int color = among == DTRAIN__NODE     ? size + rank / size
                      : among == DTRAIN__ACROSS ? rank % size
                                                : 0;
    DTRAIN__TRY(dtrain_comm_split(parent, color, rank, out));
    if (*out) strategy->owned[strategy->owned_count++] = *out;
    return DTRAIN_OK;
}

static void dtrain__step_add(dtrain__step_list *steps, dtrain__step_fn *begin, dtrain__step_fn *end,
                             dtrain_comm *comm)
{
    const dtrain__step step = {begin, end, comm};
    steps->list[steps->count++] = step;
    steps->early_count = steps->count;
    if (comm) steps->collectives++;
}

/* Add a step with a new communicator. */
static dtrain_result dtrain__step_among(dtrain_strategy *strategy, dtrain__step_list *steps,
                                        dtrain__step_fn *begin, dtrain__step_fn *end,
                                        dtrain__among among)
{
    dtrain_comm *comm;
    DTRAIN__TRY(dtrain__own_comm(strategy, strategy->groups.data, among, &comm));
    dtrain__step_add(steps, begin, end, comm);
    return DTRAIN_OK;
}

/* List the steps before the data axis's steps. If collectives run in the order of their start,
 * TENSOR waits for its few bytes: so the next step, with many bytes, overlaps with backward. */
static void dtrain__list_model(const dtrain_strategy *strategy, dtrain__step_list *steps)
{
    const bool waits = strategy->groups.data->ops->launch_ordered;
    if (strategy->groups.pipeline) dtrain__step_add(steps, dtrain__tie_begin, NULL, NULL);
    if (strategy->tensor_comm)
        dtrain__step_add(steps, dtrain__tensor_begin, dtrain__tensor_end,
                         waits ? NULL : strategy->tensor_comm);
}

/* List the steps of whole or of sharded buckets:
 *
 *     whole       one level    ROUND, ALL_REDUCE, WIDEN; or the rounds of compression
 *                 nodes        NODE_SCATTER, the same, SCALE, NODE_GATHER
 *     sharded     one level    REDUCE_SCATTER, KEEP
 *                 nodes        NODE_SCATTER, REDUCE_SCATTER, SCALE, KEEP
 *                 replicas     REDUCE_SCATTER, REPLICAS, KEEP; or (SHARD_EVERY) REDUCE_SCATTER,
 *                              KEEP, and in the last micro-batch REPLICAS
 *
 * With a reduce_dtype, ROUND and WIDEN are in the lists of all kinds. With ZERO3 REDUCE_OWNERS
 * replaces REDUCE_SCATTER. With shards in host memory PUT replaces KEEP, and GET, REPLICAS, RETURN
 * replace the last REPLICAS. The first step that sends many bytes shares the communicator of the
 * data axis with gathers of values: ranks start both in one order. */
static dtrain_result dtrain__list_steps(dtrain_strategy *strategy, bool sharded, bool nodes)
{
    dtrain__step_list *steps = sharded ? &strategy->sharded : &strategy->whole;
    const dtrain_compression_desc *how = strategy->desc.compression; /* of whole buckets only */
    const bool one = dtrain_comm_size(strategy->groups.data) == 1;
    const bool rounds = strategy->desc.reduce_dtype != DTRAIN_DTYPE_F32 && !how && !one;
    const bool replicas = sharded && strategy->kind->replicas && !one;
    const bool at_last = strategy->desc.accumulation == DTRAIN_ACCUMULATION_SHARD_EVERY;
    const bool on_host = sharded && (strategy->desc.offload & DTRAIN_OFFLOAD_GRADS);
    dtrain__step_fn *const begin = how                      ? dtrain__round_1_begin
                                   : !sharded               ? dtrain__all_reduce_begin
                                   : strategy->kind->owners ? dtrain__reduce_owners_begin
                                                            : dtrain__reduce_scatter_begin;
    dtrain__step_fn *const end = how ? dtrain__round_1_end : NULL;
    const dtrain__among among = nodes ? DTRAIN__ACROSS : replicas ? DTRAIN__NODE : DTRAIN__EVERYONE;
    steps->settle = on_host ? dtrain__host_settle : NULL;
    dtrain__list_model(strategy, steps);
    if (nodes)
        DTRAIN__TRY(
            dtrain__step_among(strategy, steps, dtrain__node_scatter_begin, NULL, DTRAIN__NODE));
    if (rounds) dtrain__step_add(steps, dtrain__round_begin, NULL, NULL);
    if (!one && (nodes || strategy->tensor_comm))
        DTRAIN__TRY(dtrain__step_among(strategy, steps, begin, end, among));
    else if (!one)
        dtrain__step_add(steps, begin, end,
                         sharded ? strategy->groups.copy : strategy->groups.data);
    if (rounds) dtrain__step_add(steps, dtrain__widen_begin, NULL, NULL);
    if (how && !one && dtrain__hook_of(how)->rounds == 2)
        DTRAIN__TRY(
            dtrain__step_among(strategy, steps, dtrain__round_2_begin, dtrain__round_2_end, among));
    if (nodes && !how) dtrain__step_add(steps, dtrain__scale_begin, NULL, NULL);
    if (nodes && !sharded)
        return dtrain__step_among(strategy, steps, dtrain__node_gather_begin, NULL, DTRAIN__NODE);
    if (!sharded) return DTRAIN_OK;
    if (replicas && !at_last)
        DTRAIN__TRY(dtrain__step_among(strategy, steps, dtrain__replicas_begin,
                                       dtrain__replicas_end, DTRAIN__ACROSS));
    dtrain__step_add(steps, on_host ? dtrain__host_put_begin : dtrain__keep_begin, NULL, NULL);
    if (!replicas || !at_last) return DTRAIN_OK;
    const uint32_t early = steps->count;
    if (on_host) dtrain__step_add(steps, dtrain__host_get_begin, NULL, NULL);
    DTRAIN__TRY(dtrain__step_among(strategy, steps, dtrain__replicas_begin, dtrain__replicas_end,
                                   DTRAIN__ACROSS));
    if (on_host) dtrain__step_add(steps, dtrain__host_return_begin, NULL, NULL);
    steps->early_count = early;
    return DTRAIN_OK;
}

/* Make the lists and their communicators, and set the ranks that share one copy of the model.
 * Collective, before the layout. */
DTRAIN__PRIVATE dtrain_result dtrain__steps_make(dtrain_strategy *strategy)
{
    dtrain__groups *groups = &strategy->groups;
    dtrain_strategy_desc *desc = &strategy->desc;
    const int ranks = dtrain_comm_size(groups->data);
    const bool sharded = strategy->kind->shards.state, replicas = strategy->kind->replicas;
    if (groups->sequence_parallel) /* first: later calls can fail on one data axis only */
        DTRAIN__TRY(
            dtrain__own_comm(strategy, groups->tensor, DTRAIN__EVERYONE, &strategy->tensor_comm));
    DTRAIN__TRY(dtrain__resolve_node_size(strategy, ranks)); /* the same on the data axis */
    dtrain__resolve_levels(desc, ranks);
    const bool nodes = desc->hierarchical && desc->node_size > 1 && (int)desc->node_size < ranks;
    const bool means =
        desc->reduce_dtype == DTRAIN_DTYPE_F16 ||
        dtrain__sums_dtype(strategy->params, strategy->param_count) == DTRAIN_DTYPE_F64;
    if (replicas)
        DTRAIN__TRY(dtrain__own_comm(strategy, groups->data, DTRAIN__NODE, &groups->copy));
    else if (sharded && (ranks > 1 || desc->offload > DTRAIN_OFFLOAD_OPTIMIZER))
        groups->copy = groups->data;
    strategy->whole.op = nodes && !means ? DTRAIN_REDUCE_SUM : DTRAIN_REDUCE_MEAN;
    strategy->sharded.op = (nodes || replicas) && !means ? DTRAIN_REDUCE_SUM : DTRAIN_REDUCE_MEAN;
    const int sharers = replicas ? (int)desc->node_size : ranks;
    if (!sharded || sharers == 1) DTRAIN__TRY(dtrain__list_steps(strategy, false, nodes));
    if (sharded) DTRAIN__TRY(dtrain__list_steps(strategy, true, nodes));
    strategy->lockstep = groups->data->ops->launch_ordered &&
                         (strategy->whole.collectives > 1 || strategy->sharded.collectives > 1);
    strategy->fetch[0] = groups->copy;
    if (!nodes || !sharded) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__own_comm(strategy, groups->data, DTRAIN__ACROSS, &strategy->fetch[0]));
    return dtrain__own_comm(strategy, groups->data, DTRAIN__NODE, &strategy->fetch[1]);
}

DTRAIN__PRIVATE dtrain_result dtrain__settle_steps(dtrain_strategy *strategy, bool over)
{
    return strategy->sharded.settle ? strategy->sharded.settle(strategy, over) : DTRAIN_OK;
}

/* Give each bucket its list, and list the state of compression. */
DTRAIN__PRIVATE dtrain_result dtrain__steps_open(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain_compression_desc *how = layout->compression;
    strategy->compressed_from =
        how && how->dense_steps != DTRAIN_DENSE_STEPS_NONE ? how->dense_steps : 0;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__bucket *bucket = &layout->buckets[b];
        bucket->steps = bucket->sharded ? &strategy->sharded : &strategy->whole;
    }
    return how ? dtrain__compression_open(strategy) : DTRAIN_OK;
}

/* ---- Memory of steps --------------------------------------------------------------------------*/

/* Lay out all memory, also that of steps. */
DTRAIN__PRIVATE void dtrain__steps_memory(dtrain__layout *layout)
{
    dtrain__lay_memory(layout);
    dtrain__lay_tensor_sums(layout);
    if (layout->compression) dtrain__lay_hooks(layout);
}

/* Make a layout with the tables of its steps, and count its memory. dtrain__steps_layout_free frees
 * it, also after an error. params and *desc are resolved. */
DTRAIN__PRIVATE dtrain_result dtrain__steps_layout(dtrain__layout *layout,
                                                   const dtrain__model *model,
                                                   const dtrain_strategy_desc *desc, int rank)
{
    DTRAIN__TRY(dtrain__layout_make(layout, model->allocator, model->params, model->count, desc,
                                    model->ranks, rank));
    if (layout->compression) DTRAIN__TRY(dtrain__layout_hooks(layout, model->allocator));
    dtrain__steps_memory(layout);
    return DTRAIN_OK;
}

/* Free a layout with the tables of its steps. */
DTRAIN__PRIVATE void dtrain__steps_layout_free(dtrain__layout *layout, const dtrain_allocator *a)
{
    dtrain__free(a, layout->compressed, layout->count, sizeof *layout->compressed);
    dtrain__free(a, layout->tensors, layout->count, sizeof *layout->tensors);
    dtrain__layout_free(layout, a);
}
