/* Launchers of kernels. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/kernels_internal.h"

DTRAIN__PRIVATE dtrain_result dtrain__check_dtype(dtrain_dtype dtype)
{
    if (dtype >= DTRAIN_DTYPE_NONE && dtype <= DTRAIN_DTYPE_F16) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                       "activations of type %s: expected f32, bf16 or f16",
                       dtrain_dtype_name(dtype));
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_layernorm(dtrain_device *device,
                                                    const dtrain_layernorm_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain__job job = dtrain__job_make(args, args->rows, 1);
    if (!args->residual != !args->sum)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "layernorm: residual and sum are given together or not at all");
    DTRAIN__TRY(dtrain__check_dtype(args->x_dtype));
    DTRAIN__TRY(dtrain__check_dtype(args->y_dtype));
    job.slot = dtrain__multiple(args->n, DTRAIN__LINE); /* a row */
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, &job, job.slot * cpu->thread_count));
    return dtrain__job_run(cpu, &job, cpu->kernels->layernorm, args->rows * args->n);
}

/* Chunks of 32 rows or, beyond 2048 rows, 64 chunks: what adding up costs stays small. */
DTRAIN__PRIVATE dtrain_result
dtrain__cpu_layernorm_backward(dtrain_device *device, const dtrain_layernorm_backward_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const int64_t chunk = args->rows > 2048 ? (args->rows + 63) / 64 : 32;
    const int64_t chunk_count = (args->rows + chunk - 1) / chunk;
    dtrain__job job = dtrain__job_make(args, chunk_count, 1);
    if (args->d_residual && !args->d_x)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "layernorm backward: d_residual needs d_x");
    DTRAIN__TRY(dtrain__check_dtype(args->x_dtype));
    DTRAIN__TRY(dtrain__check_dtype(args->y_dtype));
    job.chunk = chunk;
    job.chunk_count = chunk_count;
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, &job, chunk_count * 2 * args->n));
    dtrain__job_run(cpu, &job, cpu->kernels->layernorm_backward, args->rows * args->n);
    job.total = args->n;
    job.unit = DTRAIN__LINE;
    return dtrain__job_run(cpu, &job, cpu->kernels->layernorm_params, chunk_count * 2 * args->n);
}

static dtrain_result dtrain__check_tokens(const int32_t *tokens, int64_t rows, int64_t vocab)
{
    for (int64_t row = 0; row < rows; row++)
        if (tokens[row] < 0 || tokens[row] >= vocab)
            return dtrain_fail(DTRAIN_ERROR_DATA, "token %ld at row %lld is outside [0, %lld)",
                               (long)tokens[row], (long long)row, (long long)vocab);
    return DTRAIN_OK;
}

static dtrain_result dtrain__check_targets(const int32_t *targets, int64_t rows, int64_t n)
{
    for (int64_t row = 0; row < rows; row++)
        if (targets[row] < -1 || targets[row] >= n)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "target %ld at row %lld is outside [0, %lld) and not -1 (ignored)",
                               (long)targets[row], (long long)row, (long long)n);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_embedding(dtrain_device *device,
                                                    const dtrain_embedding_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain__job job = dtrain__job_make(args, args->rows, 1);
    DTRAIN__TRY(dtrain__check_tokens(args->tokens, args->rows, args->vocab));
    DTRAIN__TRY(dtrain__check_dtype(args->dtype));
    return dtrain__job_run(cpu, &job, cpu->kernels->embedding, args->rows * args->n);
}

DTRAIN__PRIVATE dtrain_result
dtrain__cpu_embedding_backward(dtrain_device *device, const dtrain_embedding_backward_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain__job job = dtrain__job_make(args, args->n, DTRAIN__LINE);
    DTRAIN__TRY(dtrain__check_tokens(args->tokens, args->rows, args->vocab));
    DTRAIN__TRY(dtrain__check_dtype(args->dtype));
    return dtrain__job_run(cpu, &job, cpu->kernels->embedding_backward, args->rows * args->n);
}

