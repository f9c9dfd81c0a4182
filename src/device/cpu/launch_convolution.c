/* Launchers of convolution and pooling
 *
 * A convolution is three products with windows (gemm_internal.h) in place of a matrix. With pixels
 * of the output as rows, taps and channels of a group as k:
 *
 *     forward            y (pixels, out) = windows of x (pixels, taps in) weight (taps in, out)
 *     weight gradient    (taps in, out) = windows of x ^T (taps in, pixels) d_y (pixels, out)
 *     input gradient     d_x (pixels, in) = windows of d_y (pixels, taps out) weight (taps out, in)
 *
 * A tap of the last is d_y at (pixel + padding - tap dilation) / stride, if that is whole. Pixels
 * of x that leave the same remainder modulo the stride have the same taps: each such class is a
 * product of its own, with the taps that it has and with rows of C that are every stride-th pixel.
 * So no product is taken with a tap that is not there.
 *
 * Each group is a product of its own. Weights are packed once a call, (taps, in, out) or (taps,
 * out, in) in fp32, into the beginning of scratch. 3 x 3 taps with stride 1 go by patches, where
 * there are channels enough: launch_winograd.c. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/convolution_internal.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/gemm_internal.h"
#include "device/cpu/kernels_internal.h"
#include "device/device.h"

static size_t dtrain__conv_bytes(dtrain_dtype dtype) { return dtype == DTRAIN_DTYPE_F32 ? 4 : 2; }

static dtrain_result dtrain__check_windows(const char *call, const dtrain_windows2d *w,
                                           dtrain_dtype dtype)
{
    bool fits = w->batch >= 0 && w->height > 0 && w->width > 0 && w->channels > 0;
    const int64_t size[2] = {w->height, w->width}, count[2] = {w->out_height, w->out_width};
    for (int axis = 0; axis < 2 && fits; axis++) {
        fits = w->kernel[axis] > 0 && w->stride[axis] > 0 && w->dilation[axis] > 0 &&
               w->padding[axis] >= 0 && count[axis] > 0;
        fits = fits &&
               (count[axis] - 1) * w->stride[axis] + (w->kernel[axis] - 1) * w->dilation[axis] <
                   size[axis] + 2 * w->padding[axis];
    }
    if (!fits)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "%s: %lld x %lld windows of %lld x %lld taps do not fit images of %lld x %lld", call,
            (long long)w->out_height, (long long)w->out_width, (long long)w->kernel[0],
            (long long)w->kernel[1], (long long)w->height, (long long)w->width);
    if (dtype > DTRAIN_DTYPE_F16)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: activations of type %s: expected f32, bf16 or f16", call,
                           dtrain_dtype_name(dtype));
    return DTRAIN_OK;
}

static dtrain_result dtrain__check_conv(const char *call, const dtrain_windows2d *w, int64_t out,
                                        int64_t groups, dtrain_dtype dtype)
{
    DTRAIN__TRY(dtrain__check_windows(call, w, dtype));
    if (groups < 1 || out < 1 || w->channels % groups || out % groups)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: %lld and %lld channels cannot be cut into %lld groups", call,
                           (long long)w->channels, (long long)out, (long long)groups);
    if (w->kernel[0] > DTRAIN_CONV2D_KERNEL || w->kernel[1] > DTRAIN_CONV2D_KERNEL)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: %lld x %lld taps, expected at most %d",
                           call, (long long)w->kernel[0], (long long)w->kernel[1],
                           DTRAIN_CONV2D_KERNEL);
    return DTRAIN_OK;
}

static dtrain__conv dtrain__conv_make(dtrain_device *device, const dtrain_windows2d *w,
                                      int64_t out_channels, int64_t groups, dtrain_dtype dtype)
{
    dtrain__conv conv;
    memset(&conv, 0, sizeof conv);
    conv.cpu = (dtrain__cpu *)device->state;
    conv.windows = *w;
    conv.in_all = w->channels;
    conv.out_all = out_channels;
    conv.in = w->channels / groups;
    conv.out = out_channels / groups;
    conv.taps = w->kernel[0] * w->kernel[1];
    conv.pixels = w->batch * w->out_height * w->out_width;
    conv.dtype = dtype;
    return conv;
}

/* Go on to the next group. */
static void dtrain__conv_next(dtrain__conv *conv)
{
    const size_t bytes = dtrain__conv_bytes(conv->dtype);
    conv->group++;
    if (conv->x) conv->x += bytes * (size_t)conv->in;
    if (conv->d_y) conv->d_y += bytes * (size_t)conv->out;
    if (conv->weight) conv->weight += bytes * (size_t)(conv->in * conv->out * conv->taps);
    if (conv->bias) conv->bias += conv->out;
}

