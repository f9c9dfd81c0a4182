/* A device's functions for other rooms. */

#pragma once

#include "core/platform_internal.h"
#include "device/backend.h"

/* device/cpu/cpu.c, device/plan.c: the tables */
DTRAIN__PRIVATE const dtrain_device_ops *dtrain__cpu_device_ops(void);
DTRAIN__PRIVATE const dtrain_device_ops *dtrain__plan_device_ops(void);

/* device/device.c */
DTRAIN__PRIVATE bool dtrain__on_host(dtrain_device *device, const void *memory);

/* Tell whether the device's work is recorded in a graph. */
static inline bool dtrain__capturing(dtrain_device *device)
{
    return device->ops->capturing && device->ops->capturing(device);
}

/* The kernels in the order of dtrain_device_ops. L: of layers and Muon, of ring 3, models. */
/* clang-format off */
#define DTRAIN__KERNEL_LIST(X, L)                                                            \
    L(gemm) L(activation_backward) L(bias) L(layernorm) L(layernorm_backward) L(embedding)   \
    L(embedding_backward) L(attention) L(attention_backward) L(cross_entropy)                \
    L(cross_entropy_backward) L(cross_entropy_finish) L(pointwise) L(pointwise_backward)     \
    L(softmax) L(softmax_backward) L(rotary) L(permute) X(add) X(axpby) L(dropout) X(sum)    \
    X(clip) X(convert) X(adamw) X(sgd) X(lion) L(muon) X(topk) X(scatter_add)                \
    L(batchnorm_moments) L(batchnorm_statistics) L(batchnorm) L(batchnorm_sums)              \
    L(batchnorm_backward) L(conv2d) L(conv2d_backward) L(pool2d) L(pool2d_backward)
/* clang-format on */

/* The table of a device that has finished its work when a call returns: no streams, events or
 * graphs. Its functions are dtrain__<name>_create and so on, its kernels entry(op) of each. */
#define DTRAIN__HOST_TABLE(name, host_memory, query, host_free, is_device_memory, entry)          \
    {                                                                                             \
        DTRAIN_DEVICE_ABI, #name, host_memory, dtrain__##name##_create, dtrain__##name##_destroy, \
            query, dtrain__cpu_synchronize, dtrain__##name##_alloc, dtrain__##name##_free,        \
            dtrain__##name##_copy, dtrain__##name##_zero, dtrain__##name##_host_alloc, host_free, \
            NULL, NULL, dtrain__cpu_copy_async, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,   \
            is_device_memory, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,               \
            DTRAIN__KERNEL_LIST(entry, entry)                                                     \
    }

/* Call an entry of the table; NULL = nothing to do. */
#define DTRAIN__ORDER(device, entry, ...) \
    ((device)->ops->entry ? (device)->ops->entry((device), __VA_ARGS__) : DTRAIN_OK)

/* Inputs of several ranks, combined in order into equal outputs. */
typedef struct dtrain__mix_job {
    const char *const *in; /* (in_count), 2 or more */
    char *const *out;      /* (out_count) */
    int in_count, out_count;
    size_t count; /* elements */
    dtrain_dtype dtype;
    uint32_t op; /* dtrain_reduce_op */
} dtrain__mix_job;

/* Combine them. */
DTRAIN__PRIVATE void dtrain__mix(const dtrain__mix_job *job);
