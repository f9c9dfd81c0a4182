/* Activations, products of elements, losses
 *
 * All are one kernel and its backward, with another function of an element or of two
 * (dtrain_pointwise). Nothing is kept for backward but the inputs. A loss is such a function in
 * fp32, and the mean of its values. */

#include "core/platform_internal.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

/* Make the output: fp32 for a loss, else the wider type of the inputs, or x's where both are
 * equally wide. */
static dtrain_result dtrain__pointwise_prepare(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0], *other = op->inputs[1];
    dtrain_pointwise_args *args = (dtrain_pointwise_args *)op->args;
    const uint32_t kind = args->kind;
    if (kind > DTRAIN_POINTWISE_LOGISTIC_LOSS || kind == DTRAIN_ACTIVATION_NONE ||
        (!other && kind > (uint32_t)DTRAIN_ACTIVATION_SILU))
        return dtrain__refuse(op, "activation is %u, which is not a dtrain_activation", kind);
    if (other) DTRAIN__TRY(dtrain__check_same(op));
    args->x_dtype = args->y_dtype = (dtrain_dtype)x->dtype;
    if (other) args->other_dtype = (dtrain_dtype)other->dtype;
    if ((other && other->dtype == DTRAIN_DTYPE_F32) || kind >= DTRAIN_POINTWISE_SQUARED_ERROR)
        args->y_dtype = DTRAIN_DTYPE_F32;
    dtrain_op_output(op, args->y_dtype, x->ndim, x->shape);
    args->count = x->count;
    args->x = op->input_data[0];
    args->other = op->input_data[1];
    args->y = op->output_data[0];
    return DTRAIN_OK;
}

static dtrain_result dtrain__pointwise_forward(dtrain_op *op)
{
    return op->device->ops->pointwise(op->device, (const dtrain_pointwise_args *)op->args);
}

/* Compute both gradients in one pass over memory, or in two where both inputs are one tensor,
 * because the second is added to the first. */
static dtrain_result dtrain__pointwise_backward(dtrain_op *op)
{
    const dtrain_device_ops *ops = op->device->ops;
    dtrain_pointwise_args args = *(const dtrain_pointwise_args *)op->args;
    args.d_y = op->outputs[0]->grad;
    args.d_x = dtrain_op_input_grad(op, 0, &args.accumulate_x);
    if (args.d_x && op->inputs[0] == op->inputs[1]) {
        DTRAIN__TRY(op->tape->error);
        DTRAIN__TRY(ops->pointwise_backward(op->device, &args));
        args.d_x = NULL;
    }
    args.d_other = dtrain_op_input_grad(op, 1, &args.accumulate_other);
    DTRAIN__TRY(op->tape->error);
    if (!args.d_x && !args.d_other) return DTRAIN_OK;
    return ops->pointwise_backward(op->device, &args);
}

DTRAIN__OP(activate, pointwise, DTRAIN_OP_READS_INPUTS, DTRAIN_RECOMPUTE_ELEMENTWISE, 0,
           DTRAIN__OP_TAKES_ALL, false)
DTRAIN__OP(multiply, pointwise, DTRAIN_OP_READS_INPUTS, DTRAIN_RECOMPUTE_ELEMENTWISE, 0,
           DTRAIN__OP_TAKES_ALL, false)
DTRAIN__OP(swiglu, pointwise, DTRAIN_OP_READS_INPUTS, DTRAIN_RECOMPUTE_ELEMENTWISE, 0,
           DTRAIN__OP_TAKES_ALL, false)
DTRAIN__OP(mse_loss, pointwise, DTRAIN_OP_READS_INPUTS, DTRAIN_RECOMPUTE_ELEMENTWISE, 0, 0, false)
DTRAIN__OP(bce_with_logits_loss, pointwise, DTRAIN_OP_READS_INPUTS, DTRAIN_RECOMPUTE_ELEMENTWISE, 0,
           0, false)

/* Apply a function of one element, or of two. */
static dtrain_tensor *dtrain__pointwise_apply(dtrain_tape *tape, const dtrain_op_desc *desc,
                                              uint32_t kind, dtrain_tensor *x, dtrain_tensor *other)
{
    dtrain_tensor *const inputs[2] = {x, other};
    dtrain_pointwise_args args;
    memset(&args, 0, sizeof args);
    args.kind = kind;
    return dtrain_tape_apply(tape, desc, inputs, desc == &dtrain__activate_op ? 1 : 2, NULL, 0,
                             &args, sizeof args);
}

DTRAIN_API dtrain_tensor *dtrain_activate(dtrain_tape *tape, dtrain_tensor *x,
                                          dtrain_activation activation)
{
    if (x && dtrain__is_float(x) && activation == DTRAIN_ACTIVATION_NONE) return x;
    return dtrain__pointwise_apply(tape, &dtrain__activate_op, activation, x, NULL);
}

DTRAIN_API dtrain_tensor *dtrain_multiply(dtrain_tape *tape, dtrain_tensor *x, dtrain_tensor *y)
{
    return dtrain__pointwise_apply(tape, &dtrain__multiply_op, DTRAIN_POINTWISE_MULTIPLY, x, y);
}

DTRAIN_API dtrain_tensor *dtrain_swiglu(dtrain_tape *tape, dtrain_tensor *gate, dtrain_tensor *up)
{
    return dtrain__pointwise_apply(tape, &dtrain__swiglu_op, DTRAIN_POINTWISE_SWIGLU, gate, up);
}

DTRAIN_API dtrain_tensor *dtrain_mse_loss(dtrain_tape *tape, dtrain_tensor *x,
                                          dtrain_tensor *target)
{
    return dtrain_mean(tape, dtrain__pointwise_apply(tape, &dtrain__mse_loss_op,
                                                     DTRAIN_POINTWISE_SQUARED_ERROR, x, target));
}

DTRAIN_API dtrain_tensor *dtrain_bce_with_logits_loss(dtrain_tape *tape, dtrain_tensor *logits,
                                                      dtrain_tensor *target)
{
    return dtrain_mean(tape,
                       dtrain__pointwise_apply(tape, &dtrain__bce_with_logits_loss_op,
                                               DTRAIN_POINTWISE_LOGISTIC_LOSS, logits, target));
}
