/* test_optim.c: clipping and optimizers and schedules, against PyTorch's numbers
 * (reference/op_golden.h) and loops in double. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "reference/op_golden.h"

/* ---- PyTorch ---- */

enum { W = 8, STEPS = 5 };

/* coupled: torch's SGD adds the decay to the gradient; dtrain decouples it, so the test adds it. */
typedef struct golden_case {
    dtrain_optimizer_desc hyper;
    float lr, coupled, grad_scale;
    const float *expected; /* (STEPS, W) */
    double tolerance;
} golden_case;

static int golden_main(dtrain_world *world, void *user)
{
    const golden_case *c = (const golden_case *)user;
    float w[W], g[W];
    dtrain_param p = ranks_param("w", w, g, 2, 4); /* 2-D: decayed */
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    int step, i;
    memcpy(w, op_opt_w, sizeof w);
    RANKS_TRY(dtrain_strategy_create(world, &p, 1, NULL, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &c->hyper, &optimizer));
    for (step = 0; step < STEPS; step++) {
        for (i = 0; i < W; i++)
            g[i] = (op_opt_grad[step * W + i] + c->coupled * w[i]) / c->grad_scale;
        RANKS_TRY(dtrain_strategy_ready(strategy, 0));
        RANKS_TRY(dtrain_strategy_finish(strategy));
        RANKS_TRY(dtrain_optimizer_step(optimizer, c->lr, c->grad_scale));
        for (i = 0; i < W; i++) CHECK_CLOSE(w[i], c->expected[step * W + i], c->tolerance);
    }
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void golden(dtrain_optimizer_desc hyper, float lr, float coupled, const float *expected)
{
    golden_case c;
    float scale;
    c.hyper = hyper;
    c.lr = lr;
    c.coupled = coupled;
    c.expected = expected;
    c.tolerance = 1e-6;
    for (scale = 1; scale > 0.2f; scale /= 2) { /* the scale undoes a larger gradient, exactly */
        c.grad_scale = scale;
        ranks_run(scale < 1 ? 2 : 1, DTRAIN_LAUNCH_THREADS, golden_main, &c);
    }
}

static void test_sgd(void)
{
    dtrain_optimizer_desc hyper = dtrain_sgd_defaults();
    golden(hyper, 0.1f, 0, op_opt_sgd_plain);
    hyper.momentum = 0.9f;
    golden(hyper, 0.1f, 0.01f, op_opt_sgd);
    hyper.nesterov = true;
    golden(hyper, 0.1f, 0.01f, op_opt_sgd_nesterov);
}

static void test_adamw(void)
{
    dtrain_optimizer_desc hyper = dtrain_adamw_defaults();
    CHECK(hyper.beta1 == 0.9f && hyper.beta2 == 0.999f && hyper.epsilon == 1e-8f &&
          hyper.weight_decay == 0.01f);
    hyper.beta2 = 0.95f;
    hyper.weight_decay = 0.1f;
    golden(hyper, 1e-2f, 0, op_opt_adamw);
}

/* ---- Many shards, decay rules, long runs: double loops ---- */

enum { SHARDS = 6 };
static const int64_t shard_shapes[SHARDS][2] = {{3, 5}, {7, 0}, {0, 0}, {33, 4}, {1, 1}, {2, 9}};
static const uint32_t shard_flags[SHARDS] = {
    0, 0, 0, 0, DTRAIN_PARAM_NO_DECAY, DTRAIN_PARAM_FROZEN};

typedef struct reference {
    double w[SHARDS][132], m[SHARDS][132], v[SHARDS][132];
} reference;

static void reference_step(reference *r, const dtrain_optimizer_desc *h, dtrain_param *p, int step,
                           double lr, double scale)
{
    const int last = (int)h->variance_steps, estimated = last && step > last ? last : step;
    int i;
    int64_t k;
    for (i = 0; i < SHARDS; i++) {
        bool decays = i == 0 || i == 3; /* at least 2-D, not NO_DECAY, not frozen */
        if (p[i].flags & DTRAIN_PARAM_FROZEN) continue;
        for (k = 0; k < p[i].count; k++) {
            double g = (double)p[i].grad[k] * scale, *w = &r->w[i][k], *m = &r->m[i][k],
                   *v = &r->v[i][k];
            if (decays) *w *= 1 - lr * (double)h->weight_decay;
            if (h->kind == DTRAIN_OPTIMIZER_SGD) {
                *m = step == 1 ? g : (double)h->momentum * *m + g;
                *w -= lr * (h->nesterov ? g + (double)h->momentum * *m : *m);
                continue;
            }
            *m = (double)h->beta1 * *m + (1 - (double)h->beta1) * g;
            if (step <= estimated) *v = (double)h->beta2 * *v + (1 - (double)h->beta2) * g * g;
            *w -= lr * (*m / (1 - pow((double)h->beta1, step))) /
                  (sqrt(*v / (1 - pow((double)h->beta2, estimated))) + (double)h->epsilon);
        }
    }
}

static void shards_make(dtrain_param *p, float values[][132], float grads[][132])
{
    static const char *const names[SHARDS] = {"a", "b", "c", "d", "e", "f"};
    int i;
    for (i = 0; i < SHARDS; i++) {
        p[i] = ranks_param(names[i], values[i], grads[i], shard_shapes[i][0], shard_shapes[i][1]);
        p[i].flags = shard_flags[i];
    }
}

static int long_main(dtrain_world *world, void *user)
{
    const dtrain_optimizer_desc *hyper = (const dtrain_optimizer_desc *)user;
    static float values[SHARDS][132], grads[SHARDS][132];
    static reference r;
    dtrain_param p[SHARDS];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_optimizer_info info;
    int step, i;
    int64_t k;
    memset(&r, 0, sizeof r);
    shards_make(p, values, grads);
    for (i = 0; i < SHARDS; i++)
        for (k = 0; k < 132; k++)
            r.w[i][k] = (double)(values[i][k] = dtrain_random_normal(1, (uint64_t)i, (uint64_t)k));
    RANKS_TRY(dtrain_strategy_create(world, p, SHARDS, NULL, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, hyper, &optimizer));
    dtrain_optimizer_query(optimizer, &info);
    CHECK(info.kind == hyper->kind && info.step_count == 0);
    CHECK(info.state_bytes == (uint64_t)(hyper->kind == DTRAIN_OPTIMIZER_ADAMW ? 2
                                         : hyper->momentum > 0                 ? 1
                                                                               : 0) *
                                  4 * (16 + 16 + 144 + 16));
    for (step = 1; step <= 60; step++) {
        float lr = 0.02f / (float)step, scale = 0.5f;
        for (i = 0; i < SHARDS; i++)
            for (k = 0; k < 132; k++)
                grads[i][k] = dtrain_random_normal(2, (uint64_t)(i * 100 + step), (uint64_t)k);
        RANKS_TRY(dtrain_optimizer_step(optimizer, lr, scale));
        reference_step(&r, hyper, p, step, (double)lr, (double)scale);
    }
    for (i = 0; i < SHARDS; i++)
        for (k = 0; k < p[i].count; k++)
            CHECK_MSG(test_close((double)values[i][k], r.w[i][k], 2e-6),
                      "%s[%d]: %.9g, expected %.9g", p[i].name, (int)k, (double)values[i][k],
                      r.w[i][k]);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void test_long_runs(void)
{
    dtrain_optimizer_desc hyper = dtrain_adamw_defaults();
    hyper.weight_decay = 0.3f;
    ranks_run(1, DTRAIN_LAUNCH_THREADS, long_main, &hyper);
    for (hyper.variance_steps = 1; hyper.variance_steps < 100; hyper.variance_steps *= 8)
        ranks_run(1, DTRAIN_LAUNCH_THREADS, long_main, &hyper); /* 1, 8, and 64: not reached */
    hyper = dtrain_sgd_defaults();
    hyper.weight_decay = 0.3f;
    ranks_run(1, DTRAIN_LAUNCH_THREADS, long_main, &hyper);
    hyper.momentum = 0.8f;
    ranks_run(1, DTRAIN_LAUNCH_THREADS, long_main, &hyper);
    hyper.nesterov = true;
    ranks_run(1, DTRAIN_LAUNCH_THREADS, long_main, &hyper);
}

/* ---- Clipping ---- */

static int clip_main(dtrain_world *world, void *user)
{
    static const float limits[] = {0.5f, 1, 3, 1000, 0, -1};
    float values[SHARDS][132], grads[SHARDS][132], bits, norm = -1, scale = -1;
    dtrain_param p[SHARDS + 1];
    dtrain_strategy *strategy;
    double total = 0, exact;
    int i, rank = dtrain_world_rank(world), ranks = dtrain_world_size(world);
    int64_t k;
    (void)user;
    memset(values, 0, sizeof values);
    shards_make(p, values, grads);
    p[SHARDS] = ranks_param("tied", NULL, NULL, 5, 3); /* counted once */
    p[SHARDS].alias_of = &p[0];
    RANKS_TRY(dtrain_strategy_create(world, p, SHARDS + 1, NULL, &strategy));
    for (i = 0; i < SHARDS; i++)
        for (k = 0; k < p[i].count; k++) {
            double mean = 0;
            int r;
            for (r = 0; r < ranks; r++)
                mean +=
                    (double)dtrain_random_normal(4, (uint64_t)(100 * r + i), (uint64_t)k) / ranks;
            grads[i][k] = dtrain_random_normal(4, (uint64_t)(100 * rank + i), (uint64_t)k);
            if (i != 5) total += mean * mean; /* not the frozen one */
        }
    for (i = 0; i <= SHARDS; i++)
        if (i != 5) RANKS_TRY(dtrain_strategy_ready(strategy, (size_t)i));
    RANKS_TRY(dtrain_strategy_finish(strategy));
    exact = sqrt(total);
    for (i = 0; i < 6; i++) {
        RANKS_TRY(dtrain_clip_grad_norm(strategy, limits[i], &norm, &scale));
        CHECK_CLOSE(norm, exact, 1e-6);
        if (limits[i] > 0 && (double)limits[i] < exact)
            CHECK_CLOSE(scale, (double)limits[i] / (exact + 1e-6), 1e-6);
        else CHECK(scale == 1);
        bits = norm; /* the same on every rank */
        RANKS_TRY(dtrain_broadcast(dtrain_world_comm(world), &bits, 1, DTRAIN_DTYPE_F32, 0, NULL));
        CHECK(memcmp(&bits, &norm, sizeof bits) == 0);
    }
    memset(grads, 0, sizeof grads);
    RANKS_TRY(dtrain_clip_grad_norm(strategy, 1, &norm, &scale));
    CHECK(norm == 0 && scale == 1);
    grads[3][131] = 2;
    RANKS_TRY(dtrain_clip_grad_norm(strategy, 2, &norm, &scale)); /* torch: 2 / (2 + 1e-6) */
    CHECK(norm == 2 && scale == 2 / (2 + 1e-6f) && scale < 1);
    for (i = 0; i < 3; i++) {
        uint32_t odd = i == 0   ? 0x7f800000u
                       : i == 1 ? 0x7fc00000u
                                : 0x7f7fffffu; /* the last: its square is too large */
        memcpy(&grads[0][3], &odd, sizeof odd);
        if (i == 2) grads[0][4] = grads[0][3];
        RANKS_TRY(dtrain_clip_grad_norm(strategy, 1, &norm, &scale));
        CHECK(!dtrain_is_finite(norm) && scale == 1);
    }
    CHECK(dtrain_clip_grad_norm(NULL, 1, &norm, &scale) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_clip_grad_norm(strategy, 1, NULL, &scale) == DTRAIN_ERROR_ARGUMENT);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void test_clipping(void)
{
    int ranks;
    for (ranks = 1; ranks <= 4; ranks++) ranks_run(ranks, DTRAIN_LAUNCH_THREADS, clip_main, NULL);
}

/* ---- Arguments ---- */

static int arguments_main(dtrain_world *world, void *user)
{
    float w = 1, g = 0, zero = 0, nan = zero / zero;
    dtrain_param p = ranks_param("w", &w, &g, 1, 0);
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_optimizer_info info;
    int i;
    (void)user;
    RANKS_TRY(dtrain_strategy_create(world, &p, 1, NULL, &strategy));
    for (i = 0; i < 13; i++) {
        dtrain_optimizer_desc hyper = i < 8 ? dtrain_adamw_defaults() : dtrain_sgd_defaults();
        if (i == 0) hyper.kind = 0;
        if (i == 1) hyper.kind = 3;
        if (i == 2) hyper.beta1 = 1;
        if (i == 3) hyper.beta2 = -0.1f;
        if (i == 4) hyper.epsilon = -1;
        if (i == 5) hyper.weight_decay = -1;
        if (i == 6) hyper.beta1 = nan;
        if (i == 7) hyper.weight_decay = nan;
        if (i == 8) hyper.momentum = -1;
        if (i == 9) hyper.nesterov = true;
        if (i == 10) hyper.momentum = nan;
        if (i == 11) hyper.weight_decay = 1 / zero;
        if (i == 12) hyper.variance_steps = 5;
        CHECK_MSG(dtrain_optimizer_create(world, strategy, &hyper, &optimizer) ==
                          DTRAIN_ERROR_ARGUMENT &&
                      !optimizer,
                  "case %d", i);
    }
    {
        dtrain_optimizer_desc hyper = dtrain_sgd_defaults();
        CHECK(dtrain_optimizer_create(world, strategy, NULL, &optimizer) == DTRAIN_ERROR_ARGUMENT);
        CHECK(dtrain_optimizer_create(world, NULL, &hyper, &optimizer) == DTRAIN_ERROR_ARGUMENT);
        CHECK(dtrain_optimizer_create(world, strategy, &hyper, NULL) == DTRAIN_ERROR_ARGUMENT);
        RANKS_TRY(dtrain_optimizer_create(world, strategy, &hyper, &optimizer));
    }
    CHECK(dtrain_optimizer_step(optimizer, nan, 1) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_optimizer_step(optimizer, -1, 1) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_optimizer_step(optimizer, 1, 1 / zero) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_optimizer_step(NULL, 1, 1) == DTRAIN_ERROR_ARGUMENT);
    dtrain_optimizer_query(optimizer, &info);
    CHECK(w == 1 && info.state_bytes == 0 && info.step_count == 0);
    dtrain_optimizer_query(NULL, &info);
    CHECK(info.kind == 0 && info.state_bytes == 0);
    dtrain_optimizer_destroy(optimizer);
    dtrain_optimizer_destroy(NULL);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void test_arguments(void) { ranks_run(1, DTRAIN_LAUNCH_THREADS, arguments_main, NULL); }

/* ---- Schedules ---- */

static dtrain_schedule schedule(uint32_t kind, int64_t warmup, int64_t total)
{
    dtrain_schedule s;
    memset(&s, 0, sizeof s);
    s.kind = kind;
    s.lr = 3e-4f;
    s.min_lr = 3e-5f;
    s.warmup_steps = warmup;
    s.total_steps = total;
    return s;
}

static void test_schedules(void)
{
    dtrain_schedule cosine = schedule(DTRAIN_SCHEDULE_COSINE, 4, 20), s;
    dtrain_schedule linear = schedule(DTRAIN_SCHEDULE_LINEAR, 4, 20);
    int64_t i;
    for (i = 0; i < 24; i++) {
        CHECK_CLOSE(1e4 * (double)dtrain_schedule_lr(&cosine, i), 1e4 * (double)op_lr_cosine[i],
                    1e-6);
        CHECK_CLOSE(1e4 * (double)dtrain_schedule_lr(&linear, i), 1e4 * (double)op_lr_linear[i],
                    1e-6);
    }
    CHECK(dtrain_schedule_lr(&cosine, 4) == 3e-4f && dtrain_schedule_lr(&cosine, 20) == 3e-5f);
    CHECK(dtrain_schedule_lr(&linear, 3) == 3e-4f &&
          dtrain_schedule_lr(&linear, INT64_MAX) == 3e-5f);
    CHECK(dtrain_schedule_lr(&linear, -5) == dtrain_schedule_lr(&linear, 0));
    s = schedule(DTRAIN_SCHEDULE_STEPS, 2, 0);
    s.milestones[0] = 4, s.milestones[1] = 9;
    for (int64_t i = 2; i < 12; i++)
        CHECK_CLOSE(1e4 * (double)dtrain_schedule_lr(&s, i), i < 4 ? 3 : i < 9 ? 0.3 : 0.03, 1e-6);
    s.gamma = 0.5f;
    CHECK(dtrain_schedule_lr(&s, 0) == 1.5e-4f && dtrain_schedule_lr(&s, 5) == 1.5e-4f &&
          dtrain_schedule_lr(&s, INT64_MAX) == 0.75e-4f);
    s = schedule(DTRAIN_SCHEDULE_CONSTANT, 2, 5);
    CHECK(dtrain_schedule_lr(&s, 0) == 1.5e-4f && dtrain_schedule_lr(&s, 1) == 3e-4f);
    CHECK(dtrain_schedule_lr(&s, 2) == 3e-4f && dtrain_schedule_lr(&s, 100) == 3e-4f);
    s = schedule(DTRAIN_SCHEDULE_LINEAR, 0, 0); /* nothing to divide by */
    CHECK(dtrain_schedule_lr(&s, 0) == 3e-5f);
    s = schedule(DTRAIN_SCHEDULE_COSINE, 6, 3); /* ends before it is warm */
    CHECK(dtrain_schedule_lr(&s, 5) == 3e-4f && dtrain_schedule_lr(&s, 6) == 3e-5f);
    CHECK(dtrain_schedule_lr(NULL, 1) == 0);
}

static void test_lr_scaling(void)
{
    CHECK(dtrain_lr_for_ranks(0.1f, 8, DTRAIN_LR_SCALING_NONE) == 0.1f);
    CHECK(dtrain_lr_for_ranks(0.1f, 8, DTRAIN_LR_SCALING_LINEAR) == 0.8f);
    CHECK(dtrain_lr_for_ranks(0.1f, 4, DTRAIN_LR_SCALING_SQRT) == 0.2f);
    CHECK(dtrain_lr_for_ranks(0.1f, 1, DTRAIN_LR_SCALING_SQRT) == 0.1f);
    CHECK_CLOSE(dtrain_lr_for_ranks(0.1f, 2, DTRAIN_LR_SCALING_SQRT), 0.1 * sqrt(2.0), 1e-7);
    CHECK(dtrain_lr_for_ranks(0.1f, 0, DTRAIN_LR_SCALING_LINEAR) == 0.1f);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_sgd);
    RUN(test_adamw);
    RUN(test_long_runs);
    RUN(test_clipping);
    RUN(test_arguments);
    RUN(test_schedules);
    RUN(test_lr_scaling);
    return test_summary();
}
