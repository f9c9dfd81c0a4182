/* test_own_op.c: an operation of one's own, through the public interface alone.
 *
 * The operation is a gate, y = x s w with s = sigmoid(g) as a second output: it has two inputs, a
 * parameter, saved memory and two outputs, and it may be given the same tensor twice. */
#include "test.h"
#include "dtrain.h"
#include "tape_error.h"

enum { ROWS = 5, N = 8, UNITS = 4 };

typedef struct gate_args {
    int64_t n;
    float *s;
    dtrain_tensor **second;
    int *forwards; /* how often forward ran */
} gate_args;

static bool overwriting; /* backward cannot add: the tape does */

static dtrain_result gate_prepare(dtrain_op *op)
{
    gate_args *a = (gate_args *)op->args;
    const dtrain_tensor *x = op->inputs[0];
    a->n = x->shape[x->ndim - 1];
    if (op->inputs[1]->count != x->count)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "gate: x and g differ");
    dtrain_op_output(op, DTRAIN_DTYPE_F32, x->ndim, x->shape);
    dtrain_tensor *second = dtrain_op_output(op, DTRAIN_DTYPE_F32, x->ndim, x->shape);
    if (a->second) *a->second = second;
    a->s = (float *)dtrain_op_save(op, DTRAIN_DTYPE_F32, x->count);
    CHECK(op->param_shape[0][0] == op->params[0]->shape[0] && op->param_shape[0][1] == 0);
    return dtrain_op_check_param(op, 0, a->n, 0);
}

static dtrain_result gate_forward(dtrain_op *op)
{
    gate_args *a = (gate_args *)op->args;
    const float *x = (const float *)op->input_data[0], *g = (const float *)op->input_data[1];
    const float *w = (const float *)op->param_data[0];
    float *y = (float *)op->output_data[0], *s = (float *)op->output_data[1];
    CHECK(!op->planning);
    if (a->forwards) ++*a->forwards;
    for (int64_t i = 0; i < op->inputs[0]->count; i++) {
        a->s[i] = s[i] = 1 / (1 + expf(-g[i]));
        y[i] = x[i] * s[i] * w[i % a->n];
    }
    return DTRAIN_OK;
}

/* Asks, writes, and asks for the next: x and g may be one tensor. */
static dtrain_result gate_backward(dtrain_op *op)
{
    const gate_args *a = (const gate_args *)op->args;
    const float *x = (const float *)op->input_data[0], *w = (const float *)op->param_data[0];
    const float *d_y = (const float *)op->outputs[0]->grad;
    const float *d_s = (const float *)op->outputs[1]->grad;
    const int64_t count = op->inputs[0]->count;
    bool add = false;
    float *to = (float *)dtrain_op_input_grad(op, 0, overwriting ? NULL : &add);
    for (int64_t i = 0; to && !op->planning && i < count; i++)
        to[i] = (add ? to[i] : 0) + d_y[i] * a->s[i] * w[i % a->n];
    to = (float *)dtrain_op_input_grad(op, 1, overwriting ? NULL : &add);
    for (int64_t i = 0; to && !op->planning && i < count; i++)
        to[i] = (add ? to[i] : 0) +
                (d_y[i] * x[i] * w[i % a->n] + (d_s ? d_s[i] : 0)) * a->s[i] * (1 - a->s[i]);
    to = dtrain_op_param_grad(op, 0, &add);
    for (int64_t i = 0; to && !op->planning && i < count; i++)
        to[i % a->n] = (add || i >= a->n ? to[i % a->n] : 0) + d_y[i] * x[i] * a->s[i];
    return DTRAIN_OK;
}

static dtrain_op_desc gate_desc(void)
{
    dtrain_op_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.reads = DTRAIN_OP_READS_INPUTS;
    desc.recompute = DTRAIN_RECOMPUTE_ELEMENTWISE;
    desc.name = "gate";
    desc.prepare = gate_prepare;
    desc.forward = gate_forward;
    desc.backward = gate_backward;
    return desc;
}

static dtrain_op_desc the_gate; /* of this process; test ranks are its threads */
static int forwards;

