/* test_power_sgd.c: the hook of examples/power_sgd.c, beside PowerSGD of whole matrices in double, whose result
 * depends only on the mean gradient.
 *
 *     test_beside_double    2 to 8 ranks, factors of 1 to 4 columns, one bucket or one for each matrix; residuals are
 *                           what was not applied; all ranks apply the same bits
 *     test_full_rank        as many columns as rows: the mean itself
 *     test_zeros            steps without a gradient take no direction away for ever
 *     test_any_size         gradients of 1e30 and 1e-30 */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#undef CHECK
#define DTRAIN__IMPLEMENTED /* the library that the test is linked with */
#define main example_main
#include "../../examples/power_sgd.c"
#undef main
#undef CHECK
#define CHECK(condition) CHECK_MSG(condition, "%s", #condition)

enum { MATRICES = 3, MOST = 1000, TIMES = 5, MOST_COLUMNS = 16 };
static const int64_t shapes[MATRICES][4] = {{12, 50}, {40, 25}, {16, 5, 6}}; /* the last: 16 x 30 */

typedef struct run {
    int columns, ranks;
    int silent; /* steps without any gradient at the beginning */
    bool apart; /* a bucket for each matrix */
    float scale;
} run;

static int64_t count_of(int p)
{
    int64_t count = 1;
    for (int d = 0; shapes[p][d]; d++) count *= shapes[p][d];
    return count;
}

static float gradient(const run *r, int p, int rank, int step, int64_t i)
{
    if (step < r->silent) return 0;
    return r->scale * dtrain_random_normal(5, (uint64_t)(p * 100 + rank * 10 + step), (uint64_t)i);
}

/* Gram-Schmidt by the book, in double, twice. */
static void basis(double *x, int64_t rows, int64_t columns)
{
    for (int64_t j = 0; j < 2 * columns; j++) {
        const int64_t to = j % columns;
        double size = 0;
        for (int64_t k = 0; k < to; k++) {
            double dot = 0;
            for (int64_t i = 0; i < rows; i++) dot += x[i * columns + k] * x[i * columns + to];
            for (int64_t i = 0; i < rows; i++) x[i * columns + to] -= dot * x[i * columns + k];
        }
        for (int64_t i = 0; i < rows; i++) size += x[i * columns + to] * x[i * columns + to];
        for (int64_t i = 0; i < rows; i++) x[i * columns + to] /= size > 0 ? sqrt(size) : 1;
    }
}

/* One matrix (m, n) in double: `a` is the mean of gradient plus residual, and becomes what is left; `applied` is what
 * the ranks apply; q (n, k) goes from step to step. */
static void power_step(int64_t m, int64_t n, int64_t k, uint64_t stream, double *a, double *q,
                       double *applied)
{
    double p[40 * MOST_COLUMNS];
    for (int64_t i = 0; i < n * k; i++)
        q[i] += 1e-20 * (double)dtrain_random_normal(3, stream, (uint64_t)i);
    basis(q, n, k);
    for (int64_t i = 0; i < m * k; i++) {
        p[i] = 0;
        for (int64_t j = 0; j < n; j++) p[i] += a[i / k * n + j] * q[j * k + i % k];
    }
    basis(p, m, k);
    for (int64_t i = 0; i < n * k; i++) {
        q[i] = 0;
        for (int64_t j = 0; j < m; j++) q[i] += a[j * n + i / k] * p[j * k + i % k];
    }
    for (int64_t i = 0; i < m * n; i++) {
        applied[i] = 0;
        for (int64_t l = 0; l < k; l++) applied[i] += p[i / n * k + l] * q[i % n * k + l];
        a[i] -= applied[i];
    }
}

typedef struct arrays {
    float value[MATRICES][MOST], grad[MATRICES][MOST], others[8 * MOST];
    double rest[MATRICES][MOST], q[MATRICES][50 * MOST_COLUMNS], applied[MOST];
    double owed[MATRICES][MOST]; /* this rank's gradients so far, less the means so far */
} arrays;

/* Compare the mean that this rank has of matrix p with the oracle's. */
static int check_mean(dtrain_world *world, const run *r, arrays *of, int p, int step)
{
    const int64_t m = shapes[p][0], count = count_of(p), n = count / m;
    double worst = 0, size = 0;
    for (int64_t i = 0; i < count; i++)
        for (int other = 0; other < r->ranks; other++)
            of->rest[p][i] += (double)gradient(r, p, other, step, i) / r->ranks;
    for (int64_t i = 0; i < count; i++) size = fmax(size, fabs(of->rest[p][i]));
    memcpy(of->applied, of->rest[p], (size_t)count * sizeof(double));
    if (r->columns < m)
        power_step(m, n, r->columns, r->apart ? 0 : (uint64_t)p, of->rest[p], of->q[p],
                   of->applied);
    else memset(of->rest[p], 0, (size_t)count * sizeof(double)); /* the mean itself */
    for (int64_t i = 0; i < count; i++) {
        worst = fmax(worst, fabs((double)of->grad[p][i] - of->applied[i]));
        of->owed[p][i] -= (double)of->grad[p][i];
    }
    CHECK_MSG(worst <= 2e-4 * size, "%d ranks, %d columns, step %d, matrix %d: off by %g of %g",
              r->ranks, r->columns, step, p, worst, size);
    CHECK(step < r->silent || size > 0);
    RANKS_TRY(
        dtrain_world_all_gather(world, of->grad[p], (size_t)count * sizeof(float), of->others));
    for (int other = 0; other < r->ranks; other++)
        CHECK(memcmp(of->others + other * count, of->grad[p], (size_t)count * sizeof(float)) == 0);
    return 0;
}

