/* Gradient compression
 *
 * Steps of a whole bucket's way that take the place of its all-reduce, see dtrain__choose_ways:
 *
 *     top-k       ALL_GATHER   TOPK_GATHER                   strategy/topk.c
 *                 BALANCED     TOPK_TRADE,  TOPK_PUBLISH
 *     PowerSGD                 P,  Q                         strategy/powersgd.c
 *
 * With hierarchical the part of a bucket that this rank exchanges with other nodes, its hop, is a
 * slice; without nodes it is the bucket. The part of one parameter in the hop is a portion, and
 * each portion is compressed by itself, so that without nodes what is sent does not depend on how
 * parameters are put into buckets:
 *
 *     bucket, 2 nodes of 2 ranks   | a . . . . . . . | b . . . . . . . . | c . |
 *     hop of ranks 0 and 2         | a               | b    |
 *     hop of ranks 1 and 3                                  | b          | c   |
 *
 * Portions that are not worth it (1-D, few elements) are dense: packed together and all-reduced.
 *
 * A selection of K elements as it travels; portion p has its quota at places at(p) of both lists:
 *
 *     block   | values: K fp32, or K of 16 bits, padded | indices in the portion or region: K i32 |
 *
 * The quota of count elements is ratio * count, rounded to nearest, at least 1. BALANCED cuts every
 * portion in N regions of ceil(count / N), the last one shorter, and takes the quota of a whole
 * region from each. Where a selection would be larger than what it is selected from (the beginning
 * of a warm-up), the bucket goes masked: what is not selected as zeros, whole, with the same sums.
 *
 * Error feedback is exact: what a rank has taken from its gradient and residual together is what it
 * sends, after rounding, and the rest is its residual. So at any time, to rounding,
 *
 *     sum over ranks of residuals + N * sum of means so far = sum of all gradients so far
 *
 * (With nodes and fp16 residuals are of means over a node, and count G times.) */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "comm/comm.h"
#include "strategy/compression_internal.h"
#include "strategy/layout_internal.h"
#include "strategy/strategy_internal.h"
#include "device/backend.h"

/* ---- How much is selected ---------------------------------------------------------------------*/

DTRAIN__PRIVATE bool dtrain__is_balanced(const dtrain_compression_desc *how)
{
    return how->kind == DTRAIN_COMPRESSION_TOPK &&
           how->sparse_exchange == DTRAIN_SPARSE_EXCHANGE_BALANCED;
}

/* The number of steps at the beginning that are not compressed. */
DTRAIN__PRIVATE uint64_t dtrain__dense_steps(const dtrain_compression_desc *how)
{
    return how->dense_steps == DTRAIN_DENSE_STEPS_NONE ? 0 : how->dense_steps;
}

/* The share that is sent in the step after `step` others. It falls geometrically from warmup_ratio
 * to topk_ratio once the steps without compression are over. */
DTRAIN__PRIVATE double dtrain__ratio_of(const dtrain_compression_desc *how, uint64_t step)
{
    const double end = (double)how->topk_ratio, begin = (double)how->warmup_ratio;
    const uint64_t i = step - dtrain__dense_steps(how);
    if (i >= how->warmup_steps) return end;
    return begin * pow(end / begin, (double)i / (double)how->warmup_steps);
}

/* The largest share of all steps, which memory is made for. */
static double dtrain__largest_ratio(const dtrain_compression_desc *how)
{
    return (double)(how->warmup_steps ? how->warmup_ratio : how->topk_ratio);
}

/* The number of elements that are selected of count. */
DTRAIN__PRIVATE int64_t dtrain__quota(double ratio, int64_t count)
{
    const int64_t k = (int64_t)(ratio * (double)count + 0.5);
    return k < 1 ? 1 : k < count ? k : count;
}

/* Counts the elements of a block. */
static int64_t dtrain__selection(const dtrain__layout *layout, const dtrain__sparse *sparse,
                                 double ratio)
{
    int64_t count = 0;
    for (size_t i = sparse->first; i < sparse->end; i++)
        if (!layout->portions[i].dense) count += dtrain__quota(ratio, layout->portions[i].region);
    return count;
}

/* 32-bit words of the values of a block. */
DTRAIN__PRIVATE int64_t dtrain__value_words(const dtrain__layout *layout, int64_t selected)
{
    return layout->desc->reduce_dtype == DTRAIN_DTYPE_F32 ? selected : (selected + 1) / 2;
}

/* 32-bit words of a block: values, then indices. */
DTRAIN__PRIVATE int64_t dtrain__block_words(const dtrain__layout *layout, int64_t selected)
{
    return dtrain__value_words(layout, selected) + selected;
}

/* The share from which on a selection is larger than what it is selected from: whole, a bucket is 2
 * words an element, over N; selected it is a block to everybody, once or twice. It does not depend
 * on the bucket, so nor does what is sent. */
