/* Kernels. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/kernels_internal.h"

DTRAIN__PRIVATE dtrain_result dtrain__cpu_layernorm(dtrain_device *device,
                                                    const dtrain_layernorm_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_layernorm_args wide = *args;
    const int64_t count = args->rows * args->n;
    if (!args->residual != !args->sum)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "layernorm: residual and sum are given together or not at all");
    wide.x = dtrain__wide(&w, args->x, args->x_dtype, count, DTRAIN__READ);
    wide.sum = dtrain__wide(&w, args->sum, args->x_dtype, count, DTRAIN__WRITE);
    wide.residual = dtrain__wide(&w, args->residual, args->y_dtype, count, DTRAIN__READ);
    wide.y = dtrain__wide(&w, args->y, args->y_dtype, count, DTRAIN__WRITE);
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, args->rows, 1);
    return dtrain__wide_end(&w, dtrain__job_run(w.cpu, &job, w.cpu->kernels->layernorm, count));
}

/* Chunks of 32 rows or, beyond 2048 rows, 64 chunks: what adding up costs stays small. */
static dtrain_result dtrain__layernorm_backward_run(dtrain__cpu *cpu,
                                                    const dtrain_layernorm_backward_args *args)
{
    const int64_t chunk = args->rows > 2048 ? (args->rows + 63) / 64 : 32;
    const int64_t chunk_count = (args->rows + chunk - 1) / chunk;
    dtrain__job job = dtrain__job_make(args, chunk_count, 1);
    job.chunk = chunk;
    job.chunk_count = chunk_count;
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, &job, chunk_count * 2 * args->n));
    dtrain__job_run(cpu, &job, cpu->kernels->layernorm_backward, args->rows * args->n);
    job.total = args->n;
    job.unit = DTRAIN__LINE;
    return dtrain__job_run(cpu, &job, cpu->kernels->layernorm_params, chunk_count * 2 * args->n);
}

DTRAIN__PRIVATE dtrain_result
dtrain__cpu_layernorm_backward(dtrain_device *device, const dtrain_layernorm_backward_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_layernorm_backward_args wide = *args;
    const int64_t count = args->rows * args->n;
    if (args->d_residual && !args->d_x)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "layernorm backward: d_residual needs d_x");
    wide.x = dtrain__wide(&w, args->x, args->x_dtype, count, DTRAIN__READ);
    wide.d_y = dtrain__wide(&w, args->d_y, args->y_dtype, count, DTRAIN__READ);
    wide.d_x = dtrain__wide(&w, args->d_x, args->x_dtype, count,
                            DTRAIN__WRITE | (args->accumulate_x ? DTRAIN__READ : 0));
    if (w.result == DTRAIN_OK) w.result = dtrain__layernorm_backward_run(w.cpu, &wide);
    if (w.result == DTRAIN_OK && args->d_residual)
        dtrain__cpu_convert_run(w.cpu, wide.d_x, DTRAIN_DTYPE_F32, args->d_residual,
                                dtrain__is_f32(args->y_dtype) ? DTRAIN_DTYPE_F32 : args->y_dtype,
                                count);
    return dtrain__wide_end(&w, w.result);
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
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_embedding_args wide = *args;
    DTRAIN__TRY(dtrain__check_tokens(args->tokens, args->rows, args->vocab));
    wide.y = dtrain__wide(&w, args->y, args->dtype, args->rows * args->n, DTRAIN__WRITE);
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, args->rows, 1);
    return dtrain__wide_end(
        &w, dtrain__job_run(w.cpu, &job, w.cpu->kernels->embedding, args->rows * args->n));
}