static dtrain_tensor *gate(dtrain_tape *tape, dtrain_tensor *x, dtrain_tensor *g, dtrain_param *w,
                           dtrain_tensor **second)
{
    dtrain_tensor *const inputs[2] = {x, g};
    gate_args args;
    memset(&args, 0, sizeof args);
    args.second = second;
    return dtrain_tape_apply(tape, &the_gate, inputs, 2, &w, 1, &args, sizeof args);
}

static dtrain_tape *cpu_tape(dtrain_device **device)
{
    dtrain_device_desc desc;
    dtrain_tape *tape = NULL;
    memset(&desc, 0, sizeof desc);
    the_gate = gate_desc();
    CHECK(dtrain_device_create(NULL, &desc, device) == DTRAIN_OK);
    CHECK(dtrain_tape_create(NULL, NULL, *device, &tape) == DTRAIN_OK);
    return tape;
}

static void end(dtrain_tape *tape, dtrain_device *device)
{
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

static void fill(float *values, int64_t count, uint64_t stream)
{
    for (int64_t i = 0; i < count; i++) values[i] = dtrain_random_normal(5, stream, (uint64_t)i);
}

static dtrain_param vector(float *value, float *grad)
{
    dtrain_param p;
    memset(&p, 0, sizeof p);
    p.name = "w";
    p.value = value;
    p.grad = grad;
    p.shape[0] = N;
    return p;
}

/* ---- gradients ---- */

enum { BOTH, FIRST_ONLY, SECOND_ONLY, SAME_TENSOR, USED_AGAIN, SAME_USED_AGAIN, WAYS };

static float values[2 * ROWS * N + N]; /* x, g, w */

/* The loss in one of the ways to use the gate; x and g come back as inputs. */
static dtrain_tensor *gate_loss(dtrain_tape *tape, int way, dtrain_param *w,
                                dtrain_tensor *input[2])
{
    const int64_t shape[2] = {ROWS, N};
    dtrain_tensor *s = NULL, *y;
    for (int i = 0; i < 2; i++)
        input[i] = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, values + i * ROWS * N, true);
    y = gate(tape, input[0], input[way == SAME_TENSOR || way == SAME_USED_AGAIN ? 0 : 1], w, &s);
    if (way == SECOND_ONLY) return dtrain_sum(tape, s);
    if (way == BOTH) y = dtrain_add(tape, y, dtrain_scale(tape, s, 0.5f));
    if (way >= USED_AGAIN) y = dtrain_add(tape, y, dtrain_scale(tape, input[0], 0.25f));
    return dtrain_sum(tape, y);
}

static void test_gradients(void)
{
    float grad[2 * ROWS * N + N], side[2];
    dtrain_param w = vector(values + 2 * ROWS * N, grad + 2 * ROWS * N);
    dtrain_device *device;
    dtrain_tape *tape = cpu_tape(&device);
    dtrain_tensor *input[2];
    fill(values, 2 * ROWS * N + N, 1);
    for (int round = 0; round < 2 * WAYS; round++) {
        const int way = round / 2;
        overwriting = round % 2;
        w.state.grad_written = false;
        CHECK(dtrain_tape_begin(tape, 0, 0) == DTRAIN_OK);
        dtrain_tensor *loss = gate_loss(tape, way, &w, input);
        CHECK_MSG(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK, "%s", dtrain_last_error());
        for (int i = 0; i < 2; i++)
            CHECK(dtrain_tensor_read(tape, input[i], NULL, grad + i * ROWS * N) == DTRAIN_OK);
        for (int i = 0; i < 2 * ROWS * N + N; i++) {
            const float middle = values[i];
            for (int k = 0; k < 2; k++) {
                values[i] = middle + (k ? 5e-3f : -5e-3f);
                CHECK(dtrain_tape_begin(tape, DTRAIN_TAPE_NO_GRAD, 0) == DTRAIN_OK);
                loss = gate_loss(tape, way, &w, input);
                CHECK(dtrain_tensor_read(tape, loss, &side[k], NULL) == DTRAIN_OK);
            }
            values[i] = middle;
            CHECK_CLOSE(grad[i], (side[1] - side[0]) / 1e-2f, 2e-3);
        }
    }
    overwriting = false;
    end(tape, device);
}

