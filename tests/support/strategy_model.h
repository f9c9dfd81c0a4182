/* strategy_model.h: one training that differs in nothing but its strategy: what the matrix compares.
 *
 *     strategy_case       what is set: kind, accumulation, dtypes, ...
 *     strategy_outcome    what every rank saw, in shared memory: losses, norms, parameters, hashes
 *     strategy_train()    a rank's part: create, train, read, destroy
 *
 * Include it after dtrain.h, test.h and ranks.h.
 *
 * The GPT is full of sizes that divide by nothing: one-element tensors, tensors smaller than the
 * rank count, an empty one, a parameter that gets no gradient, frozen ones, a tied head.
 * The matmul model has nothing but weights of linear layers.
 *
 * Step s of a run takes the samples [s B, (s + 1) B) of an endless row, micro-batch by micro-batch,
 * rank by rank: runs with the same B see the same samples in a step, however they are dealt. */
#include "packed_attention.h"
#ifndef DTRAIN_TEST_STRATEGY_MODEL_H
#define DTRAIN_TEST_STRATEGY_MODEL_H

enum {
    MODEL_VOCAB = 29,
    MODEL_WIDTH = 10,
    MODEL_HEADS = 2,
    MODEL_SEQ = 5,
    MODEL_INNER = 17,
    MODEL_BLOCKS = 3,
    MODEL_STEPS = 4,
    MODEL_MOST_BATCH = 96,
    MODEL_MOST_VALUES = 5000
};

/* Parameters of a block, in forward order; NARROW has 1, 3 or 2 rows. */
enum {
    LN1_W,
    LN1_B,
    QKV_W,
    QKV_B,
    PROJ_W,
    PROJ_B,
    LN2_W,
    LN2_B,
    UP_W,
    UP_B,
    DOWN_W,
    DOWN_B,
    NARROW_W,
    NARROW_B,
    WIDE_W,
    BLOCK_PARAMS
};

/* Unit 0: WTE, WPE; units 1 to 3: a block each, UNUSED in the first, where buffers that take turns
 * hold another unit's gradients, and TINY in the second; unit 4: the rest. */
enum {
    WTE,
    WPE,
    UNUSED,
    BLOCK_0,
    BLOCK_1 = BLOCK_0 + BLOCK_PARAMS,
    TINY = BLOCK_1 + BLOCK_PARAMS,
    BLOCK_2,
    LNF_W = BLOCK_2 + BLOCK_PARAMS,
    LNF_B,
    HEAD,
    MODEL_PARAMS,
    MODEL_UNITS = MODEL_BLOCKS + 2
};

enum { MODEL_GPT = 0, MODEL_MATMUL = 1 };

typedef struct strategy_case {
    char group[48];   /* cases of one group must end with the same bits */
    double tolerance; /* against one rank on the joined batch; 0: not compared */
    uint32_t model, kind, accumulation, micro, node_size;
    uint32_t tape_flags, recompute_every, param_dtype, reduce_dtype, optimizer;
    bool keep_all, no_overlap, hierarchical;
    bool ignores; /* targets: of some eight samples in a row none counts, of others a part or all */
    bool uneven;  /* ranks and micro-batches have different numbers of samples */
    int batch, steps; /* of all ranks and micro-batches together; 0 = the most */
} strategy_case;

typedef struct strategy_outcome {
    double losses[RANKS_MOST][MODEL_STEPS]; /* of this rank, mean over its micro-batches' samples */
    double samples[RANKS_MOST][MODEL_STEPS];
    double eval_loss[RANKS_MOST]; /* without gradients, between steps 1 and 2 */
    float norms[RANKS_MOST][MODEL_STEPS];
    uint64_t hash[RANKS_MOST], read_hash[RANKS_MOST]; /* by dtrain_strategy_verify; of values */
    uint64_t sent[RANKS_MOST], calls[RANKS_MOST];     /* in step 1, the norm's left out */
    int64_t shard_elements[RANKS_MOST];
    bool cuts_tensors[RANKS_MOST]; /* a shard is not a whole tensor */
    dtrain_strategy_info info[RANKS_MOST];
    int64_t value_count;
    float values[MODEL_MOST_VALUES]; /* as rank 0 read them in the end */
} strategy_outcome;

