/* flat_array.c: a trainer whose parameters and gradients are two flat arrays of bf16, as trainers
 * for GPUs have them: a layer is an offset. One process; flat_array_dtrain.c is the same program on
 * several ranks.
 *
 *   build:   cc -O2 examples/hosts/flat_array/flat_array.c -o flat_array -lm
 *   run:     ./flat_array 300                  so many steps
 *   expect:
 *     step  100  loss 0.68965
 *     step  200  loss 0.56201
 *     step  300  loss 0.42724
 *
 * A network says which of four actions an observation asks for. Sums are fp32, and so is a master
 * copy of the parameters, which is rounded into the array that forward and backward read. */
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

static int train(int steps)
{
    static uint16_t params[TOTAL], grads[TOTAL];
    static float master[TOTAL];
    static activations x, d;
    static int actions[BATCH];
    const int first = 0, rows = BATCH;
    for (int l = 0; l < LAYERS; l++)
        for (int i = 0; i < layer_count(l); i++) master[layer_at(l) + i] = first_value(l, i);
    for (int i = 0; i < TOTAL; i++) params[i] = narrow(master[i]);
    for (int step = 1; step <= steps; step++) {
        draw(step, first, rows, x[0], actions);
        for (int l = 0; l < LAYERS; l++) {
            const uint16_t *w = params + layer_at(l);
            layer_forward(l, w, x, rows);
        }
        float loss = cross_entropy(x[LAYERS], d[LAYERS], actions, rows);
        for (int l = LAYERS - 1; l >= 0; l--) {
            const uint16_t *w = params + layer_at(l);
            uint16_t *g = grads + layer_at(l);
            layer_backward(l, w, g, x, d, rows);
        }
        for (int i = 0; i < TOTAL; i++) {
            master[i] -= 0.3f * widen(grads[i]);
            params[i] = narrow(master[i]);
        }
        if (step % 100 == 0) printf("step %4d  loss %.5f\n", step, (double)loss);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const int steps = argc > 1 ? atoi(argv[1]) : 0;
    if (steps > 0) return train(steps);
    fprintf(stderr, "usage: flat_array STEPS\n");
    return 2;
}