DTRAIN__PRIVATE double dtrain__masked_share(const dtrain__layout *layout)
{
    const double item = layout->desc->reduce_dtype == DTRAIN_DTYPE_F32 ? 8 : 6;
    return dtrain__is_balanced(layout->compression) ? 8 / (2 * item)
                                                    : 8 / (item * layout->hop_ranks);
}

/* ---- Layout -----------------------------------------------------------------------------------*/

DTRAIN__PRIVATE void dtrain__layout_portions_free(dtrain__layout *layout, const dtrain_allocator *a)
{
    dtrain__free(a, layout->sparse, layout->count, sizeof *layout->sparse);
    dtrain__free(a, layout->portions, layout->count, sizeof *layout->portions);
    layout->sparse = NULL;
    layout->portions = NULL;
}

/* Decides how a portion is compressed, or that it is dense. */
static void dtrain__portion_kind(const dtrain__layout *layout, dtrain__portion *portion)
{
    const dtrain_compression_desc *how = layout->compression;
    const dtrain_param *p = &layout->params[portion->param];
    const int64_t rank = (int64_t)how->powersgd_rank, regions = layout->hop_ranks;
    portion->dense = true;
    portion->region = portion->count;
    if (dtrain__param_dims(p) < 2 || p->count < how->dense_below) return;
    if (how->kind == DTRAIN_COMPRESSION_POWERSGD) {
        portion->rows = p->shape[0];
        portion->columns = p->count / p->shape[0];
        portion->dense = 2 * (portion->rows + portion->columns) * rank >= p->count;
        return;
    }
    if (portion->count > INT32_MAX) return; /* indices have 32 bits */
    portion->dense = false;
    if (!dtrain__is_balanced(how)) return;
    portion->region = (portion->count + regions - 1) / regions;
    const int64_t last = portion->count - (regions - 1) * portion->region;
    portion->dense = last < dtrain__quota(dtrain__largest_ratio(how), portion->region);
}

/* Appends the part of a parameter that lies in this rank's hop, if there is one. */
static void dtrain__layout_portion(dtrain__layout *layout, dtrain__bucket *bucket, uint32_t index)
{
    const dtrain_param *p = &layout->params[index];
    const dtrain__entry *entry = &layout->entries[index];
    dtrain__sparse *sparse = bucket->sparse;
    dtrain__portion *portion = &layout->portions[layout->portion_count];
    const int64_t low = dtrain__max(entry->offset, bucket->hop_first);
    const int64_t high =
        dtrain__min(entry->offset + p->count, bucket->hop_first + bucket->hop_count);
    if (high <= low) return;
    memset(portion, 0, sizeof *portion);
    portion->param = index;
    portion->first = low;
    portion->count = high - low;
    portion->dense_at = sparse->dense_count;
    dtrain__portion_kind(layout, portion);
    if (portion->dense) {
        sparse->dense_count += portion->count;
    } else if (portion->rows) {
        sparse->p_count += portion->rows * (int64_t)layout->compression->powersgd_rank;
        sparse->q_count += portion->columns * (int64_t)layout->compression->powersgd_rank;
    } else {
        const int64_t most =
            dtrain__quota(dtrain__largest_ratio(layout->compression), portion->count);
        sparse->largest = dtrain__max(sparse->largest, most);
    }
    layout->portion_count++;
}

/* Cuts all buckets of a layout into portions. */
DTRAIN__PRIVATE dtrain_result dtrain__layout_portions(dtrain__layout *layout,
                                                      const dtrain_allocator *a)
{
    layout->portions = (dtrain__portion *)dtrain__alloc(a, layout->count, sizeof *layout->portions,
                                                        "portions of parameters");
    layout->sparse = (dtrain__sparse *)dtrain__alloc(a, layout->count, sizeof *layout->sparse,
                                                     "compressed buckets");
    if (!layout->portions || !layout->sparse) return DTRAIN_ERROR_MEMORY;
    const double largest = dtrain__largest_ratio(layout->compression);
    const double masked = dtrain__masked_share(layout);
    const double sparse_share = largest < masked ? largest : masked;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__bucket *bucket = &layout->buckets[b];
        dtrain__sparse *sparse = bucket->sparse = &layout->sparse[b];
        sparse->first = layout->portion_count;
        for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++)
            if (layout->params[i].state.storage == &layout->params[i] &&
                layout->entries[i].bucket == b)
                dtrain__layout_portion(layout, bucket, i);
        sparse->end = layout->portion_count;
        sparse->room = dtrain__selection(layout, sparse, sparse_share);
    }
    return DTRAIN_OK;
}

