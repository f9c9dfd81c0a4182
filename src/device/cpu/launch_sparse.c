/* Sparse gradients
 *
 * Top-k reads the elements once. A sample of some thousand elements, at places that depend only on
 * count, gives a threshold that somewhat more than k elements exceed:
 *
 *   1. threshold   the magnitude of rank m + 4 sqrt(m) + 8 in the sample, where m is the average
 *                  number of the k largest in a sample: four deviations more
 *   2. pass        update velocity and residual; list elements above the threshold, for each thread
 *   3. border      the k-th largest magnitude of the lists, by histograms of its digits
 *   4. take        elements above the border and the first that equal it; put zeros in their place
 *
 * If the lists hold at least k elements and none was too short, they contain the k largest: the
 * result does not depend on the sample, the threads or the instruction set. Otherwise (many equals,
 * or an unlucky sample) steps 3 and 4 read all elements: four times the reading, the same result.
 * Lists take 8 bytes for each candidate: 2 to 4 % of count for k of 1 %, up to four times that for
 * many threads. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "device/backend.h"
#include "device/cpu/cpu_internal.h"
#include "device/cpu/kernels_internal.h"

/* Return the magnitude as an integer of the same order; every NaN is the largest. */
static uint32_t dtrain__magnitude(float value)
{
    const uint32_t bits = dtrain__f32_bits(value) & 0x7fffffffu;
    return bits > 0x7f800000u ? 0x7fffffffu : bits;
}

/* Return the bin, counted from the top, of the `wanted`-th largest; *wanted becomes its place in
 * the bin. */
static uint32_t dtrain__boundary(const uint32_t *bins, uint32_t bin_count, int64_t *wanted)
{
    uint32_t bin = bin_count - 1;
    for (; *wanted > (int64_t)bins[bin]; bin--) *wanted -= bins[bin];
    return bin;
}

#define DTRAIN__TOPK_BINS 2048
#define DTRAIN__TOPK_SAMPLE 16384 /* at most */
#define DTRAIN__TOPK_FEW 8192     /* elements that need no threshold: all are candidates */

/* Return the magnitude of the `wanted`-th largest of x (count), from digits of 11, 10 and 10 bits;
 * *wanted becomes its place among its equals. */
static uint32_t dtrain__topk_border(const float *x, int64_t count, int64_t *wanted, uint32_t *bins)
{
    memset(bins, 0, DTRAIN__TOPK_BINS * sizeof *bins);
    for (int64_t i = 0; i < count; i++) bins[dtrain__magnitude(x[i]) >> 20]++;
    uint32_t prefix = dtrain__boundary(bins, DTRAIN__TOPK_BINS, wanted);
    for (int shift = 10; shift >= 0; shift -= 10) {
        memset(bins, 0, 1024 * sizeof *bins);
        for (int64_t i = 0; i < count; i++) {
            const uint32_t m = dtrain__magnitude(x[i]);
            bins[m >> shift & 1023] += m >> (shift + 10) == prefix;
        }
        prefix = prefix << 10 | dtrain__boundary(bins, 1024, wanted);
    }
    return prefix;
}

/* Return a magnitude below which almost surely none of the k largest elements falls; -1 if it would
 * leave out too few elements. *room: length of a list for the elements above it. */
static int32_t dtrain__topk_threshold(const dtrain_topk_args *a, float *sample, uint32_t *bins,
                                      int64_t *room)
{
    const int64_t share = a->count / 64, least = share > 512 ? share : 512;
    const int64_t size = least < DTRAIN__TOPK_SAMPLE ? least : DTRAIN__TOPK_SAMPLE;
    const double mean = (double)size * (double)a->k / (double)a->count;
    const int64_t stride = a->count / size;
    int64_t rank = (int64_t)(mean + 4 * sqrt(mean)) + 8;
    const double pass = (double)a->count / (double)size * (double)rank;
    *room = (int64_t)(pass + 4 * pass / sqrt((double)rank)) + DTRAIN__TOPK_BLOCK;
    if (rank >= size / 2) return -1;
    for (int64_t i = 0; i < size; i++) { /* from different columns of a matrix */
        const uint64_t jitter = ((uint64_t)i * 2654435761u & 0xffffffffu) * (uint64_t)stride >> 32;
        const int64_t at = i * stride + (int64_t)jitter;
        float x = a->x[at];
        if (a->velocity) x += a->momentum * a->velocity[at];
        sample[i] = a->residual ? a->residual[at] + x : x;
    }
    const uint32_t border = dtrain__topk_border(sample, size, &rank, bins);
    /* zeros are hardly ever wanted; the bits of NaNs are above infinity */
    if (border == 0) return 0;
    return border > 0x7f800000u ? 0x7f800000 : (int32_t)border - 1;
}

