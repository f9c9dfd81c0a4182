/* Layers: linear, layer normalisation, embedding, attention
 *
 * Each is the three functions of a dtrain_op_desc, its DTRAIN__OP line and the public call. The
 * arguments of the forward kernel are filled by prepare and kept with the node: forward passes them
 * on, backward takes shapes and addresses from them.
 *
 * What a node keeps alive until its backward, beside its parameters:
 *
 *     linear          x; with GELU the value before it, with ReLU the output
 *     layernorm       x (or the sum that it normalises), mean and rstd of each row
 *     embedding       tokens
 *     attention       qkv, y, log-sum-exp of each row and head */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "strategy/params.h"
#include "tape/op.h"
#include "tape/ops.h"
#include "tape/tape.h"
#include "tape/tape_internal.h"
#include "device/backend.h"
#include "device/device.h"

/* The output with x's shape and n in the last axis. */
static void dtrain__output_like(dtrain_op *op, const dtrain_tensor *x, int64_t n,
                                dtrain_dtype dtype)
{
    int64_t shape[4];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = n;
    dtrain_op_output(op, dtype, x->ndim, shape);
}

/* ---- Linear
 *
 * With z = x weight^T + bias and y = act(z):
 *
 *     d_z = d_y act'(z)   d_bias += column sums of d_z   d_weight += d_z^T x   d_x += d_z weight
 *
 * d_z overwrites d_y, which nobody needs any more. d_x comes last: it is what the next backward
 * reads, so it should be the freshest in the cache. Where x is itself a linear layer's activated
 * output and has no other use, the product that makes d_x multiplies by that activation's
 * derivative and adds up that layer's bias gradient while it is at it: two passes less there. */

typedef struct dtrain__linear {
    dtrain_gemm_args forward;
    bool grad_is_inner; /* the output's gradient is already that of z */
} dtrain__linear;

static dtrain_result dtrain__linear_prepare(dtrain_op *op)
{
    dtrain_gemm_args *args = &((dtrain__linear *)op->args)->forward;
    const dtrain_tensor *x = op->inputs[0];
    const int64_t in = x->shape[x->ndim - 1];
    int64_t weight[4];
    DTRAIN__TRY(dtrain_op_check_param(op, 0, -1, in));
    dtrain__param_shape(op, 0, weight);
    const int64_t out = weight[0];
    if (op->param_count > 1) DTRAIN__TRY(dtrain_op_check_param(op, 1, out, 0));
    if (args->activation > DTRAIN_ACTIVATION_GELU)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_linear: unknown activation %u",
                           args->activation);
    dtrain__output_like(op, x, out, op->cast);
    args->flags = DTRAIN_GEMM_TRANS_B;
    args->m = x->count / in, args->n = out, args->k = in;
    args->alpha = 1;
    args->a = op->input_data[0], args->lda = in;
    args->b = op->param_data[0], args->ldb = in;
    args->c = op->output_data[0], args->ldc = out;
    args->a_dtype = args->b_dtype = args->c_dtype = op->cast;
    args->bias = (const float *)op->param_data[1];
    if (args->activation == DTRAIN_ACTIVATION_GELU && op->needs_grad)
        args->aux = dtrain_op_save(op, op->cast, args->m * out);
    return DTRAIN_OK;
}

static dtrain_result dtrain__linear_forward(dtrain_op *op)
{
    return op->device->ops->gemm(op->device, &((const dtrain__linear *)op->args)->forward);
}

/* The layer that made x, if this product may finish its activation's backward. Both must be of the
 * same visit to a unit: gradients of another may not be touched, and its values may be gone. */
static dtrain_node *dtrain__inner_layer(const dtrain_op *op)
{
    const dtrain_tensor *x = op->inputs[0];
    dtrain_node *inner = x->producer;
    if (!inner || inner->op.desc != op->desc || x->pending_uses != 1 || x->grad_written ||
        inner->mark != ((const dtrain_node *)op)->mark)
        return NULL;
    const dtrain__linear *layer = (const dtrain__linear *)inner->op.args;
    return layer->forward.activation == DTRAIN_ACTIVATION_GELU ? inner : NULL;
}

