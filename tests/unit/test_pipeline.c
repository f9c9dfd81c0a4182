/* test_pipeline.c: models cut into stages, trained by any number of ranks, beside one data axis that has whole
 * models.
 *
 * Random models (skip connections, dropout, autocast, activation checkpointing, tied weights, weights that some
 * micro-batches alone use, parameters that are frozen and thawed between steps), layouts (tensor x pipeline x data up
 * to 8 ranks), schedules, chunks and data: ranks of the data axis differ in how many targets count and in when their
 * data ends. A pipeline has the losses and the parameters of the run without it to the bit; with a weight that is tied
 * across stages to rounding. */
#include "test.h"
#include "dtrain.h"
#include "tools/balance.h"
#ifdef DTRAIN_CUDA_EMULATION
#define DTRAIN_NCCL_LINKED
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
#endif
#include "ranks.h"
#ifdef DTRAIN_CUDA_EMULATION
#include "nccl/mock/nccl_mock.c"
#include "nccl/mock/emulated_device.h"
#endif

enum {
    RANKS = 8,
    UNITS = 9,
    PARAMS = 6 * UNITS + 3,
    ROWS = 6,    /* no power of two: sums of weights are rounded */
    LONG = 2200, /* rows of WIDTH numbers that a channel has no room for */
    WIDTH = 16,
    VOCAB = 24,
    STEPS = 4,
    MOST = 32768
};

/* What a strategy has beside its kind. */
enum { PLAIN, OFFLOADS, TOPK, AUTOMATIC };

/* A model and its data, the same on every rank. */
typedef struct spec {
    uint64_t seed, state;
    int units;
    uint32_t layer[UNITS];
    int skip_from[UNITS]; /* -1: none */
    bool tied;
    float dropout, clip;
    uint32_t flags, every, micro_batches, optimizer, kind;
    int ends[RANKS]; /* by data rank: micro-batches that there are */
    int beside;
    int tensor, pipeline, data;
    uint32_t schedule, chunks;
    uint32_t of_stage[UNITS]; /* units of stages; [0] = 0: evenly, or by cost for odd seeds */
    int rows;                 /* 0: ROWS; LONG: and ranks are late by turns */
    uint32_t frozen[STEPS];   /* bits of units that are frozen in a step, the last one never */
    bool frozen_head;         /* the tied head gives no gradient of its own */
    bool apart;               /* a trainer of its own evaluates */
    bool sequence;            /* a tensor axis divides rows between its layers */
    int choice;               /* the unit of which odd micro-batches use another weight; 0: none */
} spec;

/* What a run leaves. */
typedef struct outcome {
    double loss[RANKS][STEPS + 1], norm[RANKS][STEPS];
    int64_t steps[RANKS];
    float values[RANKS][MOST];
    uint64_t skipped[RANKS];
    bool ended[RANKS];
    uint64_t bytes[RANKS];           /* of the last step, over the pipeline axis */
    dtrain_comm_info sent[RANKS][3]; /* of the whole run, over tensor, data and pipeline axis */
} outcome;

typedef struct run {
    spec s;
    uint32_t node_ranks; /* of an emulated cluster; 0: there is none */
    outcome out;
} run;

/* A rank. */
typedef struct local {
    const spec *s;
    int rank, data_rank, next;
    bool evaluates;
    dtrain_param params[PARAMS];
    char names[PARAMS][24];
    int count;
    int32_t tokens[LONG], targets[LONG];
} local;

static int draw(spec *s, int below) { return (int)ranks_random(&s->state, (uint64_t)below); }

