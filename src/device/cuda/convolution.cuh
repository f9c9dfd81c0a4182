/* Convolution: products with windows
 *
 * The three products of device/cpu/launch_convolution.c by one kernel, a tile of 64 x 32 results a
 * block, 16 steps of k at a time through shared memory. Elements of windows are fetched from the
 * image as the tile needs them; outside they are 0:
 *
 *     forward            rows: pixels of y     k: taps and channels of x
 *     input gradient     rows: pixels of x     k: taps and channels of y
 *     weight gradient    rows: taps and channels of x    k: pixels of y, in parts
 *
 * The parts of a weight gradient depend only on the shapes, and another kernel adds them in order:
 * the bits do not depend on timing. With a stride the input gradient multiplies missing taps as
 * zeros, stride^2 times the products of a GPU library; the CPU device skips them.
 *
 * Bytes: x, y and weight once, if the caches hold overlapping windows. All arithmetic is fp32. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"
#include "device/cuda/elements.cuh"
#include "device/cuda/elementwise.cuh"

enum {
    DTRAIN_CUDA_CONV_M = 64,
    DTRAIN_CUDA_CONV_N = 32,
    DTRAIN_CUDA_CONV_K = 16,
    DTRAIN_CUDA_CONV_THREADS = 128, /* 16 x 8, each with 4 x 4 results */
    DTRAIN_CUDA_CONV_FETCHES = DTRAIN_CUDA_CONV_M * DTRAIN_CUDA_CONV_K / DTRAIN_CUDA_CONV_THREADS,
    DTRAIN_CUDA_CONV_PARTS = 64 /* of a weight gradient, at most */
};

enum { DTRAIN_CUDA_CONV_FORWARD, DTRAIN_CUDA_CONV_INPUT, DTRAIN_CUDA_CONV_WEIGHT };

/* One call; x, weight, d_y of the kernel's type. */
struct dtrain_cuda_conv {
    dtrain_windows2d w;
    int in, out, in_all, out_all, taps; /* channels of a group, of all */
    int64_t groups, pixels;             /* of y */
    int64_t m, n, k, part;              /* of a group's product; steps of k in a part */
    const void *x, *weight, *d_y;
    const float *bias;
    void *to; /* y, d_x, or (parts, groups, m, n) */
    uint32_t to_dtype;
    bool accumulate;
};

/* A pixel that identifies a window. */
struct dtrain_cuda_site {
    int64_t image; /* the first pixel of its image, in the one that is fetched from */
    int y, x;
};

template <int Kind>
static __device__ __forceinline__ dtrain_cuda_site dtrain_cuda_site_of(const dtrain_cuda_conv &conv,
                                                                       int64_t index)
{
    const bool input = Kind == DTRAIN_CUDA_CONV_INPUT;
    const uint32_t columns = (uint32_t)(input ? conv.w.width : conv.w.out_width);
    const uint32_t rows = (uint32_t)(input ? conv.w.height : conv.w.out_height);
    const uint32_t line = (uint32_t)index / columns, image = line / rows;
    dtrain_cuda_site site;
    site.x = (int)((uint32_t)index - line * columns);
    site.y = (int)(line - image * rows);
    site.image = (int64_t)image *
                 (input ? conv.w.out_height * conv.w.out_width : conv.w.height * conv.w.width);
    return site;
}

