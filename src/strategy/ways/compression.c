/* Gradient compression: what top-k and PowerSGD have in common
 *
 * Their steps take the place of a whole bucket's all-reduce (dtrain__choose_ways):
 *
 *     top-k       ALL_GATHER   TOPK                          strategy/ways/topk.c
 *                 BALANCED     TOPK, TOPK_PUBLISH
 *     PowerSGD                 P,  Q                         strategy/ways/powersgd.c
 *
 * A rank compresses its slice of a bucket: with several nodes a part of it, otherwise all. The part
 * of one parameter in the slice is a portion. Each portion is compressed by itself, so that on one
 * level the result does not depend on how parameters are put into buckets:
 *
 *     bucket, 2 nodes of 2 ranks   | a . . . . . . . | b . . . . . . . . | c . |
 *     slice of ranks 0 and 2       | a               | b    |
 *     slice of ranks 1 and 3                                | b          | c   |
 *
 * Portions that are not worth compressing (1-D, few elements) are dense: packed together and
 * all-reduced. In the table of portions they follow the compressed ones of their bucket.
 *
 * K selected elements travel as a block, in which each portion has its own range of both lists:
 *
 *     block   | values: K fp32, or K of 16 bits, padded | indices in the portion or region: K i32 |
 *
 * The quota, the number of elements that are selected of count, is ratio * count, rounded to
 * nearest, at least 1. BALANCED cuts every portion in N regions of ceil(count / N), the last one
 * shorter, and selects the quota of a whole region from each. Where blocks would be larger than the
 * bucket (the beginning of a warm-up), the bucket is masked: all of it is all-reduced, with zeros
 * for elements that are not selected, and the same sums.
 *
 * Error feedback is exact: a rank subtracts from gradient plus residual what it sends, after
 * rounding, and keeps the rest as its new residual. So at any time, to rounding,
 *
 *     sum over ranks of residuals + N * sum of means so far = sum of all gradients so far
 *
 * (With nodes and fp16 residuals are of means over a node, and count G times.) */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/ways_internal.h"

/* ---- How much is selected ---------------------------------------------------------------------*/

DTRAIN__PRIVATE bool dtrain__is_balanced(const dtrain_compression_desc *how)
{
    return how->kind == DTRAIN_COMPRESSION_TOPK &&
           how->sparse_exchange == DTRAIN_SPARSE_EXCHANGE_BALANCED;
}

/* Return the number of steps at the beginning that are not compressed. */
DTRAIN__PRIVATE uint64_t dtrain__dense_steps(const dtrain_compression_desc *how)
{
    return how->dense_steps == DTRAIN_DENSE_STEPS_NONE ? 0 : how->dense_steps;
}

/* Return the largest selection ratio of any step; buffers are sized for it. */
static double dtrain__largest_ratio(const dtrain_compression_desc *how)
{
    return (double)(how->warmup_steps ? how->warmup_ratio : how->topk_ratio);
}

/* Return how many of count elements are selected. */
DTRAIN__PRIVATE int64_t dtrain__quota(double ratio, int64_t count)
{
    const int64_t k = (int64_t)(ratio * (double)count + 0.5);
    return k < 1 ? 1 : k < count ? k : count;
}

/* Count the elements of a block, over all portions. */
static int64_t dtrain__selection(const dtrain__sparse *sparse, double ratio)
{
    int64_t count = 0;
    for (const dtrain__portion *at = sparse->portions; at < sparse->dense; at++)
        count += dtrain__quota(ratio, at->region);
    return count;
}

/* Count the 32-bit words of a block's values. */
DTRAIN__PRIVATE int64_t dtrain__value_words(const dtrain__layout *layout, int64_t selected)
{
    return layout->desc->reduce_dtype == DTRAIN_DTYPE_F32 ? selected : (selected + 1) / 2;
}

/* Count the 32-bit words of a block: values, then indices. */
DTRAIN__PRIVATE int64_t dtrain__block_words(const dtrain__layout *layout, int64_t selected)
{
    return dtrain__value_words(layout, selected) + selected;
}

/* Return the ratio from which on blocks are larger than the bucket. An all-reduce sends 8 bytes an
 * element, times (N - 1) / N; a block goes to N - 1 ranks, or when balanced one of 1/N of its
 * length, twice. The ratio is the same for all buckets, so that bits do not depend on how buckets
 * are cut. */
DTRAIN__PRIVATE double dtrain__masked_share(const dtrain__layout *layout)
{
    const double item = layout->desc->reduce_dtype == DTRAIN_DTYPE_F32 ? 8 : 6;
    return dtrain__is_balanced(layout->compression) ? 8 / (2 * item)
                                                    : 8 / (item * layout->slice_ranks);
}

/* ---- Layout -----------------------------------------------------------------------------------*/

