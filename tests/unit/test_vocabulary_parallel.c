/* test_vocabulary_parallel.c: what the tensor axis makes of the two ends of a language model and of attention. The
 * cross-entropy of logits whose classes are divided, on arrays and on the tape, beside a dense one in double; embeddings
 * and heads beside those of one rank, to the bit; gradients of every share; what is sent. Tapes here have the groups of
 * a mesh and no strategy: parameters are arrays of the test, and nothing sums their gradients up. */
#include "tape/tape_internal.h"
#include "parallel/mesh_internal.h"
#include "dtrain.h"
#include "test.h"
#include "ranks.h"
#include "tape_error.h"

enum { THREADS = DTRAIN_LAUNCH_THREADS };
static const int axes[] = {1, 2, 3, 4, 8}; /* ranks of the tensor axis */

static bool says(const char *part)
{
    return CHECK_MSG(strstr(dtrain_last_error(), part) != NULL, "\"%s\" is not in: %s", part,
                     dtrain_last_error());
}
static float *drawn(int64_t count, uint64_t stream, float scale)
{
    float *x = (float *)malloc((size_t)count * sizeof *x + 1);
    for (int64_t i = 0; i < count; i++)
        x[i] = scale * dtrain_random_normal(7, stream, (uint64_t)i);
    return x;
}
/* Whole numbers in [-8, 8]: sums of a few thousand have no rounding, in any order. */
static float *whole_numbers(int64_t count, uint64_t stream)
{
    float *x = drawn(count, stream, 3);
    for (int64_t i = 0; i < count; i++) x[i] = fminf(8, fmaxf(-8, rintf(x[i])));
    return x;
}
static bool same_words(const void *got, const void *want, int64_t count, const char *what)
{
    const float *a = (const float *)got, *b = (const float *)want;
    for (int64_t i = 0; i < count; i++)
        if (memcmp(&a[i], &b[i], sizeof *a))
            return CHECK_MSG(false, "%s: [%d] is %.9g, expected %.9g", what, (int)i, (double)a[i],
                             (double)b[i]);
    return CHECK(true);
}

/* ---- The cross-entropy -------------------------------------------------------------------------*/

enum { NORMAL, EXTREME, LAST_RANK_INFINITE, WITH_NAN };

typedef struct loss_case {
    int64_t rows, classes, columns; /* columns: of all ranks, padding included */
    float smoothing;
    int logits;
    bool ignore;
} loss_case;
static const loss_case loss_cases[] = {
    {6, 16, 16, 0, NORMAL, false},          {6, 16, 16, 0.1f, NORMAL, true},
    {5, 9, 24, 0, NORMAL, true},            {5, 9, 24, 0.3f, EXTREME, false},
    {3, 50257, 50257, 0, NORMAL, true},     {3, 50257, 50304, 0.1f, NORMAL, true},
    {7, 40, 40, 0, EXTREME, true},          {7, 40, 40, 1, NORMAL, false},
    {4, 24, 24, 0, LAST_RANK_INFINITE, false}, {4, 24, 24, 0, WITH_NAN, false},
    {4, 1, 8, 0.5f, NORMAL, false},
};

/* The whole logits and targets of a case; the same on every rank. */
static void loss_data(const loss_case *c, int ranks, float *x, int32_t *targets)
{
    for (int64_t i = 0; i < c->rows; i++) {
        targets[i] = (int32_t)((i * 7919 + c->rows) % c->classes);
        if (c->ignore && i % 3 == 1) targets[i] = -1;
        for (int64_t j = 0; j < c->columns; j++) {
            float *at = &x[i * c->columns + j];
            *at = 3 * dtrain_random_normal(9, (uint64_t)c->columns, (uint64_t)(i * c->columns + j));
            if (c->logits == EXTREME) *at += (i + j) % 3 == 0 ? 1e4f : -1e4f;
            if (j >= c->classes) *at = 3e4f; /* must not be seen */
            if (c->logits == LAST_RANK_INFINITE && ranks > 1 &&
                j >= c->columns * (ranks - 1) / ranks)
                *at = -INFINITY;
        }
        if (c->logits == LAST_RANK_INFINITE) targets[i] = (int32_t)i % 3;
    }
    if (c->logits == WITH_NAN) x[c->columns + 2] = NAN;
}

