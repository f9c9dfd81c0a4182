/* The local backend: shared structures
 *
 * Why a slot may be used again after 2 W operations without asking: a rank starts operation t only
 * after it has finished t - W. It finished it after it saw every rank at stage 1 of t - W; and
 * those ranks started t - W only after they had finished t - 2W, that is, after their last look at
 * its slots and payloads. So with 2 W slots nobody can still be reading what operation t
 * overwrites. */

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/local_internal.h"

#define DTRAIN__CHUNK_BYTES ((size_t)128 << 10) /* half a stage: two ranks' stages stay in L2 */

DTRAIN__PRIVATE dtrain__slot *dtrain__slot_of(const dtrain__local_comm *comm, int rank,
                                              uint64_t sequence)
{
    return &comm->parts[rank]->slots[sequence % DTRAIN__SLOTS];
}

/* ---- Failure
 *
 * The first rank that finds something wrong writes it into the first part; everybody returns
 * that. */

/* Whether the sentence is there. The rank that was to write it may have died between its two
 * stores: then the record of deaths, which is some 100 us behind, names it. */
static bool dtrain__sentence_is_there(const dtrain__local_comm *comm)
{
    const uint32_t *failed = &comm->base.world->control->first_failed;
    for (int i = 0; i < 100000; i++) {
        if (dtrain__load(&comm->parts[0]->failure) == 2) return true;
        if (dtrain__load(failed)) return dtrain__load(&comm->parts[0]->failure) == 2;
        sched_yield();
    }
    return false;
}

static dtrain_result dtrain__died_speaking(const dtrain_world *world)
{
    char text[160] = "a rank died while it was saying why it gave up";
    const uint32_t failed = dtrain__load(&world->control->first_failed);
    if (failed) dtrain__describe_end(world->control, (int)failed - 1, text, sizeof text);
    return dtrain_fail(DTRAIN_ERROR_PEER, "%s", text);
}

DTRAIN__PRIVATE dtrain_result dtrain__local_standing(dtrain__local_comm *comm)
{
    const dtrain__part *part = comm->parts[0];
    comm->failed = true;
    comm->queue = NULL; /* nothing in flight will be finished */
    comm->queue_end = &comm->queue;
    comm->base.in_flight = 0;
    if (!dtrain__sentence_is_there(comm)) return dtrain__died_speaking(comm->base.world);
    const dtrain_result code = (dtrain_result)part->failure_code;
    const bool everybodys = code == DTRAIN_ERROR_MISMATCH || code == DTRAIN_ERROR_TIMEOUT ||
                            code == DTRAIN_ERROR_PEER || part->failure_rank == comm->base.rank;
    if (everybodys) return dtrain_fail(code, "%s", part->failure_text);
    return dtrain_fail(DTRAIN_ERROR_PEER, "rank %d had to give up: %s",
                       comm->base.world_ranks[part->failure_rank], part->failure_text);
}

DTRAIN__PRIVATE dtrain_result dtrain__local_fail(dtrain_comm *base, dtrain_result code,
                                                 const char *text)
{
    dtrain__local_comm *comm = (dtrain__local_comm *)base;
    dtrain__part *part = comm->parts[0];
    uint32_t none = 0;
    if (__atomic_compare_exchange_n(&part->failure, &none, 1, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE)) {
        part->failure_code = (int32_t)code;
        part->failure_rank = base->rank;
        snprintf(part->failure_text, sizeof part->failure_text, "%s", dtrain__bare(text));
        dtrain__store(&part->failure, 2);
    }
    return dtrain__local_standing(comm);
}

DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE dtrain_result dtrain__local_failf(dtrain__local_comm *comm, dtrain_result code,
                                                  const char *format, ...)
{
    char text[480];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return dtrain__local_fail(&comm->base, code, text);
}

/* ---- Collectives ------------------------------------------------------------------------------*/

static void dtrain__slot_what(const dtrain__slot *slot, dtrain_collective *what)
{
    memset(what, 0, sizeof *what);
    what->kind = slot->kind;
    what->dtype = (dtrain_dtype)slot->dtype;
    what->op = slot->op;
    what->root = slot->root;
    what->count = (size_t)slot->count;
}

