/* simulate_kernels.h: the kernels of layers on the virtual device, so that a program's own loss, backward and trainer
 * run on it. Include it behind dtrain.h.
 *
 * A kernel takes the longer of flops / rate and bytes / bandwidth, and what any call costs. Bytes are of arrays read
 * and written once. What elementary functions cost beside memory is in FUNCTION_FLOPS.
 *
 * The largest product and the largest convolution are kept: whoever wants to know the rate of a machine for this
 * model times those (tools/plan/machine.h). */
#ifndef SIMULATE_KERNELS_H
#define SIMULATE_KERNELS_H

#include "tools/simulate/simulate_device.h"

/* exp and its like are polynomials of about ten terms, at a fraction of a product's rate. */
#define FUNCTION_FLOPS 100.0

static struct sim_layers {
    double call_seconds;                 /* of any kernel */
    double products, others;             /* seconds of the compute stream */
    double flops;                        /* of products */
    double largest_gemm, largest_conv2d; /* flops */
    double backward_cost;                /* of a convolution's flops, in those of forward; 0: 1 */
    dtrain_gemm_args gemm;
    dtrain_conv2d_args conv2d;
} sim_layers;

static double width(dtrain_dtype type) { return (double)dtrain_dtype_bytes(type); }

static dtrain_result product(double flops, double bytes)
{
    const double before = sim.computed;
    work(flops, bytes);
    compute(sim_layers.call_seconds);
    sim_layers.products += sim.computed - before;
    sim_layers.flops += flops;
    return DTRAIN_OK;
}

static dtrain_result other(double functions, double bytes)
{
    const double before = sim.computed;
    work(FUNCTION_FLOPS * functions, bytes);
    compute(sim_layers.call_seconds);
    sim_layers.others += sim.computed - before;
    return DTRAIN_OK;
}

static dtrain_result sim_layer_gemm(dtrain_device *device, const dtrain_gemm_args *a)
{
    const double m = (double)a->m, n = (double)a->n, k = (double)a->k, flops = 2 * m * n * k;
    (void)device;
    if (flops > sim_layers.largest_gemm) sim_layers.largest_gemm = flops, sim_layers.gemm = *a;
    if (a->activation) other(m * n, 0);
    return product(flops, width(a->a_dtype) * m * k + width(a->b_dtype) * k * n +
                              width(a->c_dtype) * m * n * (a->aux ? 2 : 1));
}

/* Of images, windows and the weight of a convolution, in elements. */
static double images(const dtrain_windows2d *w)
{
    return (double)(w->batch * w->height * w->width * w->channels);
}
static double windows(const dtrain_windows2d *w, int64_t channels)
{
    return (double)(w->batch * w->out_height * w->out_width * channels);
}
static double conv2d_flops(const dtrain_windows2d *w, int64_t out_channels, int64_t groups)
{
    return 2 * windows(w, out_channels) *
           (double)(w->channels / groups * w->kernel[0] * w->kernel[1]);
}

static dtrain_result sim_conv2d(dtrain_device *device, const dtrain_conv2d_args *a)
{
    const double flops = conv2d_flops(&a->windows, a->out_channels, a->groups);
    (void)device;
    if (flops > sim_layers.largest_conv2d)
        sim_layers.largest_conv2d = flops, sim_layers.conv2d = *a;
    return product(flops,
                   width(a->dtype) * (images(&a->windows) + windows(&a->windows, a->out_channels)));
}

static dtrain_result sim_conv2d_backward(dtrain_device *device,
                                         const dtrain_conv2d_backward_args *a)
{
    const double flops = conv2d_flops(&a->windows, a->out_channels, a->groups) *
                         (sim_layers.backward_cost > 0 ? sim_layers.backward_cost : 1);
    const double each =
        width(a->dtype) * (images(&a->windows) + windows(&a->windows, a->out_channels));
    (void)device;
    return product((a->d_x ? flops : 0) + (a->d_weight ? flops : 0),
                   (a->d_x ? each : 0) + (a->d_weight ? each : 0));
}

/* Scores, and their product with values: of a causal mask half. */
static double attention_flops(const dtrain_attention_args *a)
{
    return (a->causal ? 0.5 : 1) * 4 * (double)(a->batch * a->heads * a->d) *
           (double)(a->queries * a->keys);
}
static double attention_bytes(const dtrain_attention_args *a)
{
    return width(a->dtype) * (double)(a->batch * a->d) *
           (2 * (double)(a->queries * a->heads) + 2 * (double)(a->keys * a->kv_heads));
}
static double attention_scores(const dtrain_attention_args *a)
{
    return (a->causal ? 0.5 : 1) * (double)(a->batch * a->heads) * (double)(a->queries * a->keys);
}

static dtrain_result sim_attention(dtrain_device *device, const dtrain_attention_args *a)
{
    (void)device;
    other(attention_scores(a), 0);
    return product(attention_flops(a), attention_bytes(a));
}

