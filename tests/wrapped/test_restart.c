/* test_restart.c: runs that are started again after a failure, and runs that are asked to stop: which attempts there
 * are, what is reported at the end, how long is waited, and that nothing is left of any attempt.
 *
 * The linker puts __wrap_fork between the library and the C library (tests/tests.mk). */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "ports.h"

#include <pthread.h>
#include <sys/resource.h>

enum { PROCESSES = DTRAIN_LAUNCH_PROCESSES, THREADS = DTRAIN_LAUNCH_THREADS, ATTEMPTS = 16 };

static bool says(const char *part) { return strstr(dtrain_last_error(), part) != NULL; }

/* ---- a run by plan ---- */

typedef enum act {
    WELL,
    RETURNS,     /* 7 */
    EXITS,       /* by _exit(8) */
    KILLED,      /* by SIGKILL */
    SEGFAULTS,   /* by SIGSEGV */
    ABORTS,      /* by abort() */
    DISAGREES,   /* calls another collective */
    WORLD_FAILS, /* dtrain_world_abort, and 9 */
    HANGS,
    ACTS
} act;

typedef struct plan {
    act acts[ATTEMPTS]; /* of rank `who`; behind the last: the last one's */
    int who, attempts;
    int64_t steps[ATTEMPTS]; /* that rank 0 announces in each attempt; -1: none */
    /* what was seen */
    int32_t came[ATTEMPTS][4], size[ATTEMPTS];
    int32_t warnings, launcher_lines;
    char warning[ATTEMPTS][400];
    int32_t signal_in_wait; /* raised by the log callback when the launcher warns */
} plan;

static void keep_warning(void *user, dtrain_log_level level, int rank, const char *text)
{
    plan *p = (plan *)user;
    if (level != DTRAIN_LOG_WARNING || rank != -1) return;
    const int at = __atomic_fetch_add(&p->warnings, 1, __ATOMIC_ACQ_REL);
    if (at < ATTEMPTS) snprintf(p->warning[at], sizeof p->warning[at], "%s", text);
    if (p->signal_in_wait) kill(getpid(), p->signal_in_wait);
}

static int act_out(dtrain_world *world, act what)
{
    char byte = 0, all[4 * 2];
    switch (what) {
    case RETURNS: return 7;
    case EXITS: _exit(8);
    case KILLED: raise(SIGKILL); break;
    case SEGFAULTS: signal(SIGSEGV, SIG_DFL), raise(SIGSEGV); break;
    case ABORTS: signal(SIGABRT, SIG_DFL), abort();
    case DISAGREES: return dtrain_world_all_gather(world, &byte, 1, all) == DTRAIN_OK ? 0 : 6;
    case WORLD_FAILS:
        dtrain_world_abort(world, DTRAIN_ERROR_SYSTEM, "the test device is lost");
        return 9;
    case HANGS:
        for (;;) pause();
    case WELL:
    case ACTS: break;
    }
    return 0;
}

static int rank_acts(dtrain_world *world, void *user)
{
    plan *p = (plan *)user;
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    dtrain_world_info info;
    char all[4 * 2];
    dtrain_world_query(world, &info);
    const int attempt = (int)info.restart_count;
    if (!CHECK_MSG(attempt < ATTEMPTS, "attempt %d", attempt)) return 0;
    __atomic_fetch_add(&p->came[attempt][rank], 1, __ATOMIC_ACQ_REL);
    if (rank == 0) p->size[attempt] = size;
    RANKS_TRY(dtrain_world_all_gather(world, NULL, 0, NULL)); /* all have come */
    if (rank == 0 && p->steps[attempt] >= 0)
        dtrain_world_progress(world, (uint64_t)p->steps[attempt]);
    RANKS_TRY(dtrain_world_all_gather(world, NULL, 0, NULL)); /* it is announced */
    const act what = p->acts[attempt < p->attempts ? attempt : p->attempts - 1];
    if (rank == p->who && what != WELL) return act_out(world, what);
    return dtrain_world_all_gather(world, "ab", 2, all) == DTRAIN_OK ? 0 : 41;
}

static plan *new_plan(int who, int attempts)
{
    plan *p = (plan *)ranks_shared(sizeof *p);
    int i;
    for (i = 0; i < ATTEMPTS; i++) p->steps[i] = -1;
    p->who = who;
    p->attempts = attempts;
    return p;
}
static void forget(plan *p) { munmap(p, sizeof *p); }

static dtrain_launch_desc restart_desc(int ranks, uint32_t mode, uint32_t restarts, plan *p)
{
    dtrain_launch_desc desc = ranks_desc(ranks, mode);
    desc.options.log_level = DTRAIN_LOG_WARNING;
    desc.options.log = keep_warning;
    desc.options.log_user = p;
    desc.restarts = restarts;
    desc.backoff_ms = 5;
    return desc;
}

/* Every rank came once in each of the attempts from 0 to the last, and never after it. */
static void check_attempts(const plan *p, int ranks, int last)
{
    int a, r;
    for (a = 0; a < ATTEMPTS; a++)
        for (r = 0; r < ranks; r++)
            CHECK_MSG(p->came[a][r] == (a <= last), "attempt %d: rank %d came %d times", a, r,
                      p->came[a][r]);
}

static bool words_in(const char *text, const char *part)
{
    return CHECK_MSG(strstr(text, part) != NULL, "\"%s\" is not in: %s", part, text);
}

/* ---- restarts ---- */

static const char *const act_words[] = {"",
                                        "returned 7",
                                        "returned 8",
                                        "signal 9 (SIGKILL",
                                        "signal 11 (SIGSEGV",
                                        "signal 6 (SIGABRT",
                                        "",
                                        "returned",
                                        ""};

