/* differences.h: gradients of an operation beside finite differences, on the naive device and on the CPU.
 *
 * A case is a function that builds a tensor from inputs and parameters; its loss is the sum of the tensor's
 * elements, each times a number of its own. */
#ifndef DIFFERENCES_H
#define DIFFERENCES_H

#include "dtrain.h"
#include "naive_device.h"
#include "test.h"

enum { CASE_INPUTS = 3, CASE_PARAMS = 4 };

typedef struct op_case {
    const char *name;
    dtrain_tensor *(*build)(dtrain_tape *tape, struct op_case *c);
    int64_t number[4]; /* whatever build wants to know */
    int input_count, param_count;
    int64_t shape[CASE_INPUTS][4];
    float *value[CASE_INPUTS];
    dtrain_tensor *input[CASE_INPUTS]; /* of this pass */
    dtrain_param params[CASE_PARAMS];
    uint64_t drawn;
} op_case;

static inline op_case case_of(const char *name,
                              dtrain_tensor *(*build)(dtrain_tape *tape, op_case *c))
{
    op_case c;
    memset(&c, 0, sizeof c);
    c.name = name;
    c.build = build;
    return c;
}

static inline float *case_values(op_case *c, int64_t count, float scale)
{
    float *values = (float *)malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) values[i] = scale * dtrain_random_normal(42, 7, c->drawn++);
    return values;
}

static inline int64_t case_count(const int64_t shape[4])
{
    int64_t count = 1;
    for (int i = 0; i < 4 && shape[i]; i++) count *= shape[i];
    return count;
}

/* Add an input; the shape ends at its first 0. */
static inline void case_input(op_case *c, int64_t a, int64_t b, int64_t d, int64_t e)
{
    const int64_t shape[4] = {a, b, d, e};
    memcpy(c->shape[c->input_count], shape, sizeof shape);
    c->value[c->input_count++] = case_values(c, case_count(shape), 1);
}

static inline void case_param(op_case *c, int64_t rows, int64_t columns)
{
    dtrain_param *p = &c->params[c->param_count++];
    p->name = "param";
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->value = case_values(c, case_count(p->shape), 1);
    p->grad = case_values(c, case_count(p->shape), 1); /* must be overwritten */
}

static inline void case_free(op_case *c)
{
    for (int i = 0; i < c->input_count; i++) free(c->value[i]);
    for (int i = 0; i < c->param_count; i++) free(c->params[i].value), free(c->params[i].grad);
}

static inline dtrain_tensor *case_tensor(dtrain_tape *tape, op_case *c, int i)
{
    uint32_t ndim = 0;
    while (ndim < 4 && c->shape[i][ndim]) ndim++;
    return dtrain_tape_input(tape, DTRAIN_DTYPE_F32, ndim, c->shape[i], c->value[i], true);
}

static inline dtrain_tensor *case_loss(dtrain_tape *tape, op_case *c)
{
    for (int i = 0; i < c->input_count; i++) c->input[i] = case_tensor(tape, c, i);
    dtrain_tensor *y = c->build(tape, c);
    if (!y || y->count == 1) return y;
    float *weight = (float *)malloc((size_t)y->count * sizeof(float));
    for (int64_t i = 0; i < y->count; i++) weight[i] = dtrain_random_normal(43, 1, (uint64_t)i);
    dtrain_tensor *w = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, y->ndim, y->shape, weight, false);
    free(weight);
    return dtrain_sum(tape, dtrain_multiply(tape, y, w));
}

static inline double case_value(dtrain_tape *tape, op_case *c)
{
    float value = NAN;
    dtrain_tape_begin(tape, 0, 5);
    CHECK_MSG(dtrain_tensor_read(tape, case_loss(tape, c), &value, NULL) == DTRAIN_OK, "%s: %s",
              c->name, dtrain_last_error());
    return (double)value;
}

static inline double case_slope(dtrain_tape *tape, op_case *c, float *at, float h)
{
    const float keep = *at;
    *at = keep + h;
    const double up = case_value(tape, c), high = (double)*at;
    *at = keep - h;
    const double down = case_value(tape, c), low = (double)*at;
    *at = keep;
    return (up - down) / (high - low);
}

/* Compare gradient (count) with differences of the loss in value (count): of two widths, so that the error of
 * order h^2 drops out. */
static inline void case_compare(dtrain_tape *tape, op_case *c, const char *what, float *value,
                                const float *gradient, int64_t count)
{
    const double rounding = 2e-5 * (1 + fabs(case_value(tape, c)));
    for (int64_t i = 0; i < count; i++) {
        const double wide = case_slope(tape, c, &value[i], 0.04f);
        const double narrow = case_slope(tape, c, &value[i], 0.02f);
        const double expected = (4 * narrow - wide) / 3,
                     error = fabs((double)gradient[i] - expected);
        CHECK_MSG(error <= 5e-4 * (1 + fabs(expected)) + 0.1 * fabs(wide - narrow) + rounding,
                  "%s: d loss / d %s[%d] is %g, by differences %g", c->name, what, (int)i,
                  (double)gradient[i], expected);
    }
}

