/* bench_kernels.c: every kernel of a device's table: how fast, how near to what the hardware can do,
 * and whether it is right.
 *
 *   run:     build/cuda/bench_kernels                         a GPU (make gpu-programs)
 *            build/cuda/bench_kernels --only attention --log h200.jsonl
 *            build/bench/bench_kernels --sizes 1M             the CPU device
 *
 * A kernel is described once: its arrays and its call. From that description come its inputs (noise,
 * the same in every run), the bytes it must move (each input read once, each output written once,
 * where its comment does not say otherwise), the comparison with the CPU device, and the timing.
 *
 *   us        of a call, median (min to max) over the repetitions, from before the first call to behind
 *             dtrain_device_ops.synchronize. A repetition lasts 4 milliseconds or more and goes round
 *             several sets of arrays, so that caches stay cold
 *   GB/s      bytes / time
 *   TFLOP/s   2 M N K / time for products; for attention 4 and 10 flops, forward and backward, for each
 *             channel of each pair of a query and a key that it sees
 *   of_peak   of the fastest copy from device to device (bytes read and written), measured first; for
 *             products and attention: of a large square product of the same type, measured first
 *   fallback  kinds of GEMM that cublasLt did not make as asked, so that slower kernels did; on a GPU
 *   correct   every element of every output agrees with the CPU device's, from the same inputs, within
 *             the rounding of its type; "-" where an array has over 64 M elements: not compared */
#include "bench.h"
#include "dtrain.h"

enum { MAX_ARRAYS = 12, MAX_SETS = 8, MAX_REPS = 64, MAX_SIZES = 8, PIECES = 12 };
#define COMPARED_ELEMENTS ((int64_t)1 << 26)
#define COLD_BYTES ((size_t)1 << 29) /* several times the largest cache */

static struct {
    const char *device, *only, *math, *sizes;
    long reps;
} opt = {.device = "cpu", .reps = 15};

static number_list sizes; /* --sizes */

/* ---- Descriptions ---- */

typedef enum fill { NOTHING, NOISE, POSITIVE, LOG_COUNT, ZERO, TOKENS, INDICES, A_DOUBLE } fill;

typedef struct array {
    int64_t count;
    dtrain_dtype dtype;
    fill fill; /* NOTHING: not read, filled with NaN */
    bool output;
} array;

typedef struct kernel kernel;
typedef dtrain_result (*call_fn)(dtrain_device *device, const kernel *k, void *const *m);

struct kernel {
    char name[48], shape[48];
    call_fn call; /* m[i] is the memory of arrays[i] */
    dtrain_dtype dtype;
    int64_t count, rows, n; /* elements of the main array; as a matrix */
    array arrays[MAX_ARRAYS];
    int array_count;
    double bytes, flops;
    double tolerance; /* of an element, relative to it and to the array's root mean square */
    const struct gemm_shape *gemm;
    int64_t gemm_m, gemm_n, gemm_k;
    int64_t batch, sequence, heads;
    bool causal;
};

static void add_array(kernel *k, int64_t count, dtrain_dtype dtype, fill fill, bool output)
{
    array *a = &k->arrays[k->array_count++];
    a->count = count;
    a->dtype = dtype;
    a->fill = fill;
    a->output = output;
    k->bytes += (double)count * (double)dtrain_dtype_bytes(dtype) * ((fill != NOTHING) + output);
}
static void reads(kernel *k, int64_t count, dtrain_dtype dtype, fill fill)
{
    add_array(k, count, dtype, fill, false);
}
static void writes(kernel *k, int64_t count, dtrain_dtype dtype)
{
    add_array(k, count, dtype, NOTHING, true);
}
static void updates(kernel *k, int64_t count, dtrain_dtype dtype, fill fill)
{
    add_array(k, count, dtype, fill, true);
}

/* The model whose shapes are measured: GPT-2 124M on 16 samples, its vocabulary padded to 50304; and
 * the side of the product that is the peak. */
static struct {
    int64_t batch, sequence, heads, channels, vocab, square;
} gpt = {16, 1024, 12, 768, 50304, 8192};

/* The main array as a matrix of n columns. */
static void as_rows(kernel *k, int64_t n)
{
    k->n = n;
    k->rows = k->count > n ? k->count / n : 1;
    snprintf(k->shape, sizeof k->shape, "%lldx%lld", (long long)k->rows, (long long)n);
}

/* ---- Element-wise kernels ---- */

static void describe_add(kernel *k)
{
    reads(k, k->count, k->dtype, NOISE);
    reads(k, k->count, k->dtype, NOISE);
    writes(k, k->count, k->dtype);
}
static dtrain_result call_add(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_add_args a = {k->count, m[0], m[1], m[2], k->dtype, k->dtype};
    return device->ops->add(device, &a);
}

static void describe_axpby(kernel *k)
{
    reads(k, k->count, k->dtype, NOISE);
    updates(k, k->count, k->dtype, NOISE);
}
static dtrain_result call_axpby(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_axpby_args a = {k->count, true, 0.5f, 0.25f, m[0], m[1], false, k->dtype, NULL};
    return device->ops->axpby(device, &a);
}

static void describe_dropout(kernel *k)
{
    reads(k, k->count, k->dtype, NOISE);
    writes(k, k->count, k->dtype);
}
static dtrain_result call_dropout(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_dropout_args a = {k->count, 0.1f, false, 42, 3, m[0], m[1], NULL, k->dtype, {0}};
    return device->ops->dropout(device, &a);
}

static void describe_convert(kernel *k) /* from fp32, and bf16 to it */
{
    reads(k, k->count, k->dtype, NOISE);
    writes(k, k->count, k->dtype == DTRAIN_DTYPE_F32 ? DTRAIN_DTYPE_BF16 : DTRAIN_DTYPE_F32);
}
static dtrain_result call_convert(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_convert_args a = {k->count, m[0], m[1], k->arrays[0].dtype, k->arrays[1].dtype};
    return device->ops->convert(device, &a);
}