static void check_restart(int ranks, uint32_t mode, act what)
{
    plan *p = new_plan(ranks - 1, 2);
    dtrain_launch_desc desc = restart_desc(ranks, mode, 3, p);
    dtrain_launch_info info;
    p->acts[0] = what;
    p->acts[1] = WELL;
    if (what == HANGS) desc.timeout_ms = RANKS_SHORT_MS, desc.grace_ms = 100;
    const dtrain_result result = ranks_launch(&desc, rank_acts, p, &info);
    CHECK_MSG(result == DTRAIN_OK, "%d %s, act %d: %s", ranks, ranks_mode_name(mode), (int)what,
              dtrain_last_error());
    CHECK(info.restart_count == 1 && info.rank_count == (uint32_t)ranks);
    CHECK_MSG(info.exit_code == 0 && info.signal == 0 && info.first_failed_rank == -1,
              "code %d, signal %d, rank %d", info.exit_code, info.signal, info.first_failed_rank);
    check_attempts(p, ranks, 1);
    CHECK_MSG(p->warnings == 1, "act %d: %d warnings", (int)what, p->warnings);
    words_in(p->warning[0], "restart 1 of 3 in 0.0 s: rank ");
    words_in(p->warning[0], act_words[what]);
    forget(p);
}

static void test_restart_after_every_failure(void)
{
    int ranks, what;
    for (ranks = 1; ranks <= 4; ranks++)
        for (what = RETURNS; what < ACTS; what++) {
            if (ranks == 1 && (what == HANGS || what == DISAGREES)) continue; /* nobody sees it */
            if (what == HANGS && ranks > 2 && !test_full()) continue;
            check_restart(ranks, PROCESSES, (act)what);
        }
}

static void test_restart_threads(void)
{
    check_restart(1, THREADS, RETURNS);
    check_restart(3, THREADS, RETURNS);
    check_restart(3, THREADS, WORLD_FAILS);
    check_restart(2, THREADS, DISAGREES);
}

/* A rank that outlives the grace period is killed in the attempt that failed, and not in the next one. */
static int rank_outlives(dtrain_world *world, void *user)
{
    int32_t *came = (int32_t *)user;
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    ranks_count(came);
    if (info.restart_count == 0 && info.rank == 1) return ranks_await(came, 3) ? 4 : 5;
    if (info.restart_count == 0) pause();
    ranks_sleep_us(300000);
    return dtrain_world_all_gather(world, NULL, 0, NULL) == DTRAIN_OK ? 0 : 41;
}
static void test_grace_begins_anew(void)
{
    int32_t *came = (int32_t *)ranks_shared(sizeof *came);
    dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
    dtrain_launch_info info;
    desc.restarts = 1;
    desc.backoff_ms = 1;
    desc.grace_ms = 50;
    CHECK_MSG(ranks_launch(&desc, rank_outlives, came, &info) == DTRAIN_OK, "%s",
              dtrain_last_error());
    CHECK(info.restart_count == 1 && *came == 6);
}

static void test_without_restarts(void)
{
    plan *p = new_plan(1, 1);
    dtrain_launch_desc desc = restart_desc(2, PROCESSES, 0, p);
    dtrain_launch_info info;
    p->acts[0] = KILLED;
    CHECK(ranks_launch(&desc, rank_acts, p, &info) == DTRAIN_ERROR_RANK_FAILED);
    CHECK(info.restart_count == 0 && info.exit_code == 137 && p->warnings == 0);
    CHECK_MSG(!says("crash loop"), "%s", dtrain_last_error());
    check_attempts(p, 2, 0);
    desc.restarts = 3; /* nothing fails: nothing is restarted */
    memset(p->came, 0, sizeof p->came);
    p->acts[0] = WELL;
    CHECK(ranks_launch(&desc, rank_acts, p, &info) == DTRAIN_OK);
    CHECK(info.restart_count == 0 && p->warnings == 0);
    check_attempts(p, 2, 0);
    forget(p);
}

static void test_crash_loop(void)
{
    static const act acts[] = {RETURNS, KILLED, EXITS};
    static const int codes[] = {7, 137, 8};
    int i;
    for (i = 0; i < 3; i++) {
        plan *p = new_plan(1, 1);
        dtrain_launch_desc desc = restart_desc(3, PROCESSES, 3, p);
        dtrain_launch_info info;
        p->acts[0] = acts[i];
        CHECK(ranks_launch(&desc, rank_acts, p, &info) == DTRAIN_ERROR_RANK_FAILED);
        CHECK_MSG(info.restart_count == 3 && info.exit_code == codes[i] &&
                      info.first_failed_rank == 1,
                  "%u restarts, code %d, rank %d", info.restart_count, info.exit_code,
                  info.first_failed_rank);
        words_in(dtrain_last_error(), "crash loop: 3 restarts in a row made no progress; the last");
        words_in(dtrain_last_error(), "rank 1 ");
        words_in(dtrain_last_error(), act_words[acts[i]]);
        CHECK_MSG(p->warnings == 3, "%d warnings", p->warnings);
        words_in(p->warning[2], "restart 3 of 3 ");
        check_attempts(p, 3, 3);
        forget(p);
    }
}

/* Announced steps, and how many restarts two in a row without progress then come to; -2 ends the list: all later
 * attempts announce nothing. */
typedef struct progress_case {
    int64_t steps[8];
    uint32_t restarts;
    const char *words;
} progress_case;

