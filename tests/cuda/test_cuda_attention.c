/* Tests of attention_gemm.cuh and flash.cuh: attention through the public table. Which kernels a case
 * meets depends on its head size, dtype, alignment and the device's math; every case is run aligned
 * (the tiles of flash.cuh, where they take the head size) and one element further (the products of attention_gemm.cuh).
 * The oracle is the definition, in double. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"
#include "packed_attention.h"

static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};

static bool says(const char *words) { return strstr(dtrain_last_error(), words) != NULL; }
#define CHECK_SAYS(words) CHECK_MSG(says(words), "\"%s\" is not in: %s", words, dtrain_last_error())

/* ---- One case: matrices on both sides and the oracle --------------------------------------------*/

typedef struct shape {
    int64_t batch, sequence, heads, size;
} shape;

typedef struct problem {
    shape s;
    bool causal;
    dtrain_dtype dtype;
    int64_t n, tokens;       /* heads * size, batch * sequence */
    void *qkv, *y, *d_y;     /* host; y is the oracle's, rounded */
    float *lse;              /* host, the oracle's */
    double *want_y, *want_d; /* (tokens,n), (tokens,3n) */
    double *want_lse;        /* (batch,heads,sequence) */
    double *p;               /* (sequence): one row of weights */
    double input;            /* relative error of the inputs that the arithmetic sees */
} problem;

static double part(const problem *x, int64_t token, int which, int64_t head, int64_t i)
{
    return gpu_get(x->qkv, token * 3 * x->n + which * x->n + head * x->s.size + i, x->dtype);
}

/* Weights of query t into x->p; returns the log of their sum before. */
static double weigh(const problem *x, int64_t batch, int64_t head, int64_t t)
{
    const int64_t first = batch * x->s.sequence, end = x->causal ? t + 1 : x->s.sequence;
    double most = -INFINITY, sum = 0;
    for (int64_t u = 0; u < end; u++) {
        x->p[u] = 0;
        for (int64_t i = 0; i < x->s.size; i++)
            x->p[u] += part(x, first + t, 0, head, i) * part(x, first + u, 1, head, i);
        x->p[u] /= sqrt((double)x->s.size);
        most = fmax(most, x->p[u]);
    }
    for (int64_t u = 0; u < end; u++) sum += exp(x->p[u] - most);
    for (int64_t u = 0; u < end; u++) x->p[u] = exp(x->p[u] - most) / sum;
    return most + log(sum);
}

static void want_query(problem *x, int64_t batch, int64_t head, int64_t t)
{
    const int64_t first = batch * x->s.sequence, end = x->causal ? t + 1 : x->s.sequence, n = x->n,
                  d = x->s.size;
    const int64_t row = (first + t) * n + head * d;
    double dot = 0;
    x->want_lse[(batch * x->s.heads + head) * x->s.sequence + t] = weigh(x, batch, head, t);
    for (int64_t i = 0; i < d; i++) {
        double y = 0;
        for (int64_t u = 0; u < end; u++) y += x->p[u] * part(x, first + u, 2, head, i);
        x->want_y[row + i] = y;
        dot += y * gpu_get(x->d_y, row + i, x->dtype);
    }
    for (int64_t u = 0; u < end; u++) {
        double *d_key = x->want_d + (first + u) * 3 * n + n + head * d, d_p = 0;
        for (int64_t i = 0; i < d; i++) {
            const double d_y = gpu_get(x->d_y, row + i, x->dtype);
            d_p += d_y * part(x, first + u, 2, head, i);
            d_key[n + i] += x->p[u] * d_y;
        }
        const double d_s = x->p[u] * (d_p - dot) / sqrt((double)d);
        for (int64_t i = 0; i < d; i++) {
            x->want_d[(first + t) * 3 * n + head * d + i] += d_s * part(x, first + u, 1, head, i);
            d_key[i] += d_s * part(x, first + t, 0, head, i);
        }
    }
}

