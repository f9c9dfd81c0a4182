/* Operations on single elements, losses, sum and mean
 *
 * Backward reads at most the inputs. Activations, products and losses are one kernel and its
 * backward, each with another function of one or two elements (dtrain_pointwise). A loss is the
 * mean of such a function in fp32. */

#include "core/platform_internal.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

/* Check that inputs 0 and 1 have the same count and last axis. */
DTRAIN__PRIVATE dtrain_result dtrain__check_same(const dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0], *y = op->inputs[1];
    if (x->count == y->count && x->shape[x->ndim - 1] == y->shape[y->ndim - 1]) return DTRAIN_OK;
    return dtrain__refuse(op, "expected inputs of the same count and last axis");
}

/* ---- Activations, products of elements, losses ------------------------------------------------*/

/* Make the output: fp32 for a loss, else the wider type of the inputs, or x's if both are equally
 * wide. */
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

DTRAIN__OP_FORWARD(pointwise)

/* Compute both gradients in one pass over memory, or in two if both inputs are one tensor: the
 * second gradient is then added to the first. */
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

/* ---- Add
 *
 * Both inputs share the gradient of the sum until another contribution comes. The sum has the wider
 * type of the two, x's if both are equally wide. */

static dtrain_result dtrain__add_prepare(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0], *y = op->inputs[1];
    const dtrain_tensor *wide = y->dtype == DTRAIN_DTYPE_F32 ? y : x;
    DTRAIN__TRY(dtrain__check_same(op));
    dtrain_op_output(op, (dtrain_dtype)wide->dtype, x->ndim, x->shape);
    return DTRAIN_OK;
}

static dtrain_result dtrain__add_forward(dtrain_op *op)
{
    const int wide = op->inputs[1]->dtype == DTRAIN_DTYPE_F32 ? 1 : 0, other = 1 - wide;
    return dtrain__tape_add(op->device, op->inputs[0]->count, op->input_data[wide],
                            op->inputs[wide]->dtype, op->input_data[other],
                            op->inputs[other]->dtype, op->output_data[0]);
}

static dtrain_result dtrain__add_backward(dtrain_op *op)
{
    for (uint32_t i = 0; i < op->input_count; i++) DTRAIN__TRY(dtrain__gradient_pass(op, 0, i));
    return DTRAIN_OK;
}

DTRAIN__OP(add, add, 0, DTRAIN_RECOMPUTE_ELEMENTWISE, 0, DTRAIN__OP_TAKES_ALL, false)

/* Scale one of two losses that are means over different samples, so that both can have the weight
 * of the other, which is a loss that ignores no targets if there is one. */
static dtrain_result dtrain__balance(dtrain_tape *tape, dtrain_tensor *inputs[2])
{
    const dtrain__tape_tensor *x = (const dtrain__tape_tensor *)inputs[0],
                              *y = (const dtrain__tape_tensor *)inputs[1];
    const int second = x->samples.valid && !y->samples.valid ? 0 : 1;
    float factor = 1;
    if (x->tensor.count != 1 || y->tensor.count != 1 || !x->samples.terms || !y->samples.terms ||
        (x->samples.terms == y->samples.terms && x->samples.valid == y->samples.valid) ||
        x->remote || y->remote || !tape->strategy ||
        !dtrain__weighs_terms(tape->strategy, (tape->pass.flags & DTRAIN_TAPE_NO_GRAD) != 0))
        return DTRAIN_OK;
    DTRAIN__TRY(dtrain__second_mean(tape->strategy, tape->pass.sums++,
                                    second ? &x->samples : &y->samples,
                                    second ? &y->samples : &x->samples, &factor));
    if (tape->feed && factor != 1)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_add: a recorded step cannot add two means over other samples "
                           "than the same share on every rank; use graph = false");
    if (tape->feed) tape->feed->fixed = true;
    if (factor != 1) inputs[second] = dtrain_scale(tape, inputs[second], factor);
    return tape->error;
}