/* A call that is refused before any step would be refused again; after a step it may have been something else. */
static int rank_is_refused(dtrain_world *world, void *user)
{
    plan *p = (plan *)user;
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    __atomic_fetch_add(&p->came[info.restart_count][dtrain_world_rank(world)], 1, __ATOMIC_ACQ_REL);
    if (p->steps[0] >= 0) dtrain_world_progress(world, (uint64_t)p->steps[0]);
    RANKS_TRY(dtrain_world_all_gather(world, NULL, 0, NULL));
    if (dtrain_world_rank(world) != p->who)
        return dtrain_world_all_gather(world, NULL, 0, NULL) == DTRAIN_OK ? 0 : 41;
    return dtrain_broadcast(dtrain_world_comm(world), NULL, 4, DTRAIN_DTYPE_F32, 99, NULL) !=
           DTRAIN_OK;
}
/* A rank that asks for what may be refused, goes on without it, and ends for a reason of another kind. */
static int rank_probes(dtrain_world *world, void *user)
{
    plan *p = (plan *)user;
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    __atomic_fetch_add(&p->came[info.restart_count][dtrain_world_rank(world)], 1, __ATOMIC_ACQ_REL);
    if (dtrain_work_test(NULL, NULL) != DTRAIN_ERROR_ARGUMENT) return 41;
    if (p->acts[0] == WELL) dtrain_fail(DTRAIN_ERROR_DATA, "the file is not there");
    if (p->acts[0] != WELL) RANKS_TRY(dtrain_barrier(dtrain_world_comm(world)));
    return info.restart_count == 0;
}
static void test_a_refusal_got_over(void)
{
    for (uint32_t mode = 0; mode < 2; mode++)
        for (int other = 0; other < 2; other++) {
            plan *p = new_plan(1, 1);
            dtrain_launch_desc desc = restart_desc(2, mode, 2, p);
            p->acts[0] = other ? RETURNS : WELL;
            CHECK_MSG((ranks_launch(&desc, rank_probes, p, NULL) == DTRAIN_OK) == other, "%s",
                      dtrain_last_error());
            CHECK_MSG((p->came[1][0] == 1) == other, "it came %d times", p->came[1][0]);
            forget(p);
        }
}

static void test_refused_is_not_restarted(void)
{
    for (uint32_t mode = 0; mode < 2; mode++)
        for (int step = -1; step < 1; step++) {
            plan *p = new_plan(1, 1);
            dtrain_launch_desc desc = restart_desc(2, mode, 2, p);
            p->steps[0] = step;
            CHECK(dtrain_launch(&desc, rank_is_refused, p, NULL) == DTRAIN_ERROR_RANK_FAILED);
            CHECK_MSG((strstr(dtrain_last_error(),
                              "not restarted, because the same would happen again: ") != NULL) ==
                          (step < 0),
                      "%s", dtrain_last_error());
            CHECK_MSG(p->came[0][0] == 1 && p->came[1][0] == (step >= 0), "it came %d and %d times",
                      p->came[0][0], p->came[1][0]);
            forget(p);
        }
}

static void test_progress(void)
{
    static const progress_case cases[] = {
        {{-2}, 2, "2 restarts in a row made no progress; the last"},
        {{0, -2}, 2, "beyond step 0;"}, /* the first attempt's progress is nobody's restart */
        {{10, 10, 10, -2}, 2, "beyond step 10;"},
        {{10, 9, 8, -2}, 2, "beyond step 10;"},
        {{10, 20, -2}, 3, "beyond step 20;"},
        {{10, -1, 20, -2}, 4, "beyond step 20;"},
        {{10, 20, 30, 40, 50, -2}, 6, "beyond step 50;"},
        {{-1, 5, 4, 6, -2}, 5, "beyond step 6;"},
        {{INT64_MAX, INT64_MAX, -2}, 2, "beyond step 9223372036854775807;"}};
    size_t i;
    for (i = 0; i < sizeof cases / sizeof *cases; i++) {
        plan *p = new_plan(1, 1);
        dtrain_launch_desc desc = restart_desc(2, PROCESSES, 2, p);
        dtrain_launch_info info;
        int k;
        p->acts[0] = RETURNS;
        for (k = 0; k < 8 && cases[i].steps[k] != -2; k++) p->steps[k] = cases[i].steps[k];
        CHECK(ranks_launch(&desc, rank_acts, p, &info) == DTRAIN_ERROR_RANK_FAILED);
        CHECK_MSG(info.restart_count == cases[i].restarts, "case %d: %u restarts, expected %u",
                  (int)i, info.restart_count, cases[i].restarts);
        words_in(dtrain_last_error(), cases[i].words);
        words_in(p->warning[0], "restart 1 of 2 ");
        forget(p);
    }
}

static int rank_misuses_progress(dtrain_world *world, void *user)
{
    int32_t *came = (int32_t *)user;
    const int32_t before = __atomic_fetch_add(came, 1, __ATOMIC_ACQ_REL);
    int status = 0;
    pid_t child;
    dtrain_world_progress(NULL, 1);
    dtrain_world_progress(world, 5);
    fflush(NULL);
    child = fork();
    if (child == 0) { /* is not the rank: its progress is none */
        dtrain_world_progress(world, (uint64_t)before + 100);
        CHECK(!ranks_stop_requested(world));
        _exit(0);
    }
    waitpid(child, &status, 0);
    return before < 6 ? 3 : 0;
}
static int rank_goes_to_the_end(dtrain_world *world, void *user)
{
    int32_t *came = (int32_t *)user;
    const int32_t before = __atomic_fetch_add(came, 1, __ATOMIC_ACQ_REL);
    dtrain_world_progress(world, before == 1 ? UINT64_MAX : 5);
    dtrain_world_progress(world, before > 1 ? UINT64_MAX - 1 : 0);
    return before < 6 ? 3 : 0;
}
static void test_progress_misuse(void)
{
    int32_t *came = (int32_t *)ranks_shared(sizeof *came);
    dtrain_launch_desc desc = ranks_desc(1, PROCESSES);
    dtrain_launch_info info;
    desc.restarts = 1;
    desc.backoff_ms = 1;
    CHECK(ranks_launch(&desc, rank_misuses_progress, came, &info) == DTRAIN_ERROR_RANK_FAILED);
    CHECK_MSG(info.restart_count == 1 && *came == 2, "%u restarts", info.restart_count);
    *came = 0;
    CHECK(ranks_launch(&desc, rank_goes_to_the_end, came, &info) == DTRAIN_ERROR_RANK_FAILED);
    CHECK_MSG(info.restart_count == 2 && *came == 3, "%u restarts", info.restart_count);
}

