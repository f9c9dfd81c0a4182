/* dtrain_launch
 *
 *     dtrain_launch
 *         resolve      who starts the ranks: this call, another launcher, or this call on its node
 *         map          the shared region, or a private page if a launcher started this rank
 *         run          each rank, in a process or a thread (rank.c)
 *         conclude     one result, one sentence and the info from the exit records
 *         restart      after a failure, beginning with "map" (restart.c) */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/timeline_internal.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "comm/backend.h"
#include "launch/launch.h"
#include "launch/launch_internal.h"
#include "device/device.h"
#include "device/device_internal.h"

static const dtrain_launch_info dtrain__no_end = {0, -1, 1, 0, 0, 0}; /* until ranks have run */

DTRAIN__PRIVATE uint32_t dtrain__cores(void)
{
#ifdef CPU_COUNT /* hidden when a system header came before _GNU_SOURCE was defined */
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return (uint32_t)CPU_COUNT(&set);
#endif
    const long count = sysconf(_SC_NPROCESSORS_ONLN); /* more cores than a cpu_set_t can hold */
    return count > 0 ? (uint32_t)count : 1;
}

/* Return the exit status for a rank's return value. An exit status has eight bits; 256 must not
 * look like success. */
static int dtrain__exit_code(int value) { return value == 0 || (value & 255) ? value & 255 : 1; }

/* ---- Ranks as processes -----------------------------------------------------------------------*/

static void dtrain__signal_ranks(dtrain__launch *launch, int number)
{
    for (uint32_t i = 0; i < launch->desc.rank_count; i++)
        if (launch->pids[i] > 0) kill(launch->pids[i], number);
}

/* Record how ranks have ended, from waitpid. A rank that returned has written a better record
 * itself, unless it recorded 0 and its process failed afterwards. If another thread of the host has
 * taken the exit status, the rank is lost. */
static void dtrain__reap(dtrain__launch *launch)
{
    for (int i = 0; i < (int)launch->desc.rank_count; i++) {
        const int rank = launch->place.rank + i;
        int status = 0;
        if (launch->pids[i] <= 0) continue;
        const pid_t pid = waitpid(launch->pids[i], &status, WNOHANG | WUNTRACED | WCONTINUED);
        if (pid == 0 || (pid < 0 && errno != ECHILD)) continue;
        if (pid > 0 && (WIFSTOPPED(status) || WIFCONTINUED(status))) {
            launch->stops[i] = WIFSTOPPED(status) ? WSTOPSIG(status) : 0;
            continue;
        }
        launch->pids[i] = 0;
        launch->live--;
        if (pid < 0) {
            dtrain__record_lost(launch->region.control, rank);
            continue;
        }
        const uint32_t known = dtrain__load(&launch->region.control->exits[rank].how);
        const bool killed = WIFSIGNALED(status);
        int value = killed ? WTERMSIG(status) : WEXITSTATUS(status);
        dtrain__end how = value ? DTRAIN__RETURNED : DTRAIN__LEFT; /* exit() in rank_main */
        if (killed) how = DTRAIN__SIGNALED;
        if (killed && value == SIGKILL && launch->kill_ns == 1) how = DTRAIN__STOPPED;
        if (known == DTRAIN__RUNNING || (value && known == DTRAIN__LEFT))
            dtrain__record_end(launch->region.control, rank, how, value, "");
    }
}

/* Forward a signal to the ranks, unless it came from a terminal, which signals the whole process
 * group. The second request to stop kills the ranks; two requests within DTRAIN__ONE_REQUEST_NS
 * count as one. */