static spec spec_of(uint64_t seed)
{
    spec s;
    memset(&s, 0, sizeof s);
    s.seed = s.state = seed;
    s.units = 2 + draw(&s, UNITS - 1);
    for (int u = 1; u < s.units; u++) {
        s.layer[u] = (uint32_t)draw(&s, 3);
        s.skip_from[u] = draw(&s, 3) ? -1 : draw(&s, u);
    }
    s.tied = draw(&s, 4) == 0;
    s.dropout = draw(&s, 2) ? 0.2f : 0;
    s.clip = draw(&s, 2) ? 0.5f : 0;
    static const uint32_t flags[4] = {0, 0, DTRAIN_TAPE_BF16, DTRAIN_TAPE_F16};
    s.flags = flags[draw(&s, 4)];
    s.every = (uint32_t)draw(&s, 3);
    s.micro_batches = (uint32_t)(1 + draw(&s, 8));
    s.optimizer = draw(&s, 2) ? DTRAIN_OPTIMIZER_ADAMW : DTRAIN_OPTIMIZER_SGD;
    s.kind = draw(&s, 2) ? DTRAIN_STRATEGY_DDP : DTRAIN_STRATEGY_ZERO1;
    s.tensor = draw(&s, 4) ? 1 : 2;
    s.schedule = (uint32_t)draw(&s, 4);
    const int chunks = s.schedule == DTRAIN_PIPELINE_INTERLEAVED ? 1 + draw(&s, 3) : 1;
    s.chunks = (uint32_t)chunks;
    int most = s.units / chunks;
    if (most < 2) s.schedule = s.chunks = 0, most = s.units;
    const int room = RANKS / s.tensor;
    s.pipeline = 2 + draw(&s, (most < room ? most : room) - 1);
    s.data = 1 + draw(&s, room / s.pipeline);
    const int stages = s.pipeline * (s.chunks ? (int)s.chunks : 1);
    if (draw(&s, 2)) { /* one unit each, and the others to any */
        for (int i = 0; i < stages; i++) s.of_stage[i] = 1;
        for (int i = stages; i < s.units; i++) s.of_stage[draw(&s, stages)]++;
    }
    const int all = STEPS * (int)s.micro_batches;
    for (int r = 0; r < RANKS; r++) s.ends[r] = draw(&s, 3) ? all : draw(&s, all + 1);
    const int beside = draw(&s, 12);
    const bool whole = s.kind == DTRAIN_STRATEGY_DDP;
    s.frozen_head = s.tied && draw(&s, 2);
    s.apart = draw(&s, 3) == 0;
    if (s.chunks == 1 && draw(&s, 3) == 0) /* with more, an earlier micro-batch may be due */
        s.choice = 1 + draw(&s, s.units - 1);
    s.sequence = s.tensor == 2 && draw(&s, 2);
    for (int step = 0, freezes = draw(&s, 2) == 0; step < STEPS; step++)
        s.frozen[step] = freezes ? (uint32_t)draw(&s, 1 << (s.units - 1)) : 0;
#ifndef DTRAIN_CUDA_EMULATION
    if (beside == OFFLOADS) return s; /* a CPU has nothing to be relieved of */
#endif
    if (beside == OFFLOADS || beside == AUTOMATIC) s.beside = beside;
    if (beside == TOPK && whole && !s.tied && s.flags != DTRAIN_TAPE_F16) s.beside = beside;
    return s;
}

static dtrain_param *declare(local *l, const char *name, uint32_t unit, int64_t rows,
                             int64_t columns)
{
    dtrain_param *p = &l->params[l->count];
    snprintf(l->names[l->count], sizeof l->names[0], "%s%d", name, l->count);
    p->name = l->names[l->count++];
    p->shape[0] = rows, p->shape[1] = columns;
    p->unit = unit;
    p->init = columns ? DTRAIN_INIT_NORMAL : DTRAIN_INIT_CONSTANT;
    p->init_scale = columns ? 0.25f : 1;
    return p;
}

static void register_model(local *l)
{
    const spec *s = l->s;
    declare(l, "wte", 0, VOCAB, WIDTH)->cut.axis = DTRAIN_CUT_ROWS;
    for (int u = 1; u < s->units; u++) {
        const uint32_t unit = (uint32_t)u;
        declare(l, "norm", unit, WIDTH, 0), declare(l, "shift", unit, WIDTH, 0);
        declare(l, "up", unit, 2 * WIDTH, WIDTH)->cut.axis = DTRAIN_CUT_ROWS;
        declare(l, "down", unit, WIDTH, 2 * WIDTH)->cut.axis = DTRAIN_CUT_COLUMNS;
        declare(l, "bias", unit, 2 * WIDTH, 0)->cut.axis = DTRAIN_CUT_ROWS;
        declare(l, "bias", unit, WIDTH, 0);
    }
    dtrain_param *head = declare(l, "head", (uint32_t)s->units - 1, VOCAB, WIDTH);
    head->cut.axis = DTRAIN_CUT_ROWS;
    if (s->tied) head->alias_of = &l->params[0];
    if (s->frozen_head) head->flags = DTRAIN_PARAM_FROZEN;
    if (s->choice)
        declare(l, "other", (uint32_t)s->choice, 2 * WIDTH, WIDTH)->cut.axis = DTRAIN_CUT_ROWS;
}

