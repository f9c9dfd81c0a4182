/* GEMM 2: epilogues and fallbacks
 *
 * A product can have a bias, an activation and a bias gradient. Three ways are tried in this order;
 * each does the whole request, or nothing:
 *
 *     fused      one call of cublasLt, whose epilogue does the whole request for C
 *     in steps   cublasLt's bare product, then the epilogue kernel below
 *     widened    in steps, with fp32 copies of A and B, and with gemm_plan.cuh's product kernel if
 *                cublasLt has no algorithm for those either
 *
 *     asked                               epilogue of cublasLt    fallback
 *     C alone                             DEFAULT                 widened
 *     bias                                BIAS                    in steps
 *     GELU                                GELU                    in steps
 *     GELU, bias                          GELU_BIAS               in steps
 *     GELU, aux                           GELU_AUX                in steps
 *     GELU, aux, bias                     GELU_AUX_BIAS           in steps
 *     GELU backward                       DGELU                   in steps
 *     GELU backward, bias gradient of C   DGELU_BGRAD             DGELU, then column sums of C
 *     C alone, bias gradient of A         BGRADB                  DEFAULT, then sums of A
 *     a bias gradient with anything else  as without it, then the sums
 *     RELU or SILU, forward or backward   none                    in steps
 *     aux without an activation           none                    in steps
 *     C neither of A's type nor fp32      none                    in steps
 *     A and B of two types                none                    widened
 *     alpha or k is 0                     none                    only the epilogue kernel
 *
 * Why some epilogues are used in part or not at all:
 *
 *     RELU    it is not documented whether cublasLt's RELU keeps NaN, and its backward pass needs a
 *             bit mask in aux, where dtrain has values
 *     GELU    not fused in exact fp32 (the error of cublasLt's tanh is not documented), nor if aux
 *             is C, is not 16-byte aligned, or has an ld that is not a multiple of 8
 *     BIAS    tried with the fp32 bias first; if cublasLt refuses that, with a copy in C's type,
 *             which rounds a little earlier than C would be rounded
 *     BGRAD   its gradient is fp32, which cublasLt can refuse if C is not fp32 */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"
#include "device/cuda/elementwise.cuh"
#include "device/cuda/reductions.cuh"
#include "device/cuda/gemm_plan.cuh"

#include <cublasLt.h>

#include <math.h>
#include <string.h>

/* ---- Epilogue kernel: product (rows,n) -> C, aux ------------------------------------------------
 *
 * Completes cublasLt's product: x = product + beta C + bias; forward aux = x, C = act(x); backward
 * C = x act'(aux). C is rounded once, because the product is fp32. Reads 4 bytes for each element
 * and, if needed, C and aux; writes C and aux. A thread keeps its columns, loads their bias once,
 * and walks down the rows. */

template <typename T> struct dtrain_cuda_epilogue {
    int64_t rows, n, ld, ldc; /* ld of the product; ldc of C and aux */
    const float *product;     /* NULL: all 0; it may be C itself */
    float beta;
    const float *bias; /* (n) or NULL */
    T *c, *aux;        /* aux may be NULL */
    uint32_t activation;
    bool backward;
};

