/* Flash attention on tensor cores
 *
 * softmax(Q K^T / sqrt(head)) V without a matrix of sequence x sequence in memory (Dao,
 * FlashAttention-2, 2023), for head sizes 32, 64, 80, 96 and 128. For each (batch, head) and with T
 * = sequence: forward 2 products of 2 T T head flops each, backward 7; half of it when causal.
 * Bytes moved: each of q, k, v, y once from memory, and once for each tile from the L2 cache.
 *
 * A block is 4 warps. It owns a tile of rows in shared memory, 16 or 32 of them for each warp, and
 * streams tiles of the other side past them. Everything of sequence x sequence stays in registers:
 * the accumulators of a product have just the layout that the A operand of the next one needs.
 *
 *                    own rows     streamed       in registers, per warp
 *     forward        Q            K, V           S = Q K^T       y  += P V
 *     backward, 1    K, V         Q, dY          S^T = K Q^T     dV += P^T dY,   dK += dS^T Q
 *     backward, 2    Q, dY        K, V           S = Q K^T       dQ += dS K
 *
 * with P = softmax(S), dS = P * (dP - D), dP = dY V^T, D = rowsum(dY * y). The two backward kernels
 * are one template, read by columns and by rows. Both compute S and dP: 7 products where a single
 * kernel would need 5. But a single kernel has to add up dQ across blocks, either by floating-point
 * atomics, whose order changes from run to run, or through T / 64 partial sums of dQ in memory.
 * Determinism costs at most 7/5 of the backward arithmetic.
 *
 * Where several heads of queries share a head of keys and values, the first backward kernel, whose
 * blocks own keys, streams the queries of all heads that share them, one head after the other.
 *
 * Why 32 rows for each warp: an ldmatrix of 16 x 16 keeps shared memory busy for 4 cycles and feeds
 * two mma for each 16 rows, which take 3.2 cycles of the four tensor cores of a Hopper SM. With 16
 * rows the loads are the limit; with 32 they are half of it. Registers of a thread (limit 255, two
 * blocks per SM):
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

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"
#include "device/cuda/attention_gemm.cuh"

#include <math.h>

#define DTRAIN_CUDA_FLASH_WARPS 4
#define DTRAIN_CUDA_FLASH_THREADS (DTRAIN_CUDA_FLASH_WARPS * DTRAIN_CUDA_WARP)
#define DTRAIN_CUDA_FLASH_KEYS 64 /* of a streamed tile in the forward pass */
#define DTRAIN_CUDA_LOG2_E 1.4426950408889634f

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
 * mma of this shape and cp.async came with Ampere. Code for older GPUs (DTRAIN_CUDA_BEFORE_AMPERE)
 * has none of them: dtrain_cuda_flash_takes keeps off. */
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

/* Return x as a value that the compiler knows nothing about, so that what is computed from it stays
 * inside a loop. Addresses in swizzled tiles take two instructions to compute; hoisted out of the
 * loop they would take the registers of the accumulators. */
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
 * 8 consecutive rows at a time: these chunks have to lie in 8 different groups of 4 banks, that is,
 * their numbers must differ modulo 8. Rows of `chunks` chunks alone repeat after 8 / gcd(chunks, 8)
 * rows; exchanging chunks by XOR with the number of the repetition makes them differ, for every
 * even number of chunks. A static_assert checks it for each head size. */

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
 * elements apart; rows behind its end become zeros. All threads take part; the tile is complete
 * after dtrain_cuda_copy_wait and a barrier. A thread copies one column in steps of 8, 16 or 32
 * rows, which leave the swizzle alone: one address is computed, the rest are constants. Head sizes
 * 80 and 96 leave a third of the threads idle for that. */
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

/* Set s to -infinity where the query may not see the key. The warp's first query and key are given.
 * With QUERY_ROWS the rows of s are queries and its columns keys, else the other way round. Most
 * tiles need no mask and return at once. */
