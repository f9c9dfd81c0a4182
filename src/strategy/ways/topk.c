/* Top-k: a hook that selects the largest elements, exchanges them and adds them up
 *
 *     ALL_GATHER   select of everything     all-gather         add all ranks' blocks
 *     BALANCED     select of each region    all-to-all         the owner adds its region's blocks
 *                  select of the sum        all-gather         add all regions' blocks
 *
 * dtrain_device_ops.topk leaves in the residual what is not selected. The quota, the number of
 * elements that are selected of count, is ratio * count, rounded to nearest, at least 1. BALANCED
 * cuts every tensor in N regions of ceil(count / N), the last one shorter, and selects the quota of
 * a whole region from each. K selected elements of a bucket travel as a block, in which each tensor
 * has its own range of both lists:
 *
 *     block   | values: K fp32, or K of 16 bits, padded | indices in the tensor or region: K i32 |
 *
 * Where blocks would be larger than the bucket (the beginning of a warm-up), the bucket is masked:
 * all of it is all-reduced, with zeros for elements that are not selected, and the same sums. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/ways_internal.h"

/* The exchange of one bucket in one step. */
typedef struct dtrain__topk {
    const dtrain_compression_desc *how;
    const dtrain_hook_bucket *bucket;
    bool balanced;
    bool low;                /* values are rounded */
    bool masked;             /* zeros travel for what is not selected */
    double ratio;            /* of this step */
    int64_t selected, words; /* of a block: elements, words of 32 bits */
    uint32_t *in, *out;      /* (ranks blocks) each */
    float *values;         /* (largest quota) values in fp32, where they travel as something else */
    int32_t *indices;      /* (largest quota) where no block is sent */
    uint16_t *low_values;  /* the same */
    int64_t scratch_count; /* of all five */
} dtrain__topk;

/* ---- How much is selected ---------------------------------------------------------------------*/

/* Return the ratio of the step after the dense ones: in a warm-up it falls geometrically from
 * warmup_ratio to topk_ratio. */
static double dtrain__ratio_at(const dtrain_compression_desc *how, uint64_t step)
{
    const double begin = (double)how->warmup_ratio, usual = (double)how->topk_ratio;
    if (step >= how->warmup_steps) return usual;
    return begin * pow(usual / begin, (double)step / (double)how->warmup_steps);
}

/* Return how many of count elements are selected. */
static int64_t dtrain__quota(double ratio, int64_t count)
{
    const int64_t k = (int64_t)(ratio * (double)count + 0.5);
    return k < 1 ? 1 : k < count ? k : count;
}

/* Count the elements of region r of a tensor, or of all of it. */
static int64_t dtrain__region_of(const dtrain__topk *t, const dtrain_hook_tensor *tensor, int r,
                                 int64_t *first)
{
    const int64_t ranks = t->bucket->ranks, whole = (tensor->count + ranks - 1) / ranks;
    *first = 0;
    if (!t->balanced) return tensor->count;
    *first = r * whole;
    return dtrain__min(whole, tensor->count - *first);
}

/* Count the elements that are selected from each region of a tensor; masked, from all of it. */
static int64_t dtrain__quota_of(const dtrain__topk *t, const dtrain_hook_tensor *tensor)
{
    int64_t first;
    return dtrain__quota(t->ratio,
                         t->masked ? tensor->count : dtrain__region_of(t, tensor, 0, &first));
}

/* Return the ratio from which on blocks are larger than the bucket. An all-reduce sends 8 bytes an
 * element, times (N - 1) / N; a block goes to N - 1 ranks, or when balanced one of 1/N of its
 * length, twice. The ratio is the same for all buckets, so that bits do not depend on how buckets
 * are cut. */
static double dtrain__masked_share(const dtrain__topk *t)
{
    const double item = t->low ? 6 : 8;
    return t->balanced ? 8 / (2 * item) : 8 / (item * t->bucket->ranks);
}

/* Count the words of the values of a block. */
static int64_t dtrain__value_words(const dtrain__topk *t)
{
    return t->low ? (t->selected + 1) / 2 : t->selected;
}