static void dtrain__forward(dtrain__launch *launch, int number, bool from_terminal)
{
    const bool stop = number != SIGUSR1 && number != SIGUSR2;
    const uint64_t now = dtrain__now_ns(), before = launch->stop_ns;
    const bool again = launch->stop_count && now - before < DTRAIN__ONE_REQUEST_NS;
    if (stop && again && number == launch->forwarded && !from_terminal) return;
    if (!from_terminal) dtrain__signal_ranks(launch, number);
    launch->passed_on = number;
    if (!stop && !(number == SIGUSR1 && launch->desc.catch_signals)) return;
    dtrain__signal_ranks(launch, SIGCONT); /* a stopped rank receives signals when it continues */
    if (!launch->forwarded && launch->desc.catch_signals && number != SIGQUIT) {
        if (from_terminal && !launch->log.write) fputc('\n', stderr); /* after its ^C */
        dtrain__log_to(&launch->log, DTRAIN_LOG_INFO,
                       "asked to stop by signal %d (%s): ranks end after their step; a second "
                       "request ends them at once",
                       number, dtrain__signal_name(number));
    }
    launch->forwarded = number;
    launch->stop_ns = now;
    if (!stop || ++launch->stop_count < 2) return;
    launch->kill_ns = 1;
    dtrain__signal_ranks(launch, SIGKILL);
}

/* Wait until all ranks have ended. SIGCHLD wakes this thread; the nap is for the case that another
 * thread of the host has taken the signal. */
static void dtrain__watch(dtrain__launch *launch)
{
    const int count = (int)launch->desc.rank_count;
    const uint64_t most_ns = (uint64_t)launch->desc.timeout_ms * 1000000u;
    uint64_t before = dtrain__now_ns(), stopped_ns = 0;
    const struct timespec nap = {0, 50000000};
    char text[96];
    memset(launch->stops, 0, sizeof launch->stops);
    while (launch->live > 0) {
        siginfo_t what;
        int stopped = 0;
        const int number = sigtimedwait(&launch->watched, &what, &nap);
        dtrain__reap(launch);
        if (number > 0 && number != SIGCHLD)
            dtrain__forward(launch, number, what.si_code > 0 && number != SIGHUP);

        /* Kill ranks that have been stopped for timeout_ms while all other ranks have ended: no
         * rank waits for a stopped rank any more, so no deadline ends it. A gap of more than a
         * second counts as one second: a job that was suspended with its launcher continues. */
        const uint64_t now = dtrain__now_ns(), gap = now - before;
        before = now;
        for (int i = 0; i < count; i++) stopped += launch->pids[i] > 0 && launch->stops[i];
        stopped_ns += gap < 1000000000u ? gap : 1000000000u;
        if (!stopped || stopped < launch->live || launch->live == count) stopped_ns = 0;
        for (int i = 0; i < count && stopped_ns >= most_ns; i++) {
            if (launch->pids[i] <= 0) continue;
            snprintf(text, sizeof text, "it was stopped by signal %d for %.1f s while others ended",
                     launch->stops[i], 1e-9 * (double)stopped_ns);
            dtrain__record_end(launch->region.control, launch->place.rank + i, DTRAIN__STOPPED,
                               SIGKILL, text);
            launch->stops[i] = 0;
            kill(launch->pids[i], SIGKILL);
        }

        if (!launch->kill_ns && dtrain__load(&launch->region.control->first_failed))
            launch->kill_ns = now + (uint64_t)launch->desc.grace_ms * 1000000u;
        if (launch->kill_ns && now >= launch->kill_ns) {
            launch->kill_ns = 1; /* the grace period has ended */
            dtrain__signal_ranks(launch, SIGKILL);
        }
    }
}

/* Fork the ranks and watch them. A rank must not outlive the launcher. If the launcher died before
 * the prctl, the rank's parent is another process. */
static dtrain_result dtrain__fork_all(dtrain__launch *launch)
{
    int i = 0, error = 0;
    fflush(NULL); /* otherwise each rank would print the buffers again */
    for (; i < (int)launch->desc.rank_count && !error; i += !error) {
        const pid_t pid = fork();
        if (pid == 0) {
#ifdef __linux__
            prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
            if (getppid() != launch->launcher) _exit(1);
            if (launch->desc.catch_signals)
                dtrain__signals_install(launch->desc.options.flight_directory != NULL,
                                        launch->old_mask);
            else pthread_sigmask(SIG_SETMASK, &launch->old_mask, NULL);
            const int code = dtrain__rank_run(launch, i);
            fflush(NULL);
            _exit(dtrain__exit_code(code));
        }
        if (pid < 0) error = errno;
        launch->pids[i] = pid > 0 ? pid : 0;
        launch->live += pid > 0;
    }
    if (error) launch->kill_ns = 1;
    dtrain__watch(launch);
    if (!error) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_SYSTEM,
                       "dtrain_launch: rank %d of %d could not be forked: %s; look at the process "
                       "limit (ulimit -u), at memory and at the container's pids limit",
                       launch->place.rank + i, launch->place.size, strerror(error));
}

