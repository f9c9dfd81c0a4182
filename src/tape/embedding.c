/* Embedding
 *
 * d_token[t] += sum of d_y over the rows with token t, d_position[s] += the same over position s.
 * The kernel touches only rows that occur, so the others have to become zero first.
 *
 * Over a tensor axis (parallel/mesh.h) the table may be cut by rows: each rank has the vectors of a
 * part of the vocabulary, looks those up, and has zeros for other tokens. The sum over the ranks
 * then has one term that is not zero: the bits are those of the whole table. The first rank adds
 * the positions, which are therefore in the sum once. With sequence parallelism a rank keeps a part
 * of the rows only:
 *
 *     table        rows        forward                                 backward
 *     whole        all         look up                                 of all rows
 *     whole        a part      look up these rows                      of these rows
 *     cut          all         look up all, all-reduce                 of all rows
 *     cut          a part      look up all, reduce-scatter             all-gather of d_y for the
 *                                                                      table, positions of these
 *                                                                      rows
 *
 * Gradients of what is whole are then sums over these rows, which the strategy adds up. */

#include "core/platform_internal.h"
#include "comm/comm.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

typedef struct dtrain__embedding {
    dtrain_embedding_args forward; /* of the rows that are looked up here */
    int64_t rows, first_row;       /* of the output: how many, and the first one's number */
    bool cut;                      /* the table is */
} dtrain__embedding;

/* Choose the rows of the output: all of them, or with sequence parallelism this rank's. A pass
 * without gradients may have any number of rows, as when a text is made token by token. */
static dtrain_result dtrain__embedding_rows(const dtrain_op *op, int64_t rows, dtrain__share *part)
{
    const dtrain__groups *groups = &op->tape->groups;
    const dtrain_cut by_rows = {DTRAIN_CUT_ROWS, 0, 0, {0}};
    const int64_t shape[4] = {rows, 0, 0, 0}, ranks = groups->tensor_ranks;
    const bool parted = groups->sequence_parallel && rows % ranks == 0;
    dtrain__share_of(&by_rows, shape, parted ? (int)ranks : 1, groups->tensor_rank, part);
    if (!groups->sequence_parallel || parted || (op->tape->pass.flags & DTRAIN_TAPE_NO_GRAD))
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: sequence parallelism divides rows, and the %lld of this batch do not "
                       "divide over %lld ranks of the tensor axis; take another batch or sequence",
                       op->desc->name, (long long)rows, (long long)ranks);
}

/* Take the part of the table that is here. */
static dtrain_result dtrain__embedding_table(const dtrain_op *op, dtrain__embedding *layer)
{
    const dtrain__groups *groups = &op->tape->groups;
    const dtrain_param *table = op->params[0];
    const dtrain__share part = dtrain__share_here(table, groups);
    if (groups->tensor_ranks == 1) return DTRAIN_OK;
    if (table->cut.axis && (table->cut.axis != DTRAIN_CUT_ROWS || part.runs > 1))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: parameter %s is cut by %s, expected rows, in one component: the "
                           "vocabulary",
                           op->desc->name, dtrain__param_name(table),
                           table->cut.axis == DTRAIN_CUT_ROWS ? "rows, in several components"
                                                              : "columns");
    if (op->param_count > 1 && op->params[1]->cut.axis)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: parameter %s is cut over the tensor axis, and positions stay "
                           "whole; leave its cut zeroed",
                           op->desc->name, dtrain__param_name(op->params[1]));
    if (!table->cut.axis) return DTRAIN_OK;
    layer->cut = true;
    layer->forward.first_token = part.first[0];
    layer->forward.whole_vocab = part.whole;
    return DTRAIN_OK;
}

/* Take memory for all rows from the pool of gradients; it goes back by owners--. */
static dtrain_result dtrain__embedding_scratch(dtrain_op *op, dtrain__tape_tensor *all)
{
    const dtrain_embedding_args *args = &((const dtrain__embedding *)op->args)->forward;
    bool add;
    memset(all, 0, sizeof *all);
    all->tensor.dtype = DTRAIN_DTYPE_F32;
    all->tensor.count = args->rows * args->n;
    return dtrain__gradient_open(op->tape, &all->tensor, &add);
}