template <bool QUERY_ROWS, int M, int N>
static __device__ __forceinline__ void dtrain_cuda_flash_mask(float (&s)[M][N][4], int query,
                                                              int key, bool causal, int sequence)
{
    const int last_key = key + (QUERY_ROWS ? 8 * N : 16 * M) - 1;
    if (last_key <= (causal ? query : sequence - 1)) return;
    const int lane = dtrain_cuda_not_hoisted(threadIdx.x % DTRAIN_CUDA_WARP);
    DTRAIN_CUDA_UNROLL
    for (int i = 0; i < M * N * 4; i++) {
        const int m = i / (4 * N), n = i / 4 % N, e = i % 4;
        const int row = 16 * m + lane / 4 + e / 2 * 8, column = 8 * n + lane % 4 * 2 + e % 2;
        const int this_key = key + (QUERY_ROWS ? column : row),
                  this_query = query + (QUERY_ROWS ? row : column);
        if (this_key > (causal ? this_query : sequence - 1)) s[m][n][e] = -INFINITY;
    }
}

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
    int64_t token;       /* the first of the batch element */
};

/* With `by_keys` a pair is a batch element and a head of keys, else a head of queries. */
template <typename Args>
static dtrain_cuda_flash_order dtrain_cuda_flash_order_of(const Args &args, int64_t head,
                                                          int64_t tile, bool by_keys)
{
    dtrain_cuda_flash_order order;
    const int64_t sequence = args.sequence, kv_heads = args.kv_heads ? args.kv_heads : args.heads;
    const int64_t pairs = args.batch * (by_keys ? kv_heads : args.heads);
    const int64_t fitting = DTRAIN_CUDA_FLASH_CACHE_BYTES / (sequence * head * 4);
    order.pairs = (unsigned)pairs;
    order.tiles = (unsigned)((sequence + tile - 1) / tile);
    order.group = (unsigned)(fitting < 1 ? 1 : fitting < pairs ? fitting : pairs);
    order.heads = (unsigned)(by_keys ? kv_heads : args.heads);
    order.sharing = (unsigned)(args.heads / kv_heads);
    return order;
}

template <int HEAD, bool BY_KEYS, typename Args>
static __device__ __forceinline__ dtrain_cuda_flash_work dtrain_cuda_flash_work_of(
    const dtrain_cuda_flash_order &order, const Args &args, bool last_is_heaviest)
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
    work.token = pair / order.heads * args.sequence;
    return work;
}

/* ---- Forward ------------------------------------------------------------------------------------
 *
 * K and V are each other's second buffer: while one of them is multiplied the other one is copied.
 *
 *     copies      K0   V0 ......  K1 ............  V1 ......
 *     products         S = Q K0   softmax, y += P V0   S = Q K1 ...
 *     barriers      |           |                    |          |
 *
 * Rows behind the end of the sequence are zeros in the tiles and are not stored. Keys go upwards
 * from 0, which every query may see: the running maximum is finite after the first tile if the
 * scores are. */

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

/* Finish: divide y by the sum; the first lane of each row stores lse, the log of the sum of
 * exponentials. */