/* Take a pending SIGCHLD from the queue; false if there is none. */
static bool dtrain__take_child_signal(void)
{
    const struct timespec no_time = {0, 0};
    sigset_t only_child;
    sigemptyset(&only_child);
    sigaddset(&only_child, SIGCHLD);
    return sigtimedwait(&only_child, NULL, &no_time) == SIGCHLD;
}

/* ---- Ranks as threads -------------------------------------------------------------------------*/

static void *dtrain__thread_main(void *argument)
{
    dtrain__launch *launch = (dtrain__launch *)argument;
    while (dtrain__load(&launch->gate) == 0) sched_yield();
    if (dtrain__load(&launch->gate) == 1)
        dtrain__rank_run(launch, (int)dtrain__fetch_add(&launch->taken, 1u));
    return NULL;
}

/* Run the ranks as threads. The ranks start when all threads exist: a running thread could not be
 * killed if a later thread cannot be created. */
static dtrain_result dtrain__launch_threads(dtrain__launch *launch)
{
    const int count = (int)launch->desc.rank_count;
    pthread_t threads[DTRAIN_MAX_RANKS];
    int started = 0, error = 0;
    launch->gate = launch->taken = 0;
    for (; started < count && !error; started += !error)
        error = pthread_create(&threads[started], NULL, dtrain__thread_main, launch);
    dtrain__store(&launch->gate, error ? 2u : 1u);
    for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
    if (!error) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_SYSTEM,
                       "dtrain_launch: thread of rank %d of %d could not be made: %s", started,
                       count, strerror(error));
}

/* ---- dtrain_launch ----------------------------------------------------------------------------*/

/* Check and resolve the settings that a launch and a join have in common. */
DTRAIN__PRIVATE dtrain_result dtrain__check_launch(const char *call, dtrain__launch *launch)
{
    const dtrain_launch_desc *desc = &launch->desc;
    dtrain_world_options *options = &launch->desc.options;
    const uint32_t size = (uint32_t)launch->place.size;
    const size_t path = options->flight_directory ? strlen(options->flight_directory) : 0;
    const dtrain__bound bounds[] = {
        {options->log_level > DTRAIN_LOG_DEBUG, "log_level", (double)options->log_level, "0 to 4"},
        /* (int): the program's number can be negative */
        {desc->threads_per_rank > 4096, "the number of threads",
         (double)(int)desc->threads_per_rank, "0 to 4096"},
        {path >= DTRAIN__FLIGHT_PATH, "the length of flight_directory", (double)path,
         "at most 1023 bytes"}};
    DTRAIN__TRY(dtrain__check_bounds(call, bounds, sizeof bounds / sizeof *bounds));
    if (desc->device_ops == dtrain__plan_device_ops())
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "%s: the plan device runs no kernel: expected cpu or cuda", call);
    if (options->node_ranks && size % options->node_ranks)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "%s: node_ranks is %u, expected a divisor of the %u ranks (1 makes every "
            "rank a node)",
            call, options->node_ranks, size);
    options->allocator = dtrain__resolve_allocator(&options->allocator);
    launch->log.write = options->log;
    launch->log.user = options->log_user;
    launch->log.level = (dtrain_log_level)options->log_level;
    return DTRAIN_OK;
}

/* Check the desc, find out who starts the ranks (this call, another launcher, or this call on its
 * node), and fill in defaults. */
