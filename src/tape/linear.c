/* Linear layers, whole or divided by a tensor axis
 *
 * With z = x weight^T + bias and y = act(z):
 *
 *     d_z = d_y act'(z)   d_bias += column sums of d_z   d_weight += d_z^T x   d_x += d_z weight
 *
 * d_z overwrites d_y, which is not needed any more. A node keeps x until its backward, with GELU or
 * SiLU also z, with ReLU also y.
 *
 * The cut of the weight (out, in) divides the layer among t ranks (parallel/cut.h). With a weight
 * cut by rows a rank makes its columns of y. With a weight cut by columns it multiplies its columns
 * of x, and y is the sum of all products. The two in sequence, as in an MLP, send once forward and
 * once backward (f and g of Shoeybi et al., "Megatron-LM", 2019, are inside the layers):
 *
 *                 cut by rows                   cut by columns
 *
 *     rank 0      +--- W1[0] --> h[0] = columns --- W2[0] --> part --+
 *              x -+                                                  +- sum, + bias --> y
 *     rank 1      +--- W1[1] --> h[1] = columns --- W2[1] --> part --+
 *                    <-- d_x: sum of both                  d_y is there <--
 *
 *     weight          x          y          forward sends      backward sends
 *
 *     cut by rows     whole      columns    -                  the sum of d_x
 *     cut by rows     rows       columns    x is gathered      x again; sums of d_x are scattered
 *     cut by columns  columns    whole      the sum of y       -
 *     cut by columns  columns    rows       sums scattered     d_y is gathered
 *     not cut         whole or rows alike   -                  -
 *
 * Sequence parallelism (Korthikanti et al., 2022) cuts by rows: it sends the same bytes and keeps
 * only part of them. Invariants: no tensor is a partial sum; a whole tensor and its gradient have
 * the same bits on every rank; every rank runs collectives in program order. The bias of a weight
 * cut by rows is cut alike; the bias of a weight cut by columns is whole and is added once, to the
 * sum. */

#include "core/platform_internal.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

typedef struct dtrain__linear {
    dtrain_gemm_args forward; /* local product: x after its all-gather, y before its sum */
    uint32_t cut;             /* dtrain_cut_axis of the weight, over several ranks */
    bool gathers;             /* x has a part of the m rows */
    bool scatters;            /* y has a part of the m rows */
    bool has_d_z;             /* y->grad is d_z already, and d_bias is made */
} dtrain__linear;

DTRAIN__PRIVATE dtrain_result dtrain__counted_gemm(dtrain_op *op, const dtrain_gemm_args *args)
{
    op->tape->flops += 2.0 * (double)args->m * (double)args->n * (double)args->k;
    return op->device->ops->gemm(op->device, args);
}

/* ---- Placements -------------------------------------------------------------------------------*/

/* Check the placements of inputs and parameters; find the placement of y and this rank's part. */
static dtrain_result dtrain__linear_place(const dtrain_op *op, dtrain__linear *layer,
                                          uint32_t *placement, dtrain__share *part)
{
    const dtrain_tensor *x = op->inputs[0];
    const dtrain__groups *groups = &op->tape->groups;
    *placement = x->placement;
    *part = *dtrain__tensor_share(x);
    if (groups->tensor_ranks == 1) return DTRAIN_OK;
    const dtrain__share weight = dtrain__param_share(op, 0);
    const bool columns = x->placement == DTRAIN_PLACEMENT_COLUMNS;
    layer->cut = (uint32_t)(weight.axis + 1);
    if (columns != (layer->cut == DTRAIN_CUT_COLUMNS))
        return dtrain__refuse(op, "expected input 1 %s; dtrain_place converts it",
                              columns
                                  ? "whole, or cut by rows, for this weight"
                                  : "cut by columns (DTRAIN_PLACEMENT_COLUMNS), as the weight is");
    if (columns && !dtrain__share_same(part, &weight))
        return dtrain__refuse(op, "cut what makes input 1, and the weight, into the same parts");
    if (op->param_count > 1) { /* the bias has the parts of y */
        const dtrain__share bias = dtrain__param_share(op, 1);
        const bool rows = layer->cut == DTRAIN_CUT_ROWS;
        if (rows ? !dtrain__share_same(&bias, &weight) : bias.axis >= 0)
            return dtrain__refuse(op, "give the bias %s",
                                  rows ? "the same cut as the rows of the weight" : "no cut");
    }
    if (layer->cut == DTRAIN_CUT_NONE) return dtrain__check_partial(op);
    if (layer->cut == DTRAIN_CUT_COLUMNS) {
        DTRAIN__TRY(dtrain__divide_rows(op, x->count / x->shape[x->ndim - 1], placement, part));
        layer->scatters = *placement == DTRAIN_PLACEMENT_ROWS;
    } else { /* a row of y is cut like the axis of the weight */
        layer->gathers = x->placement == DTRAIN_PLACEMENT_ROWS;
        *placement = DTRAIN_PLACEMENT_COLUMNS;
        *part = dtrain__cut_part(op, &weight.cut, weight.whole, groups->tensor_rank);
    }
    return DTRAIN_OK;
}