/* Do steps 3 and 4 on candidates in ascending order; without indices x are all elements. The next
 * element overwrites an element that is not taken. */
static void dtrain__topk_take(const dtrain_topk_args *args, const float *x, const int32_t *indices,
                              int64_t count, uint32_t *bins)
{
    int64_t equals = args->k, taken = 0;
    const uint32_t border = dtrain__topk_border(x, count, &equals, bins);
    for (int64_t i = 0; taken < args->k; i++) {
        const uint32_t m = dtrain__magnitude(x[i]);
        args->values[taken] = x[i];
        args->indices[taken] = indices ? indices[i] : (int32_t)i;
        taken += (m > border) | ((m == border) & (equals > 0));
        equals -= m == border;
    }
    if (args->residual)
        for (int64_t i = 0; i < args->k; i++) args->residual[args->indices[i]] = 0;
    if (args->velocity)
        for (int64_t i = 0; i < args->k; i++) args->velocity[args->indices[i]] = 0;
}

/* Scratch: histogram, then the sample or the counts of threads, lists of values, lists of indices.
 */
DTRAIN__PRIVATE dtrain_result dtrain__cpu_topk(dtrain_device *device, const dtrain_topk_args *args)
{
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    const bool few = args->count <= DTRAIN__TOPK_FEW;
    const int lists = few ? 1 : cpu->thread_count;
    const int64_t head = DTRAIN__TOPK_BINS + DTRAIN__TOPK_SAMPLE;
    dtrain__topk_pass pass;
    if (args->count > INT32_MAX || args->k < 1 || args->k > args->count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "topk: k is %lld of %lld; expected 1 to count, below 2^31",
                           (long long)args->k, (long long)args->count);
    if (args->velocity && !args->residual)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "topk: velocity needs a residual");
    memset(&pass, 0, sizeof pass);
    dtrain__job job = dtrain__job_make(&pass, args->count, DTRAIN__LINE, DTRAIN_DTYPE_F32);
    pass.args = args;
    pass.below = -1;
    pass.room = args->count + DTRAIN__TOPK_BLOCK;
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, head, &job.scratch));
    if (!few) {
        pass.below = dtrain__topk_threshold(args, job.scratch + DTRAIN__TOPK_BINS,
                                            (uint32_t *)(void *)job.scratch, &pass.room);
        if (pass.below < 0) pass.room = 0;
        else if (lists > 4) pass.room = 4 * pass.room / lists + DTRAIN__TOPK_BLOCK;
    }
    DTRAIN__TRY(dtrain__cpu_scratch(cpu, head + 2 * lists * pass.room, &job.scratch));
    uint32_t *bins = (uint32_t *)(void *)job.scratch;
    pass.found = (int64_t *)(void *)(job.scratch + DTRAIN__TOPK_BINS);
    pass.values = job.scratch + head;
    pass.indices = (int32_t *)(void *)(pass.values + lists * pass.room);
    memset(pass.found, 0, (size_t)lists * sizeof *pass.found);
    if (few) cpu->kernels->topk(&job, 0, args->count, 0);
    else dtrain__job_run(cpu, &job, cpu->kernels->topk, args->count);
    /* append the other lists to the first; found -1: a list was too short */
    int64_t found = pass.found[0];
    for (int i = 1; i < lists && found >= 0; i++) {
        const int64_t more = pass.found[i];
        if (more > 0) {
            const size_t bytes = (size_t)more * sizeof(float);
            memmove(pass.values + found, pass.values + i * pass.room, bytes);
            memmove(pass.indices + found, pass.indices + i * pass.room, bytes);
        }
        found = more < 0 ? more : found + more;
    }
    if (found >= args->k) dtrain__topk_take(args, pass.values, pass.indices, found, bins);
    else
        dtrain__topk_take(args, args->residual ? args->residual : args->x, NULL, args->count, bins);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__cpu_scatter_add(dtrain_device *device,
                                                      const dtrain_scatter_add_args *args)
{
    (void)device;
    if (args->k < 0)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "scatter_add: k is %lld, expected 0 or more",
                           (long long)args->k);
    for (int64_t i = 0; i < args->k; i++)
        if (args->indices[i] < 0 || args->indices[i] >= args->count)
            return dtrain_fail(DTRAIN_ERROR_DATA, "index %ld at place %lld is outside [0, %lld)",
                               (long)args->indices[i], (long long)i, (long long)args->count);
    for (int64_t i = 0; i < args->k; i++)
        args->out[args->indices[i]] += args->scale * args->values[i];
    return DTRAIN_OK;
}
