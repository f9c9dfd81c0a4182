/* Functions of single elements: activations, gated products, losses
 *
 * The functions, which products and sums of columns also use, and the two elementwise kernels.
 * Bytes of an element: two reads and one write forward; three reads and two writes backward, and a
 * read of each gradient that is added to. The types are run-time branches, the same in all threads:
 * three types of three operands would be 27 kernels. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/elements.cuh"

#include <math.h>

/* ---- Activations ------------------------------------------------------------------------------*/

/* Apply an activation. GELU is x / (1 + e^-2u) with u = A (x + B x^3): no cancellation for negative
 * x. Beyond +-9 the divisor is 1, or so large that 0 remains, and e^-2u is still finite at 9. SiLU
 * is x / (1 + e^-x), where an infinite divisor gives the right 0. */
static __device__ __forceinline__ float dtrain_cuda_activate(uint32_t activation, float x)
{
    if (activation == DTRAIN_ACTIVATION_RELU) return x < 0 ? 0.0f : x;
    if (activation == DTRAIN_ACTIVATION_SILU) return x / (1 + expf(-x));
    if (activation != DTRAIN_ACTIVATION_GELU) return x;
    const float a = 0.797884561f, b = 0.044715f; /* a = sqrt(2/pi) */
    const float c = x > 9 ? 9.0f : x < -9 ? -9.0f : x;
    return x / (1 + expf(-2 * a * (c + b * (c * c * c))));
}

/* Compute the derivative of GELU. With u = A (x + B x^3), q = e^-2u and w = 1 / (1 + q), it is
 * dy/dx = w (1 + x q w 2u'). x is clamped to +-10, where the derivative is 0 or 1 already; a NaN
 * fails both comparisons and stays. */
static __device__ __forceinline__ float dtrain_cuda_gelu_slope(float x)
{
    const float a = 0.797884561f, b = 0.044715f; /* a = sqrt(2/pi) */
    x = x > 10 ? 10.0f : x < -10 ? -10.0f : x;
    const float q = expf(-2 * a * (x + b * (x * x * x)));
    const float w = 1 / (1 + q);
    return w * (1 + x * (2 * a + 6 * a * b * (x * x)) * (q * w));
}

/* Compute the derivative of SiLU: with q = e^-x and s = 1 / (1 + q) it is s (1 + x q s). Clamped to
 * -80, where it is below 1e-32: q stays finite. */
static __device__ __forceinline__ float dtrain_cuda_silu_slope(float x)
{
    x = x < -80 ? -80.0f : x;
    const float q = expf(-x), s = 1 / (1 + q);
    return s * (1 + x * (q * s));
}

/* Turn d_out into d_in. The slope of relu at 0 is 0. */
static __device__ __forceinline__ float dtrain_cuda_deactivate(uint32_t activation, float x,
                                                               float d_out)
{
    if (activation == DTRAIN_ACTIVATION_GELU) return d_out * dtrain_cuda_gelu_slope(x);
    if (activation == DTRAIN_ACTIVATION_SILU) return d_out * dtrain_cuda_silu_slope(x);
    return activation == DTRAIN_ACTIVATION_RELU && !(x > 0) ? 0.0f : d_out;
}

/* ---- Functions of two elements: the table of device/cpu/kernels/pointwise.h -------------------*/

static __device__ __forceinline__ float dtrain_cuda_pointwise_value(uint32_t kind, float x,
                                                                    float other)
{
    switch (kind) {
    case DTRAIN_POINTWISE_MULTIPLY: return x * other;
    case DTRAIN_POINTWISE_SWIGLU: return dtrain_cuda_activate(DTRAIN_ACTIVATION_SILU, x) * other;
    case DTRAIN_POINTWISE_SQUARED_ERROR: return (x - other) * (x - other);
    case DTRAIN_POINTWISE_LOGISTIC_LOSS:
        return (x > 0 ? x : 0) - x * other + log1pf(expf(-fabsf(x)));
    default: return dtrain_cuda_activate(kind, x);
    }
}

