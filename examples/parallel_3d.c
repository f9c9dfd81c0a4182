/* parallel_3d.c: the GPT of gpt.c on any number of ranks, in any layout of three axes: ranks of the tensor axis share
 * each layer, those of the pipeline axis have different layers, and the rest, the data axis, are replicas of all that.
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
 * Layouts and schedules change the order in which sums are rounded, and nothing else about the losses. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "tools/schedule.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, HEADS = 4, CHANNELS = 128, SEQ = 64, VOCAB = 256, MOST = 64 /* samples */ };

/* The model is that of gpt.c, where it is explained. */
enum { WTE, WPE, BLOCKS, BLOCK = 12, LNF_W = BLOCKS + LAYERS * BLOCK, LNF_B, HEAD, PARAMS };
enum { LN1_W, LN1_B, QKV_W, QKV_B, PROJ_W, PROJ_B, LN2_W, LN2_B, FC_W, FC_B, OUT_W, OUT_B };

/* The tensor axis: how its ranks share a parameter. */
enum { WHOLE, ROWS, COLUMNS, QKV_ROWS, HEAD_COLUMNS };
static const dtrain_cut cuts[] = {
    [ROWS] = {.axis = DTRAIN_CUT_ROWS},
    [COLUMNS] = {.axis = DTRAIN_CUT_COLUMNS},
    [QKV_ROWS] = {.axis = DTRAIN_CUT_ROWS, .components = 3, .parts = HEADS},
    [HEAD_COLUMNS] = {.axis = DTRAIN_CUT_COLUMNS, .parts = HEADS},
};
/* The parameters of a block: shapes in multiples of CHANNELS; 0 columns: a vector. */
static const struct {
    const char *name;
    int rows, columns, cut;
} block[BLOCK] = {
    {"ln1.weight", 1, 0, WHOLE},         {"ln1.bias", 1, 0, WHOLE},
    {"qkv.weight", 3, 1, QKV_ROWS},      {"qkv.bias", 3, 0, QKV_ROWS},
    {"proj.weight", 1, 1, HEAD_COLUMNS}, {"proj.bias", 1, 0, WHOLE},
    {"ln2.weight", 1, 0, WHOLE},         {"ln2.bias", 1, 0, WHOLE},
    {"fc.weight", 4, 1, ROWS},           {"fc.bias", 4, 0, ROWS},
    {"out.weight", 1, 4, COLUMNS},       {"out.bias", 1, 0, WHOLE},
};

/* A rank's model and micro-batch. */
typedef struct job {
    dtrain_param params[PARAMS]; /* in forward order; every rank declares all of them */
    char names[PARAMS][32];
    dtrain_loader *loader;
    int64_t count;
    int32_t inputs[MOST * SEQ], targets[MOST * SEQ]; /* (count, SEQ): targets are one byte later */
} job;

/* The pipeline axis: units, in their order, are what is divided among its stages. */
static void declare(job *j, int index, int unit, const char *name, int64_t rows, int64_t columns,
                    float scale, int cut)
{
    dtrain_param *p = &j->params[index];
    snprintf(j->names[index], sizeof j->names[index], "%d.%s", unit, name);
    p->name = j->names[index];
    p->unit = (uint32_t)unit;
    p->shape[0] = rows, p->shape[1] = columns;
    p->init = columns ? DTRAIN_INIT_NORMAL : DTRAIN_INIT_CONSTANT;
    p->init_scale = scale;
    p->cut = cuts[cut];
}

static void declare_model(job *j)
{
    const float narrow = 0.02f / sqrtf(2.0f * LAYERS);
    memset(j, 0, sizeof *j);
    declare(j, WTE, 0, "wte", VOCAB, CHANNELS, 0.02f, ROWS);
    declare(j, WPE, 0, "wpe", SEQ, CHANNELS, 0.02f, WHOLE);
    for (int l = 0; l < LAYERS; l++)
        for (int i = 0; i < BLOCK; i++) {
            float scale = i == PROJ_W || i == OUT_W ? narrow : 0.02f;
            if (!block[i].columns) scale = i == LN1_W || i == LN2_W ? 1 : 0;
            declare(j, BLOCKS + l * BLOCK + i, l + 1, block[i].name, block[i].rows * CHANNELS,
                    block[i].columns * CHANNELS, scale, block[i].cut);
        }
    declare(j, LNF_W, LAYERS + 1, "lnf.weight", CHANNELS, 0, 1, WHOLE);
    declare(j, LNF_B, LAYERS + 1, "lnf.bias", CHANNELS, 0, 0, WHOLE);
    declare(j, HEAD, LAYERS + 1, "head", 0, 0, 0, WHOLE);
    j->params[HEAD].alias_of = &j->params[WTE]; /* first and last stage have a copy of it each */
}

