/* Launchers of the kernels in every program: element-wise operations, sums, optimizers */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/kernels_internal.h"

/* Run a kernel on [0, total), cut at multiples of `unit`, with `slot` floats of scratch for each
 * thread. */
DTRAIN__PRIVATE dtrain_result dtrain__run_kernel(dtrain_device *device, dtrain__range_fn range,
                                                 const void *args, int64_t total, int64_t unit,
                                                 int64_t slot, int64_t elements, dtrain_dtype dtype)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain__job job = dtrain__job_make(args, total, unit, dtype);
    job.slot = dtrain__multiple(slot, DTRAIN__LINE);
    if (slot) DTRAIN__TRY(dtrain__cpu_scratch(cpu, job.slot * cpu->thread_count, &job.scratch));
    return dtrain__job_run(cpu, &job, range, elements);
}

/* Run a kernel on single elements, cut so that no cache line and no vector of random numbers is
 * split. */
DTRAIN__PRIVATE dtrain_result dtrain__elementwise(dtrain_device *device, dtrain__range_fn range,
                                                  const void *args, int64_t count,
                                                  dtrain_dtype dtype)
{
    return dtrain__run_kernel(device, range, args, count, 2 * DTRAIN__LINE, 0, count, dtype);
}

DTRAIN__PRIVATE const dtrain__kernels *dtrain__cpu_kernels(const dtrain_device *device)
{
    return ((const dtrain__cpu *)device->state)->kernels;
}

DTRAIN__PRIVATE dtrain_dtype dtrain__larger(dtrain_dtype a, dtrain_dtype b)
{
    return a > b ? a : b;
}

/* ---- fp64: plain loops ------------------------------------------------------------------------*/

static void dtrain__add_f64(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain_add_args *a = (const dtrain_add_args *)job->args;
    const double *x = (const double *)a->x, *y = (const double *)a->y;
    (void)index;
    for (int64_t i = begin; i < end; i++) ((double *)a->out)[i] = x[i] + y[i];
}

static void dtrain__axpby_f64(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain_axpby_args *a = (const dtrain_axpby_args *)job->args;
    const double *x = (const double *)a->x;
    double *y = (double *)a->y;
    (void)index;
    for (int64_t i = begin; i < end; i++)
        y[i] = a->a * (!x ? 1 : x[a->broadcast ? 0 : i]) + (a->accumulate ? a->b * y[i] : 0);
}

static void dtrain__sum_f64(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain_sum_args *a = (const dtrain_sum_args *)job->args;
    const double *x = (const double *)a->x;
    (void)index;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        const int64_t first = chunk * job->chunk;
        job->sums[chunk] = 0;
        for (int64_t i = first; i < first + job->chunk && i < a->count; i++)
            job->sums[chunk] += a->squares ? x[i] * x[i] : x[i];
    }
}

static void dtrain__adamw_f64(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain__update *update = (const dtrain__update *)job->args;
    const dtrain_optimizer_tensor *t = update->tensor;
    const double *grad = (const double *)(const void *)t->grad;
    double *value = (double *)(void *)t->value, *m = (double *)(void *)t->m;
    double *v = (double *)(void *)t->v;
    const double beta1 = (double)update->args->beta1, beta2 = (double)update->args->beta2;
    const double lr = (double)update->now.lr, decay = 1 - lr * (double)t->weight_decay;
    const double step = lr / (double)update->now.correction1;
    (void)index;
    for (int64_t i = begin; i < end; i++) {
        const double g = grad[i] * (double)update->now.grad_scale;
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        const double root = sqrt(v[i] / (double)update->now.correction2);
        value[i] = value[i] * decay - step * m[i] / (root + (double)update->args->epsilon);
    }
}

