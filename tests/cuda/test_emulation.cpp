/* test_emulation.cpp: the emulated CUDA device tells right kernels from wrong ones. Each kind of mistake
 * that it is meant to show is made here on purpose. */
#include "test.h"
#include <cuda_runtime.h>
#include <cublasLt.h>
#include <cuda_emulation.h>

#include <pthread.h>
#include <vector>

#define OK(call) CHECK_MSG((call) == 0, "%s failed: %s", #call, dtrain_emulation_message())
#define LAUNCH(kernel, blocks, threads, shared, stream, ...) \
    OK(dtrain_emulation_launch(kernel, blocks, threads, shared, stream, __VA_ARGS__))

static const int orders[] = {DTRAIN_EMULATION_FORWARD, DTRAIN_EMULATION_REVERSE,
                             DTRAIN_EMULATION_SHUFFLED};

template <class T> static T *device_array(size_t count)
{
    T *x = NULL;
    OK(cudaMalloc(&x, count * sizeof(T)));
    return x;
}
template <class T> static T *device_copy(const std::vector<T> &host)
{
    T *x = device_array<T>(host.size());
    OK(cudaMemcpy(x, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return x;
}
template <class T> static std::vector<T> host_copy(const T *x, size_t count)
{
    std::vector<T> host(count);
    OK(cudaMemcpy(host.data(), x, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}
static float random_float(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / 8388608.0f - 1.0f;
}
static std::vector<float> random_floats(size_t count, uint32_t seed)
{
    std::vector<float> x(count);
    for (float &value : x) value = random_float(&seed);
    return x;
}
static int is_nan_filled(float x) { return x != x; }

/* ---- Launches, orders, shared memory ---- */

struct index_args {
    int *seen;
    int step;
};
static __global__ void count_threads(index_args args)
{
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    args.seen[block * blockDim.x * blockDim.y * blockDim.z + thread] += args.step;
}

static void test_every_thread_runs_once(void)
{
    const size_t count = 2 * 3 * 2 * 5 * 4 * 3;
    for (int order : orders) {
        dtrain_emulation_set_order(order, 1);
        int *seen = device_copy(std::vector<int>(count, 0));
        index_args args = {seen, 7};
        LAUNCH(count_threads, dim3(2, 3, 2), dim3(5, 4, 3), 0, 0, args);
        args.step = 1000; /* arguments were copied */
        for (int times : host_copy(seen, count)) CHECK(times == 7);
        OK(cudaFree(seen));
    }
}

template <bool with_barrier> static __global__ void block_sum(const float *x, float *y)
{
    __shared__ float partial[256];
    partial[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        if (with_barrier) __syncthreads();
    }
    if (threadIdx.x == 0) y[blockIdx.x] = partial[0];
}

template <class Kernel>
static std::vector<float> sums_in_order(Kernel kernel, int order, uint64_t seed)
{
    float *x = device_copy(random_floats(4 * 256, 3)), *y = device_array<float>(4);
    dtrain_emulation_set_order(order, seed);
    LAUNCH(kernel, 4, 256, 0, 0, x, y);
    std::vector<float> sums = host_copy(y, 4);
    OK(cudaFree(x));
    OK(cudaFree(y));
    return sums;
}

static void test_order_shows_a_missing_barrier(void)
{
    std::vector<float> good = sums_in_order(block_sum<true>, DTRAIN_EMULATION_FORWARD, 0);
    std::vector<float> bad = sums_in_order(block_sum<false>, DTRAIN_EMULATION_FORWARD, 0);
    CHECK(good == sums_in_order(block_sum<true>, DTRAIN_EMULATION_REVERSE, 0));
    CHECK(bad != sums_in_order(block_sum<false>, DTRAIN_EMULATION_REVERSE, 0));
    for (uint64_t seed = 1; seed < 6; seed++) {
        CHECK(good == sums_in_order(block_sum<true>, DTRAIN_EMULATION_SHUFFLED, seed));
        CHECK(bad != sums_in_order(block_sum<false>, DTRAIN_EMULATION_SHUFFLED, seed));
    }
}

static __global__ void list_order(int *next, int *list)
{
    __syncthreads();
    list[atomicAdd(next, 1)] = int(blockIdx.x * blockDim.x + threadIdx.x);
}
static std::vector<int> turns_of(int order, uint64_t seed)
{
    int *next = device_copy(std::vector<int>(1, 0)), *list = device_array<int>(3 * 70);
    dtrain_emulation_set_order(order, seed);
    LAUNCH(list_order, 3, 70, 0, 0, next, list);
    std::vector<int> turns = host_copy(list, 3 * 70);
    OK(cudaFree(next));
    OK(cudaFree(list));
    return turns;
}
static void test_orders(void)
{
    std::vector<int> forward = turns_of(DTRAIN_EMULATION_FORWARD, 0);
    std::vector<int> reverse = turns_of(DTRAIN_EMULATION_REVERSE, 0);
    std::vector<int> shuffled = turns_of(DTRAIN_EMULATION_SHUFFLED, 9);
    for (int i = 0; i < 210; i++) CHECK(forward[(size_t)i] == i && reverse[(size_t)i] == 209 - i);
    CHECK(shuffled != forward && shuffled != reverse);
    CHECK(shuffled == turns_of(DTRAIN_EMULATION_SHUFFLED, 9));
    CHECK(shuffled != turns_of(DTRAIN_EMULATION_SHUFFLED, 10));
    std::vector<bool> seen(210, false);
    for (int i : shuffled) seen[(size_t)i] = true;
    for (bool s : seen) CHECK(s);
}

static __global__ void read_before_write(float *y)
{
    __shared__ float fixed[64];
    DTRAIN_CUDA_DYNAMIC_SHARED(float, dynamic);
    y[blockIdx.x * 2] = fixed[threadIdx.x];
    y[blockIdx.x * 2 + 1] = dynamic[threadIdx.x];
    fixed[threadIdx.x] = dynamic[threadIdx.x] = 1;
}
static void test_shared_memory_starts_as_nan(void)
{
    float *y = device_array<float>(6);
    for (float value : host_copy(y, 6)) CHECK(is_nan_filled(value)); /* device memory too */
    OK(cudaMemset(y, 0, 6 * sizeof *y));
    LAUNCH(read_before_write, 3, 1, 64, 0, y);
    for (float value : host_copy(y, 6)) CHECK(is_nan_filled(value));
    OK(cudaFree(y));
}

/* ---- Kernels that fail ---- */

static __global__ void barrier_in_branch(int *y)
{
    if (threadIdx.x >= 40 || blockIdx.x != 1) __syncthreads();
    else __syncwarp();
    *y = 1;
}
static __global__ void two_barriers(int *y)
{
    if (threadIdx.x < 16) __syncthreads();
    else __syncthreads();
    *y = 1;
}
static __global__ void shuffle_after_exit(int *y)
{
    if (threadIdx.x == 3) return;
    *y = __shfl_sync(0xffffffffu, int(threadIdx.x), 0);
}
static __global__ void barrier_after_exit(int *y)
{
    if (threadIdx.x == 3 || threadIdx.x == 63)
        return; /* one before and one after the others come */
    __syncthreads();
    atomicAdd(y, 1);
}
static __global__ void shuffle_outside_mask(int *y)
{
    *y = __shfl_sync(0x7fffffffu, int(threadIdx.x), 0);
}
static __global__ void trap(int *y)
{
    if (threadIdx.x == 5) __trap();
    *y = 1;
}
static __global__ void overrun(int *y)
{
    DTRAIN_CUDA_DYNAMIC_SHARED(unsigned char, bytes);
    bytes[10] = 1;
    *y = 1;
}
static __global__ void poll_for_ever(int *y)
{
    while (*(volatile int *)y >= 0) __nanosleep(100);
}
static __global__ void misaligned_ldmatrix(int *y)
{
    __shared__ __align__(16) unsigned char tile[1024];
    uint32_t r[4];
    dtrain_emulation_ldmatrix(r, 4, false, tile + 16 * threadIdx.x + (threadIdx.x == 7));
    *y = 1;
}
static __global__ void global_ldmatrix(int *y)
{
    uint32_t r[4];
    dtrain_emulation_ldmatrix(r, 4, false, y);
    *y = 1;
}

template <class Kernel>
static void expect_failure(Kernel kernel, cudaError_t error, const char *words)
{
    int *y = device_copy(std::vector<int>(64, 0));
    cudaStream_t stream;
    OK(cudaStreamCreate(&stream));
    dtrain_emulation_set_quiet(1);
    LAUNCH(kernel, 2, 64, 10, stream, y);
    CHECK(cudaPeekAtLastError() == cudaSuccess); /* it has not run */
    CHECK_MSG(cudaStreamSynchronize(stream) == error, "%s instead of %s: %s",
              cudaGetErrorName(cudaPeekAtLastError()), cudaGetErrorName(error), words);
    CHECK_MSG(strstr(dtrain_emulation_message(), words) != NULL, "\"%s\" is not in \"%s\"", words,
              dtrain_emulation_message());
    CHECK(cudaGetLastError() == error && cudaGetLastError() == error); /* sticky */
    CHECK(cudaFree(y) == error);
    dtrain_emulation_reset();
    OK(cudaStreamDestroy(stream));
    OK(cudaFree(y));
}

static void test_kernels_that_fail(void)
{
    expect_failure(barrier_in_branch, cudaErrorLaunchFailure,
                   "barrier_in_branch(int*), block (1,0,0)");
    expect_failure(barrier_in_branch, cudaErrorLaunchFailure, "24 wait at the barrier");
    expect_failure(two_barriers, cudaErrorLaunchFailure, "diverged");
    expect_failure(shuffle_after_exit, cudaErrorLaunchFailure, "33 of 64 have ended");
    expect_failure(shuffle_outside_mask, cudaErrorLaunchFailure, "without itself");
    expect_failure(trap, cudaErrorLaunchFailure, "__trap()");
    expect_failure(poll_for_ever, cudaErrorLaunchTimeout, "never comes");
    expect_failure(misaligned_ldmatrix, cudaErrorMisalignedAddress, "multiple of 16");
    expect_failure(global_ldmatrix, cudaErrorIllegalAddress, "not in shared memory");
    expect_failure(overrun, cudaErrorIllegalAddress, "dynamic shared memory");
    int *y = device_copy(std::vector<int>(1, 0));
    LAUNCH(barrier_after_exit, 1, 64, 0, 0,
           y); /* CUDA: a barrier waits for those that have not ended */
    CHECK(host_copy(y, 1)[0] == 62);
    OK(cudaFree(y));
}

static void test_launch_limits(void)
{
    int *y = device_copy(std::vector<int>(1, 0));
    dtrain_emulation_set_quiet(1);
    CHECK(dtrain_emulation_launch(trap, 1, 1025, 0, 0, y) == cudaErrorInvalidConfiguration);
    CHECK(dtrain_emulation_launch(trap, 1, dim3(1, 1, 65), 0, 0, y) ==
          cudaErrorInvalidConfiguration);
    CHECK(dtrain_emulation_launch(trap, 0, 32, 0, 0, y) == cudaErrorInvalidConfiguration);
    CHECK(dtrain_emulation_launch(trap, dim3(1, 65536), 32, 0, 0, y) ==
          cudaErrorInvalidConfiguration);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess);
    CHECK(dtrain_emulation_launch(overrun, 1, 1, 48 * 1024 - 1023, 0, y) == cudaErrorInvalidValue);
    cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    CHECK(cudaFuncSetAttribute(overrun, most, 232449) == cudaErrorInvalidValue);
    OK(cudaFuncSetAttribute(overrun, most, 232448));
    LAUNCH(overrun, 1, 1, 232448, 0, y);
    dtrain_emulation_set_capability(8, 0);
    CHECK(cudaFuncSetAttribute(overrun, most, 166913) == cudaErrorInvalidValue);
    cudaGetLastError();
    CHECK(host_copy(y, 1)[0] == 1);
    OK(cudaFree(y));
}

/* ---- Warps ---- */

static __global__ void shuffles(float *y, double *wide)
{
    unsigned lane = threadIdx.x % 32, all = 0xffffffffu;
    float x = float(threadIdx.x);
    y += 8 * threadIdx.x;
    y[0] = __shfl_sync(all, x, 35);
    y[1] = __shfl_sync(all, x, 3, 8);
    y[2] = __shfl_up_sync(all, x, 3);
    y[3] = __shfl_up_sync(all, x, 3, 16);
    y[4] = __shfl_down_sync(all, x, 5);
    y[5] = __shfl_down_sync(all, x, 5, 4);
    y[6] = __shfl_xor_sync(all, x, 9);
    if (lane % 2) y[7] = __shfl_xor_sync(0xaaaaaaaau, x, 2); /* two meetings of one warp */
    else y[7] = __shfl_sync(0x55555555u, x, 30);
    wide[threadIdx.x] = __shfl_xor_sync(all, 1e300 * lane, 1);
}
static void test_shuffles(void)
{
    for (int order : orders) {
        dtrain_emulation_set_order(order, 4);
        float *y = device_array<float>(8 * 64);
        double *wide = device_array<double>(64);
        LAUNCH(shuffles, 1, 64, 0, 0, y, wide);
        std::vector<float> got = host_copy(y, 8 * 64);
        std::vector<double> doubles = host_copy(wide, 64);
        for (int thread = 0; thread < 64; thread++) {
            int lane = thread % 32, warp = thread - lane;
            const float *row = &got[8 * (size_t)thread];
            CHECK(row[0] == warp + 3);
            CHECK(row[1] == warp + lane / 8 * 8 + 3);
            CHECK(row[2] == warp + (lane < 3 ? lane : lane - 3));
            CHECK(row[3] == warp + (lane % 16 < 3 ? lane : lane - 3));
            CHECK(row[4] == warp + (lane + 5 > 31 ? lane : lane + 5));
            CHECK(row[5] == thread);
            CHECK(row[6] == warp + (lane ^ 9));
            CHECK(row[7] == warp + (lane % 2 ? lane ^ 2 : 30));
            CHECK(doubles[(size_t)thread] == 1e300 * (lane ^ 1));
        }
        OK(cudaFree(y));
        OK(cudaFree(wide));
    }
}

static __global__ void votes(unsigned *y)
{
    unsigned t = threadIdx.x, all = 0xffffffffu;
    y += 10 * t;
    y[0] = __ballot_sync(all, t % 3 == 0);
    y[1] = (unsigned)__any_sync(all, t == 40);
    y[2] = (unsigned)__all_sync(all, t < 40);
    y[3] = __reduce_add_sync(all, t);
    y[4] = (unsigned)__reduce_max_sync(all, t < 32 ? -int(t) : int(t));
    y[5] = __reduce_min_sync(all, t);
    y[6] = (unsigned)__syncthreads_count(t % 2);
    y[7] = (unsigned)__syncthreads_or(t == 9);
    y[8] = (unsigned)__syncthreads_and(t != 9);
    y[9] = (unsigned)__syncthreads_and(t != 99);
}
static void test_votes(void)
{
    unsigned *y = device_array<unsigned>(10 * 64);
    LAUNCH(votes, 1, 64, 0, 0, y);
    std::vector<unsigned> got = host_copy(y, 10 * 64);
    for (unsigned t = 0; t < 64; t++) {
        unsigned ballot = 0, first = t / 32 * 32;
        for (unsigned lane = 0; lane < 32; lane++)
            ballot |= ((first + lane) % 3 == 0 ? 1u : 0u) << lane;
        const unsigned *row = &got[10 * t];
        CHECK(row[0] == ballot && row[1] == (t >= 32) && row[2] == (t < 32));
        CHECK(row[3] == (t < 32 ? 496u : 1520u) && row[4] == (t < 32 ? 0u : 63u) &&
              row[5] == first);
        CHECK(row[6] == 32 && row[7] == 1 && row[8] == 0 && row[9] == 1);
    }
    OK(cudaFree(y));
}

static __global__ void atomics(float *sum, int *largest, unsigned long long *bits, unsigned *slot)
{
    atomicAdd(sum, 1.0f);
    atomicMax(largest, int(threadIdx.x));
    atomicOr(bits, 1ull << (threadIdx.x % 64));
    unsigned seen = *slot, before;
    do { /* the usual loop */
        before = seen;
        seen = atomicCAS(slot, before, before + 2);
    } while (seen != before);
}
static void test_atomics(void)
{
    float *sum = device_copy(std::vector<float>(1, 0.0f));
    int *largest = device_copy(std::vector<int>(1, -1));
    unsigned long long *bits = device_copy(std::vector<unsigned long long>(1, 0));
    unsigned *slot = device_copy(std::vector<unsigned>(1, 0));
    LAUNCH(atomics, 3, 100, 0, 0, sum, largest, bits, slot);
    CHECK(host_copy(sum, 1)[0] == 300 && host_copy(largest, 1)[0] == 99);
    CHECK(host_copy(bits, 1)[0] == ~0ull && host_copy(slot, 1)[0] == 600);
    OK(cudaFree(sum));
    OK(cudaFree(largest));
    OK(cudaFree(bits));
    OK(cudaFree(slot));
}

static __global__ void bit_functions(unsigned long long *y)
{
    y[0] = (unsigned long long)(__popc(0xf0f0u) * 1000 + __clz(1) * 10 + __ffs(8));
    y[1] = __brev(1u) + __umulhi(0x80000000u, 6u);
    y[2] = __umul64hi(0xfedcba9876543210ull, 0x0123456789abcdefull);
    y[3] = __float_as_uint(1.0f) + (unsigned)__float2int_rn(2.5f);
    y[4] = (unsigned long long)(max(-3, 5) + min(2.5f, NAN) * 2 + (float)__clz(0));
}
static void test_bit_functions(void)
{
    unsigned long long *y = device_array<unsigned long long>(5);
    LAUNCH(bit_functions, 1, 1, 0, 0, y);
    std::vector<unsigned long long> got = host_copy(y, 5);
    CHECK(got[0] == 8000 + 310 + 4 && got[1] == 0x80000000u + 3);
    CHECK(got[2] ==
          (unsigned long long)((unsigned __int128)0xfedcba9876543210ull * 0x0123456789abcdefull >>
                               64));
    CHECK(got[3] == 0x3f800000u + 2 && got[4] == 5 + 5 + 32);
    OK(cudaFree(y));
}

/* ---- Tensor cores and asynchronous copies ---- */

static uint16_t bf16(float x) /* of values that bf16 has */
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(bits >> 16);
}
static uint16_t fp16(float x) /* of multiples of 1/8 in [1/8, 8) and their negatives */
{
    int exponent;
    float fraction = frexpf(fabsf(x), &exponent);
    return (uint16_t)((x < 0 ? 0x8000 : 0) | (exponent + 14) << 10 |
                      (int)((2 * fraction - 1) * 1024));
}

/* A (16x16 row-major), B (16x8 row-major), D (16x8). Fragments are read element by element as the PTX
 * manual numbers them. */
static __global__ void mma_by_elements(const uint16_t *a, const uint16_t *b, float *d, bool is_bf16)
{
    unsigned group = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t ra[4], rb[2];
    float rd[4];
    for (unsigned i = 0; i < 8; i += 2) {
        unsigned row = i == 0 || i == 1 || i == 4 || i == 5 ? group : group + 8;
        unsigned column = i < 4 ? t * 2 + (i & 1) : t * 2 + (i & 1) + 8;
        ra[i / 2] = a[row * 16 + column] | uint32_t(a[row * 16 + column + 1]) << 16;
    }
    for (unsigned i = 0; i < 4; i += 2) {
        unsigned row = i < 2 ? t * 2 : t * 2 + 8;
        rb[i / 2] = b[row * 8 + group] | uint32_t(b[(row + 1) * 8 + group]) << 16;
    }
    for (unsigned i = 0; i < 4; i++) rd[i] = d[(i < 2 ? group : group + 8) * 8 + t * 2 + (i & 1)];
    dtrain_emulation_mma_16816(rd, ra, rb, is_bf16);
    for (unsigned i = 0; i < 4; i++) d[(i < 2 ? group : group + 8) * 8 + t * 2 + (i & 1)] = rd[i];
}

/* The same through shared memory and ldmatrix: A as four 8x8 tiles, B row-major and transposed. */
static __global__ void mma_by_ldmatrix(const uint16_t *a, const uint16_t *b, float *d, bool is_bf16)
{
    __shared__ __align__(16) uint16_t sa[16 * 16];
    __shared__ __align__(16) uint16_t sb[16 * 8];
    unsigned lane = threadIdx.x, group = lane / 4, t = lane % 4;
    uint32_t ra[4], rb[2];
    float rd[4];
    dtrain_emulation_cp_async_16(&sa[lane * 8], &a[lane * 8], 16);
    if (lane < 16) dtrain_emulation_cp_async_16(&sb[lane * 8], &b[lane * 8], 16);
    dtrain_emulation_cp_async_commit();
    dtrain_emulation_cp_async_wait(0);
    __syncwarp();
    dtrain_emulation_ldmatrix(ra, 4, false, &sa[lane % 16 * 16 + lane / 16 * 8]);
    dtrain_emulation_ldmatrix(rb, 2, true, lane < 16 ? &sb[lane * 8] : NULL);
    for (unsigned i = 0; i < 4; i++) rd[i] = d[(i < 2 ? group : group + 8) * 8 + t * 2 + (i & 1)];
    dtrain_emulation_mma_16816(rd, ra, rb, is_bf16);
    for (unsigned i = 0; i < 4; i++) d[(i < 2 ? group : group + 8) * 8 + t * 2 + (i & 1)] = rd[i];
}

static __global__ void mma_tf32(const float *a, const float *b, float *d) /* 16x8, 8x8 */
{
    unsigned group = threadIdx.x / 4, t = threadIdx.x % 4;
    uint32_t ra[4], rb[2];
    float rd[4];
    for (unsigned i = 0; i < 4; i++)
        ra[i] = __float_as_uint(a[(i % 2 ? group + 8 : group) * 8 + (i < 2 ? t : t + 4)]);
    for (unsigned i = 0; i < 2; i++) rb[i] = __float_as_uint(b[(i ? t + 4 : t) * 8 + group]);
    for (unsigned i = 0; i < 4; i++) rd[i] = d[(i < 2 ? group : group + 8) * 8 + t * 2 + (i & 1)];
    dtrain_emulation_mma_1688_tf32(rd, ra, rb);
    for (unsigned i = 0; i < 4; i++) d[(i < 2 ? group : group + 8) * 8 + t * 2 + (i & 1)] = rd[i];
}

static float eighths(uint32_t *seed)
{
    float x = roundf(8 * 3 * random_float(seed)) / 8;
    return x == 0 ? 0.125f : x;
}

static void test_mma(void)
{
    uint32_t seed = 5;
    std::vector<float> a(256), b(128), d(128);
    for (float &x : a) x = eighths(&seed);
    for (float &x : b) x = eighths(&seed);
    for (float &x : d) x = eighths(&seed);
    for (int mode = 0; mode < 4; mode++) {
        std::vector<uint16_t> a16, b16;
        for (float x : a) a16.push_back(mode % 2 ? bf16(x) : fp16(x));
        for (float x : b) b16.push_back(mode % 2 ? bf16(x) : fp16(x));
        uint16_t *da = device_copy(a16), *db = device_copy(b16);
        float *dd = device_copy(d);
        if (mode < 2) LAUNCH(mma_by_elements, 1, 32, 0, 0, da, db, dd, mode % 2 == 1);
        else LAUNCH(mma_by_ldmatrix, 1, 32, 0, 0, da, db, dd, mode % 2 == 1);
        std::vector<float> got = host_copy(dd, 128);
        for (size_t row = 0; row < 16; row++)
            for (size_t column = 0; column < 8; column++) {
                double sum = d[row * 8 + column];
                for (size_t k = 0; k < 16; k++) sum += (double)a[row * 16 + k] * b[k * 8 + column];
                CHECK_CLOSE(got[row * 8 + column], sum, 1e-6);
            }
        OK(cudaFree(da));
        OK(cudaFree(db));
        OK(cudaFree(dd));
    }
}

static float truncated(float x) /* to the 10 bits of fraction that tf32 has */
{
    int exponent;
    frexpf(x, &exponent);
    return ldexpf(truncf(ldexpf(x, 11 - exponent)), exponent - 11);
}
static void test_mma_tf32(void)
{
    std::vector<float> a = random_floats(128, 6), b = random_floats(64, 7),
                       d = random_floats(128, 8);
    float *da = device_copy(a), *db = device_copy(b), *dd = device_copy(d);
    LAUNCH(mma_tf32, 1, 32, 0, 0, da, db, dd);
    std::vector<float> got = host_copy(dd, 128);
    for (size_t row = 0; row < 16; row++)
        for (size_t column = 0; column < 8; column++) {
            double sum = d[row * 8 + column];
            for (size_t k = 0; k < 8; k++)
                sum += (double)truncated(a[row * 8 + k]) * truncated(b[k * 8 + column]);
            CHECK_CLOSE(got[row * 8 + column], sum, 1e-6);
        }
    OK(cudaFree(da));
    OK(cudaFree(db));
    OK(cudaFree(dd));
}

static __global__ void ldmatrix_layouts(uint16_t *y)
{
    __shared__ __align__(16) uint16_t tile[32 * 8];
    unsigned lane = threadIdx.x;
    uint32_t r[4];
    for (unsigned i = 0; i < 8; i++) tile[lane * 8 + i] = uint16_t(lane * 8 + i);
    __syncwarp();
    for (unsigned variant = 0; variant < 6; variant++) {
        int count = 1 << variant / 2;
        dtrain_emulation_ldmatrix(r, count, variant % 2 != 0, &tile[lane * 8]);
        for (int i = 0; i < count; i++)
            memcpy(&y[((variant * 32 + lane) * 4 + (unsigned)i) * 2], &r[i], 4);
    }
}
static void test_ldmatrix(void)
{
    uint16_t *y = device_array<uint16_t>(6 * 32 * 4 * 2);
    LAUNCH(ldmatrix_layouts, 1, 32, 0, 0, y);
    std::vector<uint16_t> got = host_copy(y, 6 * 32 * 4 * 2);
    for (int variant = 0; variant < 6; variant++)
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 1 << variant / 2; i++)
                for (int half = 0; half < 2; half++) {
                    int row = lane / 4, column = lane % 4 * 2 + half;
                    int expected = variant % 2 ? column * 8 + row : row * 8 + column;
                    CHECK(got[(size_t)(((variant * 32 + lane) * 4 + i) * 2 + half)] ==
                          64 * i + expected);
                }
    OK(cudaFree(y));
}

/* Three tiles through two buffers; `wait` groups may be left while the next tile is read. */
static __global__ void pipeline(const float *x, float *y, int left)
{
    __shared__ __align__(16) float buffer[2][128];
    unsigned lane = threadIdx.x;
    dtrain_emulation_cp_async_16(&buffer[0][lane * 4], &x[lane * 4], 16);
    dtrain_emulation_cp_async_commit();
    for (int tile = 0; tile < 3; tile++) {
        bool last = tile == 2;
        const float *next = &x[(tile + 1) * 128 + int(lane) * 4];
        dtrain_emulation_cp_async_16(&buffer[(tile + 1) % 2][lane * 4], last ? NULL : next,
                                     last ? 0 : 16);
        dtrain_emulation_cp_async_commit();
        dtrain_emulation_cp_async_wait(left);
        __syncthreads();
        for (unsigned i = 0; i < 4; i++)
            y[tile * 128 + int(i * 32 + lane)] = buffer[tile % 2][i * 32 + lane];
        __syncthreads();
    }
    dtrain_emulation_cp_async_wait(0);
    y[3 * 128 + lane] = buffer[1][lane * 4];
}
static __global__ void read_before_wait(const float *x, float *y)
{
    __shared__ __align__(16) float buffer[4];
    buffer[3] = 5;
    dtrain_emulation_cp_async_16(buffer, x, 16);
    dtrain_emulation_cp_async_commit();
    y[0] = buffer[3];
    dtrain_emulation_cp_async_wait(0);
    y[1] = buffer[3];
}
static void test_async_copies(void)
{
    std::vector<float> x = random_floats(3 * 128, 9);
    float *dx = device_copy(x), *dy = device_array<float>(3 * 128 + 32);
    LAUNCH(read_before_wait, 1, 1, 0, 0, dx, dy);
    std::vector<float> early = host_copy(dy, 2);
    CHECK(is_nan_filled(early[0]) && early[1] == x[3]);
    for (int left = 0; left < 3; left++) {
        LAUNCH(pipeline, 1, 32, 0, 0, dx, dy, left);
        std::vector<float> y = host_copy(dy, 3 * 128 + 32);
        for (size_t i = 0; i < 3 * 128; i++)
            if (left < 2) CHECK(y[i] == x[i]);
            else CHECK(!(y[i] == x[i])); /* not waited for: NaN, or what was there before */
        for (size_t i = 3 * 128; i < y.size(); i++) CHECK(y[i] == 0);
    }
    OK(cudaFree(dx));
    OK(cudaFree(dy));
}

/* ---- Streams and events ---- */

static __global__ void add_one(float *x) { x[blockIdx.x * blockDim.x + threadIdx.x] += 1; }
static __global__ void double_it(float *x) { x[blockIdx.x * blockDim.x + threadIdx.x] *= 2; }

static cudaStream_t new_stream(void)
{
    cudaStream_t stream = NULL;
    OK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -1));
    return stream;
}
static cudaEvent_t new_event(void)
{
    cudaEvent_t event = NULL;
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

static void test_host_reads_too_early(void)
{
    cudaStream_t stream = new_stream();
    float *x = device_copy(std::vector<float>(32, 1.0f)), *host = NULL;
    OK(cudaMallocHost(&host, 32 * sizeof *host));
    for (int eager = 0; eager < 2; eager++) {
        dtrain_emulation_set_eager(eager);
        host[0] = -1;
        LAUNCH(add_one, 1, 32, 0, stream, x);
        OK(cudaMemcpyAsync(host, x, 32 * sizeof *host, cudaMemcpyDeviceToHost, stream));
        CHECK(host[0] == (eager ? 3.0f : -1.0f));
        OK(cudaStreamSynchronize(stream));
        CHECK(host[0] == (eager ? 3.0f : 2.0f));
    }
    OK(cudaFreeHost(host));
    OK(cudaFree(x));
    OK(cudaStreamDestroy(stream));
}

/* Pageable memory is read before the call returns, pinned memory when the stream comes to it. */
static void test_source_changes_too_early(void)
{
    cudaStream_t stream = new_stream();
    float *x = device_array<float>(2), *pinned = NULL, pageable = 1, after[2];
    OK(cudaHostAlloc(&pinned, sizeof *pinned, cudaHostAllocDefault));
    *pinned = 1;
    OK(cudaMemcpyAsync(x, &pageable, sizeof *x, cudaMemcpyHostToDevice, stream));
    OK(cudaMemcpyAsync(x + 1, pinned, sizeof *x, cudaMemcpyHostToDevice, stream));
    *pinned = pageable = 2;
    OK(cudaMemcpyAsync(after, x, sizeof after, cudaMemcpyDeviceToHost,
                       stream)); /* waits: pageable */
    CHECK(after[0] == 1 && after[1] == 2);
    OK(cudaFreeHost(pinned));
    OK(cudaFree(x));
    OK(cudaStreamDestroy(stream));
}

static float across_streams(bool wait, bool eager)
{
    cudaStream_t first = new_stream(), second = new_stream();
    cudaEvent_t event = new_event();
    float *x = device_copy(std::vector<float>(32, 1.0f)), result;
    dtrain_emulation_set_eager(eager);
    LAUNCH(add_one, 1, 32, 0, first, x);
    OK(cudaEventRecord(event, first));
    LAUNCH(add_one, 1, 32, 0, first, x); /* after the event: not waited for */
    if (wait) OK(cudaStreamWaitEvent(second, event));
    LAUNCH(double_it, 1, 32, 0, second, x);
    OK(cudaMemcpyAsync(&result, x, sizeof result, cudaMemcpyDeviceToHost, second));
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(first));
    OK(cudaStreamDestroy(second));
    OK(cudaFree(x));
    return result;
}
static void test_missing_event_wait(void)
{
    CHECK(across_streams(true, false) == 4);
    CHECK(across_streams(false, false) == 2); /* the mistake shows */
    CHECK(across_streams(true, true) == 6);
}

