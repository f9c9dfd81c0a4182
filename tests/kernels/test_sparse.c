/* Tests of the CPU's sparse kernels: top-k against a sort, bit for bit, on every
 * instruction set and with 1 to 4 threads; scatter-add. */
#define DTRAIN__SMALL (-1) /* threads share even the smallest job */
#include "device/cpu/cpu.c"
#include "device/cpu/launch_sparse.c"
#include "instances.h"
#include "dtrain.h"

#include "test.h"

/* ---- Devices: each instruction set, each number of threads ---- */

enum { THREADS = 4 };

static const dtrain__kernels *variants[INSTANCES];
static int variant_count;
static dtrain_device *devices[INSTANCES][THREADS + 1];

static void devices_open(void)
{
    variant_count = instances_find(variants);
    for (int v = 0; v < variant_count; v++)
        for (uint32_t t = 1; t <= THREADS; t++) {
            dtrain_device_desc desc;
            memset(&desc, 0, sizeof desc);
            desc.thread_count = t;
            desc.oversubscribed = true;
            CHECK(!dtrain_device_create(NULL, &desc, &devices[v][t]));
            ((dtrain__cpu *)devices[v][t]->state)->kernels = variants[v];
        }
}

static void devices_close(void)
{
    for (int v = 0; v < variant_count; v++)
        for (int t = 1; t <= THREADS; t++) dtrain_device_destroy(devices[v][t]);
}

/* ---- Values ---- */

