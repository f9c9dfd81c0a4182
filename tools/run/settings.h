/* settings.h: the switches that training programs share: their values, defaults and rows of the table of flags, and
 * the command line and file that they come from.
 *
 * A program defines RUN_NAME, the name that its sentences begin with, and includes tools/run/run.h. Before it reads
 * the command line it writes its own defaults into run_flags and makes its table, in the order of --help:
 *
 *     add_flags(own, COUNT(own)); add_flags(batch_flags, COUNT(batch_flags)); ... */
#ifndef RUN_SETTINGS_H
#define RUN_SETTINGS_H

#include "tools/about.h"
#include "tools/config.h"
#include "tools/descriptors.h"
#include "tools/flags.h"
#include "tools/open.h"

typedef struct run_settings {
    const char *device, *comm, *emulate;
    const char *checkpoints, *resume; /* directories */
    const char *config, *config_out;  /* files of flags */
    const char *log, *prometheus, *tensorboard, *trace;
    long histograms;
    const char *command; /* the command line, for manifests */
    const char *cluster; /* of the simulator, for --dry-run */
    long dry_run, tune;
    long steps, batch, accum, global_batch, auto_batch, accum_mode, workers, seed, init_seed;
    long optimizer, schedule, lr_scaling, warmup, variance_steps; /* the first: places in lists */
    double lr, min_lr, muon_lr, weight_decay, beta2, clip;
    long tensor, sequence_parallel, pipeline, chunks, pipeline_schedule;
    const char *stage_units;   /* a list of numbers, or NULL: by cost */
    dtrain_pipeline_desc line; /* of the last three: check_pipeline */
    long ranks, threads, thread_ranks, timeout, graph, tune_gemm, deterministic, probe_links;
    long strategy, precision, param_dtype, reduce_dtype, reshard, node_size, bucket_kib, no_overlap,
        offload, checkpoint, memory_limit;
    long compression, dense_below, dense_steps, warmup_steps, no_feedback, hierarchical;
    double topk_ratio, topk_momentum, warmup_ratio;
    long save_every, keep, keep_best, save_blocking, set_aside, restarts, stop_status, nonfinite,
        verify_every;
    struct {
        uint32_t node_ranks; /* 0: none */
        double gigabits_per_second, latency_us;
    } emulation; /* what --emulate says */
} run_settings;

/* -1: as the program says; 0 in a size means the same. The rows below keep pointers into it, which is why it is not
 * a local of main; a program writes into it what differs. */
static run_settings run_flags = {
    .workers = 1,
    .tensor = 1,
    .pipeline = 1,
    .device = "cpu",
    .timeout = 600,
    .reshard = 1,
    .seed = 1337,
    .init_seed = 1,
    .lr = -1,
    .min_lr = -1,
    .muon_lr = 0.02,
    .weight_decay = -1,
    .beta2 = 0.99,
    .bucket_kib = 25 * 1024,
    .keep = 3,
    .topk_ratio = 0.01,
    .warmup_ratio = 0.25,
    .dense_below = 1024,
    .dense_steps = 10,
};

typedef const char *const words[8];                                 /* ends with NULL */
static words optimizers = {"adamw", "sgd", "lion", "muon"};         /* dtrain_optimizer_kind - 1 */
static words schedules = {"constant", "linear", "cosine", "steps"}; /* dtrain_schedule_kind */
static words pipelines = {"1f1b", "gpipe", "interleaved", "zb_h1"}; /* dtrain_pipeline_kind */
static words scalings = {"none", "linear", "sqrt"};                 /* schedule_desc in job.h */
static words precisions = {"fp32", "tf32", "bf16", "fp16"};
static words dtypes = {"fp32", "bf16", "fp16"};
static words strategies = {"ddp",   "zero1",        "shard_grad_op", "full_shard", /* kind - 1 */
                           "zero3", "hybrid_shard", "auto"};
static words offloads = {"none", "optimizer", "optimizer+grads", "all"};
static words compressions = {"none", "topk"};           /* dtrain_compression */
static words nonfinites = {"stop", "skip", "rollback"}; /* the first two: dtrain_nonfinite */
static words accum_modes = {"default", "last", "every", "shard_every"}; /* dtrain_accumulation */

enum { TF32 = 1, BF16, FP16 }; /* places in precisions */
enum { ROLLBACK = 2 };         /* in nonfinites */

/* The dtrain_dtype at a place in dtypes. */
static uint32_t float_type(long place)
{
    static const uint32_t types[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16, DTRAIN_DTYPE_F16};
    return types[place];
}