static __device__ __forceinline__ float dtrain_cuda_pointwise_slope_x(uint32_t kind, float x,
                                                                      float other, float d_y)
{
    switch (kind) {
    case DTRAIN_POINTWISE_MULTIPLY: return d_y * other;
    case DTRAIN_POINTWISE_SWIGLU: return d_y * other * dtrain_cuda_silu_slope(x);
    case DTRAIN_POINTWISE_SQUARED_ERROR: return d_y * (2 * (x - other));
    case DTRAIN_POINTWISE_LOGISTIC_LOSS: return d_y * (1 / (1 + expf(-x)) - other);
    default: return dtrain_cuda_deactivate(kind, x, d_y);
    }
}

static __device__ __forceinline__ float dtrain_cuda_pointwise_slope_other(uint32_t kind, float x,
                                                                          float other, float d_y)
{
    switch (kind) {
    case DTRAIN_POINTWISE_MULTIPLY: return d_y * x;
    case DTRAIN_POINTWISE_SWIGLU: return d_y * dtrain_cuda_activate(DTRAIN_ACTIVATION_SILU, x);
    case DTRAIN_POINTWISE_SQUARED_ERROR: return d_y * (2 * (other - x));
    default: return -d_y * x;
    }
}

/* ---- Kernels ----------------------------------------------------------------------------------*/

/* An operand of a type known at run time; data NULL: no operand. */
struct dtrain_cuda_operand {
    void *data;
    uint32_t dtype;

    template <int W> __device__ __forceinline__ void load(int64_t i, float (&to)[W]) const
    {
        if (dtype == DTRAIN_DTYPE_BF16) load_as<dtrain_cuda_bf16>(i, to);
        else if (dtype == DTRAIN_DTYPE_F16) load_as<dtrain_cuda_f16>(i, to);
        else load_as<float>(i, to);
    }
    template <int W> __device__ __forceinline__ void store(int64_t i, const float (&from)[W]) const
    {
        if (dtype == DTRAIN_DTYPE_BF16) store_as<dtrain_cuda_bf16>(i, from);
        else if (dtype == DTRAIN_DTYPE_F16) store_as<dtrain_cuda_f16>(i, from);
        else store_as<float>(i, from);
    }
    template <typename T, int W>
    __device__ __forceinline__ void load_as(int64_t i, float (&to)[W]) const
    {
        const dtrain_cuda_pack<T, W> pack = dtrain_cuda_load<W>((const T *)data + i);
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) to[j] = dtrain_cuda_widen(pack.at[j]);
    }
    template <typename T, int W>
    __device__ __forceinline__ void store_as(int64_t i, const float (&from)[W]) const
    {
        dtrain_cuda_pack<T, W> pack;
        dtrain_cuda_narrow(from, pack);
        dtrain_cuda_store((T *)data + i, pack);
    }
};

static dtrain_cuda_operand dtrain_cuda_operand_of(const void *data, dtrain_dtype dtype)
{
    const dtrain_cuda_operand operand = {(void *)(uintptr_t)data, (uint32_t)dtype};
    return operand;
}

struct dtrain_cuda_pointwise_op {
    static constexpr int width = 4; /* 16 bytes of fp32, 8 of a half */
    uint32_t kind;
    dtrain_cuda_operand x, other, y;

    template <int W> struct group {
        float x[W], other[W];
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        x.load(i, g.x);
        if (other.data) other.load(i, g.other);
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        float value[W];
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++)
            value[j] = dtrain_cuda_pointwise_value(kind, g.x[j], g.other[j]);
        y.store(i, value);
    }
};

struct dtrain_cuda_pointwise_backward_op {
    static constexpr int width = 4;
    uint32_t kind;
    dtrain_cuda_operand x, other, d_y, d_x, d_other;
    bool accumulate_x, accumulate_other;