/* A rank's side of it. */
typedef struct strategy_job {
    const strategy_case *c;
    strategy_outcome *out;
    int rank, ranks, param_count;
    int64_t rows; /* samples of a micro-batch */
    dtrain_param params[MODEL_PARAMS];
    char names[MODEL_PARAMS][96];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_tape *tape;
} strategy_job;

/* The sum of the counters of a strategy's communicators. */
static inline dtrain_comm_info strategy_sent(const dtrain_strategy *strategy)
{
    dtrain_strategy_info info;
    dtrain_strategy_query(strategy, &info);
    return info.traffic;
}

#define MODEL_CLIP 0.25f
#define MODEL_LR 0.02f

static inline const char *strategy_kind_name(uint32_t kind)
{
    static const char *const names[] = {"default",    "ddp",   "zero1",        "shard_grad_op",
                                        "full_shard", "zero3", "hybrid_shard", "auto"};
    return kind < 8 ? names[kind] : "?";
}

typedef struct strategy_name {
    char text[200];
} strategy_name;

static inline strategy_name strategy_case_name(const strategy_case *c, int ranks)
{
    strategy_name name;
    snprintf(name.text, sizeof name.text,
             "%s, %d ranks (node size %u), %u micro-batches (accumulation %u), tape %u, "
             "params %u, reduce %u%s%s%s%s",
             strategy_kind_name(c->kind), ranks, c->node_size, c->micro, c->accumulation,
             c->tape_flags, c->param_dtype, c->reduce_dtype,
             c->recompute_every ? ", checkpoints" : "", c->keep_all ? ", kept" : "",
             c->no_overlap ? ", no overlap" : "", c->hierarchical ? ", hierarchical" : "");
    return name;
}

/* ---- models ---- */

static inline dtrain_param *model_param(strategy_job *job, int at, uint32_t unit, const char *name,
                                        int64_t rows, int64_t columns)
{
    dtrain_param *p = &job->params[at];
    snprintf(job->names[at], sizeof job->names[at],
             "base_model.model.transformer.h.%u.block_sparse_moe.%s.weight", unit, name);
    memset(p, 0, sizeof *p);
    p->name = job->names[at];
    p->unit = unit;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->init = DTRAIN_INIT_NORMAL;
    p->init_scale = columns ? 0.3f : 0.1f;
    return p;
}

static inline void model_norm(strategy_job *job, int at, uint32_t unit, const char *name)
{
    char text[16];
    dtrain_param *weight;
    snprintf(text, sizeof text, "%s.w", name);
    weight = model_param(job, at, unit, text, MODEL_WIDTH, 0);
    weight->init = DTRAIN_INIT_CONSTANT;
    weight->init_scale = 1;
    snprintf(text, sizeof text, "%s.b", name);
    model_param(job, at + 1, unit, text, MODEL_WIDTH, 0);
}

static inline void model_block(strategy_job *job, int at, uint32_t unit, int64_t narrow)
{
    const int64_t n = MODEL_WIDTH;
    model_norm(job, at + LN1_W, unit, "ln1");
    model_param(job, at + QKV_W, unit, "qkv.w", 3 * n, n);
    model_param(job, at + QKV_B, unit, "qkv.b", 3 * n, 0);
    model_param(job, at + PROJ_W, unit, "proj.w", n, n);
    model_param(job, at + PROJ_B, unit, "proj.b", n, 0);
    model_norm(job, at + LN2_W, unit, "ln2");
    model_param(job, at + UP_W, unit, "up.w", MODEL_INNER, n);
    model_param(job, at + UP_B, unit, "up.b", MODEL_INNER, 0);
    model_param(job, at + DOWN_W, unit, "down.w", n, MODEL_INNER);
    model_param(job, at + DOWN_B, unit, "down.b", n, 0);
    model_param(job, at + NARROW_W, unit, "narrow.w", narrow, n);
    model_param(job, at + NARROW_B, unit, "narrow.b", narrow, 0);
    model_param(job, at + WIDE_W, unit, "wide.w", n, narrow);
}

