/* Attention by batched GEMM and softmax
 *
 * The fallback for all that the tiles of flash.cuh do not take: fp32 arithmetic, other head sizes,
 * unaligned memory. It is the oracle of flash.cuh as well. With T = sequence and d = head size, for
 * `together` heads of one batch element at a time:
 *
 *     forward    S = scale Q K'    P = softmax(S)                               Y = P V
 *     backward   S = scale Q K'    P = e^(S - lse)           G = dY V'
 *                D = rows of dY . Y                          dS = P (G - D)
 *                dV = P' dY        dQ = scale dS K           dK = scale dS' Q
 *
 * The products read q, k, v of a head where they lie in qkv and write dq, dk, dv in the same
 * layout: rows a row of qkv apart, heads d apart. Nothing is permuted. Heads of queries that share
 * a head of keys are one pass: the products read the same K and V for each of them, and their parts
 * of dK and dV, fp32 in scratch, are added up in order.
 *
 * Scratch holds S, and G in backward: (together,T,ld) fp32, with ld = T rounded up to 8, within 32
 * MiB unless a single head needs more; the L2 cache of a large GPU holds 32 MiB too. Scores are
 * fp32 for any dtype, because their absolute error is the relative error of P. P and dS have the
 * dtype of qkv, which the next product needs, and take the place of S and G: row i of a half P
 * fills the first half of the fp32 row i, so its ld is 2 ld.
 *
 * Masked scores are neither read nor kept: P and dS are 0 there. But 0 times a NaN of V is NaN, so
 * here a NaN reaches all rows of its head, not only the later ones. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"
#include "device/cuda/gemm_plan.cuh"
#include "device/cuda/pointwise.cuh"

#include <cublasLt.h>

#include <math.h>
#include <string.h>

enum {
    DTRAIN_CUDA_SCORE_BYTES = 32 << 20,
    DTRAIN_CUDA_SOFTMAX_WARPS = 8,
    DTRAIN_CUDA_SOFTMAX_STEP = 4 * DTRAIN_CUDA_WARP /* columns that a warp takes at once */
};

/* The heads [first, first + count) of batch element `batch`. */
struct dtrain_cuda_heads {
    int64_t sequence, n, size, batch, first, count;
    int64_t width, kv_n; /* columns of qkv, and of its k and v */
    int64_t sharing;     /* heads of queries that share a head of keys */
    dtrain_dtype dtype;
    float scale;
};

/* One matrix for each head: its rows are ld elements apart, the heads `step` elements. */
struct dtrain_cuda_head_matrix {
    void *data;
    int64_t ld, step;
};

/* Describe the matrices (T,d) that begin at column `column` of (batch*T,width). */
static dtrain_cuda_head_matrix dtrain_cuda_head_columns(const dtrain_cuda_heads *x,
                                                        const void *data, int64_t width,
                                                        int64_t column)
{
    const int64_t offset = x->batch * x->sequence * width + column + x->first * x->size;
    char *const at = (char *)(uintptr_t)data + offset * (int64_t)dtrain_dtype_bytes(x->dtype);
    const dtrain_cuda_head_matrix matrix = {at, width, x->size};
    return matrix;
}

/* Describe the part of k (part 1) or v (2) that the heads read: a matrix for each head or, where
 * heads share it, one for all of this pass. */
static dtrain_cuda_head_matrix dtrain_cuda_head_keys(const dtrain_cuda_heads *x, const void *data,
                                                     int64_t part)
{
    dtrain_cuda_heads shared = *x;
    shared.first = x->first / x->sharing;
    dtrain_cuda_head_matrix matrix =
        dtrain_cuda_head_columns(&shared, data, x->width, x->n + (part - 1) * x->kv_n);
    if (x->sharing > 1) matrix.step = 0;
    return matrix;
}

/* Describe scores (T,T) as the products write them (fp32), or P and dS as the kernels leave them
 * (dtype). */
static dtrain_cuda_head_matrix dtrain_cuda_head_scores(const dtrain_cuda_heads *x, float *scores,
                                                       int64_t ld, dtrain_dtype dtype)
{
    const int64_t per_float = (int64_t)(sizeof(float) / dtrain_dtype_bytes(dtype));
    const dtrain_cuda_head_matrix matrix = {scores, ld * per_float, x->sequence * ld * per_float};
    return matrix;
}