/* d_x (rows,in) = d_z (rows,out) weight (out,in), with gemm.a = d_z. */
static dtrain_result dtrain__linear_backward_x(dtrain_op *op, dtrain_gemm_args gemm)
{
    const dtrain_gemm_args *forward = &((const dtrain__linear *)op->args)->forward;
    dtrain_tensor *x = op->inputs[0];
    dtrain_node *inner = dtrain__inner_layer(op);
    bool accumulate;
    DTRAIN__TRY(dtrain__gradient_open(op->tape, x, &accumulate));
    gemm.flags = 0;
    gemm.m = forward->m, gemm.n = forward->k, gemm.k = forward->n;
    gemm.b = forward->b, gemm.ldb = forward->k;
    gemm.c = x->grad, gemm.ldc = forward->k;
    gemm.c_dtype = (dtrain_dtype)x->dtype;
    gemm.beta = accumulate ? 1.0f : 0.0f;
    gemm.bias_grad = NULL;
    if (inner) {
        dtrain__linear *layer = (dtrain__linear *)inner->op.args;
        gemm.flags = DTRAIN_GEMM_ACT_BACKWARD | DTRAIN_GEMM_BIAS_GRAD_C;
        gemm.activation = layer->forward.activation;
        gemm.aux = layer->forward.aux;
        gemm.bias_grad = dtrain_op_param_grad(&inner->op, 1, &gemm.accumulate_bias_grad);
        layer->grad_is_inner = true;
    }
    return op->device->ops->gemm(op->device, &gemm);
}

static dtrain_result dtrain__linear_backward(dtrain_op *op)
{
    const dtrain__linear *layer = (const dtrain__linear *)op->args;
    const dtrain_gemm_args *forward = &layer->forward;
    const dtrain_device_ops *ops = op->device->ops;
    dtrain_tensor *y = op->outputs[0];
    const bool activated = forward->activation != DTRAIN_ACTIVATION_NONE && !layer->grad_is_inner;
    bool add_weight, add_bias = false;
    float *d_weight = dtrain_op_param_grad(op, 0, &add_weight), *d_bias = NULL;
    dtrain_gemm_args gemm;
    memset(&gemm, 0, sizeof gemm);
    if (!layer->grad_is_inner) d_bias = dtrain_op_param_grad(op, 1, &add_bias);

    if (activated) DTRAIN__TRY(dtrain__gradient_own(op->tape, y));
    if (activated || (d_bias && !d_weight)) {
        dtrain_activation_backward_args args;
        memset(&args, 0, sizeof args);
        args.activation = activated ? forward->activation : (uint32_t)DTRAIN_ACTIVATION_NONE;
        args.accumulate = add_bias;
        args.rows = forward->m;
        args.n = forward->n;
        /* max(0, z) is positive where z is: for ReLU the output serves as well as z */
        args.x = forward->aux ? forward->aux : forward->c;
        args.d_out = args.d_in = y->grad;
        args.d_bias = d_bias;
        args.dtype = forward->c_dtype;
        DTRAIN__TRY(ops->activation_backward(op->device, &args));
        d_bias = NULL;
    }
    gemm.alpha = 1;
    gemm.a = y->grad;
    gemm.lda = forward->n;
    gemm.a_dtype = forward->c_dtype;
    gemm.b_dtype = forward->a_dtype;
    if (d_weight) { /* (out,in) = d_z^T (out,rows) x (rows,in); d_bias: rows of d_z^T added up */
        gemm.flags = DTRAIN_GEMM_TRANS_A;
        gemm.m = forward->n, gemm.n = forward->k, gemm.k = forward->m;
        gemm.b = forward->a, gemm.ldb = forward->k;
        gemm.c = d_weight, gemm.ldc = forward->k;
        gemm.c_dtype = DTRAIN_DTYPE_F32;
        gemm.beta = add_weight ? 1.0f : 0.0f;
        gemm.bias_grad = d_bias;
        gemm.accumulate_bias_grad = add_bias;
        DTRAIN__TRY(ops->gemm(op->device, &gemm));
    }
    return op->inputs[0]->needs_grad ? dtrain__linear_backward_x(op, gemm) : DTRAIN_OK;
}

