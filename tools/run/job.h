/* job.h: what a training run consists of, and how the switches become the library's descs. What differs between
 * programs is in a table of functions, run_program. */
#ifndef RUN_JOB_H
#define RUN_JOB_H

#include "tools/balance.h"
#include "tools/nvml.h"
#include "tools/prometheus.h"
#include "tools/run/monitor.h"
#include "tools/run/recorded.h"
#include "tools/run/settings.h"
#include "tools/run/split.h"

/* Leave a function that has a result and a label for what it must free. */
#define TRY(call)                              \
    do {                                       \
        result = (call);                       \
        if (result != DTRAIN_OK) goto cleanup; \
    } while (0)

typedef struct run_job run_job;

/* A program. `own` is its part of a job, one for each rank; loss, next_batch and set_batch are handed it. The calls
 * come in this order: open_model, set_batch (several times), open_data, import, then steps and validations. */
typedef struct run_program {
    const char *things, *sample_name; /* what its rates count: "tokens", and "tokens/s" */
    size_t own_bytes;
    long least_batch;
    /* Declare the parameters and say how many things a sample has; nothing large is allocated. A world of NULL means
     * that the job will only be planned. */
    dtrain_result (*open_model)(dtrain_world *world, run_job *j);
    dtrain_result (*set_batch)(void *own, uint32_t batch);
    dtrain_tensor *(*loss)(dtrain_tape *tape, void *own);
    dtrain_result (*next_batch)(void *own);
    /* Open data and loaders for j->batch, and set j->loader and j->steps. */
    dtrain_result (*open_data)(dtrain_world *world, run_job *j);
    dtrain_result (*import)(dtrain_world *world, run_job *j); /* or NULL */
    /* Validate behind a step if it is time to, and put the loss into the record; `done` steps are made. */
    dtrain_result (*validate)(dtrain_world *world, run_job *j, int64_t done, bool stopping,
                              dtrain_step_record *record);
    /* Before the first step, on every rank; rank 0 says what the run is. */
    dtrain_result (*start)(dtrain_world *world, const run_job *j);
    dtrain_result (*finish)(dtrain_world *world, run_job *j); /* after the summary; or NULL */
    void (*close)(run_job *j);
    int (*check_outputs)(
        void);      /* probe the files that finish will write, as checks.h does; or NULL */
    bool own_table; /* validate prints the progress */
    bool can_cut;   /* its parameters have marks for a tensor axis */
    bool can_stage; /* with a pipeline it runs no pass but the trainer's */
} run_program;

struct run_job {
    const run_settings *s;
    const run_program *program;
    void *own;
    dtrain_param *params;
    size_t param_count;
    int64_t sample_things; /* tokens of a sample, or 1 */
    int64_t steps;         /* of the whole run */
    const char *const
        *model; /* open_model's: what no shape shows, for dtrain_state_desc; or NULL */
    run_record record;
    dtrain_comm *comm; /* NULL: the world's */
    dtrain_mesh *mesh; /* of --tensor and --pipeline; NULL: all ranks are data-parallel */
    uint32_t batch, accum;
    dtrain_pipeline_desc line; /* of a pipeline: the settings', with units in stages */
    uint32_t *stage_units;     /* (stages) by cost; NULL: listed, or no pipeline */
    dtrain_loader *loader;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_metrics *metrics;
    prometheus file; /* of --prometheus */
    nvml gpus;
    dtrain_state *state;
    dtrain_checkpoint *checkpoint; /* NULL without --checkpoint */
    dtrain_load_info resumed;      /* step -1: the run begins */
    bool stopped;                  /* by a signal, before its last step */
    int64_t stopped_at;            /* steps made then */
    bool saved;                    /* the state behind the last step, on the disk */
    int64_t rolled_back;           /* the step of the last roll-back, or -1 */
    bool refused;                  /* its directory of checkpoints is another run's */
    dtrain_memory memory;          /* its total with the snapshot */
    uint64_t snapshot_bytes;       /* of checkpoints, where the device's memory is the host's */
    uint64_t sent; /* bytes that this rank sent over the data axis in the last step */
};

/* Make a job of the switches with a program's part of it, zeroed, for this rank. */
static run_job new_job(const run_settings *s, const run_program *program, void *own)
{
    run_job j;
    memset(&j, 0, sizeof j);
    j.s = s;
    j.program = program;
    j.own = own;
    return j;
}

