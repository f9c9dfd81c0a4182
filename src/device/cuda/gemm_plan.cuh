/* GEMM 1: cublasLt and the algorithm cache
 *
 * C (m,n) row by row in memory is C' (n,m) column by column, and C' = op(B)' op(A)'. So cublasLt,
 * which is column-major, gets our B as its first operand and our A as its second; every matrix
 * keeps its address and its ld, and no transposition changes:
 *
 *     dtrain, row-major                   cublasLt, column-major
 *     B (k,n), or (n,k) with TRANS_B      A (n,k) OP_N, or (k,n) OP_T
 *     A (m,k), or (k,m) with TRANS_A      B (k,m) OP_N, or (m,k) OP_T
 *     C (m,n)                             D (n,m)
 *     bias (n), one for each column       BIAS, one for each row of D
 *     row sums of op(A)                   BGRADB
 *
 * For each kind of product cublasLt proposes algorithms once, and the cache remembers the choice.
 * By default the first proposal is taken, and every run computes the same bits; with desc->tune the
 * first use times all proposals and keeps the fastest. The choice, and with it the last bit of a
 * result, can then depend on the run. If cublasLtMatmul refuses a proposal, the next one replaces
 * it in the cache; after the last one, the kernel below multiplies.
 *
 * Cost of a product that is in the cache: one hash, one memcmp, at most two attributes, one
 * launch. C is the output of every product, also with beta != 0: none needs scratch. */

#pragma once

#include "device/cuda/language.cuh"
#include "device/cuda/device.cuh"
#include "device/cuda/memory.cuh"

#include <cublasLt.h>

#include <math.h>
#include <string.h>

#define DTRAIN_CUDA_GEMM_CANDIDATES 8

enum {
    DTRAIN_CUDA_GEMM_TRIALS = 3,         /* timings of each candidate: the best counts */
    DTRAIN_CUDA_GEMM_SLOTS = 512,        /* kinds of products remembered */
    DTRAIN_CUDA_GEMM_PROBES = 8,         /* slots that one kind may occupy */
    DTRAIN_CUDA_GEMM_SCRATCH = 64 << 20, /* bytes of scratch for a product made outside C */
    DTRAIN_CUDA_GEMM_TIMING = 256 << 20, /* bytes of a C that is timed with beta != 0, at most */
    DTRAIN_CUDA_GEMM_TILE = 16,          /* side of a block's part of C in our own kernel */
    DTRAIN_CUDA_EPILOGUE_WIDTH = 4,      /* columns a thread takes */
    DTRAIN_CUDA_EPILOGUE_THREADS = 128
};

/* One call of cublasLt, in row-major words: for i < batch, C_i = epilogue(alpha op(A_i) op(B_i) +
 * beta C_i). */
struct dtrain_cuda_product {
    uint32_t flags; /* DTRAIN_GEMM_TRANS_A, _B */
    int64_t m, n, k, batch;
    float alpha, beta;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc;
    int64_t a_step, b_step, c_step; /* elements from one matrix of the batch to the next */
    dtrain_dtype type, c_type;      /* of A and B, of C */
    bool widened;                   /* A and B are fp32 copies of something narrower */
    cublasLtEpilogue_t epilogue;
    void *vector; /* bias (n), or the bias gradient to be written */
    dtrain_dtype vector_type;
    void *aux; /* (m,n) with the ld and type of C */
};

/* The inputs of the choice of an algorithm. Without padding, so that memcmp compares it. */
struct dtrain_cuda_gemm_key {
    int64_t m, n, k, batch, lda, ldb, ldc, a_step, b_step, c_step;
    uint32_t flags, epilogue, type, c_type, vector_type, compute;
    uint32_t a_alignment, b_alignment, c_alignment, reserved;
};

struct dtrain_cuda_gemm_entry {
    dtrain_cuda_gemm_key key;
    bool used, works; /* works is false where cublasLt has no algorithm: it is not asked again */
    bool slow;        /* and nothing as fast took its place: counted by query */
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c; /* of our A, B, C */
    cublasLtMatmulAlgo_t algorithm;
};

