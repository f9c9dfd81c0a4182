/* attempt.h: one start of the ranks of this node, until all of them have ended.
 *
 *     all run --+-- all have returned 0 ---------------------------------------> OK
 *               +-- a rank fails, here or on another node: the others notice it themselves within a second, or
 *               |   get SIGTERM, or after --grace SIGKILL ---------------------> FAILED
 *               +-- a signal that asks to stop is passed on; after --grace SIGKILL -> STOPPED, or OK
 */
#ifndef ATTEMPT_H
#define ATTEMPT_H

#include "report.h"

#define RUN_SETTLE_NS 200000000u /* after the first failure, to see who else has failed */
#define RUN_HEARSAY_NS \
    2000000000u /* and for another node to say that the cause is one of its ranks */

typedef struct run_watch {
    run_node *node;
    dtrain_world *world;                 /* of the dtrain-runs of all nodes; NULL: there is one */
    int signals;                         /* a signalfd */
    uint64_t start_ns, fail_ns, stop_ns; /* 0: not yet */
    bool stops, settled, terminated;     /* stops: the ranks are to end, after a failure */
    int stopped_by;                      /* the first signal that asked the run to stop */
    uint64_t kill_ns;                    /* when what is left is killed; 0: never */
    uint64_t seen_ns, stuck_ns; /* for how long all ranks that are left have been stopped */
    run_failure failure;
} run_watch;

/* Tell the other nodes of the first failure: with what its rank said, and the exit code, which run_hear_nodes reads. An
 * abort carries 500 bytes. */
static void run_tell_nodes(const run_watch *w)
{
    const run_failure *failure = &w->failure;
    char text[500], error[240] = "";
    if (!w->world) return;
    if (failure->here) run_error_message(&w->node->ranks[failure->local], error, sizeof error);
    snprintf(text, sizeof text, "%.200s%s%s [exit %d%s]", failure->sentence,
             error[0] ? "; its error: " : "", error, failure->code,
             w->stopped_by ? ", stopped" : "");
    dtrain_world_abort(w->world, DTRAIN_ERROR_RANK_FAILED, text);
}

/* Hear whether another node has failed. The library's sentence is "... rank 1 reported CODE: SENTENCE [exit 7]", where
 * its ranks are our nodes; a node that is lost has no sentence of its own. */
static void run_hear_nodes(run_watch *w)
{
    if (!w->world || w->failure.any || dtrain_world_poll(w->world) == DTRAIN_OK) return;
    run_failure *failure = &w->failure;
    const char *text = dtrain_last_error(), *mark = strstr(text, " [exit ");
    const char *begin = strstr(text, " reported ");
    int node = -1;
    begin = begin && mark ? strstr(begin, ": ") : NULL;
    failure->any = true;
    failure->code = 1;
    if (begin && begin < mark) {
        (void)sscanf(mark, " [exit %d", &failure->code);
        if (strstr(mark, ", stopped]") && !w->stopped_by) w->stopped_by = SIGTERM;
        snprintf(failure->sentence, sizeof failure->sentence, "%.*s", (int)(mark - begin - 2),
                 begin + 2);
    } else if (sscanf(text, "rank %*d: rank %d", &node) == 1) {
        failure->lost = 1 + node;
        snprintf(failure->sentence, sizeof failure->sentence,
                 "the dtrain-run of node %d is gone: it was killed, or its host was lost", node);
    } else
        snprintf(failure->sentence, sizeof failure->sentence, "another node failed: %.200s", text);
    w->stops = w->settled = true;
    w->fail_ns = dtrain__now_ns();
}

/* Pass a signal on. The second request to stop is obeyed without asking the ranks. */
static void run_on_signal(run_watch *w, int number)
{
    const uint64_t now = dtrain__now_ns();
    const bool stop = number != SIGUSR1 && number != SIGUSR2;
    if (stop && w->stop_ns && now - w->stop_ns < DTRAIN__ONE_REQUEST_NS) return;
    run_signal(w->node, number);
    if (number == SIGUSR2) return;
    run_signal(w->node, SIGCONT); /* a stopped rank hears of it when it goes on */
    if (stop && !w->stop_ns)
        fprintf(stderr,
                "%sdtrain-run: asked to stop by %s: ranks have %g s to end; a second request ends "
                "them at once\n",
                isatty(2) ? "\n" : "", dtrain__signal_name(number), w->node->options->grace);
    if (!w->stopped_by) w->stopped_by = number;
    if (!stop) return;
    w->kill_ns = w->stop_ns ? now : now + (uint64_t)(1e9 * w->node->options->grace);
    w->stop_ns = now;
}

/* Read what signalfd has, and pass on what is not the end of a child. */
static void run_read_signals(run_watch *w)
{
    struct signalfd_siginfo what;
    while (read(w->signals, &what, sizeof what) == (ssize_t)sizeof what)
        if (what.ssi_signo != SIGCHLD) run_on_signal(w, (int)what.ssi_signo);
}

