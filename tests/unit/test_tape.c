/* test_tape.c: tape and tensors, operations.
 *
 * Every operation's backward is compared with finite differences, on the naive device and on the
 * CPU device; then the tape's own promises: memory, errors, units, accumulation. */
#include "test.h"
#include "dtrain.h"
#include "allocator.h"
#include "naive_device.h"
#include "packed_attention.h"
#include "reference/op_golden.h"
#include "tape_error.h"

#define MAX_PARAMS 6
#define MAX_INPUTS 3

/* A small model with all its data. build returns a tensor; the harness makes it a loss. */
typedef struct model {
    const char *name;
    dtrain_tensor *(*build)(dtrain_tape *tape, struct model *m);
    int64_t rows, n, other, sequence;
    dtrain_activation activation;
    uint32_t flags;

    int param_count, input_count;
    dtrain_param params[MAX_PARAMS];
    int64_t input_shape[MAX_INPUTS][3];
    uint32_t input_ndim[MAX_INPUTS];
    float *input_value[MAX_INPUTS];
    dtrain_tensor *input[MAX_INPUTS];
    int32_t tokens[64], targets[64];
    dtrain_param probe;
} model;

static uint64_t random_index;
static float random_value(void) { return dtrain_random_normal(42, 7, random_index++); }

static float *random_values(int64_t count)
{
    float *values = (float *)malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) values[i] = random_value();
    return values;
}

static int64_t param_count(const dtrain_param *p)
{
    int64_t count = 1;
    for (int i = 0; i < 4 && p->shape[i]; i++) count *= p->shape[i];
    return count;
}

static dtrain_param *add_param(model *m, const char *name, int64_t rows, int64_t columns)
{
    dtrain_param *p = &m->params[m->param_count++];
    memset(p, 0, sizeof *p);
    p->name = name;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->value = random_values(param_count(p));
    p->grad = random_values(param_count(p)); /* must be overwritten */
    return p;
}

static void add_input(model *m, uint32_t ndim, int64_t a, int64_t b, int64_t c)
{
    int i = m->input_count++;
    m->input_ndim[i] = ndim;
    m->input_shape[i][0] = a;
    m->input_shape[i][1] = b;
    m->input_shape[i][2] = c;
    m->input_value[i] = random_values(a * b * (ndim == 3 ? c : 1));
}

static dtrain_tensor *input(dtrain_tape *tape, model *m, int i)
{
    m->input[i] = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, m->input_ndim[i], m->input_shape[i],
                                    m->input_value[i], true);
    return m->input[i];
}

static dtrain_tensor *tokens(dtrain_tape *tape, const int32_t *values, int64_t batch,
                             int64_t sequence)
{
    int64_t shape[2];
    shape[0] = batch;
    shape[1] = sequence;
    return dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, shape, values, false);
}

static void model_free(model *m)
{
    for (int i = 0; i < m->param_count; i++) {
        if (m->params[i].alias_of) continue;
        free(m->params[i].value);
        free(m->params[i].grad);
    }
    for (int i = 0; i < m->input_count; i++) free(m->input_value[i]);
    free(m->probe.value);
}

/* A scalar that depends on every element in its own way: sum of gelu(y probe^T). */
static dtrain_tensor *model_loss(dtrain_tape *tape, model *m)
{
    dtrain_tensor *y = m->build(tape, m);
    if (!y || y->count == 1) return y;
    if (!m->probe.value) {
        m->probe.name = "probe";
        m->probe.flags = DTRAIN_PARAM_FROZEN;
        m->probe.shape[0] = 3;
        m->probe.shape[1] = y->shape[y->ndim - 1];
        m->probe.value = random_values(param_count(&m->probe));
    }
    return dtrain_sum(tape, dtrain_linear(tape, y, &m->probe, NULL, DTRAIN_ACTIVATION_GELU));
}

static double model_value(dtrain_tape *tape, model *m, uint32_t flags)
{
    float value = NAN;
    dtrain_tape_begin(tape, flags, 5);
    CHECK_MSG(dtrain_tensor_read(tape, model_loss(tape, m), &value, NULL) == DTRAIN_OK, "%s: %s",
              m->name, dtrain_last_error());
    return (double)value;
}

static double slope(dtrain_tape *tape, model *m, float *at, float h)
{
    float keep = *at;
    *at = keep + h;
    double up = model_value(tape, m, 0), width = (double)*at;
    *at = keep - h;
    double down = model_value(tape, m, 0);
    width -= (double)*at;
    *at = keep;
    return (up - down) / width;
}

static long kinks; /* of ReLU: there a finite difference says nothing */

/* Compares gradient (count) with differences of the loss in value (count). */
static void compare_slopes(dtrain_tape *tape, model *m, const char *what, float *value,
                           const float *gradient, int64_t count)
{
    const double rounding = 2 * 6e-8 * fabs(model_value(tape, m, 0)) / 0.01;
    for (int64_t i = 0; i < count; i++) {
        double wide = slope(tape, m, &value[i], 0.02f), narrow = slope(tape, m, &value[i], 0.01f);
        double expected = (4 * narrow - wide) / 3; /* the error of order h^2 drops out */
        double truncation = fabs(wide - narrow);   /* much more than what is left of it */
        if (m->activation == DTRAIN_ACTIVATION_RELU && truncation > 1e-4) {
            kinks++;
            continue;
        }
        CHECK_MSG(fabs((double)gradient[i] - expected) <=
                      4e-4 * (1 + fabs(expected)) + 0.1 * truncation + rounding,
                  "%s: d loss / d %s[%d] is %g, by differences %g and %g", m->name, what, (int)i,
                  (double)gradient[i], wide, narrow);
    }
}

static void check_model(dtrain_tape *tape, model *m)
{
    float *gradient[MAX_INPUTS];
    double value = model_value(tape, m, 0);
    CHECK_CLOSE(model_value(tape, m, DTRAIN_TAPE_NO_GRAD), value, 1e-6);
    dtrain_tape_begin(tape, 0, 5);
    dtrain_tensor *loss = model_loss(tape, m);
    CHECK_MSG(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK, "%s: %s", m->name,
              dtrain_last_error());
    for (int i = 0; i < m->input_count; i++) {
        gradient[i] = (float *)malloc((size_t)m->input[i]->count * sizeof(float));
        CHECK(dtrain_tensor_read(tape, m->input[i], NULL, gradient[i]) == DTRAIN_OK);
    }
    for (int i = 0; i < m->input_count; i++) {
        char what[24];
        snprintf(what, sizeof what, "input %d", i);
        compare_slopes(tape, m, what, m->input_value[i], gradient[i], m->input[i]->count);
        free(gradient[i]);
    }
    for (int i = 0; i < m->param_count; i++)
        if (!m->params[i].alias_of && !(m->params[i].flags & DTRAIN_PARAM_FROZEN))
            compare_slopes(tape, m, m->params[i].name, m->params[i].value, m->params[i].grad,
                           param_count(&m->params[i]));
}

