/* random_kernels.h: random arguments for the kernels of operations, on a device and on the naive one.
 *
 * A case follows from its seed: which kernels, sizes, types, flags, and where in memory. kernel_case runs it, compares
 * every number with the naive device's, and returns a hash of the bits: whatever may not change them (threads, the
 * order of a GPU's threads) is tried by running the seed again. */
#ifndef RANDOM_KERNELS_H
#define RANDOM_KERNELS_H

#include <float.h>

#include "dtrain.h"
#include "naive_device.h"
#include "test.h"

/* The same values in the device's memory and the naive one's. */
typedef struct kernel_data {
    void *of[2]; /* on the device, on the host */
    void *block; /* of[0] begins in it, at an element that is aligned or not */
    size_t block_bytes;
    int64_t count;
    dtrain_dtype dtype;
} kernel_data;

static struct {
    dtrain_device *device, *naive;
    kernel_data data[64];
    int count;
    uint64_t seed, drawn, hash;
    const char *what;
    bool good;
} kernels;

static uint64_t kernel_draw(uint64_t below)
{
    const float u = dtrain_random_uniform(kernels.seed, 1, kernels.drawn++);
    const uint64_t number = (uint64_t)((double)u * (double)below);
    return number < below ? number : below - 1;
}

static dtrain_dtype kernel_type(void)
{
    const dtrain_dtype types[3] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
    return types[kernel_draw(3)];
}

static size_t kernel_bytes(const kernel_data *x)
{
    return (size_t)x->count * dtrain_dtype_bytes(x->dtype);
}

static void kernel_copy(kernel_data *x, dtrain_copy_kind kind)
{
    const bool down = kind == DTRAIN_COPY_DEVICE_TO_HOST;
    void *to = x->of[down ? 1 : 0], *from = x->of[down ? 0 : 1];
    CHECK(kernels.device->ops->copy(kernels.device, to, from, kernel_bytes(x), kind) == DTRAIN_OK);
}

/* Normal numbers times scale. */
static kernel_data *kernel_make(int64_t count, dtrain_dtype dtype, float scale)
{
    kernel_data *x = &kernels.data[kernels.count++];
    const size_t shift = kernel_draw(3) ? 0 : dtrain_dtype_bytes(dtype);
    x->count = count;
    x->dtype = dtype;
    x->block_bytes = kernel_bytes(x) + shift;
    x->of[1] = malloc(kernel_bytes(x) + 1);
    for (int64_t i = 0; i < count; i++)
        naive_put(x->of[1], dtype, i,
                  (double)(scale * dtrain_random_normal(kernels.seed, 2 + (uint64_t)kernels.count,
                                                        (uint64_t)i)));
    CHECK(kernels.device->ops->alloc(kernels.device, x->block_bytes, &x->block) == DTRAIN_OK);
    x->of[0] = (char *)x->block + shift;
    kernel_copy(x, DTRAIN_COPY_HOST_TO_DEVICE);
    return x;
}

static kernel_data *kernel_maybe(bool there, int64_t count, dtrain_dtype dtype)
{
    return there ? kernel_make(count, dtype, 1) : NULL;
}

static void *kernel_at(const kernel_data *x, int side) { return x ? x->of[side] : NULL; }
static float *kernel_f32(const kernel_data *x, int side) { return (float *)kernel_at(x, side); }

/* Compare what the device has left with what the naive one has, up to one rounding to the type and `tolerance`
 * before it; then give the device the naive numbers. */
static void kernel_same(kernel_data *x, double tolerance, const char *name)
{
    if (!x) return;
    const double step = x->dtype == DTRAIN_DTYPE_BF16  ? 1.0 / 128
                        : x->dtype == DTRAIN_DTYPE_F16 ? 1.0 / 1024
                                                       : 0;
    kernel_data got = *x;
    got.of[1] = malloc(kernel_bytes(x) + 1);
    kernel_copy(&got, DTRAIN_COPY_DEVICE_TO_HOST);
    for (size_t i = 0; i < kernel_bytes(x); i++)
        kernels.hash = (kernels.hash ^ ((const unsigned char *)got.of[1])[i]) * 0x100000001b3u;
    for (int64_t i = 0; i < x->count && kernels.good && kernels.naive; i++) {
        const double a = naive_get(got.of[1], x->dtype, i), b = naive_get(x->of[1], x->dtype, i);
        if (a == b || (isnan(a) && isnan(b)) ||
            fabs(a - b) <= (step + tolerance) * fabs(b) + tolerance)
            continue;
        kernels.good = false;
        CHECK_MSG(0, "seed %llu, %s: %s (%s) [%lld] is %.9g, expected %.9g",
                  (unsigned long long)kernels.seed, kernels.what, name, dtrain_dtype_name(x->dtype),
                  (long long)i, a, b);
    }
    free(got.of[1]);
    if (kernels.naive) kernel_copy(x, DTRAIN_COPY_HOST_TO_DEVICE);
}

