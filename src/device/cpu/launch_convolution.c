/* Launchers of convolution and pooling
 *
 * A convolution is three products with windows (gemm_internal.h) as one matrix. With pixels of the
 * output as rows, taps and channels of a group as k:
 *
 *     forward            y (pixels, out) = windows of x (pixels, taps in) weight (taps in, out)
 *     weight gradient    (taps in, out) = windows of x ^T (taps in, pixels) d_y (pixels, out)
 *     input gradient     d_x (pixels, in) = windows of d_y (pixels, taps out) weight (taps out, in)
 *
 * A tap of the input gradient is d_y at (pixel + padding - tap dilation) / stride, if that is an
 * integer. Pixels of x with the same remainder modulo the stride have the same taps: each such
 * class is a separate product, with the taps of the class; its rows of C are every stride-th pixel.
 * So no product multiplies a missing tap.
 *
 * Each group is a separate product. Weights are packed once a call, (taps, in, out) or (taps, out,
 * in) in fp32, at the beginning of scratch. 3 x 3 taps with stride 1 and enough channels go by
 * patches. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/gemm_internal.h"
#include "device/cpu/kernels_internal.h"
#include "device/device.h"

/* A convolution of one group. */
typedef struct dtrain__conv {
    dtrain__cpu *cpu;
    dtrain_windows2d windows;
    int64_t in, out, in_all, out_all; /* channels of the group, of all */
    int64_t taps, pixels;             /* of the output */
    int64_t group;
    const char *x, *weight, *d_y; /* from the group's first channel on; d_y is y in forward */
    const float *bias;
    dtrain_dtype dtype;
    bool patches;    /* 3 x 3 taps by patches */
    int64_t reserve; /* floats of scratch before a product's scratch */
    float *packed;   /* scratch */
    int32_t *order;  /* (2, taps) of scratch: natural order, order of a class */
} dtrain__conv;

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

/* ---- 3 x 3 taps by patches
 *
 * A patch is 6 x 6 pixels of input and 4 x 4 pixels of output: windows with a stride of four
 * (kernels/winograd.h). Threads take blocks of patches, whose size depends only on the channels: a
 * transformed block stays in L2. */

enum {
    DTRAIN__PATCH_FLOATS = 96 << 10, /* floats of a transformed block, about */
    DTRAIN__PATCH_BLOCK = 96,        /* most patches of a block */
    DTRAIN__FILTER_FLOATS = 5 << 18  /* most floats of transformed weights, or of their parts */
};

/* Return the lanes of a vector. */
static int dtrain__winograd_lanes(const dtrain__conv *conv)
{
    return conv->cpu->kernels->convolutions->narrow_rows.nr;
}

/* Return the floats of transformed weights. */
static int64_t dtrain__winograd_filters(const dtrain__conv *conv)
{
    const int lanes = dtrain__winograd_lanes(conv);
    return 36 * dtrain__multiple(conv->in, lanes) * dtrain__multiple(conv->out, lanes);
}

static int64_t dtrain__winograd_block(const dtrain__conv *conv)
{
    const int lanes = dtrain__winograd_lanes(conv);
    const int64_t channels = dtrain__multiple(conv->in, lanes) + dtrain__multiple(conv->out, lanes);
    const int64_t rows = conv->cpu->kernels->convolutions->narrow_rows.mr;
    const int64_t room = DTRAIN__PATCH_FLOATS / (36 * channels) / rows * rows;
    return room < rows ? rows : dtrain__min(room, DTRAIN__PATCH_BLOCK);
}

/* Return the floats of scratch of a thread. */
static int64_t dtrain__winograd_slot(const dtrain__conv *conv)
{
    const int lanes = dtrain__winograd_lanes(conv);
    const int64_t block = dtrain__winograd_block(conv);
    return 36 * (dtrain__winograd_place((conv->in + lanes - 1) / lanes, block, lanes) +
                 dtrain__winograd_place((conv->out + lanes - 1) / lanes, block, lanes));
}

