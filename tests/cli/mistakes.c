/* mistakes.c: programs with one mistake each, which print the sentences of docs/troubleshooting.md.
 *
 *   mistakes NAME      two ranks make the mistake; each prints the sentence that it gets, and the launcher its own */
#include "dtrain.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static dtrain_result branch(dtrain_comm *comm, int rank)
{
    float sum = 1;
    if (rank == 1) return dtrain_barrier(comm);
    return dtrain_all_reduce(comm, &sum, &sum, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL);
}

/* Rank 1 comes after the deadline of one second. */
static dtrain_result late(dtrain_comm *comm, int rank)
{
    const time_t until = time(NULL) + 4;
    while (rank == 1 && time(NULL) < until) continue;
    return dtrain_barrier(comm);
}

static dtrain_result failed(dtrain_comm *comm, int rank)
{
    return rank == 1 ? dtrain_device_create(NULL, NULL, NULL) : dtrain_barrier(comm);
}

/* Rank 1 registers a larger parameter, or changes a weight by itself. */
static dtrain_result model(dtrain_world *world, bool larger)
{
    float w[2] = {1, 2}, dw[2] = {0};
    const int rank = dtrain_world_rank(world);
    dtrain_param param = {
        .name = "w", .value = w, .grad = dw, .count = larger && rank == 1 ? 2 : 1};
    dtrain_strategy *ddp;
    dtrain_result result = dtrain_strategy_create(world, &param, 1, NULL, &ddp);
    if (result != DTRAIN_OK) return result;
    w[0] += (float)rank;
    result = dtrain_strategy_verify(ddp, NULL);
    dtrain_strategy_destroy(ddp);
    return result;
}

static int train(dtrain_world *world, void *user)
{
    const char *name = (const char *)user;
    const int rank = dtrain_world_rank(world);
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_result result;
    if (strcmp(name, "branch") == 0) result = branch(comm, rank);
    else if (strcmp(name, "late") == 0) result = late(comm, rank);
    else if (strcmp(name, "failed") == 0) result = failed(comm, rank);
    else result = model(world, strcmp(name, "larger") == 0);
    if (result != DTRAIN_OK) fprintf(stderr, "[rank %d] %s\n", rank, dtrain_last_error());
    return result != DTRAIN_OK;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 2, .timeout_ms = 1000};
    if (argc == 2 && dtrain_launch(&desc, train, argv[1], NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "%s\n",
            argc == 2 ? dtrain_last_error() : "usage: mistakes branch|late|failed|larger|alone");
    return 1;
}
