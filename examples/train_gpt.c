/* train_gpt.c: trains a GPT on any text, data-parallel or sharded, over the cores of this machine or GPUs.
 *
 *   build:   cc -O2 -I. examples/train_gpt.c -o build/train_gpt -lm -lpthread
 *   run:     build/train_gpt                              (two ranks learn dtrain.h, byte by byte)
 *            build/train_gpt --data shakespeare.txt --ranks 2 --steps 2000 --log run.jsonl
 *            build/train_gpt --model gpt2 --data tokens.bin --ranks 1 --threads 2
 *            build/train_gpt --strategy auto --memory-limit 200 --auto-batch --global-batch 64
 *   GPUs:    nvcc -O3 -I. -DDTRAIN_USE_CUDA examples/train_gpt.c dtrain_cuda.cu -lcublasLt -o train_gpt
 *            (add -DDTRAIN_USE_NCCL -ldl for several GPUs that talk over NCCL)
 *            ./train_gpt --device cuda --precision bf16 --graph --model gpt2 --data tokens.bin --seq 1024
 *
 * What to expect: a progress line, the validation loss now and then, a sample of what the model has
 * learned to write, and a table with loss, speed, communication and memory. --help lists all flags.
 *
 * --strategy changes where parameters, gradients and optimizer state live, and nothing else: model,
 * loop and losses are the same.
 *
 * How to read it: flags -> model (parameters, then the forward function; backward is the tape's) ->
 * data -> train(), which every rank runs -> main(), which checks what can be checked before any
 * rank starts. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#ifdef DTRAIN_USE_NCCL
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
#endif

#include <ctype.h>

/* ---- flags: one table makes the parser and --help ------------------------------------------- */

static struct {
    const char *model, *data, *log, *device;
    long schedule, lr_scaling, precision, strategy, offload; /* places in the lists below */
    long param_dtype, reduce_dtype, accum_mode;
    long ranks, threads, timeout, node_size, memory_limit, reshard, checkpoint, auto_batch;
    long global_batch;
    long layers, heads, channels, seq, positions, vocab;
    long batch, accum, steps, warmup, seed, init_seed, eval_every, eval_batches, sample, bucket_kib;
    double lr, min_lr, weight_decay, beta2, clip, dropout, val_split, temperature;
    long deterministic, no_overlap, thread_ranks, graph, tune;
} flags = {
    .model = "tiny",
    .data = "dtrain.h",
    .schedule = 2,
    .device = "cpu",
    .timeout = 600,
    .reshard = 1,
    .steps = 1500,
    .warmup = 100,
    .seed = 1337,
    .init_seed = 1,
    .eval_every = 250,
    .eval_batches = 50,
    .sample = -1, /* -1: as the preset says; 0 in a size means the same */
    .lr = -1,
    .min_lr = -1,
    .weight_decay = 0.1,
    .beta2 = 0.99,
    .clip = 1,
    .val_split = 0.1,
    .temperature = 0.8,
    .bucket_kib = 25 * 1024,
};

typedef const char *const words[8];                        /* ended by NULL */
static words schedules = {"constant", "linear", "cosine"}; /* dtrain_schedule_kind */
static words scalings = {"none", "linear", "sqrt"};        /* dtrain_lr_scaling */
static words precisions = {"fp32", "tf32", "bf16", "fp16"};
static words dtypes = {"fp32", "bf16", "fp16"};
static words strategies = {"ddp",   "zero1",        "shard_grad_op", "full_shard", /* kind - 1 */
                           "zero3", "hybrid_shard", "auto"};
static words offloads = {"none", "optimizer", "optimizer+grads", "all"};
static words accum_modes = {"default", "last", "every", "shard_every"}; /* dtrain_accumulation */

