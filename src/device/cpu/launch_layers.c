/* Launchers of the kernels of layers */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/kernels_internal.h"

static dtrain_result dtrain__check_layernorm(const dtrain_layernorm_args *args)
{
    if (!args->residual == !args->sum) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "layernorm: residual and sum are given together or not at all");
}
DTRAIN__LAUNCH(layernorm, dtrain__check_layernorm(args), args->rows, 1, args->n,
               args->rows * args->n, dtrain__larger(args->x_dtype, args->y_dtype))

/* Run a kernel over chunks of rows, with 2 n floats of scratch for each chunk. Chunks follow from
 * the shape, never from the number of threads. */
static dtrain_result dtrain__over_chunks(dtrain__cpu *cpu, dtrain__range_fn range, const void *args,
                                         int64_t rows, int64_t n, int64_t chunk, dtrain_dtype dtype,
                                         dtrain__job *job)
{
    const int64_t count = (rows + chunk - 1) / chunk;
    *job = dtrain__job_make(args, count, 1, dtype);
    job->chunk = chunk;
    job->chunk_count = count;
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, count * 2 * n, &job->scratch));
    return dtrain__job_run(cpu, job, range, rows * n);
}

/* Chunks of 32 rows or, beyond 2048 rows, 64 chunks: adding them up stays cheap. */
DTRAIN__PRIVATE dtrain_result
dtrain__cpu_layernorm_backward(dtrain_device *device, const dtrain_layernorm_backward_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const int64_t chunk = args->rows > 2048 ? (args->rows + 63) / 64 : 32;
    dtrain__job job;
    if (args->d_residual && !args->d_x)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "layernorm backward: d_residual needs d_x");
    DTRAIN__TRY(dtrain__over_chunks(cpu, cpu->kernels->layernorm_backward, args, args->rows,
                                    args->n, chunk, dtrain__larger(args->x_dtype, args->y_dtype),
                                    &job));
    job.total = args->n;
    job.unit = DTRAIN__LINE;
    return dtrain__job_run(cpu, &job, cpu->kernels->layernorm_params,
                           job.chunk_count * 2 * args->n);
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

DTRAIN__LAUNCH(embedding, dtrain__check_tokens(args), args->rows, 1, 0, args->rows * args->n,
               args->dtype)
DTRAIN__LAUNCH(embedding_backward, dtrain__check_tokens(args), args->n, DTRAIN__LINE, 0,
               args->rows * args->n, args->dtype)

/* Return the floats of dtrain__head's buffers, with the head size rounded up to the widest vectors.
 */
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

/* Run attention on items of unequal cost: a block of queries of a head (forward), or a head of keys
 * with all heads of queries that share it (backward). Each thread has buffers for one item. */
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

DTRAIN__LAUNCH(cross_entropy_backward, dtrain__check_targets(args), args->rows, 1, 0,
               args->rows * args->n, args->dtype)

DTRAIN__PRIVATE dtrain_result dtrain__cpu_cross_entropy(dtrain_device *device,
                                                        const dtrain_cross_entropy_args *args)
{
    dtrain_cross_entropy_backward_args backward = *args;
    if (args->parts && args->d_logits)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "cross_entropy: d_logits needs the lse of whole rows, which parts do "
                           "not give; call cross_entropy_backward after cross_entropy_finish");
    DTRAIN__TRY(dtrain__check_targets(args));
    DTRAIN__TRY(dtrain__run_kernel(device, dtrain__cpu_kernels(device)->cross_entropy, args,
                                   args->rows, 1, 0, args->rows * args->n, args->dtype));
    backward.upstream = NULL;
    return args->d_logits ? dtrain__cpu_cross_entropy_backward(device, &backward) : DTRAIN_OK;
}

/* Write the loss and lse of a row; `sum` is the sum of exp(x - top). */
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

/* Compute two functions of four floats a row, on one thread: waking others takes longer. */
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

DTRAIN__LAUNCH(softmax, DTRAIN_OK, args->rows, 1, args->n, args->rows * args->n, args->dtype)
DTRAIN__LAUNCH(softmax_backward, DTRAIN_OK, args->rows, 1, 0, args->rows * args->n, args->dtype)

static dtrain_result dtrain__check_rotary(const dtrain_rotary_args *args)
{
    if (args->d >= 2 && args->d % 2 == 0 && args->rotated <= args->heads && args->sequence >= 1)
        return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "rotary: heads of %lld elements, %lld of %lld turned, sequences of %lld: "
                       "expected an even size, no more heads than there are, and 1 row or more",
                       (long long)args->d, (long long)args->rotated, (long long)args->heads,
                       (long long)args->sequence);
}
/* A thread takes positions; its scratch holds cosine and sine of one position. */
DTRAIN__LAUNCH(rotary, dtrain__check_rotary(args), dtrain__min(args->sequence, args->rows), 1,
               args->d, args->rows * args->heads * args->d, args->dtype)
DTRAIN__LAUNCH(permute, DTRAIN_OK, args->shape[0] * args->shape[1] * args->shape[2], 1, 0,
               args->shape[0] * args->shape[1] * args->shape[2] * args->shape[3], args->dtype)

/* Check that the kind is known and that `other` is there exactly if the function has it. */
static dtrain_result dtrain__check_pointwise(const dtrain_pointwise_args *args, bool backward)
{
    const unsigned kind = args->kind;
    const void *other = args->other;
    if (kind < DTRAIN_POINTWISE_RELU || kind > DTRAIN_POINTWISE_LOGISTIC_LOSS)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "pointwise: kind is %u, which is not a dtrain_pointwise", kind);
    if ((kind >= DTRAIN_POINTWISE_MULTIPLY) != (other != NULL))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "pointwise: kind %u is a function of %s, found other %s NULL", kind,
                           other ? "one argument" : "two arguments", other ? "not" : "=");
    if (backward && args->d_other && !other)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "pointwise backward: kind %u has no second argument, expected d_other "
                           "= NULL",
                           kind);
    return DTRAIN_OK;
}