static problem make_problem(shape s, bool causal, dtrain_dtype dtype, float scale)
{
    problem x = {s,
                 causal,
                 dtype,
                 s.heads * s.size,
                 s.batch * s.sequence,
                 NULL,
                 NULL,
                 NULL,
                 NULL,
                 NULL,
                 NULL,
                 NULL,
                 NULL,
                 0};
    const int64_t rows = x.tokens * s.heads;
    x.qkv = gpu_noise(x.tokens * 3 * x.n, dtype, 1, scale);
    x.d_y = gpu_noise(x.tokens * x.n, dtype, 2, 1);
    x.y = gpu_noise(x.tokens * x.n, dtype, 3, 1);
    x.lse = (float *)malloc((size_t)rows * sizeof(float));
    x.want_lse = (double *)malloc((size_t)rows * sizeof(double));
    x.want_y = (double *)malloc((size_t)(x.tokens * x.n) * sizeof(double));
    x.want_d = (double *)calloc((size_t)(x.tokens * 3 * x.n), sizeof(double));
    x.p = (double *)malloc((size_t)s.sequence * sizeof(double));
    x.input = gpu_rounding(dtype);
    for (int64_t b = 0; b < s.batch; b++)
        for (int64_t h = 0; h < s.heads; h++)
            for (int64_t t = 0; t < s.sequence; t++) want_query(&x, b, h, t);
    for (int64_t i = 0; i < x.tokens * x.n; i++) gpu_set(x.y, i, dtype, (float)x.want_y[i]);
    for (int64_t i = 0; i < rows; i++) x.lse[i] = (float)x.want_lse[i];
    return x;
}

static void drop_problem(problem *x)
{
    void *host[] = {x->qkv, x->d_y, x->y, x->lse, x->want_lse, x->want_y, x->want_d, x->p};
    EACH(i, host) free(host[i]);
    gpu_release();
}

static const char *describe(const problem *x, const char *what, size_t shift)
{
    static char text[160];
    snprintf(text, sizeof text, "%s of %lld sequences of %lld, %lld heads of %lld%s, %s, shift %d",
             what, (long long)x->s.batch, (long long)x->s.sequence, (long long)x->s.heads,
             (long long)x->s.size, x->causal ? ", causal" : "", dtrain_dtype_name(x->dtype),
             (int)shift);
    return text;
}

/* Device memory full of NaN. */
static void *take_nan(size_t bytes, size_t shift)
{
    void *device = gpu_take(bytes, shift), *nan = malloc(bytes + 1);
    memset(nan, 0xff, bytes);
    gpu_write(device, nan, bytes);
    free(nan);
    return device;
}

static packed_shape packed_of(const problem *x)
{
    const packed_shape shape = {x->s.batch, x->s.sequence, x->s.heads, x->s.heads,
                                x->s.size,  x->causal,     x->dtype};
    return shape;
}

static dtrain_attention_args forward_args(const problem *x, size_t shift)
{
    const size_t element = dtrain_dtype_bytes(x->dtype), count = (size_t)(x->tokens * x->n);
    void *qkv = gpu_give(x->qkv, 3 * count * element, shift * element);
    void *y = take_nan(count * element, shift * element);
    void *lse = take_nan((size_t)(x->tokens * x->s.heads) * sizeof(float), shift * sizeof(float));
    return packed_attention(packed_of(x), qkv, y, lse);
}

static dtrain_attention_backward_args backward_args(const problem *x, size_t shift)
{
    const size_t element = dtrain_dtype_bytes(x->dtype), count = (size_t)(x->tokens * x->n);
    void *qkv = gpu_give(x->qkv, 3 * count * element, shift * element);
    void *y = gpu_give(x->y, count * element, shift * element);
    void *d_y = gpu_give(x->d_y, count * element, shift * element);
    void *lse =
        gpu_give(x->lse, (size_t)(x->tokens * x->s.heads) * sizeof(float), shift * sizeof(float));
    void *d_qkv = take_nan(3 * count * element, shift * element);
    return packed_attention_backward(packed_of(x), qkv, y, lse, d_y, d_qkv);
}

