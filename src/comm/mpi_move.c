/* The MPI transport: large collectives in lanes, and messages */

#include "core/platform_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/engine_internal.h"
#include "comm/mpi_internal.h"

#ifdef DTRAIN_USE_MPI

static bool dtrain__mpi_adds(const dtrain_collective *what)
{
    return dtrain__kind_of(what->kind)->reduces;
}

/* Whether a collective has this lane at all: the table above. */
static bool dtrain__mpi_has_lane(const dtrain_comm *comm, const dtrain_collective *what,
                                 uint32_t use, int peer)
{
    const bool parts = use <= DTRAIN__PART_IN;
    const bool out = use == DTRAIN__PART_OUT || use == DTRAIN__RESULT_OUT;
    const int from = out ? comm->rank : peer, to = out ? peer : comm->rank;
    switch (what->kind) {
    case DTRAIN_COLLECTIVE_ALL_REDUCE: return true;
    case DTRAIN_COLLECTIVE_REDUCE: return parts || to == what->root;
    case DTRAIN_COLLECTIVE_BROADCAST: return parts ? from == what->root : to != what->root;
    case DTRAIN_COLLECTIVE_REDUCE_SCATTER:
    case DTRAIN_COLLECTIVE_ALL_TO_ALL: return parts;
    default: return !parts;
    }
}

/* Slice `owner` in bytes. */
static void dtrain__mpi_slice(const dtrain_comm *comm, const dtrain_collective *what, int owner,
                              size_t *first, size_t *length)
{
    const size_t unit = dtrain_dtype_bytes(what->dtype);
    if (what->kind == DTRAIN_COLLECTIVE_ALL_REDUCE || what->kind == DTRAIN_COLLECTIVE_REDUCE ||
        what->kind == DTRAIN_COLLECTIVE_BROADCAST) {
        dtrain__slice(what->count, unit, comm->size, owner, first, length);
    } else {
        *first = (size_t)owner * what->count;
        *length = what->count;
    }
    *first *= unit;
    *length *= unit;
}

static size_t dtrain__mpi_chunk(const dtrain__mpi_comm *comm, const dtrain_collective *what)
{
    const bool straight =
        what->kind == DTRAIN_COLLECTIVE_ALL_GATHER || what->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL;
    return straight ? DTRAIN__MPI_MESSAGE_BYTES : comm->chunk_bytes;
}

static size_t dtrain__mpi_chunks(const dtrain__mpi_comm *comm, const dtrain_collective *what,
                                 int owner)
{
    const size_t chunk = dtrain__mpi_chunk(comm, what);
    size_t first, length;
    dtrain__mpi_slice(&comm->base.base, what, owner, &first, &length);
    return length / chunk + (length % chunk != 0);
}

static dtrain__mpi_lane *dtrain__mpi_lane_of(const dtrain__mpi_comm *comm, uint32_t use, int peer)
{
    return &comm->lanes[use * (size_t)comm->base.base.size + (size_t)peer];
}

static char *dtrain__mpi_temporary(const dtrain__mpi_comm *comm, size_t chunk, int rank)
{
    const size_t half = chunk % DTRAIN__MPI_DEPTH * ((size_t)comm->base.base.size + 1);
    return comm->temporary + (half + (size_t)rank) * comm->chunk_bytes;
}

/* Where this rank's sum of a chunk goes; `at` and `first` in bytes. */
static char *dtrain__mpi_sum_at(const dtrain__mpi_comm *comm, const dtrain_collective *what,
                                size_t first, size_t at, size_t chunk)
{
    if (what->kind == DTRAIN_COLLECTIVE_REDUCE && what->root != comm->base.base.rank)
        return dtrain__mpi_temporary(comm, chunk, comm->base.base.size);
    return (char *)what->recv + (what->kind == DTRAIN_COLLECTIVE_REDUCE_SCATTER ? 0 : first) + at;
}

