/* simulate.c: how fast a model would train on 1 to 1024 GPUs, without one.
 *
 *   build:   make build/simulate
 *   run:     build/simulate                                     (gpt2 on 8 to 1024 H100, ddp and full_shard)
 *            build/simulate --model llama8b --cluster h100 --gpus 8,16,32,64,128,256,512,1024
 *                 --strategies full_shard,hybrid_shard --batch-sizes 1,2 --precision bf16 --svg scaling.svg
 *            build/simulate --cluster v100 --network-gbps 100 --strategies ddp --compression topk
 *            build/simulate --plan --model llama70b --gpus 512 --global-batch 1024        (the fastest layouts)
 *            build/simulate --check tools/simulate/published.txt         (predicted beside published)
 *
 * What to expect: a table of step time, throughput, scaling efficiency, exposed communication and memory;
 * as JSON lines with --json, as a picture with --svg. --help lists flags, models and clusters.
 *
 * How it works: the library itself runs, as one rank of N, on a device without memory and with a
 * communicator without peers. What would take time moves a virtual clock instead:
 *
 *     compute   a layer: its product, max(flops / rate, bytes / bandwidth); attention; and what the kernels around
 *               them (norms, residuals, activations, the loss) read and write / bandwidth, which no product hides.
 *               An optimizer update, a conversion: bytes / bandwidth
 *     links     a collective begins when it was started, its links are free and those that its communicator started
 *               before it have begun; it ends after the time that the cluster's cost model gives it
 *     wait      moves compute to the end of the collective: the exposed communication
 *
 * So buckets, units, what is sent and in which order, what overlaps, and the memory plan are the
 * library's own, whatever the strategy; nothing here knows them. What is modelled: layers, their flops
 * and activations; clusters, and the seconds of a collective.
 *
 * What it leaves out: the input pipeline, the host (a GPU's queue is assumed never to run dry), and
 * congestion by other jobs. A prediction is as good as --efficiency, or better: as --measured-rate, which scales the
 * rate of products and attention. Bandwidth was measured, and is the same for all models.
 *
 * With --tensor the ranks are a dtrain_mesh: GPUs = tensor x data. Parameters are cut, the strategy works along the
 * data axis, and layers send along the tensor axis (simulate_tensor.h).
 *
 * With --pipeline GPUs = tensor x data x pipeline, and the micro-batches of a step follow each other through the stages
 * in the order that the library's schedule has (simulate_pipeline.h).
 *
 * How to read it: flags -> simulate_models.h -> simulate_cluster.h (cost models), simulate_device.h and simulate_comm.h
 * (a virtual device, a virtual communicator) -> simulate_tensor.h (layers) -> one step -> simulate_pipeline.h ->
 * tables, JSON, SVG -> simulate_plan.h (--plan) -> published figures -> main. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "tools/about.h"
#include "tools/flags.h"
#include "tools/open.h"
#include "tools/descriptors.h"
#include "tools/schedule.h"

#include <ctype.h>
#include <errno.h>

#include "bench/plot.h"

/* One sentence about a bad request; the caller returns it as main's exit code. */
#define BAD(...) (fprintf(stderr, "simulate: " __VA_ARGS__), fputc('\n', stderr), 2)

/* Return from the function when a call fails; the sentence is in dtrain_last_error(). */
#define TRY(call)                                 \
    do {                                          \
        const dtrain_result result_ = (call);     \
        if (result_ != DTRAIN_OK) return result_; \
    } while (0)

/* The last error without the name of the only rank. */
static const char *last_error(void)
{
    const char *text = dtrain_last_error();
    return strncmp(text, "rank 0: ", 8) == 0 ? text + 8 : text;
}

/* ---- flags -------------------------------------------------------------------------------------- */

/* -1 in a number of the cluster: as its preset says. */
struct settings {
    const char *model, *cluster, *json, *svg, *check, *measured;
    flag_list gpus, strategies, batches;
    long precision, param_dtype, reduce_dtype, optimizer, compression, network;
    long seq, accum, global_batch, bucket_mib, reshard, checkpointing, gpus_per_node;
    long pipeline, chunks, pipeline_schedule, scatter_stages, attention, loss, recompute_all,
        tensor, sequence_parallel, tensor_overlap, no_overlap, hierarchical, plan;
    double efficiency, measured_rate, straggler, topk_ratio;
    double tflops, hbm_gbs, memory_gib, nvlink_gbs, nvls_gbs, network_gbps, latency_us, slowdown;
};

static const struct settings usual = {
    .model = "gpt2",
    .cluster = "h100",
    .gpus = {8, {8, 16, 32, 64, 128, 256, 512, 1024}},
    .strategies = {2, {DTRAIN_STRATEGY_DDP - 1, DTRAIN_STRATEGY_FULL_SHARD - 1}},
    .batches = {1, {0}}, /* the largest that fits */
    .precision = 1,
    .accum = 1,
    .tensor = 1,
    .pipeline = 1,
    .bucket_mib = 25,
    .reshard = 1,
    .straggler = 1,
    .topk_ratio = 0.01,
    .network = -1,
    .gpus_per_node = -1,
    .efficiency = -1,
    .tflops = -1,
    .hbm_gbs = -1,
    .memory_gib = -1,
    .nvlink_gbs = -1,
    .nvls_gbs = -1,
    .network_gbps = -1,
    .latency_us = -1,
    .slowdown = -1,
};
static struct settings flags;

typedef const char *const words[8]; /* ended by NULL */
static words strategies = {"ddp",   "zero1",        "shard_grad_op", "full_shard", /* kind - 1 */
                           "zero3", "hybrid_shard", "auto"};
static words precisions = {"fp32", "bf16"};
static words dtypes = {"fp32", "bf16", "fp16"};
static words optimizers = {"adamw", "sgd"};
static words compressions = {"none", "topk"}; /* dtrain_compression */
enum { ATTENTION_FUSED, ATTENTION_SCORES, ATTENTION_AGAIN };
static words attentions = {"fused", "scores", "scores_again"};
static words schedules = {"1f1b", "gpipe", "interleaved", "zb_h1"}; /* dtrain_pipeline_kind */
static words losses = {"fused", "passes"};
enum { MOST_STAGES = 512 };
enum { OVERLAP_SUMS, OVERLAP_NONE, OVERLAP_PIECES };
static words tensor_overlaps = {"sums", "none", "pieces"};
static words networks = {"nccl", "alpha_beta", "emulated"}; /* enum below */