static const struct flag {
    const char *name;
    char kind; /* s string, w one of the words, i integer, f number, b switch */
    void *value;
    double low, high;
    const char *help;
    const char *const *words;
} flag_table[] = {
    {"--model", 's', &flags.model, 0, 0,
     "tiny, baby, gpt2, gpt2_medium, gpt2_large or gpt2_xl; flags below override its sizes", NULL},
    {"--data", 's', &flags.data, 0, 0, "any file (bytes), or a llm.c token .bin", NULL},
    {"--ranks", 'i', &flags.ranks, 1, DTRAIN_MAX_RANKS,
     "data-parallel processes; default the launcher's number, or 2 on the cpu and 1 with a GPU",
     NULL},
    {"--device", 's', &flags.device, 0, 0, "cpu or cuda; rank r takes GPU r modulo their number",
     NULL},
    {"--precision", 'w', &flags.precision, 0, 0,
     "of matrix products and attention; all else is fp32. tf32 needs a GPU", precisions},
    {"--strategy", 'w', &flags.strategy, 0, 0,
     "where parameters, gradients and optimizer state live", strategies},
    {"--reshard-after-forward", 'i', &flags.reshard, 0, 1,
     "0: units stay whole from forward to backward, for memory instead of communication", NULL},
    {"--node-size", 'i', &flags.node_size, 1, DTRAIN_MAX_RANKS,
     "hybrid_shard: ranks that share one copy; default those of a host", NULL},
    {"--param-dtype", 'w', &flags.param_dtype, 0, 0, "sharded parameters travel as", dtypes},
    {"--reduce-dtype", 'w', &flags.reduce_dtype, 0, 0, "gradients travel as", dtypes},
    {"--offload", 'w', &flags.offload, 0, 0, "GPU: what lives in host memory", offloads},
    {"--activation-checkpointing", 'i', &flags.checkpoint, 0, 1e6,
     "1: each block's activations are dropped and made again in backward; n: every n-th's; 0 off",
     NULL},
    {"--memory-limit", 'i', &flags.memory_limit, 1, 1e9,
     "MiB of a rank: what --strategy auto and --auto-batch keep to; more is an error", NULL},
    {"--graph", 'b', &flags.graph, 0, 0, "GPU: record the step once and replay it", NULL},
    {"--tune", 'b', &flags.tune, 0, 0,
     "GPU: time matrix products at first use; the bits may then differ from run to run", NULL},
    {"--threads", 'i', &flags.threads, 0, 1024, "compute threads of a rank; 0 = cores / ranks",
     NULL},
    {"--layers", 'i', &flags.layers, 1, 1e6, "transformer blocks", NULL},
    {"--heads", 'i', &flags.heads, 1, 1e6, "attention heads; divides --channels", NULL},
    {"--channels", 'i', &flags.channels, 1, 1e7, "width of the residual stream", NULL},
    {"--seq", 'i', &flags.seq, 1, 1e7, "tokens per sample", NULL},
    {"--vocab", 'i', &flags.vocab, 1, 1e8, "vocabulary; larger token ids are errors", NULL},
    {"--batch", 'i', &flags.batch, 1, 1e6, "samples per rank and micro-batch", NULL},
    {"--auto-batch", 'b', &flags.auto_batch, 0, 0,
     "the largest that fits; at most --batch if that is given, else 512", NULL},
    {"--accum", 'i', &flags.accum, 1, 1e6, "micro-batches per step; default 1", NULL},
    {"--global-batch", 'i', &flags.global_batch, 1, 1e9,
     "samples of all ranks per step: chooses --accum, and --batch or less", NULL},
    {"--accum-mode", 'w', &flags.accum_mode, 0, 0, "which of them reduce gradients", accum_modes},
    {"--steps", 'i', &flags.steps, 1, 1e12, "optimizer steps", NULL},
    {"--lr", 'f', &flags.lr, 0, 1e3, "peak learning rate; default by model, below", NULL},
    {"--min-lr", 'f', &flags.min_lr, 0, 1e3, "learning rate at the end; default --lr / 10", NULL},
    {"--warmup", 'i', &flags.warmup, 0, 1e12, "steps of linear warm-up", NULL},
    {"--schedule", 'w', &flags.schedule, 0, 0, "of the learning rate", schedules},
    {"--lr-scaling", 'w', &flags.lr_scaling, 0, 0, "of --lr with the number of ranks", scalings},
    {"--weight-decay", 'f', &flags.weight_decay, 0, 1e3,
     "AdamW decay of matrices; biases and norms have none", NULL},
    {"--beta2", 'f', &flags.beta2, 0, 0.999999, "AdamW second-moment decay", NULL},
    {"--clip", 'f', &flags.clip, 0, 1e9, "global gradient norm; 0 = off", NULL},
    {"--dropout", 'f', &flags.dropout, 0, 0.99, "probability, on the residual stream", NULL},
    {"--seed", 'i', &flags.seed, 0, 4294967295.0, "of data order, dropout and sampling", NULL},
    {"--init-seed", 'i', &flags.init_seed, 0, 4294967295.0, "of the initial parameters", NULL},
    {"--eval-every", 'i', &flags.eval_every, 0, 1e12,
     "steps between validations; 0 = at the end only", NULL},
    {"--eval-batches", 'i', &flags.eval_batches, 0, 1e9,
     "batches per rank and validation; 0 = never validate", NULL},
    {"--val-split", 'f', &flags.val_split, 0.0001, 0.9, "share of the data, at its end, held out",
     NULL},
    {"--sample", 'i', &flags.sample, 0, 1e6, "tokens to write at the end; 0 = none", NULL},
    {"--temperature", 'f', &flags.temperature, 0.01, 100, "of the sample", NULL},
    {"--log", 's', &flags.log, 0, 0, "one JSON object a step to this file", NULL},
    {"--bucket-kib", 'i', &flags.bucket_kib, 1, 1e9,
     "gradient bucket size; the bits do not depend on it", NULL},
    {"--no-overlap", 'b', &flags.no_overlap, 0, 0,
     "communicate after backward only; the bits are the same", NULL},
    {"--deterministic", 'b', &flags.deterministic, 0, 0,
     "refuse what could change the bits from run to run; verify replicas and print a hash at the "
     "end",
     NULL},
    {"--thread-ranks", 'b', &flags.thread_ranks, 0, 0,
     "ranks are threads of one process (for debuggers)", NULL},
    {"--timeout", 'i', &flags.timeout, 1, 1e6, "seconds a rank waits for another", NULL},
};
enum { FLAG_COUNT = sizeof flag_table / sizeof flag_table[0] };

static const struct preset {
    const char *name;
    long layers, heads, channels, seq, positions, vocab, batch,
        sample; /* 0: vocabulary of the data */
    double lr;
} presets[] = {
    {"tiny", 4, 4, 128, 64, 0, 0, 6, 300,
     2e-3}, /* 2 ranks x 6: nanoGPT's configuration for a CPU */
    {"baby", 6, 6, 384, 128, 0, 0, 8, 300, 1e-3},
    {"gpt2", 12, 12, 768, 64, 1024, 50257, 4, 0, 6e-4},
    {"gpt2_medium", 24, 16, 1024, 64, 1024, 50257, 4, 0, 3e-4},
    {"gpt2_large", 36, 20, 1280, 64, 1024, 50257, 4, 0, 2.5e-4},
    {"gpt2_xl", 48, 25, 1600, 64, 1024, 50257, 4, 0, 2e-4},
};

/* One sentence about a bad request; the caller returns it as main's exit code. */
#define BAD(...) (fprintf(stderr, "train_gpt: " __VA_ARGS__), fputc('\n', stderr), 2)

static void print_help(void)
{
    printf("train_gpt: trains a GPT on text, data-parallel or sharded, over CPU ranks or GPUs "
           "(dtrain %s)\n\n",
           dtrain_version());
    for (int i = 0; i < FLAG_COUNT; i++) {
        const struct flag *f = &flag_table[i];
        char usual[32] = "";
        if (f->kind == 's' && *(const char **)f->value)
            snprintf(usual, sizeof usual, "%s", *(const char **)f->value);
        if (f->kind == 'w') snprintf(usual, sizeof usual, "%s", f->words[*(long *)f->value]);
        if (f->kind == 'i' && *(long *)f->value > 0)
            snprintf(usual, sizeof usual, "%ld", *(long *)f->value);
        if (f->kind == 'f' && *(double *)f->value >= 0)
            snprintf(usual, sizeof usual, "%g", *(double *)f->value);
        printf("  %-26s %-8s %s", f->name, usual, f->help);
        for (int k = 0; f->words && f->words[k]; k++) printf("%s%s", k ? ", " : ": ", f->words[k]);
        putchar('\n');
    }
    printf("\n  %-12s layers heads channels seq   vocab  batch  lr\n", "model");
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++)
        printf("  %-12s %6ld %5ld %8ld %3ld %7ld %6ld  %g\n", presets[i].name, presets[i].layers,
               presets[i].heads, presets[i].channels, presets[i].seq,
               presets[i].vocab ? presets[i].vocab : 256, presets[i].batch, presets[i].lr);
}

