/* Devices
 *
 * A device is memory and kernels. The CPU device is built in and is the oracle for the others;
 * dtrain_cuda.cu exports another table of the same form. The rest of the library does not know
 * which device it runs on.
 *
 * Order of calls: create once per rank; alloc, copy and kernels in any order; destroy. Kernels are
 * queued in order on the device's compute stream; synchronize waits for them and reports errors
 * that were unknown at launch (a token outside the vocabulary, a lost device). On the CPU a kernel
 * has finished and reported when it returns.
 *
 * All matrices are row-major; "rows" of activations are tokens. A dtype in the arguments gives the
 * type of activations and their gradients: F32 (also 0), BF16 or F16; arithmetic is fp32. Weights,
 * statistics, losses and gradients of parameters are fp32. `accumulate` says whether a kernel adds
 * to the old contents (true) or overwrites them without reading (false). */

#pragma once

#include "core/api.h"
#include "core/log.h"
#include "core/result.h"

typedef struct dtrain_device dtrain_device;
typedef struct dtrain_device_ops dtrain_device_ops;

typedef enum dtrain_activation {
    DTRAIN_ACTIVATION_NONE = 0,
    DTRAIN_ACTIVATION_RELU = 1,
    DTRAIN_ACTIVATION_GELU =
        2, /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the form GPT-2 uses */
    DTRAIN_ACTIVATION_SILU = 3 /* x / (1 + e^-x) */
} dtrain_activation;

/* Rounding of fp32 operands in GEMM and attention; BF16 and F16 operands are not affected. */
typedef enum dtrain_math {
    DTRAIN_MATH_DEFAULT = 0, /* = DTRAIN_MATH_FP32 */
    DTRAIN_MATH_FP32 = 1,
    DTRAIN_MATH_TF32 = 2, /* tensor cores with 10 bits of mantissa; CPU: an error */
    DTRAIN_MATH_BF16 = 3  /* tensor cores with 7 bits of mantissa; CPU: an error */
} dtrain_math;

/* dtrain_device_desc.device_index: the GPU that is current on the calling thread. */
#define DTRAIN_DEVICE_CURRENT UINT32_MAX

typedef struct dtrain_device_desc {
    uint32_t thread_count; /* CPU: compute threads of this rank; 0 = 1 */
    uint32_t device_index; /* GPU: number, modulo the number of GPUs; or DTRAIN_DEVICE_CURRENT */
    uint32_t math;         /* dtrain_math */
    bool oversubscribed;   /* more threads than cores on this host: waiting threads must not spin */
    bool tune;             /* GPU: time the algorithms of a GEMM at its first use. Some per cent
                              faster; the bits can then differ from run to run */
    uint64_t memory_limit; /* bytes; exceeding it is DTRAIN_ERROR_MEMORY. 0 = none */
    dtrain_allocator allocator;
    void
        *stream; /* GPU: the host program's cudaStream_t for kernels, which must outlive the device.
                     NULL = a new stream; a device without streams accepts only NULL */
} dtrain_device_desc;

typedef struct dtrain_device_info {
    char name[96];         /* "NVIDIA H200" */
    char id[48];           /* equal on two ranks exactly if they use one device */
    uint32_t index, count; /* number of the device, number of devices of this machine */
    uint32_t major, minor; /* compute capability */
    uint32_t code_version; /* GPU: target of the compiled kernels, 90 for sm_90 */
    uint64_t memory_bytes, free_bytes;
    /* CPU: "avx512", "avx2", "generic", "scalar" or "cblas"; for products of bf16 with bf16
     * "amx_bf16" if compiler, processor and system have it. */
    char kernels[16], bf16_kernels[16];
    /* GPU: number of kinds of GEMM (shape, types, epilogue) that cublasLt refused and slower
     * kernels compute: more than a few are worth other sizes or alignments. */
    uint32_t slow_gemms;
} dtrain_device_info;

/* Return the table of dtrain_cuda.cu: link that file to use it. */
extern const dtrain_device_ops *dtrain_cuda_device_ops(void);

/* Return the table for a name; another name is an error that says what to do.
 *
 *     "cpu"    Scratch of kernels (GEMM packing, attention blocks) is allocated in the first step,
 *              less than 2 MiB a thread for usual shapes, and does not count in allocated_bytes.
 *     "cuda"   For programs that are compiled with DTRAIN_USE_CUDA and link dtrain_cuda.cu.
 *     "plan"   Runs no kernel, copies nothing and returns addresses without memory: peak_bytes is
 *              the memory that a model would need. Ranks cannot be launched on it. */
DTRAIN_API dtrain_result dtrain_device_ops_by_name(const char *name, const dtrain_device_ops **out);

/* Create a device without a world (tests, tools). ops NULL = CPU. */
DTRAIN_API dtrain_result dtrain_device_create(const dtrain_device_ops *ops,
                                              const dtrain_device_desc *desc, dtrain_device **out);
/* Free a device and its own memory; the caller frees memory from alloc. */
DTRAIN_API void dtrain_device_destroy(dtrain_device *device);
/* Describe a device: name (by default the table's), memory, kernels. Asks a GPU for its free
 * memory, which fails if the GPU is lost or a kernel has failed. */
DTRAIN_API dtrain_result dtrain_device_query(dtrain_device *device, dtrain_device_info *info);

/* Copy bytes between two arrays that do not overlap, each in host or device memory, in the order of
 * the device's work; a host array can be used again when the call returns. */
DTRAIN_API dtrain_result dtrain_device_copy(dtrain_device *device, void *to, const void *from,
                                            size_t bytes);