static bool is_optimizer(const run_settings *s, dtrain_optimizer_kind kind)
{
    return s->optimizer == (long)kind - 1;
}

/* ---- rows of the table -------------------------------------------------------------------------- */

static const flag file_flags[] = {
    {"--config", 's', &run_flags.config, 0, 0,
     "file of these flags, as lines of key = value without dashes; flags on the command line win",
     NULL},
    {"--config-out", 's', &run_flags.config_out, 0, 0,
     "write the flags as they are in force to this file, for a later --config", NULL},
    {"--dry-run", 'a', &run_flags.dry_run, 0, 0,
     "print all flags as they are in force, the memory of a rank, the predicted step time and "
     "scaling, and stop; what is printed is a file for --config",
     NULL},
    {"--tune", 'a', &run_flags.tune, 0, 0,
     "try batches, strategies and bucket sizes, a few steps each, print the fastest flags and why, "
     "and stop; flags that are given stay",
     NULL},
    {"--cluster", 's', &run_flags.cluster, 0, 0,
     "--dry-run: predict for one of build/simulate's clusters, as h100, in place of this machine",
     NULL},
};

static const flag batch_flags[] = {
    {"--workers", 'i', &run_flags.workers, 0, 64,
     "threads per rank that read batches ahead; the data does not depend on them", NULL},
    {"--seed", 'i', &run_flags.seed, 0, 4294967295.0, "seed of data order and of what is drawn",
     NULL},
    {"--init-seed", 'i', &run_flags.init_seed, 0, 4294967295.0, "seed of the initial parameters",
     NULL},
    {"--batch", 'i', &run_flags.batch, 1, 1e6, "samples per rank and micro-batch", NULL},
    {"--auto-batch", 'b', &run_flags.auto_batch, 0, 0,
     "use the largest batch that fits in memory, at most --batch, or 512 without it", NULL},
    {"--accum", 'i', &run_flags.accum, 1, 1e6, "micro-batches per step; default 1", NULL},
    {"--global-batch", 'i', &run_flags.global_batch, 1, 1e9,
     "samples per step of all ranks together; chooses --accum, and lowers --batch if needed", NULL},
    {"--accum-mode", 'w', &run_flags.accum_mode, 0, 0,
     "reduce gradients after the last micro-batch only, or after every one", accum_modes},
};

static const flag optimizer_flags[] = {
    {"--optimizer", 'w', &run_flags.optimizer, 0, 0,
     "adamw, sgd with a momentum of 0.9, lion, or muon for the blocks' matrices and adamw for the "
     "rest",
     optimizers},
    {"--lr", 'f', &run_flags.lr, 0, 1e3,
     "peak learning rate; default: by model; a fifth of AdamW's for lion, 100 times that for sgd",
     NULL},
    {"--muon-lr", 'f', &run_flags.muon_lr, 1e-9, 1e3,
     "muon: peak learning rate of the blocks' matrices, 0.02; --lr is that of the rest", NULL},
    {"--min-lr", 'f', &run_flags.min_lr, 0, 1e3, "learning rate at the end; default --lr / 10",
     NULL},
    {"--warmup", 'i', &run_flags.warmup, 0, 1e12, "steps in which the learning rate rises to --lr",
     NULL},
    {"--schedule", 'w', &run_flags.schedule, 0, 0,
     "shape of the learning rate after that; steps: a tenth after half and after three quarters of "
     "the run, without --min-lr",
     schedules},
    {"--lr-scaling", 'w', &run_flags.lr_scaling, 0, 0, "scale --lr with the number of ranks",
     scalings},
    {"--weight-decay", 'f', &run_flags.weight_decay, 0, 1e3,
     "decay of matrices; biases and norms have none; default 0.1; 0.5 for lion, 0.0001 for sgd",
     NULL},
    {"--beta2", 'f', &run_flags.beta2, 0, 0.999999, "decay of AdamW's second moments", NULL},
    {"--variance-steps", 'i', &run_flags.variance_steps, 0, 1e12,
     "keep AdamW's second moments as they are after this many steps; with top-k, give as many as "
     "--dense-steps; 0 = never",
     NULL},
    {"--clip", 'f', &run_flags.clip, 0, 1e9, "limit of the global gradient norm; 0 = none", NULL},
};

