/* test_launch.c: world and launch: how ranks start, how they end, what is reported about it, and
 * that nothing is left of them. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"

#include <pthread.h>
#include <sys/resource.h>

enum { PROCESSES = DTRAIN_LAUNCH_PROCESSES, THREADS = DTRAIN_LAUNCH_THREADS };

static bool says(const char *part) { return strstr(dtrain_last_error(), part) != NULL; }

/* The sentence has to name this rank, in whatever words. */
static bool says_rank(int rank)
{
    char text[32];
    const char *at = dtrain_last_error();
    snprintf(text, sizeof text, "rank %d", rank);
    while ((at = strstr(at, text)) != NULL) {
        at += strlen(text);
        if (*at < '0' || *at > '9') return true;
    }
    return false;
}

/* ---- starting ---- */

typedef struct roll {
    int32_t came[DTRAIN_MAX_RANKS], size[DTRAIN_MAX_RANKS], pid[DTRAIN_MAX_RANKS];
    int32_t exits, plain_exits;
} roll;

static int rank_answers(dtrain_world *world, void *user)
{
    roll *all = (roll *)user;
    int rank = dtrain_world_rank(world);
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_world_info info;
    if (rank < 0 || rank >= DTRAIN_MAX_RANKS) return 99;
    __atomic_fetch_add(&all->came[rank], 1, __ATOMIC_RELAXED);
    all->size[rank] = dtrain_world_size(world);
    all->pid[rank] = (int32_t)getpid();
    CHECK(dtrain_comm_rank(comm) == rank && dtrain_comm_size(comm) == dtrain_world_size(world));
    CHECK(dtrain_world_device(world) != NULL);
    dtrain_world_query(world, &info);
    CHECK(info.rank == rank && info.size == dtrain_world_size(world));
    CHECK(info.allocator.alloc != NULL && info.threads >= 1 && info.timeout_ms >= 1);
    return dtrain_barrier(comm) == DTRAIN_OK ? 0 : 1;
}

static void test_ranks_start(void)
{
    static const int counts[] = {1, 2, 3, 8, 64};
    roll *all = (roll *)ranks_shared(sizeof *all);
    uint32_t mode;
    int i, r;
    for (mode = 0; mode < 2; mode++)
        for (i = 0; i < 5; i++) {
            dtrain_launch_desc desc = ranks_desc(counts[i], mode);
            dtrain_launch_info info;
            memset(all, 0, sizeof *all);
            memset(&info, 0x55, sizeof info);
            CHECK_MSG(ranks_launch(&desc, rank_answers, all, &info) == DTRAIN_OK, "%d %s: %s",
                      counts[i], ranks_mode_name(mode), dtrain_last_error());
            CHECK(info.rank_count == (uint32_t)counts[i] && info.first_failed_rank == -1);
            CHECK(info.exit_code == 0 && info.signal == 0);
            CHECK_MSG(info.seconds > 0 && info.seconds < 20, "%g seconds", info.seconds);
            for (r = 0; r < counts[i]; r++) {
                CHECK(all->came[r] == 1 && all->size[r] == counts[i]);
                CHECK((all->pid[r] == getpid()) == (mode == THREADS));
            }
            CHECK(all->came[counts[i]] == 0);
        }
}

