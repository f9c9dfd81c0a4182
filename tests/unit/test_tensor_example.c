/* test_tensor_example.c: the cross-entropy of examples/tensor_parallel.c, of logits whose classes are divided over
 * 1 to 8 ranks, beside a dense one in double; what it sends. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#undef CHECK
#define DTRAIN__IMPLEMENTED /* the library that the test is linked with */
#define main example_main
#include "../../examples/tensor_parallel.c"
#undef main
#undef CHECK
#define CHECK(condition) CHECK_MSG(condition, "%s", #condition)
#include "dense_loss.h"

static const loss_case cases[] = {
    {6, 16, 16, 0, NORMAL, false},
    {5, 9, 9, 0, EXTREME, false},
    {24, 40, 40, 0, EXTREME, false},
    {3, 50257, 50257, 0, NORMAL, false},
    {4, 24, 24, 0, LAST_RANK_INFINITE, false},
    {4, 24, 24, 0, WITH_NAN, false},
    {4, 3, 3, 0, NORMAL, false}, /* ranks without a class */
};

static int loss_rank_main(dtrain_world *world, void *user)
{
    const int ranks = dtrain_world_size(world), rank = dtrain_world_rank(world);
    dtrain_comm *comm = dtrain_world_comm(world);
    (void)user;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const loss_case *c = &cases[k];
        loss_rank l = loss_open(c, ranks, rank, 1);
        double got = -1, all[RANKS_MOST];
        dtrain_comm_info before, after;
        dtrain_comm_query(comm, &before);
        CHECK(cross_entropy(comm, (int)c->rows, (int)l.columns, (int)l.first, l.here, l.targets,
                            &got) == 0);
        dtrain_comm_query(comm, &after);
        CHECK_MSG(near_to(got, l.want, 1e-6), "%d ranks, case %d: loss %.9g, expected %.9g", ranks,
                  (int)k, got, l.want);
        CHECK(after.operation_count - before.operation_count == 2);
        CHECK(after.payload_bytes - before.payload_bytes == (uint64_t)c->rows * 3 * sizeof(float));
        loss_gradient(c, &l, l.here, "tensor_parallel.c");
        RANKS_TRY(dtrain_world_all_gather(world, &got, sizeof got, all));
        for (int r = 1; r < ranks; r++) CHECK(memcmp(&all[r], &all[0], sizeof got) == 0);
        loss_close(&l);
    }
    return 0;
}

static void test_loss(void)
{
    static const int axes[] = {1, 2, 3, 4, 8};
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++)
        ranks_run(axes[i], DTRAIN_LAUNCH_THREADS, loss_rank_main, NULL);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_loss);
    return test_summary();
}
