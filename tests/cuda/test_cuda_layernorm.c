/* Tests of layernorm.cuh: layer norm with and without residual, and its gradients, against
 * loops in double precision. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"

typedef struct norm_case {
    int64_t rows, n;
    dtrain_dtype x_dtype, y_dtype;
    size_t shift; /* bytes behind aligned addresses; the elements stay aligned to their size */
    bool residual, bias, accumulate;
} norm_case;

static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};

static const char *case_name(const norm_case *c)
{
    static char text[160];
    snprintf(text, sizeof text, "rows %d, n %d, %s/%s, shift %d%s%s%s", (int)c->rows, (int)c->n,
             dtrain_dtype_name(c->x_dtype), dtrain_dtype_name(c->y_dtype), (int)c->shift,
             c->residual ? ", residual" : "", c->bias ? ", bias" : "",
             c->accumulate ? ", accumulate" : "");
    return text;
}

static size_t bytes_of(int64_t count, dtrain_dtype dtype)
{
    return (size_t)count * dtrain_dtype_bytes(dtype);
}

/* Noise around `center`: statistics from sums of squares would cancel. */
static void *rows_around(float center, int64_t count, dtrain_dtype dtype, uint64_t stream)
{
    void *x = gpu_noise(count, dtype, stream, 1);
    for (int64_t i = 0; i < count; i++) gpu_set(x, i, dtype, center + (float)gpu_get(x, i, dtype));
    return x;
}

static double *doubles(int64_t count) { return (double *)calloc((size_t)count, sizeof(double)); }

/* What one run leaves is what every order of threads leaves. */
static void same_as_first(int order, void *first, const void *got, size_t bytes, const char *what)
{
    if (order == 0) memcpy(first, got, bytes);
    else CHECK_MSG(memcmp(first, got, bytes) == 0, "%s: other bits in order %d", what, order);
}

static void read_same(int order, void *first, const void *device, size_t bytes, const char *what)
{
    void *got = malloc(bytes + 1);
    gpu_read(got, device, bytes);
    same_as_first(order, first, got, bytes, what);
    free(got);
}

/* ---- Forward ---- */

static void statistics(const void *s, const norm_case *c, float epsilon, double *mean, double *rstd)
{
    for (int64_t i = 0; i < c->rows; i++) {
        double sum = 0, squares = 0;
        for (int64_t j = 0; j < c->n; j++) sum += gpu_get(s, i * c->n + j, c->x_dtype);
        mean[i] = sum / (double)c->n;
        for (int64_t j = 0; j < c->n; j++)
            squares += pow(gpu_get(s, i * c->n + j, c->x_dtype) - mean[i], 2);
        rstd[i] = 1 / sqrt(squares / (double)c->n + (double)epsilon);
    }
}

