/* MPI
 *
 * MPI carries bytes between two ranks and nothing else: MPI_Isend and MPI_Irecv on one duplicate of
 * MPI_COMM_WORLD, moved on by MPI_Testsome inside dtrain's calls. That ranks agree on what they
 * call, how long they wait and in which order is added is decided here: MPI compares nothing, has
 * no deadline and promises no order. A collective:
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
#include "comm/local_internal.h"
#include "comm/mpi_internal.h"
#include "device/backend.h"

#ifdef DTRAIN_USE_MPI

/* ---- Failure ----------------------------------------------------------------------------------*/

DTRAIN__PRIVATE dtrain_result dtrain__mpi_standing(const dtrain__mpi_hub *hub)
{
    return dtrain_fail(hub->code, "%s", hub->text);
}

/* The first report of the world stands, whoever made it. Nothing in flight will be finished. */
DTRAIN__PRIVATE dtrain_result dtrain__mpi_fail(dtrain_comm *base, dtrain_result code,
                                               const char *text)
{
    dtrain__mpi_hub *hub = ((dtrain__mpi_comm *)base)->hub;
    const dtrain__abort_record *report = &hub->world->control->aborted;
    int rank = hub->world->rank;
    char own[480];
    if (hub->failed) return dtrain__mpi_standing(hub);
    snprintf(own, sizeof own, "%s", dtrain__bare(text));
    dtrain_world_abort(hub->world, code, own);
    if (dtrain__load(&report->state) == 2) {
        rank = report->rank;
        code = (dtrain_result)report->code;
        snprintf(own, sizeof own, "%.*s", (int)sizeof own - 1, report->text);
    }
    const bool everybodys = code == DTRAIN_ERROR_MISMATCH || code == DTRAIN_ERROR_TIMEOUT ||
                            code == DTRAIN_ERROR_PEER || rank == hub->world->rank;
    hub->failed = true;
    hub->code = everybodys ? code : DTRAIN_ERROR_PEER;
    if (everybodys) snprintf(hub->text, sizeof hub->text, "%s", own);
    else snprintf(hub->text, sizeof hub->text, "rank %d had to give up: %s", rank, own);
    for (dtrain__mpi_comm *comm = hub->comms; comm; comm = comm->next) {
        comm->queue = NULL;
        comm->queue_end = &comm->queue;
        comm->base.in_flight = 0;
    }
    return dtrain__mpi_standing(hub);
}

DTRAIN__PRINTF(3, 4)
DTRAIN__PRIVATE dtrain_result dtrain__mpi_failf(dtrain__mpi_comm *comm, dtrain_result code,
                                                const char *format, ...)
{
    char text[480];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return dtrain__mpi_fail(&comm->base, code, text);
}

/* A rank's death may reach MPI before it reaches the control plane, which says it better. */
static void dtrain__mpi_refused(dtrain__mpi_comm *comm, int code, const char *call)
{
    dtrain__wait wait = dtrain__wait_begin();
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    dtrain_result turn = DTRAIN_OK;
    while (turn == DTRAIN_OK && wait.waited_ns < 1000000000u)
        turn = dtrain__wait_turn(comm->base.world, &wait);
    if (turn == DTRAIN_ERROR_PEER) {
        (void)dtrain__mpi_fail(&comm->base, turn, dtrain_last_error());
        return;
    }
    MPI_Error_string(code, text, &length);
    (void)dtrain__mpi_failf(comm, DTRAIN_ERROR_SYSTEM, "%s failed: %.300s", call, text);
}

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

DTRAIN__PRIVATE dtrain_result dtrain__mpi_alloc(dtrain_comm *comm, size_t bytes, void **out)
{
    return dtrain__mpi_map(((dtrain__mpi_comm *)comm)->hub, bytes, out);
}
DTRAIN__PRIVATE void dtrain__mpi_free(dtrain_comm *comm, void *memory, size_t bytes)
{
    (void)bytes;
    dtrain__mpi_unmap(((dtrain__mpi_comm *)comm)->hub, memory);
}

