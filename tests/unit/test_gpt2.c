/* test_gpt2.c: a GPT-2 written with the tape against PyTorch: logits, loss, every gradient, ten
 * AdamW steps; on the naive and the CPU device, then with DDP on 1, 2 and 3 ranks; and the same with
 * a padded vocabulary. */
#include "test.h"
#include "packed_attention.h"
#include "dtrain.h"
#include "naive_device.h"
#include "reference/gpt2_golden.h"
#include "tape_error.h"

enum {
    ROWS = GOLDEN_BATCH * GOLDEN_POSITIONS,
    PER_LAYER = 12,
    PARAMS = GOLDEN_PARAM_TENSORS,
    WITH_HEAD = PARAMS + 1, /* the tied head as an entry of its own */
    PADDING = 48 - GOLDEN_VOCAB
};

/* Order of golden_params: wte, wpe, 12 per layer, lnf_w, lnf_b. */
typedef struct gpt2 {
    dtrain_param params[WITH_HEAD];
    float memory[2][GOLDEN_PARAM_COUNT + PADDING * GOLDEN_CHANNELS]; /* values, gradients */
    bool alias;      /* use the head entry, else wte twice */
    int64_t padding; /* rows of wte behind PyTorch's */
    dtrain_tensor *logits;
} gpt2;

static int64_t golden_count(int i)
{
    return golden_params[i].dim0 * (golden_params[i].dim1 ? golden_params[i].dim1 : 1);
}

/* A copy of PyTorch's model; the head is an alias without memory of its own. `garbage` is in rows of
 * padding. */
static void gpt2_init(gpt2 *model, bool alias, int64_t padding, float garbage)
{
    int64_t at = 0;
    memset(model, 0, sizeof *model);
    model->alias = alias;
    model->padding = padding;
    for (int i = 0; i < PARAMS; i++) {
        dtrain_param *p = &model->params[i];
        p->name = golden_params[i].name;
        p->shape[0] = golden_params[i].dim0;
        p->shape[1] = golden_params[i].dim1;
        p->unit = i < 2            ? 0
                  : i < PARAMS - 2 ? 1 + (uint32_t)((i - 2) / PER_LAYER)
                                   : 1 + GOLDEN_LAYERS;
        p->value = model->memory[0] + at;
        p->grad = model->memory[1] + at;
        memcpy(p->value, golden_params[i].value, (size_t)golden_count(i) * sizeof(float));
        at += golden_count(i);
        for (int64_t end = at + padding * GOLDEN_CHANNELS; i == 0 && at < end; at++)
            model->memory[0][at] = garbage;
    }
    model->params[0].shape[0] += padding;
    dtrain_param *head = &model->params[PARAMS];
    *head = model->params[0];
    head->name = "head";
    head->unit = 1 + GOLDEN_LAYERS;
    head->value = head->grad = NULL;
    head->alias_of = &model->params[0];
}

static dtrain_tensor *gpt2_block(dtrain_tape *tape, dtrain_param *p, dtrain_tensor *x)
{
    dtrain_tensor *h = dtrain_layernorm(tape, x, NULL, &p[0], &p[1], 1e-5f);
    h = dtrain_linear(tape, h, &p[2], &p[3], DTRAIN_ACTIVATION_NONE);
    h = causal_attention(tape, h, GOLDEN_POSITIONS, GOLDEN_HEADS);
    x = dtrain_add(tape, x, dtrain_linear(tape, h, &p[4], &p[5], DTRAIN_ACTIVATION_NONE));
    h = dtrain_layernorm(tape, x, NULL, &p[6], &p[7], 1e-5f);
    h = dtrain_linear(tape, h, &p[8], &p[9], DTRAIN_ACTIVATION_GELU);
    return dtrain_add(tape, x, dtrain_linear(tape, h, &p[10], &p[11], DTRAIN_ACTIVATION_NONE));
}

