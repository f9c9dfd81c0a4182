/* sign_sgd.c: a communication hook of the program, which sends one bit for each element of a gradient.
 *
 *   build:   cc -O2 -I. examples/sign_sgd.c -o sign_sgd -lm -lpthread
 *   run:     ./sign_sgd                 two ranks; ./sign_sgd 4 starts four
 *   expect:
 *                   whole gradients      signs
 *     step  50 loss        1.200185   1.505903
 *     step 100 loss        0.025568   0.078618
 *     step 150 loss        0.000452   0.050744
 *     step 200 loss        0.000008   0.027622
 *     bytes sent a step        8332        400
 *
 * Every rank sends the signs of gradient plus residual, packed in 32-bit words, and one fp32 for the
 * length. The error of that message stays in its residual for the next step (EF-SignSGD: Karimireddy et
 * al., "Error Feedback Fixes SignSGD", ICML 2019). The library decides when a bucket is complete and in
 * which order buckets travel, sends biases whole, and saves residuals in checkpoints. */
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
 * scratch of a bucket:   | block of rank 0 | block of rank 1 | ...
 * a block:               of each tensor its length and (count + 31) / 32 words of signs */

static int64_t words_of(const dtrain_hook_tensor *tensor) { return 1 + (tensor->count + 31) / 32; }

static int64_t block_words(const dtrain_hook_bucket *bucket)
{
    int64_t words = 0;
    for (size_t i = 0; i < bucket->tensor_count; i++)
        if (!bucket->tensors[i].dense) words += words_of(&bucket->tensors[i]);
    return words;
}

static void sign_plan(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket)
{
    (void)how;
    for (size_t i = 0; i < bucket->tensor_count; i++) bucket->tensors[i].keeps_residual = true;
    bucket->scratch_count = bucket->ranks * block_words(bucket);
}

/* Add signs * length * factor to x (count elements). */
static void add_signs(const uint32_t *block, int64_t count, float factor, float *x)
{
    float length;
    memcpy(&length, block, sizeof length);
    for (int64_t i = 0; i < count; i++)
        x[i] += block[1 + i / 32] >> i % 32 & 1 ? -length * factor : length * factor;
}

static dtrain_result sign_compress(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket,
                                   uint32_t round)
{
    const int64_t words = block_words(bucket);
    uint32_t *at = (uint32_t *)bucket->scratch + bucket->rank * words;
    (void)how;
    (void)round;
    memset(at, 0, (size_t)words * sizeof *at);
    for (size_t t = 0; t < bucket->tensor_count; at += words_of(&bucket->tensors[t++])) {
        const dtrain_hook_tensor *tensor = &bucket->tensors[t];
        double sum = 0;
        for (int64_t i = 0; i < tensor->count; i++) {
            tensor->residual[i] += tensor->grad[i];
            sum += fabs((double)tensor->residual[i]);
            if (tensor->residual[i] < 0) at[1 + i / 32] |= (uint32_t)1 << i % 32;
        }
        const float length = (float)(sum / (double)tensor->count); /* the mean magnitude */
        memcpy(at, &length, sizeof length);
        add_signs(at, tensor->count, -1, tensor->residual); /* what is not sent */
    }
    return DTRAIN_OK;
}

static dtrain_result sign_exchange(const dtrain_compression_desc *how,
                                   const dtrain_hook_bucket *bucket, uint32_t round,
                                   dtrain_work **work)
{
    const int64_t words = block_words(bucket);
    uint32_t *blocks = (uint32_t *)bucket->scratch;
    (void)how;
    (void)round;
    if (words == 0) return DTRAIN_OK; /* all tensors of the bucket are dense */
    return dtrain_all_gather(bucket->comm, blocks + bucket->rank * words, blocks, (size_t)words,
                             DTRAIN_DTYPE_I32, work);
}

/* The gradient = the mean of what the ranks have sent, added in rank order. */
static dtrain_result sign_decompress(const dtrain_compression_desc *how, dtrain_hook_bucket *bucket,
                                     uint32_t round)
{
    const uint32_t *at = (const uint32_t *)bucket->scratch;
    const int64_t words = block_words(bucket);
    (void)how;
    (void)round;
    for (size_t t = 0; t < bucket->tensor_count; at += words_of(&bucket->tensors[t++])) {
        const dtrain_hook_tensor *tensor = &bucket->tensors[t];
        memset(tensor->grad, 0, (size_t)tensor->count * sizeof *tensor->grad);
        for (int r = 0; r < bucket->ranks; r++)
            add_signs(at + r * words, tensor->count, bucket->factor, tensor->grad);
    }
    return DTRAIN_OK;
}