DTRAIN__OP(linear, DTRAIN_OP_READS_INPUTS, DTRAIN_CHECKPOINT_LINEAR, 0, true)
/* The same behind ReLU, whose backward looks at the output. */
static const dtrain_op_desc dtrain__linear_relu_op = {DTRAIN_OP_READS_INPUTS |
                                                          DTRAIN_OP_READS_OUTPUTS,
                                                      DTRAIN_CHECKPOINT_LINEAR,
                                                      0,
                                                      true,
                                                      "dtrain_linear",
                                                      dtrain__linear_prepare,
                                                      dtrain__linear_forward,
                                                      dtrain__linear_backward};

DTRAIN_API dtrain_tensor *dtrain_linear(dtrain_tape *tape, dtrain_tensor *x, dtrain_param *weight,
                                        dtrain_param *bias, dtrain_activation activation)
{
    dtrain_param *const params[2] = {weight, bias};
    dtrain__linear args;
    memset(&args, 0, sizeof args);
    args.forward.activation = activation;
    return dtrain_tape_apply(
        tape, activation == DTRAIN_ACTIVATION_RELU ? &dtrain__linear_relu_op : &dtrain__linear_op,
        &x, 1, params, bias ? 2 : 1, &args, sizeof args);
}

/* ---- Layer normalisation
 *
 * With h = (x - mean) rstd, rows of n elements, and d_h = d_y weight:
 *
 *     d_weight += sum of d_y h over rows     d_bias += sum of d_y over rows
 *     d_x += rstd (d_h - mean(d_h) - h mean(d_h h))
 *
 * Behind a residual connection x is the sum of both inputs and the operation's second output. Its
 * gradient, complete with this d_x, becomes that of both inputs; where the residual has a narrower
 * type the kernel writes the rounded copy while the values are at hand. */

static dtrain_result dtrain__layernorm_args_fill(dtrain_op *op, const dtrain_tensor *x)
{
    dtrain_layernorm_args *args = (dtrain_layernorm_args *)op->args;
    args->n = x->shape[x->ndim - 1];
    args->rows = x->count / args->n;
    for (uint32_t i = 0; i < op->param_count; i++)
        DTRAIN__TRY(dtrain_op_check_param(op, i, args->n, 0));
    dtrain__output_like(op, x, args->n, op->cast);
    args->epsilon = 1e-5f;
    args->x = op->input_data[0];
    args->weight = (const float *)op->param_data[0];
    args->bias = (const float *)op->param_data[1];
    args->y = op->output_data[0];
    args->mean = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, args->rows);
    args->rstd = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, args->rows);
    args->x_dtype = (dtrain_dtype)x->dtype;
    args->y_dtype = op->cast;
    return DTRAIN_OK;
}

static dtrain_result dtrain__layernorm_prepare(dtrain_op *op)
{
    return dtrain__layernorm_args_fill(op, op->inputs[0]);
}

static dtrain_result dtrain__layernorm_forward(dtrain_op *op)
{
    return op->device->ops->layernorm(op->device, (const dtrain_layernorm_args *)op->args);
}

/* The gradient of what was normalised, x, whose values are at `values`; residual NULL, or where
 * its rounded copy goes. */