static int64_t dtrain__winograd_patches(int64_t batch, int64_t height, int64_t width)
{
    return batch * ((height + 3) / 4) * ((width + 3) / 4);
}

/* Return the blocks of patches in a part of a weight gradient, and the number of parts. */
static int64_t dtrain__winograd_chunk(const dtrain__conv *conv, int64_t *parts)
{
    const dtrain_windows2d *w = &conv->windows;
    const int64_t patches = dtrain__winograd_patches(w->batch, w->out_height, w->out_width);
    const int64_t block = dtrain__winograd_block(conv), blocks = (patches + block - 1) / block;
    int64_t most = DTRAIN__FILTER_FLOATS / dtrain__winograd_filters(conv);
    if (most > 16) most = 16;
    const int64_t chunk = (blocks + most - 1) / most;
    *parts = (blocks + chunk - 1) / chunk;
    return chunk;
}

/* Return whether patches pay: the instance has them, they need at most two thirds of the
 * multiplications, including padded channels and pixels, and the weights fit in a cache. */
static bool dtrain__winograd_fits(const dtrain__conv *conv)
{
    const dtrain_windows2d *w = &conv->windows;
    if (!conv->cpu->kernels->winograd) return false;
    const int64_t filters = dtrain__winograd_filters(conv);
    for (int axis = 0; axis < 2; axis++)
        if (w->kernel[axis] != 3 || w->stride[axis] != 1 || w->dilation[axis] != 1) return false;
    if (conv->in < 8 || conv->out < 8 || filters > DTRAIN__FILTER_FLOATS) return false;
    const int64_t patches = dtrain__winograd_patches(1, w->out_height, w->out_width);
    return 3 * patches * filters <= 2 * 9 * w->out_height * w->out_width * conv->in * conv->out;
}

/* Return the floats of scratch of a convolution by patches. */
static int64_t dtrain__winograd_floats(const dtrain__conv *conv)
{
    int64_t parts;
    dtrain__winograd_chunk(conv, &parts);
    return parts * dtrain__winograd_filters(conv) +
           dtrain__winograd_slot(conv) * conv->cpu->thread_count;
}

/* Describe patches of `side` x `side` pixels, from pixel (first[0], first[1]) on, that cover rows x
 * columns pixels of the result. */
static void dtrain__patches_describe(dtrain__windows *w, int side, const int64_t first[2],
                                     int64_t rows, int64_t columns)
{
    w->rows = (rows + 3) / 4;
    w->columns = (columns + 3) / 4;
    w->stride[0] = w->stride[1] = 4;
    w->tap_rows = w->tap_columns = side;
    for (int t = 0; t < side; t++) {
        w->y[t] = (int32_t)(first[0] + t);
        w->x[t] = (int32_t)(first[1] + t);
    }
}

/* Describe forward or weight gradient or, with `input`, the input gradient, which reads images like
 * y and makes images like x. */
static dtrain__winograd dtrain__winograd_make(const dtrain__conv *conv, bool input)
{
    static const int64_t none[2] = {0, 0};
    const dtrain_windows2d *w = &conv->windows;
    int64_t first[2];
    dtrain__winograd a;
    memset(&a, 0, sizeof a);
    dtrain__windows *x = input ? &a.to.windows : &a.from.windows;
    dtrain__windows *y = input ? &a.from.windows : &a.to.windows;
    x->height = w->height;
    x->width = w->width;
    x->channels = conv->in_all;
    x->depth = conv->in;
    y->height = w->out_height;
    y->width = w->out_width;
    y->channels = conv->out_all;
    y->depth = conv->out;
    a.from.data = (void *)(uintptr_t)(input ? conv->d_y : conv->x);
    a.to.data = (void *)(uintptr_t)conv->d_y;
    a.from.dtype = a.to.dtype = conv->dtype;
    for (int axis = 0; axis < 2; axis++)
        first[axis] = input ? w->padding[axis] - 2 : -w->padding[axis];
    const int64_t rows = a.to.windows.height, columns = a.to.windows.width;
    dtrain__patches_describe(&a.from.windows, 6, first, rows, columns);
    dtrain__patches_describe(&a.to.windows, 4, none, rows, columns);
    a.patches = dtrain__winograd_patches(w->batch, rows, columns);
    a.block = dtrain__winograd_block(conv);
    a.filters = conv->packed;
    return a;
}

