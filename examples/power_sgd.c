/* power_sgd.c: a communication hook in two rounds, which sends two thin factors of each matrix.
 *
 *   build:   cc -O2 -I. examples/power_sgd.c -o power_sgd -lm -lpthread
 *   run:     ./power_sgd                two ranks, factors of 2 columns; ./power_sgd 4 8 starts four, with 8
 *   expect:
 *                   whole gradients    factors
 *     step  50 loss        1.190401   0.691082
 *     step 100 loss        0.025515   0.004521
 *     step 150 loss        0.000448   0.000030
 *     step 200 loss        0.000008   0.000000
 *     bytes sent a step        8200        776
 *
 * PowerSGD (Vogels et al., NeurIPS 2019), where M is the gradient of a matrix plus its residual:
 *
 *     round 0    P = M Q, the mean over the ranks, then with orthonormal columns
 *     round 1    Q = M^T P, the mean over the ranks
 *     after it   gradient = P Q^T; residual = M - P Q^T, which is sent in later steps
 *
 * The next step begins with this Q. As in PyTorch, its columns are made orthonormal first: Q has the norm of
 * the gradient, and M Q would have the square of that norm. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 64, OUT = 32, BATCH = 32, STEPS = 200 };

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

/* ---- The hook ----
 *
 * scratch of a bucket:   | P of every matrix | Q of every matrix | */

/* Return the number of columns of the factors. */
static int64_t columns_of(const dtrain_compression_desc *how)
{
    return *(const int *)how->hook->user;
}

/* Return the number of rows of P (as many as the matrix has rows) or of Q (as many as it has columns). */
static int64_t rows_of(const dtrain_hook_tensor *tensor, bool of_q)
{
    const int64_t rows = tensor->param->shape[0];
    return of_q ? tensor->count / rows : rows;
}

/* Count the elements of every P or every Q of a bucket. */
static int64_t factor_count(const dtrain_compression_desc *how, const dtrain_hook_bucket *bucket,
                            bool of_q)
{
    int64_t count = 0;
    for (size_t t = 0; t < bucket->tensor_count; t++)
        if (!bucket->tensors[t].dense)
            count += rows_of(&bucket->tensors[t], of_q) * columns_of(how);
    return count;
}

static void power_plan(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket)
{
    for (size_t t = 0; t < bucket->tensor_count; t++) bucket->tensors[t].keeps_residual = true;
    bucket->scratch_count = factor_count(how, bucket, false) + factor_count(how, bucket, true);
}

/* out (m, n) = a b, sums over k. The strides are distances in elements along a row and a column of a and b. */
static void product(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_row,
                    int64_t a_column, const float *b, int64_t b_row, int64_t b_column, float *out)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            float sum = 0;
            for (int64_t l = 0; l < k; l++)
                sum += a[i * a_row + l * a_column] * b[l * b_row + j * b_column];
            out[i * n + j] = sum;
        }
}

/* Make the columns of x orthonormal by Gram-Schmidt, twice. A column that depends on the others becomes zero. */
static void orthonormal(int64_t rows, int64_t columns, float *x)
{
    for (int64_t j = 0; j < columns; j++) {
        double before = 0, length = 0;
        for (int64_t i = 0; i < rows; i++)
            before += (double)x[i * columns + j] * x[i * columns + j];
        for (int64_t k = 0; k < 2 * j; k++) {
            double along = 0;
            for (int64_t i = 0; i < rows; i++)
                along += (double)x[i * columns + j] * x[i * columns + k % j];
            for (int64_t i = 0; i < rows; i++)
                x[i * columns + j] -= (float)along * x[i * columns + k % j];
        }
        for (int64_t i = 0; i < rows; i++)
            length += (double)x[i * columns + j] * x[i * columns + j];
        const float factor = length > 1e-10 * before ? (float)(1 / sqrt(length)) : 0;
        for (int64_t i = 0; i < rows; i++) x[i * columns + j] *= factor;
    }
}

/* Round 0: P = M Q. Round 1: Q = M^T P. */
static dtrain_result power_compress(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket,
                                    uint32_t round)
{
    const int64_t n = columns_of(how);
    float *p = bucket->scratch, *q = p + factor_count(how, bucket, false);
    for (size_t t = 0; t < bucket->tensor_count; t++) {
        const dtrain_hook_tensor *tensor = &bucket->tensors[t];
        const int64_t rows = rows_of(tensor, false), columns = rows_of(tensor, true);
        float *m = tensor->residual;
        if (round == 0) {
            for (int64_t i = 0; i < tensor->count; i++) m[i] += tensor->grad[i];
            /* Gives columns of zeros a direction, as all are at first; too small to turn another column. */
            for (int64_t i = 0; i < columns * n; i++)
                q[i] += 1e-20f * dtrain_random_normal(3, t, (uint64_t)i);
            orthonormal(columns, n, q);
            product(rows, n, columns, m, columns, 1, q, n, 1, p);
        } else {
            product(columns, n, rows, m, 1, columns, p, n, 1, q);
        }
        p += rows * n, q += columns * n;
    }
    return DTRAIN_OK;
}

