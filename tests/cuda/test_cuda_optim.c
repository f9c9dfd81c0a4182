/* Tests of [C05] of dtrain_cuda.cu: AdamW and SGD over many tensors against loops in double and
 * against the CPU device; low copies, stochastic rounding, the scalars of a step. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"

enum { MOST = 130 };

/* The same tensors on the host, on the device, and as they were at first. */
typedef struct model {
    size_t tensor_count;
    dtrain_optimizer_tensor host[MOST], device[MOST];
    float *all; /* value, grad, m, v of tensor after tensor */
    float *was; /* all, at first */
    float *on;  /* all, on the device */
    uint16_t *low, *low_on;
    int64_t count; /* of all */
} model;

/* A tensor of `count` starts `shift` floats behind an address that is a multiple of 64. */
static int64_t padded(int64_t count) { return (count + 17) / 16 * 16 + 16; }

static model *make(size_t tensor_count, const int64_t *counts, size_t count_of_counts, int shift,
                   dtrain_dtype low)
{
    model *m = (model *)calloc(1, sizeof *m);
    int64_t at = 0;
    m->tensor_count = tensor_count;
    for (size_t i = 0; i < tensor_count; i++) m->count += 4 * padded(counts[i % count_of_counts]);
    const size_t bytes = (size_t)m->count * sizeof(float);
    m->all = (float *)gpu_noise(m->count, DTRAIN_DTYPE_F32, 5, 1);
    m->was = (float *)malloc(bytes);
    m->low = (uint16_t *)calloc((size_t)m->count, 2);
    m->on = (float *)gpu_take(bytes, 0);
    m->low_on = (uint16_t *)gpu_give(m->low, (size_t)m->count * 2, 0);
    for (size_t i = 0; i < tensor_count; i++) {
        dtrain_optimizer_tensor *t = &m->host[i];
        const int64_t count = counts[i % count_of_counts];
        t->count = count;
        t->weight_decay = i % 2 ? 0.1f : 0.0f;
        t->low_dtype = low;
        t->value = m->all + at + shift;
        t->grad = t->value + padded(count);
        t->m = t->value + 2 * padded(count);
        t->v = t->value + 3 * padded(count);
        t->low = low ? m->low + at + shift : NULL;
        for (int64_t j = 0; j < count; j++) t->v[j] = fabsf(t->v[j]);
        m->device[i] = *t;
        m->device[i].value = m->on + (t->value - m->all);
        m->device[i].grad = m->on + (t->grad - m->all);
        m->device[i].m = m->on + (t->m - m->all);
        m->device[i].v = m->on + (t->v - m->all);
        m->device[i].low = low ? m->low_on + at + shift : NULL;
        at += 4 * padded(count);
    }
    memcpy(m->was, m->all, bytes);
    gpu_write(m->on, m->all, bytes);
    return m;
}

static void drop(model *m)
{
    free(m->all), free(m->was), free(m->low), free(m);
    gpu_release();
}

/* What is on the device comes to the host; nothing between the tensors has changed. */
static void fetch(model *m)
{
    gpu_read(m->all, m->on, (size_t)m->count * sizeof(float));
    gpu_read(m->low, m->low_on, (size_t)m->count * 2);
}

static bool gaps_untouched(const model *m)
{
    int64_t at = 0;
    bool good = true;
    for (size_t i = 0; i < m->tensor_count; i++) {
        const dtrain_optimizer_tensor *t = &m->host[i];
        const int64_t first = t->value - m->all - at, room = padded(t->count);
        for (int part = 0; part < 4; part++, at += room)
            for (int64_t j = 0; j < room; j++)
                if (j < first || j >= first + t->count)
                    good = good && m->all[at + j] == m->was[at + j] && m->low[at + j] == 0;
    }
    return good;
}

static bool nothing_changed(const model *m)
{
    return memcmp(m->all, m->was, (size_t)m->count * sizeof(float)) == 0;
}

typedef struct oracle {
    double lr, beta1, beta2, epsilon, correction1, correction2, grad_scale, momentum;
    bool sgd, nesterov, first;
} oracle;