/* ---- Devices -----------------------------------------------------------------------------------*/

enum { device_kinds = 2 };

static dtrain_device *open_device(int kind)
{
    dtrain_device_desc desc;
    dtrain_device *device = NULL;
    memset(&desc, 0, sizeof desc);
    CHECK(dtrain_device_create(kind ? device_table("cpu") : naive_device_ops(), &desc, &device) ==
          DTRAIN_OK);
    return device;
}

static void check_on_devices(model *m)
{
    for (int kind = 0; kind < device_kinds; kind++) {
        dtrain_device *device = open_device(kind);
        dtrain_tape *tape = NULL;
        CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
        for (int i = 0; i < m->param_count; i++) m->params[i].state.grad_written = false;
        check_model(tape, m);
        dtrain_tape_destroy(tape);
        if (!kind) CHECK(device->allocated_bytes == 0);
        dtrain_device_destroy(device);
    }
    model_free(m);
}

static model model_of(const char *name, dtrain_tensor *(*build)(dtrain_tape *, model *))
{
    model m;
    memset(&m, 0, sizeof m);
    m.name = name;
    m.build = build;
    random_index = 0;
    return m;
}

/* ---- Operations --------------------------------------------------------------------------------*/

static dtrain_tensor *build_linear(dtrain_tape *tape, model *m)
{
    return dtrain_linear(tape, input(tape, m, 0), &m->params[0],
                         m->param_count > 1 ? &m->params[1] : NULL, m->activation);
}

static void test_linear(void)
{
    const int64_t sizes[][3] = {{1, 1, 1}, {3, 5, 2}, {7, 4, 9}};
    for (int size = 0; size < 3; size++)
        for (int activation = 0; activation < 4; activation++)
            for (int bias = 0; bias < 2; bias++) {
                model m = model_of("linear", build_linear);
                m.activation = (dtrain_activation)activation;
                add_input(&m, 2, sizes[size][0], sizes[size][1], 0);
                add_param(&m, "weight", sizes[size][2], sizes[size][1]);
                if (bias) add_param(&m, "bias", sizes[size][2], 0);
                check_on_devices(&m);
            }
    CHECK_MSG(kinks < 50 * device_kinds, "%ld of the ReLU slopes were skipped", kinks);
}

static void test_linear_3d(void)
{
    model m = model_of("linear 3d", build_linear);
    add_input(&m, 3, 2, 3, 4);
    add_param(&m, "weight", 5, 4);
    add_param(&m, "bias", 5, 0);
    check_on_devices(&m);
}

static dtrain_tensor *build_layernorm(dtrain_tape *tape, model *m)
{
    return dtrain_layernorm(tape, input(tape, m, 0), NULL, &m->params[0],
                            m->param_count > 1 ? &m->params[1] : NULL, 1e-5f);
}

static void test_layernorm(void)
{
    for (int bias = 0; bias < 2; bias++) {
        model m = model_of("layernorm", build_layernorm);
        add_input(&m, 2, 3, 6, 0);
        add_param(&m, "weight", 6, 0);
        if (bias) add_param(&m, "bias", 6, 0);
        check_on_devices(&m);
    }
}

static dtrain_tensor *build_embedding(dtrain_tape *tape, model *m)
{
    return dtrain_embedding(tape, tokens(tape, m->tokens, 2, 3), &m->params[0],
                            m->param_count > 1 ? &m->params[1] : NULL);
}

static void test_embedding(void)
{
    const int32_t some[6] = {4, 0, 4, 1, 1, 4};
    for (int position = 0; position < 2; position++) {
        model m = model_of("embedding", build_embedding);
        memcpy(m.tokens, some, sizeof some);
        add_param(&m, "token", 5, 3);
        if (position) add_param(&m, "position", 4, 3);
        check_on_devices(&m);
    }
}

static dtrain_tensor *build_attention(dtrain_tape *tape, model *m)
{
    const dtrain_attention_desc desc = {
        .sequence = m->sequence, .heads = m->other, .causal = m->flags != 0};
    return dtrain_attention(tape, input(tape, m, 0), NULL, NULL, &desc);
}

static void test_attention(void)
{
    for (int64_t heads = 1; heads <= 4; heads *= 2)
        for (uint32_t causal = 0; causal < 2; causal++) {
            model m = model_of("attention", build_attention);
            m.sequence = 3;
            m.other = heads;
            m.flags = causal;
            add_input(&m, 2, 6, 12, 0);
            check_on_devices(&m);
        }
}

static dtrain_tensor *build_add(dtrain_tape *tape, model *m)
{
    return dtrain_add(tape, input(tape, m, 0), input(tape, m, 1));
}
static dtrain_tensor *build_scale(dtrain_tape *tape, model *m)
{
    return dtrain_scale(tape, input(tape, m, 0), -0.7f);
}
static dtrain_tensor *build_dropout(dtrain_tape *tape, model *m)
{
    dtrain_tensor *x = input(tape, m, 0);
    return dtrain_add(tape, x,
                      dtrain_scale(tape, dtrain_dropout(tape, x, m->flags ? 0.5f : 0), 0.3f));
}
static dtrain_tensor *build_mean(dtrain_tape *tape, model *m)
{
    dtrain_tensor *h =
        dtrain_linear(tape, input(tape, m, 0), &m->params[0], NULL, DTRAIN_ACTIVATION_GELU);
    return dtrain_mean(tape, h);
}

static void test_elementwise(void)
{
    model m = model_of("add", build_add);
    add_input(&m, 2, 3, 4, 0);
    add_input(&m, 2, 3, 4, 0);
    check_on_devices(&m);

    m = model_of("scale", build_scale);
    add_input(&m, 2, 3, 4, 0);
    check_on_devices(&m);

    m = model_of("mean", build_mean);
    add_input(&m, 2, 3, 4, 0);
    add_param(&m, "weight", 7, 4);
    check_on_devices(&m);
}

static dtrain_tensor *build_cross_entropy(dtrain_tape *tape, model *m)
{
    dtrain_tensor *x = input(tape, m, 0);
    dtrain_tensor *logits =
        m->param_count ? dtrain_linear(tape, x, &m->params[0], NULL, m->activation) : x;
    return dtrain_cross_entropy(tape, logits, tokens(tape, m->targets, 1, 4), 5, 0);
}

