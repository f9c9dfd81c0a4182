/* full_shard.c: a program's own forward and backward under FULL_SHARD (FSDP, ZeRO-3): each rank
 * keeps only its share of the parameters, gradients and optimizer state.
 *
 *   build:   cc -O2 -I. examples/full_shard.c -o full_shard -lm -lpthread
 *   GPU:     nvcc -O3 -arch=native -I. -DDTRAIN_USE_CUDA examples/full_shard.c dtrain_cuda.cu -lcublasLt -o full_shard
 *            (the loops below read host memory: the ranks stay on the CPU in this build too. On a
 *            GPU, the addresses in dtrain_param and dtrain_shard are the device's, and your kernels
 *            replace layer_forward, layer_backward and update's loop; all calls stay as they are)
 *   run:     ./full_shard               two ranks; ./full_shard 3 starts three
 *   expect:
 *     ddp                rank 0 keeps 5234 of 5234 parameters, their gradients and momentum
 *     full_shard         rank 0 keeps 2656 of 5234 parameters, their gradients and momentum
 *     ...
 *           400      0.233737             0.233737
 *           500      0.127015             0.127015
 *     500 losses and the parameters are equal, bit for bit
 *
 * A layer is a unit: its parameters are whole only between gather and release, so at most two
 * layers are whole at a time: the layer that computes, and the next one, which is being gathered.
 *
 *     forward    gather(0) layer 0 release(0)   gather(1) layer 1 release(1)   ...
 *     backward   ... gather(1) layer 1: ready(weight) ready(bias) release(1)   gather(0) ...
 *     finish     every rank now has the mean of its shards of the gradients
 *     update     each rank updates its shards; publish ends the step
 *
 * The same loop runs under every strategy. The program trains twice, under DDP and under
 * FULL_SHARD, and compares the losses and the final parameters bit by bit. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, IN = 8, HIDDEN = 48, OUT = 2, BATCH = 12, STEPS = 500 };
static const int widths[LAYERS + 1] = {IN, HIDDEN, HIDDEN, HIDDEN, OUT};

/* End this rank when a call fails. dtrain_launch then ends the others, and its own error quotes the
 * sentence of this one; the memory of a rank goes with its process. */
#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

/* The weight (out, in) and bias (out) of layer l are params[2 l] and params[2 l + 1]. value and
 * grad stay NULL: the library initialises the values, and no rank ever holds the whole model. */
static void declare(dtrain_param params[2 * LAYERS], char names[2 * LAYERS][32])
{
    memset(params, 0, 2 * LAYERS * sizeof *params);
    for (int i = 0; i < 2 * LAYERS; i++) {
        const int l = i / 2;
        snprintf(names[i], sizeof names[i], "layer%d.%s", l, i % 2 ? "bias" : "weight");
        params[i].name = names[i];
        params[i].unit = (uint32_t)l;
        params[i].shape[0] = widths[l + 1];
        if (i % 2) continue; /* a bias starts at zero */
        params[i].shape[1] = widths[l];
        params[i].init = DTRAIN_INIT_UNIFORM;
        params[i].init_scale = sqrtf(3.0f / (float)widths[l]);
    }
}

/* x[l] (BATCH, widths[l]) is the input of layer l; x[LAYERS] is the output of the network. */
typedef float activations[LAYERS + 1][BATCH][HIDDEN];

/* x[l + 1] = tanh(x[l] weight^T + bias), without the tanh in the last layer. */
static void layer_forward(const dtrain_param *params, int l, activations x)
{
    const float *weight = params[2 * l].value, *bias = params[2 * l + 1].value;
    for (int b = 0; b < BATCH; b++)
        for (int o = 0; o < widths[l + 1]; o++) {
            float sum = bias[o];
            for (int i = 0; i < widths[l]; i++) sum += weight[o * widths[l] + i] * x[l][b][i];
            x[l + 1][b][o] = l + 1 < LAYERS ? tanhf(sum) : sum;
        }
}

/* Write the gradients of layer l, and dx[l] from dx[l + 1]. dx[l] is the gradient of x[l]. */
static void layer_backward(const dtrain_param *params, int l, activations x, activations dx)
{
    const float *weight = params[2 * l].value;
    float *weight_grad = params[2 * l].grad, *bias_grad = params[2 * l + 1].grad;
    memset(weight_grad, 0, (size_t)params[2 * l].count * sizeof(float));
    memset(bias_grad, 0, (size_t)params[2 * l + 1].count * sizeof(float));
    memset(dx[l], 0, sizeof dx[l]);
    for (int b = 0; b < BATCH; b++)
        for (int o = 0; o < widths[l + 1]; o++) {
            const float y = x[l + 1][b][o];
            const float d = dx[l + 1][b][o] * (l + 1 < LAYERS ? 1 - y * y : 1);
            bias_grad[o] += d;
            for (int i = 0; i < widths[l]; i++) {
                weight_grad[o * widths[l] + i] += d * x[l][b][i];
                dx[l][b][i] += d * weight[o * widths[l] + i];
            }
        }
}

/* Draw inputs, and as targets two functions of them; other numbers on every rank. */
static void draw_batch(int rank, int step, float x[BATCH][HIDDEN], float y[BATCH][OUT])
{
    uint64_t at = (uint64_t)step * BATCH * IN;
    for (int b = 0; b < BATCH; b++) {
        for (int i = 0; i < IN; i++)
            x[b][i] = 2 * dtrain_random_uniform(1, (uint64_t)rank, at++) - 1;
        y[b][0] = sinf(3 * x[b][0]) + x[b][1] * x[b][2];
        y[b][1] = cosf(3 * x[b][3]) - x[b][4];
    }
}

