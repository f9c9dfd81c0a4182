/* test_pointwise.c: functions of single elements, losses, the root mean square norm: on the tape, beside finite
 * differences and PyTorch's values. Their kernels are compared in test_dtypes.c and test_kernels.c. */
#include "test.h"
#include "dtrain.h"
#include "differences.h"
#include "naive_device.h"
#include "reference/llama_golden.h"
#include "tape_error.h"

/* ---- What is built -----------------------------------------------------------------------------*/

static dtrain_tensor *build_activate(dtrain_tape *tape, op_case *c)
{
    return dtrain_activate(tape, c->input[0], (dtrain_activation)c->number[0]);
}
static dtrain_tensor *build_linear(dtrain_tape *tape, op_case *c)
{
    dtrain_tensor *h = dtrain_linear(tape, c->input[0], &c->params[0], &c->params[1],
                                     (dtrain_activation)c->number[0]);
    return dtrain_linear(tape, h, &c->params[2], NULL, DTRAIN_ACTIVATION_NONE);
}
static dtrain_tensor *build_multiply(dtrain_tape *tape, op_case *c)
{
    return dtrain_multiply(tape, c->input[0], c->input[c->input_count - 1]);
}
static dtrain_tensor *build_swiglu(dtrain_tape *tape, op_case *c)
{
    return dtrain_swiglu(tape, c->input[0], c->input[c->input_count - 1]);
}
/* Every input has more than one use, so that gradients are added to. */
static dtrain_tensor *build_uses(dtrain_tape *tape, op_case *c)
{
    dtrain_tensor *x = c->input[0], *y = c->input[1];
    dtrain_tensor *a = dtrain_swiglu(tape, x, y), *b = dtrain_multiply(tape, y, x);
    dtrain_tensor *d = dtrain_add(tape, dtrain_activate(tape, x, DTRAIN_ACTIVATION_SILU), y);
    return dtrain_add(tape, dtrain_add(tape, a, b), d);
}
static dtrain_tensor *build_mse(dtrain_tape *tape, op_case *c)
{
    return dtrain_mse_loss(tape, c->input[0], c->input[1]);
}
static dtrain_tensor *build_bce(dtrain_tape *tape, op_case *c)
{
    return dtrain_bce_with_logits_loss(tape, c->input[0], c->input[1]);
}
static dtrain_tensor *build_rms(dtrain_tape *tape, op_case *c)
{
    return dtrain_rms_norm(tape, c->input[0], NULL, &c->params[0], 1e-6f);
}
static dtrain_tensor *build_add_rms(dtrain_tape *tape, op_case *c)
{
    dtrain_tensor *sum = c->input[0];
    dtrain_tensor *y = dtrain_rms_norm(tape, c->input[1], &sum, &c->params[0], 1e-6f);
    return dtrain_add(tape, y, sum);
}
static dtrain_tensor *build_smooth(dtrain_tape *tape, op_case *c)
{
    const int32_t target[6] = {2, 0, -1, 4, 1, 4};
    const int64_t shape[1] = {c->shape[0][0]};
    dtrain_tensor *t = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, target, false);
    return dtrain_cross_entropy(tape, c->input[0], t, c->number[0], 0.1f);
}

/* ---- Finite differences ------------------------------------------------------------------------*/

static void test_differences(void)
{
    dtrain_tensor *(*const of_two[])(dtrain_tape *, op_case *) = {build_multiply, build_swiglu,
                                                                  build_uses, build_mse, build_bce};
    for (int activation = DTRAIN_ACTIVATION_GELU; activation <= DTRAIN_ACTIVATION_SILU;
         activation++) {
        op_case c = case_of("activate", build_activate);
        c.number[0] = activation;
        case_input(&c, 3, 7, 0, 0);
        case_check(&c);
    }
    op_case linear = case_of("linear with silu", build_linear);
    linear.number[0] = DTRAIN_ACTIVATION_SILU;
    case_input(&linear, 5, 3, 0, 0);
    case_param(&linear, 7, 3), case_param(&linear, 7, 0), case_param(&linear, 2, 7);
    case_check(&linear);
    for (size_t i = 0; i < sizeof of_two / sizeof of_two[0]; i++) {
        op_case c = case_of("function of two", of_two[i]);
        case_input(&c, 2, 3, 5, 0), case_input(&c, 2, 3, 5, 0);
        case_check(&c);
    }
    for (int i = 0; i < 2; i++) { /* of one tensor twice */
        op_case c = case_of("function of a tensor and itself", of_two[i]);
        case_input(&c, 4, 5, 0, 0);
        case_check(&c);
    }
}