/* The wait doubles with each in a row, six times, and begins anew with progress. */
static void test_backoff(void)
{
    static const char *const words[] = {"1 of 8 in 0.0 s", "2 of 8 in 0.0 s", "3 of 8 in 0.0 s",
                                        "4 of 8 in 0.1 s", "5 of 8 in 0.2 s", "6 of 8 in 0.3 s",
                                        "7 of 8 in 0.6 s", "8 of 8 in 0.6 s"};
    plan *p = new_plan(0, 1);
    dtrain_launch_desc desc = restart_desc(1, PROCESSES, 8, p);
    dtrain_launch_info info;
    int i;
    p->acts[0] = RETURNS;
    desc.backoff_ms = 10;
    CHECK(ranks_launch(&desc, rank_acts, p, &info) == DTRAIN_ERROR_RANK_FAILED);
    for (i = 0; i < 8; i++) words_in(p->warning[i], words[i]);
    CHECK_MSG(info.seconds > 1.9 && info.seconds < 1.9 + RANKS_SOON, "%.2f s", info.seconds);
    p->warnings = 0;
    p->steps[4] = 1;
    desc.backoff_ms = 50;
    desc.restarts = 3;
    p->acts[0] = RETURNS, p->acts[4] = WELL, p->attempts = 5;
    p->acts[1] = p->acts[2] = p->acts[3] = RETURNS;
    p->steps[2] = 1; /* 50, 100, 50, 100 ms */
    CHECK(ranks_launch(&desc, rank_acts, p, &info) == DTRAIN_OK && info.restart_count == 4);
    words_in(p->warning[2], "restart 1 of 3 in 0.1 s");
    words_in(p->warning[3], "restart 2 of 3 in 0.1 s");
    CHECK_MSG(info.seconds > 0.3 && info.seconds < 0.3 + RANKS_SOON, "%.2f s", info.seconds);
    forget(p);
}

/* A signal during the wait ends the run, at once; SIGUSR1 and SIGUSR2 only where they ask to stop. */
static void test_stopped_in_wait(void)
{
    static const int list[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGUSR1};
    int i;
    for (i = 0; i < 7; i++) {
        plan *p = new_plan(0, 2);
        dtrain_launch_desc desc = restart_desc(2, PROCESSES, 3, p);
        dtrain_launch_info info;
        char number[64];
        const double begin = test_seconds();
        p->acts[0] = EXITS;
        p->signal_in_wait = list[i];
        desc.catch_signals = i == 6;
        desc.backoff_ms = i == 4 || i == 5 ? 50 : 60000;
        const dtrain_result result = ranks_launch(&desc, rank_acts, p, &info);
        CHECK_MSG(test_seconds() - begin < RANKS_SOON, "it took %.1f s", test_seconds() - begin);
        if (i == 4 || i == 5) {
            CHECK(result == DTRAIN_OK && info.restart_count == 1 && info.signal == 0);
            continue;
        }
        snprintf(number, sizeof number, "stopped by signal %d (%s", list[i],
                 list[i] == SIGTERM ? "SIGTERM" : "SIG");
        CHECK_MSG(result == DTRAIN_ERROR_RANK_FAILED && info.restart_count == 0 &&
                      info.signal == list[i] && info.exit_code == 128 + list[i] &&
                      info.first_failed_rank == 0,
                  "signal %d: %s, %u restarts, signal %d, code %d", list[i],
                  dtrain_result_text(result), info.restart_count, info.signal, info.exit_code);
        words_in(dtrain_last_error(), number);
        words_in(dtrain_last_error(), "rank 0 returned 8");
        check_attempts(p, 2, 0);
        forget(p);
    }
}

/* The same, sent from outside while it really waits; and the launcher killed there. */
static void test_signal_from_outside_in_wait(void)
{
    int round;
    for (round = 0; round < 2; round++) {
        plan *p = new_plan(0, 1);
        dtrain_launch_info *info = (dtrain_launch_info *)ranks_shared(sizeof *info);
        int status = 0;
        pid_t child;
        p->acts[0] = RETURNS;
        fflush(NULL);
        child = fork();
        if (child == 0) {
            dtrain_launch_desc desc = restart_desc(2, PROCESSES, 3, p);
            desc.backoff_ms = 60000;
            _exit(dtrain_launch(&desc, rank_acts, p, info) == DTRAIN_ERROR_RANK_FAILED ? 51 : 52);
        }
        ranks_await(&p->warnings, 1);
        ranks_sleep_us(60000);
        kill(child, round ? SIGKILL : SIGTERM);
        CHECK_MSG(test_wait(child, RANKS_SOON, &status), "the launcher did not end");
        if (round == 0) {
            CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 51, "status %x",
                      (unsigned)status);
            CHECK(info->signal == SIGTERM && info->exit_code == 143);
        }
        check_attempts(p, 2, 0);
        CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
        forget(p);
    }
}

/* ---- restarts that the system does not let start in full ---- */

/* From the attempt `from` to the attempt `to`, fork is refused after `allowed` ranks. Counted by log lines. */
static struct {
    bool on;
    int from, to, allowed, attempt, forked;
} refusal;
pid_t __real_fork(void);
pid_t __wrap_fork(void);
pid_t __wrap_fork(void)
{
    if (refusal.on && refusal.attempt >= refusal.from && refusal.attempt <= refusal.to &&
        refusal.forked >= refusal.allowed) {
        errno = EAGAIN;
        return -1;
    }
    refusal.forked++;
    return __real_fork();
}
static void count_attempts(void *user, dtrain_log_level level, int rank, const char *text)
{
    keep_warning(user, level, rank, text);
    if (rank != -1) return;
    refusal.forked = 0;
    refusal.attempt += strncmp(text, "restart", 7) == 0;
}
static void refuse(int from, int to, int allowed)
{
    memset(&refusal, 0, sizeof refusal);
    refusal.on = true;
    refusal.from = from;
    refusal.to = to;
    refusal.allowed = allowed;
}

