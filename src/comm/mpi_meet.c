/* The MPI transport: how ranks meet in MPI, and how they leave it
 *
 * MPI_Init waits without a deadline for every rank. So all ranks first agree to call it, and a
 * thread calls it, for which the rank waits with a deadline: a rank may be stopped in between. Then
 * the ranks compare MPI's size and ranks with those of the world. A rank that cannot go on fails,
 * and the others find its exit record where they wait for it. */

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

static void *dtrain__mpi_thread_main(void *argument)
{
    dtrain__mpi_thread *self = (dtrain__mpi_thread *)argument;
    self->code = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &self->provided);
    dtrain__store(&self->returned, 1);
    pthread_mutex_lock(&self->gate);
    if (self->finalize) MPI_Finalize();
    pthread_mutex_unlock(&self->gate);
    dtrain__store(&self->returned, 2);
    return NULL;
}

/* Start the thread, with all signals blocked: the rank's thread handles them. */
static dtrain_result dtrain__mpi_thread_start(dtrain__mpi_hub *hub)
{
    sigset_t all, before;
    dtrain__mpi_thread *thread = (dtrain__mpi_thread *)calloc(1, sizeof *thread);
    if (!thread) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for MPI's thread");
    pthread_mutex_init(&thread->gate, NULL);
    pthread_mutex_lock(&thread->gate);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&thread->id, NULL, dtrain__mpi_thread_main, thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error) hub->thread = thread;
    else free(thread);
    return error ? dtrain_fail(DTRAIN_ERROR_SYSTEM, "MPI's thread could not be made: %s",
                               strerror(error))
                 : DTRAIN_OK;
}

/* Tell whether that many calls of the thread have returned; if not, sleep a moment. */
static bool dtrain__mpi_returned(const dtrain__mpi_hub *hub, uint32_t calls)
{
    const struct timespec nap = {0, 1000000};
    if (dtrain__load(&hub->thread->returned) >= calls) return true;
    nanosleep(&nap, NULL);
    return false;
}

/* Wait for something that MPI does on all ranks together; `done` tests it. The ranks exchange their
 * progress at least ten times a second: so a stopped rank is noticed, and all give up together. */
static dtrain_result dtrain__mpi_await(dtrain_world *world, dtrain__mpi_hub *hub, const char *call,
                                       bool (*done)(dtrain__mpi_hub *hub))
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
            if (done(hub)) mine = DONE;
            else sched_yield();
        const dtrain_result turn = dtrain__wait_poll(world, &wait);
        if (turn == DTRAIN_ERROR_PEER) return turn;
        if (mine != DONE && wait.waited_ns >= most) mine = TOO_LATE;
        DTRAIN__TRY(dtrain_world_all_gather(world, &mine, sizeof mine, all));
        for (late = 0; late < world->size && all[late] == DONE;) late++;
        for (int i = 0; i < world->size; i++)
            if (all[i] == TOO_LATE)
                return dtrain_fail(DTRAIN_ERROR_TIMEOUT,
                                   "%s has not returned on rank %d for %.1f s", call, i,
                                   1e-9 * (double)most);
    }
    if (hub->code == MPI_SUCCESS) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_SYSTEM, "%s failed with code %d", call, hub->code);
}

static bool dtrain__mpi_init_done(dtrain__mpi_hub *hub)
{
    const bool done = !hub->thread || dtrain__mpi_returned(hub, 1);
    if (done && hub->thread) hub->code = hub->thread->code;
    return done;
}

static bool dtrain__mpi_request_done(dtrain__mpi_hub *hub)
{
    int done = 1;
    if (hub->code == MPI_SUCCESS) hub->code = MPI_Test(&hub->request, &done, MPI_STATUS_IGNORE);
    return done || hub->code != MPI_SUCCESS;
}

/* Start MPI, unless the program has, and find the ranks of the world in it. */
DTRAIN__PRIVATE dtrain_result dtrain__mpi_meet(dtrain_world *world, dtrain__mpi_hub *hub)
{
    int32_t mine[2], all[DTRAIN_MAX_RANKS][2];
    int finalized = 0, ready = 0, size, rank, found = 0;
    void *highest = NULL;
    struct sigaction pipes;
    if (!world->control->free_at_start) world->control->free_at_start = dtrain__free_memory();
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
    DTRAIN__TRY(dtrain_world_all_gather(world, NULL, 0, NULL)); /* all ranks will call it */
    MPI_Initialized(&ready);
    if (!ready) DTRAIN__TRY(dtrain__mpi_thread_start(hub));
    DTRAIN__TRY(dtrain__mpi_await(world, hub, "MPI_Init_thread", dtrain__mpi_init_done));
    if (hub->thread && hub->thread->provided < MPI_THREAD_SERIALIZED)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "this MPI gives no MPI_THREAD_SERIALIZED; call MPI_Init before "
                           "dtrain_launch and MPI_Finalize after it");
    if (hub->thread) MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);

    /* Open MPI writes to sockets of ranks that have died, and SIGPIPE would kill this rank before
     * it can report which one: ignore it, unless the program handles it. */
    if (sigaction(SIGPIPE, NULL, &pipes) == 0 && pipes.sa_handler == SIG_DFL)
        hub->quiet_pipes = signal(SIGPIPE, SIG_IGN) != SIG_ERR;

    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
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

    /* A duplicate keeps the program's messages apart from these. */
    hub->code = MPI_Comm_idup(MPI_COMM_WORLD, &hub->mpi, &hub->request);
    DTRAIN__TRY(dtrain__mpi_await(world, hub, "MPI_Comm_idup", dtrain__mpi_request_done));
    MPI_Comm_set_errhandler(hub->mpi, MPI_ERRORS_RETURN);
    return DTRAIN_OK;
}

/* Leave MPI after the last communicator, and finalize it if dtrain has started it: only when all
 * ranks have ended without an error. Unless all have come this far, memory that MPI may still
 * access stays mapped, and so does that of a thread that never returns from MPI, until the process
 * ends. */
DTRAIN__PRIVATE void dtrain__mpi_part(dtrain_world *world, dtrain__mpi_hub *hub)
{
    dtrain__mpi_thread *thread = hub->thread;
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
                   "rank %d has not come to its end for %.1f s: rank %d leaves without "
                   "MPI_Finalize",
                   late, 1e-9 * (double)world->timeout_ns, world->rank);
    const bool ends = turn == DTRAIN_OK && hub->code == MPI_SUCCESS;
    hub->failed = !ends;
    if (thread) {
        wait = dtrain__wait_begin();
        const bool inside = !dtrain__load(&thread->returned); /* of MPI_Init_thread */
        thread->finalize = ends;
        pthread_mutex_unlock(&thread->gate);
        while (ends && !dtrain__mpi_returned(hub, 2) &&
               dtrain__wait_poll(world, &wait) == DTRAIN_OK)
            continue;
        if (inside || (ends && dtrain__load(&thread->returned) < 2)) {
            dtrain_log(world, DTRAIN_LOG_WARNING, "rank %d leaves MPI, and %s has not returned",
                       world->rank, ends ? "MPI_Finalize" : "MPI_Init_thread");
            pthread_detach(thread->id);
        } else {
            pthread_join(thread->id, NULL);
            pthread_mutex_destroy(&thread->gate);
            free(thread);
        }
    } else if (ends) MPI_Comm_free(&hub->mpi);
    if (hub->quiet_pipes) signal(SIGPIPE, SIG_DFL);
}

#endif /* DTRAIN_USE_MPI */
