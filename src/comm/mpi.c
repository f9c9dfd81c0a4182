/* The MPI transport
 *
 * MPI only carries bytes between two ranks: MPI_Isend and MPI_Irecv on one duplicate of the
 * program's communicator, and MPI_Testsome during dtrain's calls. MPI does not compare calls, has
 * no deadline and fixes no order of additions: the engine and this file do. A collective sends:
 *
 *     records    from every rank to every other rank: | call | small data |. All calls must be
 *                equal; a small operation is then complete
 *     parts      chunk c of slice j, from each rank that contributes to it, to rank j
 *     results    rank j adds the parts in rank order and sends the sum to each receiving rank
 *
 *     rank 0   send  | slice 0 | slice 1 | slice 2 |          parts: chunk c of its slice 0 to
 *     rank 1   send  | slice 0 | slice 1 | slice 2 |          rank 0, of slice 1 to rank 1, ...
 *     rank 2   send  | slice 0 | slice 1 | slice 2 |          results: the other way, to everybody
 *
 * (comm/reduce.c lists the ranks that contribute and receive.) Large operations move in rounds.
 * Round r moves the parts of chunk r and the results of chunk r - 1. When all of them have arrived,
 * this rank computes the sum of chunk r, and the next round begins. So temporary memory does not
 * depend on the count: it holds one chunk from every other rank, and the sum at this rank's place.
 * Only the oldest operation moves in rounds; ranks exchange records of later operations meanwhile.
 * A rank posts all requests of a round before it waits for any, so there is no deadlock.
 *
 * A message moves one record, which contains small data, and then large data in pieces.
 *
 * A communicator is a range of tags, and MPI keeps messages of one tag in order. After the ranks
 * have met, no MPI call that can block is made; after a failure, no MPI call at all, and buffers of
 * requests in flight stay mapped until the process ends. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/engine_internal.h"
#include "comm/mpi_internal.h"
#include "device/backend.h"
#include "device/device.h"

#ifdef DTRAIN_USE_MPI

#define DTRAIN__MPI_TEMPORARY ((size_t)4 << 20) /* most bytes of the chunks of all ranks */

/* The purpose of a request. If an operation hangs, the smallest pending purpose names the late
 * ranks: a missing part delays all results, and a missing result can delay a peer's receives. */
typedef enum dtrain__mpi_use {
    DTRAIN__PART_IN = 0,
    DTRAIN__RESULT_IN = 1,
    DTRAIN__SENT = 2,
    DTRAIN__RECORD_IN = 3
} dtrain__mpi_use;

typedef struct dtrain__mpi_work {
    dtrain_transport_work base;
    int pending;  /* requests in flight, without receives of records */
    size_t round; /* next round; of a message: 0 is the record, n is piece n - 1 */
} dtrain__mpi_work;

typedef struct dtrain__mpi_token {
    dtrain__mpi_work *work;
    dtrain__mpi_use use;
    int rank;
} dtrain__mpi_token;

/* A rank's call and small data. Messages of MPI begin at `call`. */
typedef struct dtrain__mpi_record {
    uint64_t heard; /* number of the last collective received; 1 for a message */
    dtrain_call call;
    char data[DTRAIN_SMALL_BYTES]; /* less if there are many ranks */
} dtrain__mpi_record;

typedef struct dtrain__mpi_comm {
    dtrain_comm base;
    dtrain__mpi_hub *hub, own; /* hub: `own` of the world's communicator, shared by all */
    int active;                /* requests in flight; used entries of requests and tokens */
    MPI_Request *requests;     /* (room), as the next three */
    dtrain__mpi_token *tokens;
    MPI_Status *statuses;
    int *indices;
    char *records;   /* (window + 1, 2 size) see dtrain__mpi_record_of */
    char *temporary; /* (size, chunk_bytes) */
    size_t record_bytes, chunk_bytes;
    char *memory; /* holds all arrays above */
    size_t memory_bytes;
} dtrain__mpi_comm;

/* ---- Aborts -----------------------------------------------------------------------------------*/

/* Receive another rank's abort, in a world without a link. */
static void dtrain__mpi_hear(dtrain_world *world, dtrain__mpi_hub *hub)
{
    const dtrain__abort_record *abort = &hub->aborts[1];
    int heard = 0;
    if (hub->failed || hub->hearing == MPI_REQUEST_NULL) return;
    if (MPI_Test(&hub->hearing, &heard, MPI_STATUS_IGNORE) == MPI_SUCCESS && heard)
        (void)dtrain__record_abort(world->control, &world->control->aborted, abort->rank,
                                   (dtrain_result)abort->code, abort->text);
}