/* Compares what another rank calls with what this rank calls. */
DTRAIN__PRIVATE dtrain_result dtrain__compare(dtrain__local_comm *comm,
                                              const dtrain__local_work *work, int rank)
{
    const dtrain__slot *slot = dtrain__slot_of(comm, rank, work->sequence);
    const dtrain_collective *mine = &work->what;
    dtrain_collective theirs;
    char a[80], b[80];
    if (slot->kind == mine->kind && slot->dtype == (uint32_t)mine->dtype && slot->op == mine->op &&
        slot->root == mine->root && slot->count == mine->count)
        return DTRAIN_OK;
    dtrain__slot_what(slot, &theirs);
    const bool first = rank < comm->base.rank;
    dtrain__describe(first ? &theirs : mine, a, sizeof a);
    dtrain__describe(first ? mine : &theirs, b, sizeof b);
    const int me = comm->base.world_ranks[comm->base.rank], other = comm->base.world_ranks[rank];
    return dtrain__local_failf(comm, DTRAIN_ERROR_MISMATCH,
                               "collective #%llu differs: rank %d called %s, rank %d called %s",
                               (unsigned long long)work->sequence, first ? other : me, a,
                               first ? me : other, b);
}

DTRAIN__PRIVATE bool dtrain__reached(const dtrain__local_comm *comm, const dtrain__local_work *work,
                                     int rank)
{
    const uint64_t goal = work->sequence << DTRAIN__STAGE_BITS | work->stage;
    return dtrain__load(&dtrain__slot_of(comm, rank, work->sequence)->progress) >= goal;
}

DTRAIN__PRIVATE bool dtrain__all_reached(const dtrain__local_comm *comm, dtrain__local_work *work)
{
    while (work->seen < comm->base.size && dtrain__reached(comm, work, work->seen)) work->seen++;
    return work->seen == comm->base.size;
}

DTRAIN__PRIVATE void dtrain__reach(const dtrain__local_comm *comm, dtrain__local_work *work,
                                   uint32_t stage)
{
    work->stage = stage;
    work->seen = 0;
    dtrain__store(&dtrain__slot_of(comm, comm->base.rank, work->sequence)->progress,
                  work->sequence << DTRAIN__STAGE_BITS | stage);
}

DTRAIN__PRIVATE bool dtrain__is_small(const dtrain_collective *what, int size)
{
    const size_t bytes = dtrain__send_count(what, size) * dtrain_dtype_bytes(what->dtype);
    return bytes <= DTRAIN__SMALL_BYTES && bytes * (size_t)size <= DTRAIN__SMALL_TOTAL;
}

/* The buffers that other ranks would touch on the direct path are where they can touch them. */
static bool dtrain__is_direct(const dtrain_comm *comm, const dtrain_collective *what)
{
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const bool given = what->kind == DTRAIN_COLLECTIVE_ALL_REDUCE ||
                       what->kind == DTRAIN_COLLECTIVE_BROADCAST ||
                       (what->kind == DTRAIN_COLLECTIVE_REDUCE && what->root == comm->rank);
    if (comm->size == 1) return true;
    return dtrain__is_shared(comm->world, what->send,
                             dtrain__send_count(what, comm->size) * unit) &&
           (!given || dtrain__is_shared(comm->world, what->recv, what->count * unit));
}

/* Stage 1: what this rank calls, with the data when it is small. */
DTRAIN__PRIVATE void dtrain__show(dtrain__local_comm *comm, dtrain__local_work *work)
{
    const dtrain_collective *what = &work->what;
    dtrain__slot *slot = dtrain__slot_of(comm, comm->base.rank, work->sequence);
    const size_t bytes =
        dtrain__send_count(what, comm->base.size) * dtrain_dtype_bytes(what->dtype);
    const bool gives = what->kind != DTRAIN_COLLECTIVE_BROADCAST || what->root == comm->base.rank;
    slot->count = what->count;
    slot->send = (const char *)what->send;
    slot->recv = (char *)what->recv;
    slot->kind = what->kind;
    slot->dtype = (uint32_t)what->dtype;
    slot->op = what->op;
    slot->root = what->root;
    slot->direct = dtrain__is_direct(&comm->base, what);
    slot->started_ns = work->started_ns;
    if (bytes && gives && dtrain__is_small(what, comm->base.size))
        memcpy(slot->payload, what->send, bytes);
    dtrain__reach(comm, work, 1);
}

