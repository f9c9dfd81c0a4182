/* Norms: of layers, and by the root mean square
 *
 * An operation is the three functions of a dtrain_op_desc, its DTRAIN__OP line and the public call.
 * The arguments of the forward kernel are filled by prepare and kept with the node: forward passes
 * them on, backward takes shapes and addresses from them. A node keeps x, or the sum that it
 * normalises, until its backward, and mean and rstd of each row. */

#include "core/platform_internal.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

/* Make the output with x's shape and n in the last axis. */
DTRAIN__PRIVATE void dtrain__output_like(dtrain_op *op, const dtrain_tensor *x, int64_t n,
                                         dtrain_dtype dtype)
{
    int64_t shape[4];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = n;
    dtrain_op_output(op, dtype, x->ndim, shape);
}

/* ---- Layer normalisation
 *
 * With h = (x - mean) rstd, rows of n elements, and d_h = d_y weight:
 *
 *     d_weight += sum of d_y h over rows     d_bias += sum of d_y over rows
 *     d_x += rstd (d_h - mean(d_h) - h mean(d_h h))
 *
 * The root mean square norm is the same with a mean of 0, which is not saved: mean(d_h) drops out.
 * With a residual stream, input 0, and the branch that is added to it, input 1, x is the sum of
 * both and the operation's second output. Its gradient, complete with this d_x, becomes that of
 * both inputs; where the branch has a narrower type the kernel writes the rounded copy while the
 * values are at hand. */

typedef struct dtrain__layernorm {
    dtrain_layernorm_args forward;
    bool rms;            /* root mean square norm: the mean is not subtracted */
    dtrain_tensor **sum; /* the caller's residual stream, which becomes the sum */
} dtrain__layernorm;

static dtrain_result dtrain__layernorm_prepare(dtrain_op *op)
{
    dtrain__layernorm *layer = (dtrain__layernorm *)op->args;
    dtrain_layernorm_args *args = &layer->forward;
    const dtrain_tensor *x = op->inputs[0];
    args->n = x->shape[x->ndim - 1];
    args->rows = x->count / args->n;
    for (uint32_t i = 0; i < op->param_count; i++)
        DTRAIN__TRY(dtrain_op_check_param(op, i, args->n, 0));
    if (!(args->epsilon >= 0)) /* so written that NaN is refused */
        return dtrain__refuse(op, "epsilon is %g, expected 0 or more", (double)args->epsilon);
    dtrain_op_output(op, op->cast, x->ndim, x->shape);
    args->x = op->input_data[0];
    args->weight = (const float *)op->param_data[0];
    args->bias = (const float *)op->param_data[1];
    args->y = op->output_data[0];
    if (!layer->rms) args->mean = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, args->rows);
    args->rstd = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, args->rows);
    args->x_dtype = (dtrain_dtype)x->dtype;
    args->y_dtype = op->cast;
    if (op->input_count == 1) return DTRAIN_OK;
    op->reads = DTRAIN_OP_READS_OUTPUTS;
    DTRAIN__TRY(dtrain__check_same(op));
    *layer->sum = dtrain_op_output(op, args->x_dtype, x->ndim, x->shape);
    args->residual = op->input_data[1];
    args->sum = op->output_data[1];
    return DTRAIN_OK;
}

static dtrain_result dtrain__layernorm_forward(dtrain_op *op)
{
    return op->device->ops->layernorm(op->device, &((dtrain__layernorm *)op->args)->forward);
}