template <int M, int COLUMNS>
static __device__ __forceinline__ void
dtrain_cuda_flash_finish(float (&y)[M][COLUMNS][4], const float (&top)[2 * M],
                         const float (&sum)[2 * M], float scale, float *lse, int row, int sequence)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    DTRAIN_CUDA_UNROLL
    for (int part = 0; part < 2 * M; part++) {
        const int here = row + 8 * part + lane / 4;
        float total = sum[part];
        total += __shfl_xor_sync(DTRAIN_CUDA_ALL_LANES, total, 1);
        total += __shfl_xor_sync(DTRAIN_CUDA_ALL_LANES, total, 2);
        const float inverse = __fdividef(1, total);
        DTRAIN_CUDA_UNROLL
        for (int n = 0; n < 2 * COLUMNS; n++) y[part / 2][n / 2][part % 2 * 2 + n % 2] *= inverse;
        if (lane % 4 == 0 && here < sequence) lse[here] = top[part] * scale + logf(total);
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

    const dtrain_cuda_flash_work work =
        dtrain_cuda_flash_work_of<HEAD, false>(order, args, args.causal);
    const int sequence = (int)args.sequence, n = (int)args.n, kv_n = n / (int)order.sharing;
    const int stride = n + 2 * kv_n;
    const Storage *q = (const Storage *)args.qkv + work.token * stride + work.column;
    const Storage *k = q - work.column + n + work.kv_column, *v = k + kv_n;
    const int first = (int)work.tile * shape::rows,
              warp_row = (int)threadIdx.x / DTRAIN_CUDA_WARP * 16 * M;
    const int row = first + warp_row,
              end = args.causal ? min(sequence, first + shape::rows) : sequence;
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    const dtrain_cuda_pack<Half> *own = q_tile + warp_row * HEAD / 8;

    uint32_t q_kept[shape::resident ? HEAD / 16 : 1][M][4];
    float sums[M][HEAD / 8][4] = {}, top[2 * M], sum[2 * M] = {};
    for (int part = 0; part < 2 * M; part++) top[part] = -INFINITY;

    dtrain_cuda_flash_load<HEAD, shape::rows>(q_tile, q, stride, first, sequence);
    dtrain_cuda_flash_load<HEAD, keys>(k_tile, k, stride, 0, sequence);
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
            row < sequence && (!args.causal || key < row + 16 * M); /* by any row of this warp */
        uint32_t p[keys / 16][M][4];
        dtrain_cuda_copy_wait();
        __syncthreads(); /* K is complete, and no warp reads the previous V any more */
        dtrain_cuda_flash_load<HEAD, keys>(v_tile, v, stride, key, sequence);
        if (seen) {
            float s[M][keys / 8][4];
            dtrain_cuda_flash_scores<HEAD, shape::resident>(s, own, q_kept, k_tile);
            dtrain_cuda_flash_mask<true>(s, row, key, args.causal, sequence);
            dtrain_cuda_flash_softmax(p, s, sums, top, sum, scale * DTRAIN_CUDA_LOG2_E, Half());
        }
        dtrain_cuda_copy_wait();
        __syncthreads(); /* V is complete, and no warp reads K any more */
        if (key + keys < end)
            dtrain_cuda_flash_load<HEAD, keys>(k_tile, k, stride, key + keys, sequence);
        if (seen) dtrain_cuda_flash_accumulate<HEAD>(sums, p, v_tile);
    }
    dtrain_cuda_flash_finish(sums, top, sum, scale, args.lse + work.pair * args.sequence, row,
                             sequence);
    dtrain_cuda_flash_store<HEAD>((Storage *)args.y + work.token * n + work.column, n, row,
                                  sequence, sums, 1.0f);
}

/* ---- Backward: statistics of the queries --------------------------------------------------------
 *
 * statistics (batch*heads, 2, sequence): lse * log2(e), and D = sum of dY * y over the head. 8
 * lanes take a query, so that a warp reads whole lines. Moves 2 * rows * n elements. */

template <typename Storage>
static __global__ void dtrain_cuda_flash_statistics(dtrain_attention_backward_args args,
                                                    float *statistics)
{
    constexpr int width = dtrain_cuda_pack<Storage>::width;
    const int64_t item =
        ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 8; /* of (batch, sequence, heads) */
    const int64_t row = item / args.heads, at = item % args.heads, head = args.n / args.heads;
    const bool inside = row < args.batch * args.sequence;
    float dot = 0;
    for (int64_t i = threadIdx.x % 8 * width; i < head && inside; i += 8 * width) {
        const dtrain_cuda_pack<Storage> y =
            dtrain_cuda_load<width>((const Storage *)args.y + item * head + i);
        const dtrain_cuda_pack<Storage> d_y =
            dtrain_cuda_load<width>((const Storage *)args.d_y + item * head + i);
        DTRAIN_CUDA_UNROLL
        for (int j = 0; j < width; j++)
            dot += dtrain_cuda_widen(y.at[j]) * dtrain_cuda_widen(d_y.at[j]);
    }
    for (int distance = 4; distance > 0; distance /= 2)
        dot += __shfl_xor_sync(DTRAIN_CUDA_ALL_LANES, dot, distance);
    if (inside && threadIdx.x % 8 == 0) {
        const int64_t pair = row / args.sequence * args.heads + at, query = row % args.sequence;
        statistics[2 * pair * args.sequence + query] =
            args.lse[pair * args.sequence + query] * DTRAIN_CUDA_LOG2_E;
        statistics[(2 * pair + 1) * args.sequence + query] = dot;
    }
}

