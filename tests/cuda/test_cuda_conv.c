/* Tests of convolution.cuh and pooling.cuh against loops in double, for every dtype, with all options of the
 * arguments; every thread order must leave the same bits. */
#include "test.h"
#include "dtrain.h"
#include "naive_device.h"
#include "cuda_testing.h"

static const dtrain_dtype dtypes[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};

typedef struct shape {
    int64_t batch, height, width, in, out, groups;
    int64_t kernel[2], stride[2], padding[2], dilation[2];
} shape;

static dtrain_windows2d windows_of(const shape *s)
{
    dtrain_windows2d w;
    const int64_t size[2] = {s->height, s->width};
    int64_t count[2];
    memset(&w, 0, sizeof w);
    w.batch = s->batch, w.height = s->height, w.width = s->width, w.channels = s->in;
    for (int a = 0; a < 2; a++) {
        w.kernel[a] = s->kernel[a], w.stride[a] = s->stride[a];
        w.padding[a] = s->padding[a], w.dilation[a] = s->dilation[a];
        count[a] =
            (size[a] + 2 * s->padding[a] - s->dilation[a] * (s->kernel[a] - 1) - 1) / s->stride[a] +
            1;
    }
    w.out_height = count[0], w.out_width = count[1];
    return w;
}

/* A tensor on the host, as it was, and on the device; `want` is what the loops leave. */
typedef struct tensor {
    void *before, *want, *first, *device;
    int64_t count;
    dtrain_dtype dtype;
} tensor;

static uint64_t stream;
static size_t bytes_of(const tensor *t) { return (size_t)t->count * dtrain_dtype_bytes(t->dtype); }

static tensor take(int64_t count, dtrain_dtype dtype)
{
    tensor t = {NULL, NULL, NULL, NULL, count, dtype};
    t.before = gpu_noise(count, dtype, ++stream, 1);
    t.want = malloc(bytes_of(&t));
    memcpy(t.want, t.before, bytes_of(&t));
    t.device = gpu_give(t.before, bytes_of(&t), 0);
    return t;
}

static void drop(tensor *t) { free(t->before), free(t->want), free(t->first); }

/* Compares with the loops the first time, and with the bits of that time from then on. */
static void check(const char *what, tensor *t, double terms)
{
    void *got = malloc(bytes_of(t));
    gpu_read(got, t->device, bytes_of(t));
    if (t->first) CHECK_MSG(memcmp(got, t->first, bytes_of(t)) == 0, "%s: other bits", what);
    for (int64_t i = 0; i < t->count && !t->first; i++) {
        const double g = gpu_get(got, i, t->dtype), w = gpu_get(t->want, i, t->dtype);
        const double error =
            3 * gpu_rounding(t->dtype) * fabs(w) + 4e-6 * sqrt(terms) * (1 + fabs(w));
        if (fabs(g - w) <= error || (isnan(g) && isnan(w)) || g == w) continue;
        CHECK_MSG(0, "%s (%s): element %lld of %lld is %.9g, expected %.9g", what,
                  dtrain_dtype_name(t->dtype), (long long)i, (long long)t->count, g, w);
        break;
    }
    CHECK(1);
    if (t->first) free(got);
    else t->first = got;
    gpu_write(t->device, t->before, bytes_of(t));
}

