/* Optimizers: AdamW, SGD, Lion, the elementwise stages of Muon; many tensors
 *
 * One launch updates many tensors: the kernel's parameters (at most 4 KiB) contain a table of up to
 * 60 tensors; more tensors take more launches. A block finds its tensor by its number and updates
 * 8192 elements of it:
 *
 *     blocks   | 0 1 2 3 4 | 5 6 | 7 | 8 9 10 ...
 *     tensors  | wte       | wpe | b | qkv              first block of each: 0, 5, 7, 8
 *
 * Bytes an element: AdamW reads value, grad, m, v and writes value, m, v: 28; Lion and SGD with
 * momentum 20; Muon 16, 8 and 12 in its three stages. Multiply-adds are fused where the CPU device
 * fuses them. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"

#include <math.h>

enum {
    DTRAIN_CUDA_TABLE_TENSORS = 60,
    DTRAIN_CUDA_UPDATE_THREADS = 256,
    DTRAIN_CUDA_UPDATE_ELEMENTS = 8192 /* of a block */
};

struct dtrain_cuda_tensor {
    float *value;
    const float *grad;
    float *m, *v;
    int64_t count;
    float weight_decay;
    uint32_t aligned;     /* all pointers */
    uint32_t first_block; /* of this launch */
};

struct dtrain_cuda_tensors {
    int count;
    const dtrain_step_scalars *scalars;
    dtrain_cuda_tensor at[DTRAIN_CUDA_TABLE_TENSORS];
};

/* ---- Rules: the update of one element ---------------------------------------------------------*/

struct dtrain_cuda_adamw_rule {
    float lr, beta1, beta2, epsilon, correction1, correction2, grad_scale, lr_scale;

    __device__ void resolve(const dtrain_step_scalars &scalars)
    {
        lr = scalars.lr * lr_scale;
        correction1 = scalars.correction1;
        correction2 = scalars.correction2;
        grad_scale = scalars.grad_scale;
    }
    /* Update one element. lr / correction1 is one factor, and v is scaled under the root, as on the
     * CPU. */
    __device__ void step(float weight_decay, float grad, float &value, float &m, float &v) const
    {
        const float decay = __fmaf_rn(-lr, weight_decay, 1.0f);
        const float g = grad * grad_scale;
        m = __fmaf_rn(1 - beta1, g, beta1 * m);
        v = __fmaf_rn((1 - beta2) * g, g, beta2 * v);
        const float root = sqrtf(v * (1 / correction2)) + epsilon;
        value = __fmaf_rn(value, decay, -((lr / correction1) * m / root));
    }
};

struct dtrain_cuda_sgd_rule {
    float lr, momentum, grad_scale, lr_scale;
    bool nesterov, first;

    __device__ void resolve(const dtrain_step_scalars &scalars)
    {
        lr = scalars.lr * lr_scale;
        grad_scale = scalars.grad_scale;
    }
    /* Update one element. Without momentum `buffer` comes in as 0 and is not stored. */
    __device__ void step(float weight_decay, float grad, float &value, float &buffer, float &) const
    {
        const float g = __fmaf_rn(weight_decay, value, grad * grad_scale);
        buffer = first ? g : __fmaf_rn(momentum, buffer, g);
        value = __fmaf_rn(-lr, nesterov ? __fmaf_rn(momentum, buffer, g) : buffer, value);
    }
};

struct dtrain_cuda_lion_rule {
    float lr, beta1, beta2, grad_scale, lr_scale;

    __device__ void resolve(const dtrain_step_scalars &scalars)
    {
        lr = scalars.lr * lr_scale;
        grad_scale = scalars.grad_scale;
    }
    __device__ void step(float weight_decay, float grad, float &value, float &m, float &) const
    {
        const float decay = __fmaf_rn(-lr, weight_decay, 1.0f);
        const float g = grad * grad_scale;
        const float mean = __fmaf_rn(1 - beta1, g, beta1 * m);
        m = __fmaf_rn(1 - beta2, g, beta2 * m);
        value = __fmaf_rn(value, decay, mean > 0 ? -lr : mean < 0 ? lr : 0);
    }
};

