/* Linear. */

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

/* With z = x weight^T + bias and y = act(z):
 *
 *     d_z = d_y act'(z)   d_bias += column sums of d_z   d_weight += d_z^T x   d_x += d_z weight
 *
 * d_z overwrites d_y, which nobody needs any more. d_x comes last: it is what the next backward
 * reads, so it should be the freshest in the cache. Where x is itself a linear layer's activated
 * output and has no other use, the product that makes d_x multiplies by that activation's
 * derivative and adds up that layer's bias gradient while it is at it: two passes less there. */

/* The layer that made x, if this product may finish its activation's backward. Both must be of the
 * same visit to a unit: gradients of another may not be touched, and its values may be gone. */
static dtrain_node *dtrain__inner_layer(const dtrain_node *node, const dtrain_tensor *x)
{
    dtrain_node *inner = x->producer;
    const bool fits = inner && inner->backward == node->backward && inner->mark == node->mark &&
                      inner->forward.linear.activation == DTRAIN_ACTIVATION_GELU &&
                      x->pending_uses == 1 && !x->grad_written;
    return fits ? inner : NULL;
}

/* d_x (rows,in) = d_z (rows,out) weight (out,in), with gemm.a = d_z. */
static dtrain_result dtrain__linear_backward_x(dtrain_tape *tape, dtrain_node *node,
                                               dtrain_gemm_args gemm)
{
    const dtrain_gemm_args *forward = &node->forward.linear;
    dtrain_tensor *x = node->in[0];
    dtrain_node *inner = dtrain__inner_layer(node, x);
    bool accumulate;
    DTRAIN__TRY(dtrain__gradient_open(tape, x, &accumulate));
    gemm.flags = 0;
    gemm.m = forward->m, gemm.n = forward->k, gemm.k = forward->n;
    gemm.b = forward->b, gemm.ldb = forward->k;
    gemm.c = x->grad, gemm.ldc = forward->k;
    gemm.c_dtype = dtrain__dtype(x);
    gemm.beta = accumulate ? 1.0f : 0.0f;
    gemm.bias_grad = NULL;
    if (inner) {
        gemm.flags = DTRAIN_GEMM_ACT_BACKWARD | DTRAIN_GEMM_BIAS_GRAD_C;
        gemm.activation = inner->forward.linear.activation;
        gemm.aux = inner->forward.linear.aux;
        gemm.bias_grad = dtrain__param_grad(tape, inner, 1, &gemm.accumulate_bias_grad);
        inner->grad_is_inner = true;
    }
    return tape->device->ops->gemm(tape->device, &gemm);
}

static dtrain_result dtrain__linear_backward(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_gemm_args *forward = &node->forward.linear;
    const dtrain_device_ops *ops = tape->device->ops;
    dtrain_tensor *y = node->out;
    const bool activated = forward->activation != DTRAIN_ACTIVATION_NONE && !node->grad_is_inner;
    bool add_weight, add_bias = false;
    float *d_weight = dtrain__param_grad(tape, node, 0, &add_weight), *d_bias = NULL;
    dtrain_gemm_args gemm;
    memset(&gemm, 0, sizeof gemm);
    if (!node->grad_is_inner) d_bias = dtrain__param_grad(tape, node, 1, &add_bias);

    if (activated) DTRAIN__TRY(dtrain__gradient_own(tape, y));
    if (activated || (d_bias && !d_weight)) {
        /* max(0, z) is positive where z is: for ReLU the output serves as well as z */
        const void *z = forward->aux ? forward->aux : forward->c;
        dtrain_activation_backward_args args = {activated ? forward->activation
                                                          : (uint32_t)DTRAIN_ACTIVATION_NONE,
                                                add_bias,
                                                forward->m,
                                                forward->n,
                                                z,
                                                y->grad,
                                                y->grad,
                                                d_bias,
                                                forward->c_dtype};
        DTRAIN__TRY(ops->activation_backward(tape->device, &args));
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
        DTRAIN__TRY(ops->gemm(tape->device, &gemm));
    }
    return node->in[0]->needs_grad ? dtrain__linear_backward_x(tape, node, gemm) : DTRAIN_OK;
}