DTRAIN__PRIVATE dtrain_result
dtrain__cpu_embedding_backward(dtrain_device *device, const dtrain_embedding_backward_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_embedding_backward_args wide = *args;
    DTRAIN__TRY(dtrain__check_tokens(args->tokens, args->rows, args->vocab));
    wide.d_y = dtrain__wide(&w, args->d_y, args->dtype, args->rows * args->n, DTRAIN__READ);
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, args->n, DTRAIN__LINE);
    return dtrain__wide_end(
        &w, dtrain__job_run(w.cpu, &job, w.cpu->kernels->embedding_backward, args->rows * args->n));
}

/* Floats of dtrain__head's buffers, with the head dimension rounded up for the widest vectors. */
static int64_t dtrain__attention_slot(int64_t n, int64_t heads, int64_t sequence, bool backward)
{
    const int64_t block = DTRAIN__ATTENTION_BLOCK, width = dtrain__multiple(n / heads, 32);
    int64_t floats = 4 * block * width + block * block + 3 * block;
    if (backward) {
        floats += 2 * block * width + block * block + 2 * block;
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
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_attention_args wide = *args;
    const int64_t blocks = (args->sequence + DTRAIN__ATTENTION_BLOCK - 1) / DTRAIN__ATTENTION_BLOCK;
    const int64_t count = args->batch * args->sequence * args->n;
    dtrain__job job = dtrain__job_make(&wide, args->batch * args->heads * blocks, 1);
    DTRAIN__TRY(dtrain__check_heads(args->n, args->heads));
    wide.qkv = dtrain__wide(&w, args->qkv, args->dtype, 3 * count, DTRAIN__READ);
    wide.y = dtrain__wide(&w, args->y, args->dtype, count, DTRAIN__WRITE);
    job.dynamic = true;
    job.slot = dtrain__attention_slot(args->n, args->heads, args->sequence, false);
    if (w.result == DTRAIN_OK)
        w.result = dtrain__cpu_scratch(w.cpu, &job, job.slot * w.cpu->thread_count);
    if (w.result == DTRAIN_OK) dtrain__job_run(w.cpu, &job, w.cpu->kernels->attention, 8 * count);
    return dtrain__wide_end(&w, w.result);
}

DTRAIN__PRIVATE dtrain_result
dtrain__cpu_attention_backward(dtrain_device *device, const dtrain_attention_backward_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_attention_backward_args wide = *args;
    const int64_t count = args->batch * args->sequence * args->n;
    dtrain__job job = dtrain__job_make(&wide, args->batch * args->heads, 1);
    DTRAIN__TRY(dtrain__check_heads(args->n, args->heads));
    wide.qkv = dtrain__wide(&w, args->qkv, args->dtype, 3 * count, DTRAIN__READ);
    wide.y = dtrain__wide(&w, args->y, args->dtype, count, DTRAIN__READ);
    wide.d_y = dtrain__wide(&w, args->d_y, args->dtype, count, DTRAIN__READ);
    wide.d_qkv = dtrain__wide(&w, args->d_qkv, args->dtype, 3 * count, DTRAIN__WRITE);
    job.dynamic = true;
    job.slot = dtrain__attention_slot(args->n, args->heads, args->sequence, true);
    if (w.result == DTRAIN_OK)
        w.result = dtrain__cpu_scratch(w.cpu, &job, job.slot * w.cpu->thread_count);
    if (w.result == DTRAIN_OK)
        dtrain__job_run(w.cpu, &job, w.cpu->kernels->attention_backward, 16 * count);
    return dtrain__wide_end(&w, w.result);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_cross_entropy_backward(
    dtrain_device *device, const dtrain_cross_entropy_backward_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_cross_entropy_backward_args wide = *args;
    const int64_t count = args->rows * args->n;
    DTRAIN__TRY(dtrain__check_targets(args->targets, args->rows, args->n));
    wide.logits = dtrain__wide(&w, args->logits, args->dtype, count, DTRAIN__READ);
    wide.d_logits = dtrain__wide(&w, args->d_logits, args->dtype, count, DTRAIN__WRITE);
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, args->rows, 1);
    return dtrain__wide_end(
        &w, dtrain__job_run(w.cpu, &job, w.cpu->kernels->cross_entropy_backward, count));
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_cross_entropy(dtrain_device *device,
                                                        const dtrain_cross_entropy_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_cross_entropy_args wide = *args;
    const int64_t count = args->rows * args->n;
    DTRAIN__TRY(dtrain__check_targets(args->targets, args->rows, args->n));
    wide.logits = dtrain__wide(&w, args->logits, args->dtype, count, DTRAIN__READ);
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, args->rows, 1);
    dtrain__job_run(w.cpu, &job, w.cpu->kernels->cross_entropy, count);
    if (!args->d_logits) return DTRAIN_OK;
    const dtrain_cross_entropy_backward_args backward = {
        args->rows, args->n,        args->scale, args->logits, args->targets,
        args->lse,  args->d_logits, NULL,        args->dtype};
    return dtrain__cpu_cross_entropy_backward(device, &backward);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_add(dtrain_device *device, const dtrain_add_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_add_args wide = *args;
    wide.x = dtrain__wide(&w, args->x, args->x_dtype, args->count, DTRAIN__READ);
    wide.y = dtrain__wide(&w, args->y, args->y_dtype, args->count, DTRAIN__READ);
    wide.out = dtrain__wide(&w, args->out, args->x_dtype, args->count, DTRAIN__WRITE);
    return dtrain__wide_elementwise(&w, &wide, args->count, w.cpu->kernels->add);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_axpby(dtrain_device *device,
                                                const dtrain_axpby_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_axpby_args wide = *args;
    wide.x =
        dtrain__wide(&w, args->x, args->dtype, args->broadcast ? 1 : args->count, DTRAIN__READ);
    wide.y = dtrain__wide(&w, args->y, args->dtype, args->count,
                          DTRAIN__WRITE | (args->accumulate ? DTRAIN__READ : 0));
    return dtrain__wide_elementwise(&w, &wide, args->count, w.cpu->kernels->axpby);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_dropout(dtrain_device *device,
                                                  const dtrain_dropout_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_dropout_args wide = *args;
    wide.x = dtrain__wide(&w, args->x, args->dtype, args->count, DTRAIN__READ);
    wide.y = dtrain__wide(&w, args->y, args->dtype, args->count,
                          DTRAIN__WRITE | (args->accumulate ? DTRAIN__READ : 0));
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, args->count, 2 * DTRAIN__LINE); /* a Philox vector */
    return dtrain__wide_end(&w, dtrain__job_run(w.cpu, &job, w.cpu->kernels->dropout, args->count));
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_sum(dtrain_device *device, const dtrain_sum_args *args)
{
    dtrain__wide_list w = dtrain__wide_begin(device);
    dtrain_sum_args wide = *args;
    const int64_t share = (args->count + DTRAIN__SUM_CHUNKS - 1) / DTRAIN__SUM_CHUNKS;
    const int64_t chunk = share > 4096 ? dtrain__multiple(share, 4096) : 4096;
    wide.x = dtrain__wide(&w, args->x, args->dtype, args->count, DTRAIN__READ);
    if (w.result != DTRAIN_OK) return w.result;
    dtrain__job job = dtrain__job_make(&wide, (args->count + chunk - 1) / chunk, 1);
    double sum = 0;
    job.chunk = chunk;
    job.sums = w.cpu->sums;
    dtrain__job_run(w.cpu, &job, w.cpu->kernels->sum, args->count);
    for (int64_t i = 0; i < job.total; i++) sum += w.cpu->sums[i];
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

DTRAIN__PRIVATE dtrain_result dtrain__cpu_update(dtrain_device *device, dtrain__update *update,
                                                 size_t tensor_count,
                                                 const dtrain_optimizer_tensor *tensors,
                                                 const dtrain_step_scalars *scalars,
                                                 dtrain__range_fn range)
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