/* Return how many parts the pixels of a weight gradient are cut into: each has at least 1024, and
 * their gradients together at most 4 MiB or a single one. */
static int64_t dtrain__conv_parts(const dtrain__conv *conv)
{
    const int64_t room = (1 << 20) / (conv->taps * conv->in * conv->out);
    int64_t parts = conv->pixels / 1024;
    if (parts > 32) parts = 32;
    if (parts > room) parts = room;
    if (parts < 2) return 1;
    const int64_t part = (conv->pixels + parts - 1) / parts;
    return (conv->pixels + part - 1) / part;
}

/* Take scratch for the order of taps, `floats` of packed weights and what a product needs, or for
 * patches, all at once: growing it later would lose what is there. */
static dtrain_result dtrain__conv_scratch(dtrain__conv *conv, int64_t floats, int64_t *reserve)
{
    const int64_t order = dtrain__multiple(2 * conv->taps, DTRAIN__LINE);
    float *scratch;
    *reserve = order + dtrain__multiple(floats, DTRAIN__LINE);
    int64_t most = *reserve + dtrain__gemm_slot(true) * conv->cpu->thread_count;
    conv->patches = dtrain__winograd_fits(conv);
    const int64_t floats_of_patches = conv->patches ? dtrain__winograd_floats(conv) : 0;
    if (most < order + floats_of_patches) most = order + floats_of_patches;
    DTRAIN__TRY(dtrain__cpu_scratch(conv->cpu, most, &scratch));
    conv->order = (int32_t *)(void *)scratch;
    conv->packed = scratch + order;
    for (int64_t t = 0; t < conv->taps; t++) conv->order[t] = (int32_t)t;
    return DTRAIN_OK;
}

/* Describe a weight (out, in, taps) as (outer, inner): (in, out), or (out, in). */
static dtrain__conv_weight dtrain__conv_weights(const dtrain__conv *conv, bool out_first)
{
    dtrain__conv_weight weight;
    memset(&weight, 0, sizeof weight);
    weight.weight = conv->weight;
    weight.packed = conv->packed;
    weight.dtype = conv->dtype;
    weight.taps = conv->taps;
    weight.order = conv->order;
    weight.outer = out_first ? conv->out : conv->in;
    weight.inner = out_first ? conv->in : conv->out;
    weight.outer_stride = conv->taps * (out_first ? conv->in : 1);
    weight.inner_stride = conv->taps * (out_first ? 1 : conv->in);
    return weight;
}

static dtrain_result dtrain__conv_pack(const dtrain__conv *conv, const dtrain__conv_weight *weight)
{
    dtrain__job job = dtrain__job_make(weight, weight->outer, 1, weight->dtype);
    return dtrain__job_run(conv->cpu, &job, conv->cpu->kernels->conv_weight,
                           weight->taps * weight->outer * weight->inner);
}

/* Choose between tiles: the narrow one where the wide one would waste more than an eighth. */
static const dtrain__isa *dtrain__conv_isa(const dtrain__isa *wide, const dtrain__isa *narrow,
                                           int64_t n)
{
    const int64_t in_wide = dtrain__multiple(n, wide->nr),
                  in_narrow = dtrain__multiple(n, narrow->nr);
    return 8 * in_wide > 9 * in_narrow ? narrow : wide;
}

/* Return whether the taps of a row are neighbours in memory, where they are inside. */
static bool dtrain__windows_joined(const dtrain__windows *w)
{
    bool joined = w->depth == w->channels;
    for (int64_t t = 1; t < w->tap_columns; t++) joined = joined && w->x[t] == w->x[t - 1] + 1;
    return joined;
}

