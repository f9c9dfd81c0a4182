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

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"
#include "device/cuda/tokens.cuh"

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
