/* Layer norm, forward and backward
 *
 * A power of two of warps keeps a row in registers and reads it once: one warp for a narrow row,
 * with several rows a block; one block for a wide row. Two passes over the registers compute the
 * statistics (mean, then squared distances from it), so nothing cancels. Rows too wide for
 * registers take the "long" kernels, which read the row again. Without `mean` (root mean square
 * norm) the mean is 0. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"

#include <math.h>

/* The division of work: a row belongs to `warps` warps of a block that takes `at_a_time` rows at a
 * time. A thread has the packs thread, thread + 32 warps, ... of its row, `kept` elements in
 * all. */
#define DTRAIN_CUDA_ROW_THREADS 512 /* of a block, at most: 128 registers for each */

/* Return the most elements of a row that a thread keeps. Each single element also takes registers
 * for its address. */
static __host__ __device__ constexpr int dtrain_cuda_row_kept(int width)
{
    return width == 1 ? 16 : 32;
}

struct dtrain_cuda_row_plan {
    int warps, threads /* of the block */, at_a_time, kept;
    int64_t blocks; /* enough to take every row once */
    bool fits;      /* into registers */
};

static dtrain_cuda_row_plan dtrain_cuda_plan_rows(int64_t rows, int64_t n, int width)
{
    dtrain_cuda_row_plan plan = {1, 256, 1, 0, rows, false};
    const int most = dtrain_cuda_row_kept(width) * DTRAIN_CUDA_WARP; /* of a warp */
    while (plan.warps * DTRAIN_CUDA_WARP < DTRAIN_CUDA_ROW_THREADS && plan.warps * most < n)
        plan.warps *= 2;
    const int of_row = plan.warps * DTRAIN_CUDA_WARP;
    if (plan.warps * most < n) return plan;
    plan.fits = true;
    if (plan.threads < of_row) plan.threads = of_row;
    plan.at_a_time = plan.threads / of_row;
    plan.kept = (int)((n + of_row * width - 1) / (of_row * width)) * width;
    plan.blocks = (rows + plan.at_a_time - 1) / plan.at_a_time;
    return plan;
}

/* Sum x over the warps of a row, in every thread of the row. Consecutive calls must alternate
 * between two arrays of slots: the barrier in one call separates the uses of the other array. */
static __device__ __forceinline__ float dtrain_cuda_row_sum(float x, float *slots, int warps)
{
    x = dtrain_cuda_warp_sum(x);
    if (warps == 1) return x;
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP, warp = threadIdx.x / DTRAIN_CUDA_WARP;
    if (lane == 0) slots[warp] = x;
    __syncthreads();
    return dtrain_cuda_warp_sum(lane < warps ? slots[warp / warps * warps + lane] : 0);
}

/* ---- Forward ------------------------------------------------------------------------------------
 *
 * x, residual, sum, y (rows,n); weight, bias (n); mean, rstd (rows). Bytes: one read of x and of
 * residual, one write of sum and of y; weight and bias stay in cache.
 *
 * s = x + residual is rounded to the type of sum before normalisation: y, mean and rstd belong to
 * the s that backward reads, and fusing the addition changes no bit. */

template <typename X, typename Y, int WIDTH>
static __device__ __forceinline__ dtrain_cuda_pack<X, WIDTH>
dtrain_cuda_layernorm_input(const dtrain_layernorm_args &args, int64_t at)
{
    dtrain_cuda_pack<X, WIDTH> s = dtrain_cuda_load<WIDTH>((const X *)args.x + at);
    if (!args.residual) return s;
    const dtrain_cuda_pack<Y, WIDTH> residual =
        dtrain_cuda_load<WIDTH>((const Y *)args.residual + at);
    float sum[WIDTH];
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < WIDTH; e++)
        sum[e] = dtrain_cuda_widen(s.at[e]) + dtrain_cuda_widen(residual.at[e]);
    dtrain_cuda_narrow(sum, s);
    dtrain_cuda_store((X *)args.sum + at, s);
    return s;
}

