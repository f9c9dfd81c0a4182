/* The MPI transport: how ranks meet in MPI, and how they leave it
 *
 * MPI_Init may wait for ever for a rank that does not come, so nobody calls it before all have said
 * that they will. Then all compare what MPI thinks the world is with what it is. A rank that cannot
 * go on leaves, and the others hear of it where they wait for it. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/link_internal.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/mpi_internal.h"

#ifdef DTRAIN_USE_MPI

typedef struct dtrain__mpi_hello {
    int32_t size, rank; /* in MPI */
} dtrain__mpi_hello;

static dtrain_result dtrain__mpi_can_meet(const dtrain_world *world)
{
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "MPI has been ended, by an earlier world or by the program; for several "
                           "worlds call MPI_Init before the first and MPI_Finalize after the last");
    if (world->size > 1 && (!world->link || world->launcher))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "the communicator over MPI needs ranks that MPI's launcher has started, "
                           "and these %d were started by dtrain_launch itself; run: mpirun -n %d, "
                           "or leave comm_ops NULL for the local communicator",
                           world->size, world->size);
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
    int ready = 0, provided = 0, found = 0;
    void *highest = NULL;
    MPI_Initialized(&ready);
    hub->ours = !ready;
    if (!ready && MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "MPI_Init_thread failed");
    if (hub->ours) MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    dtrain__mpi_quiet_pipes(hub);
    MPI_Comm_size(MPI_COMM_WORLD, &mine->size);
    MPI_Comm_rank(MPI_COMM_WORLD, &mine->rank);
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &highest, &found);
    hub->number_limit = (found ? *(int *)highest : 32767) / DTRAIN__MPI_TAGS;
    return DTRAIN_OK;
}

/* Judge whether MPI's world is this one: the same verdict on all ranks. */
static dtrain_result dtrain__mpi_verdict(const dtrain__mpi_hello *all, int size)
{
    int alone = 0;
    for (int i = 0; i < size; i++) alone += all[i].size == 1;
    if (alone == size && size > 1)
        return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                           "MPI: each of the %d ranks is alone in an MPI of its own; start them "
                           "with this MPI's launcher: mpirun -n %d, or srun with --mpi=pmix or "
                           "pmi2",
                           size, size);
    for (int i = 0; i < size; i++)
        if (all[i].size != size)
            return dtrain_fail(DTRAIN_ERROR_MISMATCH,
                               "MPI: rank %d of the world's %d sees %d in MPI; start as many with "
                               "mpirun as the environment announces",
                               i, size, all[i].size);
    return DTRAIN_OK;
}

/* Duplicate MPI's world, so that no message of the host meets one of ours, by the call that does
 * not block. */
static dtrain_result dtrain__mpi_duplicate(dtrain_world *world, dtrain__mpi_hub *hub)
{
    dtrain__wait wait = dtrain__wait_begin();
    MPI_Request request;
    int done = 0;
    int code = MPI_Comm_idup(MPI_COMM_WORLD, &hub->mpi, &request);
    while (code == MPI_SUCCESS) {
        code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS || done) break;
        const dtrain_result turn = dtrain__wait_turn(world, &wait);
        if (turn == DTRAIN_ERROR_TIMEOUT)
            return dtrain_fail(turn, "MPI_Comm_idup: not finished after %.1f s",
                               1e-9 * (double)world->timeout_ns);
        DTRAIN__TRY(turn);
    }
    if (code != MPI_SUCCESS)
        return dtrain_fail(DTRAIN_ERROR_SYSTEM, "MPI_Comm_idup failed with code %d", code);
    MPI_Comm_set_errhandler(hub->mpi, MPI_ERRORS_RETURN);
    return DTRAIN_OK;
}

DTRAIN__PRIVATE dtrain_result dtrain__mpi_meet(dtrain_world *world, dtrain__mpi_hub *hub)
{
    dtrain__mpi_hello mine, all[DTRAIN_MAX_RANKS];
    if (!world->control->free_at_start) world->control->free_at_start = dtrain__free_memory();
    DTRAIN__TRY(dtrain__mpi_can_meet(world));
    DTRAIN__TRY(dtrain_world_all_gather(world, NULL, 0, NULL));
    DTRAIN__TRY(dtrain__mpi_init(hub, &mine));
    DTRAIN__TRY(dtrain_world_all_gather(world, &mine, sizeof mine, all));
    DTRAIN__TRY(dtrain__mpi_verdict(all, world->size));
    for (int i = 0; i < world->size; i++) hub->ranks[i] = all[i].rank;
    return dtrain__mpi_duplicate(world, hub);
}

/* Say whether all ranks have come to the end of the world well: only then MPI can be ended, because
 * MPI_Finalize waits for everybody and has no deadline. */
static bool dtrain__mpi_all_end(dtrain_world *world, const dtrain__mpi_hub *hub)
{
    dtrain__wait wait = dtrain__wait_begin();
    MPI_Request request;
    int done = 0;
    if (hub->failed || dtrain__trouble(world) != DTRAIN_OK) return false;
    if (MPI_Ibarrier(hub->mpi, &request) != MPI_SUCCESS) return false;
    for (;;) {
        if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
        if (done) return true;
        if (world->link) dtrain__link_pump(world, 1);
        if (dtrain__wait_poll(world, &wait) != DTRAIN_OK) return false;
    }
}

/* Leave MPI after the last communicator, and end it if it was begun here. What MPI may still touch
 * stays mapped when not all ranks have come this far. */
DTRAIN__PRIVATE void dtrain__mpi_part(dtrain_world *world, dtrain__mpi_hub *hub)
{
    int finalized = 1;
    hub->failed = !dtrain__mpi_all_end(world, hub);
    if (!hub->failed) {
        MPI_Comm_free(&hub->mpi);
        MPI_Finalized(&finalized);
        if (hub->ours && !finalized) MPI_Finalize();
    }
    if (hub->quiet_pipes) signal(SIGPIPE, SIG_DFL);
}

#endif /* DTRAIN_USE_MPI */