struct dtrain_cuda_gemm_cache {
    dtrain_cuda_gemm_entry entries[DTRAIN_CUDA_GEMM_SLOTS];
};

static dtrain_result dtrain_cuda_lt_check(cublasStatus_t status, const char *what)
{
    if (status == CUBLAS_STATUS_SUCCESS) return DTRAIN_OK;
    cudaGetLastError();
    return dtrain_fail(status == CUBLAS_STATUS_ALLOC_FAILED    ? DTRAIN_ERROR_MEMORY
                       : status == CUBLAS_STATUS_NOT_SUPPORTED ? DTRAIN_ERROR_UNSUPPORTED
                                                               : DTRAIN_ERROR_SYSTEM,
                       "%s failed: %s (%s)", what, cublasLtGetStatusName(status),
                       cublasLtGetStatusString(status));
}

static cudaDataType_t dtrain_cuda_lt_type(dtrain_dtype dtype)
{
    return dtype == DTRAIN_DTYPE_BF16  ? CUDA_R_16BF
           : dtype == DTRAIN_DTYPE_F16 ? CUDA_R_16F
                                       : CUDA_R_32F;
}

/* Choose the arithmetic of a product. bf16 arithmetic is for fp32 operands; a widened fp16 has more
 * bits than bf16, so it takes TF32, which keeps them all. */
static cublasComputeType_t dtrain_cuda_lt_compute(const dtrain_cuda_state *state,
                                                  const dtrain_cuda_product *product)
{
    if (product->type != DTRAIN_DTYPE_F32) return CUBLAS_COMPUTE_32F;
    if (state->math == DTRAIN_MATH_TF32) return CUBLAS_COMPUTE_32F_FAST_TF32;
    if (state->math != DTRAIN_MATH_BF16) return CUBLAS_COMPUTE_32F;
    return product->widened ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F_FAST_16BF;
}

/* Give the largest power of two, at most 16 bytes, that divides the address of every matrix of the
 * batch. */
static uint32_t dtrain_cuda_lt_alignment(const void *memory, int64_t step, dtrain_dtype dtype)
{
    const uint64_t bits =
        (uint64_t)(uintptr_t)memory | (uint64_t)step * dtrain_dtype_bytes(dtype) | 16u;
    return (uint32_t)(bits & (~bits + 1));
}

/* ---- The cache --------------------------------------------------------------------------------*/

static dtrain_cuda_gemm_key dtrain_cuda_gemm_key_of(const dtrain_cuda_state *state,
                                                    const dtrain_cuda_product *product)
{
    dtrain_cuda_gemm_key key;
    memset(&key, 0, sizeof key);
    key.m = product->m, key.n = product->n, key.k = product->k, key.batch = product->batch;
    key.lda = product->lda, key.ldb = product->ldb, key.ldc = product->ldc;
    key.a_step = product->a_step, key.b_step = product->b_step, key.c_step = product->c_step;
    key.flags = product->flags;
    key.epilogue = (uint32_t)product->epilogue;
    key.type = (uint32_t)product->type, key.c_type = (uint32_t)product->c_type;
    key.vector_type = product->vector ? (uint32_t)product->vector_type : 0;
    key.compute = (uint32_t)dtrain_cuda_lt_compute(state, product);
    key.a_alignment = dtrain_cuda_lt_alignment(product->a, product->a_step, product->type);
    key.b_alignment = dtrain_cuda_lt_alignment(product->b, product->b_step, product->type);
    key.c_alignment = dtrain_cuda_lt_alignment(product->c, product->c_step, product->c_type);
    return key;
}

static void dtrain_cuda_gemm_evict(dtrain_cuda_gemm_entry *entry)
{
    if (entry->c) cublasLtMatrixLayoutDestroy(entry->c);
    if (entry->b) cublasLtMatrixLayoutDestroy(entry->b);
    if (entry->a) cublasLtMatrixLayoutDestroy(entry->a);
    if (entry->operation) cublasLtMatmulDescDestroy(entry->operation);
    memset(entry, 0, sizeof *entry);
}

