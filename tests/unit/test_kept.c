/* test_kept.c: checkpoints in the launcher's memory: a run whose ranks are killed goes on from them with the same
 * bits, under every strategy, from any instruction on; and random calls of the storage beside those of the file
 * system, whose results and errors it must have. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "saved_run.h"

#include "world/world_internal.h"

#include <sys/time.h>

enum { PROCESSES = DTRAIN_LAUNCH_PROCESSES, THREADS = DTRAIN_LAUNCH_THREADS };

static bool says(const char *part) { return strstr(dtrain_last_error(), part) != NULL; }

/* ---- going on ---- */

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
static saved_run *memory_run(int ranks, uint32_t kind)
{
    saved_run *r = saved_new(ranks, kind);
    r->mode = PROCESSES;
    r->steps = 8;
    r->load = r->save = "somewhere/snapshots";
    r->save_every = 2;
    r->keep.keep = 1;
    r->kept_bytes = (uint64_t)64 << 20;
    r->restarts = 3;
    return r;
}
static void check_goes_on(int ranks, uint32_t kind, uint32_t mode)
{
    char what[80];
    saved_run *calm = memory_run(ranks, kind), *hit = memory_run(ranks, kind);
    snprintf(what, sizeof what, "%d ranks, strategy %u, %s", ranks, kind, ranks_mode_name(mode));
    calm->mode = hit->mode = mode;
    hit->during = die_in_step_5;
    if (saved_go(calm, what) && saved_go(hit, what)) {
        saved_compare(calm, hit, 5, what);
        for (int r = 0; r < ranks; r++)
            CHECK_MSG(hit->from[r] == 4, "%s: rank %d went on from step %lld", what, r,
                      (long long)hit->from[r]);
    }
    munmap(calm, sizeof *calm);
    munmap(hit, sizeof *hit);
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
                memory_run(1 + (int)(seed % 3), DTRAIN_STRATEGY_DDP + (uint32_t)(seed % 5));
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
        for (int hit = 0; hit < 2; hit++) munmap(runs[hit], sizeof *runs[hit]);
    }
    CHECK_MSG(attempts > 2 * count, "%llu attempts of %llu runs", (unsigned long long)attempts,
              (unsigned long long)count);
}

/* A rank dies while it holds the mutex of the files. */
static int rank_dies_inside(dtrain_world *world, void *user)
{
    const dtrain_storage *storage;
    (void)user;
    RANKS_TRY(dtrain_kept_storage(world, &storage));
    RANKS_TRY(dtrain_world_all_gather(world, NULL, 0, NULL));
    if (!attempt_of(world) && dtrain_world_rank(world) == 1) {
        pthread_mutex_lock(&world->kept->mutex);
        raise(SIGKILL);
    }
    if (!attempt_of(world)) { /* the other rank gets in before it ends */
        while (dtrain_world_poll(world) == DTRAIN_OK) sched_yield();
        return storage->make_directory(storage->user, "/made") == 0 ? 7 : 8;
    }
    if (dtrain_world_rank(world)) return 0;
    CHECK(storage->remove(storage->user, "/made") == 0);
    CHECK(pthread_mutex_lock(&world->kept->mutex) == 0); /* it works again */
    return pthread_mutex_unlock(&world->kept->mutex);
}
static void test_dies_inside(void)
{
    dtrain_launch_desc desc = ranks_desc(2, PROCESSES);
    desc.kept_bytes = (uint64_t)16 << 20;
    desc.restarts = 1;
    desc.backoff_ms = 1;
    CHECK(ranks_launch(&desc, rank_dies_inside, NULL, NULL) == DTRAIN_OK);
}

/* ---- what does not fit ---- */

