/* The MPI transport
 *
 * MPI carries bytes between two ranks and nothing else: MPI_Isend and MPI_Irecv on one duplicate of
 * MPI_COMM_WORLD, moved on by MPI_Testsome inside dtrain's calls. MPI compares nothing, has no
 * deadline and promises no order of additions: the engine and these files do. A collective:
 *
 *     record     from every rank to every other: | fingerprint, 64 bytes | small data |; all must
 *                agree. Small operations end here, after one round
 *     parts      chunk c of slice j from the ranks that have one to rank j ...
 *     results    ... which adds them in rank order and sends the sum to the ranks that want it
 *
 *                         parts of slice j from    results of slice j to
 *         all-reduce      all                      all
 *         reduce          all                      root
 *         reduce-scatter  all
 *         broadcast       root                     all but root
 *         all-gather                               all
 *         all-to-all      all, not added
 *
 *     rank 0   send  | slice 0 | slice 1 | slice 2 |          parts: chunk c of its slice 0 to
 *     rank 1   send  | slice 0 | slice 1 | slice 2 |          rank 0, of slice 1 to rank 1, ...
 *     rank 2   send  | slice 0 | slice 1 | slice 2 |          results: the other way, to everybody
 *
 * Between two ranks each of the four directions of a collective is a lane: its chunks go in order
 * under one tag, at most DTRAIN__MPI_DEPTH of them under way, so temporary memory does not depend
 * on the count. Records of later operations are exchanged meanwhile; parts and results are moved
 * for the oldest operation only. A lane never waits for a later chunk, so there is no deadlock.
 *
 * A communicator is a range of tags. No call of MPI that may block is made once the ranks have met,
 * and none at all after a failure: what is under way then keeps its memory until the process
 * ends. */

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

#ifdef DTRAIN_USE_MPI

/* ---- Memory -----------------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__mpi_map(dtrain__mpi_hub *hub, size_t asked, void **out)
{
    dtrain_world *world = hub->world;
    *out = NULL;
    if (asked > SIZE_MAX / 2)
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "communicator memory: %zu bytes asked for", asked);
    const size_t bytes = dtrain__round_up(asked ? asked : 1, dtrain__page_bytes());
    DTRAIN__TRY(dtrain_device_check_limit(world->device, bytes));
    dtrain__mpi_memory *memory = (dtrain__mpi_memory *)dtrain__alloc(
        &world->allocator, 1, sizeof *memory, "the book of communicator memory");
    if (!memory) return DTRAIN_ERROR_MEMORY;
    dtrain_result result = dtrain__promise(world->control, bytes);
    if (result == DTRAIN_OK) {
        memory->at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory->at == MAP_FAILED) {
            __atomic_fetch_sub(&world->control->promised, (uint64_t)bytes, __ATOMIC_ACQ_REL);
            result = dtrain_fail(DTRAIN_ERROR_MEMORY, "communicator memory: no %zu bytes: %s",
                                 bytes, strerror(errno));
        }
    }
    if (result != DTRAIN_OK) {
        dtrain__free(&world->allocator, memory, 1, sizeof *memory);
        return result;
    }
    memory->bytes = bytes;
    memory->next = hub->memory;
    hub->memory = memory;
    dtrain_device_account(world->device, &world->device->comm_bytes, bytes);
    *out = memory->at;
    return DTRAIN_OK;
}

/* After a failure MPI may still write to it: then it stays mapped. */
DTRAIN__PRIVATE void dtrain__mpi_unmap(dtrain__mpi_hub *hub, const void *at)
{
    dtrain_world *world = hub->world;
    for (dtrain__mpi_memory **link = &hub->memory; at && *link; link = &(*link)->next) {
        dtrain__mpi_memory *memory = *link;
        if (memory->at != at) continue;
        *link = memory->next;
        if (!hub->failed) munmap(memory->at, memory->bytes);
        __atomic_fetch_sub(&world->control->promised, (uint64_t)memory->bytes, __ATOMIC_ACQ_REL);
        world->device->comm_bytes -= memory->bytes;
        dtrain__free(&world->allocator, memory, 1, sizeof *memory);
        return;
    }
}

