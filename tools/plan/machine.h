/* machine.h: how fast this machine is, for forecasts: measured in a fraction of a second, or assumed and said so.
 *
 *     products    the largest product, or convolution with its gradients, of the model, cut to some milliseconds
 *     memory      y = x + y over arrays that no cache of a core holds
 *     a call      the same over 16 elements
 *     links       an all-reduce between two ranks here; between nodes what --emulate says, or an assumption */
#ifndef PLAN_MACHINE_H
#define PLAN_MACHINE_H

#include "tools/run/run.h"
#include "tools/simulate/simulate_kernels.h"

/* What is assumed of a network that nobody has described: 10 Gb/s Ethernet. */
#define ASSUMED_GBPS 10.0
#define ASSUMED_US 50.0

typedef struct machine_rates {
    double flops, bytes, call_seconds, link_bytes; /* a second; link_bytes 0: not measured */
    char product[80];                              /* that was timed */
} machine_rates;

/* A call that can be repeated. */
typedef dtrain_result (*timed_fn)(dtrain_device *device, const void *args);

static dtrain_result call_gemm(dtrain_device *device, const void *args)
{
    return device->ops->gemm(device, (const dtrain_gemm_args *)args);
}
static dtrain_result call_conv2d(dtrain_device *device, const void *args)
{
    return device->ops->conv2d(device, (const dtrain_conv2d_args *)args);
}
static dtrain_result call_conv2d_backward(dtrain_device *device, const void *args)
{
    return device->ops->conv2d_backward(device, (const dtrain_conv2d_backward_args *)args);
}
static dtrain_result call_axpby(dtrain_device *device, const void *args)
{
    return device->ops->axpby(device, (const dtrain_axpby_args *)args);
}

/* Find the shortest of at least five calls, in 0.08 s or little more; others on the machine only make calls longer. */
static dtrain_result time_call(dtrain_device *device, timed_fn call, const void *args,
                               double *seconds)
{
    const double begin = dtrain_seconds();
    dtrain_result result = DTRAIN_OK;
    *seconds = 1e30;
    for (int i = 0; i < 6 || dtrain_seconds() - begin < 0.08; i++) {
        const double start = dtrain_seconds();
        TRY(call(device, args));
        TRY(device->ops->synchronize(device));
        const double took = dtrain_seconds() - start;
        if (i && took < *seconds) *seconds = took; /* the first one warms up */
    }
cleanup:
    return result;
}

enum { OPERANDS = 5 };

/* Give arrays, zeroed, to a call and time it. */
static dtrain_result time_arrays(dtrain_device *device, timed_fn call, void *args,
                                 const void **places[OPERANDS], const size_t *bytes,
                                 double *seconds)
{
    void *memory[OPERANDS] = {NULL};
    dtrain_result result = DTRAIN_OK;
    for (int i = 0; i < OPERANDS; i++) {
        if (!bytes[i]) continue;
        TRY(device->ops->alloc(device, bytes[i], &memory[i]));
        TRY(device->ops->zero(device, memory[i], bytes[i]));
        *places[i] = memory[i];
    }
    TRY(time_call(device, call, args, seconds));
cleanup:
    for (int i = 0; i < OPERANDS; i++)
        if (memory[i]) device->ops->free(device, memory[i], bytes[i]);
    return result;
}

/* More work than this, some milliseconds of one core, is cut: rows of a product, images of a convolution. */
#define TIMED_FLOPS 3e8

static dtrain_result time_gemm(dtrain_device *device, dtrain_gemm_args a, machine_rates *rates)
{
    const uint32_t turned = DTRAIN_GEMM_TRANS_A | DTRAIN_GEMM_TRANS_B;
    const double row = 2 * (double)a.n * (double)a.k;
    double seconds;
    if (row * (double)a.m > TIMED_FLOPS && a.m > 64)
        a.m = row * 64 > TIMED_FLOPS ? 64 : (int64_t)(TIMED_FLOPS / row);
    a.flags &= turned;
    a.lda = a.flags & DTRAIN_GEMM_TRANS_A ? a.m : a.k;
    a.ldb = a.flags & DTRAIN_GEMM_TRANS_B ? a.k : a.n;
    a.ldc = a.n;
    a.bias = a.bias_grad = NULL;
    a.aux = NULL;
    a.activation = DTRAIN_ACTIVATION_NONE;
    a.alpha = 1, a.beta = 0;
    const void **places[OPERANDS] = {&a.a, &a.b, (const void **)(uintptr_t)&a.c, NULL, NULL};
    const size_t bytes[OPERANDS] = {(size_t)(a.m * a.k) * dtrain_dtype_bytes(a.a_dtype),
                                    (size_t)(a.k * a.n) * dtrain_dtype_bytes(a.b_dtype),
                                    (size_t)(a.m * a.n) * dtrain_dtype_bytes(a.c_dtype), 0, 0};
    const dtrain_result result = time_arrays(device, call_gemm, &a, places, bytes, &seconds);
    rates->flops = row * (double)a.m / seconds;
    snprintf(rates->product, sizeof rates->product, "a product %lld x %lld x %lld, %s",
             (long long)a.m, (long long)a.k, (long long)a.n,
             a.a_dtype == DTRAIN_DTYPE_F32 ? "fp32" : "16 bits");
    return result;
}