static bool check_result(const problem *x, const char *what, const void *device, const double *want,
                         int64_t count, dtrain_dtype dtype, size_t shift, double tolerance)
{
    void *got = malloc((size_t)count * sizeof(float) + 1);
    gpu_read(got, device, (size_t)count * dtrain_dtype_bytes(dtype));
    const bool good = gpu_near(describe(x, what, shift), got, want, count, dtype, tolerance);
    free(got);
    return good;
}

/* Weights are rounded like the inputs before they meet V; sums of them are fp32. */
static bool try_problem(const problem *x, size_t shift)
{
    const double tolerance = 3 * x->input + 4e-6;
    const int64_t count = x->tokens * x->n;
    dtrain_attention_args forward = forward_args(x, shift);
    const dtrain_attention_backward_args backward = backward_args(x, shift);
    bool good = CHECK_MSG(gpu->ops->attention(gpu, &forward) == DTRAIN_OK, "%s: %s",
                          describe(x, "forward", shift), dtrain_last_error()) != 0;
    good = good && check_result(x, "lse", forward.lse, x->want_lse, x->tokens * x->s.heads,
                                DTRAIN_DTYPE_F32, shift,
                                2e-6 + (x->input > gpu_rounding(x->dtype) ? x->input : 0));
    good = good && check_result(x, "y", forward.y, x->want_y, count, x->dtype, shift, tolerance);
    good = good && CHECK_MSG(gpu->ops->attention_backward(gpu, &backward) == DTRAIN_OK, "%s: %s",
                             describe(x, "backward", shift), dtrain_last_error()) != 0;
    good = good && check_result(x, "d_qkv", backward.d_q, x->want_d, 3 * count, x->dtype, shift,
                                2 * tolerance);
    gpu_release();
    return good;
}

/* ---- Cases --------------------------------------------------------------------------------------*/

/* Both addresses, or in turn one of them. */
static void try_shape(shape s, float scale)
{
    static size_t turn;
    EACH(d, dtypes)
    for (int causal = 0; causal < 2; causal++) {
        problem x = make_problem(s, causal != 0, dtypes[d], scale);
        bool good = true;
        for (size_t shift = 0; shift < 2 && good; shift++)
            if (test_full() || shift == turn % 2) good = try_problem(&x, shift);
        turn += 1 + (size_t)causal; /* so that each of the two meets either address */
        drop_problem(&x);
    }
}

/* Head sizes that tiles take, and others; sequences around the edges of tiles, warps and 8. */
static void test_head_sizes(void)
{
    static const int64_t sizes[] = {32, 64, 80, 96, 128, 1, 3, 8, 20, 40, 100, 136};
    gpu_open();
    EACH(i, sizes)
    {
        const shape s = {1, 70, 2, sizes[i]};
        try_shape(s, 1);
    }
    gpu_close();
}

static void test_sequences(void)
{
    static const int64_t lengths[] = {1, 7, 8, 9, 31, 127, 128, 129, 200};
    gpu_open();
    EACH(i, lengths)
    {
        const shape s = {2, lengths[i], 3, 16};
        try_shape(s, 1);
    }
    gpu_close();
}

static void test_sequences_in_tiles(void)
{
    static const int64_t lengths[] = {1, 63, 64, 65, 130};
    gpu_open();
    EACH(i, lengths)
    {
        const shape s = {1, lengths[i], 2, 64};
        try_shape(s, 1);
    }
    gpu_close();
}

static void test_batches_and_heads(void)
{
    static const shape shapes[] = {{3, 24, 1, 12}, {1, 24, 12, 4}, {4, 33, 5, 32}, {5, 1, 7, 64}};
    gpu_open();
    EACH(i, shapes) try_shape(shapes[i], 1);
    gpu_close();
}

