/* settings.h: what train_gpt can be asked for beside the switches of all training programs: its own flags, their
 * defaults, --help and the presets. The parser fills one object; every other function is given a pointer to it. */
#ifndef SETTINGS_H
#define SETTINGS_H

#include "tools/run/run.h"
#include "gpt.h"
#include "sums.h"
#include "tokenizer_files.h"

typedef struct settings {
    run_settings *run;        /* what all training programs have */
    const char *model, *data; /* no data: sums */
    const char *import_from, *export_to;
    const char *tokenizer_path, *prompt;
    const char *tokens; /* the file of what --tokenizer has made of --data; NULL: --data itself */
    const tokenizer *tokenizer; /* NULL without --tokenizer */
    sums *sums; /* what is learned without --data; NULL with it, and without training */
    long data_format, export_dtype;
    long layers, heads, channels, seq, positions, vocab;
    long eval_every, eval_batches, sample, generate, top_k, no_cache;
    long end_token;  /* of an imported model of bytes: the one that ends a text; 0: none */
    long activation; /* place in gpt_activations */
    double dropout, epsilon, val_split, temperature, top_p;
    gpt_config found;   /* in the file of --import; zeros: it says nothing */
    hf_config imported; /* config.json beside it */
} settings;

/* -1: as the preset says; 0 in a size means the same. The table below keeps pointers into it, which
 * is why it is not a local of main. */
static settings flags = {
    .run = &run_flags,
    .eval_every = -1,
    .eval_batches = 50,
    .sample = -1,
    .activation = -1,
    .epsilon = -1,
    .val_split = 0.1,
    .temperature = 0.8,
};

static words data_formats = {"auto", "bytes", "bin", "u16", "u32"};

static const flag model_flags[] = {
    FLAG_GROUP("model"),
    {"--model", 's', &flags.model, 0, 0,
     "preset of the sizes below: " GPT_PRESETS "; default: tiny, or sums to learn them", NULL},
    {"--layers", 'i', &flags.layers, 1, 1e6, "number of transformer blocks", NULL},
    {"--heads", 'i', &flags.heads, 1, 1e6, "attention heads; must divide --channels", NULL},
    {"--channels", 'i', &flags.channels, 1, 1e7, "width of the residual stream", NULL},
    {"--seq", 'i', &flags.seq, 1, 1e7, "tokens per sample", NULL},
    {"--vocab", 'i', &flags.vocab, 1, 1e8,
     "size of the vocabulary; a larger token id in the data is an error", NULL},
    {"--activation", 'w', &flags.activation, 0, 0, "of the MLP; default: gelu_new, that of GPT-2",
     gpt_activations},
    {"--norm-epsilon", 'f', &flags.epsilon, 1e-12, 1,
     "what layer norms add to a variance; default 1e-5", NULL},
    {"--dropout", 'f', &flags.dropout, 0, 0.99, "probability of dropout on the residual stream",
     NULL},
};

static const flag data_flags[] = {
    FLAG_GROUP("data and batches"),
    {"--data", 'p', &flags.data, 0, 0,
     "what to learn: a file, a folder of files, a pattern (\"shards/train_*.bin\"), or several of "
     "these with commas between; without it sums are learned, \"42 plus 17 is fifty-nine.\", all "
     "of two numbers of two digits",
     NULL},
    {"--data-format", 'w', &flags.data_format, 0, 0,
     "any file as bytes, llm.c's .bin, or tokens of 16 or 32 bits, as nanoGPT's .bin (u16); auto: "
     "bin by its magic, else bytes, and an error where it looks like something else",
     data_formats},
    {"--tokenizer", 'p', &flags.tokenizer_path, 0, 0,
     "for text in --data, --prompt and what is written: a directory with tokenizer.json "
     "(byte-level "
     "BPE, as of GPT-2 or Llama 3), or with vocab.json and merges.txt; or gpt2_tokenizer.bin of "
     "llm.c, which cannot encode",
     NULL},
    {"--val-split", 'f', &flags.val_split, 0.0001, 0.9,
     "share of the data, at its end, that is held out for validation", NULL},
};

