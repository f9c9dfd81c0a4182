/* test_conv.c: convolution and pooling: the kernels beside loops in double for every instruction set, type
 * and number of threads, and the operations of the tape beside PyTorch and finite differences. */
#define DTRAIN__SMALL (-1) /* threads share even the smallest job */
#include "device/cpu/cpu.c"
#include "instances.h"
#include "dtrain.h"

#include "test.h"
#include "naive_device.h"

enum { THREADS = 4 };

static dtrain_device *naive, *devices[THREADS]; /* devices[t] has t + 1 threads */

static const dtrain__kernels *kernels[INSTANCES];
static int kernel_count;

static void open_devices(void)
{
    CHECK(dtrain_device_create(naive_device_ops(), NULL, &naive) == DTRAIN_OK);
    for (uint32_t t = 0; t < THREADS; t++) {
        dtrain_device_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.thread_count = t + 1;
        desc.oversubscribed = true;
        CHECK(dtrain_device_create(NULL, &desc, &devices[t]) == DTRAIN_OK);
    }
    kernel_count = instances_find(kernels);
}

static void close_devices(void)
{
    for (int t = 0; t < THREADS; t++) dtrain_device_destroy(devices[t]);
    dtrain_device_destroy(naive);
}

static void use_kernels(int which)
{
    for (int t = 0; t < THREADS; t++) ((dtrain__cpu *)devices[t]->state)->kernels = kernels[which];
}

/* ---- Values ------------------------------------------------------------------------------------*/

/* A tensor in memory that is exactly as large. */
typedef struct values {
    void *data;
    int64_t count;
    dtrain_dtype dtype;
} values;

static size_t values_bytes(const values *v)
{
    return (size_t)v->count * dtrain_dtype_bytes(v->dtype);
}

static uint64_t stream;

static values noise(int64_t count, dtrain_dtype dtype)
{
    const values v = {malloc((size_t)count * dtrain_dtype_bytes(dtype)), count, dtype};
    stream++;
    for (int64_t i = 0; i < count; i++)
        naive_put(v.data, dtype, i, (double)dtrain_random_normal(5, stream, (uint64_t)i));
    return v;
}

static values copy_of(const values *v)
{
    const values copy = {malloc(values_bytes(v)), v->count, v->dtype};
    memcpy(copy.data, v->data, values_bytes(v));
    return copy;
}

/* |got - want| within one rounding to the type and `terms` of fp32. */
static bool near(const values *got, const values *want, double terms)
{
    const double step = got->dtype == DTRAIN_DTYPE_BF16  ? 1.0 / 128
                        : got->dtype == DTRAIN_DTYPE_F16 ? 1.0 / 1024
                                                         : 0;
    const double tolerance = 3e-7 * (8 + sqrt(terms));
    for (int64_t i = 0; i < got->count; i++) {
        const double g = naive_get(got->data, got->dtype, i),
                     w = naive_get(want->data, want->dtype, i);
        if (g == w || (isnan(g) && isnan(w))) continue;
        if (fabs(g - w) <= step * fabs(w) + tolerance * (1 + fabs(w)) * sqrt(terms)) continue;
        fprintf(stderr, "  element %lld of %lld (%s): %.9g, expected %.9g\n", (long long)i,
                (long long)got->count, dtrain_dtype_name(got->dtype), g, w);
        return false;
    }
    return true;
}

static bool same(const values *a, const values *b)
{
    return memcmp(a->data, b->data, values_bytes(a)) == 0;
}

/* ---- One convolution ---------------------------------------------------------------------------*/

typedef struct shape {
    int64_t batch, height, width, in, out, groups;
    int64_t kernel[2], stride[2], padding[2], dilation[2];
    int dtype, x_dtype; /* of `types` */
    bool bias, accumulate;
} shape;

static const dtrain_dtype types[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};

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

