/* test_scaler.c: loss scaling: scales of torch.amp.GradScaler, overflows on one rank only, the
 * trainer's skipped steps, fp16 training.
 * test_compile.sh runs it in a build with -ffast-math as well. */
#include "train/trainer_internal.h"
#include "optim/optim_internal.h"
#include "dtrain.h"
#include "test.h"
#include "ranks.h"
#include "reference/scaler_golden.h"

/* A compiler told that there is no infinity may not make one from the macro. */
static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static const uint32_t not_finite[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u};

/* By its bits: this test is compiled with -ffast-math too, where isfinite is always true. */
static bool is_finite(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7f800000u) != 0x7f800000u;
}

static int same_bits(const void *a, const void *b, size_t bytes)
{
    return memcmp(a, b, bytes) == 0;
}

/* ---- the sequence of scales ---- */

static void test_torch_sequences(void)
{
    for (size_t i = 0; i < sizeof scaler_golden / sizeof *scaler_golden; i++) {
        dtrain_loss_scaler scaler = {0};
        uint64_t skipped = 0;
        scaler.scale = scaler_golden[i].initial_scale;
        scaler.growth_interval = scaler_golden[i].growth_interval;
        for (int k = 0; k < scaler_golden[i].count; k++) {
            const scaler_step *step = &scaler_golden[i].steps[k];
            skipped += step->found_inf ? 1 : 0;
            CHECK(dtrain_loss_scaler_update(&scaler, step->found_inf != 0) == DTRAIN_OK);
            CHECK_MSG(scaler.scale == step->scale && scaler.good_steps == step->growth_tracker,
                      "%s, step %d: scale %a after %u good steps, torch has %a after %u",
                      scaler_golden[i].name, k, (double)scaler.scale, (unsigned)scaler.good_steps,
                      (double)step->scale, (unsigned)step->growth_tracker);
            CHECK(scaler.skipped_steps == skipped);
        }
    }
}

/* The defaults are torch's, and so is where the first growth comes. */
static void test_defaults(void)
{
    dtrain_loss_scaler scaler = {.scale = 65536};
    for (int i = 0; i < 1999; i++) CHECK(dtrain_loss_scaler_update(&scaler, false) == DTRAIN_OK);
    CHECK(scaler.scale == 65536);
    CHECK(dtrain_loss_scaler_update(&scaler, false) == DTRAIN_OK && scaler.scale == 131072);
    CHECK(dtrain_loss_scaler_update(&scaler, true) == DTRAIN_OK && scaler.scale == 65536);
    CHECK(scaler.skipped_steps == 1);
}

static void test_collapse(void)
{
    dtrain_loss_scaler scaler = {.scale = 8};
    CHECK(dtrain_loss_scaler_update(&scaler, true) == DTRAIN_OK && scaler.scale == 4);
    CHECK(dtrain_loss_scaler_update(&scaler, true) == DTRAIN_OK && scaler.scale == 2);
    CHECK(dtrain_loss_scaler_update(&scaler, false) == DTRAIN_OK);
    CHECK(dtrain_loss_scaler_update(&scaler, true) == DTRAIN_OK && scaler.scale == 1);
    for (int i = 2; i <= 4; i++) {
        char count[32];
        snprintf(count, sizeof count, "in %d steps running", i);
        CHECK(dtrain_loss_scaler_update(&scaler, true) == DTRAIN_ERROR_NUMERIC &&
              scaler.scale == 1);
        CHECK_MSG(strstr(dtrain_last_error(), count) && strstr(dtrain_last_error(), "bf16"), "%s",
                  dtrain_last_error());
    }
    CHECK(scaler.skipped_steps == 6 && scaler.bad_steps == 4);
    CHECK(dtrain_loss_scaler_update(&scaler, false) == DTRAIN_OK); /* who goes on may recover */
    CHECK(scaler.bad_steps == 0 && scaler.good_steps == 1 && scaler.scale == 1);
}

static void test_state_is_plain_data(void)
{
    dtrain_loss_scaler scaler = {.scale = 65536}, copy;
    uint64_t random = 3;
    scaler.growth_interval = 4;
    for (int i = 0; i < 50; i++)
        CHECK(!dtrain_loss_scaler_update(&scaler, ranks_random(&random, 6) == 0));
    memcpy(&copy, &scaler, sizeof copy);
    for (int i = 0; i < 50; i++) {
        bool found = ranks_random(&random, 6) == 0;
        CHECK(!dtrain_loss_scaler_update(&scaler, found) &&
              !dtrain_loss_scaler_update(&copy, found));
    }
    CHECK(same_bits(&scaler, &copy, sizeof copy));
}