static dtrain_result dtrain__layernorm_backward(dtrain_op *op)
{
    const dtrain_layernorm_args *forward = &((const dtrain__layernorm *)op->args)->forward;
    dtrain_tensor *residual = op->inputs[1]; /* NULL: no residual */
    dtrain_tensor *x = residual ? op->outputs[1] : op->inputs[0];
    const bool rounded = residual && residual->dtype != x->dtype && !residual->grad;
    bool add_weight, add_bias, add_residual;
    dtrain_layernorm_backward_args args;
    memset(&args, 0, sizeof args);
    args.rows = forward->rows;
    args.n = forward->n;
    args.x = residual ? forward->sum : forward->x;
    args.weight = forward->weight;
    args.mean = forward->mean;
    args.rstd = forward->rstd;
    args.d_y = op->outputs[0]->grad;
    args.x_dtype = forward->x_dtype;
    args.y_dtype = forward->y_dtype;
    args.d_weight = dtrain_op_param_grad(op, 0, &add_weight);
    args.d_bias = dtrain_op_param_grad(op, 1, &add_bias);
    args.accumulate_params = add_weight || add_bias;
    /* the kernel has one flag for both: where only one has a gradient already, the other is zeroed
     * and added to */
    if (args.d_weight && args.d_bias && add_weight != add_bias)
        DTRAIN__TRY(op->device->ops->zero(op->device, add_weight ? args.d_bias : args.d_weight,
                                          (size_t)args.n * sizeof(float)));
    if (rounded) args.d_residual = dtrain_op_input_grad(op, 1, &add_residual);
    DTRAIN__TRY(op->tape->error);
    if (x->needs_grad) DTRAIN__TRY(dtrain__gradient_open(op->tape, x, &args.accumulate_x));
    args.d_x = x->grad;
    DTRAIN__TRY(op->device->ops->layernorm_backward(op->device, &args));
    if (!residual) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__gradient_pass(op, 1, 0));
    return rounded ? DTRAIN_OK : dtrain__gradient_pass(op, 1, 1);
}

DTRAIN__OP(layernorm, layernorm, DTRAIN_OP_READS_INPUTS, DTRAIN_RECOMPUTE_LAYERNORM, 0,
           DTRAIN_OP_TAKES_ROWS, false)
DTRAIN__OP(rms_norm, layernorm, DTRAIN_OP_READS_INPUTS, DTRAIN_RECOMPUTE_LAYERNORM, 0,
           DTRAIN_OP_TAKES_ROWS, false)

/* Add x to the residual stream and apply a norm. The fused kernel takes x only in the type that
 * autocast computes in. */
static dtrain_tensor *dtrain__norm_apply(dtrain_tape *tape, const dtrain_op_desc *desc,
                                         dtrain_tensor *x, dtrain_tensor **residual,
                                         dtrain_param *const *params, uint32_t param_count,
                                         float epsilon)
{
    dtrain_tensor *inputs[2] = {x, NULL};
    uint32_t input_count = 1;
    dtrain__layernorm args;
    memset(&args, 0, sizeof args);
    args.forward.epsilon = epsilon;
    args.rms = desc == &dtrain__rms_norm_op;
    args.sum = residual;
    if (residual && !*residual) {
        *residual = x;
    } else if (residual && tape && x && x->dtype != (uint32_t)tape->pass.cast) {
        inputs[0] = *residual = dtrain_add(tape, *residual, x);
    } else if (residual) {
        inputs[0] = *residual;
        inputs[input_count++] = x;
    }
    return dtrain_tape_apply(tape, desc, inputs, input_count, params, param_count, &args,
                             sizeof args);
}

DTRAIN_API dtrain_tensor *dtrain_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                           dtrain_tensor **residual, dtrain_param *weight,
                                           dtrain_param *bias, float epsilon)
{
    dtrain_param *const params[2] = {weight, bias};
    return dtrain__norm_apply(tape, &dtrain__layernorm_op, x, residual, params, bias ? 2 : 1,
                              epsilon);
}

DTRAIN_API dtrain_tensor *dtrain_rms_norm(dtrain_tape *tape, dtrain_tensor *x,
                                          dtrain_tensor **residual, dtrain_param *weight,
                                          float epsilon)
{
    return dtrain__norm_apply(tape, &dtrain__rms_norm_op, x, residual, &weight, 1, epsilon);
}