static const flag rank_flags[] = {
    FLAG_GROUP("ranks and devices"),
    {"--ranks", 'i', &run_flags.ranks, 1, DTRAIN_MAX_RANKS,
     "processes, data-parallel without --tensor and --pipeline; default: the launcher's number, or "
     "else one node of --node-size, or 2 on the cpu and 1 with a GPU",
     NULL},
    {"--tensor", 'i', &run_flags.tensor, 1, DTRAIN_MAX_RANKS,
     "ranks that share every layer of a replica, each with its part of the heads, features and "
     "vocabulary; --ranks / --tensor / --pipeline replicas average gradients",
     NULL},
    {"--sequence-parallel", 'b', &run_flags.sequence_parallel, 0, 0,
     "with --tensor: norms, dropout and residuals have a part of the rows on each rank: less "
     "memory, the same bytes sent",
     NULL},
    {"--pipeline", 'i', &run_flags.pipeline, 1, DTRAIN_MAX_RANKS,
     "ranks that share a replica by its depth: each has some of the blocks, and the --accum "
     "micro-batches of a step follow each other through them; with --strategy ddp or zero1",
     NULL},
    {"--chunks", 'i', &run_flags.chunks, 1, 64,
     "with --pipeline-schedule interleaved: runs of blocks that each rank of --pipeline has; "
     "default 2",
     NULL},
    {"--pipeline-schedule", 'w', &run_flags.pipeline_schedule, 0, 0,
     "order of the micro-batches of --pipeline", pipelines},
    {"--stage-units", 's', &run_flags.stage_units, 0, 0,
     "how many units each stage of --pipeline has, as 8,6: the embedding is one, each block, and "
     "the "
     "head with the loss; default: divided so that the slowest stage is as fast as can be",
     NULL},
    {"--device", 's', &run_flags.device, 0, 0,
     "cpu or cuda; rank r uses GPU r modulo the number of GPUs", NULL},
    {"--threads", 'i', &run_flags.threads, 0, 1024, "compute threads per rank; 0 = cores / ranks",
     NULL},
    {"--thread-ranks", 'b', &run_flags.thread_ranks, 0, 0,
     "run the ranks as threads of one process, for debuggers", NULL},
    {"--comm", 's', &run_flags.comm, 0, 0,
     "communicator: local or mpi; default: chosen by device and launcher", NULL},
    {"--emulate", 's', &run_flags.emulate, 0, 0,
     "emulate a cluster on this machine, as NODESxRANKS:GBPS:LATENCY_US, for example 2x4:10:50",
     NULL},
    {"--timeout", 'i', &run_flags.timeout, 1, 1e6, "seconds that a rank waits for another", NULL},
    {"--probe-links", 'b', &run_flags.probe_links, 0, 0,
     "measure the links between ranks, for two seconds, and warn when they are too slow", NULL},
    {"--graph", 'b', &run_flags.graph, 0, 0, "GPU: record the step once and replay it", NULL},
    {"--tune-gemm", 'b', &run_flags.tune_gemm, 0, 0,
     "GPU: time matrix products at their first use; bits may then differ from run to run", NULL},
    {"--deterministic", 'b', &run_flags.deterministic, 0, 0,
     "refuse whatever could change the bits from run to run; compare the replicas and print a hash "
     "of the parameters at the end",
     NULL},
};

static const flag strategy_flags[] = {
    FLAG_GROUP("strategy, precision and memory"),
    {"--strategy", 'w', &run_flags.strategy, 0, 0,
     "where parameters, gradients and optimizer state live", strategies},
    {"--precision", 'w', &run_flags.precision, 0, 0,
     "type of matrix products and attention; everything else is fp32; tf32 needs a GPU; on a CPU "
     "bf16 without AMX, "
     "and fp16, are slower than fp32 and take more memory",
     precisions},
    {"--param-dtype", 'w', &run_flags.param_dtype, 0, 0, "type in which sharded parameters travel",
     dtypes},
    {"--reduce-dtype", 'w', &run_flags.reduce_dtype, 0, 0, "type in which gradients travel",
     dtypes},
    {"--reshard-after-forward", 'i', &run_flags.reshard, 0, 1,
     "0 keeps units whole from forward to backward: more memory, less communication", NULL},
    {"--node-size", 'i', &run_flags.node_size, 1, DTRAIN_MAX_RANKS,
     "ranks of a node, for hybrid_shard and --hierarchical; default: the ranks of a host", NULL},
    {"--bucket-kib", 'i', &run_flags.bucket_kib, 1, 1e9,
     "size of a gradient bucket; the bits do not depend on it", NULL},
    {"--no-overlap", 'b', &run_flags.no_overlap, 0, 0,
     "communicate after backward only; the bits are the same", NULL},
    {"--offload", 'w', &run_flags.offload, 0, 0, "GPU: what to keep in host memory", offloads},
    {"--activation-checkpointing", 'i', &run_flags.checkpoint, 0, 1e6,
     "drop the activations of every n-th block and compute them again in backward; 0 = off", NULL},
    {"--memory-limit", 'i', &run_flags.memory_limit, 1, 1e9,
     "MiB per rank for parameters, gradients, optimizer, activations and communication, which "
     "--strategy auto, --auto-batch and --tune keep to; a run that needs more is an error; not in "
     "it: the program itself, its data, scratch of kernels",
     NULL},
};