DTRAIN_API dtrain_tensor *dtrain_linear(dtrain_tape *tape, dtrain_tensor *x, dtrain_param *weight,
                                        dtrain_param *bias, dtrain_activation activation)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_linear", DTRAIN_CHECKPOINT_LINEAR,
                                   dtrain__linear_backward, x, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_DTYPE_F32)) return NULL;
    const int64_t in = dtrain__last_axis(x), rows = x->count / in;
    if (!dtrain__check_param(tape, node, 0, weight, -1, in)) return NULL;
    const int64_t out = dtrain__param_rows(weight);
    if (bias && !dtrain__check_param(tape, node, 1, bias, out, 0)) return NULL;
    if ((uint32_t)activation > DTRAIN_ACTIVATION_GELU)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_linear: unknown activation %d", (int)activation);

    dtrain_gemm_args *args = &node->forward.linear;
    args->flags = DTRAIN_GEMM_TRANS_B;
    args->activation = activation;
    args->m = rows, args->n = out, args->k = in;
    args->alpha = 1;
    args->a = dtrain__cast_input(tape, node), args->lda = in;
    args->b = dtrain__cast_weight(tape, weight), args->ldb = in;
    args->c = dtrain__output(tape, node, x, out, tape->cast), args->ldc = out;
    args->a_dtype = args->b_dtype = args->c_dtype = tape->cast;
    args->bias = dtrain__param_value(bias);
    if (activation == DTRAIN_ACTIVATION_GELU && node->needs_grad)
        args->aux = dtrain__take_data(tape, node, rows * out, tape->cast);
    node->reads_input = true;
    node->reads_output = activation == DTRAIN_ACTIVATION_RELU;
    if (args->aux) node->reads_rest = true;
    if (tape->error != DTRAIN_OK) return NULL;
    return dtrain__record(tape, node,
                          dtrain__run_kernel(tape, node, dtrain__call_gemm, args, sizeof *args));
}

/* ---- Layer normalisation ----------------------------------------------------------------------*/

/* With h = (x - mean) rstd, rows of n elements, and d_h = d_y weight:
 *
 *     d_weight += sum of d_y h over rows     d_bias += sum of d_y over rows
 *     d_x += rstd (d_h - mean(d_h) - h mean(d_h h))
 *
 * Behind add_layernorm x is a sum, whose gradient is complete here: this was the first node to use
 * it. Its narrower summand gets a rounded copy while the values are at hand. */
static dtrain_result dtrain__layernorm_backward(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_layernorm_args *forward = &node->forward.layernorm;
    const dtrain_device_ops *ops = tape->device->ops;
    dtrain_tensor *x = node->in[0];
    bool add_weight, add_bias;
    dtrain_layernorm_backward_args args;
    memset(&args, 0, sizeof args);
    args.rows = forward->rows;
    args.n = forward->n;
    args.x = x->data;
    args.weight = forward->weight;
    args.mean = forward->mean;
    args.rstd = forward->rstd;
    args.d_y = node->out->grad;
    args.x_dtype = forward->x_dtype;
    args.y_dtype = forward->y_dtype;
    args.d_weight = dtrain__param_grad(tape, node, 0, &add_weight);
    args.d_bias = dtrain__param_grad(tape, node, 1, &add_bias);
    args.accumulate_params = add_weight || add_bias;
    /* the kernel has one flag for both: if only one has a gradient already, the other adds to 0 */
    if (args.d_weight && args.d_bias && add_weight != add_bias)
        DTRAIN__TRY(ops->zero(tape->device, add_weight ? args.d_bias : args.d_weight,
                              (size_t)args.n * sizeof(float)));
    if (x->needs_grad) DTRAIN__TRY(dtrain__gradient_open(tape, x, &args.accumulate_x));
    args.d_x = x->grad;
    if (forward->residual && x->needs_grad) {
        dtrain_node *sum = x->producer;
        dtrain_tensor *residual = sum->in[1];
        if (residual->needs_grad && !residual->grad_written && residual->dtype != x->dtype) {
            bool accumulate;
            DTRAIN__TRY(dtrain__gradient_open(tape, residual, &accumulate));
            args.d_residual = residual->grad;
            sum->residual_done = true;
        }
    }
    return ops->layernorm_backward(tape->device, &args);
}