static dtrain_result next_batch(void *user)
{
    job *j = (job *)user;
    return dtrain_loader_next(j->loader, j->inputs, j->targets);
}

/* Build the loss of the whole model, on every rank: the tape runs only the units of the stage whose
 * turn it is, and takes from messages what these read of other stages. */
static dtrain_tensor *loss(dtrain_tape *t, void *user)
{
    job *j = (job *)user;
    const int64_t shape[2] = {j->count, SEQ}, rows = j->count * SEQ;
    const dtrain_attention_desc causal = {.sequence = SEQ, .heads = HEADS, .causal = true};
    dtrain_param *const p = j->params;
    dtrain_tape_unit(t, 0);
    dtrain_tensor *x = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, shape, j->inputs, false);
    x = dtrain_embedding(t, x, &p[WTE], &p[WPE]); /* (rows, C) */
    for (int l = 0; l < LAYERS; l++) {
        dtrain_tape_unit(t, (uint32_t)l + 1);
        dtrain_param *const b = p + BLOCKS + l * BLOCK;
        dtrain_tensor *h = dtrain_layernorm(t, x, NULL, &b[LN1_W], &b[LN1_B], 1e-5f);
        h = dtrain_linear(t, h, &b[QKV_W], &b[QKV_B], DTRAIN_ACTIVATION_NONE);
        h = dtrain_attention(t, h, NULL, NULL, &causal);
        x = dtrain_add(t, x, dtrain_linear(t, h, &b[PROJ_W], &b[PROJ_B], DTRAIN_ACTIVATION_NONE));
        h = dtrain_layernorm(t, x, NULL, &b[LN2_W], &b[LN2_B], 1e-5f);
        h = dtrain_linear(t, h, &b[FC_W], &b[FC_B], DTRAIN_ACTIVATION_GELU);
        x = dtrain_add(t, x, dtrain_linear(t, h, &b[OUT_W], &b[OUT_B], DTRAIN_ACTIVATION_NONE));
    }
    dtrain_tape_unit(t, LAYERS + 1);
    x = dtrain_layernorm(t, x, NULL, &p[LNF_W], &p[LNF_B], 1e-5f);
    x = dtrain_linear(t, x, &p[HEAD], NULL, DTRAIN_ACTIVATION_NONE); /* (rows, VOCAB) */
    return dtrain_cross_entropy(
        t, x, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, j->targets, false), 0, 0);
}

/* The data without --data: lines such as "seven comes before eight." */
static char text[120000];

static int64_t make_lines(void)
{
    static const char *const word[] = {"zero",    "one",     "two",       "three",    "four",
                                       "five",    "six",     "seven",     "eight",    "nine",
                                       "ten",     "eleven",  "twelve",    "thirteen", "fourteen",
                                       "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"};
    size_t n = 0;
    for (uint64_t line = 0; n + 40 < sizeof text; line++) {
        const int w = (int)(19 * dtrain_random_uniform(7, 0, line));
        n += (size_t)snprintf(text + n, 40, "%s comes before %s.\n", word[w], word[w + 1]);
    }
    return (int64_t)n;
}

/* A dtrain_read_fn: the bytes are the tokens. */
static dtrain_result read_lines(void *user, int64_t first, int64_t n, void *items, int32_t *labels)
{
    (void)user, (void)labels;
    for (int64_t i = 0; i < n; i++) ((int32_t *)items)[i] = text[first + i];
    return DTRAIN_OK;
}

enum { DATA, SCHEDULE, STRATEGY, RANKS, TENSOR, PIPELINE, CHUNKS, BATCH, MICROS, STEPS, FLAGS };
typedef struct settings {
    const char *data;
    int number[FLAGS]; /* of SCHEDULE and STRATEGY the place in the lists of main */
} settings;