static void check_forward(const norm_case *c)
{
    const int64_t count = c->rows * c->n;
    const float epsilon = 1e-5f;
    const size_t x_bytes = bytes_of(count, c->x_dtype), y_bytes = bytes_of(count, c->y_dtype);
    void *x = rows_around(3, count, c->x_dtype, 1), *residual = gpu_noise(count, c->y_dtype, 2, 1);
    float *weight = (float *)rows_around(1, c->n, DTRAIN_DTYPE_F32, 3);
    float *bias = (float *)gpu_noise(c->n, DTRAIN_DTYPE_F32, 4, 1);
    void *s = malloc(x_bytes + 1), *y = malloc(y_bytes + 1), *sum = malloc(x_bytes + 1);
    float *mean = (float *)malloc((size_t)c->rows * 4),
          *rstd = (float *)malloc((size_t)c->rows * 4);
    double *want_mean = doubles(c->rows), *want_rstd = doubles(c->rows), *want = doubles(count);

    for (int64_t i = 0; i < count; i++) {
        float value = (float)gpu_get(x, i, c->x_dtype);
        if (c->residual) value += (float)gpu_get(residual, i, c->y_dtype);
        gpu_set(s, i, c->x_dtype, value);
    }
    statistics(s, c, epsilon, want_mean, want_rstd);
    for (int64_t i = 0; i < count; i++) {
        const double hat = (gpu_get(s, i, c->x_dtype) - want_mean[i / c->n]) * want_rstd[i / c->n];
        want[i] = hat * (double)weight[i % c->n] + (c->bias ? (double)bias[i % c->n] : 0);
    }
    EACH_ORDER(order)
    {
        dtrain_layernorm_args args = {.rows = c->rows,
                                      .n = c->n,
                                      .epsilon = epsilon,
                                      .x_dtype = c->x_dtype,
                                      .y_dtype = c->y_dtype};
        args.x = gpu_give(x, x_bytes, c->shift);
        args.weight = (float *)gpu_give(weight, bytes_of(c->n, DTRAIN_DTYPE_F32), c->shift * 2);
        if (c->bias)
            args.bias = (float *)gpu_give(bias, bytes_of(c->n, DTRAIN_DTYPE_F32), c->shift * 2);
        args.y = gpu_take(y_bytes, c->shift);
        args.mean = (float *)gpu_take((size_t)c->rows * 4, 0);
        args.rstd = (float *)gpu_take((size_t)c->rows * 4, 0);
        if (c->residual) {
            args.residual = gpu_give(residual, y_bytes, c->shift);
            /* In place in every other order. */
            args.sum = order == 1 ? (void *)args.x : gpu_take(x_bytes, c->shift);
        }
        CHECK_MSG(gpu->ops->layernorm(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
        read_same(order, y, args.y, y_bytes, case_name(c));
        read_same(order, mean, args.mean, (size_t)c->rows * 4, case_name(c));
        read_same(order, rstd, args.rstd, (size_t)c->rows * 4, case_name(c));
        if (c->residual) read_same(order, sum, args.sum, x_bytes, case_name(c));
        gpu_release();
    }
    if (c->residual) CHECK_MSG(memcmp(sum, s, x_bytes) == 0, "%s: sum", case_name(c));
    gpu_near(case_name(c), y, want, count, c->y_dtype, 1e-5);
    gpu_near(case_name(c), mean, want_mean, c->rows, DTRAIN_DTYPE_F32, 1e-6);
    gpu_near(case_name(c), rstd, want_rstd, c->rows, DTRAIN_DTYPE_F32, c->n == 1 ? 1e-2 : 1e-5);
    free(x), free(residual), free(weight), free(bias), free(s), free(y), free(sum);
    free(mean), free(rstd), free(want_mean), free(want_rstd), free(want);
}

static const int64_t widths[] = {1,   2,   7,   8,   33,   64,   100, 256,
                                 511, 512, 513, 768, 1000, 1032, 2056};

static void test_forward_widths(void)
{
    gpu_open();
    EACH(w, widths) EACH(d, dtypes)
    {
        const norm_case c = {19, widths[w], dtypes[d], dtypes[d], 0, w % 2 == 1, w % 3 > 0, false};
        check_forward(&c);
    }
    gpu_close();
}

static void test_forward_dtypes(void)
{
    gpu_open();
    EACH(x, dtypes) EACH(y, dtypes) for (int residual = 0; residual < 2; residual++)
    {
        const norm_case c = {5, 264, dtypes[x], dtypes[y], 0, residual == 1, true, false};
        check_forward(&c);
    }
    gpu_close();
}

/* Single elements instead of chunks, also for an n that has chunks. */
static void test_forward_unaligned(void)
{
    const int64_t n[] = {8, 64, 520, 1024};
    gpu_open();
    EACH(w, n) EACH(d, dtypes)
    {
        const norm_case c = {9,          n[w], dtypes[d], dtypes[d], dtrain_dtype_bytes(dtypes[d]),
                             w % 2 == 0, true, false};
        check_forward(&c);
    }
    gpu_close();
}

/* Several warps to a row, up to whole blocks, and rows that do not fit registers. */
static const norm_case wide_cases[] = {
    {3, 4096, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_BF16, 0, true, true, false},
    {2, 8200, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, 0, true, true, true},
    {2, 8192, DTRAIN_DTYPE_F16, DTRAIN_DTYPE_F16, 2, false, true, true},
    {2, 8193, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32, 0, true, false, false},
    {2, 16384, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32, 0, false, true, true},
    {3, 16392, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_BF16, 0, true, true, true},
    {35, 16388, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F16, 0, false, true, false},
};

static void test_forward_wide(void)
{
    gpu_open();
    EACH(i, wide_cases) check_forward(&wide_cases[i]);
    gpu_close();
}

/* A NaN or an infinity spoils its row and no other. */
static void test_forward_nan(void)
{
    enum { ROWS = 20, N = 72 };
    float *x = (float *)gpu_noise(ROWS * N, DTRAIN_DTYPE_F32, 1, 1), y[ROWS * N], ones[N];
    gpu_open();
    for (int j = 0; j < N; j++) ones[j] = 1;
    x[3 * N + 5] = NAN;
    x[11 * N + 70] = INFINITY;
    float *weight = (float *)gpu_give(ones, sizeof ones, 0);
    dtrain_layernorm_args args = {.rows = ROWS,
                                  .n = N,
                                  .epsilon = 1e-5f,
                                  .weight = weight,
                                  .x_dtype = DTRAIN_DTYPE_F32,
                                  .y_dtype = DTRAIN_DTYPE_F32};
    args.x = gpu_give(x, sizeof y, 0);
    args.y = gpu_take(sizeof y, 0);
    args.mean = (float *)gpu_take(ROWS * 4, 0);
    args.rstd = (float *)gpu_take(ROWS * 4, 0);
    CHECK(gpu->ops->layernorm(gpu, &args) == DTRAIN_OK);
    gpu_read(y, args.y, sizeof y);
    for (int i = 0; i < ROWS * N; i++) CHECK(isfinite(y[i]) == (i / N != 3 && i / N != 11));
    gpu_close();
    free(x);
}

/* ---- Backward ---- */

typedef struct gradients {
    double *d_x, *d_weight, *d_bias;
} gradients;

static gradients want_gradients(const norm_case *c, const void *x, const void *d_y,
                                const float *weight, const float *mean, const float *rstd,
                                const void *old_x, const float *old_weight, const float *old_bias)
{
    const int64_t n = c->n;
    gradients want = {doubles(c->rows * n), doubles(n), doubles(n)};
    for (int64_t j = 0; c->accumulate && j < n; j++) {
        want.d_weight[j] = (double)old_weight[j];
        want.d_bias[j] = (double)old_bias[j];
    }
    for (int64_t i = 0; i < c->rows; i++) {
        double d_average = 0, d_hat_average = 0;
        for (int pass = 0; pass < 2; pass++)
            for (int64_t j = 0; j < n; j++) {
                const int64_t at = i * n + j;
                const double hat = (gpu_get(x, at, c->x_dtype) - (double)mean[i]) * (double)rstd[i];
                const double dy = gpu_get(d_y, at, c->y_dtype), d = dy * (double)weight[j];
                if (pass == 1) {
                    want.d_x[at] = (d - d_average - hat * d_hat_average) * (double)rstd[i];
                    if (c->accumulate) want.d_x[at] += gpu_get(old_x, at, c->x_dtype);
                    continue;
                }
                d_average += d / (double)n;
                d_hat_average += d * hat / (double)n;
                want.d_weight[j] += dy * hat;
                want.d_bias[j] += dy;
            }
    }
    return want;
}

enum { WANT_X = 1, WANT_WEIGHT = 2, WANT_BIAS = 4, WANT_ALL = 7 };

static void check_backward(const norm_case *c, int outputs)
{
    const int64_t count = c->rows * c->n, n = c->n;
    const size_t x_bytes = bytes_of(count, c->x_dtype), y_bytes = bytes_of(count, c->y_dtype);
    const size_t n_bytes = bytes_of(n, DTRAIN_DTYPE_F32),
                 row_bytes = bytes_of(c->rows, DTRAIN_DTYPE_F32);
    void *x = rows_around(2, count, c->x_dtype, 1), *d_y = gpu_noise(count, c->y_dtype, 2, 1);
    void *old_x = gpu_noise(count, c->x_dtype, 6, 1), *d_x = malloc(x_bytes),
         *copy = malloc(y_bytes);
    float *weight = (float *)rows_around(1, n, DTRAIN_DTYPE_F32, 3);
    float *old_weight = (float *)gpu_noise(n, DTRAIN_DTYPE_F32, 4, 1),
          *old_bias = (float *)gpu_noise(n, DTRAIN_DTYPE_F32, 5, 1);
    float *d_weight = (float *)malloc(n_bytes), *d_bias = (float *)malloc(n_bytes);
    float *mean = (float *)malloc(row_bytes), *rstd = (float *)malloc(row_bytes);
    for (int64_t i = 0; i < c->rows; i++) {
        mean[i] = 2 + 0.1f * (float)(i % 3);
        rstd[i] = 0.5f + 0.25f * (float)(i % 4);
    }
    EACH_ORDER(order)
    {
        dtrain_layernorm_backward_args args;
        memset(&args, 0, sizeof args);
        args.rows = c->rows, args.n = n, args.x_dtype = c->x_dtype, args.y_dtype = c->y_dtype;
        args.accumulate_params = args.accumulate_x = c->accumulate;
        args.x = gpu_give(x, x_bytes, c->shift);
        args.d_y = gpu_give(d_y, y_bytes, c->shift);
        args.weight = (float *)gpu_give(weight, n_bytes, c->shift * 2);
        args.mean = (float *)gpu_give(mean, row_bytes, 0);
        args.rstd = (float *)gpu_give(rstd, row_bytes, 0);
        if (outputs & WANT_X)
            args.d_x =
                c->accumulate ? gpu_give(old_x, x_bytes, c->shift) : gpu_take(x_bytes, c->shift);
        if (outputs & WANT_WEIGHT)
            args.d_weight =
                (float *)(c->accumulate ? gpu_give(old_weight, n_bytes, 4) : gpu_take(n_bytes, 4));
        if (outputs & WANT_BIAS)
            args.d_bias =
                (float *)(c->accumulate ? gpu_give(old_bias, n_bytes, 4) : gpu_take(n_bytes, 4));
        if (c->residual) args.d_residual = gpu_take(y_bytes, c->shift);
        CHECK_MSG(gpu->ops->layernorm_backward(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
        if (args.d_x) read_same(order, d_x, args.d_x, x_bytes, case_name(c));
        if (args.d_weight) read_same(order, d_weight, args.d_weight, n_bytes, case_name(c));
        if (args.d_bias) read_same(order, d_bias, args.d_bias, n_bytes, case_name(c));
        if (args.d_residual) read_same(order, copy, args.d_residual, y_bytes, case_name(c));
        gpu_release();
    }
    gradients want = want_gradients(c, x, d_y, weight, mean, rstd, old_x, old_weight, old_bias);
    const double of_rows =
        1e-6 * (10 + sqrt((double)c->rows)); /* sums of so many numbers of size 1 */
    if (outputs & WANT_X) gpu_near(case_name(c), d_x, want.d_x, count, c->x_dtype, 1e-5);
    if (outputs & WANT_WEIGHT)
        gpu_near(case_name(c), d_weight, want.d_weight, n, DTRAIN_DTYPE_F32, of_rows);
    if (outputs & WANT_BIAS)
        gpu_near(case_name(c), d_bias, want.d_bias, n, DTRAIN_DTYPE_F32, of_rows);
    if (c->residual) {
        bool same = true;
        for (int64_t i = 0; i < count; i++) {
            float rounded;
            gpu_set(&rounded, 0, c->y_dtype, (float)gpu_get(d_x, i, c->x_dtype));
            same = same && gpu_get(&rounded, 0, c->y_dtype) == gpu_get(copy, i, c->y_dtype);
        }
        CHECK_MSG(same, "%s: d_residual", case_name(c));
    }
    free(x), free(d_y), free(old_x), free(d_x), free(copy), free(weight), free(old_weight),
        free(old_bias);
    free(d_weight), free(d_bias), free(mean), free(rstd);
    free(want.d_x), free(want.d_weight), free(want.d_bias);
}

static void test_backward_widths(void)
{
    gpu_open();
    EACH(w, widths) EACH(d, dtypes)
    {
        const norm_case c = {21, widths[w], dtypes[d], dtypes[d], 0, w % 3 == 0, true, w % 2 == 1};
        check_backward(&c, WANT_ALL);
    }
    gpu_close();
}

static void test_backward_dtypes(void)
{
    gpu_open();
    EACH(x, dtypes) EACH(y, dtypes) for (int accumulate = 0; accumulate < 2; accumulate++)
    {
        const norm_case c = {10, 264, dtypes[x], dtypes[y], 0, true, true, accumulate == 1};
        check_backward(&c, WANT_ALL);
    }
    gpu_close();
}

static void test_backward_unaligned(void)
{
    const int64_t n[] = {8, 64, 520, 1024};
    gpu_open();
    EACH(w, n) EACH(d, dtypes)
    {
        const norm_case c = {9,    n[w], dtypes[d], dtypes[d], dtrain_dtype_bytes(dtypes[d]),
                             true, true, w % 2 == 0};
        check_backward(&c, WANT_ALL);
    }
    gpu_close();
}

/* So many rows that a block takes several. */
static void test_backward_rows(void)
{
    const norm_case cases[] = {
        {1, 40, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32, 0, false, true, false},
        {2500, 8, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_BF16, 0, true, true, true},
        {2300, 5, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32, 0, false, true, false},
        {600, 1040, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, 0, false, true, false},
    };
    gpu_open();
    EACH(i, cases) check_backward(&cases[i], WANT_ALL);
    gpu_close();
}

static void test_backward_wide(void)
{
    gpu_open();
    EACH(i, wide_cases) check_backward(&wide_cases[i], WANT_ALL);
    gpu_close();
}

/* What is not wanted is not written; d_x or parameters alone. */
static void test_backward_outputs(void)
{
    const int64_t n[] = {96, 16392};
    gpu_open();
    EACH(w, n) for (int outputs = 1; outputs < WANT_ALL; outputs++)
    {
        const norm_case c = {7, n[w], DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32, 0, false, true, w == 0};
        check_backward(&c, outputs);
    }
    gpu_close();
}

static void test_errors(void)
{
    float *memory;
    gpu_open();
    memory = (float *)gpu_take(64, 0);
    dtrain_layernorm_args forward = {.rows = 1,
                                     .n = 1,
                                     .x = memory,
                                     .weight = memory,
                                     .y = memory,
                                     .mean = memory,
                                     .rstd = memory,
                                     .x_dtype = DTRAIN_DTYPE_I32,
                                     .y_dtype = DTRAIN_DTYPE_F32};
    CHECK(gpu->ops->layernorm(gpu, &forward) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_MSG(strstr(dtrain_last_error(), "i32") != NULL, "%s", dtrain_last_error());
    forward.x_dtype = DTRAIN_DTYPE_F32, forward.y_dtype = (dtrain_dtype)7;
    CHECK(gpu->ops->layernorm(gpu, &forward) == DTRAIN_ERROR_UNSUPPORTED);
    forward.y_dtype = DTRAIN_DTYPE_F32, forward.residual = memory;
    CHECK(gpu->ops->layernorm(gpu, &forward) == DTRAIN_ERROR_ARGUMENT);
    forward.residual = NULL, forward.sum = memory;
    CHECK(gpu->ops->layernorm(gpu, &forward) == DTRAIN_ERROR_ARGUMENT);
    dtrain_layernorm_backward_args backward;
    memset(&backward, 0, sizeof backward);
    CHECK(gpu->ops->layernorm_backward(gpu, &backward) == DTRAIN_OK); /* no rows: nothing to do */
    backward.rows = backward.n = 1;
    backward.x = backward.weight = backward.mean = backward.rstd = memory, backward.d_y = memory;
    backward.d_residual = memory;
    CHECK(gpu->ops->layernorm_backward(gpu, &backward) == DTRAIN_ERROR_ARGUMENT);
    backward.d_residual = NULL, backward.y_dtype = DTRAIN_DTYPE_I64;
    CHECK(gpu->ops->layernorm_backward(gpu, &backward) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    gpu_close();
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (gpu_missing()) {
        SKIP(test_cuda_layernorm, gpu_missing());
        return test_summary();
    }
    RUN(test_forward_widths);
    RUN(test_forward_dtypes);
    RUN(test_forward_unaligned);
    RUN(test_forward_wide);
    RUN(test_forward_nan);
    RUN(test_backward_widths);
    RUN(test_backward_dtypes);
    RUN(test_backward_unaligned);
    RUN(test_backward_rows);
    RUN(test_backward_wide);
    RUN(test_backward_outputs);
    RUN(test_errors);
    return test_summary();
}
