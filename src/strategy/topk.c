/* Top-k: selecting and exchanging
 *
 * A step of a bucket that is compressed with DTRAIN_COMPRESSION_TOPK: select, exchange selections,
 * add them up. The rest stays in the residual, which dtrain_device_ops.topk takes care of.
 *
 *     ALL_GATHER   select of everything     all-gather         add all ranks' blocks
 *     BALANCED     select of each region    all-to-all         the owner adds its region's blocks
 *                  select of the sum        all-gather         add all regions' blocks */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "comm/comm.h"
#include "strategy/compression_internal.h"
#include "strategy/layout_internal.h"
#include "strategy/strategy_internal.h"
#include "device/backend.h"

/* Decides how much of each portion is selected in this step, and where it stands in a block. */
static void dtrain__plan_selection(dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    const dtrain__layout *layout = &strategy->layout;
    const double ratio = dtrain__ratio_of(layout->compression, strategy->sync_count);
    dtrain__sparse *sparse = bucket->sparse;
    sparse->masked = ratio >= dtrain__masked_share(layout);
    sparse->selected = 0;
    for (size_t i = sparse->first; i < sparse->end; i++) {
        dtrain__portion *portion = &layout->portions[i];
        if (portion->dense) continue;
        portion->quota = dtrain__quota(ratio, sparse->masked ? portion->count : portion->region);
        portion->at = sparse->selected;
        sparse->selected += portion->quota;
    }
}

/* A place in a block, as memory. */
typedef struct dtrain__picks {
    float *values; /* fp32 */
    uint16_t *low; /* what travels in their place, or NULL */
    int32_t *indices;
} dtrain__picks;

/* Finds the place of a portion's selection in the block at `words`. */
static dtrain__picks dtrain__picks_at(const dtrain_strategy *strategy, const dtrain__sparse *sparse,
                                      const dtrain__portion *portion, uint32_t *words)
{
    const bool low = dtrain__reduces_low(strategy);
    dtrain__picks picks;
    picks.values = low ? sparse->values : (float *)(void *)words + portion->at;
    picks.low = low ? (uint16_t *)(void *)words + portion->at : NULL;
    picks.indices =
        (int32_t *)(void *)(words + dtrain__value_words(&strategy->layout, sparse->selected)) +
        portion->at;
    return picks;
}

static dtrain_result dtrain__scatter(dtrain_strategy *strategy, int64_t count, int64_t k,
                                     float scale, const dtrain__picks *picks, float *out)
{
    dtrain_scatter_add_args args = {count, k, scale, picks->values, picks->indices, out};
    return strategy->device->ops->scatter_add(strategy->device, &args);
}

/* Rounds selected values to what travels; what rounding takes away goes back to the residual. */
static dtrain_result dtrain__round_picks(dtrain_strategy *strategy, int64_t count, int64_t k,
                                         const dtrain__picks *picks, float *residual)
{
    const uint32_t dtype = strategy->desc.reduce_dtype;
    if (!picks->low) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__convert(strategy, k, picks->values, DTRAIN_DTYPE_F32, picks->low, dtype));
    if (residual) DTRAIN__TRY(dtrain__scatter(strategy, count, k, 1, picks, residual));
    DTRAIN__TRY(dtrain__convert(strategy, k, picks->low, dtype, picks->values, DTRAIN_DTYPE_F32));
    return residual ? dtrain__scatter(strategy, count, k, -1, picks, residual) : DTRAIN_OK;
}

/* Selects the quota of elements [offset, offset + count) of a portion, from gradient and residual
 * together. */
static dtrain_result dtrain__select(dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                    const dtrain__portion *portion, int64_t offset, int64_t count,
                                    bool with_velocity, const dtrain__picks *picks)
{
    const dtrain__sparse *sparse = bucket->sparse;
    const int64_t at = portion->first - bucket->hop_first + offset;
    dtrain_topk_args args;
    memset(&args, 0, sizeof args);
    args.count = count;
    args.k = portion->quota;
    args.x = bucket->grads + portion->first + offset;
    args.residual = dtrain__after(sparse->residual, at);
    args.values = picks->values;
    args.indices = picks->indices;
    args.velocity = with_velocity ? dtrain__after(sparse->velocity, at) : NULL;
    args.momentum = strategy->layout.compression->topk_momentum;
    DTRAIN__TRY(strategy->device->ops->topk(strategy->device, &args));
    return dtrain__round_picks(strategy, count, portion->quota, picks, args.residual);
}

/* Elements of region r; all of a portion without regions. */
static int64_t dtrain__region_count(const dtrain__portion *portion, int r)
{
    return dtrain__min(portion->region, portion->count - r * portion->region);
}