static void test_legacy_stream_waits_for_blocking_ones(void)
{
    cudaStream_t blocking = NULL;
    float *x = device_copy(std::vector<float>(32, 1.0f));
    OK(cudaStreamCreate(&blocking));
    LAUNCH(add_one, 1, 32, 0, blocking, x);
    LAUNCH(double_it, 1, 32, 0, 0, x);      /* after the blocking stream */
    LAUNCH(add_one, 1, 32, 0, blocking, x); /* after the legacy stream */
    OK(cudaStreamSynchronize(blocking));
    CHECK(host_copy(x, 1)[0] == 5);
    OK(cudaStreamDestroy(blocking));
    OK(cudaFree(x));
}

static void test_queries(void)
{
    cudaStream_t stream = new_stream();
    cudaEvent_t event = new_event(), timed[2];
    float *x = device_copy(std::vector<float>(32, 1.0f)), milliseconds = -1;
    int polls = 0;
    CHECK(cudaEventQuery(event) == cudaSuccess && cudaStreamQuery(stream) == cudaSuccess);
    LAUNCH(add_one, 1, 32, 0, stream, x);
    OK(cudaEventRecord(event, stream));
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    CHECK(cudaGetLastError() == cudaErrorNotReady); /* it is remembered: programs must clear it */
    while (cudaEventQuery(event) == cudaErrorNotReady && polls < 100) polls++;
    CHECK(polls > 0 && polls < 100 && cudaStreamQuery(stream) == cudaSuccess);
    for (cudaEvent_t &e : timed) OK(cudaEventCreate(&e));
    OK(cudaEventRecord(timed[0], stream));
    LAUNCH(add_one, 1, 32, 0, stream, x);
    CHECK(cudaEventElapsedTime(&milliseconds, timed[0], timed[1]) ==
          cudaErrorInvalidResourceHandle);
    OK(cudaEventRecord(timed[1], stream));
    CHECK(cudaEventElapsedTime(&milliseconds, timed[0], timed[1]) == cudaErrorNotReady);
    OK(cudaEventSynchronize(timed[1]));
    OK(cudaEventElapsedTime(&milliseconds, timed[0], timed[1]));
    CHECK(milliseconds >= 0 && milliseconds < 10000);
    CHECK(cudaEventElapsedTime(&milliseconds, event, timed[1]) == cudaErrorInvalidResourceHandle);
    for (cudaEvent_t e : timed) OK(cudaEventDestroy(e));
    CHECK(cudaEventRecord(timed[0], stream) == cudaErrorInvalidResourceHandle);
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(stream));
    CHECK(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
    OK(cudaFree(x));
}

