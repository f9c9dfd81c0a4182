/* own_figure.c: a figure of the program's own, added to each step in one line, in everything that shows the run.
 *
 *   build:   cc -O2 -I. examples/own_figure.c -o own_figure -lm -lpthread
 *   run:     ./own_figure [FILE] [FOLDER]       for JSON lines and TensorBoard
 *   expect:
 *     step 100: loss 0.1045, perplexity 1.110
 *     step 200: loss 0.0996, perplexity 1.105
 *     step 300: loss 0.0572, perplexity 1.059
 *
 * A step's record is an array of {name, unit, value}: what the trainer has measured, then what the program adds. Every
 * writer walks it, and so does a sink, which is one function. FILE has the key "perplexity", TensorBoard the tag
 * added/perplexity. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <math.h>
#include <stdio.h>

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

enum { BATCH = 32, STEPS = 300 };

typedef struct model {
    dtrain_param params[2];
    uint64_t rank, batches;
    float x[2 * BATCH];
    int32_t y[BATCH];
} model;

/* Draw points; those above the diagonal are of class 1. */
static dtrain_tensor *loss(dtrain_tape *tape, void *user)
{
    model *m = user;
    for (uint64_t i = 0; i < 2 * BATCH; i++)
        m->x[i] = dtrain_random_normal(1, m->rank, 2 * BATCH * m->batches + i);
    for (int b = 0; b < BATCH; b++) m->y[b] = m->x[2 * b + 1] > m->x[2 * b];
    m->batches++;
    const int64_t shape[2] = {BATCH, 2};
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, m->x, false);
    dtrain_tensor *y = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, m->y, false);
    x = dtrain_linear(tape, x, &m->params[0], &m->params[1], DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(tape, x, y, 0, 0);
}

/* A sink: print the figures that the program has added, which have no group. */
static dtrain_result show(void *user, const dtrain_metrics_sample *sample)
{
    (void)user;
    if (sample->moment != DTRAIN_METRICS_STEP || sample->record->step % 100) return DTRAIN_OK;
    printf("step %d: loss %.4f", (int)sample->record->step, sample->record->loss);
    for (size_t i = 0; i < sample->count; i++)
        if (!strchr(sample->figures[i].name, '/'))
            printf(", %s %.3f", sample->figures[i].name, sample->figures[i].value);
    printf("\n");
    return DTRAIN_OK;
}

static int train(dtrain_world *world, void *report)
{
    model m = {.params = {{.name = "weight", .shape = {2, 2}}, {.name = "bias", .shape = {2}}},
               .rank = (uint64_t)dtrain_world_rank(world)};
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_trainer_desc desc = {.loss = loss, .user = &m, .schedule.lr = 0.05f};
    dtrain_trainer *trainer;
    dtrain_metrics *metrics;
    CHECK(dtrain_strategy_create(world, m.params, 2, NULL, &desc.strategy));
    CHECK(dtrain_optimizer_create(world, desc.strategy, &adamw, &desc.optimizer));
    CHECK(dtrain_trainer_create(world, &desc, &trainer));
    CHECK(dtrain_metrics_create(world, report, &metrics));
    for (int step = 0; step < STEPS; step++) {
        dtrain_step_record record;
        CHECK(dtrain_trainer_step(trainer, &record));
        CHECK(dtrain_record_add(&record, "perplexity", "", exp(record.loss)));
        CHECK(dtrain_metrics_step(metrics, &record));
    }
    dtrain_metrics_destroy(metrics);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(desc.optimizer);
    dtrain_strategy_destroy(desc.strategy);
    return 0;
}

int main(int argc, char **argv)
{
    const dtrain_launch_desc desc = {.default_rank_count = 2};
    const dtrain_metrics_sink sink = {.name = "show", .take = show};
    dtrain_metrics_desc report = {.jsonl_path = argc > 1 ? argv[1] : "own_figure.jsonl",
                                  .tensorboard_dir = argc > 2 ? argv[2] : "own_figure.tensorboard",
                                  .sinks = &sink,
                                  .sink_count = 1};
    if (dtrain_launch(&desc, train, &report, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "own_figure: %s\n", dtrain_last_error());
    return 1;
}