static const flag flag_table[] = {
    {"--model", 's', &flags.model, 0, 0, "one of the models below", NULL},
    {"--cluster", 's', &flags.cluster, 0, 0,
     "one of the clusters below; the flags from --tflops on override it", NULL},
    {"--gpus", 'I', &flags.gpus, 1, 65536, "how many; efficiency is relative to the first", NULL},
    {"--strategies", 'W', &flags.strategies, 0, 0,
     "where parameters, gradients and optimizer state live", strategies},
    {"--batch-sizes", 'I', &flags.batches, 1, 1e6,
     "samples per GPU (with --tensor: per replica) and micro-batch; default the largest of 1, 2, 4 "
     "... 64 that fits, with "
     "checkpointing if it must be",
     NULL},
    {"--accum", 'i', &flags.accum, 1, 1e6, "micro-batches per step", NULL},
    {"--global-batch", 'i', &flags.global_batch, 1, 1e9,
     "samples of all GPUs per step, cut in micro-batches of at most --batch-sizes: strong scaling",
     NULL},
    {"--seq", 'i', &flags.seq, 1, 1e6, "tokens per sample; default by model", NULL},
    {"--precision", 'w', &flags.precision, 0, 0, "of matrix products and activations", precisions},
    {"--param-dtype", 'w', &flags.param_dtype, 0, 0, "gathered parameters travel as", dtypes},
    {"--reduce-dtype", 'w', &flags.reduce_dtype, 0, 0, "gradients travel as", dtypes},
    {"--attention", 'w', &flags.attention, 0, 0,
     "fused keeps scores in the cores of a GPU; scores writes them all, as before FlashAttention; "
     "scores_again makes them once more in backward instead of keeping them",
     attentions},
    {"--loss", 'w', &flags.loss, 0, 0, "fused in one kernel, or passes of several over fp32 logits",
     losses},
    {"--optimizer", 'w', &flags.optimizer, 0, 0, "sgd has momentum", optimizers},
    {"--bucket-mib", 'i', &flags.bucket_mib, 1, 1e6, "gradient bucket size", NULL},
    {"--tensor", 'i', &flags.tensor, 1, 65536,
     "GPUs that share each layer of a transformer: --gpus = tensor x data", NULL},
    {"--sequence-parallel", 'b', &flags.sequence_parallel, 0, 0,
     "between the layers that they share, each of these has a part of the rows", NULL},
    {"--tensor-overlap", 'w', &flags.tensor_overlap, 0, 0,
     "sums of gradients travel under the product of weights; none; or rows travel in pieces under "
     "the products before and behind them, too, as this library does not",
     tensor_overlaps},
    {"--pipeline", 'i', &flags.pipeline, 1, MOST_STAGES,
     "GPUs that share a replica of a transformer by its depth; the --accum micro-batches of a step "
     "follow each other through them; with ddp or zero1",
     NULL},
    {"--chunks", 'i', &flags.chunks, 0, 64,
     "with --pipeline-schedule interleaved: runs of blocks that each has; default 2", NULL},
    {"--pipeline-schedule", 'w', &flags.pipeline_schedule, 0, 0, "order of the micro-batches",
     schedules},
    {"--scatter-stages", 'b', &flags.scatter_stages, 0, 0,
     "each GPU of a tensor axis sends its part of what goes to the next stage, where parts are "
     "gathered, as Megatron does; this library sends whole rows, or with --sequence-parallel its "
     "own",
     NULL},
    {"--no-overlap", 'b', &flags.no_overlap, 0, 0, "communicate after backward only", NULL},
    {"--reshard-after-forward", 'i', &flags.reshard, 0, 1, "0: units stay whole until backward",
     NULL},
    {"--checkpointing", 'i', &flags.checkpointing, 0, 1e6,
     "activations of every n-th block are dropped and made again in backward; 0 off", NULL},
    {"--recompute-all", 'b', &flags.recompute_all, 0, 0,
     "a block is made again with its last product and sum, as Megatron does and this library need "
     "not",
     NULL},
    {"--hierarchical", 'b', &flags.hierarchical, 0, 0, "reduce node by node", NULL},
    {"--compression", 'w', &flags.compression, 0, 0, "of gradients, ddp only", compressions},
    {"--topk-ratio", 'f', &flags.topk_ratio, 1e-6, 1, "share of the elements that are sent", NULL},
    {"--measured-rate", 'f', &flags.measured_rate, 1e-6, 1e12,
     "tokens (images) per second and GPU, measured at the first of --gpus: the rate of products is "
     "scaled to give that",
     NULL},
    {"--straggler", 'f', &flags.straggler, 0, 100,
     "standard deviation of a GPU's compute time from step to step, per cent; a step takes as long "
     "as the slowest",
     NULL},
    {"--plan", 'b', &flags.plan, 0, 0,
     "search the layouts of --model on --gpus for one step of --global-batch samples: tensor, "
     "pipeline and data axis, schedule, strategy, micro-batch, checkpointing; the fastest that fit",
     NULL},
    {"--json", 's', &flags.json, 0, 0, "one JSON object a row to this file", NULL},
    {"--svg", 's', &flags.svg, 0, 0, "efficiency over GPUs to this file", NULL},
    {"--check", 's', &flags.check, 0, 0,
     "predicted beside the published figures of this file; fails when one is not as recorded",
     NULL},
    {"--measured", 's', &flags.measured, 0, 0,
     "JSON lines {\"nodes\":, \"ranks\":, \"gbps\":, \"step_ms\":} of own runs, the first on one "
     "node: predicted "
     "beside them",
     NULL},
    {"--efficiency", 'f', &flags.efficiency, 0.001, 1, "share of --tflops that layers reach", NULL},
    {"--tflops", 'f', &flags.tflops, 1e-6, 1e9, "peak of one GPU in --precision", NULL},
    {"--hbm-gbs", 'f', &flags.hbm_gbs, 1e-3, 1e15, "memory bandwidth, 1e9 bytes a second", NULL},
    {"--memory-gib", 'f', &flags.memory_gib, 1e-3, 1e9, "of one GPU", NULL},
    {"--gpus-per-node", 'i', &flags.gpus_per_node, 1, 65536,
     "more GPUs than that are several nodes", NULL},
    {"--nvlink-gbs", 'f', &flags.nvlink_gbs, 1e-6, 1e15,
     "bus bandwidth of a ring inside a node (NVLink or PCIe)", NULL},
    {"--nvls-gbs", 'f', &flags.nvls_gbs, 0, 1e15,
     "bus bandwidth of reductions in the switch; 0: it has none", NULL},
    {"--network-gbps", 'f', &flags.network_gbps, 1e-6, 1e15,
     "of a whole node, each way, 1e9 bits a second", NULL},
    {"--latency-us", 'f', &flags.latency_us, 0, 1e6,
     "of one hop between nodes; from 30 on it counts as sockets", NULL},
    {"--slowdown", 'f', &flags.slowdown, 0, 0.9, "share of compute that a running collective takes",
     NULL},
    {"--network", 'w', &flags.network, 0, 0,
     "cost model: NCCL's algorithms, a textbook ring, or emulated links", networks},
};
enum { FLAG_COUNT = sizeof flag_table / sizeof flag_table[0] };

