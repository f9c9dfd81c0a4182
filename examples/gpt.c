/* gpt.c: a GPT of about 0.8 million parameters learns a text byte by byte, with the trainer: model,
 * data and settings are the program's, the training step is the library's.
 *
 *   build:   cc -O2 -I. examples/gpt.c -o gpt -lm -lpthread
 *   GPU:     nvcc -O3 -arch=native -I. -DDTRAIN_USE_CUDA examples/gpt.c dtrain_cuda.cu -lcublasLt -o gpt
 *   run:     ./gpt                                   two ranks learn lines that the program makes
 *            ./gpt --data shakespeare.txt --ranks 4 --strategy full_shard --precision bf16
 *            ./gpt --ranks 2 --tensor 2                two ranks share each layer
 *            ./gpt --device cuda --ranks 1 --precision bf16 --batch 64
 *   flags:   --data FILE  --ranks N  --device cpu|cuda  --steps N  --batch N (samples of a rank)
 *            --lr NUMBER  --precision fp32|bf16|fp16
 *            --strategy ddp|zero1|shard_grad_op|full_shard|zero3
 *            --tensor N (ranks that share every layer of a replica)
 *   expect, in some ten seconds on two cores of an Intel Xeon:
 *     step      loss  val_loss grad_norm        lr    tok/s   step_ms  comm_ms  exposed  data_ms      eta  done
 *        1    5.5287         -     8.727  1.00e-04     8.5k    107.11    14.92     6.90    0.023     0:31    0%
 *       30    1.3987         -     1.025  2.00e-03    17.5k     43.80     8.28     1.38    0.004     0:17   10%
 *     ...
 *
 * It ends with a held-out loss near 0.19 and a sample, in which most lines are right: "seventeen comes
 * before eighteen." The last digits depend on the processor's instruction set.
 *
 * --strategy changes where parameters, gradients and AdamW's state live, and nothing else: the
 * losses are the same. --tensor cuts what the table of parameters marks (`cut`) over so many ranks,
 * and the other ranks are replicas: the text of the model stays what it is, and so do the losses, to
 * rounding. tools/train_gpt is the same program with everything that can be set. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, HEADS = 4, CHANNELS = 128, SEQ = 64, VOCAB = 256, SAMPLE = 300 };

/* ---- model: GPT-2's layout, output weights tied to the token embedding ------------------- */

enum { WTE, WPE, BLOCKS, BLOCK = 12, LNF_W = BLOCKS + LAYERS * BLOCK, LNF_B, HEAD, PARAMS };
enum { LN1_W, LN1_B, QKV_W, QKV_B, PROJ_W, PROJ_B, LN2_W, LN2_B, FC_W, FC_B, OUT_W, OUT_B };

/* How ranks of a tensor axis may share a parameter (--tensor): by its rows, which are outputs, or its
 * columns, inputs; q|k|v, and what reads their heads, in whole heads. */
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

typedef struct model {
    dtrain_param params[PARAMS]; /* in forward order */
    char names[PARAMS][32];
} model;

/* Matrices start as N(0, scale^2), vectors as the constant scale. A unit is what sharded strategies
 * gather at a time: the embeddings, each block, and the end. */
static void declare(model *m, int index, int unit, const char *name, int64_t rows, int64_t columns,
                    float scale)
{
    dtrain_param *p = &m->params[index];
    snprintf(m->names[index], sizeof m->names[index], "%d.%s", unit, name);
    p->name = m->names[index];
    p->unit = (uint32_t)unit;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->init = columns ? DTRAIN_INIT_NORMAL : DTRAIN_INIT_CONSTANT;
    p->init_scale = scale;
}

static void declare_model(model *m)
{
    const float narrow = 0.02f / sqrtf(2.0f * LAYERS); /* for what adds to the residual stream */
    memset(m, 0, sizeof *m);
    declare(m, WTE, 0, "wte", VOCAB, CHANNELS, 0.02f);
    declare(m, WPE, 0, "wpe", SEQ, CHANNELS, 0.02f);
    for (int l = 0; l < LAYERS; l++)
        for (int i = 0; i < BLOCK; i++) {
            float scale = i == PROJ_W || i == OUT_W ? narrow : 0.02f;
            if (!block[i].columns) scale = i == LN1_W || i == LN2_W ? 1 : 0;
            declare(m, BLOCKS + l * BLOCK + i, l + 1, block[i].name, block[i].rows * CHANNELS,
                    block[i].columns * CHANNELS, scale);
            m->params[BLOCKS + l * BLOCK + i].cut = cuts[block[i].cut];
        }
    declare(m, LNF_W, LAYERS + 1, "lnf.weight", CHANNELS, 0, 1);
    declare(m, LNF_B, LAYERS + 1, "lnf.bias", CHANNELS, 0, 0);
    declare(m, HEAD, LAYERS + 1, "head", 0, 0, 0);
    m->params[HEAD].alias_of = &m->params[WTE];
    m->params[WTE].cut = cuts[ROWS]; /* the vocabulary, and so that of the loss */
}

