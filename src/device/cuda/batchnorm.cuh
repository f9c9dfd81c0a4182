/* Batch normalisation
 *
 * x is (rows, n), and all sums run down columns. A block has 32 columns and 8 lanes of rows, over a
 * share of the rows:
 *
 *     columns_sum     two sums in double for each column and share: moments, or those of backward
 *     columns_fold    one thread a column adds the shares up, in order
 *     columns_each    y, or d_x: no sums
 *
 * Shares, and so the bits, depend only on rows and n. Memory is the limit: forward reads x twice
 * and writes y, backward reads x, d_y and, for ReLU, y twice and writes d_x. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"

#include <math.h>

enum {
    DTRAIN_CUDA_COLUMN_TILE = 32,
    DTRAIN_CUDA_COLUMN_LANES = 8,
    DTRAIN_CUDA_COLUMN_THREADS = DTRAIN_CUDA_COLUMN_TILE * DTRAIN_CUDA_COLUMN_LANES,
    DTRAIN_CUDA_COLUMN_SHARES = 256 /* at most */
};

/* The cut of (rows, n) into blocks. */
struct dtrain_cuda_column_grid {
    int64_t rows, n, share; /* share: rows of a block */
    int64_t tiles, shares;
};

static dtrain_cuda_column_grid dtrain_cuda_column_cut(int64_t rows, int64_t n)
{
    dtrain_cuda_column_grid grid = {};
    grid.rows = rows;
    grid.n = n;
    grid.tiles = (n + DTRAIN_CUDA_COLUMN_TILE - 1) / DTRAIN_CUDA_COLUMN_TILE;
    grid.share = (rows + DTRAIN_CUDA_COLUMN_SHARES - 1) / DTRAIN_CUDA_COLUMN_SHARES;
    if (grid.share < 8 * DTRAIN_CUDA_COLUMN_LANES) grid.share = 8 * DTRAIN_CUDA_COLUMN_LANES;
    grid.shares = (rows + grid.share - 1) / grid.share;
    return grid;
}

/* The position of a thread: its column, which can be beyond the last, and its rows. */
struct dtrain_cuda_column_place {
    int64_t column, first, last;
    int lane, row_lane;

    __device__ explicit dtrain_cuda_column_place(const dtrain_cuda_column_grid &grid)
    {
        lane = threadIdx.x % DTRAIN_CUDA_COLUMN_TILE;
        row_lane = threadIdx.x / DTRAIN_CUDA_COLUMN_TILE;
        column = (int64_t)(blockIdx.x % grid.tiles) * DTRAIN_CUDA_COLUMN_TILE + lane;
        const int64_t begin = (int64_t)(blockIdx.x / grid.tiles) * grid.share;
        first = begin + row_lane;
        last = grid.rows < begin + grid.share ? grid.rows : begin + grid.share;
    }
};

/* Op::add(at, column, a, b) adds an element's two terms. parts (shares, n, 2). */
template <typename Op>
static __global__ void __launch_bounds__(DTRAIN_CUDA_COLUMN_THREADS, 2)
    dtrain_cuda_columns_sum_kernel(const Op op, dtrain_cuda_column_grid grid, double *parts)
{
    __shared__ double sums[2][DTRAIN_CUDA_COLUMN_LANES][DTRAIN_CUDA_COLUMN_TILE];
    const dtrain_cuda_column_place place(grid);
    double a = 0, b = 0;
    if (place.column < grid.n)
        for (int64_t row = place.first; row < place.last; row += DTRAIN_CUDA_COLUMN_LANES)
            op.add(row * grid.n + place.column, place.column, a, b);
    sums[0][place.row_lane][place.lane] = a;
    sums[1][place.row_lane][place.lane] = b;
    __syncthreads();
    if (place.row_lane != 0 || place.column >= grid.n) return;
    a = b = 0;
    for (int r = 0; r < DTRAIN_CUDA_COLUMN_LANES; r++) {
        a += sums[0][r][place.lane];
        b += sums[1][r][place.lane];
    }
    double *const out = parts + 2 * (blockIdx.x / grid.tiles * grid.n + place.column);
    out[0] = a;
    out[1] = b;
}

/* Op::finish(column, a, b) gets the sums of a column. */
template <typename Op>
static __global__ void __launch_bounds__(DTRAIN_CUDA_COLUMN_THREADS)
    dtrain_cuda_columns_fold_kernel(const Op op, dtrain_cuda_column_grid grid, const double *parts)
{
    const int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    double a = 0, b = 0;
    if (column >= grid.n) return;
    for (int64_t s = 0; s < grid.shares; s++) {
        a += parts[2 * (s * grid.n + column)];
        b += parts[2 * (s * grid.n + column) + 1];
    }
    op.finish(column, a, b);
}