typedef enum values {
    NORMAL,
    EQUAL,     /* in magnitude */
    FEW,       /* five magnitudes: the border is inside a crowd of equals */
    MOST_ZERO, /* one in fifty is not */
    CLOSE,     /* they differ in the last bits only */
    WILD,      /* NaNs with payloads, infinities, denormals, both zeros */
    ASCENDING, /* the largest at the end: one thread's list gets all candidates */
    PEAKS,     /* a few large ones side by side, which a sample misses, among equals */
    KINDS
} values;

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* 64 bits that look random (the finalizer of splitmix64). */
static uint64_t mix(uint64_t x)
{
    x = (x + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static float value_of(values kind, int64_t i, int64_t count)
{
    const uint32_t noise = (uint32_t)mix((uint64_t)i * 8 + (uint64_t)kind);
    const float u = (float)(noise >> 8) / 16777216.0f, sign = noise & 1 ? -1.0f : 1.0f;
    const float v = (float)(mix((uint64_t)i + 99) >> 40) / 16777216.0f;
    const float z = sign * (u + v * v * v * 3);
    switch (kind) {
    case EQUAL: return sign * 0.75f;
    case FEW: return sign * (float)(1 + (int)(u * 20) % 5);
    case MOST_ZERO: return u < 0.02f ? z : sign * 0.0f;
    case CLOSE: return sign * (1 + 1.1920929e-7f * (float)(int)(u * 5000));
    case WILD:
        if (u < 0.01f) return of_bits(0x7fc00001u | (noise & 0xfff) | (noise & 1) << 31);
        if (u < 0.02f) return sign * of_bits(0x7f800000u);
        if (u < 0.4f) return sign * 0.0f;
        return u < 0.7f ? of_bits((noise & 0xfffff) | (noise & 1) << 31) : z * 1e30f;
    case ASCENDING: return sign * (float)(i + 1);
    case PEAKS: return i >= count / 2 && i < count / 2 + 9 ? z + 100 : 1.0f;
    default: return z;
    }
}

/* ---- Top-k: the oracle sorts ---- */

typedef struct place {
    uint32_t magnitude; /* the largest for every NaN */
    int32_t index;
} place;

static int by_magnitude(const void *left, const void *right)
{
    const place *a = (const place *)left, *b = (const place *)right;
    if (a->magnitude != b->magnitude) return a->magnitude < b->magnitude ? 1 : -1;
    return (a->index > b->index) - (a->index < b->index);
}

static int by_index(const void *left, const void *right)
{
    const int32_t a = *(const int32_t *)left, b = *(const int32_t *)right;
    return (a > b) - (a < b);
}

/* The indices of the k largest of x, ascending. */
static void oracle(const float *x, int64_t count, int64_t k, int32_t *indices)
{
    place *places = (place *)malloc((size_t)count * sizeof *places);
    for (int64_t i = 0; i < count; i++) {
        places[i].magnitude = bits_of(x[i]) & 0x7fffffffu;
        if (places[i].magnitude > 0x7f800000u) places[i].magnitude = 0x7fffffffu;
        places[i].index = (int32_t)i;
    }
    qsort(places, (size_t)count, sizeof *places, by_magnitude);
    for (int64_t i = 0; i < k; i++) indices[i] = places[i].index;
    qsort(indices, (size_t)k, sizeof *indices, by_index);
    free(places);
}

typedef enum feedback { PLAIN, RESIDUAL, VELOCITY } feedback;

typedef struct state {
    float *x, *residual, *velocity, *values;
    int32_t *indices;
} state;

static state state_make(int64_t count)
{
    const size_t n = (size_t)count;
    state s = {(float *)calloc(n, 4), (float *)calloc(n, 4), (float *)calloc(n, 4),
               (float *)calloc(n, 4), (int32_t *)calloc(n, 4)};
    return s;
}

static void state_free(state *s)
{
    free(s->x), free(s->residual), free(s->velocity), free(s->values), free(s->indices);
}

static void state_fill(state *s, values kind, int64_t count, int step)
{
    for (int64_t i = 0; i < count; i++) {
        const float x = value_of(kind, i, count);
        s->x[i] = step == 0 ? x : x * (1 + 0.3f * (float)(int)((i + 7 * step) % 5));
    }
}

#define MOMENTUM 0.7f

/* One step as the comment of dtrain_topk_args says it; volatile: each operation is rounded. */
static void expect(state *s, int64_t count, int64_t k, feedback mode)
{
    for (int64_t i = 0; i < count && mode != PLAIN; i++) {
        volatile float step = s->x[i];
        if (mode == VELOCITY) {
            volatile float product = MOMENTUM * s->velocity[i];
            step = s->velocity[i] = product + step;
        }
        s->residual[i] = s->residual[i] + step;
    }
    float *from = mode == PLAIN ? s->x : s->residual;
    oracle(from, count, k, s->indices);
    for (int64_t i = 0; i < k; i++) {
        const int32_t at = s->indices[i];
        s->values[i] = from[at];
        if (mode != PLAIN) s->residual[at] = 0;
        if (mode == VELOCITY) s->velocity[at] = 0;
    }
}

static bool same_floats(const float *a, const float *b, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (bits_of(a[i]) != bits_of(b[i]) && !(a[i] != a[i] && b[i] != b[i])) return false;
    return true;
}

/* `steps` steps on one device against as many of the oracle. */
static void check_topk(const dtrain_device *device, values kind, int64_t count, int64_t k,
                       feedback mode, int steps, const char *who)
{
    state want = state_make(count), got = state_make(count);
    for (int step = 0; step < steps; step++) {
        const dtrain_topk_args args = {count,
                                       k,
                                       got.x,
                                       mode == PLAIN ? NULL : got.residual,
                                       got.values,
                                       got.indices,
                                       mode == VELOCITY ? got.velocity : NULL,
                                       MOMENTUM};
        state_fill(&want, kind, count, step);
        state_fill(&got, kind, count, step);
        expect(&want, count, k, mode);
        CHECK_MSG(device->ops->topk((dtrain_device *)(uintptr_t)device, &args) == DTRAIN_OK, "%s",
                  dtrain_last_error());
        const bool same = memcmp(want.indices, got.indices, (size_t)k * 4) == 0 &&
                          same_floats(want.values, got.values, k) &&
                          (mode != PLAIN || memcmp(want.values, got.values, (size_t)k * 4) == 0) &&
                          same_floats(want.residual, got.residual, count) &&
                          same_floats(want.velocity, got.velocity, count) &&
                          same_floats(want.x, got.x, count);
        CHECK_MSG(same, "%s: kind %d, count %lld, k %lld, feedback %d, step %d", who, (int)kind,
                  (long long)count, (long long)k, (int)mode, step);
    }
    state_free(&want), state_free(&got);
}

static void check_everywhere(values kind, int64_t count, int64_t k, feedback mode, int steps)
{
    for (int v = 0; v < variant_count; v++)
        for (int t = 1; t <= THREADS; t++)
            if (t == 1 || t == 1 + (int)((count + k) % 3) + (v == 0))
                check_topk(devices[v][t], kind, count, k, mode, steps, variants[v]->name);
}

/* All counts around the width of a vector, of a group, of a block; k from one element to all. */
static void test_topk_small(void)
{
    const int64_t counts[] = {1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 257, 1023, 1024, 1025, 2051};
    devices_open();
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int kind = 0; kind < KINDS; kind++) {
            const int64_t n = counts[c], ks[] = {1, n / 7, n / 2, n - 1, n};
            for (int i = 0; i < 5; i++)
                if (ks[i] > 0)
                    check_everywhere((values)kind, n, ks[i], (feedback)((i + kind) % 3), 2);
        }
    devices_close();
}

/* Counts with a threshold; ks from where it leaves next to nothing to where there is none. */
static void test_topk_sampled(void)
{
    const int64_t counts[] = {8192, 8193, 12011, 16000};
    devices_open();
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int kind = 0; kind < KINDS; kind++) {
            const int64_t n = counts[c], ks[] = {1, n / 1000, n / 100, n / 10, n / 3, n};
            for (int i = (kind + (int)c) % 2; i < 6; i += 2)
                for (int v = 0; v < variant_count; v++)
                    check_topk(devices[v][1 + (i / 2 + kind + v) % THREADS], (values)kind, n, ks[i],
                               (feedback)((i + kind) % 3), 1, variants[v]->name);
        }
    devices_close();
}

