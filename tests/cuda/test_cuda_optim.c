/* Tests of optimizers.cuh: AdamW, SGD and Lion over many tensors and the stages of Muon against
 * loops in double and against the CPU device; the scalars of a step. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"

enum { MOST = 130 };

/* The same tensors on the host, on the device, and as they were at first. */
typedef struct model {
    size_t tensor_count;
    dtrain_optimizer_tensor host[MOST], device[MOST];
    float *all;    /* value, grad, m, v of tensor after tensor */
    float *was;    /* all, at first */
    float *on;     /* all, on the device */
    int64_t count; /* of all */
} model;

/* A tensor of `count` starts `shift` floats behind an address that is a multiple of 64. */
static int64_t padded(int64_t count) { return (count + 17) / 16 * 16 + 16; }

static model *make(size_t tensor_count, const int64_t *counts, size_t count_of_counts, int shift)
{
    model *m = (model *)calloc(1, sizeof *m);
    int64_t at = 0;
    m->tensor_count = tensor_count;
    for (size_t i = 0; i < tensor_count; i++) m->count += 4 * padded(counts[i % count_of_counts]);
    const size_t bytes = (size_t)m->count * sizeof(float);
    m->all = (float *)gpu_noise(m->count, DTRAIN_DTYPE_F32, 5, 1);
    m->was = (float *)malloc(bytes);
    m->on = (float *)gpu_take(bytes, 0);
    for (size_t i = 0; i < tensor_count; i++) {
        dtrain_optimizer_tensor *t = &m->host[i];
        const int64_t count = counts[i % count_of_counts];
        t->count = count;
        t->weight_decay = i % 2 ? 0.1f : 0.0f;
        t->value = m->all + at + shift;
        t->grad = t->value + padded(count);
        t->m = t->value + 2 * padded(count);
        t->v = t->value + 3 * padded(count);
        for (int64_t j = 0; j < count; j++) t->v[j] = fabsf(t->v[j]);
        m->device[i] = *t;
        m->device[i].value = m->on + (t->value - m->all);
        m->device[i].grad = m->on + (t->grad - m->all);
        m->device[i].m = m->on + (t->m - m->all);
        m->device[i].v = m->on + (t->v - m->all);
        at += 4 * padded(count);
    }
    memcpy(m->was, m->all, bytes);
    gpu_write(m->on, m->all, bytes);
    return m;
}

static void drop(model *m)
{
    free(m->all), free(m->was), free(m);
    gpu_release();
}

/* What is on the device comes to the host; nothing between the tensors has changed. */
static void fetch(model *m) { gpu_read(m->all, m->on, (size_t)m->count * sizeof(float)); }

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
                    good = good && m->all[at + j] == m->was[at + j];
    }
    return good;
}

static bool nothing_changed(const model *m)
{
    return memcmp(m->all, m->was, (size_t)m->count * sizeof(float)) == 0;
}

typedef struct oracle {
    double lr, beta1, beta2, epsilon, correction1, correction2, grad_scale, momentum;
    bool sgd, nesterov, first, lion;
} oracle;

/* One element by the definition. */
static void oracle_step(const oracle *o, double decay, double grad, double *value, double *m,
                        double *v)
{
    const double g = grad * o->grad_scale;
    if (o->lion) {
        const double mean = o->beta1 * *m + (1 - o->beta1) * g;
        *m = o->beta2 * *m + (1 - o->beta2) * g;
        *value = *value * (1 - o->lr * decay) - o->lr * (mean > 0 ? 1 : mean < 0 ? -1 : 0);
        return;
    }
    if (o->sgd) {
        const double coupled = g + decay * *value;
        *m = o->first ? coupled : o->momentum * *m + coupled;
        *value -= o->lr * (o->nesterov ? coupled + o->momentum * *m : *m);
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
            good = good && (t->v && !o->sgd && !o->lion ? near_by((double)now[3 * step], second)
                                                        : now[3 * step] == was[3 * step]);
            if (good) continue;
            CHECK_MSG(0, "tensor %zu of %zu, element %lld of %lld: value %.9g, expected %.9g", i,
                      m->tensor_count, (long long)j, (long long)t->count, (double)now[0], value);
            return;
        }
    }
    CHECK(m->tensor_count > 0);
}

