/* test_balance.c: units go to stages by their costs. The division is compared with all divisions that there are,
 * the costs of a small model with what its layers take by hand. */
#include "test.h"

#include "dtrain.h"
#include "tools/balance.h"
#include "ranks.h"

enum { UNITS = 12, STAGES = 6 };

/* ---- balance_units: all partitions ------------------------------------------------------ */

typedef struct search {
    const dtrain_pipeline_costs *costs;
    int units, stages;
    uint32_t now[STAGES], best[STAGES];
    double largest, squares; /* of best */
} search;

static double cost_of(const search *s, int first, int count)
{
    double sum = 0;
    for (int u = first; u < first + count; u++)
        sum += s->costs[u].forward + s->costs[u].backward + s->costs[u].weight;
    return sum;
}

/* Try all ways to divide what is left; costs are integers, so that sums are exact in any order. Of equal ones that
 * stays which begins its last stage earliest, then the one before it. */
static void try_all(search *s, int stage, int first, double largest, double squares)
{
    const int left = s->stages - stage - 1;
    for (int count = 1; first + count + left <= s->units; count++) {
        if (left == 0) count = s->units - first;
        const double cost = cost_of(s, first, count);
        const double most = cost > largest ? cost : largest, sum = squares + cost * cost;
        s->now[stage] = (uint32_t)count;
        if (left) {
            try_all(s, stage + 1, first + count, most, sum);
            continue;
        }
        bool better = most < s->largest || (most == s->largest && sum < s->squares);
        for (int i = s->stages - 1; most == s->largest && sum == s->squares && i > 0; i--)
            if (s->now[i] != s->best[i]) {
                better = s->now[i] > s->best[i];
                break;
            }
        if (!better) continue;
        s->largest = most, s->squares = sum;
        memcpy(s->best, s->now, sizeof s->best);
    }
}

static void test_all_partitions(void)
{
    uint64_t random = test_seed();
    for (int round = 0; round < (test_full() ? 20000 : 2000); round++) {
        dtrain_pipeline_costs costs[UNITS];
        uint32_t out[STAGES] = {0};
        search s;
        memset(&s, 0, sizeof s);
        memset(costs, 0, sizeof costs);
        s.costs = costs, s.largest = s.squares = HUGE_VAL;
        s.units = 1 + (int)ranks_random(&random, UNITS);
        s.stages = 1 + (int)ranks_random(&random, (uint64_t)(s.units < STAGES ? s.units : STAGES));
        const uint64_t most = ranks_random(&random, 2) ? 4 : 1000000; /* many equal ones, or none */
        for (int u = 0; u < s.units; u++) {
            costs[u].forward = (double)ranks_random(&random, most);
            costs[u].backward = (double)ranks_random(&random, most);
            costs[u].weight = (double)ranks_random(&random, most);
        }
        try_all(&s, 0, 0, 0, 0);
        CHECK(balance_units(costs, (size_t)s.units, NULL, s.stages, 1, out) == DTRAIN_OK);
        if (!CHECK_MSG(
                memcmp(out, s.best, sizeof out) == 0,
                "round %d: %d units in %d stages: %u %u %u %u %u %u, expected %u %u %u %u %u %u",
                round, s.units, s.stages, out[0], out[1], out[2], out[3], out[4], out[5], s.best[0],
                s.best[1], s.best[2], s.best[3], s.best[4], s.best[5]))
            return;
    }
}

/* What a step of a division takes, by a replay of its schedule. */
static double step_of(const search *s, const dtrain_pipeline_schedule *schedule,
                      const uint32_t *of_stage)
{
    dtrain_pipeline_costs costs[STAGES];
    schedule_report report;
    const dtrain_pipeline_costs *unit = s->costs;
    memset(costs, 0, sizeof costs);
    for (int stage = 0; stage < s->stages; stage++)
        for (uint32_t i = 0; i < of_stage[stage]; i++, unit++) {
            costs[stage].forward += unit->forward;
            costs[stage].backward += unit->backward;
            costs[stage].weight += unit->weight;
        }
    CHECK(schedule_check(schedule, costs, 0, &report) == DTRAIN_OK);
    return report.makespan;
}

/* The least step of all divisions. */
static double least_step(search *s, const dtrain_pipeline_schedule *schedule, int stage, int first)
{
    const int left = s->stages - stage - 1;
    double least = HUGE_VAL;
    for (int count = left ? 1 : s->units - first; first + count + left <= s->units; count++) {
        s->now[stage] = (uint32_t)count;
        const double step =
            left ? least_step(s, schedule, stage + 1, first + count) : step_of(s, schedule, s->now);
        least = step < least ? step : least;
    }
    return least;
}

/* With two stages a rank: all units once, none empty, and a step takes nearly as little as under the best of all
 * divisions; more than under the one by the largest stage it never takes. */