static inline void gpt_create(strategy_job *job)
{
    const uint32_t last = MODEL_UNITS - 1;
    model_param(job, WTE, 0, "wte", MODEL_VOCAB, MODEL_WIDTH);
    model_param(job, WPE, 0, "wpe", MODEL_SEQ, MODEL_WIDTH);
    model_param(job, UNUSED, 1, "unused", 5, 7);
    model_block(job, BLOCK_0, 1, 1);
    model_block(job, BLOCK_1, 2, 3);
    model_param(job, TINY, 2, "tiny", 1, 0)->flags = DTRAIN_PARAM_FROZEN;
    model_block(job, BLOCK_2, 3, 2);
    model_norm(job, LNF_W, last, "lnf");
    model_param(job, HEAD, last, "head", 0, 0)->alias_of = &job->params[WTE];
    job->params[BLOCK_1 + LN2_W].flags = DTRAIN_PARAM_FROZEN;
    job->params[BLOCK_2 + PROJ_W].flags = DTRAIN_PARAM_FROZEN;
    job->params[BLOCK_0 + UP_W].flags = DTRAIN_PARAM_NO_DECAY;
    job->param_count = MODEL_PARAMS;
}

static inline void matmul_create(strategy_job *job)
{
    model_param(job, 0, 0, "a", MODEL_INNER, MODEL_WIDTH);
    model_param(job, 1, 1, "b", MODEL_INNER, MODEL_INNER);
    model_param(job, 2, 2, "c", MODEL_VOCAB, MODEL_INNER);
    job->param_count = 3;
}

static inline dtrain_tensor *gpt_block(dtrain_tape *t, dtrain_param *p, dtrain_tensor *x)
{
    dtrain_tensor *h = dtrain_layernorm(t, x, NULL, &p[LN1_W], &p[LN1_B], 1e-5f);
    h = dtrain_linear(t, h, &p[QKV_W], &p[QKV_B], DTRAIN_ACTIVATION_NONE);
    h = causal_attention(t, h, MODEL_SEQ, MODEL_HEADS);
    x = dtrain_add(t, x, dtrain_linear(t, h, &p[PROJ_W], &p[PROJ_B], DTRAIN_ACTIVATION_NONE));
    h = dtrain_layernorm(t, x, NULL, &p[LN2_W], &p[LN2_B], 1e-5f);
    h = dtrain_linear(t, h, &p[UP_W], &p[UP_B], DTRAIN_ACTIVATION_GELU);
    x = dtrain_add(t, x, dtrain_linear(t, h, &p[DOWN_W], &p[DOWN_B], DTRAIN_ACTIVATION_NONE));
    h = dtrain_linear(t, x, &p[NARROW_W], &p[NARROW_B], DTRAIN_ACTIVATION_GELU);
    return dtrain_add(t, x, dtrain_linear(t, h, &p[WIDE_W], NULL, DTRAIN_ACTIVATION_NONE));
}

static inline dtrain_tensor *gpt_logits(strategy_job *job, dtrain_tensor *tokens)
{
    dtrain_tape *t = job->tape;
    dtrain_param *p = job->params;
    dtrain_tensor *x;
    dtrain_tape_unit(t, 0);
    x = dtrain_embedding(t, tokens, &p[WTE], &p[WPE]);
    dtrain_tape_unit(t, 1);
    x = gpt_block(t, &p[BLOCK_0], x);
    dtrain_tape_unit(t, 2);
    x = gpt_block(t, &p[BLOCK_1], x);
    dtrain_tape_unit(t, 3);
    x = gpt_block(t, &p[BLOCK_2], x);
    dtrain_tape_unit(t, 4);
    x = dtrain_layernorm(t, x, NULL, &p[LNF_W], &p[LNF_B], 1e-5f);
    return dtrain_linear(t, x, &p[HEAD], NULL, DTRAIN_ACTIVATION_NONE);
}

