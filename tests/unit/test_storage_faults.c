/* test_storage_faults.c: checkpoints on a disk that fails: every call of a save and of a load fails once, and from
 * then on; transfers are short and interrupted; power is lost at every call of a save, with what was not synced gone,
 * kept or torn. What was saved before is never lost, no rank hangs, nobody takes half a checkpoint for a whole one. */
#include "test.h"
#include <pthread.h>
#include "dtrain.h"
#include "ranks.h"
#include "saved_run.h"
#include "memory_storage.h"

/* A disk with checkpoints of steps 2 and 4; *hashes: of the parameters then. */
static disk *disk_with_two(uint32_t kind, int ranks, uint64_t hashes[2])
{
    disk *d = disk_new();
    for (int i = 0; i < 2; i++) {
        saved_run *r = saved_new(ranks, kind);
        r->steps = r->save_every = 2 * (i + 1);
        r->save = "/run";
        r->load = i ? "/run" : NULL;
        r->how.storage = r->keep.storage = &d->table;
        saved_go(r, "a good disk");
        hashes[i] = r->hash[0];
        munmap(r, sizeof *r);
    }
    return d;
}

/* Load what is there: the step, 0 when there is none; the parameters must be those of that step. */
static int64_t step_on(disk *d, uint32_t kind, int ranks, const uint64_t *hashes, const char *what)
{
    saved_run *r = saved_new(ranks, kind);
    r->load = "/run";
    r->how.storage = &d->table;
    r->steps = 0; /* it is loaded, and nothing else */
    const int64_t step = saved_launch(r) == DTRAIN_OK ? r->from[0] : 0;
    if (step)
        CHECK_MSG((step == 2 && r->hash[0] == hashes[0]) ||
                      (step == 4 && r->hash[0] == hashes[1]) ||
                      (step == 6 && r->hash[0] == hashes[2]),
                  "%s: other parameters than those of step %lld", what, (long long)step);
    munmap(r, sizeof *r);
    return step;
}

/* Go on from step 4 and save step 6; the parameters of step 6 are in hashes[2] when that went well. */
static saved_run *save_six(disk *d, uint32_t kind, int ranks, bool background)
{
    saved_run *r = saved_new(ranks, kind);
    r->load = r->save = "/run";
    r->how.storage = r->keep.storage = &d->table;
    r->steps = 6;
    r->save_every = 6;
    r->background = background;
    return r;
}

/* How many calls so many saves of step 6 make, from open on, and the parameters then. */
static long calls_of_saves(const disk *good, uint32_t kind, int ranks, int saves, uint32_t keep,
                           uint64_t *hash)
{
    disk *d = disk_copy(good);
    saved_run *r = save_six(d, kind, ranks, false);
    r->saves = saves;
    r->keep.keep = keep;
    d->writes_only = true;
    saved_go(r, "a good disk");
    *hash = r->hash[0];
    const long calls = d->calls;
    munmap(r, sizeof *r);
    disk_free(d);
    return calls;
}

