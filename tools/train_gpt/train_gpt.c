/* train_gpt.c: trains a GPT on any text, data-parallel or sharded, over the cores of this machine or GPUs.
 *
 *   build:   cc -O2 -I. tools/train_gpt/train_gpt.c -o build/train_gpt -lm -lpthread
 *   run:     build/train_gpt                              (two ranks learn dtrain.h, byte by byte)
 *            build/train_gpt --data shakespeare.txt --ranks 2 --steps 2000 --log run.jsonl
 *            build/train_gpt --model gpt2 --data tokens.bin --ranks 1 --threads 2
 *            build/train_gpt --strategy auto --memory-limit 200 --auto-batch --global-batch 64
 *   GPUs:    nvcc -O3 -I. -DDTRAIN_USE_CUDA tools/train_gpt/train_gpt.c dtrain_cuda.cu -lcublasLt -o train_gpt
 *            (add -DDTRAIN_USE_NCCL -ldl for several GPUs that talk over NCCL)
 *            ./train_gpt --device cuda --precision bf16 --graph --model gpt2 --data tokens.bin --seq 1024
 *
 * What to expect: a progress line, the validation loss now and then, a sample of what the model has
 * learned to write, and a table with loss, speed, communication and memory. --help lists all flags.
 *
 * --strategy changes where parameters, gradients and optimizer state live, and nothing else: model,
 * loop and losses are the same.
 *
 * How to read it: data -> train(), which every rank runs -> main(), which checks what can be checked
 * before any rank starts. The model is in gpt.h, the flags are in train_flags.h. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#ifdef DTRAIN_USE_NCCL
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
#endif

#include "gpt.h"
#include "train_flags.h"

#include <ctype.h>

/* ---- model and data -------------------------------------------------------------------------- */

static dtrain_result create_model(gpt *model)
{
    const gpt_config config = {flags.layers,    flags.heads, flags.channels,      flags.seq,
                               flags.positions, flags.vocab, (float)flags.dropout};
    return gpt_create(model, &config);
}

/* One side of the split: its loader and the batch it has just filled, which comes first because a
 * source is also what gpt_set_batch and gpt_loss take for one. */
typedef struct source {
    gpt_batch batch;
    dtrain_loader *loader;
} source;

static dtrain_result next_batch(void *user)
{
    source *s = (source *)user;
    return dtrain_loader_next(s->loader, s->batch.inputs, s->batch.targets);
}

static dtrain_dataset_desc dataset_desc(void)
{
    dtrain_dataset_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = flags.data;
    desc.vocab_count = flags.vocab;
    return desc;
}

static dtrain_dataset_info dataset_info(const dtrain_dataset *dataset)
{
    dtrain_dataset_info info;
    dtrain_dataset_query(dataset, &info);
    return info;
}

/* The first part trains, the last --val-split of the tokens is held out. */
static dtrain_loader_desc loader_desc(dtrain_dataset *dataset, int64_t batch, bool held_out)
{
    const int64_t tokens = dataset_info(dataset).token_count;
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
    static const uint32_t types[] = {DTRAIN_DTYPE_F32, DTRAIN_DTYPE_BF16,
                                     DTRAIN_DTYPE_F16}; /* as in dtypes */
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
    desc.compression = (uint32_t)flags.compression;
    desc.sparse_exchange = (uint32_t)flags.exchange;
    desc.powersgd_rank = (uint32_t)flags.powersgd_rank;
    desc.hierarchical = flags.hierarchical != 0;
    desc.no_error_feedback = flags.no_feedback != 0;
    desc.topk_ratio = (float)flags.topk_ratio;
    desc.topk_momentum = (float)flags.topk_momentum;
    desc.warmup_ratio = (float)flags.warmup_ratio;
    desc.dense_below = flags.dense_below;
    desc.dense_steps = (uint64_t)flags.dense_steps;
    desc.warmup_steps = (uint64_t)flags.warmup_steps;
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
    if (create_model(&copy) == DTRAIN_OK)
        for (desc.accumulation = DTRAIN_ACCUMULATION_LAST;
             desc.accumulation <= DTRAIN_ACCUMULATION_SHARD_EVERY; desc.accumulation++)
            if (dtrain_strategy_plan(copy.params, copy.param_count, &desc, ranks, &memory) ==
                DTRAIN_OK)
                printf(" %s %.1f", accum_modes[desc.accumulation], mib(memory.grads));
    gpt_free(&copy);
    printf("\n");
}

