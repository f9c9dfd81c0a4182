/* Add, axpby, dropout, convert, activation
 *
 * Each is a struct for the loop of elements.cuh, and a launcher that picks the types. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"
#include "device/cuda/elements.cuh"
#include "device/cuda/pointwise.cuh"

#include <math.h>

/* ---- add: x (count), y (count) -> out (count) ---------------------------------------------------
 *
 * Two reads, one write; x and out have one type, y can have another. */

template <typename X, typename Y> struct dtrain_cuda_add_op {
    static constexpr int width = dtrain_cuda_width<X, Y>();
    const X *x;
    const Y *y;
    X *out;

    template <int W> struct group {
        dtrain_cuda_pack<X, W> x;
        dtrain_cuda_pack<Y, W> y;
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        g.x = dtrain_cuda_load<W>(x + i);
        g.y = dtrain_cuda_load<W>(y + i);
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        float sum[W];
        dtrain_cuda_pack<X, W> narrow;
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++)
            sum[j] = dtrain_cuda_widen(g.x.at[j]) + dtrain_cuda_widen(g.y.at[j]);
        dtrain_cuda_narrow(sum, narrow);
        dtrain_cuda_store(out + i, narrow);
    }
};

template <typename X, typename Y>
static dtrain_result dtrain_cuda_add_as(dtrain_device *device, const dtrain_add_args *args)
{
    const dtrain_cuda_add_op<X, Y> op = {(const X *)args->x, (const Y *)args->y, (X *)args->out};
    const bool aligned = dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->y) &&
                         dtrain_cuda_aligned(args->out);
    return dtrain_cuda_each(device, "add", op, args->count, aligned);
}

template <typename X>
static dtrain_result dtrain_cuda_add_to(dtrain_device *device, const dtrain_add_args *args)
{
    if (args->y_dtype == DTRAIN_DTYPE_BF16)
        return dtrain_cuda_add_as<X, dtrain_cuda_bf16>(device, args);
    if (args->y_dtype == DTRAIN_DTYPE_F16)
        return dtrain_cuda_add_as<X, dtrain_cuda_f16>(device, args);
    return dtrain_cuda_add_as<X, float>(device, args);
}

struct dtrain_cuda_add_f64_op {
    static constexpr int width = 1;
    const double *x, *y;
    double *out;
    template <int W> struct group {
    };
    template <int W> __device__ void load(int64_t, group<W> &) const {}
    template <int W> __device__ void store(int64_t i, const group<W> &) const
    {
        out[i] = x[i] + y[i];
    }
};

static dtrain_result dtrain_cuda_add(dtrain_device *device, const dtrain_add_args *args)
{
    const dtrain_cuda_add_f64_op wide = {(const double *)args->x, (const double *)args->y,
                                         (double *)args->out};
    if (args->x_dtype == DTRAIN_DTYPE_F64)
        return dtrain_cuda_each(device, "add", wide, args->count, false);
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("add", args->x_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("add", args->y_dtype));
    return DTRAIN_CUDA_BY_DTYPE(args->x_dtype, dtrain_cuda_add_to)(device, args);
}

/* ---- axpby: x (count), (1) or NULL, y (count) ---------------------------------------------------
 *
 * One read and one write; y is read only to be accumulated into. x NULL stands for 1. */

template <typename T> struct dtrain_cuda_axpby_op {
    static constexpr int width = dtrain_cuda_width<T, T>();
    const T *x;
    T *y;
    float a, b;
    bool same, accumulate; /* same: one x for all elements */

    template <int W> struct group {
        dtrain_cuda_pack<T, W> x, y;
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        if (!same) g.x = dtrain_cuda_load<W>(x + i);
        if (accumulate) g.y = dtrain_cuda_load<W>(y + i);
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        const float one = !same ? 0 : x ? dtrain_cuda_widen(x[0]) : 1;
        float value[W];
        dtrain_cuda_pack<T, W> out;
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) {
            const float from = same ? one : dtrain_cuda_widen(g.x.at[j]);
            value[j] = accumulate ? __fmaf_rn(a, from, b * dtrain_cuda_widen(g.y.at[j])) : a * from;
        }
        dtrain_cuda_narrow(value, out);
        dtrain_cuda_store(y + i, out);
    }
};