/* Freeze the units of a step, and thaw all others. */
static void freeze(local *l, int step)
{
    for (int i = 0; i < l->count; i++) {
        const bool head = i == 1 + 6 * (l->s->units - 1);
        if (head) continue;
        l->params[i].flags = l->s->frozen[step] >> l->params[i].unit & 1 ? DTRAIN_PARAM_FROZEN : 0;
    }
}

static dtrain_result next_batch(void *user)
{
    local *l = (local *)user;
    const int micro = l->next;
    if (!l->evaluates && micro >= l->s->ends[l->data_rank])
        return dtrain_fail(DTRAIN_ERROR_END, "no more");
    l->next++;
    for (int i = 0; i < (l->s->rows ? l->s->rows : ROWS); i++) {
        const int at = micro * 31 + l->data_rank * 17 + i;
        l->tokens[i] = at * 7 % VOCAB;
        l->targets[i] = (at + l->data_rank) % 4 == 1 ? -1 : (at * 11 + 5) % VOCAB;
        if (l->s->seed % 3 == 0 && (micro + l->data_rank) % 5 == 2) l->targets[i] = -1;
    }
    return DTRAIN_OK;
}

static dtrain_tensor *loss_of(dtrain_tape *t, void *user)
{
    local *l = (local *)user;
    const spec *s = l->s;
    const int64_t rows = s->rows ? s->rows : ROWS;
    dtrain_tensor *made[UNITS],
        *x = dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, l->tokens, false);
    if (s->rows == LONG)
        usleep(1000 * (unsigned)(s->seed % 2 ? (l->rank + l->next) % 3 : l->rank ? 0 : 4));
    dtrain_tape_unit(t, 0);
    made[0] = x = dtrain_dropout(t, dtrain_embedding(t, x, &l->params[0], NULL), s->dropout);
    for (int u = 1; u < s->units; u++) {
        dtrain_param *p = &l->params[1 + 6 * (u - 1)];
        dtrain_tape_unit(t, (uint32_t)u);
        if (s->skip_from[u] >= 0) x = dtrain_add(t, x, made[s->skip_from[u]]);
        dtrain_param *up = s->choice == u && l->next % 2 ? &l->params[l->count - 1] : &p[2];
        dtrain_tensor *h = dtrain_layernorm(t, x, NULL, &p[0], &p[1], 1e-5f);
        h = dtrain_linear(t, h, up, &p[4],
                          s->layer[u] ? DTRAIN_ACTIVATION_GELU : DTRAIN_ACTIVATION_RELU);
        h = dtrain_dropout(t, dtrain_linear(t, h, &p[3], &p[5], DTRAIN_ACTIVATION_NONE),
                           s->dropout);
        made[u] = x = s->layer[u] == 2 ? h : dtrain_add(t, x, h);
    }
    x = dtrain_linear(t, x, &l->params[1 + 6 * (s->units - 1)], NULL, DTRAIN_ACTIVATION_NONE);
    return dtrain_cross_entropy(
        t, x, dtrain_tape_input(t, DTRAIN_DTYPE_I32, 1, &rows, l->targets, false), 0, 0);
}

/* A plan says what the first step has taken, where this rank's data has not ended. */
static void check_planned(dtrain_world *world, const run *r, const local *l,
                          const dtrain_trainer_desc *desc, dtrain_trainer *trainer)
{
    dtrain_memory memory;
    dtrain_tape_info info;
    if (l->next < (int)desc->micro_batches) return;
    if (l->s->choice && l->s->flags) return; /* a step rounds both weights, a plan runs one batch */
    CHECK_MSG(dtrain_trainer_plan(world, desc, NULL, &memory) == DTRAIN_OK, "%s",
              dtrain_last_error());
    dtrain_tape_query(dtrain_trainer_tape(trainer), &info);
    const uint64_t planned = memory.activations + memory.activation_grads;
    const uint64_t used = info.activation_bytes + info.gradient_bytes;
    CHECK_MSG(planned == used, "seed %llu: rank %d has %llu bytes of activations, planned %llu",
              (unsigned long long)r->s.seed, dtrain_world_rank(world), (unsigned long long)used,
              (unsigned long long)planned);
}

static uint64_t gradient_bytes(dtrain_trainer *trainer)
{
    dtrain_tape_info info;
    dtrain_tape_query(dtrain_trainer_tape(trainer), &info);
    return info.gradient_bytes;
}

