/* Start, test, wait. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/dtype.h"
#include "core/log.h"
#include "core/result.h"
#include "world/link_internal.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "comm/comm.h"
#include "comm/comm_internal.h"
#include "comm/local_internal.h"
#include "comm/mpi_internal.h"
#include "device/backend.h"

#ifdef DTRAIN_USE_MPI

/* Moves everything in flight, oldest first. A message that ends may let the next one begin, which
 * is later in the queue. */
static void dtrain__mpi_advance(dtrain__mpi_comm *comm)
{
    uint64_t oldest = 0; /* sequence of the first collective that is not done */
    dtrain__mpi_work **link = &comm->queue;
    if (comm->hub->failed || (!dtrain__mpi_poll(comm) && !comm->stirred)) return;
    comm->stirred = false;
    while (!comm->hub->failed && *link) {
        dtrain__mpi_work *work = *link;
        if (!oldest) oldest = work->sequence;
        const bool done = work->sequence ? dtrain__mpi_collective_move(comm, work, oldest)
                                         : dtrain__mpi_message_move(comm, work);
        if (comm->hub->failed) return;
        if (!done) {
            link = &work->next;
            continue;
        }
        work->done = true;
        *link = work->next;
        if (!*link) comm->queue_end = link;
        comm->base.in_flight--;
        if (oldest == work->sequence) oldest = 0;
    }
}

/* A rank that waits in one communicator keeps the others going. */
static void dtrain__mpi_advance_all(dtrain__mpi_comm *comm)
{
    dtrain__mpi_advance(comm);
    for (dtrain__mpi_comm *other = comm->hub->comms; other; other = other->next) {
        if (other == comm || !other->queue) continue;
        dtrain__mpi_advance(other);
        if (!other->queue) dtrain__comm_landed(&other->base, dtrain__now_ns());
    }
}

/* What keeps `work` from being done: an older collective, maybe. */
static const dtrain__mpi_work *dtrain__mpi_blocking(const dtrain__mpi_comm *comm,
                                                    const dtrain__mpi_work *work)
{
    const dtrain__mpi_work *first = work->sequence ? comm->queue : work;
    while (first != work && !first->sequence) first = first->next;
    return first;
}

/* Whom a large operation waits for: ranks that owe it a part, for without it there are no results;
 * else those that owe results; else those that do not take what is sent. */
static bool dtrain__mpi_lags(const dtrain__mpi_comm *comm, int rank)
{
    static const uint32_t uses[] = {DTRAIN__PART_IN, DTRAIN__RESULT_IN, DTRAIN__PART_OUT,
                                    DTRAIN__RESULT_OUT};
    for (size_t u = 0; u < sizeof uses / sizeof *uses; u++) {
        const dtrain__mpi_lane *lanes = dtrain__mpi_lane_of(comm, uses[u], 0);
        for (int i = 0; i < comm->base.size; i++)
            if (lanes[i].done < lanes[i].posted) return lanes[rank].done < lanes[rank].posted;
    }
    return false;
}

static bool dtrain__mpi_waits_for(const dtrain__mpi_comm *comm, const dtrain__mpi_work *work,
                                  int rank)
{
    const size_t size = (size_t)comm->base.size;
    if (rank == comm->base.rank) return false;
    if (!work->sequence) return rank == work->what.root;
    if (work->stage == DTRAIN__MPI_MOVING) return dtrain__mpi_lags(comm, rank);
    return work->stage == DTRAIN__MPI_QUEUED ||
           !comm->heard[work->sequence % DTRAIN__WINDOW * size + (size_t)rank];
}