static dtrain_result dtrain__portion_zero(dtrain_strategy *strategy, const dtrain__bucket *bucket,
                                          const dtrain__portion *portion)
{
    return strategy->device->ops->zero(strategy->device, bucket->grads + portion->first,
                                       (size_t)portion->count * sizeof(float));
}

/* The factor of a selected value in the mean. */
static float dtrain__term(const dtrain_strategy *strategy, const dtrain__bucket *bucket)
{
    const dtrain__layout *layout = &strategy->layout;
    return 1.0f / (float)(dtrain__sums_first(strategy, bucket) ? layout->all : layout->hop_ranks);
}

/* Sends a masked bucket: the hop keeps what is selected, times 1/N, and is summed up whole. */
static dtrain_result dtrain__masked_start(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain__sparse *sparse = bucket->sparse;
    float *hop = bucket->grads + bucket->hop_first;
    const dtrain__picks picks = {
        sparse->values, dtrain__reduces_low(strategy) ? bucket->low_grads : NULL, sparse->indices};
    for (size_t i = sparse->first; i < sparse->end; i++) {
        const dtrain__portion *portion = &layout->portions[i];
        if (portion->dense) continue;
        DTRAIN__TRY(dtrain__select(strategy, bucket, portion, 0, portion->count, true, &picks));
        DTRAIN__TRY(dtrain__portion_zero(strategy, bucket, portion));
        DTRAIN__TRY(dtrain__scatter(strategy, portion->count, portion->quota,
                                    dtrain__term(strategy, bucket), &picks,
                                    bucket->grads + portion->first));
    }
    return dtrain_all_reduce(dtrain__hop_comm(strategy, bucket), hop, hop,
                             (size_t)bucket->hop_count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                             bucket->reduces);
}

/* ---- Exchanging ------------------------------------------------------------------------*/

/* Selects of region r of every portion, or of all of it, into a block. */
static dtrain_result dtrain__select_block(dtrain_strategy *strategy, dtrain__bucket *bucket, int r,
                                          bool with_velocity, uint32_t *words)
{
    const dtrain__sparse *sparse = bucket->sparse;
    for (size_t i = sparse->first; i < sparse->end; i++) {
        const dtrain__portion *portion = &strategy->layout.portions[i];
        if (portion->dense) continue;
        const dtrain__picks picks = dtrain__picks_at(strategy, sparse, portion, words);
        DTRAIN__TRY(dtrain__select(strategy, bucket, portion, r * portion->region,
                                   dtrain__region_count(portion, r), with_velocity, &picks));
    }
    return DTRAIN_OK;
}

/* Adds a block to the gradients of region r. */
static dtrain_result dtrain__add_block(dtrain_strategy *strategy, dtrain__bucket *bucket, int r,
                                       float scale, uint32_t *words)
{
    const dtrain__sparse *sparse = bucket->sparse;
    for (size_t i = sparse->first; i < sparse->end; i++) {
        const dtrain__portion *portion = &strategy->layout.portions[i];
        if (portion->dense) continue;
        const dtrain__picks picks = dtrain__picks_at(strategy, sparse, portion, words);
        if (picks.low)
            DTRAIN__TRY(dtrain__convert(strategy, portion->quota, picks.low,
                                        strategy->desc.reduce_dtype, picks.values,
                                        DTRAIN_DTYPE_F32));
        DTRAIN__TRY(dtrain__scatter(strategy, dtrain__region_count(portion, r), portion->quota,
                                    scale, &picks,
                                    bucket->grads + portion->first + r * portion->region));
    }
    return DTRAIN_OK;
}

/* Clears the gradients that selections will be added to. */
static dtrain_result dtrain__zero_portions(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    const dtrain__sparse *sparse = bucket->sparse;
    for (size_t i = sparse->first; i < sparse->end; i++)
        if (!strategy->layout.portions[i].dense)
            DTRAIN__TRY(dtrain__portion_zero(strategy, bucket, &strategy->layout.portions[i]));
    return DTRAIN_OK;
}

/* Adds all ranks' blocks up to the mean, in rank order; blocks of regions lie side by side. */
static dtrain_result dtrain__add_blocks(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                        bool regions, uint32_t *blocks)
{
    const dtrain__layout *layout = &strategy->layout;
    const int64_t words = dtrain__block_words(layout, bucket->sparse->selected);
    DTRAIN__TRY(dtrain__zero_portions(strategy, bucket));
    for (int r = 0; r < layout->hop_ranks; r++)
        DTRAIN__TRY(dtrain__add_block(strategy, bucket, regions ? r : 0,
                                      dtrain__term(strategy, bucket), blocks + r * words));
    return DTRAIN_OK;
}