static const flag compression_flags[] = {
    FLAG_GROUP("compression of gradients"),
    {"--hierarchical", 'b', &run_flags.hierarchical, 0, 0,
     "reduce inside nodes first; top-k and --reduce-dtype then apply between nodes only", NULL},
    {"--compression", 'w', &run_flags.compression, 0, 0,
     "compress gradients (ddp only); what is not sent is added to the next gradient", compressions},
    {"--topk-ratio", 'f', &run_flags.topk_ratio, 1e-9, 1, "topk: share of the elements to send",
     NULL},
    {"--topk-momentum", 'f', &run_flags.topk_momentum, 0, 0.9999,
     "topk: momentum inside the compressor, in place of AdamW's beta1; 0 = off", NULL},
    {"--dense-steps", 'i', &run_flags.dense_steps, 0, 1e12,
     "steps at the beginning without compression", NULL},
    {"--compression-warmup", 'i', &run_flags.warmup_steps, 0, 1e12,
     "topk: steps after those in which the share falls to --topk-ratio", NULL},
    {"--warmup-ratio", 'f', &run_flags.warmup_ratio, 1e-9, 1,
     "topk: share at the beginning of that fall", NULL},
    {"--dense-below", 'i', &run_flags.dense_below, 0, 1e18,
     "tensors with fewer elements are sent whole", NULL},
    {"--no-error-feedback", 'b', &run_flags.no_feedback, 0, 0, "forget what is not sent", NULL},
};

static const flag checkpoint_flags[] = {
    FLAG_GROUP("checkpoints and failures"),
    {"--checkpoint", 'p', &run_flags.checkpoints, 0, 0,
     "directory to save to, at the end and every --save-every steps", NULL},
    {"--save-every", 'i', &run_flags.save_every, 0, 1e12,
     "steps between two checkpoints; 0 = one at the end", NULL},
    {"--keep", 'i', &run_flags.keep, 1, 1e9, "number of checkpoints that stay, the newest ones",
     NULL},
    {"--keep-best", 'i', &run_flags.keep_best, 0, 1e9,
     "keep so many of the lowest validation loss besides; then every validation is followed by a "
     "checkpoint",
     NULL},
    {"--save-blocking", 'b', &run_flags.save_blocking, 0, 0,
     "wait until a checkpoint is on the disk, instead of writing it while training goes on", NULL},
    {"--resume", 'p', &run_flags.resume, 0, 0,
     "auto: go on from the newest checkpoint of --checkpoint, if there is one; or the path of one",
     NULL},
    {"--set-aside", 'b', &run_flags.set_aside, 0, 0,
     "move the checkpoints of another run in --checkpoint to a directory aside-N in there, and "
     "begin anew",
     NULL},
    {"--restarts", 'i', &run_flags.restarts, 0, 1e6,
     "start the ranks again from the last checkpoint when one fails, so many times without "
     "progress",
     NULL},
    {"--stop-status", 'i', &run_flags.stop_status, 0, 255,
     "exit status of a run that a signal has stopped before its end, for schedulers that start "
     "again what has failed; default 0 with --checkpoint, and without it 128 + the signal's number",
     NULL},
    {"--nonfinite", 'w', &run_flags.nonfinite, 0, 0,
     "after a NaN: stop, skip the step, or roll back to the last checkpoint and go on behind the "
     "batch",
     nonfinites},
    {"--verify-every", 'i', &run_flags.verify_every, 0, 1e12,
     "steps between two comparisons of the parameters of all ranks; 0 = never", NULL},
};