/* ---- Forward ----------------------------------------------------------------------------------*/

static dtrain_result dtrain__linear_prepare(dtrain_op *op)
{
    dtrain__linear *layer = (dtrain__linear *)op->args;
    dtrain_gemm_args *args = &layer->forward;
    const dtrain_tensor *x = op->inputs[0];
    const int64_t in = x->shape[x->ndim - 1], out = op->param_shape[0][0], rows = x->count / in;
    uint32_t placement;
    dtrain__share part;
    DTRAIN__TRY(dtrain__linear_place(op, layer, &placement, &part));
    DTRAIN__TRY(dtrain_op_check_param(op, 0, -1, in));
    if (op->param_count > 1) DTRAIN__TRY(dtrain_op_check_param(op, 1, out, 0));
    if (args->activation > DTRAIN_ACTIVATION_SILU)
        return dtrain__refuse(op, "unknown activation %u", args->activation);
    args->m = layer->gathers ? dtrain__tensor_share(x)->whole : rows;
    if (layer->gathers || layer->scatters) {
        const int64_t shape[2] = {layer->scatters ? part.count : args->m, out};
        dtrain_op_output(op, op->cast, 2, shape);
    } else {
        dtrain__output_like(op, x, out, op->cast);
    }
    DTRAIN__TRY(op->tape->error);
    dtrain__place_as(op->outputs[0], placement, &part);
    args->flags = DTRAIN_GEMM_TRANS_B;
    args->n = out, args->k = in;
    args->alpha = 1;
    args->a = op->input_data[0], args->lda = in;
    args->b = op->param_data[0], args->ldb = in;
    args->c = op->output_data[0], args->ldc = out;
    args->a_dtype = args->b_dtype = args->c_dtype = op->cast;
    args->bias = (const float *)op->param_data[1];
    if (args->activation >= DTRAIN_ACTIVATION_GELU && op->needs_grad)
        args->aux = dtrain_op_save(op, op->cast, op->outputs[0]->count);
    if (args->activation == DTRAIN_ACTIVATION_RELU) op->reads |= DTRAIN_OP_READS_OUTPUTS;
    if (args->activation) op->reads |= DTRAIN__OP_FIRST_HALF(1); /* d_z's kernel sums d_bias */
    return DTRAIN_OK;
}

static dtrain_result dtrain__linear_forward(dtrain_op *op)
{
    const dtrain__linear *layer = (const dtrain__linear *)op->args;
    dtrain_gemm_args gemm = layer->forward;
    dtrain__chunk *all = NULL;
    if (layer->gathers || layer->scatters) {
        all = dtrain__scratch_take(op->tape, gemm.m * (layer->gathers ? gemm.k : gemm.n), op->cast);
        if (!all) return op->tape->error;
    }
    if (layer->gathers) { /* (m, in), not kept: backward gathers it again */
        DTRAIN__TRY(
            dtrain__gather_rows(op, NULL, gemm.a, all->memory, gemm.m, gemm.k, gemm.a_dtype, NULL));
        gemm.a = all->memory;
    }
    if (layer->cut != DTRAIN_CUT_COLUMNS) {
        DTRAIN__TRY(dtrain__counted_gemm(op, &gemm));
        dtrain__scratch_give(all);
        return DTRAIN_OK;
    }

    /* sum the products of all ranks, then apply bias and activation */
    gemm.bias = NULL;
    gemm.aux = NULL;
    gemm.activation = DTRAIN_ACTIVATION_NONE;
    if (all) gemm.c = all->memory;
    DTRAIN__TRY(dtrain__counted_gemm(op, &gemm));
    if (layer->scatters)
        DTRAIN__TRY(dtrain__scatter_rows(op, gemm.c, op->output_data[0], gemm.m, gemm.n,
                                         gemm.c_dtype, NULL));
    else DTRAIN__TRY(dtrain__sum_values(op, gemm.c, gemm.m * gemm.n, gemm.c_dtype, NULL));
    dtrain__scratch_give(all);
    if (!layer->forward.bias && !layer->forward.activation) return DTRAIN_OK;
    gemm = layer->forward;
    gemm.m = op->outputs[0]->count / gemm.n;
    gemm.c = op->output_data[0];
    gemm.ldc = gemm.n;
    return op->device->ops->bias(op->device, &gemm);
}

