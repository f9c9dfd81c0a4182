/* Matrix multiplication. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/gemm_internal.h"
#include "device/cpu/kernels_internal.h"
#include "device/device.h"

/* With an external library only products that the processor multiplies in bf16 stay here. */
static bool dtrain__is_built_in(dtrain__cpu *cpu, const dtrain_gemm_args *args)
{
#ifdef DTRAIN_USE_CBLAS
    dtrain__gemm_select(&cpu->gemm);
    return cpu->gemm.pairs && args->a_dtype == DTRAIN_DTYPE_BF16 &&
           args->b_dtype == DTRAIN_DTYPE_BF16;
#else
    (void)cpu;
    (void)args;
    return true;
#endif
}

static dtrain_result dtrain__built_in_product(dtrain__cpu *cpu, const dtrain_gemm_args *args)
{
    if (dtrain__gemm(cpu->pool, &cpu->gemm, args) != 0)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for the packing buffers of a GEMM");
    return DTRAIN_OK;
}

#ifdef DTRAIN_USE_CBLAS

/* A copy of a (rows, columns) matrix as fp32, or back; both with leading dimension ld. */
static void dtrain__cpu_convert_matrix(dtrain__cpu *cpu, const void *x, dtrain_dtype x_dtype,
                                       void *y, dtrain_dtype y_dtype, int64_t rows, int64_t columns,
                                       int64_t ld)
{
    for (int64_t row = 0; row < rows; row++) {
        dtrain_convert_args args;
        args.count = columns;
        args.x = (const char *)x + (size_t)(row * ld) * dtrain_dtype_bytes(x_dtype);
        args.y = (char *)y + (size_t)(row * ld) * dtrain_dtype_bytes(y_dtype);
        args.x_dtype = x_dtype;
        args.y_dtype = y_dtype;
        dtrain__job job = dtrain__job_make(&args, columns, DTRAIN__LINE);
        dtrain__job_run(cpu, &job, cpu->kernels->convert, columns);
    }
}

/* The library multiplies fp32; operands in half precision are converted through the scratch; bias,
 * aux and activation follow in a second pass over C. */
static dtrain_result dtrain__cpu_product(dtrain_device *device, const dtrain_gemm_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const bool trans_a = (args->flags & DTRAIN_GEMM_TRANS_A) != 0;
    const bool trans_b = (args->flags & DTRAIN_GEMM_TRANS_B) != 0;
    const int64_t a_rows = trans_a ? args->k : args->m, b_rows = trans_b ? args->n : args->k;
    const int64_t a_size = args->a_dtype == DTRAIN_DTYPE_F32 ? 0 : a_rows * args->lda;
    const int64_t b_size = args->b_dtype == DTRAIN_DTYPE_F32 ? 0 : b_rows * args->ldb;
    const int64_t c_size = args->c_dtype == DTRAIN_DTYPE_F32 ? 0 : args->m * args->ldc;
    dtrain_gemm_args plain = *args;
    if (args->m <= 0 || args->n <= 0) return DTRAIN_OK;
    if (dtrain__is_built_in(cpu, args)) return dtrain__built_in_product(cpu, args);
    if (args->m > INT_MAX || args->n > INT_MAX || args->k > INT_MAX || args->lda > INT_MAX ||
        args->ldb > INT_MAX || args->ldc > INT_MAX)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "cblas takes dimensions up to %d", INT_MAX);
    dtrain__job job = dtrain__job_make(&plain, args->m, 1);
    const dtrain_result result = dtrain__cpu_scratch(cpu, &job, a_size + b_size + c_size);
    if (result != DTRAIN_OK) return result;
    if (a_size) {
        plain.a = job.scratch;
        dtrain__cpu_convert_matrix(cpu, args->a, args->a_dtype, job.scratch, DTRAIN_DTYPE_F32,
                                   a_rows, trans_a ? args->m : args->k, args->lda);
    }
    if (b_size) {
        plain.b = job.scratch + a_size;
        dtrain__cpu_convert_matrix(cpu, args->b, args->b_dtype, job.scratch + a_size,
                                   DTRAIN_DTYPE_F32, b_rows, trans_b ? args->k : args->n,
                                   args->ldb);
    }
    if (c_size) {
        plain.c = job.scratch + a_size + b_size;
        if (args->beta != 0)
            dtrain__cpu_convert_matrix(cpu, args->c, args->c_dtype, plain.c, DTRAIN_DTYPE_F32,
                                       args->m, args->n, args->ldc);
    }
    cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans,
                trans_b ? CblasTrans : CblasNoTrans, (int)args->m, (int)args->n, (int)args->k,
                args->alpha, (const float *)plain.a, (int)args->lda, (const float *)plain.b,
                (int)args->ldb, args->beta, (float *)plain.c, (int)args->ldc);
    if (args->bias || args->aux || args->activation != DTRAIN_ACTIVATION_NONE)
        dtrain__job_run(cpu, &job, cpu->kernels->activate, args->m * args->n);
    if (c_size)
        dtrain__cpu_convert_matrix(cpu, plain.c, DTRAIN_DTYPE_F32, args->c, args->c_dtype, args->m,
                                   args->n, args->ldc);
    return DTRAIN_OK;
}