static int set_word(const struct flag *f, const char *text)
{
    char list[128] = "";
    for (int i = 0; f->words[i]; i++) {
        if (strcmp(text, f->words[i]) == 0) return *(long *)f->value = i, 0;
        snprintf(list + strlen(list), sizeof list - strlen(list), " %s", f->words[i]);
    }
    return BAD("%s is \"%s\"; it takes one of:%s", f->name, text, list);
}

static int set_flag(const struct flag *f, const char *text)
{
    char *end = NULL;
    double number = strtod(text, &end);
    if (f->kind == 'w') return set_word(f, text);
    if (f->kind == 's') {
        *(const char **)f->value = text;
        return 0;
    }
    if (end == text || *end || !(number >= f->low && number <= f->high))
        return BAD("%s is \"%s\"; it takes a number from %g to %g", f->name, text, f->low, f->high);
    if (f->kind == 'f') *(double *)f->value = number;
    else if (number != floor(number))
        return BAD("%s is \"%s\"; it takes a whole number", f->name, text);
    else *(long *)f->value = (long)number;
    return 0;
}

static int parse_flags(int argc, char **argv)
{
    for (int a = 1; a < argc; a++) {
        const struct flag *f = NULL;
        for (int i = 0; i < FLAG_COUNT && !f; i++)
            if (strcmp(argv[a], flag_table[i].name) == 0) f = &flag_table[i];
        if (!f) return BAD("unknown flag \"%s\"; --help lists them", argv[a]);
        if (f->kind == 'b') *(long *)f->value = 1;
        else if (a + 1 == argc) return BAD("%s needs a value", f->name);
        else if (set_flag(f, argv[++a])) return 2;
    }
    return 0;
}

static int apply_preset(void)
{
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        const struct preset *p = &presets[i];
        if (strcmp(flags.model, p->name) != 0) continue;
        if (!flags.layers) flags.layers = p->layers;
        if (!flags.heads) flags.heads = p->heads;
        if (!flags.channels) flags.channels = p->channels;
        if (!flags.seq) flags.seq = p->seq;
        if (!flags.batch) flags.batch = flags.auto_batch ? 512 : p->batch;
        if (!flags.vocab) flags.vocab = p->vocab;
        if (flags.sample < 0) flags.sample = p->sample;
        flags.positions = p->positions > flags.seq ? p->positions : flags.seq;
        if (flags.lr < 0) flags.lr = p->lr;
        if (flags.min_lr < 0) flags.min_lr = flags.lr / 10;
        return 0;
    }
    return BAD("--model is \"%s\"; it takes tiny, baby, gpt2, gpt2_medium, gpt2_large or gpt2_xl",
               flags.model);
}

/* ---- the model ------------------------------------------------------------------------------ */

typedef struct block_params {
    dtrain_param *ln1_weight, *ln1_bias, *qkv_weight, *qkv_bias, *proj_weight, *proj_bias;
    dtrain_param *ln2_weight, *ln2_bias, *fc_weight, *fc_bias, *fcproj_weight, *fcproj_bias;
} block_params;

typedef struct gpt {
    dtrain_param *params;
    size_t param_count;
    char (*names)[32];
    dtrain_param *wte, *wpe, *lnf_weight, *lnf_bias, *head;
    block_params *blocks;
} gpt;

/* Adds the next parameter: shape (rows, columns), or (rows) when columns is 0. */
static dtrain_param *declare(gpt *m, uint32_t unit, const char *name, int64_t rows, int64_t columns,
                             uint32_t init, float scale)
{
    dtrain_param *p = &m->params[m->param_count];
    char *full = m->names[m->param_count++];
    if (unit > 0 && unit <= (uint32_t)flags.layers) snprintf(full, 32, "h.%u.%s", unit - 1, name);
    else snprintf(full, 32, "%s", name);
    p->name = full;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->unit = unit;
    p->init = init;
    p->init_scale = scale;
    return p;
}

/* GPT-2's initialisation: N(0, 0.02), projections into the residual stream by 1/sqrt(2 layers) less. */
static void declare_block(gpt *m, block_params *b, uint32_t unit)
{
    int64_t c = flags.channels;
    float residual = 0.02f / sqrtf(2.0f * (float)flags.layers);
    b->ln1_weight = declare(m, unit, "ln_1.weight", c, 0, DTRAIN_INIT_CONSTANT, 1);
    b->ln1_bias = declare(m, unit, "ln_1.bias", c, 0, DTRAIN_INIT_ZERO, 0);
    b->qkv_weight = declare(m, unit, "attn.c_attn.weight", 3 * c, c, DTRAIN_INIT_NORMAL, 0.02f);
    b->qkv_bias = declare(m, unit, "attn.c_attn.bias", 3 * c, 0, DTRAIN_INIT_ZERO, 0);
    b->proj_weight = declare(m, unit, "attn.c_proj.weight", c, c, DTRAIN_INIT_NORMAL, residual);
    b->proj_bias = declare(m, unit, "attn.c_proj.bias", c, 0, DTRAIN_INIT_ZERO, 0);
    b->ln2_weight = declare(m, unit, "ln_2.weight", c, 0, DTRAIN_INIT_CONSTANT, 1);
    b->ln2_bias = declare(m, unit, "ln_2.bias", c, 0, DTRAIN_INIT_ZERO, 0);
    b->fc_weight = declare(m, unit, "mlp.c_fc.weight", 4 * c, c, DTRAIN_INIT_NORMAL, 0.02f);
    b->fc_bias = declare(m, unit, "mlp.c_fc.bias", 4 * c, 0, DTRAIN_INIT_ZERO, 0);
    b->fcproj_weight =
        declare(m, unit, "mlp.c_proj.weight", c, 4 * c, DTRAIN_INIT_NORMAL, residual);
    b->fcproj_bias = declare(m, unit, "mlp.c_proj.bias", c, 0, DTRAIN_INIT_ZERO, 0);
}

