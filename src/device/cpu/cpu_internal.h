/* The CPU device's state
 *
 * The CPU device's state, and the functions that its launchers use. */

#pragma once

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/gemm_internal.h"
#include "device/cpu/kernels_internal.h"
#include "device/cpu/pool_internal.h"
#include "device/device.h"

typedef struct dtrain__cpu {
    dtrain_allocator allocator;
    dtrain__pool *pool;
    int thread_count;
    const dtrain__kernels *kernels;
    dtrain__gemm_workspace gemm;
    float *scratch; /* of attention, layernorm backward, cblas; grows in the first step */
    size_t scratch_bytes;
    double sums[DTRAIN__SUM_CHUNKS];
} dtrain__cpu;

/* Every kernel in the order of dtrain_device_ops. */
/* clang-format off */
#define DTRAIN__KERNEL_LIST(X)                                                               \
    X(gemm) X(activation_backward) X(layernorm) X(layernorm_backward)                        \
    X(embedding) X(embedding_backward) X(attention) X(attention_backward)                    \
    X(cross_entropy) X(cross_entropy_backward) X(add) X(axpby) X(dropout)                    \
    X(sum) X(clip) X(convert) X(adamw) X(sgd) X(topk) X(scatter_add)      \
    X(orthogonalize)
/* clang-format on */

/* device/cpu/cpu.c */
DTRAIN__PRIVATE int64_t dtrain__multiple(int64_t value, int64_t unit);
DTRAIN__PRIVATE void *dtrain__aligned_alloc(const dtrain_allocator *allocator, size_t bytes);
DTRAIN__PRIVATE void dtrain__aligned_free(const dtrain_allocator *allocator, void *memory,
                                          size_t bytes);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_scratch(dtrain__cpu *cpu, dtrain__job *job,
                                                  int64_t floats);
DTRAIN__PRIVATE void dtrain__cpu_destroy(dtrain_device *device);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_create(const dtrain_device_desc *desc,
                                                 dtrain_device *device);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_synchronize(dtrain_device *device);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_alloc(dtrain_device *device, size_t bytes, void **memory);
DTRAIN__PRIVATE void dtrain__cpu_free(dtrain_device *device, void *memory, size_t bytes);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_copy(dtrain_device *device, void *to, const void *from,
                                               size_t bytes, dtrain_copy_kind kind);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_zero(dtrain_device *device, void *memory, size_t bytes);
DTRAIN__PRIVATE dtrain__job dtrain__job_make(const void *args, int64_t total, int64_t unit);
DTRAIN__PRIVATE dtrain_result dtrain__job_run(dtrain__cpu *cpu, dtrain__job *job,
                                              dtrain__range_fn range, int64_t elements);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_elementwise(dtrain_device *device, const void *args,
                                                      int64_t count, dtrain__range_fn range);
DTRAIN__PRIVATE const dtrain__kernels *dtrain__cpu_kernels(dtrain_device *device);
DTRAIN__PRIVATE dtrain_allocator dtrain__cpu_allocator(const dtrain_device *device);

/* device/cpu/launch.c, launch_gemm.c, launch_sparse.c: checks, cuts the work and runs it */
DTRAIN__PRIVATE dtrain_result dtrain__check_dtype(dtrain_dtype dtype);
#define DTRAIN__CPU_LAUNCHER(op)                                          \
    DTRAIN__PRIVATE dtrain_result dtrain__cpu_##op(dtrain_device *device, \
                                                   const dtrain_##op##_args *args);
DTRAIN__KERNEL_LIST(DTRAIN__CPU_LAUNCHER)
#undef DTRAIN__CPU_LAUNCHER
