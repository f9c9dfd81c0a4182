/* parallel_3d.c: the GPT of gpt.c on any number of ranks, in any layout of three axes: ranks of the tensor axis share
 * each layer, ranks of the pipeline axis have different layers, and along the data axis there are replicas.
 *
 *   build:   cc -O2 -I. examples/parallel_3d.c -o parallel_3d -lm -lpthread
 *   run:     ./parallel_3d                                          eight ranks, two along each axis
 *            ./parallel_3d --ranks 1 --tensor 1 --pipeline 1        the same losses
 *            ./parallel_3d --ranks 4 --tensor 1 --schedule interleaved --chunks 2
 *            ./parallel_3d --data shakespeare.txt --strategy zero1
 *   flags:   --data FILE  --steps N  --ranks N  --tensor N  --pipeline N (what they leave is the data axis)
 *            --schedule 1f1b|gpipe|interleaved|zb_h1  --chunks N (stages of a rank)  --strategy ddp|zero1
 *            --batch N (samples of a step, all ranks together)  --micro-batches N (of a step)
 *   expect:
 *     tensor 2 x data 2 x pipeline 2
 *     pipeline 0: ranks 0+1 2+3
 *     pipeline 1: ranks 4+5 6+7
 *     rank 0   F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
 *     rank 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .
 *     step   10  loss 3.208
 *     step  100  loss 0.403
 *     rank 0 has 223616 of the 834304 parameters
 *
 * Layouts and schedules change the losses only by the order in which sums are rounded. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "examples/gpt_model.h"
#include "tools/schedule.h"

typedef struct settings {
    const char *data;
    uint32_t kind;
    int tensor, pipeline, batch, micro_batches, steps;
    dtrain_pipeline_desc line;
} settings;

/* Print who has what, and what each rank of the pipeline axis does when. */
static int show(const dtrain_mesh *mesh, const dtrain_pipeline_desc *line, int micro_batches)
{
    static char drawing[65536];
    dtrain_mesh_info at;
    dtrain_pipeline_schedule *schedule;
    dtrain_mesh_query(mesh, &at);
    printf("tensor %d x data %d x pipeline %d\n", at.tensor, at.data, at.pipeline);
    for (int i = 0; i < at.ranks; i++) { /* + between ranks of a tensor axis */
        const int t = i % at.tensor, d = i / at.tensor % at.data, p = i / at.tensor / at.data;
        if (t + d == 0) printf("pipeline %d: ranks", p);
        printf("%s%d", t ? "+" : " ", i);
        if (t + 1 == at.tensor && d + 1 == at.data) printf("\n");
    }
    if (at.pipeline == 1) return 0;
    CHECK(dtrain_pipeline_create(line, at.pipeline, micro_batches, &schedule));
    CHECK(schedule_draw(schedule, drawing, sizeof drawing, NULL));
    dtrain_pipeline_destroy(schedule);
    return printf("\n%s\n", drawing) < 0;
}