static void test_accumulation(void)
{
    float once[N], twice[N];
    dtrain_param w = vector(values + 2 * ROWS * N, once);
    dtrain_device *device;
    dtrain_tape *tape = cpu_tape(&device);
    dtrain_tensor *input[2];
    fill(values, 2 * ROWS * N + N, 2);
    for (int pass = 0; pass < 3; pass++) {
        if (pass == 1) w.grad = twice, w.state.grad_written = false; /* pass 2 adds to pass 1 */
        CHECK(dtrain_tape_begin(tape, 0, 0) == DTRAIN_OK);
        dtrain_tensor *loss = gate_loss(tape, FIRST_ONLY, &w, input);
        CHECK(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK);
    }
    for (int i = 0; i < N; i++) CHECK_CLOSE(twice[i], 2 * once[i], 1e-5);
    w.flags = DTRAIN_PARAM_FROZEN; /* nobody wants its gradient, and nobody writes it */
    CHECK(dtrain_tape_begin(tape, 0, 0) == DTRAIN_OK);
    CHECK(dtrain_tape_backward(tape, gate_loss(tape, FIRST_ONLY, &w, input), 1) == DTRAIN_OK);
    for (int i = 0; i < N; i++) CHECK_CLOSE(twice[i], 2 * once[i], 1e-5);
    end(tape, device);
}

/* ---- a deep model, on one rank or several ---- */

typedef struct model {
    dtrain_param params[2 * UNITS];
    float x[ROWS * N];
} model;

static dtrain_tensor *model_loss(dtrain_tape *tape, void *user)
{
    const int64_t shape[2] = {ROWS, N};
    model *m = (model *)user;
    gate_args args;
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, m->x, false);
    memset(&args, 0, sizeof args);
    args.forwards = &forwards;
    for (uint32_t u = 0; u < UNITS; u++) {
        dtrain_param *p = &m->params[2 * u], *w = p + 1;
        dtrain_tape_unit(tape, u);
        dtrain_tensor *h = dtrain_linear(tape, x, p, NULL, DTRAIN_ACTIVATION_NONE);
        dtrain_tensor *const inputs[2] = {x, h};
        h = dtrain_tape_apply(tape, &the_gate, inputs, 2, &w, 1, &args, sizeof args);
        x = dtrain_add(tape, h, x);
    }
    return dtrain_mean(tape, x);
}

static void model_declare(model *m)
{
    static const char *const names[2 * UNITS] = {"p0", "w0", "p1", "w1", "p2", "w2", "p3", "w3"};
    memset(m, 0, sizeof *m);
    for (uint32_t i = 0; i < 2 * UNITS; i++) {
        dtrain_param *p = &m->params[i];
        p->name = names[i];
        p->unit = i / 2;
        p->shape[0] = N;
        p->shape[1] = i % 2 ? 0 : N;
        p->init = DTRAIN_INIT_NORMAL;
        p->init_scale = 0.4f;
    }
}

/* The gate runs again in every unit whose results were overwritten, and no bit changes. */
static void test_checkpointing(void)
{
    float value[2 * UNITS][N * N], grad[2][2 * UNITS][N * N], losses[2];
    dtrain_device *device;
    dtrain_tape *tape = cpu_tape(&device);
    model m;
    model_declare(&m);
    fill(m.x, ROWS * N, 3);
    for (uint32_t every = 0; every < 2; every++) {
        CHECK(dtrain_tape_recompute(tape, every, DTRAIN_RECOMPUTE_ELEMENTWISE) == DTRAIN_OK);
        for (int i = 0; i < 2 * UNITS; i++) {
            fill(value[i], N * N, 10 + (uint64_t)i);
            m.params[i].value = value[i];
            m.params[i].grad = grad[every][i];
            m.params[i].state.grad_written = false;
        }
        memset(grad[every], 0, sizeof grad[every]);
        forwards = 0;
        CHECK(dtrain_tape_begin(tape, 0, 0) == DTRAIN_OK);
        dtrain_tensor *loss = model_loss(tape, &m);
        CHECK(dtrain_tensor_read(tape, loss, &losses[every], NULL) == DTRAIN_OK);
        CHECK_MSG(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK, "%s", dtrain_last_error());
        CHECK_MSG(forwards == (every ? 2 * UNITS - 2 : UNITS), "%d", forwards); /* two are intact */
    }
    CHECK(memcmp(&losses[0], &losses[1], sizeof losses[0]) == 0);
    CHECK(memcmp(grad[0], grad[1], sizeof grad[0]) == 0);
    end(tape, device);
}

