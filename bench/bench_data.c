/* bench_data.c: what a batch costs, by a loader with and without workers, beside a copy out of a mapped file.
 *
 *   run:     make bench, or build/bench/bench_data --reps 9 --log FILE
 *            build/bench/bench_data --step-us 5000 --directory /tmp
 *   build:   cc -O2 -I. -Ibench bench/bench_data.c -o bench_data -lm -lpthread
 *
 * The files are written first and stay in the page cache: what is measured is the way from there into a
 * batch. "mmap" is the floor: the same bytes at random places of a mapping of the file, widened or copied, and
 * nothing checked. "read" is the loader in the calling thread, which reads with pread, checks every id and that
 * the file has not changed.
 *
 * A repetition runs all readers once, beginning with another one each time. First batches follow each other at once,
 * then with steps of --step-us of computing between them.
 *
 *   M/s          million tokens or images a second while batches follow at once: median (min to max)
 *   of_mmap      M/s over that of the mapping, within a repetition
 *   us           time of a batch, of the same
 *   exposed_us   time in dtrain_loader_next with steps between batches: what a step waits
 *   exposed_%    that, of the step and the wait
 *   correct      batches in order are the bytes that were written */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "bench.h"

#include <fcntl.h>
#include <sys/mman.h>

enum { MAX_REPS = 64, MOST_BATCH = 128, PIXELS = 3072, READERS = 4 };

static const char *const readers[READERS] = {"mmap", "read", "1 worker", "2 workers"};

static struct {
    long reps, batches, step_us, mib;
    const char *directory;
} opt = {9, 2000, 2000, 64, "/tmp"};

typedef struct kind {
    const char *name;
    int64_t batch, sequence; /* sequence 0: images */
    bool augmented;
} kind;

static const kind kinds[] = {{"8 x 64 tokens", 8, 64, false},
                             {"8 x 1024 tokens", 8, 1024, false},
                             {"128 images, bytes", 128, 0, false},
                             {"128 images, floats", 128, 0, true}};

typedef struct trial {
    const kind *kind;
    char path[512];
    dtrain_dataset *dataset;
    const unsigned char *map;
    int64_t bytes, items;
    float *inputs; /* room for any batch */
    int32_t targets[8 * 1024];
    double rates[READERS][MAX_REPS], exposed[READERS][MAX_REPS];
    bool correct[READERS];
} trial;

static void fail(const char *what)
{
    fprintf(stderr, "bench_data: %s: %s\n", what,
            *dtrain_last_error() ? dtrain_last_error() : strerror(errno));
    exit(1);
}

/* Token i of the file, and byte p of record i. */
static uint16_t token_of(int64_t i) { return (uint16_t)(i * 7919 % 50257); }
static unsigned char byte_of(int64_t i, int64_t p)
{
    return (unsigned char)(p == 0 ? i % 10 : i * 31 + p * 7);
}

/* Write the file of a kind, map it, and open it as a dataset. */
static void open_trial(trial *t)
{
    const bool tokens = t->kind->sequence != 0;
    snprintf(t->path, sizeof t->path, "%s/bench_data_%d", opt.directory, (int)getpid());
    FILE *file = fopen(t->path, "wb");
    if (!file) fail(t->path);
    t->items = opt.mib * 1048576 / (tokens ? 2 : 1 + PIXELS);
    t->bytes = t->items * (tokens ? 2 : 1 + PIXELS);
    for (int64_t i = 0; i < t->items; i++) {
        unsigned char record[1 + PIXELS];
        const uint16_t token = token_of(i);
        for (int64_t p = 0; p < 1 + PIXELS && !tokens; p++) record[p] = byte_of(i, p);
        if (tokens) fwrite(&token, sizeof token, 1, file);
        else fwrite(record, sizeof record, 1, file);
    }
    if (fclose(file) != 0) fail(t->path);
    const int descriptor = open(t->path, O_RDONLY);
    t->map = (const unsigned char *)mmap(NULL, (size_t)t->bytes, PROT_READ,
                                         MAP_SHARED | MAP_POPULATE, descriptor, 0);
    if (t->map == MAP_FAILED) fail(t->path);
    close(descriptor);
    dtrain_dataset_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = t->path;
    desc.format = tokens ? DTRAIN_DATA_U16 : DTRAIN_DATA_CIFAR10;
    if (dtrain_dataset_open(NULL, &desc, &t->dataset) != DTRAIN_OK) fail("open");
    t->inputs = (float *)malloc(MOST_BATCH * PIXELS * sizeof(float));
    if (!t->inputs) fail("memory");
}