/* A rank that left is given two seconds: what it sent before may be slower than the news. */
static dtrain_result dtrain__mpi_trouble(dtrain__mpi_comm *comm, const dtrain__mpi_work *waited)
{
    const dtrain__mpi_work *work = dtrain__mpi_blocking(comm, waited);
    const uint64_t now = dtrain__now_ns();
    const int *world = comm->base.world_ranks;
    char name[128];
    for (int i = 0; i < comm->base.size; i++) {
        const dtrain__exit_record *fate = &comm->base.world->control->exits[world[i]];
        if (!dtrain__mpi_waits_for(comm, work, i)) {
            if (work->sequence && work->stage == DTRAIN__MPI_MEETING && i != comm->base.rank)
                DTRAIN__TRY(dtrain__mpi_compare(comm, work,
                                                i < comm->base.rank ? i : comm->base.rank,
                                                i < comm->base.rank ? comm->base.rank : i));
            continue;
        }
        if (dtrain__load(&fate->how) != DTRAIN__LEFT || now - fate->ended_ns < 2000000000u)
            continue;
        dtrain__name_work(&work->what, work->sequence, name, sizeof name);
        return dtrain__mpi_failf(
            comm, DTRAIN_ERROR_PEER,
            "rank %d left (returned 0) after its collective #%llu while rank %d waits in %s",
            world[i], (unsigned long long)comm->last[i], world[comm->base.rank], name);
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__mpi_timeout(dtrain__mpi_comm *comm, const dtrain__mpi_work *waited)
{
    const dtrain__mpi_work *work = dtrain__mpi_blocking(comm, waited);
    char name[128], list[200] = "";
    size_t used = 0;
    dtrain__name_work(&work->what, work->sequence, name, sizeof name);
    for (int i = 0; i < comm->base.size && used + 48 < sizeof list; i++) {
        if (!dtrain__mpi_waits_for(comm, work, i)) continue;
        const unsigned long long last = (unsigned long long)comm->last[i];
        used += (size_t)snprintf(
            list + used, sizeof list - used, "%srank %d (%s #%llu)", used ? ", " : "",
            comm->base.world_ranks[i],
            work->sequence && last >= work->sequence ? "stuck in" : "its last was", last);
    }
    return dtrain__mpi_failf(
        comm, DTRAIN_ERROR_TIMEOUT,
        "%s: rank %d waited %.1f s for %s; if they are only slow, raise timeout_ms", name,
        comm->base.world_ranks[comm->base.rank], 1e-9 * (double)comm->base.world->timeout_ns,
        used ? list : "its own records to go out");
}

static dtrain_result dtrain__mpi_more_works(dtrain__mpi_comm *comm)
{
    void *records;
    dtrain__mpi_block *block = (dtrain__mpi_block *)dtrain__alloc(
        &comm->base.world->allocator, 1, sizeof *block, "operations in flight");
    if (!block) return DTRAIN_ERROR_MEMORY;
    if (dtrain__mpi_map(comm->hub, DTRAIN__WINDOW * comm->record_bytes, &records) != DTRAIN_OK) {
        dtrain__free(&comm->base.world->allocator, block, 1, sizeof *block);
        return DTRAIN_ERROR_MEMORY;
    }
    block->next = comm->blocks;
    comm->blocks = block;
    for (uint32_t i = 0; i < DTRAIN__WINDOW; i++) {
        block->works[i].record = (char *)records + i * comm->record_bytes;
        block->works[i].next = comm->idle;
        comm->idle = &block->works[i];
    }
    return DTRAIN_OK;
}

static void dtrain__mpi_recycle(dtrain__mpi_comm *comm, dtrain__mpi_work *work)
{
    work->next = comm->idle;
    comm->idle = work;
    comm->base.outstanding--;
}

static dtrain_result dtrain__mpi_start(dtrain_comm *base, const dtrain_collective *what,
                                       dtrain_work **out)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    const size_t bytes = what->count * dtrain_dtype_bytes(what->dtype);
    if (comm->hub->failed) return dtrain__mpi_standing(comm->hub);
    if (base->size == 1) { /* nobody to wait for: no handle */
        if (bytes && what->send != what->recv) memcpy(what->recv, what->send, bytes);
        *out = NULL;
        return DTRAIN_OK;
    }
    if (!comm->idle && dtrain__mpi_more_works(comm) != DTRAIN_OK)
        return dtrain__mpi_fail(base, DTRAIN_ERROR_MEMORY, dtrain_last_error());
    dtrain__mpi_work *work = comm->idle;
    char *record = work->record;
    comm->idle = work->next;
    memset(work, 0, sizeof *work);
    work->record = record;
    work->base.comm = base;
    work->what = *what;
    if (what->kind != DTRAIN_COLLECTIVE_SEND && what->kind != DTRAIN_COLLECTIVE_RECV)
        work->sequence = ++comm->sequence;
    *comm->queue_end = work;
    comm->queue_end = &work->next;
    base->outstanding++;
    base->in_flight++;
    comm->stirred = true;
    dtrain__mpi_advance(comm);
    *out = &work->base;
    if (!comm->hub->failed || work->done) return DTRAIN_OK;
    *out = NULL;
    dtrain__mpi_recycle(comm, work);
    return dtrain__mpi_standing(comm->hub);
}

/* The rarer half of a wait, after dtrain__wait_poll said `turn`. Before anything is given up, what
 * has come meanwhile is looked at once more. */
static void dtrain__mpi_look(dtrain__mpi_comm *comm, const dtrain__mpi_work *work,
                             dtrain_result turn)
{
    char text[DTRAIN__ERROR_BYTES];
    snprintf(text, sizeof text, "%s", turn == DTRAIN_ERROR_PEER ? dtrain_last_error() : "");
    if (turn != DTRAIN_OK) dtrain__mpi_advance(comm);
    if (work->done || comm->hub->failed) return;
    if (turn == DTRAIN_ERROR_PEER) (void)dtrain__mpi_fail(&comm->base, turn, text);
    else if (dtrain__mpi_trouble(comm, work) == DTRAIN_OK && turn == DTRAIN_ERROR_TIMEOUT)
        (void)dtrain__mpi_timeout(comm, work);
}

static dtrain_result dtrain__mpi_wait(dtrain_work *base)
{
    dtrain__mpi_work *work = (dtrain__mpi_work *)base;
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base->comm;
    dtrain__wait wait = dtrain__wait_begin();
    while (!work->done && !comm->hub->failed) {
        dtrain__mpi_advance_all(comm);
        if (work->done || comm->hub->failed) break;
        const dtrain_result turn = dtrain__wait_turn(comm->base.world, &wait);
        if (wait.polled) dtrain__mpi_look(comm, work, turn); /* may set failed */
    }
    const dtrain_result result = work->done ? DTRAIN_OK : dtrain__mpi_standing(comm->hub);
    dtrain__mpi_recycle(comm, work);
    return result;
}

static dtrain_result dtrain__mpi_test(dtrain_work *base, bool *done)
{
    dtrain__mpi_work *work = (dtrain__mpi_work *)base;
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base->comm;
    dtrain__wait wait = dtrain__wait_begin();
    if (!work->done && !comm->hub->failed) dtrain__mpi_advance_all(comm);
    if (!work->done && !comm->hub->failed)
        dtrain__mpi_look(comm, work, dtrain__wait_poll(comm->base.world, &wait));
    *done = work->done || comm->hub->failed;
    return work->done || !comm->hub->failed ? DTRAIN_OK : dtrain__mpi_standing(comm->hub);
}

/* ---- Making and ending a communicator ---------------------------------------------------------*/

static void dtrain__mpi_release(dtrain__mpi_comm *comm)
{
    dtrain__mpi_hub *hub = comm->hub;
    const dtrain_allocator *allocator = &hub->world->allocator;
    const size_t size = (size_t)comm->base.size, room = (size_t)comm->room;
    dtrain__mpi_comm **link = &hub->comms;
    while (*link != comm) link = &(*link)->next;
    *link = comm->next;
    while (comm->blocks) {
        dtrain__mpi_block *block = comm->blocks;
        comm->blocks = block->next;
        dtrain__mpi_unmap(hub, block->works[0].record);
        dtrain__free(allocator, block, 1, sizeof *block);
    }
    dtrain__mpi_unmap(hub, comm->temporary);
    dtrain__mpi_unmap(hub, comm->records);
    dtrain__free(allocator, comm->lanes, DTRAIN__MPI_LANES * size, sizeof *comm->lanes);
    dtrain__free(allocator, comm->last, size, sizeof *comm->last);
    dtrain__free(allocator, comm->heard, DTRAIN__WINDOW * size, sizeof *comm->heard);
    dtrain__free(allocator, comm->indices, room, sizeof *comm->indices);
    dtrain__free(allocator, comm->statuses, room, sizeof *comm->statuses);
    dtrain__free(allocator, comm->tokens, room, sizeof *comm->tokens);
    dtrain__free(allocator, comm->requests, room, sizeof *comm->requests);
    dtrain__free(allocator, comm->base.world_ranks, size, sizeof *comm->base.world_ranks);
    dtrain__free(allocator, comm, 1, sizeof *comm);
}

/* The books of all requests that can be under way: records both ways for every operation of the
 * window, the lanes, and with every rank one message each way. */
static dtrain_result dtrain__mpi_tables(dtrain__mpi_comm *comm)
{
    const dtrain_allocator *allocator = &comm->base.world->allocator;
    const size_t size = (size_t)comm->base.size, depth = DTRAIN__MPI_DEPTH;
    const size_t room = size * (2 * DTRAIN__WINDOW + DTRAIN__MPI_LANES * depth + 2 * (1 + depth));
    comm->room = (int)room;
    comm->requests = (MPI_Request *)dtrain__alloc(allocator, room, sizeof *comm->requests, "MPI");
    comm->tokens = (dtrain__mpi_token *)dtrain__alloc(allocator, room, sizeof *comm->tokens, "MPI");
    comm->statuses = (MPI_Status *)dtrain__alloc(allocator, room, sizeof *comm->statuses, "MPI");
    comm->indices = (int *)dtrain__alloc(allocator, room, sizeof *comm->indices, "MPI");
    comm->heard = (uint8_t *)dtrain__alloc(allocator, DTRAIN__WINDOW * size, 1, "MPI");
    comm->last = (uint64_t *)dtrain__alloc(allocator, size, sizeof *comm->last, "MPI");
    comm->lanes = (dtrain__mpi_lane *)dtrain__alloc(allocator, DTRAIN__MPI_LANES * size,
                                                    sizeof *comm->lanes, "MPI");
    comm->base.world_ranks =
        (int *)dtrain__alloc(allocator, size, sizeof *comm->base.world_ranks, "MPI");
    return comm->requests && comm->tokens && comm->statuses && comm->indices && comm->heard &&
                   comm->last && comm->lanes && comm->base.world_ranks
               ? DTRAIN_OK
               : DTRAIN_ERROR_MEMORY;
}

static dtrain_result dtrain__mpi_make(dtrain__mpi_hub *hub, int size, int rank, int64_t range,
                                      dtrain__mpi_comm **out)
{
    const size_t ranks = (size_t)size, line = DTRAIN__CACHE_LINE;
    size_t data = DTRAIN__SMALL_TOTAL / ranks, chunk = DTRAIN__MPI_TEMPORARY / (2 * ranks);
    void *records;
    if (data > DTRAIN__SMALL_BYTES) data = DTRAIN__SMALL_BYTES;
    if (chunk < ((size_t)16 << 10)) chunk = (size_t)16 << 10;
    if (chunk > DTRAIN__MPI_CHUNK_BYTES) chunk = DTRAIN__MPI_CHUNK_BYTES;
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)dtrain__alloc(&hub->world->allocator, 1,
                                                               sizeof *comm, "a communicator");
    *out = NULL;
    if (!comm) return DTRAIN_ERROR_MEMORY;
    comm->base.ops = dtrain_mpi_comm_ops();
    comm->base.world = hub->world;
    comm->base.size = size;
    comm->base.rank = rank;
    comm->hub = hub;
    comm->tag = (int)(range * DTRAIN__MPI_TAGS);
    comm->queue_end = &comm->queue;
    comm->chunk_bytes = chunk / line * line;
    comm->record_bytes = dtrain__round_up(sizeof(dtrain__mpi_record) + data, line);
    comm->next = hub->comms;
    hub->comms = comm;
    dtrain_result result = dtrain__mpi_tables(comm);
    if (result == DTRAIN_OK)
        result = dtrain__mpi_map(hub, 2 * DTRAIN__WINDOW * ranks * comm->record_bytes, &records);
    if (result == DTRAIN_OK) {
        comm->records = (char *)records;
        result = dtrain__mpi_more_works(comm);
    }
    if (result == DTRAIN_OK) *out = comm;
    else dtrain__mpi_release(comm);
    return result;
}

