/* tensor_parallel.c: a transformer block on the program's arrays, with its own backward, shared by the ranks of a
 * tensor axis. There is no tape: the program sums over the ranks of a mesh, and its loss is over a vocabulary that is
 * divided.
 *
 *   build:   cc -O2 -I. examples/tensor_parallel.c -o tensor_parallel -lm -lpthread
 *   run:     ./tensor_parallel          two ranks; ./tensor_parallel 1 has the same losses on one
 *   expect:
 *     step 100 loss 1.2414
 *     step 200 loss 0.1595
 *     rank 0 of 2 has 9056 weights
 *
 * Every matrix is (features, C) and is cut by its features: heads, hidden units, classes. `up` makes features of rows,
 * y = x W^T, and needs no other rank. `down` makes rows of features, y = h W, and each rank computes one term of a sum.
 * So ranks add up after each `down`. The backward of an `up` is a `down`:
 *
 *     x0 -+- up(q, k, v) - heads - down(o) -SUM- (+) x1 -+- up(in) - relu - down(out) -SUM- (+) x2 - up(classes)
 *         +---------------------------------------+      +---------------------------------+
 *
 * Two sums forward, three backward, and the loss, for which three floats a row travel in place of its logits.
 * docs/tensor-parallelism.md has the pictures; with the tape (examples/gpt.c) a model keeps its text and marks its
 * weights. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

enum { T = 24, C = 32, HEADS = 4, D = C / HEADS, HIDDEN = 128, VOCAB = 61, STEPS = 200 };
enum { Q, K, V, O, IN, OUT, CLASSES, EMBEDDING, MATRICES };
static const int features[MATRICES] = {C, C, C, C, HIDDEN, HIDDEN, VOCAB, VOCAB};

/* Rows `first` to first + n of a whole matrix, with their gradient; there is room for all of them. */
typedef struct matrix {
    int first, n;
    float w[HIDDEN * C], g[HIDDEN * C];
} matrix;

/* Rows of C are whole on every rank; q, k, v, heads, hidden and logits are this rank's features. */
typedef struct model {
    dtrain_comm *tensor;
    matrix m[MATRICES];
    float x0[T * C], x1[T * C], x2[T * C], d_x[T * C], sum[T * C]; /* sum: zero between uses */
    float q[T * C], k[T * C], v[T * C], heads[T * C];
    float d_q[T * C], d_k[T * C], d_v[T * C], d_heads[T * C];
    float p[HEADS * T * T], hidden[T * HIDDEN], d_hidden[T * HIDDEN], logits[T * VOCAB];
} model;

/* Draw weights by their place in the whole matrix, so that they do not depend on the number of ranks; count them. */
static int init(model *a, int rank, int ranks)
{
    int weights = 0;
    for (int i = 0; i < MATRICES; i++) {
        matrix *m = &a->m[i];
        const int unit = i <= O ? D : 1, parts = features[i] / unit; /* heads stay whole */
        m->first = i == EMBEDDING ? 0 : unit * (parts * rank / ranks);
        m->n = i == EMBEDDING ? VOCAB : unit * (parts * (rank + 1) / ranks) - m->first;
        for (int j = 0; j < m->n * C; j++)
            m->w[j] = 0.2f * dtrain_random_normal(1, (uint64_t)i, (uint64_t)(m->first * C + j));
        weights += m->n * C;
    }
    return weights;
}

/* y (T, n) = x (T, C) W^T */
static void up(const matrix *m, const float *x, float *y)
{
    for (int i = 0; i < T * m->n; i++) {
        y[i] = 0;
        for (int c = 0; c < C; c++) y[i] += x[i / m->n * C + c] * m->w[i % m->n * C + c];
    }
}
/* y (T, C) += h (T, n) W: this rank's term */
static void down(const matrix *m, const float *h, float *y)
{
    for (int i = 0; i < T * m->n; i++)
        for (int c = 0; c < C; c++) y[i / m->n * C + c] += h[i] * m->w[i % m->n * C + c];
}
/* The gradient of W is the same in both: features (T, n) on its one side, rows (T, C) on the other. */
static void gradient(matrix *m, const float *h, const float *x)
{
    memset(m->g, 0, sizeof m->g);
    for (int i = 0; i < T * m->n; i++)
        for (int c = 0; c < C; c++) m->g[i % m->n * C + c] += h[i] * x[i / m->n * C + c];
}
/* y (T, C) = x (or 0 if it is NULL) + the sum of `sum` over all ranks */
static int add_up(model *a, const float *x, float *y)
{
    CHECK(dtrain_all_reduce(a->tensor, a->sum, a->sum, T * C, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                            NULL));
    for (int i = 0; i < T * C; i++) y[i] = (x ? x[i] : 0) + a->sum[i], a->sum[i] = 0;
    return 0;
}

