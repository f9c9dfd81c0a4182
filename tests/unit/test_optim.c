/* test_optim.c: clipping and optimizers and schedules, against PyTorch's numbers
 * (reference/op_golden.h) and loops in double. */
#include "test.h"
#include "dtrain.h"
#include "ranks.h"
#include "reference/op_golden.h"

/* ---- PyTorch ---- */

enum { W = 8, STEPS = 5 };

typedef struct golden_case {
    dtrain_optimizer_desc hyper;
    float lr, grad_scale;
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
        for (i = 0; i < W; i++) g[i] = op_opt_grad[step * W + i] / c->grad_scale;
        RANKS_TRY(dtrain_strategy_ready(strategy, 0));
        RANKS_TRY(dtrain_strategy_finish(strategy));
        RANKS_TRY(dtrain_optimizer_step(optimizer, c->lr, c->grad_scale));
        for (i = 0; i < W; i++) CHECK_CLOSE(w[i], c->expected[step * W + i], c->tolerance);
    }
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void golden(dtrain_optimizer_desc hyper, float lr, const float *expected)
{
    golden_case c;
    float scale;
    c.hyper = hyper;
    c.lr = lr;
    c.expected = expected;
    c.tolerance = 1e-6;
    for (scale = 1; scale > 0.2f; scale /= 2) { /* the scale undoes a larger gradient, exactly */
        c.grad_scale = scale;
        ranks_run(scale < 1 ? 2 : 1, DTRAIN_LAUNCH_THREADS, golden_main, &c);
    }
}

static void test_sgd(void)
{
    dtrain_optimizer_desc hyper = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    golden(hyper, 0.1f, op_opt_sgd_plain);
    hyper.momentum = 0.9f;
    hyper.weight_decay = 0.01f;
    golden(hyper, 0.1f, op_opt_sgd);
    hyper.nesterov = true;
    golden(hyper, 0.1f, op_opt_sgd_nesterov);
    hyper.lr_scale = 0.25f;
    golden(hyper, 0.4f, op_opt_sgd_nesterov);
}

static void test_adamw(void)
{
    dtrain_optimizer_desc hyper = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    CHECK(hyper.beta1 == 0.9f && hyper.beta2 == 0.999f && hyper.epsilon == 1e-8f &&
          hyper.weight_decay == 0.01f);
    hyper.beta2 = 0.95f;
    hyper.weight_decay = 0.1f;
    golden(hyper, 1e-2f, op_opt_adamw);
}

static void test_lion(void)
{
    dtrain_optimizer_desc hyper = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_LION);
    CHECK(hyper.beta1 == 0.9f && hyper.beta2 == 0.99f && hyper.weight_decay == 0);
    hyper.weight_decay = 0.1f;
    golden(hyper, 0.02f, op_lion);
}

typedef struct muon_case {
    int64_t shape[4];
    const float *w, *grads, *after; /* (count), (3, count) each */
} muon_case;

static const muon_case muon_cases[] = {
    {{6, 4, 0, 0}, op_muon_tall_w, op_muon_tall_grad, op_muon_tall},
    {{4, 6, 0, 0}, op_muon_wide_w, op_muon_wide_grad, op_muon_wide},
    {{5, 5, 0, 0}, op_muon_square_w, op_muon_square_grad, op_muon_square},
    {{3, 2, 2, 2}, op_muon_filters_w, op_muon_filters_grad, op_muon_filters}};

enum { MUON_CASES = sizeof muon_cases / sizeof muon_cases[0], MUON_MOST = 25 };

