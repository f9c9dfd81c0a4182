/* Cross-entropy
 *
 * With s = smoothing:
 *
 *     d_logits = (softmax(logits) - (1 - s) onehot(target) - s / classes) upstream / valid targets
 *
 * and 0 in padding.
 *
 * Logits are by far the largest value of a language model, (rows, vocabulary). If they have no
 * other use and their producer does not read them in backward, d_logits overwrites them: there is
 * no second buffer of this size.
 *
 * Over a tensor axis (parallel/mesh.h) a classifier cut by rows makes columns of logits, which stay
 * on their ranks (Shoeybi et al., "Megatron-LM", 2019, section 3). Each rank, for each row:
 *
 *     1. maximum, sum of e^(x - maximum), target's logit or 0, with smoothing sum of the logits
 *     2. all-reduce of the maxima; rescale this rank's sum to the maximum of the whole row
 *     3. one all-reduce of the sums, the targets' logits and the sums of logits
 *     4. loss and log-sum-exp of the whole row, the same on every rank
 *
 * Ranks exchange three floats a row, four with smoothing, and nothing in backward, which makes
 * softmax from the log-sum-exp. A rank can have only padding. If logits are cut by rows, each rank
 * computes the losses of its rows, which are then summed. */

#include "core/platform_internal.h"
#include "comm/comm.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

typedef struct dtrain__cross_entropy {
    dtrain_cross_entropy_args forward;
    float *whole_max; /* (rows), for logits cut by columns; or NULL */
    float factor;     /* 1 / number of targets that are not ignored; 1 in a recorded pass */
    const float *device_factor; /* this number on the device, in a recorded pass; or NULL */
} dtrain__cross_entropy;

static dtrain_result dtrain__cross_entropy_prepare(dtrain_op *op)
{
    dtrain__cross_entropy *loss = (dtrain__cross_entropy *)op->args;
    dtrain_cross_entropy_args *args = &loss->forward;
    const dtrain_tensor *logits = op->inputs[0], *targets = op->inputs[1];
    const dtrain__share *part = dtrain__tensor_share(logits);
    const bool columns = logits->placement == DTRAIN_PLACEMENT_COLUMNS;
    const int64_t n = logits->shape[logits->ndim - 1], rows = logits->count / n, shape[1] = {1};
    const int64_t all_rows = logits->placement == DTRAIN_PLACEMENT_ROWS ? part->whole : rows;
    const int64_t whole_n = columns ? part->whole : n;
    const dtrain__tape_tensor *input = (const dtrain__tape_tensor *)targets;
    if (targets->count != all_rows)
        return dtrain__refuse(op, "expected a target for each of the %lld rows of the logits",
                              (long long)all_rows);
    if (args->classes < 0 || args->classes > whole_n)
        return dtrain__refuse(op, "%lld classes, and the logits have %lld columns",
                              (long long)args->classes, (long long)whole_n);
    if (!(args->smoothing >= 0 && args->smoothing <= 1)) /* so written that NaN is refused */
        return dtrain__refuse(op, "smoothing is %g, not in [0, 1]", (double)args->smoothing);
    args->rows = rows;
    args->n = n;
    args->logits = op->input_data[0];
    args->dtype = (dtrain_dtype)logits->dtype;
    args->targets = (const int32_t *)op->input_data[1];
    args->loss = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, rows);
    args->lse = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, rows);
    args->lse_rest = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, rows);
    if (logits->placement == DTRAIN_PLACEMENT_ROWS) args->targets += part->first[0];
    if (columns) { /* whole numbers become this rank's */
        if (part->runs > 1)
            return dtrain__refuse(op, "expected columns cut in one component: the vocabulary");
        args->whole_classes = args->classes ? args->classes : part->whole;
        args->first_class = part->first[0];
        args->classes = args->whole_classes - args->first_class;
        if (args->classes > n) args->classes = n;
        if (args->classes <= 0) args->classes = -1; /* only padding */
        loss->whole_max = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, rows);
        args->parts =
            (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, (args->smoothing > 0 ? 4 : 3) * rows);
    }
    loss->device_factor = input->samples.device_valid;
    loss->factor = loss->device_factor ? 1 : input->samples.valid[0];
    dtrain__tape_tensor *made =
        (dtrain__tape_tensor *)dtrain_op_output(op, DTRAIN_DTYPE_F32, 1, shape);
    if (!made) return op->tape->error;
    made->samples = input->samples;
    dtrain__place_as(&made->tensor, DTRAIN_PLACEMENT_WHOLE, NULL);
    return DTRAIN_OK;
}

