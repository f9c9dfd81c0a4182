/* Elementwise. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "strategy/params.h"
#include "tape/ops.h"
#include "tape/ops_internal.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "device/backend.h"
#include "device/device.h"

/* Both inputs share the gradient of the sum until one of them has more to add. The sum has the
 * wider type of the two, x's when they are as wide. */
static dtrain_result dtrain__add_backward(dtrain_tape *tape, dtrain_node *node)
{
    for (int i = 0; i < (node->residual_done ? 1 : 2); i++)
        if (node->in[i]->needs_grad)
            DTRAIN__TRY(dtrain__gradient_pass(tape, node->out, node->in[i]));
    return DTRAIN_OK;
}

DTRAIN_API dtrain_tensor *dtrain_add(dtrain_tape *tape, dtrain_tensor *x, dtrain_tensor *y)
{
    dtrain_node *node =
        dtrain__op(tape, "dtrain_add", DTRAIN_CHECKPOINT_ELEMENTWISE, dtrain__add_backward, x, y);
    dtrain__text left, right;
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_DTYPE_F32)) return NULL;
    if (!dtrain__check_input(tape, node, 1, DTRAIN_DTYPE_F32)) return NULL;
    if (x->count != y->count || dtrain__last_axis(x) != dtrain__last_axis(y))
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "dtrain_add: %s and %s differ",
                                 dtrain__shape_text(x->ndim, x->shape, &left),
                                 dtrain__shape_text(y->ndim, y->shape, &right));
    const dtrain_tensor *wide = y->dtype == DTRAIN_DTYPE_F32 ? y : x, *other = wide == y ? x : y;
    void *out = dtrain__output(tape, node, x, dtrain__last_axis(x), wide->dtype);
    if (!out) return NULL;
    dtrain_add_args args = {x->count, wide->data,          other->data,
                            out,      dtrain__dtype(wide), dtrain__dtype(other)};
    return dtrain__record(tape, node,
                          dtrain__run_kernel(tape, node, dtrain__call_add, &args, sizeof args));
}

/* The sum is a node of its own, whose kernel is part of the normalisation's: what only fuses the
 * passes over memory need not tie two gradients together. It is dropped when that is. */
DTRAIN_API dtrain_tensor *dtrain_add_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                               dtrain_tensor *residual, dtrain_param *weight,
                                               dtrain_param *bias, dtrain_tensor **sum)
{
    const char *const name = "dtrain_add_layernorm";
    dtrain_node *node =
        dtrain__op(tape, name, DTRAIN_CHECKPOINT_LAYERNORM, dtrain__add_backward, x, residual);
    dtrain__text left, right;
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_DTYPE_F32)) return NULL;
    if (!dtrain__check_input(tape, node, 1, DTRAIN_DTYPE_F32)) return NULL;
    if (!sum) return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "%s: sum is NULL", name);
    if (x->count != residual->count || dtrain__last_axis(x) != dtrain__last_axis(residual))
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "%s: %s and %s differ", name,
                                 dtrain__shape_text(x->ndim, x->shape, &left),
                                 dtrain__shape_text(residual->ndim, residual->shape, &right));
    if (residual->dtype != (uint32_t)tape->cast) { /* not what the fused kernel takes */
        *sum = dtrain_add(tape, x, residual);
        return dtrain_layernorm(tape, *sum, weight, bias);
    }
    if (!dtrain__output(tape, node, x, dtrain__last_axis(x), x->dtype)) return NULL;
    *sum = dtrain__record(tape, node, DTRAIN_OK);
    return dtrain__layernorm(tape, name, *sum, weight, bias, node);
}

/* d_x += factor d_y */
static dtrain_result dtrain__scale_backward(dtrain_tape *tape, dtrain_node *node)
{
    dtrain_tensor *x = node->in[0];
    dtrain_axpby_args args = {x->count,        false, node->factor, 1,
                              node->out->grad, NULL,  false,        dtrain__dtype(x)};
    DTRAIN__TRY(dtrain__gradient_open(tape, x, &args.accumulate));
    args.y = x->grad;
    return tape->device->ops->axpby(tape->device, &args);
}

DTRAIN_API dtrain_tensor *dtrain_scale(dtrain_tape *tape, dtrain_tensor *x, float factor)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_scale", DTRAIN_CHECKPOINT_ELEMENTWISE,
                                   dtrain__scale_backward, x, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_DTYPE_F32)) return NULL;
    node->factor = factor;
    void *out = dtrain__output(tape, node, x, dtrain__last_axis(x), x->dtype);
    if (!out) return NULL;
    dtrain_axpby_args args = {x->count, false, factor, 0, x->data, out, false, dtrain__dtype(x)};
    return dtrain__record(tape, node,
                          dtrain__run_kernel(tape, node, dtrain__call_axpby, &args, sizeof args));
}