static dtrain_result dtrain__layernorm_gradient(dtrain_op *op, dtrain_tensor *x, const void *values,
                                                void *d_residual)
{
    const dtrain_layernorm_args *forward = (const dtrain_layernorm_args *)op->args;
    bool add_weight, add_bias;
    dtrain_layernorm_backward_args args;
    memset(&args, 0, sizeof args);
    args.rows = forward->rows;
    args.n = forward->n;
    args.x = values;
    args.weight = forward->weight;
    args.mean = forward->mean;
    args.rstd = forward->rstd;
    args.d_y = op->outputs[0]->grad;
    args.d_residual = d_residual;
    args.x_dtype = forward->x_dtype;
    args.y_dtype = forward->y_dtype;
    args.d_weight = dtrain_op_param_grad(op, 0, &add_weight);
    args.d_bias = dtrain_op_param_grad(op, 1, &add_bias);
    args.accumulate_params = add_weight || add_bias;
    /* the kernel has one flag for both: if only one has a gradient already, the other adds to 0 */
    if (args.d_weight && args.d_bias && add_weight != add_bias)
        DTRAIN__TRY(op->device->ops->zero(op->device, add_weight ? args.d_bias : args.d_weight,
                                          (size_t)args.n * sizeof(float)));
    if (x->needs_grad) DTRAIN__TRY(dtrain__gradient_open(op->tape, x, &args.accumulate_x));
    args.d_x = x->grad;
    return op->device->ops->layernorm_backward(op->device, &args);
}

static dtrain_result dtrain__layernorm_backward(dtrain_op *op)
{
    return dtrain__layernorm_gradient(op, op->inputs[0], op->input_data[0], NULL);
}

DTRAIN__OP(layernorm, DTRAIN_OP_READS_INPUTS, DTRAIN_CHECKPOINT_LAYERNORM, 0, false)

DTRAIN_API dtrain_tensor *dtrain_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                           dtrain_param *weight, dtrain_param *bias)
{
    dtrain_param *const params[2] = {weight, bias};
    dtrain_layernorm_args args;
    memset(&args, 0, sizeof args);
    return dtrain_tape_apply(tape, &dtrain__layernorm_op, &x, 1, params, bias ? 2 : 1, &args,
                             sizeof args);
}

typedef struct dtrain__add_layernorm {
    dtrain_layernorm_args forward; /* first: the functions above read it */
    dtrain_tensor **sum;           /* the caller's */
} dtrain__add_layernorm;

static dtrain_result dtrain__add_layernorm_prepare(dtrain_op *op)
{
    dtrain__add_layernorm *args = (dtrain__add_layernorm *)op->args;
    const dtrain_tensor *x = op->inputs[0], *residual = op->inputs[1];
    dtrain__text left, right;
    if (x->count != residual->count || x->shape[x->ndim - 1] != residual->shape[residual->ndim - 1])
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s and %s differ", op->desc->name,
                           dtrain__shape_text(x, &left), dtrain__shape_text(residual, &right));
    DTRAIN__TRY(dtrain__layernorm_args_fill(op, x));
    *args->sum = dtrain_op_output(op, (dtrain_dtype)x->dtype, x->ndim, x->shape);
    args->forward.residual = op->input_data[1];
    args->forward.sum = op->output_data[1];
    return DTRAIN_OK;
}

static dtrain_result dtrain__add_layernorm_forward(dtrain_op *op)
{
    return dtrain__layernorm_forward(op);
}

static dtrain_result dtrain__add_layernorm_backward(dtrain_op *op)
{
    dtrain_tensor *residual = op->inputs[1], *sum = op->outputs[1];
    bool rounded = false, accumulate;
    if (residual->needs_grad && !residual->grad_written && residual->dtype != sum->dtype) {
        DTRAIN__TRY(dtrain__gradient_open(op->tape, residual, &accumulate));
        rounded = true;
    }
    DTRAIN__TRY(
        dtrain__layernorm_gradient(op, sum, op->output_data[1], rounded ? residual->grad : NULL));
    dtrain__gradient_drop(op->outputs[0]); /* spent: the buffer may serve the residual */
    DTRAIN__TRY(dtrain__gradient_pass(op, sum, op->inputs[0]));
    return rounded ? DTRAIN_OK : dtrain__gradient_pass(op, sum, residual);
}