/* ---- Requests ---------------------------------------------------------------------------------*/

/* A rank's death may reach MPI before it reaches the control plane, which says it better. */
static void dtrain__mpi_refused(dtrain__mpi_comm *comm, int code, const char *call)
{
    dtrain__wait wait = dtrain__wait_begin();
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    dtrain_result turn = DTRAIN_OK;
    while (turn == DTRAIN_OK && wait.waited_ns < 1000000000u)
        turn = dtrain__wait_turn(comm->base.base.world, &wait);
    if (turn == DTRAIN_ERROR_PEER) {
        (void)dtrain__engine_fail(&comm->base.base, turn, dtrain_last_error());
        return;
    }
    MPI_Error_string(code, text, &length);
    (void)dtrain__engine_failf(&comm->base, DTRAIN_ERROR_SYSTEM, "%s failed: %.300s", call, text);
}

static int dtrain__mpi_tag(const dtrain__mpi_comm *comm, uint32_t use)
{
    const int base = (int)(comm->base.number * DTRAIN__MPI_TAGS);
    if (use < DTRAIN__RECORD_OUT) return base + (int)use / 2; /* parts, results */
    return base + (use <= DTRAIN__RECORD_IN ? 2 : use == DTRAIN__HEAD ? 3 : 4);
}

DTRAIN__PRIVATE void dtrain__mpi_post(dtrain__mpi_comm *comm, dtrain__mpi_work *work, uint32_t use,
                                      int rank, size_t chunk, bool sends, void *at, size_t bytes)
{
    const int peer = comm->hub->ranks[comm->base.base.world_ranks[rank]];
    const int tag = dtrain__mpi_tag(comm, use);
    dtrain__mpi_token *token = &comm->tokens[comm->active];
    MPI_Request *request = &comm->requests[comm->active];
    const int code = sends
                         ? MPI_Isend(at, (int)bytes, MPI_BYTE, peer, tag, comm->hub->mpi, request)
                         : MPI_Irecv(at, (int)bytes, MPI_BYTE, peer, tag, comm->hub->mpi, request);
    if (code != MPI_SUCCESS) {
        dtrain__mpi_refused(comm, code, sends ? "MPI_Isend" : "MPI_Irecv");
        return;
    }
    token->work = work;
    token->use = use;
    token->rank = rank;
    token->chunk = chunk;
    comm->active++;
}

/* A record has come. What is not one agrees with nothing. */
static void dtrain__mpi_record_in(dtrain__mpi_comm *comm, uint64_t sequence, int rank)
{
    const uint64_t slot = sequence % DTRAIN__WINDOW;
    dtrain__mpi_record *record =
        (dtrain__mpi_record *)(void *)dtrain__mpi_slot(comm, true, slot, rank);
    if (record->magic != DTRAIN__MPI_MAGIC || record->sequence != sequence) record->shown.kind = 0;
    comm->heard[slot * (size_t)comm->base.base.size + (size_t)rank] = sequence;
}

static void dtrain__mpi_lane_land(dtrain__mpi_lane *lane, size_t chunk)
{
    lane->landed |= 1u << chunk % DTRAIN__MPI_DEPTH;
    while (lane->landed & 1u << lane->done % DTRAIN__MPI_DEPTH) {
        lane->landed &= ~(1u << lane->done % DTRAIN__MPI_DEPTH);
        lane->done++;
    }
}