/* ---- Backward
 *
 * d_x comes last: the next backward reads it, so it should be the freshest in the cache. If x is
 * the activated output of a linear layer and has no other use, the product that makes d_x also
 * multiplies by that activation's derivative and sums that layer's bias gradient: two passes less.
 *
 * If d_x is a sum over the axis, it comes first: the sum runs while the product makes d_weight, and
 * the incomplete sum cannot be multiplied by a derivative. */

/* d_weight (out,in) = d_z^T (out,m) x (m,in); d_bias: sums of the rows of d_z^T. `gemm` has their
 * addresses and whether to add. */
static dtrain_result dtrain__linear_weight_grad(dtrain_op *op, dtrain_gemm_args *gemm,
                                                const void *d_z, const void *x)
{
    const dtrain_gemm_args *forward = &((const dtrain__linear *)op->args)->forward;
    if (!gemm->c) return DTRAIN_OK;
    gemm->flags = DTRAIN_GEMM_TRANS_A;
    gemm->alpha = 1;
    gemm->m = gemm->lda = forward->n;
    gemm->k = forward->m;
    gemm->n = gemm->ldb = gemm->ldc = forward->k;
    gemm->a = d_z;
    gemm->b = x;
    gemm->a_dtype = gemm->b_dtype = forward->c_dtype;
    gemm->c_dtype = DTRAIN_DTYPE_F32;
    return dtrain__counted_gemm(op, gemm);
}

/* d_x (m,in) = d_z (m,out) weight (out,in), in x's type. */
static dtrain_result dtrain__linear_input_grad(dtrain_op *op, const void *d_z, void *d_x, bool add,
                                               dtrain_node *inner)
{
    const dtrain_gemm_args *forward = &((const dtrain__linear *)op->args)->forward;
    dtrain_gemm_args gemm;
    memset(&gemm, 0, sizeof gemm);
    gemm.alpha = 1;
    gemm.m = forward->m;
    gemm.k = gemm.lda = forward->n;
    gemm.n = gemm.ldb = gemm.ldc = forward->k;
    gemm.a = d_z;
    gemm.b = forward->b;
    gemm.c = d_x;
    gemm.a_dtype = gemm.b_dtype = forward->c_dtype;
    gemm.c_dtype = (dtrain_dtype)op->inputs[0]->dtype;
    gemm.beta = add ? 1.0f : 0.0f;
    if (inner) {
        dtrain__linear *before = (dtrain__linear *)inner->op.args;
        gemm.flags = DTRAIN_GEMM_ACT_BACKWARD | DTRAIN_GEMM_BIAS_GRAD_C;
        gemm.activation = before->forward.activation;
        gemm.aux = before->forward.aux;
        gemm.bias_grad = dtrain_op_param_grad(&inner->op, 1, &gemm.accumulate_bias_grad);
        before->has_d_z = true;
    }
    return dtrain__counted_gemm(op, &gemm);
}

/* Make both gradients if d_x is a sum over the axis:
 *
 *     x of all rows is gathered   |  during the product that makes this rank's d_x
 *     d_x is summed               |  during the product that makes d_weight */
static dtrain_result dtrain__linear_shared(dtrain_op *op, dtrain_gemm_args *weight)
{
    const dtrain__linear *layer = (const dtrain__linear *)op->args;
    const dtrain_gemm_args *forward = &layer->forward;
    const dtrain_tensor *x = op->inputs[0];
    dtrain__chunk *all = NULL, *partial = NULL;
    dtrain_work *gathering = NULL, *summing = NULL;
    bool add = false;
    const void *rows = forward->a, *d_z = op->outputs[0]->grad;
    if (layer->gathers && weight->c) {
        all = dtrain__scratch_take(op->tape, forward->m * forward->k, forward->a_dtype);
        if (!all) return op->tape->error;
        rows = all->memory;
        DTRAIN__TRY(dtrain__gather_rows(op, NULL, forward->a, all->memory, forward->m, forward->k,
                                        forward->a_dtype, &gathering));
    }
    char *d_x = (char *)dtrain_op_input_grad(op, 0, &add), *sum = d_x;
    DTRAIN__TRY(op->tape->error);
    if (d_x) {
        const size_t row = (size_t)forward->k * dtrain_dtype_bytes((dtrain_dtype)x->dtype);
        char *product = d_x;
        if (add || layer->gathers) {
            partial = dtrain__scratch_take(op->tape, forward->m * forward->k, x->dtype);
            if (!partial) return op->tape->error;
            product = partial->memory;
            if (add) sum = product;
        }
        if (add && layer->gathers) sum += (size_t)dtrain__tensor_share(x)->first[0] * row;
        DTRAIN__TRY(dtrain__linear_input_grad(op, d_z, product, false, NULL));
        if (layer->gathers)
            DTRAIN__TRY(
                dtrain__scatter_rows(op, product, sum, forward->m, forward->k, x->dtype, &summing));
        else DTRAIN__TRY(dtrain__sum_values(op, product, x->count, x->dtype, &summing));
    }
    DTRAIN__TRY(dtrain_work_wait(gathering));
    DTRAIN__TRY(dtrain__linear_weight_grad(op, weight, d_z, rows));
    DTRAIN__TRY(dtrain_work_wait(summing));
    if (add) DTRAIN__TRY(dtrain__tape_add(op->device, x->count, d_x, x->dtype, sum, x->dtype, d_x));
    dtrain__scratch_give(all);
    dtrain__scratch_give(partial);
    return DTRAIN_OK;
}

