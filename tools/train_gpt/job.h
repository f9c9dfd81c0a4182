/* job.h: everything that a training run consists of: model, data, strategy, optimizer, trainer and
 * metrics, and how the settings become the library's descs. */
#ifndef JOB_H
#define JOB_H

#include "weights.h"

static bool is_optimizer(const settings *s, dtrain_optimizer_kind kind)
{
    return s->optimizer == (long)kind - 1;
}

/* With Muon the matrices of the blocks, which all units but the first and the last are, are group 1. */
static dtrain_result create_model(const settings *s, gpt *model)
{
    const gpt_config config = {s->layers,    s->heads, s->channels,      s->seq,
                               s->positions, s->vocab, (float)s->dropout};
    const dtrain_result result = gpt_create(model, &config);
    for (size_t i = 0; result == DTRAIN_OK && i < model->param_count; i++) {
        dtrain_param *p = &model->params[i];
        const bool block = p->unit > 0 && p->unit <= (uint32_t)s->layers;
        if (!trains(s)) p->flags |= DTRAIN_PARAM_FROZEN; /* no gradients, no moments */
        if (s->import_from) p->init = DTRAIN_INIT_ZERO;  /* replaced in a moment */
        if (is_optimizer(s, DTRAIN_OPTIMIZER_MUON) && block && p->shape[1]) p->group = 1;
    }
    return result;
}

/* What the flags ask of the optimizer; *matrices, group 1, must live as long as the desc is used. */
static dtrain_optimizer_desc optimizer_desc(const settings *s, dtrain_optimizer_desc *matrices)
{
    dtrain_optimizer_desc desc = is_optimizer(s, DTRAIN_OPTIMIZER_SGD)    ? dtrain_sgd_defaults()
                                 : is_optimizer(s, DTRAIN_OPTIMIZER_LION) ? dtrain_lion_defaults()
                                                                          : dtrain_adamw_defaults();
    desc.weight_decay = (float)s->weight_decay;
    if (desc.kind == DTRAIN_OPTIMIZER_SGD) desc.momentum = s->topk_momentum > 0 ? 0 : 0.9f;
    if (desc.kind == DTRAIN_OPTIMIZER_ADAMW) {
        desc.beta2 = (float)s->beta2;
        desc.variance_steps = (uint64_t)s->variance_steps;
        if (s->topk_momentum > 0) desc.beta1 = 0; /* one momentum is enough */
    }
    if (!is_optimizer(s, DTRAIN_OPTIMIZER_MUON)) return desc;
    *matrices = dtrain_muon_defaults();
    matrices->weight_decay = (float)s->weight_decay;
    matrices->lr_scale = (float)(s->muon_lr / s->lr);
    desc.groups = matrices;
    desc.group_count = 1;
    return desc;
}

/* One side of the split: a loader and the batch that it fills. The batch comes first, because
 * gpt_set_batch and gpt_loss are handed a source as their gpt_batch. */
typedef struct source {
    gpt_batch batch;
    dtrain_loader *loader;
} source;

static dtrain_result next_batch(void *user)
{
    source *from = (source *)user;
    return dtrain_loader_next(from->loader, from->batch.inputs, from->batch.targets);
}

static dtrain_dataset_desc dataset_desc(const settings *s)
{
    dtrain_dataset_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = s->tokens ? s->tokens : s->data;
    desc.format = s->tokens ? (uint32_t)DTRAIN_DATA_BIN : (uint32_t)s->data_format;
    desc.vocab_count = s->vocab;
    return desc;
}

static dtrain_dataset_info dataset_info(const dtrain_dataset *dataset)
{
    dtrain_dataset_info info;
    dtrain_dataset_query(dataset, &info);
    return info;
}

/* Train on the first part of the tokens, hold out the last --val-split of them. */
static dtrain_loader_desc loader_desc(const settings *s, dtrain_dataset *dataset, int64_t batch,
                                      bool held_out)
{
    const int64_t tokens = dataset_info(dataset).item_count;
    int64_t train = tokens - (int64_t)((double)tokens * s->val_split);
    dtrain_loader_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dataset = dataset;
    desc.batch = (uint32_t)batch;
    desc.sequence = s->seq;
    desc.seed = (uint64_t)s->seed;
    desc.workers = (uint32_t)s->workers;
    desc.first_item = held_out ? train : 0;
    desc.item_count = held_out ? tokens - train : train;
    return desc;
}

