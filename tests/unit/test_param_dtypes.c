/* test_param_dtypes.c: parameters in fp32, bf16, fp16 and fp64. Random programs under every kind, 1 to 8
 * ranks, against a naive trainer in double that has the ranks' gradients and nothing of a strategy.
 *
 *     ./test_param_dtypes random      only the random programs; DTRAIN_TEST_SEED=N begins with another one
 *
 * A rank's gradient depends on rank, step, micro-batch and on the value that it sees, which must have the bits of the
 * rounded master. It is written, or added, as grad_written says, in its own type. Seen to fail: a value that is not
 * rounded again after an update, or after a gather; a gradient that is not converted; a mean that is not brought back;
 * rank 0's values that stay on rank 0; values of the host drawn anew; slots of one unit for two. */
#include "test.h"
#include "dtrain.h"
#include "files.h"
#include "ranks.h"

enum { MOST_PARAMS = 7, MOST_COUNT = 60, MOST_STEPS = 5, MOST_MICRO = 3, MOST_RANKS = 8 };

typedef struct spec {
    uint32_t dtype, unit, init;
    int64_t rows, columns, count;
    int alias_of; /* -1: none */
    bool host_value, frozen;
} spec;

typedef struct program {
    uint64_t seed;
    uint32_t dtype, kind, kind_after, accumulation, node_size, param_dtype, optimizer, mode;
    int ranks, count, steps, micro, saved_after; /* -1: never */
    bool uneven, missing, no_overlap, keep, nodes, topk;
    float clip;
    spec s[MOST_PARAMS];
    /* What the ranks saw. */
    double before[MOST_STEPS + 1][MOST_PARAMS]
                 [MOST_COUNT];                        /* masters before each step, and in the end */
    double mean[MOST_STEPS][MOST_PARAMS][MOST_COUNT]; /* DDP: what came back */
    float norm[MOST_STEPS], scale[MOST_STEPS];
    bool added[MOST_RANKS][MOST_STEPS][MOST_MICRO][MOST_PARAMS];
} program;

static double element(const void *array, uint32_t dtype, int64_t e)
{
    if (dtype == DTRAIN_DTYPE_F64) return ((const double *)array)[e];
    if (dtype == DTRAIN_DTYPE_F32) return (double)((const float *)array)[e];
    return (double)dtrain_half_to_f32((dtrain_dtype)dtype, ((const uint16_t *)array)[e]);
}

static void set_element(void *array, uint32_t dtype, int64_t e, double x)
{
    if (dtype == DTRAIN_DTYPE_F64) ((double *)array)[e] = x;
    else if (dtype == DTRAIN_DTYPE_F32) ((float *)array)[e] = (float)x;
    else ((uint16_t *)array)[e] = dtrain_half_from_f32((dtrain_dtype)dtype, (float)x);
}

static double round_to(uint32_t dtype, double x)
{
    double one;
    set_element(&one, dtype, 0, x);
    return element(&one, dtype, 0);
}

static double noise(uint64_t a, uint64_t b, uint64_t c)
{
    return (double)(ranks_mix(ranks_mix(a * 1000003u + b) * 1000003u + c) >> 11) / 0x1p52 - 1;
}

static uint64_t place(int r, int s, int m, int i)
{
    return (uint64_t)(((r * MOST_STEPS + s) * MOST_MICRO + m) * MOST_PARAMS + i);
}

static double gradient(const program *p, int r, int s, int m, int i, int64_t e, double value)
{
    return round_to(p->s[i].dtype, noise(p->seed, place(r, s, m, i), (uint64_t)e) + 0.25 * value);
}

static bool is_missing(const program *p, int r, int s, int m, int i)
{
    if (!p->missing) return false;
    if (ranks_mix(p->seed + 77u * place(0, s, 0, i)) % 6 == 0) return true; /* on no rank */
    return ranks_mix(p->seed + 99u * place(r, s, m, i)) % 4 == 0;
}

static float weight_of(const program *p, int r, int s, int m)
{
    static const float weights[] = {1, 0.5f, 2, 0.25f};
    return p->uneven ? weights[ranks_mix(p->seed + 55u * place(r, s, m, 0)) % 4] : 1;
}

static bool shards_params(uint32_t kind) { return kind >= DTRAIN_STRATEGY_FULL_SHARD; }

/* What a host reads of a master. */
static double seen(const program *p, int s, int i, double master)
{
    const uint32_t kind = p->saved_after >= 0 && s > p->saved_after ? p->kind_after : p->kind;
    if (p->param_dtype && shards_params(kind) && p->ranks > 1)
        master = round_to(p->param_dtype, master);
    return round_to(p->s[i].dtype, master);
}

static int storage_of(const program *p, int i)
{
    return p->s[i].alias_of < 0 ? i : p->s[i].alias_of;
}

