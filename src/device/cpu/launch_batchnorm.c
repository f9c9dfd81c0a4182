/* Launchers of batch normalisation
 *
 * The chunks of rows follow from the shape, never from the number of threads. What they leave is
 * put together in double, in order: these are few numbers. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/kernels_internal.h"

#define DTRAIN__BATCHNORM_CHUNK 4096 /* elements: they stay in L1 */
#define DTRAIN__BATCHNORM_CHUNKS 512 /* at most */

/* Run a kernel over chunks of rows, with 2 n floats of scratch for each. */
static dtrain_result dtrain__over_chunks(dtrain__cpu *cpu, dtrain__range_fn range, const void *args,
                                         int64_t rows, int64_t n, dtrain_dtype dtype,
                                         dtrain__job *job)
{
    int64_t chunk = DTRAIN__BATCHNORM_CHUNK / n, most = DTRAIN__BATCHNORM_CHUNKS;
    if (chunk < 16) chunk = 16;
    if (rows > chunk * most) chunk = (rows + most - 1) / most;
    const int64_t chunk_count = (rows + chunk - 1) / chunk;
    *job = dtrain__job_make(args, chunk_count, 1, dtype);
    job->chunk = chunk;
    job->chunk_count = chunk_count;
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, chunk_count * 2 * n, &job->scratch));
    return dtrain__job_run(cpu, job, range, rows * n);
}

/* Put two sets of rows together: how many, their mean, the sum of squared deviations from it (Chan,
 * Golub and LeVeque, 1979). */
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
                                    args->dtype, &job));
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

DTRAIN__PRIVATE dtrain_result dtrain__cpu_batchnorm(dtrain_device *device,
                                                    const dtrain_batchnorm_args *args)
{
    return dtrain__run_kernel(device, dtrain__cpu_kernels(device)->batchnorm, args, args->rows, 1,
                              args->rows * args->n, args->dtype);
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_batchnorm_sums(dtrain_device *device,
                                                         const dtrain_batchnorm_sums_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    dtrain__job job;
    DTRAIN__TRY(dtrain__over_chunks(cpu, cpu->kernels->batchnorm_sums, args, args->rows, args->n,
                                    args->dtype, &job));
    for (int64_t i = 0; i < 2 * args->n; i++) {
        double sum = 0;
        for (int64_t c = 0; c < job.chunk_count; c++)
            sum += (double)job.scratch[c * 2 * args->n + i];
        args->sums[i] = (float)sum;
    }
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result
dtrain__cpu_batchnorm_backward(dtrain_device *device, const dtrain_batchnorm_backward_args *args)
{
    return dtrain__run_kernel(device, dtrain__cpu_kernels(device)->batchnorm_backward, args,
                              args->rows, 1, args->rows * args->n, args->dtype);
}