static void test_queues_are_bounded(void)
{
    cudaStream_t stream = new_stream();
    dtrain_emulation_counters counters;
    float *x = device_copy(std::vector<float>(1, 0.0f));
    for (int i = 0; i < 3000; i++) LAUNCH(add_one, 1, 1, 0, stream, x);
    dtrain_emulation_get_counters(&counters);
    CHECK(counters.operations_queued > 500 && counters.operations_queued <= 1024);
    OK(cudaDeviceSynchronize());
    dtrain_emulation_get_counters(&counters);
    CHECK(counters.operations_queued == 0 && counters.kernels == 3000);
    CHECK(host_copy(x, 1)[0] == 3000);
    OK(cudaStreamDestroy(stream));
    OK(cudaFree(x));
}

struct host_call {
    pthread_mutex_t mutex;
    int done;
    cudaError_t inside;
};
static void host_function(void *data)
{
    host_call *call = (host_call *)data;
    pthread_mutex_lock(&call->mutex);
    call->inside = cudaDeviceSynchronize();
    call->done++;
    pthread_mutex_unlock(&call->mutex);
}
/* Holds the function's mutex while it calls the runtime: no deadlock. */
static void *other_thread(void *data)
{
    host_call *call = (host_call *)data;
    for (int i = 0; i < 200; i++) {
        float *x = NULL;
        pthread_mutex_lock(&call->mutex);
        OK(cudaMalloc(&x, 4));
        pthread_mutex_unlock(&call->mutex);
        OK(cudaFree(x)); /* this one waits for the function */
    }
    return NULL;
}
static void test_host_functions(void)
{
    cudaStream_t stream = new_stream();
    host_call call = {PTHREAD_MUTEX_INITIALIZER, 0, cudaSuccess};
    pthread_t thread;
    OK(cudaLaunchHostFunc(stream, host_function, &call));
    CHECK(call.done == 0);
    OK(cudaStreamSynchronize(stream));
    CHECK(call.done == 1 && call.inside == cudaErrorNotPermitted);
    cudaGetLastError();
    CHECK(pthread_create(&thread, NULL, other_thread, &call) == 0);
    for (int i = 0; i < 200; i++) {
        OK(cudaLaunchHostFunc(stream, host_function, &call));
        OK(cudaStreamSynchronize(stream));
        cudaGetLastError();
    }
    pthread_join(thread, NULL);
    CHECK(call.done == 201);
    OK(cudaStreamDestroy(stream));
}

