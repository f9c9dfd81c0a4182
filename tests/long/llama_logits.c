/* llama_logits.c: the model of examples/llama.c for test_models.sh, which compares it with transformers' Llama.
 *
 *     llama_logits RANKS STRATEGY DIR FILE
 *
 * Writes the logits (BATCH * LENGTH, vocabulary) of tokens (7 i + 3) % vocabulary, as fp32. */
#define main llama_main
#include "examples/llama.c"
#undef main

enum { BATCH = 2, LENGTH = 16 };

static char **words; /* of the command line */

static int write_logits(dtrain_world *world, void *user)
{
    dtrain_strategy_desc where = {.kind = *(const uint32_t *)user};
    llama m = {.seq = LENGTH};
    int32_t tokens[BATCH * LENGTH];
    dtrain_strategy *strategy;
    dtrain_state *state;
    dtrain_tape *tape;
    hf_config config;
    char weights[4096];
    CHECK(find_model(&m, words[3], weights, &config));
    CHECK(declare_model(&m));
    CHECK(dtrain_strategy_create(world, m.params, m.count, &where, &strategy));
    CHECK(dtrain_state_create(world, &(dtrain_state_desc){.strategy = strategy}, &state));
    CHECK(import_model(state, weights));
    CHECK(dtrain_tape_create(world, strategy, NULL, &tape));
    CHECK(dtrain_tape_begin(tape, DTRAIN_TAPE_NO_GRAD, 0));
    for (int i = 0; i < BATCH * LENGTH; i++) tokens[i] = (int32_t)((7 * i + 3) % m.vocab);
    const size_t count = (size_t)(BATCH * LENGTH * m.vocab);
    float *logits = malloc(count * sizeof *logits);
    if (!logits) return 1;
    CHECK(dtrain_tensor_read(tape, forward(tape, &m, tokens, BATCH), logits, NULL));
    FILE *file = dtrain_world_rank(world) ? NULL : fopen(words[4], "wb");
    const bool good = !file || fwrite(logits, sizeof *logits, count, file) == count;
    return file && (fclose(file) != 0 || !good);
}

int main(int argc, char **argv)
{
    static const char *const kinds[] = {"",           "ddp",   "zero1", "shard_grad_op",
                                        "full_shard", "zero3", NULL};
    dtrain_launch_desc launch = {.threads_per_rank = 1};
    dtrain_launch_info info;
    words = argv;
    if (argc != 5) return 2;
    launch.rank_count = (uint32_t)atoi(argv[1]);
    uint32_t kind = (uint32_t)find("llama_logits", "the strategy", argv[2], kinds);
    if (dtrain_launch(&launch, write_logits, &kind, &info) == DTRAIN_OK) return 0;
    fprintf(stderr, "llama_logits: %s\n", dtrain_last_error());
    return 1;
}
