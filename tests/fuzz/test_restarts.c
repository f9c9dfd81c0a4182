/* Random restarts: runs of 1 to 4 ranks whose attempts end in random ways at random moments: a rank returns, exits,
 * is killed, crashes, hangs, leaves early or reports a failure; steps are announced or not; a rank is asked to stop.
 *
 *     build/tests/test_restarts                     200 new seeds, some seconds; with DTRAIN_TEST_FULL=1 10 seconds
 *     build/tests/test_restarts --count 10000       so many new ones; --seconds 120: as many as fit
 *     build/tests/test_restarts --seed 77           this one, in words
 *
 * The oracle plays the plan without ranks: how many attempts there are, whether the run succeeds, with which exit
 * code, signal and sentence it ends. Every rank runs once in each attempt, and nothing is left of any. */
#include "test.h"

#include "dtrain.h"
#include "ranks.h"
#include "seeds.h"

#include <sys/time.h>

typedef enum kind {
    WELL,
    RETURNS,
    REPORTS,   /* dtrain_world_abort, then returns */
    LEAVES,    /* returns 0 while the others go on */
    STOPS,     /* is asked to stop, and all return 0 */
    STOPS_ILL, /* the same, and it returns a value */
    EXITS,
    KILLED,
    SEGFAULTS,
    ALARMED, /* killed by a timer, at any moment */
    HANGS,
    KINDS
} kind;
static const char *const kind_names[] = {"well",      "returns",   "reports", "leaves",
                                         "stops",     "stops ill", "exits",   "killed",
                                         "segfaults", "alarmed",   "hangs"};

enum { ATTEMPTS = 10, ROUNDS = 6, OTHERS_RETURN = 41 };

typedef struct attempt {
    kind what;
    int who, round,
        value;    /* value: returned, the signal that asks, or microseconds until the alarm */
    int64_t step; /* announced by `who` before the first round; -1: none */
} attempt;

typedef struct play {
    uint64_t seed;
    int ranks;
    uint32_t mode, restarts;
    bool catches;
    attempt a[ATTEMPTS];
    /* what was seen */
    int32_t came[ATTEMPTS][4], warnings;
} play;

/* How a play has to end. */
typedef struct ending {
    dtrain_result result;
    int restarts, exit_code, signal,
        first; /* first: failed rank, -1 none, -2 anyone but the one who did it */
    bool loop;
} ending;

static play generate(uint64_t seed)
{
    play p;
    uint64_t state = ranks_mix(seed);
    memset(&p, 0, sizeof p);
    p.seed = seed;
    p.ranks = 1 + (int)ranks_random(&state, 4);
    p.mode = ranks_random(&state, 4) == 0 ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES;
    p.restarts = (uint32_t)ranks_random(&state, 4);
    for (int i = 0; i < ATTEMPTS; i++) {
        attempt *a = &p.a[i];
        a->what = (kind)(1 + ranks_random(&state,
                                          p.mode == DTRAIN_LAUNCH_THREADS ? STOPS_ILL : KINDS - 1));
        if (a->what == HANGS && ranks_random(&state, 4)) a->what = KILLED; /* takes a second */
        if ((a->what == STOPS || a->what == STOPS_ILL) && ranks_random(&state, 2))
            a->what = RETURNS;
        if (p.ranks == 1 && (a->what == HANGS || a->what == LEAVES)) a->what = RETURNS;
        if (ranks_random(&state, 8) == 0 || i == ATTEMPTS - 1) a->what = WELL;
        a->who = (int)ranks_random(&state, (uint64_t)p.ranks);
        a->round = (int)ranks_random(&state, ROUNDS);
        a->value = 1 + (int)ranks_random(&state, 255);
        if (a->what == ALARMED) a->value = 1 + (int)ranks_random(&state, 5000);
        a->step = (int64_t)ranks_random(&state, 8) - 2;
        if (a->step < 0) a->step = -1;
        p.catches = p.catches || a->what == STOPS || a->what == STOPS_ILL;
    }
    return p;
}

static int stop_signal(const attempt *a) { return a->value % 2 ? SIGTERM : SIGUSR1; }

static ending expected(const play *p)
{
    ending e;
    int64_t best = -1;
    uint32_t in_a_row = 0;
    memset(&e, 0, sizeof e);
    for (int i = 0; i < ATTEMPTS; i++) {
        const attempt *a = &p->a[i];
        e.restarts = i;
        e.signal = a->what == STOPS || a->what == STOPS_ILL ? stop_signal(a) : 0;
        e.first = -1;
        if (a->what == WELL || a->what == STOPS) return e;
        e.result = DTRAIN_ERROR_RANK_FAILED;
        e.first = a->who;
        e.exit_code = a->value;
        if (a->what == KILLED) e.signal = SIGKILL;
        if (a->what == SEGFAULTS) e.signal = SIGSEGV;
        if (a->what == ALARMED) e.signal = SIGALRM;
        if (a->what >= KILLED) e.exit_code = 128 + e.signal;
        if (a->what == LEAVES || a->what == HANGS) e.first = -2, e.exit_code = OTHERS_RETURN;
        if (a->what == STOPS_ILL) return e;
        if (a->step > best) best = a->step, in_a_row = 0;
        e.loop = p->restarts > 0;
        if (in_a_row == p->restarts) return e;
        in_a_row++;
        memset(&e, 0, sizeof e);
    }
    return e;
}

