/* Batch normalisation
 *
 * With d = d_y act', h = (x - mean) rstd and rows counted over all ranks of the batch:
 *
 *     d_weight += sum of d h     d_bias += sum of d     d_residual += d
 *     d_x += weight rstd (d - (sum of d + h sum of d h) / rows)
 *
 *     forward     moments --(all-gather of 1 + 2 n)--> statistics --> y
 *     backward    sums    --(all-reduce of 2 n)------> d_x
 *
 * Parts are put together in the order of the ranks, so all of them have the same mean. Gradients of
 * weight and bias stay this rank's share: the strategy averages them like others. What is exchanged
 * is exchanged once: activation checkpointing makes y again from the mean that is there. */

#include "core/platform_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

typedef struct dtrain__batch_norm {
    dtrain_batch_norm_desc desc;
    dtrain_batchnorm_moments_args moments;
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

/* Take memory that activation checkpointing does not drop. */
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
    layer->moments.rows = forward->rows;
    layer->moments.n = n;
    layer->moments.x = op->input_data[0];
    layer->moments.part = ranks > 1 ? dtrain__batch_norm_floats(op, part) : all;
    layer->moments.dtype = (dtrain_dtype)x->dtype;

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
    if (forward->activation != DTRAIN_ACTIVATION_NONE) op->reads |= DTRAIN_OP_READS_OUTPUTS;
    return DTRAIN_OK;
}

/* Compute mean and rstd, in the first forward only, and y. */
static dtrain_result dtrain__batch_norm_forward(dtrain_op *op)
{
    dtrain__batch_norm *layer = (dtrain__batch_norm *)op->args;
    const dtrain_device_ops *ops = op->device->ops;
    const dtrain_batchnorm_moments_args *moments = &layer->moments;
    const int parts = layer->known ? 0 : (int)layer->statistics.parts;
    if (parts) DTRAIN__TRY(ops->batchnorm_moments(op->device, moments));
    if (parts > 1) {
        dtrain_work *work = NULL;
        if (op->tape->strategy)
            dtrain__notes_of(op->tape->strategy)->batch_comm = layer->desc.comm->number;
        DTRAIN__TRY(dtrain_all_gather(layer->desc.comm, moments->part,
                                      (void *)(uintptr_t)layer->statistics.all,
                                      (size_t)(1 + 2 * moments->n), DTRAIN_DTYPE_F32, &work));
        DTRAIN__TRY(dtrain_work_wait(work));
    }
    if (!layer->known) DTRAIN__TRY(ops->batchnorm_statistics(op->device, &layer->statistics));
    layer->known = true;
    return ops->batchnorm(op->device, &layer->forward);
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
    for (uint32_t i = 0; i < 2; i++) { /* this rank's share */
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
