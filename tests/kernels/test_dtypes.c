/* test_dtypes.c: every kernel of the CPU device, for every type of activations and with every option of
 * its arguments, beside the loops of naive_device.h. What the optimizers, clipping and sparse gradients
 * promise is tested here as well. */
#include "device/cpu/cpu_internal.h"
#include "dtrain.h"
#include "test.h"
#include "naive_device.h"
#include "packed_attention.h"

static dtrain_device *cpu, *naive;
static const dtrain_dtype types[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
enum { TYPES = 3 };

static void open_devices(void)
{
    dtrain_device_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.thread_count = 1; /* tests are forked: threads made here would not be there */
    CHECK(dtrain_device_create(NULL, &desc, &cpu) == DTRAIN_OK);
    CHECK(dtrain_device_create(naive_device_ops(), NULL, &naive) == DTRAIN_OK);
    if (!cpu || !naive) exit(1);
}

/* The same values twice: one set for each device. */
typedef struct pair {
    void *of[2];
    int64_t count;
    dtrain_dtype dtype;
} pair;

static pair pairs[16];
static int pair_count;
static uint64_t pair_stream;

static pair *noise(int64_t count, dtrain_dtype dtype, double scale)
{
    pair *p = &pairs[pair_count++];
    p->count = count;
    p->dtype = dtype;
    pair_stream++;
    for (int side = 0; side < 2; side++) {
        p->of[side] = malloc((size_t)count * 4 + 4);
        for (int64_t i = 0; i < count; i++)
            naive_put(p->of[side], dtype, i,
                      scale * (double)dtrain_random_normal(3, pair_stream, (uint64_t)i));
    }
    return p;
}

static void release(void)
{
    while (pair_count > 0) {
        pair_count--;
        free(pairs[pair_count].of[0]);
        free(pairs[pair_count].of[1]);
    }
}

/* Both devices have left the same, up to one rounding to the type and `tolerance` before it. */
static void same(const pair *p, double tolerance, const char *what)
{
    const double step = p->dtype == DTRAIN_DTYPE_BF16  ? 1.0 / 128
                        : p->dtype == DTRAIN_DTYPE_F16 ? 1.0 / 1024
                                                       : 0;
    for (int64_t i = 0; i < p->count; i++) {
        const double got = naive_get(p->of[0], p->dtype, i),
                     want = naive_get(p->of[1], p->dtype, i);
        if (fabs(got - want) <= (step + tolerance) * fabs(want) + tolerance) continue;
        CHECK_MSG(0, "%s (%s): [%lld] is %.9g, expected %.9g", what, dtrain_dtype_name(p->dtype),
                  (long long)i, got, want);
        return;
    }
    CHECK(1);
}

static float *f32(const pair *p, int side) { return p ? (float *)p->of[side] : NULL; }
static void *any(const pair *p, int side) { return p ? p->of[side] : NULL; }

/* Runs one operation on both devices; `side` says whose memory its arguments name. */
#define ON_BOTH(op, args, ...)                                                \
    for (int side = 0; side < 2; side++) {                                    \
        dtrain_device *device = side ? naive : cpu;                           \
        dtrain_##op##_args args = __VA_ARGS__;                                \
        CHECK_MSG(device->ops->op(device, &args) == DTRAIN_OK, "%s: %s", #op, \
                  dtrain_last_error());                                       \
    }

/* Every flag and pair of types, for operands (m,k) and (k,n). */
static void gemm_on_both(int64_t m, int64_t n, int64_t k, int a_type, int c_type, uint32_t flags,
                         int options)
{
    const bool backward = flags & DTRAIN_GEMM_ACT_BACKWARD, add = options & 1;
    const uint32_t activation = (uint32_t)(options + c_type) % 4;
    const int64_t lda = flags & DTRAIN_GEMM_TRANS_A ? m : k;
    const int64_t ldb = flags & DTRAIN_GEMM_TRANS_B ? k : n;
    const bool of_c = flags & DTRAIN_GEMM_BIAS_GRAD_C;
    /* the sums of a C in half precision are those of its rounded elements */
    const double loose = !of_c || c_type < 1                  ? 1e-4
                         : types[c_type] == DTRAIN_DTYPE_BF16 ? 0.15
                                                              : 2e-2;
    pair *a = noise(m * k, types[a_type], 1), *b = noise(k * n, types[a_type], 1);
    pair *c = noise(m * n, types[c_type], 1), *bias = noise(n, DTRAIN_DTYPE_F32, 1);
    pair *aux = noise(m * n, types[c_type], 1);
    pair *sums = options & 2 ? noise(of_c ? n : m, DTRAIN_DTYPE_F32, 1) : NULL;
    ON_BOTH(gemm, args,
            {flags,
             activation,
             m,
             n,
             k,
             0.5f,
             add ? 0.25f : 0.0f,
             any(a, side),
             any(b, side),
             any(c, side),
             lda,
             ldb,
             n,
             types[a_type],
             types[a_type],
             types[c_type],
             backward ? NULL : f32(bias, side),
             any(aux, side),
             f32(sums, side),
             add})
    same(c, 2e-5, "gemm c");
    same(aux, 2e-5, "gemm aux");
    if (sums) same(sums, loose, "gemm bias gradient");
    release();
}

static void test_gemm(void)
{
    for (int c_type = 0; c_type < TYPES; c_type++)
        for (int a_type = 0; a_type < TYPES; a_type++)
            for (uint32_t flags = 0; flags < 16; flags++)
                for (int options = 0; options < 4; options++)
                    gemm_on_both(19, 37, 23, a_type, c_type, flags, options);
}

/* What the tape asks for, in tiles that are whole, cut off, and more than one. */
static void test_gemm_pairs(void)
{
    static const int64_t sizes[][3] = {{1, 1, 1},    {32, 32, 32}, {33, 31, 65}, {12, 64, 2},
                                       {65, 40, 97}, {40, 70, 33}, {16, 8, 801}};
    for (int s = 0; s < (int)(sizeof sizes / sizeof *sizes); s++)
        for (int c_type = 0; c_type < TYPES; c_type++)
            for (uint32_t flags = 0; flags < 16; flags++)
                gemm_on_both(sizes[s][0], sizes[s][1], sizes[s][2], 1, c_type, flags,
                             (s + c_type) % 4);
}

/* Ranks that are threads: each has a device, and tiles belong to the thread that works. */
enum { RANKS = 3, SIDE = 70 };

typedef struct rank_work {
    uint16_t a[SIDE * SIDE], b[SIDE * SIDE];
    float c[SIDE * SIDE];
    int wrong;
} rank_work;

static void *rank_multiply(void *argument)
{
    rank_work *x = (rank_work *)argument;
    dtrain_device_desc desc;
    dtrain_device *device;
    float before[SIDE * SIDE];
    memset(&desc, 0, sizeof desc);
    desc.thread_count = 2;
    desc.oversubscribed = true;
    x->wrong = dtrain_device_create(NULL, &desc, &device) != DTRAIN_OK;
    for (int round = 0; round < 50 && !x->wrong; round++) {
        dtrain_gemm_args args;
        memset(&args, 0, sizeof args);
        args.m = args.n = args.k = args.lda = args.ldb = args.ldc = SIDE;
        args.alpha = 1;
        args.a = x->a;
        args.b = x->b;
        args.c = x->c;
        args.a_dtype = args.b_dtype = DTRAIN_DTYPE_BF16;
        args.c_dtype = DTRAIN_DTYPE_F32;
        x->wrong += device->ops->gemm(device, &args) != DTRAIN_OK;
        x->wrong += round > 0 && memcmp(before, x->c, sizeof before) != 0;
        memcpy(before, x->c, sizeof before);
    }
    dtrain_device_destroy(device);
    return NULL;
}

static void test_gemm_in_threads(void)
{
    static rank_work work[RANKS];
    pthread_t threads[RANKS];
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < SIDE * SIDE; i++) {
            work[r].a[i] =
                dtrain_half_from_f32(DTRAIN_DTYPE_BF16, (float)(i % 13 - 6) * (float)(r + 1));
            work[r].b[i] =
                dtrain_half_from_f32(DTRAIN_DTYPE_BF16, i % (SIDE + 1) == 0 ? 2.0f : 0.0f);
        }
    for (int r = 0; r < RANKS; r++)
        CHECK(pthread_create(&threads[r], NULL, rank_multiply, &work[r]) == 0);
    for (int r = 0; r < RANKS; r++) {
        int64_t wrong = 0;
        CHECK(pthread_join(threads[r], NULL) == 0);
        for (int i = 0; i < SIDE * SIDE; i++)
            wrong += work[r].c[i] != 2 * dtrain_half_to_f32(DTRAIN_DTYPE_BF16, work[r].a[i]);
        CHECK_MSG(work[r].wrong == 0 && wrong == 0, "rank %d: %d failures, %lld elements wrong", r,
                  work[r].wrong, (long long)wrong);
    }
}