template <typename T>
static dtrain_result dtrain_cuda_axpby_as(dtrain_device *device, const dtrain_axpby_args *args)
{
    const bool same = args->broadcast || !args->x;
    const dtrain_cuda_axpby_op<T> op = {(const T *)args->x, (T *)args->y, (float)args->a,
                                        (float)args->b,     same,         args->accumulate};
    const bool aligned = (same || dtrain_cuda_aligned(args->x)) && dtrain_cuda_aligned(args->y);
    return dtrain_cuda_each(device, "axpby", op, args->count, aligned);
}

/* Multiply y (count) by a / divisor[0]. If that is 1, no thread reads y. */
template <typename T>
static __global__ void __launch_bounds__(DTRAIN_CUDA_EACH_THREADS)
    dtrain_cuda_divide_kernel(T *y, int64_t count, T a, const float *divisor)
{
    const T by = divisor[0];
    const int64_t threads = (int64_t)gridDim.x * blockDim.x;
    if (by == 0 || by == a) return;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads)
        y[i] *= a / by;
}

template <typename T>
static dtrain_result dtrain_cuda_divide(dtrain_device *device, const dtrain_axpby_args *args)
{
    return DTRAIN_CUDA_RUN(
        device, "axpby", dtrain_cuda_divide_kernel<T>,
        dtrain_cuda_blocks(dtrain_cuda_state_of(device), args->count, DTRAIN_CUDA_EACH_THREADS),
        DTRAIN_CUDA_EACH_THREADS, 0, (T *)args->y, args->count, (T)args->a, args->divisor);
}

struct dtrain_cuda_axpby_f64_op {
    static constexpr int width = 1;
    dtrain_axpby_args args;
    template <int W> struct group {
    };
    template <int W> __device__ void load(int64_t, group<W> &) const {}
    template <int W> __device__ void store(int64_t i, const group<W> &) const
    {
        const double *x = (const double *)args.x;
        double *y = (double *)args.y;
        y[i] =
            args.a * (!x ? 1 : x[args.broadcast ? 0 : i]) + (args.accumulate ? args.b * y[i] : 0);
    }
};

static dtrain_result dtrain_cuda_axpby(dtrain_device *device, const dtrain_axpby_args *args)
{
    const bool divides = args->divisor && args->count > 0;
    const dtrain_cuda_axpby_f64_op wide = {*args};
    if (args->dtype == DTRAIN_DTYPE_F64)
        return divides ? dtrain_cuda_divide<double>(device, args)
                       : dtrain_cuda_each(device, "axpby", wide, args->count, false);
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("axpby", args->dtype));
    if (divides) return dtrain_cuda_divide<float>(device, args);
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_axpby_as)(device, args);
}

/* ---- dropout: x (count) -> y (count) ------------------------------------------------------------
 *
 * One read (two to accumulate) and one write. Element i takes word i % 4 of Philox block i / 4, of
 * which the upper 24 bits are compared as integers: the bits of dtrain_random_uniform, so the mask
 * is the CPU device's. In a part, i is an element's number in the whole tensor; if these numbers
 * are not consecutive whole packs, each element draws a block. */

