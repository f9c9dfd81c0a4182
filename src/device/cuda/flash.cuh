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

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"
#include "device/cuda/attention_gemm.cuh"
#include "device/cuda/flash_tiles.cuh"

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