/* Time both gradients of a convolution whose arrays have these bytes. */
static dtrain_result time_conv2d_backward(dtrain_device *device, const dtrain_conv2d_args *forward,
                                          const size_t *forward_bytes, double *seconds)
{
    dtrain_conv2d_backward_args a;
    memset(&a, 0, sizeof a);
    a.windows = forward->windows;
    a.out_channels = forward->out_channels;
    a.groups = forward->groups;
    a.dtype = forward->dtype;
    a.x_dtype = forward->dtype;
    const size_t whole = forward_bytes[1] / dtrain_dtype_bytes(a.dtype) * sizeof(float);
    const void **places[OPERANDS] = {&a.x, &a.weight, &a.d_y, (const void **)(uintptr_t)&a.d_x,
                                     (const void **)(uintptr_t)&a.d_weight};
    const size_t bytes[OPERANDS] = {forward_bytes[0], forward_bytes[1], forward_bytes[2],
                                    forward_bytes[0], whole};
    return time_arrays(device, call_conv2d_backward, &a, places, bytes, seconds);
}

static dtrain_result time_conv2d(dtrain_device *device, dtrain_conv2d_args a, machine_rates *rates)
{
    dtrain_windows2d *w = &a.windows;
    const double image = conv2d_flops(w, a.out_channels, a.groups) / (double)w->batch;
    double seconds, backward_seconds = 0;
    if (image * (double)w->batch > TIMED_FLOPS)
        w->batch = image > TIMED_FLOPS ? 1 : (int64_t)(TIMED_FLOPS / image);
    a.bias = NULL;
    const size_t unit = dtrain_dtype_bytes(a.dtype);
    const void **places[OPERANDS] = {&a.x, &a.weight, (const void **)(uintptr_t)&a.y, NULL, NULL};
    const size_t bytes[OPERANDS] = {
        (size_t)images(w) * unit,
        (size_t)(a.out_channels * w->channels / a.groups * w->kernel[0] * w->kernel[1]) * unit,
        (size_t)windows(w, a.out_channels) * unit, 0, 0};
    dtrain_result result = time_arrays(device, call_conv2d, &a, places, bytes, &seconds);
    if (result == DTRAIN_OK) result = time_conv2d_backward(device, &a, bytes, &backward_seconds);
    rates->flops = image * (double)w->batch / seconds;
    sim_layers.backward_cost = backward_seconds / 2 / seconds; /* it has two products */
    snprintf(rates->product, sizeof rates->product,
             "a convolution %lld x %lld of %lld channels, %lld images of %lld x %lld",
             (long long)w->kernel[0], (long long)w->kernel[1], (long long)w->channels,
             (long long)w->batch, (long long)w->height, (long long)w->width);
    return result;
}

static dtrain_result time_memory(dtrain_device *device, int64_t count, double *seconds)
{
    dtrain_axpby_args a;
    memset(&a, 0, sizeof a);
    a.count = count;
    a.accumulate = true;
    a.a = a.b = 1;
    a.dtype = DTRAIN_DTYPE_F32;
    const void **places[OPERANDS] = {&a.x, (const void **)(uintptr_t)&a.y, NULL, NULL, NULL};
    const size_t bytes[OPERANDS] = {(size_t)count * 4, (size_t)count * 4, 0, 0, 0};
    return time_arrays(device, call_axpby, &a, places, bytes, seconds);
}

/* Take as the rate of products, of which the forward one has been timed, the mean of the three that a step has: which
 * operand is turned decides what widening costs. None is faster than in fp32. */