static void dtrain_cuda_gemm_cache_free(dtrain_cuda_state *state)
{
    for (int i = 0; i < DTRAIN_CUDA_GEMM_SLOTS; i++)
        dtrain_cuda_gemm_evict(&state->gemm_cache->entries[i]);
    dtrain_cuda_host_give(&state->allocator, state->gemm_cache, sizeof *state->gemm_cache);
    state->gemm_cache = NULL;
}

/* Find the entry of a key: its own; else a free one among its slots; else the first of its slots,
 * whose entry is evicted. */
static dtrain_cuda_gemm_entry *dtrain_cuda_gemm_slot(dtrain_cuda_gemm_cache *cache,
                                                     const dtrain_cuda_gemm_key *key)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ ((const unsigned char *)key)[i]) * 1099511628211u;
    dtrain_cuda_gemm_entry *first = &cache->entries[hash % DTRAIN_CUDA_GEMM_SLOTS];
    for (uint64_t probe = 0; probe < DTRAIN_CUDA_GEMM_PROBES; probe++) {
        dtrain_cuda_gemm_entry *entry = &cache->entries[(hash + probe) % DTRAIN_CUDA_GEMM_SLOTS];
        if (!entry->used || memcmp(&entry->key, key, sizeof *key) == 0) return entry;
    }
    dtrain_cuda_gemm_evict(first);
    return first;
}

/* ---- Descriptors ------------------------------------------------------------------------------*/

/* Describe a matrix stored as `rows` rows of `columns`; to cublasLt rows and columns are
 * exchanged. */
static dtrain_result dtrain_cuda_lt_layout(cublasLtMatrixLayout_t *layout, dtrain_dtype dtype,
                                           int64_t rows, int64_t columns, int64_t ld, int64_t batch,
                                           int64_t step)
{
    const int32_t count = (int32_t)batch;
    cublasStatus_t status = cublasLtMatrixLayoutCreate(layout, dtrain_cuda_lt_type(dtype),
                                                       (uint64_t)columns, (uint64_t)rows, ld);
    if (status == CUBLAS_STATUS_SUCCESS && batch > 1)
        status = cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                  &count, sizeof count);
    if (status == CUBLAS_STATUS_SUCCESS && batch > 1)
        status = cublasLtMatrixLayoutSetAttribute(
            *layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step);
    return dtrain_cuda_lt_check(status, "describing a matrix to cublasLt");
}

static dtrain_result dtrain_cuda_lt_set(dtrain_cuda_gemm_entry *entry,
                                        cublasLtMatmulDescAttributes_t attribute, const void *value,
                                        size_t bytes)
{
    return dtrain_cuda_lt_check(
        cublasLtMatmulDescSetAttribute(entry->operation, attribute, value, bytes),
        "describing a product to cublasLt");
}

/* Set the addresses that are part of the description: they change from call to call. */
static dtrain_result dtrain_cuda_lt_set_addresses(dtrain_cuda_gemm_entry *entry,
                                                  const dtrain_cuda_product *product)
{
    if (product->vector)
        DTRAIN_CUDA_TRY(dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                           &product->vector, sizeof product->vector));
    if (product->aux)
        DTRAIN_CUDA_TRY(dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                           &product->aux, sizeof product->aux));
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_lt_describe(const dtrain_cuda_product *x,
                                             dtrain_cuda_gemm_entry *entry)
{
    const bool trans_a = (x->flags & DTRAIN_GEMM_TRANS_A) != 0,
               trans_b = (x->flags & DTRAIN_GEMM_TRANS_B) != 0;
    const int32_t first = trans_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                  second = trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t vector_type = dtrain_cuda_lt_type(x->vector_type);
    const uint32_t epilogue = (uint32_t)x->epilogue;
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_check(
        cublasLtMatmulDescCreate(&entry->operation, (cublasComputeType_t)entry->key.compute,
                                 CUDA_R_32F),
        "describing a product to cublasLt"));
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    DTRAIN_CUDA_TRY(
        dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    if (x->vector)
        DTRAIN_CUDA_TRY(dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &vector_type,
                                           sizeof vector_type));
    if (x->aux)
        DTRAIN_CUDA_TRY(dtrain_cuda_lt_set(entry, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &x->ldc,
                                           sizeof x->ldc));
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_set_addresses(entry, x));
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_layout(&entry->a, x->type, trans_a ? x->k : x->m,
                                          trans_a ? x->m : x->k, x->lda, x->batch, x->a_step));
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_layout(&entry->b, x->type, trans_b ? x->n : x->k,
                                          trans_b ? x->k : x->n, x->ldb, x->batch, x->b_step));
    return dtrain_cuda_lt_layout(&entry->c, x->c_type, x->m, x->n, x->ldc, x->batch, x->c_step);
}