/* One element by the definition. */
static void oracle_step(const oracle *o, double decay, double grad, double *value, double *m,
                        double *v)
{
    const double g = grad * o->grad_scale;
    if (o->sgd) {
        *m = o->first ? g : o->momentum * *m + g;
        *value = *value * (1 - o->lr * decay) - o->lr * (o->nesterov ? g + o->momentum * *m : *m);
        return;
    }
    *m = o->beta1 * *m + (1 - o->beta1) * g;
    *v = o->beta2 * *v + (1 - o->beta2) * g * g;
    *value = *value * (1 - o->lr * decay) -
             o->lr * (*m / o->correction1) / (sqrt(*v / o->correction2) + o->epsilon);
}

static bool near_by(double got, double want) { return fabs(got - want) <= 4e-7 * (1 + fabs(want)); }

static void check_model(model *m, const oracle *o)
{
    fetch(m);
    CHECK(gaps_untouched(m));
    for (size_t i = 0; i < m->tensor_count; i++) {
        const dtrain_optimizer_tensor *t = &m->host[i];
        for (int64_t j = 0; j < t->count; j++) {
            const float *now = t->value + j, *was = m->was + (now - m->all);
            const int64_t step = padded(t->count);
            double value = (double)was[0], first = (double)was[2 * step];
            double second = (double)was[3 * step];
            oracle_step(o, (double)t->weight_decay, (double)was[step], &value, &first, &second);
            bool good = near_by((double)now[0], value) && now[step] == was[step];
            good = good &&
                   (t->m ? near_by((double)now[2 * step], first) : now[2 * step] == was[2 * step]);
            good = good && (!o->sgd ? near_by((double)now[3 * step], second)
                                    : now[3 * step] == was[3 * step]);
            if (good) continue;
            CHECK_MSG(0, "tensor %zu of %zu, element %lld of %lld: value %.9g, expected %.9g", i,
                      m->tensor_count, (long long)j, (long long)t->count, (double)now[0], value);
            return;
        }
    }
    CHECK(m->tensor_count > 0);
}

/* The low copy is the value, rounded to nearest. */
static void check_low(const model *m)
{
    bool good = true;
    for (size_t i = 0; i < m->tensor_count; i++) {
        const dtrain_optimizer_tensor *t = &m->host[i];
        for (int64_t j = 0; t->low && j < t->count; j++) {
            const uint16_t want = t->low_dtype == DTRAIN_DTYPE_BF16
                                      ? dtrain_f32_to_bf16(t->value[j])
                                      : dtrain_f32_to_f16(t->value[j]);
            good = good && ((uint16_t *)t->low)[j] == want;
        }
    }
    CHECK(good);
}

static dtrain_adamw_args adamw_args(const model *m)
{
    dtrain_adamw_args args = {m->tensor_count, m->device, 0.01f, 0.9f,  0.99f, 1e-8f,
                              0.19f,           0.0199f,   0.5f,  false, 0,     NULL};
    return args;
}
static oracle adamw_oracle(const dtrain_adamw_args *a)
{
    oracle o = {(double)a->lr,
                (double)a->beta1,
                (double)a->beta2,
                (double)a->epsilon,
                (double)a->correction1,
                (double)a->correction2,
                (double)a->grad_scale,
                0,
                false,
                false,
                false};
    return o;
}

static const int64_t sizes[] = {1, 3, 4, 5, 0, 64, 255, 1024, 1027};
static const int64_t large[] = {8191, 8192, 8193, 40003};
#define COUNT_OF(array) (sizeof array / sizeof array[0])

static void check_adamw(model *m)
{
    dtrain_adamw_args args = adamw_args(m);
    const oracle o = adamw_oracle(&args);
    CHECK(gpu->ops->adamw(gpu, &args) == DTRAIN_OK);
    check_model(m, &o);
    check_low(m);
    drop(m);
}

static void test_adamw(void)
{
    const size_t tensor_counts[] = {1, 9, 59, 60, 61, 130};
    gpu_open();
    EACH_ORDER(order)
    for (int shift = 0; shift < 2; shift++) {
        EACH(t, tensor_counts)
        {
            check_adamw(make(tensor_counts[t], sizes, COUNT_OF(sizes), shift, DTRAIN_DTYPE_BF16));
            check_adamw(make(tensor_counts[t], sizes, COUNT_OF(sizes), shift, DTRAIN_DTYPE_NONE));
        }
        check_adamw(make(5, large, COUNT_OF(large), shift, DTRAIN_DTYPE_F16));
    }
    gpu_close();
}