/* tokens (batch, SEQ) -> logits (batch * SEQ, VOCAB) */
static dtrain_tensor *forward(dtrain_tape *t, model *m, const int32_t *tokens, int64_t batch)
{
    const int64_t shape[2] = {batch, SEQ};
    const dtrain_attention_desc causal = {.sequence = SEQ, .heads = HEADS, .causal = true};
    dtrain_param *p = m->params;
    dtrain_tape_unit(t, 0);
    dtrain_tensor *x = dtrain_embedding(
        t, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, shape, tokens, false), &p[WTE], &p[WPE]);
    for (int l = 0; l < LAYERS; l++) {
        dtrain_tape_unit(t, (uint32_t)l + 1);
        p = m->params + BLOCKS + l * BLOCK;
        dtrain_tensor *h =
            dtrain_layernorm(t, x, NULL, &p[LN1_W], &p[LN1_B], 1e-5f); /* (batch * SEQ, C) */
        h = dtrain_linear(t, h, &p[QKV_W], &p[QKV_B], DTRAIN_ACTIVATION_NONE); /* (.., 3 C) */
        h = dtrain_attention(t, h, NULL, NULL, &causal);                       /* (.., C) */
        x = dtrain_add(t, x, dtrain_linear(t, h, &p[PROJ_W], &p[PROJ_B], DTRAIN_ACTIVATION_NONE));
        h = dtrain_layernorm(t, x, NULL, &p[LN2_W], &p[LN2_B], 1e-5f);
        h = dtrain_linear(t, h, &p[FC_W], &p[FC_B], DTRAIN_ACTIVATION_GELU); /* (.., 4 C) */
        x = dtrain_add(t, x, dtrain_linear(t, h, &p[OUT_W], &p[OUT_B], DTRAIN_ACTIVATION_NONE));
    }
    p = m->params;
    dtrain_tape_unit(t, LAYERS + 1);
    x = dtrain_layernorm(t, x, NULL, &p[LNF_W], &p[LNF_B], 1e-5f);
    return dtrain_linear(t, x, &p[HEAD], NULL, DTRAIN_ACTIVATION_NONE);
}

/* ---- what the trainer calls: the next batch, and its loss -------------------------------- */

typedef struct batch {
    model *m;
    dtrain_loader *loader;
    int64_t count;
    int32_t *inputs, *targets; /* (count, SEQ): the targets are the inputs one byte later */
} batch;

static dtrain_result next_batch(void *user)
{
    batch *b = user;
    return dtrain_loader_next(b->loader, b->inputs, b->targets);
}

static dtrain_tensor *loss(dtrain_tape *t, void *user)
{
    batch *b = user;
    const int64_t rows = b->count * SEQ;
    dtrain_tensor *logits = forward(t, b->m, b->inputs, b->count);
    return dtrain_cross_entropy(
        t, logits, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, b->targets, false), 0, 0);
}

/* ---- training ---------------------------------------------------------------------------- */

typedef struct settings {
    const char *data;
    uint32_t kind, tape_flags;
    int tensor;
    long batch, steps;
    float lr;
} settings;

/* End this rank when a call fails. dtrain_launch then ends the others, and its own error quotes the
 * sentence of this one; the memory of a rank goes with its process. */
#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

/* Draw bytes after a newline, each from a forward pass over those before it. All ranks draw the
 * same ones, because sharded parameters, and logits, are gathered by all ranks together. */
static int sample(dtrain_tape *t, model *m, uint32_t tape_flags, bool print)
{
    static float logits[SEQ * VOCAB];
    int32_t window[SEQ] = {'\n'};
    int length = 1;
    for (int i = 0; i < SAMPLE; i++) {
        CHECK(dtrain_tape_begin(t, tape_flags | DTRAIN_TAPE_NO_GRAD, 0));
        dtrain_tensor *all = dtrain_place(t, forward(t, m, window, 1), DTRAIN_PLACEMENT_WHOLE);
        CHECK(dtrain_tensor_read(t, all, logits, NULL));
        const float *last = logits + (length - 1) * VOCAB;
        double sum = 0, below = 0;
        int32_t byte = 0; /* drawn from softmax(last / 0.8) */
        for (int v = 0; v < VOCAB; v++) sum += exp(last[v] / 0.8);
        const double pick = sum * dtrain_random_uniform(1, 0, (uint64_t)i);
        for (; byte < VOCAB - 1; byte++) {
            below += exp(last[byte] / 0.8);
            if (pick < below) break;
        }
        if (print) putchar(isprint(byte) || byte == '\n' ? byte : '?');
        if (length == SEQ) memmove(window, window + 1, (size_t)--length * sizeof *window);
        window[length++] = byte;
    }
    if (print) printf("\n");
    return 0;
}