/* End this rank when a call fails; dtrain_launch ends the others, and says why. */
#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

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
    const settings *s = (const settings *)user;
    const int *number = s->number, micros = number[MICROS], steps = number[STEPS];
    static job j; /* ranks are processes */
    dtrain_mesh *mesh;
    dtrain_mesh_info at;
    dtrain_dataset *data;
    dtrain_strategy *strategy;
    dtrain_strategy_info held;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;

    const dtrain_mesh_desc axes = {.tensor = number[TENSOR], .pipeline = number[PIPELINE]};
    CHECK(dtrain_mesh_create(world, &axes, &mesh));
    dtrain_mesh_query(mesh, &at);
    declare_model(&j);
    j.count = number[BATCH] / at.data / micros;
    if (j.count < 1 || j.count > MOST || j.count * at.data * micros != number[BATCH])
        CHECK(dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                          "--batch %d should be 1 to %d times %d replicas x %d micro-batches",
                          number[BATCH], MOST, at.data, micros));
    const dtrain_pipeline_desc line = {.kind = (uint32_t)number[SCHEDULE],
                                       .chunks = (uint32_t)number[CHUNKS]};
    if (at.rank == 0 && show(mesh, &line, micros)) return 1;

    /* With the mesh, a loader deals samples to the data axis: ranks of one replica read the same. */
    dtrain_dataset_desc source = {.path = s->data, .format = DTRAIN_DATA_BYTES};
    if (!s->data) source = (dtrain_dataset_desc){.read = read_lines, .item_count = make_lines()};
    CHECK(dtrain_dataset_open(world, &source, &data));
    const dtrain_loader_desc window = {
        .dataset = data, .batch = (uint32_t)j.count, .sequence = SEQ, .mesh = mesh};
    CHECK(dtrain_loader_create(world, &window, &j.loader));
    const dtrain_strategy_desc where = {
        .kind = DTRAIN_STRATEGY_DDP + (uint32_t)number[STRATEGY], .mesh = mesh, .pipeline = &line};
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    CHECK(dtrain_strategy_create(world, j.params, PARAMS, &where, &strategy));
    CHECK(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    const dtrain_trainer_desc how = {.micro_batches = (uint32_t)micros,
                                     .clip = 1,
                                     .schedule = {.lr = 2e-3f, .warmup_steps = 10},
                                     .strategy = strategy,
                                     .optimizer = optimizer,
                                     .next_batch = next_batch,
                                     .loss = loss,
                                     .user = &j};
    CHECK(dtrain_trainer_create(world, &how, &trainer));
    for (int step = 1; step <= steps; step++) {
        dtrain_step_record record;
        CHECK(dtrain_trainer_step(trainer, &record));
        if (at.rank == 0 && (step == 1 || step % ((steps + 9) / 10) == 0))
            printf("step %4d  loss %.3f\n", step, record.loss);
    }
    dtrain_strategy_query(strategy, &held);
    if (at.rank == 0)
        printf("rank 0 has %d of the %d parameters\n", (int)(held.value_bytes / sizeof(float)),
               (int)held.total_elements);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    dtrain_loader_destroy(j.loader);
    dtrain_dataset_close(data);
    dtrain_mesh_destroy(mesh);
    return 0;
}

/* Return the place of a word in a list that ends with NULL, or -1. */
static int find(const char *word, const char *const *list)
{
    for (int i = 0; word && list[i]; i++)
        if (strcmp(word, list[i]) == 0) return i;
    return -1;
}

int main(int argc, char **argv)
{
    static const char *const flags[] = {"--data",          "--schedule", "--strategy", "--ranks",
                                        "--tensor",        "--pipeline", "--chunks",   "--batch",
                                        "--micro-batches", "--steps",    NULL};
    static const char *const schedules[] = {"1f1b", "gpipe", "interleaved", "zb_h1", NULL};
    static const char *const strategies[] = {"ddp", "zero1", NULL};
    settings s = {
        .number = {[TENSOR] = 2, [PIPELINE] = 2, [BATCH] = 16, [MICROS] = 4, [STEPS] = 100}};
    for (int a = 1; a < argc; a += 2) {
        const int flag = find(argv[a], flags);
        const char *const value = argv[a + 1];
        const int least = flag > STRATEGY; /* numbers begin at 1, places in a list at 0 */
        long number = flag == SCHEDULE ? find(value, schedules) : find(value, strategies);
        if (flag > STRATEGY && value) number = strtol(value, NULL, 10);
        if (flag < 0 || !value || (flag != DATA && (number < least || number > 1000000))) {
            fprintf(stderr, "parallel_3d: \"%s %s\" is not understood; flags:", argv[a],
                    value ? value : "");
            for (int f = 0; flags[f]; f++) fprintf(stderr, " %s", flags[f]);
            fprintf(stderr, "\n");
            return 2;
        }
        s.data = flag == DATA ? value : s.data;
        s.number[flag] = (int)number;
    }
    if (s.number[PIPELINE] == 1 && (s.number[SCHEDULE] || s.number[CHUNKS])) {
        fprintf(stderr, "parallel_3d: --schedule and --chunks do nothing with --pipeline 1\n");
        return 2;
    }
    /* Without --ranks: the number of torchrun, mpirun or srun, and without a launcher eight. */
    const dtrain_launch_desc run = {.default_rank_count = 8,
                                    .rank_count = (uint32_t)s.number[RANKS]};
    if (dtrain_launch(&run, train, &s, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "parallel_3d: %s\n", dtrain_last_error());
    return 1;
}
