/* saved_run.h: trainings that are saved and loaded: a small GPT under any strategy, with trainer, loader, dropout and
 * arrays of the program's own, and what every rank saw of it.
 *
 *     saved_run        what is set, and in shared memory what came of it
 *     saved_go()       runs it: load, steps, save, in a launch of its own
 *     saved_compare()  the same losses from a step on, the same state in the end
 *
 * State is compared without any file: every rank copies its pieces of the list of state into one image. Include it
 * after dtrain.h, test.h and ranks.h. */
#ifndef DTRAIN_TEST_SAVED_RUN_H
#define DTRAIN_TEST_SAVED_RUN_H

enum {
    SAVED_RANKS = 8,
    SAVED_STEPS = 12,
    SAVED_WIDTH = 10,
    SAVED_INNER = 18,
    SAVED_SEQ = 7,
    SAVED_PARAMS = 14,
    SAVED_TENSORS = 120,
    SAVED_BYTES = 1 << 18 /* of an image of the state */
};

typedef struct saved_run {
    /* what is set */
    int ranks;
    uint32_t mode;
    dtrain_strategy_desc strategy;
    dtrain_compression_desc compression;
    uint32_t micro, tape_flags, recompute_every;
    int batch;                                  /* of a rank and micro-batch */
    bool lion;                                  /* in place of AdamW */
    const char *const *model, *const *settings; /* of the state */
    bool sgd, background, muon; /* muon: of the matrices of units 1 and 2; others by sgd or AdamW */
    float dropout, momentum;
    int mine; /* elements of each rank's own array; 0 = 3, -1 = there is none */
    uint64_t seed;
    int steps, save_every; /* until `steps` are done; 0 = no save */
    int saves;             /* of each step that is saved; 0 = 1 */
    const char *load, *save;
    dtrain_load_desc how;
    dtrain_checkpoint_desc keep;
    dtrain_allocator allocator;
    const dtrain_device_ops *device;
    const dtrain_comm_ops *comm;
    uint32_t restarts; /* not 0: `load` is what this run has saved, and only a restart reads it */
    int (*during)(dtrain_world *world, struct saved_run *r,
                  int64_t step); /* before a step; not 0 ends the rank */

    /* what every rank saw */
    dtrain_step_record records[SAVED_RANKS][SAVED_STEPS];
    uint32_t attempts;
    int64_t from[SAVED_RANKS]; /* the step that it began with */
    uint64_t hash[SAVED_RANKS], inputs[SAVED_RANKS][SAVED_STEPS];
    dtrain_load_info loaded[SAVED_RANKS];
    dtrain_checkpoint_info info[SAVED_RANKS];
    dtrain_result ended[SAVED_RANKS];
    char error[SAVED_RANKS][1024];

    /* the state in the end: tensors of the list, one behind the other, each rank's own ones too */
    uint64_t image_bytes;
    struct {
        char name[128];
        uint32_t kind;
        bool own;
        uint64_t at, bytes; /* of an own one: rank r's from at + r * bytes on */
    } tensors[SAVED_TENSORS];
    size_t tensor_count;
    uint64_t scalars[16];
    unsigned char image[SAVED_BYTES];
} saved_run;

/* A rank's side. */
typedef struct saved_rank {
    saved_run *r;
    int rank;
    int64_t step;
    dtrain_param params[SAVED_PARAMS];
    dtrain_dataset *dataset;
    dtrain_loader *loader;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_trainer *trainer;
    dtrain_state *state;
    dtrain_checkpoint *checkpoint;
    int32_t tokens[64 * SAVED_SEQ], targets[64 * SAVED_SEQ];
    uint64_t counter; /* of the program's own: the same on all ranks */
    float mine[3];    /* each rank's own */
    unsigned char blob[5];
} saved_rank;

static inline void saved_param(saved_rank *s, int at, uint32_t unit, const char *name, int64_t rows,
                               int64_t columns)
{
    dtrain_param *p = &s->params[at];
    p->name = name;
    p->unit = unit;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->init = DTRAIN_INIT_NORMAL;
    p->init_scale = columns ? 0.3f : 0.1f;
}

/* Two blocks between a tied embedding; a frozen tensor, one that gets no gradient, one that gets
 * none in every second step, one of one element. */