/* Two exchanges, as in the local backend. The new range of tags is one that no member has used in
 * any communicator; groups of one split have no pair of ranks in common and may share it. */
static dtrain_result dtrain__mpi_split(dtrain_comm *parent, int color, int key, dtrain_comm **out)
{
    dtrain__mpi_hub *hub = ((dtrain__mpi_comm *)parent)->hub;
    int64_t mine[3] = {color < 0 ? -1 : color, key, hub->next_range}, all[DTRAIN_MAX_RANKS][3];
    int64_t keys[DTRAIN_MAX_RANKS][2], made = 1, verdicts[DTRAIN_MAX_RANKS], range = 0;
    int members[DTRAIN_MAX_RANKS], rank = 0, lacking = -1;
    dtrain__mpi_comm *comm = NULL;
    DTRAIN__TRY(
        dtrain__run(parent, DTRAIN_COLLECTIVE_SPLIT, mine, all, 3, DTRAIN_DTYPE_I64, 0, -1, NULL));
    for (int i = 0; i < parent->size; i++) {
        keys[i][0] = all[i][0];
        keys[i][1] = all[i][1];
        range = dtrain__max(range, all[i][2]);
    }
    if (range >= hub->range_limit)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_comm_split: this MPI has no tags left after %lld splits; make "
                           "communicators once and keep them",
                           (long long)range);
    hub->next_range = range + 1;
    const int size = dtrain__split_members(keys, parent->size, parent->rank, members);
    while (members[rank] != parent->rank) rank++;
    if (color >= 0) made = dtrain__mpi_make(hub, size, rank, range, &comm) == DTRAIN_OK;
    const dtrain_result shared = dtrain__run(parent, DTRAIN_COLLECTIVE_SPLIT, &made, verdicts, 1,
                                             DTRAIN_DTYPE_I64, 0, -1, NULL);
    for (int i = 0; i < parent->size && shared == DTRAIN_OK; i++)
        if (!verdicts[i]) lacking = i;
    if (shared != DTRAIN_OK || lacking >= 0) {
        if (comm) dtrain__mpi_release(comm);
        if (shared != DTRAIN_OK) return shared;
        return dtrain_fail(DTRAIN_ERROR_MEMORY,
                           "dtrain_comm_split: rank %d has no memory for its part",
                           parent->world_ranks[lacking]);
    }
    for (int i = 0; comm && i < size; i++)
        comm->base.world_ranks[i] = parent->world_ranks[members[i]];
    *out = comm ? &comm->base : NULL;
    return DTRAIN_OK;
}

