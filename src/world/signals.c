/* Requests to stop
 *
 * A scheduler that needs the machine sends SIGTERM, and some schedulers send SIGUSR1 before that. A
 * user sends SIGINT, and a terminal that closes sends SIGHUP. With catch_signals (launch/launch.h)
 * a handler only notes the signal, because it can interrupt anything: a wait of this library, or a
 * checkpoint that is being written.
 *
 *     SIGTERM, SIGINT, SIGHUP, SIGUSR1 --> noted --> stop_requested of this rank --> the ranks
 *                                     exchange it (a trainer does): all stop after the same step
 *     again, not SIGUSR1 --> the default action: the process ends at once
 *     SIGUSR2            --> counted; the next wait or call writes a dump (comm/flight.c)
 *
 * A handler gets only a number, so its notes belong to the process. They are the only mutable state
 * of this library outside of a world. */

#include "core/platform_internal.h"
#include "core/core_internal.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"

static uint32_t dtrain__signals_taken; /* atomic: 1 while a run of this process catches signals */
static int dtrain__signal_seen;        /* atomic: the first signal, 0 = none */
static uint64_t dtrain__stop_ns;       /* atomic: time of the first signal but SIGUSR1; 0: none */
static uint32_t dtrain__dump_signals;  /* atomic: number of SIGUSR2 */
static const int dtrain__caught_signals[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2};
enum { DTRAIN__CAUGHT = sizeof dtrain__caught_signals / sizeof dtrain__caught_signals[0] };
static struct sigaction dtrain__found[DTRAIN__CAUGHT]; /* the host's actions */
static bool dtrain__caught[DTRAIN__CAUGHT];            /* true if the handler is installed */

/* Note a signal. A second request to stop restores the default action and raises the signal again,
 * which ends the process when the handler returns: the signal is blocked until then. All calls are
 * async-signal-safe. */
static void dtrain__on_signal(int number)
{
    const int error = errno;
    if (number == SIGUSR2) {
        dtrain__fetch_add(&dtrain__dump_signals, 1u);
        return;
    }
    const uint64_t now = dtrain__now_ns(), first = dtrain__load(&dtrain__stop_ns);
    if (!dtrain__load(&dtrain__signal_seen)) dtrain__store(&dtrain__signal_seen, number);
    if (number != SIGUSR1 && !first) dtrain__store(&dtrain__stop_ns, now);
    if (number != SIGUSR1 && first && now - first >= DTRAIN__ONE_REQUEST_NS) {
        signal(number, SIG_DFL);
        raise(number);
        if (getpid() == 1) _exit(128 + number); /* process 1 of a container has no default action */
    }
    errno = error;
}

/* Return true if SIGHUP is ignored, as under nohup: it then stays ignored. */
DTRAIN__PRIVATE bool dtrain__hangup_ignored(void)
{
    struct sigaction found;
    return sigaction(SIGHUP, NULL, &found) == 0 && found.sa_handler == SIG_IGN;
}

/* Install the handler for requests to stop and, with `dumps`, for SIGUSR2. Then set this thread's
 * mask to `mask` without these signals: the handler gets a signal that is pending. */
DTRAIN__PRIVATE void dtrain__signals_install(bool dumps, sigset_t mask)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = dtrain__on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    dtrain__store(&dtrain__signal_seen, 0);
    dtrain__store(&dtrain__stop_ns, 0u);
    for (int i = 0; i < DTRAIN__CAUGHT; i++) {
        const int number = dtrain__caught_signals[i];
        dtrain__caught[i] =
            number == SIGUSR2 ? dumps : number != SIGHUP || !dtrain__hangup_ignored();
        if (!dtrain__caught[i]) continue;
        sigaction(number, &action, &dtrain__found[i]);
        sigdelset(&mask, number);
    }
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
}

/* Begin to catch signals in a process that outlives its ranks, for one run at a time. */
DTRAIN__PRIVATE dtrain_result dtrain__signals_begin(bool dumps, sigset_t mask)
{
    uint32_t none = 0;
    if (!__atomic_compare_exchange_n(&dtrain__signals_taken, &none, 1u, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
        return dtrain_fail(DTRAIN_ERROR_USAGE,
                           "dtrain_launch: catch_signals is set, and another run of this process "
                           "catches signals now; set it in one of them, a process has one handler");
    dtrain__signals_install(dumps, mask);
    return DTRAIN_OK;
}

/* Give the host its handlers back. */
DTRAIN__PRIVATE void dtrain__signals_end(void)
{
    for (int i = 0; i < DTRAIN__CAUGHT; i++)
        if (dtrain__caught[i]) sigaction(dtrain__caught_signals[i], &dtrain__found[i], NULL);
    dtrain__store(&dtrain__signals_taken, 0u);
}

/* Return the number of dumps that signals have requested. */
DTRAIN__PRIVATE uint32_t dtrain__dumps_asked(void) { return dtrain__load(&dtrain__dump_signals); }

/* Return the signal that this process has caught, 0 for none. */
DTRAIN__PRIVATE int dtrain__signal_caught(void) { return dtrain__load(&dtrain__signal_seen); }