/* Scores in the hundreds: e to that power does not exist in fp32. */
static void test_large_scores(void)
{
    gpu_open();
    for (int causal = 0; causal < 2; causal++) {
        const shape s = {1, 40, 2, 32};
        problem x = make_problem(s, causal != 0, DTRAIN_DTYPE_F32, 6);
        dtrain_attention_args args = forward_args(&x, 0);
        CHECK(gpu->ops->attention(gpu, &args) == DTRAIN_OK);
        check_result(&x, "lse", args.lse, x.want_lse, x.tokens * s.heads, DTRAIN_DTYPE_F32, 0,
                     1e-5);
        check_result(&x, "y", args.y, x.want_y, x.tokens * x.n, DTRAIN_DTYPE_F32, 0, 2e-3);
        drop_problem(&x);
    }
    gpu_close();
}

/* What a row must not look at may hold anything that is a number. */
static void test_mask(void)
{
    const shape s = {1, 50, 2, 32};
    gpu_open();
    EACH(d, dtypes)
    for (size_t shift = 0; shift < 2; shift++) {
        problem x = make_problem(s, true, dtypes[d], 1);
        char *got[2];
        const size_t bytes = (size_t)(x.tokens * x.n) * dtrain_dtype_bytes(dtypes[d]);
        for (int changed = 0; changed < 2; changed++) {
            dtrain_attention_args args = forward_args(&x, shift);
            CHECK(gpu->ops->attention(gpu, &args) == DTRAIN_OK);
            got[changed] = (char *)malloc(bytes);
            gpu_read(got[changed], args.y, bytes);
            gpu_release();
            for (int64_t i = 30 * 3 * x.n; i < x.tokens * 3 * x.n; i++)
                gpu_set(x.qkv, i, dtypes[d], 1000);
        }
        CHECK(memcmp(got[0], got[1], bytes / 50 * 30) == 0);
        CHECK(memcmp(got[0], got[1], bytes) != 0);
        free(got[0]);
        free(got[1]);
        drop_problem(&x);
    }
    gpu_close();
}

/* A NaN in a query reaches its row and no other; in a key, every row that sees it. */
static void test_nan(void)
{
    const shape s = {2, 20, 2, 32};
    gpu_open();
    EACH(d, dtypes)
    for (int which = 0; which < 2; which++)
        for (size_t shift = 0; shift < 2; shift++) {
            problem x = make_problem(s, true, dtypes[d], 1);
            const int64_t where = 11, n = x.n;
            void *got = malloc((size_t)(x.tokens * n) * sizeof(float));
            gpu_set(x.qkv, where * 3 * n + which * n + 1, dtypes[d],
                    NAN); /* head 0 of the first sequence */
            dtrain_attention_args args = forward_args(&x, shift);
            CHECK(gpu->ops->attention(gpu, &args) == DTRAIN_OK);
            gpu_read(got, args.y, (size_t)(x.tokens * n) * dtrain_dtype_bytes(dtypes[d]));
            for (int64_t i = 0; i < x.tokens * n; i++) {
                const int64_t row = i / n;
                const bool hit =
                    i % n < s.size && (which ? row >= where && row < s.sequence : row == where);
                CHECK_MSG(isnan(gpu_get(got, i, dtypes[d])) == hit, "%s: element %lld",
                          describe(&x, "NaN", shift), (long long)i);
            }
            free(got);
            drop_problem(&x);
        }
    gpu_close();
}