/* Set the size of blocks of this ratio. */
static void dtrain__topk_size(dtrain__topk *t, double ratio)
{
    t->ratio = ratio;
    t->selected = 0;
    for (size_t i = 0; i < t->bucket->tensor_count; i++)
        if (!t->bucket->tensors[i].dense)
            t->selected += dtrain__quota_of(t, &t->bucket->tensors[i]);
    t->words = dtrain__value_words(t) + t->selected;
}

/* Cut a piece of count words from the scratch memory, if there is any. */
static void *dtrain__topk_cut(dtrain__topk *t, int64_t count)
{
    float *piece = dtrain__after(t->bucket->scratch, t->scratch_count);
    t->scratch_count += (count + 15) / 16 * 16; /* of whole cache lines */
    return piece;
}

/* Describe the exchange of a bucket in this step. Its memory is for the largest ratio of any. */
static dtrain__topk dtrain__topk_of(const dtrain_compression_desc *how,
                                    const dtrain_hook_bucket *bucket)
{
    const double largest = (double)(how->warmup_steps ? how->warmup_ratio : how->topk_ratio);
    dtrain__topk t;
    memset(&t, 0, sizeof t);
    t.how = how;
    t.bucket = bucket;
    t.balanced = how->sparse_exchange == DTRAIN_SPARSE_EXCHANGE_BALANCED;
    t.low = bucket->dtype != DTRAIN_DTYPE_F32;
    const double masked = dtrain__masked_share(&t);
    dtrain__topk_size(&t, largest < masked ? largest : masked);
    const int64_t blocks = bucket->ranks * t.words;
    int64_t most = 0;
    for (size_t i = 0; i < bucket->tensor_count && (t.low || largest >= masked); i++)
        if (!bucket->tensors[i].dense)
            most = dtrain__max(most, dtrain__quota(largest, bucket->tensors[i].count));
    t.in = (uint32_t *)dtrain__topk_cut(&t, blocks);
    if (t.balanced) t.out = (uint32_t *)dtrain__topk_cut(&t, blocks);
    t.values = (float *)dtrain__topk_cut(&t, most);
    t.indices = (int32_t *)dtrain__topk_cut(&t, most);
    if (t.low) t.low_values = (uint16_t *)dtrain__topk_cut(&t, (most + 1) / 2);
    t.masked = dtrain__ratio_at(how, bucket->step) >= masked;
    dtrain__topk_size(&t, dtrain__ratio_at(how, bucket->step));
    return t;
}

static void dtrain__topk_plan(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket)
{
    dtrain__topk t = dtrain__topk_of(how, bucket);
    t.masked = false;
    t.ratio = (double)(how->warmup_steps ? how->warmup_ratio : how->topk_ratio);
    for (size_t i = 0; i < bucket->tensor_count; i++) {
        dtrain_hook_tensor *tensor = &bucket->tensors[i];
        int64_t first;
        const int64_t last = dtrain__region_of(&t, tensor, bucket->ranks - 1, &first);
        tensor->dense = tensor->dense || tensor->count > INT32_MAX || /* indices have 32 bits */
                        last < dtrain__quota_of(&t, tensor);
        tensor->keeps_residual = !how->no_error_feedback;
        tensor->keeps_velocity = how->topk_momentum > 0;
    }
    bucket->scratch_count = dtrain__topk_of(how, bucket).scratch_count;
}

/* ---- Selecting and adding ---------------------------------------------------------------------*/

/* The memory of one selection. */
typedef struct dtrain__picks {
    float *values; /* fp32 */
    uint16_t *low; /* the values as they travel, rounded; or NULL */
    int32_t *indices;
} dtrain__picks;

/* Find the memory of a tensor's selection, which begins at element `at` of the block at `words`. */
static dtrain__picks dtrain__picks_at(const dtrain__topk *t, int64_t at, uint32_t *words)
{
    dtrain__picks picks;
    picks.values = t->low ? t->values : (float *)(void *)words + at;
    picks.low = t->low ? (uint16_t *)(void *)words + at : NULL;
    picks.indices = (int32_t *)(void *)words + dtrain__value_words(t) + at;
    return picks;
}