/* The first stage of Muon; the value is x, which is only written. */
struct dtrain_cuda_muon_momentum_rule {
    float momentum, grad_scale;
    bool nesterov;

    __device__ void resolve(const dtrain_step_scalars &scalars) { grad_scale = scalars.grad_scale; }
    __device__ void step(float, float grad, float &x, float &m, float &) const
    {
        const float g = grad * grad_scale;
        m = __fmaf_rn(momentum, m, g);
        x = nesterov ? __fmaf_rn(momentum, m, g) : m;
    }
};

/* The last one; the gradient is x. */
struct dtrain_cuda_muon_step_rule {
    float lr, scale, lr_scale;

    __device__ void resolve(const dtrain_step_scalars &scalars) { lr = scalars.lr * lr_scale; }
    __device__ void step(float weight_decay, float x, float &value, float &, float &) const
    {
        const float decay = __fmaf_rn(-lr, weight_decay, 1.0f);
        value = __fmaf_rn(-(lr * scale), x, value * decay);
    }
};

/* ---- The kernel -------------------------------------------------------------------------------*/

/* Update elements i .. i + W. */
template <int W, typename Rule>
static __device__ __forceinline__ void dtrain_cuda_update_group(const dtrain_cuda_tensor &tensor,
                                                                const Rule &rule, int64_t i)
{
    dtrain_cuda_pack<float, W> value, grad, m = {}, v = {};
    value = dtrain_cuda_load<W>(tensor.value + i);
    grad = dtrain_cuda_load<W>(tensor.grad + i);
    if (tensor.m) m = dtrain_cuda_load<W>(tensor.m + i);
    if (tensor.v) v = dtrain_cuda_load<W>(tensor.v + i);
    DTRAIN_CUDA_UNROLL
    for (int j = 0; j < W; j++)
        rule.step(tensor.weight_decay, grad.at[j], value.at[j], m.at[j], v.at[j]);
    dtrain_cuda_store(tensor.value + i, value);
    if (tensor.m) dtrain_cuda_store(tensor.m + i, m);
    if (tensor.v) dtrain_cuda_store(tensor.v + i, v);
}

/* Find the last tensor that starts at or before this block; all threads of the block find the
 * same. */
static __device__ __forceinline__ int dtrain_cuda_find_tensor(const dtrain_cuda_tensors &tensors)
{
    int low = 0, high = tensors.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (tensors.at[middle].first_block <= blockIdx.x) low = middle;
        else high = middle;
    }
    return low;
}

template <typename Rule>
static __global__ void __launch_bounds__(DTRAIN_CUDA_UPDATE_THREADS)
    dtrain_cuda_update_kernel(const dtrain_cuda_tensors tensors, Rule rule)
{
    constexpr int W = 4;
    const dtrain_cuda_tensor &tensor = tensors.at[dtrain_cuda_find_tensor(tensors)];
    const int64_t begin = (int64_t)(blockIdx.x - tensor.first_block) * DTRAIN_CUDA_UPDATE_ELEMENTS;
    const int64_t end = begin + DTRAIN_CUDA_UPDATE_ELEMENTS < tensor.count
                            ? begin + DTRAIN_CUDA_UPDATE_ELEMENTS
                            : tensor.count;
    const int64_t groups_end = tensor.aligned ? end - end % W : begin;
    if (tensors.scalars) {
        if (tensors.scalars->skip) return;
        rule.resolve(*tensors.scalars);
    }
    for (int64_t i = begin + (int64_t)threadIdx.x * W; i < groups_end; i += blockDim.x * W)
        dtrain_cuda_update_group<W>(tensor, rule, i);
    for (int64_t i = groups_end + threadIdx.x; i < end; i += blockDim.x)
        dtrain_cuda_update_group<1>(tensor, rule, i);
}

/* ---- Launching --------------------------------------------------------------------------------*/