/* Op::run(at, column) does an element. */
template <typename Op>
static __global__ void __launch_bounds__(DTRAIN_CUDA_COLUMN_THREADS)
    dtrain_cuda_columns_each_kernel(const Op op, dtrain_cuda_column_grid grid)
{
    const dtrain_cuda_column_place place(grid);
    if (place.column >= grid.n) return;
    for (int64_t row = place.first; row < place.last; row += DTRAIN_CUDA_COLUMN_LANES)
        op.run(row * grid.n + place.column, place.column);
}

template <typename Op>
static dtrain_result dtrain_cuda_columns_sum(dtrain_device *device, const char *name, const Op &op,
                                             int64_t rows, int64_t n)
{
    const dtrain_cuda_column_grid grid = dtrain_cuda_column_cut(rows, n);
    void *parts;
    DTRAIN_CUDA_TRY(
        dtrain_cuda_scratch(device, (size_t)(grid.shares * n) * 2 * sizeof(double), &parts));
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, name, dtrain_cuda_columns_sum_kernel<Op>,
                                    grid.tiles * grid.shares, DTRAIN_CUDA_COLUMN_THREADS, 0, op,
                                    grid, (double *)parts));
    const int64_t blocks = (n + DTRAIN_CUDA_COLUMN_THREADS - 1) / DTRAIN_CUDA_COLUMN_THREADS;
    return DTRAIN_CUDA_RUN(device, name, dtrain_cuda_columns_fold_kernel<Op>, blocks,
                           DTRAIN_CUDA_COLUMN_THREADS, 0, op, grid, (const double *)parts);
}

template <typename Op>
static dtrain_result dtrain_cuda_columns_each(dtrain_device *device, const char *name, const Op &op,
                                              int64_t rows, int64_t n)
{
    const dtrain_cuda_column_grid grid = dtrain_cuda_column_cut(rows, n);
    return DTRAIN_CUDA_RUN(device, name, dtrain_cuda_columns_each_kernel<Op>,
                           grid.tiles * grid.shares, DTRAIN_CUDA_COLUMN_THREADS, 0, op, grid);
}

/* ---- Moments: deviations from the first row, which keep what squares would cancel -------------*/

template <typename T> struct dtrain_cuda_moments_op {
    const T *x;
    float *part;
    int64_t rows, n;

    __device__ void add(int64_t at, int64_t column, double &a, double &b) const
    {
        const double off = (double)dtrain_cuda_widen(x[at]) - (double)dtrain_cuda_widen(x[column]);
        a += off;
        b += off * off;
    }
    __device__ void finish(int64_t column, double a, double b) const
    {
        const double mean = a / (double)rows, spread = b - a * mean;
        part[1 + column] = (float)((double)dtrain_cuda_widen(x[column]) + mean);
        part[1 + n + column] = (float)(spread < 0 ? 0 : spread); /* NaN stays */
        if (column == 0) part[0] = (float)rows;
    }
};

template <typename T>
static dtrain_result dtrain_cuda_moments_as(dtrain_device *device,
                                            const dtrain_batchnorm_moments_args *args)
{
    const dtrain_cuda_moments_op<T> op = {(const T *)args->x, args->sums, args->rows, args->n};
    return dtrain_cuda_columns_sum(device, "batchnorm, moments", op, args->rows, args->n);
}

static dtrain_result dtrain_cuda_batchnorm_moments(dtrain_device *device,
                                                   const dtrain_batchnorm_moments_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("batchnorm, moments", args->dtype));
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_moments_as)(device, args);
}

/* ---- Statistics: a thread has a column, over the parts of all ranks ---------------------------*/

static __global__ void __launch_bounds__(DTRAIN_CUDA_COLUMN_THREADS)
    dtrain_cuda_statistics_kernel(dtrain_batchnorm_statistics_args a)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    double count = 0, mean = 0, spread = 0;
    if (i >= a.n) return;
    if (a.parts == 0) {
        a.mean[i] = a.running_mean[i];
        a.rstd[i] = (float)(1 / sqrt((double)a.running_var[i] + (double)a.epsilon));
        return;
    }
    for (int64_t p = 0; p < a.parts; p++) {
        const float *const part = a.all + p * (1 + 2 * a.n);
        const double more = (double)part[0], all = count + more;
        const double apart = (double)part[1 + i] - mean;
        if (all <= 0) continue;
        mean += apart * (more / all);
        spread += (double)part[1 + a.n + i] + apart * apart * (count * more / all);
        count = all;
    }
    if (i == 0) a.inverse_count[0] = (float)(1 / (count > 0 ? count : 1));
    a.mean[i] = (float)mean;
    a.rstd[i] = (float)(1 / sqrt((count > 0 ? spread / count : 0) + (double)a.epsilon));
    if (!a.running_mean) return;
    const float variance = (float)(spread / (count > 1 ? count - 1 : 1));
    a.running_mean[i] += a.momentum * ((float)mean - a.running_mean[i]);
    a.running_var[i] += a.momentum * (variance - a.running_var[i]);
}