/* Send this rank's abort to all ranks, or receive an abort. After this rank's abort nothing else is
 * sent, so MPI gets 0.1 s to send it. Memory that MPI can still read stays mapped. */
static void dtrain__mpi_tell(dtrain_world *world)
{
    dtrain__mpi_hub *hub = world->comm ? ((dtrain__mpi_comm *)world->comm)->hub : NULL;
    const uint64_t until = dtrain__now_ns() + 100000000u;
    MPI_Request sends[DTRAIN_MAX_RANKS];
    MPI_Status statuses[DTRAIN_MAX_RANKS];
    int count = 0, done = 0;
    if (!hub || hub->failed) return;
    if (!dtrain__load(&world->control->aborted.state)) {
        dtrain__mpi_hear(world, hub);
        return;
    }
    hub->failed = true;
    hub->aborts[0] = world->control->aborted;
    for (int i = 0; i < world->size; i++)
        if (i != world->rank &&
            MPI_Isend(&hub->aborts[0], (int)sizeof hub->aborts[0], MPI_BYTE, hub->ranks[i],
                      DTRAIN__TAG_ABORT, hub->mpi, &sends[count]) == MPI_SUCCESS)
            count++;
    while (!done && dtrain__now_ns() < until)
        if (MPI_Testall(count, sends, &done, statuses) != MPI_SUCCESS) break;
}

/* ---- Requests ---------------------------------------------------------------------------------*/

/* Return true if the world has failed: no more MPI calls. */
static bool dtrain__mpi_failed(const dtrain__mpi_comm *comm)
{
    if (dtrain__load(&comm->base.world->control->aborted.state)) comm->hub->failed = true;
    return comm->hub->failed;
}

/* Fail with MPI's error text. MPI can notice a dead rank before the control page has its exit
 * record, which makes a better sentence: so first wait a second for that. */
static void dtrain__mpi_refused(dtrain__mpi_comm *comm, int code, const char *call)
{
    dtrain__wait wait = dtrain__wait_begin();
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    dtrain_result turn = DTRAIN_OK;
    while (turn == DTRAIN_OK && wait.waited_ns < 1000000000u)
        turn = dtrain__wait_turn(comm->base.world, &wait);
    if (turn == DTRAIN_ERROR_PEER && !dtrain__engine_ok(&comm->base, turn)) return;
    MPI_Error_string(code, text, &length);
    (void)dtrain__engine_failf(&comm->base, DTRAIN_ERROR_SYSTEM, "%s failed: %.300s", call, text);
}

static void dtrain__mpi_post(dtrain__mpi_comm *comm, dtrain__mpi_work *work, dtrain__mpi_use use,
                             dtrain__mpi_tag kind, int rank, void *at, size_t bytes)
{
    const int peer = comm->hub->ranks[comm->base.world_ranks[rank]];
    const int tag = (int)comm->base.number * DTRAIN__MPI_TAGS + (int)kind;
    const MPI_Comm mpi = comm->hub->mpi;
    dtrain__mpi_token *token = &comm->tokens[comm->active];
    MPI_Request *request = &comm->requests[comm->active];
    if (dtrain__mpi_failed(comm)) return;
    const int code = use == DTRAIN__SENT
                         ? MPI_Isend(at, (int)bytes, MPI_BYTE, peer, tag, mpi, request)
                         : MPI_Irecv(at, (int)bytes, MPI_BYTE, peer, tag, mpi, request);
    if (code != MPI_SUCCESS) {
        dtrain__mpi_refused(comm, code, use == DTRAIN__SENT ? "MPI_Isend" : "MPI_Irecv");
        return;
    }
    token->work = work;
    token->use = use;
    token->rank = rank;
    work->pending += use != DTRAIN__RECORD_IN;
    comm->active++;
}

/* Return a record of a collective, or of messages (sequence 0). Place r < size receives from rank
 * r. The places from `size` on hold records that this rank sends: one for all ranks in a
 * collective, else one for each peer. */
static dtrain__mpi_record *dtrain__mpi_record_of(const dtrain__mpi_comm *comm, uint64_t sequence,
                                                 int place)
{
    const size_t line = sequence ? sequence % DTRAIN_WINDOW : DTRAIN_WINDOW;
    const size_t at = line * 2 * (size_t)comm->base.size + (size_t)place;
    return (dtrain__mpi_record *)(void *)(comm->records + at * comm->record_bytes);
}

