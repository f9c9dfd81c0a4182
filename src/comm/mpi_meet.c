/* The MPI transport: how ranks meet in MPI, and how they leave it */

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
#include "comm/engine_internal.h"
#include "comm/mpi_internal.h"
#include "device/backend.h"

#ifdef DTRAIN_USE_MPI

/* Whether all ranks have come to the end of the world well: only then MPI can be ended, because
 * MPI_Finalize waits for everybody and has no deadline. */
static bool dtrain__mpi_all_end(dtrain__mpi_hub *hub)
{
    dtrain_world *world = hub->world;
    MPI_Request request;
    int done = 0;
    for (dtrain__engine *comm = world->comms; comm && !hub->failed; comm = comm->next)
        if (((const dtrain__mpi_comm *)comm)->active)
            (void)dtrain__engine_failf(comm, DTRAIN_ERROR_USAGE, "left with operations in flight");
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
    while (hub->world->comms) dtrain__engine_release(hub->world->comms);
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
    dtrain__engine *comm = (dtrain__engine *)base;
    if (base == base->world->comm) dtrain__mpi_hub_end((dtrain__mpi_hub *)comm->shared, true);
    else dtrain__engine_release(comm);
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
    int64_t address = 0;
    dtrain__engine *comm;
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
        result = dtrain__engine_make(world, dtrain_mpi_comm_ops(), dtrain__mpi_transport(), hub,
                                     world->size, world->rank, &comm, &address);
    if (result == DTRAIN_OK) {
        comm->transport->join(comm, &address);
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
                                        dtrain__engine_start,
                                        dtrain__engine_test,
                                        dtrain__engine_wait,
                                        dtrain__engine_alloc,
                                        dtrain__engine_free,
                                        dtrain__engine_split,
                                        dtrain__engine_fail,
                                        dtrain__mpi_destroy};
    return &ops;
}

#endif /* DTRAIN_USE_MPI */
