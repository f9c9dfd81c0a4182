/* Requests to stop
 *
 * A rank that is about to lose its machine is told so by SIGTERM, or by SIGUSR1 some time before.
 * With dtrain_launch_desc.catch_signals a handler notes it, and the training loop asks at the end
 * of each step. The handler does nothing else: it may interrupt anything, this library's own waits
 * and a checkpoint that is being written included.
 *
 *     SIGTERM or SIGUSR1 --> the handler notes it --> dtrain_world_stop_requested, on this rank
 *                                                           |
 *                         dtrain_world_agree_stop: any rank --> all ranks, after the same step
 *     SIGTERM again      --> the default action: the process ends at once
 *     SIGUSR2            --> with flight_directory: counted, and the next wait or call writes the
 *                            flight record (comm/flight.c)
 *
 * A handler gets nothing but a number, so what it notes is the process's: the one mutable state of
 * this library that does not belong to a world. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/launch_internal.h"
#include "world/world.h"
#include "world/world_internal.h"

static uint32_t dtrain__signals_taken; /* atomic: 1 while a run of this process catches signals */
static int dtrain__signal_seen;        /* atomic: the first one that came, 0 = none */
static uint64_t dtrain__term_ns;       /* atomic: when the first SIGTERM came, 0 = it has not */
static uint32_t dtrain__dump_signals;  /* atomic: how many SIGUSR2 came */
static bool dtrain__dump_caught;       /* SIGUSR2 is handled as well */
static struct sigaction dtrain__found_term, dtrain__found_usr1, dtrain__found_usr2; /* the host's */

/* Note a signal. A second SIGTERM gets the default action back and raises it again: it is blocked
 * in here, and ends the process on return. All calls are async-signal-safe. */
static void dtrain__on_signal(int number)
{
    const int error = errno;
    if (number == SIGUSR2) {
        dtrain__fetch_add(&dtrain__dump_signals, 1u);
        return;
    }
    const uint64_t now = dtrain__now_ns(), first = dtrain__load(&dtrain__term_ns);
    if (!dtrain__load(&dtrain__signal_seen)) dtrain__store(&dtrain__signal_seen, number);
    if (number == SIGTERM && !first) dtrain__store(&dtrain__term_ns, now);
    if (number == SIGTERM && first && now - first >= DTRAIN__ONE_REQUEST_NS) {
        signal(SIGTERM, SIG_DFL);
        raise(SIGTERM);
        if (getpid() == 1) _exit(128 + SIGTERM); /* the kernel spares the first of a container */
    }
    errno = error;
}

/* Install the handler, and take what it handles out of a mask that the caller will set after it:
 * in this order a signal that is pending already is caught. Interrupted system calls go on. SIGUSR2
 * is the host's, unless it asks for dumps. */
DTRAIN__PRIVATE void dtrain__signals_install(bool dumps, sigset_t *mask)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = dtrain__on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    dtrain__store(&dtrain__signal_seen, 0);
    dtrain__store(&dtrain__term_ns, 0u);
    sigaction(SIGTERM, &action, &dtrain__found_term);
    sigaction(SIGUSR1, &action, &dtrain__found_usr1);
    dtrain__dump_caught = dumps;
    if (dumps) sigaction(SIGUSR2, &action, &dtrain__found_usr2);
    if (dumps) sigdelset(mask, SIGUSR2);
    sigdelset(mask, SIGTERM);
    sigdelset(mask, SIGUSR1);
}

/* Begin to catch signals in a process that goes on after its ranks: one run at a time. */
DTRAIN__PRIVATE dtrain_result dtrain__signals_begin(bool dumps, sigset_t *old_mask)
{
    uint32_t none = 0;
    sigset_t mask;
    if (!__atomic_compare_exchange_n(&dtrain__signals_taken, &none, 1u, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_launch: catch_signals is set, and another run of this process "
                           "catches signals now; set it in one of them, a process has one handler");
    pthread_sigmask(SIG_SETMASK, NULL, old_mask);
    mask = *old_mask;
    dtrain__signals_install(dumps, &mask);
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    return DTRAIN_OK;
}

/* Give the host its handlers and its mask back. */
DTRAIN__PRIVATE void dtrain__signals_end(const sigset_t *old_mask)
{
    sigaction(SIGTERM, &dtrain__found_term, NULL);
    sigaction(SIGUSR1, &dtrain__found_usr1, NULL);
    if (dtrain__dump_caught) sigaction(SIGUSR2, &dtrain__found_usr2, NULL);
    pthread_sigmask(SIG_SETMASK, old_mask, NULL);
    dtrain__store(&dtrain__signals_taken, 0u);
}

/* Return how many flight records have been asked for by signals. */
DTRAIN__PRIVATE uint32_t dtrain__dumps_asked(void) { return dtrain__load(&dtrain__dump_signals); }

/* Return the signal that this process has caught, 0 for none. */
DTRAIN__PRIVATE int dtrain__signal_caught(void) { return dtrain__load(&dtrain__signal_seen); }

/* The signal is also noted in the control page: a run that was asked to stop is not restarted, and
 * the launcher may know nothing of a signal that was sent to one rank alone. */
DTRAIN_API bool dtrain_world_stop_requested(const dtrain_world *world)
{
    const int number = world && world->catches ? dtrain__signal_caught() : 0;
    if (number && *world->mine) dtrain__store(&world->control->caught, number);
    return number != 0;
}

DTRAIN_API dtrain_result dtrain_world_agree_stop(dtrain_world *world, bool *stop)
{
    char all[DTRAIN_MAX_RANKS];
    if (!world || !stop)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "dtrain_world_agree_stop: %s is NULL",
                           world ? "stop" : "world");
    *stop = false;
    const char mine = dtrain_world_stop_requested(world);
    DTRAIN__TRY(dtrain_world_all_gather(world, &mine, 1, all));
    for (int i = 0; i < world->size; i++) *stop = *stop || all[i];
    return DTRAIN_OK;
}