/* Divide the units by what they cost, and let the other ranks compare: all must find the same. */
static dtrain_result balance(dtrain_world *world, const dtrain_trainer_desc *trainer, run *r,
                             local *l, dtrain_pipeline_desc *line, uint32_t of_stage[UNITS])
{
    const spec *s = &r->s;
    uint32_t units = 0;
    const bool chunked = s->schedule == DTRAIN_PIPELINE_INTERLEAVED;
    const int stages = s->pipeline * (int)(s->chunks ? s->chunks : chunked ? 2 : 1);
    if (s->pipeline == 1 || s->of_stage[0] || s->seed % 2 == 0) return DTRAIN_OK;
    dtrain_result result =
        balance_model(world, trainer, l->params, (size_t)l->count, line, s->pipeline, of_stage);
    for (int stage = 0; stage < stages; stage++) units += of_stage[stage];
    CHECK((int)units == s->units);
    for (int stage = 0; stage < stages && result == DTRAIN_OK; stage++) {
        int32_t range[2] = {(int32_t)of_stage[stage], -(int32_t)of_stage[stage]};
        result = dtrain_all_reduce(dtrain_world_comm(world), range, range, 2, DTRAIN_DTYPE_I32,
                                   DTRAIN_REDUCE_MAX, NULL);
        CHECK(range[0] == -range[1] && range[0] > 0);
    }
    line->units = of_stage;
    return result;
}

static dtrain_result train(dtrain_world *world, run *r, local *l, dtrain_mesh *mesh,
                           dtrain_strategy **strategy, dtrain_optimizer **optimizer,
                           dtrain_trainer **trainer, dtrain_trainer **evaluator)
{
    const spec *s = &r->s;
    const int rank = dtrain_world_rank(world);
    outcome *out = &r->out;
    dtrain_strategy_desc desc;
    dtrain_pipeline_desc line;
    memset(&desc, 0, sizeof desc);
    memset(&line, 0, sizeof line);
    line.kind = s->schedule, line.chunks = s->chunks,
    line.units = s->of_stage[0] && s->pipeline > 1 ? s->of_stage : NULL;
    desc.kind = s->kind, desc.mesh = mesh, desc.pipeline = &line, desc.init_seed = s->seed;
    desc.bucket_bytes = 4096;
    dtrain_compression_desc compression;
    memset(&compression, 0, sizeof compression);
    compression.kind = DTRAIN_COMPRESSION_TOPK;
    compression.topk_ratio = 0.2f, compression.dense_below = 100, compression.dense_steps = 1;
    if (s->beside == TOPK) desc.compression = &compression;
    if (s->beside == OFFLOADS) desc.offload = DTRAIN_OFFLOAD_OPTIMIZER;
    if (s->beside == AUTOMATIC) desc.kind = DTRAIN_STRATEGY_AUTO;
    dtrain_trainer_desc t;
    uint32_t of_stage[UNITS];
    memset(&t, 0, sizeof t);
    t.micro_batches = s->micro_batches, t.clip = s->clip, t.tape_flags = s->flags;
    t.recompute_every = s->every, t.seed = s->seed, t.schedule.lr = 0.01f;
    t.next_batch = next_batch, t.loss = loss_of, t.user = l;
    dtrain_result result = balance(world, &t, r, l, &line, of_stage);
    if (result == DTRAIN_OK)
        result = dtrain_strategy_create(world, l->params, (size_t)l->count, &desc, strategy);
    if (result != DTRAIN_OK) return result;
    dtrain_optimizer_desc how = dtrain_optimizer_defaults((dtrain_optimizer_kind)s->optimizer);
    result = dtrain_optimizer_create(world, *strategy, &how, optimizer);
    if (result != DTRAIN_OK) return result;
    t.strategy = *strategy, t.optimizer = *optimizer;
    result = dtrain_trainer_create(world, &t, trainer);
    dtrain_trainer_desc only = t;
    only.optimizer = NULL, only.micro_batches = 0;
    if (s->apart && result == DTRAIN_OK) result = dtrain_trainer_create(world, &only, evaluator);
    for (int step = 0; step < STEPS && result == DTRAIN_OK; step++) {
        dtrain_step_record record;
        const uint64_t before = gradient_bytes(*trainer);
        const bool whole = step && !s->frozen[0] && s->ends[l->data_rank] >= (int)s->micro_batches;
        freeze(l, step);
        result = dtrain_trainer_step(*trainer, &record);
        if (result != DTRAIN_OK) return result;
        /* zeros have memory of their own where a step without frozen parameters shares that of a gradient */
        CHECK_MSG(!whole || gradient_bytes(*trainer) <= (s->frozen[step] ? 2 * before : before),
                  "seed %llu: step %d of rank %d, frozen %x, takes more for gradients: %llu bytes, "
                  "before it %llu",
                  (unsigned long long)s->seed, step, rank, s->frozen[step],
                  (unsigned long long)gradient_bytes(*trainer), (unsigned long long)before);
        out->loss[rank][step] = record.loss, out->norm[rank][step] = record.grad_norm;
        out->ended[rank] = record.ended;
        out->bytes[rank] = (uint64_t)fmax(0, dtrain_record_value(&record, "pipeline_bytes"));
        CHECK(out->bytes[rank] <= (uint64_t)dtrain_record_value(&record, "comm_bytes"));
        out->skipped[rank] = record.skipped_steps;
        if (step == 0) check_planned(world, r, l, &t, *trainer);
        if (step == 1) { /* between two steps, on other data */
            const int next = l->next;
            l->evaluates = true, l->next = 1000;
            result = dtrain_trainer_evaluate(s->apart ? *evaluator : *trainer, next_batch, l, 3,
                                             &out->loss[rank][STEPS]);
            l->evaluates = false, l->next = next;
        }
    }
    if (result == DTRAIN_OK) result = dtrain_strategy_verify(*strategy, NULL);
    float *to = out->values[rank];
    for (int i = 0; i < l->count && result == DTRAIN_OK; i++) {
        int64_t count = l->params[i].shape[0];
        if (l->params[i].shape[1]) count *= l->params[i].shape[1];
        result = dtrain_strategy_read(*strategy, (size_t)i, to);
        to += count;
    }
    return result;
}

