/* Top-k: select the largest elements, exchange them, add them up
 *
 * dtrain_device_ops.topk leaves in the residual what is not selected.
 *
 *     ALL_GATHER   select of everything     all-gather         add all ranks' blocks
 *     BALANCED     select of each region    all-to-all         the owner adds its region's blocks
 *                  select of the sum        all-gather         add all regions' blocks */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/ways_internal.h"

/* Set how many elements of each portion are selected in this step, and their place in a block.
 * After the dense steps the ratio falls geometrically from warmup_ratio to topk_ratio. */
static void dtrain__plan_selection(dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain_compression_desc *how = layout->compression;
    const uint64_t step = strategy->sync_count - dtrain__dense_steps(how);
    double ratio = (double)how->topk_ratio;
    dtrain__sparse *sparse = bucket->sparse;
    if (step < how->warmup_steps) {
        const double begin = (double)how->warmup_ratio;
        ratio = begin * pow(ratio / begin, (double)step / (double)how->warmup_steps);
    }
    sparse->masked = ratio >= dtrain__masked_share(layout);
    sparse->selected = 0;
    for (dtrain__portion *at = sparse->portions; at < sparse->dense; at++) {
        at->quota = dtrain__quota(ratio, sparse->masked ? at->count : at->region);
        at->at = sparse->selected;
        sparse->selected += at->quota;
    }
}

/* The memory of one selection: a range of a block. */
typedef struct dtrain__picks {
    float *values; /* fp32 */
    uint16_t *low; /* the values as they travel, rounded; or NULL */
    int32_t *indices;
} dtrain__picks;

/* Find the memory of a portion's selection in the block at `words`. */
static dtrain__picks dtrain__picks_at(const dtrain_strategy *strategy, const dtrain__sparse *sparse,
                                      const dtrain__portion *portion, uint32_t *words)
{
    const bool low = dtrain__reduces_low(strategy);
    uint32_t *indices = words + dtrain__value_words(&strategy->layout, sparse->selected);
    dtrain__picks picks;
    picks.values = low ? sparse->values : (float *)(void *)words + portion->at;
    picks.low = low ? (uint16_t *)(void *)words + portion->at : NULL;
    picks.indices = (int32_t *)(void *)indices + portion->at;
    return picks;
}

static dtrain_result dtrain__scatter(dtrain_strategy *strategy, int64_t count, int64_t k,
                                     float scale, const dtrain__picks *picks, float *out)
{
    dtrain_scatter_add_args args = {count, k, scale, picks->values, picks->indices, out};
    return strategy->device->ops->scatter_add(strategy->device, &args);
}

/* Select the quota from elements [offset, offset + count) of gradient plus residual of a portion,
 * and round the values to reduce_dtype; add the rounding errors to the residual. */
static dtrain_result dtrain__select(dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                    const dtrain__portion *portion, int64_t offset, int64_t count,
                                    bool with_velocity, const dtrain__picks *picks)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const int64_t at = portion->first - bucket->slice_first + offset, k = portion->quota;
    const uint32_t f32 = DTRAIN_DTYPE_F32, dtype = strategy->desc.reduce_dtype;
    float *residual = dtrain__after(sparse->residual, at);
    float *velocity = with_velocity ? dtrain__after(sparse->velocity, at) : NULL;
    dtrain_topk_args args;
    memset(&args, 0, sizeof args);
    args.count = count;
    args.k = k;
    args.x = bucket->grads + portion->first + offset;
    args.residual = residual;
    args.values = picks->values;
    args.indices = picks->indices;
    args.velocity = velocity;
    args.momentum = strategy->layout.compression->topk_momentum;
    DTRAIN__TRY(strategy->device->ops->topk(strategy->device, &args));
    if (!picks->low) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__convert(strategy, k, picks->values, f32, picks->low, dtype));
    if (residual) DTRAIN__TRY(dtrain__scatter(strategy, count, k, 1, picks, residual));
    DTRAIN__TRY(dtrain__convert(strategy, k, picks->low, dtype, picks->values, f32));
    return residual ? dtrain__scatter(strategy, count, k, -1, picks, residual) : DTRAIN_OK;
}

/* Count the elements of region r; without regions those of the portion. */
static int64_t dtrain__region_count(const dtrain__portion *portion, int r)
{
    return dtrain__min(portion->region, portion->count - r * portion->region);
}

/* Clear the gradients of a portion, before selections are added to them. */
static dtrain_result dtrain__portion_zero(dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                          const dtrain__portion *portion)
{
    return strategy->device->ops->zero(strategy->device, bucket->grads + portion->first,
                                       (size_t)portion->count * sizeof(float));
}

/* Return the factor by which a selected value counts in the mean. */
static float dtrain__term(const dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    const dtrain__layout *layout = &strategy->layout;
    return 1.0f / (float)(dtrain__sums_first(strategy, bucket) ? layout->all : layout->slice_ranks);
}

/* Send a masked bucket: keep the selected elements of the slice, times 1/N, clear the others, and
 * all-reduce the slice. */
static dtrain_result dtrain__masked_start(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    dtrain__sparse *sparse = bucket->sparse;
    float *slice = bucket->grads + bucket->slice_first;
    const dtrain__picks picks = {
        sparse->values, dtrain__reduces_low(strategy) ? bucket->low_grads : NULL, sparse->indices};
    for (const dtrain__portion *at = sparse->portions; at < sparse->dense; at++) {
        DTRAIN__TRY(dtrain__select(strategy, bucket, at, 0, at->count, true, &picks));
        DTRAIN__TRY(dtrain__portion_zero(strategy, bucket, at));
        DTRAIN__TRY(dtrain__scatter(strategy, at->count, at->quota, dtrain__term(strategy, bucket),
                                    &picks, bucket->grads + at->first));
    }
    dtrain__label(strategy, bucket, "top-k of bucket");
    return dtrain_all_reduce(bucket->comm, slice, slice, (size_t)bucket->slice_count,
                             DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, bucket->reduces);
}

