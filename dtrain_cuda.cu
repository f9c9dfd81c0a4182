/* dtrain_cuda.cu: the CUDA device of dtrain, all GPU kernels. MIT license (file LICENSE).

   Packages: CUDA Toolkit 12 or newer, cuBLAS. Compile it beside a program that includes dtrain.h:

       nvcc -O3 -arch=native -DDTRAIN_USE_CUDA train.c dtrain_cuda.cu -lcublasLt -o train

   and give dtrain_cuda_device_ops() to dtrain_launch_desc.device_ops or to dtrain_device_create.

   Contents: the source files.
       src/device/cuda/language.cuh         Language: launches, halves, packs, sums
       src/device/cuda/device.cuh           Device: state, errors, waiting, creation
       src/device/cuda/memory.cuh           Memory, streams, events and graphs
       src/device/cuda/elements.cuh         Elementwise: the loop of all such kernels
       src/device/cuda/pointwise.cuh        Functions of single elements: activations, gated products, losses
       src/device/cuda/elementwise.cuh      Add, axpby, dropout, convert, activation
       src/device/cuda/reductions.cuh       Reductions: sum, clip, column sums
       src/device/cuda/optimizers.cuh       Optimizers: AdamW, SGD, Lion, the elementwise stages of Muon; many tensors
       src/device/cuda/gemm_plan.cuh        GEMM 1: cublasLt and the algorithm cache
       src/device/cuda/gemm.cuh             GEMM 2: epilogues and fallbacks
       src/device/cuda/layernorm.cuh        Layer norm, forward and backward
       src/device/cuda/tokens.cuh           Token ids: embedding and cross-entropy
       src/device/cuda/rows.cuh             Rows of activations: softmax, rotary embedding, permuted axes
       src/device/cuda/attention_gemm.cuh   Attention by batched GEMM and softmax
       src/device/cuda/flash_tiles.cuh      Tiles of flash attention
       src/device/cuda/flash.cuh            Flash attention on tensor cores
       src/device/cuda/sparse.cuh           Sparse gradients: top-k and scatter-add
       src/device/cuda/batchnorm.cuh        Batch normalisation
       src/device/cuda/convolution.cuh      Convolution: products with windows
       src/device/cuda/pooling.cuh          Pooling: maximum and average of windows
       src/device/cuda/table.cuh            The table of device operations

   In a program with its own CUDA code (dtrain_world_join, or dtrain_device_desc) the device is the
   current device of the calling thread, and must be current in every later call. If the program
   gives a stream (its default stream: cudaStreamLegacy), kernels and copies are queued on it: they
   run after earlier work of the program on that stream, and before later work. Events order other
   streams of dtrain with it. The stream outlives the device. Device, flags and context are never
   changed or reset. A call of dtrain can overwrite an error that the program has not read by
   cudaGetLastError, and leaves none.

   Graphs. A program can capture its stream around dtrain_strategy_gather, _ready, _release, _finish
   and dtrain_optimizer_step, after one whole step without a capture. This needs NCCL for several
   ranks, parameters and gradients in device memory, no offload, no compression, and no
   DTRAIN_MISSING_GRADIENT_ERROR. The learning rate is recorded; AdamW's update is called after each
   launch instead, because its bias corrections change. A call that cannot be captured returns
   DTRAIN_ERROR_UNSUPPORTED before anything is queued, and the capture continues. Destroy graphs
   before the strategy. cudaStreamSynchronize has no deadline for a collective;
   device->ops->synchronize(device) has one.

   The source of an operation has this order: a comment with shapes and bytes moved, the kernel, the
   launcher, and its entry in table.cuh. Results depend only on the inputs: there are no
   floating-point atomics.

   A C++ compiler for a CPU also compiles the file, with stand-ins for cuda_runtime.h and cublasLt.h
   (tests/cuda/emulation): tests run its kernels without a GPU.

   Speed. The floor of a kernel is the time of its limiting resource: the bytes in its comment at
   the bandwidth of a plain copy, or its flops at the peak of the tensor cores for dense bf16. The
   expected share of the floor is a guess for large inputs, made before any run, for a measurement
   to contradict; launches limit small inputs, 2 to 5 microseconds each. bench/bench_kernels
   measures all kernels but muon, convolution and pooling. Nothing is measured yet: no hardware.

       kernels                          limiting resource                expected    measured
       add, axpby, convert, activation  memory bandwidth                 90 %        not measured
       dropout                          memory, integer units (Philox)   75 %        not measured
       sum, column sums                 memory bandwidth                 90 %        not measured
       adamw, sgd, lion, muon           memory bandwidth                 90 %        not measured
       gemm, fused or bare              tensor cores (cublasLt)          75 %        not measured
       gemm epilogue kernel             memory bandwidth                 85 %        not measured
       layernorm                        memory bandwidth                 85 %        not measured
       layernorm backward               memory, shared memory            70 %        not measured
       embedding                        memory bandwidth                 80 %        not measured
       embedding backward               memory latency (sort, gather)    40 %        not measured
       cross-entropy                    memory bandwidth                 85 %        not measured
       attention, flash, forward        tensor cores through mma.sync    30 %        not measured
       attention, flash, backward       tensor cores, registers          25 %        not measured
       attention by batched GEMM        memory and L2 cache (scores)     50 %        not measured
       top-k                            memory bandwidth                 75 %        not measured
       scatter-add                      memory, 32-byte sectors          60 %        not measured
       conv2d, conv2d backward          fp32 units, shared memory        30 %        not measured
       pooling                          memory bandwidth                 60 %        not measured

   The tensor-core peak of Hopper is wgmma's; these kernels use mma.sync, which runs from Ampere on
   and is said to reach 60 to 65 % of it. */

/* ==== src/device/cuda/language.cuh ============================================================ */

/* Language: launches, halves, packs, sums
 *
 * The tools of every kernel. The emulation (tests/cuda/emulation) replaces the launch and the
 * dynamic shared memory; everything else compiles for a GPU and for a CPU. */

#include "dtrain.h"

#include <cuda_runtime.h>

#include <math.h>
#include <string.h>

/* Launch a kernel with typed arguments: a wrong type or count is a compile error, and a launch that
 * fails returns its error code. */
template <typename... Parameters, typename... Arguments>
static cudaError_t dtrain_cuda_launch(void (*kernel)(Parameters...), int64_t blocks, int threads,
                                      size_t shared_bytes, cudaStream_t stream,
                                      Arguments... arguments)
{
#ifdef DTRAIN_CUDA_EMULATION
    return dtrain_emulation_launch(kernel, dim3((unsigned)blocks), dim3((unsigned)threads),
                                   shared_bytes, stream, (Parameters)arguments...);
#else
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, (Parameters)arguments...);
#endif
}

/* Declare `name` as the dynamic shared memory of the block, 128-byte aligned. */
#ifndef DTRAIN_CUDA_EMULATION
#define DTRAIN_CUDA_DYNAMIC_SHARED(type, name)                            \
    extern __shared__ __align__(128) unsigned char dtrain_cuda_dynamic[]; \
    type *name = reinterpret_cast<type *>(dtrain_cuda_dynamic)
#endif

#define DTRAIN_CUDA_TRY(call)                   \
    do {                                        \
        const dtrain_result tried_ = (call);    \
        if (tried_ != DTRAIN_OK) return tried_; \
    } while (0)

/* On a GPU, UNROLL unrolls the next loop, and ROLLED prevents unrolling that would spill registers.
 * The emulation changes no loops and compiles faster. */
#ifdef DTRAIN_CUDA_EMULATION
#define DTRAIN_CUDA_UNROLL
#define DTRAIN_CUDA_ROLLED
#else
#define DTRAIN_CUDA_UNROLL _Pragma("unroll")
#define DTRAIN_CUDA_ROLLED _Pragma("unroll 1")
#endif

/* Code for GPUs before Ampere: nvcc 13 makes it, for sm_75, when no architecture is named. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define DTRAIN_CUDA_BEFORE_AMPERE
#endif

#define DTRAIN_CUDA_WARP 32
#define DTRAIN_CUDA_ALL_LANES 0xffffffffu

/* ---- Half precision -----------------------------------------------------------------------------
 *
 * bf16 and fp16 are storage formats: a kernel loads them, widens them to fp32, computes, rounds
 * once and stores. */

struct dtrain_cuda_bf16 {
    uint16_t bits;
};
struct dtrain_cuda_f16 {
    uint16_t bits;
};

static __device__ __forceinline__ float dtrain_cuda_widen(float x) { return x; }
static __device__ __forceinline__ double dtrain_cuda_widen(double x) { return x; }

static __device__ __forceinline__ float dtrain_cuda_widen(dtrain_cuda_bf16 x)
{
    return __uint_as_float((uint32_t)x.bits << 16);
}

static __device__ __forceinline__ float dtrain_cuda_widen(dtrain_cuda_f16 x)
{
#ifdef __CUDA_ARCH__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
#else
    return dtrain_half_to_f32(DTRAIN_DTYPE_F16, x.bits);
#endif
}

static __device__ __forceinline__ void dtrain_cuda_narrow(float x, float &to) { to = x; }
static __device__ __forceinline__ void dtrain_cuda_narrow(double x, double &to) { to = x; }

/* Round to nearest, ties to even: the bits of dtrain_half_from_f32, except that every NaN becomes
 * 0x7fff, as in the GPU's instructions; code for older GPUs and CPUs does the same. */
static __device__ __forceinline__ void dtrain_cuda_narrow(float x, dtrain_cuda_bf16 &to)
{
#if defined(__CUDA_ARCH__) && !defined(DTRAIN_CUDA_BEFORE_AMPERE)
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) to.bits = 0x7fffu;
    else to.bits = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
}

static __device__ __forceinline__ void dtrain_cuda_narrow(float x, dtrain_cuda_f16 &to)
{
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
    to.bits = (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u
                  ? 0x7fffu
                  : dtrain_half_from_f32(DTRAIN_DTYPE_F16, x);
#endif
}

/* Narrow two values into a register; `low`, the neighbour with the smaller index, takes the lower
 * bits. One instruction instead of about ten integer instructions for each bf16. */
template <typename Half>
static __device__ __forceinline__ uint32_t dtrain_cuda_narrow_pair(float low, float high, Half kind)
{
    Half upper;
    dtrain_cuda_narrow(low, kind);
    dtrain_cuda_narrow(high, upper);
    return (uint32_t)upper.bits << 16 | kind.bits;
}

#if defined(__CUDA_ARCH__) && !defined(DTRAIN_CUDA_BEFORE_AMPERE)
static __device__ __forceinline__ uint32_t dtrain_cuda_narrow_pair(float low, float high,
                                                                   dtrain_cuda_bf16)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

static __device__ __forceinline__ uint32_t dtrain_cuda_narrow_pair(float low, float high,
                                                                   dtrain_cuda_f16)
{
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

/* Load an element of a type known only at run time, for slow kernels; all threads take the same
 * branch. */
static __device__ float dtrain_cuda_get_any(const void *from, uint32_t dtype, int64_t at)
{
    if (dtype == DTRAIN_DTYPE_BF16) return dtrain_cuda_widen(((const dtrain_cuda_bf16 *)from)[at]);
    if (dtype == DTRAIN_DTYPE_F16) return dtrain_cuda_widen(((const dtrain_cuda_f16 *)from)[at]);
    return ((const float *)from)[at];
}

static __device__ void dtrain_cuda_put_any(void *to, uint32_t dtype, int64_t at, float x)
{
    if (dtype == DTRAIN_DTYPE_BF16) dtrain_cuda_narrow(x, ((dtrain_cuda_bf16 *)to)[at]);
    else if (dtype == DTRAIN_DTYPE_F16) dtrain_cuda_narrow(x, ((dtrain_cuda_f16 *)to)[at]);
    else ((float *)to)[at] = x;
}

/* Name call<T> for the T that `dtype` stands for. */
#define DTRAIN_CUDA_BY_DTYPE(dtype, call)                   \
    ((dtype) == DTRAIN_DTYPE_BF16  ? call<dtrain_cuda_bf16> \
     : (dtype) == DTRAIN_DTYPE_F16 ? call<dtrain_cuda_f16>  \
                                   : call<float>)

/* ---- Packs: 16 bytes at a time ------------------------------------------------------------------
 *
 * A pack is W neighbouring elements of T, by default the 4 floats or 8 halves that fill 16 bytes. A
 * load or store moves it in accesses of 16 bytes, or of its size if that is less; the address must
 * be a multiple of that. A pack of one element takes any address: kernels use it for pointers that
 * are not 16-byte aligned, for row lengths that W does not divide, and for the last elements. An
 * operation on two types chooses one W for both. */

template <typename T, int W = 16 / (int)sizeof(T)>
struct alignas(sizeof(T) * W < 16 ? sizeof(T) * W : 16) dtrain_cuda_pack {
    static constexpr int width = W;
    T at[W];
};

template <int W, typename T>
static __device__ __forceinline__ dtrain_cuda_pack<T, W> dtrain_cuda_load(const T *from)
{
    return *reinterpret_cast<const dtrain_cuda_pack<T, W> *>(from);
}

template <typename T, int W>
static __device__ __forceinline__ void dtrain_cuda_store(T *to, const dtrain_cuda_pack<T, W> &pack)
{
    *reinterpret_cast<dtrain_cuda_pack<T, W> *>(to) = pack;
}

/* Narrow W values to a pack, halves in pairs. */
template <typename T, int W>
static __device__ __forceinline__ void dtrain_cuda_narrow(const float (&from)[W],
                                                          dtrain_cuda_pack<T, W> &to)
{
    if constexpr (sizeof(T) == 2 && W % 2 == 0) {
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < W; i += 2) {
            const uint32_t pair = dtrain_cuda_narrow_pair(from[i], from[i + 1], T());
            memcpy(&to.at[i], &pair, sizeof pair);
        }
    } else {
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < W; i++) dtrain_cuda_narrow(from[i], to.at[i]);
    }
}

/* W of an operation on X and Y: the wider type fills 16 bytes, a narrower one takes less ... */
template <typename X, typename Y> static constexpr int dtrain_cuda_width()
{
    return 16 / (int)(sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y));
}

/* ... or the narrower type fills 16 bytes, and the wider one takes two accesses. */
template <typename X, typename Y> static constexpr int dtrain_cuda_long_width()
{
    return 16 / (int)(sizeof(X) < sizeof(Y) ? sizeof(X) : sizeof(Y));
}

static inline bool dtrain_cuda_aligned(const void *memory)
{
    return ((uintptr_t)memory & 15u) == 0;
}

/* ---- Warps and blocks ---------------------------------------------------------------------------
 *
 * A butterfly adds the same pairs in the same tree on every lane, so all lanes get one result with
 * the same bits. The block versions use `slots`, 32 elements of shared memory, leave the result in
 * every thread, and can be called twice in a row. blockDim.x must be a multiple of 32. */

template <typename T> static __device__ __forceinline__ T dtrain_cuda_warp_sum(T x)
{
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(DTRAIN_CUDA_ALL_LANES, x, distance);
    return x;
}

static __device__ __forceinline__ float dtrain_cuda_warp_max(float x)
{
    for (int distance = 16; distance > 0; distance /= 2)
        x = fmaxf(x, __shfl_xor_sync(DTRAIN_CUDA_ALL_LANES, x, distance));
    return x;
}

template <typename T> static __device__ __forceinline__ T dtrain_cuda_block_sum(T x, T *slots)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP, warp = threadIdx.x / DTRAIN_CUDA_WARP;
    const int warps = blockDim.x / DTRAIN_CUDA_WARP;
    x = dtrain_cuda_warp_sum(x);
    __syncthreads(); /* the previous call may still be reading the slots */
    if (lane == 0) slots[warp] = x;
    __syncthreads();
    return dtrain_cuda_warp_sum(lane < warps ? slots[lane] : T(0));
}

static __device__ __forceinline__ float dtrain_cuda_block_max(float x, float *slots)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP, warp = threadIdx.x / DTRAIN_CUDA_WARP;
    const int warps = blockDim.x / DTRAIN_CUDA_WARP;
    x = dtrain_cuda_warp_max(x);
    __syncthreads();
    if (lane == 0) slots[warp] = x;
    __syncthreads();
    return dtrain_cuda_warp_max(lane < warps ? slots[lane] : -INFINITY);
}

/* ==== src/device/cuda/device.cuh ============================================================== */

/* Device: state, errors, waiting, creation
 *
 * A dtrain_event is a cudaEvent_t. Streams are in a list, because synchronize waits for all
 * streams; graphs are in a list, because all are dropped when a communicator ends whose collectives
 * they hold.
 *
 * Invariant: no call here blocks without a limit. A call that would wait inside the driver (a copy
 * of pageable memory, and cudaFree, which waits for running kernels) is made only after the streams
 * have been polled until they were idle, and device->while_waiting can end every polling loop with
 * an error. */

#include <cublasLt.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct dtrain_stream {
    cudaStream_t native;
    dtrain_stream *next;
};

struct dtrain_graph {
    cudaGraphExec_t native; /* NULL: dropped */
    dtrain_graph *next;
};

enum {
    DTRAIN_CUDA_SPINS = 200,              /* polls before the first pause: some 200 us */
    DTRAIN_CUDA_PAUSE_NS = 50000,         /* between later polls */
    DTRAIN_CUDA_GRACE_S = 1,              /* for queued work to end after a wait was given up */
    DTRAIN_CUDA_TIMEOUT_S = 3600,         /* the launch queue holds far less work than that */
    DTRAIN_CUDA_MARK_EVERY = 128,         /* kernels between two marks in the compute stream */
    DTRAIN_CUDA_RETIRED_BLOCKS = 64,      /* each at least twice the one before: never full */
    DTRAIN_CUDA_LT_BYTES_SM90 = 32 << 20, /* workspace that cublasLt's best kernels ask for */
    DTRAIN_CUDA_LT_BYTES = 4 << 20
};

/* A kernel that meets bad data writes a fault record; the first fault is kept. The host reads the
 * record when it next waits for the device. */
enum dtrain_cuda_fault_kind {
    DTRAIN_CUDA_NO_FAULT = 0,
    DTRAIN_CUDA_BAD_TOKEN = 1,
    DTRAIN_CUDA_BAD_TARGET = 2,
    DTRAIN_CUDA_BAD_INDEX = 3,
    DTRAIN_CUDA_BAD_KEY_LENGTH = 4
};

struct dtrain_cuda_fault {
    unsigned kind; /* dtrain_cuda_fault_kind, set by atomicCAS from 0 */
    unsigned reserved;
    long long value, row, limit;
};

struct dtrain_cuda_gemm_cache; /* gemm.cuh */

struct dtrain_cuda_state {
    dtrain_allocator allocator; /* of host memory */
    int index, multiprocessors, major, minor;
    int code_version;              /* what the kernels were compiled for, 80 for sm_80: a newer GPU
                                      runs older code too, without its instructions */
    size_t shared_limit;           /* dynamic shared memory a block may ask for */
    uint32_t math;                 /* dtrain_math */
    bool tune;                     /* time GEMM algorithms at their first use */
    int spins;                     /* polls of a stream before the first pause */
    cudaStream_t stream;           /* compute */
    bool guest;                    /* the device is what was current on the host's thread */
    bool host_stream;              /* the compute stream is the host's */
    bool host_graphs;              /* the host has captured kernels that use the scratch */
    dtrain_stream *streams;        /* all others */
    dtrain_cuda_fault *fault;      /* device memory */
    dtrain_cuda_fault *host_fault; /* page-locked copy */
    void *workspace;               /* of cublasLt */
    size_t workspace_bytes;
    cublasLtHandle_t lt;
    dtrain_cuda_gemm_cache *gemm_cache;
    void *scratch; /* of kernels: grows in the first step, then stays as it is */
    size_t scratch_bytes;
    void *retired[DTRAIN_CUDA_RETIRED_BLOCKS]; /* scratch that graphs may still address */
    int retired_count;
    dtrain_graph *graphs; /* not destroyed yet */
    cudaEvent_t marks[2]; /* in the compute stream: see dtrain_cuda_await_mark */
    int64_t launches;
    dtrain_result queue_error;
    bool stuck; /* a kernel did not end within the grace: no further grace is given */
    bool capturing;
};

static inline dtrain_cuda_state *dtrain_cuda_state_of(dtrain_device *device)
{
    return (dtrain_cuda_state *)device->state;
}

static dtrain_result dtrain_cuda_check(cudaError_t error, const char *what);
static bool dtrain_cuda_limit_queue(dtrain_device *device);

/* Launch a kernel on the compute stream; an error names the operation. */
#define DTRAIN_CUDA_RUN(device, name, kernel, blocks, threads, shared_bytes, ...)      \
    (!dtrain_cuda_limit_queue(device)                                                  \
         ? dtrain_cuda_state_of(device)->queue_error                                   \
         : dtrain_cuda_check(dtrain_cuda_launch(kernel, blocks, threads, shared_bytes, \
                                                dtrain_cuda_state_of(device)->stream,  \
                                                __VA_ARGS__),                          \
                             name))

/* Choose the number of blocks of a grid-stride loop over `items` work items, one for each thread:
 * at most 16 blocks a multiprocessor. */
static inline int64_t dtrain_cuda_blocks(const dtrain_cuda_state *state, int64_t items, int threads)
{
    const int64_t needed = (items + threads - 1) / threads,
                  most = (int64_t)state->multiprocessors * 16;
    return needed < 1 ? 1 : needed < most ? needed : most;
}

/* gemm_plan.cuh; no cache is legal */
static void dtrain_cuda_gemm_cache_free(dtrain_cuda_state *state);
static uint32_t dtrain_cuda_gemm_slow_count(const dtrain_cuda_state *state);

static void *dtrain_cuda_host_take(const dtrain_allocator *allocator, size_t bytes)
{
    void *memory = allocator->alloc && allocator->free ? allocator->alloc(allocator->user, bytes)
                                                       : malloc(bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static void dtrain_cuda_host_give(const dtrain_allocator *allocator, void *memory, size_t bytes)
{
    if (!memory) return;
    if (allocator->alloc && allocator->free) allocator->free(allocator->user, memory, bytes);
    else free(memory);
}

/* ---- Errors -----------------------------------------------------------------------------------*/

/* Return whether the CUDA context is lost, after which every call repeats the error. A trial call
 * is safer than a list of error codes, which grows with each toolkit. */
static bool dtrain_cuda_is_lost(void)
{
    size_t free_bytes, memory_bytes;
    cudaGetLastError();
    const cudaError_t error = cudaMemGetInfo(&free_bytes, &memory_bytes);
    return error != cudaSuccess && error != cudaErrorMemoryAllocation;
}

/* Turn a CUDA error into a sentence, and clear it if possible. `what` names the call. */
static dtrain_result dtrain_cuda_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return DTRAIN_OK;
    const char *name = cudaGetErrorName(error), *text = cudaGetErrorString(error);
    if (dtrain_cuda_is_lost())
        return dtrain_fail(DTRAIN_ERROR_SYSTEM,
                           "%s: the device is lost (%s: %s), by this call or by a kernel before "
                           "it. Nothing on it can be used any more: the process has to be started "
                           "again; under compute-sanitizer it names the kernel",
                           what, name, text);
    if (error == cudaErrorMemoryAllocation)
        return dtrain_fail(DTRAIN_ERROR_MEMORY,
                           "%s: the GPU (or page-locked host memory) is full: try a smaller batch, "
                           "or see with nvidia-smi who else uses it",
                           what);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "%s: dtrain_cuda.cu was not compiled for this GPU (%s): compile it with "
                           "nvcc -arch=native, or name the architecture, such as -arch=sm_90",
                           what, name);
    if (error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "%s cannot be part of the graph that is captured (%s: %s)", what, name,
                           text);
    if (error == cudaErrorInvalidValue || error == cudaErrorInvalidResourceHandle)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: %s (%s)", what, name, text);
    return dtrain_fail(DTRAIN_ERROR_SYSTEM, "%s: %s (%s)", what, name, text);
}

/* Check that a guest's device is current on this thread. */
static dtrain_result dtrain_cuda_here(const dtrain_cuda_state *state, const char *what)
{
    int index = state->index;
    if (state->guest) DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaGetDevice(&index), "cudaGetDevice"));
    if (index == state->index) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_USAGE,
                       "%s: GPU %d is current on this thread, and this rank has GPU %d: call "
                       "cudaSetDevice(%d) before dtrain",
                       what, index, state->index, state->index);
}

static bool dtrain_cuda_capturing(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (state->capturing || !state->host_stream) return state->capturing;
    const cudaError_t error = cudaStreamIsCapturing(state->stream, &status);
    if (error != cudaSuccess) cudaGetLastError(); /* the next call on the stream reports it */
    state->host_graphs = state->host_graphs || status != cudaStreamCaptureStatusNone;
    return error == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

/* Refuse a call that waits or allocates while a graph is captured: the driver would invalidate the
 * whole capture. */
static dtrain_result dtrain_cuda_not_captured(dtrain_device *device, const char *what)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_here(dtrain_cuda_state_of(device), what));
    if (!dtrain_cuda_capturing(device)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "%s is not possible while a graph is captured: only kernels, zero, "
                       "copy_async and copies within the device are recorded. Run the step once "
                       "before it is captured, since the first one allocates, and keep what the "
                       "host reads, writes or waits for outside of the capture",
                       what);
}

/* Refuse a data type other than F32, BF16, F16 and 0, which means F32. */
static dtrain_result dtrain_cuda_known_dtype(const char *name, dtrain_dtype dtype)
{
    if (dtype == DTRAIN_DTYPE_F32 || dtype == DTRAIN_DTYPE_BF16 || dtype == DTRAIN_DTYPE_F16)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "%s takes f32, bf16 and f16, found the data type %d (%s)", name, (int)dtype,
                       dtrain_dtype_name(dtype));
}

/* ---- Waiting ----------------------------------------------------------------------------------*/

/* Poll until the stream is idle. A kernel of this file always ends; a kernel that waits for other
 * ranks belongs to a communicator, which keeps its own deadline in while_waiting. */
static dtrain_result dtrain_cuda_poll(dtrain_device *device, cudaStream_t stream)
{
    const int spins = dtrain_cuda_state_of(device)->spins;
    const double deadline = dtrain_seconds() + DTRAIN_CUDA_TIMEOUT_S;
    for (int polls = 0;; polls++) {
        const cudaError_t error = cudaStreamQuery(stream);
        if (error != cudaErrorNotReady) return dtrain_cuda_check(error, "waiting for the GPU");
        cudaGetLastError();
        if (device->while_waiting) DTRAIN_CUDA_TRY(device->while_waiting(device->waiting_user));
        if (dtrain_seconds() > deadline)
            return dtrain_fail(DTRAIN_ERROR_TIMEOUT,
                               "the GPU did not finish its work within %d seconds",
                               (int)DTRAIN_CUDA_TIMEOUT_S);
        if (polls >= spins) {
            const struct timespec pause = {0, DTRAIN_CUDA_PAUSE_NS};
            nanosleep(&pause, NULL);
        }
    }
}

/* Wait until the device has passed `mark`, then record it anew in the compute stream.
 *
 * The driver's queue holds about a thousand launches, and a launch waits inside the driver if the
 * queue is full: forever, after a collective that waits for a dead rank. So every 128th kernel
 * records a mark. There are two marks, and a mark is recorded only after the device has passed it:
 * at most 3 * 128 kernels are queued. */
static dtrain_result dtrain_cuda_await_mark(dtrain_device *device, cudaEvent_t mark)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    for (;;) {
        const cudaError_t error = cudaEventQuery(mark);
        if (error == cudaSuccess) break;
        if (error != cudaErrorNotReady) return dtrain_cuda_check(error, "waiting for the GPU");
        cudaGetLastError();
        if (device->while_waiting) DTRAIN_CUDA_TRY(device->while_waiting(device->waiting_user));
        const struct timespec pause = {0, DTRAIN_CUDA_PAUSE_NS};
        nanosleep(&pause, NULL);
    }
    return dtrain_cuda_check(cudaEventRecord(mark, state->stream), "waiting for the GPU");
}

/* Keep the launch queue short; called before every launch. False: an error in state->queue_error.
 * Kernels that a graph captures are not queued and do not count; a host's capture is checked when a
 * mark is due. */
static bool dtrain_cuda_limit_queue(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    state->queue_error = dtrain_cuda_here(state, "a kernel");
    if (state->queue_error != DTRAIN_OK) return false;
    if (state->capturing || ++state->launches % DTRAIN_CUDA_MARK_EVERY) return true;
    if (dtrain_cuda_capturing(device)) {
        state->launches--;
        return true;
    }
    cudaEvent_t mark = state->marks[state->launches / DTRAIN_CUDA_MARK_EVERY % 2];
    state->queue_error = dtrain_cuda_await_mark(device, mark);
    return state->queue_error == DTRAIN_OK;
}

/* Clear the fault record, with one thread. This is also the first kernel to run on a device: a
 * program without code for the GPU's architecture fails here. */
static __global__ void dtrain_cuda_clear_fault_kernel(dtrain_cuda_fault *fault)
{
    fault->kind = DTRAIN_CUDA_NO_FAULT;
    fault->reserved = 0;
    fault->value = fault->row = fault->limit = 0;
}

static dtrain_result dtrain_cuda_clear_fault(dtrain_device *device)
{
    return DTRAIN_CUDA_RUN(device, "the first kernel", dtrain_cuda_clear_fault_kernel, 1, 1, 0,
                           dtrain_cuda_state_of(device)->fault);
}

static dtrain_result dtrain_cuda_report(const dtrain_cuda_fault *fault)
{
    switch (fault->kind) {
    case DTRAIN_CUDA_NO_FAULT: return DTRAIN_OK;
    case DTRAIN_CUDA_BAD_TOKEN:
        return dtrain_fail(DTRAIN_ERROR_DATA, "token %lld at row %lld is outside [0, %lld)",
                           fault->value, fault->row, fault->limit);
    case DTRAIN_CUDA_BAD_TARGET:
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "target %lld at row %lld is outside [0, %lld) and not -1 (ignored)",
                           fault->value, fault->row, fault->limit);
    case DTRAIN_CUDA_BAD_INDEX:
        return dtrain_fail(DTRAIN_ERROR_DATA, "index %lld at place %lld is outside [0, %lld)",
                           fault->value, fault->row, fault->limit);
    case DTRAIN_CUDA_BAD_KEY_LENGTH:
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "attention: key length %lld of batch element %lld is outside [0, %lld]",
                           fault->value, fault->row, fault->limit);
    default:
        return dtrain_fail(DTRAIN_ERROR_INTERNAL, "the GPU's fault record has the unknown kind %u",
                           fault->kind);
    }
}

/* Wait for the compute stream and report the fault that its kernels recorded, once. The copy of the
 * record is queued before the wait, so that one wait serves both. */
static dtrain_result dtrain_cuda_await(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    DTRAIN_CUDA_TRY(
        dtrain_cuda_check(cudaMemcpyAsync(state->host_fault, state->fault, sizeof *state->fault,
                                          cudaMemcpyDeviceToHost, state->stream),
                          "waiting for the GPU"));
    DTRAIN_CUDA_TRY(dtrain_cuda_poll(device, state->stream));
    if (state->host_fault->kind == DTRAIN_CUDA_NO_FAULT) return DTRAIN_OK;
    DTRAIN_CUDA_TRY(dtrain_cuda_clear_fault(device));
    return dtrain_cuda_report(state->host_fault);
}

/* Wait for all streams; a recorded fault stays recorded. */
static dtrain_result dtrain_cuda_drain(dtrain_device *device)
{
    for (dtrain_stream *stream = dtrain_cuda_state_of(device)->streams; stream;
         stream = stream->next)
        DTRAIN_CUDA_TRY(dtrain_cuda_poll(device, stream->native));
    return dtrain_cuda_poll(device, dtrain_cuda_state_of(device)->stream);
}

static void dtrain_cuda_abandon_capture(dtrain_cuda_state *state)
{
    cudaGraph_t unfinished = NULL;
    if (!state->capturing) return;
    state->capturing = false;
    if (cudaStreamEndCapture(state->stream, &unfinished) == cudaSuccess)
        cudaGraphDestroy(unfinished);
    cudaGetLastError();
}

/* Free CUDA's graphs. A running graph finishes. */
static void dtrain_cuda_graphs_drop(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    dtrain_cuda_abandon_capture(state);
    for (dtrain_graph *graph = state->graphs; graph; graph = graph->next) {
        if (graph->native && cudaGraphExecDestroy(graph->native) != cudaSuccess) cudaGetLastError();
        graph->native = NULL;
    }
}

static bool dtrain_cuda_is_running(const dtrain_cuda_state *state)
{
    bool running = cudaStreamQuery(state->stream) == cudaErrorNotReady;
    for (const dtrain_stream *stream = state->streams; stream; stream = stream->next)
        running = running || cudaStreamQuery(stream->native) == cudaErrorNotReady;
    cudaGetLastError();
    return running;
}

/* Decide whether memory can be freed. cudaFree waits for kernels, and a stuck kernel never ends:
 * its memory stays until the end of the process. A lost device runs nothing, so memory can be
 * freed. A caller that frees during a capture is cleaning up after an error: the capture ends, and
 * graph_end reports it. A capture of the host program continues, and waiting would spoil it: memory
 * freed meanwhile also stays until the end of the process. */
static bool dtrain_cuda_may_free(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    if (!state->stream) return true;
    dtrain_cuda_abandon_capture(state);
    if (dtrain_cuda_capturing(device)) return false;
    if (dtrain_cuda_drain(device) == DTRAIN_OK) return true;
    const double deadline = dtrain_seconds() + (state->stuck ? 0 : DTRAIN_CUDA_GRACE_S);
    while (dtrain_cuda_is_running(state)) {
        const struct timespec pause = {0, DTRAIN_CUDA_PAUSE_NS};
        state->stuck = dtrain_seconds() >= deadline;
        if (state->stuck) return false;
        nanosleep(&pause, NULL);
    }
    state->stuck = false;
    return true;
}

static dtrain_result dtrain_cuda_synchronize(dtrain_device *device)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "synchronize"));
    DTRAIN_CUDA_TRY(dtrain_cuda_drain(device));
    return dtrain_cuda_await(device);
}

/* ---- Create, destroy, query -------------------------------------------------------------------*/

/* Explain why no GPU could be opened. CUDA reports a missing driver as a driver that is too old;
 * the driver's version tells them apart. */
static dtrain_result dtrain_cuda_explain_opening(cudaError_t error)
{
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    cudaGetLastError();
    if (error == cudaErrorNoDevice)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES, or use the "
                           "CPU device (device_ops NULL)");
    if (error == cudaErrorInsufficientDriver && driver == 0)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "this machine has no NVIDIA driver: install one (in a container, start "
                           "it with --gpus), or use the CPU device (device_ops NULL)");
    if (error == cudaErrorInsufficientDriver)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "the NVIDIA driver supports CUDA %d.%d, the program was built with CUDA "
                           "%d.%d: update the driver, or build with an older toolkit",
                           driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return dtrain_fail(error == cudaErrorMemoryAllocation ? DTRAIN_ERROR_MEMORY
                                                          : DTRAIN_ERROR_SYSTEM,
                       "the GPU cannot be opened: %s (%s). See with nvidia-smi who else uses it, "
                       "perhaps alone, and whether the driver works",
                       cudaGetErrorName(error), cudaGetErrorString(error));
}

static dtrain_result dtrain_cuda_attribute(int *value, cudaDeviceAttr attribute, int index)
{
    return dtrain_cuda_check(cudaDeviceGetAttribute(value, attribute, index),
                             "asking for a property of the GPU");
}

/* Make the rank's GPU the current device of this thread, or take the current device. Read its
 * properties. */
static dtrain_result dtrain_cuda_select(const dtrain_device_desc *desc, dtrain_cuda_state *state)
{
    int count = 0, shared_limit = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count == 0) error = cudaErrorNoDevice;
    if (error != cudaSuccess) return dtrain_cuda_explain_opening(error);
    state->guest = desc->device_index == DTRAIN_DEVICE_CURRENT;
    state->index = state->guest ? 0 : (int)(desc->device_index % (uint32_t)count);
    error = state->guest ? cudaGetDevice(&state->index) : cudaSetDevice(state->index);
    if (error != cudaSuccess) return dtrain_cuda_explain_opening(error);
    DTRAIN_CUDA_TRY(dtrain_cuda_attribute(&state->multiprocessors, cudaDevAttrMultiProcessorCount,
                                          state->index));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_attribute(&state->major, cudaDevAttrComputeCapabilityMajor, state->index));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_attribute(&state->minor, cudaDevAttrComputeCapabilityMinor, state->index));
    DTRAIN_CUDA_TRY(dtrain_cuda_attribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                          state->index));
    state->shared_limit = (size_t)shared_limit;
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_make_stream(bool high_priority, cudaStream_t *out)
{
    int least = 0, greatest = 0;
    DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                                      "asking for stream priorities"));
    return dtrain_cuda_check(
        cudaStreamCreateWithPriority(out, cudaStreamNonBlocking, high_priority ? greatest : least),
        "creating a stream");
}

/* Take the host's stream as the compute stream. An event of the current device can be recorded only
 * in a stream of that device, in every version of CUDA. */
static dtrain_result dtrain_cuda_take_stream(cudaStream_t stream, dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    state->stream = stream;
    state->host_stream = true;
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "joining with a stream"));
    const cudaError_t error = cudaEventRecord(state->marks[0], stream);
    if (error == cudaErrorInvalidResourceHandle) {
        state->stream = NULL;
        cudaGetLastError();
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "the stream is not one of GPU %d, which is current: call cudaSetDevice "
                           "first, or give a stream that was made on this GPU and still exists",
                           state->index);
    }
    return dtrain_cuda_check(error, "recording an event in the host's stream");
}

static dtrain_result dtrain_cuda_open_lt(dtrain_cuda_state *state)
{
    state->workspace_bytes = state->major >= 9 ? DTRAIN_CUDA_LT_BYTES_SM90 : DTRAIN_CUDA_LT_BYTES;
    DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaMalloc(&state->workspace, state->workspace_bytes),
                                      "allocating the workspace of cublasLt"));
    const cublasStatus_t status = cublasLtCreate(&state->lt);
    if (status == CUBLAS_STATUS_SUCCESS) return DTRAIN_OK;
    state->lt = NULL;
    cudaGetLastError();
    return dtrain_fail(status == CUBLAS_STATUS_ALLOC_FAILED ? DTRAIN_ERROR_MEMORY
                                                            : DTRAIN_ERROR_SYSTEM,
                       "cublasLtCreate failed with cuBLAS status %d: is the library that of the "
                       "toolkit the program was built with?",
                       (int)status);
}

static dtrain_result dtrain_cuda_open(const dtrain_device_desc *desc, dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    DTRAIN_CUDA_TRY(dtrain_cuda_select(desc, state));
    for (cudaEvent_t &mark : state->marks)
        DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaEventCreateWithFlags(&mark, cudaEventDisableTiming),
                                          "creating an event"));
    DTRAIN_CUDA_TRY(desc->stream ? dtrain_cuda_take_stream((cudaStream_t)desc->stream, device)
                                 : dtrain_cuda_make_stream(false, &state->stream));
    DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaMalloc((void **)&state->fault, sizeof *state->fault),
                                      "allocating the fault record"));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_check(cudaMallocHost((void **)&state->host_fault, sizeof *state->host_fault),
                          "allocating the fault record"));
    cudaFuncAttributes code;
    DTRAIN_CUDA_TRY(dtrain_cuda_check(
        cudaFuncGetAttributes(&code, (const void *)dtrain_cuda_clear_fault_kernel),
        "asking what the kernels were compiled for"));
    state->code_version = code.ptxVersion;
    DTRAIN_CUDA_TRY(dtrain_cuda_clear_fault(device));
    DTRAIN_CUDA_TRY(dtrain_cuda_await(device));
    return dtrain_cuda_open_lt(state);
}

static void dtrain_cuda_free_retired(dtrain_cuda_state *state)
{
    while (state->retired_count > 0) cudaFree(state->retired[--state->retired_count]);
}

/* Destroy the device, which can be half made or lost: missing parts are NULL, and errors do not
 * matter. */
static void dtrain_cuda_destroy(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    if (!state) return;
    const cudaError_t before = cudaPeekAtLastError();
    const bool may_free = dtrain_cuda_may_free(device);
    dtrain_cuda_graphs_drop(device);
    while (state->graphs) {
        dtrain_graph *graph = state->graphs;
        state->graphs = graph->next;
        dtrain_cuda_host_give(&state->allocator, graph, sizeof *graph);
    }
    if (state->gemm_cache) dtrain_cuda_gemm_cache_free(state);
    if (state->lt) cublasLtDestroy(state->lt);
    if (may_free) {
        dtrain_cuda_free_retired(state);
        if (state->scratch) cudaFree(state->scratch);
        if (state->workspace) cudaFree(state->workspace);
        if (state->fault) cudaFree(state->fault);
        if (state->host_fault) cudaFreeHost(state->host_fault);
    }
    while (state->streams) {
        dtrain_stream *stream = state->streams;
        state->streams = stream->next;
        cudaStreamDestroy(stream->native);
        dtrain_cuda_host_give(&state->allocator, stream, sizeof *stream);
    }
    for (cudaEvent_t mark : state->marks)
        if (mark) cudaEventDestroy(mark);
    if (state->stream && !state->host_stream) cudaStreamDestroy(state->stream);
    if (cudaPeekAtLastError() != before) cudaGetLastError(); /* else it is the host's to read */
    const dtrain_allocator allocator = state->allocator;
    dtrain_cuda_host_give(&allocator, state, sizeof *state);
    device->state = NULL;
}

static dtrain_result dtrain_cuda_create(const dtrain_device_desc *desc, dtrain_device *device)
{
    device->state = NULL;
    if (desc->math > DTRAIN_MATH_BF16)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "math is %u, which is not a dtrain_math",
                           (unsigned)desc->math);
    dtrain_cuda_state *state =
        (dtrain_cuda_state *)dtrain_cuda_host_take(&desc->allocator, sizeof(dtrain_cuda_state));
    if (!state) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for the state of a GPU");
    state->allocator = desc->allocator;
    state->math = desc->math ? desc->math : (uint32_t)DTRAIN_MATH_FP32;
    state->tune = desc->tune;
    state->spins = desc->oversubscribed ? 0 : DTRAIN_CUDA_SPINS;
    device->state = state;
    const dtrain_result result = dtrain_cuda_open(desc, device);
    if (result != DTRAIN_OK) dtrain_cuda_destroy(device);
    return result;
}

/* Describe the GPU. The id is the UUID, because slices of one GPU (MIG) share its PCI address. */
static dtrain_result dtrain_cuda_query(dtrain_device *device, dtrain_device_info *info)
{
    const dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    cudaDeviceProp properties;
    size_t free_bytes = 0, memory_bytes = 0;
    int count = 0;
    memset(info, 0, sizeof *info);
    DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaGetDeviceProperties(&properties, state->index),
                                      "cudaGetDeviceProperties"));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_check(cudaMemGetInfo(&free_bytes, &memory_bytes), "cudaMemGetInfo"));
    DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
    snprintf(info->name, sizeof info->name, "%.*s", (int)sizeof info->name - 1, properties.name);
    memcpy(info->id, "GPU-", 4);
    for (int i = 0; i < 16; i++)
        snprintf(info->id + 4 + 2 * i, 3, "%02x",
                 (unsigned)(unsigned char)properties.uuid.bytes[i]);
    info->index = (uint32_t)state->index;
    info->count = (uint32_t)count;
    info->major = (uint32_t)state->major;
    info->minor = (uint32_t)state->minor;
    info->code_version = (uint32_t)state->code_version;
    info->memory_bytes = memory_bytes;
    info->free_bytes = free_bytes;
    info->slow_gemms = dtrain_cuda_gemm_slow_count(state);
    return DTRAIN_OK;
}

/* ==== src/device/cuda/memory.cuh ============================================================== */

/* Memory, streams, events and graphs
 *
 * The entries of the device table that move bytes or order work. Scratch memory belongs to the
 * device: one block that grows in the first step and is stable afterwards, so the steady state
 * allocates nothing and can be captured in a graph. */

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define DTRAIN_CUDA_NVTX 1
#else
#define DTRAIN_CUDA_NVTX 0 /* a toolkit without it: there are no ranges */
#endif

#include <stdio.h>
#include <string.h>

static dtrain_result dtrain_cuda_out_of_memory(const dtrain_device *device, size_t bytes)
{
    size_t free_bytes = 0, memory_bytes = 0;
    cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &memory_bytes);
    cudaGetLastError();
    return dtrain_fail(DTRAIN_ERROR_MEMORY,
                       "no memory for %llu bytes on the GPU: dtrain holds %llu, %llu of %llu are "
                       "free. Try a smaller batch, or see with nvidia-smi who else uses it",
                       (unsigned long long)bytes, (unsigned long long)device->allocated_bytes,
                       (unsigned long long)free_bytes, (unsigned long long)memory_bytes);
}

static dtrain_result dtrain_cuda_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    *memory = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "alloc"));
    DTRAIN_CUDA_TRY(dtrain_device_account(device, &device->allocated_bytes, bytes));
    const cudaError_t error = cudaMalloc(memory, bytes ? bytes : 1); /* NULL would mean failure */
    if (error == cudaSuccess) return DTRAIN_OK;
    device->allocated_bytes -= bytes;
    if (error == cudaErrorMemoryAllocation) return dtrain_cuda_out_of_memory(device, bytes);
    return dtrain_cuda_check(error, "cudaMalloc");
}

static void dtrain_cuda_free(dtrain_device *device, void *memory, size_t bytes)
{
    if (!memory) return;
    device->allocated_bytes -= bytes;
    if (dtrain_cuda_may_free(device) && cudaFree(memory) != cudaSuccess) cudaGetLastError();
}

/* Replace the scratch block by a larger one. A captured graph holds the address of its block: while
 * there are graphs, and after the host program has captured one, the old block stays and the new
 * block has at least twice its size, so the retired blocks together are smaller than the current
 * block. */
static dtrain_result dtrain_cuda_grow_scratch(dtrain_device *device, size_t bytes)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    const bool keep = (state->graphs || state->host_graphs) && state->scratch;
    void *grown = NULL;
    if (keep && bytes < 2 * state->scratch_bytes) bytes = 2 * state->scratch_bytes;
    if (!keep) {
        DTRAIN_CUDA_TRY(dtrain_cuda_drain(device));
        dtrain_cuda_free_retired(state);
        DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaFree(state->scratch), "cudaFree"));
        state->scratch = NULL;
        state->scratch_bytes = 0;
    }
    const cudaError_t error = cudaMalloc(&grown, bytes);
    if (error == cudaErrorMemoryAllocation) return dtrain_cuda_out_of_memory(device, bytes);
    DTRAIN_CUDA_TRY(dtrain_cuda_check(error, "cudaMalloc"));
    if (keep) state->retired[state->retired_count++] = state->scratch;
    state->scratch = grown;
    state->scratch_bytes = bytes;
    return DTRAIN_OK;
}

/* Give at least `bytes` of device scratch, 256-byte aligned. The contents do not survive the
 * operation. The scratch cannot grow while a graph is captured. */
static dtrain_result dtrain_cuda_scratch(dtrain_device *device, size_t bytes, void **memory)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    const bool capturing = dtrain_cuda_capturing(device); /* also notes that the host captures */
    *memory = NULL;
    if (bytes > state->scratch_bytes) {
        if (capturing)
            return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                               "a kernel needs %llu bytes of scratch and has %llu, and a graph is "
                               "being captured: run the step once before it is captured",
                               (unsigned long long)bytes, (unsigned long long)state->scratch_bytes);
        DTRAIN_CUDA_TRY(dtrain_cuda_grow_scratch(device, bytes));
    }
    *memory = state->scratch;
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_copy_kind(dtrain_copy_kind kind, cudaMemcpyKind *out)
{
    *out = kind == DTRAIN_COPY_HOST_TO_DEVICE   ? cudaMemcpyHostToDevice
           : kind == DTRAIN_COPY_DEVICE_TO_HOST ? cudaMemcpyDeviceToHost
                                                : cudaMemcpyDeviceToDevice;
    if (kind >= DTRAIN_COPY_HOST_TO_DEVICE && kind <= DTRAIN_COPY_DEVICE_TO_DEVICE)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "copy: %d is not a dtrain_copy_kind", (int)kind);
}

/* Copy. Between host and device the compute stream is idle before the copy, because the driver can
 * stage pageable memory inside the call, and idle after it, because the driver can also not do so.
 */
static dtrain_result dtrain_cuda_copy(dtrain_device *device, void *to, const void *from,
                                      size_t bytes, dtrain_copy_kind kind)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    const bool waits = kind != DTRAIN_COPY_DEVICE_TO_DEVICE;
    cudaMemcpyKind native;
    DTRAIN_CUDA_TRY(dtrain_cuda_copy_kind(kind, &native));
    if (waits) {
        DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "copy from or to host memory"));
        DTRAIN_CUDA_TRY(dtrain_cuda_await(device));
    }
    if (bytes == 0) return DTRAIN_OK;
    DTRAIN_CUDA_TRY(
        dtrain_cuda_check(cudaMemcpyAsync(to, from, bytes, native, state->stream), "copy"));
    return waits ? dtrain_cuda_poll(device, state->stream) : DTRAIN_OK;
}

static dtrain_result dtrain_cuda_zero(dtrain_device *device, void *memory, size_t bytes)
{
    if (bytes == 0) return DTRAIN_OK;
    return dtrain_cuda_check(
        cudaMemsetAsync(memory, 0, bytes, dtrain_cuda_state_of(device)->stream), "zero");
}

static dtrain_result dtrain_cuda_host_alloc(dtrain_device *device, size_t bytes, void **memory)
{
    char what[80];
    *memory = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "host_alloc"));
    snprintf(what, sizeof what, "page-locking %llu bytes", (unsigned long long)bytes);
    return dtrain_cuda_check(cudaMallocHost(memory, bytes ? bytes : 1), what);
}

static void dtrain_cuda_host_free(dtrain_device *device, void *memory, size_t bytes)
{
    (void)bytes;
    if (!memory || !dtrain_cuda_may_free(device)) return;
    if (cudaFreeHost(memory) != cudaSuccess) cudaGetLastError();
}

static dtrain_result dtrain_cuda_host_register(dtrain_device *device, void *memory, size_t bytes)
{
    char what[80];
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "host_register"));
    snprintf(what, sizeof what, "page-locking %llu bytes at %p", (unsigned long long)bytes, memory);
    return dtrain_cuda_check(cudaHostRegister(memory, bytes, cudaHostRegisterDefault), what);
}

static void dtrain_cuda_host_unregister(dtrain_device *device, void *memory)
{
    if (!memory || !dtrain_cuda_may_free(device)) return;
    if (cudaHostUnregister(memory) != cudaSuccess) cudaGetLastError();
}

static cudaMemoryType dtrain_cuda_memory_type(const void *memory)
{
    cudaPointerAttributes attributes;
    memset(&attributes, 0, sizeof attributes);
    if (cudaPointerGetAttributes(&attributes, memory) == cudaSuccess) return attributes.type;
    cudaGetLastError(); /* old drivers report memory they do not know as an error */
    return cudaMemoryTypeUnregistered;
}

static bool dtrain_cuda_is_device_memory(dtrain_device *device, const void *memory)
{
    (void)device;
    const cudaMemoryType type = dtrain_cuda_memory_type(memory);
    return type == cudaMemoryTypeDevice || type == cudaMemoryTypeManaged;
}

/* ---- Streams and events -----------------------------------------------------------------------*/

static cudaStream_t dtrain_cuda_native(dtrain_device *device, dtrain_stream *stream)
{
    return stream ? stream->native : dtrain_cuda_state_of(device)->stream;
}

/* Copy on a stream without waiting. Pageable memory is refused: the driver would wait inside the
 * call until it has staged it. */
static dtrain_result dtrain_cuda_copy_async(dtrain_device *device, void *to, const void *from,
                                            size_t bytes, dtrain_copy_kind kind,
                                            dtrain_stream *stream)
{
    const void *host = kind == DTRAIN_COPY_HOST_TO_DEVICE   ? from
                       : kind == DTRAIN_COPY_DEVICE_TO_HOST ? to
                                                            : NULL;
    cudaMemcpyKind native;
    DTRAIN_CUDA_TRY(dtrain_cuda_copy_kind(kind, &native));
    if (bytes == 0) return DTRAIN_OK;
    if (host && dtrain_cuda_memory_type(host) != cudaMemoryTypeHost)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "copy_async: the host memory at %p is not page-locked: take it from "
                           "host_alloc, give it to host_register, or use copy",
                           host);
    return dtrain_cuda_check(
        cudaMemcpyAsync(to, from, bytes, native, dtrain_cuda_native(device, stream)), "copy_async");
}

static dtrain_result dtrain_cuda_stream_create(dtrain_device *device, bool high_priority,
                                               dtrain_stream **out)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    *out = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_here(state, "stream_create"));
    dtrain_stream *stream =
        (dtrain_stream *)dtrain_cuda_host_take(&state->allocator, sizeof(dtrain_stream));
    if (!stream) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a stream");
    const dtrain_result result = dtrain_cuda_make_stream(high_priority, &stream->native);
    if (result != DTRAIN_OK) {
        dtrain_cuda_host_give(&state->allocator, stream, sizeof *stream);
        return result;
    }
    stream->next = state->streams;
    state->streams = stream;
    *out = stream;
    return DTRAIN_OK;
}

/* Destroy a stream; its queued work still runs. */
static void dtrain_cuda_stream_destroy(dtrain_device *device, dtrain_stream *stream)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    if (!stream) return;
    for (dtrain_stream **link = &state->streams; *link; link = &(*link)->next)
        if (*link == stream) {
            *link = stream->next;
            break;
        }
    if (cudaStreamDestroy(stream->native) != cudaSuccess) cudaGetLastError();
    dtrain_cuda_host_give(&state->allocator, stream, sizeof *stream);
}

static void *dtrain_cuda_stream_native(dtrain_device *device, dtrain_stream *stream)
{
    return (void *)dtrain_cuda_native(device, stream);
}

static dtrain_result dtrain_cuda_event_create(dtrain_device *device, dtrain_event **out)
{
    cudaEvent_t event = NULL;
    *out = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_here(dtrain_cuda_state_of(device), "event_create"));
    DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                                      "creating an event"));
    *out = (dtrain_event *)event;
    return DTRAIN_OK;
}

static void dtrain_cuda_event_destroy(dtrain_device *device, dtrain_event *event)
{
    (void)device;
    if (event && cudaEventDestroy((cudaEvent_t)event) != cudaSuccess) cudaGetLastError();
}

static dtrain_result dtrain_cuda_event_record(dtrain_device *device, dtrain_event *event,
                                              dtrain_stream *stream)
{
    return dtrain_cuda_check(
        cudaEventRecord((cudaEvent_t)event, dtrain_cuda_native(device, stream)), "event_record");
}

static dtrain_result dtrain_cuda_event_wait(dtrain_device *device, dtrain_event *event,
                                            dtrain_stream *stream)
{
    return dtrain_cuda_check(
        cudaStreamWaitEvent(dtrain_cuda_native(device, stream), (cudaEvent_t)event, 0),
        "event_wait");
}

static dtrain_result dtrain_cuda_event_query(dtrain_device *device, dtrain_event *event, bool *done)
{
    *done = false;
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "event_query"));
    const cudaError_t error = cudaEventQuery((cudaEvent_t)event);
    *done = error == cudaSuccess;
    if (error != cudaErrorNotReady) return dtrain_cuda_check(error, "event_query");
    cudaGetLastError();
    return DTRAIN_OK;
}

/* ---- Graphs -------------------------------------------------------------------------------------
 *
 * A capture belongs to this thread: another thread of the process, such as a watchdog that polls
 * its events, neither breaks the capture nor is recorded. */

static dtrain_result dtrain_cuda_graph_begin(dtrain_device *device)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "graph_begin"));
    DTRAIN_CUDA_TRY(dtrain_cuda_check(
        cudaStreamBeginCapture(state->stream, cudaStreamCaptureModeThreadLocal), "graph_begin"));
    state->capturing = true;
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_graph_end(dtrain_device *device, dtrain_graph **out)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    cudaGraph_t recorded = NULL;
    *out = NULL;
    if (!state->capturing)
        return dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "graph_end: no graph_begin came before it, or the recording has ended since: memory "
            "was freed, which cannot be recorded, or a communicator failed");
    state->capturing = false;
    dtrain_graph *graph =
        (dtrain_graph *)dtrain_cuda_host_take(&state->allocator, sizeof(dtrain_graph));
    cudaError_t error = cudaStreamEndCapture(state->stream, &recorded);
    if (error == cudaSuccess && graph) error = cudaGraphInstantiate(&graph->native, recorded, 0);
    if (recorded) cudaGraphDestroy(recorded);
    if (!graph) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a graph");
    const dtrain_result result = dtrain_cuda_check(error, "graph_end");
    if (result != DTRAIN_OK) {
        dtrain_cuda_host_give(&state->allocator, graph, sizeof *graph);
        return result;
    }
    graph->next = state->graphs;
    state->graphs = graph;
    *out = graph;
    return DTRAIN_OK;
}

/* Launch a graph. A dropped graph is refused with the failure that dropped it, if it persists. */
static dtrain_result dtrain_cuda_graph_launch(dtrain_device *device, dtrain_graph *graph)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_not_captured(device, "graph_launch"));
    if (!graph->native) {
        if (device->while_waiting) DTRAIN_CUDA_TRY(device->while_waiting(device->waiting_user));
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "graph_launch: the graph was dropped when a communicator failed: "
                           "destroy it and record another");
    }
    return dtrain_cuda_check(cudaGraphLaunch(graph->native, dtrain_cuda_state_of(device)->stream),
                             "graph_launch");
}

static void dtrain_cuda_graph_destroy(dtrain_device *device, dtrain_graph *graph)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    if (!graph) return;
    if (graph->native && cudaGraphExecDestroy(graph->native) != cudaSuccess) cudaGetLastError();
    dtrain_graph **link = &state->graphs;
    while (*link != graph) link = &(*link)->next;
    *link = graph->next;
    dtrain_cuda_host_give(&state->allocator, graph, sizeof *graph);
}

/* ---- Ranges -----------------------------------------------------------------------------------*/

/* Open and close an NVTX range. The header that comes with the CUDA Toolkit finds the profiler when
 * the program runs, there is nothing to link; without a profiler a call is a comparison. */
static void dtrain_cuda_range_begin(dtrain_device *device, const char *name)
{
    (void)device, (void)name;
#if DTRAIN_CUDA_NVTX
    (void)nvtxRangePushA(name);
#endif
}

static void dtrain_cuda_range_end(dtrain_device *device)
{
    (void)device;
#if DTRAIN_CUDA_NVTX
    (void)nvtxRangePop();
#endif
}

/* ==== src/device/cuda/elements.cuh ============================================================ */

/* Elementwise: the loop of all such kernels
 *
 * Memory bandwidth is the limit. A thread takes packs of W neighbouring elements, with W such that
 * the widest type of the operation fills 16 bytes: 4 with a float, else 8. Two packs are loaded
 * before the first is stored, because memory can be updated in place and the compiler would not
 * move a load above a store. Unaligned pointers and the last elements are processed one element at
 * a time, so that neighbouring threads still read neighbouring elements.
 *
 * An operation is a struct with `load(i, group)` and `store(i, group)`, where `group` holds one
 * pack of each operand. A group is zeroed before load, so an operand that load skips reads as 0. */

enum { DTRAIN_CUDA_EACH_THREADS = 256 };

template <typename Op>
static __global__ void __launch_bounds__(DTRAIN_CUDA_EACH_THREADS, 2)
    dtrain_cuda_each_kernel(const Op op, int64_t groups, int64_t count)
{
    constexpr int W = Op::width;
    const int64_t threads = (int64_t)gridDim.x * blockDim.x;
    const int64_t me = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t at = me;
    for (; at + threads < groups; at += 2 * threads) {
        typename Op::template group<W> near = {}, far = {};
        op.load(at * W, near);
        op.load((at + threads) * W, far);
        op.store(at * W, near);
        op.store((at + threads) * W, far);
    }
    if (at < groups) {
        typename Op::template group<W> last = {};
        op.load(at * W, last);
        op.store(at * W, last);
    }
    for (int64_t i = groups * W + me; i < count; i += threads) {
        typename Op::template group<1> single = {};
        op.load(i, single);
        op.store(i, single);
    }
}

template <typename Op>
static dtrain_result dtrain_cuda_each(dtrain_device *device, const char *name, const Op &op,
                                      int64_t count, bool aligned)
{
    if (count <= 0) return DTRAIN_OK;
    const int64_t groups = aligned ? count / Op::width : 0;
    const int64_t items = groups ? (groups + 1) / 2 : count;
    const int64_t blocks =
        dtrain_cuda_blocks(dtrain_cuda_state_of(device), items, DTRAIN_CUDA_EACH_THREADS);
    return DTRAIN_CUDA_RUN(device, name, dtrain_cuda_each_kernel<Op>, blocks,
                           DTRAIN_CUDA_EACH_THREADS, 0, op, groups, count);
}

/* ==== src/device/cuda/pointwise.cuh =========================================================== */

/* Functions of single elements: activations, gated products, losses
 *
 * The functions, which products and sums of columns also use, and the two elementwise kernels.
 * Bytes of an element: two reads and one write forward; three reads and two writes backward, and a
 * read of each gradient that is added to. The types are run-time branches, the same in all threads:
 * three types of three operands would be 27 kernels. */

#include <math.h>

/* ---- Activations ------------------------------------------------------------------------------*/

/* Apply an activation. GELU is x / (1 + e^-2u) with u = A (x + B x^3): no cancellation for negative
 * x. Beyond +-9 the divisor is 1, or so large that 0 remains, and e^-2u is still finite at 9. SiLU
 * is x / (1 + e^-x), where an infinite divisor gives the right 0. */
static __device__ __forceinline__ float dtrain_cuda_activate(uint32_t activation, float x)
{
    if (activation == DTRAIN_ACTIVATION_RELU) return x < 0 ? 0.0f : x;
    if (activation == DTRAIN_ACTIVATION_SILU) return x / (1 + expf(-x));
    if (activation != DTRAIN_ACTIVATION_GELU) return x;
    const float a = 0.797884561f, b = 0.044715f; /* a = sqrt(2/pi) */
    const float c = x > 9 ? 9.0f : x < -9 ? -9.0f : x;
    return x / (1 + expf(-2 * a * (c + b * (c * c * c))));
}

/* Compute the derivative of GELU. With u = A (x + B x^3), q = e^-2u and w = 1 / (1 + q), it is
 * dy/dx = w (1 + x q w 2u'). x is clamped to +-10, where the derivative is 0 or 1 already; a NaN
 * fails both comparisons and stays. */
static __device__ __forceinline__ float dtrain_cuda_gelu_slope(float x)
{
    const float a = 0.797884561f, b = 0.044715f; /* a = sqrt(2/pi) */
    x = x > 10 ? 10.0f : x < -10 ? -10.0f : x;
    const float q = expf(-2 * a * (x + b * (x * x * x)));
    const float w = 1 / (1 + q);
    return w * (1 + x * (2 * a + 6 * a * b * (x * x)) * (q * w));
}

/* Compute the derivative of SiLU: with q = e^-x and s = 1 / (1 + q) it is s (1 + x q s). Clamped to
 * -80, where it is below 1e-32: q stays finite. */
static __device__ __forceinline__ float dtrain_cuda_silu_slope(float x)
{
    x = x < -80 ? -80.0f : x;
    const float q = expf(-x), s = 1 / (1 + q);
    return s * (1 + x * (q * s));
}

/* Turn d_out into d_in. The slope of relu at 0 is 0. */
static __device__ __forceinline__ float dtrain_cuda_deactivate(uint32_t activation, float x,
                                                               float d_out)
{
    if (activation == DTRAIN_ACTIVATION_GELU) return d_out * dtrain_cuda_gelu_slope(x);
    if (activation == DTRAIN_ACTIVATION_SILU) return d_out * dtrain_cuda_silu_slope(x);
    return activation == DTRAIN_ACTIVATION_RELU && !(x > 0) ? 0.0f : d_out;
}

/* ---- Functions of two elements: the table of device/cpu/kernels/pointwise.h -------------------*/

static __device__ __forceinline__ float dtrain_cuda_pointwise_value(uint32_t kind, float x,
                                                                    float other)
{
    switch (kind) {
    case DTRAIN_POINTWISE_MULTIPLY: return x * other;
    case DTRAIN_POINTWISE_SWIGLU: return dtrain_cuda_activate(DTRAIN_ACTIVATION_SILU, x) * other;
    case DTRAIN_POINTWISE_SQUARED_ERROR: return (x - other) * (x - other);
    case DTRAIN_POINTWISE_LOGISTIC_LOSS:
        return (x > 0 ? x : 0) - x * other + log1pf(expf(-fabsf(x)));
    default: return dtrain_cuda_activate(kind, x);
    }
}

static __device__ __forceinline__ float dtrain_cuda_pointwise_slope_x(uint32_t kind, float x,
                                                                      float other, float d_y)
{
    switch (kind) {
    case DTRAIN_POINTWISE_MULTIPLY: return d_y * other;
    case DTRAIN_POINTWISE_SWIGLU: return d_y * other * dtrain_cuda_silu_slope(x);
    case DTRAIN_POINTWISE_SQUARED_ERROR: return d_y * (2 * (x - other));
    case DTRAIN_POINTWISE_LOGISTIC_LOSS: return d_y * (1 / (1 + expf(-x)) - other);
    default: return dtrain_cuda_deactivate(kind, x, d_y);
    }
}

static __device__ __forceinline__ float dtrain_cuda_pointwise_slope_other(uint32_t kind, float x,
                                                                          float other, float d_y)
{
    switch (kind) {
    case DTRAIN_POINTWISE_MULTIPLY: return d_y * x;
    case DTRAIN_POINTWISE_SWIGLU: return d_y * dtrain_cuda_activate(DTRAIN_ACTIVATION_SILU, x);
    case DTRAIN_POINTWISE_SQUARED_ERROR: return d_y * (2 * (other - x));
    default: return -d_y * x;
    }
}

/* ---- Kernels ----------------------------------------------------------------------------------*/

/* An operand of a type known at run time; data NULL: no operand. */
struct dtrain_cuda_operand {
    void *data;
    uint32_t dtype;

    template <int W> __device__ __forceinline__ void load(int64_t i, float (&to)[W]) const
    {
        if (dtype == DTRAIN_DTYPE_BF16) load_as<dtrain_cuda_bf16>(i, to);
        else if (dtype == DTRAIN_DTYPE_F16) load_as<dtrain_cuda_f16>(i, to);
        else load_as<float>(i, to);
    }
    template <int W> __device__ __forceinline__ void store(int64_t i, const float (&from)[W]) const
    {
        if (dtype == DTRAIN_DTYPE_BF16) store_as<dtrain_cuda_bf16>(i, from);
        else if (dtype == DTRAIN_DTYPE_F16) store_as<dtrain_cuda_f16>(i, from);
        else store_as<float>(i, from);
    }
    template <typename T, int W>
    __device__ __forceinline__ void load_as(int64_t i, float (&to)[W]) const
    {
        const dtrain_cuda_pack<T, W> pack = dtrain_cuda_load<W>((const T *)data + i);
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) to[j] = dtrain_cuda_widen(pack.at[j]);
    }
    template <typename T, int W>
    __device__ __forceinline__ void store_as(int64_t i, const float (&from)[W]) const
    {
        dtrain_cuda_pack<T, W> pack;
        dtrain_cuda_narrow(from, pack);
        dtrain_cuda_store((T *)data + i, pack);
    }
};

static dtrain_cuda_operand dtrain_cuda_operand_of(const void *data, dtrain_dtype dtype)
{
    const dtrain_cuda_operand operand = {(void *)(uintptr_t)data, (uint32_t)dtype};
    return operand;
}

struct dtrain_cuda_pointwise_op {
    static constexpr int width = 4; /* 16 bytes of fp32, 8 of a half */
    uint32_t kind;
    dtrain_cuda_operand x, other, y;

    template <int W> struct group {
        float x[W], other[W];
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        x.load(i, g.x);
        if (other.data) other.load(i, g.other);
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        float value[W];
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++)
            value[j] = dtrain_cuda_pointwise_value(kind, g.x[j], g.other[j]);
        y.store(i, value);
    }
};

struct dtrain_cuda_pointwise_backward_op {
    static constexpr int width = 4;
    uint32_t kind;
    dtrain_cuda_operand x, other, d_y, d_x, d_other;
    bool accumulate_x, accumulate_other;

    template <int W> struct group {
        float x[W], other[W], d_y[W], d_x[W], d_other[W];
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        x.load(i, g.x);
        d_y.load(i, g.d_y);
        if (other.data) other.load(i, g.other);
        if (d_x.data && accumulate_x) d_x.load(i, g.d_x);
        if (d_other.data && accumulate_other) d_other.load(i, g.d_other);
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        float d[W];
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) {
            d[j] = dtrain_cuda_pointwise_slope_x(kind, g.x[j], g.other[j], g.d_y[j]);
            if (accumulate_x) d[j] += g.d_x[j];
        }
        if (d_x.data) d_x.store(i, d);
        if (!d_other.data) return;
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) {
            d[j] = dtrain_cuda_pointwise_slope_other(kind, g.x[j], g.other[j], g.d_y[j]);
            if (accumulate_other) d[j] += g.d_other[j];
        }
        d_other.store(i, d);
    }
};

/* Check that the kind and the types are known, and that `other` is there exactly if the function
 * has it. */
static dtrain_result dtrain_cuda_check_pointwise(uint32_t kind, const void *other,
                                                 dtrain_dtype x_dtype, dtrain_dtype other_dtype,
                                                 dtrain_dtype y_dtype)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("pointwise, x_dtype", x_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("pointwise, y_dtype", y_dtype));
    if (other) DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("pointwise, other_dtype", other_dtype));
    if (kind < DTRAIN_POINTWISE_RELU || kind > DTRAIN_POINTWISE_LOGISTIC_LOSS)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "pointwise: kind is %u, which is not a dtrain_pointwise",
                           (unsigned)kind);
    if ((kind >= DTRAIN_POINTWISE_MULTIPLY) != (other != NULL))
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT, "pointwise: kind %u is a function of %s, found other %s NULL",
            (unsigned)kind, other ? "one argument" : "two arguments", other ? "not" : "=");
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_pointwise(dtrain_device *device, const dtrain_pointwise_args *args)
{
    const dtrain_cuda_pointwise_op op = {args->kind, dtrain_cuda_operand_of(args->x, args->x_dtype),
                                         dtrain_cuda_operand_of(args->other, args->other_dtype),
                                         dtrain_cuda_operand_of(args->y, args->y_dtype)};
    DTRAIN_CUDA_TRY(dtrain_cuda_check_pointwise(args->kind, args->other, args->x_dtype,
                                                args->other_dtype, args->y_dtype));
    return dtrain_cuda_each(device, "pointwise", op, args->count,
                            dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->other) &&
                                dtrain_cuda_aligned(args->y));
}

static dtrain_result dtrain_cuda_pointwise_backward(dtrain_device *device,
                                                    const dtrain_pointwise_backward_args *args)
{
    const dtrain_cuda_pointwise_backward_op op = {
        args->kind,
        dtrain_cuda_operand_of(args->x, args->x_dtype),
        dtrain_cuda_operand_of(args->other, args->other_dtype),
        dtrain_cuda_operand_of(args->d_y, args->y_dtype),
        dtrain_cuda_operand_of(args->d_x, args->x_dtype),
        dtrain_cuda_operand_of(args->d_other, args->other_dtype),
        args->accumulate_x,
        args->accumulate_other};
    DTRAIN_CUDA_TRY(dtrain_cuda_check_pointwise(args->kind, args->other, args->x_dtype,
                                                args->other_dtype, args->y_dtype));
    if (args->d_other && !args->other)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "pointwise_backward: kind %u has no second argument, expected d_other = "
                           "NULL",
                           (unsigned)args->kind);
    const bool aligned = dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->other) &&
                         dtrain_cuda_aligned(args->d_y) && dtrain_cuda_aligned(args->d_x) &&
                         dtrain_cuda_aligned(args->d_other);
    return dtrain_cuda_each(device, "pointwise_backward", op, args->count, aligned);
}

/* ==== src/device/cuda/elementwise.cuh ========================================================= */

/* Add, axpby, dropout, convert, activation
 *
 * Each is a struct for the loop of elements.cuh, and a launcher that picks the types. */

#include <math.h>

/* ---- add: x (count), y (count) -> out (count) ---------------------------------------------------
 *
 * Two reads, one write; x and out have one type, y can have another. */

template <typename X, typename Y> struct dtrain_cuda_add_op {
    static constexpr int width = dtrain_cuda_width<X, Y>();
    const X *x;
    const Y *y;
    X *out;

    template <int W> struct group {
        dtrain_cuda_pack<X, W> x;
        dtrain_cuda_pack<Y, W> y;
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        g.x = dtrain_cuda_load<W>(x + i);
        g.y = dtrain_cuda_load<W>(y + i);
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        float sum[W];
        dtrain_cuda_pack<X, W> narrow;
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++)
            sum[j] = dtrain_cuda_widen(g.x.at[j]) + dtrain_cuda_widen(g.y.at[j]);
        dtrain_cuda_narrow(sum, narrow);
        dtrain_cuda_store(out + i, narrow);
    }
};

template <typename X, typename Y>
static dtrain_result dtrain_cuda_add_as(dtrain_device *device, const dtrain_add_args *args)
{
    const dtrain_cuda_add_op<X, Y> op = {(const X *)args->x, (const Y *)args->y, (X *)args->out};
    const bool aligned = dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->y) &&
                         dtrain_cuda_aligned(args->out);
    return dtrain_cuda_each(device, "add", op, args->count, aligned);
}

template <typename X>
static dtrain_result dtrain_cuda_add_to(dtrain_device *device, const dtrain_add_args *args)
{
    if (args->y_dtype == DTRAIN_DTYPE_BF16)
        return dtrain_cuda_add_as<X, dtrain_cuda_bf16>(device, args);
    if (args->y_dtype == DTRAIN_DTYPE_F16)
        return dtrain_cuda_add_as<X, dtrain_cuda_f16>(device, args);
    return dtrain_cuda_add_as<X, float>(device, args);
}

struct dtrain_cuda_add_f64_op {
    static constexpr int width = 1;
    const double *x, *y;
    double *out;
    template <int W> struct group {
    };
    template <int W> __device__ void load(int64_t, group<W> &) const {}
    template <int W> __device__ void store(int64_t i, const group<W> &) const
    {
        out[i] = x[i] + y[i];
    }
};

static dtrain_result dtrain_cuda_add(dtrain_device *device, const dtrain_add_args *args)
{
    const dtrain_cuda_add_f64_op wide = {(const double *)args->x, (const double *)args->y,
                                         (double *)args->out};
    if (args->x_dtype == DTRAIN_DTYPE_F64)
        return dtrain_cuda_each(device, "add", wide, args->count, false);
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("add", args->x_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("add", args->y_dtype));
    return DTRAIN_CUDA_BY_DTYPE(args->x_dtype, dtrain_cuda_add_to)(device, args);
}

/* ---- axpby: x (count), (1) or NULL, y (count) ---------------------------------------------------
 *
 * One read and one write; y is read only to be accumulated into. x NULL stands for 1. */

template <typename T> struct dtrain_cuda_axpby_op {
    static constexpr int width = dtrain_cuda_width<T, T>();
    const T *x;
    T *y;
    float a, b;
    bool same, accumulate; /* same: one x for all elements */

    template <int W> struct group {
        dtrain_cuda_pack<T, W> x, y;
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        if (!same) g.x = dtrain_cuda_load<W>(x + i);
        if (accumulate) g.y = dtrain_cuda_load<W>(y + i);
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        const float one = !same ? 0 : x ? dtrain_cuda_widen(x[0]) : 1;
        float value[W];
        dtrain_cuda_pack<T, W> out;
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) {
            const float from = same ? one : dtrain_cuda_widen(g.x.at[j]);
            value[j] = accumulate ? __fmaf_rn(a, from, b * dtrain_cuda_widen(g.y.at[j])) : a * from;
        }
        dtrain_cuda_narrow(value, out);
        dtrain_cuda_store(y + i, out);
    }
};

template <typename T>
static dtrain_result dtrain_cuda_axpby_as(dtrain_device *device, const dtrain_axpby_args *args)
{
    const bool same = args->broadcast || !args->x;
    const dtrain_cuda_axpby_op<T> op = {(const T *)args->x, (T *)args->y, (float)args->a,
                                        (float)args->b,     same,         args->accumulate};
    const bool aligned = (same || dtrain_cuda_aligned(args->x)) && dtrain_cuda_aligned(args->y);
    return dtrain_cuda_each(device, "axpby", op, args->count, aligned);
}

/* Multiply y (count) by a / divisor[0]. If that is 1, no thread reads y. */
template <typename T>
static __global__ void __launch_bounds__(DTRAIN_CUDA_EACH_THREADS)
    dtrain_cuda_divide_kernel(T *y, int64_t count, T a, const float *divisor)
{
    const T by = divisor[0];
    const int64_t threads = (int64_t)gridDim.x * blockDim.x;
    if (by == 0 || by == a) return;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads)
        y[i] *= a / by;
}

template <typename T>
static dtrain_result dtrain_cuda_divide(dtrain_device *device, const dtrain_axpby_args *args)
{
    return DTRAIN_CUDA_RUN(
        device, "axpby", dtrain_cuda_divide_kernel<T>,
        dtrain_cuda_blocks(dtrain_cuda_state_of(device), args->count, DTRAIN_CUDA_EACH_THREADS),
        DTRAIN_CUDA_EACH_THREADS, 0, (T *)args->y, args->count, (T)args->a, args->divisor);
}

struct dtrain_cuda_axpby_f64_op {
    static constexpr int width = 1;
    dtrain_axpby_args args;
    template <int W> struct group {
    };
    template <int W> __device__ void load(int64_t, group<W> &) const {}
    template <int W> __device__ void store(int64_t i, const group<W> &) const
    {
        const double *x = (const double *)args.x;
        double *y = (double *)args.y;
        y[i] =
            args.a * (!x ? 1 : x[args.broadcast ? 0 : i]) + (args.accumulate ? args.b * y[i] : 0);
    }
};

static dtrain_result dtrain_cuda_axpby(dtrain_device *device, const dtrain_axpby_args *args)
{
    const bool divides = args->divisor && args->count > 0;
    const dtrain_cuda_axpby_f64_op wide = {*args};
    if (args->dtype == DTRAIN_DTYPE_F64)
        return divides ? dtrain_cuda_divide<double>(device, args)
                       : dtrain_cuda_each(device, "axpby", wide, args->count, false);
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("axpby", args->dtype));
    if (divides) return dtrain_cuda_divide<float>(device, args);
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_axpby_as)(device, args);
}

/* ---- dropout: x (count) -> y (count) ------------------------------------------------------------
 *
 * One read (two to accumulate) and one write. Element i takes word i % 4 of Philox block i / 4, of
 * which the upper 24 bits are compared as integers: the bits of dtrain_random_uniform, so the mask
 * is the CPU device's. In a part, i is an element's number in the whole tensor; if these numbers
 * are not consecutive whole packs, each element draws a block. */

/* Compute dtrain__philox of core/random.c: four random words of a seed, a stream and a counter. */
static __device__ __forceinline__ void dtrain_cuda_philox(uint64_t seed, uint64_t stream,
                                                          uint64_t counter, uint32_t out[4])
{
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    DTRAIN_CUDA_UNROLL
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Give the random words of elements i .. i + W; i must be a multiple of W, and W 1, 4 or 8. */
template <int W>
static __device__ __forceinline__ void dtrain_cuda_random(uint64_t seed, uint64_t stream, int64_t i,
                                                          uint32_t words[W])
{
    DTRAIN_CUDA_UNROLL
    for (int j = 0; j < W; j += 4) {
        uint32_t block[4];
        dtrain_cuda_philox(seed, stream, (uint64_t)(i + j) / 4, block);
        if (W == 1) {
            const int word = (int)(i % 4);
            words[0] = word < 2 ? (word ? block[1] : block[0]) : (word == 3 ? block[3] : block[2]);
        } else {
            DTRAIN_CUDA_UNROLL
            for (int k = 0; k < 4 && j + k < W; k++) words[j + k] = block[k];
        }
    }
}

static __device__ __forceinline__ int64_t dtrain_cuda_part_number(const dtrain_part &part,
                                                                  int64_t i)
{
    uint32_t s = 0;
    if (!part.segments) return part.first + i;
    int64_t column = i % part.n;
    while (s + 1 < part.segments && column >= part.segment[s].length)
        column -= part.segment[s++].length;
    return part.first + i / part.n * part.whole_n + part.segment[s].column + column;
}

/* PACKS: part has no segments, and its first number is a multiple of a pack. */
template <typename T, bool PACKS> struct dtrain_cuda_dropout_op {
    static constexpr int width = dtrain_cuda_width<T, T>();
    const T *x;
    T *y;
    float scale;
    uint32_t threshold; /* a 24-bit uniform below it is dropped */
    uint64_t seed, stream;
    const dtrain_step_scalars *scalars;
    bool accumulate;
    dtrain_part part;

    template <int W> struct group {
        dtrain_cuda_pack<T, W> x, y;
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        g.x = dtrain_cuda_load<W>(x + i);
        if (accumulate) g.y = dtrain_cuda_load<W>(y + i);
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        uint32_t words[W];
        float value[W];
        dtrain_cuda_pack<T, W> out;
        const uint64_t now = seed + (scalars ? scalars->seed : 0);
        if (PACKS) dtrain_cuda_random<W>(now, stream, part.first + i, words);
        for (int j = 0; j < W && !PACKS; j++)
            dtrain_cuda_random<1>(now, stream, dtrain_cuda_part_number(part, i + j), words + j);
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) {
            const bool kept = words[j] >> 8 >= threshold;
            value[j] = kept ? scale * dtrain_cuda_widen(g.x.at[j]) : 0.0f;
            if (accumulate) value[j] += dtrain_cuda_widen(g.y.at[j]);
        }
        dtrain_cuda_narrow(value, out);
        dtrain_cuda_store(y + i, out);
    }
};

template <typename T, bool PACKS>
static dtrain_result dtrain_cuda_dropout_by(dtrain_device *device, const dtrain_dropout_args *args)
{
    const double least = ceil((double)args->probability * 16777216.0);
    const dtrain_cuda_dropout_op<T, PACKS> op = {(const T *)args->x,
                                                 (T *)args->y,
                                                 args->probability < 1 ? 1 / (1 - args->probability)
                                                                       : 0,
                                                 least < 16777216.0 ? (uint32_t)least : 16777216u,
                                                 args->seed,
                                                 args->stream,
                                                 args->scalars,
                                                 args->accumulate,
                                                 args->part};
    const bool aligned = dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->y);
    return dtrain_cuda_each(device, "dropout", op, args->count, aligned);
}

template <typename T>
static dtrain_result dtrain_cuda_dropout_as(dtrain_device *device, const dtrain_dropout_args *args)
{
    const bool packs =
        !args->part.segments && args->part.first % dtrain_cuda_dropout_op<T, true>::width == 0;
    return packs ? dtrain_cuda_dropout_by<T, true>(device, args)
                 : dtrain_cuda_dropout_by<T, false>(device, args);
}

static dtrain_result dtrain_cuda_dropout(dtrain_device *device, const dtrain_dropout_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("dropout", args->dtype));
    if (!(args->probability >= 0))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dropout: probability is %g, expected 0 to 1",
                           (double)args->probability);
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_dropout_as)(device, args);
}

/* ---- convert: x (count) -> y (count) ------------------------------------------------------------
 *
 * One read and one write, rounded to nearest; every NaN becomes 0x7fff in a half. */

template <typename X, typename Y> struct dtrain_cuda_convert_op {
    static constexpr int width = dtrain_cuda_width<X, Y>();
    const X *x;
    Y *y;

    template <int W> using group = dtrain_cuda_pack<X, W>;
    template <int W> __device__ void load(int64_t i, dtrain_cuda_pack<X, W> &g) const
    {
        g = dtrain_cuda_load<W>(x + i);
    }
    template <int W> __device__ void store(int64_t i, const dtrain_cuda_pack<X, W> &g) const
    {
        float value[W];
        dtrain_cuda_pack<Y, W> out;
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) value[j] = dtrain_cuda_widen(g.at[j]);
        dtrain_cuda_narrow(value, out);
        dtrain_cuda_store(y + i, out);
    }
};

template <typename X, typename Y>
static dtrain_result dtrain_cuda_convert_as(dtrain_device *device, const dtrain_convert_args *args)
{
    const dtrain_cuda_convert_op<X, Y> op = {(const X *)args->x, (Y *)args->y};
    const bool aligned = dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->y);
    return dtrain_cuda_each(device, "convert", op, args->count, aligned);
}

/* Copy if both types are equal, so that a NaN keeps its bits. */
static dtrain_result dtrain_cuda_convert(dtrain_device *device, const dtrain_convert_args *args)
{
    const dtrain_dtype from = args->x_dtype, to = args->y_dtype;
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("convert", from));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("convert", to));
    if (from == to) {
        if (args->x == args->y || args->count <= 0) return DTRAIN_OK;
        return dtrain_cuda_copy(device, args->y, args->x,
                                (size_t)args->count * dtrain_dtype_bytes(from),
                                DTRAIN_COPY_DEVICE_TO_DEVICE);
    }
    if (from == DTRAIN_DTYPE_F32)
        return to == DTRAIN_DTYPE_BF16
                   ? dtrain_cuda_convert_as<float, dtrain_cuda_bf16>(device, args)
                   : dtrain_cuda_convert_as<float, dtrain_cuda_f16>(device, args);
    if (to == DTRAIN_DTYPE_F32)
        return from == DTRAIN_DTYPE_BF16
                   ? dtrain_cuda_convert_as<dtrain_cuda_bf16, float>(device, args)
                   : dtrain_cuda_convert_as<dtrain_cuda_f16, float>(device, args);
    return from == DTRAIN_DTYPE_BF16
               ? dtrain_cuda_convert_as<dtrain_cuda_bf16, dtrain_cuda_f16>(device, args)
               : dtrain_cuda_convert_as<dtrain_cuda_f16, dtrain_cuda_bf16>(device, args);
}

/* ---- activation backward: x, d_out (rows,n) -> d_in (rows,n), d_bias (n) ------------------------
 *
 * Two reads, one write. Without d_bias it is elementwise. With d_bias a block takes CHUNK rows of a
 * strip of 32 packs of columns; each warp walks every 8th row with the sums in registers:
 *
 *          n columns                 1. warps: d_in, and the sums of their rows
 *        +------+------+------+      2. block: the 8 warps' sums in order -> partial (chunks,n)
 *  CHUNK |block0|block1|block2|      3. second kernel: the chunks' sums in order -> d_bias
 *        +------+------+------+
 *        |block3| ...
 *
 * Blocks depend only on the shape, so the bits depend only on the inputs. */

enum { DTRAIN_CUDA_CHUNK_ROWS = 64, DTRAIN_CUDA_COLUMN_WARPS = 8, DTRAIN_CUDA_ROWS_AT_ONCE = 2 };

template <typename T> struct dtrain_cuda_deactivate_op {
    static constexpr int width = dtrain_cuda_width<T, T>();
    const T *x, *d_out;
    T *d_in;
    uint32_t activation;

    template <int W> struct group {
        dtrain_cuda_pack<T, W> x, d;
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        if (activation != DTRAIN_ACTIVATION_NONE) g.x = dtrain_cuda_load<W>(x + i);
        g.d = dtrain_cuda_load<W>(d_out + i);
    }
    /* Store d_in, and leave its values in `d`, in fp32. */
    template <int W> __device__ void finish(int64_t i, const group<W> &g, float (&d)[W]) const
    {
        dtrain_cuda_pack<T, W> out;
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < W; j++) {
            const float from =
                activation == DTRAIN_ACTIVATION_NONE ? 0 : dtrain_cuda_widen(g.x.at[j]);
            d[j] = dtrain_cuda_deactivate(activation, from, dtrain_cuda_widen(g.d.at[j]));
        }
        dtrain_cuda_narrow(d, out);
        if (activation != DTRAIN_ACTIVATION_NONE || d_in != d_out) dtrain_cuda_store(d_in + i, out);
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        float d[W];
        finish<W>(i, g, d);
    }
};

/* Store d_in and the column sums of one block: chunk blockIdx / strips of the rows, strip blockIdx
 * % strips of the columns. */
template <typename T, int W>
static __global__ void __launch_bounds__(DTRAIN_CUDA_COLUMN_WARPS *DTRAIN_CUDA_WARP)
    dtrain_cuda_deactivate_columns_kernel(const dtrain_cuda_deactivate_op<T> op, int64_t rows,
                                          int64_t n, int64_t ld, float *partial)
{
    constexpr int strip_columns = W * DTRAIN_CUDA_WARP, step = DTRAIN_CUDA_COLUMN_WARPS;
    __shared__ float sums[DTRAIN_CUDA_COLUMN_WARPS][W][DTRAIN_CUDA_WARP];
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP, warp = threadIdx.x / DTRAIN_CUDA_WARP;
    const int64_t strips = (n + strip_columns - 1) / strip_columns;
    const int64_t chunk = blockIdx.x / strips, first = blockIdx.x % strips * strip_columns;
    const int64_t begin = chunk * DTRAIN_CUDA_CHUNK_ROWS, column = first + lane * W;
    const int64_t end =
        begin + DTRAIN_CUDA_CHUNK_ROWS < rows ? begin + DTRAIN_CUDA_CHUNK_ROWS : rows;
    float sum[W] = {0};
    for (int64_t row = begin + warp; row < end && column < n;
         row += step * DTRAIN_CUDA_ROWS_AT_ONCE) {
        typename dtrain_cuda_deactivate_op<T>::template group<W> g[DTRAIN_CUDA_ROWS_AT_ONCE] = {};
        DTRAIN_CUDA_UNROLL
        for (int u = 0; u < DTRAIN_CUDA_ROWS_AT_ONCE; u++)
            if (row + u * step < end) op.load((row + u * step) * ld + column, g[u]);
        DTRAIN_CUDA_UNROLL
        for (int u = 0; u < DTRAIN_CUDA_ROWS_AT_ONCE; u++) {
            float d[W];
            if (row + u * step >= end) break;
            op.template finish<W>((row + u * step) * ld + column, g[u], d);
            DTRAIN_CUDA_UNROLL
            for (int j = 0; j < W; j++) sum[j] += d[j];
        }
    }
    DTRAIN_CUDA_UNROLL
    for (int j = 0; j < W; j++) sums[warp][j][lane] = sum[j];
    __syncthreads();
    for (int i = threadIdx.x; i < strip_columns && first + i < n; i += blockDim.x) {
        float total = 0;
        for (int w = 0; w < DTRAIN_CUDA_COLUMN_WARPS; w++) total += sums[w][i % W][i / W];
        partial[chunk * n + first + i] = total;
    }
}

/* Compute out (n) = column sums of partial (chunks,n). A block takes 32 columns: warp w adds chunks
 * w, w + 32, ..., and the warps' sums are added in order. */
static __global__ void __launch_bounds__(1024)
    dtrain_cuda_finish_columns_kernel(const float *partial, int64_t chunks, int64_t n, float *out,
                                      bool accumulate)
{
    __shared__ float sums[DTRAIN_CUDA_WARP][DTRAIN_CUDA_WARP];
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP, warp = threadIdx.x / DTRAIN_CUDA_WARP;
    const int64_t column = (int64_t)blockIdx.x * DTRAIN_CUDA_WARP + lane;
    float sum = 0;
    if (column < n) {
        for (int64_t chunk = warp; chunk < chunks; chunk += DTRAIN_CUDA_WARP)
            sum += partial[chunk * n + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < n) {
        float total = accumulate ? out[column] : 0;
        for (int w = 0; w < DTRAIN_CUDA_WARP; w++) total += sums[w][lane];
        out[column] = total;
    }
}

/* Run the backward pass with column sums; the rows of x, d_out and d_in are ld elements apart. */
template <typename T>
static dtrain_result dtrain_cuda_deactivate_columns(dtrain_device *device, const char *name,
                                                    const dtrain_cuda_deactivate_op<T> &op,
                                                    int64_t rows, int64_t n, int64_t ld, float *out,
                                                    bool accumulate)
{
    constexpr int W = dtrain_cuda_deactivate_op<T>::width;
    const bool aligned = n % W == 0 && ld % W == 0 && dtrain_cuda_aligned(op.x) &&
                         dtrain_cuda_aligned(op.d_out) && dtrain_cuda_aligned(op.d_in);
    const int64_t chunks =
        rows > 0 ? (rows + DTRAIN_CUDA_CHUNK_ROWS - 1) / DTRAIN_CUDA_CHUNK_ROWS : 0;
    const int64_t strip = DTRAIN_CUDA_WARP * (aligned ? W : 1);
    const int64_t blocks = chunks * ((n + strip - 1) / strip);
    const int threads = DTRAIN_CUDA_COLUMN_WARPS * DTRAIN_CUDA_WARP;
    void *partial = NULL;
    if (n <= 0) return DTRAIN_OK;
    DTRAIN_CUDA_TRY(
        dtrain_cuda_scratch(device, (size_t)chunks * (size_t)n * sizeof(float), &partial));
    if (blocks > 0 && aligned)
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, name, (dtrain_cuda_deactivate_columns_kernel<T, W>),
                                        blocks, threads, 0, op, rows, n, ld, (float *)partial));
    if (blocks > 0 && !aligned)
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, name, (dtrain_cuda_deactivate_columns_kernel<T, 1>),
                                        blocks, threads, 0, op, rows, n, ld, (float *)partial));
    return DTRAIN_CUDA_RUN(device, name, dtrain_cuda_finish_columns_kernel,
                           (n + DTRAIN_CUDA_WARP - 1) / DTRAIN_CUDA_WARP, 1024, 0,
                           (const float *)partial, chunks, n, out, accumulate);
}

template <typename T>
static dtrain_result dtrain_cuda_activation_backward_as(dtrain_device *device,
                                                        const dtrain_activation_backward_args *args)
{
    const dtrain_cuda_deactivate_op<T> op = {(const T *)args->x, (const T *)args->d_out,
                                             (T *)args->d_in, args->activation};
    const bool aligned = dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->d_out) &&
                         dtrain_cuda_aligned(args->d_in);
    if (args->d_bias)
        return dtrain_cuda_deactivate_columns(device, "activation_backward", op, args->rows,
                                              args->n, args->n, args->d_bias, args->accumulate);
    if (args->activation == DTRAIN_ACTIVATION_NONE && args->d_in == args->d_out) return DTRAIN_OK;
    return dtrain_cuda_each(device, "activation_backward", op, args->rows * args->n, aligned);
}

static dtrain_result dtrain_cuda_activation_backward(dtrain_device *device,
                                                     const dtrain_activation_backward_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("activation_backward", args->dtype));
    if (args->activation > DTRAIN_ACTIVATION_SILU)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "activation_backward: activation is %u, which is not a "
                           "dtrain_activation",
                           (unsigned)args->activation);
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_activation_backward_as)(device, args);
}

/* ==== src/device/cuda/reductions.cuh ========================================================== */

/* Reductions: sum, clip, column sums
 *
 * A reduction takes two kernels: many blocks leave one partial result each, then one block adds
 * them in order. The number of blocks and the elements of each depend only on the count, so the
 * bits depend neither on the size of the GPU nor on the address. Cost: one read of the input, 16
 * bytes a load. */

#include <math.h>

enum {
    DTRAIN_CUDA_SUM_THREADS = 256,
    DTRAIN_CUDA_SUM_BLOCKS = 2048, /* at most: two waves on a large GPU, 16 KiB of partial sums */
    DTRAIN_CUDA_SUM_SHARE = 8192   /* elements that are worth a block */
};

/* Load the pack that begins at i, with 0 for elements from `count` on. */
template <typename T>
static __device__ __forceinline__ void dtrain_cuda_load_pack(const T *x, int64_t i, int64_t count,
                                                             bool aligned, dtrain_cuda_pack<T> &to)
{
    if (aligned && i + dtrain_cuda_pack<T>::width <= count) {
        to = dtrain_cuda_load<dtrain_cuda_pack<T>::width>(x + i);
        return;
    }
    DTRAIN_CUDA_UNROLL
    for (int j = 0; j < dtrain_cuda_pack<T>::width; j++)
        if (i + j < count) to.at[j] = x[i + j];
        else dtrain_cuda_narrow(0, to.at[j]);
}

/* ---- sum: x (count) -> one double, scaled -------------------------------------------------------
 *
 * Bytes: 4 (or 2) read for each element. */

/* Leave in partial[block] the sum of the packs block * threads + thread, then all threads further,
 * and so on. */
template <typename T>
static __global__ void __launch_bounds__(DTRAIN_CUDA_SUM_THREADS)
    dtrain_cuda_sum_kernel(const T *x, int64_t count, bool squares, bool aligned, double *partial)
{
    constexpr int width = dtrain_cuda_pack<T>::width, at_once = 4;
    __shared__ double slots[DTRAIN_CUDA_WARP];
    const int64_t step = (int64_t)gridDim.x * blockDim.x * width;
    double sum = 0;
    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * width; i < count;
         i += at_once * step) {
        dtrain_cuda_pack<T> packs[at_once];
        DTRAIN_CUDA_UNROLL
        for (int u = 0; u < at_once; u++)
            dtrain_cuda_load_pack(x, i + u * step, count, aligned, packs[u]);
        DTRAIN_CUDA_UNROLL
        for (int u = 0; u < at_once; u++) DTRAIN_CUDA_UNROLL
        for (int j = 0; j < width; j++) {
            const double value = (double)dtrain_cuda_widen(packs[u].at[j]);
            sum += squares ? value * value : value;
        }
    }
    sum = dtrain_cuda_block_sum(sum, slots);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

/* Add the partial sums in order, by one block, and scale the total. */
static __global__ void __launch_bounds__(DTRAIN_CUDA_SUM_THREADS)
    dtrain_cuda_finish_sum_kernel(const double *partial, int count, const dtrain_sum_args args)
{
    __shared__ double slots[DTRAIN_CUDA_WARP];
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
    sum = args.scale * dtrain_cuda_block_sum(sum, slots);
    if (threadIdx.x != 0) return;
    if (args.factor) sum *= (double)args.factor[0];
    if (args.accumulate) sum += args.total[0];
    if (args.total) args.total[0] = sum;
    if (args.out) args.out[0] = (float)sum;
}

template <typename T>
static dtrain_result dtrain_cuda_sum_as(dtrain_device *device, const dtrain_sum_args *args)
{
    const int64_t count = args->count > 0 ? args->count : 0;
    const int64_t needed = (count + DTRAIN_CUDA_SUM_SHARE - 1) / DTRAIN_CUDA_SUM_SHARE;
    const int64_t most = DTRAIN_CUDA_SUM_BLOCKS, blocks = needed < most ? needed : most;
    void *partial;
    DTRAIN_CUDA_TRY(dtrain_cuda_scratch(device, DTRAIN_CUDA_SUM_BLOCKS * sizeof(double), &partial));
    if (blocks > 0)
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "sum", dtrain_cuda_sum_kernel<T>, blocks,
                                        DTRAIN_CUDA_SUM_THREADS, 0, (const T *)args->x, count,
                                        args->squares, dtrain_cuda_aligned(args->x),
                                        (double *)partial));
    return DTRAIN_CUDA_RUN(device, "sum", dtrain_cuda_finish_sum_kernel, 1, DTRAIN_CUDA_SUM_THREADS,
                           0, (const double *)partial, (int)blocks, *args);
}

static dtrain_result dtrain_cuda_sum(dtrain_device *device, const dtrain_sum_args *args)
{
    const bool wide = args->dtype == DTRAIN_DTYPE_F64;
    if (!wide) DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("sum", args->dtype));
    if (args->accumulate && !args->total)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "sum: accumulate needs total, which is NULL");
    if (wide) return dtrain_cuda_sum_as<double>(device, args);
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_sum_as)(device, args);
}

/* ---- clip: one thread ---------------------------------------------------------------------------
 *
 * Rounds to fp32 at the same points as dtrain_grad_norm: a recorded step has the bits of an
 * ordinary step. A norm that is not finite, or a weight of 0, sets skip and does not change the
 * gradient scale. */

static __global__ void dtrain_cuda_clip_kernel(const dtrain_clip_args args)
{
    double sum = args.sum_squares[0];
    for (int i = 1; i < args.sum_count; i++) sum += args.sum_squares[i];
    const float norm = (float)(sqrt(sum) * (double)args.scalars->grad_scale);
    const float factor = args.max_norm / (norm + 1e-6f);
    args.norm[0] = norm;
    const bool empty = args.weight && args.weight[0] == 0;
    if (empty || (__float_as_uint(norm) & 0x7f800000u) == 0x7f800000u) args.scalars->skip = 1;
    else if (args.max_norm > 0 && factor < 1) args.scalars->grad_scale *= factor;
}

static dtrain_result dtrain_cuda_clip(dtrain_device *device, const dtrain_clip_args *args)
{
    return DTRAIN_CUDA_RUN(device, "clip", dtrain_cuda_clip_kernel, 1, 1, 0, *args);
}

/* ---- Column sums: x (rows,n), rows ld elements apart -> out (n) ---------------------------------
 *
 * The bias gradient of a product: the activation's backward pass with no activation, in place. */

template <typename T>
static dtrain_result dtrain_cuda_column_sums_as(dtrain_device *device, const void *x, int64_t rows,
                                                int64_t n, int64_t ld, float *out, bool accumulate)
{
    const dtrain_cuda_deactivate_op<T> op = {NULL, (const T *)x, (T *)x, DTRAIN_ACTIVATION_NONE};
    return dtrain_cuda_deactivate_columns(device, "column sums", op, rows, n, ld, out, accumulate);
}

static dtrain_result dtrain_cuda_column_sums(dtrain_device *device, dtrain_dtype dtype,
                                             const void *x, int64_t rows, int64_t n, int64_t ld,
                                             float *out, bool accumulate)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("column sums", dtype));
    return DTRAIN_CUDA_BY_DTYPE(dtype, dtrain_cuda_column_sums_as)(device, x, rows, n, ld, out,
                                                                   accumulate);
}

/* ==== src/device/cuda/optimizers.cuh ========================================================== */

/* Optimizers: AdamW, SGD, Lion, the elementwise stages of Muon; many tensors
 *
 * One launch updates many tensors: the kernel's parameters (at most 4 KiB) contain a table of up to
 * 60 tensors; more tensors take more launches. A block finds its tensor by its number and updates
 * 8192 elements of it:
 *
 *     blocks   | 0 1 2 3 4 | 5 6 | 7 | 8 9 10 ...
 *     tensors  | wte       | wpe | b | qkv              first block of each: 0, 5, 7, 8
 *
 * Bytes an element: AdamW reads value, grad, m, v and writes value, m, v: 28; Lion and SGD with
 * momentum 20; Muon 16, 8 and 12 in its three stages. Multiply-adds are fused where the CPU device
 * fuses them. */

#include <math.h>

enum {
    DTRAIN_CUDA_TABLE_TENSORS = 60,
    DTRAIN_CUDA_UPDATE_THREADS = 256,
    DTRAIN_CUDA_UPDATE_ELEMENTS = 8192 /* of a block */
};

struct dtrain_cuda_tensor {
    float *value;
    const float *grad;
    float *m, *v;
    int64_t count;
    float weight_decay;
    uint32_t aligned;     /* all pointers */
    uint32_t first_block; /* of this launch */
};

struct dtrain_cuda_tensors {
    int count;
    const dtrain_step_scalars *scalars;
    dtrain_cuda_tensor at[DTRAIN_CUDA_TABLE_TENSORS];
};

/* ---- Rules: the update of one element ---------------------------------------------------------*/

struct dtrain_cuda_adamw_rule {
    float lr, beta1, beta2, epsilon, correction1, correction2, grad_scale, lr_scale;

    __device__ void resolve(const dtrain_step_scalars &scalars)
    {
        lr = scalars.lr * lr_scale;
        correction1 = scalars.correction1;
        correction2 = scalars.correction2;
        grad_scale = scalars.grad_scale;
    }
    /* Update one element. lr / correction1 is one factor, and v is scaled under the root, as on the
     * CPU. */
    __device__ void step(float weight_decay, float grad, float &value, float &m, float &v) const
    {
        const float decay = __fmaf_rn(-lr, weight_decay, 1.0f);
        const float g = grad * grad_scale;
        m = __fmaf_rn(1 - beta1, g, beta1 * m);
        v = __fmaf_rn((1 - beta2) * g, g, beta2 * v);
        const float root = sqrtf(v * (1 / correction2)) + epsilon;
        value = __fmaf_rn(value, decay, -((lr / correction1) * m / root));
    }
};

struct dtrain_cuda_sgd_rule {
    float lr, momentum, grad_scale, lr_scale;
    bool nesterov, first;

    __device__ void resolve(const dtrain_step_scalars &scalars)
    {
        lr = scalars.lr * lr_scale;
        grad_scale = scalars.grad_scale;
    }
    /* Update one element. Without momentum `buffer` comes in as 0 and is not stored. */
    __device__ void step(float weight_decay, float grad, float &value, float &buffer, float &) const
    {
        const float g = __fmaf_rn(weight_decay, value, grad * grad_scale);
        buffer = first ? g : __fmaf_rn(momentum, buffer, g);
        value = __fmaf_rn(-lr, nesterov ? __fmaf_rn(momentum, buffer, g) : buffer, value);
    }
};

struct dtrain_cuda_lion_rule {
    float lr, beta1, beta2, grad_scale, lr_scale;

    __device__ void resolve(const dtrain_step_scalars &scalars)
    {
        lr = scalars.lr * lr_scale;
        grad_scale = scalars.grad_scale;
    }
    __device__ void step(float weight_decay, float grad, float &value, float &m, float &) const
    {
        const float decay = __fmaf_rn(-lr, weight_decay, 1.0f);
        const float g = grad * grad_scale;
        const float mean = __fmaf_rn(1 - beta1, g, beta1 * m);
        m = __fmaf_rn(1 - beta2, g, beta2 * m);
        value = __fmaf_rn(value, decay, mean > 0 ? -lr : mean < 0 ? lr : 0);
    }
};

/* The first stage of Muon; the value is x, which is only written. */
struct dtrain_cuda_muon_momentum_rule {
    float momentum, grad_scale;
    bool nesterov;

    __device__ void resolve(const dtrain_step_scalars &scalars) { grad_scale = scalars.grad_scale; }
    __device__ void step(float, float grad, float &x, float &m, float &) const
    {
        const float g = grad * grad_scale;
        m = __fmaf_rn(momentum, m, g);
        x = nesterov ? __fmaf_rn(momentum, m, g) : m;
    }
};

/* The last one; the gradient is x. */
struct dtrain_cuda_muon_step_rule {
    float lr, scale, lr_scale;

    __device__ void resolve(const dtrain_step_scalars &scalars) { lr = scalars.lr * lr_scale; }
    __device__ void step(float weight_decay, float x, float &value, float &, float &) const
    {
        const float decay = __fmaf_rn(-lr, weight_decay, 1.0f);
        value = __fmaf_rn(-(lr * scale), x, value * decay);
    }
};

/* ---- The kernel -------------------------------------------------------------------------------*/

/* Update elements i .. i + W. */
template <int W, typename Rule>
static __device__ __forceinline__ void dtrain_cuda_update_group(const dtrain_cuda_tensor &tensor,
                                                                const Rule &rule, int64_t i)
{
    dtrain_cuda_pack<float, W> value, grad, m = {}, v = {};
    value = dtrain_cuda_load<W>(tensor.value + i);
    grad = dtrain_cuda_load<W>(tensor.grad + i);
    if (tensor.m) m = dtrain_cuda_load<W>(tensor.m + i);
    if (tensor.v) v = dtrain_cuda_load<W>(tensor.v + i);
    DTRAIN_CUDA_UNROLL
    for (int j = 0; j < W; j++)
        rule.step(tensor.weight_decay, grad.at[j], value.at[j], m.at[j], v.at[j]);
    dtrain_cuda_store(tensor.value + i, value);
    if (tensor.m) dtrain_cuda_store(tensor.m + i, m);
    if (tensor.v) dtrain_cuda_store(tensor.v + i, v);
}

/* Find the last tensor that starts at or before this block; all threads of the block find the
 * same. */
static __device__ __forceinline__ int dtrain_cuda_find_tensor(const dtrain_cuda_tensors &tensors)
{
    int low = 0, high = tensors.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (tensors.at[middle].first_block <= blockIdx.x) low = middle;
        else high = middle;
    }
    return low;
}

template <typename Rule>
static __global__ void __launch_bounds__(DTRAIN_CUDA_UPDATE_THREADS)
    dtrain_cuda_update_kernel(const dtrain_cuda_tensors tensors, Rule rule)
{
    constexpr int W = 4;
    const dtrain_cuda_tensor &tensor = tensors.at[dtrain_cuda_find_tensor(tensors)];
    const int64_t begin = (int64_t)(blockIdx.x - tensor.first_block) * DTRAIN_CUDA_UPDATE_ELEMENTS;
    const int64_t end = begin + DTRAIN_CUDA_UPDATE_ELEMENTS < tensor.count
                            ? begin + DTRAIN_CUDA_UPDATE_ELEMENTS
                            : tensor.count;
    const int64_t groups_end = tensor.aligned ? end - end % W : begin;
    if (tensors.scalars) {
        if (tensors.scalars->skip) return;
        rule.resolve(*tensors.scalars);
    }
    for (int64_t i = begin + (int64_t)threadIdx.x * W; i < groups_end; i += blockDim.x * W)
        dtrain_cuda_update_group<W>(tensor, rule, i);
    for (int64_t i = groups_end + threadIdx.x; i < end; i += blockDim.x)
        dtrain_cuda_update_group<1>(tensor, rule, i);
}

/* ---- Launching --------------------------------------------------------------------------------*/

static dtrain_result dtrain_cuda_check_tensor(const char *name, const dtrain_optimizer_tensor *from,
                                              size_t number, int moments)
{
    if ((moments > 0 && !from->m) || (moments > 1 && !from->v))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "%s: tensor %llu has no m or no v", name,
                           (unsigned long long)number);
    return DTRAIN_OK;
}

static dtrain_cuda_tensor dtrain_cuda_tensor_of(const dtrain_optimizer_tensor *from,
                                                int64_t first_block, int moments)
{
    dtrain_cuda_tensor to = {};
    to.value = from->value;
    to.grad = from->grad;
    to.m = from->m;
    to.v = moments > 1 ? from->v : NULL;
    to.count = from->count;
    to.weight_decay = from->weight_decay;
    to.aligned = dtrain_cuda_aligned(to.value) && dtrain_cuda_aligned(to.grad) &&
                 dtrain_cuda_aligned(to.m) && dtrain_cuda_aligned(to.v);
    to.first_block = (uint32_t)first_block;
    return to;
}

/* Launch the update of a list of tensors. `tensors` lacks only the table. All tensors are checked
 * before the first one changes; moments: number of moments of each tensor. */
template <typename Rule>
static dtrain_result dtrain_cuda_update(dtrain_device *device, const char *name, const Rule &rule,
                                        const dtrain_optimizer_tensor *from, size_t count,
                                        int moments, dtrain_cuda_tensors &tensors)
{
    static_assert(sizeof tensors + sizeof rule <= 4096, "kernel parameters are limited to 4 KiB");
    int64_t blocks = 0;
    for (size_t i = 0; i < count; i++)
        DTRAIN_CUDA_TRY(dtrain_cuda_check_tensor(name, &from[i], i, moments));
    for (size_t i = 0; i < count; i++) {
        if (from[i].count > 0) {
            tensors.at[tensors.count++] = dtrain_cuda_tensor_of(&from[i], blocks, moments);
            blocks +=
                (from[i].count + DTRAIN_CUDA_UPDATE_ELEMENTS - 1) / DTRAIN_CUDA_UPDATE_ELEMENTS;
        }
        if (tensors.count == 0 || (tensors.count < DTRAIN_CUDA_TABLE_TENSORS && i + 1 < count))
            continue;
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, name, dtrain_cuda_update_kernel<Rule>, blocks,
                                        DTRAIN_CUDA_UPDATE_THREADS, 0, tensors, rule));
        tensors.count = 0;
        blocks = 0;
    }
    return DTRAIN_OK;
}

/* ---- fp64: one launch a tensor ----------------------------------------------------------------*/

struct dtrain_cuda_f64_op {
    static constexpr int width = 1;
    dtrain_optimizer_args a;
    dtrain_optimizer_tensor t;
    bool adamw;
    template <int W> struct group {
    };
    template <int W> __device__ void load(int64_t, group<W> &) const {}
    template <int W> __device__ void store(int64_t i, const group<W> &) const
    {
        const dtrain_step_scalars *s = a.scalars;
        const double lr = s ? s->lr * a.lr_scale : a.lr, decay = t.weight_decay;
        const double scale = s ? s->grad_scale : a.grad_scale;
        double &value = ((double *)t.value)[i], *m = (double *)t.m, *v = (double *)t.v;
        double g = ((const double *)t.grad)[i] * scale;
        if (s && s->skip) return;
        if (adamw) {
            const double correction1 = s ? s->correction1 : a.correction1;
            const double correction2 = s ? s->correction2 : a.correction2;
            m[i] = (double)a.beta1 * m[i] + (1 - (double)a.beta1) * g;
            v[i] = (double)a.beta2 * v[i] + (1 - (double)a.beta2) * g * g;
            const double root = sqrt(v[i] / correction2) + (double)a.epsilon;
            value = value * (1 - lr * decay) - lr / correction1 * m[i] / root;
            return;
        }
        g += decay * value;
        if (m) {
            m[i] = a.first ? g : (double)a.momentum * m[i] + g;
            g = a.nesterov ? g + (double)a.momentum * m[i] : m[i];
        }
        value -= lr * g;
    }
};

static dtrain_result dtrain_cuda_update_f64(dtrain_device *device, const char *name,
                                            const dtrain_optimizer_args *args, bool adamw)
{
    for (size_t i = 0; i < args->tensor_count; i++)
        DTRAIN_CUDA_TRY(dtrain_cuda_check_tensor(name, &args->tensors[i], i, adamw ? 2 : 0));
    for (size_t i = 0; i < args->tensor_count; i++) {
        const dtrain_cuda_f64_op op = {*args, args->tensors[i], adamw};
        DTRAIN_CUDA_TRY(dtrain_cuda_each(device, name, op, op.t.count, false));
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_adamw(dtrain_device *device, const dtrain_adamw_args *args)
{
    if (args->wide) return dtrain_cuda_update_f64(device, "adamw", args, true);
    const dtrain_cuda_adamw_rule rule = {args->lr,         args->beta1,       args->beta2,
                                         args->epsilon,    args->correction1, args->correction2,
                                         args->grad_scale, args->lr_scale};
    dtrain_cuda_tensors tensors = {};
    tensors.scalars = args->scalars;
    return dtrain_cuda_update(device, "adamw", rule, args->tensors, args->tensor_count, 2, tensors);
}

static dtrain_result dtrain_cuda_sgd(dtrain_device *device, const dtrain_sgd_args *args)
{
    if (args->wide) return dtrain_cuda_update_f64(device, "sgd", args, false);
    const dtrain_cuda_sgd_rule rule = {args->lr,       args->momentum, args->grad_scale,
                                       args->lr_scale, args->nesterov, args->first};
    dtrain_cuda_tensors tensors = {};
    tensors.scalars = args->scalars;
    return dtrain_cuda_update(device, "sgd", rule, args->tensors, args->tensor_count, 0, tensors);
}

static dtrain_result dtrain_cuda_lion(dtrain_device *device, const dtrain_lion_args *args)
{
    const dtrain_cuda_lion_rule rule = {args->lr, args->beta1, args->beta2, args->grad_scale,
                                        args->lr_scale};
    dtrain_cuda_tensors tensors = {};
    tensors.scalars = args->scalars;
    return dtrain_cuda_update(device, "lion", rule, args->tensors, args->tensor_count, 1, tensors);
}

/* ---- Muon -------------------------------------------------------------------------------------*/

/* x (count) = x / (sqrt(sum_squares[0]) + epsilon); bytes an element: 8. */
static __global__ void __launch_bounds__(DTRAIN_CUDA_UPDATE_THREADS)
    dtrain_cuda_normalize_kernel(int64_t count, float *x, const double *sum_squares, float epsilon)
{
    const float inverse = (float)(1 / (sqrt(sum_squares[0]) + (double)epsilon));
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
        x[i] *= inverse;
}

static dtrain_result dtrain_cuda_muon(dtrain_device *device, const dtrain_muon_args *args)
{
    dtrain_optimizer_tensor tensor = *args->tensors;
    dtrain_cuda_tensors tensors = {};
    const int64_t blocks =
        (tensor.count + DTRAIN_CUDA_UPDATE_ELEMENTS - 1) / DTRAIN_CUDA_UPDATE_ELEMENTS;
    tensors.scalars = args->scalars;
    if (args->stage == DTRAIN_MUON_NORMALIZE)
        return DTRAIN_CUDA_RUN(device, "muon", dtrain_cuda_normalize_kernel, blocks,
                               DTRAIN_CUDA_UPDATE_THREADS, 0, tensor.count, args->x,
                               args->sum_squares, args->epsilon);
    if (args->stage == DTRAIN_MUON_MOMENTUM) {
        const dtrain_cuda_muon_momentum_rule rule = {args->momentum, args->grad_scale,
                                                     args->nesterov};
        tensor.value = args->x;
        return dtrain_cuda_update(device, "muon", rule, &tensor, 1, 1, tensors);
    }
    const dtrain_cuda_muon_step_rule rule = {args->lr, args->scale, args->lr_scale};
    tensor.grad = args->x;
    tensor.m = NULL;
    return dtrain_cuda_update(device, "muon", rule, &tensor, 1, 0, tensors);
}

/* ==== src/device/cuda/gemm_plan.cuh =========================================================== */

/* GEMM 1: cublasLt and the algorithm cache
 *
 * C (m,n) row by row in memory is C' (n,m) column by column, and C' = op(B)' op(A)'. So cublasLt,
 * which is column-major, gets our B as its first operand and our A as its second; every matrix
 * keeps its address and its ld, and no transposition changes:
 *
 *     dtrain, row-major                   cublasLt, column-major
 *     B (k,n), or (n,k) with TRANS_B      A (n,k) OP_N, or (k,n) OP_T
 *     A (m,k), or (k,m) with TRANS_A      B (k,m) OP_N, or (m,k) OP_T
 *     C (m,n)                             D (n,m)
 *     bias (n), one for each column       BIAS, one for each row of D
 *     row sums of op(A)                   BGRADB
 *
 * For each kind of product cublasLt proposes algorithms once, and the cache remembers the choice.
 * By default the first proposal is taken, and every run computes the same bits; with desc->tune the
 * first use times all proposals and keeps the fastest. The choice, and with it the last bit of a
 * result, can then depend on the run. If cublasLtMatmul refuses a proposal, the next one replaces
 * it in the cache; after the last one, the kernel below multiplies.
 *
 * Cost of a product that is in the cache: one hash, one memcmp, at most two attributes, one
 * launch. C is the output of every product, also with beta != 0: none needs scratch. */

#include <cublasLt.h>

#include <math.h>
#include <string.h>

#define DTRAIN_CUDA_GEMM_CANDIDATES 8

enum {
    DTRAIN_CUDA_GEMM_TRIALS = 3,         /* timings of each candidate: the best counts */
    DTRAIN_CUDA_GEMM_SLOTS = 512,        /* kinds of products remembered */
    DTRAIN_CUDA_GEMM_PROBES = 8,         /* slots that one kind may occupy */
    DTRAIN_CUDA_GEMM_SCRATCH = 64 << 20, /* bytes of scratch for a product made outside C */
    DTRAIN_CUDA_GEMM_TIMING = 256 << 20, /* bytes of a C that is timed with beta != 0, at most */
    DTRAIN_CUDA_GEMM_TILE = 16,          /* side of a block's part of C in our own kernel */
    DTRAIN_CUDA_EPILOGUE_WIDTH = 4,      /* columns a thread takes */
    DTRAIN_CUDA_EPILOGUE_THREADS = 128
};

/* One call of cublasLt, in row-major words: for i < batch, C_i = epilogue(alpha op(A_i) op(B_i) +
 * beta C_i). */
struct dtrain_cuda_product {
    uint32_t flags; /* DTRAIN_GEMM_TRANS_A, _B */
    int64_t m, n, k, batch;
    float alpha, beta;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc;
    int64_t a_step, b_step, c_step; /* elements from one matrix of the batch to the next */
    dtrain_dtype type, c_type;      /* of A and B, of C */
    bool widened;                   /* A and B are fp32 copies of something narrower */
    cublasLtEpilogue_t epilogue;
    void *vector; /* bias (n), or the bias gradient to be written */
    dtrain_dtype vector_type;
    void *aux; /* (m,n) with the ld and type of C */
};

/* The inputs of the choice of an algorithm. Without padding, so that memcmp compares it. */
struct dtrain_cuda_gemm_key {
    int64_t m, n, k, batch, lda, ldb, ldc, a_step, b_step, c_step;
    uint32_t flags, epilogue, type, c_type, vector_type, compute;
    uint32_t a_alignment, b_alignment, c_alignment, reserved;
};

struct dtrain_cuda_gemm_entry {
    dtrain_cuda_gemm_key key;
    bool used, works; /* works is false where cublasLt has no algorithm: it is not asked again */
    bool slow;        /* and nothing as fast took its place: counted by query */
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c; /* of our A, B, C */
    cublasLtMatmulAlgo_t algorithm;
};

struct dtrain_cuda_gemm_cache {
    dtrain_cuda_gemm_entry entries[DTRAIN_CUDA_GEMM_SLOTS];
};

static dtrain_result dtrain_cuda_lt_check(cublasStatus_t status, const char *what)
{
    if (status == CUBLAS_STATUS_SUCCESS) return DTRAIN_OK;
    cudaGetLastError();
    return dtrain_fail(status == CUBLAS_STATUS_ALLOC_FAILED    ? DTRAIN_ERROR_MEMORY
                       : status == CUBLAS_STATUS_NOT_SUPPORTED ? DTRAIN_ERROR_UNSUPPORTED
                                                               : DTRAIN_ERROR_SYSTEM,
                       "%s failed: %s (%s)", what, cublasLtGetStatusName(status),
                       cublasLtGetStatusString(status));
}

static cudaDataType_t dtrain_cuda_lt_type(dtrain_dtype dtype)
{
    return dtype == DTRAIN_DTYPE_BF16  ? CUDA_R_16BF
           : dtype == DTRAIN_DTYPE_F16 ? CUDA_R_16F
                                       : CUDA_R_32F;
}

/* Choose the arithmetic of a product. bf16 arithmetic is for fp32 operands; a widened fp16 has more
 * bits than bf16, so it takes TF32, which keeps them all. */
static cublasComputeType_t dtrain_cuda_lt_compute(const dtrain_cuda_state *state,
                                                  const dtrain_cuda_product *product)
{
    if (product->type != DTRAIN_DTYPE_F32) return CUBLAS_COMPUTE_32F;
    if (state->math == DTRAIN_MATH_TF32) return CUBLAS_COMPUTE_32F_FAST_TF32;
    if (state->math != DTRAIN_MATH_BF16) return CUBLAS_COMPUTE_32F;
    return product->widened ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F_FAST_16BF;
}

/* Give the largest power of two, at most 16 bytes, that divides the address of every matrix of the
 * batch. */
static uint32_t dtrain_cuda_lt_alignment(const void *memory, int64_t step, dtrain_dtype dtype)
{
    const uint64_t bits =
        (uint64_t)(uintptr_t)memory | (uint64_t)step * dtrain_dtype_bytes(dtype) | 16u;
    return (uint32_t)(bits & (~bits + 1));
}

/* ---- The cache --------------------------------------------------------------------------------*/

static dtrain_cuda_gemm_key dtrain_cuda_gemm_key_of(const dtrain_cuda_state *state,
                                                    const dtrain_cuda_product *product)
{
    dtrain_cuda_gemm_key key;
    memset(&key, 0, sizeof key);
    key.m = product->m, key.n = product->n, key.k = product->k, key.batch = product->batch;
    key.lda = product->lda, key.ldb = product->ldb, key.ldc = product->ldc;
    key.a_step = product->a_step, key.b_step = product->b_step, key.c_step = product->c_step;
    key.flags = product->flags;
    key.epilogue = (uint32_t)product->epilogue;
    key.type = (uint32_t)product->type, key.c_type = (uint32_t)product->c_type;
    key.vector_type = product->vector ? (uint32_t)product->vector_type : 0;
    key.compute = (uint32_t)dtrain_cuda_lt_compute(state, product);
    key.a_alignment = dtrain_cuda_lt_alignment(product->a, product->a_step, product->type);
    key.b_alignment = dtrain_cuda_lt_alignment(product->b, product->b_step, product->type);
    key.c_alignment = dtrain_cuda_lt_alignment(product->c, product->c_step, product->c_type);
    return key;
}

static void dtrain_cuda_gemm_evict(dtrain_cuda_gemm_entry *entry)
{
    if (entry->c) cublasLtMatrixLayoutDestroy(entry->c);
    if (entry->b) cublasLtMatrixLayoutDestroy(entry->b);
    if (entry->a) cublasLtMatrixLayoutDestroy(entry->a);
    if (entry->operation) cublasLtMatmulDescDestroy(entry->operation);
    memset(entry, 0, sizeof *entry);
}

static void dtrain_cuda_gemm_cache_free(dtrain_cuda_state *state)
{
    for (int i = 0; i < DTRAIN_CUDA_GEMM_SLOTS; i++)
        dtrain_cuda_gemm_evict(&state->gemm_cache->entries[i]);
    dtrain_cuda_host_give(&state->allocator, state->gemm_cache, sizeof *state->gemm_cache);
    state->gemm_cache = NULL;
}

/* Find the entry of a key: its own; else a free one among its slots; else the first of its slots,
 * whose entry is evicted. */
static dtrain_cuda_gemm_entry *dtrain_cuda_gemm_slot(dtrain_cuda_gemm_cache *cache,
                                                     const dtrain_cuda_gemm_key *key)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ ((const unsigned char *)key)[i]) * 1099511628211u;
    dtrain_cuda_gemm_entry *first = &cache->entries[hash % DTRAIN_CUDA_GEMM_SLOTS];
    for (uint64_t probe = 0; probe < DTRAIN_CUDA_GEMM_PROBES; probe++) {
        dtrain_cuda_gemm_entry *entry = &cache->entries[(hash + probe) % DTRAIN_CUDA_GEMM_SLOTS];
        if (!entry->used || memcmp(&entry->key, key, sizeof *key) == 0) return entry;
    }
    dtrain_cuda_gemm_evict(first);
    return first;
}

/* ---- Descriptors ------------------------------------------------------------------------------*/

/* Describe a matrix stored as `rows` rows of `columns`; to cublasLt rows and columns are
 * exchanged. */
static dtrain_result dtrain_cuda_lt_layout(cublasLtMatrixLayout_t *layout, dtrain_dtype dtype,
                                           int64_t rows, int64_t columns, int64_t ld, int64_t batch,
                                           int64_t step)
{
    const int32_t count = (int32_t)batch;
    cublasStatus_t status = cublasLtMatrixLayoutCreate(layout, dtrain_cuda_lt_type(dtype),
                                                       (uint64_t)columns, (uint64_t)rows, ld);
    if (status == CUBLAS_STATUS_SUCCESS && batch > 1)
        status = cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                  &count, sizeof count);
    if (status == CUBLAS_STATUS_SUCCESS && batch > 1)
        status = cublasLtMatrixLayoutSetAttribute(
            *layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step);
    return dtrain_cuda_lt_check(status, "describing a matrix to cublasLt");
}

static dtrain_result dtrain_cuda_lt_set(dtrain_cuda_gemm_entry *entry,
                                        cublasLtMatmulDescAttributes_t attribute, const void *value,
                                        size_t bytes)
{
    return dtrain_cuda_lt_check(
        cublasLtMatmulDescSetAttribute(entry->operation, attribute, value, bytes),
        "describing a product to cublasLt");
}

/* Set the addresses that are part of the description: they change from call to call. */
static dtrain_result dtrain_cuda_lt_set_addresses(dtrain_cuda_gemm_entry *entry,
                                                  const dtrain_cuda_product *product)
{
    if (product->vector)
        DTRAIN_CUDA_TRY(dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                           &product->vector, sizeof product->vector));
    if (product->aux)
        DTRAIN_CUDA_TRY(dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                           &product->aux, sizeof product->aux));
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_lt_describe(const dtrain_cuda_product *x,
                                             dtrain_cuda_gemm_entry *entry)
{
    const bool trans_a = (x->flags & DTRAIN_GEMM_TRANS_A) != 0,
               trans_b = (x->flags & DTRAIN_GEMM_TRANS_B) != 0;
    const int32_t first = trans_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                  second = trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t vector_type = dtrain_cuda_lt_type(x->vector_type);
    const uint32_t epilogue = (uint32_t)x->epilogue;
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_check(
        cublasLtMatmulDescCreate(&entry->operation, (cublasComputeType_t)entry->key.compute,
                                 CUDA_R_32F),
        "describing a product to cublasLt"));
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    if (x->vector)
        DTRAIN_CUDA_TRY(dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &vector_type,
                                           sizeof vector_type));
    if (x->aux)
        DTRAIN_CUDA_TRY(dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &x->ldc,
                                           sizeof x->ldc));
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_set_addresses(entry, x));
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_layout(&entry->a, x->type, trans_a ? x->k : x->m,
                                          trans_a ? x->m : x->k, x->lda, x->batch, x->a_step));
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_layout(&entry->b, x->type, trans_b ? x->n : x->k,
                                          trans_b ? x->k : x->n, x->ldb, x->batch, x->b_step));
    return dtrain_cuda_lt_layout(&entry->c, x->c_type, x->m, x->n, x->ldc, x->batch, x->c_step);
}

/* ---- Algorithms -------------------------------------------------------------------------------*/

static cublasStatus_t dtrain_cuda_lt_limit(cublasLtMatmulPreference_t limits,
                                           cublasLtMatmulPreferenceAttributes_t attribute,
                                           uint32_t value)
{
    return cublasLtMatmulPreferenceSetAttribute(limits, attribute, &value, sizeof value);
}

/* Ask cublasLt for at most DTRAIN_CUDA_GEMM_CANDIDATES algorithms; *found is 0 if there are none. A
 * product cut along k must add its parts in fp32, not in C's type. */
static cublasStatus_t dtrain_cuda_lt_ask(const dtrain_cuda_state *state,
                                         const dtrain_cuda_gemm_entry *entry,
                                         cublasLtMatmulPreference_t limits,
                                         cublasLtMatmulHeuristicResult_t *results, int *found)
{
    const uint64_t workspace = state->workspace_bytes;
    const uint32_t alignment[4] = {entry->key.b_alignment, entry->key.a_alignment,
                                   entry->key.c_alignment, entry->key.c_alignment};
    const cublasLtMatmulPreferenceAttributes_t names[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(
        limits, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    for (int i = 0; i < 4 && status == CUBLAS_STATUS_SUCCESS; i++)
        status = dtrain_cuda_lt_limit(limits, names[i], alignment[i]);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = dtrain_cuda_lt_limit(limits, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                      CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    *found = 0;
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    status = cublasLtMatmulAlgoGetHeuristic(state->lt, entry->operation, entry->b, entry->a,
                                            entry->c, entry->c, limits, DTRAIN_CUDA_GEMM_CANDIDATES,
                                            results, found);
    if (status == CUBLAS_STATUS_SUCCESS) return status;
    *found = 0;
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE
               ? CUBLAS_STATUS_SUCCESS
               : status;
}

static cublasStatus_t dtrain_cuda_lt_run(const dtrain_cuda_state *state,
                                         const dtrain_cuda_gemm_entry *entry,
                                         const dtrain_cuda_product *x, void *out,
                                         const cublasLtMatmulAlgo_t *algorithm)
{
    return cublasLtMatmul(state->lt, entry->operation, &x->alpha, x->b, entry->b, x->a, entry->a,
                          &x->beta, x->c, entry->c, out, entry->c, algorithm, state->workspace,
                          state->workspace_bytes, state->stream);
}

/* Measure the best time of a candidate that writes to `out`; infinity if it cannot run. */
static dtrain_result dtrain_cuda_lt_time(dtrain_device *device, const dtrain_cuda_gemm_entry *entry,
                                         const dtrain_cuda_product *x, void *out,
                                         const cublasLtMatmulAlgo_t *algorithm,
                                         const cudaEvent_t events[2], float *best)
{
    const dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    *best = INFINITY;
    for (int trial = 0; trial < DTRAIN_CUDA_GEMM_TRIALS; trial++) {
        float milliseconds = 0;
        DTRAIN_CUDA_TRY(
            dtrain_cuda_check(cudaEventRecord(events[0], state->stream), "timing a product"));
        if (dtrain_cuda_lt_run(state, entry, x, out, algorithm) != CUBLAS_STATUS_SUCCESS) {
            cudaGetLastError();
            *best = INFINITY;
            return DTRAIN_OK;
        }
        DTRAIN_CUDA_TRY(
            dtrain_cuda_check(cudaEventRecord(events[1], state->stream), "timing a product"));
        DTRAIN_CUDA_TRY(dtrain_cuda_poll(device, state->stream));
        DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaEventElapsedTime(&milliseconds, events[0], events[1]),
                                          "timing a product"));
        if (milliseconds < *best) *best = milliseconds;
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_lt_tune(dtrain_device *device, dtrain_cuda_gemm_entry *entry,
                                         const dtrain_cuda_product *product, void *out,
                                         const cublasLtMatmulHeuristicResult_t *results, int found)
{
    cudaEvent_t events[2] = {NULL, NULL};
    float best = INFINITY;
    dtrain_result result = DTRAIN_OK;
    entry->works = false;
    for (int i = 0; i < 2 && result == DTRAIN_OK; i++)
        result = dtrain_cuda_check(cudaEventCreate(&events[i]), "creating an event");
    for (int i = 0; i < found && result == DTRAIN_OK; i++) {
        float time = INFINITY;
        result = dtrain_cuda_lt_time(device, entry, product, out, &results[i].algo, events, &time);
        if (!(time < best)) continue;
        best = time;
        entry->algorithm = results[i].algo;
        entry->works = true;
    }
    for (int i = 0; i < 2; i++)
        if (events[i]) cudaEventDestroy(events[i]);
    return result;
}

/* Return memory for timing candidates. With beta == 0 every run leaves the result in C, so C is
 * returned. Otherwise C must not change: return new memory of its size, or NULL if C is too large
 * or no memory is left. */
static void *dtrain_cuda_lt_timing_memory(const dtrain_cuda_product *x)
{
    const uint64_t count = (uint64_t)x->m * (uint64_t)x->ldc;
    const size_t element = dtrain_dtype_bytes(x->c_type);
    void *out = NULL;
    if (x->beta == 0) return x->c;
    if (x->batch > 1 || count > DTRAIN_CUDA_GEMM_TIMING / element) return NULL;
    if (cudaMalloc(&out, (size_t)count * element) == cudaSuccess) return out;
    cudaGetLastError();
    return NULL;
}

/* List the algorithms that cublasLt proposes for an entry, best first. */
static dtrain_result dtrain_cuda_lt_propose(const dtrain_cuda_state *state,
                                            const dtrain_cuda_gemm_entry *entry,
                                            cublasLtMatmulHeuristicResult_t *results, int *good)
{
    cublasLtMatmulPreference_t limits = NULL;
    int found = 0;
    *good = 0;
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_check(cublasLtMatmulPreferenceCreate(&limits),
                                         "asking cublasLt for algorithms"));
    const cublasStatus_t status = dtrain_cuda_lt_ask(state, entry, limits, results, &found);
    cublasLtMatmulPreferenceDestroy(limits);
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_check(status, "asking cublasLt for algorithms"));
    for (int i = 0; i < found; i++)
        if (results[i].state == CUBLAS_STATUS_SUCCESS) results[(*good)++] = results[i];
    return DTRAIN_OK;
}

/* Choose the algorithm of a new entry. While a graph is captured nothing runs, so nothing is
 * timed. */
static dtrain_result dtrain_cuda_lt_choose(dtrain_device *device, dtrain_cuda_gemm_entry *entry,
                                           const dtrain_cuda_product *product)
{
    const dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    cublasLtMatmulHeuristicResult_t results[DTRAIN_CUDA_GEMM_CANDIDATES];
    dtrain_result result = DTRAIN_OK;
    void *out = NULL;
    int good = 0;
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_propose(state, entry, results, &good));
    entry->works = good > 0;
    if (good > 0) entry->algorithm = results[0].algo;
    if (good > 1 && state->tune && !dtrain_cuda_capturing(device))
        out = dtrain_cuda_lt_timing_memory(product);
    if (out) result = dtrain_cuda_lt_tune(device, entry, product, out, results, good);
    if (out && out != product->c && dtrain_cuda_may_free(device)) cudaFree(out);
    return result;
}

/* Return whether cublasLt refused an algorithm before anything ran: another one can work. */
static bool dtrain_cuda_lt_refuses(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
           status == CUBLAS_STATUS_ARCH_MISMATCH;
}

/* Run the first proposal that is not refused, and remember it, or that there is none. */
static dtrain_result dtrain_cuda_lt_next(dtrain_device *device, const dtrain_cuda_product *product,
                                         dtrain_cuda_gemm_entry *entry, cublasStatus_t *status)
{
    const dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    cublasLtMatmulHeuristicResult_t results[DTRAIN_CUDA_GEMM_CANDIDATES];
    int good = 0;
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_propose(state, entry, results, &good));
    for (int i = 0; i < good && dtrain_cuda_lt_refuses(*status); i++) {
        cudaGetLastError();
        entry->algorithm = results[i].algo;
        *status = dtrain_cuda_lt_run(state, entry, product, product->c, &entry->algorithm);
    }
    entry->works = !dtrain_cuda_lt_refuses(*status);
    return DTRAIN_OK;
}

/* Refuse dimensions that do not fit 32 bits, which cuBLAS uses inside. */
static dtrain_result dtrain_cuda_lt_fits(const dtrain_cuda_product *x)
{
    const int64_t sizes[7] = {x->m, x->n, x->k, x->lda, x->ldb, x->ldc, x->batch};
    for (int i = 0; i < 7; i++)
        if (sizes[i] < 1 || sizes[i] > INT32_MAX)
            return dtrain_fail(
                sizes[i] < 1 ? DTRAIN_ERROR_ARGUMENT : DTRAIN_ERROR_UNSUPPORTED,
                "gemm: %s is %lld, and cublasLt takes 1 to %d: cut the product into smaller ones",
                i == 0   ? "m"
                : i == 1 ? "n"
                : i == 2 ? "k"
                : i == 3 ? "lda"
                : i == 4 ? "ldb"
                : i == 5 ? "ldc"
                         : "the batch",
                (long long)sizes[i], INT32_MAX);
    return DTRAIN_OK;
}

/* Find or make the cache entry of a product; entry->works says whether cublasLt can make it. */
static dtrain_result dtrain_cuda_gemm_find(dtrain_device *device,
                                           const dtrain_cuda_product *product,
                                           dtrain_cuda_gemm_entry **out)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_fits(product));
    if (!state->gemm_cache)
        state->gemm_cache = (dtrain_cuda_gemm_cache *)dtrain_cuda_host_take(
            &state->allocator, sizeof *state->gemm_cache);
    if (!state->gemm_cache)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for the GEMM algorithm cache");
    const dtrain_cuda_gemm_key key = dtrain_cuda_gemm_key_of(state, product);
    dtrain_cuda_gemm_entry *entry = *out = dtrain_cuda_gemm_slot(state->gemm_cache, &key);
    if (entry->used) return DTRAIN_OK;
    entry->key = key;
    dtrain_result result = dtrain_cuda_lt_describe(product, entry);
    if (result == DTRAIN_OK) result = dtrain_cuda_lt_choose(device, entry, product);
    if (result == DTRAIN_OK) entry->used = true;
    else dtrain_cuda_gemm_evict(entry);
    return result;
}

/* Run a product by cublasLt; entry->works is false afterwards if no algorithm takes it, and nothing
 * has run. */
static dtrain_result dtrain_cuda_gemm_run(dtrain_device *device, const dtrain_cuda_product *product,
                                          dtrain_cuda_gemm_entry *entry)
{
    if (!entry->works) return DTRAIN_OK;
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_set_addresses(entry, product));
    cublasStatus_t status = dtrain_cuda_lt_run(dtrain_cuda_state_of(device), entry, product,
                                               product->c, &entry->algorithm);
    if (dtrain_cuda_lt_refuses(status))
        DTRAIN_CUDA_TRY(dtrain_cuda_lt_next(device, product, entry, &status));
    return entry->works ? dtrain_cuda_lt_check(status, "cublasLtMatmul") : DTRAIN_OK;
}

/* Count the kinds of products in the cache that slow kernels compute. */
static uint32_t dtrain_cuda_gemm_slow_count(const dtrain_cuda_state *state)
{
    uint32_t count = 0;
    for (int i = 0; state->gemm_cache && i < DTRAIN_CUDA_GEMM_SLOTS; i++)
        count += state->gemm_cache->entries[i].slow;
    return count;
}

/* ---- The last resort: C (m,n) = alpha op(A) (m,k) op(B) (k,n) + beta C --------------------------
 *
 * Slow and always possible: any types, ld and alignment, no epilogue, fp32 arithmetic. A block
 * makes a tile of C, a thread one element of it, in the order of k. */

static __global__ void __launch_bounds__(DTRAIN_CUDA_GEMM_TILE *DTRAIN_CUDA_GEMM_TILE)
    dtrain_cuda_own_product_kernel(const dtrain_cuda_product x)
{
    constexpr int side = DTRAIN_CUDA_GEMM_TILE;
    __shared__ float a[side][side + 1], b[side][side + 1];
    const bool trans_a = (x.flags & DTRAIN_GEMM_TRANS_A) != 0,
               trans_b = (x.flags & DTRAIN_GEMM_TRANS_B) != 0;
    const int row = threadIdx.x / side, column = threadIdx.x % side;
    const int64_t across = (x.n + side - 1) / side, tiles = (x.m + side - 1) / side * across;
    for (int64_t tile = blockIdx.x; tile < x.batch * tiles; tile += gridDim.x) {
        const int64_t one = tile / tiles; /* of the batch */
        const int64_t i = tile % tiles / across * side + row, j = tile % across * side + column;
        float sum = 0;
        for (int64_t k = 0; k < x.k; k += side) {
            const int64_t right = k + column, below = k + row; /* in A, in B */
            const int64_t a_at = trans_a ? right * x.lda + i : i * x.lda + right;
            const int64_t b_at = trans_b ? j * x.ldb + below : below * x.ldb + j;
            a[row][column] = i < x.m && right < x.k
                                 ? dtrain_cuda_get_any(x.a, x.type, one * x.a_step + a_at)
                                 : 0;
            b[row][column] = j < x.n && below < x.k
                                 ? dtrain_cuda_get_any(x.b, x.type, one * x.b_step + b_at)
                                 : 0;
            __syncthreads();
            for (int e = 0; e < side; e++) sum += a[row][e] * b[e][column];
            __syncthreads();
        }
        if (i >= x.m || j >= x.n) continue;
        const int64_t at = one * x.c_step + i * x.ldc + j;
        sum *= x.alpha;
        if (x.beta != 0) sum += x.beta * dtrain_cuda_get_any(x.c, x.c_type, at);
        dtrain_cuda_put_any(x.c, x.c_type, at, sum);
    }
}

static dtrain_result dtrain_cuda_own_product(dtrain_device *device, const dtrain_cuda_product *x,
                                             dtrain_cuda_gemm_entry *entry)
{
    const int64_t side = DTRAIN_CUDA_GEMM_TILE;
    const int64_t tiles = (x->m + side - 1) / side * ((x->n + side - 1) / side) * x->batch;
    entry->slow = true;
    return DTRAIN_CUDA_RUN(device, "gemm without cublasLt", dtrain_cuda_own_product_kernel,
                           tiles < INT32_MAX ? tiles : INT32_MAX, (int)(side * side), 0, *x);
}

/* Compute `batch` products of equal shape without an epilogue, one step apart in memory, for
 * attention. Uses no scratch. */
static dtrain_result dtrain_cuda_gemm_batched(dtrain_device *device,
                                              const dtrain_cuda_product *product)
{
    dtrain_cuda_gemm_entry *entry = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_gemm_find(device, product, &entry));
    DTRAIN_CUDA_TRY(dtrain_cuda_gemm_run(device, product, entry));
    return entry->works ? DTRAIN_OK : dtrain_cuda_own_product(device, product, entry);
}

/* ==== src/device/cuda/gemm.cuh ================================================================ */

/* GEMM 2: epilogues and fallbacks
 *
 * A product can have a bias, an activation and a bias gradient. Three ways are tried in this order;
 * each does the whole request, or nothing:
 *
 *     fused      one call of cublasLt, whose epilogue does the whole request for C
 *     in steps   cublasLt's bare product, then the epilogue kernel below
 *     widened    in steps, with fp32 copies of A and B, and with gemm_plan.cuh's product kernel if
 *                cublasLt has no algorithm for those either
 *
 *     asked                               epilogue of cublasLt    fallback
 *     C alone                             DEFAULT                 widened
 *     bias                                BIAS                    in steps
 *     GELU                                GELU                    in steps
 *     GELU, bias                          GELU_BIAS               in steps
 *     GELU, aux                           GELU_AUX                in steps
 *     GELU, aux, bias                     GELU_AUX_BIAS           in steps
 *     GELU backward                       DGELU                   in steps
 *     GELU backward, bias gradient of C   DGELU_BGRAD             DGELU, then column sums of C
 *     C alone, bias gradient of A         BGRADB                  DEFAULT, then sums of A
 *     a bias gradient with anything else  as without it, then the sums
 *     RELU or SILU, forward or backward   none                    in steps
 *     aux without an activation           none                    in steps
 *     C neither of A's type nor fp32      none                    in steps
 *     A and B of two types                none                    widened
 *     alpha or k is 0                     none                    only the epilogue kernel
 *
 * Why some epilogues are used in part or not at all:
 *
 *     RELU    it is not documented whether cublasLt's RELU keeps NaN, and its backward pass needs a
 *             bit mask in aux, where dtrain has values
 *     GELU    not fused in exact fp32 (the error of cublasLt's tanh is not documented), nor if aux
 *             is C, is not 16-byte aligned, or has an ld that is not a multiple of 8
 *     BIAS    tried with the fp32 bias first; if cublasLt refuses that, with a copy in C's type,
 *             which rounds a little earlier than C would be rounded
 *     BGRAD   its gradient is fp32, which cublasLt can refuse if C is not fp32 */

#include <cublasLt.h>

#include <math.h>
#include <string.h>

/* ---- Epilogue kernel: product (rows,n) -> C, aux ------------------------------------------------
 *
 * Completes cublasLt's product: x = product + beta C + bias; forward aux = x, C = act(x); backward
 * C = x act'(aux). C is rounded once, because the product is fp32. Reads 4 bytes for each element
 * and, if needed, C and aux; writes C and aux. A thread keeps its columns, loads their bias once,
 * and walks down the rows. */

template <typename T> struct dtrain_cuda_epilogue {
    int64_t rows, n, ld, ldc; /* ld of the product; ldc of C and aux */
    const float *product;     /* NULL: all 0; it may be C itself */
    float beta;
    const float *bias; /* (n) or NULL */
    T *c, *aux;        /* aux may be NULL */
    uint32_t activation;
    bool backward;
};

template <typename T, int W>
static __global__ void __launch_bounds__(DTRAIN_CUDA_EPILOGUE_THREADS)
    dtrain_cuda_epilogue_kernel(const dtrain_cuda_epilogue<T> args)
{
    const int64_t strips = (args.n + W * blockDim.x - 1) / (W * blockDim.x);
    const int64_t column = (blockIdx.x % strips * blockDim.x + threadIdx.x) * W;
    const bool reads_aux = args.backward && args.activation != DTRAIN_ACTIVATION_NONE;
    const bool writes_aux = args.aux && !args.backward;
    dtrain_cuda_pack<float, W> bias = {};
    if (column >= args.n) return;
    if (args.bias) bias = dtrain_cuda_load<W>(args.bias + column);
    for (int64_t row = blockIdx.x / strips; row < args.rows; row += gridDim.x / strips) {
        const int64_t at = row * args.ldc + column;
        dtrain_cuda_pack<float, W> x = {};
        dtrain_cuda_pack<T, W> c = {}, aux = {};
        if (args.product) x = dtrain_cuda_load<W>(args.product + row * args.ld + column);
        if (args.beta != 0) c = dtrain_cuda_load<W>(args.c + at);
        if (reads_aux) aux = dtrain_cuda_load<W>(args.aux + at);
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < W; i++) {
            x.at[i] += bias.at[i];
            if (args.beta != 0) x.at[i] += args.beta * dtrain_cuda_widen(c.at[i]);
            if (reads_aux)
                x.at[i] =
                    dtrain_cuda_deactivate(args.activation, dtrain_cuda_widen(aux.at[i]), x.at[i]);
        }
        if (writes_aux) {
            dtrain_cuda_narrow(x.at, aux);
            dtrain_cuda_store(args.aux + at, aux);
        }
        if (!args.backward) {
            DTRAIN_CUDA_UNROLL
            for (int i = 0; i < W; i++) x.at[i] = dtrain_cuda_activate(args.activation, x.at[i]);
        }
        dtrain_cuda_narrow(x.at, c);
        dtrain_cuda_store(args.c + at, c);
    }
}

/* Run the epilogue kernel on rows [row, row + rows) of C. */
template <typename T>
static dtrain_result dtrain_cuda_epilogue_as(dtrain_device *device, const dtrain_gemm_args *args,
                                             int64_t row, int64_t rows, const float *product,
                                             int64_t ld, float beta)
{
    constexpr int W = DTRAIN_CUDA_EPILOGUE_WIDTH;
    T *const c = (T *)args->c + row * args->ldc;
    T *const aux = args->aux ? (T *)args->aux + row * args->ldc : NULL;
    const dtrain_cuda_epilogue<T> x = {rows,
                                       args->n,
                                       ld,
                                       args->ldc,
                                       product,
                                       beta,
                                       args->bias,
                                       c,
                                       aux,
                                       args->activation,
                                       (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0};
    const bool wide = args->n % W == 0 && args->ldc % W == 0 && ld % W == 0 &&
                      dtrain_cuda_aligned(c) && dtrain_cuda_aligned(aux) &&
                      dtrain_cuda_aligned(product) && dtrain_cuda_aligned(args->bias);
    const int64_t span = (int64_t)DTRAIN_CUDA_EPILOGUE_THREADS * (wide ? W : 1);
    const int64_t strips = (args->n + span - 1) / span;
    const int64_t deep = (int64_t)dtrain_cuda_state_of(device)->multiprocessors * 16 / strips + 1;
    const int64_t blocks = strips * (rows < deep ? rows : deep);
    if (wide)
        return DTRAIN_CUDA_RUN(device, "gemm epilogue", (dtrain_cuda_epilogue_kernel<T, W>), blocks,
                               DTRAIN_CUDA_EPILOGUE_THREADS, 0, x);
    return DTRAIN_CUDA_RUN(device, "gemm epilogue", (dtrain_cuda_epilogue_kernel<T, 1>), blocks,
                           DTRAIN_CUDA_EPILOGUE_THREADS, 0, x);
}

/* ---- fp32 copy: x (rows,n) with ld -> y (rows,n) with to_ld -----------------------------------*/

template <typename T>
static __global__ void __launch_bounds__(DTRAIN_CUDA_EPILOGUE_THREADS)
    dtrain_cuda_widen_kernel(const T *x, int64_t rows, int64_t n, int64_t ld, float *y,
                             int64_t to_ld)
{
    const int64_t strips = (n + blockDim.x - 1) / blockDim.x;
    const int64_t column = blockIdx.x % strips * blockDim.x + threadIdx.x;
    if (column >= n) return;
    for (int64_t row = blockIdx.x / strips; row < rows; row += gridDim.x / strips)
        y[row * to_ld + column] = dtrain_cuda_widen(x[row * ld + column]);
}

template <typename T>
static dtrain_result dtrain_cuda_widen_as(dtrain_device *device, const void *x, int64_t rows,
                                          int64_t n, int64_t ld, float *y, int64_t to_ld)
{
    const int64_t strips = (n + DTRAIN_CUDA_EPILOGUE_THREADS - 1) / DTRAIN_CUDA_EPILOGUE_THREADS;
    const int64_t deep = (int64_t)dtrain_cuda_state_of(device)->multiprocessors * 16 / strips + 1;
    return DTRAIN_CUDA_RUN(device, "gemm operand", dtrain_cuda_widen_kernel<T>,
                           strips * (rows < deep ? rows : deep), DTRAIN_CUDA_EPILOGUE_THREADS, 0,
                           (const T *)x, rows, n, ld, y, to_ld);
}

/* ---- Bias gradient: column sums of C (m,n), or row sums of op(A) (m,k) --------------------------
 *
 * The usual op(A) is d_y', so its row sums are column sums of the memory of A. Row sums of the
 * memory take one warp a row. */

enum { DTRAIN_CUDA_ROW_SUM_WARPS = 8 };

template <typename T>
static __global__ void __launch_bounds__(DTRAIN_CUDA_ROW_SUM_WARPS *DTRAIN_CUDA_WARP)
    dtrain_cuda_row_sums_kernel(const T *x, int64_t rows, int64_t n, int64_t ld, float *out,
                                bool accumulate)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    const int64_t row =
        (int64_t)blockIdx.x * DTRAIN_CUDA_ROW_SUM_WARPS + threadIdx.x / DTRAIN_CUDA_WARP;
    float sum = 0;
    if (row < rows)
        for (int64_t i = lane; i < n; i += DTRAIN_CUDA_WARP)
            sum += dtrain_cuda_widen(x[row * ld + i]);
    sum = dtrain_cuda_warp_sum(sum);
    if (lane == 0 && row < rows) out[row] = accumulate ? out[row] + sum : sum;
}

template <typename T>
static dtrain_result dtrain_cuda_row_sums_as(dtrain_device *device, const void *x, int64_t rows,
                                             int64_t n, int64_t ld, float *out, bool accumulate)
{
    const int64_t blocks = (rows + DTRAIN_CUDA_ROW_SUM_WARPS - 1) / DTRAIN_CUDA_ROW_SUM_WARPS;
    return DTRAIN_CUDA_RUN(device, "gemm bias gradient", dtrain_cuda_row_sums_kernel<T>, blocks,
                           DTRAIN_CUDA_ROW_SUM_WARPS * DTRAIN_CUDA_WARP, 0, (const T *)x, rows, n,
                           ld, out, accumulate);
}

static dtrain_result dtrain_cuda_gemm_bias_grad(dtrain_device *device, const dtrain_gemm_args *args)
{
    if (args->flags & DTRAIN_GEMM_BIAS_GRAD_C)
        return dtrain_cuda_column_sums(device, args->c_dtype, args->c, args->m, args->n, args->ldc,
                                       args->bias_grad, args->accumulate_bias_grad);
    if (args->flags & DTRAIN_GEMM_TRANS_A)
        return dtrain_cuda_column_sums(device, args->a_dtype, args->a, args->k, args->m, args->lda,
                                       args->bias_grad, args->accumulate_bias_grad);
    return DTRAIN_CUDA_BY_DTYPE(args->a_dtype, dtrain_cuda_row_sums_as)(
        device, args->a, args->m, args->k, args->lda, args->bias_grad, args->accumulate_bias_grad);
}

/* ---- Fused ------------------------------------------------------------------------------------*/

static dtrain_cuda_product dtrain_cuda_product_of(const dtrain_gemm_args *args)
{
    dtrain_cuda_product product;
    memset(&product, 0, sizeof product);
    product.flags = args->flags & (DTRAIN_GEMM_TRANS_A | DTRAIN_GEMM_TRANS_B);
    product.m = args->m, product.n = args->n, product.k = args->k, product.batch = 1;
    product.alpha = args->alpha, product.beta = args->beta;
    product.a = args->a, product.b = args->b, product.c = args->c;
    product.lda = args->lda, product.ldb = args->ldb, product.ldc = args->ldc;
    product.type = args->a_dtype, product.c_type = args->c_dtype;
    product.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    return product;
}

static size_t dtrain_cuda_round_256(size_t bytes) { return (bytes + 255) & ~(size_t)255; }

/* Choose the epilogue that does the whole request for C without bias gradients; false if there is
 * none. See the table at the head of this file. */
static bool dtrain_cuda_gemm_epilogue(const dtrain_cuda_state *state, const dtrain_gemm_args *args,
                                      cublasLtEpilogue_t *out)
{
    const bool backward = (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    if (args->activation == DTRAIN_ACTIVATION_NONE) {
        *out = args->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
        return backward || !args->aux;
    }
    if (backward) *out = CUBLASLT_EPILOGUE_DGELU;
    else if (args->aux)
        *out = args->bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    else *out = args->bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    return args->activation == DTRAIN_ACTIVATION_GELU && args->aux != args->c &&
           dtrain_cuda_aligned(args->aux) && (!args->aux || args->ldc % 8 == 0) &&
           !(args->a_dtype == DTRAIN_DTYPE_F32 && state->math == DTRAIN_MATH_FP32);
}

/* List the possible calls of cublasLt, best first, and return their number. `vector` is scratch for
 * a bias in C's type or for a bias gradient that is added to. */
static int dtrain_cuda_gemm_variants(const dtrain_gemm_args *args, cublasLtEpilogue_t epilogue,
                                     void *vector, dtrain_cuda_product variants[3])
{
    dtrain_cuda_product product = dtrain_cuda_product_of(args);
    const bool of_c = (args->flags & DTRAIN_GEMM_BIAS_GRAD_C) != 0;
    void *const grad = args->accumulate_bias_grad ? vector : (void *)args->bias_grad;
    int count = 0;
    product.epilogue = epilogue;
    product.aux = args->activation != DTRAIN_ACTIVATION_NONE ? args->aux : NULL;
    product.vector_type = DTRAIN_DTYPE_F32;
    if (args->bias_grad && dtrain_cuda_aligned(grad) &&
        epilogue == (of_c ? CUBLASLT_EPILOGUE_DGELU : CUBLASLT_EPILOGUE_DEFAULT)) {
        variants[count] = product;
        variants[count].epilogue = of_c ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_BGRADB;
        variants[count++].vector = grad;
    }
    if (!args->bias) {
        variants[count++] = product;
        return count;
    }
    if (dtrain_cuda_aligned(args->bias)) {
        variants[count] = product;
        variants[count++].vector = (void *)(uintptr_t)args->bias;
    }
    if (args->c_dtype != DTRAIN_DTYPE_F32) {
        variants[count] = product;
        variants[count].vector_type = args->c_dtype;
        variants[count++].vector = vector;
    }
    return count;
}

/* Run the conversion of the bias, the chosen call, and the bias gradient; if cublasLt refuses the
 * call, entry->works is false and nothing has been done. */
static dtrain_result dtrain_cuda_gemm_run_fused(dtrain_device *device, const dtrain_gemm_args *args,
                                                const dtrain_cuda_product *product,
                                                dtrain_cuda_gemm_entry *entry)
{
    const bool makes_grad = product->epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD ||
                            product->epilogue == CUBLASLT_EPILOGUE_BGRADB;
    if (!entry->works) return DTRAIN_OK;
    if (product->vector && product->vector_type != DTRAIN_DTYPE_F32) {
        const dtrain_convert_args bias = {args->n, args->bias, product->vector, DTRAIN_DTYPE_F32,
                                          product->vector_type};
        DTRAIN_CUDA_TRY(dtrain_cuda_convert(device, &bias));
    }
    DTRAIN_CUDA_TRY(dtrain_cuda_gemm_run(device, product, entry));
    if (!entry->works || !args->bias_grad) return DTRAIN_OK;
    if (!makes_grad) return dtrain_cuda_gemm_bias_grad(device, args);
    if (!args->accumulate_bias_grad) return DTRAIN_OK;
    const int64_t count = args->flags & DTRAIN_GEMM_BIAS_GRAD_C ? args->n : args->m;
    const dtrain_axpby_args add = {
        count, true, 1, 1, product->vector, args->bias_grad, false, DTRAIN_DTYPE_F32, NULL};
    return dtrain_cuda_axpby(device, &add); /* without scratch, where the vector is */
}

static dtrain_result dtrain_cuda_gemm_fused(dtrain_device *device, const dtrain_gemm_args *args,
                                            bool *done)
{
    dtrain_cuda_product variants[3];
    dtrain_cuda_gemm_entry *entry = NULL;
    cublasLtEpilogue_t epilogue;
    void *vector = NULL;
    if (!dtrain_cuda_gemm_epilogue(dtrain_cuda_state_of(device), args, &epilogue)) return DTRAIN_OK;
    const int64_t longest = args->m > args->n ? args->m : args->n;
    if (args->bias || args->bias_grad)
        DTRAIN_CUDA_TRY(dtrain_cuda_scratch(device, (size_t)longest * sizeof(float), &vector));
    const int count = dtrain_cuda_gemm_variants(args, epilogue, vector, variants);
    for (int i = 0; i < count && !*done; i++) {
        DTRAIN_CUDA_TRY(dtrain_cuda_gemm_find(device, &variants[i], &entry));
        DTRAIN_CUDA_TRY(dtrain_cuda_gemm_run_fused(device, args, &variants[i], entry));
        *done = entry->works;
    }
    if (entry && !*done) entry->slow = true;
    return DTRAIN_OK;
}

/* ---- In steps ---------------------------------------------------------------------------------*/

/* The plan of a product in steps: which buffers exist and where the product is made. */
struct dtrain_cuda_gemm_steps {
    bool empty;                   /* no product at all: alpha or k is 0 */
    bool widen;                   /* A and B are copied as fp32 */
    bool in_scratch;              /* the product is made in scratch, `rows` rows of C at a time */
    bool finish;                  /* the epilogue kernel has something to do */
    int64_t rows, ld, a_ld, b_ld; /* ld: of the product */
    size_t a_bytes, b_bytes, c_bytes; /* of scratch */
};

static dtrain_cuda_gemm_steps dtrain_cuda_gemm_plan(const dtrain_gemm_args *args, bool widen)
{
    const bool trans_a = (args->flags & DTRAIN_GEMM_TRANS_A) != 0,
               trans_b = (args->flags & DTRAIN_GEMM_TRANS_B) != 0;
    const bool backward = (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    const bool touches =
        args->bias || args->activation != DTRAIN_ACTIVATION_NONE || (args->aux && !backward);
    const dtrain_dtype type = widen ? DTRAIN_DTYPE_F32 : args->a_dtype;
    dtrain_cuda_gemm_steps steps = {};
    steps.empty = args->alpha == 0 || args->k == 0;
    steps.widen = widen && !steps.empty;
    steps.in_scratch = !steps.empty &&
                       ((args->c_dtype != DTRAIN_DTYPE_F32 && (touches || args->c_dtype != type)) ||
                        (touches && args->aux == args->c));
    steps.finish = touches || steps.in_scratch || steps.empty;
    steps.rows = args->m;
    steps.ld = args->ldc;
    if (steps.widen) {
        steps.a_ld = ((trans_a ? args->m : args->k) + 3) / 4 * 4;
        steps.b_ld = ((trans_b ? args->k : args->n) + 3) / 4 * 4;
        steps.a_bytes =
            dtrain_cuda_round_256((size_t)steps.a_ld * (size_t)(trans_a ? args->k : args->m) * 4);
        steps.b_bytes =
            dtrain_cuda_round_256((size_t)steps.b_ld * (size_t)(trans_b ? args->n : args->k) * 4);
    }
    if (steps.in_scratch) {
        steps.ld = (args->n + 3) / 4 * 4;
        const int64_t most = DTRAIN_CUDA_GEMM_SCRATCH / (steps.ld * 4);
        steps.rows = most < 1 ? 1 : most < args->m ? most : args->m;
        steps.c_bytes = (size_t)steps.rows * (size_t)steps.ld * 4;
    }
    return steps;
}

/* Describe the bare product of all rows, and make the fp32 copies of A and B if needed. */
static dtrain_result dtrain_cuda_gemm_operands(dtrain_device *device, const dtrain_gemm_args *args,
                                               const dtrain_cuda_gemm_steps *steps, char *scratch,
                                               dtrain_cuda_product *product)
{
    const bool trans_a = (args->flags & DTRAIN_GEMM_TRANS_A) != 0,
               trans_b = (args->flags & DTRAIN_GEMM_TRANS_B) != 0;
    *product = dtrain_cuda_product_of(args);
    if (!steps->widen) return DTRAIN_OK;
    float *const a = (float *)scratch, *const b = (float *)(scratch + steps->a_bytes);
    product->type = DTRAIN_DTYPE_F32;
    product->widened = args->a_dtype != DTRAIN_DTYPE_F32 || args->b_dtype != DTRAIN_DTYPE_F32;
    product->a = a, product->lda = steps->a_ld;
    product->b = b, product->ldb = steps->b_ld;
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_BY_DTYPE(args->a_dtype, dtrain_cuda_widen_as)(
        device, args->a, trans_a ? args->k : args->m, trans_a ? args->m : args->k, args->lda, a,
        steps->a_ld));
    return DTRAIN_CUDA_BY_DTYPE(args->b_dtype, dtrain_cuda_widen_as)(
        device, args->b, trans_b ? args->n : args->k, trans_b ? args->k : args->n, args->ldb, b,
        steps->b_ld);
}

/* Run the epilogue kernel, if there is anything to do, on rows [row, row + product->m) of C. */
static dtrain_result dtrain_cuda_gemm_finish(dtrain_device *device, const dtrain_gemm_args *args,
                                             const dtrain_cuda_gemm_steps *steps,
                                             const dtrain_cuda_product *product, int64_t row)
{
    if (!steps->finish) return DTRAIN_OK;
    const float *const made = steps->empty ? NULL : (const float *)product->c;
    const float beta = steps->in_scratch || steps->empty ? args->beta : 0;
    return DTRAIN_CUDA_BY_DTYPE(args->c_dtype, dtrain_cuda_epilogue_as)(
        device, args, row, product->m, made, steps->ld, beta);
}

static dtrain_result dtrain_cuda_gemm_in_steps(dtrain_device *device, const dtrain_gemm_args *args,
                                               bool widen, bool *done)
{
    const dtrain_cuda_gemm_steps steps = dtrain_cuda_gemm_plan(args, widen);
    const int64_t a_row =
        args->flags & DTRAIN_GEMM_TRANS_A ? 1 : (steps.widen ? steps.a_ld : args->lda);
    dtrain_cuda_product product;
    char *scratch = NULL;
    const size_t bytes = steps.a_bytes + steps.b_bytes + steps.c_bytes;
    if (bytes > 0) DTRAIN_CUDA_TRY(dtrain_cuda_scratch(device, bytes, (void **)&scratch));
    DTRAIN_CUDA_TRY(dtrain_cuda_gemm_operands(device, args, &steps, scratch, &product));
    const char *const a = (const char *)product.a;
    for (int64_t row = 0; row < args->m; row += steps.rows) {
        dtrain_cuda_gemm_entry *entry = NULL;
        product.m = args->m - row < steps.rows ? args->m - row : steps.rows;
        product.a = a + row * a_row * (int64_t)dtrain_dtype_bytes(product.type);
        if (steps.in_scratch) {
            product.c = scratch + steps.a_bytes + steps.b_bytes, product.ldc = steps.ld;
            product.c_type = DTRAIN_DTYPE_F32, product.beta = 0;
        }
        if (!steps.empty) {
            DTRAIN_CUDA_TRY(dtrain_cuda_gemm_find(device, &product, &entry));
            DTRAIN_CUDA_TRY(dtrain_cuda_gemm_run(device, &product, entry));
            if (!entry->works) entry->slow = true;
            if (!entry->works && !widen && row == 0) return DTRAIN_OK;
            if (!entry->works) DTRAIN_CUDA_TRY(dtrain_cuda_own_product(device, &product, entry));
        }
        DTRAIN_CUDA_TRY(dtrain_cuda_gemm_finish(device, args, &steps, &product, row));
    }
    *done = true;
    return args->bias_grad ? dtrain_cuda_gemm_bias_grad(device, args) : DTRAIN_OK;
}

/* ---- Entry ------------------------------------------------------------------------------------*/

static dtrain_result dtrain_cuda_gemm_check(const dtrain_gemm_args *args)
{
    const uint32_t known = DTRAIN_GEMM_TRANS_A | DTRAIN_GEMM_TRANS_B | DTRAIN_GEMM_ACT_BACKWARD |
                           DTRAIN_GEMM_BIAS_GRAD_C;
    const bool backward = (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("gemm", args->a_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("gemm", args->b_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("gemm", args->c_dtype));
    if (args->flags & ~known)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "gemm: the flags 0x%x contain an unknown one",
                           (unsigned)args->flags);
    if (args->activation > DTRAIN_ACTIVATION_SILU)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "gemm: activation is %u, which is not a dtrain_activation",
                           (unsigned)args->activation);
    if (backward && args->bias)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "gemm: DTRAIN_GEMM_ACT_BACKWARD does not take a bias: give NULL");
    if (backward && args->activation != DTRAIN_ACTIVATION_NONE && !args->aux)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "gemm: DTRAIN_GEMM_ACT_BACKWARD needs in aux "
                                                  "what the forward product left there, found "
                                                  "NULL");
    if (args->k < 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "gemm: k is %lld, below 0", (long long)args->k);
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_gemm(dtrain_device *device, const dtrain_gemm_args *given)
{
    dtrain_gemm_args args = *given;
    bool done = false;
    DTRAIN_CUDA_TRY(dtrain_cuda_gemm_check(given));
    if (args.m <= 0 || args.n <= 0) return DTRAIN_OK;
    const bool mixed = args.a_dtype != args.b_dtype, empty = args.alpha == 0 || args.k == 0;
    if (!mixed && !empty && (args.c_dtype == DTRAIN_DTYPE_F32 || args.c_dtype == args.a_dtype))
        DTRAIN_CUDA_TRY(dtrain_cuda_gemm_fused(device, &args, &done));
    if (!done) DTRAIN_CUDA_TRY(dtrain_cuda_gemm_in_steps(device, &args, mixed, &done));
    if (!done) DTRAIN_CUDA_TRY(dtrain_cuda_gemm_in_steps(device, &args, true, &done));
    return DTRAIN_OK;
}

/* ---- bias: c, aux (m,n), by the epilogue kernel without a product --------------------------*/

static dtrain_result dtrain_cuda_bias(dtrain_device *device, const dtrain_bias_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("bias", args->c_dtype));
    if (args->activation > DTRAIN_ACTIVATION_SILU)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "bias: activation is %u, which is not a dtrain_activation",
                           (unsigned)args->activation);
    if (args->m <= 0 || args->n <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_BY_DTYPE(args->c_dtype, dtrain_cuda_epilogue_as)(device, args, 0, args->m,
                                                                        NULL, args->n, 1.0f);
}

/* ==== src/device/cuda/layernorm.cuh =========================================================== */

/* Layer norm, forward and backward
 *
 * A power of two of warps keeps a row in registers and reads it once: one warp for a narrow row,
 * with several rows a block; one block for a wide row. Two passes over the registers compute the
 * statistics (mean, then squared distances from it), so nothing cancels. Rows too wide for
 * registers take the "long" kernels, which read the row again. Without `mean` (root mean square
 * norm) the mean is 0. */

#include <math.h>

/* The division of work: a row belongs to `warps` warps of a block that takes `at_a_time` rows at a
 * time. A thread has the packs thread, thread + 32 warps, ... of its row, `kept` elements in
 * all. */
#define DTRAIN_CUDA_ROW_THREADS 512 /* of a block, at most: 128 registers for each */

/* Return the most elements of a row that a thread keeps. Each single element also takes registers
 * for its address. */
static __host__ __device__ constexpr int dtrain_cuda_row_kept(int width)
{
    return width == 1 ? 16 : 32;
}

struct dtrain_cuda_row_plan {
    int warps, threads /* of the block */, at_a_time, kept;
    int64_t blocks; /* enough to take every row once */
    bool fits;      /* into registers */
};

static dtrain_cuda_row_plan dtrain_cuda_plan_rows(int64_t rows, int64_t n, int width)
{
    dtrain_cuda_row_plan plan = {1, 256, 1, 0, rows, false};
    const int most = dtrain_cuda_row_kept(width) * DTRAIN_CUDA_WARP; /* of a warp */
    while (plan.warps * DTRAIN_CUDA_WARP < DTRAIN_CUDA_ROW_THREADS && plan.warps * most < n)
        plan.warps *= 2;
    const int of_row = plan.warps * DTRAIN_CUDA_WARP;
    if (plan.warps * most < n) return plan;
    plan.fits = true;
    if (plan.threads < of_row) plan.threads = of_row;
    plan.at_a_time = plan.threads / of_row;
    plan.kept = (int)((n + of_row * width - 1) / (of_row * width)) * width;
    plan.blocks = (rows + plan.at_a_time - 1) / plan.at_a_time;
    return plan;
}

/* Sum x over the warps of a row, in every thread of the row. Consecutive calls must alternate
 * between two arrays of slots: the barrier in one call separates the uses of the other array. */
static __device__ __forceinline__ float dtrain_cuda_row_sum(float x, float *slots, int warps)
{
    x = dtrain_cuda_warp_sum(x);
    if (warps == 1) return x;
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP, warp = threadIdx.x / DTRAIN_CUDA_WARP;
    if (lane == 0) slots[warp] = x;
    __syncthreads();
    return dtrain_cuda_warp_sum(lane < warps ? slots[warp / warps * warps + lane] : 0);
}

/* ---- Forward ------------------------------------------------------------------------------------
 *
 * x, residual, sum, y (rows,n); weight, bias (n); mean, rstd (rows). Bytes: one read of x and of
 * residual, one write of sum and of y; weight and bias stay in cache.
 *
 * s = x + residual is rounded to the type of sum before normalisation: y, mean and rstd belong to
 * the s that backward reads, and fusing the addition changes no bit. */

template <typename X, typename Y, int WIDTH>
static __device__ __forceinline__ dtrain_cuda_pack<X, WIDTH>
dtrain_cuda_layernorm_input(const dtrain_layernorm_args &args, int64_t at)
{
    dtrain_cuda_pack<X, WIDTH> s = dtrain_cuda_load<WIDTH>((const X *)args.x + at);
    if (!args.residual) return s;
    const dtrain_cuda_pack<Y, WIDTH> residual =
        dtrain_cuda_load<WIDTH>((const Y *)args.residual + at);
    float sum[WIDTH];
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < WIDTH; e++)
        sum[e] = dtrain_cuda_widen(s.at[e]) + dtrain_cuda_widen(residual.at[e]);
    dtrain_cuda_narrow(sum, s);
    dtrain_cuda_store((X *)args.sum + at, s);
    return s;
}

template <typename Y, int WIDTH>
static __device__ __forceinline__ void
dtrain_cuda_layernorm_output(const dtrain_layernorm_args &args, int64_t row, int64_t column,
                             const float (&s)[WIDTH], float mean, float rstd)
{
    const auto weight = dtrain_cuda_load<WIDTH>(args.weight + column);
    dtrain_cuda_pack<float, WIDTH> bias = {};
    if (args.bias) bias = dtrain_cuda_load<WIDTH>(args.bias + column);
    float out[WIDTH];
    dtrain_cuda_pack<Y, WIDTH> y;
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < WIDTH; e++) out[e] = (s[e] - mean) * rstd * weight.at[e] + bias.at[e];
    dtrain_cuda_narrow(out, y);
    dtrain_cuda_store((Y *)args.y + row * args.n + column, y);
}

template <typename X, typename Y, int WIDTH>
static __global__ void __launch_bounds__(DTRAIN_CUDA_ROW_THREADS)
    dtrain_cuda_layernorm_kernel(dtrain_layernorm_args args, dtrain_cuda_row_plan plan)
{
    constexpr int chunks = dtrain_cuda_row_kept(WIDTH) / WIDTH; /* of a thread */
    __shared__ float slots[2][DTRAIN_CUDA_WARP];
    const int threads = plan.warps * DTRAIN_CUDA_WARP, thread = threadIdx.x % threads;
    const int64_t stride = (int64_t)gridDim.x * plan.at_a_time;
    for (int64_t first = (int64_t)blockIdx.x * plan.at_a_time; first < args.rows; first += stride) {
        const int64_t row = first + threadIdx.x / threads;
        /* warps after the last row have n = 0: they only take part in barriers */
        const int n = row < args.rows ? (int)args.n : 0;
        float s[chunks][WIDTH], sum = 0, squares = 0;
        DTRAIN_CUDA_UNROLL
        for (int c = 0; c < chunks; c++) {
            const int column = (c * threads + thread) * WIDTH;
            if (column < n) {
                const auto in =
                    dtrain_cuda_layernorm_input<X, Y, WIDTH>(args, row * args.n + column);
                DTRAIN_CUDA_UNROLL
                for (int e = 0; e < WIDTH; e++) sum += s[c][e] = dtrain_cuda_widen(in.at[e]);
            }
        }
        float mean = 0;
        if (args.mean) mean = dtrain_cuda_row_sum(sum, slots[0], plan.warps) / (float)args.n;

        DTRAIN_CUDA_UNROLL
        for (int c = 0; c < chunks; c++)
            if ((c * threads + thread) * WIDTH < n) {
                DTRAIN_CUDA_UNROLL
                for (int e = 0; e < WIDTH; e++) squares += (s[c][e] - mean) * (s[c][e] - mean);
            }
        const float variance = dtrain_cuda_row_sum(squares, slots[1], plan.warps) / (float)args.n;
        const float rstd = 1 / sqrtf(variance + args.epsilon);
        if (n > 0 && thread == 0) {
            args.rstd[row] = rstd;
            if (args.mean) args.mean[row] = mean;
        }

        DTRAIN_CUDA_UNROLL
        for (int c = 0; c < chunks; c++) {
            const int column = (c * threads + thread) * WIDTH;
            if (column < n)
                dtrain_cuda_layernorm_output<Y, WIDTH>(args, row, column, s[c], mean, rstd);
        }
    }
}

/* Normalise one row a block; x is read three times (with residual: x once, and sum twice). */
static __global__ void __launch_bounds__(1024)
    dtrain_cuda_layernorm_long_kernel(dtrain_layernorm_args args)
{
    __shared__ float slots[DTRAIN_CUDA_WARP];
    const void *s = args.residual ? args.sum : args.x;
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const int64_t begin = row * args.n;
        float sum = 0, squares = 0;
        for (int64_t j = threadIdx.x; j < args.n; j += blockDim.x) {
            if (args.residual)
                dtrain_cuda_put_any(
                    args.sum, args.x_dtype, begin + j,
                    dtrain_cuda_get_any(args.x, args.x_dtype, begin + j) +
                        dtrain_cuda_get_any(args.residual, args.y_dtype, begin + j));
            sum += dtrain_cuda_get_any(s, args.x_dtype, begin + j); /* this thread wrote it */
        }
        const float average = dtrain_cuda_block_sum(sum, slots) / (float)args.n;
        const float mean = args.mean ? average : 0;
        for (int64_t j = threadIdx.x; j < args.n; j += blockDim.x) {
            const float distance = dtrain_cuda_get_any(s, args.x_dtype, begin + j) - mean;
            squares += distance * distance;
        }
        const float rstd =
            1 / sqrtf(dtrain_cuda_block_sum(squares, slots) / (float)args.n + args.epsilon);
        for (int64_t j = threadIdx.x; j < args.n; j += blockDim.x)
            dtrain_cuda_put_any(args.y, args.y_dtype, begin + j,
                                (dtrain_cuda_get_any(s, args.x_dtype, begin + j) - mean) * rstd *
                                        args.weight[j] +
                                    (args.bias ? args.bias[j] : 0));
        if (threadIdx.x == 0 && args.mean) args.mean[row] = mean;
        if (threadIdx.x == 0) args.rstd[row] = rstd;
    }
}

template <typename X, typename Y>
static dtrain_result dtrain_cuda_layernorm_run(dtrain_device *device,
                                               const dtrain_layernorm_args *args)
{
    constexpr int width = dtrain_cuda_long_width<X, Y>();
    const bool wide = args->n % width == 0 && dtrain_cuda_aligned(args->x) &&
                      dtrain_cuda_aligned(args->y) && dtrain_cuda_aligned(args->weight) &&
                      dtrain_cuda_aligned(args->bias) && dtrain_cuda_aligned(args->residual) &&
                      dtrain_cuda_aligned(args->sum);
    const dtrain_cuda_row_plan plan = dtrain_cuda_plan_rows(args->rows, args->n, wide ? width : 1);
    const int64_t blocks = plan.blocks < INT32_MAX ? plan.blocks : INT32_MAX;
    if (!plan.fits)
        return DTRAIN_CUDA_RUN(device, "layernorm", dtrain_cuda_layernorm_long_kernel, blocks, 1024,
                               0, *args);
    void (*const kernel)(dtrain_layernorm_args, dtrain_cuda_row_plan) =
        wide ? dtrain_cuda_layernorm_kernel<X, Y, width> : dtrain_cuda_layernorm_kernel<X, Y, 1>;
    return DTRAIN_CUDA_RUN(device, "layernorm", kernel, blocks, plan.threads, 0, *args, plan);
}

template <typename X>
static dtrain_result dtrain_cuda_layernorm_of(dtrain_device *device,
                                              const dtrain_layernorm_args *args)
{
    if (args->y_dtype == DTRAIN_DTYPE_BF16)
        return dtrain_cuda_layernorm_run<X, dtrain_cuda_bf16>(device, args);
    if (args->y_dtype == DTRAIN_DTYPE_F16)
        return dtrain_cuda_layernorm_run<X, dtrain_cuda_f16>(device, args);
    return dtrain_cuda_layernorm_run<X, float>(device, args);
}

static dtrain_result dtrain_cuda_layernorm(dtrain_device *device, const dtrain_layernorm_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("layernorm, x_dtype", args->x_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("layernorm, y_dtype", args->y_dtype));
    if (!args->residual != !args->sum)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "layernorm: residual and sum are given together, found only %s",
                           args->sum ? "sum" : "residual");
    if (args->rows <= 0 || args->n <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_BY_DTYPE(args->x_dtype, dtrain_cuda_layernorm_of)(device, args);
}

/* ---- Backward -----------------------------------------------------------------------------------
 *
 * With hat = (x - mean) rstd and d = d_y weight:
 *
 *     d_x = (d - average(d) - hat average(d hat)) rstd        averages over the row
 *     d_weight = sum of d_y hat, d_bias = sum of d_y          over the rows
 *
 * x, d_y, d_x, d_residual (rows,n). Bytes: one read of x and d_y, one write of d_x and d_residual
 * (and a read of d_x to accumulate). A block takes many rows; each thread adds its columns to its
 * own sums in shared memory, without barriers and bank conflicts. Then
 *
 *     sums of a block's row groups, in order -> partials (blocks, 2, n)
 *     partials, in order -> d_weight, d_bias                  columns kernel
 *
 * The partials are 8 n bytes, written and read, for each of at most 2 blocks a multiprocessor. */

template <typename X, typename Y, int WIDTH>
static __device__ __forceinline__ void
dtrain_cuda_layernorm_backward_output(const dtrain_layernorm_backward_args &args, int64_t at,
                                      const float (&d)[WIDTH], const float (&hat)[WIDTH],
                                      float d_average, float d_hat_average, float rstd)
{
    dtrain_cuda_pack<X, WIDTH> d_x = {};
    float out[WIDTH];
    if (args.accumulate_x) d_x = dtrain_cuda_load<WIDTH>((const X *)args.d_x + at);
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < WIDTH; e++) {
        const float fresh = (d[e] - d_average - hat[e] * d_hat_average) * rstd;
        out[e] = args.accumulate_x ? dtrain_cuda_widen(d_x.at[e]) + fresh : fresh;
    }
    dtrain_cuda_narrow(out, d_x);
    dtrain_cuda_store((X *)args.d_x + at, d_x);
    if (!args.d_residual) return;
    dtrain_cuda_pack<Y, WIDTH> d_residual;
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < WIDTH; e++) out[e] = dtrain_cuda_widen(d_x.at[e]);
    dtrain_cuda_narrow(out, d_residual);
    dtrain_cuda_store((Y *)args.d_residual + at, d_residual);
}

/* Add the sums of a block's row groups in order, into its partials. */
static __device__ void dtrain_cuda_layernorm_partials(const float *weight_sums,
                                                      const float *bias_sums, int64_t n,
                                                      const dtrain_cuda_row_plan &plan, int width,
                                                      float *partials)
{
    const int threads = plan.warps * DTRAIN_CUDA_WARP;
    __syncthreads();
    if ((int)threadIdx.x >= threads) return; /* the first group adds all groups' sums */
    for (int i = 0; i < plan.kept; i++) {
        const int64_t column = ((int64_t)(i / width) * threads + threadIdx.x) * width + i % width;
        if (column >= n) continue;
        float weight_sum = 0, bias_sum = 0;
        for (int group = 0; group < plan.at_a_time; group++) {
            weight_sum += weight_sums[i * blockDim.x + group * threads];
            bias_sum += bias_sums[i * blockDim.x + group * threads];
        }
        partials[(2 * (int64_t)blockIdx.x + 0) * n + column] = weight_sum;
        partials[(2 * (int64_t)blockIdx.x + 1) * n + column] = bias_sum;
    }
}

/* Compute d_x, and the block's partials unless partials is NULL. */
template <typename X, typename Y, int WIDTH>
static __global__ void __launch_bounds__(DTRAIN_CUDA_ROW_THREADS)
    dtrain_cuda_layernorm_backward_kernel(dtrain_layernorm_backward_args args,
                                          dtrain_cuda_row_plan plan, float *partials)
{
    constexpr int chunks = dtrain_cuda_row_kept(WIDTH) / WIDTH;
    __shared__ float slots[2][DTRAIN_CUDA_WARP];
    DTRAIN_CUDA_DYNAMIC_SHARED(float, sums); /* (2, plan.kept, blockDim.x): of d_y hat, of d_y */
    float *const weight_sums = sums + threadIdx.x, *const bias_sums =
                                                       weight_sums + plan.kept * blockDim.x;
    for (int i = 0; partials && i < plan.kept; i++)
        weight_sums[i * blockDim.x] = 0, bias_sums[i * blockDim.x] = 0;

    const int threads = plan.warps * DTRAIN_CUDA_WARP, thread = threadIdx.x % threads;
    const int64_t stride = (int64_t)gridDim.x * plan.at_a_time;
    for (int64_t first = (int64_t)blockIdx.x * plan.at_a_time; first < args.rows; first += stride) {
        const int64_t row = first + threadIdx.x / threads;
        /* warps after the last row have n = 0: they only take part in barriers */
        const int n = row < args.rows ? (int)args.n : 0;
        const float mean = n && args.mean ? args.mean[row] : 0, rstd = n ? args.rstd[row] : 0;
        float hat[chunks][WIDTH], d[chunks][WIDTH], d_sum = 0, d_hat_sum = 0;
        DTRAIN_CUDA_UNROLL
        for (int c = 0; c < chunks; c++) {
            const int column = (c * threads + thread) * WIDTH;
            if (column >= n) continue;
            const auto x = dtrain_cuda_load<WIDTH>((const X *)args.x + row * args.n + column);
            const auto d_y = dtrain_cuda_load<WIDTH>((const Y *)args.d_y + row * args.n + column);
            const auto weight = dtrain_cuda_load<WIDTH>(args.weight + column);
            DTRAIN_CUDA_UNROLL
            for (int e = 0; e < WIDTH; e++) {
                const float dy = dtrain_cuda_widen(d_y.at[e]);
                hat[c][e] = (dtrain_cuda_widen(x.at[e]) - mean) * rstd;
                d[c][e] = dy * weight.at[e];
                d_sum += d[c][e];
                d_hat_sum += d[c][e] * hat[c][e];
                if (!partials) continue;
                weight_sums[(c * WIDTH + e) * blockDim.x] += dy * hat[c][e];
                bias_sums[(c * WIDTH + e) * blockDim.x] += dy;
            }
        }
        const float d_mean = dtrain_cuda_row_sum(d_sum, slots[0], plan.warps) / (float)args.n;
        const float d_average = args.mean ? d_mean : 0;
        const float d_hat_average =
            dtrain_cuda_row_sum(d_hat_sum, slots[1], plan.warps) / (float)args.n;

        DTRAIN_CUDA_UNROLL
        for (int c = 0; c < chunks; c++) {
            const int column = (c * threads + thread) * WIDTH;
            if (column < n && args.d_x)
                dtrain_cuda_layernorm_backward_output<X, Y, WIDTH>(
                    args, row * args.n + column, d[c], hat[c], d_average, d_hat_average, rstd);
        }
    }
    if (partials)
        dtrain_cuda_layernorm_partials(weight_sums, bias_sums, args.n, plan, WIDTH, partials);
}

/* Add partials (count, 2, n) to d_weight (n) and d_bias (n): even blocks make one, odd blocks the
 * other. A block has 32 columns and 16 warps, which take every 16th partial; their 16 sums are
 * added in order. */
static __global__ void __launch_bounds__(512)
    dtrain_cuda_layernorm_columns_kernel(dtrain_layernorm_backward_args args, const float *partials,
                                         int64_t count)
{
    __shared__ float sums[16][DTRAIN_CUDA_WARP];
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP, warp = threadIdx.x / DTRAIN_CUDA_WARP;
    const int64_t which = blockIdx.x % 2,
                  column = (int64_t)(blockIdx.x / 2) * DTRAIN_CUDA_WARP + lane;
    float sum = 0;
    if (column < args.n)
        for (int64_t p = warp; p < count; p += 16)
            sum += partials[(2 * p + which) * args.n + column];
    sums[warp][lane] = sum;
    __syncthreads();
    float *const out = which ? args.d_bias : args.d_weight;
    if (warp != 0 || column >= args.n || !out) return;
    sum = 0;
    for (int w = 0; w < 16; w++) sum += sums[w][lane];
    out[column] = args.accumulate_params ? out[column] + sum : sum;
}

/* Compute d_x for one row a block; the row is read twice. */
static __global__ void __launch_bounds__(1024)
    dtrain_cuda_layernorm_backward_long_kernel(dtrain_layernorm_backward_args args)
{
    __shared__ float slots[DTRAIN_CUDA_WARP];
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const int64_t begin = row * args.n;
        const float mean = args.mean ? args.mean[row] : 0, rstd = args.rstd[row];
        float d_sum = 0, d_hat_sum = 0;
        for (int64_t j = threadIdx.x; j < args.n; j += blockDim.x) {
            const float d = dtrain_cuda_get_any(args.d_y, args.y_dtype, begin + j) * args.weight[j];
            d_sum += d;
            d_hat_sum += d * (dtrain_cuda_get_any(args.x, args.x_dtype, begin + j) - mean) * rstd;
        }
        const float d_mean = dtrain_cuda_block_sum(d_sum, slots) / (float)args.n;
        const float d_average = args.mean ? d_mean : 0;
        const float d_hat_average = dtrain_cuda_block_sum(d_hat_sum, slots) / (float)args.n;
        for (int64_t j = threadIdx.x; j < args.n; j += blockDim.x) {
            const float d = dtrain_cuda_get_any(args.d_y, args.y_dtype, begin + j) * args.weight[j];
            const float hat = (dtrain_cuda_get_any(args.x, args.x_dtype, begin + j) - mean) * rstd;
            float d_x = (d - d_average - hat * d_hat_average) * rstd;
            if (args.accumulate_x)
                d_x = dtrain_cuda_get_any(args.d_x, args.x_dtype, begin + j) + d_x;
            dtrain_cuda_put_any(args.d_x, args.x_dtype, begin + j, d_x);
            if (args.d_residual)
                dtrain_cuda_put_any(args.d_residual, args.y_dtype, begin + j,
                                    dtrain_cuda_get_any(args.d_x, args.x_dtype, begin + j));
        }
    }
}

/* Add rows slab, slab + slabs, ... of 256 columns a block, into partials (slabs, 2, n). */
static __global__ void __launch_bounds__(256)
    dtrain_cuda_layernorm_slabs_kernel(dtrain_layernorm_backward_args args, float *partials,
                                       int64_t slabs)
{
    const int64_t slab = blockIdx.x % slabs, column = blockIdx.x / slabs * blockDim.x + threadIdx.x;
    if (column >= args.n) return;
    float weight_sum = 0, bias_sum = 0;
    for (int64_t row = slab; row < args.rows; row += slabs) {
        const float d_y = dtrain_cuda_get_any(args.d_y, args.y_dtype, row * args.n + column);
        const float x = dtrain_cuda_get_any(args.x, args.x_dtype, row * args.n + column);
        weight_sum += d_y * (x - (args.mean ? args.mean[row] : 0)) * args.rstd[row];
        bias_sum += d_y;
    }
    partials[(2 * slab + 0) * args.n + column] = weight_sum;
    partials[(2 * slab + 1) * args.n + column] = bias_sum;
}

static dtrain_result dtrain_cuda_layernorm_columns(dtrain_device *device,
                                                   const dtrain_layernorm_backward_args *args,
                                                   const float *partials, int64_t count)
{
    return DTRAIN_CUDA_RUN(
        device, "layernorm_backward, columns", dtrain_cuda_layernorm_columns_kernel,
        (args->n + DTRAIN_CUDA_WARP - 1) / DTRAIN_CUDA_WARP * 2, 512, 0, *args, partials, count);
}

/* Run the long kernels. The parameters come first, because d_x can be d_y. */
static dtrain_result dtrain_cuda_layernorm_backward_long(dtrain_device *device,
                                                         const dtrain_layernorm_backward_args *args)
{
    if (args->d_weight || args->d_bias) {
        const int64_t slabs = args->rows < 32 ? args->rows : 32;
        void *partials;
        DTRAIN_CUDA_TRY(
            dtrain_cuda_scratch(device, (size_t)(slabs * 2 * args->n) * sizeof(float), &partials));
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(
            device, "layernorm_backward", dtrain_cuda_layernorm_slabs_kernel,
            (args->n + 255) / 256 * slabs, 256, 0, *args, (float *)partials, slabs));
        DTRAIN_CUDA_TRY(
            dtrain_cuda_layernorm_columns(device, args, (const float *)partials, slabs));
    }
    if (!args->d_x) return DTRAIN_OK;
    return DTRAIN_CUDA_RUN(device, "layernorm_backward", dtrain_cuda_layernorm_backward_long_kernel,
                           args->rows < INT32_MAX ? args->rows : INT32_MAX, 1024, 0, *args);
}

template <typename X, typename Y>
static dtrain_result dtrain_cuda_layernorm_backward_run(dtrain_device *device,
                                                        const dtrain_layernorm_backward_args *args)
{
    constexpr int width = dtrain_cuda_long_width<X, Y>();
    const bool wide = args->n % width == 0 && dtrain_cuda_aligned(args->x) &&
                      dtrain_cuda_aligned(args->d_y) && dtrain_cuda_aligned(args->weight) &&
                      dtrain_cuda_aligned(args->d_x) && dtrain_cuda_aligned(args->d_residual);
    const bool params = args->d_weight || args->d_bias;
    const dtrain_cuda_state *const state = dtrain_cuda_state_of(device);
    const dtrain_cuda_row_plan plan = dtrain_cuda_plan_rows(args->rows, args->n, wide ? width : 1);
    const size_t shared_bytes = params ? (size_t)(2 * plan.kept * plan.threads) * sizeof(float) : 0;
    const size_t static_bytes = 2 * DTRAIN_CUDA_WARP * sizeof(float); /* slots: they count too */
    if (!plan.fits || shared_bytes + static_bytes > state->shared_limit)
        return dtrain_cuda_layernorm_backward_long(device, args);

    void (*const kernel)(dtrain_layernorm_backward_args, dtrain_cuda_row_plan, float *) =
        wide ? dtrain_cuda_layernorm_backward_kernel<X, Y, width>
             : dtrain_cuda_layernorm_backward_kernel<X, Y, 1>;
    const int64_t most = (int64_t)state->multiprocessors * (DTRAIN_CUDA_ROW_THREADS / plan.threads);
    const int64_t blocks = plan.blocks < most ? plan.blocks : most;
    void *partials = NULL;
    if (params)
        DTRAIN_CUDA_TRY(
            dtrain_cuda_scratch(device, (size_t)(blocks * 2 * args->n) * sizeof(float), &partials));
    if (shared_bytes + static_bytes > 48 * 1024) /* more than a kernel has without asking */
        DTRAIN_CUDA_TRY(dtrain_cuda_check(
            cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)shared_bytes),
            "layernorm_backward, shared memory"));
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "layernorm_backward", kernel, blocks, plan.threads,
                                    shared_bytes, *args, plan, (float *)partials));
    return params ? dtrain_cuda_layernorm_columns(device, args, (const float *)partials, blocks)
                  : DTRAIN_OK;
}

template <typename X>
static dtrain_result dtrain_cuda_layernorm_backward_of(dtrain_device *device,
                                                       const dtrain_layernorm_backward_args *args)
{
    if (args->y_dtype == DTRAIN_DTYPE_BF16)
        return dtrain_cuda_layernorm_backward_run<X, dtrain_cuda_bf16>(device, args);
    if (args->y_dtype == DTRAIN_DTYPE_F16)
        return dtrain_cuda_layernorm_backward_run<X, dtrain_cuda_f16>(device, args);
    return dtrain_cuda_layernorm_backward_run<X, float>(device, args);
}

static dtrain_result dtrain_cuda_layernorm_backward(dtrain_device *device,
                                                    const dtrain_layernorm_backward_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("layernorm_backward, x_dtype", args->x_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("layernorm_backward, y_dtype", args->y_dtype));
    if (args->d_residual && !args->d_x)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "layernorm_backward: d_residual is a copy of d_x, found d_x = NULL");
    if (args->rows <= 0 || args->n <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_BY_DTYPE(args->x_dtype, dtrain_cuda_layernorm_backward_of)(device, args);
}

/* ==== src/device/cuda/tokens.cuh ============================================================== */

/* Token ids: embedding and cross-entropy
 *
 * The kernels that read token ids: the embedding and its gradient, and the cross-entropy over the
 * vocabulary. A bad id is recorded as a fault, which the host reports at its next wait, and the
 * kernel continues with a harmless id. */

#include <math.h>

/* Record a fault, unless an earlier one is still waiting for the host to read it. */
static __device__ void dtrain_cuda_set_fault(dtrain_cuda_fault *fault, unsigned kind, int64_t value,
                                             int64_t row, int64_t limit)
{
    if (atomicCAS(&fault->kind, (unsigned)DTRAIN_CUDA_NO_FAULT, kind) != DTRAIN_CUDA_NO_FAULT)
        return;
    fault->value = value;
    fault->row = row;
    fault->limit = limit;
}

/* Return the row of the table for a row of tokens, `vocab` if the token is not in this part of the
 * whole table; a bad token is reported and replaced by token 0. */
static __device__ int64_t dtrain_cuda_token(const dtrain_embedding_args &args, int64_t row,
                                            dtrain_cuda_fault *fault)
{
    int64_t token = args.tokens[row];
    if (token < 0 || token >= args.whole_vocab) {
        dtrain_cuda_set_fault(fault, DTRAIN_CUDA_BAD_TOKEN, token, row, args.whole_vocab);
        token = 0;
    }
    token -= args.first_token;
    return token >= 0 && token < args.vocab ? token : args.vocab;
}

/* ---- Embedding forward --------------------------------------------------------------------------
 *
 * wte (vocab,n), wpe (sequence,n), y (rows,n). One warp a row. Bytes: one read of a row of wte and
 * one write of y for each token; wpe stays in cache. */

template <typename T, int WIDTH>
static __global__ void __launch_bounds__(256, 4)
    dtrain_cuda_embedding_kernel(dtrain_embedding_args args, dtrain_cuda_fault *fault)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    const int64_t warps = (int64_t)gridDim.x * (blockDim.x / DTRAIN_CUDA_WARP);
    for (int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / DTRAIN_CUDA_WARP;
         row < args.rows; row += warps) {
        const int64_t token = dtrain_cuda_token(args, row, fault);
        const float *const word = token < args.vocab ? args.wte + token * args.n : NULL;
        const float *const place =
            args.wpe ? args.wpe + (args.first_row + row) % args.sequence * args.n : NULL;
        T *const y = (T *)args.y + row * args.n;
        for (int64_t column = lane * WIDTH; column < args.n; column += DTRAIN_CUDA_WARP * WIDTH) {
            dtrain_cuda_pack<float, WIDTH> a = {}, b = {};
            if (word) a = dtrain_cuda_load<WIDTH>(word + column);
            if (place) b = dtrain_cuda_load<WIDTH>(place + column);
            dtrain_cuda_pack<T, WIDTH> out;
            DTRAIN_CUDA_UNROLL
            for (int e = 0; e < WIDTH; e++) a.at[e] = place ? a.at[e] + b.at[e] : a.at[e];
            dtrain_cuda_narrow(a.at, out);
            dtrain_cuda_store(y + column, out);
        }
    }
}

/* Fill in defaults and check the sizes. `positions` is wpe or d_wpe; if it is NULL, sequence is not
 * used. */
static dtrain_result dtrain_cuda_check_tokens(const char *what, dtrain_embedding_args *args,
                                              const float *positions)
{
    if (!args->whole_vocab) args->whole_vocab = args->vocab;
    if (args->whole_vocab >= 1 && (args->sequence >= 1 || !positions)) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "%s: vocab and sequence are at least 1, found vocab %lld, sequence %lld",
                       what, (long long)args->whole_vocab, (long long)args->sequence);
}

template <typename T>
static dtrain_result dtrain_cuda_embedding_of(dtrain_device *device,
                                              const dtrain_embedding_args *args)
{
    constexpr int width = dtrain_cuda_pack<T>::width;
    const dtrain_cuda_state *const state = dtrain_cuda_state_of(device);
    const bool wide = args->n % width == 0 && dtrain_cuda_aligned(args->wte) &&
                      dtrain_cuda_aligned(args->wpe) && dtrain_cuda_aligned(args->y);
    void (*const kernel)(dtrain_embedding_args, dtrain_cuda_fault *) =
        wide ? dtrain_cuda_embedding_kernel<T, width> : dtrain_cuda_embedding_kernel<T, 1>;
    return DTRAIN_CUDA_RUN(device, "embedding", kernel,
                           dtrain_cuda_blocks(state, args->rows * DTRAIN_CUDA_WARP, 256), 256, 0,
                           *args, state->fault);
}

static dtrain_result dtrain_cuda_embedding(dtrain_device *device,
                                           const dtrain_embedding_args *given)
{
    dtrain_embedding_args args = *given;
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("embedding", args.dtype));
    if (args.rows <= 0 || args.n <= 0) return DTRAIN_OK;
    DTRAIN_CUDA_TRY(dtrain_cuda_check_tokens("embedding", &args, args.wpe));
    return DTRAIN_CUDA_BY_DTYPE(args.dtype, dtrain_cuda_embedding_of)(device, &args);
}

/* ---- Embedding backward -------------------------------------------------------------------------
 *
 * d_y (rows,n) is added to row token[row] of d_wte (vocab,n) and to row (row % sequence) of d_wpe,
 * in row order. Rows of one token must therefore be found in order:
 *
 *     1. A key (row of d_wte, row) for each row; a stable radix sort, 8 bits a pass, two passes
 *        for up to 65536 tokens. A pass counts digits in tiles of rows, turns the counts into
 *        positions (one block), and moves the keys; one warp works through a tile in order, which
 *        keeps the sort stable.
 *     2. The keys of a token are now neighbours. A warp at the first key adds the rows to d_wte, in
 *        the order of a loop over rows.
 *
 * Scratch: 16 bytes a row and at most 256 KiB. Bytes moved: one read of d_y, a read and a write of
 * the touched rows of d_wte, and 40 bytes for each row and pass. */

#define DTRAIN_CUDA_DIGITS 256
#define DTRAIN_CUDA_SORT_TILES 256 /* at most */

struct dtrain_cuda_sort {
    int64_t rows, tile; /* rows of a tile: a multiple of 32 */
    int tiles, shift;   /* of the digit within the key */
    dtrain_embedding_args args;
    const uint64_t *from; /* (rows): row of d_wte << 32 | row; NULL in the first pass */
    uint64_t *to;
    unsigned *counts; /* (DTRAIN_CUDA_DIGITS, tiles) */
    dtrain_cuda_fault *fault;
};

static __device__ __forceinline__ uint64_t dtrain_cuda_sort_key(const dtrain_cuda_sort &sort,
                                                                int64_t row)
{
    if (sort.from) return sort.from[row];
    return (uint64_t)dtrain_cuda_token(sort.args, row, sort.fault) << 32 | (uint64_t)row;
}

static __global__ void __launch_bounds__(DTRAIN_CUDA_WARP)
    dtrain_cuda_sort_count_kernel(dtrain_cuda_sort sort)
{
    __shared__ unsigned counts[DTRAIN_CUDA_DIGITS];
    const int lane = threadIdx.x;
    for (int digit = lane; digit < DTRAIN_CUDA_DIGITS; digit += DTRAIN_CUDA_WARP) counts[digit] = 0;
    __syncwarp();
    const int64_t begin = blockIdx.x * sort.tile,
                  end = begin + sort.tile < sort.rows ? begin + sort.tile : sort.rows;
    for (int64_t row = begin + lane; row < end; row += DTRAIN_CUDA_WARP)
        atomicAdd(&counts[dtrain_cuda_sort_key(sort, row) >> sort.shift & (DTRAIN_CUDA_DIGITS - 1)],
                  1u);
    __syncwarp();
    for (int digit = lane; digit < DTRAIN_CUDA_DIGITS; digit += DTRAIN_CUDA_WARP)
        sort.counts[(int64_t)digit * sort.tiles + blockIdx.x] = counts[digit];
}

/* Return the sum of x over earlier threads, and in `total` the sum over all. slots: 32 elements of
 * shared memory. */
static __device__ __forceinline__ unsigned dtrain_cuda_block_scan(unsigned x, unsigned *slots,
                                                                  unsigned *total)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP, warp = threadIdx.x / DTRAIN_CUDA_WARP;
    const int warps = blockDim.x / DTRAIN_CUDA_WARP;
    unsigned sum = x; /* up to and with this lane */
    for (int distance = 1; distance < DTRAIN_CUDA_WARP; distance *= 2) {
        const unsigned below = __shfl_up_sync(DTRAIN_CUDA_ALL_LANES, sum, distance);
        if (lane >= distance) sum += below;
    }
    __syncthreads(); /* the previous call may still be reading the slots */
    if (lane == DTRAIN_CUDA_WARP - 1) slots[warp] = sum;
    __syncthreads();
    const unsigned of_warp = lane < warps ? slots[lane] : 0;
    *total = dtrain_cuda_warp_sum(of_warp);
    return sum - x + dtrain_cuda_warp_sum(lane < warp ? of_warp : 0);
}

/* Replace each count by the sum of all counts before it, in place, by one block. */
static __device__ __forceinline__ void dtrain_cuda_scan_counts(unsigned *counts, int64_t count,
                                                               unsigned *slots)
{
    const int64_t share = (count + blockDim.x - 1) / blockDim.x, begin = share * threadIdx.x;
    const int64_t end = begin + share < count ? begin + share : count;
    unsigned sum = 0, total;
    for (int64_t i = begin; i < end; i++)
        sum += __ldcg(counts + i); /* perhaps written by another block of the same launch */
    sum = dtrain_cuda_block_scan(sum, slots, &total);
    for (int64_t i = begin; i < end; i++) {
        const unsigned own = __ldcg(counts + i);
        counts[i] = sum;
        sum += own;
    }
}

static __global__ void __launch_bounds__(1024)
    dtrain_cuda_scan_kernel(unsigned *counts, int64_t count)
{
    __shared__ unsigned slots[DTRAIN_CUDA_WARP];
    dtrain_cuda_scan_counts(counts, count, slots);
}

/* Give the lanes whose `digit` (8 bits) is this lane's, among those that take part. */
static __device__ __forceinline__ unsigned dtrain_cuda_same_digit(unsigned digit, bool takes_part)
{
    unsigned same = __ballot_sync(DTRAIN_CUDA_ALL_LANES, takes_part);
    for (int bit = 0; bit < 8; bit++) {
        const unsigned set = __ballot_sync(DTRAIN_CUDA_ALL_LANES, digit >> bit & 1);
        same &= digit >> bit & 1 ? set : ~set;
    }
    return same;
}

static __global__ void __launch_bounds__(DTRAIN_CUDA_WARP)
    dtrain_cuda_sort_move_kernel(dtrain_cuda_sort sort)
{
    __shared__ unsigned next[DTRAIN_CUDA_DIGITS]; /* place of the tile's next key of a digit */
    const int lane = threadIdx.x;
    for (int digit = lane; digit < DTRAIN_CUDA_DIGITS; digit += DTRAIN_CUDA_WARP)
        next[digit] = sort.counts[(int64_t)digit * sort.tiles + blockIdx.x];
    __syncwarp();
    const int64_t begin = blockIdx.x * sort.tile,
                  end = begin + sort.tile < sort.rows ? begin + sort.tile : sort.rows;
    for (int64_t first = begin; first < end; first += DTRAIN_CUDA_WARP) {
        const bool exists = first + lane < end;
        const uint64_t key = exists ? dtrain_cuda_sort_key(sort, first + lane) : 0;
        const unsigned digit = key >> sort.shift & (DTRAIN_CUDA_DIGITS - 1);
        const unsigned same = dtrain_cuda_same_digit(digit, exists),
                       before = same & ((1u << lane) - 1);
        if (exists) sort.to[next[digit] + __popc(before)] = key;
        __syncwarp();
        if (exists && before == 0) next[digit] += __popc(same);
        __syncwarp();
    }
}

/* Add the rows of each token to d_wte: a warp for each key and each slice of 32 packs of columns,
 * which works if the key is the first of its token. Rows are loaded DTRAIN_CUDA_ROWS_AHEAD at a
 * time, so that a frequent token is not a chain of memory latencies, and added one by one. */
#define DTRAIN_CUDA_ROWS_AHEAD 8

template <typename T, int WIDTH>
static __global__ void __launch_bounds__(256, 2)
    dtrain_cuda_embedding_backward_kernel(dtrain_embedding_backward_args args, const uint64_t *keys,
                                          int64_t slices)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    const int64_t warp = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / DTRAIN_CUDA_WARP;
    const int64_t head = warp / slices, column = (warp % slices * DTRAIN_CUDA_WARP + lane) * WIDTH;
    if (head >= args.rows) return; /* whole warps return, here and below */
    const uint64_t token = keys[head] >> 32;
    if (token == (uint64_t)args.vocab) return; /* of another part of the table */
    if (head > 0 && keys[head - 1] >> 32 == token) return;

    const bool exists = column < args.n;
    const T *const d_y = (const T *)args.d_y + column;
    float *const out = args.d_wte + (int64_t)token * args.n + column;
    dtrain_cuda_pack<float, WIDTH> sum = {};
    if (exists) sum = dtrain_cuda_load<WIDTH>(out);
    int count = DTRAIN_CUDA_WARP; /* of the 32 keys from `first` on, how many are the token's */
    for (int64_t first = head; count == DTRAIN_CUDA_WARP; first += DTRAIN_CUDA_WARP) {
        const uint64_t key = first + lane < args.rows ? keys[first + lane] : ~(uint64_t)0;
        count = __popc(__ballot_sync(DTRAIN_CUDA_ALL_LANES, key >> 32 == token));
        for (int i = 0; i < count; i += DTRAIN_CUDA_ROWS_AHEAD) {
            dtrain_cuda_pack<T, WIDTH> ahead[DTRAIN_CUDA_ROWS_AHEAD];
            DTRAIN_CUDA_UNROLL
            for (int r = 0; r < DTRAIN_CUDA_ROWS_AHEAD; r++) {
                const int64_t row =
                    (int64_t)__shfl_sync(DTRAIN_CUDA_ALL_LANES, (unsigned)key, i + r);
                if (exists && i + r < count) ahead[r] = dtrain_cuda_load<WIDTH>(d_y + row * args.n);
            }
            DTRAIN_CUDA_UNROLL
            for (int r = 0; r < DTRAIN_CUDA_ROWS_AHEAD; r++) {
                if (!exists || i + r >= count) continue;
                DTRAIN_CUDA_UNROLL
                for (int e = 0; e < WIDTH; e++) sum.at[e] += dtrain_cuda_widen(ahead[r].at[e]);
            }
        }
    }
    if (exists) dtrain_cuda_store(out, sum);
}

/* Add d_y[place] + d_y[place + sequence] + ... to d_wpe[place]: a thread for each place and
 * pack. */
template <typename T, int WIDTH>
static __global__ void __launch_bounds__(256)
    dtrain_cuda_positions_backward_kernel(dtrain_embedding_backward_args args)
{
    const int64_t chunks = args.n / WIDTH,
                  places = args.sequence < args.rows ? args.sequence : args.rows;
    for (int64_t item = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; item < places * chunks;
         item += (int64_t)gridDim.x * blockDim.x) {
        const int64_t place = item / chunks, column = item % chunks * WIDTH;
        const T *const d_y = (const T *)args.d_y + column;
        float *const out = args.d_wpe + (args.first_row + place) % args.sequence * args.n + column;
        dtrain_cuda_pack<float, WIDTH> sum = dtrain_cuda_load<WIDTH>(out);
        for (int64_t first = place; first < args.rows; first += 4 * args.sequence) {
            dtrain_cuda_pack<T, WIDTH> ahead[4];
            DTRAIN_CUDA_UNROLL
            for (int r = 0; r < 4; r++)
                if (first + r * args.sequence < args.rows)
                    ahead[r] = dtrain_cuda_load<WIDTH>(d_y + (first + r * args.sequence) * args.n);
            DTRAIN_CUDA_UNROLL
            for (int r = 0; r < 4; r++) {
                if (first + r * args.sequence >= args.rows) continue;
                DTRAIN_CUDA_UNROLL
                for (int e = 0; e < WIDTH; e++) sum.at[e] += dtrain_cuda_widen(ahead[r].at[e]);
            }
        }
        dtrain_cuda_store(out, sum);
    }
}

/* Sort the rows by their tokens; the keys stay in the device's scratch. */
static dtrain_result dtrain_cuda_sort_rows(dtrain_device *device,
                                           const dtrain_embedding_backward_args *args,
                                           const uint64_t **keys)
{
    const int64_t rows = args->rows, least = 512;
    dtrain_cuda_sort sort = {};
    sort.rows = rows;
    sort.tile = (rows + DTRAIN_CUDA_SORT_TILES - 1) / DTRAIN_CUDA_SORT_TILES;
    sort.tile = sort.tile < least
                    ? least
                    : (sort.tile + DTRAIN_CUDA_WARP - 1) / DTRAIN_CUDA_WARP * DTRAIN_CUDA_WARP;
    sort.tiles = (int)((rows + sort.tile - 1) / sort.tile);
    sort.args = *args;
    sort.fault = dtrain_cuda_state_of(device)->fault;

    const int64_t count = (int64_t)DTRAIN_CUDA_DIGITS * sort.tiles;
    const int64_t largest = args->vocab < args->whole_vocab ? args->vocab : args->vocab - 1;
    void *scratch;
    DTRAIN_CUDA_TRY(dtrain_cuda_scratch(
        device, (size_t)rows * 16 + (size_t)count * sizeof(unsigned), &scratch));
    uint64_t *halves[2] = {(uint64_t *)scratch, (uint64_t *)scratch + rows};
    sort.counts = (unsigned *)((uint64_t *)scratch + 2 * rows);
    int pass = 0;
    do { /* once at least: the first pass makes the keys */
        sort.shift = 32 + 8 * pass;
        sort.to = halves[pass % 2];
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "embedding_backward, count",
                                        dtrain_cuda_sort_count_kernel, sort.tiles, DTRAIN_CUDA_WARP,
                                        0, sort));
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "embedding_backward, scan", dtrain_cuda_scan_kernel,
                                        1, 1024, 0, sort.counts, count));
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "embedding_backward, move",
                                        dtrain_cuda_sort_move_kernel, sort.tiles, DTRAIN_CUDA_WARP,
                                        0, sort));
        sort.from = sort.to;
        pass++;
    } while (pass < 4 && largest >> (8 * pass) > 0);
    *keys = sort.from;
    return DTRAIN_OK;
}

template <typename T>
static dtrain_result dtrain_cuda_embedding_backward_of(dtrain_device *device,
                                                       const dtrain_embedding_backward_args *args)
{
    constexpr int width = dtrain_cuda_pack<T>::width;
    const bool wide = args->n % width == 0 && dtrain_cuda_aligned(args->d_y) &&
                      dtrain_cuda_aligned(args->d_wte) && dtrain_cuda_aligned(args->d_wpe);
    const int64_t chunks = wide ? args->n / width : args->n,
                  slices = (chunks + DTRAIN_CUDA_WARP - 1) / DTRAIN_CUDA_WARP;
    if (args->d_wte) {
        void (*const kernel)(dtrain_embedding_backward_args, const uint64_t *, int64_t) =
            wide ? dtrain_cuda_embedding_backward_kernel<T, width>
                 : dtrain_cuda_embedding_backward_kernel<T, 1>;
        const uint64_t *keys;
        DTRAIN_CUDA_TRY(dtrain_cuda_sort_rows(device, args, &keys));
        DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "embedding_backward", kernel,
                                        (args->rows * slices + 7) / 8, 256, 0, *args, keys,
                                        slices));
    }
    if (!args->d_wpe) return DTRAIN_OK;
    const int64_t places = args->sequence < args->rows ? args->sequence : args->rows;
    void (*const kernel)(dtrain_embedding_backward_args) =
        wide ? dtrain_cuda_positions_backward_kernel<T, width>
             : dtrain_cuda_positions_backward_kernel<T, 1>;
    return DTRAIN_CUDA_RUN(device, "embedding_backward, positions", kernel,
                           dtrain_cuda_blocks(dtrain_cuda_state_of(device), places * chunks, 256),
                           256, 0, *args);
}

static dtrain_result dtrain_cuda_embedding_backward(dtrain_device *device,
                                                    const dtrain_embedding_backward_args *given)
{
    dtrain_embedding_backward_args args = *given;
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("embedding_backward", args.dtype));
    if (args.rows <= 0 || args.n <= 0) return DTRAIN_OK;
    DTRAIN_CUDA_TRY(dtrain_cuda_check_tokens("embedding_backward", &args, args.d_wpe));
    if (args.rows > INT32_MAX || args.vocab > (int64_t)INT32_MAX + 1)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "embedding_backward: rows and token ids are below 2^31, found %lld rows "
                           "and a vocabulary of %lld: use "
                           "smaller micro-batches",
                           (long long)args.rows, (long long)args.vocab);
    return DTRAIN_CUDA_BY_DTYPE(args.dtype, dtrain_cuda_embedding_backward_of)(device, &args);
}

/* ---- Cross-entropy ------------------------------------------------------------------------------
 *
 * logits, d_logits (rows,n); targets, loss, lse (rows). One block a row, two to a multiprocessor
 * for large n. Bytes: one read of logits, and one write of d_logits if wanted: the row is read
 * again at once, last elements first, from the caches.
 *
 * The maximum and the sum of exponentials come from one pass (online softmax): a new maximum scales
 * the earlier sum down. n need not be a multiple of a pack, so a row can begin at any element:
 *
 *     | head, < 1 pack | packs, 16-byte aligned ... | tail, < 1 pack |
 *
 * If logits and d_logits have different alignments, everything is head. Padding after the classes
 * that count is written as 0 and never read. */

struct dtrain_cuda_span {
    int64_t head, packs, tail; /* elements of the head, number of packs, where the tail begins */
};

template <typename T>
static __device__ dtrain_cuda_span dtrain_cuda_span_of(const T *row, const T *other, int64_t n)
{
    const uintptr_t address = (uintptr_t)row;
    dtrain_cuda_span span;
    span.head = (int64_t)((16 - address % 16) % 16 / sizeof(T));
    if (span.head > n || (address ^ (uintptr_t)other) % 16 != 0) span.head = n;
    span.packs = (n - span.head) / dtrain_cuda_pack<T>::width;
    span.tail = span.head + span.packs * dtrain_cuda_pack<T>::width;
    return span;
}

/* A running softmax: sum = sum of exp(x - anchor), where anchor = top unless that is -infinity:
 * then only masked logits have been seen, which add exp(-infinity - 0) = 0. A NaN is never the
 * maximum, but it is in the sum. */
struct dtrain_cuda_softmax {
    float top, sum;
};

static __device__ __forceinline__ float dtrain_cuda_softmax_anchor(float top)
{
    return top > -INFINITY ? top : 0;
}

/* Return the rounding error of lse = top + log_sum (Knuth's two-sum, exact); 0 if it is negligible
 * or NaN. */
static __device__ __forceinline__ float dtrain_cuda_lse_rest(float top, float log_sum, float lse)
{
    const float added = lse - top, rest = (top - (lse - added)) + (log_sum - added);
    return fabsf(rest) > 4e-6f ? rest : 0;
}

template <int WIDTH, typename T>
static __device__ __forceinline__ void dtrain_cuda_softmax_add(dtrain_cuda_softmax &softmax,
                                                               const T *from)
{
    const dtrain_cuda_pack<T, WIDTH> x = dtrain_cuda_load<WIDTH>(from);
    float top = softmax.top;
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < WIDTH; e++) top = fmaxf(top, dtrain_cuda_widen(x.at[e]));
    const float anchor = dtrain_cuda_softmax_anchor(top);
    softmax.sum *= __expf(softmax.top - anchor);
    softmax.top = top;
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < WIDTH; e++) softmax.sum += __expf(dtrain_cuda_widen(x.at[e]) - anchor);
}

/* Compute the softmax of a row, in every thread. */
template <typename T>
static __device__ __forceinline__ dtrain_cuda_softmax
dtrain_cuda_row_softmax(const T *row, const dtrain_cuda_span &span, int64_t n, float *slots)
{
    constexpr int width = dtrain_cuda_pack<T>::width;
    dtrain_cuda_softmax softmax = {-INFINITY, 0};
    for (int64_t j = threadIdx.x; j < span.head; j += blockDim.x)
        dtrain_cuda_softmax_add<1>(softmax, row + j);
    for (int64_t p = threadIdx.x; p < span.packs; p += blockDim.x)
        dtrain_cuda_softmax_add<width>(softmax, row + span.head + p * width);
    for (int64_t j = span.tail + threadIdx.x; j < n; j += blockDim.x)
        dtrain_cuda_softmax_add<1>(softmax, row + j);

    const float top = dtrain_cuda_block_max(softmax.top, slots);
    const float factor = __expf(softmax.top - dtrain_cuda_softmax_anchor(top));
    return {top, dtrain_cuda_block_sum(softmax.sum * factor, slots)};
}

/* Compute the sum of a row, in every thread; the row comes from the caches, where row_softmax has
 * left it. */
template <typename T>
static __device__ __forceinline__ float dtrain_cuda_row_sum(const T *row, int64_t n, float *slots)
{
    float sum = 0;
    DTRAIN_CUDA_ROLLED
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) sum += dtrain_cuda_widen(row[j]);
    return dtrain_cuda_block_sum(sum, slots);
}

/* The numbers for a row's gradient; target -1 gives zeros, target n belongs to another rank. */
struct dtrain_cuda_row_gradient {
    int64_t target;
    float lse, rest, scale;
    float one_hot, uniform; /* label smoothing: 1 - smoothing, smoothing / classes */
};

template <int WIDTH, typename T>
static __device__ __forceinline__ void
dtrain_cuda_gradient_put(const dtrain_cuda_row_gradient &gradient, const T *from, T *to,
                         int64_t column)
{
    dtrain_cuda_pack<T, WIDTH> x = dtrain_cuda_load<WIDTH>(from + column);
    const int64_t hit =
        gradient.target -
        column; /* the element of this chunk that is the target, if 0 .. WIDTH - 1 */
    float d[WIDTH];
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < WIDTH; e++) {
        const float p = __expf(dtrain_cuda_widen(x.at[e]) - gradient.lse - gradient.rest);
        const float wanted = hit == e ? gradient.one_hot : 0;
        d[e] = gradient.target < 0 ? 0 : (p - wanted - gradient.uniform) * gradient.scale;
    }
    dtrain_cuda_narrow(d, x);
    dtrain_cuda_store(to + column, x);
}

/* Store the gradient of a row of n columns, of which `classes` count. One thread reads and writes
 * each element: `to` can be `from`. */
template <typename T>
static __device__ __forceinline__ void
dtrain_cuda_row_gradient_put(const dtrain_cuda_row_gradient &gradient, const T *from, T *to,
                             const dtrain_cuda_span &span, int64_t classes, int64_t n)
{
    constexpr int width = dtrain_cuda_pack<T>::width;
    DTRAIN_CUDA_ROLLED
    for (int64_t j = classes + threadIdx.x; j < n; j += blockDim.x) dtrain_cuda_narrow(0, to[j]);
    DTRAIN_CUDA_ROLLED
    for (int64_t j = span.tail + threadIdx.x; j < classes; j += blockDim.x)
        dtrain_cuda_gradient_put<1>(gradient, from, to, j);
    DTRAIN_CUDA_ROLLED
    for (int64_t p = span.packs - 1 - threadIdx.x; p >= 0; p -= blockDim.x)
        dtrain_cuda_gradient_put<width>(gradient, from, to, span.head + p * width);
    DTRAIN_CUDA_ROLLED
    for (int64_t j = threadIdx.x; j < span.head; j += blockDim.x)
        dtrain_cuda_gradient_put<1>(gradient, from, to, j);
}

/* Return the column of a row's target: -1 for an ignored row, n if another rank has the column; a
 * bad target is reported and ignored. */
static __device__ int64_t dtrain_cuda_target(const dtrain_cross_entropy_args &args, int64_t row,
                                             dtrain_cuda_fault *fault)
{
    const int64_t target = args.targets[row], column = target - args.first_class;
    if (target >= 0 && target < args.whole_classes)
        return column >= 0 && column < args.classes ? column : args.n;
    if (target != -1 && threadIdx.x == 0)
        dtrain_cuda_set_fault(fault, DTRAIN_CUDA_BAD_TARGET, target, row, args.whole_classes);
    return -1;
}

template <typename T>
static __global__ void __launch_bounds__(1024)
    dtrain_cuda_cross_entropy_kernel(dtrain_cross_entropy_args args, dtrain_cuda_fault *fault)
{
    __shared__ float slots[DTRAIN_CUDA_WARP];
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const T *const logits = (const T *)args.logits + row * args.n;
        T *const d_logits = args.d_logits ? (T *)args.d_logits + row * args.n : NULL;
        const dtrain_cuda_span span =
            dtrain_cuda_span_of<T>(logits, d_logits ? d_logits : logits, args.classes);
        dtrain_cuda_row_gradient gradient = {
            dtrain_cuda_target(args, row, fault),      0, 0, args.scale, 1 - args.smoothing,
            args.smoothing / (float)args.whole_classes};
        dtrain_cuda_softmax softmax = {-INFINITY, 0};
        float of_target = 0, sum = 0;
        if (gradient.target >= 0) { /* the same for the whole block */
            /* read before the barriers in row_softmax, after which d_logits can overwrite it */
            if (gradient.target < args.n) of_target = dtrain_cuda_widen(logits[gradient.target]);
            softmax = dtrain_cuda_row_softmax(logits, span, args.classes, slots);
            if (args.smoothing > 0) sum = dtrain_cuda_row_sum(logits, args.classes, slots);
            const float anchor = dtrain_cuda_softmax_anchor(softmax.top);
            gradient.lse = anchor + logf(softmax.sum);
            gradient.rest = dtrain_cuda_lse_rest(anchor, logf(softmax.sum), gradient.lse);
        }
        if (threadIdx.x == 0 && args.parts) {
            float *const part = args.parts + row;
            part[0] = softmax.top;
            part[args.rows] = softmax.sum;
            part[2 * args.rows] = of_target;
            if (args.smoothing > 0) part[3 * args.rows] = sum;
        } else if (threadIdx.x == 0) {
            float wanted = (1 - args.smoothing) * of_target;
            if (args.smoothing > 0) wanted += args.smoothing * (sum / (float)args.classes);
            args.loss[row] = gradient.lse - wanted + gradient.rest, args.lse[row] = gradient.lse;
            if (args.lse_rest) args.lse_rest[row] = gradient.rest;
        }
        if (d_logits)
            dtrain_cuda_row_gradient_put(gradient, logits, d_logits, span, args.classes, args.n);
    }
}

template <typename T>
static __global__ void __launch_bounds__(1024)
    dtrain_cuda_cross_entropy_backward_kernel(dtrain_cross_entropy_backward_args args,
                                              dtrain_cuda_fault *fault)
{
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const T *const logits = (const T *)args.logits + row * args.n;
        T *const d_logits = (T *)args.d_logits + row * args.n;
        const dtrain_cuda_row_gradient gradient = {dtrain_cuda_target(args, row, fault),
                                                   args.lse[row],
                                                   args.lse_rest ? args.lse_rest[row] : 0,
                                                   args.upstream ? args.scale * args.upstream[0]
                                                                 : args.scale,
                                                   1 - args.smoothing,
                                                   args.smoothing / (float)args.whole_classes};
        dtrain_cuda_row_gradient_put(gradient, logits, d_logits,
                                     dtrain_cuda_span_of<T>(logits, d_logits, args.classes),
                                     args.classes, args.n);
    }
}

/* parts (3 or 4,rows), whole_max, loss, lse (rows): a thread a row, in double, because maximum and
 * target can be large and close. */
static __global__ void __launch_bounds__(256)
    dtrain_cuda_cross_entropy_finish_kernel(dtrain_cross_entropy_finish_args args)
{
    const double smoothing = (double)args.smoothing;
    for (int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; row < args.rows;
         row += (int64_t)gridDim.x * blockDim.x) {
        float *const part = args.parts + row, *const sum = part + args.rows;
        const float top = args.whole_max[row];
        if (!args.loss) {
            if (part[0] < top) *sum *= expf(part[0] - top); /* -infinity twice would be NaN */
            continue;
        }
        const bool ignored = args.targets[row] < 0 || args.targets[row] >= args.whole_classes;
        const double lse = ignored ? 0 : (double)top + log((double)*sum);
        double wanted = (1 - smoothing) * (double)part[2 * args.rows];
        if (smoothing > 0)
            wanted += smoothing * ((double)part[3 * args.rows] / (double)args.whole_classes);
        args.lse[row] = (float)lse;
        const double rest = log((double)*sum) - ((double)(float)lse - (double)top);
        if (args.lse_rest) args.lse_rest[row] = !ignored && fabs(rest) > 4e-6 ? (float)rest : 0;
        args.loss[row] = ignored ? 0 : (float)(lse - wanted);
    }
}

/* Replace the values 0 and -1. */
static void dtrain_cuda_count_classes(dtrain_cross_entropy_args *args)
{
    args->classes = args->classes < 0 ? 0 : args->classes ? args->classes : args->n;
    if (!args->whole_classes) args->whole_classes = args->classes;
}

/* Choose the threads of a row: at least a pack or two for each thread. */
static int dtrain_cuda_row_threads(int64_t n)
{
    int threads = DTRAIN_CUDA_WARP;
    while (threads < 1024 && threads * 16 < n) threads *= 2;
    return threads;
}

template <typename T>
static dtrain_result dtrain_cuda_cross_entropy_of(dtrain_device *device,
                                                  const dtrain_cross_entropy_args *args)
{
    return DTRAIN_CUDA_RUN(device, "cross_entropy", dtrain_cuda_cross_entropy_kernel<T>,
                           args->rows < INT32_MAX ? args->rows : INT32_MAX,
                           dtrain_cuda_row_threads(args->n), 0, *args,
                           dtrain_cuda_state_of(device)->fault);
}

static dtrain_result dtrain_cuda_cross_entropy(dtrain_device *device,
                                               const dtrain_cross_entropy_args *given)
{
    dtrain_cross_entropy_args args = *given;
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("cross_entropy", args.dtype));
    if (args.parts && args.d_logits)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "cross_entropy: d_logits needs the lse of whole rows, which parts do "
                           "not give; call cross_entropy_backward after cross_entropy_finish");
    if (args.rows <= 0 || (args.n <= 0 && !args.parts)) return DTRAIN_OK;
    dtrain_cuda_count_classes(&args);
    return DTRAIN_CUDA_BY_DTYPE(args.dtype, dtrain_cuda_cross_entropy_of)(device, &args);
}

template <typename T>
static dtrain_result
dtrain_cuda_cross_entropy_backward_of(dtrain_device *device,
                                      const dtrain_cross_entropy_backward_args *args)
{
    return DTRAIN_CUDA_RUN(
        device, "cross_entropy_backward", dtrain_cuda_cross_entropy_backward_kernel<T>,
        args->rows < INT32_MAX ? args->rows : INT32_MAX, dtrain_cuda_row_threads(args->n), 0, *args,
        dtrain_cuda_state_of(device)->fault);
}

static dtrain_result
dtrain_cuda_cross_entropy_backward(dtrain_device *device,
                                   const dtrain_cross_entropy_backward_args *given)
{
    dtrain_cross_entropy_backward_args args = *given;
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("cross_entropy_backward", args.dtype));
    if (args.rows <= 0 || args.n <= 0) return DTRAIN_OK;
    dtrain_cuda_count_classes(&args);
    return DTRAIN_CUDA_BY_DTYPE(args.dtype, dtrain_cuda_cross_entropy_backward_of)(device, &args);
}

static dtrain_result dtrain_cuda_cross_entropy_finish(dtrain_device *device,
                                                      const dtrain_cross_entropy_finish_args *given)
{
    dtrain_cross_entropy_finish_args args = *given;
    if (args.rows <= 0) return DTRAIN_OK;
    dtrain_cuda_count_classes(&args);
    return DTRAIN_CUDA_RUN(device, "cross_entropy_finish", dtrain_cuda_cross_entropy_finish_kernel,
                           dtrain_cuda_blocks(dtrain_cuda_state_of(device), args.rows, 256), 256, 0,
                           args);
}

/* ==== src/device/cuda/rows.cuh ================================================================ */

/* Rows of activations: softmax, rotary embedding, permuted axes
 *
 * Each kernel reads its input and writes its output once; a softmax reads its row again from the
 * caches. Types are run-time branches, see pointwise.cuh. */

#include <math.h>

/* ---- Softmax: x (rows,n) -> y (rows,n); one block a row ---------------------------------------*/

static __global__ void __launch_bounds__(1024)
    dtrain_cuda_softmax_kernel(const dtrain_softmax_args args)
{
    __shared__ float slots[DTRAIN_CUDA_WARP];
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const int64_t begin = row * args.n, end = begin + args.n;
        float top = -INFINITY, sum = 0;
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
            top = fmaxf(top, dtrain_cuda_get_any(args.x, args.dtype, i));
        top = dtrain_cuda_block_max(top, slots);
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
            sum += expf(dtrain_cuda_get_any(args.x, args.dtype, i) - top);
        sum = dtrain_cuda_block_sum(sum, slots);
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
            dtrain_cuda_put_any(args.y, args.dtype, i,
                                expf(dtrain_cuda_get_any(args.x, args.dtype, i) - top) / sum);
    }
}

/* Compute d_x = y (d_y - sum of d_y y). */
static __global__ void __launch_bounds__(1024)
    dtrain_cuda_softmax_backward_kernel(const dtrain_softmax_backward_args args)
{
    __shared__ float slots[DTRAIN_CUDA_WARP];
    for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
        const int64_t begin = row * args.n, end = begin + args.n;
        float dot = 0;
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x)
            dot += dtrain_cuda_get_any(args.y, args.dtype, i) *
                   dtrain_cuda_get_any(args.d_y, args.dtype, i);
        dot = dtrain_cuda_block_sum(dot, slots);
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
            float d = dtrain_cuda_get_any(args.y, args.dtype, i) *
                      (dtrain_cuda_get_any(args.d_y, args.dtype, i) - dot);
            if (args.accumulate) d += dtrain_cuda_get_any(args.d_x, args.dtype, i);
            dtrain_cuda_put_any(args.d_x, args.dtype, i, d);
        }
    }
}

static dtrain_result dtrain_cuda_softmax(dtrain_device *device, const dtrain_softmax_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("softmax", args->dtype));
    if (args->rows <= 0 || args->n <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_RUN(device, "softmax", dtrain_cuda_softmax_kernel,
                           args->rows < INT32_MAX ? args->rows : INT32_MAX,
                           dtrain_cuda_row_threads(args->n), 0, *args);
}

static dtrain_result dtrain_cuda_softmax_backward(dtrain_device *device,
                                                  const dtrain_softmax_backward_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("softmax_backward", args->dtype));
    if (args->rows <= 0 || args->n <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_RUN(device, "softmax_backward", dtrain_cuda_softmax_backward_kernel,
                           args->rows < INT32_MAX ? args->rows : INT32_MAX,
                           dtrain_cuda_row_threads(args->n), 0, *args);
}

/* ---- Rotary embedding: x (rows, heads*d) -> y -----------------------------------------------
 *
 * Item i of a row is pair i of every head, so sine and cosine are computed once for all heads, in
 * double: at position 10000 an angle in fp32 is off by 1e-3. */

struct dtrain_cuda_rotary_op {
    static constexpr int width = 1;
    dtrain_rotary_args args;
    double ratio; /* of the angles of neighbouring pairs */
    dtrain_cuda_operand x, y;

    template <int W> struct group {
        char none;
    };
    template <int W> __device__ void load(int64_t, group<W> &) const {}

    /* Return cosine and sine of an item's angle. Inlined, the calls in it would spill registers. */
    __device__ __noinline__ float2 turn_of(int64_t item) const
    {
        const int64_t half = args.d / 2;
        double sine, cosine;
        sincos((double)(item / half % args.sequence) * pow(ratio, (double)(item % half)), &sine,
               &cosine);
        return make_float2((float)cosine, (float)sine);
    }

    /* Store y = value, or add it. */
    __device__ __forceinline__ void put(int64_t at, float value) const
    {
        float old[1] = {0};
        if (args.accumulate) y.load(at, old);
        old[0] += value;
        y.store(at, old);
    }
    template <int W> __device__ void store(int64_t item, const group<W> &) const
    {
        const float2 turn = turn_of(item);
        const int64_t half = args.d / 2, row = item / half, i = item % half;
        const float c = turn.x, s = args.inverse ? -turn.y : turn.y;
        for (int64_t head = 0; head < args.heads; head++) {
            const int64_t low = (row * args.heads + head) * args.d + i, high = low + half;
            const bool turned = head < args.rotated;
            float x1[1], x2[1];
            x.load(low, x1);
            x.load(high, x2);
            put(low, turned ? x1[0] * c - x2[0] * s : x1[0]);
            put(high, turned ? x2[0] * c + x1[0] * s : x2[0]);
        }
    }
};

static dtrain_result dtrain_cuda_rotary(dtrain_device *device, const dtrain_rotary_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("rotary", args->dtype));
    if (args->d < 2 || args->d % 2 || args->rotated > args->heads || args->sequence < 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "rotary: heads of %lld elements, %lld of %lld turned, sequences of "
                           "%lld: expected an even size, no more heads than there are, and 1 row "
                           "or more",
                           (long long)args->d, (long long)args->rotated, (long long)args->heads,
                           (long long)args->sequence);
    const dtrain_cuda_rotary_op op = {*args, pow((double)args->theta, -2.0 / (double)args->d),
                                      dtrain_cuda_operand_of(args->x, args->dtype),
                                      dtrain_cuda_operand_of(args->y, args->dtype)};
    return dtrain_cuda_each(device, "rotary", op, args->rows * (args->d / 2), false);
}

/* ---- Permuted axes ----------------------------------------------------------------------------*/

struct dtrain_cuda_permute_op {
    static constexpr int width = 1;
    dtrain_permute_args args;
    dtrain_cuda_operand x, y;

    template <int W> struct group {
        float x[W], y[W];
    };
    template <int W> __device__ void load(int64_t at, group<W> &g) const
    {
        int64_t from = 0, rest = at;
        for (int axis = 3; axis >= 0; axis--) {
            from += rest % args.shape[axis] * args.step[axis];
            rest /= args.shape[axis];
        }
        x.load(from, g.x);
        if (args.accumulate) y.load(at, g.y);
    }
    template <int W> __device__ void store(int64_t at, const group<W> &g) const
    {
        float sum[W];
        for (int j = 0; j < W; j++) sum[j] = args.accumulate ? g.y[j] + g.x[j] : g.x[j];
        y.store(at, sum);
    }
};

static dtrain_result dtrain_cuda_permute(dtrain_device *device, const dtrain_permute_args *args)
{
    const int64_t *shape = args->shape;
    const dtrain_cuda_permute_op op = {*args, dtrain_cuda_operand_of(args->x, args->dtype),
                                       dtrain_cuda_operand_of(args->y, args->dtype)};
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("permute", args->dtype));
    return dtrain_cuda_each(device, "permute", op, shape[0] * shape[1] * shape[2] * shape[3],
                            false);
}

/* ==== src/device/cuda/attention_gemm.cuh ====================================================== */

/* Attention by batched GEMM and softmax
 *
 * The fallback for attention that flash.cuh refuses: a mask, fp32 arithmetic, other head sizes,
 * unaligned memory. It is also the oracle of flash.cuh. With T queries, U keys and d = head size,
 * for `together` heads of one batch element at a time:
 *
 *     forward    S = scale Q K' + mask    P = softmax(S)                        Y = P V
 *     backward   S = scale Q K' + mask    P = e^(S - lse)    G = dY V'
 *                D = rows of dY . Y                          dS = P (G - D)
 *                dV = P' dY        dQ = scale dS K           dK = scale dS' Q
 *
 * The products read q, k, v of a head in place and write dq, dk, dv in the same layout: rows a
 * stride apart, heads d apart. Nothing is permuted. Heads of queries that share a head of keys are
 * one pass: the products read the same K and V for each head, and their parts of dK and dV, fp32 in
 * scratch, are added in order.
 *
 * Scratch holds S, and G in backward: (together,T,ld) fp32, with ld = U rounded up to 8, within 32
 * MiB unless a single head needs more; the L2 cache of a large GPU holds 32 MiB too. Scores are
 * fp32 for any dtype, because their absolute error is the relative error of P. P and dS have the
 * dtype of q, which the next product needs, and take the place of S and G: row i of a half P
 * fills the first half of the fp32 row i, so its ld is 2 ld. The mask is added by the softmax.
 *
 * Scores of later keys (causal) or padding (key_lengths) are neither read nor kept: their P and dS
 * are 0. But 0 times a NaN of V is NaN, so in this file a NaN reaches all rows of its head, not
 * only the later ones. */

#include <cublasLt.h>

#include <float.h>
#include <math.h>
#include <string.h>

enum {
    DTRAIN_CUDA_SCORE_BYTES = 32 << 20,
    DTRAIN_CUDA_SOFTMAX_WARPS = 8,
    DTRAIN_CUDA_SOFTMAX_STEP = 4 * DTRAIN_CUDA_WARP /* columns that a warp takes at once */
};

/* The heads [first, first + count) of batch element `batch`. */
struct dtrain_cuda_heads {
    int64_t batch, first, count;
    int64_t n, sharing; /* columns of y; heads of queries that share a head of keys */
    float scale;
};

/* One matrix for each head: its rows are ld elements apart, the heads `step` elements. */
struct dtrain_cuda_head_matrix {
    void *data;
    int64_t ld, step;
};

/* Describe the matrices (rows,d) of heads from `first` on, in (batch*rows, ld). */
static dtrain_cuda_head_matrix dtrain_cuda_head_columns(const dtrain_attention_args *args,
                                                        const void *data, int64_t ld,
                                                        int64_t first_row, int64_t first_head)
{
    const int64_t offset = first_row * ld + first_head * args->d;
    char *at = (char *)(uintptr_t)data; /* NULL: a gradient that nobody wants */
    if (at) at += offset * (int64_t)dtrain_dtype_bytes(args->dtype);
    const dtrain_cuda_head_matrix matrix = {at, ld, args->d};
    return matrix;
}

/* Describe the part of q, or of a matrix with q's layout. */
static dtrain_cuda_head_matrix dtrain_cuda_head_queries(const dtrain_attention_args *args,
                                                        const dtrain_cuda_heads *x,
                                                        const void *data, int64_t ld)
{
    return dtrain_cuda_head_columns(args, data, ld, x->batch * args->queries, x->first);
}

/* Describe the part of k or v that the heads read: a matrix for each head or, if heads share it,
 * one for this pass. */
static dtrain_cuda_head_matrix dtrain_cuda_head_keys(const dtrain_attention_args *args,
                                                     const dtrain_cuda_heads *x, const void *data,
                                                     int64_t ld)
{
    dtrain_cuda_head_matrix matrix =
        dtrain_cuda_head_columns(args, data, ld, x->batch * args->keys, x->first / x->sharing);
    if (x->sharing > 1) matrix.step = 0;
    return matrix;
}

/* Describe scores (T,U) as the products write them (fp32), or P and dS as the kernels leave them
 * (dtype). */
static dtrain_cuda_head_matrix dtrain_cuda_head_scores(const dtrain_attention_args *args,
                                                       float *scores, int64_t ld,
                                                       dtrain_dtype dtype)
{
    const int64_t per_float = (int64_t)(sizeof(float) / dtrain_dtype_bytes(dtype));
    const dtrain_cuda_head_matrix matrix = {scores, ld * per_float, args->queries * ld * per_float};
    return matrix;
}

/* Multiply: C (m,n) = alpha op(A) (m,k) op(B) (k,n), for each head. */
static dtrain_result dtrain_cuda_head_multiply(dtrain_device *device, const dtrain_cuda_heads *x,
                                               uint32_t flags, float alpha,
                                               dtrain_cuda_head_matrix a, dtrain_cuda_head_matrix b,
                                               dtrain_cuda_head_matrix c, int64_t m, int64_t n,
                                               int64_t k, dtrain_dtype type, dtrain_dtype c_type)
{
    dtrain_cuda_product product;
    memset(&product, 0, sizeof product);
    product.flags = flags;
    product.m = m, product.n = n, product.k = k, product.batch = x->count;
    product.alpha = alpha;
    product.a = a.data, product.lda = a.ld, product.a_step = a.step;
    product.b = b.data, product.ldb = b.ld, product.b_step = b.step;
    product.c = c.data, product.ldc = c.ld, product.c_step = c.step;
    product.type = type, product.c_type = c_type;
    product.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    return dtrain_cuda_gemm_batched(device, &product);
}

/* ---- What a query sees ------------------------------------------------------------------------*/

/* Give the keys of a batch element that count; a bad length has been reported. */
static __device__ __forceinline__ int64_t dtrain_cuda_key_count(const dtrain_attention_args &args,
                                                                int64_t batch)
{
    if (!args.key_lengths) return args.keys;
    const int64_t length = args.key_lengths[batch];
    return length < 0 ? 0 : length > args.keys ? args.keys : length;
}

static __global__ void dtrain_cuda_key_lengths_kernel(dtrain_attention_args args,
                                                      dtrain_cuda_fault *fault)
{
    const int64_t batch = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (batch >= args.batch ||
        (args.key_lengths[batch] >= 0 && args.key_lengths[batch] <= args.keys))
        return;
    dtrain_cuda_set_fault(fault, DTRAIN_CUDA_BAD_KEY_LENGTH, args.key_lengths[batch], batch,
                          args.keys);
}

/* Report a key length outside [0, keys], of a forward pass. */
static dtrain_result dtrain_cuda_check_key_lengths(dtrain_device *device,
                                                   const dtrain_attention_args *args)
{
    if (!args->key_lengths || args->batch < 1) return DTRAIN_OK;
    return DTRAIN_CUDA_RUN(device, "attention (key lengths)", dtrain_cuda_key_lengths_kernel,
                           (args->batch + 255) / 256, 256, 0, *args,
                           dtrain_cuda_state_of(device)->fault);
}

/* ---- Softmax: S (rows,U) -> P (rows,U) in place, lse (rows) -------------------------------------
 *
 * rows = heads * T; row r is query r % T. A warp walks over its row three times: maximum, sum, P.
 * The first walk reads 4 bytes a score from memory (2 with a causal mask), the others find them in
 * cache; the third writes the U elements of P. A mask is read as often as the scores.
 *
 * P can be narrower than S and still replace it: a walk takes 128 scores at a time, all lanes read
 * their scores before one writes, and writes never pass reads.
 *
 * The maximum begins at the smallest number, not at -infinity: a row hidden by the mask then has
 * the sum 0, P 0 and lse +infinity. */

struct dtrain_cuda_head_softmax {
    dtrain_cuda_heads heads;
    int64_t ld;
    float *scores, *grads; /* grads: of the backward pass */
};

/* A row of scores, and the mask that is added to it. */
struct dtrain_cuda_score_row {
    float *scores;
    const float *mask; /* or NULL */
    int64_t limit;     /* keys seen */
};

static __device__ __forceinline__ dtrain_cuda_score_row dtrain_cuda_score_row_of(
    const dtrain_attention_args &args, const dtrain_cuda_head_softmax &x, int64_t r)
{
    const int64_t query = r % args.queries, head = x.heads.first + r / args.queries;
    const int64_t keys = dtrain_cuda_key_count(args, x.heads.batch);
    dtrain_cuda_score_row row;
    row.scores = x.scores + r * x.ld;
    row.mask = args.mask ? args.mask + x.heads.batch * args.mask_batch_step +
                               head * args.mask_head_step + query * args.keys
                         : NULL;
    row.limit = args.causal && query + 1 < keys ? query + 1 : keys;
    return row;
}

/* Load 4 scores from j < limit on, minus `from`; scores from limit on are undefined. The rounding
 * error of the sum with a mask that does not hide is added to the difference. */
static __device__ __forceinline__ dtrain_cuda_pack<float>
dtrain_cuda_score_row_load(const dtrain_cuda_score_row &row, int64_t j, float from)
{
    dtrain_cuda_pack<float> x = dtrain_cuda_load<4>(row.scores + j);
    DTRAIN_CUDA_UNROLL
    for (int i = 0; i < 4; i++) {
        const float mask = row.mask && j + i < row.limit ? row.mask[j + i] : 0;
        const float sum = x.at[i] + mask, lost = x.at[i] - (sum - mask);
        x.at[i] = sum - from + (fabsf(mask) > DTRAIN_MASK_HIDES ? 0 : lost);
    }
    return x;
}

static __device__ __forceinline__ float dtrain_cuda_score_row_max(const dtrain_cuda_score_row &row,
                                                                  int lane)
{
    float most = -FLT_MAX;
    for (int64_t j = lane * 4; j < row.limit; j += DTRAIN_CUDA_SOFTMAX_STEP) {
        const dtrain_cuda_pack<float> x = dtrain_cuda_score_row_load(row, j, 0);
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < 4; i++)
            if (j + i < row.limit) most = fmaxf(most, x.at[i]);
    }
    return dtrain_cuda_warp_max(most);
}

static __device__ __forceinline__ float dtrain_cuda_score_row_sum(const dtrain_cuda_score_row &row,
                                                                  int lane, float most)
{
    float sum = 0;
    for (int64_t j = lane * 4; j < row.limit; j += DTRAIN_CUDA_SOFTMAX_STEP) {
        const dtrain_cuda_pack<float> x = dtrain_cuda_score_row_load(row, j, most);
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < 4; i++)
            if (j + i < row.limit) sum += expf(x.at[i]);
    }
    return dtrain_cuda_warp_sum(sum);
}

template <typename T>
static __global__ void __launch_bounds__(DTRAIN_CUDA_SOFTMAX_WARPS *DTRAIN_CUDA_WARP)
    dtrain_cuda_head_softmax_kernel(const dtrain_attention_args args,
                                    const dtrain_cuda_head_softmax softmax)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    const int64_t r =
        (int64_t)blockIdx.x * DTRAIN_CUDA_SOFTMAX_WARPS + threadIdx.x / DTRAIN_CUDA_WARP;
    if (r >= softmax.heads.count * args.queries) return; /* the whole warp */
    const dtrain_cuda_score_row row = dtrain_cuda_score_row_of(args, softmax, r);
    T *const out = (T *)row.scores;
    const float most = dtrain_cuda_score_row_max(row, lane);
    const float sum = dtrain_cuda_score_row_sum(row, lane, most);
    const float lse = sum == 0 ? INFINITY : most + logf(sum);
    const float rest = dtrain_cuda_lse_rest(most, logf(sum), lse);
    const int64_t at = (softmax.heads.batch * args.heads + softmax.heads.first) * args.queries + r;
    if (lane == 0) args.lse[at] = lse;
    if (lane == 0 && args.lse_rest) args.lse_rest[at] = rest;
    for (int64_t base = 0; base < args.keys; base += DTRAIN_CUDA_SOFTMAX_STEP) {
        const int64_t j = base + lane * 4;
        dtrain_cuda_pack<float> x = {};
        dtrain_cuda_pack<T, 4> p;
        if (j < row.limit) x = dtrain_cuda_score_row_load(row, j, lse);
        __syncwarp();
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < 4; i++) x.at[i] = j + i < row.limit ? expf(x.at[i] - rest) : 0.0f;
        dtrain_cuda_narrow(x.at, p);
        if (j < args.keys) dtrain_cuda_store(out + j, p);
    }
}

/* ---- Softmax backward: S, G (rows,U), lse (rows), Y, dY (T,n) -> P over S, dS over G ------------
 *
 * Head r / T owns columns [r / T * d, ...) of Y and dY. Reads 8 bytes a score (half of them with a
 * causal mask) and writes P and dS. */

template <typename T>
static __device__ __forceinline__ float dtrain_cuda_score_row_dot(const T *x, const T *y,
                                                                  int64_t count, int lane)
{
    float sum = 0;
    for (int64_t i = lane; i < count; i += DTRAIN_CUDA_WARP)
        sum += dtrain_cuda_widen(x[i]) * dtrain_cuda_widen(y[i]);
    return dtrain_cuda_warp_sum(sum);
}

template <typename T>
static __global__ void __launch_bounds__(DTRAIN_CUDA_SOFTMAX_WARPS *DTRAIN_CUDA_WARP)
    dtrain_cuda_head_softmax_backward_kernel(const dtrain_attention_args args,
                                             const dtrain_cuda_head_softmax softmax,
                                             const void *d_y)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    const int64_t r =
        (int64_t)blockIdx.x * DTRAIN_CUDA_SOFTMAX_WARPS + threadIdx.x / DTRAIN_CUDA_WARP;
    if (r >= softmax.heads.count * args.queries) return; /* the whole warp */
    const dtrain_cuda_score_row row = dtrain_cuda_score_row_of(args, softmax, r);
    const int64_t token = softmax.heads.batch * args.queries + r % args.queries;
    const int64_t head = softmax.heads.first + r / args.queries;
    const int64_t at = token * softmax.heads.n + head * args.d;
    const float mean =
        dtrain_cuda_score_row_dot((const T *)args.y + at, (const T *)d_y + at, args.d, lane);
    const int64_t stored =
        (softmax.heads.batch * args.heads + softmax.heads.first) * args.queries + r;
    const float lse = args.lse[stored], rest = args.lse_rest ? args.lse_rest[stored] : 0;
    float *const grads = softmax.grads + r * softmax.ld;
    T *const p_out = (T *)row.scores, *const d_out = (T *)grads;
    for (int64_t base = 0; base < args.keys; base += DTRAIN_CUDA_SOFTMAX_STEP) {
        const int64_t j = base + lane * 4;
        dtrain_cuda_pack<float> x = {}, g = {};
        dtrain_cuda_pack<T, 4> p, d;
        if (j < row.limit)
            x = dtrain_cuda_score_row_load(row, j, lse), g = dtrain_cuda_load<4>(grads + j);
        __syncwarp();
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < 4; i++) {
            const bool seen = j + i < row.limit;
            x.at[i] = seen ? expf(x.at[i] - rest) : 0.0f;
            g.at[i] = seen ? x.at[i] * (g.at[i] - mean) : 0.0f;
        }
        dtrain_cuda_narrow(x.at, p);
        dtrain_cuda_narrow(g.at, d);
        if (j >= args.keys) continue;
        dtrain_cuda_store(p_out + j, p);
        dtrain_cuda_store(d_out + j, d);
    }
}

/* ---- Sums over heads: parts (heads,U,d), fp32 -> dK or dV of the head that they share ---------*/

struct dtrain_cuda_head_sum_op {
    static constexpr int width = 1;
    int64_t heads, step, columns, ld;
    const float *parts;
    dtrain_cuda_operand out;

    template <int W> struct group {
        float sum[W];
    };
    template <int W> __device__ void load(int64_t i, group<W> &g) const
    {
        for (int64_t head = 0; head < heads; head++) g.sum[0] += parts[head * step + i];
    }
    template <int W> __device__ void store(int64_t i, const group<W> &g) const
    {
        out.store(i / columns * ld + i % columns, g.sum);
    }
};

static dtrain_result dtrain_cuda_head_add_up(dtrain_device *device,
                                             const dtrain_attention_args *args,
                                             const dtrain_cuda_heads *x,
                                             dtrain_cuda_head_matrix parts,
                                             dtrain_cuda_head_matrix out)
{
    const dtrain_cuda_head_sum_op op = {x->count,
                                        parts.step,
                                        args->d,
                                        out.ld,
                                        (const float *)parts.data,
                                        dtrain_cuda_operand_of(out.data, args->dtype)};
    return dtrain_cuda_each(device, "attention_backward (shared heads)", op, args->keys * args->d,
                            false);
}

/* ---- Passes -----------------------------------------------------------------------------------*/

static int64_t dtrain_cuda_softmax_blocks(const dtrain_attention_args *args,
                                          const dtrain_cuda_heads *x)
{
    const int64_t rows = x->count * args->queries;
    return (rows + DTRAIN_CUDA_SOFTMAX_WARPS - 1) / DTRAIN_CUDA_SOFTMAX_WARPS;
}

template <typename T>
static dtrain_result dtrain_cuda_head_softmax_as(dtrain_device *device,
                                                 const dtrain_attention_args *args,
                                                 const dtrain_cuda_head_softmax *x)
{
    return DTRAIN_CUDA_RUN(device, "softmax", dtrain_cuda_head_softmax_kernel<T>,
                           dtrain_cuda_softmax_blocks(args, &x->heads),
                           DTRAIN_CUDA_SOFTMAX_WARPS * DTRAIN_CUDA_WARP, 0, *args, *x);
}

template <typename T>
static dtrain_result
dtrain_cuda_head_softmax_backward_as(dtrain_device *device,
                                     const dtrain_attention_backward_args *args,
                                     const dtrain_cuda_head_softmax *x)
{
    return DTRAIN_CUDA_RUN(device, "softmax backward", dtrain_cuda_head_softmax_backward_kernel<T>,
                           dtrain_cuda_softmax_blocks(&args->forward, &x->heads),
                           DTRAIN_CUDA_SOFTMAX_WARPS * DTRAIN_CUDA_WARP, 0, args->forward, *x,
                           args->d_y);
}

static dtrain_result dtrain_cuda_attention_pass(dtrain_device *device,
                                                const dtrain_attention_args *args,
                                                const dtrain_cuda_heads *x, float *scores,
                                                int64_t ld)
{
    const int64_t T = args->queries, U = args->keys, d = args->d;
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32, type = args->dtype;
    const dtrain_cuda_head_matrix q = dtrain_cuda_head_queries(args, x, args->q, args->q_stride);
    const dtrain_cuda_head_matrix k = dtrain_cuda_head_keys(args, x, args->k, args->k_stride);
    const dtrain_cuda_head_matrix v = dtrain_cuda_head_keys(args, x, args->v, args->v_stride);
    const dtrain_cuda_head_matrix y = dtrain_cuda_head_queries(args, x, args->y, x->n);
    const dtrain_cuda_head_matrix s = dtrain_cuda_head_scores(args, scores, ld, f32);
    const dtrain_cuda_head_matrix p = dtrain_cuda_head_scores(args, scores, ld, type);
    const dtrain_cuda_head_softmax softmax = {*x, ld, scores, NULL};
    DTRAIN_CUDA_TRY(dtrain_cuda_head_multiply(device, x, DTRAIN_GEMM_TRANS_B, x->scale, q, k, s, T,
                                              U, d, type, f32));
    DTRAIN_CUDA_TRY(
        DTRAIN_CUDA_BY_DTYPE(type, dtrain_cuda_head_softmax_as)(device, args, &softmax));
    return dtrain_cuda_head_multiply(device, x, 0, 1, p, v, y, T, d, U, type, type);
}

/* Make the gradient of k or v, (U,d) = alpha A' (U,T) B (T,d) for each head, or the sum over heads
 * that share it, with parts in scratch. */
static dtrain_result dtrain_cuda_head_keys_gradient(dtrain_device *device,
                                                    const dtrain_attention_args *args,
                                                    const dtrain_cuda_heads *x, float alpha,
                                                    dtrain_cuda_head_matrix a,
                                                    dtrain_cuda_head_matrix b, float *scratch,
                                                    void *gradient, int64_t ld)
{
    const int64_t T = args->queries, U = args->keys, d = args->d;
    const dtrain_cuda_head_matrix out = dtrain_cuda_head_keys(args, x, gradient, ld);
    const dtrain_cuda_head_matrix parts = {scratch, d, U * d};
    if (!gradient) return DTRAIN_OK;
    if (x->sharing == 1)
        return dtrain_cuda_head_multiply(device, x, DTRAIN_GEMM_TRANS_A, alpha, a, b, out, U, d, T,
                                         args->dtype, args->dtype);
    DTRAIN_CUDA_TRY(dtrain_cuda_head_multiply(device, x, DTRAIN_GEMM_TRANS_A, alpha, a, b, parts, U,
                                              d, T, args->dtype, DTRAIN_DTYPE_F32));
    return dtrain_cuda_head_add_up(device, args, x, parts, out);
}

static dtrain_result dtrain_cuda_attention_backward_pass(dtrain_device *device,
                                                         const dtrain_attention_backward_args *pass,
                                                         const dtrain_cuda_heads *x, float *scores,
                                                         float *grads, int64_t ld)
{
    const dtrain_attention_args *args = &pass->forward;
    const int64_t T = args->queries, U = args->keys, d = args->d;
    const dtrain_dtype f32 = DTRAIN_DTYPE_F32, type = args->dtype;
    const dtrain_cuda_head_matrix q = dtrain_cuda_head_queries(args, x, args->q, args->q_stride);
    const dtrain_cuda_head_matrix k = dtrain_cuda_head_keys(args, x, args->k, args->k_stride);
    const dtrain_cuda_head_matrix v = dtrain_cuda_head_keys(args, x, args->v, args->v_stride);
    const dtrain_cuda_head_matrix d_q =
        dtrain_cuda_head_queries(args, x, pass->d_q, args->q_stride);
    const dtrain_cuda_head_matrix d_y = dtrain_cuda_head_queries(args, x, pass->d_y, x->n);
    const dtrain_cuda_head_matrix s = dtrain_cuda_head_scores(args, scores, ld, f32);
    const dtrain_cuda_head_matrix g = dtrain_cuda_head_scores(args, grads, ld, f32);
    const dtrain_cuda_head_matrix p = dtrain_cuda_head_scores(args, scores, ld, type);
    const dtrain_cuda_head_matrix d_s = dtrain_cuda_head_scores(args, grads, ld, type);
    const dtrain_cuda_head_softmax softmax = {*x, ld, scores, grads};
    float *const parts = grads + x->count * T * ld;
    const uint32_t trans_b = DTRAIN_GEMM_TRANS_B;
    DTRAIN_CUDA_TRY(
        dtrain_cuda_head_multiply(device, x, trans_b, x->scale, q, k, s, T, U, d, type, f32));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_head_multiply(device, x, trans_b, 1, d_y, v, g, T, U, d, type, f32));
    DTRAIN_CUDA_TRY(
        DTRAIN_CUDA_BY_DTYPE(type, dtrain_cuda_head_softmax_backward_as)(device, pass, &softmax));
    if (pass->d_q)
        DTRAIN_CUDA_TRY(
            dtrain_cuda_head_multiply(device, x, 0, x->scale, d_s, k, d_q, T, d, U, type, type));
    DTRAIN_CUDA_TRY(dtrain_cuda_head_keys_gradient(device, args, x, 1, p, d_y, parts, pass->d_v,
                                                   args->v_stride));
    return dtrain_cuda_head_keys_gradient(device, args, x, x->scale, d_s, q, parts, pass->d_k,
                                          args->k_stride);
}

/* Check the arguments and fill in the members that all passes share. */
static dtrain_result dtrain_cuda_heads_of(const dtrain_attention_args *args, dtrain_cuda_heads *x)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("attention", args->dtype));
    if (args->d < 1 || args->heads < 1 || args->kv_heads < 1 || args->heads % args->kv_heads)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "attention: %lld heads of queries, of %lld elements, cannot share %lld "
                           "of keys equally",
                           (long long)args->heads, (long long)args->d, (long long)args->kv_heads);
    memset(x, 0, sizeof *x);
    x->n = args->heads * args->d;
    x->sharing = args->heads / args->kv_heads;
    x->scale = 1 / sqrtf((float)args->d);
    return DTRAIN_OK;
}

/* Choose the number of heads of a pass: heads that share keys or, if none do, as many as the
 * scratch holds with `matrices` (T,ld) each, evened out over the passes. */
static int64_t dtrain_cuda_heads_together(const dtrain_cuda_heads *x,
                                          const dtrain_attention_args *args, int64_t ld,
                                          int64_t matrices)
{
    const int64_t heads = args->heads;
    if (x->sharing > 1) return x->sharing;
    const int64_t fit =
        DTRAIN_CUDA_SCORE_BYTES / (int64_t)sizeof(float) / matrices / ld / args->queries;
    const int64_t passes = fit < 1 ? heads : (heads + fit - 1) / fit;
    return (heads + passes - 1) / passes;
}

/* ---- Entry ------------------------------------------------------------------------------------*/

static dtrain_result dtrain_cuda_attention_gemm(dtrain_device *device,
                                                const dtrain_attention_args *args)
{
    const int64_t T = args->queries, ld = (args->keys + 7) / 8 * 8;
    dtrain_cuda_heads x;
    void *scores = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_heads_of(args, &x));
    if (args->batch <= 0 || T <= 0 || args->keys <= 0) return DTRAIN_OK;
    const int64_t together = dtrain_cuda_heads_together(&x, args, ld, 1);
    DTRAIN_CUDA_TRY(
        dtrain_cuda_scratch(device, (size_t)(together * T * ld) * sizeof(float), &scores));
    for (x.batch = 0; x.batch < args->batch; x.batch++)
        for (x.first = 0; x.first < args->heads; x.first += together) {
            x.count = args->heads - x.first < together ? args->heads - x.first : together;
            DTRAIN_CUDA_TRY(dtrain_cuda_attention_pass(device, args, &x, (float *)scores, ld));
        }
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_attention_gemm_backward(dtrain_device *device,
                                                         const dtrain_attention_backward_args *pass)
{
    const dtrain_attention_args *args = &pass->forward;
    const int64_t T = args->queries, ld = (args->keys + 7) / 8 * 8;
    dtrain_cuda_heads x;
    void *scores = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_heads_of(args, &x));
    if (args->batch <= 0 || T <= 0 || args->keys <= 0) return DTRAIN_OK;
    const int64_t together = dtrain_cuda_heads_together(&x, args, ld, 2);
    const int64_t parts =
        x.sharing > 1 ? together * args->keys * args->d : 0; /* of dK, and of dV */
    DTRAIN_CUDA_TRY(dtrain_cuda_scratch(
        device, (size_t)(2 * together * T * ld + parts) * sizeof(float), &scores));
    float *const grads = (float *)scores + together * T * ld;
    for (x.batch = 0; x.batch < args->batch; x.batch++)
        for (x.first = 0; x.first < args->heads; x.first += together) {
            x.count = args->heads - x.first < together ? args->heads - x.first : together;
            DTRAIN_CUDA_TRY(
                dtrain_cuda_attention_backward_pass(device, pass, &x, (float *)scores, grads, ld));
        }
    return DTRAIN_OK;
}

/* ==== src/device/cuda/flash_tiles.cuh ========================================================= */

/* Tiles of flash attention
 *
 * The parts of flash.cuh's kernels: instructions of tensor cores, tiles in shared memory, products
 * of a warp's rows with a tile, masks. Head sizes are multiples of 16. */

#include <math.h>

#define DTRAIN_CUDA_FLASH_WARPS 4
#define DTRAIN_CUDA_FLASH_THREADS (DTRAIN_CUDA_FLASH_WARPS * DTRAIN_CUDA_WARP)

/* ---- PTX ----------------------------------------------------------------------------------------
 *
 * With g = lane / 4 and t = lane % 4, each register holds two neighbours of a row:
 *
 *     A (16,16)   a[0] row g, columns 2t   a[1] row g+8, 2t   a[2] row g, 2t+8   a[3] row g+8, 2t+8
 *     B (16,8)    b[0] column g, rows 2t   b[1] column g, rows 2t+8
 *     D (16,8)    d[0..1] row g, columns 2t and 2t+1   d[2..3] row g+8
 *
 * ldmatrix loads four 8 x 8 matrices: lane i gives the address of row i % 8 of matrix i / 8, and
 * gets row g, columns 2t and 2t+1 of each; transposed: column g, rows 2t and 2t+1.
 *
 * mma of this shape and cp.async need Ampere. Code for older GPUs (DTRAIN_CUDA_BEFORE_AMPERE) has
 * neither: dtrain_cuda_flash_takes refuses. */
static __device__ __forceinline__ void dtrain_cuda_mma(float d[4], const uint32_t a[4],
                                                       const uint32_t b[2], dtrain_cuda_bf16)
{
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_mma_16816(d, a, b, true);
#elif defined(DTRAIN_CUDA_BEFORE_AMPERE)
    __trap();
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

static __device__ __forceinline__ void dtrain_cuda_mma(float d[4], const uint32_t a[4],
                                                       const uint32_t b[2], dtrain_cuda_f16)
{
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_mma_16816(d, a, b, false);
#elif defined(DTRAIN_CUDA_BEFORE_AMPERE)
    __trap();
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

/* Load four 8 x 8 matrices. volatile, because asynchronous copies that the compiler does not see
 * change the memory. */
static __device__ __forceinline__ void dtrain_cuda_ldmatrix(uint32_t to[4], const void *row)
{
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_ldmatrix(to, 4, false, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
#endif
}

static __device__ __forceinline__ void dtrain_cuda_ldmatrix_transposed(uint32_t to[4],
                                                                       const void *row)
{
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_ldmatrix(to, 4, true, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
#endif
}

/* Copy 16 bytes, or write 16 zero bytes and read nothing. */
static __device__ __forceinline__ void dtrain_cuda_copy_async(void *shared, const void *global,
                                                              bool read)
{
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_cp_async_16(shared, global, read ? 16 : 0);
#elif defined(DTRAIN_CUDA_BEFORE_AMPERE)
    __trap();
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(global), "r"(read ? 16 : 0)
                 : "memory");
#endif
}

/* Wait for all copies of this thread so far; a barrier must follow before other threads read
 * them. */
static __device__ __forceinline__ void dtrain_cuda_copy_wait(void)
{
#ifdef DTRAIN_CUDA_EMULATION
    dtrain_emulation_cp_async_commit();
    dtrain_emulation_cp_async_wait(0);
#elif defined(DTRAIN_CUDA_BEFORE_AMPERE)
    __trap();
#else
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

static __device__ __forceinline__ float dtrain_cuda_exp2(float x)
{
#ifdef DTRAIN_CUDA_EMULATION
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

/* Return x as a value unknown to the compiler, so that computations from it stay inside a loop.
 * Addresses in swizzled tiles take two instructions; hoisted out of the loop they would take the
 * registers of the accumulators. */
static __device__ __forceinline__ int dtrain_cuda_not_hoisted(int x)
{
#ifndef DTRAIN_CUDA_EMULATION
    asm volatile("" : "+r"(x));
#endif
    return x;
}

/* ---- Tiles --------------------------------------------------------------------------------------
 *
 * A tile (rows,HEAD) of halves is stored in chunks of 16 bytes. ldmatrix reads one chunk of each of
 * 8 consecutive rows at a time: these chunks must be in 8 different groups of 4 banks, that is,
 * their numbers must differ modulo 8. Rows of `chunks` chunks repeat after 8 / gcd(chunks, 8) rows;
 * XOR of the chunk number with the number of the repetition makes them differ, for every even
 * number of chunks. A static_assert checks it for each head size. */

template <int HEAD> static constexpr __host__ __device__ int dtrain_cuda_flash_swizzle(int row)
{
    constexpr int chunks = HEAD / 8, factor = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2;
    static_assert(HEAD % 16 == 0, "an mma is 16 deep");
    return row / (8 / factor) % factor;
}

template <int HEAD> static constexpr __host__ __device__ bool dtrain_cuda_flash_without_conflicts()
{
    for (int chunk = 0; chunk < HEAD / 8; chunk++) {
        int groups = 0;
        for (int row = 0; row < 8; row++)
            groups |= 1 << (row * (HEAD / 8) + (chunk ^ dtrain_cuda_flash_swizzle<HEAD>(row))) % 8;
        if (groups != 0xff) return false;
    }
    return true;
}

template <typename Half>
static __device__ __forceinline__ void dtrain_cuda_flash_copy(dtrain_cuda_pack<Half> *to,
                                                              const Half *from, bool read)
{
    dtrain_cuda_copy_async(to, from, read);
}

/* Copy fp32 memory to halves in the tile: rounded on the way, not asynchronous. */
template <typename Half>
static __device__ __forceinline__ void dtrain_cuda_flash_copy(dtrain_cuda_pack<Half> *to,
                                                              const float *from, bool read)
{
    uint4 narrow = make_uint4(0, 0, 0, 0);
    if (read) {
        const dtrain_cuda_pack<float> low = dtrain_cuda_load<4>(from),
                                      high = dtrain_cuda_load<4>(from + 4);
        narrow = make_uint4(dtrain_cuda_narrow_pair(low.at[0], low.at[1], Half()),
                            dtrain_cuda_narrow_pair(low.at[2], low.at[3], Half()),
                            dtrain_cuda_narrow_pair(high.at[0], high.at[1], Half()),
                            dtrain_cuda_narrow_pair(high.at[2], high.at[3], Half()));
    }
    *reinterpret_cast<uint4 *>(to) = narrow;
}

/* Load tile (ROWS,HEAD) = rows `first` and following of matrix (rows,HEAD), whose rows are `stride`
 * elements apart; rows after its end become zeros. All threads take part; the tile is complete
 * after dtrain_cuda_copy_wait and a barrier. A thread copies one column in steps of 8, 16 or 32
 * rows, which do not change the swizzle: one address is computed, the other offsets are constants.
 * With head sizes 80 and 96 a third of the threads is idle. */
template <int HEAD, int ROWS, typename Storage, typename Half>
static __device__ __forceinline__ void dtrain_cuda_flash_load(dtrain_cuda_pack<Half> *tile,
                                                              const Storage *matrix, int stride,
                                                              int first, int rows)
{
    constexpr int chunks = HEAD / 8, step = HEAD <= 32 ? 32 : HEAD <= 64 ? 16 : 8;
    static_assert(step * chunks <= DTRAIN_CUDA_FLASH_THREADS && ROWS % step == 0,
                  "a step is a pass of the block");
    static_assert(dtrain_cuda_flash_without_conflicts<HEAD>(), "ldmatrix reads 8 rows at once");
    const unsigned thread = (unsigned)dtrain_cuda_not_hoisted(threadIdx.x);
    const int row = (int)(thread / chunks), chunk = (int)(thread % chunks);
    if (row >= step) return;
    tile += row * chunks + (chunk ^ dtrain_cuda_flash_swizzle<HEAD>(row));
    matrix += (int64_t)(first + row) * stride + chunk * 8;
    DTRAIN_CUDA_UNROLL
    for (int down = 0; down < ROWS; down += step, matrix += step * stride)
        dtrain_cuda_flash_copy(tile + down * chunks, matrix, first + row + down < rows);
}

/* Give the chunk whose address this lane passes to ldmatrix to load the 16 x 16 at row 0, column 16
 * * step of a tile: as A of an mma; or, transposed, as two B side by side, whose rows are the
 * tile's rows. */
template <int HEAD>
static __device__ __forceinline__ int dtrain_cuda_flash_lane_rows(int lane, int step)
{
    const int row = lane % 16, chunk = lane / 16;
    return row * (HEAD / 8) + (2 * step ^ chunk ^ dtrain_cuda_flash_swizzle<HEAD>(row));
}

/* Give the same chunk for a load as two B whose columns are the tile's rows. */
template <int HEAD>
static __device__ __forceinline__ int dtrain_cuda_flash_lane_columns(int lane, int step)
{
    const int row = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
    return row * (HEAD / 8) + (2 * step ^ chunk ^ dtrain_cuda_flash_swizzle<HEAD>(row));
}

/* Compute s (16 M, 8 N) = own B^T over HEAD, where own is this warp's rows of a tile and B all 8 N
 * rows of `streamed`. With RESIDENT the fragments of own come from `kept`. */
template <int HEAD, bool RESIDENT, int M, int N, typename Half>
static __device__ __forceinline__ void
dtrain_cuda_flash_scores(float (&s)[M][N][4], const dtrain_cuda_pack<Half> *own,
                         const uint32_t (*kept)[M][4], const dtrain_cuda_pack<Half> *streamed)
{
    const int lane = dtrain_cuda_not_hoisted(threadIdx.x % DTRAIN_CUDA_WARP);
    DTRAIN_CUDA_UNROLL
    for (int i = 0; i < M * N * 4; i++) s[i / (4 * N)][i / 4 % N][i % 4] = 0;
    DTRAIN_CUDA_UNROLL
    for (int step = 0; step < HEAD / 16; step++) {
        uint32_t a[M][4];
        DTRAIN_CUDA_UNROLL
        for (int m = 0; m < M; m++) {
            if (!RESIDENT)
                dtrain_cuda_ldmatrix(a[m], own + 2 * m * HEAD +
                                               dtrain_cuda_flash_lane_rows<HEAD>(lane, step));
            for (int i = 0; i < 4 && RESIDENT; i++) a[m][i] = kept[step][m][i];
        }
        DTRAIN_CUDA_UNROLL
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            dtrain_cuda_ldmatrix(b, streamed + n * HEAD +
                                        dtrain_cuda_flash_lane_columns<HEAD>(lane, step));
            DTRAIN_CUDA_UNROLL
            for (int m = 0; m < M; m++) {
                dtrain_cuda_mma(s[m][n], a[m], b, Half());
                dtrain_cuda_mma(s[m][n + 1], a[m], b + 2, Half());
            }
        }
    }
}

/* Add to sums (16 M, HEAD) the product A (16 M, 16 STEPS) B, where B is the streamed tile (16
 * STEPS, HEAD). */
template <int HEAD, int STEPS, int M, typename Half>
static __device__ __forceinline__ void
dtrain_cuda_flash_accumulate(float (&sums)[M][HEAD / 8][4], const uint32_t (&a)[STEPS][M][4],
                             const dtrain_cuda_pack<Half> *streamed)
{
    const int lane = dtrain_cuda_not_hoisted(threadIdx.x % DTRAIN_CUDA_WARP);
    DTRAIN_CUDA_UNROLL
    for (int n = 0; n < HEAD / 8; n += 2) DTRAIN_CUDA_UNROLL
    for (int step = 0; step < STEPS; step++) {
        uint32_t b[4];
        dtrain_cuda_ldmatrix_transposed(b, streamed + 2 * step * HEAD +
                                               dtrain_cuda_flash_lane_rows<HEAD>(lane, n / 2));
        DTRAIN_CUDA_UNROLL
        for (int m = 0; m < M; m++) {
            dtrain_cuda_mma(sums[m][n], a[step][m], b, Half());
            dtrain_cuda_mma(sums[m][n + 1], a[step][m], b + 2, Half());
        }
    }
}

static __device__ __forceinline__ void dtrain_cuda_flash_store_pair(float *to, float low,
                                                                    float high)
{
    *reinterpret_cast<float2 *>(to) = make_float2(low, high);
}

template <typename Half>
static __device__ __forceinline__ void dtrain_cuda_flash_store_pair(Half *to, float low, float high)
{
    *reinterpret_cast<uint32_t *>(to) = dtrain_cuda_narrow_pair(low, high, Half());
}

/* Store factor * sums (16 M, HEAD) as rows `row` and following of matrix (rows,HEAD). */
template <int HEAD, int M, typename Storage>
static __device__ __forceinline__ void
dtrain_cuda_flash_store(Storage *matrix, int stride, int row, int rows,
                        const float (&sums)[M][HEAD / 8][4], float factor)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    DTRAIN_CUDA_UNROLL
    for (int part = 0; part < 2 * M; part++) {
        const int here = row + 8 * part + lane / 4;
        if (here >= rows) continue;
        Storage *to = matrix + (int64_t)here * stride + lane % 4 * 2;
        DTRAIN_CUDA_UNROLL
        for (int n = 0; n < HEAD / 8; n++) {
            const float *pair = &sums[part / 2][n][part % 2 * 2];
            dtrain_cuda_flash_store_pair(to + 8 * n, factor * pair[0], factor * pair[1]);
        }
    }
}

/* Set s to -infinity where the query does not see the key. The warp's first query and key are
 * given. With QUERY_ROWS the rows of s are queries and its columns keys, else the other way round.
 * Most tiles need no mask and return at once. */
template <bool QUERY_ROWS, int M, int N>
static __device__ __forceinline__ void dtrain_cuda_flash_mask(float (&s)[M][N][4], int query,
                                                              int key, bool causal, int keys)
{
    const int last_key = key + (QUERY_ROWS ? 8 * N : 16 * M) - 1;
    if (last_key < keys && (!causal || last_key <= query)) return;
    const int lane = dtrain_cuda_not_hoisted(threadIdx.x % DTRAIN_CUDA_WARP);
    DTRAIN_CUDA_UNROLL
    for (int i = 0; i < M * N * 4; i++) {
        const int m = i / (4 * N), n = i / 4 % N, e = i % 4;
        const int row = 16 * m + lane / 4 + e / 2 * 8, column = 8 * n + lane % 4 * 2 + e % 2;
        const int this_key = key + (QUERY_ROWS ? column : row),
                  this_query = query + (QUERY_ROWS ? row : column);
        if (this_key >= keys || (causal && this_key > this_query)) s[m][n][e] = -INFINITY;
    }
}

/* ==== src/device/cuda/flash.cuh =============================================================== */

/* Flash attention on tensor cores
 *
 * softmax(Q K^T / sqrt(head)) V without a matrix of queries x keys in memory (Dao,
 * FlashAttention-2, 2023), for head sizes 32, 64, 80, 96 and 128. For each (batch, head), with T
 * queries and U keys: forward 2 products of 2 T U head flops each, backward 7; half of it when
 * causal with T = U. A block stops at the key length of its batch element.
 * Bytes moved: each of q, k, v, y once from memory, and once for each tile from the L2 cache.
 *
 * A block is 4 warps. It owns a tile of rows in shared memory, 16 or 32 for each warp, and streams
 * tiles of the other side. All values of queries x keys stay in registers: the accumulators of a
 * product have the layout of the next product's A operand.
 *
 *                    own rows     streamed       in registers, per warp
 *     forward        Q            K, V           S = Q K^T       y  += P V
 *     backward, 1    K, V         Q, dY          S^T = K Q^T     dV += P^T dY,   dK += dS^T Q
 *     backward, 2    Q, dY        K, V           S = Q K^T       dQ += dS K
 *
 * with P = softmax(S), dS = P * (dP - D), dP = dY V^T, D = rowsum(dY * y). The two backward kernels
 * are one template, read by columns and by rows. Both compute S and dP: 7 products instead of the 5
 * of a single kernel. But a single kernel would have to sum dQ across blocks, either by
 * floating-point atomics, whose order changes from run to run, or through U / 64 partial sums of dQ
 * in memory. Determinism costs at most 7/5 of the backward arithmetic.
 *
 * If several heads of queries share a head of keys and values, the first backward kernel, whose
 * blocks own keys, streams the queries of these heads, one head after the other.
 *
 * Why 32 rows for each warp: an ldmatrix of 16 x 16 keeps shared memory busy for 4 cycles and feeds
 * two mma for each 16 rows, which take 3.2 cycles of the four tensor cores of a Hopper SM. With 16
 * rows the loads are the limit; with 32 they take half the time. Registers of a thread (limit 255,
 * two blocks per SM):
 *
 *     forward, head 128      y 128 + S 64                    Q is read again from shared memory
 *     forward, head 64       y 64 + S 64 + Q 32              Q stays in registers
 *     backward 1, head 128   dK 64 + dV 64 + S 32 + dP 32    16 rows a warp: 32 would need 256 sums
 *     backward 1, head 64    dK 64 + dV 64 + S 32 + dP 32    32 rows
 *     backward 2, head 128   dQ 128 + S 32 + dP 32           32 rows
 *
 * Shared memory of a block is 64 KiB forward and 97 KiB backward at head 128, 73 KiB backward at
 * head 96, 49 KiB backward at head 64. Blocks per SM at head 128, from the shared memory of an SM:
 *
 *     Hopper (sm_90)         228 KiB    two forward, two backward
 *     A100 (sm_80)           164 KiB    two forward, one backward; two backward up to head 96
 *     sm_86, sm_89           100 KiB    one forward, one backward */

#include <math.h>

#define DTRAIN_CUDA_FLASH_KEYS 64 /* of a streamed tile in the forward pass */
#define DTRAIN_CUDA_LOG2_E 1.4426950408889634f

/* ---- Order of the blocks ------------------------------------------------------------------------
 *
 * The (batch, head) pairs are taken in groups whose streamed rows fit in the L2 cache together.
 * Within a group the heaviest tiles of all pairs come first, so that the last ones to run are
 * light. */

#define DTRAIN_CUDA_FLASH_CACHE_BYTES (16 << 20)

struct dtrain_cuda_flash_order {
    unsigned pairs, tiles, group; /* group: pairs that run together */
    unsigned heads, sharing;      /* of a batch element; heads of queries that share one of keys */
};

struct dtrain_cuda_flash_work {
    unsigned pair, tile; /* pair: of (batch, head of queries), the first that shares the keys */
    unsigned column;     /* of the head of queries, in (tokens,n) */
    unsigned kv_column;  /* of its head of keys, in (tokens, columns of keys) */
    unsigned batch;
};

/* With `by_keys` a pair is a batch element and a head of keys, else a head of queries. */
static dtrain_cuda_flash_order dtrain_cuda_flash_order_of(const dtrain_attention_args *args,
                                                          int64_t tile, bool by_keys)
{
    dtrain_cuda_flash_order order;
    const int64_t pairs = args->batch * (by_keys ? args->kv_heads : args->heads);
    const int64_t own = by_keys ? args->keys : args->queries,
                  streamed = by_keys ? args->queries : args->keys;
    const int64_t fitting = DTRAIN_CUDA_FLASH_CACHE_BYTES / (streamed * args->d * 4);
    order.pairs = (unsigned)pairs;
    order.tiles = (unsigned)((own + tile - 1) / tile);
    order.group = (unsigned)(fitting < 1 ? 1 : fitting < pairs ? fitting : pairs);
    order.heads = (unsigned)(by_keys ? args->kv_heads : args->heads);
    order.sharing = (unsigned)(args->heads / args->kv_heads);
    return order;
}

template <int HEAD, bool BY_KEYS>
static __device__ __forceinline__ dtrain_cuda_flash_work
dtrain_cuda_flash_work_of(const dtrain_cuda_flash_order &order, bool last_is_heaviest)
{
    const unsigned block = (unsigned)dtrain_cuda_not_hoisted((int)blockIdx.x);
    const unsigned first = block / (order.group * order.tiles) * order.group;
    const unsigned inside = block % (order.group * order.tiles);
    const unsigned width = min(order.group, order.pairs - first), pair = first + inside % width;
    const unsigned head = pair % order.heads; /* of keys or of queries */
    dtrain_cuda_flash_work work;
    work.pair = BY_KEYS ? pair * order.sharing : pair;
    work.tile = last_is_heaviest ? order.tiles - 1 - inside / width : inside / width;
    work.column = (BY_KEYS ? head * order.sharing : head) * HEAD;
    work.kv_column = (BY_KEYS ? head : head / order.sharing) * HEAD;
    work.batch = pair / order.heads;
    return work;
}

/* Two matrices of one head with the same rows: K and V, Q and dY, or their gradients. */
template <typename Storage> struct dtrain_cuda_flash_side {
    Storage *a, *b; /* NULL: not there */
    int a_stride, b_stride, rows;
};

/* Describe the rows of the block's keys or queries in a and b. */
template <bool KEYS, typename Storage>
static __device__ __forceinline__ dtrain_cuda_flash_side<Storage>
dtrain_cuda_flash_side_of(const dtrain_attention_args &args, const dtrain_cuda_flash_work &work,
                          Storage *a, Storage *b)
{
    const int64_t row = work.batch * (KEYS ? args.keys : args.queries);
    const unsigned column = KEYS ? work.kv_column : work.column;
    dtrain_cuda_flash_side<Storage> side;
    side.a_stride = (int)(KEYS ? args.k_stride : args.q_stride);
    side.b_stride = (int)(KEYS ? args.v_stride : args.heads * args.d);
    side.a = a ? a + row * side.a_stride + column : NULL;
    side.b = b ? b + row * side.b_stride + column : NULL;
    side.rows = (int)(KEYS ? args.keys : args.queries);
    return side;
}

/* Describe K and V of the block's head: the keys that count. */
template <typename Storage>
static __device__ __forceinline__ dtrain_cuda_flash_side<const Storage>
dtrain_cuda_flash_keys_of(const dtrain_attention_args &args, const dtrain_cuda_flash_work &work)
{
    dtrain_cuda_flash_side<const Storage> keys = dtrain_cuda_flash_side_of<true>(
        args, work, (const Storage *)args.k, (const Storage *)args.v);
    keys.rows = (int)dtrain_cuda_key_count(args, work.batch);
    return keys;
}

/* Load a tile of each matrix, the second after the first. */
template <int HEAD, int ROWS, typename Half, typename Storage>
static __device__ __forceinline__ void
dtrain_cuda_flash_load_side(dtrain_cuda_pack<Half> *tiles,
                            const dtrain_cuda_flash_side<const Storage> &side, int first)
{
    dtrain_cuda_flash_load<HEAD, ROWS>(tiles, side.a, side.a_stride, first, side.rows);
    dtrain_cuda_flash_load<HEAD, ROWS>(tiles + ROWS * HEAD / 8, side.b, side.b_stride, first,
                                       side.rows);
}

/* ---- Forward ------------------------------------------------------------------------------------
 *
 * K and V are each other's second buffer: while one of them is multiplied the other one is copied.
 *
 *     copies      K0   V0 ......  K1 ............  V1 ......
 *     products         S = Q K0   softmax, y += P V0   S = Q K1 ...
 *     barriers      |           |                    |          |
 *
 * Rows after the end of the sequence are zeros in the tiles and are not stored. Keys ascend from
 * key 0, which every query sees: the running maximum is finite after the first tile if the scores
 * are. A batch element of key length 0 has no tile, and sums of 0. */

template <int HEAD> struct dtrain_cuda_flash_forward_shape {
    static constexpr int m = 2, rows = 16 * m * DTRAIN_CUDA_FLASH_WARPS;
    static constexpr bool resident = HEAD <= 64;
    static constexpr size_t shared_bytes = (size_t)(rows + 2 * DTRAIN_CUDA_FLASH_KEYS) * HEAD * 2;
};

/* Take one tile of the online softmax (Milakov and Gimelshein, 2018), in powers of 2: p = P of the
 * scores s, as the A of the next product. `top` is the running maximum of the unscaled scores,
 * `sum` this lane's part of the running sum; y and sum are rescaled to the new maximum. */
template <int M, int N, int COLUMNS, typename Half>
static __device__ __forceinline__ void
dtrain_cuda_flash_softmax(uint32_t (&p)[N / 2][M][4], const float (&s)[M][N][4],
                          float (&y)[M][COLUMNS][4], float (&top)[2 * M], float (&sum)[2 * M],
                          float scale2, Half kind)
{
    DTRAIN_CUDA_UNROLL
    for (int part = 0; part < 2 * M; part++) {
        const int m = part / 2, e = part % 2 * 2;
        float highest = top[part];
        DTRAIN_CUDA_UNROLL
        for (int n = 0; n < N; n++) highest = fmaxf(highest, fmaxf(s[m][n][e], s[m][n][e + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(DTRAIN_CUDA_ALL_LANES, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(DTRAIN_CUDA_ALL_LANES, highest, 2));
        const float factor = dtrain_cuda_exp2((top[part] - highest) * scale2),
                    shift = highest * scale2;
        top[part] = highest;
        sum[part] *= factor;
        DTRAIN_CUDA_UNROLL
        for (int n = 0; n < 2 * COLUMNS; n++) y[m][n / 2][e + n % 2] *= factor;
        DTRAIN_CUDA_UNROLL
        for (int n = 0; n < N; n++) {
            const float left = dtrain_cuda_exp2(s[m][n][e] * scale2 - shift);
            const float right = dtrain_cuda_exp2(s[m][n][e + 1] * scale2 - shift);
            sum[part] += left + right;
            p[n / 2][m][n % 2 * 2 + part % 2] = dtrain_cuda_narrow_pair(left, right, kind);
        }
    }
}

/* Divide y by the sum; the first lane of each row stores lse, the log of the sum of exponentials,
 * and its rest. Backward needs no rest: this kernel takes no masks, and scores in the tens of
 * thousands, which would need it, lose far more when rounded to halves. */
template <int M, int COLUMNS>
static __device__ __forceinline__ void
dtrain_cuda_flash_finish(float (&y)[M][COLUMNS][4], const float (&top)[2 * M],
                         const float (&sum)[2 * M], float scale, float *lse, float *rest, int row,
                         int queries)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    DTRAIN_CUDA_UNROLL
    for (int part = 0; part < 2 * M; part++) {
        const int here = row + 8 * part + lane / 4;
        float total = sum[part];
        total += __shfl_xor_sync(DTRAIN_CUDA_ALL_LANES, total, 1);
        total += __shfl_xor_sync(DTRAIN_CUDA_ALL_LANES, total, 2);
        const float inverse = total == 0 ? 0.0f : __fdividef(1, total);
        DTRAIN_CUDA_UNROLL
        for (int n = 0; n < 2 * COLUMNS; n++) y[part / 2][n / 2][part % 2 * 2 + n % 2] *= inverse;
        if (lane % 4 != 0 || here >= queries) continue;
        lse[here] = total == 0 ? INFINITY : top[part] * scale + logf(total);
        if (rest) rest[here] = dtrain_cuda_lse_rest(top[part] * scale, logf(total), lse[here]);
    }
}

template <typename Half, typename Storage, int HEAD>
static __global__ void __launch_bounds__(DTRAIN_CUDA_FLASH_THREADS, 2)
    dtrain_cuda_flash_forward(dtrain_attention_args args, dtrain_cuda_flash_order order,
                              float scale)
{
    typedef dtrain_cuda_flash_forward_shape<HEAD> shape;
    constexpr int keys = DTRAIN_CUDA_FLASH_KEYS, M = shape::m;
    DTRAIN_CUDA_DYNAMIC_SHARED(dtrain_cuda_pack<Half>, q_tile);
    dtrain_cuda_pack<Half> *k_tile = q_tile + shape::rows * HEAD / 8,
                           *v_tile = k_tile + keys * HEAD / 8;

    const dtrain_cuda_flash_work work = dtrain_cuda_flash_work_of<HEAD, false>(order, args.causal);
    const dtrain_cuda_flash_side<const Storage> kv = dtrain_cuda_flash_keys_of<Storage>(args, work);
    const dtrain_cuda_flash_side<const Storage> q = dtrain_cuda_flash_side_of<false>(
        args, work, (const Storage *)args.q, (const Storage *)NULL);
    const int first = (int)work.tile * shape::rows,
              warp_row = (int)threadIdx.x / DTRAIN_CUDA_WARP * 16 * M;
    const int row = first + warp_row,
              end = args.causal ? min(kv.rows, first + shape::rows) : kv.rows;
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    const dtrain_cuda_pack<Half> *own = q_tile + warp_row * HEAD / 8;

    uint32_t q_kept[shape::resident ? HEAD / 16 : 1][M][4];
    float sums[M][HEAD / 8][4] = {}, top[2 * M], sum[2 * M] = {};
    for (int part = 0; part < 2 * M; part++) top[part] = -INFINITY;

    dtrain_cuda_flash_load<HEAD, shape::rows>(q_tile, q.a, q.a_stride, first, q.rows);
    dtrain_cuda_flash_load<HEAD, keys>(k_tile, kv.a, kv.a_stride, 0, kv.rows);
    if (shape::resident) {
        dtrain_cuda_copy_wait();
        __syncthreads();
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < HEAD / 16 * M; i++)
            dtrain_cuda_ldmatrix(q_kept[i / M][i % M],
                                 own + i % M * 2 * HEAD +
                                     dtrain_cuda_flash_lane_rows<HEAD>(lane, i / M));
    }
    for (int key = 0; key < end; key += keys) {
        const bool seen =
            row < q.rows && (!args.causal || key < row + 16 * M); /* by any row of this warp */
        uint32_t p[keys / 16][M][4];
        dtrain_cuda_copy_wait();
        __syncthreads(); /* K is complete, and no warp reads the previous V any more */
        dtrain_cuda_flash_load<HEAD, keys>(v_tile, kv.b, kv.b_stride, key, kv.rows);
        if (seen) {
            float s[M][keys / 8][4];
            dtrain_cuda_flash_scores<HEAD, shape::resident>(s, own, q_kept, k_tile);
            dtrain_cuda_flash_mask<true>(s, row, key, args.causal, kv.rows);
            dtrain_cuda_flash_softmax(p, s, sums, top, sum, scale * DTRAIN_CUDA_LOG2_E, Half());
        }
        dtrain_cuda_copy_wait();
        __syncthreads(); /* V is complete, and no warp reads K any more */
        if (key + keys < end)
            dtrain_cuda_flash_load<HEAD, keys>(k_tile, kv.a, kv.a_stride, key + keys, kv.rows);
        if (seen) dtrain_cuda_flash_accumulate<HEAD>(sums, p, v_tile);
    }
    dtrain_cuda_copy_wait(); /* where there was no key */
    /* compute the output address again: the loop has no free register for it */
    const dtrain_cuda_flash_work own_work =
        dtrain_cuda_flash_work_of<HEAD, false>(order, args.causal);
    const dtrain_cuda_flash_side<Storage> y = dtrain_cuda_flash_side_of<false>(
        args, own_work, (Storage *)NULL, (Storage *)args.y); /* as dY lies */
    dtrain_cuda_flash_finish(sums, top, sum, scale, args.lse + own_work.pair * args.queries,
                             args.lse_rest ? args.lse_rest + own_work.pair * args.queries : NULL,
                             row, y.rows);
    dtrain_cuda_flash_store<HEAD>(y.b, y.b_stride, row, y.rows, sums, 1.0f);
}

/* ---- Backward: statistics of the queries --------------------------------------------------------
 *
 * statistics (batch*heads, 2, queries): lse * log2(e), and D = sum of dY * y over the head. 8 lanes
 * take a query, so that a warp reads whole lines. Moves 2 * rows * n elements. */

template <typename Storage>
static __global__ void dtrain_cuda_flash_statistics(dtrain_attention_args args, const void *d_y,
                                                    float *statistics)
{
    constexpr int width = dtrain_cuda_pack<Storage>::width;
    const int64_t item =
        ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 8; /* of (batch, queries, heads) */
    const int64_t row = item / args.heads, at = item % args.heads;
    const bool inside = row < args.batch * args.queries;
    float dot = 0;
    for (int64_t i = threadIdx.x % 8 * width; i < args.d && inside; i += 8 * width) {
        const dtrain_cuda_pack<Storage> y =
            dtrain_cuda_load<width>((const Storage *)args.y + item * args.d + i);
        const dtrain_cuda_pack<Storage> slope =
            dtrain_cuda_load<width>((const Storage *)d_y + item * args.d + i);
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < width; j++)
            dot += dtrain_cuda_widen(y.at[j]) * dtrain_cuda_widen(slope.at[j]);
    }
    for (int distance = 4; distance > 0; distance /= 2)
        dot += __shfl_xor_sync(DTRAIN_CUDA_ALL_LANES, dot, distance);
    if (inside && threadIdx.x % 8 == 0) {
        const int64_t pair = row / args.queries * args.heads + at, query = row % args.queries;
        statistics[2 * pair * args.queries + query] =
            args.lse[pair * args.queries + query] * DTRAIN_CUDA_LOG2_E;
        statistics[(2 * pair + 1) * args.queries + query] = dot;
    }
}

/* ---- Backward -----------------------------------------------------------------------------------
 *
 * With KEYS the block owns keys and gives dK and dV; else it owns queries and gives dQ. The
 * streamed pair of tiles has two buffers: one barrier for each tile, after which the new buffer is
 * complete and the old one is free.
 *
 * The statistics of a tile of queries are also in shared memory: with KEYS in two buffers, fetched
 * one tile ahead, one number for each thread. After the end of the sequence they are infinity and
 * 0, which make P and dS zero. */

template <int HEAD, bool KEYS> struct dtrain_cuda_flash_backward_shape {
    static constexpr int m = KEYS && HEAD > 64 ? 1 : 2, rows = 16 * m * DTRAIN_CUDA_FLASH_WARPS;
    static constexpr int streamed = 64 / m;
    static constexpr int own_chunks = rows * HEAD / 8, streamed_chunks = streamed * HEAD / 8;
    static constexpr int statistics = KEYS ? 4 * streamed : 2 * rows;
    static constexpr size_t shared_bytes =
        (size_t)(2 * own_chunks + 4 * streamed_chunks) * 16 + statistics * sizeof(float);
};

/* Compute p = P = exp(S - lse) and ds = dS = P (dP - D), as A of the next products. lse2 and dot,
 * in shared memory, belong to the columns of s with KEYS, else to this warp's rows. */
template <bool KEYS, int M, int N, typename Half>
static __device__ __forceinline__ void
dtrain_cuda_flash_gradients(uint32_t (&p)[N / 2][M][4], uint32_t (&ds)[N / 2][M][4],
                            const float (&s)[M][N][4], const float (&dp)[M][N][4], float scale2,
                            const float *lse2, const float *dot, Half kind)
{
    const int lane = dtrain_cuda_not_hoisted(threadIdx.x % DTRAIN_CUDA_WARP);
    DTRAIN_CUDA_UNROLL
    for (int i = 0; i < M * N * 2; i++) {
        const int n = i / (2 * M), part = i % (2 * M), m = part / 2, e = part % 2 * 2;
        float p_pair[2], ds_pair[2];
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < 2; j++) {
            const int query = KEYS ? 8 * n + lane % 4 * 2 + j : 8 * part + lane / 4;
            p_pair[j] = dtrain_cuda_exp2(s[m][n][e + j] * scale2 - lse2[query]);
            ds_pair[j] = p_pair[j] * (dp[m][n][e + j] - dot[query]);
        }
        if (KEYS)
            p[n / 2][m][n % 2 * 2 + part % 2] = dtrain_cuda_narrow_pair(p_pair[0], p_pair[1], kind);
        ds[n / 2][m][n % 2 * 2 + part % 2] = dtrain_cuda_narrow_pair(ds_pair[0], ds_pair[1], kind);
    }
}

/* Give number i of the statistics (2,count) of queries `first` and following. */
static __device__ __forceinline__ float
dtrain_cuda_flash_statistic(const float *statistics, int queries, int i, int count, int first)
{
    const int which = i / count, query = first + i % count;
    if (query >= queries) return which == 0 ? INFINITY : 0.0f;
    return statistics[which * queries + query];
}

template <typename Half, typename Storage, int HEAD, bool KEYS>
static __global__ void __launch_bounds__(DTRAIN_CUDA_FLASH_THREADS, 2)
    dtrain_cuda_flash_backward(dtrain_attention_backward_args pass, dtrain_cuda_flash_order order,
                               const float *statistics, float scale)
{
    typedef dtrain_cuda_flash_backward_shape<HEAD, KEYS> shape;
    constexpr int M = shape::m, width = shape::streamed, tile = shape::streamed_chunks,
                  second = KEYS;
    const dtrain_attention_args &args = pass.forward;
    DTRAIN_CUDA_DYNAMIC_SHARED(dtrain_cuda_pack<Half>, own);        /* 2 tiles: K, V or Q, dY */
    dtrain_cuda_pack<Half> *streamed = own + 2 * shape::own_chunks; /* 2 buffers of 2 tiles */
    float *shared_statistics = reinterpret_cast<float *>(streamed + 4 * tile);

    const dtrain_cuda_flash_work work =
        dtrain_cuda_flash_work_of<HEAD, KEYS>(order, args.causal && !KEYS);
    typedef dtrain_cuda_flash_side<const Storage> side;
    const side keys = dtrain_cuda_flash_keys_of<Storage>(args, work);
    const side queries = dtrain_cuda_flash_side_of<false>(args, work, (const Storage *)args.q,
                                                          (const Storage *)pass.d_y);
    side other = KEYS ? queries : keys; /* what is streamed */
    const int first = (int)work.tile * shape::rows;
    const int warp_row = (int)threadIdx.x / DTRAIN_CUDA_WARP * 16 * M, row = first + warp_row;
    /* With a causal mask a query sees keys up to its own. No query sees keys that do not count. */
    const int begin = args.causal && KEYS ? first : 0;
    const int end = KEYS          ? (first < keys.rows ? queries.rows : 0)
                    : args.causal ? min(keys.rows, first + shape::rows)
                                  : keys.rows;
    /* This warp sees the tiles from `seen` on (KEYS), or before it. */
    const int seen = KEYS ? (args.causal ? row - width + 1 : 0) : args.causal ? row + 16 * M : end;
    const int number = threadIdx.x % (2 * width); /* of a statistic; some threads fetch the same */
    statistics += 2 * work.pair * args.queries;

    float sums[KEYS ? 2 : 1][M][HEAD / 8][4] = {}; /* dK and dV, or dQ */
    dtrain_cuda_flash_load_side<HEAD, shape::rows>(own, KEYS ? keys : queries, first);
    dtrain_cuda_flash_load_side<HEAD, width>(streamed, other, begin);
    float ahead =
        KEYS ? dtrain_cuda_flash_statistic(statistics, queries.rows, number, width, begin) : 0;
    for (int i = threadIdx.x; i < 2 * shape::rows && !KEYS; i += DTRAIN_CUDA_FLASH_THREADS)
        shared_statistics[i] =
            dtrain_cuda_flash_statistic(statistics, queries.rows, i, shape::rows, first);

    int buffer = 0, left = KEYS ? (int)order.sharing - 1 : 0, next; /* left: heads of queries */
    for (int at = begin; at < end; at = next, buffer ^= 1) {
        next = at + width;
        /* after the last query of a head follows the next head that shares the keys */
        if (KEYS && next >= end && left > 0)
            left--, next = begin, other.a += HEAD, other.b += HEAD, statistics += 2 * queries.rows;
        const dtrain_cuda_pack<Half> *tiles = streamed + buffer * 2 * tile;
        float *lse2 = shared_statistics + (KEYS ? buffer * 2 * width : warp_row);
        if (KEYS) lse2[number] = ahead;
        dtrain_cuda_copy_wait();
        __syncthreads();
        if (next < end) {
            dtrain_cuda_flash_load_side<HEAD, width>(streamed + (buffer ^ 1) * 2 * tile, other,
                                                     next);
            if (KEYS)
                ahead = dtrain_cuda_flash_statistic(statistics, queries.rows, number, width, next);
        }
        if (KEYS ? at < seen : at >= seen) continue;

        float s[M][width / 8][4], dp[M][width / 8][4];
        uint32_t p[width / 16][M][4], ds[width / 16][M][4];
        const dtrain_cuda_pack<Half> *own_rows = own + warp_row * HEAD / 8;
        dtrain_cuda_flash_scores<HEAD, false>(s, own_rows, p, tiles);
        __syncwarp(); /* S before dP: loads for both at once would not fit in the registers */
        dtrain_cuda_flash_scores<HEAD, false>(dp, own_rows + shape::own_chunks, p, tiles + tile);
        dtrain_cuda_flash_mask<!KEYS>(s, KEYS ? at : row, KEYS ? row : at, args.causal, keys.rows);
        dtrain_cuda_flash_gradients<KEYS>(p, ds, s, dp, scale * DTRAIN_CUDA_LOG2_E, lse2,
                                          lse2 + (KEYS ? width : shape::rows), Half());
        if (KEYS) dtrain_cuda_flash_accumulate<HEAD>(sums[second], p, tiles + tile);
        dtrain_cuda_flash_accumulate<HEAD>(sums[0], ds, tiles);
    }
    dtrain_cuda_copy_wait(); /* where the loop was empty */
    const dtrain_cuda_flash_work own_work =
        dtrain_cuda_flash_work_of<HEAD, KEYS>(order, args.causal && !KEYS);
    const dtrain_cuda_flash_side<Storage> to =
        dtrain_cuda_flash_side_of<KEYS>(args, own_work, (Storage *)(KEYS ? pass.d_k : pass.d_q),
                                        (Storage *)(KEYS ? pass.d_v : NULL));
    if (to.a) dtrain_cuda_flash_store<HEAD>(to.a, to.a_stride, row, to.rows, sums[0], scale);
    if (to.b) dtrain_cuda_flash_store<HEAD>(to.b, to.b_stride, row, to.rows, sums[second], 1);
}

/* ---- Launchers --------------------------------------------------------------------------------*/

/* Ask for more than the 48 KiB of dynamic shared memory that a kernel has without asking. */
template <typename Kernel>
static dtrain_result dtrain_cuda_flash_allow(Kernel kernel, size_t shared_bytes)
{
    return dtrain_cuda_check(cudaFuncSetAttribute((const void *)kernel,
                                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  (int)shared_bytes),
                             "cudaFuncSetAttribute of flash attention");
}

template <typename Half, typename Storage, int HEAD>
static dtrain_result dtrain_cuda_flash_run(dtrain_device *device, const dtrain_attention_args *args)
{
    typedef dtrain_cuda_flash_forward_shape<HEAD> shape;
    const dtrain_cuda_flash_order order = dtrain_cuda_flash_order_of(args, shape::rows, false);
    const auto kernel = dtrain_cuda_flash_forward<Half, Storage, HEAD>;
    DTRAIN_CUDA_TRY(dtrain_cuda_flash_allow(kernel, shape::shared_bytes));
    return DTRAIN_CUDA_RUN(device, "attention", kernel, (int64_t)order.pairs * order.tiles,
                           DTRAIN_CUDA_FLASH_THREADS, shape::shared_bytes, *args, order,
                           (float)(1 / sqrt((double)HEAD)));
}

template <typename Half, typename Storage, int HEAD, bool KEYS>
static dtrain_result dtrain_cuda_flash_run_side(dtrain_device *device,
                                                const dtrain_attention_backward_args *pass,
                                                const float *statistics)
{
    typedef dtrain_cuda_flash_backward_shape<HEAD, KEYS> shape;
    const dtrain_cuda_flash_order order =
        dtrain_cuda_flash_order_of(&pass->forward, shape::rows, KEYS);
    const auto kernel = dtrain_cuda_flash_backward<Half, Storage, HEAD, KEYS>;
    DTRAIN_CUDA_TRY(dtrain_cuda_flash_allow(kernel, shape::shared_bytes));
    return DTRAIN_CUDA_RUN(
        device, KEYS ? "attention_backward (keys)" : "attention_backward (queries)", kernel,
        (int64_t)order.pairs * order.tiles, DTRAIN_CUDA_FLASH_THREADS, shape::shared_bytes, *pass,
        order, statistics, (float)(1 / sqrt((double)HEAD)));
}

template <typename Half, typename Storage, int HEAD>
static dtrain_result dtrain_cuda_flash_run(dtrain_device *device,
                                           const dtrain_attention_backward_args *pass)
{
    const dtrain_attention_args *args = &pass->forward;
    const int64_t queries = args->batch * args->heads * args->queries;
    void *scratch;
    DTRAIN_CUDA_TRY(dtrain_cuda_scratch(device, (size_t)queries * 2 * sizeof(float), &scratch));
    float *statistics = (float *)scratch;
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(
        device, "attention_backward (statistics)", dtrain_cuda_flash_statistics<Storage>,
        (queries * 8 + 255) / 256, 256, 0, *args, pass->d_y, statistics));
    if (pass->d_k || pass->d_v)
        DTRAIN_CUDA_TRY(
            (dtrain_cuda_flash_run_side<Half, Storage, HEAD, true>(device, pass, statistics)));
    if (!pass->d_q) return DTRAIN_OK;
    return dtrain_cuda_flash_run_side<Half, Storage, HEAD, false>(device, pass, statistics);
}

template <typename Half, typename Storage, typename Args>
static dtrain_result dtrain_cuda_flash_by_head(dtrain_device *device, int64_t head,
                                               const Args *args)
{
    switch (head) {
    case 32: return dtrain_cuda_flash_run<Half, Storage, 32>(device, args);
    case 64: return dtrain_cuda_flash_run<Half, Storage, 64>(device, args);
    case 80: return dtrain_cuda_flash_run<Half, Storage, 80>(device, args);
    case 96: return dtrain_cuda_flash_run<Half, Storage, 96>(device, args);
    default: return dtrain_cuda_flash_run<Half, Storage, 128>(device, args);
    }
}

/* Args is the argument struct of forward or backward, `forward` their common part. */
template <typename Args>
static dtrain_result dtrain_cuda_flash(dtrain_device *device, const dtrain_attention_args *forward,
                                       const Args *args)
{
    const int64_t head = forward->d;
    if (forward->batch == 0 || forward->queries == 0 || forward->keys == 0) return DTRAIN_OK;
    if (forward->dtype == DTRAIN_DTYPE_BF16)
        return dtrain_cuda_flash_by_head<dtrain_cuda_bf16, dtrain_cuda_bf16>(device, head, args);
    if (forward->dtype == DTRAIN_DTYPE_F16)
        return dtrain_cuda_flash_by_head<dtrain_cuda_f16, dtrain_cuda_f16>(device, head, args);
    return dtrain_cuda_flash_by_head<dtrain_cuda_bf16, float>(device, head, args);
}

/* Rows of 16-byte chunks whose products inside a tile fit 32 bits. */
static bool dtrain_cuda_flash_rows(const void *matrix, int64_t stride)
{
    return dtrain_cuda_aligned(matrix) && stride % 8 == 0 && stride <= 3 << 24;
}

/* Decide whether these kernels take an attention. attention_gemm.cuh takes the rest: a mask, other
 * head sizes, fp32 arithmetic, rows that do not begin at multiples of 16 bytes, GPUs before Ampere
 * or code for them, little shared memory, numbers of rows or columns whose products inside a tile
 * can exceed 32 bits, and heads of queries that cannot share heads of keys equally, which is an
 * error. */
static bool dtrain_cuda_flash_takes(const dtrain_cuda_state *state,
                                    const dtrain_attention_args *args)
{
    const int64_t head = args->d;
    const bool halves = args->dtype == DTRAIN_DTYPE_BF16 || args->dtype == DTRAIN_DTYPE_F16;
    const bool narrowed = args->dtype == DTRAIN_DTYPE_F32 && state->math == DTRAIN_MATH_BF16;
    if (args->heads < 1 || args->kv_heads < 1 || args->heads % args->kv_heads) return false;
    return (head == 32 || head == 64 || head == 80 || head == 96 || head == 128) && !args->mask &&
           (halves || narrowed) && state->code_version >= 80 &&
           state->shared_limit >= dtrain_cuda_flash_backward_shape<128, true>::shared_bytes &&
           dtrain_cuda_flash_rows(args->q, args->q_stride) &&
           dtrain_cuda_flash_rows(args->k, args->k_stride) &&
           dtrain_cuda_flash_rows(args->v, args->v_stride) && dtrain_cuda_aligned(args->y) &&
           args->queries <= 1 << 30 && args->keys <= 1 << 30 && args->heads * head <= 1 << 24;
}

static dtrain_result dtrain_cuda_attention(dtrain_device *device, const dtrain_attention_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_check_key_lengths(device, args));
    if (!dtrain_cuda_flash_takes(dtrain_cuda_state_of(device), args))
        return dtrain_cuda_attention_gemm(device, args);
    return dtrain_cuda_flash(device, args, args);
}

static dtrain_result dtrain_cuda_attention_backward(dtrain_device *device,
                                                    const dtrain_attention_backward_args *pass)
{
    if (!dtrain_cuda_flash_takes(dtrain_cuda_state_of(device), &pass->forward) ||
        !dtrain_cuda_aligned(pass->d_y) || !dtrain_cuda_aligned(pass->d_q) ||
        !dtrain_cuda_aligned(pass->d_k) || !dtrain_cuda_aligned(pass->d_v))
        return dtrain_cuda_attention_gemm_backward(device, pass);
    return dtrain_cuda_flash(device, &pass->forward, pass);
}

/* ==== src/device/cuda/sparse.cuh ============================================================== */

/* Sparse gradients: top-k and scatter-add
 *
 * Top-k by magnitude: an exact radix select that reads the elements twice, without the host.
 *
 * The key of an element is its magnitude as an integer, 31 bits; every NaN has the largest key. The
 * k-th largest key is found digit by digit (11, 10, 10 bits) from histograms of the keys that agree
 * with the digits found so far.
 *
 *     fold      velocity, residual += x; histogram of digit 0, of all and of each tile of elements
 *     offsets   digit 0; the candidates (digit 0 equal or above) of each tile -> their places
 *     gather    candidates in order -> side buffer; histogram of digit 1 of those that are equal
 *     narrow    digit 1; histogram of digit 2
 *     count     digit 2, so the key itself; counts for each tile how many are above, how many equal
 *     write     those above, and the first of those equal, in order -> values, indices; residual
 *               and velocity 0 there
 *
 * Order without sorting: tiles are counted, the counts are summed over the tiles (by the block that
 * finishes last), and within a tile a block ranks its elements in order. So indices ascend, and
 * among equals the lowest are taken.
 *
 * The side buffer has room for k + count/8 + 4096 candidates. A bucket of digit 0 is an eighth of
 * an octave: no more than 6 % of normally distributed numbers. If the candidates do not fit (all
 * magnitudes equal), gather stores nothing, and narrow, count and write read the elements: same
 * result, three more reads.
 *
 * Bytes for n = count, with residual: fold 12 n, gather 4 n, together 16 n, and some 40 bytes for
 * each candidate; with velocity 24 n; without residual 8 n. Scratch: 8 bytes for each candidate
 * there is room for, 4 KiB for each tile. */

enum {
    DTRAIN_CUDA_TOPK_THREADS = 512,
    DTRAIN_CUDA_TOPK_ROUND =
        4 * DTRAIN_CUDA_TOPK_THREADS, /* elements of a block's step: 4 of each thread */
    DTRAIN_CUDA_TOPK_TILE = 32768,    /* at most: its counts fit 16 bits */
    DTRAIN_CUDA_TOPK_BINS = 2048,     /* of digit 0; digits 1 and 2 use the first 1024 */
    DTRAIN_CUDA_TOPK_COPIES = 2       /* of a histogram in shared memory: fewer collisions */
};

/* The state of the search for the k-th largest key after a digit. */
struct dtrain_cuda_topk_level {
    unsigned prefix; /* its digits so far */
    unsigned need;   /* keys with that prefix to take; all keys above it are taken */
};

/* The counters of one selection, zeroed before it. */
struct dtrain_cuda_topk_state {
    unsigned histograms[3][DTRAIN_CUDA_TOPK_BINS];
    dtrain_cuda_topk_level levels[3];
    unsigned finished[2]; /* blocks of offsets, of count */
    unsigned candidates;
};

struct dtrain_cuda_topk_plan {
    dtrain_topk_args args;
    unsigned count, tile, tiles, capacity; /* capacity: of the side buffer */
    bool wide;                             /* x, residual and velocity are 16-byte aligned */
    const float *source; /* (count) what is selected from: residual, or x without it */
    dtrain_cuda_topk_state *state;
    uint16_t *tile_histograms;  /* (tiles, DTRAIN_CUDA_TOPK_BINS) */
    unsigned *offsets, *equals; /* (tiles) first counts, then sums over the tiles before */
    float *side_values;         /* (capacity) */
    int32_t *side_indices;      /* (capacity) */
};

static __device__ __forceinline__ unsigned dtrain_cuda_magnitude(float x)
{
    const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
    return bits > 0x7f800000u ? 0x7fffffffu : bits;
}

/* Return the lowest bit of digit `level`; earlier digits are above it. */
static __device__ __forceinline__ constexpr int dtrain_cuda_topk_shift(int level)
{
    return 20 - 10 * level;
}

/* Load elements [at, at + 4), with 0 for elements from `end` on. */
static __device__ __forceinline__ dtrain_cuda_pack<float>
dtrain_cuda_load_four(const float *from, unsigned at, unsigned end, bool wide)
{
    dtrain_cuda_pack<float> four;
    if (wide && at < end && end - at >= 4) return dtrain_cuda_load<4>(from + at);
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < 4; e++) four.at[e] = at < end && end - at > (unsigned)e ? from[at + e] : 0;
    return four;
}

/* Store elements [at, at + 4), without elements from `end` on. */
static __device__ __forceinline__ void dtrain_cuda_store_four(float *to, unsigned at, unsigned end,
                                                              bool wide,
                                                              const dtrain_cuda_pack<float> &four)
{
    if (wide && at < end && end - at >= 4) dtrain_cuda_store(to + at, four);
    else {
        DTRAIN_CUDA_UNROLL
        for (int e = 0; e < 4; e++)
            if (at < end && end - at > (unsigned)e) to[at + e] = four.at[e];
    }
}

/* ---- Histograms -------------------------------------------------------------------------------*/

static __device__ __forceinline__ void
dtrain_cuda_topk_clear(unsigned (*bins)[DTRAIN_CUDA_TOPK_COPIES], int count)
{
    for (int bin = threadIdx.x; bin < count; bin += blockDim.x)
        for (int copy = 0; copy < DTRAIN_CUDA_TOPK_COPIES; copy++) bins[bin][copy] = 0;
    __syncthreads();
}

static __device__ __forceinline__ void
dtrain_cuda_topk_tally(unsigned (*bins)[DTRAIN_CUDA_TOPK_COPIES], unsigned digit)
{
    atomicAdd(&bins[digit][threadIdx.x % DTRAIN_CUDA_TOPK_COPIES], 1u);
}

static __device__ __forceinline__ unsigned
dtrain_cuda_topk_bin(unsigned (*bins)[DTRAIN_CUDA_TOPK_COPIES], int bin)
{
    unsigned sum = 0;
    for (int copy = 0; copy < DTRAIN_CUDA_TOPK_COPIES; copy++) sum += bins[bin][copy];
    return sum;
}

/* Add a block's histogram to the histogram of all blocks: integers, so their order does not
 * matter. */
static __device__ __forceinline__ void
dtrain_cuda_topk_publish(unsigned (*bins)[DTRAIN_CUDA_TOPK_COPIES], int count, unsigned *to)
{
    __syncthreads();
    for (int bin = threadIdx.x; bin < count; bin += blockDim.x) {
        const unsigned sum = dtrain_cuda_topk_bin(bins, bin);
        if (sum) atomicAdd(to + bin, sum);
    }
}

/* Find the digit of the need-th largest key, from the largest down: each thread sums a share of the
 * bins, and the thread whose share holds that key finds the bin. Every block does it for itself. */
static __device__ __forceinline__ dtrain_cuda_topk_level dtrain_cuda_topk_pick(
    const unsigned *histogram, int bins, dtrain_cuda_topk_level before, unsigned *slots)
{
    __shared__ dtrain_cuda_topk_level found;
    const int share = bins / DTRAIN_CUDA_TOPK_THREADS, last = bins - 1 - (int)threadIdx.x * share;
    unsigned sum = 0, total;
    for (int i = 0; i < share; i++) sum += histogram[last - i];
    unsigned above = dtrain_cuda_block_scan(sum, slots, &total);
    if (above < before.need && before.need - above <= sum) {
        int bin = last;
        while (before.need - above > histogram[bin]) above += histogram[bin--];
        found.prefix = before.prefix * bins + bin;
        found.need = before.need - above;
    }
    __syncthreads();
    return found;
}

/* ---- Read 1: fold -----------------------------------------------------------------------------*/

static __global__ void __launch_bounds__(DTRAIN_CUDA_TOPK_THREADS)
    dtrain_cuda_topk_fold_kernel(dtrain_cuda_topk_plan topk)
{
    __shared__ unsigned bins[DTRAIN_CUDA_TOPK_BINS][DTRAIN_CUDA_TOPK_COPIES];
    for (unsigned tile = blockIdx.x; tile < topk.tiles; tile += gridDim.x) {
        const unsigned begin = tile * topk.tile,
                       end = topk.count - begin < topk.tile ? topk.count : begin + topk.tile;
        dtrain_cuda_topk_clear(bins, DTRAIN_CUDA_TOPK_BINS);
        for (unsigned first = begin; first < end; first += DTRAIN_CUDA_TOPK_ROUND) {
            const unsigned at = first + 4 * threadIdx.x;
            dtrain_cuda_pack<float> x = dtrain_cuda_load_four(topk.args.x, at, end, topk.wide);
            if (topk.args.velocity) {
                const dtrain_cuda_pack<float> old =
                    dtrain_cuda_load_four(topk.args.velocity, at, end, topk.wide);
                DTRAIN_CUDA_UNROLL
                for (int e = 0; e < 4; e++) /* rounded twice, as on the CPU: not fused */
                    x.at[e] = __fadd_rn(__fmul_rn(topk.args.momentum, old.at[e]), x.at[e]);
                dtrain_cuda_store_four(topk.args.velocity, at, end, topk.wide, x);
            }
            if (topk.args.residual) {
                const dtrain_cuda_pack<float> old =
                    dtrain_cuda_load_four(topk.args.residual, at, end, topk.wide);
                DTRAIN_CUDA_UNROLL
                for (int e = 0; e < 4; e++) x.at[e] = old.at[e] + x.at[e];
                dtrain_cuda_store_four(topk.args.residual, at, end, topk.wide, x);
            }
            DTRAIN_CUDA_UNROLL
            for (int e = 0; e < 4; e++)
                if (at < end && end - at > (unsigned)e)
                    dtrain_cuda_topk_tally(bins, dtrain_cuda_magnitude(x.at[e]) >>
                                                     dtrain_cuda_topk_shift(0));
        }
        dtrain_cuda_topk_publish(bins, DTRAIN_CUDA_TOPK_BINS, topk.state->histograms[0]);
        /* No barrier needed: the next clear gives each bin to the thread that reads it here. */
        uint16_t *const own = topk.tile_histograms + (int64_t)tile * DTRAIN_CUDA_TOPK_BINS;
        for (int bin = threadIdx.x; bin < DTRAIN_CUDA_TOPK_BINS; bin += blockDim.x)
            own[bin] = (uint16_t)dtrain_cuda_topk_bin(bins, bin);
    }
}

/* ---- Offsets ----------------------------------------------------------------------------------*/

/* Return true in the last block of the grid to call; that block sees what the others wrote
 * before. */
static __device__ __forceinline__ bool dtrain_cuda_topk_last(unsigned *finished)
{
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(finished, 1u) == gridDim.x - 1;
    __syncthreads();
    if (last) __threadfence();
    return last;
}

static __global__ void __launch_bounds__(DTRAIN_CUDA_TOPK_THREADS)
    dtrain_cuda_topk_offsets_kernel(dtrain_cuda_topk_plan topk)
{
    __shared__ unsigned slots[DTRAIN_CUDA_WARP];
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP, warps = blockDim.x / DTRAIN_CUDA_WARP;
    dtrain_cuda_topk_state *const state = topk.state;
    const unsigned *const histogram = state->histograms[0];
    const dtrain_cuda_topk_level start = {0, (unsigned)topk.args.k};
    const dtrain_cuda_topk_level level =
        dtrain_cuda_topk_pick(histogram, DTRAIN_CUDA_TOPK_BINS, start, slots);
    for (unsigned tile = blockIdx.x * warps + threadIdx.x / DTRAIN_CUDA_WARP; tile < topk.tiles;
         tile += gridDim.x * warps) {
        const uint16_t *const own = topk.tile_histograms + (int64_t)tile * DTRAIN_CUDA_TOPK_BINS;
        unsigned sum = 0;
        for (int bin = (int)level.prefix + lane; bin < DTRAIN_CUDA_TOPK_BINS;
             bin += DTRAIN_CUDA_WARP)
            sum += own[bin];
        sum = dtrain_cuda_warp_sum(sum);
        if (lane == 0) topk.offsets[tile] = sum;
    }
    if (!dtrain_cuda_topk_last(&state->finished[0])) return;
    dtrain_cuda_scan_counts(topk.offsets, topk.tiles, slots);
    if (threadIdx.x != 0) return;
    state->levels[0] = level;
    state->candidates = (unsigned)topk.args.k - level.need + histogram[level.prefix];
}

/* ---- Read 2: gather ---------------------------------------------------------------------------*/

static __global__ void __launch_bounds__(DTRAIN_CUDA_TOPK_THREADS)
    dtrain_cuda_topk_gather_kernel(dtrain_cuda_topk_plan topk)
{
    __shared__ unsigned bins[DTRAIN_CUDA_TOPK_BINS / 2][DTRAIN_CUDA_TOPK_COPIES],
        slots[DTRAIN_CUDA_WARP];
    const unsigned prefix = topk.state->levels[0].prefix;
    const bool fits = topk.state->candidates <= topk.capacity;
    dtrain_cuda_topk_clear(bins, DTRAIN_CUDA_TOPK_BINS / 2);
    for (unsigned tile = blockIdx.x; tile < topk.tiles; tile += gridDim.x) {
        const unsigned begin = tile * topk.tile,
                       end = topk.count - begin < topk.tile ? topk.count : begin + topk.tile;
        unsigned next = topk.offsets[tile]; /* place of the tile's next candidate */
        for (unsigned first = begin; first < end; first += DTRAIN_CUDA_TOPK_ROUND) {
            const unsigned at = first + 4 * threadIdx.x;
            const dtrain_cuda_pack<float> x =
                dtrain_cuda_load_four(topk.source, at, end, topk.wide);
            unsigned taken = 0, total;
            DTRAIN_CUDA_UNROLL
            for (int e = 0; e < 4; e++) {
                const unsigned key = dtrain_cuda_magnitude(x.at[e]),
                               digit = key >> dtrain_cuda_topk_shift(0);
                if (at >= end || end - at <= (unsigned)e || digit < prefix) continue;
                taken |= 1u << e;
                if (digit == prefix)
                    dtrain_cuda_topk_tally(bins, key >> dtrain_cuda_topk_shift(1) & 1023);
            }
            if (!fits) continue;
            unsigned to = next + dtrain_cuda_block_scan(__popc(taken), slots, &total);
            DTRAIN_CUDA_UNROLL
            for (int e = 0; e < 4; e++) {
                if (!(taken >> e & 1)) continue;
                topk.side_values[to] = x.at[e];
                topk.side_indices[to++] = (int32_t)(at + e);
            }
            next += total;
        }
    }
    dtrain_cuda_topk_publish(bins, DTRAIN_CUDA_TOPK_BINS / 2, topk.state->histograms[1]);
}

/* ---- The candidates ---------------------------------------------------------------------------*/

/* The candidates, in order of their indices: the side buffer, or all elements if it was too small.
 */
struct dtrain_cuda_topk_pool {
    const float *values;
    const int32_t *indices; /* NULL: an element's index is its place */
    unsigned count, tiles;
    bool wide;
};

static __device__ __forceinline__ dtrain_cuda_topk_pool
dtrain_cuda_topk_pool_of(const dtrain_cuda_topk_plan &topk)
{
    const unsigned candidates = topk.state->candidates;
    dtrain_cuda_topk_pool pool = {topk.source, NULL, topk.count, topk.tiles, topk.wide};
    if (candidates > topk.capacity) return pool;
    pool.values = topk.side_values;
    pool.indices = topk.side_indices;
    pool.count = candidates;
    pool.tiles = (candidates + topk.tile - 1) / topk.tile;
    pool.wide = true;
    return pool;
}

static __global__ void __launch_bounds__(DTRAIN_CUDA_TOPK_THREADS)
    dtrain_cuda_topk_narrow_kernel(dtrain_cuda_topk_plan topk)
{
    __shared__ unsigned bins[DTRAIN_CUDA_TOPK_BINS / 2][DTRAIN_CUDA_TOPK_COPIES],
        slots[DTRAIN_CUDA_WARP];
    const dtrain_cuda_topk_level level =
        dtrain_cuda_topk_pick(topk.state->histograms[1], 1024, topk.state->levels[0], slots);
    const dtrain_cuda_topk_pool pool = dtrain_cuda_topk_pool_of(topk);
    dtrain_cuda_topk_clear(bins, DTRAIN_CUDA_TOPK_BINS / 2);
    for (int64_t first = (int64_t)blockIdx.x * DTRAIN_CUDA_TOPK_ROUND; first < pool.count;
         first += (int64_t)gridDim.x * DTRAIN_CUDA_TOPK_ROUND) {
        const unsigned at = (unsigned)first + 4 * threadIdx.x;
        const dtrain_cuda_pack<float> x =
            dtrain_cuda_load_four(pool.values, at, pool.count, pool.wide);
        DTRAIN_CUDA_UNROLL
        for (int e = 0; e < 4; e++) {
            const unsigned key = dtrain_cuda_magnitude(x.at[e]);
            if (at < pool.count && pool.count - at > (unsigned)e &&
                key >> dtrain_cuda_topk_shift(1) == level.prefix)
                dtrain_cuda_topk_tally(bins, key & 1023);
        }
    }
    dtrain_cuda_topk_publish(bins, DTRAIN_CUDA_TOPK_BINS / 2, topk.state->histograms[2]);
    if (blockIdx.x == 0 && threadIdx.x == 0) topk.state->levels[1] = level;
}

/* Count among four elements, in 16 bits each: how many are above the key (low half), how many equal
 * it. */
static __device__ __forceinline__ unsigned
dtrain_cuda_topk_classify(const dtrain_cuda_pack<float> &x, unsigned at, unsigned end, unsigned key)
{
    unsigned counts = 0;
    DTRAIN_CUDA_UNROLL
    for (int e = 0; e < 4; e++) {
        if (at >= end || end - at <= (unsigned)e) continue;
        const unsigned own = dtrain_cuda_magnitude(x.at[e]);
        counts += own > key ? 1u : own == key ? 1u << 16 : 0;
    }
    return counts;
}

static __global__ void __launch_bounds__(DTRAIN_CUDA_TOPK_THREADS)
    dtrain_cuda_topk_count_kernel(dtrain_cuda_topk_plan topk)
{
    __shared__ unsigned slots[DTRAIN_CUDA_WARP];
    const dtrain_cuda_topk_level level =
        dtrain_cuda_topk_pick(topk.state->histograms[2], 1024, topk.state->levels[1], slots);
    const dtrain_cuda_topk_pool pool = dtrain_cuda_topk_pool_of(topk);
    for (unsigned tile = blockIdx.x; tile < pool.tiles; tile += gridDim.x) {
        const unsigned begin = tile * topk.tile,
                       end = pool.count - begin < topk.tile ? pool.count : begin + topk.tile;
        unsigned above = 0, equal = 0;
        for (unsigned at = begin + 4 * threadIdx.x; at < end; at += DTRAIN_CUDA_TOPK_ROUND) {
            const dtrain_cuda_pack<float> x =
                dtrain_cuda_load_four(pool.values, at, end, pool.wide);
            const unsigned counts = dtrain_cuda_topk_classify(x, at, end, level.prefix);
            above += counts & 0xffff;
            equal += counts >> 16;
        }
        above = dtrain_cuda_block_sum(above, slots);
        equal = dtrain_cuda_block_sum(equal, slots);
        if (threadIdx.x == 0) topk.offsets[tile] = above, topk.equals[tile] = equal;
    }
    if (!dtrain_cuda_topk_last(&topk.state->finished[1])) return;
    dtrain_cuda_scan_counts(topk.offsets, pool.tiles, slots);
    dtrain_cuda_scan_counts(topk.equals, pool.tiles, slots);
    if (threadIdx.x == 0) topk.state->levels[2] = level;
}

static __global__ void __launch_bounds__(DTRAIN_CUDA_TOPK_THREADS)
    dtrain_cuda_topk_write_kernel(dtrain_cuda_topk_plan topk)
{
    __shared__ unsigned slots[DTRAIN_CUDA_WARP];
    const dtrain_cuda_topk_pool pool = dtrain_cuda_topk_pool_of(topk);
    const dtrain_cuda_topk_level level = topk.state->levels[2];
    for (unsigned tile = blockIdx.x; tile < pool.tiles; tile += gridDim.x) {
        const unsigned begin = tile * topk.tile,
                       end = pool.count - begin < topk.tile ? pool.count : begin + topk.tile;
        unsigned above = topk.offsets[tile], equal = topk.equals[tile]; /* before this element */
        for (unsigned first = begin; first < end; first += DTRAIN_CUDA_TOPK_ROUND) {
            const unsigned at = first + 4 * threadIdx.x;
            const dtrain_cuda_pack<float> x =
                dtrain_cuda_load_four(pool.values, at, end, pool.wide);
            unsigned total;
            const unsigned before = dtrain_cuda_block_scan(
                dtrain_cuda_topk_classify(x, at, end, level.prefix), slots, &total);
            unsigned own_above = above + (before & 0xffff), own_equal = equal + (before >> 16);
            DTRAIN_CUDA_UNROLL
            for (int e = 0; e < 4; e++) {
                if (at >= end || end - at <= (unsigned)e) continue;
                const unsigned key = dtrain_cuda_magnitude(x.at[e]);
                const unsigned to = own_above + (own_equal < level.need ? own_equal : level.need);
                const bool takes =
                    key > level.prefix || (key == level.prefix && own_equal < level.need);
                own_above += key > level.prefix;
                own_equal += key == level.prefix;
                if (!takes) continue;
                const int32_t index = pool.indices ? pool.indices[at + e] : (int32_t)(at + e);
                topk.args.values[to] = x.at[e];
                topk.args.indices[to] = index;
                if (topk.args.residual) topk.args.residual[index] = 0;
                if (topk.args.velocity) topk.args.velocity[index] = 0;
            }
            above += total & 0xffff;
            equal += total >> 16;
        }
    }
}

/* ---- Host -------------------------------------------------------------------------------------*/

/* Choose the largest tile that gives every block the same number of tiles. */
static unsigned dtrain_cuda_topk_tile(int64_t count, int64_t blocks)
{
    const int64_t turns =
        (count + blocks * DTRAIN_CUDA_TOPK_TILE - 1) / (blocks * DTRAIN_CUDA_TOPK_TILE);
    const int64_t tile = (count + blocks * turns - 1) / (blocks * turns),
                  least = 2 * DTRAIN_CUDA_TOPK_ROUND;
    if (tile < least) return (unsigned)least;
    return (unsigned)((tile + DTRAIN_CUDA_TOPK_ROUND - 1) / DTRAIN_CUDA_TOPK_ROUND *
                      DTRAIN_CUDA_TOPK_ROUND);
}

static size_t dtrain_cuda_topk_take(size_t *used, size_t bytes)
{
    const size_t begin = *used;
    *used += (bytes + 255) / 256 * 256;
    return begin;
}

static dtrain_result dtrain_cuda_topk_lay_out(dtrain_device *device, dtrain_cuda_topk_plan *topk)
{
    const int64_t capacity = topk->args.k + topk->args.count / 8 + 4096;
    topk->capacity = (unsigned)(capacity < topk->args.count ? capacity : topk->args.count);
    size_t bytes = 0;
    const size_t state = dtrain_cuda_topk_take(&bytes, sizeof(dtrain_cuda_topk_state));
    const size_t histograms = dtrain_cuda_topk_take(
        &bytes, (size_t)topk->tiles * DTRAIN_CUDA_TOPK_BINS * sizeof(uint16_t));
    const size_t offsets = dtrain_cuda_topk_take(&bytes, (size_t)topk->tiles * sizeof(unsigned));
    const size_t equals = dtrain_cuda_topk_take(&bytes, (size_t)topk->tiles * sizeof(unsigned));
    const size_t values = dtrain_cuda_topk_take(&bytes, (size_t)topk->capacity * sizeof(float));
    const size_t indices = dtrain_cuda_topk_take(&bytes, (size_t)topk->capacity * sizeof(int32_t));
    void *scratch;
    DTRAIN_CUDA_TRY(dtrain_cuda_scratch(device, bytes, &scratch));
    topk->state = (dtrain_cuda_topk_state *)((char *)scratch + state);
    topk->tile_histograms = (uint16_t *)((char *)scratch + histograms);
    topk->offsets = (unsigned *)((char *)scratch + offsets);
    topk->equals = (unsigned *)((char *)scratch + equals);
    topk->side_values = (float *)((char *)scratch + values);
    topk->side_indices = (int32_t *)((char *)scratch + indices);
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_topk_select(dtrain_device *device, const dtrain_topk_args *args)
{
    static constexpr int threads = DTRAIN_CUDA_TOPK_THREADS;
    const dtrain_cuda_state *const device_state = dtrain_cuda_state_of(device);
    const int64_t most = (int64_t)device_state->multiprocessors * (2048 / threads);
    dtrain_cuda_topk_plan topk = {};
    topk.args = *args;
    topk.count = (unsigned)args->count;
    topk.tile = dtrain_cuda_topk_tile(args->count, most);
    topk.tiles = (topk.count + topk.tile - 1) / topk.tile;
    topk.source = args->residual ? args->residual : args->x;
    topk.wide = dtrain_cuda_aligned(args->x) && dtrain_cuda_aligned(args->residual) &&
                dtrain_cuda_aligned(args->velocity);
    DTRAIN_CUDA_TRY(dtrain_cuda_topk_lay_out(device, &topk));
    const int64_t blocks = topk.tiles < most ? topk.tiles : most;
    DTRAIN_CUDA_TRY(dtrain_cuda_check(
        cudaMemsetAsync(topk.state, 0, sizeof *topk.state, device_state->stream), "topk, clear"));
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "topk, fold", dtrain_cuda_topk_fold_kernel, blocks,
                                    threads, 0, topk));
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "topk, offsets", dtrain_cuda_topk_offsets_kernel,
                                    (blocks + 15) / 16, threads, 0, topk));
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "topk, gather", dtrain_cuda_topk_gather_kernel, blocks,
                                    threads, 0, topk));
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "topk, narrow", dtrain_cuda_topk_narrow_kernel, blocks,
                                    threads, 0, topk));
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "topk, count", dtrain_cuda_topk_count_kernel, blocks,
                                    threads, 0, topk));
    return DTRAIN_CUDA_RUN(device, "topk, write", dtrain_cuda_topk_write_kernel, blocks, threads, 0,
                           topk);
}

static dtrain_result dtrain_cuda_topk(dtrain_device *device, const dtrain_topk_args *args)
{
    if (args->count > INT32_MAX || args->k < 1 || args->k > args->count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "topk: k is %lld of %lld; expected 1 to count, below 2^31",
                           (long long)args->k, (long long)args->count);
    if (args->velocity && !args->residual)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "topk: velocity needs a residual");
    return dtrain_cuda_topk_select(device, args);
}

/* ---- Scatter-add --------------------------------------------------------------------------------
 *
 * values, indices (k), out (count). Indices differ, so each element of out has one writer. Bytes: 8
 * k read, and a sector of 32 bytes read and written for each element unless neighbours share it. */

static __global__ void __launch_bounds__(256)
    dtrain_cuda_scatter_add_kernel(dtrain_scatter_add_args args, dtrain_cuda_fault *fault)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < args.k;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int32_t index = args.indices[i];
        if (index >= 0 && index < args.count) args.out[index] += args.scale * args.values[i];
        else dtrain_cuda_set_fault(fault, DTRAIN_CUDA_BAD_INDEX, index, i, args.count);
    }
}

static dtrain_result dtrain_cuda_scatter_add(dtrain_device *device,
                                             const dtrain_scatter_add_args *args)
{
    if (args->k < 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "scatter_add: k is %lld, expected 0 or more",
                           (long long)args->k);
    if (args->k == 0) return DTRAIN_OK;
    const dtrain_cuda_state *const state = dtrain_cuda_state_of(device);
    return DTRAIN_CUDA_RUN(device, "scatter_add", dtrain_cuda_scatter_add_kernel,
                           dtrain_cuda_blocks(state, args->k, 256), 256, 0, *args, state->fault);
}

/* ==== src/device/cuda/batchnorm.cuh =========================================================== */

/* Batch normalisation
 *
 * x is (rows, n), and all sums run down columns. A block has 32 columns and 8 lanes of rows, over a
 * share of the rows:
 *
 *     columns_sum     two sums in double for each column and share: moments, or those of backward
 *     columns_fold    one thread a column adds the shares up, in order
 *     columns_each    y, or d_x: no sums
 *
 * Shares, and so the bits, depend only on rows and n. Memory is the limit: forward reads x twice
 * and writes y, backward reads x, d_y and, for ReLU, y twice and writes d_x. */

#include <math.h>

enum {
    DTRAIN_CUDA_COLUMN_TILE = 32,
    DTRAIN_CUDA_COLUMN_LANES = 8,
    DTRAIN_CUDA_COLUMN_THREADS = DTRAIN_CUDA_COLUMN_TILE * DTRAIN_CUDA_COLUMN_LANES,
    DTRAIN_CUDA_COLUMN_SHARES = 256 /* at most */
};

/* The cut of (rows, n) into blocks. */
struct dtrain_cuda_column_grid {
    int64_t rows, n, share; /* share: rows of a block */
    int64_t tiles, shares;
};

static dtrain_cuda_column_grid dtrain_cuda_column_cut(int64_t rows, int64_t n)
{
    dtrain_cuda_column_grid grid = {};
    grid.rows = rows;
    grid.n = n;
    grid.tiles = (n + DTRAIN_CUDA_COLUMN_TILE - 1) / DTRAIN_CUDA_COLUMN_TILE;
    grid.share = (rows + DTRAIN_CUDA_COLUMN_SHARES - 1) / DTRAIN_CUDA_COLUMN_SHARES;
    if (grid.share < 8 * DTRAIN_CUDA_COLUMN_LANES) grid.share = 8 * DTRAIN_CUDA_COLUMN_LANES;
    grid.shares = (rows + grid.share - 1) / grid.share;
    return grid;
}

/* The position of a thread: its column, which can be beyond the last, and its rows. */
struct dtrain_cuda_column_place {
    int64_t column, first, last;
    int lane, row_lane;

    __device__ explicit dtrain_cuda_column_place(const dtrain_cuda_column_grid &grid)
    {
        lane = threadIdx.x % DTRAIN_CUDA_COLUMN_TILE;
        row_lane = threadIdx.x / DTRAIN_CUDA_COLUMN_TILE;
        column = (int64_t)(blockIdx.x % grid.tiles) * DTRAIN_CUDA_COLUMN_TILE + lane;
        const int64_t begin = (int64_t)(blockIdx.x / grid.tiles) * grid.share;
        first = begin + row_lane;
        last = grid.rows < begin + grid.share ? grid.rows : begin + grid.share;
    }
};

/* Op::add(at, column, a, b) adds an element's two terms. parts (shares, n, 2). */
template <typename Op>
static __global__ void __launch_bounds__(DTRAIN_CUDA_COLUMN_THREADS, 2)
    dtrain_cuda_columns_sum_kernel(const Op op, dtrain_cuda_column_grid grid, double *parts)
{
    __shared__ double sums[2][DTRAIN_CUDA_COLUMN_LANES][DTRAIN_CUDA_COLUMN_TILE];
    const dtrain_cuda_column_place place(grid);
    double a = 0, b = 0;
    if (place.column < grid.n)
        for (int64_t row = place.first; row < place.last; row += DTRAIN_CUDA_COLUMN_LANES)
            op.add(row * grid.n + place.column, place.column, a, b);
    sums[0][place.row_lane][place.lane] = a;
    sums[1][place.row_lane][place.lane] = b;
    __syncthreads();
    if (place.row_lane != 0 || place.column >= grid.n) return;
    a = b = 0;
    for (int r = 0; r < DTRAIN_CUDA_COLUMN_LANES; r++) {
        a += sums[0][r][place.lane];
        b += sums[1][r][place.lane];
    }
    double *const out = parts + 2 * (blockIdx.x / grid.tiles * grid.n + place.column);
    out[0] = a;
    out[1] = b;
}

/* Op::finish(column, a, b) gets the sums of a column. */
template <typename Op>
static __global__ void __launch_bounds__(DTRAIN_CUDA_COLUMN_THREADS)
    dtrain_cuda_columns_fold_kernel(const Op op, dtrain_cuda_column_grid grid, const double *parts)
{
    const int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    double a = 0, b = 0;
    if (column >= grid.n) return;
    for (int64_t s = 0; s < grid.shares; s++) {
        a += parts[2 * (s * grid.n + column)];
        b += parts[2 * (s * grid.n + column) + 1];
    }
    op.finish(column, a, b);
}

/* Op::run(at, column) does an element. */
template <typename Op>
static __global__ void __launch_bounds__(DTRAIN_CUDA_COLUMN_THREADS)
    dtrain_cuda_columns_each_kernel(const Op op, dtrain_cuda_column_grid grid)
{
    const dtrain_cuda_column_place place(grid);
    if (place.column >= grid.n) return;
    for (int64_t row = place.first; row < place.last; row += DTRAIN_CUDA_COLUMN_LANES)
        op.run(row * grid.n + place.column, place.column);
}

template <typename Op>
static dtrain_result dtrain_cuda_columns_sum(dtrain_device *device, const char *name, const Op &op,
                                             int64_t rows, int64_t n)
{
    const dtrain_cuda_column_grid grid = dtrain_cuda_column_cut(rows, n);
    void *parts;
    DTRAIN_CUDA_TRY(
        dtrain_cuda_scratch(device, (size_t)(grid.shares * n) * 2 * sizeof(double), &parts));
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, name, dtrain_cuda_columns_sum_kernel<Op>,
                                    grid.tiles * grid.shares, DTRAIN_CUDA_COLUMN_THREADS, 0, op,
                                    grid, (double *)parts));
    const int64_t blocks = (n + DTRAIN_CUDA_COLUMN_THREADS - 1) / DTRAIN_CUDA_COLUMN_THREADS;
    return DTRAIN_CUDA_RUN(device, name, dtrain_cuda_columns_fold_kernel<Op>, blocks,
                           DTRAIN_CUDA_COLUMN_THREADS, 0, op, grid, (const double *)parts);
}

template <typename Op>
static dtrain_result dtrain_cuda_columns_each(dtrain_device *device, const char *name, const Op &op,
                                              int64_t rows, int64_t n)
{
    const dtrain_cuda_column_grid grid = dtrain_cuda_column_cut(rows, n);
    return DTRAIN_CUDA_RUN(device, name, dtrain_cuda_columns_each_kernel<Op>,
                           grid.tiles * grid.shares, DTRAIN_CUDA_COLUMN_THREADS, 0, op, grid);
}

/* ---- Moments: deviations from the first row, which keep what squares would cancel -------------*/

template <typename T> struct dtrain_cuda_moments_op {
    const T *x;
    float *part;
    int64_t rows, n;

    __device__ void add(int64_t at, int64_t column, double &a, double &b) const
    {
        const double off = (double)dtrain_cuda_widen(x[at]) - (double)dtrain_cuda_widen(x[column]);
        a += off;
        b += off * off;
    }
    __device__ void finish(int64_t column, double a, double b) const
    {
        const double mean = a / (double)rows, spread = b - a * mean;
        part[1 + column] = (float)((double)dtrain_cuda_widen(x[column]) + mean);
        part[1 + n + column] = (float)(spread < 0 ? 0 : spread); /* NaN stays */
        if (column == 0) part[0] = (float)rows;
    }
};

template <typename T>
static dtrain_result dtrain_cuda_moments_as(dtrain_device *device,
                                            const dtrain_batchnorm_moments_args *args)
{
    const dtrain_cuda_moments_op<T> op = {(const T *)args->x, args->sums, args->rows, args->n};
    return dtrain_cuda_columns_sum(device, "batchnorm, moments", op, args->rows, args->n);
}

static dtrain_result dtrain_cuda_batchnorm_moments(dtrain_device *device,
                                                   const dtrain_batchnorm_moments_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("batchnorm, moments", args->dtype));
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_moments_as)(device, args);
}

/* ---- Statistics: a thread has a column, over the parts of all ranks ---------------------------*/

static __global__ void __launch_bounds__(DTRAIN_CUDA_COLUMN_THREADS)
    dtrain_cuda_statistics_kernel(dtrain_batchnorm_statistics_args a)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    double count = 0, mean = 0, spread = 0;
    if (i >= a.n) return;
    if (a.parts == 0) {
        a.mean[i] = a.running_mean[i];
        a.rstd[i] = (float)(1 / sqrt((double)a.running_var[i] + (double)a.epsilon));
        return;
    }
    for (int64_t p = 0; p < a.parts; p++) {
        const float *const part = a.all + p * (1 + 2 * a.n);
        const double more = (double)part[0], all = count + more;
        const double apart = (double)part[1 + i] - mean;
        if (all <= 0) continue;
        mean += apart * (more / all);
        spread += (double)part[1 + a.n + i] + apart * apart * (count * more / all);
        count = all;
    }
    if (i == 0) a.inverse_count[0] = (float)(1 / (count > 0 ? count : 1));
    a.mean[i] = (float)mean;
    a.rstd[i] = (float)(1 / sqrt((count > 0 ? spread / count : 0) + (double)a.epsilon));
    if (!a.running_mean) return;
    const float variance = (float)(spread / (count > 1 ? count - 1 : 1));
    a.running_mean[i] += a.momentum * ((float)mean - a.running_mean[i]);
    a.running_var[i] += a.momentum * (variance - a.running_var[i]);
}

static dtrain_result dtrain_cuda_batchnorm_statistics(dtrain_device *device,
                                                      const dtrain_batchnorm_statistics_args *args)
{
    const int64_t blocks = (args->n + DTRAIN_CUDA_COLUMN_THREADS - 1) / DTRAIN_CUDA_COLUMN_THREADS;
    return DTRAIN_CUDA_RUN(device, "batchnorm, statistics", dtrain_cuda_statistics_kernel, blocks,
                           DTRAIN_CUDA_COLUMN_THREADS, 0, *args);
}

/* ---- y ----------------------------------------------------------------------------------------*/

template <typename T> struct dtrain_cuda_batchnorm_op {
    dtrain_batchnorm_args a;

    __device__ void run(int64_t at, int64_t c) const
    {
        const float off = dtrain_cuda_widen(((const T *)a.x)[at]) - a.mean[c];
        float y = __fmaf_rn(off, a.rstd[c] * a.weight[c], a.bias[c]);
        if (a.residual) y += dtrain_cuda_widen(((const T *)a.residual)[at]);
        if (a.activation == DTRAIN_ACTIVATION_RELU) y = y <= 0 ? 0 : y; /* NaN stays */
        dtrain_cuda_narrow(y, ((T *)a.y)[at]);
    }
};

template <typename T>
static dtrain_result dtrain_cuda_batchnorm_as(dtrain_device *device,
                                              const dtrain_batchnorm_args *args)
{
    const dtrain_cuda_batchnorm_op<T> op = {*args};
    return dtrain_cuda_columns_each(device, "batchnorm", op, args->rows, args->n);
}

static dtrain_result dtrain_cuda_batchnorm(dtrain_device *device, const dtrain_batchnorm_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("batchnorm", args->dtype));
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_batchnorm_as)(device, args);
}

/* ---- Backward ---------------------------------------------------------------------------------*/

/* Return d_y act'. ReLU's output is positive exactly if its input is. */
template <typename T>
static __device__ __forceinline__ float
dtrain_cuda_batchnorm_slope(uint32_t activation, const void *d_y, const void *y, int64_t at)
{
    const bool passes =
        activation == DTRAIN_ACTIVATION_NONE || dtrain_cuda_widen(((const T *)y)[at]) > 0;
    return passes ? dtrain_cuda_widen(((const T *)d_y)[at]) : 0;
}

template <typename T> struct dtrain_cuda_batchnorm_sums_op {
    dtrain_batchnorm_sums_args a;

    __device__ void add(int64_t at, int64_t c, double &sum, double &product) const
    {
        const float d = dtrain_cuda_batchnorm_slope<T>(a.activation, a.d_y, a.y, at);
        const float h = (dtrain_cuda_widen(((const T *)a.x)[at]) - a.mean[c]) * a.rstd[c];
        sum += (double)d;
        product += (double)d * (double)h;
        if (!a.d_residual) return;
        T *const out = (T *)a.d_residual + at;
        dtrain_cuda_narrow(a.accumulate ? dtrain_cuda_widen(*out) + d : d, *out);
    }
    __device__ void finish(int64_t c, double sum, double product) const
    {
        a.sums[c] = (float)sum;
        a.sums[a.n + c] = (float)product;
    }
};

template <typename T>
static dtrain_result dtrain_cuda_batchnorm_sums_as(dtrain_device *device,
                                                   const dtrain_batchnorm_sums_args *args)
{
    const dtrain_cuda_batchnorm_sums_op<T> op = {*args};
    return dtrain_cuda_columns_sum(device, "batchnorm, sums", op, args->rows, args->n);
}

static dtrain_result dtrain_cuda_batchnorm_sums(dtrain_device *device,
                                                const dtrain_batchnorm_sums_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("batchnorm, sums", args->dtype));
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_batchnorm_sums_as)(device, args);
}

template <typename T> struct dtrain_cuda_batchnorm_backward_op {
    dtrain_batchnorm_backward_args a;

    __device__ void run(int64_t at, int64_t c) const
    {
        const float d = dtrain_cuda_batchnorm_slope<T>(a.activation, a.d_y, a.y, at);
        const float h = (dtrain_cuda_widen(((const T *)a.x)[at]) - a.mean[c]) * a.rstd[c];
        const float both = __fmaf_rn(h, a.sums[a.n + c], a.sums[c]);
        float slope = a.rstd[c] * a.weight[c] * (d - both * a.inverse_count[0]);
        T *const out = (T *)a.d_x + at;
        if (a.accumulate) slope += dtrain_cuda_widen(*out);
        dtrain_cuda_narrow(slope, *out);
    }
};

template <typename T>
static dtrain_result dtrain_cuda_batchnorm_backward_as(dtrain_device *device,
                                                       const dtrain_batchnorm_backward_args *args)
{
    const dtrain_cuda_batchnorm_backward_op<T> op = {*args};
    return dtrain_cuda_columns_each(device, "batchnorm, backward", op, args->rows, args->n);
}

static dtrain_result dtrain_cuda_batchnorm_backward(dtrain_device *device,
                                                    const dtrain_batchnorm_backward_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("batchnorm, backward", args->dtype));
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_batchnorm_backward_as)(device, args);
}

/* ==== src/device/cuda/convolution.cuh ========================================================= */

/* Convolution: products with windows
 *
 * The three products of device/cpu/launch_convolution.c by one kernel, a tile of 64 x 32 results a
 * block, 16 steps of k at a time through shared memory. Elements of windows are fetched from the
 * image as the tile needs them; outside they are 0:
 *
 *     forward            rows: pixels of y     k: taps and channels of x
 *     input gradient     rows: pixels of x     k: taps and channels of y
 *     weight gradient    rows: taps and channels of x    k: pixels of y, in parts
 *
 * The parts of a weight gradient depend only on the shapes, and another kernel adds them in order:
 * the bits do not depend on timing. With a stride the input gradient multiplies missing taps as
 * zeros, stride^2 times the products of a GPU library; the CPU device skips them.
 *
 * Bytes: x, y and weight once, if the caches hold overlapping windows. All arithmetic is fp32. */

enum {
    DTRAIN_CUDA_CONV_M = 64,
    DTRAIN_CUDA_CONV_N = 32,
    DTRAIN_CUDA_CONV_K = 16,
    DTRAIN_CUDA_CONV_THREADS = 128, /* 16 x 8, each with 4 x 4 results */
    DTRAIN_CUDA_CONV_FETCHES = DTRAIN_CUDA_CONV_M * DTRAIN_CUDA_CONV_K / DTRAIN_CUDA_CONV_THREADS,
    DTRAIN_CUDA_CONV_PARTS = 64 /* of a weight gradient, at most */
};

enum { DTRAIN_CUDA_CONV_FORWARD, DTRAIN_CUDA_CONV_INPUT, DTRAIN_CUDA_CONV_WEIGHT };

/* One call; x, weight, d_y of the kernel's type. */
struct dtrain_cuda_conv {
    dtrain_windows2d w;
    int in, out, in_all, out_all, taps; /* channels of a group, of all */
    int64_t groups, pixels;             /* of y */
    int64_t m, n, k, part;              /* of a group's product; steps of k in a part */
    const void *x, *weight, *d_y;
    const float *bias;
    void *to; /* y, d_x, or (parts, groups, m, n) */
    uint32_t to_dtype;
    bool accumulate;
};

/* A pixel that identifies a window. */
struct dtrain_cuda_site {
    int64_t image; /* the first pixel of its image, in the one that is fetched from */
    int y, x;
};

template <int Kind>
static __device__ __forceinline__ dtrain_cuda_site dtrain_cuda_site_of(const dtrain_cuda_conv &conv,
                                                                       int64_t index)
{
    const bool input = Kind == DTRAIN_CUDA_CONV_INPUT;
    const uint32_t columns = (uint32_t)(input ? conv.w.width : conv.w.out_width);
    const uint32_t rows = (uint32_t)(input ? conv.w.height : conv.w.out_height);
    const uint32_t line = (uint32_t)index / columns, image = line / rows;
    dtrain_cuda_site site;
    site.x = (int)((uint32_t)index - line * columns);
    site.y = (int)(line - image * rows);
    site.image = (int64_t)image *
                 (input ? conv.w.out_height * conv.w.out_width : conv.w.height * conv.w.width);
    return site;
}

/* Return the pixel under a tap, of x or, for the input gradient, of d_y; -1: none. */
template <int Kind>
static __device__ __forceinline__ int64_t dtrain_cuda_pixel(const dtrain_windows2d &w,
                                                            const dtrain_cuda_site &site, int tap)
{
    const int a = tap / (int)w.kernel[1], b = tap - a * (int)w.kernel[1];
    if (Kind == DTRAIN_CUDA_CONV_INPUT) {
        const int64_t y = site.y + w.padding[0] - a * w.dilation[0];
        const int64_t x = site.x + w.padding[1] - b * w.dilation[1];
        const int64_t i = y / w.stride[0], j = x / w.stride[1];
        if (y < 0 || x < 0 || i * w.stride[0] != y || j * w.stride[1] != x || i >= w.out_height ||
            j >= w.out_width)
            return -1;
        return site.image + i * w.out_width + j;
    }
    const int64_t y = site.y * w.stride[0] - w.padding[0] + a * w.dilation[0];
    const int64_t x = site.x * w.stride[1] - w.padding[1] + b * w.dilation[1];
    if (y < 0 || y >= w.height || x < 0 || x >= w.width) return -1;
    return site.image + y * w.width + x;
}

/* Give the element of windows at a site, counting taps and channels by `at`. */
template <typename T, int Kind>
static __device__ __forceinline__ float dtrain_cuda_window_at(const dtrain_cuda_conv &conv,
                                                              const dtrain_cuda_site &site, int at,
                                                              int64_t group)
{
    const bool input = Kind == DTRAIN_CUDA_CONV_INPUT;
    const int depth = input ? conv.out : conv.in, tap = at / depth, channel = at - tap * depth;
    const int64_t pixel = dtrain_cuda_pixel<Kind>(conv.w, site, tap);
    if (pixel < 0) return 0;
    const int64_t all = input ? conv.out_all : conv.in_all;
    const T *from = (const T *)(input ? conv.d_y : conv.x);
    return dtrain_cuda_widen(from[pixel * all + group * depth + channel]);
}

/* Give element (p, j) of the other operand. */
template <typename T, int Kind>
static __device__ __forceinline__ float dtrain_cuda_conv_other(const dtrain_cuda_conv &conv,
                                                               int64_t p, int64_t j, int64_t group)
{
    if (Kind == DTRAIN_CUDA_CONV_WEIGHT)
        return dtrain_cuda_widen(((const T *)conv.d_y)[p * conv.out_all + group * conv.out + j]);
    const int depth = Kind == DTRAIN_CUDA_CONV_INPUT ? conv.out : conv.in;
    const int tap = (int)p / depth, channel = (int)p - tap * depth;
    const int64_t out = Kind == DTRAIN_CUDA_CONV_INPUT ? channel : j;
    const int64_t in = Kind == DTRAIN_CUDA_CONV_INPUT ? j : channel;
    const T *weight = (const T *)conv.weight;
    return dtrain_cuda_widen(weight[((group * conv.out + out) * conv.in + in) * conv.taps + tap]);
}

template <int Kind>
static __device__ __forceinline__ void dtrain_cuda_conv_store(const dtrain_cuda_conv &conv,
                                                              int64_t i, int64_t j, int64_t group,
                                                              int64_t part, float sum)
{
    if (Kind == DTRAIN_CUDA_CONV_WEIGHT) {
        ((float *)conv.to)[((part * conv.groups + group) * conv.m + i) * conv.n + j] = sum;
        return;
    }
    const int64_t all = Kind == DTRAIN_CUDA_CONV_INPUT ? conv.in_all : conv.out_all;
    const int64_t channel = group * conv.n + j, at = i * all + channel;
    if (Kind == DTRAIN_CUDA_CONV_FORWARD && conv.bias) sum += conv.bias[channel];
    if (conv.accumulate) sum += dtrain_cuda_get_any(conv.to, conv.to_dtype, at);
    dtrain_cuda_put_any(conv.to, conv.to_dtype, at, sum);
}

template <typename T, int Kind>
static __global__ void __launch_bounds__(DTRAIN_CUDA_CONV_THREADS)
    dtrain_cuda_conv_kernel(dtrain_cuda_conv conv)
{
    enum { M = DTRAIN_CUDA_CONV_M, N = DTRAIN_CUDA_CONV_N, K = DTRAIN_CUDA_CONV_K };
    enum { LINES = DTRAIN_CUDA_CONV_THREADS / K, FETCHES = DTRAIN_CUDA_CONV_FETCHES };
    __shared__ float a[K][M + 4], b[K][N + 4];
    const int64_t across = (conv.n + N - 1) / N, down = (conv.m + M - 1) / M;
    int64_t block = blockIdx.x;
    const int64_t j0 = block % across * N, i0 = block / across % down * M;
    block = block / across / down;
    const int64_t group = block % conv.groups, part = block / conv.groups;
    const int64_t begin = part * conv.part;
    const int64_t end = begin + conv.part < conv.k ? begin + conv.part : conv.k;
    const int step = threadIdx.x % K, line = threadIdx.x / K; /* what this thread fetches */
    const int row = threadIdx.x / 8 * 4, column = threadIdx.x % 8 * 4; /* and what it adds up */
    const bool rows_are_sites = Kind != DTRAIN_CUDA_CONV_WEIGHT;
    dtrain_cuda_site sites[FETCHES] = {};
    float sums[4][4] = {};
    for (int f = 0; f < FETCHES && rows_are_sites; f++)
        sites[f] = dtrain_cuda_site_of<Kind>(conv, i0 + line + f * LINES);
    for (int64_t p = begin; p < end; p += K) {
        const int64_t at = p + step;
        if (!rows_are_sites && at < end) sites[0] = dtrain_cuda_site_of<Kind>(conv, at);
        __syncthreads(); /* the last step's products have been taken */
        for (int f = 0; f < FETCHES; f++) {
            const int64_t i = i0 + line + f * LINES;
            float x = 0;
            if (i < conv.m && at < end)
                x = rows_are_sites ? dtrain_cuda_window_at<T, Kind>(conv, sites[f], (int)at, group)
                                   : dtrain_cuda_window_at<T, Kind>(conv, sites[0], (int)i, group);
            a[step][line + f * LINES] = x;
        }
        for (int e = threadIdx.x; e < K * N; e += DTRAIN_CUDA_CONV_THREADS) {
            const int64_t q = p + e / N, j = j0 + e % N;
            b[e / N][e % N] =
                q < end && j < conv.n ? dtrain_cuda_conv_other<T, Kind>(conv, q, j, group) : 0;
        }
        __syncthreads();
        for (int q = 0; q < K; q++) {
            DTRAIN_CUDA_UNROLL
            for (int r = 0; r < 4; r++) {
                DTRAIN_CUDA_UNROLL
                for (int c = 0; c < 4; c++)
                    sums[r][c] = __fmaf_rn(a[q][row + r], b[q][column + c], sums[r][c]);
            }
        }
    }
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < 4; c++)
            if (i0 + row + r < conv.m && j0 + column + c < conv.n)
                dtrain_cuda_conv_store<Kind>(conv, i0 + row + r, j0 + column + c, group, part,
                                             sums[r][c]);
}

/* Add the parts of a weight gradient (parts, groups, taps in, out) up, in order; thread `at` makes
 * element `at` of d_weight (groups out, in, taps). */
static __global__ void dtrain_cuda_conv_sum_kernel(dtrain_cuda_conv conv, int64_t parts,
                                                   float *d_weight)
{
    const int64_t count = conv.groups * conv.m * conv.n;
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < count;
         at += (int64_t)gridDim.x * blockDim.x) {
        const int64_t tap = at % conv.taps, in = at / conv.taps % conv.in;
        const int64_t out = at / conv.taps / conv.in, group = out / conv.out;
        const float *from = (const float *)conv.to +
                            (group * conv.m + tap * conv.in + in) * conv.n + out % conv.out;
        float sum = conv.accumulate ? d_weight[at] : 0;
        for (int64_t part = 0; part < parts; part++) sum += from[part * count];
        d_weight[at] = sum;
    }
}

/* ---- Launchers */

/* Refuse windows that are not inside, and counts that do not fit 31 bits, in which kernels count
 * pixels. */
static dtrain_result dtrain_cuda_check_windows(const char *call, const dtrain_windows2d *w)
{
    const int64_t size[2] = {w->height, w->width}, count[2] = {w->out_height, w->out_width};
    bool fits = w->batch >= 0 && w->height > 0 && w->width > 0 && w->channels > 0;
    for (int a = 0; a < 2 && fits; a++)
        fits = w->kernel[a] > 0 && w->stride[a] > 0 && w->dilation[a] > 0 && w->padding[a] >= 0 &&
               count[a] > 0 &&
               (count[a] - 1) * w->stride[a] + (w->kernel[a] - 1) * w->dilation[a] <
                   size[a] + 2 * w->padding[a];
    if (!fits)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "%s: %lld x %lld windows of %lld x %lld taps do not fit images of %lld x %lld", call,
            (long long)w->out_height, (long long)w->out_width, (long long)w->kernel[0],
            (long long)w->kernel[1], (long long)w->height, (long long)w->width);
    if (w->batch * w->height * w->width > INT32_MAX ||
        w->batch * w->out_height * w->out_width > INT32_MAX)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: a batch has more than 2^31 pixels", call);
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_check_conv(const char *call, const dtrain_windows2d *w,
                                            int64_t out, int64_t groups)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_check_windows(call, w));
    if (groups < 1 || out < 1 || w->channels % groups || out % groups)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: %lld and %lld channels cannot be cut into %lld groups", call,
                           (long long)w->channels, (long long)out, (long long)groups);
    if (w->kernel[0] > DTRAIN_CONV2D_KERNEL || w->kernel[1] > DTRAIN_CONV2D_KERNEL)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: %lld x %lld taps, expected at most %d",
                           call, (long long)w->kernel[0], (long long)w->kernel[1],
                           DTRAIN_CONV2D_KERNEL);
    const int64_t taps = w->kernel[0] * w->kernel[1];
    if (w->channels > INT32_MAX / taps || out > INT32_MAX / taps)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "%s: %lld and %lld channels are too many",
                           call, (long long)w->channels, (long long)out);
    return DTRAIN_OK;
}

static dtrain_cuda_conv dtrain_cuda_conv_make(const dtrain_windows2d *w, int64_t out,
                                              int64_t groups)
{
    dtrain_cuda_conv conv = {};
    conv.w = *w;
    conv.groups = groups;
    conv.in_all = (int)w->channels;
    conv.out_all = (int)out;
    conv.in = (int)(w->channels / groups);
    conv.out = (int)(out / groups);
    conv.taps = (int)(w->kernel[0] * w->kernel[1]);
    conv.pixels = w->batch * w->out_height * w->out_width;
    return conv;
}

/* Run a product of m, n, k in each group, with k in `parts`. */
template <typename T, int Kind>
static dtrain_result dtrain_cuda_conv_run(dtrain_device *device, const char *name,
                                          dtrain_cuda_conv conv, int64_t parts)
{
    const int64_t tiles = (conv.m + DTRAIN_CUDA_CONV_M - 1) / DTRAIN_CUDA_CONV_M *
                          ((conv.n + DTRAIN_CUDA_CONV_N - 1) / DTRAIN_CUDA_CONV_N);
    if (conv.m <= 0) return DTRAIN_OK;
    conv.part = (conv.k + parts - 1) / parts;
    return DTRAIN_CUDA_RUN(device, name, (dtrain_cuda_conv_kernel<T, Kind>),
                           tiles * conv.groups * parts, DTRAIN_CUDA_CONV_THREADS, 0, conv);
}

template <typename T>
static dtrain_result dtrain_cuda_conv2d_as(dtrain_device *device, const dtrain_conv2d_args *args)
{
    dtrain_cuda_conv conv = dtrain_cuda_conv_make(&args->windows, args->out_channels, args->groups);
    conv.m = conv.pixels;
    conv.n = conv.out;
    conv.k = conv.taps * conv.in;
    conv.x = args->x;
    conv.weight = args->weight;
    conv.bias = args->bias;
    conv.to = args->y;
    conv.to_dtype = args->dtype;
    return dtrain_cuda_conv_run<T, DTRAIN_CUDA_CONV_FORWARD>(device, "conv2d", conv, 1);
}

static dtrain_result dtrain_cuda_conv2d(dtrain_device *device, const dtrain_conv2d_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("conv2d", args->dtype));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_check_conv("conv2d", &args->windows, args->out_channels, args->groups));
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_conv2d_as)(device, args);
}

/* Make d_weight, in parts of at least 256 pixels each and of at most 16 MiB together. */
template <typename T>
static dtrain_result dtrain_cuda_conv_weight(dtrain_device *device, dtrain_cuda_conv conv,
                                             const dtrain_conv2d_backward_args *args)
{
    conv.m = conv.taps * conv.in;
    conv.n = conv.out;
    conv.k = conv.pixels;
    const int64_t count = conv.groups * conv.m * conv.n, room = ((int64_t)1 << 22) / count;
    int64_t parts = (conv.pixels + 255) / 256;
    if (parts > DTRAIN_CUDA_CONV_PARTS) parts = DTRAIN_CUDA_CONV_PARTS;
    if (parts > room) parts = room;
    if (parts < 1) parts = 1;
    DTRAIN_CUDA_TRY(dtrain_cuda_scratch(device, (size_t)(parts * count) * sizeof(float), &conv.to));
    DTRAIN_CUDA_TRY((dtrain_cuda_conv_run<T, DTRAIN_CUDA_CONV_WEIGHT>(
        device, "conv2d_backward (weight)", conv, parts)));
    conv.accumulate = args->accumulate_weight;
    return DTRAIN_CUDA_RUN(device, "conv2d_backward (sum)", dtrain_cuda_conv_sum_kernel,
                           dtrain_cuda_blocks(dtrain_cuda_state_of(device), count, 256), 256, 0,
                           conv, parts, args->d_weight);
}

template <typename T>
static dtrain_result dtrain_cuda_conv2d_backward_as(dtrain_device *device,
                                                    const dtrain_conv2d_backward_args *args)
{
    dtrain_cuda_conv conv = dtrain_cuda_conv_make(&args->windows, args->out_channels, args->groups);
    conv.x = args->x;
    conv.weight = args->weight;
    conv.d_y = args->d_y;
    if (args->d_weight) DTRAIN_CUDA_TRY(dtrain_cuda_conv_weight<T>(device, conv, args));
    if (!args->d_x) return DTRAIN_OK;
    conv.m = conv.w.batch * conv.w.height * conv.w.width;
    conv.n = conv.in;
    conv.k = conv.taps * conv.out;
    conv.to = args->d_x;
    conv.to_dtype = args->x_dtype;
    conv.accumulate = args->accumulate_x;
    return dtrain_cuda_conv_run<T, DTRAIN_CUDA_CONV_INPUT>(device, "conv2d_backward (input)", conv,
                                                           1);
}

static dtrain_result dtrain_cuda_conv2d_backward(dtrain_device *device,
                                                 const dtrain_conv2d_backward_args *args)
{
    dtrain_activation_backward_args sums = {};
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("conv2d_backward", args->dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("conv2d_backward", args->x_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_check_conv("conv2d_backward", &args->windows, args->out_channels,
                                           args->groups));
    if (args->d_bias) {
        sums.accumulate = args->accumulate_bias;
        sums.rows = args->windows.batch * args->windows.out_height * args->windows.out_width;
        sums.n = args->out_channels;
        sums.d_out = args->d_y;
        sums.d_in = (void *)(uintptr_t)args->d_y; /* the same: only d_bias is made */
        sums.d_bias = args->d_bias;
        sums.dtype = args->dtype;
        DTRAIN_CUDA_TRY(dtrain_cuda_activation_backward(device, &sums));
    }
    return DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_conv2d_backward_as)(device, args);
}

/* ==== src/device/cuda/pooling.cuh ============================================================= */

/* Pooling: maximum and average of windows
 *
 * A thread makes an element of y or of d_x: backward sums the gradients of the windows that contain
 * the pixel, in order, without atomics. Memory bandwidth is the limit: x and y once, and an index
 * of 4 bytes for each maximum. */

#include <math.h>

template <typename T> static __global__ void dtrain_cuda_pool2d_kernel(dtrain_pool2d_args args)
{
    const dtrain_windows2d &w = args.windows;
    const int64_t count = w.batch * w.out_height * w.out_width * w.channels;
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < count;
         at += (int64_t)gridDim.x * blockDim.x) {
        const uint32_t window = (uint32_t)(at / w.channels), line = window / (uint32_t)w.out_width;
        const uint32_t image = line / (uint32_t)w.out_height, c = (uint32_t)(at % w.channels);
        const int64_t y = (line - image * w.out_height) * w.stride[0] - w.padding[0];
        const int64_t x = (window - line * w.out_width) * w.stride[1] - w.padding[1];
        float top = -INFINITY, sum = 0;
        int where = -1;
        for (int64_t a = y < 0 ? -y : 0; a < w.kernel[0] && y + a < w.height; a++)
            for (int64_t b = x < 0 ? -x : 0; b < w.kernel[1] && x + b < w.width; b++) {
                const int64_t pixel = (image * w.height + y + a) * w.width + x + b;
                const float value = dtrain_cuda_widen(((const T *)args.x)[pixel * w.channels + c]);
                sum += value;
                if (value > top || value != value || where < 0) {
                    where = (int)(a * w.kernel[1] + b);
                    top = value;
                }
            }
        if (!args.maximum) top = sum / (float)(w.kernel[0] * w.kernel[1]);
        dtrain_cuda_narrow(top, ((T *)args.y)[at]);
        if (args.maximum && args.index) args.index[at] = where;
    }
}

template <typename T>
static __global__ void dtrain_cuda_pool2d_backward_kernel(dtrain_pool2d_backward_args args)
{
    const dtrain_windows2d &w = args.windows;
    const int64_t count = w.batch * w.height * w.width * w.channels;
    const float taps = args.maximum ? 1 : (float)(w.kernel[0] * w.kernel[1]);
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < count;
         at += (int64_t)gridDim.x * blockDim.x) {
        const uint32_t pixel = (uint32_t)(at / w.channels), line = pixel / (uint32_t)w.width;
        const uint32_t image = line / (uint32_t)w.height, c = (uint32_t)(at % w.channels);
        const int64_t y = line - image * w.height + w.padding[0];
        const int64_t x = pixel - line * w.width + w.padding[1];
        const int64_t i1 = y / w.stride[0] < w.out_height ? y / w.stride[0] : w.out_height - 1;
        const int64_t j1 = x / w.stride[1] < w.out_width ? x / w.stride[1] : w.out_width - 1;
        float sum = 0;
        for (int64_t i = i1; i >= 0 && y - i * w.stride[0] < w.kernel[0]; i--)
            for (int64_t j = j1; j >= 0 && x - j * w.stride[1] < w.kernel[1]; j--) {
                const int64_t window = (image * w.out_height + i) * w.out_width + j;
                const int64_t from = window * w.channels + c;
                const int64_t tap = (y - i * w.stride[0]) * w.kernel[1] + x - j * w.stride[1];
                if (!args.maximum || args.index[from] == tap)
                    sum += dtrain_cuda_widen(((const T *)args.d_y)[from]);
            }
        sum /= taps;
        if (args.accumulate) sum += dtrain_cuda_widen(((const T *)args.d_x)[at]);
        dtrain_cuda_narrow(sum, ((T *)args.d_x)[at]);
    }
}

static dtrain_result dtrain_cuda_pool2d(dtrain_device *device, const dtrain_pool2d_args *args)
{
    const dtrain_windows2d *w = &args->windows;
    const int64_t count = w->batch * w->out_height * w->out_width * w->channels;
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("pool2d", args->dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_check_windows("pool2d", w));
    if (count <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_RUN(
        device, "pool2d", DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_pool2d_kernel),
        dtrain_cuda_blocks(dtrain_cuda_state_of(device), count, 256), 256, 0, *args);
}

static dtrain_result dtrain_cuda_pool2d_backward(dtrain_device *device,
                                                 const dtrain_pool2d_backward_args *args)
{
    const dtrain_windows2d *w = &args->windows;
    const int64_t count = w->batch * w->height * w->width * w->channels;
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("pool2d_backward", args->dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_check_windows("pool2d_backward", w));
    if (count <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_RUN(device, "pool2d_backward",
                           DTRAIN_CUDA_BY_DTYPE(args->dtype, dtrain_cuda_pool2d_backward_kernel),
                           dtrain_cuda_blocks(dtrain_cuda_state_of(device), count, 256), 256, 0,
                           *args);
}

/* ==== src/device/cuda/table.cuh =============================================================== */

/* The table of device operations */

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
