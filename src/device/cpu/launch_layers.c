/* Launchers of the kernels of layers */

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
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain__job job =
        dtrain__job_make(args, args->rows, 1, dtrain__larger(args->x_dtype, args->y_dtype));
    if (!args->residual != !args->sum)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "layernorm: residual and sum are given together or not at all");
    job.slot = dtrain__multiple(args->n, DTRAIN__LINE); /* a row */
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, job.slot * cpu->thread_count, &job.scratch));
    return dtrain__job_run(cpu, &job, cpu->kernels->layernorm, args->rows * args->n);
}

/* Chunks of 32 rows or, beyond 2048 rows, 64 chunks: what adding up costs stays small. */
DTRAIN__PRIVATE dtrain_result
dtrain__cpu_layernorm_backward(dtrain_device *device, const dtrain_layernorm_backward_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const int64_t chunk = args->rows > 2048 ? (args->rows + 63) / 64 : 32;
    const int64_t chunk_count = (args->rows + chunk - 1) / chunk;
    dtrain__job job =
        dtrain__job_make(args, chunk_count, 1, dtrain__larger(args->x_dtype, args->y_dtype));
    if (args->d_residual && !args->d_x)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "layernorm backward: d_residual needs d_x");
    job.chunk = chunk;
    job.chunk_count = chunk_count;
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, chunk_count * 2 * args->n, &job.scratch));
    DTRAIN__TRY(dtrain__job_run(cpu, &job, cpu->kernels->layernorm_backward, args->rows * args->n));
    job.total = args->n;
    job.unit = DTRAIN__LINE;
    return dtrain__job_run(cpu, &job, cpu->kernels->layernorm_params, chunk_count * 2 * args->n);
}

static dtrain_result dtrain__check_tokens(const dtrain_embedding_args *args)
{
    const int64_t vocab = args->whole_vocab ? args->whole_vocab : args->vocab;
    for (int64_t row = 0; row < args->rows; row++)
        if (args->tokens[row] < 0 || args->tokens[row] >= vocab)
            return dtrain_fail(DTRAIN_ERROR_DATA, "token %ld at row %lld is outside [0, %lld)",
                               (long)args->tokens[row], (long long)row, (long long)vocab);
    return DTRAIN_OK;
}

static dtrain_result dtrain__check_targets(const dtrain_cross_entropy_args *args)
{
    const int64_t classes = dtrain__classes_whole(args);
    for (int64_t row = 0; row < args->rows; row++)
        if (args->targets[row] < -1 || args->targets[row] >= classes)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "target %ld at row %lld is outside [0, %lld) and not -1 (ignored)",
                               (long)args->targets[row], (long long)row, (long long)classes);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_embedding(dtrain_device *device,
                                                    const dtrain_embedding_args *args)
{
    DTRAIN__TRY(dtrain__check_tokens(args));
    return dtrain__run_kernel(device, dtrain__cpu_kernels(device)->embedding, args, args->rows, 1,
                              args->rows * args->n, args->dtype);
}

DTRAIN__PRIVATE dtrain_result
dtrain__cpu_embedding_backward(dtrain_device *device, const dtrain_embedding_backward_args *args)
{
    DTRAIN__TRY(dtrain__check_tokens(args));
    return dtrain__run_kernel(device, dtrain__cpu_kernels(device)->embedding_backward, args,
                              args->n, DTRAIN__LINE, args->rows * args->n, args->dtype);
}

/* Floats of dtrain__head's buffers, with the head dimension rounded up for the widest vectors. */
static int64_t dtrain__attention_slot(const dtrain_attention_args *args, bool backward)
{
    const int64_t block = DTRAIN__ATTENTION_BLOCK, width = dtrain__multiple(args->d, 32);
    int64_t floats = 4 * block * width + block * block + 3 * block;
    if (args->mask) floats += 2 * block * block;
    if (backward) {
        floats += 3 * block * width + block * block + 3 * block;
        floats += 2 * dtrain__multiple(args->keys, block) * width;
    }
    return dtrain__multiple(floats, DTRAIN__LINE);
}

static dtrain_result dtrain__check_attention(const dtrain_attention_args *args)
{
    if (args->d < 1 || args->heads < 1 || args->kv_heads < 1 || args->heads % args->kv_heads)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "attention: %lld heads of queries, of %lld elements, cannot share %lld "
                           "of keys equally",
                           (long long)args->heads, (long long)args->d, (long long)args->kv_heads);
    for (int64_t b = 0; b < args->batch && args->key_lengths; b++)
        if (args->key_lengths[b] < 0 || args->key_lengths[b] > args->keys)
            return dtrain_fail(DTRAIN_ERROR_DATA,
                               "attention: key length %ld of batch element %lld is outside [0, "
                               "%lld]",
                               (long)args->key_lengths[b], (long long)b, (long long)args->keys);
    return DTRAIN_OK;
}