/* Copy the declared parameters without arrays, which are the library's: planning writes to parameters, and those of a
 * model may be in use. NULL: no memory. */
static dtrain_param *copy_params(const run_job *j)
{
    dtrain_param *copy = (dtrain_param *)malloc((j->param_count + !j->param_count) * sizeof *copy);
    for (size_t i = 0; copy && i < j->param_count; i++) {
        copy[i] = j->params[i];
        copy[i].value = copy[i].grad = NULL;
        memset(&copy[i].state, 0, sizeof copy[i].state);
        if (copy[i].alias_of) copy[i].alias_of = copy + (copy[i].alias_of - j->params);
    }
    return copy;
}

/* ---- descs ---------------------------------------------------------------------------------------- */

/* What the flags ask of the optimizer; *matrices, group 1, must live as long as the desc is used. */
static dtrain_optimizer_desc optimizer_desc(const run_settings *s, dtrain_optimizer_desc *matrices)
{
    dtrain_optimizer_desc desc = dtrain_optimizer_defaults(
        is_optimizer(s, DTRAIN_OPTIMIZER_SGD)    ? DTRAIN_OPTIMIZER_SGD
        : is_optimizer(s, DTRAIN_OPTIMIZER_LION) ? DTRAIN_OPTIMIZER_LION
                                                 : DTRAIN_OPTIMIZER_ADAMW);
    desc.weight_decay = (float)s->weight_decay;
    if (desc.kind == DTRAIN_OPTIMIZER_SGD) desc.momentum = s->topk_momentum > 0 ? 0 : 0.9f;
    if (desc.kind == DTRAIN_OPTIMIZER_ADAMW) {
        desc.beta2 = (float)s->beta2;
        desc.variance_steps = (uint64_t)s->variance_steps;
        if (s->topk_momentum > 0) desc.beta1 = 0; /* one momentum is enough */
    }
    if (!is_optimizer(s, DTRAIN_OPTIMIZER_MUON)) return desc;
    *matrices = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON);
    matrices->weight_decay = (float)s->weight_decay;
    matrices->lr_scale = (float)(s->muon_lr / s->lr);
    desc.groups = matrices;
    desc.group_count = 1;
    return desc;
}

/* What the flags ask of the strategy; *compression must live as long as the desc is used. */
static dtrain_strategy_desc strategy_desc(const run_settings *s,
                                          dtrain_compression_desc *compression)
{
    static const uint32_t classes[] = {
        0, DTRAIN_OFFLOAD_OPTIMIZER, DTRAIN_OFFLOAD_OPTIMIZER | DTRAIN_OFFLOAD_GRADS,
        DTRAIN_OFFLOAD_OPTIMIZER | DTRAIN_OFFLOAD_GRADS | DTRAIN_OFFLOAD_PARAMS};
    static const uint32_t states_of_muon = 1;
    dtrain_strategy_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = (uint32_t)s->strategy + 1;
    if (is_optimizer(s, DTRAIN_OPTIMIZER_LION) || is_optimizer(s, DTRAIN_OPTIMIZER_SGD))
        desc.optimizer_states = 1;
    desc.group_states = &states_of_muon;
    desc.group_count = 1;
    desc.accumulation = (uint32_t)s->accum_mode;
    desc.param_dtype = float_type(s->param_dtype);
    desc.reduce_dtype = float_type(s->reduce_dtype);
    desc.offload = classes[s->offload];
    desc.node_size = (uint32_t)(s->node_size / s->tensor); /* of replicas' ranks */
    if (s->pipeline > 1) desc.pipeline = &s->line;
    desc.no_overlap = s->no_overlap != 0;
    desc.keep_after_forward = !s->reshard;
    desc.init_seed = (uint64_t)s->init_seed;
    desc.bucket_bytes = (size_t)s->bucket_kib * 1024;
    desc.hierarchical = s->hierarchical != 0;
    memset(compression, 0, sizeof *compression);
    compression->kind = (uint32_t)s->compression;
    compression->no_error_feedback = s->no_feedback != 0;
    compression->topk_ratio = (float)s->topk_ratio;
    compression->topk_momentum = (float)s->topk_momentum;
    compression->warmup_ratio = (float)s->warmup_ratio;
    compression->dense_below = s->dense_below > 1 ? s->dense_below : 1;
    compression->dense_steps = s->dense_steps ? (uint64_t)s->dense_steps : DTRAIN_DENSE_STEPS_NONE;
    compression->warmup_steps = (uint64_t)s->warmup_steps;
    desc.compression = compression;
    return desc;
}