/* Chunk of a lane in memory. MPI does not write to what it sends, whatever its type says. */
static char *dtrain__mpi_place(const dtrain__mpi_comm *comm, const dtrain_collective *what,
                               uint32_t use, int peer, size_t chunk, size_t *bytes)
{
    const bool theirs = use == DTRAIN__PART_OUT || use == DTRAIN__RESULT_IN;
    const size_t each = dtrain__mpi_chunk(comm, what), at = chunk * each;
    char *send = (char *)(uintptr_t)what->send, *recv = (char *)what->recv;
    size_t first, length;
    dtrain__mpi_slice(&comm->base.base, what, theirs ? peer : comm->base.base.rank, &first,
                      &length);
    *bytes = length - at < each ? length - at : each;
    switch (use) {
    case DTRAIN__PART_OUT: return send + first + at;
    case DTRAIN__PART_IN:
        if (dtrain__mpi_adds(what)) return dtrain__mpi_temporary(comm, chunk, peer);
        return recv + (what->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL ? (size_t)peer * length : first) +
               at;
    case DTRAIN__RESULT_OUT:
        if (what->kind == DTRAIN_COLLECTIVE_ALL_GATHER) return send + at;
        return dtrain__mpi_sum_at(comm, what, first, at, chunk);
    default: return recv + first + at;
    }
}

/* Chunks of a lane that may be under way now. In place, a slice of the result may come when that
 * slice of the input is out. */
static size_t dtrain__mpi_limit(const dtrain__mpi_comm *comm, const dtrain_collective *what,
                                uint32_t use, int peer)
{
    const size_t all = dtrain__mpi_lane_of(comm, use, peer)->chunks;
    const bool adds = dtrain__mpi_adds(what);
    size_t limit = all;
    if (use == DTRAIN__PART_IN && adds) limit = comm->combined + DTRAIN__MPI_DEPTH;
    if (use == DTRAIN__RESULT_OUT && adds) limit = comm->combined;
    if (use == DTRAIN__RESULT_OUT && what->kind == DTRAIN_COLLECTIVE_BROADCAST &&
        what->root != comm->base.base.rank)
        limit = dtrain__mpi_lane_of(comm, DTRAIN__PART_IN, what->root)->done;
    if (use == DTRAIN__RESULT_IN && adds && what->send == what->recv)
        limit = dtrain__mpi_lane_of(comm, DTRAIN__PART_OUT, peer)->done;
    return limit < all ? limit : all;
}

static void dtrain__mpi_lane_post(dtrain__mpi_comm *comm, dtrain__mpi_work *work, uint32_t use,
                                  int peer)
{
    dtrain__mpi_lane *lane = dtrain__mpi_lane_of(comm, use, peer);
    const bool sends = use == DTRAIN__PART_OUT || use == DTRAIN__RESULT_OUT;
    while (lane->posted < lane->chunks && lane->posted < lane->done + DTRAIN__MPI_DEPTH &&
           lane->posted < dtrain__mpi_limit(comm, &work->base.what, use, peer) &&
           !comm->base.failed) {
        size_t bytes;
        char *at = dtrain__mpi_place(comm, &work->base.what, use, peer, lane->posted, &bytes);
        dtrain__mpi_post(comm, work, use, peer, lane->posted++, sends, at, bytes);
    }
}

/* Adds up the next chunk of this rank's slice, if all of it is there. */
static bool dtrain__mpi_combine(dtrain__mpi_comm *comm, const dtrain__mpi_work *work)
{
    const dtrain_collective *what = &work->base.what;
    const int size = comm->base.base.size, rank = comm->base.base.rank;
    const size_t c = comm->combined, at = c * comm->chunk_bytes;
    const char *in[DTRAIN_MAX_RANKS];
    size_t first, length;
    if (!dtrain__mpi_adds(what)) return false;
    dtrain__mpi_slice(&comm->base.base, what, rank, &first, &length);
    if (at >= length) return false;
    for (int i = 0; i < size; i++)
        if (i != rank && dtrain__mpi_lane_of(comm, DTRAIN__PART_IN, i)->done <= c) return false;
    if (what->kind == DTRAIN_COLLECTIVE_REDUCE &&
        rank != what->root && /* the place of the sum is taken */
        c >= dtrain__mpi_lane_of(comm, DTRAIN__RESULT_OUT, what->root)->done + DTRAIN__MPI_DEPTH)
        return false;
    for (int i = 0; i < size; i++) in[i] = dtrain__mpi_temporary(comm, c, i);
    in[rank] = (const char *)what->send + first + at;
    char *out = dtrain__mpi_sum_at(comm, what, first, at, c);
    const size_t bytes = length - at < comm->chunk_bytes ? length - at : comm->chunk_bytes;
    dtrain__combine(what, in, size, &out, 1, bytes / dtrain_dtype_bytes(what->dtype));
    comm->combined++;
    return true;
}