static void describe_activation_backward(kernel *k) /* GELU, with the bias gradient */
{
    as_rows(k, gpt.channels);
    reads(k, k->rows * k->n, k->dtype, NOISE);
    reads(k, k->rows * k->n, k->dtype, NOISE);
    writes(k, k->rows * k->n, k->dtype);
    writes(k, k->n, DTRAIN_DTYPE_F32);
    k->tolerance *= 4;
}
static dtrain_result call_activation_backward(dtrain_device *device, const kernel *k,
                                              void *const *m)
{
    dtrain_activation_backward_args a = {
        DTRAIN_ACTIVATION_GELU, false, k->rows, k->n, m[0], m[1], m[2], m[3], k->dtype};
    return device->ops->activation_backward(device, &a);
}

static void describe_sum(kernel *k) /* of squares */
{
    reads(k, k->count, k->dtype, NOISE);
    writes(k, 1, DTRAIN_DTYPE_F32);
}
static dtrain_result call_sum(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_sum_args a = {k->count, true, false, 1, m[0], NULL, m[1], k->dtype, NULL};
    return device->ops->sum(device, &a);
}

/* ---- Kernels over rows ---- */

static void describe_layernorm(kernel *k) /* fused with the residual addition */
{
    as_rows(k, gpt.channels);
    int64_t all = k->rows * k->n;
    reads(k, all, k->dtype, NOISE);
    reads(k, all, k->dtype, NOISE);
    reads(k, k->n, DTRAIN_DTYPE_F32, NOISE);
    reads(k, k->n, DTRAIN_DTYPE_F32, NOISE);
    writes(k, all, k->dtype);
    writes(k, all, k->dtype);
    writes(k, k->rows, DTRAIN_DTYPE_F32);
    writes(k, k->rows, DTRAIN_DTYPE_F32);
    k->tolerance *= 2;
}
static dtrain_result call_layernorm(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_layernorm_args a = {.rows = k->rows,
                               .n = k->n,
                               .epsilon = 1e-5f,
                               .x = m[0],
                               .residual = m[1],
                               .weight = m[2],
                               .bias = m[3],
                               .y = m[4],
                               .sum = m[5],
                               .mean = m[6],
                               .rstd = m[7],
                               .x_dtype = k->dtype,
                               .y_dtype = k->dtype};
    return device->ops->layernorm(device, &a);
}

static void describe_layernorm_backward(kernel *k)
{
    as_rows(k, gpt.channels);
    int64_t all = k->rows * k->n;
    reads(k, all, k->dtype, NOISE);
    reads(k, all, k->dtype, NOISE);
    reads(k, k->n, DTRAIN_DTYPE_F32, NOISE);
    reads(k, k->rows, DTRAIN_DTYPE_F32, NOISE);
    reads(k, k->rows, DTRAIN_DTYPE_F32, POSITIVE);
    writes(k, all, k->dtype);
    writes(k, k->n, DTRAIN_DTYPE_F32);
    writes(k, k->n, DTRAIN_DTYPE_F32);
    k->tolerance *= 4;
}
static dtrain_result call_layernorm_backward(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_layernorm_backward_args a = {.rows = k->rows,
                                        .n = k->n,
                                        .x = m[0],
                                        .d_y = m[1],
                                        .weight = m[2],
                                        .mean = m[3],
                                        .rstd = m[4],
                                        .d_x = m[5],
                                        .d_weight = m[6],
                                        .d_bias = m[7],
                                        .x_dtype = k->dtype,
                                        .y_dtype = k->dtype};
    return device->ops->layernorm_backward(device, &a);
}

static void describe_embedding(kernel *k) /* counts the rows it picks, not the whole table */
{
    as_rows(k, gpt.channels);
    reads(k, k->rows, DTRAIN_DTYPE_I32, TOKENS);
    reads(k, gpt.vocab * k->n, DTRAIN_DTYPE_F32, NOISE);
    reads(k, gpt.sequence * k->n, DTRAIN_DTYPE_F32, NOISE);
    writes(k, k->rows * k->n, k->dtype);
    k->bytes += 4.0 * (double)((k->rows - gpt.vocab) * k->n);
}
static dtrain_result call_embedding(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_embedding_args a = {.rows = k->rows,
                               .sequence = gpt.sequence,
                               .n = k->n,
                               .vocab = gpt.vocab,
                               .tokens = m[0],
                               .wte = m[1],
                               .wpe = m[2],
                               .y = m[3],
                               .dtype = k->dtype};
    return device->ops->embedding(device, &a);
}

static void
describe_embedding_backward(kernel *k) /* d_y once for each table; the table's rows met */
{
    as_rows(k, gpt.channels);
    int64_t met = k->rows < gpt.vocab ? k->rows : gpt.vocab;
    reads(k, k->rows, DTRAIN_DTYPE_I32, TOKENS);
    reads(k, k->rows * k->n, k->dtype, NOISE);
    updates(k, gpt.vocab * k->n, DTRAIN_DTYPE_F32, NOISE);
    updates(k, gpt.sequence * k->n, DTRAIN_DTYPE_F32, NOISE);
    k->bytes += 8.0 * (double)((met - gpt.vocab) * k->n) +
                (double)(k->rows * k->n) * (double)dtrain_dtype_bytes(k->dtype);
    k->tolerance = 1e-4;
}
static dtrain_result call_embedding_backward(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_embedding_backward_args a = {.rows = k->rows,
                                        .sequence = gpt.sequence,
                                        .n = k->n,
                                        .vocab = gpt.vocab,
                                        .tokens = m[0],
                                        .d_y = m[1],
                                        .d_wte = m[2],
                                        .d_wpe = m[3],
                                        .dtype = k->dtype};
    return device->ops->embedding_backward(device, &a);
}

static void describe_cross_entropy(kernel *k) /* with the gradient, in place */
{
    as_rows(k, gpt.vocab);
    updates(k, k->rows * k->n, k->dtype, NOISE);
    reads(k, k->rows, DTRAIN_DTYPE_I32, TOKENS);
    writes(k, k->rows, DTRAIN_DTYPE_F32);
    writes(k, k->rows, DTRAIN_DTYPE_F32);
    k->tolerance *= 4;
}
static dtrain_result call_cross_entropy(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_cross_entropy_args a = {.rows = k->rows,
                                   .n = k->n,
                                   .logits = m[0],
                                   .targets = m[1],
                                   .loss = m[2],
                                   .lse = m[3],
                                   .d_logits = m[0],
                                   .scale = 1.0f,
                                   .dtype = k->dtype};
    return device->ops->cross_entropy(device, &a);
}

