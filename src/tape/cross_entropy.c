/* Cross-entropy
 *
 * With s = smoothing:
 *
 *     d_logits = (softmax(logits) - (1 - s) onehot(target) - s / classes) upstream / valid targets
 *
 * and 0 in padding.
 *
 * Logits are by far the largest value of a language model, (rows, vocabulary). When this is their
 * only use and the operation that made them does not look at them in its own backward, they are
 * dead once d_logits is known: it is written over them, and there is no second buffer of that size.
 */

#include "core/platform_internal.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

typedef struct dtrain__cross_entropy {
    dtrain_cross_entropy_args forward;
    float factor; /* 1 / number of targets that are not ignored. In a recorded pass the number is
                     on the device, here, and `factor` is 1: */
    const float *device_factor;
} dtrain__cross_entropy;

static dtrain_result dtrain__cross_entropy_prepare(dtrain_op *op)
{
    dtrain__cross_entropy *loss = (dtrain__cross_entropy *)op->args;
    dtrain_cross_entropy_args *args = &loss->forward;
    const dtrain_tensor *logits = op->inputs[0], *targets = op->inputs[1];
    const int64_t n = logits->shape[logits->ndim - 1], rows = logits->count / n, shape[1] = {1};
    const dtrain__tape_tensor *input = (const dtrain__tape_tensor *)targets;
    char left[DTRAIN__SHAPE_TEXT], right[DTRAIN__SHAPE_TEXT];
    if (targets->count != rows)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_cross_entropy: logits %s have %lld rows, targets are %s",
                           dtrain__shape_text(logits->shape, left), (long long)rows,
                           dtrain__shape_text(targets->shape, right));
    if (args->classes < 0 || args->classes > n)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_cross_entropy: %lld classes, and logits %s have %lld columns",
                           (long long)args->classes, dtrain__shape_text(logits->shape, left),
                           (long long)n);
    if (!(args->smoothing >= 0 && args->smoothing <= 1)) /* so written that NaN is refused */
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_cross_entropy: smoothing is %g, not in [0, 1]",
                           (double)args->smoothing);
    args->rows = rows;
    args->n = n;
    args->logits = op->input_data[0];
    args->dtype = (dtrain_dtype)logits->dtype;
    args->targets = (const int32_t *)op->input_data[1];
    args->loss = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, rows);
    args->lse = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, rows);
    loss->device_factor = input->samples.device_valid;
    loss->factor = loss->device_factor ? 1 : input->samples.valid[0];
    dtrain__tape_tensor *made =
        (dtrain__tape_tensor *)dtrain_op_output(op, DTRAIN_DTYPE_F32, 1, shape);
    if (made) made->samples = input->samples;
    return DTRAIN_OK;
}

static dtrain_result dtrain__cross_entropy_forward(dtrain_op *op)
{
    const dtrain__cross_entropy *loss = (const dtrain__cross_entropy *)op->args;
    DTRAIN__TRY(op->device->ops->cross_entropy(op->device, &loss->forward));
    return dtrain__sum_to(op->device, op->output_data[0], loss->forward.loss, DTRAIN_DTYPE_F32,
                          loss->forward.rows, (double)loss->factor, loss->device_factor);
}

static dtrain_result dtrain__cross_entropy_backward(dtrain_op *op)
{
    const dtrain__cross_entropy *loss = (const dtrain__cross_entropy *)op->args;
    dtrain_tensor *logits = op->inputs[0];
    if (logits->producer && logits->pending_uses == 1 &&
        !(logits->producer->op.reads & DTRAIN_OP_READS_OUTPUTS)) {
        logits->grad = logits->data;
    } else if (!dtrain_op_input_grad(op, 0, NULL)) {
        return op->tape->error;
    }
    dtrain_cross_entropy_args args = loss->forward;
    args.scale = loss->factor;
    args.d_logits = logits->grad;
    args.upstream = (const float *)op->outputs[0]->grad;
    if (loss->device_factor) { /* their product, as a sum of one element: rounded once */
        void *product = dtrain__take_data(op->tape, NULL, 1, DTRAIN_DTYPE_F32);
        DTRAIN__TRY(op->tape->error);
        DTRAIN__TRY(dtrain__sum_to(op->device, product, args.upstream, DTRAIN_DTYPE_F32, 1, 1,
                                   loss->device_factor));
        args.upstream = (const float *)product;
    }
    return op->device->ops->cross_entropy_backward(op->device, &args);
}

DTRAIN__OP(cross_entropy, cross_entropy, DTRAIN_OP_READS_INPUTS, 0, 2, 0, false)

DTRAIN_API dtrain_tensor *dtrain_cross_entropy(dtrain_tape *tape, dtrain_tensor *logits,
                                               dtrain_tensor *targets, int64_t classes,
                                               float smoothing)
{
    dtrain_tensor *const inputs[2] = {logits, targets};
    dtrain__cross_entropy args;
    memset(&args, 0, sizeof args);
    args.forward.classes = classes;
    args.forward.smoothing = smoothing;
    return dtrain_tape_apply(tape, &dtrain__cross_entropy_op, inputs, 2, NULL, 0, &args,
                             sizeof args);
}