static void test_gemm_arguments(void)
{
    float x[64] = {0};
    dtrain_gemm_args args = {DTRAIN_GEMM_ACT_BACKWARD,
                             DTRAIN_ACTIVATION_GELU,
                             2,
                             2,
                             2,
                             1,
                             0,
                             x,
                             x,
                             x,
                             2,
                             2,
                             2,
                             DTRAIN_DTYPE_F32,
                             DTRAIN_DTYPE_F32,
                             DTRAIN_DTYPE_F32,
                             NULL,
                             NULL,
                             NULL,
                             false};
    CHECK(cpu->ops->gemm(cpu, &args) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "aux") != NULL);
    args.aux = x;
    args.ldc = 3;
    CHECK(cpu->ops->gemm(cpu, &args) == DTRAIN_ERROR_ARGUMENT);
    args.flags = DTRAIN_GEMM_TRANS_A;
    args.bias_grad = x;
    args.lda = 5;
    CHECK(cpu->ops->gemm(cpu, &args) == DTRAIN_ERROR_ARGUMENT);
}

static void test_activation_backward(void)
{
    enum { ROWS = 21, N = 35 };
    for (int t = 0; t < TYPES; t++)
        for (uint32_t activation = 0; activation < 4; activation++)
            for (int options = 0; options < 8; options++) {
                pair *x = noise(ROWS * N, types[t], 1), *d_out = noise(ROWS * N, types[t], 1);
                pair *d_in = options & 1 ? d_out : noise(ROWS * N, types[t], 1);
                pair *bias = options & 2 ? noise(N, DTRAIN_DTYPE_F32, 1) : NULL;
                ON_BOTH(activation_backward, args,
                        {activation, (options & 4) != 0, ROWS, N, any(x, side), any(d_out, side),
                         any(d_in, side), f32(bias, side), types[t]})
                same(d_in, 1e-5, "activation backward");
                if (bias) same(bias, 1e-4, "bias gradient");
                release();
            }
}