/* Run one kernel on both devices; `side` says whose memory its arguments name. */
#define ON_EACH(op, ...)                                                                      \
    for (int side = 0; side < (kernels.naive ? 2 : 1); side++) {                              \
        dtrain_device *const on = side ? kernels.naive : kernels.device;                      \
        const dtrain_##op##_args args = __VA_ARGS__;                                          \
        const dtrain_result result = on->ops->op(on, &args);                                  \
        kernels.good = kernels.good && result == DTRAIN_OK;                                   \
        CHECK_MSG(result == DTRAIN_OK, "seed %llu, %s: %s", (unsigned long long)kernels.seed, \
                  kernels.what, dtrain_last_error());                                         \
    }
/* What is not compared by kernel_same. */
#define KERNEL_CHECK(condition) (kernels.good = CHECK(condition) && kernels.good)
#define AT(x) kernel_at(x, side)
#define F32(x) kernel_f32(x, side)

static int64_t kernel_size(int64_t most) { return 1 + (int64_t)kernel_draw((uint64_t)most); }
static bool kernel_flag(void) { return kernel_draw(2) != 0; }

static void case_pointwise(void)
{
    const uint32_t kind = 1 + (uint32_t)kernel_draw(DTRAIN_POINTWISE_LOGISTIC_LOSS);
    const int64_t n = kernel_size(300);
    const bool two = kind >= DTRAIN_POINTWISE_MULTIPLY, add_x = kernel_flag(), add = kernel_flag();
    const bool same_type = kernel_flag();
    const dtrain_dtype xt = kernel_type(), ot = same_type ? xt : kernel_type();
    const dtrain_dtype yt = same_type ? xt : kernel_type();
    kernels.what = "pointwise";
    kernel_data *x = kernel_make(n, xt, 3), *other = kernel_maybe(two, n, ot);
    kernel_data *y = kernel_make(n, yt, 1), *d_y = kernel_make(n, yt, 1);
    kernel_data *d_x = kernel_maybe(kernel_draw(4) > 0, n, xt);
    kernel_data *d_other = kernel_maybe(two && kernel_draw(4) > 0, n, ot);
    ON_EACH(pointwise, {.kind = kind,
                        .count = n,
                        .x = AT(x),
                        .other = AT(other),
                        .y = AT(y),
                        .x_dtype = xt,
                        .other_dtype = ot,
                        .y_dtype = yt})
    kernel_same(y, 1e-5, "y");
    ON_EACH(pointwise_backward, {.kind = kind,
                                 .accumulate_x = add_x,
                                 .accumulate_other = add,
                                 .count = n,
                                 .x = AT(x),
                                 .other = AT(other),
                                 .d_y = AT(d_y),
                                 .d_x = AT(d_x),
                                 .d_other = AT(d_other),
                                 .x_dtype = xt,
                                 .other_dtype = ot,
                                 .y_dtype = yt})
    kernel_same(d_x, 1e-5, "d_x");
    kernel_same(d_other, 1e-5, "d_other");
}

static void case_norm(void)
{
    const int64_t rows = kernel_size(40), n = kernel_size(kernel_draw(6) ? 100 : 2500);
    const bool rms = kernel_draw(4) > 0, fused = kernel_flag(), add = kernel_flag();
    const bool add_x = kernel_flag();
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32, xt = kernel_type(), yt = kernel_type();
    kernels.what = rms ? "root mean square norm" : "layer norm";
    kernel_data *x = kernel_make(rows * n, xt, 2), *weight = kernel_make(n, f32, 1);
    kernel_data *bias = kernel_maybe(kernel_flag(), n, f32), *y = kernel_make(rows * n, yt, 1);
    kernel_data *mean = kernel_maybe(!rms, rows, f32), *rstd = kernel_make(rows, f32, 1);
    kernel_data *residual = kernel_maybe(fused, rows * n, yt);
    kernel_data *sum = kernel_maybe(fused, rows * n, xt);
    /* a mean or a variance of a sum that is rounded to the type before, on a GPU, or after */
    const double loose = fused && xt != f32 ? (xt == DTRAIN_DTYPE_BF16 ? 3e-2 : 4e-3) : 3e-5;
    ON_EACH(layernorm, {.rows = rows,
                        .n = n,
                        .epsilon = n == 1 ? 1.0f : 1e-2f,
                        .x = AT(x),
                        .weight = F32(weight),
                        .bias = F32(bias),
                        .y = AT(y),
                        .mean = F32(mean),
                        .rstd = F32(rstd),
                        .residual = AT(residual),
                        .sum = AT(sum),
                        .x_dtype = xt,
                        .y_dtype = yt})
    kernel_same(y, loose, "y");
    kernel_same(mean, loose, "mean");
    kernel_same(rstd, loose, "rstd");
    kernel_same(sum, 0, "sum");
    kernel_data *d_y = kernel_make(rows * n, yt, 1), *d_x = kernel_make(rows * n, xt, 1);
    kernel_data *d_weight = kernel_maybe(kernel_draw(4) > 0, n, f32);
    kernel_data *d_bias = kernel_maybe(bias && kernel_flag(), n, f32);
    ON_EACH(layernorm_backward, {.rows = rows,
                                 .n = n,
                                 .accumulate_params = add,
                                 .accumulate_x = add_x,
                                 .x = AT(fused ? sum : x),
                                 .weight = F32(weight),
                                 .mean = F32(mean),
                                 .rstd = F32(rstd),
                                 .d_y = AT(d_y),
                                 .d_x = AT(d_x),
                                 .d_weight = F32(d_weight),
                                 .d_bias = F32(d_bias),
                                 .x_dtype = xt,
                                 .y_dtype = yt})
    kernel_same(d_x, 1e-4, "d_x");
    kernel_same(d_weight, 3e-4, "d_weight");
    kernel_same(d_bias, 3e-4, "d_bias");
}