static int parse_flags(int count, char **arguments)
{
    return flags_parse("simulate", flag_table, FLAG_COUNT, count, arguments);
}

#include "simulate_models.h"
#include "simulate_comm.h"
#include "simulate_tensor.h"

/* ---- the cluster that the flags ask for -------------------------------------------------------- */

static double override(double preset, double flag) { return flag < 0 ? preset : flag; }

static int make_cluster(cluster *c)
{
    int i = 0;
    while (i < CLUSTERS && strcmp(flags.cluster, clusters[i].name) != 0) i++;
    if (i == CLUSTERS) return BAD("\"%s\" is no cluster; --help lists them", flags.cluster);
    *c = clusters[i];
    c->tflops_bf16 = override(flags.precision ? c->tflops_bf16 : c->tflops_fp32, flags.tflops);
    c->efficiency = override(c->efficiency, flags.efficiency);
    c->hbm_gbs = override(c->hbm_gbs, flags.hbm_gbs);
    c->memory_gib = override(c->memory_gib, flags.memory_gib);
    c->nvlink_gbs = override(c->nvlink_gbs, flags.nvlink_gbs);
    c->nvls_gbs = override(c->nvls_gbs, flags.nvls_gbs);
    c->network_gbps = override(c->network_gbps, flags.network_gbps);
    c->latency_us = override(c->latency_us, flags.latency_us);
    c->slowdown = override(c->slowdown, flags.slowdown);
    if (flags.gpus_per_node > 0) c->gpus_per_node = flags.gpus_per_node;
    if (flags.network >= 0) c->network = flags.network;
    return 0;
}

/* ---- one step --------------------------------------------------------------------------------------- */

typedef struct row {
    long gpus, nodes, strategy, batch, accum;
    double step_ms, compute_ms, comm_ms, exposed_ms, straggler_ms, memory_gib;
    double bubble_ms, tensor_ms, data_ms; /* idle in a pipeline; exposed, by axis */
    double rate, efficiency; /* things a second and GPU; of the first row of the line, per cent */
    uint64_t sent, traffic;  /* bytes: that the links carried, and that the strategy has counted */
    uint64_t tensor_sent;    /* beside those: the tensor axis, and what all agree on */
    bool fits, checkpointed; /* checkpointed: because it would not fit otherwise */
} row;

/* The mean of the largest of n standard normal numbers (Blom's approximation). */
static double expected_maximum(double n)
{
    const double share = (n - 0.375) / (n + 0.25);
    double low = 0, high = 8;
    for (int i = 0; i < 60; i++) {
        const double middle = 0.5 * (low + high);
        if (0.5 * erfc(-middle / sqrt(2)) < share) low = middle;
        else high = middle;
    }
    return n > 1 ? low : 0;
}

static dtrain_result forward(dtrain_strategy *strategy, const model *m, long batch)
{
    for (size_t i = 0; i < m->count; i++) {
        const uint32_t unit = m->params[i].unit;
        if (i == 0 || m->params[i - 1].unit != unit)
            TRY(dtrain_strategy_gather(strategy, unit, DTRAIN_PASS_FORWARD));
        TRY(forward_layer(m, i, batch));
        if (i + 1 == m->count || m->params[i + 1].unit != unit)
            TRY(dtrain_strategy_release(strategy, unit));
    }
    return DTRAIN_OK;
}

/* Make the dropped activations of the block that ends with layer i again: all but its last product, which only the
 * next block reads (src/tape/recompute.c), or with --recompute-all this too. */
static dtrain_result forward_again(const model *m, size_t i, long batch)
{
    size_t first = i;
    while (first > 0 && m->params[first - 1].unit == m->params[i].unit) first--;
    for (size_t k = first; k < i + (flags.recompute_all ? 1 : 0); k++)
        if (!m->layers[k].kept) TRY(forward_layer(m, k, batch));
    return DTRAIN_OK;
}

static dtrain_result backward(dtrain_strategy *strategy, const model *m, long batch)
{
    for (size_t i = m->count; i-- > 0;) {
        const uint32_t unit = m->params[i].unit;
        if (i + 1 == m->count || m->params[i + 1].unit != unit) {
            TRY(dtrain_strategy_gather(strategy, unit, DTRAIN_PASS_BACKWARD));
            TRY(forward_again(m, i, batch));
        }
        TRY(backward_layer(m, i, batch, HALF_BOTH));
        TRY(dtrain_strategy_ready(strategy, i));
        if (i == 0 || m->params[i - 1].unit != unit) TRY(dtrain_strategy_release(strategy, unit));
    }
    return dtrain_strategy_finish(strategy);
}

static dtrain_result train_step(dtrain_strategy *strategy, dtrain_optimizer *optimizer,
                                const model *m, long batch, long accum)
{
    for (long micro = 0; micro < accum; micro++) {
        TRY(dtrain_strategy_accumulate(strategy, micro + 1 < accum));
        TRY(forward(strategy, m, batch));
        TRY(backward(strategy, m, batch));
    }
    return dtrain_optimizer_step(optimizer, 1e-3f, 1);
}