static void test_layernorm(void)
{
    enum { ROWS = 40, N = 33 };
    for (int xt = 0; xt < TYPES; xt++)
        for (int yt = 0; yt < TYPES; yt++)
            for (int options = 0; options < 16; options++) {
                const bool fused = options & 1, add = options & 2, add_params = options & 4;
                const bool centred = !(options & 8);
                const double loose = types[xt] == DTRAIN_DTYPE_BF16  ? 3e-2
                                     : types[xt] == DTRAIN_DTYPE_F16 ? 4e-3
                                                                     : 2e-5;
                pair *x = noise(ROWS * N, types[xt], 2), *y = noise(ROWS * N, types[yt], 1);
                pair *weight = noise(N, DTRAIN_DTYPE_F32, 1),
                     *bias = add ? noise(N, DTRAIN_DTYPE_F32, 1) : NULL;
                pair *mean = centred ? noise(ROWS, DTRAIN_DTYPE_F32, 1) : NULL,
                     *rstd = noise(ROWS, DTRAIN_DTYPE_F32, 1);
                pair *residual = fused ? noise(ROWS * N, types[yt], 1) : NULL;
                pair *sum = fused ? noise(ROWS * N, types[xt], 1) : NULL;
                ON_BOTH(layernorm, args,
                        {.rows = ROWS,
                         .n = N,
                         .epsilon = 1e-5f,
                         .x = any(x, side),
                         .weight = f32(weight, side),
                         .bias = f32(bias, side),
                         .y = any(y, side),
                         .mean = f32(mean, side),
                         .rstd = f32(rstd, side),
                         .residual = any(residual, side),
                         .sum = any(sum, side),
                         .x_dtype = types[xt],
                         .y_dtype = types[yt]})
                same(y, 2e-5, "layernorm"); /* of the sum before it is rounded */
                if (mean) same(mean, 2e-5, "mean");
                same(rstd, 2e-5, "rstd");
                if (fused) same(sum, 0, "sum");
                pair *d_y = noise(ROWS * N, types[yt], 1), *d_x = noise(ROWS * N, types[xt], 1);
                pair *d_weight = noise(N, DTRAIN_DTYPE_F32, 1),
                     *d_bias = noise(N, DTRAIN_DTYPE_F32, 1);
                pair *copy = fused ? noise(ROWS * N, types[yt], 1) : NULL;
                if (mean) memcpy(f32(mean, 0), f32(mean, 1), ROWS * 4); /* the same statistics */
                memcpy(f32(rstd, 0), f32(rstd, 1), ROWS * 4);
                ON_BOTH(layernorm_backward, args,
                        {.rows = ROWS,
                         .n = N,
                         .accumulate_params = add_params,
                         .accumulate_x = add,
                         .x = any(x, side),
                         .weight = f32(weight, side),
                         .mean = f32(mean, side),
                         .rstd = f32(rstd, side),
                         .d_y = any(d_y, side),
                         .d_x = any(d_x, side),
                         .d_weight = f32(d_weight, side),
                         .d_bias = f32(d_bias, side),
                         .d_residual = any(copy, side),
                         .x_dtype = types[xt],
                         .y_dtype = types[yt]})
                same(d_x, 1e-4, "d_x");
                same(d_weight, 2e-4, "d_weight");
                same(d_bias, 1e-4, "d_bias");
                if (fused) same(copy, loose, "d_residual");
                release();
            }
    dtrain_layernorm_args half = {.rows = 1,
                                  .n = 1,
                                  .x = &half,
                                  .residual = &half,
                                  .x_dtype = DTRAIN_DTYPE_F32,
                                  .y_dtype = DTRAIN_DTYPE_F32};
    CHECK(cpu->ops->layernorm(cpu, &half) == DTRAIN_ERROR_ARGUMENT);
}