template <typename Y, int WIDTH>
static __device__ __forceinline__ void
dtrain_cuda_layernorm_output(const dtrain_layernorm_args &args, int64_t row, int64_t column,
                             const float (&s)[WIDTH], float mean, float rstd)
{
    const auto weight = dtrain_cuda_load<WIDTH>(args.weight + column);
    dtrain_cuda_pack<float, WIDTH> bias = {};
    if (args.bias) bias = dtrain_cuda_load<WIDTH>(args.bias + column);
    float out[WIDTH];
    dtrain_cuda_pack<Y, WIDTH> y;
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < WIDTH; e++) out[e] = (s[e] - mean) * rstd * weight.at[e] + bias.at[e];
    dtrain_cuda_narrow(out, y);
    dtrain_cuda_store((Y *)args.y + row * args.n + column, y);
}

template <typename X, typename Y, int WIDTH>
static __global__ void __launch_bounds__(DTRAIN_CUDA_ROW_THREADS)
    dtrain_cuda_layernorm_kernel(dtrain_layernorm_args args, dtrain_cuda_row_plan plan)
{
    constexpr int chunks = dtrain_cuda_row_kept(WIDTH) / WIDTH; /* of a thread */
    __shared__ float slots[2][DTRAIN_CUDA_WARP];
    const int threads = plan.warps * DTRAIN_CUDA_WARP, thread = threadIdx.x % threads;
    const int64_t stride = (int64_t)gridDim.x * plan.at_a_time;
    for (int64_t first = (int64_t)blockIdx.x * plan.at_a_time; first < args.rows; first += stride) {
        const int64_t row = first + threadIdx.x / threads;
        /* warps after the last row have n = 0: they only take part in barriers */
        const int n = row < args.rows ? (int)args.n : 0;
        float s[chunks][WIDTH], sum = 0, squares = 0;
        DTRAIN_CUDA_UNROLL
        for (int c = 0; c < chunks; c++) {
            const int column = (c * threads + thread) * WIDTH;
            if (column < n) {
                const auto in =
                    dtrain_cuda_layernorm_input<X, Y, WIDTH>(args, row * args.n + column);
                DTRAIN_CUDA_UNROLL
                for (int e = 0; e < WIDTH; e++) sum += s[c][e] = dtrain_cuda_widen(in.at[e]);
            }
        }
        float mean = 0;
        if (args.mean) mean = dtrain_cuda_row_sum(sum, slots[0], plan.warps) / (float)args.n;

        DTRAIN_CUDA_UNROLL
        for (int c = 0; c < chunks; c++)
            if ((c * threads + thread) * WIDTH < n) {
                DTRAIN_CUDA_UNROLL
                for (int e = 0; e < WIDTH; e++) squares += (s[c][e] - mean) * (s[c][e] - mean);
            }
        const float variance = dtrain_cuda_row_sum(squares, slots[1], plan.warps) / (float)args.n;
        const float rstd = 1 / sqrtf(variance + args.epsilon);
        if (n > 0 && thread == 0) {
            args.rstd[row] = rstd;
            if (args.mean) args.mean[row] = mean;
        }

        DTRAIN_CUDA_UNROLL
        for (int c = 0; c < chunks; c++) {
            const int column = (c * threads + thread) * WIDTH;
            if (column < n)
                dtrain_cuda_layernorm_output<Y, WIDTH>(args, row, column, s[c], mean, rstd);
        }
    }
}