/* Parameters in forward order; one unit for the embedding, one a block, one for the end. The
 * classifier is the token embedding under another name: a sharded strategy must know that two units
 * use it. */
static int gpt_declare(gpt *m)
{
    size_t layers = (size_t)flags.layers, count = 5 + 12 * layers;
    memset(m, 0, sizeof *m);
    m->params = (dtrain_param *)calloc(count, sizeof *m->params);
    m->names = (char(*)[32])calloc(count, sizeof *m->names);
    m->blocks = (block_params *)calloc(layers, sizeof *m->blocks);
    if (!m->params || !m->names || !m->blocks) return 1;
    m->wte = declare(m, 0, "wte.weight", flags.vocab, flags.channels, DTRAIN_INIT_NORMAL, 0.02f);
    m->wpe =
        declare(m, 0, "wpe.weight", flags.positions, flags.channels, DTRAIN_INIT_NORMAL, 0.02f);
    for (size_t l = 0; l < layers; l++) declare_block(m, &m->blocks[l], (uint32_t)l + 1);
    m->lnf_weight =
        declare(m, (uint32_t)layers + 1, "ln_f.weight", flags.channels, 0, DTRAIN_INIT_CONSTANT, 1);
    m->lnf_bias =
        declare(m, (uint32_t)layers + 1, "ln_f.bias", flags.channels, 0, DTRAIN_INIT_ZERO, 0);
    m->head = declare(m, (uint32_t)layers + 1, "lm_head.weight", 0, 0, DTRAIN_INIT_ZERO, 0);
    m->head->alias_of = m->wte;
    return 0;
}

static void gpt_free(gpt *m)
{
    free(m->params);
    free(m->names);
    free(m->blocks);
}

/* x += h, what the layer before has left to add (nothing at first), and its normalisation: one pass
 * over memory for both. */
static dtrain_tensor *norm(dtrain_tape *t, dtrain_tensor **x, dtrain_tensor *h,
                           dtrain_param *weight, dtrain_param *bias)
{
    if (!h) return dtrain_layernorm(t, *x, weight, bias);
    return dtrain_add_layernorm(t, *x, h, weight, bias, x);
}

/* x (B*T, C) is the residual stream. Returns what is still to be added to it. */
static dtrain_tensor *block(dtrain_tape *t, const block_params *p, dtrain_tensor **x,
                            dtrain_tensor *h)
{
    float drop = (float)flags.dropout;
    h = norm(t, x, h, p->ln1_weight, p->ln1_bias);                        /* (B*T, C) */
    h = dtrain_linear(t, h, p->qkv_weight, p->qkv_bias, DTRAIN_ACT_NONE); /* (B*T, 3C) */
    h = dtrain_attention(t, h, flags.seq, flags.heads, DTRAIN_CAUSAL);    /* (B*T, C) */
    h = dtrain_linear(t, h, p->proj_weight, p->proj_bias, DTRAIN_ACT_NONE);
    h = norm(t, x, dtrain_dropout(t, h, drop), p->ln2_weight, p->ln2_bias);
    h = dtrain_linear(t, h, p->fc_weight, p->fc_bias, DTRAIN_ACT_GELU);         /* (B*T, 4C) */
    h = dtrain_linear(t, h, p->fcproj_weight, p->fcproj_bias, DTRAIN_ACT_NONE); /* (B*T, C) */
    return dtrain_dropout(t, h, drop);
}

/* tokens (batch, seq) -> logits (batch*seq, vocab) */
static dtrain_tensor *gpt_forward(dtrain_tape *t, const gpt *m, const int32_t *tokens,
                                  int64_t batch)
{
    int64_t shape[2] = {batch, flags.seq};
    dtrain_tensor *input = dtrain_tape_input(t, DTRAIN_I32, 2, shape, tokens, false), *x, *h = NULL;
    dtrain_tape_unit(t, 0);
    x = dtrain_dropout(t, dtrain_embedding(t, input, m->wte, m->wpe), (float)flags.dropout);
    for (long l = 0; l < flags.layers; l++) {
        dtrain_tape_unit(t, (uint32_t)l + 1);
        h = block(t, &m->blocks[l], &x, h);
    }
    dtrain_tape_unit(t, (uint32_t)flags.layers + 1);
    h = norm(t, &x, h, m->lnf_weight, m->lnf_bias);
    return dtrain_linear(t, h, m->head, NULL, DTRAIN_ACT_NONE);
}

/* ---- data ----------------------------------------------------------------------------------- */

/* One side of the split: its loader and the batch it has just filled. */
typedef struct source {
    const gpt *model;
    dtrain_loader *loader;
    int64_t batch;
    int32_t *inputs, *targets; /* (batch, seq) */
} source;

static dtrain_result set_batch(void *user, uint32_t batch)
{
    source *s = (source *)user;
    const size_t bytes = (size_t)batch * (size_t)flags.seq * sizeof *s->inputs;
    free(s->inputs);
    free(s->targets);
    s->batch = batch;
    s->inputs = (int32_t *)calloc(1, bytes);
    s->targets = (int32_t *)calloc(1, bytes);
    return s->inputs && s->targets ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
}

static dtrain_result next_batch(void *user)
{
    source *s = (source *)user;
    return dtrain_loader_next(s->loader, s->inputs, s->targets);
}

static dtrain_tensor *loss(dtrain_tape *t, void *user)
{
    const source *s = (const source *)user;
    int64_t rows = s->batch * flags.seq;
    dtrain_tensor *logits = gpt_forward(t, s->model, s->inputs, s->batch);
    return dtrain_cross_entropy(t, logits,
                                dtrain_tape_input(t, DTRAIN_I32, 1, &rows, s->targets, false));
}