static const char *shape_text(const shape *s)
{
    static char text[256];
    snprintf(text, sizeof text,
             "(%lld, %lld, %lld, %lld) -> %lld, groups %lld, kernel %lld x %lld, stride %lld %lld, "
             "padding %lld %lld, dilation %lld %lld, %s, d_x %s, bias %d, accumulate %d",
             (long long)s->batch, (long long)s->height, (long long)s->width, (long long)s->in,
             (long long)s->out, (long long)s->groups, (long long)s->kernel[0],
             (long long)s->kernel[1], (long long)s->stride[0], (long long)s->stride[1],
             (long long)s->padding[0], (long long)s->padding[1], (long long)s->dilation[0],
             (long long)s->dilation[1], dtrain_dtype_name(types[s->dtype]),
             dtrain_dtype_name(types[s->x_dtype]), s->bias, s->accumulate);
    return text;
}

enum { Y, D_X, D_WEIGHT, D_BIAS, RESULTS };

typedef struct problem {
    const shape *s;
    dtrain_windows2d w;
    values x, weight, bias, d_y, before[RESULTS];
} problem;

static void problem_open(problem *p, const shape *s)
{
    const dtrain_dtype dtype = types[s->dtype];
    memset(p, 0, sizeof *p);
    p->s = s;
    p->w = windows_of(s);
    const int64_t pixels = s->batch * p->w.out_height * p->w.out_width;
    p->x = noise(s->batch * s->height * s->width * s->in, dtype);
    p->weight = noise(s->out * (s->in / s->groups) * s->kernel[0] * s->kernel[1], dtype);
    p->bias = noise(s->out, DTRAIN_DTYPE_F32);
    p->d_y = noise(pixels * s->out, dtype);
    p->before[Y] = noise(pixels * s->out, dtype);
    p->before[D_X] = noise(p->x.count, types[s->x_dtype]);
    p->before[D_WEIGHT] = noise(p->weight.count, DTRAIN_DTYPE_F32);
    p->before[D_BIAS] = noise(s->out, DTRAIN_DTYPE_F32);
    for (int r = 0; r < RESULTS; r++) /* NaN where nothing may be read */
        if (r == Y || !s->accumulate)
            for (int64_t i = 0; i < p->before[r].count; i++)
                naive_put(p->before[r].data, p->before[r].dtype, i, NAN);
}

static void problem_close(problem *p)
{
    free(p->x.data), free(p->weight.data), free(p->bias.data), free(p->d_y.data);
    for (int r = 0; r < RESULTS; r++) free(p->before[r].data);
}

/* Runs forward and backward on a device, into new memory. */
static bool problem_run(const problem *p, dtrain_device *device, values result[RESULTS])
{
    const shape *s = p->s;
    for (int r = 0; r < RESULTS; r++) result[r] = copy_of(&p->before[r]);
    const dtrain_conv2d_args forward = {.windows = p->w,
                                        .out_channels = s->out,
                                        .groups = s->groups,
                                        .x = p->x.data,
                                        .weight = p->weight.data,
                                        .bias = s->bias ? (const float *)p->bias.data : NULL,
                                        .y = result[Y].data,
                                        .dtype = types[s->dtype]};
    const dtrain_conv2d_backward_args backward = {.windows = p->w,
                                                  .out_channels = s->out,
                                                  .groups = s->groups,
                                                  .x = p->x.data,
                                                  .weight = p->weight.data,
                                                  .d_y = p->d_y.data,
                                                  .d_x = result[D_X].data,
                                                  .d_weight = (float *)result[D_WEIGHT].data,
                                                  .d_bias = (float *)result[D_BIAS].data,
                                                  .accumulate_x = s->accumulate,
                                                  .accumulate_weight = s->accumulate,
                                                  .accumulate_bias = s->accumulate,
                                                  .dtype = types[s->dtype],
                                                  .x_dtype = types[s->x_dtype]};
    return device->ops->conv2d(device, &forward) == DTRAIN_OK &&
           device->ops->conv2d_backward(device, &backward) == DTRAIN_OK;
}