static dtrain_optimizer_args adamw_args(const model *m)
{
    dtrain_optimizer_args args = {.tensor_count = m->tensor_count,
                                  .tensors = m->device,
                                  .lr = 0.01f,
                                  .beta1 = 0.9f,
                                  .beta2 = 0.99f,
                                  .epsilon = 1e-8f,
                                  .correction1 = 0.19f,
                                  .correction2 = 0.0199f,
                                  .grad_scale = 0.5f,
                                  .lr_scale = 1};
    return args;
}
static oracle adamw_oracle(const dtrain_optimizer_args *a)
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
                false,
                false};
    return o;
}

static const int64_t sizes[] = {1, 3, 4, 5, 0, 64, 255, 1024, 1027};
static const int64_t large[] = {8191, 8192, 8193, 40003};
#define COUNT_OF(array) (sizeof array / sizeof array[0])

static void check_adamw(model *m)
{
    dtrain_optimizer_args args = adamw_args(m);
    const oracle o = adamw_oracle(&args);
    CHECK(gpu->ops->adamw(gpu, &args) == DTRAIN_OK);
    check_model(m, &o);
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
            check_adamw(make(tensor_counts[t], sizes, COUNT_OF(sizes), shift));
            check_adamw(make(tensor_counts[t], sizes, COUNT_OF(sizes), shift));
        }
        check_adamw(make(5, large, COUNT_OF(large), shift));
    }
    gpu_close();
}

/* All arrays aligned but one. */
static void test_one_unaligned(void)
{
    gpu_open();
    for (int which = 0; which < 4; which++) {
        model *m = make(1, large, 1, 0);
        float *moved = (float *)gpu_take(8191 * sizeof(float), 4);
        float *const from[4] = {m->device[0].value, m->on + (m->host[0].grad - m->all),
                                m->device[0].m, m->device[0].v};
        CHECK(gpu->ops->copy(gpu, moved, from[which], 8191 * sizeof(float),
                             DTRAIN_COPY_DEVICE_TO_DEVICE) == DTRAIN_OK);
        if (which == 0) m->device[0].value = moved;
        if (which == 1) m->device[0].grad = moved;
        if (which == 2) m->device[0].m = moved;
        if (which == 3) m->device[0].v = moved;
        dtrain_optimizer_args args = adamw_args(m);
        const oracle o = adamw_oracle(&args);
        CHECK(gpu->ops->adamw(gpu, &args) == DTRAIN_OK);
        CHECK(gpu->ops->copy(gpu, from[which], moved, 8191 * sizeof(float),
                             DTRAIN_COPY_DEVICE_TO_DEVICE) == DTRAIN_OK);
        check_model(m, &o);
        drop(m);
    }
    gpu_close();
}

static void check_sgd(model *m, float momentum, bool nesterov, bool first)
{
    dtrain_optimizer_args args = {.tensor_count = m->tensor_count,
                                  .tensors = m->device,
                                  .lr = 0.01f,
                                  .momentum = momentum,
                                  .grad_scale = 0.5f,
                                  .nesterov = nesterov,
                                  .first = first,
                                  .lr_scale = 1};
    const oracle o = {(double)args.lr,  0,    0,        0,     0,    0, (double)args.grad_scale,
                      (double)momentum, true, nesterov, first, false};
    for (size_t i = 0; i < m->tensor_count; i++) {
        m->device[i].v = NULL;
        if (momentum == 0) m->host[i].m = m->device[i].m = NULL;
    }
    CHECK(gpu->ops->sgd(gpu, &args) == DTRAIN_OK);
    check_model(m, &o);
    drop(m);
}

static void test_sgd(void)
{
    gpu_open();
    EACH_ORDER(order)
    for (int shift = 0; shift < 2; shift++)
        for (int first = 0; first < 2; first++) {
            check_sgd(make(61, sizes, COUNT_OF(sizes), shift), 0.9f, false, first);
            check_sgd(make(61, sizes, COUNT_OF(sizes), shift), 0.9f, true, first);
            check_sgd(make(5, large, COUNT_OF(large), shift), 0.9f, true, first);
            check_sgd(make(61, sizes, COUNT_OF(sizes), shift), 0, false, true);
        }
    /* without momentum there is no buffer to be first in */
    model *m = make(3, sizes, COUNT_OF(sizes), 0);
    dtrain_optimizer_args args = {
        .tensor_count = 3, .tensors = m->device, .lr = 0.01f, .grad_scale = 0.5f, .lr_scale = 1};
    const oracle o = {0.01, 0, 0, 0, 0, 0, 0.5, 0, true, false, true, false};
    for (int i = 0; i < 3; i++) m->host[i].m = m->device[i].m = m->device[i].v = NULL;
    CHECK(gpu->ops->sgd(gpu, &args) == DTRAIN_OK);
    check_model(m, &o);
    drop(m);
    gpu_close();
}