static void close_trial(trial *t)
{
    dtrain_dataset_close(t->dataset);
    munmap((void *)(uintptr_t)t->map, (size_t)t->bytes);
    unlink(t->path);
    free(t->inputs);
}

/* Write an image as floats, channels last. */
static void to_floats(const unsigned char *pixels, float *out)
{
    for (int p = 0; p < PIXELS / 3; p++)
        for (int c = 0; c < 3; c++) *out++ = ((float)pixels[c * PIXELS / 3 + p] - 120.0f) / 64.0f;
}

static dtrain_result transform(void *user, const dtrain_sample *sample, void *output)
{
    (void)user;
    to_floats((const unsigned char *)sample->data, (float *)output);
    return DTRAIN_OK;
}

static dtrain_loader *open_loader(const trial *t, int reader, bool in_order)
{
    dtrain_loader_desc desc;
    dtrain_loader *loader;
    memset(&desc, 0, sizeof desc);
    desc.batch = (uint32_t)t->kind->batch;
    desc.sequence = t->kind->sequence;
    desc.dataset = t->dataset;
    desc.in_order = in_order;
    desc.workers = (uint32_t)reader - 1;
    if (t->kind->augmented) {
        desc.transform = transform;
        desc.output_bytes = PIXELS * sizeof(float);
    }
    if (dtrain_loader_create(NULL, &desc, &loader) != DTRAIN_OK) fail("loader");
    return loader;
}

/* Copy a batch out of the mapping, at random places. */
static void copy_batch(trial *t, uint64_t *state)
{
    const int64_t sequence = t->kind->sequence, span = sequence ? sequence + 1 : 1;
    for (int64_t i = 0; i < t->kind->batch; i++) {
        *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        const int64_t first = (int64_t)((*state >> 20) % (uint64_t)(t->items - span));
        const unsigned char *from = t->map + first * (sequence ? 2 : 1 + PIXELS);
        int32_t *tokens = (int32_t *)(void *)t->inputs + i * sequence;
        for (int64_t k = 0; k < sequence; k++) {
            tokens[k] = from[2 * k] | from[2 * k + 1] << 8;
            t->targets[i * sequence + k] = from[2 * k + 2] | from[2 * k + 3] << 8;
        }
        if (sequence) continue;
        t->targets[i] = from[0];
        if (t->kind->augmented) to_floats(from + 1, t->inputs + i * PIXELS);
        else memcpy((unsigned char *)t->inputs + i * PIXELS, from + 1, PIXELS);
    }
}

static void next(trial *t, dtrain_loader *loader, uint64_t *state)
{
    if (!loader) copy_batch(t, state);
    else if (dtrain_loader_next(loader, t->inputs, t->targets) != DTRAIN_OK) fail("next");
}

/* Compare batches in order with what was written. */
static bool is_correct(trial *t, int reader)
{
    const int64_t sequence = t->kind->sequence, row = sequence ? sequence : PIXELS;
    bool good = true;
    if (reader == 0) return true; /* the floor is no loader */
    dtrain_loader *loader = open_loader(t, reader, true);
    for (int64_t b = 0; b < 20; b++) {
        next(t, loader, NULL);
        for (int64_t i = 0; i < t->kind->batch; i++)
            for (int64_t k = 0; k < row; k++) {
                const int64_t item = (b * t->kind->batch + i) % t->items, at = i * row + k;
                if (sequence)
                    good = good && t->targets[at] == token_of(item * sequence + k + 1) &&
                           ((int32_t *)(void *)t->inputs)[at] == token_of(item * sequence + k);
                else if (!t->kind->augmented)
                    good = good && ((unsigned char *)t->inputs)[at] == byte_of(item, 1 + k) &&
                           t->targets[i] == byte_of(item, 0);
                else
                    good =
                        good &&
                        t->inputs[at] ==
                            ((float)byte_of(item, 1 + k % 3 * PIXELS / 3 + k / 3) - 120.0f) / 64.0f;
            }
    }
    dtrain_loader_destroy(loader);
    return good;
}