static int rank_main(dtrain_world *world, void *user)
{
    run *r = (run *)user;
    dtrain_mesh_desc desc;
    dtrain_mesh *mesh = NULL;
    dtrain_mesh_info at;
    dtrain_strategy *strategy = NULL;
    dtrain_optimizer *optimizer = NULL;
    dtrain_trainer *trainer = NULL, *evaluator = NULL;
    local l;
    memset(&l, 0, sizeof l);
    memset(&desc, 0, sizeof desc);
    desc.sequence_parallel = r->s.sequence && r->s.tensor == 2;
    desc.tensor = r->s.tensor, desc.pipeline = r->s.pipeline, desc.data = r->s.data;
    l.s = &r->s, l.rank = dtrain_world_rank(world);
    dtrain_result result = dtrain_mesh_create(world, &desc, &mesh);
    dtrain_mesh_query(mesh, &at);
    l.data_rank = at.data_rank;
    register_model(&l);
    if (result == DTRAIN_OK)
        result = train(world, r, &l, mesh, &strategy, &optimizer, &trainer, &evaluator);
    CHECK_MSG(result == DTRAIN_OK, "seed %llu, rank %d: %s", (unsigned long long)r->s.seed,
              dtrain_world_rank(world), dtrain_last_error());
    for (int i = 0; i < 3; i++) /* DTRAIN_AXIS_TENSOR, _DATA, _PIPELINE */
        dtrain_comm_query(dtrain_mesh_comm(mesh, 1u << i),
                          &r->out.sent[dtrain_world_rank(world)][i]);
    dtrain_trainer_destroy(evaluator);
    dtrain_trainer_destroy(trainer);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    dtrain_mesh_destroy(mesh);
    return result != DTRAIN_OK;
}

