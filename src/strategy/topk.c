/* Top-k: a hook that selects the largest elements, all-gathers them and adds them up
 *
 * dtrain_device_ops.topk leaves the elements that are not selected in the residual. The quota is
 * the number of selected elements of a tensor: ratio * count, rounded to nearest, at least 1. The K
 * selected elements of a bucket travel as a block, in which each tensor has a range of both lists:
 *
 *     block   | values: K fp32, or K of 16 bits, padded | indices in the tensor: K i32 |
 *
 * If blocks would be larger than the bucket (at the beginning of a warm-up), the bucket is masked:
 * the whole bucket is all-reduced, with zeros for other elements. The sums are the same. */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/steps_internal.h"

/* The exchange of one bucket in one step. */
typedef struct dtrain__topk {
    const dtrain_compression_desc *how;
    const dtrain_hook_bucket *bucket;
    bool low;                /* values are rounded */
    bool masked;             /* the bucket is all-reduced with zeros between selected elements */
    double ratio;            /* of this step */
    int64_t selected, words; /* size of a block in elements, and in words of 32 bits */
    uint32_t *blocks;        /* (ranks, words) */
    float *values;           /* (largest quota) fp32 values, if rounded values travel */
    int32_t *indices;        /* (largest quota) indices, if masked */
    uint16_t *low_values;    /* (largest quota) rounded values, if masked */
    int64_t scratch_count;   /* elements of these four arrays */
} dtrain__topk;

/* ---- How much is selected ---------------------------------------------------------------------*/

/* Return the ratio of a step after the dense steps. In a warm-up it falls geometrically from
 * warmup_ratio to topk_ratio. */
static double dtrain__ratio_at(const dtrain_compression_desc *how, uint64_t step)
{
    const double begin = (double)how->warmup_ratio, usual = (double)how->topk_ratio;
    if (step >= how->warmup_steps) return usual;
    return begin * pow(usual / begin, (double)step / (double)how->warmup_steps);
}

/* Return the number of selected elements of count. */
static int64_t dtrain__quota(double ratio, int64_t count)
{
    const int64_t k = (int64_t)(ratio * (double)count + 0.5);
    return k < 1 ? 1 : k < count ? k : count;
}

/* Count the words of the values of a block. */
static int64_t dtrain__value_words(const dtrain__topk *t)
{
    return t->low ? (t->selected + 1) / 2 : t->selected;
}

/* Set the size of blocks for a ratio. */
static void dtrain__topk_size(dtrain__topk *t, double ratio)
{
    t->ratio = ratio;
    t->selected = 0;
    for (size_t i = 0; i < t->bucket->tensor_count; i++)
        if (!t->bucket->tensors[i].dense)
            t->selected += dtrain__quota(ratio, t->bucket->tensors[i].count);
    t->words = dtrain__value_words(t) + t->selected;
}

/* Cut a piece of count words from the scratch memory; NULL while memory is counted. */
static void *dtrain__topk_cut(dtrain__topk *t, int64_t count)
{
    float *piece = dtrain__after(t->bucket->scratch, t->scratch_count);
    t->scratch_count += (count + 15) / 16 * 16; /* whole cache lines */
    return piece;
}

/* Describe the exchange of a bucket in this step. Its memory fits the largest ratio. */
static dtrain__topk dtrain__topk_of(const dtrain_compression_desc *how,
                                    const dtrain_hook_bucket *bucket)
{
    const double largest = (double)(how->warmup_steps ? how->warmup_ratio : how->topk_ratio);
    dtrain__topk t;
    memset(&t, 0, sizeof t);
    t.how = how;
    t.bucket = bucket;
    t.low = bucket->dtype != DTRAIN_DTYPE_F32;
    /* Ratio from which on blocks are larger than the bucket: an all-reduce sends 8 (N - 1) / N
     * bytes per element; a block goes to N - 1 ranks. The limit is the same for all buckets, so
     * that bits do not depend on how buckets are cut. */
    const double masked = 8 / ((t.low ? 6.0 : 8.0) * bucket->ranks);
    dtrain__topk_size(&t, largest < masked ? largest : masked);
    int64_t most = 0;
    for (size_t i = 0; i < bucket->tensor_count && (t.low || largest >= masked); i++)
        if (!bucket->tensors[i].dense)
            most = dtrain__max(most, dtrain__quota(largest, bucket->tensors[i].count));
    t.blocks = (uint32_t *)dtrain__topk_cut(&t, bucket->ranks * t.words);
    t.values = (float *)dtrain__topk_cut(&t, most);
    t.indices = (int32_t *)dtrain__topk_cut(&t, most);
    if (t.low) t.low_values = (uint16_t *)dtrain__topk_cut(&t, (most + 1) / 2);
    t.masked = dtrain__ratio_at(how, bucket->step) >= masked;
    dtrain__topk_size(&t, dtrain__ratio_at(how, bucket->step));
    return t;
}

static void dtrain__topk_plan(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket)
{
    for (size_t i = 0; i < bucket->tensor_count; i++) {
        dtrain_hook_tensor *tensor = &bucket->tensors[i];
        tensor->dense = tensor->dense || tensor->count > INT32_MAX; /* indices have 32 bits */
        tensor->keeps_residual = !how->no_error_feedback;
        tensor->keeps_velocity = how->topk_momentum > 0;
    }
    bucket->scratch_count = dtrain__topk_of(how, bucket).scratch_count;
}

/* ---- Selecting and adding ---------------------------------------------------------------------*/

/* The memory of one selection. */
typedef struct dtrain__picks {
    float *values; /* fp32 */
    uint16_t *low; /* rounded values, or NULL */
    int32_t *indices;
} dtrain__picks;

