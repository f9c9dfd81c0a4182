/* cuda_runtime.h, stand-in: what dtrain_cuda.cu uses of the CUDA runtime and of the CUDA language, for
 * a C++17 compiler and the CPU. The runtime's types and functions are also C99. Names, values and
 * signatures are CUDA's; the implementation is cuda_emulation.cpp. What is missing here does not
 * compile: nothing is accepted and ignored. */
#ifndef DTRAIN_EMULATED_CUDA_RUNTIME_H
#define DTRAIN_EMULATED_CUDA_RUNTIME_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CUDART_VERSION 13000
#define CUDART_CB

/* ---- Vector types ---- */

typedef struct uint3 {
    unsigned int x, y, z;
} uint3;

#ifdef __cplusplus
struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1)
        : x(x_), y(y_), z(z_)
    {
    }
};
#else
typedef struct dim3 {
    unsigned int x, y, z;
} dim3;
#endif

#define DTRAIN_EMULATION_VECTOR2(name, type)                         \
    typedef struct __attribute__((aligned(2 * sizeof(type)))) name { \
        type x, y;                                                   \
    } name;                                                          \
    static inline name make_##name(type x, type y)                   \
    {                                                                \
        name v = {x, y};                                             \
        return v;                                                    \
    }
#define DTRAIN_EMULATION_VECTOR4(name, type, alignment)            \
    typedef struct __attribute__((aligned(alignment))) name {      \
        type x, y, z, w;                                           \
    } name;                                                        \
    static inline name make_##name(type x, type y, type z, type w) \
    {                                                              \
        name v = {x, y, z, w};                                     \
        return v;                                                  \
    }
DTRAIN_EMULATION_VECTOR2(int2, int)
DTRAIN_EMULATION_VECTOR2(uint2, unsigned int)
DTRAIN_EMULATION_VECTOR2(float2, float)
DTRAIN_EMULATION_VECTOR2(double2, double)
DTRAIN_EMULATION_VECTOR2(longlong2, long long)
DTRAIN_EMULATION_VECTOR2(ulonglong2, unsigned long long)
DTRAIN_EMULATION_VECTOR2(ushort2, unsigned short)
DTRAIN_EMULATION_VECTOR4(int4, int, 16)
DTRAIN_EMULATION_VECTOR4(uint4, unsigned int, 16)
DTRAIN_EMULATION_VECTOR4(float4, float, 16)
DTRAIN_EMULATION_VECTOR4(ushort4, unsigned short, 8)
DTRAIN_EMULATION_VECTOR4(uchar4, unsigned char, 4)

/* ---- Runtime: types ---- */