/* Every function with every combination of types, gradients overwritten and added to. */
static void test_pointwise(void)
{
    enum { N = 77 };
    for (uint32_t kind = DTRAIN_POINTWISE_RELU; kind <= DTRAIN_POINTWISE_LOGISTIC_LOSS; kind++)
        for (int combination = 0; combination < 27; combination++)
            for (int options = 0; options < 8; options++) {
                const dtrain_dtype xt = types[combination % 3], yt = types[combination / 9];
                const dtrain_dtype ot = types[combination / 3 % 3];
                const bool two = kind >= DTRAIN_POINTWISE_MULTIPLY, add = options & 1;
                pair *x = noise(N, xt, 3), *other = two ? noise(N, ot, 1) : NULL;
                pair *y = noise(N, yt, 1), *d_y = noise(N, yt, 1);
                pair *d_x = options & 2 ? noise(N, xt, 1) : NULL;
                pair *d_other = two && options & 4 ? noise(N, ot, 1) : NULL;
                ON_BOTH(pointwise, args,
                        {.kind = kind,
                         .count = N,
                         .x = any(x, side),
                         .other = any(other, side),
                         .y = any(y, side),
                         .x_dtype = xt,
                         .other_dtype = ot,
                         .y_dtype = yt})
                same(y, 1e-5, "pointwise");
                ON_BOTH(pointwise_backward, args,
                        {.kind = kind,
                         .accumulate_x = add,
                         .accumulate_other = add,
                         .count = N,
                         .x = any(x, side),
                         .other = any(other, side),
                         .d_y = any(d_y, side),
                         .d_x = any(d_x, side),
                         .d_other = any(d_other, side),
                         .x_dtype = xt,
                         .other_dtype = ot,
                         .y_dtype = yt})
                if (d_x) same(d_x, 1e-5, "d_x");
                if (d_other) same(d_other, 1e-5, "d_other");
                release();
            }
    float x[4] = {0};
    dtrain_pointwise_args bad = {.count = 4,
                                 .x = x,
                                 .y = x,
                                 .x_dtype = (dtrain_dtype)0,
                                 .other_dtype = (dtrain_dtype)0,
                                 .y_dtype = (dtrain_dtype)0};
    for (bad.kind = 0; bad.kind < 9; bad.kind++) {
        bad.other = bad.kind < 4 ? x : NULL;
        CHECK(cpu->ops->pointwise(cpu, &bad) == DTRAIN_ERROR_ARGUMENT);
        CHECK(strstr(dtrain_last_error(), "pointwise: kind") != NULL);
    }
}

static void test_embedding(void)
{
    enum { ROWS = 30, SEQUENCE = 10, N = 21, VOCAB = 8 };
    int32_t tokens[ROWS];
    for (int i = 0; i < ROWS; i++) tokens[i] = i * 5 % VOCAB;
    for (int t = 0; t < TYPES; t++)
        for (int options = 0; options < 2; options++) {
            pair *wte = noise(VOCAB * N, DTRAIN_DTYPE_F32, 1), *y = noise(ROWS * N, types[t], 1);
            pair *wpe = options ? noise(SEQUENCE * N, DTRAIN_DTYPE_F32, 1) : NULL;
            ON_BOTH(embedding, args,
                    {.rows = ROWS,
                     .sequence = SEQUENCE,
                     .n = N,
                     .vocab = VOCAB,
                     .tokens = tokens,
                     .wte = f32(wte, side),
                     .wpe = f32(wpe, side),
                     .y = any(y, side),
                     .dtype = types[t]})
            same(y, 1e-6, "embedding");
            ON_BOTH(embedding_backward, back,
                    {.rows = ROWS,
                     .sequence = SEQUENCE,
                     .n = N,
                     .vocab = VOCAB,
                     .tokens = tokens,
                     .d_y = any(y, side),
                     .d_wte = f32(wte, side),
                     .d_wpe = f32(wpe, side),
                     .dtype = types[t]})
            same(wte, types[t] > DTRAIN_DTYPE_F32 ? 2e-2 : 1e-5, "d_wte");
            if (wpe) same(wpe, types[t] > DTRAIN_DTYPE_F32 ? 2e-2 : 1e-5, "d_wpe");
            release();
        }
}

/* As many heads of keys as of queries, half as many, one. */
static void test_attention(void)
{
    enum { BATCH = 2, T = 13, HEADS = 4, SIZE = 6, N = HEADS * SIZE };
    for (int t = 0; t < TYPES; t++)
        for (int options = 0; options < 6; options++) {
            const bool causal = options & 1;
            const int64_t kv_heads = options / 2 ? options / 2 : HEADS;
            const int64_t width = N + 2 * kv_heads * SIZE;
            const packed_shape shape = {BATCH, T, HEADS, kv_heads, SIZE, causal, types[t]};
            pair *qkv = noise(BATCH * T * width, types[t], 1),
                 *y = noise(BATCH * T * N, types[t], 1);
            pair *lse = noise(BATCH * HEADS * T, DTRAIN_DTYPE_F32, 1),
                 *d_y = noise(BATCH * T * N, types[t], 1);
            pair *d_qkv = noise(BATCH * T * width, types[t], 1);
            ON_BOTH(attention, args,
                    packed_attention(shape, any(qkv, side), any(y, side), f32(lse, side)))
            same(y, 2e-5, "attention");
            same(lse, 2e-5, "log-sum-exp");
            memcpy(any(y, 0), any(y, 1),
                   (size_t)(y->count * (types[t] > DTRAIN_DTYPE_F32 ? 2 : 4)));
            ON_BOTH(attention_backward, back,
                    packed_attention_backward(shape, any(qkv, side), any(y, side), f32(lse, side),
                                              any(d_y, side), any(d_qkv, side)))
            same(d_qkv, 1e-4, "d_qkv");
            release();
        }
}

