/* Elementwise operations and losses
 *
 * Nothing is kept for their backwards but what cross-entropy needs: logits, targets and the
 * log-sum-exp of each row. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "tape/op.h"
#include "tape/ops.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "device/backend.h"
#include "device/device.h"

/* ---- Add
 *
 * Both inputs share the gradient of the sum until one of them has more to add. The sum has the
 * wider type of the two, x's when they are as wide. */

static dtrain_result dtrain__add_prepare(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0], *y = op->inputs[1];
    dtrain__text left, right;
    if (x->count != y->count || x->shape[x->ndim - 1] != y->shape[y->ndim - 1])
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_add: %s and %s differ",
                           dtrain__shape_text(x, &left), dtrain__shape_text(y, &right));
    const bool y_is_wide = y->dtype == DTRAIN_DTYPE_F32;
    dtrain_op_output(op, (dtrain_dtype)(y_is_wide ? y : x)->dtype, x->ndim, x->shape);
    return DTRAIN_OK;
}

static dtrain_result dtrain__add_forward(dtrain_op *op)
{
    const int wide = op->inputs[1]->dtype == DTRAIN_DTYPE_F32 ? 1 : 0;
    dtrain_add_args args;
    memset(&args, 0, sizeof args);
    args.count = op->inputs[0]->count;
    args.x = op->input_data[wide];
    args.y = op->input_data[1 - wide];
    args.out = op->output_data[0];
    args.x_dtype = (dtrain_dtype)op->inputs[wide]->dtype;
    args.y_dtype = (dtrain_dtype)op->inputs[1 - wide]->dtype;
    return op->device->ops->add(op->device, &args);
}

static dtrain_result dtrain__add_backward(dtrain_op *op)
{
    for (uint32_t i = 0; i < op->input_count; i++)
        DTRAIN__TRY(dtrain__gradient_pass(op, op->outputs[0], op->inputs[i]));
    return DTRAIN_OK;
}

DTRAIN__OP(add, 0, DTRAIN_CHECKPOINT_ELEMENTWISE, 0, false)

DTRAIN_API dtrain_tensor *dtrain_add(dtrain_tape *tape, dtrain_tensor *x, dtrain_tensor *y)
{
    dtrain_tensor *const inputs[2] = {x, y};
    return dtrain_tape_apply(tape, &dtrain__add_op, inputs, 2, NULL, 0, NULL, 0);
}

/* ---- Cast -------------------------------------------------------------------------------------*/

static dtrain_result dtrain__cast_prepare(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0];
    const dtrain_dtype dtype = *(const dtrain_dtype *)op->args;
    if (dtype != DTRAIN_DTYPE_F32 && dtype != DTRAIN_DTYPE_BF16 && dtype != DTRAIN_DTYPE_F16)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_cast: dtype is %s, expected f32, bf16 or f16",
                           dtrain_dtype_name(dtype));
    dtrain_op_output(op, dtype, x->ndim, x->shape);
    return DTRAIN_OK;
}

static dtrain_result dtrain__cast_forward(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0], *y = op->outputs[0];
    return dtrain__tape_convert(op->device, x->count, op->input_data[0], x->dtype,
                                op->output_data[0], y->dtype);
}

static dtrain_result dtrain__cast_backward(dtrain_op *op)
{
    return dtrain__gradient_pass(op, op->outputs[0], op->inputs[0]);
}

DTRAIN__OP(cast, 0, DTRAIN_CHECKPOINT_ELEMENTWISE, 0, false)

DTRAIN_API dtrain_tensor *dtrain_cast(dtrain_tape *tape, dtrain_tensor *x, dtrain_dtype dtype)
{
    if (dtrain__tape_check(tape, "dtrain_cast") != DTRAIN_OK) return NULL;
    if (x && dtrain__is_float(x) && x->dtype == (uint32_t)dtype) return x;
    return dtrain_tape_apply(tape, &dtrain__cast_op, &x, 1, NULL, 0, &dtype, sizeof dtype);
}

/* ---- Scale ------------------------------------------------------------------------------------*/