static dtrain_strategy_desc describe(const row *r, double activations, dtrain_comm *comm,
                                     const dtrain_mesh *mesh, dtrain_compression_desc *compression)
{
    dtrain_strategy_desc desc = {0};
    desc.kind = (uint32_t)(r->strategy + 1);
    desc.comm = mesh ? NULL : comm;
    desc.mesh = mesh;
    desc.param_dtype = desc.kind >= DTRAIN_STRATEGY_FULL_SHARD
                           ? (uint32_t)(DTRAIN_DTYPE_F32 + flags.param_dtype)
                           : 0;
    desc.reduce_dtype = (uint32_t)(DTRAIN_DTYPE_F32 + flags.reduce_dtype);
    desc.bucket_bytes = (size_t)flags.bucket_mib << 20;
    desc.no_overlap = flags.no_overlap != 0;
    desc.keep_after_forward = !flags.reshard;
    desc.hierarchical = flags.hierarchical != 0;
    memset(compression, 0, sizeof *compression);
    compression->kind = (uint32_t)flags.compression;
    compression->topk_ratio = (float)flags.topk_ratio;
    compression->dense_steps = DTRAIN_DENSE_STEPS_NONE;
    desc.compression = compression;
    desc.optimizer_states = flags.optimizer ? 1 : 2;
    desc.memory_limit = (uint64_t)(sim.machine.memory_gib * 1073741824.0);
    desc.other_bytes = (uint64_t)activations;
    if (desc.kind == DTRAIN_STRATEGY_HYBRID_SHARD || flags.hierarchical)
        desc.node_size = (uint32_t)most(1, (double)(r->gpus / r->nodes / flags.tensor));
    return desc;
}

/* The second step is the one that is timed: it begins as every later one does. */
static dtrain_result time_steps(dtrain_strategy *strategy, dtrain_optimizer *optimizer,
                                const model *m, row *r)
{
    struct simulation before;
    dtrain_strategy_info info, first;
    TRY(train_step(strategy, optimizer, m, r->batch, r->accum));
    before = sim;
    dtrain_strategy_query(strategy, &first);
    TRY(train_step(strategy, optimizer, m, r->batch, r->accum));
    dtrain_strategy_query(strategy, &info);
    r->strategy = (long)info.desc.kind - 1;
    r->traffic = info.traffic.wire_bytes - first.traffic.wire_bytes;
    r->sent = sim.sent - before.sent;
    r->tensor_sent = sim.tensor_sent - before.tensor_sent;
    r->compute_ms = 1e3 * (sim.computed - before.computed);
    r->comm_ms = 1e3 * (sim.communicated - before.communicated);
    r->exposed_ms = 1e3 * (sim.exposed - before.exposed);
    r->tensor_ms = 1e3 * (sim.exposed_tensor - before.exposed_tensor);
    r->data_ms = r->exposed_ms - r->tensor_ms;
    r->straggler_ms = r->compute_ms * flags.straggler / 100 * expected_maximum((double)r->gpus);
    r->step_ms = 1e3 * (sim.now - before.now) + r->straggler_ms;
    r->rate = 1e3 * (double)(r->batch * r->accum) * m->samples / r->step_ms / (double)flags.tensor;
    return DTRAIN_OK;
}

/* What the library makes for one rank of tensor x data. */
typedef struct library {
    dtrain_comm *comm;
    dtrain_mesh *mesh;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_strategy_desc desc;
    dtrain_compression_desc compression;
    void *first_address;
} library;

static dtrain_result library_open(dtrain_world *world, model *m, const row *r, int ranks, int nodes,
                                  double activations, library *lib)
{
    dtrain_optimizer_desc how =
        dtrain_optimizer_defaults(flags.optimizer ? DTRAIN_OPTIMIZER_SGD : DTRAIN_OPTIMIZER_ADAMW);
    if (flags.optimizer) how.momentum = 0.9f;
    memset(lib, 0, sizeof *lib);
    lib->first_address = dtrain_world_device(world)->state;
    TRY(mesh_open(world, ranks, nodes, &lib->comm, &lib->mesh));
    lib->desc = describe(r, activations, lib->comm, lib->mesh, &lib->compression);
    TRY(dtrain_strategy_create(world, m->params, m->count, &lib->desc, &lib->strategy));
    return dtrain_optimizer_create(world, lib->strategy, &how, &lib->optimizer);
}

/* Free it, also after an error, and tell what the rank's memory is: *bytes. */
static dtrain_result library_close(dtrain_world *world, const model *m, const row *r, int ranks,
                                   library *lib, dtrain_result result, double *bytes)
{
    dtrain_memory memory;
    dtrain_optimizer_destroy(lib->optimizer);
    dtrain_strategy_destroy(lib->strategy);
    lib->desc.kind = (uint32_t)(r->strategy + 1);
    if (result == DTRAIN_OK)
        result = dtrain_strategy_plan(m->params, m->count, &lib->desc, ranks, &memory);
    if (result == DTRAIN_OK) *bytes = (double)memory.total;
    dtrain_mesh_destroy(lib->mesh);
    dtrain_comm_destroy(lib->comm);
    /* everything is given back: the next model may have the addresses */
    dtrain_world_device(world)->state = lib->first_address;
    return result;
}

#include "simulate_pipeline.h"

/* A rank that has all layers. */
static dtrain_result simulate_replica(dtrain_world *world, model *m, row *r)
{
    const double activations = kept_bytes(m, r->batch) + again_bytes(m, r->batch);
    double bytes = 0;
    library lib;
    dtrain_result result =
        library_open(world, m, r, (int)r->gpus, (int)r->nodes, activations, &lib);
    if (result == DTRAIN_OK)
        result = axis_open(world, m, dtrain_mesh_comm(lib.mesh, DTRAIN_AXIS_TENSOR), r->batch);
    if (result == DTRAIN_OK) result = time_steps(lib.strategy, lib.optimizer, m, r);
    axis_close(world);
    result = library_close(world, m, r, (int)r->gpus, &lib, result, &bytes);
    r->memory_gib = (bytes + activations) / 1073741824.0;
    return result;
}

