/* ddp.c: adds distributed data parallelism (DDP) to a program that has its own arrays, its own
 * backward pass and its own optimizer.
 *
 *   build:   cc -O2 -I. examples/ddp.c -o ddp -lm -lpthread
 *   GPU:     nvcc -O3 -arch=native -I. -DDTRAIN_USE_CUDA examples/ddp.c dtrain_cuda.cu -lcublasLt -o ddp
 *   run:     ./ddp                      two ranks; ./ddp 5 starts five
 *            ./ddp 2 --device cuda      the arrays stay in host memory, the GPUs exchange them
 *   expect:
 *     step  20  loss 0.2244
 *     step  40  loss 0.0131
 *     step  60  loss 0.0010
 *     step  80  loss 0.0003
 *     step 100  loss 0.0002
 *     learned +1.00 -2.00 +0.50 +3.00    truth +1.00 -2.00 +0.50 +3.00
 *     learned -0.00 +1.50 -1.00 -0.50    truth +0.00 +1.50 -1.00 -0.50
 *
 * The program learns a 2 x 3 matrix and two biases from noisy samples. Each rank draws different
 * samples, so two ranks see twice as many per step. dtrain does three things: it starts the
 * ranks, copies rank 0's initial weights to all of them, and averages each gradient over the ranks
 * while backward still computes the next one. The rest is plain C. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { IN = 3, OUT = 2, BATCH = 16, STEPS = 100 };

/* End this rank when a call fails. dtrain_launch then ends the others, and its own error quotes the
 * sentence of this one; the memory of a rank goes with its process. */
#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

/* Row o: the weights of output o, then its bias. */
static const float truth[OUT][IN + 1] = {{1.0f, -2.0f, 0.5f, 3.0f}, {0.0f, 1.5f, -1.0f, -0.5f}};

/* Draw x (BATCH, IN) uniformly and y (BATCH, OUT) = truth x + noise, differently on every rank. */
static void draw_batch(int rank, int step, float x[BATCH][IN], float y[BATCH][OUT])
{
    uint64_t at = (uint64_t)step * BATCH * (IN + OUT);
    for (int b = 0; b < BATCH; b++) {
        for (int i = 0; i < IN; i++)
            x[b][i] = 2 * dtrain_random_uniform(1, (uint64_t)rank, at++) - 1;
        for (int o = 0; o < OUT; o++) {
            y[b][o] = truth[o][IN] + 0.01f * dtrain_random_normal(2, (uint64_t)rank, at++);
            for (int i = 0; i < IN; i++) y[b][o] += truth[o][i] * x[b][i];
        }
    }
}

/* Every rank runs this function. */
static int train(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world);
    float weight[OUT][IN] = {{0}}, weight_grad[OUT][IN], bias[OUT] = {0}, bias_grad[OUT];
    float x[BATCH][IN], y[BATCH][OUT], error[BATCH][OUT];
    dtrain_param params[] = {
        {.name = "weight", .value = weight[0], .grad = weight_grad[0], .count = OUT * IN},
        {.name = "bias", .value = bias, .grad = bias_grad, .count = OUT},
    };
    dtrain_strategy *ddp;
    (void)user;
    CHECK(dtrain_strategy_create(world, params, 2, NULL, &ddp)); /* all get rank 0's values */

    for (int step = 1; step <= STEPS; step++) {
        float loss = 0;
        draw_batch(rank, step, x, y);
        for (int b = 0; b < BATCH; b++) /* forward */
            for (int o = 0; o < OUT; o++) {
                error[b][o] = bias[o] - y[b][o];
                for (int i = 0; i < IN; i++) error[b][o] += weight[o][i] * x[b][i];
                loss += error[b][o] * error[b][o] / BATCH;
            }

        for (int o = 0; o < OUT; o++) { /* backward, in any order of the parameters */
            bias_grad[o] = 0;
            for (int b = 0; b < BATCH; b++) bias_grad[o] += 2 * error[b][o] / BATCH;
        }
        CHECK(dtrain_strategy_ready(ddp, 1)); /* params[1]'s communication may start now */
        for (int o = 0; o < OUT; o++)
            for (int i = 0; i < IN; i++) {
                weight_grad[o][i] = 0;
                for (int b = 0; b < BATCH; b++)
                    weight_grad[o][i] += 2 * error[b][o] * x[b][i] / BATCH;
            }
        CHECK(dtrain_strategy_ready(ddp, 0));
        CHECK(dtrain_strategy_finish(ddp)); /* both gradients are now the mean over all ranks */

        for (int o = 0; o < OUT; o++) { /* the optimizer: plain gradient descent */
            bias[o] -= 0.1f * bias_grad[o];
            for (int i = 0; i < IN; i++) weight[o][i] -= 0.1f * weight_grad[o][i];
        }

        if (step % 20) continue;
        CHECK(dtrain_all_reduce(dtrain_world_comm(world), &loss, &loss, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
        if (rank == 0) printf("step %3d  loss %.4f\n", step, loss);
    }
    CHECK(dtrain_strategy_verify(ddp, NULL)); /* fails unless all ranks have the same bits */
    for (int o = 0; o < OUT && rank == 0; o++)
        printf("learned %+.2f %+.2f %+.2f %+.2f    truth %+.2f %+.2f %+.2f %+.2f\n", weight[o][0],
               weight[o][1], weight[o][2], bias[o], truth[o][0], truth[o][1], truth[o][2],
               truth[o][3]);
    dtrain_strategy_destroy(ddp);
    return 0;
}

int main(int argc, char **argv)
{
    /* Under torchrun, mpirun or srun the launcher's number of ranks counts, else these two. */
    dtrain_launch_desc desc = {.default_rank_count = 2};
    const char *device = "cpu";
    for (int a = 1; a < argc; a++) {
        if (strcmp(argv[a], "--device") == 0 && a + 1 < argc) device = argv[++a];
        else if ((desc.rank_count = (uint32_t)strtoul(argv[a], NULL, 10)) == 0) {
            fprintf(stderr, "usage: ddp [RANKS] [--device cpu|cuda], not \"%s\"\n", argv[a]);
            return 2;
        }
    }
    if (dtrain_device_ops_by_name(device, &desc.device_ops) == DTRAIN_OK &&
        dtrain_launch(&desc, train, NULL, NULL) == DTRAIN_OK)
        return 0;
    fprintf(stderr, "ddp: %s\n", dtrain_last_error());
    return 1;
}