static dtrain_result dtrain__cast_backward(dtrain_tape *tape, dtrain_node *node)
{
    return dtrain__gradient_pass(tape, node->out, node->in[0]);
}

DTRAIN_API dtrain_tensor *dtrain_cast(dtrain_tape *tape, dtrain_tensor *x, dtrain_dtype dtype)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_cast", DTRAIN_CHECKPOINT_ELEMENTWISE,
                                   dtrain__cast_backward, x, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_DTYPE_F32)) return NULL;
    if (dtype != DTRAIN_DTYPE_F32 && dtype != DTRAIN_DTYPE_BF16 && dtype != DTRAIN_DTYPE_F16)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_cast: dtype is %s, expected f32, bf16 or f16",
                                 dtrain_dtype_name(dtype));
    if (dtrain__dtype(x) == dtype) return x;
    void *out = dtrain__output(tape, node, x, dtrain__last_axis(x), dtype);
    if (!out) return NULL;
    dtrain_convert_args args = {x->count, x->data, out, dtrain__dtype(x), dtype};
    return dtrain__record(tape, node,
                          dtrain__run_kernel(tape, node, dtrain__call_convert, &args, sizeof args));
}

/* Keeping is a function of (seed, stream, i): the forward kernel is its own backward. */
static dtrain_result dtrain__dropout_backward(dtrain_tape *tape, dtrain_node *node)
{
    dtrain_tensor *x = node->in[0];
    dtrain_dropout_args args = node->forward.dropout;
    DTRAIN__TRY(dtrain__gradient_open(tape, x, &args.accumulate));
    args.x = node->out->grad;
    args.y = x->grad;
    return tape->device->ops->dropout(tape->device, &args);
}

DTRAIN_API dtrain_tensor *dtrain_dropout(dtrain_tape *tape, dtrain_tensor *x, float probability)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_dropout", DTRAIN_CHECKPOINT_ELEMENTWISE,
                                   dtrain__dropout_backward, x, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_DTYPE_F32)) return NULL;
    if (!(probability >= 0 && probability < 1)) /* so written that NaN is refused */
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_dropout: probability is %g, not in [0, 1)",
                                 (double)probability);
    if (probability == 0 || (tape->flags & DTRAIN_TAPE_NO_GRAD)) return x;
    dtrain_dropout_args *args = &node->forward.dropout;
    args->count = x->count;
    args->probability = probability;
    args->seed = tape->seed;
    args->stream = tape->dropout_count++; /* other numbers for each dropout of the pass */
    args->scalars = tape->scalars;
    args->dtype = dtrain__dtype(x);
    args->x = x->data;
    args->y = dtrain__output(tape, node, x, dtrain__last_axis(x), x->dtype);
    if (!args->y) return NULL;
    return dtrain__record(tape, node,
                          dtrain__run_kernel(tape, node, dtrain__call_dropout, args, sizeof *args));
}

/* ---- One-element results ----------------------------------------------------------------------*/

/* factor * sum of x (count), as the node's output (1); added up in double: a float sum over many
 * rows would lose digits of the loss. */
static dtrain_tensor *dtrain__sum_to_output(dtrain_tape *tape, dtrain_node *node, const void *x,
                                            uint32_t dtype, int64_t count)
{
    const int64_t shape[1] = {1};
    dtrain_sum_args args;
    memset(&args, 0, sizeof args);
    node->out = dtrain__tensor_new(tape, node, DTRAIN_DTYPE_F32, 1, shape);
    if (!node->out) return NULL;
    args.count = count;
    args.scale = (double)node->factor;
    args.x = x;
    args.dtype = (dtrain_dtype)dtype;
    args.out = (float *)node->out->data;
    return dtrain__record(tape, node, tape->device->ops->sum(tape->device, &args));
}

/* Every element gets the same gradient. Where x has a type of its own that is rounded once, after
 * the factor: a scaled loss may be beyond fp16 while its mean is not. */
static dtrain_result dtrain__sum_backward(dtrain_tape *tape, dtrain_node *node)
{
    dtrain_tensor *x = node->in[0];
    const dtrain_device_ops *ops = tape->device->ops;
    dtrain_axpby_args args = {x->count,        false,   node->factor, 1,
                              node->out->grad, x->grad, true,         dtrain__dtype(x)};
    if (x->dtype != DTRAIN_DTYPE_F32) {
        float *scaled = dtrain__take_floats(tape, NULL, 1);
        dtrain_axpby_args one = {1,      false,  node->factor, 0,
                                 args.x, scaled, false,        DTRAIN_DTYPE_F32};
        if (!scaled) return tape->error;
        DTRAIN__TRY(ops->axpby(tape->device, &one));
        args.a = 1;
        args.x = dtrain__cast_to(tape, scaled, DTRAIN_DTYPE_F32, args.dtype, 1);
        DTRAIN__TRY(tape->error);
    }
    DTRAIN__TRY(dtrain__gradient_open(tape, x, &args.accumulate));
    args.y = x->grad;
    return ops->axpby(tape->device, &args);
}