DTRAIN__OP(add_layernorm, DTRAIN_OP_READS_OUTPUTS, DTRAIN_CHECKPOINT_LAYERNORM, 0, false)

/* The fused kernel takes a residual of the type that autocast computes in. */
DTRAIN_API dtrain_tensor *dtrain_add_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                               dtrain_tensor *residual, dtrain_param *weight,
                                               dtrain_param *bias, dtrain_tensor **sum)
{
    dtrain_tensor *const inputs[2] = {x, residual};
    dtrain_param *const params[2] = {weight, bias};
    dtrain__add_layernorm args;
    memset(&args, 0, sizeof args);
    args.sum = sum;
    if (dtrain__tape_check(tape, "dtrain_add_layernorm") != DTRAIN_OK) return NULL;
    if (!sum)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "dtrain_add_layernorm: sum is NULL");
    if (x && residual && residual->dtype != (uint32_t)tape->cast) {
        *sum = dtrain_add(tape, x, residual);
        return dtrain_layernorm(tape, *sum, weight, bias);
    }
    return dtrain_tape_apply(tape, &dtrain__add_layernorm_op, inputs, 2, params, bias ? 2 : 1,
                             &args, sizeof args);
}

/* ---- Embedding
 *
 * d_token[t] += sum of d_y over the rows with token t, d_position[s] += the same over position s.
 * The kernel touches only rows that occur, so the others have to become zero first. */

static dtrain_result dtrain__embedding_prepare(dtrain_op *op)
{
    dtrain_embedding_args *args = (dtrain_embedding_args *)op->args;
    const dtrain_tensor *tokens = op->inputs[0];
    int64_t token[4], position[4];
    DTRAIN__TRY(dtrain_op_check_param(op, 0, -1, -1));
    dtrain__param_shape(op, 0, token);
    args->rows = tokens->count;
    args->sequence = tokens->shape[tokens->ndim - 1];
    args->vocab = token[0];
    args->n = token[1];
    if (op->param_count > 1) {
        DTRAIN__TRY(dtrain_op_check_param(op, 1, -1, args->n));
        dtrain__param_shape(op, 1, position);
        if (position[0] < args->sequence)
            return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                               "dtrain_embedding: parameter %s has %lld positions, the tokens %lld",
                               op->params[1]->name ? op->params[1]->name : "?",
                               (long long)position[0], (long long)args->sequence);
    }
    const int64_t shape[2] = {args->rows, args->n};
    dtrain_op_output(op, DTRAIN_DTYPE_F32, 2, shape);
    args->tokens = (const int32_t *)op->input_data[0];
    args->wte = (const float *)op->param_data[0];
    args->wpe = (const float *)op->param_data[1];
    args->y = op->output_data[0];
    args->dtype = DTRAIN_DTYPE_F32;
    return DTRAIN_OK;
}

static dtrain_result dtrain__embedding_forward(dtrain_op *op)
{
    return op->device->ops->embedding(op->device, (const dtrain_embedding_args *)op->args);
}

static dtrain_result dtrain__embedding_backward(dtrain_op *op)
{
    const dtrain_embedding_args *forward = (const dtrain_embedding_args *)op->args;
    dtrain_embedding_backward_args args;
    float *grad[2];
    for (uint32_t i = 0; i < 2; i++) {
        int64_t shape[4];
        bool add;
        grad[i] = dtrain_op_param_grad(op, i, &add);
        if (!grad[i] || add) continue;
        dtrain__param_shape(op, i, shape);
        DTRAIN__TRY(op->device->ops->zero(op->device, grad[i],
                                          (size_t)shape[0] * (size_t)shape[1] * sizeof(float)));
    }
    memset(&args, 0, sizeof args);
    args.rows = forward->rows;
    args.sequence = forward->sequence;
    args.n = forward->n;
    args.vocab = forward->vocab;
    args.tokens = forward->tokens;
    args.d_y = op->outputs[0]->grad;
    args.d_wte = grad[0];
    args.d_wpe = grad[1];
    args.dtype = DTRAIN_DTYPE_F32;
    return op->device->ops->embedding_backward(op->device, &args);
}