/* Normalise one row a block; x is read three times (with residual: x once, and sum twice). */
static __global__ void __launch_bounds__(1024)
    dtrain_cuda_layernorm_long_kernel(dtrain_layernorm_args args)
{
    __shared__ float slots[DTRAIN_CUDA_WARP];
    const void *s = args.residual ? args.sum : args.x;
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const int64_t begin = row * args.n;
        float sum = 0, squares = 0;
        for (int64_t j = threadIdx.x; j < args.n; j += blockDim.x) {
            if (args.residual)
                dtrain_cuda_put_any(
                    args.sum, args.x_dtype, begin + j,
                    dtrain_cuda_get_any(args.x, args.x_dtype, begin + j) +
                        dtrain_cuda_get_any(args.residual, args.y_dtype, begin + j));
            sum += dtrain_cuda_get_any(s, args.x_dtype, begin + j); /* this thread wrote it */
        }
        const float average = dtrain_cuda_block_sum(sum, slots) / (float)args.n;
        const float mean = args.mean ? average : 0;
        for (int64_t j = threadIdx.x; j < args.n; j += blockDim.x) {
            const float distance = dtrain_cuda_get_any(s, args.x_dtype, begin + j) - mean;
            squares += distance * distance;
        }
        const float rstd =
            1 / sqrtf(dtrain_cuda_block_sum(squares, slots) / (float)args.n + args.epsilon);
        for (int64_t j = threadIdx.x; j < args.n; j += blockDim.x)
            dtrain_cuda_put_any(args.y, args.y_dtype, begin + j,
                                (dtrain_cuda_get_any(s, args.x_dtype, begin + j) - mean) * rstd *
                                        args.weight[j] +
                                    (args.bias ? args.bias[j] : 0));
        if (threadIdx.x == 0 && args.mean) args.mean[row] = mean;
        if (threadIdx.x == 0) args.rstd[row] = rstd;
    }
}

template <typename X, typename Y>
static dtrain_result dtrain_cuda_layernorm_run(dtrain_device *device,
                                               const dtrain_layernorm_args *args)
{
    constexpr int width = dtrain_cuda_long_width<X, Y>();
    const bool wide = args->n % width == 0 && dtrain_cuda_aligned(args->x) &&
                      dtrain_cuda_aligned(args->y) && dtrain_cuda_aligned(args->weight) &&
                      dtrain_cuda_aligned(args->bias) && dtrain_cuda_aligned(args->residual) &&
                      dtrain_cuda_aligned(args->sum);
    const dtrain_cuda_row_plan plan = dtrain_cuda_plan_rows(args->rows, args->n, wide ? width : 1);
    const int64_t blocks = plan.blocks < INT32_MAX ? plan.blocks : INT32_MAX;
    if (!plan.fits)
        return DTRAIN_CUDA_RUN(device, "layernorm", dtrain_cuda_layernorm_long_kernel, blocks, 1024,
                               0, *args);
    void (*const kernel)(dtrain_layernorm_args, dtrain_cuda_row_plan) =
        wide ? dtrain_cuda_layernorm_kernel<X, Y, width> : dtrain_cuda_layernorm_kernel<X, Y, 1>;
    return DTRAIN_CUDA_RUN(device, "layernorm", kernel, blocks, plan.threads, 0, *args, plan);
}

template <typename X>
static dtrain_result dtrain_cuda_layernorm_of(dtrain_device *device,
                                              const dtrain_layernorm_args *args)
{
    if (args->y_dtype == DTRAIN_DTYPE_BF16)
        return dtrain_cuda_layernorm_run<X, dtrain_cuda_bf16>(device, args);
    if (args->y_dtype == DTRAIN_DTYPE_F16)
        return dtrain_cuda_layernorm_run<X, dtrain_cuda_f16>(device, args);
    return dtrain_cuda_layernorm_run<X, float>(device, args);
}

static dtrain_result dtrain_cuda_layernorm(dtrain_device *device, const dtrain_layernorm_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("layernorm, x_dtype", args->x_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("layernorm, y_dtype", args->y_dtype));
    if (!args->residual != !args->sum)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "layernorm: residual and sum are given together, found only %s",
                           args->sum ? "sum" : "residual");
    if (args->rows <= 0 || args->n <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_BY_DTYPE(args->x_dtype, dtrain_cuda_layernorm_of)(device, args);
}