/* All arrays aligned but one. */
static void test_one_unaligned(void)
{
    gpu_open();
    for (int which = 0; which < 5; which++) {
        model *m = make(1, large, 1, 0, DTRAIN_DTYPE_BF16);
        float *moved = (float *)gpu_take(8191 * sizeof(float), 4);
        float *const from[4] = {m->device[0].value, m->on + (m->host[0].grad - m->all),
                                m->device[0].m, m->device[0].v};
        if (which < 4)
            CHECK(gpu->ops->copy(gpu, moved, from[which], 8191 * sizeof(float),
                                 DTRAIN_COPY_DEVICE_TO_DEVICE) == DTRAIN_OK);
        if (which == 0) m->device[0].value = moved;
        if (which == 1) m->device[0].grad = moved;
        if (which == 2) m->device[0].m = moved;
        if (which == 3) m->device[0].v = moved;
        if (which == 4) m->device[0].low = (uint16_t *)m->device[0].low + 1;
        dtrain_adamw_args args = adamw_args(m);
        const oracle o = adamw_oracle(&args);
        CHECK(gpu->ops->adamw(gpu, &args) == DTRAIN_OK);
        if (which < 4)
            CHECK(gpu->ops->copy(gpu, from[which], moved, 8191 * sizeof(float),
                                 DTRAIN_COPY_DEVICE_TO_DEVICE) == DTRAIN_OK);
        if (which == 4)
            CHECK(gpu->ops->copy(gpu, m->low_on, m->device[0].low, 8191 * 2,
                                 DTRAIN_COPY_DEVICE_TO_DEVICE) == DTRAIN_OK &&
                  gpu->ops->zero(gpu, m->low_on + 8191, 2) == DTRAIN_OK);
        check_model(m, &o);
        check_low(m);
        drop(m);
    }
    gpu_close();
}

static void check_sgd(model *m, float momentum, bool nesterov, bool first)
{
    dtrain_sgd_args args = {m->tensor_count, m->device, 0.01f, momentum, 0.5f,
                            nesterov,        first,     false, 0,        NULL};
    const oracle o = {(double)args.lr,  0,    0,        0,    0, 0, (double)args.grad_scale,
                      (double)momentum, true, nesterov, first};
    for (size_t i = 0; i < m->tensor_count; i++) {
        m->device[i].v = NULL;
        if (momentum == 0) m->host[i].m = m->device[i].m = NULL;
    }
    CHECK(gpu->ops->sgd(gpu, &args) == DTRAIN_OK);
    check_model(m, &o);
    check_low(m);
    drop(m);
}

static void test_sgd(void)
{
    gpu_open();
    EACH_ORDER(order)
    for (int shift = 0; shift < 2; shift++)
        for (int first = 0; first < 2; first++) {
            check_sgd(make(61, sizes, COUNT_OF(sizes), shift, DTRAIN_DTYPE_F16), 0.9f, false,
                      first);
            check_sgd(make(61, sizes, COUNT_OF(sizes), shift, DTRAIN_DTYPE_BF16), 0.9f, true,
                      first);
            check_sgd(make(5, large, COUNT_OF(large), shift, DTRAIN_DTYPE_BF16), 0.9f, true, first);
            check_sgd(make(61, sizes, COUNT_OF(sizes), shift, DTRAIN_DTYPE_NONE), 0, false, true);
        }
    /* without momentum there is no buffer to be first in */
    model *m = make(3, sizes, COUNT_OF(sizes), 0, DTRAIN_DTYPE_BF16);
    dtrain_sgd_args args = {3, m->device, 0.01f, 0, 0.5f, false, false, false, 0, NULL};
    const oracle o = {0.01, 0, 0, 0, 0, 0, 0.5, 0, true, false, true};
    for (int i = 0; i < 3; i++) m->host[i].m = m->device[i].m = m->device[i].v = NULL;
    CHECK(gpu->ops->sgd(gpu, &args) == DTRAIN_OK);
    check_model(m, &o);
    drop(m);
    gpu_close();
}