static const flag step_flags[] = {
    FLAG_GROUP("optimization"),
    {"--steps", 'i', &run_flags.steps, 0, 1e12,
     "optimizer steps; default 1500, and 4000 for sums; 0 trains nothing: to --export what "
     "--import "
     "or --resume has",
     NULL},
};

static const flag weight_flags[] = {
    {"--import", 'p', &flags.import_from, 0, 0,
     "begin with the weights of a GPT-2: a directory of Hugging Face or its model.safetensors, one "
     "file or with an index, or a .bin of llm.c; without --model its sizes are those of the file, "
     "or of the config.json beside it",
     NULL},
    {"--export", 'p', &flags.export_to, 0, 0,
     "write the weights at the end: as llm.c to FILE.bin, else as Hugging Face; as "
     "DIR/model.safetensors with DIR/config.json beside it; if that fails, to a new folder "
     "export-XXXXXX with the checkpoints or the log",
     NULL},
    {"--export-dtype", 'w', &flags.export_dtype, 0, 0, "type of the values in that file", dtypes},
};

static const flag show_flags[] = {
    FLAG_GROUP("what the run shows"),
    {"--eval-every", 'i', &flags.eval_every, 0, 1e12,
     "steps between validations; default 250, and 400 for sums; 0 = at the end only", NULL},
    {"--eval-batches", 'i', &flags.eval_batches, 0, 1e9,
     "samples of a validation, of all ranks together, in units of --batch; at most all that are "
     "held out; 0 = never "
     "validate",
     NULL},
    {"--sample", 'i', &flags.sample, 0, 1e6,
     "tokens to write at the end; 0 = none; default: 300, or none for gpt2 and larger; of sums it "
     "shows ten, unless there is a --prompt",
     NULL},
    {"--generate", 'i', &flags.generate, 1, 1e9,
     "train nothing, and write so many tokens with the model of --import or --resume", NULL},
    {"--prompt", 's', &flags.prompt, 0, 0,
     "text that --sample and --generate go on from; without a tokenizer, and with a vocabulary "
     "that "
     "is not that of bytes, numbers of tokens with blanks between them",
     NULL},
    {"--temperature", 'f', &flags.temperature, 0, 100,
     "of --sample and --generate; 0 = always the most likely token", NULL},
    {"--top-k", 'i', &flags.top_k, 0, 1e8, "draw from so many of the most likely tokens; 0 = all",
     NULL},
    {"--top-p", 'f', &flags.top_p, 0, 1,
     "draw from the most likely tokens that together have this probability; 0 = all", NULL},
    {"--no-cache", 'b', &flags.no_cache, 0, 0,
     "compute each token from all before it, without their keys and values: to compare", NULL},
};

/* Write what differs from other programs, and make the table in the order of --help. */
static void make_table(void)
{
    run_flags.steps = -1;
    run_flags.warmup = 100;
    run_flags.schedule = DTRAIN_SCHEDULE_COSINE;
    run_flags.clip = 1;
    add_flags(model_flags, COUNT(model_flags));
    add_flags(file_flags, COUNT(file_flags));
    add_flags(data_flags, COUNT(data_flags));
    add_flags(batch_flags, COUNT(batch_flags));
    add_flags(step_flags, COUNT(step_flags));
    add_flags(optimizer_flags, COUNT(optimizer_flags));
    add_shared_flags();
    add_flags(weight_flags, COUNT(weight_flags));
    add_flags(show_flags, COUNT(show_flags));
    add_flags(monitor_flags, COUNT(monitor_flags));
}