static void check_refused(const dtrain_loss_scaler *desc, const char *why)
{
    dtrain_loss_scaler scaler = *desc;
    CHECK(dtrain_loss_scaler_update(&scaler, false) == DTRAIN_ERROR_ARGUMENT);
    CHECK_MSG(strstr(dtrain_last_error(), why) != NULL, "%s", dtrain_last_error());
}

static void test_arguments(void)
{
    const float wrong[] = {-1, float_of(not_finite[0]), float_of(not_finite[2])};
    const dtrain_loss_scaler defaults = {.scale = 65536};
    dtrain_loss_scaler desc;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        desc = defaults;
        desc.scale = wrong[i];
        check_refused(&desc, "a finite scale of 1 or more");
    }
    desc = defaults;
    desc.scale = 0; /* the gradients would be 0 */
    check_refused(&desc, "found 0; begin with zeros and a scale");
    desc.scale = 0.5f;
    check_refused(&desc, "found 0.5");
    CHECK(dtrain_loss_scaler_update(NULL, false) == DTRAIN_ERROR_ARGUMENT);
}

/* ---- unscaling, and who sees an overflow ---- */

#define COUNT 40

typedef struct grads {
    dtrain_param params[2];
    float value[2][COUNT], grad[2][COUNT];
    dtrain_strategy *ddp;
} grads;

/* Two parameters whose gradients are the host's: after finish they can be given other values. */
static dtrain_result grads_create(dtrain_world *world, grads *g)
{
    memset(g, 0, sizeof *g);
    g->params[0] = ranks_param("a", g->value[0], g->grad[0], COUNT, 0);
    g->params[1] = ranks_param("b", g->value[1], g->grad[1], COUNT, 0);
    return dtrain_strategy_create(world, g->params, 2, NULL, &g->ddp);
}

static dtrain_result grads_reduce(grads *g)
{
    TRY(dtrain_strategy_ready(g->ddp, 1));
    TRY(dtrain_strategy_ready(g->ddp, 0));
    return dtrain_strategy_finish(g->ddp);
}

static void grads_fill(grads *g, float value)
{
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < COUNT; k++) g->grad[i][k] = value;
}

static int unscale_main(dtrain_world *world, void *user)
{
    const float clips[] = {0, 0.5f, 1e6f};
    dtrain_loss_scaler scaler = {.scale = 65536};
    float norm, scale, plain_norm, plain_scale;
    grads g;
    (void)user;
    RANKS_TRY(grads_create(world, &g));
    for (int i = 0; i < 3; i++) {
        grads_fill(&g, 0.25f * (float)(1 + dtrain_world_rank(world)));
        RANKS_TRY(grads_reduce(&g));
        RANKS_TRY(dtrain_grad_norm(g.ddp, NULL, clips[i], &plain_norm, &plain_scale));
        for (int p = 0; p < 2; p++)
            for (int k = 0; k < COUNT; k++) g.grad[p][k] *= 65536;
        RANKS_TRY(dtrain_grad_norm(g.ddp, &scaler, clips[i], &norm, &scale));
        CHECK(norm == plain_norm && scale * 65536 == plain_scale);
        CHECK((plain_scale < 1) == (i == 1));
    }
    scaler.scale = 0;
    CHECK(dtrain_grad_norm(g.ddp, &scaler, 0, &norm, &scale) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "dtrain_grad_norm: expected a loss scaler") != NULL);
    scaler.scale = 65536;
    CHECK(dtrain_grad_norm(NULL, &scaler, 0, &norm, &scale) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_grad_norm(g.ddp, &scaler, 0, NULL, &scale) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "dtrain_grad_norm: norm is NULL") != NULL);
    CHECK(dtrain_grad_norm(g.ddp, &scaler, 0, &norm, NULL) == DTRAIN_ERROR_ARGUMENT);
    CHECK(strstr(dtrain_last_error(), "dtrain_grad_norm: grad_scale is NULL") != NULL);
    dtrain_strategy_destroy(g.ddp);
    return 0;
}

static void test_unscale(void)
{
    for (int ranks = 1; ranks <= 3; ranks++)
        ranks_run(ranks, DTRAIN_LAUNCH_THREADS, unscale_main, NULL);
}

/* inf, -inf or NaN in one place on the last rank only: all ranks find it. Finite gradients, also
 * those whose squares and scaled norm fp32 cannot hold, are finite. */