static dtrain_result dtrain__embedding_prepare(dtrain_op *op)
{
    dtrain__embedding *layer = (dtrain__embedding *)op->args;
    dtrain_embedding_args *args = &layer->forward;
    const dtrain_tensor *tokens = op->inputs[0];
    const int64_t positions = op->param_shape[1][0];
    dtrain__share part;
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
    DTRAIN__TRY(dtrain__embedding_table(op, layer));
    DTRAIN__TRY(dtrain__embedding_rows(op, args->rows, &part));
    layer->rows = part.count;
    layer->first_row = part.axis < 0 ? 0 : part.first[0];
    const int64_t shape[2] = {layer->rows, args->n};
    dtrain_tensor *y = dtrain_op_output(op, DTRAIN_DTYPE_F32, 2, shape);
    if (part.axis >= 0) dtrain__place_as(y, DTRAIN_PLACEMENT_ROWS, &part);
    args->tokens = (const int32_t *)op->input_data[0];
    args->wte = (const float *)op->param_data[0];
    args->wpe = (const float *)op->param_data[1];
    args->y = op->output_data[0];
    args->dtype = DTRAIN_DTYPE_F32;
    if (layer->cut && layer->rows < args->rows) { /* forward's memory, for a plan to see */
        dtrain__tape_tensor all;
        DTRAIN__TRY(dtrain__embedding_scratch(op, &all));
        all.gradient->owners--;
    } else if (!layer->cut) {
        args->rows = layer->rows;
        args->first_row = layer->first_row;
        args->tokens += layer->first_row;
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__embedding_forward(dtrain_op *op)
{
    const dtrain__embedding *layer = (const dtrain__embedding *)op->args;
    const dtrain__groups *groups = &op->tape->groups;
    dtrain_embedding_args args = layer->forward;
    const size_t count = (size_t)layer->rows * (size_t)args.n;
    const bool parted = layer->rows < args.rows;
    dtrain_work *work = NULL;
    dtrain__tape_tensor all;
    if (!layer->cut) return op->device->ops->embedding(op->device, &args);
    if (groups->tensor_rank > 0) args.wpe = NULL;
    if (parted) DTRAIN__TRY(dtrain__embedding_scratch(op, &all));
    if (parted) args.y = all.tensor.grad;
    DTRAIN__TRY(op->device->ops->embedding(op->device, &args));
    if (parted)
        DTRAIN__TRY(dtrain_reduce_scatter(groups->tensor, args.y, op->output_data[0], count,
                                          DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &work));
    else
        DTRAIN__TRY(dtrain_all_reduce(groups->tensor, args.y, args.y, count, DTRAIN_DTYPE_F32,
                                      DTRAIN_REDUCE_SUM, &work));
    DTRAIN__TRY(dtrain_work_wait(work));
    if (parted) all.gradient->owners--;
    return DTRAIN_OK;
}

/* Add to the gradient of a cut table what rows of all ranks have for it. */
static dtrain_result dtrain__embedding_gathered(dtrain_op *op, float *d_table)
{
    const dtrain__embedding *layer = (const dtrain__embedding *)op->args;
    dtrain_embedding_args args = layer->forward;
    dtrain_work *work = NULL;
    dtrain__tape_tensor all;
    DTRAIN__TRY(dtrain__embedding_scratch(op, &all));
    if (!op->planning)
        DTRAIN__TRY(dtrain_all_gather(op->tape->groups.tensor, op->outputs[0]->grad,
                                      all.tensor.grad, (size_t)layer->rows * (size_t)args.n,
                                      DTRAIN_DTYPE_F32, &work));
    DTRAIN__TRY(dtrain_work_wait(work));
    args.d_y = all.tensor.grad;
    args.d_wte = d_table;
    DTRAIN__TRY(op->device->ops->embedding_backward(op->device, &args));
    all.gradient->owners--;
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
        if (grad[0]) DTRAIN__TRY(dtrain__embedding_gathered(op, grad[0]));
        if (!grad[1]) return DTRAIN_OK;
        grad[0] = NULL; /* and positions, of the rows that are here */
        args.rows = layer->rows;
        args.first_row = layer->first_row;
        args.tokens += layer->first_row;
    }
    args.d_y = op->outputs[0]->grad;
    args.d_wte = grad[0];
    args.d_wpe = grad[1];
    return op->device->ops->embedding_backward(op->device, &args);
}

DTRAIN__OP(embedding, embedding, 0, DTRAIN_RECOMPUTE_ELEMENTWISE, 1, DTRAIN__OP_PLACES, false)

DTRAIN_API dtrain_tensor *dtrain_embedding(dtrain_tape *tape, dtrain_tensor *tokens,
                                           dtrain_param *token, dtrain_param *position)
{
    dtrain_param *const params[2] = {token, position};
    return dtrain_tape_apply(tape, &dtrain__embedding_op, &tokens, 1, params, position ? 2 : 1,
                             NULL, sizeof(dtrain__embedding));
}