/* Every call that writes fails, once or for good: an error of this save on all ranks, step 4 stays. */
static void test_failing_writes(void)
{
    static const int errors[] = {EIO, ENOSPC};
    for (int ranks = 1; ranks <= 2; ranks++) {
        uint64_t hashes[3];
        const uint32_t kind = ranks == 1 ? DTRAIN_STRATEGY_DDP : DTRAIN_STRATEGY_FULL_SHARD;
        disk *good = disk_with_two(kind, ranks, hashes);
        const long calls = calls_of_saves(good, kind, ranks, 1, 0, &hashes[2]);
        CHECK_MSG(calls > 30, "a save makes %ld calls", calls);
        for (long n = 1; n <= calls; n += test_full() ? 1 : 3)
            for (int on = 0; on < 2; on++) {
                char what[160];
                disk *d = disk_copy(good);
                saved_run *r = save_six(d, kind, ranks, n % 2);
                d->writes_only = d->fail_on = true;
                d->fail_on = on == 1;
                d->fail_at = n;
                d->error = errors[n % 2];
                const dtrain_result result = saved_launch(r);
                snprintf(what, sizeof what, "%d ranks, call %ld (%s) fails %s", ranks, n,
                         d->last_failed, on ? "for good" : "once");
                CHECK_MSG(result == DTRAIN_OK || r->error[0][0], "%s: no sentence", what);
                d->fail_at = 0;
                const int64_t step = step_on(d, kind, ranks, hashes, what);
                CHECK_MSG(step == 4 || step == 6, "%s: step %lld is there afterwards", what,
                          (long long)step);
                if (result == DTRAIN_OK) CHECK_MSG(step == 6, "%s: saved, and not there", what);
                saved_run *next = save_six(d, kind, ranks, false); /* the disk is well again */
                if (saved_go(next, what)) CHECK(step_on(d, kind, ranks, hashes, what) == 6);
                munmap(next, sizeof *next);
                munmap(r, sizeof *r);
                disk_free(d);
            }
        disk_free(good);
    }
}

/* Training goes on after a failed save, if the program tolerates so many. */
static void test_tolerated(void)
{
    for (int background = 0; background < 2; background++)
        for (uint32_t tolerated = 0; tolerated < 3; tolerated++) {
            uint64_t hashes[3];
            disk *d = disk_with_two(DTRAIN_STRATEGY_ZERO1, 2, hashes);
            saved_run *r = save_six(d, DTRAIN_STRATEGY_ZERO1, 2, background);
            r->steps = 8;
            r->save_every = 1; /* 5, 6, 7, 8: the first two fail */
            r->keep.failures = tolerated;
            d->writes_only = true;
            d->calls = 0;
            d->fail_at = 30;
            const dtrain_result result = saved_launch(r);
            CHECK_MSG((result == DTRAIN_OK) == (tolerated > 0), "%u tolerated: %s", tolerated,
                      r->error[0]);
            if (result == DTRAIN_OK)
                CHECK_MSG(r->info[0].failed == 1 && r->info[1].failed == 1 && r->info[0].saved == 3,
                          "%llu failed, %llu saved", (unsigned long long)r->info[0].failed,
                          (unsigned long long)r->info[0].saved);
            munmap(r, sizeof *r);
            disk_free(d);
        }
}

/* A failure is tolerated as long as a later save makes it good: the last save of a run is an error of its wait, which
 * says what is lost, with and without a thread. */
static void test_last_save(void)
{
    for (int background = 0; background < 2; background++)
        for (int every = 3; every <= 4; every++) { /* step 6 is saved, or 8 */
            uint64_t hashes[3];
            disk *d = disk_with_two(DTRAIN_STRATEGY_ZERO1, 2, hashes);
            saved_run *r = save_six(d, DTRAIN_STRATEGY_ZERO1, 2, background);
            r->steps = 8;
            r->save_every = every;
            r->keep.failures = 3;
            d->writes_only = d->fail_on = true;
            d->calls = 0;
            d->fail_at = 30;
            const dtrain_result result = saved_launch(r);
            CHECK_MSG(result != DTRAIN_OK, "background %d: it went well", background);
            for (int rank = 0; rank < 2; rank++)
                CHECK_MSG(strstr(r->error[rank], "the checkpoint of step") &&
                              strstr(r->error[rank], "nothing, and what it trained is lost"),
                          "background %d, rank %d: %s", background, rank, r->error[rank]);
            munmap(r, sizeof *r);
            disk_free(d);
        }
}