static void describe_cross_entropy_backward(kernel *k)
{
    as_rows(k, gpt.vocab);
    reads(k, k->rows * k->n, k->dtype, NOISE);
    reads(k, k->rows, DTRAIN_DTYPE_I32, TOKENS);
    reads(k, k->rows, DTRAIN_DTYPE_F32, LOG_COUNT);
    writes(k, k->rows * k->n, k->dtype);
    k->tolerance *= 4;
}
static dtrain_result call_cross_entropy_backward(dtrain_device *device, const kernel *k,
                                                 void *const *m)
{
    dtrain_cross_entropy_backward_args a = {.rows = k->rows,
                                            .n = k->n,
                                            .scale = 1.0f,
                                            .logits = m[0],
                                            .targets = m[1],
                                            .lse = m[2],
                                            .d_logits = m[3],
                                            .dtype = k->dtype};
    return device->ops->cross_entropy_backward(device, &a);
}

/* ---- Optimizers: PIECES tensors of equal size ---- */

static void optimizer_tensors(const kernel *k, void *const *m, bool two_moments,
                              dtrain_optimizer_tensor *tensors)
{
    const int64_t part = k->count / PIECES;
    float *grad = m[0], *value = m[1], *first = m[2], *second = two_moments ? m[3] : NULL;
    memset(tensors, 0, PIECES * sizeof *tensors);
    for (int64_t i = 0; i < PIECES; i++) {
        const int64_t at = i * part;
        tensors[i].count = i + 1 < PIECES ? part : k->count - at;
        tensors[i].weight_decay = 0.1f;
        tensors[i].value = value + at;
        tensors[i].grad = grad + at;
        tensors[i].m = first + at;
        tensors[i].v = second ? second + at : NULL;
    }
}

static void describe_sgd(kernel *k) /* with momentum */
{
    reads(k, k->count, DTRAIN_DTYPE_F32, NOISE);
    updates(k, k->count, DTRAIN_DTYPE_F32, NOISE);
    updates(k, k->count, DTRAIN_DTYPE_F32, NOISE);
}
static dtrain_result call_sgd(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_optimizer_tensor tensors[PIECES];
    dtrain_sgd_args a = {
        .tensor_count = PIECES, .tensors = tensors, .lr = 0.01f, .momentum = 0.9f, .grad_scale = 1};
    optimizer_tensors(k, m, false, tensors);
    return device->ops->sgd(device, &a);
}

static dtrain_result call_lion(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_optimizer_tensor tensors[PIECES];
    dtrain_lion_args a = {.tensor_count = PIECES,
                          .tensors = tensors,
                          .lr = 1e-4f,
                          .beta1 = 0.9f,
                          .beta2 = 0.99f,
                          .grad_scale = 1};
    optimizer_tensors(k, m, false, tensors);
    return device->ops->lion(device, &a);
}

static void describe_adamw(kernel *k)
{
    describe_sgd(k);
    updates(k, k->count, DTRAIN_DTYPE_F32, POSITIVE);
}
static dtrain_result call_adamw(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_optimizer_tensor tensors[PIECES];
    dtrain_adamw_args a = {.tensor_count = PIECES,
                           .tensors = tensors,
                           .lr = 1e-3f,
                           .beta1 = 0.9f,
                           .beta2 = 0.95f,
                           .epsilon = 1e-8f,
                           .correction1 = 0.1f,
                           .correction2 = 0.05f,
                           .grad_scale = 1};
    optimizer_tensors(k, m, true, tensors);
    return device->ops->adamw(device, &a);
}

/* One small launch: its time is the price of a launch, its bytes are next to none. */
static void describe_clip(kernel *k)
{
    reads(k, 1, DTRAIN_DTYPE_I64, A_DOUBLE);
    updates(k, (int64_t)(sizeof(dtrain_step_scalars) / 4), DTRAIN_DTYPE_F32, POSITIVE);
    writes(k, 1, DTRAIN_DTYPE_F32);
}
static dtrain_result call_clip(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_clip_args a = {m[0], 1.0f, m[1], m[2], NULL, 1};
    (void)k;
    return device->ops->clip(device, &a);
}

/* ---- Sparse: one element in a thousand ---- */

static int64_t kept(const kernel *k) { return k->count >= 1000 ? k->count / 1000 : 1; }

static void describe_topk(kernel *k) /* residual += x, then a second read of the sum: 16 bytes */
{
    reads(k, k->count, DTRAIN_DTYPE_F32, NOISE);
    updates(k, k->count, DTRAIN_DTYPE_F32, NOISE);
    writes(k, kept(k), DTRAIN_DTYPE_F32);
    writes(k, kept(k), DTRAIN_DTYPE_I32);
    k->bytes += 4.0 * (double)k->count;
}
static dtrain_result call_topk(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_topk_args a = {k->count, kept(k), m[0], m[1], m[2], m[3], NULL, 0};
    return device->ops->topk(device, &a);
}

static void describe_scatter_add(kernel *k) /* touches a whole 32-byte sector for each element */
{
    reads(k, kept(k), DTRAIN_DTYPE_F32, NOISE);
    reads(k, kept(k), DTRAIN_DTYPE_I32, INDICES);
    updates(k, k->count, DTRAIN_DTYPE_F32, NOISE);
    k->bytes = (8.0 + 2 * 32) * (double)kept(k);
}
static dtrain_result call_scatter_add(dtrain_device *device, const kernel *k, void *const *m)
{
    dtrain_scatter_add_args a = {k->count, kept(k), 0.5f, m[0], m[1], m[2]};
    return device->ops->scatter_add(device, &a);
}

/* ---- Copy: what the memory can do ---- */