static void test_cross_entropy(void)
{
    const int32_t targets[3][4] = {{0, 4, 2, 2}, {-1, 3, -1, 0}, {-1, -1, -1, -1}};
    for (int variant = 0; variant < 6; variant++)
        for (int activation = -1; activation < 3; activation++) { /* -1: logits are the input */
            const int64_t columns = variant < 3 ? 5 : 7;          /* 5 classes and padding */
            model m = model_of("cross_entropy", build_cross_entropy);
            memcpy(m.targets, targets[variant % 3], sizeof targets[0]);
            add_input(&m, 2, 4, columns, 0);
            if (activation >= 0) add_param(&m, "classifier", columns, columns);
            m.activation = (dtrain_activation)(activation > 0 ? activation : 0);
            check_on_devices(&m);
        }
}

/* ---- Graphs: values and parameters with several uses -------------------------------------------*/

static dtrain_tensor *build_residual(dtrain_tape *tape, model *m)
{
    dtrain_tensor *x = input(tape, m, 0);
    for (int layer = 0; layer < 2; layer++) { /* the layers share their weights */
        dtrain_tensor *h = dtrain_layernorm(tape, x, NULL, &m->params[0], &m->params[1], 1e-5f);
        h = dtrain_linear(tape, h, &m->params[2], &m->params[3], DTRAIN_ACTIVATION_GELU);
        h = dtrain_linear(tape, h, &m->params[4], &m->params[5], DTRAIN_ACTIVATION_NONE);
        x = dtrain_add(tape, x, h);
    }
    return x;
}

static dtrain_tensor *build_fan(dtrain_tape *tape, model *m)
{
    dtrain_tensor *x = input(tape, m, 0), *y = dtrain_add(tape, x, x);
    dtrain_tensor *a = dtrain_linear(tape, y, &m->params[0], NULL, DTRAIN_ACTIVATION_GELU);
    dtrain_tensor *b = dtrain_add(tape, y, a); /* both share one gradient */
    dtrain_tensor *c = dtrain_add(tape, b, dtrain_scale(tape, b, 0.5f));
    dtrain_tensor *d = dtrain_linear(tape, a, &m->params[0], NULL, DTRAIN_ACTIVATION_GELU);
    return dtrain_add(tape, dtrain_add(tape, c, d), dtrain_add(tape, a, y));
}

/* Kernels that can only overwrite, on tensors that have a gradient already. */
static dtrain_tensor *build_overwrite(dtrain_tape *tape, model *m)
{
    const dtrain_attention_desc whole = {.sequence = 4, .heads = 1};
    dtrain_tensor *x = input(tape, m, 0);
    dtrain_tensor *qkv =
        dtrain_linear(tape, x, &m->params[0], NULL, DTRAIN_ACTIVATION_NONE); /* (4,12) */
    dtrain_tensor *y = dtrain_add(tape, causal_attention(tape, qkv, 2, 2),
                                  dtrain_attention(tape, qkv, NULL, NULL, &whole));
    dtrain_tensor *t = tokens(tape, m->targets, 1, 4);
    dtrain_tensor *loss =
        dtrain_add(tape, dtrain_cross_entropy(tape, qkv, t, 0, 0), dtrain_mean(tape, qkv));
    loss =
        dtrain_add(tape, dtrain_scale(tape, loss, 0.5f), dtrain_cross_entropy(tape, qkv, t, 0, 0));
    return dtrain_add(tape, loss, dtrain_cross_entropy(tape, y, t, 0, 0));
}

/* The gradient in the logits' own memory is handed on by add to both of its inputs. */
static dtrain_tensor *build_in_place_add(dtrain_tape *tape, model *m)
{
    dtrain_tensor *x = input(tape, m, 0);
    dtrain_tensor *a = dtrain_linear(tape, x, &m->params[0], NULL, DTRAIN_ACTIVATION_GELU);
    dtrain_tensor *b = dtrain_linear(tape, a, &m->params[0], NULL, DTRAIN_ACTIVATION_GELU);
    return dtrain_cross_entropy(tape, dtrain_add(tape, a, b), tokens(tape, m->targets, 1, 4), 0, 0);
}

