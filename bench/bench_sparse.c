/* bench_sparse.c: the CPU kernels of compressed communication: top-k and scatter-add.
 *
 *   run:     make bench, or build/bench/bench_sparse [--threads 2] [--reps 9] [--log FILE]
 *   build:   cc -O2 -I. -Ibench bench/bench_sparse.c -o bench_sparse -lm -lpthread
 *
 * A repetition runs everyone once, one after the other, beginning with another one each time: the
 * machine's drift then meets all alike, and ratios are taken within a repetition.
 *
 *   ms        of a call, median (min to max) over the repetitions
 *   GB/s      bytes / time: 4 bytes an element (read x), with residual 12 (and residual += x), with
 *             velocity 20 (and velocity = momentum velocity + x); scatter-add 8 bytes an entry and a
 *             cache line read and written
 *   floor     the rate of one thread that does nothing but move the same streams: a read of x, an
 *             update y += x, both; for scatter-add the update
 *   of_floor  our GB/s over threads x floor
 *   naive     the time of the obvious C over ours: quickselect on the magnitudes and one more pass;
 *             the bare loop
 *   correct   the bits of the naive result, for top-k after three steps */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "bench.h"

enum { MAX_REPS = 64, FLOOR = 0, OURS = 1, NAIVE = 2, RUNNERS = 3 };

static struct {
    long threads, reps;
} opt = {1, 9};

static dtrain_device *device;

/* ---- The floor ---- */

enum { PLAIN = 0, RESIDUAL = 1, VELOCITY = 2 };
static const char *const mode_names[] = {"plain", "residual", "velocity"};
static volatile uint32_t sink;

#define DEFINE_STREAMS(id, target, lanes)                                                        \
    target static void streams_##id(int mode, const float *x, float *r, float *v, int64_t count) \
    {                                                                                            \
        typedef uint32_t words __attribute__((vector_size(4 * (lanes)), may_alias));             \
        typedef float vec __attribute__((vector_size(4 * (lanes)), may_alias));                  \
        const words *from = (const words *)(const void *)x;                                      \
        words a = {0}, b = a, c = a, d = a;                                                      \
        for (int64_t i = 0; mode == PLAIN && i + 4 * (lanes) <= count;                           \
             i += 4 * (lanes), from += 4) {                                                      \
            a |= from[0];                                                                        \
            b |= from[1];                                                                        \
            c |= from[2];                                                                        \
            d |= from[3];                                                                        \
        }                                                                                        \
        a |= b | c | d;                                                                          \
        sink = a[0];                                                                             \
        for (int64_t i = 0; mode == RESIDUAL && i + (lanes) <= count; i += (lanes))              \
            *(vec *)(void *)(r + i) += *(const vec *)(const void *)(x + i);                      \
        for (int64_t i = 0; mode == VELOCITY && i + (lanes) <= count; i += (lanes)) {            \
            *(vec *)(void *)(v + i) += *(const vec *)(const void *)(x + i);                      \
            *(vec *)(void *)(r + i) += *(const vec *)(const void *)(v + i);                      \
        }                                                                                        \
    }

#if defined(__x86_64__) || defined(__i386__)
DEFINE_STREAMS(avx512, BENCH_TARGET("avx512f"), 16)
DEFINE_STREAMS(avx2, BENCH_TARGET("avx2"), 8)
#endif
DEFINE_STREAMS(baseline, BENCH_BASELINE, 4)

static void streams(int mode, const float *x, float *r, float *v, int64_t count)
{
#if defined(__x86_64__) || defined(__i386__)
    if (__builtin_cpu_supports("avx512f")) streams_avx512(mode, x, r, v, count);
    else if (__builtin_cpu_supports("avx2")) streams_avx2(mode, x, r, v, count);
    else
#endif
        streams_baseline(mode, x, r, v, count);
}

/* ---- The obvious C ---- */

static uint32_t magnitude(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= 0x7fffffffu;
    return bits > 0x7f800000u ? 0x7fffffffu : bits;
}