static void check_conv(const shape *s, dtrain_dtype dtype, dtrain_dtype x_dtype, bool accumulate)
{
    const dtrain_windows2d w = windows_of(s);
    const int64_t pixels = w.batch * w.out_height * w.out_width, taps = s->kernel[0] * s->kernel[1];
    tensor x = take(s->batch * s->height * s->width * s->in, dtype);
    tensor weight = take(s->out * (s->in / s->groups) * taps, dtype);
    tensor bias = take(s->out, DTRAIN_DTYPE_F32), y = take(pixels * s->out, dtype);
    tensor d_y = take(pixels * s->out, dtype), d_x = take(x.count, x_dtype);
    tensor d_weight = take(weight.count, DTRAIN_DTYPE_F32), d_bias = take(s->out, DTRAIN_DTYPE_F32);
    dtrain_conv2d_args forward = {.windows = w,
                                  .out_channels = s->out,
                                  .groups = s->groups,
                                  .x = x.before,
                                  .weight = weight.before,
                                  .bias = accumulate ? NULL : (float *)bias.before,
                                  .y = y.want,
                                  .dtype = dtype};
    dtrain_conv2d_backward_args backward = {.windows = w,
                                            .out_channels = s->out,
                                            .groups = s->groups,
                                            .x = x.before,
                                            .weight = weight.before,
                                            .d_y = d_y.before,
                                            .d_x = d_x.want,
                                            .d_weight = (float *)d_weight.want,
                                            .d_bias = (float *)d_bias.want,
                                            .accumulate_x = accumulate,
                                            .accumulate_weight = accumulate,
                                            .accumulate_bias = accumulate,
                                            .dtype = dtype,
                                            .x_dtype = x_dtype};
    naive_conv2d(gpu, &forward);
    naive_conv2d_backward(gpu, &backward);
    forward.x = backward.x = x.device;
    forward.weight = backward.weight = weight.device;
    forward.bias = forward.bias ? (float *)bias.device : NULL;
    forward.y = y.device;
    backward.d_y = d_y.device, backward.d_x = d_x.device;
    backward.d_weight = (float *)d_weight.device, backward.d_bias = (float *)d_bias.device;
    EACH_ORDER(order)
    {
        CHECK_MSG(gpu->ops->conv2d(gpu, &forward) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK_MSG(gpu->ops->conv2d_backward(gpu, &backward) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        check("y", &y, (double)(taps * s->in));
        check("d_x", &d_x, (double)(taps * s->out));
        check("d_weight", &d_weight, (double)pixels);
        check("d_bias", &d_bias, (double)pixels);
    }
    drop(&x), drop(&weight), drop(&bias), drop(&y), drop(&d_y), drop(&d_x), drop(&d_weight);
    drop(&d_bias);
    gpu_release();
}

static const shape shapes[] = {{2, 8, 8, 3, 16, 1, {3, 3}, {1, 1}, {1, 1}, {1, 1}},
                               {1, 7, 5, 16, 33, 1, {3, 3}, {2, 2}, {1, 1}, {1, 1}},
                               {1, 6, 6, 17, 5, 1, {1, 1}, {1, 1}, {0, 0}, {1, 1}},
                               {1, 5, 5, 4, 6, 1, {1, 1}, {2, 2}, {0, 0}, {1, 1}},
                               {1, 9, 8, 6, 9, 3, {3, 2}, {1, 2}, {2, 0}, {2, 1}},
                               {2, 7, 7, 35, 35, 35, {3, 3}, {2, 1}, {1, 1}, {1, 1}},
                               {3, 12, 12, 2, 3, 1, {5, 3}, {1, 1}, {2, 1}, {1, 1}},
                               {2, 13, 12, 3, 3, 3, {3, 3}, {1, 1}, {1, 2}, {1, 1}}};

static void test_conv2d(void)
{
    gpu_open();
    EACH(s, shapes)
    EACH(d, dtypes)
    {
        if (!test_full() && d && (s + d) % 3) continue;
        check_conv(&shapes[s], dtypes[d], (s + d) % 2 ? dtypes[d] : DTRAIN_DTYPE_F32, (s + d) % 2);
    }
    gpu_close();
}

/* `special`: NaN, infinities and equal maxima. */
static void check_pool(const shape *s, dtrain_dtype dtype, bool maximum, bool special)
{
    const dtrain_windows2d w = windows_of(s);
    const int64_t count = w.batch * w.out_height * w.out_width * w.channels;
    tensor x = take(s->batch * s->height * s->width * s->in, dtype), y = take(count, dtype);
    tensor d_y = take(count, dtype), d_x = take(x.count, dtype),
           index = take(count, DTRAIN_DTYPE_F32);
    for (int64_t i = 0; special && i < x.count; i++)
        naive_put(x.before, dtype, i,
                  i % 17 == 0   ? NAN
                  : i % 13 == 0 ? -INFINITY
                                : (double)(i % 3));
    gpu_write(x.device, x.before, bytes_of(&x));
    dtrain_pool2d_args forward = {.windows = w,
                                  .maximum = maximum,
                                  .x = x.before,
                                  .y = y.want,
                                  .index = (int32_t *)index.want,
                                  .dtype = dtype};
    dtrain_pool2d_backward_args backward = {.windows = w,
                                            .maximum = maximum,
                                            .accumulate = maximum,
                                            .index = (int32_t *)index.want,
                                            .d_y = d_y.before,
                                            .d_x = d_x.want,
                                            .dtype = dtype};
    naive_pool2d(gpu, &forward);
    naive_pool2d_backward(gpu, &backward);
    forward.x = x.device, forward.y = y.device, forward.index = (int32_t *)index.device;
    backward.index = forward.index, backward.d_y = d_y.device, backward.d_x = d_x.device;
    EACH_ORDER(order)
    {
        int32_t *taps = (int32_t *)malloc(bytes_of(&index));
        CHECK(gpu->ops->pool2d(gpu, &forward) == DTRAIN_OK);
        CHECK(gpu->ops->pool2d_backward(gpu, &backward) == DTRAIN_OK);
        gpu_read(taps, index.device, bytes_of(&index));
        CHECK(!maximum || memcmp(taps, index.want, bytes_of(&index)) == 0);
        check("pool y", &y, (double)(s->kernel[0] * s->kernel[1]));
        check("pool d_x", &d_x, (double)(s->kernel[0] * s->kernel[1]));
        free(taps);
    }
    drop(&x), drop(&y), drop(&d_y), drop(&d_x), drop(&index);
    gpu_release();
}

static void test_pool2d(void)
{
    static const shape pools[] = {{2, 6, 8, 5, 5, 1, {2, 2}, {2, 2}, {0, 0}, {1, 1}},
                                  {1, 9, 7, 33, 33, 1, {3, 3}, {2, 1}, {1, 1}, {1, 1}},
                                  {2, 5, 6, 3, 3, 1, {3, 2}, {1, 3}, {1, 0}, {1, 1}},
                                  {3, 5, 4, 7, 7, 1, {5, 4}, {1, 1}, {0, 0}, {1, 1}}};
    gpu_open();
    EACH(s, pools)
    EACH(d, dtypes)
    {
        check_pool(&pools[s], dtypes[d], true, false);
        check_pool(&pools[s], dtypes[d], true, true);
        check_pool(&pools[s], dtypes[d], false, false);
    }
    gpu_close();
}

static void test_refusals(void)
{
    dtrain_conv2d_args args;
    gpu_open();
    memset(&args, 0, sizeof args);
    args.windows = windows_of(&shapes[0]);
    args.out_channels = 16;
    args.groups = 2;
    CHECK(gpu->ops->conv2d(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "2 groups"));
    args.groups = 1;
    args.dtype = DTRAIN_DTYPE_I32;
    CHECK(gpu->ops->conv2d(gpu, &args) == DTRAIN_ERROR_UNSUPPORTED);
    args.dtype = DTRAIN_DTYPE_F32;
    args.windows.out_width = 100;
    CHECK(gpu->ops->conv2d(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "do not fit"));
    gpu_close();
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    const char *missing = gpu_missing();
    if (missing) {
        SKIP(test_cuda_conv, missing);
        return test_summary();
    }
    RUN(test_conv2d);
    RUN(test_pool2d);
    RUN(test_refusals);
    return test_summary();
}
