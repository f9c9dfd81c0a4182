/* settings.h: everything that train_gpt can be asked for: the flags, their defaults, --help and the
 * presets. The parser fills one object; every other function is given a pointer to it. */
#ifndef SETTINGS_H
#define SETTINGS_H

#include "tools/config.h"
#include "tools/flags.h"
#include "gpt.h"
#include "tokenizer.h"

typedef struct settings {
    const char *model, *data, *log, *device, *comm, *emulate;
    const char *checkpoints, *resume; /* directories */
    const char *import_from, *export_to;
    const char *config; /* a file of flags */
    const char *tokenizer_path, *prompt;
    const char *tokens; /* the file of what --tokenizer has made of --data; NULL: --data itself */
    const tokenizer *tokenizer; /* NULL without --tokenizer */
    const char *command;        /* the command line, for manifests */
    long save_every, snapshot_every, keep, keep_best, save_blocking, restarts, stop_status,
        nonfinite, verify_every;
    long optimizer, schedule, lr_scaling, precision, strategy,
        offload; /* places in the lists below */
    long data_format, workers;
    long param_dtype, reduce_dtype, export_dtype, accum_mode, compression, exchange;
    long ranks, threads, timeout, node_size, memory_limit, reshard, checkpoint, auto_batch;
    long global_batch;
    long layers, heads, channels, seq, positions, vocab;
    long batch, accum, steps, warmup, seed, init_seed, eval_every, eval_batches, sample, bucket_kib;
    double lr, min_lr, muon_lr, weight_decay, beta2, clip, dropout, val_split, temperature, top_p;
    long generate, top_k, no_cache;
    long deterministic, no_overlap, thread_ranks, graph, tune;
    double topk_ratio, topk_momentum, warmup_ratio;
    long variance_steps, powersgd_rank, dense_below, dense_steps, warmup_steps, no_feedback,
        hierarchical;
    dtrain_emulation emulation; /* what --emulate says */
} settings;

/* -1: as the preset says; 0 in a size means the same. The table below keeps pointers into it, which
 * is why it is not a local of main. */
static settings flags = {
    .model = "tiny",
    .data = "dtrain.h",
    .workers = 1,
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
    .sample = -1,
    .lr = -1,
    .min_lr = -1,
    .muon_lr = 0.02,
    .weight_decay = -1,
    .beta2 = 0.99,
    .clip = 1,
    .val_split = 0.1,
    .temperature = 0.8,
    .bucket_kib = 25 * 1024,
    .keep = 3,
    .topk_ratio = 0.01,
    .warmup_ratio = 0.25,
    .powersgd_rank = 1,
    .dense_below = 1024,
    .dense_steps = 10,
};

typedef const char *const words[8];                         /* ends with NULL */
static words optimizers = {"adamw", "sgd", "lion", "muon"}; /* dtrain_optimizer_kind - 1 */
static words schedules = {"constant", "linear", "cosine"};  /* dtrain_schedule_kind */
static words scalings = {"none", "linear", "sqrt"};         /* dtrain_lr_scaling */
static words precisions = {"fp32", "tf32", "bf16", "fp16"};
static words data_formats = {"auto", "bytes", "bin", "u16"}; /* dtrain_data_format */
static words dtypes = {"fp32", "bf16", "fp16"};
static words strategies = {"ddp",   "zero1",        "shard_grad_op", "full_shard", /* kind - 1 */
                           "zero3", "hybrid_shard", "auto"};
static words offloads = {"none", "optimizer", "optimizer+grads", "all"};
static words compressions = {"none", "topk", "powersgd"}; /* dtrain_compression */
static words exchanges = {"all_gather", "balanced"};      /* dtrain_sparse_exchange */
static words nonfinites = {"stop", "skip", "rollback"};   /* the first two: dtrain_nonfinite */
static words accum_modes = {"default", "last", "every", "shard_every"}; /* dtrain_accumulation */