/* ---- Memory ---- */

static void test_memory_errors(void)
{
    float *x = device_array<float>(16), *freed = device_array<float>(16), host[16] = {0};
    OK(cudaFree(freed));
    dtrain_emulation_set_quiet(1);
    cudaMemcpyKind up = cudaMemcpyHostToDevice, down = cudaMemcpyDeviceToHost;
    CHECK(cudaMemcpy(x, host, 64, down) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(x, host, 64, cudaMemcpyHostToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(host, x, 64, up) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(x, host, 68, up) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(x + 1, host, 64, up) == cudaErrorInvalidValue);
    CHECK(cudaMemcpy(freed, host, 4, up) == cudaErrorInvalidValue);
    CHECK(cudaMemset(x + 8, 0, 33) == cudaErrorInvalidValue);
    CHECK(cudaFree(x + 1) == cudaErrorInvalidValue && cudaFree(freed) == cudaErrorInvalidValue);
    CHECK(cudaFreeHost(x) == cudaErrorInvalidValue);
    cudaGetLastError();
    OK(cudaMemcpy(x + 1, host, 60, cudaMemcpyDefault));
    OK(cudaMemset(x + 8, 0, 32));
    OK(cudaFree(NULL));
    CHECK(cudaHostRegister(host, sizeof host, cudaHostRegisterDefault) == cudaSuccess);
    CHECK(cudaHostRegister(host, 8, 0) == cudaErrorHostMemoryAlreadyRegistered);
    cudaPointerAttributes attributes;
    OK(cudaPointerGetAttributes(&attributes, host + 3));
    CHECK(attributes.type == cudaMemoryTypeHost && attributes.hostPointer == host + 3);
    OK(cudaHostUnregister(host));
    CHECK(cudaHostUnregister(host) == cudaErrorHostMemoryNotRegistered);
    OK(cudaPointerGetAttributes(&attributes, host));
    CHECK(attributes.type == cudaMemoryTypeUnregistered);
    OK(cudaPointerGetAttributes(&attributes, x + 15));
    CHECK(attributes.type == cudaMemoryTypeDevice && attributes.devicePointer == x + 15);
    OK(cudaFree(x));
}

/* ---- Graphs ---- */

/* Forks from first to second and, with join, back. */
static cudaGraph_t capture_fork(cudaStream_t first, cudaStream_t second, float *x, bool join)
{
    cudaEvent_t forked = new_event(), joined = new_event();
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal));
    LAUNCH(add_one, 1, 32, 0, first, x);
    OK(cudaEventRecord(forked, first));
    OK(cudaStreamWaitEvent(second, forked));
    LAUNCH(double_it, 1, 32, 0, second, x);
    OK(cudaEventRecord(joined, second));
    if (join) OK(cudaStreamWaitEvent(first, joined));
    CHECK(cudaStreamEndCapture(first, &graph) ==
          (join ? cudaSuccess : cudaErrorStreamCaptureUnjoined));
    cudaGetLastError();
    OK(cudaEventDestroy(forked));
    OK(cudaEventDestroy(joined));
    return graph;
}