/* One shape on one instruction set: near the loops, and the same bits with every number of threads. */
static bool problem_check(const problem *p, const values want[RESULTS], int which)
{
    static const char *const names[RESULTS] = {"y", "d_x", "d_weight", "d_bias"};
    const shape *s = p->s;
    const double taps = (double)(s->kernel[0] * s->kernel[1]);
    const double pixels = (double)(s->batch * p->w.out_height * p->w.out_width);
    const double terms[RESULTS] = {taps * (double)(s->in / s->groups),
                                   taps * (double)(s->out / s->groups), pixels, pixels};
    values first[RESULTS], got[RESULTS];
    bool good = true;
    use_kernels(which);
    for (int t = 0; t < THREADS; t++) {
        const bool ran = problem_run(p, devices[t], t ? got : first);
        good = CHECK_MSG(ran, "%s: %s", shape_text(s), dtrain_last_error()) && good;
        for (int r = 0; r < RESULTS && ran; r++) {
            const bool right = t ? same(&got[r], &first[r]) : near(&first[r], &want[r], terms[r]);
            good = CHECK_MSG(right, "[%s, %d threads] %s of %s", kernels[which]->name, t + 1,
                             names[r], shape_text(s)) &&
                   good;
        }
        for (int r = 0; r < RESULTS && t; r++) free(got[r].data);
    }
    for (int r = 0; r < RESULTS; r++) free(first[r].data);
    return good;
}

static bool check_shape(const shape *s, int from, int to)
{
    problem p;
    values want[RESULTS];
    bool good = true;
    problem_open(&p, s);
    CHECK(problem_run(&p, naive, want));
    for (int k = from; k < to && k < kernel_count; k++) good = problem_check(&p, want, k) && good;
    for (int r = 0; r < RESULTS; r++) free(want[r].data);
    problem_close(&p);
    return good;
}

/* ---- Shapes: chosen, then random ---------------------------------------------------------------*/

/* The kinds of layer that nets have, and what is special to this implementation: panels that end inside a
 * tap, channels around a vector, several parts of a weight gradient, classes without a tap; by patches:
 * paddings, groups, channels that fill no vector, patches that the image cuts, several blocks. */
static const shape chosen[] = {
    {2, 8, 8, 3, 16, 1, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 0, 0, true, false},
    {1, 7, 9, 16, 16, 1, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 0, 0, false, true},
    {1, 8, 8, 16, 32, 1, {3, 3}, {2, 2}, {1, 1}, {1, 1}, 0, 0, true, true},
    {2, 5, 5, 16, 32, 1, {1, 1}, {2, 2}, {0, 0}, {1, 1}, 0, 0, false, false},
    {1, 6, 6, 33, 65, 1, {1, 1}, {1, 1}, {0, 0}, {1, 1}, 0, 0, true, false},
    {1, 6, 6, 64, 48, 1, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 0, 0, true, false},
    {1, 9, 8, 12, 24, 3, {3, 2}, {1, 2}, {2, 0}, {2, 1}, 0, 0, true, true},
    {2, 9, 9, 19, 19, 19, {3, 3}, {2, 1}, {1, 1}, {1, 1}, 0, 0, true, true},
    {1, 9, 9, 4, 8, 4, {5, 3}, {1, 1}, {2, 1}, {1, 2}, 0, 0, true, false},
    {5, 23, 19, 2, 5, 1, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 0, 0, true, true},
    {5, 23, 19, 6, 6, 6, {3, 2}, {1, 1}, {1, 1}, {1, 1}, 0, 0, true, true},
    {5, 23, 19, 4, 6, 2, {2, 3}, {1, 1}, {1, 1}, {1, 1}, 0, 0, false, false},
    {1, 10, 10, 1, 1, 1, {4, 4}, {3, 3}, {0, 0}, {1, 1}, 0, 0, true, false},
    {1, 3, 3, 2, 3, 1, {1, 1}, {5, 5}, {0, 0}, {1, 1}, 0, 0, true, true},
    {1, 2, 2, 3, 2, 1, {3, 3}, {1, 1}, {4, 3}, {1, 1}, 0, 0, true, false},
    {1, 5, 4, 130, 7, 1, {2, 3}, {1, 1}, {1, 1}, {1, 1}, 0, 0, false, false},
    {2, 13, 14, 14, 15, 1, {3, 3}, {1, 1}, {0, 2}, {1, 1}, 0, 0, true, true},
    {1, 14, 12, 32, 28, 2, {3, 3}, {1, 1}, {3, 1}, {1, 1}, 0, 0, true, false},
    {3, 23, 19, 30, 13, 1, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 0, 0, true, true},
    {1, 41, 67, 16, 16, 1, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 0, 0, true, true},
    {19, 7, 8, 33, 16, 1, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 0, 0, false, false}};