/* ---- Backward -----------------------------------------------------------------------------------
 *
 * With KEYS the block owns keys and gives dK and dV; else it owns queries and gives dQ. The
 * streamed pair of tiles has two buffers: one barrier for each tile, after which the new buffer is
 * complete and the old one is free.
 *
 * The statistics of a tile of queries lie in shared memory beside it: with KEYS in two buffers,
 * fetched one tile ahead, one number for each thread. Behind the end of the sequence they are
 * infinity and 0, which make P and dS zero. */

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
dtrain_cuda_flash_statistic(const float *statistics, int sequence, int i, int count, int first)
{
    const int which = i / count, query = first + i % count;
    if (query >= sequence) return which == 0 ? INFINITY : 0.0f;
    return statistics[which * sequence + query];
}

template <typename Half, typename Storage, int HEAD, bool KEYS>
static __global__ void __launch_bounds__(DTRAIN_CUDA_FLASH_THREADS, 2)
    dtrain_cuda_flash_backward(dtrain_attention_backward_args args, dtrain_cuda_flash_order order,
                               const float *statistics, float scale)
{
    typedef dtrain_cuda_flash_backward_shape<HEAD, KEYS> shape;
    constexpr int M = shape::m, width = shape::streamed, tile = shape::streamed_chunks,
                  second = KEYS;
    DTRAIN_CUDA_DYNAMIC_SHARED(dtrain_cuda_pack<Half>, own);        /* 2 tiles: K, V or Q, dY */
    dtrain_cuda_pack<Half> *streamed = own + 2 * shape::own_chunks; /* 2 buffers of 2 tiles */
    float *shared_statistics = reinterpret_cast<float *>(streamed + 4 * tile);

    const dtrain_cuda_flash_work work =
        dtrain_cuda_flash_work_of<HEAD, KEYS>(order, args, args.causal && !KEYS);
    const int sequence = (int)args.sequence, n = (int)args.n, kv_n = n / (int)order.sharing;
    const int stride = n + 2 * kv_n;
    const Storage *q = (const Storage *)args.qkv + work.token * stride + work.column;
    const Storage *k = q - work.column + n + work.kv_column, *v = k + kv_n;
    const Storage *d_y = (const Storage *)args.d_y + work.token * n + work.column;
    const int first = (int)work.tile * shape::rows;
    const int warp_row = (int)threadIdx.x / DTRAIN_CUDA_WARP * 16 * M, row = first + warp_row;
    /* In a causal mask a key is seen from its own query on, a query sees up to its own key. */
    const int begin = args.causal && KEYS ? first : 0;
    const int end = args.causal && !KEYS ? min(sequence, first + shape::rows) : sequence;
    /* Tiles that this warp sees: with KEYS those from `seen` on, else those before it. */
    const int seen = KEYS ? (args.causal ? row - width + 1 : 0) : args.causal ? row + 16 * M : end;
    const int number = threadIdx.x % (2 * width); /* of a statistic; some threads fetch the same */
    statistics += 2 * work.pair * args.sequence;

    const auto load_streamed = [&](int from, dtrain_cuda_pack<Half> *to) {
        dtrain_cuda_flash_load<HEAD, width>(to, KEYS ? q : k, stride, from, sequence);
        dtrain_cuda_flash_load<HEAD, width>(to + tile, KEYS ? d_y : v, KEYS ? n : stride, from,
                                            sequence);
    };
    const auto load_own = [&](const Storage *from, int from_stride, dtrain_cuda_pack<Half> *to) {
        dtrain_cuda_flash_load<HEAD, shape::rows>(to, from, from_stride, first, sequence);
    };
    float sums[KEYS ? 2 : 1][M][HEAD / 8][4] = {}; /* dK and dV, or dQ */
    load_own(KEYS ? k : q, stride, own);
    load_own(KEYS ? v : d_y, KEYS ? stride : n, own + shape::own_chunks);
    load_streamed(begin, streamed);
    float ahead =
        KEYS ? dtrain_cuda_flash_statistic(statistics, sequence, number, width, begin) : 0;
    for (int i = threadIdx.x; i < 2 * shape::rows && !KEYS; i += DTRAIN_CUDA_FLASH_THREADS)
        shared_statistics[i] =
            dtrain_cuda_flash_statistic(statistics, sequence, i, shape::rows, first);

    int buffer = 0, left = KEYS ? (int)order.sharing - 1 : 0, next; /* left: heads of queries */
    for (int at = begin; at < end; at = next, buffer ^= 1) {
        next = at + width;
        /* Behind the last query of a head come those of the next head that shares the keys. */
        if (KEYS && next >= end && left > 0)
            left--, next = begin, q += HEAD, d_y += HEAD, statistics += 2 * sequence;
        const dtrain_cuda_pack<Half> *tiles = streamed + buffer * 2 * tile;
        float *lse2 = shared_statistics + (KEYS ? buffer * 2 * width : warp_row);
        if (KEYS) lse2[number] = ahead;
        dtrain_cuda_copy_wait();
        __syncthreads();
        if (next < end) {
            load_streamed(next, streamed + (buffer ^ 1) * 2 * tile);
            if (KEYS)
                ahead = dtrain_cuda_flash_statistic(statistics, sequence, number, width, next);
        }
        if (KEYS ? at < seen : at >= seen) continue;

        float s[M][width / 8][4], dp[M][width / 8][4];
        uint32_t p[width / 16][M][4], ds[width / 16][M][4];
        const dtrain_cuda_pack<Half> *own_rows = own + warp_row * HEAD / 8;
        dtrain_cuda_flash_scores<HEAD, false>(s, own_rows, p, tiles);
        __syncwarp(); /* S before dP: loads for both at once would not fit in the registers */
        dtrain_cuda_flash_scores<HEAD, false>(dp, own_rows + shape::own_chunks, p, tiles + tile);
        dtrain_cuda_flash_mask<!KEYS>(s, KEYS ? at : row, KEYS ? row : at, args.causal, sequence);
        dtrain_cuda_flash_gradients<KEYS>(p, ds, s, dp, scale * DTRAIN_CUDA_LOG2_E, lse2,
                                          lse2 + (KEYS ? width : shape::rows), Half());
        if (KEYS) dtrain_cuda_flash_accumulate<HEAD>(sums[second], p, tiles + tile);
        dtrain_cuda_flash_accumulate<HEAD>(sums[0], ds, tiles);
    }
    /* Where the block writes is computed again: in the loop there is no register to keep it in. */
    const dtrain_cuda_flash_work own_work =
        dtrain_cuda_flash_work_of<HEAD, KEYS>(order, args, args.causal && !KEYS);
    Storage *d_own = (Storage *)args.d_qkv + own_work.token * stride +
                     (KEYS ? n + (int)own_work.kv_column : (int)own_work.column);
    dtrain_cuda_flash_store<HEAD>(d_own, stride, row, sequence, sums[0], scale);
    if (KEYS) dtrain_cuda_flash_store<HEAD>(d_own + kv_n, stride, row, sequence, sums[second], 1);
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
    const dtrain_cuda_flash_order order =
        dtrain_cuda_flash_order_of(*args, HEAD, shape::rows, false);
    const auto kernel = dtrain_cuda_flash_forward<Half, Storage, HEAD>;
    DTRAIN_CUDA_TRY(dtrain_cuda_flash_allow(kernel, shape::shared_bytes));
    return DTRAIN_CUDA_RUN(device, "attention", kernel, (int64_t)order.pairs * order.tiles,
                           DTRAIN_CUDA_FLASH_THREADS, shape::shared_bytes, *args, order,
                           (float)(1 / sqrt((double)HEAD)));
}

