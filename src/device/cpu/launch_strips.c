/* Launchers of convolutions of bf16 with 3 x 3 taps by strips
 *
 * A strip is two pixels of a row of y, and the four of x behind them (kernels/strips.h). Threads
 * take items, which are images or bands of their rows: transformed, an item stays in L2. How images
 * are cut follows from the shape alone. */

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
    DTRAIN__STRIP_FLOATS = 64 << 10,      /* of the transformed rows of an item, about */
    DTRAIN__STRIP_PARTS = 16,             /* of a weight gradient, at most */
    DTRAIN__STRIP_FILTER_FLOATS = 1 << 20 /* of transformed weights, at most; so of their parts */
};

/* Return the lanes of a vector. */
static int dtrain__strips_lanes(const dtrain__conv *conv)
{
    return conv->cpu->dots->tiles->narrow_rows.nr;
}

/* Return the floats of transformed weights: cells, or the sums of their gradient, twice as many. */
static int64_t dtrain__strips_filters(const dtrain__conv *conv)
{
    const int lanes = dtrain__strips_lanes(conv);
    return 12 * dtrain__multiple(conv->in, lanes) * dtrain__multiple(conv->out, lanes);
}

/* Cut images of `height` rows into bands of equal rows, as few as have room. */
static void dtrain__strips_cut(dtrain__strips *a, int64_t batch, int64_t height, int64_t channels)
{
    const int64_t row = 4 * a->strips * channels / 2;
    int64_t most = DTRAIN__STRIP_FLOATS / row;
    if (most < 4) most = 4;
    a->bands = (height + most - 1) / most;
    a->rows = (height + a->bands - 1) / a->bands;
    a->bands = (height + a->rows - 1) / a->rows;
    a->items = batch * a->bands;
    a->group = a->rows < most ? most / a->rows : 1;
}

/* Return whether strips pay: where they multiply less than five sixths, counting channels and
 * pixels that are not there, and weights are few enough to stay in a cache. */
DTRAIN__PRIVATE bool dtrain__strips_fits(const dtrain__conv *conv)
{
    const dtrain_windows2d *w = &conv->windows;
    if (!conv->cpu->dots || conv->dtype != DTRAIN_DTYPE_BF16) return false;
    for (int axis = 0; axis < 2; axis++)
        if (w->kernel[axis] != 3 || w->stride[axis] != 1 || w->dilation[axis] != 1) return false;
    const int64_t filters = dtrain__strips_filters(conv);
    const int64_t strips = dtrain__multiple(w->out_height * ((w->out_width + 1) / 2), 4);
    return filters <= DTRAIN__STRIP_FILTER_FLOATS &&
           6 * strips * filters <= 5 * 9 * w->out_height * w->out_width * conv->in * conv->out;
}

/* Describe what forward and weight gradient have in common; input: the input gradient, which reads
 * images like y and makes images like x. */
static dtrain__strips dtrain__strips_make(const dtrain__conv *conv, bool input)
{
    const dtrain_windows2d *w = &conv->windows;
    dtrain__strips a;
    memset(&a, 0, sizeof a);
    dtrain__conv_images(conv, input, &a.from, &a.to);
    a.from.windows.y[0] = (int32_t)(input ? w->padding[0] - 2 : -w->padding[0]);
    a.from.windows.x[0] = (int32_t)(input ? w->padding[1] - 2 : -w->padding[1]);
    a.strips = (a.to.windows.width + 1) / 2;
    a.filters = conv->packed;
    dtrain__strips_cut(&a, w->batch, a.to.windows.height, a.from.windows.depth);
    return a;
}

/* Describe the weight gradient: cells take two strips. */
static dtrain__strips dtrain__strips_make_weight(const dtrain__conv *conv, int64_t *parts,
                                                 int64_t *chunk)
{
    dtrain__strips a = dtrain__strips_make(conv, false);
    int64_t most = DTRAIN__STRIP_FILTER_FLOATS / dtrain__strips_filters(conv);
    if (most > DTRAIN__STRIP_PARTS) most = DTRAIN__STRIP_PARTS;
    a.strips = dtrain__multiple(a.strips, 2);
    dtrain__strips_cut(&a, conv->windows.batch, conv->windows.out_height, conv->in + conv->out);
    *chunk = (a.items + most - 1) / most;
    *parts = (a.items + *chunk - 1) / *chunk;
    return a;
}

/* Return the floats that a thread needs. */
static int64_t dtrain__strips_slot(const dtrain__conv *conv, const dtrain__strips *a)
{
    const int lanes = dtrain__strips_lanes(conv);
    return dtrain__strips_vector(a->rows, a->strips, lanes) *
           ((a->from.windows.depth + lanes - 1) / lanes);
}