/* Find the memory of a tensor's selection, which starts at element `at` of the block at `words`. */
static dtrain__picks dtrain__picks_at(const dtrain__topk *t, int64_t at, uint32_t *words)
{
    dtrain__picks picks;
    picks.values = t->low ? t->values : (float *)(void *)words + at;
    picks.low = t->low ? (uint16_t *)(void *)words + at : NULL;
    picks.indices = (int32_t *)(void *)words + dtrain__value_words(t) + at;
    return picks;
}

/* Add a tensor's selection, times scale, to `out` of the tensor's size. */
static dtrain_result dtrain__scatter(const dtrain__topk *t, const dtrain_hook_tensor *tensor,
                                     float scale, const dtrain__picks *picks, float *out)
{
    dtrain_device *device = t->bucket->device;
    dtrain_scatter_add_args args = {tensor->count,  dtrain__quota(t->ratio, tensor->count),
                                    scale,          picks->values,
                                    picks->indices, out};
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

/* Select the quota of a tensor from gradient plus residual. Round the values, with the errors to
 * the residual. */
static dtrain_result dtrain__select(const dtrain__topk *t, const dtrain_hook_tensor *tensor,
                                    const dtrain__picks *picks)
{
    dtrain_device *device = t->bucket->device;
    const int64_t k = dtrain__quota(t->ratio, tensor->count);
    float *residual = tensor->residual;
    dtrain_topk_args args;
    memset(&args, 0, sizeof args);
    args.count = tensor->count;
    args.k = k;
    args.x = tensor->grad;
    args.residual = residual;
    args.values = picks->values;
    args.indices = picks->indices;
    args.velocity = tensor->velocity;
    args.momentum = t->how->topk_momentum;
    DTRAIN__TRY(device->ops->topk(device, &args));
    if (!picks->low) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__round(t, k, picks, false));
    if (residual) DTRAIN__TRY(dtrain__scatter(t, tensor, 1, picks, residual));
    DTRAIN__TRY(dtrain__round(t, k, picks, true));
    return residual ? dtrain__scatter(t, tensor, -1, picks, residual) : DTRAIN_OK;
}

/* Clear the gradient of a tensor, before selections are added to it. */
static dtrain_result dtrain__clear(const dtrain__topk *t, const dtrain_hook_tensor *tensor)
{
    dtrain_device *device = t->bucket->device;
    return device->ops->zero(device, tensor->grad, (size_t)tensor->count * sizeof(float));
}

/* ---- The hook ---------------------------------------------------------------------------------*/

/* Select from each tensor into this rank's block. In a masked bucket keep the selected elements,
 * times 1/N, and clear the others. */
static dtrain_result dtrain__topk_compress(const dtrain_compression_desc *how,
                                           dtrain_hook_bucket *bucket, uint32_t round)
{
    const dtrain__topk t = dtrain__topk_of(how, bucket);
    int64_t at = 0;
    (void)round;
    for (size_t i = 0; i < bucket->tensor_count; i++) {
        const dtrain_hook_tensor *tensor = &bucket->tensors[i];
        dtrain__picks picks = {t.values, t.low_values, t.indices};
        if (!t.masked) picks = dtrain__picks_at(&t, at, t.blocks + bucket->rank * t.words);
        DTRAIN__TRY(dtrain__select(&t, tensor, &picks));
        at += dtrain__quota(t.ratio, tensor->count);
        if (!t.masked) continue;
        DTRAIN__TRY(dtrain__clear(&t, tensor));
        DTRAIN__TRY(dtrain__scatter(&t, tensor, bucket->factor, &picks, tensor->grad));
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__topk_exchange(const dtrain_compression_desc *how,
                                           const dtrain_hook_bucket *bucket, uint32_t round,
                                           dtrain_work **work)
{
    const dtrain__topk t = dtrain__topk_of(how, bucket);
    (void)round;
    if (t.masked)
        return dtrain_all_reduce(bucket->comm, bucket->grads, bucket->grads, (size_t)bucket->count,
                                 DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, work);
    if (t.words == 0) return DTRAIN_OK;
    return dtrain_all_gather(bucket->comm, t.blocks + bucket->rank * t.words, t.blocks,
                             (size_t)t.words, DTRAIN_DTYPE_I32, work);
}

/* Clear the gradients, and add the blocks of all ranks to them in rank order, times 1/N. */
static dtrain_result dtrain__topk_decompress(const dtrain_compression_desc *how,
                                             dtrain_hook_bucket *bucket, uint32_t round)
{
    const dtrain__topk t = dtrain__topk_of(how, bucket);
    int64_t at = 0;
    (void)round;
    for (size_t i = 0; i < bucket->tensor_count && !t.masked; i++) {
        const dtrain_hook_tensor *tensor = &bucket->tensors[i];
        const int64_t k = dtrain__quota(t.ratio, tensor->count);
        DTRAIN__TRY(dtrain__clear(&t, tensor));
        for (int r = 0; r < bucket->ranks; r++) {
            const dtrain__picks picks = dtrain__picks_at(&t, at, t.blocks + r * t.words);
            if (picks.low) DTRAIN__TRY(dtrain__round(&t, k, &picks, true));
            DTRAIN__TRY(dtrain__scatter(&t, tensor, bucket->factor, &picks, tensor->grad));
        }
        at += k;
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE const dtrain_comm_hook_desc *dtrain__topk_hook(void)
{
    /* clang-format off */
    static const dtrain_comm_hook_desc hook = {
        "top-k", 1, true, true, dtrain__topk_plan, dtrain__topk_compress, dtrain__topk_exchange,
        dtrain__topk_decompress, NULL};
    /* clang-format on */
    return &hook;
}