/* The data without --data: lines such as "seven comes before eight.", with numbers drawn at random. */
typedef struct lines {
    char text[120000];
    size_t length;
} lines;

static void make_lines(lines *made)
{
    static const char *const word[] = {"zero",    "one",     "two",       "three",    "four",
                                       "five",    "six",     "seven",     "eight",    "nine",
                                       "ten",     "eleven",  "twelve",    "thirteen", "fourteen",
                                       "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"};
    made->length = 0;
    for (uint64_t line = 0; made->length + 40 < sizeof made->text; line++) {
        const int n = (int)(19 * dtrain_random_uniform(7, 0, line));
        made->length += (size_t)snprintf(made->text + made->length, 40, "%s comes before %s.\n",
                                         word[n], word[n + 1]);
    }
}

/* A dtrain_read_fn: the bytes are the tokens. */
static dtrain_result read_lines(void *user, int64_t first, int64_t count, void *items,
                                int32_t *labels)
{
    const lines *made = user;
    int32_t *tokens = items;
    (void)labels;
    for (int64_t i = 0; i < count; i++) tokens[i] = made->text[first + i];
    return DTRAIN_OK;
}

/* Every rank runs this function. */
static int train(dtrain_world *world, void *user)
{
    const settings *s = user;
    const bool first = dtrain_world_rank(world) == 0;
    const size_t tokens = (size_t)s->batch * SEQ;
    model m;
    batch learn = {.m = &m, .count = s->batch}, held_out;
    dtrain_mesh *mesh;
    dtrain_dataset *text;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_metrics *metrics;

    const dtrain_mesh_desc axes = {.tensor = s->tensor}; /* the rest is the data axis */
    CHECK(dtrain_mesh_create(world, &axes, &mesh));
    static lines made;
    dtrain_dataset_desc source = {.path = s->data, .format = DTRAIN_DATA_BYTES};
    if (!s->data) {
        make_lines(&made);
        source = (dtrain_dataset_desc){
            .read = read_lines, .user = &made, .item_count = (int64_t)made.length};
    }
    CHECK(dtrain_dataset_open(world, &source, &text));
    dtrain_dataset_info info;
    dtrain_dataset_query(text, &info);
    const int64_t all = info.item_count, part = all - all / 10;
    dtrain_loader_desc window = {.dataset = text,
                                 .batch = (uint32_t)s->batch,
                                 .sequence = SEQ,
                                 .item_count = part,
                                 .mesh = mesh};
    learn.inputs = malloc(tokens * sizeof *learn.inputs);
    learn.targets = malloc(tokens * sizeof *learn.targets);
    if (!learn.inputs || !learn.targets)
        CHECK(dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a batch of %ld samples", s->batch));
    held_out = learn; /* the last tenth of the text, through the same two arrays */
    CHECK(dtrain_loader_create(world, &window, &learn.loader));
    window.first_item = part;
    window.item_count = all - part;
    window.sample_limit = 20 * s->batch; /* then it ends: the loss does not depend on the ranks */
    CHECK(dtrain_loader_create(world, &window, &held_out.loader));

    dtrain_strategy_desc where = {0};
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    where.kind = s->kind;
    where.mesh = mesh;
    adamw.beta2 = 0.99f;
    adamw.weight_decay = 0.1f;
    declare_model(&m);
    CHECK(dtrain_strategy_create(world, m.params, PARAMS, &where, &strategy));
    CHECK(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    const dtrain_trainer_desc how = {.tokens = (uint32_t)tokens,
                                     .clip = 1,
                                     .tape_flags = s->tape_flags,
                                     .schedule = {.kind = DTRAIN_SCHEDULE_COSINE,
                                                  .lr = s->lr,
                                                  .min_lr = s->lr / 10,
                                                  .warmup_steps = s->steps / 15,
                                                  .total_steps = s->steps},
                                     .strategy = strategy,
                                     .optimizer = optimizer,
                                     .next_batch = next_batch,
                                     .loss = loss,
                                     .user = &learn};
    CHECK(dtrain_trainer_create(world, &how, &trainer));
    const dtrain_metrics_desc show = {.total_steps = s->steps,
                                      .progress = stdout,
                                      .progress_every = (uint32_t)(s->steps + 9) / 10};
    CHECK(dtrain_metrics_create(world, &show, &metrics));

    for (long step = 1; step <= s->steps; step++) {
        dtrain_step_record record;
        CHECK(dtrain_trainer_step(trainer, &record));
        if (step == s->steps)
            CHECK(dtrain_trainer_evaluate(trainer, next_batch, &held_out, DTRAIN_UNTIL_END,
                                          &record.val_loss));
        CHECK(dtrain_metrics_step(metrics, &record));
    }
    dtrain_metrics_info run;
    dtrain_metrics_query(metrics, &run);
    CHECK(dtrain_metrics_finish(metrics));
    dtrain_metrics_destroy(metrics);
    if (first)
        printf("\nheld-out loss %.3f, %.0f tokens/s; a sample:\n", run.summary.val_loss,
               run.summary.tokens_per_second);
    if (sample(dtrain_trainer_tape(trainer), &m, s->tape_flags, first)) return 1;

    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    dtrain_loader_destroy(learn.loader);
    dtrain_loader_destroy(held_out.loader);
    dtrain_dataset_close(text);
    dtrain_mesh_destroy(mesh);
    free(learn.inputs);
    free(learn.targets);
    return 0;
}

/* The place of a word in a list that ends with NULL, or -1 after a sentence. */
static int find(const char *what, const char *word, const char *const *list)
{
    for (int i = 0; list[i]; i++)
        if (strcmp(word, list[i]) == 0) return i;
    fprintf(stderr, "gpt: %s \"%s\" is not one of:", what, word);
    for (int i = 0; list[i]; i++) fprintf(stderr, " %s", list[i]);
    fprintf(stderr, "\n");
    return -1;
}

int main(int argc, char **argv)
{
    enum { DATA, RANKS, DEVICE, STEPS, BATCH, LR, PRECISION, STRATEGY, TENSOR, FLAGS };
    static const char *const flags[] = {"--data",   "--ranks", "--device",    "--steps",
                                        "--batch",  "--lr",    "--precision", "--strategy",
                                        "--tensor", NULL};
    static const char *const precisions[] = {"fp32", "bf16", "fp16", NULL};
    static const uint32_t autocast[] = {0, DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16};
    static const char *const kinds[] = {"ddp",        "zero1", "shard_grad_op",
                                        "full_shard", "zero3", NULL};
    const char *value[FLAGS] = {NULL, NULL, "cpu", "300", "6", "2e-3", "fp32", "ddp", "1"};
    for (int a = 1; a < argc; a += 2) {
        const int i = find("the flag", argv[a], flags);
        if (i < 0) return 2;
        if (a + 1 == argc) {
            fprintf(stderr, "gpt: %s needs a value\n", argv[a]);
            return 2;
        }
        value[i] = argv[a + 1];
    }
    const int precision = find("--precision", value[PRECISION], precisions);
    const int kind = find("--strategy", value[STRATEGY], kinds);
    if (precision < 0 || kind < 0) return 2;
    settings s = {.data = value[DATA],
                  .kind = (uint32_t)kind + DTRAIN_STRATEGY_DDP,
                  .tape_flags = autocast[precision],
                  .tensor = (int)strtol(value[TENSOR], NULL, 10),
                  .batch = strtol(value[BATCH], NULL, 10),
                  .steps = strtol(value[STEPS], NULL, 10),
                  .lr = strtof(value[LR], NULL)};
    /* Without --ranks: the number of torchrun, mpirun or srun, and without a launcher two. */
    dtrain_launch_desc desc = {.default_rank_count = 2};
    if (value[RANKS]) desc.rank_count = (uint32_t)strtoul(value[RANKS], NULL, 10);
    if ((value[RANKS] && !desc.rank_count) || s.tensor < 1 || s.steps < 1 || s.batch < 1 ||
        s.batch > 1000000 || !(s.lr > 0)) {
        fprintf(stderr, "gpt: --ranks, --tensor, --steps, --batch and --lr take positive numbers, "
                        "and --batch at most a million\n");
        return 2;
    }
    if (dtrain_device_ops_by_name(value[DEVICE], &desc.device_ops) == DTRAIN_OK &&
        dtrain_launch(&desc, train, &s, NULL) == DTRAIN_OK)
        return 0;
    fprintf(stderr, "gpt: %s\n", dtrain_last_error());
    return 1;
}
