/* cache.h: attention that keeps the keys and values of the tokens before, so that the next token of a
 * text costs the forward pass of one position. Two operations of our own; gpt.h includes it.
 *
 *     kept of a layer     (room, 2C), a row for each token:  | k of all heads | v of all heads |
 *
 * The device's attention takes queries from the new rows, and keys and values from what is kept. Where
 * a tensor axis cuts the heads, each rank keeps those that it has: C is then of these alone. */
#ifndef CACHE_H
#define CACHE_H

#include <string.h>

typedef struct gpt_cache {
    dtrain_device *device;
    int64_t channels, heads, room; /* of this rank; room: tokens */
    int64_t length;                /* tokens that are kept: whoever runs a pass adds its tokens */
    size_t bytes;                  /* of all layers */
    void *memory; /* (layers, room, 2 * channels) of up to 4 bytes, on the device */
} gpt_cache;

/* gpt_cache_free frees it, also after a failure. */
static inline dtrain_result gpt_cache_create(gpt_cache *cache, dtrain_device *device,
                                             int64_t layers, int64_t channels, int64_t heads,
                                             int64_t room)
{
    memset(cache, 0, sizeof *cache);
    cache->device = device;
    cache->channels = channels;
    cache->heads = heads;
    cache->room = room;
    cache->bytes = (size_t)(layers * room * 2 * channels) * sizeof(float);
    return device->ops->alloc(device, cache->bytes, &cache->memory);
}

static inline void gpt_cache_free(gpt_cache *cache)
{
    if (cache->memory) cache->device->ops->free(cache->device, cache->memory, cache->bytes);
    cache->memory = NULL;
}

/* ---- attention of new tokens to all before them --------------------------------------------- */

typedef struct gpt__cached {
    gpt_cache *cache;
    int64_t layer;
    int64_t rows, before; /* prepare's: new tokens, and those in the cache */
    float *lse;           /* (heads, rows) */
} gpt__cached;

static inline dtrain_result gpt__cached_prepare(dtrain_op *op)
{
    gpt__cached *a = (gpt__cached *)op->args;
    const int64_t c = a->cache->channels, rows = op->inputs[0]->shape[0], shape[2] = {rows, c};
    a->rows = rows;
    a->before = a->cache->length;
    if (op->inputs[0]->shape[1] != 3 * c || a->before + rows > a->cache->room ||
        (a->before && rows > 1))
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "cached attention: %lld rows of %lld after %lld others, expected rows of "
            "%lld, one at a time after the first ones, %lld in all",
            (long long)rows, (long long)op->inputs[0]->shape[1], (long long)a->before,
            (long long)(3 * c), (long long)a->cache->room);
    dtrain_op_output(op, op->cast, 2, shape);
    a->lse = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, a->cache->heads * rows);
    return DTRAIN_OK;
}

static inline dtrain_result gpt__cached_forward(dtrain_op *op)
{
    const gpt__cached *a = (const gpt__cached *)op->args;
    const int64_t c = a->cache->channels;
    const size_t each = dtrain_dtype_bytes(op->cast), row = (size_t)(2 * c) * each;
    char *kept = (char *)a->cache->memory + (size_t)(a->layer * a->cache->room) * row;
    dtrain_permute_args keep; /* the last 2C of each row of 3C */
    memset(&keep, 0, sizeof keep);
    keep.shape[0] = keep.shape[1] = 1, keep.shape[2] = a->rows, keep.shape[3] = 2 * c;
    keep.step[2] = 3 * c, keep.step[3] = 1;
    keep.x = (const char *)op->input_data[0] + (size_t)c * each;
    keep.y = kept + (size_t)a->before * row;
    keep.dtype = op->cast;
    const dtrain_result result = op->device->ops->permute(op->device, &keep);
    if (result != DTRAIN_OK) return result;
    dtrain_attention_args args;
    memset(&args, 0, sizeof args);
    args.batch = 1;
    args.queries = a->rows;
    args.keys = a->before + a->rows;
    args.heads = args.kv_heads = a->cache->heads;
    args.d = c / a->cache->heads;
    args.causal = !a->before; /* the first tokens among themselves; a later one sees all */
    args.dtype = op->cast;
    args.q = op->input_data[0];
    args.k = kept;
    args.v = kept + (size_t)c * each;
    args.q_stride = 3 * c;
    args.k_stride = args.v_stride = 2 * c;
    args.y = op->output_data[0];
    args.lse = a->lse;
    return op->device->ops->attention(op->device, &args);
}

static inline dtrain_result gpt__no_backward(dtrain_op *op)
{
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: it has no backward", op->desc->name);
}

/* qkv (tokens, 3C) of the tokens behind those in the cache -> (tokens, C) */
static inline dtrain_tensor *gpt_cached_attention(dtrain_tape *t, dtrain_tensor *qkv,
                                                  gpt_cache *cache, int64_t layer)
{
    static const dtrain_op_desc desc = {0,
                                        0,
                                        0,
                                        DTRAIN_OP_TAKES_COLUMNS,
                                        true,
                                        "cached attention",
                                        gpt__cached_prepare,
                                        gpt__cached_forward,
                                        gpt__no_backward};
    gpt__cached args;
    memset(&args, 0, sizeof args);
    args.cache = cache;
    args.layer = layer;
    return dtrain_tape_apply(t, &desc, &qkv, 1, NULL, 0, &args, sizeof args);
}

/* ---- the last row --------------------------------------------------------------------------- */

static inline dtrain_result gpt__last_prepare(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0];
    const int64_t shape[2] = {1, x->shape[x->ndim - 1]};
    dtrain_op_output(op, (dtrain_dtype)x->dtype, 2, shape);
    return DTRAIN_OK;
}

static inline dtrain_result gpt__last_forward(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0];
    const size_t bytes = (size_t)op->outputs[0]->count * dtrain_dtype_bytes((dtrain_dtype)x->dtype);
    const size_t all = (size_t)x->count * dtrain_dtype_bytes((dtrain_dtype)x->dtype);
    return dtrain_device_copy(op->device, op->output_data[0],
                              (const char *)op->input_data[0] + all - bytes, bytes);
}

/* x (rows, n) -> (1, n): the next token's logits are all that generation wants */
static inline dtrain_tensor *gpt_last_row(dtrain_tape *t, dtrain_tensor *x)
{
    static const dtrain_op_desc desc = {
        0, 0, 0, 0, false, "last row", gpt__last_prepare, gpt__last_forward, gpt__no_backward};
    return dtrain_tape_apply(t, &desc, &x, 1, NULL, 0, NULL, 1);
}

#endif /* CACHE_H */
