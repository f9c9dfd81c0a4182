/* The MPI transport: how ranks meet in MPI, and how they leave it
 *
 * The program initialises and finalizes MPI. The ranks compare the size and the ranks of its
 * communicator with the world's, and duplicate the communicator with a deadline. A rank that cannot
 * continue fails, and the other ranks find its exit record in their waits. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/link_internal.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/mpi_internal.h"

#ifdef DTRAIN_USE_MPI

#define DTRAIN__MPI_PATIENCE_NS 30000000000u /* for MPI's own calls; timeout_ms if longer */

static bool dtrain__mpi_request_done(dtrain__mpi_hub *hub)
{
    int done = 1;
    if (hub->code == MPI_SUCCESS) hub->code = MPI_Test(&hub->request, &done, MPI_STATUS_IGNORE);
    return done || hub->code != MPI_SUCCESS;
}

/* Wait until all ranks have the duplicate. They exchange their progress ten times a second, so they
 * notice a stopped rank, and give up together. */
static dtrain_result dtrain__mpi_await(dtrain_world *world, dtrain__mpi_hub *hub)
{
    dtrain__wait wait = dtrain__wait_begin();
    const uint64_t least = DTRAIN__MPI_PATIENCE_NS;
    const uint64_t most = world->timeout_ns > least ? world->timeout_ns : least;
    enum { UNDER_WAY, DONE, TOO_LATE };
    int32_t mine = UNDER_WAY, all[DTRAIN_MAX_RANKS];
    int late = 0;
    while (late < world->size) {
        const uint64_t until = dtrain__now_ns() + 100000000u;
        while (mine != DONE && dtrain__now_ns() < until)
            if (dtrain__mpi_request_done(hub)) mine = DONE;
            else sched_yield();
        const dtrain_result turn = dtrain__wait_poll(world, &wait);
        if (turn == DTRAIN_ERROR_PEER) return turn;
        if (mine != DONE && wait.waited_ns >= most) mine = TOO_LATE;
        DTRAIN__TRY(dtrain_world_all_gather(world, &mine, sizeof mine, all));
        for (late = 0; late < world->size && all[late] == DONE;) late++;
        for (int i = 0; i < world->size; i++)
            if (all[i] == TOO_LATE)
                return dtrain_fail(DTRAIN_ERROR_TIMEOUT,
                                   "MPI_Comm_idup has not returned on rank %d for %.1f s", i,
                                   1e-9 * (double)most);
    }
    if (hub->code == MPI_SUCCESS) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_SYSTEM, "MPI_Comm_idup failed with code %d", hub->code);
}

/* Find the ranks of the world in the guest's communicator or, in a launch, in MPI_COMM_WORLD, and
 * duplicate it: the duplicate separates the program's messages from the library's. */
DTRAIN__PRIVATE dtrain_result dtrain__mpi_meet(dtrain_world *world, dtrain__mpi_hub *hub)
{
    const MPI_Comm given =
        world->comm_given ? *(const MPI_Comm *)world->comm_given : MPI_COMM_WORLD;
    int32_t mine[2], all[DTRAIN_MAX_RANKS][2];
    int finalized = 0, ready = 0, size, rank, found = 0;
    void *highest = NULL;
    hub->hearing = MPI_REQUEST_NULL;
    if (!world->control->free_at_start) world->control->free_at_start = dtrain__free_memory();
    if (world->size > 1 && !world->comm_given && (!world->link || world->launcher))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "the communicator over MPI needs ranks that MPI's launcher has started, "
                           "and these %d were started by dtrain_launch itself; run: mpirun -n %d, "
                           "or leave comm_ops NULL for the local communicator",
                           world->size, world->size);
    MPI_Initialized(&ready);
    MPI_Finalized(&finalized);
    if (!ready || finalized)
        return dtrain_fail(
            DTRAIN_ERROR_USAGE,
            "MPI %s; call MPI_Init before the first world and MPI_Finalize after the "
            "last",
            finalized ? "has been ended by MPI_Finalize" : "is not initialised");
    MPI_Comm_size(given, &size);
    MPI_Comm_rank(given, &rank);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &highest, &found);
    hub->number_limit = (found ? *(int *)highest : 32767) / DTRAIN__MPI_TAGS;
    mine[0] = size;
    mine[1] = rank;
    DTRAIN__TRY(dtrain_world_all_gather(world, mine, sizeof mine, all));
    for (int i = 0; i < world->size; i++) {
        hub->ranks[i] = all[i][1];
        if (all[i][0] != world->size)
            return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                               "MPI: rank %d of the world's %d sees %d in MPI; start all with this "
                               "MPI's launcher: mpirun -n %d, or srun with --mpi=pmix or pmi2",
                               i, world->size, (int)all[i][0], world->size);
    }

    hub->code = MPI_Comm_idup(given, &hub->mpi, &hub->request);
    DTRAIN__TRY(dtrain__mpi_await(world, hub));
    MPI_Comm_set_errhandler(hub->mpi, MPI_ERRORS_RETURN);
    return DTRAIN_OK;
}

/* Free the duplicate after the last communicator, if all ranks have ended without an error.
 * Otherwise memory that MPI can still access stays mapped until the process ends. */
DTRAIN__PRIVATE void dtrain__mpi_part(dtrain_world *world, dtrain__mpi_hub *hub)
{
    dtrain__wait wait = dtrain__wait_begin();
    dtrain_result turn = hub->failed ? DTRAIN_ERROR_PEER : dtrain__trouble(world);
    int late = 0;
    if (turn == DTRAIN_OK) hub->code = MPI_Ibarrier(hub->mpi, &hub->request);
    while (turn == DTRAIN_OK && !dtrain__mpi_request_done(hub)) {
        if (world->link) dtrain__link_pump(world, 1);
        turn = dtrain__wait_poll(world, &wait);
    }
    while (late + 1 < world->size &&
           dtrain__load(&world->control->exits[late].how) != DTRAIN__RUNNING)
        late++;
    if (turn == DTRAIN_ERROR_TIMEOUT)
        dtrain_log(world, DTRAIN_LOG_WARNING,
                   "rank %d has not come to its end for %.1f s: rank %d leaves MPI without it",
                   late, 1e-9 * (double)world->timeout_ns, world->rank);
    hub->failed = turn != DTRAIN_OK || hub->code != MPI_SUCCESS;
    if (hub->failed) return;
    if (hub->hearing != MPI_REQUEST_NULL) {
        MPI_Cancel(&hub->hearing);
        MPI_Wait(&hub->hearing, MPI_STATUS_IGNORE);
    }
    MPI_Comm_free(&hub->mpi);
}

#endif /* DTRAIN_USE_MPI */