typedef struct job {
    const settings *s;
    gpt model;
    dtrain_dataset *dataset;
    source train, held_out;
    uint32_t accum;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_metrics *metrics;
    dtrain_state *state;
    dtrain_tape *tape;             /* without a trainer */
    dtrain_checkpoint *checkpoint; /* NULL without --checkpoint */
    dtrain_checkpoint *snapshots;  /* in the launcher's memory; NULL without --snapshot-every */
    dtrain_load_info resumed;      /* step -1: the run begins */
    bool stopped;                  /* by a signal, before its last step */
    int64_t rolled_back;           /* the step of the last roll-back, or -1 */
    dtrain_memory memory;
    dtrain_probe_info links; /* with --probe-links */
} job;

/* What the flags ask of the strategy; *compression must live as long as the desc is used. */
static dtrain_strategy_desc strategy_desc(const settings *s, dtrain_compression_desc *compression)
{
    static const uint32_t classes[] = {
        0, DTRAIN_OFFLOAD_OPTIMIZER, DTRAIN_OFFLOAD_OPTIMIZER | DTRAIN_OFFLOAD_GRADS,
        DTRAIN_OFFLOAD_OPTIMIZER | DTRAIN_OFFLOAD_GRADS | DTRAIN_OFFLOAD_PARAMS};
    static const uint32_t states_of_muon = 1;
    dtrain_strategy_desc desc = {0};
    desc.kind = (uint32_t)s->strategy + 1;
    if (is_optimizer(s, DTRAIN_OPTIMIZER_LION) || is_optimizer(s, DTRAIN_OPTIMIZER_SGD))
        desc.optimizer_states = 1;
    desc.group_states = &states_of_muon;
    desc.group_count = 1;
    desc.accumulation = (uint32_t)s->accum_mode;
    desc.param_dtype = float_type(s->param_dtype);
    desc.reduce_dtype = float_type(s->reduce_dtype);
    desc.offload = classes[s->offload];
    desc.node_size = (uint32_t)s->node_size;
    desc.no_overlap = s->no_overlap != 0;
    desc.keep_after_forward = !s->reshard;
    desc.init_seed = (uint64_t)s->init_seed;
    desc.bucket_bytes = (size_t)s->bucket_kib * 1024;
    desc.hierarchical = s->hierarchical != 0;
    memset(compression, 0, sizeof *compression);
    compression->kind = (uint32_t)s->compression;
    compression->sparse_exchange = (uint32_t)s->exchange;
    compression->powersgd_rank = (uint32_t)s->powersgd_rank;
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

static uint32_t tape_flags(const settings *s)
{
    return s->precision == 2 ? DTRAIN_TAPE_BF16 : s->precision == 3 ? DTRAIN_TAPE_F16 : 0;
}

static dtrain_result open_source(dtrain_world *world, job *j, source *side, bool held_out)
{
    dtrain_loader_desc desc = loader_desc(j->s, j->dataset, side->batch.batch, held_out);
    return dtrain_loader_create(world, &desc, &side->loader);
}

static dtrain_trainer_desc trainer_desc(dtrain_world *world, job *j)
{
    const settings *s = j->s;
    dtrain_trainer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.micro_batches = j->accum;
    desc.tokens = (uint32_t)(j->train.batch.batch * s->seq);
    desc.clip = (float)s->clip;
    desc.tape_flags = tape_flags(s);
    desc.checkpoint_every = (uint32_t)s->checkpoint;
    desc.graph = s->graph != 0;
    desc.seed = (uint64_t)s->seed;
    desc.nonfinite =
        s->nonfinite == DTRAIN_NONFINITE_SKIP ? DTRAIN_NONFINITE_SKIP : DTRAIN_NONFINITE_STOP;
    desc.verify_every = (uint32_t)s->verify_every;
    desc.schedule.kind = (uint32_t)s->schedule;
    desc.schedule.lr = dtrain_lr_for_ranks((float)s->lr, dtrain_world_size(world),
                                           (dtrain_lr_scaling)s->lr_scaling);
    desc.schedule.min_lr = (float)s->min_lr;
    desc.schedule.warmup_steps = s->warmup;
    desc.schedule.total_steps = s->steps;
    desc.strategy = j->strategy;
    desc.optimizer = j->optimizer;
    desc.next_batch = next_batch;
    desc.loss = gpt_loss;
    desc.user = &j->train;
    return desc;
}

/* Choose the size of a micro-batch and how many make a step, before the model is allocated. */
static dtrain_result choose_batch(dtrain_world *world, job *j, const dtrain_strategy_desc *strategy)
{
    const settings *s = j->s;
    dtrain_trainer_desc trainer = trainer_desc(world, j);
    const uint64_t global = (uint64_t)s->global_batch;
    const int ranks = dtrain_world_size(world);
    uint32_t batch = (uint32_t)s->batch;
    dtrain_result result = DTRAIN_OK;
    j->accum = s->accum ? (uint32_t)s->accum : 1;
    if (global) /* before a search, so that what cannot be shared is an error at once */
        TRY(dtrain_trainer_split_batch(global, batch, ranks, &batch, &j->accum));
    if (s->auto_batch) {
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

#define SNAPSHOTS "snapshots" /* their directory, in the launcher's memory */

/* Load what was saved last: to memory, if there is a snapshot that can be read, because what goes to the disk goes
 * there too; or to the disk. *from has step -1 when there is nothing yet. */
static dtrain_result load_newest(dtrain_world *world, const job *j, dtrain_load_info *from)
{
    dtrain_load_desc memory;
    dtrain_result result = DTRAIN_OK;
    memset(&memory, 0, sizeof memory);
    from->step = -1;
    if (j->s->snapshot_every) {
        TRY(dtrain_kept_storage(world, &memory.storage));
        result = dtrain_checkpoint_load(j->state, SNAPSHOTS, &memory, from);
        if (result != DTRAIN_ERROR_FILE && result != DTRAIN_ERROR_DATA) return result;
    }
    result = dtrain_checkpoint_load(j->state, j->s->checkpoints, NULL, from);
    if (result == DTRAIN_ERROR_FILE && from->step < 0) result = DTRAIN_OK;
cleanup:
    return result;
}

/* Go on from a checkpoint, if the flags or a restart ask for it. `auto` in an empty directory begins. */
static dtrain_result resume_job(dtrain_world *world, job *j)
{
    const settings *s = j->s;
    dtrain_state_desc all;
    dtrain_world_info info;
    dtrain_result result = DTRAIN_OK;
    memset(&all, 0, sizeof all);
    all.strategy = j->strategy;
    all.optimizer = j->optimizer;
    all.trainer = j->trainer;
    all.loader = j->train.loader;
    j->resumed.step = j->rolled_back = -1;
    TRY(dtrain_state_create(world, &all, &j->state));
    if (s->import_from) TRY(import_weights(world, s, &j->model, j->state));
    dtrain_world_query(world, &info);
    const bool again = s->checkpoints && info.restart_count;
    const bool newest = again || (s->resume && strcmp(s->resume, "auto") == 0);
    if (newest) result = load_newest(world, j, &j->resumed);
    else if (s->resume) result = dtrain_checkpoint_load(j->state, s->resume, NULL, &j->resumed);
cleanup:
    return result;
}

/* Write the flags as they are in force to DIR/config, beside the checkpoints, for a later --config. */
static dtrain_result write_config(dtrain_world *world, const job *j)
{
    char path[4096], tmp[4096 + 8];
    snprintf(path, sizeof path, "%s/config", j->s->checkpoints);
    snprintf(tmp, sizeof tmp, "%s.tmp", path);
    FILE *file = fopen(tmp, "w");
    if (file) {
        fprintf(file,
                "# train_gpt of dtrain %s: %d ranks, %u samples a rank and micro-batch, %u of "
                "these a step\n",
                dtrain_version(), dtrain_world_size(world), (unsigned)j->train.batch.batch,
                j->accum);
        config_write(file, flag_table, FLAG_COUNT);
    }
    const bool written = file && !ferror(file);
    if (file && fclose(file) == 0 && written && rename(tmp, path) == 0) return DTRAIN_OK;
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be written: %s", path, strerror(errno));
}

static dtrain_result open_checkpoints(dtrain_world *world, job *j)
{
    const settings *s = j->s;
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
    if (s->checkpoints) TRY(dtrain_checkpoint_open(world, &desc, &j->checkpoint));
    if (s->checkpoints && dtrain_world_rank(world) == 0) TRY(write_config(world, j));
    if (!s->snapshot_every) return DTRAIN_OK;
    TRY(dtrain_kept_storage(world, &desc.storage));
    desc.directory = SNAPSHOTS;
    desc.keep = 1;
    desc.keep_best = 0;
    desc.background = false;
    TRY(dtrain_checkpoint_open(world, &desc, &j->snapshots));
cleanup:
    return result;
}

/* Make everything of a run. After a failure close_job frees what is there. */
static dtrain_result open_job(dtrain_world *world, const settings *s, job *j)
{
    dtrain_result result = DTRAIN_OK;
    dtrain_dataset_desc dataset = dataset_desc(s);
    dtrain_compression_desc compression;
    dtrain_strategy_desc strategy = strategy_desc(s, &compression);
    dtrain_optimizer_desc matrices, optimizer = optimizer_desc(s, &matrices);
    dtrain_trainer_desc trainer;
    dtrain_metrics_desc metrics;
    memset(j, 0, sizeof *j);
    memset(&metrics, 0, sizeof metrics);
    j->s = s;
    TRY(create_model(s, &j->model));
    j->train.batch.model = j->held_out.batch.model = &j->model;
    TRY(dtrain_dataset_open(world, &dataset, &j->dataset));
    TRY(choose_batch(world, j, &strategy));
    TRY(open_source(world, j, &j->train, false));
    TRY(open_source(world, j, &j->held_out, true));
    trainer = trainer_desc(world, j);
    TRY(dtrain_trainer_plan(world, &trainer, &j->memory)); /* of activations alone */
    strategy.other_bytes = j->memory.total;
    TRY(dtrain_strategy_create(world, j->model.params, j->model.param_count, &strategy,
                               &j->strategy));
    TRY(dtrain_optimizer_create(world, j->strategy, &optimizer, &j->optimizer));
    trainer = trainer_desc(world, j);
    TRY(dtrain_trainer_create(world, &trainer, &j->trainer));
    TRY(dtrain_trainer_plan(world, &trainer, &j->memory));
    TRY(resume_job(world, j));
    TRY(open_checkpoints(world, j));
    metrics.append = j->resumed.step >= 0;
    metrics.total_steps = s->steps;
    metrics.progress = stdout;
    metrics.progress_every = s->steps >= 200 ? (uint32_t)(s->steps / 20) : 1;
    metrics.jsonl_path = s->log;
    TRY(dtrain_metrics_create(world, &metrics, &j->metrics));
cleanup:
    return result;
}

/* Make what a run needs that trains nothing. After a failure close_job frees what is there. */
static dtrain_result open_model(dtrain_world *world, const settings *s, job *j)
{
    dtrain_result result = DTRAIN_OK;
    dtrain_compression_desc compression;
    dtrain_strategy_desc strategy = strategy_desc(s, &compression);
    dtrain_state_desc values;
    dtrain_load_desc load;
    memset(j, 0, sizeof *j);
    memset(&values, 0, sizeof values);
    memset(&load, 0, sizeof load);
    j->s = s;
    TRY(create_model(s, &j->model));
    TRY(dtrain_strategy_create(world, j->model.params, j->model.param_count, &strategy,
                               &j->strategy));
    values.strategy = j->strategy;
    load.values_only = true;
    TRY(dtrain_state_create(world, &values, &j->state));
    TRY(dtrain_tape_create(world, j->strategy, NULL, &j->tape));
    if (s->import_from) TRY(import_weights(world, s, &j->model, j->state));
    else TRY(dtrain_checkpoint_load(j->state, s->resume, &load, &j->resumed));
cleanup:
    return result;
}

static void close_job(job *j)
{
    dtrain_metrics_destroy(j->metrics);
    dtrain_checkpoint_close(j->snapshots);
    dtrain_checkpoint_close(j->checkpoint);
    dtrain_state_destroy(j->state);
    dtrain_tape_destroy(j->tape);
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

#endif /* JOB_H */