/* Sometimes move all logits far from 0, where a log-sum-exp is rounded to a multiple of 0.06. */
static void kernel_offset(kernel_data *logits, float smoothing)
{
    const bool moves = kernel_draw(3) == 0 && !(smoothing > 0) && logits->dtype != DTRAIN_DTYPE_F16;
    for (int64_t i = 0; i < logits->count && moves; i++)
        naive_put(logits->of[1], logits->dtype, i,
                  naive_get(logits->of[1], logits->dtype, i) + 1e6);
    kernel_copy(logits, DTRAIN_COPY_HOST_TO_DEVICE);
}

static void case_cross_entropy(void)
{
    const int64_t rows = kernel_size(8), n = kernel_size(kernel_draw(6) ? 100 : 5000);
    const int64_t classes = kernel_flag() ? kernel_size(n) : 0;
    const float smoothing = kernel_flag() ? (float)kernel_draw(5) / 4 : 0;
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32, type = kernel_type();
    kernels.what = "cross-entropy";
    kernel_data *logits = kernel_make(rows * n, type, 3), *loss = kernel_make(rows, f32, 1);
    kernel_data *lse = kernel_make(rows, f32, 1), *d = kernel_make(rows * n, type, 1);
    kernel_data *targets = kernel_make(rows, DTRAIN_DTYPE_I32, 1), *up = kernel_make(1, f32, 1);
    kernel_data *rest = kernel_make(rows, f32, 1);
    const bool fused = kernel_flag();
    kernel_offset(logits, smoothing);
    for (int64_t i = 0; i < rows; i++) {
        const uint64_t below = (uint64_t)(classes ? classes : n);
        ((int32_t *)targets->of[1])[i] = kernel_draw(5) ? (int32_t)kernel_draw(below) : -1;
    }
    kernel_copy(targets, DTRAIN_COPY_HOST_TO_DEVICE);
    ON_EACH(cross_entropy, {.rows = rows,
                            .n = n,
                            .logits = AT(logits),
                            .targets = (const int32_t *)AT(targets),
                            .loss = F32(loss),
                            .lse = F32(lse),
                            .d_logits = fused ? AT(d) : NULL,
                            .scale = 0.7f,
                            .dtype = type,
                            .classes = classes,
                            .smoothing = smoothing,
                            .lse_rest = F32(rest)})
    kernel_same(loss, 1e-4, "loss");
    kernel_same(lse, 3e-5, "lse");
    kernel_same(rest, 1e-4, "what lse lost");
    if (!fused)
        ON_EACH(cross_entropy_backward, {.rows = rows,
                                         .n = n,
                                         .scale = 0.7f,
                                         .logits = AT(logits),
                                         .targets = (const int32_t *)AT(targets),
                                         .lse = F32(lse),
                                         .d_logits = AT(d),
                                         .upstream = F32(up),
                                         .dtype = type,
                                         .classes = classes,
                                         .smoothing = smoothing,
                                         .lse_rest = F32(rest)})
    kernel_same(d, 3e-5, "d_logits");
}

static void case_softmax(void)
{
    const int64_t rows = kernel_size(8), n = kernel_size(kernel_draw(6) ? 100 : 3000);
    const dtrain_dtype type = kernel_type();
    const bool add = kernel_flag();
    kernels.what = "softmax";
    kernel_data *x = kernel_make(rows * n, type, 4), *y = kernel_make(rows * n, type, 1);
    kernel_data *d_y = kernel_make(rows * n, type, 1), *d_x = kernel_make(rows * n, type, 1);
    ON_EACH(softmax, {.rows = rows, .n = n, .x = AT(x), .y = AT(y), .dtype = type})
    kernel_same(y, 2e-6 + 4e-9 * (double)n, "y"); /* n terms, in a single lane at worst */
    ON_EACH(softmax_backward, {.rows = rows,
                               .n = n,
                               .accumulate = add,
                               .y = AT(y),
                               .d_y = AT(d_y),
                               .d_x = AT(d_x),
                               .dtype = type})
    kernel_same(d_x, 1e-5 + 1e-8 * (double)n, "d_x");
}