static dtrain_result dtrain__scatter(const dtrain__topk *t, int64_t count, int64_t k, float scale,
                                     const dtrain__picks *picks, float *out)
{
    dtrain_device *device = t->bucket->device;
    dtrain_scatter_add_args args = {count, k, scale, picks->values, picks->indices, out};
    return device->ops->scatter_add(device, &args);
}

/* Convert k selected values to the type in which they travel, or back. */
static dtrain_result dtrain__round(const dtrain__topk *t, int64_t k, const dtrain__picks *picks,
                                   bool back)
{
    dtrain_device *device = t->bucket->device;
    dtrain_convert_args args = {k, picks->values, picks->low, DTRAIN_DTYPE_F32, t->bucket->dtype};
    if (back) {
        args.x = picks->low;
        args.y = picks->values;
        args.x_dtype = t->bucket->dtype;
        args.y_dtype = DTRAIN_DTYPE_F32;
    }
    return device->ops->convert(device, &args);
}

/* Select the quota from elements [first, first + count) of gradient plus residual of a tensor, and
 * round the values; add the rounding errors to the residual. */
static dtrain_result dtrain__select(const dtrain__topk *t, const dtrain_hook_tensor *tensor,
                                    int64_t first, int64_t count, bool with_velocity,
                                    const dtrain__picks *picks)
{
    dtrain_device *device = t->bucket->device;
    const int64_t k = dtrain__quota_of(t, tensor);
    float *residual = dtrain__after(tensor->residual, first);
    dtrain_topk_args args;
    memset(&args, 0, sizeof args);
    args.count = count;
    args.k = k;
    args.x = tensor->grad + first;
    args.residual = residual;
    args.values = picks->values;
    args.indices = picks->indices;
    args.velocity = with_velocity ? dtrain__after(tensor->velocity, first) : NULL;
    args.momentum = t->how->topk_momentum;
    DTRAIN__TRY(device->ops->topk(device, &args));
    if (!picks->low) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__round(t, k, picks, false));
    if (residual) DTRAIN__TRY(dtrain__scatter(t, count, k, 1, picks, residual));
    DTRAIN__TRY(dtrain__round(t, k, picks, true));
    return residual ? dtrain__scatter(t, count, k, -1, picks, residual) : DTRAIN_OK;
}

/* Clear the gradient of a tensor, before selections are added to it. */
static dtrain_result dtrain__clear(const dtrain__topk *t, const dtrain_hook_tensor *tensor)
{
    dtrain_device *device = t->bucket->device;
    return device->ops->zero(device, tensor->grad, (size_t)tensor->count * sizeof(float));
}

/* Select from region r of each tensor (without regions: from all of it) into a block. */
static dtrain_result dtrain__select_block(const dtrain__topk *t, int r, bool with_velocity,
                                          uint32_t *words)
{
    int64_t at = 0;
    for (size_t i = 0; i < t->bucket->tensor_count; i++) {
        const dtrain_hook_tensor *tensor = &t->bucket->tensors[i];
        const dtrain__picks picks = dtrain__picks_at(t, at, words);
        int64_t first;
        const int64_t count = dtrain__region_of(t, tensor, r, &first);
        DTRAIN__TRY(dtrain__select(t, tensor, first, count, with_velocity, &picks));
        at += dtrain__quota_of(t, tensor);
    }
    return DTRAIN_OK;
}

/* Clear the gradients and add all blocks to them, in rank order: each block to region `region`, or
 * if that is negative block r to region r. */
static dtrain_result dtrain__add_blocks(const dtrain__topk *t, int region, float scale,
                                        uint32_t *blocks)
{
    int64_t at = 0;
    for (size_t i = 0; i < t->bucket->tensor_count; i++) {
        const dtrain_hook_tensor *tensor = &t->bucket->tensors[i];
        const int64_t k = dtrain__quota_of(t, tensor);
        DTRAIN__TRY(dtrain__clear(t, tensor));
        for (int r = 0; r < t->bucket->ranks; r++) {
            const dtrain__picks picks = dtrain__picks_at(t, at, blocks + r * t->words);
            int64_t first;
            const int64_t count = dtrain__region_of(t, tensor, region < 0 ? r : region, &first);
            if (picks.low) DTRAIN__TRY(dtrain__round(t, k, &picks, true));
            DTRAIN__TRY(dtrain__scatter(t, count, k, scale, &picks, tensor->grad + first));
        }
        at += k;
    }
    return DTRAIN_OK;
}