/* Tied weights: token embedding and classifier, one through an alias. */
static dtrain_tensor *build_tied(dtrain_tape *tape, model *m)
{
    dtrain_tensor *x =
        dtrain_embedding(tape, tokens(tape, m->tokens, 2, 2), &m->params[0], &m->params[2]);
    x = dtrain_linear(tape, x, &m->params[1], NULL, DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(tape, x, tokens(tape, m->targets, 2, 2), 0, 0);
}

/* One layernorm weight with two biases: the kernel has one accumulate flag for both. */
static dtrain_tensor *build_two_biases(dtrain_tape *tape, model *m)
{
    dtrain_tensor *x = input(tape, m, 0);
    return dtrain_add(tape, dtrain_layernorm(tape, x, NULL, &m->params[0], &m->params[1], 1e-5f),
                      dtrain_layernorm(tape, dtrain_scale(tape, x, 2), NULL, &m->params[0],
                                       &m->params[2], 1e-5f));
}

static void test_graphs(void)
{
    model m = model_of("residual", build_residual);
    add_input(&m, 2, 3, 4, 0);
    add_param(&m, "ln weight", 4, 0);
    add_param(&m, "ln bias", 4, 0);
    add_param(&m, "fc weight", 6, 4);
    add_param(&m, "fc bias", 6, 0);
    add_param(&m, "proj weight", 4, 6);
    add_param(&m, "proj bias", 4, 0);
    check_on_devices(&m);

    m = model_of("fan", build_fan);
    add_input(&m, 2, 3, 4, 0);
    add_param(&m, "weight", 4, 4);
    for (int i = 0; i < 16; i++) m.params[0].value[i] *= 0.3f;
    check_on_devices(&m);

    m = model_of("overwrite", build_overwrite);
    m.targets[1] = 3, m.targets[3] = -1;
    add_input(&m, 2, 4, 5, 0);
    add_param(&m, "weight", 12, 5);
    check_on_devices(&m);

    m = model_of("in-place add", build_in_place_add);
    m.targets[1] = 3;
    add_input(&m, 2, 4, 5, 0);
    add_param(&m, "weight", 5, 5);
    check_on_devices(&m);

    m = model_of("tied", build_tied);
    m.tokens[1] = 4, m.tokens[2] = 2, m.targets[0] = 3, m.targets[3] = 1;
    dtrain_param *token = add_param(&m, "token", 5, 4);
    m.params[1] = *token;
    m.params[1].name = "classifier";
    m.params[1].value = m.params[1].grad = NULL;
    m.params[1].shape[0] = m.params[1].shape[1] = 0; /* as its target */
    m.params[1].alias_of = token;
    m.param_count++;
    add_param(&m, "position", 2, 4);
    m.params[1].alias_of = &m.params[0]; /* the struct is checked in place */
    check_on_devices(&m);

    m = model_of("two biases", build_two_biases);
    add_input(&m, 2, 3, 4, 0);
    add_param(&m, "weight", 4, 0);
    add_param(&m, "bias 1", 4, 0);
    add_param(&m, "bias 2", 4, 0);
    check_on_devices(&m);
}

static void test_dropout_gradient(void)
{
    model m = model_of("dropout", build_dropout);
    m.flags = 1;
    add_input(&m, 2, 5, 8, 0);
    dtrain_device *device = open_device(0);
    dtrain_tape *tape = NULL;
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    float *gradient = (float *)malloc(40 * sizeof(float));
    dtrain_tape_begin(tape, 0, 5);
    CHECK(dtrain_tape_backward(tape, model_loss(tape, &m), 1) == DTRAIN_OK);
    CHECK(dtrain_tensor_read(tape, m.input[0], NULL, gradient) == DTRAIN_OK);
    compare_slopes(tape, &m, "input", m.input_value[0], gradient, 40);
    free(gradient);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    model_free(&m);
}

/* ---- PyTorch's values --------------------------------------------------------------------------*/

static void check_floats(const char *what, const float *got, const float *expected, int64_t count,
                         double tolerance)
{
    for (int64_t i = 0; i < count; i++)
        CHECK_MSG(fabs((double)got[i] - (double)expected[i]) <=
                      tolerance * (1 + fabs((double)expected[i])),
                  "%s[%d] is %.9g, PyTorch says %.9g", what, (int)i, (double)got[i],
                  (double)expected[i]);
}

static void check_golden(dtrain_tape *tape)
{
    const int64_t shape[2] = {6, 10}, logit_shape[2] = {5, 7}, target_shape[1] = {5},
                  qkv_shape[2] = {10, 24};
    float weight[10], bias[10], out[80], qkv[240];
    dtrain_param w, b;
    memset(&w, 0, sizeof w);
    w.count = 10;
    b = w;
    memcpy(weight, op_layernorm_w, sizeof weight);
    memcpy(bias, op_layernorm_b, sizeof bias);
    w.value = weight, b.value = bias;
    dtrain_tape_begin(tape, 0, 0);
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, op_layernorm_x, false);
    CHECK(dtrain_tensor_read(tape, dtrain_layernorm(tape, x, NULL, &w, &b, 1e-5f), out, NULL) ==
          DTRAIN_OK);
    check_floats("layernorm", out, op_layernorm_y, 60, 1e-5);

    for (int ignore = 0; ignore < 2; ignore++) {
        int32_t targets[5];
        for (int i = 0; i < 5; i++) {
            targets[i] = ignore ? op_ce_ignore_targets[i] : op_ce_targets[i];
            if (targets[i] < 0) targets[i] = -1; /* PyTorch: -100 */
        }
        dtrain_tape_begin(tape, 0, 0);
        x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, logit_shape, op_ce_logits, true);
        dtrain_tensor *t =
            dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, target_shape, targets, false);
        dtrain_tensor *loss = dtrain_cross_entropy(tape, x, t, 0, 0);
        CHECK(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK);
        CHECK(dtrain_tensor_read(tape, loss, out, NULL) == DTRAIN_OK);
        CHECK_CLOSE(out[0], ignore ? op_ce_ignore_loss[0] : op_ce_loss[0], 1e-5);
        CHECK(dtrain_tensor_read(tape, x, NULL, out) == DTRAIN_OK);
        check_floats("d logits", out, ignore ? op_ce_ignore_dlogits : op_ce_dlogits, 35, 1e-5);
    }

    for (int i = 0; i < 80; i++) { /* (2,2,5,4) -> rows of q, k, v */
        int d = i % 4, t = i / 4 % 5, h = i / 20 % 2, batch = i / 40, row = batch * 5 + t;
        qkv[row * 24 + h * 4 + d] = op_sdpa_q[i];
        qkv[row * 24 + 8 + h * 4 + d] = op_sdpa_k[i];
        qkv[row * 24 + 16 + h * 4 + d] = op_sdpa_v[i];
    }
    dtrain_tape_begin(tape, 0, 0);
    x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, qkv_shape, qkv, false);
    CHECK(dtrain_tensor_read(tape, causal_attention(tape, x, 5, 2), out, NULL) == DTRAIN_OK);
    for (int i = 0; i < 80; i++) {
        int d = i % 4, t = i / 4 % 5, h = i / 20 % 2, batch = i / 40;
        CHECK_CLOSE(out[(batch * 5 + t) * 8 + h * 4 + d], op_sdpa_y[i], 1e-5);
    }
}

static void test_golden(void)
{
    for (int kind = 0; kind < device_kinds; kind++) {
        dtrain_device *device = open_device(kind);
        dtrain_tape *tape = NULL;
        CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
        check_golden(tape);
        dtrain_tape_destroy(tape);
        dtrain_device_destroy(device);
    }
}

/* ---- The tape's promises -----------------------------------------------------------------------*/

/* A language model of one block: enough different sizes, one unit per part. */
static dtrain_tensor *build_language(dtrain_tape *tape, model *m)
{
    dtrain_tape_unit(tape, 0);
    dtrain_tensor *x = dtrain_embedding(tape, tokens(tape, m->tokens, 8, 8), &m->params[0], NULL);
    x = dtrain_dropout(tape, x, 0.1f);
    dtrain_tape_unit(tape, 1);
    dtrain_tensor *h = dtrain_linear(tape, x, &m->params[1], &m->params[2], DTRAIN_ACTIVATION_NONE);
    x = dtrain_add(tape, x, causal_attention(tape, h, 8, 2));
    dtrain_tape_unit(tape, 2);
    x = dtrain_layernorm(tape, x, NULL, &m->params[3], NULL, 1e-5f);
    dtrain_tape_unit(tape, 3);
    m->input[0] =
        dtrain_linear(tape, x, &m->params[4], NULL, DTRAIN_ACTIVATION_NONE); /* the logits */
    return dtrain_cross_entropy(tape, m->input[0], tokens(tape, m->targets, 8, 8), 0, 0);
}

enum { VOCAB = 600, WIDTH = 16 };