static int64_t dtrain__strips_weight_slot(const dtrain__conv *conv, const dtrain__strips *a)
{
    const int lanes = dtrain__strips_lanes(conv);
    const int64_t in = dtrain__multiple(conv->in, lanes), out = dtrain__multiple(conv->out, lanes);
    return 2 * a->group * a->strips * ((a->rows + 2) * in + a->rows * out);
}

/* Return the floats of scratch for all that is done by strips. */
DTRAIN__PRIVATE int64_t dtrain__strips_floats(const dtrain__conv *conv)
{
    int64_t parts, chunk, slot = 0;
    for (int input = 0; input < 2; input++) {
        const dtrain__strips a = dtrain__strips_make(conv, input);
        const int64_t floats = dtrain__strips_slot(conv, &a);
        if (floats > slot) slot = floats;
    }
    const dtrain__strips weight = dtrain__strips_make_weight(conv, &parts, &chunk);
    const int64_t floats = dtrain__strips_weight_slot(conv, &weight);
    if (floats > slot) slot = floats;
    return parts * dtrain__strips_filters(conv) + slot * conv->cpu->thread_count;
}

/* Transform the weights, then convolve. */
static dtrain_result dtrain__strips_run(const dtrain__conv *conv, const dtrain__strips *a,
                                        const dtrain__conv_weight *weight)
{
    const dtrain__dots *dots = conv->cpu->dots;
    const int64_t outer = dtrain__multiple(weight->outer, dtrain__strips_lanes(conv));
    dtrain__job job = dtrain__job_make(weight, outer / 2, 1, weight->dtype);
    DTRAIN__TRY(
        dtrain__job_run(conv->cpu, &job, dots->strips_filter, dtrain__strips_filters(conv)));
    job = dtrain__job_make(a, a->items, 1, conv->dtype);
    job.dynamic = true;
    job.scratch = conv->packed + dtrain__strips_filters(conv);
    job.slot = dtrain__strips_slot(conv, a);
    return dtrain__job_run(conv->cpu, &job, dots->strips, conv->pixels * conv->in * conv->out);
}

DTRAIN__PRIVATE dtrain_result dtrain__strips_forward(const dtrain__conv *conv)
{
    const dtrain__conv_weight weight = dtrain__conv_weights(conv, false);
    dtrain__strips a = dtrain__strips_make(conv, false);
    a.bias = conv->bias;
    return dtrain__strips_run(conv, &a, &weight);
}

DTRAIN__PRIVATE dtrain_result dtrain__strips_input_grad(const dtrain__conv *conv, void *d_x,
                                                        dtrain_dtype x_dtype, bool accumulate)
{
    static const int32_t reverse[9] = {8, 7, 6, 5, 4, 3, 2, 1, 0};
    dtrain__conv_weight weight = dtrain__conv_weights(conv, true);
    dtrain__strips a = dtrain__strips_make(conv, true);
    weight.order = reverse;
    a.to.data = (char *)d_x + dtrain_dtype_bytes(x_dtype) * (size_t)(conv->group * conv->in);
    a.to.dtype = x_dtype;
    a.accumulate = accumulate;
    return dtrain__strips_run(conv, &a, &weight);
}

DTRAIN__PRIVATE dtrain_result dtrain__strips_weight_grad(const dtrain__conv *conv, float *d_weight,
                                                         bool accumulate)
{
    const dtrain__dots *dots = conv->cpu->dots;
    dtrain__conv_weight weight = dtrain__conv_weights(conv, false);
    dtrain__job job = dtrain__job_make(NULL, 0, 1, conv->dtype);
    const dtrain__strips a = dtrain__strips_make_weight(conv, &weight.parts, &job.chunk);
    job.args = &a;
    job.total = weight.parts;
    job.dynamic = true;
    job.scratch = conv->packed + weight.parts * dtrain__strips_filters(conv);
    job.slot = dtrain__strips_weight_slot(conv, &a);
    DTRAIN__TRY(
        dtrain__job_run(conv->cpu, &job, dots->strips_weight, conv->pixels * conv->in * conv->out));
    weight.d_weight = d_weight + conv->group * conv->in * conv->out * 9;
    weight.accumulate = accumulate;
    job = dtrain__job_make(&weight, weight.outer, 1, DTRAIN_DTYPE_F32);
    return dtrain__job_run(conv->cpu, &job, dots->strips_filter_sum,
                           weight.parts * dtrain__strips_filters(conv));
}
