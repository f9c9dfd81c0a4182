/* Layer norm, root mean square norm, batch norm
 *
 * An operation is the three functions of a dtrain_op_desc, its DTRAIN__OP line and the public call.
 * Prepare fills the arguments of the forward kernel, which stay with the node: forward passes them
 * on, backward takes shapes and addresses from them. A norm keeps x, or the sum that it normalises,
 * until its backward, and mean and rstd of each row or channel. */

#include "core/platform_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

/* Make the output with x's shape and n in the last axis. */
DTRAIN__PRIVATE void dtrain__output_like(dtrain_op *op, const dtrain_tensor *x, int64_t n,
                                         dtrain_dtype dtype)
{
    int64_t shape[4];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = n;
    dtrain_op_output(op, dtype, x->ndim, shape);
}

/* ---- Layer normalisation
 *
 * With h = (x - mean) rstd, rows of n elements, and d_h = d_y weight:
 *
 *     d_weight += sum of d_y h over rows     d_bias += sum of d_y over rows
 *     d_x += rstd (d_h - mean(d_h) - h mean(d_h h))
 *
 * The root mean square norm has a mean of 0, which is not saved: mean(d_h) drops out. With a
 * residual stream (input 0) and a branch to add to it (input 1), x is the sum of both and the
 * second output. Its gradient, complete with this d_x, becomes the gradient of both inputs; if the
 * branch has a narrower type, the kernel writes a rounded copy too. */

typedef struct dtrain__layernorm {
    dtrain_layernorm_args forward;
    bool rms;            /* root mean square norm: the mean is not subtracted */
    dtrain_tensor **sum; /* the caller's residual stream, which becomes the sum */
} dtrain__layernorm;

static dtrain_result dtrain__layernorm_prepare(dtrain_op *op)
{
    dtrain__layernorm *layer = (dtrain__layernorm *)op->args;
    dtrain_layernorm_args *args = &layer->forward;
    const dtrain_tensor *x = op->inputs[0];
    args->n = x->shape[x->ndim - 1];
    args->rows = x->count / args->n;
    for (uint32_t i = 0; i < op->param_count; i++)
        DTRAIN__TRY(dtrain_op_check_param(op, i, args->n, 0));
    if (!(args->epsilon >= 0)) /* so written that NaN is refused */
        return dtrain__refuse(op, "epsilon is %g, expected 0 or more", (double)args->epsilon);
    dtrain_op_output(op, op->cast, x->ndim, x->shape);
    args->x = op->input_data[0];
    args->weight = (const float *)op->param_data[0];
    args->bias = (const float *)op->param_data[1];
    args->y = op->output_data[0];
    if (!layer->rms) args->mean = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, args->rows);
    args->rstd = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, args->rows);
    args->x_dtype = (dtrain_dtype)x->dtype;
    args->y_dtype = op->cast;
    if (op->input_count == 1) return DTRAIN_OK;
    op->reads = DTRAIN_OP_READS_OUTPUTS;
    DTRAIN__TRY(dtrain__check_same(op));
    *layer->sum = dtrain_op_output(op, args->x_dtype, x->ndim, x->shape);
    args->residual = op->input_data[1];
    args->sum = op->output_data[1];
    return DTRAIN_OK;
}

DTRAIN__OP_FORWARD(layernorm)

static dtrain_result dtrain__layernorm_backward(dtrain_op *op)
{
    const dtrain_layernorm_args *forward = &((const dtrain__layernorm *)op->args)->forward;
    dtrain_tensor *residual = op->inputs[1]; /* NULL: no residual */
    dtrain_tensor *x = residual ? op->outputs[1] : op->inputs[0];
    const bool rounded = residual && residual->dtype != x->dtype && !residual->grad;
    bool add_weight, add_bias, add_residual;
    dtrain_layernorm_backward_args args;
    memset(&args, 0, sizeof args);
    args.rows = forward->rows;
    args.n = forward->n;
    args.x = residual ? forward->sum : forward->x;
    args.weight = forward->weight;
    args.mean = forward->mean;
    args.rstd = forward->rstd;
    args.d_y = op->outputs[0]->grad;
    args.x_dtype = forward->x_dtype;
    args.y_dtype = forward->y_dtype;
    args.d_weight = dtrain_op_param_grad(op, 0, &add_weight);
    args.d_bias = dtrain_op_param_grad(op, 1, &add_bias);
    args.accumulate_params = add_weight || add_bias;
    /* the kernel has one flag for both: if only one has a gradient already, zero the other */
    if (args.d_weight && args.d_bias && add_weight != add_bias)
        DTRAIN__TRY(op->device->ops->zero(op->device, add_weight ? args.d_bias : args.d_weight,
                                          (size_t)args.n * sizeof(float)));
    if (rounded) args.d_residual = dtrain_op_input_grad(op, 1, &add_residual);
    DTRAIN__TRY(op->tape->error);
    if (x->needs_grad) DTRAIN__TRY(dtrain__gradient_open(op->tape, x, &args.accumulate_x));
    args.d_x = x->grad;
    DTRAIN__TRY(op->device->ops->layernorm_backward(op->device, &args));
    if (!residual) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__gradient_pass(op, 1, 0));
    return rounded ? DTRAIN_OK : dtrain__gradient_pass(op, 1, 1);
}