/* Compute dtrain__philox of core/random.c: four random words of a seed, a stream and a counter. */
static __device__ __forceinline__ void dtrain_cuda_philox(uint64_t seed, uint64_t stream,
                                                          uint64_t counter, uint32_t out[4])
{
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    DTRAIN_CUDA_UNROLL
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Give the random words of elements i .. i + W; i must be a multiple of W, and W 1, 4 or 8. */
template <int W>
static __device__ __forceinline__ void dtrain_cuda_random(uint64_t seed, uint64_t stream, int64_t i,
                                                          uint32_t words[W])
{
    DTRAIN_CUDA_UNROLL
    for (int j = 0; j < W; j += 4) {
        uint32_t block[4];
        dtrain_cuda_philox(seed, stream, (uint64_t)(i + j) / 4, block);
        if (W == 1) {
            const int word = (int)(i % 4);
            words[0] = word < 2 ? (word ? block[1] : block[0]) : (word == 3 ? block[3] : block[2]);
        } else {
            DTRAIN_CUDA_UNROLL
            for (int k = 0; k < 4 && j + k < W; k++) words[j + k] = block[k];
        }
    }
}

static __device__ __forceinline__ int64_t dtrain_cuda_part_number(const dtrain_part &part,
                                                                  int64_t i)
{
    uint32_t s = 0;
    if (!part.segments) return part.first + i;
    int64_t column = i % part.n;
    while (s + 1 < part.segments && column >= part.segment[s].length)
        column -= part.segment[s++].length;
    return part.first + i / part.n * part.whole_n + part.segment[s].column + column;
}

/* PACKS: part has no segments, and its first number is a multiple of a pack. */
template <typename T, bool PACKS> struct dtrain_cuda_dropout_op {
    static constexpr int width = dtrain_cuda_width<T, T>();
    const T *x;
    T *y;
    float scale;
    uint32_t threshold; /* a 24-bit uniform below it is dropped */
    uint64_t seed, stream;
    const dtrain_step_scalars *scalars;
    bool accumulate;
    dtrain_part part;

    template <int W> struct group {
        dtrain_cuda_pack<T, W> x, y;
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        g.x = dtrain_cuda_load<W>(x + i);
        if (accumulate) g.y = dtrain_cuda_load<W>(y + i);
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        uint32_t words[W];
        float value[W];
        dtrain_cuda_pack<T, W> out;
        const uint64_t now = seed + (scalars ? scalars->seed : 0);
        if (PACKS) dtrain_cuda_random<W>(now, stream, part.first + i, words);
        for (int j = 0; j < W && !PACKS; j++)
            dtrain_cuda_random<1>(now, stream, dtrain_cuda_part_number(part, i + j), words + j);
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) {
            const bool kept = words[j] >> 8 >= threshold;
            value[j] = kept ? scale * dtrain_cuda_widen(g.x.at[j]) : 0.0f;
            if (accumulate) value[j] += dtrain_cuda_widen(g.y.at[j]);
        }
        dtrain_cuda_narrow(value, out);
        dtrain_cuda_store(y + i, out);
    }
};

template <typename T, bool PACKS>
static dtrain_result dtrain_cuda_dropout_by(dtrain_device *device, const dtrain_dropout_args *args)
{
    const double least = ceil((double)args->probability * 16777216.0);
    const dtrain_cuda_dropout_op<T, PACKS> op = {(const T *)args->x,
                                                 (T *)args->y,
                                                 args->probability < 1 ? 1 / (1 - args->probability)
                                                                       : 0,
                                                 least < 16777216.0 ? (uint32_t)least : 16777216u,
                                                 args->seed,
                                                 args->stream,
                                                 args->scalars,
                                                 args->accumulate,
                                                 args->part};
    const bool aligned = dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->y);
    return dtrain_cuda_each(device, "dropout", op, args->count, aligned);
}

template <typename T>
static dtrain_result dtrain_cuda_dropout_as(dtrain_device *device, const dtrain_dropout_args *args)
{
    const bool packs =
        !args->part.segments && args->part.first % dtrain_cuda_dropout_op<T, true>::width == 0;
    return packs ? dtrain_cuda_dropout_by<T, true>(device, args)
                 : dtrain_cuda_dropout_by<T, false>(device, args);
}

static dtrain_result dtrain_cuda_dropout(dtrain_device *device, const dtrain_dropout_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("dropout", args->dtype));
    if (!(args->probability >= 0))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dropout: probability is %g, expected 0 to 1",
                           (double)args->probability);
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_dropout_as)(device, args);
}