/* Softmax, rotary embedding, permuted axes: every type, gradients overwritten and added to. */
static void test_rows(void)
{
    enum { ROWS = 12, HEADS = 5, SIZE = 22, N = HEADS * SIZE };
    for (int t = 0; t < TYPES; t++)
        for (int options = 0; options < 8; options++) {
            const bool add = options & 1, inverse = options & 2;
            pair *x = noise(ROWS * N, types[t], 2), *y = noise(ROWS * N, types[t], 1);
            pair *d = noise(ROWS * N, types[t], 1);
            ON_BOTH(softmax, args,
                    {.rows = ROWS, .n = N, .x = any(x, side), .y = any(y, side), .dtype = types[t]})
            same(y, 1e-6, "softmax");
            memcpy(any(y, 0), any(y, 1),
                   (size_t)(ROWS * N * (types[t] > DTRAIN_DTYPE_F32 ? 2 : 4)));
            ON_BOTH(softmax_backward, back,
                    {.rows = ROWS,
                     .n = N,
                     .accumulate = add,
                     .y = any(y, side),
                     .d_y = any(x, side),
                     .d_x = any(d, side),
                     .dtype = types[t]})
            same(d, 2e-6, "softmax backward");
            ON_BOTH(rotary, turn,
                    {ROWS, options & 4 ? 3 : 30, HEADS, options & 4 ? 4 : HEADS, SIZE, 500, inverse,
                     add, any(x, side), any(y, side), types[t]})
            same(y, 2e-6, "rotary");
            ON_BOTH(permute, order,
                    {{HEADS, 3, 4, SIZE},
                     {SIZE, 4 * N, N, 1},
                     add,
                     any(x, side),
                     any(d, side),
                     types[t]})
            same(d, 1e-6, "rows permuted");
            ON_BOTH(permute, odd,
                    {{1, N, 3, 4}, {0, 1, N, 3 * N}, add, any(x, side), any(y, side), types[t]})
            same(y, 1e-6, "columns permuted");
            release();
        }
    float x[8] = {0}, y[8];
    dtrain_rotary_args bad = {1, 1, 2, 3, 4, 100, false, false, x, y, DTRAIN_DTYPE_F32};
    CHECK(cpu->ops->rotary(cpu, &bad) == DTRAIN_ERROR_ARGUMENT);
    bad.rotated = 2, bad.d = 3;
    CHECK(cpu->ops->rotary(cpu, &bad) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "rotary: heads of 3 elements") != NULL);
}

static void test_cross_entropy(void)
{
    enum { ROWS = 9, N = 41, CLASSES = 30 };
    int32_t targets[ROWS];
    for (int i = 0; i < ROWS; i++) targets[i] = i == 4 ? -1 : i * 11 % CLASSES;
    for (int t = 0; t < TYPES; t++)
        for (int options = 0; options < 16; options++) {
            const float smoothing = options & 8 ? 0.1f : 0;
            const int64_t classes = options & 4 ? CLASSES : 0; /* the rest is NaN then */
            pair *logits = noise(ROWS * N, types[t], 3), *loss = noise(ROWS, DTRAIN_DTYPE_F32, 1);
            pair *lse = noise(ROWS, DTRAIN_DTYPE_F32, 1), *upstream = noise(1, DTRAIN_DTYPE_F32, 1);
            pair *d = options & 1 ? logits : noise(ROWS * N, types[t], 1);
            const bool fused = options & 2;
            for (int i = 0; i < 2 * ROWS * N; i++)
                if (classes && i / 2 % N >= classes)
                    naive_put(any(logits, i % 2), types[t], i / 2, NAN);
            ON_BOTH(cross_entropy, args,
                    {.rows = ROWS,
                     .n = N,
                     .logits = any(logits, side),
                     .targets = targets,
                     .loss = f32(loss, side),
                     .lse = f32(lse, side),
                     .d_logits = fused ? any(d, side) : NULL,
                     .scale = 0.7f,
                     .dtype = types[t],
                     .classes = classes,
                     .smoothing = smoothing})
            same(loss, 2e-5, "loss");
            same(lse, 2e-5, "log-sum-exp");
            if (!fused)
                ON_BOTH(cross_entropy_backward, back,
                        {.rows = ROWS,
                         .n = N,
                         .scale = 0.7f,
                         .logits = any(logits, side),
                         .targets = targets,
                         .lse = f32(lse, side),
                         .d_logits = any(d, side),
                         .upstream = f32(upstream, side),
                         .dtype = types[t],
                         .classes = classes,
                         .smoothing = smoothing})
            same(d, 2e-5, "d_logits");
            for (int64_t i = 0; i < ROWS * N && classes; i++)
                CHECK(i % N < classes || naive_get(any(d, 0), types[t], i) == 0);
            release();
        }
}

static void test_elementwise(void)
{
    enum { N = 1003 };
    for (int t = 0; t < TYPES; t++)
        for (int options = 0; options < 8; options++) {
            const bool add = options & 1, broadcast = options & 2, constant = options & 4;
            pair *x = noise(N, types[t], 1), *y = noise(N, types[t], 1),
                 *z = noise(N, types[options % TYPES], 1);
            ON_BOTH(axpby, args,
                    {N, add, 1.5f, 0.5f, constant ? NULL : any(x, side), any(y, side), broadcast,
                     types[t], NULL})
            same(y, 1e-6, "axpby");
            for (int i = 0; i < 3 && types[t] == DTRAIN_DTYPE_F32; i++) { /* by 1, nothing, 1.5 */
                static const float divisors[] = {3, 0, 2};
                ON_BOTH(axpby, divided,
                        {N, false, 3, 0, NULL, any(y, side), false, types[t], &divisors[i]})
                same(y, 1e-6, "axpby of a quotient");
            }
            ON_BOTH(add, sum,
                    {N, any(x, side), any(z, side), any(x, side), types[t], types[options % TYPES]})
            same(x, 1e-6, "add in place");
            dtrain_step_scalars now;
            memset(&now, 0, sizeof now);
            now.seed = 5;
            ON_BOTH(dropout, drop,
                    {N,
                     0.3f,
                     add,
                     11,
                     2,
                     any(x, side),
                     any(y, side),
                     broadcast ? &now : NULL,
                     types[t],
                     {0}})
            same(y, 1e-6, "dropout");
            release();
        }
}

