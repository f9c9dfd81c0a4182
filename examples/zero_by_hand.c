/* zero_by_hand.c: what each stage of ZeRO keeps and sends, on a model so small that you can check every number: three
 * layers of 1024, 4096 and 1024 weights, 24 KiB of them, on four ranks. docs/zero-by-hand.md does the arithmetic.
 *
 *   build:   cc -O2 -I. examples/zero_by_hand.c -o zero_by_hand -lm -lpthread
 *   run:     ./zero_by_hand               four ranks; ./zero_by_hand 2 starts two
 *   expect:
 *     KiB of the rank that has most, of 4
 *     strategy       parameters  gradients  AdamW  buffers  sent a step  loss after 20 steps
 *     ddp                  24.0       24.0   48.0      0.0         36.0  0.512429
 *     zero1                24.0       24.0   12.0      0.0         36.0  0.512429
 *     shard_grad_op        24.0        6.0   12.0     32.0         36.0  0.512429
 *     full_shard            6.0        6.0   12.0     64.0         39.0  0.512429
 *     zero3                16.0       16.0   32.0     64.0         39.0  0.512429
 *
 * Every row is the same training run: a strategy changes where values lie, not what is computed. */
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

enum { LAYERS = 3, BATCH = 8, STEPS = 20 };
static const int64_t widths[LAYERS + 1] = {16, 64, 64, 16};

/* Declare a weight (out, in) for each layer. Each is a unit: what is gathered and reduced together. */
static void declare(dtrain_param params[LAYERS])
{
    static const char *const names[LAYERS] = {"first", "second", "third"};
    memset(params, 0, LAYERS * sizeof *params);
    for (int i = 0; i < LAYERS; i++) {
        params[i].name = names[i];
        params[i].unit = (uint32_t)i;
        params[i].shape[0] = widths[i + 1];
        params[i].shape[1] = widths[i];
        params[i].init = DTRAIN_INIT_UNIFORM;
        params[i].init_scale = sqrtf(3.0f / (float)widths[i]);
    }
}

/* Learn to reverse 16 numbers; the ranks draw different ones. */
static int step(dtrain_tape *t, dtrain_strategy *strategy, dtrain_optimizer *adamw,
                dtrain_param *params, int rank, int number, float *loss)
{
    const int64_t shape[2] = {BATCH, widths[0]};
    float x[BATCH * 16], y[BATCH * 16];
    for (int i = 0; i < BATCH * 16; i++) {
        x[i] = dtrain_random_normal(1, (uint64_t)rank, (uint64_t)(number * BATCH * 16 + i));
        y[i / 16 * 16 + 15 - i % 16] = x[i];
    }
    CHECK(dtrain_tape_begin(t, 0, 0));
    dtrain_tensor *h = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 2, shape, x, false);
    dtrain_tensor *target = dtrain_tape_input(t, DTRAIN_DTYPE_F32, 2, shape, y, false);
    for (int l = 0; l < LAYERS; l++) {
        dtrain_tape_unit(t,
                         (uint32_t)l); /* gathers sharded parameters; the next unit releases them */
        h = dtrain_linear(t, h, &params[l], NULL,
                          l + 1 < LAYERS ? DTRAIN_ACTIVATION_GELU : DTRAIN_ACTIVATION_NONE);
    }
    dtrain_tensor *mean = dtrain_mse_loss(t, h, target);
    CHECK(dtrain_tensor_read(t, mean, loss, NULL));
    CHECK(dtrain_tape_backward(t, mean, 1));
    CHECK(dtrain_strategy_finish(strategy));
    CHECK(
        dtrain_optimizer_step(adamw, 3e-3f, 1)); /* updates this rank's shards and publishes them */
    return 0;
}

static double kib(int64_t bytes) { return (double)bytes / 1024; }

/* Train under one strategy; print what the rank that has most of it keeps and sends. */
static int train(dtrain_world *world, uint32_t kind)
{
    const int rank = dtrain_world_rank(world);
    const dtrain_strategy_desc desc = {.kind = kind};
    const dtrain_optimizer_desc how = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_param params[LAYERS];
    dtrain_strategy *strategy;
    dtrain_strategy_info info, before;
    dtrain_optimizer *adamw;
    dtrain_optimizer_info moments;
    dtrain_tape *tape;
    float loss = 0;
    declare(params);
    CHECK(dtrain_strategy_create(world, params, LAYERS, &desc, &strategy));
    CHECK(dtrain_optimizer_create(world, strategy, &how, &adamw));
    CHECK(dtrain_tape_create(world, strategy, NULL, &tape));
    for (int s = 0; s < STEPS; s++) {
        dtrain_strategy_query(strategy, &before);
        if (step(tape, strategy, adamw, params, rank, s, &loss)) return 1;
    }
    dtrain_strategy_query(strategy, &info);
    dtrain_optimizer_query(adamw, &moments);
    int64_t bytes[5] = {(int64_t)info.value_bytes, (int64_t)info.grad_bytes,
                        (int64_t)moments.state_bytes, (int64_t)info.buffer_bytes,
                        (int64_t)(info.traffic.wire_bytes - before.traffic.wire_bytes)};
    dtrain_comm *all = dtrain_world_comm(world);
    CHECK(dtrain_all_reduce(all, bytes, bytes, 5, DTRAIN_DTYPE_I64, DTRAIN_REDUCE_MAX, NULL));
    CHECK(dtrain_all_reduce(all, &loss, &loss, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_MEAN, NULL));
    if (rank == 0)
        printf("%-13s  %10.1f  %9.1f  %5.1f  %7.1f  %11.1f  %.6f\n", info.name, kib(bytes[0]),
               kib(bytes[1]), kib(bytes[2]), kib(bytes[3]), kib(bytes[4]), loss);
    dtrain_tape_destroy(tape);
    dtrain_optimizer_destroy(adamw);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static int rank_main(dtrain_world *world, void *user)
{
    (void)user;
    if (dtrain_world_rank(world) == 0)
        printf("KiB of the rank that has most, of %d\n"
               "strategy       parameters  gradients  AdamW  buffers  sent a step  loss after 20 "
               "steps\n",
               dtrain_world_size(world));
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_ZERO3; kind++)
        if (train(world, kind)) return 1;
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 4};
    if (argc > 1 && (desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10)) == 0) {
        fprintf(stderr, "usage: zero_by_hand [RANKS], not \"%s\"\n", argv[1]);
        return 2;
    }
    if (dtrain_launch(&desc, rank_main, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "zero_by_hand: %s\n", dtrain_last_error());
    return 1;
}
