/* monitor_run.c: trains a small model with every sink of the metrics, and dumps what histograms are made of, for
 * tests/long/test_monitor.sh.
 *
 *     monitor_run DIRECTORY RANKS threads|processes STRATEGY FIRST END
 *
 * Steps FIRST + 1 to END; with FIRST > 0 everything is appended to. After the steps that are divisible by HISTOGRAMS
 * rank 0 writes DIRECTORY/weights-STEP-NAME, and every rank that holds gradients that no lower rank holds
 * DIRECTORY/gradients-STEP-NAME-OFFSET: raw fp32. With MONITOR_LOCALE the program runs under that locale. */
#include "dtrain.h"
#include "tools/prometheus.h"
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 16, WIDTH = 12, INNER = 24, BATCH = 6, HISTOGRAMS = 4, PARAMS = 5 };

#define TRY(call)                                       \
    do {                                                \
        const dtrain_result try_result = (call);        \
        if (try_result != DTRAIN_OK) return try_result; \
    } while (0)

typedef struct settings {
    const char *directory;
    int first, end;
    uint32_t kind;
} settings;

typedef struct job {
    const settings *s;
    int rank, ranks;
    int64_t batches;
    dtrain_param params[PARAMS];
    int32_t tokens[BATCH], targets[BATCH];
    long custom_calls;
} job;

static dtrain_result next_batch(void *user)
{
    job *j = (job *)user;
    const int64_t first = (j->batches++ * j->ranks + j->rank) * BATCH;
    for (int i = 0; i < BATCH; i++) {
        j->tokens[i] = (int32_t)((first + i) % VOCAB);
        j->targets[i] = (int32_t)((7 * (first + i) + 3) % VOCAB);
    }
    return DTRAIN_OK;
}

static dtrain_tensor *loss(dtrain_tape *tape, void *user)
{
    job *j = (job *)user;
    const int64_t shape[2] = {BATCH, 1};
    dtrain_param *p = j->params;
    dtrain_tensor *tokens = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 2, shape, j->tokens, false);
    dtrain_tensor *targets = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, j->targets, false);
    dtrain_tape_unit(tape, 0);
    dtrain_tensor *h = dtrain_embedding(tape, tokens, &p[0], NULL);
    dtrain_tape_unit(tape, 1);
    h = dtrain_linear(tape, h, &p[1], &p[2], DTRAIN_ACTIVATION_GELU);
    dtrain_tape_unit(tape, 2);
    h = dtrain_linear(tape, h, &p[3], &p[4], DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(tape, h, targets, 0, 0);
}

static void declare(dtrain_param *p, const char *name, uint32_t unit, int64_t rows, int64_t columns)
{
    memset(p, 0, sizeof *p);
    p->name = name;
    p->unit = unit;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->init = columns ? DTRAIN_INIT_NORMAL : DTRAIN_INIT_ZERO;
    p->init_scale = 0.3f;
}

/* Writes raw fp32 to a file of its own. */
static dtrain_result dump(const char *path, const float *values, int64_t count)
{
    FILE *file = fopen(path, "wb");
    const bool good = file && fwrite(values, sizeof *values, (size_t)count, file) == (size_t)count;
    return file && fclose(file) == 0 && good ? DTRAIN_OK : DTRAIN_ERROR_FILE;
}

static dtrain_result dump_all(const job *j, dtrain_strategy *strategy, int64_t step)
{
    const dtrain_shard *shards;
    dtrain_strategy_info info;
    size_t count;
    char path[600];
    enum { MOST = VOCAB * INNER * WIDTH };
    for (size_t i = 0; i < PARAMS; i++) {
        float *own = (float *)malloc(MOST * sizeof(float));
        if (!own) return DTRAIN_ERROR_MEMORY;
        const dtrain_result result = dtrain_strategy_read(strategy, i, own);
        snprintf(path, sizeof path, "%s/weights-%lld-%s", j->s->directory, (long long)step,
                 j->params[i].name);
        if (result == DTRAIN_OK && j->rank == 0) TRY(dump(path, own, j->params[i].count));
        free(own);
        TRY(result);
    }
    dtrain_strategy_query(strategy, &info);
    TRY(dtrain_strategy_shards(strategy, &shards, &count));
    for (size_t i = 0; i < count && j->rank < info.shard_ranks; i++) {
        if (shards[i].count == shards[i].param->count && info.shard_ranks == 1 && j->rank > 0)
            continue;
        snprintf(path, sizeof path, "%s/gradients-%lld-%s-%06lld", j->s->directory, (long long)step,
                 shards[i].param->name, (long long)shards[i].offset);
        TRY(dump(path, shards[i].grad, shards[i].count));
    }
    return DTRAIN_OK;
}

/* Count the call, and compare a figure with the mean of the ranks' figures that it is made of. */
static dtrain_result count_calls(void *user, const dtrain_metrics_sample *sample)
{
    job *j = (job *)user;
    double mean = 0;
    if (sample->moment != DTRAIN_METRICS_STEP) return DTRAIN_OK;
    j->custom_calls++;
    for (size_t i = 0; i < sample->count; i++) {
        const dtrain_figure *figure = &sample->figures[i];
        if (strcmp(figure->name, "time/forward_ms") != 0) continue;
        for (int r = 0; r < j->ranks; r++) mean += (double)figure->ranks[r] / j->ranks;
        if (fabs(figure->value - mean) < 1e-6 * (1 + mean)) return DTRAIN_OK;
    }
    return dtrain_fail(DTRAIN_ERROR_NUMERIC, "forward_ms is not %g", mean);
}