static int overflow_main(dtrain_world *world, void *user)
{
    const int last = dtrain_world_size(world) - 1, rank = dtrain_world_rank(world);
    dtrain_loss_scaler scaler = {.scale = 65536};
    float norm, scale;
    grads g;
    (void)user;
    RANKS_TRY(grads_create(world, &g));
    for (int step = 0; step < 8; step++) {
        const bool bad = step % 2 == 1;
        grads_fill(&g, step == 6 ? 2e38f / (float)dtrain_world_size(world) : 0.5f);
        if (bad && rank == last)
            g.grad[step % 4 / 2][7 * step % COUNT] = float_of(not_finite[step / 2]);
        RANKS_TRY(grads_reduce(&g));
        RANKS_TRY(dtrain_grad_norm(g.ddp, &scaler, 1, &norm, &scale));
        CHECK_MSG(is_finite(norm) == !bad, "step %d: rank %d finds %g", step, rank, (double)norm);
        CHECK(is_finite(scale));
        CHECK(dtrain_loss_scaler_update(&scaler, bad) == DTRAIN_OK);
    }
    CHECK(scaler.skipped_steps == 4 && scaler.scale == 4096);
    grads_fill(&g, FLT_MAX); /* only the sum overflows */
    RANKS_TRY(grads_reduce(&g));
    RANKS_TRY(dtrain_grad_norm(g.ddp, &scaler, 1, &norm, &scale));
    CHECK(is_finite(norm) == (last == 0));
    dtrain_strategy_destroy(g.ddp);
    return 0;
}

static void test_overflow_of_one_rank(void)
{
    for (int ranks = 1; ranks <= 3; ranks++) {
        ranks_run(ranks, DTRAIN_LAUNCH_THREADS, overflow_main, NULL);
        ranks_run(ranks, DTRAIN_LAUNCH_PROCESSES, overflow_main, NULL);
    }
}