#else

static dtrain_result dtrain__cpu_product(dtrain_device *device, const dtrain_gemm_args *args)
{
    return dtrain__built_in_product((dtrain__cpu *)device->state, args);
}

#endif

/* ---- Half precision
 *
 * Kernels compute in fp32 on fp32. Operands in BF16 or F16 are widened into buffers of the device
 * first, and results are rounded back once at the end: exact, and the price is two more passes.
 *
 *     dtrain__wide_list w = dtrain__wide_begin(device);
 *     args.x = dtrain__wide(&w, args.x, args.dtype, count, DTRAIN__READ);
 *     ... run on args ...
 *     return dtrain__wide_end(&w, result);
 *
 * A buffer that appears twice, as input and output in place, is one buffer here too. GEMM and the
 * activation's backward pass, the largest of all, read and write half precision themselves. */

DTRAIN__PRIVATE dtrain__wide_list dtrain__wide_begin(dtrain_device *device)
{
    dtrain__wide_list list;
    memset(&list, 0, sizeof list);
    list.cpu = (dtrain__cpu *)device->state;
    return list;
}

DTRAIN__PRIVATE bool dtrain__is_f32(dtrain_dtype dtype)
{
    return dtype == DTRAIN_DTYPE_F32 || dtype == DTRAIN_DTYPE_NONE;
}

static dtrain_result dtrain__check_dtype(dtrain_dtype dtype)
{
    if (dtrain__is_f32(dtype) || dtype == DTRAIN_DTYPE_BF16 || dtype == DTRAIN_DTYPE_F16)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "activations of type %s: expected f32, bf16 or f16",
                       dtrain_dtype_name(dtype));
}

DTRAIN__PRIVATE void dtrain__cpu_convert_run(dtrain__cpu *cpu, const void *x, dtrain_dtype x_dtype,
                                             void *y, dtrain_dtype y_dtype, int64_t count)
{
    dtrain_convert_args args = {count, x, y, x_dtype, y_dtype};
    dtrain__job job = dtrain__job_make(&args, count, DTRAIN__LINE);
    dtrain__job_run(cpu, &job, cpu->kernels->convert, count);
}

static bool dtrain__wide_grow(dtrain__wide_list *list, int slot, size_t bytes)
{
    dtrain__cpu *cpu = list->cpu;
    if (bytes <= cpu->wide_bytes[slot]) return true;
    dtrain__aligned_free(&cpu->allocator, cpu->wide[slot], cpu->wide_bytes[slot]);
    cpu->wide_bytes[slot] = 0;
    cpu->wide[slot] = (float *)dtrain__aligned_alloc(&cpu->allocator, bytes);
    if (cpu->wide[slot]) cpu->wide_bytes[slot] = bytes;
    else
        list->result = dtrain_fail(DTRAIN_ERROR_MEMORY,
                                   "no memory for %zu bytes to widen half precision", bytes);
    return cpu->wide[slot] != NULL;
}

