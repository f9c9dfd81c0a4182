/* test.h: the test harness. One program a section:
 *
 *     static void test_sum(void) { CHECK(1 + 1 == 2); }
 *     int main(int argc, char **argv)
 *     {
 *         test_begin(argc, argv);     // ./test_x [part of a test's name]: it must match one
 *         RUN(test_sum);
 *         SKIP(test_torch, "python3 has no torch");
 *         return test_summary();      // prints "N passed, N failed[, N skipped]"
 *     }
 *
 * A test that finds out by itself that it cannot run here calls test_cannot("why") and returns; it counts as
 * skipped. Long sweeps ask test_full(): DTRAIN_TEST_FULL=1 runs all of them, the default is a sample that
 * has every kind. With DTRAIN_TEST_FIRST the first test that fails ends the program.
 *
 * RUN forks: a test that crashes, hangs or exits is one failed test, and the next one starts from
 * a clean process. Every test has a deadline (240 s, DTRAIN_TEST_TIMEOUT seconds); what it leaves
 * behind in its process group is killed and counts as a failure. The counters are in shared
 * memory, so that CHECK works in ranks that are processes and in ranks that are threads.
 *
 * RUN_BESIDE starts a test that waits for deadlines most of the time and shares nothing with other tests, and does not
 * wait for it: the tests after it run meanwhile, and test_summary prints how it ended. test_cases does the same with
 * the cases of one test.
 *
 * A program that uses what dtrain.h declares includes this first of all and is linked with dtrain.a; one
 * that looks inside defines DTRAIN_IMPLEMENTATION, and includes this behind it. */
#ifndef DTRAIN_TEST_H
#define DTRAIN_TEST_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* The thread sanitizer looks at who shares what: one instruction set is enough for it, and a test that compares
 * numbers of ranks that are processes, or do what those of another test do, is none for it: RUN_NUMBERS. */
#if defined(__SANITIZE_THREAD__)
#define TEST_RACES 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TEST_RACES 1
#endif
#endif
#ifndef TEST_RACES
#define TEST_RACES 0
#endif

#ifdef __linux__
#include <sys/prctl.h>
#endif
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct test_counters {
    long checks, failed_checks;
    double end;       /* of the test's function; 0: it has not returned */
    char cannot[256]; /* why this test cannot run here; empty: it can */
} test_counters;

enum { TEST_AT_ONCE = 33 }; /* tests of RUN_BESIDE, and one of RUN */
typedef struct test_process {
    const char *name;
    pid_t child;
    double start;
} test_process;

static test_counters *test_pages;  /* (TEST_AT_ONCE) mapped before any fork */
static test_counters *test_shared; /* that of the test that runs */
static test_process test_beside[TEST_AT_ONCE];
static int test_beside_count;
static const char *test_filter = "";
static int test_passed, test_failed, test_skipped;

#define CHECK(condition) test_check((condition) ? 1 : 0, __FILE__, __LINE__, "%s", #condition)
#define CHECK_MSG(condition, ...) test_check((condition) ? 1 : 0, __FILE__, __LINE__, __VA_ARGS__)
/* |a - b| <= tolerance * max(1, |b|); false for NaN. */
#define CHECK_CLOSE(a, b, tolerance)                                                          \
    test_check(test_close((double)(a), (double)(b), (double)(tolerance)), __FILE__, __LINE__, \
               "%s = %.9g, expected %s = %.9g within %g", #a, (double)(a), #b, (double)(b),   \
               (double)(tolerance))
#define RUN(test) test_run(#test, test)
#define RUN_BESIDE(test) test_run_beside(#test, test)
#define SKIP(test, reason) test_skip(#test, reason)
#define RUN_NUMBERS(test)                                                               \
    do {                                                                                \
        if (TEST_RACES) SKIP(test, "numbers alone: nothing new for the race detector"); \
        else RUN(test);                                                                 \
    } while (0)

/* DTRAIN_TEST_FULL=1: sweeps run in full; 2: what is drawn at random is drawn more often, too. */
static inline int test_full(void)
{
    const char *text = getenv("DTRAIN_TEST_FULL");
    return text ? atoi(text) : 0;
}
static inline uint64_t test_draws(uint64_t usual, uint64_t full, uint64_t nightly)
{
    return test_full() > 1 ? nightly : test_full() ? full : usual;
}

