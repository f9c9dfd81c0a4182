/* over_mpi.c: distributed data parallelism over MPI, for CPUs of several hosts.
 *
 *   build:   cc -O2 -I. examples/over_mpi.c -o over_mpi -lm -lpthread
 *            (no MPI: the same program, over the memory that ranks of one host share)
 *   or:      mpicc -O2 -I. -DDTRAIN_USE_MPI examples/over_mpi.c -o over_mpi -lm -lpthread
 *   run:     mpirun -n 4 ./over_mpi
 *   expect of ./over_mpi, built without MPI:
 *     2 ranks over local
 *     step  25  loss 333.4684
 *     step  50  loss 140.6874
 *     step  75  loss 28.8770
 *     step 100  loss 14.7114
 *     every weight has the bits of one process
 *
 * MPI's launcher starts the ranks. The program calls MPI_Init before dtrain_launch and MPI_Finalize after it, and names
 * the communicator: the default is "mpi" on several hosts, and shared memory on one. Sums are taken in rank order, so
 * that MPI gives the bits of one process that computes the gradients of all ranks: the program does that, too. A
 * program whose ranks have other work joins through an MPI_Comm instead: examples/hosts/solver. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <stdio.h>
#include <string.h>

enum { COUNT = 64, SAMPLES = 16, STEPS = 100 };

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

/* Write the gradient of a rank's mean error: y = truth . x, with other samples on every rank. */
static float backward(int rank, int step, const float *weight, float *grad)
{
    uint64_t at = (uint64_t)step * SAMPLES * COUNT;
    float loss = 0;
    memset(grad, 0, COUNT * sizeof *grad);
    for (int s = 0; s < SAMPLES; s++) {
        float x[COUNT], error = 0;
        for (int i = 0; i < COUNT; i++) {
            x[i] = dtrain_random_normal(1, (uint64_t)rank, at++);
            error += (weight[i] - (float)(i % 7)) * x[i];
        }
        loss += error * error / SAMPLES;
        for (int i = 0; i < COUNT; i++) grad[i] += 2 * error * x[i] / SAMPLES;
    }
    return loss;
}

static void update(float *weight, const float *grad)
{
    for (int i = 0; i < COUNT; i++) weight[i] -= 0.01f * grad[i];
}

/* Every rank runs this function. */
static int train(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world), ranks = dtrain_world_size(world);
    float weight[COUNT] = {0}, grad[COUNT], alone[COUNT] = {0}, sum[COUNT], loss = 0;
    dtrain_param param = {.name = "weight", .value = weight, .grad = grad, .count = COUNT};
    dtrain_strategy *ddp;
    dtrain_comm_info comm;
    (void)user;
    CHECK(dtrain_strategy_create(world, &param, 1, NULL, &ddp));
    dtrain_comm_query(dtrain_world_comm(world), &comm);
    if (rank == 0) printf("%d ranks over %s\n", ranks, comm.backend);
    for (int step = 1; step <= STEPS; step++) {
        loss = backward(rank, step, weight, grad);
        CHECK(dtrain_strategy_ready(ddp, 0));
        CHECK(dtrain_strategy_finish(ddp)); /* the mean over all ranks */
        update(weight, grad);

        memset(sum, 0, sizeof sum); /* the same step, of all ranks, in this process */
        for (int r = 0; r < ranks; r++) {
            backward(r, step, alone, grad);
            for (int i = 0; i < COUNT; i++) sum[i] += grad[i];
        }
        for (int i = 0; i < COUNT; i++) sum[i] *= 1.0f / (float)ranks;
        update(alone, sum);
        if (step % 25) continue;
        CHECK(dtrain_all_reduce(dtrain_world_comm(world), &loss, &loss, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
        if (rank == 0) printf("step %3d  loss %.4f\n", step, (double)loss);
    }
    if (memcmp(weight, alone, sizeof weight) != 0)
        CHECK(dtrain_fail(DTRAIN_ERROR_NUMERIC, "rank %d has not the bits of one process", rank));
    if (rank == 0) printf("every weight has the bits of one process\n");
    dtrain_strategy_destroy(ddp);
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 2};
    int status = 0;
#ifdef DTRAIN_USE_MPI
    int started = 1; /* ranks, by mpirun */
    MPI_Init(&argc, &argv);
    MPI_Comm_size(MPI_COMM_WORLD, &started);
    if (started > 1 && dtrain_comm_ops_by_name("mpi", &desc.comm_ops) != DTRAIN_OK) status = 1;
#endif
    (void)argc, (void)argv;
    if (!status && dtrain_launch(&desc, train, NULL, NULL) != DTRAIN_OK) status = 1;
    if (status) fprintf(stderr, "over_mpi: %s\n", dtrain_last_error());
#ifdef DTRAIN_USE_MPI
    if (!status) MPI_Finalize(); /* after an error it may not return: mpirun ends the others */
#endif
    return status;
}
