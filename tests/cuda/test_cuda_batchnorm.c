/* Tests of batchnorm.cuh: the five steps of batch normalisation against the loops of naive_device.h, for every dtype,
 * in every thread order with the same bits. Each step is given what the naive one before it has left. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"
#include "naive_device.h"

/* One array on the host, where the naive kernels work, and on the device. */
typedef struct array {
    void *host, *device, *first; /* first: what the first order of threads left */
    int64_t count;
    dtrain_dtype dtype;
} array;

static uint64_t stream;

static size_t bytes_of(const array *a) { return (size_t)a->count * dtrain_dtype_bytes(a->dtype); }
static array make(int64_t count, dtrain_dtype dtype)
{
    array a = {NULL, NULL, NULL, count, dtype};
    a.host = gpu_noise(count, dtype, ++stream, 1);
    a.device = gpu_give(a.host, bytes_of(&a), 0);
    a.first = malloc(bytes_of(&a) + 1);
    return a;
}
static void put_back(const array *a) { gpu_write(a->device, a->host, bytes_of(a)); }

/* Check what the device has left against the host's, and against other orders of threads. */
static void check_out(array *a, int order, double tolerance, const char *what)
{
    void *got = malloc(bytes_of(a) + 1);
    double *want = (double *)calloc((size_t)a->count + 1, sizeof *want);
    gpu_read(got, a->device, bytes_of(a));
    if (order == 0) memcpy(a->first, got, bytes_of(a));
    CHECK_MSG(memcmp(a->first, got, bytes_of(a)) == 0, "%s: other bits in order %d", what, order);
    for (int64_t i = 0; i < a->count; i++) want[i] = gpu_get(a->host, i, a->dtype);
    gpu_near(what, got, want, a->count, a->dtype, tolerance);
    free(got), free(want);
}

