/* flat_array_dtrain.c: flat_array.c on several ranks, under any strategy: `diff flat_array.c
 * flat_array_dtrain.c` is what it takes. The ranks are the program's own processes (../forked.h)
 * and join dtrain by its own all-gather.
 *
 *   build:   cc -O2 -I. examples/hosts/flat_array/flat_array_dtrain.c -o flat_array_dtrain -lm -lpthread
 *   GPU:     nvcc -O3 -arch=native -I. -DDTRAIN_USE_CUDA examples/hosts/flat_array/flat_array_dtrain.c dtrain_cuda.cu \
 *            -lcublasLt -o flat_array_dtrain
 *   run:     ./flat_array_dtrain 300 2 1             so many steps, on two ranks, under DDP; 2: ZERO1, 4: FULL_SHARD
 *            ./flat_array_dtrain 300 2 1 cuda        the arrays are device memory
 *   expect:
 *     step  100  loss 0.68995
 *     step  200  loss 0.56209
 *     step  300  loss 0.42797
 *
 * A layer is one parameter and one unit. Under DDP and ZERO1 it is an offset of the program's
 * arrays; under FULL_SHARD no rank has an array of the whole model, and a layer's parameters and
 * gradients are there from gather to release. All strategies give the same bits, and the losses of
 * flat_array.c to the rounding of gradients. This program computes on the host, from a copy of the
 * layer; a trainer with its own kernels hands the addresses to them. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "../forked.h"
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 3, OBSERVED = 12, HIDDEN = 48, ACTIONS = 4, BATCH = 96 };
enum { LARGEST = HIDDEN * (HIDDEN + 1) }; /* elements of a layer */
enum { TOTAL = HIDDEN * (OBSERVED + 1) + LARGEST + ACTIONS * (HIDDEN + 1) };
static const int widths[LAYERS + 1] = {OBSERVED, HIDDEN, HIDDEN, ACTIONS};

static float widen(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* Round to the nearest bf16, ties to even. */
static uint16_t narrow(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Return a number from -1 to 1 that depends on i only. */
static float noise(uint32_t i)
{
    i = (i ^ i >> 16) * 0x7feb352du;
    i = (i ^ i >> 15) * 0x846ca68bu;
    return (float)(i ^ i >> 16) / 2147483648.0f - 1;
}

/* A layer has its weights (out, in) and then its biases (out) at an offset of the arrays. */
static int layer_count(int l) { return widths[l + 1] * (widths[l] + 1); }
static int layer_at(int l) { return l ? layer_at(l - 1) + layer_count(l - 1) : 0; }
static float first_value(int l, int i)
{
    return i < widths[l + 1] * widths[l]
               ? noise((uint32_t)(layer_at(l) + i)) / sqrtf((float)widths[l])
               : 0;
}

/* x[l] (rows, widths[l]) is the input of layer l, x[LAYERS] (rows, ACTIONS) the output of the
 * network. */
typedef float activations[LAYERS + 1][BATCH][HIDDEN];

static void layer_forward(int l, const uint16_t *p, activations x, int rows)
{
    const int in = widths[l], out = widths[l + 1];
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < out; o++) {
            float sum = widen(p[out * in + o]);
            for (int i = 0; i < in; i++) sum += widen(p[o * in + i]) * x[l][r][i];
            x[l + 1][r][o] = l + 1 < LAYERS && sum < 0 ? 0 : sum;
        }
}

/* Write the gradients of layer l to g, and those of its input to d[l] from those of its output, d[l
 * + 1]. */
static void layer_backward(int l, const uint16_t *p, uint16_t *g, activations x, activations d,
                           int rows)
{
    static float sums[LARGEST];
    const int in = widths[l], out = widths[l + 1];
    memset(sums, 0, sizeof sums);
    memset(d[l], 0, sizeof d[l]);
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < out; o++) {
            const float dy = l + 1 < LAYERS && x[l + 1][r][o] <= 0 ? 0 : d[l + 1][r][o];
            sums[out * in + o] += dy;
            for (int i = 0; i < in; i++) {
                sums[o * in + i] += dy * x[l][r][i];
                d[l][r][i] += dy * widen(p[o * in + i]);
            }
        }
    for (int i = 0; i < layer_count(l); i++) g[i] = narrow(sums[i]);
}

/* Draw the observations of some rows of a step's batch; the action counts what is positive of the
 * first three. */
static void draw(int step, int first_row, int rows, float x[][HIDDEN], int *actions)
{
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < OBSERVED; i++)
            x[r][i] = noise((uint32_t)(((step + 1) * BATCH + first_row + r) * OBSERVED + i));
        actions[r] = (x[r][0] > 0) + (x[r][1] > 0) + (x[r][2] > 0);
    }
}

/* Cross-entropy, as a mean over the rows; d (rows, ACTIONS) becomes its gradient. */
static float cross_entropy(float y[][HIDDEN], float d[][HIDDEN], const int *actions, int rows)
{
    float loss = 0;
    for (int r = 0; r < rows; r++) {
        float most = y[r][0], sum = 0;
        for (int a = 1; a < ACTIONS; a++) most = fmaxf(most, y[r][a]);
        for (int a = 0; a < ACTIONS; a++) sum += expf(y[r][a] - most);
        for (int a = 0; a < ACTIONS; a++)
            d[r][a] = (expf(y[r][a] - most) / sum - (a == actions[r] ? 1 : 0)) / (float)rows;
        loss += (logf(sum) + most - y[r][actions[r]]) / (float)rows;
    }
    return loss;
}