/* Whether all ranks have come to the end of the world well: only then MPI can be ended, because
 * MPI_Finalize waits for everybody and has no deadline. */
static bool dtrain__mpi_all_end(dtrain__mpi_hub *hub)
{
    dtrain_world *world = hub->world;
    MPI_Request request;
    int done = 0;
    for (dtrain__mpi_comm *comm = hub->comms; comm && !hub->failed; comm = comm->next)
        if (comm->active)
            (void)dtrain__mpi_failf(comm, DTRAIN_ERROR_USAGE, "left with operations in flight");
    if (hub->failed || dtrain__trouble(world) != DTRAIN_OK) return false;
    if (MPI_Ibarrier(hub->mpi, &request) != MPI_SUCCESS) return false;
    for (;;) {
        if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
        if (done) return true;
        if (world->link) dtrain__link_pump(world, 1);
        if (dtrain__trouble(world) != DTRAIN_OK) return false;
    }
}

/* Rank 0 waits for the others at the end: what MPI has not sent yet goes out meanwhile. */
DTRAIN__PRIVATE void dtrain__mpi_linger(const dtrain_comm *base)
{
    const dtrain__mpi_hub *hub = ((const dtrain__mpi_comm *)base)->hub;
    int found;
    if (!hub->failed) MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, hub->mpi, &found, MPI_STATUS_IGNORE);
}