/* x (count) as fp32; x itself when it is. NULL stays NULL, and is also the answer to an error. */
DTRAIN__PRIVATE float *dtrain__wide(dtrain__wide_list *list, const void *x, dtrain_dtype dtype,
                                    int64_t count, int access)
{
    if (!x || dtrain__is_f32(dtype) || list->result != DTRAIN_OK) return (float *)(uintptr_t)x;
    list->result = dtrain__check_dtype(dtype);
    if (list->result != DTRAIN_OK) return NULL;
    for (int i = 0; i < list->count; i++)
        if (list->items[i].narrow == x && list->items[i].count == count) {
            list->items[i].access |= access;
            return list->items[i].wide;
        }
    if (!dtrain__wide_grow(list, list->count, (size_t)count * sizeof(float))) return NULL;
    dtrain__wide_item *item = &list->items[list->count];
    item->narrow = (void *)(uintptr_t)x;
    item->wide = list->cpu->wide[list->count++];
    item->count = count;
    item->dtype = dtype;
    item->access = access;
    if (access & DTRAIN__READ)
        dtrain__cpu_convert_run(list->cpu, x, dtype, item->wide, DTRAIN_DTYPE_F32, count);
    return item->wide;
}

DTRAIN__PRIVATE dtrain_result dtrain__wide_end(dtrain__wide_list *list, dtrain_result result)
{
    if (list->result != DTRAIN_OK || result != DTRAIN_OK)
        return list->result != DTRAIN_OK ? list->result : result;
    for (int i = 0; i < list->count; i++) {
        const dtrain__wide_item *item = &list->items[i];
        if (item->access & DTRAIN__WRITE)
            dtrain__cpu_convert_run(list->cpu, item->wide, DTRAIN_DTYPE_F32, item->narrow,
                                    item->dtype, item->count);
    }
    return DTRAIN_OK;
}

/* Runs an elementwise kernel on arguments that have been widened. */
DTRAIN__PRIVATE dtrain_result dtrain__wide_elementwise(dtrain__wide_list *list, const void *args,
                                                       int64_t count, dtrain__range_fn range)
{
    if (list->result != DTRAIN_OK) return list->result;
    dtrain__job job = dtrain__job_make(args, count, DTRAIN__LINE);
    return dtrain__wide_end(list, dtrain__job_run(list->cpu, &job, range, count));
}

/* ---- Activation, backward ---------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result
dtrain__cpu_activation_backward(dtrain_device *device, const dtrain_activation_backward_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain_activation_backward_args all = *args;
    DTRAIN__TRY(dtrain__check_dtype(args->dtype));
    if (!args->d_bias) { /* no column sums: one long row */
        all.n = args->rows * args->n;
        all.rows = 1;
    }
    dtrain__job job = dtrain__job_make(&all, all.n, DTRAIN__LINE);
    return dtrain__job_run(cpu, &job, cpu->kernels->activation_backward, args->rows * args->n);
}

/* ---- Matrix multiplication: bias gradients and backward epilogues -----------------------------*/

static void dtrain__row_sums(const dtrain_gemm_args *args, const float *a)
{
    for (int64_t i = 0; i < args->m; i++) {
        float sum = args->accumulate_bias_grad ? args->bias_grad[i] : 0;
        for (int64_t k = 0; k < args->k; k++) sum += a[i * args->lda + k];
        args->bias_grad[i] = sum;
    }
}

static dtrain_result dtrain__check_gemm(const dtrain_gemm_args *args)
{
    const bool backward = (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    const bool of_c = args->bias_grad && (args->flags & DTRAIN_GEMM_BIAS_GRAD_C);
    if (backward && (!args->aux || args->bias))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "gemm: DTRAIN_GEMM_ACT_BACKWARD needs aux and takes no bias");
    if ((backward || of_c) && args->ldc != args->n)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "gemm: ldc is %lld; a backward epilogue needs ldc == n (%lld)",
                           (long long)args->ldc, (long long)args->n);
    if (args->bias_grad && !of_c && (args->flags & DTRAIN_GEMM_TRANS_A) && args->lda != args->m)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "gemm: lda is %lld; a bias gradient needs lda == m (%lld)",
                           (long long)args->lda, (long long)args->m);
    return DTRAIN_OK;
}