/* ---- Algorithms -------------------------------------------------------------------------------*/

static cublasStatus_t dtrain_cuda_lt_limit(cublasLtMatmulPreference_t limits,
                                           cublasLtMatmulPreferenceAttributes_t attribute,
                                           uint32_t value)
{
    return cublasLtMatmulPreferenceSetAttribute(limits, attribute, &value, sizeof value);
}

/* Ask cublasLt for at most DTRAIN_CUDA_GEMM_CANDIDATES algorithms; *found is 0 if there are none. A
 * product cut along k must add its parts in fp32, not in C's type. */
static cublasStatus_t dtrain_cuda_lt_ask(const dtrain_cuda_state *state,
                                         const dtrain_cuda_gemm_entry *entry,
                                         cublasLtMatmulPreference_t limits,
                                         cublasLtMatmulHeuristicResult_t *results, int *found)
{
    const uint64_t workspace = state->workspace_bytes;
    const uint32_t alignment[4] = {entry->key.b_alignment, entry->key.a_alignment,
                                   entry->key.c_alignment, entry->key.c_alignment};
    const cublasLtMatmulPreferenceAttributes_t names[4] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(
        limits, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    for (int i = 0; i < 4 && status == CUBLAS_STATUS_SUCCESS; i++)
        status = dtrain_cuda_lt_limit(limits, names[i], alignment[i]);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = dtrain_cuda_lt_limit(limits, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                      CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    *found = 0;
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    status = cublasLtMatmulAlgoGetHeuristic(state->lt, entry->operation, entry->b, entry->a,
                                            entry->c, entry->c, limits, DTRAIN_CUDA_GEMM_CANDIDATES,
                                            results, found);
    if (status == CUBLAS_STATUS_SUCCESS) return status;
    *found = 0;
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE
               ? CUBLAS_STATUS_SUCCESS
               : status;
}

static cublasStatus_t dtrain_cuda_lt_run(const dtrain_cuda_state *state,
                                         const dtrain_cuda_gemm_entry *entry,
                                         const dtrain_cuda_product *x, void *out,
                                         const cublasLtMatmulAlgo_t *algorithm)
{
    return cublasLtMatmul(state->lt, entry->operation, &x->alpha, x->b, entry->b, x->a, entry->a,
                          &x->beta, x->c, entry->c, out, entry->c, algorithm, state->workspace,
                          state->workspace_bytes, state->stream);
}

/* Measure the best time of a candidate that writes to `out`; infinity if it cannot run. */
static dtrain_result dtrain_cuda_lt_time(dtrain_device *device, const dtrain_cuda_gemm_entry *entry,
                                         const dtrain_cuda_product *x, void *out,
                                         const cublasLtMatmulAlgo_t *algorithm,
                                         const cudaEvent_t events[2], float *best)
{
    const dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    *best = INFINITY;
    for (int trial = 0; trial < DTRAIN_CUDA_GEMM_TRIALS; trial++) {
        float milliseconds = 0;
        DTRAIN_CUDA_TRY(
            dtrain_cuda_check(cudaEventRecord(events[0], state->stream), "timing a product"));
        if (dtrain_cuda_lt_run(state, entry, x, out, algorithm) != CUBLAS_STATUS_SUCCESS) {
            cudaGetLastError();
            *best = INFINITY;
            return DTRAIN_OK;
        }
        DTRAIN_CUDA_TRY(
            dtrain_cuda_check(cudaEventRecord(events[1], state->stream), "timing a product"));
        DTRAIN_CUDA_TRY(dtrain_cuda_poll(device, state->stream));
        DTRAIN_CUDA_TRY(dtrain_cuda_check(cudaEventElapsedTime(&milliseconds, events[0], events[1]),
                                          "timing a product"));
        if (milliseconds < *best) *best = milliseconds;
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain_cuda_lt_tune(dtrain_device *device, dtrain_cuda_gemm_entry *entry,
                                         const dtrain_cuda_product *product, void *out,
                                         const cublasLtMatmulHeuristicResult_t *results, int found)
{
    cudaEvent_t events[2] = {NULL, NULL};
    float best = INFINITY;
    dtrain_result result = DTRAIN_OK;
    entry->works = false;
    for (int i = 0; i < 2 && result == DTRAIN_OK; i++)
        result = dtrain_cuda_check(cudaEventCreate(&events[i]), "creating an event");
    for (int i = 0; i < found && result == DTRAIN_OK; i++) {
        float time = INFINITY;
        result = dtrain_cuda_lt_time(device, entry, product, out, &results[i].algo, events, &time);
        if (!(time < best)) continue;
        best = time;
        entry->algorithm = results[i].algo;
        entry->works = true;
    }
    for (int i = 0; i < 2; i++)
        if (events[i]) cudaEventDestroy(events[i]);
    return result;
}

/* Return memory for timing candidates. With beta == 0 every run leaves the result in C, so C is
 * returned. Otherwise C must not change: return new memory of its size, or NULL if C is too large
 * or no memory is left. */
static void *dtrain_cuda_lt_timing_memory(const dtrain_cuda_product *x)
{
    const uint64_t count = (uint64_t)x->m * (uint64_t)x->ldc;
    const size_t element = dtrain_dtype_bytes(x->c_type);
    void *out = NULL;
    if (x->beta == 0) return x->c;
    if (x->batch > 1 || count > DTRAIN_CUDA_GEMM_TIMING / element) return NULL;
    if (cudaMalloc(&out, (size_t)count * element) == cudaSuccess) return out;
    cudaGetLastError();
    return NULL;
}

/* List the algorithms that cublasLt proposes for an entry, best first. */
static dtrain_result dtrain_cuda_lt_propose(const dtrain_cuda_state *state,
                                            const dtrain_cuda_gemm_entry *entry,
                                            cublasLtMatmulHeuristicResult_t *results, int *good)
{
    cublasLtMatmulPreference_t limits = NULL;
    int found = 0;
    *good = 0;
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_check(cublasLtMatmulPreferenceCreate(&limits),
                                         "asking cublasLt for algorithms"));
    const cublasStatus_t status = dtrain_cuda_lt_ask(state, entry, limits, results, &found);
    cublasLtMatmulPreferenceDestroy(limits);
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_check(status, "asking cublasLt for algorithms"));
    for (int i = 0; i < found; i++)
        if (results[i].state == CUBLAS_STATUS_SUCCESS) results[(*good)++] = results[i];
    return DTRAIN_OK;
}

/* Choose the algorithm of a new entry. While a graph is captured nothing runs, so nothing is
 * timed. */
static dtrain_result dtrain_cuda_lt_choose(dtrain_device *device, dtrain_cuda_gemm_entry *entry,
                                           const dtrain_cuda_product *product)
{
    const dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    cublasLtMatmulHeuristicResult_t results[DTRAIN_CUDA_GEMM_CANDIDATES];
    dtrain_result result = DTRAIN_OK;
    void *out = NULL;
    int good = 0;
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_propose(state, entry, results, &good));
    entry->works = good > 0;
    if (good > 0) entry->algorithm = results[0].algo;
    if (good > 1 && state->tune && !dtrain_cuda_capturing(device))
        out = dtrain_cuda_lt_timing_memory(product);
    if (out) result = dtrain_cuda_lt_tune(device, entry, product, out, results, good);
    if (out && out != product->c && dtrain_cuda_may_free(device)) cudaFree(out);
    return result;
}

/* Return whether cublasLt refused an algorithm before anything ran: another one can work. */
static bool dtrain_cuda_lt_refuses(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
           status == CUBLAS_STATUS_ARCH_MISMATCH;
}

/* Run the first proposal that is not refused, and remember it, or that there is none. */
static dtrain_result dtrain_cuda_lt_next(dtrain_device *device, const dtrain_cuda_product *product,
                                         dtrain_cuda_gemm_entry *entry, cublasStatus_t *status)
{
    const dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    cublasLtMatmulHeuristicResult_t results[DTRAIN_CUDA_GEMM_CANDIDATES];
    int good = 0;
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_propose(state, entry, results, &good));
    for (int i = 0; i < good && dtrain_cuda_lt_refuses(*status); i++) {
        cudaGetLastError();
        entry->algorithm = results[i].algo;
        *status = dtrain_cuda_lt_run(state, entry, product, product->c, &entry->algorithm);
    }
    entry->works = !dtrain_cuda_lt_refuses(*status);
    return DTRAIN_OK;
}

