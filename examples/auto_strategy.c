/* auto_strategy.c: lets the library choose the strategy (AUTO): the kind that communicates least, among the kinds that
 * fit the memory limit of a rank.
 *
 *   build:   cc -O2 -I. examples/auto_strategy.c -o auto_strategy -lm -lpthread
 *   run:     ./auto_strategy            eight ranks, two nodes of four
 *   expect:
 *     KiB of rank 0  limit  chosen         parameters  gradients  buffers  AdamW  loss
 *                     1152  zero1                 512        512        0    128  0.839179
 *                      832  shard_grad_op         512         64      128    128  0.839179
 *                      768  hybrid_shard          128        128      256    256  0.839179
 *                      512  full_shard             64         64      256    128  0.839179
 *                      256  none fits
 *
 * dtrain_strategy_plan counts the memory of a kind without allocating it. The program sets its total as the limit;
 * without a limit AUTO takes what is free on the device. other_bytes is what a rank needs for activations. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "examples/layers.h"

enum { RANKS = 8, NODE_RANKS = 4, KINDS = 4 };

/* Every rank runs this function. */
static int choose(dtrain_world *world, void *user)
{
    static const uint32_t kinds[KINDS] = {
        DTRAIN_STRATEGY_ZERO1, DTRAIN_STRATEGY_SHARD_GRAD_OP, DTRAIN_STRATEGY_HYBRID_SHARD,
        DTRAIN_STRATEGY_FULL_SHARD}; /* in the order in which AUTO tries them */
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    const bool first = dtrain_world_rank(world) == 0;
    dtrain_strategy_desc automatic = {.kind = DTRAIN_STRATEGY_AUTO};
    outcome of;
    (void)user;
    if (first)
        printf(
            "KiB of rank 0  limit  chosen         parameters  gradients  buffers  AdamW  loss\n");
    for (int k = 0; k < KINDS; k++) {
        dtrain_strategy_desc desc = {.kind = kinds[k]};
        dtrain_param params[LAYERS];
        dtrain_memory plan;
        if (kinds[k] == DTRAIN_STRATEGY_HYBRID_SHARD) desc.node_size = NODE_RANKS;
        declare(params);
        CHECK(dtrain_strategy_plan(params, LAYERS, &desc, RANKS, &plan));
        automatic.memory_limit = plan.total;
        CHECK(train(world, &automatic, &adamw, 1e-3f, &of));
        const dtrain_strategy_info *held = &of.info;
        if (first)
            printf("%20.0f  %-13s  %10.0f  %9.0f  %7.0f  %5.0f  %.6f\n", kib(plan.total),
                   held->name, kib(held->value_bytes), kib(held->grad_bytes),
                   kib(held->buffer_bytes), kib(of.optimizer_bytes), (double)of.loss);
        if (held->desc.kind != kinds[k] ||
            held->value_bytes + held->grad_bytes + held->buffer_bytes + of.optimizer_bytes >
                plan.total)
            CHECK(dtrain_fail(DTRAIN_ERROR_NUMERIC, "%s was chosen: %s", held->name, held->reason));
    }
    automatic.memory_limit /= 2;
    if (train(world, &automatic, &adamw, 1e-3f, &of) != DTRAIN_ERROR_MEMORY) return 1;
    if (first) {
        printf("%20.0f  none fits\n", kib(automatic.memory_limit));
        fprintf(stderr, "%s\n", dtrain_last_error()); /* how much is missing, and what would help */
    }
    return 0;
}

int main(void)
{
    const dtrain_launch_desc desc = {.rank_count = RANKS, .options = {.node_ranks = NODE_RANKS}};
    if (dtrain_launch(&desc, choose, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "auto_strategy: %s\n", dtrain_last_error());
    return 1;
}