DTRAIN__OP(layernorm, layernorm, DTRAIN_OP_READS_INPUTS, DTRAIN_RECOMPUTE_LAYERNORM, 0,
           DTRAIN_OP_TAKES_ROWS, false)
DTRAIN__OP(rms_norm, layernorm, DTRAIN_OP_READS_INPUTS, DTRAIN_RECOMPUTE_LAYERNORM, 0,
           DTRAIN_OP_TAKES_ROWS, false)

/* Add x to the residual stream and apply a norm. The fused kernel takes x only in autocast's type.
 */
static dtrain_tensor *dtrain__norm_apply(dtrain_tape *tape, const dtrain_op_desc *desc,
                                         dtrain_tensor *x, dtrain_tensor **residual,
                                         dtrain_param *const *params, uint32_t param_count,
                                         float epsilon)
{
    dtrain_tensor *inputs[2] = {x, NULL};
    uint32_t input_count = 1;
    dtrain__layernorm args;
    memset(&args, 0, sizeof args);
    args.forward.epsilon = epsilon;
    args.rms = desc == &dtrain__rms_norm_op;
    args.sum = residual;
    if (residual && !*residual) {
        *residual = x;
    } else if (residual && tape && x && x->dtype != (uint32_t)tape->pass.cast) {
        inputs[0] = *residual = dtrain_add(tape, *residual, x);
    } else if (residual) {
        inputs[0] = *residual;
        inputs[input_count++] = x;
    }
    return dtrain_tape_apply(tape, desc, inputs, input_count, params, param_count, &args,
                             sizeof args);
}

DTRAIN_API dtrain_tensor *dtrain_layernorm(dtrain_tape *tape, dtrain_tensor *x,
                                           dtrain_tensor **residual, dtrain_param *weight,
                                           dtrain_param *bias, float epsilon)
{
    dtrain_param *const params[2] = {weight, bias};
    return dtrain__norm_apply(tape, &dtrain__layernorm_op, x, residual, params, bias ? 2 : 1,
                              epsilon);
}

DTRAIN_API dtrain_tensor *dtrain_rms_norm(dtrain_tape *tape, dtrain_tensor *x,
                                          dtrain_tensor **residual, dtrain_param *weight,
                                          float epsilon)
{
    return dtrain__norm_apply(tape, &dtrain__rms_norm_op, x, residual, &weight, 1, epsilon);
}

/* ---- Batch normalisation
 *
 * With d = d_y act', h = (x - mean) rstd and rows counted over all ranks of the batch:
 *
 *     d_weight += sum of d h     d_bias += sum of d     d_residual += d
 *     d_x += weight rstd (d - (sum of d + h sum of d h) / rows)
 *
 *     forward     moments --(all-gather of 1 + 2 n)--> statistics --> y
 *     backward    sums    --(all-reduce of 2 n)------> d_x
 *
 * Ranks combine their parts in rank order, so all get the same mean. Gradients of weight and bias
 * stay local: the strategy averages them. Recomputation makes y from the first mean and exchanges
 * nothing. */

typedef struct dtrain__batch_norm {
    dtrain_batch_norm_desc desc;
    dtrain_batchnorm_statistics_args statistics;
    dtrain_batchnorm_args forward;
    bool known; /* mean and rstd have been computed */
} dtrain__batch_norm;