/* Forward an item is a block of queries of a head, backward a head of keys with all the heads of
 * queries that share it. Items are of unequal cost; each thread has the buffers of one. */
static dtrain_result dtrain__launch_attention(dtrain_device *device,
                                              const dtrain_attention_args *args, const void *pass,
                                              int64_t items, bool backward)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const int64_t longer = args->keys > args->queries ? args->keys : args->queries;
    const int64_t count = args->batch * longer * args->heads * args->d;
    dtrain__job job = dtrain__job_make(pass, items, 1, args->dtype);
    job.dynamic = true;
    job.slot = dtrain__attention_slot(args, backward);
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, job.slot * cpu->thread_count, &job.scratch));
    return backward ? dtrain__job_run(cpu, &job, cpu->kernels->attention_backward, 16 * count)
                    : dtrain__job_run(cpu, &job, cpu->kernels->attention, 8 * count);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_attention(dtrain_device *device,
                                                    const dtrain_attention_args *args)
{
    const int64_t block = DTRAIN__ATTENTION_BLOCK, blocks = (args->queries + block - 1) / block;
    DTRAIN__TRY(dtrain__check_attention(args));
    return dtrain__launch_attention(device, args, args, args->batch * args->heads * blocks, false);
}

DTRAIN__PRIVATE dtrain_result
dtrain__cpu_attention_backward(dtrain_device *device, const dtrain_attention_backward_args *args)
{
    const dtrain_attention_args *forward = &args->forward;
    DTRAIN__TRY(dtrain__check_attention(forward));
    return dtrain__launch_attention(device, forward, args, forward->batch * forward->kv_heads,
                                    true);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_cross_entropy_backward(
    dtrain_device *device, const dtrain_cross_entropy_backward_args *args)
{
    DTRAIN__TRY(dtrain__check_targets(args));
    return dtrain__run_kernel(device, dtrain__cpu_kernels(device)->cross_entropy_backward, args,
                              args->rows, 1, args->rows * args->n, args->dtype);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_cross_entropy(dtrain_device *device,
                                                        const dtrain_cross_entropy_args *args)
{
    dtrain_cross_entropy_backward_args backward;
    if (args->parts && args->d_logits)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "cross_entropy: d_logits needs the lse of whole rows, which parts do "
                           "not give; call cross_entropy_backward after cross_entropy_finish");
    DTRAIN__TRY(dtrain__check_targets(args));
    DTRAIN__TRY(dtrain__run_kernel(device, dtrain__cpu_kernels(device)->cross_entropy, args,
                                   args->rows, 1, args->rows * args->n, args->dtype));
    if (!args->d_logits) return DTRAIN_OK;
    memset(&backward, 0, sizeof backward);
    backward.rows = args->rows;
    backward.n = args->n;
    backward.scale = args->scale;
    backward.logits = args->logits;
    backward.targets = args->targets;
    backward.lse = args->lse;
    backward.lse_rest = args->lse_rest;
    backward.d_logits = args->d_logits;
    backward.dtype = args->dtype;
    backward.classes = args->classes;
    backward.smoothing = args->smoothing;
    return dtrain__cpu_cross_entropy_backward(device, &backward);
}

/* Write the loss and lse of a row, of what was found in it: `sum` is of exp(x - top). */
DTRAIN__PRIVATE void dtrain__row_loss(const dtrain_cross_entropy_args *args, int64_t row, float top,
                                      double sum, float wanted, double logits_sum)
{
    const bool ignored = args->targets[row] == -1;
    const double lse = ignored ? 0 : (double)top + log(sum), smoothing = (double)args->smoothing;
    const double classes = (double)dtrain__classes_whole(args);
    args->lse[row] = (float)lse;
    if (args->lse_rest)
        args->lse_rest[row] = ignored ? 0 : dtrain__lse_rest(top, log(sum), (float)lse);
    args->loss[row] =
        ignored
            ? 0
            : (float)(lse - (1 - smoothing) * (double)wanted - smoothing * logits_sum / classes);
}

/* Two functions of four floats a row: one thread does it while others would wake up. */
DTRAIN__PRIVATE dtrain_result dtrain__cpu_cross_entropy_finish(
    dtrain_device *device, const dtrain_cross_entropy_finish_args *args)
{
    (void)device;
    for (int64_t row = 0; row < args->rows; row++) {
        float *part = args->parts + row, *sum = part + args->rows;
        const float top = args->whole_max[row];
        if (args->loss)
            dtrain__row_loss(args, row, top, (double)*sum, part[2 * args->rows],
                             args->smoothing > 0 ? (double)part[3 * args->rows] : 0);
        else if (part[0] < top) *sum *= expf(part[0] - top); /* -infinity twice would be NaN */
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_softmax(dtrain_device *device,
                                                  const dtrain_softmax_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain__job job = dtrain__job_make(args, args->rows, 1, args->dtype);
    job.slot = dtrain__multiple(args->n, DTRAIN__LINE); /* a row */
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, job.slot * cpu->thread_count, &job.scratch));
    return dtrain__job_run(cpu, &job, cpu->kernels->softmax, args->rows * args->n);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_softmax_backward(dtrain_device *device,
                                                           const dtrain_softmax_backward_args *args)
{
    return dtrain__run_kernel(device, dtrain__cpu_kernels(device)->softmax_backward, args,
                              args->rows, 1, args->rows * args->n, args->dtype);
}

/* A thread takes positions, and has cosine and sine of one. */
DTRAIN__PRIVATE dtrain_result dtrain__cpu_rotary(dtrain_device *device,
                                                 const dtrain_rotary_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const int64_t positions = args->sequence < args->rows ? args->sequence : args->rows;
    dtrain__job job = dtrain__job_make(args, positions, 1, args->dtype);
    if (args->d < 2 || args->d % 2 || args->rotated > args->heads || args->sequence < 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "rotary: heads of %lld elements, %lld of %lld turned, sequences of "
                           "%lld: expected an even size, no more heads than there are, and 1 row "
                           "or more",
                           (long long)args->d, (long long)args->rotated, (long long)args->heads,
                           (long long)args->sequence);
    job.slot = dtrain__multiple(args->d, DTRAIN__LINE);
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, job.slot * cpu->thread_count, &job.scratch));
    return dtrain__job_run(cpu, &job, cpu->kernels->rotary, args->rows * args->heads * args->d);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_permute(dtrain_device *device,
                                                  const dtrain_permute_args *args)
{
    const int64_t rows = args->shape[0] * args->shape[1] * args->shape[2];
    return dtrain__run_kernel(device, dtrain__cpu_kernels(device)->permute, args, rows, 1,
                              rows * args->shape[3], args->dtype);
}

/* Check that the kind is known and that `other` is there exactly if the function has it. */
static dtrain_result dtrain__check_pointwise(uint32_t kind, const void *other)
{
    if (kind < DTRAIN_POINTWISE_RELU || kind > DTRAIN_POINTWISE_LOGISTIC_LOSS)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "pointwise: kind is %u, which is not a dtrain_pointwise",
                           (unsigned)kind);
    if ((kind >= DTRAIN_POINTWISE_MULTIPLY) != (other != NULL))
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT, "pointwise: kind %u is a function of %s, found other %s NULL",
            (unsigned)kind, other ? "one argument" : "two arguments", other ? "not" : "=");
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_pointwise(dtrain_device *device,
                                                    const dtrain_pointwise_args *args)
{
    dtrain_dtype dtype = dtrain__larger(args->x_dtype, args->y_dtype);
    DTRAIN__TRY(dtrain__check_pointwise(args->kind, args->other));
    if (args->other) dtype = dtrain__larger(dtype, args->other_dtype);
    return dtrain__elementwise(device, dtrain__cpu_kernels(device)->pointwise, args, args->count,
                               dtype);
}