static model language_model(void)
{
    model m = model_of("language", build_language);
    for (int i = 0; i < 64; i++) m.tokens[i] = i * 7 % VOCAB, m.targets[i] = i * 11 % VOCAB;
    add_param(&m, "token", VOCAB, WIDTH);
    add_param(&m, "qkv", 3 * WIDTH, WIDTH);
    add_param(&m, "qkv bias", 3 * WIDTH, 0);
    add_param(&m, "ln", WIDTH, 0);
    add_param(&m, "head", VOCAB, WIDTH);
    return m;
}

static dtrain_result language_step(dtrain_tape *tape, model *m, uint64_t seed)
{
    for (int i = 0; i < m->param_count; i++) m->params[i].state.grad_written = false;
    const dtrain_result begun = dtrain_tape_begin(tape, 0, seed);
    if (begun != DTRAIN_OK) return begun;
    return dtrain_tape_backward(tape, build_language(tape, m), 1);
}

static void test_steady_state(void)
{
    model m = language_model();
    dtrain_device *device = open_device(0);
    dtrain_tape *tape = NULL;
    dtrain_tape_info first, later;
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    CHECK(language_step(tape, &m, 1) == DTRAIN_OK);
    const void *logits = m.input[0], *data = m.input[0]->data;
    dtrain_tape_query(tape, NULL);
    dtrain_tape_query(tape, &first);
    size_t held = device->allocated_bytes;
    naive_allocations_left = 0;
    for (uint64_t step = 2; step < 6; step++) {
        CHECK(language_step(tape, &m, step) == DTRAIN_OK);
        CHECK(m.input[0] == logits && m.input[0]->data == data);
        model_value(tape, &m, DTRAIN_TAPE_NO_GRAD); /* an evaluation in between */
    }
    naive_allocations_left = -1;
    dtrain_tape_query(tape, &later);
    CHECK(later.block_allocations == first.block_allocations);
    CHECK(later.activation_bytes == first.activation_bytes);
    CHECK(later.gradient_bytes == first.gradient_bytes);
    CHECK(first.activation_bytes + first.gradient_bytes == held);
    CHECK(first.node_count == 8 && first.tensor_count == 10);
    dtrain_tape_destroy(tape);
    CHECK(device->allocated_bytes == 0);
    dtrain_device_destroy(device);
    model_free(&m);
}

/* A pass of another shape in between takes what it needs and disturbs nothing. */
static void test_changing_shapes(void)
{
    model m = model_of("linear", build_linear);
    dtrain_device *device = open_device(0);
    dtrain_tape *tape = NULL;
    dtrain_tape_info info;
    uint64_t allocations = 0;
    add_input(&m, 2, 3000, 20, 0);
    add_param(&m, "weight", 30, 20);
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    for (int step = 0; step < 9; step++) {
        m.input_shape[0][0] = step % 3 ? 3000 / (step % 3) : 900;
        dtrain_tape_begin(tape, 0, 0);
        CHECK(dtrain_tape_backward(tape, model_loss(tape, &m), 1) == DTRAIN_OK);
        dtrain_tape_query(tape, &info);
        if (step == 5) allocations = info.block_allocations;
    }
    CHECK(info.block_allocations == allocations);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    model_free(&m);
}

static void test_logits_in_place(void)
{
    model m = language_model();
    dtrain_device *device = open_device(0);
    dtrain_tape *tape = NULL;
    dtrain_tape_info info;
    float *logits = (float *)malloc(64 * VOCAB * sizeof(float)), top = 0;
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    CHECK(language_step(tape, &m, 1) == DTRAIN_OK);
    dtrain_tape_query(tape, &info);
    CHECK_MSG(info.gradient_bytes < 64 * VOCAB * sizeof(float), "%llu bytes of gradients",
              (unsigned long long)info.gradient_bytes);
    CHECK(dtrain_tensor_read(tape, m.input[0], logits, NULL) == DTRAIN_OK);
    for (int row = 0; row < 64; row++) { /* a row of d logits sums to 0 */
        double sum = 0;
        for (int i = 0; i < VOCAB; i++) {
            sum += (double)logits[row * VOCAB + i];
            top = fmaxf(top, fabsf(logits[row * VOCAB + i]));
        }
        CHECK(fabs(sum) < 1e-6);
    }
    CHECK(top <= 1.0f / 64);
    free(logits);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    model_free(&m);
}

static void test_plan_device(void)
{
    model m = language_model(), plan_model = m;
    dtrain_device *device = open_device(0), *plan = NULL;
    dtrain_device_desc desc;
    dtrain_tape *tape = NULL, *plan_tape = NULL;
    dtrain_tape_info real, planned;
    memset(&desc, 0, sizeof desc);
    CHECK(dtrain_device_create(device_table("plan"), &desc, &plan) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, plan, &plan_tape) == DTRAIN_OK);
    for (int i = 0; i < m.param_count; i++) { /* never touched: they may be missing */
        plan_model.params[i].value = plan_model.params[i].grad = NULL;
        plan_model.params[i].state.pending_uses = 77; /* as a failed backward leaves it */
    }
    for (int step = 0; step < 2; step++) {
        CHECK(language_step(tape, &m, 1) == DTRAIN_OK);
        CHECK_MSG(language_step(plan_tape, &plan_model, 1) == DTRAIN_OK, "%s", dtrain_last_error());
        dtrain_tape_query(tape, &real);
        dtrain_tape_query(plan_tape, &planned);
        CHECK(planned.activation_bytes == real.activation_bytes);
        CHECK(planned.gradient_bytes == real.gradient_bytes);
        CHECK(planned.block_allocations == real.block_allocations);
        CHECK(planned.node_count == real.node_count && planned.tensor_count == real.tensor_count);
    }
    for (int i = 0; i < m.param_count; i++)
        CHECK(!plan_model.params[i].state.grad_written &&
              plan_model.params[i].state.pending_uses == 0);
    dtrain_tape_destroy(plan_tape);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(plan);
    dtrain_device_destroy(device);
    model_free(&m);
}

