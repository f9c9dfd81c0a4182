/* The CPU device's state, and the functions that its launchers use */

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
#include "device/device_internal.h"

typedef struct dtrain__cpu {
    dtrain_allocator allocator;
    dtrain__pool *pool;
    int thread_count;
    const dtrain__kernels *kernels;
    const dtrain__isa *isa;   /* of products */
    const dtrain__isa *pairs; /* of products of bf16 with bf16; NULL: widen them */
    float *scratch;           /* of the running kernel; grows in the first step */
    size_t scratch_bytes;
    double sums[DTRAIN__SUM_CHUNKS];
} dtrain__cpu;

/* device/cpu/cpu.c */
DTRAIN__PRIVATE int64_t dtrain__multiple(int64_t value, int64_t unit);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_scratch(dtrain__cpu *cpu, int64_t floats, float **out);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_synchronize(dtrain_device *device);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_copy_async(dtrain_device *device, void *to,
                                                     const void *from, size_t bytes,
                                                     dtrain_copy_kind kind, dtrain_stream *stream);
DTRAIN__PRIVATE dtrain__job dtrain__job_make(const void *args, int64_t total, int64_t unit,
                                             dtrain_dtype dtype);
DTRAIN__PRIVATE dtrain_result dtrain__job_run(dtrain__cpu *cpu, dtrain__job *job,
                                              dtrain__range_fn range, int64_t elements);

/* device/cpu/launch.c */
DTRAIN__PRIVATE dtrain_result dtrain__run_kernel(dtrain_device *device, dtrain__range_fn range,
                                                 const void *args, int64_t total, int64_t unit,
                                                 int64_t slot, int64_t elements,
                                                 dtrain_dtype dtype);
/* A launcher that runs the kernel of the same name on [0, total), after a check. */
#define DTRAIN__LAUNCH(op, check, total, unit, slot, elements, dtype)                         \
    DTRAIN__PRIVATE dtrain_result dtrain__cpu_##op(dtrain_device *device,                     \
                                                   const dtrain_##op##_args *args)            \
    {                                                                                         \
        DTRAIN__TRY(check);                                                                   \
        return dtrain__run_kernel(device, dtrain__cpu_kernels(device)->op, args, total, unit, \
                                  slot, elements, dtype);                                     \
    }
DTRAIN__PRIVATE dtrain_result dtrain__elementwise(dtrain_device *device, dtrain__range_fn range,
                                                  const void *args, int64_t count,
                                                  dtrain_dtype dtype);
DTRAIN__PRIVATE const dtrain__kernels *dtrain__cpu_kernels(const dtrain_device *device);
DTRAIN__PRIVATE dtrain_dtype dtrain__larger(dtrain_dtype a, dtrain_dtype b);

#if DTRAIN__MODELS
/* device/cpu/launch_layers.c */
DTRAIN__PRIVATE void dtrain__part_words(const dtrain_part *part, uint64_t seed, uint64_t stream,
                                        int64_t i, int64_t count, uint32_t *words);
DTRAIN__PRIVATE void dtrain__row_loss(const dtrain_cross_entropy_args *args, int64_t row, float top,
                                      double sum, float wanted, double logits_sum);

/* device/cpu/launch_gemm.c */
DTRAIN__PRIVATE dtrain_result dtrain__column_sums(dtrain_device *device, int64_t rows, int64_t n,
                                                  const void *x, dtrain_dtype dtype,
                                                  bool accumulate, float *sums);

/* device/cpu/gemm.c */
DTRAIN__PRIVATE dtrain_result dtrain__gemm(dtrain__cpu *cpu, const dtrain_gemm_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__gemm_run(dtrain__cpu *cpu, const dtrain__gemm_call *product);
DTRAIN__PRIVATE int64_t dtrain__gemm_slot(bool partial);
#endif

/* device/cpu/launch*.c: checks, cuts the work and runs it */
#define DTRAIN__CPU_LAUNCHER(op)                                          \
    DTRAIN__PRIVATE dtrain_result dtrain__cpu_##op(dtrain_device *device, \
                                                   const dtrain_##op##_args *args);
DTRAIN__KERNEL_LIST(DTRAIN__CPU_LAUNCHER, DTRAIN__CPU_LAUNCHER)
#undef DTRAIN__CPU_LAUNCHER
