/* train_flags.h: what train_gpt can be asked for: the flags, what they are without being given, and
 * which of them go together. Everything here happens before any rank starts. */
#ifndef TRAIN_FLAGS_H
#define TRAIN_FLAGS_H

#include "tools/flags.h"
#include "gpt.h"

static struct {
    const char *model, *data, *log, *device, *comm, *emulate;
    long schedule, lr_scaling, precision, strategy, offload; /* places in the lists below */
    long param_dtype, reduce_dtype, accum_mode, compression, exchange;
    long ranks, threads, timeout, node_size, memory_limit, reshard, checkpoint, auto_batch;
    long global_batch;
    long layers, heads, channels, seq, positions, vocab;
    long batch, accum, steps, warmup, seed, init_seed, eval_every, eval_batches, sample, bucket_kib;
    double lr, min_lr, weight_decay, beta2, clip, dropout, val_split, temperature;
    long deterministic, no_overlap, thread_ranks, graph, tune;
    double topk_ratio, topk_momentum, warmup_ratio;
    long variance_steps, powersgd_rank, dense_below, dense_steps, warmup_steps, no_feedback,
        hierarchical;
    dtrain_emulation emulation; /* what --emulate says */
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
static words compressions = {"none", "topk", "powersgd"};               /* dtrain_compression */
static words exchanges = {"all_gather", "balanced"};                    /* dtrain_sparse_exchange */
static words accum_modes = {"default", "last", "every", "shard_every"}; /* dtrain_accumulation */

static const flag flag_table[] = {
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
     "hybrid_shard, --hierarchical: ranks of a node; default those of a host", NULL},
    {"--param-dtype", 'w', &flags.param_dtype, 0, 0, "sharded parameters travel as", dtypes},
    {"--reduce-dtype", 'w', &flags.reduce_dtype, 0, 0, "gradients travel as", dtypes},
    {"--compression", 'w', &flags.compression, 0, 0,
     "ddp: of gradients; what is left out is made up for later", compressions},
    {"--topk-ratio", 'f', &flags.topk_ratio, 1e-9, 1, "topk: share of elements that are sent",
     NULL},
    {"--topk-momentum", 'f', &flags.topk_momentum, 0, 0.9999,
     "topk: momentum of what is selected, in place of AdamW's beta1; 0 = off", NULL},
    {"--sparse-exchange", 'w', &flags.exchange, 0, 0, "topk: how selections travel", exchanges},
    {"--powersgd-rank", 'i', &flags.powersgd_rank, 1, DTRAIN_ORTHOGONALIZE_COLUMNS,
     "powersgd: columns of the factors", NULL},
    {"--dense-steps", 'i', &flags.dense_steps, 0, 1e12, "first steps, without compression", NULL},
    {"--compression-warmup", 'i', &flags.warmup_steps, 0, 1e12,
     "topk: steps after those in which the share falls to --topk-ratio", NULL},
    {"--warmup-ratio", 'f', &flags.warmup_ratio, 1e-9, 1, "topk: share that they begin at", NULL},
    {"--dense-below", 'i', &flags.dense_below, 0, 1e18, "elements: smaller tensors travel whole",
     NULL},
    {"--no-error-feedback", 'b', &flags.no_feedback, 0, 0, "what is not sent is lost", NULL},
    {"--hierarchical", 'b', &flags.hierarchical, 0, 0,
     "reduce inside nodes first; topk and --reduce-dtype then apply between them", NULL},
    {"--comm", 's', &flags.comm, 0, 0, "local or mpi; default what device and launcher ask for",
     NULL},
    {"--emulate", 's', &flags.emulate, 0, 0,
     "NODESxRANKS:GBPS:LATENCY_US, a cluster on this machine: 2x4:10:50", NULL},
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
    {"--variance-steps", 'i', &flags.variance_steps, 0, 1e12,
     "AdamW's second moments stay after so many: with top-k as many as --dense-steps; 0 = never",
     NULL},
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

/* One sentence about a bad request; the caller returns it as main's exit code. */
#define BAD(...) (fprintf(stderr, "train_gpt: " __VA_ARGS__), fputc('\n', stderr), 2)

static void print_help(void)
{
    const gpt_preset *p;
    printf("train_gpt: trains a GPT on text, data-parallel or sharded, over CPU ranks or GPUs "
           "(dtrain %s)\n\n",
           dtrain_version());
    flags_help(flag_table, FLAG_COUNT);
    printf("\n  %-12s layers heads channels seq   vocab  batch  lr\n", "model");
    for (size_t i = 0; (p = gpt_preset_at(i)) != NULL; i++)
        printf("  %-12s %6ld %5ld %8ld %3ld %7ld %6ld  %g\n", p->name, p->config.layers,
               p->config.heads, p->config.channels, p->config.seq,
               p->config.vocab ? p->config.vocab : 256, p->batch, p->lr);
}

/* What the library would choose, so that --help shows it. */
static void take_defaults(void)
{
    flags.topk_ratio = 0.01;
    flags.warmup_ratio = 0.25;
    flags.powersgd_rank = 1;
    flags.dense_below = 1024;
    flags.dense_steps = 10;
}

static bool given(const char *name)
{
    const int at = flags_find(flag_table, FLAG_COUNT, name);
    return at >= 0 && flags_given[at];
}

static int apply_preset(void)
{
    const gpt_preset *p = gpt_preset_find(flags.model);
    if (!p) return BAD("--model is \"%s\"; it takes " GPT_PRESETS, flags.model);
    if (!flags.layers) flags.layers = p->config.layers;
    if (!flags.heads) flags.heads = p->config.heads;
    if (!flags.channels) flags.channels = p->config.channels;
    if (!flags.seq) flags.seq = p->config.seq;
    if (!flags.batch) flags.batch = flags.auto_batch ? 512 : p->batch;
    if (!flags.vocab) flags.vocab = p->config.vocab;
    if (flags.sample < 0) flags.sample = p->sample;
    flags.positions = p->config.positions > flags.seq ? p->config.positions : flags.seq;
    if (flags.lr < 0) flags.lr = p->lr;
    if (flags.min_lr < 0) flags.min_lr = flags.lr / 10;
    return 0;
}

/* ---- which of them go together -------------------------------------------------------------- */

/* A flag that would do nothing is an error; what strategies cannot do, check_memory finds. */
static int check_compression(void)
{
    static const struct {
        const char *name;
        long needs; /* 0: either */
    } list[] = {
        {"--topk-ratio", DTRAIN_COMPRESSION_TOPK},
        {"--topk-momentum", DTRAIN_COMPRESSION_TOPK},
        {"--sparse-exchange", DTRAIN_COMPRESSION_TOPK},
        {"--compression-warmup", DTRAIN_COMPRESSION_TOPK},
        {"--warmup-ratio", DTRAIN_COMPRESSION_TOPK},
        {"--powersgd-rank", DTRAIN_COMPRESSION_POWERSGD},
        {"--dense-steps", 0},
        {"--dense-below", 0},
        {"--no-error-feedback", 0},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        const bool serves = list[i].needs ? flags.compression == list[i].needs : flags.compression;
        if (given(list[i].name) && !serves)
            return BAD("%s does nothing without --compression %s", list[i].name,
                       list[i].needs ? compressions[list[i].needs] : "topk or powersgd");
    }
    if (given("--warmup-ratio") && !flags.warmup_steps)
        return BAD("--warmup-ratio does nothing without --compression-warmup");
    if (flags.compression && flags.precision == 3)
        return BAD("--compression and --precision fp16: what is kept for later steps has the loss "
                   "scale of its own step; use bf16");
    if (flags.compression && flags.graph)
        return BAD("--compression and --graph: what is sent changes in the first steps, and a "
                   "recorded step does not");
    if (flags.compression && flags.strategy != DTRAIN_STRATEGY_DDP - 1)
        return BAD("--compression works with --strategy ddp: the others reduce shards");
    return 0;
}

/* "2x4:10:50": two nodes of four ranks, 10 Gb/s, 50 us. */
static int check_emulation(void)
{
    dtrain_emulation *e = &flags.emulation;
    long nodes = 0, ranks = 0;
    int used = 0;
    if (!flags.emulate) return 0;
    const int found = sscanf(flags.emulate, "%ldx%ld:%lf:%lf%n", &nodes, &ranks,
                             &e->gigabits_per_second, &e->latency_us, &used);
    if (found != 4 || flags.emulate[used])
        return BAD("--emulate is \"%s\"; it takes NODESxRANKS:GBPS:LATENCY_US, as in 2x4:10:50",
                   flags.emulate);
    if (nodes < 1 || ranks < 1 || nodes > DTRAIN_MAX_RANKS || ranks > DTRAIN_MAX_RANKS / nodes)
        return BAD(
            "--emulate %ldx%ld: nodes and ranks are at least 1, and their product at most %d",
            nodes, ranks, DTRAIN_MAX_RANKS);
    if (!(e->gigabits_per_second > 0 && isfinite(e->gigabits_per_second)) ||
        !(e->latency_us >= 0 && e->latency_us <= 1e6))
        return BAD("--emulate %s: GBPS must be positive and LATENCY_US from 0 to 1e6",
                   flags.emulate);
    if (flags.ranks && flags.ranks != nodes * ranks)
        return BAD("--ranks is %ld, and --emulate %s has %ld", flags.ranks, flags.emulate,
                   nodes * ranks);
    if (flags.comm && strcmp(flags.comm, "local") != 0)
        return BAD("--emulate and --comm %s: it is the local communicator that emulates",
                   flags.comm);
    flags.ranks = nodes * ranks;
    e->node_ranks = (uint32_t)ranks;
    return 0;
}

#endif /* TRAIN_FLAGS_H */