/* Ranks with different shards: sums are exchanged, and what all of them hold ("a") is counted once. */
static int sharded_main(dtrain_world *world, void *user)
{
    enum { MANY = 10 * COUNT };
    const int ranks = dtrain_world_size(world), rank = dtrain_world_rank(world);
    float a[COUNT] = {0}, a_grad[COUNT], b[MANY] = {0}, b_grad[MANY], *norms = (float *)user;
    dtrain_param params[2] = {ranks_param("a", a, a_grad, COUNT, 0),
                              ranks_param("b", b, b_grad, MANY, 0)};
    dtrain_strategy_desc desc = {0};
    dtrain_strategy *strategy;
    dtrain_loss_scaler scaler = {.scale = 65536};
    desc.kind = DTRAIN_STRATEGY_ZERO1;
    RANKS_TRY(dtrain_strategy_create(world, params, 2, &desc, &strategy));
    for (int spoilt = 0; spoilt < 2; spoilt++) {
        const double mean = (ranks - 1) / 2.0 + 0.3,
                     expected = sqrt(COUNT * 9.0 + MANY * mean * mean);
        float norm, scale;
        for (int k = 0; k < COUNT; k++) a_grad[k] = 3;
        for (int k = 0; k < MANY; k++) b_grad[k] = (float)rank + 0.3f;
        if (spoilt && rank == ranks - 1) b_grad[MANY - 1] = float_of(not_finite[0]);
        RANKS_TRY(dtrain_strategy_ready(strategy, 1));
        RANKS_TRY(dtrain_strategy_ready(strategy, 0));
        RANKS_TRY(dtrain_strategy_finish(strategy));
        if (!spoilt) {
            RANKS_TRY(dtrain_grad_norm(strategy, NULL, 1, &norm, &scale));
            CHECK_CLOSE(norm, expected, 1e-6);
            CHECK_CLOSE(scale, 1 / expected, 1e-6);
            norms[rank] = norm;
        }
        RANKS_TRY(dtrain_grad_norm(strategy, &scaler, 1, &norm, &scale));
        CHECK(is_finite(norm) == !spoilt);
    }
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void test_overflow_in_a_shard(void)
{
    float *norms = (float *)ranks_shared(RANKS_MOST * sizeof *norms);
    for (int ranks = 2; ranks <= 4; ranks++) {
        ranks_run(ranks, DTRAIN_LAUNCH_THREADS, sharded_main, norms);
        for (int r = 1; r < ranks; r++) CHECK(norms[r] == norms[0]);
    }
}

/* ---- the trainer ---- */

#define VOCAB 16
#define WIDTH 8
#define HIDDEN 32
#define GLOBAL_BATCH 24
#define STEPS 40
#define RANKS 4
#define PARAMS (VOCAB * WIDTH + HIDDEN * WIDTH + HIDDEN + VOCAB * HIDDEN + VOCAB)

/* One training and what its ranks saw, in shared memory. */
typedef struct run {
    uint32_t ranks, accumulation, tape_flags, kind;
    int steps, spiky_rank, nan_rank;
    float clip, factor; /* on the loss */
    dtrain_loss_scaler scaling;
    const char *log;

    dtrain_step_record records[RANKS][STEPS];
    float params[RANKS][STEPS + 1][PARAMS];
    float state[RANKS][STEPS + 1][2 * PARAMS];
    uint64_t updates[RANKS];
    dtrain_result ended[RANKS];
    int taken[RANKS]; /* steps that ended well */
    char error[RANKS][1024];
} run;

static run *run_create(uint32_t ranks, uint32_t accumulation)
{
    run *r = (run *)ranks_shared(sizeof *r);
    r->ranks = ranks, r->accumulation = accumulation, r->steps = STEPS;
    r->spiky_rank = r->nan_rank = -1;
    r->factor = 1;
    return r;
}

typedef struct rank_state {
    run *r;
    int rank;
    int64_t batch, micro;
    dtrain_param params[5];
    int32_t tokens[GLOBAL_BATCH], targets[GLOBAL_BATCH];
} rank_state;

static dtrain_result next_batch(void *user)
{
    rank_state *s = (rank_state *)user;
    const int64_t first = (s->micro++ * s->r->ranks + s->rank) * s->batch;
    for (int64_t i = 0; i < s->batch; i++) {
        s->tokens[i] = (int32_t)((first + i) % VOCAB);
        s->targets[i] = (int32_t)((7 * (first + i) + 3) % VOCAB);
    }
    return DTRAIN_OK;
}

/* The spiky rank's loss is what it is, and its gradient passes through 1e36 times itself: fp32
 * holds that if the scale is at most 256. */
static dtrain_tensor *model_loss(dtrain_tape *tape, void *user)
{
    rank_state *s = (rank_state *)user;
    dtrain_param *p = s->params;
    int64_t shape[2];
    shape[0] = s->batch, shape[1] = 1;
    dtrain_tensor *tokens = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, shape, s->tokens, false);
    dtrain_tensor *targets = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, s->targets, false);
    dtrain_tape_unit(tape, 0);
    dtrain_tensor *h = dtrain_embedding(tape, tokens, &p[0], NULL);
    h = dtrain_linear(tape, h, &p[1], &p[2], DTRAIN_ACTIVATION_GELU);
    h = dtrain_linear(tape, h, &p[3], &p[4], DTRAIN_ACTIVATION_NONE);
    h = dtrain_cross_entropy(tape, h, targets, 0, 0);
    if (s->rank == s->r->spiky_rank) h = dtrain_scale(tape, dtrain_scale(tape, h, 1e-36f), 1e36f);
    if (s->rank == s->r->nan_rank && s->micro > 3)
        h = dtrain_scale(tape, h, float_of(not_finite[2]));
    return s->r->factor == 1 ? h : dtrain_scale(tape, h, s->r->factor);
}

static void fill_param(dtrain_param *p, const char *name, int64_t rows, int64_t columns)
{
    *p = ranks_param(name, NULL, NULL, rows, columns);
    p->init = columns ? DTRAIN_INIT_NORMAL : DTRAIN_INIT_ZERO;
    p->init_scale = 0.3f;
}

static void fill_params(dtrain_param *params)
{
    fill_param(&params[0], "embedding", VOCAB, WIDTH);
    fill_param(&params[1], "hidden.weight", HIDDEN, WIDTH);
    fill_param(&params[2], "hidden.bias", HIDDEN, 0);
    fill_param(&params[3], "out.weight", VOCAB, HIDDEN);
    fill_param(&params[4], "out.bias", VOCAB, 0);
}

static dtrain_trainer_desc trainer_desc(rank_state *s, dtrain_strategy *strategy,
                                        dtrain_optimizer *optimizer)
{
    dtrain_trainer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.micro_batches = s->r->accumulation;
    desc.clip = s->r->clip;
    desc.tape_flags = s->r->tape_flags;
    desc.loss_scaling = s->r->scaling;
    desc.schedule.lr = 0.02f;
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    desc.next_batch = next_batch;
    desc.loss = model_loss;
    desc.user = s;
    return desc;
}