static dtrain_result dtrain__cross_entropy_forward(dtrain_op *op)
{
    const dtrain__cross_entropy *loss = (const dtrain__cross_entropy *)op->args;
    const dtrain_device_ops *ops = op->device->ops;
    dtrain_cross_entropy_args args = loss->forward;
    const int64_t rows = args.rows;
    float *mean = (float *)op->output_data[0];
    if (!args.parts) {
        DTRAIN__TRY(ops->cross_entropy(op->device, &args));
    } else { /* steps 1 to 4 above */
        dtrain_work *work = NULL;
        args.loss = NULL;
        args.whole_max = loss->whole_max;
        DTRAIN__TRY(ops->cross_entropy(op->device, &args));
        DTRAIN__TRY(dtrain_all_reduce(op->tape->groups.tensor, args.parts, loss->whole_max,
                                      (size_t)rows, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX, &work));
        DTRAIN__TRY(dtrain_work_wait(work));
        DTRAIN__TRY(ops->cross_entropy_finish(op->device, &args));
        DTRAIN__TRY(dtrain__sum_values(op, args.parts + rows, (args.smoothing > 0 ? 3 : 2) * rows,
                                       DTRAIN_DTYPE_F32, NULL));
        args.loss = loss->forward.loss;
        DTRAIN__TRY(ops->cross_entropy_finish(op->device, &args));
    }
    DTRAIN__TRY(dtrain__sum_to(op->device, mean, args.loss, DTRAIN_DTYPE_F32, rows,
                               (double)loss->factor, loss->device_factor));
    if (op->inputs[0]->placement != DTRAIN_PLACEMENT_ROWS) return DTRAIN_OK;
    return dtrain__sum_values(op, mean, 1, DTRAIN_DTYPE_F32, NULL);
}

static dtrain_result dtrain__cross_entropy_backward(dtrain_op *op)
{
    const dtrain__cross_entropy *loss = (const dtrain__cross_entropy *)op->args;
    dtrain_tensor *logits = op->inputs[0];
    if (logits->producer && logits->pending_uses == 1 &&
        !(logits->producer->op.reads & DTRAIN_OP_READS_OUTPUTS)) {
        logits->grad = logits->data;
    } else if (!dtrain_op_input_grad(op, 0, NULL)) {
        return op->tape->error;
    }
    dtrain_cross_entropy_args args = loss->forward;
    args.parts = NULL;
    args.scale = loss->factor;
    args.d_logits = logits->grad;
    args.upstream = (const float *)op->outputs[0]->grad;
    if (loss->device_factor) { /* upstream * factor, as a sum of one element: rounded once */
        void *product = dtrain__take_data(op->tape, NULL, 1, DTRAIN_DTYPE_F32);
        DTRAIN__TRY(op->tape->error);
        DTRAIN__TRY(dtrain__sum_to(op->device, product, args.upstream, DTRAIN_DTYPE_F32, 1, 1,
                                   loss->device_factor));
        args.upstream = (const float *)product;
    }
    return op->device->ops->cross_entropy_backward(op->device, &args);
}

DTRAIN__OP(cross_entropy, cross_entropy, DTRAIN_OP_READS_INPUTS, 0, 2, DTRAIN__OP_PLACES, false)

DTRAIN_API dtrain_tensor *dtrain_cross_entropy(dtrain_tape *tape, dtrain_tensor *logits,
                                               dtrain_tensor *targets, int64_t classes,
                                               float smoothing)
{
    dtrain_tensor *const inputs[2] = {logits, targets};
    dtrain__cross_entropy args;
    memset(&args, 0, sizeof args);
    args.forward.classes = classes;
    args.forward.smoothing = smoothing;
    return dtrain_tape_apply(tape, &dtrain__cross_entropy_op, inputs, 2, NULL, 0, &args,
                             sizeof args);
}