/* Return the pixel under a tap, of x or, for the input gradient, of d_y; -1: none. */
template <int Kind>
static __device__ __forceinline__ int64_t dtrain_cuda_pixel(const dtrain_windows2d &w,
                                                            const dtrain_cuda_site &site, int tap)
{
    const int a = tap / (int)w.kernel[1], b = tap - a * (int)w.kernel[1];
    if (Kind == DTRAIN_CUDA_CONV_INPUT) {
        const int64_t y = site.y + w.padding[0] - a * w.dilation[0];
        const int64_t x = site.x + w.padding[1] - b * w.dilation[1];
        const int64_t i = y / w.stride[0], j = x / w.stride[1];
        if (y < 0 || x < 0 || i * w.stride[0] != y || j * w.stride[1] != x || i >= w.out_height ||
            j >= w.out_width)
            return -1;
        return site.image + i * w.out_width + j;
    }
    const int64_t y = site.y * w.stride[0] - w.padding[0] + a * w.dilation[0];
    const int64_t x = site.x * w.stride[1] - w.padding[1] + b * w.dilation[1];
    if (y < 0 || y >= w.height || x < 0 || x >= w.width) return -1;
    return site.image + y * w.width + x;
}

/* Give the element of windows at a site, counting taps and channels by `at`. */
template <typename T, int Kind>
static __device__ __forceinline__ float dtrain_cuda_window_at(const dtrain_cuda_conv &conv,
                                                              const dtrain_cuda_site &site, int at,
                                                              int64_t group)
{
    const bool input = Kind == DTRAIN_CUDA_CONV_INPUT;
    const int depth = input ? conv.out : conv.in, tap = at / depth, channel = at - tap * depth;
    const int64_t pixel = dtrain_cuda_pixel<Kind>(conv.w, site, tap);
    if (pixel < 0) return 0;
    const int64_t all = input ? conv.out_all : conv.in_all;
    const T *from = (const T *)(input ? conv.d_y : conv.x);
    return dtrain_cuda_widen(from[pixel * all + group * depth + channel]);
}

/* Give element (p, j) of the other operand. */
template <typename T, int Kind>
static __device__ __forceinline__ float dtrain_cuda_conv_other(const dtrain_cuda_conv &conv,
                                                               int64_t p, int64_t j, int64_t group)
{
    if (Kind == DTRAIN_CUDA_CONV_WEIGHT)
        return dtrain_cuda_widen(((const T *)conv.d_y)[p * conv.out_all + group * conv.out + j]);
    const int depth = Kind == DTRAIN_CUDA_CONV_INPUT ? conv.out : conv.in;
    const int tap = (int)p / depth, channel = (int)p - tap * depth;
    const int64_t out = Kind == DTRAIN_CUDA_CONV_INPUT ? channel : j;
    const int64_t in = Kind == DTRAIN_CUDA_CONV_INPUT ? j : channel;
    const T *weight = (const T *)conv.weight;
    return dtrain_cuda_widen(weight[((group * conv.out + out) * conv.in + in) * conv.taps + tap]);
}

template <int Kind>
static __device__ __forceinline__ void dtrain_cuda_conv_store(const dtrain_cuda_conv &conv,
                                                              int64_t i, int64_t j, int64_t group,
                                                              int64_t part, float sum)
{
    if (Kind == DTRAIN_CUDA_CONV_WEIGHT) {
        ((float *)conv.to)[((part * conv.groups + group) * conv.m + i) * conv.n + j] = sum;
        return;
    }
    const int64_t all = Kind == DTRAIN_CUDA_CONV_INPUT ? conv.in_all : conv.out_all;
    const int64_t channel = group * conv.n + j, at = i * all + channel;
    if (Kind == DTRAIN_CUDA_CONV_FORWARD && conv.bias) sum += conv.bias[channel];
    if (conv.accumulate) sum += dtrain_cuda_get_any(conv.to, conv.to_dtype, at);
    dtrain_cuda_put_any(conv.to, conv.to_dtype, at, sum);
}