/* Fills the rest of r, whose gpus, strategy, batch and accum are given. */
static dtrain_result simulate(dtrain_world *world, model *m, row *r)
{
    const long per_node = sim.machine.gpus_per_node;
    const double scale = sim.rate_scale;
    const cluster machine = sim.machine;
    memset(&sim, 0, sizeof sim);
    sim.machine = machine;
    sim.rate_scale = scale;
    r->nodes = (r->gpus + per_node - 1) / per_node;
    if (r->gpus % r->nodes || (r->nodes > 1 && r->gpus % per_node))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "--gpus has %ld: expected at most %ld, or whole nodes of %ld", r->gpus,
                           per_node, per_node);
    TRY(flags.pipeline > 1 ? simulate_pipeline(world, m, r) : simulate_replica(world, m, r));
    r->fits = r->memory_gib <= sim.machine.memory_gib;
    return DTRAIN_OK;
}

/* Finds the speed of compute with which r, a first row, has the rate that was measured. */
static dtrain_result calibrate(dtrain_world *world, model *m, row r, double measured)
{
    double low = -10, high = 10; /* powers of two */
    for (int i = 0; i < 32; i++) {
        const double middle = 0.5 * (low + high);
        sim.rate_scale = exp2(middle);
        TRY(simulate(world, m, &r));
        if (r.rate < measured) low = middle;
        else high = middle;
    }
    if (fabs(r.rate / measured - 1) < 1e-3) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                       "--measured-rate is %g a second, but what %ld GPUs communicate in a step "
                       "leaves %g at most; "
                       "see --nvlink-gbs and --network-gbps",
                       measured, r.gpus, r.rate);
}

/* Micro-batches that give the global batch on so many GPUs: as few as --batch-sizes allows. */
static dtrain_result share_global_batch(row *r)
{
    const long share = flags.tensor * flags.pipeline;
    const long replicas = r->gpus > share ? r->gpus / share : 1;
    const long own = flags.global_batch / replicas;
    if (flags.global_batch % replicas)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "--global-batch is %ld, which %ld %s do not divide", flags.global_batch,
                           replicas, share > 1 ? "replicas" : "GPUs");
    if (r->batch > own) r->batch = own;
    while (own % r->batch) r->batch--;
    r->accum = own / r->batch;
    return DTRAIN_OK;
}

enum { MOST_BATCH = 64 };

/* Gives r, whose gpus, strategy and accum are given, the largest batch that fits; false in r->fits when not even
 * one sample does, with the blocks' activations made again. */
static dtrain_result choose_batch(dtrain_world *world, model *m, row *r)
{
    row best = *r;
    for (int again = 0; again < 2 && !best.fits; again++) {
        if (again && (!m->blocks || flags.checkpointing)) break;
        checkpoint_blocks(m, again ? 1 : flags.checkpointing);
        for (long batch = 1; batch <= MOST_BATCH; batch *= 2) {
            row next = *r;
            next.batch = batch;
            next.checkpointed = again;
            TRY(simulate(world, m, &next));
            if (batch == 1 || next.fits) best = next;
            if (!next.fits) break;
        }
    }
    *r = best;
    return DTRAIN_OK;
}

/* All rows of one strategy and batch. A batch of 0 is the largest that fits the first
 * number of GPUs that it fits at all, and the same for all: what scales is the number of GPUs. */
static dtrain_result simulate_line(dtrain_world *world, model *m, long strategy, long batch,
                                   row *rows)
{
    const row *first = NULL;
    row chosen;
    memset(&chosen, 0, sizeof chosen);
    for (long i = 0; i < flags.gpus.count && batch == 0 && !chosen.fits; i++) {
        chosen.gpus = flags.gpus.items[i];
        chosen.strategy = strategy;
        chosen.accum = flags.accum;
        TRY(choose_batch(world, m, &chosen));
    }
    checkpoint_blocks(m, chosen.checkpointed ? 1 : flags.checkpointing);
    for (long i = 0; i < flags.gpus.count; i++) {
        row *r = &rows[i];
        memset(r, 0, sizeof *r);
        r->gpus = flags.gpus.items[i];
        r->strategy = strategy;
        r->batch = batch ? batch : chosen.batch;
        r->checkpointed = chosen.checkpointed;
        r->accum = flags.accum;
        if (flags.global_batch) TRY(share_global_batch(r));
        if (i == 0 && flags.measured_rate > 0) TRY(calibrate(world, m, *r, flags.measured_rate));
        TRY(simulate(world, m, r));
        if (!first && r->fits) first = r;
        r->efficiency = first ? 100 * r->rate / first->rate : 0;
    }
    return DTRAIN_OK;
}

/* ---- tables, JSON, SVG ------------------------------------------------------------------------------ */

static void print_head(const model *m)
{
    const cluster *c = &sim.machine;
    uint64_t elements = 0;
    for (size_t i = 0; i < m->count; i++)
        if (!m->params[i].alias_of)
            elements += (uint64_t)(m->params[i].shape[0] *
                                   (m->params[i].shape[1] ? m->params[i].shape[1] : 1));
    printf("model    %s, %.1f M parameters, %g %s a sample, %s\n", flags.model,
           1e-6 * (double)elements, m->samples, m->things, precisions[flags.precision]);
    printf("cluster  %s: %ld GPUs a node of %g TFLOPS x %g %%, memory %g GiB at %g GB/s; links %g "
           "GB/s inside, %g Gb/s "
           "a node; %g us\n",
           flags.cluster, c->gpus_per_node, c->tflops_bf16, 100 * c->efficiency, c->memory_gib,
           c->hbm_gbs, c->nvlink_gbs, c->network_gbps, c->latency_us);
    if (flags.tensor > 1 || flags.pipeline > 1)
        printf("axes     GPUs = tensor %ld x data", flags.tensor);
    if (flags.pipeline > 1)
        printf(" x pipeline %ld (%s)", flags.pipeline, schedules[flags.pipeline_schedule]);
    if (flags.tensor > 1 || flags.pipeline > 1)
        puts(flags.sequence_parallel ? ", sequence parallelism" : "");
    printf("%6s %5s %s %-13s %6s %6s %10s %12s %6s %10s %10s %9s %9s\n", "GPUs", "nodes",
           flags.tensor * flags.pipeline > 1 ? "    data " : "", "strategy", "batch", "accum",
           "step ms", m->samples > 1 ? "tokens/s" : "images/s", "eff %", "comm ms", "exposed ms",
           "sent MiB", "mem GiB");
}