static void dtrain__mpi_land(dtrain__mpi_comm *comm, const dtrain__mpi_token *token)
{
    dtrain__mpi_work *work = token->work;
    const size_t size = (size_t)comm->base.base.size, rank = (size_t)token->rank;
    switch (token->use) {
    case DTRAIN__RECORD_IN: dtrain__mpi_record_in(comm, work->base.sequence, token->rank); break;
    case DTRAIN__RECORD_OUT: work->unsent--; break;
    case DTRAIN__HEAD:
        if (work->base.what.kind == DTRAIN_COLLECTIVE_SEND) work->unsent--;
        else work->headed = true;
        break;
    case DTRAIN__BODY: dtrain__mpi_lane_land(&work->lane, token->chunk); break;
    default: dtrain__mpi_lane_land(&comm->lanes[token->use * size + rank], token->chunk); break;
    }
}

/* Take in what MPI has finished. */
static bool dtrain__mpi_poll(dtrain__engine *base)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    int count = 0, kept = 0, class_of = MPI_SUCCESS;
    if (!comm->active) return false;
    const int code =
        MPI_Testsome(comm->active, comm->requests, &count, comm->indices, comm->statuses);
    if (code != MPI_SUCCESS) {
        int first = code;
        MPI_Error_class(code, &class_of);
        for (int i = 0; class_of == MPI_ERR_IN_STATUS && i < count; i++)
            if (comm->statuses[i].MPI_ERROR != MPI_SUCCESS) first = comm->statuses[i].MPI_ERROR;
        dtrain__mpi_refused(comm, first, "MPI_Testsome");
        return false;
    }
    if (count == MPI_UNDEFINED || count == 0) return false;
    for (int i = 0; i < count; i++) dtrain__mpi_land(comm, &comm->tokens[comm->indices[i]]);
    for (int i = 0; i < comm->active; i++) {
        if (comm->requests[i] == MPI_REQUEST_NULL) continue;
        comm->requests[kept] = comm->requests[i];
        comm->tokens[kept++] = comm->tokens[i];
    }
    comm->active = kept;
    return true;
}

/* ---- Records ----------------------------------------------------------------------------------*/

/* A slot for a rank's record: one for each operation of the window, and the last one for the heads
 * of messages. */
DTRAIN__PRIVATE char *dtrain__mpi_slot(const dtrain__mpi_comm *comm, bool in, uint64_t slot,
                                       int rank)
{
    const size_t size = (size_t)comm->base.base.size, slots = DTRAIN__WINDOW + 1;
    return comm->records +
           (((in ? slots : 0) + (size_t)slot) * size + (size_t)rank) * comm->record_bytes;
}

DTRAIN__PRIVATE void dtrain__mpi_write(char *at, const dtrain__work *work, const void *data,
                                       size_t bytes)
{
    dtrain__mpi_record record;
    memset(&record, 0, sizeof record);
    record.magic = DTRAIN__MPI_MAGIC;
    record.sequence = work->sequence;
    record.shown = work->shown;
    memcpy(at, &record, sizeof record);
    if (bytes) memcpy(at + sizeof record, data, bytes);
}

/* Find the small data of this rank for `to`, which need not be another rank. */
static const char *dtrain__mpi_gift(const dtrain_comm *comm, const dtrain_collective *what, int to,
                                    size_t *bytes)
{
    const char *send = (const char *)what->send;
    *bytes = what->count * dtrain_dtype_bytes(what->dtype);
    if (what->kind == DTRAIN_COLLECTIVE_REDUCE && to != what->root) *bytes = 0;
    if (what->kind == DTRAIN_COLLECTIVE_BROADCAST && comm->rank != what->root) *bytes = 0;
    return dtrain__cuts(what) && *bytes ? send + (size_t)to * *bytes : send;
}