static dtrain_result time_gradients(dtrain_device *device, machine_rates *rates)
{
    dtrain_gemm_args a = sim_layers.gemm;
    const machine_rates forward = *rates;
    double inverse = 1 / rates->flops;
    dtrain_result result = DTRAIN_OK;
    for (int i = 0; i < 2; i++) {
        a.flags = i ? DTRAIN_GEMM_TRANS_A : 0; /* the gradients of the input and of the weight */
        if (i) a.c_dtype = DTRAIN_DTYPE_F32;
        TRY(time_gemm(device, a, rates));
        inverse += 1 / rates->flops;
    }
    a = sim_layers.gemm;
    a.a_dtype = a.b_dtype = a.c_dtype = DTRAIN_DTYPE_F32;
    TRY(time_gemm(device, a, rates));
    inverse = inverse > 3 / rates->flops ? inverse : 3 / rates->flops;
    *rates = forward;
    rates->flops = 3 / inverse;
cleanup:
    return result;
}

/* ---- links inside this machine ---------------------------------------------------------------------- */

enum { LINK_ELEMENTS = 1 << 18, LINK_ROUNDS = 12 };

static int time_link_rank(dtrain_world *world, void *user)
{
    double *seconds = (double *)user, least_yet = 1e30; /* (1), of the process that launches */
    dtrain_comm *comm = dtrain_world_comm(world);
    float *values = (float *)calloc(LINK_ELEMENTS, sizeof *values);
    dtrain_result result = values ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    for (int i = 0; i < LINK_ROUNDS && result == DTRAIN_OK; i++) {
        const double start = dtrain_seconds();
        result = dtrain_all_reduce(comm, values, values, LINK_ELEMENTS, DTRAIN_DTYPE_F32,
                                   DTRAIN_REDUCE_SUM, NULL);
        least_yet = least(least_yet, dtrain_seconds() - start);
    }
    if (dtrain_world_rank(world) == 0) *seconds = least_yet;
    free(values);
    return result == DTRAIN_OK ? 0 : 1;
}

/* Ranks that are threads use the same communicator as those that are processes. */
static dtrain_result time_links(double *link_bytes)
{
    dtrain_launch_desc launch;
    double seconds = 1e30;
    memset(&launch, 0, sizeof launch);
    launch.rank_count = 2;
    launch.threads_per_rank = 1;
    launch.mode = DTRAIN_LAUNCH_THREADS;
    const dtrain_result result = dtrain_launch(&launch, time_link_rank, &seconds, NULL);
    const group two = {2, 1};
    *link_bytes = ring_factor(DTRAIN_COLLECTIVE_ALL_REDUCE, two.size) * LINK_ELEMENTS *
                  sizeof(float) / seconds;
    return result;
}

/* ---- all of it ---------------------------------------------------------------------------------------- */

/* Time what the model's step consists of, on a device as a rank will have it. The virtual device has met the model's
 * largest calls before. */
static dtrain_result measure_machine(const run_settings *s, uint32_t threads, machine_rates *rates)
{
    dtrain_device_desc desc;
    dtrain_device *device = NULL;
    const dtrain_device_ops *ops;
    double seconds = 1;
    dtrain_result result = DTRAIN_OK;
    memset(&desc, 0, sizeof desc);
    memset(rates, 0, sizeof *rates);
    desc.thread_count = threads;
    desc.math = s->precision == TF32 ? DTRAIN_MATH_TF32 : DTRAIN_MATH_DEFAULT;
    TRY(dtrain_device_ops_by_name(s->device, &ops));
    TRY(dtrain_device_create(ops, &desc, &device));
    if (sim_layers.largest_conv2d > sim_layers.largest_gemm)
        TRY(time_conv2d(device, sim_layers.conv2d, rates));
    else {
        TRY(time_gemm(device, sim_layers.gemm, rates));
        if (widens(device, s)) TRY(time_gradients(device, rates));
    }
    TRY(time_memory(device, 1 << 20, &seconds));
    rates->bytes = 12.0 * (1 << 20) / seconds; /* two are read, one is written */
    TRY(time_memory(device, 16, &rates->call_seconds));
    if (ops->host_memory && !s->emulate && time_links(&rates->link_bytes) != DTRAIN_OK)
        rates->link_bytes = 0; /* under a launcher, whose rank this is: memory's rate is assumed */
cleanup:
    dtrain_device_destroy(device);
    return result;
}

#endif /* PLAN_MACHINE_H */