/* ---- a rank ---- */

typedef struct rank_job {
    program *p;
    dtrain_world *world;
    int rank;
    uint32_t kind;
    char names[MOST_PARAMS][8];
    dtrain_param params[MOST_PARAMS];
    double values[MOST_PARAMS][MOST_COUNT], grads[MOST_PARAMS][MOST_COUNT]; /* of any type */
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_state *state;
} rank_job;

static dtrain_result job_open(rank_job *job, uint64_t turn)
{
    program *p = job->p;
    dtrain_strategy_desc desc;
    dtrain_state_desc all;
    dtrain_compression_desc whole; /* top-k of everything */
    memset(&desc, 0, sizeof desc);
    memset(&all, 0, sizeof all);
    memset(&whole, 0, sizeof whole);
    for (int i = 0; i < p->count; i++) {
        const spec *s = &p->s[i];
        dtrain_param *q = &job->params[i];
        const bool host_grad = ranks_mix(p->seed + turn + 31u * place(job->rank, 0, 0, i)) % 2;
        snprintf(job->names[i], sizeof job->names[i], "p%d", i);
        *q = ranks_param(job->names[i], NULL, NULL, s->rows, s->columns);
        q->unit = s->unit;
        q->init = s->init;
        q->init_scale = 0.5f;
        q->dtype = s->alias_of < 0 || s->init % 2 ? s->dtype : 0;
        if (s->alias_of >= 0) q->alias_of = &job->params[s->alias_of];
        if (s->frozen) q->flags = DTRAIN_PARAM_FROZEN;
        for (int64_t e = 0; e < s->count; e++) {
            set_element(job->values[i], s->dtype, e,
                        noise(p->seed + turn, (uint64_t)(i + 100 * job->rank), (uint64_t)e));
            set_element(job->grads[i], s->dtype, e, 1e4);
        }
        if (s->alias_of >= 0) continue;
        if (s->dtype && s->host_value) q->typed_value = job->values[i];
        if (s->dtype && host_grad) q->typed_grad = job->grads[i];
        if (!s->dtype && s->host_value) q->value = (float *)job->values[i];
        if (!s->dtype && host_grad) q->grad = (float *)job->grads[i];
    }
    desc.kind = job->kind;
    desc.accumulation = p->accumulation;
    desc.hierarchical =
        p->nodes && job->kind != DTRAIN_STRATEGY_ZERO3 && job->kind != DTRAIN_STRATEGY_HYBRID_SHARD;
    desc.node_size =
        desc.hierarchical || job->kind == DTRAIN_STRATEGY_HYBRID_SHARD ? p->node_size : 0;
    desc.param_dtype = shards_params(job->kind) ? p->param_dtype : 0;
    desc.no_overlap = p->no_overlap;
    desc.keep_after_forward = p->keep && shards_params(job->kind);
    whole.kind = DTRAIN_COMPRESSION_TOPK;
    whole.topk_ratio = 1;
    whole.dense_below = 1;
    whole.dense_steps = 1;
    if (p->topk && job->kind == DTRAIN_STRATEGY_DDP) desc.compression = &whole;
    desc.bucket_bytes = 256;
    desc.init_seed = p->seed + turn;
    TRY(dtrain_strategy_create(job->world, job->params, (size_t)p->count, &desc, &job->strategy));
    dtrain_optimizer_desc how = dtrain_optimizer_defaults((dtrain_optimizer_kind)p->optimizer);
    how.weight_decay = 0.1f;
    how.epsilon = p->optimizer == DTRAIN_OPTIMIZER_ADAMW ? 1e-3f : 0;
    how.momentum = p->optimizer == DTRAIN_OPTIMIZER_SGD ? 0.75f : 0;
    TRY(dtrain_optimizer_create(job->world, job->strategy, &how, &job->optimizer));
    all.strategy = job->strategy;
    all.optimizer = job->optimizer;
    return dtrain_state_create(job->world, &all, &job->state);
}

static void job_close(rank_job *job)
{
    dtrain_state_destroy(job->state);
    dtrain_optimizer_destroy(job->optimizer);
    dtrain_strategy_destroy(job->strategy);
    for (int i = 0; i < job->p->count; i++) { /* nothing of the library's is left */
        const dtrain_param *q = &job->params[i];
        const spec *s = &job->p->s[i];
        CHECK(q->value ==
              (!s->dtype && s->host_value && s->alias_of < 0 ? (void *)job->values[i] : NULL));
        CHECK(q->typed_value ==
              (s->dtype && s->host_value && s->alias_of < 0 ? job->values[i] : NULL));
        CHECK(!s->dtype || !q->grad);
    }
}