static dtrain_result power_exchange(const dtrain_compression_desc *how,
                                    const dtrain_hook_bucket *bucket, uint32_t round,
                                    dtrain_work **work)
{
    const int64_t count = factor_count(how, bucket, round);
    float *factors = bucket->scratch + (round ? factor_count(how, bucket, false) : 0);
    if (count == 0) return DTRAIN_OK; /* all tensors of the bucket are dense */
    return dtrain_all_reduce(bucket->comm, factors, factors, (size_t)count, DTRAIN_DTYPE_F32,
                             DTRAIN_REDUCE_MEAN, work);
}

/* Round 0: P becomes orthonormal, to the same bits on all ranks. Round 1: the gradient is P Q^T. */
static dtrain_result power_decompress(const dtrain_compression_desc *how,
                                      dtrain_hook_bucket *bucket, uint32_t round)
{
    const int64_t n = columns_of(how);
    float *p = bucket->scratch, *q = p + factor_count(how, bucket, false);
    for (size_t t = 0; t < bucket->tensor_count; t++) {
        const dtrain_hook_tensor *tensor = &bucket->tensors[t];
        const int64_t rows = rows_of(tensor, false), columns = rows_of(tensor, true);
        if (round == 0) {
            orthonormal(rows, n, p);
        } else {
            product(rows, columns, n, p, n, 1, q, 1, n, tensor->grad);
            for (int64_t i = 0; i < tensor->count; i++) tensor->residual[i] -= tensor->grad[i];
        }
        p += rows * n, q += columns * n;
    }
    return DTRAIN_OK;
}

/* ---- A linear model, trained twice ---- */

/* Return the mean squared error of this rank's batch, and its gradient. */
static float backward(int rank, int step, const float *weight, float *grad)
{
    uint64_t at = (uint64_t)step * BATCH * IN;
    float loss = 0;
    memset(grad, 0, OUT * IN * sizeof *grad);
    for (int b = 0; b < BATCH; b++) {
        float x[IN];
        for (int i = 0; i < IN; i++) x[i] = dtrain_random_normal(1, (uint64_t)rank, at++);
        for (int o = 0; o < OUT; o++) {
            float error = 0;
            for (int i = 0; i < IN; i++) /* the truth: a matrix of random numbers */
                error += (weight[o * IN + i] - dtrain_random_normal(2, 0, (uint64_t)(o * IN + i))) *
                         x[i];
            loss += error * error / (OUT * BATCH);
            for (int i = 0; i < IN; i++) grad[o * IN + i] += 2 * error * x[i] / BATCH;
        }
    }
    return loss;
}

/* Train with factors of so many columns, or with whole gradients (0). Return losses, and the bytes that a rank sends in
 * a step. */
static int train_once(dtrain_world *world, int columns, float loss[STEPS / 50], double *bytes)
{
    float weight[OUT * IN] = {0}, grad[OUT * IN];
    dtrain_param param = {.name = "weight", .value = weight, .grad = grad, .shape = {OUT, IN}};
    const dtrain_comm_hook_desc hook = {.name = "PowerSGD",
                                        .rounds = 2,
                                        .plan = power_plan,
                                        .compress = power_compress,
                                        .exchange = power_exchange,
                                        .decompress = power_decompress,
                                        .user = &columns};
    dtrain_compression_desc compression = {.hook = &hook, .dense_steps = DTRAIN_DENSE_STEPS_NONE};
    dtrain_strategy_desc desc = {.compression = columns ? &compression : NULL};
    dtrain_strategy *ddp;
    dtrain_strategy_info before, after;
    CHECK(dtrain_strategy_create(world, &param, 1, &desc, &ddp));
    for (int step = 1; step <= STEPS; step++) {
        float *of = &loss[(step - 1) / 50];
        *of = backward(dtrain_world_rank(world), step, weight, grad);
        dtrain_strategy_query(ddp, &before);
        CHECK(dtrain_strategy_ready(ddp, 0));
        CHECK(dtrain_strategy_finish(ddp));
        dtrain_strategy_query(ddp, &after);
        for (int i = 0; i < OUT * IN; i++) weight[i] -= 0.02f * grad[i];
        CHECK(dtrain_all_reduce(dtrain_world_comm(world), of, of, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
    }
    CHECK(dtrain_strategy_verify(ddp, NULL)); /* all ranks have the same bits */
    *bytes = (double)(after.traffic.wire_bytes - before.traffic.wire_bytes); /* of the last step */
    dtrain_strategy_destroy(ddp);
    return 0;
}

static int train(dtrain_world *world, void *user)
{
    float whole[STEPS / 50], factors[STEPS / 50];
    double whole_bytes, bytes;
    if (train_once(world, 0, whole, &whole_bytes) ||
        train_once(world, *(int *)user, factors, &bytes))
        return 1;
    if (dtrain_world_rank(world)) return 0;
    printf("              whole gradients    factors\n");
    for (int i = 0; i < STEPS / 50; i++)
        printf("step %3d loss %15.6f %10.6f\n", 50 * (i + 1), whole[i], factors[i]);
    printf("bytes sent a step %11.0f %10.0f\n", whole_bytes, bytes);
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 2};
    int columns = argc > 2 ? atoi(argv[2]) : 2;
    if (argc > 1) desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10);
    if ((argc > 1 && desc.rank_count == 0) || columns < 1) {
        fprintf(stderr, "usage: power_sgd [RANKS [COLUMNS]], each 1 or more\n");
        return 2;
    }
    if (dtrain_launch(&desc, train, &columns, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "power_sgd: %s\n", dtrain_last_error());
    return 1;
}