static dtrain_result dtrain_cuda_check_tensor(const char *name, const dtrain_optimizer_tensor *from,
                                              size_t number, int moments)
{
    if ((moments > 0 && !from->m) || (moments > 1 && !from->v))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: tensor %llu has no m or no v", name,
                           (unsigned long long)number);
    return DTRAIN_OK;
}

static dtrain_cuda_tensor dtrain_cuda_tensor_of(const dtrain_optimizer_tensor *from,
                                                int64_t first_block, int moments)
{
    dtrain_cuda_tensor to = {};
    to.value = from->value;
    to.grad = from->grad;
    to.m = from->m;
    to.v = moments > 1 ? from->v : NULL;
    to.count = from->count;
    to.weight_decay = from->weight_decay;
    to.aligned = dtrain_cuda_aligned(to.value) && dtrain_cuda_aligned(to.grad) &&
                 dtrain_cuda_aligned(to.m) && dtrain_cuda_aligned(to.v);
    to.first_block = (uint32_t)first_block;
    return to;
}

/* Launch the update of a list of tensors. `tensors` lacks only the table. All tensors are checked
 * before the first one changes; moments: number of moments of each tensor. */
template <typename Rule>
static dtrain_result dtrain_cuda_update(dtrain_device *device, const char *name, const Rule &rule,
                                        const dtrain_optimizer_tensor *from, size_t count,
                                        int moments, dtrain_cuda_tensors &tensors)
{
    static_assert(sizeof tensors + sizeof rule <= 4096, "kernel parameters are limited to 4 KiB");
    int64_t blocks = 0;
    for (size_t i = 0; i < count; i++)
        DTRAIN_CUDA_TRY(dtrain_cuda_check_tensor(name, &from[i], i, moments));
    for (size_t i = 0; i < count; i++) {
        if (from[i].count > 0) {
            tensors.at[tensors.count++] = dtrain_cuda_tensor_of(&from[i], blocks, moments);
            blocks +=
                (from[i].count + DTRAIN_CUDA_UPDATE_ELEMENTS - 1) / DTRAIN_CUDA_UPDATE_ELEMENTS;
        }
        if (tensors.count == 0 || (tensors.count < DTRAIN_CUDA_TABLE_TENSORS && i + 1 < count))
            continue;
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, name, dtrain_cuda_update_kernel<Rule>, blocks,
                                        DTRAIN_CUDA_UPDATE_THREADS, 0, tensors, rule));
        tensors.count = 0;
        blocks = 0;
    }
    return DTRAIN_OK;
}

/* ---- fp64: one launch a tensor ----------------------------------------------------------------*/

struct dtrain_cuda_f64_op {
    static constexpr int width = 1;
    dtrain_optimizer_args a;
    dtrain_optimizer_tensor t;
    bool adamw;
    template <int W> struct group {
    };
    template <int W> __device__ void load(int64_t, group<W> &) const {}
    template <int W> __device__ void store(int64_t i, const group<W> &) const
    {
        const dtrain_step_scalars *s = a.scalars;
        const double lr = s ? s->lr * a.lr_scale : a.lr, decay = t.weight_decay;
        const double scale = s ? s->grad_scale : a.grad_scale;
        double &value = ((double *)t.value)[i], *m = (double *)t.m, *v = (double *)t.v;
        double g = ((const double *)t.grad)[i] * scale;
        if (s && s->skip) return;
        if (adamw) {
            const double correction1 = s ? s->correction1 : a.correction1;
            const double correction2 = s ? s->correction2 : a.correction2;
            m[i] = (double)a.beta1 * m[i] + (1 - (double)a.beta1) * g;
            v[i] = (double)a.beta2 * v[i] + (1 - (double)a.beta2) * g * g;
            const double root = sqrt(v[i] / correction2) + (double)a.epsilon;
            value = value * (1 - lr * decay) - lr / correction1 * m[i] / root;
            return;
        }
        g += decay * value;
        if (m) {
            m[i] = a.first ? g : (double)a.momentum * m[i] + g;
            g = a.nesterov ? g + (double)a.momentum * m[i] : m[i];
        }
        value -= lr * g;
    }
};