/* Gathers all ranks' blocks; this rank's is in its place among them. */
static dtrain_result dtrain__gather_blocks(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                           dtrain_comm *comm, uint32_t *blocks)
{
    const size_t words = (size_t)dtrain__block_words(&strategy->layout, bucket->sparse->selected);
    if (words == 0) return DTRAIN_OK;
    return dtrain_all_gather(comm, blocks + (size_t)strategy->layout.hop_rank * words, blocks,
                             words, DTRAIN_DTYPE_I32, bucket->reduces);
}

/* ALL_GATHER: everybody's selection to everybody. */
DTRAIN__PRIVATE dtrain_result dtrain__topk_gather_begin(dtrain_strategy *strategy,
                                                        dtrain__bucket *bucket)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain__sparse *sparse = bucket->sparse;
    dtrain__plan_selection(strategy, bucket);
    DTRAIN__TRY(dtrain__dense_start(strategy, bucket, 0, &bucket->reduces[1]));
    if (sparse->masked) return dtrain__masked_start(strategy, bucket);
    const int64_t words = dtrain__block_words(layout, sparse->selected);
    DTRAIN__TRY(
        dtrain__select_block(strategy, bucket, 0, true, sparse->in + layout->hop_rank * words));
    return dtrain__gather_blocks(strategy, bucket, dtrain__hop_comm(strategy, bucket), sparse->in);
}

DTRAIN__PRIVATE dtrain_result dtrain__topk_gather_end(dtrain_strategy *strategy,
                                                      dtrain__bucket *bucket)
{
    if (!bucket->sparse->masked)
        DTRAIN__TRY(dtrain__add_blocks(strategy, bucket, false, bucket->sparse->in));
    return dtrain__dense_copy(strategy, bucket, true);
}

/* BALANCED: the largest of every region to its owner ... */
DTRAIN__PRIVATE dtrain_result dtrain__topk_trade_begin(dtrain_strategy *strategy,
                                                       dtrain__bucket *bucket)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain__sparse *sparse = bucket->sparse;
    dtrain__plan_selection(strategy, bucket);
    DTRAIN__TRY(dtrain__dense_start(strategy, bucket, 0, &bucket->reduces[1]));
    if (sparse->masked) return dtrain__masked_start(strategy, bucket);
    const int64_t words = dtrain__block_words(layout, sparse->selected);
    for (int r = 0; r < layout->hop_ranks; r++)
        DTRAIN__TRY(dtrain__select_block(strategy, bucket, r, true, sparse->out + r * words));
    if (words == 0) return DTRAIN_OK;
    return dtrain_all_to_all(dtrain__hop_comm(strategy, bucket), sparse->out, sparse->in,
                             (size_t)words, DTRAIN_DTYPE_I32, bucket->reduces);
}

/* ... who adds them up, in rank order, where its region of the gradients was ... */
DTRAIN__PRIVATE dtrain_result dtrain__topk_trade_end(dtrain_strategy *strategy,
                                                     dtrain__bucket *bucket)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain__sparse *sparse = bucket->sparse;
    const int64_t words = dtrain__block_words(layout, sparse->selected);
    if (!sparse->masked) {
        DTRAIN__TRY(dtrain__zero_portions(strategy, bucket));
        for (int r = 0; r < layout->hop_ranks; r++)
            DTRAIN__TRY(
                dtrain__add_block(strategy, bucket, layout->hop_rank, 1, sparse->in + r * words));
    }
    return dtrain__dense_copy(strategy, bucket, true);
}

/* ... and sends everybody the largest of that. Sum and residual are one: what is left of both is
 * the owner's new residual. */
DTRAIN__PRIVATE dtrain_result dtrain__topk_publish_begin(dtrain_strategy *strategy,
                                                         dtrain__bucket *bucket)
{
    const dtrain__layout *layout = &strategy->layout;
    dtrain__sparse *sparse = bucket->sparse;
    const int64_t words = dtrain__block_words(layout, sparse->selected);
    if (sparse->masked) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__select_block(strategy, bucket, layout->hop_rank, false,
                                     sparse->out + layout->hop_rank * words));
    return dtrain__gather_blocks(strategy, bucket, strategy->groups[DTRAIN__SECOND], sparse->out);
}

DTRAIN__PRIVATE dtrain_result dtrain__topk_publish_end(dtrain_strategy *strategy,
                                                       dtrain__bucket *bucket)
{
    if (bucket->sparse->masked) return DTRAIN_OK;
    return dtrain__add_blocks(strategy, bucket, true, bucket->sparse->out);
}