/* Transform the weights, then convolve. */
static dtrain_result dtrain__winograd_run(const dtrain__conv *conv, const dtrain__winograd *a,
                                          const dtrain__conv_weight *weight)
{
    const dtrain__kernels *kernels = conv->cpu->kernels;
    const int64_t outer = dtrain__multiple(weight->outer, dtrain__winograd_lanes(conv));
    dtrain__job job = dtrain__job_make(weight, outer, 1, weight->dtype);
    DTRAIN__TRY(
        dtrain__job_run(conv->cpu, &job, kernels->winograd_filter, dtrain__winograd_filters(conv)));
    const dtrain_dtype widest = a->to.dtype > a->from.dtype ? a->to.dtype : a->from.dtype;
    job = dtrain__job_make(a, (a->patches + a->block - 1) / a->block, 1, widest);
    job.dynamic = true;
    job.scratch = conv->packed + dtrain__winograd_filters(conv);
    job.slot = dtrain__winograd_slot(conv);
    return dtrain__job_run(conv->cpu, &job, kernels->winograd, conv->pixels * conv->in * conv->out);
}

static dtrain_result dtrain__winograd_forward(const dtrain__conv *conv,
                                              const dtrain__conv_weight *weight)
{
    dtrain__winograd a = dtrain__winograd_make(conv, false);
    a.bias = conv->bias;
    return dtrain__winograd_run(conv, &a, weight);
}

static dtrain_result dtrain__winograd_input_grad(const dtrain__conv *conv,
                                                 dtrain__conv_weight weight, void *d_x,
                                                 dtrain_dtype x_dtype, bool accumulate)
{
    static const int32_t reverse[9] = {8, 7, 6, 5, 4, 3, 2, 1, 0};
    dtrain__winograd a = dtrain__winograd_make(conv, true);
    weight.order = reverse;
    a.to.data = (char *)d_x + dtrain_dtype_bytes(x_dtype) * (size_t)(conv->group * conv->in);
    a.to.dtype = x_dtype;
    a.accumulate = accumulate;
    return dtrain__winograd_run(conv, &a, &weight);
}

static dtrain_result dtrain__winograd_weight_grad(const dtrain__conv *conv,
                                                  dtrain__conv_weight weight, float *d_weight,
                                                  bool accumulate)
{
    const dtrain__kernels *kernels = conv->cpu->kernels;
    dtrain__winograd a = dtrain__winograd_make(conv, false);
    dtrain__job job = dtrain__job_make(&a, 0, 1, conv->dtype);
    job.chunk = dtrain__winograd_chunk(conv, &weight.parts);
    job.total = weight.parts;
    job.dynamic = true;
    job.scratch = conv->packed + weight.parts * dtrain__winograd_filters(conv);
    job.slot = dtrain__winograd_slot(conv);
    DTRAIN__TRY(dtrain__job_run(conv->cpu, &job, kernels->winograd_weight,
                                conv->pixels * conv->in * conv->out));
    weight.d_weight = d_weight + conv->group * conv->in * conv->out * 9;
    weight.accumulate = accumulate;
    job = dtrain__job_make(&weight, weight.outer, 1, DTRAIN_DTYPE_F32);
    return dtrain__job_run(conv->cpu, &job, kernels->winograd_filter_sum,
                           weight.parts * dtrain__winograd_filters(conv));
}

/* ---- Set-up ----------------------------------------------------------------------------------*/

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