static dtrain_result dtrain__resolve_launch(dtrain__launch *launch, const dtrain_launch_desc *given)
{
    dtrain_launch_desc *desc = &launch->desc;
    dtrain__placement *place = &launch->place;
    DTRAIN__TRY(dtrain__abi_check("dtrain_launch", given ? given->abi : NULL, &launch->abi));
    DTRAIN__TRY(dtrain__take(&launch->abi, DTRAIN__ABI_launch_desc, given, desc));
    launch->log.rank = -1;
    uint32_t most = desc->rank_count;
    if (!desc->rank_count || desc->default_rank_count > DTRAIN_MAX_RANKS)
        most = desc->default_rank_count;
    const char **dumps = &desc->options.flight_directory;
    if (!*dumps || !**dumps) *dumps = dtrain__env_text(getenv, "DTRAIN_FLIGHT_DIRECTORY");
    const dtrain__bound bounds[] = {{most > DTRAIN_MAX_RANKS, "rank_count", (double)(int)most,
                                     "at most 256 (DTRAIN_MAX_RANKS)"},
                                    {desc->mode > DTRAIN_LAUNCH_THREADS, "mode", (double)desc->mode,
                                     "0 (processes) or 1 (threads)"}};
    DTRAIN__TRY(dtrain__check_bounds("dtrain_launch", bounds, sizeof bounds / sizeof *bounds));
    DTRAIN__TRY(dtrain__recognise(getenv, place));
    if (place->family && desc->rank_count && (int)desc->rank_count != place->size)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "dtrain_launch: rank_count is %u, and the environment (%s) announces "
                           "%d ranks; set rank_count to 0 or to the launcher's number",
                           desc->rank_count, place->family, place->size);
    launch->joins = place->family && place->forks != place->size;
    launch->is_rank = launch->joins && !place->forks;
    if (launch->joins && desc->mode == DTRAIN_LAUNCH_THREADS)
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED,
                           "dtrain_launch: mode is DTRAIN_LAUNCH_THREADS, and the environment (%s) "
                           "announces %d ranks in processes; use DTRAIN_LAUNCH_PROCESSES",
                           place->family, place->size);
    if (!place->named) place->job = desc->job;
    if (!place->family) place->size = most ? (int)most : 1;
    desc->rank_count = (uint32_t)(place->forks ? place->forks : launch->joins ? 1 : place->size);
    DTRAIN__TRY(dtrain__check_launch("dtrain_launch", launch));
    launch->cores = dtrain__cores();
    if (!desc->timeout_ms) desc->timeout_ms = 600000;
    const uint32_t most_ms = 300000;
    if (!desc->join_ms) desc->join_ms = desc->timeout_ms < most_ms ? desc->timeout_ms : most_ms;
    if (!desc->grace_ms) desc->grace_ms = 5000;
    if (!desc->backoff_ms) desc->backoff_ms = 1000;
    launch->restarts.most = desc->restarts;
    launch->restarts.backoff_ms = desc->backoff_ms;
    launch->launcher = desc->mode == DTRAIN_LAUNCH_PROCESSES && !launch->is_rank ? getpid() : 0;
    return DTRAIN_OK;
}

/* Make one result, one sentence and the info from the exit records of all ranks. */
static dtrain_result dtrain__conclude(dtrain__launch *launch, dtrain_launch_info *info)
{
    dtrain__control *control = launch->region.control;
    const int first = dtrain__first_failure(control);
    int others = 0;
    char how[200], stopped[128] = "", too[64] = "";
    info->signal = launch->forwarded ? launch->forwarded : launch->caught;
    info->exit_code = 0;
    if (first < 0) return DTRAIN_OK;
    const dtrain__exit_record *end = &control->exits[first];
    const bool killed = end->how == DTRAIN__SIGNALED || end->how == DTRAIN__STOPPED;
    const uint64_t now = dtrain__now_ns(); /* the clock of another time namespace can differ */
    const bool known = end->ended_ns > launch->attempt_ns && end->ended_ns < now;
    const double when = 1e-9 * (double)((known ? end->ended_ns : now) - launch->attempt_ns);
    const dtrain__exit_record *own = &control->exits[launch->is_rank ? launch->place.rank : first];
    for (int i = 0; i < launch->place.size; i++)
        others += i != first && control->exits[i].how > DTRAIN__LEFT;
    info->first_failed_rank = first;
    launch->code = end->how == DTRAIN__RETURNED ? (dtrain_result)end->code : DTRAIN_OK;
    if (killed) info->signal = end->value;
    info->exit_code = killed ? 128 + end->value : dtrain__exit_code(end->value);
    if (end->how == DTRAIN__LOST) info->exit_code = 1;
    if (own->how == DTRAIN__RETURNED) info->exit_code = dtrain__exit_code(own->value);
    if (launch->stop_count > 1) info->exit_code = 128 + launch->forwarded; /* not 128 + SIGKILL */
    dtrain__describe_end(control, first, how, sizeof how);
    if (launch->forwarded)
        snprintf(stopped, sizeof stopped, "; the run was stopped by signal %d (%s)",
                 launch->forwarded, dtrain__signal_name(launch->forwarded));
    if (others)
        snprintf(too, sizeof too, "; %d other%s failed after it", others, others > 1 ? "s" : "");
    return dtrain_fail(DTRAIN_ERROR_RANK_FAILED, "%s, %.1f s after the start%s%s%s%s", how, when,
                       stopped, too, end->error[0] ? "; its last error: " : "", end->error);
}

