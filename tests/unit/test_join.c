/* test_join.c: guests in programs that already run in parallel (src/launch/join.c). The host of these tests has
 * ranks that are processes or threads, and an all-gather over shared memory that blocks without a deadline. */
#include "test.h"

#include "dtrain.h"
#include "host.h"

enum { COUNT = 5000 };

/* Join, sum over the members, and leave. Return 0, or 1 with the sentence in `why`. */
static int visit(host_group *group, int rank, char why[256])
{
    host_member member = host_member_of(group, rank);
    const dtrain_join_desc desc = host_desc(&member);
    dtrain_world *world = (dtrain_world *)&member; /* must be overwritten */
    dtrain_world_info info;
    static const float unit = 1;
    int bad = 0;
    if (dtrain_world_join(&desc, &world) != DTRAIN_OK) {
        snprintf(why, 256, "%s", dtrain_last_error());
        return 1;
    }
    dtrain_world_query(world, &info);
    bad |= info.rank != rank || info.size != group->size || info.threads != 1;
    bad |= info.local_rank != rank || info.local_size != group->size || info.node_count != 1;
    float *data = (float *)malloc(COUNT * sizeof *data);
    for (size_t i = 0; i < COUNT; i++) data[i] = unit * (float)rank + (float)(i % 7);
    bad |= dtrain_all_reduce(dtrain_world_comm(world), data, data, COUNT, DTRAIN_DTYPE_F32,
                             DTRAIN_REDUCE_SUM, NULL) != DTRAIN_OK;
    const float ranks = (float)(group->size * (group->size - 1) / 2);
    for (size_t i = 0; i < COUNT; i++)
        bad |= data[i] != ranks + (float)(i % 7) * (float)group->size;
    free(data);
    if (bad) snprintf(why, 256, "rank %d of %d: %s", rank, group->size, dtrain_last_error());
    if (dtrain_world_leave(world) != DTRAIN_OK) {
        snprintf(why, 256, "%s", dtrain_last_error());
        return 1;
    }
    return bad;
}

static int visits(int rank, void *user)
{
    host_group *group = (host_group *)user;
    char why[256] = "";
    for (int round = 0; round < 3; round++)
        if (visit(group, rank, why)) return !CHECK_MSG(0, "round %d: %s", round, why);
    return 0;
}

static void check_run(int count, bool threads, host_main run, void *user)
{
    int status[HOST_MOST];
    host_run(count, threads, run, user, status);
    for (int i = 0; i < count; i++) CHECK_MSG(status[i] == 0, "rank %d ended with %d", i, status[i]);
}

static void test_processes(void)
{
    for (int size = 1; size <= 8; size++) check_run(size, false, visits, host_group_new(size));
}
static void test_threads(void)
{
    for (int size = 1; size <= 8; size++) check_run(size, true, visits, host_group_new(size));
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_processes);
    RUN(test_threads);
    return test_summary();
}