static void test_sums(void)
{
    enum { N = 9001 };
    for (int t = 0; t < TYPES; t++)
        for (int options = 0; options < 4; options++) {
            double total[2] = {3, 3};
            float out[2] = {0, 0}, half = 0.5f;
            pair *x = noise(N, types[t], 1);
            ON_BOTH(sum, args,
                    {N, (options & 1) != 0, (options & 2) != 0, 0.5, any(x, side), &total[side],
                     &out[side], types[t], options & 1 ? &half : NULL})
            CHECK_CLOSE(total[0], total[1], 1e-9);
            CHECK((double)out[0] == (double)(float)total[0]);
            release();
        }
}

static void test_clip(void)
{
    static const double squares[][2] = {{0, 0}, {1, 3}, {1e6, 1}, {0, 1e80}, {4, HUGE_VAL}};
    for (int i = 0; i < 5; i++)
        for (int max_norm = 0; max_norm < 3; max_norm++) {
            dtrain_step_scalars now[2];
            float norm[2];
            memset(now, 0, sizeof now);
            now[0].grad_scale = now[1].grad_scale = 0.5f;
            ON_BOTH(clip, args, {squares[i], (float)max_norm, &now[side], &norm[side], NULL, 2})
            CHECK((isinf(norm[0]) && isinf(norm[1])) ||
                  test_close((double)norm[0], (double)norm[1], 1e-6));
            CHECK_CLOSE(now[0].grad_scale, now[1].grad_scale, 1e-6);
            CHECK(now[0].skip == now[1].skip &&
                  now[0].skip == (squares[i][0] + squares[i][1] > 1e79));
        }
}

/* Two tensors with and without decay; scalars in device memory win over those of the call. */
static void test_optimizers(void)
{
    enum { N = 517, SMALL = 3 };
    for (int kind = 0; kind < 4; kind++) /* SGD, with Nesterov, AdamW, Lion */
        for (int options = 0; options < 4; options++) {
            pair *value = noise(N, DTRAIN_DTYPE_F32, 1), *grad = noise(N, DTRAIN_DTYPE_F32, 1);
            pair *m = noise(N, DTRAIN_DTYPE_F32, 0.1), *v = noise(N, DTRAIN_DTYPE_F32, 0);
            pair *one = noise(SMALL, DTRAIN_DTYPE_F32, 1),
                 *one_grad = noise(SMALL, DTRAIN_DTYPE_F32, 1);
            pair *one_m = noise(SMALL, DTRAIN_DTYPE_F32, 0),
                 *one_v = noise(SMALL, DTRAIN_DTYPE_F32, 0);
            dtrain_step_scalars now = {0, 0.02f, 0.3f, 0.2f, 2, options & 2 ? 1u : 0, 0};
            const dtrain_step_scalars *scalars = options & 1 ? &now : NULL;
            for (int side = 0; side < 2; side++) {
                dtrain_device *device = side ? naive : cpu;
                const dtrain_optimizer_tensor tensors[2] = {
                    {N, 0.1f, f32(value, side), f32(grad, side), f32(m, side), f32(v, side)},
                    {SMALL, 0, f32(one, side), f32(one_grad, side), f32(one_m, side),
                     f32(one_v, side)}};
                const dtrain_optimizer_args args = {.tensor_count = 2,
                                                    .tensors = tensors,
                                                    .lr = 0.01f,
                                                    .beta1 = 0.9f,
                                                    .beta2 = 0.99f,
                                                    .epsilon = 1e-8f,
                                                    .correction1 = 0.1f,
                                                    .correction2 = 0.01f,
                                                    .momentum = 0.9f,
                                                    .grad_scale = 0.5f,
                                                    .nesterov = kind == 1,
                                                    .scalars = scalars,
                                                    .lr_scale = 0.5f};
                CHECK((kind == 3   ? device->ops->lion(device, &args)
                       : kind == 2 ? device->ops->adamw(device, &args)
                                   : device->ops->sgd(device, &args)) == DTRAIN_OK);
            }
            same(value, 2e-6, "value");
            same(m, 2e-6, "m");
            same(v, 2e-6, "v");
            same(one, 2e-6, "second value");
            release();
        }
}

