/* simulate_device.h: a virtual device: addresses without memory, kernels that only move a virtual clock. Include it
 * behind dtrain.h.
 *
 * How to read it: the clock -> memory -> kernels of strategies and optimizers -> the table. Kernels of layers are in
 * simulate_kernels.h, for programs that run their own. */
#ifndef SIMULATE_DEVICE_H
#define SIMULATE_DEVICE_H

#include "tools/simulate/simulate_cluster.h"

enum { INSIDE, BETWEEN, LINKS };

static struct simulation {
    cluster machine;
    double rate_scale;     /* of compute, found by --measured-rate */
    double now;            /* of the compute stream */
    double free_at[LINKS]; /* when links are free */
    double computed, communicated, exposed;
    double exposed_tensor;  /* of it, along a tensor axis */
    uint64_t sent, between; /* bytes; of them to other nodes */
    uint64_t tensor_sent;   /* beside those: along a tensor axis, and of a whole mesh */
} sim;

/* Compute runs slower while a collective holds a part of the GPU. What is queued on the links runs
 * without a gap from now on: everything in it was started before now. */
static void compute(double seconds)
{
    const double speed = 1 - sim.machine.slowdown;
    const double busy = most(0, most(sim.free_at[INSIDE], sim.free_at[BETWEEN]) - sim.now);
    const double beside = least(seconds / speed, busy);
    sim.now += beside + (seconds - beside * speed);
    sim.computed += beside + (seconds - beside * speed);
}

static void work(double flops, double bytes)
{
    const double rate = sim.machine.tflops_bf16 * 1e12 * sim.machine.efficiency;
    compute(most(flops / rate, bytes / (sim.machine.hbm_gbs * 1e9)));
}

static bool is_virtual(dtrain_device *device, const void *memory)
{
    return device->ops->is_device_memory(device, memory);
}

/* The host sees zeros. */
static dtrain_result sim_copy(dtrain_device *device, void *to, const void *from, size_t bytes,
                              dtrain_copy_kind kind)
{
    (void)from;
    if (!is_virtual(device, to)) memset(to, 0, bytes);
    if (kind == DTRAIN_COPY_DEVICE_TO_DEVICE) work(0, 2.0 * (double)bytes);
    return DTRAIN_OK;
}

static dtrain_result sim_zero(dtrain_device *device, void *memory, size_t bytes)
{
    (void)device;
    (void)memory;
    return work(0, (double)bytes), DTRAIN_OK;
}

static dtrain_result sim_add(dtrain_device *device, const dtrain_add_args *a)
{
    (void)device;
    return work(0, (double)a->count * (double)(2 * dtrain_dtype_bytes(a->x_dtype) +
                                               dtrain_dtype_bytes(a->y_dtype))),
           DTRAIN_OK;
}

static dtrain_result sim_axpby(dtrain_device *device, const dtrain_axpby_args *a)
{
    (void)device;
    return work(0, (double)a->count * 3 * (double)dtrain_dtype_bytes(a->dtype)), DTRAIN_OK;
}

static dtrain_result sim_convert(dtrain_device *device, const dtrain_convert_args *a)
{
    (void)device;
    return work(0, (double)a->count *
                       (double)(dtrain_dtype_bytes(a->x_dtype) + dtrain_dtype_bytes(a->y_dtype))),
           DTRAIN_OK;
}

static dtrain_result sim_sum(dtrain_device *device, const dtrain_sum_args *a)
{
    (void)device;
    return work(0, (double)a->count * (double)dtrain_dtype_bytes(a->dtype)), DTRAIN_OK;
}

static void update(const dtrain_optimizer_tensor *tensors, size_t count)
{
    double bytes = 0; /* value read and written, gradient read, moments read and written */
    for (size_t i = 0; i < count; i++)
        bytes += (double)tensors[i].count * (12 + (tensors[i].m ? 8 : 0) + (tensors[i].v ? 8 : 0));
    work(0, bytes);
}

static dtrain_result sim_adamw(dtrain_device *device, const dtrain_adamw_args *a)
{
    (void)device;
    return update(a->tensors, a->tensor_count), DTRAIN_OK;
}

static dtrain_result sim_sgd(dtrain_device *device, const dtrain_sgd_args *a)
{
    (void)device;
    return update(a->tensors, a->tensor_count), DTRAIN_OK;
}

/* A histogram pass that also adds to what is kept, and a pass that takes the chosen out. */
static dtrain_result sim_topk(dtrain_device *device, const dtrain_topk_args *a)
{
    (void)device;
    const double kept = a->residual ? (a->velocity ? 16 : 8) : 0;
    return work(0, (double)a->count * (4 + kept + 4) + (double)a->k * 16), DTRAIN_OK;
}

/* Every element touches a sector of 32 bytes, twice. */
static dtrain_result sim_scatter_add(dtrain_device *device, const dtrain_scatter_add_args *a)
{
    (void)device;
    return work(0, (double)a->k * (8 + 64)), DTRAIN_OK;
}

/* The plan device, and time for what a strategy and an optimizer call. */
static const dtrain_device_ops *sim_device_ops(void)
{
    static dtrain_device_ops ops;
    const dtrain_device_ops *plan;
    if (dtrain_device_ops_by_name("plan", &plan) != DTRAIN_OK) return NULL;
    ops = *plan;
    ops.name = "simulated";
    ops.copy = sim_copy;
    ops.zero = sim_zero;
    ops.add = sim_add;
    ops.axpby = sim_axpby;
    ops.convert = sim_convert;
    ops.sum = sim_sum;
    ops.adamw = sim_adamw;
    ops.sgd = sim_sgd;
    ops.topk = sim_topk;
    ops.scatter_add = sim_scatter_add;
    return &ops;
}

#endif
