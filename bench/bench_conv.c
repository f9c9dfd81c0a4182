/* bench_conv.c: convolutions of the CPU device, beside its own matrix product.
 *
 *   run:     make bench, or build/bench/bench_conv --threads 2 --log FILE
 *            build/bench/bench_conv --batch 32 --bf16
 *   build:   cc -O2 -I. -Ibench bench/bench_conv.c -o bench_conv -lm -lpthread
 *
 * The layers are those of ResNet-20 for CIFAR-10 (He et al., 2015), a depthwise layer and a 1 x 1 layer of
 * MobileNet's kind. Each runs forward, for the gradient of its input, and for that of its weight.
 *
 * A repetition runs the product and the three once, one after the other, beginning with another one each
 * time: the machine's drift then meets all alike, and ratios are taken within a repetition.
 *
 *   GFLOP/s   2 pixels of y x out_channels x kernel x in_channels / groups, over time; taps outside the
 *             image count. Median (min to max) over the repetitions
 *   of_gemm   the floor: GFLOP/s over those of a product of 768 x 768 x 768, of the same type
 *   ms        median
 *   correct   64 sampled elements agree with loops in double precision */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "bench.h"

enum { MAX_REPS = 64, SIDE = 768 };
enum { GEMM, FORWARD, INPUT, WEIGHT, RUNNERS };

static const char *const names[RUNNERS] = {"gemm", "forward", "input", "weight"};

static struct {
    long threads, reps, batch, bf16;
} opt = {1, 0, 128, 0};

typedef struct layer {
    const char *name;
    int64_t size, in, out, groups, kernel, stride;
    bool quick;
} layer;

static const layer layers[] = {
    {"first, 3 to 16", 32, 3, 16, 1, 3, 1, true},     {"16 to 16", 32, 16, 16, 1, 3, 1, true},
    {"16 to 32, half", 32, 16, 32, 1, 3, 2, true},    {"32 to 32", 16, 32, 32, 1, 3, 1, false},
    {"32 to 64, half", 16, 32, 64, 1, 3, 2, false},   {"64 to 64", 8, 64, 64, 1, 3, 1, false},
    {"shortcut, half", 16, 32, 64, 1, 1, 2, false},   {"depthwise 64", 16, 64, 64, 64, 3, 1, true},
    {"1 x 1, 64 to 128", 16, 64, 128, 1, 1, 1, false}};

typedef struct trial {
    const layer *layer;
    dtrain_device *device;
    dtrain_dtype dtype;
    dtrain_conv2d_args forward;
    dtrain_conv2d_backward_args input, weight;
    dtrain_gemm_args gemm;
    void *x, *w, *y, *d_y, *d_x;
    float *d_w;
    double flops, rates[RUNNERS][MAX_REPS];
} trial;

static size_t width_of(const trial *t) { return t->dtype == DTRAIN_DTYPE_F32 ? 4 : 2; }

static double get(const trial *t, const void *data, int64_t i)
{
    if (t->dtype == DTRAIN_DTYPE_F32) return (double)((const float *)data)[i];
    return (double)dtrain_half_to_f32(DTRAIN_DTYPE_BF16, ((const uint16_t *)data)[i]);
}

static void *noise(const trial *t, int64_t count, uint32_t seed)
{
    char *data = (char *)bench_alloc((size_t)count * width_of(t));
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        const float value = (float)(seed >> 8) / 8388608.0f - 1.0f;
        if (t->dtype == DTRAIN_DTYPE_F32) ((float *)(void *)data)[i] = value;
        else ((uint16_t *)(void *)data)[i] = dtrain_half_from_f32(DTRAIN_DTYPE_BF16, value);
    }
    return data;
}