template <typename Half, typename Storage, int HEAD, bool KEYS>
static dtrain_result dtrain_cuda_flash_run_side(dtrain_device *device,
                                                const dtrain_attention_backward_args *args,
                                                const float *statistics)
{
    typedef dtrain_cuda_flash_backward_shape<HEAD, KEYS> shape;
    const dtrain_cuda_flash_order order =
        dtrain_cuda_flash_order_of(*args, HEAD, shape::rows, KEYS);
    const auto kernel = dtrain_cuda_flash_backward<Half, Storage, HEAD, KEYS>;
    DTRAIN_CUDA_TRY(dtrain_cuda_flash_allow(kernel, shape::shared_bytes));
    return DTRAIN_CUDA_RUN(
        device, KEYS ? "attention_backward (keys)" : "attention_backward (queries)", kernel,
        (int64_t)order.pairs * order.tiles, DTRAIN_CUDA_FLASH_THREADS, shape::shared_bytes, *args,
        order, statistics, (float)(1 / sqrt((double)HEAD)));
}

template <typename Half, typename Storage, int HEAD>
static dtrain_result dtrain_cuda_flash_run(dtrain_device *device,
                                           const dtrain_attention_backward_args *args)
{
    const int64_t queries = args->batch * args->heads * args->sequence;
    void *scratch;
    DTRAIN_CUDA_TRY(dtrain_cuda_scratch(device, (size_t)queries * 2 * sizeof(float), &scratch));
    float *statistics = (float *)scratch;
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_RUN(device, "attention_backward (statistics)",
                                    dtrain_cuda_flash_statistics<Storage>,
                                    (queries * 8 + 255) / 256, 256, 0, *args, statistics));
    DTRAIN_CUDA_TRY(
        (dtrain_cuda_flash_run_side<Half, Storage, HEAD, true>(device, args, statistics)));
    return dtrain_cuda_flash_run_side<Half, Storage, HEAD, false>(device, args, statistics);
}