/* A restart that the system refuses some ranks has failed; it is tried again until all ranks are there. */
static int rank_of_refused(dtrain_world *world, void *user)
{
    plan *p = (plan *)user;
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    RANKS_TRY(dtrain_world_all_gather(world, NULL, 0, NULL));
    return p->acts[info.restart_count] == WELL ? 0 : 5;
}

static void test_refused_ranks(void)
{
    plan *p = new_plan(0, 4);
    dtrain_launch_desc desc = restart_desc(4, PROCESSES, 3, p);
    dtrain_launch_info info;
    desc.options.log = count_attempts;
    p->acts[0] = RETURNS;
    refuse(1, 9, 2);
    CHECK(ranks_launch(&desc, rank_of_refused, p, &info) == DTRAIN_ERROR_SYSTEM);
    CHECK(info.restart_count == 3 && info.exit_code == 1 && info.first_failed_rank == -1);
    words_in(dtrain_last_error(), "crash loop: 3 restarts");
    words_in(dtrain_last_error(), "rank 2 of 4 could not be forked");

    p->acts[3] = WELL; /* the third time they are there */
    refuse(1, 2, 3);
    CHECK_MSG(ranks_launch(&desc, rank_of_refused, p, &info) == DTRAIN_OK, "%s",
              dtrain_last_error());
    CHECK(info.restart_count == 3 && info.rank_count == 4);

    refuse(0, 9, 3); /* a first attempt is not repeated */
    p->warnings = 0;
    CHECK(ranks_launch(&desc, rank_of_refused, p, &info) == DTRAIN_ERROR_SYSTEM);
    CHECK(info.restart_count == 0 && p->warnings == 0 && !says("crash loop"));
    refusal.on = false;
    forget(p);
}

/* ---- requests to stop ---- */

typedef struct drill {
    int32_t ready, told, stopped_at[4], steps[4], ended; /* per rank */
    int32_t pid[4];
    int target,
        number; /* whom the test signals: -1 the launcher, -2 its process group; which signal */
    int times;  /* how often, in a row */
    int value;  /* that ranks return in the end */
    bool in_collective; /* the signal comes while ranks wait in a collective for rank 0 */
    bool deaf;          /* ranks never ask */
} drill;

static int rank_steps(dtrain_world *world, void *user)
{
    drill *d = (drill *)user;
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    int32_t step = 0, mine[2], all[2 * 4];
    bool stop = false;
    d->pid[rank] = (int32_t)getpid();
    if (d->deaf) {
        ranks_count(&d->ready);
        ranks_await(&d->told, 1);
        step = 2;
    }
    while (!stop && !d->deaf) {
        if (d->in_collective && rank == 0 && step == 1) {
            ranks_count(&d->ready);
            ranks_await(&d->told, 1);
        }
        mine[0] = step;
        mine[1] = __atomic_load_n(&d->told, __ATOMIC_ACQUIRE);
        RANKS_TRY(dtrain_world_all_gather(world, mine, 8, all)); /* the step's collective */
        CHECK_MSG(all[0] == step && all[2 * (size - 1)] == step, "ranks are in different steps");
        RANKS_TRY(ranks_agree_stop(world, &stop));
        if (d->times && !all[1]) stop = false; /* not before all signals have been sent */
        step++;
        if (!d->in_collective && step == 3) ranks_count(&d->ready);
        if (step > 3) ranks_sleep_us(200 * (rank + 1));
    }
    d->stopped_at[rank] = step;
    __atomic_fetch_add(&d->ended, 1, __ATOMIC_ACQ_REL);
    return d->value;
}

static void check_stop(int ranks, drill asked)
{
    drill *d = (drill *)ranks_shared(sizeof *d);
    dtrain_launch_info *info = (dtrain_launch_info *)ranks_shared(sizeof *info);
    int status = 0, r, i;
    pid_t child;
    *d = asked;
    fflush(NULL);
    child = fork();
    if (child == 0) {
        dtrain_launch_desc desc = ranks_desc(ranks, PROCESSES);
        if (asked.target == -2) setpgid(0, 0);
        desc.catch_signals = true;
        desc.restarts = 3;
        desc.backoff_ms = 1;
        const dtrain_result result = ranks_launch(&desc, rank_steps, d, info);
        _exit(result == DTRAIN_OK ? 50 : result == DTRAIN_ERROR_RANK_FAILED ? 51 : 52);
    }
    ranks_await(&d->ready, asked.in_collective ? 1 : ranks);
    if (asked.in_collective) ranks_sleep_us(5000); /* the others are in the collective by now */
    for (i = 0; i < (asked.times ? asked.times : 1); i++)
        kill(asked.target == -1   ? child
             : asked.target == -2 ? -child
                                  : d->pid[asked.target],
             asked.number),
            ranks_sleep_us(asked.times ? 20000 : 0);
    ranks_sleep_us(1000);
    ranks_count(&d->told);
    CHECK_MSG(test_wait(child, RANKS_SOON, &status), "the launcher did not end");
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == (asked.value ? 51 : 50),
              "%d ranks, signal %d to %d: status %x", ranks, asked.number, asked.target,
              (unsigned)status);
    CHECK_MSG(
        info->signal == asked.number && info->exit_code == asked.value && info->restart_count == 0,
        "signal %d, code %d, %u restarts", info->signal, info->exit_code, info->restart_count);
    CHECK_MSG(d->ended == ranks, "%d of %d ranks ended", d->ended, ranks);
    for (r = 0; r < ranks; r++)
        CHECK_MSG(d->stopped_at[r] == d->stopped_at[0] && d->stopped_at[r] > 1,
                  "rank %d stopped after step %d, rank 0 after %d", r, d->stopped_at[r],
                  d->stopped_at[0]);
    munmap(d, sizeof *d);
    munmap(info, sizeof *info);
}

static drill to(int target, int number)
{
    drill d;
    memset(&d, 0, sizeof d);
    d.target = target;
    d.number = number;
    return d;
}