/* Run one attempt: start all ranks, wait until they have ended, and make the result. */
static dtrain_result dtrain__attempt(dtrain__launch *launch, dtrain_launch_info *info)
{
    const uint32_t arenas = launch->joins ? 0 : launch->desc.rank_count;
    launch->attempt_ns = dtrain__now_ns();
    launch->kill_ns = 0;
    launch->announced = 0;
    launch->passed_on = 0;
    *info = dtrain__no_end;
    dtrain_result result =
        dtrain__map_region(launch->desc.options.reserve_bytes, arenas, NULL, -1, &launch->region);
    if (result != DTRAIN_OK) return result;
    dtrain__control *control = launch->region.control;
    info->rank_count = (uint32_t)launch->place.size;
    if (launch->is_rank) (void)dtrain__rank_run(launch, 0);
    else if (launch->launcher) result = dtrain__fork_all(launch);
    else result = dtrain__launch_threads(launch);
    launch->announced = dtrain__load(&control->progress);
    launch->caught = dtrain__load(&control->caught);
    if (launch->desc.catch_signals && !launch->launcher) launch->caught = dtrain__signal_caught();
    if (result == DTRAIN_OK) result = dtrain__conclude(launch, info);
    if (launch->joined != DTRAIN_OK) /* this rank never ran: its own sentence is the best */
        result = dtrain_fail(launch->joined, "%s", control->exits[launch->place.rank].error);
    munmap(control, launch->region.bytes);
    return result;
}

/* Make a number shared by all attempts of this run, and by no other run: from the name that
 * dtrain-run gives them, or from the process that starts them (its id and start time). If this
 * process starts them: from the time and the address of the stack. */
static uint64_t dtrain__job_number(const dtrain__launch *launch)
{
    const char *name = dtrain__env_text(getenv, "DTRAIN_RUN_ID");
    uint64_t from[2] = {launch->start_ns, (uint64_t)getpid()};
    const int parent = (int)getppid();
    const uint64_t at = name || !launch->place.complete ? 0 : dtrain__process_started(parent);
    if (at) from[0] = at, from[1] = (uint64_t)parent;
    if (name) from[0] = from[1] = 0;
    if (!name && !at) return dtrain__siphash(from, &launch, sizeof launch) | 1;
    return dtrain__siphash(from, name, name ? strlen(name) : 0) | 1;
}

/* Launch the ranks, restart them if necessary, and make the result and the info.
 *
 * A process that forks ranks blocks the signals of its sigtimedwait, from before the first fork
 * until after the last restart. If the host ignores SIGCHLD, there would be no exit statuses, so
 * SIGCHLD has the default action during the launch. */