/* One forward and backward on this rank's samples; *loss is their mean squared error. */
static int forward_backward(dtrain_strategy *strategy, const dtrain_param *params, int rank,
                            int step, float *loss)
{
    activations x, dx;
    float y[BATCH][OUT];
    draw_batch(rank, step, x[0], y);
    for (int l = 0; l < LAYERS; l++) {
        CHECK(dtrain_strategy_gather(strategy, (uint32_t)l, DTRAIN_PASS_FORWARD));
        layer_forward(params, l, x);
        CHECK(dtrain_strategy_release(strategy, (uint32_t)l));
    }
    *loss = 0;
    for (int b = 0; b < BATCH; b++)
        for (int o = 0; o < OUT; o++) {
            const float error = x[LAYERS][b][o] - y[b][o];
            *loss += error * error / BATCH;
            dx[LAYERS][b][o] = 2 * error / BATCH;
        }
    for (int l = LAYERS - 1; l >= 0; l--) {
        CHECK(dtrain_strategy_gather(strategy, (uint32_t)l, DTRAIN_PASS_BACKWARD));
        layer_backward(params, l, x, dx);
        CHECK(dtrain_strategy_ready(strategy, 2 * (size_t)l)); /* its reduction may start now */
        CHECK(dtrain_strategy_ready(strategy, 2 * (size_t)l + 1));
        CHECK(dtrain_strategy_release(strategy, (uint32_t)l));
    }
    CHECK(dtrain_strategy_finish(strategy));
    return 0;
}

/* Gradient descent with momentum on this rank's shards. velocity has as many elements as the
 * shards. */
static int update(dtrain_strategy *strategy, float *velocity)
{
    const dtrain_shard *shards;
    size_t count;
    CHECK(dtrain_strategy_shards(strategy, &shards, &count));
    for (size_t s = 0; s < count; s++)
        for (int64_t k = 0; k < shards[s].count; k++) {
            *velocity = 0.9f * *velocity + shards[s].grad[k];
            shards[s].value[k] -= 0.005f * *velocity++;
        }
    CHECK(dtrain_strategy_publish(strategy)); /* the next gather brings the new values */
    return 0;
}

/* Train from the same initial values under a strategy; losses (STEPS) are means over the ranks,
 * and *hash is the hash of all parameters at the end. */
static int train(dtrain_world *world, uint32_t kind, float *losses, uint64_t *hash)
{
    const int rank = dtrain_world_rank(world);
    dtrain_strategy_desc desc = {0};
    dtrain_param params[2 * LAYERS];
    char names[2 * LAYERS][32];
    dtrain_strategy *strategy;
    dtrain_strategy_info info;
    const dtrain_shard *shards;
    size_t shard_count, elements = 0;
    declare(params, names);
    desc.kind = kind;
    CHECK(dtrain_strategy_create(world, params, 2 * LAYERS, &desc, &strategy));
    CHECK(dtrain_strategy_shards(strategy, &shards, &shard_count));
    for (size_t s = 0; s < shard_count; s++) elements += (size_t)shards[s].count;
    float *velocity = calloc(elements ? elements : 1, sizeof *velocity);
    if (!velocity)
        CHECK(dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for the momentum of %zu parameters",
                          elements));
    dtrain_strategy_query(strategy, &info);
    if (rank == 0)
        printf("%-17s  rank 0 keeps %zu of %llu parameters, their gradients and momentum\n",
               info.name, elements, (unsigned long long)info.total_elements);
    for (int step = 0; step < STEPS; step++) {
        if (forward_backward(strategy, params, rank, step, &losses[step])) return 1;
        if (update(strategy, velocity)) return 1;
    }
    CHECK(dtrain_all_reduce(dtrain_world_comm(world), losses, losses, STEPS, DTRAIN_DTYPE_F32,
                            DTRAIN_REDUCE_MEAN, NULL));
    CHECK(dtrain_strategy_verify(strategy, hash));
    dtrain_strategy_destroy(strategy);
    free(velocity);
    return 0;
}

/* Every rank runs this function. */
static int compare(dtrain_world *world, void *user)
{
    float ddp[STEPS], sharded[STEPS];
    uint64_t ddp_hash, sharded_hash;
    (void)user;
    if (train(world, DTRAIN_STRATEGY_DDP, ddp, &ddp_hash)) return 1;
    if (train(world, DTRAIN_STRATEGY_FULL_SHARD, sharded, &sharded_hash)) return 1;
    const bool same = memcmp(ddp, sharded, sizeof ddp) == 0 && ddp_hash == sharded_hash;
    if (dtrain_world_rank(world) == 0) {
        printf("\n     step   loss of DDP   loss of FULL_SHARD\n");
        for (int step = 99; step < STEPS; step += 100)
            printf("     %4d   %11.6f   %18.6f\n", step + 1, ddp[step], sharded[step]);
        printf("\n%d losses and the parameters %s\n", STEPS,
               same ? "are equal, bit for bit" : "DIFFER");
    }
    return same ? 0 : 1;
}

int main(int argc, char **argv)
{
    /* Under torchrun, mpirun or srun the launcher's number of ranks counts, else these two. */
    dtrain_launch_desc desc = {.default_rank_count = 2};
    if (argc > 1 && (desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10)) == 0) {
        fprintf(stderr, "usage: full_shard [RANKS], not \"%s\"\n", argv[1]);
        return 2;
    }
    if (dtrain_launch(&desc, compare, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "full_shard: %s\n", dtrain_last_error());
    return 1;
}