/* ---- convert: x (count) -> y (count) ------------------------------------------------------------
 *
 * One read and one write, rounded to nearest; every NaN becomes 0x7fff in a half. */

template <typename X, typename Y> struct dtrain_cuda_convert_op {
    static constexpr int width = dtrain_cuda_width<X, Y>();
    const X *x;
    Y *y;

    template <int W> using group = dtrain_cuda_pack<X, W>;
    template <int W> __device__ void load(int64_t i, dtrain_cuda_pack<X, W> &g) const
    {
        g = dtrain_cuda_load<W>(x + i);
    }
    template <int W> __device__ void store(int64_t i, const dtrain_cuda_pack<X, W> &g) const
    {
        float value[W];
        dtrain_cuda_pack<Y, W> out;
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) value[j] = dtrain_cuda_widen(g.at[j]);
        dtrain_cuda_narrow(value, out);
        dtrain_cuda_store(y + i, out);
    }
};

template <typename X, typename Y>
static dtrain_result dtrain_cuda_convert_as(dtrain_device *device, const dtrain_convert_args *args)
{
    const dtrain_cuda_convert_op<X, Y> op = {(const X *)args->x, (Y *)args->y};
    const bool aligned = dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->y);
    return dtrain_cuda_each(device, "convert", op, args->count, aligned);
}

/* Copy if both types are equal, so that a NaN keeps its bits. */
static dtrain_result dtrain_cuda_convert(dtrain_device *device, const dtrain_convert_args *args)
{
    const dtrain_dtype from = args->x_dtype, to = args->y_dtype;
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("convert", from));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("convert", to));
    if (from == to) {
        if (args->x == args->y || args->count <= 0) return DTRAIN_OK;
        return dtrain_cuda_copy(device, args->y, args->x,
                                (size_t)args->count * dtrain_dtype_bytes(from),
                                DTRAIN_COPY_DEVICE_TO_DEVICE);
    }
    if (from == DTRAIN_DTYPE_F32)
        return to == DTRAIN_DTYPE_BF16
                   ? dtrain_cuda_convert_as<float, dtrain_cuda_bf16>(device, args)
                   : dtrain_cuda_convert_as<float, dtrain_cuda_f16>(device, args);
    if (to == DTRAIN_DTYPE_F32)
        return from == DTRAIN_DTYPE_BF16
                   ? dtrain_cuda_convert_as<dtrain_cuda_bf16, float>(device, args)
                   : dtrain_cuda_convert_as<dtrain_cuda_f16, float>(device, args);
    return from == DTRAIN_DTYPE_BF16
               ? dtrain_cuda_convert_as<dtrain_cuda_bf16, dtrain_cuda_f16>(device, args)
               : dtrain_cuda_convert_as<dtrain_cuda_f16, dtrain_cuda_bf16>(device, args);
}

/* ---- activation backward: x, d_out (rows,n) -> d_in (rows,n), d_bias (n) ------------------------
 *
 * Two reads, one write. Without d_bias it is elementwise. With d_bias a block takes CHUNK rows of a
 * strip of 32 packs of columns; each warp walks every 8th row with the sums in registers:
 *
 *          n columns                 1. warps: d_in, and the sums of their rows
 *        +------+------+------+      2. block: the 8 warps' sums in order -> partial (chunks,n)
 *  CHUNK |block0|block1|block2|      3. second kernel: the chunks' sums in order -> d_bias
 *        +------+------+------+
 *        |block3| ...
 *
 * Blocks depend only on the shape, so the bits depend only on the inputs. */

enum { DTRAIN_CUDA_CHUNK_ROWS = 64, DTRAIN_CUDA_COLUMN_WARPS = 8, DTRAIN_CUDA_ROWS_AT_ONCE = 2 };