DTRAIN__OP(embedding, 0, DTRAIN_CHECKPOINT_ELEMENTWISE, 1, false)

DTRAIN_API dtrain_tensor *dtrain_embedding(dtrain_tape *tape, dtrain_tensor *tokens,
                                           dtrain_param *token, dtrain_param *position)
{
    dtrain_param *const params[2] = {token, position};
    dtrain_embedding_args args;
    memset(&args, 0, sizeof args);
    return dtrain_tape_apply(tape, &dtrain__embedding_op, &tokens, 1, params, position ? 2 : 1,
                             &args, sizeof args);
}

/* ---- Attention
 *
 * With p = softmax(q k^T / sqrt(d)), made again block by block from q, k and lse:
 *
 *     d_v = p^T d_y   d_p = d_y v^T   d_s = p (d_p - d_y . y)   d_q = d_s k   d_k = d_s^T q */

static dtrain_result dtrain__attention_prepare(dtrain_op *op)
{
    dtrain_attention_args *args = (dtrain_attention_args *)op->args;
    const dtrain_tensor *qkv = op->inputs[0];
    const int64_t width = qkv->shape[qkv->ndim - 1], rows = qkv->count / width, n = width / 3;
    dtrain__text text;
    if (args->sequence < 1 || rows % args->sequence || args->heads < 1 || width % 3 ||
        n % args->heads)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_attention: qkv %s does not divide into sequences of %lld rows "
                           "and 3 x %lld heads",
                           dtrain__shape_text(qkv, &text), (long long)args->sequence,
                           (long long)args->heads);
    args->dtype = (dtrain_dtype)qkv->dtype;
    dtrain__output_like(op, qkv, n, args->dtype);
    args->batch = rows / args->sequence;
    args->n = n;
    args->qkv = op->input_data[0];
    args->y = op->output_data[0];
    args->lse = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, rows * args->heads);
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
    dtrain_tensor *qkv = op->inputs[0];
    dtrain__chunk *earlier;
    DTRAIN__TRY(dtrain__gradient_fresh(op->tape, qkv, &earlier));
    memset(&args, 0, sizeof args);
    args.batch = forward->batch;
    args.sequence = forward->sequence;
    args.heads = forward->heads;
    args.n = forward->n;
    args.causal = forward->causal;
    args.qkv = forward->qkv;
    args.y = forward->y;
    args.lse = forward->lse;
    args.d_y = op->outputs[0]->grad;
    args.d_qkv = qkv->grad;
    args.dtype = forward->dtype;
    DTRAIN__TRY(op->device->ops->attention_backward(op->device, &args));
    return dtrain__gradient_merge(op->tape, qkv, earlier);
}

DTRAIN__OP(attention, DTRAIN_OP_READS_INPUTS | DTRAIN_OP_READS_OUTPUTS, DTRAIN_CHECKPOINT_ATTENTION,
           0, false)

DTRAIN_API dtrain_tensor *dtrain_attention(dtrain_tape *tape, dtrain_tensor *qkv, int64_t sequence,
                                           int64_t heads, uint32_t flags)
{
    dtrain_attention_args args;
    memset(&args, 0, sizeof args);
    args.sequence = sequence;
    args.heads = heads;
    args.causal = (flags & DTRAIN_ATTENTION_CAUSAL) != 0;
    if (dtrain__tape_check(tape, "dtrain_attention") != DTRAIN_OK) return NULL;
    if (flags & ~DTRAIN_ATTENTION_CAUSAL)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "dtrain_attention: unknown flags %#x",
                                 flags);
    return dtrain_tape_apply(tape, &dtrain__attention_op, &qkv, 1, NULL, 0, &args, sizeof args);
}