static const dtrain_comm_hook_desc sign_hook = {.name = "sign",
                                                .rounds = 1,
                                                .plan = sign_plan,
                                                .compress = sign_compress,
                                                .exchange = sign_exchange,
                                                .decompress = sign_decompress};

/* ---- A linear model, trained twice ---- */

/* Return the mean squared error of this rank's batch, and its gradients. */
static float backward(int rank, int step, const float *weight, const float *bias,
                      float *weight_grad, float *bias_grad)
{
    uint64_t at = (uint64_t)step * BATCH * IN;
    float loss = 0;
    memset(weight_grad, 0, OUT * IN * sizeof *weight_grad);
    memset(bias_grad, 0, OUT * sizeof *bias_grad);
    for (int b = 0; b < BATCH; b++) {
        float x[IN];
        for (int i = 0; i < IN; i++) x[i] = dtrain_random_normal(1, (uint64_t)rank, at++);
        for (int o = 0; o < OUT; o++) {
            float error = bias[o] - 0.5f;
            for (int i = 0; i < IN; i++) /* the truth: a matrix of random numbers */
                error += (weight[o * IN + i] - dtrain_random_normal(2, 0, (uint64_t)(o * IN + i))) *
                         x[i];
            loss += error * error / (OUT * BATCH);
            bias_grad[o] += 2 * error / BATCH;
            for (int i = 0; i < IN; i++) weight_grad[o * IN + i] += 2 * error * x[i] / BATCH;
        }
    }
    return loss;
}

typedef struct outcome {
    float loss[STEPS / 50];
    double bytes; /* that a rank sends a step */
} outcome;

static int train_once(dtrain_world *world, const dtrain_comm_hook_desc *hook, outcome *of)
{
    float weight[OUT * IN] = {0}, weight_grad[OUT * IN], bias[OUT] = {0}, bias_grad[OUT];
    dtrain_param params[] = {
        {.name = "weight", .value = weight, .grad = weight_grad, .shape = {OUT, IN}},
        {.name = "bias", .value = bias, .grad = bias_grad, .shape = {OUT}},
    };
    dtrain_compression_desc compression = {.hook = hook, .dense_steps = DTRAIN_DENSE_STEPS_NONE};
    dtrain_strategy_desc desc = {.compression = hook ? &compression : NULL};
    dtrain_strategy_info before, after;
    dtrain_strategy *ddp;
    CHECK(dtrain_strategy_create(world, params, 2, &desc, &ddp));
    for (int step = 1; step <= STEPS; step++) {
        float loss = backward(dtrain_world_rank(world), step, weight, bias, weight_grad, bias_grad);
        dtrain_strategy_query(ddp, &before);
        CHECK(dtrain_strategy_ready(ddp, 0));
        CHECK(dtrain_strategy_ready(ddp, 1));
        CHECK(dtrain_strategy_finish(ddp));
        dtrain_strategy_query(ddp, &after);
        for (int i = 0; i < OUT * IN; i++) weight[i] -= 0.02f * weight_grad[i];
        for (int o = 0; o < OUT; o++) bias[o] -= 0.02f * bias_grad[o];
        if (step % 50) continue;
        CHECK(dtrain_all_reduce(dtrain_world_comm(world), &loss, &loss, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
        of->loss[step / 50 - 1] = loss;
    }
    CHECK(dtrain_strategy_verify(ddp, NULL)); /* all ranks have the same bits */
    of->bytes = (double)(after.traffic.wire_bytes - before.traffic.wire_bytes); /* of the last */
    dtrain_strategy_destroy(ddp);
    return 0;
}

static int train(dtrain_world *world, void *user)
{
    outcome whole, signs;
    (void)user;
    if (train_once(world, NULL, &whole) || train_once(world, &sign_hook, &signs)) return 1;
    if (dtrain_world_rank(world)) return 0;
    printf("              whole gradients      signs\n");
    for (int i = 0; i < STEPS / 50; i++)
        printf("step %3d loss %15.6f %10.6f\n", 50 * (i + 1), whole.loss[i], signs.loss[i]);
    printf("bytes sent a step %11.0f %10.0f\n", whole.bytes, signs.bytes);
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 2};
    if (argc > 1 && (desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10)) == 0) {
        fprintf(stderr, "usage: sign_sgd [RANKS], not \"%s\"\n", argv[1]);
        return 2;
    }
    if (dtrain_launch(&desc, train, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "sign_sgd: %s\n", dtrain_last_error());
    return 1;
}