typedef struct job {
    uint32_t kind, every, micro_batches;
    uint64_t hash;
    double loss; /* of the last step */
} job;

static dtrain_result job_batch(void *user)
{
    model *m = (model *)user;
    m->x[0] += 1; /* another batch each time */
    return DTRAIN_OK;
}

static int train(dtrain_world *world, void *user)
{
    job *j = (job *)user;
    model m;
    dtrain_strategy *strategy = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_trainer *trainer = NULL;
    dtrain_strategy_desc kind = {0};
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_trainer_desc desc;
    dtrain_memory memory;
    dtrain_tape_info info;
    dtrain_step_record record;
    uint64_t hash = 0;
    const int rank = dtrain_world_rank(world);
    model_declare(&m);
    fill(m.x, ROWS * N, 50 + (uint64_t)rank);
    kind.kind = j->kind;
    kind.bucket_bytes = 512;
    memset(&desc, 0, sizeof desc);
    desc.micro_batches = j->micro_batches;
    desc.recompute_every = j->every;
    desc.schedule.lr = 0.01f;
    desc.next_batch = job_batch;
    desc.loss = model_loss;
    desc.user = &m;
    TRY(dtrain_strategy_create(world, m.params, 2 * UNITS, &kind, &strategy));
    TRY(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    TRY(dtrain_trainer_create(world, &desc, &trainer));
    TRY(dtrain_trainer_plan(world, &desc, NULL, &memory));
    for (int step = 0; step < 3; step++) TRY(dtrain_trainer_step(trainer, &record));
    TRY(dtrain_strategy_verify(strategy, &hash));
    dtrain_tape_query(dtrain_trainer_tape(trainer), &info);
    CHECK(memory.activations == info.activation_bytes && info.activation_bytes > 0);
    CHECK(memory.activation_grads == info.gradient_bytes && info.gradient_bytes > 0);
    if (rank == 0) j->hash = hash, j->loss = record.loss;
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

/* Every strategy, with and without checkpointing, gives the same bits, and with micro-batches, which
 * they add up in different orders, the same loss; memory is what the plan said, which never runs
 * forward. */
static void test_strategies(void)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_DDP, DTRAIN_STRATEGY_FULL_SHARD,
                                     DTRAIN_STRATEGY_ZERO3};
    dtrain_launch_desc launch;
    memset(&launch, 0, sizeof launch);
    the_gate = gate_desc();
    launch.rank_count = 2;
    launch.mode = DTRAIN_LAUNCH_THREADS;
    launch.threads_per_rank = 1;
    for (uint32_t micro_batches = 1; micro_batches < 3; micro_batches++) {
        job first;
        memset(&first, 0, sizeof first);
        for (size_t i = 0; i < 6; i++) {
            job j;
            memset(&j, 0, sizeof j);
            j.kind = kinds[i / 2];
            j.every = (uint32_t)i % 2;
            j.micro_batches = micro_batches;
            CHECK_MSG(dtrain_launch(&launch, train, &j, NULL) == DTRAIN_OK, "%s",
                      dtrain_last_error());
            if (i == 0) first = j;
            CHECK_CLOSE(j.loss, first.loss, 1e-5);
            if (micro_batches > 1 && i % 2 == 0) first.hash = j.hash;
            CHECK_MSG(j.hash == first.hash && j.hash != 0,
                      "kind %u, every %u: %016llx, not %016llx", j.kind, j.every,
                      (unsigned long long)j.hash, (unsigned long long)first.hash);
        }
    }
}