/* Multiply: C (T,n) = alpha op(A) (T,k) op(B) (k,n), for each head. */
static dtrain_result dtrain_cuda_head_multiply(dtrain_device *device, const dtrain_cuda_heads *x,
                                               uint32_t flags, float alpha,
                                               dtrain_cuda_head_matrix a, dtrain_cuda_head_matrix b,
                                               dtrain_cuda_head_matrix c, int64_t n, int64_t k,
                                               dtrain_dtype c_type)
{
    dtrain_cuda_product product;
    memset(&product, 0, sizeof product);
    product.flags = flags;
    product.m = x->sequence, product.n = n, product.k = k, product.batch = x->count;
    product.alpha = alpha;
    product.a = a.data, product.lda = a.ld, product.a_step = a.step;
    product.b = b.data, product.ldb = b.ld, product.b_step = b.step;
    product.c = c.data, product.ldc = c.ld, product.c_step = c.step;
    product.type = x->dtype, product.c_type = c_type;
    product.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    return dtrain_cuda_gemm_batched(device, &product);
}

/* ---- Softmax: S (rows,T) -> P (rows,T) in place, lse (rows) -------------------------------------
 *
 * rows = heads * T; row r is query r % T. A warp walks over its row three times: maximum, sum, P.
 * The first walk reads 4 bytes a score from memory (2 with a causal mask), the others find them in
 * cache; the third writes the T elements of P.
 *
 * P may be narrower than S and still take its place: a walk takes 128 scores at a time, all lanes
 * read theirs before one writes, and what is written lies at or before what was read. */

struct dtrain_cuda_head_softmax {
    int64_t rows, sequence, ld;
    bool causal;
    float *scores, *lse;
};

static __device__ __forceinline__ float dtrain_cuda_score_row_max(const float *row, int64_t limit,
                                                                  int lane)
{
    float most = -INFINITY;
    for (int64_t j = lane * 4; j < limit; j += DTRAIN_CUDA_SOFTMAX_STEP) {
        const dtrain_cuda_pack<float> x = dtrain_cuda_load<4>(row + j);
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < 4; i++)
            if (j + i < limit) most = fmaxf(most, x.at[i]);
    }
    return dtrain_cuda_warp_max(most);
}

static __device__ __forceinline__ float dtrain_cuda_score_row_sum(const float *row, int64_t limit,
                                                                  int lane, float most)
{
    float sum = 0;
    for (int64_t j = lane * 4; j < limit; j += DTRAIN_CUDA_SOFTMAX_STEP) {
        const dtrain_cuda_pack<float> x = dtrain_cuda_load<4>(row + j);
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < 4; i++)
            if (j + i < limit) sum += expf(x.at[i] - most);
    }
    return dtrain_cuda_warp_sum(sum);
}

template <typename T>
static __global__ void __launch_bounds__(DTRAIN_CUDA_SOFTMAX_WARPS *DTRAIN_CUDA_WARP)
    dtrain_cuda_head_softmax_kernel(const dtrain_cuda_head_softmax args)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    const int64_t r =
        (int64_t)blockIdx.x * DTRAIN_CUDA_SOFTMAX_WARPS + threadIdx.x / DTRAIN_CUDA_WARP;
    if (r >= args.rows) return; /* the whole warp */
    const int64_t limit = args.causal ? r % args.sequence + 1 : args.sequence;
    float *const row = args.scores + r * args.ld;
    T *const out = (T *)row;
    const float most = dtrain_cuda_score_row_max(row, limit, lane);
    const float lse = most + logf(dtrain_cuda_score_row_sum(row, limit, lane, most));
    if (lane == 0) args.lse[r] = lse;
    for (int64_t base = 0; base < args.sequence; base += DTRAIN_CUDA_SOFTMAX_STEP) {
        const int64_t j = base + lane * 4;
        dtrain_cuda_pack<float> x = {};
        dtrain_cuda_pack<T, 4> p;
        if (j < limit) x = dtrain_cuda_load<4>(row + j);
        __syncwarp();
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < 4; i++) x.at[i] = j + i < limit ? expf(x.at[i] - lse) : 0.0f;
        dtrain_cuda_narrow(x.at, p);
        if (j < args.sequence) dtrain_cuda_store(out + j, p);
    }
}

