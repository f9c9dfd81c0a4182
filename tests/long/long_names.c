/* long_names.c: trains a model whose parameters have names as those of Hugging Face's models, for
 * tests/long/test_trace.sh: its traces, checkpoint and export are in DIRECTORY, and dumps, because rank 1 leaves early.
 *
 *     long_names DIRECTORY */
#include "dtrain.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 12, WIDTH = 24, BATCH = 4, STEPS = 4 };

#define TRY(call)                                       \
    do {                                                \
        const dtrain_result try_result = (call);        \
        if (try_result != DTRAIN_OK) return try_result; \
    } while (0)

static const char *directory;

typedef struct job {
    char names[LAYERS][512];
    dtrain_param params[LAYERS];
    float inputs[BATCH * WIDTH];
    int32_t targets[BATCH];
} job;

/* Names of 38 to 84 bytes, which events show whole, of 140 and of some 440, which they do not; one has accents. */
static void declare(job *j)
{
    static const char *const forms[] = {
        "model.layers.%d.self_attn.q_proj.weight",
        "base_model.model.model.layers.%d.block_sparse_moe.experts.7.w1.lora_A.default.weight",
        "model.layers.%d.modèle.de.langage.avec.des.accents.éééééééééééé.weight",
        "transformer.encoder.blocks.%d.mixture_of_experts.experts.7.feed_forward.up_projection."
        "low_rank_adapter.default_adapter.left_factor.weight_matrix",
        "%0400d.weight"};
    for (int i = 0; i < LAYERS; i++) {
        dtrain_param *p = &j->params[i];
        snprintf(j->names[i], sizeof j->names[i], forms[i % 5], i);
        p->name = j->names[i];
        p->unit = (uint32_t)i;
        p->shape[0] = p->shape[1] = WIDTH;
        p->init = DTRAIN_INIT_NORMAL;
        p->init_scale = 0.3f;
    }
}

static dtrain_result next_batch(void *user)
{
    job *j = (job *)user;
    for (int i = 0; i < BATCH * WIDTH; i++) j->inputs[i] = (float)(i % 7) - 3;
    for (int i = 0; i < BATCH; i++) j->targets[i] = i;
    return DTRAIN_OK;
}

static dtrain_tensor *loss(dtrain_tape *tape, void *user)
{
    job *j = (job *)user;
    const int64_t shape[2] = {BATCH, WIDTH};
    dtrain_tensor *x = dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, j->inputs, false);
    dtrain_tensor *targets = dtrain_tape_input(tape, DTRAIN_DTYPE_I32, 1, shape, j->targets, false);
    for (uint32_t i = 0; i < LAYERS; i++) {
        dtrain_tape_unit(tape, i);
        x = dtrain_linear(tape, x, &j->params[i], NULL, DTRAIN_ACTIVATION_GELU);
    }
    return dtrain_cross_entropy(tape, x, targets, 0, 0);
}

static dtrain_result train(dtrain_world *world, job *j)
{
    char path[600];
    dtrain_strategy_desc how;
    dtrain_trainer_desc desc;
    dtrain_state_desc all;
    dtrain_checkpoint_desc to;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_state *state;
    dtrain_checkpoint *checkpoint;
    dtrain_step_record record;
    dtrain_load_info loaded;
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    memset(&how, 0, sizeof how);
    memset(&desc, 0, sizeof desc);
    memset(&all, 0, sizeof all);
    memset(&to, 0, sizeof to);
    how.kind = DTRAIN_STRATEGY_ZERO1;
    how.bucket_bytes = 3000; /* one for each parameter */
    TRY(dtrain_strategy_create(world, j->params, LAYERS, &how, &strategy));
    TRY(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    desc.tokens = BATCH;
    desc.schedule.lr = 0.01f;
    desc.strategy = strategy;
    desc.optimizer = optimizer;
    desc.next_batch = next_batch;
    desc.loss = loss;
    desc.user = j;
    TRY(dtrain_trainer_create(world, &desc, &trainer));
    all.strategy = strategy;
    all.optimizer = optimizer;
    all.trainer = trainer;
    TRY(dtrain_state_create(world, &all, &state));
    to.state = state;
    snprintf(path, sizeof path, "%s/checkpoints", directory);
    to.directory = path;
    TRY(dtrain_checkpoint_open(world, &to, &checkpoint));
    for (int step = 0; step < STEPS; step++) TRY(dtrain_trainer_step(trainer, &record));
    TRY(dtrain_checkpoint_save(checkpoint, STEPS, 0));
    TRY(dtrain_checkpoint_wait(checkpoint));
    TRY(dtrain_checkpoint_load(state, path, NULL, &loaded));
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    TRY(dtrain_checkpoint_export(strategy, path, NULL));
    TRY(dtrain_checkpoint_import(state, path, NULL, NULL));
    TRY(dtrain_trainer_step(trainer, &record)); /* the last collectives before rank 1 leaves */
    if (dtrain_world_rank(world) == 1) return DTRAIN_ERROR_USAGE;
    return dtrain_barrier(dtrain_world_comm(world));
}

static int rank(dtrain_world *world, void *user)
{
    job *j = (job *)calloc(1, sizeof *j);
    (void)user;
    if (!j) return 2;
    declare(j);
    const dtrain_result result = train(world, j);
    if (result != DTRAIN_OK && dtrain_world_rank(world) == 0)
        fprintf(stderr, "%s\n", dtrain_last_error());
    return result != DTRAIN_OK;
}

int main(int argc, char **argv)
{
    char trace[600];
    dtrain_launch_desc launch;
    memset(&launch, 0, sizeof launch);
    directory = argc > 1 ? argv[1] : ".";
    snprintf(trace, sizeof trace, "%s/t.json", directory);
    launch.rank_count = 2;
    launch.options.trace.path = trace;
    launch.options.flight_directory = directory;
    (void)dtrain_launch(&launch, rank, NULL, NULL);
    return 0;
}