template <typename T, int Kind>
static __global__ void __launch_bounds__(DTRAIN_CUDA_CONV_THREADS)
    dtrain_cuda_conv_kernel(dtrain_cuda_conv conv)
{
    enum { M = DTRAIN_CUDA_CONV_M, N = DTRAIN_CUDA_CONV_N, K = DTRAIN_CUDA_CONV_K };
    enum { LINES = DTRAIN_CUDA_CONV_THREADS / K, FETCHES = DTRAIN_CUDA_CONV_FETCHES };
    __shared__ float a[K][M + 4], b[K][N + 4];
    const int64_t across = (conv.n + N - 1) / N, down = (conv.m + M - 1) / M;
    int64_t block = blockIdx.x;
    const int64_t j0 = block % across * N, i0 = block / across % down * M;
    block = block / across / down;
    const int64_t group = block % conv.groups, part = block / conv.groups;
    const int64_t begin = part * conv.part;
    const int64_t end = begin + conv.part < conv.k ? begin + conv.part : conv.k;
    const int step = threadIdx.x % K, line = threadIdx.x / K; /* what this thread fetches */
    const int row = threadIdx.x / 8 * 4, column = threadIdx.x % 8 * 4; /* and what it adds up */
    const bool rows_are_sites = Kind != DTRAIN_CUDA_CONV_WEIGHT;
    dtrain_cuda_site sites[FETCHES] = {};
    float sums[4][4] = {};
    for (int f = 0; f < FETCHES && rows_are_sites; f++)
        sites[f] = dtrain_cuda_site_of<Kind>(conv, i0 + line + f * LINES);
    for (int64_t p = begin; p < end; p += K) {
        const int64_t at = p + step;
        if (!rows_are_sites && at < end) sites[0] = dtrain_cuda_site_of<Kind>(conv, at);
        __syncthreads(); /* the last step's products have been taken */
        for (int f = 0; f < FETCHES; f++) {
            const int64_t i = i0 + line + f * LINES;
            float x = 0;
            if (i < conv.m && at < end)
                x = rows_are_sites ? dtrain_cuda_window_at<T, Kind>(conv, sites[f], (int)at, group)
                                   : dtrain_cuda_window_at<T, Kind>(conv, sites[0], (int)i, group);
            a[step][line + f * LINES] = x;
        }
        for (int e = threadIdx.x; e < K * N; e += DTRAIN_CUDA_CONV_THREADS) {
            const int64_t q = p + e / N, j = j0 + e % N;
            b[e / N][e % N] =
                q < end && j < conv.n ? dtrain_cuda_conv_other<T, Kind>(conv, q, j, group) : 0;
        }
        __syncthreads();
        for (int q = 0; q < K; q++) {
            DTRAIN_CUDA_UNROLL
            for (int r = 0; r < 4; r++) {
                DTRAIN_CUDA_UNROLL
                for (int c = 0; c < 4; c++)
                    sums[r][c] = __fmaf_rn(a[q][row + r], b[q][column + c], sums[r][c]);
            }
        }
    }
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < 4; c++)
            if (i0 + row + r < conv.m && j0 + column + c < conv.n)
                dtrain_cuda_conv_store<Kind>(conv, i0 + row + r, j0 + column + c, group, part,
                                             sums[r][c]);
}

/* Add the parts of a weight gradient (parts, groups, taps in, out) up, in order; thread `at` makes
 * element `at` of d_weight (groups out, in, taps). */
static __global__ void dtrain_cuda_conv_sum_kernel(dtrain_cuda_conv conv, int64_t parts,
                                                   float *d_weight)
{
    const int64_t count = conv.groups * conv.m * conv.n;
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < count;
         at += (int64_t)gridDim.x * blockDim.x) {
        const int64_t tap = at % conv.taps, in = at / conv.taps % conv.in;
        const int64_t out = at / conv.taps / conv.in, group = out / conv.out;
        const float *from = (const float *)conv.to +
                            (group * conv.m + tap * conv.in + in) * conv.n + out % conv.out;
        float sum = conv.accumulate ? d_weight[at] : 0;
        for (int64_t part = 0; part < parts; part++) sum += from[part * count];
        d_weight[at] = sum;
    }
}

/* ---- Launchers */

/* Refuse windows that are not inside, and counts that do not fit 31 bits, in which kernels count
 * pixels. */
