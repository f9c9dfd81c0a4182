/* Gradient compression: the steps that carry a hook
 *
 * The one or two rounds of a hook (strategy/hook.h) replace the all-reduce of a whole bucket, from
 * step compressed_from on. A rank compresses its slice of a bucket; with one node the slice is the
 * bucket. A tensor is the part of one parameter in the slice. Each tensor is compressed separately:
 * with one node the result does not depend on the buckets that parameters are in.
 *
 *     bucket, 2 nodes of 2 ranks   | a . . . . . . . | b . . . . . . . . | c . |
 *     slice of ranks 0 and 2       | a               | b    |
 *     slice of ranks 1 and 3                                | b          | c   |
 *
 * A tensor that is not worth compressing is dense: it is 1-D, has few elements, or the hook says
 * so. Dense tensors are packed together and all-reduced. They come last in a bucket's list.
 *
 * Error feedback is exact: a rank subtracts what it sends, after rounding, from gradient plus
 * residual, and keeps the rest as its new residual. So at any time, to rounding,
 *
 *     sum over ranks of residuals + N * sum of means so far = sum of all gradients so far
 *
 * (With nodes of G ranks and fp16, residuals belong to means over a node, and count G times.) */

#include "core/platform_internal.h"
#include "strategy/strategy_internal.h"
#include "strategy/steps_internal.h"

DTRAIN__PRIVATE const dtrain_comm_hook_desc *dtrain__hook_of(const dtrain_compression_desc *how)
{
    return how->hook ? how->hook : dtrain__topk_hook();
}

/* ---- Layout -----------------------------------------------------------------------------------*/

/* List the parts of a bucket's parameters in this rank's slice, let the hook plan for them, and
 * move the dense ones to the end. */
static void dtrain__lay_tensors(dtrain__layout *layout, dtrain__bucket *bucket,
                                dtrain_hook_tensor *tensors)
{
    const dtrain_compression_desc *how = layout->compression;
    dtrain__compressed *c = bucket->compressed;
    size_t count = 0, first_dense = 0;
    for (uint32_t i = bucket->first_param; i <= bucket->last_param; i++) {
        const dtrain_param *p = &layout->params[i];
        int64_t first;
        const int64_t length =
            dtrain__overlap(layout, bucket, i, bucket->slice_first, bucket->slice_count, &first);
        if (length <= 0) continue;
        dtrain_hook_tensor *tensor = &tensors[count++];
        tensor->param = p;
        tensor->offset = first - layout->entries[i].offset;
        tensor->count = length;
        tensor->dense = dtrain__param_dims(p) < 2 || p->count < how->dense_below;
    }
    c->hook.tensors = tensors;
    c->hook.tensor_count = c->tensor_count = count;
    dtrain__hook_of(how)->plan(how, &c->hook);
    for (size_t i = 0; i < count; i++) {
        const dtrain_hook_tensor tensor = tensors[i];
        if (tensor.dense) {
            c->dense_count += tensor.count;
            continue;
        }
        memmove(&tensors[first_dense + 1], &tensors[first_dense],
                (i - first_dense) * sizeof tensor);
        tensors[first_dense++] = tensor;
    }
    c->hook.tensor_count = first_dense;
}

/* Cut all buckets of a layout into tensors. */
DTRAIN__PRIVATE dtrain_result dtrain__layout_hooks(dtrain__layout *layout,
                                                   const dtrain_allocator *a)
{
    const dtrain_dtype dtype = (dtrain_dtype)layout->desc->reduce_dtype;
    const bool means = dtype == DTRAIN_DTYPE_F16; /* nodes make means, not sums: steps.c */
    layout->tensors = (dtrain_hook_tensor *)dtrain__alloc(a, layout->count, sizeof *layout->tensors,
                                                          "tensors of buckets");
    layout->compressed = (dtrain__compressed *)dtrain__alloc(
        a, layout->count, sizeof *layout->compressed, "compressed buckets");
    if (!layout->tensors || !layout->compressed) return DTRAIN_ERROR_MEMORY;
    dtrain_hook_tensor *next = layout->tensors;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__bucket *bucket = &layout->buckets[b];
        dtrain__compressed *c = bucket->compressed = &layout->compressed[b];
        dtrain_hook_bucket *hook = &c->hook;
        hook->ranks = layout->slice_ranks;
        hook->rank = layout->slice_rank;
        hook->dtype = dtype;
        hook->factor = 1.0f / (float)(means ? layout->slice_ranks : layout->all);
        hook->count = bucket->slice_count;
        dtrain__lay_tensors(layout, bucket, next);
        next += c->tensor_count;
    }
    return DTRAIN_OK;
}

/* Carve the memory of all buckets out of the buffers. */
DTRAIN__PRIVATE void dtrain__lay_hooks(dtrain__layout *layout)
{
    layout->state_bytes = 0;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        dtrain__compressed *c = layout->buckets[b].compressed;
        dtrain_hook_bucket *hook = &c->hook;
        int64_t kept = 0;
        c->packed = dtrain__carve(layout, DTRAIN__BUFFERS, c->dense_count);
        hook->scratch = dtrain__carve(layout, DTRAIN__BUFFERS, hook->scratch_count);
        for (size_t i = 0; i < hook->tensor_count; i++) {
            dtrain_hook_tensor *tensor = &hook->tensors[i];
            if (tensor->keeps_residual)
                tensor->residual = dtrain__carve(layout, DTRAIN__BUFFERS, tensor->count);
            if (tensor->keeps_velocity)
                tensor->velocity = dtrain__carve(layout, DTRAIN__BUFFERS, tensor->count);
            kept += tensor->count * (tensor->keeps_residual + tensor->keeps_velocity);
        }
        layout->state_bytes += 4 * (uint64_t)kept;
    }
}