/* Activations and nothing else: what blocks hold beyond the values themselves stays small. */
static void test_little_waste(void)
{
    dtrain_device *plan = NULL;
    dtrain_device_desc desc;
    dtrain_tape *tape = NULL;
    dtrain_tape_info info;
    const int64_t rows = 8 * 256, n = 384, shape[2] = {rows, 3 * n};
    static const float host[1] = {0}; /* the plan device does not copy */
    dtrain_param weight, ln;
    double values = 0;
    memset(&desc, 0, sizeof desc);
    memset(&weight, 0, sizeof weight);
    weight.name = "weight";
    weight.shape[0] = 3 * n, weight.shape[1] = n;
    ln = weight;
    ln.shape[0] = n, ln.shape[1] = 0;
    CHECK(dtrain_device_create(device_table("plan"), &desc, &plan) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, plan, &tape) == DTRAIN_OK);
    dtrain_tape_begin(tape, 0, 0);
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, host, true);
    values += (double)(rows * 3 * n);
    for (int i = 0; i < 40; i++) {
        x = causal_attention(tape, x, 256, 6);
        x = dtrain_layernorm(tape, x, NULL, &ln, NULL, 1e-5f);
        x = dtrain_linear(tape, x, &weight, NULL, DTRAIN_ACTIVATION_GELU);
        values += (double)(rows * (n + 6 + n + 2 + 3 * n + 3 * n));
    }
    CHECK(tape_error(tape) == DTRAIN_OK);
    dtrain_tape_query(tape, &info);
    CHECK_MSG((double)info.activation_bytes < 1.01 * 4 * values, "%g bytes for %g bytes of values",
              (double)info.activation_bytes, 4 * values);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(plan);
}

/* A gradient is given back as soon as it is spent: depth needs no more of them. */
static void test_gradients_reused(void)
{
    uint64_t bytes[2];
    for (int deep = 0; deep < 2; deep++) {
        dtrain_device *device = open_device(0);
        dtrain_tape *tape = NULL;
        dtrain_tape_info info;
        model m = model_of("linear", build_linear);
        add_input(&m, 2, 16, 8, 0);
        add_param(&m, "weight", 8, 8);
        CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
        dtrain_tape_begin(tape, 0, 0);
        dtrain_tensor *x = build_linear(tape, &m);
        for (int i = 0; i < (deep ? 40 : 3); i++)
            x = dtrain_add(tape, x,
                           dtrain_linear(tape, x, &m.params[0], NULL, DTRAIN_ACTIVATION_NONE));
        CHECK(dtrain_tape_backward(tape, dtrain_mean(tape, x), 1) == DTRAIN_OK);
        dtrain_tape_query(tape, &info);
        bytes[deep] = info.gradient_bytes;
        dtrain_tape_destroy(tape);
        dtrain_device_destroy(device);
        model_free(&m);
    }
    CHECK(bytes[0] == bytes[1]);
    CHECK_MSG(bytes[0] <= 2 * 16 * 8 * sizeof(float) + 64, "%llu bytes for a residual chain",
              (unsigned long long)bytes[0]);
}

static void test_accumulation(void)
{
    model m = language_model();
    dtrain_device *device = open_device(0);
    dtrain_tape *tape = NULL;
    float whole[3 * WIDTH * WIDTH];
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    m.params[3].flags = DTRAIN_PARAM_FROZEN;
    memset(m.params[3].grad, 0x55, WIDTH * sizeof(float));
    CHECK(language_step(tape, &m, 3) == DTRAIN_OK);
    memcpy(whole, m.params[1].grad, sizeof whole);
    CHECK(!m.params[3].state.grad_written && m.params[0].state.grad_written &&
          m.params[0].state.pending_uses == 0);
    for (int i = 0; i < WIDTH; i++) {
        uint32_t bits;
        memcpy(&bits, &m.params[3].grad[i], 4);
        CHECK(bits == 0x55555555u);
    }
    for (int i = 0; i < m.param_count; i++) m.params[i].state.grad_written = false;
    for (int micro = 0; micro < 4; micro++) {
        dtrain_tape_begin(tape, 0, 3);
        CHECK(dtrain_tape_backward(tape, build_language(tape, &m), 0.25f) == DTRAIN_OK);
    }
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++)
        CHECK_CLOSE(m.params[1].grad[i], whole[i], 1e-6);
    free(m.params[1].grad); /* without strategy: no place, no gradient */
    m.params[1].grad = NULL;
    CHECK(language_step(tape, &m, 3) == DTRAIN_OK);
    CHECK(!m.params[1].state.grad_written && m.params[0].state.grad_written);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    model_free(&m);
}

static void test_dropout(void)
{
    enum { N = 20000 };
    const int64_t shape[1] = {N};
    dtrain_device *device = open_device(device_kinds - 1);
    dtrain_tape *tape = NULL;
    float *ones = (float *)malloc(4 * N * sizeof(float)), *a = ones + N, *b = a + N, *c = b + N;
    long kept = 0, same_b = 0, same_c = 0;
    for (int i = 0; i < N; i++) ones[i] = 1;
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    for (int pass = 0; pass < 3; pass++) { /* pass 0 and 1 alike, 2 with another seed */
        dtrain_tape_begin(tape, 0, pass == 2 ? 12 : 11);
        dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 1, shape, ones, true);
        dtrain_tensor *first = dtrain_dropout(tape, x, 0.3f),
                      *second = dtrain_dropout(tape, x, 0.3f);
        CHECK(dtrain_tensor_read(tape, first, pass == 2 ? c : b, NULL) == DTRAIN_OK);
        if (pass == 1) CHECK(memcmp(a, b, N * sizeof(float)) == 0);
        if (pass == 0) memcpy(a, b, N * sizeof(float));
        if (pass == 1) CHECK(dtrain_tensor_read(tape, second, b, NULL) == DTRAIN_OK);
        CHECK(dtrain_dropout(tape, x, 0) == x);
    }
    for (int i = 0; i < N; i++) {
        CHECK(a[i] == 0 || fabsf(a[i] - 1 / 0.7f) < 1e-6f);
        kept += a[i] > 0;
        same_b += (a[i] > 0) == (b[i] > 0);
        same_c += (a[i] > 0) == (c[i] > 0);
    }
    CHECK(labs(kept - 14000) < 300);   /* deviation 65 */
    CHECK(labs(same_b - 11600) < 350); /* 0.7^2 + 0.3^2 = 0.58 of independent masks agree */
    CHECK(labs(same_c - 11600) < 350);
    dtrain_tape_begin(tape, DTRAIN_TAPE_NO_GRAD, 11);
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 1, shape, ones, true);
    CHECK(dtrain_dropout(tape, x, 0.3f) == x && !x->needs_grad);
    free(ones);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

/* Every allocation fails once: an error, nothing lost, and the next pass is as if nothing had been. */
static counted_memory host_memory; /* of the world that the tape belongs to */