static dtrain_result dtrain_cuda_check_windows(const char *call, const dtrain_windows2d *w)
{
    const int64_t size[2] = {w->height, w->width}, count[2] = {w->out_height, w->out_width};
    bool fits = w->batch >= 0 && w->height > 0 && w->width > 0 && w->channels > 0;
    for (int a = 0; a < 2 && fits; a++)
        fits = w->kernel[a] > 0 && w->stride[a] > 0 && w->dilation[a] > 0 && w->padding[a] >= 0 &&
               count[a] > 0 &&
               (count[a] - 1) * w->stride[a] + (w->kernel[a] - 1) * w->dilation[a] <
                   size[a] + 2 * w->padding[a];
    if (!fits)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "%s: %lld x %lld windows of %lld x %lld taps do not fit images of %lld x %lld", call,
            (long long)w->out_height, (long long)w->out_width, (long long)w->kernel[0],
            (long long)w->kernel[1], (long long)w->height, (long long)w->width);
    if (w->batch * w->height * w->width > INT32_MAX ||
        w->batch * w->out_height * w->out_width > INT32_MAX)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: a batch has more than 2^31 pixels", call);
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_check_conv(const char *call, const dtrain_windows2d *w,
                                            int64_t out, int64_t groups)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_check_windows(call, w));
    if (groups < 1 || out < 1 || w->channels % groups || out % groups)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: %lld and %lld channels cannot be cut into %lld groups", call,
                           (long long)w->channels, (long long)out, (long long)groups);
    if (w->kernel[0] > DTRAIN_CONV2D_KERNEL || w->kernel[1] > DTRAIN_CONV2D_KERNEL)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: %lld x %lld taps, expected at most %d",
                           call, (long long)w->kernel[0], (long long)w->kernel[1],
                           DTRAIN_CONV2D_KERNEL);
    const int64_t taps = w->kernel[0] * w->kernel[1];
    if (w->channels > INT32_MAX / taps || out > INT32_MAX / taps)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: %lld and %lld channels are too many",
                           call, (long long)w->channels, (long long)out);
    return DTRAIN_OK;
}

static dtrain_cuda_conv dtrain_cuda_conv_make(const dtrain_windows2d *w, int64_t out,
                                              int64_t groups)
{
    dtrain_cuda_conv conv = {};
    conv.w = *w;
    conv.groups = groups;
    conv.in_all = (int)w->channels;
    conv.out_all = (int)out;
    conv.in = (int)(w->channels / groups);
    conv.out = (int)(out / groups);
    conv.taps = (int)(w->kernel[0] * w->kernel[1]);
    conv.pixels = w->batch * w->out_height * w->out_width;
    return conv;
}

/* Run a product of m, n, k in each group, with k in `parts`. */
template <typename T, int Kind>
static dtrain_result dtrain_cuda_conv_run(dtrain_device *device, const char *name,
                                          dtrain_cuda_conv conv, int64_t parts)
{
    const int64_t tiles = (conv.m + DTRAIN_CUDA_CONV_M - 1) / DTRAIN_CUDA_CONV_M *
                          ((conv.n + DTRAIN_CUDA_CONV_N - 1) / DTRAIN_CUDA_CONV_N);
    if (conv.m <= 0) return DTRAIN_OK;
    conv.part = (conv.k + parts - 1) / parts;
    return DTRAIN_CUDA_RUN(device, name, (dtrain_cuda_conv_kernel<T, Kind>),
                           tiles * conv.groups * parts, DTRAIN_CUDA_CONV_THREADS, 0, conv);
}

template <typename T>
static dtrain_result dtrain_cuda_conv2d_as(dtrain_device *device, const dtrain_conv2d_args *args)
{
    dtrain_cuda_conv conv = dtrain_cuda_conv_make(&args->windows, args->out_channels, args->groups);
    conv.m = conv.pixels;
    conv.n = conv.out;
    conv.k = conv.taps * conv.in;
    conv.x = args->x;
    conv.weight = args->weight;
    conv.bias = args->bias;
    conv.to = args->y;
    conv.to_dtype = args->dtype;
    return dtrain_cuda_conv_run<T, DTRAIN_CUDA_CONV_FORWARD>(device, "conv2d", conv, 1);
}