static const flag monitor_flags[] = {
    {"--log", 's', &run_flags.log, 0, 0, "file for one JSON object per step", NULL},
    {"--tensorboard", 's', &run_flags.tensorboard, 0, 0,
     "directory for TensorBoard's event files: scalars, the flags, and --histograms", NULL},
    {"--prometheus", 's', &run_flags.prometheus, 0, 0,
     "FILE.prom in the directory of node_exporter's textfile collector", NULL},
    {"--histograms", 'i', &run_flags.histograms, 0, 1e9,
     "steps between histograms of weights and gradients for --tensorboard; 0 = never", NULL},
    {"--trace", 's', &run_flags.trace, 0, 0,
     "FILE for a timeline, for ui.perfetto.dev; rank r writes one with .rank<r> before the "
     "extension",
     NULL},
};

static flag flag_table[FLAGS_MOST];
static int flag_count;

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static void add_flags(const flag *rows, int count)
{
    for (int i = 0; i < count && flag_count < FLAGS_MOST; i++) flag_table[flag_count++] = rows[i];
}

/* Add the groups that all programs end with. */
static void add_shared_flags(void)
{
    add_flags(rank_flags, COUNT(rank_flags));
    add_flags(strategy_flags, COUNT(strategy_flags));
    add_flags(compression_flags, COUNT(compression_flags));
    add_flags(checkpoint_flags, COUNT(checkpoint_flags));
}

/* ---- reading them ------------------------------------------------------------------------------- */

/* One sentence about a bad request; the caller returns it as main's exit code. */
#define BAD(...) (say(stderr, RUN_NAME ": " __VA_ARGS__), fputc('\n', stderr), 2)

/* Read the command line, and under it the file that it names. Return 0, or main's exit status. */
static int read_flags(int count, char **arguments)
{
    if (flags_parse(RUN_NAME, flag_table, flag_count, count, arguments)) return 2;
    if (!run_flags.config) return 0;
    if (config_read(RUN_NAME, run_flags.config, flag_table, flag_count)) return 2;
    return flags_parse(RUN_NAME, flag_table, flag_count, count, arguments);
}

/* Whether a flag stood on the command line, or in a file with another value than it had. */
static bool given(const char *name)
{
    const int at = flags_find(flag_table, flag_count, name);
    return at >= 0 && flags_given[at];
}

/* The command line as one text, cut off where it has no room. */
static const char *join_words(int argc, char **argv)
{
    static char text[4096];
    for (int a = 0; a < argc; a++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", a ? " " : "", argv[a]);
    return text;
}

/* The last error, without how a rank ended that only prints. */
static const char *run_error(void)
{
    static const char before[] = "its last error: ";
    const char *text = dtrain_last_error(), *at = strstr(text, before);
    if (at) text = at + sizeof before - 1;
    return strncmp(text, "rank 0: ", 8) == 0 ? text + 8 : text;
}

/* Fill in what follows from the optimizer, with the rate that AdamW has for this model. Steps of Lion are signs,
 * larger than AdamW's: a smaller rate and a larger decay; SGD follows gradients, which are small. */
static void apply_rates(run_settings *s, double adamw_lr)
{
    static const double rates[] = {1, 100, 0.2, 1}, decays[] = {0.1, 1e-4, 0.5, 0.1};
    if (s->lr < 0) s->lr = adamw_lr * rates[s->optimizer];
    if (s->weight_decay < 0) s->weight_decay = decays[s->optimizer];
    const bool falls =
        s->schedule == DTRAIN_SCHEDULE_LINEAR || s->schedule == DTRAIN_SCHEDULE_COSINE;
    if (s->min_lr < 0 && falls) s->min_lr = s->lr / 10;
}

/* Write the flags as they are in force, under a line of `about`, so that a reader sees the old file or the new one. */
static dtrain_result write_config(const char *path, const char *about)
{
    char tmp[4096 + 8];
    snprintf(tmp, sizeof tmp, "%s.tmp", path);
    FILE *file = open_new(tmp);
    if (file) {
        fprintf(file, "# " RUN_NAME " of dtrain %s: %s\n", DTRAIN_VERSION_STRING, about);
        config_write(file, flag_table, flag_count);
    }
    const bool written = file && !ferror(file);
    if (file && fclose(file) == 0 && written && rename(tmp, path) == 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be written: %s", path, strerror(errno));
}

/* Tell whether 16-bit numbers are widened in front of every operation: on a CPU whose products of bf16 are those of
 * fp32, and on any CPU for fp16. */
static bool widens(dtrain_device *device, const run_settings *s)
{
    dtrain_device_info info;
    if (!device->ops->host_memory || s->precision < BF16) return false;
    if (s->precision == FP16) return true;
    return dtrain_device_query(device, &info) == DTRAIN_OK &&
           strcmp(info.kernels, info.bf16_kernels) == 0;
}

#endif /* RUN_SETTINGS_H */