static void dtrain__mpi_hub_end(dtrain__mpi_hub *hub, bool met)
{
    const dtrain_allocator allocator = hub->world->allocator;
    int finalized = 1;
    const bool well = met && dtrain__mpi_all_end(hub);
    if (!well) hub->failed = true; /* what MPI may still touch stays mapped */
    while (hub->comms) dtrain__mpi_release(hub->comms);
    while (hub->memory) dtrain__mpi_unmap(hub, hub->memory->at);
    if (well) {
        MPI_Comm_free(&hub->mpi);
        MPI_Finalized(&finalized);
        if (hub->ours && !finalized) MPI_Finalize();
    }
    if (hub->quiet_pipes) signal(SIGPIPE, SIG_DFL);
    dtrain__free(&allocator, hub, 1, sizeof *hub);
}

static dtrain_result dtrain__mpi_destroy(dtrain_comm *base)
{
    dtrain__mpi_comm *comm = (dtrain__mpi_comm *)base;
    if (base == base->world->comm) dtrain__mpi_hub_end(comm->hub, true);
    else dtrain__mpi_release(comm);
    return DTRAIN_OK;
}

/* ---- How ranks meet in MPI
 *
 * MPI_Init may wait for ever for a rank that does not come, so nobody calls it before all have said
 * that they will. Then all compare what MPI thinks the world is with what it is. */