static inline void saved_model(saved_rank *s)
{
    saved_param(s, 0, 0, "model.embed_tokens.weight", 256, SAVED_WIDTH);
    saved_param(s, 1, 0, "model.decoder.embed_positions.weight", SAVED_SEQ, SAVED_WIDTH);
    saved_param(s, 2, 1,
                "base_model.model.model.layers.10.mlp.experts.7.gate_up_proj.lora_A.default.weight",
                SAVED_INNER, SAVED_WIDTH);
    saved_param(s, 3, 1,
                "base_model.model.model.layers.10.mlp.experts.7.gate_up_proj.lora_A.default.bias",
                SAVED_INNER, 0);
    saved_param(s, 4, 1, "model.layers.10.mlp.experts.7.down_proj.weight", SAVED_WIDTH,
                SAVED_INNER);
    saved_param(s, 5, 1, "encoder.block.23.layer.1.DenseReluDense.wi_0.weight", 3, 5);
    saved_param(s, 6, 2,
                "base_model.model.model.layers.11.mlp.experts.7.gate_up_proj.lora_A.default.weight",
                SAVED_INNER, SAVED_WIDTH);
    saved_param(s, 7, 2,
                "base_model.model.model.layers.11.mlp.experts.7.gate_up_proj.lora_A.default.bias",
                SAVED_INNER, 0);
    saved_param(s, 8, 2, "model.layers.11.mlp.experts.7.down_proj.weight", SAVED_WIDTH,
                SAVED_INNER);
    saved_param(s, 9, 2, "model.layers.11.post_attention_layernorm.scale.0", 1, 0);
    saved_param(s, 10, 2, "model.layers.11.post_attention_layernorm.scale.1", 1, 0);
    saved_param(s, 11, 3, "model.layers.11.final_layernorm.weight", SAVED_WIDTH, 0);
    saved_param(s, 12, 3, "model.layers.11.final_layernorm.bias", SAVED_WIDTH, 0);
    saved_param(s, 13, 3, "lm_head.weight", 0, 0);
    s->params[6].flags = DTRAIN_PARAM_FROZEN;
    s->params[3].flags = DTRAIN_PARAM_NO_DECAY;
    s->params[11].init = DTRAIN_INIT_CONSTANT;
    s->params[11].init_scale = 1;
    s->params[13].alias_of = &s->params[0];
}

static inline dtrain_result saved_next(void *user)
{
    saved_rank *s = (saved_rank *)user;
    const dtrain_result result = dtrain_loader_next(s->loader, s->tokens, s->targets);
    uint64_t *hash = &s->r->inputs[s->rank][s->step];
    for (int i = 0; i < s->r->batch * SAVED_SEQ; i++)
        *hash = ranks_mix(*hash ^ (uint64_t)s->tokens[i]);
    return result;
}

static inline dtrain_tensor *saved_block(saved_rank *s, dtrain_tape *t, dtrain_param *p,
                                         dtrain_tensor *x)
{
    const bool biased = p != &s->params[2] || s->step % 2;
    dtrain_tensor *h = dtrain_linear(t, x, &p[0], biased ? &p[1] : NULL, DTRAIN_ACTIVATION_GELU);
    h = dtrain_linear(t, h, &p[2], NULL, DTRAIN_ACTIVATION_NONE);
    return dtrain_add(t, x, dtrain_dropout(t, h, s->r->dropout));
}

static inline dtrain_tensor *saved_loss(dtrain_tape *t, void *user)
{
    saved_rank *s = (saved_rank *)user;
    dtrain_param *p = s->params;
    const int64_t shape[2] = {s->r->batch, SAVED_SEQ}, rows = s->r->batch * SAVED_SEQ;
    dtrain_tape_unit(t, 0);
    dtrain_tensor *x = dtrain_embedding(
        t, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 2, shape, s->tokens, false), &p[0], &p[1]);
    dtrain_tape_unit(t, 1);
    x = saved_block(s, t, &p[2], x);
    dtrain_tape_unit(t, 2);
    x = saved_block(s, t, &p[6], x);
    dtrain_tape_unit(t, 3);
    x = dtrain_layernorm(t, x, NULL, &p[11], &p[12], 1e-5f);
    x = dtrain_linear(t, x, &p[13], NULL, DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(
        t, x, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, s->targets, false), 0, 0);
}

#define SAVED_TRY(call)                                     \
    do {                                                    \
        const dtrain_result saved_result = (call);          \
        if (saved_result != DTRAIN_OK) return saved_result; \
    } while (0)

