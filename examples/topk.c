/* topk.c: compresses gradients with top-k: each rank sends the largest 2 % of a matrix, as values and indices.
 *
 *   build:   cc -O2 -I. examples/topk.c -o topk -lm -lpthread
 *   run:     ./topk                     two ranks; ./topk 4 starts four
 *   expect:
 *                    DDP            top-k   no error feedback
 *     step     loss bytes     loss  bytes        loss bytes
 *        0  62.5394  8200  62.5394   8200     62.5394  8200
 *       30  32.7634  8200  33.3899   2184     35.1220  2184
 *       60  17.3229  8200  19.8784    336     28.0714   336
 *      330   0.0838  8200   0.0443    336     15.5535   336
 *
 * The first dense_steps steps send whole gradients. In the next warmup_steps the share falls from warmup_ratio to
 * topk_ratio. What a rank does not send stays in its residual, which is added to its next gradient: without this
 * error feedback most elements of the gradient never arrive. Biases and small tensors always travel whole. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 64, OUT = 32, BATCH = 32, STEPS = 400 };

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

static float truth[OUT * IN]; /* what weight learns; ranks are processes */

/* Return the mean squared error of this rank's batch, and write the gradient of weight (OUT, IN). */
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
            for (int i = o * IN; i < (o + 1) * IN; i++) error += (weight[i] - truth[i]) * x[i % IN];
            loss += error * error / (OUT * BATCH);
            for (int i = 0; i < IN; i++) grad[o * IN + i] += 2 * error * x[i] / BATCH;
        }
    }
    return loss;
}

/* Train with a compression, or with none; loss and bytes (STEPS) have an entry for each step. */
static int train(dtrain_world *world, const dtrain_compression_desc *compression, float *loss,
                 uint64_t *bytes)
{
    const dtrain_strategy_desc desc = {.compression = compression};
    float weight[OUT * IN] = {0}, grad[OUT * IN];
    dtrain_param param = {.name = "weight", .value = weight, .grad = grad, .shape = {OUT, IN}};
    dtrain_strategy_info before, after;
    dtrain_strategy *ddp;
    CHECK(dtrain_strategy_create(world, &param, 1, &desc, &ddp));
    for (int step = 0; step < STEPS; step++) {
        loss[step] = backward(dtrain_world_rank(world), step, weight, grad);
        dtrain_strategy_query(ddp, &before);
        CHECK(dtrain_strategy_ready(ddp, 0));
        CHECK(dtrain_strategy_finish(ddp)); /* the mean of what the ranks have sent */
        dtrain_strategy_query(ddp, &after);
        bytes[step] = after.traffic.wire_bytes - before.traffic.wire_bytes;
        for (int i = 0; i < OUT * IN; i++) weight[i] -= 0.005f * grad[i];
    }
    CHECK(dtrain_all_reduce(dtrain_world_comm(world), loss, loss, STEPS, DTRAIN_DTYPE_F32,
                            DTRAIN_REDUCE_MEAN, NULL));
    CHECK(dtrain_strategy_verify(ddp, NULL)); /* all ranks have the same bits */
    dtrain_strategy_destroy(ddp);
    return 0;
}

/* Train three times, and compare. */
static int compare(dtrain_world *world, void *user)
{
    const dtrain_compression_desc topk = {.kind = DTRAIN_COMPRESSION_TOPK,
                                          .topk_ratio = 0.02f,
                                          .dense_steps = 20,
                                          .warmup_steps = 40};
    dtrain_compression_desc forgetful = topk;
    float loss[3][STEPS];
    uint64_t bytes[3][STEPS];
    const int end = STEPS - 1;
    (void)user;
    forgetful.no_error_feedback = true;
    for (int i = 0; i < OUT * IN; i++) truth[i] = dtrain_random_normal(2, 0, (uint64_t)i);
    if (train(world, NULL, loss[0], bytes[0]) || train(world, &topk, loss[1], bytes[1]) ||
        train(world, &forgetful, loss[2], bytes[2]))
        return 1;
    if (dtrain_world_rank(world) == 0) {
        printf("               DDP            top-k   no error feedback\n"
               "step     loss bytes     loss  bytes        loss bytes\n");
        for (int s = 0; s < STEPS; s += s < 60 ? 10 : 90)
            printf("%4d  %7.4f %5d  %7.4f  %5d     %7.4f %5d\n", s, loss[0][s], (int)bytes[0][s],
                   loss[1][s], (int)bytes[1][s], loss[2][s], (int)bytes[2][s]);
    }
    if (dtrain_world_size(world) == 1) return 0; /* nothing is sent */
    if (loss[1][end] > 0.1f || loss[2][end] < 1)
        CHECK(dtrain_fail(DTRAIN_ERROR_NUMERIC,
                          "top-k ends with a loss of %g, and of %g without "
                          "error feedback",
                          (double)loss[1][end], (double)loss[2][end]));
    if (bytes[1][0] != bytes[0][0] || bytes[1][end] * 10 > bytes[0][end])
        CHECK(dtrain_fail(DTRAIN_ERROR_NUMERIC, "top-k sends %d bytes, then %d, and DDP %d",
                          (int)bytes[1][0], (int)bytes[1][end], (int)bytes[0][0]));
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 2};
    if (argc > 1 && (desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10)) == 0) {
        fprintf(stderr, "usage: topk [RANKS], not \"%s\"\n", argv[1]);
        return 2;
    }
    if (dtrain_launch(&desc, compare, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "topk: %s\n", dtrain_last_error());
    return 1;
}