static void case_rotary(void)
{
    const int64_t heads = kernel_size(6), d = 2 * kernel_size(20), sequence = kernel_size(12);
    const int64_t rows = kernel_size(30), turned = (int64_t)kernel_draw((uint64_t)heads + 1);
    const dtrain_dtype type = kernel_type();
    const bool inverse = kernel_flag(), add = kernel_flag();
    const float theta = kernel_flag() ? 10000 : 3;
    kernels.what = "rotary";
    kernel_data *x = kernel_make(rows * heads * d, type, 1);
    kernel_data *y = kernel_make(rows * heads * d, type, 1);
    ON_EACH(rotary, {rows, sequence, heads, turned, d, theta, inverse, add, AT(x), AT(y), type})
    kernel_same(y, 1e-6, "y");
}

static void case_permute(void)
{
    int64_t shape[4], length[4], steps[4], step = 1;
    uint32_t order[4] = {0, 1, 2, 3};
    const dtrain_dtype type = kernel_type();
    const bool add = kernel_flag();
    kernels.what = "permute";
    for (int axis = 3; axis > 0; axis--) {
        const uint64_t with = kernel_draw((uint64_t)axis + 1);
        const uint32_t kept = order[axis];
        order[axis] = order[with], order[with] = kept;
    }
    for (int axis = 3; axis >= 0; axis--) {
        length[axis] = kernel_size(9), steps[axis] = step;
        step *= length[axis];
    }
    int64_t to[4];
    for (int axis = 0; axis < 4; axis++)
        shape[axis] = length[order[axis]], to[axis] = steps[order[axis]];
    kernel_data *x = kernel_make(step, type, 1), *y = kernel_make(step, type, 1);
    ON_EACH(permute, {{shape[0], shape[1], shape[2], shape[3]},
                      {to[0], to[1], to[2], to[3]},
                      add,
                      AT(x),
                      AT(y),
                      type})
    kernel_same(y, 1e-6, "y");
}

static dtrain_attention_args attention_args; /* sizes and flags, without addresses */

/* The arguments with addresses in the memory of `side`. Packed: q is qkv, and k is NULL. */
static dtrain_attention_args attention_at(int side, kernel_data *const x[8])
{
    dtrain_attention_args args = attention_args;
    const size_t bytes = dtrain_dtype_bytes(args.dtype);
    args.q = AT(x[0]), args.k = AT(x[1]), args.v = AT(x[2]);
    if (!x[1]) args.k = (const char *)args.q + (size_t)(args.heads * args.d) * bytes;
    if (!x[1]) args.v = (const char *)args.k + (size_t)(args.kv_heads * args.d) * bytes;
    args.key_lengths = (const int32_t *)AT(x[3]), args.mask = F32(x[4]);
    args.y = AT(x[5]), args.lse = F32(x[6]), args.lse_rest = F32(x[7]);
    return args;
}

static dtrain_attention_backward_args
attention_back(int side, kernel_data *const x[8], const kernel_data *d_y, kernel_data *const d[3])
{
    const dtrain_attention_args f = attention_at(side, x);
    char *const packed = (char *)AT(d[0]);
    dtrain_attention_backward_args args = {f, AT(d_y), AT(d[0]), AT(d[1]), AT(d[2])};
    if (!x[1]) args.d_k = packed + ((const char *)f.k - (const char *)f.q);
    if (!x[1]) args.d_v = packed + ((const char *)f.v - (const char *)f.q);
    return args;
}

/* Lengths from 0 on; a mask that adds, hides, and hides all of a row: with -infinity, or as others write it. */
static void attention_hide(kernel_data *lengths, kernel_data *mask)
{
    for (int64_t i = 0; lengths && i < lengths->count; i++)
        ((int32_t *)lengths->of[1])[i] = (int32_t)kernel_draw((uint64_t)attention_args.keys + 1);
    const float all[3] = {-INFINITY, -1e9f, -FLT_MAX};
    for (int64_t i = 0; mask && i < mask->count; i++) {
        const int64_t row = i / attention_args.keys;
        if (kernel_draw(4) == 0) ((float *)mask->of[1])[i] = -INFINITY;
        if (row % 7 >= 3 && row % 7 < 6) ((float *)mask->of[1])[i] = all[row % 7 - 3];
    }
    if (lengths) kernel_copy(lengths, DTRAIN_COPY_HOST_TO_DEVICE);
    if (mask) kernel_copy(mask, DTRAIN_COPY_HOST_TO_DEVICE);
}

/* Packed or apart, masked or not. `loose`: how much a probability may be off that is rounded to a half before its
 * product. */