static void dtrain__mpi_post_record(dtrain__mpi_comm *comm, dtrain__mpi_work *work,
                                    dtrain__mpi_tag kind, int rank)
{
    dtrain__mpi_post(comm, work, DTRAIN__RECORD_IN, kind, rank,
                     &dtrain__mpi_record_of(comm, work->base.sequence, rank)->call,
                     comm->record_bytes - offsetof(dtrain__mpi_record, call));
}

/* Remove completed requests. Call MPI even without requests in flight: it can still have data of
 * completed sends to move. */
static void dtrain__mpi_poll(dtrain_comm *base)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    int count = 0, kept = 0, class_of = MPI_SUCCESS;
    dtrain__mpi_hear(base->world, comm->hub);
    if (dtrain__mpi_failed(comm)) return;
    if (!comm->active && !base->in_flight)
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm->hub->mpi, &count, MPI_STATUS_IGNORE);
    if (!comm->active) return;
    int code = MPI_Testsome(comm->active, comm->requests, &count, comm->indices, comm->statuses);
    if (code != MPI_SUCCESS) {
        MPI_Error_class(code, &class_of);
        for (int i = 0; class_of == MPI_ERR_IN_STATUS && i < count; i++)
            if (comm->statuses[i].MPI_ERROR != MPI_SUCCESS) code = comm->statuses[i].MPI_ERROR;
        dtrain__mpi_refused(comm, code, "MPI_Testsome");
        return;
    }
    if (count == MPI_UNDEFINED || count == 0) return;
    for (int i = 0; i < count; i++) {
        const dtrain__mpi_token *token = &comm->tokens[comm->indices[i]];
        const uint64_t sequence = token->work->base.sequence;
        if (token->use != DTRAIN__RECORD_IN) token->work->pending--;
        else dtrain__mpi_record_of(comm, sequence, token->rank)->heard = sequence ? sequence : 1;
    }
    for (int i = 0; i < comm->active; i++) {
        if (comm->requests[i] == MPI_REQUEST_NULL) continue;
        comm->requests[kept] = comm->requests[i];
        comm->tokens[kept++] = comm->tokens[i];
    }
    comm->active = kept;
    ++*base->moves;
}

/* Write this rank's call and then, if it is small, its input; return the bytes. */
static size_t dtrain__mpi_write_shown(const dtrain_transport_work *work, dtrain_call *at)
{
    const size_t bytes = work->small ? work->send_bytes : 0;
    *at = work->call;
    if (bytes) memcpy(at + 1, work->what.send, bytes);
    return sizeof *at + bytes;
}

static void dtrain__mpi_show(dtrain_comm *base, dtrain_transport_work *work)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    dtrain__mpi_work *own = (dtrain__mpi_work *)work;
    const int size = base->size, rank = base->rank;
    dtrain_call *record = &dtrain__mpi_record_of(comm, work->sequence, size)->call;
    const size_t bytes = dtrain__mpi_write_shown(work, record);
    for (int i = 1; i < size; i++)
        dtrain__mpi_post_record(comm, own, DTRAIN__TAG_RECORD, (rank + size - i) % size);
    for (int i = 1; i < size; i++)
        dtrain__mpi_post(comm, own, DTRAIN__SENT, DTRAIN__TAG_RECORD, (rank + i) % size, record,
                         bytes);
}

static const dtrain_call *dtrain__mpi_heard(const dtrain_comm *base, uint64_t sequence, int rank)
{
    const dtrain__mpi_comm *comm = (const dtrain__mpi_comm *)base;
    const dtrain__mpi_record *record = dtrain__mpi_record_of(comm, sequence, rank);
    return record->heard && record->heard >= sequence ? &record->call : NULL;
}

/* ---- Messages ---------------------------------------------------------------------------------*/