static run *run_on_nodes(const spec *s, int tensor, int pipeline, uint32_t mode,
                         uint32_t node_ranks)
{
    run *r = (run *)ranks_shared(sizeof *r);
    r->s = *s;
    r->node_ranks = node_ranks;
    r->s.tensor = tensor, r->s.pipeline = pipeline;
    dtrain_launch_desc desc = ranks_desc(tensor * pipeline * s->data, mode);
    desc.options.node_ranks = node_ranks;
#ifdef DTRAIN_CUDA_EMULATION
    const int misuses = nccl_mock_count.misuses;
    desc.mode = DTRAIN_LAUNCH_THREADS; /* NCCL's mock is of one process */
    desc.device_ops = dtrain_cuda_device_ops();
    if (s->seed % 2) { /* the others go through host memory */
        dtrain_emulation_set_device_count(RANKS);
        nccl_mock.delay_steps = (int)(s->seed / 2 % 5);
        nccl_mock.progress_polls = (int)(s->seed / 10 % 3);
        desc.comm_ops = dtrain_nccl_comm_ops();
    }
#endif
    CHECK_MSG(dtrain_launch(&desc, rank_main, r, NULL) == DTRAIN_OK, "seed %llu: %s",
              (unsigned long long)s->seed, dtrain_last_error());
#ifdef DTRAIN_CUDA_EMULATION
    CHECK_MSG(nccl_mock_count.misuses == misuses, "seed %llu: NCCL was misused",
              (unsigned long long)s->seed);
#endif
    return r;
}

static run *run_layout(const spec *s, int tensor, int pipeline, uint32_t mode)
{
    return run_on_nodes(s, tensor, pipeline, mode, 0);
}

static bool near(double a, double b, bool exact, double within)
{
    if (isnan(a) && isnan(b)) return true; /* fp16 overflows, and both skip the step */
    return exact ? memcmp(&a, &b, sizeof a) == 0 : fabs(a - b) <= within * (1 + fabs(b));
}

static bool check_spec(const spec *s, uint32_t mode)
{
    bool same = true;
    run *whole = run_layout(s, s->tensor, 1, DTRAIN_LAUNCH_THREADS),
        *cut = run_layout(s, s->tensor, s->pipeline, mode);
    const bool exact = !s->tied;
    const double within =
        s->flags ? 0.1 : 1e-3; /* half precision rounds what AdamW then magnifies */
    char what[400];
    snprintf(what, sizeof what,
             "seed %llu: tensor %d, pipeline %d, data %d, schedule %u of %u chunks, kind %u, %u "
             "micro, %d units, flags %u, "
             "every %u, dropout %g, clip %g, beside %d, frozen %x %x %x %x, head %d, apart %d, "
             "choice %d",
             (unsigned long long)s->seed, s->tensor, s->pipeline, s->data, s->schedule, s->chunks,
             s->kind, s->micro_batches, s->units, s->flags, s->every, (double)s->dropout,
             (double)s->clip, s->beside, s->frozen[0], s->frozen[1], s->frozen[2], s->frozen[3],
             s->frozen_head, s->apart, s->choice);
    for (int r = 0; r < s->tensor * s->pipeline * s->data; r++) {
        for (int step = 0; step <= STEPS; step++)
            same &= CHECK_MSG(near(cut->out.loss[r][step], whole->out.loss[0][step], exact, within),
                              "%s: loss %.9g in step %d of rank %d, expected %.9g", what,
                              cut->out.loss[r][step], step, r, whole->out.loss[0][step]);
        for (int step = 0; step < STEPS; step++)
            same &= CHECK_MSG(near(cut->out.norm[r][step], whole->out.norm[0][step], exact, within),
                              "%s: norm %.9g in step %d of rank %d, expected %.9g", what,
                              cut->out.norm[r][step], step, r, whole->out.norm[0][step]);
        CHECK(cut->out.ended[r] == whole->out.ended[0] &&
              cut->out.skipped[r] == whole->out.skipped[0]);
        int differ = 0;
        for (int i = 0; i < MOST; i++)
            differ += !near((double)cut->out.values[r][i], (double)whole->out.values[0][i], exact,
                            10 * within);
        same &= CHECK_MSG(differ == 0, "%s: %d values of rank %d differ", what, differ, r);
    }
    munmap(whole, sizeof *whole);
    munmap(cut, sizeof *cut);
    return same;
}

static void test_random_models(void)
{
#ifdef DTRAIN_CUDA_EMULATION
    const int count = (int)test_draws(12, 36, 100);
#else
    const int count = TEST_RACES ? 20 : (int)test_draws(150, 1000, 3000);
#endif
    for (int i = 0; i < count; i++) {
        const spec s = spec_of(7000 + (uint64_t)i);
        if (!check_spec(&s, DTRAIN_LAUNCH_THREADS)) return; /* one is enough */
    }
}

#ifndef DTRAIN_CUDA_EMULATION /* NCCL's mock has no room for them */
/* Messages that their receiver takes from where they lie, while the first rank is late, or all are by turns: what is
 * still being sent is not written to. */