/* ---- Scalars, graphs ---- */

static void test_scalars(void)
{
    dtrain_step_scalars scalars = {0, 0.5f, 0.25f, 0.125f, 2, 0, 0};
    gpu_open();
    model *m = make(61, sizes, COUNT_OF(sizes), 0, DTRAIN_DTYPE_BF16);
    dtrain_step_scalars *on = (dtrain_step_scalars *)gpu_give(&scalars, sizeof scalars, 0);
    dtrain_adamw_args args = adamw_args(m);
    oracle o = adamw_oracle(&args);
    args.scalars = on;
    o.lr = 0.5, o.correction1 = 0.25, o.correction2 = 0.125, o.grad_scale = 2;
    scalars.skip = 3;
    gpu_write(on, &scalars, sizeof scalars);
    CHECK(gpu->ops->adamw(gpu, &args) == DTRAIN_OK);
    fetch(m);
    CHECK(nothing_changed(m) && gaps_untouched(m));
    scalars.skip = 0;
    gpu_write(on, &scalars, sizeof scalars);
    CHECK(gpu->ops->adamw(gpu, &args) == DTRAIN_OK);
    check_model(m, &o);
    drop(m);
    m = make(61, sizes, COUNT_OF(sizes), 0, DTRAIN_DTYPE_BF16);
    on = (dtrain_step_scalars *)gpu_give(&scalars, sizeof scalars, 0);
    dtrain_sgd_args sgd = {61, m->device, 0.01f, 0.9f, 0.5f, false, false, false, 0, on};
    const oracle sgd_o = {0.5, 0, 0, 0, 0, 0, 2, (double)0.9f, true, false, false};
    CHECK(gpu->ops->sgd(gpu, &sgd) == DTRAIN_OK);
    check_model(m, &sgd_o);
    drop(m);
    gpu_close();
}

/* A captured step takes its numbers from the scalars when it is launched. */
static void test_graph(void)
{
    dtrain_step_scalars scalars = {0, 0.5f, 0.25f, 0.125f, 2, 1, 0};
    dtrain_graph *graph;
    gpu_open();
    model *m = make(130, sizes, COUNT_OF(sizes), 1, DTRAIN_DTYPE_F16);
    dtrain_step_scalars *on = (dtrain_step_scalars *)gpu_give(&scalars, sizeof scalars, 0);
    dtrain_adamw_args args = adamw_args(m);
    oracle o = adamw_oracle(&args);
    args.scalars = on;
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK);
    CHECK(gpu->ops->adamw(gpu, &args) == DTRAIN_OK);
    CHECK(gpu->ops->graph_end(gpu, &graph) == DTRAIN_OK);
    memset(m->device, 0xff, sizeof m->device); /* the list has been read */
    memset(&args, 0, sizeof args);
    CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_OK); /* skipped */
    fetch(m);
    CHECK(nothing_changed(m));
    scalars.skip = 0;
    gpu_write(on, &scalars, sizeof scalars);
    CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_OK);
    o.lr = 0.5, o.correction1 = 0.25, o.correction2 = 0.125, o.grad_scale = 2;
    check_model(m, &o);
    check_low(m);
    gpu->ops->graph_destroy(gpu, graph);
    drop(m);
    gpu_close();
}

/* ---- Stochastic rounding ---- */

/* With lr 0 the values stay and the low copy is drawn again for each seed. */
static void draw(model *m, uint64_t seed, const dtrain_step_scalars *scalars)
{
    dtrain_sgd_args args = {m->tensor_count, m->device, 0, 0, 0, false, true, true, seed, scalars};
    CHECK(gpu->ops->sgd(gpu, &args) == DTRAIN_OK);
    fetch(m);
}

static model *one_of(int64_t count, dtrain_dtype low, const float *values, int64_t value_count)
{
    model *m = make(1, &count, 1, 0, low);
    for (int64_t i = 0; i < count; i++) m->host[0].value[i] = values[i % value_count];
    gpu_write(m->on, m->all, (size_t)m->count * sizeof(float));
    m->device[0].m = m->device[0].v = NULL;
    m->device[0].weight_decay = 0;
    return m;
}