static void describe_copy(kernel *k)
{
    reads(k, k->count, DTRAIN_DTYPE_F32, NOISE);
    writes(k, k->count, DTRAIN_DTYPE_F32);
}
static dtrain_result call_copy(dtrain_device *device, const kernel *k, void *const *m)
{
    return device->ops->copy_async(device, m[1], m[0], (size_t)k->count * sizeof(float),
                                   DTRAIN_COPY_DEVICE_TO_DEVICE, NULL);
}

/* ---- Products ---- */

typedef enum extent { TOKENS_OF_BATCH, C, C3, C4, VOCAB, SQUARE } extent;

static const struct gemm_shape {
    const char *name;
    uint32_t flags, activation;
    extent m, n, k;
    bool bias, aux, bias_grad, accumulate; /* accumulate: a weight gradient, fp32 */
} gemm_shapes[] = {
    {"peak", DTRAIN_GEMM_TRANS_B, 0, SQUARE, SQUARE, SQUARE, false, false, false, false},
    {"qkv", DTRAIN_GEMM_TRANS_B, 0, TOKENS_OF_BATCH, C3, C, true, false, false, false},
    {"proj", DTRAIN_GEMM_TRANS_B, 0, TOKENS_OF_BATCH, C, C, true, false, false, false},
    {"fc, GELU", DTRAIN_GEMM_TRANS_B, DTRAIN_ACTIVATION_GELU, TOKENS_OF_BATCH, C4, C, true, true,
     false, false},
    {"fcproj", DTRAIN_GEMM_TRANS_B, 0, TOKENS_OF_BATCH, C, C4, true, false, false, false},
    {"logits", DTRAIN_GEMM_TRANS_B, 0, TOKENS_OF_BATCH, VOCAB, C, false, false, false, false},
    {"dX qkv", 0, 0, TOKENS_OF_BATCH, C, C3, false, false, false, false},
    {"dX fc", 0, 0, TOKENS_OF_BATCH, C, C4, false, false, false, false},
    {"dX fcproj, dGELU", DTRAIN_GEMM_ACT_BACKWARD | DTRAIN_GEMM_BIAS_GRAD_C, DTRAIN_ACTIVATION_GELU,
     TOKENS_OF_BATCH, C4, C, false, true, true, false},
    {"dX logits", 0, 0, TOKENS_OF_BATCH, C, VOCAB, false, false, false, false},
    {"dW qkv", DTRAIN_GEMM_TRANS_A, 0, C3, C, TOKENS_OF_BATCH, false, false, true, true},
    {"dW fc", DTRAIN_GEMM_TRANS_A, 0, C4, C, TOKENS_OF_BATCH, false, false, true, true},
    {"dW fcproj", DTRAIN_GEMM_TRANS_A, 0, C, C4, TOKENS_OF_BATCH, false, false, true, true},
    {"dW logits", DTRAIN_GEMM_TRANS_A, 0, VOCAB, C, TOKENS_OF_BATCH, false, false, false, true},
};

static int64_t extent_of(extent e)
{
    const int64_t c = gpt.channels;
    const int64_t extents[] = {gpt.batch * gpt.sequence, c, 3 * c, 4 * c, gpt.vocab, gpt.square};
    return extents[e];
}

static void describe_gemm(kernel *k)
{
    const struct gemm_shape *s = k->gemm;
    int64_t m = k->gemm_m = extent_of(s->m), n = k->gemm_n = extent_of(s->n);
    int64_t depth = k->gemm_k = extent_of(s->k);
    snprintf(k->shape, sizeof k->shape, "%s %lldx%lldx%lld", s->name, (long long)m, (long long)n,
             (long long)depth);
    reads(k, m * depth, k->dtype, NOISE);
    reads(k, depth * n, k->dtype, NOISE);
    if (s->accumulate) updates(k, m * n, DTRAIN_DTYPE_F32, NOISE);
    else writes(k, m * n, k->dtype);
    reads(k, n, DTRAIN_DTYPE_F32, NOISE); /* bias */
    add_array(k, s->aux ? m * n : 1, k->dtype,
              s->flags & DTRAIN_GEMM_ACT_BACKWARD ? NOISE : NOTHING,
              s->aux && !(s->flags & DTRAIN_GEMM_ACT_BACKWARD));
    add_array(k, s->flags & DTRAIN_GEMM_BIAS_GRAD_C ? n : m, DTRAIN_DTYPE_F32, NOTHING,
              s->bias_grad);
    k->flops = 2.0 * (double)m * (double)n * (double)depth;
    k->tolerance = k->dtype == DTRAIN_DTYPE_F32 && strcmp(opt.math, "fp32") == 0 ? 1e-4 : 3e-2;
}
static dtrain_result call_gemm(dtrain_device *device, const kernel *k, void *const *m)
{
    const struct gemm_shape *s = k->gemm;
    dtrain_gemm_args g;
    memset(&g, 0, sizeof g);
    g.flags = s->flags;
    g.activation = s->activation;
    g.m = k->gemm_m;
    g.n = k->gemm_n;
    g.k = k->gemm_k;
    g.alpha = 1;
    g.beta = s->accumulate ? 1 : 0;
    g.a = m[0];
    g.b = m[1];
    g.c = m[2];
    g.lda = s->flags & DTRAIN_GEMM_TRANS_A ? g.m : g.k;
    g.ldb = s->flags & DTRAIN_GEMM_TRANS_B ? g.k : g.n;
    g.ldc = g.n;
    g.a_dtype = g.b_dtype = k->dtype;
    g.c_dtype = k->arrays[2].dtype;
    g.bias = s->bias ? m[3] : NULL;
    g.aux = s->aux ? m[4] : NULL;
    g.bias_grad = s->bias_grad ? m[5] : NULL;
    return device->ops->gemm(device, &g);
}

/* ---- Attention ---- */

static double attention_flops(const kernel *k, double flops_per_channel)
{
    double t = (double)k->sequence, pairs = k->causal ? t * (t + 1) / 2 : t * t;
    return flops_per_channel * (double)(k->batch * k->n) * pairs;
}