/* Read masters: all ranks get rank 0's bits. */
static dtrain_result job_read(rank_job *job, int s, double masters[MOST_PARAMS][MOST_COUNT])
{
    const uint32_t dtype = job->p->dtype == DTRAIN_DTYPE_F64 ? DTRAIN_DTYPE_F64 : DTRAIN_DTYPE_F32;
    double memory[MOST_COUNT];
    for (int i = 0; i < job->p->count; i++) {
        TRY(dtrain_strategy_read(job->strategy, (size_t)i, memory));
        for (int64_t e = 0; e < job->p->s[i].count; e++) masters[i][e] = element(memory, dtype, e);
    }
    if (job->rank == 0) memcpy(job->p->before[s], masters, sizeof job->p->before[s]);
    return dtrain_strategy_verify(job->strategy, NULL);
}

/* The value of an entry, as its host reads it, has the bits of the rounded master. */
static void check_seen(const rank_job *job, int s, int i, const double *masters)
{
    const program *p = job->p;
    const dtrain_param *q = &job->params[i];
    const void *array = q->dtype ? q->typed_value : q->value;
    for (int64_t e = 0; e < p->s[i].count; e++) {
        const double expected = seen(p, s, i, masters[e]);
        if (!CHECK_MSG(array && element(array, p->s[i].dtype, e) == expected,
                       "seed %llu step %d rank %d: p%d (%s) [%lld]: sees %g, master rounds to %g",
                       (unsigned long long)p->seed, s, job->rank, i,
                       dtrain_dtype_name((dtrain_dtype)q->dtype), (long long)e,
                       array ? element(array, p->s[i].dtype, e) : 0.0, expected))
            return;
    }
}

static dtrain_result emit(rank_job *job, int s, int m, int i)
{
    program *p = job->p;
    const dtrain_param *q = &job->params[i];
    const uint32_t dtype = p->s[i].dtype;
    const void *value = q->dtype ? q->typed_value : q->value;
    void *grad = q->dtype ? q->typed_grad : q->grad;
    const bool add = q->state.grad_written;
    p->added[job->rank][s][m][i] = add;
    for (int64_t e = 0; e < p->s[i].count; e++) {
        const double g = gradient(p, job->rank, s, m, i, e, element(value, dtype, e));
        set_element(grad, dtype, e, add ? element(grad, dtype, e) + g : g);
    }
    return dtrain_strategy_ready(job->strategy, (size_t)i);
}

static dtrain_result job_pass(rank_job *job, int s, int m, double masters[MOST_PARAMS][MOST_COUNT])
{
    const program *p = job->p;
    const int units = (int)p->s[p->count - 1].unit + 1;
    TRY(dtrain_strategy_accumulate(job->strategy, m + 1 < p->micro));
    if (p->uneven) TRY(dtrain_strategy_weight(job->strategy, weight_of(p, job->rank, s, m)));
    for (int u = 0; u < 2 * units; u++) {
        const bool back = u >= units;
        const uint32_t unit = (uint32_t)(back ? 2 * units - 1 - u : u);
        TRY(dtrain_strategy_gather(job->strategy, unit,
                                   back ? DTRAIN_PASS_BACKWARD : DTRAIN_PASS_FORWARD));
        for (int i = p->count - 1; i >= 0; i--) {
            if (p->s[i].unit != unit) continue;
            check_seen(job, s, i, masters[i]);
            if (back && !p->s[i].frozen && !is_missing(p, job->rank, s, m, i))
                TRY(emit(job, s, m, i));
        }
        TRY(dtrain_strategy_release(job->strategy, unit));
        for (int i = 0; i < p->count; i++)
            CHECK(!p->s[i].dtype || p->dtype == DTRAIN_DTYPE_F64 ||
                  !job->params[i].value == !job->params[i].typed_value);
    }
    return dtrain_strategy_finish(job->strategy);
}

static dtrain_result job_step(rank_job *job, int s)
{
    program *p = job->p;
    double masters[MOST_PARAMS][MOST_COUNT] = {{0}};
    TRY(job_read(job, s, masters));
    for (int m = 0; m < p->micro; m++) TRY(job_pass(job, s, m, masters));
    for (int i = 0; i < p->count && job->rank == 0 && job->kind == DTRAIN_STRATEGY_DDP; i++)
        for (int64_t e = 0; e < p->s[i].count && !p->s[i].frozen; e++)
            p->mean[s][i][e] =
                element(job->params[i].dtype ? job->params[i].typed_grad : job->params[i].grad,
                        p->s[i].dtype, e);
    TRY(dtrain_grad_norm(job->strategy, NULL, p->clip, &p->norm[s], &p->scale[s]));
    return dtrain_optimizer_step(job->optimizer, 0.05f, p->scale[s]);
}

