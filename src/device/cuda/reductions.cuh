/* Reductions: sum, clip, column sums
 *
 * A reduction takes two kernels: many blocks leave one partial result each, then one block adds
 * them in order. The number of blocks and the elements of each depend only on the count, so the
 * bits depend neither on the size of the GPU nor on the address. Cost: one read of the input, 16
 * bytes a load. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"
#include "device/cuda/elementwise.cuh"

#include <math.h>

enum {
    DTRAIN_CUDA_SUM_THREADS = 256,
    DTRAIN_CUDA_SUM_BLOCKS = 2048, /* at most: two waves on a large GPU, 16 KiB of partial sums */
    DTRAIN_CUDA_SUM_SHARE = 8192   /* elements that are worth a block */
};

/* Load the pack that begins at i, with 0 for elements from `count` on. */
template <typename T>
static __device__ __forceinline__ void dtrain_cuda_load_pack(const T *x, int64_t i, int64_t count,
                                                             bool aligned, dtrain_cuda_pack<T> &to)
{
    if (aligned && i + dtrain_cuda_pack<T>::width <= count) {
        to = dtrain_cuda_load<dtrain_cuda_pack<T>::width>(x + i);
        return;
    }
    DTRAIN_CUDA_UNROLL
    for (int j = 0; j < dtrain_cuda_pack<T>::width; j++)
        if (i + j < count) to.at[j] = x[i + j];
        else dtrain_cuda_narrow(0, to.at[j]);
}

/* ---- sum: x (count) -> one double, scaled -------------------------------------------------------
 *
 * Bytes: 4 (or 2) read for each element. */

/* Leave in partial[block] the sum of the packs block * threads + thread, then all threads further,
 * and so on. */
template <typename T>
static __global__ void __launch_bounds__(DTRAIN_CUDA_SUM_THREADS)
    dtrain_cuda_sum_kernel(const T *x, int64_t count, bool squares, bool aligned, double *partial)
{
    constexpr int width = dtrain_cuda_pack<T>::width, at_once = 4;
    __shared__ double slots[DTRAIN_CUDA_WARP];
    const int64_t step = (int64_t)gridDim.x * blockDim.x * width;
    double sum = 0;
    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * width; i < count;
         i += at_once * step) {
        dtrain_cuda_pack<T> packs[at_once];
        DTRAIN_CUDA_UNROLL
        for (int u = 0; u < at_once; u++)
            dtrain_cuda_load_pack(x, i + u * step, count, aligned, packs[u]);
        DTRAIN_CUDA_UNROLL
        for (int u = 0; u < at_once; u++) DTRAIN_CUDA_UNROLL
        for (int j = 0; j < width; j++) {
            const double value = (double)dtrain_cuda_widen(packs[u].at[j]);
            sum += squares ? value * value : value;
        }
    }
    sum = dtrain_cuda_block_sum(sum, slots);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

/* Add the partial sums in order, by one block, and scale the total. */
static __global__ void __launch_bounds__(DTRAIN_CUDA_SUM_THREADS)
    dtrain_cuda_finish_sum_kernel(const double *partial, int count, const dtrain_sum_args args)
{
    __shared__ double slots[DTRAIN_CUDA_WARP];
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
    sum = args.scale * dtrain_cuda_block_sum(sum, slots);
    if (threadIdx.x != 0) return;
    if (args.factor) sum *= (double)args.factor[0];
    if (args.accumulate) sum += args.total[0];
    if (args.total) args.total[0] = sum;
    if (args.out) args.out[0] = (float)sum;
}

template <typename T>
static dtrain_result dtrain_cuda_sum_as(dtrain_device *device, const dtrain_sum_args *args)
{
    const int64_t count = args->count > 0 ? args->count : 0;
    const int64_t needed = (count + DTRAIN_CUDA_SUM_SHARE - 1) / DTRAIN_CUDA_SUM_SHARE;
    const int64_t most = DTRAIN_CUDA_SUM_BLOCKS, blocks = needed < most ? needed : most;
    void *partial;
    DTRAIN_CUDA_TRY(dtrain_cuda_scratch(device, DTRAIN_CUDA_SUM_BLOCKS * sizeof(double), &partial));
    if (blocks > 0)
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "sum", dtrain_cuda_sum_kernel<T>, blocks,
                                        DTRAIN_CUDA_SUM_THREADS, 0, (const T *)args->x, count,
                                        args->squares, dtrain_cuda_aligned(args->x),
                                        (double *)partial));
    return DTRAIN_CUDA_RUN(device, "sum", dtrain_cuda_finish_sum_kernel, 1, DTRAIN_CUDA_SUM_THREADS,
                           0, (const double *)partial, (int)blocks, *args);
}

static dtrain_result dtrain_cuda_sum(dtrain_device *device, const dtrain_sum_args *args)
{
    const bool wide = args->dtype == DTRAIN_DTYPE_F64;
    if (!wide) DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("sum", args->dtype));
    if (args->accumulate && !args->total)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "sum: accumulate needs total, which is NULL");
    if (wide) return dtrain_cuda_sum_as<double>(device, args);
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_sum_as)(device, args);
}

/* ---- clip: one thread ---------------------------------------------------------------------------
 *
 * Rounds to fp32 at the same points as dtrain_grad_norm: a recorded step has the bits of an
 * ordinary step. A norm that is not finite, or a weight of 0, sets skip and does not change the
 * gradient scale. */

static __global__ void dtrain_cuda_clip_kernel(const dtrain_clip_args args)
{
    double sum = args.sum_squares[0];
    for (int i = 1; i < args.sum_count; i++) sum += args.sum_squares[i];
    const float norm = (float)(sqrt(sum) * (double)args.scalars->grad_scale);
    const float factor = args.max_norm / (norm + 1e-6f);
    args.norm[0] = norm;
    const bool empty = args.weight && args.weight[0] == 0;
    if (empty || (__float_as_uint(norm) & 0x7f800000u) == 0x7f800000u) args.scalars->skip = 1;
    else if (args.max_norm > 0 && factor < 1) args.scalars->grad_scale *= factor;
}

static dtrain_result dtrain_cuda_clip(dtrain_device *device, const dtrain_clip_args *args)
{
    return DTRAIN_CUDA_RUN(device, "clip", dtrain_cuda_clip_kernel, 1, 1, 0, *args);
}

/* ---- Column sums: x (rows,n), rows ld elements apart -> out (n) ---------------------------------
 *
 * The bias gradient of a product: the activation's backward pass with no activation, in place. */

template <typename T>
static dtrain_result dtrain_cuda_column_sums_as(dtrain_device *device, const void *x, int64_t rows,
                                                int64_t n, int64_t ld, float *out, bool accumulate)
{
    const dtrain_cuda_deactivate_op<T> op = {NULL, (const T *)x, (T *)x, DTRAIN_ACTIVATION_NONE};
    return dtrain_cuda_deactivate_columns(device, "column sums", op, rows, n, ld, out, accumulate);
}

static dtrain_result dtrain_cuda_column_sums(dtrain_device *device, dtrain_dtype dtype,
                                             const void *x, int64_t rows, int64_t n, int64_t ld,
                                             float *out, bool accumulate)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("column sums", dtype));
    return DTRAIN_CUDA_BY_DTYPE(dtype, dtrain_cuda_column_sums_as)(device, x, rows, n, ld, out,
                                                                   accumulate);
}
