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
    int32_t *samples; /* of sums, as the loader deals them out; otherwise NULL */
} source;

static dtrain_result next_batch(void *user)
{
    source *from = (source *)user;
    const size_t seq = (size_t)from->batch.model->config.seq, bytes = seq * sizeof(int32_t);
    if (!from->samples)
        return dtrain_loader_next(from->loader, from->batch.inputs, from->batch.targets);
    const dtrain_result result = dtrain_loader_next(from->loader, from->samples, NULL);
    dtrain_loader_info info;
    dtrain_loader_query(from->loader, &info);
    for (size_t i = 0; i < (size_t)from->batch.batch && result == DTRAIN_OK; i++) {
        memcpy(from->batch.inputs + i * seq, from->samples + 2 * i * seq, bytes);
        memcpy(from->batch.targets + i * seq, from->samples + (2 * i + 1) * seq, bytes);
        if (i >= info.batch_samples) memset(from->batch.targets + i * seq, 255, bytes); /* of -1 */
    }
    return result;
}

static dtrain_dataset_desc dataset_desc(const settings *s)
{
    static const uint32_t formats[] = {DTRAIN_DATA_AUTO, DTRAIN_DATA_BYTES, DTRAIN_DATA_BIN,
                                       DTRAIN_DATA_U16, DTRAIN_DATA_U32}; /* of data_formats */
    dtrain_dataset_desc desc;
    memset(&desc, 0, sizeof desc);
    if (s->sums) {
        desc.vocab_count = s->vocab;
        desc.item_count = SUMS_COUNT;
        desc.item_bytes = 2 * (size_t)s->seq * sizeof(int32_t);
        desc.read = sums_read;
        desc.user = s->sums;
        return desc;
    }
    desc.path = s->tokens ? s->tokens : s->data;
    desc.format = formats[s->tokens ? 2 : s->data_format];
    desc.vocab_count = s->vocab;
    return desc;
}

static dtrain_dataset_info dataset_info(const dtrain_dataset *dataset)
{
    dtrain_dataset_info info;
    dtrain_dataset_query(dataset, &info);
    return info;
}

/* Train on the first part of the tokens or sums, hold out the last --val-split of them. A validation has the same
 * samples for any number of ranks: --eval-batches times --batch, whatever --auto-batch or --global-batch make of it. */