static inline dtrain_tensor *matmul_logits(strategy_job *job, dtrain_tensor *x)
{
    int i;
    for (i = 0; i < 3; i++) {
        dtrain_tape_unit(job->tape, (uint32_t)i);
        x = dtrain_linear(job->tape, x, &job->params[i], NULL,
                          i < 2 ? DTRAIN_ACTIVATION_GELU : DTRAIN_ACTIVATION_NONE);
    }
    return x;
}

/* The loss of samples [first, first + rows). */
static inline dtrain_tensor *model_loss(strategy_job *job, int64_t first)
{
    static const int64_t per = MODEL_SEQ;
    int32_t tokens[MODEL_MOST_BATCH * MODEL_SEQ], targets[MODEL_MOST_BATCH * MODEL_SEQ];
    float features[MODEL_MOST_BATCH * MODEL_SEQ * MODEL_WIDTH];
    const int64_t count = job->rows * per;
    int64_t i, token_shape[2], feature_shape[2];
    dtrain_tensor *logits;
    token_shape[0] = job->rows, token_shape[1] = per;
    feature_shape[0] = count, feature_shape[1] = MODEL_WIDTH;
    for (i = 0; i < count; i++) {
        const uint64_t at = ranks_mix((uint64_t)(first * per + i) + 17);
        tokens[i] = (int32_t)(at % MODEL_VOCAB);
        targets[i] = (int32_t)(at / MODEL_VOCAB % 7); /* few of them: there is something to learn */
        if (job->c->ignores && at / 999 % 3 >= ranks_mix((uint64_t)(first + i / per) / 8) % 4)
            targets[i] = -1;
    }
    if (job->c->model == MODEL_GPT)
        logits = gpt_logits(
            job, dtrain_tape_input(job->tape, DTRAIN_DTYPE_I32, 2, token_shape, tokens, false));
    else {
        for (i = 0; i < count * MODEL_WIDTH; i++)
            features[i] = dtrain_random_normal(5, 0, (uint64_t)(first * per * MODEL_WIDTH + i));
        logits = matmul_logits(
            job, dtrain_tape_input(job->tape, DTRAIN_DTYPE_F32, 2, feature_shape, features, false));
    }
    return dtrain_cross_entropy(
        job->tape, logits,
        dtrain_tape_input(job->tape, DTRAIN_DTYPE_I32, 1, &count, targets, false), 0, 0);
}

/* ---- training ---- */

static inline dtrain_strategy_desc strategy_case_desc(const strategy_case *c)
{
    dtrain_strategy_desc desc = {0};
    desc.kind = c->kind;
    desc.accumulation = c->accumulation;
    desc.node_size = c->node_size;
    if (c->param_dtype) desc.param_dtype = c->param_dtype;
    if (c->reduce_dtype) desc.reduce_dtype = c->reduce_dtype;
    desc.no_overlap = c->no_overlap;
    desc.hierarchical = c->hierarchical;
    desc.keep_after_forward = c->keep_all;
    desc.bucket_bytes = 3000; /* several buckets for a model this small */
    desc.init_seed = 3;
    return desc;
}

static inline dtrain_result strategy_job_create(dtrain_world *world, strategy_job *job)
{
    const dtrain_strategy_desc desc = strategy_case_desc(job->c);
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW),
                          sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    dtrain_optimizer_desc lion = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_LION),
                          muon = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_MUON);
    const dtrain_optimizer_desc *how = &adamw;
    dtrain_result result;
    /* Some gradients are zero but for rounding (the bias of keys): AdamW would make steps of them. */
    adamw.epsilon = 1e-3f;
    adamw.weight_decay = 0.1f;
    sgd.momentum = 0.9f;
    lion.weight_decay = 0.1f;
    lion.lr_scale = 0.1f;
    if (job->c->model == MODEL_GPT) gpt_create(job);
    else matmul_create(job);
    if (job->c->optimizer == DTRAIN_OPTIMIZER_SGD) how = &sgd;
    if (job->c->optimizer == DTRAIN_OPTIMIZER_LION) how = &lion;
    if (job->c->optimizer == DTRAIN_OPTIMIZER_MUON) { /* of the blocks' matrices */
        adamw.groups = &muon;
        adamw.group_count = 1;
        for (int i = 0; i < job->param_count; i++)
            if (job->params[i].unit > 0 && job->params[i].shape[1]) job->params[i].group = 1;
    }
    result =
        dtrain_strategy_create(world, job->params, (size_t)job->param_count, &desc, &job->strategy);
    if (result != DTRAIN_OK) return result;
    result = dtrain_optimizer_create(world, job->strategy, how, &job->optimizer);
    if (result != DTRAIN_OK) return result;
    result = dtrain_tape_create(world, job->strategy, NULL, &job->tape);
    if (result == DTRAIN_OK && job->c->recompute_every)
        result = dtrain_tape_recompute(job->tape, job->c->recompute_every, 0);
    return result;
}