/* A receiver first posts the record, whose call the engine compares. */
static bool dtrain__mpi_message(dtrain__mpi_comm *comm, dtrain__mpi_work *own)
{
    dtrain_transport_work *work = &own->base;
    const dtrain_collective *what = &work->what;
    const int size = comm->base.size;
    const bool sends = what->kind == DTRAIN_COLLECTIVE_SEND;
    const size_t all = work->small ? 0 : dtrain__send_bytes(what, size);
    dtrain__mpi_record *record = dtrain__mpi_record_of(comm, 0, what->root + (sends ? size : 0));
    for (; !own->pending && !dtrain__mpi_failed(comm); own->round++) {
        const size_t at = (own->round - 1) * DTRAIN__MPI_MESSAGE_BYTES, rest = all - at;
        char *buffer = sends ? (char *)(uintptr_t)what->send : (char *)what->recv;
        if (own->round == 0) {
            if (sends)
                dtrain__mpi_post(comm, own, DTRAIN__SENT, DTRAIN__TAG_MESSAGE, what->root,
                                 &record->call, dtrain__mpi_write_shown(work, &record->call));
            else dtrain__mpi_post_record(comm, own, DTRAIN__TAG_MESSAGE, what->root);
            continue;
        }
        if (!sends && !work->agreed) return false;
        if (!sends) record->heard = 0; /* the next call has not arrived */
        if (own->round == 1 && !sends && work->small && what->count)
            memcpy(what->recv, record->data, work->recv_bytes);
        if (at >= all) return true;
        dtrain__mpi_post(comm, own, sends ? DTRAIN__SENT : DTRAIN__PART_IN, DTRAIN__TAG_MESSAGE,
                         what->root, buffer + at,
                         rest < DTRAIN__MPI_MESSAGE_BYTES ? rest : DTRAIN__MPI_MESSAGE_BYTES);
    }
    return false;
}

/* ---- Rounds -----------------------------------------------------------------------------------*/

/* Return the chunk size. All-gather and all-to-all add nothing, so they receive large messages at
 * the final address. */
static size_t dtrain__mpi_chunk(const dtrain__mpi_comm *comm, const dtrain_collective *what)
{
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    return kind->joins ? DTRAIN__MPI_MESSAGE_BYTES : comm->chunk_bytes;
}

/* Find chunk c of a transfer; false if there is none. */
static bool dtrain__mpi_chunk_of(const dtrain__mpi_comm *comm, const dtrain_collective *what,
                                 bool results, int from, int to, size_t c, dtrain__transfer *chunk)
{
    const size_t each = dtrain__mpi_chunk(comm, what), at = c * each;
    if (!dtrain__transfer_of(what, comm->base.size, results, from, to, chunk)) return false;
    if (at >= chunk->bytes) return false;
    chunk->source += at;
    chunk->target += at;
    chunk->bytes = chunk->bytes - at < each ? chunk->bytes - at : each;
    return true;
}

/* Return the address of chunk c of this rank's sum: in recv if this rank receives it, else in
 * temporary memory. */
static char *dtrain__mpi_sum(const dtrain__mpi_comm *comm, const dtrain_collective *what, size_t c,
                             size_t offset)
{
    const int rank = comm->base.rank;
    if (!dtrain__gets(what, rank)) return comm->temporary + (size_t)rank * comm->chunk_bytes;
    return (char *)what->recv +
           (dtrain__kind_of(what->kind)->cuts ? c * comm->chunk_bytes : offset);
}

/* Post the send or the receive of chunk c between `from` and `to`, one of which is this rank.
 * results: second phase. MPI only reads a send buffer, though old versions lack the const. */
static void dtrain__mpi_post_chunk(dtrain__mpi_comm *comm, dtrain__mpi_work *work, bool results,
                                   int from, int to, size_t c)
{
    const dtrain_collective *what = &work->base.what;
    const bool reduces = dtrain__kind_of(what->kind)->reduces;
    dtrain__transfer chunk;
    if (!dtrain__mpi_chunk_of(comm, what, results, from, to, c, &chunk)) return;
    if (from == comm->base.rank)
        dtrain__mpi_post(comm, work, DTRAIN__SENT, DTRAIN__TAG_ROUND, to,
                         results && reduces ? dtrain__mpi_sum(comm, what, c, chunk.source)
                                            : (char *)(uintptr_t)what->send + chunk.source,
                         chunk.bytes);
    else
        dtrain__mpi_post(comm, work, results ? DTRAIN__RESULT_IN : DTRAIN__PART_IN,
                         DTRAIN__TAG_ROUND, from,
                         !results && reduces ? comm->temporary + (size_t)from * comm->chunk_bytes
                                             : (char *)what->recv + chunk.target,
                         chunk.bytes);
}

/* Post rounds until one is in flight; return true when the collective is complete. The sends of
 * this rank's records count as pending: the collective DTRAIN_WINDOW later reuses their buffers. */