static dtrain_result dtrain__scale_prepare(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0];
    dtrain_op_output(op, (dtrain_dtype)x->dtype, x->ndim, x->shape);
    return DTRAIN_OK;
}

/* y = factor x, or added to what is there. */
static dtrain_result dtrain__scale_to(dtrain_op *op, const void *x, void *y, bool accumulate)
{
    dtrain_axpby_args args;
    memset(&args, 0, sizeof args);
    args.count = op->inputs[0]->count;
    args.accumulate = accumulate;
    args.a = *(const float *)op->args;
    args.b = accumulate ? 1.0f : 0.0f;
    args.x = x;
    args.y = y;
    args.dtype = (dtrain_dtype)op->inputs[0]->dtype;
    return op->device->ops->axpby(op->device, &args);
}

static dtrain_result dtrain__scale_forward(dtrain_op *op)
{
    return dtrain__scale_to(op, op->input_data[0], op->output_data[0], false);
}

static dtrain_result dtrain__scale_backward(dtrain_op *op)
{
    bool accumulate;
    DTRAIN__TRY(dtrain__gradient_open(op->tape, op->inputs[0], &accumulate));
    return dtrain__scale_to(op, op->outputs[0]->grad, op->inputs[0]->grad, accumulate);
}

DTRAIN__OP(scale, 0, DTRAIN_CHECKPOINT_ELEMENTWISE, 0, false)

DTRAIN_API dtrain_tensor *dtrain_scale(dtrain_tape *tape, dtrain_tensor *x, float factor)
{
    return dtrain_tape_apply(tape, &dtrain__scale_op, &x, 1, NULL, 0, &factor, sizeof factor);
}

/* ---- Dropout
 *
 * Keeping is a function of (seed, stream, i): the forward kernel is its own backward. */

static dtrain_result dtrain__dropout_prepare(dtrain_op *op) { return dtrain__scale_prepare(op); }

static dtrain_result dtrain__dropout_to(dtrain_op *op, const void *x, void *y, bool accumulate)
{
    dtrain_dropout_args args = *(const dtrain_dropout_args *)op->args;
    args.count = op->inputs[0]->count;
    args.accumulate = accumulate;
    args.x = x;
    args.y = y;
    args.dtype = (dtrain_dtype)op->inputs[0]->dtype;
    return op->device->ops->dropout(op->device, &args);
}

static dtrain_result dtrain__dropout_forward(dtrain_op *op)
{
    return dtrain__dropout_to(op, op->input_data[0], op->output_data[0], false);
}

static dtrain_result dtrain__dropout_backward(dtrain_op *op)
{
    bool accumulate;
    DTRAIN__TRY(dtrain__gradient_open(op->tape, op->inputs[0], &accumulate));
    return dtrain__dropout_to(op, op->outputs[0]->grad, op->inputs[0]->grad, accumulate);
}

DTRAIN__OP(dropout, 0, DTRAIN_CHECKPOINT_ELEMENTWISE, 0, false)

DTRAIN_API dtrain_tensor *dtrain_dropout(dtrain_tape *tape, dtrain_tensor *x, float probability)
{
    dtrain_dropout_args args;
    if (dtrain__tape_check(tape, "dtrain_dropout") != DTRAIN_OK) return NULL;
    if (!(probability >= 0 && probability < 1)) /* so written that NaN is refused */
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_dropout: probability is %g, not in [0, 1)",
                                 (double)probability);
    if (x && dtrain__is_float(x) && (probability == 0 || (tape->flags & DTRAIN_TAPE_NO_GRAD)))
        return x;
    memset(&args, 0, sizeof args);
    args.probability = probability;
    args.seed = tape->seed;
    args.stream = tape->dropout_count++; /* other numbers for each dropout of the pass */
    args.scalars = tape->scalars;
    return dtrain_tape_apply(tape, &dtrain__dropout_op, &x, 1, NULL, 0, &args, sizeof args);
}

/* ---- Sum and mean -----------------------------------------------------------------------------*/

