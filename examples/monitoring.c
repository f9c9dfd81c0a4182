/* monitoring.c: a run that people and systems watch: Prometheus, TensorBoard, and a figure that the program adds.
 *
 *   build:   cc -O2 -I. examples/monitoring.c -o monitoring -lm -lpthread
 *   run:     ./monitoring [FILE] [DIRECTORY]
 *            FILE is NAME.prom in the directory of node_exporter's textfile collector (run.prom);
 *            DIRECTORY is for tensorboard --logdir (run.tensorboard)
 *   expect:
 *     300 steps, loss 0.057, perplexity 1.059
 *     tensorboard: 313 records
 *     prometheus: 301 records
 *
 * TensorBoard and JSON lines are built in (dtrain_metrics_desc). Prometheus is a sink, tools/prometheus.h, which calls
 * public functions only: copy it as a start for a sink to another system. On GPUs tools/nvml.h adds their load, memory
 * and temperature to a record, as `perplexity` is added below. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "tools/prometheus.h"

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
static dtrain_result next_batch(void *user)
{
    model *m = user;
    for (uint64_t i = 0; i < 2 * BATCH; i++)
        m->x[i] = dtrain_random_normal(1, m->rank, 2 * BATCH * m->batches + i);
    for (int b = 0; b < BATCH; b++) m->y[b] = m->x[2 * b + 1] > m->x[2 * b];
    m->batches++;
    return DTRAIN_OK;
}

static dtrain_tensor *loss(dtrain_tape *tape, void *user)
{
    model *m = user;
    const int64_t shape[2] = {BATCH, 2};
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, m->x, false);
    dtrain_tensor *y = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, m->y, false);
    x = dtrain_linear(tape, x, &m->params[0], &m->params[1], DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(tape, x, y, 0, 0);
}

/* Every rank runs this function; user is the paths for Prometheus and TensorBoard. */
static int train(dtrain_world *world, void *user)
{
    char *const *paths = user;
    model m = {.params = {{.name = "weight", .shape = {2, 2}}, {.name = "bias", .shape = {2}}},
               .rank = (uint64_t)dtrain_world_rank(world)};
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_trainer_desc desc = {
        .tokens = BATCH, .next_batch = next_batch, .loss = loss, .user = &m, .schedule.lr = 0.05f};
    dtrain_trainer *trainer;
    dtrain_metrics *metrics;
    CHECK(dtrain_strategy_create(world, m.params, 2, NULL, &desc.strategy));
    CHECK(dtrain_optimizer_create(world, desc.strategy, &adamw, &desc.optimizer));
    CHECK(dtrain_trainer_create(world, &desc, &trainer));
    prometheus file = {.path = paths[0]};
    const dtrain_metrics_sink sink = prometheus_sink(&file);
    const dtrain_metrics_desc report = {.run_name = "monitoring",
                                        .tensorboard_dir = paths[1],
                                        .histogram_every = 100,
                                        .trainer = trainer,
                                        .sinks = &sink,
                                        .sink_count = 1};
    CHECK(dtrain_metrics_create(world, &report, &metrics));
    dtrain_step_record record;
    for (int step = 0; step < STEPS; step++) {
        CHECK(dtrain_trainer_step(trainer, &record));
        CHECK(dtrain_record_add(&record, "perplexity", "", exp(record.loss)));
        CHECK(dtrain_metrics_step(metrics, &record));
    }
    CHECK(dtrain_metrics_finish(metrics)); /* an error if a sink has lost anything */
    dtrain_metrics_info written;
    dtrain_metrics_query(metrics, &written);
    if (m.rank == 0)
        printf("%d steps, loss %.3f, perplexity %.3f\n", STEPS, record.loss,
               dtrain_record_value(&record, "perplexity"));
    for (size_t i = 0; i < written.sink_count; i++) { /* on rank 0 only */
        printf("%s: %d records\n", written.sinks[i].name, (int)written.sinks[i].written);
        if (written.sinks[i].written < STEPS) return 1;
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
    char prom[] = "run.prom", board[] = "run.tensorboard";
    char *paths[] = {argc > 1 ? argv[1] : prom, argc > 2 ? argv[2] : board};
    if (dtrain_launch(&desc, train, paths, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "monitoring: %s\n", dtrain_last_error());
    return 1;
}