/* Floats of dtrain__head's buffers, with the head dimension rounded up for the widest vectors. */
static int64_t dtrain__attention_slot(int64_t n, int64_t heads, int64_t sequence, bool backward)
{
    const int64_t block = DTRAIN__ATTENTION_BLOCK, width = dtrain__multiple(n / heads, 32);
    int64_t floats = 4 * block * width + block * block + 3 * block;
    if (backward) {
        floats += 3 * block * width + block * block + 2 * block;
        floats += 2 * dtrain__multiple(sequence, block) * width;
    }
    return dtrain__multiple(floats, DTRAIN__LINE);
}

static dtrain_result dtrain__check_heads(int64_t n, int64_t heads)
{
    if (heads > 0 && n > 0 && n % heads == 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "attention: %lld columns cannot be cut into %lld heads", (long long)n,
                       (long long)heads);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_attention(dtrain_device *device,
                                                    const dtrain_attention_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const int64_t blocks = (args->sequence + DTRAIN__ATTENTION_BLOCK - 1) / DTRAIN__ATTENTION_BLOCK;
    const int64_t count = args->batch * args->sequence * args->n;
    dtrain__job job = dtrain__job_make(args, args->batch * args->heads * blocks, 1);
    DTRAIN__TRY(dtrain__check_heads(args->n, args->heads));
    DTRAIN__TRY(dtrain__check_dtype(args->dtype));
    job.dynamic = true;
    job.slot = dtrain__attention_slot(args->n, args->heads, args->sequence, false);
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, &job, job.slot * cpu->thread_count));
    return dtrain__job_run(cpu, &job, cpu->kernels->attention, 8 * count);
}