/* Mean loss of `batch` sequences from the first given on. */
static dtrain_tensor *gpt2_loss(dtrain_tape *tape, gpt2 *model, int64_t first, int64_t batch)
{
    dtrain_param *p = model->params, *final = p + 2 + PER_LAYER * GOLDEN_LAYERS;
    int64_t shape[2];
    shape[0] = batch;
    shape[1] = GOLDEN_POSITIONS;
    dtrain_tape_unit(tape, 0);
    dtrain_tensor *inputs = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, shape,
                                              golden_inputs + first * GOLDEN_POSITIONS, false);
    dtrain_tensor *targets = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, shape,
                                               golden_targets + first * GOLDEN_POSITIONS, false);
    dtrain_tensor *x = dtrain_embedding(tape, inputs, &p[0], &p[1]);
    for (int layer = 0; layer < GOLDEN_LAYERS; layer++) {
        dtrain_tape_unit(tape, 1 + (uint32_t)layer);
        x = gpt2_block(tape, p + 2 + PER_LAYER * layer, x);
    }
    dtrain_tape_unit(tape, 1 + GOLDEN_LAYERS);
    x = dtrain_layernorm(tape, x, NULL, &final[0], &final[1], 1e-5f);
    model->logits =
        dtrain_linear(tape, x, model->alias ? &p[PARAMS] : &p[0], NULL, DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(tape, model->logits, targets, GOLDEN_VOCAB, 0);
}

static void check_floats(const char *what, const float *got, const float *expected, int64_t count,
                         double tolerance)
{
    for (int64_t i = 0; i < count; i++)
        CHECK_MSG(fabs((double)got[i] - (double)expected[i]) <=
                      tolerance * (1 + fabs((double)expected[i])),
                  "%s[%d] is %.9g, PyTorch says %.9g", what, (int)i, (double)got[i],
                  (double)expected[i]);
}

/* Padding has no gradient at all, and holds what it held. */
static void check_padding(const gpt2 *model, float value)
{
    const int64_t first = golden_count(0);
    for (int64_t i = first; i < first + model->padding * GOLDEN_CHANNELS; i++)
        CHECK_MSG(model->params[0].grad[i] == 0 && model->params[0].value[i] == value,
                  "padding[%d] is %g with gradient %g", (int)(i - first),
                  (double)model->params[0].value[i], (double)model->params[0].grad[i]);
}

static void check_gradients(const gpt2 *model, double tolerance)
{
    for (int i = 0; i < PARAMS; i++)
        check_floats(golden_params[i].name, model->params[i].grad, golden_params[i].grad,
                     golden_count(i), tolerance);
}

/* The key biases have gradient 0 but for rounding, which Adam scales up to lr a step. */
static void check_final_values(const gpt2 *model)
{
    for (int i = 0; i < PARAMS; i++) {
        const char *name = golden_params[i].name;
        const float *got = model->params[i].value, *expected = golden_params[i].final;
        int64_t part = golden_count(i) / 3;
        if (!strstr(name, "qkv_b")) {
            check_floats(name, got, expected, golden_count(i), 2e-5);
            continue;
        }
        check_floats(name, got, expected, part, 2e-5);
        check_floats(name, got + part, expected + part, part, 1.1e-2);
        check_floats(name, got + 2 * part, expected + 2 * part, part, 2e-5);
    }
}

/* ---- The tape alone ----------------------------------------------------------------------------*/

static dtrain_device *open_device(int kind)
{
    dtrain_device_desc desc;
    dtrain_device *device = NULL;
    memset(&desc, 0, sizeof desc);
    CHECK(dtrain_device_create(kind ? device_table("cpu") : naive_device_ops(), &desc, &device) ==
          DTRAIN_OK);
    return device;
}