static inline dtrain_result saved_create(dtrain_world *world, saved_rank *s)
{
    saved_run *r = s->r;
    dtrain_dataset_desc data = {0};
    dtrain_loader_desc window = {0};
    dtrain_optimizer_desc how = dtrain_optimizer_defaults(r->sgd    ? DTRAIN_OPTIMIZER_SGD
                                                          : r->lion ? DTRAIN_OPTIMIZER_LION
                                                                    : DTRAIN_OPTIMIZER_ADAMW);
    dtrain_optimizer_desc groups[2] = {dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON),
                                       dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_LION)};
    dtrain_trainer_desc trainer;
    dtrain_state_desc state = {0};
    memset(&trainer, 0, sizeof trainer);
    saved_model(s);
    data.path = "README.md";
    data.format = 1;
    SAVED_TRY(dtrain_dataset_open(world, &data, &s->dataset));
    window.dataset = s->dataset;
    window.batch = (uint32_t)r->batch;
    window.sequence = SAVED_SEQ;
    window.item_count = 300; /* short: epochs end within a run */
    window.seed = r->seed;
    SAVED_TRY(dtrain_loader_create(world, &window, &s->loader));
    dtrain_strategy_desc where = r->strategy; /* ranks may be threads */
    where.compression = r->compression.kind ? &r->compression : NULL;
    for (int i = 0; i < SAVED_PARAMS && r->muon; i++) {
        const bool block = s->params[i].unit == 1 || s->params[i].unit == 2;
        if (block) s->params[i].group = s->params[i].shape[1] ? 1 : 2;
    }
    how.groups = groups;
    how.group_count = r->muon ? 2 : 0;
    SAVED_TRY(dtrain_strategy_create(world, s->params, SAVED_PARAMS, &where, &s->strategy));
    if (r->sgd) how.momentum = r->momentum;
    else if (!r->lion) how.epsilon = 1e-3f;
    SAVED_TRY(dtrain_optimizer_create(world, s->strategy, &how, &s->optimizer));
    trainer.micro_batches = r->micro;
    trainer.tokens = (uint32_t)(r->batch * SAVED_SEQ);
    trainer.clip = r->compression.kind ? 0 : 1;
    trainer.tape_flags = r->tape_flags;
    trainer.recompute_every = r->recompute_every;
    if (r->tape_flags & DTRAIN_TAPE_F16) trainer.loss_scaling.growth_interval = 2; /* it moves */
    trainer.seed = r->seed;
    trainer.schedule.kind = DTRAIN_SCHEDULE_COSINE;
    trainer.schedule.lr = 0.02f;
    trainer.schedule.warmup_steps = 2;
    trainer.schedule.total_steps = SAVED_STEPS;
    trainer.strategy = s->strategy;
    trainer.optimizer = s->optimizer;
    trainer.next_batch = saved_next;
    trainer.loss = saved_loss;
    trainer.user = s;
    SAVED_TRY(dtrain_trainer_create(world, &trainer, &s->trainer));
    state.strategy = s->strategy;
    state.optimizer = s->optimizer;
    state.trainer = s->trainer;
    state.loader = s->loader;
    state.model = r->model;
    state.settings = r->settings;
    dtrain_state_item items[3];
    memset(items, 0, sizeof items);
    items[0].name = "counter";
    items[0].dtype = DTRAIN_DTYPE_I64;
    items[0].count = 1;
    items[0].memory = &s->counter;
    items[1].name = "blob";
    items[1].dtype = DTRAIN_STATE_BYTES;
    items[1].count = 5;
    items[1].memory = s->blob;
    items[2].name = "mine";
    items[2].count = r->mine ? r->mine : 3;
    items[2].memory = s->mine;
    items[2].own = true;
    state.items = items;
    state.item_count = r->mine >= 0 ? 3 : 2;
    SAVED_TRY(dtrain_state_create(world, &state, &s->state));
    return DTRAIN_OK;
}

