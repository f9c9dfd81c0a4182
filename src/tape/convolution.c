/* Convolution and pooling
 *
 * Images are (batch, height, width, channels): a pixel's channels are neighbours in memory, so
 * linear layers, norms and sums take an image as a matrix of pixels. A convolution keeps x until
 * its backward, maximum pooling the index of each maximum, average pooling nothing. */

#include "core/platform_internal.h"
#include "tape/ops.h"
#include "tape/tape_internal.h"

/* Fill in sizes of images and counts of windows. */
static dtrain_result dtrain__windows_over(const dtrain_op *op, dtrain_windows2d *w)
{
    static const char *const names[2] = {"height", "width"};
    const dtrain_tensor *x = op->inputs[0];
    int64_t count[2];
    if (x->ndim != 4) return dtrain__refuse(op, "expected (batch, height, width, channels)");
    for (int axis = 0; axis < 2; axis++) {
        const int64_t padded = x->shape[1 + axis] + 2 * w->padding[axis];
        const int64_t reach = (w->kernel[axis] - 1) * w->dilation[axis] + 1;
        if (w->stride[axis] < 1 || w->dilation[axis] < 1 || w->padding[axis] < 0)
            return dtrain__refuse(op,
                                  "%s has stride %lld, dilation %lld, padding %lld; expected 1 or "
                                  "more of the first two and 0 or more of the last",
                                  names[axis], (long long)w->stride[axis],
                                  (long long)w->dilation[axis], (long long)w->padding[axis]);
        if (reach > padded)
            return dtrain__refuse(op, "a window reaches over %lld pixels of a padded %s of %lld",
                                  (long long)reach, names[axis], (long long)padded);
        count[axis] = (padded - reach) / w->stride[axis] + 1;
    }
    w->batch = x->shape[0];
    w->height = x->shape[1];
    w->width = x->shape[2];
    w->channels = x->shape[3];
    w->out_height = count[0];
    w->out_width = count[1];
    return DTRAIN_OK;
}

/* ---- Convolution */

static dtrain_result dtrain__conv2d_prepare(dtrain_op *op)
{
    dtrain_conv2d_args *args = (dtrain_conv2d_args *)op->args;
    dtrain_windows2d *w = &args->windows;
    const dtrain_tensor *x = op->inputs[0];
    const int64_t *weight = op->param_shape[0];
    for (int axis = 0; axis < 2; axis++) w->kernel[axis] = weight[2 + axis];
    if (dtrain__max(weight[2], weight[3]) > DTRAIN_CONV2D_KERNEL)
        return dtrain__refuse(op, "expected a kernel of at most %d x %d", DTRAIN_CONV2D_KERNEL,
                              DTRAIN_CONV2D_KERNEL);
    DTRAIN__TRY(dtrain__windows_over(op, w));
    if (weight[3] < 1 || args->groups < 1 || x->shape[3] % args->groups ||
        weight[0] % args->groups || x->shape[3] / args->groups != weight[1])
        return dtrain__refuse(op,
                              "in %lld groups, expected the weight as (out_channels, in_channels "
                              "/ groups, kernel_height, kernel_width)",
                              (long long)args->groups);
    if (op->param_count > 1) DTRAIN__TRY(dtrain_op_check_param(op, 1, weight[0], 0));
    const int64_t shape[4] = {w->batch, w->out_height, w->out_width, weight[0]};
    dtrain_op_output(op, op->cast, 4, shape);
    args->out_channels = weight[0];
    args->x = op->input_data[0];
    args->weight = op->param_data[0];
    args->bias = (const float *)op->param_data[1];
    args->y = op->output_data[0];
    args->dtype = op->cast;
    return DTRAIN_OK;
}

/* Count a product of a tap and a weight for each output. */
static double dtrain__conv2d_flops(const dtrain_conv2d_args *args)
{
    const dtrain_windows2d *w = &args->windows;
    const double taps =
        (double)(w->kernel[0] * w->kernel[1]) * (double)(w->channels / args->groups);
    const double windows = (double)w->batch * (double)w->out_height * (double)w->out_width;
    return 2.0 * windows * taps * (double)args->out_channels;
}

static dtrain_result dtrain__conv2d_forward(dtrain_op *op)
{
    const dtrain_conv2d_args *args = (const dtrain_conv2d_args *)op->args;
    op->tape->flops += dtrain__conv2d_flops(args);
    return op->device->ops->conv2d(op->device, args);
}

static dtrain_result dtrain__conv2d_backward(dtrain_op *op)
{
    dtrain_conv2d_args args = *(const dtrain_conv2d_args *)op->args;
    args.d_y = op->outputs[0]->grad;
    args.x_dtype = (dtrain_dtype)op->inputs[0]->dtype;
    args.d_weight = dtrain_op_param_grad(op, 0, &args.accumulate_weight);
    args.d_bias = dtrain_op_param_grad(op, 1, &args.accumulate_bias);
    args.d_x = dtrain_op_input_grad(op, 0, &args.accumulate_x);
    DTRAIN__TRY(op->tape->error);
    const int products = (args.d_x != NULL) + (args.d_weight != NULL);
    op->tape->flops += products * dtrain__conv2d_flops(&args);
    return op->device->ops->conv2d_backward(op->device, &args);
}