/* Save, forget everything, and continue from the checkpoint under another kind. */
static dtrain_result job_restart(rank_job *job)
{
    dtrain_checkpoint_desc desc;
    dtrain_checkpoint *checkpoint;
    char directory[300];
    memset(&desc, 0, sizeof desc);
    snprintf(directory, sizeof directory, "%s/%u-%llu", folder, job->p->dtype,
             (unsigned long long)job->p->seed);
    desc.directory = directory;
    desc.state = job->state;
    TRY(dtrain_checkpoint_open(job->world, &desc, &checkpoint));
    TRY(dtrain_checkpoint_save(checkpoint, 1, 0));
    TRY(dtrain_checkpoint_close(checkpoint));
    job_close(job);
    job->kind = job->p->kind_after;
    TRY(job_open(job, 5));
    return dtrain_checkpoint_load(job->state, directory, NULL, NULL);
}

static dtrain_result job_run(rank_job *job)
{
    double masters[MOST_PARAMS][MOST_COUNT] = {{0}};
    TRY(job_open(job, 0));
    for (int s = 0; s < job->p->steps; s++) {
        TRY(job_step(job, s));
        if (s == job->p->saved_after) TRY(job_restart(job));
    }
    TRY(job_read(job, job->p->steps, masters));
    job_close(job);
    return DTRAIN_OK;
}

static int rank_main(dtrain_world *world, void *user)
{
    rank_job *job = (rank_job *)calloc(1, sizeof *job);
    job->p = (program *)user;
    job->world = world;
    job->rank = dtrain_world_rank(world);
    job->kind = job->p->kind;
    RANKS_TRY(job_run(job));
    free(job);
    return 0;
}

/* ---- the oracle ---- */

typedef struct oracle {
    double value[MOST_PARAMS][MOST_COUNT], m[MOST_PARAMS][MOST_COUNT], v[MOST_PARAMS][MOST_COUNT];
    double grad[MOST_PARAMS][MOST_COUNT];
    bool any[MOST_PARAMS];
    int t[MOST_PARAMS];
} oracle;

/* The mean of a step: of each rank the sum of what its array held whenever it was written anew, and in the end. */
static void oracle_gradients(const program *p, oracle *o, int s)
{
    double weights = 0;
    memset(o->grad, 0, sizeof o->grad);
    memset(o->any, 0, sizeof o->any);
    for (int r = 0; r < p->ranks; r++) {
        double array[MOST_PARAMS][MOST_COUNT] = {{0}};
        for (int m = 0; m < p->micro; m++) {
            weights += (double)weight_of(p, r, s, m);
            for (int i = p->count - 1; i >= 0; i--) {
                const int at = storage_of(p, i);
                if (p->s[i].frozen || is_missing(p, r, s, m, i)) continue;
                o->any[at] = true;
                for (int64_t e = 0; e < p->s[i].count; e++) {
                    const double g = gradient(p, r, s, m, i, e, seen(p, s, i, p->before[s][at][e]));
                    if (p->added[r][s][m][i])
                        array[at][e] = round_to(p->s[i].dtype, array[at][e] + g);
                    else o->grad[at][e] += array[at][e], array[at][e] = g;
                }
            }
        }
        for (int i = 0; i < p->count; i++)
            for (int64_t e = 0; e < p->s[i].count; e++) o->grad[i][e] += array[i][e];
    }
    for (int i = 0; i < p->count; i++)
        for (int64_t e = 0; e < p->s[i].count; e++) o->grad[i][e] *= p->micro / weights;
}

static void oracle_update(const program *p, oracle *o, int i, double scale)
{
    const double lr = (double)0.05f, decay = p->s[i].columns ? (double)0.1f : 0, b1 = (double)0.9f,
                 b2 = (double)0.999f;
    const int t = ++o->t[i];
    const double c1 = (double)(float)(1 - pow(b1, t)),
                 c2 = (double)(float)(1 - pow(b2, t)); /* kernels have floats */
    for (int64_t e = 0; e < p->s[i].count; e++) {
        double *x = &o->value[i][e], *m = &o->m[i][e], *v = &o->v[i][e], g = scale * o->grad[i][e];
        if (p->optimizer == DTRAIN_OPTIMIZER_SGD) {
            *m = 0.75 * *m + g + decay * *x;
            *x -= lr * *m;
            continue;
        }
        *m = b1 * *m + (1 - b1) * g;
        *v = b2 * *v + (1 - b2) * g * g;
        *x -= lr * decay * *x;
        *x -= lr * (*m / c1) / (sqrt(*v / c2) + (double)1e-3f);
    }
}

static bool near_to(double a, double b, double relative)
{
    return fabs(a - b) <= relative * (fabs(b) + 0.1);
}