/* Momentum over several steps: what was left out comes back, what was taken starts from zero. */
static void test_topk_steps(void)
{
    devices_open();
    check_everywhere(NORMAL, 30011, 300, VELOCITY, 6);
    check_everywhere(NORMAL, 30011, 300, RESIDUAL, 6);
    check_everywhere(WILD, 9001, 700, VELOCITY, 3);
    devices_close();
}

static void test_topk_large(void)
{
    devices_open();
    check_topk(devices[0][1], NORMAL, 1 << 20, 1049, PLAIN, 1, "one thread");
    check_topk(devices[0][3], NORMAL, 1 << 20, 10486, VELOCITY, 2, "three threads");
    check_topk(devices[variant_count > 1][2], WILD, 1 << 20, 52428, RESIDUAL, 1, "two threads");
    devices_close();
}

/* Which way the selection takes, seen at its own scratch: what the pass leaves for the take. */
static int64_t candidates_of(values kind, int64_t count, int64_t k, int lists)
{
    state s = state_make(count);
    state_fill(&s, kind, count, 0);
    const dtrain_topk_args args = {count, k, s.x, NULL, s.values, s.indices, NULL, 0};
    dtrain_device *device = devices[0][lists];
    dtrain__cpu *cpu = (dtrain__cpu *)device->state;
    CHECK(device->ops->topk(device, &args) == DTRAIN_OK);
    const int64_t *found = (const int64_t *)(void *)(cpu->scratch + DTRAIN__TOPK_BINS);
    int64_t total = 0;
    for (int i = 0; i < lists; i++) {
        if (found[i] < 0) total = INT32_MIN;
        total += found[i];
    }
    state_free(&s);
    return total;
}

/* The inputs above do what they are for: usual ones are settled by the lists, which stay short;
 * equals overflow them; peaks that the sample misses leave too few. */
static void test_topk_ways(void)
{
    enum { COUNT = 65536, K = 655 };
    devices_open();
    int64_t found = candidates_of(NORMAL, COUNT, K, 1);
    CHECK_MSG(found >= K && found < 8 * K, "%lld candidates", (long long)found);
    CHECK(candidates_of(NORMAL, COUNT, K, 4) == found);
    found = candidates_of(ASCENDING, COUNT, K, 1);
    CHECK_MSG(found >= K && found < 8 * K, "%lld candidates", (long long)found);
    CHECK(candidates_of(EQUAL, COUNT, K, 1) < 0 && candidates_of(EQUAL, COUNT, K, 3) < 0);
    CHECK(candidates_of(NORMAL, COUNT, COUNT * 2 / 3, 1) < 0); /* no threshold */
    found = candidates_of(MOST_ZERO, COUNT, COUNT / 25, 1);
    CHECK_MSG(found >= 0 && found < COUNT / 25, "%lld candidates", (long long)found);
    CHECK(candidates_of(PEAKS, COUNT, 5, 1) < 0);
    devices_close();
}