static void check_one_pass(int kind, bool alias, int64_t padding, float garbage)
{
    static gpt2 model;
    const int64_t columns = GOLDEN_VOCAB + padding;
    float logits[ROWS * (GOLDEN_VOCAB + PADDING)], loss_value;
    dtrain_device *device = open_device(kind);
    dtrain_tape *tape = NULL;
    gpt2_init(&model, alias, padding, garbage);
    CHECK(dtrain_tape_create(NULL, NULL, device, &tape) == DTRAIN_OK);
    CHECK(dtrain_tape_begin(tape, 0, 1) == DTRAIN_OK);
    dtrain_tensor *loss = gpt2_loss(tape, &model, 0, GOLDEN_BATCH);
    CHECK_MSG(dtrain_tensor_read(tape, model.logits, logits, NULL) == DTRAIN_OK, "%s",
              dtrain_last_error());
    CHECK(dtrain_tensor_read(tape, loss, &loss_value, NULL) == DTRAIN_OK);
    for (int64_t row = 0; row < ROWS; row++)
        check_floats("logits", logits + row * columns, golden_logits + row * GOLDEN_VOCAB,
                     GOLDEN_VOCAB, 1e-5);
    CHECK_CLOSE(loss_value, golden_loss, 1e-6);
    CHECK(dtrain_tape_backward(tape, loss, 1) == DTRAIN_OK);
    check_gradients(&model, 2e-6);
    check_padding(&model, garbage);
    dtrain_tape_destroy(tape);
    dtrain_device_destroy(device);
}

static void test_naive_device(void)
{
    check_one_pass(0, false, 0, 0);
    check_one_pass(0, true, 0, 0);
    check_one_pass(0, true, PADDING, 1e3f); /* logits that would win */
}

static void test_cpu_device(void)
{
    check_one_pass(1, false, 0, 0);
    check_one_pass(1, true, 0, 0);
    check_one_pass(1, false, PADDING, 1e3f);
    check_one_pass(1, true, PADDING, 1e3f);
    check_one_pass(1, true, 1, 1e3f);
}

/* ---- Ranks -------------------------------------------------------------------------------------*/

typedef struct run {
    uint32_t ranks, mode;
    const dtrain_device_ops *device;
    bool alias, no_overlap, library_memory;
    int64_t padding;
    size_t bucket_bytes; /* 0 = as by default: one bucket */
    uint64_t hash;       /* rank 0: of the trained parameters */
} run;

static uint64_t *hash_from_rank; /* shared with forked ranks */

/* This rank's part of the batch; uneven for two ranks: so losses are weighted here by `scale`, and
 * gradients by the tape and the strategy. */
static void split_batch(const dtrain_world *world, int64_t *first, int64_t *batch, float *scale)
{
    const int ranks = dtrain_world_size(world), rank = dtrain_world_rank(world);
    *first = (int64_t)rank * GOLDEN_BATCH / ranks;
    *batch = (int64_t)(rank + 1) * GOLDEN_BATCH / ranks - *first;
    *scale = (float)*batch * (float)ranks / (float)GOLDEN_BATCH;
}

static dtrain_result ddp_create(dtrain_world *world, const run *r, gpt2 *model,
                                dtrain_strategy **ddp)
{
    dtrain_strategy_desc desc = {0};
    gpt2_init(model, r->alias, r->padding, 0);
    desc.no_overlap = r->no_overlap;
    desc.missing_gradient = DTRAIN_MISSING_GRADIENT_ERROR;
    if (r->bucket_bytes) desc.bucket_bytes = r->bucket_bytes;
    if (dtrain_world_rank(world) != 0) /* rank 0's values must win */
        for (int i = 0; i < GOLDEN_PARAM_COUNT; i++) model->memory[0][i] = -1;
    for (int i = 0; i < PARAMS && r->library_memory; i++)
        model->params[i].value = model->params[i].grad = NULL;
    model->params[0].init = DTRAIN_INIT_NORMAL;
    model->params[0].init_scale = 1;
    model->params[0].init_count = golden_count(0); /* padding stays 0 */
    TRY(dtrain_strategy_create(world, model->params, r->alias ? WITH_HEAD : PARAMS, &desc, ddp));
    for (int i = 0; i < PARAMS && r->library_memory; i++)
        memcpy(model->params[i].value, golden_params[i].value,
               (size_t)golden_count(i) * sizeof(float));
    return DTRAIN_OK;
}

