/* dense_loss.h: the cross-entropy of whole logits in double, and its gradient, which losses over a divided vocabulary
 * are compared with. Include it after dtrain.h and test.h. */
#ifndef DTRAIN_TEST_DENSE_LOSS_H
#define DTRAIN_TEST_DENSE_LOSS_H

enum { NORMAL, EXTREME, LAST_RANK_INFINITE, WITH_NAN };

typedef struct loss_case {
    int64_t rows, classes, columns; /* columns: of all ranks, padding included */
    float smoothing;
    int logits;
    bool ignore;
} loss_case;
/* The whole logits and targets of a case; the same on every rank. */
static inline void loss_data(const loss_case *c, int ranks, float *x, int32_t *targets)
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
static inline double loss_dense(const loss_case *c, const float *x, const int32_t *targets,
                                double scale, double *d_x)
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
            d_x[i * c->columns + j] = (exp((double)row[j] - most) / sum -
                                       (j == targets[i] ? 1 - (double)c->smoothing : 0) -
                                       (double)c->smoothing / (double)c->classes) *
                                      scale / (double)valid;
    }
    return valid ? total / (double)valid : 0;
}

static inline bool near_to(double got, double want, double tolerance)
{
    if (isnan(want)) return isnan(got);
    return fabs(got - want) <= tolerance * (1 + fabs(want));
}

/* A case as one rank sees it. */
typedef struct loss_rank {
    float *x, *here; /* whole, and this rank's columns */
    int32_t *targets;
    double *d_x, want;
    int64_t first, columns;
} loss_rank;

static inline loss_rank loss_open(const loss_case *c, int ranks, int rank, double scale)
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
static inline void loss_close(loss_rank *l)
{
    free(l->x);
    free(l->here);
    free(l->targets);
    free(l->d_x);
}
static inline void loss_gradient(const loss_case *c, const loss_rank *l, const float *d_x,
                                 const char *what)
{
    for (int64_t i = 0; i < c->rows * l->columns; i++) {
        const int64_t row = i / l->columns, j = l->first + i % l->columns;
        const double want = l->d_x[row * c->columns + j];
        if (!near_to((double)d_x[i], want, 2e-7)) {
            CHECK_MSG(
                false, "%s, %d classes in %d columns: gradient (%d, %d) is %.9g, expected %.9g",
                what, (int)c->classes, (int)c->columns, (int)row, (int)j, (double)d_x[i], want);
            return;
        }
    }
    CHECK(true);
}

#endif /* DTRAIN_TEST_DENSE_LOSS_H */