/* Each stage of Muon from noise, so that one does not hide another. A skipped momentum leaves x. */
static void test_muon(void)
{
    enum { N = 517 };
    const double squares = 7.5;
    for (uint32_t stage = DTRAIN_MUON_MOMENTUM; stage <= DTRAIN_MUON_STEP; stage++)
        for (int options = 0; options < 8; options++) {
            pair *value = noise(N, DTRAIN_DTYPE_F32, 1), *grad = noise(N, DTRAIN_DTYPE_F32, 1);
            pair *m = noise(N, DTRAIN_DTYPE_F32, 1), *x = noise(N, DTRAIN_DTYPE_F32, 1);
            dtrain_step_scalars now = {0, 0.02f, 1, 1, 2, options & 2 ? 1u : 0, 0};
            if (stage == DTRAIN_MUON_NORMALIZE && options & 2) now.skip = 0;
            for (int side = 0; side < 2; side++) {
                dtrain_device *device = side ? naive : cpu;
                const dtrain_optimizer_tensor tensor = {
                    N, 0.1f, f32(value, side), f32(grad, side), f32(m, side), NULL};
                dtrain_muon_args args;
                memset(&args, 0, sizeof args);
                args.stage = stage;
                args.tensors = &tensor;
                args.x = f32(x, side);
                args.lr = 0.01f, args.momentum = 0.9f, args.grad_scale = 0.5f;
                args.scale = 1.5f, args.epsilon = 0.25f, args.lr_scale = 0.5f;
                args.nesterov = (options & 4) != 0;
                args.sum_squares = &squares;
                args.scalars = options & 1 ? &now : NULL;
                CHECK(device->ops->muon(device, &args) == DTRAIN_OK);
            }
            same(value, 2e-6, "value");
            same(m, 2e-6, "m");
            same(x, 2e-6, "x");
            release();
        }
}

static void test_sparse(void)
{
    static const int64_t counts[] = {1, 2, 63, 1000, 4099};
    for (int c = 0; c < 5; c++)
        for (int variant = 0; variant < 6; variant++) {
            const int64_t n = counts[c], k = variant % 3 == 0   ? 1
                                             : variant % 3 == 1 ? n
                                                                : (n + 9) / 10;
            pair *x = noise(n, DTRAIN_DTYPE_F32, 1),
                 *residual = variant < 3 ? noise(n, DTRAIN_DTYPE_F32, 1) : NULL;
            pair *values = noise(k, DTRAIN_DTYPE_F32, 1), *out = noise(n, DTRAIN_DTYPE_F32, 1);
            int32_t *indices[2] = {(int32_t *)calloc((size_t)k, 4),
                                   (int32_t *)calloc((size_t)k, 4)};
            for (int side = 0; side < 2 && variant == 5; side++)
                for (int64_t i = 0; i < n; i++)
                    f32(x, side)[i] = i % 7 == 3 ? NAN : i % 2 ? 1.0f : -1.0f;
            ON_BOTH(topk, args,
                    {n, k, f32(x, side), f32(residual, side), f32(values, side), indices[side],
                     NULL, 0})
            CHECK(memcmp(indices[0], indices[1], (size_t)k * 4) == 0);
            CHECK(memcmp(f32(values, 0), f32(values, 1), (size_t)k * 4) == 0);
            if (residual) CHECK(memcmp(f32(residual, 0), f32(residual, 1), (size_t)n * 4) == 0);
            ON_BOTH(scatter_add, add,
                    {n, k, 0.5f, f32(values, side), indices[side], f32(out, side)})
            CHECK(memcmp(f32(out, 0), f32(out, 1), (size_t)n * 4) == 0);
            free(indices[0]), free(indices[1]);
            release();
        }
    float x[4] = {1, 2, 3, 4};
    int32_t at[4] = {0, 4, 1, -1};
    dtrain_topk_args none = {4, 0, x, NULL, x, at, NULL, 0}, more = {4, 5, x, NULL, x, at, NULL, 0};
    dtrain_scatter_add_args outside = {4, 4, 1, x, at, x};
    CHECK(cpu->ops->topk(cpu, &none) == DTRAIN_ERROR_ARGUMENT &&
          cpu->ops->topk(cpu, &more) == DTRAIN_ERROR_ARGUMENT);
    CHECK(cpu->ops->scatter_add(cpu, &outside) == DTRAIN_ERROR_DATA);
    CHECK(strstr(dtrain_last_error(), "index 4 at place 1") != NULL && x[0] == 1);
}

