/* Embedding
 *
 * d_token[t] += sum of d_y over the rows with token t, d_position[s] += the same over position s.
 * The kernel touches only rows that occur, so the gradients are zeroed first.
 *
 * A tensor axis (parallel/mesh.h) can cut the table by rows: each rank looks up its part of the
 * vocabulary and has zeros for other tokens. The sum over the ranks has one term that is not zero,
 * so it has the bits of the whole table. Only the first rank adds positions. With sequence
 * parallelism a rank keeps only part of the rows:
 *
 *     table        rows        forward                                 backward
 *     whole        all         look up                                 of all rows
 *     whole        a part      look up these rows                      of these rows
 *     cut          all         look up all, all-reduce                 of all rows
 *     cut          a part      look up all, reduce-scatter             all-gather of d_y for the
 *                                                                      table, positions of these
 *                                                                      rows
 *
 * Gradients of whole parameters are then sums over this rank's rows, which the strategy sums. */

#include "core/platform_internal.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

typedef struct dtrain__embedding {
    dtrain_embedding_args forward; /* rows that this rank looks up */
    int64_t rows, first_row;       /* rows of the output, number of the first */
    bool cut;                      /* the table is cut */
} dtrain__embedding;

/* Restrict a kernel to this rank's rows. */
static void dtrain__embedding_own_rows(const dtrain__embedding *layer, dtrain_embedding_args *args)
{
    args->rows = layer->rows;
    args->first_row = layer->first_row;
    args->tokens += layer->first_row;
}

static dtrain_result dtrain__embedding_prepare(dtrain_op *op)
{
    dtrain__embedding *layer = (dtrain__embedding *)op->args;
    dtrain_embedding_args *args = &layer->forward;
    const dtrain_tensor *tokens = op->inputs[0];
    const int64_t positions = op->param_shape[1][0];
    uint32_t placement = DTRAIN_PLACEMENT_WHOLE;
    dtrain__share part;
    args->rows = layer->rows = tokens->count;
    args->sequence = tokens->shape[tokens->ndim - 1];
    args->vocab = op->param_shape[0][0];
    args->n = op->param_shape[0][1];
    DTRAIN__TRY(dtrain_op_check_param(op, 0, -1, -1));
    if (op->tape->groups.tensor_ranks > 1) {
        const dtrain__share table = dtrain__param_share(op, 0);
        if (table.axis > 0 || table.runs > 1)
            return dtrain__refuse(op, "expected the table cut by rows, in one component: the "
                                      "vocabulary");
        if (op->param_count > 1 && dtrain__param_share(op, 1).axis >= 0)
            return dtrain__refuse(op, "positions stay whole; leave the cut of parameter 2 zeroed");
        layer->cut = table.axis == 0;
        if (layer->cut) {
            args->first_token = table.first[0];
            args->whole_vocab = table.whole;
        }
        DTRAIN__TRY(dtrain__divide_rows(op, args->rows, &placement, &part));
        if (placement == DTRAIN_PLACEMENT_ROWS) {
            layer->rows = part.count;
            layer->first_row = part.first[0];
        }
    }
    if (op->param_count > 1) DTRAIN__TRY(dtrain_op_check_param(op, 1, -1, args->n));
    if (op->param_count > 1 && positions < args->sequence)
        return dtrain__refuse(op, "there are %lld positions, and the tokens have %lld",
                              (long long)positions, (long long)args->sequence);
    const int64_t shape[2] = {layer->rows, args->n};
    dtrain__place_as(dtrain_op_output(op, DTRAIN_DTYPE_F32, 2, shape), placement, &part);
    args->tokens = (const int32_t *)op->input_data[0];
    args->wte = (const float *)op->param_data[0];
    args->wpe = (const float *)op->param_data[1];
    args->y = op->output_data[0];
    args->dtype = DTRAIN_DTYPE_F32;
    if (placement != DTRAIN_PLACEMENT_ROWS) return DTRAIN_OK;
    if (!layer->cut) dtrain__embedding_own_rows(layer, args);
    return DTRAIN_OK;
}

static dtrain_result dtrain__embedding_forward(dtrain_op *op)
{
    const dtrain__embedding *layer = (const dtrain__embedding *)op->args;
    dtrain_embedding_args args = layer->forward;
    if (!layer->cut) return op->device->ops->embedding(op->device, &args);
    dtrain__chunk *all = NULL;
    if (op->tape->groups.tensor_rank > 0) args.wpe = NULL;
    if (layer->rows < args.rows) {
        all = dtrain__scratch_take(op->tape, args.rows * args.n, DTRAIN_DTYPE_F32);
        if (!all) return op->tape->error;
        args.y = all->memory;
    }
    DTRAIN__TRY(op->device->ops->embedding(op->device, &args));
    if (!all) return dtrain__sum_values(op, args.y, args.rows * args.n, DTRAIN_DTYPE_F32, NULL);
    DTRAIN__TRY(dtrain__scatter_rows(op, args.y, op->output_data[0], args.rows, args.n,
                                     DTRAIN_DTYPE_F32, NULL));
    dtrain__scratch_give(all);
    return DTRAIN_OK;
}

static dtrain_result dtrain__embedding_backward(dtrain_op *op)
{
    const dtrain__embedding *layer = (const dtrain__embedding *)op->args;
    dtrain_embedding_args args = layer->forward;
    float *grad[2];
    for (uint32_t i = 0; i < 2; i++) {
        bool add;
        grad[i] = dtrain_op_param_grad(op, i, &add);
        if (!grad[i] || add) continue;
        const size_t count = (size_t)op->param_shape[i][0] * (size_t)args.n;
        DTRAIN__TRY(op->device->ops->zero(op->device, grad[i], count * sizeof(float)));
    }
    if (layer->cut && layer->rows < args.rows) {
        if (grad[0]) { /* a cut table needs d_y of all rows */
            dtrain__chunk *all =
                dtrain__scratch_take(op->tape, args.rows * args.n, DTRAIN_DTYPE_F32);
            if (!all) return op->tape->error;
            DTRAIN__TRY(dtrain__gather_rows(op, NULL, op->outputs[0]->grad, all->memory, args.rows,
                                            args.n, DTRAIN_DTYPE_F32, NULL));
            args.d_y = all->memory;
            args.d_wte = grad[0];
            DTRAIN__TRY(op->device->ops->embedding_backward(op->device, &args));
            dtrain__scratch_give(all);
        }
        if (!grad[1]) return DTRAIN_OK;
        grad[0] = NULL;
        dtrain__embedding_own_rows(layer, &args);
    }
    args.d_y = op->outputs[0]->grad;
    args.d_wte = grad[0];
    args.d_wpe = grad[1];
    return op->device->ops->embedding_backward(op->device, &args);
}

DTRAIN__OP(embedding, embedding, DTRAIN_OP_SPLITS | DTRAIN__OP_COUNTS, DTRAIN_RECOMPUTE_ELEMENTWISE,
           1, DTRAIN__OP_PLACES, false)

DTRAIN_API dtrain_tensor *dtrain_embedding(dtrain_tape *tape, dtrain_tensor *tokens,
                                           dtrain_param *token, dtrain_param *position)
{
    dtrain_param *const params[2] = {token, position};
    return dtrain_tape_apply(tape, &dtrain__embedding_op, &tokens, 1, params, position ? 2 : 1,
                             NULL, sizeof(dtrain__embedding));
}