/* All matrices in one optimizer, the largest not first. */
static int muon_main(dtrain_world *world, void *user)
{
    static const char *const names[] = {"tall", "wide", "square", "filters"};
    dtrain_optimizer_desc hyper = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON);
    float w[MUON_CASES][MUON_MOST], g[MUON_CASES][MUON_MOST];
    dtrain_param params[MUON_CASES];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_optimizer_info info;
    (void)user;
    CHECK(hyper.momentum == 0.95f && hyper.nesterov && hyper.weight_decay == 0);
    hyper.weight_decay = 0.1f;
    for (int c = 0; c < MUON_CASES; c++) {
        params[c] = ranks_param(names[c], w[c], g[c], muon_cases[c].shape[0], 0);
        memcpy(params[c].shape, muon_cases[c].shape, sizeof params[c].shape);
        memcpy(w[c], muon_cases[c].w, (size_t)(c == 2 ? 25 : 24) * sizeof(float));
    }
    RANKS_TRY(dtrain_strategy_create(world, params, MUON_CASES, NULL, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &hyper, &optimizer));
    for (int step = 0; step < 3; step++) {
        for (int c = 0; c < MUON_CASES; c++)
            for (int64_t i = 0; i < params[c].count; i++)
                g[c][i] = 4 * muon_cases[c].grads[step * params[c].count + i];
        for (size_t c = 0; c < MUON_CASES; c++) RANKS_TRY(dtrain_strategy_ready(strategy, c));
        RANKS_TRY(dtrain_strategy_finish(strategy));
        RANKS_TRY(dtrain_optimizer_step(optimizer, 0.02f, 0.25f));
        for (int c = 0; c < MUON_CASES; c++)
            for (int64_t i = 0; i < params[c].count; i++)
                CHECK_CLOSE(w[c][i], muon_cases[c].after[step * params[c].count + i], 2e-6);
    }
    dtrain_optimizer_query(optimizer, &info);
    CHECK(info.state_bytes == 4 * 32 * 4 && info.scratch_bytes == (16 + 2 * 32 + 2 * 32) * 4);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void test_muon(void)
{
    for (int ranks = 1; ranks <= 2; ranks++)
        ranks_run(ranks, DTRAIN_LAUNCH_THREADS, muon_main, NULL);
}

/* ---- Larger matrices, and none at all ---- */

/* The singular values of what Muon makes lie near 1: A = X^T X is near the identity. Of a matrix
 * without gradient nothing changes, and of one of a single row or column the step is a unit vector
 * (times the square root of its rows) but for the polynomial. */
static int muon_shapes_main(dtrain_world *world, void *user)
{
    enum { ROWS = 70, COLUMNS = 33, WIDTH = 40 };
    static float w[4][ROWS * COLUMNS], g[4][ROWS * COLUMNS];
    dtrain_optimizer_desc hyper = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON);
    dtrain_param params[4];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    double largest = 0, trace = 0, row = 0, column = 0;
    (void)user;
    memset(w, 0, sizeof w);
    memset(g, 0, sizeof g);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        for (int c = 0; c < 3; c++) g[c][i] = dtrain_random_normal(3, (uint64_t)c, (uint64_t)i);
    params[0] = ranks_param("tall", w[0], g[0], ROWS, COLUMNS);
    params[1] = ranks_param("row", w[1], g[1], 1, WIDTH);
    params[2] = ranks_param("column", w[2], g[2], WIDTH, 1);
    params[3] = ranks_param("still", w[3], g[3], 7, 9);
    RANKS_TRY(dtrain_strategy_create(world, params, 4, NULL, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &hyper, &optimizer));
    RANKS_TRY(dtrain_optimizer_step(optimizer, 1, 1));
    for (int a = 0; a < COLUMNS; a++)
        for (int b = 0; b < COLUMNS; b++) {
            double sum = 0;
            for (int i = 0; i < ROWS; i++)
                sum += (double)w[0][i * COLUMNS + a] * (double)w[0][i * COLUMNS + b];
            sum *= (double)COLUMNS / ROWS; /* the scale, squared */
            if (a == b) trace += sum;
            else if (fabs(sum) > largest) largest = fabs(sum);
        }
    CHECK_MSG(largest < 0.25 && fabs(trace / COLUMNS - 1) < 0.35, "largest %g, trace %g", largest,
              trace / COLUMNS);
    for (int i = 0; i < WIDTH; i++) {
        row += (double)w[1][i] * (double)w[1][i];
        column += (double)w[2][i] * (double)w[2][i] / WIDTH;
        CHECK((w[1][i] < 0) == (g[1][i] > 0));
    }
    CHECK_MSG(row > 0.45 && row < 1.5 && test_close(row, column, 1e-5), "%g, %g", row, column);
    for (int i = 0; i < 63; i++) CHECK(w[3][i] == 0);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void test_muon_shapes(void) { ranks_run(1, DTRAIN_LAUNCH_THREADS, muon_shapes_main, NULL); }

