/* test_loader.c: workers that read ahead, over sources of the host's own that are slow, fail, or stand still: the
 * samples that a loop over the sampler's order gives, each error with its batch, memory that is bounded, ends that are
 * clean. Seeded random programs besides, each run with new seeds.
 *
 *     make build/tests/test_loader && build/tests/test_loader */
#include "state/source_internal.h"
#include "train/data_internal.h"
#include "test.h"
#include "dtrain.h"
#include "allocator.h"
#include "files.h"
#include "ranks.h"
#include "shuffled.h"

#include <sys/resource.h>

enum { MOST_ITEMS = 64, MOST_BATCH = 5 };

static uint32_t next_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*state >> 33);
}

/* ---- a source of the host's own ---- */

typedef struct item {
    int64_t number, square;
} item;

typedef struct source {
    int64_t items;
    int slow_us;              /* a read takes up to so long, chosen by its item */
    int failures[MOST_ITEMS]; /* reads of an item that fail before one succeeds */
    int gate[2];              /* a pipe, 0: none; items from `held` on wait for a byte of it */
    int64_t held;
    long reads;
} source;

static dtrain_result read_items(void *user, int64_t first, int64_t count, void *items,
                                int32_t *labels)
{
    source *s = (source *)user;
    for (int64_t i = 0; i < count; i++) {
        const int64_t number = first + i;
        item *to = (item *)items + i;
        __atomic_add_fetch(&s->reads, 1, __ATOMIC_RELAXED);
        if (s->slow_us) {
            struct timespec nap = {0, (long)(number * 7919 % s->slow_us) * 1000};
            nanosleep(&nap, NULL);
        }
        if (s->gate[0] && number >= s->held) {
            char byte;
            if (read(s->gate[0], &byte, 1) != 1)
                return dtrain_fail(DTRAIN_ERROR_FILE, "the gate of item %lld is closed",
                                   (long long)number);
        }
        if (number < MOST_ITEMS &&
            __atomic_fetch_sub(&s->failures[number], 1, __ATOMIC_RELAXED) > 0)
            return dtrain_fail(DTRAIN_ERROR_FILE, "item %lld cannot be read", (long long)number);
        to->number = number;
        to->square = number * number;
        if (labels) labels[i] = (int32_t)(number % 7);
    }
    return DTRAIN_OK;
}

static dtrain_result open_source(source *s, dtrain_dataset **out)
{
    dtrain_dataset_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.item_count = s->items;
    desc.item_bytes = sizeof(item);
    desc.read = read_items;
    desc.user = s;
    return dtrain_dataset_open(NULL, &desc, out);
}

static uint64_t position_of(const dtrain_loader *loader)
{
    dtrain_loader_info info;
    dtrain_loader_query(loader, &info);
    return info.position;
}

/* The item of sample k. */
static int64_t item_of(uint64_t seed, bool in_order, int64_t items, int64_t per_epoch, uint64_t k)
{
    static __thread int64_t order[MOST_ITEMS], count;
    static __thread uint64_t entered;
    const uint64_t begin = seed + k / (uint64_t)per_epoch;
    if (in_order) return (int64_t)(k % (uint64_t)per_epoch);
    if (count != items || entered != begin) shuffled(begin, items, order);
    count = items;
    entered = begin;
    return order[k % (uint64_t)per_epoch];
}

/* ---- own sources ---- */

static void test_own_samples(void)
{
    source s = {.items = 23};
    dtrain_dataset *dataset;
    dtrain_dataset_info info;
    item got[23];
    int32_t labels[23];
    CHECK(open_source(&s, &dataset) == DTRAIN_OK && s.reads == 0);
    dtrain_dataset_query(dataset, &info);
    CHECK(info.item_count == 23 && info.item_bytes == sizeof(item) && info.file_count == 0);
    CHECK(info.vocab_count == INT64_C(1) << 31);
    CHECK(dtrain__dataset_read(dataset, 3, 20, got, labels) == DTRAIN_OK && s.reads == 20);
    for (int i = 0; i < 20; i++) CHECK(got[i].number == i + 3 && labels[i] == (i + 3) % 7);
    s.failures[4] = 1;
    CHECK(dtrain__dataset_read(dataset, 3, 2, got, labels) == DTRAIN_ERROR_FILE);
    CHECK(strcmp(dtrain_last_error(), "item 4 cannot be read") == 0);
    CHECK(dtrain__dataset_read(dataset, 3, 2, got, labels) == DTRAIN_OK);
    dtrain_dataset_close(dataset);
}

