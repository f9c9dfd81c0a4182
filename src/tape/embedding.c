/* Embedding
 *
 * d_token[t] += sum of d_y over the rows with token t, d_position[s] += the same over position s.
 * The kernel touches only rows that occur, so the others have to become zero first. */

#include "core/platform_internal.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

static dtrain_result dtrain__embedding_prepare(dtrain_op *op)
{
    dtrain_embedding_args *args = (dtrain_embedding_args *)op->args;
    const dtrain_tensor *tokens = op->inputs[0];
    const int64_t positions = op->param_shape[1][0];
    args->rows = tokens->count;
    args->sequence = tokens->shape[tokens->ndim - 1];
    args->vocab = op->param_shape[0][0];
    args->n = op->param_shape[0][1];
    DTRAIN__TRY(dtrain_op_check_param(op, 0, -1, -1));
    if (op->param_count > 1) DTRAIN__TRY(dtrain_op_check_param(op, 1, -1, args->n));
    if (op->param_count > 1 && positions < args->sequence)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_embedding: parameter %s has %lld positions, the tokens %lld",
                           dtrain__param_name(op->params[1]), (long long)positions,
                           (long long)args->sequence);
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
    dtrain_embedding_args args = *(const dtrain_embedding_args *)op->args;
    float *grad[2];
    for (uint32_t i = 0; i < 2; i++) {
        bool add;
        grad[i] = dtrain_op_param_grad(op, i, &add);
        if (!grad[i] || add) continue;
        const size_t count = (size_t)op->param_shape[i][0] * (size_t)args.n;
        DTRAIN__TRY(op->device->ops->zero(op->device, grad[i], count * sizeof(float)));
    }
    args.d_y = op->outputs[0]->grad;
    args.d_wte = grad[0];
    args.d_wpe = grad[1];
    return op->device->ops->embedding_backward(op->device, &args);
}

DTRAIN__OP(embedding, embedding, 0, DTRAIN_RECOMPUTE_ELEMENTWISE, 1, 0, false)

DTRAIN_API dtrain_tensor *dtrain_embedding(dtrain_tape *tape, dtrain_tensor *tokens,
                                           dtrain_param *token, dtrain_param *position)
{
    dtrain_param *const params[2] = {token, position};
    return dtrain_tape_apply(tape, &dtrain__embedding_op, &tokens, 1, params, position ? 2 : 1,
                             NULL, sizeof(dtrain_embedding_args));
}
