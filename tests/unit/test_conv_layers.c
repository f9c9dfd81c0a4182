/* test_conv_layers.c: convolution and pooling as operations of the tape: PyTorch's values, finite differences,
 * and what every operation promises: types, checkpointing, plans, errors. The kernels are tested in test_conv. */
#include "test.h"
#include "dtrain.h"
#include "naive_device.h"
#include "reference/conv_golden.h"
#include "tape_error.h"

static dtrain_device *device;
static dtrain_tape *tape;

static void open_on(const dtrain_device_ops *ops)
{
    CHECK(dtrain_device_create(ops, NULL, &device) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    if (!tape) exit(1);
}

static void close_all(void)
{
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

static const dtrain_device_ops *device_of(int kind)
{
    return kind ? device_table("cpu") : naive_device_ops();
}

static dtrain_tensor *image_on(dtrain_tape *t, const int64_t shape[4], const float *values)
{
    return dtrain_tape_input(t, DTRAIN_DTYPE_F32, 4, shape, values, true);
}

static dtrain_tensor *image(const int64_t shape[4], const float *values)
{
    return image_on(tape, shape, values);
}

/* ---- PyTorch's values --------------------------------------------------------------------------*/

static void check_floats(const char *what, const float *got, const float *want, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        const double g = (double)got[i], w = (double)want[i];
        if ((isnan(g) && isnan(w)) || fabs(g - w) <= 2e-6 * (1 + fabs(w))) continue;
        CHECK_MSG(0, "%s[%lld] is %.9g, expected %.9g", what, (long long)i, g, w);
        return;
    }
    CHECK(1);
}

/* An operation of the test: a loss whose gradient with respect to its input is what it is given. */
static dtrain_result given_prepare(dtrain_op *op)
{
    const int64_t one[1] = {1};
    return dtrain_op_output(op, DTRAIN_DTYPE_F32, 1, one) ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

static dtrain_result given_forward(dtrain_op *op)
{
    *(float *)op->output_data[0] = 0;
    return DTRAIN_OK;
}

static dtrain_result given_backward(dtrain_op *op)
{
    float *grad = (float *)dtrain_op_input_grad(op, 0, NULL);
    if (!grad) return tape_error(op->tape);
    memcpy(grad, *(const float *const *)op->args, (size_t)op->inputs[0]->count * sizeof *grad);
    return DTRAIN_OK;
}

static const dtrain_op_desc given_op = {
    0, 0, 0, 0, false, "given", given_prepare, given_forward, given_backward};

static void check_golden(const char *what, dtrain_tensor *x, dtrain_tensor *y, const float *want_y,
                         const float *dy, const float *want_dx)
{
    if (!CHECK_MSG(x && y, "%s: %s", what, dtrain_last_error())) return;
    float *got = (float *)malloc(sizeof(float) * (size_t)(x->count + y->count));
    CHECK(dtrain_tensor_read(tape, y, got, NULL) == DTRAIN_OK);
    check_floats(what, got, want_y, y->count);
    dtrain_tensor *loss = dtrain_tape_apply(tape, &given_op, &y, 1, NULL, 0, &dy, sizeof dy);
    CHECK_MSG(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK, "%s: %s", what,
              dtrain_last_error());
    CHECK(dtrain_tensor_read(tape, x, NULL, got) == DTRAIN_OK);
    check_floats(what, got, want_dx, x->count);
    free(got);
}

static dtrain_param param_of(const char *name, const float *value, float *grad, int64_t a,
                             int64_t b, int64_t c, int64_t d)
{
    const int64_t shape[4] = {a, b, c, d};
    dtrain_param p;
    memset(&p, 0, sizeof p);
    p.name = name;
    p.value = (float *)(uintptr_t)value;
    p.grad = grad;
    memcpy(p.shape, shape, sizeof shape);
    return p;
}

#define GOLDEN_CONV(name, n, h, w, c, out, in, kh, kw, ...)                                      \
    do {                                                                                         \
        const int64_t shape[4] = {n, h, w, c};                                                   \
        const dtrain_conv2d_desc desc = __VA_ARGS__;                                             \
        float d_weight[(out) * (in) * (kh) * (kw)], d_bias[out];                                 \
        dtrain_param weight = param_of("w", conv_##name##_w, d_weight, out, in, kh, kw);         \
        dtrain_param bias = param_of("b", conv_##name##_b, d_bias, out, 0, 0, 0);                \
        dtrain_tape_begin(tape, 0, 0);                                                           \
        dtrain_tensor *x = image(shape, conv_##name##_x);                                        \
        check_golden(#name, x, dtrain_conv2d(tape, x, &weight, &bias, &desc), conv_##name##_y,   \
                     conv_##name##_dy, conv_##name##_dx);                                        \
        check_floats(#name " d_weight", d_weight, conv_##name##_dw, (out) * (in) * (kh) * (kw)); \
        check_floats(#name " d_bias", d_bias, conv_##name##_db, out);                            \
    } while (0)

static void test_pytorch(void)
{
    const int64_t shape[4] = {2, 6, 7, 3};
    const dtrain_pool2d_desc max = {DTRAIN_POOL_MAX, {3, 2}, {2, 1}, {1, 1}};
    const dtrain_pool2d_desc average = {DTRAIN_POOL_AVERAGE, {3, 2}, {2, 1}, {1, 1}};
    const dtrain_pool2d_desc global = {.kind = DTRAIN_POOL_AVERAGE};
    for (int kind = 0; kind < 2; kind++) {
        open_on(device_of(kind));
        GOLDEN_CONV(plain, 2, 5, 6, 3, 4, 3, 3, 3, {{0, 0}, {1, 1}, {0, 0}, 0});
        GOLDEN_CONV(groups, 1, 7, 6, 4, 6, 2, 3, 2, {{2, 1}, {1, 0}, {1, 2}, 2});
        GOLDEN_CONV(depth, 2, 5, 5, 5, 5, 1, 3, 3, {{2, 2}, {1, 1}, {0, 0}, 5});
        dtrain_tape_begin(tape, 0, 0);
        dtrain_tensor *x = image(shape, conv_max_x);
        check_golden("max", x, dtrain_pool2d(tape, x, &max), conv_max_y, conv_max_dy, conv_max_dx);
        dtrain_tape_begin(tape, 0, 0);
        x = image(shape, conv_avg_x);
        check_golden("avg", x, dtrain_pool2d(tape, x, &average), conv_avg_y, conv_avg_dy,
                     conv_avg_dx);
        dtrain_tape_begin(tape, 0, 0);
        x = image(shape, conv_global_x);
        check_golden("global", x, dtrain_pool2d(tape, x, &global), conv_global_y, conv_global_dy,
                     conv_global_dx);
        close_all();
    }
}

/* ---- A small net -------------------------------------------------------------------------------*/

enum { PARAMS = 7, PIXELS = 2 * 9 * 8 * 3, FLOATS = 4096 };

/* Every operation once, and a convolution twice, so that its gradients and that of its input add up. */
typedef struct net {
    dtrain_param params[PARAMS];
    float value[FLOATS], grad[FLOATS], pixels[PIXELS], d_pixels[PIXELS];
    int64_t used;
    bool
        smooth; /* an average in place of the maximum, whose kinks finite differences stumble over */
    dtrain_tensor *x;
} net;

static void declare(net *n, int i, const char *name, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const int64_t count = a * (b ? b : 1) * (c ? c : 1) * (d ? d : 1);
    n->params[i] = param_of(name, n->value + n->used, n->grad + n->used, a, b, c, d);
    n->used += count;
}

static net *net_create(void)
{
    net *n = (net *)calloc(1, sizeof *n);
    for (int i = 0; i < FLOATS; i++)
        n->value[i] = 0.4f * dtrain_random_normal(3, 1, (uint64_t)i), n->grad[i] = NAN;
    for (int i = 0; i < PIXELS; i++) n->pixels[i] = dtrain_random_normal(3, 2, (uint64_t)i);
    declare(n, 0, "twice", 3, 3, 3, 3);
    declare(n, 1, "stem", 6, 3, 3, 2);
    declare(n, 2, "stem bias", 6, 0, 0, 0);
    declare(n, 3, "depthwise", 6, 1, 3, 3);
    declare(n, 4, "grouped", 4, 3, 2, 2);
    declare(n, 5, "grouped bias", 4, 0, 0, 0);
    declare(n, 6, "head", 5, 4, 0, 0);
    return n;
}

static dtrain_tensor *net_loss(dtrain_tape *t, net *n)
{
    const int64_t shape[4] = {2, 9, 8, 3};
    const dtrain_conv2d_desc same = {{1, 1}, {1, 1}, {0, 0}, 1};
    const dtrain_conv2d_desc strided = {{2, 1}, {1, 1}, {1, 2}, 1};
    const dtrain_conv2d_desc depthwise = {{1, 1}, {1, 1}, {1, 1}, 6};
    const dtrain_conv2d_desc grouped = {{1, 1}, {0, 0}, {0, 0}, 2};
    const dtrain_pool2d_desc first = {
        n->smooth ? DTRAIN_POOL_AVERAGE : DTRAIN_POOL_MAX, {2, 2}, {1, 1}, {0, 1}};
    const dtrain_pool2d_desc mean = {DTRAIN_POOL_AVERAGE, {2, 3}, {0, 2}, {1, 1}};
    const dtrain_pool2d_desc whole = {.kind = DTRAIN_POOL_AVERAGE};
    dtrain_param *p = n->params;
    dtrain_tape_unit(t, 0);
    dtrain_tensor *x = n->x = image_on(t, shape, n->pixels);
    x = dtrain_add(t, x, dtrain_conv2d(t, x, &p[0], NULL, &same));
    x = dtrain_add(t, x, dtrain_conv2d(t, x, &p[0], NULL, &same));
    dtrain_tape_unit(t, 1);
    x = dtrain_conv2d(t, x, &p[1], &p[2], &strided);
    x = dtrain_pool2d(t, x, &first);
    x = dtrain_conv2d(t, x, &p[3], NULL, &depthwise);
    dtrain_tape_unit(t, 2);
    x = dtrain_pool2d(t, x, &mean);
    x = dtrain_conv2d(t, x, &p[4], &p[5], &grouped);
    x = dtrain_pool2d(t, x, &whole);
    return dtrain_sum(t, dtrain_linear(t, x, &p[6], NULL, DTRAIN_ACTIVATION_GELU));
}

static double net_value(net *n, uint32_t flags)
{
    float value = NAN;
    dtrain_tape_begin(tape, flags, 1);
    CHECK_MSG(dtrain_tensor_read(tape, net_loss(tape, n), &value, NULL) == DTRAIN_OK, "%s",
              dtrain_last_error());
    return (double)value;
}

static double net_backward(net *n, uint32_t flags)
{
    float value = NAN;
    for (int i = 0; i < PARAMS; i++) n->params[i].state.grad_written = false;
    dtrain_tape_begin(tape, flags, 1);
    dtrain_tensor *loss = net_loss(tape, n);
    CHECK_MSG(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK, "%s", dtrain_last_error());
    CHECK(dtrain_tensor_read(tape, loss, &value, NULL) == DTRAIN_OK);
    CHECK(dtrain_tensor_read(tape, n->x, NULL, n->d_pixels) == DTRAIN_OK);
    return (double)value;
}

static void check_slope(net *n, const char *what, float *at, float gradient)
{
    double slopes[2];
    for (int i = 0; i < 2; i++) {
        const float keep = *at, h = i ? 0.01f : 0.02f;
        *at = keep + h;
        const double up = net_value(n, 0), high = (double)*at;
        *at = keep - h;
        slopes[i] = (up - net_value(n, 0)) / (high - (double)*at);
        *at = keep;
    }
    const double expected = (4 * slopes[1] - slopes[0]) / 3, bent = fabs(slopes[1] - slopes[0]);
    CHECK_MSG(fabs((double)gradient - expected) <= 1e-3 * (1 + fabs(expected)) + bent,
              "d loss / d %s is %g, by differences %g", what, (double)gradient, expected);
}

static void test_finite_differences(void)
{
    for (int kind = 0; kind < 2; kind++) {
        net *n = net_create();
        n->smooth = true;
        open_on(device_of(kind));
        net_backward(n, 0);
        const int64_t step = kind ? 1 : 7; /* the naive device is a check of the test itself */
        for (int64_t i = 0; i < n->used; i += step)
            check_slope(n, "a parameter", &n->value[i], n->grad[i]);
        for (int64_t i = 0; i < PIXELS; i += step)
            check_slope(n, "a pixel", &n->pixels[i], n->d_pixels[i]);
        close_all();
        free(n);
    }
}

/* ---- What every operation promises -------------------------------------------------------------*/

static void test_checkpointing(void)
{
    static const uint32_t precisions[3] = {0, DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16};
    for (int p = 0; p < 3; p++) {
        net *want = net_create();
        open_on(NULL);
        const double value = net_backward(want, precisions[p]);
        for (uint32_t every = 1; every <= 2; every++)
            for (uint32_t ops = 0; ops < 16; ops++) {
                net *n = net_create();
                CHECK(dtrain_tape_recompute(tape, every, ops) == DTRAIN_OK);
                const double got = net_backward(n, precisions[p]);
                CHECK(got == value);
                CHECK(memcmp(n->grad, want->grad, (size_t)n->used * sizeof(float)) == 0);
                CHECK(memcmp(n->d_pixels, want->d_pixels, sizeof n->d_pixels) == 0);
                free(n);
            }
        close_all();
        free(want);
    }
}

static double distance(const float *a, const float *b, int64_t count)
{
    double square = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        const double x = (double)a[i], y = (double)b[i];
        square += (x - y) * (x - y), size += y * y;
    }
    return sqrt(square / size);
}

/* Narrow types change gradients by their rounding, and the CPU device by no more than the naive one. */
static void test_autocast(void)
{
    net *exact = net_create(), *n = net_create();
    open_on(NULL);
    net_backward(exact, 0);
    net_backward(n, DTRAIN_TAPE_BF16);
    CHECK(distance(n->grad, exact->grad, n->used) < 5e-2);
    CHECK(distance(n->d_pixels, exact->d_pixels, PIXELS) < 5e-2);
    net_backward(n, DTRAIN_TAPE_F16);
    CHECK(distance(n->grad, exact->grad, n->used) < 6e-3);
    CHECK(distance(n->d_pixels, exact->d_pixels, PIXELS) < 6e-3);
    CHECK_CLOSE(net_value(n, DTRAIN_TAPE_NO_GRAD), net_value(n, 0), 1e-6);
    dtrain_tape_begin(tape, DTRAIN_TAPE_BF16, 1);
    const int64_t shape[4] = {2, 9, 8, 3};
    const dtrain_conv2d_desc same = {{1, 1}, {1, 1}, {0, 0}, 1};
    dtrain_tensor *y = dtrain_conv2d(tape, image(shape, n->pixels), &n->params[0], NULL, &same);
    CHECK(y && y->dtype == DTRAIN_DTYPE_BF16 && y->ndim == 4 && y->shape[1] == 9 &&
          y->shape[3] == 3);
    close_all();
    free(exact), free(n);
}

/* A second backward adds to gradients that are there, and frozen parameters get none. */
static void test_accumulation(void)
{
    net *once = net_create(), *n = net_create();
    open_on(NULL);
    net_backward(once, 0);
    net_backward(n, 0);
    dtrain_tape_begin(tape, 0, 1);
    CHECK(dtrain_tape_backward(tape, net_loss(tape, n), 1) == DTRAIN_OK);
    for (int64_t i = 0; i < n->used; i++) n->grad[i] /= 2;
    CHECK(distance(n->grad, once->grad, n->used) < 1e-6);
    for (int64_t i = 0; i < n->used; i++) n->grad[i] = NAN;
    n->params[1].flags = n->params[4].flags = DTRAIN_PARAM_FROZEN;
    net_backward(n, 0);
    for (int i = 0; i < PARAMS; i++) {
        const int64_t at = n->params[i].grad - n->grad;
        CHECK_MSG(isnan(n->grad[at]) ? i == 1 || i == 4 : n->grad[at] == once->grad[at], "%s",
                  n->params[i].name);
    }
    close_all();
    free(once), free(n);
}

/* ---- Strategies --------------------------------------------------------------------------------*/

typedef struct job {
    uint32_t kind, every, flags;
    uint64_t hash; /* of the parameters */
} job;

static dtrain_tensor *job_loss(dtrain_tape *t, void *user) { return net_loss(t, (net *)user); }

static dtrain_result job_batch(void *user)
{
    ((net *)user)->pixels[0] += 1; /* another batch each time */
    return DTRAIN_OK;
}

static int job_train(dtrain_world *world, void *user)
{
    static const uint32_t units[PARAMS] = {0, 1, 1, 1, 2, 2, 2};
    job *j = (job *)user;
    net *n = net_create();
    dtrain_strategy *strategy = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_trainer *trainer = NULL;
    dtrain_strategy_desc kind;
    dtrain_trainer_desc desc;
    dtrain_step_record record;
    uint64_t hash = 0;
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    memset(&kind, 0, sizeof kind);
    memset(&desc, 0, sizeof desc);
    for (int i = 0; i < PARAMS; i++) {
        dtrain_param *p = &n->params[i];
        p->value = p->grad = NULL;
        p->init = DTRAIN_INIT_NORMAL, p->init_scale = 0.4f, p->unit = units[i];
    }
    for (int i = 0; i < PIXELS; i++) n->pixels[i] += (float)dtrain_world_rank(world);
    kind.kind = j->kind;
    kind.bucket_bytes = 512;
    desc.recompute_every = j->every;
    desc.tape_flags = j->flags;
    desc.schedule.lr = 0.01f;
    desc.next_batch = job_batch;
    desc.loss = job_loss;
    desc.user = n;
    TRY(dtrain_strategy_create(world, n->params, PARAMS, &kind, &strategy));
    TRY(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    TRY(dtrain_trainer_create(world, &desc, &trainer));
    for (int step = 0; step < 3; step++) TRY(dtrain_trainer_step(trainer, &record));
    TRY(dtrain_strategy_verify(strategy, &hash));
    if (dtrain_world_rank(world) == 0) j->hash = hash;
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    free(n);
    return 0;
}

/* Two ranks have the same parameters after three steps of every strategy, with and without checkpointing. */
static void test_strategies(void)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_ZERO1,
                                     DTRAIN_STRATEGY_FULL_SHARD, DTRAIN_STRATEGY_ZERO3};
    dtrain_launch_desc launch;
    memset(&launch, 0, sizeof launch);
    launch.rank_count = 2;
    launch.mode = DTRAIN_LAUNCH_THREADS;
    launch.threads_per_rank = 1;
    for (uint32_t bf16 = 0; bf16 < 2; bf16++) {
        uint64_t first = 0;
        for (uint32_t i = 0; i < 8; i++) {
            job j = {kinds[i / 2], i % 2, bf16 ? DTRAIN_TAPE_BF16 : 0, 0};
            CHECK_MSG(dtrain_launch(&launch, job_train, &j, NULL) == DTRAIN_OK, "%s",
                      dtrain_last_error());
            if (i == 0) first = j.hash;
            CHECK_MSG(j.hash == first && j.hash != 0, "kind %u, checkpointing %u: other parameters",
                      j.kind, j.every);
        }
    }
}

/* The plan device sees the same memory as the CPU device. */
static void test_plan(void)
{
    dtrain_tape_info info[2];
    for (int kind = 0; kind < 2; kind++) {
        net *n = net_create();
        open_on(kind ? device_table("plan") : device_table("cpu"));
        dtrain_tape_begin(tape, 0, 1);
        CHECK(dtrain_tape_backward(tape, net_loss(tape, n), 1) == DTRAIN_OK);
        dtrain_tape_query(tape, &info[kind]);
        close_all();
        free(n);
    }
    CHECK(info[0].activation_bytes == info[1].activation_bytes && info[0].activation_bytes > 0);
    CHECK(info[0].gradient_bytes == info[1].gradient_bytes && info[0].gradient_bytes > 0);
}

/* ---- Errors ------------------------------------------------------------------------------------*/

static void refuses(dtrain_tensor *y, const char *sentence)
{
    CHECK(y == NULL && tape_error(tape) != DTRAIN_OK);
    CHECK_MSG(strstr(dtrain_last_error(), sentence) != NULL, "\"%s\" lacks \"%s\"",
              dtrain_last_error(), sentence);
    dtrain_tape_begin(tape, 0, 0);
}

static void test_errors(void)
{
    const int64_t shape[4] = {2, 9, 8, 3}, flat[2] = {9, 8};
    float floats[FLOATS] = {0};
    dtrain_conv2d_desc conv = {{0, 0}, {0, 0}, {0, 0}, 0};
    dtrain_pool2d_desc pool = {DTRAIN_POOL_MAX, {2, 2}, {0, 0}, {0, 0}};
    dtrain_param weight = param_of("w", floats, NULL, 6, 3, 3, 3);
    dtrain_param matrix = param_of("m", floats, NULL, 6, 3, 0, 0);
    dtrain_param bias = param_of("b", floats, NULL, 5, 0, 0, 0);
    dtrain_param large = param_of("l", floats, NULL, 1, 3, 65, 1);
    open_on(NULL);
#define X image(shape, floats)
    dtrain_tape_begin(tape, 0, 0);
    refuses(dtrain_conv2d(tape, dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, flat, floats, false),
                          &weight, NULL, NULL),
            "expected (batch, height, width, channels); input 1 is (9, 8)");
    refuses(dtrain_conv2d(tape, X, &matrix, NULL, NULL),
            "expected the weight as (out_channels, in_channels");
    refuses(dtrain_conv2d(tape, X, &large, NULL, NULL), "at most 64 x 64");
    refuses(dtrain_conv2d(tape, X, &weight, &bias, NULL), "parameter b is (5)");
    conv.groups = 3;
    refuses(dtrain_conv2d(tape, X, &weight, NULL, &conv), "in 3 groups");
    conv.groups = -1;
    refuses(dtrain_conv2d(tape, X, &weight, NULL, &conv), "in -1 groups");
    conv.groups = 0, conv.stride[1] = -2;
    refuses(dtrain_conv2d(tape, X, &weight, NULL, &conv), "width has stride -2");
    conv.stride[1] = 0, conv.padding[0] = -1;
    refuses(dtrain_conv2d(tape, X, &weight, NULL, &conv),
            "height has stride 1, dilation 1, padding -1");
    conv.padding[0] = 0, conv.dilation[0] = 5;
    refuses(dtrain_conv2d(tape, X, &weight, NULL, &conv), "reaches over 11 pixels");
    refuses(dtrain_conv2d(tape, X, NULL, NULL, NULL), "parameter 1 is NULL");
    refuses(dtrain_pool2d(tape, X, NULL), "dtrain_pool2d: kind is 0");
    pool.kernel[0] = 0;
    refuses(dtrain_pool2d(tape, X, &pool), "dtrain_pool2d: axis 0 has a kernel of 0");
    pool.kernel[0] = 2;
    pool.padding[1] = 2;
    refuses(dtrain_pool2d(tape, X, &pool), "axis 1 has a kernel of 2 and padding of 2");
    pool.padding[1] = 0, pool.kernel[0] = 10;
    refuses(dtrain_pool2d(tape, X, &pool), "reaches over 10 pixels");
    pool.kernel[0] = pool.kernel[1] = 0, pool.kind = DTRAIN_POOL_AVERAGE;
    refuses(dtrain_pool2d(tape, dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, flat, floats, false),
                          &pool),
            "dtrain_pool2d: expected (batch, height, width, channels)");
    pool.padding[0] = 1;
    refuses(dtrain_pool2d(tape, X, &pool), "axis 0 has a kernel of 0 and padding of 1");
    close_all();
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_pytorch);
    RUN(test_finite_differences);
    RUN(test_checkpointing);
    RUN(test_autocast);
    RUN(test_accumulation);
    RUN(test_strategies);
    RUN(test_plan);
    RUN(test_errors);
    return test_summary();
}