/* What a rank would send to reduce fp32 gradients once, by the ring formula. */
static double dense_bytes(const dtrain_strategy_info *info, int ranks)
{
    return 8.0 * (double)info->trainable_elements * (ranks - 1) / ranks;
}

/* "top-k 0.01 (balanced), hierarchical"; empty when gradients travel whole and directly. */
static void describe_compression(const dtrain_strategy_desc *desc, char *text, size_t room)
{
    *text = 0;
    if (desc->compression == DTRAIN_COMPRESSION_TOPK)
        snprintf(text, room, "top-k %g (%s)", (double)desc->topk_ratio,
                 exchanges[desc->sparse_exchange]);
    if (desc->compression == DTRAIN_COMPRESSION_POWERSGD)
        snprintf(text, room, "PowerSGD rank %u", desc->powersgd_rank);
    if (desc->compression && desc->no_error_feedback)
        snprintf(text + strlen(text), room - strlen(text), " without error feedback");
    if (desc->hierarchical)
        snprintf(text + strlen(text), room - strlen(text), "%shierarchical", *text ? ", " : "");
}

static void show_links(const dtrain_strategy_info *info, int ranks)
{
    const dtrain_strategy_desc *desc = &info->desc;
    const dtrain_emulation *e = &flags.emulation;
    char text[128];
    describe_compression(desc, text, sizeof text);
    if (*text) printf("reduce  %s", text);
    if (desc->compression)
        printf(", after %llu dense steps and %llu of warm-up; in force it sends %.1fx fewer bytes "
               "than fp32 and keeps %.1f MiB of state",
               (unsigned long long)desc->dense_steps, (unsigned long long)desc->warmup_steps,
               info->step_bytes ? dense_bytes(info, ranks) / (double)info->step_bytes : 1,
               mib(info->state_bytes));
    if (*text) printf("\n");
    if (e->node_ranks)
        printf("cluster emulated: %d nodes x %u ranks, %g Gb/s and %g us between nodes\n",
               ranks / (int)e->node_ranks, e->node_ranks, e->gigabits_per_second, e->latency_us);
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
    show_links(&info, ranks);
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
    const int64_t tokens = dataset_info(j->dataset).token_count;
    const long batch = (long)j->train.batch.batch;
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

/* How it came out: over all steps, those of the beginning included. */
static void show_sent(const dtrain_strategy_info *info, const dtrain_summary *s, int ranks)
{
    const dtrain_emulation *e = &flags.emulation;
    const double sent = (double)s->comm_bytes / (double)(s->steps ? s->steps : 1);
    char text[128];
    describe_compression(&info->desc, text, sizeof text);
    if (info->desc.compression)
        printf("  compression          %10.1fx  fewer bytes than fp32 gradients: %.3f MiB sent a "
               "step, not %.3f; %s\n",
               sent > 0 ? dense_bytes(info, ranks) / sent : 1, sent / 1048576,
               dense_bytes(info, ranks) / 1048576, text);
    if (e->node_ranks)
        printf("  cluster              %10d   emulated nodes of %u ranks, %g Gb/s, %g us: times "
               "are of this cluster\n",
               ranks / (int)e->node_ranks, e->node_ranks, e->gigabits_per_second, e->latency_us);
}

static void show_end(dtrain_world *world, const job *j, const dtrain_summary *s)
{
    const dtrain_device *device = dtrain_world_device(world);
    const dtrain_memory *m = &j->memory;
    dtrain_strategy_info info;
    uint64_t now = device->peak_bytes;
    if (device->ops->host_memory) dtrain_process_memory(&now, NULL);
    dtrain_strategy_query(j->strategy, &info);
    printf("\n  loss                 %10.4f   from %.4f, over %lld steps and %.2f M tokens\n",
           s->last_loss, s->first_loss, (long long)s->steps, 1e-6 * (double)s->tokens);
    if (isfinite(s->val_loss))
        printf("  validation loss      %10.4f   perplexity %.2f\n", s->val_loss, exp(s->val_loss));
    printf("  tokens/s             %10.0f   %.1f s in all\n", s->tokens_per_second, s->seconds);
    printf("  step                 %10.2f ms\n", s->step_ms);
    printf("  communication        %10.2f ms in flight, %.2f ms exposed; %.1f MiB sent a step\n",
           s->comm_ms, s->exposed_comm_ms, mib(s->comm_bytes) / (double)(s->steps ? s->steps : 1));
    show_sent(&info, s, dtrain_world_size(world));
    printf("  scaling              %10.1f %%  of %d ranks, counting exposed communication\n",
           100 * s->scaling, dtrain_world_size(world));
    printf("  memory               %10.1f MiB in rank 0, %.1f predicted\n", mib(now),
           mib(m->total));
}

static uint32_t tape_flags(void)
{
    return flags.precision == 2 ? DTRAIN_TAPE_BF16 : flags.precision == 3 ? DTRAIN_TAPE_F16 : 0;
}

static void show_token(int32_t token)
{
    if (flags.vocab != 256) printf("%d ", token);
    else if (token == '\n') printf("\n  ");
    else putchar(isprint(token) || token == '\t' || token >= 128 ? token : '?');
}

static dtrain_result show_sample(dtrain_tape *t, const gpt *m, bool first)
{
    if (first) printf("\na sample, temperature %g:\n  ", flags.temperature);
    const dtrain_result result = gpt_generate(t, m, tape_flags(), flags.sample, flags.temperature,
                                              (uint64_t)flags.seed, first ? show_token : NULL);
    if (first) printf("\n");
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
    dtrain_loader_desc desc = loader_desc(j->dataset, s->batch.batch, held_out);
    return dtrain_loader_create(world, &desc, &s->loader);
}

static dtrain_trainer_desc trainer_desc(dtrain_world *world, job *j)
{
    dtrain_trainer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.micro_batches = j->accum;
    desc.tokens = (uint32_t)(j->train.batch.batch * flags.seq);
    desc.clip = (float)flags.clip;
    desc.tape_flags = tape_flags();
    desc.checkpoint_every = (uint32_t)flags.checkpoint;
    desc.graph = flags.graph != 0;
    desc.seed = (uint64_t)flags.seed;
    desc.schedule.kind = (uint32_t)flags.schedule;
    desc.schedule.lr = dtrain_lr_for_ranks((float)flags.lr, dtrain_world_size(world),
                                           (dtrain_lr_scaling)flags.lr_scaling);
    desc.schedule.min_lr = (float)flags.min_lr;
    desc.schedule.warmup_steps = flags.warmup;
    desc.schedule.total_steps = flags.steps;
    desc.strategy = j->strategy;
    desc.optimizer = j->optimizer;
    desc.next_batch = next_batch;
    desc.loss = gpt_loss;
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
        TRY(dtrain_trainer_split_batch(global, batch, ranks, &batch, &j->accum));
    if (flags.auto_batch) {
        dtrain_plan_batch_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.max_batch = batch;
        desc.set_batch = gpt_set_batch;
        desc.trainer = &trainer;
        desc.params = j->model.params;
        desc.param_count = j->model.param_count;
        desc.strategy = strategy;
        TRY(dtrain_trainer_plan_batch(world, &desc, &batch));
    }
    if (global) TRY(dtrain_trainer_split_batch(global, batch, ranks, &batch, &j->accum));
    TRY(gpt_set_batch(&j->train, batch));
    TRY(gpt_set_batch(&j->held_out, batch));
cleanup:
    return result;
}

static dtrain_result open_job(dtrain_world *world, job *j)
{
    dtrain_result result = DTRAIN_OK;
    dtrain_dataset_desc dataset = dataset_desc();
    dtrain_strategy_desc strategy = strategy_desc();
    dtrain_optimizer_desc adamw = dtrain_adamw_defaults();
    dtrain_trainer_desc trainer;
    dtrain_metrics_desc metrics;
    memset(&metrics, 0, sizeof metrics);
    TRY(create_model(&j->model));
    j->train.batch.model = j->held_out.batch.model = &j->model;
    TRY(dtrain_dataset_open(world, &dataset, &j->dataset));
    TRY(choose_batch(world, j, &strategy));
    TRY(open_source(world, j, &j->train, false));
    TRY(open_source(world, j, &j->held_out, true));
    trainer = trainer_desc(world, j);
    TRY(dtrain_trainer_plan_activations(world, &trainer, &j->memory));
    strategy.other_bytes = j->memory.total;
    TRY(dtrain_strategy_create(world, j->model.params, j->model.param_count, &strategy,
                               &j->strategy));
    adamw.beta2 = (float)flags.beta2;
    adamw.variance_steps = (uint64_t)flags.variance_steps;
    adamw.weight_decay = (float)flags.weight_decay;
    if (flags.topk_momentum > 0) adamw.beta1 = 0; /* one momentum is enough */
    TRY(dtrain_optimizer_create(world, j->strategy, &adamw, &j->optimizer));
    trainer = trainer_desc(world, j);
    TRY(dtrain_trainer_create(world, &trainer, &j->trainer));
    TRY(dtrain_trainer_plan(j->trainer, &j->memory));
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
    gpt_batch_free(&j->train.batch);
    gpt_batch_free(&j->held_out.batch);
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
    if (dtrain_metrics_finish(j->metrics) != DTRAIN_OK) /* a torn log is no torn training */
        fprintf(stderr, "\ntrain_gpt: warning: %s\n", dtrain_last_error());
    if (result != DTRAIN_OK) return result;
    if (first) show_end(world, j, &summary);
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
        desc.kind = ranks > 1 || flags.offload ? DTRAIN_STRATEGY_FULL_SHARD : DTRAIN_STRATEGY_DDP;
    if (create_model(&model) == DTRAIN_OK)
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
    flags.vocab = (long)dataset_info(dataset).vocab_count;
    for (int side = 0; side < 2; side++) {
        dtrain_loader_desc window = loader_desc(dataset, flags.batch, side == 1);
        TRY(dtrain_loader_create(NULL, &window, &loader));
        dtrain_loader_destroy(loader);
    }
cleanup:
    dtrain_dataset_close(dataset);
    return result == DTRAIN_OK ? 0 : BAD("%s", dtrain_last_error());
}

/* Without --comm the library chooses: local or what joins hosts on the cpu, NCCL for GPUs. */
static int choose_backends(dtrain_launch_desc *launch)
{
    if (dtrain_device_ops_by_name(flags.device, &launch->device_ops) != DTRAIN_OK)
        return BAD("--device: %s", dtrain_last_error());
    const bool cpu = launch->device_ops->host_memory;
    if (flags.comm && dtrain_comm_ops_by_name(flags.comm, &launch->comm_ops) != DTRAIN_OK)
        return BAD("--comm: %s", dtrain_last_error());
    if (!cpu && flags.comm && strcmp(flags.comm, "local") != 0)
        return BAD("--comm %s moves host memory, and --device is %s: leave it out, or say local",
                   flags.comm, flags.device);
    if (!cpu) launch->comm_ops = NULL; /* local, through host memory */
#ifdef DTRAIN_USE_NCCL
    if (!cpu && !flags.comm && !flags.emulate) launch->comm_ops = dtrain_nccl_comm_ops();
#endif
    launch->emulation = flags.emulation;
    return 0;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc launch;
    dtrain_launch_info info;
    take_defaults();
    for (int a = 1; a < argc; a++)
        if (strcmp(argv[a], "--help") == 0 || strcmp(argv[a], "-h") == 0) return print_help(), 0;
    if (flags_parse("train_gpt", flag_table, FLAG_COUNT, argc - 1, argv + 1)) return 2;
    if (apply_preset() || check_data() || check_compression() || check_emulation() || check_sizes())
        return 2;
    memset(&launch, 0, sizeof launch);
    if (choose_backends(&launch)) return 2;
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