#define DTRAIN_EMULATION_ERRORS(X)                                                                 \
    X(cudaSuccess, 0, "no error")                                                                  \
    X(cudaErrorInvalidValue, 1, "invalid argument")                                                \
    X(cudaErrorMemoryAllocation, 2, "out of memory")                                               \
    X(cudaErrorInitializationError, 3, "initialization error")                                     \
    X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                          \
    X(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                    \
    X(cudaErrorInsufficientDriver, 35,                                                             \
      "CUDA driver version is insufficient for CUDA runtime version")                              \
    X(cudaErrorDevicesUnavailable, 46, "CUDA-capable device(s) is/are busy or unavailable")        \
    X(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                               \
    X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                                \
    X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                       \
    X(cudaErrorNoKernelImageForDevice, 209,                                                        \
      "no kernel image is available for execution on the device")                                  \
    X(cudaErrorECCUncorrectable, 214, "uncorrectable ECC error encountered")                       \
    X(cudaErrorInvalidPtx, 218, "a PTX JIT compilation failed")                                    \
    X(cudaErrorNvlinkUncorrectable, 220,                                                           \
      "uncorrectable NVLink error detected during the execution")                                  \
    X(cudaErrorUnsupportedPtxVersion, 222,                                                         \
      "the provided PTX was compiled with an unsupported toolchain.")                              \
    X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                              \
    X(cudaErrorIllegalState, 401, "the operation cannot be performed in the present state")        \
    X(cudaErrorNotReady, 600, "device not ready")                                                  \
    X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")                    \
    X(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch")               \
    X(cudaErrorLaunchTimeout, 702, "the launch timed out and was terminated")                      \
    X(cudaErrorAssert, 710, "device-side assert triggered")                                        \
    X(cudaErrorHostMemoryAlreadyRegistered, 712,                                                   \
      "part or all of the requested memory range is already mapped")                               \
    X(cudaErrorHostMemoryNotRegistered, 713,                                                       \
      "pointer does not correspond to a registered memory region")                                 \
    X(cudaErrorHardwareStackError, 714, "hardware stack error")                                    \
    X(cudaErrorIllegalInstruction, 715, "an illegal instruction was encountered")                  \
    X(cudaErrorMisalignedAddress, 716, "misaligned address")                                       \
    X(cudaErrorInvalidAddressSpace, 717, "operation not supported on global/shared address space") \
    X(cudaErrorInvalidPc, 718, "invalid program counter")                                          \
    X(cudaErrorLaunchFailure, 719, "unspecified launch failure")                                   \
    X(cudaErrorNotPermitted, 800, "operation not permitted")                                       \
    X(cudaErrorNotSupported, 801, "operation not supported")                                       \
    X(cudaErrorSystemNotReady, 802, "system not yet initialized")                                  \
    X(cudaErrorSystemDriverMismatch, 803,                                                          \
      "system has unsupported display driver / cuda driver combination")                           \
    X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")  \
    X(cudaErrorStreamCaptureInvalidated, 901,                                                      \
      "operation failed due to a previous error during capture")                                   \
    X(cudaErrorStreamCaptureMerge, 902,                                                            \
      "operation would result in a merge of separate capture sequences")                           \
    X(cudaErrorStreamCaptureUnmatched, 903,                                                        \
      "capture was not ended in the same stream as it began")                                      \
    X(cudaErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")                   \
    X(cudaErrorStreamCaptureIsolation, 905,                                                        \
      "dependency created on uncaptured work in another stream")                                   \
    X(cudaErrorStreamCaptureImplicit, 906,                                                         \
      "operation would make the legacy stream depend on a capturing blocking stream")              \
    X(cudaErrorCapturedEvent, 907,                                                                 \
      "operation not permitted on an event last recorded in a capturing stream")                   \
    X(cudaErrorStreamCaptureWrongThread, 908,                                                      \
      "attempt to terminate a thread-local capture sequence from another thread")                  \
    X(cudaErrorUnknown, 999, "unknown error")
#define DTRAIN_EMULATION_ERROR_VALUE(name, value, text) name = value,
typedef enum cudaError { DTRAIN_EMULATION_ERRORS(DTRAIN_EMULATION_ERROR_VALUE) } cudaError_t;
#undef DTRAIN_EMULATION_ERROR_VALUE

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
typedef void (*cudaHostFn_t)(void *user_data);
#define cudaStreamLegacy ((cudaStream_t)0x1)

enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
};
enum cudaMemoryType {
    cudaMemoryTypeUnregistered = 0,
    cudaMemoryTypeHost = 1,
    cudaMemoryTypeDevice = 2,
    cudaMemoryTypeManaged = 3
};
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0,
    cudaStreamCaptureStatusActive = 1,
    cudaStreamCaptureStatusInvalidated = 2
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrClockRate = 13,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrIntegrated = 18,
    cudaDevAttrCanMapHostMemory = 19,
    cudaDevAttrConcurrentKernels = 31,
    cudaDevAttrEccEnabled = 32,
    cudaDevAttrPciBusId = 33,
    cudaDevAttrPciDeviceId = 34,
    cudaDevAttrMemoryClockRate = 36,
    cudaDevAttrGlobalMemoryBusWidth = 37,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrAsyncEngineCount = 40,
    cudaDevAttrUnifiedAddressing = 41,
    cudaDevAttrPciDomainId = 50,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrStreamPrioritiesSupported = 78,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxRegistersPerMultiprocessor = 82,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrHostRegisterSupported = 99,
    cudaDevAttrMaxBlocksPerMultiprocessor = 106,
    cudaDevAttrMemoryPoolsSupported = 115,
    cudaDevAttrIpcEventSupport = 125
};