static void dtrain__sgd_f64(dtrain__job *job, int64_t begin, int64_t end, int index)
{
    const dtrain__update *update = (const dtrain__update *)job->args;
    const dtrain_optimizer_args *a = update->args;
    const dtrain_optimizer_tensor *t = update->tensor;
    const double *grad = (const double *)(const void *)t->grad;
    double *value = (double *)(void *)t->value, *buffer = (double *)(void *)t->m;
    const double momentum = (double)a->momentum;
    (void)index;
    for (int64_t i = begin; i < end; i++) {
        double g = grad[i] * (double)update->now.grad_scale + (double)t->weight_decay * value[i];
        if (buffer) {
            buffer[i] = a->first ? g : momentum * buffer[i] + g;
            g = a->nesterov ? g + momentum * buffer[i] : buffer[i];
        }
        value[i] -= (double)update->now.lr * g;
    }
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_add(dtrain_device *device, const dtrain_add_args *args)
{
    const bool wide = args->x_dtype == DTRAIN_DTYPE_F64;
    return dtrain__elementwise(
        device, wide ? dtrain__add_f64 : dtrain__cpu_kernels(device)->add, args, args->count,
        wide ? DTRAIN_DTYPE_F32 : dtrain__larger(args->x_dtype, args->y_dtype));
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_axpby(dtrain_device *device,
                                                const dtrain_axpby_args *args)
{
    const bool wide = args->dtype == DTRAIN_DTYPE_F64;
    dtrain_axpby_args now = *args;
    if (args->divisor) { /* a quotient in double rounds to that in fp32 */
        if (args->divisor[0] == 0 || (double)args->divisor[0] == args->a) return DTRAIN_OK;
        now.a = args->a / (double)args->divisor[0];
        now.x = args->y;
    }
    return dtrain__elementwise(device,
                               wide ? dtrain__axpby_f64 : dtrain__cpu_kernels(device)->axpby, &now,
                               args->count, wide ? DTRAIN_DTYPE_F32 : args->dtype);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_sum(dtrain_device *device, const dtrain_sum_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const int64_t share = (args->count + DTRAIN__SUM_CHUNKS - 1) / DTRAIN__SUM_CHUNKS;
    const int64_t chunk = share > 4096 ? dtrain__multiple(share, 4096) : 4096;
    const bool wide = args->dtype == DTRAIN_DTYPE_F64;
    dtrain__job job = dtrain__job_make(args, (args->count + chunk - 1) / chunk, 1,
                                       wide ? DTRAIN_DTYPE_F32 : args->dtype);
    double sum = 0;
    job.chunk = chunk;
    job.sums = cpu->sums;
    DTRAIN__TRY(
        dtrain__job_run(cpu, &job, wide ? dtrain__sum_f64 : cpu->kernels->sum, args->count));
    for (int64_t i = 0; i < job.total; i++) sum += cpu->sums[i];
    sum *= args->scale;
    if (args->factor) sum *= (double)args->factor[0];
    if (args->accumulate) sum += args->total[0];
    if (args->total) args->total[0] = sum;
    if (args->out) args->out[0] = (float)sum;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_clip(dtrain_device *device, const dtrain_clip_args *args)
{
    double sum = args->sum_squares[0];
    for (int i = 1; i < args->sum_count; i++) sum += args->sum_squares[i];
    const float norm = (float)(sqrt(sum) * (double)args->scalars->grad_scale);
    const float factor = args->max_norm / (norm + 1e-6f); /* as dtrain_grad_norm rounds it */
    (void)device;
    args->norm[0] = norm;
    if (!dtrain__is_finite(norm) || (args->weight && args->weight[0] == 0)) args->scalars->skip = 1;
    else if (args->max_norm > 0 && factor < 1) args->scalars->grad_scale *= factor;
    return DTRAIN_OK;
}

DTRAIN__LAUNCH(convert, DTRAIN_OK, args->count, 2 * DTRAIN__LINE, 0, args->count,
               dtrain__larger(args->x_dtype, args->y_dtype))

/* ---- Optimizers -------------------------------------------------------------------------------*/

static dtrain_result dtrain__cpu_optimizer(dtrain_device *device, const dtrain_optimizer_args *args,
                                           dtrain__range_fn range)
{
    dtrain__update update;
    memset(&update, 0, sizeof update);
    update.args = args;
    update.now.lr = args->lr;
    update.now.correction1 = args->correction1;
    update.now.correction2 = args->correction2;
    update.now.grad_scale = args->grad_scale;
    if (args->scalars) {
        update.now = *args->scalars;
        update.now.lr *= args->lr_scale;
    }
    for (size_t i = 0; i < args->tensor_count && !update.now.skip; i++) {
        update.tensor = &args->tensors[i];
        DTRAIN__TRY(
            dtrain__elementwise(device, range, &update, args->tensors[i].count, DTRAIN_DTYPE_F32));
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_adamw(dtrain_device *device,
                                                const dtrain_adamw_args *args)
{
    return dtrain__cpu_optimizer(
        device, args, args->wide ? dtrain__adamw_f64 : dtrain__cpu_kernels(device)->adamw);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_sgd(dtrain_device *device, const dtrain_sgd_args *args)
{
    return dtrain__cpu_optimizer(device, args,
                                 args->wide ? dtrain__sgd_f64 : dtrain__cpu_kernels(device)->sgd);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_lion(dtrain_device *device, const dtrain_lion_args *args)
{
    return dtrain__cpu_optimizer(device, args, dtrain__cpu_kernels(device)->lion);
}