static void test_graph_replay(void)
{
    cudaStream_t first = new_stream(), second = new_stream();
    cudaGraphExec_t executable = NULL;
    float *x = device_copy(std::vector<float>(32, 1.0f));
    cudaGraph_t graph = capture_fork(first, second, x, true);
    CHECK(host_copy(x, 1)[0] == 1); /* nothing ran */
    OK(cudaGraphInstantiate(&executable, graph));
    OK(cudaGraphDestroy(graph));
    for (int order : orders) {
        dtrain_emulation_set_order(order, 2);
        OK(cudaMemcpy(x, std::vector<float>(32, 1.0f).data(), 128, cudaMemcpyHostToDevice));
        OK(cudaGraphLaunch(executable, first));
        OK(cudaGraphLaunch(executable, first));
        CHECK(host_copy(x, 1)[0] == 1); /* late, and first does not block the legacy stream */
        OK(cudaStreamSynchronize(first));
        CHECK(host_copy(x, 1)[0] == 10);
    }
    OK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphLaunch(executable, first) == cudaErrorInvalidResourceHandle);
    dtrain_emulation_set_quiet(1);
    CHECK(capture_fork(first, second, x, false) == NULL);
    OK(cudaFree(x));
    OK(cudaStreamDestroy(first));
    OK(cudaStreamDestroy(second));
}

/* Two branches without an edge between them run in any order. */
static float unordered_branches(int order)
{
    cudaStream_t first = new_stream(), second = new_stream();
    cudaEvent_t forked = new_event(), joined = new_event();
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    float *x = device_copy(std::vector<float>(32, 1.0f));
    dtrain_emulation_set_order(order, 0);
    OK(cudaStreamBeginCapture(first, cudaStreamCaptureModeRelaxed));
    OK(cudaEventRecord(forked, first));
    OK(cudaStreamWaitEvent(second, forked));
    LAUNCH(add_one, 1, 32, 0, first, x);
    LAUNCH(double_it, 1, 32, 0, second, x);
    OK(cudaEventRecord(joined, second));
    OK(cudaStreamWaitEvent(first, joined));
    OK(cudaStreamEndCapture(first, &graph));
    OK(cudaGraphInstantiate(&executable, graph));
    OK(cudaGraphLaunch(executable, first));
    OK(cudaGraphExecDestroy(executable)); /* the launch goes on */
    OK(cudaStreamSynchronize(first));
    float result = host_copy(x, 1)[0];
    OK(cudaGraphDestroy(graph));
    OK(cudaEventDestroy(forked));
    OK(cudaEventDestroy(joined));
    OK(cudaStreamDestroy(first));
    OK(cudaStreamDestroy(second));
    OK(cudaFree(x));
    return result;
}

static void *query_event(void *event)
{
    return (void *)(uintptr_t)cudaEventQuery((cudaEvent_t)event);
}
static void test_graph_mistakes(void)
{
    cudaStream_t stream = new_stream(), other = new_stream();
    cudaEvent_t event = new_event();
    cudaGraph_t graph;
    cudaStreamCaptureStatus status;
    float *x = device_copy(std::vector<float>(32, 1.0f)), *y = NULL;
    pthread_t thread;
    void *result;
    CHECK(unordered_branches(DTRAIN_EMULATION_FORWARD) == 4);
    CHECK(unordered_branches(DTRAIN_EMULATION_REVERSE) == 3);
    dtrain_emulation_set_quiet(1);
    OK(cudaEventRecord(event, other));
    for (int mistake = 0; mistake < 6; mistake++) {
        cudaStreamCaptureMode mode =
            mistake == 5 ? cudaStreamCaptureModeGlobal : cudaStreamCaptureModeThreadLocal;
        OK(cudaStreamBeginCapture(stream, mode));
        OK(cudaStreamIsCapturing(stream, &status));
        CHECK(status == cudaStreamCaptureStatusActive);
        LAUNCH(add_one, 1, 32, 0, stream, x);
        if (mistake == 0) CHECK(cudaStreamSynchronize(stream) == cudaErrorStreamCaptureUnsupported);
        if (mistake == 1) CHECK(cudaMalloc(&y, 4) == cudaErrorStreamCaptureUnsupported);
        if (mistake == 2) CHECK(cudaDeviceSynchronize() == cudaErrorStreamCaptureUnsupported);
        if (mistake == 3)
            CHECK(cudaStreamWaitEvent(stream, event) == cudaErrorStreamCaptureIsolation);
        if (mistake >= 4) { /* another thread's query spoils a global capture only */
            pthread_create(&thread, NULL, query_event, event);
            pthread_join(thread, &result);
            CHECK((uintptr_t)result != 0);
        }
        OK(cudaStreamIsCapturing(stream, &status));
        CHECK(status ==
              (mistake == 4 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated));
        CHECK(cudaStreamEndCapture(stream, &graph) ==
              (mistake == 4 ? cudaSuccess : cudaErrorStreamCaptureInvalidated));
        CHECK((graph != NULL) == (mistake == 4));
        if (graph) OK(cudaGraphDestroy(graph));
        cudaGetLastError();
    }
    OK(cudaStreamSynchronize(stream));
    CHECK(host_copy(x, 1)[0] == 1);
    OK(cudaFree(x));
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(stream));
    OK(cudaStreamDestroy(other));
}

/* ---- Operations that take their time ---- */

struct slow_state {
    float *x;
    const int *open; /* the gate */
    int *looks;
    int left; /* further looks that it takes, of this launch */
};
static bool slow_double(void *state)
{
    slow_state *s = (slow_state *)state;
    ++*s->looks;
    if (!*s->open || s->left-- > 0) return false;
    for (int i = 0; i < 32; i++) s->x[i] *= 2;
    return true;
}

/* Behind the gate nothing of its stream and of those that wait for it runs; others do. */
static void test_slow_operations(void)
{
    cudaStream_t stream = new_stream(), waiting = new_stream(), other = new_stream();
    cudaEvent_t event = new_event(), others = new_event();
    float *x = device_copy(std::vector<float>(32, 1.0f)),
          *y = device_copy(std::vector<float>(32, 1.0f));
    int open = 0, looks = 0;
    slow_state state = {x, &open, &looks, 5};
    LAUNCH(add_one, 1, 32, 0, stream, x);
    CHECK(dtrain_emulation_enqueue_step(stream, slow_double, &state, sizeof state));
    state.x = NULL; /* it was copied */
    OK(cudaEventRecord(event, stream));
    OK(cudaStreamWaitEvent(waiting, event));
    LAUNCH(add_one, 1, 32, 0, waiting, x);
    LAUNCH(add_one, 1, 32, 0, other, y);
    OK(cudaEventRecord(others, other));
    for (int i = 0; i < 100; i++) {
        CHECK(cudaEventQuery(event) == cudaErrorNotReady);
        CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
        CHECK(cudaStreamQuery(waiting) == cudaErrorNotReady);
    }
    CHECK(looks > 50 && cudaEventQuery(others) == cudaSuccess);
    CHECK(x[0] == 2 && y[0] == 2); /* a look at the device's memory itself: copies would wait */
    cudaGetLastError();
    open = 1;
    looks = 0;
    OK(cudaStreamSynchronize(waiting));
    CHECK(looks == 6 && x[31] == 5);
    OK(cudaStreamDestroy(stream));
    CHECK(!dtrain_emulation_enqueue_step(stream, slow_double, &state, sizeof state));
    OK(cudaStreamDestroy(waiting));
    OK(cudaStreamDestroy(other));
    OK(cudaEventDestroy(event));
    OK(cudaEventDestroy(others));
    OK(cudaFree(x));
    OK(cudaFree(y));
}

/* Recorded, it starts anew in each launch; a branch beside it does not wait. */
static void test_slow_operations_in_graphs(void)
{
    cudaStream_t first = new_stream(), second = new_stream();
    cudaEvent_t forked = new_event(), joined = new_event();
    cudaGraph_t graph = NULL;
    cudaGraphExec_t executable = NULL;
    float *x = device_copy(std::vector<float>(32, 1.0f)),
          *y = device_copy(std::vector<float>(32, 1.0f));
    int open = 1, looks = 0;
    slow_state state = {x, &open, &looks, 3};
    OK(cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal));
    OK(cudaEventRecord(forked, first));
    OK(cudaStreamWaitEvent(second, forked));
    CHECK(dtrain_emulation_enqueue_step(second, slow_double, &state, sizeof state));
    LAUNCH(add_one, 1, 32, 0, second, x);
    LAUNCH(add_one, 1, 32, 0, first, y);
    OK(cudaEventRecord(joined, second));
    OK(cudaStreamWaitEvent(first, joined));
    LAUNCH(double_it, 1, 32, 0, first, x);
    OK(cudaStreamEndCapture(first, &graph));
    CHECK(looks == 0);
    OK(cudaGraphInstantiate(&executable, graph));
    for (int launch = 1; launch <= 3; launch++) {
        dtrain_emulation_set_order(orders[launch - 1], 4);
        OK(cudaMemcpy(x, std::vector<float>(32, 1.0f).data(), 128, cudaMemcpyHostToDevice));
        open = looks = 0;
        OK(cudaGraphLaunch(executable, first));
        for (int i = 0; i < 20; i++) CHECK(cudaStreamQuery(first) == cudaErrorNotReady);
        CHECK(x[0] == 1 && y[0] == float(1 + launch) && looks > 10);
        open = 1;
        looks = 0;
        OK(cudaStreamSynchronize(first));
        CHECK(looks == 4 && x[0] == 6 && x[31] == 6);
    }
    dtrain_emulation_counters counters;
    dtrain_emulation_get_counters(&counters);
    CHECK(counters.graph_launches == 3);
    OK(cudaGraphExecDestroy(executable));
    OK(cudaGraphDestroy(graph));
    OK(cudaEventDestroy(forked));
    OK(cudaEventDestroy(joined));
    OK(cudaStreamDestroy(first));
    OK(cudaStreamDestroy(second));
    OK(cudaFree(x));
    OK(cudaFree(y));
}