/* The slope of ReLU is that of the sign. */
static void test_relu(void)
{
    op_case c = case_of("relu", build_activate);
    const float x[5] = {-2, -1e-30f, 0, 1e-30f, 3}, dy[5] = {5, 5, 5, 5, -7},
                y[5] = {0, 0, 0, 0, 3};
    const float dx[5] = {0, 0, 0, 5, -7};
    const float *const gradients[CASE_INPUTS] = {dx, NULL, NULL};
    c.number[0] = DTRAIN_ACTIVATION_RELU;
    golden_input(&c, 1, 5, 0, x);
    golden_run(&c, y, dy, gradients, NULL, 1e-12);
}

static void test_norm_differences(void)
{
    for (int fused = 0; fused < 2; fused++) {
        op_case c = case_of("rms norm", fused ? build_add_rms : build_rms);
        case_input(&c, 3, 6, 0, 0);
        if (fused) case_input(&c, 3, 6, 0, 0);
        case_param(&c, 6, 0);
        case_check(&c);
    }
}

static void test_smoothing_differences(void)
{
    for (int64_t classes = 0; classes <= 5; classes += 5) {
        op_case c = case_of("label smoothing", build_smooth);
        c.number[0] = classes;
        case_input(&c, 6, 7, 0, 0);
        case_check(&c);
    }
}

/* ---- PyTorch's values --------------------------------------------------------------------------*/

static void test_golden(void)
{
    const float *gradients[CASE_INPUTS] = {llama_silu_dx, NULL, NULL};
    op_case c = case_of("silu", build_activate);
    c.number[0] = DTRAIN_ACTIVATION_SILU;
    golden_input(&c, 31, 0, 0, llama_silu_x);
    golden_run(&c, llama_silu_y, llama_silu_dy, gradients, NULL, 1e-6);

    c = case_of("swiglu", build_swiglu);
    golden_input(&c, 3, 5, 0, llama_swiglu_gate), golden_input(&c, 3, 5, 0, llama_swiglu_up);
    gradients[0] = llama_swiglu_dgate, gradients[1] = llama_swiglu_dup;
    golden_run(&c, llama_swiglu_y, llama_swiglu_dy, gradients, NULL, 2e-6);

    c = case_of("rms norm", build_rms);
    golden_input(&c, 4, 10, 0, llama_rms_x);
    case_param(&c, 10, 0);
    memcpy(c.params[0].value, llama_rms_w, sizeof llama_rms_w);
    gradients[0] = llama_rms_dx;
    golden_run(&c, llama_rms_y, llama_rms_dy, gradients, llama_rms_dw, 3e-6);

    c = case_of("mse loss", build_mse);
    golden_input(&c, 4, 3, 0, llama_mse_x), golden_input(&c, 4, 3, 0, llama_mse_t);
    gradients[0] = llama_mse_dx, gradients[1] = llama_mse_dt;
    golden_run(&c, llama_mse_loss, NULL, gradients, NULL, 1e-6);

    c = case_of("bce with logits", build_bce);
    golden_input(&c, 12, 0, 0, llama_bce_x), golden_input(&c, 12, 0, 0, llama_bce_t);
    gradients[0] = llama_bce_dx, gradients[1] = llama_bce_dt;
    golden_run(&c, llama_bce_loss, NULL, gradients, NULL, 1e-6);
}

/* PyTorch's -100 is -1 here. */
static void test_golden_smoothing(void)
{
    int32_t targets[5];
    for (int kind = 0; kind < 2; kind++) {
        dtrain_device *device = NULL;
        dtrain_tape *tape = NULL;
        const int64_t shape[2] = {5, 7};
        float got[35];
        CHECK(dtrain_device_create(kind ? NULL : naive_device_ops(), NULL, &device) == DTRAIN_OK);
        CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
        for (int i = 0; i < 5; i++)
            targets[i] = llama_smooth_targets[i] < 0 ? -1 : llama_smooth_targets[i];
        dtrain_tape_begin(tape, 0, 0);
        dtrain_tensor *x =
            dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, llama_smooth_x, true);
        dtrain_tensor *t = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, targets, false);
        dtrain_tensor *loss = dtrain_cross_entropy(tape, x, t, 0, 0.1f);
        CHECK(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK);
        CHECK(dtrain_tensor_read(tape, loss, got, NULL) == DTRAIN_OK);
        golden_check("smoothed loss", got, llama_smooth_loss, 1, 1e-6);
        CHECK(dtrain_tensor_read(tape, x, NULL, got) == DTRAIN_OK);
        golden_check("d logits", got, llama_smooth_dx, 35, 1e-6);
        dtrain_tape_destroy(tape);
        dtrain_device_destroy(device);
    }
}

/* ---- Types, errors -----------------------------------------------------------------------------*/

