/* layers.h: a training loop that is written once and runs under every strategy, for examples that differ in settings.
 * Include it after dtrain.h.
 *
 * The model is a stack of square matrices, which learns to reverse rows of numbers; every rank draws other rows. A
 * matrix is a unit: what sharded strategies gather and reduce at a time. */
#ifndef LAYERS_H
#define LAYERS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 8, WIDTH = 128, BATCH = 16, STEPS = 20 };

/* End this rank when a call fails. dtrain_launch then ends the others, and its own error quotes the sentence of this
 * one; the memory of a rank goes with its process. */
#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

/* Return the error of a call that fails. */
#define TRY(call)                                       \
    do {                                                \
        const dtrain_result try_result = (call);        \
        if (try_result != DTRAIN_OK) return try_result; \
    } while (0)

static void declare(dtrain_param params[LAYERS])
{
    static const char *const names[LAYERS] = {"w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8"};
    for (uint32_t l = 0; l < LAYERS; l++)
        params[l] = (dtrain_param){.name = names[l],
                                   .unit = l,
                                   .shape = {WIDTH, WIDTH},
                                   .init = DTRAIN_INIT_NORMAL,
                                   .init_scale = 0.09f};
}

/* One forward and backward on this rank's rows, and the update; *loss is the mean squared error. */
static dtrain_result train_step(dtrain_tape *tape, dtrain_strategy *strategy,
                                dtrain_optimizer *optimizer, dtrain_param *params, int rank,
                                int step, float lr, float *loss)
{
    const int64_t shape[2] = {BATCH, WIDTH};
    float x[BATCH * WIDTH], y[BATCH * WIDTH];
    for (int i = 0; i < BATCH * WIDTH; i++) {
        x[i] = dtrain_random_normal(1, (uint64_t)rank, (uint64_t)(step * BATCH * WIDTH + i));
        y[i / WIDTH * WIDTH + WIDTH - 1 - i % WIDTH] = x[i];
    }
    TRY(dtrain_tape_begin(tape, 0, 0));
    dtrain_tensor *h = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, false);
    dtrain_tensor *target = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, y, false);
    for (uint32_t l = 0; l < LAYERS; l++) {
        dtrain_tape_unit(tape, l); /* gathers what is sharded, and releases it after the unit */
        h = dtrain_linear(tape, h, &params[l], NULL, DTRAIN_ACTIVATION_NONE);
    }
    h = dtrain_mse_loss(tape, h, target);
    TRY(dtrain_tensor_read(tape, h, loss, NULL));
    TRY(dtrain_tape_backward(tape, h, 1));
    TRY(dtrain_strategy_finish(strategy));
    return dtrain_optimizer_step(optimizer, lr,
                                 1); /* updates this rank's shards and publishes them */
}

/* What this rank holds and sends, and what was learned. */
typedef struct outcome {
    dtrain_strategy_info info; /* at the end */
    uint64_t optimizer_bytes;
    uint64_t sent_bytes, node_bytes; /* in the last step: all, and of it to other nodes */
    float loss;                      /* of the last step, the mean over the ranks */
    uint64_t hash;                   /* of all parameters */
} outcome;

/* Train the model under a strategy with an optimizer. */
static dtrain_result train(dtrain_world *world, const dtrain_strategy_desc *where,
                           const dtrain_optimizer_desc *how, float lr, outcome *of)
{
    static dtrain_param params[LAYERS]; /* ranks are processes */
    const int rank = dtrain_world_rank(world);
    dtrain_strategy *strategy;
    dtrain_strategy_info before;
    dtrain_optimizer *optimizer;
    dtrain_optimizer_info state;
    dtrain_tape *tape;
    declare(params);
    TRY(dtrain_strategy_create(world, params, LAYERS, where, &strategy));
    TRY(dtrain_optimizer_create(world, strategy, how, &optimizer));
    TRY(dtrain_tape_create(world, strategy, NULL, &tape));
    for (int step = 0; step < STEPS; step++) {
        dtrain_strategy_query(strategy, &before);
        TRY(train_step(tape, strategy, optimizer, params, rank, step, lr, &of->loss));
    }
    dtrain_strategy_query(strategy, &of->info);
    dtrain_optimizer_query(optimizer, &state);
    of->optimizer_bytes = state.state_bytes;
    of->sent_bytes = of->info.traffic.wire_bytes - before.traffic.wire_bytes;
    of->node_bytes = of->info.traffic.node_bytes - before.traffic.node_bytes;
    TRY(dtrain_all_reduce(dtrain_world_comm(world), &of->loss, &of->loss, 1, DTRAIN_DTYPE_F32,
                          DTRAIN_REDUCE_MEAN, NULL));
    TRY(dtrain_strategy_verify(strategy, &of->hash)); /* all ranks have the same bits */
    dtrain_tape_destroy(tape);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return DTRAIN_OK;
}

static inline double kib(uint64_t bytes) { return (double)bytes / 1024; }

#endif