/* Of x, or of x + residual, which then becomes sum->data. */
DTRAIN__PRIVATE dtrain_tensor *dtrain__layernorm(dtrain_tape *tape, const char *name,
                                                 dtrain_tensor *x, dtrain_param *weight,
                                                 dtrain_param *bias, const dtrain_node *sum)
{
    dtrain_node *node =
        dtrain__op(tape, name, DTRAIN_CHECKPOINT_LAYERNORM, dtrain__layernorm_backward, x, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_DTYPE_F32)) return NULL;
    const int64_t n = dtrain__last_axis(x), rows = x->count / n;
    if (!dtrain__check_param(tape, node, 0, weight, n, 0)) return NULL;
    if (bias && !dtrain__check_param(tape, node, 1, bias, n, 0)) return NULL;

    dtrain_layernorm_args *args = &node->forward.layernorm;
    args->rows = rows;
    args->n = n;
    args->epsilon = 1e-5f;
    args->x = sum ? sum->in[0]->data : x->data;
    args->weight = dtrain__param_value(weight);
    args->bias = dtrain__param_value(bias);
    args->y = dtrain__output(tape, node, x, n, tape->cast);
    args->mean = dtrain__take_floats(tape, node, rows);
    args->rstd = dtrain__take_floats(tape, node, rows);
    args->residual = sum ? sum->in[1]->data : NULL;
    args->sum = sum ? x->data : NULL;
    args->x_dtype = dtrain__dtype(x);
    args->y_dtype = tape->cast;
    node->sum = sum;
    node->reads_input = node->reads_rest = true;
    if (tape->error != DTRAIN_OK) return NULL;
    return dtrain__record(
        tape, node, dtrain__run_kernel(tape, node, dtrain__call_layernorm, args, sizeof *args));
}

DTRAIN_API dtrain_tensor *dtrain_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                           dtrain_param *weight, dtrain_param *bias)
{
    return dtrain__layernorm(tape, "dtrain_layernorm", x, weight, bias, NULL);
}

/* ---- Embedding --------------------------------------------------------------------------------*/

/* d_token[t] += sum of d_y over the rows with token t, d_position[s] += the same over position s.
 * The kernel touches only rows that occur, so the others have to become zero first. */
static dtrain_result dtrain__embedding_backward(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_embedding_args *forward = &node->forward.embedding;
    const dtrain_device_ops *ops = tape->device->ops;
    float *grad[2];
    for (int i = 0; i < 2; i++) {
        bool add;
        grad[i] = dtrain__param_grad(tape, node, i, &add);
        if (!grad[i] || add) continue;
        size_t rows = (size_t)dtrain__param_rows(node->param[i]);
        DTRAIN__TRY(ops->zero(tape->device, grad[i], rows * (size_t)forward->n * sizeof(float)));
    }
    dtrain_embedding_backward_args args = {forward->rows,  forward->sequence, forward->n,
                                           forward->vocab, forward->tokens,   node->out->grad,
                                           grad[0],        grad[1],           DTRAIN_DTYPE_F32};
    return ops->embedding_backward(tape->device, &args);
}