static void oracle_check(const program *p)
{
    const unsigned long long seed = p->seed;
    const bool wide = p->dtype == DTRAIN_DTYPE_F64;
    oracle *o = (oracle *)calloc(1, sizeof *o);
    for (int i = 0; i < p->count; i++)
        for (int64_t e = 0; e < p->s[i].count; e++) {
            o->value[i][e] = p->before[0][i][e];
            if (p->s[storage_of(p, i)].host_value) /* rank 0's */
                CHECK(p->before[0][i][e] ==
                      round_to(p->s[i].dtype,
                               noise(p->seed, (uint64_t)storage_of(p, i), (uint64_t)e)));
        }
    for (int s = 0; s < p->steps; s++) {
        double squares = 0, scale = 1;
        oracle_gradients(p, o, s);
        for (int i = 0; i < p->count; i++)
            for (int64_t e = 0; e < p->s[i].count; e++) squares += o->grad[i][e] * o->grad[i][e];
        CHECK_MSG(near_to((double)p->norm[s], sqrt(squares), 1e-5),
                  "seed %llu step %d: norm %g, expected %g", seed, s, (double)p->norm[s],
                  sqrt(squares));
        if (p->clip > 0 && sqrt(squares) > (double)p->clip)
            scale = (double)p->clip / (sqrt(squares) + 1e-6);
        CHECK(near_to((double)p->scale[s], scale, 1e-5));
        scale = (double)p->scale[s];
        for (int i = 0; i < p->count; i++) {
            const double ulp = wide                                 ? 1e-14
                               : p->s[i].dtype == DTRAIN_DTYPE_BF16 ? 0x1p-8
                               : p->s[i].dtype                      ? 0x1p-11
                                                                    : 1e-6;
            const bool ddp =
                (p->saved_after >= 0 && s > p->saved_after ? p->kind_after : p->kind) ==
                DTRAIN_STRATEGY_DDP;
            const int at = storage_of(p, i);
            if (at == i && o->any[i]) oracle_update(p, o, i, scale);
            for (int64_t e = 0; e < p->s[i].count; e++) {
                if (ddp && !p->s[i].frozen &&
                    !CHECK_MSG(fabs(p->mean[s][i][e] - o->grad[at][e]) <=
                                   ulp * fabs(o->grad[at][e]) + (wide ? 1e-14 : 1e-6),
                               "seed %llu step %d: p%d[%d]: mean %g, expected %g", seed, s, i,
                               (int)e, p->mean[s][i][e], o->grad[at][e]))
                    break;
                if (!CHECK_MSG(
                        near_to(p->before[s + 1][i][e], o->value[at][e], wide ? 1e-13 : 2e-5),
                        "seed %llu step %d: p%d (%s)[%d] %.8g, expected %.8g", seed, s, i,
                        dtrain_dtype_name((dtrain_dtype)p->s[i].dtype), (int)e,
                        p->before[s + 1][i][e], o->value[at][e]))
                    break;
            }
        }
    }
    free(o);
}

/* ---- random programs ---- */

static void program_draw_param(program *p, int i, uint64_t *state, uint32_t dtype)
{
    static const uint32_t inits[] = {DTRAIN_INIT_CONSTANT, DTRAIN_INIT_NORMAL, DTRAIN_INIT_UNIFORM};
    spec *s = &p->s[i];
    s->dtype = dtype == DTRAIN_DTYPE_F64 ? dtype
               : dtype ? (ranks_random(state, 5) ? dtype : (uint32_t)ranks_random(state, 3))
                       : 0;
    s->unit = i == 0 ? 0 : p->s[i - 1].unit + (ranks_random(state, 2) ? 1 : 0);
    s->init = inits[ranks_random(state, 3)];
    s->rows = 1 + (int64_t)ranks_random(state, 10);
    s->columns = ranks_random(state, 2) ? 1 + (int64_t)ranks_random(state, 6) : 0;
    s->alias_of = -1;
    s->frozen = ranks_random(state, 8) == 0 && i > 0;
    s->host_value =
        ranks_random(state, 2) && !shards_params(p->kind) && !shards_params(p->kind_after);
    if (i > 1 && ranks_random(state, 4) == 0) {
        const spec *target = &p->s[0];
        s->alias_of = 0;
        s->dtype = target->dtype;
        s->rows = target->rows;
        s->columns = target->columns;
        s->frozen = s->host_value = false;
    }
    s->count = s->rows * (s->columns ? s->columns : 1);
}