/* ---- Groups ---- */

enum { GROUPS = 5, GROUP_ELEMENTS = 63 };

/* Hyper-parameters that differ in everything, and parameters of all of them in another order. */
static void group_descs(dtrain_optimizer_desc *all)
{
    all[0] = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    all[1] = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON);
    all[2] = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_LION);
    all[3] = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    all[4] = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    all[1].lr_scale = 4;
    all[2].lr_scale = 0.5f;
    all[2].weight_decay = 0.3f;
    all[3].momentum = 0.9f;
    all[3].weight_decay = 0.2f;
    all[4].beta1 = 0.8f;
    all[4].weight_decay = 0;
    all[4].lr_scale = 2;
}

/* Six steps of parameters `first` .. `last` of eight, in groups or, one alone, with its own desc. */
static int group_run(dtrain_world *world, int first, int last, bool grouped, float values[][63])
{
    static const uint32_t groups[8] = {1, 0, 3, 2, 1, 4, 0, 2};
    static const char *const names[8] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    const size_t count = (size_t)(last - first);
    dtrain_optimizer_desc all[GROUPS], desc;
    float grads[8][GROUP_ELEMENTS];
    dtrain_param params[9];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    group_descs(all);
    desc = all[0];
    desc.groups = all + 1;
    desc.group_count = GROUPS - 1;
    if (!grouped) desc = all[groups[first]];
    for (int i = first; i < last; i++) {
        params[i - first] = ranks_param(names[i], values[i], grads[i], 7, 9);
        params[i - first].group = grouped ? groups[i] : 0;
        for (int k = 0; k < GROUP_ELEMENTS; k++)
            values[i][k] = dtrain_random_normal(6, (uint64_t)i, (uint64_t)k);
    }
    memset(&params[count], 0, sizeof params[count]); /* an alias is where its target is */
    params[count].name = "tied";
    params[count].alias_of = &params[0];
    RANKS_TRY(dtrain_strategy_create(world, params, count + 1, NULL, &strategy));
    RANKS_TRY(dtrain_optimizer_create(world, strategy, &desc, &optimizer));
    for (int step = 0; step < 6; step++) {
        for (int i = first; i < last; i++)
            for (int k = 0; k < GROUP_ELEMENTS; k++)
                grads[i][k] = dtrain_random_normal(7, (uint64_t)(10 * step + i), (uint64_t)k);
        RANKS_TRY(dtrain_optimizer_step(optimizer, 0.0078125f, 0.5f));
    }
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

/* A parameter ends with the bits that it has with an optimizer of its own. */
static int groups_main(dtrain_world *world, void *user)
{
    float together[8][63], alone[8][63];
    (void)user;
    if (group_run(world, 0, 8, true, together)) return 1;
    for (int i = 0; i < 8; i++) {
        if (group_run(world, i, i + 1, false, alone)) return 1;
        CHECK_MSG(memcmp(together[i], alone[i], sizeof alone[i]) == 0, "parameter %d", i);
    }
    return 0;
}

static void test_groups(void) { ranks_run(1, DTRAIN_LAUNCH_THREADS, groups_main, NULL); }

static dtrain_result no_batch(void *user)
{
    (void)user;
    return DTRAIN_OK;
}

static dtrain_tensor *matrix_loss(dtrain_tape *tape, void *user)
{
    const int64_t shape[2] = {1, 50}, rows = 1;
    const int32_t target = 3;
    const float x[50] = {1};
    dtrain_tape_unit(tape, 0);
    dtrain_tensor *y = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, false);
    y = dtrain_linear(tape, y, (dtrain_param *)user, NULL, DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(
        tape, y, dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, &rows, &target, false), 0, 0);
}