static inline void strategy_job_destroy(strategy_job *job)
{
    dtrain_tape_destroy(job->tape);
    dtrain_optimizer_destroy(job->optimizer);
    dtrain_strategy_destroy(job->strategy);
}

/* One micro-batch, forward and, unless NO_GRAD is set, backward; *loss += its loss, times its
 * samples, which are added to *samples. */
static inline dtrain_result strategy_pass(strategy_job *job, int64_t sample, uint32_t flags,
                                          float scale, double *loss, double *samples)
{
    dtrain_tensor *tensor;
    float value = 0;
    dtrain_result result = dtrain_tape_begin(job->tape, job->c->tape_flags | flags, 1);
    if (result != DTRAIN_OK) return result;
    tensor = model_loss(job, sample);
    result = dtrain_tensor_read(job->tape, tensor, &value, NULL);
    *loss += (double)value * tensor->samples;
    *samples += tensor->samples;
    if (result != DTRAIN_OK || (flags & DTRAIN_TAPE_NO_GRAD)) return result;
    result = dtrain_tape_backward(job->tape, tensor, scale);
    return result == DTRAIN_OK ? dtrain_strategy_finish(job->strategy) : result;
}

static inline dtrain_result strategy_step(strategy_job *job, int step)
{
    const strategy_case *c = job->c;
    const int64_t rows = job->rows;
    double loss = 0, samples = 0;
    float scale;
    uint32_t micro;
    dtrain_result result = DTRAIN_OK;
    const dtrain_comm_info begin = strategy_sent(job->strategy);
    for (micro = 0; micro < c->micro && result == DTRAIN_OK; micro++) {
        const int64_t place = ((int64_t)step * c->micro + micro) * job->ranks + job->rank;
        const int64_t more = c->uneven && job->ranks > 1 ? (micro & 1 ? -2 : 2) : 0;
        result = dtrain_strategy_accumulate(job->strategy, micro + 1 < c->micro);
        job->rows = rows + (job->rank == 0 ? more : job->rank == 1 ? -more : 0);
        if (result == DTRAIN_OK)
            result = strategy_pass(job, place * rows + (job->rank == 1 ? more : 0), 0,
                                   1 / (float)c->micro, &loss, &samples);
        job->rows = rows;
    }
    job->out->losses[job->rank][step] = samples > 0 ? loss / samples : 0;
    job->out->samples[job->rank][step] = samples;
    const dtrain_comm_info reduced = strategy_sent(job->strategy);
    if (result == DTRAIN_OK)
        result = dtrain_grad_norm(job->strategy, NULL,
                                  c->optimizer == DTRAIN_OPTIMIZER_SGD ? 0 : MODEL_CLIP,
                                  &job->out->norms[job->rank][step], &scale);
    const dtrain_comm_info clipped = strategy_sent(job->strategy);
    if (result == DTRAIN_OK) result = dtrain_optimizer_step(job->optimizer, MODEL_LR, scale);
    const dtrain_comm_info end = strategy_sent(job->strategy);
    if (step != 1) return result; /* the first agrees on settings, later ones begin with values */
    job->out->sent[job->rank] =
        end.wire_bytes - begin.wire_bytes - (clipped.wire_bytes - reduced.wire_bytes);
    job->out->calls[job->rank] = end.operation_count - begin.operation_count -
                                 (clipped.operation_count - reduced.operation_count);
    return result;
}