/* The first seed of what is drawn at random: that of DTRAIN_TEST_SEED, another one every second when that is "new", and
 * otherwise always the same, so that what failed for somebody fails for everybody. */
static inline uint64_t test_seed(void)
{
    const char *text = getenv("DTRAIN_TEST_SEED");
    if (!text) return 618033988;
    return strcmp(text, "new") != 0 ? strtoull(text, NULL, 10)
                                    : (uint64_t)time(NULL) * 1000003u % 1000000000u;
}

/* Marks the test that runs as skipped, unless one of its checks fails. The test returns after it. */
static inline void test_cannot(const char *why)
{
    snprintf(test_shared->cannot, sizeof test_shared->cannot, "%s", why);
}

static inline int test_close(double a, double b, double tolerance)
{
    double size = fabs(b) > 1 ? fabs(b) : 1;
    return a == b || fabs(a - b) <= tolerance * size;
}

/* In a function that returns a dtrain_result: hands on a failure. */
#define TRY(call)                                         \
    do {                                                  \
        dtrain_result test_result = (call);               \
        if (test_result != DTRAIN_OK) return test_result; \
    } while (0)

/* Prints at most 20 failures a test: a broken kernel fails everywhere. */
#if defined(__GNUC__)
__attribute__((format(printf, 4, 5)))
#endif
static inline int
test_check(int good, const char *file, int line, const char *format, ...)
{
    __atomic_fetch_add(&test_shared->checks, 1, __ATOMIC_RELAXED);
    if (good) return 1;
    if (__atomic_fetch_add(&test_shared->failed_checks, 1, __ATOMIC_RELAXED) < 20) {
        char text[512];
        va_list args;
        va_start(args, format);
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        fprintf(stderr, "    %s:%d: failed: %s\n", file, line, text);
    }
    return 0;
}