static int step_with_failure(dtrain_world *world, model *m, int host_at, int device_at)
{
    dtrain_device *device = open_device(0);
    dtrain_tape *tape = NULL;
    CHECK(dtrain_tape_create(world, NULL, device, &tape) == DTRAIN_OK);
    host_memory.fail_at = host_at < 0 ? 0 : host_memory.calls + host_at + 1;
    naive_allocations_left = device_at;
    dtrain_result result = language_step(tape, m, 1);
    CHECK(result == DTRAIN_OK || result == DTRAIN_ERROR_MEMORY);
    CHECK(tape_error(tape) == result);
    host_memory.fail_at = 0;
    naive_allocations_left = -1;
    CHECK(language_step(tape, m, 1) == DTRAIN_OK);
    CHECK_CLOSE(m->params[1].grad[5], m->params[1].init_scale, 1e-6);
    dtrain_tape_destroy(tape);
    CHECK(device->allocated_bytes == 0);
    dtrain_device_destroy(device);
    return result != DTRAIN_OK;
}

static int allocation_failures_main(dtrain_world *world, void *user)
{
    model m = language_model();
    (void)user;
    int at = 0;
    m.params[1].init_scale = NAN;
    dtrain_device *device = open_device(0);
    dtrain_tape *tape = NULL;
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    CHECK(language_step(tape, &m, 1) == DTRAIN_OK);
    m.params[1].init_scale = m.params[1].grad[5];
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    for (at = 0; step_with_failure(world, &m, -1, at); at++) {}
    CHECK_MSG(at > 4, "only %d device allocations", at);
    for (at = 0; step_with_failure(world, &m, at, -1); at++) {}
    CHECK_MSG(at > 5, "only %d host allocations", at);
    model_free(&m);
    return 0;
}

static void test_allocation_failures(void)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.mode = DTRAIN_LAUNCH_THREADS;
    desc.options.allocator = counted_allocator(&host_memory);
    CHECK(dtrain_launch(&desc, allocation_failures_main, NULL, NULL) == DTRAIN_OK);
    CHECK(host_memory.live == 0 && host_memory.wrong == 0);
}

/* ---- Errors ------------------------------------------------------------------------------------*/

static void expect_error(dtrain_tape *tape, dtrain_result code, const char *part, const char *other)
{
    dtrain_result result = tape_error(tape);
    CHECK_MSG(result == code && strstr(dtrain_last_error(), part) &&
                  strstr(dtrain_last_error(), other),
              "expected %s with '%s' and '%s', got %s: %s", dtrain_result_text(code), part, other,
              dtrain_result_text(result), dtrain_last_error());
    CHECK(dtrain_tape_begin(tape, 0, 0) == DTRAIN_OK && tape_error(tape) == DTRAIN_OK);
}