#define cudaHostAllocDefault 0x00
#define cudaHostAllocPortable 0x01
#define cudaHostAllocMapped 0x02
#define cudaHostAllocWriteCombined 0x04
#define cudaHostRegisterDefault 0x00
#define cudaHostRegisterPortable 0x01
#define cudaHostRegisterMapped 0x02
#define cudaHostRegisterReadOnly 0x08
#define cudaStreamDefault 0x00
#define cudaStreamNonBlocking 0x01
#define cudaEventDefault 0x00
#define cudaEventBlockingSync 0x01
#define cudaEventDisableTiming 0x02

typedef struct cudaUUID_t {
    char bytes[16];
} cudaUUID_t;

struct cudaDeviceProp {
    char name[256];
    cudaUUID_t uuid;
    size_t totalGlobalMem;
    size_t sharedMemPerBlock;
    int regsPerBlock;
    int warpSize;
    int maxThreadsPerBlock;
    int maxThreadsDim[3];
    int maxGridSize[3];
    int major, minor;
    int multiProcessorCount;
    int integrated;
    int canMapHostMemory;
    int concurrentKernels;
    int ECCEnabled;
    int pciBusID, pciDeviceID, pciDomainID;
    int asyncEngineCount;
    int unifiedAddressing;
    int memoryBusWidth;
    int l2CacheSize;
    int maxThreadsPerMultiProcessor;
    int streamPrioritiesSupported;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor;
    size_t sharedMemPerBlockOptin;
    int maxBlocksPerMultiProcessor;
    size_t reservedSharedMemPerBlock;
    int hostRegisterSupported;
};
struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
    void *devicePointer;
    void *hostPointer;
};
struct cudaFuncAttributes {
    size_t sharedSizeBytes; /* always 0: the emulation does not know a kernel's static arrays */
    size_t constSizeBytes;
    size_t localSizeBytes;
    int maxThreadsPerBlock;
    int numRegs;
    int ptxVersion, binaryVersion;
    int maxDynamicSharedSizeBytes;
};
#ifndef __cplusplus
typedef struct cudaDeviceProp cudaDeviceProp;
typedef enum cudaMemcpyKind cudaMemcpyKind;
#endif

/* ---- Runtime: functions ---- */

#ifdef __cplusplus
#define DTRAIN_EMULATION_DEFAULT(value) = value
extern "C" {
#else
#define DTRAIN_EMULATION_DEFAULT(value)
#endif

cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device);

cudaError_t cudaMalloc(void **pointer, size_t bytes);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaMallocHost(void **pointer, size_t bytes);
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags);
cudaError_t cudaFreeHost(void *pointer);
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags);
cudaError_t cudaHostUnregister(void *pointer);
cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *host_pointer, unsigned int flags);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream DTRAIN_EMULATION_DEFAULT(0));
cudaError_t cudaMemset(void *pointer, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes,
                            cudaStream_t stream DTRAIN_EMULATION_DEFAULT(0));

cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned int flags DTRAIN_EMULATION_DEFAULT(0));
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user_data);

cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream DTRAIN_EMULATION_DEFAULT(0));
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph,
                                 unsigned long long flags DTRAIN_EMULATION_DEFAULT(0));
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value);
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel,
                                                          int block_size, size_t dynamic_bytes);
#ifdef __cplusplus
} // extern "C"

template <class T> inline cudaError_t cudaMalloc(T **pointer, size_t bytes)
{
    return cudaMalloc(reinterpret_cast<void **>(pointer), bytes);
}
template <class T> inline cudaError_t cudaMallocHost(T **pointer, size_t bytes)
{
    return cudaMallocHost(reinterpret_cast<void **>(pointer), bytes);
}
template <class T> inline cudaError_t cudaHostAlloc(T **pointer, size_t bytes, unsigned int flags)
{
    return cudaHostAlloc(reinterpret_cast<void **>(pointer), bytes, flags);
}
template <class... P>
inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute,
                                        int value)
{
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute, value);
}
template <class... P>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, void (*kernel)(P...))
{
    return cudaFuncGetAttributes(attributes, reinterpret_cast<const void *>(kernel));
}
template <class... P>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void (*kernel)(P...),
                                                                 int block_size,
                                                                 size_t dynamic_bytes)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks, reinterpret_cast<const void *>(kernel), block_size, dynamic_bytes);
}