/* Fill in how a portion is compressed; return true when it stays dense. */
static bool dtrain__portion_is_dense(const dtrain__layout *layout, dtrain__portion *portion)
{
    const dtrain_compression_desc *how = layout->compression;
    const dtrain_param *p = &layout->params[portion->param];
    const int64_t rank = (int64_t)how->powersgd_rank, regions = layout->slice_ranks;
    portion->region = portion->count;
    if (dtrain__param_dims(p) < 2 || p->count < how->dense_below) return true;
    if (how->kind == DTRAIN_COMPRESSION_POWERSGD) {
        portion->rows = p->shape[0];
        portion->columns = p->count / p->shape[0];
        return 2 * (portion->rows + portion->columns) * rank >= p->count;
    }
    if (portion->count > INT32_MAX) return true; /* indices have 32 bits */
    if (!dtrain__is_balanced(how)) return false;
    portion->region = (portion->count + regions - 1) / regions;
    const int64_t last = portion->count - (regions - 1) * portion->region;
    return last < dtrain__quota(dtrain__largest_ratio(how), portion->region);
}

/* Append the dense portions of a bucket, or the others: parts of its parameters that lie in this
 * rank's slice. */
static void dtrain__lay_portions(dtrain__layout *layout, const dtrain__bucket *bucket, bool dense)
{
    dtrain__sparse *sparse = bucket->sparse;
    const int64_t rank = (int64_t)layout->compression->powersgd_rank;
    for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++) {
        dtrain__portion *portion = sparse->end;
        memset(portion, 0, sizeof *portion);
        portion->param = i;
        portion->count = dtrain__overlap(layout, bucket, i, bucket->slice_first,
                                         bucket->slice_count, &portion->first);
        if (portion->count <= 0 || dtrain__portion_is_dense(layout, portion) != dense) continue;
        sparse->end++;
        if (dense) {
            portion->at = sparse->dense_count;
            sparse->dense_count += portion->count;
        } else if (portion->rows) {
            portion->p_at = sparse->p_count;
            portion->q_at = sparse->q_count;
            sparse->p_count += portion->rows * rank;
            sparse->q_count += portion->columns * rank;
        } else {
            const double ratio = dtrain__largest_ratio(layout->compression);
            sparse->largest = dtrain__max(sparse->largest, dtrain__quota(ratio, portion->count));
        }
    }
}

/* Cut all buckets of a layout into portions. */
DTRAIN__PRIVATE dtrain_result dtrain__layout_portions(dtrain__layout *layout,
                                                      const dtrain_allocator *a)
{
    /* one more than can be: a portion is written before it is known to be needed */
    layout->portions = (dtrain__portion *)dtrain__alloc(
        a, layout->count + 1, sizeof *layout->portions, "portions of parameters");
    layout->sparse = (dtrain__sparse *)dtrain__alloc(a, layout->count, sizeof *layout->sparse,
                                                     "compressed buckets");
    if (!layout->portions || !layout->sparse) return DTRAIN_ERROR_MEMORY;
    const double largest = dtrain__largest_ratio(layout->compression);
    const double masked = dtrain__masked_share(layout);
    dtrain__portion *next = layout->portions;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__bucket *bucket = &layout->buckets[b];
        dtrain__sparse *sparse = bucket->sparse = &layout->sparse[b];
        sparse->portions = sparse->end = next;
        dtrain__lay_portions(layout, bucket, false);
        sparse->dense = sparse->end;
        dtrain__lay_portions(layout, bucket, true);
        next = sparse->end;
        sparse->room = dtrain__selection(sparse, largest < masked ? largest : masked);
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__portions_free(dtrain__layout *layout, const dtrain_allocator *a)
{
    dtrain__free(a, layout->sparse, layout->count, sizeof *layout->sparse);
    dtrain__free(a, layout->portions, layout->count + 1, sizeof *layout->portions);
}

/* Carve the memory of all buckets out of the buffers. */
DTRAIN__PRIVATE void dtrain__lay_compression(dtrain__layout *layout)
{
    const dtrain_compression_desc *how = layout->compression;
    const bool topk = how->kind == DTRAIN_COMPRESSION_TOPK;
    const bool scratch = layout->desc->reduce_dtype != DTRAIN_DTYPE_F32 ||
                         dtrain__largest_ratio(how) >= dtrain__masked_share(layout);
    layout->state_bytes = 0;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__sparse *sparse = layout->buckets[b].sparse;
        const int64_t blocks = layout->slice_ranks * dtrain__block_words(layout, sparse->room);
        const int64_t picks = topk && scratch ? sparse->largest : 0;
        const int64_t kept =
            sparse->largest || sparse->q_count ? layout->buckets[b].slice_count : 0;
        if (!how->no_error_feedback)
            sparse->residual = dtrain__carve(layout, DTRAIN__BUFFERS, kept);
        if (how->topk_momentum > 0) sparse->velocity = dtrain__carve(layout, DTRAIN__BUFFERS, kept);
        layout->state_bytes +=
            4 * (uint64_t)(kept * (!how->no_error_feedback + (how->topk_momentum > 0)) +
                           sparse->q_count);
        sparse->packed =
            dtrain__carve(layout, DTRAIN__BUFFERS, sparse->dense_count + sparse->p_count);
        sparse->q = dtrain__carve(layout, DTRAIN__BUFFERS, sparse->q_count);
        sparse->q_seed = dtrain__carve(layout, DTRAIN__BUFFERS, sparse->q_count);
        if (topk) sparse->in = (uint32_t *)(void *)dtrain__carve(layout, DTRAIN__BUFFERS, blocks);
        if (dtrain__is_balanced(how))
            sparse->out = (uint32_t *)(void *)dtrain__carve(layout, DTRAIN__BUFFERS, blocks);
        sparse->values = dtrain__carve(layout, DTRAIN__BUFFERS, picks);
        sparse->indices = (int32_t *)(void *)dtrain__carve(layout, DTRAIN__BUFFERS, picks);
        for (dtrain__portion *at = sparse->portions; at < sparse->dense && !topk; at++) {
            at->p = dtrain__after(sparse->packed, sparse->dense_count + at->p_at);
            at->q = dtrain__after(sparse->q, at->q_at);
        }
    }
}