static bool dtrain__mpi_move(dtrain_comm *base, dtrain_transport_work *work)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    dtrain__mpi_work *own = (dtrain__mpi_work *)work;
    const dtrain_collective *what = &work->what;
    const dtrain__kind *kind = dtrain__kind_of(what->kind);
    const int size = base->size, rank = base->rank;
    const size_t lag = kind->joins ? 0 : 1; /* results of chunk c travel in round c + lag */
    const size_t unit = dtrain_dtype_bytes(what->dtype), each = dtrain__mpi_chunk(comm, what);
    size_t first, length; /* of slice 0, which is the longest */
    dtrain__transfer chunk;
    if (!work->sequence) return dtrain__mpi_message(comm, own);
    if (own->pending || work->small) return !own->pending;
    if (!work->oldest) return false;
    dtrain__slice(what, size, 0, &first, &length);
    const size_t chunks = length * unit / each + (length * unit % each != 0);
    for (; !own->pending && !dtrain__mpi_failed(comm); own->round++) {
        const size_t r = own->round;
        if (r == 0 && kind->joins) { /* this rank's own part */
            const size_t slice = (size_t)rank * what->count * unit;
            const char *from = (const char *)what->send + (kind->cuts ? slice : 0);
            char *to = (char *)what->recv + slice;
            if (from != to) memcpy(to, from, what->count * unit);
        }
        /* Add up the parts of chunk r - 1 of this rank's slice, which have all arrived. */
        if (r && kind->reduces &&
            dtrain__mpi_chunk_of(comm, what, false, rank, rank, r - 1, &chunk)) {
            const char *in[DTRAIN_MAX_RANKS];
            char *out = dtrain__mpi_sum(comm, what, r - 1, chunk.source);
            for (int i = 0; i < size; i++) in[i] = comm->temporary + (size_t)i * comm->chunk_bytes;
            in[rank] = (const char *)what->send + chunk.source;
            dtrain__combine(what, in, size, &out, 1, chunk.bytes / unit);
        }
        if (r == chunks + (kind->cuts ? 0 : lag)) return true;
        for (int i = 1; i < size; i++) {
            const int peer = (rank + i) % size;
            dtrain__mpi_post_chunk(comm, own, false, rank, peer, r);
            dtrain__mpi_post_chunk(comm, own, false, peer, rank, r);
            if (r >= lag) dtrain__mpi_post_chunk(comm, own, true, rank, peer, r - lag);
            if (r >= lag) dtrain__mpi_post_chunk(comm, own, true, peer, rank, r - lag);
        }
    }
    return false;
}

static bool dtrain__mpi_lags(const dtrain_comm *base, const dtrain_transport_work *work, int rank)
{
    const dtrain__mpi_comm *comm = (const dtrain__mpi_comm *)base;
    dtrain__mpi_use first = DTRAIN__RECORD_IN;
    bool lags = false;
    if (!work->sequence) return true;
    for (int i = 0; i < comm->active; i++) {
        const dtrain__mpi_token *token = &comm->tokens[i];
        if (&token->work->base != work || token->use > first) continue;
        lags = (lags && token->use == first) || token->rank == rank;
        first = token->use;
    }
    return lags;
}

/* ---- Memory, failure, life --------------------------------------------------------------------*/

static size_t dtrain__mpi_pages(size_t bytes)
{
    const size_t most = SIZE_MAX / 2;
    return dtrain__round_up(bytes < 1 ? 1 : bytes < most ? bytes : most, dtrain__page_bytes());
}

static dtrain_result dtrain__mpi_map(dtrain_comm *comm, size_t asked, void **out)
{
    const size_t bytes = dtrain__mpi_pages(asked);
    *out = NULL;
    DTRAIN__TRY(dtrain__promise(comm->world, bytes));
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        dtrain__unpromise(comm->world, bytes);
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "communicator memory: no %zu bytes: %s", bytes,
                           strerror(errno));
    }
    *out = memory;
    return DTRAIN_OK;
}

/* Unmap memory, except after a failure: MPI can still write to it. */
static void dtrain__mpi_unmap(dtrain_comm *comm, void *memory, size_t asked)
{
    const size_t bytes = dtrain__mpi_pages(asked);
    if (!dtrain__mpi_failed((dtrain__mpi_comm *)comm)) munmap(memory, bytes);
    dtrain__unpromise(comm->world, bytes);
}

/* Meet in MPI for the world's communicator; all other communicators share its hub. Requests in
 * flight with each rank: a record each way for every operation of the window, four requests of a
 * round, one of a send and one of a receive. */