static dtrain_result dtrain_cuda_update_f64(dtrain_device *device, const char *name,
                                            const dtrain_optimizer_args *args, bool adamw)
{
    for (size_t i = 0; i < args->tensor_count; i++)
        DTRAIN_CUDA_TRY(dtrain_cuda_check_tensor(name, &args->tensors[i], i, adamw ? 2 : 0));
    for (size_t i = 0; i < args->tensor_count; i++) {
        const dtrain_cuda_f64_op op = {*args, args->tensors[i], adamw};
        DTRAIN_CUDA_TRY(dtrain_cuda_each(device, name, op, op.t.count, false));
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_adamw(dtrain_device *device, const dtrain_adamw_args *args)
{
    if (args->wide) return dtrain_cuda_update_f64(device, "adamw", args, true);
    const dtrain_cuda_adamw_rule rule = {args->lr,         args->beta1,       args->beta2,
                                         args->epsilon,    args->correction1, args->correction2,
                                         args->grad_scale, args->lr_scale};
    dtrain_cuda_tensors tensors = {};
    tensors.scalars = args->scalars;
    return dtrain_cuda_update(device, "adamw", rule, args->tensors, args->tensor_count, 2, tensors);
}

static dtrain_result dtrain_cuda_sgd(dtrain_device *device, const dtrain_sgd_args *args)
{
    if (args->wide) return dtrain_cuda_update_f64(device, "sgd", args, false);
    const dtrain_cuda_sgd_rule rule = {args->lr,       args->momentum, args->grad_scale,
                                       args->lr_scale, args->nesterov, args->first};
    dtrain_cuda_tensors tensors = {};
    tensors.scalars = args->scalars;
    return dtrain_cuda_update(device, "sgd", rule, args->tensors, args->tensor_count, 0, tensors);
}

static dtrain_result dtrain_cuda_lion(dtrain_device *device, const dtrain_lion_args *args)
{
    const dtrain_cuda_lion_rule rule = {args->lr, args->beta1, args->beta2, args->grad_scale,
                                        args->lr_scale};
    dtrain_cuda_tensors tensors = {};
    tensors.scalars = args->scalars;
    return dtrain_cuda_update(device, "lion", rule, args->tensors, args->tensor_count, 1, tensors);
}

/* ---- Muon -------------------------------------------------------------------------------------*/

/* x (count) = x / (sqrt(sum_squares[0]) + epsilon); bytes an element: 8. */
static __global__ void __launch_bounds__(DTRAIN_CUDA_UPDATE_THREADS)
    dtrain_cuda_normalize_kernel(int64_t count, float *x, const double *sum_squares, float epsilon)
{
    const float inverse = (float)(1 / (sqrt(sum_squares[0]) + (double)epsilon));
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        x[i] *= inverse;
}

static dtrain_result dtrain_cuda_muon(dtrain_device *device, const dtrain_muon_args *args)
{
    dtrain_optimizer_tensor tensor = *args->tensors;
    dtrain_cuda_tensors tensors = {};
    const int64_t blocks =
        (tensor.count + DTRAIN_CUDA_UPDATE_ELEMENTS - 1) / DTRAIN_CUDA_UPDATE_ELEMENTS;
    tensors.scalars = args->scalars;
    if (args->stage == DTRAIN_MUON_NORMALIZE)
        return DTRAIN_CUDA_RUN(device, "muon", dtrain_cuda_normalize_kernel, blocks,
                               DTRAIN_CUDA_UPDATE_THREADS, 0, tensor.count, args->x,
                               args->sum_squares, args->epsilon);
    if (args->stage == DTRAIN_MUON_MOMENTUM) {
        const dtrain_cuda_muon_momentum_rule rule = {args->momentum, args->grad_scale,
                                                     args->nesterov};
        tensor.value = args->x;
        return dtrain_cuda_update(device, "muon", rule, &tensor, 1, 1, tensors);
    }
    const dtrain_cuda_muon_step_rule rule = {args->lr, args->scale, args->lr_scale};
    tensor.grad = args->x;
    tensor.m = NULL;
    return dtrain_cuda_update(device, "muon", rule, &tensor, 1, 0, tensors);
}