/* ---- Backward -----------------------------------------------------------------------------------
 *
 * With hat = (x - mean) rstd and d = d_y weight:
 *
 *     d_x = (d - average(d) - hat average(d hat)) rstd        averages over the row
 *     d_weight = sum of d_y hat, d_bias = sum of d_y          over the rows
 *
 * x, d_y, d_x, d_residual (rows,n). Bytes: one read of x and d_y, one write of d_x and d_residual
 * (and a read of d_x to accumulate). A block takes many rows; each thread adds its columns to its
 * own sums in shared memory, without barriers and bank conflicts. Then
 *
 *     sums of a block's row groups, in order -> partials (blocks, 2, n)
 *     partials, in order -> d_weight, d_bias                  columns kernel
 *
 * The partials are 8 n bytes, written and read, for each of at most 2 blocks a multiprocessor. */

template <typename X, typename Y, int WIDTH>
static __device__ __forceinline__ void
dtrain_cuda_layernorm_backward_output(const dtrain_layernorm_backward_args &args, int64_t at,
                                      const float (&d)[WIDTH], const float (&hat)[WIDTH],
                                      float d_average, float d_hat_average, float rstd)
{
    dtrain_cuda_pack<X, WIDTH> d_x = {};
    float out[WIDTH];
    if (args.accumulate_x) d_x = dtrain_cuda_load<WIDTH>((const X *)args.d_x + at);
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < WIDTH; e++) {
        const float fresh = (d[e] - d_average - hat[e] * d_hat_average) * rstd;
        out[e] = args.accumulate_x ? dtrain_cuda_widen(d_x.at[e]) + fresh : fresh;
    }
    dtrain_cuda_narrow(out, d_x);
    dtrain_cuda_store((X *)args.d_x + at, d_x);
    if (!args.d_residual) return;
    dtrain_cuda_pack<Y, WIDTH> d_residual;
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < WIDTH; e++) out[e] = dtrain_cuda_widen(d_x.at[e]);
    dtrain_cuda_narrow(out, d_residual);
    dtrain_cuda_store((Y *)args.d_residual + at, d_residual);
}

/* Add the sums of a block's row groups in order, into its partials. */
static __device__ void dtrain_cuda_layernorm_partials(const float *weight_sums,
                                                      const float *bias_sums, int64_t n,
                                                      const dtrain_cuda_row_plan &plan, int width,
                                                      float *partials)
{
    const int threads = plan.warps * DTRAIN_CUDA_WARP;
    __syncthreads();
    if ((int)threadIdx.x >= threads) return; /* the first group adds all groups' sums */
    for (int i = 0; i < plan.kept; i++) {
        const int64_t column = ((int64_t)(i / width) * threads + threadIdx.x) * width + i % width;
        if (column >= n) continue;
        float weight_sum = 0, bias_sum = 0;
        for (int group = 0; group < plan.at_a_time; group++) {
            weight_sum += weight_sums[i * blockDim.x + group * threads];
            bias_sum += bias_sums[i * blockDim.x + group * threads];
        }
        partials[(2 * (int64_t)blockIdx.x + 0) * n + column] = weight_sum;
        partials[(2 * (int64_t)blockIdx.x + 1) * n + column] = bias_sum;
    }
}