static dtrain_result read_tokens(void *user, int64_t first, int64_t count, void *items,
                                 int32_t *labels)
{
    int32_t *tokens = (int32_t *)items;
    (void)user;
    CHECK(labels == NULL);
    for (int64_t i = 0; i < count; i++) tokens[i] = (int32_t)((first + i) * 5 % 997);
    return DTRAIN_OK;
}

/* Tokens of a callback are cut as those of a file with the same tokens are, with and without workers. */
static void test_own_tokens(void)
{
    static uint16_t file[700];
    int32_t got[2][2][48], all[700];
    dtrain_dataset *data[2];
    dtrain_dataset_desc desc;
    for (int i = 0; i < 700; i++) file[i] = (uint16_t)(i * 5 % 997);
    write_file("tokens", file, sizeof file);
    memset(&desc, 0, sizeof desc);
    desc.format = DTRAIN_DATA_U16;
    desc.path = path_of("tokens");
    CHECK(dtrain_dataset_open(NULL, &desc, &data[0]) == DTRAIN_OK);
    memset(&desc, 0, sizeof desc);
    desc.item_count = 700;
    desc.read = read_tokens;
    CHECK(dtrain_dataset_open(NULL, &desc, &data[1]) == DTRAIN_OK);
    for (uint32_t workers = 0; workers <= 4; workers++) {
        dtrain_loader *loaders[2];
        for (int i = 0; i < 2; i++) {
            dtrain_loader_desc window;
            memset(&window, 0, sizeof window);
            window.dataset = data[i], window.batch = 3, window.sequence = 16, window.seed = 9;
            window.workers = i ? workers : 0;
            CHECK(dtrain_loader_create(NULL, &window, &loaders[i]) == DTRAIN_OK);
        }
        for (int step = 0; step < 60; step++) {
            for (int i = 0; i < 2; i++)
                CHECK(dtrain_loader_next(loaders[i], got[i][0], got[i][1]) == DTRAIN_OK);
            CHECK(memcmp(got[0], got[1], sizeof got[0]) == 0);
        }
        for (int i = 0; i < 2; i++) dtrain_loader_destroy(loaders[i]);
    }
    dtrain_dataset_close(data[1]);
    desc.vocab_count = 990;
    CHECK(dtrain_dataset_open(NULL, &desc, &data[1]) == DTRAIN_OK);
    CHECK(dtrain__dataset_read(data[1], 0, 700, all, NULL) == DTRAIN_ERROR_DATA);
    CHECK(strstr(dtrain_last_error(), "the host's own source: token 198 has id 990, but") != NULL);
    for (int i = 0; i < 2; i++) dtrain_dataset_close(data[i]);
}

/* ---- workers ---- */

/* Workers read as far ahead as they may, and never further. */
static void test_bounded(void)
{
    for (uint32_t workers = 1; workers <= 4; workers++)
        for (uint32_t prefetch = 0; prefetch <= 3; prefetch++) {
            source s = {.items = 1000};
            dtrain_dataset *dataset;
            dtrain_loader *loader;
            dtrain_loader_desc desc;
            item got[2];
            const long most = (long)(prefetch ? prefetch : 2 * workers);
            CHECK(open_source(&s, &dataset) == DTRAIN_OK);
            memset(&desc, 0, sizeof desc);
            desc.dataset = dataset, desc.batch = 2, desc.in_order = true;
            desc.workers = workers, desc.prefetch = prefetch;
            CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK);
            CHECK(__atomic_load_n(&s.reads, __ATOMIC_ACQUIRE) == 0);
            for (long step = 1; step < 20; step++) {
                const double end = test_seconds() + 20;
                CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_OK);
                CHECK(got[1].number == 2 * step - 1);
                while (__atomic_load_n(&s.reads, __ATOMIC_ACQUIRE) < 2 * (step + most) &&
                       test_seconds() < end) {}
                CHECK(__atomic_load_n(&s.reads, __ATOMIC_ACQUIRE) == 2 * (step + most));
            }
            dtrain_loader_destroy(loader);
            CHECK(s.reads == 2 * (19 + most));
            dtrain_dataset_close(dataset);
        }
}