    template <int W> struct group {
        float x[W], other[W], d_y[W], d_x[W], d_other[W];
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        x.load(i, g.x);
        d_y.load(i, g.d_y);
        if (other.data) other.load(i, g.other);
        if (d_x.data && accumulate_x) d_x.load(i, g.d_x);
        if (d_other.data && accumulate_other) d_other.load(i, g.d_other);
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        float d[W];
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) {
            d[j] = dtrain_cuda_pointwise_slope_x(kind, g.x[j], g.other[j], g.d_y[j]);
            if (accumulate_x) d[j] += g.d_x[j];
        }
        if (d_x.data) d_x.store(i, d);
        if (!d_other.data) return;
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) {
            d[j] = dtrain_cuda_pointwise_slope_other(kind, g.x[j], g.other[j], g.d_y[j]);
            if (accumulate_other) d[j] += g.d_other[j];
        }
        d_other.store(i, d);
    }
};

/* Check that the kind and the types are known, and that `other` is there exactly if the function
 * has it. */
static dtrain_result dtrain_cuda_check_pointwise(uint32_t kind, const void *other,
                                                 dtrain_dtype x_dtype, dtrain_dtype other_dtype,
                                                 dtrain_dtype y_dtype)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("pointwise, x_dtype", x_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("pointwise, y_dtype", y_dtype));
    if (other) DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("pointwise, other_dtype", other_dtype));
    if (kind < DTRAIN_POINTWISE_RELU || kind > DTRAIN_POINTWISE_LOGISTIC_LOSS)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "pointwise: kind is %u, which is not a dtrain_pointwise",
                           (unsigned)kind);
    if ((kind >= DTRAIN_POINTWISE_MULTIPLY) != (other != NULL))
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT, "pointwise: kind %u is a function of %s, found other %s NULL",
            (unsigned)kind, other ? "one argument" : "two arguments", other ? "not" : "=");
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_pointwise(dtrain_device *device, const dtrain_pointwise_args *args)
{
    const dtrain_cuda_pointwise_op op = {args->kind, dtrain_cuda_operand_of(args->x, args->x_dtype),
                                         dtrain_cuda_operand_of(args->other, args->other_dtype),
                                         dtrain_cuda_operand_of(args->y, args->y_dtype)};
    DTRAIN_CUDA_TRY(dtrain_cuda_check_pointwise(args->kind, args->other, args->x_dtype,
                                                args->other_dtype, args->y_dtype));
    return dtrain_cuda_each(device, "pointwise", op, args->count,
                            dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->other) &&
                                dtrain_cuda_aligned(args->y));
}

static dtrain_result dtrain_cuda_pointwise_backward(dtrain_device *device,
                                                    const dtrain_pointwise_backward_args *args)
{
    const dtrain_cuda_pointwise_backward_op op = {
        args->kind,
        dtrain_cuda_operand_of(args->x, args->x_dtype),
        dtrain_cuda_operand_of(args->other, args->other_dtype),
        dtrain_cuda_operand_of(args->d_y, args->y_dtype),
        dtrain_cuda_operand_of(args->d_x, args->x_dtype),
        dtrain_cuda_operand_of(args->d_other, args->other_dtype),
        args->accumulate_x,
        args->accumulate_other};
    DTRAIN_CUDA_TRY(dtrain_cuda_check_pointwise(args->kind, args->other, args->x_dtype,
                                                args->other_dtype, args->y_dtype));
    if (args->d_other && !args->other)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "pointwise_backward: kind %u has no second argument, expected d_other = "
                           "NULL",
                           (unsigned)args->kind);
    const bool aligned = dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->other) &&
                         dtrain_cuda_aligned(args->d_y) && dtrain_cuda_aligned(args->d_x) &&
                         dtrain_cuda_aligned(args->d_other);
    return dtrain_cuda_each(device, "pointwise_backward", op, args->count, aligned);
}
