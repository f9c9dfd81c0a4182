/* bf16_arrays.c: a program whose weights and gradients are arrays of bf16. Gradients add up in fp32, and AdamW updates
 * fp32 master copies, which it rounds into the program's weights.
 *
 *   build:   cc -O2 -I. examples/bf16_arrays.c -o bf16_arrays -lm -lpthread
 *   run:     ./bf16_arrays              two ranks; ./bf16_arrays 5 starts five
 *   expect:
 *     step 100  loss 5.9983  gradient norm 4.422
 *     step 200  loss 0.0342  gradient norm 0.362
 *     step 300  loss 0.0009  gradient norm 0.079
 *     weight 0.29688 in bf16, 0.29767 in its master copy; truth 0.3
 *
 * On a GPU the arrays are device memory, and the program's kernels run on the device's stream. Under FULL_SHARD leave
 * typed_value NULL too: dtrain_strategy_gather sets it, and desc.param_dtype = DTRAIN_DTYPE_BF16 sends half as
 * many bytes. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <stdio.h>
#include <stdlib.h>

enum { IN = 8, BATCH = 16, STEPS = 300 };

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

static float widen(uint16_t x) { return dtrain_half_to_f32(DTRAIN_DTYPE_BF16, x); }
static uint16_t narrow(float x) { return dtrain_half_from_f32(DTRAIN_DTYPE_BF16, x); }

/* Write the gradient of this rank's batch and return its loss. The truth is 0.3, 1.3, 2.3, ... */
static float learn(const uint16_t *weight, uint16_t *grad, int rank, int step)
{
    float loss = 0, sums[IN] = {0};
    for (int b = 0; b < BATCH; b++) {
        float x[IN], error = 0;
        for (int i = 0; i < IN; i++) {
            x[i] = dtrain_random_normal(1, (uint64_t)rank, (uint64_t)((step * BATCH + b) * IN + i));
            error += (widen(weight[i]) - (0.3f + (float)i)) * x[i];
        }
        for (int i = 0; i < IN; i++) sums[i] += 2 * error * x[i] / BATCH;
        loss += error * error / BATCH;
    }
    for (int i = 0; i < IN; i++) grad[i] = narrow(sums[i]);
    return loss;
}

static int train(dtrain_world *world, void *user)
{
    const int rank = dtrain_world_rank(world);
    uint16_t weight[IN] = {0}, grad[IN];
    dtrain_param param = {.name = "weight", .count = IN, .dtype = DTRAIN_DTYPE_BF16};
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_strategy *ddp;
    dtrain_optimizer *optimizer;
    float master[IN], norm, scale;
    (void)user;
    param.typed_value = weight;
    param.typed_grad = grad;
    CHECK(dtrain_strategy_create(world, &param, 1, NULL, &ddp));
    CHECK(dtrain_optimizer_create(world, ddp, &adamw, &optimizer));
    for (int step = 1; step <= STEPS; step++) {
        float loss = learn(weight, grad, rank, step);
        CHECK(dtrain_strategy_ready(ddp, 0));
        CHECK(dtrain_strategy_finish(ddp)); /* grad is now the mean over all ranks, in bf16 */
        CHECK(dtrain_grad_norm(ddp, NULL, 10, &norm, &scale)); /* computed in fp32 */
        CHECK(dtrain_optimizer_step(optimizer, 0.05f, scale)); /* rounds the masters into weight */
        if (step % 100) continue;
        CHECK(dtrain_all_reduce(dtrain_world_comm(world), &loss, &loss, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
        if (rank == 0)
            printf("step %3d  loss %.4f  gradient norm %.3f\n", step, (double)loss, (double)norm);
    }
    CHECK(dtrain_strategy_read(ddp, 0, master));
    if (rank == 0)
        printf("weight %.5f in bf16, %.5f in its master copy; truth 0.3\n",
               (double)widen(weight[0]), (double)master[0]);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(ddp);
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 2};
    if (argc > 1) desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10);
    if (dtrain_launch(&desc, train, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "bf16_arrays: %s\n", dtrain_last_error());
    return 1;
}