/* Scores again, and four products where forward has two. */
static dtrain_result sim_attention_backward(dtrain_device *device,
                                            const dtrain_attention_backward_args *a)
{
    (void)device;
    other(attention_scores(&a->forward), 0);
    return product(2.5 * attention_flops(&a->forward), 2 * attention_bytes(&a->forward));
}

/* The other kernels: SIM_KERNEL(name, elementary functions, bytes), where a is the call's arguments. */
#define SIM_KERNEL(op, functions, bytes)                                              \
    static dtrain_result sim_##op(dtrain_device *device, const dtrain_##op##_args *a) \
    {                                                                                 \
        (void)device;                                                                 \
        return other(functions, bytes);                                               \
    }
#define CELLS ((double)(a->rows * a->n))
SIM_KERNEL(activation_backward, CELLS, 3 * CELLS * width(a->dtype))
#define ENTRIES ((double)(a->m * a->n))
SIM_KERNEL(bias, a->activation ? ENTRIES : 0, ENTRIES *width(a->c_dtype) * (a->aux ? 3 : 2))
#undef ENTRIES
SIM_KERNEL(layernorm, 0, CELLS *(width(a->x_dtype) * (a->sum ? 2 : 1) + 2 * width(a->y_dtype)))
SIM_KERNEL(layernorm_backward, 0, CELLS *(2 * width(a->x_dtype) + 2 * width(a->y_dtype)))
SIM_KERNEL(embedding, 0, CELLS *(8 + width(a->dtype)))
SIM_KERNEL(embedding_backward, 0, CELLS *(8 + width(a->dtype)))
SIM_KERNEL(cross_entropy, CELLS, CELLS *width(a->dtype) * (a->d_logits ? 2 : 1))
SIM_KERNEL(cross_entropy_backward, CELLS, 2 * CELLS * width(a->dtype))
SIM_KERNEL(cross_entropy_finish, (double)a->rows, 16 * (double)a->rows)
SIM_KERNEL(softmax, CELLS, 2 * CELLS * width(a->dtype))
SIM_KERNEL(softmax_backward, 0, 3 * CELLS * width(a->dtype))
SIM_KERNEL(batchnorm_moments, 0, CELLS *width(a->dtype))
SIM_KERNEL(batchnorm, 0, CELLS *width(a->dtype) * (a->residual ? 3 : 2))
SIM_KERNEL(batchnorm_sums, 0, 3 * CELLS * width(a->dtype))
SIM_KERNEL(batchnorm_backward, 0, 4 * CELLS * width(a->dtype))
#define ALL ((double)a->count)
SIM_KERNEL(pointwise, ALL, ALL *(width(a->x_dtype) + width(a->y_dtype)))
SIM_KERNEL(pointwise_backward, ALL, ALL *(2 * width(a->x_dtype) + width(a->y_dtype)))
SIM_KERNEL(dropout, ALL, 2 * ALL * width(a->dtype))
SIM_KERNEL(rotary, 2 * (double)(a->rows * a->heads * a->d),
           2 * (double)(a->rows * a->heads * a->d) * width(a->dtype))
SIM_KERNEL(permute, 0,
           2 * (double)(a->shape[0] * a->shape[1] * a->shape[2] * a->shape[3]) * width(a->dtype))
SIM_KERNEL(pool2d, 0, images(&a->windows) * width(a->dtype))
SIM_KERNEL(pool2d_backward, 0, images(&a->windows) * width(a->dtype))
#undef CELLS
#undef ALL

static dtrain_result sim_lion(dtrain_device *device, const dtrain_lion_args *a)
{
    (void)device;
    return update(a->tensors, a->tensor_count), DTRAIN_OK;
}

static dtrain_result sim_muon(dtrain_device *device, const dtrain_muon_args *a)
{
    (void)device;
    return update(a->tensors, 1), DTRAIN_OK;
}

/* The virtual device with the kernels of layers. */
static const dtrain_device_ops *sim_layer_ops(void)
{
    static dtrain_device_ops ops;
    ops = *sim_device_ops();
    /* clang-format off */
#define USE(op) ops.op = sim_##op;
    USE(conv2d)
    USE(conv2d_backward)
    USE(attention)
    USE(attention_backward)
    USE(activation_backward) USE(bias) USE(layernorm) USE(layernorm_backward) USE(embedding)
        USE(embedding_backward) USE(cross_entropy) USE(cross_entropy_backward)
            USE(cross_entropy_finish) USE(softmax)
            USE(softmax_backward) USE(batchnorm_moments) USE(batchnorm) USE(batchnorm_sums)
                USE(batchnorm_backward) USE(pointwise) USE(pointwise_backward) USE(dropout)
                    USE(rotary) USE(permute) USE(pool2d) USE(pool2d_backward) USE(lion) USE(muon)
#undef USE
        /* clang-format on */
        ops.gemm = sim_layer_gemm;
    return &ops;
}

#endif