static void test_stop_after_the_same_step(void)
{
    int ranks;
    for (ranks = 1; ranks <= 4; ranks++) {
        check_stop(ranks, to(-1, SIGTERM));
        check_stop(ranks, to(-1, SIGUSR1));
        check_stop(ranks, to(ranks - 1, SIGTERM)); /* one rank alone */
        check_stop(ranks, to(0, SIGUSR1));
        check_stop(ranks, to(-1, SIGINT));
        check_stop(ranks, to(ranks - 1, SIGINT));
        check_stop(ranks, to(-1, SIGHUP));
        check_stop(ranks, to(0, SIGHUP));
    }
}

/* A SIGHUP that was ignored when the run began, as nohup has it, asks nobody to stop, also not twice. */
static int rank_under_nohup(dtrain_world *world, void *user)
{
    drill *d = (drill *)user;
    d->pid[dtrain_world_rank(world)] = (int32_t)getpid();
    ranks_count(&d->ready);
    ranks_await(&d->told, 1);
    return ranks_stop_requested(world);
}
static void test_nohup(void)
{
    drill *d = (drill *)ranks_shared(sizeof *d);
    int status = 0;
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        dtrain_launch_desc desc = ranks_desc(2, PROCESSES);
        dtrain_launch_info info;
        signal(SIGHUP, SIG_IGN);
        desc.catch_signals = true;
        const dtrain_result result = ranks_launch(&desc, rank_under_nohup, d, &info);
        _exit(result == DTRAIN_OK && info.signal == 0 ? 50 : 51);
    }
    ranks_await(&d->ready, 2);
    for (int i = 0; i < 2; i++) {
        kill(child, SIGHUP);
        kill(d->pid[i], SIGHUP);
        ranks_sleep_us(i ? 20000 : 1050000);
    }
    ranks_count(&d->told);
    CHECK_MSG(test_wait(child, RANKS_SOON, &status), "the launcher did not end");
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 50, "status %x", (unsigned)status);
    munmap(d, sizeof *d);
}

/* timeout(1) and Slurm signal all processes of a job, and the launcher forwards it too: that is one request. */
static void test_stop_doubled(void)
{
    drill d = to(-2, SIGTERM);
    check_stop(3, d);
    d = to(-1, SIGTERM);
    d.times = 3;
    check_stop(2, d);
    d = to(1, SIGTERM);
    d.times = 3;
    check_stop(2, d);
    d = to(-1, SIGUSR1);
    d.times = 3;
    check_stop(2, d);
}

static void test_stop_in_a_collective(void)
{
    drill d = to(-1, SIGTERM);
    d.in_collective = true;
    check_stop(3, d);
    d.target = 1;
    check_stop(2, d);
}

/* Whoever was asked to stop and fails then, while it saves say, is not started again. */
static void test_stop_and_fail(void)
{
    drill d = to(1, SIGTERM);
    d.value = 9;
    check_stop(3, d);
    d.target = -1;
    check_stop(1, d);
    d.deaf = true; /* nor is who fails without having asked, where the launcher was told */
    check_stop(2, d);
    d.number = SIGUSR1;
    check_stop(2, d);
}

/* Without catch_signals ranks die of signals, as ever; and are not restarted when they were forwarded. */
static int rank_waits(dtrain_world *world, void *user)
{
    drill *d = (drill *)user;
    bool stop = true;
    CHECK(!ranks_stop_requested(world));
    CHECK(ranks_agree_stop(world, &stop) == DTRAIN_OK && !stop);
    d->pid[dtrain_world_rank(world)] = (int32_t)getpid();
    ranks_count(&d->ready);
    while (pause() < 0) continue;
    return 0;
}
static void test_stop_not_caught(void)
{
    static const int list[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2};
    int i;
    for (i = 0; i < 5; i++) {
        drill *d = (drill *)ranks_shared(sizeof *d);
        dtrain_launch_info *info = (dtrain_launch_info *)ranks_shared(sizeof *info);
        int status = 0;
        pid_t child;
        fflush(NULL);
        child = fork();
        if (child == 0) {
            dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
            desc.restarts = 3;
            desc.backoff_ms = 1;
            _exit(ranks_launch(&desc, rank_waits, d, info) == DTRAIN_ERROR_RANK_FAILED ? 51 : 52);
        }
        ranks_await(&d->ready, 3);
        kill(child, list[i]);
        CHECK_MSG(test_wait(child, RANKS_SOON, &status), "the launcher did not end");
        CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 51, "status %x", (unsigned)status);
        CHECK_MSG(d->ready == 3 && info->restart_count == 0 && info->signal == list[i] &&
                      info->exit_code == 128 + list[i],
                  "signal %d: %u restarts, signal %d, code %d", list[i], info->restart_count,
                  info->signal, info->exit_code);
    }
}

/* The second request kills, when it is not the first one twice. USR1 never does. */
static int rank_is_told_twice(dtrain_world *world, void *user)
{
    int32_t *reached = (int32_t *)user;
    const int number = reached[1];
    raise(number);
    CHECK(ranks_stop_requested(world));
    raise(number);
    raise(SIGUSR1);
    *reached = 1;
    ranks_sleep_us(1050000);
    raise(SIGUSR1);
    *reached = 2;
    raise(number);
    *reached = 3;
    return 0;
}
static void test_second_request(void)
{
    static const int list[] = {SIGTERM, SIGINT, SIGHUP};
    int32_t *reached = (int32_t *)ranks_shared(2 * sizeof *reached);
    drill *d = (drill *)ranks_shared(sizeof *d);
    dtrain_launch_desc desc = ranks_desc(1, PROCESSES);
    dtrain_launch_info info;
    int status = 0;
    pid_t child;
    desc.catch_signals = true;
    for (int i = 0; i < 3; i++) {
        reached[1] = list[i];
        CHECK(ranks_launch(&desc, rank_is_told_twice, reached, &info) == DTRAIN_ERROR_RANK_FAILED);
        CHECK_MSG(*reached == 2 && info.signal == list[i] && info.exit_code == 128 + list[i],
                  "reached %d, signal %d, code %d", *reached, info.signal, info.exit_code);
    }

    /* through the launcher, to ranks that do not listen: the second one ends them */
    fflush(NULL);
    child = fork();
    if (child == 0) {
        desc.rank_count = 3;
        _exit(dtrain_launch(&desc, rank_waits, d, NULL) == DTRAIN_ERROR_RANK_FAILED ? 51 : 52);
    }
    ranks_await(&d->ready, 3);
    kill(child, SIGTERM);
    ranks_sleep_us(1050000);
    CHECK(waitpid(child, &status, WNOHANG) == 0);
    kill(child, SIGTERM);
    CHECK_MSG(test_wait(child, RANKS_SOON, &status), "the launcher did not end");
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 51, "status %x", (unsigned)status);
}