static void case_attention(void)
{
    static const int64_t sizes[6] = {4, 6, 7, 32, 64, 80};
    const int64_t d = sizes[kernel_draw(kernel_draw(3) ? 4 : 6)], kv_heads = kernel_size(3);
    const int64_t heads = kv_heads * kernel_size(3), n = heads * d, kv = kv_heads * d;
    const int64_t T = kernel_size(kernel_draw(4) ? 40 : 150), batch = kernel_size(2);
    const bool apart = kernel_flag(), causal = kernel_flag();
    const int64_t U = apart ? kernel_size(kernel_draw(4) ? 40 : 150) : T;
    const int64_t each[2] = {kernel_flag() ? batch : 1, kernel_flag() ? heads : 1};
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32, type = kernel_type();
    const bool cpu = strcmp(kernels.device->ops->name, "cpu") == 0;
    const double loose = cpu || type == f32 ? 1e-4 : type == DTRAIN_DTYPE_BF16 ? 3e-2 : 4e-3;
    const int64_t q_stride = apart ? n : n + 2 * kv, kv_stride = apart ? kv : q_stride;
    dtrain_attention_args *a = &attention_args;
    kernels.what = "attention";
    memset(a, 0, sizeof *a);
    a->batch = batch, a->queries = T, a->keys = U, a->heads = heads, a->kv_heads = kv_heads;
    a->d = d, a->causal = causal, a->dtype = type;
    a->q_stride = q_stride, a->k_stride = a->v_stride = kv_stride;
    a->mask_head_step = each[1] > 1 ? T * U : 0;
    a->mask_batch_step = each[0] > 1 ? each[1] * T * U : 0;
    kernel_data *x[8] = {kernel_make(batch * T * q_stride, type, 1)};
    x[1] = apart ? kernel_make(batch * U * kv, type, 1) : NULL;
    x[2] = apart ? kernel_make(batch * U * kv, type, 1) : NULL;
    x[3] = kernel_maybe(kernel_draw(3) == 0, batch, DTRAIN_DTYPE_I32);
    x[4] = kernel_maybe(kernel_draw(3) == 0, each[0] * each[1] * T * U, f32);
    attention_hide(x[3], x[4]);
    x[5] = kernel_make(batch * T * n, type, 1), x[6] = kernel_make(batch * heads * T, f32, 1);
    x[7] = kernel_make(batch * heads * T, f32, 1);
    ON_EACH(attention, attention_at(side, x))
    kernel_same(x[5], loose, "y");
    kernel_same(x[6], 1e-4, "lse");
    kernel_same(x[7], 1e-4, "what lse lost");
    kernel_data *d_y = kernel_make(batch * T * n, type, 1), *slopes[3] = {NULL, NULL, NULL};
    for (int i = 0; i < (apart ? 3 : 1); i++) /* apart, one of them may not be wanted */
        slopes[i] = kernel_maybe(!apart || kernel_draw(4) > 0, x[i]->count, type);
    ON_EACH(attention_backward, attention_back(side, x, d_y, slopes))
    for (int i = 0; i < 3; i++)
        kernel_same(slopes[i], 3 * loose, i ? "d_k or d_v" : "d_q or d_qkv");
}

/* Cut 0 .. count into `parts` runs, some of which may be empty: run i is [at[i], at[i + 1]). */
static void kernel_cut(int64_t count, int parts, int64_t *at)
{
    at[0] = 0;
    for (int i = 1; i < parts; i++)
        at[i] = at[i - 1] + (int64_t)kernel_draw((uint64_t)(count - at[i - 1]) + 1);
    at[parts] = count;
}

/* A table of which 1 to 8 ranks hold a part each: their outputs add up to that of the whole one, to the bit (positions
 * are added by one of them), and their gradients stand one behind the other. Rows begin anywhere in a batch. */