/* ---- Faults, counters, threads, processes ---- */

static void test_faults(void)
{
    int count = -1;
    float *x = device_copy(std::vector<float>(32, 1.0f)), *y = NULL;
    dtrain_emulation_inject(DTRAIN_EMULATION_NO_DRIVER, 1);
    CHECK(cudaGetDeviceCount(&count) == cudaErrorInsufficientDriver && count == 0);
    CHECK(cudaMalloc(&y, 4) == cudaErrorInsufficientDriver);
    dtrain_emulation_reset();
    dtrain_emulation_set_device_count(0);
    CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 0);
    CHECK(cudaSetDevice(0) == cudaErrorNoDevice);
    dtrain_emulation_set_device_count(2);
    CHECK(cudaSetDevice(1) == cudaSuccess && cudaSetDevice(2) == cudaErrorInvalidDevice);
    CHECK(cudaGetLastError() == cudaErrorInvalidDevice);
    OK(cudaSetDevice(0));
    dtrain_emulation_inject(DTRAIN_EMULATION_NO_KERNEL_IMAGE, 1);
    CHECK(dtrain_emulation_launch(add_one, 1, 32, 0, 0, x) == cudaErrorNoKernelImageForDevice);
    dtrain_emulation_reset();
    dtrain_emulation_inject(DTRAIN_EMULATION_FAIL_ALLOCATION, 2);
    OK(cudaMalloc(&y, 4));
    OK(cudaFree(y));
    CHECK(cudaMalloc(&y, 4) == cudaErrorMemoryAllocation && y == NULL);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    OK(cudaMalloc(&y, 4));
    OK(cudaFree(y));
    dtrain_emulation_set_memory_left(1000);
    CHECK(cudaMalloc(&y, 1001) == cudaErrorMemoryAllocation);
    OK(cudaMalloc(&y, 1000));
    CHECK(cudaMalloc(&y + 0, 0) == cudaSuccess && y == NULL);
    dtrain_emulation_reset();
    dtrain_emulation_inject(DTRAIN_EMULATION_LOSE_DEVICE, 3);
    for (int i = 0; i < 4; i++) LAUNCH(add_one, 1, 32, 0, 0, x);
    CHECK(cudaDeviceSynchronize() == cudaErrorLaunchFailure);
    CHECK(cudaGetLastError() == cudaErrorLaunchFailure &&
          cudaMalloc(&y, 4) == cudaErrorLaunchFailure);
    dtrain_emulation_reset();
    CHECK(host_copy(x, 1)[0] == 3); /* the third and the fourth did not run */
    OK(cudaFree(x));
}

static void test_leak_counters(void)
{
    dtrain_emulation_counters c;
    float *x = device_array<float>(100), *host = NULL;
    cudaStream_t stream = new_stream();
    cudaEvent_t event = new_event();
    cublasLtHandle_t handle;
    OK(cudaMallocHost(&host, 8));
    OK(cublasLtCreate(&handle));
    LAUNCH(add_one, 1, 100, 0, stream, x);
    OK(cudaMemcpyAsync(x, x + 50, 200, cudaMemcpyDeviceToDevice, stream));
    OK(cudaStreamSynchronize(stream));
    dtrain_emulation_get_counters(&c);
    CHECK(c.kernels == 1 && c.copies == 1 && c.copied_bytes == 200 && c.host_syncs == 1);
    CHECK(c.allocations == 2 && c.allocations_alive == 1 && c.bytes_alive == 400 &&
          c.pinned_alive == 1);
    CHECK(c.streams_alive == 1 && c.events_alive == 1 && c.cublas_alive == 1 &&
          c.graphs_alive == 0);
    OK(cudaFree(x));
    OK(cudaFreeHost(host));
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(stream));
    OK(cublasLtDestroy(handle));
    dtrain_emulation_get_counters(&c);
    CHECK(c.allocations_alive == 0 && c.bytes_alive == 0 && c.pinned_alive == 0 &&
          c.peak_bytes == 400);
    CHECK(c.streams_alive == 0 && c.events_alive == 0 && c.cublas_alive == 0);
}

static void *rank_main(void *number)
{
    cudaStream_t stream = new_stream();
    float *x = device_copy(random_floats(4 * 256, 3)), *y = device_array<float>(4);
    for (int step = 0; step < 20; step++) {
        LAUNCH(block_sum<true>, 4, 256, 0, stream, x, y);
        LAUNCH(add_one, 1, 4, 0, stream, y);
        OK(cudaStreamSynchronize(stream));
        if (step % 7 == 0) CHECK(cudaSetDevice(9) == cudaErrorInvalidDevice);
        CHECK(cudaGetLastError() ==
              (step % 7 == 0 ? cudaErrorInvalidDevice : cudaSuccess)); /* its own */
    }
    *(std::vector<float> *)number = host_copy(y, 4);
    OK(cudaFree(x));
    OK(cudaFree(y));
    OK(cudaStreamDestroy(stream));
    return NULL;
}
static void test_ranks_as_threads_and_processes(void)
{
    std::vector<float> results[3];
    pthread_t threads[2];
    int status = -1;
    (void)status;
    rank_main(&results[2]);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, rank_main, &results[i]) == 0);
    for (pthread_t thread : threads) pthread_join(thread, NULL);
    CHECK(results[0] == results[2] && results[1] == results[2] && results[0].size() == 4);