static dtrain_result dtrain__linear_backward(dtrain_op *op)
{
    dtrain__linear *layer = (dtrain__linear *)op->args;
    const dtrain_gemm_args *forward = &layer->forward;
    const bool activated = forward->activation != DTRAIN_ACTIVATION_NONE && !layer->has_d_z;
    const dtrain_tensor *x = op->inputs[0];
    dtrain_tensor *y = op->outputs[0];
    dtrain__chunk *all = NULL;
    dtrain_gemm_args weight;
    bool add;
    memset(&weight, 0, sizeof weight);
    weight.c = dtrain_op_param_grad(op, 0, &add);
    weight.beta = add ? 1.0f : 0.0f;
    if (!layer->has_d_z)
        weight.bias_grad = dtrain_op_param_grad(op, 1, &weight.accumulate_bias_grad);

    /* Make d_z from d_y in place. Make d_bias too if the product of d_weight cannot: it does not
     * run, or has the d_z of all rows, while this rank needs its part of d_bias. */
    const bool weighs = weight.c != NULL;
    if (activated) DTRAIN__TRY(dtrain__gradient_open(op->tape, y, &add));
    if (activated || (weight.bias_grad && !(weighs && !layer->scatters))) {
        dtrain_activation_backward_args args;
        memset(&args, 0, sizeof args);
        args.activation = activated ? forward->activation : (uint32_t)DTRAIN_ACTIVATION_NONE;
        args.accumulate = weight.accumulate_bias_grad;
        args.n = forward->n;
        args.rows = y->count / args.n;
        /* for ReLU, y replaces z: max(0, z) is positive exactly if z is */
        args.x = forward->aux ? forward->aux : forward->c;
        args.d_out = args.d_in = y->grad;
        args.d_bias = weight.bias_grad;
        args.dtype = forward->c_dtype;
        DTRAIN__TRY(op->device->ops->activation_backward(op->device, &args));
        layer->has_d_z = activated;
        weight.bias_grad = NULL;
    }
    if (layer->cut == DTRAIN_CUT_ROWS) return dtrain__linear_shared(op, &weight);

    const void *d_z = y->grad;
    if (layer->scatters) {
        all = dtrain__scratch_take(op->tape, forward->m * forward->n, forward->c_dtype);
        if (!all) return op->tape->error;
        DTRAIN__TRY(dtrain__gather_rows(op, NULL, d_z, all->memory, forward->m, forward->n,
                                        forward->c_dtype, NULL));
        d_z = all->memory;
    }
    DTRAIN__TRY(dtrain__linear_weight_grad(op, &weight, d_z, forward->a));

    /* The layer that made x, if the product of d_x can also finish the backward of its activation.
     * Both layers must belong to the same visit to a unit: in another visit gradients must not be
     * touched, and values can be dropped. */
    dtrain_node *inner = x->producer;
    if (inner && (inner->op.desc != op->desc || x->pending_uses != 1 || x->grad ||
                  inner->mark != ((const dtrain_node *)op)->mark ||
                  !((const dtrain__linear *)inner->op.args)->forward.aux))
        inner = NULL;
    void *d_x = dtrain_op_input_grad(op, 0, &add);
    if (d_x) DTRAIN__TRY(dtrain__linear_input_grad(op, d_z, d_x, add, inner));
    dtrain__scratch_give(all);
    return op->tape->error;
}

DTRAIN__OP(linear, linear, DTRAIN_OP_READS_INPUTS | DTRAIN_OP_SPLITS | DTRAIN__OP_COUNTS,
           DTRAIN_RECOMPUTE_LINEAR, 0, DTRAIN__OP_PLACES, true)

DTRAIN_API dtrain_tensor *dtrain_linear(dtrain_tape *tape, dtrain_tensor *x, dtrain_param *weight,
                                        dtrain_param *bias, dtrain_activation activation)
{
    dtrain_param *const params[2] = {weight, bias};
    dtrain__linear args;
    memset(&args, 0, sizeof args);
    args.forward.activation = activation;
    return dtrain_tape_apply(tape, &dtrain__linear_op, &x, 1, params, bias ? 2 : 1, &args,
                             sizeof args);
}