static void case_embedding(void)
{
    const int64_t rows = kernel_size(kernel_draw(6) ? 60 : 1500), n = kernel_size(70);
    const int64_t vocab = kernel_size(kernel_draw(3) ? 40 : 700), sequence = kernel_size(30);
    const int64_t first_row = kernel_flag() ? (int64_t)kernel_draw(100) : 0;
    const int ranks = 1 + (int)kernel_draw(8), adds = (int)kernel_draw((uint64_t)ranks);
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32, type = kernel_type();
    const bool positions = kernel_flag();
    int64_t at[9];
    kernels.what = "embedding";
    kernel_cut(vocab, ranks, at);
    kernel_data *tokens = kernel_make(rows, DTRAIN_DTYPE_I32, 1);
    kernel_data *wte = kernel_make(vocab * n, f32, 1), *y = kernel_make(rows * n, f32, 1);
    kernel_data *wpe = kernel_maybe(positions, sequence * n, f32);
    kernel_data *d_y = kernel_make(rows * n, type, 1), *d_wte = kernel_make(vocab * n, f32, 1);
    kernel_data *d_wpe = kernel_maybe(positions, sequence * n, f32);
    float *sum = (float *)calloc((size_t)(rows * n), sizeof *sum);
    for (int64_t i = 0; i < rows; i++)
        ((int32_t *)tokens->of[1])[i] = (int32_t)kernel_draw((uint64_t)vocab);
    kernel_copy(tokens, DTRAIN_COPY_HOST_TO_DEVICE);
    for (int r = 0; r < ranks; r++) {
        kernel_data part = *y;
        part.of[1] = malloc(kernel_bytes(y));
        ON_EACH(embedding, {.rows = rows,
                            .sequence = sequence,
                            .n = n,
                            .vocab = at[r + 1] - at[r],
                            .tokens = (const int32_t *)AT(tokens),
                            .wte = F32(wte) + at[r] * n,
                            .wpe = r == adds ? F32(wpe) : NULL,
                            .y = AT(y),
                            .dtype = f32,
                            .first_token = at[r],
                            .whole_vocab = vocab,
                            .first_row = first_row})
        kernel_copy(&part, DTRAIN_COPY_DEVICE_TO_HOST);
        for (int64_t i = 0; i < rows * n; i++) sum[i] += ((const float *)part.of[1])[i];
        free(part.of[1]);
        kernel_same(y, 0, "y of a part");
        ON_EACH(embedding_backward, {.rows = rows,
                                     .sequence = sequence,
                                     .n = n,
                                     .vocab = at[r + 1] - at[r],
                                     .tokens = (const int32_t *)AT(tokens),
                                     .dtype = type,
                                     .first_token = at[r],
                                     .whole_vocab = vocab,
                                     .first_row = first_row,
                                     .d_y = AT(d_y),
                                     .d_wte = F32(d_wte) + at[r] * n,
                                     .d_wpe = r == adds ? F32(d_wpe) : NULL})
        kernel_same(d_wte, 0, "d_wte");
        kernel_same(d_wpe, 0, "d_wpe");
    }
    if (first_row == 0) {
        ON_EACH(embedding, {.rows = rows,
                            .sequence = sequence,
                            .n = n,
                            .vocab = vocab,
                            .tokens = (const int32_t *)AT(tokens),
                            .wte = F32(wte),
                            .wpe = F32(wpe),
                            .y = AT(y),
                            .dtype = f32})
        memcpy(y->of[1], sum, kernel_bytes(y));
        kernel_same(y, 0, "y of the whole table, beside the sum of its parts");
    }
    free(sum);
}

/* Rows of a tensor from any element on, or up to four runs of its columns: what is kept of them is what is kept in the
 * whole tensor, to the bit. */
static void case_dropout(void)
{
    const int64_t rows = kernel_size(40), n = kernel_size(kernel_draw(4) ? 50 : 400);
    const int64_t first = (int64_t)kernel_draw((uint64_t)(rows * n)), step = kernel_flag() ? 8 : 1;
    const dtrain_dtype type = kernel_type();
    const bool add = kernel_flag(), columns = kernel_flag();
    const size_t bytes = dtrain_dtype_bytes(type);
    dtrain_part part = {columns ? first / n * n : first / step * step, 0, n, 0, {{0, 0}}};
    int64_t at[9], count = rows * n - part.first, from = part.first, to = 0;
    kernels.what = "dropout";
    kernel_cut(n, 8, at);
    for (int i = 0; i < 8 && columns; i += 2) {
        part.segment[part.segments].column = at[i];
        part.segment[part.segments++].length = at[i + 1] - at[i];
        part.n += at[i + 1] - at[i];
    }
    if (columns) count = count / n * part.n;
    kernel_data *x = kernel_make(rows * n, type, 1), *y = kernel_make(rows * n, type, 1);
    kernel_data *a = kernel_make(count, type, 1), *b = kernel_make(count, type, 1);
    char *want = (char *)malloc(kernel_bytes(b) + 1), *got = (char *)malloc(kernel_bytes(b) + 1);
    ON_EACH(dropout, {.count = rows * n,
                      .probability = 0.4f,
                      .seed = 7,
                      .stream = 8,
                      .x = AT(x),
                      .y = AT(y),
                      .dtype = type})
    kernel_copy(y, DTRAIN_COPY_DEVICE_TO_HOST);
    for (; from < rows * n; from++) {
        bool here = !columns;
        for (uint32_t s = 0; s < part.segments; s++)
            here = here || (from % n >= part.segment[s].column &&
                            from % n < part.segment[s].column + part.segment[s].length);
        if (!here) continue;
        memcpy((char *)a->of[1] + (size_t)to * bytes, (char *)x->of[1] + (size_t)from * bytes,
               bytes);
        memcpy(want + (size_t)to++ * bytes, (char *)y->of[1] + (size_t)from * bytes, bytes);
    }
    kernel_copy(a, DTRAIN_COPY_HOST_TO_DEVICE);
    ON_EACH(dropout, {.count = count,
                      .probability = 0.4f,
                      .accumulate = add,
                      .seed = 7,
                      .stream = 8,
                      .x = AT(a),
                      .y = AT(b),
                      .dtype = type,
                      .part = part})
    kernel_data part_y = *b;
    part_y.of[1] = got;
    kernel_copy(&part_y, DTRAIN_COPY_DEVICE_TO_HOST);
    kernels.good = kernels.good && (add || memcmp(got, want, kernel_bytes(b)) == 0);
    CHECK_MSG(kernels.good, "seed %llu: a part drops others than the whole",
              (unsigned long long)kernels.seed);
    kernel_same(b, 1e-6, "y of a part");
    free(want), free(got);
}