static void test_ranks_of_two_stages(void)
{
    uint64_t random = test_seed();
    int better = 0;
    double above = 0;
    enum { ROUNDS = 150 };
    for (int round = 0; round < ROUNDS; round++) {
        dtrain_pipeline_costs costs[UNITS];
        uint32_t out[STAGES] = {0}, by_stage[STAGES];
        dtrain_pipeline_desc desc;
        dtrain_pipeline_schedule *schedule = NULL;
        search s;
        memset(&s, 0, sizeof s), memset(&desc, 0, sizeof desc), memset(costs, 0, sizeof costs);
        const int ranks = 2 + (int)ranks_random(&random, STAGES / 2 - 1),
                  micro_batches = ranks * (1 + (int)ranks_random(&random, 4));
        desc.kind = DTRAIN_PIPELINE_INTERLEAVED;
        s.costs = costs, s.stages = 2 * ranks;
        s.units = s.stages + (int)ranks_random(&random, (uint64_t)(UNITS - s.stages + 1));
        for (int u = 0; u < s.units; u++) {
            costs[u].forward = 1 + (double)ranks_random(&random, 20);
            costs[u].backward = costs[u].weight = costs[u].forward;
        }
        CHECK(dtrain_pipeline_create(&desc, ranks, micro_batches, &schedule) == DTRAIN_OK);
        CHECK(balance_units(costs, (size_t)s.units, NULL, s.stages, 1, by_stage) == DTRAIN_OK);
        CHECK(balance_units(costs, (size_t)s.units, &desc, ranks, micro_batches, out) == DTRAIN_OK);
        const double step = step_of(&s, schedule, out), before = step_of(&s, schedule, by_stage),
                     least = least_step(&s, schedule, 0, 0);
        uint32_t all = 0;
        for (int i = 0; i < s.stages; i++) all += out[i] ? out[i] : 1000;
        CHECK_MSG((int)all == s.units && step <= before && step >= least, "%u units, %g, %g, %g",
                  all, step, before, least);
        better += step < before;
        above += step / least - 1;
        dtrain_pipeline_destroy(schedule);
    }
    CHECK_MSG(better > ROUNDS / 4 && above / ROUNDS < 0.02, "%d are better, %.4f above the least",
              better, above / ROUNDS);
}

static void refuses(const char *part, const dtrain_pipeline_costs *costs, size_t units, int stages,
                    uint32_t *out)
{
    CHECK(balance_units(costs, units, NULL, stages, 1, out) == DTRAIN_ERROR_ARGUMENT);
    CHECK_MSG(strstr(dtrain_last_error(), part) != NULL, "\"%s\" is not in \"%s\"", part,
              dtrain_last_error());
}

static void test_refusals(void)
{
    dtrain_pipeline_costs costs[3] = {{1, 1, 1, 0}, {1, 1, 1, 0}, {1, 1, 1, 0}};
    uint32_t out[4];
    refuses("expected costs", NULL, 3, 2, out);
    refuses("expected costs", costs, 3, 2, NULL);
    refuses("0 ranks", costs, 3, 0, out);
    refuses("3 units leave a stage of 4 empty", costs, 3, 4, out);
    costs[1].backward = NAN;
    refuses("unit 1 of 3 costs", costs, 3, 2, out);
    costs[1].backward = -9;
    refuses("unit 1 of 3 costs -7", costs, 3, 2, out);
    costs[1].backward = 1e200;
    refuses("from 0 to 1e100", costs, 3, 2, out);
}

/* ---- dtrain_trainer_unit_costs: a model by hand --------------------------------------------------- */

enum { ROWS = 256, VOCAB = 1024, WIDTH = 512, INNER = 1024, BLOCKS = 5, PARAMS = 3 + 4 * BLOCKS };

typedef struct model {
    dtrain_param params[PARAMS];
    int32_t tokens[ROWS], targets[ROWS];
    uint32_t every; /* activation checkpointing */
    int blocks;
    size_t param_count;
    dtrain_result result;
    dtrain_pipeline_costs costs[PARAMS];
    uint64_t kept[PARAMS];
    size_t units;
} model;

static void declare(model *m, int i, uint32_t unit, int64_t rows, int64_t columns)
{
    dtrain_param *p = &m->params[i];
    p->name = "p";
    p->unit = unit;
    p->shape[0] = rows, p->shape[1] = columns;
}

/* tokens -> embedding -> blocks of layer norm, two linear layers, residual -> head, tied, and cross-entropy */
static dtrain_tensor *model_loss(dtrain_tape *t, void *user)
{
    model *m = (model *)user;
    dtrain_param *p = m->params;
    const int64_t rows = ROWS;
    dtrain_tensor *x = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, m->tokens, false), *h;
    dtrain_tape_unit(t, 5);
    x = dtrain_embedding(t, x, p++, NULL);
    for (int block = 0; block < m->blocks; block++, p += 4) {
        dtrain_tape_unit(t, 20 + (uint32_t)block);
        h = dtrain_layernorm(t, x, NULL, &p[0], &p[1], 1e-5f);
        h = dtrain_linear(t, h, &p[2], NULL, DTRAIN_ACTIVATION_NONE);
        h = dtrain_linear(t, h, &p[3], NULL, DTRAIN_ACTIVATION_NONE);
        x = dtrain_add(t, x, h);
    }
    dtrain_tape_unit(t, 9);
    x = dtrain_linear(t, x, &p[0], NULL, DTRAIN_ACTIVATION_NONE);
    h = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, m->targets, false);
    return dtrain_cross_entropy(t, x, h, 0, 0);
}

