/* Language: launches, halves, packs, sums
 *
 * The tools of every kernel. The emulation (tests/cuda/emulation) replaces the launch and the
 * dynamic shared memory; everything else compiles for a GPU and for a CPU. */

#pragma once

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