static dtrain_loader_desc loader_desc(const settings *s, dtrain_dataset *dataset, int64_t batch,
                                      bool held_out)
{
    const int64_t tokens = dataset_info(dataset).item_count;
    const int64_t train = s->sums ? sums_held_out(s->sums, s->val_split)
                                  : tokens - (int64_t)((double)tokens * s->val_split);
    dtrain_loader_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dataset = dataset;
    desc.batch = (uint32_t)batch;
    if (held_out)
        desc.sample_limit = s->eval_batches ? s->eval_batches * s->run->batch : DTRAIN_ONE_EPOCH;
    desc.sequence = s->sums ? 0 : s->seq;
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
    double right;      /* of the held-out sums, 0 to 1, when they were last measured */
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

/* Print a line above the row of this step; on a terminal, over the line that is drawn again. */
static void show_right(double share, int64_t done)
{
    printf("%safter %5lld steps %5.1f %% of the held-out sums are right\n",
           isatty(1) ? "\r\033[K" : "    ", (long long)done, 100 * share);
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

static dtrain_result open_source(dtrain_world *world, const run_job *j, source *side, bool held_out)
{
    const gpt_run *own = own_part(j);
    dtrain_loader_desc desc = loader_desc(own->s, own->dataset, side->batch.batch, held_out);
    share_samples(j, &desc);
    const size_t bytes = desc.batch * dataset_info(own->dataset).item_bytes;
    if (own->s->sums && !(side->samples = (int32_t *)malloc(bytes)))
        return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a batch of sums");
    return dtrain_loader_create(world, &desc, &side->loader);
}

static dtrain_result open_texts(dtrain_world *world, run_job *j)
{
    gpt_run *own = own_part(j);
    dtrain_dataset_desc dataset = dataset_desc(own->s);
    dtrain_result result = DTRAIN_OK;
    TRY(dtrain_dataset_open(world, &dataset, &own->dataset));
    TRY(same_data(world, own->dataset));
    TRY(gpt_set_batch(&own->held_out, j->batch));
    TRY(open_source(world, j, &own->train, false));
    TRY(open_source(world, j, &own->held_out, true));
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

/* Count the sums of the held-out batch in which the likeliest token is right wherever the answer is asked for: then
 * greedy generation writes that answer. logits (batch * seq, columns) */
static int64_t count_right(const gpt_run *own, const float *logits, int64_t samples)
{
    const int64_t seq = own->s->seq, columns = gpt_columns(&own->model.config);
    int64_t right = 0;
    for (int64_t i = 0; i < samples; i++) {
        bool good = true;
        for (int64_t t = i * seq; t < (i + 1) * seq && good; t++) {
            const int32_t target = own->held_out.batch.targets[t];
            const float *row = logits + t * columns;
            for (long c = 0; c < own->s->vocab && target >= 0 && good; c++)
                good = row[c] <= row[target];
        }
        right += good;
    }
    return right;
}

/* The logits of a batch (batch * seq, columns), all of them on every rank of a tensor axis. user: gpt_batch. */
static dtrain_tensor *batch_logits(dtrain_tape *tape, void *user)
{
    const gpt_batch *b = (const gpt_batch *)user;
    return dtrain_place(tape, gpt_forward(tape, b->model, b->inputs, b->batch),
                        DTRAIN_PLACEMENT_WHOLE);
}

/* Measure the share of all held-out sums that the model answers right, 0 to 1; *stop: a rank was asked to stop, and
 * it is not measured. */
static dtrain_result measure_sums(dtrain_world *world, run_job *j, double *share, bool *stop)
{
    gpt_run *own = own_part(j);
    gpt_batch *b = &own->held_out.batch;
    dtrain_comm *const comm = j->mesh ? job_comm(j) : dtrain_world_comm(world);
    dtrain_loader *const some = own->held_out.loader;
    dtrain_loader_desc desc = loader_desc(own->s, own->dataset, b->batch, true);
    dtrain_loader_info info;
    const int64_t count = SUMS_COUNT - sums_held_out(own->s->sums, own->s->val_split);
    const int64_t room = b->batch * own->s->seq * gpt_columns(&own->model.config);
    float right = 0; /* exact below 2^24 */
    float *logits = (float *)malloc((size_t)room * sizeof *logits);
    dtrain_result result = DTRAIN_OK;
    if (!logits) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for logits");
    share_samples(j, &desc);
    desc.sample_limit = DTRAIN_ONE_EPOCH;
    own->held_out.loader = NULL;
    TRY(dtrain_loader_create(world, &desc, &own->held_out.loader));
    while (!*stop && (result = next_batch(&own->held_out)) == DTRAIN_OK) {
        TRY(dtrain_trainer_forward(j->trainer, batch_logits, b, logits, room));
        dtrain_loader_query(own->held_out.loader, &info);
        right += (float)count_right(own, logits, info.batch_samples);
        TRY(asked_to_stop(world, stop));
    }
    if (result != DTRAIN_ERROR_END) TRY(result);
    TRY(dtrain_all_reduce(comm, &right, &right, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL));
    *share = (double)right / (double)count;
cleanup:
    if (own->held_out.loader != some) dtrain_loader_destroy(own->held_out.loader);
    own->held_out.loader = some;
    free(logits);
    return result;
}

/* Compute the validation loss, on the same random windows each time, and of sums the share that is right. A request to
 * stop ends it, and the record says so. */
static dtrain_result validate_gpt(dtrain_world *world, run_job *j, int64_t done, bool stopping,
                                  dtrain_step_record *record)
{
    gpt_run *own = own_part(j);
    const settings *s = own->s;
    const bool due = done == j->steps || (s->eval_every && done % s->eval_every == 0);
    dtrain_result result = DTRAIN_OK;
    if (!due || !s->eval_batches || stopping) return DTRAIN_OK;
    dtrain_loader_seek(own->held_out.loader, 0);
    TRY(dtrain_trainer_evaluate(j->trainer, next_batch, &own->held_out, DTRAIN_UNTIL_END,
                                &record->val_loss));
    if (isnan(record->val_loss)) TRY(asked_to_stop(world, &record->stop_requested));
    if (record->stop_requested || !s->sums || !sums_fit(s->sums, s->seq)) return DTRAIN_OK;
    TRY(measure_sums(world, j, &own->right, &record->stop_requested));
    if (record->stop_requested) return DTRAIN_OK;
    record->val_accuracy = own->right;
    if (dtrain_world_rank(world) == 0) show_right(own->right, done);
cleanup:
    return result;
}

static void close_gpt(run_job *j)
{
    gpt_run *own = own_part(j);
    dtrain_loader_destroy(own->train.loader);
    dtrain_loader_destroy(own->held_out.loader);
    dtrain_dataset_close(own->dataset);
    gpt_batch_free(&own->train.batch);
    gpt_batch_free(&own->held_out.batch);
    free(own->train.samples);
    free(own->held_out.samples);
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
    TRY(open_mesh(world, 0, j));
    TRY(open_gpt(world, j));
    strategy.mesh = j->mesh;
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