/* The memory of one bucket. */
static void dtrain__lay_sparse(dtrain__layout *layout, const dtrain__bucket *bucket)
{
    const dtrain_compression_desc *how = layout->compression;
    dtrain__sparse *sparse = bucket->sparse;
    const bool low = layout->desc->reduce_dtype != DTRAIN_DTYPE_F32;
    const bool topk = how->kind == DTRAIN_COMPRESSION_TOPK;
    const int64_t blocks = layout->hop_ranks * dtrain__block_words(layout, sparse->room);
    const bool masked = dtrain__largest_ratio(how) >= dtrain__masked_share(layout);
    const int64_t scratch = topk && (low || masked) ? sparse->largest : 0;
    const int64_t kept = sparse->largest || sparse->q_count ? bucket->hop_count : 0;
    if (!how->no_error_feedback) {
        sparse->residual = (float *)dtrain__carve(layout, DTRAIN__BUFFERS, kept, 4);
        layout->state_bytes += (uint64_t)kept * 4;
    }
    if (how->topk_momentum > 0) {
        sparse->velocity = (float *)dtrain__carve(layout, DTRAIN__BUFFERS, kept, 4);
        layout->state_bytes += (uint64_t)kept * 4;
    }
    sparse->dense =
        (float *)dtrain__carve(layout, DTRAIN__BUFFERS, sparse->dense_count + sparse->p_count, 4);
    sparse->q = (float *)dtrain__carve(layout, DTRAIN__BUFFERS, sparse->q_count, 4);
    sparse->q_seed = (float *)dtrain__carve(layout, DTRAIN__BUFFERS, sparse->q_count, 4);
    layout->state_bytes += (uint64_t)sparse->q_count * 4;
    if (topk) sparse->in = (uint32_t *)dtrain__carve(layout, DTRAIN__BUFFERS, blocks, 4);
    if (dtrain__is_balanced(how))
        sparse->out = (uint32_t *)dtrain__carve(layout, DTRAIN__BUFFERS, blocks, 4);
    sparse->values = (float *)dtrain__carve(layout, DTRAIN__BUFFERS, scratch, 4);
    sparse->indices = (int32_t *)dtrain__carve(layout, DTRAIN__BUFFERS, scratch, 4);
}

/* The memory of all buckets, and the places of PowerSGD's factors in it. */
DTRAIN__PRIVATE void dtrain__lay_compression(dtrain__layout *layout)
{
    layout->state_bytes = 0;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__sparse *sparse = layout->buckets[b].sparse;
        int64_t p_at = sparse->dense_count, q_at = 0;
        dtrain__lay_sparse(layout, &layout->buckets[b]);
        for (size_t i = sparse->first; i < sparse->end; i++) {
            dtrain__portion *portion = &layout->portions[i];
            if (portion->dense || !portion->rows) continue;
            portion->p = dtrain__after(sparse->dense, p_at);
            portion->q = dtrain__after(sparse->q, q_at);
            p_at += portion->rows * (int64_t)layout->compression->powersgd_rank;
            q_at += portion->columns * (int64_t)layout->compression->powersgd_rank;
        }
    }
}

/* Bytes that this rank sends for a bucket when compression is in full force. */
DTRAIN__PRIVATE uint64_t dtrain__compressed_wire(const dtrain__layout *layout,
                                                 const dtrain__bucket *bucket)
{
    const dtrain_compression_desc *how = layout->compression;
    const dtrain__sparse *sparse = bucket->sparse;
    const int ranks = layout->hop_ranks;
    if (how->kind == DTRAIN_COMPRESSION_POWERSGD)
        return dtrain__wire(DTRAIN_COLLECTIVE_ALL_REDUCE, sparse->dense_count + sparse->p_count,
                            DTRAIN_DTYPE_F32, ranks) +
               dtrain__wire(DTRAIN_COLLECTIVE_ALL_REDUCE, sparse->q_count, DTRAIN_DTYPE_F32, ranks);
    const uint64_t dense = dtrain__wire(DTRAIN_COLLECTIVE_ALL_REDUCE, sparse->dense_count,
                                        layout->desc->reduce_dtype, ranks);
    const int64_t selected = dtrain__selection(layout, sparse, (double)how->topk_ratio);
    if ((double)how->topk_ratio >= dtrain__masked_share(layout))
        return dense + dtrain__wire(DTRAIN_COLLECTIVE_ALL_REDUCE, bucket->hop_count,
                                    DTRAIN_DTYPE_F32, ranks);
    const uint64_t once =
        dtrain__wire(DTRAIN_COLLECTIVE_ALL_GATHER, dtrain__block_words(layout, selected),
                     DTRAIN_DTYPE_F32, ranks);
    return dense + (dtrain__is_balanced(how) ? 2 * once : once);
}

/* ---- Dense portions ---------------------------------------------------------------------------*/