static dtrain_tensor *dtrain__sum(dtrain_tape *tape, const char *name, dtrain_tensor *x, bool mean)
{
    dtrain_node *node = dtrain__op(tape, name, 0, dtrain__sum_backward, x, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_DTYPE_F32)) return NULL;
    node->factor = mean ? 1.0f / (float)x->count : 1.0f;
    return dtrain__sum_to_output(tape, node, x->data, x->dtype, x->count);
}

DTRAIN_API dtrain_tensor *dtrain_sum(dtrain_tape *tape, dtrain_tensor *x)
{
    return dtrain__sum(tape, "dtrain_sum", x, false);
}

DTRAIN_API dtrain_tensor *dtrain_mean(dtrain_tape *tape, dtrain_tensor *x)
{
    return dtrain__sum(tape, "dtrain_mean", x, true);
}

/* ---- Cross-entropy ----------------------------------------------------------------------------*/

/* d_logits = (softmax(logits) - onehot(target)) * upstream / valid targets.
 *
 * Logits are by far the largest value of a language model, (rows, vocabulary). When this is their
 * only use and the operation that made them does not look at them in its own backward, they are
 * dead once d_logits is known: it is written over them, and there is no second buffer of that size.
 * The block that says so belongs to no pool: it goes with the nodes of the pass. */
static dtrain_result dtrain__cross_entropy_backward(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_cross_entropy_args *forward = &node->forward.cross_entropy;
    dtrain_tensor *logits = node->in[0];
    dtrain__chunk *earlier = NULL;
    if (logits->producer && !logits->producer->reads_output && logits->pending_uses == 1) {
        dtrain__chunk *in_place = (dtrain__chunk *)dtrain__take_host(tape, sizeof *in_place);
        if (!in_place) return tape->error;
        const dtrain__tape_tensor *made = (const dtrain__tape_tensor *)logits;
        in_place->memory = (char *)logits->data;
        in_place->owners = 1;
        in_place->in_region = made->segment && !made->kept;
        dtrain__gradient_set(logits, in_place);
    } else {
        DTRAIN__TRY(dtrain__gradient_fresh(tape, logits, &earlier));
    }
    dtrain_cross_entropy_backward_args args = {
        forward->rows,    forward->n,   node->factor, forward->logits,
        forward->targets, forward->lse, logits->grad, (const float *)node->out->grad,
        forward->dtype};
    DTRAIN__TRY(tape->device->ops->cross_entropy_backward(tape->device, &args));
    return dtrain__gradient_merge(tape, logits, earlier);
}

DTRAIN_API dtrain_tensor *dtrain_cross_entropy(dtrain_tape *tape, dtrain_tensor *logits,
                                               dtrain_tensor *targets)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_cross_entropy", 0, dtrain__cross_entropy_backward,
                                   logits, targets);
    dtrain__text left, right;
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_DTYPE_F32)) return NULL;
    if (!dtrain__check_input(tape, node, 1, DTRAIN_DTYPE_I32)) return NULL;
    const int64_t n = dtrain__last_axis(logits), rows = logits->count / n;
    if (targets->count != rows)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_cross_entropy: logits %s have %lld rows, targets are %s",
                                 dtrain__shape_text(logits->ndim, logits->shape, &left),
                                 (long long)rows,
                                 dtrain__shape_text(targets->ndim, targets->shape, &right));

    const int64_t valid = ((const dtrain__tape_tensor *)targets)->valid_count;
    dtrain_cross_entropy_args *args = &node->forward.cross_entropy;
    args->rows = rows;
    args->n = n;
    args->logits = logits->data;
    args->dtype = dtrain__dtype(logits);
    args->targets = (const int32_t *)targets->data;
    args->loss = dtrain__take_floats(tape, node, rows);
    args->lse = dtrain__take_floats(tape, node, rows);
    node->reads_input = true;
    if (tape->error != DTRAIN_OK) return NULL;
    node->factor = valid ? 1.0f / (float)valid : 0.0f; /* nothing counts: the loss is 0 */
    dtrain_result result = tape->device->ops->cross_entropy(tape->device, args);
    if (dtrain__tape_stick(tape, result) != DTRAIN_OK) return NULL;
    return dtrain__sum_to_output(tape, node, args->loss, DTRAIN_DTYPE_F32, rows);
}