/* ---- The hook ---------------------------------------------------------------------------------*/

/* Keep the selected elements of a masked bucket, times 1/N, and clear the others. */
static dtrain_result dtrain__mask(const dtrain__topk *t)
{
    const dtrain_hook_bucket *bucket = t->bucket;
    const dtrain__picks picks = {t->values, t->low_values, t->indices};
    for (size_t i = 0; i < bucket->tensor_count; i++) {
        const dtrain_hook_tensor *tensor = &bucket->tensors[i];
        DTRAIN__TRY(dtrain__select(t, tensor, 0, tensor->count, true, &picks));
        DTRAIN__TRY(dtrain__clear(t, tensor));
        DTRAIN__TRY(dtrain__scatter(t, tensor->count, dtrain__quota_of(t, tensor), bucket->factor,
                                    &picks, tensor->grad));
    }
    return DTRAIN_OK;
}

/* ALL_GATHER: select for all ranks. BALANCED: select from each region for its owner; in the second
 * round select from the sum of this rank's region plus its residual: the rest is the new residual
 * of the region's owner. */
static dtrain_result dtrain__topk_compress(const dtrain_compression_desc *how,
                                           dtrain_hook_bucket *bucket, uint32_t round)
{
    const dtrain__topk t = dtrain__topk_of(how, bucket);
    if (t.masked) return round == 0 ? dtrain__mask(&t) : DTRAIN_OK;
    if (round == 1)
        return dtrain__select_block(&t, bucket->rank, false, t.out + bucket->rank * t.words);
    if (!t.balanced) return dtrain__select_block(&t, 0, true, t.in + bucket->rank * t.words);
    for (int r = 0; r < bucket->ranks; r++)
        DTRAIN__TRY(dtrain__select_block(&t, r, true, t.out + r * t.words));
    return DTRAIN_OK;
}

static dtrain_result dtrain__topk_exchange(const dtrain_compression_desc *how,
                                           const dtrain_hook_bucket *bucket, uint32_t round,
                                           dtrain_work **work)
{
    const dtrain__topk t = dtrain__topk_of(how, bucket);
    const size_t words = (size_t)t.words;
    uint32_t *blocks = t.balanced ? t.out : t.in;
    if (t.masked && round == 0)
        return dtrain_all_reduce(bucket->comm, bucket->grads, bucket->grads, (size_t)bucket->count,
                                 DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, work);
    if (t.masked || words == 0) return DTRAIN_OK;
    if (t.balanced && round == 0)
        return dtrain_all_to_all(bucket->comm, t.out, t.in, words, DTRAIN_DTYPE_I32, work);
    return dtrain_all_gather(bucket->comm, blocks + bucket->rank * t.words, blocks, words,
                             DTRAIN_DTYPE_I32, work);
}

/* ALL_GATHER: add all blocks up to the mean. BALANCED: add the blocks of this rank's region up, in
 * rank order; in the second round, all regions' blocks. */
static dtrain_result dtrain__topk_decompress(const dtrain_compression_desc *how,
                                             dtrain_hook_bucket *bucket, uint32_t round)
{
    const dtrain__topk t = dtrain__topk_of(how, bucket);
    if (t.masked) return DTRAIN_OK;
    if (round == 1) return dtrain__add_blocks(&t, -1, bucket->factor, t.out);
    return dtrain__add_blocks(&t, bucket->rank, t.balanced ? 1 : bucket->factor, t.in);
}

DTRAIN__PRIVATE const dtrain_comm_hook_desc *dtrain__topk_hook(bool balanced)
{
    static const dtrain_comm_hook_desc hooks[] = {
        {"top-k", 1, true, true, dtrain__topk_plan, NULL, dtrain__topk_compress,
         dtrain__topk_exchange, dtrain__topk_decompress, NULL},
        {"balanced top-k", 2, true, true, dtrain__topk_plan, NULL, dtrain__topk_compress,
         dtrain__topk_exchange, dtrain__topk_decompress, NULL}};
    return &hooks[balanced];
}