/* Time batches at once, then with steps between them. */
static void run_reader(trial *t, int reader, int rep)
{
    const kind *k = t->kind;
    const int64_t batches = opt.batches * 64 /
                                (k->sequence    ? k->sequence + 64
                                 : k->augmented ? 2048
                                                : 512) +
                            4;
    dtrain_loader *loader = reader ? open_loader(t, reader, false) : NULL;
    uint64_t state = (uint64_t)rep;
    double waited = 0;
    next(t, loader, &state); /* the order of an epoch is made here */
    const double start = dtrain_seconds();
    for (int64_t b = 0; b < batches; b++) next(t, loader, &state);
    const double seconds = dtrain_seconds() - start;
    t->rates[reader][rep] =
        1e-6 * (double)(batches * k->batch * (k->sequence ? k->sequence : 1)) / seconds;
    const int64_t steps = batches < 50 ? batches : 50;
    for (int64_t b = 0; b < steps; b++) {
        const double begun = dtrain_seconds();
        while (1e6 * (dtrain_seconds() - begun) < (double)opt.step_us) {}
        const double asked = dtrain_seconds();
        next(t, loader, &state);
        waited += dtrain_seconds() - asked;
    }
    t->exposed[reader][rep] = 1e6 * waited / (double)steps;
    dtrain_loader_destroy(loader);
}

static void report(const trial *t)
{
    const kind *k = t->kind;
    const int reps = (int)opt.reps;
    for (int reader = 0; reader < READERS; reader++) {
        const spread rate = spread_of(t->rates[reader], reps);
        const double wait = median(t->exposed[reader], reps);
        bench_begin("data");
        bench_string("batch", -18, k->name);
        bench_string("reader", -9, readers[reader]);
        bench_spread("M/s", 7, 3, rate);
        bench_number("of_mmap", 7, 2, ratios_of(t->rates[reader], t->rates[0], reps, 1).median);
        bench_number("us", 8, 1,
                     (double)(k->batch * (k->sequence ? k->sequence : 1)) / rate.median);
        bench_number("exposed_us", 10, 1, wait);
        bench_number("exposed_%", 9, 2, 100 * wait / (wait + (double)opt.step_us));
        bench_end(t->correct[reader]);
    }
}

static const flag flag_table[] = {
    {"--reps", 'i', &opt.reps, 1, MAX_REPS, "repetitions; with --quick 2", NULL},
    {"--batches", 'i', &opt.batches, 1, 1e9,
     "of 8 x 64 tokens; fewer of larger ones; with --quick 20", NULL},
    {"--step-us", 'i', &opt.step_us, 1, 1e9, "computing between two batches", NULL},
    {"--mib", 'i', &opt.mib, 1, 1e6, "size of the files; with --quick 1", NULL},
    {"--directory", 's', &opt.directory, 0, 0, "where the files are written", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    if (is_quick(argc, argv)) opt.reps = 2, opt.batches = 20, opt.mib = 1, opt.step_us = 100;
    bench_start("bench_data", "loaders beside copies out of a mapped file", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    bench_title("%ld MiB a file, in the page cache; steps of %ld us", opt.mib, opt.step_us);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        static trial t;
        memset(&t, 0, sizeof t);
        t.kind = &kinds[i];
        open_trial(&t);
        for (int reader = 0; reader < READERS; reader++) t.correct[reader] = is_correct(&t, reader);
        for (int rep = 0; rep < opt.reps; rep++)
            for (int turn = 0; turn < READERS; turn++) run_reader(&t, (rep + turn) % READERS, rep);
        report(&t);
        close_trial(&t);
    }
    return bench.wrong > 0;
}
