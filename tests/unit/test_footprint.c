/* test_footprint.c: support/footprint.h notices whatever a library could leave in a process. */
#include "test.h"
#include "footprint.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>

static struct footprint before, after;
static char why[700];

/* Tell whether the change since `before` was noticed, in this section. */
static bool noticed(const char *section)
{
    footprint_take(&after);
    const bool differs = footprint_differs(&before, &after, why, sizeof why);
    return differs && strncmp(why, section, strlen(section)) == 0;
}

static bool nothing_noticed(void)
{
    footprint_take(&after);
    return !footprint_differs(&before, &after, why, sizeof why);
}

static void *sleeper(void *stop)
{
    char byte;
    return read(*(int *)stop, &byte, 1) < 0 ? stop : NULL;
}

static void test_what_comes_and_goes(void)
{
    int pipes[2];
    pthread_t thread;
    CHECK(pipe(pipes) == 0);
    CHECK(pthread_create(&thread, NULL, sleeper, &pipes[0]) == 0); /* the first one's stack stays */
    CHECK(write(pipes[1], "", 1) == 1 && pthread_join(thread, NULL) == 0);
    footprint_take(&before);
    footprint_take(&before);
    CHECK_MSG(nothing_noticed(), "%s", why);

    CHECK(pthread_create(&thread, NULL, sleeper, &pipes[0]) == 0);
    CHECK_MSG(noticed("threads: new"), "%s", why);
    CHECK(write(pipes[1], "", 1) == 1 && pthread_join(thread, NULL) == 0);
    for (int i = 0; i < 100 && !nothing_noticed(); i++)
        usleep(10000); /* the kernel ends it a little later */
    CHECK_MSG(nothing_noticed(), "%s", why);

    const int file = open("/dev/null", O_RDONLY);
    CHECK_MSG(noticed("descriptors: new"), "%s", why);
    close(file);

    const pid_t child = fork();
    if (child == 0) _exit(0);
    CHECK_MSG(noticed("children: new"), "%s", why);
    CHECK(waitpid(child, NULL, 0) == child);

    void *page = mmap(NULL, 1 << 20, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK_MSG(noticed("mappings: new"), "%s", why);
    munmap(page, 1 << 20);

    const size_t large = (size_t)(FOOTPRINT_HEAP_KB + 1024) << 10;
    page = mmap(NULL, large, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK_MSG(noticed("private memory"), "%s", why);
    munmap(page, large);
    CHECK_MSG(nothing_noticed(), "%s", why);
}

static void test_settings(void)
{
    footprint_take(&before);
    footprint_take(&before);
    const struct sigaction ignore = {.sa_handler = SIG_IGN};
    struct sigaction old;
    sigset_t one;
    sigaction(SIGUSR1, &ignore, &old);
    CHECK_MSG(noticed("signals"), "%s", why);
    sigaction(SIGUSR1, &old, NULL);
    sigemptyset(&one);
    sigaddset(&one, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &one, NULL);
    CHECK_MSG(noticed("signals"), "%s", why);
    pthread_sigmask(SIG_UNBLOCK, &one, NULL);

    setenv("FOOTPRINT_OF_A_TEST", "1", 1);
    CHECK_MSG(noticed("environment: new: FOOTPRINT_OF_A_TEST=1"), "%s", why);
    setenv("FOOTPRINT_OF_A_TEST", "2", 1);
    CHECK_MSG(noticed("environment"), "%s", why);
    unsetenv("FOOTPRINT_OF_A_TEST");

    const mode_t mask = umask(0123);
    CHECK_MSG(noticed("process"), "%s", why);
    umask(mask);
    fesetround(FE_UPWARD);
    CHECK_MSG(noticed("process"), "%s", why);
    fesetround(FE_TONEAREST);
    CHECK_MSG(nothing_noticed(), "%s", why);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_what_comes_and_goes);
    RUN(test_settings);
    return test_summary();
}