static dtrain_result dtrain_cuda_batchnorm_statistics(dtrain_device *device,
                                                      const dtrain_batchnorm_statistics_args *args)
{
    const int64_t blocks = (args->n + DTRAIN_CUDA_COLUMN_THREADS - 1) / DTRAIN_CUDA_COLUMN_THREADS;
    return DTRAIN_CUDA_RUN(device, "batchnorm, statistics", dtrain_cuda_statistics_kernel, blocks,
                           DTRAIN_CUDA_COLUMN_THREADS, 0, *args);
}

/* ---- y ----------------------------------------------------------------------------------------*/

template <typename T> struct dtrain_cuda_batchnorm_op {
    dtrain_batchnorm_args a;

    __device__ void run(int64_t at, int64_t c) const
    {
        const float off = dtrain_cuda_widen(((const T *)a.x)[at]) - a.mean[c];
        float y = __fmaf_rn(off, a.rstd[c] * a.weight[c], a.bias[c]);
        if (a.residual) y += dtrain_cuda_widen(((const T *)a.residual)[at]);
        if (a.activation == DTRAIN_ACTIVATION_RELU) y = y <= 0 ? 0 : y; /* NaN stays */
        dtrain_cuda_narrow(y, ((T *)a.y)[at]);
    }
};

template <typename T>
static dtrain_result dtrain_cuda_batchnorm_as(dtrain_device *device,
                                              const dtrain_batchnorm_args *args)
{
    const dtrain_cuda_batchnorm_op<T> op = {*args};
    return dtrain_cuda_columns_each(device, "batchnorm", op, args->rows, args->n);
}

static dtrain_result dtrain_cuda_batchnorm(dtrain_device *device, const dtrain_batchnorm_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("batchnorm", args->dtype));
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_batchnorm_as)(device, args);
}

/* ---- Backward ---------------------------------------------------------------------------------*/

/* Return d_y act'. ReLU's output is positive exactly if its input is. */
template <typename T>
static __device__ __forceinline__ float
dtrain_cuda_batchnorm_slope(uint32_t activation, const void *d_y, const void *y, int64_t at)
{
    const bool passes =
        activation == DTRAIN_ACTIVATION_NONE || dtrain_cuda_widen(((const T *)y)[at]) > 0;
    return passes ? dtrain_cuda_widen(((const T *)d_y)[at]) : 0;
}

template <typename T> struct dtrain_cuda_batchnorm_sums_op {
    dtrain_batchnorm_sums_args a;

    __device__ void add(int64_t at, int64_t c, double &sum, double &product) const
    {
        const float d = dtrain_cuda_batchnorm_slope<T>(a.activation, a.d_y, a.y, at);
        const float h = (dtrain_cuda_widen(((const T *)a.x)[at]) - a.mean[c]) * a.rstd[c];
        sum += (double)d;
        product += (double)d * (double)h;
        if (!a.d_residual) return;
        T *const out = (T *)a.d_residual + at;
        dtrain_cuda_narrow(a.accumulate ? dtrain_cuda_widen(*out) + d : d, *out);
    }
    __device__ void finish(int64_t c, double sum, double product) const
    {
        a.sums[c] = (float)sum;
        a.sums[a.n + c] = (float)product;
    }
};

template <typename T>
static dtrain_result dtrain_cuda_batchnorm_sums_as(dtrain_device *device,
                                                   const dtrain_batchnorm_sums_args *args)
{
    const dtrain_cuda_batchnorm_sums_op<T> op = {*args};
    return dtrain_cuda_columns_sum(device, "batchnorm, sums", op, args->rows, args->n);
}

static dtrain_result dtrain_cuda_batchnorm_sums(dtrain_device *device,
                                                const dtrain_batchnorm_sums_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("batchnorm, sums", args->dtype));
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_batchnorm_sums_as)(device, args);
}

template <typename T> struct dtrain_cuda_batchnorm_backward_op {
    dtrain_batchnorm_backward_args a;

    __device__ void run(int64_t at, int64_t c) const
    {
        const float d = dtrain_cuda_batchnorm_slope<T>(a.activation, a.d_y, a.y, at);
        const float h = (dtrain_cuda_widen(((const T *)a.x)[at]) - a.mean[c]) * a.rstd[c];
        const float both = __fmaf_rn(h, a.sums[a.n + c], a.sums[c]);
        float slope = a.rstd[c] * a.weight[c] * (d - both * a.inverse_count[0]);
        T *const out = (T *)a.d_x + at;
        if (a.accumulate) slope += dtrain_cuda_widen(*out);
        dtrain_cuda_narrow(slope, *out);
    }
};

template <typename T>
static dtrain_result dtrain_cuda_batchnorm_backward_as(dtrain_device *device,
                                                       const dtrain_batchnorm_backward_args *args)
{
    const dtrain_cuda_batchnorm_backward_op<T> op = {*args};
    return dtrain_cuda_columns_each(device, "batchnorm, backward", op, args->rows, args->n);
}

static dtrain_result dtrain_cuda_batchnorm_backward(dtrain_device *device,
                                                    const dtrain_batchnorm_backward_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("batchnorm, backward", args->dtype));
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_batchnorm_backward_as)(device, args);
}
