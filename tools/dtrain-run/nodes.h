/* nodes.h: the dtrain-runs of several nodes act as one.
 *
 * They are ranks of a world of their own, which they meet in by the library's rendezvous, at the port of --master: it
 * tells them who is missing, that another one has died or failed (dtrain_world_poll, dtrain_world_abort), and carries
 * the records by which they agree. Each attempt has a world of its own:
 *
 *     meet -> agree on attempt, key, rank numbers -> attempt -> all done: the end
 *       ^                                              | a rank failed somewhere: all nodes end theirs
 *       +------------------ restarts left -------------+
 *
 * Strangers are turned away where DTRAIN_JOB_KEY is set, the same on all nodes; the traffic is not encrypted.
 *
 * A node that is gone for good does not come to the next meeting, which ends at --timeout and says so; one that was
 * started again comes to it as if it had been there before. */
#ifndef NODES_H
#define NODES_H

#include "attempt.h"

/* How far this dtrain-run knows the run to be. All of them agree on it when they meet. */
typedef struct run_state {
    dtrain__restarts restarts; /* the policy; its settings are those of node 0 */
    uint64_t announced;        /* by the last attempt: 1 + its furthest step; 0: none */
    uint32_t attempt;          /* restarts so far */
    uint32_t failed;           /* the last attempt failed */
    uint32_t here;             /* and first of all a rank of this node */
    int32_t nproc, code;
    int32_t min_ranks; /* a setting, too */
    char key[40];      /* of the next attempt, from node 0 */
    char run[40];      /* of all attempts */
} run_state;

typedef struct run_job {
    const run_options *options;
    run_node node;
    run_watch watch;
    run_state state;
    run_state all[DTRAIN_MAX_RANKS]; /* of the nodes that have met; 39 KiB */
    const char *secret;              /* DTRAIN_JOB_KEY, or NULL */
    int code;                        /* for main */
    bool met, again;                 /* all nodes have met; they meet once more */
} run_job;

