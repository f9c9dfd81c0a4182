/* Tests of elementwise.cuh and reductions.cuh: elementwise kernels and reductions against plain loops
 * in double, for every dtype, for aligned and for shifted pointers, in every thread order. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"

static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
static const int64_t counts[] = {1, 3, 4, 7, 8, 9, 63, 64, 1000, 4099};
static const size_t shifts[] = {0, 1}; /* elements from an aligned address */

static size_t width_of(dtrain_dtype dtype) { return dtrain_dtype_bytes(dtype); }

/* One vector on the host and on the device. */
typedef struct vector {
    void *host, *device;
    int64_t count;
    dtrain_dtype dtype;
} vector;

static uint64_t stream;

static vector make(int64_t count, dtrain_dtype dtype, size_t shift)
{
    vector v = {NULL, NULL, count, dtype};
    v.host = gpu_noise(count, dtype, ++stream, 1);
    v.device = gpu_give(v.host, (size_t)count * width_of(dtype), shift * width_of(dtype));
    return v;
}

static double at(const vector *v, int64_t i) { return gpu_get(v->host, i, v->dtype); }
static void restore(const vector *v)
{
    gpu_write(v->device, v->host, (size_t)v->count * width_of(v->dtype));
}

/* What is on the device now, in memory the caller frees. */
static void *now(const vector *v)
{
    void *got = malloc((size_t)v->count * width_of(v->dtype) + 1);
    gpu_read(got, v->device, (size_t)v->count * width_of(v->dtype));
    return got;
}

static void check_now(const char *what, const vector *v, const double *want, double tolerance)
{
    void *got = now(v);
    gpu_near(what, got, want, v->count, v->dtype, tolerance);
    free(got);
}

static double *doubles(int64_t count)
{
    return (double *)calloc((size_t)count + 1, sizeof(double));
}

static void drop(vector *v) { free(v->host); }

/* ---- add ---- */

static void check_add(int64_t count, dtrain_dtype x_dtype, dtrain_dtype y_dtype, size_t shift)
{
    vector x = make(count, x_dtype, shift), y = make(count, y_dtype, 0);
    vector out = make(count, x_dtype, 0);
    double *want = doubles(count);
    dtrain_add_args args = {count, x.device, y.device, out.device, x_dtype, y_dtype};
    for (int64_t i = 0; i < count; i++) want[i] = at(&x, i) + at(&y, i);
    CHECK(gpu->ops->add(gpu, &args) == DTRAIN_OK);
    check_now("add", &out, want, 1e-7);
    args.out = x.device;
    CHECK(gpu->ops->add(gpu, &args) == DTRAIN_OK);
    check_now("add into x", &x, want, 1e-7);
    if (x_dtype == y_dtype) {
        restore(&x);
        args.out = y.device;
        CHECK(gpu->ops->add(gpu, &args) == DTRAIN_OK);
        check_now("add into y", &y, want, 1e-7);
    }
    drop(&x), drop(&y), drop(&out), free(want);
    gpu_release();
}

static void test_add(void)
{
    gpu_open();
    EACH_ORDER(order)
    EACH(c, counts)
    EACH(a, dtypes)
    EACH(b, dtypes)
    EACH(s, shifts) check_add(counts[c], dtypes[a], dtypes[b], shifts[s]);
    gpu_close();
}

/* ---- axpby ---- */