/* The files of rank 1 are never seen by rank 0: an error of the save on both, before rank 1's deadline for rank 0. */
static int unseen_open(void *user, const char *path, dtrain_storage_mode mode)
{
    const bool unseen = mode == DTRAIN_STORAGE_READ && strstr(path, "state-00001.safetensors");
    return unseen ? -ENOENT : disk_open(user, path, mode);
}
static void test_unseen_file(void)
{
    uint64_t hashes[3];
    disk *d = disk_with_two(DTRAIN_STRATEGY_ZERO1, 2, hashes);
    saved_run *r = save_six(d, DTRAIN_STRATEGY_ZERO1, 2, true);
    d->table.open = unseen_open;
    CHECK(saved_launch(r) != DTRAIN_OK);
    for (int rank = 0; rank < 2; rank++)
        CHECK_MSG(strstr(r->error[rank], "state-00001.safetensors"), "rank %d: %s", rank,
                  r->error[rank]);
    d->table.open = disk_open;
    CHECK(step_on(d, DTRAIN_STRATEGY_ZERO1, 2, hashes, "a file was not seen") == 4);
    munmap(r, sizeof *r);
    disk_free(d);
}

/* Every call of a load fails: an error on all ranks, or the older checkpoint. */
static void test_failing_reads(void)
{
    uint64_t hashes[3] = {0, 0, 0};
    disk *good = disk_with_two(DTRAIN_STRATEGY_ZERO3, 2, hashes);
    long calls = 0;
    for (long n = 0; n <= calls; n++) /* 0: none fails */
        for (int on = 0; on < 2; on++) {
            char what[160];
            disk *d = disk_copy(good);
            saved_run *r = saved_new(2, DTRAIN_STRATEGY_ZERO3);
            r->load = "/run";
            r->how.storage = &d->table;
            r->steps = 2;
            d->fail_at = n;
            d->fail_on = on == 1;
            const dtrain_result result = saved_launch(r);
            if (n == 0) calls = d->calls;
            snprintf(what, sizeof what, "call %ld of %ld (%s) fails %s", n, calls, d->last_failed,
                     on ? "for good" : "once");
            CHECK_MSG(result == DTRAIN_OK || (r->error[0][0] && r->error[1][0]), "%s: no sentence",
                      what);
            if (result == DTRAIN_OK)
                CHECK_MSG(r->from[0] == 4 || (r->from[0] == 2 && r->hash[0] == hashes[0]),
                          "%s: step %lld", what, (long long)r->from[0]);
            munmap(r, sizeof *r);
            disk_free(d);
        }
    CHECK_MSG(calls > 20, "a load makes %ld calls", calls);
    disk_free(good);
}

static void test_short_and_interrupted(void)
{
    uint64_t hashes[3];
    disk *d = disk_with_two(DTRAIN_STRATEGY_FULL_SHARD, 3, hashes);
    saved_run *r = save_six(d, DTRAIN_STRATEGY_FULL_SHARD, 3, true);
    d->rough = true;
    saved_go(r, "rough");
    hashes[2] = r->hash[0];
    CHECK(step_on(d, DTRAIN_STRATEGY_FULL_SHARD, 3, hashes, "rough") == 6);
    munmap(r, sizeof *r);
    disk_free(d);
}

/* Power is lost before every call of so many saves of step 6 that is not a read, as often as `draws` says; once: what
 * is not synced is gone at every second call, and drawn at the others. */