/* ---- State ------------------------------------------------------------------------------------*/

/* Point the tensors at their gradients, and list their residuals and velocities. */
DTRAIN__PRIVATE dtrain_result dtrain__compression_open(dtrain_strategy *strategy)
{
    const dtrain__layout *layout = &strategy->layout;
    const dtrain_comm_hook_desc *desc = dtrain__hook_of(layout->compression);
    strategy->kept = (dtrain__kept *)dtrain__alloc(&strategy->allocator, strategy->param_count,
                                                   sizeof *strategy->kept, "states of compression");
    if (!strategy->kept) return DTRAIN_ERROR_MEMORY;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        const dtrain__bucket *bucket = &layout->buckets[b];
        dtrain__compressed *c = bucket->compressed;
        snprintf(c->label, sizeof c->label, "%s of bucket", desc->name);
        c->hook.device = strategy->device;
        c->hook.grads = bucket->grads + bucket->slice_first;
        for (size_t i = 0; i < c->tensor_count; i++) {
            dtrain_hook_tensor *tensor = &c->hook.tensors[i];
            tensor->grad = bucket->grads + tensor->offset +
                           layout->entries[tensor->param - layout->params].offset;
            if (tensor->dense) continue;
            const dtrain__kept kept = {tensor->param, tensor->offset, tensor->count,
                                       tensor->residual, tensor->velocity};
            strategy->kept[strategy->kept_count++] = kept;
        }
    }
    return DTRAIN_OK;
}

/* ---- Steps ------------------------------------------------------------------------------------*/

/* Convert dense tensors to reduce_dtype in `packed`; or back to the bucket, as means. */
static dtrain_result dtrain__pack_dense(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                        bool back)
{
    const dtrain__compressed *c = bucket->compressed;
    const dtrain_dtype dtype = c->hook.dtype;
    char *packed = (char *)c->packed;
    for (size_t i = c->hook.tensor_count; i < c->tensor_count; i++) {
        const dtrain_hook_tensor *tensor = &c->hook.tensors[i];
        if (back) {
            DTRAIN__TRY(dtrain__convert(strategy, tensor->count, packed, dtype, tensor->grad,
                                        DTRAIN_DTYPE_F32));
            DTRAIN__TRY(dtrain__scale(strategy, bucket, tensor->grad, tensor->count));
        } else {
            DTRAIN__TRY(dtrain__convert(strategy, tensor->count, tensor->grad, DTRAIN_DTYPE_F32,
                                        packed, dtype));
        }
        packed += (size_t)tensor->count * dtrain_dtype_bytes(dtype);
    }
    return DTRAIN_OK;
}

/* True if this step compresses. Earlier steps all-reduce as without compression. */
static bool dtrain__compresses(const dtrain_strategy *strategy)
{
    return strategy->notes.sync_count >= strategy->compressed_from;
}

/* Compress a bucket and start its exchange. */
static dtrain_result dtrain__hook_begin(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                        uint32_t round)
{
    const dtrain_compression_desc *how = strategy->layout.compression;
    const dtrain_comm_hook_desc *desc = dtrain__hook_of(how);
    dtrain_hook_bucket *hook = &bucket->compressed->hook;
    hook->comm = bucket->comm;
    hook->step = strategy->notes.sync_count - strategy->compressed_from;
    DTRAIN__TRY(desc->compress(how, hook, round));
    dtrain__label(strategy, bucket, bucket->compressed->label);
    return desc->exchange(how, hook, round, bucket->reduces);
}

static dtrain_result dtrain__hook_end(dtrain_strategy *strategy, dtrain__bucket *bucket,
                                      uint32_t round)
{
    const dtrain_compression_desc *how = strategy->layout.compression;
    return dtrain__hook_of(how)->decompress(how, &bucket->compressed->hook, round);
}

/* Begin the first round, and send the dense tensors. */
DTRAIN__PRIVATE dtrain_result dtrain__round_1_begin(dtrain_strategy *strategy,
                                                    dtrain__bucket *bucket)
{
    const dtrain__compressed *c = bucket->compressed;
    if (!dtrain__compresses(strategy)) {
        DTRAIN__TRY(dtrain__round_begin(strategy, bucket));
        return dtrain__all_reduce_begin(strategy, bucket);
    }
    DTRAIN__TRY(dtrain__pack_dense(strategy, bucket, false));
    DTRAIN__TRY(dtrain__hook_begin(strategy, bucket, 0));
    if (c->dense_count == 0) return DTRAIN_OK;
    dtrain__label(strategy, bucket, "dense part of bucket");
    return dtrain_all_reduce(bucket->comm, c->packed, c->packed, (size_t)c->dense_count,
                             c->hook.dtype, bucket->steps->op, &bucket->reduces[1]);
}

DTRAIN__PRIVATE dtrain_result dtrain__round_1_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    if (!dtrain__compresses(strategy)) {
        DTRAIN__TRY(dtrain__widen_begin(strategy, bucket));
        return dtrain__scale_begin(strategy, bucket);
    }
    DTRAIN__TRY(dtrain__hook_end(strategy, bucket, 0));
    return dtrain__pack_dense(strategy, bucket, true);
}

DTRAIN__PRIVATE dtrain_result dtrain__round_2_begin(dtrain_strategy *strategy,
                                                    dtrain__bucket *bucket)
{
    if (!dtrain__compresses(strategy)) return DTRAIN_OK;
    return dtrain__hook_begin(strategy, bucket, 1);
}

DTRAIN__PRIVATE dtrain_result dtrain__round_2_end(dtrain_strategy *strategy, dtrain__bucket *bucket)
{
    return dtrain__compresses(strategy) ? dtrain__hook_end(strategy, bucket, 1) : DTRAIN_OK;
}