/* Compute d_x, and the block's partials unless partials is NULL. */
template <typename X, typename Y, int WIDTH>
static __global__ void __launch_bounds__(DTRAIN_CUDA_ROW_THREADS)
    dtrain_cuda_layernorm_backward_kernel(dtrain_layernorm_backward_args args,
                                          dtrain_cuda_row_plan plan, float *partials)
{
    constexpr int chunks = dtrain_cuda_row_kept(WIDTH) / WIDTH;
    __shared__ float slots[2][DTRAIN_CUDA_WARP];
    DTRAIN_CUDA_DYNAMIC_SHARED(float, sums); /* (2, plan.kept, blockDim.x): of d_y hat, of d_y */
    float *const weight_sums = sums + threadIdx.x, *const bias_sums =
                                                       weight_sums + plan.kept * blockDim.x;
    for (int i = 0; partials && i < plan.kept; i++)
        weight_sums[i * blockDim.x] = 0, bias_sums[i * blockDim.x] = 0;

    const int threads = plan.warps * DTRAIN_CUDA_WARP, thread = threadIdx.x % threads;
    const int64_t stride = (int64_t)gridDim.x * plan.at_a_time;
    for (int64_t first = (int64_t)blockIdx.x * plan.at_a_time; first < args.rows; first += stride) {
        const int64_t row = first + threadIdx.x / threads;
        /* warps after the last row have n = 0: they only take part in barriers */
        const int n = row < args.rows ? (int)args.n : 0;
        const float mean = n && args.mean ? args.mean[row] : 0, rstd = n ? args.rstd[row] : 0;
        float hat[chunks][WIDTH], d[chunks][WIDTH], d_sum = 0, d_hat_sum = 0;
        DTRAIN_CUDA_UNROLL
        for (int c = 0; c < chunks; c++) {
            const int column = (c * threads + thread) * WIDTH;
            if (column >= n) continue;
            const auto x = dtrain_cuda_load<WIDTH>((const X *)args.x + row * args.n + column);
            const auto d_y = dtrain_cuda_load<WIDTH>((const Y *)args.d_y + row * args.n + column);
            const auto weight = dtrain_cuda_load<WIDTH>(args.weight + column);
            DTRAIN_CUDA_UNROLL
            for (int e = 0; e < WIDTH; e++) {
                const float dy = dtrain_cuda_widen(d_y.at[e]);
                hat[c][e] = (dtrain_cuda_widen(x.at[e]) - mean) * rstd;
                d[c][e] = dy * weight.at[e];
                d_sum += d[c][e];
                d_hat_sum += d[c][e] * hat[c][e];
                if (!partials) continue;
                weight_sums[(c * WIDTH + e) * blockDim.x] += dy * hat[c][e];
                bias_sums[(c * WIDTH + e) * blockDim.x] += dy;
            }
        }
        const float d_mean = dtrain_cuda_row_sum(d_sum, slots[0], plan.warps) / (float)args.n;
        const float d_average = args.mean ? d_mean : 0;
        const float d_hat_average =
            dtrain_cuda_row_sum(d_hat_sum, slots[1], plan.warps) / (float)args.n;

        DTRAIN_CUDA_UNROLL
        for (int c = 0; c < chunks; c++) {
            const int column = (c * threads + thread) * WIDTH;
            if (column < n && args.d_x)
                dtrain_cuda_layernorm_backward_output<X, Y, WIDTH>(
                    args, row * args.n + column, d[c], hat[c], d_average, d_hat_average, rstd);
        }
    }
    if (partials)
        dtrain_cuda_layernorm_partials(weight_sums, bias_sums, args.n, plan, WIDTH, partials);
}

/* Add partials (count, 2, n) to d_weight (n) and d_bias (n): even blocks make one, odd blocks the
 * other. A block has 32 columns and 16 warps, which take every 16th partial; their 16 sums are
 * added in order. */
static __global__ void __launch_bounds__(512)
    dtrain_cuda_layernorm_columns_kernel(dtrain_layernorm_backward_args args, const float *partials,
                                         int64_t count)
{
    __shared__ float sums[16][DTRAIN_CUDA_WARP];
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP, warp = threadIdx.x / DTRAIN_CUDA_WARP;
    const int64_t which = blockIdx.x % 2,
                  column = (int64_t)(blockIdx.x / 2) * DTRAIN_CUDA_WARP + lane;
    float sum = 0;
    if (column < args.n)
        for (int64_t p = warp; p < count; p += 16)
            sum += partials[(2 * p + which) * args.n + column];
    sums[warp][lane] = sum;
    __syncthreads();
    float *const out = which ? args.d_bias : args.d_weight;
    if (warp != 0 || column >= args.n || !out) return;
    sum = 0;
    for (int w = 0; w < 16; w++) sum += sums[w][lane];
    out[column] = args.accumulate_params ? out[column] + sum : sum;
}