static int rank_plays(dtrain_world *world, void *user)
{
    play *p = (play *)user;
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    if (!CHECK_MSG(info.restart_count < ATTEMPTS && info.size == p->ranks, "restart %u, %d ranks",
                   info.restart_count, info.size))
        return 0;
    const attempt *a = &p->a[info.restart_count];
    const bool me = info.rank == a->who, asks = a->what == STOPS || a->what == STOPS_ILL;
    bool stop = false;
    __atomic_fetch_add(&p->came[info.restart_count][info.rank], 1, __ATOMIC_ACQ_REL);
    if (dtrain_world_all_gather(world, NULL, 0, NULL) != DTRAIN_OK) return OTHERS_RETURN;
    if (me && a->step >= 0) dtrain_world_progress(world, (uint64_t)a->step);
    if (me && a->what == ALARMED) {
        struct itimerval timer;
        memset(&timer, 0, sizeof timer);
        timer.it_value.tv_usec = a->value;
        setitimer(ITIMER_REAL, &timer, NULL);
    }
    for (int round = 0; round < ROUNDS || a->what == ALARMED || asks; round++) {
        if (me && round == a->round) {
            if (asks) kill(getpid(), stop_signal(a));
            if (a->what == REPORTS) dtrain_world_abort(world, DTRAIN_ERROR_SYSTEM, "a test");
            if (a->what == RETURNS || a->what == REPORTS) return a->value;
            if (a->what == LEAVES) return 0;
            if (a->what == EXITS) _exit(a->value);
            if (a->what == KILLED) raise(SIGKILL);
            if (a->what == SEGFAULTS) signal(SIGSEGV, SIG_DFL), raise(SIGSEGV);
            while (a->what == HANGS) pause();
        }
        if (ranks_agree_stop(world, &stop) != DTRAIN_OK) return OTHERS_RETURN;
        if (stop) return me && a->what == STOPS_ILL ? a->value : 0;
    }
    return 0;
}

static void count_warning(void *user, dtrain_log_level level, int rank, const char *text)
{
    play *p = (play *)user;
    if (level == DTRAIN_LOG_WARNING && rank == -1 && strncmp(text, "restart ", 8) == 0)
        __atomic_fetch_add(&p->warnings, 1, __ATOMIC_ACQ_REL);
}

static bool run_seed(uint64_t seed, bool words)
{
    const play plan = generate(seed);
    play *p = (play *)ranks_shared(sizeof *p);
    dtrain_launch_info info;
    const long failed = test_shared->failed_checks;
    *p = plan;
    const ending e = expected(p);
    for (int i = 0; i <= e.restarts && words; i++)
        printf("  attempt %d: rank %d of %d %s in round %d, value %d, step %d\n", i, p->a[i].who,
               p->ranks, kind_names[p->a[i].what], p->a[i].round, p->a[i].value, (int)p->a[i].step);
    dtrain_launch_desc desc = ranks_desc(p->ranks, p->mode);
    desc.restarts = p->restarts;
    desc.backoff_ms = 1;
    desc.catch_signals = p->catches;
    desc.options.log_level = DTRAIN_LOG_WARNING;
    desc.options.log = count_warning;
    desc.options.log_user = p;
    for (int i = 0; i <= e.restarts; i++)
        if (p->a[i].what == HANGS) desc.timeout_ms = RANKS_SHORT_MS, desc.grace_ms = 200;
    const dtrain_result result = ranks_launch(&desc, rank_plays, p, &info);
    const char *text = result == DTRAIN_OK ? "" : dtrain_last_error();
    if (words) printf("  %s %s\n", dtrain_result_text(result), text);
    CHECK_MSG(result == e.result && (int)info.restart_count == e.restarts &&
                  info.exit_code == e.exit_code && info.signal == e.signal,
              "result %d, %u restarts, code %d, signal %d; expected %d, %d, %d, %d: %s",
              (int)result, info.restart_count, info.exit_code, info.signal, (int)e.result,
              e.restarts, e.exit_code, e.signal, text);
    CHECK_MSG(e.first == -2 ? info.first_failed_rank >= 0 : info.first_failed_rank == e.first,
              "rank %d failed first, expected %d: %s", info.first_failed_rank, e.first, text);
    CHECK_MSG((strncmp(text, "crash loop: ", 12) == 0) == e.loop, "a crash loop? %s", text);
    CHECK_MSG(p->warnings == e.restarts, "%d warnings", p->warnings);
    for (int i = 0; i < ATTEMPTS; i++)
        for (int r = 0; r < p->ranks; r++)
            CHECK_MSG(p->came[i][r] == (i <= e.restarts), "attempt %d: rank %d came %d times", i, r,
                      p->came[i][r]);
    munmap(p, sizeof *p);
    if (test_shared->failed_checks != failed)
        printf("  seed %llu failed\n", (unsigned long long)seed);
    return test_shared->failed_checks == failed;
}

int main(int argc, char **argv)
{
    const seeds s = seeds_of(argc, argv, 200, 10);
    test_begin(1, argv);
    return seeds_run(&s, NULL, 0, run_seed);
}