typedef struct dtrain__mpi_hello {
    int32_t status;     /* dtrain_result of this rank */
    int32_t size, rank; /* in MPI */
    uint32_t layout[3]; /* must be equal */
    char library[64], error[300];
} dtrain__mpi_hello;

static dtrain_result dtrain__mpi_can_meet(const dtrain_world *world)
{
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "MPI has been ended, by an earlier world or by the program; for several "
                           "worlds call MPI_Init before the first and MPI_Finalize after the last");
    if (!world->device->ops->host_memory)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "the communicator over MPI moves host memory, and the device is \"%s\"; "
                           "use dtrain_nccl_comm_ops() or leave comm_ops NULL",
                           world->device->ops->name);
    if (world->size > 1 && !world->link)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "the communicator over MPI needs ranks that MPI's launcher has started, "
                           "and these %d were started by dtrain_launch itself; run: mpirun -n %d, "
                           "or leave comm_ops NULL for the local communicator",
                           world->size, world->size);
    if (world->launcher && world->size > 1)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "the communicator over MPI needs a process of MPI's launcher for every "
                           "rank, and this rank was forked; start the %d ranks with mpirun -n %d",
                           world->size, world->size);
    return DTRAIN_OK;
}

/* The same verdict on all ranks: the first rank's trouble, or what does not fit. */
static dtrain_result dtrain__mpi_verdict(const dtrain__mpi_hello *all, int size)
{
    bool seen[DTRAIN_MAX_RANKS];
    int alone = 0;
    memset(seen, 0, sizeof seen);
    for (int i = 0; i < size; i++) {
        if (all[i].status != DTRAIN_OK)
            return dtrain_fail((dtrain_result)all[i].status, "%.*s", (int)sizeof all[i].error - 1,
                               all[i].error);
        alone += all[i].size == 1;
    }
    if (alone == size && size > 1)
        return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                           "MPI: each of the %d ranks is alone in an MPI of its own (%.60s); start "
                           "them with this MPI's launcher: mpirun -n %d, or srun with --mpi=pmix "
                           "or pmi2",
                           size, all[0].library, size);
    for (int i = 0; i < size; i++) {
        if (all[i].size != size)
            return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                               "MPI: rank %d of the world's %d sees %d in MPI; start as many with "
                               "mpirun as the environment announces",
                               i, size, all[i].size);
        if (all[i].rank < 0 || all[i].rank >= size || seen[all[i].rank])
            return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                               "MPI: rank %d of the world is rank %d in MPI, and another one is, "
                               "too; are these two runs of mpirun?",
                               i, all[i].rank);
        seen[all[i].rank] = true;
        if (memcmp(all[i].layout, all[0].layout, sizeof all[i].layout) != 0 ||
            strncmp(all[i].library, all[0].library, sizeof all[i].library) != 0)
            return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                               "MPI: ranks 0 and %d were built differently (%.60s, %.60s)", i,
                               all[0].library, all[i].library);
    }
    return DTRAIN_OK;
}