/* What a plan says, before there is anything and afterwards, is what is allocated. Most of the model is one
 * matrix: whoever owns it needs most. */
static int group_memory_main(dtrain_world *world, void *user)
{
    static const uint32_t states[] = {1, DTRAIN_OPTIMIZER_STATES_NONE};
    const dtrain_optimizer_desc groups[2] = {dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON),
                                             dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD)};
    dtrain_device *device = dtrain_world_device(world);
    (void)user;
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_ZERO3;
         kind += DTRAIN_STRATEGY_ZERO3 - DTRAIN_STRATEGY_DDP) {
        dtrain_param p[4] = {
            ranks_param("matrix", NULL, NULL, 70, 50), ranks_param("b", NULL, NULL, 9, 0),
            ranks_param("small", NULL, NULL, 20, 30), ranks_param("plain", NULL, NULL, 40, 3)};
        dtrain_optimizer_desc desc = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
        dtrain_strategy_desc where;
        dtrain_trainer_desc all;
        dtrain_strategy *strategy;
        dtrain_optimizer *optimizer;
        dtrain_optimizer_info info;
        dtrain_memory plan, made;
        memset(&where, 0, sizeof where);
        memset(&all, 0, sizeof all);
        desc.groups = groups;
        desc.group_count = 2;
        p[0].group = p[2].group = 1;
        p[3].group = 2;
        where.kind = kind;
        where.group_count = 1;
        CHECK(dtrain_strategy_create(world, p, 4, &where, &strategy) == DTRAIN_ERROR_ARGUMENT);
        where.group_states = states;
        where.group_count = 2;
        RANKS_TRY(dtrain_strategy_plan(p, 4, &where, dtrain_world_size(world), &plan));
        RANKS_TRY(dtrain_strategy_create(world, p, 4, &where, &strategy));
        const size_t before = device->allocated_bytes;
        RANKS_TRY(dtrain_optimizer_create(world, strategy, &desc, &optimizer));
        dtrain_optimizer_query(optimizer, &info);
        CHECK(device->allocated_bytes - before == info.state_bytes + info.scratch_bytes);
        all.strategy = strategy;
        all.optimizer = optimizer;
        all.loss = matrix_loss;
        all.next_batch = no_batch;
        all.user = p;
        RANKS_TRY(dtrain_trainer_plan(world, &all, NULL, &made));
        CHECK(made.optimizer == info.state_bytes + info.scratch_bytes);
        int64_t most = (int64_t)info.state_bytes;
        RANKS_TRY(dtrain_all_reduce(dtrain_world_comm(world), &most, &most, 1, DTRAIN_DTYPE_I64,
                                    DTRAIN_REDUCE_MAX, NULL));
        CHECK_MSG((uint64_t)most == plan.optimizer, "kind %u: %lld bytes of state, planned %llu",
                  kind, (long long)most, (unsigned long long)plan.optimizer);
        dtrain_optimizer_destroy(optimizer);
        dtrain_strategy_destroy(strategy);
        CHECK(device->allocated_bytes <= before);
    }
    return 0;
}

static void test_group_memory(void)
{
    for (int ranks = 1; ranks <= 3; ranks++)
        ranks_run(ranks, DTRAIN_LAUNCH_THREADS, group_memory_main, NULL);
}