/* The dense loss in double, and its gradient (rows, columns). */
static double loss_dense(const loss_case *c, const float *x, const int32_t *targets, double scale,
                         double *d_x)
{
    double total = 0;
    int64_t valid = 0;
    for (int64_t i = 0; i < c->rows; i++) valid += targets[i] != -1;
    memset(d_x, 0, (size_t)(c->rows * c->columns) * sizeof *d_x);
    for (int64_t i = 0; i < c->rows; i++) {
        const float *row = x + i * c->columns;
        double most = -INFINITY, sum = 0, mean = 0;
        if (targets[i] == -1) continue;
        for (int64_t j = 0; j < c->classes; j++) most = row[j] > most ? (double)row[j] : most;
        for (int64_t j = 0; j < c->classes; j++) sum += exp((double)row[j] - most);
        for (int64_t j = 0; j < c->classes; j++) mean += (double)row[j] / (double)c->classes;
        total += most + log(sum) - (1 - (double)c->smoothing) * (double)row[targets[i]];
        if (c->smoothing > 0) total -= (double)c->smoothing * mean;
        for (int64_t j = 0; j < c->classes; j++)
            d_x[i * c->columns + j] =
                (exp((double)row[j] - most) / sum -
                 (j == targets[i] ? 1 - (double)c->smoothing : 0) -
                 (double)c->smoothing / (double)c->classes) *
                scale / (double)valid;
    }
    return valid ? total / (double)valid : 0;
}

static bool near_to(double got, double want, double tolerance)
{
    if (isnan(want)) return isnan(got);
    return fabs(got - want) <= tolerance * (1 + fabs(want));
}

/* What a case is, in one place for both roads. */
typedef struct loss_rank {
    float *x, *here; /* whole, and this rank's columns */
    int32_t *targets;
    double *d_x, want;
    int64_t first, columns;
} loss_rank;

static loss_rank loss_open(const loss_case *c, int ranks, int rank, double scale)
{
    const size_t count = (size_t)(c->rows * c->columns);
    loss_rank l;
    l.x = (float *)malloc(count * sizeof *l.x);
    l.here = (float *)malloc(count * sizeof *l.here);
    l.targets = (int32_t *)malloc((size_t)c->rows * sizeof *l.targets);
    l.d_x = (double *)malloc(count * sizeof *l.d_x);
    l.first = c->columns * rank / ranks;
    l.columns = c->columns * (rank + 1) / ranks - l.first;
    loss_data(c, ranks, l.x, l.targets);
    l.want = loss_dense(c, l.x, l.targets, scale, l.d_x);
    for (int64_t i = 0; i < c->rows * l.columns; i++)
        l.here[i] = l.x[i / l.columns * c->columns + l.first + i % l.columns];
    return l;
}
static void loss_close(loss_rank *l)
{
    free(l->x);
    free(l->here);
    free(l->targets);
    free(l->d_x);
}
static void loss_gradient(const loss_case *c, const loss_rank *l, const float *d_x, const char *what)
{
    for (int64_t i = 0; i < c->rows * l->columns; i++) {
        const int64_t row = i / l->columns, j = l->first + i % l->columns;
        const double want = l->d_x[row * c->columns + j];
        if (!near_to((double)d_x[i], want, 2e-7)) {
            CHECK_MSG(false, "%s, %d classes in %d columns: gradient (%d, %d) is %.9g, expected %.9g",
                      what, (int)c->classes, (int)c->columns, (int)row, (int)j, (double)d_x[i],
                      want);
            return;
        }
    }
    CHECK(true);
}