static void lose_power(int saves, uint32_t keep, uint64_t draws)
{
    const uint32_t kind = DTRAIN_STRATEGY_ZERO1;
    uint64_t hashes[3];
    disk *good = disk_with_two(kind, 2, hashes);
    const long first = calls_of_saves(good, kind, 2, 1, keep, &hashes[2]);
    const long calls = calls_of_saves(good, kind, 2, saves, keep, &hashes[2]);
    int there[3] = {0, 0, 0};
    for (long n = 1; n <= calls + 1; n++) {
        const uint64_t least = draws == 1 ? (uint64_t)n % 2 : 0;
        for (uint64_t seed = least; seed < least + draws; seed++) {
            char what[160];
            disk *d = disk_copy(good);
            saved_run *r = save_six(d, kind, 2, seed % 2);
            r->saves = saves;
            r->keep.keep = keep;
            d->writes_only = d->fail_on = true; /* nothing reaches a disk without power */
            d->fail_at = n;
            (void)saved_launch(r);
            snprintf(what, sizeof what, "power is lost before call %ld (%s) of %d saves, draw %llu",
                     n, d->last_failed, saves, (unsigned long long)seed);
            disk_lose_power(d, seed ? seed * 1000 + (uint64_t)n : 0);
            const int64_t step = step_on(d, kind, 2, hashes, what);
            CHECK_MSG(step == 4 || step == 6, "%s: step %lld", what, (long long)step);
            if (n > first) CHECK_MSG(step == 6, "%s: it had been saved", what);
            there[step == 6 ? 2 : 1]++;
            saved_run *next = save_six(d, kind, 2, false);
            if (saved_go(next, what)) CHECK(step_on(d, kind, 2, hashes, what) == 6);
            munmap(next, sizeof *next);
            munmap(r, sizeof *r);
            disk_free(d);
        }
    }
    CHECK_MSG(there[1] > 20 && there[2] > 0, "%d times the old one, %d times the new one", there[1],
              there[2]);
    disk_free(good);
}

static void test_power_loss(void) { lose_power(1, 0, test_draws(2, 3, 20)); }

/* The only checkpoint is saved again. */
static void test_power_loss_again(void) { lose_power(2, 1, test_draws(1, 3, 20)); }

/* Every allocation of a run that loads and saves fails, once or for good: an error of all ranks or none, nothing leaks,
 * and what was saved before is there. */
static void test_failing_memory(void)
{
    for (int ranks = 1; ranks <= 2; ranks++) {
        uint64_t hashes[3];
        const uint32_t kind = ranks == 1 ? DTRAIN_STRATEGY_DDP : DTRAIN_STRATEGY_FULL_SHARD;
        disk *good = disk_with_two(kind, ranks, hashes);
        counted_memory *memory = (counted_memory *)ranks_shared(sizeof *memory);
        disk *d = disk_copy(good);
        saved_run *r = save_six(d, kind, ranks, true);
        r->allocator = counted_allocator(memory);
        saved_go(r, "a good allocator");
        hashes[2] = r->hash[0];
        const long calls = memory->calls;
        disk_free(d);
        for (long n = 1; n <= calls; n += test_full() ? 1 : 5)
            for (int on = 0; on < 2; on++) {
                char what[100];
                snprintf(what, sizeof what, "%d ranks, allocation %ld of %ld fails %s", ranks, n,
                         calls, on ? "for good" : "once");
                memset(memory, 0, sizeof *memory);
                memory->fail_at = n;
                memory->fail_on = on == 1;
                d = disk_copy(good);
                saved_run *again = save_six(d, kind, ranks, n % 2);
                again->allocator = counted_allocator(memory);
                const dtrain_result result = saved_launch(again);
                CHECK_MSG(memory->live == 0 && memory->wrong == 0,
                          "%s: %ld blocks leaked, %ld wrong", what, memory->live, memory->wrong);
                if (on && n + 10 < calls) CHECK_MSG(result != DTRAIN_OK, "%s: it went well", what);
                const int64_t step = step_on(d, kind, ranks, hashes, what);
                CHECK_MSG(step == 4 ||
                              (step == 6 && (result == DTRAIN_OK || ranks == 2 || n + 40 > calls)),
                          "%s: step %lld", what, (long long)step);
                munmap(again, sizeof *again);
                disk_free(d);
            }
        munmap(r, sizeof *r);
        disk_free(good);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN_BESIDE(test_failing_writes);
    RUN(test_tolerated);
    RUN(test_last_save);
    RUN_BESIDE(test_unseen_file);
    RUN_BESIDE(test_failing_reads);
    RUN(test_short_and_interrupted);
    RUN_BESIDE(test_power_loss);
    RUN_BESIDE(test_power_loss_again);
    RUN_BESIDE(test_failing_memory);
    return test_summary();
}