static void check_lion(model *m)
{
    const dtrain_optimizer_args args = {.tensor_count = m->tensor_count,
                                        .tensors = m->device,
                                        .lr = 0.01f,
                                        .beta1 = 0.9f,
                                        .beta2 = 0.99f,
                                        .grad_scale = 0.5f,
                                        .lr_scale = 1};
    oracle o = {(double)args.lr,
                (double)args.beta1,
                (double)args.beta2,
                0,
                0,
                0,
                0.5,
                0,
                false,
                false,
                false,
                true};
    CHECK(gpu->ops->lion(gpu, &args) == DTRAIN_OK);
    check_model(m, &o);
    drop(m);
}

static void test_lion(void)
{
    gpu_open();
    EACH_ORDER(order)
    for (int shift = 0; shift < 2; shift++) {
        check_lion(make(61, sizes, COUNT_OF(sizes), shift));
        check_lion(make(5, large, COUNT_OF(large), shift));
    }
    model *m = make(2, sizes, COUNT_OF(sizes), 0);
    m->device[1].m = NULL;
    const dtrain_optimizer_args args = {.tensor_count = 2,
                                        .tensors = m->device,
                                        .lr = 0.01f,
                                        .beta1 = 0.9f,
                                        .beta2 = 0.99f,
                                        .grad_scale = 0.5f,
                                        .lr_scale = 1};
    CHECK(gpu->ops->lion(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    drop(m);
    gpu_close();
}

/* One stage of Muon on one tensor, whose v is x. */
static void check_muon(int64_t count, int shift, uint32_t stage, bool nesterov, int with)
{
    dtrain_step_scalars scalars = {0, 0.5f, 0, 0, 2, with == 2, 0};
    const double squares = 7.5;
    model *m = make(1, &count, 1, shift);
    dtrain_muon_args args;
    memset(&args, 0, sizeof args);
    m->device[0].weight_decay = 0.1f;
    args.stage = stage;
    args.tensors = &m->device[0];
    args.x = m->device[0].v;
    args.lr = 0.01f, args.momentum = 0.9f, args.grad_scale = 0.5f, args.nesterov = nesterov;
    args.scale = 1.5f, args.epsilon = 0.25f, args.lr_scale = 0.5f;
    args.sum_squares = (const double *)gpu_give(&squares, sizeof squares, 0);
    if (with) args.scalars = (const dtrain_step_scalars *)gpu_give(&scalars, sizeof scalars, 0);
    const double lr = with ? 0.25 : (double)args.lr, grad_scale = with ? 2 : 0.5;
    CHECK(gpu->ops->muon(gpu, &args) == DTRAIN_OK);
    fetch(m);
    CHECK(gaps_untouched(m));
    const dtrain_optimizer_tensor *t = &m->host[0];
    for (int64_t i = 0; i < count; i++) {
        const float *now = t->value + i, *was = m->was + (now - m->all);
        const int64_t step = padded(count);
        double value = (double)was[0], first = (double)was[2 * step], x = (double)was[3 * step];
        const double g = (double)was[step] * grad_scale;
        if (stage == DTRAIN_MUON_MOMENTUM && with < 2) {
            first = 0.9 * first + g;
            x = nesterov ? g + 0.9 * first : first;
        }
        if (stage == DTRAIN_MUON_NORMALIZE) x /= sqrt(squares) + 0.25;
        if (stage == DTRAIN_MUON_STEP && with < 2) value = value * (1 - lr * 0.1) - lr * 1.5 * x;
        if (!CHECK(near_by((double)now[0], value) && now[step] == was[step] &&
                   near_by((double)now[2 * step], first) && near_by((double)now[3 * step], x)))
            break;
    }
    drop(m);
}

static void test_muon_stages(void)
{
    static const int64_t counts[] = {1, 5, 255, 1027, 40003};
    gpu_open();
    EACH_ORDER(order)
    for (int c = 0; c < 5; c++)
        for (uint32_t stage = DTRAIN_MUON_MOMENTUM; stage <= DTRAIN_MUON_STEP; stage++)
            for (int with = 0; with < 3; with++) check_muon(counts[c], c & 1, stage, c > 1, with);
    gpu_close();
}

/* ---- Scalars, graphs ---- */

static void test_scalars(void)
{
    dtrain_step_scalars scalars = {0, 0.5f, 0.25f, 0.125f, 2, 0, 0};
    gpu_open();
    model *m = make(61, sizes, COUNT_OF(sizes), 0);
    dtrain_step_scalars *on = (dtrain_step_scalars *)gpu_give(&scalars, sizeof scalars, 0);
    dtrain_optimizer_args args = adamw_args(m);
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
    m = make(61, sizes, COUNT_OF(sizes), 0);
    on = (dtrain_step_scalars *)gpu_give(&scalars, sizeof scalars, 0);
    dtrain_optimizer_args sgd = {.tensor_count = 61,
                                 .tensors = m->device,
                                 .lr = 0.01f,
                                 .momentum = 0.9f,
                                 .grad_scale = 0.5f,
                                 .scalars = on,
                                 .lr_scale = 0.5f};
    const oracle sgd_o = {0.25, 0, 0, 0, 0, 0, 2, (double)0.9f, true, false, false, false};
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
    model *m = make(130, sizes, COUNT_OF(sizes), 1);
    dtrain_step_scalars *on = (dtrain_step_scalars *)gpu_give(&scalars, sizeof scalars, 0);
    dtrain_optimizer_args args = adamw_args(m);
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
    gpu->ops->graph_destroy(gpu, graph);
    drop(m);
    gpu_close();
}

/* The same bits as the CPU device, with and without scalars, tensor by tensor. */
static void check_cpu_bits(int shift, bool with_scalars)
{
    dtrain_step_scalars scalars = {0xfffffffffff0u, 0.01f, 0.19f, 0.0199f, 0.5f, 0, 0};
    dtrain_device *cpu;
    model *m = make(130, sizes, COUNT_OF(sizes), shift);
    dtrain_optimizer_args args = adamw_args(m);
    int64_t values = 0, different = 0;
    CHECK(dtrain_device_create(NULL, NULL, &cpu) == DTRAIN_OK);
    if (with_scalars)
        args.scalars = (const dtrain_step_scalars *)gpu_give(&scalars, sizeof scalars, 0);
    CHECK(gpu->ops->adamw(gpu, &args) == DTRAIN_OK);
    args.tensors = m->host;
    args.scalars = with_scalars ? &scalars : NULL;
    CHECK(cpu->ops->adamw(cpu, &args) == DTRAIN_OK);
    float *all = (float *)malloc((size_t)m->count * sizeof(float));
    gpu_read(all, m->on, (size_t)m->count * sizeof(float));
    for (int64_t i = 0; i < m->count; i++) {
        values++;
        different += memcmp(&all[i], &m->all[i], sizeof(float)) != 0;
        CHECK_MSG(fabs((double)all[i] - (double)m->all[i]) <= 2.5e-7 * (fabs((double)all[i]) + 0.1),
                  "element %lld: %.9g, the CPU has %.9g", (long long)i, (double)all[i],
                  (double)m->all[i]);
    }
    /* A compiler for the CPU may fuse one multiply-add less: a last bit here and there. */
    CHECK_MSG(different < values / 4, "%lld of %lld differ", (long long)different,
              (long long)values);
    free(all);
    dtrain_device_destroy(cpu);
    drop(m);
}

static void test_cpu_bits(void)
{
    gpu_open();
    for (int shift = 0; shift < 2; shift++) {
        check_cpu_bits(shift, false);
        check_cpu_bits(shift, true);
    }
    gpu_close();
}

static void test_errors(void)
{
    gpu_open();
    model *m = make(3, sizes, COUNT_OF(sizes), 0);
    dtrain_optimizer_args args = adamw_args(m);
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
    RUN(test_lion);
    RUN(test_muon_stages);
    RUN(test_scalars);
    RUN(test_graph);
    RUN(test_cpu_bits);
    RUN(test_errors);
    return test_summary();
}