/* Elements [first, first + count) of this rank's own result from everybody's input, in (size). */
static void dtrain__pull(const dtrain__local_comm *comm, const dtrain_collective *what,
                         const char *const *in, size_t first, size_t count)
{
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const int size = comm->base.size, rank = comm->base.rank;
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

DTRAIN__PRIVATE void dtrain__small_path(const dtrain__local_comm *comm,
                                        const dtrain__local_work *work)
{
    const dtrain_collective *what = &work->what;
    const char *in[DTRAIN_MAX_RANKS];
    const size_t slice = dtrain__cuts(what) ? (size_t)comm->base.rank * what->count : 0;
    for (int i = 0; i < comm->base.size; i++)
        in[i] = dtrain__slot_of(comm, i, work->sequence)->payload +
                slice * dtrain_dtype_bytes(what->dtype);
    dtrain__pull(comm, what, in, 0, what->count);
}

/* Slice `rank` of count elements, cut at multiples of 64 bytes so that no two ranks write one
 * line. */
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

DTRAIN__PRIVATE void dtrain__direct_path(const dtrain__local_comm *comm,
                                         const dtrain__local_work *work)
{
    const dtrain_collective *what = &work->what;
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    const int size = comm->base.size, rank = comm->base.rank;
    const bool sliced = what->kind == DTRAIN_COLLECTIVE_ALL_REDUCE ||
                        what->kind == DTRAIN_COLLECTIVE_REDUCE ||
                        what->kind == DTRAIN_COLLECTIVE_BROADCAST;
    const char *in[DTRAIN_MAX_RANKS];
    char *out[DTRAIN_MAX_RANKS];
    size_t first = 0, length = what->count;
    int outs = 0;
    if (sliced) dtrain__slice(what->count, unit, size, rank, &first, &length);
    else if (dtrain__cuts(what)) first = (size_t)rank * what->count;
    for (int i = 0; i < size; i++) {
        const dtrain__slot *slot = dtrain__slot_of(comm, i, work->sequence);
        in[i] = slot->send + first * unit;
        const bool receives = what->kind == DTRAIN_COLLECTIVE_ALL_REDUCE ||
                              (what->kind == DTRAIN_COLLECTIVE_REDUCE) == (i == what->root);
        if (sliced && receives) out[outs++] = slot->recv + first * unit;
    }
    if (!sliced) dtrain__pull(comm, what, in, 0, length);
    else if (what->kind == DTRAIN_COLLECTIVE_BROADCAST)
        dtrain__combine(what, in + what->root, 1, out, outs, length);
    else dtrain__combine(what, in, size, out, outs, length);
}

/* ---- The staged path
 *
 *     chunk c    copy in -> reach c + 2 -> all there -> pull -> copy c + 1 in -> reach c + 3
 *
 * Chunk c + 1 goes into the half that held chunk c - 1. All ranks have pulled that one: they
 * reached stage c + 2, which comes after their pull of c - 1. The last stage, chunks + 2, says that
 * all have pulled everything and the stages are free for the next operation, so only the oldest one
 * in flight uses them. */

DTRAIN__PRIVATE size_t dtrain__chunk_count(const dtrain__local_comm *comm,
                                           const dtrain_collective *what)
{
    const size_t pieces = dtrain__cuts(what) ? (size_t)comm->base.size : 1;
    return DTRAIN__CHUNK_BYTES / dtrain_dtype_bytes(what->dtype) / pieces;
}

/* Copies chunk c of this rank's input into its stage: one piece, or one for each rank's slice. */
DTRAIN__PRIVATE dtrain_result dtrain__stage_in(dtrain__local_comm *comm,
                                               const dtrain_collective *what, size_t c)
{
    dtrain__part *part = comm->parts[comm->base.rank];
    const size_t unit = dtrain_dtype_bytes(what->dtype), chunk = dtrain__chunk_count(comm, what);
    const size_t rest = what->count - c * chunk, length = rest < chunk ? rest : chunk;
    const size_t pieces = dtrain__send_count(what, comm->base.size) / what->count;
    if (what->kind == DTRAIN_COLLECTIVE_BROADCAST && what->root != comm->base.rank)
        return DTRAIN_OK;
    if (!part->stage) {
        void *stage;
        if (dtrain__shared_alloc(comm->base.world, 2 * DTRAIN__CHUNK_BYTES, &stage) != DTRAIN_OK)
            return dtrain__local_fail(&comm->base, DTRAIN_ERROR_MEMORY, dtrain_last_error());
        part->stage = (char *)stage;
    }
    char *half = part->stage + c % 2 * DTRAIN__CHUNK_BYTES;
    for (size_t i = 0; i < pieces; i++)
        memcpy(half + i * chunk * unit,
               (const char *)what->send + (i * what->count + c * chunk) * unit, length * unit);
    comm->base.info.staged_bytes += pieces * length * unit;
    return DTRAIN_OK;
}

DTRAIN__PRIVATE void dtrain__stage_out(dtrain__local_comm *comm, const dtrain_collective *what,
                                       size_t c)
{
    const char *in[DTRAIN_MAX_RANKS];
    const size_t unit = dtrain_dtype_bytes(what->dtype), chunk = dtrain__chunk_count(comm, what);
    const size_t rest = what->count - c * chunk, length = rest < chunk ? rest : chunk;
    const size_t slice = dtrain__cuts(what) ? (size_t)comm->base.rank * chunk : 0;
    for (int i = 0; i < comm->base.size; i++) {
        const char *stage = comm->parts[i]->stage; /* NULL on ranks that give nothing */
        in[i] = stage ? stage + c % 2 * DTRAIN__CHUNK_BYTES + slice * unit : NULL;
    }
    dtrain__pull(comm, what, in, c * chunk, length);
}