static void test_long_messages(void)
{
    const int count = TEST_RACES ? 4 : (int)test_draws(10, 40, 100);
    for (int i = 0; i < count; i++) {
        spec s = spec_of(7000 + (uint64_t)i);
        s.rows = LONG;
        if (i < count / 2) {
            s.pipeline = 2, s.data = s.tensor = 1, s.units = UNITS, s.of_stage[0] = 0;
            s.schedule = (uint32_t)i % 4, s.chunks = 0, s.micro_batches = 8, s.tied = false;
            for (int u = 1; u < UNITS; u++) s.skip_from[u] = -1;
            if (s.schedule == DTRAIN_PIPELINE_INTERLEAVED) s.choice = 0; /* as in spec_of */
        }
        if (!check_spec(&s, i % 2 ? DTRAIN_LAUNCH_PROCESSES : DTRAIN_LAUNCH_THREADS)) return;
    }
}
#endif

#ifdef DTRAIN_CUDA_EMULATION
/* How often ranks wait for their devices in a run over NCCL. */
static int64_t host_waits(uint32_t micro_batches)
{
    dtrain_emulation_counters before, after;
    spec s;
    memset(&s, 0, sizeof s);
    s.units = 4, s.micro_batches = micro_batches, s.optimizer = DTRAIN_OPTIMIZER_SGD,
    s.kind = DTRAIN_STRATEGY_DDP, s.seed = 1;
    s.tensor = 1, s.pipeline = 2, s.data = 1;
    for (int u = 0; u < UNITS; u++) s.skip_from[u] = -1;
    for (int r = 0; r < RANKS; r++) s.ends[r] = 1000;
    dtrain_emulation_get_counters(&before);
    run *r = run_layout(&s, s.tensor, s.pipeline, DTRAIN_LAUNCH_THREADS);
    dtrain_emulation_get_counters(&after);
    munmap(r, sizeof *r);
    return after.host_syncs - before.host_syncs;
}

/* The last stage reads its losses once, after the schedule: no rank waits for its device in a micro-batch. */
static void test_host_waits(void)
{
    const int64_t few = host_waits(2), many = host_waits(6);
    CHECK_MSG(few > 0 && many == few, "%d waits with 2 micro-batches, %d with 6", (int)few,
              (int)many);
}
#endif

/* One tensor of each boundary goes forward and its gradient back, for each micro-batch. */
static void test_bytes(void)
{
    spec s;
    memset(&s, 0, sizeof s);
    s.units = 8, s.micro_batches = 4, s.optimizer = DTRAIN_OPTIMIZER_SGD,
    s.kind = DTRAIN_STRATEGY_DDP;
    s.tensor = 1, s.pipeline = 4, s.data = 2;
    for (int u = 0; u < UNITS; u++) s.skip_from[u] = -1;
    for (int r = 0; r < RANKS; r++) s.ends[r] = 1000;
    for (s.schedule = DTRAIN_PIPELINE_1F1B; s.schedule <= DTRAIN_PIPELINE_ZB_H1; s.schedule++) {
        const uint64_t boundary = s.micro_batches * ROWS * WIDTH * sizeof(float);
        const uint64_t norm =
            3 * 2 * sizeof(double); /* the axis also gathers two sums of its other ranks */
        run *r = run_layout(&s, s.tensor, s.pipeline, DTRAIN_LAUNCH_THREADS);
        for (int rank = 0; rank < 8; rank++) {
            const int at = rank / s.data, chunks = s.schedule >= DTRAIN_PIPELINE_INTERLEAVED &&
                                                           s.schedule != DTRAIN_PIPELINE_ZB_H1
                                                       ? 2
                                                       : 1;
            uint64_t messages = 0;
            for (int c = 0; c < chunks; c++) {
                const int stage = c * 4 + at;
                messages += (uint64_t)(stage < 4 * chunks - 1) + (stage > 0);
            }
            CHECK_MSG(r->out.bytes[rank] == messages * boundary + norm,
                      "schedule %u: rank %d sent %llu bytes, expected %llu", s.schedule, rank,
                      (unsigned long long)r->out.bytes[rank],
                      (unsigned long long)(messages * boundary + norm));
        }
        munmap(r, sizeof *r);
    }
}