/* ---- Dense portions ---------------------------------------------------------------------------*/

/* Pack the dense portions of a bucket and start their all-reduce, together with `more` elements
 * that the caller has packed behind them. */
DTRAIN__PRIVATE dtrain_result dtrain__dense_begin(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                                  int64_t more, dtrain_work **work)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const dtrain_dtype dtype = (dtrain_dtype)strategy->desc.reduce_dtype;
    for (const dtrain__portion *at = sparse->dense; at < sparse->end; at++)
        DTRAIN__TRY(dtrain__convert(
            strategy, at->count, bucket->grads + at->first, DTRAIN_DTYPE_F32,
            (char *)sparse->packed + (size_t)at->at * dtrain_dtype_bytes(dtype), dtype));
    if (sparse->dense_count + more == 0) return DTRAIN_OK;
    dtrain__label(strategy, bucket, "dense part of bucket");
    return dtrain_all_reduce(bucket->comm, sparse->packed, sparse->packed,
                             (size_t)(sparse->dense_count + more), dtype,
                             dtrain__level_op(strategy, bucket), work);
}

/* Copy the means of dense portions back into the bucket. */
DTRAIN__PRIVATE dtrain_result dtrain__dense_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const dtrain_dtype dtype = (dtrain_dtype)strategy->desc.reduce_dtype;
    for (const dtrain__portion *at = sparse->dense; at < sparse->end; at++) {
        float *grad = bucket->grads + at->first;
        DTRAIN__TRY(
            dtrain__convert(strategy, at->count,
                            (char *)sparse->packed + (size_t)at->at * dtrain_dtype_bytes(dtype),
                            dtype, grad, DTRAIN_DTYPE_F32));
        DTRAIN__TRY(dtrain__scale(strategy, bucket, grad, at->count));
    }
    return DTRAIN_OK;
}

/* ---- State ------------------------------------------------------------------------------------*/

/* Set a portion's Q to random orthonormal columns, the same on every rank. */
static dtrain_result dtrain__q_init(dtrain_strategy *strategy, const dtrain__sparse *sparse,
                                    const dtrain__portion *portion)
{
    const int64_t rank = (int64_t)strategy->layout.compression->powersgd_rank;
    const int64_t count = portion->columns * rank;
    dtrain_orthogonalize_args args = {portion->columns, rank, sparse->q_seed + portion->q_at};
    dtrain_param q = strategy->params[portion->param];
    q.init = DTRAIN_INIT_NORMAL;
    q.init_scale = 1;
    q.init_count = 0;
    DTRAIN__TRY(
        dtrain__init_param(strategy->device, &q, ~strategy->desc.init_seed, 0, count, args.x));
    DTRAIN__TRY(strategy->device->ops->orthogonalize(strategy->device, &args));
    return dtrain_device_copy(strategy->device, portion->q, args.x, (size_t)count * sizeof(float));
}

/* List the states of compression, for dtrain_strategy_compression, and initialise them. */
DTRAIN__PRIVATE dtrain_result dtrain__compression_open(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    strategy->states = (dtrain_compression_state *)dtrain__alloc(
        &strategy->allocator, strategy->param_count, sizeof *strategy->states,
        "states of compression");
    if (!strategy->states) return DTRAIN_ERROR_MEMORY;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        const dtrain__bucket *bucket = &layout->buckets[b];
        const dtrain__sparse *sparse = bucket->sparse;
        for (const dtrain__portion *at = sparse->portions; at < sparse->dense; at++) {
            dtrain_compression_state *state = &strategy->states[strategy->state_count++];
            state->param = &strategy->params[at->param];
            state->offset = at->first - layout->entries[at->param].offset;
            state->count = at->count;
            state->residual = dtrain__after(sparse->residual, at->first - bucket->slice_first);
            state->velocity = dtrain__after(sparse->velocity, at->first - bucket->slice_first);
            state->q = at->q;
            state->q_rows = at->columns;
            if (at->q) DTRAIN__TRY(dtrain__q_init(strategy, sparse, at));
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
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_strategy_compression: strategy, states or count is NULL");
    *states = strategy->states;
    *count = strategy->state_count;
    return DTRAIN_OK;
}