static void print_help(void)
{
    const gpt_preset *p;
    printf("train_gpt: trains a GPT on text, data-parallel or sharded, over CPU ranks or GPUs "
           "(dtrain %s)\n\nWithout a flag two ranks learn sums, and keep log and model in "
           "runs/sums, or runs/sums-2 and so on\nwhere that is there. With flags a run keeps what "
           "they say.\n\n",
           DTRAIN_VERSION_STRING);
    flags_help(flag_table, flag_count);
    printf("\n  %-12s layers heads channels  seq   vocab  batch  lr\n", "--model");
    for (size_t i = 0; (p = gpt_preset_at(i)) != NULL; i++)
        printf("  %-12s %6ld %5ld %8ld %4ld %7ld %6ld  %g\n", p->name, p->config.layers,
               p->config.heads, p->config.channels, p->config.seq,
               p->config.vocab ? p->config.vocab : 256, p->batch, p->lr);
    printf(
        "\nexamples\n"
        "  train_gpt\n"
        "  train_gpt --data shakespeare.txt --ranks 2 --log runs/a/log.jsonl --checkpoint runs/a\n"
        "  train_gpt --data shakespeare.txt --ranks 4 --checkpoint runs/a --resume auto\n"
        "  train_gpt --data shards --data-format u16 --model gpt2 --strategy full_shard --dry-run\n"
        "  train_gpt --import GPT2 --tokenizer GPT2 --generate 100 --prompt \"Hello\"\n"
        "  train_gpt --resume runs/a --steps 0 --export model/model.safetensors\n");
}

/* Whether there is anything to train; if not, a model is exported or writes. */
static bool trains(const settings *s) { return s->run->steps != 0 && !s->generate; }

/* Choose the preset for what neither flags nor the file of --import give: that of --model, or the
 * largest that is no wider than the file's model. NULL: there is none of that name. */
static const gpt_preset *choose_preset(settings *s)
{
    const gpt_preset *preset = gpt_preset_at(1), *next;
    if (!s->model) s->model = trains(s) && !s->data ? "sums" : "tiny";
    if (given("--model") || !s->positions) return gpt_preset_find(s->model);
    for (size_t i = 2; (next = gpt_preset_at(i)) != NULL; i++)
        if (next->config.channels <= s->channels) preset = next;
    s->model = s->import_from;
    return preset;
}

/* Fill in what the flags leave to the preset, whose rate is one of AdamW. */
static int apply_preset(settings *s)
{
    const gpt_preset *p = choose_preset(s);
    if (!p) return BAD("--model is \"%s\"; it takes " GPT_PRESETS, s->model);
    if (s->run->steps < 0) s->run->steps = s->data ? 1500 : 4000;
    if (s->eval_every < 0) s->eval_every = s->data ? 250 : 400;
    const long room = s->positions; /* of the file */
    if (room && s->seq > room)
        return BAD("--seq is %ld, and %s has %ld positions", s->seq, s->import_from, room);
    if (!s->layers) s->layers = p->config.layers;
    if (!s->heads) s->heads = p->config.heads;
    if (!s->channels) s->channels = p->config.channels;
    if (s->activation < 0) s->activation = 0;
    if (s->epsilon < 0) s->epsilon = 1e-5;
    if (!s->seq) s->seq = room && room < p->config.seq ? room : p->config.seq;
    if (!s->run->batch) s->run->batch = s->run->auto_batch ? 512 : p->batch;
    if (!s->vocab) s->vocab = p->config.vocab;
    if (!s->vocab && s->tokenizer) s->vocab = s->tokenizer->count;
    if (!s->vocab && !trains(s)) s->vocab = 256;
    if (s->tokenizer && s->tokenizer->count > s->vocab)
        return BAD("--tokenizer %s has %d tokens, and the model a vocabulary of %ld",
                   s->tokenizer_path, (int)s->tokenizer->count, s->vocab);
    if (s->sample < 0) s->sample = p->sample;
    if (!room) s->positions = p->config.positions > s->seq ? p->config.positions : s->seq;
    apply_rates(s->run, p->lr);
    return 0;
}

#endif /* SETTINGS_H */