/* The mean of many roundings is the value; each is one of its two neighbours. */
static void test_unbiased(void)
{
    const float values[] = {1.001f, -1.0035f, 0.7001f, 3.14159f, -1000.3f, 7e-5f, 1.0f, -0.5f};
    const dtrain_dtype lows[] = {DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
    enum { DRAWS = 40000 };
    gpu_open();
    EACH(l, lows)
    {
        model *m = one_of(8 * DRAWS, lows[l], values, 8);
        draw(m, 99, NULL);
        for (int which = 0; which < 8; which++) {
            const double value = (double)values[which];
            double sum = 0, low = INFINITY, high = -INFINITY;
            for (int i = 0; i < DRAWS; i++) {
                const double x = gpu_get(m->low, 8 * i + which, lows[l]);
                sum += x;
                low = x < low ? x : low;
                high = x > high ? x : high;
            }
            CHECK_MSG(low <= value && value <= high, "%g is not in [%g, %g]", value, low, high);
            CHECK(high - low <= 2.01 * gpu_rounding(lows[l]) * fabs(value) * 2);
            if (which >= 6) CHECK(low == high); /* representable */
            /* deviation of one draw at most half the distance: 5 of them over sqrt(DRAWS) */
            CHECK_MSG(fabs(sum / DRAWS - value) <= 5 * 0.5 * (high - low) / 200,
                      "the mean of %g is %.9g", value, sum / DRAWS);
        }
        drop(m);
    }
    gpu_close();
}

/* The same bits as the CPU device, with and without scalars, tensor by tensor. */
static void check_cpu_bits(dtrain_dtype low, int shift, bool with_scalars)
{
    dtrain_step_scalars scalars = {0xfffffffffff0u, 0.01f, 0.19f, 0.0199f, 0.5f, 0, 0};
    dtrain_device *cpu;
    model *m = make(130, sizes, COUNT_OF(sizes), shift, low);
    dtrain_adamw_args args = adamw_args(m);
    int64_t values = 0, different = 0, low_different = 0;
    CHECK(dtrain_device_create(NULL, NULL, &cpu) == DTRAIN_OK);
    args.stochastic_rounding = true;
    args.seed = 0x1234567890u;
    if (with_scalars)
        args.scalars = (const dtrain_step_scalars *)gpu_give(&scalars, sizeof scalars, 0);
    CHECK(gpu->ops->adamw(gpu, &args) == DTRAIN_OK);
    args.tensors = m->host;
    args.scalars = with_scalars ? &scalars : NULL;
    CHECK(cpu->ops->adamw(cpu, &args) == DTRAIN_OK);
    float *all = (float *)malloc((size_t)m->count * sizeof(float));
    uint16_t *lows = (uint16_t *)malloc((size_t)m->count * 2);
    gpu_read(all, m->on, (size_t)m->count * sizeof(float));
    gpu_read(lows, m->low_on, (size_t)m->count * 2);
    for (int64_t i = 0; i < m->count; i++) {
        values++;
        different += memcmp(&all[i], &m->all[i], sizeof(float)) != 0;
        low_different += lows[i] != m->low[i];
        CHECK_MSG(fabs((double)all[i] - (double)m->all[i]) <= 2.5e-7 * (fabs((double)all[i]) + 0.1),
                  "element %lld: %.9g, the CPU has %.9g", (long long)i, (double)all[i],
                  (double)m->all[i]);
    }
    /* A compiler for the CPU may fuse one multiply-add less: a last bit here and there. */
    CHECK_MSG(different < values / 4, "%lld of %lld differ", (long long)different,
              (long long)values);
    CHECK_MSG(low_different <= different / 100, "%lld of %lld low copies differ",
              (long long)low_different, (long long)values);
    free(all), free(lows);
    dtrain_device_destroy(cpu);
    drop(m);
}

static void test_cpu_bits(void)
{
    gpu_open();
    for (int shift = 0; shift < 2; shift++) {
        check_cpu_bits(DTRAIN_DTYPE_BF16, shift, false);
        check_cpu_bits(DTRAIN_DTYPE_F16, shift, true);
    }
    gpu_close();
}

/* Values that have nowhere to go: nearest decides. Rounding never makes a NaN of a number. */
static void test_rounding_edges(void)
{
    float values[] = {NAN, INFINITY, -INFINITY, 0, -0.0f, 1e-30f, 5e-8f, 65504, 1e6f, -3e-5f};
    const uint32_t all_ones = 0x7fffffffu; /* a NaN that a carry would turn into -0 */
    memcpy(values, &all_ones, sizeof all_ones);
    gpu_open();
    for (uint64_t seed = 0; seed < 20; seed++) {
        model *m = one_of(10, DTRAIN_DTYPE_F16, values, 10);
        draw(m, seed, NULL);
        CHECK(isnan(gpu_get(m->low, 0, DTRAIN_DTYPE_F16)));
        for (int i = 1; i < 10; i++)
            CHECK_MSG(m->low[i] == dtrain_f32_to_f16(values[i]), "%g became %g", (double)values[i],
                      gpu_get(m->low, i, DTRAIN_DTYPE_F16));
        drop(m);
        m = one_of(5, DTRAIN_DTYPE_BF16, values, 5);
        draw(m, seed, NULL);
        CHECK(isnan(gpu_get(m->low, 0, DTRAIN_DTYPE_BF16)));
        for (int i = 1; i < 5; i++) CHECK(m->low[i] == dtrain_f32_to_bf16(values[i]));
        drop(m);
    }
    gpu_close();
}

/* A tensor draws the same whether it is cut at other places, and other than its neighbours. */
static void test_streams(void)
{
    const float third = 1.001f;
    const int64_t counts[] = {1000, 1000};
    gpu_open();
    model *m = make(2, counts, 2, 0, DTRAIN_DTYPE_BF16);
    for (int t = 0; t < 2; t++) {
        for (int i = 0; i < 1000; i++) m->host[t].value[i] = third;
        m->device[t].m = m->device[t].v = NULL;
    }
    gpu_write(m->on, m->all, (size_t)m->count * sizeof(float));
    draw(m, 5, NULL);
    const uint16_t *a = (const uint16_t *)m->host[0].low, *b = (const uint16_t *)m->host[1].low;
    CHECK(memcmp(a, b, 2000) != 0);
    uint16_t before[1000];
    memcpy(before, a, sizeof before);
    EACH_ORDER(order)
    {
        draw(m, 5, NULL);
        CHECK(memcmp(before, a, sizeof before) == 0);
    }
    draw(m, 6, NULL);
    CHECK(memcmp(before, a, sizeof before) != 0);
    drop(m);
    gpu_close();
}

static void test_errors(void)
{
    gpu_open();
    model *m = make(3, sizes, COUNT_OF(sizes), 0, DTRAIN_DTYPE_BF16);
    dtrain_adamw_args args = adamw_args(m);
    m->device[2].low_dtype = DTRAIN_DTYPE_F32;
    CHECK(gpu->ops->adamw(gpu, &args) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK(strstr(dtrain_last_error(), "tensor 2") != NULL);
    m->device[2].low_dtype = DTRAIN_DTYPE_F16;
    m->device[1].v = NULL;
    CHECK(gpu->ops->adamw(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "tensor 1") != NULL);
    fetch(m);
    CHECK(nothing_changed(m)); /* not even the tensors before it */
    args.tensor_count = 0;
    CHECK(gpu->ops->adamw(gpu, &args) == DTRAIN_OK);
    fetch(m);
    CHECK(nothing_changed(m));
    drop(m);
    gpu_close();
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (gpu_missing()) {
        SKIP(test_cuda_optim, gpu_missing());
        return test_summary();
    }
    RUN(test_adamw);
    RUN(test_one_unaligned);
    RUN(test_sgd);
    RUN(test_scalars);
    RUN(test_graph);
    RUN(test_unbiased);
    RUN(test_cpu_bits);
    RUN(test_rounding_edges);
    RUN(test_streams);
    RUN(test_errors);
    return test_summary();
}