DTRAIN__PRIVATE dtrain_result
dtrain__cpu_pointwise_backward(dtrain_device *device, const dtrain_pointwise_backward_args *args)
{
    dtrain_dtype dtype = dtrain__larger(args->x_dtype, args->y_dtype);
    DTRAIN__TRY(dtrain__check_pointwise(args->kind, args->other));
    if (args->d_other && !args->other)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "pointwise backward: kind %u has no second argument, expected d_other "
                           "= NULL",
                           (unsigned)args->kind);
    if (args->other) dtype = dtrain__larger(dtype, args->other_dtype);
    return dtrain__elementwise(device, dtrain__cpu_kernels(device)->pointwise_backward, args,
                               args->count, dtype);
}

/* Draw the words of elements i .. i + count of a part, whose numbers begin and jump anywhere: a
 * block of four serves neighbours. */
DTRAIN__PRIVATE void dtrain__part_words(const dtrain_part *part, uint64_t seed, uint64_t stream,
                                        int64_t i, int64_t count, uint32_t *words)
{
    uint32_t block[4] = {0};
    uint64_t drawn = UINT64_MAX;
    for (const int64_t end = i + count; i < end; i++) {
        int64_t at = i;
        if (part->segments) {
            uint32_t s = 0;
            int64_t column = i % part->n;
            while (s + 1 < part->segments && column >= part->segment[s].length)
                column -= part->segment[s++].length;
            at = i / part->n * part->whole_n + part->segment[s].column + column;
        }
        const uint64_t number = (uint64_t)(part->first + at);
        if (number / 4 != drawn) dtrain__philox(seed, stream, number / 4, block);
        drawn = number / 4;
        *words++ = block[number % 4];
    }
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_dropout(dtrain_device *device,
                                                  const dtrain_dropout_args *args)
{
    return dtrain__elementwise(device, dtrain__cpu_kernels(device)->dropout, args, args->count,
                               args->dtype);
}