/* Every rank runs this function. */
static int train(dtrain_world *world, void *user)
{
    const settings *s = user;
    const int micros = s->micro_batches;
    model m;
    batch learn = {.m = &m};
    dtrain_mesh *mesh;
    dtrain_mesh_info at;
    dtrain_dataset *data;
    dtrain_strategy *strategy;
    dtrain_strategy_info held;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;

    const dtrain_mesh_desc axes = {.tensor = s->tensor, .pipeline = s->pipeline};
    CHECK(dtrain_mesh_create(world, &axes, &mesh));
    dtrain_mesh_query(mesh, &at);
    declare_model(&m);
    const int count = s->batch / at.data / micros; /* samples of a micro-batch */
    if (count < 1 || count * at.data * micros != s->batch)
        CHECK(dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                          "--batch %d should be a multiple of %d replicas x %d micro-batches",
                          s->batch, at.data, micros));
    if (at.rank == 0 && show(mesh, &s->line, micros)) return 1;

    /* With the mesh, a loader deals samples to the data axis: ranks of one replica read the same. */
    CHECK(open_text(world, s->data, DTRAIN_DATA_BYTES, 0, &data));
    const dtrain_loader_desc window = {
        .dataset = data, .batch = (uint32_t)count, .sequence = SEQ, .mesh = mesh};
    CHECK(open_windows(world, &window, &learn.text));
    const dtrain_strategy_desc where = {.kind = s->kind, .mesh = mesh, .pipeline = &s->line};
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    CHECK(dtrain_strategy_create(world, m.params, PARAMS, &where, &strategy));
    CHECK(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    const dtrain_trainer_desc how = {.micro_batches = (uint32_t)micros,
                                     .clip = 1,
                                     .schedule = {.lr = 2e-3f, .warmup_steps = 10},
                                     .strategy = strategy,
                                     .optimizer = optimizer,
                                     .next_batch = next_batch,
                                     .loss = loss,
                                     .user = &learn};
    CHECK(dtrain_trainer_create(world, &how, &trainer));
    for (int step = 1; step <= s->steps; step++) {
        dtrain_step_record record;
        CHECK(dtrain_trainer_step(trainer, &record));
        if (at.rank == 0 && (step == 1 || step % ((s->steps + 9) / 10) == 0))
            printf("step %4d  loss %.3f\n", step, record.loss);
    }
    dtrain_strategy_query(strategy, &held);
    if (at.rank == 0)
        printf("rank 0 has %d of the %d parameters\n", (int)(held.value_bytes / sizeof(float)),
               (int)held.total_elements);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    close_windows(&learn.text);
    dtrain_dataset_close(data);
    dtrain_mesh_destroy(mesh);
    return 0;
}

int main(int argc, char **argv)
{
    enum { DATA, SCHEDULE, STRATEGY, RANKS, TENSOR, PIPELINE, CHUNKS, BATCH, MICROS, STEPS, FLAGS };
    static const char *const flags[] = {"--data",          "--schedule", "--strategy", "--ranks",
                                        "--tensor",        "--pipeline", "--chunks",   "--batch",
                                        "--micro-batches", "--steps",    NULL};
    static const char *const schedules[] = {"1f1b", "gpipe", "interleaved", "zb_h1", NULL};
    static const char *const kinds[] = {"ddp", "zero1", NULL};
    const char *value[FLAGS] = {NULL, "1f1b", "ddp", NULL, "2", "2", "0", "16", "4", "100"};
    int number[FLAGS] = {0};
    if (!read_flags("parallel_3d", argc, argv, flags, value)) return 2;
    const int schedule = find("parallel_3d", "--schedule", value[SCHEDULE], schedules);
    const int kind = find("parallel_3d", "--strategy", value[STRATEGY], kinds);
    if (schedule < 0 || kind < 0) return 2;
    for (int f = RANKS; f < FLAGS; f++) {
        if (!value[f]) continue;
        const long given = strtol(value[f], NULL, 10);
        if (given < (f != CHUNKS) || given > 1000000) {
            fprintf(stderr, "parallel_3d: %s takes a positive number\n", flags[f]);
            return 2;
        }
        number[f] = (int)given;
    }
    if (number[PIPELINE] == 1 && (schedule || number[CHUNKS])) {
        fprintf(stderr, "parallel_3d: --schedule and --chunks do nothing with --pipeline 1\n");
        return 2;
    }
    settings s = {.data = value[DATA],
                  .kind = DTRAIN_STRATEGY_DDP + (uint32_t)kind,
                  .tensor = number[TENSOR],
                  .pipeline = number[PIPELINE],
                  .batch = number[BATCH],
                  .micro_batches = number[MICROS],
                  .steps = number[STEPS],
                  .line = {.kind = (uint32_t)schedule, .chunks = (uint32_t)number[CHUNKS]}};
    /* Without --ranks: the number of torchrun, mpirun or srun, and without a launcher eight. */
    const dtrain_launch_desc run = {.default_rank_count = 8, .rank_count = (uint32_t)number[RANKS]};
    if (dtrain_launch(&run, train, &s, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "parallel_3d: %s\n", dtrain_last_error());
    return 1;
}