/* Forward, backward, finish; *loss is the mean over the whole batch. */
static dtrain_result ddp_gradients(dtrain_world *world, dtrain_strategy *ddp, dtrain_tape *tape,
                                   gpt2 *model, float *loss)
{
    int64_t first, batch;
    float scale;
    split_batch(world, &first, &batch, &scale);
    TRY(dtrain_tape_begin(tape, 0, 1));
    dtrain_tensor *mean = gpt2_loss(tape, model, first, batch);
    TRY(dtrain_tensor_read(tape, mean, loss, NULL));
    TRY(dtrain_tape_backward(tape, mean, 1));
    TRY(dtrain_strategy_finish(ddp));
    *loss *= scale;
    return dtrain_all_reduce(dtrain_world_comm(world), loss, loss, 1, DTRAIN_DTYPE_F32,
                             DTRAIN_REDUCE_MEAN, NULL);
}

static dtrain_result ddp_train(dtrain_world *world, const run *r, gpt2 *model)
{
    dtrain_strategy *ddp = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_tape *tape = NULL;
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    float loss, norm, clip;
    uint64_t hash;
    adamw.beta2 = 0.95f;
    adamw.weight_decay = 0.1f;
    TRY(ddp_create(world, r, model, &ddp));
    TRY(dtrain_optimizer_create(world, ddp, &adamw, &optimizer));
    TRY(dtrain_tape_create(world, ddp, NULL, &tape));
    for (int step = 0; step <= GOLDEN_STEPS; step++) {
        TRY(ddp_gradients(world, ddp, tape, model, &loss));
        CHECK_CLOSE(loss, step < GOLDEN_STEPS ? golden_step_loss[step] : golden_final_loss, 2e-5);
        if (step == 0) check_gradients(model, 2e-6);
        check_padding(model, 0);
        if (step == GOLDEN_STEPS) break;
        TRY(dtrain_grad_norm(ddp, NULL, 1.0f, &norm, &clip));
        CHECK_CLOSE(norm, golden_step_norm[step], 2e-5);
        TRY(dtrain_optimizer_step(optimizer, 1e-3f, clip));
    }
    check_final_values(model);
    TRY(dtrain_strategy_verify(ddp, &hash));
    if (dtrain_world_rank(world) == 0) *hash_from_rank = hash;
    dtrain_tape_destroy(tape);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(ddp);
    return DTRAIN_OK;
}

static int train_main(dtrain_world *world, void *user)
{
    gpt2 *model = (gpt2 *)malloc(sizeof *model); /* ranks may be threads */
    dtrain_result result = ddp_train(world, (const run *)user, model);
    CHECK_MSG(result == DTRAIN_OK, "%s", dtrain_last_error());
    free(model);
    return result != DTRAIN_OK;
}

static void launch(run *r, dtrain_rank_fn rank_main)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = r->ranks;
    desc.mode = r->mode;
    desc.threads_per_rank = 1;
    desc.timeout_ms = 20000;
    desc.device_ops = r->device;
    if (!hash_from_rank)
        hash_from_rank = (uint64_t *)mmap(NULL, sizeof *hash_from_rank, PROT_READ | PROT_WRITE,
                                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK_MSG(dtrain_launch(&desc, rank_main, r, NULL) == DTRAIN_OK, "%s", dtrain_last_error());
    r->hash = *hash_from_rank;
}

static run run_of(uint32_t ranks, uint32_t mode)
{
    run r;
    memset(&r, 0, sizeof r);
    r.ranks = ranks;
    r.mode = mode;
    return r;
}

static void check_ranks(uint32_t mode)
{
    for (uint32_t ranks = 1; ranks <= 3; ranks++)
        for (int alias = 0; alias < 2; alias++) {
            run r = run_of(ranks, mode);
            r.alias = alias != 0;
            r.library_memory = !alias;
            launch(&r, train_main);
        }
}

static void test_ddp_threads(void) { check_ranks(DTRAIN_LAUNCH_THREADS); }
static void test_ddp_processes(void) { check_ranks(DTRAIN_LAUNCH_PROCESSES); }

static void test_ddp_padded(void)
{
    for (uint32_t ranks = 1; ranks <= 3; ranks++) {
        run r = run_of(ranks, DTRAIN_LAUNCH_THREADS);
        r.padding = ranks == 2 ? 1 : PADDING;
        r.alias = ranks != 2;
        r.library_memory = ranks != 1;
        launch(&r, train_main);
    }
}