template <typename T> struct dtrain_cuda_deactivate_op {
    static constexpr int width = dtrain_cuda_width<T, T>();
    const T *x, *d_out;
    T *d_in;
    uint32_t activation;

    template <int W> struct group {
        dtrain_cuda_pack<T, W> x, d;
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        if (activation != DTRAIN_ACTIVATION_NONE) g.x = dtrain_cuda_load<W>(x + i);
        g.d = dtrain_cuda_load<W>(d_out + i);
    }
    /* Store d_in, and leave its values in `d`, in fp32. */
    template <int W> __device__ void finish(int64_t i, const group<W> &g, float (&d)[W]) const
    {
        dtrain_cuda_pack<T, W> out;
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) {
            const float from =
                activation == DTRAIN_ACTIVATION_NONE ? 0 : dtrain_cuda_widen(g.x.at[j]);
            d[j] = dtrain_cuda_deactivate(activation, from, dtrain_cuda_widen(g.d.at[j]));
        }
        dtrain_cuda_narrow(d, out);
        if (activation != DTRAIN_ACTIVATION_NONE || d_in != d_out) dtrain_cuda_store(d_in + i, out);
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        float d[W];
        finish<W>(i, g, d);
    }
};

/* Store d_in and the column sums of one block: chunk blockIdx / strips of the rows, strip blockIdx
 * % strips of the columns. */
template <typename T, int W>
static __global__ void __launch_bounds__(DTRAIN_CUDA_COLUMN_WARPS *DTRAIN_CUDA_WARP)
    dtrain_cuda_deactivate_columns_kernel(const dtrain_cuda_deactivate_op<T> op, int64_t rows,
                                          int64_t n, int64_t ld, float *partial)
{
    constexpr int strip_columns = W * DTRAIN_CUDA_WARP, step = DTRAIN_CUDA_COLUMN_WARPS;
    __shared__ float sums[DTRAIN_CUDA_COLUMN_WARPS][W][DTRAIN_CUDA_WARP];
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP, warp = threadIdx.x / DTRAIN_CUDA_WARP;
    const int64_t strips = (n + strip_columns - 1) / strip_columns;
    const int64_t chunk = blockIdx.x / strips, first = blockIdx.x % strips * strip_columns;
    const int64_t begin = chunk * DTRAIN_CUDA_CHUNK_ROWS, column = first + lane * W;
    const int64_t end =
        begin + DTRAIN_CUDA_CHUNK_ROWS < rows ? begin + DTRAIN_CUDA_CHUNK_ROWS : rows;
    float sum[W] = {0};
    for (int64_t row = begin + warp; row < end && column < n;
         row += step * DTRAIN_CUDA_ROWS_AT_ONCE) {
        typename dtrain_cuda_deactivate_op<T>::template group<W> g[DTRAIN_CUDA_ROWS_AT_ONCE] = {};
        DTRAIN_CUDA_UNROLL
        for (int u = 0; u < DTRAIN_CUDA_ROWS_AT_ONCE; u++)
            if (row + u * step < end) op.load((row + u * step) * ld + column, g[u]);
        DTRAIN_CUDA_UNROLL
        for (int u = 0; u < DTRAIN_CUDA_ROWS_AT_ONCE; u++) {
            float d[W];
            if (row + u * step >= end) break;
            op.template finish<W>((row + u * step) * ld + column, g[u], d);
            DTRAIN_CUDA_UNROLL
            for (int j = 0; j < W; j++) sum[j] += d[j];
        }
    }
    DTRAIN_CUDA_UNROLL
    for (int j = 0; j < W; j++) sums[warp][j][lane] = sum[j];
    __syncthreads();
    for (int i = threadIdx.x; i < strip_columns && first + i < n; i += blockDim.x) {
        float total = 0;
        for (int w = 0; w < DTRAIN_CUDA_COLUMN_WARPS; w++) total += sums[w][i % W][i / W];
        partial[chunk * n + first + i] = total;
    }
}

/* Compute out (n) = column sums of partial (chunks,n). A block takes 32 columns: warp w adds chunks
 * w, w + 32, ..., and the warps' sums are added in order. */