static uint32_t tape_flags(const run_settings *s)
{
    return s->precision == BF16 ? DTRAIN_TAPE_BF16 : s->precision == FP16 ? DTRAIN_TAPE_F16 : 0;
}

/* Count the ranks that hold one replica of the model. */
static long model_ranks(const run_settings *s) { return s->tensor * s->pipeline; }

/* Count the stages of a pipeline. */
static int stage_count(const run_settings *s)
{
    const bool chunked = s->line.kind == DTRAIN_PIPELINE_INTERLEAVED;
    return (int)(s->pipeline * (s->chunks ? s->chunks : chunked ? 2 : 1));
}

/* Return the ranks that deal the samples out among themselves and average gradients. NULL: all of the world. */
static dtrain_comm *job_comm(const run_job *j)
{
    return j->mesh ? dtrain_mesh_comm(j->mesh, DTRAIN_AXIS_DATA) : j->comm;
}

/* Say the same to a loader. */
static void share_samples(const run_job *j, dtrain_loader_desc *desc)
{
    desc->mesh = j->mesh;
    desc->comm = j->mesh ? NULL : j->comm;
}

/* Tell whether a signal has asked any rank to stop. Collective. */
static dtrain_result asked_to_stop(dtrain_world *world, bool *any)
{
    char all[DTRAIN_MAX_RANKS];
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    const char mine = info.stop_requested;
    const dtrain_result result = dtrain_world_all_gather(world, &mine, 1, all);
    *any = result == DTRAIN_OK && memchr(all, 1, (size_t)dtrain_world_size(world));
    return result;
}

/* Count them. */
static int job_ranks(dtrain_world *world, const run_job *j)
{
    return dtrain_comm_size(job_comm(j) ? job_comm(j) : dtrain_world_comm(world));
}

/* Make the mesh of --tensor and --pipeline. A world of NULL: to plan for so many ranks. */
static dtrain_result open_mesh(dtrain_world *world, int ranks, run_job *j)
{
    dtrain_mesh_desc desc;
    memset(&desc, 0, sizeof desc);
    if (model_ranks(j->s) == 1) return DTRAIN_OK;
    desc.tensor = (int)j->s->tensor;
    desc.pipeline = (int)j->s->pipeline;
    desc.sequence_parallel = j->s->sequence_parallel != 0;
    desc.comm = j->comm;
    desc.ranks = ranks;
    return dtrain_mesh_create(world, &desc, &j->mesh);
}

static dtrain_schedule schedule_desc(const run_settings *s, int64_t steps, int ranks)
{
    const double factors[] = {1, ranks, sqrt((double)ranks)}; /* --lr-scaling: none, linear, sqrt */
    dtrain_schedule schedule;
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = (uint32_t)s->schedule;
    schedule.lr = (float)(s->lr * factors[s->lr_scaling]);
    schedule.min_lr = s->min_lr > 0 ? (float)s->min_lr : 0;
    schedule.warmup_steps = s->warmup;
    schedule.total_steps = steps;
    if (schedule.kind != DTRAIN_SCHEDULE_STEPS) return schedule;
    schedule.milestones[0] = steps / 2;
    schedule.milestones[1] = steps * 3 / 4;
    return schedule;
}

static dtrain_trainer_desc trainer_desc(dtrain_world *world, run_job *j)
{
    const run_settings *s = j->s;
    dtrain_trainer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.micro_batches = j->accum;
    desc.tokens = (uint32_t)(j->batch * j->sample_things);
    desc.clip = (float)s->clip;
    desc.tape_flags = tape_flags(s);
    desc.recompute_every = (uint32_t)s->checkpoint;
    desc.graph = s->graph != 0;
    desc.seed = (uint64_t)s->seed;
    desc.nonfinite =
        s->nonfinite == DTRAIN_NONFINITE_SKIP ? DTRAIN_NONFINITE_SKIP : DTRAIN_NONFINITE_STOP;
    desc.verify_every = (uint32_t)s->verify_every;
    desc.schedule = schedule_desc(s, j->steps, job_ranks(world, j));
    desc.strategy = j->strategy;
    desc.optimizer = j->optimizer;
    desc.next_batch = j->program->next_batch;
    desc.loss = j->program->loss;
    desc.user = j->own;
    desc.mesh = j->mesh;
    return desc;
}