static void describe_attention(kernel *k)
{
    int64_t rows = k->batch * k->sequence;
    reads(k, rows * 3 * k->n, k->dtype, NOISE);
    writes(k, rows * k->n, k->dtype);
    writes(k, rows * k->heads, DTRAIN_DTYPE_F32);
    k->flops = attention_flops(k, 4);
    k->tolerance = k->dtype == DTRAIN_DTYPE_F32 && strcmp(opt.math, "fp32") == 0 ? 1e-4 : 3e-2;
}
/* Rows of q, k and v side by side. */
static dtrain_attention_args attention_args(const kernel *k, const void *qkv, void *y, void *lse)
{
    const size_t bytes = (size_t)k->n * dtrain_dtype_bytes(k->dtype);
    dtrain_attention_args a;
    memset(&a, 0, sizeof a);
    a.batch = k->batch;
    a.queries = a.keys = k->sequence;
    a.heads = a.kv_heads = k->heads;
    a.d = k->n / k->heads;
    a.causal = k->causal;
    a.dtype = k->dtype;
    a.q = qkv, a.k = (const char *)qkv + bytes, a.v = (const char *)qkv + 2 * bytes;
    a.q_stride = a.k_stride = a.v_stride = 3 * k->n;
    a.y = y;
    a.lse = (float *)lse;
    return a;
}

static dtrain_result call_attention(dtrain_device *device, const kernel *k, void *const *m)
{
    const dtrain_attention_args a = attention_args(k, m[0], m[1], m[2]);
    return device->ops->attention(device, &a);
}

static void describe_attention_backward(kernel *k)
{
    int64_t rows = k->batch * k->sequence;
    reads(k, rows * 3 * k->n, k->dtype, NOISE);
    reads(k, rows * k->n, k->dtype, NOISE);
    reads(k, rows * k->heads, DTRAIN_DTYPE_F32, LOG_COUNT);
    reads(k, rows * k->n, k->dtype, NOISE);
    writes(k, rows * 3 * k->n, k->dtype);
    k->flops = attention_flops(k, 10);
    k->tolerance = k->dtype == DTRAIN_DTYPE_F32 && strcmp(opt.math, "fp32") == 0 ? 2e-4 : 5e-2;
}
static dtrain_result call_attention_backward(dtrain_device *device, const kernel *k, void *const *m)
{
    const dtrain_attention_args forward = attention_args(k, m[0], m[1], m[2]);
    const size_t bytes = (size_t)k->n * dtrain_dtype_bytes(k->dtype);
    char *d_qkv = (char *)m[4];
    const dtrain_attention_backward_args a = {forward, m[3], d_qkv, d_qkv + bytes,
                                              d_qkv + 2 * bytes};
    return device->ops->attention_backward(device, &a);
}

/* ---- What is measured ---- */

typedef enum kind { SIZED, FP32_ONLY, ONCE } kind; /* every size and type; every size; once */

static const struct operation {
    const char *name;
    void (*describe)(kernel *k);
    call_fn call;
    kind kind;
} operations[] = {
    {"copy", describe_copy, call_copy, FP32_ONLY},
    {"add", describe_add, call_add, SIZED},
    {"axpby", describe_axpby, call_axpby, SIZED},
    {"dropout", describe_dropout, call_dropout, SIZED},
    {"convert", describe_convert, call_convert, SIZED},
    {"activation_backward", describe_activation_backward, call_activation_backward, SIZED},
    {"sum", describe_sum, call_sum, SIZED},
    {"layernorm", describe_layernorm, call_layernorm, SIZED},
    {"layernorm_backward", describe_layernorm_backward, call_layernorm_backward, SIZED},
    {"embedding", describe_embedding, call_embedding, SIZED},
    {"embedding_backward", describe_embedding_backward, call_embedding_backward, SIZED},
    {"cross_entropy", describe_cross_entropy, call_cross_entropy, SIZED},
    {"cross_entropy_backward", describe_cross_entropy_backward, call_cross_entropy_backward, SIZED},
    {"sgd", describe_sgd, call_sgd, FP32_ONLY},
    {"lion", describe_sgd, call_lion, FP32_ONLY},
    {"adamw", describe_adamw, call_adamw, FP32_ONLY},
    {"topk", describe_topk, call_topk, FP32_ONLY},
    {"scatter_add", describe_scatter_add, call_scatter_add, FP32_ONLY},
    {"clip", describe_clip, call_clip, ONCE},
};
enum { OPERATION_COUNT = sizeof operations / sizeof *operations };

/* ---- Arrays in memory ---- */

/* Element i of array `a`, as noise in [-1, 1): a hash, so that any order gives the same. */
static float noise(int a, int64_t i)
{
    uint32_t x = (uint32_t)i * 2654435761u + (uint32_t)(a + 1) * 40503u;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    return (float)(x >> 8) / 8388608.0f - 1.0f;
}

static float float_element(const kernel *k, int a, int64_t i)
{
    switch (k->arrays[a].fill) {
    case NOISE: return noise(a, i);
    case POSITIVE: return 0.5f * noise(a, i) + 0.625f;
    case LOG_COUNT: return logf((float)(k->sequence ? k->sequence : k->n));
    default: return NAN;
    }
}

static int64_t integer_element(const kernel *k, int a, int64_t i)
{
    switch (k->arrays[a].fill) {
    case ZERO: return 0;
    case TOKENS: return (int64_t)((noise(a, i) + 1) * 0.5f * (float)gpt.vocab) % gpt.vocab;
    case INDICES: return i * (k->count / k->arrays[a].count);
    case A_DOUBLE: return 0x4002000000000000; /* 2.25 */
    default: return -1;
    }
}

static void fill_host(const kernel *k, int a, int64_t count, void *memory)
{
    for (int64_t i = 0; i < count; i++) switch (k->arrays[a].dtype) {
        case DTRAIN_DTYPE_F32: ((float *)memory)[i] = float_element(k, a, i); break;
        case DTRAIN_DTYPE_BF16:
            ((uint16_t *)memory)[i] =
                dtrain_half_from_f32(DTRAIN_DTYPE_BF16, float_element(k, a, i));
            break;
        case DTRAIN_DTYPE_F16:
            ((uint16_t *)memory)[i] =
                dtrain_half_from_f32(DTRAIN_DTYPE_F16, float_element(k, a, i));
            break;
        case DTRAIN_DTYPE_I64: ((int64_t *)memory)[i] = integer_element(k, a, i); break;
        default: ((int32_t *)memory)[i] = (int32_t)integer_element(k, a, i); break;
        }
}