/* What groups can be wrong about, and what the sentence says. */
static int group_errors_main(dtrain_world *world, void *user)
{
    static const uint32_t kinds[] = {DTRAIN_STRATEGY_ZERO1, DTRAIN_STRATEGY_SHARD_GRAD_OP,
                                     DTRAIN_STRATEGY_FULL_SHARD};
    dtrain_optimizer_desc groups[2] = {dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON),
                                       dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW)};
    dtrain_optimizer_desc desc = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    (void)user;
    desc.groups = groups;
    desc.group_count = 2;
    for (int i = 0; i < 10; i++) {
        static const char *const says[10] = {"\"w\"",
                                             "group 3",
                                             "has 1 dimension",
                                             "groups is NULL",
                                             "group 2: kind",
                                             "group 2: lr_scale",
                                             "group_count",
                                             "DTRAIN_STRATEGY_ZERO3",
                                             "DTRAIN_STRATEGY_ZERO3",
                                             "DTRAIN_STRATEGY_ZERO3"};
        dtrain_strategy_desc where;
        dtrain_optimizer_desc how = desc, own[2] = {groups[0], groups[1]};
        dtrain_param p[2] = {ranks_param("w", NULL, NULL, 4, 5),
                             ranks_param("b", NULL, NULL, 3, 0)};
        dtrain_strategy *strategy;
        dtrain_optimizer *optimizer;
        memset(&where, 0, sizeof where);
        how.groups = own;
        p[0].group = i < 2 ? 3 : 1;
        if (i == 2) p[1].group = 1;
        if (i == 3) how.groups = NULL;
        if (i == 4) own[1].kind = 9;
        if (i == 5) own[1].lr_scale = 0;
        if (i == 6) own[1].groups = own, own[1].group_count = 1;
        if (i > 6) where.kind = kinds[i - 7];
        RANKS_TRY(dtrain_strategy_create(world, p, 2, &where, &strategy));
        const dtrain_result result = dtrain_optimizer_create(world, strategy, &how, &optimizer);
        CHECK_MSG(result == (i > 6 ? DTRAIN_ERROR_UNSUPPORTED : DTRAIN_ERROR_ARGUMENT) &&
                      !optimizer && strstr(dtrain_last_error(), says[i]),
                  "case %d: %s", i, dtrain_last_error());
        dtrain_strategy_destroy(strategy);
    }
    return 0;
}

/* Ranks that put a parameter in different groups, and an alias elsewhere than its target. */
static int group_mismatch_main(dtrain_world *world, void *user)
{
    dtrain_param p[2] = {ranks_param("w", NULL, NULL, 4, 5), ranks_param("tied", NULL, NULL, 4, 5)};
    dtrain_strategy *strategy;
    (void)user;
    p[0].group = (uint32_t)dtrain_world_rank(world);
    CHECK(dtrain_strategy_create(world, p, 1, NULL, &strategy) == DTRAIN_ERROR_MISMATCH &&
          strstr(dtrain_last_error(), "group 0") && strstr(dtrain_last_error(), "group 1"));
    p[1].alias_of = &p[0];
    p[1].group = 2;
    CHECK(dtrain_strategy_create(world, p, 2, NULL, &strategy) == DTRAIN_ERROR_ARGUMENT &&
          strstr(dtrain_last_error(), "its group is 2"));
    return 0;
}

static void test_group_errors(void)
{
    ranks_run(2, DTRAIN_LAUNCH_THREADS, group_errors_main, NULL);
    ranks_run(2, DTRAIN_LAUNCH_THREADS, group_mismatch_main, NULL);
}

/* ---- Many shards, decay rules, long runs: double loops ---- */

