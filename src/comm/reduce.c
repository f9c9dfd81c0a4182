/* Results of collectives, on one rank */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "device/device_internal.h"

/* Combine in_count inputs in their order, which is that of the ranks, into out_count equal outputs;
 * an output may be one of the inputs. One input is a copy: exact for every dtype. */
DTRAIN__PRIVATE void dtrain__combine(const dtrain_collective *what, const char *const *in,
                                     int in_count, char *const *out, int out_count, size_t count)
{
    const size_t bytes = count * dtrain_dtype_bytes(what->dtype);
    dtrain__mix_job job;
    if (in_count == 1) {
        for (int i = 0; i < out_count; i++)
            if (out[i] != in[0]) memcpy(out[i], in[0], bytes);
        return;
    }
    job.in = in;
    job.out = out;
    job.in_count = in_count;
    job.out_count = out_count;
    job.count = count;
    job.dtype = what->dtype;
    job.op = what->op;
    dtrain__mix(&job);
}

/* Compute elements [first, first + count) of this rank's own result from everybody's input,
 * in (size). */
DTRAIN__PRIVATE void dtrain__pull(const dtrain_comm *comm, const dtrain_collective *what,
                                  const char *const *in, size_t first, size_t count)
{
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const int size = comm->size, rank = comm->rank;
    if (!count) return; /* a barrier has no buffers; a reduction has no recv but at the root */
    char *out = what->recv ? (char *)what->recv + first * unit : NULL;
    switch (what->kind) {
    case DTRAIN_COLLECTIVE_REDUCE:
        if (rank != what->root) break;
        /* fall through */
    case DTRAIN_COLLECTIVE_ALL_REDUCE:
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER: dtrain__combine(what, in, size, &out, 1, count); break;
    case DTRAIN_COLLECTIVE_BROADCAST:
        if (rank != what->root) memcpy(out, in[what->root], count * unit);
        break;
    default: /* all-gather, all-to-all, split */
        for (int i = 0; i < size; i++, out += what->count * unit)
            if (out != in[i]) memcpy(out, in[i], count * unit);
        break;
    }
}

/* Cut count elements into a slice for each rank, at multiples of 64 bytes so that no two ranks
 * write one line. */
DTRAIN__PRIVATE void dtrain__slice(size_t count, size_t unit, int size, int rank, size_t *first,
                                   size_t *length)
{
    const size_t step = DTRAIN__CACHE_LINE / unit, steps = count / step + (count % step != 0);
    const size_t each = steps / (size_t)size, more = steps % (size_t)size, r = (size_t)rank;
    const size_t begin = (each * r + (r < more ? r : more)) * step;
    const size_t end = begin + (each + (r < more)) * step;
    *first = begin < count ? begin : count;
    *length = (end < count ? end : count) - *first;
}