/* FNV-1a, 64 bits. */
static uint64_t strategy_hash(const void *data, size_t bytes)
{
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    return hash;
}

/* Every rank reads every parameter, as it must; rank 0 keeps them, the others a hash. */
static inline dtrain_result strategy_job_read(strategy_job *job)
{
    float values[MODEL_MOST_VALUES];
    int64_t at = 0;
    int i;
    for (i = 0; i < job->param_count; i++) {
        const dtrain_param *p = &job->params[i];
        const dtrain_result result = dtrain_strategy_read(job->strategy, (size_t)i, values + at);
        if (result != DTRAIN_OK) return result;
        at += p->count;
    }
    job->out->read_hash[job->rank] = strategy_hash(values, (size_t)at * sizeof *values);
    if (job->rank == 0) {
        job->out->value_count = at;
        memcpy(job->out->values, values, (size_t)at * sizeof *values);
    }
    return dtrain_strategy_verify(job->strategy, &job->out->hash[job->rank]);
}

static inline dtrain_result strategy_job_shards(strategy_job *job)
{
    const dtrain_shard *shards;
    size_t count, i;
    const dtrain_result result = dtrain_strategy_shards(job->strategy, &shards, &count);
    for (i = 0; i < count; i++) {
        job->out->shard_elements[job->rank] += shards[i].count;
        if (shards[i].count != shards[i].param->count) job->out->cuts_tensors[job->rank] = true;
    }
    return result;
}

static inline dtrain_result strategy_job_run(strategy_job *job)
{
    const int steps = job->c->steps ? job->c->steps : MODEL_STEPS;
    int step;
    for (step = 0; step < steps; step++) {
        dtrain_result result = DTRAIN_OK;
        if (step == 2) {
            double samples = 0;
            result = strategy_pass(job, 1000000, DTRAIN_TAPE_NO_GRAD, 0,
                                   &job->out->eval_loss[job->rank], &samples);
            job->out->eval_loss[job->rank] /= samples;
        }
        if (step == 3) result = strategy_job_read(job); /* as a checkpoint would */
        if (result == DTRAIN_OK) result = strategy_step(job, step);
        if (result != DTRAIN_OK) return result;
    }
    dtrain_strategy_query(job->strategy, &job->out->info[job->rank]);
    return strategy_job_read(job);
}

/* Collective; *out is in shared memory, and every rank fills its part. */
static inline dtrain_result strategy_train(dtrain_world *world, const strategy_case *c,
                                           strategy_outcome *out)
{
    strategy_job job;
    dtrain_result result;
    memset(&job, 0, sizeof job);
    job.c = c;
    job.out = out;
    job.rank = dtrain_world_rank(world);
    job.ranks = dtrain_world_size(world);
    job.rows = (c->batch ? c->batch : MODEL_MOST_BATCH) / (job.ranks * (int)c->micro);
    result = strategy_job_create(world, &job);
    if (result == DTRAIN_OK) result = strategy_job_shards(&job);
    if (result == DTRAIN_OK) result = strategy_job_run(&job);
    strategy_job_destroy(&job);
    return result;
}

/* ---- judging ---- */

static inline double strategy_mean_loss(const strategy_outcome *out, int ranks, int step)
{
    double sum = 0, samples = 0;
    int r;
    for (r = 0; r < ranks; r++) {
        sum += out->losses[r][step] * out->samples[r][step];
        samples += out->samples[r][step];
    }
    return samples > 0 ? sum / samples : 0;
}

/* Every trainable element belongs to one rank's shards, in every copy of the model. */
static inline void strategy_check_shards(const strategy_case *c, const strategy_outcome *out,
                                         int ranks, const char *what)
{
    const dtrain_strategy_info *info = &out->info[0];
    int64_t sum = 0, expected = (int64_t)info->trainable_elements * info->replicas;
    int r;
    for (r = 0; r < ranks; r++) {
        sum += out->shard_elements[r];
        CHECK_MSG(!out->cuts_tensors[r] ||
                      (c->kind != DTRAIN_STRATEGY_DDP && c->kind != DTRAIN_STRATEGY_ZERO3),
                  "%s: rank %d has a part of a tensor", what, r);
    }
    CHECK_MSG(info->shard_ranks * info->replicas == ranks, "%s: %d times %d ranks", what,
              info->shard_ranks, info->replicas);
    CHECK_MSG(sum == expected, "%s: shards of %lld elements, there are %lld", what, (long long)sum,
              (long long)expected);
}