/* Causal attention of this rank's heads, and its backward; nothing is sent. */
static void attend(model *a, bool backward)
{
    const int n = a->m[Q].n;
    for (int i = 0; i < T * n && backward; i++) a->d_q[i] = a->d_k[i] = a->d_v[i] = 0;
    for (int h = 0; h < n; h += D)
        for (int t = 0; t < T; t++) {
            float *p = a->p + (h / D * T + t) * T, *y = a->heads + t * n + h, d_p[T], sum = 0;
            const float *q = a->q + t * n + h, *d_y = a->d_heads + t * n + h;
            for (int s = 0; s <= t && !backward; s++) {
                p[s] = 0;
                for (int i = 0; i < D; i++) p[s] += q[i] * a->k[s * n + h + i] / sqrtf(D);
                sum += p[s] = expf(p[s]);
            }
            for (int s = 0; s <= t && !backward; s++) {
                p[s] /= sum;
                for (int i = 0; i < D; i++) y[i] = (s ? y[i] : 0) + p[s] * a->v[s * n + h + i];
            }
            for (int s = 0; s <= t && backward; s++) {
                d_p[s] = 0;
                for (int i = 0; i < D; i++) d_p[s] += d_y[i] * a->v[s * n + h + i];
                for (int i = 0; i < D; i++) a->d_v[s * n + h + i] += p[s] * d_y[i];
                sum += p[s] * d_p[s];
            }
            for (int s = 0; s <= t && backward; s++) {
                const float d_score = p[s] * (d_p[s] - sum) / sqrtf(D);
                for (int i = 0; i < D; i++) a->d_q[t * n + h + i] += d_score * a->k[s * n + h + i];
                for (int i = 0; i < D; i++) a->d_k[s * n + h + i] += d_score * q[i];
            }
        }
}

/* Softmax cross-entropy over a vocabulary that is divided: column j of the logits x (rows, columns) is class first + j,
 * the other classes are on other ranks; rows <= T. x becomes its gradient, and *loss the mean over rows, on all ranks.
 * Softmax needs a row's largest logit over all ranks, then the sum of its exponentials. The loss needs the target's
 * logit, which one rank has and to which the others add 0 (Shoeybi et al., "Megatron-LM", 2019, section 3). */
static int cross_entropy(dtrain_comm *tensor, int rows, int columns, int first, float *x,
                         const int32_t *targets, double *loss)
{
    float most[T] = {0}, sums[2 * T] = {0}, *at_target = sums + rows;
    for (int i = 0; i < rows; i++) {
        most[i] = -INFINITY;
        for (int j = 0; j < columns; j++) most[i] = fmaxf(most[i], x[i * columns + j]);
    }
    CHECK(dtrain_all_reduce(tensor, most, most, (size_t)rows, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MAX,
                            NULL));
    for (int i = 0; i < rows; i++) {
        const int target = targets[i] - first; /* its column, if it is on this rank */
        double sum = 0;
        for (int j = 0; j < columns; j++) sum += exp((double)x[i * columns + j] - (double)most[i]);
        sums[i] = (float)sum;
        at_target[i] = target >= 0 && target < columns ? x[i * columns + target] : 0;
    }
    CHECK(dtrain_all_reduce(tensor, sums, sums, 2 * (size_t)rows, DTRAIN_DTYPE_F32,
                            DTRAIN_REDUCE_SUM, NULL));
    *loss = 0;
    for (int i = 0; i < rows; i++) {
        const double log_sum = (double)most[i] + log((double)sums[i]);
        *loss += (log_sum - (double)at_target[i]) / rows;
        for (int j = 0; j < columns; j++) { /* softmax, less 1 at the target */
            const double p = exp((double)x[i * columns + j] - log_sum);
            x[i * columns + j] = (float)((p - (first + j == targets[i])) / rows);
        }
    }
    return 0;
}