static void test_shapes(void)
{
    open_devices();
    for (size_t i = 0; i < sizeof chosen / sizeof *chosen; i++)
        for (int dtype = 0; dtype < 3; dtype++)
            for (int x = 0; x < 2; x++) {
                shape s = chosen[i];
                s.dtype = dtype;
                s.x_dtype = x ? 0 : dtype;
                if (x && dtype == 0) continue;
                check_shape(&s, 0, test_full() || dtype == 0 ? INSTANCES : 2 + (int)(i % 2));
            }
    close_devices();
}

static uint64_t random_state;

static int64_t up_to(int64_t n) /* 1 .. n */
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return 1 + (int64_t)((random_state >> 33) % (uint64_t)n);
}

static shape random_shape(uint64_t seed)
{
    shape s;
    memset(&s, 0, sizeof s);
    random_state = seed * 0x9e3779b97f4a7c15u + 1;
    up_to(2);
    const int64_t in = up_to(up_to(40)), out = up_to(up_to(40));
    s.groups = up_to(3) > 1 ? 1 : up_to(6);
    s.in = s.groups * (s.groups > 1 ? up_to(4) : in);
    s.out = s.groups * (s.groups > 1 ? up_to(4) : out);
    if (up_to(8) == 1) s.in = s.out = s.groups = up_to(40);
    s.batch = up_to(3);
    for (int a = 0; a < 2; a++) {
        s.kernel[a] = up_to(4), s.stride[a] = up_to(3), s.dilation[a] = up_to(2);
        s.padding[a] = up_to(4) - 1;
    }
    s.height = up_to(12), s.width = up_to(12);
    while (s.height + 2 * s.padding[0] <= (s.kernel[0] - 1) * s.dilation[0]) s.height++;
    while (s.width + 2 * s.padding[1] <= (s.kernel[1] - 1) * s.dilation[1]) s.width++;
    s.dtype = (int)up_to(3) - 1;
    s.x_dtype = up_to(2) == 1 ? 0 : s.dtype;
    s.bias = up_to(2) == 1, s.accumulate = up_to(2) == 1;
    return s;
}

static void test_random_shapes(void)
{
    const uint64_t first = test_seed();
    const double end =
        (double)clock() / CLOCKS_PER_SEC + (test_full() ? (double)test_draws(1, 3, 20) : 0.5);
    open_devices();
    printf("  seeds from %llu on\n", (unsigned long long)first);
    for (uint64_t i = 0; (double)clock() / CLOCKS_PER_SEC < end; i++) {
        const shape s = random_shape(first + i);
        const int which = (int)(i % (uint64_t)kernel_count);
        if (check_shape(&s, which, which + 1)) continue;
        CHECK_MSG(0, "seed %llu", (unsigned long long)(first + i));
        break;
    }
    close_devices();
}

/* ---- Pooling -----------------------------------------------------------------------------------*/

