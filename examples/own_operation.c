/* own_operation.c: a layer that dtrain does not have, RMSNorm (Zhang and Sennrich, 2019), with its
 * backward. The program checks the gradient by finite differences, and then trains on two ranks.
 *
 *   build:   cc -O2 -I. examples/own_operation.c -o own_operation -lm -lpthread
 *   run:     ./own_operation [ranks, 2 by default]
 *   expect:  gradients agree with finite differences to 0.0001
 *            step   0  loss 0.6931
 *            step 100  loss 0.0714
 *            step 199  loss 0.0593
 *
 * The first half of the file is the operation. It loops over values in host memory, so it runs on
 * the CPU. For a GPU, forward and backward would call kernels: op->device->ops has the library's,
 * and stream_native is the stream for your kernels. Accumulation, sharded strategies, activation
 * checkpointing and planning work without further code. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

/* ---- the operation: y[r][i] = x[r][i] s[r] weight[i], s[r] = 1 / sqrt(mean of x[r][i]^2 + epsilon) */

typedef struct rms_args {
    float epsilon; /* set by the caller */
    int64_t rows, n;
    float *s; /* (rows), set by prepare */
} rms_args;

static dtrain_result rms_prepare(dtrain_op *op)
{
    rms_args *a = op->args;
    const dtrain_tensor *x = op->inputs[0];
    a->n = x->shape[x->ndim - 1];
    a->rows = x->count / a->n;
    if (x->dtype != DTRAIN_DTYPE_F32 || !(op->planning || op->device->ops->host_memory))
        return dtrain_fail(DTRAIN_ERROR_UNSUPPORTED, "rms_norm: needs f32 on the CPU device");
    dtrain_op_output(op, DTRAIN_DTYPE_F32, x->ndim, x->shape);
    a->s = dtrain_op_save(op, DTRAIN_DTYPE_F32, a->rows);
    return dtrain_op_check_param(op, 0, a->n, 0);
}

static dtrain_result rms_forward(dtrain_op *op)
{
    const rms_args *a = op->args;
    const float *weight = op->param_data[0];
    for (int64_t r = 0; r < a->rows; r++) {
        const float *x = (const float *)op->input_data[0] + r * a->n;
        float *y = (float *)op->output_data[0] + r * a->n, sum = 0;
        for (int64_t i = 0; i < a->n; i++) sum += x[i] * x[i];
        a->s[r] = 1 / sqrtf(sum / (float)a->n + a->epsilon);
        for (int64_t i = 0; i < a->n; i++) y[i] = x[i] * a->s[r] * weight[i];
    }
    return DTRAIN_OK;
}

/* With g = d_y weight: d_x = s g - x s^3 / n (sum of g x), d_weight = sum over rows of d_y x s. */
static dtrain_result rms_backward(dtrain_op *op)
{
    const rms_args *a = op->args;
    const float *weight = op->param_data[0];
    bool add_x, add_weight;
    float *d_x = dtrain_op_input_grad(op, 0, &add_x);
    float *d_weight = dtrain_op_param_grad(op, 0, &add_weight);
    if (op->planning) return DTRAIN_OK;
    for (int64_t i = 0; d_weight && !add_weight && i < a->n; i++) d_weight[i] = 0;
    for (int64_t r = 0; r < a->rows; r++) {
        const float *x = (const float *)op->input_data[0] + r * a->n;
        const float *d_y = (const float *)op->outputs[0]->grad + r * a->n;
        float s = a->s[r], dot = 0;
        for (int64_t i = 0; i < a->n; i++) dot += d_y[i] * weight[i] * x[i];
        for (int64_t i = 0; i < a->n; i++) {
            float d = s * d_y[i] * weight[i] - x[i] * s * s * s * dot / (float)a->n;
            if (d_weight) d_weight[i] += d_y[i] * x[i] * s;
            if (d_x) d_x[r * a->n + i] = add_x ? d_x[r * a->n + i] + d : d;
        }
    }
    return DTRAIN_OK;
}

static const dtrain_op_desc rms_op = {.reads = DTRAIN_OP_READS_INPUTS,
                                      .recompute = DTRAIN_RECOMPUTE_LAYERNORM,
                                      .name = "rms_norm",
                                      .prepare = rms_prepare,
                                      .forward = rms_forward,
                                      .backward = rms_backward};

static dtrain_tensor *rms_norm(dtrain_tape *tape, dtrain_tensor *x, dtrain_param *weight)
{
    rms_args args = {.epsilon = 1e-6f};
    return dtrain_tape_apply(tape, &rms_op, &x, 1, &weight, 1, &args, sizeof args);
}

/* ---- its gradient against (loss(x + h) - loss(x - h)) / 2h */

enum { ROWS = 3, WIDTH = 8, BATCH = 64 };

/* Return the sum of rms_norm(x), whose gradient is checked below. An error sticks to the tape. */
static dtrain_tensor *run(dtrain_tape *tape, const float *x, dtrain_param *weight,
                          dtrain_tensor **input)
{
    const int64_t shape[2] = {ROWS, WIDTH};
    dtrain_tape_begin(tape, 0, 0);
    *input = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, true);
    return dtrain_sum(tape, rms_norm(tape, *input, weight));
}

