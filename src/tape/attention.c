/* Attention, and what belongs to it: rotary position embedding, softmax
 *
 * What a node keeps alive until its backward:
 *
 *     attention       qkv, y, log-sum-exp of each row and head
 *     rotary          nothing: the backward pass turns the gradient back
 *     softmax         y */

#include "core/platform_internal.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

/* ---- Attention
 *
 * With p = softmax(q k^T / sqrt(d)), made again block by block from q, k and lse:
 *
 *     d_v = p^T d_y   d_p = d_y v^T   d_s = p (d_p - d_y . y)   d_q = d_s k   d_k = d_s^T q
 *
 * d_k and d_v of a head that several heads of queries share are sums over those. */

/* Return the call that a sentence is about: with as many heads of keys it is the plain one. */
static const char *dtrain__attention_name(int64_t heads, int64_t kv_heads)
{
    return heads == kv_heads ? "dtrain_attention" : "dtrain_grouped_attention";
}

static dtrain_result dtrain__attention_prepare(dtrain_op *op)
{
    dtrain_attention_args *args = (dtrain_attention_args *)op->args;
    const dtrain_tensor *qkv = op->inputs[0];
    const int64_t width = qkv->shape[qkv->ndim - 1], rows = qkv->count / width;
    const int64_t heads = args->heads, kv_heads = args->kv_heads, all = heads + 2 * kv_heads;
    const char *const call = dtrain__attention_name(heads, kv_heads);
    char text[DTRAIN__SHAPE_TEXT];
    if (heads < 1 || kv_heads < 1 || heads % kv_heads)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: %lld heads of queries cannot share %lld of keys equally", call,
                           (long long)heads, (long long)kv_heads);
    if (args->sequence < 1 || rows % args->sequence || width % all)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: qkv %s does not divide into sequences of %lld rows and %lld + 2 x "
                           "%lld heads",
                           call, dtrain__shape_text(qkv->shape, text), (long long)args->sequence,
                           (long long)heads, (long long)kv_heads);
    args->n = width / all * heads;
    args->dtype = (dtrain_dtype)qkv->dtype;
    dtrain__output_like(op, qkv, args->n, args->dtype);
    args->batch = rows / args->sequence;
    args->qkv = op->input_data[0];
    args->y = op->output_data[0];
    args->lse = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, rows * heads);
    return DTRAIN_OK;
}

static dtrain_result dtrain__attention_forward(dtrain_op *op)
{
    return op->device->ops->attention(op->device, (const dtrain_attention_args *)op->args);
}

static dtrain_result dtrain__attention_backward(dtrain_op *op)
{
    const dtrain_attention_args *forward = (const dtrain_attention_args *)op->args;
    dtrain_attention_backward_args args;
    void *d_qkv = dtrain_op_input_grad(op, 0, NULL); /* the kernel can only overwrite */
    if (!d_qkv) return op->tape->error;
    memset(&args, 0, sizeof args);
    args.batch = forward->batch;
    args.sequence = forward->sequence;
    args.heads = forward->heads;
    args.kv_heads = forward->kv_heads;
    args.n = forward->n;
    args.causal = forward->causal;
    args.qkv = forward->qkv;
    args.y = forward->y;
    args.lse = forward->lse;
    args.d_y = op->outputs[0]->grad;
    args.d_qkv = d_qkv;
    args.dtype = forward->dtype;
    return op->device->ops->attention_backward(op->device, &args);
}

DTRAIN__OP(attention, attention, DTRAIN_OP_READS_INPUTS | DTRAIN_OP_READS_OUTPUTS,
           DTRAIN_CHECKPOINT_ATTENTION, 0, false)

DTRAIN_API dtrain_tensor *dtrain_grouped_attention(dtrain_tape *tape, dtrain_tensor *qkv,
                                                   int64_t sequence, int64_t heads,
                                                   int64_t kv_heads, uint32_t flags)
{
    dtrain_attention_args args;
    memset(&args, 0, sizeof args);
    args.sequence = sequence;
    args.heads = heads;
    args.kv_heads = kv_heads;
    args.causal = (flags & DTRAIN_ATTENTION_CAUSAL) != 0;
    if (tape && (flags & ~DTRAIN_ATTENTION_CAUSAL)) /* sticks: nothing is applied */
        dtrain__tape_stick(tape, dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: unknown flags %#x",
                                             dtrain__attention_name(heads, kv_heads), flags));
    return dtrain_tape_apply(tape, &dtrain__attention_op, &qkv, 1, NULL, 0, &args, sizeof args);
}