static void check_axpby(int64_t count, dtrain_dtype dtype, size_t shift, bool accumulate)
{
    vector x = make(count, dtype, 0), y = make(count, dtype, shift);
    double *want = doubles(count);
    dtrain_axpby_args args = {count,    accumulate, 0.75f, -1.5f, x.device,
                              y.device, false,      dtype, NULL};
    for (int64_t i = 0; i < count; i++)
        want[i] = 0.75 * at(&x, i) + (accumulate ? -1.5 * at(&y, i) : 0);
    if (!accumulate) memset(y.host, 0xff, (size_t)count * width_of(dtype)); /* NaN: not read */
    restore(&y);
    CHECK(gpu->ops->axpby(gpu, &args) == DTRAIN_OK);
    check_now("axpby", &y, want, 4e-7);
    restore(&y);
    args.broadcast = true;
    for (int64_t i = 0; i < count; i++)
        want[i] = 0.75 * at(&x, 0) + (accumulate ? -1.5 * at(&y, i) : 0);
    CHECK(gpu->ops->axpby(gpu, &args) == DTRAIN_OK);
    check_now("axpby of one", &y, want, 4e-7);
    restore(&y);
    args.x = NULL;
    args.broadcast = false;
    for (int64_t i = 0; i < count; i++) want[i] = 0.75 + (accumulate ? -1.5 * at(&y, i) : 0);
    CHECK(gpu->ops->axpby(gpu, &args) == DTRAIN_OK);
    check_now("axpby of ones", &y, want, 4e-7);
    args.x = args.y = x.device;
    for (int64_t i = 0; i < count; i++) want[i] = at(&x, i) * (0.75 - (accumulate ? 1.5 : 0));
    CHECK(gpu->ops->axpby(gpu, &args) == DTRAIN_OK);
    check_now("axpby of itself", &x, want, 4e-7);
    drop(&x), drop(&y), free(want);
    gpu_release();
}

static void test_axpby(void)
{
    gpu_open();
    EACH_ORDER(order)
    EACH(c, counts)
    EACH(d, dtypes)
    EACH(s, shifts)
    {
        check_axpby(counts[c], dtypes[d], shifts[s], false);
        check_axpby(counts[c], dtypes[d], shifts[s], true);
    }
    gpu_close();
}

/* ---- dropout ---- */

static void check_dropout(int64_t count, dtrain_dtype dtype, size_t shift, float probability,
                          bool accumulate)
{
    const uint64_t seed = 0x123456789abcdefu, philox_stream = 0xfedcba9876543u;
    vector x = make(count, dtype, shift), y = make(count, dtype, shift);
    double *want = doubles(count);
    const double scale = probability < 1 ? 1 / (1 - (double)probability) : 0;
    dtrain_step_scalars scalars;
    dtrain_dropout_args args = {count,    probability, accumulate, seed,  philox_stream,
                                x.device, y.device,    NULL,       dtype, {0}};
    memset(&scalars, 0, sizeof scalars);
    for (int64_t i = 0; i < count; i++) {
        const bool kept = dtrain_random_uniform(seed, philox_stream, (uint64_t)i) >= probability;
        want[i] = (kept ? scale * at(&x, i) : 0) + (accumulate ? at(&y, i) : 0);
    }
    if (!accumulate) memset(y.host, 0xff, (size_t)count * width_of(dtype));
    restore(&y);
    CHECK(gpu->ops->dropout(gpu, &args) == DTRAIN_OK);
    check_now("dropout", &y, want, 4e-7);
    scalars.seed = 0xffffffff00000005u; /* the sum wraps */
    args.seed = seed - scalars.seed;
    args.scalars = (const dtrain_step_scalars *)gpu_give(&scalars, sizeof scalars, 0);
    restore(&y);
    CHECK(gpu->ops->dropout(gpu, &args) == DTRAIN_OK);
    check_now("dropout with a step's seed", &y, want, 4e-7);
    if (!accumulate) {
        args.y = x.device;
        CHECK(gpu->ops->dropout(gpu, &args) == DTRAIN_OK);
        check_now("dropout in place", &x, want, 4e-7);
    }
    drop(&x), drop(&y), free(want);
    gpu_release();
}

static void test_dropout(void)
{
    const float probabilities[] = {0, 0.1f, 0.5f, 1};
    gpu_open();
    EACH_ORDER(order)
    EACH(c, counts)
    EACH(d, dtypes)
    EACH(s, shifts)
    EACH(p, probabilities)
    {
        check_dropout(counts[c], dtypes[d], shifts[s], probabilities[p], false);
        if (p == 1) check_dropout(counts[c], dtypes[d], shifts[s], probabilities[p], true);
    }
    gpu_close();
}