static dtrain_result train(dtrain_world *world, job *j)
{
    const settings *s = j->s;
    char jsonl[512], prom[512], tensorboard[512];
    dtrain_strategy_desc how;
    dtrain_trainer_desc desc;
    dtrain_metrics_desc report;
    dtrain_metrics_sink sinks[2];
    prometheus file;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_metrics *metrics;
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    memset(&how, 0, sizeof how);
    memset(&desc, 0, sizeof desc);
    memset(&report, 0, sizeof report);
    memset(sinks, 0, sizeof sinks);
    memset(&file, 0, sizeof file);
    how.kind = s->kind;
    how.node_size = s->kind == DTRAIN_STRATEGY_HYBRID_SHARD ? 2 : 0;
    how.init_seed = 5;
    TRY(dtrain_strategy_create(world, j->params, PARAMS, &how, &strategy));
    TRY(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    desc.tokens = BATCH;
    desc.clip = 1;
    desc.schedule.lr = 0.01f;
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    desc.next_batch = next_batch;
    desc.loss = loss;
    desc.user = j;
    TRY(dtrain_trainer_create(world, &desc, &trainer));
    snprintf(jsonl, sizeof jsonl, "%s/log.jsonl", s->directory);
    snprintf(prom, sizeof prom, "%s/run.prom", s->directory);
    snprintf(tensorboard, sizeof tensorboard, "%s/tensorboard/run", s->directory);
    sinks[0].every_rank = true;
    sinks[0].name = "counter";
    sinks[0].take = count_calls;
    sinks[0].user = j;
    file.path = prom;
    sinks[1] = prometheus_sink(&file);
    report.jsonl_path = jsonl;
    report.tensorboard_dir = tensorboard;
    report.append = s->first > 0;
    report.first_step = s->first ? s->first + 1 : 0;
    report.histogram_every = HISTOGRAMS;
    report.run_name = "a \"run\" \\ of\ntwo lines";
    report.config = "# configuration\nlr = 0.01\n";
    report.hparams = "lr=0.01\nbatch=6\nstrategy=ddp\nshuffle=true\nnote=a=b, \xc3\xa4\n";
    report.peak_flops = 1e9;
    report.trainer = trainer;
    report.sinks = sinks;
    report.sink_count = 2;
    TRY(dtrain_metrics_create(world, &report, &metrics));
    for (int64_t step = 1; step <= s->end; step++) {
        dtrain_step_record record;
        TRY(dtrain_trainer_step(trainer, &record));
        if (step <= s->first) continue; /* as a run that loads a checkpoint comes back to it */
        if (step % 5 == 0)
            TRY(dtrain_trainer_evaluate(trainer, next_batch, j, 2, &record.val_loss));
        TRY(dtrain_metrics_step(metrics, &record));
        if (step % HISTOGRAMS == 0) TRY(dump_all(j, strategy, step));
    }
    if (j->custom_calls != s->end - s->first)
        return dtrain_fail(DTRAIN_ERROR_NUMERIC, "%ld calls", j->custom_calls);
    TRY(dtrain_metrics_finish(metrics));
    dtrain_metrics_destroy(metrics);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return DTRAIN_OK;
}

static int rank_main(dtrain_world *world, void *user)
{
    job *j = (job *)calloc(1, sizeof *j);
    if (!j) return 1;
    j->s = (const settings *)user;
    j->rank = dtrain_world_rank(world);
    j->ranks = dtrain_world_size(world);
    declare(&j->params[0], "wte", 0, VOCAB, WIDTH);
    declare(&j->params[1], "up.weight", 1, INNER, WIDTH);
    declare(&j->params[2], "up.bias", 1, INNER, 0);
    declare(&j->params[3], "head.weight", 2, VOCAB, INNER);
    declare(&j->params[4], "head.bias", 2, VOCAB, 0);
    const dtrain_result result = train(world, j);
    free(j);
    if (result != DTRAIN_OK) fprintf(stderr, "%s\n", dtrain_last_error());
    return result != DTRAIN_OK;
}

int main(int argc, char **argv)
{
    static const char *const kinds[] = {"default",    "ddp",   "zero1",       "shard_grad_op",
                                        "full_shard", "zero3", "hybrid_shard"};
    dtrain_launch_desc launch;
    settings s;
    if (argc != 7 || (getenv("MONITOR_LOCALE") && !setlocale(LC_ALL, getenv("MONITOR_LOCALE")))) {
        fprintf(stderr, "monitor_run: six arguments, and a locale that is there\n");
        return 2;
    }
    memset(&launch, 0, sizeof launch);
    memset(&s, 0, sizeof s);
    s.directory = argv[1];
    launch.rank_count = (uint32_t)atoi(argv[2]);
    launch.mode = strcmp(argv[3], "threads") == 0 ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES;
    for (uint32_t kind = 1; kind < 7; kind++)
        if (strcmp(argv[4], kinds[kind]) == 0) s.kind = kind;
    s.first = atoi(argv[5]);
    s.end = atoi(argv[6]);
    if (dtrain_launch(&launch, rank_main, &s, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "%s\n", dtrain_last_error());
    return 1;
}