/* ---- Exchanging ------------------------------------------------------------------------*/

/* Select from region r of each portion (without regions: from all of it) into a block. */
static dtrain_result dtrain__select_block(dtrain_strategy *strategy, dtrain__bucket *bucket, int r,
                                          bool with_velocity, uint32_t *words)
{
    const dtrain__sparse *sparse = bucket->sparse;
    for (const dtrain__portion *at = sparse->portions; at < sparse->dense; at++) {
        const dtrain__picks picks = dtrain__picks_at(strategy, sparse, at, words);
        DTRAIN__TRY(dtrain__select(strategy, bucket, at, r * at->region,
                                   dtrain__region_count(at, r), with_velocity, &picks));
    }
    return DTRAIN_OK;
}

/* Clear the gradients and add all blocks to them, in rank order: each block to region `region`, or
 * if that is negative block r to region r. */
static dtrain_result dtrain__add_blocks(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                        int region, float scale, uint32_t *blocks)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const int64_t words = dtrain__block_words(&strategy->layout, sparse->selected);
    for (const dtrain__portion *at = sparse->portions; at < sparse->dense; at++) {
        DTRAIN__TRY(dtrain__portion_zero(strategy, bucket, at));
        for (int r = 0; r < strategy->layout.slice_ranks; r++) {
            const int to = region < 0 ? r : region;
            const dtrain__picks picks = dtrain__picks_at(strategy, sparse, at, blocks + r * words);
            if (picks.low)
                DTRAIN__TRY(dtrain__convert(strategy, at->quota, picks.low,
                                            strategy->desc.reduce_dtype, picks.values,
                                            DTRAIN_DTYPE_F32));
            DTRAIN__TRY(dtrain__scatter(strategy, dtrain__region_count(at, to), at->quota, scale,
                                        &picks, bucket->grads + at->first + to * at->region));
        }
    }
    return DTRAIN_OK;
}

/* ALL_GATHER: send this rank's selection to all ranks. BALANCED: send the selection from each
 * region to the owner of the region. */
DTRAIN__PRIVATE dtrain_result dtrain__topk_begin(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain__sparse *sparse = bucket->sparse;
    dtrain_comm *comm = bucket->comm;
    dtrain__plan_selection(strategy, bucket);
    DTRAIN__TRY(dtrain__dense_begin(strategy, bucket, 0, &bucket->reduces[1]));
    if (sparse->masked) return dtrain__masked_start(strategy, bucket);
    const int64_t words = dtrain__block_words(layout, sparse->selected);
    if (words == 0) return DTRAIN_OK;
    if (dtrain__is_balanced(layout->compression)) {
        for (int r = 0; r < layout->slice_ranks; r++)
            DTRAIN__TRY(dtrain__select_block(strategy, bucket, r, true, sparse->out + r * words));
        dtrain__label(strategy, bucket, "top-k of bucket");
        return dtrain_all_to_all(comm, sparse->out, sparse->in, (size_t)words, DTRAIN_DTYPE_I32,
                                 bucket->reduces);
    }
    uint32_t *own = sparse->in + layout->slice_rank * words;
    DTRAIN__TRY(dtrain__select_block(strategy, bucket, 0, true, own));
    dtrain__label(strategy, bucket, "top-k of bucket");
    return dtrain_all_gather(comm, own, sparse->in, (size_t)words, DTRAIN_DTYPE_I32,
                             bucket->reduces);
}

/* ALL_GATHER: add all blocks up to the mean. BALANCED: add the blocks of this rank's region up, in
 * rank order. */
DTRAIN__PRIVATE dtrain_result dtrain__topk_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__layout *layout = &strategy->layout;
    const bool balanced = dtrain__is_balanced(layout->compression);
    if (!bucket->sparse->masked)
        DTRAIN__TRY(dtrain__add_blocks(strategy, bucket, balanced ? layout->slice_rank : 0,
                                       balanced ? 1 : dtrain__term(strategy, bucket),
                                       bucket->sparse->in));
    return dtrain__dense_end(strategy, bucket);
}

/* BALANCED, second round: select from the sum of this rank's region plus its residual, and send
 * that to all ranks; the rest is the new residual of the region's owner. */
DTRAIN__PRIVATE dtrain_result dtrain__topk_publish_begin(dtrain_strategy *strategy,
                                                         dtrain__bucket *bucket)
{
    const int rank = strategy->layout.slice_rank;
    const dtrain__sparse *sparse = bucket->sparse;
    const int64_t words = dtrain__block_words(&strategy->layout, sparse->selected);
    uint32_t *own = sparse->out + rank * words;
    if (sparse->masked || words == 0) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__select_block(strategy, bucket, rank, false, own));
    dtrain__label(strategy, bucket, "top-k of bucket");
    return dtrain_all_gather(strategy->groups[DTRAIN__SECOND], own, sparse->out, (size_t)words,
                             DTRAIN_DTYPE_I32, bucket->reduces);
}

DTRAIN__PRIVATE dtrain_result dtrain__topk_publish_end(dtrain_strategy *strategy,
                                                       dtrain__bucket *bucket)
{
    if (bucket->sparse->masked) return DTRAIN_OK;
    return dtrain__add_blocks(strategy, bucket, -1, dtrain__term(strategy, bucket),
                              bucket->sparse->out);
}