/* A dropped NaN is gone, a kept one stays. */
static void test_dropout_nan(void)
{
    float x[64], y[64];
    bool good = true;
    dtrain_dropout_args args = {64, 0.5f, false, 3, 4, NULL, NULL, NULL, DTRAIN_DTYPE_F32, {0}};
    gpu_open();
    for (int i = 0; i < 64; i++) x[i] = NAN;
    args.x = gpu_give(x, sizeof x, 0);
    args.y = gpu_take(sizeof y, 0);
    CHECK(gpu->ops->dropout(gpu, &args) == DTRAIN_OK);
    gpu_read(y, args.y, sizeof y);
    for (int i = 0; i < 64; i++)
        good = good && (dtrain_random_uniform(3, 4, (uint64_t)i) >= 0.5f ? isnan(y[i]) : y[i] == 0);
    CHECK(good);
    args.probability = NAN;
    CHECK(gpu->ops->dropout(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    gpu_close();
}

/* ---- convert ---- */

static uint16_t rounded(float x, dtrain_dtype dtype) { return dtrain_half_from_f32(dtype, x); }

static void check_convert(dtrain_dtype from, dtrain_dtype to, const void *x, int64_t count,
                          size_t shift)
{
    const size_t x_bytes = (size_t)count * width_of(from), y_bytes = (size_t)count * width_of(to);
    unsigned char *y = (unsigned char *)malloc(y_bytes);
    int64_t wrong = -1;
    dtrain_convert_args args = {count, gpu_give(x, x_bytes, shift * width_of(from)),
                                gpu_take(y_bytes, 0), from, to};
    CHECK(gpu->ops->convert(gpu, &args) == DTRAIN_OK);
    gpu_read(y, args.y, y_bytes);
    for (int64_t i = 0; i < count && wrong < 0; i++) {
        const float value = (float)gpu_get(x, i, from);
        const uint16_t half = isnan(value) ? 0x7fff : rounded(value, to); /* as the hardware */
        if (from == to)
            wrong = memcmp(y + (size_t)i * width_of(to), (const char *)x + (size_t)i * width_of(to),
                           width_of(to))
                        ? i
                        : -1;
        else if (to == DTRAIN_DTYPE_F32 && isnan(value)) wrong = isnan(gpu_get(y, i, to)) ? -1 : i;
        else if (to == DTRAIN_DTYPE_F32) wrong = memcmp(y + 4 * i, &value, 4) ? i : -1;
        else wrong = memcmp(y + 2 * i, &half, 2) ? i : -1;
    }
    CHECK_MSG(wrong < 0, "%s to %s: element %lld of %lld", dtrain_dtype_name(from),
              dtrain_dtype_name(to), (long long)wrong, (long long)count);
    free(y);
    gpu_release();
}

/* All halves there are; and floats whose bits are random. */
static void test_convert(void)
{
    uint16_t *halves = (uint16_t *)malloc(65536 * 2);
    uint32_t *words = (uint32_t *)malloc(65537 * 4);
    gpu_open();
    for (uint32_t i = 0; i < 65536; i++) halves[i] = (uint16_t)i;
    for (uint64_t i = 0; i < 65536; i++) words[i] = (uint32_t)((i + 1) * 0x9e3779b97f4a7c15u >> 32);
    words[65536] = 0x477ff000u; /* 65520: the first that is infinite in fp16 */
    EACH_ORDER(order)
    EACH(a, dtypes)
    EACH(b, dtypes)
    {
        if (dtypes[a] == DTRAIN_DTYPE_F32)
            check_convert(DTRAIN_DTYPE_F32, dtypes[b], words, 65537, 0);
        else check_convert(dtypes[a], dtypes[b], halves, 65536, 0);
        EACH(c, counts)
        if (counts[c] < 65536) check_convert(dtypes[a], dtypes[b], words, counts[c], 1);
    }
    dtrain_convert_args args = {5, NULL, NULL, DTRAIN_DTYPE_I32, DTRAIN_DTYPE_F32};
    CHECK(gpu->ops->convert(gpu, &args) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(strstr(dtrain_last_error(), "i32") != NULL);
    gpu_close();
    free(halves);
    free(words);
}

/* ---- activation backward ---- */

static double slope(uint32_t activation, double x)
{
    const double c = sqrt(2 / 3.14159265358979323846);
    const double t = tanh(c * (x + 0.044715 * x * x * x));
    if (activation == DTRAIN_ACTIVATION_RELU) return x > 0 ? 1 : 0;
    if (activation == DTRAIN_ACTIVATION_NONE) return 1;
    if (activation == DTRAIN_ACTIVATION_SILU)
        return (1 + x * exp(-x) / (1 + exp(-x))) / (1 + exp(-x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
}

static void check_columns(const float *d_bias, const double *want, const float *before, int64_t n,
                          int64_t rows, double rounding)
{
    float *got = (float *)malloc((size_t)n * sizeof(float));
    gpu_read(got, d_bias, (size_t)n * sizeof(float));
    for (int64_t j = 0; j < n; j++) {
        const double expected = want[j] + (before ? (double)before[j] : 0);
        const double limit = 1e-6 * sqrt((double)rows) + rounding * sqrt((double)rows);
        if (fabs((double)got[j] - expected) <= limit * (1 + fabs(expected))) continue;
        CHECK_MSG(0, "d_bias[%lld] of (%lld,%lld) is %g, expected %g", (long long)j,
                  (long long)rows, (long long)n, (double)got[j], expected);
        break;
    }
    CHECK(rows >= 0);
    free(got);
}

static void check_activation(uint32_t activation, int64_t rows, int64_t n, dtrain_dtype dtype,
                             size_t shift, bool accumulate)
{
    const int64_t count = rows * n;
    vector x = make(count, dtype, 0), d_out = make(count, dtype, shift);
    vector d_in = make(count, dtype, 0), bias = make(n, DTRAIN_DTYPE_F32, 1);
    double *want = doubles(count), *columns = doubles(n);
    dtrain_activation_backward_args args = {
        activation,  accumulate,           rows, n, x.device, d_out.device,
        d_in.device, (float *)bias.device, dtype};
    const float *before = accumulate ? (const float *)bias.host : NULL;
    if (count) gpu_set(x.host, 0, dtype, 0), restore(&x);
    for (int64_t i = 0; i < count; i++) {
        want[i] = at(&d_out, i) * slope(activation, at(&x, i));
        columns[i % n] += want[i];
    }
    if (!accumulate) {
        memset(bias.host, 0xff, (size_t)n * sizeof(float));
        restore(&bias);
    }
    if (activation == DTRAIN_ACTIVATION_NONE) args.x = NULL;
    CHECK(gpu->ops->activation_backward(gpu, &args) == DTRAIN_OK);
    check_now("d_in", &d_in, want, 1e-6);
    check_columns((const float *)bias.device, columns, before, n, rows, 0);
    restore(&bias);
    args.d_in = d_out.device;
    CHECK(gpu->ops->activation_backward(gpu, &args) == DTRAIN_OK);
    check_now("d_in in place", &d_out, want, 1e-6);
    check_columns((const float *)bias.device, columns, before, n, rows, 0);
    restore(&d_out);
    args.d_bias = NULL;
    args.d_in = d_in.device;
    CHECK(gpu->ops->activation_backward(gpu, &args) == DTRAIN_OK);
    check_now("d_in without d_bias", &d_in, want, 1e-6);
    drop(&x), drop(&d_out), drop(&d_in), drop(&bias), free(want), free(columns);
    gpu_release();
}

static void test_activation(void)
{
    const int64_t shapes[][2] = {{1, 1},    {1, 8},    {5, 3},    {8, 260},  {63, 40},
                                 {64, 256}, {65, 257}, {200, 24}, {70, 520}, {2100, 8}};
    gpu_open();
    EACH_ORDER(order)
    EACH(s, shapes)
    EACH(d, dtypes)
    EACH(h, shifts)
    for (uint32_t activation = DTRAIN_ACTIVATION_NONE; activation <= DTRAIN_ACTIVATION_SILU;
         activation++) {
        if (!test_full() && (s + d + h + activation + (size_t)order) % 2) continue;
        check_activation(activation, shapes[s][0], shapes[s][1], dtypes[d], shifts[h], h == s % 2);
    }
    gpu_close();
}

/* Column sums have the same bits in every thread order, and whatever the address. */
static void test_column_bits(void)
{
    const int64_t rows = 700, n = 72;
    vector d[2];
    float *first = (float *)malloc((size_t)n * sizeof(float));
    float *got = (float *)malloc((size_t)n * sizeof(float));
    gpu_open();
    float *bias = (float *)gpu_take((size_t)n * sizeof(float), 0);
    d[0] = make(rows * n, DTRAIN_DTYPE_BF16, 0);
    d[1] = d[0];
    d[1].device = gpu_give(d[0].host, (size_t)(rows * n) * 2, 2);
    EACH_ORDER(order)
    for (int shift = 0; shift < 2; shift++) {
        dtrain_activation_backward_args args = {
            DTRAIN_ACTIVATION_NONE, false, rows, n, NULL, d[shift].device, d[shift].device, bias,
            DTRAIN_DTYPE_BF16};
        CHECK(gpu->ops->activation_backward(gpu, &args) == DTRAIN_OK);
        gpu_read(got, bias, (size_t)n * sizeof(float));
        if (order == 0 && shift == 0) memcpy(first, got, (size_t)n * sizeof(float));
        CHECK(memcmp(first, got, (size_t)n * sizeof(float)) == 0);
    }
    gpu_close();
    free(d[0].host), free(first), free(got);
}

static void test_activation_edges(void)
{
    float x[8] = {40, -40, 11, -11, 1e30f, -1e30f, NAN, 9}, one[8], got[8], bias[8];
    dtrain_activation_backward_args args = {
        DTRAIN_ACTIVATION_GELU, false, 1, 8, NULL, NULL, NULL, NULL, DTRAIN_DTYPE_F32};
    gpu_open();
    for (int i = 0; i < 8; i++) one[i] = 1;
    args.x = gpu_give(x, sizeof x, 0);
    args.d_out = gpu_give(one, sizeof one, 0);
    args.d_in = gpu_take(sizeof got, 0);
    CHECK(gpu->ops->activation_backward(gpu, &args) == DTRAIN_OK);
    gpu_read(got, args.d_in, sizeof got);
    for (int i = 0; i < 8; i++)
        CHECK_MSG(i == 6 ? isnan(got[i]) : fabs((double)got[i] - (x[i] > 0)) < 1e-6,
                  "slope of gelu at %g is %g", (double)x[i], (double)got[i]);
    args.rows = 0; /* no rows: the sums are zero */
    args.d_bias = (float *)gpu_give(one, sizeof one, 0);
    CHECK(gpu->ops->activation_backward(gpu, &args) == DTRAIN_OK);
    gpu_read(bias, args.d_bias, sizeof bias);
    for (int i = 0; i < 8; i++) CHECK(bias[i] == 0);
    args.activation = 9;
    CHECK(gpu->ops->activation_backward(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    args.activation = DTRAIN_ACTIVATION_NONE;
    args.dtype = DTRAIN_DTYPE_I64;
    CHECK(gpu->ops->activation_backward(gpu, &args) == DTRAIN_ERROR_UNSUPPORTED);
    gpu_close();
}

/* ---- sum, clip ---- */

static const int64_t sum_counts[] = {0, 1, 5, 8, 31, 2047, 8192, 8193, 100003, 1000000};

static void check_sum(int64_t count, dtrain_dtype dtype, bool squares, bool accumulate)
{
    vector x = make(count ? count : 1, dtype, 0), moved = x;
    double want = 0, size = 0, before = 0.25, total[2][GPU_ORDERS];
    float out = -1, half = 0.5f;
    double *device_total = (double *)gpu_take(sizeof(double), 0);
    float *device_out = (float *)gpu_take(sizeof(float), 0);
    dtrain_sum_args args = {count,        squares,    accumulate, 0.5, x.device,
                            device_total, device_out, dtype,      NULL};
    if (squares) { /* half of it from the device's memory */
        float *factor = (float *)gpu_take(sizeof half, 0);
        gpu_write(factor, &half, sizeof half);
        args.scale = 1;
        args.factor = factor;
    }
    moved.device = gpu_give(x.host, (size_t)x.count * width_of(dtype), width_of(dtype));
    for (int64_t i = 0; i < count; i++) {
        want += squares ? at(&x, i) * at(&x, i) : at(&x, i);
        size += fabs(at(&x, i)) * (squares ? fabs(at(&x, i)) : 1);
    }
    want = 0.5 * want + (accumulate ? before : 0);
    for (int shift = 0; shift < 2; shift++) {
        args.x = shift ? moved.device : x.device;
        EACH_ORDER(order)
        {
            gpu_write(device_total, &before, sizeof before);
            CHECK(gpu->ops->sum(gpu, &args) == DTRAIN_OK);
            gpu_read(&total[shift][order], device_total, sizeof(double));
            gpu_read(&out, device_out, sizeof out);
            CHECK(out == (float)total[shift][order]);
            CHECK(memcmp(&total[shift][order], &total[0][0], sizeof(double)) == 0);
        }
    }
    CHECK_MSG(fabs(total[0][0] - want) <= 1e-12 * (1 + size), "sum of %lld: %.17g, expected %.17g",
              (long long)count, total[0][0], want);
    args.out = NULL;
    args.accumulate = false;
    CHECK(gpu->ops->sum(gpu, &args) == DTRAIN_OK);
    args.total = NULL;
    args.out = device_out;
    CHECK(gpu->ops->sum(gpu, &args) == DTRAIN_OK);
    gpu_read(&out, device_out, sizeof out);
    CHECK_CLOSE(out, want - (accumulate ? before : 0), 1e-6);
    drop(&x);
    gpu_release();
}

static void test_sum(void)
{
    gpu_open();
    EACH(c, sum_counts)
    EACH(d, dtypes)
    {
        if (!test_full() && sum_counts[c] == 1000000 && dtypes[d] != DTRAIN_DTYPE_F32) continue;
        check_sum(sum_counts[c], dtypes[d], false, false);
        check_sum(sum_counts[c], dtypes[d], true, c % 2 == 0);
    }
    dtrain_sum_args args = {1, false, true, 1, NULL, NULL, NULL, DTRAIN_DTYPE_F32, NULL};
    CHECK(gpu->ops->sum(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    args.dtype = DTRAIN_DTYPE_I32;
    CHECK(gpu->ops->sum(gpu, &args) == DTRAIN_ERROR_UNSUPPORTED);
    gpu_close();
}

/* Enough elements for every block, each of which has to be counted once: exact in integers. */
static void test_large_sum(void)
{
    const int64_t count = 20000003;
    float out;
    gpu_open();
    float *x = (float *)gpu_take((size_t)count * sizeof(float), 0);
    dtrain_axpby_args ones = {count, false, 1, 0, NULL, x, false, DTRAIN_DTYPE_F32, NULL};
    dtrain_sum_args args = {count, false, false, 1, x, NULL, NULL, DTRAIN_DTYPE_F32, NULL};
    double *total = (double *)gpu_take(sizeof(double), 0), got;
    args.total = total;
    args.out = (float *)gpu_take(sizeof(float), 0);
    CHECK(gpu->ops->axpby(gpu, &ones) == DTRAIN_OK && gpu->ops->sum(gpu, &args) == DTRAIN_OK);
    gpu_read(&got, total, sizeof got);
    gpu_read(&out, args.out, sizeof out);
    CHECK(got == 20000003.0 && out == 20000003.0f - 0.0f);
    gpu_close();
}

/* The sum of squares comes in three parts, as over ranks that share a model. */
static void check_clip(double sum_squares, float max_norm, float grad_scale, uint32_t skip)
{
    const double sums[3] = {sum_squares / 4, sum_squares / 2, sum_squares / 4};
    dtrain_step_scalars scalars, got;
    float norm;
    const double want_norm = sqrt(sum_squares) * (double)grad_scale;
    const double factor = (double)max_norm / (want_norm + 1e-6);
    memset(&scalars, 0, sizeof scalars);
    scalars.seed = 77;
    scalars.lr = 0.5f;
    scalars.grad_scale = grad_scale;
    dtrain_clip_args args = {(const double *)gpu_give(sums, sizeof sums, 0),
                             max_norm,
                             (dtrain_step_scalars *)gpu_give(&scalars, sizeof scalars, 0),
                             (float *)gpu_take(sizeof(float), 0),
                             NULL,
                             3};
    CHECK(gpu->ops->clip(gpu, &args) == DTRAIN_OK);
    gpu_read(&got, args.scalars, sizeof got);
    gpu_read(&norm, args.norm, sizeof norm);
    CHECK(got.skip == skip && got.seed == 77 && got.lr == 0.5f);
    if (skip) CHECK(!isfinite(norm) && got.grad_scale == grad_scale);
    else CHECK_CLOSE(norm, want_norm, 1e-7);
    if (!skip && max_norm > 0 && factor < 1)
        CHECK_CLOSE(got.grad_scale, (double)grad_scale * factor, 2e-7);
    else CHECK(got.grad_scale == grad_scale);
    gpu_release();
}

static void test_clip(void)
{
    gpu_open();
    check_clip(16, 1, 1, 0);
    check_clip(16, 1, 0.125f, 0);
    check_clip(16, 4, 1, 0);
    check_clip(16, 0, 1, 0);
    check_clip(16, -1, 1, 0);
    check_clip(0, 1, 1, 0);
    check_clip((double)INFINITY, 1, 0.5f, 1);
    check_clip((double)NAN, 1, 0.5f, 1);
    check_clip((double)NAN, 0, 0.5f, 1);
    check_clip(1e300, 1, 1, 1); /* finite as a double, not as a float */
    gpu_close();
}

/* ---- All of them ---- */

/* So many elements that every thread comes round several times. */
static void test_large(void)
{
    const int64_t count = 600011;
    gpu_open();
    EACH(s, shifts)
    {
        check_add(count, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, shifts[s]);
        check_add(count, DTRAIN_DTYPE_F16, DTRAIN_DTYPE_F16, shifts[s]);
        check_axpby(count, DTRAIN_DTYPE_F32, shifts[s], true);
        check_axpby(count, DTRAIN_DTYPE_BF16, shifts[s], true);
        check_dropout(count, DTRAIN_DTYPE_F32, shifts[s], 0.1f, true);
        check_dropout(count, DTRAIN_DTYPE_F16, shifts[s], 0.1f, true);
        check_activation(DTRAIN_ACTIVATION_GELU, 601, 1000, DTRAIN_DTYPE_BF16, shifts[s], true);
    }
    gpu_close();
}

static void test_nothing(void)
{
    dtrain_add_args add = {0, NULL, NULL, NULL, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32};
    dtrain_axpby_args axpby = {0, true, 1, 1, NULL, NULL, false, DTRAIN_DTYPE_F32, NULL};
    dtrain_dropout_args dropout = {0, 0.5f, false, 1, 1, NULL, NULL, NULL, DTRAIN_DTYPE_F32, {0}};
    dtrain_convert_args convert = {0, NULL, NULL, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16};
    dtrain_convert_args equal = {0, NULL, NULL, DTRAIN_DTYPE_F32, DTRAIN_DTYPE_F32};
    dtrain_activation_backward_args columns = {
        DTRAIN_ACTIVATION_NONE, false, 0, 0, NULL, NULL, NULL, NULL, DTRAIN_DTYPE_F32};
    gpu_open();
    CHECK(gpu->ops->add(gpu, &add) == DTRAIN_OK);
    CHECK(gpu->ops->axpby(gpu, &axpby) == DTRAIN_OK);
    CHECK(gpu->ops->dropout(gpu, &dropout) == DTRAIN_OK);
    CHECK(gpu->ops->convert(gpu, &convert) == DTRAIN_OK);
    CHECK(gpu->ops->convert(gpu, &equal) == DTRAIN_OK);
    CHECK(gpu->ops->activation_backward(gpu, &columns) == DTRAIN_OK);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    add.y_dtype = DTRAIN_DTYPE_I64;
    axpby.dtype = DTRAIN_DTYPE_I64;
    dropout.dtype = DTRAIN_DTYPE_I64;
    CHECK(gpu->ops->add(gpu, &add) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(gpu->ops->axpby(gpu, &axpby) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(gpu->ops->dropout(gpu, &dropout) == DTRAIN_ERROR_UNSUPPORTED);
    gpu_close();
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (gpu_missing()) {
        SKIP(test_cuda_elementwise, gpu_missing());
        return test_summary();
    }
    RUN(test_add);
    RUN(test_axpby);
    RUN(test_dropout);
    RUN(test_dropout_nan);
    RUN(test_convert);
    RUN(test_activation);
    RUN(test_column_bits);
    RUN(test_activation_edges);
    RUN(test_sum);
    RUN(test_large_sum);
    RUN(test_clip);
    RUN(test_large);
    RUN(test_nothing);
    return test_summary();
}