/* A read that does not return is a named error at the deadline, and not the end of the loader. */
typedef struct stuck_case {
    source s;
    int open; /* the end of the gate that is written to */
} stuck_case;

static int stuck_rank(dtrain_world *world, void *user)
{
    stuck_case *c = (stuck_case *)user;
    dtrain_dataset *dataset;
    dtrain_loader *loader;
    dtrain_loader_desc desc;
    item got[2];
    CHECK(open_source(&c->s, &dataset) == DTRAIN_OK);
    memset(&desc, 0, sizeof desc);
    desc.dataset = dataset, desc.batch = 2, desc.in_order = true, desc.workers = 2;
    CHECK(dtrain_loader_create(world, &desc, &loader) == DTRAIN_OK);
    CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_OK);
    for (int again = 0; again < 2; again++) {
        CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_ERROR_TIMEOUT);
        CHECK(strstr(dtrain_last_error(), "the batch at sample 2 of the host's own source has not "
                                          "been read within 0.1 s") != NULL);
    }
    CHECK(write(c->open, "bytes for all that is read ahead", 32) == 32);
    CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_OK && got[1].number == 3);
    close(c->open); /* what is still held fails now, and destroy need not wait */
    dtrain_loader_destroy(loader);
    dtrain_dataset_close(dataset);
    return 0;
}

static void test_stuck(void)
{
    dtrain_launch_desc launch;
    stuck_case c;
    int gate[2];
    CHECK(pipe(gate) == 0);
    memset(&c, 0, sizeof c);
    c.s.items = MOST_ITEMS;
    c.s.gate[0] = gate[0];
    c.s.held = 3;
    c.open = gate[1];
    memset(&launch, 0, sizeof launch);
    launch.mode = DTRAIN_LAUNCH_THREADS;
    launch.timeout_ms = 100;
    CHECK_MSG(dtrain_launch(&launch, stuck_rank, &c, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
    close(gate[0]);
}

/* An error comes with its batch, those before it are good, and every repetition tries again. */
static void test_errors_in_order(void)
{
    for (uint32_t workers = 0; workers <= 4; workers++) {
        source s = {.items = MOST_ITEMS, .slow_us = 300};
        dtrain_dataset *dataset;
        dtrain_loader *loader;
        dtrain_loader_desc desc;
        item got[4];
        s.failures[9] = 3;
        s.failures[10] = 1;
        CHECK(open_source(&s, &dataset) == DTRAIN_OK);
        memset(&desc, 0, sizeof desc);
        desc.dataset = dataset, desc.batch = 4, desc.in_order = true, desc.workers = workers;
        CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK);
        for (int step = 0; step < 2; step++)
            CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_OK &&
                  got[3].number == step * 4 + 3);
        int failed = 0;
        while (dtrain_loader_next(loader, got, NULL) != DTRAIN_OK) {
            CHECK(position_of(loader) == 8);
            CHECK_MSG(strcmp(dtrain_last_error(),
                             failed < 3 ? "item 9 cannot be read" : "item 10 cannot be read") == 0,
                      "%s", dtrain_last_error());
            if (!CHECK(++failed <= 4)) break;
        }
        CHECK(failed == 4 && got[0].number == 8 && got[3].number == 11);
        CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_OK && got[0].number == 12);
        dtrain_loader_destroy(loader);
        dtrain_dataset_close(dataset);
    }
}

static dtrain_result refuse(void *user, const dtrain_sample *sample, void *output)
{
    (void)user;
    memcpy(output, sample->data, sizeof(item));
    if (sample->item != 5) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_DATA, "item 5 cannot be transformed");
}

