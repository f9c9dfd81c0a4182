/* export_gpt2.c: a small random GPT for test_weights.sh and test_models.sh, which compare it with transformers' GPT-2.
 *
 *     export_gpt2 RANKS STRATEGY [seed=N] [import=PATH] [train=STEPS] [checkpoint=FOLDER] [export=PATH] [dtype=bf16]
 *                 [names=own] [values=FILE] [logits=FILE]
 *
 * import, train, checkpoint, export, values and logits happen in this order. train: AdamW with a rate of 1e-3, betas
 * of 0.9 and 0.95 and a decay of 0.1 of matrices, on one batch, the tokens of the logits, each predicting the next in
 * its sequence; prints each loss. A config.json beside import says the activation and the epsilon. PATH is a .bin of
 * llm.c, or of Hugging Face: names are theirs then, and so are the transposes and the vocabulary without padding;
 * names=own: everything as it lies here. values: all parameters, one behind the other, as fp32; their names and shapes
 * go to stdout. logits: (BATCH * SEQ, VOCAB) of tokens (7 i + 3) % VOCAB, as fp32. */
#define _GNU_SOURCE 1
#include "dtrain.h"

#include "tools/train_gpt/llmc.h"

enum { LAYERS = 2, HEADS = 4, CHANNELS = 32, SEQ = 16, POSITIONS = 24, VOCAB = 300, BATCH = 2 };

typedef struct job {
    int ranks;
    const char *strategy, *seed, *import, *checkpoint, *export, *dtype, *names, *values;
    const char *logits, *train;
} job;

static const char *const kinds[] = {"",           "ddp",   "zero1",       "shard_grad_op",
                                    "full_shard", "zero3", "hybrid_shard"};

/* Write all values, and print what they are. */
static dtrain_result write_values(dtrain_strategy *strategy, const gpt *m, const char *path,
                                  int rank)
{
    FILE *file = rank == 0 ? fopen(path, "wb") : NULL;
    dtrain_result result = file || rank ? DTRAIN_OK : DTRAIN_ERROR_FILE;
    float *value = (float *)calloc(1u << 20, sizeof *value);
    if (!value) result = DTRAIN_ERROR_MEMORY;
    for (size_t i = 0; i < m->param_count && result == DTRAIN_OK; i++) {
        const dtrain_param *p = &m->params[i];
        if (p == m->head) continue;
        result = dtrain_strategy_read(strategy, i, value);
        if (!file || result != DTRAIN_OK) continue;
        if (fwrite(value, sizeof *value, (size_t)p->count, file) != (size_t)p->count)
            result = DTRAIN_ERROR_FILE;
        printf("value %s %lld %lld\n", p->name, (long long)p->shape[0], (long long)p->shape[1]);
    }
    if (file) fclose(file);
    free(value);
    return result;
}

static dtrain_result write_logits(dtrain_world *world, dtrain_strategy *strategy, const gpt *m,
                                  const char *path, int rank)
{
    const long columns = gpt_columns(&m->config);
    int32_t tokens[BATCH * SEQ];
    dtrain_tape *tape = NULL;
    float *logits = (float *)calloc((size_t)(BATCH * SEQ * columns), sizeof *logits);
    FILE *file = rank == 0 ? fopen(path, "wb") : NULL;
    dtrain_result result = logits && (file || rank) ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    for (int i = 0; i < BATCH * SEQ; i++) tokens[i] = (7 * i + 3) % VOCAB;
    if (result == DTRAIN_OK) result = dtrain_tape_create(world, strategy, NULL, &tape);
    if (result == DTRAIN_OK) result = dtrain_tape_begin(tape, DTRAIN_TAPE_NO_GRAD, 0);
    if (result == DTRAIN_OK)
        result = dtrain_tensor_read(tape, gpt_forward(tape, m, tokens, BATCH), logits, NULL);
    for (int row = 0; row < BATCH * SEQ && file && result == DTRAIN_OK; row++)
        if (fwrite(logits + row * columns, sizeof *logits, VOCAB, file) != VOCAB)
            result = DTRAIN_ERROR_FILE;
    if (file) fclose(file);
    dtrain_tape_destroy(tape);
    free(logits);
    return result;
}