/* Describe the windows of a convolution over x. */
static dtrain__windows dtrain__conv_windows(const dtrain__conv *conv)
{
    const dtrain_windows2d *from = &conv->windows;
    dtrain__windows w;
    memset(&w, 0, sizeof w);
    w.height = from->height;
    w.width = from->width;
    w.channels = conv->in_all;
    w.depth = conv->in;
    w.rows = from->out_height;
    w.columns = from->out_width;
    w.stride[0] = from->stride[0];
    w.stride[1] = from->stride[1];
    w.tap_rows = from->kernel[0];
    w.tap_columns = from->kernel[1];
    for (int64_t t = 0; t < from->kernel[0]; t++)
        w.y[t] = (int32_t)(t * from->dilation[0] - from->padding[0]);
    for (int64_t t = 0; t < from->kernel[1]; t++)
        w.x[t] = (int32_t)(t * from->dilation[1] - from->padding[1]);
    w.joined = dtrain__windows_joined(&w);
    return w;
}

/* Return whether windows are the pixels themselves: then they are a matrix. */
static bool dtrain__windows_plain(const dtrain__windows *w)
{
    return w->tap_rows == 1 && w->tap_columns == 1 && w->y[0] == 0 && w->x[0] == 0 &&
           w->stride[0] == 1 && w->stride[1] == 1 && w->rows == w->height && w->columns == w->width;
}

static dtrain__operand dtrain__conv_operand(const void *data, dtrain_dtype dtype, int64_t ld,
                                            const dtrain__windows *windows)
{
    dtrain__operand operand;
    memset(&operand, 0, sizeof operand);
    operand.data = data;
    operand.dtype = dtype;
    operand.ld = ld;
    operand.windows = windows && !dtrain__windows_plain(windows) ? windows : NULL;
    return operand;
}

static dtrain_result dtrain__conv_forward(const dtrain__conv *conv, int64_t reserve)
{
    const dtrain__conv_tiles *tiles = conv->cpu->kernels->convolutions;
    const dtrain__windows windows = dtrain__conv_windows(conv);
    const dtrain__conv_weight weight = dtrain__conv_weights(conv, false);
    dtrain_gemm_args args;
    dtrain__gemm_call product;
    if (conv->patches) return dtrain__winograd_forward(conv, &weight);
    DTRAIN__TRY(dtrain__conv_pack(conv, &weight));
    memset(&args, 0, sizeof args);
    args.m = conv->pixels;
    args.n = conv->out;
    args.k = conv->taps * conv->in;
    args.alpha = 1;
    args.c = (void *)(uintptr_t)conv->d_y;
    args.ldc = conv->out_all;
    args.c_dtype = conv->dtype;
    args.bias = conv->bias;
    memset(&product, 0, sizeof product);
    product.args = &args;
    product.isa = dtrain__conv_isa(&tiles->rows, &tiles->narrow_rows, args.n);
    product.a = dtrain__conv_operand(conv->x, conv->dtype, conv->in_all, &windows);
    product.a.along_k = 1;
    product.b = dtrain__conv_operand(conv->packed, DTRAIN_DTYPE_F32, conv->out, NULL);
    product.parts = 1;
    product.reserve = reserve;
    return dtrain__gemm_run(conv->cpu, &product);
}

static dtrain_result dtrain__conv_weight_grad(const dtrain__conv *conv, int64_t reserve,
                                              float *d_weight, bool accumulate)
{
    const dtrain__conv_tiles *tiles = conv->cpu->kernels->convolutions;
    const dtrain__windows windows = dtrain__conv_windows(conv);
    dtrain__conv_weight weight = dtrain__conv_weights(conv, false);
    dtrain_gemm_args args;
    dtrain__gemm_call product;
    if (conv->patches) return dtrain__winograd_weight_grad(conv, weight, d_weight, accumulate);
    memset(&args, 0, sizeof args);
    args.m = conv->taps * conv->in;
    args.n = args.ldc = conv->out;
    args.k = conv->pixels;
    args.alpha = 1;
    args.c = conv->packed;
    args.c_dtype = DTRAIN_DTYPE_F32;
    memset(&product, 0, sizeof product);
    product.args = &args;
    product.isa = dtrain__conv_isa(&tiles->columns, &tiles->narrow_columns, args.n);
    product.a = dtrain__conv_operand(conv->x, conv->dtype, conv->in_all, &windows);
    product.b = dtrain__conv_operand(conv->d_y, conv->dtype, conv->out_all, NULL);
    product.parts = dtrain__conv_parts(conv);
    product.reserve = reserve;
    DTRAIN__TRY(dtrain__gemm_run(conv->cpu, &product));
    weight.d_weight = d_weight + conv->group * conv->in * conv->out * conv->taps;
    weight.parts = product.parts;
    weight.accumulate = accumulate;
    dtrain__job job = dtrain__job_make(&weight, weight.outer, 1, DTRAIN_DTYPE_F32);
    return dtrain__job_run(conv->cpu, &job, conv->cpu->kernels->conv_weight_sum,
                           weight.parts * args.m * args.n);
}