/* All parameters, and this rank's optimizer state, before step `step`. */
static dtrain_result remember(rank_state *s, const dtrain_trainer *trainer, int step)
{
    const dtrain_optimizer *optimizer = trainer->desc.optimizer;
    float *params = s->r->params[s->rank][step], *state = s->r->state[s->rank][step];
    for (size_t i = 0; i < 5; i++) {
        TRY(dtrain_strategy_read(trainer->desc.strategy, i, params));
        params += s->params[i].count;
    }
    for (size_t i = 0; i < optimizer->tensor_count; i++) {
        const dtrain_optimizer_tensor *t = &optimizer->tensors[i];
        memcpy(state, t->m, (size_t)t->count * sizeof(float));
        memcpy(state + t->count, t->v, (size_t)t->count * sizeof(float));
        state += 2 * t->count;
    }
    s->r->updates[s->rank] = optimizer->step_count;
    return DTRAIN_OK;
}

static dtrain_result take_steps(dtrain_world *world, rank_state *s, dtrain_trainer *trainer)
{
    run *r = s->r;
    dtrain_metrics_desc desc;
    dtrain_metrics *metrics;
    dtrain_result result = DTRAIN_OK;
    memset(&desc, 0, sizeof desc);
    desc.jsonl_path = r->log;
    TRY(dtrain_metrics_create(world, &desc, &metrics));
    for (int step = 0; step < r->steps && result == DTRAIN_OK; step++) {
        TRY(remember(s, trainer, step));
        result = dtrain_trainer_step(trainer, &r->records[s->rank][step]);
        snprintf(r->error[s->rank], sizeof r->error[0], "%s", dtrain_last_error());
        TRY(remember(s, trainer, step + 1));
        if (result == DTRAIN_OK) result = dtrain_metrics_step(metrics, &r->records[s->rank][step]);
        if (result == DTRAIN_OK) r->taken[s->rank]++;
    }
    const dtrain_result finished = dtrain_metrics_finish(metrics);
    dtrain_metrics_destroy(metrics);
    DTRAIN__TRY(finished);
    return result;
}