/* What every outcome has to hold by itself. */
static inline void strategy_check_ranks(const strategy_outcome *out, int ranks, const char *what)
{
    int r;
    CHECK_MSG(out->value_count > 0 && out->hash[0], "%s: nothing was read", what);
    for (r = 1; r < ranks; r++) {
        CHECK_MSG(out->hash[r] == out->hash[0] && out->read_hash[r] == out->read_hash[0],
                  "%s: rank %d ends with other parameters than rank 0", what, r);
        CHECK_MSG(memcmp(out->norms[r], out->norms[0], sizeof out->norms[0]) == 0,
                  "%s: rank %d has another norm than rank 0", what, r);
    }
    for (r = 0; r < ranks; r++)
        CHECK_MSG(out->norms[r][0] > MODEL_CLIP, "%s: norm %g leaves nothing to clip", what,
                  (double)out->norms[r][0]);
}

static inline void strategy_check_bits(const strategy_outcome *a, const strategy_outcome *b,
                                       const char *what)
{
    int64_t i;
    CHECK_MSG(memcmp(a->losses, b->losses, sizeof a->losses) == 0,
              "%s: losses differ: %.9g and %.9g in step 0, %.9g and %.9g in step 3", what,
              a->losses[0][0], b->losses[0][0], a->losses[0][3], b->losses[0][3]);
    CHECK_MSG(memcmp(a->eval_loss, b->eval_loss, sizeof a->eval_loss) == 0,
              "%s: evaluations differ: %.9g and %.9g", what, a->eval_loss[0], b->eval_loss[0]);
    CHECK_MSG(memcmp(a->norms, b->norms, sizeof a->norms) == 0,
              "%s: norms differ: %.9g and %.9g in step 0", what, (double)a->norms[0][0],
              (double)b->norms[0][0]);
    CHECK_MSG(a->hash[0] == b->hash[0], "%s: hashes differ", what);
    CHECK_MSG(a->value_count == b->value_count, "%s: %lld and %lld values", what,
              (long long)a->value_count, (long long)b->value_count);
    for (i = 0; i < a->value_count; i++)
        if (memcmp(&a->values[i], &b->values[i], sizeof a->values[i]) != 0) break;
    CHECK_MSG(i == a->value_count, "%s: value %lld is %.9g and %.9g", what, (long long)i,
              (double)a->values[i], (double)b->values[i]);
}

static inline void strategy_check_close(const strategy_outcome *a, int a_ranks,
                                        const strategy_outcome *b, int b_ranks, double tolerance,
                                        const char *what)
{
    double worst = 0;
    int64_t i;
    int step;
    for (step = 0; step < MODEL_STEPS; step++) {
        const double one = strategy_mean_loss(a, a_ranks, step);
        const double other = strategy_mean_loss(b, b_ranks, step);
        /* a wrong divisor: clipping and AdamW would hide it */
        CHECK_MSG(test_close(a->norms[0][step] / (b->norms[0][step] + 1e-30f),
                             b->norms[0][step] > 0, tolerance * 10),
                  "%s: norm of step %d is %.9g and %.9g", what, step, (double)a->norms[0][step],
                  (double)b->norms[0][step]);
        CHECK_MSG(fabs(one - other) <= tolerance * 10, "%s: loss of step %d is %.9g and %.9g", what,
                  step, one, other);
    }
    for (i = 0; i < b->value_count; i++) {
        const double difference = fabs((double)a->values[i] - (double)b->values[i]);
        if (!(difference <= worst)) worst = difference;
    }
    CHECK_MSG(a->value_count == b->value_count && worst <= tolerance,
              "%s: parameters are up to %g apart, at most %g expected", what, worst, tolerance);
}

#endif