/* Train on one batch, which all ranks have. */
static dtrain_result train(dtrain_world *world, dtrain_strategy *strategy, gpt *m, int steps)
{
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_optimizer *optimizer = NULL;
    dtrain_tape *tape = NULL;
    int32_t tokens[BATCH * SEQ], targets[BATCH * SEQ];
    gpt_batch batch = {m, BATCH, tokens, targets};
    float value = 0;
    adamw.beta2 = 0.95f;
    adamw.weight_decay = 0.1f;
    for (int i = 0; i < BATCH * SEQ; i++) {
        tokens[i] = (7 * i + 3) % VOCAB;
        targets[i] = (i + 1) % SEQ ? (7 * i + 10) % VOCAB : -1;
    }
    dtrain_result result = dtrain_optimizer_create(world, strategy, &adamw, &optimizer);
    if (result == DTRAIN_OK) result = dtrain_tape_create(world, strategy, NULL, &tape);
    for (int step = 0; step < steps && result == DTRAIN_OK; step++) {
        result = dtrain_tape_begin(tape, 0, 0);
        dtrain_tensor *loss = gpt_loss(tape, &batch);
        if (result == DTRAIN_OK) result = dtrain_tensor_read(tape, loss, &value, NULL);
        if (result == DTRAIN_OK) result = dtrain_tape_backward(tape, loss, 1);
        if (result == DTRAIN_OK) result = dtrain_strategy_finish(strategy);
        if (result == DTRAIN_OK) result = dtrain_optimizer_step(optimizer, 1e-3f, 1);
        if (dtrain_world_rank(world) == 0) printf("loss %.7f\n", (double)value);
    }
    dtrain_tape_destroy(tape);
    dtrain_optimizer_destroy(optimizer);
    return result;
}

static dtrain_result save(dtrain_world *world, dtrain_state *state, const char *folder)
{
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *checkpoint;
    memset(&desc, 0, sizeof desc);
    desc.directory = folder;
    desc.state = state;
    dtrain_result result = dtrain_checkpoint_open(world, &desc, &checkpoint);
    if (result != DTRAIN_OK) return result;
    result = dtrain_checkpoint_save(checkpoint, 1, 0);
    const dtrain_result closed = dtrain_checkpoint_close(checkpoint);
    return result == DTRAIN_OK ? closed : result;
}

static dtrain_result run(dtrain_world *world, const job *j, gpt *m, dtrain_strategy *strategy,
                         dtrain_state *state)
{
    const int rank = dtrain_world_rank(world);
    dtrain_import_info info;
    dtrain_import_desc from;
    dtrain_export_desc to;
    dtrain_export_name *names = j->names ? NULL : gpt_hugging_face(m);
    dtrain_result result = DTRAIN_OK;
    memset(&info, 0, sizeof info);
    memset(&from, 0, sizeof from);
    memset(&to, 0, sizeof to);
    from.names = to.names = names;
    from.prefix = "transformer.";
    from.ignore = gpt_ignored();
    to.dtype = !j->dtype                       ? DTRAIN_DTYPE_F32
               : strcmp(j->dtype, "bf16") == 0 ? DTRAIN_DTYPE_BF16
                                               : DTRAIN_DTYPE_F16;
    const bool llmc = j->import && llmc_is_model(j->import);
    if (llmc) result = llmc_import(world, state, m, j->import);
    else if (j->import) result = dtrain_checkpoint_import(state, j->import, &from, &info);
    if (result == DTRAIN_OK && j->import && !llmc && rank == 0)
        printf("imported %llu of %llu parameters, %llu bytes\n", (unsigned long long)info.values,
               (unsigned long long)m->param_count - 1, (unsigned long long)info.bytes);
    if (result == DTRAIN_OK && j->train) result = train(world, strategy, m, atoi(j->train));
    if (result == DTRAIN_OK && j->checkpoint) result = save(world, state, j->checkpoint);
    const bool bin = j->export && strstr(j->export, ".bin");
    if (result == DTRAIN_OK && bin)
        result = llmc_export(world, strategy, m, to.dtype == DTRAIN_DTYPE_BF16, j->export);
    else if (result == DTRAIN_OK && j->export)
        result = dtrain_checkpoint_export(strategy, j->export, &to);
    if (result == DTRAIN_OK && j->values) result = write_values(strategy, m, j->values, rank);
    if (result == DTRAIN_OK && j->logits)
        result = write_logits(world, strategy, m, j->logits, rank);
    free(names);
    return result;
}