/* All ranks agree: the lanes of a large operation. What goes from this rank to itself is copied. */
static void dtrain__mpi_lanes_open(dtrain__mpi_comm *comm, dtrain__mpi_work *work)
{
    const dtrain_collective *what = &work->base.what;
    const int size = comm->base.base.size, rank = comm->base.base.rank;
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    void *memory;
    memset(comm->lanes, 0, DTRAIN__MPI_LANES * (size_t)size * sizeof *comm->lanes);
    comm->combined = 0;
    work->open = true;
    for (uint32_t use = 0; use < DTRAIN__MPI_LANES; use++)
        for (int i = 0; i < size; i++) {
            const bool theirs = use == DTRAIN__PART_OUT || use == DTRAIN__RESULT_IN;
            if (i != rank && dtrain__mpi_has_lane(&comm->base.base, what, use, i))
                dtrain__mpi_lane_of(comm, use, i)->chunks =
                    dtrain__mpi_chunks(comm, what, theirs ? i : rank);
        }
    if (what->kind == DTRAIN_COLLECTIVE_ALL_GATHER || what->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL) {
        const size_t cut = what->kind == DTRAIN_COLLECTIVE_ALL_TO_ALL ? (size_t)rank * bytes : 0;
        char *own = (char *)what->recv + (size_t)rank * bytes;
        if (own != (const char *)what->send + cut)
            memcpy(own, (const char *)what->send + cut, bytes);
    }
    if (!dtrain__mpi_adds(what) || comm->temporary) return;
    if (dtrain__mpi_map(comm->hub, DTRAIN__MPI_DEPTH * ((size_t)size + 1) * comm->chunk_bytes,
                        &memory) == DTRAIN_OK)
        comm->temporary = (char *)memory;
    else (void)dtrain__engine_fail(&comm->base.base, DTRAIN_ERROR_MEMORY, dtrain_last_error());
}

/* As far as it goes now; true when all lanes have reached their ends. */
static bool dtrain__mpi_lanes_move(dtrain__mpi_comm *comm, dtrain__mpi_work *work)
{
    const int size = comm->base.base.size, rank = comm->base.base.rank;
    do {
        for (int i = 1; i < size; i++)
            for (uint32_t use = 0; use < DTRAIN__MPI_LANES; use++)
                dtrain__mpi_lane_post(comm, work, use, (rank + i) % size);
        if (comm->base.failed) return false;
    } while (dtrain__mpi_combine(comm, work));
    for (size_t i = 0; i < DTRAIN__MPI_LANES * (size_t)size; i++)
        if (comm->lanes[i].done < comm->lanes[i].chunks) return false;
    return !dtrain__mpi_adds(&work->base.what) ||
           comm->combined == dtrain__mpi_chunks(comm, &work->base.what, rank);
}

/* A collective is over when the records of this rank are out, too: their slots are used again. */
DTRAIN__PRIVATE bool dtrain__mpi_move(dtrain__engine *base, dtrain__work *work, bool oldest)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    dtrain__mpi_work *own = (dtrain__mpi_work *)work;
    if (!work->small && !own->complete) {
        if (!oldest) return false;
        if (!own->open) dtrain__mpi_lanes_open(comm, own);
        if (base->failed) return false;
        own->complete = dtrain__mpi_lanes_move(comm, own);
    }
    return (work->small || own->complete) && own->unsent == 0;
}

/* Whom a large operation waits for: ranks that owe it a part, for without it there are no results;
 * else those that owe results; else those that do not take what is sent. */