static dtrain_result dtrain__batch_norm_check(const dtrain_op *op, const dtrain__batch_norm *layer)
{
    const dtrain_batch_norm_desc *desc = &layer->desc;
    const dtrain__groups *groups = &op->tape->groups;
    if (desc->activation != DTRAIN_ACTIVATION_NONE && desc->activation != DTRAIN_ACTIVATION_RELU)
        return dtrain__refuse(op,
                              "activation is %u, expected none or ReLU, whose slope is known "
                              "from the result",
                              (unsigned)desc->activation);
    if (!(desc->momentum >= 0 && desc->momentum <= 1) || !(desc->epsilon >= 0))
        return dtrain__refuse(op,
                              "momentum is %g, expected 0 to 1; epsilon is %g, expected 0 or "
                              "more",
                              (double)desc->momentum, (double)desc->epsilon);
    for (uint32_t i = 2; i < op->param_count; i++)
        if (!(op->params[i]->flags & DTRAIN_PARAM_BUFFER))
            return dtrain__refuse(op, "running average %s has no DTRAIN_PARAM_BUFFER",
                                  dtrain__param_name(op->params[i]));
    for (uint32_t i = 0; i < op->param_count; i++)
        DTRAIN__TRY(dtrain_op_check_param(op, i, layer->forward.n, 0));
    if (desc->comm && desc->comm == groups->data)
        return dtrain__refuse(op, "comm is the strategy's, whose calls would come between; give it "
                                  "one of its own (dtrain_comm_split)");
    if (desc->comm && groups->all &&
        groups->pipeline_ranks > 1 && /* other stages do not run this */
        dtrain_comm_size(desc->comm) > dtrain_comm_size(groups->all) / groups->pipeline_ranks)
        return dtrain__refuse(op,
                              "comm has %d ranks, and a stage of the pipeline is on %d; split one "
                              "off the data axis (dtrain_mesh_comm), whose ranks have the same "
                              "stages",
                              dtrain_comm_size(desc->comm),
                              dtrain_comm_size(groups->all) / groups->pipeline_ranks);
    if (op->input_count == 1) return DTRAIN_OK;
    DTRAIN__TRY(dtrain__check_same(op));
    if (op->inputs[1]->dtype == op->inputs[0]->dtype) return DTRAIN_OK;
    return dtrain__refuse(op, "expected a residual of the type of x; cast one of them");
}

/* Take memory that is never dropped. */
static float *dtrain__batch_norm_floats(dtrain_op *op, int64_t count)
{
    return (float *)dtrain__take_data(op->tape, NULL, count, DTRAIN_DTYPE_F32);
}

static dtrain_result dtrain__batch_norm_prepare(dtrain_op *op)
{
    dtrain__batch_norm *layer = (dtrain__batch_norm *)op->args;
    const dtrain_tensor *x = op->inputs[0];
    const int64_t n = x->shape[x->ndim - 1], part = 1 + 2 * n;
    const int ranks = layer->desc.comm ? dtrain_comm_size(layer->desc.comm) : 1;
    dtrain_batchnorm_statistics_args *statistics = &layer->statistics;
    dtrain_batchnorm_args *forward = &layer->forward;
    forward->rows = x->count / n;
    forward->n = statistics->n = n;
    DTRAIN__TRY(dtrain__batch_norm_check(op, layer));
    const bool batch = !(op->tape->pass.flags & DTRAIN_TAPE_NO_GRAD) || !layer->desc.running_mean;
    dtrain_op_output(op, (dtrain_dtype)x->dtype, x->ndim, x->shape);

    float *all = dtrain__batch_norm_floats(op, part * ranks);
    statistics->parts = batch ? ranks : 0; /* none: the running averages */
    statistics->epsilon = layer->desc.epsilon > 0 ? layer->desc.epsilon : 1e-5f;
    statistics->momentum = layer->desc.momentum > 0 ? layer->desc.momentum : 0.1f;
    statistics->all = all;
    statistics->mean = dtrain__batch_norm_floats(op, n);
    statistics->rstd = dtrain__batch_norm_floats(op, n);
    statistics->inverse_count = dtrain__batch_norm_floats(op, 1);
    if (op->param_count > 2) { /* buffers are parameters that an operation writes */
        statistics->running_mean = (float *)(uintptr_t)op->param_data[2];
        statistics->running_var = (float *)(uintptr_t)op->param_data[3];
    }

    forward->activation = layer->desc.activation;
    forward->x = op->input_data[0];
    forward->residual = op->input_data[1]; /* NULL: none */
    forward->mean = statistics->mean;
    forward->rstd = statistics->rstd;
    forward->weight = (const float *)op->param_data[0];
    forward->bias = (const float *)op->param_data[1];
    forward->y = op->output_data[0];
    forward->dtype = (dtrain_dtype)x->dtype;
    forward->sums = ranks > 1 ? dtrain__batch_norm_floats(op, part) : all; /* of moments */
    if (forward->activation != DTRAIN_ACTIVATION_NONE) op->reads |= DTRAIN_OP_READS_OUTPUTS;
    return DTRAIN_OK;
}

