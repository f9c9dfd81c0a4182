/* Launchers of matrix products, their epilogues and Muon. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/gemm_internal.h"
#include "device/cpu/kernels_internal.h"
#include "device/device.h"

DTRAIN__PRIVATE dtrain_result
dtrain__cpu_activation_backward(dtrain_device *device, const dtrain_activation_backward_args *args)
{
    dtrain_activation_backward_args all = *args;
    if (!args->d_bias) { /* no column sums: one long row */
        all.n = args->rows * args->n;
        all.rows = 1;
    }
    return dtrain__run_kernel(device, dtrain__cpu_kernels(device)->activation_backward, &all, all.n,
                              DTRAIN__LINE, 0, args->rows * args->n, args->dtype);
}

/* Set sums (n) to the column sums of x (rows, n), or add the column sums. */
DTRAIN__PRIVATE dtrain_result dtrain__column_sums(dtrain_device *device, int64_t rows, int64_t n,
                                                  const void *x, dtrain_dtype dtype,
                                                  bool accumulate, float *sums)
{
    dtrain_activation_backward_args args;
    memset(&args, 0, sizeof args);
    args.accumulate = accumulate;
    args.rows = rows;
    args.n = n;
    args.d_out = x;
    args.d_in = (void *)(uintptr_t)x; /* equal to d_out: only d_bias is made */
    args.d_bias = sums;
    args.dtype = dtype;
    return dtrain__cpu_activation_backward(device, &args);
}

/* Multiply. A linked BLAS library computes products of fp32; bias, aux and activation follow in a
 * second pass over C. */
static dtrain_result dtrain__cpu_product(dtrain_device *device, const dtrain_gemm_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
#ifdef DTRAIN_USE_CBLAS
    if (args->a_dtype == DTRAIN_DTYPE_F32 && args->b_dtype == DTRAIN_DTYPE_F32 &&
        args->c_dtype == DTRAIN_DTYPE_F32 && args->m > 0 && args->n > 0) {
        if (args->m > INT_MAX || args->n > INT_MAX || args->k > INT_MAX || args->lda > INT_MAX ||
            args->ldb > INT_MAX || args->ldc > INT_MAX)
            return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "cblas takes dimensions up to %d",
                               INT_MAX);
        cblas_sgemm(CblasRowMajor, args->flags & DTRAIN_GEMM_TRANS_A ? CblasTrans : CblasNoTrans,
                    args->flags & DTRAIN_GEMM_TRANS_B ? CblasTrans : CblasNoTrans, (int)args->m,
                    (int)args->n, (int)args->k, args->alpha, (const float *)args->a, (int)args->lda,
                    (const float *)args->b, (int)args->ldb, args->beta, (float *)args->c,
                    (int)args->ldc);
        if (!args->bias && !args->aux && args->activation == DTRAIN_ACTIVATION_NONE)
            return DTRAIN_OK;
        dtrain__job job = dtrain__job_make(args, args->m, 1, DTRAIN_DTYPE_F32);
        return dtrain__job_run(cpu, &job, cpu->kernels->activate, args->m * args->n);
    }
#endif
    return dtrain__gemm(cpu, args);
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

/* Multiply, then make the second passes over C or A. A C in half precision is multiplied by its
 * slopes in the tiles, before rounding; a C in fp32 in the second pass, which also takes the column
 * sums. */
DTRAIN__PRIVATE dtrain_result dtrain__cpu_gemm(dtrain_device *device, const dtrain_gemm_args *args)
{
    const bool backward = (args->flags & DTRAIN_GEMM_ACT_BACKWARD) != 0;
    const bool of_c = args->bias_grad && (args->flags & DTRAIN_GEMM_BIAS_GRAD_C);
    const void *z = backward && args->c_dtype <= DTRAIN_DTYPE_F32 ? args->aux : NULL;
    dtrain_gemm_args plain = *args;
    if (!backward && !args->bias_grad) return dtrain__cpu_product(device, args);
    DTRAIN__TRY(dtrain__check_gemm(args));
    if (z) {
        plain.flags &= ~DTRAIN_GEMM_ACT_BACKWARD;
        plain.activation = DTRAIN_ACTIVATION_NONE;
        plain.aux = NULL;
    }
    DTRAIN__TRY(dtrain__cpu_product(device, &plain));
    if (z || of_c) {
        dtrain_activation_backward_args after;
        memset(&after, 0, sizeof after);
        after.activation = z ? args->activation : (uint32_t)DTRAIN_ACTIVATION_NONE;
        after.accumulate = args->accumulate_bias_grad;
        after.rows = args->m;
        after.n = args->n;
        after.x = z;
        after.d_out = after.d_in = args->c;
        after.d_bias = of_c ? args->bias_grad : NULL;
        after.dtype = args->c_dtype;
        DTRAIN__TRY(dtrain__cpu_activation_backward(device, &after));
    }
    if (!args->bias_grad || of_c) return DTRAIN_OK;
    /* row sums of op(A): column sums of a transposed A */
    if (args->flags & DTRAIN_GEMM_TRANS_A)
        return dtrain__column_sums(device, args->k, args->m, args->a, args->a_dtype,
                                   args->accumulate_bias_grad, args->bias_grad);
    for (int64_t i = 0; i < args->m; i++) {
        float sum = args->accumulate_bias_grad ? args->bias_grad[i] : 0;
        for (int64_t at = i * args->lda; at < i * args->lda + args->k; at++)
            sum += dtrain__element(args->a, args->a_dtype, at);
        args->bias_grad[i] = sum;
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_bias(dtrain_device *device, const dtrain_bias_args *args)
{
    return dtrain__run_kernel(device, dtrain__cpu_kernels(device)->activate, args, args->m, 1, 0,
                              args->m * args->n, args->c_dtype);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_muon(dtrain_device *device, const dtrain_muon_args *args)
{
    dtrain__update update;
    memset(&update, 0, sizeof update);
    update.args = args;
    update.tensor = args->tensors;
    update.now.lr = args->lr;
    update.now.grad_scale = args->grad_scale;
    if (args->scalars) {
        update.now = *args->scalars;
        update.now.lr *= args->lr_scale;
    }
    if (args->stage == DTRAIN_MUON_NORMALIZE)
        update.inverse = (float)(1 / (sqrt(args->sum_squares[0]) + (double)args->epsilon));
    if (update.now.skip) return DTRAIN_OK;
    return dtrain__elementwise(device, dtrain__cpu_kernels(device)->muon, &update,
                               args->tensors->count, DTRAIN_DTYPE_F32);
}