static bool dtrain__mpi_lane_lags(const dtrain__mpi_comm *comm, int rank)
{
    static const uint32_t uses[] = {DTRAIN__PART_IN, DTRAIN__RESULT_IN, DTRAIN__PART_OUT,
                                    DTRAIN__RESULT_OUT};
    for (size_t u = 0; u < sizeof uses / sizeof *uses; u++) {
        const dtrain__mpi_lane *lanes = dtrain__mpi_lane_of(comm, uses[u], 0);
        for (int i = 0; i < comm->base.base.size; i++)
            if (lanes[i].done < lanes[i].posted) return lanes[rank].done < lanes[rank].posted;
    }
    return false;
}

DTRAIN__PRIVATE bool dtrain__mpi_lags(const dtrain__engine *comm, const dtrain__work *work,
                                      int rank)
{
    if (!work->sequence) return true;
    return ((const dtrain__mpi_work *)work)->open &&
           dtrain__mpi_lane_lags((const dtrain__mpi_comm *)comm, rank);
}

/* ---- Messages
 *
 * A head, with the data when it is small, then the data in pieces. */

static void dtrain__mpi_message_begin(dtrain__mpi_comm *comm, dtrain__mpi_work *work)
{
    const dtrain_collective *what = &work->base.what;
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    const bool sends = what->kind == DTRAIN_COLLECTIVE_SEND;
    const bool small = bytes <= comm->record_bytes - sizeof(dtrain__mpi_record);
    const size_t pieces =
        bytes / DTRAIN__MPI_MESSAGE_BYTES + (bytes % DTRAIN__MPI_MESSAGE_BYTES != 0);
    char *head = dtrain__mpi_slot(comm, !sends, DTRAIN__WINDOW, what->root);
    work->begun = true;
    work->lane.chunks = small ? 0 : pieces;
    work->unsent = sends;
    if (sends) dtrain__mpi_write(head, &work->base, what->send, small ? bytes : 0);
    dtrain__mpi_post(comm, work, DTRAIN__HEAD, what->root, 0, sends, head,
                     sends ? sizeof(dtrain__mpi_record) + (small ? bytes : 0) : comm->record_bytes);
}

/* Compare what was sent with what this receiver asked for, when the head has come. */
static bool dtrain__mpi_message_head(dtrain__mpi_comm *comm, dtrain__mpi_work *work)
{
    const dtrain_collective *what = &work->base.what;
    const char *head = dtrain__mpi_slot(comm, true, DTRAIN__WINDOW, what->root);
    dtrain__mpi_record record;
    memcpy(&record, head, sizeof record);
    work->compared = true;
    if (record.magic != DTRAIN__MPI_MAGIC || record.shown.count != what->count ||
        record.shown.dtype != (uint32_t)what->dtype) {
        (void)dtrain__message_differs(&comm->base, &work->base, (dtrain_dtype)record.shown.dtype,
                                      record.shown.count);
        return false;
    }
    if (!work->lane.chunks && what->count)
        memcpy(what->recv, head + sizeof record, what->count * dtrain_dtype_bytes(what->dtype));
    return true;
}

DTRAIN__PRIVATE bool dtrain__mpi_message(dtrain__engine *base, dtrain__work *own)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    dtrain__mpi_work *work = (dtrain__mpi_work *)own;
    const dtrain_collective *what = &own->what;
    const bool sends = what->kind == DTRAIN_COLLECTIVE_SEND;
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    char *buffer = sends ? (char *)(uintptr_t)what->send : (char *)what->recv;
    dtrain__mpi_lane *lane = &work->lane;
    if (!work->begun) dtrain__mpi_message_begin(comm, work);
    if (!sends && !work->headed) return false;
    if (!sends && !work->compared && !dtrain__mpi_message_head(comm, work)) return false;
    while (lane->posted < lane->chunks && lane->posted < lane->done + DTRAIN__MPI_DEPTH &&
           !base->failed) {
        const size_t at = lane->posted * DTRAIN__MPI_MESSAGE_BYTES, rest = bytes - at;
        dtrain__mpi_post(comm, work, DTRAIN__BODY, what->root, lane->posted++, sends, buffer + at,
                         rest < DTRAIN__MPI_MESSAGE_BYTES ? rest : DTRAIN__MPI_MESSAGE_BYTES);
    }
    return !base->failed && !work->unsent && lane->done == lane->chunks;
}

#endif /* DTRAIN_USE_MPI */