/* Make a key that no other attempt has. */
static void run_make_key(char *key, size_t room)
{
    uint64_t random[2] = {dtrain__now_ns(), (uint64_t)getpid()};
    const int file = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (file >= 0) (void)!read(file, random, sizeof random), close(file);
    snprintf(key, room, "%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
}

/* Merge what all nodes know into one state. The settings are those of node 0. */
static run_state run_merge(const run_state *all, int count)
{
    run_state merged = all[0];
    for (int i = 1; i < count; i++) {
        const run_state *s = &all[i];
        if (s->attempt > merged.attempt) {
            merged.attempt = s->attempt;
            memcpy(merged.run, s->run, sizeof merged.run); /* node 0's dtrain-run is a new one */
        }
        if (s->restarts.in_a_row > merged.restarts.in_a_row)
            merged.restarts.in_a_row = s->restarts.in_a_row;
        if (s->restarts.best > merged.restarts.best) merged.restarts.best = s->restarts.best;
        if (s->announced > merged.announced) merged.announced = s->announced;
        if (s->failed && !merged.failed) merged.failed = 1, merged.code = s->code;
    }
    return merged;
}

static const int run_signals[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
static volatile sig_atomic_t run_patience; /* how many requests to stop are to be waited out */

/* Handle a signal while no rank of this node runs. */
static void run_quit(int number)
{
    if (number == SIGUSR1 || number == SIGUSR2) return;
    if (run_patience-- <= 0) _exit(128 + number);
}

/* Leave signals to run_quit, which ends this process at the one that follows `patience` others; -1: leave them to the
 * signalfd of an attempt. */
static void run_signals_quit(int patience)
{
    sigset_t set;
    run_patience = patience;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof run_signals / sizeof *run_signals; i++)
        sigaddset(&set, run_signals[i]);
    sigprocmask(patience < 0 ? SIG_BLOCK : SIG_UNBLOCK, &set, NULL);
}

/* Decide, the same on every node, whether there is another attempt, and wait until it begins. */
static bool run_decide(run_job *job)
{
    run_state *s = &job->state;
    char what[DTRAIN__RESTART_TEXT];
    uint64_t wait_ns;
    if (!s->failed) return true;
    if (s->code == 2 && !s->restarts.best && !s->announced && s->restarts.most) {
        if (job->options->node_rank == 0)
            fprintf(
                stderr,
                "dtrain-run: not restarted: exit status 2 before the first step is that of a wrong "
                "command line, which would fail again\n");
        return false;
    }
    const bool again = dtrain__restarts_next(&s->restarts, s->announced, &wait_ns, what);
    s->announced = 0;
    if (job->options->node_rank == 0 && s->restarts.most) say(stderr, "dtrain-run: %s\n", what);
    if (!again) return false;
    s->attempt++;
    run_signals_quit(0); /* a request to stop ends the wait, and the run */
    struct timespec nap = {(time_t)(wait_ns / 1000000000u), (long)(wait_ns % 1000000000u)};
    while (nanosleep(&nap, &nap) != 0 && errno == EINTR) continue;
    return true;
}

/* Say how many ranks a run has, and give one up first where a restart of all of them has come to nothing: one of the
 * node whose rank failed first. Each node does the same with the same states. */
static int run_count_ranks(const run_job *job, run_state *all)
{
    const int nodes = job->options->nnodes;
    int ranks = 0, loser = -1;
    for (int i = 0; i < nodes; i++) {
        ranks += all[i].nproc;
        if (loser < 0 && all[i].here && all[i].nproc > 1) loser = i;
    }
    const run_state *s = &job->state;
    if (!s->min_ranks || s->restarts.in_a_row < 2 || loser < 0 || ranks <= s->min_ranks)
        return ranks;
    all[loser].nproc--;
    if (job->options->node_rank == 0)
        fprintf(stderr,
                "dtrain-run: all %d ranks have failed again without progress: it goes on with %d "
                "(--min-ranks %d)\n",
                ranks, ranks - 1, (int)s->min_ranks);
    return ranks - 1;
}

/* Run the attempt that all nodes have agreed on, and note what came of it. */
static void run_agreed(run_job *job, dtrain_world *world)
{
    run_node *node = &job->node;
    run_watch *w = &job->watch;
    const int signals = w->signals;
    run_signals_quit(-1);
    run_forget(node);
    node->attempt = (int)job->state.attempt;
    snprintf(node->key, sizeof node->key, "%s%.100s%s", job->state.key, job->secret ? "/" : "",
             job->secret ? job->secret : "");
    memcpy(node->run, job->state.run, sizeof node->run);
    *node->progress = 0;
    memset(w, 0, sizeof *w);
    w->node = node;
    w->world = world;
    w->signals = signals;
    const bool can_be_started = run_attempt(w);
    job->state.announced = *node->progress;
    job->state.failed = w->failure.any;
    job->state.here = w->failure.here;
    job->state.code = job->code = w->failure.code;
    job->again = w->failure.any && can_be_started && !w->stopped_by && job->state.restarts.most > 0;
    const bool as_asked = w->stopped_by && w->failure.code == 128 + w->stopped_by;
    if (w->failure.any && as_asked)
        fprintf(stderr, "dtrain-run: stopped by signal %d (%s), as asked\n", w->stopped_by,
                dtrain__signal_name(w->stopped_by));
    else if (w->failure.any) run_print_failure(node, &w->failure);
    if (w->stopped_by && w->failure.any && !as_asked)
        fprintf(stderr, "dtrain-run: the run was asked to stop by signal %d (%s): no restart\n",
                w->stopped_by, dtrain__signal_name(w->stopped_by));
}

/* Wait until the ranks of all nodes are done. A request to stop has reached them too, so it is waited out once. */
static void run_await_nodes(run_job *job, dtrain_world *world)
{
    run_watch *w = &job->watch;
    run_signals_quit(1);
    const dtrain_result all = dtrain_world_all_gather(world, NULL, 0, NULL);
    run_signals_quit(-1);
    if (all == DTRAIN_OK) return;
    run_hear_nodes(w);
    job->state.failed = 1;
    job->state.code = job->code = w->failure.code ? w->failure.code : 1;
    job->again = job->state.restarts.most > 0 && !w->stopped_by;
    run_print_failure(&job->node, &w->failure);
}

/* Take this node's part in a world of dtrain-runs; its rank in there is the node's number. */
static int run_node_main(dtrain_world *world, void *user)
{
    run_job *job = (run_job *)user;
    run_state *all = job->all;
    const int nodes = job->options->nnodes;
    job->again = false;
    job->code = 1;
    job->state.nproc = job->node.count;
    job->state.min_ranks = job->options->min_ranks;
    job->state.restarts.most = (uint32_t)job->options->restarts;
    job->state.restarts.backoff_ms = 1000;
    run_make_key(job->state.key, sizeof job->state.key);
    if (!job->state.run[0]) memcpy(job->state.run, job->state.key, sizeof job->state.run);
    if (!world) all[0] = job->state;
    else if (dtrain_world_all_gather(world, &job->state, sizeof job->state, all) != DTRAIN_OK)
        return 1;
    job->met = true;
    job->state = run_merge(all, nodes);
    if (!run_decide(job)) {
        job->code = job->state.code;
        return 0;
    }
    job->node.size = run_count_ranks(job, all);
    job->node.count = all[job->options->node_rank].nproc;
    job->node.first = 0;
    for (int i = 0; i < job->options->node_rank; i++) job->node.first += all[i].nproc;
    run_agreed(job, world);
    if (!job->code && world) run_await_nodes(job, world);
    return job->code != 0;
}

#endif /* NODES_H */