static inline void case_check_on(dtrain_tape *tape, op_case *c)
{
    float *gradient[CASE_INPUTS] = {NULL};
    for (int i = 0; i < c->param_count; i++) c->params[i].state.grad_written = false;
    dtrain_tape_begin(tape, 0, 5);
    CHECK_MSG(dtrain_tape_backward(tape, case_loss(tape, c), 1) == DTRAIN_OK, "%s: %s", c->name,
              dtrain_last_error());
    for (int i = 0; i < c->input_count; i++) {
        gradient[i] = (float *)malloc((size_t)case_count(c->shape[i]) * sizeof(float));
        CHECK(dtrain_tensor_read(tape, c->input[i], NULL, gradient[i]) == DTRAIN_OK);
    }
    for (int i = 0; i < c->input_count; i++) {
        char what[24];
        snprintf(what, sizeof what, "input %d", i);
        case_compare(tape, c, what, c->value[i], gradient[i], case_count(c->shape[i]));
        free(gradient[i]);
    }
    for (int i = 0; i < c->param_count; i++)
        case_compare(tape, c, "param", c->params[i].value, c->params[i].grad,
                     case_count(c->params[i].shape));
}

/* Check the case on both devices, and free it. */
static inline void case_check(op_case *c)
{
    for (int kind = 0; kind < 2; kind++) {
        dtrain_device *device = NULL;
        dtrain_tape *tape = NULL;
        const dtrain_device_ops *ops = kind ? device_table("cpu") : naive_device_ops();
        CHECK(dtrain_device_create(ops, NULL, &device) == DTRAIN_OK);
        CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
        case_check_on(tape, c);
        dtrain_tape_destroy(tape);
        dtrain_device_destroy(device);
    }
    case_free(c);
}

/* Every element is PyTorch's, within tolerance * (1 + |expected|). */
static inline void golden_check(const char *what, const float *got, const float *expected,
                                int64_t count, double tolerance)
{
    for (int64_t i = 0; i < count; i++) {
        const double error = fabs((double)got[i] - (double)expected[i]);
        CHECK_MSG(error <= tolerance * (1 + fabs((double)expected[i])),
                  "%s[%d] is %.9g, PyTorch says %.9g", what, (int)i, (double)got[i],
                  (double)expected[i]);
    }
}

/* Add an input with PyTorch's values. */
static inline void golden_input(op_case *c, int64_t a, int64_t b, int64_t d, const float *values)
{
    case_input(c, a, b, d, 0);
    const int64_t count = case_count(c->shape[c->input_count - 1]);
    memcpy(c->value[c->input_count - 1], values, (size_t)count * sizeof(float));
}

/* Compare the case's tensor with y, the gradients of its inputs and of its parameter with PyTorch's for the incoming
 * gradient dy (NULL: the case is a loss), on both devices, and free the case. */
static inline void golden_run(op_case *c, const float *y, const float *dy,
                              const float *const gradients[CASE_INPUTS], const float *d_param,
                              double tolerance)
{
    for (int kind = 0; kind < 2; kind++) {
        dtrain_device *device = NULL;
        dtrain_tape *tape = NULL;
        const dtrain_device_ops *ops = kind ? device_table("cpu") : naive_device_ops();
        float got[512];
        CHECK(dtrain_device_create(ops, NULL, &device) == DTRAIN_OK);
        CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
        for (int i = 0; i < c->param_count; i++) c->params[i].state.grad_written = false;
        dtrain_tape_begin(tape, 0, 0);
        for (int i = 0; i < c->input_count; i++) c->input[i] = case_tensor(tape, c, i);
        dtrain_tensor *out = c->build(tape, c), *loss = out;
        CHECK_MSG(dtrain_tensor_read(tape, out, got, NULL) == DTRAIN_OK, "%s: %s", c->name,
                  dtrain_last_error());
        if (!out) return;
        golden_check(c->name, got, y, out->count, tolerance);
        if (dy) {
            dtrain_tensor *w =
                dtrain_tape_input(tape, DTRAIN_DTYPE_F32, out->ndim, out->shape, dy, false);
            loss = dtrain_sum(tape, dtrain_multiply(tape, out, w));
        }
        CHECK_MSG(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK, "%s: %s", c->name,
                  dtrain_last_error());
        for (int i = 0; i < c->input_count; i++) {
            CHECK(dtrain_tensor_read(tape, c->input[i], NULL, got) == DTRAIN_OK);
            golden_check("its gradient", got, gradients[i], c->input[i]->count, tolerance);
        }
        if (d_param)
            golden_check("its parameter's gradient", c->params[0].grad, d_param,
                         case_count(c->params[0].shape), tolerance);
        dtrain_tape_destroy(tape);
        dtrain_device_destroy(device);
    }
    case_free(c);
}

#endif