static int run_main(dtrain_world *world, void *user)
{
    rank_state s;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_strategy_desc how = {0};
    memset(&s, 0, sizeof s);
    s.r = (run *)user;
    s.rank = dtrain_world_rank(world);
    s.batch = GLOBAL_BATCH / (s.r->ranks * s.r->accumulation);
    adamw.epsilon = 1e-20f; /* gradients of any size move parameters alike */
    fill_params(s.params);
    how.kind = s.r->kind;
    how.node_size = s.r->kind == DTRAIN_STRATEGY_HYBRID_SHARD ? 2 : 0;
    RANKS_TRY(dtrain_strategy_create(world, s.params, 5, &how, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    dtrain_trainer_desc desc = trainer_desc(&s, strategy, optimizer);
    RANKS_TRY(dtrain_trainer_create(world, &desc, &trainer));
    s.r->ended[s.rank] = take_steps(world, &s, trainer);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void run_all(run *r, uint32_t mode) { ranks_run((int)r->ranks, mode, run_main, r); }

static void run_well(run *r)
{
    run_all(r, DTRAIN_LAUNCH_THREADS);
    for (uint32_t rank = 0; rank < r->ranks; rank++)
        CHECK_MSG(r->ended[rank] == DTRAIN_OK, "rank %u: %s", (unsigned)rank, r->error[rank]);
}

static dtrain_loss_scaler scaling_of(float scale, uint32_t interval)
{
    dtrain_loss_scaler desc = {0};
    desc.scale = scale;
    desc.growth_interval = interval;
    return desc;
}

/* A power of two moves exponents only: scaled or not, the same bits. */
static void test_scale_changes_no_bit(void)
{
    for (uint32_t ranks = 1; ranks <= 3; ranks++)
        for (uint32_t accumulation = 1; accumulation <= 2; accumulation++) {
            run *plain = run_create(ranks, accumulation), *scaled = run_create(ranks, accumulation);
            plain->clip = scaled->clip = 0.4f;
            scaled->scaling = scaling_of(1024, 3);
            run_well(plain);
            run_well(scaled);
            CHECK(same_bits(plain->params[0], scaled->params[0], sizeof plain->params[0]));
            for (int step = 0; step < STEPS; step++) {
                const dtrain_step_record *a = &plain->records[0][step],
                                         *b = &scaled->records[0][step];
                CHECK(a->loss == b->loss && a->grad_norm == b->grad_norm);
                CHECK(a->loss_scale == 0 && b->loss_scale == 1024 * exp2(step / 3));
                CHECK(a->skipped_steps == 0 && b->skipped_steps == 0);
            }
            munmap(plain, sizeof *plain);
            munmap(scaled, sizeof *scaled);
        }
}

/* One rank's gradient overflows until the scale fits: all ranks skip the same steps, nothing moves
 * meanwhile, and afterwards they train. */
static run *check_spiky(uint32_t kind, uint32_t ranks, uint32_t accumulation, uint32_t mode)
{
    const int skips = accumulation == 1 ? 8 : 7; /* 65536 to 256, or to twice that over two */
    run *r = run_create(ranks, accumulation);
    r->kind = kind;
    r->spiky_rank = (int)ranks - 1;
    r->scaling = scaling_of(65536, 2000);
    run_all(r, mode);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        CHECK_MSG(r->ended[rank] == DTRAIN_OK, "rank %u: %s", (unsigned)rank, r->error[rank]);
        CHECK(r->updates[rank] == (uint64_t)(STEPS - skips));
        CHECK(same_bits(r->params[rank], r->params[0], sizeof r->params[0]));
        for (int step = 0; step < STEPS; step++) {
            const dtrain_step_record *now = &r->records[rank][step];
            const bool skipped = step < skips;
            CHECK(now->step == step + 1 &&
                  now->skipped_steps == (uint64_t)(skipped ? step + 1 : skips));
            CHECK(now->loss_scale == 65536 / exp2(skipped ? step : skips));
            CHECK(is_finite((float)now->grad_norm) == !skipped);
            CHECK(same_bits(r->params[rank][step], r->params[rank][step + 1],
                            sizeof r->params[0][0]) == skipped);
            CHECK(same_bits(r->state[rank][step], r->state[rank][step + 1],
                            sizeof r->state[0][0]) == skipped);
        }
        CHECK(r->records[rank][STEPS - 1].loss < 0.7 * r->records[rank][0].loss);
    }
    return r;
}

static void test_overflow_is_everybodys_skip(void)
{
    check_spiky(DTRAIN_STRATEGY_DDP, 1, 1, DTRAIN_LAUNCH_THREADS);
    check_spiky(DTRAIN_STRATEGY_DDP, 2, 1, DTRAIN_LAUNCH_THREADS);
    check_spiky(DTRAIN_STRATEGY_DDP, 2, 2, DTRAIN_LAUNCH_PROCESSES);
    check_spiky(DTRAIN_STRATEGY_DDP, 3, 2, DTRAIN_LAUNCH_THREADS);
}

/* Whoever has the shard that overflows: the verdict is that of DDP. So are the bits, where
 * gradients are added in the same order. */
static void test_overflow_under_every_strategy(void)
{
    for (uint32_t accumulation = 1; accumulation <= 2; accumulation++) {
        run *ddp = check_spiky(DTRAIN_STRATEGY_DDP, 4, accumulation, DTRAIN_LAUNCH_THREADS);
        for (uint32_t kind = DTRAIN_STRATEGY_ZERO1; kind <= DTRAIN_STRATEGY_HYBRID_SHARD; kind++) {
            run *r = check_spiky(kind, 4, accumulation, DTRAIN_LAUNCH_THREADS);
            const bool same_order = kind == DTRAIN_STRATEGY_ZERO1 ||
                                    (accumulation == 1 && kind != DTRAIN_STRATEGY_HYBRID_SHARD);
            if (same_order) CHECK(same_bits(r->params[0], ddp->params[0], sizeof r->params[0]));
            for (int step = 0; step < STEPS; step++)
                CHECK_CLOSE(r->records[0][step].loss, ddp->records[0][step].loss, 1e-5);
            munmap(r, sizeof *r);
        }
        munmap(ddp, sizeof *ddp);
    }
}

static void test_overflow_without_end(void)
{
    run *r = run_create(3, 1);
    r->spiky_rank = 1;
    r->scaling = scaling_of(32, 2000);
    r->factor = 1000; /* fp32 does not hold it at any scale */
    run_all(r, DTRAIN_LAUNCH_THREADS);
    for (int rank = 0; rank < 3; rank++) { /* five halve, the next is too much */
        CHECK(r->ended[rank] == DTRAIN_ERROR_NUMERIC && r->taken[rank] == 5);
        CHECK_MSG(strstr(r->error[rank], "in 6 steps running") != NULL, "%s", r->error[rank]);
        CHECK(r->updates[rank] == 0);
        CHECK(same_bits(r->params[rank][0], r->params[rank][6], sizeof r->params[0][0]));
    }
}

/* No scale mends a loss that is not finite. */
static void test_overflow_of_the_loss(void)
{
    run *r = run_create(3, 1);
    r->nan_rank = 2;
    r->scaling.scale = 65536;
    run_all(r, DTRAIN_LAUNCH_THREADS);
    for (int rank = 0; rank < 3; rank++) {
        CHECK(r->ended[rank] == DTRAIN_ERROR_NUMERIC && r->taken[rank] == 3);
        CHECK_MSG(strstr(r->error[rank], "at step 4 the loss of rank 2 is") != NULL, "%s",
                  r->error[rank]);
        CHECK(same_bits(r->params[rank][3], r->params[rank][4], sizeof r->params[0][0]));
    }
}

static int trainer_arguments_main(dtrain_world *world, void *user)
{
    rank_state s;
    dtrain_strategy *strategy;
    dtrain_trainer *trainer;
    dtrain_step_record record;
    dtrain_optimizer *optimizer;
    dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    memset(&record, 0, sizeof record);
    memset(&s, 0, sizeof s);
    s.r = (run *)user;
    s.batch = 4;
    fill_params(s.params);
    RANKS_TRY(dtrain_strategy_create(world, s.params, 5, NULL, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &sgd, &optimizer));
    dtrain_trainer_desc desc = trainer_desc(&s, strategy, optimizer);
    desc.loss_scaling.scale = 0.5f;
    CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_ARGUMENT && !trainer);
    CHECK(strstr(dtrain_last_error(), "a finite scale of 1 or more") != NULL);
    desc.loss_scaling.scale = 0;
    desc.loss_scaling.growth_interval = 4; /* and nothing else */
    RANKS_TRY(dtrain_trainer_create(world, &desc, &trainer));
    RANKS_TRY(dtrain_trainer_step(trainer, &record));
    CHECK(record.loss_scale == 65536);
    dtrain_trainer_destroy(trainer);
    desc.graph = true;
    CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_UNSUPPORTED && !trainer);
    CHECK_MSG(strstr(dtrain_last_error(), "graph needs no loss scaling") != NULL, "%s",
              dtrain_last_error());
    desc = trainer_desc(&s, strategy, optimizer);
    desc.tape_flags = DTRAIN_TAPE_F16 | DTRAIN_TAPE_BF16;
    CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_ARGUMENT && !trainer);
    CHECK(strstr(dtrain_last_error(), "DTRAIN_TAPE_F16") != NULL);
    desc.tape_flags = DTRAIN_TAPE_F16;
    RANKS_TRY(dtrain_trainer_create(world, &desc, &trainer));
    RANKS_TRY(dtrain_trainer_step(trainer, &record));
    CHECK(record.loss_scale == 65536);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