/* ---- Softmax backward: S, G (rows,T), lse (rows), Y, dY (T,n) -> P over S, dS over G ------------
 *
 * Head r / T owns columns [r / T * size, ...) of Y and dY. Reads 8 bytes a score (half of them with
 * a causal mask) and writes P and dS. */

struct dtrain_cuda_head_softmax_backward {
    int64_t rows, sequence, ld, n, size;
    bool causal;
    float *scores, *grads;
    const float *lse;
    const void *y, *d_y;
};

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
    dtrain_cuda_head_softmax_backward_kernel(const dtrain_cuda_head_softmax_backward args)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    const int64_t r =
        (int64_t)blockIdx.x * DTRAIN_CUDA_SOFTMAX_WARPS + threadIdx.x / DTRAIN_CUDA_WARP;
    if (r >= args.rows) return; /* the whole warp */
    const int64_t query = r % args.sequence, head = r / args.sequence,
                  limit = args.causal ? query + 1 : args.sequence;
    const int64_t at = query * args.n + head * args.size;
    const float mean = dtrain_cuda_score_row_dot((const T *)args.y + at, (const T *)args.d_y + at,
                                                 args.size, lane);
    const float lse = args.lse[r];
    float *const row = args.scores + r * args.ld, *const grads = args.grads + r * args.ld;
    T *const p_out = (T *)row, *const d_out = (T *)grads;
    for (int64_t base = 0; base < args.sequence; base += DTRAIN_CUDA_SOFTMAX_STEP) {
        const int64_t j = base + lane * 4;
        dtrain_cuda_pack<float> x = {}, g = {};
        dtrain_cuda_pack<T, 4> p, d;
        if (j < limit) x = dtrain_cuda_load<4>(row + j), g = dtrain_cuda_load<4>(grads + j);
        __syncwarp();
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < 4; i++) {
            const bool seen = j + i < limit;
            x.at[i] = seen ? expf(x.at[i] - lse) : 0.0f;
            g.at[i] = seen ? x.at[i] * (g.at[i] - mean) : 0.0f;
        }
        dtrain_cuda_narrow(x.at, p);
        dtrain_cuda_narrow(g.at, d);
        if (j >= args.sequence) continue;
        dtrain_cuda_store(p_out + j, p);
        dtrain_cuda_store(d_out + j, d);
    }
}

/* ---- Sums over heads: parts (heads,T,d), fp32 -> dK or dV of the head that they share ---------*/

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

static dtrain_result dtrain_cuda_head_add_up(dtrain_device *device, const dtrain_cuda_heads *x,
                                             dtrain_cuda_head_matrix parts,
                                             dtrain_cuda_head_matrix out)
{
    const dtrain_cuda_head_sum_op op = {x->count,
                                        parts.step,
                                        x->size,
                                        out.ld,
                                        (const float *)parts.data,
                                        dtrain_cuda_operand_of(out.data, x->dtype)};
    return dtrain_cuda_each(device, "attention_backward (shared heads)", op, x->sequence * x->size,
                            false);
}

/* ---- Passes -----------------------------------------------------------------------------------*/

template <typename T>
static dtrain_result dtrain_cuda_head_softmax_as(dtrain_device *device,
                                                 const dtrain_cuda_head_softmax *x)
{
    return DTRAIN_CUDA_RUN(device, "softmax", dtrain_cuda_head_softmax_kernel<T>,
                           (x->rows + DTRAIN_CUDA_SOFTMAX_WARPS - 1) / DTRAIN_CUDA_SOFTMAX_WARPS,
                           DTRAIN_CUDA_SOFTMAX_WARPS * DTRAIN_CUDA_WARP, 0, *x);
}

template <typename T>
static dtrain_result
dtrain_cuda_head_softmax_backward_as(dtrain_device *device,
                                     const dtrain_cuda_head_softmax_backward *x)
{
    return DTRAIN_CUDA_RUN(device, "softmax backward", dtrain_cuda_head_softmax_backward_kernel<T>,
                           (x->rows + DTRAIN_CUDA_SOFTMAX_WARPS - 1) / DTRAIN_CUDA_SOFTMAX_WARPS,
                           DTRAIN_CUDA_SOFTMAX_WARPS * DTRAIN_CUDA_WARP, 0, *x);
}