static dtrain_dataset_desc dataset_desc(void)
{
    dtrain_dataset_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = flags.data;
    desc.vocab_count = flags.vocab;
    return desc;
}

/* The first part trains, the last --val-split of the tokens is held out. */
static dtrain_loader_desc loader_desc(dtrain_dataset *dataset, int64_t batch, bool held_out)
{
    int64_t tokens = dtrain_dataset_token_count(dataset);
    int64_t train = tokens - (int64_t)((double)tokens * flags.val_split);
    dtrain_loader_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dataset = dataset;
    desc.batch = (uint32_t)batch;
    desc.sequence = flags.seq;
    desc.seed = (uint64_t)flags.seed;
    desc.first_token = held_out ? train : 0;
    desc.token_count = held_out ? tokens - train : train;
    return desc;
}

typedef struct job {
    gpt model;
    dtrain_dataset *dataset;
    source train, held_out;
    uint32_t accum;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_metrics *metrics;
    dtrain_memory memory;
} job;

/* What the flags ask of the strategy. */
static dtrain_strategy_desc strategy_desc(void)
{
    static const uint32_t types[] = {DTRAIN_F32, DTRAIN_BF16, DTRAIN_F16}; /* as in dtypes */
    static const uint32_t classes[] = {
        0, DTRAIN_OFFLOAD_OPTIMIZER, DTRAIN_OFFLOAD_OPTIMIZER | DTRAIN_OFFLOAD_GRADS,
        DTRAIN_OFFLOAD_OPTIMIZER | DTRAIN_OFFLOAD_GRADS | DTRAIN_OFFLOAD_PARAMS};
    dtrain_strategy_desc desc = dtrain_strategy_defaults();
    desc.kind = (uint32_t)flags.strategy + 1;
    desc.accumulation = (uint32_t)flags.accum_mode;
    desc.param_dtype = types[flags.param_dtype];
    desc.reduce_dtype = types[flags.reduce_dtype];
    desc.offload = classes[flags.offload];
    desc.node_size = (uint32_t)flags.node_size;
    desc.no_overlap = flags.no_overlap != 0;
    desc.reshard_after_forward = flags.reshard != 0;
    desc.init_seed = (uint64_t)flags.init_seed;
    desc.bucket_bytes = (size_t)flags.bucket_kib * 1024;
    if (desc.first_bucket_bytes > desc.bucket_bytes) desc.first_bucket_bytes = desc.bucket_bytes;
    return desc;
}

/* ---- what rank 0 shows ---------------------------------------------------------------------- */

static double mib(uint64_t bytes) { return (double)bytes / 1048576.0; }

static void show_device(dtrain_world *world)
{
    dtrain_device *device = dtrain_world_device(world);
    dtrain_device_info gpu;
    dtrain_comm_info comm;
    int ranks = dtrain_world_size(world);
    uint32_t threads = dtrain_world_threads(world);
    printf("dtrain %s    %d rank%s ", dtrain_version(), ranks, ranks == 1 ? "" : "s");
    if (device->ops->host_memory) {
        printf("x %u thread%s on the cpu (%s kernels)\n", threads, threads == 1 ? "" : "s",
               dtrain_cpu_kernel_name());
        return;
    }
    dtrain_comm_query(dtrain_world_comm(world), &comm);
    if (device->ops->query(device, &gpu) == DTRAIN_OK)
        printf("on %u %s, %s%s, collectives: %s\n", gpu.count, gpu.name,
               precisions[flags.precision], flags.graph ? ", graph" : "", comm.backend);
}

/* Gradients of a rank in each mode of accumulation that this strategy has. */
static void show_accumulation(const dtrain_strategy_info *info, int ranks)
{
    dtrain_strategy_desc desc = info->desc;
    dtrain_memory memory;
    gpt copy; /* planning writes to parameters, and those of the model are in use */
    printf("accum   gradients are reduced in mode %s; MiB of gradients:",
           accum_modes[info->desc.accumulation]);
    if (gpt_declare(&copy) == 0)
        for (desc.accumulation = DTRAIN_ACCUMULATE_LAST;
             desc.accumulation <= DTRAIN_ACCUMULATE_SHARD_EVERY; desc.accumulation++)
            if (dtrain_strategy_plan(copy.params, copy.param_count, &desc, ranks, &memory) ==
                DTRAIN_OK)
                printf(" %s %.1f", accum_modes[desc.accumulation], mib(memory.grads));
    gpt_free(&copy);
    printf("\n");
}

static void show_strategy(const job *j, int ranks)
{
    const dtrain_memory *m = &j->memory;
    dtrain_strategy_info info;
    dtrain_strategy_query(j->strategy, &info);
    printf(
        "strategy %s: %d shards x %d replicas, gradients in %zu buckets; a rank sends %llu bytes "
        "a step of one micro-batch\n",
        info.name, info.shard_ranks, info.replicas, info.bucket_count,
        (unsigned long long)info.step_bytes);
    if (info.reason[0]) printf("auto    %s\n", info.reason);
    if (j->accum > 1) show_accumulation(&info, ranks);
    printf(
        "memory  a rank will need %.1f MiB: parameters %.1f, gradients %.1f, AdamW %.1f, buffers "
        "%.1f, activations %.1f + %.1f, workspace %.1f\n",
        mib(m->total), mib(m->params), mib(m->grads), mib(m->optimizer), mib(m->buffers),
        mib(m->activations), mib(m->activation_grads), mib(m->workspace));
    if (m->host) printf("offload %.1f MiB of host memory a rank\n", mib(m->host));
    printf("\n");
}