static void test_transform_fails(void)
{
    for (uint32_t workers = 0; workers <= 2; workers++) {
        source s = {.items = MOST_ITEMS};
        dtrain_dataset *dataset;
        dtrain_loader *loader;
        dtrain_loader_desc desc;
        item got[4];
        CHECK(open_source(&s, &dataset) == DTRAIN_OK);
        memset(&desc, 0, sizeof desc);
        desc.dataset = dataset, desc.batch = 4, desc.in_order = true, desc.workers = workers;
        desc.transform = refuse, desc.output_bytes = sizeof(item);
        CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK);
        CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_OK);
        CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_ERROR_DATA);
        CHECK(strcmp(dtrain_last_error(), "item 5 cannot be transformed") == 0);
        dtrain_loader_seek(loader, 8); /* past it */
        CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_OK && got[0].number == 8);
        dtrain_loader_destroy(loader);
        dtrain_dataset_close(dataset);
    }
}

/* A process that is forked from the loader's has no workers: it is told so, and can free. */
static void test_fork(void)
{
    source s = {.items = MOST_ITEMS};
    dtrain_dataset *dataset;
    dtrain_loader *loader;
    dtrain_loader_desc desc;
    item got[2];
    int status = -1;
    CHECK(open_source(&s, &dataset) == DTRAIN_OK);
    memset(&desc, 0, sizeof desc);
    desc.dataset = dataset, desc.batch = 2, desc.in_order = true, desc.workers = 2;
    CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK);
    CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_OK);
    /* A sanitizer's allocator may be locked by a worker at the fork, in the child for ever: until they are still. */
    while (RANKS_SANITIZED && __atomic_load_n(&s.reads, __ATOMIC_ACQUIRE) < 2 * (1 + 4)) {}
    if (RANKS_SANITIZED) usleep(20000);
    const pid_t child = fork();
    if (child == 0) {
        dtrain_loader_seek(loader, 4);
        CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_ERROR_USAGE);
        CHECK(strstr(dtrain_last_error(), "create loaders after the fork") != NULL);
        dtrain_loader_destroy(loader);
        desc.workers = TEST_RACES ? 0 : 1; /* its detector has no threads after a fork */
        CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK);
        CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_OK && got[1].number == 1);
        dtrain_loader_destroy(loader);
        dtrain_dataset_close(dataset);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_OK && got[1].number == 3);
    dtrain_loader_destroy(loader);
    dtrain_dataset_close(dataset);
}

/* Where threads cannot be had, the sentence has the worker's number, and those before it are gone. */
static void test_no_threads(void)
{
    source s = {.items = MOST_ITEMS};
    dtrain_dataset *dataset;
    dtrain_loader *loader;
    dtrain_loader_desc desc;
    struct rlimit before, tight;
    item got[2];
    long pages = 0;
    if (RANKS_SANITIZED) {
        test_cannot("a sanitizer needs all of the address space");
        return;
    }
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%ld", &pages) == 1 && fclose(file) == 0);
    CHECK(open_source(&s, &dataset) == DTRAIN_OK);
    CHECK(getrlimit(RLIMIT_AS, &before) == 0);
    tight = before;
    tight.rlim_cur =
        (rlim_t)(pages * sysconf(_SC_PAGESIZE) + (32 << 20)); /* some stacks of 8 MiB */
    memset(&desc, 0, sizeof desc);
    desc.dataset = dataset, desc.batch = 2, desc.in_order = true, desc.workers = 64;
    CHECK(setrlimit(RLIMIT_AS, &tight) == 0);
    const dtrain_result result = dtrain_loader_create(NULL, &desc, &loader);
    CHECK(setrlimit(RLIMIT_AS, &before) == 0);
    CHECK(result == DTRAIN_ERROR_SYSTEM && loader == NULL);
    CHECK_MSG(strstr(dtrain_last_error(), "of 64 could not be started: ") != NULL, "%s",
              dtrain_last_error());
    CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK);
    CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_OK && got[1].number == 1);
    dtrain_loader_destroy(loader);
    dtrain_dataset_close(dataset);
}