/* The five steps of batch normalisation, each from what the same device has left before. */
static void batchnorm_case(int64_t rows, int64_t n, dtrain_dtype type, bool relu, bool residual,
                           bool accumulate)
{
    const dtrain_dtype wide = DTRAIN_DTYPE_F32;
    const uint32_t activation = relu ? DTRAIN_ACTIVATION_RELU : DTRAIN_ACTIVATION_NONE;
    pair *x = noise(rows * n, type, 2), *r = residual ? noise(rows * n, type, 1) : NULL;
    pair *y = noise(rows * n, type, 1), *d_y = noise(rows * n, type, 1);
    pair *d_x = noise(rows * n, type, 1), *d_r = residual ? noise(rows * n, type, 1) : NULL;
    pair *all = noise(2 * (1 + 2 * n), wide, 1), *mean = noise(n, wide, 1);
    pair *rstd = noise(n, wide, 1), *share = noise(1, wide, 1), *running = noise(2 * n, wide, 1);
    pair *weight = noise(n, wide, 1), *bias = noise(n, wide, 1), *sums = noise(2 * n, wide, 1);
    for (int side = 0; side < 2; side++) { /* another rank's part, and a mean far from 0 */
        float *part = f32(all, side) + 1 + 2 * n;
        part[0] = 5;
        for (int64_t c = 0; c < n; c++) part[1 + n + c] = fabsf(part[1 + n + c]);
        for (int64_t i = 0; i < rows * n; i++)
            naive_put(x->of[side], type, i,
                      naive_get(x->of[side], type, i) + (double)(i % n % 3) * 8);
    }
    ON_BOTH(batchnorm_moments, moments,
            {.rows = rows, .n = n, .x = any(x, side), .sums = f32(all, side), .dtype = type})
    same(all, 2e-5 * (double)rows, "moments");
    ON_BOTH(batchnorm_statistics, statistics,
            {2, n, 1e-5f, 0.3f, f32(all, side), f32(mean, side), f32(rstd, side), f32(share, side),
             f32(running, side), f32(running, side) + n})
    same(mean, 1e-5, "mean"), same(rstd, 1e-5, "rstd"), same(share, 1e-6, "1 / rows");
    same(running, 1e-5, "running averages");
    ON_BOTH(batchnorm, forward,
            {.rows = rows,
             .n = n,
             .activation = activation,
             .x = any(x, side),
             .residual = any(r, side),
             .mean = f32(mean, side),
             .rstd = f32(rstd, side),
             .weight = f32(weight, side),
             .bias = f32(bias, side),
             .y = any(y, side),
             .dtype = type})
    same(y, 2e-4, "batch normalisation");
    memcpy(y->of[1], y->of[0], (size_t)(rows * n) * dtrain_dtype_bytes(type)); /* which are 0 */
    ON_BOTH(batchnorm_sums, add,
            {.rows = rows,
             .n = n,
             .activation = activation,
             .x = any(x, side),
             .y = any(y, side),
             .d_y = any(d_y, side),
             .mean = f32(mean, side),
             .rstd = f32(rstd, side),
             .sums = f32(sums, side),
             .d_residual = any(d_r, side),
             .accumulate = accumulate,
             .dtype = type})
    same(sums, 1e-4 * sqrt((double)rows) + 1e-4, "sums");
    if (d_r) same(d_r, 1e-5, "gradient of the residual");
    ON_BOTH(batchnorm_backward, backward,
            {.rows = rows,
             .n = n,
             .activation = activation,
             .x = any(x, side),
             .y = any(y, side),
             .d_y = any(d_y, side),
             .mean = f32(mean, side),
             .rstd = f32(rstd, side),
             .weight = f32(weight, side),
             .sums = f32(sums, side),
             .inverse_count = f32(share, side),
             .d_x = any(d_x, side),
             .accumulate = accumulate,
             .dtype = type})
    same(d_x, 1e-3, "gradient of x");
    release();
}
static void test_batchnorm(void)
{
    static const int64_t sizes[][2] = {{1, 1},   {2, 3},   {5, 16},  {33, 7},   {300, 16},
                                       {70, 64}, {9, 130}, {1, 515}, {4099, 2}, {20000, 1}};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (int t = 0; t < TYPES; t++)
            for (int options = 0; options < 8; options++)
                batchnorm_case(sizes[s][0], sizes[s][1], types[t], options & 1, options & 2,
                               options & 4);
}

/* Work of the CPU is done when a call returns: its table has no streams, events or graphs. */
static void test_order(void)
{
    const dtrain_device_ops *ops = cpu->ops;
    dtrain_device_info info;
    void *memory;
    char text[8] = "abc";
    CHECK(dtrain_device_query(cpu, &info) == DTRAIN_OK && info.memory_bytes > 0 &&
          strcmp(info.id, "cpu") == 0 && info.kernels[0] && info.bf16_kernels[0]);
    CHECK(!ops->stream_create && !ops->event_create && !ops->event_wait && !ops->graph_begin);
    CHECK(dtrain__on_host(cpu, text));
    CHECK(ops->host_alloc(cpu, 100, &memory) == DTRAIN_OK && ((uintptr_t)memory & 63) == 0);
    CHECK(ops->copy_async(cpu, memory, text, 4, DTRAIN_COPY_HOST_TO_DEVICE, NULL) == DTRAIN_OK);
    CHECK(strcmp((char *)memory, "abc") == 0);
    ops->host_free(cpu, memory, 100);
}

static void test_wrong_types(void)
{
    float x[4] = {0};
    dtrain_add_args add = {4, x, x, x, DTRAIN_DTYPE_I32, DTRAIN_DTYPE_F32};
    CHECK(cpu->ops->add(cpu, &add) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(strstr(dtrain_last_error(), "i32") != NULL);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    open_devices();
    RUN(test_gemm);
    if (dtrain__pairs_select()) RUN(test_gemm_pairs);
    else SKIP(test_gemm_pairs, "this machine or its system has no AMX");
    RUN(test_gemm_in_threads);
    RUN(test_gemm_arguments);
    RUN(test_activation_backward);
    RUN(test_layernorm);
    RUN(test_pointwise);
    RUN(test_embedding);
    RUN(test_attention);
    RUN(test_rows);
    RUN(test_cross_entropy);
    RUN(test_elementwise);
    RUN(test_sums);
    RUN(test_clip);
    RUN(test_optimizers);
    RUN(test_muon);
    RUN(test_sparse);
    RUN(test_batchnorm);
    RUN(test_order);
    RUN(test_wrong_types);
    dtrain_device_destroy(cpu);
    dtrain_device_destroy(naive);
    return test_summary();
}