static dtrain_result dtrain__mpi_make(dtrain_comm *base, int64_t *address)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    const size_t size = (size_t)base->size, line = DTRAIN__CACHE_LINE;
    const size_t room = size * (2 * DTRAIN_WINDOW + 4 + 2);
    size_t data = DTRAIN__SMALL_TOTAL / size, chunk = DTRAIN__MPI_TEMPORARY / size;
    void *memory;
    comm->hub = base->number ? ((dtrain__mpi_comm *)base->world->comm)->hub : &comm->own;
    if (base->number == 0) DTRAIN__TRY(dtrain__mpi_meet(base->world, comm->hub));
    if (base->number >= comm->hub->number_limit)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "this MPI has no tags left after %lld splits",
                           (long long)base->number);
    if (data > DTRAIN_SMALL_BYTES) data = DTRAIN_SMALL_BYTES;
    if (chunk < ((size_t)16 << 10)) chunk = (size_t)16 << 10;
    if (chunk > DTRAIN__MPI_CHUNK_BYTES) chunk = DTRAIN__MPI_CHUNK_BYTES;
    comm->chunk_bytes = chunk / line * line;
    comm->record_bytes = dtrain__round_up(offsetof(dtrain__mpi_record, data) + data, line);

    const size_t bytes[] = {
        room * sizeof *comm->requests,   room * sizeof *comm->tokens,
        room * sizeof *comm->statuses,   room * sizeof *comm->indices,
        size * comm->chunk_bytes,        (DTRAIN_WINDOW + 1) * 2 * size * comm->record_bytes,
        2 * sizeof(dtrain__abort_record)};
    size_t at[sizeof bytes / sizeof *bytes];
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
        at[i] = comm->memory_bytes;
        comm->memory_bytes += dtrain__round_up(bytes[i], line);
    }
    DTRAIN__TRY(dtrain__mpi_map(base, comm->memory_bytes, &memory));
    comm->memory = (char *)memory;
    comm->requests = (MPI_Request *)(void *)(comm->memory + at[0]);
    comm->tokens = (dtrain__mpi_token *)(void *)(comm->memory + at[1]);
    comm->statuses = (MPI_Status *)(void *)(comm->memory + at[2]);
    comm->indices = (int *)(void *)(comm->memory + at[3]);
    comm->temporary = comm->memory + at[4];
    comm->records = comm->memory + at[5];
    if (base->number == 0 && !base->world->link) {
        comm->own.aborts = (dtrain__abort_record *)(void *)(comm->memory + at[6]);
        base->world->tell = dtrain__mpi_tell;
        MPI_Irecv(&comm->own.aborts[1], (int)sizeof comm->own.aborts[1], MPI_BYTE, MPI_ANY_SOURCE,
                  DTRAIN__TAG_ABORT, comm->own.mpi, &comm->own.hearing);
    }
    *address = 1;
    return DTRAIN_OK;
}

/* MPI knows the ranks, so no address is needed. There is no shared memory for a report: a failure
 * fails all communicators of the world. */
static void *dtrain__mpi_join(dtrain_comm *comm, const int64_t *addresses)
{
    (void)comm;
    (void)addresses;
    return NULL;
}

static void dtrain__mpi_release(dtrain_comm *base, bool joined)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    if (!comm->hub) return;
    if (comm->active && !dtrain__mpi_failed(comm)) {
        dtrain_world_abort(base->world, DTRAIN_ERROR_USAGE, "left with operations in flight");
        comm->hub->failed = true;
    }
    if (!joined && base->number == 0) comm->hub->failed = true;
    if (base->number == 0) dtrain__mpi_part(base->world, comm->hub);
    if (comm->memory) dtrain__mpi_unmap(base, comm->memory, comm->memory_bytes);
}

/* The last messages of a rank that left can arrive two seconds later than its exit record. */
static const dtrain_transport_ops dtrain__mpi_transport = {
    sizeof(dtrain__mpi_comm), sizeof(dtrain__mpi_work), 2000000000u,      dtrain__mpi_make,
    dtrain__mpi_join,         dtrain__mpi_release,      dtrain__mpi_map,  dtrain__mpi_unmap,
    dtrain__mpi_show,         dtrain__mpi_heard,        dtrain__mpi_move, dtrain__mpi_lags,
    dtrain__mpi_poll};

DTRAIN__PRIVATE const dtrain_comm_ops *dtrain__mpi_comm_ops(void)
{
    static const dtrain_comm_ops ops = DTRAIN__ENGINE_OPS("mpi", &dtrain__mpi_transport);
    return &ops;
}

#else

DTRAIN__PRIVATE const dtrain_comm_ops *dtrain__mpi_comm_ops(void) { return NULL; }

#endif /* DTRAIN_USE_MPI */