/* Write a sentence of the library for who types flags: without the call in front, and with --node-size for a field
 * node_size, where there is such a flag. A word with "schedule." in front is a field, too. */
static void fields_to_flags(const char *sentence, char *text, size_t room)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789_", schedule[] = "schedule.";
    int rank = 0; /* bytes of "rank N: ", which dtrain_fail puts there again */
    (void)sscanf(sentence, "rank %*d: %n", &rank);
    sentence += rank;
    const size_t call = strncmp(sentence, "dtrain_", 7) == 0 ? strspn(sentence, letters) : 0;
    const char *at =
        call && strncmp(sentence + call, ": ", 2) == 0 ? sentence + call + 2 : sentence;
    size_t used = 0;
    for (size_t length; *at && used + 1 < room; at += length) {
        const bool inside = strncmp(at, schedule, sizeof schedule - 1) == 0;
        const char *const word = inside ? at + sizeof schedule - 1 : at;
        char name[FLAGS_NAME] = "--";
        length = strspn(word, letters);
        for (size_t i = 0; i < length && i + 3 < sizeof name; i++)
            name[2 + i] = word[i] == '_' ? '-' : word[i];
        const bool field = inside || memchr(word, '_', length);
        const bool flag =
            field && length + 3 < sizeof name && flags_find(flag_table, flag_count, name) >= 0;
        length = length ? length + (size_t)(word - at) : 1;
        if (flag) used += (size_t)snprintf(text + used, room - used, "%s", name);
        else used += (size_t)snprintf(text + used, room - used, "%.*s", (int)length, at);
    }
    text[used < room ? used : room - 1] = 0;
}

/* Put a flag and its value before the last error, and leave out advice that names what programs give the library,
 * in backquotes: no flag is called so. */
static dtrain_result name_error(dtrain_result result, const char *name, const char *value)
{
    char text[1024];
    fields_to_flags(dtrain_last_error(), text, sizeof text);
    char *advice = strchr(text, '`');
    while (advice && advice > text && *advice != ';') advice--;
    if (advice && advice > text) *advice = 0;
    if (!*name) return dtrain_fail(result, "%s", text);
    return dtrain_fail(result, "%s%s%s: %s", name, *value ? " " : "", value, text);
}

/* Name the flag behind a refusal of the library, which speaks of descs. */
static dtrain_result name_flag(dtrain_result result, const char *name, const char *value)
{
    const bool refused = result == DTRAIN_ERROR_ARGUMENT || result == DTRAIN_ERROR_UNSUPPORTED;
    return refused ? name_error(result, name, value) : result;
}

/* Lower the batch to the largest one that fits. */
static dtrain_result search_batch(dtrain_world *world, run_job *j,
                                  const dtrain_strategy_desc *strategy)
{
    const dtrain_trainer_desc trainer = trainer_desc(world, j);
    dtrain_batch_search search;
    memset(&search, 0, sizeof search);
    search.max_batch = j->batch;
    search.set_batch = j->program->set_batch;
    search.params = j->params;
    search.param_count = j->param_count;
    search.strategy = strategy;
    const dtrain_result result = dtrain_trainer_plan(world, &trainer, &search, &j->memory);
    j->batch = search.batch;
    return result;
}

/* Choose the size of a micro-batch and how many make a step, before the model is allocated. A smaller batch makes more
 * micro-batches of a global one, and a pipeline may keep more of them at once: then the search is repeated. */