static void program_draw(program *p, uint64_t seed, uint32_t dtype)
{
    uint64_t state = seed * 7919u + dtype;
    memset(p, 0, sizeof *p);
    p->seed = seed;
    p->dtype = dtype;
    p->ranks = 1 + (int)(seed % 8);
    p->kind = 1 + (uint32_t)ranks_random(&state, 6);
    p->kind_after = 1 + (uint32_t)ranks_random(&state, 6);
    p->steps = 2 + (int)ranks_random(&state, 4);
    p->saved_after = ranks_random(&state, 2) ? (int)ranks_random(&state, (uint64_t)p->steps) : -1;
    if (p->saved_after < 0) p->kind_after = p->kind;
    p->micro = 1 + (int)ranks_random(&state, 3);
    p->mode = ranks_random(&state, 4) ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES;
    p->node_size = p->ranks % 2 ? (uint32_t)p->ranks : 2;
    p->accumulation =
        ranks_random(&state, 2) ? DTRAIN_ACCUMULATION_LAST : DTRAIN_ACCUMULATION_DEFAULT;
    p->param_dtype = (uint32_t)ranks_random(&state, 3);
    p->optimizer = ranks_random(&state, 2) ? DTRAIN_OPTIMIZER_ADAMW : DTRAIN_OPTIMIZER_SGD;
    p->uneven = ranks_random(&state, 2);
    p->missing = ranks_random(&state, 2);
    p->no_overlap = ranks_random(&state, 4) == 0;
    p->keep = ranks_random(&state, 4) == 0;
    p->nodes = ranks_random(&state, 3) == 0;
    p->topk = ranks_random(&state, 3) == 0;
    p->clip = ranks_random(&state, 2) ? 0.5f : 0;
    p->count = 1 + (int)ranks_random(&state, MOST_PARAMS);
    if (dtype == DTRAIN_DTYPE_F64) p->param_dtype = 0, p->topk = false;
    for (int i = 0; i < p->count; i++) program_draw_param(p, i, &state, dtype);
}

static void run_programs(uint32_t dtype)
{
    const uint64_t first = test_seed(), count = test_full() ? 400 : 48;
    program *p = (program *)ranks_shared(sizeof *p);
    for (uint64_t seed = first; seed < first + count; seed++) {
        const long failed = test_shared->failed_checks;
        program_draw(p, seed, dtype);
        ranks_run(p->ranks, p->mode, rank_main, p);
        if (test_shared->failed_checks == failed) oracle_check(p);
        if (test_shared->failed_checks == failed) continue;
        printf("  seed %llu, dtype %u: kind %u, then %u, %d ranks, %d micro-batches, accumulation "
               "%u\n",
               (unsigned long long)seed, dtype, p->kind, p->kind_after, p->ranks, p->micro,
               p->accumulation);
        return;
    }
}

static void test_random_f32(void) { run_programs(DTRAIN_DTYPE_F32); }
static void test_random_bf16(void) { run_programs(DTRAIN_DTYPE_BF16); }
static void test_random_f16(void) { run_programs(DTRAIN_DTYPE_F16); }
static void test_random_f64(void) { run_programs(DTRAIN_DTYPE_F64); }

/* ---- parts of parameters ---- */

/* 2 x 2 ranks: a parameter of which each rank of the tensor axis has half the rows, and a whole one. Gradients along
 * the data axis are 1 and 2. */
static dtrain_result mesh_train(dtrain_world *world, const dtrain_mesh *mesh, uint32_t kind,
                                bool own)
{
    dtrain_param p[2] = {ranks_param("cut", NULL, NULL, 6, 5),
                         ranks_param("whole", NULL, NULL, 4, 3)};
    dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    uint16_t memory[2][30];
    float before[2][30], after[30];
    dtrain_mesh_info info;
    dtrain_strategy_desc desc;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    memset(&desc, 0, sizeof desc);
    dtrain_mesh_query(mesh, &info);
    desc.kind = kind;
    desc.mesh = mesh;
    for (int i = 0; i < 2; i++) {
        for (int e = 0; e < 30; e++)
            set_element(memory[i], DTRAIN_DTYPE_BF16, e, noise(1, (uint64_t)(e + i), 0));
        p[i].dtype = DTRAIN_DTYPE_BF16;
        p[i].typed_value = own ? memory[i] : NULL;
        p[i].init = DTRAIN_INIT_NORMAL;
        p[i].init_scale = 1;
    }
    p[0].cut.axis = DTRAIN_CUT_ROWS;
    TRY(dtrain_strategy_create(world, p, 2, &desc, &strategy));
    TRY(dtrain_optimizer_create(world, strategy, &sgd, &optimizer));
    for (int s = 0; s < 3; s++) {
        for (size_t i = 0; i < 2; i++) TRY(dtrain_strategy_read(strategy, i, before[i]));
        TRY(dtrain_strategy_gather(strategy, 0, DTRAIN_PASS_FORWARD));
        TRY(dtrain_strategy_gather(strategy, 0, DTRAIN_PASS_BACKWARD));
        for (int i = 0; i < 2; i++) {
            const float *part = before[i] + (i == 0 ? 15 * info.tensor_rank : 0);
            CHECK(p[i].count == (i == 0 ? 15 : 12));
            for (int64_t e = 0; e < p[i].count; e++) {
                CHECK(element(p[i].typed_value, DTRAIN_DTYPE_BF16, e) ==
                      round_to(DTRAIN_DTYPE_BF16, (double)part[e]));
                set_element(p[i].typed_grad, DTRAIN_DTYPE_BF16, e, 1 + info.data_rank);
            }
            TRY(dtrain_strategy_ready(strategy, (size_t)i));
        }
        TRY(dtrain_strategy_finish(strategy));
        TRY(dtrain_optimizer_step(optimizer, 0.25f, 1));
        for (size_t i = 0; i < 2; i++) {
            TRY(dtrain_strategy_read(strategy, i, after));
            for (int e = 0; e < (i == 0 ? 30 : 12); e++)
                CHECK(fabsf(after[e] - (before[i][e] - 0.25f * 1.5f)) <= 1e-6f);
        }
        TRY(dtrain_strategy_verify(strategy, NULL));
    }
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return DTRAIN_OK;
}