/* Look for the first failure of this node, and when it is clear which one it is, make it the run's. */
static void run_settle_failure(run_watch *w)
{
    const int first = run_first_failed(w->node);
    const uint64_t now = dtrain__now_ns();
    if (w->settled || first < 0) return;
    if (!w->fail_ns) w->fail_ns = now;
    w->stops = true;
    if (w->node->live && now - w->fail_ns < RUN_SETTLE_NS) return;
    if (run_cause_elsewhere(w->node, first) && now - w->fail_ns < RUN_HEARSAY_NS) return;
    w->settled = true;
    run_describe(w->node, first, w->start_ns, &w->failure);
    run_tell_nodes(w);
}

/* End what goes on after a failure: a second by itself (less where the grace period is short), then SIGTERM, then
 * SIGKILL. */
static void run_end_rest(run_watch *w)
{
    const uint64_t now = dtrain__now_ns(), grace = (uint64_t)(1e9 * w->node->options->grace);
    const uint64_t alone = grace / 2 < 1000000000u ? grace / 2 : 1000000000u;
    const bool kills = (w->stops && now - w->fail_ns >= grace) || (w->kill_ns && now >= w->kill_ns);
    const bool asks = w->stops && !w->terminated && now - w->fail_ns >= alone;
    for (int i = 0; i < w->node->count && (asks || kills) && w->stops; i++)
        if (!w->node->ranks[i].ended) w->node->ranks[i].told = true;
    if (asks && !kills) run_signal(w->node, SIGTERM), run_signal(w->node, SIGCONT);
    w->terminated = w->terminated || asks;
    if (kills) run_signal(w->node, SIGKILL);
}

/* Kill ranks that are stopped after others of this node have ended: nobody waits for them any more, so no deadline
 * names them. They have been stopped for --timeout, in which a gap of more than a second counts as one second: a job
 * that is suspended as a whole, dtrain-run included, goes on. */
static void run_end_stopped(run_watch *w)
{
    const uint64_t now = dtrain__now_ns(), gap = w->seen_ns ? now - w->seen_ns : 0,
                   second = 1000000000u;
    run_node *node = w->node;
    int stopped = 0;
    w->seen_ns = now;
    for (int i = 0; i < node->count; i++)
        stopped += !node->ranks[i].ended && node->ranks[i].stopped;
    w->stuck_ns += gap < second ? gap : second;
    if (!stopped || stopped < node->live || node->live == node->count) w->stuck_ns = 0;
    if (1e-9 * (double)w->stuck_ns < node->options->timeout) return;
    for (int i = 0; i < node->count; i++)
        if (!node->ranks[i].ended) node->ranks[i].waited = 1e-9 * (double)w->stuck_ns;
    run_signal(node, SIGKILL);
    w->stuck_ns = 0;
}

/* Wait until something happens: a signal, a word of a rank, a deadline. */
static void run_wait(run_watch *w)
{
    struct pollfd polls[1 + 2 * DTRAIN_MAX_RANKS];
    run_node *node = w->node;
    const bool pending = w->world || w->stops || w->kill_ns;
    int count = 1;
    polls[0].fd = w->signals;
    for (int i = 0; i < node->count; i++) {
        polls[count++].fd = node->ranks[i].out.from;
        polls[count++].fd = node->ranks[i].err.from;
    }
    for (int i = 0; i < count; i++) polls[i].events = POLLIN, polls[i].revents = 0;
    if (poll(polls, (nfds_t)count, pending ? 20 : 1000) < 0) return;
    for (int i = 0; i < node->count; i++) {
        if (polls[1 + 2 * i].revents) run_hear(node, &node->ranks[i], &node->ranks[i].out);
        if (polls[2 + 2 * i].revents) run_hear(node, &node->ranks[i], &node->ranks[i].err);
    }
}

/* Start all ranks of this node; false after a sentence. */
static bool run_start_all(run_watch *w)
{
    run_node *node = w->node;
    int error = 0, i = 0;
    for (; i < node->count && !error; i++) error = run_start_rank(node, i);
    if (!error) return true;
    run_signal(node, SIGKILL);
    if (error > 0)
        snprintf(w->failure.sentence, sizeof w->failure.sentence,
                 "rank %d cannot be started: %.200s: %s", node->first + i - 1,
                 node->options->program[0], strerror(error));
    else snprintf(w->failure.sentence, sizeof w->failure.sentence, "rank %d has no log", i - 1);
    w->failure.any = w->stops = w->settled = true;
    w->failure.code = error == ENOENT ? 127 : error > 0 ? 126 : 1;
    w->fail_ns = dtrain__now_ns();
    run_tell_nodes(w);
    return false;
}

/* Run one attempt. What came of it stands in w->failure and w->stopped_by; return whether a later attempt could come
 * to something else. */
static bool run_attempt(run_watch *w)
{
    run_node *node = w->node;
    w->start_ns = dtrain__now_ns();
    const bool started = run_start_all(w);
    while (node->live > 0) {
        run_wait(w);
        run_reap(node);
        run_read_signals(w);
        run_hear_nodes(w);
        run_settle_failure(w);
        run_end_rest(w);
        run_end_stopped(w);
    }
    run_clear(node);
    while (!w->settled && run_first_failed(node) >= 0) { /* the last of them has just ended */
        run_hear_nodes(w);
        run_settle_failure(w);
        if (!w->settled) (void)poll(NULL, 0, 20);
    }
    return started;
}

#endif /* ATTEMPT_H */