/* Refuse dimensions that do not fit 32 bits, which cuBLAS uses inside. */
static dtrain_result dtrain_cuda_lt_fits(const dtrain_cuda_product *x)
{
    const int64_t sizes[7] = {x->m, x->n, x->k, x->lda, x->ldb, x->ldc, x->batch};
    for (int i = 0; i < 7; i++)
        if (sizes[i] < 1 || sizes[i] > INT32_MAX)
            return dtrain_fail(
                sizes[i] < 1 ? DTRAIN_ERROR_ARGUMENT : DTRAIN_ERROR_UNSUPPORTED,
                "gemm: %s is %lld, and cublasLt takes 1 to %d: cut the product into smaller ones",
                i == 0   ? "m"
                : i == 1 ? "n"
                : i == 2 ? "k"
                : i == 3 ? "lda"
                : i == 4 ? "ldb"
                : i == 5 ? "ldc"
                         : "the batch",
                (long long)sizes[i], INT32_MAX);
    return DTRAIN_OK;
}

/* Find or make the cache entry of a product; entry->works says whether cublasLt can make it. */
static dtrain_result dtrain_cuda_gemm_find(dtrain_device *device,
                                           const dtrain_cuda_product *product,
                                           dtrain_cuda_gemm_entry **out)
{
    dtrain_cuda_state *state = dtrain_cuda_state_of(device);
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_fits(product));
    if (!state->gemm_cache)
        state->gemm_cache = (dtrain_cuda_gemm_cache *)dtrain_cuda_host_take(
            &state->allocator, sizeof *state->gemm_cache);
    if (!state->gemm_cache)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for the GEMM algorithm cache");
    const dtrain_cuda_gemm_key key = dtrain_cuda_gemm_key_of(state, product);
    dtrain_cuda_gemm_entry *entry = *out = dtrain_cuda_gemm_slot(state->gemm_cache, &key);
    if (entry->used) return DTRAIN_OK;
    entry->key = key;
    dtrain_result result = dtrain_cuda_lt_describe(product, entry);
    if (result == DTRAIN_OK) result = dtrain_cuda_lt_choose(device, entry, product);
    if (result == DTRAIN_OK) entry->used = true;
    else dtrain_cuda_gemm_evict(entry);
    return result;
}