static void show_start(dtrain_world *world, const job *j)
{
    const int ranks = dtrain_world_size(world);
    const int64_t tokens = dtrain_dataset_token_count(j->dataset);
    const long batch = (long)j->train.batch;
    dtrain_strategy_info info;
    dtrain_strategy_query(j->strategy, &info);
    show_device(world);
    printf("model   %s: %ld layers, %ld heads, %ld channels, %ld tokens of context, %ld symbols: "
           "%.2f M parameters (%llu)\n",
           flags.model, flags.layers, flags.heads, flags.channels, flags.seq, flags.vocab,
           1e-6 * (double)info.total_elements, (unsigned long long)info.total_elements);
    printf("data    %s: %lld tokens, the last %lld held out\n", flags.data, (long long)tokens,
           (long long)((double)tokens * flags.val_split));
    printf("step    %ld x %ld tokens x %u micro-batches x %d ranks = %ld tokens\n", batch,
           flags.seq, j->accum, ranks, batch * flags.seq * (long)j->accum * ranks);
    show_strategy(j, ranks);
}

static void show_end(dtrain_world *world, const dtrain_summary *s, const dtrain_memory *m)
{
    const dtrain_device *device = dtrain_world_device(world);
    uint64_t now = device->peak_bytes;
    if (device->ops->host_memory) dtrain_process_memory(&now, NULL);
    printf("\n  loss                 %10.4f   from %.4f, over %lld steps and %.2f M tokens\n",
           s->last_loss, s->first_loss, (long long)s->steps, 1e-6 * (double)s->tokens);
    if (isfinite(s->val_loss))
        printf("  validation loss      %10.4f   perplexity %.2f\n", s->val_loss, exp(s->val_loss));
    printf("  tokens/s             %10.0f   %.1f s in all\n", s->tokens_per_second, s->seconds);
    printf("  step                 %10.2f ms\n", s->step_ms);
    printf("  communication        %10.2f ms in flight, %.2f ms exposed; %.1f MiB sent a step\n",
           s->comm_ms, s->exposed_comm_ms, mib(s->comm_bytes) / (double)(s->steps ? s->steps : 1));
    printf("  scaling              %10.1f %%  of %d ranks, counting exposed communication\n",
           100 * s->scaling, dtrain_world_size(world));
    printf("  memory               %10.1f MiB in rank 0, %.1f predicted\n", mib(now),
           mib(m->total));
}

static uint32_t tape_flags(void)
{
    return flags.precision == 2 ? DTRAIN_TAPE_BF16 : flags.precision == 3 ? DTRAIN_TAPE_F16 : 0;
}

/* Draws from softmax(logits / temperature). */
static int32_t draw(const float *logits, long count, uint64_t at)
{
    double sum = 0, best = -INFINITY, pick = dtrain_random_uniform((uint64_t)flags.seed, 77, at);
    for (long i = 0; i < count; i++) best = logits[i] > best ? logits[i] : best;
    for (long i = 0; i < count; i++) sum += exp((logits[i] - best) / flags.temperature);
    for (long i = 0; i < count; i++) {
        pick -= exp((logits[i] - best) / flags.temperature) / sum;
        if (pick < 0) return (int32_t)i;
    }
    return (int32_t)(count - 1);
}

static void show_token(int32_t token)
{
    if (flags.vocab != 256) printf("%d ", token);
    else if (token == '\n') printf("\n  ");
    else putchar(isprint(token) || token == '\t' || token >= 128 ? token : '?');
}

/* Draws --sample tokens, each from a forward pass over the last seq - 1 or fewer. Every rank does:
 * parameters may have to be gathered. They have the same values and draw the same tokens; the first
 * shows them. */
static dtrain_result show_sample(dtrain_tape *t, const gpt *m, bool first)
{
    int64_t seq = flags.seq, length = 1;
    int32_t *window = (int32_t *)calloc((size_t)seq, sizeof *window);
    float *logits = (float *)calloc((size_t)(seq * flags.vocab), sizeof *logits);
    dtrain_result result = window && logits ? DTRAIN_OK : DTRAIN_ERROR_MEMORY;
    if (window) window[0] = '\n';
    if (first) printf("\na sample, temperature %g:\n  ", flags.temperature);
    for (long i = 0; i < flags.sample && result == DTRAIN_OK; i++) {
        result = dtrain_tape_begin(t, tape_flags() | DTRAIN_TAPE_NO_GRAD, 0);
        if (result == DTRAIN_OK)
            result = dtrain_tensor_read(t, gpt_forward(t, m, window, 1), logits);
        if (result != DTRAIN_OK) break;
        int32_t token = draw(logits + (length - 1) * flags.vocab, flags.vocab, (uint64_t)i);
        if (first) show_token(token);
        if (length == seq) memmove(window, window + 1, (size_t)(--length) * sizeof *window);
        window[length++] = token;
    }
    if (first) printf("\n");
    free(window);
    free(logits);
    return result;
}

/* ---- training ------------------------------------------------------------------------------- */

#define TRY(call)                              \
    do {                                       \
        result = (call);                       \
        if (result != DTRAIN_OK) goto cleanup; \
    } while (0)

static dtrain_result open_source(dtrain_world *world, job *j, source *s, bool held_out)
{
    dtrain_loader_desc desc = loader_desc(j->dataset, s->batch, held_out);
    return dtrain_loader_create(world, &desc, &s->loader);
}

static dtrain_trainer_desc trainer_desc(dtrain_world *world, job *j)
{
    dtrain_trainer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.accumulation = j->accum;
    desc.tokens = (uint32_t)(j->train.batch * flags.seq);
    desc.clip = (float)flags.clip;
    desc.tape_flags = tape_flags();
    desc.checkpoint_every = (uint32_t)flags.checkpoint;
    desc.graph = flags.graph != 0;
    desc.seed = (uint64_t)flags.seed;
    desc.schedule.kind = (uint32_t)flags.schedule;
    desc.schedule.lr = dtrain_scale_lr((float)flags.lr, dtrain_world_size(world),
                                       (dtrain_lr_scaling)flags.lr_scaling);
    desc.schedule.min_lr = (float)flags.min_lr;
    desc.schedule.warmup_steps = flags.warmup;
    desc.schedule.total_steps = flags.steps;
    desc.strategy = j->strategy;
    desc.optimizer = j->optimizer;
    desc.next_batch = next_batch;
    desc.loss = loss;
    desc.user = &j->train;
    return desc;
}