DTRAIN_API dtrain_tensor *dtrain_embedding(dtrain_tape *tape, dtrain_tensor *tokens,
                                           dtrain_param *token, dtrain_param *position)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_embedding", DTRAIN_CHECKPOINT_ELEMENTWISE,
                                   dtrain__embedding_backward, tokens, NULL);
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_DTYPE_I32)) return NULL;
    if (!dtrain__check_param(tape, node, 0, token, -1, -1)) return NULL;
    int64_t token_shape[4];
    dtrain__param_shape(token, token_shape);
    const int64_t n = token_shape[1], sequence = dtrain__last_axis(tokens), rows = tokens->count;
    if (position && !dtrain__check_param(tape, node, 1, position, -1, n)) return NULL;
    if (position && dtrain__param_rows(position) < sequence)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_embedding: parameter %s has %lld positions, the tokens "
                                 "%lld",
                                 dtrain__param_name(position),
                                 (long long)dtrain__param_rows(position), (long long)sequence);

    const int64_t shape[2] = {rows, n};
    node->out = dtrain__tensor_new(tape, node, DTRAIN_DTYPE_F32, 2, shape);
    if (!node->out) return NULL;
    dtrain_embedding_args *args = &node->forward.embedding;
    args->rows = rows;
    args->sequence = sequence;
    args->n = n;
    args->vocab = token_shape[0];
    args->tokens = (const int32_t *)tokens->data;
    args->wte = dtrain__param_value(token);
    args->wpe = dtrain__param_value(position);
    args->y = node->out->data;
    args->dtype = DTRAIN_DTYPE_F32;
    return dtrain__record(
        tape, node, dtrain__run_kernel(tape, node, dtrain__call_embedding, args, sizeof *args));
}

/* ---- Attention --------------------------------------------------------------------------------*/

/* With p = softmax(q k^T / sqrt(d)), made again block by block from q, k and lse:
 *
 *     d_v = p^T d_y   d_p = d_y v^T   d_s = p (d_p - d_y . y)   d_q = d_s k   d_k = d_s^T q */
static dtrain_result dtrain__attention_backward(dtrain_tape *tape, dtrain_node *node)
{
    const dtrain_attention_args *forward = &node->forward.attention;
    dtrain_tensor *qkv = node->in[0];
    dtrain__chunk *earlier;
    DTRAIN__TRY(dtrain__gradient_fresh(tape, qkv, &earlier));
    dtrain_attention_backward_args args = {forward->batch, forward->sequence, forward->heads,
                                           forward->n,     forward->causal,   forward->qkv,
                                           forward->y,     forward->lse,      node->out->grad,
                                           qkv->grad,      forward->dtype};
    DTRAIN__TRY(tape->device->ops->attention_backward(tape->device, &args));
    return dtrain__gradient_merge(tape, qkv, earlier);
}

DTRAIN_API dtrain_tensor *dtrain_attention(dtrain_tape *tape, dtrain_tensor *qkv, int64_t sequence,
                                           int64_t heads, uint32_t flags)
{
    dtrain_node *node = dtrain__op(tape, "dtrain_attention", DTRAIN_CHECKPOINT_ATTENTION,
                                   dtrain__attention_backward, qkv, NULL);
    dtrain__text text;
    if (!node || !dtrain__check_input(tape, node, 0, DTRAIN_DTYPE_F32)) return NULL;
    const int64_t width = dtrain__last_axis(qkv), rows = qkv->count / width, n = width / 3;
    if (flags & ~DTRAIN_ATTENTION_CAUSAL)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT, "dtrain_attention: unknown flags %#x",
                                 flags);
    if (sequence < 1 || rows % sequence || heads < 1 || width % 3 || n % heads)
        return dtrain__tape_fail(tape, DTRAIN_ERROR_ARGUMENT,
                                 "dtrain_attention: qkv %s does not divide into sequences of %lld "
                                 "rows and 3 x %lld heads",
                                 dtrain__shape_text(qkv->ndim, qkv->shape, &text),
                                 (long long)sequence, (long long)heads);

    dtrain_attention_args *args = &node->forward.attention;
    args->batch = rows / sequence;
    args->sequence = sequence;
    args->heads = heads;
    args->n = n;
    args->causal = (flags & DTRAIN_ATTENTION_CAUSAL) != 0;
    args->qkv = qkv->data;
    args->dtype = dtrain__dtype(qkv);
    args->y = dtrain__output(tape, node, qkv, n, qkv->dtype);
    args->lse = dtrain__take_floats(tape, node, rows * heads);
    node->reads_input = node->reads_output = node->reads_rest = true;
    if (tape->error != DTRAIN_OK) return NULL;
    return dtrain__record(
        tape, node, dtrain__run_kernel(tape, node, dtrain__call_attention, args, sizeof *args));
}