/* Shards begin and end anywhere: each knows where padding begins. */
static int sharded_main(dtrain_world *world, void *user)
{
    gpt2 *model = (gpt2 *)malloc(sizeof *model);
    dtrain_strategy *strategy = NULL;
    dtrain_strategy_desc desc = {0};
    const dtrain_shard *shards = NULL;
    size_t count = 0;
    (void)user;
    gpt2_init(model, true, PADDING, 0);
    for (int i = 0; i < PARAMS; i++) model->params[i].value = model->params[i].grad = NULL;
    desc.kind = DTRAIN_STRATEGY_FULL_SHARD;
    model->params[0].init = DTRAIN_INIT_CONSTANT;
    model->params[0].init_scale = 3;
    model->params[0].init_count = golden_count(0);
    CHECK_MSG(dtrain_strategy_create(world, model->params, WITH_HEAD, &desc, &strategy) ==
                  DTRAIN_OK,
              "%s", dtrain_last_error());
    CHECK(dtrain_strategy_shards(strategy, &shards, &count) == DTRAIN_OK);
    for (size_t s = 0; s < count; s++)
        for (int64_t i = 0; i < shards[s].count && shards[s].param == &model->params[0]; i++)
            CHECK(shards[s].value[i] == (shards[s].offset + i < golden_count(0) ? 3 : 0));
    dtrain_strategy_destroy(strategy);
    free(model);
    return 0;
}

static void test_sharded_padding(void)
{
    run r = run_of(3, DTRAIN_LAUNCH_THREADS);
    launch(&r, sharded_main);
}

static void test_ddp_naive_device(void)
{
    run r = run_of(2, DTRAIN_LAUNCH_THREADS);
    r.device = naive_device_ops();
    launch(&r, train_main);
}

/* The same bits whatever the buckets and whether or not communication overlaps backward. */
static void test_ddp_same_bits(void)
{
    const size_t bytes[] = {0, 64, 1024, 8192};
    uint64_t hash = 0;
    for (int i = 0; i < 8; i++) {
        run r = run_of(3, DTRAIN_LAUNCH_THREADS);
        r.alias = true;
        r.bucket_bytes = bytes[i % 4];
        r.no_overlap = i >= 4;
        r.library_memory = i % 2 == 0;
        launch(&r, train_main);
        if (i == 0) hash = r.hash;
        CHECK_MSG(r.hash == hash, "buckets of %zu bytes, no_overlap %d: other bits", r.bucket_bytes,
                  r.no_overlap);
    }
}

/* Gradients are reduced while backward is under way: with a bucket for each, all have been sent but
 * those of the first operation, when its turn comes; and before it, in the first pass, the end of the loss's sums and
 * the size of a full batch. */
static dtrain_strategy *watched;
static uint64_t sent_then;
static uint64_t sent(void)
{
    dtrain_strategy_info strategy;
    dtrain_comm_info info;
    dtrain_strategy_query(watched, &strategy);
    dtrain_comm_query(strategy.comm, &info);
    return info.operation_count;
}
static dtrain_result watching_embedding_backward(dtrain_device *device,
                                                 const dtrain_embedding_backward_args *args)
{
    sent_then = sent();
    return naive_embedding_backward(device, args);
}

static int watch_main(dtrain_world *world, void *user)
{
    const run *r = (const run *)user;
    gpt2 *model = (gpt2 *)malloc(sizeof *model);
    dtrain_tape *tape = NULL;
    float loss;
    uint64_t before;
    CHECK(ddp_create(world, r, model, &watched) == DTRAIN_OK);
    CHECK(dtrain_tape_create(world, watched, NULL, &tape) == DTRAIN_OK);
    before = sent();
    CHECK(ddp_gradients(world, watched, tape, model, &loss) == DTRAIN_OK);
    CHECK_MSG(sent_then - before == 2 + PARAMS - 2 && sent() - before >= PARAMS,
              "%d were sent, then %d", (int)(sent_then - before), (int)(sent() - before));
    dtrain_tape_destroy(tape);
    dtrain_strategy_destroy(watched);
    free(model);
    return 0;
}

