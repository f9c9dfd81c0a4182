/* Tiles of flash attention
 *
 * The parts of flash.cuh's kernels: instructions of tensor cores, tiles in shared memory, products
 * of a warp's rows with a tile, masks. Head sizes are multiples of 16. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"

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