static dtrain_result dtrain__launch_ranks(const dtrain_launch_desc *desc, dtrain_rank_fn rank_main,
                                          void *user, dtrain_launch_info *info)
{
    static const int forwarded[] = {SIGINT, SIGTERM, SIGQUIT, SIGUSR1, SIGUSR2, SIGHUP};
    dtrain__launch launch;
    struct sigaction child_action;
    bool ignores_children = false, child_was_pending = false;
    memset(&launch, 0, sizeof launch);
    if (!rank_main) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_launch: rank_main is NULL");
    if (dtrain__rank_of_thread() >= 0)
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_launch: called by a rank; launch once, from main");
    launch.rank_main = rank_main;
    launch.user = user;
    launch.start_ns = dtrain__now_ns();
    dtrain_result result = dtrain__resolve_launch(&launch, desc);
    launch.job = dtrain__job_number(&launch);
    const bool catches = launch.desc.catch_signals && !launch.launcher;
    pthread_sigmask(SIG_SETMASK, NULL, &launch.old_mask);
    if (result == DTRAIN_OK && catches)
        result =
            dtrain__signals_begin(launch.desc.options.flight_directory != NULL, launch.old_mask);
    if (result == DTRAIN_OK && launch.launcher) {
        sigemptyset(&launch.watched);
        sigaddset(&launch.watched, SIGCHLD);
        for (int i = 0; i < (dtrain__hangup_ignored() ? 5 : 6); i++)
            sigaddset(&launch.watched, forwarded[i]);
        sigaction(SIGCHLD, NULL, &child_action);
        ignores_children =
            child_action.sa_handler == SIG_IGN || (child_action.sa_flags & SA_NOCLDWAIT);
        pthread_sigmask(SIG_BLOCK, &launch.watched, NULL);
        child_was_pending = dtrain__take_child_signal();
        if (ignores_children) signal(SIGCHLD, SIG_DFL);
    }
    if (result == DTRAIN_OK) {
        do result = dtrain__attempt(&launch, info);
        while (dtrain__restart(&launch, &result, info));
        info->seconds = 1e-9 * (double)(dtrain__now_ns() - launch.start_ns);
        info->restart_count = launch.place.restart_count + launch.restart_count;
        if (catches) dtrain__signals_end();

        /* Remove the last SIGCHLD of a rank from the queue: a handler of the host would wait for a
         * child that no longer exists. Raise a SIGCHLD of another child again that was pending. */
        while (launch.launcher && dtrain__take_child_signal()) continue;
        if (ignores_children) sigaction(SIGCHLD, &child_action, NULL);
        if (child_was_pending) kill(getpid(), SIGCHLD);
        pthread_sigmask(SIG_SETMASK, &launch.old_mask, NULL);
    }
    const char *path = result == DTRAIN_OK ? NULL : getenv("TORCHELASTIC_ERROR_FILE");
    const int file = path && path[0] ? dtrain__open(path, O_WRONLY | O_CREAT | O_TRUNC) : -1;
    if (file < 0) return result;

    /* torchrun reads the root cause of a failure from this file. */
    char room[2 * DTRAIN__WRITER_PIECE];
    dtrain__writer out = {file, 0, 0, sizeof room, 0, room};
    dtrain__writer_add(&out, "{\"message\": {");
    dtrain__writer_string(&out, "message", dtrain_last_error());
    dtrain__writer_add(&out, ", \"extraInfo\": {\"timestamp\": \"%lld\"}}}\n",
                       (long long)time(NULL));
    dtrain__writer_flush(&out);
    close(file);
    return result;
}

DTRAIN_API dtrain_result dtrain_launch(const dtrain_launch_desc *desc, dtrain_rank_fn rank_main,
                                       void *user, dtrain_launch_info *info)
{
    dtrain_launch_info own = dtrain__no_end;
    const dtrain_result result = dtrain__launch_ranks(desc, rank_main, user, &own);
    dtrain__give(desc ? desc->abi : NULL, DTRAIN__ABI_launch_info, &own, info);
    return result;
}

DTRAIN_API dtrain_result dtrain_launch_plan(const dtrain_launch_desc *desc,
                                            dtrain_launch_place *place)
{
    dtrain__launch launch;
    dtrain_launch_place own;
    if (!place) return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_launch_plan: place is NULL");
    dtrain__give(desc ? desc->abi : NULL, DTRAIN__ABI_launch_place, NULL, place);
    memset(&launch, 0, sizeof launch);
    DTRAIN__TRY(dtrain__resolve_launch(&launch, desc));
    own.rank_count = launch.place.size;
    own.first_rank = launch.place.rank;
    own.started_count = (int)launch.desc.rank_count;
    own.restart_count = launch.place.restart_count;
    own.host_rank_count = launch.is_rank ? launch.place.local_size : own.started_count;
    dtrain__give(&launch.abi, DTRAIN__ABI_launch_place, &own, place);
    return DTRAIN_OK;
}
