/* Tests of sparse.cuh: top-k against a sort, bit for bit, and, with velocity,
 * against the CPU device; scatter-add. */
#include "test.h"
#include "dtrain.h"
#include "cuda_testing.h"

/* What the elements look like: the histogram of magnitudes, and with it the way of the selection. */
typedef enum values {
    NORMAL,
    EQUAL,     /* in magnitude: more candidates than the side buffer has room for */
    FEW,       /* five magnitudes: the border is inside a crowd of equals */
    MOST_ZERO, /* one in fifty is not */
    CLOSE, /* they differ in the last bits only: one bucket of the first digit, all digits count */
    WILD,  /* NaN, infinities, denormals, both zeros */
    KINDS
} values;

/* Quiet NaNs of both signs that differ in their bits, but not in rank. */
static float nan_of(int64_t i)
{
    const uint32_t bits = 0x7fc00000u | (uint32_t)(i * 7919 % 4096) | (i % 2 ? 0x80000000u : 0);
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float value_of(values kind, int64_t i)
{
    const float z = dtrain_random_normal(3, (uint64_t)kind, (uint64_t)i);
    const float u = dtrain_random_uniform(4, (uint64_t)kind, (uint64_t)i),
                sign = u < 0.5f ? -1.0f : 1.0f;
    switch (kind) {
    case EQUAL: return sign * 0.75f;
    case FEW: return sign * (float)(1 + (int)(fabsf(z) * 2) % 5);
    case MOST_ZERO: return u < 0.02f ? z : sign * 0.0f;
    case CLOSE: return sign * (1 + 1.1920929e-7f * (float)(int)(u * 5000));
    case WILD:
        if (u < 0.01f) return nan_of(i);
        if (u < 0.02f) return z < 0 ? -INFINITY : INFINITY;
        return u < 0.4f ? sign * 0.0f : u < 0.7f ? z * 1e-40f : z * 1e30f;
    default: return z;
    }
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Largest first; NaN above everything; of equals the lower index. */
static const float *sorted_values;
static int by_magnitude(const void *left, const void *right)
{
    const int32_t i = *(const int32_t *)left, j = *(const int32_t *)right;
    uint32_t a = bits_of(sorted_values[i]) & 0x7fffffffu,
             b = bits_of(sorted_values[j]) & 0x7fffffffu;
    if (a > 0x7f800000u) a = 0x7fffffffu;
    if (b > 0x7f800000u) b = 0x7fffffffu;
    return a != b ? (a < b ? 1 : -1) : i < j ? -1 : i > j;
}
static int by_index(const void *left, const void *right)
{
    const int32_t i = *(const int32_t *)left, j = *(const int32_t *)right;
    return i < j ? -1 : i > j;
}

/* Device memory has these floats, bit for bit; which NaN a sum with NaN gives is the processor's choice. */
static bool holds(const void *device, const float *want, int64_t count)
{
    float *got = (float *)malloc((size_t)count * sizeof *got);
    bool same = true;
    gpu_read(got, device, (size_t)count * sizeof *got);
    for (int64_t i = 0; i < count; i++)
        same = same &&
               (bits_of(got[i]) == bits_of(want[i]) || (got[i] != got[i] && want[i] != want[i]));
    free(got);
    return same;
}

static bool holds_indices(const void *device, const int32_t *want, int64_t count)
{
    int32_t *got = (int32_t *)malloc((size_t)count * sizeof *got);
    gpu_read(got, device, (size_t)count * sizeof *got);
    const bool same = memcmp(got, want, (size_t)count * sizeof *got) == 0;
    free(got);
    return same;
}

typedef struct topk_case {
    int64_t count, k;
    values kind;
    bool residual;
    size_t shift; /* bytes behind aligned addresses */
} topk_case;

static void run_topk(const topk_case *c, const float *x, const float *old, const float *total,
                     const float *left, const int32_t *indices, const float *picked, int order)
{
    const size_t bytes = (size_t)c->count * sizeof(float), k_bytes = (size_t)c->k * sizeof(float);
    dtrain_topk_args args = {c->count, c->k, NULL, NULL, NULL, NULL, NULL, 0};
    char what[128];
    snprintf(what, sizeof what, "count %d, k %d, kind %d, residual %d, shift %d, order %d",
             (int)c->count, (int)c->k, (int)c->kind, (int)c->residual, (int)c->shift, order);
    args.x = (float *)gpu_give(c->residual ? x : total, bytes, c->shift);
    if (c->residual) args.residual = (float *)gpu_give(old, bytes, c->shift);
    args.values = (float *)gpu_take(k_bytes, 0);
    args.indices = (int32_t *)gpu_take(k_bytes, 0);
    CHECK_MSG(gpu->ops->topk(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
    CHECK_MSG(holds_indices(args.indices, indices, c->k), "%s: indices", what);
    CHECK_MSG(holds(args.values, picked, c->k), "%s: values", what);
    if (c->residual) CHECK_MSG(holds(args.residual, left, c->count), "%s: residual", what);
    else CHECK_MSG(holds(args.x, total, c->count), "%s: x", what);
    gpu_release();
}

static void check_topk(const topk_case *c, int orders)
{
    const size_t bytes = (size_t)c->count * sizeof(float);
    float *x = (float *)malloc(bytes), *old = (float *)malloc(bytes);
    float *total = (float *)malloc(bytes), *left = (float *)malloc(bytes);
    int32_t *indices = (int32_t *)malloc((size_t)c->count * sizeof *indices);
    for (int64_t i = 0; i < c->count; i++) {
        const float value = value_of(c->kind, i);
        x[i] = c->kind == WILD ? value : 0.5f * value;
        old[i] = c->kind == WILD ? 0 : value - x[i];
        total[i] = left[i] = c->residual ? old[i] + x[i] : value;
        indices[i] = (int32_t)i;
    }
    sorted_values = total;
    qsort(indices, (size_t)c->count, sizeof *indices, by_magnitude);
    qsort(indices, (size_t)c->k, sizeof *indices, by_index);
    float *picked = (float *)malloc((size_t)c->k * sizeof *picked);
    for (int64_t i = 0; i < c->k; i++) picked[i] = total[indices[i]], left[indices[i]] = 0;
    for (int order = 0; order < orders; order++) {
        gpu_order(order);
        run_topk(c, x, old, total, left, indices, picked, order);
    }
    gpu_order(0);
    free(x), free(old), free(total), free(left), free(indices), free(picked);
}

/* Every kind of values, with k from one element to all. */
static void test_topk_small(void)
{
    const int64_t counts[] = {1, 2, 31, 2049, 4099};
    gpu_open();
    EACH(n, counts) for (int kind = 0; kind < KINDS; kind++)
    {
        const int64_t k[] = {1, counts[n] / 7, counts[n] - 1, counts[n]};
        EACH(i, k)
        {
            const topk_case c = {counts[n], k[i], (values)kind, i % 2 == 0, n % 2 * 4};
            if (k[i] > 0) check_topk(&c, i == 1 ? GPU_ORDERS : 1);
        }
    }
    gpu_close();
}

/* Several tiles, and for EQUAL and CLOSE too many candidates for the side buffer. */
static void test_topk_tiles(void)
{
    const int64_t k[] = {1, 37, 2000, 13333, 20003};
    gpu_open();
    for (int kind = 0; kind < KINDS; kind++) EACH(i, k)
        {
            const topk_case with = {20011, k[i], (values)kind, true, 0},
                            without = {20003, k[i], (values)kind, false, 4};
            check_topk(&with, i == 2 ? GPU_ORDERS : 1);
            check_topk(&without, i == 3 ? GPU_ORDERS : 1);
        }
    gpu_close();
}

/* Several tiles to a block, and tiles of more than the least size. */
static void test_topk_large(void)
{
    const topk_case cases[] = {
        {1200000, 1200, NORMAL, true, 0},
        {700001, 70000, FEW, true, 4},
        {600000, 300, EQUAL, true, 0},
        {650007, 600000, NORMAL, false, 0},
    };
    gpu_open();
    EACH(i, cases) check_topk(&cases[i], i == 0 ? 2 : 1);
    gpu_close();
}

/* Its memory is what the header of the section says, and a second selection takes no more. */
static void test_topk_scratch(void)
{
    enum { COUNT = 40000, K = 400 };
    dtrain_device_info before, between, after;
    float *x = (float *)gpu_noise(COUNT, DTRAIN_DTYPE_F32, 1, 1);
    gpu_open();
    dtrain_topk_args args = {COUNT, K, NULL, NULL, NULL, NULL, NULL, 0};
    args.x = (float *)gpu_give(x, COUNT * sizeof *x, 0);
    args.values = (float *)gpu_take(K * 4, 0);
    args.indices = (int32_t *)gpu_take(K * 4, 0);
    CHECK(gpu->ops->query(gpu, &before) == DTRAIN_OK);
    CHECK(gpu->ops->topk(gpu, &args) == DTRAIN_OK && gpu->ops->synchronize(gpu) == DTRAIN_OK);
    CHECK(gpu->ops->query(gpu, &between) == DTRAIN_OK);
    CHECK(gpu->ops->topk(gpu, &args) == DTRAIN_OK && gpu->ops->synchronize(gpu) == DTRAIN_OK);
    CHECK(gpu->ops->query(gpu, &after) == DTRAIN_OK);
    CHECK(before.free_bytes - between.free_bytes < (4u << 20) &&
          after.free_bytes == between.free_bytes);
    gpu_close();
    free(x);
}

/* Selection needs no host: a captured one follows its input. */
static void test_topk_graph(void)
{
    enum { COUNT = 9000, K = 90 };
    float *x = (float *)malloc(COUNT * sizeof *x), picked[K];
    int32_t indices[K];
    dtrain_graph *graph = NULL;
    gpu_open();
    dtrain_topk_args args = {COUNT, K, NULL, NULL, NULL, NULL, NULL, 0};
    float *input = (float *)gpu_take(COUNT * sizeof *x, 0);
    args.x = input;
    args.values = (float *)gpu_take(sizeof picked, 0);
    args.indices = (int32_t *)gpu_take(sizeof indices, 0);
    CHECK(gpu->ops->zero(gpu, input, COUNT * sizeof *x) == DTRAIN_OK);
    CHECK(gpu->ops->topk(gpu, &args) == DTRAIN_OK); /* scratch grows outside of the graph */
    CHECK(gpu->ops->graph_begin(gpu) == DTRAIN_OK && gpu->ops->topk(gpu, &args) == DTRAIN_OK);
    CHECK_MSG(gpu->ops->graph_end(gpu, &graph) == DTRAIN_OK, "%s", dtrain_last_error());
    for (int turn = 0; graph && turn < 3; turn++) {
        for (int64_t i = 0; i < COUNT; i++) x[i] = 1 + (float)((i * 7 + turn * 100) % COUNT);
        gpu_write(input, x, COUNT * sizeof *x);
        CHECK(gpu->ops->graph_launch(gpu, graph) == DTRAIN_OK);
        gpu_read(picked, args.values, sizeof picked);
        gpu_read(indices, args.indices, sizeof indices);
        for (int i = 0; i < K; i++) {
            CHECK(picked[i] > COUNT - K && picked[i] == x[indices[i]]);
            CHECK(i == 0 || indices[i] > indices[i - 1]);
        }
    }
    if (graph) gpu->ops->graph_destroy(gpu, graph);
    gpu_close();
    free(x);
}

/* Momentum and its residual over some steps: the bits of the CPU, also at the tail and unaligned. */
static void test_topk_velocity(void)
{
    enum { STEPS = 4, MOST = 9001 };
    static float x[MOST], residual[MOST], velocity[MOST], values[MOST];
    static int32_t indices[MOST];
    const int64_t counts[] = {7, 4096, MOST};
    const dtrain_device_desc desc = {0};
    dtrain_device *cpu;
    gpu_open();
    CHECK(dtrain_device_create(NULL, &desc, &cpu) == DTRAIN_OK);
    EACH(n, counts) for (int wild = 0; wild < 2; wild++)
    {
        const int64_t count = counts[n], k = (count + 19) / 20;
        const size_t bytes = (size_t)count * sizeof *x, shift = n == 2 ? 4 : 0;
        memset(residual, 0, sizeof residual);
        memset(velocity, 0, sizeof velocity);
        dtrain_topk_args own = {count, k, x, residual, values, indices, velocity, 0.9f};
        dtrain_topk_args args = own;
        float *input = (float *)gpu_take(bytes, shift);
        args.x = input;
        args.residual = (float *)gpu_give(residual, bytes, shift);
        args.velocity = (float *)gpu_give(velocity, bytes, shift);
        args.values = (float *)gpu_take((size_t)k * 4, 0);
        args.indices = (int32_t *)gpu_take((size_t)k * 4, 0);
        for (int step = 0; step < STEPS; step++) {
            gpu_order(step % GPU_ORDERS);
            for (int64_t i = 0; i < count; i++)
                x[i] = value_of(wild ? WILD : NORMAL, i + step * count);
            gpu_write(input, x, bytes);
            CHECK(cpu->ops->topk(cpu, &own) == DTRAIN_OK);
            CHECK_MSG(gpu->ops->topk(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
            CHECK_MSG(holds_indices(args.indices, indices, k), "step %d: indices", step);
            CHECK_MSG(holds(args.values, values, k), "step %d: values", step);
            CHECK_MSG(holds(args.residual, residual, count), "step %d: residual", step);
            CHECK_MSG(holds(args.velocity, velocity, count), "step %d: velocity", step);
        }
        gpu_order(0);
        gpu_release();
    }
    dtrain_device_destroy(cpu);
    gpu_close();
}

static void test_topk_errors(void)
{
    gpu_open();
    dtrain_topk_args args = {10, 0, NULL, NULL, NULL, NULL, NULL, 0};
    CHECK(gpu->ops->topk(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    args.k = 11;
    CHECK(gpu->ops->topk(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    CHECK_MSG(strstr(dtrain_last_error(), "11 of 10") != NULL, "%s", dtrain_last_error());
    args.count = (int64_t)1 << 31;
    CHECK(gpu->ops->topk(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    args.count = -1;
    CHECK(gpu->ops->topk(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    args.count = args.k = 0;
    CHECK(gpu->ops->topk(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
    float *memory = (float *)gpu_take(64, 0);
    const dtrain_topk_args lone = {4, 1, memory, NULL, memory, NULL, memory, 0.5f};
    CHECK(gpu->ops->topk(gpu, &lone) == DTRAIN_ERROR_ARGUMENT);
    CHECK(gpu->ops->synchronize(gpu) == DTRAIN_OK);
    gpu_release();
    gpu_close();
}

/* ---- Scatter-add ---- */

static void test_scatter_add(void)
{
    enum { COUNT = 5000, K = 1700 };
    float *out = (float *)gpu_noise(COUNT, DTRAIN_DTYPE_F32, 1, 1),
          *picked = (float *)gpu_noise(K, DTRAIN_DTYPE_F32, 2, 1);
    int32_t indices[K];
    float want[COUNT];
    gpu_open();
    memcpy(want, out, sizeof want);
    for (int i = 0; i < K; i++) {
        indices[i] =
            (int32_t)((int64_t)i * 1237 % COUNT); /* 1237 and 5000 have no common divisor */
        want[indices[i]] = out[indices[i]] + 0.25f * picked[i];
    }
    EACH_ORDER(order)
    {
        dtrain_scatter_add_args args = {COUNT, K, 0.25f, NULL, NULL, NULL};
        args.values = (float *)gpu_give(picked, K * sizeof *picked, 4);
        args.indices = (int32_t *)gpu_give(indices, sizeof indices, 4);
        args.out = (float *)gpu_give(out, sizeof want, 4);
        CHECK_MSG(gpu->ops->scatter_add(gpu, &args) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK(holds(args.out, want, (int64_t)(sizeof want / sizeof *want)));
        args.k = -1;
        CHECK(gpu->ops->scatter_add(gpu, &args) == DTRAIN_ERROR_ARGUMENT);
        args.k = 0;
        CHECK(gpu->ops->scatter_add(gpu, &args) == DTRAIN_OK);
        CHECK(holds(args.out, want, (int64_t)(sizeof want / sizeof *want)));
        gpu_release();
    }
    gpu_close();
    free(out), free(picked);
}

/* A bad index is reported, and nothing is added for it. */
static void test_scatter_add_bad_index(void)
{
    const int32_t indices[2][4] = {{0, 6, 5, 3}, {0, -1, 5, 3}};
    const float picked[4] = {1, 2, 3, 4}, zeros[6] = {0}, want[6] = {1, 0, 0, 4, 0, 3};
    gpu_open();
    for (int bad = 0; bad < 2; bad++) {
        dtrain_scatter_add_args args = {6, 4, 1, NULL, NULL, NULL};
        args.values = (float *)gpu_give(picked, sizeof picked, 0);
        args.indices = (int32_t *)gpu_give(indices[bad], sizeof indices[bad], 0);
        args.out = (float *)gpu_give(zeros, sizeof zeros, 0);
        CHECK(gpu->ops->scatter_add(gpu, &args) == DTRAIN_OK);
        CHECK(gpu->ops->synchronize(gpu) == DTRAIN_ERROR_DATA);
        CHECK_MSG(strstr(dtrain_last_error(), bad ? "index -1 at place 1"
                                                  : "index 6 at place 1 is outside [0, 6)") != NULL,
                  "%s", dtrain_last_error());
        CHECK(holds(args.out, want, (int64_t)(sizeof want / sizeof *want)));
        gpu_release();
    }
    gpu_close();
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (gpu_missing()) {
        SKIP(test_cuda_sparse, gpu_missing());
        return test_summary();
    }
    RUN(test_topk_small);
    RUN(test_topk_tiles);
    RUN(test_topk_large);
    RUN(test_topk_scratch);
    RUN(test_topk_graph);
    RUN(test_topk_velocity);
    RUN(test_topk_errors);
    RUN(test_scatter_add);
    RUN(test_scatter_add_bad_index);
    return test_summary();
}