static void case_bias(void)
{
    const int64_t rows = kernel_size(20), n = kernel_size(kernel_draw(6) ? 90 : 3000);
    const uint32_t activation = (uint32_t)kernel_draw(DTRAIN_ACTIVATION_SILU + 1);
    const dtrain_dtype type = kernel_type();
    kernels.what = "bias";
    kernel_data *y = kernel_make(rows * n, type, 3);
    kernel_data *bias = kernel_maybe(kernel_draw(4) > 0, n, DTRAIN_DTYPE_F32);
    kernel_data *aux = kernel_maybe(kernel_flag(), rows * n, type);
    ON_EACH(bias, {.m = rows,
                   .n = n,
                   .c = AT(y),
                   .ldc = n,
                   .bias = F32(bias),
                   .aux = AT(aux),
                   .activation = activation,
                   .c_dtype = type})
    kernel_same(y, 1e-5, "y");
    kernel_same(aux, 1e-6, "aux");
}

/* Give the targets of rows: one in five is ignored. */
static kernel_data *kernel_targets(int64_t rows, int64_t classes)
{
    kernel_data *targets = kernel_make(rows, DTRAIN_DTYPE_I32, 1);
    for (int64_t i = 0; i < rows; i++)
        ((int32_t *)targets->of[1])[i] =
            kernel_draw(5) ? (int32_t)kernel_draw((uint64_t)classes) : -1;
    kernel_copy(targets, DTRAIN_COPY_HOST_TO_DEVICE);
    return targets;
}

/* Columns of one rank's logits, or of their gradients, of the whole rows; behind them padding. */
static void kernel_columns(kernel_data *to, const kernel_data *whole, int64_t rows, int64_t first,
                           int64_t width, double padding)
{
    const int64_t n = to->count / rows, all = whole->count / rows;
    for (int64_t i = 0; i < rows * n; i++)
        naive_put(to->of[1], to->dtype, i,
                  i % n < width ? naive_get(whole->of[1], to->dtype, i / n * all + first + i % n)
                                : padding);
}

/* Logits whose columns are cut over 1 to 8 ranks, of which some have none, or padding alone: what the ranks make
 * together is the naive loss of the whole rows, with logits up to some 10^4 and a NaN. */