/* Run a step on the host, then on the device in every order from the same beginning. `out` is what it writes. */
#define STEP(op, out, tolerance, ...)                                                    \
    do {                                                                                 \
        void *before = malloc(bytes_of(&(out)) + 1);                                     \
        memcpy(before, (out).host, bytes_of(&(out)));                                    \
        for (int order = -1; order < GPU_ORDERS; order++) {                              \
            const bool naive = order < 0;                                                \
            const dtrain_##op##_args args = __VA_ARGS__;                                 \
            if (naive) {                                                                 \
                CHECK(naive_##op(NULL, &args) == DTRAIN_OK);                             \
                continue;                                                                \
            }                                                                            \
            gpu_order(order);                                                            \
            gpu_write((out).device, before, bytes_of(&(out)));                           \
            CHECK_MSG(gpu->ops->op(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error()); \
            check_out(&(out), order, tolerance, #op);                                    \
        }                                                                                \
        gpu_order(0);                                                                    \
        put_back(&(out));                                                                \
        free(before);                                                                    \
    } while (0)
#define AT(a) (naive ? (a).host : (a).device)
#define FLOATS(a) ((float *)AT(a))

static void check_case(int64_t rows, int64_t n, dtrain_dtype dtype, bool relu, bool residual,
                       bool accumulate)
{
    const dtrain_dtype wide = DTRAIN_DTYPE_F32;
    const uint32_t activation = relu ? DTRAIN_ACTIVATION_RELU : DTRAIN_ACTIVATION_NONE;
    array x = make(rows * n, dtype), y = make(rows * n, dtype), r = make(rows * n, dtype);
    array d_y = make(rows * n, dtype), d_x = make(rows * n, dtype), d_r = make(rows * n, dtype);
    array all = make(2 * (1 + 2 * n), wide), mean = make(n, wide), rstd = make(n, wide);
    array share = make(1, wide), running = make(2 * n, wide), sums = make(2 * n, wide);
    array weight = make(n, wide), bias = make(n, wide);
    float *other = (float *)all.host + 1 + 2 * n;
    other[0] = 5;
    for (int64_t c = 0; c < n; c++) other[1 + n + c] = fabsf(other[1 + n + c]);
    for (int64_t i = 0; i < rows * n; i++)
        gpu_set(x.host, i, dtype, (float)gpu_get(x.host, i, dtype) + (float)(i % n % 3) * 8);
    put_back(&all), put_back(&x);
    STEP(batchnorm_moments, all, 1e-5 * (double)rows,
         {.rows = rows, .n = n, .x = AT(x), .sums = FLOATS(all), .dtype = dtype});
    for (int out = 0; out < 4; out++) { /* it writes four arrays; each is looked at in turn */
        array *const outs[4] = {&mean, &rstd, &share, &running};
        STEP(batchnorm_statistics, *outs[out], 1e-5,
             {2, n, 1e-5f, out == 3 ? 0.3f : 0, FLOATS(all), FLOATS(mean), FLOATS(rstd),
              FLOATS(share), FLOATS(running), FLOATS(running) + n});
        put_back(outs[out]);
    }
    STEP(batchnorm, y, 1e-4,
         {.rows = rows,
          .n = n,
          .activation = activation,
          .x = AT(x),
          .y = AT(y),
          .mean = FLOATS(mean),
          .rstd = FLOATS(rstd),
          .dtype = dtype,
          .residual = residual ? AT(r) : NULL,
          .weight = FLOATS(weight),
          .bias = FLOATS(bias)});
    STEP(batchnorm_sums, sums, 1e-4 * sqrt((double)rows) + 1e-4,
         {.rows = rows,
          .n = n,
          .activation = activation,
          .x = AT(x),
          .y = AT(y),
          .mean = FLOATS(mean),
          .rstd = FLOATS(rstd),
          .dtype = dtype,
          .d_y = AT(d_y),
          .sums = FLOATS(sums)});
    if (residual)
        STEP(batchnorm_sums, d_r, 1e-5,
             {.rows = rows,
              .n = n,
              .activation = activation,
              .x = AT(x),
              .y = AT(y),
              .mean = FLOATS(mean),
              .rstd = FLOATS(rstd),
              .dtype = dtype,
              .d_y = AT(d_y),
              .sums = FLOATS(sums),
              .d_residual = AT(d_r),
              .accumulate = accumulate});
    put_back(&sums);
    STEP(batchnorm_backward, d_x, 1e-4,
         {.rows = rows,
          .n = n,
          .activation = activation,
          .x = AT(x),
          .y = AT(y),
          .mean = FLOATS(mean),
          .rstd = FLOATS(rstd),
          .dtype = dtype,
          .d_y = AT(d_y),
          .weight = FLOATS(weight),
          .sums = FLOATS(sums),
          .inverse_count = FLOATS(share),
          .d_x = AT(d_x),
          .accumulate = accumulate});
    array *const arrays[] = {&x,    &y,    &r,     &d_y,     &d_x,  &d_r,    &all,
                             &mean, &rstd, &share, &running, &sums, &weight, &bias};
    EACH(i, arrays) free(arrays[i]->host), free(arrays[i]->first);
    gpu_release();
}

static void test_steps(void)
{
    static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
    static const int64_t sizes[][2] = {{1, 1}, {3, 5}, {64, 16}, {65, 33}, {700, 3}, {9, 130}};
    gpu_open();
    EACH(s, sizes)
    EACH(t, dtypes)
    for (int options = 0; options < 4; options++)
        check_case(sizes[s][0], sizes[s][1], dtypes[t], options & 1, options & 2, options == 3);
    gpu_close();
}

/* The statistics of a pass without gradients, and values that are no numbers. */
static void test_running(void)
{
    gpu_open();
    array running = make(2 * 7, DTRAIN_DTYPE_F32), mean = make(7, DTRAIN_DTYPE_F32),
          rstd = make(7, DTRAIN_DTYPE_F32);
    for (int i = 7; i < 14; i++) ((float *)running.host)[i] = (float)i;
    put_back(&running);
    STEP(batchnorm_statistics, rstd, 1e-6,
         {0, 7, 1e-5f, 0.1f, NULL, FLOATS(mean), FLOATS(rstd), NULL, FLOATS(running),
          FLOATS(running) + 7});
    const float values[4] = {1, NAN, 2, 3};
    float part[5];
    dtrain_batchnorm_moments_args args = {.rows = 2,
                                          .n = 2,
                                          .x = gpu_give(values, sizeof values, 0),
                                          .sums = (float *)gpu_take(sizeof part, 0),
                                          .dtype = DTRAIN_DTYPE_F32};
    CHECK(gpu->ops->batchnorm_moments(gpu, &args) == DTRAIN_OK);
    gpu_read(part, args.sums, sizeof part);
    CHECK(part[0] == 2 && part[1] == 1.5f && part[3] == 0.5f && isnan(part[2]) && isnan(part[4]));
    free(running.host), free(running.first), free(mean.host), free(mean.first), free(rstd.host),
        free(rstd.first);
    gpu_release();
    gpu_close();
}

int main(int argc, char **argv)
{
    const char *missing = gpu_missing();
    test_begin(argc, argv);
    if (missing) {
        SKIP(test_batchnorm, missing);
        return test_summary();
    }
    RUN(test_steps);
    RUN(test_running);
    return test_summary();
}