/* Run a product by cublasLt; entry->works is false afterwards if no algorithm takes it, and nothing
 * has run. */
static dtrain_result dtrain_cuda_gemm_run(dtrain_device *device, const dtrain_cuda_product *product,
                                          dtrain_cuda_gemm_entry *entry)
{
    if (!entry->works) return DTRAIN_OK;
    DTRAIN_CUDA_TRY(dtrain_cuda_lt_set_addresses(entry, product));
    cublasStatus_t status = dtrain_cuda_lt_run(dtrain_cuda_state_of(device), entry, product,
                                               product->c, &entry->algorithm);
    if (dtrain_cuda_lt_refuses(status))
        DTRAIN_CUDA_TRY(dtrain_cuda_lt_next(device, product, entry, &status));
    return entry->works ? dtrain_cuda_lt_check(status, "cublasLtMatmul") : DTRAIN_OK;
}

/* Count the kinds of products in the cache that slow kernels compute. */
static uint32_t dtrain_cuda_gemm_slow_count(const dtrain_cuda_state *state)
{
    uint32_t count = 0;
    for (int i = 0; state->gemm_cache && i < DTRAIN_CUDA_GEMM_SLOTS; i++)
        count += state->gemm_cache->entries[i].slow;
    return count;
}

/* ---- The last resort: C (m,n) = alpha op(A) (m,k) op(B) (k,n) + beta C --------------------------
 *
 * Slow and always possible: any types, ld and alignment, no epilogue, fp32 arithmetic. A block
 * makes a tile of C, a thread one element of it, in the order of k. */

