/* Collectives: which rank sends what to which rank, and the results on one rank
 *
 * A large collective has one or two phases. Rank r owns slice r:
 *
 *                         parts of slice j         results of slice j
 *                         to rank j from           from rank j to       slices
 *         all-reduce      all                      all                  cut
 *         reduce          all                      root                 cut
 *         reduce-scatter  all                                           count elements each
 *         broadcast       root                     all but root         cut
 *         all-gather                               all                  count elements each
 *         all-to-all      all, not added                                count elements each
 *
 * dtrain__transfer_of returns the same for two ranks, and the transports move these bytes. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "device/device_internal.h"

static const dtrain__kind dtrain__kinds[] = {
    /*                                           reduces rooted cuts joins */
    {"?", "?", false, false, false, false},
    {"dtrain_all_reduce", "all-reduce", true, false, false, false},
    {"dtrain_reduce_scatter", "reduce-scatter", true, false, true, false},
    {"dtrain_all_gather", "all-gather", false, false, false, true},
    {"dtrain_broadcast", "broadcast", false, true, false, false},
    {"dtrain_reduce", "reduce", true, true, false, false},
    {"dtrain_barrier", "barrier", false, false, false, false},
    {"dtrain_send", "send", false, true, false, false},
    {"dtrain_recv", "recv", false, true, false, false},
    {"dtrain_comm_split", "split", false, false, false, true},
    {"dtrain_all_to_all", "all-to-all", false, false, true, true},
};

/* Return the row of a dtrain_collective_kind, or the row "?" of an unknown kind. */
DTRAIN__PRIVATE const dtrain__kind *dtrain__kind_of(uint32_t kind)
{
    return &dtrain__kinds[kind <= DTRAIN_COLLECTIVE_ALL_TO_ALL ? kind : 0];
}

/* Return the bytes of the send buffer; the next function, of the receive buffer. */
DTRAIN__PRIVATE size_t dtrain__send_bytes(const dtrain_collective *what, int size)
{
    return what->count * dtrain_dtype_bytes(what->dtype) *
           (dtrain__kind_of(what->kind)->cuts ? (size_t)size : 1);
}
DTRAIN__PRIVATE size_t dtrain__recv_bytes(const dtrain_collective *what, int size)
{
    return what->count * dtrain_dtype_bytes(what->dtype) *
           (dtrain__kind_of(what->kind)->joins ? (size_t)size : 1);
}

/* Return true if a rank's send buffer is read; the next function, if its receive buffer is
 * written. */
DTRAIN__PRIVATE bool dtrain__gives(const dtrain_collective *what, int rank)
{
    return what->kind != DTRAIN_COLLECTIVE_RECV &&
           (what->kind != DTRAIN_COLLECTIVE_BROADCAST || what->root == rank);
}
DTRAIN__PRIVATE bool dtrain__gets(const dtrain_collective *what, int rank)
{
    return what->kind != DTRAIN_COLLECTIVE_SEND &&
           (what->kind != DTRAIN_COLLECTIVE_BROADCAST || what->root != rank) &&
           (what->kind != DTRAIN_COLLECTIVE_REDUCE || what->root == rank);
}

/* Combine in_count inputs, in rank order, into out_count equal outputs; an output can be one of the
 * inputs. A single input is copied, which is exact for every dtype. */
DTRAIN__PRIVATE void dtrain__combine(const dtrain_collective *what, const char *const *in,
                                     int in_count, char *const *out, int out_count, size_t count)
{
    const dtrain__mix_job job = {in, out, in_count, out_count, count, what->dtype, what->op};
    if (in_count > 1) {
        dtrain__mix(&job);
        return;
    }
    for (int i = 0; i < out_count; i++)
        if (out[i] != in[0])
            dtrain__copy_lines(out[i], in[0], count * dtrain_dtype_bytes(what->dtype), false);
}

DTRAIN_API void dtrain_collective_result(const dtrain_comm *comm, const dtrain_collective *what,
                                         const void *const *in)
{
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    const char *from[DTRAIN_MAX_RANKS];
    char *out = (char *)what->recv;
    if (!bytes || !dtrain__gets(what, comm->rank)) return;
    for (int i = 0; i < comm->size; i++)
        from[i] =
            in[i] ? (const char *)in[i] + (kind->cuts ? (size_t)comm->rank * bytes : 0) : NULL;
    if (kind->reduces) dtrain__combine(what, from, comm->size, &out, 1, what->count);
    else if (!kind->joins) dtrain__combine(what, from + what->root, 1, &out, 1, what->count);
    for (int i = 0; kind->joins && i < comm->size; i++, out += bytes)
        dtrain__combine(what, from + i, 1, &out, 1, what->count);
}

/* Find the slice that a rank owns, in elements. If the call does not define slices, cut the buffer
 * at multiples of 64 bytes, so that no two ranks write to one cache line. */
DTRAIN__PRIVATE void dtrain__slice(const dtrain_collective *what, int size, int rank, size_t *first,
                                   size_t *length)
{
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const size_t count = what->count, r = (size_t)rank;
    *first = r * count;
    *length = count;
    if (kind->cuts || kind->joins) return;
    const size_t step = DTRAIN__CACHE_LINE / dtrain_dtype_bytes(what->dtype);
    const size_t steps = count / step + (count % step != 0);
    const size_t each = steps / (size_t)size, more = steps % (size_t)size;
    const size_t begin = (each * r + (r < more ? r : more)) * step;
    const size_t end = begin + (each + (r < more)) * step;
    *first = begin < count ? begin : count;
    *length = (end < count ? end : count) - *first;
}

/* Describe the bytes from rank `from` to rank `to` in a phase of a large collective, parts or
 * results; false if there are none. A part to be added has no target. */
DTRAIN__PRIVATE bool dtrain__transfer_of(const dtrain_collective *what, int size, bool results,
                                         int from, int to, dtrain__transfer *transfer)
{
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    size_t first, length;
    if (results ? kind->cuts || !dtrain__gets(what, to)
                : (kind->joins && !kind->cuts) || !dtrain__gives(what, from))
        return false;
    dtrain__slice(what, size, results ? from : to, &first, &length);
    transfer->bytes = length * unit;
    transfer->source = kind->joins && !kind->cuts ? 0 : first * unit;
    transfer->target = (kind->joins ? (size_t)from * length : first) * unit;
    return true;
}