/* ---- Requests ---------------------------------------------------------------------------------*/

static int dtrain__mpi_tag(const dtrain__mpi_comm *comm, uint32_t use)
{
    if (use < DTRAIN__RECORD_OUT) return comm->tag + (int)use / 2; /* parts, results */
    return comm->tag + (use <= DTRAIN__RECORD_IN ? 2 : use == DTRAIN__HEAD ? 3 : 4);
}

DTRAIN__PRIVATE void dtrain__mpi_post(dtrain__mpi_comm *comm, dtrain__mpi_work *work, uint32_t use,
                                      int rank, size_t chunk, bool sends, void *at, size_t bytes)
{
    const int peer = comm->hub->ranks[comm->base.world_ranks[rank]];
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
    const size_t size = (size_t)comm->base.size, rank = (size_t)token->rank;
    switch (token->use) {
    case DTRAIN__RECORD_IN:
        comm->heard[work->sequence % DTRAIN__WINDOW * size + rank] = 1;
        comm->last[rank] = work->sequence;
        work->heard++;
        break;
    case DTRAIN__RECORD_OUT: work->unsent--; break;
    case DTRAIN__HEAD:
        if (work->what.kind == DTRAIN_COLLECTIVE_SEND) work->unsent--;
        else work->heard++;
        break;
    case DTRAIN__BODY: dtrain__mpi_lane_land(&work->lane, token->chunk); break;
    default: dtrain__mpi_lane_land(&comm->lanes[token->use * size + rank], token->chunk); break;
    }
}