template <typename T, int W>
static __global__ void __launch_bounds__(DTRAIN_CUDA_EPILOGUE_THREADS)
    dtrain_cuda_epilogue_kernel(const dtrain_cuda_epilogue<T> args)
{
    const int64_t strips = (args.n + W * blockDim.x - 1) / (W * blockDim.x);
    const int64_t column = (blockIdx.x % strips * blockDim.x + threadIdx.x) * W;
    const bool reads_aux = args.backward && args.activation != DTRAIN_ACTIVATION_NONE;
    const bool writes_aux = args.aux && !args.backward;
    dtrain_cuda_pack<float, W> bias = {};
    if (column >= args.n) return;
    if (args.bias) bias = dtrain_cuda_load<W>(args.bias + column);
    for (int64_t row = blockIdx.x / strips; row < args.rows; row += gridDim.x / strips) {
        const int64_t at = row * args.ldc + column;
        dtrain_cuda_pack<float, W> x = {};
        dtrain_cuda_pack<T, W> c = {}, aux = {};
        if (args.product) x = dtrain_cuda_load<W>(args.product + row * args.ld + column);
        if (args.beta != 0) c = dtrain_cuda_load<W>(args.c + at);
        if (reads_aux) aux = dtrain_cuda_load<W>(args.aux + at);
        DTRAIN_CUDA_UNROLL
        for (int i = 0; i < W; i++) {
            x.at[i] += bias.at[i];
            if (args.beta != 0) x.at[i] += args.beta * dtrain_cuda_widen(c.at[i]);
            if (reads_aux)
                x.at[i] =
                    dtrain_cuda_deactivate(args.activation, dtrain_cuda_widen(aux.at[i]), x.at[i]);
        }
        if (writes_aux) {
            dtrain_cuda_narrow(x.at, aux);
            dtrain_cuda_store(args.aux + at, aux);
        }
        if (!args.backward) {
            DTRAIN_CUDA_UNROLL
            for (int i = 0; i < W; i++) x.at[i] = dtrain_cuda_activate(args.activation, x.at[i]);
        }
        dtrain_cuda_narrow(x.at, c);
        dtrain_cuda_store(args.c + at, c);
    }
}