/* A file that is cut while workers read it: its name, at the first batch that was not read before. */
static void test_file_cut(void)
{
    static uint16_t tokens[4000];
    for (uint32_t workers = 0; workers <= 3; workers++) {
        dtrain_dataset_desc data;
        dtrain_dataset *dataset;
        dtrain_loader *loader;
        dtrain_loader_desc desc;
        int32_t got[2][16];
        write_file("cut", tokens, sizeof tokens);
        memset(&data, 0, sizeof data);
        data.path = path_of("cut"), data.format = DTRAIN_DATA_U16;
        CHECK(dtrain_dataset_open(NULL, &data, &dataset) == DTRAIN_OK);
        memset(&desc, 0, sizeof desc);
        desc.dataset = dataset, desc.batch = 1, desc.sequence = 16, desc.workers = workers;
        CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK);
        CHECK(dtrain_loader_next(loader, got[0], got[1]) == DTRAIN_OK);
        CHECK(truncate(path_of("cut"), 100) == 0);
        uint32_t good = 0;
        while (good < 8 && dtrain_loader_next(loader, got[0], got[1]) == DTRAIN_OK) good++;
        CHECK_MSG(good <= 2 * workers, "%u batches of a file that was cut", good);
        CHECK(strstr(dtrain_last_error(), path_of("cut")) != NULL);
        CHECK(strstr(dtrain_last_error(), "it had 8000 bytes when it was opened and has 100 now"));
        CHECK(dtrain_loader_next(loader, got[0], got[1]) == DTRAIN_ERROR_FILE);
        dtrain_loader_destroy(loader);
        dtrain_dataset_close(dataset);
    }
}

/* ---- random programs ---- */

/* What a program does is drawn from the seed, alike on all ranks but for workers, delays and what each reads ahead. */
typedef struct program {
    uint64_t seed;
    uint32_t ranks, batch;
    int64_t items, asked, limit; /* limit: what follows from the sample_limit that is asked for */
    bool in_order, drop_last;
} program;

static program program_of(uint64_t seed)
{
    uint64_t state = seed;
    program p;
    memset(&p, 0, sizeof p);
    p.seed = seed;
    p.ranks = 1 + next_random(&state) % 3;
    p.batch = 1 + next_random(&state) % MOST_BATCH;
    p.items = 1 + next_random(&state) % MOST_ITEMS;
    p.in_order = next_random(&state) % 4 == 0;
    p.drop_last = next_random(&state) % 2 && p.items >= p.batch * p.ranks;
    const int64_t per_epoch = p.items - (p.drop_last ? p.items % (p.batch * p.ranks) : 0);
    if (next_random(&state) % 2) p.asked = (int64_t)(next_random(&state) % MOST_ITEMS) - 1;
    p.limit = p.asked < 0 || p.asked > per_epoch ? per_epoch : p.asked;
    return p;
}

/* The position of the next batch that is asked for at `position`: with drop_last none crosses the end of an epoch. */
static uint64_t next_begin(const program *p, uint64_t position)
{
    const uint64_t left = (uint64_t)p->items - position % (uint64_t)p->items;
    return p->drop_last && left < p->batch * p->ranks ? position + left : position;
}

/* One call of next: this rank's samples and padding behind the last one, the end, or an error of one of the samples
 * and another try. */