/* Copy this rank's pieces of the state into the image. */
static inline dtrain_result saved_image(dtrain_world *world, saved_rank *s)
{
    saved_run *r = s->r;
    const dtrain_state_tensor *tensors;
    dtrain_optimizer_info optimizer;
    dtrain_loader_info loader;
    size_t count;
    uint64_t at = 0;
    SAVED_TRY(dtrain_state_tensors(s->state, &tensors, &count));
    for (size_t i = 0; i < count && i < SAVED_TENSORS; i++) {
        const dtrain_state_tensor *t = &tensors[i];
        const uint64_t each =
            t->dtype == DTRAIN_STATE_BYTES ? 1 : dtrain_dtype_bytes((dtrain_dtype)t->dtype);
        const uint64_t bytes = (uint64_t)t->total * each;
        const uint64_t all = bytes * (t->own ? (uint64_t)r->ranks : 1);
        if (!CHECK(at + all <= SAVED_BYTES)) return DTRAIN_ERROR_MEMORY;
        for (int turn = 0; turn < r->ranks; turn++) { /* several ranks may hold the same piece */
            if (turn == s->rank)
                SAVED_TRY(dtrain_device_copy(dtrain_world_device(world),
                                             r->image + at +
                                                 (t->own ? (uint64_t)s->rank * bytes : 0) +
                                                 (uint64_t)t->piece.offset * each,
                                             t->memory, (size_t)t->piece.count * each));
            SAVED_TRY(dtrain_barrier(dtrain_world_comm(world)));
        }
        if (s->rank == 0) {
            snprintf(r->tensors[i].name, sizeof r->tensors[i].name, "%s", t->name);
            r->tensors[i].kind = t->kind;
            r->tensors[i].own = t->own;
            r->tensors[i].at = at;
            r->tensors[i].bytes = bytes;
        }
        at += all;
    }
    dtrain_optimizer_query(s->optimizer, &optimizer);
    dtrain_loader_query(s->loader, &loader);
    if (s->rank == 0) {
        r->scalars[0] = optimizer.step_count;
        r->scalars[1] = loader.position;
    }
    if (s->rank == 0) r->tensor_count = count, r->image_bytes = at;
    return DTRAIN_OK;
}

static inline dtrain_result saved_train(dtrain_world *world, saved_rank *s)
{
    saved_run *r = s->r;
    SAVED_TRY(saved_create(world, s));
    for (int i = 0; i < 3; i++) s->mine[i] = (float)(s->rank * 10 + i);
    dtrain_load_desc how = r->how; /* ranks may be threads */
    dtrain_world_info info;
    dtrain_world_query(world, &info);
    if (s->rank == 0) r->attempts = info.restart_count + 1;
    if (r->load && (!r->restarts || info.restart_count)) {
        dtrain_load_info *loaded = &r->loaded[s->rank];
        const dtrain_result result = dtrain_checkpoint_load(s->state, r->load, &how, loaded);
        if (!r->restarts || result != DTRAIN_ERROR_NOT_FOUND)
            SAVED_TRY(result); /* an attempt may end before its first save */
        s->step = loaded->step < 0 ? 0 : loaded->step;
    }
    r->from[s->rank] = s->step;
    if (r->save) {
        dtrain_checkpoint_desc keep = r->keep;
        keep.directory = r->save;
        keep.state = s->state;
        keep.background = r->background;
        SAVED_TRY(dtrain_checkpoint_open(world, &keep, &s->checkpoint));
    }
    while (s->step < r->steps) {
        dtrain_step_record *record = &r->records[s->rank][s->step];
        if (r->during && r->during(world, r, s->step)) return DTRAIN_ERROR_USAGE;
        r->inputs[s->rank][s->step] = 0;
        SAVED_TRY(dtrain_trainer_step(s->trainer, record));
        s->step++;
        s->counter = s->counter * 3 + (uint64_t)s->step;
        s->mine[0] += 1;
        s->blob[s->step % 5] = (unsigned char)s->step;
        if (r->save && r->save_every && s->step % r->save_every == 0)
            for (int i = 0; i < r->saves || !i; i++)
                SAVED_TRY(dtrain_checkpoint_save(s->checkpoint, s->step, record->loss));
    }
    if (s->checkpoint) {
        SAVED_TRY(dtrain_checkpoint_wait(s->checkpoint));
        dtrain_checkpoint_query(s->checkpoint, &r->info[s->rank]);
    }
    SAVED_TRY(saved_image(world, s));
    return dtrain_strategy_verify(s->strategy, &r->hash[s->rank]);
}

/* Free a rank and what it has made, but for its checkpoint. */
static inline void saved_free(saved_rank *s)
{
    dtrain_state_destroy(s->state);
    dtrain_trainer_destroy(s->trainer);
    dtrain_optimizer_destroy(s->optimizer);
    dtrain_strategy_destroy(s->strategy);
    dtrain_loader_destroy(s->loader);
    dtrain_dataset_close(s->dataset);
    free(s);
}