/* would: what fits where r does not */
static void print_row(const row *r, const char *would)
{
    char data[40] = "";
    const long share = flags.tensor * flags.pipeline;
    if (share > 1) snprintf(data, sizeof data, "  x %5ld ", r->gpus / share);
    printf("%6ld %5ld %s %-13s %6ld %6ld ", r->gpus, r->nodes, data, strategies[r->strategy],
           r->batch, r->accum);
    if (r->fits)
        printf("%10.2f %12.0f %6.1f %10.2f %10.2f %9.1f %9.2f%s\n", r->step_ms,
               r->rate * (double)r->gpus, r->efficiency, r->comm_ms, r->exposed_ms,
               (double)(r->sent + r->tensor_sent) / 1048576, r->memory_gib,
               r->checkpointed ? "  with checkpointing" : "");
    else
        printf("%10s %12s %6s %10s %10s %9s %9.2f  does not fit%s\n", "-", "-", "-", "-", "-", "-",
               r->memory_gib, would);
}

/* Say in *text what would fit where r does not: one sample on as many GPUs, sharded, and with checkpointing if it has
 * to be; or on more of them. */
static dtrain_result what_would_fit(dtrain_world *world, model *m, const row *r, char *text,
                                    size_t room)
{
    const long most = 1024 > r->gpus ? 1024 : r->gpus;
    const int ways = m->blocks && flags.checkpointing != 1 ? 2 : 1;
    row next;
    memset(&next, 0, sizeof next);
    for (long gpus = r->gpus; gpus <= most && !next.fits; gpus *= 2)
        for (int way = 0; way < ways && !next.fits; way++) {
            memset(&next, 0, sizeof next);
            next.gpus = gpus;
            next.strategy = DTRAIN_STRATEGY_FULL_SHARD - 1;
            next.batch = next.accum = 1;
            next.checkpointed = way == 1;
            checkpoint_blocks(m, way ? 1 : flags.checkpointing);
            TRY(simulate(world, m, &next));
        }
    checkpoint_blocks(m, flags.checkpointing);
    const char *also = next.checkpointed ? " and checkpointing" : "";
    if (next.fits && next.gpus == r->gpus)
        snprintf(text, room, "; full_shard with a batch of 1%s would", also);
    else if (next.fits)
        snprintf(text, room, "; full_shard on %ld GPUs with a batch of 1%s would", next.gpus, also);
    else snprintf(text, room, ", and nothing up to %ld GPUs does", most);
    return DTRAIN_OK;
}

static void write_json(FILE *file, const model *m, const row *r)
{
    fprintf(
        file,
        "{\"model\": \"%s\", \"cluster\": \"%s\", \"gpus\": %ld, \"nodes\": %ld, \"strategy\": "
        "\"%s\", \"tensor\": %ld, \"data\": %ld, \"pipeline\": %ld, \"sequence_parallel\": %s, "
        "\"batch\": %ld, \"accum\": %ld, \"fits\": %s, \"step_ms\": %.9g, \"compute_ms\": %.9g, "
        "\"comm_ms\": %.9g, \"exposed_comm_ms\": %.9g, \"bubble_ms\": %.9g, \"straggler_ms\": "
        "%.9g, \"%s_per_second\": "
        "%.9g, "
        "\"efficiency\": %.6g, \"comm_bytes\": %llu, \"strategy_bytes\": %llu, "
        "\"tensor_bytes\": %llu, \"memory_gib\": %.6g}\n",
        flags.model, flags.cluster, r->gpus, r->nodes, strategies[r->strategy], flags.tensor,
        r->gpus / flags.tensor / flags.pipeline, flags.pipeline,
        flags.sequence_parallel && flags.tensor > 1 ? "true" : "false", r->batch, r->accum,
        r->fits ? "true" : "false", r->step_ms, r->compute_ms, r->comm_ms, r->exposed_ms,
        r->bubble_ms, r->straggler_ms, m->things, r->rate * (double)r->gpus, r->efficiency,
        (unsigned long long)r->sent, (unsigned long long)r->traffic,
        (unsigned long long)r->tensor_sent, r->memory_gib);
}

/* A line for each strategy and batch; draws sizes that fit. */
static bool draw(const char *path, const row *rows, long lines)
{
    const long count = flags.gpus.count;
    char title[200], y_label[64], name[96];
    double marks[FLAGS_LIST], x[FLAGS_LIST], y[FLAGS_LIST];
    plot p;
    memset(&p, 0, sizeof p);
    p.x_low = 1e30;
    p.y_high = 100;
    p.y_step = 20;
    p.legend_lines = (int)lines;
    for (long i = 0; i < count; i++) {
        marks[i] = (double)flags.gpus.items[i];
        p.x_low = least(p.x_low, marks[i]);
        p.x_high = most(p.x_high, marks[i]);
    }
    for (long i = 0; i < lines * count; i++)
        if (rows[i].fits) p.y_high = most(p.y_high, 20 * ceil(rows[i].efficiency / 20 - 0.05));
    snprintf(title, sizeof title, "%s on %s: predicted %s scaling", flags.model, flags.cluster,
             flags.global_batch ? "strong" : "weak");
    snprintf(y_label, sizeof y_label, "efficiency, %% of %ld GPU%s", flags.gpus.items[0],
             flags.gpus.items[0] == 1 ? "" : "s");
    if (!plot_open(&p, path, title, "GPUs", y_label, 1)) return false;
    plot_panel(&p, flags.cluster, marks, (int)count);
    for (long line = 0; line < lines; line++) {
        const row *first = &rows[line * count];
        const int colour = (int)(line / flags.batches.count),
                  dash = (int)(line % flags.batches.count);
        int points = 0;
        for (long i = 0; i < count; i++) {
            if (!first[i].fits) continue;
            x[points] = marks[i];
            y[points++] = first[i].efficiency;
        }
        plot_line(&p, colour, dash, x, y, points);
        snprintf(name, sizeof name, points ? "%s, batch %ld" : "%s: does not fit",
                 strategies[first->strategy], first->batch);
        for (int i = 0; i < points; i++) plot_point(&p, colour, x[i], y[i], name);
        plot_legend(&p, colour, dash, name);
    }
    return plot_close(&p);
}

