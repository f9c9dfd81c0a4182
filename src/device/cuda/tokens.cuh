/* Token ids: embedding and cross-entropy
 *
 * The kernels that read token ids: the embedding and its gradient, and the cross-entropy over the
 * vocabulary. A bad id is recorded as a fault, which the host reports at its next wait, and the
 * kernel continues with a harmless id. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"

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