/* ---- autocast ---- */

static dtrain_result product_prepare(dtrain_op *op)
{
    CHECK(op->args && *(const int64_t *)op->args == 0); /* none were given */
    dtrain_op_output(op, op->cast, 2, op->inputs[0]->shape);
    return DTRAIN_OK;
}

/* Rounded inputs and matrices, vectors as they are. */
static dtrain_result product_forward(dtrain_op *op)
{
    const uint16_t *x = (const uint16_t *)op->input_data[0];
    const uint16_t *m = (const uint16_t *)op->param_data[0];
    const float *v = (const float *)op->param_data[1], *full = (const float *)op->inputs[0]->data;
    uint16_t *y = (uint16_t *)op->output_data[0];
    CHECK(op->cast == DTRAIN_DTYPE_BF16);
    for (int i = 0; i < ROWS * N; i++) {
        CHECK(x[i] == dtrain_half_from_f32(DTRAIN_DTYPE_BF16, full[i]));
        y[i] = dtrain_half_from_f32(DTRAIN_DTYPE_BF16,
                                    dtrain_half_to_f32(DTRAIN_DTYPE_BF16, x[i]) *
                                            dtrain_half_to_f32(DTRAIN_DTYPE_BF16, m[i % N]) +
                                        v[i % N]);
    }
    return DTRAIN_OK;
}

static dtrain_result product_backward(dtrain_op *op)
{
    const uint16_t *d_y = (const uint16_t *)op->outputs[0]->grad;
    bool add;
    float *d_x = (float *)dtrain_op_input_grad(op, 0, &add); /* fp32, as the input is */
    for (int i = 0; i < ROWS * N; i++) d_x[i] = dtrain_half_to_f32(DTRAIN_DTYPE_BF16, d_y[i]);
    CHECK(op->outputs[0]->dtype == DTRAIN_DTYPE_BF16 && !add);
    return DTRAIN_OK;
}

static void test_autocast(void)
{
    const int64_t shape[2] = {ROWS, N};
    float v[N], matrix[N * N], grad[ROWS * N];
    dtrain_param params[2] = {vector(matrix, NULL), vector(v, NULL)};
    dtrain_param *const list[2] = {&params[0], &params[1]};
    dtrain_device *device;
    dtrain_tape *tape = cpu_tape(&device);
    dtrain_op_desc desc = gate_desc();
    params[0].shape[1] = N;
    desc.autocast = true;
    desc.prepare = product_prepare;
    desc.forward = product_forward;
    desc.backward = product_backward;
    fill(v, N, 1);
    fill(matrix, N * N, 2);
    fill(values, ROWS * N, 3);
    CHECK(dtrain_tape_begin(tape, DTRAIN_TAPE_BF16, 0) == DTRAIN_OK);
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, values, true);
    dtrain_tensor *y = dtrain_tape_apply(tape, &desc, &x, 1, list, 2, NULL, sizeof(int64_t));
    CHECK(dtrain_tape_backward(tape, dtrain_sum(tape, y), 2) == DTRAIN_OK);
    CHECK(dtrain_tensor_read(tape, x, NULL, grad) == DTRAIN_OK);
    for (int i = 0; i < ROWS * N; i++) CHECK(grad[i] == 2);
    end(tape, device);
}

/* ---- errors ---- */

static dtrain_result none_prepare(dtrain_op *op)
{
    (void)op;
    return DTRAIN_OK;
}

static dtrain_result many_prepare(dtrain_op *op)
{
    for (int i = 0; i <= DTRAIN_OP_OUTPUTS; i++)
        dtrain_op_output(op, DTRAIN_DTYPE_F32, 2, op->inputs[0]->shape);
    return DTRAIN_OK; /* the error sticks all the same */
}

static dtrain_result bad_run(dtrain_op *op)
{
    return dtrain_fail(DTRAIN_ERROR_NUMERIC, "%s: as it was told", op->desc->name);
}