static int write_files(const model *m, const row *rows, long lines)
{
    FILE *json = flags.json ? fopen(flags.json, "w") : NULL;
    if (json)
        for (long i = 0; i < lines * flags.gpus.count; i++) write_json(json, m, &rows[i]);
    if (flags.json && (!json || (fflush(json), ferror(json) | fclose(json))))
        return BAD("cannot write \"%s\": %s", flags.json, strerror(errno));
    if (flags.svg && !draw(flags.svg, rows, lines))
        return BAD("cannot write \"%s\": %s", flags.svg, strerror(errno));
    return 0;
}

static int run_table(dtrain_world *world)
{
    const long lines = flags.strategies.count * flags.batches.count;
    row *rows = (row *)calloc((size_t)(lines * flags.gpus.count), sizeof *rows);
    model m;
    int code = make_cluster(&sim.machine);
    memset(&m, 0, sizeof m);
    sim.rate_scale = 1;
    if (!rows) code = BAD("no memory for %ld rows", lines * flags.gpus.count);
    if (!code) code = make_model(&m);
    if (!code) print_head(&m);
    for (long line = 0; line < lines && !code; line++) {
        row *first = rows + line * flags.gpus.count;
        if (simulate_line(world, &m, flags.strategies.items[line / flags.batches.count],
                          flags.batches.items[line % flags.batches.count], first) != DTRAIN_OK)
            code = BAD("%s", last_error());
        for (long i = 0; i < flags.gpus.count && !code; i++) {
            char would[96] = "";
            if (!first[i].fits && flags.pipeline == 1 &&
                what_would_fit(world, &m, &first[i], would, sizeof would) != DTRAIN_OK)
                code = BAD("%s", last_error());
            if (!code) print_row(&first[i], would);
        }
    }
    if (!code) code = write_files(&m, rows, lines);
    free_model(&m);
    free(rows);
    return code;
}

#include "simulate_plan.h"

static void print_help(void)
{
    printf("simulate: how fast a model would train on 1 to 1024 GPUs (dtrain %s)\n\n",
           DTRAIN_VERSION_STRING);
    flags_help(flag_table, FLAG_COUNT);
    printf("\nmodels\n");
    for (int i = 0; i < TRANSFORMERS; i++)
        printf("  %-14s %s\n", transformers[i].name, transformers[i].what);
    printf("  %-14s convolutional networks\n\nclusters\n", "vgg16, resnet101, inception3");
    for (int i = 0; i < CLUSTERS; i++) printf("  %-14s %s\n", clusters[i].name, clusters[i].what);
    printf("\nexamples\n"
           "  simulate --model llama8b --cluster h100 --gpus 8,64,512\n"
           "  simulate --plan --model llama70b --gpus 512 --global-batch 1024\n");
}

/* ---- predicted beside published, and beside own runs --------------------------------------------------
 *
 * A file of published figures (tools/simulate/published.txt) has a line each:
 *
 *     name | flags of both | flags of the base | flags of the target | scale | kind | published | recorded | remark
 *
 *     percent   scale x rate of a GPU in the target / in the base
 *     tenth     the same; a hit is within a tenth of what is published
 *     limit     how many times faster the target is altogether; published is the most it may be, give or take 0.05
 *
 * Compute is calibrated with the base's --measured-rate and by nothing else. recorded is what this
 * program predicted when the line was written: a prediction that moves by half a point fails the check. */

enum { FIELDS = 9, POINTS = 5, MOST_FIGURES = 256 };

/* Adds the flags of one text, separated by blanks, which must stay: values are kept by pointer. */
static int add_flags(char *text)
{
    char *arguments[64];
    int count = 0;
    for (char *at = strtok(text, " "); at && count < 64; at = strtok(NULL, " "))
        arguments[count++] = at;
    return parse_flags(count, arguments);
}

/* One figure with the flags as they are, on the first of --gpus. */
static int one_row(dtrain_world *world, row *r)
{
    model m;
    int code = make_cluster(&sim.machine);
    memset(r, 0, sizeof *r);
    r->gpus = flags.gpus.items[0];
    r->strategy = flags.strategies.items[0];
    r->batch = flags.batches.items[0] ? flags.batches.items[0] : 1;
    r->accum = flags.accum;
    if (!code) code = make_model(&m);
    if (code) return code;
    dtrain_result result = flags.global_batch ? share_global_batch(r) : DTRAIN_OK;
    if (result == DTRAIN_OK && flags.measured_rate > 0)
        result = calibrate(world, &m, *r, flags.measured_rate);
    if (result == DTRAIN_OK) result = simulate(world, &m, r);
    free_model(&m);
    return result == DTRAIN_OK ? 0 : BAD("%s", last_error());
}

/* Cuts line at the bars, and blanks around them. Returns how many fields there are. */
static int cut_fields(char *line, char **fields)
{
    int count = 0;
    for (char *at = line; at && count < FIELDS;) {
        char *bar = strchr(at, '|'), *end = bar ? bar : at + strlen(at);
        while (at < end && isspace((unsigned char)*at)) at++;
        while (end > at && isspace((unsigned char)end[-1])) end--;
        fields[count++] = at;
        at = bar ? bar + 1 : NULL;
        *end = 0;
    }
    return count;
}

static int predict(dtrain_world *world, char **fields, double *predicted)
{
    char both[400], base[400], target[400], again[400];
    row first, second;
    snprintf(both, sizeof both, "%s", fields[1]);
    snprintf(again, sizeof again, "%s", fields[1]);
    snprintf(base, sizeof base, "%s", fields[2]);
    snprintf(target, sizeof target, "%s", fields[3]);
    flags = usual;
    sim.rate_scale = 1;
    if (add_flags(both) || add_flags(base) || one_row(world, &first)) return 2;
    flags = usual;
    if (add_flags(again) || add_flags(target) || one_row(world, &second)) return 2;
    *predicted = strtod(fields[4], NULL) * second.rate / first.rate;
    if (strcmp(fields[5], "limit") == 0) *predicted *= (double)second.gpus / (double)first.gpus;
    return 0;
}