static void trial_init(trial *t, const layer *l, dtrain_device *device)
{
    dtrain_windows2d *w = &t->forward.windows;
    memset(t, 0, sizeof *t);
    t->layer = l;
    t->device = device;
    t->dtype = opt.bf16 ? DTRAIN_DTYPE_BF16 : DTRAIN_DTYPE_F32;
    w->batch = opt.batch;
    w->height = w->width = l->size;
    w->channels = l->in;
    w->out_height = w->out_width = (l->size - 1) / l->stride + 1;
    for (int a = 0; a < 2; a++) {
        w->kernel[a] = l->kernel, w->stride[a] = l->stride, w->dilation[a] = 1;
        w->padding[a] = l->kernel / 2;
    }
    const int64_t x = opt.batch * l->size * l->size * l->in;
    const int64_t y = opt.batch * w->out_height * w->out_width * l->out;
    const int64_t weights = l->out * (l->in / l->groups) * l->kernel * l->kernel;
    t->flops = 2.0 * (double)y * (double)weights / (double)l->out;
    t->forward.out_channels = t->input.out_channels = l->out;
    t->forward.groups = t->input.groups = l->groups;
    t->forward.x = t->input.x = t->x = noise(t, x, 1);
    t->forward.weight = t->input.weight = t->w = noise(t, weights, 2);
    t->forward.y = t->y = noise(t, y, 3);
    t->input.d_y = t->d_y = noise(t, y, 4);
    t->d_x = noise(t, x, 5);
    t->d_w = (float *)bench_alloc((size_t)weights * sizeof(float));
    t->forward.dtype = t->input.dtype = t->input.x_dtype = t->dtype;
    t->input.windows = *w;
    t->weight = t->input;
    t->input.d_x = t->d_x;
    t->weight.d_weight = t->d_w;
    t->gemm.m = t->gemm.n = t->gemm.k = t->gemm.lda = t->gemm.ldb = t->gemm.ldc = SIDE;
    t->gemm.alpha = 1;
    t->gemm.a_dtype = t->gemm.b_dtype = t->gemm.c_dtype = t->dtype;
    t->gemm.a = noise(t, SIDE * SIDE, 6);
    t->gemm.b = noise(t, SIDE * SIDE, 7);
    t->gemm.c = noise(t, SIDE * SIDE, 8);
}

static void trial_free(trial *t)
{
    free(t->x), free(t->w), free(t->y), free(t->d_y), free(t->d_x), free(t->d_w);
    free((void *)(uintptr_t)t->gemm.a), free((void *)(uintptr_t)t->gemm.b), free(t->gemm.c);
}

static dtrain_result run(trial *t, int runner)
{
    const dtrain_device_ops *ops = t->device->ops;
    if (runner == GEMM) return ops->gemm(t->device, &t->gemm);
    if (runner == FORWARD) return ops->conv2d(t->device, &t->forward);
    return ops->conv2d_backward(t->device, runner == INPUT ? &t->input : &t->weight);
}

/* ---- Correctness ---- */

/* Adds up the products of output (n, i, j, o) that touch what is asked for: all, the input element `x`, or
 * the weight element `w` (-1: any). */
static double products(const trial *t, int64_t at, int64_t x, int64_t w, int runner, double *size)
{
    const dtrain_windows2d *g = &t->forward.windows;
    const layer *l = t->layer;
    const int64_t in = l->in / l->groups, o = at % l->out, pixel = at / l->out;
    const int64_t j = pixel % g->out_width, i = pixel / g->out_width % g->out_height;
    const int64_t n = pixel / g->out_width / g->out_height, first = o / (l->out / l->groups) * in;
    double sum = 0;
    for (int64_t a = 0; a < l->kernel; a++)
        for (int64_t b = 0; b < l->kernel; b++) {
            const int64_t y = i * l->stride - g->padding[0] + a,
                          z = j * l->stride - g->padding[1] + b;
            if (y < 0 || y >= l->size || z < 0 || z >= l->size) continue;
            for (int64_t c = 0; c < in; c++) {
                const int64_t from = ((n * l->size + y) * l->size + z) * l->in + first + c;
                const int64_t by = ((o * in + c) * l->kernel + a) * l->kernel + b;
                if ((x >= 0 && from != x) || (w >= 0 && by != w)) continue;
                const double left = runner == FORWARD ? get(t, t->w, by) : get(t, t->d_y, at);
                const double right = runner == INPUT ? get(t, t->w, by) : get(t, t->x, from);
                sum += left * right;
                *size += fabs(left * right);
            }
        }
    return sum;
}

static int element_is_right(const trial *t, int runner, int64_t e)
{
    const dtrain_windows2d *g = &t->forward.windows;
    const layer *l = t->layer;
    const int64_t image = g->out_height * g->out_width * l->out;
    double sum = 0, size = 0, got;
    if (runner == FORWARD) {
        const int64_t at = e * 104729 % (opt.batch * image);
        sum = products(t, at, -1, -1, runner, &size);
        got = get(t, t->y, at);
    } else if (runner == INPUT) {
        const int64_t pixels = l->size * l->size * l->in, x = e * 104729 % (opt.batch * pixels);
        for (int64_t at = x / pixels * image; at < (x / pixels + 1) * image; at++)
            sum += products(t, at, x, -1, runner, &size);
        got = get(t, t->d_x, x);
    } else {
        const int64_t per = l->in / l->groups * l->kernel * l->kernel,
                      w = e * 7919 % (l->out * per);
        for (int64_t at = w / per; at < opt.batch * image; at += l->out)
            sum += products(t, at, -1, w, runner, &size);
        got = (double)t->d_w[w];
    }
    const double half = runner != WEIGHT && opt.bf16 ? 0x1p-8 * fabs(sum) : 0;
    return fabs(got - sum) <= 0x1p-24 * 64 * (1 + size) + half; /* false for NaN */
}