static void test_no_room(void)
{
    saved_run *r = memory_run(2, DTRAIN_STRATEGY_DDP);
    r->restarts = 0;
    r->kept_bytes = (uint64_t)7 << 20;
    r->keep.keep = DTRAIN_KEEP_ALL;
    r->save_every = 1;
    r->steps = SAVED_STEPS;
    CHECK(saved_launch(r) == DTRAIN_ERROR_RANK_FAILED);
    CHECK_MSG(says("cannot be written: No space left on device"), "%s", dtrain_last_error());
    r->keep.keep = 1; /* what is removed makes room */
    saved_go(r, "twelve snapshots, one after the other, where two have room");
    r->kept_bytes = 4096;
    CHECK(saved_launch(r) == DTRAIN_ERROR_RANK_FAILED);
    CHECK_MSG(says("kept_bytes of dtrain_launch_desc is 4096, expected at least"), "%s",
              dtrain_last_error());
    r->kept_bytes = (uint64_t)1 << 60;
    CHECK(saved_launch(r) == DTRAIN_ERROR_MEMORY);
    CHECK_MSG(says("bytes are free"), "%s", dtrain_last_error());
    munmap(r, sizeof *r);
}
static int rank_asks(dtrain_world *world, void *user)
{
    const dtrain_storage *storage = dtrain_file_storage();
    (void)user;
    CHECK(dtrain_kept_storage(world, &storage) == DTRAIN_ERROR_UNSUPPORTED && !storage);
    CHECK_MSG(says("kept_bytes of dtrain_launch_desc is 0"), "%s", dtrain_last_error());
    CHECK(dtrain_kept_storage(NULL, &storage) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_kept_storage(world, NULL) == DTRAIN_ERROR_ARGUMENT);
    return 0;
}
static void test_none_is_kept(void)
{
    dtrain_launch_desc desc = ranks_desc(2, THREADS);
    CHECK(ranks_launch(&desc, rank_asks, NULL, NULL) == DTRAIN_OK);
}

/* ---- random calls, beside the file system ---- */

enum { PATHS = 12, HANDLES = 5, MOST = 700000 };
static const char *const paths[PATHS] = {"a",   "b",   "d",     "e",     "d/a", "d/b",
                                         "d/e", "e/a", "d/e/a", "d/e/b", "e/d", "a/b"};
typedef struct handle {
    int file[2]; /* of the file system, of memory */
    dtrain_storage_mode mode;
} handle;
typedef struct pair {
    const dtrain_storage *tables[2];
    char roots[2][64];
    handle open[HANDLES];
    int count;
    char *bytes[2];
} pair;
typedef struct names {
    char text[PATHS][8];
    int count;
} names;