static dtrain_dtype dtrain__pointwise_dtype(const dtrain_pointwise_args *args)
{
    const dtrain_dtype dtype = dtrain__larger(args->x_dtype, args->y_dtype);
    return args->other ? dtrain__larger(dtype, args->other_dtype) : dtype;
}
DTRAIN__LAUNCH(pointwise, dtrain__check_pointwise(args, false), args->count, 2 * DTRAIN__LINE, 0,
               args->count, dtrain__pointwise_dtype(args))
DTRAIN__LAUNCH(pointwise_backward, dtrain__check_pointwise(args, true), args->count,
               2 * DTRAIN__LINE, 0, args->count, dtrain__pointwise_dtype(args))

/* Draw the random words of elements i .. i + count of a part, which can begin and jump anywhere;
 * neighbours share a block of four words. */
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

DTRAIN__LAUNCH(dropout, DTRAIN_OK, args->count, 2 * DTRAIN__LINE, 0, args->count, args->dtype)

/* ---- Batch normalisation: numbers of chunks are put together in double, in order --------------*/

/* Return the rows of a chunk: 4096 elements stay in L1; there are at most 512 chunks. */
static int64_t dtrain__batchnorm_chunk(int64_t rows, int64_t n)
{
    return dtrain__max(dtrain__max(4096 / n, 16), (rows + 511) / 512);
}

/* Join two sets of rows: count, mean, sum of squared deviations from the mean (Chan, Golub and
 * LeVeque, 1979). */
static void dtrain__moments_join(double *count, double *mean, double *spread, double more,
                                 double more_mean, double more_spread)
{
    const double all = *count + more, apart = more_mean - *mean;
    if (all <= 0) return;
    *mean += apart * (more / all);
    *spread += more_spread + apart * apart * (*count * more / all);
    *count = all;
}

DTRAIN__PRIVATE dtrain_result
dtrain__cpu_batchnorm_moments(dtrain_device *device, const dtrain_batchnorm_moments_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const int64_t n = args->n;
    dtrain__job job;
    DTRAIN__TRY(dtrain__over_chunks(cpu, cpu->kernels->batchnorm_moments, args, args->rows, n,
                                    dtrain__batchnorm_chunk(args->rows, n), args->dtype, &job));
    args->sums[0] = (float)args->rows;
    for (int64_t i = 0; i < n; i++) {
        const float *found = job.scratch + i;
        double count = 0, mean = 0, spread = 0;
        for (int64_t row = 0; row < args->rows; row += job.chunk, found += 2 * n) {
            const int64_t rest = args->rows - row;
            dtrain__moments_join(&count, &mean, &spread,
                                 (double)(rest < job.chunk ? rest : job.chunk), (double)found[0],
                                 (double)found[n]);
        }
        args->sums[1 + i] = (float)mean;
        args->sums[1 + n + i] = (float)spread;
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_batchnorm_statistics(
    dtrain_device *device, const dtrain_batchnorm_statistics_args *args)
{
    const int64_t n = args->n;
    const double epsilon = (double)args->epsilon;
    double rows = 0;
    (void)device;
    for (int64_t i = 0; i < n; i++) {
        double count = 0, mean = 0, spread = 0;
        if (!args->parts) {
            args->mean[i] = args->running_mean[i];
            args->rstd[i] = (float)(1 / sqrt((double)args->running_var[i] + epsilon));
            continue;
        }
        for (int64_t p = 0; p < args->parts; p++) {
            const float *part = args->all + p * (1 + 2 * n);
            dtrain__moments_join(&count, &mean, &spread, (double)part[0], (double)part[1 + i],
                                 (double)part[1 + n + i]);
        }
        args->mean[i] = (float)mean;
        args->rstd[i] = (float)(1 / sqrt((count > 0 ? spread / count : 0) + epsilon));
        rows = count;
        if (!args->running_mean) continue;
        const float variance = (float)(spread / (count > 1 ? count - 1 : 1));
        args->running_mean[i] += args->momentum * ((float)mean - args->running_mean[i]);
        args->running_var[i] += args->momentum * (variance - args->running_var[i]);
    }
    if (args->parts) *args->inverse_count = (float)(1 / (rows > 0 ? rows : 1));
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_batchnorm_sums(dtrain_device *device,
                                                         const dtrain_batchnorm_sums_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain__job job;
    DTRAIN__TRY(dtrain__over_chunks(cpu, cpu->kernels->batchnorm_sums, args, args->rows, args->n,
                                    dtrain__batchnorm_chunk(args->rows, args->n), args->dtype,
                                    &job));
    for (int64_t i = 0; i < 2 * args->n; i++) {
        double sum = 0;
        for (int64_t c = 0; c < job.chunk_count; c++)
            sum += (double)job.scratch[c * 2 * args->n + i];
        args->sums[i] = (float)sum;
    }
    return DTRAIN_OK;
}

DTRAIN__LAUNCH(batchnorm, DTRAIN_OK, args->rows, 1, 0, args->rows * args->n, args->dtype)
DTRAIN__LAUNCH(batchnorm_backward, DTRAIN_OK, args->rows, 1, 0, args->rows * args->n, args->dtype)