static void test_marked_early(void)
{
    dtrain_device_ops ops = *naive_device_ops();
    ops.embedding_backward = watching_embedding_backward;
    for (int alias = 0; alias < 2; alias++) {
        run r = run_of(2, DTRAIN_LAUNCH_PROCESSES);
        r.device = &ops;
        r.alias = alias != 0;
        r.bucket_bytes = 1;
        launch(&r, watch_main);
    }
}

/* Parameters that no strategy knows, and a failed step: errors, and no waiting for anybody. */
static int stranger_main(dtrain_world *world, void *user)
{
    gpt2 *model = (gpt2 *)malloc(sizeof *model);
    dtrain_param stranger;
    dtrain_strategy *ddp = NULL;
    dtrain_tape *tape = NULL;
    float loss;
    CHECK(ddp_create(world, (const run *)user, model, &ddp) == DTRAIN_OK);
    CHECK(dtrain_tape_create(world, ddp, NULL, &tape) == DTRAIN_OK);
    dtrain_tape_begin(tape, 0, 1);
    stranger = model->params[1];
    stranger.state.storage = NULL;
    stranger.name = "stranger";
    int64_t shape[2];
    shape[0] = 1, shape[1] = GOLDEN_POSITIONS;
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, shape, golden_inputs, false);
    CHECK(!dtrain_embedding(tape, x, &model->params[0], &stranger));
    CHECK(tape_error(tape) == DTRAIN_ERROR_USAGE);
    CHECK(strstr(dtrain_last_error(), "stranger belongs to no strategy") != NULL);
    CHECK(ddp_gradients(world, ddp, tape, model, &loss) == DTRAIN_OK); /* the next pass is clean */
    check_gradients(model, 2e-6);
    dtrain_tape_destroy(tape);
    dtrain_strategy_destroy(ddp);
    free(model);
    return 0;
}

static void test_stranger(void)
{
    run r = run_of(2, DTRAIN_LAUNCH_THREADS);
    launch(&r, stranger_main);
}

/* Three micro-batches of one sequence, communication in the last one only. */
static dtrain_result accumulate(dtrain_world *world, const run *r, gpt2 *model)
{
    dtrain_strategy *ddp = NULL;
    dtrain_tape *tape = NULL;
    dtrain_strategy_info info;
    TRY(ddp_create(world, r, model, &ddp));
    TRY(dtrain_tape_create(world, ddp, NULL, &tape));
    for (int step = 0; step < 2; step++) { /* twice: the sum must start anew */
        for (int64_t micro = 0; micro < GOLDEN_BATCH; micro++) {
            TRY(dtrain_strategy_accumulate(ddp, micro < GOLDEN_BATCH - 1));
            TRY(dtrain_tape_begin(tape, 0, 1));
            dtrain_tensor *loss = gpt2_loss(tape, model, micro, 1);
            TRY(dtrain_tape_backward(tape, loss, 1.0f / (float)GOLDEN_BATCH));
            TRY(dtrain_strategy_finish(ddp));
        }
        check_gradients(model, 2e-6);
    }
    dtrain_strategy_query(ddp, &info);
    CHECK(info.sync_count == 2);
    dtrain_tape_destroy(tape);
    dtrain_strategy_destroy(ddp);
    return DTRAIN_OK;
}

static int accumulate_main(dtrain_world *world, void *user)
{
    gpt2 *model = (gpt2 *)malloc(sizeof *model);
    dtrain_result result = accumulate(world, (const run *)user, model);
    CHECK_MSG(result == DTRAIN_OK, "%s", dtrain_last_error());
    free(model);
    return result != DTRAIN_OK;
}

static void test_accumulation(void)
{
    for (uint32_t ranks = 1; ranks <= 2; ranks++) {
        run r = run_of(ranks, DTRAIN_LAUNCH_THREADS);
        r.alias = ranks == 2;
        launch(&r, accumulate_main);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_naive_device);
    RUN(test_cpu_device);
    RUN(test_ddp_threads);
    RUN(test_ddp_processes);
    RUN(test_ddp_padded);
    RUN(test_sharded_padding);
    RUN(test_ddp_naive_device);
    RUN(test_ddp_same_bits);
    RUN(test_marked_early);
    RUN(test_stranger);
    RUN(test_accumulation);
    return test_summary();
}