static void test_defaults(void)
{
    roll *all = (roll *)ranks_shared(sizeof *all);
    dtrain_launch_info info;
    dtrain_launch_desc desc;
    CHECK_MSG(dtrain_launch(NULL, rank_answers, all, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
    CHECK(all->came[0] == 1 && all->size[0] == 1);
    memset(&desc, 0, sizeof desc);
    CHECK_MSG(dtrain_launch(&desc, rank_answers, all, &info) == DTRAIN_OK, "%s",
              dtrain_last_error());
    CHECK(info.rank_count == 1 && all->came[0] == 2 && all->came[1] == 0);
}

static void test_bad_arguments(void)
{
    roll *all = (roll *)ranks_shared(sizeof *all);
    dtrain_launch_desc desc = ranks_desc(2, PROCESSES);
    CHECK(dtrain_launch(&desc, NULL, NULL, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strlen(dtrain_last_error()) > 20);
    desc.rank_count = DTRAIN_MAX_RANKS + 1;
    CHECK(dtrain_launch(&desc, rank_answers, all, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK_MSG(says("257") && says("256"), "%s", dtrain_last_error());
    desc.rank_count = UINT32_MAX;
    CHECK(dtrain_launch(&desc, rank_answers, all, NULL) == DTRAIN_ERROR_ARGUMENT);
    desc = ranks_desc(2, 7);
    CHECK(dtrain_launch(&desc, rank_answers, all, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK_MSG(says("7"), "%s", dtrain_last_error());
    desc = ranks_desc(2, PROCESSES);
    desc.options.log_level = 9;
    CHECK(dtrain_launch(&desc, rank_answers, all, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK_MSG(says("log_level is 9"), "%s", dtrain_last_error());
    desc = ranks_desc(2, PROCESSES);
    CHECK(dtrain_device_ops_by_name("plan", &desc.device_ops) == DTRAIN_OK);
    CHECK(dtrain_launch(&desc, rank_answers, all, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK_MSG(says("plan device"), "%s", dtrain_last_error());
    CHECK(all->came[0] == 0);
}

static int rank_threads(dtrain_world *world, void *user)
{
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    return CHECK_MSG(info.threads == *(uint32_t *)user, "%u threads, expected %u", info.threads,
                     *(uint32_t *)user)
               ? 0
               : 1;
}
static void test_threads_per_rank(void)
{
    uint32_t expected = 3, cores = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    dtrain_launch_desc desc = ranks_desc(2, PROCESSES);
    desc.threads_per_rank = 3;
    CHECK(ranks_launch(&desc, rank_threads, &expected, NULL) == DTRAIN_OK);
    desc.threads_per_rank = 0;
    expected = cores / 2 ? cores / 2 : 1;
    CHECK(ranks_launch(&desc, rank_threads, &expected, NULL) == DTRAIN_OK);
    desc.rank_count = 64;
    expected = cores / 64 ? cores / 64 : 1;
    CHECK(ranks_launch(&desc, rank_threads, &expected, NULL) == DTRAIN_OK);
}

/* ---- ending ---- */

typedef struct ending {
    int who;          /* rank that ends in a special way; -1 = all */
    int value;        /* returned, or the signal */
    int how;          /* 0 return, 1 raise, 2 _exit, 3 exit */
    bool others_wait; /* in a barrier that the special rank never reaches */
} ending;

static int rank_ends(dtrain_world *world, void *user)
{
    const ending *end = (const ending *)user;
    int rank = dtrain_world_rank(world);
    if (end->who != -1 && rank != end->who)
        return end->others_wait ? (dtrain_barrier(dtrain_world_comm(world)) == DTRAIN_OK ? 0 : 41)
                                : 0;
    if (end->how == 1) {
        signal(end->value, SIG_DFL); /* sanitizers have handlers of their own */
        raise(end->value);
    }
    if (end->how == 2) _exit(end->value);
    if (end->how == 3) exit(end->value);
    return end->value;
}

static void check_ending(int ranks, uint32_t mode, ending end, int exit_code, int signal_number)
{
    dtrain_launch_desc desc = ranks_desc(ranks, mode);
    dtrain_launch_info info;
    char number[16];
    dtrain_result result = ranks_launch(&desc, rank_ends, &end, &info);
    CHECK_MSG(result == DTRAIN_ERROR_RANK_FAILED, "how %d value %d: %s", end.how, end.value,
              dtrain_result_text(result));
    if (end.who >= 0)
        CHECK_MSG(info.first_failed_rank == end.who, "rank %d failed, reported %d: %s", end.who,
                  info.first_failed_rank, dtrain_last_error());
    CHECK_MSG(info.exit_code == exit_code, "exit code %d, expected %d (value %d)", info.exit_code,
              exit_code, end.value);
    CHECK_MSG(info.signal == signal_number, "signal %d, expected %d", info.signal, signal_number);
    CHECK_MSG(says_rank(info.first_failed_rank), "rank not named: %s", dtrain_last_error());
    snprintf(number, sizeof number, "%d", signal_number ? signal_number : exit_code);
    CHECK_MSG(says(number) || (signal_number && says(strsignal(signal_number))),
              "'%s' not named: %s", number, dtrain_last_error());
}

static void test_exit_codes(void)
{
    uint32_t mode;
    int wait, i;
    for (mode = 0; mode < 2; mode++)
        for (wait = 0; wait < 2; wait++) {
            ending one = {1, 1, 0, wait != 0}, three = {0, 3, 0, wait != 0},
                   all = {-1, 5, 0, false};
            ending most = {2, 255, 0, wait != 0};
            check_ending(2, mode, one, 1, 0);
            check_ending(3, mode, three, 3, 0);
            check_ending(3, mode, most, 255, 0);
            check_ending(4, mode, all, 5, 0);
        }
    for (i = 0; i < 15; i++) { /* survivors fail too, a moment later: the first one counts */
        ending first = {i % 4, 7, 0, true};
        check_ending(4, (uint32_t)i % 2, first, 7, 0);
    }
}

/* Only the low 8 bits of a return value leave a process; a failure must not become a success. */
static void test_odd_return_values(void)
{
    static const int values[] = {256, -1, 512, -256, 1000000};
    uint32_t mode;
    int i;
    for (mode = 0; mode < 2; mode++)
        for (i = 0; i < 5; i++) {
            ending end = {1, values[i], 0, false};
            dtrain_launch_desc desc = ranks_desc(2, mode);
            dtrain_launch_info info;
            dtrain_result result = ranks_launch(&desc, rank_ends, &end, &info);
            CHECK_MSG(result == DTRAIN_ERROR_RANK_FAILED && info.first_failed_rank == 1,
                      "%s, a rank returned %d: %s", ranks_mode_name(mode), values[i],
                      dtrain_result_text(result));
            CHECK_MSG(info.exit_code > 0 && info.exit_code <= 255,
                      "%d became exit code %d for main", values[i], info.exit_code);
        }
}

static void test_signals_named(void)
{
    static const int list[] = {SIGKILL, SIGSEGV, SIGABRT, SIGTERM, SIGFPE, SIGBUS};
    int i;
    for (i = 0; i < 6; i++) {
        ending end = {i % 3, list[i], 1, i % 2 == 0};
        check_ending(3, PROCESSES, end, 128 + list[i], list[i]);
    }
}

static void test_exit_inside_a_rank(void)
{
    ending direct = {1, 9, 2, true}, normal = {0, 9, 3, true};
    check_ending(2, PROCESSES, direct, 9, 0);
    check_ending(2, PROCESSES, normal, 9, 0);
}

/* A survivor that never looks at its communicator is killed after the grace period. */
static int rank_ignores_all(dtrain_world *world, void *user)
{
    (void)user;
    if (dtrain_world_rank(world) == 1) return 4;
    signal(SIGTERM, SIG_IGN);
    for (;;) pause();
}
static void test_grace(void)
{
    dtrain_launch_desc desc = ranks_desc(4, PROCESSES);
    dtrain_launch_info info;
    double begin = dtrain_seconds();
    desc.grace_ms = 300;
    CHECK(ranks_launch(&desc, rank_ignores_all, NULL, &info) == DTRAIN_ERROR_RANK_FAILED);
    CHECK_MSG(info.first_failed_rank == 1 && info.exit_code == 4, "rank %d, code %d",
              info.first_failed_rank, info.exit_code);
    CHECK_MSG(dtrain_seconds() - begin > 0.25 && dtrain_seconds() - begin < RANKS_SOON,
              "took %.2f s", dtrain_seconds() - begin);
}

/* ---- the process around it ---- */

static int lines_of(const char *path)
{
    FILE *file = fopen(path, "r");
    int c, lines = 0;
    if (!file) return -1;
    while ((c = fgetc(file)) != EOF) lines += c == '\n';
    fclose(file);
    return lines;
}

static int rank_uses_all(dtrain_world *world, void *user)
{
    dtrain_comm *comm = dtrain_world_comm(world), *half = NULL;
    dtrain_work *work;
    float x[500], *shared;
    void *memory;
    int i;
    (void)user;
    for (i = 0; i < 500; i++) x[i] = 1;
    if (dtrain_comm_alloc(comm, 100000, &memory) != DTRAIN_OK) return 1;
    shared = (float *)memory;
    for (i = 0; i < 500; i++) shared[i] = 1;
    if (dtrain_all_reduce(comm, x, x, 500, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, &work) != DTRAIN_OK)
        return 2;
    if (dtrain_all_reduce(comm, shared, shared, 500, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL) !=
        DTRAIN_OK)
        return 3;
    if (dtrain_work_wait(work) != DTRAIN_OK) return 4;
    if (dtrain_comm_split(comm, dtrain_world_rank(world) % 2, 0, &half) != DTRAIN_OK) return 5;
    if (dtrain_barrier(half) != DTRAIN_OK) return 6;
    dtrain_comm_destroy(half);
    i = x[499] == (float)dtrain_world_size(world) && shared[499] == x[0] ? 0 : 8;
    dtrain_comm_free(comm, memory, 100000);
    return i;
}

/* Twenty in a row: descriptors, threads, children and mappings stay what they were. */
static void test_repeated(void)
{
    uint32_t mode;
    for (mode = 0; mode < 2; mode++) {
        int i, maps = 0;
        for (i = 0; i < 20; i++) {
            ranks_run(4, mode, rank_uses_all, NULL);
            if (i == 3) maps = lines_of("/proc/self/maps"); /* malloc has its arenas now */
        }
        /* glibc keeps stacks and arenas of ended threads: a few lines, not a few a launch */
        CHECK_MSG(lines_of("/proc/self/maps") <= maps + 8 || RANKS_SANITIZED,
                  "%s: %d mappings after 4 launches, %d after 20", ranks_mode_name(mode), maps,
                  lines_of("/proc/self/maps"));
    }
    CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
}

/* Stdio: what the parent had in its buffers is written once, what ranks print arrives, and atexit
 * handlers of the parent run in the parent only. */
static roll *exit_roll;
static void count_exit(void) { __atomic_fetch_add(&exit_roll->exits, 1, __ATOMIC_RELAXED); }
static int rank_prints(dtrain_world *world, void *user)
{
    (void)user;
    printf("rank%d;", dtrain_world_rank(world)); /* no newline: only a flush gets it out */
    return 0;
}
static int count_of(const char *text, const char *part)
{
    int count = 0;
    while ((text = strstr(text, part)) != NULL) {
        count++;
        text += strlen(part);
    }
    return count;
}
static void test_stdio_and_atexit(void)
{
    char path[] = "/tmp/dtrain_test_XXXXXX", text[512];
    int fd = mkstemp(path), status;
    ssize_t got;
    pid_t child;
    exit_roll = (roll *)ranks_shared(sizeof *exit_roll);
    if (!CHECK(fd >= 0)) return;
    fflush(NULL);
    child = fork();
    if (child == 0) {
        dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
        dup2(fd, 1);
        setvbuf(stdout, NULL, _IOFBF, 4096);
        atexit(count_exit);
        printf("before;");
        if (dtrain_launch(&desc, rank_prints, NULL, NULL) != DTRAIN_OK) _exit(3);
        printf("after;");
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    got = pread(fd, text, sizeof text - 1, 0);
    text[got > 0 ? got : 0] = 0;
    CHECK_MSG(count_of(text, "before;") == 1 && count_of(text, "after;") == 1, "stdout: %s", text);
    CHECK_MSG(count_of(text, "rank0;") == 1 && count_of(text, "rank1;") == 1 &&
                  count_of(text, "rank2;") == 1,
              "stdout: %s", text);
    CHECK_MSG(exit_roll->exits == 1, "atexit handler ran %d times", exit_roll->exits);
    close(fd);
    unlink(path);
}

/* The program's own children are its own: launch must not wait for them. Neither may the program's
 * handling of SIGCHLD matter. */
static void test_other_children(void)
{
    int status = 0;
    siginfo_t ended;
    pid_t child = fork();
    if (child == 0) _exit(7);
    waitid(P_PID, (id_t)child, &ended, WEXITED | WNOWAIT); /* it is a zombie now */
    {
        dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
        CHECK(dtrain_launch(&desc, rank_uses_all, NULL, NULL) == DTRAIN_OK);
    }
    CHECK_MSG(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7,
              "dtrain_launch reaped a child that is not its own");
}
static void test_sigchld_ignored(void)
{
    dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
    dtrain_launch_info info;
    ending end = {1, 6, 0, true};
    dtrain_result result;
    signal(SIGCHLD, SIG_IGN); /* children vanish without a status */
    result = dtrain_launch(&desc, rank_uses_all, NULL, &info);
    CHECK_MSG(result == DTRAIN_OK || strlen(dtrain_last_error()) > 20, "%s: %s",
              dtrain_result_text(result), dtrain_last_error());
    result = dtrain_launch(&desc, rank_ends, &end, &info);
    CHECK_MSG(result != DTRAIN_OK, "a failed rank was reported as success");
    signal(SIGCHLD, SIG_DFL);
    CHECK(dtrain_launch(&desc, rank_uses_all, NULL, &info) == DTRAIN_OK);
}

/* Another thread of the host takes every child's status: whoever did not say how it ended is lost. */
static void test_status_taken_by_another(void)
{
    dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
    dtrain_launch_info info;
    ranks_reaper reaper;
    int round;
    CHECK(ranks_reaper_start(&reaper));
    for (round = 0; round < 10; round++) {
        ending end = {1, SIGSEGV, 1, true};
        CHECK(dtrain_launch(&desc, rank_uses_all, NULL, &info) == DTRAIN_OK);
        const dtrain_result result = dtrain_launch(&desc, rank_ends, &end, &info);
        CHECK_MSG(result == DTRAIN_ERROR_RANK_FAILED && info.first_failed_rank == 1 &&
                      info.exit_code,
                  "%s, rank %d, exit code %d", dtrain_result_text(result), info.first_failed_rank,
                  info.exit_code);
    }
    ranks_reaper_stop(&reaper);
}

/* Masks and handlers: ranks see what the caller had, and so does the caller afterwards. */
static int32_t alarms;
static void on_alarm(int number)
{
    (void)number;
    alarms++;
}
static int rank_checks_mask(dtrain_world *world, void *user)
{
    sigset_t now;
    struct sigaction action;
    (void)world;
    (void)user;
    sigprocmask(SIG_SETMASK, NULL, &now);
    CHECK_MSG(sigismember(&now, SIGUSR1) == 1, "a rank lost the caller's blocked signals");
    CHECK_MSG(sigismember(&now, SIGTERM) == 0 && sigismember(&now, SIGINT) == 0 &&
                  sigismember(&now, SIGCHLD) == 0,
              "a rank runs with the launcher's signal mask");
    sigaction(SIGALRM, NULL, &action);
    CHECK(action.sa_handler == on_alarm);
    sigaction(SIGTERM, NULL, &action);
    CHECK(action.sa_handler == SIG_DFL);
    return 0;
}
static void test_signal_state(void)
{
    static const int list[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR2, SIGCHLD, SIGPIPE};
    sigset_t mask, now;
    struct sigaction action;
    dtrain_launch_desc desc = ranks_desc(2, PROCESSES);
    int i;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_alarm;
    sigaction(SIGALRM, &action, NULL);
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR1);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    CHECK(ranks_launch(&desc, rank_checks_mask, NULL, NULL) == DTRAIN_OK);
    sigprocmask(SIG_SETMASK, NULL, &now);
    CHECK(sigismember(&now, SIGUSR1) == 1);
    for (i = 0; i < 7; i++) {
        CHECK_MSG(sigismember(&now, list[i]) == 0, "signal %d is still blocked", list[i]);
        sigaction(list[i], NULL, &action);
        CHECK_MSG(action.sa_handler == SIG_DFL, "a handler for signal %d was installed", list[i]);
    }
}

/* ---- forwarding signals ---- */

static volatile sig_atomic_t told;
static void on_term(int number) { told = number; }

typedef struct wards {
    int32_t pid[RANKS_MOST], ready, graceful;
} wards;

static int rank_until_told(dtrain_world *world, void *user)
{
    wards *all = (wards *)user;
    int rank = dtrain_world_rank(world);
    if (all->graceful) signal(SIGTERM, on_term);
    all->pid[rank] = (int32_t)getpid();
    ranks_count(&all->ready);
    while (!told) ranks_sleep_us(1000);
    return 0;
}

static void check_forwarded(int number, int graceful)
{
    wards *all = (wards *)ranks_shared(sizeof *all);
    dtrain_launch_info *info = (dtrain_launch_info *)ranks_shared(sizeof *info);
    int status = 0, r;
    pid_t child;
    all->graceful = graceful;
    fflush(NULL);
    child = fork();
    if (child == 0) {
        dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
        dtrain_result result = dtrain_launch(&desc, rank_until_told, all, info);
        _exit(result == DTRAIN_OK ? 50 : result == DTRAIN_ERROR_RANK_FAILED ? 51 : 52);
    }
    ranks_await(&all->ready, 3);
    kill(child, number);
    CHECK_MSG(test_wait(child, RANKS_SOON, &status), "the launcher did not end");
    CHECK_MSG(WIFEXITED(status), "the launcher died of signal %d itself", WTERMSIG(status));
    CHECK_MSG(WEXITSTATUS(status) == (graceful ? 50 : 51), "signal %d: launcher's verdict %d",
              number, WEXITSTATUS(status));
    CHECK_MSG(info->signal == number, "signal %d in info, expected %d", info->signal, number);
    if (!graceful) CHECK_MSG(info->exit_code == 128 + number, "exit code %d", info->exit_code);
    for (r = 0; r < 3; r++) CHECK_MSG(kill(all->pid[r], 0) != 0, "rank %d is still there", r);
}
static void test_forwarding(void)
{
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    check_forwarded(SIGTERM, 0);
    check_forwarded(SIGINT, 0);
    check_forwarded(SIGHUP, 0);
    check_forwarded(SIGUSR1, 0);
    check_forwarded(SIGTERM, 1);
}

/* Stopped ranks hear of a request to stop too, with a handler for it and without. */
static void test_forwarding_to_stopped(void)
{
    for (int graceful = 0; graceful < 2; graceful++) {
        wards *all = (wards *)ranks_shared(sizeof *all);
        int status = 0, r;
        pid_t child;
        all->graceful = graceful;
        fflush(NULL);
        child = fork();
        if (child == 0) {
            dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
            _exit(dtrain_launch(&desc, rank_until_told, all, NULL) == DTRAIN_OK ? 50 : 51);
        }
        ranks_await(&all->ready, 3);
        for (r = 0; r < 3; r++) kill(all->pid[r], SIGSTOP);
        kill(child, SIGTERM);
        CHECK_MSG(test_wait(child, RANKS_SOON, &status), "the launcher did not end");
        CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == (graceful ? 50 : 51), "status %x",
                  (unsigned)status);
    }
}

/* ---- a launcher that dies ---- */

static int alive(const wards *all, int ranks)
{
    int r, count = 0;
    while (waitpid(-1, NULL, WNOHANG) > 0) {} /* orphans come to us */
    for (r = 0; r < ranks; r++) count += all->pid[r] && kill(all->pid[r], 0) == 0;
    return count;
}
static void test_launcher_killed(void)
{
    enum { RANKS = 4 };
    int round;
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    for (round = 0; round < 12; round++) { /* at rest, and at moments of its start */
        wards *all = (wards *)ranks_shared(sizeof *all);
        pid_t child;
        double begin;
        fflush(NULL);
        child = fork();
        if (child == 0) {
            dtrain_launch_desc desc = ranks_desc(RANKS, PROCESSES);
            dtrain_launch(&desc, rank_until_told, all, NULL);
            _exit(0);
        }
        if (round < 2) ranks_await(&all->ready, RANKS);
        else ranks_sleep_us(round * 300);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        begin = dtrain_seconds();
        ranks_sleep_us(30000);
        while (alive(all, RANKS) && dtrain_seconds() - begin < RANKS_SOON) ranks_sleep_us(2000);
        CHECK_MSG(alive(all, RANKS) == 0, "round %d: %d ranks outlive their launcher", round,
                  alive(all, RANKS));
        while (waitpid(-1, NULL, WNOHANG) >= 0 && dtrain_seconds() - begin < RANKS_SOON)
            ranks_sleep_us(2000); /* ranks that have not yet said who they are */
        CHECK_MSG(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD,
                  "round %d: a process outlived the launcher", round);
        munmap(all, sizeof *all);
    }
}

/* ---- log ---- */

typedef struct lines {
    int32_t count, level[64], rank[64], newline;
    char text[64][160];
} lines;
static void keep_line(void *user, dtrain_log_level level, int rank, const char *text)
{
    lines *all = (lines *)user;
    int at = __atomic_fetch_add(&all->count, 1, __ATOMIC_RELAXED);
    if (at >= 64) return;
    all->level[at] = (int32_t)level;
    all->rank[at] = rank;
    if (strchr(text, '\n')) all->newline = 1;
    snprintf(all->text[at], sizeof all->text[at], "%s", text);
}
static int rank_logs(dtrain_world *world, void *user)
{
    (void)user;
    dtrain_log(world, DTRAIN_LOG_ERROR, "test %s %d", "error", 1);
    dtrain_log(world, DTRAIN_LOG_WARNING, "test warning");
    dtrain_log(world, DTRAIN_LOG_INFO, "test info");
    dtrain_log(world, DTRAIN_LOG_DEBUG, "test debug");
    return 0;
}
static int count_lines(const lines *all, int rank, const char *text)
{
    int i, found = 0;
    for (i = 0; i < all->count && i < 64; i++)
        found += all->rank[i] == rank && strcmp(all->text[i], text) == 0;
    return found;
}
static void test_log(void)
{
    static const char *const texts[] = {"", "test error 1", "test warning", "test info",
                                        "test debug"};
    lines *all = (lines *)ranks_shared(sizeof *all);
    uint32_t mode, level;
    int l, r;
    for (mode = 0; mode < 2; mode++)
        for (level = 0; level <= 4; level++) {
            dtrain_launch_desc desc = ranks_desc(3, mode);
            uint32_t limit = level ? level : DTRAIN_LOG_INFO;
            memset(all, 0, sizeof *all);
            desc.options.log = keep_line;
            desc.options.log_user = all;
            desc.options.log_level = level;
            CHECK(ranks_launch(&desc, rank_logs, NULL, NULL) == DTRAIN_OK);
            for (r = 0; r < 3; r++)
                for (l = 1; l <= 4; l++)
                    CHECK_MSG(count_lines(all, r, texts[l]) == ((uint32_t)l <= limit),
                              "%s level %u: rank %d '%s' came %d times", ranks_mode_name(mode),
                              level, r, texts[l], count_lines(all, r, texts[l]));
            CHECK(!all->newline);
        }
}
/* Without a callback: stderr, infos of rank 0 only, nothing on stdout. */
static void test_log_stderr(void)
{
    char path[] = "/tmp/dtrain_test_XXXXXX", out_path[] = "/tmp/dtrain_test_XXXXXX", text[4096];
    int fd = mkstemp(path), out = mkstemp(out_path), status;
    ssize_t got;
    pid_t child;
    fflush(NULL);
    child = fork();
    if (child == 0) {
        dtrain_launch_desc desc = ranks_desc(3, PROCESSES);
        ending end = {1, 3, 0, true};
        desc.options.log_level = DTRAIN_LOG_DEFAULT;
        dup2(fd, 2);
        dup2(out, 1);
        if (dtrain_launch(&desc, rank_logs, NULL, NULL) != DTRAIN_OK) _exit(3);
        if (dtrain_launch(&desc, rank_ends, &end, NULL) == DTRAIN_OK) _exit(4);
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    got = pread(fd, text, sizeof text - 1, 0);
    text[got > 0 ? got : 0] = 0;
    CHECK_MSG(count_of(text, "test error 1") == 3 && count_of(text, "test warning") == 3, "%s",
              text);
    CHECK_MSG(count_of(text, "test info") == 1 && count_of(text, "test debug") == 0, "%s", text);
    CHECK_MSG(lseek(out, 0, SEEK_END) == 0, "something was written to stdout");
    close(fd);
    close(out);
    unlink(path);
    unlink(out_path);
}

/* ---- environment ---- */

typedef struct setting {
    const char *name1, *value1, *name2, *value2, *name3, *value3;
    int error;         /* 1: must fail, 0: must run as a world of its own */
    const char *names; /* must be in the sentence */
} setting;

static const setting settings[] = {
    {"RANK", "0", "WORLD_SIZE", "1", 0, 0, 0, 0},
    {"RANK", "0", "WORLD_SIZE", "2", 0, 0, 1, "WORLD_SIZE"},
    {"RANK", "1", "WORLD_SIZE", "4", 0, 0, 1, "WORLD_SIZE"},
    {"RANK", "abc", "WORLD_SIZE", "1", 0, 0, 1, "RANK"},
    {"RANK", " 0", "WORLD_SIZE", "1", 0, 0, 1, "RANK"},
    {"RANK", "0 ", "WORLD_SIZE", "1", 0, 0, 1, "RANK"},
    {"RANK", "+0", "WORLD_SIZE", "1", 0, 0, 1, "RANK"},
    {"RANK", "0x0", "WORLD_SIZE", "1", 0, 0, 1, "RANK"},
    {"RANK", "-1", "WORLD_SIZE", "1", 0, 0, 1, "RANK"},
    {"RANK", "0", "WORLD_SIZE", "", 0, 0, 1, "WORLD_SIZE"},
    {"RANK", "", "WORLD_SIZE", "", 0, 0, 0, 0},
    {"RANK", "0", "WORLD_SIZE", "99999999999", 0, 0, 1, "WORLD_SIZE"},
    {"RANK", "0", "WORLD_SIZE", "99999999999999999999999", 0, 0, 1, "WORLD_SIZE"},
    {"RANK", "0", "WORLD_SIZE", " 1", 0, 0, 1, "WORLD_SIZE"},
    {"RANK", "0", "WORLD_SIZE", "two", 0, 0, 1, "WORLD_SIZE"},
    {"RANK", "0", "WORLD_SIZE", "0", 0, 0, 1, "WORLD_SIZE"},
    {"RANK", "0", "WORLD_SIZE", "-2", 0, 0, 1, "WORLD_SIZE"},
    {"RANK", "5", "WORLD_SIZE", "1", 0, 0, 1, "RANK"},
    {"RANK", "99999999999", "WORLD_SIZE", "1", 0, 0, 1, "RANK"},
    {"RANK", "0", 0, 0, 0, 0, 1, "WORLD_SIZE"}, /* half a family */
    {"WORLD_SIZE", "3", 0, 0, 0, 0, 1, "WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK", "0", "OMPI_COMM_WORLD_SIZE", "1", 0, 0, 0, 0},
    {"OMPI_COMM_WORLD_RANK", "0", "OMPI_COMM_WORLD_SIZE", "2", 0, 0, 1, "OMPI_COMM_WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK", "x", "OMPI_COMM_WORLD_SIZE", "2", 0, 0, 1, "OMPI_COMM_WORLD"},
    {"OMPI_COMM_WORLD_RANK", "1", 0, 0, 0, 0, 1, "OMPI_COMM_WORLD"},
    {"PMI_RANK", "0", "PMI_SIZE", "1", 0, 0, 0, 0},
    {"PMI_RANK", "1", "PMI_SIZE", "2", 0, 0, 1, "PMI_SIZE"},
    {"PMI_RANK", "1", "PMI_SIZE", "many", 0, 0, 1, "PMI_SIZE"},
    {"SLURM_PROCID", "0", "SLURM_NTASKS", "1", "SLURM_STEP_ID", "0", 0, 0},
    {"SLURM_PROCID", "1", "SLURM_NTASKS", "4", "SLURM_STEP_ID", "0", 1, "SLURM_"},
    {"SLURM_PROCID", "0", "SLURM_NTASKS", "4", 0, 0, 0,
     0}, /* the sbatch shell: nobody else comes */
    {"LOCAL_RANK", "3", 0, 0, 0, 0, 0, 0},
    {"MASTER_ADDR", "somewhere", "MASTER_PORT", "x", 0, 0, 0, 0},
};

static void clear_launchers(void)
{
    size_t i;
    for (i = 0; i < sizeof settings / sizeof *settings; i++) {
        unsetenv(settings[i].name1);
        if (settings[i].name2) unsetenv(settings[i].name2);
        if (settings[i].name3) unsetenv(settings[i].name3);
    }
    unsetenv("SLURM_STEP_NUM_TASKS");
}

static void test_environment(void)
{
    roll *all = (roll *)ranks_shared(sizeof *all);
    size_t i;
    for (i = 0; i < sizeof settings / sizeof *settings; i++) {
        const setting *s = &settings[i];
        dtrain_launch_desc desc = ranks_desc(2, PROCESSES);
        dtrain_result result;
        char label[160];
        clear_launchers();
        setenv(s->name1, s->value1, 1);
        if (s->name2) setenv(s->name2, s->value2, 1);
        if (s->name3) setenv(s->name3, s->value3, 1);
        snprintf(label, sizeof label, "%s='%s' %s='%s'", s->name1, s->value1,
                 s->name2 ? s->name2 : "", s->name2 ? s->value2 : "");
        memset(all, 0, sizeof *all);
        result = dtrain_launch(&desc, rank_answers, all, NULL);
        CHECK_MSG((result != DTRAIN_OK) == s->error, "%s: %s %s", label, dtrain_result_text(result),
                  result ? dtrain_last_error() : "");
        if (!s->error || result == DTRAIN_OK) continue;
        CHECK_MSG(all->came[0] == 0, "%s: ranks started in spite of the error", label);
        CHECK_MSG(says(s->names), "%s: '%s' is not in: %s", label, s->names, dtrain_last_error());
    }
    clear_launchers();
    setenv("RANK", "1", 1);
    setenv("WORLD_SIZE", "4", 1);
    CHECK(dtrain_launch(NULL, rank_answers, all, NULL) != DTRAIN_OK);
    CHECK_MSG(says("4"), "the value is not named: %s", dtrain_last_error());
}

/* The ranks that dtrain_launch_plan announces: of a launch of one's own, of one rank of a launcher, of one node. */
static void test_place(void)
{
    dtrain_launch_desc desc = ranks_desc(5, PROCESSES);
    dtrain_launch_place place;
    clear_launchers();
    CHECK(dtrain_launch_plan(&desc, &place) == DTRAIN_OK);
    CHECK(place.rank_count == 5 && place.first_rank == 0 && place.started_count == 5 &&
          place.host_rank_count == 5);
    setenv("RANK", "3", 1);
    setenv("WORLD_SIZE", "5", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    CHECK(dtrain_launch_plan(&desc, &place) == DTRAIN_OK);
    CHECK(place.rank_count == 5 && place.first_rank == 3 && place.started_count == 1 &&
          place.host_rank_count == 0);
    setenv("LOCAL_RANK", "1", 1);
    setenv("LOCAL_WORLD_SIZE", "2", 1);
    CHECK(dtrain_launch_plan(&desc, &place) == DTRAIN_OK && place.host_rank_count == 2);
    desc.rank_count = 4; /* not what the launcher says */
    CHECK(dtrain_launch_plan(&desc, &place) == DTRAIN_ERROR_ARGUMENT && place.rank_count == 0);
    unsetenv("LOCAL_WORLD_SIZE");
    clear_launchers();
    setenv("PET_NNODES", "3", 1);
    setenv("PET_NPROC_PER_NODE", "2", 1);
    setenv("PET_NODE_RANK", "1", 1);
    setenv("PET_MASTER_ADDR", "127.0.0.1", 1);
    desc.rank_count = 0;
    CHECK(dtrain_launch_plan(&desc, &place) == DTRAIN_OK);
    CHECK(place.rank_count == 6 && place.first_rank == 2 && place.started_count == 2 &&
          place.host_rank_count == 2);
    CHECK(dtrain_launch_plan(NULL, NULL) == DTRAIN_ERROR_ARGUMENT && says("place is NULL"));
}

/* ---- allocator ---- */

static dtrain_launch_desc counted_desc(int ranks, uint32_t mode, counted_memory *memory)
{
    dtrain_launch_desc desc = ranks_desc(ranks, mode);
    desc.options.allocator = counted_allocator(memory);
    return desc;
}

static void test_allocator_counts(void)
{
    counted_memory *p = (counted_memory *)ranks_shared(sizeof *p);
    uint32_t mode;
    for (mode = 0; mode < 2; mode++) {
        dtrain_launch_desc desc = counted_desc(4, mode, p);
        ending end = {1, 3, 0, true};
        memset(p, 0, sizeof *p);
        CHECK_MSG(ranks_launch(&desc, rank_uses_all, NULL, NULL) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        CHECK_MSG(p->calls > 0, "the allocator was not used");
        CHECK_MSG(p->live == 0 && p->live_bytes == 0,
                  "%s: %lld blocks, %lld bytes not freed of %lld", ranks_mode_name(mode),
                  (long long)p->live, (long long)p->live_bytes, (long long)p->calls);
        CHECK_MSG(p->wrong == 0, "%lld frees with another size than asked for",
                  (long long)p->wrong);
        CHECK(ranks_launch(&desc, rank_ends, &end, NULL) == DTRAIN_ERROR_RANK_FAILED);
        CHECK_MSG(p->live == 0, "%s: %lld blocks not freed after a failed run",
                  ranks_mode_name(mode), (long long)p->live);
    }
}

/* Every allocation fails once, alone and with all after it: an error, no leak, no hang. */
static void test_allocator_failures(void)
{
    uint32_t mode;
    int on;
    counted_memory *p = (counted_memory *)ranks_shared(sizeof *p);
    for (mode = 0; mode < 2; mode++)
        for (on = 0; on < 2; on++) {
            int64_t n, limit = 400;
            for (n = 1; n < limit; n++) {
                dtrain_launch_desc desc = counted_desc(3, mode, p);
                dtrain_result result;
                double begin = dtrain_seconds();
                memset(p, 0, sizeof *p);
                p->fail_at = n;
                p->fail_on = on != 0;
                result = ranks_launch(&desc, rank_uses_all, NULL, NULL);
                CHECK_MSG(p->live == 0 || mode == PROCESSES,
                          "allocation %lld failed: %lld blocks not freed", (long long)n,
                          (long long)p->live);
                CHECK_MSG(p->wrong == 0, "allocation %lld failed: a free with a wrong size",
                          (long long)n);
                CHECK_MSG(dtrain_seconds() - begin < RANKS_SOON,
                          "allocation %lld failed: the run took %.1f s", (long long)n,
                          dtrain_seconds() - begin);
                if (p->calls < n) break; /* nothing failed any more */
                CHECK_MSG(result != DTRAIN_OK, "allocation %lld failed and nobody said so",
                          (long long)n);
                CHECK_MSG(strlen(dtrain_last_error()) > 20,
                          "allocation %lld failed without a sentence", (long long)n);
            }
            CHECK_MSG(n > 3 && n < limit, "%s: %lld allocations", ranks_mode_name(mode),
                      (long long)n);
        }
}

/* A rank that returned 0, and whose process then ends with another status: here in the host's own free. */
static bool exits_in_free;
static int rank_is_nearly_done(dtrain_world *world, void *user)
{
    (void)user;
    exits_in_free = dtrain_world_rank(world) == 1;
    return 0;
}
static void free_or_exit(void *user, void *memory, size_t bytes)
{
    if (exits_in_free) _exit(7);
    counted_free(user, memory, bytes);
}

static void test_exit_behind_a_rank(void)
{
    counted_memory *p = (counted_memory *)ranks_shared(sizeof *p);
    dtrain_launch_desc desc = counted_desc(3, PROCESSES, p);
    dtrain_launch_info info;
    desc.options.allocator.free = free_or_exit;
    CHECK(ranks_launch(&desc, rank_is_nearly_done, NULL, &info) == DTRAIN_ERROR_RANK_FAILED);
    CHECK_MSG(info.first_failed_rank == 1 && info.exit_code == 7, "rank %d, code %d: %s",
              info.first_failed_rank, info.exit_code, dtrain_last_error());
}

/* ---- limits of the system ---- */

static void with_limit(int which, rlim_t value, int ranks, uint32_t mode, int must_fail,
                       const char *what)
{
    pid_t child;
    int status = 0;
    fflush(NULL);
    child = fork();
    if (child == 0) {
        dtrain_launch_desc desc = ranks_desc(ranks, mode);
        struct rlimit limit;
        dtrain_result result;
        limit.rlim_cur = limit.rlim_max = value;
        if (which == RLIMIT_NPROC && getuid() == 0 && setresuid(65534, 65534, 65534) != 0)
            _exit(77);
        setrlimit((__rlimit_resource_t)which, &limit);
        desc.timeout_ms = 3000;
        desc.grace_ms = 500;
        if (which == RLIMIT_AS) desc.options.reserve_bytes = 0;
        result = dtrain_launch(&desc, rank_uses_all, NULL, NULL);
        if (result == DTRAIN_OK) _exit(must_fail ? 10 : 0);
        if (waitpid(-1, NULL, WNOHANG) != -1) _exit(11);
        fprintf(stderr, "    (%s: %s)\n", what, dtrain_last_error());
        _exit(strlen(dtrain_last_error()) > 20 ? 0 : 12);
    }
    CHECK_MSG(test_wait(child, 60, &status), "%s: did not end", what);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) return;
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) != 10, "%s: no error", what);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) != 11, "%s: a rank is left", what);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: status %x", what,
              (unsigned)status);
}
static void test_system_limits(void)
{
    with_limit(RLIMIT_NPROC, 4, 16, PROCESSES, 1, "16 processes where 4 are allowed");
    with_limit(RLIMIT_NPROC, 4, 16, THREADS, 1, "16 threads where 4 are allowed");
    with_limit(RLIMIT_NOFILE, 12, 32, PROCESSES, 0, "32 ranks with 12 descriptors");
    if (RANKS_SANITIZED) return; /* shadow memory does not fit */
    with_limit(RLIMIT_AS, (rlim_t)200 << 20, 4, PROCESSES, 0, "200 MiB of address space");
    with_limit(RLIMIT_AS, (rlim_t)200 << 20, 4, THREADS, 0, "200 MiB of address space, threads");
    with_limit(RLIMIT_AS, (rlim_t)20 << 20, 8, THREADS, 1, "20 MiB of address space, 8 stacks");
    with_limit(RLIMIT_FSIZE, 4096, 4, PROCESSES, 0, "files of at most 4096 bytes");
}

static void test_64_ranks(void)
{
    roll *all = (roll *)ranks_shared(sizeof *all);
    double best = 1e9;
    int i;
    for (i = 0; i < 3; i++) {
        dtrain_launch_desc desc = ranks_desc(64, PROCESSES);
        dtrain_launch_info info;
        CHECK(dtrain_launch(&desc, rank_answers, all, &info) == DTRAIN_OK);
        if (info.seconds < best) best = info.seconds;
    }
    printf("       64 ranks started, met in a barrier and ended in %.1f ms\n", best * 1e3);
}

/* ---- exchange, report, look ---- */

/* Many exchanges in a row, of all sizes, while ranks are out of step: no post may be overwritten before
 * the slowest rank has read it. */
static int rank_exchanges(dtrain_world *world, void *user)
{
    static const size_t sizes[] = {0, 1, 7, 8, 129, DTRAIN_WORLD_ALL_GATHER_BYTES};
    const int rank = dtrain_world_rank(world), size = dtrain_world_size(world);
    unsigned char mine[DTRAIN_WORLD_ALL_GATHER_BYTES], *all;
    uint64_t seed = (uint64_t)rank + 1;
    dtrain_world_info info;
    int round, i, wrong = 0;
    (void)user;
    all = (unsigned char *)malloc((size_t)size * DTRAIN_WORLD_ALL_GATHER_BYTES);
    for (round = 0; round < 300; round++) {
        const size_t bytes = sizes[round % 6];
        size_t k;
        for (k = 0; k < bytes; k++)
            mine[k] = (unsigned char)ranks_mix((uint64_t)(round * 64 + rank) << 16 | k);
        if (ranks_random(&seed, 16) == 0) ranks_sleep_us(500);
        RANKS_TRY(dtrain_world_all_gather(world, bytes ? mine : NULL, bytes, bytes ? all : NULL));
        for (i = 0; i < size; i++)
            for (k = 0; k < bytes; k++)
                wrong += all[(size_t)i * bytes + k] !=
                         (unsigned char)ranks_mix((uint64_t)(round * 64 + i) << 16 | k);
    }
    free(all);
    CHECK_MSG(wrong == 0, "rank %d read %d wrong bytes", rank, wrong);
    dtrain_world_query(world, &info);
    CHECK(info.local_rank == rank && info.local_size == size);
    CHECK(info.node == 0 && info.node_count == 1);
    CHECK(dtrain_world_poll(world) == DTRAIN_OK);
    return 0;
}

static void test_exchange(void)
{
    static const int counts[] = {1, 2, 3, 8};
    int i;
    for (i = 0; i < 4; i++) {
        ranks_run(counts[i], PROCESSES, rank_exchanges, NULL);
        ranks_run(counts[i], THREADS, rank_exchanges, NULL);
    }
}

typedef enum trouble {
    DIFFERENT_BYTES,
    MISSING,
    LEAVES,
    DIES,
    REPORTS,
    REPORTS_TO_COMM,
    REPORTS_TO_LOOK,
    DIES_TO_LOOK,
    LEAVES_TO_LOOK,
    TROUBLES
} trouble;

typedef struct troubled {
    trouble what;
    int32_t heard; /* by how many */
} troubled;

/* Rank 1 makes trouble, all others must hear of it. */
static int rank_in_trouble(dtrain_world *world, void *user)
{
    troubled *t = (troubled *)user;
    const trouble what = t->what;
    const int rank = dtrain_world_rank(world);
    char mine[32] = "", all[32 * 3];
    dtrain_result result = DTRAIN_OK, expected = DTRAIN_ERROR_PEER;
    const double start = test_seconds();
    RANKS_TRY(dtrain_world_all_gather(world, mine, 32, all));
    if (rank == 1) {
        if (what == DIFFERENT_BYTES) (void)dtrain_world_all_gather(world, mine, 31, all);
        if (what == MISSING)
            ranks_await(&t->heard, 1); /* the first is in time, the second hears it */
        if (what == LEAVES || what == LEAVES_TO_LOOK) return 0;
        if (what == DIES || what == DIES_TO_LOOK) raise(SIGKILL);
        if (what < REPORTS) return 0;
        dtrain_world_abort(world, DTRAIN_ERROR_SYSTEM, "the test device is lost");
        dtrain_world_abort(world, DTRAIN_ERROR_SYSTEM, "a second report");
        CHECK(dtrain_world_poll(world) == DTRAIN_ERROR_PEER && says("device is lost"));
        ranks_await(&t->heard, 2);
        return 0;
    }
    if (what == REPORTS_TO_COMM) result = dtrain_barrier(dtrain_world_comm(world));
    else if (what < REPORTS_TO_COMM) result = dtrain_world_all_gather(world, mine, 32, all);
    else
        while (result == DTRAIN_OK && test_seconds() < start + 10)
            result = dtrain_world_poll(world);
    if (what == DIFFERENT_BYTES && result == DTRAIN_ERROR_MISMATCH) expected = result;
    if (what == MISSING && result == DTRAIN_ERROR_TIMEOUT) expected = result; /* whoever is first */
    ranks_count(&t->heard);
    CHECK_MSG(result == expected && says_rank(1), "trouble %d: %s: %s", (int)what,
              dtrain_result_text(result), dtrain_last_error());
    if (what >= REPORTS && what <= REPORTS_TO_LOOK)
        CHECK_MSG(says("the test device is lost") && says("DTRAIN_ERROR_SYSTEM"), "%s",
                  dtrain_last_error());
    if (what == DIFFERENT_BYTES) CHECK_MSG(says("31") && says("32"), "%s", dtrain_last_error());
    if (what == LEAVES_TO_LOOK) CHECK(test_seconds() - start > 1.9);
    else CHECK_MSG(test_seconds() - start < RANKS_SOON, "it took %.1f s", test_seconds() - start);
    return 0;
}

static void test_exchange_trouble(void)
{
    troubled *t = (troubled *)ranks_shared(sizeof *t);
    trouble what;
    uint32_t mode;
    for (mode = PROCESSES; mode <= THREADS; mode++)
        for (what = DIFFERENT_BYTES; what < TROUBLES; what = (trouble)(what + 1)) {
            dtrain_launch_desc desc = ranks_desc(3, mode);
            if (mode == THREADS && (what == DIES || what == DIES_TO_LOOK)) continue;
            if (mode == THREADS && what == LEAVES_TO_LOOK && !test_full()) continue; /* 2 s */
            if (what == MISSING) desc.timeout_ms = RANKS_SHORT_MS;
            t->what = what;
            t->heard = 0;
            (void)ranks_launch(&desc, rank_in_trouble, t, NULL);
        }
}

static int rank_misuses_exchange(dtrain_world *world, void *user)
{
    static char big[DTRAIN_WORLD_ALL_GATHER_BYTES + 1];
    dtrain_world_info info;
    (void)user;
    CHECK(dtrain_world_all_gather(world, big, sizeof big, big) == DTRAIN_ERROR_ARGUMENT &&
          says("4097"));
    CHECK(dtrain_world_all_gather(world, NULL, 1, big) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_world_all_gather(world, big, 1, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_world_all_gather(NULL, big, 1, big) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_world_poll(NULL) == DTRAIN_ERROR_ARGUMENT);
    dtrain_world_abort(NULL, DTRAIN_ERROR_SYSTEM, "nobody");
    CHECK(dtrain_world_poll(world) == DTRAIN_OK);
    dtrain_world_query(NULL, &info);
    CHECK(info.size == 0 && info.node_count == 0);
    dtrain_world_query(world, NULL);
    return 0;
}

static void test_exchange_misuse(void) { ranks_run(1, PROCESSES, rank_misuses_exchange, NULL); }

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    clear_launchers();
    RUN(test_ranks_start);
    RUN(test_defaults);
    RUN(test_bad_arguments);
    RUN(test_threads_per_rank);
    RUN(test_exit_codes);
    RUN(test_odd_return_values);
    RUN(test_signals_named);
    RUN(test_exit_inside_a_rank);
    RUN(test_grace);
    RUN(test_repeated);
    RUN(test_stdio_and_atexit);
    RUN(test_other_children);
    RUN(test_sigchld_ignored);
    RUN(test_status_taken_by_another);
    RUN(test_signal_state);
    RUN(test_forwarding);
    RUN(test_forwarding_to_stopped);
    RUN(test_launcher_killed);
    RUN(test_log);
    RUN(test_log_stderr);
    RUN(test_environment);
    RUN(test_place);
    RUN(test_exchange);
    RUN_BESIDE(test_exchange_trouble);
    RUN(test_exchange_misuse);
    RUN(test_allocator_counts);
    RUN(test_allocator_failures);
    RUN(test_exit_behind_a_rank);
    RUN(test_system_limits);
    RUN(test_64_ranks);
    return test_summary();
}