#if !TEST_RACES /* ThreadSanitizer gives up on the children of a process with threads (or fibers) */
    pid_t child = fork();
    if (child == 0) {
        rank_main(&results[0]);
        _exit(results[0] == results[2] ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
#endif
}

/* ---- cublasLt ---- */

static float nearest(float x, int digits)
{
    int exponent;
    frexpf(x, &exponent);
    return ldexpf(nearbyintf(ldexpf(x, digits - exponent)), exponent - digits);
}
static float rounded(float x, cudaDataType type) /* to nearest even, by the definition */
{
    int exponent, digits = type == CUDA_R_16BF ? 8 : type == CUDA_R_16F ? 11 : 24;
    frexpf(x, &exponent);
    if (type == CUDA_R_16F && exponent < -13) exponent = -13;
    return ldexpf(nearbyintf(ldexpf(x, digits - exponent)), exponent - digits);
}
static uint16_t encoded(float x, cudaDataType type) /* x has been rounded to the type */
{
    if (type == CUDA_R_16BF) return bf16(x);
    int exponent;
    float fraction = frexpf(fabsf(x), &exponent);
    unsigned sign = x < 0 ? 0x8000u : 0;
    if (x == 0) return 0;
    if (exponent < -13) return (uint16_t)(sign | (unsigned)ldexpf(fabsf(x), 24));
    return (uint16_t)(sign | (unsigned)(exponent + 14) << 10 |
                      (unsigned)((2 * fraction - 1) * 1024));
}
static float decoded(uint16_t x, cudaDataType type)
{
    if (type == CUDA_R_16BF) {
        uint32_t bits = (uint32_t)x << 16;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
    int exponent = x >> 10 & 31;
    float size = exponent ? ldexpf(1 + (float)(x & 1023) / 1024, exponent - 15)
                          : ldexpf((float)(x & 1023), -24);
    return x & 0x8000 ? -size : size;
}

/* A device array of some type with its values as floats. */
struct typed_array {
    cudaDataType type;
    std::vector<float> host;
    void *device;
    typed_array(cudaDataType t, size_t count, uint32_t seed, float scale = 1)
        : type(t), host(random_floats(count, seed))
    {
        for (float &x : host) x = rounded(scale * x, type);
        upload();
    }
    ~typed_array() { OK(cudaFree(device)); }
    typed_array(const typed_array &) = delete;
    void upload()
    {
        std::vector<uint16_t> halves;
        for (float x : host) halves.push_back(type == CUDA_R_32F ? (uint16_t)0 : encoded(x, type));
        device = type == CUDA_R_32F ? (void *)device_copy(host) : (void *)device_copy(halves);
    }
    std::vector<float> download() const
    {
        if (type == CUDA_R_32F) return host_copy((const float *)device, host.size());
        std::vector<float> values;
        for (uint16_t x : host_copy((const uint16_t *)device, host.size()))
            values.push_back(decoded(x, type));
        return values;
    }
};

static double gemm_input(float x, cublasComputeType_t compute)
{
    if (compute == CUBLAS_COMPUTE_32F_FAST_TF32) return nearest(x, 11);
    if (compute == CUBLAS_COMPUTE_32F_FAST_16BF) return rounded(x, CUDA_R_16BF);
    return compute == CUBLAS_COMPUTE_32F_FAST_16F ? rounded(x, CUDA_R_16F) : x;
}

struct gemm_case {
    cudaDataType in, out;
    cublasComputeType_t compute;
    bool transpose_a, transpose_b;
    int m, n, k, batch;
    float alpha, beta;
    unsigned epilogue;
};

struct gemm_objects {
    cublasLtHandle_t handle = NULL;
    cublasLtMatmulDesc_t desc = NULL;
    cublasLtMatrixLayout_t a = NULL, b = NULL, d = NULL;
    cublasLtMatmulPreference_t preference = NULL;
    int64_t lda, ldb, ldd;
    explicit gemm_objects(const gemm_case &g)
    {
        int32_t ta = g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                tb = g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
        int rows_a = g.transpose_a ? g.k : g.m, rows_b = g.transpose_b ? g.n : g.k;
        lda = rows_a + 8, ldb = rows_b + 16, ldd = g.m + 8;
        OK(cublasLtCreate(&handle));
        OK(cublasLtMatmulDescCreate(&desc, g.compute, CUDA_R_32F));
        set(CUBLASLT_MATMUL_DESC_TRANSA, ta);
        set(CUBLASLT_MATMUL_DESC_TRANSB, tb);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)g.epilogue);
        OK(cublasLtMatrixLayoutCreate(&a, g.in, (uint64_t)rows_a, (uint64_t)(g.m + g.k - rows_a),
                                      lda));
        OK(cublasLtMatrixLayoutCreate(&b, g.in, (uint64_t)rows_b, (uint64_t)(g.n + g.k - rows_b),
                                      ldb));
        OK(cublasLtMatrixLayoutCreate(&d, g.out, (uint64_t)g.m, (uint64_t)g.n, ldd));
        int64_t strides[3] = {lda * (g.m + g.k - rows_a), ldb * (g.n + g.k - rows_b), ldd * g.n};
        cublasLtMatrixLayout_t layouts[3] = {a, b, d};
        for (int i = 0; i < 3; i++) {
            int32_t batch = g.batch;
            OK(cublasLtMatrixLayoutSetAttribute(layouts[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                &batch, 4));
            OK(cublasLtMatrixLayoutSetAttribute(
                layouts[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &strides[i], 8));
        }
        OK(cublasLtMatmulPreferenceCreate(&preference));
    }
    gemm_objects(const gemm_objects &) = delete;
    ~gemm_objects()
    {
        OK(cublasLtMatmulPreferenceDestroy(preference));
        OK(cublasLtMatrixLayoutDestroy(a));
        OK(cublasLtMatrixLayoutDestroy(b));
        OK(cublasLtMatrixLayoutDestroy(d));
        OK(cublasLtMatmulDescDestroy(desc));
        OK(cublasLtDestroy(handle));
    }
    template <class T> void set(cublasLtMatmulDescAttributes_t attribute, T value)
    {
        OK(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value));
    }
    template <class T> void prefer(cublasLtMatmulPreferenceAttributes_t attribute, T value)
    {
        OK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
    }
    cublasStatus_t find(cublasLtMatmulHeuristicResult_t *result, int *found)
    {
        return cublasLtMatmulAlgoGetHeuristic(handle, desc, a, b, d, d, preference, 1, result,
                                              found);
    }
};

static double exact_gelu(double x)
{
    return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
static double gelu_difference(double x)
{
    return (exact_gelu(x + 1e-5) - exact_gelu(x - 1e-5)) / 2e-5;
}

/* One product against loops that follow the definition. C and D are one matrix. */
static void check_gemm(const gemm_case &g)
{
    gemm_objects lt(g);
    size_t batches = (size_t)g.batch;
    size_t columns_a = (size_t)(g.transpose_a ? g.m : g.k),
           columns_b = (size_t)(g.transpose_b ? g.k : g.n);
    size_t stride_a = (size_t)lt.lda * columns_a, stride_b = (size_t)lt.ldb * columns_b;
    size_t stride_d = (size_t)lt.ldd * (size_t)g.n, bias_count = (size_t)(g.m > g.n ? g.m : g.n);
    bool relu_mask = (g.epilogue & 128) && (g.epilogue & (2 | 8));
    size_t aux_ld = relu_mask ? 128 : (size_t)g.m + 16;
    typed_array a(g.in, batches * stride_a, 1), b(g.in, batches * stride_b, 2);
    typed_array d(g.out, batches * stride_d, 3), bias(g.out, batches * bias_count, 4);
    typed_array aux(g.out, batches * (size_t)g.n * aux_ld, 5, 2);
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    /* Half a unit in the last place and a little. */
    double tolerance = g.out == CUDA_R_16BF ? 4.5e-3 : g.out == CUDA_R_16F ? 6e-4 : 1e-5;
    if (g.epilogue & (4 | 16 | 256 | 512)) {
        lt.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device);
        lt.set(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, (int64_t)bias_count);
    }
    if (g.epilogue & 128) {
        lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.device);
        lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)aux_ld);
        lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, (int64_t)(aux_ld * (size_t)g.n));
    }
    for (int i = 0; i < 4; i++)
        lt.prefer(
            (cublasLtMatmulPreferenceAttributes_t)(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i),
            16u);
    OK(lt.find(&result, &found));
    CHECK(found == 1 && result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize == 0);
    OK(cublasLtMatmul(lt.handle, lt.desc, &g.alpha, a.device, lt.a, b.device, lt.b, &g.beta,
                      d.device, lt.d, d.device, lt.d, &result.algo, NULL, 0, NULL));
    std::vector<float> got = d.download(), bias_after = bias.download(), aux_after = aux.download();
    std::vector<unsigned char> mask =
        host_copy((unsigned char *)aux.device, batches * (size_t)g.n * aux_ld / 8);
    std::vector<double> gradient(batches * bias_count, 0.0);
    for (size_t s = 0; s < batches; s++)
        for (size_t j = 0; j < (size_t)g.n; j++)
            for (size_t i = 0; i < (size_t)g.m; i++) {
                double v = 0;
                size_t at = s * stride_d + i + j * (size_t)lt.ldd,
                       x = s * (size_t)g.n * aux_ld + i + j * aux_ld;
                for (size_t t = 0; t < (size_t)g.k; t++) {
                    size_t ia = g.transpose_a ? t + i * (size_t)lt.lda : i + t * (size_t)lt.lda;
                    size_t ib = g.transpose_b ? j + t * (size_t)lt.ldb : t + j * (size_t)lt.ldb;
                    v += gemm_input(a.host[s * stride_a + ia], g.compute) *
                         gemm_input(b.host[s * stride_b + ib], g.compute);
                    if (j == 0 && g.epilogue & 256) gradient[i] += a.host[ia];
                    if (i == 0 && g.epilogue & 512) gradient[j] += b.host[ib];
                }
                v = g.alpha * v + g.beta * d.host[at];
                if (g.epilogue & 4) v += bias.host[s * bias_count + i];
                if (g.epilogue & 64) v *= gelu_difference(aux.host[x]);
                if ((g.epilogue & 160) == 160) CHECK_CLOSE(aux_after[x], v, tolerance);
                if (relu_mask) CHECK((mask[x / 8] >> x % 8 & 1) == (v > 0));
                if (g.epilogue & 2) v = fmax(v, 0);
                if (g.epilogue & 32) v = exact_gelu(v);
                if (g.epilogue & 16) gradient[s * bias_count + i] += v;
                CHECK_CLOSE(got[at], v, tolerance);
            }
    if (g.epilogue & (16 | 256 | 512))
        for (size_t s = 0; s < batches; s++)
            for (size_t i = 0; i < (size_t)(g.epilogue & 512 ? g.n : g.m); i++)
                CHECK_CLOSE(bias_after[s * bias_count + i], gradient[s * bias_count + i],
                            4 * tolerance);
    for (size_t j = 0; j < (size_t)g.n; j++) /* what lies between the columns stays */
        for (size_t i = (size_t)g.m; i < (size_t)lt.ldd; i++)
            CHECK(got[i + j * (size_t)lt.ldd] == d.host[i + j * (size_t)lt.ldd]);
}

static void test_matmul_types(void)
{
    const cudaDataType f32 = CUDA_R_32F, b16 = CUDA_R_16BF, h16 = CUDA_R_16F;
    const cublasComputeType_t plain = CUBLAS_COMPUTE_32F;
    for (int t = 0; t < 4; t++) {
        check_gemm({f32, f32, plain, t % 2 == 1, t > 1, 5, 7, 9, 1, 1, 0, 1});
        check_gemm({b16, b16, plain, t % 2 == 1, t > 1, 16, 8, 24, 3, 0.5f, 1, 1});
        check_gemm({h16, f32, plain, t % 2 == 1, t > 1, 9, 11, 6, 2, -2, 0.25f, 1});
    }
    check_gemm({h16, h16, plain, true, false, 8, 8, 8, 1, 1, 1, 1});
    check_gemm({b16, f32, plain, true, false, 8, 8, 8, 1, 1, 1, 1});
    check_gemm({f32, f32, CUBLAS_COMPUTE_32F_FAST_TF32, true, false, 9, 8, 7, 1, 1, 0, 1});
    check_gemm({f32, f32, CUBLAS_COMPUTE_32F_FAST_16BF, true, false, 9, 8, 7, 1, 1, 0, 1});
    check_gemm({f32, f32, CUBLAS_COMPUTE_32F_FAST_16F, true, false, 9, 8, 7, 1, 1, 0, 1});
}

static void test_matmul_epilogues(void)
{
    const unsigned epilogues[] = {CUBLASLT_EPILOGUE_RELU,          CUBLASLT_EPILOGUE_BIAS,
                                  CUBLASLT_EPILOGUE_RELU_BIAS,     CUBLASLT_EPILOGUE_RELU_AUX,
                                  CUBLASLT_EPILOGUE_RELU_AUX_BIAS, CUBLASLT_EPILOGUE_GELU,
                                  CUBLASLT_EPILOGUE_GELU_BIAS,     CUBLASLT_EPILOGUE_GELU_AUX,
                                  CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU,
                                  CUBLASLT_EPILOGUE_DGELU_BGRAD,   CUBLASLT_EPILOGUE_BGRADA,
                                  CUBLASLT_EPILOGUE_BGRADB};
    for (unsigned epilogue : epilogues)
        for (int t = 0; t < 4; t++) {
            int batch = epilogue >= 256 ? 1 : 2;
            check_gemm({CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, t % 2 == 1, t > 1, 24, 16, 8,
                        batch, 1, 0, epilogue});
            check_gemm({CUDA_R_16BF, CUDA_R_16BF, CUBLAS_COMPUTE_32F, t % 2 == 1, t > 1, 8, 16, 24,
                        batch, 1, 1, epilogue});
        }
}