/* Prints a line's verdict; true when it is as recorded. */
static bool judge(char **fields, double predicted)
{
    const double published = strtod(fields[6], NULL), recorded = strtod(fields[7], NULL);
    const bool limit = strcmp(fields[5], "limit") == 0;
    const double error = predicted - published, tolerance = limit ? 0.02 : 0.5;
    const double most_off = strcmp(fields[5], "tenth") == 0 ? published / 10 : POINTS;
    const bool hit = limit ? error <= 0.05 : fabs(error) <= most_off,
               same = fabs(predicted - recorded) <= tolerance;
    if (limit)
        printf("%-46s %9s%.1fx %8.2fx %7s  %s", fields[0], "<= ", published, predicted, "",
               hit ? "ok" : "misses");
    else
        printf("%-46s %11.1f %% %7.1f %% %+7.1f  %s", fields[0], published, predicted, error,
               hit ? "ok" : "misses");
    printf("%s%s%s\n", *fields[8] ? ": " : "", fields[8], same ? "" : "  <- NOT AS RECORDED");
    if (!same) printf("%-46s recorded %s\n", "", fields[7]);
    return same;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int run_check(dtrain_world *world, const char *path)
{
    char line[1024], *fields[FIELDS];
    double errors[MOST_FIGURES];
    int lines = 0, changed = 0, code = 0, tenths = 0;
    const char *why;
    FILE *file = open_to_read(path, &why);
    if (!file) return BAD("cannot read \"%s\": %s", path, why);
    printf("%-46s %13s %9s %7s\n", "", "published", "predicted", "error");
    while (!code && fgets(line, sizeof line, file)) {
        double predicted = 0;
        if (*line == '#' && line[1] != '#') fputs(line[1] == ' ' ? line + 2 : line + 1, stdout);
        if (*line == '#' || *line == '\n') continue;
        if (cut_fields(line, fields) != FIELDS)
            code = BAD("%s: \"%s\" has not %d fields", path, fields[0], FIELDS);
        if (!code) code = predict(world, fields, &predicted);
        if (code) break;
        if (strcmp(fields[5], "tenth") == 0 && tenths < MOST_FIGURES)
            errors[tenths++] = 100 * fabs(predicted / strtod(fields[6], NULL) - 1);
        changed += !judge(fields, predicted);
        lines++;
    }
    fclose(file);
    qsort(errors, (size_t)tenths, sizeof *errors, ascending);
    if (!code && tenths)
        printf("%d of tensor and pipeline axes: median error %.1f %%, largest %.1f %%\n", tenths,
               errors[tenths / 2], errors[tenths - 1]);
    if (!code) printf("%d figures, %d not as recorded\n", lines, changed);
    return code ? code : changed || !lines;
}

/* The number behind "key": in a line of JSON. */
static bool json_number(const char *line, const char *key, double *value)
{
    char quoted[32];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(line, quoted);
    if (at) *value = strtod(at + strlen(quoted), NULL);
    return at != NULL;
}

/* Own runs of --model, --strategies and --batch-sizes: the first line calibrates, the others are
 * predicted from it. */
static int run_measured(dtrain_world *world, const char *path)
{
    char line[4096];
    int code = 0, lines = 0;
    const char *why;
    FILE *file = open_to_read(path, &why);
    if (!file) return BAD("cannot read \"%s\": %s", path, why);
    printf("%5s %5s %8s %12s %12s %8s\n", "nodes", "ranks", "Gb/s", "measured ms", "predicted ms",
           "error %");
    for (sim.rate_scale = 1; !code && fgets(line, sizeof line, file); lines++) {
        double nodes = 0, ranks = 0, gbps = 0, step_ms = 0;
        row r;
        if (!json_number(line, "nodes", &nodes) || !json_number(line, "ranks", &ranks) ||
            !json_number(line, "gbps", &gbps) || !json_number(line, "step_ms", &step_ms) ||
            !(nodes >= 1) || !(ranks >= nodes) || !(ranks <= 65536) || !(gbps > 0) ||
            !(step_ms > 0))
            code = BAD("%s, line %d: expected positive nodes, ranks, gbps and step_ms", path,
                       lines + 1);
        if (code) break;
        flags.gpus.items[0] = (long)ranks;
        flags.gpus_per_node = (long)(ranks / nodes);
        flags.network_gbps = gbps;
        flags.measured_rate = 0;
        code = one_row(world, &r);
        if (!code && lines == 0) {
            flags.measured_rate = r.rate * r.step_ms / step_ms;
            code = one_row(world, &r);
        }
        if (!code)
            printf("%5.0f %5.0f %8g %12.2f %12.2f %+8.1f%s\n", nodes, ranks, gbps, step_ms,
                   r.step_ms, 100 * (r.step_ms / step_ms - 1), lines ? "" : "  calibrates");
    }
    fclose(file);
    if (!code && !lines) code = BAD("%s is empty", path);
    return code;
}

/* ---- main -------------------------------------------------------------------------------------------- */

static int rank_main(dtrain_world *world, void *user)
{
    (void)user;
    if (flags.check) return run_check(world, flags.check);
    if (flags.measured) return run_measured(world, flags.measured);
    if (flags.plan && (flags.json || flags.svg))
        return BAD("--plan writes a table alone: leave %s out", flags.json ? "--json" : "--svg");
    if (flags.plan) return run_plan(world);
    return run_table(world);
}

int main(int argc, char **argv)
{
    take_descriptors();
    dtrain_launch_desc launch;
    dtrain_launch_info info;
    flags = usual;
    if (about("simulate", argc - 1, argv + 1, print_help)) return 0;
    if (parse_flags(argc - 1, argv + 1)) return 2;
    setenv("DTRAIN_RANK", "0", 1); /* one rank, whatever launched this */
    setenv("DTRAIN_WORLD_SIZE", "1", 1);
    memset(&launch, 0, sizeof launch);
    launch.rank_count = 1;
    launch.mode = DTRAIN_LAUNCH_THREADS;
    launch.device_ops = sim_device_ops();
    launch.comm_ops = sim_comm_ops();
    if (dtrain_launch(&launch, rank_main, NULL, &info) != DTRAIN_OK && info.exit_code == 0)
        return BAD("%s", dtrain_last_error());
    return info.exit_code;
}