static int rank_main(dtrain_world *world, void *user)
{
    const job *j = (const job *)user;
    gpt_config config = {LAYERS, HEADS, CHANNELS, SEQ, POSITIONS, VOCAB, 0, 0, 0}, found;
    hf_config beside;
    dtrain_strategy_desc desc;
    dtrain_state_desc list;
    dtrain_strategy *strategy = NULL;
    dtrain_state *state = NULL;
    gpt m;
    memset(&desc, 0, sizeof desc);
    memset(&list, 0, sizeof list);
    while (desc.kind < 6 && strcmp(kinds[desc.kind], j->strategy) != 0) desc.kind++;
    desc.init_seed = j->seed ? (uint64_t)atoll(j->seed) : 1;
    memset(&found, 0, sizeof found);
    dtrain_result result = hf_open(&beside, j->import ? j->import : "/");
    if (result == DTRAIN_OK && beside.text) result = gpt_read_config(&beside, &found);
    config.epsilon = found.epsilon, config.activation = found.activation;
    hf_close(&beside);
    if (result == DTRAIN_OK) result = gpt_create(&m, &config);
    for (size_t i = 0; i < m.param_count && result == DTRAIN_OK; i++) {
        m.params[i].init =
            DTRAIN_INIT_NORMAL; /* biases and norms too: what is 0 or 1 could be any other */
        m.params[i].init_scale = m.params[i].shape[1] ? 0.15f : 0.3f;
    }
    if (m.wpe) m.wpe->init_scale = 0.8f; /* or the likeliest token is the last one again */
    if (result == DTRAIN_OK)
        result = dtrain_strategy_create(world, m.params, m.param_count, &desc, &strategy);
    list.strategy = strategy;
    if (result == DTRAIN_OK) result = dtrain_state_create(world, &list, &state);
    if (result == DTRAIN_OK) result = run(world, j, &m, strategy, state);
    if (result != DTRAIN_OK) fprintf(stderr, "%s\n", dtrain_last_error());
    dtrain_state_destroy(state);
    dtrain_strategy_destroy(strategy);
    gpt_free(&m);
    return result == DTRAIN_OK ? 0 : 1;
}

/* The text behind name= in an argument. */
static void take(const char *argument, const char *name, const char **value)
{
    const size_t bytes = strlen(name);
    if (strncmp(argument, name, bytes) == 0 && argument[bytes] == '=')
        *value = argument + bytes + 1;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc launch;
    dtrain_launch_info info;
    job j;
    memset(&launch, 0, sizeof launch);
    memset(&j, 0, sizeof j);
    if (argc < 3) {
        fprintf(stderr, "usage: export_gpt2 RANKS STRATEGY [NAME=VALUE]...\n");
        return 2;
    }
    launch.rank_count = (uint32_t)atoi(argv[1]);
    launch.threads_per_rank = 1;
    j.strategy = argv[2];
    for (int i = 3; i < argc; i++) {
        take(argv[i], "seed", &j.seed);
        take(argv[i], "import", &j.import);
        take(argv[i], "checkpoint", &j.checkpoint);
        take(argv[i], "export", &j.export);
        take(argv[i], "dtype", &j.dtype);
        take(argv[i], "names", &j.names);
        take(argv[i], "values", &j.values);
        take(argv[i], "logits", &j.logits);
        take(argv[i], "train", &j.train);
    }
    (void)dtrain_launch(&launch, rank_main, &j, &info);
    return info.exit_code;
}