static dtrain_result dtrain_cuda_attention_pass(dtrain_device *device,
                                                const dtrain_attention_args *args,
                                                const dtrain_cuda_heads *x, float *scores,
                                                int64_t ld)
{
    const int64_t T = x->sequence, n = x->n, d = x->size;
    const dtrain_cuda_head_matrix q = dtrain_cuda_head_columns(x, args->qkv, x->width, 0);
    const dtrain_cuda_head_matrix k = dtrain_cuda_head_keys(x, args->qkv, 1);
    const dtrain_cuda_head_matrix v = dtrain_cuda_head_keys(x, args->qkv, 2);
    const dtrain_cuda_head_matrix y = dtrain_cuda_head_columns(x, args->y, n, 0);
    const dtrain_cuda_head_matrix s = dtrain_cuda_head_scores(x, scores, ld, DTRAIN_DTYPE_F32);
    const dtrain_cuda_head_matrix p = dtrain_cuda_head_scores(x, scores, ld, x->dtype);
    float *const lse = args->lse + (x->batch * args->heads + x->first) * T;
    const dtrain_cuda_head_softmax softmax = {x->count * T, T, ld, args->causal, scores, lse};
    DTRAIN_CUDA_TRY(dtrain_cuda_head_multiply(device, x, DTRAIN_GEMM_TRANS_B, x->scale, q, k, s, T,
                                              d, DTRAIN_DTYPE_F32));
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_BY_DTYPE(x->dtype, dtrain_cuda_head_softmax_as)(device, &softmax));
    return dtrain_cuda_head_multiply(device, x, 0, 1, p, v, y, d, T, x->dtype);
}

static dtrain_result dtrain_cuda_attention_backward_pass(dtrain_device *device,
                                                         const dtrain_attention_backward_args *args,
                                                         const dtrain_cuda_heads *x, float *scores,
                                                         float *grads, int64_t ld)
{
    const int64_t T = x->sequence, n = x->n, d = x->size;
    const dtrain_cuda_head_matrix q = dtrain_cuda_head_columns(x, args->qkv, x->width, 0);
    const dtrain_cuda_head_matrix k = dtrain_cuda_head_keys(x, args->qkv, 1);
    const dtrain_cuda_head_matrix v = dtrain_cuda_head_keys(x, args->qkv, 2);
    const dtrain_cuda_head_matrix d_q = dtrain_cuda_head_columns(x, args->d_qkv, x->width, 0);
    const dtrain_cuda_head_matrix d_k = dtrain_cuda_head_keys(x, args->d_qkv, 1);
    const dtrain_cuda_head_matrix d_v = dtrain_cuda_head_keys(x, args->d_qkv, 2);
    const dtrain_cuda_head_matrix y = dtrain_cuda_head_columns(x, args->y, n, 0);
    const dtrain_cuda_head_matrix d_y = dtrain_cuda_head_columns(x, args->d_y, n, 0);
    const dtrain_cuda_head_matrix s = dtrain_cuda_head_scores(x, scores, ld, DTRAIN_DTYPE_F32);
    const dtrain_cuda_head_matrix g = dtrain_cuda_head_scores(x, grads, ld, DTRAIN_DTYPE_F32);
    const dtrain_cuda_head_matrix p = dtrain_cuda_head_scores(x, scores, ld, x->dtype);
    const dtrain_cuda_head_matrix d_s = dtrain_cuda_head_scores(x, grads, ld, x->dtype);
    const float *const lse = args->lse + (x->batch * args->heads + x->first) * T;
    const dtrain_cuda_head_softmax_backward softmax = {
        x->count * T, T, ld, n, d, args->causal, scores, grads, lse, y.data, d_y.data};
    const uint32_t trans_a = DTRAIN_GEMM_TRANS_A, trans_b = DTRAIN_GEMM_TRANS_B;
    DTRAIN_CUDA_TRY(
        dtrain_cuda_head_multiply(device, x, trans_b, x->scale, q, k, s, T, d, DTRAIN_DTYPE_F32));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_head_multiply(device, x, trans_b, 1, d_y, v, g, T, d, DTRAIN_DTYPE_F32));
    DTRAIN_CUDA_TRY(
        DTRAIN_CUDA_BY_DTYPE(x->dtype, dtrain_cuda_head_softmax_backward_as)(device, &softmax));
    DTRAIN_CUDA_TRY(dtrain_cuda_head_multiply(device, x, 0, x->scale, d_s, k, d_q, d, T, x->dtype));
    if (x->sharing == 1) {
        DTRAIN_CUDA_TRY(
            dtrain_cuda_head_multiply(device, x, trans_a, 1, p, d_y, d_v, d, T, x->dtype));
        return dtrain_cuda_head_multiply(device, x, trans_a, x->scale, d_s, q, d_k, d, T, x->dtype);
    }
    const dtrain_cuda_head_matrix parts = {grads + x->count * T * ld, d, T * d};
    DTRAIN_CUDA_TRY(
        dtrain_cuda_head_multiply(device, x, trans_a, 1, p, d_y, parts, d, T, DTRAIN_DTYPE_F32));
    DTRAIN_CUDA_TRY(dtrain_cuda_head_add_up(device, x, parts, d_v));
    DTRAIN_CUDA_TRY(dtrain_cuda_head_multiply(device, x, trans_a, x->scale, d_s, q, parts, d, T,
                                              DTRAIN_DTYPE_F32));
    return dtrain_cuda_head_add_up(device, x, parts, d_k);
}