template <typename Half, typename Storage, typename Args>
static dtrain_result dtrain_cuda_flash_by_head(dtrain_device *device, const Args *args)
{
    switch (args->n / args->heads) {
    case 32: return dtrain_cuda_flash_run<Half, Storage, 32>(device, args);
    case 64: return dtrain_cuda_flash_run<Half, Storage, 64>(device, args);
    case 80: return dtrain_cuda_flash_run<Half, Storage, 80>(device, args);
    case 96: return dtrain_cuda_flash_run<Half, Storage, 96>(device, args);
    default: return dtrain_cuda_flash_run<Half, Storage, 128>(device, args);
    }
}

template <typename Args>
static dtrain_result dtrain_cuda_flash(dtrain_device *device, const Args *args)
{
    if (args->dtype == DTRAIN_DTYPE_BF16)
        return dtrain_cuda_flash_by_head<dtrain_cuda_bf16, dtrain_cuda_bf16>(device, args);
    if (args->dtype == DTRAIN_DTYPE_F16)
        return dtrain_cuda_flash_by_head<dtrain_cuda_f16, dtrain_cuda_f16>(device, args);
    return dtrain_cuda_flash_by_head<dtrain_cuda_bf16, float>(device, args);
}

/* Decide whether these kernels take an attention. attention_gemm.cuh takes the rest: other head
 * sizes, fp32 arithmetic, pointers that are not 16-byte aligned, GPUs before Ampere or code for
 * them, little shared memory, numbers of rows or columns whose products inside a tile may not fit
 * 32 bits, and heads of queries that cannot share those of keys equally: an error there. */
template <typename Args>
static bool dtrain_cuda_flash_takes(const dtrain_cuda_state *state, const Args *args)
{
    const int64_t head = args->heads > 0 && args->n % args->heads == 0 ? args->n / args->heads : 0;
    const bool halves = args->dtype == DTRAIN_DTYPE_BF16 || args->dtype == DTRAIN_DTYPE_F16;
    const bool narrowed = args->dtype == DTRAIN_DTYPE_F32 && state->math == DTRAIN_MATH_BF16;
    if (args->kv_heads && (args->kv_heads < 0 || args->heads % args->kv_heads)) return false;
    return (head == 32 || head == 64 || head == 80 || head == 96 || head == 128) &&
           (halves || narrowed) && state->code_version >= 80 &&
           state->shared_limit >= dtrain_cuda_flash_backward_shape<128, true>::shared_bytes &&
           dtrain_cuda_aligned(args->qkv) && dtrain_cuda_aligned(args->y) &&
           args->sequence <= 1 << 30 && args->n <= 1 << 24;
}

static dtrain_result dtrain_cuda_attention(dtrain_device *device, const dtrain_attention_args *args)
{
    if (!dtrain_cuda_flash_takes(dtrain_cuda_state_of(device), args))
        return dtrain_cuda_attention_gemm(device, args);
    if (args->batch == 0 || args->sequence == 0) return DTRAIN_OK;
    return dtrain_cuda_flash(device, args);
}

static dtrain_result dtrain_cuda_attention_backward(dtrain_device *device,
                                                    const dtrain_attention_backward_args *args)
{
    if (!dtrain_cuda_flash_takes(dtrain_cuda_state_of(device), args) ||
        !dtrain_cuda_aligned(args->d_y) || !dtrain_cuda_aligned(args->d_qkv))
        return dtrain_cuda_attention_gemm_backward(device, args);
    if (args->batch == 0 || args->sequence == 0) return DTRAIN_OK;
    return dtrain_cuda_flash(device, args);
}