/* Move to the next group. */
static void dtrain__conv_next(dtrain__conv *conv)
{
    const size_t bytes = dtrain__conv_bytes(conv->dtype);
    conv->group++;
    if (conv->x) conv->x += bytes * (size_t)conv->in;
    if (conv->d_y) conv->d_y += bytes * (size_t)conv->out;
    if (conv->weight) conv->weight += bytes * (size_t)(conv->in * conv->out * conv->taps);
    if (conv->bias) conv->bias += conv->out;
}

/* Return the number of parts of the pixels of a weight gradient: each has at least 1024 pixels, and
 * several gradients take at most 4 MiB. */
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

/* Take scratch for the order of taps, `floats` of packed weights and a product, or for patches, all
 * at once: growing it later would lose its contents. */
static dtrain_result dtrain__conv_scratch(dtrain__conv *conv, int64_t floats)
{
    const int64_t order = dtrain__multiple(2 * conv->taps, DTRAIN__LINE);
    float *scratch;
    conv->reserve = order + dtrain__multiple(floats, DTRAIN__LINE);
    int64_t most = conv->reserve + dtrain__gemm_slot(true) * conv->cpu->thread_count;
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

/* Return whether the taps of a row are neighbours in memory, if they are inside. */
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

/* Return whether windows are single pixels, which are a matrix in memory. */
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

/* Describe the product of windows of `data`, as rows of A, and packed weights; or (columns) of
 * windows of x, as columns, and d_y. The narrow tile is taken if the wide one would waste an
 * eighth. */
static dtrain__gemm_call dtrain__conv_call(const dtrain__conv *conv, const dtrain_gemm_args *args,
                                           const void *data, int64_t ld,
                                           const dtrain__windows *windows, bool columns)
{
    const dtrain__conv_tiles *tiles = conv->cpu->kernels->convolutions;
    const dtrain__isa *wide = columns ? &tiles->columns : &tiles->rows;
    const dtrain__isa *narrow = columns ? &tiles->narrow_columns : &tiles->narrow_rows;
    dtrain__gemm_call product;
    memset(&product, 0, sizeof product);
    product.args = args;
    product.isa =
        8 * dtrain__multiple(args->n, wide->nr) > 9 * dtrain__multiple(args->n, narrow->nr) ? narrow
                                                                                            : wide;
    product.a = dtrain__conv_operand(data, conv->dtype, ld, windows);
    product.a.along_k = !columns;
    product.b = columns ? dtrain__conv_operand(conv->d_y, conv->dtype, conv->out_all, NULL)
                        : dtrain__conv_operand(conv->packed, DTRAIN_DTYPE_F32, args->n, NULL);
    product.parts = columns ? dtrain__conv_parts(conv) : 1;
    product.reserve = conv->reserve;
    return product;
}

static dtrain_result dtrain__conv_forward(const dtrain__conv *conv)
{
    const dtrain__windows windows = dtrain__conv_windows(conv);
    const dtrain__conv_weight weight = dtrain__conv_weights(conv, false);
    dtrain_gemm_args args;
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
    const dtrain__gemm_call product =
        dtrain__conv_call(conv, &args, conv->x, conv->in_all, &windows, false);
    return dtrain__gemm_run(conv->cpu, &product);
}

static dtrain_result dtrain__conv_weight_grad(const dtrain__conv *conv, float *d_weight,
                                              bool accumulate)
{
    const dtrain__windows windows = dtrain__conv_windows(conv);
    dtrain__conv_weight weight = dtrain__conv_weights(conv, false);
    dtrain_gemm_args args;
    if (conv->patches) return dtrain__winograd_weight_grad(conv, weight, d_weight, accumulate);
    memset(&args, 0, sizeof args);
    args.m = conv->taps * conv->in;
    args.n = args.ldc = conv->out;
    args.k = conv->pixels;
    args.alpha = 1;
    args.c = conv->packed;
    args.c_dtype = DTRAIN_DTYPE_F32;
    const dtrain__gemm_call product =
        dtrain__conv_call(conv, &args, conv->x, conv->in_all, &windows, true);
    DTRAIN__TRY(dtrain__gemm_run(conv->cpu, &product));
    weight.d_weight = d_weight + conv->group * conv->in * conv->out * conv->taps;
    weight.parts = product.parts;
    weight.accumulate = accumulate;
    dtrain__job job = dtrain__job_make(&weight, weight.outer, 1, DTRAIN_DTYPE_F32);
    return dtrain__job_run(conv->cpu, &job, conv->cpu->kernels->conv_weight_sum,
                           weight.parts * args.m * args.n);
}

/* List the taps of an axis for pixels with remainder `rest` modulo the stride, and the offset of
 * each tap's pixel of d_y; return their number. The window of the class's pixel i is at i. The last
 * tap comes first, as its pixel does. */
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
static dtrain_result dtrain__conv_class(const dtrain__conv *conv, const int64_t rest[2], void *d_x,
                                        dtrain_dtype x_dtype, bool accumulate)
{
    const dtrain_windows2d *from = &conv->windows;
    const size_t bytes = dtrain__conv_bytes(x_dtype);
    int32_t taps[2][DTRAIN_CONV2D_KERNEL];
    dtrain__windows windows = dtrain__conv_windows(conv), c_rows = windows;
    dtrain_gemm_args args;
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
    dtrain__gemm_call product =
        dtrain__conv_call(conv, &args, conv->d_y, conv->out_all, &windows, false);
    product.c_rows = from->stride[0] * from->stride[1] > 1 ? &c_rows : NULL;
    return dtrain__gemm_run(conv->cpu, &product);
}

/* ---- Entries */

DTRAIN__PRIVATE dtrain_result dtrain__cpu_conv2d(dtrain_device *device,
                                                 const dtrain_conv2d_args *args)
{
    const dtrain_windows2d *w = &args->windows;
    DTRAIN__TRY(dtrain__check_conv("conv2d", w, args->out_channels, args->groups, args->dtype));
    dtrain__conv conv = dtrain__conv_make(device, w, args->out_channels, args->groups, args->dtype);
    conv.x = (const char *)args->x;
    conv.weight = (const char *)args->weight;
    conv.d_y = (const char *)args->y;
    conv.bias = args->bias;
    DTRAIN__TRY(dtrain__conv_scratch(&conv, conv.taps * conv.in * args->out_channels));
    for (; conv.group < args->groups; dtrain__conv_next(&conv))
        DTRAIN__TRY(dtrain__conv_forward(&conv));
    return DTRAIN_OK;
}

static dtrain_result dtrain__group_backward(const dtrain__conv *conv,
                                            const dtrain_conv2d_backward_args *args)
{
    int64_t rest[2];
    if (args->d_weight)
        DTRAIN__TRY(dtrain__conv_weight_grad(conv, args->d_weight, args->accumulate_weight));
    if (!args->d_x) return DTRAIN_OK;
    if (conv->patches)
        return dtrain__winograd_input_grad(conv, dtrain__conv_weights(conv, true), args->d_x,
                                           args->x_dtype, args->accumulate_x);
    const int64_t height = conv->windows.height, width = conv->windows.width;
    for (rest[0] = 0; rest[0] < conv->windows.stride[0] && rest[0] < height; rest[0]++)
        for (rest[1] = 0; rest[1] < conv->windows.stride[1] && rest[1] < width; rest[1]++)
            DTRAIN__TRY(
                dtrain__conv_class(conv, rest, args->d_x, args->x_dtype, args->accumulate_x));
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_conv2d_backward(dtrain_device *device,
                                                          const dtrain_conv2d_backward_args *args)
{
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
    DTRAIN__TRY(
        dtrain__conv_scratch(&conv, weights * (args->d_weight ? dtrain__conv_parts(&conv) : 1)));
    for (; conv.group < args->groups; dtrain__conv_next(&conv))
        DTRAIN__TRY(dtrain__group_backward(&conv, args));
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