/* Compute d_x for one row a block; the row is read twice. */
static __global__ void __launch_bounds__(1024)
    dtrain_cuda_layernorm_backward_long_kernel(dtrain_layernorm_backward_args args)
{
    __shared__ float slots[DTRAIN_CUDA_WARP];
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const int64_t begin = row * args.n;
        const float mean = args.mean ? args.mean[row] : 0, rstd = args.rstd[row];
        float d_sum = 0, d_hat_sum = 0;
        for (int64_t j = threadIdx.x; j < args.n; j += blockDim.x) {
            const float d = dtrain_cuda_get_any(args.d_y, args.y_dtype, begin + j) * args.weight[j];
            d_sum += d;
            d_hat_sum += d * (dtrain_cuda_get_any(args.x, args.x_dtype, begin + j) - mean) * rstd;
        }
        const float d_mean = dtrain_cuda_block_sum(d_sum, slots) / (float)args.n;
        const float d_average = args.mean ? d_mean : 0;
        const float d_hat_average = dtrain_cuda_block_sum(d_hat_sum, slots) / (float)args.n;
        for (int64_t j = threadIdx.x; j < args.n; j += blockDim.x) {
            const float d = dtrain_cuda_get_any(args.d_y, args.y_dtype, begin + j) * args.weight[j];
            const float hat = (dtrain_cuda_get_any(args.x, args.x_dtype, begin + j) - mean) * rstd;
            float d_x = (d - d_average - hat * d_hat_average) * rstd;
            if (args.accumulate_x)
                d_x = dtrain_cuda_get_any(args.d_x, args.x_dtype, begin + j) + d_x;
            dtrain_cuda_put_any(args.d_x, args.x_dtype, begin + j, d_x);
            if (args.d_residual)
                dtrain_cuda_put_any(args.d_residual, args.y_dtype, begin + j,
                                    dtrain_cuda_get_any(args.d_x, args.x_dtype, begin + j));
        }
    }
}

/* Add rows slab, slab + slabs, ... of 256 columns a block, into partials (slabs, 2, n). */
static __global__ void __launch_bounds__(256)
    dtrain_cuda_layernorm_slabs_kernel(dtrain_layernorm_backward_args args, float *partials,
                                       int64_t slabs)
{
    const int64_t slab = blockIdx.x % slabs, column = blockIdx.x / slabs * blockDim.x + threadIdx.x;
    if (column >= args.n) return;
    float weight_sum = 0, bias_sum = 0;
    for (int64_t row = slab; row < args.rows; row += slabs) {
        const float d_y = dtrain_cuda_get_any(args.d_y, args.y_dtype, row * args.n + column);
        const float x = dtrain_cuda_get_any(args.x, args.x_dtype, row * args.n + column);
        weight_sum += d_y * (x - (args.mean ? args.mean[row] : 0)) * args.rstd[row];
        bias_sum += d_y;
    }
    partials[(2 * slab + 0) * args.n + column] = weight_sum;
    partials[(2 * slab + 1) * args.n + column] = bias_sum;
}

static dtrain_result dtrain_cuda_layernorm_columns(dtrain_device *device,
                                                   const dtrain_layernorm_backward_args *args,
                                                   const float *partials, int64_t count)
{
    return DTRAIN_CUDA_RUN(
        device, "layernorm_backward, columns", dtrain_cuda_layernorm_columns_kernel,
        (args->n + DTRAIN_CUDA_WARP - 1) / DTRAIN_CUDA_WARP * 2, 512, 0, *args, partials, count);
}

/* Run the long kernels. The parameters come first, because d_x can be d_y. */
static dtrain_result dtrain_cuda_layernorm_backward_long(dtrain_device *device,
                                                         const dtrain_layernorm_backward_args *args)
{
    if (args->d_weight || args->d_bias) {
        const int64_t slabs = args->rows < 32 ? args->rows : 32;
        void *partials;
        DTRAIN_CUDA_TRY(
            dtrain_cuda_scratch(device, (size_t)(slabs * 2 * args->n) * sizeof(float), &partials));
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(
            device, "layernorm_backward", dtrain_cuda_layernorm_slabs_kernel,
            (args->n + 255) / 256 * slabs, 256, 0, *args, (float *)partials, slabs));
        DTRAIN_CUDA_TRY(
            dtrain_cuda_layernorm_columns(device, args, (const float *)partials, slabs));
    }
    if (!args->d_x) return DTRAIN_OK;
    return DTRAIN_CUDA_RUN(device, "layernorm_backward", dtrain_cuda_layernorm_backward_long_kernel,
                           args->rows < INT32_MAX ? args->rows : INT32_MAX, 1024, 0, *args);
}