static dtrain_result no_batch(void *user)
{
    (void)user;
    return DTRAIN_OK;
}

static int measure(dtrain_world *world, void *user)
{
    model *m = (model *)user;
    dtrain_trainer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.loss = model_loss, desc.next_batch = no_batch, desc.user = m;
    desc.recompute_every = m->every;
    m->result = dtrain_trainer_unit_costs(world, &desc, m->params, m->param_count, m->costs,
                                          m->kept, &m->units);
    desc.next_batch = NULL;
    CHECK(dtrain_trainer_unit_costs(world, &desc, m->params, m->param_count, m->costs, NULL,
                                    &m->units) == DTRAIN_ERROR_UNSUPPORTED);
    desc.next_batch = no_batch;
    CHECK(dtrain_trainer_unit_costs(world, &desc, m->params, m->param_count, NULL, NULL,
                                    &m->units) == DTRAIN_ERROR_ARGUMENT);
    if (m->result == DTRAIN_OK) /* the failures above may have changed what was found */
        m->result = dtrain_trainer_unit_costs(world, &desc, m->params, m->param_count, m->costs,
                                              m->kept, &m->units);
    return 0;
}

static model *measured(int blocks, uint32_t every)
{
    static model m;
    dtrain_launch_desc launch;
    memset(&m, 0, sizeof m);
    memset(&launch, 0, sizeof launch);
    declare(&m, 0, 5, VOCAB, WIDTH);
    for (int block = 0; block < blocks; block++) {
        const uint32_t unit = 20 + (uint32_t)block;
        declare(&m, 4 * block + 1, unit, WIDTH, 0), declare(&m, 4 * block + 2, unit, WIDTH, 0);
        declare(&m, 4 * block + 3, unit, INNER, WIDTH),
            declare(&m, 4 * block + 4, unit, WIDTH, INNER);
    }
    declare(&m, 4 * blocks + 1, 9, 0, 0), declare(&m, 4 * blocks + 2, 9, WIDTH, 0);
    m.params[4 * blocks + 1].alias_of = &m.params[0];
    m.param_count = (size_t)(4 * blocks + 3);
    m.every = every, m.blocks = blocks;
    launch.rank_count = 1;
    launch.mode = DTRAIN_LAUNCH_THREADS;
    CHECK(dtrain_launch(&launch, measure, &m, NULL) == DTRAIN_OK);
    CHECK_MSG(m.result == DTRAIN_OK, "%s", dtrain_last_error());
    CHECK(m.units == (size_t)blocks + 2);
    return &m;
}

/* On the cpu a byte counts as 2 operations; each product here has more of these than bytes. */
static void test_costs_of_a_model(void)
{
    const model *m = measured(1, 0);
    const double rows = ROWS, x = 4.0 * rows * WIDTH, logits = 4.0 * rows * VOCAB;
    const double index = 4.0 * rows;
    const double product = 2.0 * rows * WIDTH * INNER, head = 2.0 * rows * WIDTH * VOCAB;
    const dtrain_pipeline_costs *c = m->costs;
    CHECK_CLOSE(c[0].forward, 2 * (index + x), 0);
    CHECK_CLOSE(c[0].backward, 0, 0);
    CHECK_CLOSE(c[0].weight, 2 * (index + x), 0);
    CHECK_CLOSE(c[1].forward, 2 * product + 2 * (2 * x + 3 * x), 0); /* two products, norm, sum */
    CHECK_CLOSE(c[1].backward, 2 * product + 2 * 2 * (2 * x + 3 * x), 0);
    CHECK_CLOSE(c[1].weight, 2 * product, 0);
    CHECK_CLOSE(c[2].forward, head + 2 * (logits + index + 4), 0);
    CHECK_CLOSE(c[2].backward, head + 2 * 2 * (logits + index + 4), 0);
    CHECK_CLOSE(c[2].weight, head, 0);
    CHECK_CLOSE((double)m->kept[0], x, 0);
    CHECK_CLOSE((double)m->kept[1], 3 * x + 4 * rows * INNER + 2 * 4 * rows, 0);
}

/* What is made again belongs to backward, which is not divided then. */
static void test_costs_of_checkpointing(void)
{
    const model *m = measured(BLOCKS, 1);
    const double product = 2.0 * ROWS * WIDTH * INNER;
    CHECK(m->costs[1].weight == 0);
    CHECK_MSG(m->costs[1].backward > 5 * product && m->costs[1].backward < 5.5 * product,
              "backward takes %g products, expected 2 for each layer and 1 that is made again",
              m->costs[1].backward / product);
    CHECK(m->costs[1].forward > 2 * product && m->costs[1].forward < 2.5 * product);
    CHECK((double)m->kept[1] < 3 * 4.0 * ROWS * WIDTH);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_all_partitions);
    RUN(test_ranks_of_two_stages);
    RUN(test_refusals);
    RUN(test_costs_of_a_model);
    RUN(test_costs_of_checkpointing);
    return test_summary();
}