static int arrays_rank(dtrain_world *world, void *user)
{
    const int ranks = dtrain_world_size(world), rank = dtrain_world_rank(world);
    dtrain_comm *comm = dtrain_world_comm(world);
    (void)user;
    for (size_t k = 0; k < sizeof loss_cases / sizeof *loss_cases; k++) {
        const loss_case *c = &loss_cases[k];
        loss_rank l = loss_open(c, ranks, rank, 3);
        const uint64_t floats = (uint64_t)c->rows * (c->smoothing > 0 ? 4 : 3) + 2;
        float *d_x = k % 2 ? l.here : (float *)malloc((size_t)(c->rows * l.columns) * sizeof *d_x);
        double got = -1, all[RANKS_MOST];
        dtrain_comm_info before, after;
        dtrain_vocab_loss loss;
        memset(&loss, 0, sizeof loss);
        loss.rows = c->rows;
        loss.columns = l.columns;
        loss.first_class = l.first;
        loss.classes = c->classes;
        loss.logits = l.here;
        loss.targets = l.targets;
        loss.smoothing = c->smoothing;
        loss.scale = 3;
        loss.loss = &got;
        loss.d_logits = d_x;
        dtrain_comm_query(comm, &before);
        RANKS_TRY(dtrain_vocab_cross_entropy(comm, &loss));
        dtrain_comm_query(comm, &after);
        CHECK_MSG(near_to(got, l.want, 1e-6), "%d ranks, case %d: loss %.9g, expected %.9g", ranks,
                  (int)k, got, l.want);
        CHECK(after.operation_count - before.operation_count == 2);
        CHECK(after.payload_bytes - before.payload_bytes == floats * sizeof(float));
        loss_gradient(c, &l, d_x, "arrays");
        RANKS_TRY(dtrain_world_all_gather(world, &got, sizeof got, all));
        for (int r = 1; r < ranks; r++) CHECK(memcmp(&all[r], &all[0], sizeof got) == 0);
        if (d_x != l.here) free(d_x);
        loss_close(&l);
    }
    return 0;
}
static void test_arrays(void)
{
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++)
        ranks_run(axes[i], THREADS, arrays_rank, NULL);
}

/* One rank, or all of them, make a mistake: every rank hears of it, by a sentence that says what was expected. */
typedef struct mistake {
    const char *says;
    int kind;
    bool all; /* make it */
} mistake;
static int mistake_rank(dtrain_world *world, void *user)
{
    const mistake *m = (const mistake *)user;
    const bool mine = m->all || dtrain_world_rank(world) == 1;
    const float x[4] = {1, 2, 3, 4};
    int32_t targets[2] = {0, 3};
    double got;
    dtrain_vocab_loss loss;
    memset(&loss, 0, sizeof loss);
    loss.rows = loss.columns = 2;
    loss.first_class = 2 * dtrain_world_rank(world);
    loss.classes = 4;
    loss.logits = x;
    loss.targets = targets;
    loss.loss = &got;
    if (m->kind == 1 && mine) targets[1] = 4;
    if (m->kind == 2) loss.first_class = 0, targets[1] = 1;
    if (m->kind == 6) loss.classes = 5;
    if (m->kind == 3 && mine) loss.smoothing = NAN;
    if (m->kind == 4 && mine) loss.logits = NULL;
    if (m->kind == 5 && mine) loss.columns = 0;
    const dtrain_result result = dtrain_vocab_cross_entropy(dtrain_world_comm(world), &loss);
    CHECK(result != DTRAIN_OK);
    if (mine) says(m->says);
    else CHECK(result == DTRAIN_ERROR_PEER);
    return 1;
}
static void test_mistakes(void)
{
    static const mistake mistakes[] = {
        {"the target of row 1 is 4, expected 0 to 3, or -1 for none", 1, true},
        {"the target of row 1 is 4", 1, false},
        {"have 4 of 4 classes and the classes of 4 of 2 targets", 2, true},
        {"have 4 of 5 classes and the classes of 2 of 2 targets", 6, true},
        {"smoothing is nan, not in [0, 1]", 3, false},
        {"logits is NULL", 4, false},
        {"2 rows, 0 columns from class 2 on, of 4 classes", 5, false},
    };
    dtrain_launch_desc desc = ranks_desc(2, THREADS);
    desc.log_level = DTRAIN_LOG_ERROR;
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
        mistake m = mistakes[i];
        CHECK(ranks_launch(&desc, mistake_rank, &m, NULL) != DTRAIN_OK);
    }
    CHECK(dtrain_vocab_cross_entropy(NULL, NULL) == DTRAIN_ERROR_ARGUMENT);
    says("tensor is NULL");
}