DTRAIN_API dtrain_tensor *dtrain_add(dtrain_tape *tape, dtrain_tensor *x, dtrain_tensor *y)
{
    dtrain_tensor *inputs[2] = {x, y};
    if (dtrain__tape_check(tape, "dtrain_add") != DTRAIN_OK) return NULL;
    if (x && y && dtrain__tape_stick(tape, dtrain__balance(tape, inputs)) != DTRAIN_OK) return NULL;
    return dtrain_tape_apply(tape, &dtrain__add_op, inputs, 2, NULL, 0, NULL, 0);
}

/* ---- Scale and dropout
 *
 * Both are linear in x and keep nothing: the kernel that makes y from x makes d_x from d_y. Whether
 * dropout keeps an element is a function of (seed, stream, place in the whole tensor). */

typedef struct dtrain__map {
    float factor;
    dtrain_dropout_args dropout; /* with a probability of 0 for a scale */
} dtrain__map;

static dtrain_result dtrain__map_prepare(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0];
    const float probability = ((const dtrain__map *)op->args)->dropout.probability;
    if (!(probability >= 0 && probability < 1)) /* so written that NaN is refused */
        return dtrain__refuse(op, "probability is %g, not in [0, 1)", (double)probability);

    dtrain_part *const of = &((dtrain__map *)op->args)->dropout.part;
    const dtrain__share *part = dtrain__tensor_share(x);
    const bool columns = x->placement == DTRAIN_PLACEMENT_COLUMNS;
    of->n = x->shape[x->ndim - 1];
    if (x->placement == DTRAIN_PLACEMENT_ROWS) of->first = part->first[0] * of->n;
    if (columns) of->whole_n = part->whole;
    if (columns) of->segments = part->runs;
    for (uint32_t i = 0; columns && i < part->runs; i++) {
        of->segment[i].length = part->length[i];
        of->segment[i].column = part->first[i];
    }
    dtrain_op_output(op, (dtrain_dtype)x->dtype, x->ndim, x->shape);
    return DTRAIN_OK;
}

static dtrain_result dtrain__map_run(dtrain_op *op, const void *x, void *y, bool accumulate)
{
    const dtrain__map *map = (const dtrain__map *)op->args;
    const dtrain_dtype dtype = (dtrain_dtype)op->inputs[0]->dtype;
    dtrain_dropout_args dropout = map->dropout;
    dtrain_axpby_args scale;
    if (dropout.probability > 0) {
        dropout.count = op->inputs[0]->count;
        dropout.accumulate = accumulate;
        dropout.x = x;
        dropout.y = y;
        dropout.dtype = dtype;
        return op->device->ops->dropout(op->device, &dropout);
    }
    memset(&scale, 0, sizeof scale);
    scale.count = op->inputs[0]->count;
    scale.accumulate = accumulate;
    scale.a = map->factor;
    scale.b = 1;
    scale.x = x;
    scale.y = y;
    scale.dtype = dtype;
    return op->device->ops->axpby(op->device, &scale);
}

static dtrain_result dtrain__map_forward(dtrain_op *op)
{
    return dtrain__map_run(op, op->input_data[0], op->output_data[0], false);
}

static dtrain_result dtrain__map_backward(dtrain_op *op)
{
    bool accumulate;
    void *d_x = dtrain_op_input_grad(op, 0, &accumulate);
    return d_x ? dtrain__map_run(op, op->outputs[0]->grad, d_x, accumulate) : op->tape->error;
}

DTRAIN__OP(scale, map, 0, DTRAIN_RECOMPUTE_ELEMENTWISE, 0, DTRAIN__OP_TAKES_ALL, false)
DTRAIN__OP(dropout, map, 0, DTRAIN_RECOMPUTE_ELEMENTWISE, 0, DTRAIN__OP_TAKES_ALL, false)

DTRAIN_API dtrain_tensor *dtrain_scale(dtrain_tape *tape, dtrain_tensor *x, float factor)
{
    dtrain__map args;
    memset(&args, 0, sizeof args);
    args.factor = factor;
    return dtrain_tape_apply(tape, &dtrain__scale_op, &x, 1, NULL, 0, &args, sizeof args);
}

