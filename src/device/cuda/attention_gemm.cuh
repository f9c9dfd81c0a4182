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

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"
#include "device/cuda/gemm_plan.cuh"
#include "device/cuda/pointwise.cuh"
#include "device/cuda/tokens.cuh"

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