static void case_cut_cross_entropy(void)
{
    const int64_t rows = kernel_size(8), classes = kernel_size(kernel_draw(6) ? 60 : 5000);
    const float smoothing = kernel_flag() ? (float)kernel_draw(5) / 4 : 0;
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32, type = kernel_type();
    const int ranks = 1 + (int)kernel_draw(8);
    const bool in_place = kernel_flag();
    dtrain_device *const on = kernels.device;
    dtrain_cross_entropy_args args[8], whole;
    kernel_data *local[8], *part[8];
    int64_t at[9];
    kernels.what = "cross-entropy of cut columns";
    kernel_cut(classes, ranks, at);
    kernel_data *logits = kernel_make(rows * classes, type, kernel_draw(3) ? 3 : 1e4f);
    kernel_data *loss = kernel_make(rows, f32, 1), *lse = kernel_make(rows, f32, 1);
    kernel_data *d = kernel_make(rows * classes, type, 1), *top = kernel_make(rows, f32, 1);
    kernel_data *sums = kernel_make(4 * rows, f32, 1), *targets = kernel_targets(rows, classes);
    kernel_data *rest = kernel_make(rows, f32, 1);
    kernel_offset(logits, smoothing);
    if (kernel_draw(4) == 0)
        naive_put(logits->of[1], type, (int64_t)kernel_draw((uint64_t)(rows * classes)),
                  (double)NAN);
    memset(&whole, 0, sizeof whole);
    whole.rows = rows, whole.n = classes, whole.dtype = type;
    whole.smoothing = smoothing, whole.scale = 0.7f, whole.whole_classes = classes;
    args[0] = whole;
    whole.logits = logits->of[1], whole.targets = (const int32_t *)targets->of[1];
    whole.loss = kernel_f32(loss, 1), whole.lse = kernel_f32(lse, 1), whole.d_logits = d->of[1];
    whole.lse_rest = kernel_f32(rest, 1);
    if (kernels.naive)
        KERNEL_CHECK(kernels.naive->ops->cross_entropy(kernels.naive, &whole) == DTRAIN_OK);
    for (int64_t i = 0; i < rows; i++) kernel_f32(top, 1)[i] = -INFINITY;
    memset(sums->of[1], 0, kernel_bytes(sums));
    for (int r = 0; r < ranks; r++) {
        const int64_t width = at[r + 1] - at[r], n = width + (int64_t)kernel_draw(4);
        local[r] = kernel_make(rows * n, type, 1), part[r] = kernel_make(4 * rows, f32, 1);
        kernel_columns(local[r], logits, rows, at[r], width, (double)INFINITY);
        kernel_copy(local[r], DTRAIN_COPY_HOST_TO_DEVICE);
        if (r) args[r] = args[0];
        args[r].n = n, args[r].classes = width ? width : -1, args[r].first_class = at[r];
        args[r].logits = local[r]->of[0], args[r].targets = (const int32_t *)targets->of[0];
        args[r].parts = kernel_f32(part[r], 0), args[r].whole_max = kernel_f32(top, 0);
        KERNEL_CHECK(on->ops->cross_entropy(on, &args[r]) == DTRAIN_OK);
        kernel_copy(part[r], DTRAIN_COPY_DEVICE_TO_HOST);
        for (int64_t i = 0; i < rows; i++) {
            const float *of_row = kernel_f32(part[r], 1) + i;
            kernel_f32(top, 1)[i] = fmaxf(kernel_f32(top, 1)[i], of_row[0]);
            KERNEL_CHECK(width ||
                         (of_row[0] == -INFINITY && of_row[rows] == 0 && of_row[2 * rows] == 0));
        }
    }
    kernel_copy(top, DTRAIN_COPY_HOST_TO_DEVICE);
    for (int r = 0; r < ranks; r++) {
        KERNEL_CHECK(on->ops->cross_entropy_finish(on, &args[r]) == DTRAIN_OK);
        kernel_copy(part[r], DTRAIN_COPY_DEVICE_TO_HOST);
        for (int64_t i = 0; i < rows; i++) /* -infinity less -infinity is no number */
            KERNEL_CHECK(((const int32_t *)targets->of[1])[i] >= 0 ||
                         kernel_f32(part[r], 1)[rows + i] == 0);
        for (int64_t i = rows; i < 4 * rows; i++)
            kernel_f32(sums, 1)[i] += kernel_f32(part[r], 1)[i];
    }
    kernel_copy(sums, DTRAIN_COPY_HOST_TO_DEVICE);
    whole = args[ranks - 1];
    whole.parts = kernel_f32(sums, 0), whole.loss = kernel_f32(loss, 0);
    whole.lse = kernel_f32(lse, 0), whole.lse_rest = kernel_f32(rest, 0);
    KERNEL_CHECK(on->ops->cross_entropy_finish(on, &whole) == DTRAIN_OK);
    kernel_same(loss, 1e-4, "loss");
    kernel_same(lse, 3e-5, "lse");
    kernel_same(rest, 1e-2, "what lse lost"); /* of 10^4 two roundings are an ulp of 1e-3 apart */
    for (int r = 0; r < ranks; r++) {
        kernel_data *d_local = in_place ? local[r] : kernel_make(local[r]->count, type, 1);
        args[r].lse = whole.lse, args[r].d_logits = d_local->of[0];
        args[r].lse_rest = whole.lse_rest;
        KERNEL_CHECK(on->ops->cross_entropy_backward(on, &args[r]) == DTRAIN_OK);
        kernel_columns(d_local, d, rows, at[r], at[r + 1] - at[r], 0);
        kernel_same(d_local, 3e-5, "d_logits");
    }
}

/* Run the case of a seed on `device`; return the hash of its bits. *good: nothing was wrong. With naive NULL nothing is
 * compared, and a backward pass reads what the device has left before. */
static uint64_t kernel_case(dtrain_device *device, dtrain_device *naive, uint64_t seed, bool *good)
{
    static void (*const cases[])(void) = {
        case_pointwise, case_norm,   case_cross_entropy,    case_embedding,
        case_softmax,   case_rotary, case_permute,          case_attention,
        case_dropout,   case_bias,   case_cut_cross_entropy};
    memset(&kernels, 0, sizeof kernels);
    kernels.device = device;
    kernels.naive = naive;
    kernels.seed = seed;
    kernels.hash = 0xcbf29ce484222325u;
    kernels.good = true;
    cases[seed % (sizeof cases / sizeof cases[0])]();
    for (int i = 0; i < kernels.count; i++) {
        kernel_data *x = &kernels.data[i];
        free(x->of[1]);
        device->ops->free(device, x->block, x->block_bytes);
    }
    *good = kernels.good;
    return kernels.hash;
}

#endif