static int mesh_main(dtrain_world *world, void *user)
{
    dtrain_mesh_desc how;
    dtrain_mesh *mesh;
    (void)user;
    memset(&how, 0, sizeof how);
    how.tensor = how.data = 2;
    RANKS_TRY(dtrain_mesh_create(world, &how, &mesh));
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_FULL_SHARD; kind++) {
        RANKS_TRY(mesh_train(world, mesh, kind, false));
        if (!shards_params(kind)) RANKS_TRY(mesh_train(world, mesh, kind, true));
    }
    dtrain_mesh_destroy(mesh);
    return 0;
}

static void test_mesh(void) { ranks_run(4, DTRAIN_LAUNCH_PROCESSES, mesh_main, NULL); }

/* ---- bytes, and what is refused ---- */

typedef struct refusal {
    uint32_t kind, dtype, alias_dtype, flags;
    bool value, typed_value, differs;
    const char *says;
} refusal;

static int refused_main(dtrain_world *world, void *user)
{
    const refusal *r = (const refusal *)user;
    float memory[4] = {0};
    dtrain_param params[2] = {ranks_param("w", r->value ? memory : NULL, NULL, 4, 0),
                              ranks_param("tied", NULL, NULL, 4, 0)};
    dtrain_strategy_desc desc;
    dtrain_strategy *strategy = NULL;
    memset(&desc, 0, sizeof desc);
    desc.kind = r->kind;
    params[0].dtype = r->differs ? (uint32_t)dtrain_world_rank(world) : r->dtype;
    params[0].flags = r->flags;
    params[0].typed_value = r->typed_value ? memory : NULL;
    params[1].alias_of = params;
    params[1].dtype = r->alias_dtype;
    const dtrain_result result = dtrain_strategy_create(world, params, 2, &desc, &strategy);
    CHECK_MSG(result != DTRAIN_OK && strstr(dtrain_last_error(), r->says),
              "expected \"%s\", found \"%s\"", r->says,
              result == DTRAIN_OK ? "no error" : dtrain_last_error());
    CHECK(params[0].value == (r->value ? memory : NULL));
    return 0;
}

