/* job.h: train_gpt's part of a run: its model, its data, and the functions that tools/run calls. */
#ifndef JOB_H
#define JOB_H

#include "weights.h"

/* With Muon the matrices of the blocks, which all units but the first and the last are, are group 1. */
static dtrain_result create_model(const settings *s, gpt *model)
{
    const gpt_config config = {s->layers,
                               s->heads,
                               s->channels,
                               s->seq,
                               s->positions,
                               s->vocab,
                               (float)s->dropout,
                               (float)s->epsilon,
                               gpt_activation_kinds[s->activation]};
    const dtrain_result result = gpt_create(model, &config);
    for (size_t i = 0; result == DTRAIN_OK && i < model->param_count; i++) {
        dtrain_param *p = &model->params[i];
        const bool block = p->unit > 0 && p->unit <= (uint32_t)s->layers;
        if (!trains(s)) p->flags |= DTRAIN_PARAM_FROZEN; /* no gradients, no moments */
        if (s->import_from) p->init = DTRAIN_INIT_ZERO;  /* replaced in a moment */
        if (is_optimizer(s->run, DTRAIN_OPTIMIZER_MUON) && block && p->shape[1]) p->group = 1;
    }
    return result;
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
    desc.seed = (uint64_t)s->run->seed;
    desc.workers = (uint32_t)s->run->workers;
    desc.first_item = held_out ? train : 0;
    desc.item_count = held_out ? tokens - train : train;
    return desc;
}

/* train_gpt's part of a job. The source of training comes first: loss, next_batch and set_batch are handed it. */
typedef struct gpt_run {
    source train, held_out;
    const settings *s;
    gpt model;
    char texts[4][32]; /* of settings: what of the model no shape shows */
    const char *settings[9];
    dtrain_dataset *dataset;
    dtrain_tape *tape; /* without a trainer */
} gpt_run;

static gpt_run *own_part(const run_job *j) { return (gpt_run *)j->own; }

/* Say what no shape shows: padding hides the vocabulary. */
static void describe_model(gpt_run *own)
{
    static const char *const names[] = {"--heads", "--vocab", "--activation", "--norm-epsilon"};
    const gpt_config *c = &own->model.config;
    snprintf(own->texts[0], sizeof own->texts[0], "%ld", c->heads);
    snprintf(own->texts[1], sizeof own->texts[1], "%ld", c->vocab);
    snprintf(own->texts[2], sizeof own->texts[2], "%s", gpt_activations[gpt_activation(c)]);
    (void)hf_float(c->epsilon, own->texts[3]);
    for (int i = 0; i < COUNT(names); i++) {
        own->settings[2 * i] = names[i];
        own->settings[2 * i + 1] = own->texts[i];
    }
}

static dtrain_result open_gpt(dtrain_world *world, run_job *j)
{
    gpt_run *own = own_part(j);
    (void)world;
    own->s = &flags;
    own->train.batch.model = own->held_out.batch.model = &own->model;
    const dtrain_result result = create_model(own->s, &own->model);
    describe_model(own);
    j->model = own->settings;
    j->params = own->model.params;
    j->param_count = own->model.param_count;
    j->sample_things = own->s->seq;
    j->steps = j->s->steps;
    return result;
}

static dtrain_result open_source(dtrain_world *world, const gpt_run *own, source *side,
                                 bool held_out)
{
    dtrain_loader_desc desc = loader_desc(own->s, own->dataset, side->batch.batch, held_out);
    return dtrain_loader_create(world, &desc, &side->loader);
}

static dtrain_result open_texts(dtrain_world *world, run_job *j)
{
    gpt_run *own = own_part(j);
    dtrain_dataset_desc dataset = dataset_desc(own->s);
    dtrain_result result = DTRAIN_OK;
    TRY(dtrain_dataset_open(world, &dataset, &own->dataset));
    TRY(gpt_set_batch(&own->held_out, j->batch));
    TRY(open_source(world, own, &own->train, false));
    TRY(open_source(world, own, &own->held_out, true));
    j->loader = own->train.loader;
cleanup:
    return result;
}

static dtrain_result import_gpt(dtrain_world *world, run_job *j)
{
    const gpt_run *own = own_part(j);
    if (!own->s->import_from) return DTRAIN_OK;
    return import_weights(world, own->s, &own->model, j->state);
}

/* Compute the validation loss, on the same random windows each time. */
static dtrain_result validate_gpt(dtrain_world *world, run_job *j, int64_t done, bool stopping,
                                  dtrain_step_record *record)
{
    gpt_run *own = own_part(j);
    const settings *s = own->s;
    const bool due = done == j->steps || (s->eval_every && done % s->eval_every == 0);
    (void)world;
    if (!due || !s->eval_batches || stopping) return DTRAIN_OK;
    dtrain_loader_seek(own->held_out.loader, 0);
    return dtrain_trainer_evaluate(j->trainer, next_batch, &own->held_out, s->eval_batches,
                                   &record->val_loss);
}

static void close_gpt(run_job *j)
{
    gpt_run *own = own_part(j);
    dtrain_loader_destroy(own->train.loader);
    dtrain_loader_destroy(own->held_out.loader);
    dtrain_dataset_close(own->dataset);
    gpt_batch_free(&own->train.batch);
    gpt_batch_free(&own->held_out.batch);
    gpt_free(&own->model);
    memset(own, 0, sizeof *own);
}

/* Make what a run needs that trains nothing. After a failure close_model frees what is there. */
static dtrain_result open_model(dtrain_world *world, run_job *j)
{
    gpt_run *own = own_part(j);
    dtrain_result result = DTRAIN_OK;
    dtrain_compression_desc compression;
    dtrain_strategy_desc strategy = strategy_desc(j->s, &compression);
    dtrain_state_desc values;
    dtrain_load_desc load;
    memset(&values, 0, sizeof values);
    memset(&load, 0, sizeof load);
    TRY(open_gpt(world, j));
    TRY(dtrain_strategy_create(world, j->params, j->param_count, &strategy, &j->strategy));
    values.strategy = j->strategy;
    values.model = j->model;
    load.values_only = true;
    TRY(dtrain_state_create(world, &values, &j->state));
    TRY(dtrain_tape_create(world, j->strategy, NULL, &own->tape));
    if (own->s->import_from) TRY(import_gpt(world, j));
    else result = dtrain_checkpoint_load(j->state, j->s->resume, &load, &j->resumed);
    if (result != DTRAIN_OK && j->s->resume) result = name_error(result, "--resume", j->s->resume);
cleanup:
    return result;
}

#endif /* JOB_H */