static void expect(dtrain_tape *tape, dtrain_result code, const char *part)
{
    const dtrain_result found = tape_error(tape);
    CHECK_MSG(found == code && strstr(dtrain_last_error(), part), "expected '%s', found %s: %s",
              part, dtrain_result_text(found), dtrain_last_error());
}

static void test_errors(void)
{
    const int64_t shape[2] = {ROWS, N};
    float w[N + 1], grad[N + 1];
    dtrain_param *param, p = vector(w, grad), other;
    dtrain_device *device;
    dtrain_tape *tape = cpu_tape(&device);
    for (int what = 0; what < 11; what++) {
        dtrain_op_desc desc = gate_desc();
        gate_args args;
        uint32_t input_count = 2;
        memset(&args, 0, sizeof args);
        CHECK(dtrain_tape_begin(tape, 0, 0) == DTRAIN_OK);
        dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, values, true);
        dtrain_tensor *inputs[DTRAIN_OP_INPUTS + 1] = {x, x};
        param = &p;
        other = p;
        other.name = "other";
        other.shape[0] = N + 1;
        if (what == 0) desc.backward = NULL;
        if (what == 1) input_count = DTRAIN_OP_INPUTS + 1;
        if (what == 2) inputs[1] = NULL;
        if (what == 3) desc.integer_inputs = 2;
        if (what == 4) param = NULL;
        if (what == 5) param = &other;
        if (what == 6) desc.prepare = none_prepare;
        if (what == 7) desc.prepare = many_prepare;
        if (what == 8) desc.forward = bad_run;
        if (what == 9) desc.backward = bad_run;
        dtrain_tensor *y =
            dtrain_tape_apply(tape, &desc, inputs, input_count, &param, 1, &args, sizeof args);
        if (what < 9) CHECK(y == NULL && dtrain_sum(tape, y) == NULL);
        else CHECK(y && tape_error(tape) == DTRAIN_OK);
        if (what == 0) expect(tape, DTRAIN_ERROR_ARGUMENT, "gate: desc is NULL or has no");
        if (what == 1) expect(tape, DTRAIN_ERROR_ARGUMENT, "gate: 9 inputs and 1 parameters");
        if (what == 2) expect(tape, DTRAIN_ERROR_ARGUMENT, "gate: input 2 is NULL, expected f32");
        if (what == 3) expect(tape, DTRAIN_ERROR_ARGUMENT, "gate: input 2 is f32, expected i32");
        if (what == 4) expect(tape, DTRAIN_ERROR_ARGUMENT, "gate: parameter 1 is NULL");
        if (what == 5) expect(tape, DTRAIN_ERROR_ARGUMENT, "parameter other must be (8)");
        if (what == 6) expect(tape, DTRAIN_ERROR_USAGE, "gate: prepare has made no output");
        if (what == 7) expect(tape, DTRAIN_ERROR_USAGE, "gate: an operation has at most 2 outputs");
        if (what == 8) expect(tape, DTRAIN_ERROR_NUMERIC, "gate: as it was told");
        if (what == 10) CHECK(dtrain_tape_backward(tape, dtrain_sum(tape, y), 1) == DTRAIN_OK);
        if (what == 9) {
            CHECK(dtrain_tape_backward(tape, dtrain_sum(tape, y), 1) == DTRAIN_ERROR_NUMERIC);
            expect(tape, DTRAIN_ERROR_NUMERIC, "gate: as it was told");
        }
    }
    CHECK(p.state.pending_uses ==
          0); /* the failed backward has left a count, the last begins anew */
    CHECK(dtrain_tape_apply(NULL, &the_gate, NULL, 0, NULL, 0, NULL, 0) == NULL);
    CHECK(dtrain_tape_begin(tape, 0, 0) == DTRAIN_OK);
    CHECK(dtrain_tape_apply(tape, NULL, NULL, 0, NULL, 0, NULL, 0) == NULL);
    expect(tape, DTRAIN_ERROR_ARGUMENT, "dtrain_tape_apply: desc is NULL");
    end(tape, device);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_gradients);
    RUN(test_accumulation);
    RUN(test_checkpointing);
    RUN(test_strategies);
    RUN(test_autocast);
    RUN(test_errors);
    return test_summary();
}