static void check_next(const program *p, dtrain_loader *loader, uint32_t rank)
{
    const uint64_t position = position_of(loader);
    dtrain_loader_info info;
    item got[MOST_BATCH], expected[MOST_BATCH];
    int32_t labels[MOST_BATCH];
    uint32_t count = 0;
    memset(expected, 0, sizeof expected);
    for (uint32_t i = 0; i < p->batch; i++) {
        const uint64_t k = position + i * p->ranks + rank;
        if (p->limit && k >= (uint64_t)p->limit) break;
        expected[i].number = item_of(p->seed, p->in_order, p->items, p->items, k);
        expected[i].square = expected[i].number * expected[i].number;
        count++;
    }
    if (p->limit && position >= (uint64_t)p->limit) {
        CHECK(dtrain_loader_next(loader, got, labels) == DTRAIN_ERROR_END);
        CHECK(position_of(loader) == position);
        return;
    }
    for (int tries = 0; dtrain_loader_next(loader, got, labels) != DTRAIN_OK; tries++) {
        bool own = false;
        const char *digits = strstr(dtrain_last_error(), "item ");
        for (uint32_t i = 0; digits && i < count; i++)
            own = own || atoll(digits + 5) == expected[i].number;
        CHECK_MSG(own, "seed %llu: \"%s\" with a batch that has no such item",
                  (unsigned long long)p->seed, dtrain_last_error());
        CHECK(position_of(loader) == position);
        if (!CHECK(tries < 3 * MOST_BATCH)) return;
    }
    CHECK_MSG(memcmp(got, expected, p->batch * sizeof *got) == 0,
              "seed %llu: rank %u has other samples at %llu", (unsigned long long)p->seed, rank,
              (unsigned long long)position);
    for (uint32_t i = 0; i < p->batch; i++)
        CHECK(labels[i] == (i < count ? got[i].number % 7 : -1));
    dtrain_loader_query(loader, &info);
    CHECK(info.batch_samples == count);
    CHECK(info.position == next_begin(p, position + p->batch * p->ranks));
}

static int program_rank(dtrain_world *world, void *user)
{
    const program *p = (const program *)user;
    const uint32_t rank = (uint32_t)dtrain_world_rank(world);
    uint64_t state = p->seed * 31 + rank, position = 0;
    source s;
    dtrain_dataset *dataset;
    memset(&s, 0, sizeof s);
    s.items = p->items;
    if (next_random(&state) % 3 == 0) s.slow_us = 100;
    if (next_random(&state) % 2)
        for (int i = 0; i < MOST_ITEMS; i++)
            s.failures[i] = next_random(&state) % 8 ? 0 : (int)(next_random(&state) % 3);
    CHECK(open_source(&s, &dataset) == DTRAIN_OK);
    for (uint32_t life = 0; life < 3; life++) { /* of a loader, each from where the last one was */
        dtrain_loader *loader;
        dtrain_loader_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.dataset = dataset, desc.batch = p->batch, desc.seed = p->seed;
        desc.in_order = p->in_order, desc.drop_last = p->drop_last;
        desc.sample_limit = p->asked;
        desc.workers = next_random(&state) % 5;
        desc.prefetch = desc.workers ? next_random(&state) % 6 : 0;
        if (!CHECK(dtrain_loader_create(world, &desc, &loader) == DTRAIN_OK)) return 1;
        dtrain_loader_seek(loader, position);
        for (uint32_t calls = next_random(&state) % 25; calls > 0; calls--) {
            if (next_random(&state) % 8 == 0) dtrain_loader_seek(loader, next_random(&state) % 500);
            check_next(p, loader, rank);
        }
        position = position_of(loader);
        dtrain_loader_destroy(loader); /* in the middle of reads */
    }
    dtrain_dataset_close(dataset);
    return 0;
}

static void test_random_programs(void)
{
    const uint64_t first = test_seed();
    const uint64_t count = test_draws(60, 600, 2000);
    printf("  seeds from %llu on\n", (unsigned long long)first);
    for (uint64_t seed = first; seed < first + count; seed++) {
        dtrain_launch_desc launch;
        program p = program_of(seed);
        memset(&launch, 0, sizeof launch);
        launch.rank_count = p.ranks;
        launch.mode = DTRAIN_LAUNCH_THREADS;
        CHECK_MSG(dtrain_launch(&launch, program_rank, &p, NULL) == DTRAIN_OK, "seed %llu: %s",
                  (unsigned long long)seed, dtrain_last_error());
    }
}

/* ---- resumes ---- */

enum { MOST_EPOCHS = 256 };

/* A run is saved somewhere in an epoch and goes on with other ranks, another batch or other items. */
typedef struct resume {
    uint64_t seed;
    uint32_t ranks[2], batch[2];
    int64_t items[2];
    bool drop_last;
    int steps[2], part;
    int seen[MOST_EPOCHS][MOST_ITEMS], last[2]; /* how often; the last epoch of each part */
    char note[600];
} resume;

