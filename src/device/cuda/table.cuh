/* The table of device operations */

#pragma once

#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"
#include "device/cuda/pointwise.cuh"
#include "device/cuda/elementwise.cuh"
#include "device/cuda/reductions.cuh"
#include "device/cuda/optimizers.cuh"
#include "device/cuda/gemm.cuh"
#include "device/cuda/layernorm.cuh"
#include "device/cuda/tokens.cuh"
#include "device/cuda/rows.cuh"
#include "device/cuda/flash.cuh"
#include "device/cuda/sparse.cuh"
#include "device/cuda/batchnorm.cuh"
#include "device/cuda/convolution.cuh"
#include "device/cuda/pooling.cuh"

static_assert(DTRAIN_DEVICE_ABI == 13,
              "the table below is that of ABI 13: compare with device/backend.h");

extern "C" const dtrain_device_ops *dtrain_cuda_device_ops(void)
{
    static const dtrain_device_ops ops = {DTRAIN_DEVICE_ABI,
                                          "cuda",
                                          false,
                                          dtrain_cuda_create,
                                          dtrain_cuda_destroy,
                                          dtrain_cuda_query,
                                          dtrain_cuda_synchronize,
                                          dtrain_cuda_alloc,
                                          dtrain_cuda_free,
                                          dtrain_cuda_copy,
                                          dtrain_cuda_zero,
                                          dtrain_cuda_host_alloc,
                                          dtrain_cuda_host_free,
                                          dtrain_cuda_host_register,
                                          dtrain_cuda_host_unregister,
                                          dtrain_cuda_copy_async,
                                          dtrain_cuda_stream_create,
                                          dtrain_cuda_stream_destroy,
                                          dtrain_cuda_stream_native,
                                          dtrain_cuda_event_create,
                                          dtrain_cuda_event_destroy,
                                          dtrain_cuda_event_record,
                                          dtrain_cuda_event_wait,
                                          dtrain_cuda_event_query,
                                          dtrain_cuda_is_device_memory,
                                          dtrain_cuda_graph_begin,
                                          dtrain_cuda_graph_end,
                                          dtrain_cuda_graph_launch,
                                          dtrain_cuda_graph_destroy,
                                          dtrain_cuda_graphs_drop,
                                          dtrain_cuda_capturing,
                                          dtrain_cuda_may_free,
                                          dtrain_cuda_range_begin,
                                          dtrain_cuda_range_end,
                                          dtrain_cuda_gemm,
                                          dtrain_cuda_activation_backward,
                                          dtrain_cuda_bias,
                                          dtrain_cuda_layernorm,
                                          dtrain_cuda_layernorm_backward,
                                          dtrain_cuda_embedding,
                                          dtrain_cuda_embedding_backward,
                                          dtrain_cuda_attention,
                                          dtrain_cuda_attention_backward,
                                          dtrain_cuda_cross_entropy,
                                          dtrain_cuda_cross_entropy_backward,
                                          dtrain_cuda_cross_entropy_finish,
                                          dtrain_cuda_pointwise,
                                          dtrain_cuda_pointwise_backward,
                                          dtrain_cuda_softmax,
                                          dtrain_cuda_softmax_backward,
                                          dtrain_cuda_rotary,
                                          dtrain_cuda_permute,
                                          dtrain_cuda_add,
                                          dtrain_cuda_axpby,
                                          dtrain_cuda_dropout,
                                          dtrain_cuda_sum,
                                          dtrain_cuda_clip,
                                          dtrain_cuda_convert,
                                          dtrain_cuda_adamw,
                                          dtrain_cuda_sgd,
                                          dtrain_cuda_lion,
                                          dtrain_cuda_muon,
                                          dtrain_cuda_topk,
                                          dtrain_cuda_scatter_add,
                                          dtrain_cuda_batchnorm_moments,
                                          dtrain_cuda_batchnorm_statistics,
                                          dtrain_cuda_batchnorm,
                                          dtrain_cuda_batchnorm_sums,
                                          dtrain_cuda_batchnorm_backward,
                                          dtrain_cuda_conv2d,
                                          dtrain_cuda_conv2d_backward,
                                          dtrain_cuda_pool2d,
                                          dtrain_cuda_pool2d_backward};
    return &ops;
}