static void dtrain__mpi_show(dtrain__engine *base, dtrain__work *work)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    dtrain__mpi_work *own = (dtrain__mpi_work *)work;
    const int size = base->base.size, rank = base->base.rank;
    const uint64_t slot = work->sequence % DTRAIN__WINDOW;
    own->unsent = size - 1;
    for (int i = 1; i < size && !base->failed; i++) {
        const int peer = (rank + size - i) % size;
        dtrain__mpi_post(comm, own, DTRAIN__RECORD_IN, peer, 0, false,
                         dtrain__mpi_slot(comm, true, slot, peer), comm->record_bytes);
    }
    for (int i = 1; i < size && !base->failed; i++) {
        const int peer = (rank + i) % size;
        char *at = dtrain__mpi_slot(comm, false, slot, peer);
        size_t bytes;
        const char *gift = dtrain__mpi_gift(&base->base, &work->what, peer, &bytes);
        if (!work->small) bytes = 0;
        dtrain__mpi_write(at, work, gift, bytes);
        dtrain__mpi_post(comm, own, DTRAIN__RECORD_OUT, peer, 0, true, at,
                         sizeof(dtrain__mpi_record) + bytes);
    }
}

static const dtrain__shown *dtrain__mpi_heard(const dtrain__engine *base, uint64_t sequence,
                                              int rank)
{
    const dtrain__mpi_comm *comm = (const dtrain__mpi_comm *)base;
    const uint64_t slot = sequence % DTRAIN__WINDOW;
    if (comm->heard[slot * (size_t)base->base.size + (size_t)rank] < sequence) return NULL;
    return &((const dtrain__mpi_record *)(const void *)dtrain__mpi_slot(comm, true, slot, rank))
                ->shown;
}

/* Everything came along with the records. */
static void dtrain__mpi_inputs(const dtrain__engine *base, const dtrain__work *work,
                               const char **in)
{
    const dtrain__mpi_comm *comm = (const dtrain__mpi_comm *)base;
    const int rank = base->base.rank;
    size_t own;
    for (int i = 0; i < base->base.size; i++)
        in[i] = dtrain__mpi_slot(comm, true, work->sequence % DTRAIN__WINDOW, i) +
                sizeof(dtrain__mpi_record);
    in[rank] = dtrain__mpi_gift(&base->base, &work->what, rank, &own);
}

/* ---- Failure, life ----------------------------------------------------------------------------*/

/* The first report of the world stands, whoever made it, and fails all its communicators. */
static void dtrain__mpi_publish(dtrain__engine *comm, dtrain_result code, const char *text)
{
    dtrain_world_abort(comm->base.world, code, text);
    ((dtrain__mpi_hub *)comm->shared)->failed = true;
}

static dtrain_result dtrain__mpi_map_for(dtrain__engine *comm, size_t bytes, void **out)
{
    return dtrain__mpi_map((dtrain__mpi_hub *)comm->shared, bytes, out);
}
static void dtrain__mpi_unmap_for(dtrain__engine *comm, void *memory)
{
    dtrain__mpi_unmap((dtrain__mpi_hub *)comm->shared, memory);
}

/* The books of all requests that can be under way: records both ways for every operation of the
 * window, the lanes, and with every rank one message each way. */
static dtrain_result dtrain__mpi_tables(dtrain__mpi_comm *comm)
{
    const dtrain_allocator *allocator = &comm->base.base.world->allocator;
    const size_t size = (size_t)comm->base.base.size, depth = DTRAIN__MPI_DEPTH;
    const size_t room = size * (2 * DTRAIN__WINDOW + DTRAIN__MPI_LANES * depth + 2 * (1 + depth));
    comm->room = (int)room;
    comm->requests = (MPI_Request *)dtrain__alloc(allocator, room, sizeof *comm->requests, "MPI");
    comm->tokens = (dtrain__mpi_token *)dtrain__alloc(allocator, room, sizeof *comm->tokens, "MPI");
    comm->statuses = (MPI_Status *)dtrain__alloc(allocator, room, sizeof *comm->statuses, "MPI");
    comm->indices = (int *)dtrain__alloc(allocator, room, sizeof *comm->indices, "MPI");
    comm->heard =
        (uint64_t *)dtrain__alloc(allocator, DTRAIN__WINDOW * size, sizeof *comm->heard, "MPI");
    comm->lanes = (dtrain__mpi_lane *)dtrain__alloc(allocator, DTRAIN__MPI_LANES * size,
                                                    sizeof *comm->lanes, "MPI");
    return comm->requests && comm->tokens && comm->statuses && comm->indices && comm->heard &&
                   comm->lanes
               ? DTRAIN_OK
               : DTRAIN_ERROR_MEMORY;
}