static void test_refused(void)
{
    static const refusal all[] = {
        {0, 3, 0, 0, false, false, false, "dtype is 3 (i32), expected F32, BF16, F16 or F64"},
        {0, 1, 0, 0, true, false, false,
         "with which the host's arrays are typed_value and typed_grad"},
        {0, 0, 0, 0, false, true, false, "with which the host's arrays are value and grad"},
        {0, 1, 2, 0, false, false, false,
         "its dtype is f16, \"w\" that it is an alias of has bf16"},
        {0, 1, 0, DTRAIN_PARAM_BUFFER, false, false, false,
         "it is a buffer, which ranks average in fp32"},
        {DTRAIN_STRATEGY_FULL_SHARD, 1, 0, 0, false, true, false,
         "full_shard shards parameters and has to own"},
        {0, 0, 0, 0, false, false, true, "dtype"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        ranks_run(2, DTRAIN_LAUNCH_THREADS, refused_main, (void *)(uintptr_t)&all[i]);
}

/* What fp64 does not have is refused by its name. */
static int wide_main(dtrain_world *world, void *user)
{
    static const char *const says[] = {"fp64, which has no compression",
                                       "fp64, which has no param_dtype",
                                       "fp64, which has no reduce_dtype", "fp64, or none"};
    dtrain_optimizer_desc lion = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_LION);
    dtrain_compression_desc how;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    (void)user;
    memset(&how, 0, sizeof how);
    how.kind = DTRAIN_COMPRESSION_TOPK;
    for (int i = 0; i < 5; i++) {
        dtrain_param p[2] = {ranks_param("a", NULL, NULL, 4, 4),
                             ranks_param("b", NULL, NULL, 4, 4)};
        dtrain_strategy_desc desc;
        memset(&desc, 0, sizeof desc);
        p[0].dtype = p[1].dtype = DTRAIN_DTYPE_F64;
        if (i == 0) desc.compression = &how;
        if (i == 1) desc.kind = DTRAIN_STRATEGY_FULL_SHARD, desc.param_dtype = DTRAIN_DTYPE_BF16;
        if (i == 2) desc.reduce_dtype = DTRAIN_DTYPE_F16;
        if (i == 3) p[1].dtype = 0;
        const dtrain_result result = dtrain_strategy_create(world, p, 2, &desc, &strategy);
        if (i < 4) {
            CHECK(result == (i == 3 ? DTRAIN_ERROR_ARGUMENT : DTRAIN_ERROR_UNSUPPORTED));
            CHECK_MSG(strstr(dtrain_last_error(), says[i]), "%s", dtrain_last_error());
            continue;
        }
        CHECK(result == DTRAIN_OK);
        CHECK(dtrain_optimizer_create(world, strategy, &lion, &optimizer) ==
              DTRAIN_ERROR_UNSUPPORTED);
        CHECK(dtrain_checkpoint_export(strategy, path_of("w.safetensors"), NULL) ==
              DTRAIN_ERROR_UNSUPPORTED);
        dtrain_strategy_destroy(strategy);
    }
    return 0;
}

static void test_wide_refused(void) { ranks_run(2, DTRAIN_LAUNCH_THREADS, wide_main, NULL); }

static int tape_main(dtrain_world *world, void *user)
{
    dtrain_param p = ranks_param("w", NULL, NULL, 4, 4);
    dtrain_strategy *strategy;
    dtrain_tape *tape;
    float x[4] = {0};
    const int64_t shape[4] = {1, 4, 0, 0};
    (void)user;
    p.dtype = DTRAIN_DTYPE_BF16;
    RANKS_TRY(dtrain_strategy_create(world, &p, 1, NULL, &strategy));
    RANKS_TRY(dtrain_tape_create(world, strategy, NULL, &tape));
    RANKS_TRY(dtrain_tape_begin(tape, 0, 0));
    (void)dtrain_linear(tape, dtrain_tape_input(tape, DTRAIN_DTYPE_F32, 2, shape, x, false), &p,
                        NULL, DTRAIN_ACTIVATION_NONE);
    CHECK_MSG(
        strstr(dtrain_last_error(), "parameter w has dtype bf16, and the tape computes with fp32"),
        "%s", dtrain_last_error());
    dtrain_tape_destroy(tape);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static void test_tape_refuses(void) { ranks_run(1, DTRAIN_LAUNCH_THREADS, tape_main, NULL); }

/* A plan counts what a strategy holds: of 1024 elements 4 bytes each for the master and for the sum, 2 for each array
 * in bf16, whoever owns it. */
static int bytes_main(dtrain_world *world, void *user)
{
    static const uint64_t values[] = {6144, 6144, 6144, 2048}, grads[] = {6144, 6144, 2048, 2048};
    static uint16_t memory[1024];
    for (uint32_t kind = DTRAIN_STRATEGY_DDP; kind <= DTRAIN_STRATEGY_FULL_SHARD; kind++)
        for (int own = 0; own < 2; own++) {
            dtrain_param p = ranks_param("w", NULL, NULL, 32, 32);
            dtrain_strategy_desc desc;
            dtrain_strategy *strategy;
            dtrain_strategy_info info;
            dtrain_memory memory_of;
            memset(&desc, 0, sizeof desc);
            desc.kind = kind;
            p.dtype = DTRAIN_DTYPE_BF16;
            if (own && kind < DTRAIN_STRATEGY_FULL_SHARD) p.typed_value = memory;
            RANKS_TRY(dtrain_strategy_plan(&p, 1, &desc, 2, &memory_of));
            RANKS_TRY(dtrain_strategy_create(world, &p, 1, &desc, &strategy));
            dtrain_strategy_query(strategy, &info);
            CHECK(info.value_bytes == values[kind - 1] && info.grad_bytes == grads[kind - 1]);
            CHECK(memory_of.params == info.value_bytes && memory_of.grads == info.grad_bytes);
            CHECK(memory_of.buffers == info.buffer_bytes);
            dtrain_strategy_destroy(strategy);
        }
    (void)user;
    return 0;
}

static void test_bytes(void) { ranks_run(2, DTRAIN_LAUNCH_PROCESSES, bytes_main, NULL); }

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    if (!files_begin("param_dtypes")) return 1;
    RUN(test_random_f32);
    RUN(test_random_bf16);
    RUN(test_random_f16);
    RUN(test_random_f64);
    RUN(test_mesh);
    RUN(test_refused);
    RUN(test_wide_refused);
    RUN(test_tape_refuses);
    RUN(test_bytes);
    if (!files_end()) return 1;
    return test_summary();
}
