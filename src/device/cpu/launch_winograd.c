/* Launchers of convolutions of 3 x 3 taps by patches
 *
 * A patch is 6 x 6 pixels of input and 4 x 4 pixels of output: windows with a stride of four
 * (kernels/winograd.h). Threads take blocks of patches, whose size depends only on the channels: a
 * transformed block stays in L2. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/convolution_internal.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/gemm_internal.h"
#include "device/cpu/kernels_internal.h"

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
DTRAIN__PRIVATE bool dtrain__winograd_fits(const dtrain__conv *conv)
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
DTRAIN__PRIVATE int64_t dtrain__winograd_floats(const dtrain__conv *conv)
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

DTRAIN__PRIVATE dtrain_result dtrain__winograd_forward(const dtrain__conv *conv,
                                                       const dtrain__conv_weight *weight)
{
    dtrain__winograd a = dtrain__winograd_make(conv, false);
    a.bias = conv->bias;
    return dtrain__winograd_run(conv, &a, weight);
}

DTRAIN__PRIVATE dtrain_result dtrain__winograd_input_grad(const dtrain__conv *conv,
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

DTRAIN__PRIVATE dtrain_result dtrain__winograd_weight_grad(const dtrain__conv *conv,
                                                           dtrain__conv_weight weight,
                                                           float *d_weight, bool accumulate)
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
