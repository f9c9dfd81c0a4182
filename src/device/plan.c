/* The plan device
 *
 * Addresses without memory: an allocation is a step of a counter. Kernels do nothing, so a model
 * runs at the speed of its bookkeeping, and peak_bytes is the answer. Those that do nearly all of a
 * step's arithmetic are counted: matrix products, attention, convolutions. What checkpointing
 * computes again counts again; of attention, keys that a mask or key_lengths hide count, and those
 * behind the query of a causal one do not. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/device.h"
#include "device/device_internal.h"

typedef struct dtrain__plan_state {
    dtrain_allocator allocator;
    uintptr_t next; /* address */
    double flops;
} dtrain__plan_state;

static dtrain_result dtrain__plan_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    const dtrain_allocator allocator = dtrain__resolve_allocator(&desc->allocator);
    dtrain__plan_state *state =
        (dtrain__plan_state *)dtrain__alloc(&allocator, 1, sizeof *state, "a plan");
    if (!state) return DTRAIN_ERROR_MEMORY;
    device->state = state;
    state->allocator = allocator;
    state->next = 4096;
    return DTRAIN_OK;
}

static void dtrain__plan_destroy(dtrain_device *device)
{
    dtrain__plan_state *state = (dtrain__plan_state *)device->state;
    const dtrain_allocator allocator = state->allocator;
    dtrain__free(&allocator, state, 1, sizeof *state);
    device->state = NULL;
}

DTRAIN__PRIVATE double dtrain__plan_device_flops(const dtrain_device *device)
{
    return ((const dtrain__plan_state *)device->state)->flops;
}

static dtrain_result dtrain__plan_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    dtrain__plan_state *state = (dtrain__plan_state *)device->state;
    const uintptr_t at = state->next;
    *memory = NULL;
    if (bytes > UINTPTR_MAX - at - 128)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no addresses left for %llu bytes",
                           (unsigned long long)bytes);
    DTRAIN__TRY(dtrain_device_check_limit(device, bytes));
    *memory = (void *)at;
    state->next = at + ((uintptr_t)bytes + 64) / 64 * 64; /* 0 bytes move it as well */
    dtrain_device_account(device, &device->allocated_bytes, bytes);
    return DTRAIN_OK;
}

static void dtrain__plan_free(dtrain_device *device, void *memory, size_t bytes)
{
    if (memory) device->allocated_bytes -= bytes;
}

static dtrain_result dtrain__plan_copy(dtrain_device *device, void *to, const void *from,
                                       size_t bytes, dtrain_copy_kind kind)
{
    (void)device;
    (void)to;
    (void)from;
    (void)bytes;
    (void)kind;
    return DTRAIN_OK;
}

static dtrain_result dtrain__plan_zero(dtrain_device *device, void *memory, size_t bytes)
{
    (void)device;
    (void)memory;
    (void)bytes;
    return DTRAIN_OK;
}

static dtrain_result dtrain__plan_host_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    *memory = NULL;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "the %s device has no %zu bytes of host memory",
                       device->ops->name, bytes);
}

/* Floating-point operations of a launch. Kernels without a function have 0. */
static double dtrain__gemm_flops(const dtrain_gemm_args *args)
{
    return 2.0 * (double)args->m * (double)args->n * (double)args->k;
}

/* Two products of d elements for each pair of a query and a key that it sees: scores and values. */
static double dtrain__attention_flops(const dtrain_attention_args *args)
{
    const double keys = (double)args->keys, queries = (double)args->queries;
    double pairs = queries * keys;
    if (args->causal && queries <= keys) pairs = queries * (queries + 1) / 2;
    else if (args->causal) pairs = keys * (keys + 1) / 2 + (queries - keys) * keys;
    return 4.0 * (double)args->batch * (double)args->heads * (double)args->d * pairs;
}

/* Five products: scores again, d_v, d_scores, d_q, d_k. */
static double dtrain__attention_backward_flops(const dtrain_attention_backward_args *args)
{
    return 2.5 * dtrain__attention_flops(&args->forward);
}

static double dtrain__windows_flops(const dtrain_windows2d *w, int64_t out_channels, int64_t groups)
{
    const double taps = (double)w->kernel[0] * (double)w->kernel[1] * (double)w->channels;
    const double windows = (double)w->batch * (double)w->out_height * (double)w->out_width;
    return 2.0 * windows * taps / (double)groups * (double)out_channels;
}

static double dtrain__conv2d_flops(const dtrain_conv2d_args *args)
{
    return dtrain__windows_flops(&args->windows, args->out_channels, args->groups);
}

static double dtrain__conv2d_backward_flops(const dtrain_conv2d_backward_args *args)
{
    return ((args->d_x ? 1 : 0) + (args->d_weight ? 1 : 0)) *
           dtrain__windows_flops(&args->windows, args->out_channels, args->groups);
}

enum {
#define DTRAIN__PLAN_NUMBER(op) DTRAIN__OP_##op,
    DTRAIN__KERNEL_LIST(DTRAIN__PLAN_NUMBER)
#undef DTRAIN__PLAN_NUMBER
};

static double dtrain__kernel_flops(int op, const void *args)
{
    switch (op) {
    case DTRAIN__OP_gemm: return dtrain__gemm_flops((const dtrain_gemm_args *)args);
    case DTRAIN__OP_attention: return dtrain__attention_flops((const dtrain_attention_args *)args);
    case DTRAIN__OP_attention_backward:
        return dtrain__attention_backward_flops((const dtrain_attention_backward_args *)args);
    case DTRAIN__OP_conv2d: return dtrain__conv2d_flops((const dtrain_conv2d_args *)args);
    case DTRAIN__OP_conv2d_backward:
        return dtrain__conv2d_backward_flops((const dtrain_conv2d_backward_args *)args);
    default: return 0;
    }
}

#define DTRAIN__PLAN_KERNEL(op)                                                                   \
    static dtrain_result dtrain__plan_##op(dtrain_device *device, const dtrain_##op##_args *args) \
    {                                                                                             \
        ((dtrain__plan_state *)device->state)->flops +=                                           \
            dtrain__kernel_flops(DTRAIN__OP_##op, args);                                          \
        return DTRAIN_OK;                                                                         \
    }
DTRAIN__KERNEL_LIST(DTRAIN__PLAN_KERNEL)
#undef DTRAIN__PLAN_KERNEL

DTRAIN_API const dtrain_device_ops *dtrain_plan_device_ops(void)
{
#define DTRAIN__PLAN_ENTRY(op) dtrain__plan_##op,
    static const dtrain_device_ops ops = {DTRAIN_DEVICE_ABI,
                                          "plan",
                                          false,
                                          dtrain__plan_create,
                                          dtrain__plan_destroy,
                                          NULL,
                                          dtrain__cpu_synchronize,
                                          dtrain__plan_alloc,
                                          dtrain__plan_free,
                                          dtrain__plan_copy,
                                          dtrain__plan_zero,
                                          dtrain__plan_host_alloc,
                                          dtrain__plan_free,
                                          NULL,
                                          NULL,
                                          dtrain__cpu_copy_async,
                                          DTRAIN__NO_ORDER,
                                          DTRAIN__KERNEL_LIST(DTRAIN__PLAN_ENTRY)};
#undef DTRAIN__PLAN_ENTRY
    return &ops;
}