/* `special`: NaN, infinities and equal maxima. */
static void check_pool(const shape *s, bool maximum, bool special, int which)
{
    const dtrain_windows2d w = windows_of(s);
    const dtrain_dtype dtype = types[s->dtype];
    const int64_t count = w.batch * w.out_height * w.out_width * w.channels;
    const double terms = (double)(s->kernel[0] * s->kernel[1]);
    values x = noise(s->batch * s->height * s->width * s->in, dtype), d_y = noise(count, dtype);
    values d_x = noise(x.count, dtype), want_y = noise(count, dtype), want_d_x = copy_of(&d_x);
    values index = noise(count, DTRAIN_DTYPE_F32), want_index = noise(count, DTRAIN_DTYPE_F32);
    for (int64_t i = 0; special && i < x.count; i++)
        naive_put(x.data, dtype, i,
                  up_to(20) == 1   ? NAN
                  : up_to(20) == 1 ? -INFINITY
                                   : (double)up_to(2));
    dtrain_pool2d_args forward = {.windows = w,
                                  .maximum = maximum,
                                  .x = x.data,
                                  .y = want_y.data,
                                  .index = (int32_t *)want_index.data,
                                  .dtype = dtype};
    dtrain_pool2d_backward_args backward = {.windows = w,
                                            .maximum = maximum,
                                            .accumulate = s->accumulate,
                                            .index = (int32_t *)want_index.data,
                                            .d_y = d_y.data,
                                            .d_x = want_d_x.data,
                                            .dtype = dtype};
    naive->ops->pool2d(naive, &forward);
    naive->ops->pool2d_backward(naive, &backward);
    use_kernels(which);
    for (int t = 0; t < THREADS; t++) {
        values y = noise(count, dtype), d = copy_of(&d_x);
        forward.y = y.data, forward.index = (int32_t *)index.data;
        backward.index = (int32_t *)index.data, backward.d_x = d.data;
        CHECK(devices[t]->ops->pool2d(devices[t], &forward) == DTRAIN_OK);
        CHECK(devices[t]->ops->pool2d_backward(devices[t], &backward) == DTRAIN_OK);
        CHECK_MSG(near(&y, &want_y, terms), "[%s] pool %s", kernels[which]->name, shape_text(s));
        CHECK_MSG(!maximum || same(&index, &want_index), "[%s] index of pool %s",
                  kernels[which]->name, shape_text(s));
        CHECK_MSG(near(&d, &want_d_x, terms), "[%s] d_x of pool %s", kernels[which]->name,
                  shape_text(s));
        if (maximum && !special) {
            forward.index = NULL; /* a pass without gradients */
            CHECK(devices[t]->ops->pool2d(devices[t], &forward) == DTRAIN_OK &&
                  near(&y, &want_y, 1));
        }
        free(y.data), free(d.data);
    }
    free(x.data), free(d_y.data), free(d_x.data), free(want_y.data), free(want_d_x.data);
    free(index.data), free(want_index.data);
}

static void test_pools(void)
{
    open_devices();
    for (uint64_t i = 0; i < (test_full() ? 400u : 40u); i++) {
        shape s = random_shape(i);
        s.in = s.out = up_to(37), s.groups = 1;
        for (int a = 0; a < 2; a++) {
            s.dilation[a] = 1;
            s.padding[a] = up_to(s.kernel[a] / 2 + 1) - 1;
        }
        s.height += 4, s.width += 4;
        if (i % 10 == 0) { /* over whole images */
            s.kernel[0] = s.height, s.kernel[1] = s.width;
            s.padding[0] = s.padding[1] = 0;
        }
        for (int k = 0; k < kernel_count; k++) check_pool(&s, i % 2, i % 4 == 1, k);
    }
    close_devices();
}

/* ---- What devices refuse -----------------------------------------------------------------------*/

static void refused(const shape *s, int64_t groups, uint32_t dtype, const char *what)
{
    dtrain_conv2d_args args;
    memset(&args, 0, sizeof args);
    args.windows = windows_of(s);
    args.out_channels = s->out;
    args.groups = groups;
    args.dtype = (dtrain_dtype)dtype;
    CHECK(devices[0]->ops->conv2d(devices[0], &args) != DTRAIN_OK);
    CHECK_MSG(strstr(dtrain_last_error(), what) != NULL, "%s", dtrain_last_error());
}

static void test_refusals(void)
{
    shape s = chosen[1];
    open_devices();
    refused(&s, 3, DTRAIN_DTYPE_F32, "groups");
    refused(&s, 1, DTRAIN_DTYPE_I32, "i32");
    s.kernel[0] = s.height = 65;
    refused(&s, 1, DTRAIN_DTYPE_F32, "at most 64");
    s.kernel[0] = 0;
    refused(&s, 1, DTRAIN_DTYPE_F32, "do not fit");
    close_devices();
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_shapes);
    RUN(test_random_shapes);
    RUN(test_pools);
    RUN(test_refusals);
    return test_summary();
}
