/* cnn.c: a convolutional network on the tape, with data parallelism and its own training loop. It stands between
 * mlp.c and resnet_cifar.c, which has photographs, batch normalisation and the trainer.
 *
 *   build:   cc -O2 -I. examples/cnn.c -o cnn -lm -lpthread
 *   run:     ./cnn                    two ranks learn to read digits that the program draws; ./cnn 1 starts one
 *   expect of ./cnn, within 3 %, in a quarter of a minute of two cores:
 *     step 100  loss 2.092  test accuracy 39.8 %
 *     step 600  loss 0.098  test accuracy 97.5 %
 *
 * A step takes 64 images, divided among the ranks, and averages gradients: ./cnn 1 learns the same, except for
 * rounding, and ends with 97.9 %. For strategies that shard parameters, make each layer a unit, as mlp.c does. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

enum { SIDE = 32, PIXELS = SIDE * SIDE, CLASSES = 10, BATCH = 64, CONVS = 3, PARAMS = CONVS + 2 };
enum { STEPS = 600, SHOW = 100, TESTS = 16, HELD_OUT = STEPS * BATCH }; /* no step draws these */

/* Draw images (count, 32, 32), beginning with number `first`: a digit of 5 rows of 3 dots (octal below) at a random
 * place in noise. */
static void draw(int64_t first, int64_t count, float *x, int32_t *labels)
{
    static const int digits[CLASSES] = {075557, 026227, 071747, 071717, 055711,
                                        074717, 074757, 071122, 075757, 075717};
    for (uint64_t i = (uint64_t)first; i < (uint64_t)(first + count); i++) {
        const int label = (int)(CLASSES * dtrain_random_uniform(1, 0, i));
        const int left = (int)(21 * dtrain_random_uniform(1, 1, i));
        const int top = (int)(13 * dtrain_random_uniform(1, 2, i));
        for (int p = 0; p < PIXELS; p++) {
            const int column = p % SIDE - left, row = p / SIDE - top;
            const bool inside = column >= 0 && column < 12 && row >= 0 && row < 20;
            *x = 0.6f * dtrain_random_normal(1, 3, i * PIXELS + (uint64_t)p);
            *x++ += inside && digits[label] >> (14 - row / 4 * 3 - column / 4) & 1;
        }
        *labels++ = label;
    }
}

/* Turn images into logits (batch, 10). Each layer halves height and width; the last one leaves 4 x 4. */
static dtrain_tensor *forward(dtrain_tape *t, dtrain_param *p, const float *x, int64_t batch)
{
    const int64_t images[4] = {batch, SIDE, SIDE, 1}, rows[2] = {batch, -1};
    const dtrain_conv2d_desc conv = {.padding = {1, 1}};
    const dtrain_pool2d_desc pool = {.kind = DTRAIN_POOL_MAX, .kernel = {2, 2}};
    dtrain_tensor *h = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 4, images, x, false);
    for (int l = 0; l < CONVS; l++) {
        h = dtrain_conv2d(t, h, p++, NULL, &conv);
        h = dtrain_pool2d(t, dtrain_activate(t, h, DTRAIN_ACTIVATION_RELU), &pool);
    }
    return dtrain_linear(t, dtrain_reshape(t, h, 2, rows), p, p + 1, DTRAIN_ACTIVATION_NONE);
}

/* Every rank runs this function. */
static int train(dtrain_world *world, void *user)
{
    const int64_t rank = dtrain_world_rank(world), batch = BATCH / dtrain_world_size(world);
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_param params[PARAMS] = {{.name = "conv1.weight", .shape = {16, 1, 3, 3}},
                                   {.name = "conv2.weight", .shape = {32, 16, 3, 3}},
                                   {.name = "conv3.weight", .shape = {64, 32, 3, 3}},
                                   {.name = "fc.weight", .shape = {CLASSES, 64 * 4 * 4}},
                                   {.name = "fc.bias", .shape = {CLASSES}}}; /* starts at zero */
    for (int i = 0; i < PARAMS - 1; i++) {
        params[i].init = DTRAIN_INIT_NORMAL; /* He et al., 2015; the classifier starts smaller */
        params[i].init_scale = i < CONVS ? sqrtf(2.0f / (float)(9 * params[i].shape[1])) : 0.01f;
    }
    float x[BATCH * PIXELS], logits[BATCH * CLASSES], loss, sums[2] = {0, 0}; /* loss, per cent */
    int32_t labels[BATCH];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_tape *tape;
    CHECK(dtrain_strategy_create(world, params, PARAMS, NULL, &strategy)); /* NULL: plain DDP */
    CHECK(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    CHECK(dtrain_tape_create(world, strategy, NULL, &tape));
    for (int step = 1; step <= STEPS; step++) {
        draw((step - 1) * BATCH + rank * batch, batch, x, labels);
        CHECK(dtrain_tape_begin(tape, 0, 0));
        dtrain_tensor *wanted = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &batch, labels, false),
                      *scores = forward(tape, params, x, batch),
                      *mean = dtrain_cross_entropy(tape, scores, wanted, 0, 0);
        CHECK(dtrain_tensor_read(tape, mean, &loss, NULL));
        CHECK(dtrain_tape_backward(tape, mean, 1)); /* reduces gradients as they are made */
        CHECK(dtrain_strategy_finish(strategy));
        CHECK(dtrain_optimizer_step(optimizer, 2e-3f * (float)(STEPS - step) / STEPS, 1));
        sums[0] += loss / SHOW;
        if (step % SHOW) continue;
        for (int b = 0; b < TESTS; b++) {
            draw(HELD_OUT + b * BATCH + rank * batch, batch, x, labels);
            CHECK(dtrain_tape_begin(tape, DTRAIN_TAPE_NO_GRAD, 0));
            CHECK(dtrain_tensor_read(tape, forward(tape, params, x, batch), logits, NULL));
            for (int64_t i = 0; i < batch; i++) {
                const float *row = logits + i * CLASSES;
                int best = 0;
                for (int c = 1; c < CLASSES; c++) best = row[c] > row[best] ? c : best;
                if (best == labels[i]) sums[1] += 100.0f / (float)(TESTS * batch);
            }
        }
        CHECK(dtrain_all_reduce(dtrain_world_comm(world), sums, sums, 2, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
        if (rank == 0)
            printf("step %d  loss %.3f  test accuracy %.1f %%\n", step, sums[0], sums[1]);
        sums[0] = sums[1] = 0;
    }
    dtrain_tape_destroy(tape);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return (void)user, 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 2}; /* without torchrun, mpirun or srun */
    if (argc > 1 && (desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10)) == 0)
        return fprintf(stderr, "usage: cnn [RANKS], not \"%s\"\n", argv[1]), 2;
    if (dtrain_launch(&desc, train, NULL, NULL) == DTRAIN_OK) return 0;
    return fprintf(stderr, "cnn: %s\n", dtrain_last_error()), 1;
}