/* What a compressing strategy keeps between steps would be of another scale. */
static int compression_main(dtrain_world *world, void *user)
{
    rank_state s;
    dtrain_strategy *strategy;
    dtrain_trainer *trainer;
    dtrain_optimizer *optimizer;
    dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    dtrain_strategy_desc compressed = {0};
    dtrain_compression_desc lossy = {0};
    dtrain_loss_scaler scaler = {.scale = 65536};
    float norm, factor;
    memset(&s, 0, sizeof s);
    s.r = (run *)user;
    s.batch = 4;
    compressed.compression = &lossy;
    lossy.kind = DTRAIN_COMPRESSION_TOPK;
    fill_params(s.params);
    RANKS_TRY(dtrain_strategy_create(world, s.params, 5, &compressed, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &sgd, &optimizer));
    dtrain_trainer_desc desc = trainer_desc(&s, strategy, optimizer);
    desc.tape_flags = DTRAIN_TAPE_F16;
    CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_MSG(!trainer && strstr(dtrain_last_error(), "DTRAIN_TAPE_F16 with a strategy that"), "%s",
              dtrain_last_error());
    desc.loss_scaling.scale = 65536;
    desc.tape_flags = 0;
    CHECK(dtrain_trainer_create(world, &desc, &trainer) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_MSG(!trainer && strstr(dtrain_last_error(), "loss_scaling with a strategy that"), "%s",
              dtrain_last_error());
    memset(&desc.loss_scaling, 0, sizeof desc.loss_scaling);
    desc.tape_flags = DTRAIN_TAPE_BF16;
    RANKS_TRY(dtrain_trainer_create(world, &desc, &trainer));
    RANKS_TRY(dtrain_trainer_step(trainer, NULL));
    dtrain_trainer_destroy(trainer);
    CHECK(dtrain_grad_norm(strategy, &scaler, 0, &norm, &factor) == DTRAIN_ERROR_UNSUPPORTED);
    CHECK_MSG(strstr(dtrain_last_error(), "a loss scale with a strategy that"), "%s",
              dtrain_last_error());
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void test_trainer_arguments(void)
{
    ranks_run(1, DTRAIN_LAUNCH_THREADS, trainer_arguments_main, run_create(1, 1));
    ranks_run(2, DTRAIN_LAUNCH_THREADS, compression_main, run_create(2, 1));
}

static int lines_with(const char *path, const char *text)
{
    char line[8192];
    int count = 0;
    FILE *file = fopen(path, "r");
    if (!CHECK(file != NULL)) return -1;
    while (fgets(line, sizeof line, file)) count += strstr(line, text) != NULL;
    fclose(file);
    return count;
}

static void test_log(void)
{
    char path[] = "/tmp/dtrain_scaler_XXXXXX";
    const int file = mkstemp(path);
    run *scaled = run_create(2, 1), *plain = run_create(2, 1);
    CHECK(file >= 0 && close(file) == 0);
    plain->log = scaled->log = path;
    scaled->spiky_rank = 0;
    scaled->scaling = scaling_of(1024, 2000);
    run_well(scaled);
    CHECK(lines_with(path, "\"loss_scale\": 1024, \"skipped_steps\": 1,") == 1);
    CHECK(lines_with(path, "\"loss_scale\": 512, \"skipped_steps\": 2,") == 1);
    CHECK(lines_with(path, "\"loss_scale\": 256, \"skipped_steps\": 2,") == STEPS - 2);
    CHECK(lines_with(path, "\"grad_norm\": null") == 2);
    run_well(plain);
    CHECK(lines_with(path, "\"grad_norm\": ") == STEPS);
    CHECK(lines_with(path, "\"loss_scale\"") == 0 && lines_with(path, "\"skipped_steps\"") == 0);
    unlink(path);
}

/* ---- fp16 ---- */

static double last_loss(const run *r)
{
    return r->records[0][r->steps - 1].loss / (double)r->factor;
}

/* The loss is so small that its gradients are below what fp16 knows: only scaled they train. */
static void test_f16_tracks_f32(void)
{
    run *full = run_create(2, 1), *half = run_create(2, 1), *unscaled = run_create(2, 1);
    full->factor = half->factor = unscaled->factor = 1e-7f;
    half->tape_flags = unscaled->tape_flags = DTRAIN_TAPE_F16;
    unscaled->scaling = scaling_of(1, 2000);
    run_well(full);
    run_well(half);
    run_well(unscaled);
    CHECK_MSG(last_loss(full) < 0.3, "%g", last_loss(full));
    for (int step = 0; step < STEPS; step++)
        CHECK_CLOSE(half->records[0][step].loss / 1e-7, full->records[0][step].loss / 1e-7, 0.03);
    CHECK(half->records[0][STEPS - 1].loss_scale == 65536 &&
          half->records[0][STEPS - 1].skipped_steps == 0);
    CHECK(last_loss(half) != last_loss(full));
    CHECK_MSG(last_loss(unscaled) > 3 * last_loss(full), "unscaled: %g, fp32: %g",
              last_loss(unscaled), last_loss(full));
}

/* From a scale that fp16 cannot hold the trainer finds one that it can, and trains. */
static void test_f16_finds_its_scale(void)
{
    run *full = run_create(3, 1), *half = run_create(3, 1);
    half->tape_flags = DTRAIN_TAPE_F16;
    half->scaling = scaling_of(0x1p30f, 2000);
    run_well(full);
    run_well(half);
    const dtrain_step_record *end = &half->records[0][STEPS - 1];
    CHECK_MSG(end->skipped_steps > 5 && end->skipped_steps < 16, "%d skipped",
              (int)end->skipped_steps);
    CHECK(end->loss_scale == exp2(30 - (double)end->skipped_steps));
    CHECK(last_loss(half) < 0.7 * half->records[0][0].loss);
    CHECK(same_bits(half->params[0], half->params[2], sizeof half->params[0]));
    const int skips =
        (int)end->skipped_steps; /* data repeats, so the rest is a run that began later */
    for (int step = skips; step < STEPS; step++)
        CHECK_CLOSE(half->records[0][step].loss, full->records[0][step - skips].loss, 0.1);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_torch_sequences);
    RUN(test_defaults);
    RUN(test_collapse);
    RUN(test_state_is_plain_data);
    RUN(test_arguments);
    RUN(test_unscale);
    RUN(test_overflow_of_one_rank);
    RUN(test_overflow_in_a_shard);
    RUN(test_scale_changes_no_bit);
    RUN(test_overflow_is_everybodys_skip);
    RUN(test_overflow_under_every_strategy);
    RUN(test_overflow_without_end);
    RUN(test_overflow_of_the_loss);
    RUN(test_trainer_arguments);
    RUN(test_log);
    RUN(test_f16_tracks_f32);
    RUN(test_f16_finds_its_scale);
    return test_summary();
}