/* The same bits in every order of threads. */
static void test_orders(void)
{
    static const shape shapes[] = {{2, 37, 3, 20}, {1, 70, 2, 64}};
    gpu_open();
    EACH(i, shapes)
    EACH(d, dtypes)
    for (size_t shift = 0; shift < 2; shift++) {
        problem x = make_problem(shapes[i], true, dtypes[d], 1);
        const size_t y = (size_t)(x.tokens * x.n) * dtrain_dtype_bytes(dtypes[d]);
        const size_t lse = (size_t)(x.tokens * x.s.heads) * sizeof(float), bytes = 4 * y + lse;
        char *first = (char *)malloc(bytes), *got = (char *)malloc(bytes);
        EACH_ORDER(order)
        {
            char *to = order ? got : first;
            dtrain_attention_args forward = forward_args(&x, shift);
            const dtrain_attention_backward_args backward = backward_args(&x, shift);
            CHECK(gpu->ops->attention(gpu, &forward) == DTRAIN_OK);
            CHECK(gpu->ops->attention_backward(gpu, &backward) == DTRAIN_OK);
            gpu_read(to, forward.y, y);
            gpu_read(to + y, backward.d_q, 3 * y);
            gpu_read(to + 4 * y, forward.lse, lse);
            CHECK_MSG(to == first || memcmp(got, first, bytes) == 0, "order %d: %s", order,
                      describe(&x, "bits", shift));
            gpu_release();
        }
        free(first);
        free(got);
        drop_problem(&x);
    }
    gpu_close();
}

/* Scores of all heads together would need more than the scratch that attention allows itself. */
static void test_many_scores(void)
{
    const shape s = {1, 1030, 9, 1}; /* 4 MiB a head, twice in the backward pass */
    gpu_open();
    problem x = make_problem(s, true, DTRAIN_DTYPE_F32, 1);
    try_problem(&x, 0);
    drop_problem(&x);
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_counters counters;
    dtrain_emulation_get_counters(&counters);
    CHECK_MSG(counters.peak_bytes < 104 << 20, "%lld bytes, 32 MiB of them cublasLt's",
              (long long)counters.peak_bytes);
#endif
    gpu_close();
}

/* fp32 operands with the tensor cores' mantissas. */
static void test_math(void)
{
    static const shape shapes[] = {{2, 33, 2, 16}, {1, 70, 2, 64}};
    for (uint32_t math = DTRAIN_MATH_FP32; math <= DTRAIN_MATH_BF16; math++) {
        dtrain_device_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.math = math;
        CHECK(dtrain_device_create(dtrain_cuda_device_ops(), &desc, &gpu) == DTRAIN_OK);
        EACH(i, shapes)
        for (int causal = 0; causal < 2; causal++) {
            problem x = make_problem(shapes[i], causal != 0, DTRAIN_DTYPE_F32, 1);
            if (math != DTRAIN_MATH_FP32)
                x.input =
                    gpu_rounding(math == DTRAIN_MATH_BF16 ? DTRAIN_DTYPE_BF16 : DTRAIN_DTYPE_F16) *
                    2;
            for (size_t shift = 0; shift < 2; shift++) try_problem(&x, shift);
            drop_problem(&x);
        }
        gpu_close();
    }
}

/* Captured, both passes replay. */
static void test_graph(void)
{
    static const shape shapes[] = {{2, 33, 2, 20}, {1, 70, 2, 64}};
    gpu_open();
    EACH(i, shapes)
    EACH(d, dtypes)
    {
        problem x = make_problem(shapes[i], true, dtypes[d], 1);
        const int64_t count = x.tokens * x.n;
        const double tolerance = 6 * x.input + 8e-6;
        dtrain_graph *graph = NULL;
        if (!try_problem(&x, 0)) break; /* the first step is not captured */
        dtrain_attention_args forward = forward_args(&x, 0);
        const dtrain_attention_backward_args backward = backward_args(&x, 0);
        CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
        CHECK_MSG(gpu->ops->attention(gpu, &forward) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK_MSG(gpu->ops->attention_backward(gpu, &backward) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_OK);
        for (int launch = 0; launch < 2; launch++)
            CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_OK);
        check_result(&x, "y", forward.y, x.want_y, count, x.dtype, 0, tolerance);
        check_result(&x, "d_qkv", backward.d_q, x.want_d, 3 * count, x.dtype, 0, tolerance);
        gpu->ops->graph_destroy(gpu, graph);
        drop_problem(&x);
    }
    gpu_close();
}