DTRAIN__PRIVATE dtrain_result
dtrain__cpu_attention_backward(dtrain_device *device, const dtrain_attention_backward_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const int64_t count = args->batch * args->sequence * args->n;
    dtrain__job job = dtrain__job_make(args, args->batch * args->heads, 1);
    DTRAIN__TRY(dtrain__check_heads(args->n, args->heads));
    DTRAIN__TRY(dtrain__check_dtype(args->dtype));
    job.dynamic = true;
    job.slot = dtrain__attention_slot(args->n, args->heads, args->sequence, true);
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, &job, job.slot * cpu->thread_count));
    return dtrain__job_run(cpu, &job, cpu->kernels->attention_backward, 16 * count);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_cross_entropy_backward(
    dtrain_device *device, const dtrain_cross_entropy_backward_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain__job job = dtrain__job_make(args, args->rows, 1);
    DTRAIN__TRY(dtrain__check_targets(args->targets, args->rows, args->n));
    DTRAIN__TRY(dtrain__check_dtype(args->dtype));
    return dtrain__job_run(cpu, &job, cpu->kernels->cross_entropy_backward, args->rows * args->n);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_cross_entropy(dtrain_device *device,
                                                        const dtrain_cross_entropy_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain__job job = dtrain__job_make(args, args->rows, 1);
    DTRAIN__TRY(dtrain__check_targets(args->targets, args->rows, args->n));
    DTRAIN__TRY(dtrain__check_dtype(args->dtype));
    dtrain__job_run(cpu, &job, cpu->kernels->cross_entropy, args->rows * args->n);
    if (!args->d_logits) return DTRAIN_OK;
    const dtrain_cross_entropy_backward_args backward = {
        args->rows, args->n,        args->scale, args->logits, args->targets,
        args->lse,  args->d_logits, NULL,        args->dtype};
    return dtrain__cpu_cross_entropy_backward(device, &backward);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_add(dtrain_device *device, const dtrain_add_args *args)
{
    DTRAIN__TRY(dtrain__check_dtype(args->x_dtype));
    DTRAIN__TRY(dtrain__check_dtype(args->y_dtype));
    return dtrain__cpu_elementwise(device, args, args->count, dtrain__cpu_kernels(device)->add);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_axpby(dtrain_device *device,
                                                const dtrain_axpby_args *args)
{
    DTRAIN__TRY(dtrain__check_dtype(args->dtype));
    return dtrain__cpu_elementwise(device, args, args->count, dtrain__cpu_kernels(device)->axpby);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_dropout(dtrain_device *device,
                                                  const dtrain_dropout_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain__job job = dtrain__job_make(args, args->count, 2 * DTRAIN__LINE); /* a Philox vector */
    DTRAIN__TRY(dtrain__check_dtype(args->dtype));
    return dtrain__job_run(cpu, &job, cpu->kernels->dropout, args->count);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_sum(dtrain_device *device, const dtrain_sum_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const int64_t share = (args->count + DTRAIN__SUM_CHUNKS - 1) / DTRAIN__SUM_CHUNKS;
    const int64_t chunk = share > 4096 ? dtrain__multiple(share, 4096) : 4096;
    DTRAIN__TRY(dtrain__check_dtype(args->dtype));
    dtrain__job job = dtrain__job_make(args, (args->count + chunk - 1) / chunk, 1);
    double sum = 0;
    job.chunk = chunk;
    job.sums = cpu->sums;
    dtrain__job_run(cpu, &job, cpu->kernels->sum, args->count);
    for (int64_t i = 0; i < job.total; i++) sum += cpu->sums[i];
    sum *= args->scale;
    if (args->accumulate) sum += args->total[0];
    if (args->total) args->total[0] = sum;
    if (args->out) args->out[0] = (float)sum;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_clip(dtrain_device *device, const dtrain_clip_args *args)
{
    const double norm = sqrt(args->sum_squares[0]) * (double)args->scalars->grad_scale;
    const double factor = (double)args->max_norm / (norm + 1e-6);
    (void)device;
    args->norm[0] = (float)norm;
    if (!dtrain_is_finite(args->norm[0])) args->scalars->skip = 1;
    else if (args->max_norm > 0 && factor < 1) args->scalars->grad_scale *= (float)factor;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_convert(dtrain_device *device,
                                                  const dtrain_convert_args *args)
{
    const dtrain_dtype low = args->x_dtype < args->y_dtype ? args->x_dtype : args->y_dtype;
    const dtrain_dtype high = args->x_dtype < args->y_dtype ? args->y_dtype : args->x_dtype;
    if (low < DTRAIN_DTYPE_F32 || high > DTRAIN_DTYPE_F16)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "cannot convert %s to %s",
                           dtrain_dtype_name(args->x_dtype), dtrain_dtype_name(args->y_dtype));
    return dtrain__cpu_elementwise(device, args, args->count, dtrain__cpu_kernels(device)->convert);
}

/* ---- Optimizers -------------------------------------------------------------------------------*/

static dtrain_result dtrain__cpu_update(dtrain_device *device, dtrain__update *update,
                                        size_t tensor_count, const dtrain_optimizer_tensor *tensors,
                                        const dtrain_step_scalars *scalars, dtrain__range_fn range)
{
    if (scalars) update->now = *scalars;
    for (size_t i = 0; i < tensor_count && !update->now.skip; i++) {
        update->tensor = &tensors[i];
        DTRAIN__TRY(dtrain__cpu_elementwise(device, update, tensors[i].count, range));
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_adamw(dtrain_device *device,
                                                const dtrain_adamw_args *args)
{
    dtrain__update update;
    memset(&update, 0, sizeof update);
    update.adamw = args;
    update.now.lr = args->lr;
    update.now.correction1 = args->correction1;
    update.now.correction2 = args->correction2;
    update.now.grad_scale = args->grad_scale;
    return dtrain__cpu_update(device, &update, args->tensor_count, args->tensors, args->scalars,
                              dtrain__cpu_kernels(device)->adamw);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_sgd(dtrain_device *device, const dtrain_sgd_args *args)
{
    dtrain__update update;
    memset(&update, 0, sizeof update);
    update.sgd = args;
    update.now.lr = args->lr;
    update.now.grad_scale = args->grad_scale;
    return dtrain__cpu_update(device, &update, args->tensor_count, args->tensors, args->scalars,
                              dtrain__cpu_kernels(device)->sgd);
}