enum { SHARDS = 6 };
static const int64_t shard_shapes[SHARDS][2] = {{3, 5}, {7, 0}, {1, 0}, {33, 4}, {1, 1}, {2, 9}};
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
            if (decays && h->kind == DTRAIN_OPTIMIZER_SGD) g += (double)h->weight_decay * *w;
            else if (decays) *w *= 1 - lr * (double)h->weight_decay;
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
                                  4 * (16 + 16 + 16 + 144 + 16));
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
    dtrain_optimizer_desc hyper = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    hyper.weight_decay = 0.3f;
    ranks_run(1, DTRAIN_LAUNCH_THREADS, long_main, &hyper);
    for (hyper.variance_steps = 1; hyper.variance_steps < 100; hyper.variance_steps *= 8)
        ranks_run(1, DTRAIN_LAUNCH_THREADS, long_main, &hyper); /* 1, 8, and 64: not reached */
    hyper = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
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
        RANKS_TRY(dtrain_grad_norm(strategy, NULL, limits[i], &norm, &scale));
        CHECK_CLOSE(norm, exact, 1e-6);
        if (limits[i] > 0 && (double)limits[i] < exact)
            CHECK_CLOSE(scale, (double)limits[i] / (exact + 1e-6), 1e-6);
        else CHECK(scale == 1);
        bits = norm; /* the same on every rank */
        RANKS_TRY(dtrain_broadcast(dtrain_world_comm(world), &bits, 1, DTRAIN_DTYPE_F32, 0, NULL));
        CHECK(memcmp(&bits, &norm, sizeof bits) == 0);
    }
    memset(grads, 0, sizeof grads);
    RANKS_TRY(dtrain_grad_norm(strategy, NULL, 1, &norm, &scale));
    CHECK(norm == 0 && scale == 1);
    grads[3][131] = 2;
    RANKS_TRY(dtrain_grad_norm(strategy, NULL, 2, &norm, &scale)); /* torch: 2 / (2 + 1e-6) */
    CHECK(norm == 2 && scale == 2 / (2 + 1e-6f) && scale < 1);
    for (i = 0; i < 3; i++) {
        uint32_t odd = i == 0   ? 0x7f800000u
                       : i == 1 ? 0x7fc00000u
                                : 0x7f7fffffu; /* the last: its square is too large */
        memcpy(&grads[0][3], &odd, sizeof odd);
        if (i == 2) grads[0][4] = grads[0][3];
        RANKS_TRY(dtrain_grad_norm(strategy, NULL, 1, &norm, &scale));
        CHECK(!isfinite(norm) && scale == 1);
    }
    CHECK(dtrain_grad_norm(NULL, NULL, 1, &norm, &scale) == DTRAIN_ERROR_ARGUMENT);
    CHECK(dtrain_grad_norm(strategy, NULL, 1, NULL, &scale) == DTRAIN_ERROR_ARGUMENT);
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
    for (i = 0; i < 19; i++) {
        dtrain_optimizer_desc hyper = dtrain_optimizer_defaults(i < 8    ? DTRAIN_OPTIMIZER_ADAMW
                                                                : i < 13 ? DTRAIN_OPTIMIZER_SGD
                                                                : i < 16 ? DTRAIN_OPTIMIZER_LION
                                                                         : DTRAIN_OPTIMIZER_MUON);
        if (i == 0) hyper.kind = 0;
        if (i == 1) hyper.kind = 5;
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
        if (i == 13) hyper.beta2 = 1;
        if (i == 14) hyper.lr_scale = nan;
        if (i == 15) hyper.lr_scale = 0;
        if (i == 16) hyper.momentum = 0; /* nesterov is true */
        if (i == 17) hyper.epsilon = 0;  /* a parameter of one dimension besides: 18 */
        CHECK_MSG(dtrain_optimizer_create(world, strategy, &hyper, &optimizer) ==
                          DTRAIN_ERROR_ARGUMENT &&
                      !optimizer,
                  "case %d", i);
    }
    {
        dtrain_optimizer_desc hyper = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
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

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_sgd);
    RUN(test_adamw);
    RUN(test_lion);
    RUN(test_muon);
    RUN(test_muon_shapes);
    RUN(test_groups);
    RUN(test_group_memory);
    RUN(test_group_errors);
    RUN(test_long_runs);
    RUN(test_clipping);
    RUN(test_arguments);
    RUN(test_schedules);
    return test_summary();
}