/* ---- the host's own signals ---- */

static volatile sig_atomic_t hosts;
static void on_host(int number) { hosts = number; }

/* The host has a handler for SIGTERM and blocks SIGUSR1; both signals are caught all the same, and are the host's
 * again afterwards. */
static int rank_hears_both(dtrain_world *world, void *user)
{
    int32_t *heard = (int32_t *)user;
    struct sigaction action;
    CHECK(!ranks_stop_requested(world));
    RANKS_TRY(dtrain_world_all_gather(world, NULL, 0, NULL));
    if (dtrain_world_rank(world) == 0) kill(getpid(), *heard ? SIGUSR1 : SIGTERM);
    const double end = test_seconds() + RANKS_SOON;
    bool stop = false;
    while (!stop && test_seconds() < end) RANKS_TRY(ranks_agree_stop(world, &stop));
    CHECK_MSG(stop, "nobody was asked to stop");
    sigaction(SIGTERM, NULL, &action);
    CHECK(action.sa_handler != on_host);
    return 0;
}
static void set_host(void)
{
    struct sigaction action;
    sigset_t mask;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_host;
    sigaction(SIGTERM, &action, NULL);
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR1);
    sigprocmask(SIG_SETMASK, &mask, NULL);
}
static void check_host(const char *what)
{
    struct sigaction action;
    sigset_t mask;
    sigprocmask(SIG_SETMASK, NULL, &mask);
    CHECK_MSG(sigismember(&mask, SIGUSR1) == 1 && sigismember(&mask, SIGTERM) == 0, "%s: mask",
              what);
    sigaction(SIGUSR1, NULL, &action);
    CHECK_MSG(action.sa_handler == SIG_DFL, "%s: SIGUSR1 has a handler", what);
    sigaction(SIGTERM, NULL, &action);
    CHECK_MSG(action.sa_handler == on_host, "%s: SIGTERM has another handler", what);
    CHECK_MSG(hosts == 0, "%s: the host's handler ran during the launch", what);
    raise(SIGTERM);
    CHECK_MSG(hosts == SIGTERM, "%s: the host's handler does not run", what);
    hosts = 0;
}
static void set_environment(int rank, int size, int port)
{
    char text[16];
    snprintf(text, sizeof text, "%d", rank);
    setenv("RANK", text, 1);
    snprintf(text, sizeof text, "%d", size);
    setenv("WORLD_SIZE", text, 1);
    snprintf(text, sizeof text, "%d", port);
    setenv("DTRAIN_PORT", text, 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
}
static void test_host_handlers(void)
{
    int32_t *usr1 = (int32_t *)ranks_shared(sizeof *usr1);
    uint32_t mode;
    int r, status;
    set_host();
    for (*usr1 = 0; *usr1 < 2; *usr1 += 1)
        for (mode = PROCESSES; mode <= THREADS; mode++) {
            dtrain_launch_desc desc = ranks_desc(2, mode);
            dtrain_launch_info info;
            desc.catch_signals = true;
            CHECK_MSG(ranks_launch(&desc, rank_hears_both, usr1, &info) == DTRAIN_OK, "%s",
                      dtrain_last_error());
            CHECK_MSG(info.signal == (*usr1 ? SIGUSR1 : SIGTERM) && info.exit_code == 0,
                      "%s: signal %d", ranks_mode_name(mode), info.signal);
            check_host(ranks_mode_name(mode));
        }
    for (*usr1 = 0; *usr1 < 2; *usr1 += 1) { /* ranks of another launcher */
        pid_t ranks[2];
        const int port = ports_next();
        fflush(NULL);
        for (r = 0; r < 2; r++)
            if ((ranks[r] = fork()) == 0) {
                dtrain_launch_desc desc = ranks_desc(0, PROCESSES);
                dtrain_launch_info info;
                set_environment(r, 2, port);
                desc.catch_signals = true;
                CHECK_MSG(dtrain_launch(&desc, rank_hears_both, usr1, &info) == DTRAIN_OK, "%s",
                          dtrain_last_error());
                CHECK(r || info.signal == (*usr1 ? SIGUSR1 : SIGTERM));
                check_host("joined");
                _exit(0);
            }
        for (r = 0; r < 2; r++) CHECK(waitpid(ranks[r], &status, 0) == ranks[r] && status == 0);
    }
}

/* A process has one handler: of two runs in its threads at a time, one may catch signals. */
static void *launch_within(void *user)
{
    dtrain_launch_desc desc = ranks_desc(1, THREADS);
    int32_t usr1 = 0;
    desc.catch_signals = true;
    *(int32_t *)user = (int32_t)dtrain_launch(&desc, rank_hears_both, &usr1, NULL);
    if (*(int32_t *)user != DTRAIN_OK)
        CHECK_MSG(says("catch_signals") && says("another run"), "%s", dtrain_last_error());
    return NULL;
}
static int rank_launches_within(dtrain_world *world, void *user)
{
    int32_t result = 0;
    pthread_t thread;
    (void)world;
    (void)user;
    CHECK(pthread_create(&thread, NULL, launch_within, &result) == 0);
    pthread_join(thread, NULL);
    CHECK_MSG(result == DTRAIN_ERROR_USAGE, "%d", result);
    return 0;
}
static void test_two_runs_catch(void)
{
    dtrain_launch_desc desc = ranks_desc(1, THREADS);
    int32_t result = 1;
    desc.catch_signals = true;
    CHECK(ranks_launch(&desc, rank_launches_within, NULL, NULL) == DTRAIN_OK);
    launch_within(&result); /* and now it can again */
    CHECK(result == DTRAIN_OK);
}

/* ---- launchers around this one ---- */

static int rank_tells_count(dtrain_world *world, void *user)
{
    int32_t *counts = (int32_t *)user;
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    counts[__atomic_fetch_add(&counts[9], 1, __ATOMIC_ACQ_REL)] = (int32_t)info.restart_count;
    return counts[8];
}

static void test_outer_restarts(void)
{
    int32_t *counts = (int32_t *)ranks_shared(10 * sizeof *counts);
    dtrain_launch_desc desc = ranks_desc(1, PROCESSES);
    dtrain_launch_info info;
    pid_t ranks[2];
    int r, status;
    setenv("TORCHELASTIC_RESTART_COUNT", "4", 1);
    CHECK(ranks_launch(&desc, rank_tells_count, counts, &info) == DTRAIN_OK);
    CHECK_MSG(counts[0] == 4 && info.restart_count == 4, "%d, %u", counts[0], info.restart_count);
    counts[8] = 6, counts[9] = 0; /* and its own beside them */
    desc.restarts = 2;
    desc.backoff_ms = 1;
    CHECK(ranks_launch(&desc, rank_tells_count, counts, &info) == DTRAIN_ERROR_RANK_FAILED);
    CHECK(counts[0] == 4 && counts[1] == 5 && counts[2] == 6 && info.restart_count == 6);
    words_in(dtrain_last_error(), "2 restarts in a row");
    setenv("TORCHELASTIC_RESTART_COUNT", "-1", 1);
    CHECK(ranks_launch(&desc, rank_tells_count, counts, &info) == DTRAIN_ERROR_ARGUMENT);
    words_in(dtrain_last_error(), "TORCHELASTIC_RESTART_COUNT=\"-1\"");
    unsetenv("TORCHELASTIC_RESTART_COUNT");
    setenv("SLURM_RESTART_COUNT", "3", 1);
    counts[8] = counts[9] = 0;
    CHECK(ranks_launch(&desc, rank_tells_count, counts, &info) == DTRAIN_OK);
    CHECK(counts[0] == 3 && info.restart_count == 3);

    /* joined ranks: the launcher there restarts, and is told by the exit code */
    const int port = ports_next();
    counts[8] = 6, counts[9] = 0;
    fflush(NULL);
    for (r = 0; r < 2; r++)
        if ((ranks[r] = fork()) == 0) {
            dtrain_launch_desc joined = ranks_desc(0, PROCESSES);
            set_environment(r, 2, port);
            joined.restarts = 5;
            CHECK(dtrain_launch(&joined, rank_tells_count, counts, &info) ==
                  DTRAIN_ERROR_RANK_FAILED);
            CHECK(info.restart_count == 3);
            _exit(info.exit_code);
        }
    for (r = 0; r < 2; r++)
        CHECK(waitpid(ranks[r], &status, 0) == ranks[r] && WEXITSTATUS(status) == 6);
    CHECK_MSG(counts[9] == 2 && counts[0] == 3 && counts[1] == 3, "%d attempts", counts[9]);
}

/* One node of a TrainJob of two cannot start again without the other. */
static void test_nodes_are_not_restarted(void)
{
    int32_t *counts = (int32_t *)ranks_shared(10 * sizeof *counts);
    const int port = ports_next();
    pid_t nodes[2];
    int n, status;
    counts[8] = 6;
    fflush(NULL);
    for (n = 0; n < 2; n++)
        if ((nodes[n] = fork()) == 0) {
            dtrain_launch_desc desc = ranks_desc(0, PROCESSES);
            dtrain_launch_info info;
            char text[16];
            setenv("PET_NNODES", "2", 1);
            setenv("PET_NODE_RANK", n ? "1" : "0", 1);
            setenv("PET_NPROC_PER_NODE", "2", 1);
            setenv("PET_MASTER_ADDR", "127.0.0.1", 1);
            snprintf(text, sizeof text, "%d", port);
            setenv("DTRAIN_PORT", text, 1);
            desc.restarts = 5;
            CHECK(dtrain_launch(&desc, rank_tells_count, counts, &info) ==
                  DTRAIN_ERROR_RANK_FAILED);
            CHECK(info.restart_count == 0);
            _exit(info.exit_code);
        }
    for (n = 0; n < 2; n++)
        CHECK_MSG(waitpid(nodes[n], &status, 0) == nodes[n] && WEXITSTATUS(status) == 6,
                  "status %x", (unsigned)status);
    CHECK_MSG(counts[9] == 4, "%d ranks ran", counts[9]);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN_BESIDE(test_restart_after_every_failure);
    RUN(test_restart_threads);
    RUN(test_grace_begins_anew);
    RUN(test_without_restarts);
    RUN(test_crash_loop);
    RUN(test_refused_is_not_restarted);
    RUN(test_a_refusal_got_over);
    RUN(test_progress);
    RUN(test_progress_misuse);
    RUN_BESIDE(test_backoff);
    RUN(test_stopped_in_wait);
    RUN(test_signal_from_outside_in_wait);
    RUN(test_refused_ranks);
    RUN(test_stop_after_the_same_step);
    RUN(test_stop_doubled);
    RUN(test_stop_in_a_collective);
    RUN(test_stop_and_fail);
    RUN(test_stop_not_caught);
    RUN_BESIDE(test_nohup);
    RUN_BESIDE(test_second_request);
    RUN(test_host_handlers);
    RUN(test_two_runs_catch);
    RUN(test_outer_restarts);
    RUN(test_nodes_are_not_restarted);
    return test_summary();
}