static int check_gradient(void)
{
    float x[ROWS * WIDTH], w[WIDTH], d_x[ROWS * WIDTH], d_w[WIDTH], up, down, worst = 0;
    dtrain_param weight = {.name = "weight", .value = w, .grad = d_w, .shape = {WIDTH}};
    dtrain_device_desc desc = {0};
    dtrain_device *device;
    dtrain_tape *tape;
    dtrain_tensor *input;
    int wrong = 0;
    for (uint64_t i = 0; i < ROWS * WIDTH; i++) x[i] = dtrain_random_normal(1, 0, i);
    for (uint64_t i = 0; i < WIDTH; i++) w[i] = dtrain_random_normal(1, 1, i);
    CHECK(dtrain_device_create(NULL, &desc, &device));
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape));
    CHECK(dtrain_tape_backward(tape, run(tape, x, &weight, &input), 1)); /* d_w and d_x */
    CHECK(dtrain_tensor_read(tape, input, NULL, d_x));
    for (int i = 0; i < ROWS * WIDTH + WIDTH; i++) {
        float *at = i < WIDTH ? &w[i] : &x[i - WIDTH], middle = *at;
        *at = middle + 1e-2f;
        CHECK(dtrain_tensor_read(tape, run(tape, x, &weight, &input), &up, NULL));
        *at = middle - 1e-2f;
        CHECK(dtrain_tensor_read(tape, run(tape, x, &weight, &input), &down, NULL));
        *at = middle;
        float off = fabsf((up - down) / 2e-2f - (i < WIDTH ? d_w[i] : d_x[i - WIDTH]));
        wrong += !(off < 1e-3f);
        if (off > worst) worst = off;
    }
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
    printf("gradients agree with finite differences to %.4f\n", (double)worst);
    if (wrong) dtrain_fail(DTRAIN_ERROR_NUMERIC, "%d of them do not", wrong);
    return wrong > 0;
}

/* ---- training: on which side of a plane is the direction of x? RMSNorm removes its length, which
 * is between 0.01 and 100 */

typedef struct job {
    dtrain_param params[3];
    float x[BATCH][WIDTH];
    int32_t side[BATCH];
    uint64_t rank, drawn;
} job;

static dtrain_result next_batch(void *user)
{
    job *j = user;
    for (int b = 0; b < BATCH; b++, j->drawn++) {
        float length = expf(2 * dtrain_random_normal(2, j->rank, j->drawn)), sum = 0, squares = 0;
        for (uint64_t i = 0; i < WIDTH; i++) {
            float v = dtrain_random_normal(3, j->rank, j->drawn * WIDTH + i);
            j->x[b][i] = length * v;
            sum += v, squares += v * v;
        }
        j->side[b] = sum > 0.5f * sqrtf(squares);
    }
    return DTRAIN_OK;
}

static dtrain_tensor *loss(dtrain_tape *tape, void *user)
{
    job *j = user;
    const int64_t shape[2] = {BATCH, WIDTH};
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, j->x, false);
    dtrain_tensor *side = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, j->side, false);
    x = rms_norm(tape, x, &j->params[0]);
    x = dtrain_linear(tape, x, &j->params[1], &j->params[2], DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(tape, x, side, 0, 0);
}

static int train(dtrain_world *world, void *user)
{
    job j = {.rank = (uint64_t)dtrain_world_rank(world)};
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    (void)user;
    j.params[0] = (dtrain_param){
        .name = "norm", .shape = {WIDTH}, .init = DTRAIN_INIT_CONSTANT, .init_scale = 1};
    j.params[1] = (dtrain_param){.name = "weight", .shape = {2, WIDTH}};
    j.params[2] = (dtrain_param){.name = "bias", .shape = {2}};
    CHECK(dtrain_strategy_create(world, j.params, 3, NULL, &strategy));
    CHECK(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    dtrain_trainer_desc desc = {.schedule = {.lr = 3e-2f},
                                .strategy = strategy,
                                .optimizer = optimizer,
                                .next_batch = next_batch,
                                .loss = loss,
                                .user = &j};
    CHECK(dtrain_trainer_create(world, &desc, &trainer));
    for (int step = 0; step < 200; step++) {
        dtrain_step_record record;
        CHECK(dtrain_trainer_step(trainer, &record));
        if (dtrain_world_rank(world) == 0 && (step % 100 == 0 || step == 199))
            printf("step %3d  loss %.4f\n", step, record.loss);
    }
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc desc = {.default_rank_count = 2}; /* without a launcher */
    if (argc > 1 && (desc.rank_count = (uint32_t)strtoul(argv[1], NULL, 10)) == 0) {
        fprintf(stderr, "usage: own_operation [RANKS], not \"%s\"\n", argv[1]);
        return 2;
    }
    if (check_gradient() == 0 && dtrain_launch(&desc, train, NULL, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "own_operation: %s\n", dtrain_last_error());
    return 1;
}