/* How many samples a micro-batch has and how many of those a step: before anything is allocated. */
static dtrain_result choose_batch(dtrain_world *world, job *j, const dtrain_strategy_desc *strategy)
{
    dtrain_trainer_desc trainer = trainer_desc(world, j);
    const uint64_t global = (uint64_t)flags.global_batch;
    const int ranks = dtrain_world_size(world);
    uint32_t batch = (uint32_t)flags.batch;
    dtrain_result result = DTRAIN_OK;
    j->accum = flags.accum ? (uint32_t)flags.accum : 1;
    if (global) /* before a search, so that what cannot be shared is an error at once */
        TRY(dtrain_accumulation_for(global, batch, ranks, &batch, &j->accum));
    if (flags.auto_batch) {
        dtrain_auto_batch_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.max_batch = batch;
        desc.set_batch = set_batch;
        desc.trainer = &trainer;
        desc.params = j->model.params;
        desc.param_count = j->model.param_count;
        desc.strategy = strategy;
        TRY(dtrain_auto_batch(world, &desc, &batch));
    }
    if (global) TRY(dtrain_accumulation_for(global, batch, ranks, &batch, &j->accum));
    TRY(set_batch(&j->train, batch));
    TRY(set_batch(&j->held_out, batch));
cleanup:
    return result;
}

static dtrain_result open_job(dtrain_world *world, job *j)
{
    dtrain_result result = DTRAIN_ERROR_MEMORY;
    dtrain_dataset_desc dataset = dataset_desc();
    dtrain_strategy_desc strategy = strategy_desc();
    dtrain_optimizer_desc adamw = dtrain_adamw_defaults();
    dtrain_trainer_desc trainer;
    dtrain_metrics_desc metrics;
    memset(&metrics, 0, sizeof metrics);
    if (gpt_declare(&j->model)) goto cleanup;
    j->train.model = j->held_out.model = &j->model;
    TRY(dtrain_dataset_open(world, &dataset, &j->dataset));
    TRY(choose_batch(world, j, &strategy));
    TRY(open_source(world, j, &j->train, false));
    TRY(open_source(world, j, &j->held_out, true));
    trainer = trainer_desc(world, j);
    TRY(dtrain_plan_activations(world, &trainer, &j->memory));
    strategy.other_bytes = j->memory.total;
    TRY(dtrain_strategy_create(world, j->model.params, j->model.param_count, &strategy,
                               &j->strategy));
    adamw.beta2 = (float)flags.beta2;
    adamw.weight_decay = (float)flags.weight_decay;
    TRY(dtrain_optimizer_create(world, j->strategy, &adamw, &j->optimizer));
    trainer = trainer_desc(world, j);
    TRY(dtrain_trainer_create(world, &trainer, &j->trainer));
    TRY(dtrain_trainer_plan_memory(j->trainer, &j->memory));
    metrics.total_steps = flags.steps;
    metrics.progress = stdout;
    metrics.progress_every = flags.steps >= 200 ? (uint32_t)(flags.steps / 20) : 1;
    metrics.jsonl_path = flags.log;
    TRY(dtrain_metrics_create(world, &metrics, &j->metrics));
cleanup:
    return result;
}

static void close_job(job *j)
{
    dtrain_metrics_destroy(j->metrics);
    dtrain_trainer_destroy(j->trainer);
    dtrain_optimizer_destroy(j->optimizer);
    dtrain_strategy_destroy(j->strategy);
    dtrain_loader_destroy(j->train.loader);
    dtrain_loader_destroy(j->held_out.loader);
    dtrain_dataset_close(j->dataset);
    free(j->train.inputs);
    free(j->train.targets);
    free(j->held_out.inputs);
    free(j->held_out.targets);
    gpt_free(&j->model);
}

/* Validates on the same random windows each time. */
static dtrain_result validate(job *j, double *val_loss)
{
    dtrain_loader_seek(j->held_out.loader, 0);
    return dtrain_trainer_evaluate(j->trainer, next_batch, &j->held_out, flags.eval_batches,
                                   val_loss);
}

static dtrain_result train_steps(job *j)
{
    dtrain_result result = DTRAIN_OK;
    for (long step = 0; step < flags.steps && result == DTRAIN_OK; step++) {
        dtrain_step_record record;
        bool due =
            step + 1 == flags.steps || (flags.eval_every && (step + 1) % flags.eval_every == 0);
        result = dtrain_trainer_step(j->trainer, &record);
        if (result == DTRAIN_OK && due && flags.eval_batches)
            result = validate(j, &record.val_loss);
        if (result == DTRAIN_OK) result = dtrain_metrics_step(j->metrics, &record);
    }
    return result;
}

static dtrain_result finish_job(dtrain_world *world, job *j)
{
    dtrain_result result = DTRAIN_OK;
    dtrain_summary summary;
    uint64_t hash = 0;
    bool first = dtrain_world_rank(world) == 0;
    dtrain_metrics_summary(j->metrics, &summary);
    if (flags.deterministic) result = dtrain_strategy_verify(j->strategy, &hash);
    if (dtrain_metrics_destroy(j->metrics) != DTRAIN_OK) /* a torn log is no torn training */
        fprintf(stderr, "\ntrain_gpt: warning: %s\n", dtrain_last_error());
    j->metrics = NULL;
    if (result != DTRAIN_OK) return result;
    if (first) show_end(world, &summary, &j->memory);
    if (first && flags.deterministic)
        printf("  parameters           %016llx   bit-identical on all ranks\n",
               (unsigned long long)hash);
    if (!flags.sample) return DTRAIN_OK;
    return show_sample(dtrain_trainer_tape(j->trainer), &j->model, first);
}

/* Every rank's main function. A rank that fails because another one did says nothing: the first
 * has said it. What all ranks find out together, rank 0 says. */