/* List the taps of an axis that pixels with remainder `rest` modulo the stride have, and for each
 * where its pixel of d_y is; return how many. The window of the class's pixel i is at i. The last
 * tap comes first: its pixel does. */
static int64_t dtrain__class_taps(const dtrain_windows2d *w, int axis, int64_t rest, int32_t *taps,
                                  int32_t *offset)
{
    int64_t count = 0;
    for (int64_t t = w->kernel[axis] - 1; t >= 0; t--) {
        const int64_t at = rest + w->padding[axis] - t * w->dilation[axis];
        if (at % w->stride[axis]) continue;
        taps[count] = (int32_t)t;
        offset[count++] = (int32_t)(at / w->stride[axis]);
    }
    return count;
}

/* Make the input gradient of one class of pixels. */
static dtrain_result dtrain__conv_class(const dtrain__conv *conv, int64_t reserve,
                                        const int64_t rest[2], void *d_x, dtrain_dtype x_dtype,
                                        bool accumulate)
{
    const dtrain__conv_tiles *tiles = conv->cpu->kernels->convolutions;
    const dtrain_windows2d *from = &conv->windows;
    const size_t bytes = dtrain__conv_bytes(x_dtype);
    int32_t taps[2][DTRAIN_CONV2D_KERNEL];
    dtrain__windows windows = dtrain__conv_windows(conv), c_rows = windows;
    dtrain_gemm_args args;
    dtrain__gemm_call product;
    c_rows.rows = (from->height - rest[0] + from->stride[0] - 1) / from->stride[0];
    c_rows.columns = (from->width - rest[1] + from->stride[1] - 1) / from->stride[1];
    c_rows.y[0] = (int32_t)rest[0];
    c_rows.x[0] = (int32_t)rest[1];
    windows.height = from->out_height;
    windows.width = from->out_width;
    windows.channels = conv->out_all;
    windows.depth = conv->out;
    windows.rows = c_rows.rows;
    windows.columns = c_rows.columns;
    windows.stride[0] = windows.stride[1] = 1;
    windows.tap_rows = dtrain__class_taps(from, 0, rest[0], taps[0], windows.y);
    windows.tap_columns = dtrain__class_taps(from, 1, rest[1], taps[1], windows.x);
    windows.joined = dtrain__windows_joined(&windows);

    dtrain__conv_weight weight = dtrain__conv_weights(conv, true);
    weight.taps = windows.tap_rows * windows.tap_columns;
    weight.order = conv->order + conv->taps;
    for (int64_t t = 0; t < weight.taps; t++)
        conv->order[conv->taps + t] = (int32_t)(taps[0][t / windows.tap_columns] * from->kernel[1] +
                                                taps[1][t % windows.tap_columns]);
    DTRAIN__TRY(dtrain__conv_pack(conv, &weight));
    memset(&args, 0, sizeof args);
    args.m = from->batch * c_rows.rows * c_rows.columns;
    args.n = conv->in;
    args.k = weight.taps * conv->out;
    args.alpha = 1;
    args.beta = accumulate ? 1.0f : 0.0f;
    args.c = (char *)d_x + bytes * (size_t)(conv->group * conv->in);
    args.ldc = conv->in_all;
    args.c_dtype = x_dtype;
    memset(&product, 0, sizeof product);
    product.args = &args;
    product.isa = dtrain__conv_isa(&tiles->rows, &tiles->narrow_rows, args.n);
    product.a = dtrain__conv_operand(conv->d_y, conv->dtype, conv->out_all, &windows);
    product.a.along_k = 1;
    product.b = dtrain__conv_operand(conv->packed, DTRAIN_DTYPE_F32, conv->in, NULL);
    product.c_rows = from->stride[0] * from->stride[1] > 1 ? &c_rows : NULL;
    product.parts = 1;
    product.reserve = reserve;
    return dtrain__gemm_run(conv->cpu, &product);
}