static size_t array_bytes(const array *a)
{
    return ((size_t)a->count * dtrain_dtype_bytes(a->dtype) + 255) / 256 * 256;
}
static size_t set_bytes(const kernel *k)
{
    size_t bytes = 0;
    for (int a = 0; a < k->array_count; a++) bytes += array_bytes(&k->arrays[a]);
    return bytes;
}
static void place(const kernel *k, void *memory, void **m)
{
    char *at = (char *)memory;
    for (int a = 0; a < k->array_count; at += array_bytes(&k->arrays[a++])) m[a] = at;
}

/* Return whether all arrays are small enough to be filled and compared element by element. */
static bool is_compared(const kernel *k)
{
    for (int a = 0; a < k->array_count; a++)
        if (k->arrays[a].count > COMPARED_ELEMENTS) return false;
    return true;
}

/* Fills the arrays on the device, and `host` where it is given. A larger array repeats the noise of
 * its first elements. */
static dtrain_result fill_arrays(dtrain_device *device, const kernel *k, void *const *m,
                                 void *const *host)
{
    void *scratch = host ? NULL : bench_alloc((size_t)COMPARED_ELEMENTS * sizeof(int64_t));
    dtrain_result result = DTRAIN_OK;
    for (int a = 0; a < k->array_count && result == DTRAIN_OK; a++) {
        const array *x = &k->arrays[a];
        size_t size = dtrain_dtype_bytes(x->dtype), all = (size_t)x->count * size;
        int64_t first = x->count < COMPARED_ELEMENTS ? x->count : COMPARED_ELEMENTS;
        size_t done = (size_t)first * size;
        void *from = host ? host[a] : scratch;
        fill_host(k, a, first, from);
        result = device->ops->copy(device, m[a], from, done, DTRAIN_COPY_HOST_TO_DEVICE);
        for (; done < all && result == DTRAIN_OK; done *= 2)
            result = device->ops->copy(device, (char *)m[a] + done, m[a],
                                       done < all - done ? done : all - done,
                                       DTRAIN_COPY_DEVICE_TO_DEVICE);
    }
    free(scratch);
    return result;
}

/* ---- Correctness ---- */

static double element(const array *x, const void *memory, int64_t i)
{
    if (x->dtype == DTRAIN_DTYPE_F32) return ((const float *)memory)[i];
    if (x->dtype == DTRAIN_DTYPE_BF16 || x->dtype == DTRAIN_DTYPE_F16)
        return dtrain_half_to_f32(x->dtype, ((const uint16_t *)memory)[i]);
    return ((const int32_t *)memory)[i];
}

/* Count the elements of an output that differ from the CPU device's; integers have to be equal. */
static int64_t wrong_elements(const kernel *k, int a, const void *got, const void *want)
{
    const array *x = &k->arrays[a];
    double squares = 0, tolerance = x->dtype == DTRAIN_DTYPE_I32 ? 0 : k->tolerance;
    int64_t wrong = 0;
    for (int64_t i = 0; i < x->count; i++) squares += element(x, want, i) * element(x, want, i);
    double scale = sqrt(squares / (double)x->count);
    for (int64_t i = 0; i < x->count; i++) {
        double g = element(x, got, i), w = element(x, want, i);
        if (fabs(g - w) <= tolerance * (fabs(w) + scale)) continue; /* not so for NaN */
        if (wrong++ == 0)
            fprintf(stderr,
                    "bench_kernels: %s %s, array %d, element %lld of %lld: %.9g, on the CPU %.9g\n",
                    k->name, k->shape, a, (long long)i, (long long)x->count, g, w);
    }
    return wrong;
}

/* Runs the kernel once on both devices, from the same inputs, and compares what it wrote. */
static dtrain_result compare(dtrain_device *device, dtrain_device *cpu, const kernel *k,
                             void *const *m, void *const *host, bool *correct)
{
    dtrain_result result = k->call(device, k, m);
    if (result == DTRAIN_OK) result = device->ops->synchronize(device);
    if (result == DTRAIN_OK) result = k->call(cpu, k, host);
    *correct = true;
    for (int a = 0; a < k->array_count && result == DTRAIN_OK; a++) {
        const array *x = &k->arrays[a];
        size_t bytes = (size_t)x->count * dtrain_dtype_bytes(x->dtype);
        if (!x->output) continue;
        void *got = bench_alloc(bytes);
        result = device->ops->copy(device, got, m[a], bytes, DTRAIN_COPY_DEVICE_TO_HOST);
        if (result == DTRAIN_OK && wrong_elements(k, a, got, host[a])) *correct = false;
        free(got);
    }
    return result;
}

/* ---- Timing ---- */

/* Microseconds of one call, as the mean over `calls` that follow each other. */
static dtrain_result time_calls(dtrain_device *device, const kernel *k, void *sets[][MAX_ARRAYS],
                                int set_count, int calls, double *us)
{
    const double start = dtrain_seconds();
    dtrain_result result = DTRAIN_OK;
    for (int i = 0; i < calls && result == DTRAIN_OK; i++)
        result = k->call(device, k, sets[i % set_count]);
    if (result == DTRAIN_OK) result = device->ops->synchronize(device);
    *us = 1e6 * (dtrain_seconds() - start) / calls;
    return result;
}

static dtrain_result measure(dtrain_device *device, const kernel *k, void *sets[][MAX_ARRAYS],
                             int set_count, spread *t)
{
    double us[MAX_REPS] = {0}, once = 0;
    dtrain_result result = DTRAIN_OK;
    for (int i = 0; i < 2 && result == DTRAIN_OK; i++) /* the first also warms up */
        result = time_calls(device, k, sets, set_count, set_count, &once);
    const int calls = bench.quick ? 1 : once < 1 ? 4000 : (int)(4000 / once) + 1;
    for (int r = 0; r < opt.reps && result == DTRAIN_OK; r++)
        result = time_calls(device, k, sets, set_count, calls, &us[r]);
    *t = spread_of(us, (int)opt.reps);
    return result;
}