/* A sample that hits nothing but large values: its threshold lets fewer than k through. */
static void test_topk_unlucky_sample(void)
{
    enum { COUNT = 65536, SIZE = COUNT / 64, STRIDE = 64, K = 3000 };
    devices_open();
    state want = state_make(COUNT), got = state_make(COUNT);
    for (int64_t i = 0; i < COUNT; i++) want.x[i] = got.x[i] = 0.5f * value_of(NORMAL, i, COUNT);
    for (int64_t i = 0; i < SIZE; i++) {
        const int64_t jitter = (int64_t)(((uint64_t)i * 2654435761u & 0xffffffffu) * STRIDE >> 32);
        want.x[i * STRIDE + jitter] = got.x[i * STRIDE + jitter] = 1000 + (float)i;
    }
    expect(&want, COUNT, K, PLAIN);
    const dtrain_topk_args args = {COUNT, K, got.x, NULL, got.values, got.indices, NULL, 0};
    for (int v = 0; v < variant_count; v++) {
        dtrain_device *device = devices[v][1 + v % THREADS];
        CHECK(device->ops->topk(device, &args) == DTRAIN_OK);
        CHECK(memcmp(want.indices, got.indices, K * 4) == 0 &&
              memcmp(want.values, got.values, K * 4) == 0);
        const dtrain__cpu *cpu = (const dtrain__cpu *)device->state;
        const int64_t *found = (const int64_t *)(void *)(cpu->scratch + DTRAIN__TOPK_BINS);
        CHECK_MSG(v > 0 || (found[0] >= 0 && found[0] < K), "%lld found", (long long)found[0]);
    }
    state_free(&want), state_free(&got);
    devices_close();
}

static void test_topk_errors(void)
{
    float x[4] = {1, 2, 3, 4}, v[4];
    int32_t at[4];
    devices_open();
    dtrain_device *cpu = devices[0][1];
    const dtrain_topk_args none = {4, 0, x, NULL, v, at, NULL, 0},
                           more = {4, 5, x, NULL, v, at, NULL, 0},
                           empty = {0, 0, x, NULL, v, at, NULL, 0},
                           lone = {4, 1, x, NULL, v, at, x, 0.5f},
                           huge = {(int64_t)1 << 31, 1, x, NULL, v, at, NULL, 0};
    CHECK(cpu->ops->topk(cpu, &none) == DTRAIN_ERROR_ARGUMENT);
    CHECK(cpu->ops->topk(cpu, &more) == DTRAIN_ERROR_ARGUMENT);
    CHECK(cpu->ops->topk(cpu, &empty) == DTRAIN_ERROR_ARGUMENT);
    CHECK(cpu->ops->topk(cpu, &huge) == DTRAIN_ERROR_ARGUMENT);
    CHECK(cpu->ops->topk(cpu, &lone) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "residual") != NULL && x[0] == 1);
    devices_close();
}

/* ---- Scatter-add ---- */

static void test_scatter_add(void)
{
    float values[3] = {1, 2, 3}, out[5] = {1, 1, 1, 1, 1};
    const int32_t good[3] = {4, 0, 2}, bad[3] = {4, 0, 5};
    devices_open();
    dtrain_device *cpu = devices[0][1];
    dtrain_scatter_add_args args = {5, 3, 0.5f, values, good, out};
    CHECK(cpu->ops->scatter_add(cpu, &args) == DTRAIN_OK);
    CHECK(out[0] == 2 && out[1] == 1 && out[2] == 2.5f && out[3] == 1 && out[4] == 1.5f);
    args.indices = bad;
    CHECK(cpu->ops->scatter_add(cpu, &args) == DTRAIN_ERROR_DATA && out[4] == 1.5f);
    args.k = 0; /* nothing, whatever the indices */
    CHECK(cpu->ops->scatter_add(cpu, &args) == DTRAIN_OK && out[0] == 2);
    args.k = -1;
    CHECK(cpu->ops->scatter_add(cpu, &args) == DTRAIN_ERROR_ARGUMENT);
    devices_close();
}

/* ---- Orthonormal columns ---- */

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_topk_small);
    RUN(test_topk_sampled);
    RUN(test_topk_steps);
    RUN(test_topk_large);
    RUN(test_topk_ways);
    RUN(test_topk_unlucky_sample);
    RUN(test_topk_errors);
    RUN(test_scatter_add);
    return test_summary();
}