static dtrain_result dtrain__mpi_exchange(dtrain_world *world, dtrain__mpi_hello *mine,
                                          dtrain_result status, dtrain__mpi_hello *all)
{
    mine->status = status;
    if (status != DTRAIN_OK)
        snprintf(mine->error, sizeof mine->error, "%.*s", (int)sizeof mine->error - 1,
                 dtrain__bare(dtrain_last_error()));
    return dtrain_world_all_gather(world, mine, sizeof *mine, all);
}

/* A duplicate, so that no message of the host meets one of ours. The call that does not block. */
static dtrain_result dtrain__mpi_duplicate(dtrain__mpi_hub *hub)
{
    dtrain__wait wait = dtrain__wait_begin();
    MPI_Request request;
    int done = 0;
    int code = MPI_Comm_idup(MPI_COMM_WORLD, &hub->mpi, &request);
    while (code == MPI_SUCCESS) {
        code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS || done) break;
        const dtrain_result turn = dtrain__wait_turn(hub->world, &wait);
        if (turn == DTRAIN_ERROR_TIMEOUT)
            return dtrain_fail(turn, "MPI_Comm_idup: not finished after %.1f s",
                               1e-9 * (double)hub->world->timeout_ns);
        DTRAIN__TRY(turn);
    }
    if (code != MPI_SUCCESS)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "MPI_Comm_idup failed with code %d", code);
    MPI_Comm_set_errhandler(hub->mpi, MPI_ERRORS_RETURN);
    return DTRAIN_OK;
}

/* Open MPI writes to the socket of a rank that has died, and the signal of that would kill this one
 * before it can say who is gone. A handler of the program's own stays. */
static void dtrain__mpi_quiet_pipes(dtrain__mpi_hub *hub)
{
    struct sigaction now;
    if (sigaction(SIGPIPE, NULL, &now) != 0 || now.sa_handler != SIG_DFL) return;
    hub->quiet_pipes = signal(SIGPIPE, SIG_IGN) != SIG_ERR;
}