static dtrain_result choose_batch(dtrain_world *world, run_job *j,
                                  const dtrain_strategy_desc *strategy)
{
    const run_settings *s = j->s;
    const uint64_t global = (uint64_t)s->global_batch;
    const int ranks = job_ranks(world, j);
    dtrain_result result = DTRAIN_OK;
    j->batch = (uint32_t)s->batch;
    j->accum = s->accum ? (uint32_t)s->accum : 1;
    if (global) /* before a search, so that what cannot be shared is an error at once */
        TRY(name_flag(split_global_batch(global, j->batch, ranks, &j->batch, &j->accum),
                      "--global-batch", ""));
    for (uint32_t before = 0; s->auto_batch && before != j->accum;) {
        before = j->accum;
        TRY(search_batch(world, j, strategy));
        if (global) TRY(split_global_batch(global, j->batch, ranks, &j->batch, &j->accum));
        if (s->pipeline == 1) break;
    }
    TRY(j->program->set_batch(j->own, j->batch));
cleanup:
    return result;
}

/* ---- a job, piece by piece ------------------------------------------------------------------------- */

/* Declare the model and choose the batch: all that is needed to plan, of which nothing is large. */
static dtrain_result plan_job(dtrain_world *world, run_job *j, dtrain_strategy_desc *strategy)
{
    dtrain_result result = DTRAIN_OK;
    if (!j->mesh) TRY(open_mesh(world, 0, j));
    TRY(j->program->open_model(world, j));
    strategy->mesh = j->mesh;
    strategy->comm = j->mesh ? NULL : j->comm;
    TRY(choose_batch(world, j, strategy));
cleanup:
    return result;
}

/* Count the snapshot of a checkpoint that is saved in the background: host memory for what this rank writes, its
 * share of tensors of which several ranks have the same piece. */
static dtrain_result plan_snapshot(dtrain_world *world, int ranks, run_job *j)
{
    const dtrain_state_tensor *tensors;
    dtrain_state *state = NULL;
    dtrain_state_desc all;
    dtrain_result result = DTRAIN_OK;
    size_t count;
    if (!j->s->checkpoints || j->s->save_blocking) return DTRAIN_OK;
    memset(&all, 0, sizeof all);
    all.strategy = j->strategy;
    all.optimizer = j->optimizer;
    TRY(dtrain_state_create(world, &all, &state));
    TRY(dtrain_state_tensors(state, &tensors, &count));
    for (size_t i = 0; i < count; i++) { /* a tensor is listed once for each piece */
        const dtrain_state_tensor *t = &tensors[i], *before = i ? &tensors[i - 1] : NULL;
        const uint64_t each = dtrain_dtype_bytes((dtrain_dtype)t->dtype);
        if (t->kind == DTRAIN_STATE_SCALAR) continue; /* the manifest has it */
        if (t->own) j->snapshot_bytes += (uint64_t)t->piece.count * each;
        else if (!before || before->kind != t->kind || strcmp(before->name, t->name) != 0)
            j->snapshot_bytes += (uint64_t)t->total * each / (uint64_t)ranks;
    }
cleanup:
    dtrain_state_destroy(state);
    return result;
}