static inline double test_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Whoever started the tests may have ignored or blocked signals (nohup does): children inherit that. */
static inline void test_default_signals(void)
{
    static const int numbers[] = {SIGHUP,  SIGINT,  SIGQUIT, SIGTERM,
                                  SIGUSR1, SIGUSR2, SIGPIPE, SIGCHLD};
    sigset_t none;
    size_t i;
    for (i = 0; i < sizeof numbers / sizeof *numbers; i++) signal(numbers[i], SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static inline void test_begin(int argc, char **argv)
{
    test_default_signals();
    if (argc > 1) test_filter = argv[1];
    test_pages = (test_counters *)mmap(NULL, TEST_AT_ONCE * sizeof *test_pages,
                                       PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (test_pages == MAP_FAILED) {
        fprintf(stderr, "no shared memory for the test counters: %s\n", strerror(errno));
        exit(1);
    }
    test_shared = test_pages;
    setvbuf(stdout, NULL, _IOLBF, 0);
#ifdef __linux__
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); /* orphans come to us: they can be seen and reaped */
#endif
}

/* Waits for the child until the deadline; 1 when it ended by itself. */
static inline int test_wait(pid_t child, double limit, int *status)
{
    double end = test_seconds() + limit;
    for (;;) {
        struct timespec nap = {0, 2000000};
        pid_t got = waitpid(child, status, WNOHANG);
        if (got == child) return 1;
        if (got < 0 && errno != EINTR) return 0;
        if (test_seconds() > end) return 0;
        nanosleep(&nap, NULL);
    }
}

/* Whether processes of the group outlive its leader by more than a moment; they are killed. */
static inline int test_sweep(pid_t group)
{
    int look, status;
    for (look = 0; look < 1000; look++) {
        struct timespec nap = {0, 3000000};
        while (waitpid(-group, &status, WNOHANG) > 0) {}
        if (kill(-group, 0) != 0) return 0;
        nanosleep(&nap, NULL);
    }
    kill(-group, SIGKILL);
    while (waitpid(-group, &status, 0) > 0) {}
    return 1;
}

/* How the child ended, in words; NULL when it ended well. */
static inline const char *test_verdict(int ended, int status, int leftover)
{
    static char text[128];
    if (!ended) return "did not end before its deadline";
    if (WIFSIGNALED(status)) {
        snprintf(text, sizeof text, "killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
        return text;
    }
    if (test_shared->failed_checks) {
        snprintf(text, sizeof text, "%ld of %ld checks failed", test_shared->failed_checks,
                 test_shared->checks);
        return text;
    }
    if (WEXITSTATUS(status)) {
        snprintf(text, sizeof text, "exit code %d", WEXITSTATUS(status));
        return text;
    }
    if (test_shared->checks == 0 && !test_shared->cannot[0]) return "checked nothing";
    return leftover ? "left processes behind" : NULL;
}

static inline void test_skip(const char *name, const char *reason)
{
    if (!strstr(name, test_filter)) return;
    test_skipped++;
    printf("  skip %-44s %s\n", name, reason);
}

/* Starts a test whose counters are those at `place`. */
static inline test_process test_start(const char *name, void (*test)(void), int place)
{
    test_process t;
    t.name = name;
    t.start = test_seconds();
    test_shared = &test_pages[place];
    memset(test_shared, 0, sizeof *test_shared);
    fflush(NULL);
    t.child = fork();
    if (t.child == 0) {
        setpgid(0, 0);
        test();
        test_shared->end = test_seconds();
        fflush(NULL);
        exit(0); /* and not _exit: leak checkers work at exit */
    }
    if (t.child > 0) setpgid(t.child, t.child);
    return t;
}

/* Waits for a test and prints how it ended. */
static inline void test_finish(test_process t, int place)
{
    const char *limit_text = getenv("DTRAIN_TEST_TIMEOUT"), *verdict;
    double limit = limit_text ? atof(limit_text) : 240;
    int status = 0, ended, leftover;
    test_shared = &test_pages[place];
    if (t.child < 0) {
        printf("  FAIL %-44s it could not be started: no process for it\n", t.name);
        test_failed++;
        return;
    }
    ended = test_wait(t.child, limit, &status);
    if (!ended) {
        kill(-t.child, SIGKILL);
        waitpid(t.child, &status, 0);
    }
    leftover = test_sweep(t.child);
    verdict = test_verdict(ended, status, leftover);
    if (!verdict && test_shared->cannot[0]) {
        test_skip(t.name, test_shared->cannot);
        return;
    }
    if (verdict) test_failed++;
    else test_passed++;
    printf("  %s %-44s %6.2f s  %7ld checks%s%s\n", verdict ? "FAIL" : "ok  ", t.name,
           (test_shared->end > 0 ? test_shared->end : test_seconds()) - t.start,
           test_shared->checks, verdict ? ": " : "", verdict ? verdict : "");
    if (!verdict || !getenv("DTRAIN_TEST_FIRST")) return;
    while (test_beside_count > 0) kill(-test_beside[--test_beside_count].child, SIGKILL);
    exit(1); /* broken on purpose: that it fails is enough */
}

static inline void test_run(const char *name, void (*test)(void))
{
    if (strstr(name, test_filter)) test_finish(test_start(name, test, 0), 0);
}

static inline void test_finish_beside(void)
{
    int i;
    for (i = 0; i < test_beside_count; i++) test_finish(test_beside[i], 1 + i);
    test_beside_count = 0;
}

static inline void test_run_beside(const char *name, void (*test)(void))
{
    if (!strstr(name, test_filter)) return;
    if (test_beside_count == TEST_AT_ONCE - 1) test_finish_beside();
    test_beside[test_beside_count] = test_start(name, test, 1 + test_beside_count);
    test_beside_count++;
}

/* Runs the cases 0 to count - 1 of a test at the same time, each in a separate process. */
static inline void test_cases(int count, void (*one)(int number))
{
    int i, status;
    fflush(NULL);
    for (i = 0; i < count; i++) {
        const pid_t child = fork();
        if (child == 0) {
            one(i);
            fflush(NULL);
            exit(0);
        }
        CHECK(child > 0);
    }
    while (wait(&status) > 0)
        CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a case ended with status %x",
                  (unsigned)status);
}

static inline int test_summary(void)
{
    test_finish_beside();
    if (test_passed + test_failed + test_skipped == 0) {
        printf("  FAIL no test has \"%s\" in its name\n", test_filter);
        test_failed++;
    }
    if (test_skipped)
        printf("%d passed, %d failed, %d skipped\n", test_passed, test_failed, test_skipped);
    else printf("%d passed, %d failed\n", test_passed, test_failed);
    return test_failed ? 1 : 0;
}

#endif