static inline int saved_main(dtrain_world *world, void *user)
{
    static saved_rank zero;
    saved_rank *s = (saved_rank *)malloc(sizeof *s);
    if (!s) return 3;
    *s = zero;
    s->r = (saved_run *)user;
    s->rank = dtrain_world_rank(world);
    saved_run *r = s->r;
    dtrain_result result = saved_train(world, s);
    r->ended[s->rank] = result;
    snprintf(r->error[s->rank], sizeof r->error[0], "%s",
             result == DTRAIN_OK ? "" : dtrain_last_error());
    if (dtrain_checkpoint_close(s->checkpoint) != DTRAIN_OK && result == DTRAIN_OK)
        result = DTRAIN_ERROR_FILE;
    saved_free(s);
    return result == DTRAIN_OK ? 0 : 1;
}

static inline saved_run *saved_new(int ranks, uint32_t kind)
{
    saved_run *r = (saved_run *)ranks_shared(sizeof *r);
    r->ranks = ranks;
    r->mode = DTRAIN_LAUNCH_THREADS;
    r->strategy.kind = kind;
    r->strategy.bucket_bytes = 2000;
    r->strategy.init_seed = 3;
    r->micro = 1;
    r->batch = 2;
    r->steps = 6;
    r->seed = 11;
    return r;
}

static inline dtrain_result saved_launch(saved_run *r)
{
    dtrain_launch_desc desc = ranks_desc(r->ranks, r->mode);
    desc.device_ops = r->device;
    desc.comm_ops = r->comm;
    desc.options.allocator = r->allocator;
    desc.restarts = r->restarts;
    desc.backoff_ms = r->restarts ? 1 : 0;
    memset(r->image, 0, sizeof r->image); /* pieces that nobody has are equal */
    return ranks_launch(&desc, saved_main, r, NULL);
}

/* Run; every rank must end well. */
static inline bool saved_go(saved_run *r, const char *what)
{
    const dtrain_result result = saved_launch(r);
    return CHECK_MSG(result == DTRAIN_OK, "%s: %s", what,
                     result == DTRAIN_OK ? "" : dtrain_last_error());
}

/* Compare one class of the state. */
static inline void saved_compare_state(const saved_run *a, const saved_run *b, const char *what,
                                       bool all)
{
    for (size_t i = 0; i < a->tensor_count; i++)
        for (size_t k = 0; k < b->tensor_count; k++) {
            if (a->tensors[i].kind != b->tensors[k].kind ||
                strcmp(a->tensors[i].name, b->tensors[k].name) != 0)
                continue;
            if (a->tensors[i].own && !all) continue;
            const uint64_t bytes =
                a->tensors[i].bytes * (a->tensors[i].own ? (uint64_t)a->ranks : 1);
            CHECK_MSG(memcmp(a->image + a->tensors[i].at, b->image + b->tensors[k].at, bytes) == 0,
                      "%s: \"%s\" of kind %u differs", what, a->tensors[i].name,
                      a->tensors[i].kind);
        }
}

/* Compare two runs from a step on: what they read, their records, their state in the end. */
static inline void saved_compare(const saved_run *a, const saved_run *b, int from, const char *what)
{
    for (int r = 0; r < a->ranks; r++)
        for (int step = from; step < a->steps; step++) {
            const dtrain_step_record *x = &a->records[r][step], *y = &b->records[r][step];
            CHECK_MSG(a->inputs[r][step] == b->inputs[r][step],
                      "%s: rank %d reads another batch in step %d", what, r, step);
            CHECK_MSG(x->step == y->step && x->loss == y->loss &&
                          memcmp(&x->grad_norm, &y->grad_norm, sizeof x->grad_norm) == 0 &&
                          x->lr == y->lr && x->tokens == y->tokens &&
                          x->loss_scale == y->loss_scale && x->skipped_steps == y->skipped_steps,
                      "%s: step %d (%lld) of rank %d: loss %.9g and %.9g, norm %.9g and %.9g, lr "
                      "%g %g, tokens %llu %llu",
                      what, step, (long long)y->step, r, x->loss, y->loss, x->grad_norm,
                      y->grad_norm, x->lr, y->lr, (unsigned long long)x->tokens,
                      (unsigned long long)y->tokens);
        }
    CHECK_MSG(a->hash[0] == b->hash[0] && a->hash[0] != 0, "%s: the parameters differ", what);
    CHECK_MSG(memcmp(a->scalars, b->scalars, sizeof a->scalars) == 0, "%s: scalars differ", what);
    CHECK_MSG(a->tensor_count == b->tensor_count, "%s: %zu and %zu tensors", what, a->tensor_count,
              b->tensor_count);
    saved_compare_state(a, b, what, true);
}

#endif