/* Learn from T tokens and their successors, the same on every rank. */
static int step(model *a, const int32_t *text, float lr, double *loss)
{
    matrix *const m = a->m, *const embedding = &m[EMBEDDING];
    const int units = T * m[IN].n;
    for (int i = 0; i < T * C; i++) a->x0[i] = embedding->w[text[i / C] * C + i % C];
    up(&m[Q], a->x0, a->q), up(&m[K], a->x0, a->k), up(&m[V], a->x0, a->v);
    attend(a, false);
    down(&m[O], a->heads, a->sum);
    CHECK(add_up(a, a->x0, a->x1));
    up(&m[IN], a->x1, a->hidden);
    for (int i = 0; i < units; i++) a->hidden[i] = fmaxf(a->hidden[i], 0);
    down(&m[OUT], a->hidden, a->sum);
    CHECK(add_up(a, a->x1, a->x2));
    up(&m[CLASSES], a->x2, a->logits);
    CHECK(cross_entropy(a->tensor, T, m[CLASSES].n, m[CLASSES].first, a->logits, text + 1, loss));
    gradient(&m[CLASSES], a->logits, a->x2);
    down(&m[CLASSES], a->logits, a->sum);
    CHECK(add_up(a, NULL, a->d_x)); /* of x2 */
    up(&m[OUT], a->d_x, a->d_hidden);
    for (int i = 0; i < units; i++) a->d_hidden[i] *= a->hidden[i] > 0;
    gradient(&m[OUT], a->hidden, a->d_x), gradient(&m[IN], a->d_hidden, a->x1);
    down(&m[IN], a->d_hidden, a->sum);
    CHECK(add_up(a, a->d_x, a->d_x)); /* of x1 */
    up(&m[O], a->d_x, a->d_heads);
    gradient(&m[O], a->heads, a->d_x);
    attend(a, true);
    gradient(&m[Q], a->d_q, a->x0), gradient(&m[K], a->d_k, a->x0), gradient(&m[V], a->d_v, a->x0);
    down(&m[Q], a->d_q, a->sum), down(&m[K], a->d_k, a->sum), down(&m[V], a->d_v, a->sum);
    CHECK(add_up(a, a->d_x, a->d_x)); /* of x0 */
    memset(embedding->g, 0, sizeof embedding->g);
    for (int i = 0; i < T * C; i++) embedding->g[text[i / C] * C + i % C] += a->d_x[i];
    for (int i = 0; i < MATRICES; i++)
        for (int j = 0; j < m[i].n * C; j++) m[i].w[j] -= lr * m[i].g[j];
    return 0;
}

static int rank_main(dtrain_world *world, void *user)
{
    const dtrain_mesh_desc desc = {.tensor = dtrain_world_size(world)};
    model *a = (model *)calloc(1, sizeof *a);
    dtrain_mesh *mesh;
    int32_t text[T + 1];
    double loss;
    (void)user;
    if (!a || dtrain_mesh_create(world, &desc, &mesh) != DTRAIN_OK) return 1;
    a->tensor = dtrain_mesh_comm(mesh, DTRAIN_AXIS_TENSOR);
    const int rank = dtrain_comm_rank(a->tensor), weights = init(a, rank, desc.tensor);
    for (int s = 1; s <= STEPS; s++) {
        text[0] = s * 7 % VOCAB;
        for (int t = 0; t < T; t++) text[t + 1] = (text[t] * 3 + 5) % VOCAB;
        CHECK(step(a, text, 0.1f, &loss));
        if (rank == 0 && s % 100 == 0) printf("step %3d loss %.4f\n", s, loss);
    }
    if (rank == 0) printf("rank 0 of %d has %d weights\n", desc.tensor, weights);
    dtrain_mesh_destroy(mesh);
    free(a);
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 2};
    if (argc > 1) desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 1 && (desc.rank_count < 1 || desc.rank_count > HEADS)) {
        fprintf(stderr, "usage: tensor_parallel [RANKS, 1 to %d], not \"%s\"\n", HEADS, argv[1]);
        return 2;
    }
    if (dtrain_launch(&desc, rank_main, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "tensor_parallel: %s\n", dtrain_last_error());
    return 1;
}