template <typename X, typename Y>
static dtrain_result dtrain_cuda_layernorm_backward_run(dtrain_device *device,
                                                        const dtrain_layernorm_backward_args *args)
{
    constexpr int width = dtrain_cuda_long_width<X, Y>();
    const bool wide = args->n % width == 0 && dtrain_cuda_aligned(args->x) &&
                      dtrain_cuda_aligned(args->d_y) && dtrain_cuda_aligned(args->weight) &&
                      dtrain_cuda_aligned(args->d_x) && dtrain_cuda_aligned(args->d_residual);
    const bool params = args->d_weight || args->d_bias;
    const dtrain_cuda_state *const state = dtrain_cuda_state_of(device);
    const dtrain_cuda_row_plan plan = dtrain_cuda_plan_rows(args->rows, args->n, wide ? width : 1);
    const size_t shared_bytes = params ? (size_t)(2 * plan.kept * plan.threads) * sizeof(float) : 0;
    const size_t static_bytes = 2 * DTRAIN_CUDA_WARP * sizeof(float); /* slots: they count too */
    if (!plan.fits || shared_bytes + static_bytes > state->shared_limit)
        return dtrain_cuda_layernorm_backward_long(device, args);

    void (*const kernel)(dtrain_layernorm_backward_args, dtrain_cuda_row_plan, float *) =
        wide ? dtrain_cuda_layernorm_backward_kernel<X, Y, width>
             : dtrain_cuda_layernorm_backward_kernel<X, Y, 1>;
    const int64_t most = (int64_t)state->multiprocessors * (DTRAIN_CUDA_ROW_THREADS / plan.threads);
    const int64_t blocks = plan.blocks < most ? plan.blocks : most;
    void *partials = NULL;
    if (params)
        DTRAIN_CUDA_TRY(
            dtrain_cuda_scratch(device, (size_t)(blocks * 2 * args->n) * sizeof(float), &partials));
    if (shared_bytes + static_bytes > 48 * 1024) /* more than a kernel has without asking */
        DTRAIN_CUDA_TRY(dtrain_cuda_check(
            cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)shared_bytes),
            "layernorm_backward, shared memory"));
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "layernorm_backward", kernel, blocks, plan.threads,
                                    shared_bytes, *args, plan, (float *)partials));
    return params ? dtrain_cuda_layernorm_columns(device, args, (const float *)partials, blocks)
                  : DTRAIN_OK;
}

template <typename X>
static dtrain_result dtrain_cuda_layernorm_backward_of(dtrain_device *device,
                                                       const dtrain_layernorm_backward_args *args)
{
    if (args->y_dtype == DTRAIN_DTYPE_BF16)
        return dtrain_cuda_layernorm_backward_run<X, dtrain_cuda_bf16>(device, args);
    if (args->y_dtype == DTRAIN_DTYPE_F16)
        return dtrain_cuda_layernorm_backward_run<X, dtrain_cuda_f16>(device, args);
    return dtrain_cuda_layernorm_backward_run<X, float>(device, args);
}

static dtrain_result dtrain_cuda_layernorm_backward(dtrain_device *device,
                                                    const dtrain_layernorm_backward_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("layernorm_backward, x_dtype", args->x_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("layernorm_backward, y_dtype", args->y_dtype));
    if (args->d_residual && !args->d_x)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "layernorm_backward: d_residual is a copy of d_x, found d_x = NULL");
    if (args->rows <= 0 || args->n <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_BY_DTYPE(args->x_dtype, dtrain_cuda_layernorm_backward_of)(device, args);
}