/* out (1) = factor * sum of x (count); added up in double: a float sum over many rows would lose
 * digits of the loss. */
static dtrain_result dtrain__sum_to_output(dtrain_op *op, const void *x, uint32_t dtype,
                                           int64_t count, float factor)
{
    dtrain_sum_args args;
    memset(&args, 0, sizeof args);
    args.count = count;
    args.scale = (double)factor;
    args.x = x;
    args.dtype = (dtrain_dtype)dtype;
    args.out = (float *)op->output_data[0];
    return op->device->ops->sum(op->device, &args);
}

static dtrain_result dtrain__sum_prepare(dtrain_op *op)
{
    const int64_t shape[1] = {1};
    float *factor = (float *)op->args;
    if (*factor == 0) *factor = 1.0f / (float)op->inputs[0]->count;
    dtrain_op_output(op, DTRAIN_DTYPE_F32, 1, shape);
    return DTRAIN_OK;
}

static dtrain_result dtrain__sum_forward(dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0];
    return dtrain__sum_to_output(op, op->input_data[0], x->dtype, x->count,
                                 *(const float *)op->args);
}

/* Every element gets the same gradient. Where x has a type of its own that is rounded once, after
 * the factor: a scaled loss may be beyond fp16 while its mean is not. */
static dtrain_result dtrain__sum_backward(dtrain_op *op)
{
    const dtrain_device_ops *ops = op->device->ops;
    dtrain_tensor *x = op->inputs[0];
    dtrain_axpby_args args;
    memset(&args, 0, sizeof args);
    args.a = *(const float *)op->args;
    args.x = op->outputs[0]->grad;
    if (x->dtype != DTRAIN_DTYPE_F32) {
        float *scaled = (float *)dtrain__take_data(op->tape, NULL, 1, DTRAIN_DTYPE_F32);
        if (!scaled) return op->tape->error;
        args.count = 1;
        args.y = scaled;
        args.dtype = DTRAIN_DTYPE_F32;
        DTRAIN__TRY(ops->axpby(op->device, &args));
        args.a = 1;
        args.x = dtrain__cast_to(op->tape, scaled, DTRAIN_DTYPE_F32, (dtrain_dtype)x->dtype, 1);
        DTRAIN__TRY(op->tape->error);
    }
    DTRAIN__TRY(dtrain__gradient_open(op->tape, x, &args.accumulate));
    args.count = x->count;
    args.b = 1;
    args.y = x->grad;
    args.broadcast = true;
    args.dtype = (dtrain_dtype)x->dtype;
    return ops->axpby(op->device, &args);
}

static const dtrain_op_desc dtrain__sum_op = {
    0, 0, 0, false, "dtrain_sum", dtrain__sum_prepare, dtrain__sum_forward, dtrain__sum_backward};
static const dtrain_op_desc dtrain__mean_op = {
    0, 0, 0, false, "dtrain_mean", dtrain__sum_prepare, dtrain__sum_forward, dtrain__sum_backward};

DTRAIN_API dtrain_tensor *dtrain_sum(dtrain_tape *tape, dtrain_tensor *x)
{
    const float factor = 1;
    return dtrain_tape_apply(tape, &dtrain__sum_op, &x, 1, NULL, 0, &factor, sizeof factor);
}

DTRAIN_API dtrain_tensor *dtrain_mean(dtrain_tape *tape, dtrain_tensor *x)
{
    const float factor = 0; /* one over the count of x, which prepare knows */
    return dtrain_tape_apply(tape, &dtrain__mean_op, &x, 1, NULL, 0, &factor, sizeof factor);
}

/* ---- Cross-entropy
 *
 * d_logits = (softmax(logits) - onehot(target)) * upstream / valid targets.
 *
 * Logits are by far the largest value of a language model, (rows, vocabulary). When this is their
 * only use and the operation that made them does not look at them in its own backward, they are
 * dead once d_logits is known: it is written over them, and there is no second buffer of that size.
 * The chunk that says so belongs to no pool: it goes with the nodes of the pass. */