/* A second pass over C: slopes (z, or NULL: none) and column sums. */
static dtrain_result dtrain__gemm_after(dtrain_device *device, const dtrain_gemm_args *args,
                                        uint32_t activation, const void *z, float *bias_grad)
{
    const dtrain_activation_backward_args after = {z ? activation
                                                     : (uint32_t)DTRAIN_ACTIVATION_NONE,
                                                   args->accumulate_bias_grad,
                                                   args->m,
                                                   args->n,
                                                   z,
                                                   args->c,
                                                   args->c,
                                                   bias_grad,
                                                   args->c_dtype};
    return dtrain__cpu_activation_backward(device, &after);
}

/* bias_grad (m) = row sums of op(A): column sums of what is stored, where it is transposed. */
static dtrain_result dtrain__gemm_bias_grad(dtrain_device *device, dtrain__wide_list *list,
                                            const dtrain_gemm_args *args)
{
    if (args->flags & DTRAIN_GEMM_TRANS_A) {
        const dtrain_activation_backward_args sums = {DTRAIN_ACTIVATION_NONE,
                                                      args->accumulate_bias_grad,
                                                      args->k,
                                                      args->m,
                                                      NULL,
                                                      args->a,
                                                      (void *)(uintptr_t)args->a,
                                                      args->bias_grad,
                                                      args->a_dtype};
        return dtrain__cpu_activation_backward(device, &sums);
    }
    const float *a = dtrain__wide(list, args->a, args->a_dtype, args->m * args->lda, DTRAIN__READ);
    if (list->result == DTRAIN_OK) dtrain__row_sums(args, a);
    return list->result;
}

/* The product by dtrain__cpu_product; what needs a second pass over C or A follows. The built-in
 * GEMM finishes the tiles of a C in half precision by itself, slopes included; others compute such
 * a C, and aux, in fp32. */
DTRAIN__PRIVATE dtrain_result dtrain__cpu_gemm(dtrain_device *device, const dtrain_gemm_args *args)
{
    const bool backward = (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    const bool of_c = args->bias_grad && (args->flags & DTRAIN_GEMM_BIAS_GRAD_C);
    const bool half = !dtrain__is_f32(args->c_dtype);
    const bool finished = half && dtrain__is_built_in((dtrain__cpu *)device->state, args);
    if (!backward && !args->bias_grad && (!args->aux || !half || finished))
        return dtrain__cpu_product(device, args);
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_gemm_args plain = *args;
    DTRAIN__TRY(dtrain__check_gemm(args));
    if (!finished) {
        const int c_access = DTRAIN__WRITE | (args->beta != 0 ? DTRAIN__READ : 0);
        plain.c = dtrain__wide(&w, args->c, args->c_dtype, args->m * args->ldc, c_access);
        plain.aux = dtrain__wide(&w, args->aux, args->c_dtype, args->m * args->ldc,
                                 backward ? DTRAIN__READ : DTRAIN__WRITE);
        plain.c_dtype = DTRAIN_DTYPE_F32;
    }
    const void *z = backward && !finished ? plain.aux : NULL;
    if (z) {
        plain.flags &= ~DTRAIN_GEMM_ACT_BACKWARD;
        plain.activation = DTRAIN_ACTIVATION_NONE;
        plain.aux = NULL;
    }
    if (w.result == DTRAIN_OK) w.result = dtrain__cpu_product(device, &plain);
    if ((z || of_c) && w.result == DTRAIN_OK)
        w.result =
            dtrain__gemm_after(device, &plain, args->activation, z, of_c ? args->bias_grad : NULL);
    if (args->bias_grad && !of_c && w.result == DTRAIN_OK)
        w.result = dtrain__gemm_bias_grad(device, &w, args);
    return dtrain__wide_end(&w, w.result);
}