/* Compute mean and rstd, in the first forward only, and y. */
static dtrain_result dtrain__batch_norm_forward(dtrain_op *op)
{
    dtrain__batch_norm *layer = (dtrain__batch_norm *)op->args;
    const dtrain_device_ops *ops = op->device->ops;
    const dtrain_batchnorm_args *forward = &layer->forward;
    const int parts = layer->known ? 0 : (int)layer->statistics.parts;
    if (parts) DTRAIN__TRY(ops->batchnorm_moments(op->device, forward));
    if (parts > 1) {
        dtrain_work *work = NULL;
        if (op->tape->strategy)
            dtrain__notes_of(op->tape->strategy)->batch_comm = layer->desc.comm->number;
        DTRAIN__TRY(dtrain_all_gather(layer->desc.comm, forward->sums,
                                      (void *)(uintptr_t)layer->statistics.all,
                                      (size_t)(1 + 2 * forward->n), DTRAIN_DTYPE_F32, &work));
        DTRAIN__TRY(dtrain_work_wait(work));
    }
    if (!layer->known) DTRAIN__TRY(ops->batchnorm_statistics(op->device, &layer->statistics));
    layer->known = true;
    return ops->batchnorm(op->device, forward);
}

static dtrain_result dtrain__batch_norm_backward(dtrain_op *op)
{
    const dtrain__batch_norm *layer = (const dtrain__batch_norm *)op->args;
    const dtrain_device_ops *ops = op->device->ops;
    dtrain_batchnorm_args args = layer->forward;
    const int64_t n = args.n;
    args.d_y = op->outputs[0]->grad;
    args.sums = dtrain__batch_norm_floats(op, 2 * n);
    args.inverse_count = layer->statistics.inverse_count;
    if (op->input_count > 1) args.d_residual = dtrain_op_input_grad(op, 1, &args.accumulate);
    DTRAIN__TRY(op->tape->error);
    DTRAIN__TRY(ops->batchnorm_sums(op->device, &args));
    for (uint32_t i = 0; i < 2; i++) { /* gradients of weight and bias, on this rank */
        dtrain_axpby_args add;
        memset(&add, 0, sizeof add);
        add.y = dtrain_op_param_grad(op, i, &add.accumulate);
        if (!add.y) continue;
        add.count = n;
        add.a = add.b = 1;
        add.x = args.sums + (i == 0 ? n : 0);
        add.dtype = DTRAIN_DTYPE_F32;
        DTRAIN__TRY(ops->axpby(op->device, &add));
    }
    DTRAIN__TRY(op->tape->error);
    if (layer->statistics.parts > 1 && !op->planning) {
        dtrain_work *work = NULL;
        DTRAIN__TRY(dtrain_all_reduce(layer->desc.comm, args.sums, args.sums, (size_t)(2 * n),
                                      DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &work));
        DTRAIN__TRY(dtrain_work_wait(work));
    }
    args.d_x = dtrain_op_input_grad(op, 0, &args.accumulate);
    if (!args.d_x) return op->tape->error;
    return ops->batchnorm_backward(op->device, &args);
}

DTRAIN__OP(batch_norm, batch_norm, DTRAIN_OP_READS_INPUTS, DTRAIN_RECOMPUTE_LAYERNORM, 0, 0, false)

DTRAIN_API dtrain_tensor *dtrain_batch_norm(dtrain_tape *tape, dtrain_tensor *x,
                                            dtrain_param *weight, dtrain_param *bias,
                                            const dtrain_batch_norm_desc *desc)
{
    dtrain_param *params[4] = {weight, bias, NULL, NULL};
    dtrain_tensor *inputs[2] = {x, NULL};
    dtrain__batch_norm args;
    memset(&args, 0, sizeof args);
    (void)dtrain__tape_take(tape, DTRAIN__ABI_batch_norm_desc, desc, &args.desc);
    inputs[1] = args.desc.residual;
    params[2] = args.desc.running_mean;
    params[3] = args.desc.running_var;
    const bool running = args.desc.running_mean != NULL;
    if (tape && running != (args.desc.running_var != NULL)) /* the error sticks */
        dtrain__tape_stick(tape, dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                                             "dtrain_batch_norm: running_mean and running_var are "
                                             "given together or not at all"));
    return dtrain_tape_apply(tape, &dtrain__batch_norm_op, inputs, args.desc.residual ? 2 : 1,
                             params, running ? 4 : 2, &args, sizeof args);
}