/* ---- Report ---- */

static char device_name[96];
static double copy_peak = NAN;                     /* GB/s */
static double gemm_peak[4] = {NAN, NAN, NAN, NAN}; /* TFLOP/s by dtype */

/* "bf16"; for fp32 products the arithmetic that the tensor cores do instead */
static const char *precision_of(const kernel *k)
{
    return k->flops > 0 && k->dtype == DTRAIN_DTYPE_F32 ? opt.math : dtrain_dtype_name(k->dtype);
}

/* Return how many kinds of GEMM took a fallback so far; NAN on the CPU. */
static double fallbacks(dtrain_device *device)
{
    dtrain_device_info info;
    const bool known = !device->ops->host_memory && dtrain_device_query(device, &info) == DTRAIN_OK;
    return known ? (double)info.slow_gemms : (double)NAN;
}

/* correct: see bench_end. The first copies and the first product of a type set what the others are
 * measured against. */
static void report(const kernel *k, const spread *t, double fallback, int correct)
{
    const double gbs = 1e-3 * k->bytes / t->median, tflops = 1e-6 * k->flops / t->median;
    const bool product = k->flops > 0;
    if (k->call == call_copy && !(gbs <= copy_peak)) copy_peak = gbs;
    if (k->call == call_gemm && strcmp(k->gemm->name, "peak") == 0) gemm_peak[k->dtype] = tflops;
    bench_begin("kernel");
    bench_string("device", 0, device_name);
    bench_string("kernel", -22, k->name);
    bench_string("dtype", -5, precision_of(k));
    bench_string("shape", -33, k->shape);
    bench_number("bytes", 0, 0, k->bytes);
    bench_number("flops", 0, 0, k->flops);
    bench_spread("us", 9, 1, *t);
    bench_number("GB/s", 7, 1, gbs);
    bench_number("TFLOP/s", 8, 3, product ? tflops : NAN);
    bench_number("of_peak", 7, 3, product ? tflops / gemm_peak[k->dtype] : gbs / copy_peak);
    bench_number("fallback", 8, 0, product ? fallback : NAN);
    bench_end(correct);
}

/* Fill, compare, time and report one kernel; 0 unless a call failed. */
static int run_kernel(dtrain_device *device, dtrain_device *cpu, kernel *k)
{
    size_t bytes = set_bytes(k);
    int set_count = bench.quick || bytes >= COLD_BYTES ? 1 : (int)(COLD_BYTES / bytes) + 1;
    void *memory = NULL, *host = NULL, *host_arrays[MAX_ARRAYS], *sets[MAX_SETS][MAX_ARRAYS];
    bool compared = is_compared(k), correct = true;
    spread t = {0, 0, 0};
    const double before = fallbacks(device);
    if (set_count > MAX_SETS) set_count = MAX_SETS;
    dtrain_result result = device->ops->alloc(device, bytes * (size_t)set_count, &memory);
    if (result == DTRAIN_OK && compared) host = bench_alloc(bytes);
    if (host) place(k, host, host_arrays);
    for (int s = 0; s < set_count; s++) place(k, (char *)memory + (size_t)s * bytes, sets[s]);
    if (result == DTRAIN_OK) result = fill_arrays(device, k, sets[0], host ? host_arrays : NULL);
    for (int s = 1; s < set_count && result == DTRAIN_OK; s++)
        result =
            device->ops->copy(device, sets[s][0], sets[0][0], bytes, DTRAIN_COPY_DEVICE_TO_DEVICE);
    if (result == DTRAIN_OK && compared)
        result = compare(device, cpu, k, sets[0], host_arrays, &correct);
    if (result == DTRAIN_OK) result = measure(device, k, sets, set_count, &t);
    if (memory) device->ops->free(device, memory, bytes * (size_t)set_count);
    free(host);
    if (result != DTRAIN_OK) {
        fprintf(stderr, "bench_kernels: %s %s %s: %s\n", k->name, precision_of(k), k->shape,
                dtrain_last_error());
        return 1;
    }
    report(k, &t, fallbacks(device) - before, compared ? correct : -1);
    return 0;
}

/* A kernel of one type and size; `count` is ignored by products and attention. */
static kernel kernel_of(const char *name, call_fn call, dtrain_dtype dtype, int64_t count)
{
    kernel k;
    memset(&k, 0, sizeof k);
    snprintf(k.name, sizeof k.name, "%s", name);
    snprintf(k.shape, sizeof k.shape, "%lld", (long long)count);
    k.call = call;
    k.dtype = dtype;
    k.count = count;
    k.tolerance = dtype == DTRAIN_DTYPE_F32 ? 2e-5 : 0x1p-6; /* bf16 has 8 significant bits */
    return k;
}

static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F32};

static bool is_wanted(const char *name) { return !opt.only || strstr(name, opt.only); }

static int run_operations(dtrain_device *device, dtrain_device *cpu)
{
    int bad = 0;
    for (int i = 0; i < OPERATION_COUNT; i++) {
        const struct operation *o = &operations[i];
        if (!is_wanted(o->name) && o->call != call_copy) continue; /* copies are the peak */
        for (int d = o->kind == SIZED ? 0 : 1; d < 2; d++)
            for (int s = 0; s < (o->kind == ONCE ? 1 : sizes.count); s++) {
                kernel k = kernel_of(o->name, o->call, dtypes[d], (int64_t)sizes.items[s]);
                if (o->kind == ONCE) snprintf(k.shape, sizeof k.shape, "one launch");
                o->describe(&k);
                bad += run_kernel(device, cpu, &k);
            }
    }
    return bad;
}

static int run_products(dtrain_device *device, dtrain_device *cpu)
{
    int bad = 0, count = sizeof gemm_shapes / sizeof *gemm_shapes;
    for (int d = 0; d < 2; d++)
        for (int i = 0; i < count; i++) {
            kernel k = kernel_of("gemm", call_gemm, dtypes[d], 0);
            if (i > 0 && !is_wanted(k.name)) continue; /* the peak is always needed */
            k.gemm = &gemm_shapes[i];
            describe_gemm(&k);
            bad += run_kernel(device, cpu, &k);
        }
    return bad;
}

