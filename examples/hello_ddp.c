/* hello_ddp.c: adds data parallelism to a program that has its own arrays and its own backward.
 *
 *   build:   cc -O2 -I. examples/hello_ddp.c -o build/hello_ddp -lm -lpthread
 *   run:     build/hello_ddp [ranks, 2 by default] [--device cuda]
 *   GPU:     nvcc -O3 -I. -DDTRAIN_USE_CUDA examples/hello_ddp.c dtrain_cuda.cu -lcublasLt -o hello_ddp
 *   expect:  the loss falls to 0.0002, the noise of the data; every rank ends with the same weights
 *
 * What dtrain does here: starts the ranks, gives all of them rank 0's initial weights, and averages
 * each gradient over the ranks as soon as it is marked ready. The model, the loss and the optimizer
 * are the program's own, as they would be in a code base that dtrain.h is dropped into. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

enum { IN = 3, OUT = 2, BATCH = 16, STEPS = 200 };

#define CHECK(call)                                                  \
    do {                                                             \
        if ((call) != DTRAIN_OK) {                                   \
            fprintf(stderr, "hello_ddp: %s\n", dtrain_last_error()); \
            return 1;                                                \
        }                                                            \
    } while (0)

static const float truth[OUT][IN + 1] = {{1.0f, -2.0f, 0.5f, 3.0f}, {0.0f, 1.5f, -1.0f, -0.5f}};

/* Every rank draws other samples: x (BATCH, IN) uniform, y (BATCH, OUT) = truth x + noise. */
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

static int train(dtrain_world *world, void *user)
{
    float weight[OUT * IN] = {0}, weight_grad[OUT * IN], bias[OUT] = {0}, bias_grad[OUT];
    float x[BATCH][IN], y[BATCH][OUT], error[BATCH][OUT];
    dtrain_param params[2] = {
        {.name = "weight", .value = weight, .grad = weight_grad, .count = OUT * IN},
        {.name = "bias", .value = bias, .grad = bias_grad, .count = OUT},
    };
    dtrain_strategy *ddp;
    (void)user;
    CHECK(dtrain_strategy_create(world, params, 2, NULL,
                                 &ddp)); /* rank 0's values reach every rank */

    for (int step = 0; step < STEPS; step++) {
        float loss = 0;
        draw_batch(dtrain_world_rank(world), step, x, y);
        for (int b = 0; b < BATCH; b++) /* forward */
            for (int o = 0; o < OUT; o++) {
                error[b][o] = bias[o] - y[b][o];
                for (int i = 0; i < IN; i++) error[b][o] += weight[o * IN + i] * x[b][i];
                loss += error[b][o] * error[b][o] / BATCH;
            }

        for (int o = 0; o < OUT; o++) { /* backward, last layer first */
            bias_grad[o] = 0;
            for (int b = 0; b < BATCH; b++) bias_grad[o] += 2 * error[b][o] / BATCH;
        }
        CHECK(dtrain_strategy_ready(ddp, 1)); /* its communication may start while we go on */
        for (int o = 0; o < OUT; o++)
            for (int i = 0; i < IN; i++) {
                weight_grad[o * IN + i] = 0;
                for (int b = 0; b < BATCH; b++)
                    weight_grad[o * IN + i] += 2 * error[b][o] * x[b][i] / BATCH;
            }
        CHECK(dtrain_strategy_ready(ddp, 0));
        CHECK(dtrain_strategy_finish(ddp)); /* now both gradients are the mean over all ranks */

        for (int k = 0; k < OUT * IN; k++) weight[k] -= 0.2f * weight_grad[k];
        for (int o = 0; o < OUT; o++) bias[o] -= 0.2f * bias_grad[o];
        CHECK(dtrain_all_reduce(dtrain_world_comm(world), &loss, &loss, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
        if (dtrain_world_rank(world) == 0 && (step + 1) % 40 == 0)
            printf("step %3d  loss %.4f\n", step + 1, loss);
    }
    if (dtrain_world_rank(world) == 0)
        printf("learned  %+.2f %+.2f %+.2f %+.2f\ntruth    %+.2f %+.2f %+.2f %+.2f\n", weight[0],
               weight[1], weight[2], bias[0], truth[0][0], truth[0][1], truth[0][2], truth[0][3]);
    CHECK(dtrain_strategy_verify(ddp, NULL)); /* every rank ends with the same bits */
    dtrain_strategy_destroy(ddp);
    return 0;
}

int main(int argc, char **argv)
{
    const char *device = "cpu"; /* the arrays may lie in host memory with either */
    if (argc > 2 && strcmp(argv[argc - 2], "--device") == 0) device = argv[argc - 1], argc -= 2;
    dtrain_launch_desc desc = {.default_rank_count = 2}; /* a launcher's number comes first */
    if (argc > 1) desc.rank_count = (uint32_t)atoi(argv[1]);
    CHECK(dtrain_device_ops_by_name(device, &desc.device_ops));
    if (dtrain_launch(&desc, train, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "hello_ddp: %s\n", dtrain_last_error());
    return 1;
}
