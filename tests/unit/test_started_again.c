/* test_started_again.c: checkpoints in a directory in memory: a run whose ranks are killed and started again goes on
 * from them with the same bits, under every strategy, wherever it was killed. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "saved_run.h"

#include <sys/time.h>

enum { PROCESSES = DTRAIN_LAUNCH_PROCESSES, THREADS = DTRAIN_LAUNCH_THREADS };

static uint32_t attempt_of(dtrain_world *world)
{
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    return info.restart_count;
}
static int die_in_step_5(dtrain_world *world, saved_run *r, int64_t step)
{
    if (attempt_of(world) || step != 5 || dtrain_world_rank(world) != r->ranks - 1) return 0;
    if (r->mode == THREADS) return 1;
    return raise(SIGKILL);
}
/* Make a run that saves to an empty directory of its own, whose name is none of those that tests beside count. */
static saved_run *new_run(int ranks, uint32_t kind)
{
    static char directories[2][64];
    static int next;
    saved_run *r = saved_new(ranks, kind);
    char *directory = directories[next++ % 2];
    snprintf(directory, sizeof directories[0], "%s/started_again_XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    CHECK(mkdtemp(directory) != NULL);
    r->mode = PROCESSES;
    r->steps = 8;
    r->load = r->save = directory;
    r->save_every = 2;
    r->keep.keep = 1;
    r->restarts = 3;
    return r;
}
static void free_run(saved_run *r)
{
    char command[96];
    snprintf(command, sizeof command, "rm -rf %s", r->save);
    CHECK(system(command) == 0);
    munmap(r, sizeof *r);
}
static void check_goes_on(int ranks, uint32_t kind, uint32_t mode)
{
    char what[80];
    saved_run *calm = new_run(ranks, kind), *hit = new_run(ranks, kind);
    snprintf(what, sizeof what, "%d ranks, strategy %u, %s", ranks, kind, ranks_mode_name(mode));
    calm->mode = hit->mode = mode;
    hit->during = die_in_step_5;
    if (saved_go(calm, what) && saved_go(hit, what)) {
        saved_compare(calm, hit, 5, what);
        for (int r = 0; r < ranks; r++)
            CHECK_MSG(hit->from[r] == 4, "%s: rank %d went on from step %lld", what, r,
                      (long long)hit->from[r]);
    }
    free_run(calm);
    free_run(hit);
}
static void test_goes_on(void)
{
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_ZERO3; kind++)
        for (int ranks = 1; ranks <= (test_full() ? 8 : 3); ranks++) {
            check_goes_on(ranks, kind, PROCESSES);
            if (ranks == 2) check_goes_on(ranks, kind, THREADS);
        }
}

/* A rank is killed after some microseconds, wherever that is, in each attempt but the last of them. */
enum { ALARMS = 5 };
static int alarm_soon(dtrain_world *world, saved_run *r, int64_t step)
{
    const uint32_t attempt = attempt_of(world);
    struct itimerval timer;
    const uint64_t draw = ranks_mix(r->seed * 1000 + attempt);
    const int rank = dtrain_world_rank(world);
    if (attempt >= ALARMS || step != r->from[rank] || draw % (uint64_t)r->ranks != (uint64_t)rank)
        return 0;
    memset(&timer, 0, sizeof timer);
    timer.it_value.tv_usec = (long)(1 + draw / 8 % 700);
    if (signal(SIGALRM, SIG_DFL) == SIG_ERR) return 1;
    return setitimer(ITIMER_REAL, &timer, NULL);
}
static void test_killed_anywhere(void)
{
    const uint64_t first = test_seed() % 100000, count = test_full() ? 50 : 20;
    uint64_t attempts = 0;
    for (uint64_t seed = first; seed < first + count; seed++) {
        saved_run *runs[2];
        char what[80];
        snprintf(what, sizeof what, "seed %llu", (unsigned long long)seed);
        for (int hit = 0; hit < 2; hit++) {
            saved_run *r = runs[hit] =
                new_run(1 + (int)(seed % 3), DTRAIN_STRATEGY_DDP + (uint32_t)(seed % 5));
            r->steps = SAVED_STEPS;
            r->save_every = 1;
            r->restarts = ALARMS + 1;
            r->seed = seed;
            if (hit) r->during = alarm_soon;
        }
        if (saved_go(runs[0], what) && saved_go(runs[1], what)) {
            CHECK_MSG(runs[0]->hash[0] == runs[1]->hash[0], "%s: the parameters differ", what);
            saved_compare_state(runs[0], runs[1], what, true);
        }
        attempts += runs[1]->attempts;
        for (int hit = 0; hit < 2; hit++) free_run(runs[hit]);
    }
    CHECK_MSG(attempts > 2 * count, "%llu attempts of %llu runs", (unsigned long long)attempts,
              (unsigned long long)count);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_goes_on);
    RUN(test_killed_anywhere);
    return test_summary();
}