static void test_errors(void)
{
    dtrain_device *device = open_device(0);
    dtrain_tape *tape = NULL;
    const int64_t shape[2] = {6, 16}, token_shape[2] = {2, 3}, zero[1] = {0},
                  huge[3] = {1 << 30, 1 << 30, 1 << 30};
    float data[96] = {0};
    int32_t ids[6] = {0, 1, 2, 3, 4, 9};
    model m;
    memset(&m, 0, sizeof m);
    dtrain_param *w = add_param(&m, "fc_w", 8, 10), *v = add_param(&m, "vec", 16, 0);
    dtrain_param *ok = add_param(&m, "ok", 8, 16);
    const dtrain_result argument = DTRAIN_ERROR_ARGUMENT, usage = DTRAIN_ERROR_USAGE;
#define X dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, data, true)
#define IDS dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, token_shape, ids, false)

    CHECK(dtrain_tape_create(NULL, NULL, NULL, &tape) == argument && !tape);
    CHECK(dtrain_tape_create(NULL, NULL, device, NULL) == argument);
    CHECK(dtrain_tape_begin(NULL, 0, 0) == argument && tape_error(NULL) == DTRAIN_OK);
    CHECK(dtrain_tape_backward(NULL, NULL, 1) == argument && !dtrain_sum(NULL, NULL));
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    CHECK(tape_error(tape) == DTRAIN_OK);
    CHECK(!X);
    expect_error(tape, usage, "dtrain_tape_input", "call dtrain_tape_begin");

    CHECK(!dtrain_linear(tape, X, w, NULL, DTRAIN_ACTIVATION_NONE));
    expect_error(tape, argument, "dtrain_linear: parameter fc_w must be (any, 16)",
                 "input 1 is (6, 16) f32; parameter fc_w is (8, 10)");
    CHECK(!dtrain_linear(tape, X, v, NULL, DTRAIN_ACTIVATION_NONE));
    expect_error(tape, argument, "parameter vec is (16)", "must be (any, 16)");
    CHECK(!dtrain_linear(tape, X, ok, v, DTRAIN_ACTIVATION_NONE));
    expect_error(tape, argument, "parameter vec is (16)", "must be (8)");
    CHECK(!dtrain_linear(tape, X, NULL, NULL, DTRAIN_ACTIVATION_NONE));
    expect_error(tape, argument, "dtrain_linear", "parameter 1 is NULL");
    CHECK(!dtrain_linear(tape, X, ok, NULL, (dtrain_activation)4));
    expect_error(tape, argument, "dtrain_linear", "unknown activation 4");
    CHECK(!dtrain_linear(tape, IDS, ok, NULL, DTRAIN_ACTIVATION_NONE));
    expect_error(tape, argument, "input 1 is i32", "expected f32");
    CHECK(!dtrain_layernorm(tape, X, NULL, w, NULL, 1e-5f));
    expect_error(tape, argument, "dtrain_layernorm: parameter fc_w", "must be (16)");
    CHECK(!dtrain_embedding(tape, X, ok, NULL));
    expect_error(tape, argument, "dtrain_embedding", "expected i32");
    CHECK(!dtrain_embedding(tape, IDS, v, NULL));
    expect_error(tape, argument, "parameter vec", "must be (any, any)");
    dtrain_param short_position = *ok;
    short_position.shape[0] = 2;
    CHECK(!dtrain_embedding(tape, IDS, ok, &short_position));
    expect_error(tape, argument, "dtrain_embedding",
                 "there are 2 positions, and the tokens have 3");
    CHECK(!causal_attention(tape, X, 3, 2));
    expect_error(tape, argument, "input 1 is (6, 16)", "2 heads of k and v, side by side");
    CHECK(!dtrain_add(tape, X, dtrain_linear(tape, X, ok, NULL, DTRAIN_ACTIVATION_NONE)));
    expect_error(tape, argument, "dtrain_add: expected inputs of the same",
                 "input 1 is (6, 16) f32; input 2 is (6, 8) f32");
    CHECK(!dtrain_add(tape, X, NULL));
    expect_error(tape, argument, "dtrain_add: input 2 is NULL", "expected f32");
    CHECK(!dtrain_dropout(tape, X, 1.0f));
    expect_error(tape, argument, "dtrain_dropout", "is 1, not in [0, 1)");
    CHECK(!dtrain_dropout(tape, X, NAN));
    expect_error(tape, argument, "dtrain_dropout", "not in [0, 1)");
    CHECK(!dtrain_cross_entropy(
        tape, X, dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, token_shape, ids, false), 0, 0));
    expect_error(tape, argument, "each of the 6 rows", "input 2 is (2) i32");
    for (int64_t classes = -1; classes < 18; classes += 18) {
        const int64_t six = 6;
        CHECK(!dtrain_cross_entropy(
            tape, X, dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &six, ids, false), classes, 0));
        expect_error(tape, argument, classes < 0 ? "-1 classes" : "17 classes",
                     "the logits have 16 columns; input 1 is (6, 16) f32");
    }
    CHECK(!dtrain_tape_input(tape, DTRAIN_DTYPE_BF16, 2, shape, data, false));
    expect_error(tape, argument, "dtrain_tape_input", "bf16");
    CHECK(!dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, shape, data, true));
    expect_error(tape, argument, "dtrain_tape_input", "no gradient");
    CHECK(!dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 5, shape, data, true));
    expect_error(tape, argument, "dtrain_tape_input", "5 axes");
    CHECK(!dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 1, zero, data, true));
    expect_error(tape, argument, "axis 0", "length 0");
    CHECK(!dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 1, shape, NULL, true));
    expect_error(tape, argument, "dtrain_tape_input", "host is NULL");
    CHECK(!dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 3, huge, data, true));
    expect_error(tape, DTRAIN_ERROR_MEMORY, "elements", "machine");
    CHECK(dtrain_tape_begin(tape, 6, 0) == argument && !X);
    expect_error(tape, argument, "dtrain_tape_begin", "0x6");
    float *value = ok->value;
    ok->value = NULL;
    CHECK(!dtrain_linear(tape, X, ok, NULL, DTRAIN_ACTIVATION_NONE));
    expect_error(tape, usage, "parameter ok", "dtrain_strategy_create");
    ok->value = value;
    ids[5] = 8;
    CHECK(!dtrain_embedding(tape, IDS, ok, NULL));
    CHECK(tape_error(tape) == DTRAIN_ERROR_DATA || tape_error(tape) == argument);

    /* stickiness: the first error stays, whatever comes after it */
    dtrain_tape_begin(tape, 0, 0);
    dtrain_tensor *y = dtrain_linear(tape, X, w, NULL, DTRAIN_ACTIVATION_NONE);
    y = dtrain_add(tape, dtrain_scale(tape, y, 2), dtrain_dropout(tape, y, 0.5f));
    y = dtrain_sum(tape,
                   causal_attention(tape, dtrain_layernorm(tape, y, NULL, v, v, 1e-5f), 3, 1));
    dtrain_tape_unit(tape, 1);
    CHECK(!y && !X);
    dtrain_dtype_name(DTRAIN_DTYPE_F32);
    dtrain_tape_begin(NULL, 0, 0); /* another sentence on this thread */
    CHECK(dtrain_tape_backward(tape, y, 1) == argument);
    CHECK(strstr(dtrain_last_error(), "parameter fc_w") != NULL);
    CHECK(dtrain_tensor_read(tape, y, data, NULL) == argument);
    expect_error(tape, argument, "parameter fc_w", "(8, 10)");

    /* backward */
    CHECK(dtrain_tape_backward(tape, X, 1) == argument);
    expect_error(tape, argument, "dtrain_tape_backward", "96 elements");
    CHECK(dtrain_tape_backward(tape, NULL, 1) == argument);
    expect_error(tape, argument, "dtrain_tape_backward", "loss is NULL");
    dtrain_tensor *plain = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, data, false);
    CHECK(dtrain_tape_backward(tape, dtrain_sum(tape, plain), 1) == usage);
    expect_error(tape, usage, "dtrain_tape_backward", "no trainable parameter");
    dtrain_tape_begin(tape, DTRAIN_TAPE_NO_GRAD, 0);
    CHECK(dtrain_tape_backward(tape, dtrain_sum(tape, X), 1) == usage);
    expect_error(tape, usage, "dtrain_tape_backward", "NO_GRAD");
    y = dtrain_sum(tape, X);
    CHECK(dtrain_tape_backward(tape, y, 1) == DTRAIN_OK);
    CHECK(dtrain_tape_backward(tape, y, 1) == usage);
    expect_error(tape, usage, "dtrain_tape_backward", "had its backward");
    y = dtrain_sum(tape, X);
    CHECK(dtrain_tape_backward(tape, y, 1) == DTRAIN_OK && !dtrain_scale(tape, y, 1));
    expect_error(tape, usage, "dtrain_scale", "call dtrain_tape_begin");

    /* reading */
    dtrain_tensor *x = X, *unused = X;
    plain = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, data, false);
    y = dtrain_sum(tape, dtrain_add(tape, x, plain));
    CHECK(dtrain_tensor_read(tape, x, NULL, data) == usage);
    CHECK(dtrain_tape_backward(tape, y, 3) == DTRAIN_OK);
    CHECK(dtrain_tensor_read(tape, plain, NULL, data) == usage);
    CHECK(dtrain_tensor_read(tape, y, NULL, data) == usage);
    CHECK(dtrain_tensor_read(tape, NULL, NULL, data) == argument);
    CHECK(dtrain_tensor_read(tape, y, NULL, NULL) == argument);
    data[7] = 5;
    CHECK(dtrain_tensor_read(tape, unused, NULL, data) == DTRAIN_OK && data[7] == 0);
    CHECK(dtrain_tensor_read(tape, x, NULL, data) == DTRAIN_OK && data[7] == 3 && data[95] == 3);
    CHECK(tape_error(tape) == DTRAIN_OK);
    dtrain_tape_destroy(tape);
    dtrain_tape_destroy(NULL);
    CHECK(device->allocated_bytes == 0);
    dtrain_device_destroy(device);
    model_free(&m);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_linear);
    RUN(test_linear_3d);
    RUN(test_layernorm);
    RUN(test_embedding);
    RUN(test_attention);
    RUN(test_elementwise);
    RUN(test_cross_entropy);
    RUN(test_graphs);
    RUN(test_dropout_gradient);
    RUN(test_golden);
    RUN(test_steady_state);
    RUN(test_changing_shapes);
    RUN(test_logits_in_place);
    RUN(test_plan_device);
    RUN(test_little_waste);
    RUN(test_gradients_reused);
    RUN(test_accumulation);
    RUN(test_dropout);
    RUN(test_allocation_failures);
    RUN(test_errors);
    return test_summary();
}