/* ---- The language ---- */

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

/* Blocks run one after another, so that a block's shared arrays can be static. A section of their own
 * lets the emulation refill them with 0xff at each block start. (Kernels must be static functions: the
 * static variables of others are merged by the linker and do not take a section.) */
#ifdef __ELF__
#define __shared__ static __attribute__((section("dtrain_shared")))
#else
#define __shared__ static
#endif
extern unsigned char *dtrain_emulation_dynamic_shared;
#define DTRAIN_CUDA_DYNAMIC_SHARED(type, name) \
    type *name = reinterpret_cast<type *>(dtrain_emulation_dynamic_shared)

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
static const int warpSize = 32;

/* ---- Launch ---- */

cudaError_t dtrain_emulation_launch_body(const void *kernel, dim3 grid, dim3 block,
                                         size_t shared_bytes, cudaStream_t stream,
                                         std::function<void()> thread_body);

/* kernel<<<grid, block, shared_bytes, stream>>>(args...); the arguments are copied now. */
template <class... P, class... A>
inline cudaError_t dtrain_emulation_launch(void (*kernel)(P...), dim3 grid, dim3 block,
                                           size_t shared_bytes, cudaStream_t stream, A &&...args)
{
    static_assert(sizeof...(P) == sizeof...(A), "as many arguments as the kernel has parameters");
    std::tuple<P...> values(std::forward<A>(args)...);
    return dtrain_emulation_launch_body(reinterpret_cast<const void *>(kernel), grid, block,
                                        shared_bytes, stream,
                                        [kernel, values] { std::apply(kernel, values); });
}

/* ---- Barriers and warp functions ----
 * The line of the call stands for the place in the program: threads that meet in different places
 * have diverged, which is reported. */

enum { DTRAIN_EMULATION_SHUFFLE, DTRAIN_EMULATION_UP, DTRAIN_EMULATION_DOWN, DTRAIN_EMULATION_XOR };
enum { DTRAIN_EMULATION_SUM, DTRAIN_EMULATION_MIN, DTRAIN_EMULATION_MAX };

struct dtrain_emulation_vote {
    int threads, votes;
};
dtrain_emulation_vote dtrain_emulation_barrier(int predicate, int line);
void dtrain_emulation_warp_barrier(unsigned mask, int line);
uint64_t dtrain_emulation_shuffle(int mode, unsigned mask, uint64_t bits, int operand, int width,
                                  int line);
unsigned dtrain_emulation_ballot(unsigned mask, int predicate, int line);
int64_t dtrain_emulation_reduce(int mode, unsigned mask, int64_t value, int line);
void dtrain_emulation_yield(void);
[[noreturn]] void dtrain_emulation_trap(int line);
long long dtrain_emulation_clock(void);

#define DTRAIN_EMULATION_HERE int line = __builtin_LINE()

inline void __syncthreads(DTRAIN_EMULATION_HERE) { dtrain_emulation_barrier(0, line); }
inline int __syncthreads_count(int predicate, DTRAIN_EMULATION_HERE)
{
    return dtrain_emulation_barrier(predicate, line).votes;
}
inline int __syncthreads_or(int predicate, DTRAIN_EMULATION_HERE)
{
    return dtrain_emulation_barrier(predicate, line).votes > 0;
}
inline int __syncthreads_and(int predicate, DTRAIN_EMULATION_HERE)
{
    dtrain_emulation_vote vote = dtrain_emulation_barrier(predicate, line);
    return vote.votes == vote.threads;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, DTRAIN_EMULATION_HERE)
{
    dtrain_emulation_warp_barrier(mask, line);
}