/* Calls the runner once, as warm-up; returns how many of the sampled elements are wrong. */
static int check(trial *t, int runner)
{
    int wrong = 0;
    if (run(t, runner) != DTRAIN_OK) {
        fprintf(stderr, "bench_conv: %s\n", dtrain_last_error());
        return 64;
    }
    const int elements = runner == FORWARD ? 64 : bench.quick ? 2 : 8;
    for (int e = 0; e < elements && runner != GEMM; e++) wrong += !element_is_right(t, runner, e);
    if (wrong)
        fprintf(stderr, "bench_conv: %s, %s: %d elements are wrong\n", t->layer->name,
                names[runner], wrong);
    return wrong;
}

/* ---- Rates ---- */

/* GFLOP/s of a runner, over at least `seconds`. */
static double measure(trial *t, int runner, double seconds)
{
    const double one = runner == GEMM ? 2.0 * SIDE * SIDE * SIDE : t->flops;
    double flops = 0, elapsed;
    const double start = dtrain_seconds();
    do {
        run(t, runner);
        flops += one;
        elapsed = dtrain_seconds() - start;
    } while (elapsed < seconds);
    return 1e-9 * flops / elapsed;
}

static void report(const trial *t, int runner, int wrong)
{
    const double rate = median(t->rates[runner], (int)opt.reps);
    bench_begin("conv");
    bench_string("layer", -18, t->layer->name);
    bench_string("pass", -8, names[runner]);
    bench_number("threads", 0, 0, (double)opt.threads);
    bench_number("batch", 0, 0, (double)opt.batch);
    bench_string("dtype", 0, opt.bf16 ? "bf16" : "f32");
    bench_string("kernel", 0, bench_kernels(false));
    bench_spread("GFLOP/s", 6, 1, spread_of(t->rates[runner], (int)opt.reps));
    bench_number("of_gemm", 7, 3,
                 ratios_of(t->rates[runner], t->rates[GEMM], (int)opt.reps, 1).median);
    bench_number("ms", 8, 3, 1e-6 * t->flops / rate);
    bench_end(!wrong);
}

static void run_all(dtrain_device *device)
{
    const double seconds = bench.quick ? 0.002 : 0.02;
    bench_title("dtrain: %s, %ld threads, batch %ld, %ld repetitions", bench_kernels(false),
                opt.threads, opt.batch, opt.reps);
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        trial t;
        int wrong[RUNNERS];
        if (bench.quick && !layers[i].quick) continue;
        trial_init(&t, &layers[i], device);
        for (int runner = 0; runner < RUNNERS; runner++) wrong[runner] = check(&t, runner);
        for (int r = 0; r < opt.reps; r++)
            for (int k = 0; k < RUNNERS; k++) {
                const int runner = (r + k) % RUNNERS;
                t.rates[runner][r] = measure(&t, runner, seconds);
            }
        for (int runner = FORWARD; runner < RUNNERS; runner++) report(&t, runner, wrong[runner]);
        trial_free(&t);
    }
}

static const flag flag_table[] = {
    {"--threads", 'i', &opt.threads, 1, 1024, "threads", NULL},
    {"--batch", 'i', &opt.batch, 1, 4096, "images; 128, with --quick 4", NULL},
    {"--reps", 'i', &opt.reps, 1, MAX_REPS, "repetitions; 7, with --quick 3", NULL},
    {"--bf16", 'b', &opt.bf16, 0, 0, "activations and weights in bf16", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    dtrain_device_desc desc;
    dtrain_device *device;
    opt.reps = is_quick(argc, argv) ? 3 : 7;
    if (is_quick(argc, argv)) opt.batch = 4;
    bench_start("bench_conv", "GFLOP/s of convolutions beside a matrix product", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    memset(&desc, 0, sizeof desc);
    desc.thread_count = (uint32_t)opt.threads;
    desc.oversubscribed = opt.threads > (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (dtrain_device_create(NULL, &desc, &device) != DTRAIN_OK) {
        fprintf(stderr, "bench_conv: %s\n", dtrain_last_error());
        return 1;
    }
    run_all(device);
    dtrain_device_destroy(device);
    return bench.wrong > 0;
}