static int rank_steps(dtrain_world *world, const run *r, arrays *of)
{
    static const char *const names[MATRICES] = {"a", "b", "c"};
    int columns = r->columns;
    const dtrain_comm_hook_desc hook = {
        "PowerSGD",       2,       false, false, power_plan, power_compress, power_exchange,
        power_decompress, &columns};
    const dtrain_state_tensor *tensors;
    dtrain_state_desc listed;
    dtrain_state *state;
    dtrain_compression_desc how;
    dtrain_strategy_desc desc;
    dtrain_param params[MATRICES];
    dtrain_strategy *s;
    size_t count;
    int residuals = 0;
    memset(&listed, 0, sizeof listed);
    memset(&how, 0, sizeof how);
    memset(&desc, 0, sizeof desc);
    memset(params, 0, sizeof params);
    how.hook = &hook, how.dense_below = 1, how.dense_steps = DTRAIN_DENSE_STEPS_NONE;
    desc.compression = &how, desc.bucket_bytes = r->apart ? 64 : 1 << 20;
    for (int p = 0; p < MATRICES; p++) {
        params[p].name = names[p], params[p].value = of->value[p], params[p].grad = of->grad[p];
        memcpy(params[p].shape, shapes[p], sizeof params[p].shape);
    }
    RANKS_TRY(dtrain_strategy_create(world, params, MATRICES, &desc, &s));
    for (int step = 0; step < TIMES; step++) {
        for (int p = MATRICES; p-- > 0;) {
            for (int64_t i = 0; i < count_of(p); i++) {
                of->grad[p][i] = gradient(r, p, dtrain_world_rank(world), step, i);
                of->owed[p][i] += (double)of->grad[p][i];
            }
            RANKS_TRY(dtrain_strategy_ready(s, (size_t)p));
        }
        RANKS_TRY(dtrain_strategy_finish(s));
        for (int p = 0; p < MATRICES; p++)
            if (check_mean(world, r, of, p, step)) return 1;
    }
    listed.strategy = s;
    RANKS_TRY(dtrain_state_create(world, &listed, &state));
    RANKS_TRY(dtrain_state_tensors(state, &tensors, &count));
    for (size_t k = 0; k < count; k++) {
        const float *residual = (const float *)tensors[k].memory;
        double worst = 0;
        if (tensors[k].kind != DTRAIN_STATE_RESIDUAL) continue;
        for (int64_t i = 0; i < tensors[k].piece.count; i++)
            worst = fmax(worst, fabs((double)residual[i] - of->owed[tensors[k].name[0] - 'a'][i]));
        CHECK_MSG(worst <= 1e-4 * (double)r->scale, "%d ranks, %d columns: a residual is %g off",
                  r->ranks, r->columns, worst);
        residuals++;
    }
    CHECK(residuals == MATRICES);
    dtrain_state_destroy(state);
    dtrain_strategy_destroy(s);
    return 0;
}

static int rank_main(dtrain_world *world, void *user)
{
    arrays *of = (arrays *)calloc(1, sizeof *of);
    const int code = of ? rank_steps(world, (const run *)user, of) : 1;
    free(of);
    return code;
}

static void go(int ranks, int columns, bool apart, int silent, float scale)
{
    run r = {columns, ranks, silent, apart, scale};
    ranks_run(ranks, ranks % 2 ? DTRAIN_LAUNCH_PROCESSES : DTRAIN_LAUNCH_THREADS, rank_main, &r);
}

static void test_beside_double(void)
{
    static const int sizes[] = {2, 3, 4, 8};
    for (int i = 0; i < 4; i++)
        for (int columns = 1; columns <= 4; columns *= 2) go(sizes[i], columns, columns == 2, 0, 1);
}

/* A matrix of 12 rows, and of 16, comes through whole; one of 40 does not. */
static void test_full_rank(void)
{
    go(3, 16, true, 0, 1);
    go(4, 16, false, 0, 1);
}

static void test_zeros(void) { go(3, 2, false, 2, 1); }

static void test_any_size(void)
{
    go(3, 2, false, 0, 1e30f);
    go(2, 2, true, 0, 1e-30f);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_beside_double);
    RUN(test_full_rank);
    RUN(test_zeros);
    RUN(test_any_size);
    return test_summary();
}
