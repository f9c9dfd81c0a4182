/* Restarts
 *
 * After a failure all ranks are started again, in a new shared region, which has nothing of the
 * failed attempt. The ranks load their last checkpoint. Only a launcher that has started every rank
 * of a world can restart it; ranks of another launcher end with an exit status that makes that
 * launcher restart them.
 *
 *     start all ranks <------------------------------------------------+
 *         | all returned 0, or the run was asked to stop --> the end   |
 *         | a rank failed                                              |
 *         | further than ever before: the count in a row is 0 again    |
 *         | `restarts` of them in a row --> the end: a crash loop      |
 *         +-- one warning; wait backoff_ms, doubled for each in a row -+
 *
 * A run whose call was refused before any step (DTRAIN_ERROR_ARGUMENT, _USAGE, _UNSUPPORTED,
 * _DATA) is not restarted: the call would be refused again. A refusal before a successful
 * collective of the same rank does not count: it is not the cause of the failure.
 *
 * Progress is a step of dtrain_world_progress that is further than all steps before. */

#include "core/platform_internal.h"
#include "core/api.h"
#include "core/core_internal.h"
#include "core/log.h"
#include "core/result.h"
#include "world/world.h"
#include "world/world_internal.h"
#include "launch/launch.h"
#include "launch/launch_internal.h"

#define DTRAIN__BACKOFF_DOUBLINGS 6u

/* Decide after a failed attempt whether there is another attempt, *wait_ns later; false means a
 * crash loop. `announced`: 1 + the furthest step of the attempt, or 0. Write the sentence to
 * `what`. */
DTRAIN__PRIVATE bool dtrain__restarts_next(dtrain__restarts *r, uint64_t announced,
                                           uint64_t *wait_ns, char what[DTRAIN__RESTART_TEXT])
{
    char beyond[48] = "";
    if (announced > r->best) {
        r->best = announced;
        r->in_a_row = 0;
    }
    if (r->best)
        snprintf(beyond, sizeof beyond, " beyond step %llu", (unsigned long long)(r->best - 1));
    if (r->in_a_row >= r->most) {
        snprintf(what, DTRAIN__RESTART_TEXT, "crash loop: %u restart%s in a row made no progress%s",
                 r->in_a_row, r->in_a_row == 1 ? "" : "s", beyond);
        return false;
    }
    const uint32_t doublings =
        r->in_a_row < DTRAIN__BACKOFF_DOUBLINGS ? r->in_a_row : DTRAIN__BACKOFF_DOUBLINGS;
    *wait_ns = ((uint64_t)r->backoff_ms << doublings) * 1000000u;
    r->in_a_row++;
    snprintf(what, DTRAIN__RESTART_TEXT, "restart %u of %u in %.1f s", r->in_a_row, r->most,
             1e-9 * (double)*wait_ns);
    return true;
}

/* Decide whether a run that has ended is started again, and wait until then. A first attempt that
 * could not start all ranks is not repeated: the desc or the machine is at fault. */
DTRAIN__PRIVATE bool dtrain__restart(dtrain__launch *launch, dtrain_result *result,
                                     dtrain_launch_info *info)
{
    char last[DTRAIN__ERROR_BYTES], what[DTRAIN__RESTART_TEXT];
    uint64_t wait_ns;
    if (*result == DTRAIN_OK || launch->joins || !launch->restarts.most) return false;
    /* Was the run asked to stop: through the launcher, at a terminal, or at one rank? Without
     * catch_signals, a rank that ends by a forwarded SIGUSR1 ends as asked. */
    if (launch->forwarded || launch->caught ||
        (launch->passed_on && info->signal == launch->passed_on))
        return false;
    if (!launch->restart_count && *result != DTRAIN_ERROR_RANK_FAILED) return false;
    snprintf(last, sizeof last, "%s", dtrain_last_error());
    if (!launch->restarts.best && !launch->announced &&
        (launch->code == DTRAIN_ERROR_ARGUMENT || launch->code == DTRAIN_ERROR_USAGE ||
         launch->code == DTRAIN_ERROR_UNSUPPORTED || launch->code == DTRAIN_ERROR_DATA)) {
        *result =
            dtrain_fail(*result, "not restarted, because the same would happen again: %s", last);
        return false;
    }
    if (!dtrain__restarts_next(&launch->restarts, launch->announced, &wait_ns, what)) {
        *result = dtrain_fail(*result, "%s; the last failure: %s", what, last);
        return false;
    }
    dtrain__log_to(&launch->log, DTRAIN_LOG_WARNING, "%s: %s", what, last);

    /* Wait for the time or for a signal that asks the run to stop. Signals to forward are blocked
     * and come from sigtimedwait. If ranks are threads, signals belong to the host, unless they are
     * caught. */
    const bool catches = launch->desc.catch_signals;
    sigset_t stops;
    sigemptyset(&stops);
    if (launch->launcher) stops = launch->watched;
    sigdelset(&stops, SIGCHLD);
    int number = 0;
    for (uint64_t now = dtrain__now_ns(), end = now + wait_ns; now < end && number <= 0;) {
        const struct timespec nap = {0, (long)dtrain__min((int64_t)(end - now), 50000000)};
        number = sigtimedwait(&stops, NULL, &nap);
        if (number == SIGUSR2 || (number == SIGUSR1 && !catches)) number = 0;
        if (!launch->launcher && catches && dtrain__signal_caught())
            number = dtrain__signal_caught();
        now = dtrain__now_ns();
    }
    if (number > 0) {
        info->signal = number;
        info->exit_code = 128 + number;
        *result = dtrain_fail(*result,
                              "stopped by signal %d (%s) while it waited for %s; the last "
                              "failure: %s",
                              number, dtrain__signal_name(number), what, last);
        return false;
    }
    launch->restart_count++;
    return true;
}