static void test_errors_and_nothing(void)
{
    static const struct {
        packed_shape is;
        dtrain_result result;
        const char *words;
    } cases[] = {{{0, 5, 2, 2, 4, false, DTRAIN_DTYPE_F32}, DTRAIN_OK, NULL},
                 {{3, 0, 2, 2, 4, false, DTRAIN_DTYPE_F32}, DTRAIN_OK, NULL},
                 {{3, 5, 3, 2, 4, false, DTRAIN_DTYPE_F32}, DTRAIN_ERROR_ARGUMENT, "3 heads"},
                 {{3, 5, 0, 1, 4, false, DTRAIN_DTYPE_F32}, DTRAIN_ERROR_ARGUMENT, "0 heads"},
                 {{3, 5, 2, 2, 0, false, DTRAIN_DTYPE_F32}, DTRAIN_ERROR_ARGUMENT, "0 elements"},
                 {{3, 5, 2, 2, 4, false, DTRAIN_DTYPE_I64}, DTRAIN_ERROR_UNSUPPORTED, "i64"}};
    gpu_open();
    EACH(i, cases)
    {
        const dtrain_attention_args forward = packed_attention(cases[i].is, NULL, NULL, NULL);
        const dtrain_attention_backward_args backward =
            packed_attention_backward(cases[i].is, NULL, NULL, NULL, NULL, NULL);
        CHECK(gpu->ops->attention(gpu, &forward) == cases[i].result);
        if (cases[i].words) CHECK_SAYS(cases[i].words);
        CHECK(gpu->ops->attention_backward(gpu, &backward) == cases[i].result);
        if (cases[i].words) CHECK_SAYS(cases[i].words);
    }
    gpu_close();
}

#ifdef DTRAIN_CUDA_EMULATION
/* Products: two a batch element forward, five backward; none where the tiles work. Nothing is allocated once the
 * scratch has grown. */
static void test_cost(void)
{
    const shape s = {3, 24, 2, 32};
    gpu_open();
    for (int tiles = 0; tiles < 2; tiles++) {
        dtrain_emulation_counters before, after;
        problem x = make_problem(s, true, tiles ? DTRAIN_DTYPE_BF16 : DTRAIN_DTYPE_F32, 1);
        try_problem(&x, 0);
        dtrain_attention_args forward = forward_args(&x, 0);
        const dtrain_attention_backward_args backward = backward_args(&x, 0);
        dtrain_emulation_get_counters(&before);
        CHECK(gpu->ops->attention(gpu, &forward) == DTRAIN_OK);
        CHECK(gpu->ops->attention_backward(gpu, &backward) == DTRAIN_OK);
        CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
        dtrain_emulation_get_counters(&after);
        CHECK_MSG(after.matmuls - before.matmuls == (tiles ? 0 : 21), "%lld products",
                  (long long)(after.matmuls - before.matmuls));
        CHECK(after.allocations == before.allocations && after.cublas_alive == before.cublas_alive);
        drop_problem(&x);
    }
    gpu_close();
}
#endif

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (gpu_missing()) {
        SKIP(test_cuda_attention, gpu_missing());
        return test_summary();
    }
    RUN(test_head_sizes);
    RUN(test_sequences);
    RUN(test_sequences_in_tiles);
    RUN(test_batches_and_heads);
    RUN(test_large_scores);
    RUN(test_mask);
    RUN(test_nan);
    RUN(test_orders);
    RUN(test_many_scores);
    RUN(test_math);
    RUN(test_graph);
    RUN(test_errors_and_nothing);
#ifdef DTRAIN_CUDA_EMULATION
    RUN(test_cost);
#endif
    return test_summary();
}