#define CHECK(call) \
    if ((call) != DTRAIN_OK) return fprintf(stderr, "%s\n", dtrain_last_error()), 1
static int train(int steps, forked *ranks, uint32_t kind, const char *device_name)
{
    static uint16_t w[LARGEST], g[LARGEST]; /* of a layer, copied from and to the device */
    static dtrain_param p[LAYERS] = {{.name = "layer0"}, {.name = "layer1"}, {.name = "layer2"}};
    const dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    dtrain_join_desc me = {
        .rank = ranks->rank, .size = ranks->size, .all_gather = forked_gather, .user = ranks};
    dtrain_world *world;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    const dtrain_shard *shards;
    size_t count;
    void *arena = NULL; /* TOTAL parameters and as many gradients, in device memory */
    static float master[TOTAL];
    static activations x, d;
    static int actions[BATCH];
    const int rows = BATCH / ranks->size, first = rows * ranks->rank;
    for (int l = 0; l < LAYERS; l++)
        for (int i = 0; i < layer_count(l); i++) master[layer_at(l) + i] = first_value(l, i);
    CHECK(dtrain_device_ops_by_name(device_name, &me.device_ops));
    CHECK(dtrain_world_join(&me, &world));
    dtrain_device *device = dtrain_world_device(world);
    if (kind != DTRAIN_STRATEGY_FULL_SHARD) CHECK(device->ops->alloc(device, 4 * TOTAL, &arena));
    for (int l = 0; l < LAYERS; l++) {
        p[l].unit = (uint32_t)l, p[l].count = layer_count(l), p[l].dtype = DTRAIN_DTYPE_BF16;
        p[l].typed_value = arena ? (uint16_t *)arena + layer_at(l) : NULL;
        p[l].typed_grad = arena ? (uint16_t *)arena + TOTAL + layer_at(l) : NULL;
    }
    CHECK(
        dtrain_strategy_create(world, p, LAYERS, &(dtrain_strategy_desc){.kind = kind}, &strategy));
    CHECK(dtrain_optimizer_create(world, strategy, &sgd, &optimizer));
    CHECK(dtrain_strategy_shards(strategy, &shards, &count));
    for (const dtrain_shard *s = shards; s < shards + count; s++)
        CHECK(dtrain_device_copy(device, s->value,
                                 master + layer_at((int)s->param->unit) + s->offset,
                                 4 * (size_t)s->count));
    CHECK(dtrain_strategy_publish(strategy)); /* rounded into what forward reads */
    for (int step = 1; step <= steps; step++) {
        draw(step, first, rows, x[0], actions);
        for (int l = 0; l < LAYERS; l++) {
            CHECK(dtrain_strategy_gather(strategy, (uint32_t)l, DTRAIN_PASS_FORWARD));
            CHECK(dtrain_device_copy(device, w, p[l].typed_value, 2 * (size_t)p[l].count));
            layer_forward(l, w, x, rows);
            CHECK(dtrain_strategy_release(strategy, (uint32_t)l));
        }
        float loss = cross_entropy(x[LAYERS], d[LAYERS], actions, rows);
        for (int l = LAYERS - 1; l >= 0; l--) {
            CHECK(dtrain_strategy_gather(strategy, (uint32_t)l, DTRAIN_PASS_BACKWARD));
            CHECK(dtrain_device_copy(device, w, p[l].typed_value, 2 * (size_t)p[l].count));
            layer_backward(l, w, g, x, d, rows);
            CHECK(dtrain_device_copy(device, p[l].typed_grad, g, 2 * (size_t)p[l].count));
            CHECK(dtrain_strategy_ready(strategy, (size_t)l)); /* it may travel */
            CHECK(dtrain_strategy_release(strategy, (uint32_t)l));
        }
        CHECK(dtrain_strategy_finish(strategy));
        CHECK(dtrain_optimizer_step(optimizer, 0.3f, 1));
        CHECK(dtrain_all_reduce(dtrain_world_comm(world), &loss, &loss, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
        if (step % 100 == 0 && !ranks->rank) printf("step %4d  loss %.5f\n", step, (double)loss);
    }
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    device->ops->free(device, arena, 4 * TOTAL);
    return dtrain_world_leave(world) != DTRAIN_OK;
}

int main(int argc, char **argv)
{
    const int steps = argc > 1 ? atoi(argv[1]) : 0;
    forked ranks;
    if (steps > 0 && argc > 3 && atoi(argv[2]) > 0 && BATCH % atoi(argv[2]) == 0 &&
        forked_begin(&ranks, atoi(argv[2])) == 0)
        return forked_end(
            &ranks, train(steps, &ranks, (uint32_t)atoi(argv[3]), argc > 4 ? argv[4] : "cpu"));
    fprintf(stderr, "usage: flat_array_dtrain STEPS RANKS KIND [cpu|cuda]\n");
    return 2;
}
