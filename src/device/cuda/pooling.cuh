/* Pooling: maximum and average of windows
 *
 * A thread makes an element of y or of d_x: backward sums the gradients of the windows that contain
 * the pixel, in order, without atomics. Memory bandwidth is the limit: x and y once, and an index
 * of 4 bytes for each maximum. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/convolution.cuh"

#include <math.h>

template <typename T> static __global__ void dtrain_cuda_pool2d_kernel(dtrain_pool2d_args args)
{
    const dtrain_windows2d &w = args.windows;
    const int64_t count = w.batch * w.out_height * w.out_width * w.channels;
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < count;
         at += (int64_t)gridDim.x * blockDim.x) {
        const uint32_t window = (uint32_t)(at / w.channels), line = window / (uint32_t)w.out_width;
        const uint32_t image = line / (uint32_t)w.out_height, c = (uint32_t)(at % w.channels);
        const int64_t y = (line - image * w.out_height) * w.stride[0] - w.padding[0];
        const int64_t x = (window - line * w.out_width) * w.stride[1] - w.padding[1];
        float top = -INFINITY, sum = 0;
        int where = -1;
        for (int64_t a = y < 0 ? -y : 0; a < w.kernel[0] && y + a < w.height; a++)
            for (int64_t b = x < 0 ? -x : 0; b < w.kernel[1] && x + b < w.width; b++) {
                const int64_t pixel = (image * w.height + y + a) * w.width + x + b;
                const float value = dtrain_cuda_widen(((const T *)args.x)[pixel * w.channels + c]);
                sum += value;
                if (value > top || value != value || where < 0) {
                    where = (int)(a * w.kernel[1] + b);
                    top = value;
                }
            }
        if (!args.maximum) top = sum / (float)(w.kernel[0] * w.kernel[1]);
        dtrain_cuda_narrow(top, ((T *)args.y)[at]);
        if (args.maximum && args.index) args.index[at] = where;
    }
}

template <typename T>
static __global__ void dtrain_cuda_pool2d_backward_kernel(dtrain_pool2d_backward_args args)
{
    const dtrain_windows2d &w = args.windows;
    const int64_t count = w.batch * w.height * w.width * w.channels;
    const float taps = args.maximum ? 1 : (float)(w.kernel[0] * w.kernel[1]);
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < count;
         at += (int64_t)gridDim.x * blockDim.x) {
        const uint32_t pixel = (uint32_t)(at / w.channels), line = pixel / (uint32_t)w.width;
        const uint32_t image = line / (uint32_t)w.height, c = (uint32_t)(at % w.channels);
        const int64_t y = line - image * w.height + w.padding[0];
        const int64_t x = pixel - line * w.width + w.padding[1];
        const int64_t i1 = y / w.stride[0] < w.out_height ? y / w.stride[0] : w.out_height - 1;
        const int64_t j1 = x / w.stride[1] < w.out_width ? x / w.stride[1] : w.out_width - 1;
        float sum = 0;
        for (int64_t i = i1; i >= 0 && y - i * w.stride[0] < w.kernel[0]; i--)
            for (int64_t j = j1; j >= 0 && x - j * w.stride[1] < w.kernel[1]; j--) {
                const int64_t window = (image * w.out_height + i) * w.out_width + j;
                const int64_t from = window * w.channels + c;
                const int64_t tap = (y - i * w.stride[0]) * w.kernel[1] + x - j * w.stride[1];
                if (!args.maximum || args.index[from] == tap)
                    sum += dtrain_cuda_widen(((const T *)args.d_y)[from]);
            }
        sum /= taps;
        if (args.accumulate) sum += dtrain_cuda_widen(((const T *)args.d_x)[at]);
        dtrain_cuda_narrow(sum, ((T *)args.d_x)[at]);
    }
}

static dtrain_result dtrain_cuda_pool2d(dtrain_device *device, const dtrain_pool2d_args *args)
{
    const dtrain_windows2d *w = &args->windows;
    const int64_t count = w->batch * w->out_height * w->out_width * w->channels;
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("pool2d", args->dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_check_windows("pool2d", w));
    if (count <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_RUN(
        device, "pool2d", DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_pool2d_kernel),
        dtrain_cuda_blocks(dtrain_cuda_state_of(device), count, 256), 256, 0, *args);
}

static dtrain_result dtrain_cuda_pool2d_backward(dtrain_device *device,
                                                 const dtrain_pool2d_backward_args *args)
{
    const dtrain_windows2d *w = &args->windows;
    const int64_t count = w->batch * w->height * w->width * w->channels;
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("pool2d_backward", args->dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_check_windows("pool2d_backward", w));
    if (count <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_RUN(device, "pool2d_backward",
                           DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_pool2d_backward_kernel),
                           dtrain_cuda_blocks(dtrain_cuda_state_of(device), count, 256), 256, 0,
                           *args);
}