/* Divide the units among the stages of a pipeline by what they cost, if no list says how. */
static dtrain_result divide_units(dtrain_world *world, run_job *j, dtrain_strategy_desc *strategy)
{
    const dtrain_trainer_desc trainer = trainer_desc(world, j);
    dtrain_result result = DTRAIN_OK;
    j->line = j->s->line;
    if (j->s->pipeline == 1 || j->line.units) return DTRAIN_OK;
    j->stage_units = (uint32_t *)calloc((size_t)stage_count(j->s), sizeof *j->stage_units);
    if (!j->stage_units) TRY(dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for stages"));
    TRY(balance_model(world, &trainer, j->params, j->param_count, &j->line, (int)j->s->pipeline,
                      j->stage_units));
    j->line.units = j->stage_units;
    strategy->pipeline = &j->line;
cleanup:
    return result;
}

/* Say on rank 0 if computing activations again frees no memory: of few blocks the one that is computed again needs as
 * much as all of them. */
static dtrain_result check_recomputation(dtrain_world *world, run_job *j)
{
    dtrain_trainer_desc kept = trainer_desc(world, j);
    dtrain_memory without;
    dtrain_result result = DTRAIN_OK;
    if (!j->s->checkpoint || j->s->pipeline > 1) return DTRAIN_OK;
    kept.recompute_every = 0;
    TRY(dtrain_trainer_plan(world, &kept, NULL, &without));
    if (without.total <= j->memory.total && dtrain_world_rank(world) == 0)
        fprintf(stderr,
                RUN_NAME ": --activation-checkpointing %ld saves no memory with this model and "
                         "batch: %.1f MiB a rank "
                         "with it, %.1f without it, which is faster\n",
                j->s->checkpoint, (double)j->memory.total / 1048576,
                (double)without.total / 1048576);
cleanup:
    return result;
}

/* Make strategy, optimizer and trainer, and count what a rank will need. */
static dtrain_result open_trainer(dtrain_world *world, run_job *j, dtrain_strategy_desc *strategy)
{
    dtrain_result result = DTRAIN_OK;
    dtrain_optimizer_desc matrices, optimizer = optimizer_desc(j->s, &matrices);
    dtrain_trainer_desc trainer = trainer_desc(world, j);
    if (j->s->pipeline == 1) { /* of activations alone; those of stages are known later */
        TRY(dtrain_trainer_plan(world, &trainer, NULL, &j->memory));
        strategy->other_bytes = j->memory.total;
    }
    TRY(divide_units(world, j, strategy));
    TRY(name_flag(dtrain_strategy_create(world, j->params, j->param_count, strategy, &j->strategy),
                  "--strategy", strategies[j->s->strategy]));
    TRY(name_flag(dtrain_optimizer_create(world, j->strategy, &optimizer, &j->optimizer), "", ""));
    trainer = trainer_desc(world, j);
    TRY(name_flag(dtrain_trainer_create(world, &trainer, &j->trainer), "", ""));
    TRY(dtrain_trainer_plan(world, &trainer, NULL, &j->memory));
    TRY(check_recomputation(world, j));
    if (dtrain_world_device(world)->ops->host_memory)
        TRY(plan_snapshot(world, dtrain_world_size(world), j));
    j->memory.total += j->snapshot_bytes;
cleanup:
    return result;
}

/* Load the newest checkpoint; *from has step -1 when there is none yet. */
static dtrain_result load_newest(const run_job *j, bool this_job, dtrain_load_info *from)
{
    dtrain_load_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.this_job = this_job;
    from->step = -1;
    const dtrain_result result = dtrain_checkpoint_load(j->state, j->s->checkpoints, &desc, from);
    return result == DTRAIN_ERROR_NOT_FOUND ? DTRAIN_OK : result;
}

/* Go on from a checkpoint, if the flags or a restart ask for it. `auto` in an empty directory begins. */
static dtrain_result resume_job(dtrain_world *world, run_job *j)
{
    const run_settings *s = j->s;
    dtrain_state_desc all;
    dtrain_world_info info;
    dtrain_result result = DTRAIN_OK;
    memset(&all, 0, sizeof all);
    all.strategy = j->strategy;
    all.optimizer = j->optimizer;
    all.trainer = j->trainer;
    all.loader = j->loader;
    record_settings(&j->record, (int64_t)j->batch * j->accum * job_ranks(world, j));
    all.model = j->model;
    all.settings = j->record.pairs;
    j->resumed.step = j->rolled_back = -1;
    TRY(dtrain_state_create(world, &all, &j->state));
    if (j->program->import) TRY(j->program->import(world, j));
    dtrain_world_query(world, &info);
    const bool newest = s->resume && strcmp(s->resume, "auto") == 0;
    if (s->checkpoints && info.restart_count && !newest)
        TRY(load_newest(j, true, &j->resumed)); /* an attempt may have ended before a save */
    if (newest) result = load_newest(j, false, &j->resumed);
    else if (s->resume && j->resumed.step < 0)
        result = dtrain_checkpoint_load(j->state, s->resume, NULL, &j->resumed);
    if (result != DTRAIN_OK && s->resume) result = name_error(result, "--resume", s->resume);
cleanup:
    return result;
}

/* Write the flags as they are in force to DIR/config, beside the checkpoints, and to --config-out. */
static dtrain_result write_configs(dtrain_world *world, const run_job *j)
{
    char path[4096], about[128];
    dtrain_result result = DTRAIN_OK;
    snprintf(about, sizeof about, "%d %s, %u samples a rank and micro-batch, %u of these a step",
             job_ranks(world, j), j->mesh ? "replicas" : "ranks", j->batch, j->accum);
    snprintf(path, sizeof path, "%s/config", j->s->checkpoints ? j->s->checkpoints : "");
    if (j->s->checkpoints) TRY(write_config(path, about));
    if (j->s->config_out) TRY(write_config(j->s->config_out, about));
cleanup:
    return result;
}

static dtrain_result open_checkpoints(dtrain_world *world, run_job *j)
{
    const run_settings *s = j->s;
    dtrain_checkpoint_desc desc;
    dtrain_result result = DTRAIN_OK;
    memset(&desc, 0, sizeof desc);
    desc.keep = (uint32_t)s->keep;
    desc.keep_best = (uint32_t)s->keep_best;
    desc.background = !s->save_blocking;
    desc.failures = 3;
    desc.directory = s->checkpoints;
    desc.config = s->command;
    desc.state = j->state;
    desc.set_aside = s->set_aside;
    if (s->checkpoints) result = dtrain_checkpoint_open(world, &desc, &j->checkpoint);
    if (result == DTRAIN_ERROR_DATA) {
        j->refused = true; /* status 2: no launcher starts it again in vain */
        const char *why = strstr(dtrain_last_error(), ": "); /* behind this rank's number */
        result = dtrain_fail(result, "%s (--resume auto, another --checkpoint, --set-aside)",
                             why ? why + 2 : dtrain_last_error());
    }
    TRY(result);
    if (dtrain_world_rank(world) == 0) TRY(write_configs(world, j));
cleanup:
    return result;
}

static dtrain_result open_metrics(dtrain_world *world, run_job *j)
{
    char *const texts = (char *)malloc(2 * MONITOR_TEXT);
    if (!texts) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for the text of the flags");
    dtrain_metrics_desc desc = metrics_desc(j->s, texts);
    const dtrain_metrics_sink sink = prometheus_sink(&j->file);
    if (j->s->prometheus) desc.sinks = &sink, desc.sink_count = 1;
    j->file.path = j->s->prometheus;
    j->file.share = nvml_share;
    j->file.user = &j->gpus;
    desc.append = j->resumed.step >= 0;
    desc.first_step = j->resumed.step > 0 ? j->resumed.step + 1 : 0;
    desc.total_steps = j->steps;
    desc.progress = j->program->own_table ? NULL : stdout;
    desc.progress_every = j->steps >= 40 ? (uint32_t)(j->steps / 20) : 1; /* 20 to 39 lines */
    desc.trainer = j->trainer;
    const dtrain_result result = dtrain_metrics_create(world, &desc, &j->metrics);
    free(texts);
    return result == DTRAIN_OK ? nvml_open(world, 5000, &j->gpus) : result;
}

/* Make everything of a run. After a failure close_job frees what is there. */
static dtrain_result open_job(dtrain_world *world, run_job *j)
{
    dtrain_result result = DTRAIN_OK;
    dtrain_compression_desc compression;
    dtrain_strategy_desc strategy = strategy_desc(j->s, &compression);
    TRY(plan_job(world, j, &strategy));
    TRY(j->program->open_data(world, j));
    TRY(open_trainer(world, j, &strategy));
    TRY(resume_job(world, j));
    TRY(open_checkpoints(world, j));
    TRY(open_metrics(world, j));
cleanup:
    return result;
}

/* Free a job. The first error stays the last one: closing tells of a failed save again. */
static void close_job(run_job *j)
{
    char first[1024];
    int prefix = 0; /* "rank N: ", which dtrain_fail puts there again */
    snprintf(first, sizeof first, "%s", dtrain_last_error());
    (void)sscanf(first, "rank %*d: %n", &prefix);
    dtrain_metrics_destroy(j->metrics);
    nvml_close(&j->gpus);
    dtrain_checkpoint_close(j->checkpoint);
    dtrain_state_destroy(j->state);
    dtrain_trainer_destroy(j->trainer);
    dtrain_optimizer_destroy(j->optimizer);
    dtrain_strategy_destroy(j->strategy);
    j->program->close(j);
    dtrain_mesh_destroy(j->mesh);
    free(j->stage_units);
    (void)dtrain_fail(DTRAIN_OK, "%s", first + prefix);
}

#endif /* RUN_JOB_H */
