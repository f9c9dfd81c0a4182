/* Devices
 *
 * A device is memory plus kernels. The CPU device below is built in and is the oracle for every
 * other one; dtrain_cuda.cu exports another table of the same form. Nothing above this section
 * knows which device it runs on.
 *
 * Order of calls: create once per rank; alloc, copy and kernels in any order; destroy. Kernels are
 * queued in order on the device's compute stream; synchronize waits for them and reports errors
 * that were not known at launch (a token outside the vocabulary, a lost device). On the CPU each
 * kernel is finished, and has reported, when it returns.
 *
 * All matrices are row-major; "rows" of activations are tokens. Activations are F32, BF16 or F16 as
 * a dtype in the arguments says (0 = F32); arithmetic inside a kernel is fp32. Weights, statistics,
 * losses and gradients of parameters of these kernels are fp32, gradients of activations have the
 * dtype of the activation, and `accumulate` says whether a kernel adds to what is there (true) or
 * overwrites it (false: the old contents are not read and may be anything). */

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

/* What GEMM and attention may do to fp32 operands; those in BF16 or F16 are not affected. */
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
    uint32_t device_index; /* GPU: which one, modulo how many there are; or DTRAIN_DEVICE_CURRENT */
    uint32_t math;         /* dtrain_math */
    bool oversubscribed;   /* more threads than cores here: waiting threads must not spin */
    bool tune;             /* GPU: time the algorithms of a GEMM at its first use. Some per cent
                              faster; the bits may then differ from run to run */
    uint64_t memory_limit; /* bytes; what would go beyond is DTRAIN_ERROR_MEMORY. 0 = none */
    dtrain_allocator allocator;
    void *stream; /* GPU: the host's cudaStream_t, on which kernels are queued; it must outlive the
                     device. NULL = a new one; a device without streams refuses another value */
} dtrain_device_desc;

typedef struct dtrain_device_info {
    char name[96];         /* "NVIDIA H200" */
    char id[48];           /* the same for two ranks exactly when they sit on one device */
    uint32_t index, count; /* which, of how many in this machine */
    uint32_t major, minor; /* compute capability */
    uint32_t code_version; /* GPU: what its kernels were compiled for, 90 for sm_90 */
    uint64_t memory_bytes, free_bytes;
    /* CPU: "avx512", "avx2", "generic", "scalar" or "cblas"; and for products of bf16 with bf16
     * "amx_bf16" where the compiler, the processor and the system have it, else the same. */
    char kernels[16], bf16_kernels[16];
    /* GPU: kinds of GEMM so far (shape, types, epilogue) that cublasLt would not compute as asked,
     * so that slower kernels do: more than a few are worth other sizes or alignments. */
    uint32_t slow_gemms;
} dtrain_device_info;

/* Return the table of dtrain_cuda.cu: link that file to use it. */
extern const dtrain_device_ops *dtrain_cuda_device_ops(void);

/* Return the table for a name; any other is an error that says what to do.
 *
 *     "cpu"    Its kernels' scratch (GEMM packing, attention blocks) is allocated in the first
 *              step, less than 2 MiB a thread for usual shapes, and not in allocated_bytes.
 *     "cuda"   In a program that is compiled with DTRAIN_USE_CUDA and links dtrain_cuda.cu.
 *     "plan"   Runs no kernel, copies nothing and hands out addresses without memory: a model that
 *              is run on it reports through peak_bytes what it would need. Ranks cannot be launched
 *              on it. */
DTRAIN_API dtrain_result dtrain_device_ops_by_name(const char *name, const dtrain_device_ops **out);

/* Create a device of one's own, without a world (tests, tools). ops NULL = CPU. */
DTRAIN_API dtrain_result dtrain_device_create(const dtrain_device_ops *ops,
                                              const dtrain_device_desc *desc, dtrain_device **out);
/* Free a device and what it has allocated for itself; memory from alloc is the caller's to free. */
DTRAIN_API void dtrain_device_destroy(dtrain_device *device);
/* Describe a device: name, memory, kernels. A device that says nothing has the table's name. A GPU
 * is asked for its free memory, which fails where the GPU is lost or a kernel has failed on it. */
DTRAIN_API dtrain_result dtrain_device_query(dtrain_device *device, dtrain_device_info *info);

/* Copy bytes between two arrays that do not overlap, each in the host's memory or the device's,
 * in the order of the device's work; a host array can be used again when it returns. */
DTRAIN_API dtrain_result dtrain_device_copy(dtrain_device *device, void *to, const void *from,
                                            size_t bytes);