static __global__ void __launch_bounds__(1024)
    dtrain_cuda_finish_columns_kernel(const float *partial, int64_t chunks, int64_t n, float *out,
                                      bool accumulate)
{
    __shared__ float sums[DTRAIN_CUDA_WARP][DTRAIN_CUDA_WARP];
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP, warp = threadIdx.x / DTRAIN_CUDA_WARP;
    const int64_t column = (int64_t)blockIdx.x * DTRAIN_CUDA_WARP + lane;
    float sum = 0;
    if (column < n) {
        for (int64_t chunk = warp; chunk < chunks; chunk += DTRAIN_CUDA_WARP)
            sum += partial[chunk * n + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < n) {
        float total = accumulate ? out[column] : 0;
        for (int w = 0; w < DTRAIN_CUDA_WARP; w++) total += sums[w][lane];
        out[column] = total;
    }
}

/* Run the backward pass with column sums; the rows of x, d_out and d_in are ld elements apart. */
template <typename T>
static dtrain_result dtrain_cuda_deactivate_columns(dtrain_device *device, const char *name,
                                                    const dtrain_cuda_deactivate_op<T> &op,
                                                    int64_t rows, int64_t n, int64_t ld, float *out,
                                                    bool accumulate)
{
    constexpr int W = dtrain_cuda_deactivate_op<T>::width;
    const bool aligned = n % W == 0 && ld % W == 0 && dtrain_cuda_aligned(op.x) &&
                         dtrain_cuda_aligned(op.d_out) && dtrain_cuda_aligned(op.d_in);
    const int64_t chunks =
        rows > 0 ? (rows + DTRAIN_CUDA_CHUNK_ROWS - 1) / DTRAIN_CUDA_CHUNK_ROWS : 0;
    const int64_t strip = DTRAIN_CUDA_WARP * (aligned ? W : 1);
    const int64_t blocks = chunks * ((n + strip - 1) / strip);
    const int threads = DTRAIN_CUDA_COLUMN_WARPS * DTRAIN_CUDA_WARP;
    void *partial = NULL;
    if (n <= 0) return DTRAIN_OK;
    DTRAIN_CUDA_TRY(
        dtrain_cuda_scratch(device, (size_t)chunks * (size_t)n * sizeof(float), &partial));
    if (blocks > 0 && aligned)
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, name, (dtrain_cuda_deactivate_columns_kernel<T, W>),
                                        blocks, threads, 0, op, rows, n, ld, (float *)partial));
    if (blocks > 0 && !aligned)
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, name, (dtrain_cuda_deactivate_columns_kernel<T, 1>),
                                        blocks, threads, 0, op, rows, n, ld, (float *)partial));
    return DTRAIN_CUDA_RUN(device, name, dtrain_cuda_finish_columns_kernel,
                           (n + DTRAIN_CUDA_WARP - 1) / DTRAIN_CUDA_WARP, 1024, 0,
                           (const float *)partial, chunks, n, out, accumulate);
}

template <typename T>
static dtrain_result dtrain_cuda_activation_backward_as(dtrain_device *device,
                                                        const dtrain_activation_backward_args *args)
{
    const dtrain_cuda_deactivate_op<T> op = {(const T *)args->x, (const T *)args->d_out,
                                             (T *)args->d_in, args->activation};
    const bool aligned = dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->d_out) &&
                         dtrain_cuda_aligned(args->d_in);
    if (args->d_bias)
        return dtrain_cuda_deactivate_columns(device, "activation_backward", op, args->rows,
                                              args->n, args->n, args->d_bias, args->accumulate);
    if (args->activation == DTRAIN_ACTIVATION_NONE && args->d_in == args->d_out) return DTRAIN_OK;
    return dtrain_cuda_each(device, "activation_backward", op, args->rows * args->n, aligned);
}

static dtrain_result dtrain_cuda_activation_backward(dtrain_device *device,
                                                     const dtrain_activation_backward_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("activation_backward", args->dtype));
    if (args->activation > DTRAIN_ACTIVATION_SILU)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "activation_backward: activation is %u, which is not a "
                           "dtrain_activation",
                           (unsigned)args->activation);
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_activation_backward_as)(device, args);
}