DTRAIN__OP(conv2d, conv2d, DTRAIN_OP_READS_INPUTS | DTRAIN__OP_COUNTS, DTRAIN_RECOMPUTE_LINEAR, 0,
           0, true)

DTRAIN_API dtrain_tensor *dtrain_conv2d(dtrain_tape *tape, dtrain_tensor *x, dtrain_param *weight,
                                        dtrain_param *bias, const dtrain_conv2d_desc *desc)
{
    dtrain_param *const params[2] = {weight, bias};
    dtrain_conv2d_desc own;
    dtrain_conv2d_args args;
    memset(&args, 0, sizeof args);
    desc = (const dtrain_conv2d_desc *)dtrain__tape_take(tape, DTRAIN__ABI_conv2d_desc, desc, &own);
    for (int axis = 0; axis < 2; axis++) {
        args.windows.stride[axis] = desc && desc->stride[axis] ? desc->stride[axis] : 1;
        args.windows.dilation[axis] = desc && desc->dilation[axis] ? desc->dilation[axis] : 1;
        args.windows.padding[axis] = desc ? desc->padding[axis] : 0;
    }
    args.groups = desc && desc->groups ? desc->groups : 1;
    return dtrain_tape_apply(tape, &dtrain__conv2d_op, &x, 1, params, bias ? 2 : 1, &args,
                             sizeof args);
}

/* ---- Pooling
 *
 * Pooling of a whole image has one window, and an output without height and width. */

typedef struct dtrain__pool2d {
    dtrain_pool2d_args forward;
    dtrain_pool2d_desc desc;
} dtrain__pool2d;

static dtrain_result dtrain__pool2d_prepare(dtrain_op *op)
{
    dtrain__pool2d *pool = (dtrain__pool2d *)op->args;
    dtrain_pool2d_args *args = &pool->forward;
    const dtrain_pool2d_desc *desc = &pool->desc;
    dtrain_windows2d *w = &args->windows;
    const dtrain_tensor *x = op->inputs[0];
    const bool whole = desc->kernel[0] == 0 && desc->kernel[1] == 0;
    if (desc->kind != DTRAIN_POOL_MAX && desc->kind != DTRAIN_POOL_AVERAGE)
        return dtrain__refuse(op, "kind is %u, not a dtrain_pool_kind", desc->kind);
    for (int axis = 0; axis < 2; axis++) {
        w->kernel[axis] = whole && x->ndim == 4 ? x->shape[1 + axis] : desc->kernel[axis];
        w->stride[axis] = desc->stride[axis] && !whole ? desc->stride[axis] : w->kernel[axis];
        w->padding[axis] = desc->padding[axis];
        w->dilation[axis] = 1;
        if ((desc->kernel[axis] < 1 && !whole) || 2 * desc->padding[axis] > desc->kernel[axis])
            return dtrain__refuse(op,
                                  "axis %d has a kernel of %lld and padding of %lld; expected 1 "
                                  "or more, or 0 in both axes, and half of the kernel at most",
                                  axis, (long long)desc->kernel[axis],
                                  (long long)desc->padding[axis]);
    }
    DTRAIN__TRY(dtrain__windows_over(op, w));
    const int64_t shape[4] = {w->batch, w->out_height, w->out_width, w->channels};
    const int64_t flat[2] = {w->batch, w->channels};
    dtrain_tensor *y =
        dtrain_op_output(op, (dtrain_dtype)x->dtype, whole ? 2 : 4, whole ? flat : shape);
    if (!y) return op->tape->error;
    args->maximum = desc->kind == DTRAIN_POOL_MAX;
    args->x = op->input_data[0];
    args->y = op->output_data[0];
    args->dtype = (dtrain_dtype)x->dtype;
    if (args->maximum && op->needs_grad)
        args->index = (int32_t *)dtrain_op_save(op, DTRAIN_DTYPE_I32, y->count);
    return DTRAIN_OK;
}

DTRAIN__OP_FORWARD(pool2d)

static dtrain_result dtrain__pool2d_backward(dtrain_op *op)
{
    dtrain_pool2d_args args = ((const dtrain__pool2d *)op->args)->forward;
    args.d_y = op->outputs[0]->grad;
    args.d_x = dtrain_op_input_grad(op, 0, &args.accumulate);
    if (!args.d_x) return op->tape->error;
    return op->device->ops->pool2d_backward(op->device, &args);
}

DTRAIN__OP(pool2d, pool2d, 0, DTRAIN_RECOMPUTE_ELEMENTWISE, 0, 0, false)

DTRAIN_API dtrain_tensor *dtrain_pool2d(dtrain_tape *tape, dtrain_tensor *x,
                                        const dtrain_pool2d_desc *desc)
{
    dtrain__pool2d args;
    memset(&args, 0, sizeof args);
    (void)dtrain__tape_take(tape, DTRAIN__ABI_pool2d_desc, desc,
                            &args.desc); /* NULL: prepare refuses the kind */
    return dtrain_tape_apply(tape, &dtrain__pool2d_op, &x, 1, NULL, 0, &args, sizeof args);
}