/* Fill in what all passes share; Args is the argument struct of forward or backward. */
template <typename Args>
static dtrain_result dtrain_cuda_heads_of(const Args *args, dtrain_cuda_heads *x)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("attention", args->dtype));
    if (args->heads < 1 || args->n < 1 || args->n % args->heads)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "attention: n is %lld, which %lld heads cannot share equally",
                           (long long)args->n, (long long)args->heads);
    const int64_t kv_heads = args->kv_heads ? args->kv_heads : args->heads;
    if (kv_heads < 1 || args->heads % kv_heads)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "attention: %lld heads of queries cannot share %lld of keys equally",
                           (long long)args->heads, (long long)kv_heads);
    memset(x, 0, sizeof *x);
    x->sequence = args->sequence;
    x->n = args->n;
    x->size = args->n / args->heads;
    x->sharing = args->heads / kv_heads;
    x->kv_n = kv_heads * x->size;
    x->width = args->n + 2 * x->kv_n;
    x->dtype = args->dtype;
    x->scale = 1 / sqrtf((float)x->size);
    return DTRAIN_OK;
}

/* Choose how many heads a pass takes: those that share keys or, where none do, as many as the
 * scratch holds with `matrices` (T,ld) each, evened out over the passes. */
static int64_t dtrain_cuda_heads_together(const dtrain_cuda_heads *x, int64_t heads, int64_t ld,
                                          int64_t matrices)
{
    const int64_t sequence = x->sequence;
    if (x->sharing > 1) return x->sharing;
    const int64_t fit = DTRAIN_CUDA_SCORE_BYTES / (int64_t)sizeof(float) / matrices / ld / sequence;
    const int64_t passes = fit < 1 ? heads : (heads + fit - 1) / fit;
    return (heads + passes - 1) / passes;
}

/* ---- Entry ------------------------------------------------------------------------------------*/

static dtrain_result dtrain_cuda_attention_gemm(dtrain_device *device,
                                                const dtrain_attention_args *args)
{
    const int64_t T = args->sequence, ld = (T + 7) / 8 * 8;
    dtrain_cuda_heads x;
    void *scores = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_heads_of(args, &x));
    if (args->batch <= 0 || T <= 0) return DTRAIN_OK;
    const int64_t together = dtrain_cuda_heads_together(&x, args->heads, ld, 1);
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
                                                         const dtrain_attention_backward_args *args)
{
    const int64_t T = args->sequence, ld = (T + 7) / 8 * 8;
    dtrain_cuda_heads x;
    void *scores = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_heads_of(args, &x));
    if (args->batch <= 0 || T <= 0) return DTRAIN_OK;
    const int64_t together = dtrain_cuda_heads_together(&x, args->heads, ld, 2);
    const int64_t parts = x.sharing > 1 ? together * T * x.size : 0; /* of dK, and of dV */
    DTRAIN_CUDA_TRY(dtrain_cuda_scratch(
        device, (size_t)(2 * together * T * ld + parts) * sizeof(float), &scores));
    float *const grads = (float *)scores + together * T * ld;
    for (x.batch = 0; x.batch < args->batch; x.batch++)
        for (x.first = 0; x.first < args->heads; x.first += together) {
            x.count = args->heads - x.first < together ? args->heads - x.first : together;
            DTRAIN_CUDA_TRY(
                dtrain_cuda_attention_backward_pass(device, args, &x, (float *)scores, grads, ld));
        }
    return DTRAIN_OK;
}
