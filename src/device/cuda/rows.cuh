/* Rows of activations: softmax, rotary embedding, permuted axes
 *
 * Each kernel reads its input and writes its output once; a softmax reads its row again from the
 * caches. Types are run-time branches, see pointwise.cuh. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/elements.cuh"
#include "device/cuda/pointwise.cuh"
#include "device/cuda/tokens.cuh"

#include <math.h>

/* ---- Softmax: x (rows,n) -> y (rows,n); one block a row ---------------------------------------*/

static __global__ void __launch_bounds__(1024)
    dtrain_cuda_softmax_kernel(const dtrain_softmax_args args)
{
    __shared__ float slots[DTRAIN_CUDA_WARP];
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const int64_t begin = row * args.n, end = begin + args.n;
        float top = -INFINITY, sum = 0;
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
            top = fmaxf(top, dtrain_cuda_get_any(args.x, args.dtype, i));
        top = dtrain_cuda_block_max(top, slots);
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
            sum += expf(dtrain_cuda_get_any(args.x, args.dtype, i) - top);
        sum = dtrain_cuda_block_sum(sum, slots);
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
            dtrain_cuda_put_any(args.y, args.dtype, i,
                                expf(dtrain_cuda_get_any(args.x, args.dtype, i) - top) / sum);
    }
}

/* Compute d_x = y (d_y - sum of d_y y). */
static __global__ void __launch_bounds__(1024)
    dtrain_cuda_softmax_backward_kernel(const dtrain_softmax_backward_args args)
{
    __shared__ float slots[DTRAIN_CUDA_WARP];
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const int64_t begin = row * args.n, end = begin + args.n;
        float dot = 0;
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
            dot += dtrain_cuda_get_any(args.y, args.dtype, i) *
                   dtrain_cuda_get_any(args.d_y, args.dtype, i);
        dot = dtrain_cuda_block_sum(dot, slots);
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
            float d = dtrain_cuda_get_any(args.y, args.dtype, i) *
                      (dtrain_cuda_get_any(args.d_y, args.dtype, i) - dot);
            if (args.accumulate) d += dtrain_cuda_get_any(args.d_x, args.dtype, i);
            dtrain_cuda_put_any(args.d_x, args.dtype, i, d);
        }
    }
}

static dtrain_result dtrain_cuda_softmax(dtrain_device *device, const dtrain_softmax_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("softmax", args->dtype));
    if (args->rows <= 0 || args->n <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_RUN(device, "softmax", dtrain_cuda_softmax_kernel,
                           args->rows < INT32_MAX ? args->rows : INT32_MAX,
                           dtrain_cuda_row_threads(args->n), 0, *args);
}

static dtrain_result dtrain_cuda_softmax_backward(dtrain_device *device,
                                                  const dtrain_softmax_backward_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("softmax_backward", args->dtype));
    if (args->rows <= 0 || args->n <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_RUN(device, "softmax_backward", dtrain_cuda_softmax_backward_kernel,
                           args->rows < INT32_MAX ? args->rows : INT32_MAX,
                           dtrain_cuda_row_threads(args->n), 0, *args);
}

/* ---- Rotary embedding: x (rows, heads*d) -> y -----------------------------------------------
 *
 * Item i of a row is pair i of every head, so sine and cosine are computed once for all heads, in
 * double: at position 10000 an angle in fp32 is off by 1e-3. */

struct dtrain_cuda_rotary_op {
    static constexpr int width = 1;
    dtrain_rotary_args args;
    double ratio; /* of the angles of neighbouring pairs */
    dtrain_cuda_operand x, y;

    template <int W> struct group {
        char none;
    };
    template <int W> __device__ void load(int64_t, group<W> &) const {}

    /* Return cosine and sine of an item's angle. Inlined, the calls in it would spill registers. */
    __device__ __noinline__ float2 turn_of(int64_t item) const
    {
        const int64_t half = args.d / 2;
        double sine, cosine;
        sincos((double)(item / half % args.sequence) * pow(ratio, (double)(item % half)), &sine,
               &cosine);
        return make_float2((float)cosine, (float)sine);
    }

    /* Store y = value, or add it. */
    __device__ __forceinline__ void put(int64_t at, float value) const
    {
        float old[1] = {0};
        if (args.accumulate) y.load(at, old);
        old[0] += value;
        y.store(at, old);
    }
    template <int W> __device__ void store(int64_t item, const group<W> &) const
    {
        const float2 turn = turn_of(item);
        const int64_t half = args.d / 2, row = item / half, i = item % half;
        const float c = turn.x, s = args.inverse ? -turn.y : turn.y;
        for (int64_t head = 0; head < args.heads; head++) {
            const int64_t low = (row * args.heads + head) * args.d + i, high = low + half;
            const bool turned = head < args.rotated;
            float x1[1], x2[1];
            x.load(low, x1);
            x.load(high, x2);
            put(low, turned ? x1[0] * c - x2[0] * s : x1[0]);
            put(high, turned ? x2[0] * c + x1[0] * s : x2[0]);
        }
    }
};

static dtrain_result dtrain_cuda_rotary(dtrain_device *device, const dtrain_rotary_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("rotary", args->dtype));
    if (args->d < 2 || args->d % 2 || args->rotated > args->heads || args->sequence < 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "rotary: heads of %lld elements, %lld of %lld turned, sequences of "
                           "%lld: expected an even size, no more heads than there are, and 1 row "
                           "or more",
                           (long long)args->d, (long long)args->rotated, (long long)args->heads,
                           (long long)args->sequence);
    const dtrain_cuda_rotary_op op = {*args, pow((double)args->theta, -2.0 / (double)args->d),
                                      dtrain_cuda_operand_of(args->x, args->dtype),
                                      dtrain_cuda_operand_of(args->y, args->dtype)};
    return dtrain_cuda_each(device, "rotary", op, args->rows * (args->d / 2), false);
}

/* ---- Permuted axes ----------------------------------------------------------------------------*/

struct dtrain_cuda_permute_op {
    static constexpr int width = 1;
    dtrain_permute_args args;
    dtrain_cuda_operand x, y;

    template <int W> struct group {
        float x[W], y[W];
    };
    template <int W> __device__ void load(int64_t at, group<W> &g) const
    {
        int64_t from = 0, rest = at;
        for (int axis = 3; axis >= 0; axis--) {
            from += rest % args.shape[axis] * args.step[axis];
            rest /= args.shape[axis];
        }
        x.load(from, g.x);
        if (args.accumulate) y.load(at, g.y);
    }
    template <int W> __device__ void store(int64_t at, const group<W> &g) const
    {
        float sum[W];
        for (int j = 0; j < W; j++) sum[j] = args.accumulate ? g.y[j] + g.x[j] : g.x[j];
        y.store(at, sum);
    }
};

static dtrain_result dtrain_cuda_permute(dtrain_device *device, const dtrain_permute_args *args)
{
    const int64_t *shape = args->shape;
    const dtrain_cuda_permute_op op = {*args, dtrain_cuda_operand_of(args->x, args->dtype),
                                       dtrain_cuda_operand_of(args->y, args->dtype)};
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("permute", args->dtype));
    return dtrain_cuda_each(device, "permute", op, shape[0] * shape[1] * shape[2] * shape[3],
                            false);
}