DTRAIN_API dtrain_tensor *dtrain_dropout(dtrain_tape *tape, dtrain_tensor *x, float probability)
{
    dtrain__map args;
    const bool valid = probability >= 0 && probability < 1; /* otherwise prepare refuses it */
    if (dtrain__tape_check(tape, "dtrain_dropout") != DTRAIN_OK) return NULL;
    if (x && dtrain__is_float(x) && valid &&
        (probability == 0 || (tape->pass.flags & DTRAIN_TAPE_NO_GRAD)))
        return x;
    memset(&args, 0, sizeof args);
    args.dropout.probability = probability;
    args.dropout.seed = tape->pass.seed;
    args.dropout.stream = tape->pass.dropout_count++; /* a stream for each dropout */
    args.dropout.scalars = tape->scalars;
    return dtrain_tape_apply(tape, &dtrain__dropout_op, &x, 1, NULL, 0, &args, sizeof args);
}

/* ---- Sum and mean
 *
 * y = factor * sum of x, with factor 1 or 1 / count. */

static dtrain_result dtrain__sum_prepare(dtrain_op *op)
{
    const int64_t shape[1] = {1};
    float *factor = (float *)op->args;
    const bool mean = *factor == 0;
    if (mean) *factor = 1.0f / (float)op->inputs[0]->count;
    dtrain__tape_tensor *loss =
        (dtrain__tape_tensor *)dtrain_op_output(op, DTRAIN_DTYPE_F32, 1, shape);
    if (loss && mean && !loss->samples.terms) loss->samples.terms = op->inputs[0]->count;
    return DTRAIN_OK;
}

static dtrain_result dtrain__sum_forward(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0];
    return dtrain__sum_to(op->device, op->output_data[0], op->input_data[0], x->dtype, x->count,
                          (double)*(const float *)op->args, NULL);
}

/* Give every element the same gradient. For a narrow x it is rounded once, after the factor: a
 * scaled loss can exceed fp16 although its mean does not. */
static dtrain_result dtrain__sum_backward(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0];
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32, dtype = (dtrain_dtype)x->dtype;
    dtrain_axpby_args args;
    memset(&args, 0, sizeof args);
    args.a = *(const float *)op->args;
    args.b = 1;
    args.x = op->outputs[0]->grad;
    if (dtype != f32) {
        void *scaled = dtrain__take_data(op->tape, NULL, 1, f32);
        void *rounded = dtrain__take_data(op->tape, NULL, 1, dtype);
        DTRAIN__TRY(op->tape->error);
        args.count = 1;
        args.y = scaled;
        args.dtype = f32;
        DTRAIN__TRY(op->device->ops->axpby(op->device, &args));
        DTRAIN__TRY(dtrain__tape_convert(op->device, 1, scaled, f32, rounded, dtype));
        args.x = rounded;
        args.a = 1;
    }
    args.y = dtrain_op_input_grad(op, 0, &args.accumulate);
    if (!args.y) return op->tape->error;
    args.count = x->count;
    args.broadcast = true;
    args.dtype = dtype;
    return op->device->ops->axpby(op->device, &args);
}

DTRAIN__OP(sum, sum, 0, 0, 0, 0, false)
DTRAIN__OP(mean, sum, 0, 0, 0, 0, false)

DTRAIN_API dtrain_tensor *dtrain_sum(dtrain_tape *tape, dtrain_tensor *x)
{
    const float factor = 1;
    return dtrain_tape_apply(tape, &dtrain__sum_op, &x, 1, NULL, 0, &factor, sizeof factor);
}

DTRAIN_API dtrain_tensor *dtrain_mean(dtrain_tape *tape, dtrain_tensor *x)
{
    const float factor = 0; /* prepare sets it to 1 / count */
    return dtrain_tape_apply(tape, &dtrain__mean_op, &x, 1, NULL, 0, &factor, sizeof factor);
}

#undef DTRAIN__OP
#undef DTRAIN__OP_FORWARD
#undef DTRAIN__OP_NAMED