/* Run the epilogue kernel on rows [row, row + rows) of C. */
template <typename T>
static dtrain_result dtrain_cuda_epilogue_as(dtrain_device *device, const dtrain_gemm_args *args,
                                             int64_t row, int64_t rows, const float *product,
                                             int64_t ld, float beta)
{
    constexpr int W = DTRAIN_CUDA_EPILOGUE_WIDTH;
    T *const c = (T *)args->c + row * args->ldc;
    T *const aux = args->aux ? (T *)args->aux + row * args->ldc : NULL;
    const dtrain_cuda_epilogue<T> x = {rows,
                                       args->n,
                                       ld,
                                       args->ldc,
                                       product,
                                       beta,
                                       args->bias,
                                       c,
                                       aux,
                                       args->activation,
                                       (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0};
    const bool wide = args->n % W == 0 && args->ldc % W == 0 && ld % W == 0 &&
                      dtrain_cuda_aligned(c) && dtrain_cuda_aligned(aux) &&
                      dtrain_cuda_aligned(product) && dtrain_cuda_aligned(args->bias);
    const int64_t span = (int64_t)DTRAIN_CUDA_EPILOGUE_THREADS * (wide ? W : 1);
    const int64_t strips = (args->n + span - 1) / span;
    const int64_t deep = (int64_t)dtrain_cuda_state_of(device)->multiprocessors * 16 / strips + 1;
    const int64_t blocks = strips * (rows < deep ? rows : deep);
    if (wide)
        return DTRAIN_CUDA_RUN(device, "gemm epilogue", (dtrain_cuda_epilogue_kernel<T, W>), blocks,
                               DTRAIN_CUDA_EPILOGUE_THREADS, 0, x);
    return DTRAIN_CUDA_RUN(device, "gemm epilogue", (dtrain_cuda_epilogue_kernel<T, 1>), blocks,
                           DTRAIN_CUDA_EPILOGUE_THREADS, 0, x);
}

/* ---- fp32 copy: x (rows,n) with ld -> y (rows,n) with to_ld -----------------------------------*/

template <typename T>
static __global__ void __launch_bounds__(DTRAIN_CUDA_EPILOGUE_THREADS)
    dtrain_cuda_widen_kernel(const T *x, int64_t rows, int64_t n, int64_t ld, float *y,
                             int64_t to_ld)
{
    const int64_t strips = (n + blockDim.x - 1) / blockDim.x;
    const int64_t column = blockIdx.x % strips * blockDim.x + threadIdx.x;
    if (column >= n) return;
    for (int64_t row = blockIdx.x / strips; row < rows; row += gridDim.x / strips)
        y[row * to_ld + column] = dtrain_cuda_widen(x[row * ld + column]);
}

template <typename T>
static dtrain_result dtrain_cuda_widen_as(dtrain_device *device, const void *x, int64_t rows,
                                          int64_t n, int64_t ld, float *y, int64_t to_ld)
{
    const int64_t strips = (n + DTRAIN_CUDA_EPILOGUE_THREADS - 1) / DTRAIN_CUDA_EPILOGUE_THREADS;
    const int64_t deep = (int64_t)dtrain_cuda_state_of(device)->multiprocessors * 16 / strips + 1;
    return DTRAIN_CUDA_RUN(device, "gemm operand", dtrain_cuda_widen_kernel<T>,
                           strips * (rows < deep ? rows : deep), DTRAIN_CUDA_EPILOGUE_THREADS, 0,
                           (const T *)x, rows, n, ld, y, to_ld);
}

/* ---- Bias gradient: column sums of C (m,n), or row sums of op(A) (m,k) --------------------------
 *
 * The usual op(A) is d_y', so its row sums are column sums of the memory of A. Row sums of the
 * memory take one warp a row. */

enum { DTRAIN_CUDA_ROW_SUM_WARPS = 8 };

template <typename T>
static __global__ void __launch_bounds__(DTRAIN_CUDA_ROW_SUM_WARPS *DTRAIN_CUDA_WARP)
    dtrain_cuda_row_sums_kernel(const T *x, int64_t rows, int64_t n, int64_t ld, float *out,
                                bool accumulate)
{
    const int lane = threadIdx.x % DTRAIN_CUDA_WARP;
    const int64_t row =
        (int64_t)blockIdx.x * DTRAIN_CUDA_ROW_SUM_WARPS + threadIdx.x / DTRAIN_CUDA_WARP;
    float sum = 0;
    if (row < rows)
        for (int64_t i = lane; i < n; i += DTRAIN_CUDA_WARP)
            sum += dtrain_cuda_widen(x[row * ld + i]);
    sum = dtrain_cuda_warp_sum(sum);
    if (lane == 0 && row < rows) out[row] = accumulate ? out[row] + sum : sum;
}

template <typename T>
static dtrain_result dtrain_cuda_row_sums_as(dtrain_device *device, const void *x, int64_t rows,
                                             int64_t n, int64_t ld, float *out, bool accumulate)
{
    const int64_t blocks = (rows + DTRAIN_CUDA_ROW_SUM_WARPS - 1) / DTRAIN_CUDA_ROW_SUM_WARPS;
    return DTRAIN_CUDA_RUN(device, "gemm bias gradient", dtrain_cuda_row_sums_kernel<T>, blocks,
                           DTRAIN_CUDA_ROW_SUM_WARPS * DTRAIN_CUDA_WARP, 0, (const T *)x, rows, n,
                           ld, out, accumulate);
}

static dtrain_result dtrain_cuda_gemm_bias_grad(dtrain_device *device, const dtrain_gemm_args *args)
{
    if (args->flags & DTRAIN_GEMM_BIAS_GRAD_C)
        return dtrain_cuda_column_sums(device, args->c_dtype, args->c, args->m, args->n, args->ldc,
                                       args->bias_grad, args->accumulate_bias_grad);
    if (args->flags & DTRAIN_GEMM_TRANS_A)
        return dtrain_cuda_column_sums(device, args->a_dtype, args->a, args->k, args->m, args->lda,
                                       args->bias_grad, args->accumulate_bias_grad);
    return DTRAIN_CUDA_BY_DTYPE(args->a_dtype, dtrain_cuda_row_sums_as)(
        device, args->a, args->m, args->k, args->lda, args->bias_grad, args->accumulate_bias_grad);
}

/* ---- Fused ------------------------------------------------------------------------------------*/

static dtrain_cuda_product dtrain_cuda_product_of(const dtrain_gemm_args *args)
{
    dtrain_cuda_product product;
    memset(&product, 0, sizeof product);
    product.flags = args->flags & (DTRAIN_GEMM_TRANS_A | DTRAIN_GEMM_TRANS_B);
    product.m = args->m, product.n = args->n, product.k = args->k, product.batch = 1;
    product.alpha = args->alpha, product.beta = args->beta;
    product.a = args->a, product.b = args->b, product.c = args->c;
    product.lda = args->lda, product.ldb = args->ldb, product.ldc = args->ldc;
    product.type = args->a_dtype, product.c_type = args->c_dtype;
    product.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    return product;
}

static size_t dtrain_cuda_round_256(size_t bytes) { return (bytes + 255) & ~(size_t)255; }

/* Choose the epilogue that does the whole request for C without bias gradients; false if there is
 * none. See the table at the head of this file. */
static bool dtrain_cuda_gemm_epilogue(const dtrain_cuda_state *state, const dtrain_gemm_args *args,
                                      cublasLtEpilogue_t *out)
{
    const bool backward = (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    if (args->activation == DTRAIN_ACTIVATION_NONE) {
        *out = args->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
        return backward || !args->aux;
    }
    if (backward) *out = CUBLASLT_EPILOGUE_DGELU;
    else if (args->aux)
        *out = args->bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    else *out = args->bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    return args->activation == DTRAIN_ACTIVATION_GELU && args->aux != args->c &&
           dtrain_cuda_aligned(args->aux) && (!args->aux || args->ldc % 8 == 0) &&
           !(args->a_dtype == DTRAIN_DTYPE_F32 && state->math == DTRAIN_MATH_FP32);
}

/* List the possible calls of cublasLt, best first, and return their number. `vector` is scratch for
 * a bias in C's type or for a bias gradient that is added to. */
static int dtrain_cuda_gemm_variants(const dtrain_gemm_args *args, cublasLtEpilogue_t epilogue,
                                     void *vector, dtrain_cuda_product variants[3])
{
    dtrain_cuda_product product = dtrain_cuda_product_of(args);
    const bool of_c = (args->flags & DTRAIN_GEMM_BIAS_GRAD_C) != 0;
    void *const grad = args->accumulate_bias_grad ? vector : (void *)args->bias_grad;
    int count = 0;
    product.epilogue = epilogue;
    product.aux = args->activation != DTRAIN_ACTIVATION_NONE ? args->aux : NULL;
    product.vector_type = DTRAIN_DTYPE_F32;
    if (args->bias_grad && dtrain_cuda_aligned(grad) &&
        epilogue == (of_c ? CUBLASLT_EPILOGUE_DGELU : CUBLASLT_EPILOGUE_DEFAULT)) {
        variants[count] = product;
        variants[count].epilogue = of_c ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_BGRADB;
        variants[count++].vector = grad;
    }
    if (!args->bias) {
        variants[count++] = product;
        return count;
    }
    if (dtrain_cuda_aligned(args->bias)) {
        variants[count] = product;
        variants[count++].vector = (void *)(uintptr_t)args->bias;
    }
    if (args->c_dtype != DTRAIN_DTYPE_F32) {
        variants[count] = product;
        variants[count].vector_type = args->c_dtype;
        variants[count++].vector = vector;
    }
    return count;
}

/* Run the conversion of the bias, the chosen call, and the bias gradient; if cublasLt refuses the
 * call, entry->works is false and nothing has been done. */
static dtrain_result dtrain_cuda_gemm_run_fused(dtrain_device *device, const dtrain_gemm_args *args,
                                                const dtrain_cuda_product *product,
                                                dtrain_cuda_gemm_entry *entry)
{
    const bool makes_grad = product->epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD ||
                            product->epilogue == CUBLASLT_EPILOGUE_BGRADB;
    if (!entry->works) return DTRAIN_OK;
    if (product->vector && product->vector_type != DTRAIN_DTYPE_F32) {
        const dtrain_convert_args bias = {args->n, args->bias, product->vector, DTRAIN_DTYPE_F32,
                                          product->vector_type};
        DTRAIN_CUDA_TRY(dtrain_cuda_convert(device, &bias));
    }
    DTRAIN_CUDA_TRY(dtrain_cuda_gemm_run(device, product, entry));
    if (!entry->works || !args->bias_grad) return DTRAIN_OK;
    if (!makes_grad) return dtrain_cuda_gemm_bias_grad(device, args);
    if (!args->accumulate_bias_grad) return DTRAIN_OK;
    const int64_t count = args->flags & DTRAIN_GEMM_BIAS_GRAD_C ? args->n : args->m;
    const dtrain_axpby_args add = {
        count, true, 1, 1, product->vector, args->bias_grad, false, DTRAIN_DTYPE_F32, NULL};
    return dtrain_cuda_axpby(device, &add); /* without scratch, where the vector is */
}

static dtrain_result dtrain_cuda_gemm_fused(dtrain_device *device, const dtrain_gemm_args *args,
                                            bool *done)
{
    dtrain_cuda_product variants[3];
    dtrain_cuda_gemm_entry *entry = NULL;
    cublasLtEpilogue_t epilogue;
    void *vector = NULL;
    if (!dtrain_cuda_gemm_epilogue(dtrain_cuda_state_of(device), args, &epilogue)) return DTRAIN_OK;
    const int64_t longest = args->m > args->n ? args->m : args->n;
    if (args->bias || args->bias_grad)
        DTRAIN_CUDA_TRY(dtrain_cuda_scratch(device, (size_t)longest * sizeof(float), &vector));
    const int count = dtrain_cuda_gemm_variants(args, epilogue, vector, variants);
    for (int i = 0; i < count && !*done; i++) {
        DTRAIN_CUDA_TRY(dtrain_cuda_gemm_find(device, &variants[i], &entry));
        DTRAIN_CUDA_TRY(dtrain_cuda_gemm_run_fused(device, args, &variants[i], entry));
        *done = entry->works;
    }
    if (entry && !*done) entry->slow = true;
    return DTRAIN_OK;
}

/* ---- In steps ---------------------------------------------------------------------------------*/

/* The plan of a product in steps: which buffers exist and where the product is made. */
struct dtrain_cuda_gemm_steps {
    bool empty;                   /* no product at all: alpha or k is 0 */
    bool widen;                   /* A and B are copied as fp32 */
    bool in_scratch;              /* the product is made in scratch, `rows` rows of C at a time */
    bool finish;                  /* the epilogue kernel has something to do */
    int64_t rows, ld, a_ld, b_ld; /* ld: of the product */
    size_t a_bytes, b_bytes, c_bytes; /* of scratch */
};

static dtrain_cuda_gemm_steps dtrain_cuda_gemm_plan(const dtrain_gemm_args *args, bool widen)
{
    const bool trans_a = (args->flags & DTRAIN_GEMM_TRANS_A) != 0,
               trans_b = (args->flags & DTRAIN_GEMM_TRANS_B) != 0;
    const bool backward = (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    const bool touches =
        args->bias || args->activation != DTRAIN_ACTIVATION_NONE || (args->aux && !backward);
    const dtrain_dtype type = widen ? DTRAIN_DTYPE_F32 : args->a_dtype;
    dtrain_cuda_gemm_steps steps = {};
    steps.empty = args->alpha == 0 || args->k == 0;
    steps.widen = widen && !steps.empty;
    steps.in_scratch = !steps.empty &&
                       ((args->c_dtype != DTRAIN_DTYPE_F32 && (touches || args->c_dtype != type)) ||
                        (touches && args->aux == args->c));
    steps.finish = touches || steps.in_scratch || steps.empty;
    steps.rows = args->m;
    steps.ld = args->ldc;
    if (steps.widen) {
        steps.a_ld = ((trans_a ? args->m : args->k) + 3) / 4 * 4;
        steps.b_ld = ((trans_b ? args->k : args->n) + 3) / 4 * 4;
        steps.a_bytes =
            dtrain_cuda_round_256((size_t)steps.a_ld * (size_t)(trans_a ? args->k : args->m) * 4);
        steps.b_bytes =
            dtrain_cuda_round_256((size_t)steps.b_ld * (size_t)(trans_b ? args->n : args->k) * 4);
    }
    if (steps.in_scratch) {
        steps.ld = (args->n + 3) / 4 * 4;
        const int64_t most = DTRAIN_CUDA_GEMM_SCRATCH / (steps.ld * 4);
        steps.rows = most < 1 ? 1 : most < args->m ? most : args->m;
        steps.c_bytes = (size_t)steps.rows * (size_t)steps.ld * 4;
    }
    return steps;
}

/* Describe the bare product of all rows, and make the fp32 copies of A and B if needed. */
static dtrain_result dtrain_cuda_gemm_operands(dtrain_device *device, const dtrain_gemm_args *args,
                                               const dtrain_cuda_gemm_steps *steps, char *scratch,
                                               dtrain_cuda_product *product)
{
    const bool trans_a = (args->flags & DTRAIN_GEMM_TRANS_A) != 0,
               trans_b = (args->flags & DTRAIN_GEMM_TRANS_B) != 0;
    *product = dtrain_cuda_product_of(args);
    if (!steps->widen) return DTRAIN_OK;
    float *const a = (float *)scratch, *const b = (float *)(scratch + steps->a_bytes);
    product->type = DTRAIN_DTYPE_F32;
    product->widened = args->a_dtype != DTRAIN_DTYPE_F32 || args->b_dtype != DTRAIN_DTYPE_F32;
    product->a = a, product->lda = steps->a_ld;
    product->b = b, product->ldb = steps->b_ld;
    DTRAIN_CUDA_TRY(DTRAIN_CUDA_BY_DTYPE(args->a_dtype, dtrain_cuda_widen_as)(
        device, args->a, trans_a ? args->k : args->m, trans_a ? args->m : args->k, args->lda, a,
        steps->a_ld));
    return DTRAIN_CUDA_BY_DTYPE(args->b_dtype, dtrain_cuda_widen_as)(
        device, args->b, trans_b ? args->n : args->k, trans_b ? args->k : args->n, args->ldb, b,
        steps->b_ld);
}

/* Run the epilogue kernel, if there is anything to do, on rows [row, row + product->m) of C. */
static dtrain_result dtrain_cuda_gemm_finish(dtrain_device *device, const dtrain_gemm_args *args,
                                             const dtrain_cuda_gemm_steps *steps,
                                             const dtrain_cuda_product *product, int64_t row)
{
    if (!steps->finish) return DTRAIN_OK;
    const float *const made = steps->empty ? NULL : (const float *)product->c;
    const float beta = steps->in_scratch || steps->empty ? args->beta : 0;
    return DTRAIN_CUDA_BY_DTYPE(args->c_dtype, dtrain_cuda_epilogue_as)(
        device, args, row, product->m, made, steps->ld, beta);
}

static dtrain_result dtrain_cuda_gemm_in_steps(dtrain_device *device, const dtrain_gemm_args *args,
                                               bool widen, bool *done)
{
    const dtrain_cuda_gemm_steps steps = dtrain_cuda_gemm_plan(args, widen);
    const int64_t a_row =
        args->flags & DTRAIN_GEMM_TRANS_A ? 1 : (steps.widen ? steps.a_ld : args->lda);
    dtrain_cuda_product product;
    char *scratch = NULL;
    const size_t bytes = steps.a_bytes + steps.b_bytes + steps.c_bytes;
    if (bytes > 0) DTRAIN_CUDA_TRY(dtrain_cuda_scratch(device, bytes, (void **)&scratch));
    DTRAIN_CUDA_TRY(dtrain_cuda_gemm_operands(device, args, &steps, scratch, &product));
    const char *const a = (const char *)product.a;
    for (int64_t row = 0; row < args->m; row += steps.rows) {
        dtrain_cuda_gemm_entry *entry = NULL;
        product.m = args->m - row < steps.rows ? args->m - row : steps.rows;
        product.a = a + row * a_row * (int64_t)dtrain_dtype_bytes(product.type);
        if (steps.in_scratch) {
            product.c = scratch + steps.a_bytes + steps.b_bytes, product.ldc = steps.ld;
            product.c_type = DTRAIN_DTYPE_F32, product.beta = 0;
        }
        if (!steps.empty) {
            DTRAIN_CUDA_TRY(dtrain_cuda_gemm_find(device, &product, &entry));
            DTRAIN_CUDA_TRY(dtrain_cuda_gemm_run(device, &product, entry));
            if (!entry->works) entry->slow = true;
            if (!entry->works && !widen && row == 0) return DTRAIN_OK;
            if (!entry->works) DTRAIN_CUDA_TRY(dtrain_cuda_own_product(device, &product, entry));
        }
        DTRAIN_CUDA_TRY(dtrain_cuda_gemm_finish(device, args, &steps, &product, row));
    }
    *done = true;
    return args->bias_grad ? dtrain_cuda_gemm_bias_grad(device, args) : DTRAIN_OK;
}

/* ---- Entry ------------------------------------------------------------------------------------*/

static dtrain_result dtrain_cuda_gemm_check(const dtrain_gemm_args *args)
{
    const uint32_t known = DTRAIN_GEMM_TRANS_A | DTRAIN_GEMM_TRANS_B | DTRAIN_GEMM_ACT_BACKWARD |
                           DTRAIN_GEMM_BIAS_GRAD_C;
    const bool backward = (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("gemm", args->a_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("gemm", args->b_dtype));
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("gemm", args->c_dtype));
    if (args->flags & ~known)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "gemm: the flags 0x%x contain an unknown one",
                           (unsigned)args->flags);
    if (args->activation > DTRAIN_ACTIVATION_SILU)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "gemm: activation is %u, which is not a dtrain_activation",
                           (unsigned)args->activation);
    if (backward && args->bias)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "gemm: DTRAIN_GEMM_ACT_BACKWARD does not take a bias: give NULL");
    if (backward && args->activation != DTRAIN_ACTIVATION_NONE && !args->aux)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "gemm: DTRAIN_GEMM_ACT_BACKWARD needs in aux "
                                                  "what the forward product left there, found "
                                                  "NULL");
    if (args->k < 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "gemm: k is %lld, below 0", (long long)args->k);
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_gemm(dtrain_device *device, const dtrain_gemm_args *given)
{
    dtrain_gemm_args args = *given;
    bool done = false;
    DTRAIN_CUDA_TRY(dtrain_cuda_gemm_check(given));
    if (args.m <= 0 || args.n <= 0) return DTRAIN_OK;
    const bool mixed = args.a_dtype != args.b_dtype, empty = args.alpha == 0 || args.k == 0;
    if (!mixed && !empty && (args.c_dtype == DTRAIN_DTYPE_F32 || args.c_dtype == args.a_dtype))
        DTRAIN_CUDA_TRY(dtrain_cuda_gemm_fused(device, &args, &done));
    if (!done) DTRAIN_CUDA_TRY(dtrain_cuda_gemm_in_steps(device, &args, mixed, &done));
    if (!done) DTRAIN_CUDA_TRY(dtrain_cuda_gemm_in_steps(device, &args, true, &done));
    return DTRAIN_OK;
}

/* ---- bias: c, aux (m,n), by the epilogue kernel without a product --------------------------*/

static dtrain_result dtrain_cuda_bias(dtrain_device *device, const dtrain_bias_args *args)
{
    DTRAIN_CUDA_TRY(dtrain_cuda_known_dtype("bias", args->c_dtype));
    if (args->activation > DTRAIN_ACTIVATION_SILU)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "bias: activation is %u, which is not a dtrain_activation",
                           (unsigned)args->activation);
    if (args->m <= 0 || args->n <= 0) return DTRAIN_OK;
    return DTRAIN_CUDA_BY_DTYPE(args->c_dtype, dtrain_cuda_epilogue_as)(device, args, 0, args->m,
                                                                        NULL, args->n, 1.0f);
}
