/* What other files may use of device/cpu/ beside the public API. */

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

#define DTRAIN__WIDE 4 /* operands of one operation that may have to be widened */

typedef struct dtrain__cpu {
    dtrain_allocator allocator;
    dtrain__pool *pool;
    int thread_count;
    const dtrain__kernels *kernels;
    dtrain__gemm_workspace gemm;
    float *scratch; /* of attention, layernorm backward, cblas; grows in the first step */
    size_t scratch_bytes;
    double sums[DTRAIN__SUM_CHUNKS];
    float *wide[DTRAIN__WIDE]; /* half-precision operands in fp32; they grow in the first step */
    size_t wide_bytes[DTRAIN__WIDE];
} dtrain__cpu;

enum { DTRAIN__READ = 1, DTRAIN__WRITE = 2 };

typedef struct dtrain__wide_item {
    void *narrow;
    float *wide;
    int64_t count;
    dtrain_dtype dtype;
    int access;
} dtrain__wide_item;

typedef struct dtrain__wide_list {
    dtrain__cpu *cpu;
    dtrain__wide_item items[DTRAIN__WIDE];
    int count;
    dtrain_result result;
} dtrain__wide_list;

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

/* device/cpu/launch_gemm.c */
DTRAIN__PRIVATE dtrain__wide_list dtrain__wide_begin(dtrain_device *device);
DTRAIN__PRIVATE bool dtrain__is_f32(dtrain_dtype dtype);
DTRAIN__PRIVATE void dtrain__cpu_convert_run(dtrain__cpu *cpu, const void *x, dtrain_dtype x_dtype,
                                             void *y, dtrain_dtype y_dtype, int64_t count);
DTRAIN__PRIVATE float *dtrain__wide(dtrain__wide_list *list, const void *x, dtrain_dtype dtype,
                                    int64_t count, int access);
DTRAIN__PRIVATE dtrain_result dtrain__wide_end(dtrain__wide_list *list, dtrain_result result);
DTRAIN__PRIVATE dtrain_result dtrain__wide_elementwise(dtrain__wide_list *list, const void *args,
                                                       int64_t count, dtrain__range_fn range);
DTRAIN__PRIVATE dtrain_result
dtrain__cpu_activation_backward(dtrain_device *device, const dtrain_activation_backward_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_gemm(dtrain_device *device, const dtrain_gemm_args *args);

/* device/cpu/launch.c */
DTRAIN__PRIVATE dtrain_result dtrain__cpu_layernorm(dtrain_device *device,
                                                    const dtrain_layernorm_args *args);
DTRAIN__PRIVATE dtrain_result
dtrain__cpu_layernorm_backward(dtrain_device *device, const dtrain_layernorm_backward_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_embedding(dtrain_device *device,
                                                    const dtrain_embedding_args *args);
DTRAIN__PRIVATE dtrain_result
dtrain__cpu_embedding_backward(dtrain_device *device, const dtrain_embedding_backward_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_attention(dtrain_device *device,
                                                    const dtrain_attention_args *args);
DTRAIN__PRIVATE dtrain_result
dtrain__cpu_attention_backward(dtrain_device *device, const dtrain_attention_backward_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_cross_entropy_backward(
    dtrain_device *device, const dtrain_cross_entropy_backward_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_cross_entropy(dtrain_device *device,
                                                        const dtrain_cross_entropy_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_add(dtrain_device *device, const dtrain_add_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_axpby(dtrain_device *device,
                                                const dtrain_axpby_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_dropout(dtrain_device *device,
                                                  const dtrain_dropout_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_sum(dtrain_device *device, const dtrain_sum_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_clip(dtrain_device *device, const dtrain_clip_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_convert(dtrain_device *device,
                                                  const dtrain_convert_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_update(dtrain_device *device, dtrain__update *update,
                                                 size_t tensor_count,
                                                 const dtrain_optimizer_tensor *tensors,
                                                 const dtrain_step_scalars *scalars,
                                                 dtrain__range_fn range);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_adamw(dtrain_device *device,
                                                const dtrain_adamw_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_sgd(dtrain_device *device, const dtrain_sgd_args *args);

/* device/cpu/launch_sparse.c */
DTRAIN__PRIVATE dtrain_result dtrain__cpu_topk(dtrain_device *device, const dtrain_topk_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_scatter_add(dtrain_device *device,
                                                      const dtrain_scatter_add_args *args);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_orthogonalize(dtrain_device *device,
                                                        const dtrain_orthogonalize_args *args);

/* device/cpu/table.c */
DTRAIN__PRIVATE dtrain_result dtrain__cpu_host_register(dtrain_device *device, void *memory,
                                                        size_t bytes);
DTRAIN__PRIVATE void dtrain__cpu_host_unregister(dtrain_device *device, void *memory);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_copy_async(dtrain_device *device, void *to,
                                                     const void *from, size_t bytes,
                                                     dtrain_copy_kind kind, dtrain_stream *stream);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_stream_create(dtrain_device *device, bool high_priority,
                                                        dtrain_stream **out);
DTRAIN__PRIVATE void dtrain__cpu_stream_destroy(dtrain_device *device, dtrain_stream *stream);
DTRAIN__PRIVATE void *dtrain__cpu_stream_native(dtrain_device *device, dtrain_stream *stream);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_event_create(dtrain_device *device, bool timing,
                                                       dtrain_event **out);
DTRAIN__PRIVATE void dtrain__cpu_event_destroy(dtrain_device *device, dtrain_event *event);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_event_record(dtrain_device *device, dtrain_event *event,
                                                       dtrain_stream *stream);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_event_wait(dtrain_device *device, dtrain_event *event,
                                                     dtrain_stream *stream);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_event_query(dtrain_device *device, dtrain_event *event,
                                                      bool *done);
DTRAIN__PRIVATE bool dtrain__cpu_is_device_memory(dtrain_device *device, const void *memory);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_graph_begin(dtrain_device *device);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_graph_end(dtrain_device *device, dtrain_graph **out);
DTRAIN__PRIVATE dtrain_result dtrain__cpu_graph_launch(dtrain_device *device, dtrain_graph *graph);
DTRAIN__PRIVATE void dtrain__cpu_graph_destroy(dtrain_device *device, dtrain_graph *graph);