static dtrain_result dtrain__mpi_init(dtrain__mpi_hub *hub, dtrain__mpi_hello *mine)
{
    char library[MPI_MAX_LIBRARY_VERSION_STRING + 1] = "";
    int ready = 0, provided = 0, length = 0, found = 0;
    void *highest = NULL;
    MPI_Initialized(&ready);
    hub->ours = !ready;
    if (!ready && MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "MPI_Init_thread failed");
    if (hub->ours) MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    dtrain__mpi_quiet_pipes(hub);
    MPI_Comm_size(MPI_COMM_WORLD, &mine->size);
    MPI_Comm_rank(MPI_COMM_WORLD, &mine->rank);
    MPI_Get_library_version(library, &length);
    snprintf(mine->library, sizeof mine->library, "%.*s", (int)strcspn(library, ",\n"), library);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &highest, &found);
    hub->range_limit = (found ? *(int *)highest : 32767) / DTRAIN__MPI_TAGS;
    return DTRAIN_OK;
}

static dtrain_result dtrain__mpi_meet(dtrain__mpi_hub *hub, dtrain__mpi_hello *all)
{
    dtrain_world *world = hub->world;
    dtrain__mpi_hello mine;
    memset(&mine, 0, sizeof mine);
    mine.size = world->size;
    mine.rank = world->rank;
    mine.layout[0] = (uint32_t)DTRAIN__MPI_CHUNK_BYTES;
    mine.layout[1] = (uint32_t)DTRAIN__MPI_MESSAGE_BYTES;
    mine.layout[2] = (uint32_t)sizeof(dtrain__mpi_record) + DTRAIN__MPI_DEPTH;
    DTRAIN__TRY(dtrain__mpi_exchange(world, &mine, dtrain__mpi_can_meet(world), all));
    DTRAIN__TRY(dtrain__mpi_verdict(all, world->size));
    DTRAIN__TRY(dtrain__mpi_exchange(world, &mine, dtrain__mpi_init(hub, &mine), all));
    const dtrain_result result = dtrain__mpi_verdict(all, world->size);
    if (result != DTRAIN_OK && mine.size == 1 && hub->ours) MPI_Finalize(); /* alone: no waiting */
    DTRAIN__TRY(result);
    for (int i = 0; i < world->size; i++) hub->ranks[i] = all[i].rank;
    return dtrain__mpi_duplicate(hub);
}

static dtrain_result dtrain__mpi_create(dtrain_world *world, dtrain_comm **out)
{
    const size_t size = (size_t)world->size;
    dtrain__mpi_comm *comm = NULL;
    *out = NULL;
    dtrain__mpi_hub *hub =
        (dtrain__mpi_hub *)dtrain__alloc(&world->allocator, 1, sizeof *hub, "a communicator");
    dtrain__mpi_hello *all = (dtrain__mpi_hello *)dtrain__alloc(&world->allocator, size,
                                                                sizeof *all, "a table of ranks");
    dtrain_result result = hub && all ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    if (hub) hub->world = world;
    if (!world->control->free_at_start) world->control->free_at_start = dtrain__free_memory();
    if (result == DTRAIN_OK) result = dtrain__mpi_meet(hub, all);
    dtrain__free(&world->allocator, all, size, sizeof *all);
    if (result == DTRAIN_OK)
        result = dtrain__mpi_make(hub, world->size, world->rank, hub->next_range++, &comm);
    if (result == DTRAIN_OK) {
        for (int i = 0; i < world->size; i++) comm->base.world_ranks[i] = i;
        *out = &comm->base;
    } else if (hub) {
        dtrain__mpi_hub_end(hub, false);
    }
    return result;
}

extern const dtrain_comm_ops *dtrain_mpi_comm_ops(void)
{
    static const dtrain_comm_ops ops = {DTRAIN_COMM_ABI,
                                        false,
                                        "mpi",
                                        dtrain__mpi_create,
                                        dtrain__mpi_start,
                                        dtrain__mpi_test,
                                        dtrain__mpi_wait,
                                        dtrain__mpi_alloc,
                                        dtrain__mpi_free,
                                        dtrain__mpi_split,
                                        dtrain__mpi_fail,
                                        dtrain__mpi_destroy};
    return &ops;
}

#endif /* DTRAIN_USE_MPI */