static int run_attention(dtrain_device *device, dtrain_device *cpu)
{
    const int64_t shapes[][4] = {/* batch, heads, sequence, size of a head */
                                 {gpt.batch, gpt.heads, gpt.sequence, 64},
                                 {(gpt.batch + 3) / 4, gpt.heads, 4 * gpt.sequence, 128}};
    int bad = 0;
    for (int d = 0; d < 2; d++)
        for (int i = 0; i < 2 * 2 * 2; i++) { /* shape, causal, backward */
            const int64_t *s = shapes[i / 4];
            bool backward = i % 2 != 0;
            kernel k = kernel_of(backward ? "attention_backward" : "attention",
                                 backward ? call_attention_backward : call_attention, dtypes[d], 0);
            if (!is_wanted(k.name)) continue;
            k.batch = s[0];
            k.heads = s[1];
            k.sequence = s[2];
            k.n = s[1] * s[3];
            k.causal = i / 2 % 2 == 0;
            snprintf(k.shape, sizeof k.shape, "%lldx%lldx%lldx%lld%s", (long long)s[0],
                     (long long)s[1], (long long)s[2], (long long)s[3], k.causal ? " causal" : "");
            if (backward) describe_attention_backward(&k);
            else describe_attention(&k);
            bad += run_kernel(device, cpu, &k);
        }
    return bad;
}

/* ---- Options ---- */

static const flag flag_table[] = {
    {"--device", 's', &opt.device, 0, 0, "cpu, or in a build with dtrain_cuda.cu cuda", NULL},
    {"--math", 's', &opt.math, 0, 0, "of fp32 products: fp32, tf32 or bf16; tf32, on the CPU fp32",
     NULL},
    {"--sizes", 's', &opt.sizes, 0, 0,
     "elements of element-wise kernels; 16M,64M,256M, on the CPU 4M", NULL},
    {"--reps", 'i', &opt.reps, 1, MAX_REPS, "repetitions", NULL},
    {"--only", 's', &opt.only, 0, 0, "kernels whose name contains it, and the peaks", NULL},
    BENCH_FLAGS};

static int bad_option(const char *name, const char *value, const char *takes)
{
    fprintf(stderr, "bench_kernels: %s is \"%s\"; it takes %s\n", name, value, takes);
    return 2;
}

/* Choose what depends on the device and on --quick. */
static int resolve(const dtrain_device_ops **ops, dtrain_device_desc *desc)
{
    static const char *const maths[] = {"default", "fp32", "tf32", "bf16"}; /* dtrain_math */
    bool on_cpu = strcmp(opt.device, "cpu") == 0;
    if (dtrain_device_ops_by_name(opt.device, ops) != DTRAIN_OK) {
        fprintf(stderr, "bench_kernels: --device: %s\n", dtrain_last_error());
        return 2;
    }
    if (!opt.math) opt.math = on_cpu ? "fp32" : "tf32";
    while (desc->math < 4 && (desc->math == 0 || strcmp(opt.math, maths[desc->math]) != 0))
        desc->math++;
    if (desc->math == 4 || (on_cpu && desc->math != DTRAIN_MATH_FP32))
        return bad_option("--math", opt.math, "fp32, on a GPU also tf32 or bf16");
    if (on_cpu) gpt.batch = 1, gpt.sequence = 256, gpt.square = 1024;
    if (bench.quick)
        gpt.batch = 8, gpt.sequence = 21, gpt.heads = 2, gpt.channels = 64, gpt.vocab = 200;
    if (bench.quick) gpt.square = 64;
    if (!opt.sizes) opt.sizes = bench.quick ? "5000" : on_cpu ? "4M" : "16M,64M,256M";
    bench_numbers("bench_kernels", "--sizes", opt.sizes, PIECES, 0x1p40, &sizes);
    return 0;
}

static int run_all(dtrain_device *device, dtrain_device *cpu)
{
    dtrain_device_info info;
    if (dtrain_device_query(device, &info) != DTRAIN_OK) {
        fprintf(stderr, "bench_kernels: %s\n", dtrain_last_error());
        return 1;
    }
    snprintf(device_name, sizeof device_name, "%s", info.name);
    bench_title(
        "%s, %.1f GiB, %ld repetitions; GPT-2 of %lld x %lld tokens, %lld channels, %lld symbols",
        info.name, (double)info.memory_bytes / 1073741824.0, opt.reps, (long long)gpt.batch,
        (long long)gpt.sequence, (long long)gpt.channels, (long long)gpt.vocab);
    const int failed =
        run_operations(device, cpu) + run_products(device, cpu) + run_attention(device, cpu);
    if (!bench.json)
        printf("\n%d results, %d wrong, %d missing\n", bench.results, bench.wrong, failed);
    return failed || bench.wrong;
}

int main(int argc, char **argv)
{
    const dtrain_device_ops *ops;
    dtrain_device_desc desc, cpu_desc;
    dtrain_device *device = NULL, *cpu = NULL;
    memset(&desc, 0, sizeof desc);
    memset(&cpu_desc, 0, sizeof cpu_desc);
#ifdef DTRAIN_USE_CUDA
    opt.device = "cuda";
#endif
    if (is_quick(argc, argv)) opt.reps = 2;
    bench_start("bench_kernels", "time, bandwidth or rate, and correctness of a device's kernels",
                flag_table, sizeof flag_table / sizeof *flag_table, argc, argv);
    if (resolve(&ops, &desc)) return 2;
    desc.thread_count = cpu_desc.thread_count = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    int failed = dtrain_device_create(ops, &desc, &device) != DTRAIN_OK ||
                 dtrain_device_create(NULL, &cpu_desc, &cpu) != DTRAIN_OK;
    if (failed) fprintf(stderr, "bench_kernels: %s\n", dtrain_last_error());
    else failed = run_all(device, cpu);
    dtrain_device_destroy(device);
    dtrain_device_destroy(cpu);
    return failed;
}