static dtrain_result dtrain__mpi_make(dtrain__engine *base, int64_t *address)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    dtrain__mpi_hub *hub = (dtrain__mpi_hub *)base->shared;
    const size_t ranks = (size_t)base->base.size, line = DTRAIN__CACHE_LINE;
    size_t data = DTRAIN__SMALL_TOTAL / ranks, chunk = DTRAIN__MPI_TEMPORARY / (2 * ranks);
    void *records;
    if (data > DTRAIN__SMALL_BYTES) data = DTRAIN__SMALL_BYTES;
    if (chunk < ((size_t)16 << 10)) chunk = (size_t)16 << 10;
    if (chunk > DTRAIN__MPI_CHUNK_BYTES) chunk = DTRAIN__MPI_CHUNK_BYTES;
    comm->hub = hub;
    comm->chunk_bytes = chunk / line * line;
    comm->record_bytes = dtrain__round_up(sizeof(dtrain__mpi_record) + data, line);
    base->number_limit = hub->range_limit;
    DTRAIN__TRY(dtrain__mpi_tables(comm));
    DTRAIN__TRY(
        dtrain__mpi_map(hub, 2 * (DTRAIN__WINDOW + 1) * ranks * comm->record_bytes, &records));
    comm->records = (char *)records;
    *address = 1;
    return DTRAIN_OK;
}

/* MPI knows the ranks already. */
static void dtrain__mpi_join(dtrain__engine *comm, const int64_t *addresses)
{
    (void)addresses;
    comm->report = &comm->base.world->control->aborted;
}

static void dtrain__mpi_release(dtrain__engine *base)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    const dtrain_allocator *allocator = &base->base.world->allocator;
    const size_t size = (size_t)base->base.size, room = (size_t)comm->room;
    if (!comm->hub) return;
    dtrain__mpi_unmap(comm->hub, comm->temporary);
    dtrain__mpi_unmap(comm->hub, comm->records);
    dtrain__free(allocator, comm->lanes, DTRAIN__MPI_LANES * size, sizeof *comm->lanes);
    dtrain__free(allocator, comm->heard, DTRAIN__WINDOW * size, sizeof *comm->heard);
    dtrain__free(allocator, comm->indices, room, sizeof *comm->indices);
    dtrain__free(allocator, comm->statuses, room, sizeof *comm->statuses);
    dtrain__free(allocator, comm->tokens, room, sizeof *comm->tokens);
    dtrain__free(allocator, comm->requests, room, sizeof *comm->requests);
}

/* A rank that left is given two seconds: what it sent before may be slower than the news. */
DTRAIN__PRIVATE const dtrain__transport *dtrain__mpi_transport(void)
{
    static const dtrain__transport transport = {sizeof(dtrain__mpi_comm),
                                                sizeof(dtrain__mpi_work),
                                                2000000000u,
                                                dtrain__mpi_show,
                                                dtrain__mpi_heard,
                                                dtrain__mpi_inputs,
                                                dtrain__mpi_move,
                                                dtrain__mpi_message,
                                                dtrain__mpi_lags,
                                                dtrain__mpi_publish,
                                                dtrain__mpi_map_for,
                                                dtrain__mpi_unmap_for,
                                                dtrain__mpi_poll,
                                                NULL,
                                                dtrain__mpi_make,
                                                dtrain__mpi_join,
                                                dtrain__mpi_release};
    return &transport;
}

#endif /* DTRAIN_USE_MPI */