static int train(dtrain_world *world, void *user)
{
    job j;
    dtrain_result result;
    (void)user;
    memset(&j, 0, sizeof j);
    TRY(open_job(world, &j));
    if (dtrain_world_rank(world) == 0) show_start(world, &j);
    fflush(stdout);
    TRY(train_steps(&j));
    TRY(finish_job(world, &j));
cleanup:
    if (result != DTRAIN_OK && result != DTRAIN_ERROR_PEER && dtrain_world_rank(world) == 0)
        fprintf(stderr, "\ntrain_gpt: %s\n", dtrain_last_error());
    close_job(&j);
    return result == DTRAIN_OK ? 0 : 1;
}

/* ---- before any rank starts ----------------------------------------------------------------- */

/* Where a launcher's number is not known yet, the least it can be. */
static int rank_count(bool cpu)
{
    if (flags.ranks) return (int)flags.ranks;
    return flags.node_size > 1 || !cpu ? (int)(flags.node_size ? flags.node_size : 1) : 2;
}

/* What parameters, gradients, optimizer and buffers of a rank will take, counted and not allocated:
 * combinations that cannot be end here as well. For auto, what its last choice needs. */
static int check_memory(bool cpu)
{
    dtrain_strategy_desc desc = strategy_desc();
    const int ranks = rank_count(cpu);
    const double have = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    dtrain_memory memory;
    gpt model;
    dtrain_result result = DTRAIN_ERROR_MEMORY;
    if (desc.kind == DTRAIN_STRATEGY_AUTO)
        desc.kind = ranks > 1 || flags.offload ? DTRAIN_FULL_SHARD : DTRAIN_DDP;
    if (gpt_declare(&model) == 0)
        result = dtrain_strategy_plan(model.params, model.param_count, &desc, ranks, &memory);
    gpt_free(&model);
    if (result != DTRAIN_OK)
        return BAD("--strategy %s: %s", strategies[flags.strategy], dtrain_last_error());
    if (cpu && (double)memory.total * ranks > have)
        return BAD("%d ranks need %.1f GiB each for parameters, gradients, optimizer and buffers; "
                   "this machine has %.1f GiB: use another --strategy, fewer --ranks or a smaller "
                   "model",
                   ranks, mib(memory.total) / 1024, have / 1073741824.0);
    if (flags.memory_limit && mib(memory.total) > (double)flags.memory_limit)
        return BAD("--memory-limit is %ld MiB and --strategy %s needs %.1f MiB a rank before any "
                   "activation: use one that shards more (full_shard, zero3, auto) or more --ranks",
                   flags.memory_limit, strategies[flags.strategy], mib(memory.total));
    return 0;
}

static int check_sizes(void)
{
    const bool cpu = strcmp(flags.device, "cpu") == 0;
    if (flags.channels % flags.heads)
        return BAD("--heads is %ld; it must divide --channels %ld", flags.heads, flags.channels);
    if (cpu && flags.precision == 1)
        return BAD("--precision tf32 needs a GPU (--device cuda): the cpu has no such arithmetic");
    if (cpu && flags.offload)
        return BAD("--offload needs a GPU (--device cuda): the cpu's memory is the host's");
    if (cpu && (flags.graph || flags.tune))
        return BAD("%s needs a GPU (--device cuda)", flags.graph ? "--graph" : "--tune");
    if (flags.accum && flags.global_batch)
        return BAD("--accum and --global-batch: the second chooses the first; use one of them");
    if (flags.deterministic && flags.auto_batch && !flags.memory_limit)
        return BAD("--deterministic and --auto-batch: free memory differs from run to run; give a "
                   "--memory-limit");
    if (flags.deterministic && flags.tune)
        return BAD("--deterministic and --tune: timings choose the bits; use one of them");
    if (flags.deterministic && cpu && strcmp(dtrain_cpu_kernel_name(), "cblas") == 0)
        return BAD("--deterministic: this build calls an external BLAS, whose bits may change from "
                   "run to run");
    return check_memory(cpu);
}

/* Opens the data once as the ranks will, so that a bad file is one sentence and no process. */
static int check_data(void)
{
    dtrain_dataset_desc desc = dataset_desc();
    dtrain_dataset *dataset = NULL;
    dtrain_loader *loader = NULL;
    dtrain_result result;
    TRY(dtrain_dataset_open(NULL, &desc, &dataset));
    flags.vocab = (long)dtrain_dataset_vocab_count(dataset);
    for (int side = 0; side < 2; side++) {
        dtrain_loader_desc window = loader_desc(dataset, flags.batch, side == 1);
        TRY(dtrain_loader_create(NULL, &window, &loader));
        dtrain_loader_destroy(loader);
    }
cleanup:
    dtrain_dataset_close(dataset);
    return result == DTRAIN_OK ? 0 : BAD("%s", dtrain_last_error());
}

int main(int argc, char **argv)
{
    dtrain_launch_desc launch;
    dtrain_launch_info info;
    for (int a = 1; a < argc; a++)
        if (strcmp(argv[a], "--help") == 0 || strcmp(argv[a], "-h") == 0) return print_help(), 0;
    if (parse_flags(argc, argv) || apply_preset() || check_data() || check_sizes()) return 2;
    memset(&launch, 0, sizeof launch);
    if (dtrain_device_ops_by_name(flags.device, &launch.device_ops) != DTRAIN_OK)
        return BAD("--device: %s", dtrain_last_error());
#ifdef DTRAIN_USE_NCCL
    if (!launch.device_ops->host_memory) launch.comm_ops = dtrain_nccl_comm_ops();
#endif
    launch.tune = flags.tune != 0;
    launch.math = flags.precision == 1 ? DTRAIN_MATH_TF32 : DTRAIN_MATH_DEFAULT;
    launch.memory_limit = (uint64_t)flags.memory_limit << 20;
    launch.rank_count = (uint32_t)flags.ranks;
    launch.default_rank_count = launch.device_ops->host_memory ? 2 : 1;
    launch.threads_per_rank = (uint32_t)flags.threads;
    launch.timeout_ms = (uint32_t)flags.timeout * 1000;
    launch.mode = flags.thread_ranks ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES;
    if (dtrain_launch(&launch, train, NULL, &info) == DTRAIN_OK) return 0;
    fprintf(stderr, "train_gpt: %s\n", dtrain_last_error());
    return info.exit_code ? info.exit_code : 1;
}