#ifndef DTRAIN_CUDA_EMULATION /* the local communicator emulates links */
/* Check that a share of the bytes that a rank has sent over an axis went to other nodes; each operation rounds. */
static void check_away(const run *r, int rank, int axis, double expected)
{
    static const char *const names[] = {"tensor", "data", "pipeline"};
    const dtrain_comm_info *sent = &r->out.sent[rank][axis];
    CHECK_MSG(sent->wire_bytes > 0 &&
                  fabs((double)sent->node_bytes - expected) <= (double)sent->operation_count,
              "nodes of %u: rank %d has sent %llu of %llu bytes over the %s axis to other nodes, "
              "expected %.0f",
              r->node_ranks, rank, (unsigned long long)sent->node_bytes,
              (unsigned long long)sent->wire_bytes, names[axis], expected);
}

/* On an emulated cluster links between nodes carry the axes that cross nodes: with nodes of 4 the pipeline of
 * 2 x 2 x 2, with nodes of 2 the data axis, too; and a pipeline of 4, of which two stages share a node, at one of its
 * three boundaries. The losses are those of one node. */
static void test_nodes(void)
{
    spec s;
    memset(&s, 0, sizeof s);
    s.units = 8, s.micro_batches = 4, s.optimizer = DTRAIN_OPTIMIZER_SGD,
    s.kind = DTRAIN_STRATEGY_DDP;
    s.tensor = s.pipeline = s.data = 2;
    for (int u = 0; u < UNITS; u++) s.skip_from[u] = -1;
    for (int r = 0; r < RANKS; r++) s.ends[r] = 1000;
    run *whole = run_layout(&s, 2, 2, DTRAIN_LAUNCH_THREADS);
    for (uint32_t node = 2; node <= 4; node += 2) {
        run *r = run_on_nodes(&s, 2, 2, DTRAIN_LAUNCH_PROCESSES, node);
        CHECK(memcmp(r->out.loss, whole->out.loss, sizeof r->out.loss) == 0);
        for (int rank = 0; rank < RANKS; rank++) {
            check_away(r, rank, 0, 0);
            check_away(r, rank, 1, node == 2 ? (double)r->out.sent[rank][1].wire_bytes : 0);
            check_away(r, rank, 2, (double)r->out.sent[rank][2].wire_bytes);
        }
        munmap(r, sizeof *r);
    }
    munmap(whole, sizeof *whole);
    s.tensor = 1;
    run *r = run_on_nodes(&s, 1, 4, DTRAIN_LAUNCH_THREADS, 4);
    const double forward = (STEPS * s.micro_batches + 3) * ROWS * WIDTH * sizeof(float),
                 backward = forward - 3.0 * ROWS * WIDTH * sizeof(float); /* 3 are evaluated */
    for (int rank = 0; rank < RANKS; rank++) {
        const dtrain_comm_info *sent = &r->out.sent[rank][2];
        const uint64_t messages = sent->kind_bytes[DTRAIN_COLLECTIVE_SEND];
        const int stage = rank / 2;
        check_away(r, rank, 1, 0);
        check_away(r, rank, 2,
                   (stage == 1   ? forward
                    : stage == 2 ? backward
                                 : 0) +
                       (double)(sent->wire_bytes - messages) * 2 / 3);
    }
    munmap(r, sizeof *r);
}
#endif

/* Each ordered factorisation of eight ranks that has a pipeline, by processes. */
static void test_factorisations(void)
{
    for (int tensor = 1; tensor <= 4; tensor *= 2)
        for (int pipeline = 2; tensor * pipeline <= RANKS; pipeline *= 2) {
            spec s = spec_of(9000 + (uint64_t)(10 * tensor + pipeline));
            s.tensor = tensor, s.pipeline = pipeline, s.data = RANKS / tensor / pipeline;
            s.units = UNITS, s.tied = false, s.of_stage[0] = 0;
            s.chunks = 1;
            if (pipeline == RANKS) s.schedule = DTRAIN_PIPELINE_ZB_H1, s.chunks = 1;
            for (int u = 1; u < UNITS; u++) s.skip_from[u] = u % 3 ? -1 : u / 2;
            if (!check_spec(&s, DTRAIN_LAUNCH_PROCESSES)) return;
        }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    RUN(test_bytes);
#ifdef DTRAIN_CUDA_EMULATION
    RUN(test_host_waits);
#endif
#ifndef DTRAIN_CUDA_EMULATION
    RUN(test_nodes);
#endif
    RUN(test_random_models);
#ifndef DTRAIN_CUDA_EMULATION
    RUN(test_long_messages);
#endif
    RUN_NUMBERS(test_factorisations);
    return test_summary();
}