/* The dtrain_dtype at a place in dtypes. */
static uint32_t float_type(long place)
{
    static const uint32_t types[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
    return types[place];
}

static const flag flag_table[] = {
    FLAG_GROUP("model"),
    {"--model", 's', &flags.model, 0, 0,
     "preset of the sizes below: tiny, baby, gpt2, gpt2_medium, gpt2_large or gpt2_xl", NULL},
    {"--layers", 'i', &flags.layers, 1, 1e6, "number of transformer blocks", NULL},
    {"--heads", 'i', &flags.heads, 1, 1e6, "attention heads; must divide --channels", NULL},
    {"--channels", 'i', &flags.channels, 1, 1e7, "width of the residual stream", NULL},
    {"--seq", 'i', &flags.seq, 1, 1e7, "tokens per sample", NULL},
    {"--vocab", 'i', &flags.vocab, 1, 1e8,
     "size of the vocabulary; a larger token id in the data is an error", NULL},
    {"--dropout", 'f', &flags.dropout, 0, 0.99, "probability of dropout on the residual stream",
     NULL},
    {"--init-seed", 'i', &flags.init_seed, 0, 4294967295.0, "seed of the initial parameters", NULL},
    {"--config", 's', &flags.config, 0, 0,
     "file of these flags, as lines of key = value without dashes; flags on the command line win",
     NULL},
    FLAG_GROUP("data and batches"),
    {"--data", 's', &flags.data, 0, 0,
     "what to learn: a file, a folder of files, a pattern (\"shards/train_*.bin\"), or several of "
     "these with commas between",
     NULL},
    {"--data-format", 'w', &flags.data_format, 0, 0,
     "any file as bytes, llm.c's .bin, or nanoGPT's .bin (u16); auto: bin by its magic, else bytes",
     data_formats},
    {"--tokenizer", 's', &flags.tokenizer_path, 0, 0,
     "GPT-2's tokenizer, for text in --data, --prompt and what is written: a directory with "
     "vocab.json and merges.txt, or gpt2_tokenizer.bin of llm.c, which cannot encode",
     NULL},
    {"--workers", 'i', &flags.workers, 0, 64,
     "threads per rank that read batches ahead; the data does not depend on them", NULL},
    {"--val-split", 'f', &flags.val_split, 0.0001, 0.9,
     "share of the data, at its end, that is held out for validation", NULL},
    {"--seed", 'i', &flags.seed, 0, 4294967295.0, "seed of data order, dropout and sampling", NULL},
    {"--batch", 'i', &flags.batch, 1, 1e6, "samples per rank and micro-batch", NULL},
    {"--auto-batch", 'b', &flags.auto_batch, 0, 0,
     "use the largest batch that fits in memory, at most --batch, or 512 without it", NULL},
    {"--accum", 'i', &flags.accum, 1, 1e6, "micro-batches per step; default 1", NULL},
    {"--global-batch", 'i', &flags.global_batch, 1, 1e9,
     "samples per step of all ranks together; chooses --accum, and lowers --batch if needed", NULL},
    {"--accum-mode", 'w', &flags.accum_mode, 0, 0,
     "reduce gradients after the last micro-batch only, or after every one", accum_modes},
    FLAG_GROUP("optimization"),
    {"--steps", 'i', &flags.steps, 0, 1e12,
     "optimizer steps; 0 trains nothing: to --export what --import or --resume has", NULL},
    {"--optimizer", 'w', &flags.optimizer, 0, 0,
     "adamw, sgd with a momentum of 0.9, lion, or muon for the blocks' matrices and adamw for the "
     "rest",
     optimizers},
    {"--lr", 'f', &flags.lr, 0, 1e3,
     "peak learning rate; default: see the models below; a fifth of that for lion, 100 times that "
     "for sgd",
     NULL},
    {"--muon-lr", 'f', &flags.muon_lr, 1e-9, 1e3,
     "muon: peak learning rate of the blocks' matrices, 0.02; --lr is that of the rest", NULL},
    {"--min-lr", 'f', &flags.min_lr, 0, 1e3, "learning rate at the end; default --lr / 10", NULL},
    {"--warmup", 'i', &flags.warmup, 0, 1e12, "steps in which the learning rate rises to --lr",
     NULL},
    {"--schedule", 'w', &flags.schedule, 0, 0, "shape of the learning rate after that", schedules},
    {"--lr-scaling", 'w', &flags.lr_scaling, 0, 0, "scale --lr with the number of ranks", scalings},
    {"--weight-decay", 'f', &flags.weight_decay, 0, 1e3,
     "decay of matrices; biases and norms have none; default 0.1; 0.5 for lion, 0.0001 for sgd",
     NULL},
    {"--beta2", 'f', &flags.beta2, 0, 0.999999, "decay of AdamW's second moments", NULL},
    {"--variance-steps", 'i', &flags.variance_steps, 0, 1e12,
     "keep AdamW's second moments as they are after this many steps; with top-k, give as many as "
     "--dense-steps; 0 = never",
     NULL},
    {"--clip", 'f', &flags.clip, 0, 1e9, "limit of the global gradient norm; 0 = none", NULL},
    FLAG_GROUP("ranks and devices"),
    {"--ranks", 'i', &flags.ranks, 1, DTRAIN_MAX_RANKS,
     "data-parallel processes; default: the launcher's number, or else 2 on the cpu and 1 with a "
     "GPU",
     NULL},
    {"--device", 's', &flags.device, 0, 0,
     "cpu or cuda; rank r uses GPU r modulo the number of GPUs", NULL},
    {"--threads", 'i', &flags.threads, 0, 1024, "compute threads per rank; 0 = cores / ranks",
     NULL},
    {"--thread-ranks", 'b', &flags.thread_ranks, 0, 0,
     "run the ranks as threads of one process, for debuggers", NULL},
    {"--comm", 's', &flags.comm, 0, 0,
     "communicator: local or mpi; default: chosen by device and launcher", NULL},
    {"--emulate", 's', &flags.emulate, 0, 0,
     "emulate a cluster on this machine, as NODESxRANKS:GBPS:LATENCY_US, for example 2x4:10:50",
     NULL},
    {"--timeout", 'i', &flags.timeout, 1, 1e6, "seconds that a rank waits for another", NULL},
    {"--graph", 'b', &flags.graph, 0, 0, "GPU: record the step once and replay it", NULL},
    {"--tune", 'b', &flags.tune, 0, 0,
     "GPU: time matrix products at their first use; bits may then differ from run to run", NULL},
    FLAG_GROUP("strategy, precision and memory"),
    {"--strategy", 'w', &flags.strategy, 0, 0,
     "where parameters, gradients and optimizer state live", strategies},
    {"--precision", 'w', &flags.precision, 0, 0,
     "type of matrix products and attention; everything else is fp32; tf32 needs a GPU",
     precisions},
    {"--param-dtype", 'w', &flags.param_dtype, 0, 0, "type in which sharded parameters travel",
     dtypes},
    {"--reduce-dtype", 'w', &flags.reduce_dtype, 0, 0, "type in which gradients travel", dtypes},
    {"--reshard-after-forward", 'i', &flags.reshard, 0, 1,
     "0 keeps units whole from forward to backward: more memory, less communication", NULL},
    {"--node-size", 'i', &flags.node_size, 1, DTRAIN_MAX_RANKS,
     "ranks of a node, for hybrid_shard and --hierarchical; default: the ranks of a host", NULL},
    {"--bucket-kib", 'i', &flags.bucket_kib, 1, 1e9,
     "size of a gradient bucket; the bits do not depend on it", NULL},
    {"--no-overlap", 'b', &flags.no_overlap, 0, 0,
     "communicate after backward only; the bits are the same", NULL},
    {"--offload", 'w', &flags.offload, 0, 0, "GPU: what to keep in host memory", offloads},
    {"--activation-checkpointing", 'i', &flags.checkpoint, 0, 1e6,
     "drop the activations of every n-th block and compute them again in backward; 0 = off", NULL},
    {"--memory-limit", 'i', &flags.memory_limit, 1, 1e9,
     "MiB per rank that --strategy auto and --auto-batch keep to; a run that needs more is an "
     "error",
     NULL},
    FLAG_GROUP("compression of gradients"),
    {"--hierarchical", 'b', &flags.hierarchical, 0, 0,
     "reduce inside nodes first; top-k and --reduce-dtype then apply between nodes only", NULL},
    {"--compression", 'w', &flags.compression, 0, 0,
     "compress gradients (ddp only); what is not sent is added to the next gradient", compressions},
    {"--topk-ratio", 'f', &flags.topk_ratio, 1e-9, 1, "topk: share of the elements to send", NULL},
    {"--topk-momentum", 'f', &flags.topk_momentum, 0, 0.9999,
     "topk: momentum inside the compressor, in place of AdamW's beta1; 0 = off", NULL},
    {"--sparse-exchange", 'w', &flags.exchange, 0, 0,
     "topk: how the ranks exchange their selections", exchanges},
    {"--powersgd-rank", 'i', &flags.powersgd_rank, 1, DTRAIN_ORTHOGONALIZE_COLUMNS,
     "powersgd: columns of the factors", NULL},
    {"--dense-steps", 'i', &flags.dense_steps, 0, 1e12,
     "steps at the beginning without compression", NULL},
    {"--compression-warmup", 'i', &flags.warmup_steps, 0, 1e12,
     "topk: steps after those in which the share falls to --topk-ratio", NULL},
    {"--warmup-ratio", 'f', &flags.warmup_ratio, 1e-9, 1,
     "topk: share at the beginning of that fall", NULL},
    {"--dense-below", 'i', &flags.dense_below, 0, 1e18,
     "tensors with fewer elements are sent whole", NULL},
    {"--no-error-feedback", 'b', &flags.no_feedback, 0, 0, "forget what is not sent", NULL},
    FLAG_GROUP("checkpoints and failures"),
    {"--checkpoint", 's', &flags.checkpoints, 0, 0,
     "directory to save to, at the end and every --save-every steps", NULL},
    {"--save-every", 'i', &flags.save_every, 0, 1e12,
     "steps between two checkpoints; 0 = one at the end", NULL},
    {"--keep", 'i', &flags.keep, 1, 1e9, "number of checkpoints that stay, the newest ones", NULL},
    {"--keep-best", 'i', &flags.keep_best, 0, 1e9,
     "keep so many of the lowest validation loss besides; then every validation is followed by a "
     "checkpoint",
     NULL},
    {"--save-blocking", 'b', &flags.save_blocking, 0, 0,
     "wait until a checkpoint is on the disk, instead of writing it while training goes on", NULL},
    {"--resume", 's', &flags.resume, 0, 0,
     "auto: go on from the newest checkpoint of --checkpoint, if there is one; or the path of one",
     NULL},
    {"--import", 's', &flags.import_from, 0, 0,
     "begin with the weights of a GPT-2: model.safetensors of Hugging Face, one file or with an "
     "index, or a .bin of llm.c; without --model its sizes are those of the file, or of the "
     "config.json beside it",
     NULL},
    {"--export", 's', &flags.export_to, 0, 0,
     "write the weights at the end: as llm.c to FILE.bin, else as Hugging Face; as "
     "DIR/model.safetensors with DIR/config.json beside it",
     NULL},
    {"--export-dtype", 'w', &flags.export_dtype, 0, 0, "type of the values in that file", dtypes},
    {"--restarts", 'i', &flags.restarts, 0, 1e6,
     "start the ranks again from the last checkpoint when one fails, so many times without "
     "progress",
     NULL},
    {"--stop-status", 'i', &flags.stop_status, 0, 255,
     "exit status of a run that a signal has stopped before its end, for schedulers that start "
     "again "
     "what has failed; default 0",
     NULL},
    {"--snapshot-every", 'i', &flags.snapshot_every, 0, 1e12,
     "steps between two snapshots in the launcher's memory, from which --restarts goes on; 0 = "
     "none",
     NULL},
    {"--nonfinite", 'w', &flags.nonfinite, 0, 0,
     "after a NaN: stop, skip the step, or roll back to the last checkpoint and go on behind the "
     "batch",
     nonfinites},
    {"--verify-every", 'i', &flags.verify_every, 0, 1e12,
     "steps between two comparisons of the parameters of all ranks; 0 = never", NULL},
    FLAG_GROUP("what the run shows"),
    {"--eval-every", 'i', &flags.eval_every, 0, 1e12,
     "steps between validations; 0 = at the end only", NULL},
    {"--eval-batches", 'i', &flags.eval_batches, 0, 1e9,
     "batches per rank and validation; 0 = never validate", NULL},
    {"--sample", 'i', &flags.sample, 0, 1e6,
     "tokens to write at the end; 0 = none; default: see the models below", NULL},
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
    {"--log", 's', &flags.log, 0, 0, "file for one JSON object per step", NULL},
    {"--deterministic", 'b', &flags.deterministic, 0, 0,
     "refuse whatever could change the bits from run to run; compare the replicas and print a hash "
     "of the parameters at the end",
     NULL},
};
enum { FLAG_COUNT = sizeof flag_table / sizeof flag_table[0] };
typedef char flags_fit[sizeof flag_table / sizeof flag_table[0] <= FLAGS_MOST ? 1 : -1];

/* One sentence about a bad request; the caller returns it as main's exit code. */
#define BAD(...) (fprintf(stderr, "train_gpt: " __VA_ARGS__), fputc('\n', stderr), 2)

static void print_help(void)
{
    const gpt_preset *p;
    printf("train_gpt: trains a GPT on text, data-parallel or sharded, over CPU ranks or GPUs "
           "(dtrain %s)\n\n",
           dtrain_version());
    flags_help(flag_table, FLAG_COUNT);
    printf("\n  %-12s layers heads channels seq   vocab  batch  lr\n", "--model");
    for (size_t i = 0; (p = gpt_preset_at(i)) != NULL; i++)
        printf("  %-12s %6ld %5ld %8ld %3ld %7ld %6ld  %g\n", p->name, p->config.layers,
               p->config.heads, p->config.channels, p->config.seq,
               p->config.vocab ? p->config.vocab : 256, p->batch, p->lr);
}

/* Read the command line, and under it the file that it names. Return 0, or main's exit status. */
static int read_flags(int count, char **arguments)
{
    if (flags_parse("train_gpt", flag_table, FLAG_COUNT, count, arguments)) return 2;
    if (!flags.config) return 0;
    if (config_read("train_gpt", flags.config, flag_table, FLAG_COUNT)) return 2;
    return flags_parse("train_gpt", flag_table, FLAG_COUNT, count, arguments);
}

/* Whether a flag stood on the command line, or in a file with another value than it had. */
static bool given(const char *name)
{
    const int at = flags_find(flag_table, FLAG_COUNT, name);
    return at >= 0 && flags_given[at];
}

/* Whether there is anything to train; if not, a model is exported or writes. */
static bool trains(const settings *s) { return s->steps > 0 && !s->generate; }

/* Choose the preset for what neither flags nor the file of --import give: that of --model, or the
 * largest that is no wider than the file's model. NULL: there is none of that name. */
static const gpt_preset *choose_preset(settings *s)
{
    const gpt_preset *preset = gpt_preset_at(0), *next;
    if (given("--model") || !s->positions) return gpt_preset_find(s->model);
    for (size_t i = 1; (next = gpt_preset_at(i)) != NULL; i++)
        if (next->config.channels <= s->channels) preset = next;
    s->model = s->import_from;
    return preset;
}

/* Fill in what the flags leave to the preset, whose rate is one of AdamW. Steps of Lion are signs, larger than AdamW's:
 * a smaller rate and a larger decay; SGD follows gradients, which are small. */
static int apply_preset(settings *s)
{
    static const double rates[] = {1, 100, 0.2, 1}, decays[] = {0.1, 1e-4, 0.5, 0.1};
    const gpt_preset *p = choose_preset(s);
    if (!p) return BAD("--model is \"%s\"; it takes " GPT_PRESETS, s->model);
    const long room = s->positions; /* of the file */
    if (room && s->seq > room)
        return BAD("--seq is %ld, and %s has %ld positions", s->seq, s->import_from, room);
    if (!s->layers) s->layers = p->config.layers;
    if (!s->heads) s->heads = p->config.heads;
    if (!s->channels) s->channels = p->config.channels;
    if (!s->seq) s->seq = room && room < p->config.seq ? room : p->config.seq;
    if (!s->batch) s->batch = s->auto_batch ? 512 : p->batch;
    if (!s->vocab) s->vocab = p->config.vocab;
    if (!s->vocab && s->tokenizer) s->vocab = s->tokenizer->count;
    if (!s->vocab && !trains(s)) s->vocab = 256;
    if (s->tokenizer && s->tokenizer->count > s->vocab)
        return BAD("--tokenizer %s has %d tokens, and the model a vocabulary of %ld",
                   s->tokenizer_path, (int)s->tokenizer->count, s->vocab);
    if (s->sample < 0) s->sample = p->sample;
    if (!room) s->positions = p->config.positions > s->seq ? p->config.positions : s->seq;
    if (s->lr < 0) s->lr = p->lr * rates[s->optimizer];
    if (s->weight_decay < 0) s->weight_decay = decays[s->optimizer];
    if (s->min_lr < 0) s->min_lr = s->lr / 10;
    return 0;
}

#endif /* SETTINGS_H */