static resume *resume_of(uint64_t seed)
{
    uint64_t state = seed * 77;
    resume *r = (resume *)calloc(1, sizeof *r);
    r->seed = seed;
    for (int part = 0; part < 2; part++) {
        r->ranks[part] = 1 + next_random(&state) % 4;
        r->batch[part] = 1 + next_random(&state) % 3;
        r->steps[part] = (int)(next_random(&state) % 60);
    }
    r->items[0] = r->items[1] = 12 + next_random(&state) % (MOST_ITEMS - 12);
    if (next_random(&state) % 4 == 0) r->items[1] = 12 + next_random(&state) % (MOST_ITEMS - 12);
    r->drop_last = next_random(&state) % 4 != 0;
    return r;
}

/* Which item of which epoch it is. */
static dtrain_result note_sample(void *user, const dtrain_sample *sample, void *output)
{
    const int64_t both[2] = {sample->item, (int64_t)sample->epoch};
    (void)user;
    memcpy(output, both, sizeof both);
    return DTRAIN_OK;
}

static void count_samples(resume *r, dtrain_loader *loader)
{
    int64_t got[3][2];
    for (int step = 0; step < r->steps[r->part]; step++) {
        if (!CHECK(dtrain_loader_next(loader, got, NULL) == DTRAIN_OK)) return;
        for (uint32_t i = 0; i < r->batch[r->part]; i++) {
            __atomic_add_fetch(&r->seen[got[i][1]][got[i][0]], 1, __ATOMIC_RELAXED);
            int last = __atomic_load_n(&r->last[r->part], __ATOMIC_RELAXED);
            while (last < got[i][1] &&
                   !__atomic_compare_exchange_n(&r->last[r->part], &last, (int)got[i][1], false,
                                                __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
        }
    }
}

static int resume_rank(dtrain_world *world, void *user)
{
    resume *r = (resume *)user;
    source s;
    dtrain_loader_desc desc;
    dtrain_loader *loader = NULL;
    dtrain_strategy *strategy = NULL;
    dtrain_state_desc list;
    dtrain_state *state = NULL;
    dtrain_checkpoint_desc where;
    dtrain_checkpoint *checkpoint;
    dtrain_load_info info;
    dtrain_param w;
    memset(&s, 0, sizeof s), memset(&desc, 0, sizeof desc), memset(&list, 0, sizeof list);
    memset(&where, 0, sizeof where), memset(&w, 0, sizeof w);
    s.items = r->items[r->part];
    w.name = "w", w.shape[0] = 1;
    CHECK(open_source(&s, &desc.dataset) == DTRAIN_OK);
    desc.batch = r->batch[r->part], desc.seed = r->seed, desc.drop_last = r->drop_last;
    desc.workers = (uint32_t)(r->seed % 3), desc.transform = note_sample,
    desc.output_bytes = 2 * sizeof(int64_t);
    CHECK(dtrain_loader_create(world, &desc, &loader) == DTRAIN_OK);
    CHECK(dtrain_strategy_create(world, &w, 1, NULL, &strategy) == DTRAIN_OK);
    list.strategy = strategy, list.loader = loader;
    CHECK(dtrain_state_create(world, &list, &state) == DTRAIN_OK);
    if (r->part) {
        CHECK(dtrain_checkpoint_load(state, path_of("kept"), NULL, &info) == DTRAIN_OK);
        if (dtrain_world_rank(world) == 0) memcpy(r->note, info.note, sizeof r->note);
    }
    count_samples(r, loader);
    where.directory = path_of("kept"), where.state = state;
    if (!r->part) {
        CHECK(dtrain_checkpoint_open(world, &where, &checkpoint) == DTRAIN_OK);
        CHECK(dtrain_checkpoint_save(checkpoint, 1, NAN) == DTRAIN_OK);
        CHECK(dtrain_checkpoint_close(checkpoint) == DTRAIN_OK);
    }
    dtrain_state_destroy(state);
    dtrain_strategy_destroy(strategy);
    dtrain_loader_destroy(loader);
    dtrain_dataset_close(desc.dataset);
    return 0;
}

/* No sample of an epoch comes twice, and of an epoch that is over as many are missing as drop_last leaves out: fewer
 * than a batch of all ranks. Where an epoch has other items than when it was saved, a note says so. */
static void check_resume(const resume *r)
{
    const bool same = r->items[0] == r->items[1];
    const int end = r->steps[1] ? r->last[1] : r->last[0];
    CHECK_MSG(!same == (strstr(r->note, "samples and had") != NULL), "seed %llu: %s",
              (unsigned long long)r->seed, r->note);
    for (int epoch = 0; epoch <= end && same; epoch++) {
        const int part = r->steps[1] && (!r->steps[0] || epoch >= r->last[0]);
        const int all = (int)(r->batch[part] * r->ranks[part]);
        int most = 0, none = 0;
        for (int64_t i = 0; i < r->items[0]; i++) {
            if (r->seen[epoch][i] > most) most = r->seen[epoch][i];
            none += !r->seen[epoch][i];
        }
        const int before = (int)(r->batch[0] * r->ranks[0]),
                  room = before > all && epoch == r->last[0] ? before : all;
        CHECK_MSG(most <= 1 && (epoch == end || none < (r->drop_last ? room : 1)),
                  "seed %llu: of %lld items of epoch %d some came %d times, %d never: %u x %u, "
                  "then %u x %u, drop_last %d",
                  (unsigned long long)r->seed, (long long)r->items[0], epoch, most, none,
                  r->ranks[0], r->batch[0], r->ranks[1], r->batch[1], r->drop_last);
    }
}

/* Where a batch of all ranks is larger than what the epoch has left, drop_last leaves that out, and a note says so. */
static void test_rest_of_epoch(void)
{
    source s = {.items = 22};
    dtrain_loader_desc desc;
    dtrain_loader *loader;
    char note[256] = "";
    memset(&desc, 0, sizeof desc);
    CHECK(open_source(&s, &desc.dataset) == DTRAIN_OK);
    desc.batch = 8, desc.drop_last = true;
    if (!CHECK(dtrain_loader_create(NULL, &desc, &loader) == DTRAIN_OK)) return;
    dtrain__state_source *state = dtrain__source_of(loader);
    uint64_t *position = (uint64_t *)state->scalars[0].memory;
    *position = 22 + 14; /* just enough */
    state->resume(state, note, sizeof note);
    CHECK(position_of(loader) == 36 && !note[0]);
    *position = 22 + 16; /* saved by a batch of 2, of which three more were to come */
    state->resume(state, note, sizeof note);
    CHECK(position_of(loader) == 44 && strstr(note, "leaves out the last 6 samples"));
    dtrain_loader_destroy(loader);
    dtrain_dataset_close(desc.dataset);
}

static void test_random_resumes(void)
{
    const uint64_t first = test_seed(), count = test_draws(60, 300, 1000);
    char command[128];
    printf("  seeds from %llu on\n", (unsigned long long)first);
    snprintf(command, sizeof command, "rm -rf %s", path_of("kept"));
    for (uint64_t seed = first; seed < first + count; seed++) {
        resume *r = resume_of(seed);
        for (r->part = 0; r->part < 2; r->part++) {
            dtrain_launch_desc launch;
            memset(&launch, 0, sizeof launch);
            launch.rank_count = r->ranks[r->part], launch.mode = DTRAIN_LAUNCH_THREADS;
            CHECK_MSG(dtrain_launch(&launch, resume_rank, r, NULL) == DTRAIN_OK, "seed %llu: %s",
                      (unsigned long long)seed, dtrain_last_error());
        }
        check_resume(r);
        CHECK(system(command) == 0);
        free(r);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (!files_begin("test_loader")) return 1;
    RUN(test_own_samples);
    RUN(test_own_tokens);
    RUN(test_bounded);
    RUN(test_stuck);
    RUN(test_errors_in_order);
    RUN(test_transform_fails);
    RUN(test_fork);
    RUN(test_no_threads);
    RUN(test_file_cut);
    RUN(test_random_programs);
    RUN(test_rest_of_epoch);
    RUN(test_random_resumes);
    return test_summary() + !files_end();
}