DTRAIN_API dtrain_tensor *dtrain_attention(dtrain_tape *tape, dtrain_tensor *qkv, int64_t sequence,
                                           int64_t heads, uint32_t flags)
{
    return dtrain_grouped_attention(tape, qkv, sequence, heads, heads, flags);
}

/* ---- Rotary position embedding
 *
 * A rotation is orthogonal: the gradient is turned back by the same angles. */

static dtrain_result dtrain__rotary_prepare(dtrain_op *op)
{
    dtrain_rotary_args *args = (dtrain_rotary_args *)op->args;
    const dtrain_tensor *x = op->inputs[0];
    const int64_t width = x->shape[x->ndim - 1];
    char text[DTRAIN__SHAPE_TEXT];
    args->rows = x->count / width;
    if (args->sequence < 1 || args->rows % args->sequence || args->heads < 1 ||
        width % (2 * args->heads))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_rotary: %s does not divide into sequences of %lld rows and "
                           "%lld heads of an even size",
                           dtrain__shape_text(x->shape, text), (long long)args->sequence,
                           (long long)args->heads);
    if (args->rotated < 0 || args->rotated > args->heads || !(args->theta > 0))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_rotary: %lld of %lld heads with theta %g, expected at most all "
                           "heads and a theta above 0",
                           (long long)args->rotated, (long long)args->heads, (double)args->theta);
    if (!args->rotated) args->rotated = args->heads;
    args->d = width / args->heads;
    args->dtype = (dtrain_dtype)x->dtype;
    dtrain_op_output(op, args->dtype, x->ndim, x->shape);
    args->x = op->input_data[0];
    args->y = op->output_data[0];
    return DTRAIN_OK;
}

static dtrain_result dtrain__rotary_forward(dtrain_op *op)
{
    return op->device->ops->rotary(op->device, (const dtrain_rotary_args *)op->args);
}

static dtrain_result dtrain__rotary_backward(dtrain_op *op)
{
    dtrain_rotary_args args = *(const dtrain_rotary_args *)op->args;
    args.inverse = true;
    args.x = op->outputs[0]->grad;
    args.y = dtrain_op_input_grad(op, 0, &args.accumulate);
    if (!args.y) return op->tape->error;
    return op->device->ops->rotary(op->device, &args);
}

DTRAIN__OP(rotary, rotary, 0, DTRAIN_CHECKPOINT_ELEMENTWISE, 0, false)

DTRAIN_API dtrain_tensor *dtrain_rotary(dtrain_tape *tape, dtrain_tensor *x, int64_t sequence,
                                        int64_t heads, int64_t rotated, float theta)
{
    dtrain_rotary_args args;
    memset(&args, 0, sizeof args);
    args.sequence = sequence;
    args.heads = heads;
    args.rotated = rotated;
    args.theta = theta;
    return dtrain_tape_apply(tape, &dtrain__rotary_op, &x, 1, NULL, 0, &args, sizeof args);
}

/* ---- Softmax ----------------------------------------------------------------------------------*/

static dtrain_result dtrain__softmax_prepare(dtrain_op *op)
{
    dtrain_softmax_args *args = (dtrain_softmax_args *)op->args;
    const dtrain_tensor *x = op->inputs[0];
    args->n = x->shape[x->ndim - 1];
    args->rows = x->count / args->n;
    args->dtype = (dtrain_dtype)x->dtype;
    dtrain_op_output(op, args->dtype, x->ndim, x->shape);
    args->x = op->input_data[0];
    args->y = op->output_data[0];
    return DTRAIN_OK;
}

static dtrain_result dtrain__softmax_forward(dtrain_op *op)
{
    return op->device->ops->softmax(op->device, (const dtrain_softmax_args *)op->args);
}

static dtrain_result dtrain__softmax_backward(dtrain_op *op)
{
    const dtrain_softmax_args *forward = (const dtrain_softmax_args *)op->args;
    dtrain_softmax_backward_args args;
    memset(&args, 0, sizeof args);
    args.d_x = dtrain_op_input_grad(op, 0, &args.accumulate);
    if (!args.d_x) return op->tape->error;
    args.rows = forward->rows;
    args.n = forward->n;
    args.y = forward->y;
    args.d_y = op->outputs[0]->grad;
    args.dtype = forward->dtype;
    return op->device->ops->softmax_backward(op->device, &args);
}

DTRAIN__OP(softmax, softmax, DTRAIN_OP_READS_OUTPUTS, DTRAIN_CHECKPOINT_ELEMENTWISE, 0, false)

DTRAIN_API dtrain_tensor *dtrain_softmax(dtrain_tape *tape, dtrain_tensor *x)
{
    return dtrain_tape_apply(tape, &dtrain__softmax_op, &x, 1, NULL, 0, NULL,
                             sizeof(dtrain_softmax_args));
}