static __global__ void __launch_bounds__(DTRAIN_CUDA_GEMM_TILE *DTRAIN_CUDA_GEMM_TILE)
    dtrain_cuda_own_product_kernel(const dtrain_cuda_product x)
{
    constexpr int side = DTRAIN_CUDA_GEMM_TILE;
    __shared__ float a[side][side + 1], b[side][side + 1];
    const bool trans_a = (x.flags & DTRAIN_GEMM_TRANS_A) != 0,
               trans_b = (x.flags & DTRAIN_GEMM_TRANS_B) != 0;
    const int row = threadIdx.x / side, column = threadIdx.x % side;
    const int64_t across = (x.n + side - 1) / side, tiles = (x.m + side - 1) / side * across;
    for (int64_t tile = blockIdx.x; tile < x.batch * tiles; tile += gridDim.x) {
        const int64_t one = tile / tiles; /* of the batch */
        const int64_t i = tile % tiles / across * side + row, j = tile % across * side + column;
        float sum = 0;
        for (int64_t k = 0; k < x.k; k += side) {
            const int64_t right = k + column, below = k + row; /* in A, in B */
            const int64_t a_at = trans_a ? right * x.lda + i : i * x.lda + right;
            const int64_t b_at = trans_b ? j * x.ldb + below : below * x.ldb + j;
            a[row][column] = i < x.m && right < x.k
                                 ? dtrain_cuda_get_any(x.a, x.type, one * x.a_step + a_at)
                                 : 0;
            b[row][column] = j < x.n && below < x.k
                                 ? dtrain_cuda_get_any(x.b, x.type, one * x.b_step + b_at)
                                 : 0;
            __syncthreads();
            for (int e = 0; e < side; e++) sum += a[row][e] * b[e][column];
            __syncthreads();
        }
        if (i >= x.m || j >= x.n) continue;
        const int64_t at = one * x.c_step + i * x.ldc + j;
        sum *= x.alpha;
        if (x.beta != 0) sum += x.beta * dtrain_cuda_get_any(x.c, x.c_type, at);
        dtrain_cuda_put_any(x.c, x.c_type, at, sum);
    }
}

static dtrain_result dtrain_cuda_own_product(dtrain_device *device, const dtrain_cuda_product *x,
                                             dtrain_cuda_gemm_entry *entry)
{
    const int64_t side = DTRAIN_CUDA_GEMM_TILE;
    const int64_t tiles = (x->m + side - 1) / side * ((x->n + side - 1) / side) * x->batch;
    entry->slow = true;
    return DTRAIN_CUDA_RUN(device, "gemm without cublasLt", dtrain_cuda_own_product_kernel,
                           tiles < INT32_MAX ? tiles : INT32_MAX, (int)(side * side), 0, *x);
}

/* Compute `batch` products of equal shape without an epilogue, one step apart in memory, for
 * attention. Uses no scratch. */
static dtrain_result dtrain_cuda_gemm_batched(dtrain_device *device,
                                              const dtrain_cuda_product *product)
{
    dtrain_cuda_gemm_entry *entry = NULL;
    DTRAIN_CUDA_TRY(dtrain_cuda_gemm_find(device, product, &entry));
    DTRAIN_CUDA_TRY(dtrain_cuda_gemm_run(device, product, entry));
    return entry->works ? DTRAIN_OK : dtrain_cuda_own_product(device, product, entry);
}