/* What MPI has finished. True when there was something. */
DTRAIN__PRIVATE bool dtrain__mpi_poll(dtrain__mpi_comm *comm)
{
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

static char *dtrain__mpi_slot(const dtrain__mpi_comm *comm, bool in, uint64_t sequence, int rank)
{
    const size_t size = (size_t)comm->base.size, slot = (size_t)(sequence % DTRAIN__WINDOW);
    return comm->records +
           (((in ? DTRAIN__WINDOW : 0) + slot) * size + (size_t)rank) * comm->record_bytes;
}

DTRAIN__PRIVATE void dtrain__mpi_write(char *at, const dtrain_collective *what, uint64_t sequence,
                                       const void *data, size_t bytes)
{
    dtrain__mpi_record record;
    memset(&record, 0, sizeof record);
    record.magic = DTRAIN__MPI_MAGIC;
    record.kind = what->kind;
    record.dtype = (uint32_t)what->dtype;
    record.op = what->op;
    record.root = what->root;
    record.count = what->count;
    record.sequence = sequence;
    memcpy(at, &record, sizeof record);
    if (bytes) memcpy(at + sizeof record, data, bytes);
}

/* Small data of this rank for `to`, which need not be another rank. */
static const char *dtrain__mpi_gift(const dtrain_comm *comm, const dtrain_collective *what, int to,
                                    size_t *bytes)
{
    const char *send = (const char *)what->send;
    *bytes = what->count * dtrain_dtype_bytes(what->dtype);
    if (what->kind == DTRAIN_COLLECTIVE_REDUCE && to != what->root) *bytes = 0;
    if (what->kind == DTRAIN_COLLECTIVE_BROADCAST && comm->rank != what->root) *bytes = 0;
    return dtrain__cuts(what) && *bytes ? send + (size_t)to * *bytes : send;
}

DTRAIN__PRIVATE void dtrain__mpi_show(dtrain__mpi_comm *comm, dtrain__mpi_work *work)
{
    const dtrain_collective *what = &work->what;
    const int size = comm->base.size, rank = comm->base.rank;
    const bool small = dtrain__is_small(what, size);
    const uint64_t s = work->sequence;
    memset(comm->heard + s % DTRAIN__WINDOW * (size_t)size, 0, (size_t)size);
    work->stage = DTRAIN__MPI_MEETING;
    work->unsent = size - 1;
    for (int i = 1; i < size && !comm->hub->failed; i++) {
        const int peer = (rank + size - i) % size;
        dtrain__mpi_post(comm, work, DTRAIN__RECORD_IN, peer, 0, false,
                         dtrain__mpi_slot(comm, true, s, peer), comm->record_bytes);
    }
    for (int i = 1; i < size && !comm->hub->failed; i++) {
        const int peer = (rank + i) % size;
        char *slot = dtrain__mpi_slot(comm, false, s, peer);
        size_t bytes;
        const char *gift = dtrain__mpi_gift(&comm->base, what, peer, &bytes);
        if (!small) bytes = 0;
        dtrain__mpi_write(slot, what, s, gift, bytes);
        dtrain__mpi_post(comm, work, DTRAIN__RECORD_OUT, peer, 0, true, slot,
                         sizeof(dtrain__mpi_record) + bytes);
    }
}

/* What a rank that has been heard calls. */
static void dtrain__mpi_said(const dtrain__mpi_comm *comm, const dtrain__mpi_work *work, int rank,
                             dtrain_collective *what)
{
    dtrain__mpi_record record;
    *what = work->what;
    if (rank == comm->base.rank) return;
    memcpy(&record, dtrain__mpi_slot(comm, true, work->sequence, rank), sizeof record);
    what->kind = record.magic == DTRAIN__MPI_MAGIC && record.sequence == work->sequence
                     ? record.kind
                     : 0; /* not a record: nothing agrees with it */
    what->dtype = (dtrain_dtype)record.dtype;
    what->op = record.op;
    what->root = record.root;
    what->count = (size_t)record.count;
}

DTRAIN__PRIVATE dtrain_result dtrain__mpi_compare(dtrain__mpi_comm *comm,
                                                  const dtrain__mpi_work *work, int first,
                                                  int second)
{
    dtrain_collective x, y;
    char a[80], b[80];
    dtrain__mpi_said(comm, work, first, &x);
    dtrain__mpi_said(comm, work, second, &y);
    if (x.kind == y.kind && x.dtype == y.dtype && x.op == y.op && x.root == y.root &&
        x.count == y.count)
        return DTRAIN_OK;
    dtrain__describe(&x, a, sizeof a);
    dtrain__describe(&y, b, sizeof b);
    return dtrain__mpi_failf(comm, DTRAIN_ERROR_MISMATCH,
                             "collective #%llu differs: rank %d called %s, rank %d called %s",
                             (unsigned long long)work->sequence, comm->base.world_ranks[first], a,
                             comm->base.world_ranks[second], b);
}

/* With the first rank, so that all ranks find the same difference. */
DTRAIN__PRIVATE bool dtrain__mpi_agree(dtrain__mpi_comm *comm, const dtrain__mpi_work *work)
{
    for (int i = 1; i < comm->base.size; i++)
        if (dtrain__mpi_compare(comm, work, 0, i) != DTRAIN_OK) return false;
    return true;
}

/* Everything came along with the records. */
DTRAIN__PRIVATE void dtrain__mpi_small_path(const dtrain__mpi_comm *comm,
                                            const dtrain__mpi_work *work)
{
    const dtrain_collective *what = &work->what;
    const int size = comm->base.size, rank = comm->base.rank;
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    const char *in[DTRAIN_MAX_RANKS];
    char *out = (char *)what->recv;
    size_t own;
    if (!bytes) return;
    for (int i = 0; i < size; i++)
        in[i] = dtrain__mpi_slot(comm, true, work->sequence, i) + sizeof(dtrain__mpi_record);
    in[rank] = dtrain__mpi_gift(&comm->base, what, rank, &own);
    if (dtrain__kind_of(what->kind)->reduces) {
        if (what->kind != DTRAIN_COLLECTIVE_REDUCE || rank == what->root)
            dtrain__combine(what, in, size, &out, 1, what->count);
    } else if (what->kind == DTRAIN_COLLECTIVE_BROADCAST) {
        if (rank != what->root) memcpy(out, in[what->root], bytes);
    } else {
        for (int i = 0; i < size; i++, out += bytes)
            if (out != in[i]) memcpy(out, in[i], bytes);
    }
}

#endif /* DTRAIN_USE_MPI */
