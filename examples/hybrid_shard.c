/* hybrid_shard.c: shards a model inside each node and replicates it across nodes (HYBRID_SHARD): parameters travel over
 * the fast links of a node only, and a rank sends 1/G of the gradients to other nodes, which have G ranks each.
 *
 *   build:   cc -O2 -I. examples/hybrid_shard.c -o hybrid_shard -lm -lpthread
 *   run:     ./hybrid_shard             two nodes of two ranks; ./hybrid_shard 8 starts four nodes
 *   expect:
 *     KiB of rank 0     parameters  sent a step  to other nodes  loss
 *     ddp                    512.0        768.1           512.0  0.865715
 *     full_shard             128.0       1056.1           704.0  0.865715
 *     hybrid_shard           256.0        960.1           256.0  0.865715
 *
 * dtrain_world_options.node_ranks counts two ranks of this machine as a node. On real nodes leave it out: the launcher
 * knows which ranks share a host. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "examples/layers.h"

enum { NODE_RANKS = 2 };

/* Every rank runs this function. */
static int compare(dtrain_world *world, void *user)
{
    static const uint32_t kinds[3] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_FULL_SHARD,
                                      DTRAIN_STRATEGY_HYBRID_SHARD};
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    outcome of[3];
    (void)user;
    if (dtrain_world_rank(world) == 0)
        printf("KiB of rank 0     parameters  sent a step  to other nodes  loss\n");
    for (int k = 0; k < 3; k++) {
        const dtrain_strategy_desc desc = {.kind = kinds[k]};
        CHECK(train(world, &desc, &adamw, 1e-3f, &of[k]));
        if (dtrain_world_rank(world) == 0)
            printf("%-16s  %10.1f  %11.1f  %14.1f  %.6f\n", of[k].info.name,
                   kib(of[k].info.value_bytes), kib(of[k].sent_bytes), kib(of[k].node_bytes),
                   (double)of[k].loss);
        if (fabsf(of[k].loss - of[0].loss) > 1e-5f * of[0].loss) /* sums in another order */
            CHECK(dtrain_fail(DTRAIN_ERROR_NUMERIC, "the losses differ"));
    }
    if (of[2].info.value_bytes * NODE_RANKS != of[0].info.value_bytes ||
        of[2].node_bytes * NODE_RANKS > of[1].node_bytes)
        CHECK(dtrain_fail(DTRAIN_ERROR_NUMERIC, "hybrid_shard keeps %g KiB and sends %g to nodes",
                          kib(of[2].info.value_bytes), kib(of[2].node_bytes)));
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 4, .options = {.node_ranks = NODE_RANKS}};
    if (argc > 1 && (desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10)) == 0) {
        fprintf(stderr, "usage: hybrid_shard [RANKS], not \"%s\"\n", argv[1]);
        return 2;
    }
    if (dtrain_launch(&desc, compare, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "hybrid_shard: %s\n", dtrain_last_error());
    return 1;
}