/* The k-th largest, k from 1; keys are reordered. */
static uint32_t quickselect(uint32_t *keys, int64_t count, int64_t k)
{
    int64_t low = 0, high = count - 1;
    while (low < high) {
        const uint32_t pivot = keys[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (keys[i] > pivot) i++;
            while (keys[j] < pivot) j--;
            if (i > j) break;
            const uint32_t key = keys[i];
            keys[i++] = keys[j];
            keys[j--] = key;
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else break;
    }
    return keys[k - 1];
}

static void naive_topk(const dtrain_topk_args *a, uint32_t *keys)
{
    const float *from = a->residual ? a->residual : a->x;
    int64_t equals = a->k, taken = 0;
    for (int64_t i = 0; i < a->count; i++) {
        volatile float product = a->velocity ? a->momentum * a->velocity[i] : 0;
        if (a->velocity) a->velocity[i] = product + a->x[i];
        if (a->residual) a->residual[i] += a->velocity ? a->velocity[i] : a->x[i];
        keys[i] = magnitude(from[i]);
    }
    const uint32_t border = quickselect(keys, a->count, a->k);
    for (int64_t i = 0; i < a->count; i++) equals -= magnitude(from[i]) > border;
    for (int64_t i = 0; i < a->count && taken < a->k; i++) {
        const uint32_t m = magnitude(from[i]);
        if (m < border || (m == border && equals-- <= 0)) continue;
        a->values[taken] = from[i];
        a->indices[taken++] = (int32_t)i;
        if (a->residual) a->residual[i] = 0;
        if (a->velocity) a->velocity[i] = 0;
    }
}

/* ---- A trial: one kernel at one size, all that it is compared with ---- */

typedef enum kind { TOPK, SCATTER_ADD } kind;

typedef struct trial {
    kind kind;
    int64_t count, k;
    int mode;
    double bytes;
    float *x; /* read by all */
    float *residual[RUNNERS], *velocity[RUNNERS], *values[RUNNERS];
    int32_t *indices[RUNNERS];
    uint32_t *keys;
    double seconds[RUNNERS][MAX_REPS];
    bool correct;
} trial;

static void *take(int64_t count)
{
    void *memory;
    const size_t bytes = (size_t)count * 4;
    if (device->ops->alloc(device, bytes, &memory) != DTRAIN_OK) {
        fprintf(stderr, "bench_sparse: %s\n", dtrain_last_error());
        exit(1);
    }
    memset(memory, 0, bytes);
    return memory;
}

static float *noise(int64_t count, uint64_t stream)
{
    float *x = (float *)take(count);
    for (int64_t i = 0; i < count; i += 4) { /* normal, as gradients are, nearly */
        uint32_t words[4];
        dtrain__philox(7, stream, (uint64_t)i, words);
        for (int64_t j = 0; j < 4 && i + j < count; j++) {
            const uint32_t w = words[j];
            const float u = (float)((w & 0x7ff) + (w >> 11 & 0x7ff) + (w >> 22)) / 1024.0f - 2.5f;
            x[i + j] = u * u * u + (float)(w >> 3 & 0xffff) * 1e-6f;
        }
    }
    return x;
}

static void give(void *memory, int64_t count)
{
    device->ops->free(device, memory, (size_t)count * 4);
}

static void open_trial(trial *t)
{
    const int64_t n = t->count;
    t->x = noise(n, 1);
    t->keys = (uint32_t *)take(n);
    for (int r = FLOOR; r <= NAIVE; r++) {
        t->residual[r] = (float *)take(n);
        t->velocity[r] = (float *)take(n);
        t->values[r] = noise(t->k, 4);
        t->indices[r] = (int32_t *)take(t->k);
        for (int64_t i = 0; i < t->k; i++)
            t->indices[r][i] = (int32_t)(i * (t->count / t->k) + i % (t->count / t->k));
    }
}

static void close_trial(trial *t)
{
    const int64_t n = t->count;
    give(t->x, n);
    give(t->keys, n);
    for (int r = FLOOR; r <= NAIVE; r++) {
        give(t->residual[r], n);
        give(t->velocity[r], n);
        give(t->values[r], t->k);
        give(t->indices[r], t->k);
    }
}

static void call_topk(trial *t, int runner)
{
    const dtrain_topk_args args = {t->count,
                                   t->k,
                                   t->x,
                                   t->mode >= RESIDUAL ? t->residual[runner] : NULL,
                                   t->values[runner],
                                   t->indices[runner],
                                   t->mode == VELOCITY ? t->velocity[runner] : NULL,
                                   0.9f};
    if (runner == NAIVE) naive_topk(&args, t->keys);
    else if (device->ops->topk(device, &args) != DTRAIN_OK) t->correct = false;
}

static void call_scatter_add(trial *t, int runner)
{
    const dtrain_scatter_add_args args = {
        t->count, t->k, 0.5f, t->values[runner], t->indices[runner], t->residual[runner]};
    if (runner == NAIVE)
        for (int64_t i = 0; i < t->k; i++) args.out[args.indices[i]] += 0.5f * args.values[i];
    else if (device->ops->scatter_add(device, &args) != DTRAIN_OK) t->correct = false;
}

static void call(trial *t, int runner)
{
    if (runner == FLOOR)
        streams(t->kind == TOPK ? t->mode : RESIDUAL, t->x, t->residual[FLOOR], t->velocity[FLOOR],
                t->count);
    else if (t->kind == TOPK) call_topk(t, runner);
    else call_scatter_add(t, runner);
}

/* ---- Correct ---- */

static bool equal(const void *const *arrays, int64_t count)
{
    return memcmp(arrays[OURS], arrays[NAIVE], (size_t)count * 4) == 0;
}

static void check(trial *t)
{
    const void *const *residual = (const void *const *)t->residual;
    t->correct = true;
    for (int step = 0; step < (t->kind == TOPK ? 3 : 1); step++) {
        call(t, OURS);
        call(t, NAIVE);
        t->correct = t->correct && equal(residual, t->count) &&
                     equal((const void *const *)t->velocity, t->count) &&
                     equal((const void *const *)t->values, t->k) &&
                     equal((const void *const *)t->indices, t->k);
    }
}

/* ---- Measure and report ---- */

static double measure(trial *t, int runner)
{
    const double least = bench.quick ? 0.0005 : 0.01, start = dtrain_seconds();
    double elapsed;
    int calls = 0;
    do {
        call(t, runner);
        calls++;
        elapsed = dtrain_seconds() - start;
    } while (elapsed < least);
    return elapsed / calls;
}

/* a's time over b's within a repetition. */
static spread ratio(const trial *t, int a, int b, double scale)
{
    return ratios_of(t->seconds[a], t->seconds[b], (int)opt.reps, scale);
}

static void report(const trial *t)
{
    static const char *const kinds[] = {"topk", "scatter_add"};
    const spread seconds = spread_of(t->seconds[OURS], (int)opt.reps);
    const spread ms = {1e3 * seconds.median, 1e3 * seconds.min, 1e3 * seconds.max};
    const double floor = median(t->seconds[FLOOR], (int)opt.reps);
    const double moved = t->kind == SCATTER_ADD ? 12.0 * (double)t->count : t->bytes;
    bench_begin("sparse");
    bench_string("kernel", -13, kinds[t->kind]);
    bench_number("count", 9, 0, (double)t->count);
    bench_number("k", 7, 0, (double)t->k);
    bench_string("mode", -8, t->kind == TOPK ? mode_names[t->mode] : "");
    bench_number("threads", 0, 0, (double)opt.threads);
    bench_string("isa", 0, bench_kernels(false));
    bench_spread("ms", 8, 3, ms);
    bench_number("GB/s", 6, 1, 1e-9 * t->bytes / seconds.median);
    bench_number("floor", 6, 1, 1e-9 * moved / floor);
    bench_spread("of_floor", 5, 2, ratio(t, FLOOR, OURS, t->bytes / moved / (double)opt.threads));
    bench_number("naive", 6, 1, ratio(t, NAIVE, OURS, 1).median);
    bench_end(t->correct);
}

static void run(kind which, int64_t count, int64_t k, int mode)
{
    static trial t;
    memset(&t, 0, sizeof t);
    t.kind = which;
    t.count = count;
    t.k = k;
    t.mode = mode;
    t.bytes = which == TOPK ? (mode == PLAIN      ? 4.0
                               : mode == RESIDUAL ? 12.0
                                                  : 20.0) *
                                  (double)count
                            : (8.0 + 128) * (double)k;
    open_trial(&t);
    check(&t);
    for (int r = 0; r < opt.reps; r++)
        for (int i = 0; i < RUNNERS; i++) {
            const int runner = (r + i) % RUNNERS;
            t.seconds[runner][r] = measure(&t, runner);
        }
    report(&t);
    close_trial(&t);
}

static void run_all(void)
{
    static const int64_t sizes[] = {65536, 1 << 20, 1 << 24};
    for (int s = 0; s < (bench.quick ? 1 : 3); s++)
        for (int64_t part = 100; part <= 1000; part *= 10)
            for (int mode = PLAIN; mode <= VELOCITY; mode++)
                run(TOPK, sizes[s], sizes[s] / part, mode);
    for (int s = 0; s < (bench.quick ? 1 : 3); s++)
        run(SCATTER_ADD, sizes[s], sizes[s] / 100, PLAIN);
}

static const flag flag_table[] = {
    {"--threads", 'i', &opt.threads, 1, 1024, "threads of ours", NULL},
    {"--reps", 'i', &opt.reps, 1, MAX_REPS, "repetitions", NULL},
    BENCH_FLAGS};

int main(int argc, char **argv)
{
    dtrain_device_desc desc;
    if (is_quick(argc, argv)) opt.reps = 3;
    bench_start("bench_sparse", "the CPU kernels of compressed communication", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    memset(&desc, 0, sizeof desc);
    desc.thread_count = (uint32_t)opt.threads;
    if (dtrain_device_create(NULL, &desc, &device) != DTRAIN_OK) {
        fprintf(stderr, "bench_sparse: %s\n", dtrain_last_error());
        return 1;
    }
    bench_title("dtrain: %s, %ld threads, %ld repetitions", bench_kernels(false), opt.threads,
                opt.reps);
    run_all();
    dtrain_device_destroy(device);
    return bench.wrong > 0;
}