typedef struct dtrain__cross_entropy {
    dtrain_cross_entropy_args forward;
    float factor; /* 1 / valid targets */
} dtrain__cross_entropy;

static dtrain_result dtrain__cross_entropy_prepare(dtrain_op *op)
{
    dtrain__cross_entropy *loss = (dtrain__cross_entropy *)op->args;
    dtrain_cross_entropy_args *args = &loss->forward;
    const dtrain_tensor *logits = op->inputs[0], *targets = op->inputs[1];
    const int64_t n = logits->shape[logits->ndim - 1], rows = logits->count / n, shape[1] = {1};
    const int64_t valid = ((const dtrain__tape_tensor *)targets)->valid_count;
    dtrain__text left, right;
    if (targets->count != rows)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_cross_entropy: logits %s have %lld rows, targets are %s",
                           dtrain__shape_text(logits, &left), (long long)rows,
                           dtrain__shape_text(targets, &right));
    args->rows = rows;
    args->n = n;
    args->logits = op->input_data[0];
    args->dtype = (dtrain_dtype)logits->dtype;
    args->targets = (const int32_t *)op->input_data[1];
    args->loss = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, rows);
    args->lse = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, rows);
    loss->factor = valid ? 1.0f / (float)valid : 0.0f; /* nothing counts: the loss is 0 */
    dtrain_op_output(op, DTRAIN_DTYPE_F32, 1, shape);
    return DTRAIN_OK;
}

static dtrain_result dtrain__cross_entropy_forward(dtrain_op *op)
{
    const dtrain__cross_entropy *loss = (const dtrain__cross_entropy *)op->args;
    DTRAIN__TRY(op->device->ops->cross_entropy(op->device, &loss->forward));
    return dtrain__sum_to_output(op, loss->forward.loss, DTRAIN_DTYPE_F32, loss->forward.rows,
                                 loss->factor);
}

static dtrain_result dtrain__cross_entropy_backward(dtrain_op *op)
{
    const dtrain__cross_entropy *loss = (const dtrain__cross_entropy *)op->args;
    dtrain_tensor *logits = op->inputs[0];
    dtrain__chunk *earlier = NULL;
    if (logits->producer && logits->pending_uses == 1 &&
        !(logits->producer->op.desc->reads & DTRAIN_OP_READS_OUTPUTS)) {
        dtrain__chunk *in_place = (dtrain__chunk *)dtrain__take_host(op->tape, sizeof *in_place);
        if (!in_place) return op->tape->error;
        const dtrain__tape_tensor *made = (const dtrain__tape_tensor *)logits;
        in_place->memory = (char *)logits->data;
        in_place->owners = 1;
        in_place->in_region = made->segment && !made->kept;
        dtrain__gradient_set(logits, in_place);
    } else {
        DTRAIN__TRY(dtrain__gradient_fresh(op->tape, logits, &earlier));
    }
    dtrain_cross_entropy_backward_args args;
    memset(&args, 0, sizeof args);
    args.rows = loss->forward.rows;
    args.n = loss->forward.n;
    args.scale = loss->factor;
    args.logits = loss->forward.logits;
    args.targets = loss->forward.targets;
    args.lse = loss->forward.lse;
    args.d_logits = logits->grad;
    args.upstream = (const float *)op->outputs[0]->grad;
    args.dtype = loss->forward.dtype;
    DTRAIN__TRY(op->device->ops->cross_entropy_backward(op->device, &args));
    return dtrain__gradient_merge(op->tape, logits, earlier);
}

DTRAIN__OP(cross_entropy, DTRAIN_OP_READS_INPUTS, 0, 2, false)

DTRAIN_API dtrain_tensor *dtrain_cross_entropy(dtrain_tape *tape, dtrain_tensor *logits,
                                               dtrain_tensor *targets)
{
    dtrain_tensor *const inputs[2] = {logits, targets};
    dtrain__cross_entropy args;
    memset(&args, 0, sizeof args);
    return dtrain_tape_apply(tape, &dtrain__cross_entropy_op, inputs, 2, NULL, 0, &args,
                             sizeof args);
}

#undef DTRAIN__OP