/* Packs the dense portions of a bucket together as they travel, or back. */
DTRAIN__PRIVATE dtrain_result dtrain__dense_copy(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                 bool back)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain__sparse *sparse = bucket->sparse;
    const uint32_t dtype = strategy->desc.reduce_dtype;
    const size_t unit = dtrain_dtype_bytes((dtrain_dtype)dtype);
    for (size_t i = sparse->first; i < sparse->end; i++) {
        const dtrain__portion *portion = &layout->portions[i];
        float *grad = bucket->grads + portion->first;
        char *packed = (char *)sparse->dense + (size_t)portion->dense_at * unit;
        if (!portion->dense) continue;
        if (dtype == DTRAIN_DTYPE_F32)
            DTRAIN__TRY(dtrain_device_copy(strategy->device, back ? grad : (float *)(void *)packed,
                                           back ? (float *)(void *)packed : grad,
                                           (size_t)portion->count * unit));
        else if (back)
            DTRAIN__TRY(
                dtrain__convert(strategy, portion->count, packed, dtype, grad, DTRAIN_DTYPE_F32));
        else
            DTRAIN__TRY(
                dtrain__convert(strategy, portion->count, grad, DTRAIN_DTYPE_F32, packed, dtype));
        if (back) DTRAIN__TRY(dtrain__scale(strategy, bucket, grad, portion->count));
    }
    return DTRAIN_OK;
}

/* Starts the all-reduce of the dense elements and, behind them, `more` others that are packed
 * already. */
DTRAIN__PRIVATE dtrain_result dtrain__dense_start(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                  int64_t more, dtrain_work **work)
{
    const dtrain__sparse *sparse = bucket->sparse;
    if (sparse->dense_count + more == 0) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__dense_copy(strategy, bucket, false));
    return dtrain_all_reduce(dtrain__hop_comm(strategy, bucket), sparse->dense, sparse->dense,
                             (size_t)(sparse->dense_count + more),
                             (dtrain_dtype)strategy->desc.reduce_dtype,
                             dtrain__level_op(strategy, bucket), work);
}

/* ---- State ------------------------------------------------------------------------------------*/

/* Starts a portion's Q with random directions, the same on every rank. */
static dtrain_result dtrain__q_init(dtrain_strategy *strategy, const dtrain__sparse *sparse,
                                    const dtrain__portion *portion)
{
    const int64_t count = portion->columns * (int64_t)strategy->layout.compression->powersgd_rank;
    float *seed = sparse->q_seed + (portion->q - sparse->q);
    dtrain_orthogonalize_args args = {portion->columns,
                                      (int64_t)strategy->layout.compression->powersgd_rank, seed};
    dtrain_param q = strategy->params[portion->param];
    q.init = DTRAIN_INIT_NORMAL;
    q.init_scale = 1;
    DTRAIN__TRY(
        dtrain__init_param(strategy->device, &q, ~strategy->desc.init_seed, 0, count, seed));
    DTRAIN__TRY(strategy->device->ops->orthogonalize(strategy->device, &args));
    return dtrain_device_copy(strategy->device, portion->q, seed, (size_t)count * sizeof(float));
}

/* Lists what compression keeps, for dtrain_strategy_compression, and starts it. */
DTRAIN__PRIVATE dtrain_result dtrain__compression_open(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    if (!layout->compression) return DTRAIN_OK;
    strategy->states = (dtrain_compression_state *)dtrain__alloc(
        &strategy->allocator, strategy->param_count, sizeof *strategy->states,
        "states of compression");
    if (!strategy->states) return DTRAIN_ERROR_MEMORY;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        const dtrain__bucket *bucket = &layout->buckets[b];
        const dtrain__sparse *sparse = bucket->sparse;
        for (size_t i = sparse->first; i < sparse->end; i++) {
            const dtrain__portion *portion = &layout->portions[i];
            const int64_t at = portion->first - bucket->hop_first;
            if (portion->dense) continue;
            dtrain_compression_state *state = &strategy->states[strategy->state_count++];
            state->param = &strategy->params[portion->param];
            state->offset = portion->first - layout->entries[portion->param].offset;
            state->count = portion->count;
            state->residual = dtrain__after(sparse->residual, at);
            state->velocity = dtrain__after(sparse->velocity, at);
            state->q = portion->q;
            state->q_rows = portion->columns;
            if (portion->q) DTRAIN__TRY(dtrain__q_init(strategy, sparse, portion));
        }
    }
    return DTRAIN_OK;
}

DTRAIN_API dtrain_result dtrain_strategy_compression(dtrain_strategy *strategy,
                                                     const dtrain_compression_state **states,
                                                     size_t *count)
{
    if (states) *states = NULL;
    if (count) *count = 0;
    if (!strategy || !states || !count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_strategy_compression: %s is NULL",
                           !strategy ? "strategy"
                           : !states ? "states"
                                     : "count");
    *states = strategy->states;
    *count = strategy->state_count;
    return DTRAIN_OK;
}