/* dReLU reads the mask that ReLU wrote. */
static void test_matmul_relu_mask(void)
{
    for (unsigned epilogue : {CUBLASLT_EPILOGUE_DRELU, CUBLASLT_EPILOGUE_DRELU_BGRAD}) {
        gemm_case g = {CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, false, false, 16, 8, 8, 1, 1,
                       0,          epilogue};
        gemm_objects lt(g);
        typed_array a(CUDA_R_32F, 24 * 8, 1), b(CUDA_R_32F, 24 * 8, 2), d(CUDA_R_32F, 24 * 8, 3),
            bias(CUDA_R_32F, 16, 4);
        std::vector<unsigned char> mask(8 * 16, 0x5a);
        unsigned char *aux = device_copy(mask);
        lt.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device);
        lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
        lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)128);
        OK(cublasLtMatmul(lt.handle, lt.desc, &g.alpha, a.device, lt.a, b.device, lt.b, &g.beta,
                          d.device, lt.d, d.device, lt.d, NULL, NULL, 0, NULL));
        std::vector<float> got = d.download(), gradient = bias.download();
        for (size_t i = 0; i < 16; i++) {
            double sum = 0;
            for (size_t j = 0; j < 8; j++) {
                double v = 0;
                for (size_t t = 0; t < 8; t++) v += (double)a.host[i + 24 * t] * b.host[t + 24 * j];
                v = 0x5a >> i % 8 & 1 ? v : 0;
                sum += v;
                CHECK_CLOSE(got[i + 24 * j], v, 1e-5);
            }
            CHECK_CLOSE(gradient[i], epilogue & 16 ? sum : bias.host[i], 1e-5);
        }
        OK(cudaFree(aux));
    }
}

static void test_matmul_is_late_and_captured(void)
{
    gemm_case g = {CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, false, false, 8, 8, 8, 1, 1, 1, 1};
    gemm_objects lt(g);
    std::vector<float> ones(16 * 8 + 24 * 8, 1.0f);
    float *a = device_copy(ones), *b = device_copy(ones),
          *d = device_copy(std::vector<float>(16 * 8, 0.0f));
    cudaStream_t stream = new_stream();
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    OK(cublasLtMatmul(lt.handle, lt.desc, &g.alpha, a, lt.a, b, lt.b, &g.beta, d, lt.d, d, lt.d,
                      NULL, NULL, 0, stream));
    g.alpha = 100; /* host scalars were read */
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < 3; i++) OK(cudaGraphLaunch(executable, stream));
    CHECK(host_copy(d, 1)[0] == 0);
    OK(cudaStreamSynchronize(stream));
    CHECK(host_copy(d, 1)[0] == 24);
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphExecDestroy(executable));
    for (float *x : {a, b, d}) OK(cudaFree(x));
    OK(cudaStreamDestroy(stream));
}

static void test_matmul_refusals(void)
{
    cublasLtMatmulHeuristicResult_t result;
    int found = -1;
    gemm_case g = {CUDA_R_16BF, CUDA_R_16BF, CUBLAS_COMPUTE_32F,        false, false, 16, 8, 8, 1,
                   1,           0,           CUBLASLT_EPILOGUE_GELU_AUX};
    dtrain_emulation_set_quiet(1);
    for (int mistake = 0; mistake < 9; mistake++) {
        gemm_case wrong = g;
        if (mistake == 1) wrong.m = 12;
        if (mistake == 2) wrong.n = 7;
        if (mistake == 3) wrong.k = 9;
        if (mistake == 4) wrong.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
        if (mistake == 5) wrong.out = CUDA_R_16F;
        gemm_objects lt(wrong);
        lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)(mistake == 6 ? 20 : 24));
        if (mistake == 7) lt.prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 8u);
        if (mistake == 8) lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (void *)0x1008);
        cublasStatus_t status = lt.find(&result, &found);
        CHECK_MSG(status == (mistake ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS),
                  "mistake %d: %s", mistake, cublasLtGetStatusName(status));
        CHECK(found == (mistake ? 0 : 1));
    }
    gemm_objects lt(g);
    int32_t wide = 0;
    CHECK(cublasLtMatmulDescSetAttribute(lt.desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &wide, 4) ==
          CUBLAS_STATUS_INVALID_VALUE);
    lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)8);
    CHECK(lt.find(&result, &found) == CUBLAS_STATUS_INVALID_VALUE); /* below m */
    lt.set(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_DEFAULT);
    OK(lt.find(&result, &found));
    dtrain_emulation_inject(DTRAIN_EMULATION_NO_HEURISTIC, 1);
    CHECK(lt.find(&result, &found) == CUBLAS_STATUS_NOT_SUPPORTED && found == 0);
}

static cublasStatus_t multiply(gemm_objects &lt, const float *a, const float *b, float *d,
                               const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes)
{
    float one = 1, zero = 0;
    return cublasLtMatmul(lt.handle, lt.desc, &one, a, lt.a, b, lt.b, &zero, d, lt.d, d, lt.d, algo,
                          workspace, bytes, NULL);
}
static void test_matmul_algorithms(void)
{
    gemm_case g = {CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, false, false, 8, 8, 8, 1, 1, 0, 1};
    gemm_objects lt(g),
        other({CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, true, false, 8, 8, 8, 1, 1, 0, 1});
    std::vector<float> ones(1024, 1.0f);
    float *a = device_copy(ones), *b = device_copy(ones), *d = device_copy(ones);
    float *workspace = device_copy(std::vector<float>(16384, 1.0f));
    cublasLtMatmulHeuristicResult_t result;
    int found;
    lt.prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)65536);
    OK(lt.find(&result, &found));
    CHECK(result.workspaceSize > 0 && result.workspaceSize <= 65536);
    cublasLtMatmulHeuristicResult_t unsplit;
    other.prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)65536);
    other.prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                 (uint32_t)CUBLASLT_REDUCTION_SCHEME_NONE);
    OK(other.find(&unsplit, &found));
    CHECK(found == 1 && unsplit.workspaceSize == 0);
    OK(multiply(lt, a, b, d, &result.algo, workspace, 65536));
    CHECK(host_copy(d, 1)[0] == 8 && is_nan_filled(host_copy(workspace, 1)[0])); /* it is used */
    dtrain_emulation_set_quiet(1);
    CHECK(multiply(lt, a, b, d, &result.algo, workspace, result.workspaceSize - 1) ==
          CUBLAS_STATUS_INVALID_VALUE);
    CHECK(multiply(other, a, b, d, &result.algo, workspace, 65536) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(multiply(lt, a + 4, b, d, &result.algo, workspace, 65536) == CUBLAS_STATUS_NOT_SUPPORTED);
    OK(multiply(lt, a + 1, b, d, NULL, NULL, 0)); /* without a promise: any alignment of floats */
    dtrain_emulation_inject(DTRAIN_EMULATION_FAIL_MATMUL, 1);
    CHECK(multiply(lt, a, b, d, NULL, NULL, 0) == CUBLAS_STATUS_EXECUTION_FAILED);
    OK(multiply(lt, a, b, d, NULL, NULL, 0));
    cublasLtMatmulHeuristicResult_t both[2];
    dtrain_emulation_inject(DTRAIN_EMULATION_WORKSPACE, 60000);
    OK(cublasLtMatmulAlgoGetHeuristic(lt.handle, lt.desc, lt.a, lt.b, lt.d, lt.d, lt.preference, 2,
                                      both, &found));
    CHECK(found == 2 && both[0].workspaceSize == 60000 && both[1].workspaceSize == 0);
    for (int refused = 0; refused < 3; refused++) {
        dtrain_emulation_inject(DTRAIN_EMULATION_REFUSE_MATMUL, refused);
        for (int i = 0; i < 2; i++)
            CHECK(multiply(lt, a, b, d, &both[i].algo, workspace, 65536) ==
                  (i < refused ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS));
    }
    dtrain_emulation_inject(DTRAIN_EMULATION_REFUSE_MATMUL, 0);
    OK(cudaDeviceSynchronize());
    OK(multiply(lt, a, b, d + 1024 - 8, NULL, NULL, 0)); /* reaches beyond its allocation */
    CHECK(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
    dtrain_emulation_reset();
    for (float *x : {a, b, d, workspace}) OK(cudaFree(x));
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_every_thread_runs_once);
    RUN(test_order_shows_a_missing_barrier);
    RUN(test_orders);
    RUN(test_shared_memory_starts_as_nan);
    RUN(test_kernels_that_fail);
    RUN(test_launch_limits);
    RUN(test_shuffles);
    RUN(test_votes);
    RUN(test_atomics);
    RUN(test_bit_functions);
    RUN(test_mma);
    RUN(test_mma_tf32);
    RUN(test_ldmatrix);
    RUN(test_async_copies);
    RUN(test_host_reads_too_early);
    RUN(test_source_changes_too_early);
    RUN(test_missing_event_wait);
    RUN(test_legacy_stream_waits_for_blocking_ones);
    RUN(test_queries);
    RUN(test_queues_are_bounded);
    RUN(test_host_functions);
    RUN(test_memory_errors);
    RUN(test_graph_replay);
    RUN(test_graph_mistakes);
    RUN(test_slow_operations);
    RUN(test_slow_operations_in_graphs);
    RUN(test_faults);
    RUN(test_leak_counters);
    RUN(test_ranks_as_threads_and_processes);
    RUN(test_matmul_types);
    RUN(test_matmul_epilogues);
    RUN(test_matmul_relu_mask);
    RUN(test_matmul_is_late_and_captured);
    RUN(test_matmul_refusals);
    RUN(test_matmul_algorithms);
    return test_summary();
}