/* The wider type of both; a loss is fp32; an activation has the type of its input. */
static void test_types(void)
{
    dtrain_device *device = NULL;
    dtrain_tape *tape = NULL;
    const int64_t shape[2] = {3, 5};
    float x[15];
    for (int i = 0; i < 15; i++) x[i] = (float)(i - 7) / 4;
    CHECK(dtrain_device_create(NULL, NULL, &device) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    dtrain_tape_begin(tape, 0, 0);
    dtrain_tensor *wide = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, true);
    dtrain_tensor *narrow = dtrain_cast(tape, wide, DTRAIN_DTYPE_BF16);
    CHECK(dtrain_multiply(tape, narrow, wide)->dtype == DTRAIN_DTYPE_F32);
    CHECK(dtrain_multiply(tape, wide, narrow)->dtype == DTRAIN_DTYPE_F32);
    CHECK(dtrain_swiglu(tape, narrow, narrow)->dtype == DTRAIN_DTYPE_BF16);
    CHECK(dtrain_activate(tape, narrow, DTRAIN_ACTIVATION_SILU)->dtype == DTRAIN_DTYPE_BF16);
    CHECK(dtrain_activate(tape, narrow, DTRAIN_ACTIVATION_NONE) == narrow);
    dtrain_tensor *loss = dtrain_mse_loss(tape, narrow, wide);
    CHECK(loss->dtype == DTRAIN_DTYPE_F32);
    CHECK(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK);
    CHECK(dtrain_tensor_read(tape, wide, NULL, x) == DTRAIN_OK);
    for (int i = 0; i < 15; i++) CHECK(x[i] == 0); /* these numbers are bf16's: no difference */
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

static void test_errors(void)
{
    dtrain_device *device = NULL;
    dtrain_tape *tape = NULL;
    const int64_t shape[2] = {3, 5};
    float x[15] = {0}, weight[5] = {0};
    dtrain_tensor *sum;
    dtrain_param w;
    memset(&w, 0, sizeof w);
    w.name = "w", w.count = 5, w.value = weight;
    CHECK(dtrain_device_create(NULL, NULL, &device) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
#define REFUSED(call, words)                                                              \
    do {                                                                                  \
        dtrain_tape_begin(tape, 0, 0);                                                    \
        dtrain_tensor *a = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, true);  \
        dtrain_tensor *b = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 1, shape, x, true);  \
        (void)a, (void)b;                                                                 \
        CHECK(!(call) && tape_error(tape) == DTRAIN_ERROR_ARGUMENT);                      \
        CHECK_MSG(strstr(dtrain_last_error(), words) != NULL, "%s", dtrain_last_error()); \
    } while (0)
    REFUSED(dtrain_activate(tape, a, (dtrain_activation)4), "dtrain_activate: activation is 4");
    REFUSED(dtrain_activate(tape, NULL, DTRAIN_ACTIVATION_SILU),
            "dtrain_activate: input 1 is NULL");
    REFUSED(dtrain_multiply(tape, a, b), "dtrain_multiply: expected inputs of the same count");
    REFUSED(dtrain_multiply(tape, a, NULL), "dtrain_multiply: input 2 is NULL");
    REFUSED(dtrain_swiglu(tape, b, a), "dtrain_swiglu: expected inputs of the same count");
    REFUSED(dtrain_mse_loss(tape, a, b), "dtrain_mse_loss: expected inputs of the same count");
    REFUSED(dtrain_bce_with_logits_loss(tape, a, b),
            "dtrain_bce_with_logits_loss: expected inputs of the same count");
    REFUSED(dtrain_rms_norm(tape, b, NULL, &w, 0), "dtrain_rms_norm: parameter w must be (3)");
    REFUSED(dtrain_rms_norm(tape, a, NULL, &w, -1), "dtrain_rms_norm: epsilon is -1");
    REFUSED((sum = a, dtrain_rms_norm(tape, b, &sum, &w, 0)),
            "dtrain_rms_norm: expected inputs of the same count");
#undef REFUSED
    for (int i = 0; i < 3; i++) {
        const float smoothing[3] = {-0.1f, 1.1f, NAN};
        dtrain_tape_begin(tape, 0, 0);
        const int32_t targets[3] = {0, 1, 2};
        dtrain_tensor *a = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, true);
        dtrain_tensor *t = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, targets, false);
        CHECK(!dtrain_cross_entropy(tape, a, t, 0, smoothing[i]));
        CHECK(strstr(dtrain_last_error(), "smoothing is") != NULL);
    }
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_differences);
    RUN(test_relu);
    RUN(test_norm_differences);
    RUN(test_smoothing_differences);
    RUN(test_golden);
    RUN(test_golden_smoothing);
    RUN(test_types);
    RUN(test_errors);
    return test_summary();
}
