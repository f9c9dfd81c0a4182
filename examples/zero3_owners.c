/* zero3_owners.c: gives every matrix one owner (ZERO3): the owner keeps its value, gradient and optimizer state whole,
 * and updates it for all ranks. Optimizers of whole matrices need that: Muon.
 *
 *   build:   cc -O2 -I. examples/zero3_owners.c -o zero3_owners -lm -lpthread
 *   run:     ./zero3_owners             four ranks; ./zero3_owners 3 starts three
 *   expect:
 *     rank 0 owns w1 w5
 *     rank 1 owns w2 w6
 *     rank 2 owns w3 w7
 *     rank 3 owns w4 w8
 *     KiB of rank 0  parameters  gradients  momentum  loss
 *     ddp                   512        512       512  0.717862
 *     zero3                 128        128       128  0.717862
 *     the losses and the parameters are equal, bit for bit
 *
 * Under DDP every rank computes Muon's iteration for all matrices, under ZERO3 for its own. Kinds that cut tensors,
 * such as FULL_SHARD, refuse Muon. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "examples/layers.h"

/* Print which matrices each rank owns, and fail if one was cut. */
static int show_owners(dtrain_world *world, const dtrain_strategy_desc *desc)
{
    char mine[64] = "", all[64 * DTRAIN_MAX_RANKS];
    dtrain_param params[LAYERS];
    dtrain_strategy *strategy;
    const dtrain_shard *shards;
    size_t count;
    declare(params);
    CHECK(dtrain_strategy_create(world, params, LAYERS, desc, &strategy));
    CHECK(dtrain_strategy_shards(strategy, &shards, &count));
    for (size_t s = 0; s < count; s++) {
        if (shards[s].offset || shards[s].count != WIDTH * WIDTH)
            CHECK(dtrain_fail(DTRAIN_ERROR_NUMERIC, "a part of %s", shards[s].param->name));
        strcat(strcat(mine, " "), shards[s].param->name);
    }
    CHECK(dtrain_world_all_gather(world, mine, sizeof mine, all));
    for (int r = 0; r < dtrain_world_size(world) && dtrain_world_rank(world) == 0; r++)
        printf("rank %d owns%s\n", r, all + 64 * r);
    dtrain_strategy_destroy(strategy);
    return 0;
}

/* Every rank runs this function. */
static int compare(dtrain_world *world, void *user)
{
    const dtrain_optimizer_desc muon = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON);
    const dtrain_strategy_desc kinds[2] = {{.kind = DTRAIN_STRATEGY_DDP},
                                           {.kind = DTRAIN_STRATEGY_ZERO3}};
    outcome of[2];
    (void)user;
    if (show_owners(world, &kinds[1])) return 1;
    if (dtrain_world_rank(world) == 0)
        printf("KiB of rank 0  parameters  gradients  momentum  loss\n");
    for (int k = 0; k < 2; k++) {
        CHECK(train(world, &kinds[k], &muon, 0.02f, &of[k]));
        if (dtrain_world_rank(world) == 0)
            printf("%-13s  %10.0f  %9.0f  %8.0f  %.6f\n", of[k].info.name,
                   kib(of[k].info.value_bytes), kib(of[k].info.grad_bytes),
                   kib(of[k].optimizer_bytes), (double)of[k].loss);
    }
    if (of[0].hash != of[1].hash || of[0].loss != of[1].loss)
        CHECK(dtrain_fail(DTRAIN_ERROR_NUMERIC, "losses or parameters differ from those of DDP"));
    if (dtrain_world_rank(world) == 0)
        printf("the losses and the parameters are equal, bit for bit\n");
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 4};
    if (argc > 1 && (desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10)) == 0) {
        fprintf(stderr, "usage: zero3_owners [RANKS], not \"%s\"\n", argv[1]);
        return 2;
    }
    if (dtrain_launch(&desc, compare, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "zero3_owners: %s\n", dtrain_last_error());
    return 1;
}