static dtrain_result dtrain_cuda_conv2d(dtrain_device *device, const dtrain_conv2d_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("conv2d", args->dtype));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_check_conv("conv2d", &args->windows, args->out_channels, args->groups));
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_conv2d_as)(device, args);
}

/* Make d_weight, in parts of at least 256 pixels each and of at most 16 MiB together. */
template <typename T>
static dtrain_result dtrain_cuda_conv_weight(dtrain_device *device, dtrain_cuda_conv conv,
                                             const dtrain_conv2d_backward_args *args)
{
    conv.m = conv.taps * conv.in;
    conv.n = conv.out;
    conv.k = conv.pixels;
    const int64_t count = conv.groups * conv.m * conv.n, room = ((int64_t)1 << 22) / count;
    int64_t parts = (conv.pixels + 255) / 256;
    if (parts > DTRAIN_CUDA_CONV_PARTS) parts = DTRAIN_CUDA_CONV_PARTS;
    if (parts > room) parts = room;
    if (parts < 1) parts = 1;
    DTRAIN_CUDA_TRY(dtrain_cuda_scratch(device, (size_t)(parts * count) * sizeof(float), &conv.to));
    DTRAIN_CUDA_TRY((dtrain_cuda_conv_run<T, DTRAIN_CUDA_CONV_WEIGHT>(
        device, "conv2d_backward (weight)", conv, parts)));
    conv.accumulate = args->accumulate_weight;
    return DTRAIN_CUDA_RUN(device, "conv2d_backward (sum)", dtrain_cuda_conv_sum_kernel,
                           dtrain_cuda_blocks(dtrain_cuda_state_of(device), count, 256), 256, 0,
                           conv, parts, args->d_weight);
}

template <typename T>
static dtrain_result dtrain_cuda_conv2d_backward_as(dtrain_device *device,
                                                    const dtrain_conv2d_backward_args *args)
{
    dtrain_cuda_conv conv = dtrain_cuda_conv_make(&args->windows, args->out_channels, args->groups);
    conv.x = args->x;
    conv.weight = args->weight;
    conv.d_y = args->d_y;
    if (args->d_weight) DTRAIN_CUDA_TRY(dtrain_cuda_conv_weight<T>(device, conv, args));
    if (!args->d_x) return DTRAIN_OK;
    conv.m = conv.w.batch * conv.w.height * conv.w.width;
    conv.n = conv.in;
    conv.k = conv.taps * conv.out;
    conv.to = args->d_x;
    conv.to_dtype = args->x_dtype;
    conv.accumulate = args->accumulate_x;
    return dtrain_cuda_conv_run<T, DTRAIN_CUDA_CONV_INPUT>(device, "conv2d_backward (input)", conv,
                                                           1);
}

static dtrain_result dtrain_cuda_conv2d_backward(dtrain_device *device,
                                                 const dtrain_conv2d_backward_args *args)
{
    dtrain_activation_backward_args sums = {};
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("conv2d_backward", args->dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("conv2d_backward", args->x_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_check_conv("conv2d_backward", &args->windows, args->out_channels,
                                           args->groups));
    if (args->d_bias) {
        sums.accumulate = args->accumulate_bias;
        sums.rows = args->windows.batch * args->windows.out_height * args->windows.out_width;
        sums.n = args->out_channels;
        sums.d_out = args->d_y;
        sums.d_in = (void *)(uintptr_t)args->d_y; /* the same: only d_bias is made */
        sums.d_bias = args->d_bias;
        sums.dtype = args->dtype;
        DTRAIN_CUDA_TRY(dtrain_cuda_activation_backward(device, &sums));
    }
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_conv2d_backward_as)(device, args);
}