static void add_name(void *list, const char *entry)
{
    names *n = (names *)list;
    if (n->count < PATHS) snprintf(n->text[n->count++], sizeof n->text[0], "%s", entry);
}
static int by_text(const void *a, const void *b)
{
    return strcmp((const char *)a, (const char *)b);
}
static bool is_directory(const pair *p, const char *path)
{
    names n = {{{0}}, 0};
    char full[128];
    snprintf(full, sizeof full, "%s/%s", p->roots[0], path);
    return p->tables[0]->list(NULL, full, add_name, &n) >= 0;
}
/* Make one call on both; false: they differ. */
static bool play_call(pair *p, uint64_t *state)
{
    const uint64_t what = ranks_random(state, 12);
    const int h = p->count ? (int)ranks_random(state, (uint64_t)p->count) : 0;
    const char *one = paths[ranks_random(state, PATHS)], *other = paths[ranks_random(state, PATHS)];
    const size_t bytes = (size_t)ranks_random(state, MOST);
    const uint64_t draw = ranks_random(state, 1 << 20);
    dtrain_storage_mode mode = (dtrain_storage_mode)ranks_random(state, DTRAIN_STORAGE_MODES);
    int64_t result[2] = {0, 0}, done[2] = {0, 0};
    names listed[2];
    handle *open = &p->open[h];
    if (what >= 3 && what <= 6 && !p->count) return true;
    if (what >= 3 && what <= 5 && open->mode == DTRAIN_STORAGE_DIRECTORY) return true;
    if (what < 3 && p->count == HANDLES) return true;
    if (what < 3 && mode == DTRAIN_STORAGE_READ && is_directory(p, one)) return true;
    if (what >= 7 && what <= 8 && p->count) return true; /* what is open is not moved or removed */
    if (what < 3 && mode == DTRAIN_STORAGE_LOCK && draw % 4) mode = DTRAIN_STORAGE_CREATE;
    memset(listed, 0, sizeof listed);
    for (int t = 0; t < 2; t++) {
        const dtrain_storage *s = p->tables[t];
        char from[128], to[128];
        snprintf(from, sizeof from, "%s/%s", p->roots[t], one);
        snprintf(to, sizeof to, "%s/%s", p->roots[t], other);
        switch (what) {
        case 0:
        case 1:
        case 2:
            p->open[p->count].file[t] = s->open(s->user, from, mode);
            result[t] = p->open[p->count].file[t] < 0 ? p->open[p->count].file[t] : 0;
            break;
        case 3: {
            const int64_t size = s->size(s->user, open->file[t]);
            const uint64_t at = size ? draw % (uint64_t)(size + 1) : 0;
            result[t] = size;
            if (open->mode == DTRAIN_STORAGE_READ) break;
            for (size_t i = 0; i < bytes; i++) p->bytes[t][i] = (char)(i * draw >> 7);
            while (done[t] < (int64_t)bytes) {
                const int64_t part = s->write(s->user, open->file[t], p->bytes[t] + done[t],
                                              bytes - (size_t)done[t], at + (uint64_t)done[t]);
                if (!CHECK_MSG(part > 0, "a write: %lld", (long long)part)) return false;
                done[t] += part;
            }
            break;
        }
        case 4:
        case 5:
            if (open->mode == DTRAIN_STORAGE_CREATE) break; /* not to be read */
            for (int64_t part = 1; part > 0 && done[t] < (int64_t)bytes; done[t] += part) {
                part = s->read(s->user, open->file[t], p->bytes[t] + done[t],
                               bytes - (size_t)done[t], draw + (uint64_t)done[t]);
                if (part < 0) result[t] = part;
            }
            break;
        case 6: result[t] = s->close(s->user, open->file[t]); break;
        case 7: result[t] = s->rename(s->user, from, to); break;
        case 8: result[t] = s->remove(s->user, from); break;
        case 9: result[t] = s->make_directory(s->user, from); break;
        default:
            result[t] = s->list(s->user, what == 10 ? p->roots[t] : from, add_name, &listed[t]);
            qsort(listed[t].text, (size_t)listed[t].count, sizeof listed[t].text[0], by_text);
        }
    }
    if (what < 3 && result[0] >= 0 && result[1] >= 0) p->open[p->count++].mode = mode;
    if (what == 6) *open = p->open[--p->count];
    return CHECK_MSG(result[0] == result[1] && done[0] == done[1] &&
                         memcmp(p->bytes[0], p->bytes[1], (size_t)done[0]) == 0 &&
                         memcmp(&listed[0], &listed[1], sizeof listed[0]) == 0,
                     "call %d (mode %d) of %s, %s: the file system says %lld (%lld bytes), memory "
                     "%lld (%lld)",
                     (int)what, (int)mode, one, other, (long long)result[0], (long long)done[0],
                     (long long)result[1], (long long)done[1]);
}
static int rank_plays(dtrain_world *world, void *user)
{
    uint64_t seed = *(const uint64_t *)user, state = ranks_mix(seed);
    static pair zero;
    pair p = zero;
    bool good = true;
    p.tables[0] = dtrain_file_storage();
    snprintf(p.roots[0], sizeof p.roots[0], "/tmp/dtrain_memory_XXXXXX");
    for (int t = 0; t < 2; t++) p.bytes[t] = (char *)calloc(1, MOST);
    if (!p.bytes[0] || !p.bytes[1] || !mkdtemp(p.roots[0])) return 3;
    RANKS_TRY(dtrain_kept_storage(world, &p.tables[1]));
    for (int i = 0; i < 400 && good; i++) good = play_call(&p, &state);
    CHECK_MSG(good, "seed %llu", (unsigned long long)seed);
    while (p.count--) p.tables[0]->close(NULL, p.open[p.count].file[0]);
    char command[96];
    snprintf(command, sizeof command, "rm -rf %s", p.roots[0]);
    CHECK(system(command) == 0);
    for (int t = 0; t < 2; t++) free(p.bytes[t]);
    return 0;
}
static void test_beside_files(void)
{
    const uint64_t first = test_seed(), count = test_full() ? 100 : 20;
    for (uint64_t seed = first; seed < first + count; seed++) {
        dtrain_launch_desc desc = ranks_desc(1, THREADS);
        desc.kept_bytes = (uint64_t)32 << 20;
        CHECK(ranks_launch(&desc, rank_plays, &seed, NULL) == DTRAIN_OK);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_goes_on);
    RUN(test_killed_anywhere);
    RUN(test_dies_inside);
    RUN(test_no_room);
    RUN(test_none_is_kept);
    RUN(test_beside_files);
    return test_summary();
}