/* ---- Entries */

DTRAIN__PRIVATE dtrain_result dtrain__cpu_conv2d(dtrain_device *device,
                                                 const dtrain_conv2d_args *args)
{
    const dtrain_windows2d *w = &args->windows;
    int64_t reserve;
    DTRAIN__TRY(dtrain__check_conv("conv2d", w, args->out_channels, args->groups, args->dtype));
    dtrain__conv conv = dtrain__conv_make(device, w, args->out_channels, args->groups, args->dtype);
    conv.x = (const char *)args->x;
    conv.weight = (const char *)args->weight;
    conv.d_y = (const char *)args->y;
    conv.bias = args->bias;
    DTRAIN__TRY(dtrain__conv_scratch(&conv, conv.taps * conv.in * args->out_channels, &reserve));
    for (; conv.group < args->groups; dtrain__conv_next(&conv))
        DTRAIN__TRY(dtrain__conv_forward(&conv, reserve));
    return DTRAIN_OK;
}

static dtrain_result dtrain__group_backward(const dtrain__conv *conv, int64_t reserve,
                                            const dtrain_conv2d_backward_args *args)
{
    int64_t rest[2];
    if (args->d_weight)
        DTRAIN__TRY(
            dtrain__conv_weight_grad(conv, reserve, args->d_weight, args->accumulate_weight));
    if (!args->d_x) return DTRAIN_OK;
    if (conv->patches)
        return dtrain__winograd_input_grad(conv, dtrain__conv_weights(conv, true), args->d_x,
                                           args->x_dtype, args->accumulate_x);
    const int64_t height = conv->windows.height, width = conv->windows.width;
    for (rest[0] = 0; rest[0] < conv->windows.stride[0] && rest[0] < height; rest[0]++)
        for (rest[1] = 0; rest[1] < conv->windows.stride[1] && rest[1] < width; rest[1]++)
            DTRAIN__TRY(dtrain__conv_class(conv, reserve, rest, args->d_x, args->x_dtype,
                                           args->accumulate_x));
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_conv2d_backward(dtrain_device *device,
                                                          const dtrain_conv2d_backward_args *args)
{
    int64_t reserve;
    DTRAIN__TRY(dtrain__check_conv("conv2d_backward", &args->windows, args->out_channels,
                                   args->groups, args->dtype));
    DTRAIN__TRY(dtrain__check_windows("conv2d_backward", &args->windows,
                                      args->d_x ? args->x_dtype : args->dtype));
    dtrain__conv conv =
        dtrain__conv_make(device, &args->windows, args->out_channels, args->groups, args->dtype);
    conv.x = (const char *)args->x;
    conv.weight = (const char *)args->weight;
    conv.d_y = (const char *)args->d_y;
    if (args->d_bias)
        DTRAIN__TRY(dtrain__column_sums(device, conv.pixels, args->out_channels, args->d_y,
                                        args->dtype, args->accumulate_bias, args->d_bias));
    const int64_t weights = conv.taps * conv.in * args->out_channels;
    DTRAIN__TRY(dtrain__conv_scratch(
        &conv, weights * (args->d_weight ? dtrain__conv_parts(&conv) : 1), &reserve));
    for (; conv.group < args->groups; dtrain__conv_next(&conv))
        DTRAIN__TRY(dtrain__group_backward(&conv, reserve, args));
    return DTRAIN_OK;
}

DTRAIN__LAUNCH(pool2d, dtrain__check_windows("pool2d", &args->windows, args->dtype),
               args->windows.batch * args->windows.out_height, 1, 0,
               args->windows.batch * args->windows.height * args->windows.width *
                   args->windows.channels,
               args->dtype)
DTRAIN__LAUNCH(pool2d_backward,
               dtrain__check_windows("pool2d_backward", &args->windows, args->dtype),
               args->windows.batch * args->windows.height, 1, 0,
               args->windows.batch * args->windows.height * args->windows.width *
                   args->windows.channels,
               args->dtype)