template <class T>
inline T dtrain_emulation_shuffle_value(int mode, unsigned mask, T value, int operand, int width,
                                        int line)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 4 and 8 byte values");
    static_assert(std::is_arithmetic<T>::value, "CUDA shuffles numbers");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = dtrain_emulation_shuffle(mode, mask, bits, operand, width, line);
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, DTRAIN_EMULATION_HERE)
{
    return dtrain_emulation_shuffle_value(DTRAIN_EMULATION_SHUFFLE, mask, value, source, width,
                                          line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                        DTRAIN_EMULATION_HERE)
{
    return dtrain_emulation_shuffle_value(DTRAIN_EMULATION_UP, mask, value, int(delta), width,
                                          line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                          DTRAIN_EMULATION_HERE)
{
    return dtrain_emulation_shuffle_value(DTRAIN_EMULATION_DOWN, mask, value, int(delta), width,
                                          line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, DTRAIN_EMULATION_HERE)
{
    return dtrain_emulation_shuffle_value(DTRAIN_EMULATION_XOR, mask, value, lanes, width, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, DTRAIN_EMULATION_HERE)
{
    return dtrain_emulation_ballot(mask, predicate, line);
}
inline int __any_sync(unsigned mask, int predicate, DTRAIN_EMULATION_HERE)
{
    return dtrain_emulation_ballot(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, DTRAIN_EMULATION_HERE)
{
    return dtrain_emulation_ballot(mask, !predicate, line) == 0;
}
#define DTRAIN_EMULATION_REDUCE(name, type, mode)                                   \
    inline type name(unsigned mask, type value, DTRAIN_EMULATION_HERE)              \
    {                                                                               \
        return static_cast<type>(dtrain_emulation_reduce(mode, mask, value, line)); \
    }
DTRAIN_EMULATION_REDUCE(__reduce_add_sync, unsigned, DTRAIN_EMULATION_SUM)
DTRAIN_EMULATION_REDUCE(__reduce_add_sync, int, DTRAIN_EMULATION_SUM)
DTRAIN_EMULATION_REDUCE(__reduce_min_sync, unsigned, DTRAIN_EMULATION_MIN)
DTRAIN_EMULATION_REDUCE(__reduce_min_sync, int, DTRAIN_EMULATION_MIN)
DTRAIN_EMULATION_REDUCE(__reduce_max_sync, unsigned, DTRAIN_EMULATION_MAX)
DTRAIN_EMULATION_REDUCE(__reduce_max_sync, int, DTRAIN_EMULATION_MAX)

inline void __nanosleep(unsigned) { dtrain_emulation_yield(); }
inline long long clock64(void) { return dtrain_emulation_clock(); }
#define __trap() dtrain_emulation_trap(__builtin_LINE())
inline void __threadfence(void) {}
inline void __threadfence_block(void) {}

/* ---- PTX behind the named wrappers of the .cu ----
 * All 32 lanes take part in mma and ldmatrix. Fragments are laid out as the PTX manual says. */

/* d += A B with A 16x16 and B 16x8 of bf16 (or fp16) pairs. */
void dtrain_emulation_mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2], bool bf16,
                                DTRAIN_EMULATION_HERE);
/* d += A B with A 16x8 and B 8x8 of tf32: the low 13 bits of a float are not read. */
void dtrain_emulation_mma_1688_tf32(float d[4], const uint32_t a[4], const uint32_t b[2],
                                    DTRAIN_EMULATION_HERE);
/* count (1, 2, 4) matrices of 8x8 16-bit values; lane 8 i + j passes the address of row j of matrix i. */
void dtrain_emulation_ldmatrix(uint32_t *r, int count, bool transposed, const void *row,
                               DTRAIN_EMULATION_HERE);
/* 16 bytes global -> shared, or zeros for bytes == 0. Until the wait the target holds 0xff. */
void dtrain_emulation_cp_async_16(void *shared, const void *global, int bytes,
                                  DTRAIN_EMULATION_HERE);
void dtrain_emulation_cp_async_commit(void);
void dtrain_emulation_cp_async_wait(int groups_left);

/* ---- Atomics: threads take turns, so that plain code is atomic ---- */

#define DTRAIN_EMULATION_ATOMIC(name, type, result) \
    inline type name(type *address, type value)     \
    {                                               \
        type old = *address;                        \
        *address = static_cast<type>(result);       \
        return old;                                 \
    }
#define DTRAIN_EMULATION_INTEGER_ATOMICS(type)                          \
    DTRAIN_EMULATION_ATOMIC(atomicMax, type, old > value ? old : value) \
    DTRAIN_EMULATION_ATOMIC(atomicMin, type, old < value ? old : value) \
    DTRAIN_EMULATION_ATOMIC(atomicOr, type, old | value)                \
    DTRAIN_EMULATION_ATOMIC(atomicAnd, type, old &value)                \
    DTRAIN_EMULATION_ATOMIC(atomicExch, type, value)                    \
    inline type atomicCAS(type *address, type expected, type desired)   \
    {                                                                   \
        type old = *address;                                            \
        if (old == expected) *address = desired;                        \
        return old;                                                     \
    }
DTRAIN_EMULATION_ATOMIC(atomicAdd, int, unsigned(old) + unsigned(value))
DTRAIN_EMULATION_ATOMIC(atomicAdd, unsigned int, old + value)
DTRAIN_EMULATION_ATOMIC(atomicAdd, unsigned long long, old + value)
DTRAIN_EMULATION_ATOMIC(atomicAdd, float, old + value)
DTRAIN_EMULATION_ATOMIC(atomicAdd, double, old + value)
DTRAIN_EMULATION_ATOMIC(atomicExch, float, value)
DTRAIN_EMULATION_INTEGER_ATOMICS(int)
DTRAIN_EMULATION_INTEGER_ATOMICS(unsigned int)
DTRAIN_EMULATION_INTEGER_ATOMICS(unsigned long long)

/* ---- Arithmetic ---- */

template <class To, class From> inline To dtrain_emulation_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned int __float_as_uint(float x) { return dtrain_emulation_bits<unsigned int>(x); }
inline float __uint_as_float(unsigned int x) { return dtrain_emulation_bits<float>(x); }
inline int __float_as_int(float x) { return dtrain_emulation_bits<int>(x); }
inline float __int_as_float(int x) { return dtrain_emulation_bits<float>(x); }
inline long long __double_as_longlong(double x) { return dtrain_emulation_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return dtrain_emulation_bits<double>(x); }

inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned int __brev(unsigned int x)
{
    unsigned int reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1u) << (31 - i);
    return reversed;
}
inline unsigned int __umulhi(unsigned int a, unsigned int b)
{
    return (unsigned int)((unsigned long long)a * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    unsigned long long al = a & 0xffffffffu, ah = a >> 32, bl = b & 0xffffffffu, bh = b >> 32;
    unsigned long long middle = (al * bl >> 32) + (ah * bl & 0xffffffffu) + al * bh;
    return ah * bh + (ah * bl >> 32) + (middle >> 32);
}

template <class T> inline T __ldg(const T *address) { return *address; }
template <class T> inline T __ldcs(const T *address) { return *address; }
template <class T> inline T __ldcg(const T *address) { return *address; }
template <class T> inline void __stcs(T *address, T value) { *address = value; }
template <class T> inline void __stcg(T *address, T value) { *address = value; }

/* Macros where libm declares a function of the same name. */
inline float dtrain_emulation_rsqrtf(float x) { return 1.0f / sqrtf(x); }
#define rsqrtf(x) dtrain_emulation_rsqrtf(x)
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __powf(x, y) powf(x, y)
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
inline int __float2int_rn(float x) { return int(lrintf(x)); }

/* Floats as fminf and fmaxf: a NaN yields to a number. */
template <class A, class B> inline typename std::common_type<A, B>::type min(A a, B b)
{
    typedef typename std::common_type<A, B>::type T;
    if constexpr (std::is_floating_point<T>::value) return static_cast<T>(fmin(T(a), T(b)));
    else return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B> inline typename std::common_type<A, B>::type max(A a, B b)
{
    typedef typename std::common_type<A, B>::type T;
    if constexpr (std::is_floating_point<T>::value) return static_cast<T>(fmax(T(a), T(b)));
    else return T(a) < T(b) ? T(b) : T(a);
}
#endif
#endif
